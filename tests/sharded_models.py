"""What two ranks check of models: tensor parallel decoders, FSDP2 of optimized ones, compiled calls. Run by
test_sharding.py."""

import copy

import torch

from sharded_losses import Talk
from tilesmith import ops
from tilesmith.engine import use
from tilesmith.nn import Decoder, DecoderConfig

CONFIG = DecoderConfig(
    vocab_size=24, hidden_size=16, intermediate_size=24, num_layers=2, num_heads=4, num_kv_heads=2, qk_norm=True
)


def _plan(stream, last):
    """The usual plan of a decoder; stream: where tokens lie between layers, last: where the output layer wants them."""
    from torch.distributed.tensor import Replicate
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel

    column = ColwiseParallel(input_layouts=stream, use_local_output=False)
    row = RowwiseParallel(output_layouts=stream, use_local_output=False)
    plan = {"embed_tokens": RowwiseParallel(input_layouts=Replicate(), output_layouts=stream, use_local_output=False)}
    for name in ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "mlp.gate_proj", "mlp.up_proj"):
        plan[f"layers.*.{name}"] = column
    for name in ("self_attn.o_proj", "mlp.down_proj"):
        plan[f"layers.*.{name}"] = row
    return {**plan, "lm_head": ColwiseParallel(use_local_output=False)} if last is None else plan


def check_tensor_parallel_decoder(mesh):
    """torch's own plan; between layers tokens are whole, or sharded with the head replicated (sequence parallel)."""
    from torch.distributed.tensor import Replicate, Shard, distribute_module, distribute_tensor
    from torch.distributed.tensor.parallel import parallelize_module

    torch.manual_seed(1)
    whole = Decoder(CONFIG)
    tokens, labels = torch.randint(24, (2, 6)), torch.randint(24, (2, 6))
    labels[0, :2] = -100
    expected = whole(tokens, labels)
    expected.backward()
    exact = {name: p.grad for name, p in whole.named_parameters()}
    for stream, place in ((Replicate(), None), (Shard(1), Shard(1))):
        model = copy.deepcopy(whole)
        model.zero_grad()
        model = distribute_module(parallelize_module(model, mesh, _plan(stream, place)), mesh)
        given = labels if place is None else distribute_tensor(labels, mesh, [place])
        with Talk() as talk:
            loss = model(tokens, given)
            loss.backward()
        assert place is not None or {kind for kind, _ in talk.calls} == {"all_reduce"}, talk.calls
        torch.testing.assert_close(loss.full_tensor(), expected)
        for name, p in model.named_parameters():
            torch.testing.assert_close(p.grad.full_tensor(), exact[name], rtol=1e-4, atol=1e-6, msg=name)
    logits = model(tokens)
    torch.testing.assert_close(logits.full_tensor(), whole(tokens))


def check_fsdp_of_an_optimized_model(mesh):
    """Each rank has its own batch, as in data parallel training; the logits stay lazy if the root holds the head."""
    try:
        import transformers  # noqa: F401
    except ImportError:
        return
    from torch.distributed.fsdp import fully_shard

    from optimize_models import OPS, batch, build, train
    from tilesmith.models import optimize
    from tilesmith.models.layers.logits import LazyLogits

    inputs = [batch("llama"), batch("llama", padded=None)]
    model = build("llama")
    each = [train(copy.deepcopy(model), one) for one in inputs]
    means = {name: (each[0][2][name] + each[1][2][name]) / 2 for name in each[0][2]}
    with use(**dict.fromkeys(OPS, "reference")):
        for alone in (False, True):
            mine = optimize(copy.deepcopy(model))
            mine.zero_grad()
            for part in (*mine.model.layers, *([mine.lm_head] if alone else []), mine):
                fully_shard(part, mesh=mesh)
            out = mine(**inputs[mesh.get_rank()])
            assert isinstance(out.logits, torch.Tensor if alone else LazyLogits)
            out.loss.backward()
            torch.testing.assert_close(out.loss.detach(), each[mesh.get_rank()][0])
            for name, p in mine.named_parameters():
                torch.testing.assert_close(p.grad.full_tensor(), means[name], rtol=1e-4, atol=1e-6, msg=name)


