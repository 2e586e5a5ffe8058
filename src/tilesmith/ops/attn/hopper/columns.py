"""Tiles whose columns are the sum of two powers of two: 192 as 128 and 64, 80 as 64 and 16.

Tiles in Gluon have sizes that are powers of two, so the columns behind the first of them, the rest, have a tile of
their own. REST is its columns, 0 where there is none; then the rest's arguments are not used.
"""

import math

from tilesmith.device.gluon.shim import (
    fence_async,
    gl,
    gluon,
    mbarrier_expect,
    smem_tile,
    smem_tiles,
    tma_copy,
    tma_load,
    tma_store,
    tma_store_wait,
    wgmma,
    wgmma_wait,
)
from tilesmith.ops.attn.hopper.tile_offset import at, store_rows


@gluon.jit
def _behind(there, desc, PACKED: gl.constexpr):
    """The coordinates of a tile's rest."""
    COLUMN: gl.constexpr = desc.block_type.shape[len(desc.block_type.shape) - 1]
    if PACKED:
        found = (there[0], there[1], there[2], there[3], COLUMN)
    else:
        found = (there[0], there[1], there[2], COLUMN)
    return found


@gluon.jit
def load_tile(desc, rest_desc, there, barrier, tile, rest, REST: gl.constexpr, PACKED: gl.constexpr,
              HELD: gl.constexpr = 64):  # fmt: skip
    """Start the TMA load of a tile and its rest. As with `tma_load`, `barrier` receives one arrival. HELD: of 64 rows
    those that a box holds; the others keep what shared memory had."""
    if REST > 0:
        BYTES: gl.constexpr = (desc.block_type.nbytes + rest_desc.block_type.nbytes) // 64 * HELD
        mbarrier_expect(barrier, BYTES)
        tma_copy(desc, there, barrier, tile)
        tma_copy(rest_desc, _behind(there, desc, PACKED), barrier, rest)
    elif HELD < 64:
        mbarrier_expect(barrier, desc.block_type.nbytes // 64 * HELD)
        tma_copy(desc, there, barrier, tile)
    else:
        tma_load(desc, there, barrier, tile)


@gluon.jit
def store_tile(desc, rest_desc, there, tile, rest, REST: gl.constexpr, PACKED: gl.constexpr):
    """Start the TMA store of a tile and its rest."""
    tma_store(desc, there, tile)
    if REST > 0:
        tma_store(rest_desc, _behind(there, desc, PACKED), rest)


@gluon.jit
def start_write(x, x_rest, desc, rest_desc, room, rest_room, to, place, head, row, REST: gl.constexpr,
                DIM: gl.constexpr, dtype: gl.constexpr, PACKED: gl.constexpr):  # fmt: skip
    """Start writing a tile and its rest through shared memory; or, in fp32, write them from registers. to: the tensor's
    pointer and strides, and its rows of a head, where it is fp32, else None; DIM: its columns. place, head, row: as of
    `at`."""
    COLS: gl.constexpr = x.shape[1]
    if to[0] is not None:
        store_rows(x, to[0], to[1], place, head, row, to[2], 0, DIM, PACKED)
        if REST > 0:
            store_rows(x_rest, to[0], to[1], place, head, row, to[2], COLS, DIM, PACKED)
    else:
        room.reshape([64, COLS]).store(x.to(dtype))
        if REST > 0:
            rest_room.reshape([64, REST]).store(x_rest.to(dtype))
        fence_async()
        store_tile(desc, rest_desc, at(place, head, row, PACKED), room, rest_room, REST, PACKED)


@gluon.jit
def write_tile(x, x_rest, desc, rest_desc, room, rest_room, to, place, head, row, REST: gl.constexpr, DIM: gl.constexpr,
               dtype: gl.constexpr, PACKED: gl.constexpr):  # fmt: skip
    """`start_write`, and wait until shared memory has been read."""
    start_write(x, x_rest, desc, rest_desc, room, rest_room, to, place, head, row, REST, DIM, dtype, PACKED)
    if to[0] is None:
        tma_store_wait(0)


@gluon.jit
def rows_product(a, a_rest, b, b_rest, zero, REST: gl.constexpr):
    """Ask for the products of all rows of a [M, columns] with all rows of b [N, columns], in shared memory: one group
    of WGMMA, or two with a rest."""
    made = wgmma(a, b.permute((1, 0)), zero, use_acc=False, is_async=True)
    if REST > 0:
        made = wgmma(a_rest, b_rest.permute((1, 0)), made, use_acc=True, is_async=True)
    return made


@gluon.jit
def add_products(x, tile, tile_rest, total, total_rest, REST: gl.constexpr):
    """Ask for x [M, rows] . tile [rows, columns], added to what there is: one group of WGMMA, or two with a rest."""
    made = wgmma(x, tile, total, use_acc=True, is_async=True)
    rest_made = total_rest
    if REST > 0:
        x = gl.convert_layout(x, gl.DotOperandLayout(0, total_rest.type.layout, 2))
        rest_made = wgmma(x, tile_rest, total_rest, use_acc=True, is_async=True)
    return made, rest_made


@gluon.jit
def wait_products(made, rest_made, REST: gl.constexpr):
    """Wait for what was asked for by `add_products`, and for all before it."""
    if REST > 0:
        total, total_rest = wgmma_wait(0, deps=[made, rest_made])
    else:
        total = wgmma_wait(0, deps=[made])
        total_rest = rest_made
    return total, total_rest


@gluon.jit
def zero_sums(D: gl.constexpr, REST: gl.constexpr):
    """Sums of 64 rows and D columns, and of their rest: 0 where there is none."""
    total = gl.zeros([64, D], gl.float32, gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16]))
    total_rest = gl.to_tensor(0)
    if REST > 0:
        total_rest = gl.zeros([64, REST], gl.float32, gl.NVMMADistributedLayout([3, 0], [4, 1], [16, REST, 16]))
    return total, total_rest


@gluon.jit
def scale_rows(total, total_rest, factor, REST: gl.constexpr):
    """Sums times a factor of each row."""
    total = total * gl.convert_layout(factor, gl.SliceLayout(1, total.type.layout))[:, None]
    if REST > 0:
        total_rest = total_rest * gl.convert_layout(factor, gl.SliceLayout(1, total_rest.type.layout))[:, None]
    return total, total_rest


@gluon.jit
def rest_tile(rests, which, tile, REST: gl.constexpr):
    """The rest of a tile, one of `rests`; the tile itself where there is none."""
    if REST > 0:
        tile = rests.index(which).reshape([tile.shape[0], REST])
    return tile


@gluon.constexpr_function
def _cells(shape):
    return math.prod(int(getattr(n, "value", n)) for n in shape)


@gluon.jit
def room_for(desc, read):
    """Shared memory for a tile to be stored: that of one which nobody reads any more, or a place of its own where that
    one is too small."""
    WANTED: gl.constexpr = _cells(desc.block_type.shape)
    FOUND: gl.constexpr = _cells(read.shape)
    if WANTED == FOUND:
        room = read
    elif WANTED < FOUND:
        room = smem_tile(read, desc, 0)
    else:
        room = smem_tiles(1, desc).index(0)
    return room


@gluon.jit
def rest_room(desc, read, REST: gl.constexpr):
    """The same for a tile's rest; REST: columns of the one that nobody reads any more, 0 where there is none."""
    if REST > 0:
        room = room_for(desc, read)
    else:
        room = smem_tiles(1, desc).index(0)
    return room
