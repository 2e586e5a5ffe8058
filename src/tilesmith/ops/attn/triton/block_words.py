"""Triton kernel of the lists of a table whose rows have known numbers of entries, four columns at a time.

A word has four entries of a row, each 0 or 1. Sums of words are sums of four columns: as bytes of up to 255 rows, as
two halves of 16 bits each of up to 65,535.
"""

import triton
import triton.language as tl
from torch import Tensor

MOST_ROWS = 65535


def has_words(table: Tensor) -> bool:
    """Whether the kernel reads a table of bytes [B, L, R, C]."""
    whole = all(x % 4 == 0 for x in (table.data_ptr(), table.shape[3], *table.stride()[:3]))
    return whole and table.stride(3) == 1 and table.shape[2] <= MOST_ROWS


@triton.jit
def _halves(four):
    """The first and the third byte of words, and the second and the fourth, in 16 bits each."""
    return four & 0x00FF00FF, (four >> 8) & 0x00FF00FF


@triton.jit
def _both(two):
    """The two halves added up."""
    return (two & 0xFFFF) + (two >> 16)


@triton.jit
def _words_of_rows(table_ptr, first_row, first, rows, words, stride, ROWS: tl.constexpr, WIDE: tl.constexpr):
    """[ROWS, WIDE] words, 0 where there are none. stride: words from row to row."""
    row, word = first_row + tl.arange(0, ROWS), first + tl.arange(0, WIDE)
    held = (row < rows)[:, None] & (word < words)[None, :]
    return tl.load(table_ptr + row.to(tl.int64)[:, None] * stride + word[None, :], mask=held, other=0)


@triton.jit
def _words_of_columns(table_ptr, first_row, first, rows, words, stride, ROWS: tl.constexpr, WIDE: tl.constexpr):
    """The same as [WIDE, ROWS]."""
    row, word = first_row + tl.arange(0, ROWS), first + tl.arange(0, WIDE)
    held = (word < words)[:, None] & (row < rows)[None, :]
    return tl.load(table_ptr + row.to(tl.int64)[None, :] * stride + word[:, None], mask=held, other=0)


@triton.jit
def _entries_before(table_ptr, first, rows, stride, ROWS: tl.constexpr, WIDE: tl.constexpr):
    """How many entries there are in the words before `first`."""
    total = 0
    for start in range(0, rows, ROWS):
        for left in range(0, first, WIDE):
            even, odd = _halves(_words_of_rows(table_ptr, start, left, rows, first, stride, ROWS, WIDE))
            total += _both(tl.sum(tl.sum(even + odd, 0)))  # a half counts up to 2 * ROWS * WIDE
    return total


