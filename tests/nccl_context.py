"""What GPUs check of context parallelism over NCCL, with any number of them; without GPUs shorter, over gloo.

torchrun --nproc-per-node 2 tests/nccl_context.py   # values in bf16, disagreement, stalls, torch's own with our kernels
python tests/nccl_context.py lost 2                 # ranks that are killed or stall, between calls and within them

Each rank says how each check went; the exit code is the number of those that failed.
"""

import contextlib
import datetime
import multiprocessing
import os
import sys
import time
import traceback

import torch
import torch.distributed as dist
from torch.nn import functional as F

import tilesmith
from tilesmith import ops
from tilesmith.bench.ranks import current_device, memory_in_use, process_group
from tilesmith.distributed import Layout, ProcessGroupRing, RingError, context_parallel_attention, cost, prepared
from tilesmith.distributed.parts import Split, Splits
from tilesmith.engine.timing import synchronize

CAUSAL = ops.Mask(causal=True)
ODD, EVEN = (4097, 2048) if torch.cuda.is_available() else (257, 128)  # tokens
SHORTER = 1 if torch.cuda.is_available() else 4


def inputs(tokens, heads=(8, 2, 2), dim=128):
    device = current_device()
    generator = torch.Generator(device).manual_seed(0)
    return [torch.randn(1, h, tokens, dim, device=device, dtype=torch.bfloat16, generator=generator) for h in heads]


def close(x, expected):
    error = (x.float() - expected.float()).norm() / expected.float().norm()
    assert error < 0.02, float(error)


def check_modes():
    """Uneven numbers of tokens, grouped heads, softcap."""
    layout, rank = Layout.zigzag(ODD, dist.get_world_size()), dist.get_rank()
    whole = [x.requires_grad_() for x in inputs(ODD)]
    score = ops.Score(softcap=20.0)
    out, _ = ops.attention(*whole, CAUSAL, score)
    dout = torch.randn_like(out)
    dist.broadcast(dout, 0)
    exact = torch.autograd.grad(out, whole, dout)
    mine = [layout.shard(x.detach(), rank, 2).requires_grad_() for x in whole]
    held = sum(b - a for a, b in layout.ranges[rank])
    for mode in ("allgather", "ring", "ring in parts", "ulysses", "auto"):
        with in_parts() if "parts" in mode else contextlib.nullcontext():
            got, _ = context_parallel_attention(*mine, None, CAUSAL, score, mode=mode.split()[0], layout=layout)
            grads = torch.autograd.grad(got, mine, layout.shard(dout, rank, 2))
        close(got, layout.shard(out, rank, 2))
        for g, e in zip(grads, exact):
            close(g, layout.shard(e, rank, 2))
            assert not g[:, :, held:].any()


