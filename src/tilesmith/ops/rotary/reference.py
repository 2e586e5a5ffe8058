"""What rotary position embedding means, in plain PyTorch."""

from collections.abc import Sequence

import torch
from torch import Tensor

from tilesmith.engine.argument_checks import packed, readable


def rope(
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
    """Rotate pairs of features of queries and keys by angles that grow with the position (RoPE, arXiv:2104.09864).

    A pair (a, b) becomes (a cos - b sin, b cos + a sin). The first R features of a head form R/2 pairs; the other D - R
    are copied.

    The position of token t in row b is the first of: ``positions[b, t]`` if given; with ``cu_seqlens``, the index of t
    inside its document; t. ``offset`` and ``offsets`` are added to the last two. A position that the table does not
    hold gives NaN.

    Args:
        q: [B, H, T, D], any strides (memory in [B, T, H, D] order is the usual case).
        k: [B, G, T, D] of q's dtype, or None. Its heads may have another size than q's, of R features or more.
        cos, sin: one angle per pair, [P, R/2] indexed by position, or [B, T, R/2] or [1, T, R/2] for each token, which
            leaves no use for a position. Any floating dtype and strides: of tables that hold each angle twice, pass the
            view ``cos[..., : R // 2]`` (halves repeated) or ``cos[..., ::2]`` (neighbours repeated).
        positions: [B, T] or [T] int32 or int64.
        offsets: [B] int32 or int64, one for each row; with ``cu_seqlens`` one for each document.
        cu_seqlens: [N + 1] int32 or int64 starting at 0: document n of the one packed row (B = 1) is the tokens
            cu_seqlens[n] up to cu_seqlens[n + 1]. Tokens past the last boundary continue the last document.
        offset: added to every position that is counted. With ``positions`` it must be 0, and offsets None.
        interleaved: features (2i, 2i + 1) form a pair (GPT-J); otherwise (i, i + R/2) (GPT-NeoX, Llama).
        last: the last R features of a head are rotated in place of the first (latent attention, arXiv:2405.04434).
        halved: with ``interleaved``, what becomes of pair i goes to features (i, i + R/2) (DeepSeek-V3).

    Returns:
        (q_out, k_out), each with the shape, dtype and memory order of its input (dense, as ``torch.empty_like`` lays it
        out); k_out is an empty tensor if ``k`` is None.

    Computed in at least float32 and rounded once. Code that rounds each product to the model's dtype (Hugging Face's
    ``apply_rotary_pos_emb`` in bfloat16) differs by up to its own rounding. cos and sin get no gradient.

    Raises ValueError or TypeError for shapes and dtypes other than these, and for a table shorter than T + offset. On a
    CPU also for a position that the table does not hold, and for cu_seqlens that do not ascend from 0.
    """
    cos, sin = angles_of(q, cos, sin, positions, offsets, cu_seqlens, offset)
    how = (interleaved, interleaved and not halved, last)
    return rotate(q, cos, sin, *how), q.new_empty(0) if k is None else rotate(k, cos, sin, *how)


def rope_vjp(
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
    """Gradients of `rope`: the incoming ones rotated by the opposite angles.

    Either incoming gradient may be None (undefined, hence zero); its place in the result is an empty tensor, as where
    ``output_mask`` is False. The memory order is that of the incoming gradient.

    dq_out: [B, H, T, D], dk_out: [B, G, T, D], floating. cos, sin, positions, offsets, cu_seqlens, offset, interleaved,
    last, halved: those of the forward. Returns (dq, dk) in the dtype of the incoming gradients, computed in fp32 (fp64
    for fp64).
    """
    dq_out, dk_out = (d if wanted else None for d, wanted in zip((dq_out, dk_out), output_mask, strict=True))
    given = dq_out if dq_out is not None else dk_out
    if given is None:
        return cos.new_empty(0), cos.new_empty(0)
    cos, sin = angles_of(given, cos, sin, positions, offsets, cu_seqlens, offset)
    how = (interleaved and not halved, interleaved, last)
    dq, dk = (given.new_empty(0) if d is None else rotate(d, cos, -sin, *how) for d in (dq_out, dk_out))
    return dq, dk


def angles_of(
    x: Tensor,
    cos: Tensor,
    sin: Tensor,
    positions: Tensor | None,
    offsets: Tensor | None,
    cu_seqlens: Tensor | None,
    offset: int,
    op: str = "rope",
) -> tuple[Tensor, Tensor]:
    """The angles of every token of x, [B or 1, T, R/2]; NaN at positions that the table does not hold."""
    if cos.ndim == 3:
        return cos, sin
    named = "one of positions"
    if positions is None:
        named = "a position with offsets" if offsets is not None else "a position"
        positions = torch.arange(x.shape[2], device=x.device)
        if cu_seqlens is not None:
            packed(f"{op}: cu_seqlens", cu_seqlens)
            document = torch.searchsorted(cu_seqlens, positions.to(cu_seqlens.dtype), right=True) - 1
            document = document.clamp(0, cu_seqlens.shape[0] - 2)
            positions = positions - cu_seqlens[document]
            offsets = None if offsets is None else offsets[document]
        elif offsets is not None:
            offsets = offsets[:, None]
        positions = positions + (offset if offsets is None else offsets + offset)
    positions = positions.long() if positions.ndim == 2 else positions.long()[None]
    held = ((positions >= 0) & (positions < cos.shape[0]))[..., None]
    if readable(held) and not held.all():
        raise ValueError(
            f"{op}: {named} is {int(positions[~held[..., 0]][0])}; cos holds the positions 0 … "
            f"{cos.shape[0] - 1}: make tables as long as the longest sequence"
        )
    positions = positions.clamp(0, cos.shape[0] - 1)
    return cos[positions].where(held, float("nan")), sin[positions].where(held, float("nan"))


def rotate(
    x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool, stored: bool | None = None, last: bool = False
) -> Tensor:
    """`turned` in x's dtype and memory order."""
    return torch.empty_like(x).copy_(turned(x, cos, sin, interleaved, stored, last))


def turned(
    x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool, stored: bool | None = None, last: bool = False
) -> Tensor:
    """x [B, heads, T, D] with its first, or its last, R features rotated by the angles [B or 1, T, R/2], in fp32 (fp64
    for fp64). interleaved: neighbours form a pair; stored: its result are neighbours, as in x if None."""
    acc = torch.promote_types(x.dtype, torch.float32)
    cos, sin = cos[:, None].to(acc), sin[:, None].to(acc)
    pairs = cos.shape[-1]
    start = x.shape[-1] - 2 * pairs if last else 0
    before, rotated, behind = x.to(acc).tensor_split((start, start + 2 * pairs), dim=-1)
    if interleaved:
        first, second = rotated[..., 0::2], rotated[..., 1::2]
    else:
        first, second = rotated[..., :pairs], rotated[..., pairs:]
    pair = (first * cos - second * sin, second * cos + first * sin)
    stored = interleaved if stored is None else stored
    both = torch.stack(pair, dim=-1).flatten(-2) if stored else torch.cat(pair, dim=-1)
    return torch.cat((before, both, behind), dim=-1)
