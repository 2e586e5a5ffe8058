"""Triton kernels of estimated shares: means of stretches of queries and keys, and the softmax of their products."""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from tilesmith.engine import Space, cdiv, launch, next_power_of_2, optimize_kernel, register_kernel

LOG2_E = 1.4426950408889634
MOST_SUMS = 128 << 20  # bytes of blocks' log-sum-exps, from which heads are served one after another


@triton.jit
def _write_means(
    x_ptr, out_ptr, tile, strides, heads, tokens, DIM: tl.constexpr, BLOCK_D: tl.constexpr, STRETCH: tl.constexpr,
    MEANS: tl.constexpr, STRIDE: tl.constexpr,
):  # fmt: skip
    """MEANS means of one head, of each STRIDE-th token; the last stretch of a head may be shorter."""
    stretches = tl.cdiv(tokens, STRETCH)
    tiles = tl.cdiv(stretches, MEANS)
    head_row = tile // tiles
    number = (tile - head_row * tiles) * MEANS + tl.arange(0, MEANS)
    x_ptr += (head_row // heads).to(tl.int64) * strides[0] + (head_row % heads).to(tl.int64) * strides[1]
    cols = tl.arange(0, BLOCK_D)
    total = tl.zeros((MEANS, BLOCK_D), tl.float32)
    for i in tl.static_range(0, STRETCH, STRIDE):
        at = number * STRETCH + i
        held = (at < tokens)[:, None] & (cols < DIM)[None, :]
        total += tl.load(x_ptr + at.to(tl.int64)[:, None] * strides[2] + cols[None, :], mask=held, other=0.0)
    count = tl.maximum(tl.cdiv(tl.minimum(tokens - number * STRETCH, STRETCH), STRIDE), 1).to(tl.float32)
    mean = total / count[:, None]
    out = out_ptr + (head_row.to(tl.int64) * stretches + number)[:, None] * DIM + cols[None, :]
    held = (number < stretches)[:, None] & (cols < DIM)[None, :]
    tl.store(out, mean.to(out_ptr.dtype.element_ty), mask=held)


@triton.jit
def _stretch_means_kernel(
    q_ptr, k_ptr, q_out_ptr, k_out_ptr, q_strides, k_strides, heads, kv_heads, tokens, keys, q_tiles,
    DIM: tl.constexpr, BLOCK_D: tl.constexpr, Q_STRETCH: tl.constexpr, STRIDE: tl.constexpr, STRETCH: tl.constexpr,
    MEANS: tl.constexpr,
):  # fmt: skip
    """Programs of q's means, then those of k's."""
    if tl.program_id(0) < q_tiles:
        _write_means(
            q_ptr, q_out_ptr, tl.program_id(0), q_strides, heads, tokens, DIM, BLOCK_D, Q_STRETCH, MEANS, STRIDE
        )  # fmt: skip
    else:
        tile = tl.program_id(0) - q_tiles
        _write_means(k_ptr, k_out_ptr, tile, k_strides, kv_heads, keys, DIM, BLOCK_D, STRETCH, MEANS, 1)


@triton.jit
def _load_means(ptr, first, count, DIM: tl.constexpr, BLOCK: tl.constexpr, BLOCK_D: tl.constexpr):
    rows, cols = first + tl.arange(0, BLOCK), tl.arange(0, BLOCK_D)
    held = (rows < count)[:, None] & (cols < DIM)[None, :]
    return tl.load(ptr + rows.to(tl.int64)[:, None] * DIM + cols[None, :], mask=held, other=0.0)


@triton.jit
def _tile_scores(
    q, k_ptr, first, row, keys, scale, DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_N: tl.constexpr,
    CAUSAL: tl.constexpr, RATIO: tl.constexpr,
):  # fmt: skip
    """Scores in units of log 2, -inf where there is no key or it is not seen."""
    k = _load_means(k_ptr, first, keys, DIM, BLOCK_N, BLOCK_D)
    score = tl.dot(q, tl.trans(k), input_precision="ieee") * scale
    end = keys + row * 0
    if CAUSAL:
        end = tl.minimum(end, (row + 1) * RATIO)
    col = first + tl.arange(0, BLOCK_N)
    return tl.where(col[None, :] < end[:, None], score, float("-inf"))


@triton.jit
def _added(
    top, total, sums_ptr, q, k_ptr, first, row, keys, scale, DIM: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_N: tl.constexpr, CAUSAL: tl.constexpr, RATIO: tl.constexpr, SUB: tl.constexpr,
):  # fmt: skip
    """The running maximum and sum of rows with one more tile, whose blocks' log-sum-exps are stored."""
    KB: tl.constexpr = BLOCK_N // SUB
    score = _tile_scores(q, k_ptr, first, row, keys, scale, DIM, BLOCK_D, BLOCK_N, CAUSAL, RATIO)
    score = tl.reshape(score, (row.shape[0], KB, SUB))
    # a maximum for each block and not for the row: no lane waits for others than the few that have its block
    most = tl.max(score, 2)
    base = tl.where(most == float("-inf"), 0.0, most)
    block = base + tl.log2(tl.sum(tl.exp2(score - base[:, :, None]), 2))
    tl.store(sums_ptr + (first // SUB + tl.arange(0, KB))[None, :], block)
    new_top = tl.maximum(top, tl.max(block, 1))
    total = total * tl.exp2(top - new_top) + tl.sum(tl.exp2(block - new_top[:, None]), 1)
    return new_top, total


@triton.jit
def _block_shares_kernel(
    q_ptr, k_ptr, sums_ptr, out_ptr, tokens, keys, rows, columns, room, head_rows, first_head_row, scale,
    GROUP: tl.constexpr, DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    SUB: tl.constexpr, RATIO: tl.constexpr, CAUSAL: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """The shares of BLOCK_M means of queries of one head, from one walk over the keys, which leaves each block's
    log-sum-exp in sums [head rows, tiles, BLOCK_M, room], and a second one over these. tokens, keys: numbers of means,
    of which a block of keys has SUB, one of queries SUB / RATIO."""
    Q_SUB: tl.constexpr = SUB // RATIO
    QB: tl.constexpr = BLOCK_M // Q_SUB
    tiles = tl.cdiv(tokens, BLOCK_M)
    # the longest tiles of all heads first
    tile, head_row = tl.program_id(0) // head_rows, tl.program_id(0) % head_rows
    if CAUSAL:
        tile = tiles - 1 - tile
    sums_ptr += (head_row * tiles + tile).to(tl.int64) * BLOCK_M * room
    head_row += first_head_row
    first_row = tile * BLOCK_M
    lane = tl.arange(0, BLOCK_M)
    row = first_row + lane
    q = _load_means(q_ptr + head_row.to(tl.int64) * tokens * DIM, first_row, tokens, DIM, BLOCK_M, BLOCK_D)
    k_ptr += (head_row // GROUP).to(tl.int64) * keys * DIM
    sums_ptr += lane[:, None] * room
    end = keys
    if CAUSAL:
        end = tl.minimum(keys, (first_row + BLOCK_M) * RATIO)

    top = tl.full((BLOCK_M,), float("-inf"), tl.float32)
    total = tl.zeros((BLOCK_M,), tl.float32)
    # the first key is seen by every row, so that no maximum stays -inf; the mask costs less than a second copy of the
    # loop, for whose code programs as short as these would wait
    for first in range(0, end, BLOCK_N):
        top, total = _added(
            top, total, sums_ptr, q, k_ptr, first, row, keys, scale, DIM, BLOCK_D, BLOCK_N, CAUSAL, RATIO, SUB
        )  # fmt: skip
    lse = tl.where(row < tokens, top + tl.log2(total), float("inf"))
    tl.debug_barrier()  # other lanes read the sums than have written them

    block = tile * QB + tl.arange(0, QB)
    count = tl.maximum(tl.minimum(tokens - block * Q_SUB, Q_SUB), 1).to(tl.float32)[:, None]
    out_ptr += (head_row.to(tl.int64) * rows + block)[:, None] * columns
    for first in range(0, columns, COLUMNS):
        column = first + tl.arange(0, COLUMNS)
        sums = tl.load(sums_ptr + column[None, :], mask=(column * SUB < end)[None, :], other=float("-inf"))
        share = tl.sum(tl.reshape(tl.exp2(sums - lse[:, None]), (QB, Q_SUB, COLUMNS)), 1)
        held = (block < rows)[:, None] & (column < columns)[None, :]
        tl.store(out_ptr + column[None, :], share / count, mask=held)


def _reasons(call) -> list[str]:
    reasons = []
    if call.q.dtype not in (torch.float32, torch.float16, torch.bfloat16):
        reasons.append(f"q is {call.q.dtype}; float32, float16 and bfloat16 are served")
    if call.q.cols > 256:
        reasons.append(f"q has head dim {call.q.cols}; up to 256 is served")
    if call.stretches & (call.stretches - 1) or call.stretches > 16:
        reasons.append(f"stretches is {call.stretches}; powers of two up to 16 are served")
    of_queries = call.stretches if call.query_stretches is None else call.query_stretches
    longest = max(call.block // call.stretches, call.block // of_queries // call.query_stride)
    if longest > 64:
        reasons.append(f"{longest} tokens of a stretch are averaged; up to 64 are served")
    return reasons


class SharesConfig(NamedTuple):
    """Means of queries and of keys of a tile; warps and pipeline stages of a CTA."""

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int


def _dims(q: Tensor, k: Tensor, *_: object) -> dict[str, int]:
    return {"rows": q.shape[0] * q.shape[1], "tokens": q.shape[2], "keys": k.shape[2], "dim": q.shape[3]}


def _default(dims, arch, dtype) -> SharesConfig:
    if arch.kind not in ("cuda", "hip", "xpu"):
        return SharesConfig(16, 16, 4, 1)
    if dtype == torch.float32:
        return SharesConfig(32, 32, 4 if dims["dim"] <= 64 else 8, 1)
    if dims["dim"] > 128:
        return SharesConfig(64, 32, 4, 1)
    large = arch.kind == "cuda" and arch.shared_memory > 160 * 1024
    return SharesConfig(64, 128, 4, 2) if large else SharesConfig(64, 64, 4, 2)


SPACE = Space(
    default=_default,
    dims=_dims,
    choices={"block_m": (32, 64, 128), "block_n": (32, 64, 128), "num_warps": (4, 8), "num_stages": (1, 2, 3)},
)


@register_kernel("block_shares", backend="triton", rank=20, rejects=_reasons)
@optimize_kernel(space=SPACE)
def block_shares(
    q: Tensor,
    k: Tensor,
    scale: float | None = None,
    causal: bool = False,
    block: int = 128,
    stretches: int = 8,
    query_stretches: int | None = None,
    query_stride: int = 1,
    *,
    config: SharesConfig,
) -> Tensor:
    """One kernel for the means of q and k; one program for each tile of q's means of a head."""
    q, k = (x if x.stride(-1) == 1 else x.contiguous() for x in (q, k))
    batch, heads, tokens, dim = q.shape
    kv_heads, keys, stretch = k.shape[1], k.shape[2], block // stretches
    q_stretch = stretch if query_stretches is None else block // query_stretches
    shape = (batch, heads, cdiv(tokens, block), cdiv(keys, block))
    shares = torch.empty(shape, dtype=torch.float32, device=q.device)
    if shares.numel() > 0:
        q_means, k_means = (
            x.new_empty(*x.shape[:2], cdiv(x.shape[2], n), dim) for x, n in ((q, q_stretch), (k, stretch))
        )
        dims = {"DIM": dim, "BLOCK_D": max(16, next_power_of_2(dim))}
        q_tiles, k_tiles = (cdiv(x.shape[2], 16) * x.shape[0] * x.shape[1] for x in (q_means, k_means))
        launch(
            _stretch_means_kernel, (q_tiles + k_tiles,),
            q, k, q_means, k_means, q.stride(), k.stride(), heads, kv_heads, tokens, keys, q_tiles,
            Q_STRETCH=q_stretch, STRIDE=query_stride, STRETCH=stretch, MEANS=16, num_warps=4, **dims,
        )  # fmt: skip
        head_rows, tiles = batch * heads, cdiv(q_means.shape[2], config.block_m)
        room = cdiv(k_means.shape[2], config.block_n) * config.block_n // stretches
        together = max(1, min(head_rows, MOST_SUMS // (4 * tiles * config.block_m * room)))
        sums = torch.empty(together, tiles, config.block_m, room, dtype=torch.float32, device=q.device)
        for first in range(0, head_rows, together):
            several = min(together, head_rows - first)
            launch(
                _block_shares_kernel, (tiles * several,),
                q_means, k_means, sums, shares, q_means.shape[2], k_means.shape[2], *shape[2:], room, several, first,
                LOG2_E * (dim**-0.5 if scale is None else scale), GROUP=heads // kv_heads,
                BLOCK_M=config.block_m, BLOCK_N=config.block_n, SUB=stretches, RATIO=q_stretch // stretch,
                CAUSAL=causal, COLUMNS=32, num_warps=config.num_warps, num_stages=config.num_stages, **dims,
            )  # fmt: skip
    return shares if heads == kv_heads else shares.unflatten(1, (kv_heads, -1)).mean(2)