def check_few_calls():
    """Packed documents with queries without keys between others, and windows whose first tile has a call of its own."""
    rank, size = dist.get_rank(), dist.get_world_size()
    starts = tuple(n // SHORTER for n in (0, 700, 760, 1100, 1300, 1350, 2000, 1024 * size))
    window = ops.Mask(causal=True, window=128 // SHORTER - 1)
    for layout, mask, cu in (
        (Layout.balanced(starts, size), CAUSAL, starts),
        (Layout.zigzag(starts[-1], size), CAUSAL, starts),
        (Layout.contiguous(starts[-1], size), window, None),
        (Layout.contiguous(starts[-1], size), window, starts),
    ):
        whole = [x.requires_grad_() for x in inputs(layout.tokens)]
        sinks = torch.linspace(-1, 1, 8, device=whole[0].device).requires_grad_()
        packed = {}
        if cu is not None:
            boundaries = torch.tensor(cu, dtype=torch.int32, device=sinks.device)
            packed = {"cu_seqlens_q": boundaries, "cu_seqlens_k": boundaries}
        out, _ = ops.attention(*whole, mask, sinks=sinks, **packed)
        exact = torch.autograd.grad(out, [*whole, sinks], torch.ones_like(out))
        mine = [layout.shard(x.detach(), rank, 2).requires_grad_() for x in whole]
        for mode in ("allgather", "ring"):
            for _ in range(4 if torch.cuda.is_available() else 1):  # the third is replayed
                got, _ = context_parallel_attention(
                    *mine, None, mask, mode=mode, layout=layout, cu_seqlens=cu, sinks=sinks
                )  # fmt: skip
                grads = torch.autograd.grad(got, [*mine, sinks], torch.ones_like(got))
                close(got, layout.shard(out, rank, 2))
                for g, e in zip(grads, exact[:3]):
                    close(g, layout.shard(e, rank, 2))
                total = grads[3].clone()
                dist.all_reduce(total)
                close(total, exact[3])


def check_peer_memory():
    """Transfers by copy engines come to the bits of NCCL's, in any size, order and mode."""
    if not torch.cuda.is_available():
        assert ProcessGroupRing().shares_memory is False
        return
    by_engine, by_nccl = ProcessGroupRing(), ProcessGroupRing(transport="nccl")
    rank, size = dist.get_rank(), dist.get_world_size()
    window = ops.Mask(causal=True, window=127)  # the first rank reads nothing, and has no gradients of others' keys
    each = [(Layout.zigzag(tokens, size), CAUSAL) for tokens in (512, 4096, 514, 65536, 1024)]
    for layout, mask in [*each, (Layout.contiguous(4096, size), window)]:
        mine = [layout.shard(x, rank, 2).requires_grad_() for x in inputs(layout.tokens)]
        for mode in ("allgather", "ring", "ulysses"):
            found = []
            for ring in (by_nccl, by_engine):
                named = {"mode": mode, "layout": layout, "deterministic": True}
                outs = [context_parallel_attention(*mine, ring, mask, **named)[0] for _ in range(5)]
                found.append([*outs, *torch.autograd.grad(sum(x.sum() for x in outs), mine)])
            for x, y in zip(*found, strict=True):
                assert torch.equal(x, y), (layout.tokens, mask, mode)
    assert by_engine.shares_memory and by_nccl.shares_memory is False
    assert by_engine.transport().name == "symmetric_memory" and by_nccl.transport().name == "nccl"
    held = by_engine.memory_held
    free = torch.cuda.mem_get_info()[0]
    by_engine.release_memory()
    assert by_engine.memory_held == 0 and torch.cuda.mem_get_info()[0] - free >= held > 0
    outs = [context_parallel_attention(*mine, ring, mask, layout=layout)[0] for ring in (by_nccl, by_engine)]
    assert torch.equal(*outs) and by_engine.memory_held  # made anew


def check_what_a_capture_is_told():
    """Replays would not wait for other ranks: refused where copy engines serve."""
    if not torch.cuda.is_available():
        return
    ring = ProcessGroupRing()
    q, k, v = inputs(EVEN)
    context_parallel_attention(q, k, v, ring, CAUSAL)
    synchronize(current_device())
    graph = torch.cuda.CUDAGraph()
    try:
        with torch.cuda.graph(graph):
            context_parallel_attention(q, k, v, ring, CAUSAL)
    except ValueError as problem:
        assert "captured as a CUDA graph" in str(problem), problem
    else:
        raise AssertionError("nothing was raised")
    context_parallel_attention(q, k, v, ring, CAUSAL)


@contextlib.contextmanager
def in_parts():
    """A ring works on one kv head after another, and for gradients on half of the query heads that read it."""
    chosen, cost.ring_parts = cost.ring_parts, lambda *_: cost.RingParts(Splits(Split(2), Split(2, 2)))
    prepared.forget()
    try:
        yield
    finally:
        cost.ring_parts = chosen
        prepared.forget()


def check_compile():
    layout, rank = Layout.zigzag(EVEN, dist.get_world_size()), dist.get_rank()
    mine = [layout.shard(x, rank, 2).requires_grad_() for x in inputs(EVEN)]
    call = lambda q, k, v: context_parallel_attention(q * 2, k, v, None, CAUSAL, layout=layout)[0] * 2  # noqa: E731
    expected = torch.autograd.grad(call(*mine).sum(), mine)
    backend = "inductor" if torch.cuda.is_available() else "aot_eager"  # a CPU may have no compiler
    for g, e in zip(torch.autograd.grad(torch.compile(call, backend=backend)(*mine).sum(), mine), expected):
        close(g, e)


def check_torchs_context_parallel():
    """F.scaled_dot_product_attention inside of it runs our kernels, which a CPU has none of."""
    if not torch.cuda.is_available():
        return
    from torch.distributed.tensor.experimental import context_parallel
    from torch.nn.attention import SDPBackend, activate_flash_attention_impl, sdpa_kernel

    tilesmith.register_for_sdpa()
    layout, rank = Layout.zigzag(EVEN, dist.get_world_size()), dist.get_rank()
    whole = [x.requires_grad_() for x in inputs(EVEN, (8, 8, 8))]
    out, _ = ops.attention(*whole, CAUSAL)
    dout = torch.randn_like(out)
    dist.broadcast(dout, 0)
    exact = torch.autograd.grad(out, whole, dout)
    mine = [layout.shard(x.detach(), rank, 2).requires_grad_() for x in whole]
    mesh = dist.device_mesh.init_device_mesh("cuda", (dist.get_world_size(),))
    activate_flash_attention_impl("tilesmith")
    unused = torch.zeros(2 * dist.get_world_size(), device="cuda")  # torch 2.11 looks at the first buffer
    with context_parallel(mesh, buffers=[unused], buffer_seq_dims=[0]), sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        got = F.scaled_dot_product_attention(*mine, is_causal=True)
        grads = torch.autograd.grad(got, mine, layout.shard(dout, rank, 2))
    close(got, layout.shard(out, rank, 2))
    for g, e in zip(grads, exact):
        close(g, layout.shard(e, rank, 2))


def check_fp8_layers_under_fsdp():
    """Gradients are the ranks' mean; a batch of one rank that is not finite skips all ranks' step."""
    from sharded_models import check_fsdp_of_fp8_layers

    device = current_device()
    mesh = dist.device_mesh.init_device_mesh(device.type, (dist.get_world_size(),))
    with device:
        check_fsdp_of_fp8_layers(mesh)


def check_disagreement():
    rank, last = dist.get_rank(), dist.get_world_size() - 1
    q, k, v = inputs(EVEN)
    context_parallel_attention(q, k, v, None, CAUSAL)
    for field, call in {
        "q.shape": lambda: context_parallel_attention(
            *[x[:, :, : EVEN // 2 if rank == last else EVEN] for x in (q, k, v)], None, CAUSAL
        ),
        "causal": lambda: context_parallel_attention(q, k, v, None, ops.Mask(causal=rank != last)),
    }.items():
        began = time.monotonic()
        try:
            call()
        except ValueError as problem:
            assert field in str(problem) and f"on rank {last}" in str(problem), problem
            assert time.monotonic() - began < 60  # a tenth of the time limit
        else:
            raise AssertionError(f"{field}: nothing was raised")
    context_parallel_attention(q, k, v, None, CAUSAL)


def check_a_stalled_rank():
    ring = ProcessGroupRing()
    q, k, v = inputs(EVEN)
    context_parallel_attention(q, k, v, ring, CAUSAL)
    _limited(ring, 3.0)
    if dist.get_rank() == dist.get_world_size() - 1:
        time.sleep(6)
        return
    try:
        context_parallel_attention(q, k, v, ring, CAUSAL)
    except RingError as problem:
        assert f"forward: rank {dist.get_world_size() - 1} did not answer" in str(problem), problem
    else:
        raise AssertionError("nothing was raised")


LIMIT = 5.0  # seconds: the time limit of ranks that lose one, once they have warmed up
SLACK = 5.0  # seconds that they may take besides, of a busy host
HOWS = {  # what the last rank does, and in which step
    "killed": ("killed", ""),
    "killed within a forward": ("killed", "keys, step 1"),
    "killed within a backward": ("killed", "gradients of keys"),
    "stalled within a forward": ("stalled", "keys, step 1"),
    "stalled within a backward": ("stalled", "keys for gradients"),
}


class Lossy(ProcessGroupRing):
    """A rank that is killed, or stalls, when all agree about a call and it is about to exchange tokens."""

    does, where = "", "nowhere"

    def begin(self, moves, sent, into, step):
        if step.startswith(self.where):
            if self.does == "killed":
                os._exit(9)
            time.sleep(2.5 * LIMIT)
        return super().begin(moves, sent, into, step)


def _limited(ring, seconds):
    """From here on: ranks may lag while they begin, compile and make their groups."""
    ring._limit, ring.timeout = seconds, datetime.timedelta(seconds=seconds)


def _outlives(rank, size, port, how, told, ready, begin):
    """A rank of `lost`: the last one is lost in its third call; the others say what they saw of it."""
    ready.release()
    begin.wait()
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(size)}
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank)}
    does, where = HOWS[how]
    with process_group():
        device = current_device()
        ring = Lossy(timeout=60.0)
        q, k, v = (x.requires_grad_() for x in inputs(EVEN))
        call = lambda: context_parallel_attention(q, k, v, ring, CAUSAL, mode="allgather")[0]  # noqa: E731
        gradients = lambda: torch.autograd.grad(call().sum(), (q, k, v))  # noqa: E731
        for _ in range(2):  # NCCL takes its buffers
            gradients()
        synchronize(device)
        _limited(ring, LIMIT)
        before, began = memory_in_use(device), time.monotonic()
        if rank == size - 1:
            if not where:
                os._exit(9)
            ring.does, ring.where = does, where
            with contextlib.suppress(RingError):
                gradients()
                call()
            os._exit(0)
        said, used = _lost(call, gradients, "backward" in how, device)
        seconds = time.monotonic() - began
        again, began = "", time.monotonic()
        try:
            call()
        except RingError as problem:
            again = str(problem)
        if ring.shares_memory and where:  # the group knows; a comparison with gloo asks again
            used += "" if time.monotonic() - began < 1.0 and where in again else f"; the next call: {again!r}"
            used += f"; {ring.memory_held} bytes of symmetric memory" if ring.memory_held else ""
        synchronize(device)
        told.put((rank, said, used, seconds, memory_in_use(device) - before))
        told.close()
        told.join_thread()
        os._exit(0)  # the group cannot be ended without the rank that is gone


def _lost(call, gradients, in_backward, device) -> tuple[str, str]:
    """What a rank hears whose peer is lost, and what it could have used by mistake."""
    try:
        found = gradients() if in_backward else (call(),)
        synchronize(device)  # in time, though a GPU waited in vain
    except RingError as problem:
        return str(problem), ""
    used = "" if any(x.isnan().any() for x in found) else "no NaN in what a call gave"
    try:
        call()
    except RingError as problem:
        return str(problem), used
    return "", used


def lost(size, only="") -> int:
    """Every rank that is left names the one that is gone in time, uses nothing of its call, has its memory back."""
    failures, spawning = 0, multiprocessing.get_context("spawn")
    ready, groups = spawning.Semaphore(0), []
    for place, how in enumerate(how for how in HOWS if only in how):
        told, begin = spawning.Queue(), spawning.Event()
        started = [(rank, size, 29517 + place, how, told, ready, begin) for rank in range(size)]
        ranks = [spawning.Process(target=_outlives, args=each) for each in started]
        for process in ranks:
            process.start()
        groups.append((how, told, begin, ranks))
    for _ in range(size * len(groups)):  # all import at the same time, and none while others are timed
        ready.acquire(timeout=180)
    for how, told, begin, ranks in groups:
        begin.set()
        for _ in range(size - 1):
            rank, said, used, seconds, kept = told.get(timeout=180)
            right = f"rank {size - 1} " in said and HOWS[how][1] in said and not used
            right = right and seconds < LIMIT + SLACK and kept <= 0
            failures += not right
            about = f"{seconds:.1f} s, {kept} bytes kept: {said} {used}"
            sys.stdout.write(f"{how}: rank {rank}: {'ok' if right else 'WRONG'}, {about}\n")
            sys.stdout.flush()
        ranks[-1].terminate()  # it may sleep still
        for process in ranks:
            process.join(60)
            if process.exitcode is None:
                process.terminate()
    return failures


def main() -> int:
    failures = 0
    with process_group() as rank:
        for name, check in list(globals().items()):
            if name.startswith("check_"):
                began = time.monotonic()
                told = "ok"
                try:
                    check()
                    synchronize(current_device())
                except Exception:
                    told = traceback.format_exc()
                    failures += 1
                sys.stdout.write(f"rank {rank} {name}: {time.monotonic() - began:.1f} s {told}\n")
                sys.stdout.flush()
    return failures


if __name__ == "__main__":
    sys.exit(lost(int(sys.argv[2]), *sys.argv[3:]) if sys.argv[1:2] == ["lost"] else main())
