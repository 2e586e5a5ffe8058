"""The names of Gluon (Triton's explicit dialect) that change between Triton releases, under one roof.

Kernels take these from here and everything else from `gl`. When a release renames one, only this file
changes. They were run with Triton 3.6 and compile with 3.7, 3.8 and 3.9, which removed names that 3.6 has.
"""

import math

from triton._C.libtriton import ir
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language._core import _unwrap_if_constexpr as _unwrap
from triton.experimental.gluon.language._core import builtin
from triton.experimental.gluon.language.nvidia.ampere import mma_v2
from triton.experimental.gluon.language.nvidia.hopper import (
    async_copy,
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor
from triton.language.core import _aggregate as aggregate

__all__ = [
    "TensorDescriptor",
    "aggregate",
    "arrive",
    "await_launcher",
    "await_number",
    "barrier_pair",
    "barriers",
    "bulk_add",
    "bulk_finish",
    "bulk_load",
    "bulk_store",
    "bulk_wait",
    "expect",
    "fence",
    "fetch",
    "follow",
    "gl",
    "gluon",
    "launch_dependents",
    "load_row",
    "meet",
    "mma",
    "mma_wait",
    "powers",
    "publish",
    "reinterpret",
    "reserve",
    "seen",
    "thread_barrier",
    "tile_in",
    "tiles_of",
    "wait",
    "warp_mma",
]

mma = warpgroup_mma
mma_wait = warpgroup_mma_wait
warp_mma = mma_v2  # of single warps, operands in registers
fence = fence_async_shared
wait = mbarrier.wait
arrive = mbarrier.arrive
expect = mbarrier.expect
fetch = getattr(tma, "async_load", tma.async_copy_global_to_shared)
_row_load = getattr(async_copy, "async_load", async_copy.async_copy_global_to_shared)
bulk_store = getattr(tma, "async_store", tma.async_copy_shared_to_global)
bulk_wait = tma.store_wait
thread_barrier = gl.thread_barrier if hasattr(gl, "thread_barrier") else gl.barrier  # of all threads of a program


@builtin
def bulk_add(desc, coord, src, _semantic=None):
    """Add a tile in shared memory to the tensor behind `desc`; the public API of 3.6 has no name for it."""
    coord = _semantic._convert_to_ir_values(coord, require_i64=False)
    _semantic.builder.create_async_tma_reduce(ir.DESCRIPTOR_REDUCE_KIND.ADD, desc.handle, coord, src.handle)


@gluon.jit
def barriers(number: gl.constexpr, count: gl.constexpr):
    """Barriers in shared memory that complete a phase at `count` arrivals."""
    found = gl.allocate_shared_memory(gl.int64, [number, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(number):
        mbarrier.init(found.index(i), count=count)
    return found


@gluon.jit
def barrier_pair(number: gl.constexpr, count: gl.constexpr):
    """Two arrays of such barriers. Triton lets all threads meet between two that it makes in one array, so that one
    after another in turn takes half the time."""
    first = gl.allocate_shared_memory(gl.int64, [number, 1], mbarrier.MBarrierLayout())
    second = gl.allocate_shared_memory(gl.int64, [number, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(number):
        mbarrier.init(first.index(i), count=count)
        mbarrier.init(second.index(i), count=count)
    return first, second


@builtin
def tiles_of(number, desc, times=1, _semantic=None):
    """Room in shared memory for `number` of the tiles that a descriptor moves, or of tiles with `times` its rows."""
    *outer, rows, cols = desc.block_type.shape
    shape = [_unwrap(number), *outer, rows * _unwrap(times), cols]
    return gl.allocate_shared_memory(desc.dtype, shape, desc.layout, _semantic=_semantic)


@builtin
def tile_in(room, desc, which=0, _semantic=None):
    """One of the tiles that a descriptor moves, by its number, in room in shared memory."""
    block = [_unwrap(n) for n in desc.block_type.shape]
    number = math.prod(_unwrap(n) for n in room.shape) // math.prod(block)
    tiles = reinterpret(room, desc.dtype, [number, *block], desc.layout, _semantic=_semantic)
    return tiles.index(which, _semantic=_semantic)


@gluon.jit
def bulk_load(desc, coord, barrier, tile):
    """Start to load a tile; `barrier` gets one arrival, and the phase is over when the tile is there."""
    mbarrier.expect(barrier, desc.block_type.nbytes)
    fetch(desc, coord, barrier, tile)


@gluon.jit
def load_row(pointers, barrier, row):
    """Start to load a row of numbers, one a thread; `barrier` gets an arrival of each thread when its own is there."""
    _row_load(row, pointers)
    async_copy.mbarrier_arrive(barrier, increment_count=False)


@gluon.jit
def reserve(BYTES: gl.constexpr, LINE: gl.constexpr, BEGIN: gl.constexpr):
    """The address of BYTES of shared memory, for what Gluon has no name for: memory that other programs of the cluster
    write to, or bulk copies of any size. They lie before what Gluon allocates and fill lines of LINE bytes, where that
    wants to begin. BEGIN: PTX that all threads run first, where $0 is the address. Once in a kernel."""
    FILLED: gl.constexpr = (BYTES + LINE - 1) // LINE * LINE
    return gl.inline_asm_elementwise(
        f""".shared .align {LINE} .b8 tilesmith_reserved[{FILLED}];
        mov.u32 $0, tilesmith_reserved;
        {BEGIN} // $1""",
        "=&r,r", [gl.to_tensor(0)], dtype=gl.int32, is_pure=False, pack=1,
    )  # fmt: skip


@builtin
def reinterpret(tile, dtype, shape, layout, _semantic=None):
    """The same shared memory, seen as another type and shape."""
    see_as = getattr(tile, "reinterpret", None) or tile._reinterpret
    return see_as(dtype, shape, layout, _semantic=_semantic)


@gluon.constexpr_function
def _barrier(what, threads):
    return f"barrier.{what} $1, {threads}; mov.u32 $0, $1;"


@gluon.jit
def meet(WHAT: gl.constexpr, number, THREADS: gl.constexpr = 256):
    """A named barrier of two consumers, or of so many threads; Triton itself uses numbers up to 1 + partitions. WHAT:
    "sync" waits for the others, "arrive" only tells them. Unlike `arrive`, which Triton puts between two barriers of
    its partition, it keeps nobody waiting. Not `bar.` in PTX, which is for an instruction that all threads of a block
    execute, whereas each consumer has its own; ptxas makes the same barrier of both, but synccheck objects."""
    ASM: gl.constexpr = _barrier(WHAT, THREADS)
    gl.inline_asm_elementwise(ASM, "=r,r", [gl.to_tensor(number)], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def launch_dependents():
    """The next kernel of the stream, if it was launched to wait for this one on the device, may start."""
    gl.inline_asm_elementwise(
        "griddepcontrol.launch_dependents; mov.u32 $0, $1;",
        "=r,r",
        [gl.to_tensor(0)],
        dtype=gl.int32,
        is_pure=False,
        pack=1,
    )


@gluon.jit
def await_launcher():
    """Wait until the kernel before this one in the stream, which let it start early, is over."""
    gl.inline_asm_elementwise(
        "griddepcontrol.wait; mov.u32 $0, $1;", "=r,r", [gl.to_tensor(0)], dtype=gl.int32, is_pure=False, pack=1
    )


@gluon.jit
def bulk_finish():
    """Wait until all that this thread has stored or added in bulk is in memory (`bulk_wait`: is read)."""
    gl.inline_asm_elementwise(
        "cp.async.bulk.wait_group 0; mov.u32 $0, $1;", "=r,r", [gl.to_tensor(0)], dtype=gl.int32, is_pure=False, pack=1
    )


@gluon.jit
def await_number(pointer, number):
    """Wait until memory holds `number`, and so what was done before it was published. The vote keeps warps together:
    without it ptxas takes uniform registers from the whole kernel, which then spills 600 bytes."""
    gl.inline_asm_elementwise(
        """{
        .reg .pred p;
        .reg .b32 found;
        again:
        ld.acquire.gpu.global.b32 found, [$1];
        setp.ne.b32 p, found, $2;
        vote.sync.any.pred p, p, 0xffffffff;
        @p bra.uni again;
        fence.proxy.async;
        mov.b32 $0, found;
        }""",
        "=r,l,r", [pointer.to(gl.int64), gl.to_tensor(number)], dtype=gl.int32, is_pure=False, pack=1,
    )  # fmt: skip


@gluon.jit
def publish(pointer, number):
    """Write a number for other programs, after all that this warp, the only one of its partition, has done."""
    gl.inline_asm_elementwise(
        "bar.warp.sync 0xffffffff; fence.proxy.async.global; st.release.gpu.global.b32 [$1], $2; mov.b32 $0, $2;",
        "=r,l,r", [pointer.to(gl.int64), gl.to_tensor(number)], dtype=gl.int32, is_pure=False, pack=1,
    )  # fmt: skip


@gluon.jit
def seen(pointer, number):
    """Whether memory holds `number`, and so what was done before it was published (`await_number`)."""
    found = gl.inline_asm_elementwise(
        """{
        .reg .pred p;
        .reg .b32 found;
        ld.acquire.gpu.global.b32 found, [$1];
        setp.eq.b32 p, found, $2;
        vote.sync.any.pred p, p, 0xffffffff;
        fence.proxy.async;
        selp.b32 $0, 1, 0, p;
        }""",
        "=r,l,r", [pointer.to(gl.int64), gl.to_tensor(number)], dtype=gl.int32, is_pure=False, pack=1,
    )  # fmt: skip
    return found == 1


@gluon.jit
def follow(pointer, number):
    """Wait until the first to come has published `number`: True; or be the first, where memory held 0 and now holds 1:
    False."""
    follows = gl.inline_asm_elementwise(
        """{
        .reg .pred p, mine;
        .reg .b32 found;
        mov.u32 found, %laneid;
        setp.eq.b32 p, found, 0;
        mov.b32 found, 1;
        @p atom.acquire.gpu.global.cas.b32 found, [$1], 0, 1;
        setp.eq.b32 mine, found, 0;
        vote.sync.any.pred mine, mine, 0xffffffff;
        @mine bra.uni over;
        again:
        ld.acquire.gpu.global.b32 found, [$1];
        setp.ne.b32 p, found, $2;
        vote.sync.any.pred p, p, 0xffffffff;
        @p bra.uni again;
        fence.proxy.async;
        over:
        selp.b32 $0, 0, 1, mine;
        }""",
        "=r,l,r", [pointer.to(gl.int64), gl.to_tensor(number)], dtype=gl.int32, is_pure=False, pack=1,
    )  # fmt: skip
    return follows == 1


def _power(out: int, by_hand: bool) -> str:
    x = out + 4
    if not by_hand:
        return f"ex2.approx.ftz.f32 ${out}, ${x};"
    return f"""
        max.f32 x, ${x}, 0fC2FC0000;
        add.rn.f32 n, x, 0f4B400000;
        sub.rn.f32 y, n, 0f4B400000;
        sub.rn.f32 x, x, y;
        fma.rn.f32 y, x, 0f3D61FBB0, 0f3E786F0D;
        fma.rn.f32 y, y, x, 0f3F31798D;
        fma.rn.f32 y, y, x, 0f3F7FFB49;
        mov.b32 a, n;
        mov.b32 b, y;
        shl.b32 a, a, 23;
        add.s32 a, a, b;
        mov.b32 ${out}, a;"""


_POWERS = gl.constexpr(
    "{ .reg .f32 x, y, n; .reg .b32 a, b;" + " ".join(_power(i, by_hand=i == 1) for i in range(4)) + "}"
)


@gluon.jit
def powers(x):
    """2 to the power of x in fp32, below -126 of -126. One in four by products and sums, as the unit for powers makes
    16 a cycle: 2^n (the bits of the exponent) times a polynomial of degree 3 between -1/2 and 1/2, relative error
    7.5e-5."""
    return gl.inline_asm_elementwise(_POWERS, "=f,=f,=f,=f,f,f,f,f", [x], dtype=gl.float32, is_pure=True, pack=4)
