"""Sums over rows in two stages, with the same bits in every run: how many partial rows kernels write, and the sum of
these."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from tilesmith.engine import cdiv, launch, next_power_of_2
from tilesmith.hardware.detect import arch_of


@triton.jit
def sum_block(partial_ptr, out_ptr, partials, num_cols, BLOCK_ROWS: tl.constexpr, BLOCK_COLS: tl.constexpr):
    """One block of columns per program: its partial rows are added in fp32, in a fixed order, and cast."""
    col = tl.program_id(0).to(tl.int64) * BLOCK_COLS + tl.arange(0, BLOCK_COLS)[None, :]
    lane = tl.arange(0, BLOCK_ROWS)[:, None]
    total = tl.zeros([BLOCK_ROWS, BLOCK_COLS], tl.float32)
    for start in tl.range(0, partials, BLOCK_ROWS, num_stages=3):
        row = start + lane
        mask = (row < partials) & (col < num_cols)
        total += tl.load(partial_ptr + (row.to(tl.int64) * num_cols + col), mask=mask, other=0.0)
    total = tl.sum(total, 0, keep_dims=True)
    tl.store(out_ptr + col, total.to(out_ptr.dtype.element_ty), mask=col < num_cols)


@triton.jit
def _column_sums_kernel(
    partial_ptr, other_partial_ptr, out_ptr, other_out_ptr, partials, other_partials, num_cols, other_cols,
    BLOCK_ROWS: tl.constexpr, BLOCK_COLS: tl.constexpr, CHAINED: tl.constexpr,
):  # fmt: skip
    """The sums of one tensor, or of two by twice the programs. CHAINED: launched by PDL, it may have started before the
    kernel that writes the partial rows has ended."""
    if CHAINED:
        tl.extra.cuda.gdc_wait()
    if out_ptr is None:
        sum_block(other_partial_ptr, other_out_ptr, other_partials, other_cols, BLOCK_ROWS, BLOCK_COLS)
    elif other_out_ptr is None:
        sum_block(partial_ptr, out_ptr, partials, num_cols, BLOCK_ROWS, BLOCK_COLS)
    elif tl.program_id(1) == 0:
        sum_block(partial_ptr, out_ptr, partials, num_cols, BLOCK_ROWS, BLOCK_COLS)
    else:
        sum_block(other_partial_ptr, other_out_ptr, other_partials, other_cols, BLOCK_ROWS, BLOCK_COLS)


def sum_partials(partial: Tensor, dtype: torch.dtype) -> Tensor:
    """The sum of the rows of `partial`, contiguous [partials, N] fp32, as [N] in `dtype`; zeros where there are no
    rows."""
    out = partial.new_empty(partial.shape[1], dtype=dtype)
    add_partials((partial, None), (out, None))
    return out


def add_partials(partials: tuple[Tensor | None, Tensor | None], outs: tuple[Tensor | None, Tensor | None]) -> None:
    """`sum_partials` of one or two tensors, each into its [N] of `outs`, by one launch; None and None for one that is
    not wanted."""
    counts = [0 if partial is None else partial.shape[0] for partial in partials]
    widths = [0 if out is None else out.shape[0] for out in outs]
    out = outs[1] if outs[0] is None else outs[0]
    if out is not None and max(widths):
        count, cols = max(counts), max(widths)
        tall = min(64, next_power_of_2(max(count, 1)))
        # With few programs the latency of loads is exposed. H200, 1,267 rows of 128 columns and 317 of others: 6.6 µs;
        # by 256 rows of 8 columns a step 7.5, and 10.3 by two launches.
        while 2 * tall <= min(1024 if cols <= 128 else 256, count) and cols * tall <= 64 * 2048:
            tall *= 2
        wide, warps = (2048 // tall, 4) if tall <= 256 else (4096 // tall, 8)
        grid = cdiv(cols, wide), sum(out is not None for out in outs)
        # H200: 1 to 2 µs sooner than a kernel that starts when the one before it has ended. Where that one said at its
        # start that this may start, programs of this waited beside it: up to 5 % more in all.
        launch(
            _column_sums_kernel, grid, *partials, *outs, *counts, *widths,
            BLOCK_ROWS=tall, BLOCK_COLS=wide, num_warps=warps, **chained(out.device),
        )  # fmt: skip


def chained(device: torch.device) -> dict[str, bool]:
    """CHAINED of a kernel, and the launch option for programmatic dependent launch (PDL) where the device has it."""
    return {"CHAINED": True, "launch_pdl": True} if starts_early(device) else {"CHAINED": False}


def starts_early(device: torch.device) -> bool:
    """Whether a kernel on `device`, or on the assumed one of a rehearsal, can wait for the one before it in the stream
    (programmatic dependent launch)."""
    arch = arch_of(device)
    return device.type in ("cuda", "meta") and arch.kind == "cuda" and arch.capability >= (9, 0)


def partial_rows(tiles: int, col_blocks: int, programs: int, least: int) -> int:
    """How many programs walk along `tiles` row tiles, each of which writes a partial row: so many that, times
    `col_blocks`, about `programs` run, each has at least `least` tiles, and none has a tile less than its neighbours if
    that frees a whole program."""
    most = max(1, programs // max(1, col_blocks))
    return cdiv(tiles, max(1, least, cdiv(tiles, most)))
