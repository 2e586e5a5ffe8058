"""One Triton kernel for the block lists of patterns in closed form.

Programs of rows write the lists by rows, programs of columns those by columns; neither waits for the other. Where a row
begins, which columns it keeps and how many of them lie before a column are all arithmetic on its number.
"""

from collections.abc import Mapping

import torch
import triton
import triton.language as tl
from torch import Tensor

from tilesmith.engine import cdiv, launch, optimize_kernel, register_kernel
from tilesmith.ops.attn import block_pattern_reference as reference
from tilesmith.ops.attn.block_pattern_reference import row_budget

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
def _before(column, begin, others, width, word, PATTERN: tl.constexpr):
    """How many entries outside the run take one of the first `column` columns there."""
    if PATTERN == "local_global":
        return tl.minimum(column, others)
    elif PATTERN == "block_sparse":
        runs = tl.maximum((others + RUN - 1) // RUN, 1)
        length = tl.maximum(RUN * runs + width - others, 1)
        begun = (column * runs + length - 1) // length
        inside = tl.minimum(column - (begun - 1) * length // runs, RUN)
        return tl.minimum(tl.where(begun > 0, RUN * (begun - 1) + inside, 0), others)
    else:
        wide = tl.maximum(width, 1)
        begun = (column * others + wide - 1) // wide
        if PATTERN == "strided":
            return begun
        else:
            last = _outside(tl.maximum(begun - 1, 0), begin, others, width, word, PATTERN)
            return tl.where(begun > 0, begun - 1 + (last < column).to(tl.int32), 0)


@triton.jit
def _holds(column, begin, others, near, start, width, word, PATTERN: tl.constexpr, WIDE: tl.constexpr):
    """Whether a row keeps a column: [columns, rows]."""
    in_run = (column >= start) & (column < start + near)
    place = tl.where(column < start, column, column - near)
    if WIDE:
        place = place.to(tl.int64)
    seen = (place >= 0) & (place < width) & (others > 0)
    place = tl.where(seen, place, 0)
    if PATTERN == "local_global":
        kept = place < others
    elif PATTERN == "block_sparse":
        runs = tl.maximum((others + RUN - 1) // RUN, 1)
        length = tl.maximum(RUN * runs + width - others, 1)
        run = ((place + 1) * runs + length - 1) // length - 1
        inside = place - run * length // runs
        kept = (inside < RUN) & (RUN * run + inside < others)
    else:
        wide = tl.maximum(width, 1)
        stretch = tl.maximum(((place + 1) * others + wide - 1) // wide - 1, 0)
        kept = _outside(stretch, begin, others, width, word, PATTERN) == place
    return in_run | (seen & kept)


@triton.jit
def _write_rows(
    offsets_ptr, indices_ptr, number, first_row, word, rows, columns, shift, lag, rest, spare, total,
    PATTERN: tl.constexpr, CAUSAL: tl.constexpr, WIDE: tl.constexpr, LONG: tl.constexpr, LINES: tl.constexpr,
    PLACES: tl.constexpr,
):  # fmt: skip
    """The lists of LINES rows. Entries before the run come first, then the run, then those behind it."""
    row = first_row + tl.arange(0, LINES)
    begin, others, near, start, width = _rows(row, shift, lag, columns, rest, spare, PATTERN, CAUSAL, WIDE, LONG)
    held = row < rows
    others, near = tl.where(held, others, 0), tl.where(held, near, 0)
    out = number.to(tl.int64) * total + begin
    line = offsets_ptr + number.to(tl.int64) * (rows + 1) + row
    tl.store(line, out, mask=held)
    end = out + others + near
    tl.store(line + 1, end, mask=row == rows - 1)
    before = tl.zeros((LINES,), tl.int32)
    for first in range(0, tl.max(others), PLACES):
        place = (first + tl.arange(0, PLACES))[None, :]
        inside = place < others[:, None]
        outside = _outside(place, begin[:, None], others[:, None], width[:, None], word, PATTERN)
        left = outside < start[:, None]
        more = tl.where(left, 0, near[:, None])
        at = indices_ptr + out[:, None] + place + more
        tl.store(at, (outside + more).to(tl.int32), mask=inside)
        before += tl.sum((inside & left).to(tl.int32), 1)
    for first in range(0, tl.max(near), PLACES):
        place = (first + tl.arange(0, PLACES))[None, :]
        at = indices_ptr + (out + before)[:, None] + place
        tl.store(at, start[:, None] + place, mask=place < near[:, None])


@triton.jit
def _write_columns(
    offsets_ptr, indices_ptr, number, first_column, word, rows, columns, shift, lag, rest, spare, total,
    PATTERN: tl.constexpr, CAUSAL: tl.constexpr, WIDE: tl.constexpr, LONG: tl.constexpr, LINES: tl.constexpr,
    PLACES: tl.constexpr,
):  # fmt: skip
    """The lists of LINES columns: counted, then written, by the same code, since programs as short as these wait for
    it."""
    column = first_column + tl.arange(0, LINES)
    counts = tl.zeros((LINES,), tl.int32)
    begins = tl.zeros((PLACES,), tl.int64)
    at = tl.zeros((LINES,), tl.int64)
    steps = tl.cdiv(rows, PLACES)
    for step in range(2 * steps):
        row = step % steps * PLACES + tl.arange(0, PLACES)
        begin, others, near, start, width = _rows(row, shift, lag, columns, rest, spare, PATTERN, CAUSAL, WIDE, LONG)
        found = _holds(
            column[:, None], begin[None, :], others[None, :], near[None, :], start[None, :], width[None, :], word,
            PATTERN, WIDE,
        )  # fmt: skip
        found = found & (row < rows)[None, :] & (column < columns)[:, None]
        here = found.to(tl.int32)
        if step < steps:
            counts += tl.sum(here, 1)
            place = tl.where(start > first_column, first_column, tl.maximum(start, first_column - near))
            place = tl.minimum(place, width)
            left = _before(place, begin, others, width, word, PATTERN)
            left += tl.minimum(tl.maximum(first_column - start, 0), near)
            begins += tl.where(row < rows, left, 0)
            if step == steps - 1:
                ends = number.to(tl.int64) * total + tl.sum(begins) + tl.cumsum(counts)
                at = ends - counts
                line = offsets_ptr + number.to(tl.int64) * (columns + 1) + column
                tl.store(line, at, mask=column < columns)
                tl.store(line + 1, ends, mask=column == columns - 1)
        else:
            entry = at[:, None] + tl.cumsum(here, 1) - 1
            tl.store(indices_ptr + entry, tl.broadcast_to(row[None, :], (LINES, PLACES)), mask=found)
            at += tl.sum(here, 1)


@triton.jit
def _block_pattern_kernel(
    seed_ptr, offsets_ptr, indices_ptr, offsets_t_ptr, indices_t_ptr, rows, columns, shift, lag, rest, spare, total,
    PATTERN: tl.constexpr, CAUSAL: tl.constexpr, WIDE: tl.constexpr, LONG: tl.constexpr, LINES: tl.constexpr,
    PLACES: tl.constexpr,
):  # fmt: skip
    """The tiles of columns of a list, which take longer, then its tiles of rows."""
    by_columns = tl.cdiv(columns, LINES)
    tiles = by_columns + tl.cdiv(rows, LINES)
    number = tl.program_id(0) // tiles
    tile = tl.program_id(0) - number * tiles
    word = _list_word(seed_ptr, number)
    if tile < by_columns:
        _write_columns(
            offsets_t_ptr, indices_t_ptr, number, tile * LINES, word, rows, columns, shift, lag, rest, spare, total,
            PATTERN, CAUSAL, WIDE, LONG, LINES, PLACES,
        )  # fmt: skip
    else:
        _write_rows(
            offsets_ptr, indices_ptr, number, (tile - by_columns) * LINES, word, rows, columns, shift, lag, rest,
            spare, total, PATTERN, CAUSAL, WIDE, LONG, LINES, PLACES,
        )  # fmt: skip


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
    """One program for each few rows and for each few columns of a list."""
    b = row_budget(tokens, keys, block, causal, sparsity_ratio)
    offsets, offsets_t = (
        torch.empty(1, lists, n + 1, dtype=torch.int32, device=seed.device) for n in (b.rows, b.columns)
    )
    indices, indices_t = (torch.empty(lists * b.total, dtype=torch.int32, device=seed.device) for _ in range(2))
    # a line of 32 places is a warp's: 16 KiB of code, for which programs as short as these wait; with 64 places 38
    launch(
        _block_pattern_kernel, (lists * (cdiv(b.columns, LINES) + cdiv(b.rows, LINES)),),
        seed, offsets, indices, offsets_t, indices_t, b.rows, b.columns, b.shift, (keys - tokens) // block, b.rest,
        max(b.seen - b.least, 1), b.total, PATTERN=pattern, CAUSAL=causal,
        WIDE=b.columns > 1 << 15,  # numbers are multiplied by each other
        LONG=b.seen * max(b.rest, 2) >= 1 << 31,
        LINES=LINES, PLACES=32, **config,
    )  # fmt: skip
    return offsets, indices, offsets_t, indices_t
