"""The rotary family: what rope is, what it accepts and which kernels it has.

Legend: B batch rows, T tokens of a row, H query heads, G key heads, D head dim, R <= D rotated features of a head,
P positions of an angle table, N packed documents.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from tilesmith.engine import Op
from tilesmith.engine.argument_checks import INTEGERS, floating
from tilesmith.engine.sharding import spread
from tilesmith.engine.tracing import small
from tilesmith.ops.rotary import reference


def _fake(
    q: Tensor,
    k: Tensor | None,
    cos: Tensor,
    sin: Tensor,
    positions: Tensor | None = None,
    offsets: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    offset: int = 0,
    interleaved: bool = False,
    last: bool = False,
    halved: bool = False,
) -> tuple[Tensor, Tensor]:
    return torch.empty_like(q), q.new_empty(0) if k is None else torch.empty_like(k)


def _fake_vjp(
    dq_out: Tensor | None,
    dk_out: Tensor | None,
    cos: Tensor,
    sin: Tensor,
    positions: Tensor | None,
    offsets: Tensor | None,
    cu_seqlens: Tensor | None,
    offset: int,
    interleaved: bool,
    last: bool,
    halved: bool,
    output_mask: Sequence[bool],
) -> tuple[Tensor, Tensor]:
    wanted = [d if want else None for d, want in zip((dq_out, dk_out), output_mask, strict=True)]
    given = next((d for d in wanted if d is not None), cos)
    dq, dk = (given.new_empty(0) if d is None else torch.empty_like(d) for d in wanted)
    return dq, dk


def _check(
    q: Tensor,
    k: Tensor | None,
    cos: Tensor,
    sin: Tensor,
    positions: Tensor | None = None,
    offsets: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    offset: int = 0,
    interleaved: bool = False,
    last: bool = False,
    halved: bool = False,
) -> None:
    check_rotation("rope", q, k, cos, sin, positions, offsets, cu_seqlens, offset, alike=False)
    if k is not None and 2 * cos.shape[-1] > k.shape[3]:
        raise ValueError(
            f"rope: cos has {cos.shape[-1]} angles, which rotate {2 * cos.shape[-1]} features, but k's heads have "
            f"{k.shape[3]}; pass k with at least as many"
        )
    if halved and not interleaved:
        raise ValueError(
            "rope: halved is given without interleaved; it says where the results of neighbouring features go: pass "
            "interleaved=True, or leave it out"
        )


def check_rotation(
    op: str,
    q: Tensor,
    k: Tensor | None,
    cos: Tensor,
    sin: Tensor,
    positions: Tensor | None,
    offsets: Tensor | None,
    cu_seqlens: Tensor | None,
    offset: int,
    alike: bool = True,
) -> None:
    """Raise ValueError or TypeError for what `rope`, or an op that does the same, cannot rotate. alike: whether heads
    of k must have q's size."""
    shape, dtype, device = q.shape, q.dtype, q.device
    if len(shape) != 4:
        raise ValueError(f"{op}: q has shape {tuple(shape)}; it must be [B, H, T, D]")
    floating(op, "q", q)
    if k is not None:
        size = shape[3] if alike or k.ndim != 4 else k.shape[3]
        if k.ndim != 4 or k.shape != (shape[0], k.shape[1], shape[2], size):
            needed = f"[{shape[0]}, G, {shape[2]}, {shape[3] if alike else 'D'}]"
            raise ValueError(f"{op}: k has shape {tuple(k.shape)}; for this q it must be {needed}")
        if k.dtype != dtype:
            raise TypeError(f"{op}: k has dtype {k.dtype}, q has {dtype}; they must match")
        if k.device != device:
            raise ValueError(f"{op}: k is on {k.device}, q on {device}; move them to one device")
    table = cos.shape
    _check_angles(op, shape, device, table, cos, sin)
    if len(table) == 3:
        _check_no_position(op, positions, offsets, cu_seqlens, offset)
    elif positions is not None:
        _check_positions(op, shape, device, positions, offsets, cu_seqlens, offset)
    elif offset < 0:
        raise ValueError(f"{op}: offset is {offset}; it must be 0 or more")
    elif offsets is None and cu_seqlens is None:
        if shape[2] + offset > table[0]:
            raise ValueError(
                f"{op}: cos holds {table[0]} positions; {shape[2]} tokens from offset {offset} need "
                f"{shape[2] + offset}: make longer tables"
            )
    else:
        _check_starts(op, shape, device, offsets, cu_seqlens)


def _check_angles(
    op: str, shape: Sequence[int], device: torch.device, table: Sequence[int], cos: Tensor, sin: Tensor
) -> None:
    if sin.shape != table or sin.dtype != cos.dtype:
        raise ValueError(
            f"{op}: sin is {tuple(sin.shape)} {sin.dtype}, cos {tuple(table)} {cos.dtype}; they must match"
        )
    floating(op, "cos", cos)
    if cos.device != device or sin.device != device:
        raise ValueError(f"{op}: cos is on {cos.device}, sin on {sin.device}, q on {device}; move them to one device")
    batch, _, tokens, dim = shape
    if not (len(table) == 2 or (len(table) == 3 and (table[0] == 1 or table[0] == batch) and table[1] == tokens)):
        raise ValueError(
            f"{op}: cos has shape {tuple(table)}; it must be [positions, R/2], [1, {tokens}, R/2] "
            f"or [{batch}, {tokens}, R/2]"
        )
    if 2 * table[-1] > dim:
        raise ValueError(
            f"{op}: cos has {table[-1]} angles, which rotate {2 * table[-1]} features, but D is {dim}; "
            "give one angle for each pair: cos[..., : R // 2] or cos[..., ::2] of a table that holds each angle twice"
        )