@triton.jit
def _write_rows(
    here, table_ptr, before, end, offsets_ptr, indices_ptr, first_row, rows, words, stride, room,
    LINES: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """The lists of LINES rows. here: the first WIDE words of each, which are loaded already."""
    line = first_row + tl.arange(0, LINES)
    tl.store(offsets_ptr + line, tl.minimum(before, room), mask=line < rows)
    tl.store(offsets_ptr + line + 1, tl.minimum(end, room), mask=line == rows - 1)
    for first in range(0, words, WIDE):
        even, odd = _halves(here)
        many = _both(even + odd)
        at = before[:, None] + tl.cumsum(many, 1) - many
        column = tl.broadcast_to(4 * (first + tl.arange(0, WIDE))[None, :], (LINES, WIDE))
        for i in tl.static_range(4):
            kept = (here >> (8 * i)) & 1
            tl.store(indices_ptr + at, column + i, mask=(kept != 0) & (at < room))
            at += kept
        before += tl.sum(many, 1)
        here = _words_of_rows(table_ptr, first_row, first + WIDE, rows, words, stride, LINES, WIDE)


@triton.jit
def _write_columns(
    here, table_ptr, before, offsets_ptr, indices_ptr, first_word, rows, words, stride, room,
    ROWS: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """The lists of four columns of each of WIDE words. here: the words in the first ROWS rows. before: entries of all
    columns before them."""
    word = first_word + tl.arange(0, WIDE)
    even, odd = _halves(here)
    evens, odds = tl.sum(even, 1), tl.sum(odd, 1)
    for start in range(ROWS, rows, ROWS):
        even, odd = _halves(_words_of_columns(table_ptr, start, first_word, rows, words, stride, ROWS, WIDE))
        evens += tl.sum(even, 1)
        odds += tl.sum(odd, 1)
    both = evens + odds
    many = _both(both)
    begin = before + tl.cumsum(many) - many
    second, third, fourth = begin + (evens & 0xFFFF), begin + (both & 0xFFFF), begin + (both & 0xFFFF) + (evens >> 16)
    place, held = offsets_ptr + 4 * word, word < words
    tl.store(place, tl.minimum(begin, room), mask=held)
    tl.store(place + 1, tl.minimum(second, room), mask=held)
    tl.store(place + 2, tl.minimum(third, room), mask=held)
    tl.store(place + 3, tl.minimum(fourth, room), mask=held)
    tl.store(place + 4, tl.minimum(begin + many, room), mask=word == words - 1)
    for start in range(0, rows, ROWS):
        even, odd = _halves(here)
        evens_to, odds_to = tl.cumsum(even, 1), tl.cumsum(odd, 1)
        row = tl.broadcast_to((start + tl.arange(0, ROWS))[None, :], (WIDE, ROWS))
        # behind the entries before it, of which the sums count itself as one
        _store_kept(indices_ptr - 1, begin[:, None] + (evens_to & 0xFFFF), row, even & 1, room)
        _store_kept(indices_ptr - 1, second[:, None] + (odds_to & 0xFFFF), row, odd & 1, room)
        _store_kept(indices_ptr - 1, third[:, None] + (evens_to >> 16), row, even >> 16, room)
        _store_kept(indices_ptr - 1, fourth[:, None] + (odds_to >> 16), row, odd >> 16, room)
        if start + ROWS < rows:
            evens, odds = tl.sum(even, 1), tl.sum(odd, 1)
            begin += evens & 0xFFFF
            second += odds & 0xFFFF
            third += evens >> 16
            fourth += odds >> 16
            here = _words_of_columns(table_ptr, start + ROWS, first_word, rows, words, stride, ROWS, WIDE)


@triton.jit
def _store_kept(indices_ptr, at, row, kept, room):
    tl.store(indices_ptr + at, row, mask=(kept != 0) & (at <= room))


@triton.jit
def _counted_words_kernel(
    keep_ptr, counts_ptr, offsets_ptr, indices_ptr, offsets_t_ptr, indices_t_ptr, strides, lists, tables, rows, columns,
    room, ROW_LINES: tl.constexpr, COLUMN_LINES: tl.constexpr, BLOCK: tl.constexpr, FILL: tl.constexpr,
    CHAINED: tl.constexpr,
):  # fmt: skip
    """As `_counted_lists_kernel`, for a table that `has_words`. What a program reads first is on its way before any of
    it is added up."""
    WIDE: tl.constexpr = COLUMN_LINES // 4
    by_rows, by_columns = tl.cdiv(rows, ROW_LINES), tl.cdiv(columns, COLUMN_LINES)
    tiles = by_rows + by_columns
    number = tl.program_id(0) // tiles
    tile = tl.program_id(0) - number * tiles
    keep_ptr += (number // lists).to(tl.int64) * strides[0] + (number % lists).to(tl.int64) * strides[1]
    table_ptr, words, stride = keep_ptr.to(tl.pointer_type(tl.int32)), columns // 4, strides[2] // 4
    if CHAINED:
        tl.extra.cuda.gdc_wait()
    row = tl.arange(0, 512)
    many = tl.load(counts_ptr + row, mask=row < rows, other=0)
    each = 0
    if tile >= by_columns:
        tile -= by_columns
        first_row = tile * ROW_LINES
        line = first_row + tl.arange(0, ROW_LINES)
        own = tl.load(counts_ptr + line, mask=line < rows, other=0)
        here = _words_of_rows(table_ptr, first_row, 0, rows, words, stride, ROW_LINES, BLOCK // 4)
        earlier = tl.sum(tl.where(row < first_row, many, 0))
        each += tl.sum(many)
        for first in range(512, rows, 512):
            more = tl.load(counts_ptr + first + row, mask=first + row < rows, other=0)
            each += tl.sum(more)
            earlier += tl.sum(tl.where(first + row < first_row, more, 0))
        end = number * each + earlier + tl.cumsum(own)
        offsets_ptr += number.to(tl.int64) * (rows + 1)
        _write_rows(
            here, table_ptr, end - own, end, offsets_ptr, indices_ptr, first_row, rows, words, stride, room,
            ROW_LINES, BLOCK // 4,
        )  # fmt: skip
        _fill(indices_ptr, tables * each + (number * by_rows + tile) * FILL, tables * by_rows, room, FILL)
    else:
        first_word = tile * WIDE
        there = _words_of_columns(table_ptr, 0, first_word, rows, words, stride, BLOCK, WIDE)
        before = _entries_before(table_ptr, first_word, rows, stride, 256, 64)
        each += tl.sum(many)
        for first in range(512, rows, 512):
            each += tl.sum(tl.load(counts_ptr + first + row, mask=first + row < rows, other=0))
        offsets_t_ptr += number.to(tl.int64) * (columns + 1)
        _write_columns(
            there, table_ptr, number * each + before, offsets_t_ptr, indices_t_ptr, first_word, rows, words, stride,
            room, BLOCK, WIDE,
        )  # fmt: skip
        _fill(indices_t_ptr, tables * each + (number * by_columns + tile) * FILL, tables * by_columns, room, FILL)


@triton.jit
def _fill(indices_ptr, begin, programs, room, FILL: tl.constexpr):
    """A share of the zeros behind the last list."""
    for first in range(begin, room, programs * FILL):
        at = first + tl.arange(0, FILL)
        tl.store(indices_ptr + at, tl.zeros((FILL,), tl.int32), mask=at < room)
