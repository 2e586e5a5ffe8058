"""Triton kernels of the largest scores of blocks, and of their gradient.

The forward stores a number for each pair of blocks; the backward finds again which pair of tokens it belongs to, for
the few pairs of blocks that have a gradient.
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from tilesmith.device.rows import unit_stride
from tilesmith.engine import Space, cdiv, launch, optimize_kernel, register_kernel
from tilesmith.ops.attn.triton.block_choice import listed
from tilesmith.ops.attn.triton.blocks import (
    FEW_PARTS,
    key_range,
    largest,
    last_keys,
    launch_arguments,
    least_tile,
    load_rows,
    score_reasons,
    score_vjp_reasons,
    tile_of,
    tile_products,
    tile_size,
)


@triton.jit
def _block_maxima(
    q, k_ptr, first, last, keys, stride, DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_N: tl.constexpr,
    QB: tl.constexpr, LIST_Q: tl.constexpr, KB: tl.constexpr, LIST_K: tl.constexpr, WHOLE: tl.constexpr,
):  # fmt: skip
    """The largest products of a tile's blocks, [QB, KB]. WHOLE: every pair of the tile counts."""
    product = tile_products(q, k_ptr, first, last, keys, stride, DIM, BLOCK_D, BLOCK_N, WHOLE)
    return largest(product, QB, LIST_Q, KB, LIST_K)


@triton.jit
def _block_max_fwd_kernel(
    q_ptr, k_ptr, scores_ptr, q_strides, k_strides, heads, tokens, keys, rows, columns, scale,
    GROUP: tl.constexpr, DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    LIST_Q: tl.constexpr, LIST_K: tl.constexpr, CAUSAL: tl.constexpr,
):  # fmt: skip
    """The largest scores of one tile of queries; those of blocks that it does not see are there already."""
    QB: tl.constexpr = BLOCK_M // LIST_Q
    KB: tl.constexpr = BLOCK_N // LIST_K
    head_row, tile = tile_of(tl.program_id(0), tl.cdiv(tokens, BLOCK_M), CAUSAL)
    batch, head = head_row // heads, head_row % heads
    first_row = tile * BLOCK_M
    q_ptr += batch * q_strides[0] + head * q_strides[1]
    k_ptr += batch * k_strides[0] + head // GROUP * k_strides[1]
    q = load_rows(q_ptr, first_row, tokens, q_strides[2], DIM, BLOCK_M, BLOCK_D)
    end, whole = key_range(first_row, tokens, keys, BLOCK_M, BLOCK_N, CAUSAL)
    last = last_keys(first_row + tl.arange(0, BLOCK_M), tokens, keys, CAUSAL)
    block = tile * QB + tl.arange(0, QB)
    scores_ptr += (head_row * rows + block)[:, None] * columns
    for first in range(0, whole, BLOCK_N):
        found = _block_maxima(
            q, k_ptr, first, last, keys, k_strides[2], DIM, BLOCK_D, BLOCK_N, QB, LIST_Q, KB, LIST_K, True
        )  # fmt: skip
        column = first // LIST_K + tl.arange(0, KB)
        held = (block < rows)[:, None] & (column < columns)[None, :]
        tl.store(scores_ptr + column[None, :], found * scale, mask=held)
    for first in range(whole, end, BLOCK_N):
        found = _block_maxima(
            q, k_ptr, first, last, keys, k_strides[2], DIM, BLOCK_D, BLOCK_N, QB, LIST_Q, KB, LIST_K, False
        )  # fmt: skip
        column = first // LIST_K + tl.arange(0, KB)
        held = (block < rows)[:, None] & (column < columns)[None, :]
        tl.store(scores_ptr + column[None, :], found * scale, mask=held)


