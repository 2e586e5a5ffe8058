"""What ranks check of context parallelism: every mode equals one process, and faults have names. Run by
test_context_parallel.py in one spawn."""

import contextlib
import copy
import datetime
import gc
import pickle
import types
import weakref

import numpy as np
import pytest
import torch
import torch.distributed as dist

import tilesmith.distributed.cost as cost
import tilesmith.distributed.lost as lost
import tilesmith.distributed.prepared as prepared
from ranks import SOON, soon
from tilesmith import ops
from tilesmith.distributed import (
    Layout,
    ProcessGroupRing,
    RingError,
    SharedSequence,
    context_parallel_attention,
    explain_context_parallel,
    ring_of,
)
from tilesmith.distributed.parts import Split, Splits
from tilesmith.distributed.transport import peers_of

STARTS = (0, 5, 5, 17, 29)


def whole(q, k, v, mask, score, sinks=None, cu_seqlens=None):
    """One process's results."""
    packed = {}
    if cu_seqlens is not None:
        starts = torch.tensor(cu_seqlens, dtype=torch.int32)
        packed = {"cu_seqlens_q": starts, "cu_seqlens_k": starts}
    return ops.attention(q, k, v, mask, score, sinks=sinks, **packed)


def inputs(tokens, heads=4, kv_heads=2, dim=8, dtype=torch.float64, batch=1):
    return [torch.randn(batch, h, tokens, dim, dtype=dtype).requires_grad_() for h in (heads, kv_heads, kv_heads)]


def gathered(layout, x, group):
    shards = [torch.empty_like(x) for _ in range(layout.size)]
    dist.all_gather(shards, x.detach().contiguous(), group=group)
    return layout.unshard(shards, 2)


def agree_with_whole(mesh, mask, score, layout, mode, *, cu_seqlens=None, with_sinks=False, **more):
    """Values and gradients of one mode against one process."""
    tensors = inputs(layout.tokens, batch=1 if cu_seqlens else 2)
    sinks = torch.randn(4, dtype=torch.float64, requires_grad=True) if with_sinks else None
    out, lse = whole(*tensors, mask, score, sinks, cu_seqlens)
    dout, dlse = torch.randn_like(out), torch.where(lse > float("-inf"), torch.randn_like(lse), 0.0)
    asked = tensors + ([sinks] if with_sinks else [])
    exact = torch.autograd.grad((out, lse), asked, (dout, dlse))
    rank, group = mesh.get_rank(), mesh.get_group() if mesh.ndim == 1 else None
    mine = [layout.shard(x.detach(), rank, 2).requires_grad_() for x in tensors]
    got, got_lse = context_parallel_attention(
        *mine, mesh, mask, score, mode=mode, layout=layout, cu_seqlens=cu_seqlens, sinks=sinks, **more
    )
    slopes = [layout.shard(dout, rank, 2), layout.shard(dlse, rank, 2)]
    grads = torch.autograd.grad((got, got_lse), mine + asked[3:], slopes)
    torch.testing.assert_close(gathered(layout, got, group), out.detach())
    torch.testing.assert_close(gathered(layout, got_lse, group), lse.detach())
    for g, e in zip(grads, exact[:3]):
        torch.testing.assert_close(gathered(layout, g, group), e)
    if with_sinks:
        total = grads[3].clone()
        dist.all_reduce(total, group=group)
        torch.testing.assert_close(total, exact[3])
    padding = slice(sum(b - a for a, b in layout.ranges[rank]), None)
    assert not any(x[:, :, padding].any() for x in (got, *grads[:3]))


@contextlib.contextmanager
def in_parts(of_group=2):
    """A ring works on one of two kv heads after another, also of few tokens, and for gradients on so many parts of the
    query heads that read it."""
    chosen, cost.ring_parts = cost.ring_parts, lambda *_: cost.RingParts(Splits(Split(2), Split(2, of_group)))
    prepared.forget()
    try:
        yield
    finally:
        cost.ring_parts = chosen
        prepared.forget()


