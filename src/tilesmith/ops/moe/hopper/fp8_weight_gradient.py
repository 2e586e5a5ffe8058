"""The gradient of experts' weights from 8-bit numbers on Hopper, in Gluon: as `weight_gradient`, of operands that were
transposed before, since tensor cores take 8 bits along the summed dim only.

The pairs of each expert fill whole steps of 128: behind the last pair there are zeros.
"""

from torch import Tensor

from tilesmith.device.gluon.shim import (
    TensorDescriptor,
    fence_async,
    gl,
    gluon,
    mbarrier_arrive,
    mbarrier_expect,
    mbarrier_wait,
    mbarriers,
    smem_tiles,
    tma_copy,
    tma_store_wait,
    wgmma,
    wgmma_wait,
)
from tilesmith.ops.moe.fp8_plan import STEP8
from tilesmith.ops.moe.hopper.fp8_products import COLS, HALF_ROWS, PIECE
from tilesmith.ops.moe.hopper.tiles import FLAT, quarters, store_piece

_STEP, _HALF, _PIECE, _COLS = (gl.constexpr(n) for n in (STEP8, HALF_ROWS, PIECE, COLS))
_FLAT8 = gl.constexpr(gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=8, rank=2))
_ACC = gl.constexpr(gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, COLS, 32]))


def turned_of(x: Tensor, rows: int) -> TensorDescriptor:
    """Of x [N, places] in 8 bits, in tiles of so many rows and one step."""
    return TensorDescriptor(x, list(x.shape), [x.stride(0), 1], [rows, STEP8], _FLAT8.value)


@gluon.jit
def _bounds(number, tiles, each, firsts_ptr):
    """The first step of a tile's expert and the one behind its last; behind the last tile those of the last expert."""
    expert = gl.minimum(number, tiles - 1) // each
    return gl.load(firsts_ptr + expert), gl.load(firsts_ptr + expert + 1)


@gluon.jit
def _tile(number, tiles_m, each):
    """A tile's expert, first row and first column."""
    expert = number // each
    within = number - expert * each
    column = within // tiles_m
    return expert, (within - column * tiles_m) * (2 * _HALF), column * _COLS


@gluon.jit
def _load(left_desc, right_desc, left, right, full, empty, firsts_ptr, tiles, tiles_m, each, STAGES: gl.constexpr):
    BYTES: gl.constexpr = 2 * left_desc.block_type.nbytes + right_desc.block_type.nbytes
    count = gl.to_tensor(0)
    number = gl.program_id(0)
    begin, end = _bounds(number, tiles, each, firsts_ptr)
    while number < tiles:
        following = number + gl.num_programs(0)
        next_begin, next_end = _bounds(following, tiles, each, firsts_ptr)
        _, row, col = _tile(number, tiles_m, each)
        for i in range(begin, end):
            s = count % STAGES
            mbarrier_wait(empty.index(s), ((count // STAGES) & 1) ^ 1)
            mbarrier_expect(full.index(s), BYTES)
            tma_copy(left_desc, (row, i * _STEP), full.index(s), left.index(2 * s))
            tma_copy(left_desc, (row + _HALF, i * _STEP), full.index(s), left.index(2 * s + 1))
            tma_copy(right_desc, (col, i * _STEP), full.index(s), right.index(s))
            count += 1
        number = following
        begin, end = next_begin, next_end


@gluon.jit
def _sum(HALF: gl.constexpr, out_desc, left, right, out, full, empty, firsts_ptr, left_factor_ptr, right_factor_ptr,
         tiles, tiles_m, each, STAGES: gl.constexpr):  # fmt: skip
    count = gl.to_tensor(0)
    number = gl.program_id(0)
    begin, end = _bounds(number, tiles, each, firsts_ptr)
    while number < tiles:
        following = number + gl.num_programs(0)
        next_begin, next_end = _bounds(following, tiles, each, firsts_ptr)
        expert, row, col = _tile(number, tiles_m, each)
        scale = gl.load(left_factor_ptr + expert) * gl.load(right_factor_ptr + expert)
        acc = gl.zeros([_HALF, _COLS], gl.float32, _ACC)
        if end > begin:
            s = count % STAGES
            mbarrier_wait(full.index(s), (count // STAGES) & 1)
            made = wgmma(left.index(2 * s + HALF), right.index(s).permute((1, 0)), acc, use_acc=False, is_async=True)
            acc = wgmma_wait(1, deps=[made])
            count += 1
            for _ in range(begin + 1, end):
                before = s
                s = count % STAGES
                mbarrier_wait(full.index(s), (count // STAGES) & 1)
                made = wgmma(left.index(2 * s + HALF), right.index(s).permute((1, 0)), acc, is_async=True)
                acc = wgmma_wait(1, deps=[made])
                mbarrier_arrive(empty.index(before))
                count += 1
            acc = wgmma_wait(0, deps=[acc])
            mbarrier_arrive(empty.index(s))
        row += HALF * _HALF
        first, second, third, fourth = quarters(acc * scale)
        store_piece(first, out_desc, (expert, row, col), out, 0)
        store_piece(second, out_desc, (expert, row, col + _PIECE), out, 1)
        store_piece(third, out_desc, (expert, row, col + 2 * _PIECE), out, 2)
        store_piece(fourth, out_desc, (expert, row, col + 3 * _PIECE), out, 3)
        number = following
        begin, end = next_begin, next_end
    tma_store_wait(0)


@gluon.jit(do_not_specialize=["experts", "tiles_m", "tiles_n"])
def experts_fp8_weight_gradient_kernel(
    left_desc, right_desc, left_factor_ptr, right_factor_ptr, out_desc, firsts_ptr, experts, tiles_m, tiles_n,
    STAGES: gl.constexpr,
):  # fmt: skip
    """out[e] [M, N] = Σ left[., k] ⊗ right[., k] over the places k of expert e's steps, times both factors of the
    expert; left [M, places] and right [N, places]. firsts [E + 1]: an expert's first step."""
    each = tiles_m * tiles_n
    tiles = experts * each
    left = smem_tiles(2 * STAGES, left_desc)
    right = smem_tiles(STAGES, right_desc)
    first = gl.allocate_shared_memory(out_desc.dtype, [2, _HALF, _PIECE], FLAT)
    second = gl.allocate_shared_memory(out_desc.dtype, [2, _HALF, _PIECE], FLAT)
    full, empty = mbarriers((STAGES, 1), (STAGES, 2))
    fence_async()
    gl.warp_specialize(
        [
            (_load, (left_desc, right_desc, left, right, full, empty, firsts_ptr, tiles, tiles_m, each, STAGES)),
            (_sum, (0, out_desc, left, right, first, full, empty, firsts_ptr, left_factor_ptr, right_factor_ptr, tiles,
                    tiles_m, each, STAGES)),
            (_sum, (1, out_desc, left, right, second, full, empty, firsts_ptr, left_factor_ptr, right_factor_ptr, tiles,
                    tiles_m, each, STAGES)),
        ],
        [4, 4],
        [224, 224],
    )  # fmt: skip
