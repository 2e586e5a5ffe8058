"""The names of Gluon (Triton's explicit dialect) that change between Triton releases, or are private, under one roof.

Kernels take these from here and everything else from `gl`. When a release renames one, only this file
has to change. The kernels were run with Triton 3.6 and compile with 3.7, 3.8 and 3.9, which removed names that 3.6 has.
Where a name is gone that has no substitute here, the import fails, which `engine.choice` takes as the reason against
these kernels: Triton's then serve.
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
from triton.language.core import _aggregate

__all__ = [
    "TensorDescriptor",
    "aggregate",
    "builtin",
    "mbarrier_arrive",
    "grid_dependency_wait",
    "wait_acquire",
    "mbarriers",
    "tma_add",
    "tma_store_complete",
    "tma_load",
    "tma_store",
    "tma_store_wait",
    "mbarrier_expect",
    "fence_async",
    "tma_copy",
    "acquire_or_wait",
    "gl",
    "gluon",
    "launch_dependents",
    "cp_async",
    "cp_async_arrive",
    "cp_async_row",
    "named_barrier",
    "wgmma",
    "wgmma_wait",
    "exp2",
    "store_release",
    "reinterpret",
    "reserve_smem",
    "acquired",
    "syncthreads",
    "smem_tile",
    "smem_tiles",
    "mbarrier_wait",
    "mma_sync",
]

wgmma = warpgroup_mma
wgmma_wait = warpgroup_mma_wait
mma_sync = mma_v2  # of single warps, operands in registers
fence_async = fence_async_shared
mbarrier_wait = mbarrier.wait
mbarrier_arrive = mbarrier.arrive
mbarrier_expect = mbarrier.expect
tma_copy = getattr(tma, "async_load", tma.async_copy_global_to_shared)
_row_load = getattr(async_copy, "async_load", async_copy.async_copy_global_to_shared)
tma_store = getattr(tma, "async_store", tma.async_copy_shared_to_global)
tma_store_wait = tma.store_wait


def aggregate(cls):
    """A class of values, and of functions of them, for kernels. `written` is the class as it was."""
    made = _aggregate(cls)
    made.written = cls
    return made


syncthreads = gl.thread_barrier if hasattr(gl, "thread_barrier") else gl.barrier  # of all threads of a CTA


@builtin
def tma_add(desc, coord, src, _semantic=None):
    """Add a tile in shared memory to the tensor behind `desc` (TMA reduction); the public API of 3.6 has no name for
    it."""
    coord = _semantic._convert_to_ir_values(coord, require_i64=False)
    _semantic.builder.create_async_tma_reduce(ir.DESCRIPTOR_REDUCE_KIND.ADD, desc.handle, coord, src.handle)


@builtin
def mbarriers(*arrays, _semantic=None):
    """Arrays of mbarriers in shared memory, one for each argument (how many, at how many arrivals a phase of one
    completes).

    Triton places a CTA-wide barrier between two initialisations in one array if none came between. So all arrays get
    their first one, then all their second one: there are as many barriers as the longest array has mbarriers, less one.
    """
    sizes = [(_unwrap(number), count) for number, count in arrays]
    layout = mbarrier.MBarrierLayout()
    made = [gl.allocate_shared_memory(gl.int64, [n, 1], layout, _semantic=_semantic) for n, _ in sizes]
    for i in range(max(n for n, _ in sizes)):
        for array, (n, count) in zip(made, sizes):
            if i < n:
                mbarrier.init(array.index(i, _semantic=_semantic), count=count, _semantic=_semantic)
    return gl.tuple(made) if len(made) > 1 else made[0]


@builtin
def smem_tiles(number, desc, times=1, _semantic=None):
    """Shared memory for `number` tiles of a TMA descriptor, or for tiles of `times` as many rows."""
    *outer, rows, cols = desc.block_type.shape
    shape = [_unwrap(number), *outer, rows * _unwrap(times), cols]
    return gl.allocate_shared_memory(desc.dtype, shape, desc.layout, _semantic=_semantic)


@builtin
def smem_tile(room, desc, which=0, _semantic=None):
    """One tile of a TMA descriptor, selected by its index, within a piece of shared memory."""
    block = [_unwrap(n) for n in desc.block_type.shape]
    number = math.prod(_unwrap(n) for n in room.shape) // math.prod(block)
    tiles = reinterpret(room, desc.dtype, [number, *block], desc.layout, _semantic=_semantic)
    return tiles.index(which, _semantic=_semantic)


@gluon.jit
def tma_load(desc, coord, barrier, tile):
    """Start a TMA load of a tile. `barrier` receives one arrival, and its phase completes when the tile is in shared
    memory."""
    mbarrier.expect(barrier, desc.block_type.nbytes)
    tma_copy(desc, coord, barrier, tile)


@gluon.jit
def cp_async_row(pointers, barrier, row):
    """Start a cp.async load of a row, one element per thread; `barrier` receives one arrival from each thread once its
    element has arrived."""
    _row_load(row, pointers)
    async_copy.mbarrier_arrive(barrier, increment_count=False)


@builtin
def cp_async(tile, pointers, mask=None, _semantic=None):
    """Start a cp.async load of a tile, zeros where the mask is False."""
    _row_load(tile, pointers, mask, _semantic=_semantic)


@gluon.jit
def cp_async_arrive(barrier):
    """`barrier` receives one arrival from each thread once all that it has started by `cp_async` has arrived."""
    async_copy.mbarrier_arrive(barrier, increment_count=False)


@gluon.jit
def reserve_smem(BYTES: gl.constexpr, LINE: gl.constexpr, BEGIN: gl.constexpr):
    """The address of BYTES of shared memory for what Gluon cannot express: memory that other CTAs of the cluster write
    to (DSMEM), or bulk copies of any size. It lies before Gluon's own allocations and fills whole lines of LINE bytes,
    where those want to begin. BEGIN: PTX that all threads run first, in which $0 is the address. At most once in a
    kernel."""
    FILLED: gl.constexpr = (BYTES + LINE - 1) // LINE * LINE
    return gl.inline_asm_elementwise(
        f""".shared .align {LINE} .b8 tilesmith_reserved[{FILLED}];
        mov.u32 $0, tilesmith_reserved;
        {BEGIN} // $1""",
        "=&r,r", [gl.to_tensor(0)], dtype=gl.int32, is_pure=False, pack=1,
    )  # fmt: skip


