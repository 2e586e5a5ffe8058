"""Triton kernels that choose blocks of a table and write the lists of those that are chosen."""

from collections.abc import Mapping

import torch
import triton
import triton.language as tl
from torch import Tensor

from tilesmith.device.triton.column_sums import chained
from tilesmith.engine import cdiv, launch, next_power_of_2, optimize_kernel, register_kernel
from tilesmith.ops.attn.triton.block_words import MOST_ROWS, write_lists

LOWEST = tl.constexpr(-(1 << 31))
HIGHEST = tl.constexpr((1 << 31) - 1)


@triton.jit
def _middle(low, high):
    """(low + high) / 2, rounded up, of int32 whose sum may be none."""
    return (low | high) - ((low ^ high) >> 1)


@triton.jit
def _block_select_kernel(
    scores_ptr, counts_ptr, visible_ptr, ends_ptr, keep_ptr, strides, lists, rows, columns, mass, first, last,
    BLOCK: tl.constexpr, BY_MASS: tl.constexpr, CHAINED: tl.constexpr,
):  # fmt: skip
    """One row. Scores become integers of the same order; two bisections find the last one that is kept by number and by
    share."""
    number = tl.program_id(0) // rows
    row = tl.program_id(0) - number * rows
    batch, which = number // lists, number % lists
    column = tl.arange(0, BLOCK)
    if CHAINED:
        tl.extra.cuda.gdc_wait()
    seen = tl.minimum(tl.maximum(tl.load(visible_ptr + row), 0), columns)
    wanted = tl.minimum(tl.load(counts_ptr + row), seen)
    place = scores_ptr + batch.to(tl.int64) * strides[0] + which.to(tl.int64) * strides[1]
    place += row.to(tl.int64) * strides[2] + column.to(tl.int64) * strides[3]
    # all columns, since those that the row sees would be known only when `visible` is there
    score = tl.load(place, mask=column < columns, other=float("-inf")).to(tl.float32)
    score = tl.where(score == score, score, float("-inf")) + 0.0  # one zero, not two
    bits = score.to(tl.int32, bitcast=True)
    key = bits ^ ((bits >> 31) & HIGHEST)
    end = seen
    if ends_ptr is not None:
        end = tl.minimum(tl.maximum(tl.load(ends_ptr + row), 0), seen)
    behind = end - 1 - column
    near = (behind >= 0) & (behind < last)
    # what is kept whatever its score lies above infinity: NaN's integers are free
    key = tl.where(column < first, HIGHEST - BLOCK - column, key)
    key = tl.where(near, HIGHEST - behind, key)
    key = tl.where(column < seen, key, LOWEST)
    # between the smallest score and the largest one of those that are not kept in any case
    low = tl.min(tl.where(column < seen, key, HIGHEST))
    free = (column >= first) & (near == 0) & (column < seen)
    high = tl.max(tl.where(free, key, LOWEST))
    high = tl.where(wanted > seen - tl.sum(free.to(tl.int32)), high, HIGHEST)
    while low < high:
        middle = _middle(low, high)
        found = tl.sum((key >= middle).to(tl.int32))
        low = tl.where(found >= wanted, middle, low)
        # whatever lies between the last one that is kept and the next one will do: without ties half of the 32 steps
        high = tl.where(found == wanted, middle, tl.where(found > wanted, high, middle - 1))
    above = key > low
    equal = (key == low) & (column < seen)
    room = wanted - tl.sum(above.to(tl.int32))
    keep = above | (equal & (tl.cumsum(equal.to(tl.int32)) <= room))
    if BY_MASS:
        share = tl.where((column < seen) & (score > 0.0), score, 0.0)
        target = mass * tl.sum(share)
        low, high = tl.full((), LOWEST, tl.int32), tl.full((), HIGHEST, tl.int32)
        for _ in range(32):
            middle = _middle(low, high)
            enough = tl.sum(tl.where(key >= middle, share, 0.0)) >= target
            low = tl.where(enough, middle, low)
            high = tl.where(enough, high, middle - 1)
        above = key > low
        equal = key == low
        own = tl.where(equal, share, 0.0)
        before = tl.sum(tl.where(above, share, 0.0)) + tl.cumsum(own) - own
        keep = keep & (above | (equal & (before < target)) | near | (column < first))
    keep = keep & (wanted > 0)
    tl.store(keep_ptr + tl.program_id(0).to(tl.int64) * columns + column, keep.to(tl.uint8), mask=column < columns)


