"""Thread block clusters (sm_90): how many fit the device, and distributed shared memory (DSMEM), for which the Gluon of
Triton 3.6 has no API.

The device starts all CTAs of a cluster or none, so they may wait for each other. Once a CTA has reserved its part with
`open_dsmem`, any CTA of the cluster that has passed `cluster_wait` may store into it, naming it by its rank in the
cluster. A CTA must not end before everything stored to it has arrived.
"""

from functools import cache

import torch

from tilesmith.device.gluon.shim import gl, gluon, reserve_smem
from tilesmith.engine.triton_private import most_clusters
from tilesmith.hardware.detect import Arch, arch_of, device_of

HEAD = 16  # bytes of a room before the first number: a barrier, and what keeps numbers in vectors
_HEAD = gl.constexpr(HEAD)


@gluon.jit
def _nothing_kernel():
    pass


def resident_clusters(device: torch.device, parts: int, per_sm: int) -> int:
    """`clusters_of` the Arch of `device`."""
    arch = arch_of(device)
    return _of_cuda(device, parts, per_sm) if device.type == "cuda" else clusters_of(arch, parts, per_sm)


def clusters_of(arch: Arch, parts: int, per_sm: int) -> int:
    """How many clusters of `parts` CTAs a device can run at once, with `per_sm` CTAs on a multiprocessor. A cluster
    stays within one GPC, and GPCs differ in size, so the driver is asked, in a rehearsal too; of a GPU that is not
    here, as if they did not."""
    there = device_of(arch)
    return _of_cuda(there, parts, per_sm) if there is not None else max(1, arch.sms * per_sm // parts)


@cache
def _of_cuda(device: torch.device, parts: int, per_sm: int) -> int:
    arch = arch_of(device)
    if parts == 1:
        return max(1, arch.sms * per_sm)
    with torch.cuda.device(device):
        found = most_clusters(_nothing_kernel, arch.shared_memory // per_sm - 1024, parts)
    # a GPC of Hopper has 16 or 18 multiprocessors
    return max(1, arch.sms // 18 * (16 * per_sm // parts)) if found is None else found


@gluon.jit
def open_dsmem(BYTES: gl.constexpr, LINE: gl.constexpr):
    """Reserve BYTES of shared memory (a multiple of 8) that other CTAs of the cluster will write to, behind an mbarrier
    that completes when all BYTES have arrived. Returns the address; the first number lies HEAD bytes further on. The
    cluster is told that this CTA has started (`cluster_wait`). LINE: as in `reserve_smem`; TMA tiles need lines of
    1,024 bytes, other bulk copies lines of 128."""
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
    return reserve_smem(_HEAD + BYTES, LINE, BEGIN)


@gluon.jit
def cluster_wait():
    """Wait until every CTA of the cluster has called `open_dsmem`. Once in a kernel, by all threads."""
    gl.inline_asm_elementwise(
        "barrier.cluster.wait.acquire.aligned; mov.u32 $0, $1;",
        "=r,r", [gl.to_tensor(0)], dtype=gl.int32, is_pure=False, pack=1,
    )  # fmt: skip


@gluon.constexpr_function
def _sending(width):
    """PTX of st.async for `width` neighbours. Its operands are, for each of them: a result, the address, the CTA, the
    barrier and the number; of the address, CTA and barrier only the first is used."""
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
def store_dsmem(barrier, to, cta, x, WIDTH: gl.constexpr):
    """Store x, fp32, into the shared memory of other CTAs of the cluster (st.async). barrier, to: addresses in this
    CTA's shared memory, which are the same in the others. to, cta: for each number; a thread has WIDTH neighbours
    (2 or 4)."""
    ASM: gl.constexpr = _sending(WIDTH)
    OPERANDS: gl.constexpr = _operands(WIDTH)
    gl.inline_asm_elementwise(
        ASM, OPERANDS, [to, cta, barrier + to * 0, x.to(gl.int32, bitcast=True)],
        dtype=gl.int32, is_pure=False, pack=WIDTH,
    )  # fmt: skip


@gluon.jit
def store_dsmem_pair(barrier, to, cta, a, b):
    """As `store_dsmem`, for two fp32 values per row that all threads of a warp hold; lane 0 stores them."""
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
        [to, cta, barrier + to * 0, a.to(gl.int32, bitcast=True), b.to(gl.int32, bitcast=True)],
        dtype=gl.int32, is_pure=False, pack=1,
    )  # fmt: skip


@gluon.jit
def dsmem_wait(barrier):
    """Wait until everything that other CTAs store here, or that bulk copies bring, has arrived: the first phase of the
    barrier."""
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
def load_dsmem(at):
    """Load fp32 numbers from addresses in this CTA's part of the cluster's shared memory."""
    found = gl.inline_asm_elementwise("ld.shared.b32 $0, [$1];", "=r,r", [at], dtype=gl.int32, is_pure=False, pack=1)
    return found.to(gl.float32, bitcast=True)