def check_modes(mesh):
    """Each mode, with an uneven number of tokens."""
    size = mesh.size()
    zigzag, contiguous = Layout.zigzag(29, size), Layout.contiguous(29, size)
    for mode in ("allgather", "ring", "ulysses", "auto"):
        agree_with_whole(mesh, ops.Mask(causal=True), ops.Score(), zigzag, mode)
    agree_with_whole(mesh, ops.Mask(), ops.Score(scale=0.3), contiguous, "ring", with_sinks=True)
    with in_parts():
        agree_with_whole(mesh, ops.Mask(causal=True), ops.Score(), zigzag, "ring", with_sinks=True)
    agree_with_whole(mesh, ops.Mask(causal=True, window=4), ops.Score(softcap=2.0), contiguous, "allgather")
    agree_with_whole(mesh, ops.Mask(causal=True, window=4), ops.Score(), zigzag, "ring", with_sinks=True)
    agree_with_whole(mesh, ops.Mask(causal=True), ops.Score(alibi=torch.rand(4)), zigzag, "ulysses")


def check_documents(mesh):
    layout = Layout.balanced(STARTS, mesh.size())
    for mode in ("allgather", "ring", "ulysses"):
        agree_with_whole(mesh, ops.Mask(causal=True), ops.Score(), layout, mode, cu_seqlens=STARTS, with_sinks=True)
    agree_with_whole(mesh, ops.Mask(causal=True, window=3), ops.Score(), layout, "allgather", cu_seqlens=STARTS)


def check_ids_biases_and_dense_masks(mesh):
    """A rank's rows of them; document ids are gathered."""
    layout, rank = Layout.zigzag(16, mesh.size()), mesh.get_rank()
    q, k, v = (x.detach() for x in inputs(16))
    ids, bias = torch.randint(3, (1, 16), dtype=torch.int32), torch.randn(1, 4, 16, 16, dtype=torch.float64)
    dense = torch.rand(1, 1, 16, 16) < 0.7
    expected, _ = ops.attention(q, k, v, ops.Mask(causal=True, documents=ids, dense=dense), ops.Score(bias=bias))
    shard = layout.shard
    mask = ops.Mask(causal=True, documents=shard(ids, rank, 1), dense=shard(dense, rank, 2))
    mine = [shard(x, rank, 2) for x in (q, k, v)]
    for mode in ("allgather", "ring"):
        out, _ = context_parallel_attention(*mine, mesh, mask, ops.Score(bias=shard(bias, rank, 2)), mode=mode)
        torch.testing.assert_close(out, shard(expected, rank, 2))
    with pytest.raises(ValueError, match="mode 'ulysses' cannot serve this call: a dense mask"):
        context_parallel_attention(*mine, mesh, mask, mode="ulysses")


def check_hybrid(mesh):
    """Heads within pairs of ranks, keys among pairs; also told by a mesh of two dims."""
    if mesh.size() < 4:
        return
    layout = Layout.zigzag(29, 4)
    agree_with_whole(mesh, ops.Mask(causal=True), ops.Score(), layout, "hybrid", degree=2, with_sinks=True)
    two = dist.device_mesh.init_device_mesh("cpu", (2, 2), mesh_dim_names=("cp", "sp"))
    q, k, v = (x.detach() for x in inputs(29))
    expected, _ = ops.attention(q, k, v, ops.Mask(causal=True))
    mine = [layout.shard(x, mesh.get_rank(), 2) for x in (q, k, v)]
    out, _ = context_parallel_attention(*mine, two, ops.Mask(causal=True), mode="hybrid", layout=layout)
    torch.testing.assert_close(out, layout.shard(expected, mesh.get_rank(), 2))


def check_errors_do_not_grow(mesh):
    """fp32 and bf16 against fp64: at most 1.2 times the error of one process."""
    layout, rank = Layout.zigzag(256, mesh.size()), mesh.get_rank()
    for dtype in (torch.float32, torch.bfloat16):
        rounded = [x.detach().to(dtype).requires_grad_() for x in inputs(256, dim=16)]
        exact = [x.detach().double().requires_grad_() for x in rounded]
        dout = torch.randn(1, 4, 256, 16).to(dtype)
        mask, found = ops.Mask(causal=True), {}
        for name, tensors in (("exact", exact), ("one", rounded)):
            out, _ = ops.attention(*tensors, mask)
            found[name] = [out, *torch.autograd.grad(out, tensors, dout.to(out.dtype))]
        mine = [layout.shard(x.detach(), rank, 2).requires_grad_() for x in rounded]
        for mode in ("allgather", "ring", "ulysses"):
            out, _ = context_parallel_attention(*mine, mesh, mask, mode=mode)
            many = [out, *torch.autograd.grad(out, mine, layout.shard(dout, rank, 2))]
            for x, one, true in zip(many, found["one"], found["exact"]):
                x = gathered(layout, x, mesh.get_group()).double()
                error, budget = (x - true).square().mean().sqrt(), (one.double() - true).square().mean().sqrt()
                assert error <= 1.1 * budget + 1e-9, (dtype, mode, error, budget)


