"""What ranks check of experts: expert parallelism equals one process. Run by test_sharding.py in one spawn."""

import contextlib
import copy
import tempfile

import pytest
import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

import tilesmith
from optimize_models import OPS, Calls, batch, build, train
from ranks import soon
from tilesmith import nn, ops
from tilesmith.distributed import expert_parallel
from tilesmith.engine import use
from tilesmith.models import optimize
from tilesmith.models.layers.experts import NAME


def _case(experts, tokens, top_k=3, hidden=6, inner=4):
    """x, gate_up, down, indices, weights and biases of all ranks, the same on each."""
    shapes = ((tokens, hidden), (experts, 2 * inner, hidden), (experts, hidden, inner), (tokens, top_k))
    x, gate_up, down, weights = (torch.randn(s, dtype=torch.float64, requires_grad=True) for s in shapes)
    biases = [torch.randn(experts, n, dtype=torch.float64, requires_grad=True) for n in (2 * inner, hidden)]
    indices = torch.randint(-1, experts + 1, (tokens, top_k))  # also of no expert
    return x, gate_up, down, indices, weights, *biases


def check_expert_parallel(mesh):
    rank, ranks = mesh.get_rank(), mesh.size()
    for tokens in (9 * ranks, ranks):
        torch.manual_seed(3)
        x, gate_up, down, indices, weights, first, second = _case(2 * ranks, tokens)
        options = {"activation": "swiglu", "alpha": 1.5, "up_offset": 1.0}
        y = ops.experts(x, gate_up, down, indices, weights, first, second, **options)
        cotangent = torch.randn_like(y)
        leaves = (x, weights, gate_up, down, first, second)
        exact = torch.autograd.grad(y, leaves, cotangent)
        mine = (
            slice(0, 0)
            if rank == 0 and tokens == ranks
            else slice(rank * tokens // ranks, (rank + 1) * tokens // ranks)
        )
        shards = [t.detach()[mine].requires_grad_() for t in (x, weights)]
        held = [t.detach().chunk(ranks)[rank].clone().requires_grad_() for t in leaves[2:]]
        got = expert_parallel(
            shards[0], held[0], held[1], indices[mine], shards[1], mesh,
            gate_up_bias=held[2], down_bias=held[3], **options,
        )  # fmt: skip
        torch.testing.assert_close(got, y.detach()[mine])
        grads = torch.autograd.grad(got, shards + held, cotangent[mine])
        for g, e in zip(grads[:2], exact[:2]):
            torch.testing.assert_close(g, e[mine])
        if tokens != ranks:  # there rank 0 has no tokens, so that the others' are not all
            for g, e in zip(grads[2:], exact[2:]):
                torch.testing.assert_close(g, e.chunk(ranks)[rank])


def check_experts_of_no_equal_share(mesh):
    x, gate_up, down, indices, weights, *_ = (t.detach() for t in _case(4, 4))
    held = 1 + mesh.get_rank()
    with pytest.raises(ValueError, match="expert_parallel: experts in gate_up must be the same on all ranks, got 1 on"):
        expert_parallel(x, gate_up[:held], down[:held], indices, weights, mesh.get_group())


def check_dtensors_are_refused(mesh):
    x, gate_up, down, indices, weights, *_ = (t.detach() for t in _case(4, 4))
    sharded = distribute_tensor(gate_up, mesh, [Shard(0)])
    assert isinstance(sharded, DTensor)
    with pytest.raises(ValueError, match=r"experts: does not take DTensors.*to_local\(\)"):
        ops.experts(x, sharded, distribute_tensor(down, mesh, [Shard(0)]), indices, weights)
    dist.barrier()


def check_a_gradient_of_a_gradient_travels(mesh):
    x, gate_up, down, indices, weights, *_ = _case(2 * mesh.size(), 5 * mesh.size())
    mine, rank = slice(5 * mesh.get_rank(), 5 * mesh.get_rank() + 5), mesh.get_rank()

    def twice(call, leaf):
        (first,) = torch.autograd.grad(call(leaf).square().sum(), leaf, create_graph=True)
        return torch.autograd.grad(first.square().sum(), leaf)[0]

    held = [t.detach().chunk(mesh.size())[rank] for t in (gate_up, down)]
    found = twice(
        lambda t: expert_parallel(t, *held, indices[mine], weights.detach()[mine], mesh),
        x.detach()[mine].requires_grad_(),
    )
    torch.testing.assert_close(found, twice(lambda t: ops.experts(t, gate_up, down, indices, weights), x)[mine])


def check_tokens_travel_in_the_dtype_of_autocast(mesh):
    x, gate_up, down, indices, weights, *_ = (t.detach() for t in _case(2 * mesh.size(), 8))
    rank = mesh.get_rank()
    held = [t.float().chunk(mesh.size())[rank].requires_grad_() for t in (gate_up, down)]
    half = torch.bfloat16
    by_hand = expert_parallel(x.to(half), *(t.to(half) for t in held), indices, weights, mesh)
    for dtype in (torch.float32, half):
        with torch.autocast("cpu", half):
            found = expert_parallel(x.to(dtype), *held, indices, weights, mesh)
        assert found.dtype == half and torch.equal(found, by_hand)
        assert all(g.dtype == torch.float32 for g in torch.autograd.grad(found.sum(), held))


def check_what_expert_parallel_refuses(mesh):
    x, gate_up, down, indices, weights, *_ = (t.detach() for t in _case(4, 4))
    held = gate_up.chunk(mesh.size())[0], down.chunk(mesh.size())[0]
    sharded = distribute_tensor(x, mesh, [Shard(0)])
    with pytest.raises(ValueError, match=r"^expert_parallel: does not take DTensors; .*to_local\(\)"):
        expert_parallel(sharded, *held, indices, weights, mesh)
    with pytest.raises(TypeError, match="^expert_parallel: group must be a process group, .*None, got str 'ep'"):
        expert_parallel(x, *held, indices, weights, "ep")
    dist.barrier()


def check_gradients_that_some_ranks_want(mesh):
    """Ranks would wait for the exchanges of one another's backward: all hear of it at once, and can go on."""
    last = mesh.size() - 1
    odd = mesh.get_rank() == last
    x, gate_up, down, indices, weights, *_ = (t.detach() for t in _case(2 * mesh.size(), 5))
    held = [t.chunk(mesh.size())[mesh.get_rank()] for t in (gate_up, down)]

    def call(x=x, held=held, weights=weights):
        return expert_parallel(x, *held, indices, weights, mesh)

    def alone():
        with torch.no_grad() if odd else contextlib.nullcontext():
            return call(held=[t.clone().requires_grad_() for t in held])

    slopes = lambda t: t.clone().requires_grad_()  # noqa: E731
    trained = [slopes(t) for t in held]
    for field, run in {
        "requires_grad of x": lambda: call(slopes(x) if odd else x, trained),
        "requires_grad of weights": lambda: call(x, trained, slopes(weights) if odd else weights),
        "requires_grad of the result": alone,
    }.items():
        call()
        with (
            soon(),
            pytest.raises(ValueError, match=f"expert_parallel: {field} must be the same on all ranks, got .* {last}"),
        ):
            run()
    # the gradients of its own experts are a rank's own affair
    y = call(slopes(x), held if odd else trained)
    y.sum().backward()
    assert odd or trained[0].grad.any()


def check_mistakes_of_one_rank(mesh):
    last = mesh.size() - 1
    odd = mesh.get_rank() == last
    x, gate_up, down, indices, weights, *_ = (t.detach() for t in _case(2 * mesh.size(), 5))
    held = [t.chunk(mesh.size())[mesh.get_rank()] for t in (gate_up, down)]

    narrow = x[:, :4], [held[0][..., :4], held[1][:, :4]]

    def call(x=x, held=held, indices=indices, weights=weights, **more):
        return expert_parallel(x, *held, indices, weights, mesh, **more)

    for words, run in {
        f"refused on rank {last}": lambda: call(weights=weights[:, :2] if odd else weights),
        f"refused on rank {last}: see the error": lambda: call(activation="nothing" if odd else "swiglu"),
        f"x.dtype must be .* {last}": lambda: call(*((x.float(), [t.float() for t in held]) if odd else (x, held))),
        f"features of x must be .* {last}": lambda: call(*(narrow if odd else (x, held))),
        f"choices of a token must be .* {last}": lambda: call(
            indices=indices[:, :2] if odd else indices, weights=weights[:, :2] if odd else weights
        ),
    }.items():
        call()
        with soon(), pytest.raises((ValueError, TypeError), match=f"^expert_parallel: {'' if odd else words}"):
            run()
    call()


def check_transformers_expert_parallelism(mesh):
    """A model that transformers spreads over ranks has our experts by their name."""
    try:
        from transformers.distributed import DistributedConfig

        how = DistributedConfig(tp_size=mesh.size(), tp_plan="auto", ep_size=mesh.size())
    except (ImportError, TypeError):  # before transformers had `ep_size`
        return
    tilesmith.register_for_transformers()
    whole, inputs = build("qwen3_moe"), batch("qwen3_moe")
    loss, logits, gradients = train(whole, inputs)
    folder = tempfile.TemporaryDirectory()  # that of the first rank is for all
    name = [folder.name]
    dist.broadcast_object_list(name)
    if mesh.get_rank() == 0:
        whole.save_pretrained(folder.name)
    dist.barrier()
    model = type(whole).from_pretrained(name[0], experts_implementation=NAME, distributed_config=how).train()
    with use(experts="reference"), Calls() as counts:
        found = train(model, inputs)
    assert counts["experts"] == len(model.model.layers)
    torch.testing.assert_close(found[:2], (loss, logits))
    for name, gradient in found[2].items():
        whole_gradient = gradient.full_tensor() if isinstance(gradient, DTensor) else gradient
        torch.testing.assert_close(whole_gradient, gradients[name])


def check_fsdp_shards_experts_as_any_parameter(mesh):
    """Layers of one's own, and experts of a model that is optimized: gradients are the ranks' mean."""
    layer, x = nn.MixtureOfExperts(16, 8, 4, 2, shared_size=8), torch.randn(mesh.size(), 7, 16)
    model, inputs = build("qwen3_moe", layers=1), batch("qwen3_moe")
    rows = [{k: v[r % 2 :][:1] for k, v in inputs.items()} for r in range(mesh.size())]
    for whole, parts, calls in (
        (layer, lambda m: (m.experts, m), [lambda m, t=t: m(t).square().sum() for t in x]),
        (model, lambda m: (*m.model.layers, m), [lambda m, row=row: m(**row).loss for row in rows]),
    ):
        sharded = optimize(copy.deepcopy(whole))
        for part in parts(sharded):
            fully_shard(part, mesh=mesh)
        with use(**dict.fromkeys(OPS, "reference")):
            calls[mesh.get_rank()](sharded).backward()
        (sum(call(whole) for call in calls) / len(calls)).backward()
        for p, q in zip(sharded.parameters(), whole.parameters(), strict=True):
            assert isinstance(p, DTensor)
            torch.testing.assert_close(p.grad.full_tensor(), q.grad)
