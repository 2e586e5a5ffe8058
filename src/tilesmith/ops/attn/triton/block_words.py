"""Triton kernels of the lists of a table whose rows have known numbers of entries, four columns at a time.

A word has four entries of a row, each 0 or 1. Its bytes are added up as two halves of 16 bits, for up to 65,535 rows.
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


def has_words(table: Tensor) -> bool:
    """Whether the kernels read a table of bytes [B, L, R, C]: rows are whole, aligned words of four bytes, and counts
    of columns fit 16 bits. `_counted_lists_kernel` reads other tables."""
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
def _table_of(keep_ptr, strides, lists, number):
    """The words of one table."""
    keep_ptr += (number // lists).to(tl.int64) * strides[0] + (number % lists).to(tl.int64) * strides[1]
    return keep_ptr.to(tl.pointer_type(tl.int32))


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
def _write_row(table_ptr, offsets_ptr, indices_ptr, row, rows, words, before, end, room, WIDE: tl.constexpr):
    """The list of one row."""
    tl.store(offsets_ptr + row, tl.minimum(before, room))
    tl.store(offsets_ptr + row + 1, tl.minimum(end, room), mask=row == rows - 1)
    for first in range(0, words, WIDE):
        word = first + tl.arange(0, WIDE)
        here = tl.load(table_ptr + word, mask=word < words, other=0)
        even, odd = _halves(here)
        many = _both(even + odd)
        at = before + tl.cumsum(many) - many
        for i in tl.static_range(4):
            kept = (here >> (8 * i)) & 1
            tl.store(indices_ptr + at, 4 * word + i, mask=(kept != 0) & (at < room))
            at += kept
        before += tl.sum(many)


@triton.jit
def _count_words(table_ptr, counts_ptr, first, rows, words, stride, ROWS: tl.constexpr):
    """How many entries the columns of TWO words have."""
    word = first + tl.arange(0, TWO)
    evens, odds = tl.zeros((TWO,), tl.int32), tl.zeros((TWO,), tl.int32)
    for start in range(0, rows, ROWS):
        row = start + tl.arange(0, ROWS)
        held = (row < rows)[:, None] & (word < words)[None, :]
        even, odd = _halves(tl.load(table_ptr + row.to(tl.int64)[:, None] * stride + word[None, :], mask=held, other=0))
        evens += tl.sum(even, 0)
        odds += tl.sum(odd, 0)
    place, held = counts_ptr + 4 * word, word < words
    tl.store(place, evens & 0xFFFF, mask=held)
    tl.store(place + 1, odds & 0xFFFF, mask=held)
    tl.store(place + 2, evens >> 16, mask=held)
    tl.store(place + 3, odds >> 16, mask=held)


@triton.jit
def _word_rows_kernel(
    keep_ptr, row_counts_ptr, counts_ptr, offsets_ptr, indices_ptr, strides, lists, rows, columns, room,
    ROWS: tl.constexpr, WIDE: tl.constexpr, CHAINED: tl.constexpr,
):  # fmt: skip
    """The lists of rows, one a program, and how many entries the columns have, eight a program: those come first."""
    words, stride = columns // 4, strides[2] // 4
    counters = tl.cdiv(words, TWO)
    programs = counters + rows
    number = tl.program_id(0) // programs
    line = tl.program_id(0) - number * programs
    table_ptr = _table_of(keep_ptr, strides, lists, number)
    if CHAINED:  # `_word_columns_kernel` waits for these programs
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    if line < counters:
        _count_words(table_ptr, counts_ptr + number * columns, line * TWO, rows, words, stride, ROWS)
    else:
        row = line - counters
        before, every = _sums_before(row_counts_ptr, row, rows, ROWS)
        before += number * every
        end = before + tl.load(row_counts_ptr + row)
        offsets_ptr += number.to(tl.int64) * (rows + 1)
        table_ptr += row.to(tl.int64) * stride
        _write_row(table_ptr, offsets_ptr, indices_ptr, row, rows, words, before, end, room, WIDE)


@triton.jit
def _store_kept(indices_ptr, at, row, kept, room):
    tl.store(indices_ptr + at, row, mask=(kept != 0) & (at < room))


@triton.jit
def _word_columns_kernel(
    keep_ptr, counts_ptr, offsets_ptr, indices_ptr, row_indices_ptr, strides, lists, tables, rows, columns, room,
    ROWS: tl.constexpr, FILL: tl.constexpr, CHAINED: tl.constexpr,
):  # fmt: skip
    """The lists of four columns, and a share of the zeros behind the last lists of columns and of rows."""
    words, stride = columns // 4, strides[2] // 4
    number = tl.program_id(0) // words
    word = tl.program_id(0) - number * words
    table_ptr = _table_of(keep_ptr, strides, lists, number) + word
    if CHAINED:
        tl.extra.cuda.gdc_wait()
    counts_ptr += number * columns
    begin, every = _sums_before(counts_ptr, 4 * word, columns, ROWS)
    begin += number * every
    second = begin + tl.load(counts_ptr + 4 * word)
    third = second + tl.load(counts_ptr + 4 * word + 1)
    fourth = third + tl.load(counts_ptr + 4 * word + 2)
    end = fourth + tl.load(counts_ptr + 4 * word + 3)
    offsets_ptr += number.to(tl.int64) * (columns + 1) + 4 * word
    tl.store(offsets_ptr, tl.minimum(begin, room))
    tl.store(offsets_ptr + 1, tl.minimum(second, room))
    tl.store(offsets_ptr + 2, tl.minimum(third, room))
    tl.store(offsets_ptr + 3, tl.minimum(fourth, room))
    tl.store(offsets_ptr + 4, tl.minimum(end, room), mask=word == words - 1)
    for start in range(0, rows, ROWS):
        row = start + tl.arange(0, ROWS)
        even, odd = _halves(tl.load(table_ptr + row.to(tl.int64) * stride, mask=row < rows, other=0))
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
    """Write the lists of a table that `has_words`. out: offsets_ptr, indices_ptr, offsets_t_ptr, indices_t_ptr and
    room."""
    batch, lists, rows, columns = table.shape
    tables, words = batch * lists, columns // 4
    counts = torch.empty(tables * columns, dtype=torch.int32, device=table.device)
    sizes = {"strides": table.stride(), "lists": lists, "rows": rows, "columns": columns, "ROWS": 256}
    sizes |= {"room": out["room"], "num_warps": 1, **chained(table.device)}
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
