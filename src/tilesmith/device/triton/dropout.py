"""Dropout inside Triton kernels that work on tiles: which elements of a tile survive."""

import triton
import triton.language as tl

from tilesmith.device.triton.philox import random_bits


@triton.jit
def keep_tile(key, first, drop_below, BLOCK_COLS: tl.constexpr, LANES: tl.constexpr, SHORT: tl.constexpr):
    """Which elements survive: bool [M, BLOCK_COLS], where row m holds the linear indices from first[m] on.

    key: from `load_key`. first: [M, 1] int64, of the contiguous tensor that the seed's bits belong to. LANES, SHORT:
    as in `random_bits`. drop_below: from `dropout.kernel_numbers`.
    """
    return random_bits(key, first, BLOCK_COLS, LANES, SHORT) >= drop_below.to(tl.uint32, bitcast=True)


@triton.jit
def keep_or_0(x, keep, number):
    """x where it is kept, else 0. number: any finite one, of which the 0 is made.

    LLVM moves a select of a constant behind the rounding to 16 bits, where the two values of a word are taken apart for
    it and put together again: 1.5 instructions an element more.
    """
    return tl.where(keep, x, number * 0.0)


@triton.jit
def keep_block(
    key, first, drop_below, BLOCK_ROWS: tl.constexpr, BLOCK_COLS: tl.constexpr, LANES: tl.constexpr,
    SHORT: tl.constexpr,
):  # fmt: skip
    """As `keep_tile`, of BLOCK_ROWS · BLOCK_COLS consecutive linear indices from the int64 scalar `first` on.

    Drawn as one row and only then folded: a tile of short rows would be moved through shared memory.
    """
    row = first + tl.zeros([1, 1], tl.int64)
    keep = keep_tile(key, row, drop_below, BLOCK_ROWS * BLOCK_COLS, LANES, SHORT)
    return tl.reshape(keep, [BLOCK_ROWS, BLOCK_COLS])