def check_same_bits(mesh):
    layout, rank = Layout.zigzag(64, mesh.size()), mesh.get_rank()
    mine = [layout.shard(x.detach().float(), rank, 2).requires_grad_() for x in inputs(64)]
    for mode in ("allgather", "ring"):
        runs = []
        for parts in (contextlib.nullcontext, contextlib.nullcontext, in_parts):
            with parts():
                out, lse = context_parallel_attention(*mine, mesh, ops.Mask(causal=True), mode=mode, deterministic=True)
            runs.append([out, lse, *torch.autograd.grad(out.sum(), mine)])
        assert all(torch.equal(a, b) for a, b in zip(*runs[:2]))
        for a, b in zip(*runs[1:]):
            torch.testing.assert_close(a, b)


def check_dropout(mesh):
    """Ranks with one seed drop differently; the gradient drops what the forward dropped."""
    layout, rank = Layout.zigzag(32, mesh.size()), mesh.get_rank()
    v = torch.eye(32, dtype=torch.float64).expand(1, 2, 32, 32).contiguous()
    q = torch.zeros(1, 2, 32, 8, dtype=torch.float64)
    mine = [layout.shard(x, rank, 2).requires_grad_() for x in (q, q, v)]
    for mode in ("allgather", "ring"):
        torch.manual_seed(3)
        with in_parts(1):
            out, _ = context_parallel_attention(*mine, mesh, mode=mode, dropout_p=0.5)
            (dv,) = torch.autograd.grad(out.sum(), mine[2])
        p = gathered(layout, out, mesh.get_group())
        assert 0.4 < (p > 0).double().mean() < 0.6
        rows = p.flatten(0, 2) > 0
        assert len({tuple(row.tolist()) for row in rows}) == len(rows)  # no two rows, heads or ranks drop alike
        torch.testing.assert_close(gathered(layout, dv, mesh.get_group())[..., 0], p.sum(2))


def check_checkpointing_and_compile(mesh):
    from torch.utils.checkpoint import checkpoint

    layout, rank = Layout.zigzag(16, mesh.size()), mesh.get_rank()
    weight = torch.randn(8, 8, requires_grad=True)
    mine = [layout.shard(x.detach().float(), rank, 2) for x in inputs(16)]

    def block(q, k, v):
        out, _ = context_parallel_attention(q @ weight, k, v, mesh, ops.Mask(causal=True), layout=layout)
        return (out @ weight).square().sum()

    expected = torch.autograd.grad(block(*mine), weight)[0]
    for run in (lambda *x: checkpoint(block, *x, use_reentrant=False), torch.compile(block, backend="aot_eager")):
        torch.testing.assert_close(torch.autograd.grad(run(*mine), weight)[0], expected)


def check_compiled_layers(mesh):
    """torch.compile of what surrounds a layer: graphs before it, of what follows its attention, and behind it."""
    from tilesmith.attention.context_parallel import ContextParallelAttention
    from tilesmith.attention.ring import RingAttentionLayer

    x, graphs = torch.randn(1, 8, 16), []

    def counted(graph, _):
        graphs.append(graph)
        return graph.forward

    for layer in (
        RingAttentionLayer(16, 4, device="cpu", group=mesh, causal=True),
        ContextParallelAttention(16, 4, mesh.size(), mesh, causal=True),
        ContextParallelAttention(16, 4, 2, ["cpu"] * 2, causal=True),
    ):
        torch._dynamo.reset()
        graphs.clear()

        def block(x, layer=layer):
            return layer(x * 2) * 3

        found = torch.compile(block, backend=counted)(x)
        torch.testing.assert_close(found, block(x))
        assert len(graphs) == 3


