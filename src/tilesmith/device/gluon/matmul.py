"""A product of matrices of 16 bits on Hopper, in Gluon, for kernels that do something with the sums: persistent
programs, of two warpgroups that multiply and one that loads.

Each of the two has 64 rows of a tile of 128 and releases what it has read by itself, so one writes its half of a tile
while the other still multiplies, and neither waits for the next tile, which is on its way by then.
"""

from typing import Any

from torch import Tensor

from tilesmith.device.gluon.shim import (
    TensorDescriptor,
    arrive,
    barriers,
    bulk_store,
    bulk_wait,
    expect,
    fence,
    fetch,
    gl,
    gluon,
    mma,
    mma_wait,
    tiles_of,
    wait,
)
from tilesmith.engine import cdiv
from tilesmith.hardware.detect import arch_of

ROWS, COLS, STEP = 128, 256, 64  # of a tile, and of the dim that is summed over
_STAGES, _GROUP = gl.constexpr(4), gl.constexpr(16)  # GROUP: tiles walked down before the next column
_ROWS, _COLS, _STEP = gl.constexpr(ROWS), gl.constexpr(COLS), gl.constexpr(STEP)
_TILE = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)


@gluon.jit
def _corner(number, tiles_m, tiles_n):
    """First row and column of a tile: GROUP tiles down, then the next column, so that both operands stay in L2."""
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
            wait(empty.index(s), ((count // _STAGES) & 1) ^ 1)
            expect(full.index(s), BYTES)
            fetch(a_desc, [row, i * _STEP], full.index(s), a.index(2 * s))
            fetch(a_desc, [row + _ROWS // 2, i * _STEP], full.index(s), a.index(2 * s + 1))
            fetch(b_desc, [col, i * _STEP], full.index(s), b.index(s))
            count += 1


@gluon.jit
def _multiply(
    HALF: gl.constexpr, out_desc, extra, a, b, out, full, empty, tiles_m, tiles_n, steps, write: gl.constexpr
):  # fmt: skip
    ACC: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, _COLS, 16])
    count = gl.to_tensor(0)
    acc = gl.zeros([_ROWS // 2, _COLS], gl.float32, ACC)
    for number in range(gl.program_id(0), tiles_m * tiles_n, gl.num_programs(0)):
        row, col = _corner(number, tiles_m, tiles_n)
        s = count % _STAGES
        wait(full.index(s), (count // _STAGES) & 1)
        made = mma(a.index(2 * s + HALF), b.index(s).permute((1, 0)), acc, use_acc=False, is_async=True)
        acc = mma_wait(1, deps=[made])
        count += 1
        for _ in range(1, steps):
            before = s
            s = count % _STAGES
            wait(full.index(s), (count // _STAGES) & 1)
            made = mma(a.index(2 * s + HALF), b.index(s).permute((1, 0)), acc, is_async=True)
            acc = mma_wait(1, deps=[made])
            arrive(empty.index(before))
            count += 1
        acc = mma_wait(0, deps=[acc])
        arrive(empty.index(s))
        write(acc, row + HALF * (_ROWS // 2), col, out_desc, out.index(HALF), *extra)
    bulk_wait(0)


@gluon.jit
def product_of_tiles(a_desc, b_desc, out_desc, extra, tiles_m, tiles_n, steps, write: gl.constexpr):
    """What a kernel does whose programs share the tiles of a [M, K] · b [N, K]ᵀ, summed in fp32.

    write(acc, row, col, out_desc, tile, *extra): what becomes of 64 x 256 sums, the first of which is at (row, col);
    `tile` is room in shared memory for half of them, for `put`."""
    a = tiles_of(2 * _STAGES, a_desc)
    b = tiles_of(_STAGES, b_desc)
    out = tiles_of(2, out_desc)
    full = barriers(_STAGES, 1)
    empty = barriers(_STAGES, 2)
    fence()
    gl.warp_specialize(
        [
            (_load, (a_desc, b_desc, a, b, full, empty, tiles_m, tiles_n, steps)),
            (_multiply, (0, out_desc, extra, a, b, out, full, empty, tiles_m, tiles_n, steps, write)),
            (_multiply, (1, out_desc, extra, a, b, out, full, empty, tiles_m, tiles_n, steps, write)),
        ],
        [4, 4],
        [240, 240],
    )


@gluon.jit
def halves(x):
    """x [M, 2 N] as its first N columns and the others."""
    return gl.split(gl.permute(gl.reshape(x, [x.shape[0], 2, x.shape[1] // 2]), (0, 2, 1)))


@gluon.jit
def put(values, row, col, out_desc, tile):
    """Store half of a tile's columns, when `tile` is free. (Room for all of them would take that of a step.)"""
    bulk_wait(0)
    tile.store(values.to(out_desc.dtype))
    fence()
    bulk_store(out_desc, [row, col], tile)


def suits(*tensors: Tensor) -> bool:
    """Whether the tensor memory accelerator takes these matrices: of 16 bits, rows of neighbours that begin at
    multiples of 16 bytes."""
    return all(
        t.element_size() == 2 and t.numel() and t.stride(1) == 1 and t.stride(0) % 8 == 0
        and t.stride(0) >= t.shape[1] and t.data_ptr() % 16 == 0
        for t in tensors
    )  # fmt: skip


def tiles(a: Tensor, b: Tensor, out: Tensor) -> tuple[int, tuple[Any, ...]]:
    """(programs, the arguments of `product_of_tiles` before `write`, without `extra`) for out [M, N] = a · bᵀ, all of
    them such as `suits`."""
    blocks = ((a, [ROWS // 2, STEP]), (b, [COLS, STEP]), (out, [ROWS // 2, COLS // 2]))
    descs = (TensorDescriptor(t, list(t.shape), [t.stride(0), 1], block, _TILE) for t, block in blocks)
    tiles_m, tiles_n = cdiv(out.shape[0], ROWS), cdiv(out.shape[1], COLS)
    programs = min(arch_of(a.device).sms or 1, tiles_m * tiles_n)
    return programs, (*descs, tiles_m, tiles_n, cdiv(a.shape[1], STEP))
