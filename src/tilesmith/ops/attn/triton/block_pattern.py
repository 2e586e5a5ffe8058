"""Triton kernel for patterns in closed form: which columns a row keeps, and how many, is arithmetic on its number.

It writes a table of bytes, from which lists by rows and by columns are made as for any other choice of blocks. A row's
entries are few, and each takes divisions; whether it keeps a given column takes more of them, for all pairs.
"""

from collections.abc import Mapping

import torch
import triton
import triton.language as tl
from torch import Tensor

from tilesmith.engine import cdiv, launch, optimize_kernel, register_kernel
from tilesmith.ops.attn import block_pattern_reference as reference
from tilesmith.ops.attn.block_pattern_reference import row_budget
from tilesmith.ops.attn.triton.block_choice import listed

RUN = tl.constexpr(reference.RUN)
GOLDEN = tl.constexpr(reference.GOLDEN)


@triton.jit
def _mixed(x):
    """The finaliser of MurmurHash3 for 32 bits."""
    x = (x ^ (x >> 16)) * 0x85EBCA6B
    x = (x ^ (x >> 13)) * 0xC2B2AE35
    return x ^ (x >> 16)


@triton.jit
def _list_word(seed_ptr, number):
    """The 32 bits from which those of a list's entries are mixed."""
    seed = tl.load(seed_ptr)
    word = _mixed(_mixed(seed.to(tl.uint32) + GOLDEN) ^ (seed >> 32).to(tl.uint32))
    return _mixed(word + number.to(tl.uint32) + GOLDEN)


@triton.jit
def _begins(row, shift, columns, rest, spare, LONG: tl.constexpr):
    """Entries of a list before each row. LONG: visible blocks times `rest` do not fit 32 bits, in which a division is
    several times as fast as in 64."""
    blind = tl.minimum(tl.maximum(row * 0 + 1 - shift, 0), row)
    full = tl.maximum(blind, tl.minimum(row, row * 0 + columns - shift))
    across, under = blind + full - 1 + 2 * shift, row - full
    if LONG:
        across, under = across.to(tl.int64), under.to(tl.int64)
    seen = across * (full - blind) // 2 + under * columns
    return row - blind + (seen - (row - blind)) * rest // spare


@triton.jit
def _rows(row, shift, lag, columns, rest, spare, PATTERN: tl.constexpr, CAUSAL: tl.constexpr, WIDE: tl.constexpr,
          LONG: tl.constexpr):  # fmt: skip
    """Of each row: its first entry (int64), how many lie outside its run, in the run, where that starts, how many
    columns are outside."""
    begin = _begins(row, shift, columns, rest, spare, LONG)
    count = (_begins(row + 1, shift, columns, rest, spare, LONG) - begin).to(tl.int32)
    seen = tl.minimum(tl.maximum(row + shift, 0), columns)
    if CAUSAL:
        own = seen - 1
    else:
        own = tl.minimum(tl.maximum(row + lag, 0), columns - 1)
    if PATTERN == "random":
        near = tl.minimum(count, 1)
    elif PATTERN == "block_sparse":
        near = tl.minimum(count, RUN)
    elif PATTERN == "strided":
        near = (count + 1) // 2
    else:
        near = count - tl.where(count > 1, tl.maximum(count // 4, 1), 0)
    others = count - near
    start = tl.minimum(tl.maximum(own - near // 2, 0), seen - near)
    if PATTERN == "local_global":
        start = tl.maximum(start, others)
    width = seen - near
    if WIDE:
        others, width = others.to(tl.int64), width.to(tl.int64)
    return begin, others, near, start, width


@triton.jit
def _outside(place, begin, others, width, word, PATTERN: tl.constexpr):
    """Which of the columns outside the run the entry `place` takes."""
    many = tl.maximum(others, 1)
    if PATTERN == "local_global":
        return place
    elif PATTERN == "strided":
        return place * width // many
    elif PATTERN == "block_sparse":
        runs = tl.maximum((others + RUN - 1) // RUN, 1)
        return place + place // RUN * (width - others) // runs
    else:
        low, high = place * width // many, (place + 1) * width // many
        bits = _mixed(word + (begin + place).to(tl.uint32))
        return low + tl.umulhi(bits, (high - low).to(tl.uint32)).to(tl.int32)


@triton.jit
def _block_pattern_kernel(
    seed_ptr, keep_ptr, counts_ptr, rows, columns, shift, lag, rest, spare, PATTERN: tl.constexpr,
    CAUSAL: tl.constexpr, WIDE: tl.constexpr, LONG: tl.constexpr, LINES: tl.constexpr, PLACES: tl.constexpr,
):  # fmt: skip
    """LINES rows of the table of one list, and how many entries they have."""
    tiles = tl.cdiv(rows, LINES)
    number = tl.program_id(0) // tiles
    row = (tl.program_id(0) - number * tiles) * LINES + tl.arange(0, LINES)
    held = row < rows
    keep = keep_ptr + (number * rows + row).to(tl.int64)[:, None] * columns
    for first in range(0, columns, 4 * PLACES):
        column = (first + tl.arange(0, 4 * PLACES))[None, :]
        nothing = tl.zeros((LINES, 4 * PLACES), tl.uint8)
        tl.store(keep + column, nothing, mask=held[:, None] & (column < columns))
    begin, others, near, start, width = _rows(row, shift, lag, columns, rest, spare, PATTERN, CAUSAL, WIDE, LONG)
    others, near = tl.where(held, others, 0), tl.where(held, near, 0)
    tl.store(counts_ptr + row, (others + near).to(tl.int32), mask=held & (number == 0))
    word = _list_word(seed_ptr, number)
    tl.debug_barrier()  # other lanes wrote the zeros
    for first in range(0, tl.max(tl.maximum(others, near)).to(tl.int32), PLACES):
        place = (first + tl.arange(0, PLACES))[None, :]
        outside = _outside(place, begin[:, None], others[:, None], width[:, None], word, PATTERN)
        outside = tl.where(outside < start[:, None], outside, outside + near[:, None])
        kept = tl.full((LINES, PLACES), 1, tl.uint8)
        tl.store(keep + outside, kept, mask=place < others[:, None])
        tl.store(keep + start[:, None] + place, kept, mask=place < near[:, None])


LINES = 8


@register_kernel("block_pattern", backend="triton", rank=20)
@optimize_kernel(num_warps=LINES)
def block_pattern(
    seed: Tensor,
    pattern: str,
    tokens: int,
    keys: int,
    sparsity_ratio: float = 0.9,
    lists: int = 1,
    block: int = 128,
    causal: bool = True,
    *,
    config: Mapping[str, int],
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """One kernel for the tables of all lists, one for the lists."""
    b = row_budget(tokens, keys, block, causal, sparsity_ratio)
    keep = torch.empty(1, lists, b.rows, b.columns, dtype=torch.bool, device=seed.device)
    counts = torch.empty(b.rows, dtype=torch.int32, device=seed.device)
    launch(
        _block_pattern_kernel, (lists * cdiv(b.rows, LINES),),
        seed, keep.view(torch.uint8), counts, b.rows, b.columns, b.shift, (keys - tokens) // block, b.rest,
        max(b.seen - b.least, 1), PATTERN=pattern, CAUSAL=causal,
        WIDE=b.columns > 1 << 15,  # numbers are multiplied by each other
        LONG=b.seen * max(b.rest, 2) >= 1 << 31,
        LINES=LINES, PLACES=64, **config,
    )  # fmt: skip
    return listed(keep, lists * b.total, counts)
