"""What the products of experts on Hopper share: TMA descriptors and coordinates, and the store of an accumulator.

The rows of one expert begin and end anywhere. A descriptor of rows (`rows_of`) has the coordinates of `corner`, in
which TMA's own bounds end where the expert's rows do: loads give zeros behind them and stores write nothing there. It
works as attention's for packed documents (`ops.attn.hopper.tile_offset`, after `triton.tools.ragged_tma`).
"""

from torch import Tensor

from tilesmith.device.alignment import tma_view
from tilesmith.device.gluon.matmul import split_columns
from tilesmith.device.gluon.shim import TensorDescriptor, fence_async, gl, gluon, smem_tile, tma_store, tma_store_wait
from tilesmith.ops.moe.plan import HOPPER_ROWS, HOPPER_STEP

STEP, HALF_ROWS, PIECE = (
    HOPPER_STEP,
    HOPPER_ROWS // 2,
    64,
)  # rows or columns of a step of a sum, rows of a consumer, columns of one store
FAR = gl.constexpr(1 << 30)
_ENDLESS = 2**31 - 2**16
_LAYOUTS = {rank: gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=rank) for rank in (2, 3, 4, 5)}
FLAT = gl.constexpr(_LAYOUTS[2])
_LAYOUTS8 = {rank: gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=8, rank=rank) for rank in (3, 4)}


def rows_of(x: Tensor, rows: int, cols: int, parts: int = 1) -> TensorDescriptor:
    """Of x [S, parts · N] in tiles of so many rows of one expert and columns of one part. A tile has two leading dims
    of size 1, a third with more than one part."""
    row, wide = x.stride(0), x.shape[1] // parts
    shape, strides, block = [2**30, wide], [row, 1], [rows, cols]
    if parts > 1:
        shape, strides, block = [parts, *shape], [wide, *strides], [1, *block]
    shape, strides, block = [_ENDLESS, _ENDLESS, *shape], [2**34 - row, row, *strides], [1, 1, *block]
    return TensorDescriptor(x, shape, strides, block, _layouts(x)[len(shape)])


def matrices_of(x: Tensor, rows: int, cols: int) -> TensorDescriptor:
    """Of x [E, M, N] in tiles of one matrix; of a copy, where strides do not suit TMA."""
    x, strides = tma_view(x)
    return TensorDescriptor(x, list(x.shape), strides, [1, rows, cols], _layouts(x)[3])


def _layouts(x: Tensor) -> dict[int, gl.NVMMASharedLayout]:
    """Layouts of tiles of x in shared memory, by their dims."""
    return _LAYOUTS8 if x.element_size() == 1 else _LAYOUTS


@gluon.jit
def corner(end, length, row, col):
    """Coordinates of a tile of the rows of an expert, of which `length` are left before `end`, from `row` of these
    on."""
    return (FAR, end, FAR - length + row, col)


@gluon.jit
def part_corner(end, length, part, row, col):
    """The same in a tensor of several parts."""
    return (FAR, end, part, FAR - length + row, col)


@gluon.jit
def quarters(x):
    """x [M, 4 N] as four times N columns."""
    left, right = split_columns(x)
    first, second = split_columns(left)
    third, fourth = split_columns(right)
    return first, second, third, fourth


@gluon.jit
def store_piece(values, desc, there, out, which: gl.constexpr):
    """Store PIECE columns of an accumulator by TMA, from one of two places in shared memory, while the piece before is
    read from the other. which: how many pieces of the tile were stored before."""
    tma_store_wait(1)
    out.index(which % 2).store(values.to(out.dtype))
    fence_async()
    tma_store(desc, there, smem_tile(out, desc, which % 2))
