"""Device kernels around attention's gradients on Hopper: rows' statistics before, dq and dsinks behind.

In a small call nothing hides how long a load takes, so each asks for all it needs before it reads any of it: no load is
masked by what another one finds, but of documents, and sums over threads come behind the last one.
"""

import triton
import triton.language as tl

LOG2E = tl.constexpr(1.4426950408889634)


@triton.jit
def _block_rows(blocks_ptr, block, tokens, begin, ROWS: tl.constexpr):
    """The tokens of a block, and where they end: from `begin` on, or of packed documents (`key_tiles_kernel`)."""
    lane = tl.arange(0, ROWS)
    rows, end = begin + block * ROWS + lane, tokens
    if blocks_ptr is not None:
        entry = blocks_ptr + (block + 1) * 2
        count, first, last = tl.load(blocks_ptr), tl.load(entry), tl.load(entry + 1)
        held = block < count  # an entry behind the last one holds anything
        rows, end = tl.where(held, first, 0) + lane, tl.where(held, last, 0)
    return rows, end


@triton.jit
def attention_rows_kernel(
    out_ptr, dout_ptr, lse_ptr, dlse_ptr, row_lse_ptr, delta_ptr, token_delta_ptr, turns_ptr, blocks_ptr,
    out_strides, dout_strides, dlse_strides, heads, tokens, begin, blocks, ROWS: tl.constexpr, DIM: tl.constexpr,
    D: tl.constexpr, kept=None, SUMS: tl.constexpr = 1, UNIT: tl.constexpr = 1,
):  # fmt: skip
    """For ROWS queries: lse in units of log 2 (+inf for a row that sees nothing or does not exist, which
    makes its p 0); delta = sum(out * dout) - dlse, also in the order of the tokens if asked for, and times `kept`, the
    probability with which p is kept where any is dropped; zero for who has added to their part of dq, if anyone adds;
    then lse and delta lie as `row_of` reads them. SUMS: parts of a block's dq, which others add to one by one. UNIT:
    elements that strides count, 8 where the compiler could not know that they are multiples of 16 bytes."""
    tl.extra.cuda.gdc_launch_dependents()
    head_row = tl.program_id(0) // blocks
    block = tl.program_id(0) - head_row * blocks
    batch = (head_row // heads).to(tl.int64)
    head = (head_row % heads).to(tl.int64)
    place = tl.program_id(0).to(tl.int64) * ROWS
    lane = tl.arange(0, ROWS)
    rows, end = _block_rows(blocks_ptr, block, tokens, begin, ROWS)
    held = rows < end
    cols = tl.arange(0, D)[None, :]
    long_rows = rows.to(tl.int64)
    out_ptr += (batch * out_strides[0] + head * out_strides[1]) * UNIT
    dout_ptr += (batch * dout_strides[0] + head * dout_strides[1]) * UNIT
    there = held[:, None] & (cols < DIM)
    out = tl.load(out_ptr + (long_rows * out_strides[2] * UNIT)[:, None] + cols, mask=there, other=0.0)
    dout = tl.load(dout_ptr + (long_rows * dout_strides[2] * UNIT)[:, None] + cols, mask=there, other=0.0)
    lse = tl.load(lse_ptr + head_row.to(tl.int64) * tokens + rows, mask=held, other=float("-inf"))
    if dlse_ptr is not None:
        dlse_ptr += batch * dlse_strides[0] + head * dlse_strides[1]
        dlse = tl.load(dlse_ptr + long_rows * dlse_strides[2], mask=held, other=0.0)
    delta = tl.sum(out.to(tl.float32) * dout.to(tl.float32), 1)
    if dlse_ptr is not None:
        delta -= dlse.to(tl.float32)
    if kept is not None:
        delta *= kept
    dead = lse == float("-inf")
    if turns_ptr is not None:
        lane = lane // 16 * 16 + lane // 2 % 4 * 4 + lane // 8 % 2 * 2 + lane % 2
    tl.store(row_lse_ptr + place + lane, tl.where(dead, float("inf"), lse * LOG2E))
    tl.store(delta_ptr + place + lane, tl.where(dead, 0.0, delta))
    if token_delta_ptr is not None:
        tl.store(token_delta_ptr + head_row.to(tl.int64) * tokens + rows, delta, mask=held)
    if turns_ptr is not None:
        for part in tl.static_range(SUMS):
            tl.store(turns_ptr + part * tl.num_programs(0) + tl.program_id(0), 0)


@triton.jit
def attention_dq_kernel(
    parts_ptr, dq_ptr, turns_ptr, blocks_ptr, dq_strides, heads, tokens, begin, blocks, scale, twice,
    ROWS: tl.constexpr, DIM: tl.constexpr, D: tl.constexpr, EARLY: tl.constexpr, REST: tl.constexpr = 0,
    UNIT: tl.constexpr = 1,
):  # fmt: skip
    """dq of ROWS queries from what the main kernel added up, which lies in the order of its registers: half of the
    columns (of 64 queries) or of the queries (of 128), group of 8 columns, warp, row of 8, pair of columns, upper or
    lower 8 rows, column. turns_ptr: who has added to a block's part, 0 if nobody has. EARLY: the tile of the first keys
    is the last one; so the first heads are put in order while the main kernel's last tiles run. twice: so many of a
    head's first blocks have a second part, behind all first ones (`ring_turn`), or None. REST: columns behind the first
    D = 64, which another consumer has made: they lie behind those. UNIT: as in `attention_rows_kernel`."""
    head_row = tl.program_id(0) // blocks
    block = tl.program_id(0) - head_row * blocks
    rows, end = _block_rows(blocks_ptr, block, tokens, begin, ROWS)
    if EARLY:
        if tl.program_id(0) == tl.num_programs(0) - 1:  # what comes behind this kernel comes behind the main one
            tl.extra.cuda.gdc_wait()
        while tl.atomic_add(turns_ptr + tl.program_id(0), 0, sem="acquire") != 1:
            pass
        if twice is not None:
            if tl.program_id(0) % blocks < twice:
                while tl.atomic_add(turns_ptr + tl.num_programs(0) + tl.program_id(0), 0, sem="acquire") != 1:
                    pass
    else:
        tl.extra.cuda.gdc_wait()
    added = tl.load(turns_ptr + tl.program_id(0)) != 0
    parts_ptr += tl.program_id(0).to(tl.int64) * (ROWS * (D + REST))
    x = tl.load(parts_ptr + tl.arange(0, ROWS * D))
    if REST > 0:
        rest = tl.load(parts_ptr + ROWS * D + tl.arange(0, ROWS * REST))
    if twice is not None:
        second_ptr = parts_ptr + tl.num_programs(0).to(tl.int64) * (ROWS * (D + REST))
        second = tl.load(second_ptr + tl.arange(0, ROWS * D), mask=block < twice, other=0.0)
        if REST > 0:
            rest_ptr = second_ptr + ROWS * D
            second_rest = tl.load(rest_ptr + tl.arange(0, ROWS * REST), mask=block < twice, other=0.0)
    x = tl.where(added, x, 0.0)  # a part that nobody has added to holds anything
    if REST > 0:
        rest = tl.where(added, rest, 0.0)
    if twice is not None:
        x += second
        if REST > 0:
            rest += second_rest
    x *= scale
    x = tl.reshape(x, [2, ROWS * D // 1024, 4, 8, 4, 2, 2])
    if ROWS == 64:
        x = tl.permute(x, (2, 5, 3, 0, 1, 4, 6))
    else:
        x = tl.permute(x, (0, 2, 5, 3, 1, 4, 6))
    x = tl.reshape(x, [ROWS, D])
    place = (head_row // heads).to(tl.int64) * dq_strides[0] + (head_row % heads).to(tl.int64) * dq_strides[1]
    dq_ptr += place * UNIT
    cols = tl.arange(0, D)[None, :]
    if REST > 0:
        dq_rows_ptr = dq_ptr + (rows.to(tl.int64) * dq_strides[2] * UNIT)[:, None]
    dq_ptr += (rows.to(tl.int64) * dq_strides[2] * UNIT)[:, None] + cols
    tl.store(dq_ptr, x.to(dq_ptr.dtype.element_ty), mask=(rows < end)[:, None] & (cols < DIM))
    if REST > 0:
        rest = tl.reshape(rest * scale, [REST // 8, 4, 8, 4, 2, 2])
        rest = tl.reshape(tl.permute(rest, (1, 4, 2, 0, 3, 5)), [ROWS, REST])
        cols = D + tl.arange(0, REST)[None, :]
        rest_ptr = dq_rows_ptr + cols
        tl.store(rest_ptr, rest.to(dq_ptr.dtype.element_ty), mask=(rows < end)[:, None] & (cols < DIM))


@triton.jit
def attention_dsinks_kernel(
    row_lse_ptr, delta_ptr, sinks_ptr, dsinks_ptr, batches, heads, rows, BLOCK: tl.constexpr, kept=None
):
    """dsinks of one head: -sum over batch and queries of exp(sink - lse) * delta. rows: of a head, padding included.
    kept: as in `attention_rows_kernel`."""
    head = tl.program_id(0)
    sink = tl.load(sinks_ptr + head).to(tl.float32) * LOG2E
    total = tl.zeros((BLOCK,), tl.float32)
    for batch in range(batches):
        row = (tl.cast(batch, tl.int64) * heads + head) * rows
        for first in range(0, rows, BLOCK):
            token = first + tl.arange(0, BLOCK)
            lse = tl.load(row_lse_ptr + row + token, mask=token < rows, other=float("inf"))
            delta = tl.load(delta_ptr + row + token, mask=token < rows, other=0.0)
            total -= tl.exp2(sink - lse) * delta
    if kept is not None:
        total /= kept
    tl.store(dsinks_ptr + head, tl.sum(total, 0).to(dsinks_ptr.dtype.element_ty))