def _check_no_position(
    op: str, positions: Tensor | None, offsets: Tensor | None, cu_seqlens: Tensor | None, offset: int
) -> None:
    given = {"positions": positions, "offsets": offsets, "cu_seqlens": cu_seqlens, "offset": offset or None}
    for name, value in given.items():
        if value is not None:
            raise ValueError(
                f"{op}: {name} is given, but cos has three dims and so is already the angle of each token; "
                "give cos and sin as [positions, R/2] tables"
            )


def _check_positions(
    op: str,
    shape: Sequence[int],
    device: torch.device,
    positions: Tensor,
    offsets: Tensor | None,
    cu_seqlens: Tensor | None,
    offset: int,
) -> None:
    for name, value in {"offsets": offsets, "cu_seqlens": cu_seqlens, "offset": offset or None}.items():
        if value is not None:
            raise ValueError(f"{op}: {name} is given with positions, which are final; add it to them instead")
    _check_integers(op, "positions", positions, device)
    batch, _, tokens, _ = shape
    if positions.shape not in ((tokens,), (1, tokens), (batch, tokens)):
        raise ValueError(
            f"{op}: positions has shape {tuple(positions.shape)}; it must be [{tokens}] or [{batch}, {tokens}]"
        )


def _check_starts(
    op: str, shape: Sequence[int], device: torch.device, offsets: Tensor | None, cu_seqlens: Tensor | None
) -> None:
    rows, what = shape[0], "row"
    if cu_seqlens is not None:
        _check_integers(op, "cu_seqlens", cu_seqlens, device)
        if rows != 1:
            raise ValueError(f"{op}: cu_seqlens is given with a batch of {rows}; pack the documents in one row, B = 1")
        if cu_seqlens.ndim != 1 or cu_seqlens.shape[0] < 2:
            raise ValueError(
                f"{op}: cu_seqlens has shape {tuple(cu_seqlens.shape)}; it must be [N + 1] for N >= 1 documents"
            )
        rows, what = cu_seqlens.shape[0] - 1, "document"
    if offsets is not None:
        _check_integers(op, "offsets", offsets, device)
        if offsets.shape != (rows,):
            raise ValueError(
                f"{op}: offsets has shape {tuple(offsets.shape)}; it must be [{rows}], one for each {what}"
            )


def _check_integers(op: str, name: str, value: Tensor, device: torch.device) -> None:
    if value.dtype not in INTEGERS:
        raise TypeError(f"{op}: {name} has dtype {value.dtype}; it must be int32 or int64")
    if value.device != device:
        raise ValueError(f"{op}: {name} is on {value.device}, q on {device}; move them to one device")


def _spread(op: Op, args: tuple) -> tuple[Tensor, Tensor]:
    named = dict(zip(op.parameters, args))
    pattern, starts = angle_dims(**{name: named[name] for name in ("cos", "positions", "offsets", "cu_seqlens")})
    tokens = "T" if named["cu_seqlens"] is not None else "t"
    heads = f"bh{tokens}D bh{tokens}E"
    return spread(op, args, f"{heads} {pattern} -> {heads}", starts)


def angle_dims(
    cos: Tensor, positions: Tensor | None, offsets: Tensor | None, cu_seqlens: Tensor | None
) -> tuple[str, dict[str, str]]:
    """The dims of cos, sin, positions, offsets and cu_seqlens beside q [b, h, t, D], and what counts from a start."""
    table = ("b" if cos.shape[0] > 1 else "O") + "tR" if cos.ndim == 3 else "PR"
    place = "t"
    if positions is not None and positions.ndim == 2:
        place = "bt" if positions.shape[0] > 1 else "Ot"
    counted = cos.ndim == 2 and positions is None and cu_seqlens is None
    return f"{table} {table} {place} {'b' if cu_seqlens is None else 'N'} S", {"offset": "t"} if counted else {}


rope_vjp = Op(
    reference.rope_vjp,
    fake=_fake_vjp,
    outputs=("dq", "dk"),
    kernels={"triton": "tilesmith.ops.rotary.triton.rope"},
)

# Not in place, where only the rotated part of a head would move (H200, bf16, 40 heads of 16,384 tokens, 64 of 128
# features rotated: Liger, which does so, 46 µs, this 84): an op that writes its arguments has no gradient, the gradient
# that comes back may be somebody else's too, and models that cut the rotated part out join it with the rest by a copy.
rope = Op(
    reference.rope,
    fake=_fake,
    vjp=rope_vjp,
    outputs=("q_out", "k_out"),
    public=2,
    check=_check,
    kernels={"triton": "tilesmith.ops.rotary.triton.rope"},
    decompose=reference.rope,
    when=small,
    sharding=_spread,
)