@triton.jit
def _count_lines(keep_ptr, counts_ptr, tile, lines, length, stride, step, LINES: tl.constexpr, BLOCK: tl.constexpr):
    """How many entries each of LINES lines of a table has. stride, step: from line to line, and within one."""
    line = tile * LINES + tl.arange(0, LINES)
    held = line < lines
    place = keep_ptr + line.to(tl.int64)[:, None] * stride
    counts = tl.zeros((LINES,), tl.int32)
    for first in range(0, length, BLOCK):
        at = first + tl.arange(0, BLOCK)
        inside = held[:, None] & (at < length)[None, :]
        here = tl.load(place + at.to(tl.int64)[None, :] * step, mask=inside, other=0)
        counts += tl.sum(here.to(tl.int32), 1)
    tl.store(counts_ptr + line, counts, mask=held)


@triton.jit
def _added_lines(ends_ptr, others, number, tile, lines, LINES: tl.constexpr):
    """Entries before LINES lines and up to their ends. ends_ptr: the entries up to each line of all tables, with
    `others` of the other side before them."""
    line = tile * LINES + tl.arange(0, LINES)
    held = line < lines
    of_all = number * lines + line
    end = (tl.load(ends_ptr + of_all, mask=held, other=0) - others).to(tl.int32)
    before = (tl.load(ends_ptr + of_all - 1, mask=held & (of_all > 0), other=0) - others).to(tl.int32)
    return tl.where(of_all > 0, before, 0), end


@triton.jit
def _write_lines(
    keep_ptr, before, end, offsets_ptr, indices_ptr, entries, number, tile, programs, lines, length, stride, step,
    room, LINES: tl.constexpr, BLOCK: tl.constexpr, FILL: tl.constexpr,
):  # fmt: skip
    """The entries of LINES lines, where their lists end, and a share of the zeros behind the last list. entries: of
    this side."""
    line = tile * LINES + tl.arange(0, LINES)
    held = line < lines
    out = offsets_ptr + number.to(tl.int64) * (lines + 1) + line
    tl.store(out, tl.minimum(before, room), mask=held)
    tl.store(out + 1, tl.minimum(end, room), mask=line == lines - 1)
    place = keep_ptr + line.to(tl.int64)[:, None] * stride
    for first in range(0, length, BLOCK):
        across = first + tl.arange(0, BLOCK)
        inside = held[:, None] & (across < length)[None, :]
        here = tl.load(place + across.to(tl.int64)[None, :] * step, mask=inside, other=0).to(tl.int32)
        at = before[:, None] + tl.cumsum(here, 1) - 1
        values = tl.broadcast_to(across[None, :], (LINES, BLOCK))
        tl.store(indices_ptr + at, values, mask=(here != 0) & (at < room))
        before += tl.sum(here, 1)
    begin = entries + (number * tl.cdiv(lines, LINES) + tile) * FILL
    for first in range(begin, room, programs * FILL):
        at = first + tl.arange(0, FILL)
        tl.store(indices_ptr + at, tl.zeros((FILL,), tl.int32), mask=at < room)


