"""Dropout inside Triton kernels that work on tiles: which elements of a tile survive."""

import triton
import triton.language as tl

from tilesmith.ops.philox_triton import random_bits, random_bits_by_four


@triton.jit
def keep_tile(seed_ptr, first, drop_below, BLOCK_COLS: tl.constexpr, BY_FOUR: tl.constexpr):
    """Which elements survive: bool [M, BLOCK_COLS], where row m holds the linear indices from first[m] on.

    first: [M, 1] int64, of the contiguous tensor that the seed's bits belong to. BY_FOUR: `first` are multiples of
    four, so that one Philox call serves four neighbours. drop_below: from `dropout.kernel_numbers`.
    """
    if BY_FOUR:
        bits = random_bits_by_four(seed_ptr, (first >> 2) + tl.arange(0, BLOCK_COLS // 4)[None, :])
    else:
        bits = random_bits(seed_ptr, first + tl.arange(0, BLOCK_COLS)[None, :])
    return bits >= drop_below.to(tl.uint32, bitcast=True)


@triton.jit
def keep_block(seed_ptr, first, drop_below, BLOCK_ROWS: tl.constexpr, BLOCK_COLS: tl.constexpr, BY_FOUR: tl.constexpr):
    """As `keep_tile`, of BLOCK_ROWS · BLOCK_COLS consecutive linear indices from the int64 scalar `first` on.

    Drawn as one row and only then folded: a tile of short rows would be moved through shared memory.
    """
    row = first + tl.zeros([1, 1], tl.int64)
    keep = keep_tile(seed_ptr, row, drop_below, BLOCK_ROWS * BLOCK_COLS, BY_FOUR)
    return tl.reshape(keep, [BLOCK_ROWS, BLOCK_COLS])