@builtin
def reinterpret(tile, dtype, shape, layout, _semantic=None):
    """The same shared memory, seen as another dtype, shape and layout."""
    see_as = getattr(tile, "reinterpret", None) or tile._reinterpret
    return see_as(dtype, shape, layout, _semantic=_semantic)


@gluon.constexpr_function
def _barrier(what, threads):
    return f"barrier.{what} $1, {threads}; mov.u32 $0, $1;"


@gluon.jit
def named_barrier(WHAT: gl.constexpr, number, THREADS: gl.constexpr = 256):
    """A named barrier (bar.sync / bar.arrive) of two consumer warpgroups, or of THREADS threads. Triton itself uses the
    numbers up to 1 + partitions. WHAT: "sync" waits for the others, "arrive" only signals. Unlike `mbarrier_arrive`,
    which Triton places between two barriers of its partition, this does not stop other warps. The PTX is `barrier.`,
    not `bar.`: the latter is for instructions that all threads of a CTA execute, and synccheck objects though ptxas
    generates the same code for both."""
    ASM: gl.constexpr = _barrier(WHAT, THREADS)
    gl.inline_asm_elementwise(ASM, "=r,r", [gl.to_tensor(number)], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def launch_dependents():
    """Programmatic dependent launch: let the next kernel of the stream start, if it was launched to wait for this one
    on the device."""
    gl.inline_asm_elementwise(
        "griddepcontrol.launch_dependents; mov.u32 $0, $1;",
        "=r,r",
        [gl.to_tensor(0)],
        dtype=gl.int32,
        is_pure=False,
        pack=1,
    )


@gluon.jit
def grid_dependency_wait():
    """Programmatic dependent launch: wait until the kernel before this one in the stream has ended
    (griddepcontrol.wait)."""
    gl.inline_asm_elementwise(
        "griddepcontrol.wait; mov.u32 $0, $1;", "=r,r", [gl.to_tensor(0)], dtype=gl.int32, is_pure=False, pack=1
    )


@gluon.jit
def tma_store_complete():
    """Wait until all TMA stores and reductions of this thread are visible in global memory; `tma_store_wait` only waits
    until their source has been read."""
    gl.inline_asm_elementwise(
        "cp.async.bulk.wait_group 0; mov.u32 $0, $1;", "=r,r", [gl.to_tensor(0)], dtype=gl.int32, is_pure=False, pack=1
    )


@gluon.jit
def wait_acquire(pointer, number):
    """Spin until global memory holds `number`, with acquire semantics: what was done before `store_release` is then
    visible. The vote keeps a warp together; without it ptxas takes uniform registers from the whole kernel, which then
    spills 600 bytes."""
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
def store_release(pointer, number):
    """Store a number for other CTAs with release semantics, after all that this warp, the only one of its partition,
    has done."""
    gl.inline_asm_elementwise(
        "bar.warp.sync 0xffffffff; fence.proxy.async.global; st.release.gpu.global.b32 [$1], $2; mov.b32 $0, $2;",
        "=r,l,r", [pointer.to(gl.int64), gl.to_tensor(number)], dtype=gl.int32, is_pure=False, pack=1,
    )  # fmt: skip


@gluon.jit
def acquired(pointer, number):
    """Whether global memory holds `number`, with acquire semantics as in `wait_acquire`, without waiting."""
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
def acquire_or_wait(pointer, number):
    """The first CTA to come takes the lock, where memory held 0 and now holds 1, and gets False. Every other waits
    until the first has stored `number`, and gets True."""
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


def _exp2_ptx(out: int, emulated: bool) -> str:
    x = out + 4
    if not emulated:
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


_EXP2 = gl.constexpr(
    "{ .reg .f32 x, y, n; .reg .b32 a, b;" + " ".join(_exp2_ptx(i, emulated=i == 1) for i in range(4)) + "}"
)


@gluon.jit
def exp2(x):
    """2^x in fp32; below -126 that of -126. The special function unit (MUFU) does 16 a cycle, so one exponential in
    four is emulated: 2^n, as bits of the exponent, times a polynomial of degree 3 on [-1/2, 1/2], with a relative error
    of 7.5e-5."""
    return gl.inline_asm_elementwise(_EXP2, "=f,=f,=f,=f,f,f,f,f", [x], dtype=gl.float32, is_pure=True, pack=4)
