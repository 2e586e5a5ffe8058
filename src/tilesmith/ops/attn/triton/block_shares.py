"""Triton kernels of estimated shares: means of stretches of queries and keys, and the softmax of their products.

Tiles of scores are all computed side by side, each with maxima of its own, and only a third kernel knows a row's sum:
one program that walked over all keys of a row would be the longest part of the estimate, whatever the device's rate.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from tilesmith.device.rows import unit_stride
from tilesmith.device.triton.column_sums import chained
from tilesmith.engine import Space, cdiv, launch, next_power_of_2, optimize_kernel, register_kernel
from tilesmith.ops.attn.reference import scale_of

LOG2_E = 1.4426950408889634
MEANS = 8  # of a program: as many loads of 16 bytes a thread as there are tokens in a mean
MOST_SUMS = 128 << 20  # bytes of blocks' sums, from which tiles of queries are served one after another


@triton.jit
def _write_means(
    x_ptr, out_ptr, tile, strides, heads, tokens, DIM: tl.constexpr, BLOCK_D: tl.constexpr, STRETCH: tl.constexpr,
    MEANS: tl.constexpr, STRIDE: tl.constexpr,
):  # fmt: skip
    """MEANS means of one head, of each STRIDE-th token; the last stretch of a head may be shorter."""
    COUNT: tl.constexpr = (STRETCH + STRIDE - 1) // STRIDE
    TOGETHER: tl.constexpr = 16 if COUNT % 16 == 0 else (8 if COUNT % 8 == 0 else (4 if COUNT % 4 == 0 else 1))
    stretches = tl.cdiv(tokens, STRETCH)
    tiles = tl.cdiv(stretches, MEANS)
    head_row = tile // tiles
    number = (tile - head_row * tiles) * MEANS + tl.arange(0, MEANS)
    x_ptr += (head_row // heads).to(tl.int64) * strides[0] + (head_row % heads).to(tl.int64) * strides[1]
    cols = tl.arange(0, BLOCK_D)
    total = tl.zeros((MEANS, BLOCK_D), tl.float32)
    for i in tl.static_range(0, STRETCH, TOGETHER * STRIDE):
        # A thread holds the tokens of its means. Behind the last token it reads that one again: with a condition on
        # each load ptxas waits between them, which gave 3.3 TB/s on an H200.
        at = number[:, None] * STRETCH + (i + tl.arange(0, TOGETHER) * STRIDE)[None, :]
        place = x_ptr + tl.minimum(at, tokens - 1).to(tl.int64)[:, :, None] * strides[2] + cols[None, None, :]
        if DIM == BLOCK_D:
            x = tl.load(place)
        else:
            x = tl.load(place, mask=(cols < DIM)[None, None, :], other=0.0)
        total += tl.sum(tl.where((at < tokens)[:, :, None], x, 0.0).to(tl.float32), 1)
    count = tl.maximum(tl.cdiv(tl.minimum(tokens - number * STRETCH, STRETCH), STRIDE), 1).to(tl.float32)
    mean = total / count[:, None]
    out = out_ptr + (head_row.to(tl.int64) * stretches + number)[:, None] * DIM + cols[None, :]
    held = (number < stretches)[:, None] & (cols < DIM)[None, :]
    tl.store(out, mean.to(out_ptr.dtype.element_ty), mask=held)


@triton.jit
def _stretch_means_kernel(
    q_ptr, k_ptr, q_out_ptr, k_out_ptr, q_strides, k_strides, heads, kv_heads, tokens, keys, q_tiles,
    DIM: tl.constexpr, BLOCK_D: tl.constexpr, Q_STRETCH: tl.constexpr, Q_STRIDE: tl.constexpr, STRETCH: tl.constexpr,
    STRIDE: tl.constexpr, MEANS: tl.constexpr,
):  # fmt: skip
    """Programs of q's means, then those of k's."""
    if tl.program_id(0) < q_tiles:
        _write_means(
            q_ptr, q_out_ptr, tl.program_id(0), q_strides, heads, tokens, DIM, BLOCK_D, Q_STRETCH, MEANS, Q_STRIDE
        )  # fmt: skip
    else:
        tile = tl.program_id(0) - q_tiles
        _write_means(k_ptr, k_out_ptr, tile, k_strides, kv_heads, keys, DIM, BLOCK_D, STRETCH, MEANS, STRIDE)


@triton.jit
def _load_means(ptr, first, count, DIM: tl.constexpr, BLOCK: tl.constexpr, BLOCK_D: tl.constexpr):
    rows, cols = first + tl.arange(0, BLOCK), tl.arange(0, BLOCK_D)
    held = (rows < count)[:, None] & (cols < DIM)[None, :]
    return tl.load(ptr + rows.to(tl.int64)[:, None] * DIM + cols[None, :], mask=held, other=0.0)


@triton.jit
def _block_sums_kernel(
    q_ptr, k_ptr, sums_ptr, tops_ptr, tokens, keys, first_tile, tiles, key_tiles, scale, GROUP: tl.constexpr,
    DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, SUB: tl.constexpr,
    RATIO: tl.constexpr, CAUSAL: tl.constexpr, RUN: tl.constexpr, CHAINED: tl.constexpr,
):  # fmt: skip
    """RUN tiles of scores, one after another: each row's largest one in a tile, in units of log 2, and the sum of
    exp2(score - largest) over each block's SUB means of keys. Where such a sum is 0 the block's share is none that fp32
    holds. tops [head rows, tiles, key tiles, BLOCK_M], sums the same with a number for each block of keys."""
    KB: tl.constexpr = BLOCK_N // SUB
    runs = tl.cdiv(key_tiles, RUN)
    rest = tl.program_id(0) // runs
    begin = (tl.program_id(0) - rest * runs) * RUN
    head_row = rest // tiles
    tile = rest - head_row * tiles
    first_row = (first_tile + tile) * BLOCK_M
    end = tl.minimum(key_tiles, begin + RUN)
    if CHAINED:  # the programs of `_block_shares_kernel`, which wait for these, may come as soon as there is room
        tl.extra.cuda.gdc_launch_dependents()
    if CAUSAL:
        end = tl.minimum(end, tl.cdiv((first_row + BLOCK_M) * RATIO, BLOCK_N))
    if begin < end:
        if CHAINED:
            tl.extra.cuda.gdc_wait()
        lane = tl.arange(0, BLOCK_M)
        q = _load_means(q_ptr + head_row.to(tl.int64) * tokens * DIM, first_row, tokens, DIM, BLOCK_M, BLOCK_D)
        k_ptr += (head_row // GROUP).to(tl.int64) * keys * DIM
        seen = keys + lane * 0
        if CAUSAL:
            seen = tl.minimum(seen, (first_row + lane + 1) * RATIO)
        for key_tile in range(begin, end):
            first = key_tile * BLOCK_N
            k = _load_means(k_ptr, first, keys, DIM, BLOCK_N, BLOCK_D)
            score = tl.dot(q, tl.trans(k), input_precision="ieee")
            score = tl.where((first + tl.arange(0, BLOCK_N))[None, :] < seen[:, None], score, float("-inf"))
            top = tl.max(score, 1) * scale
            base = tl.where(top == float("-inf"), 0.0, top)
            sums = tl.sum(tl.reshape(tl.exp2(score * scale - base[:, None]), (BLOCK_M, KB, SUB)), 2)
            place = (rest.to(tl.int64) * key_tiles + key_tile) * BLOCK_M + lane
            tl.store(tops_ptr + place, top)
            tl.store(sums_ptr + place[:, None] * KB + tl.arange(0, KB)[None, :], sums)


@triton.jit
def _load_sums(sums_ptr, tops_ptr, row, held, tile, end, BLOCK_M: tl.constexpr, KB: tl.constexpr):
    """Tops of rows in tiles of keys and sums of the tiles' KB blocks, as if there were none where nobody looks."""
    place = row[:, None] + tile.to(tl.int64)[None, :] * BLOCK_M
    there = held[:, None] & (tile < end)[None, :]
    at = place[:, :, None] * KB + tl.arange(0, KB)[None, None, :]
    sums = tl.load(sums_ptr + at, mask=there[:, :, None], other=0.0)
    return tl.load(tops_ptr + place, mask=there, other=float("-inf")), sums


