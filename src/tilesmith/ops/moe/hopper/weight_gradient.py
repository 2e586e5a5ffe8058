"""The gradient of experts' weights on Hopper, in Gluon: a product for each expert, whose sum is over its pairs.

A CTA makes one tile of 128 rows after another: one warpgroup issues TMA loads, two run WGMMA, each for 64 of the rows.
Experts have any number of pairs, so a tile may have no step at all: its gradient is 0. Behind an expert's last pair
TMA gives zeros, so that a NaN in the rows of the next expert stays there.
"""

from tilesmith.device.gluon.matmul import split_columns
from tilesmith.device.gluon.shim import (
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
from tilesmith.ops.moe.hopper.tiles import FLAT, HALF_ROWS, PIECE, STEP, corner, quarters, store_piece

_STEP, _HALF, _PIECE = gl.constexpr(STEP), gl.constexpr(HALF_ROWS), gl.constexpr(PIECE)


@gluon.jit
def _bounds(number, tiles, each, starts_ptr):
    """Where the pairs of a tile's expert begin and end; behind the last tile those of the last expert."""
    expert = gl.minimum(number, tiles - 1) // each
    return gl.load(starts_ptr + expert), gl.load(starts_ptr + expert + 1)


@gluon.jit
def _tile(number, tiles_m, each, COLS: gl.constexpr):
    """A tile's expert, first row and first column; its bounds were loaded during the tile before."""
    expert = number // each
    within = number - expert * each
    column = within // tiles_m
    return expert, (within - column * tiles_m) * (2 * _HALF), column * COLS


@gluon.jit
def _load(left_desc, right_desc, left, right, full, empty, starts_ptr, tiles, tiles_m, each,
          COLS: gl.constexpr, STAGES: gl.constexpr):  # fmt: skip
    BYTES: gl.constexpr = 2 * left_desc.block_type.nbytes + right_desc.block_type.nbytes
    count = gl.to_tensor(0)
    number = gl.program_id(0)
    begin, end = _bounds(number, tiles, each, starts_ptr)
    while number < tiles:
        following = number + gl.num_programs(0)
        next_begin, next_end = _bounds(following, tiles, each, starts_ptr)
        _, row, col = _tile(number, tiles_m, each, COLS)
        for i in range((end - begin + _STEP - 1) // _STEP):
            s = count % STAGES
            mbarrier_wait(empty.index(s), ((count // STAGES) & 1) ^ 1)
            mbarrier_expect(full.index(s), BYTES)
            tma_copy(left_desc, corner(end, end - begin, i * _STEP, row), full.index(s), left.index(2 * s))
            tma_copy(left_desc, corner(end, end - begin, i * _STEP, row + _HALF), full.index(s), left.index(2 * s + 1))
            tma_copy(right_desc, corner(end, end - begin, i * _STEP, col), full.index(s), right.index(s))
            count += 1
        number = following
        begin, end = next_begin, next_end


@gluon.jit
def _sum(HALF: gl.constexpr, out_desc, left, right, out, full, empty, starts_ptr, tiles, tiles_m, each,
         COLS: gl.constexpr, STAGES: gl.constexpr):  # fmt: skip
    ACC: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, COLS, 16])
    count = gl.to_tensor(0)
    number = gl.program_id(0)
    begin, end = _bounds(number, tiles, each, starts_ptr)
    while number < tiles:
        following = number + gl.num_programs(0)
        next_begin, next_end = _bounds(following, tiles, each, starts_ptr)
        steps = (end - begin + _STEP - 1) // _STEP
        acc = gl.zeros([_HALF, COLS], gl.float32, ACC)
        if steps > 0:
            s = count % STAGES
            mbarrier_wait(full.index(s), (count // STAGES) & 1)
            a = left.index(2 * s + HALF).reshape([_STEP, _HALF]).permute((1, 0))
            made = wgmma(a, right.index(s).reshape([_STEP, COLS]), acc, use_acc=False, is_async=True)
            acc = wgmma_wait(1, deps=[made])
            count += 1
            for _ in range(1, steps):
                before = s
                s = count % STAGES
                mbarrier_wait(full.index(s), (count // STAGES) & 1)
                a = left.index(2 * s + HALF).reshape([_STEP, _HALF]).permute((1, 0))
                made = wgmma(a, right.index(s).reshape([_STEP, COLS]), acc, is_async=True)
                acc = wgmma_wait(1, deps=[made])
                mbarrier_arrive(empty.index(before))
                count += 1
            acc = wgmma_wait(0, deps=[acc])
            mbarrier_arrive(empty.index(s))
        expert, row, col = _tile(number, tiles_m, each, COLS)
        row += HALF * _HALF
        if COLS == 256:
            first, second, third, fourth = quarters(acc)
            store_piece(first, out_desc, (expert, row, col), out, 0)
            store_piece(second, out_desc, (expert, row, col + _PIECE), out, 1)
            store_piece(third, out_desc, (expert, row, col + 2 * _PIECE), out, 2)
            store_piece(fourth, out_desc, (expert, row, col + 3 * _PIECE), out, 3)
        else:
            first, second = split_columns(acc)
            store_piece(first, out_desc, (expert, row, col), out, 0)
            store_piece(second, out_desc, (expert, row, col + _PIECE), out, 1)
        number = following
        begin, end = next_begin, next_end
    tma_store_wait(0)


@gluon.jit(do_not_specialize=["experts", "tiles_m", "tiles_n"])
def experts_weight_gradient_kernel(
    left_desc, right_desc, out_desc, starts_ptr, experts, tiles_m, tiles_n, COLS: gl.constexpr, STAGES: gl.constexpr
):
    """out[e] [M, N] = Σ left[r] ⊗ right[r] over the pairs r of expert e; left [S, M] and right [S, N] in the order of
    experts. Tiles of 128 rows and COLS columns, tiles_m by tiles_n an expert. STAGES: steps in flight."""
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
            (_load, (left_desc, right_desc, left, right, full, empty, starts_ptr, tiles, tiles_m, each, COLS, STAGES)),
            (_sum, (0, out_desc, left, right, first, full, empty, starts_ptr, tiles, tiles_m, each, COLS, STAGES)),
            (_sum, (1, out_desc, left, right, second, full, empty, starts_ptr, tiles, tiles_m, each, COLS, STAGES)),
        ],
        [4, 4],
        [224, 224],
    )
