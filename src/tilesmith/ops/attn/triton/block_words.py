"""Triton kernels of the lists of a table whose rows have known numbers of entries, four columns at a time.

A word has four entries of a row, each 0 or 1. Its bytes are added up as two halves of 16 bits, for up to 65,535 rows.
Where rows are whole, aligned words (WHOLE) a word is one load; else, as of 33 blocks, it is put together from four.
Programs are one warp each and many, so that none of them waits for another warp and their code is short: a program
that runs most of its code once takes as long as it takes to fetch it.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from tilesmith.device.triton.column_sums import chained
from tilesmith.engine import cdiv, launch

MOST_ROWS = 65535
TWO = tl.constexpr(2)  # words whose columns a program counts


def _whole(table: Tensor) -> bool:
    """Whether the rows of a table of bytes [B, L, R, C] are whole, aligned words of four bytes."""
    return table.stride(3) == 1 and all(x % 4 == 0 for x in (table.data_ptr(), table.shape[3], *table.stride()[:3]))


@triton.jit
def _halves(four):
    """The first and the third byte of words, and the second and the fourth, in 16 bits each."""
    return four & 0x00FF00FF, (four >> 8) & 0x00FF00FF


@triton.jit
def _both(two):
    """The two halves added up."""
    return (two & 0xFFFF) + (two >> 16)


@triton.jit
def _table_of(keep_ptr, strides, lists, number, WHOLE: tl.constexpr):
    """One table: its words, or its bytes."""
    keep_ptr += (number // lists).to(tl.int64) * strides[0] + (number % lists).to(tl.int64) * strides[1]
    return keep_ptr.to(tl.pointer_type(tl.int32)) if WHOLE else keep_ptr


@triton.jit
def _sizes(strides, columns, WHOLE: tl.constexpr):
    """Words of a row, and from one row to the next: in words, or in bytes."""
    words, stride = columns // 4, strides[2] // 4
    if not WHOLE:
        words, stride = tl.cdiv(columns, 4), strides[2]
    return words, stride


@triton.jit
def _at(table_ptr, word, strides, WHOLE: tl.constexpr):
    """Where a word of the first row begins."""
    return table_ptr + word if WHOLE else table_ptr + (4 * word).to(tl.int64) * strides[3]


@triton.jit
def _inside(held, column, columns, WHOLE: tl.constexpr):
    """Of columns of words that are held, those that the table has."""
    return held if WHOLE else held & (column < columns)


@triton.jit
def _load_words(place_ptr, word, strides, columns, held, WHOLE: tl.constexpr):
    """Words that begin at `place_ptr`; 0 where they are not held, and for columns that the table has not."""
    if WHOLE:
        four = tl.load(place_ptr, mask=held, other=0)
    else:
        four = tl.load(place_ptr, mask=held, other=0).to(tl.int32)
        for i in tl.static_range(1, 4):
            place_ptr += strides[3]
            mine = held & (4 * word + i < columns)
            four |= tl.load(place_ptr, mask=mine, other=0).to(tl.int32) << (8 * i)
    return four


@triton.jit
def _sums_before(counts_ptr, end, count, BLOCK: tl.constexpr):
    """The sum of what comes before `end`, and of all."""
    before, every = 0, 0
    for first in range(0, count, BLOCK):
        at = first + tl.arange(0, BLOCK)
        here = tl.load(counts_ptr + at, mask=at < count, other=0)
        before += tl.sum(tl.where(at < end, here, 0))
        every += tl.sum(here)
    return before, every


@triton.jit
def _write_row(
    table_ptr, offsets_ptr, indices_ptr, strides, row, rows, words, columns, before, end, room, WIDE: tl.constexpr,
    WHOLE: tl.constexpr,
):  # fmt: skip
    """The list of one row."""
    tl.store(offsets_ptr + row, tl.minimum(before, room))
    tl.store(offsets_ptr + row + 1, tl.minimum(end, room), mask=row == rows - 1)
    for first in range(0, words, WIDE):
        word = first + tl.arange(0, WIDE)
        here = _load_words(_at(table_ptr, word, strides, WHOLE), word, strides, columns, word < words, WHOLE)
        even, odd = _halves(here)
        many = _both(even + odd)
        at = before + tl.cumsum(many) - many
        for i in tl.static_range(4):
            kept = (here >> (8 * i)) & 1
            tl.store(indices_ptr + at, 4 * word + i, mask=(kept != 0) & (at < room))
            at += kept
        before += tl.sum(many)


@triton.jit
def _count_words(
    table_ptr, counts_ptr, strides, first, rows, words, columns, stride, ROWS: tl.constexpr, WHOLE: tl.constexpr
):  # fmt: skip
    """How many entries the columns of TWO words have."""
    word = first + tl.arange(0, TWO)
    evens, odds = tl.zeros((TWO,), tl.int32), tl.zeros((TWO,), tl.int32)
    for start in range(0, rows, ROWS):
        row = start + tl.arange(0, ROWS)
        held = (row < rows)[:, None] & (word < words)[None, :]
        place_ptr = _at(table_ptr + row.to(tl.int64)[:, None] * stride, word[None, :], strides, WHOLE)
        even, odd = _halves(_load_words(place_ptr, word[None, :], strides, columns, held, WHOLE))
        evens += tl.sum(even, 0)
        odds += tl.sum(odd, 0)
    place, held = counts_ptr + 4 * word, word < words
    tl.store(place, evens & 0xFFFF, mask=held)
    tl.store(place + 1, odds & 0xFFFF, mask=_inside(held, 4 * word + 1, columns, WHOLE))
    tl.store(place + 2, evens >> 16, mask=_inside(held, 4 * word + 2, columns, WHOLE))
    tl.store(place + 3, odds >> 16, mask=_inside(held, 4 * word + 3, columns, WHOLE))


@triton.jit
def _word_rows_kernel(
    keep_ptr, row_counts_ptr, counts_ptr, offsets_ptr, indices_ptr, strides, lists, rows, columns, room,
    ROWS: tl.constexpr, WIDE: tl.constexpr, WHOLE: tl.constexpr, CHAINED: tl.constexpr,
):  # fmt: skip
    """The lists of rows, one a program, and how many entries the columns have, eight a program: those come first."""
    words, stride = _sizes(strides, columns, WHOLE)
    counters = tl.cdiv(words, TWO)
    programs = counters + rows
    number = tl.program_id(0) // programs
    line = tl.program_id(0) - number * programs
    table_ptr = _table_of(keep_ptr, strides, lists, number, WHOLE)
    if CHAINED:  # `_word_columns_kernel` waits for these programs
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    if line < counters:
        counts_ptr += number * columns
        _count_words(table_ptr, counts_ptr, strides, line * TWO, rows, words, columns, stride, ROWS, WHOLE)
    else:
        row = line - counters
        before, every = _sums_before(row_counts_ptr, row, rows, ROWS)
        before += number * every
        end = before + tl.load(row_counts_ptr + row)
        offsets_ptr += number.to(tl.int64) * (rows + 1)
        table_ptr += row.to(tl.int64) * stride
        _write_row(
            table_ptr, offsets_ptr, indices_ptr, strides, row, rows, words, columns, before, end, room, WIDE, WHOLE
        )  # fmt: skip


@triton.jit
def _store_kept(indices_ptr, at, row, kept, room):
    tl.store(indices_ptr + at, row, mask=(kept != 0) & (at < room))


@triton.jit
def _word_columns_kernel(
    keep_ptr, counts_ptr, offsets_ptr, indices_ptr, row_indices_ptr, strides, lists, tables, rows, columns, room,
    ROWS: tl.constexpr, FILL: tl.constexpr, WHOLE: tl.constexpr, CHAINED: tl.constexpr,
):  # fmt: skip
    """The lists of four columns, and a share of the zeros behind the last lists of columns and of rows."""
    words, stride = _sizes(strides, columns, WHOLE)
    number = tl.program_id(0) // words
    word = tl.program_id(0) - number * words
    table_ptr = _at(_table_of(keep_ptr, strides, lists, number, WHOLE), word, strides, WHOLE)
    if CHAINED:
        tl.extra.cuda.gdc_wait()
    counts_ptr += number * columns
    begin, every = _sums_before(counts_ptr, 4 * word, columns, ROWS)
    begin += number * every
    second = begin + tl.load(counts_ptr + 4 * word)
    third = second + tl.load(counts_ptr + 4 * word + 1, mask=_inside(True, 4 * word + 1, columns, WHOLE), other=0)
    fourth = third + tl.load(counts_ptr + 4 * word + 2, mask=_inside(True, 4 * word + 2, columns, WHOLE), other=0)
    end = fourth + tl.load(counts_ptr + 4 * word + 3, mask=_inside(True, 4 * word + 3, columns, WHOLE), other=0)
    offsets_ptr += number.to(tl.int64) * (columns + 1) + 4 * word
    tl.store(offsets_ptr, tl.minimum(begin, room))
    tl.store(offsets_ptr + 1, tl.minimum(second, room))
    # behind the last column stands where its list ends
    tl.store(offsets_ptr + 2, tl.minimum(third, room), mask=_inside(True, 4 * word + 1, columns, WHOLE))
    tl.store(offsets_ptr + 3, tl.minimum(fourth, room), mask=_inside(True, 4 * word + 2, columns, WHOLE))
    last = _inside(word == words - 1, 4 * word + 3, columns, WHOLE)
    tl.store(offsets_ptr + 4, tl.minimum(end, room), mask=last)
    for start in range(0, rows, ROWS):
        row = start + tl.arange(0, ROWS)
        place_ptr = table_ptr + row.to(tl.int64) * stride
        even, odd = _halves(_load_words(place_ptr, word, strides, columns, row < rows, WHOLE))
        evens, odds = tl.cumsum(even) - even, tl.cumsum(odd) - odd
        _store_kept(indices_ptr, begin + (evens & 0xFFFF), row, even & 1, room)
        _store_kept(indices_ptr, second + (odds & 0xFFFF), row, odd & 1, room)
        _store_kept(indices_ptr, third + (evens >> 16), row, even >> 16, room)
        _store_kept(indices_ptr, fourth + (odds >> 16), row, odd >> 16, room)
        all_even, all_odd = tl.sum(even), tl.sum(odd)
        begin += all_even & 0xFFFF
        second += all_odd & 0xFFFF
        third += all_even >> 16
        fourth += all_odd >> 16
    for first in range(tables * every + tl.program_id(0) * FILL, room, tl.num_programs(0) * FILL):
        at = first + tl.arange(0, FILL)
        tl.store(indices_ptr + at, tl.zeros((FILL,), tl.int32), mask=at < room)
        tl.store(row_indices_ptr + at, tl.zeros((FILL,), tl.int32), mask=at < room)


def write_lists(table: Tensor, row_counts: Tensor, out: dict[str, Any]) -> None:
    """Write the lists of a table of bytes [B, L, R, C], R <= MOST_ROWS, by how many entries its rows have. out:
    offsets_ptr, indices_ptr, offsets_t_ptr, indices_t_ptr and room."""
    batch, lists, rows, columns = table.shape
    tables, words = batch * lists, cdiv(columns, 4)
    counts = torch.empty(tables * columns, dtype=torch.int32, device=table.device)
    sizes = {"strides": table.stride(), "lists": lists, "rows": rows, "columns": columns, "ROWS": 256}
    sizes |= {"room": out["room"], "WHOLE": _whole(table), "num_warps": 1, **chained(table.device)}
    launch(
        _word_rows_kernel, (tables * (cdiv(words, TWO.value) + rows),),
        keep_ptr=table, row_counts_ptr=row_counts, counts_ptr=counts, offsets_ptr=out["offsets_ptr"],
        indices_ptr=out["indices_ptr"], WIDE=64, **sizes,
    )  # fmt: skip
    launch(
        _word_columns_kernel, (tables * words,),
        keep_ptr=table, counts_ptr=counts, offsets_ptr=out["offsets_t_ptr"], indices_ptr=out["indices_t_ptr"],
        row_indices_ptr=out["indices_ptr"], tables=tables, FILL=256, **sizes,
    )  # fmt: skip