def check_fsdp_with_a_head_of_the_decoder(mesh):
    """`linear_cross_entropy` inside a sharded module sees the whole weight; outside it is told what to do."""
    import pytest
    from torch.distributed.fsdp import fully_shard

    torch.manual_seed(1)
    whole = Decoder(CONFIG)
    tokens, labels = torch.randint(24, (2, 6)), torch.randint(24, (2, 6))
    rank, model = mesh.get_rank(), copy.deepcopy(whole)
    losses = [whole(tokens[i : i + 1], labels[i : i + 1]) for i in range(2)]
    (sum(losses) / 2).backward()
    for part in (*model.layers, model):
        fully_shard(part, mesh=mesh)
    loss = model(tokens[rank : rank + 1], labels[rank : rank + 1])
    loss.backward()
    torch.testing.assert_close(loss, losses[rank])
    for (name, p), q in zip(model.named_parameters(), whole.parameters()):
        torch.testing.assert_close(p.grad.full_tensor(), q.grad, rtol=1e-4, atol=1e-6, msg=name)
    model.reshard()
    with pytest.raises(ValueError, match="x is a plain tensor that requires a gradient, beside DTensors"):
        ops.linear_cross_entropy(torch.randn(1, 6, 16, requires_grad=True), model.lm_head.weight, labels[:1])


def check_fsdp_of_fp8_layers(mesh):
    """Converted before or after `fully_shard`: gradients are the ranks' mean; a fault of one rank skips both's step."""
    from torch.distributed.fsdp import fully_shard

    from tilesmith.precision import FP8Config, FP8TrainingEngine, convert_model_to_fp8

    config = FP8Config(min_features=16, min_tokens=1)
    torch.manual_seed(1)
    first = torch.nn.Sequential(torch.nn.Linear(32, 48), torch.nn.GELU())
    whole = torch.nn.Sequential(first, torch.nn.Sequential(torch.nn.Linear(48, 32)))
    x, y = torch.randn(2, mesh.size(), 24, 32)
    rank = mesh.get_rank()
    means = []
    for one, target in zip(x, y):
        alone = convert_model_to_fp8(copy.deepcopy(whole), config)
        torch.nn.functional.mse_loss(alone(one), target).backward()
        means.append([p.grad for p in alone.parameters()])
    for before in (True, False):
        model = copy.deepcopy(whole)
        if before:
            convert_model_to_fp8(model, config)
        for part in (*model, model):
            fully_shard(part, mesh=mesh)
        trainer = FP8TrainingEngine(model, config)
        trainer.setup_fp8_training()
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        trainer.training_step(x[rank], y[rank])
        for p, *each in zip(model.parameters(), *means):
            torch.testing.assert_close(p.grad.full_tensor(), torch.stack(each).mean(0), rtol=1e-4, atol=1e-6)
        assert trainer.optimizer_step(optimizer)
        trainer.training_step(x[rank], y[rank] * (float("nan") if rank == 0 else 1.0))
        assert not trainer.optimizer_step(optimizer) and trainer.loss_scale == 0.5
        trainer.training_step(x[rank], y[rank])
        assert trainer.optimizer_step(optimizer)
        assert all(p.full_tensor().isfinite().all() for p in model.parameters())


def check_compiled(mesh):
    """One graph, with the collectives in it; values and gradients as without."""
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    def place(t, placement):
        return distribute_tensor(t, mesh, [placement])

    x, target = torch.randn(4, 6, 8), torch.randint(12, (4, 6))
    weight, norm = torch.randn(12, 8), torch.randn(8)
    rows, same = place(target, Shard(0)), Replicate()

    def both(x, norm, weight, y, part):
        of_rows = ops.linear_cross_entropy(ops.swiglu(ops.rms_norm(x, norm), x), weight, rows).to_local()
        return of_rows + ops.vocab_parallel_cross_entropy(y @ part.t(), target, label_smoothing=0.1)

    tensors = place(x, Shard(0)), place(norm, same), place(weight, same), x, weight[:6]
    found = []
    for run in (both, torch.compile(both, fullgraph=True, backend="aot_eager")):
        mine = [t.detach().clone().requires_grad_() for t in tensors]
        loss = run(*mine)
        loss.backward()
        found.append([loss, *(t.grad.full_tensor() if hasattr(t.grad, "full_tensor") else t.grad for t in mine)])
    torch.testing.assert_close(found[1], found[0])