@triton.jit
def _block_max_places_kernel(
    places_ptr, offsets_ptr, indices_ptr, q_ptr, k_ptr, q_strides, k_strides, heads, tokens, keys, rows, columns, scale,
    GROUP: tl.constexpr, DIM: tl.constexpr, BLOCK_D: tl.constexpr, LIST_Q: tl.constexpr, LIST_K: tl.constexpr,
    CAUSAL: tl.constexpr,
):  # fmt: skip
    """Where one block of queries has its largest scores in the listed blocks of keys: query * LIST_K + key within a
    pair of blocks. The forward stores no places, since few of its blocks have a gradient."""
    head_row, block = tile_of(tl.program_id(0), rows, CAUSAL)
    batch, head = head_row // heads, head_row % heads
    first_row = block * LIST_Q
    row, key = tl.arange(0, LIST_Q), tl.arange(0, LIST_K)
    q_ptr += batch * q_strides[0] + head * q_strides[1]
    k_ptr += batch * k_strides[0] + head // GROUP * k_strides[1]
    q = load_rows(q_ptr, first_row, tokens, q_strides[2], DIM, LIST_Q, BLOCK_D)
    last = last_keys(first_row + row, tokens, keys, CAUSAL)
    list_ptr = offsets_ptr + head_row * (rows + 1) + block
    begin, end = tl.load(list_ptr), tl.load(list_ptr + 1)
    places_ptr += (head_row * rows + block) * columns
    column = tl.load(indices_ptr + begin, mask=begin < end, other=0)
    for entry in range(begin, end):
        here, first = column, column * LIST_K
        column = tl.load(indices_ptr + entry + 1, mask=entry + 1 < end, other=0)
        k = load_rows(k_ptr, first, keys, k_strides[2], DIM, LIST_K, BLOCK_D)
        score = tl.dot(q, tl.trans(k), input_precision="ieee")
        unseen = (first_row + LIST_Q > tokens) | (first + LIST_K > keys)
        if CAUSAL:
            unseen = unseen | (first + LIST_K - 1 > first_row + keys - tokens)
        if unseen:
            score = tl.where((first + key)[None, :] <= last[:, None], score, float("-inf"))
        of_rows = tl.max(score, 1)
        # NaN equals nothing: its place is then the last one
        keys_of_rows = tl.min(tl.where(score == of_rows[:, None], key[None, :], LIST_K - 1), 1)
        place = tl.where(of_rows == tl.max(of_rows, 0), row * LIST_K + keys_of_rows, LIST_Q * LIST_K - 1)
        tl.store(places_ptr + here, tl.min(place, 0))


@triton.jit
def _block_max_gradient_kernel(
    dscores_ptr, places_ptr, offsets_ptr, indices_ptr, x_ptr, out_ptr, x_strides, out_strides, heads, others, tokens,
    rows, columns, scale, splits,
    GROUP: tl.constexpr, DIM: tl.constexpr, BLOCK_D: tl.constexpr, LIST_Q: tl.constexpr, LIST_K: tl.constexpr,
    OF_KEYS: tl.constexpr, ENTRIES: tl.constexpr,
):  # fmt: skip
    """dq of one block of queries, or a part of dk of one of keys: from one of `splits` equal pieces of the list of
    each query head that reads them. x: the other side, which has `others` tokens; each entry gives a row of it to one
    row of the block, which is a product with the places of ENTRIES entries. out_strides: of a piece, and of what is
    written."""
    OWN: tl.constexpr = LIST_K if OF_KEYS else LIST_Q
    MEMBERS: tl.constexpr = GROUP if OF_KEYS else 1
    lines = columns if OF_KEYS else rows
    number, line = tile_of(tl.program_id(0), lines, False)
    out_rows = tl.num_programs(0) // lines // splits
    piece, out_row = number // out_rows, number % out_rows
    own, dims = tl.arange(0, OWN), tl.arange(0, BLOCK_D)
    dx = tl.zeros((OWN, BLOCK_D), tl.float32)
    for member in range(MEMBERS):
        head_row = out_row * MEMBERS + member
        head = head_row % heads
        x_head = x_ptr + head_row // heads * x_strides[0] + (head if OF_KEYS else head // GROUP) * x_strides[1]
        list_ptr = offsets_ptr + head_row * (lines + 1) + line
        begin, end = tl.load(list_ptr), tl.load(list_ptr + 1)
        length = tl.cdiv(end - begin, splits)
        begin += (piece * length).to(tl.int32)
        end = tl.minimum(end, begin + length)
        for first in range(begin, end, ENTRIES):
            entry = first + tl.arange(0, ENTRIES)
            held = entry < end
            other = tl.load(indices_ptr + entry, mask=held, other=0)
            here = head_row * rows * columns + ((other * columns + line) if OF_KEYS else (line * columns + other))
            place = tl.load(places_ptr + here, mask=held, other=0)
            change = tl.load(dscores_ptr + here, mask=held, other=0.0).to(tl.float32)
            query, key = place // LIST_K, place % LIST_K
            at = (other * LIST_Q + query) if OF_KEYS else (other * LIST_K + key)
            inside = (held & (at < others))[:, None] & (dims < DIM)[None, :]
            x = tl.load(x_head + at.to(tl.int64)[:, None] * x_strides[2] + dims[None, :], mask=inside, other=0.0)
            given = tl.where(own[:, None] == (key if OF_KEYS else query)[None, :], change[None, :], 0.0)
            if x.dtype == tl.float16:  # which has no room for the small gradients of a mean over many rows
                x = x.to(tl.float32)
            dx = tl.dot(given.to(x.dtype), x, dx, input_precision="ieee")
    at = line * OWN + own
    out_heads = heads // MEMBERS
    out = out_ptr + piece * out_strides[0]
    out += out_row // out_heads * out_strides[1] + out_row % out_heads * out_strides[2]
    out += at.to(tl.int64)[:, None] * out_strides[3] + dims[None, :] * out_strides[4]
    tl.store(out, (dx * scale).to(out_ptr.dtype.element_ty), mask=(at < tokens)[:, None] & (dims < DIM)[None, :])


