"""Clusters of programs (sm_90): how many there is room for, and the shared memory of the others, for which the Gluon of
Triton 3.6 has no name.

The device starts a cluster as a whole or not at all, so that its programs may wait for each other. A program that has
opened a room may be sent numbers by any program of its cluster that has waited for all of them to do so (each by its
number in the cluster). A program that is sent something ends when all of it has come: nobody writes to the memory of
one that is gone.
"""

from functools import cache

import torch

from tilesmith.device.gluon.shim import gl, gluon, reserve
from tilesmith.hardware.detect import arch_of

HEAD = 16  # bytes of a room before the first number: a barrier, and what keeps numbers in vectors
_HEAD = gl.constexpr(HEAD)


@gluon.jit
def _nothing_kernel():
    pass


@cache
def clusters_of(device: torch.device, parts: int, per_sm: int) -> int:
    """How many clusters of `parts` programs the device has room for, `per_sm` programs to a multiprocessor. A cluster
    stays within a group of multiprocessors (GPC), whose sizes differ from one to the next: the driver is asked."""
    arch = arch_of(device)
    if device.type != "cuda" or parts == 1:
        return max(1, arch.sms * per_sm // parts)
    from triton.runtime import driver

    with torch.cuda.device(device):
        compiled = _nothing_kernel[(0,)](num_warps=4)
        return driver.active.utils.cuOccupancyMaxActiveClusters(
            compiled.function, arch.shared_memory // per_sm - 1024, parts
        )


@gluon.jit
def open_room(BYTES: gl.constexpr, LINE: gl.constexpr):
    """Room for what this program will be sent, exactly BYTES, a multiple of 8, behind a barrier which is over when they
    have come: its address, from which the first number is HEAD bytes on. The cluster hears that this program has begun
    (`await_cluster`). LINE: as in `reserve`; tiles want lines of 1,024 bytes, other bulk copies lines of 128."""
    BEGIN: gl.constexpr = f"""{{
        .reg .pred p;
        .reg .b32 thread;
        mov.u32 thread, %tid.x;
        setp.eq.u32 p, thread, 0;
        @p mbarrier.init.shared::cta.b64 [$0], 1;
        @p fence.mbarrier_init.release.cluster;
        @p mbarrier.arrive.expect_tx.shared::cta.b64 _, [$0], {BYTES};
        barrier.cluster.arrive.relaxed.aligned;
        }}"""
    return reserve(_HEAD + BYTES, LINE, BEGIN)


@gluon.jit
def await_cluster():
    """Wait until all programs of the cluster have opened their rooms. Once in a kernel, by all of its threads."""
    gl.inline_asm_elementwise(
        "barrier.cluster.wait.acquire.aligned; mov.u32 $0, $1;",
        "=r,r", [gl.to_tensor(0)], dtype=gl.int32, is_pure=False, pack=1,
    )  # fmt: skip


@gluon.constexpr_function
def _sending(width):
    """Assembly that sends so many neighbours. Its operands are, of each of them: a result, the address, the program,
    the barrier, the number. All but the last are those of the first."""
    numbers = ", ".join(f"${4 * width + i}" for i in range(width))
    results = " ".join(f"mov.b32 ${i}, to;" for i in range(width))
    return f"""{{
        .reg .b32 to, its_barrier;
        mapa.shared::cluster.u32 to, ${width}, ${2 * width};
        mapa.shared::cluster.u32 its_barrier, ${3 * width}, ${2 * width};
        st.async.shared::cluster.mbarrier::complete_tx::bytes.v{width}.b32 [to], {{{numbers}}}, [its_barrier];
        {results}
        }}"""


@gluon.constexpr_function
def _operands(width):
    return ",".join(["=r"] * width + ["r"] * (4 * width))


@gluon.jit
def send(barrier, to, program, x, WIDTH: gl.constexpr):
    """Send x, fp32, to places in the rooms of programs of the cluster. barrier, to: addresses in this program's memory,
    which are the same in the others'. to, program: of each number, of which a thread has WIDTH neighbours (2 or 4)."""
    ASM: gl.constexpr = _sending(WIDTH)
    OPERANDS: gl.constexpr = _operands(WIDTH)
    gl.inline_asm_elementwise(
        ASM, OPERANDS, [to, program, barrier + to * 0, x.to(gl.int32, bitcast=True)],
        dtype=gl.int32, is_pure=False, pack=WIDTH,
    )  # fmt: skip


@gluon.jit
def send_pair(barrier, to, program, a, b):
    """Send two fp32 of each row, which all threads of a warp have, as `send`: the warp's first thread sends them."""
    gl.inline_asm_elementwise(
        """{
        .reg .b32 to, its_barrier;
        .reg .pred p;
        mov.u32 to, %laneid;
        setp.eq.u32 p, to, 0;
        mapa.shared::cluster.u32 to, $1, $2;
        mapa.shared::cluster.u32 its_barrier, $3, $2;
        @p st.async.shared::cluster.mbarrier::complete_tx::bytes.v2.b32 [to], {$4, $5}, [its_barrier];
        mov.b32 $0, to;
        }""",
        "=r,r,r,r,r,r",
        [to, program, barrier + to * 0, a.to(gl.int32, bitcast=True), b.to(gl.int32, bitcast=True)],
        dtype=gl.int32, is_pure=False, pack=1,
    )  # fmt: skip


@gluon.jit
def await_room(barrier):
    """Wait until all that this program is sent, or what bulk copies bring it, has come: the first time of a barrier."""
    gl.inline_asm_elementwise(
        """{
        .reg .pred p;
        again:
        mbarrier.try_wait.parity.shared::cta.b64 p, [$1], 0;
        @!p bra again;
        mov.b32 $0, $1;
        }""",
        "=r,r", [barrier], dtype=gl.int32, is_pure=False, pack=1,
    )  # fmt: skip


@gluon.jit
def read_room(at):
    """The fp32 numbers at addresses of this program's room."""
    found = gl.inline_asm_elementwise("ld.shared.b32 $0, [$1];", "=r,r", [at], dtype=gl.int32, is_pure=False, pack=1)
    return found.to(gl.float32, bitcast=True)