@triton.jit
def _block_shares_kernel(
    sums_ptr, tops_ptr, out_ptr, tokens, first_tile, tiles, key_tiles, rows, columns, blocks, GROUP: tl.constexpr,
    HEADS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, SUB: tl.constexpr, RATIO: tl.constexpr,
    CAUSAL: tl.constexpr, KEY_TILES: tl.constexpr, CHAINED: tl.constexpr,
):  # fmt: skip
    """The shares of one block of queries, a mean over its means in the GROUP heads of a kv head, from what
    `_block_sums_kernel` left. blocks: those of all tiles. HEADS: GROUP or a few more, a power of two."""
    Q_SUB: tl.constexpr = SUB // RATIO
    KB: tl.constexpr = BLOCK_N // SUB
    kv_row = tl.program_id(0) // blocks
    block = tl.program_id(0) - kv_row * blocks
    lane = tl.arange(0, HEADS * Q_SUB)
    head, token = lane // Q_SUB, block * Q_SUB + lane % Q_SUB
    held = (head < GROUP) & (token + first_tile * BLOCK_M < tokens)
    tile = block * Q_SUB // BLOCK_M
    row = ((kv_row * GROUP + head) * tiles + tile).to(tl.int64) * key_tiles * BLOCK_M + (token - tile * BLOCK_M)
    block += first_tile * (BLOCK_M // Q_SUB)
    end = key_tiles
    if CAUSAL:
        end = tl.minimum(key_tiles, block // KB + 1)
    out_ptr += (kv_row.to(tl.int64) * rows + block) * columns
    if CHAINED:
        tl.extra.cuda.gdc_wait()
    top = tl.full((HEADS * Q_SUB,), float("-inf"), tl.float32)
    total = tl.zeros((HEADS * Q_SUB,), tl.float32)
    for first in range(0, end, KEY_TILES):
        most, sums = _load_sums(
            sums_ptr, tops_ptr, row, held, first + tl.arange(0, KEY_TILES), end, BLOCK_M, KB
        )  # fmt: skip
        new = tl.maximum(top, tl.max(most, 1))
        new = tl.where(new == float("-inf"), 0.0, new)  # of lanes that hold no row: their sums are 0
        total = total * tl.exp2(top - new) + tl.sum(tl.sum(sums, 2) * tl.exp2(most - new[:, None]), 1)
        top = new
    weight = tl.where(held, 1.0, 0.0) / (tl.where(held, total, 1.0) * tl.sum(held.to(tl.float32)))
    for first in range(0, key_tiles, KEY_TILES):
        its = first + tl.arange(0, KEY_TILES)
        most, sums = _load_sums(sums_ptr, tops_ptr, row, held, its, end, BLOCK_M, KB)
        factor = tl.exp2(most - top[:, None]) * weight[:, None]
        column = its[:, None] * KB + tl.arange(0, KB)[None, :]
        tl.store(out_ptr + column, tl.sum(sums * factor[:, :, None], 0), mask=column < columns)


def _reasons(call) -> list[str]:
    reasons = []
    if call.q.dtype not in (torch.float32, torch.float16, torch.bfloat16):
        reasons.append(f"q is {call.q.dtype}; float32, float16 and bfloat16 are supported")
    if call.q.cols > 256:
        reasons.append(f"q has head dim {call.q.cols}; up to 256 is supported")
    if call.stretches & (call.stretches - 1) or call.stretches > 16:
        reasons.append(f"stretches is {call.stretches}; powers of two up to 16 are supported")
    of_queries = call.stretches if call.query_stretches is None else call.query_stretches
    longest = max(call.block // call.stretches // call.key_stride, call.block // of_queries // call.query_stride)
    if longest > 64:
        reasons.append(f"{longest} tokens of a stretch are averaged; up to 64 are supported")
    return reasons


class SharesConfig(NamedTuple):
    """Means of queries and of keys of a tile of scores, its warps, and how many tiles a program walks over: with eight
    the 320 programs of 16 heads of 32k tokens fit three to an SM, and all but the first load go beside products."""

    block_m: int
    block_n: int
    num_warps: int
    run: int


def _dims(q: Tensor, k: Tensor, *_: object) -> dict[str, int]:
    return {"rows": q.shape[0] * q.shape[1], "tokens": q.shape[2], "keys": k.shape[2], "dim": q.shape[3]}


def _default(dims, arch, dtype) -> SharesConfig:
    if arch.kind not in ("cuda", "hip", "xpu"):
        return SharesConfig(16, 16, 4, 2)
    if dtype == torch.float32:
        return SharesConfig(32, 32, 4 if dims["dim"] <= 64 else 8, 1)
    large = arch.kind == "cuda" and arch.shared_memory > 160 * 1024
    return SharesConfig(64, 64, 4, 8) if large and dims["dim"] <= 128 else SharesConfig(64, 64, 4, 1)


SPACE = Space(
    default=_default,
    dims=_dims,
    choices={"block_m": (32, 64, 128), "block_n": (32, 64, 128), "num_warps": (4, 8), "run": (1, 4, 8)},
)


class _Means(NamedTuple):
    """Means of q and k, and of how many means of keys one of queries is as long."""

    q: Tensor
    k: Tensor
    ratio: int


def _means(q: Tensor, k: Tensor, stretches: tuple[int, int], strides: tuple[int, int]) -> _Means:
    """Means over stretches of queries and keys, of each so-manyth token."""
    q, k = map(unit_stride, (q, k))
    dim = q.shape[3]
    q_means, k_means = (x.new_empty(*x.shape[:2], cdiv(x.shape[2], n), dim) for x, n in zip((q, k), stretches))
    tiles = [cdiv(x.shape[2], MEANS) * x.shape[0] * x.shape[1] for x in (q_means, k_means)]
    launch(
        _stretch_means_kernel, (sum(tiles),),
        q, k, q_means, k_means, q.stride(), k.stride(), q.shape[1], k.shape[1], q.shape[2], k.shape[2], tiles[0],
        DIM=dim, BLOCK_D=max(16, next_power_of_2(dim)), Q_STRETCH=stretches[0], Q_STRIDE=strides[0],
        STRETCH=stretches[1], STRIDE=strides[1], MEANS=MEANS, num_warps=4,
    )  # fmt: skip
    return _Means(q_means, k_means, stretches[0] // stretches[1])


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
    key_stride: int = 1,
    *,
    config: SharesConfig,
) -> Tensor:
    """One kernel for the means of q and k, one for tiles of their scores, and one that makes shares of these."""
    rows, columns, groups = cdiv(q.shape[2], block), cdiv(k.shape[2], block), k.shape[0] * k.shape[1]
    shares = torch.empty(*k.shape[:2], rows, columns, dtype=torch.float32, device=q.device)
    if shares.numel() == 0:
        return shares
    of_queries = stretches if query_stretches is None else query_stretches
    scale = LOG2_E * scale_of(q, scale)
    means = _means(q, k, (block // of_queries, block // stretches), (query_stride, key_stride))
    group, (tokens, dim), keys = q.shape[1] // k.shape[1], means.q.shape[2:], means.k.shape[2]
    key_tiles, tiles = cdiv(keys, config.block_n), cdiv(tokens, config.block_m)
    of_tile = groups * group * key_tiles * config.block_m  # rows with a sum for each block of a tile of keys
    blocks_n = config.block_n // stretches
    together = max(1, min(tiles, MOST_SUMS // (4 * of_tile * blocks_n)))
    tops = torch.empty(together * of_tile, dtype=torch.float32, device=q.device)
    sums = torch.empty(together * of_tile * blocks_n, dtype=torch.float32, device=q.device)
    sizes = {
        "GROUP": group, "BLOCK_M": config.block_m, "BLOCK_N": config.block_n, "SUB": stretches, "RATIO": means.ratio,
        "CAUSAL": causal, **chained(q.device),
    }  # fmt: skip
    heads = next_power_of_2(group)
    lanes = heads * of_queries * blocks_n
    at_once = max(1, min(next_power_of_2(key_tiles), 2048 // lanes))
    for first in range(0, tiles, together):
        several = min(together, tiles - first)
        blocks = min(several * config.block_m // of_queries, rows - first * config.block_m // of_queries)
        launch(
            _block_sums_kernel, (groups * group * several * cdiv(key_tiles, config.run),),
            means.q, means.k, sums, tops, tokens, keys, first, several, key_tiles, scale, DIM=dim,
            BLOCK_D=max(16, next_power_of_2(dim)), RUN=config.run, num_warps=config.num_warps,
            num_stages=1 if config.run == 1 else 2 if config.block_n > 64 else 3, **sizes,
        )  # fmt: skip
        launch(
            _block_shares_kernel, (groups * blocks,),
            sums, tops, shares, tokens, first, several, key_tiles, rows, columns, blocks, HEADS=heads,
            KEY_TILES=at_once, num_warps=max(1, min(8, lanes * at_once // 512)), **sizes,
        )  # fmt: skip
    return shares
