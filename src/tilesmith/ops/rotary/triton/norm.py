"""Launchers of rms_norm_rope in Triton: one launch norms and rotates q and k; one takes both gradients."""

from typing import NamedTuple

import torch
from torch import Tensor

from tilesmith.device.rows import dense
from tilesmith.device.triton.column_sums import add_partials, partial_rows, starts_early
from tilesmith.engine import Space, cdiv, launch, next_power_of_2, optimize_kernel, register_kernel, rehearsed
from tilesmith.hardware.detect import arch_of
from tilesmith.ops.rotary.arguments import rms_norm_rope_arguments, rms_norm_rope_vjp_arguments
from tilesmith.ops.rotary.rows import row_stride, rows_grid
from tilesmith.ops.rotary.triton.norm_kernels import rms_norm_rope_bwd_kernel, rms_norm_rope_fwd_kernel
from tilesmith.ops.rotary.triton.rope import (
    double_reasons,
)


class NormRopeConfig(NamedTuple):
    """block_tokens, block_heads: a tile, where a head is normalised; where a row is, as many heads as make up one with
    its warps. steps: tiles of heads that share angles. num_stages, programs: of the backward's loop."""

    block_tokens: int
    block_heads: int
    steps: int
    num_warps: int
    num_stages: int
    programs: int


class _Tile(NamedTuple):
    tokens: int
    heads: int
    steps: int
    num_warps: int


class _Where(NamedTuple):
    """The arguments that say where tokens are and how pairs lie, as both kernels take them."""

    cos: Tensor
    sin: Tensor
    positions: Tensor | None
    offsets: Tensor | None
    cu_seqlens: Tensor | None
    offset: int
    interleaved: bool

    def pointers(self) -> tuple:
        cos = self.cos
        # Absent tensors are stood in for by one that is never read through them.
        by_position, by_row, by_document = (
            cos if x is None else x for x in (self.positions, self.offsets, self.cu_seqlens)
        )
        return (
            cos, self.sin, row_stride(cos, 3), row_stride(self.sin, 3),
            by_position, row_stride(by_position, 2), by_position.stride(-1), by_row, by_row.stride(0),
            by_document, by_document.stride(0), self.offset, cos.shape[-2],
        )  # fmt: skip

    def documents(self) -> tuple[int, int]:
        documents = 1 if self.cu_seqlens is None else self.cu_seqlens.shape[0] - 1
        return documents, (documents - 1).bit_length()

    def flags(self, dim: int) -> dict:
        cos, sin, pairs = self.cos, self.sin, self.cos.shape[-1]
        return {
            "COS_POSITION": cos.stride(-2), "COS_PAIR": cos.stride(-1), "SIN_POSITION": sin.stride(-2),
            "SIN_PAIR": sin.stride(-1), "PER_TOKEN": cos.ndim == 3, "POSITIONS": self.positions is not None,
            "OFFSETS": self.offsets is not None, "PACKED": self.cu_seqlens is not None,
            "INTERLEAVED": self.interleaved, "PAIRS": pairs, "DIM": dim,
            "BLOCK_PAIRS": next_power_of_2(max(1, pairs)), "BLOCK_REST": next_power_of_2(max(1, dim - 2 * pairs)),
        }  # fmt: skip


