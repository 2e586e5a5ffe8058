"""The products of experts in 8 bits on Hopper, in Gluon: as `products`, with steps of 128 features, which are as many
bytes as 64 of 16 bits, and factors of rows and of experts in the epilogue.

Tensor cores take 8-bit operands along the summed dim only, so weights are [E, outputs, features] in either pass. A sum
stays in the tensor cores' registers from the first step to the last: one that is taken into fp32 every few steps needs
twice the registers of a tile, and 64 x 256 fp32 numbers a warpgroup leave no room for them.
"""

from tilesmith.device.gluon.shim import (
    cp_async,
    cp_async_arrive,
    fence_async,
    gl,
    gluon,
    mbarrier_arrive,
    mbarrier_expect,
    mbarrier_wait,
    mbarriers,
    reinterpret,
    smem_tiles,
    tma_copy,
    tma_store_wait,
    wgmma,
    wgmma_wait,
)
from tilesmith.ops.moe.fp8_plan import STEP8
from tilesmith.ops.moe.hopper.products import tile_of_expert
from tilesmith.ops.moe.hopper.tiles import FLAT, corner, quarters, store_piece
from tilesmith.ops.moe.plan import HOPPER_COLS, HOPPER_ROWS

COLS, HALF_ROWS, PIECE = HOPPER_COLS, HOPPER_ROWS // 2, 64
_COLS, _HALF, _PIECE, _STEP = (gl.constexpr(n) for n in (COLS, HALF_ROWS, PIECE, STEP8))
_FLAT8 = gl.constexpr(gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=8, rank=2))
_ACC = gl.constexpr(gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, COLS, 32]))


@gluon.jit
def _sources(end, length, row, order_ptr, top_k, GATHERS: gl.constexpr, LAYOUT: gl.constexpr):
    """The rows of a that 64 rows of a tile are, from `row` of it on: those of tokens with GATHERS. Behind the expert's
    last row that one is read again: nobody stores what comes of it."""
    at = end - length + gl.minimum(row + gl.arange(0, _HALF, LAYOUT), length - 1)
    if GATHERS:
        at = gl.load(order_ptr + at) // top_k
    return at


@gluon.jit
def _token_rows(a_ptr, order_ptr, top_k, row_units, end, length, row):
    """Pointers to the first features of 64 rows of tokens."""
    LANES: gl.constexpr = gl.BlockedLayout([1, 16], [4, 8], [4, 1], [1, 0])
    token = _sources(end, length, row, order_ptr, top_k, True, gl.SliceLayout(1, LANES))
    units = token.to(gl.int64) * row_units
    return a_ptr + (units * 16)[:, None] + gl.arange(0, _STEP, gl.SliceLayout(0, LANES))[None, :]


