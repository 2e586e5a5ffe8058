"""Sums over rows in Triton: partial rows by one launch, the sum of these by another."""

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from tilesmith.device.rows import rows
from tilesmith.device.triton.column_sums import add_partials, partial_rows
from tilesmith.engine import Space, cdiv, launch, next_power_of_2, optimize_kernel, register_kernel
from tilesmith.ops.gemm.sums_reference import DTYPES

LEAST = 128  # rows of a strip: its partial sums are then at most a sixtieth of the traffic


@triton.jit
def _partial_rows_kernel(
    x_ptr, partial_ptr, x_row, num_rows, num_cols, strips,
    BLOCK_ROWS: tl.constexpr, BLOCK_COLS: tl.constexpr, APART: tl.constexpr,
):  # fmt: skip
    """A block of columns per program, and every strips-th tile of rows: one partial row of sums. A tile is loaded while
    the one before it is added. APART: how many neighbouring rows lie in different threads; a thread adds up its own
    rows of a tile first."""
    col_blocks = tl.cdiv(num_cols, BLOCK_COLS)
    strip = tl.program_id(0) // col_blocks
    col = (tl.program_id(0) % col_blocks).to(tl.int64) * BLOCK_COLS + tl.arange(0, BLOCK_COLS)[None, :]
    row = tl.arange(0, BLOCK_ROWS)[:, None].to(tl.int64)
    x_at = row * x_row + col
    total = tl.zeros([APART, BLOCK_COLS], tl.float32)
    first = tl.cast(strip, tl.int64) * BLOCK_ROWS
    ahead = tl.load(x_ptr + first * x_row + x_at, mask=(first + row < num_rows) & (col < num_cols), other=0.0)
    for tile in range(strip, tl.cdiv(num_rows, BLOCK_ROWS), strips):
        x = ahead.to(tl.float32)
        after = (tl.cast(tile, tl.int64) + strips) * BLOCK_ROWS
        ahead = tl.load(x_ptr + after * x_row + x_at, mask=(after + row < num_rows) & (col < num_cols), other=0.0)
        total += tl.sum(tl.reshape(x, (BLOCK_ROWS // APART, APART, BLOCK_COLS)), 0)
    out = tl.sum(total, 0, keep_dims=True).to(partial_ptr.dtype.element_ty)
    tl.store(partial_ptr + strip.to(tl.int64) * num_cols + col, out, mask=col < num_cols)


class SumConfig(NamedTuple):
    """block_rows, block_cols: a tile. programs: at most so many walk over the tiles of their columns, each over at
    least `LEAST` rows."""

    block_rows: int
    block_cols: int
    num_warps: int
    programs: int


def _default(dims: Mapping[str, int], arch: Any, dtype: torch.dtype) -> SumConfig:
    # Four 16-byte accesses a thread, and as many ahead, of whole 128-byte lines; programs as many as are resident at
    # once. Narrow tiles leave few partial rows. H200, cold L2: 16.4 µs at 16,384 x 1,024 and 39.3 at 16,384 x 4,096, so
    # 4.4 TB/s beside 8.7 µs for two launches, which 512 x 1,024 takes too; docs/log/elementwise.md has all sizes.
    return SumConfig(32, 256 // dtype.itemsize, 4, 4 * max(1, arch.sms))


def _dims(x: Tensor, *_: object) -> dict[str, int]:
    cols = x.shape[-1]
    return {"rows": x.numel() // max(1, cols), "cols": cols}


def _reasons(call: Any) -> list[str]:
    wide = {"x": call.x.dtype is torch.float64, "the result": call.dtype == "float64"}
    return [f"{name} is float64; this kernel computes in float32" for name, is_wide in wide.items() if is_wide]


SUMS_SPACE = Space(
    default=_default,
    dims=_dims,
    choices={
        "block_rows": (8, 16, 32, 64),
        "block_cols": (64, 128, 256, 512),
        "num_warps": (4, 8),
        "programs": (264, 528, 792, 1056),
    },
)


@register_kernel("column_sums", backend="triton", rank=20, rejects=_reasons)
@optimize_kernel(space=SUMS_SPACE)
def column_sums(x: Tensor, dtype: str = "", *, config: SumConfig) -> Tensor:
    """Partial rows and their sum; one launch where a single strip holds all rows."""
    out = x.new_empty(x.shape[-1], dtype=DTYPES[dtype] if dtype else x.dtype)
    num_rows, num_cols = _dims(x).values()
    if num_cols == 0 or num_rows == 0:
        return out.zero_()
    x = rows(x)
    block_cols = min(config.block_cols, next_power_of_2(num_cols))
    block_rows = min(config.block_rows * config.block_cols // block_cols, next_power_of_2(num_rows))
    tiles, col_blocks = cdiv(num_rows, block_rows), cdiv(num_cols, block_cols)
    strips = partial_rows(tiles, col_blocks, config.programs, cdiv(LEAST, block_rows))
    partial = out if strips == 1 else x.new_empty(strips, num_cols, dtype=torch.float32)
    launch(
        _partial_rows_kernel, (strips * col_blocks,), x, partial, x.stride(0), num_rows, num_cols, strips,
        BLOCK_ROWS=block_rows, BLOCK_COLS=block_cols,
        APART=min(block_rows, max(1, 512 // x.element_size() * config.num_warps // block_cols)),
        num_warps=config.num_warps,
    )  # fmt: skip
    if strips > 1:
        add_partials((partial, None), (out, None))
    return out