class MaxConfig(NamedTuple):
    """max_registers: of a thread; 0: as many as the compiler likes."""

    num_warps: int
    max_registers: int


def _launch_options(config: MaxConfig) -> dict[str, int]:
    limit = {"maxnreg": config.max_registers} if config.max_registers else {}
    return {"num_warps": config.num_warps, **limit}


def _max_default(dims: Mapping[str, int], arch, dtype: torch.dtype) -> MaxConfig:
    if arch.kind == "cuda" and dtype != torch.float32 and dims["dim"] <= 64:
        # three CTAs of four warps on an SM: while one finds its largest scores the tensor cores serve the others
        return MaxConfig(4, 168)
    return MaxConfig(4 if dims["block_q"] <= 64 else 8, 0)


def _max_dims(q: Tensor, k: Tensor, scale=None, causal=False, block_k=128, block_q=1) -> dict[str, int]:
    rows = q.shape[0] * q.shape[1]
    return {"rows": rows, "tokens": q.shape[2], "keys": k.shape[2], "dim": q.shape[3], "block_q": block_q}


MAX_SPACE = Space(
    default=_max_default, dims=_max_dims, choices={"num_warps": (4, 8), "max_registers": (0, 128, 168)},
)  # fmt: skip


@register_kernel("block_max_scores", backend="triton", rank=20, rejects=score_reasons)
@optimize_kernel(space=MAX_SPACE)
def block_max_scores(
    q: Tensor,
    k: Tensor,
    scale: float | None = None,
    causal: bool = False,
    block_k: int = 128,
    block_q: int = 1,
    *,
    config: MaxConfig,
) -> Tensor:
    """One program for each tile of queries."""
    q, k = unit_stride(q), unit_stride(k)
    shape = (*q.shape[:2], cdiv(q.shape[2], block_q), cdiv(k.shape[2], block_k))
    scores = torch.full(shape, float("-inf"), dtype=torch.float32, device=q.device)
    if scores.numel() == 0:
        return scores
    block_m, block_n = tile_size(block_q, least_tile(q)), tile_size(block_k, least_tile(q))
    options = _launch_options(config) if block_m * block_n > 64 * 64 else {"num_warps": 4}
    launch(
        _block_max_fwd_kernel, (cdiv(q.shape[2], block_m) * q.shape[0] * q.shape[1],),
        scores_ptr=scores, BLOCK_M=block_m, BLOCK_N=block_n, **launch_arguments(q, k, scale, causal, block_q, block_k),
        **options, num_stages=2,
    )  # fmt: skip
    return scores