def check_full_sharding(mesh):
    """A layer under FSDP2: the mean over ranks of gradients is that of one process."""
    from torch.distributed.fsdp import fully_shard

    class Layer(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.qkv = torch.nn.Linear(16, 48, bias=False)

        def forward(self, x, group, layout):
            q, k, v = (y.unflatten(-1, (2, 8)).transpose(1, 2) for y in self.qkv(x).chunk(3, -1))
            if group is None:
                return ops.attention(q, k, v, ops.Mask(causal=True))[0]
            return context_parallel_attention(q, k, v, group, ops.Mask(causal=True), layout=layout)[0]

    layer, x = Layer(), torch.randn(2, 14, 16)
    layout = Layout.zigzag(14, mesh.size())
    parallel = copy.deepcopy(layer)
    layer(x, None, None).square().sum().backward()
    fully_shard(parallel, mesh=mesh)
    parallel(layout.shard(x, mesh.get_rank()), mesh, layout).square().sum().backward()
    grad = parallel.qkv.weight.grad.full_tensor() * mesh.size()
    torch.testing.assert_close(grad, layer.qkv.weight.grad, rtol=1e-4, atol=1e-5)


def check_layers(mesh):
    """The layers on this rank's tokens, with a key mask, against one process; with a DeviceMesh and without."""
    from tilesmith.attention.context_parallel import ContextParallelAttention
    from tilesmith.attention.ring import RingAttentionLayer

    rank, size = mesh.get_rank(), mesh.size()
    x, keep = torch.randn(2, 13, 16), torch.rand(2, 13) < 0.7
    for causal in (False, True):
        alone = RingAttentionLayer(16, 4, causal=causal, device="cpu")
        expected = alone(x, keep)
        layout = (Layout.zigzag if causal else Layout.contiguous)(13, size)
        ring = RingAttentionLayer(16, 4, causal=causal, device="cpu", group=mesh)
        ring.load_state_dict(alone.state_dict())
        mine = [layout.shard(x, rank), layout.shard(keep, rank)]
        held = sum(b - a for a, b in layout.ranges[rank])
        torch.testing.assert_close(ring(*mine, layout=layout)[:, :held], layout.shard(expected, rank)[:, :held])
        for where in (mesh, None):
            parallel = ContextParallelAttention(16, 4, size, where, causal=causal)
            parallel.load_state_dict(alone.state_dict())
            shares = parallel.shard(x), parallel.shard(keep)
            found = parallel(*shares, tokens=13)
            torch.testing.assert_close(found[:, :held], layout.shard(expected, rank)[:, :held])
            with pytest.raises(ValueError, match=r"shard\(\) padded 13 tokens to .* pass tokens=13"):
                parallel(*shares)
            with pytest.raises(ValueError, match="tokens is 99; a rank's hidden_states have another number"):
                parallel(*shares, tokens=99)
    with pytest.raises(ValueError, match=f"is 3, but torch.distributed has {size} ranks; give device_mesh"):
        ContextParallelAttention(16, 4, 3)
    assert ContextParallelAttention(16, 4, 1).ring.size == 1


def check_copies_of_layers(mesh):
    """Copies are of the same ranks, before and after a call. A DeviceMesh is pickled; the others say what to do."""
    from tilesmith.attention.context_parallel import ContextParallelAttention
    from tilesmith.attention.ring import RingAttentionLayer

    x, size = torch.randn(1, 4, 16), mesh.size()
    rings = [RingAttentionLayer(16, 4, device="cpu", group=g) for g in (mesh, mesh.get_group(), ring_of(mesh))]
    for layer in (*rings, ContextParallelAttention(16, 4, size, mesh), ContextParallelAttention(16, 4, size)):
        for expected in (None, layer(x)):
            twin = copy.deepcopy(layer)
            torch.testing.assert_close(twin(x), layer(x) if expected is None else expected)
        if layer is rings[0]:
            torch.testing.assert_close(pickle.loads(pickle.dumps(layer))(x), expected)
            continue
        with pytest.raises(
            TypeError, match="ProcessGroupRing: it cannot be pickled, .* save the state_dict of the layer"
        ):
            pickle.dumps(layer)
    sequence = SharedSequence(16, mesh)
    assert copy.deepcopy(sequence).ring is sequence.ring
    with pytest.raises(TypeError, match="ProcessGroupRing: it cannot be pickled"):
        pickle.dumps(sequence)


def check_layers_in_mode_hybrid(mesh):
    """Layers and shared sequences read from a mesh of two dims how many ranks exchange heads, and need one."""
    from tilesmith.attention.context_parallel import ContextParallelAttention
    from tilesmith.attention.ring import RingAttentionLayer

    rank, size = mesh.get_rank(), mesh.size()
    for make in (
        lambda group: ContextParallelAttention(16, 4, size, group, mode="hybrid", causal=True),
        lambda group: RingAttentionLayer(16, 4, device="cpu", group=group, mode="hybrid", causal=True),
        lambda group: SharedSequence(16, group, mode="hybrid"),
    ):
        with pytest.raises(ValueError, match="mode 'hybrid' needs a DeviceMesh of two dims"):
            make(mesh)
    with pytest.raises(TypeError, match="group must be a process group"):
        RingAttentionLayer(16, 4, group="ranks")
    if size < 4:
        return
    two = dist.device_mesh.init_device_mesh("cpu", (2, 2), mesh_dim_names=("cp", "sp"))
    layout, x = Layout.zigzag(16, size), torch.randn(2, 16, 16)
    alone = RingAttentionLayer(16, 4, causal=True, device="cpu")
    expected = layout.shard(alone(x), rank)
    for layer in (
        ContextParallelAttention(16, 4, size, two, mode="hybrid", causal=True),
        RingAttentionLayer(16, 4, device="cpu", group=two, mode="hybrid", causal=True),
    ):
        layer.load_state_dict(alone.state_dict())
        torch.testing.assert_close(layer(layout.shard(x, rank)), expected)
    q, k, v = inputs(16)
    out, _ = ops.attention(q, k, v, ops.Mask(causal=True))
    sequence = SharedSequence(16, two, mode="hybrid")
    found = sequence.attend(*(layout.shard(y, rank, 2) for y in (q, k, v)), ops.Mask(causal=True), ops.Score(), 0.0)
    torch.testing.assert_close(found, layout.shard(out, rank, 2))


def check_disagreement(mesh):
    """Every rank hears of it at once, also at a later call, and can go on."""
    rank, last = mesh.get_rank(), mesh.size() - 1
    odd = rank == last
    good = [torch.randn(1, 4, 8, 8) for _ in range(3)]

    def call(q, k, v, causal=True, dense=None, **more):
        return context_parallel_attention(q, k, v, mesh, ops.Mask(causal=causal, dense=dense), **more)

    def divided(*given, **more):  # as a rank on another device may divide them
        with in_parts() if odd else contextlib.nullcontext():
            return call(*given, **more)

    short = [x[:, :, :6] for x in good]
    few = [good[0], good[1][:, :2], good[2][:, :2]]
    cases = {
        r"q\.shape": lambda: call(*(short if odd else good)),
        r"q\.dtype": lambda: call(*(x.bfloat16() if odd else x for x in good)),
        r"k\.shape": lambda: call(*(few if odd else good)),
        "mode": lambda: call(*good, mode="ring" if odd else "allgather"),
        "causal": lambda: call(*good, causal=not odd),
        "cu_seqlens": lambda: call(*good, cu_seqlens=(0, 8 if odd else 4, 8 * mesh.size())),
        "layout": lambda: call(*good, layout="contiguous" if odd else "zigzag"),
        "sinks": lambda: call(*good, sinks=None if odd else torch.zeros(4)),
        "dense": lambda: call(*good, dense=torch.ones(8, 1 if odd else 8 * mesh.size(), dtype=torch.bool)),
        "scale": lambda: call(*good, score=ops.Score(scale=np.float32(0.25 if odd else 0.5))),
        "requires_grad": lambda: call(good[0].clone().requires_grad_(odd), *good[1:]),
        "parts of the heads": lambda: divided(*few, mode="ring"),
    }
    for field, run in cases.items():
        call(*good)
        with soon(), pytest.raises(ValueError, match=rf"{field} must be the same on all ranks, got .* on rank {last}"):
            run()
    call(*good)


def check_ranks_that_want_no_gradient(mesh):
    """Others would wait for their backward: all hear of it at the call, and can go on."""
    last = mesh.size() - 1
    x = [torch.randn(1, 4, 8, 8, requires_grad=True) for _ in range(3)]
    for mode in ("allgather", "ring", "ulysses"):
        context_parallel_attention(*x, mesh, mode=mode)[0].sum().backward()
        words = rf"requires_grad must be the same on all ranks, got .* on rank {last}"
        alone = torch.no_grad() if mesh.get_rank() == last else contextlib.nullcontext()
        with pytest.raises(ValueError, match=words), alone:
            context_parallel_attention(*x, mesh, mode=mode)


def check_masks_that_layers_refuse_on_one_rank(mesh):
    """A layer looks at what a mask of numbers holds, and a rank has only its own part."""
    from tilesmith.attention.context_parallel import ContextParallelAttention
    from tilesmith.attention.ring import RingAttentionLayer

    last = mesh.size() - 1
    odd, x, good = mesh.get_rank() == last, torch.randn(2, 6, 16), torch.zeros(2, 6)
    for layer in (
        RingAttentionLayer(16, 4, device="cpu", group=mesh), ContextParallelAttention(16, 4, mesh.size(), mesh)
    ):  # fmt: skip
        words = "attention_mask is floating and holds 0 and 1"
        with soon(), pytest.raises(ValueError, match=words if odd else f"refused on rank {last}: .*{words}"):
            layer(x, torch.ones(2, 6) if odd else good)
        layer(x, good)


def check_the_order_of_backwards(mesh):
    """Two calls of one shape: ranks that take their gradients in another order would mix them up."""
    odd = mesh.get_rank() == mesh.size() - 1
    calls = [[torch.randn(1, 4, 8, 8).requires_grad_() for _ in range(3)] for _ in range(2)]
    for mode in ("ring", "ulysses"):
        outs = [context_parallel_attention(*x, mesh, ops.Mask(causal=True), mode=mode)[0] for x in calls]
        with pytest.raises(ValueError, match="backward: number of the call must be the same on all ranks"):
            torch.autograd.grad(outs[int(odd)].sum(), calls[int(odd)], retain_graph=True)
        for out, x in zip(outs, calls):
            torch.autograd.grad(out.sum(), x)
    out, _ = context_parallel_attention(*calls[0], mesh)
    with pytest.raises(ValueError, match="pass must be the same on all ranks, got 'forward' on rank 0"):
        out.sum().backward() if odd else context_parallel_attention(*calls[0], mesh)


def check_mistakes_of_one_rank(mesh):
    """Every rank hears at once what the last one was refused, and can go on."""
    last = mesh.size() - 1
    odd = mesh.get_rank() == last
    q, k, v = torch.randn(1, 4, 8, 8), torch.randn(1, 2, 8, 8), torch.randn(1, 2, 8, 8)
    ids = torch.zeros(1, 8, dtype=torch.int32)

    def call(q=q, k=k, v=v, **more):
        return context_parallel_attention(q, k, v, mesh, **more)

    three = torch.randn(1, 3, 8, 8)
    cases = {
        "q must be .batch, heads, tokens": lambda: call(q[0] if odd else q),
        "k has dtype torch.bfloat16 and q": lambda: call(k=k.bfloat16() if odd else k),
        "k has 3 heads, which does not divide": lambda: call(**({"k": three, "v": three} if odd else {})),
        "mode must be one of": lambda: call(mode="rings" if odd else "ring"),
        "documents . 1 >= 2 ascending": lambda: call(cu_seqlens=(0, 5, 3) if odd else (0, 5, 8)),
        "cu_seqlens must hold ints": lambda: call(cu_seqlens=torch.tensor([0, 5.5, 8]) if odd else (0, 5, 8)),
        "dropout_p must be in": lambda: call(dropout_p=2.0 if odd else 0.0),
        "an even number of tokens": lambda: call(*(x[:, :, :7] if odd else x for x in (q, k, v))),
        r"sinks must be \[4\]": lambda: call(sinks=torch.zeros(3 if odd else 4)),
        r"documents=...\) must be int32": lambda: call(mask=ops.Mask(documents=ids.long() if odd else ids)),
        r"dense=...\) must be": lambda: call(mask=ops.Mask(dense=torch.ones(8, 9 if odd else 1, dtype=torch.bool))),
        "mask must be a Mask": lambda: call(mask=True if odd else ops.Mask()),
        "degree must be at least 1": lambda: call(mode="hybrid", degree=0 if odd else 1),
        "degree is for mode 'hybrid'": lambda: call(mode="ring", degree=1 if odd else None),
        "kernel 'cudnn' cannot serve": lambda: call(kernel="cudnn" if odd else "tilesmith"),
    }
    for words, run in cases.items():
        told = f"^context_parallel_attention: .*{words}" if odd else f"forward: refused on rank {last}: .*{words}"
        with soon(), pytest.raises((ValueError, TypeError), match=told):
            run()
        call()


def check_refusals(mesh):
    """The same words on every rank, before anything is sent."""
    x, odd = torch.randn(1, 6, 8, 8), torch.randn(1, 3, 8, 8)
    causal = ops.Mask(causal=True)
    for match, run in {
        "mode must be one of": lambda: context_parallel_attention(x, x, x, mesh, mode="rings"),
        "kernel must be one of": lambda: context_parallel_attention(x, x, x, mesh, kernel="flash"),
        "layout must be a Layout, 'zigzag'": lambda: context_parallel_attention(x, x, x, mesh, layout="stripes"),
        "an even number of tokens": lambda: context_parallel_attention(*[x[:, :, :7]] * 3, mesh),
        "3 query heads over 3 kv heads cannot": lambda: context_parallel_attention(odd, odd, odd, mesh, mode="ulysses"),
        "'hybrid' needs degree": lambda: context_parallel_attention(x, x, x, mesh, mode="hybrid"),
        "only 'ulysses' serves it": lambda: context_parallel_attention(
            x, x, x, mesh, causal, ops.Score(alibi=torch.rand(6)), mode="ring"
        ),
        "prefix=...": lambda: context_parallel_attention(
            x, x, x, mesh, ops.Mask(prefix=torch.ones(1, dtype=torch.int32))
        ),
        "receives no gradient over ranks": lambda: context_parallel_attention(
            x, x, x, mesh, score=ops.Score(bias=torch.zeros(8, 8 * mesh.size(), requires_grad=True))
        ),
        "kernel 'cudnn' cannot serve this call: q is on cpu": lambda: context_parallel_attention(
            x, x, x, mesh, kernel="cudnn"
        ),
    }.items():
        with pytest.raises(ValueError, match=match):
            run()
    with pytest.raises(TypeError, match="group must be a process group"):
        context_parallel_attention(x, x, x, "cuda")
    with pytest.raises(ValueError, match="timeout is 5, but group is a Ring"):
        context_parallel_attention(x, x, x, ProcessGroupRing(mesh.get_group()), timeout=5)


def check_transports(mesh):
    """What moves tokens is told; what cannot is refused; ranks that ask for different ones hear of it."""
    group, x = mesh.get_group(), torch.randn(1, 2, 8, 8)
    ring = ProcessGroupRing(group)
    assert ring.transport().name == "gloo" and "tensors are on cpu" in ring.transport().because
    assert ring.shares_memory is False and ring.memory_held == 0
    said = explain_context_parallel(8 * mesh.size(), mesh.size(), heads=2, head_dim=8, group=mesh)
    assert said.transport == ring.transport() and str(said).endswith(str(ring.transport()))
    for name, match in (("nccl", "backend .* is gloo"), ("symmetric_memory", "on cpu"), ("tcp", "must be one of")):
        with pytest.raises(ValueError, match=f"transport.*{match}"):
            ProcessGroupRing(group, transport=name)
    for timeout in (0, -1.0, None, float("inf"), True):
        with pytest.raises((ValueError, TypeError), match="timeout must be"):
            ProcessGroupRing(group, timeout)
    odd = ProcessGroupRing(group, transport="gloo" if mesh.get_rank() == 0 else "auto")
    with pytest.raises(ValueError, match=r"transport must be the same on all ranks, got 'gloo' on rank 0; 'auto' on"):
        context_parallel_attention(x, x, x, odd)
    ring.release_memory()  # there is none
    context_parallel_attention(x, x, x, ProcessGroupRing(group, transport="gloo"))


def check_that_a_group_ends_with_all_it_holds(mesh):
    """Neither rings nor what ranks share outlive a group that was destroyed; rings that somebody keeps say so."""
    group, x = dist.new_group(list(range(mesh.size())), backend="gloo"), torch.randn(1, 2, 8, 8)
    context_parallel_attention(x, x, x, group)
    kept, ended = ProcessGroupRing(group), []
    peers_of(group).memory = types.SimpleNamespace(broken="", close=lambda: ended.append("closed"))
    weak = weakref.ref(ring_of(group))
    dist.destroy_process_group(group)
    del group
    gc.collect()
    assert weak() is None and ended == ["closed"]
    with pytest.raises(RuntimeError, match="its process group was destroyed"):
        context_parallel_attention(x, x, x, kept)


class _Lost(ProcessGroupRing):
    """A rank that agrees about a call, and is never heard of again."""

    def post(self, parcels, step):
        raise InterruptedError


class _Waiting(ProcessGroupRing):
    """A rank that gives the last one a second in the steps of that name, and others as long as they need: on a
    busy machine ranks lag that are not lost."""

    def __init__(self, group, lost_in):
        super().__init__(group, timeout=SOON)
        self.lost_in = lost_in

    def _finish(self, works, step, timed):
        hurried = self.lost_in in step
        late = [work for work in works if hurried and work[0] == self.size - 1]
        for limit, some in ((SOON, [work for work in works if work not in late]), (1.0, late)):
            self._limit, self.timeout = limit, datetime.timedelta(seconds=limit)
            super()._finish(some, step, timed)


def check_a_rank_lost_in_the_middle(mesh):
    """One that stalls between the comparison and its first transfer, and one whose connections close there, as they do
    when its process ends."""
    size, x = mesh.size(), torch.randn(1, 2, 8, 8)
    for dies in (False, True):
        group = dist.new_group(list(range(size)), backend="gloo")
        if mesh.get_rank() == size - 1:
            with pytest.raises(InterruptedError):
                context_parallel_attention(x, x, x, _Lost(group, timeout=SOON), mode="ring")
            if dies:
                dist.destroy_process_group(group)
                del group
        else:
            ring, limit = _Waiting(group, "nothing" if dies else "keys"), f"{SOON:g}" if dies else "1"
            told = rf"rank 0: keys, step 1 of .*: rank {size - 1} did not answer .*limit {limit} s"
            with soon(), pytest.raises(RingError, match=told):
                context_parallel_attention(x, x, x, ring, mode="ring")
        dist.barrier(mesh.get_group())  # its connections stay open until others have given up


class _LostLater(ProcessGroupRing):
    """A rank that takes part in some transfers, and is then never heard of again."""

    def __init__(self, group, transfers):
        super().__init__(group, timeout=SOON)
        self.transfers = transfers

    def post(self, parcels, step):
        if self.transfers == 0:
            raise InterruptedError
        self.transfers -= 1
        return super().post(parcels, step)


def check_that_many_ranks_name_the_one_lost(mesh):
    """Some ranks wait for it, others for ranks that gave up on it."""
    size, rank = mesh.size(), mesh.get_rank()
    if size < 4:
        return
    x, last = [torch.randn(1, 4, 8, 8) for _ in range(3)], size - 1
    for mode, transfers, step in (("ring", 1, "keys, step 2 of 3"), ("ulysses", 0, "heads of q")):
        group = dist.new_group(list(range(size)), backend="gloo")
        if rank == last:
            with pytest.raises(InterruptedError):
                context_parallel_attention(*x, _LostLater(group, transfers), mode=mode)
        else:
            told = rf"^rank {rank}: .*{step}.* rank {last} did not answer .*limit (1|{SOON:g}) s"
            with soon(), pytest.MonkeyPatch.context() as patch, pytest.raises(RingError, match=told):
                patch.setattr(lost, "PATIENCE", 3.0)  # for processes of a busy machine
                context_parallel_attention(*x, _Waiting(group, step), mode=mode)
        dist.barrier(mesh.get_group())  # its connections stay open until others have given up


def check_a_stalled_rank(mesh):
    """On a group of its own: what comes after it there is lost."""
    group, last = dist.new_group(list(range(mesh.size())), backend="gloo"), mesh.size() - 1
    x = torch.randn(1, 2, 8, 8)
    if mesh.get_rank() != last:
        with soon(), pytest.raises(RingError, match=rf"forward: rank {last} did not answer .*limit 1 s"):
            context_parallel_attention(x, x, x, _Waiting(group, "forward"))
    dist.barrier(mesh.get_group())