@gluon.jit
def _load(a_desc, b_desc, a, b, full, empty, table, steps, source, GATHERS: gl.constexpr, GROUP: gl.constexpr,
          STAGES: gl.constexpr):  # fmt: skip
    """source: what GATHERS reads by cp.async, 16 bytes a thread: (a_ptr, order_ptr, top_k, row_units, units)."""
    BYTES: gl.constexpr = (0 if GATHERS else 2 * a_desc.block_type.nbytes) + b_desc.block_type.nbytes
    _, _, _, _, tiles, tiles_n = table
    count = gl.to_tensor(0)
    number = gl.program_id(0)
    expert, length, end, column = tile_of_expert(number, table, GROUP)
    while number < tiles * tiles_n:
        following = number + gl.num_programs(0)
        next_expert, next_length, next_end, next_column = tile_of_expert(following, table, GROUP)
        if length > 0:
            if GATHERS:
                a_ptr, order_ptr, top_k, row_units, units = source
                upper = _token_rows(a_ptr, order_ptr, top_k, row_units, end, length, 0)
                lower = _token_rows(a_ptr, order_ptr, top_k, row_units, end, length, _HALF)
            for i in range(steps):
                s = count % STAGES
                k = i * _STEP
                mbarrier_wait(empty.index(s), ((count // STAGES) & 1) ^ 1)
                mbarrier_expect(full.index(s), BYTES)
                tma_copy(b_desc, (expert, column * _COLS, k), full.index(s), b.index(s))
                if GATHERS:
                    feature = gl.arange(0, _STEP, gl.SliceLayout(0, upper.type.layout))
                    there = (feature < units * 16 - k)[None, :]
                    cp_async(a.index(2 * s), upper + k, there)
                    cp_async(a.index(2 * s + 1), lower + k, there)
                    cp_async_arrive(full.index(s))
                else:
                    tma_copy(a_desc, corner(end, length, 0, k), full.index(s), a.index(2 * s))
                    tma_copy(a_desc, corner(end, length, _HALF, k), full.index(s), a.index(2 * s + 1))
                count += 1
        number = following
        expert, length, end, column = next_expert, next_length, next_end, next_column


@gluon.jit
def _write(acc, scale, out_desc, end, length, column, row, out):
    """The sums of 64 rows, from `row` of a tile on, times their factors."""
    first, second, third, fourth = quarters(acc * scale[:, None])
    col = column * _COLS
    store_piece(first, out_desc, corner(end, length, row, col), out, 0)
    store_piece(second, out_desc, corner(end, length, row, col + _PIECE), out, 1)
    store_piece(third, out_desc, corner(end, length, row, col + 2 * _PIECE), out, 2)
    store_piece(fourth, out_desc, corner(end, length, row, col + 3 * _PIECE), out, 3)


@gluon.jit
def _multiply(HALF: gl.constexpr, a, b, out, full, empty, table, steps, out_desc, factors, GATHERS: gl.constexpr,
              GROUP: gl.constexpr, STAGES: gl.constexpr):  # fmt: skip
    """factors: (a_factor_ptr, weight_factor_ptr, order_ptr, top_k). Those of a tile are asked for before its first
    step, so that the epilogue waits for none."""
    ROW: gl.constexpr = HALF * _HALF
    a_factor_ptr, weight_factor_ptr, order_ptr, top_k = factors
    _, _, _, _, tiles, tiles_n = table
    count = gl.to_tensor(0)
    number = gl.program_id(0)
    expert, length, end, column = tile_of_expert(number, table, GROUP)
    acc = gl.zeros([_HALF, _COLS], gl.float32, _ACC)
    while number < tiles * tiles_n:
        following = number + gl.num_programs(0)
        next_expert, next_length, next_end, next_column = tile_of_expert(following, table, GROUP)
        if length > ROW:
            at = _sources(end, length, ROW, order_ptr, top_k, GATHERS, gl.SliceLayout(1, _ACC))
            scale = gl.load(a_factor_ptr + at) * gl.load(weight_factor_ptr + expert)
            s = count % STAGES
            mbarrier_wait(full.index(s), (count // STAGES) & 1)
            if GATHERS:
                fence_async()  # cp.async does not write through the proxy by which WGMMA reads
            rows = a.index(2 * s + HALF).reshape([_HALF, _STEP])
            made = wgmma(rows, b.index(s).permute((1, 0)), acc, use_acc=False, is_async=True)
            acc = wgmma_wait(1, deps=[made])
            count += 1
            for _ in range(1, steps):
                before = s
                s = count % STAGES
                mbarrier_wait(full.index(s), (count // STAGES) & 1)
                if GATHERS:
                    fence_async()
                rows = a.index(2 * s + HALF).reshape([_HALF, _STEP])
                made = wgmma(rows, b.index(s).permute((1, 0)), acc, is_async=True)
                acc = wgmma_wait(1, deps=[made])
                mbarrier_arrive(empty.index(before))
                count += 1
            acc = wgmma_wait(0, deps=[acc])
            mbarrier_arrive(empty.index(s))
            _write(acc, scale, out_desc, end, length, column, ROW, out)
        elif length > 0:
            for _ in range(steps):
                s = count % STAGES
                mbarrier_wait(full.index(s), (count // STAGES) & 1)
                mbarrier_arrive(empty.index(s))
                count += 1
        number = following
        expert, length, end, column = next_expert, next_length, next_end, next_column
    tma_store_wait(0)


@gluon.jit
def _grouped_product(a_desc, b_desc, out_desc, table, steps, source, factors, GATHERS: gl.constexpr,
                     GROUP: gl.constexpr, STAGES: gl.constexpr):  # fmt: skip
    """The body of a persistent kernel."""
    if GATHERS:
        a = gl.allocate_shared_memory(b_desc.dtype, [2 * STAGES, _HALF, _STEP], _FLAT8)
    else:
        a = smem_tiles(2 * STAGES, a_desc)
    tiles = smem_tiles(STAGES, b_desc)
    b = reinterpret(tiles, b_desc.dtype, [STAGES, _COLS, _STEP], _FLAT8)
    first = gl.allocate_shared_memory(out_desc.dtype, [2, _HALF, _PIECE], FLAT)
    last = gl.allocate_shared_memory(out_desc.dtype, [2, _HALF, _PIECE], FLAT)
    # full: expected bytes; with cp.async also 128 threads
    full, empty = mbarriers((STAGES, 129 if GATHERS else 1), (STAGES, 2))
    fence_async()
    gl.warp_specialize(
        [
            (_load, (a_desc, b_desc, a, tiles, full, empty, table, steps, source, GATHERS, GROUP, STAGES)),
            (_multiply, (0, a, b, first, full, empty, table, steps, out_desc, factors, GATHERS, GROUP, STAGES)),
            (_multiply, (1, a, b, last, full, empty, table, steps, out_desc, factors, GATHERS, GROUP, STAGES)),
        ],
        [4, 4],
        [216, 216] if GATHERS else [224, 224],
    )


@gluon.jit(do_not_specialize=["experts", "tiles", "tiles_n", "steps"])
def experts_fp8_rows_kernel(
    a_desc, a_factor_ptr, b_desc, b_factor_ptr, out_desc, starts_ptr, tile_expert_ptr, tile_row_ptr,
    experts, tiles, tiles_n, steps, GROUP: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """out[r] = a[r] · weight[e]ᵀ times both factors for the rows of all experts; a and out in the order of experts."""
    table = (starts_ptr, tile_expert_ptr, tile_row_ptr, experts, tiles, tiles_n)
    factors = (a_factor_ptr, b_factor_ptr, starts_ptr, experts)  # without a gather nothing reads the last two
    _grouped_product(a_desc, b_desc, out_desc, table, steps, (), factors, False, GROUP, STAGES)


@gluon.jit(do_not_specialize=["experts", "tiles", "tiles_n", "steps", "top_k", "row_units", "units"])
def experts_fp8_gathered_rows_kernel(
    a_ptr, a_factor_ptr, order_ptr, b_desc, b_factor_ptr, out_desc, starts_ptr, tile_expert_ptr, tile_row_ptr,
    experts, tiles, tiles_n, steps, top_k, row_units, units, GROUP: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """The same of the rows a[order // top_k] of tokens. They have 16 · units features and begin at multiples of
    16 · row_units."""
    table = (starts_ptr, tile_expert_ptr, tile_row_ptr, experts, tiles, tiles_n)
    factors = (a_factor_ptr, b_factor_ptr, order_ptr, top_k)
    source = (a_ptr, order_ptr, top_k, row_units, units)
    _grouped_product(None, b_desc, out_desc, table, steps, source, factors, True, GROUP, STAGES)
