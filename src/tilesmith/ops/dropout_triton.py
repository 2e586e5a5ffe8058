"""Dropout inside Triton kernels that work on tiles: which elements of a tile survive."""

import triton
import triton.language as tl

from tilesmith.ops.philox_triton import random_bits, random_bits_wide


@triton.jit
def keep_tile(seed_ptr, first, drop_below, BLOCK_COLS: tl.constexpr, LANES: tl.constexpr, SHORT: tl.constexpr):
    """Which elements survive: bool [M, BLOCK_COLS], where row m holds the linear indices from first[m] on.

    first: [M, 1] int64, of the contiguous tensor that the seed's bits belong to. LANES: 4 or 8 where `first` are
    multiples of it, so that one Philox call serves four neighbours; else 1. SHORT: the tensor has at most 2**34
    elements. drop_below: from `dropout.kernel_numbers`.
    """
    if LANES == 1:
        bits = random_bits(seed_ptr, first + tl.arange(0, BLOCK_COLS)[None, :])
    else:
        bits = random_bits_wide(seed_ptr, first, BLOCK_COLS, LANES, SHORT)
    return bits >= drop_below.to(tl.uint32, bitcast=True)


@triton.jit
def keep_block(
    seed_ptr, first, drop_below, BLOCK_ROWS: tl.constexpr, BLOCK_COLS: tl.constexpr, LANES: tl.constexpr,
    SHORT: tl.constexpr,
):  # fmt: skip
    """As `keep_tile`, of BLOCK_ROWS · BLOCK_COLS consecutive linear indices from the int64 scalar `first` on.

    Drawn as one row and only then folded: a tile of short rows would be moved through shared memory.
    """
    row = first + tl.zeros([1, 1], tl.int64)
    keep = keep_tile(seed_ptr, row, drop_below, BLOCK_ROWS * BLOCK_COLS, LANES, SHORT)
    return tl.reshape(keep, [BLOCK_ROWS, BLOCK_COLS])