def _tile(x: Tensor, row: bool, config: NormRopeConfig) -> _Tile:
    if not row:
        return _Tile(config.block_tokens, config.block_heads, config.steps, config.num_warps)
    # A row has as many warps as it takes, each with at most two steps; of narrow rows a warp has several.
    heads, each = next_power_of_2(x.shape[1]), max(1, config.block_tokens * config.block_heads // config.num_warps)
    steps = min(config.steps, 2, max(1, heads // each))
    tokens = min(max(1, each // heads), next_power_of_2(max(1, x.shape[2])))
    return _Tile(tokens, heads // steps, steps, max(1, min(16, heads // (steps * each))))


def _together(q_weight: Tensor | None, k: Tensor | None, k_weight: Tensor | None, row: bool) -> bool:
    """Whether one launch serves q and k: heads of the same kind, weights of one dtype or none."""
    kinds = [None if w is None else w.dtype for w in (q_weight, k_weight)]
    return k is not None and not row and kinds[0] == kinds[1]


def _launch_tells(q_weight: Tensor | None, k: Tensor | None, k_weight: Tensor | None, row: bool) -> str:
    """Why one launch serves q and k, or each has one."""
    if k is None:
        return "one launch, for q"
    if _together(q_weight, k, k_weight, row):
        return "one launch for q and k, which share their angles"
    why = "rows of all heads are normalised" if row else "their weights differ in dtype, or one has none"
    return f"one launch for q and one for k: {why}"


def _forward_tells(call, *, config: NormRopeConfig) -> list[str]:
    return [_launch_tells(call.q_weight, call.k, call.k_weight, call.norm_dim == "row")]


def _backward_tells(call, *, config: NormRopeConfig) -> list[str]:
    sides = _sides(call)
    if None in sides:
        found = [name for name, side in zip("qk", sides) if side is not None]
        return [f"one launch, for {found[0]}"] if found else ["no kernel: nothing is wanted"]
    if not _alike(sides):
        return ["one launch for q and one for k: different gradients of them are wanted"]
    return [_launch_tells(call.q_weight, call.k, call.k_weight, call.norm_dim == "row")]


def _sides(call) -> list[tuple[bool, bool] | None]:
    """Of q and k: whether dx and whether dweight is to be computed; None where neither is."""
    sides: list[tuple[bool, bool] | None] = []
    for i, (dout, x) in enumerate(((call.dq_out, call.q), (call.dk_out, call.k))):
        wanted = bool(call.output_mask[i]), bool(call.output_mask[i + 2])
        sides.append(None if dout is None or x is None or not any(wanted) else wanted)
    return sides


def _alike(sides: list[tuple[bool, bool] | None]) -> bool:
    """Whether the same gradients of q and k are wanted."""
    return None not in sides and sides[0] == sides[1]


def _norm_rotate(
    q: Tensor,
    k: Tensor | None,
    weights: tuple[Tensor | None, Tensor | None],
    outs: tuple[Tensor, Tensor | None],
    where: _Where,
    row: bool,
    numbers: tuple[float, float],
    llama: bool,
    config: NormRopeConfig,
) -> None:
    batch, q_heads, num_tokens, dim = q.shape
    k_heads = 0 if k is None else k.shape[1]
    # Pairs of neighbours take twice the registers while they are put together.
    tile = _tile(q, row, config._replace(steps=min(2, config.steps)) if where.interleaved else config)
    k_steps = min(tile.steps, next_power_of_2(max(1, cdiv(k_heads, tile.heads))))
    head_blocks = cdiv(q_heads, tile.heads * tile.steps) + cdiv(k_heads, tile.heads * k_steps)
    token_blocks = cdiv(num_tokens, tile.tokens)
    if batch * token_blocks * head_blocks == 0:
        return
    # the strides of an absent k, which nothing is read by
    strides = q.stride() if k is None else k.stride()
    out_strides = strides if k is None else outs[1].stride()
    launch(
        rms_norm_rope_fwd_kernel, (head_blocks * token_blocks, *rows_grid(batch)),
        q, *q.stride(), outs[0], *outs[0].stride(), k, *strides, outs[1], *out_strides, *weights, *where.pointers(),
        batch, num_tokens, q_heads, k_heads, *where.documents(), *numbers,
        ROW=row, LLAMA=llama, BLOCK_TOKENS=tile.tokens, BLOCK_HEADS=tile.heads, num_warps=tile.num_warps,
        HEAD_BLOCKS=head_blocks, STEPS=tile.steps, K_STEPS=k_steps, **where.flags(dim),
    )  # fmt: skip


class _Side(NamedTuple):
    """q or k, and what its gradient needs; dx is None where it is not wanted."""

    dout: Tensor
    x: Tensor
    weight: Tensor | None
    dx: Tensor | None
    sums: bool


def _stages(x: Tensor, tile: _Tile, config: NormRopeConfig) -> int:
    """Stages whose tiles of x and dy fit into shared memory, which those of whole rows fill."""
    stage = 2 * tile.tokens * tile.heads * tile.steps * next_power_of_2(x.shape[3]) * x.element_size()
    room = arch_of(x.device).shared_memory - 1024
    return max(1, min(config.num_stages, room // stage + 1)) if room > 0 else config.num_stages


def _differentiate(
    q: _Side, k: _Side | None, where: _Where, row: bool, numbers: tuple[float, float], config: NormRopeConfig
) -> list[Tensor]:
    """Fill dx of q, and of k in the same launch; the partial sums [partials, D or H D] of each one's dweight."""
    batch, q_heads, num_tokens, dim = q.x.shape
    k_heads = 0 if k is None else k.x.shape[1]
    tile = _tile(q.x, row, config._replace(steps=1) if row else config)
    heads = tile.heads * tile.steps
    q_blocks, k_blocks = cdiv(q_heads, heads), cdiv(k_heads, heads)
    token_blocks = cdiv(num_tokens, tile.tokens)
    tiles, head_blocks = batch * token_blocks, q_blocks + k_blocks
    programs = max(1, config.programs * config.num_warps // tile.num_warps)
    if row:  # as many for each multiprocessor
        sms = max(1, arch_of(q.x.device).sms)
        programs = cdiv(programs, sms) * sms
    strips = partial_rows(tiles, head_blocks, programs, cdiv(8, tile.tokens)) if tiles and head_blocks else 0
    width = q_heads * dim if row else dim
    partial = q.x.new_empty((1 if row else head_blocks) * strips, width, dtype=torch.float32)
    if strips:
        other = q if k is None else k
        sides = []
        for side in (q, other):
            dx = side.x if side.dx is None else side.dx
            sides += [side.dout, *side.dout.stride(), side.x, *side.x.stride(), dx, *dx.stride()]
        launch(
            rms_norm_rope_bwd_kernel, (strips * head_blocks,),
            *sides, q.weight, other.weight, partial if q.sums else None, *where.pointers(),
            num_tokens, token_blocks, tiles, strips, q_heads, k_heads, *where.documents(), *numbers,
            ROW=row, WANTS_DX=q.dx is not None, BLOCK_TOKENS=tile.tokens, BLOCK_HEADS=tile.heads,
            HEAD_BLOCKS=head_blocks, STEPS=tile.steps, STAGES=_stages(q.x, tile, config),
            CHAINED=q.sums and starts_early(q.x.device), num_warps=tile.num_warps, **where.flags(dim),
        )  # fmt: skip
    return [partial] if row or k is None else [partial[: q_blocks * strips], partial[q_blocks * strips :]]


def _reasons(call) -> list[str]:
    named = {"q": call.q, "cos": call.cos, "q_weight": call.q_weight, "k_weight": call.k_weight}
    wide = [
        f"{name} has {weight.cols} elements; this kernel holds rows of up to {WIDEST} in registers"
        for name, weight in (("q_weight", call.q_weight), ("k_weight", call.k_weight))
        if call.norm_dim == "row" and weight is not None and weight.cols > WIDEST
    ]
    return double_reasons(named) + wide


WIDEST = 16_384  # features of a row that is normalised as a whole


def _size(q: Tensor, k: Tensor | None) -> dict[str, int]:
    batch, heads, tokens, dim = q.shape
    return {"tokens": batch * tokens, "heads": heads + (0 if k is None else k.shape[1]), "dim": dim}


def _forward_default(dims, arch, dtype) -> NormRopeConfig:
    # Four steps that share angles: 0.955 of the copy rate on an H200 in bf16. What was tried without gain:
    # docs/log/rotary.md.
    heads, lines, warps = _lines(dims)
    if dims["tokens"] * dims["heads"] <= 4 * 8 * arch.sms:  # few tokens: spread them over the device
        return NormRopeConfig(1, min(8, heads), 1, warps, num_stages=1, programs=0)
    each = min(8, heads, lines)
    return NormRopeConfig(lines // each, each, min(4, max(1, heads // each)), warps, num_stages=1, programs=0)


def _backward_default(dims, arch, dtype) -> NormRopeConfig:
    # Two steps of 512 elements, 8 heads of any size, so that no tile with few heads of k is half empty; fp32 has one
    # step, as many bytes. H200, bf16, head dims 128 / 64: 0.93 / 0.90 of the copy rate. More figures:
    # docs/log/rotary.md.
    heads, lines, warps = _lines(dims)
    each = min(lines, max(1, min(8, heads) // 2))
    stages = 2 if arch.kind == "hip" else 3
    steps = 2 if dtype.itemsize <= 2 else 1
    return NormRopeConfig(lines // each, each, steps, warps, stages, programs=12 * max(1, arch.sms))


def _lines(dims: dict[str, int]) -> tuple[int, int, int]:
    """A power of two that is not less than the heads; how many of them a step of 512 elements has, so that a thread has
    one 16-byte access of each half of a bfloat16 head; its warps: one, whose threads wait at no barrier."""
    dim = next_power_of_2(dims["dim"])
    return next_power_of_2(max(1, dims["heads"])), max(1, 512 // dim), max(1, dim // 1024)


CHOICES = {
    "block_tokens": (1, 2, 4, 8),
    "block_heads": (1, 2, 4, 8, 16),
    "steps": (1, 2, 4, 8),
    "num_warps": (1, 2, 4, 8),
}
LOOP_CHOICES = {**CHOICES, "steps": (1, 2, 4), "num_stages": (1, 2, 3, 4), "programs": (1056, 1584, 1848, 2112)}


@register_kernel(
    "rms_norm_rope",
    backend="triton",
    rank=20,
    rejects=_reasons,
    tells=rms_norm_rope_arguments(_forward_tells),
    plans=rehearsed,
)
@optimize_kernel(space=Space(default=_forward_default, dims=lambda q, k, *_: _size(q, k), choices=CHOICES))
@rms_norm_rope_arguments
def rms_norm_rope(call, *, config: NormRopeConfig) -> tuple[Tensor, Tensor]:
    """Launch over (row, block of tokens, block of heads of q and k); apart where q and k are not of one kind."""
    q, k = call.q, call.k
    row, numbers = call.norm_dim == "row", (call.eps, call.weight_offset)
    outs = torch.empty_like(q), q.new_empty(0) if k is None else torch.empty_like(k)
    weights = dense(call.q_weight), dense(call.k_weight)
    where = _Where(call.cos, call.sin, call.positions, call.offsets, call.cu_seqlens, call.offset, call.interleaved)
    rest = where, row, numbers, call.casting == "llama", config
    if _together(call.q_weight, k, call.k_weight, row):
        _norm_rotate(q, k, weights, outs, *rest)
    else:
        for x, weight, out in zip((q, k), weights, outs):
            if x is not None:
                _norm_rotate(x, None, (weight, None), (out, None), *rest)
    return outs


@register_kernel(
    "rms_norm_rope_vjp",
    backend="triton",
    rank=20,
    rejects=_reasons,
    tells=rms_norm_rope_vjp_arguments(_backward_tells),
    plans=rehearsed,
)
@optimize_kernel(
    space=Space(default=_backward_default, dims=lambda dq_out, dk_out, q, k, *_: _size(q, k), choices=LOOP_CHOICES)
)
@rms_norm_rope_vjp_arguments
def rms_norm_rope_vjp(call, *, config: NormRopeConfig) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """One launch for q and k where they are of one kind and want the same, then one sum for each weight."""
    q = call.q
    row, numbers = call.norm_dim == "row", (call.eps, call.weight_offset)
    where = _Where(call.cos, call.sin, call.positions, call.offsets, call.cu_seqlens, call.offset, call.interleaved)
    sides: list[_Side | None] = []
    wanted = _sides(call)
    for want, dout, x, weight in zip(wanted, (call.dq_out, call.dk_out), (q, call.k), (call.q_weight, call.k_weight)):
        dx = torch.empty_like(x) if want and want[0] else None
        sides.append(None if want is None else _Side(dout, x, dense(weight), dx, want[1]))
    partials: list[Tensor | None] = [None, None]
    first, second = sides
    if _alike(wanted) and _together(call.q_weight, call.k, call.k_weight, row):
        partials = _differentiate(first, second, where, row, numbers, config)
    else:
        for i, side in enumerate(sides):
            if side is not None:
                partials[i] = _differentiate(side, None, where, row, numbers, config)[0]
    dx = [q.new_empty(0) if side is None or side.dx is None else side.dx for side in sides]
    dweight = [
        q.new_empty(0) if side is None or not side.sums else side.weight.new_empty(partial.shape[1])
        for side, partial in zip(sides, partials)
    ]
    sums = [(p, d) if p is not None and d.numel() else (None, None) for p, d in zip(partials, dweight)]
    add_partials(*zip(*sums))
    return *dx, *dweight
