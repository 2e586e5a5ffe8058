"""The cast of stacked weights of experts in Triton: one factor for each matrix, and both layouts in one pass."""

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from tilesmith.device.triton.rounding import load_factor, raise_to, seen_at, store_turned, word8
from tilesmith.engine import Space, cdiv, launch, next_power_of_2, optimize_kernel, register_kernel
from tilesmith.ops.quant.reference import FORMATS
from tilesmith.ops.quant.triton.cast import (
    amax_default,
    larger_in,
    largest_bits,
    load_rows,
    saturates,
    scaled_rows,
    searched,
    store_rows,
    tile_rejects,
    words,
)


class StackConfig(NamedTuple):
    """A tile of one matrix."""

    block_rows: int
    block_cols: int
    num_warps: int


@triton.jit
def fp8_experts_amax_kernel(
    x_ptr, like_ptr, amax_ptr, elements, parts,
    PAIRS: tl.constexpr, PACKED: tl.constexpr, LOADS: tl.constexpr, BLOCK_SIZE: tl.constexpr,
):  # fmt: skip
    """amax[e] = the largest |x| of a matrix of so many elements, of which a program reads every parts-th block. PAIRS:
    elements are words of two 16-bit numbers of like_ptr's type."""
    expert, part = tl.program_id(0) // parts, tl.program_id(0) % parts
    seen = seen_at(amax_ptr + expert)
    top = tl.zeros([1, BLOCK_SIZE // LOADS], tl.int32)
    at = x_ptr + expert.to(tl.int64) * elements
    top = larger_in(at, elements, part, parts, top, PAIRS, PACKED, LOADS, BLOCK_SIZE)
    raise_to(amax_ptr + expert, largest_bits(top, like_ptr, PAIRS), seen)


@triton.jit
def fp8_experts_cast_kernel(
    x_ptr, amax_ptr, x8_ptr, words_ptr, factor_ptr, num_rows, num_cols,
    SATURATES: tl.constexpr, BLOCK_ROWS: tl.constexpr, BLOCK_COLS: tl.constexpr,
):  # fmt: skip
    """A tile of one matrix a program, by the factor of amax[e]: as it is to x8_ptr, transposed to words_ptr."""
    blocks = tl.cdiv(num_cols, BLOCK_COLS)
    each = tl.cdiv(num_rows, BLOCK_ROWS) * blocks
    expert, program = tl.program_id(0) // each, tl.program_id(0) % each
    matrix = expert.to(tl.int64) * num_rows * num_cols
    quad = (program // blocks) * (BLOCK_ROWS // 4) + tl.arange(0, BLOCK_ROWS // 4)[:, None]
    col = (program % blocks) * BLOCK_COLS + tl.arange(0, BLOCK_COLS)[None, :]
    inside, row = col < num_cols, 4 * quad
    at = x_ptr + matrix + row.to(tl.int64) * num_cols + col
    x0, x1, x2, x3 = load_rows(at, num_cols, row, num_rows, inside)
    factor, inverse = load_factor(amax_ptr + expert, False)
    if program == 0:
        tl.store(factor_ptr + expert, factor)
    y0, y1, y2, y3 = scaled_rows(x0, x1, x2, x3, inverse, False, SATURATES)
    store_rows(x8_ptr + matrix + row.to(tl.int64) * num_cols + col, y0, y1, y2, y3, inside, row, num_rows, num_cols)
    word = word8(y0, y1, y2, y3, x8_ptr, False, SATURATES)
    store_turned(words_ptr + matrix // 4, word, quad, col, num_rows, num_cols)


def _dims(weight: Tensor) -> dict[str, int]:
    return {"experts": weight.shape[0], "rows": weight.shape[1], "cols": weight.shape[2]}


SPACE = Space(
    default=lambda dims, arch, dtype: StackConfig(128, 64, 4),
    dims=_dims,
    choices={"block_rows": (32, 64, 128), "block_cols": (64, 128, 256), "num_warps": (4, 8)},
)


@register_kernel("fp8_cast_experts", backend="triton", rank=20, rejects=tile_rejects)
@optimize_kernel(space=SPACE)
def fp8_cast_experts(weight: Tensor, *, config: StackConfig) -> tuple[Tensor, Tensor, Tensor]:
    weight = weight.contiguous()
    experts, num_rows, num_cols = weight.shape
    made = [weight.new_empty(shape, dtype=FORMATS["e4m3"]) for shape in (weight.shape, (experts, num_cols, num_rows))]
    amax, factor = weight.new_zeros(experts).float(), weight.new_ones(experts).float()
    if weight.numel():
        search = amax_default(weight)
        (matrices,), how = searched([weight.view(experts, -1)], search)
        elements = matrices.shape[1]
        parts = min(max(1, search.programs // experts), cdiv(elements, how["BLOCK_SIZE"]))
        launch(fp8_experts_amax_kernel, (experts * parts,), matrices, weight, amax, elements, parts, **how)
        block_rows = min(config.block_rows, next_power_of_2(num_rows))
        block_cols = min(config.block_cols, next_power_of_2(num_cols))
        launch(
            fp8_experts_cast_kernel, (experts * cdiv(num_rows, block_rows) * cdiv(num_cols, block_cols),),
            weight, amax, made[0], words(made[1]), factor, num_rows, num_cols, SATURATES=saturates(weight),
            BLOCK_ROWS=block_rows, BLOCK_COLS=block_cols, num_warps=config.num_warps,
        )  # fmt: skip
    return *made, factor
