"""How the main kernel of attention's gradients on Hopper writes a tile's dk and dv: see `backward`."""

from tilesmith.device.gluon.shim import (
    fence_async,
    gl,
    gluon,
    mbarrier_wait,
    smem_tile,
    syncthreads,
    tma_store,
    tma_store_wait,
)
from tilesmith.ops.attn.hopper.backward_walk import KEYS_AT, KV_HEAD, START
from tilesmith.ops.attn.hopper.columns import start_write
from tilesmith.ops.attn.hopper.tile_offset import at, store_rows


@gluon.constexpr_function
def through_ds(BQ, D, LEFT, RIGHT):
    """Whether a tile's dk and dv are written from where the next ds will be: a consumer's half has room for both, and
    nobody reads it any more, whereas in the boxes for dq those of the last blocks still wait for their turn and are
    added. So the next tile's ds waits for them, and not they for dq (H200, causal, head dim 64, TFLOP/s at 512 / 1k /
    2k / 4k: 241 / 354 / 457 / 530 for 228 / 340 / 449 / 523, in turn 245 / 351 / 458 / 522 for 233 / 337 / 447 / 526).
    Not without a mask, where tiles are long: in turn 579 for 582 at 4k and 492 for 496 at 1k."""
    return BQ == 2 * D and RIGHT and not LEFT


@gluon.jit
def write_gradients(C: gl.constexpr, queue, turn, count, dk, dv, dk_desc, dv_desc, parking, dq_empty,
                    dtype: gl.constexpr, D: gl.constexpr, PACKED: gl.constexpr, ds, THROUGH_DS: gl.constexpr, to, keys,
                    DIM: gl.constexpr):  # fmt: skip
    """Write a tile's dk and dv, from the boxes that the next dq would be left in, or THROUGH_DS from a consumer's half
    of the next ds. to: pointers and strides of dk and dv in fp32, to which the registers are stored; None: there are
    none."""
    place = queue.read(turn, KEYS_AT)
    kv_head = queue.read(turn, KV_HEAD)
    start = queue.read(turn, START) + C * 64
    queue.consumer_release(turn)
    if to[0] is not None:
        store_rows(dk, to[0], to[1], place, kv_head, start, keys, 0, DIM, PACKED)
        store_rows(dv, to[2], to[3], place, kv_head, start, keys, 0, DIM, PACKED)
    else:
        _write_tiles(C, place, kv_head, start, count, dk, dv, dk_desc, dv_desc, parking, dq_empty, dtype, D, PACKED, ds,
                     THROUGH_DS)  # fmt: skip


@gluon.jit
def _write_tiles(C: gl.constexpr, place, kv_head, start, count, dk, dv, dk_desc, dv_desc, parking, dq_empty,
                 dtype: gl.constexpr, D: gl.constexpr, PACKED: gl.constexpr, ds, THROUGH_DS: gl.constexpr):  # fmt: skip
    tma_store_wait(0)
    if THROUGH_DS:
        parked_dk = smem_tile(ds, dk_desc, (count & 1) * 4 + C * 2)
        parked_dv = smem_tile(ds, dv_desc, (count & 1) * 4 + C * 2 + 1)
    else:
        mbarrier_wait(dq_empty.index(count & 1), ((count >> 1) & 1) ^ 1)
        parked_dk = smem_tile(parking.index((count & 1) * 2 + C), dk_desc)
    parked_dk.reshape([64, D]).store(dk.to(dtype))
    fence_async()
    tma_store(dk_desc, at(place, kv_head, start, PACKED), parked_dk)
    if not THROUGH_DS:
        other = count + 1
        mbarrier_wait(dq_empty.index(other & 1), ((other >> 1) & 1) ^ 1)
        parked_dv = smem_tile(parking.index((other & 1) * 2 + C), dv_desc)
    parked_dv.reshape([64, D]).store(dv.to(dtype))
    fence_async()
    tma_store(dv_desc, at(place, kv_head, start, PACKED), parked_dv)
    if THROUGH_DS:
        syncthreads()  # of the consumer; else Triton puts one before each block's ds


@gluon.jit
def write_rests(C: gl.constexpr, queue, turn, dk, dk_rest, dv, dv_rest, dk_desc, dv_desc, rooms, dtype: gl.constexpr,
                PACKED: gl.constexpr, REST: gl.constexpr):  # fmt: skip
    """Write a tile's dk and dv from a place of their own, which waits for nobody's dq."""
    place = queue.read(turn, KEYS_AT)
    kv_head = queue.read(turn, KV_HEAD)
    start = queue.read(turn, START) + C * 64
    queue.consumer_release(turn)
    room, room_rest, dk_rest_desc, dv_rest_desc = rooms
    none = None, None
    tma_store_wait(0)
    start_write(dk, dk_rest, dk_desc, dk_rest_desc, room.index(2 * C), room_rest.index(2 * C), none, place, kv_head,
                start, REST, 0, dtype, PACKED)  # fmt: skip
    start_write(dv, dv_rest, dv_desc, dv_rest_desc, room.index(2 * C + 1), room_rest.index(2 * C + 1), none, place,
                kv_head, start, REST, 0, dtype, PACKED)  # fmt: skip


@gluon.jit
def leave_to_stream_k(C: gl.constexpr, queue, turn, slot, dk, dv, parts_ptr, D: gl.constexpr, BEGIN: gl.constexpr,
                      LAST: gl.constexpr):  # fmt: skip
    """Leave what a run adds to a tile's dk and dv, from column BEGIN on, to `attention_dkv_stream_k_kernel`."""
    if LAST:
        queue.consumer_release(turn)
    key = gl.arange(0, 64, gl.SliceLayout(1, dk.type.layout))[:, None] + C * 64
    col = gl.arange(0, dk.shape[1], gl.SliceLayout(0, dk.type.layout))[None, :]
    if BEGIN > 0:
        col += BEGIN
    parts_ptr += slot.to(gl.int64) * (256 * D) + key * D + col
    gl.store(parts_ptr, dk)
    gl.store(parts_ptr + 128 * D, dv)
