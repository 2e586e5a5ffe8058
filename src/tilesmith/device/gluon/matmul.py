"""A persistent, warp-specialised 16-bit matmul for Hopper in Gluon, for kernels with an epilogue of their own: one
producer warpgroup issues TMA loads, two consumer warpgroups run WGMMA.

Each consumer has 64 rows of a tile of 128 and releases stages by itself. One can run its epilogue while the other still
multiplies (ping-pong), and neither waits for the loads of the next tile, which are in flight by then.
"""

from typing import Any

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
    tma_store,
    tma_store_wait,
    wgmma,
    wgmma_wait,
)
from tilesmith.engine import cdiv
from tilesmith.hardware.detect import arch_of

ROWS, COLS, STEP = 128, 256, 64  # the tile: block_m, block_n, block_k
_STAGES, _GROUP = gl.constexpr(4), gl.constexpr(16)  # GROUP: tiles along M before the next column of tiles
_ROWS, _COLS, _STEP = gl.constexpr(ROWS), gl.constexpr(COLS), gl.constexpr(STEP)
_TILE = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)


@gluon.jit
def _corner(number, tiles_m, tiles_n):
    """The first row and column of a tile. Tiles are walked GROUP down and then one column over (grouped rasterisation),
    so that both operands stay in L2."""
    group = number // (_GROUP * tiles_n)
    height = gl.minimum(tiles_m - group * _GROUP, _GROUP)
    within = number % (_GROUP * tiles_n)
    return (group * _GROUP + within % height) * _ROWS, (within // height) * _COLS


@gluon.jit
def _load(a_desc, b_desc, a, b, full, empty, tiles_m, tiles_n, steps):
    BYTES: gl.constexpr = 2 * a_desc.block_type.nbytes + b_desc.block_type.nbytes
    count = gl.to_tensor(0)
    for number in range(gl.program_id(0), tiles_m * tiles_n, gl.num_programs(0)):
        row, col = _corner(number, tiles_m, tiles_n)
        for i in range(steps):
            s = count % _STAGES
            mbarrier_wait(empty.index(s), ((count // _STAGES) & 1) ^ 1)
            mbarrier_expect(full.index(s), BYTES)
            tma_copy(a_desc, [row, i * _STEP], full.index(s), a.index(2 * s))
            tma_copy(a_desc, [row + _ROWS // 2, i * _STEP], full.index(s), a.index(2 * s + 1))
            tma_copy(b_desc, [col, i * _STEP], full.index(s), b.index(s))
            count += 1


@gluon.jit
def _multiply(
    HALF: gl.constexpr, out_desc, extra, a, b, out, full, empty, tiles_m, tiles_n, steps,
    begin: gl.constexpr, write: gl.constexpr,
):  # fmt: skip
    ACC: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, _COLS, 16])
    count = gl.to_tensor(0)
    acc = gl.zeros([_ROWS // 2, _COLS], gl.float32, ACC)
    for number in range(gl.program_id(0), tiles_m * tiles_n, gl.num_programs(0)):
        row, col = _corner(number, tiles_m, tiles_n)
        held = begin(row + HALF * (_ROWS // 2), ACC, *extra)
        s = count % _STAGES
        mbarrier_wait(full.index(s), (count // _STAGES) & 1)
        made = wgmma(a.index(2 * s + HALF), b.index(s).permute((1, 0)), acc, use_acc=False, is_async=True)
        acc = wgmma_wait(1, deps=[made])
        count += 1
        for _ in range(1, steps):
            before = s
            s = count % _STAGES
            mbarrier_wait(full.index(s), (count // _STAGES) & 1)
            made = wgmma(a.index(2 * s + HALF), b.index(s).permute((1, 0)), acc, is_async=True)
            acc = wgmma_wait(1, deps=[made])
            mbarrier_arrive(empty.index(before))
            count += 1
        acc = wgmma_wait(0, deps=[acc])
        mbarrier_arrive(empty.index(s))
        write(acc, held, row + HALF * (_ROWS // 2), col, out_desc, out.index(HALF), *extra)
    tma_store_wait(0)


@gluon.jit
def persistent_matmul(
    a_desc, b_desc, out_desc, extra, tiles_m, tiles_n, steps, begin: gl.constexpr, write: gl.constexpr
):  # fmt: skip
    """The body of a persistent, warp-specialised matmul kernel: a [M, K] · b [N, K]ᵀ, accumulated in fp32.

    begin(row, layout, *extra) is called before the products for 64 rows from `row` on, with the layout of their
    accumulator: what it loads is there when they end. write(acc, held, row, col, out_desc, tile, *extra) is the
    epilogue for an accumulator of 64 x 256 whose first element is (row, col), with what begin gave; `tile` is shared
    memory for half of it, as `store_half_tile` uses it.
    """
    a = smem_tiles(2 * _STAGES, a_desc)
    b = smem_tiles(_STAGES, b_desc)
    out = smem_tiles(2, out_desc)
    full, empty = mbarriers((_STAGES, 1), (_STAGES, 2))
    fence_async()
    gl.warp_specialize(
        [
            (_load, (a_desc, b_desc, a, b, full, empty, tiles_m, tiles_n, steps)),
            (_multiply, (0, out_desc, extra, a, b, out, full, empty, tiles_m, tiles_n, steps, begin, write)),
            (_multiply, (1, out_desc, extra, a, b, out, full, empty, tiles_m, tiles_n, steps, begin, write)),
        ],
        [4, 4],
        [240, 240],
    )


@gluon.jit
def split_columns(x):
    """x [M, 2 N] as its first N columns and its last N."""
    return gl.split(gl.permute(gl.reshape(x, [x.shape[0], 2, x.shape[1] // 2]), (0, 2, 1)))


@gluon.jit
def store_half_tile(values, row, col, out_desc, tile):
    """Store half of an accumulator's columns by TMA, once `tile` is free. Shared memory for all of them would cost a
    pipeline stage."""
    tma_store_wait(0)
    tile.store(values.to(out_desc.dtype))
    fence_async()
    tma_store(out_desc, [row, col], tile)


def tma_accepts(*tensors: Tensor) -> bool:
    """Whether TMA takes these matrices: 16-bit elements, unit last stride, rows that begin at multiples of 16 bytes."""
    return all(
        t.element_size() == 2 and t.numel() and t.stride(1) == 1 and t.stride(0) % 8 == 0
        and t.stride(0) >= t.shape[1] and t.data_ptr() % 16 == 0
        for t in tensors
    )  # fmt: skip


def matmul_arguments(a: Tensor, b: Tensor, out: Tensor) -> tuple[int, tuple[Any, ...]]:
    """(CTAs, the arguments of `persistent_matmul` before `write`, without `extra`) for out [M, N] = a · bᵀ, all of
    which `tma_accepts`."""
    blocks = ((a, [ROWS // 2, STEP]), (b, [COLS, STEP]), (out, [ROWS // 2, COLS // 2]))
    descs = (TensorDescriptor(t, list(t.shape), [t.stride(0), 1], block, _TILE) for t, block in blocks)
    tiles_m, tiles_n = cdiv(out.shape[0], ROWS), cdiv(out.shape[1], COLS)
    ctas = min(arch_of(a.device).sms or 1, tiles_m * tiles_n)
    return ctas, (*descs, tiles_m, tiles_n, cdiv(a.shape[1], STEP))
