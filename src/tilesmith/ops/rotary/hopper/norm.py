"""rms_norm_rope on Hopper: configurations, refusals and launchers."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tilesmith.device.alignment import aligned_vector, tma_view
from tilesmith.device.gluon.shim import TensorDescriptor, gl
from tilesmith.device.triton.column_sums import add_partials
from tilesmith.engine import Space, cdiv, launch, next_power_of_2, optimize_kernel, register_kernel, rehearsed
from tilesmith.hardware.detect import arch_of
from tilesmith.ops.rotary.arguments import rms_norm_rope_arguments, rms_norm_rope_vjp_arguments
from tilesmith.ops.rotary.hopper.norm_backward import norm_rope_bwd_tiles_kernel
from tilesmith.ops.rotary.hopper.norm_forward import norm_rope_fwd_rows_kernel
from tilesmith.ops.rotary.rows import row_stride, rows_grid


class TilesConfig(NamedTuple):
    """steps: of a tile, in each of which a warp loads whole lines. slots: pipeline stages of tiles. per_sm: CTAs per
    multiprocessor. max_registers: per thread; 0 leaves it to the compiler."""

    steps: int
    num_warps: int
    slots: int
    per_sm: int
    max_registers: int


class _Side(NamedTuple):
    """How q or k is cut into tiles [tokens, heads · steps] and those are shared out."""

    tokens: int
    heads: int
    steps: int
    head_blocks: int
    tiles: int  # of a block of heads
    token_blocks: int  # tiles of a row of the batch
    even: bool

    @property
    def lines(self) -> int:
        """Of a tile."""
        return self.tokens * self.heads * self.steps

    def flags(self, side: str) -> dict[str, int]:
        return {f"{side}_TOKENS": self.tokens, f"{side}_HEADS": self.heads, f"{side}_STEPS": self.steps}

    def shares(self, ctas: int) -> tuple[int, ...]:
        """What the kernel takes from `blocks` to `tiles`."""
        return self.head_blocks, ctas, self.token_blocks, *divmod(ctas, self.token_blocks), self.tiles


def _side(x: Tensor, row: bool, config: TilesConfig) -> _Side:
    """x [B, H, T, D] in tiles. row: all heads of a token are normalised together."""
    batch, num_heads, num_tokens, dim = x.shape
    at_once, heads, warps, steps = 512 // dim, next_power_of_2(num_heads), config.num_warps, config.steps
    if row:  # a warp has heads of one token
        share = max(1, min(warps, heads // (at_once * steps)))
        tokens, steps = warps // share, max(1, heads // (at_once * share))
        block = share * at_once
    else:
        steps = min(steps, heads)
        block = min(heads // steps, warps * at_once)
        tokens = warps * at_once // block
    blocks = cdiv(num_tokens, tokens)
    head_blocks = cdiv(num_heads, block * steps)
    even = num_heads % (block * steps) == 0 and num_tokens % tokens == 0
    return _Side(tokens, block, steps, head_blocks, batch * blocks, blocks, even)


def _ctas(x: Tensor, sides: Sequence[_Side | None], config: TilesConfig) -> list[int]:
    """How many CTAs work on the tiles of each side's blocks of heads: in proportion to its tiles, and none with fewer
    tiles than its neighbours if that frees a whole CTA."""
    works = [0 if side is None else side.tiles * side.head_blocks * side.lines for side in sides]
    left, found = max(1, arch_of(x.device).sms) * config.per_sm, []
    for i, (side, work) in enumerate(zip(sides, works)):
        if side is None:
            found.append(0)
        else:
            share = round(left * work / sum(works[i:])) // side.head_blocks
            found.append(cdiv(side.tiles, cdiv(side.tiles, max(1, min(share, side.tiles)))))
            left -= found[-1] * side.head_blocks
    return found


def _grid(sides: Sequence[_Side | None], ctas: Sequence[int]) -> int:
    """The CTAs of a launch, over all blocks of heads of both sides."""
    return sum(side.head_blocks * number for side, number in zip(sides, ctas) if side is not None)


def _described(x: Tensor, side: _Side) -> TensorDescriptor:
    """x [B, H, T, D] as [B, T, H, D] for TMA, in tiles."""
    x, (row, head, token, last) = tma_view(x)
    x = x.transpose(1, 2)
    layout = gl.NVMMASharedLayout(swizzle_byte_width=0, element_bitwidth=8 * x.element_size(), rank=4)
    tile = [1, side.tokens, side.heads * side.steps, x.shape[3]]
    return TensorDescriptor(x, list(x.shape), [row, token, head, last], tile, layout)


class _Where(NamedTuple):
    """The arguments that say where tokens are."""

    cos: Tensor
    sin: Tensor
    positions: Tensor | None
    offsets: Tensor | None
    offset: int

    def arguments(self) -> tuple:
        cos, sin, positions, offsets = self.cos, self.sin, self.positions, self.offsets
        by_position = (None, 0, 0) if positions is None else (positions, row_stride(positions, 2), positions.stride(-1))
        return (
            cos, sin, row_stride(cos, 3), row_stride(sin, 3), cos.stride(-2), sin.stride(-2), cos.shape[-2],
            *by_position, offsets, 0 if offsets is None else offsets.stride(0), self.offset,
        )  # fmt: skip


def _flags(
    where: _Where, dim: int, sides: Sequence[_Side | None], strided: Sequence[Tensor], config: TilesConfig
) -> dict[str, Any]:
    """What a kernel is compiled and launched with. dim: of a head; strided: what is read and written by strides."""
    sides = [side for side in sides if side is not None]
    reaches = [
        x.stride(1) * side.heads * side.steps + x.stride(2) * side.tokens
        for x in strided
        if x.ndim == 4
        for side in sides
    ]
    flags = {"PER_TOKEN": where.cos.ndim == 3, "EVEN": all(side.even for side in sides), "FAR": max(reaches) >= 2**31}
    flags |= sides[0].flags("Q") | sides[-1].flags("K") | {"P": dim // 2, "num_warps": config.num_warps}
    return {**flags, "maxnreg": config.max_registers} if config.max_registers else flags


def _dims(q: Tensor, k: Tensor | None, norm_dim: str) -> dict[str, int]:
    """group: features that are normalised together."""
    batch, heads, tokens, dim = q.shape
    heads = max(heads, 0 if k is None else k.shape[1])
    return {"tokens": batch * tokens, "dim": dim, "group": dim if norm_dim == "head" else dim * heads}


def _warps(dims: Mapping[str, int]) -> int:
    """The warps of a CTA that holds a whole row: so many that each thread has two steps of it. dims: from `_dims`."""
    return 8 if dims["group"] > 4096 else 4


def _forward_default(dims: Mapping[str, int], arch: Any, dtype: torch.dtype) -> TilesConfig:
    """H200, bf16, 16,384 tokens of 32 and 8 heads of 128: 0.944 to 0.951 of the copy rate; by Triton 0.93. Persistent
    CTAs with tiles loaded ahead reach 0.87."""
    return TilesConfig(2, _warps(dims), 0, 0, 0)


def _backward_default(dims: Mapping[str, int], arch: Any, dtype: torch.dtype) -> TilesConfig:
    """A default for the backward: two pipeline stages for heads, one for whole rows. H200, bf16, head dims 128 and 64:
    0.93 to 0.96 of the copy rate, and 0.94 and 0.90 by Triton. More figures: docs/log/rotary.md."""
    if dims["group"] == dims["dim"]:
        return TilesConfig(2, 2, 1, 6, 0)
    warps = _warps(dims)
    return TilesConfig(2, warps, 2, 8 // warps, 0)


WIDEST = 8192  # features of a row that is normalised as a whole


def _reasons(call: Any) -> list[str]:
    dim, pairs, found = call.q.cols, call.cos.cols, []
    for name, facts in call._asdict().items():
        if getattr(facts, "dtype", None) == torch.float64:
            found.append(f"{name} is float64; these kernels compute in float32")
        elif name in ("q", "k", "dq_out", "dk_out") and facts is not None:
            if facts.dtype not in (torch.bfloat16, torch.float16) or facts.dtype != call.q.dtype:
                found.append(f"{name} has dtype {facts.dtype}; these kernels serve bfloat16 or float16, of all of them")
            if name in ("q", "k") and not facts.unit:
                found.append(f"{name} has a last stride other than 1")
    if dim not in (64, 128, 256) or 2 * pairs != dim:
        found.append(f"{2 * pairs} of {dim} features turn; these kernels turn all of 64, 128 or 256")
    if call.interleaved or not (call.cos.unit and call.sin.unit):
        found.append("pairs are neighbours, or the angles of a position are not; these kernels turn halves of a line")
    if call.cu_seqlens is not None:
        found.append("documents are packed; these kernels do not search for their starts")
    if call.norm_dim == "row":
        found += _row_reasons(call)
    return found


def _row_reasons(call: Any) -> list[str]:
    weights = [call.q_weight] if call.k is None else [call.q_weight, call.k_weight]
    if None in weights:
        return ["there is no weight to tell how wide a row is"]
    widest = max(weight.cols for weight in weights)
    return [f"a row has {widest} features; these kernels hold up to {WIDEST}"] if widest > WIDEST else []


def _forward_reasons(call: Any) -> list[str]:
    return _reasons(call) + ([] if call.norm_dim == "row" else ["heads are normalised one by one"])


def _vjp_reasons(call: Any) -> list[str]:
    wanted = [call.dq_out is not None and call.output_mask[0]]
    if call.k is not None:
        wanted.append(call.dk_out is not None and call.output_mask[1])
    return _reasons(call) + ([] if all(wanted) else ["there is no gradient to begin with, or dq or dk is not wanted"])


def _fit(config: TilesConfig, dims: Mapping[str, int], arch: Any, dtype: torch.dtype) -> TilesConfig:
    """`config` with no more slots than shared memory holds."""
    tile = 2 * dtype.itemsize * max(next_power_of_2(dims["group"]), 512 * config.num_warps * config.steps)
    room = arch.shared_memory // max(1, config.per_sm) - 2048
    return config._replace(slots=max(1, min(config.slots, room // tile)))


CHOICES = {"steps": (1, 2, 4), "num_warps": (2, 4, 8)}
LOOP_CHOICES = {**CHOICES, "num_warps": (1, 2, 4, 8), "slots": (1, 2, 3), "per_sm": (1, 2, 4, 6, 8)}


def _tells(call) -> list[str]:
    """How q and k are shared out."""
    sides = "q" if call.k is None else "q and k, each with CTAs of its own"
    normalised = (
        "a row of all heads is normalised as one" if call.norm_dim == "row" else "heads are normalised one by one"
    )
    return [f"one launch for {sides}, {normalised}"]


@register_kernel(
    "rms_norm_rope",
    backend="hopper",
    rank=25,
    rejects=_forward_reasons,
    tells=rms_norm_rope_arguments(_tells),
    plans=rehearsed,
)
@optimize_kernel(space=Space(default=_forward_default, dims=lambda q, k, *rest: _dims(q, k, rest[9]), choices=CHOICES))
@rms_norm_rope_arguments
def rms_norm_rope(call, *, config: TilesConfig) -> tuple[Tensor, Tensor]:
    """One launch for q and k; each has CTAs of its own."""
    q = call.q
    where = _Where(call.cos, call.sin, call.positions, call.offsets, call.offset)
    given = [(x, weight) for x, weight in ((q, call.q_weight), (call.k, call.k_weight)) if x is not None]
    sides = [_side(x, True, config) for x, _ in given]
    outs = [torch.empty_like(x) for x, _ in given]
    group = max(side.tokens for side in sides)
    each = sum(group // side.tokens for side in sides)
    arguments = [
        (
            words,
            *(stride // 2 for stride in words.stride()[:3]),
            out,
            *out.stride()[:3],
            aligned_vector(weight),
            words.shape[1],
        )
        for words, weight, out in ((tma_view(x)[0], weight, out) for (x, weight), out in zip(given, outs))
    ]
    first, second = [*arguments, (None, 0, 0, 0, None, 0, 0, 0, None, 0)][:2]
    batch, _, num_tokens, dim = q.shape
    if batch * num_tokens:
        flags = _flags(where, dim, sides, [*outs, *(x for x, _ in given)], config)
        flags["EVEN"] = flags["EVEN"] and num_tokens % group == 0
        launch(
            norm_rope_fwd_rows_kernel, (cdiv(num_tokens, group) * each, *rows_grid(batch)),
            *first, *second, *where.arguments(), batch, num_tokens, call.eps, call.weight_offset or None,
            LLAMA=call.casting == "llama", **flags,
        )  # fmt: skip
    return outs[0], outs[1] if len(outs) > 1 else q.new_empty(0)


@register_kernel(
    "rms_norm_rope_vjp",
    backend="hopper",
    rank=25,
    rejects=_vjp_reasons,
    tells=rms_norm_rope_vjp_arguments(_tells),
    plans=rehearsed,
)
@optimize_kernel(
    space=Space(
        default=_backward_default,
        dims=lambda dq_out, dk_out, q, k, *rest: _dims(q, k, rest[9]),
        choices=LOOP_CHOICES,
        fit=_fit,
    )
)
@rms_norm_rope_vjp_arguments
def rms_norm_rope_vjp(call, *, config: TilesConfig) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """One launch for q and k, each with CTAs of its own, then one for the sums of partial rows."""
    q = call.q
    row, where = call.norm_dim == "row", _Where(call.cos, call.sin, call.positions, call.offsets, call.offset)
    given = [
        (call.dq_out, q, aligned_vector(call.q_weight), call.output_mask[2]),
        (call.dk_out, call.k, aligned_vector(call.k_weight), call.output_mask[3]),
    ]
    sides = [None if x is None or not x.numel() else _side(x, row, config) for _, x, _, _ in given]
    ctas = _ctas(q, sides, config)
    dx = [q.new_empty(0) if x is None else torch.empty_like(x) for _, x, _, _ in given]
    partials, dweights, arguments = [], [], []
    for (dout, x, weight, sums), side, number, to in zip(given, sides, ctas, dx):
        wanted = x is not None and weight is not None and sums
        lines = 0 if side is None else number * (side.tokens if row else side.head_blocks)
        partials.append(x.new_empty(lines, weight.shape[0], dtype=torch.float32) if wanted else None)
        dweights.append(weight.new_empty(weight.shape) if wanted else None)
        if side is not None:
            arguments.append(
                (_described(x, side), _described(dout, side), to, *to.stride()[:3], weight, partials[-1])
                + (x.shape[1], *side.shares(number))
            )
    if arguments:
        absent = (None, None, None, 0, 0, 0, None, None, 0, 0, 0, 0, 0, 0, 0)
        first, second = [*arguments, absent][:2]
        launch(
            norm_rope_bwd_tiles_kernel, (_grid(sides, ctas),), *first, *second, *where.arguments(),
            q.shape[2], call.eps, call.weight_offset or None,
            ROW=row, SLOTS=config.slots, **_flags(where, q.shape[3], sides, dx, config),
        )  # fmt: skip
    add_partials(tuple(partials), tuple(dweights))
    return *dx, *(q.new_empty(0) if dweight is None else dweight for dweight in dweights)