@triton.jit
def _block_counts_kernel(
    keep_ptr, counts_ptr, strides, lists, tables, rows, columns,
    ROW_LINES: tl.constexpr, COLUMN_LINES: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """How many entries the rows of all tables have, and behind these numbers how many the columns have."""
    by_rows = tl.cdiv(rows, ROW_LINES)
    tiles = by_rows + tl.cdiv(columns, COLUMN_LINES)
    number = tl.program_id(0) // tiles
    tile = tl.program_id(0) - number * tiles
    keep_ptr += (number // lists).to(tl.int64) * strides[0] + (number % lists).to(tl.int64) * strides[1]
    if tile < by_rows:
        _count_lines(
            keep_ptr, counts_ptr + number * rows, tile, rows, columns, strides[2], strides[3], ROW_LINES, BLOCK
        )  # fmt: skip
    else:
        counts_ptr += tables * rows + number * columns
        _count_lines(
            keep_ptr, counts_ptr, tile - by_rows, columns, rows, strides[3], strides[2], COLUMN_LINES, BLOCK
        )  # fmt: skip


@triton.jit
def _block_lists_kernel(
    keep_ptr, ends_ptr, offsets_ptr, indices_ptr, offsets_t_ptr, indices_t_ptr, strides, lists, tables, rows, columns,
    room, ROW_LINES: tl.constexpr, COLUMN_LINES: tl.constexpr, BLOCK: tl.constexpr, FILL: tl.constexpr,
):  # fmt: skip
    """The lists by rows and by columns. ends_ptr: running sums of what `_block_counts_kernel` writes."""
    by_rows, by_columns = tl.cdiv(rows, ROW_LINES), tl.cdiv(columns, COLUMN_LINES)
    tiles = by_rows + by_columns
    number = tl.program_id(0) // tiles
    tile = tl.program_id(0) - number * tiles
    keep_ptr += (number // lists).to(tl.int64) * strides[0] + (number % lists).to(tl.int64) * strides[1]
    entries = tl.load(ends_ptr + tables * rows - 1)
    if tile < by_rows:
        before, end = _added_lines(ends_ptr, 0, number, tile, rows, ROW_LINES)
        _write_lines(
            keep_ptr, before, end, offsets_ptr, indices_ptr, entries, number, tile, tables * by_rows, rows, columns,
            strides[2], strides[3], room, ROW_LINES, BLOCK, FILL,
        )  # fmt: skip
    else:
        tile -= by_rows
        columns_before, columns_end = _added_lines(
            ends_ptr + tables * rows, entries, number, tile, columns, COLUMN_LINES
        )  # fmt: skip
        _write_lines(
            keep_ptr, columns_before, columns_end, offsets_t_ptr, indices_t_ptr, entries, number, tile,
            tables * by_columns, columns, rows, strides[3], strides[2], room, COLUMN_LINES, BLOCK, FILL,
        )  # fmt: skip


def _select_reasons(call) -> list[str]:
    reasons = []
    if call.scores.dtype not in (torch.float32, torch.float16, torch.bfloat16):
        reasons.append(f"scores is {call.scores.dtype}; float32, float16 and bfloat16 are supported")
    if call.scores.cols > 16384:
        reasons.append(f"scores has {call.scores.cols} columns; up to 16,384 are supported")
    return reasons


@register_kernel("block_select", backend="triton", rank=20, rejects=_select_reasons)
@optimize_kernel(num_warps=4)
def block_select(
    scores: Tensor,
    counts: Tensor,
    visible: Tensor,
    mass: float = 1.0,
    first: int = 0,
    last: int = 0,
    ends: Tensor | None = None,
    *,
    config: Mapping[str, int],
) -> Tensor:
    """One program for each row."""
    keep = torch.empty(scores.shape, dtype=torch.bool, device=scores.device)
    if keep.numel() > 0:
        batch, lists, rows, columns = scores.shape
        block = max(16, next_power_of_2(columns))
        launch(
            _block_select_kernel, (batch * lists * rows,),
            scores, counts.contiguous(), visible.contiguous(), None if ends is None else ends.contiguous(),
            keep.view(torch.uint8), scores.stride(), lists, rows, columns, mass, min(first, columns),
            min(last, columns), BLOCK=block, BY_MASS=mass < 1.0,
            num_warps=1 if block <= 256 else config["num_warps"], **chained(scores.device),
        )  # fmt: skip
    return keep


@register_kernel("block_lists", backend="triton", rank=20)
@optimize_kernel(num_warps=8)
def block_lists(
    keep: Tensor, room: int, counts: Tensor | None = None, *, config: Mapping[str, int]
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Programs of rows and of columns count, PyTorch adds up, and programs of both write their lists. With the counts
    of rows nothing has to be added up; then `block_words` reads four columns at a time."""
    return listed(keep, room, counts, config["num_warps"])


def listed(
    keep: Tensor, room: int, row_counts: Tensor | None = None, num_warps: int = 8
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The lists of a table by rows and by columns, as `block_lists` returns them."""
    batch, many, rows, columns = keep.shape
    device, tables = keep.device, batch * many
    indices, indices_t = (torch.empty(room, dtype=torch.int32, device=device) for _ in range(2))
    if keep.numel() == 0:
        nothing = (torch.zeros(batch, many, n + 1, dtype=torch.int32, device=device) for n in (rows, columns))
        return next(nothing), indices.zero_(), next(nothing), indices_t.zero_()
    offsets, offsets_t = (torch.empty(batch, many, n + 1, dtype=torch.int32, device=device) for n in (rows, columns))
    dense = keep.view(torch.uint8)
    lines = 32  # whole sectors of a table read across its lines; 16 tables of 32k tokens are one wave on 132 SMs
    sizes = {
        "strides": keep.stride(), "lists": many, "tables": tables, "rows": rows, "columns": columns, "BLOCK": 64,
        "ROW_LINES": lines, "COLUMN_LINES": lines, "num_warps": num_warps,
    }  # fmt: skip
    grid = (tables * (cdiv(rows, lines) + cdiv(columns, lines)),)
    out = {
        "offsets_ptr": offsets, "indices_ptr": indices, "offsets_t_ptr": offsets_t, "indices_t_ptr": indices_t,
        "room": room, "FILL": 256,
    }  # fmt: skip
    if row_counts is not None and rows <= MOST_ROWS and keep.numel() < 1 << 30:
        write_lists(dense, row_counts.contiguous(), out)
        return offsets, indices, offsets_t, indices_t
    counts = torch.empty(tables * (rows + columns), dtype=torch.int32, device=device)
    launch(_block_counts_kernel, grid, keep_ptr=dense, counts_ptr=counts, **sizes)
    # each entry is counted twice
    ends = counts.cumsum(0, dtype=torch.int32 if keep.numel() < 1 << 30 else torch.int64)
    launch(_block_lists_kernel, grid, keep_ptr=dense, ends_ptr=ends, **out, **sizes)
    return offsets, indices, offsets_t, indices_t