def _max_vjp_default(dims: Mapping[str, int], arch, dtype: torch.dtype) -> MaxConfig:
    if min(dims["block_q"], dims["block_k"]) < 128:
        return MaxConfig(4, 0)
    two_ctas = arch.kind == "cuda" and dims["bytes"] == 2 and dims["dim"] <= 64
    return MaxConfig(8, 128 if two_ctas else 0)


def _max_vjp_dims(dscores, q, k, scores, scale, causal, block_k, block_q, output_mask) -> dict[str, int]:
    return {**_max_dims(q, k, scale, causal, block_k, block_q), "block_k": block_k, "bytes": q.element_size()}


MAX_VJP_SPACE = Space(
    default=_max_vjp_default, dims=_max_vjp_dims, choices={"num_warps": (4, 8), "max_registers": (0, 128)},
)  # fmt: skip


@register_kernel("block_max_scores_vjp", backend="triton", rank=20, rejects=score_vjp_reasons)
@optimize_kernel(space=MAX_VJP_SPACE)
def block_max_scores_vjp(
    dscores: Tensor,
    q: Tensor,
    k: Tensor,
    scores: Tensor,
    scale: float | None,
    causal: bool,
    block_k: int,
    block_q: int,
    output_mask: Sequence[bool],
    *,
    config: MaxConfig,
) -> tuple[Tensor, Tensor]:
    """One program for each block of queries finds the places; one for each block of queries writes dq, one for each
    part of a block of keys that part of dk."""
    dq, dk = (torch.empty_like(x) if wanted else x.new_empty(0) for x, wanted in zip((q, k), output_mask))
    q, k, dscores = unit_stride(q), unit_stride(k), dscores.contiguous()
    if dscores.numel() == 0:
        return dq.zero_(), dk.zero_()
    offsets, indices, offsets_t, indices_t = listed((dscores != 0.0) & (scores > float("-inf")), dscores.numel())
    places = torch.empty(dscores.shape, dtype=torch.int32, device=q.device)
    shared = launch_arguments(q, k, scale, causal, block_q, block_k)
    launch(
        _block_max_places_kernel, (shared["rows"] * q.shape[0] * q.shape[1],),
        places_ptr=places, offsets_ptr=offsets, indices_ptr=indices, **shared,
        **_launch_options(config), num_stages=2 if q.shape[3] <= 64 else 1,
    )  # fmt: skip
    names = ("heads", "rows", "columns", "scale", "GROUP", "DIM", "BLOCK_D", "LIST_Q", "LIST_K")
    given = {"dscores_ptr": dscores, "places_ptr": places, **{name: shared[name] for name in names}}
    given |= {"ENTRIES": 16, "num_warps": 4 if shared["BLOCK_D"] <= 128 else 8, "num_stages": 1}
    if output_mask[0]:
        launch(
            _block_max_gradient_kernel, (shared["rows"] * q.shape[0] * q.shape[1],),
            x_ptr=k, out_ptr=dq, x_strides=k.stride(), out_strides=(0, *dq.stride()), others=k.shape[2],
            tokens=q.shape[2], OF_KEYS=False, offsets_ptr=offsets, indices_ptr=indices, splits=1, **given,
        )  # fmt: skip
    if output_mask[1]:
        # a block of keys that every block of queries has, as the first one often is, is one program's work
        splits = 4 if shared["rows"] >= 64 and 16 * k.numel() <= FEW_PARTS else 1
        out = dk if splits == 1 else torch.empty((splits, *k.shape), dtype=torch.float32, device=q.device)
        of_parts = (0, *dk.stride()) if splits == 1 else out.stride()
        launch(
            _block_max_gradient_kernel, (shared["columns"] * k.shape[0] * k.shape[1] * splits,),
            x_ptr=q, out_ptr=out, x_strides=q.stride(), out_strides=of_parts, others=q.shape[2],
            tokens=k.shape[2], OF_KEYS=True, offsets_ptr=offsets_t, indices_ptr=indices_t, splits=splits, **given,
        )  # fmt: skip
        if splits > 1:
            dk.copy_(out.sum(0))
    return dq, dk
