"""What ranks check of accelerate's `cp_size` and transformers' Trainer: with torch's context parallelism around our
attention, and with `shard_sequence`. Run by test_accelerate_context.py.

accelerate shards sequences only under FSDP2, and takes FSDP2 only on ranks with GPUs; torch's context parallelism only
knows the operators that its attention calls there. `as_on_gpus` makes these two choices as on GPUs. All else is theirs:
the mesh, the loaders, FSDP2, the ring.
"""

import contextlib
import functools
import os
import runpy
import tempfile

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from accelerate import Accelerator, FullyShardedDataParallelPlugin, ParallelismConfig
from accelerate.state import AcceleratorState, GradientState, PartialState
from accelerate.utils import DistributedType
from torch.distributed.tensor.experimental import context_parallel

import tilesmith
from optimize_models import build
from ranks import ROOT
from tilesmith.engine import use
from tilesmith.models.attention.interface import attention_forward
from tilesmith.models.attention.sdpa import _Activation

example = functools.cache(lambda: runpy.run_path(str(ROOT / "examples" / "long_context_trainer.py")))


def scaled_dot_product_attention(
    query, key, value, attn_mask=None, dropout_p=0.0, is_causal=False, scale=None, enable_gqa=False
):
    """The operator that torch's function of this name calls on a GPU. Only ours serves it on a CPU."""
    assert attn_mask is None
    return torch.ops.aten._scaled_dot_product_flash_attention(query, key, value, dropout_p, is_causal, scale=scale)[0]


@contextlib.contextmanager
def as_launched(mesh):
    """The variables by which accelerate finds its ranks, and no state of an earlier check."""
    rank, size = str(mesh.get_rank()), str(mesh.size())
    where = {"MASTER_ADDR": "localhost", "MASTER_PORT": "0", "ACCELERATE_USE_CPU": "true"}
    os.environ |= {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size, **where}
    try:
        yield
    finally:
        for state in (AcceleratorState, GradientState, PartialState):
            state._reset_state()


@contextlib.contextmanager
def as_on_gpus():
    """accelerate takes the ranks for GPUs; PyTorch's attention calls the operator that `register_for_sdpa` serves."""
    PartialState(cpu=True).distributed_type = DistributedType.MULTI_GPU
    activated, before = _Activation("CPU"), F.scaled_dot_product_attention
    F.scaled_dot_product_attention = scaled_dot_product_attention
    try:
        yield
    finally:
        F.scaled_dot_product_attention = before
        activated.remove()


def _accelerator(mesh):
    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2, auto_wrap_policy="transformer_based_wrap", cpu_ram_efficient_loading=False
    )
    found = Accelerator(cpu=True, parallelism_config=ParallelismConfig(cp_size=mesh.size()), fsdp_plugin=plugin)
    assert found.is_fsdp2 and found.torch_device_mesh["cp"].size() == mesh.size()
    return found


def _batch():
    """Two rows of 16 tokens, and labels of which the ranks have unlike numbers."""
    ids = torch.randint(3, 128, (2, 16), generator=torch.Generator().manual_seed(1))
    labels = ids.clone()
    labels[0, :7] = -100
    return ids, labels


def _compare(loss, model, one):
    """Loss and gradients of whole batches against those of one process."""
    ids, labels = _batch()
    expected = one(input_ids=ids, labels=labels).loss
    one.zero_grad()
    expected.backward()
    torch.testing.assert_close(loss, expected.detach())
    found = dict(model.named_parameters())
    for name, p in one.named_parameters():
        torch.testing.assert_close(found[name].grad.full_tensor(), p.grad, rtol=1e-4, atol=1e-5, msg=name)


def check_torchs_context_parallel_in_accelerate(mesh):
    """The guide's loop: `maybe_context_parallel` around a step, without `optimize`, with it, and with its attention
    where kernels of ours are, which leaves the call to torch."""
    for optimized in (None, {"exclude": "attention"}, {}):
        served = use(attention="reference") if optimized == {} else contextlib.nullcontext()
        with as_launched(mesh), as_on_gpus(), served:
            accelerator, one, model = _accelerator(mesh), build("llama"), build("llama", attention="sdpa")
            if optimized is not None:
                tilesmith.optimize(model, **optimized)
            model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), 0.1))
            ids, labels = _batch()
            labels = F.pad(labels[:, 1:], (0, 1), value=-100)
            positions = torch.arange(ids.shape[1]).repeat(len(ids), 1)
            count, shared = (labels != -100).sum(), [ids, labels, positions]
            with accelerator.maybe_context_parallel(shared, [1, 1, 1], set(shared)):
                assert ids.shape == (2, 16 // mesh.size())
                out = model(
                    input_ids=ids, position_ids=positions, labels=labels, shift_labels=labels, num_items_in_batch=count
                )
                loss = out.loss * mesh.size()
                accelerator.backward(loss)
            whole = loss.detach().clone()
            dist.all_reduce(whole)
            _compare(whole / mesh.size(), model, one)


def check_what_torchs_context_parallel_does_not_share(mesh):
    """Nothing that a model gives its attention beside queries, keys and values is dropped without a word."""
    module, q = torch.nn.Identity(), torch.randn(1, 2, 8, 16)
    with as_launched(mesh), as_on_gpus(), context_parallel(mesh, buffers=[torch.zeros(8)], buffer_seq_dims=[0]):
        for named in ({"softcap": 2.0}, {"s_aux": torch.zeros(2)}):
            with pytest.raises(ValueError, match=f"Identity gives its attention {next(iter(named))}, which torch's"):
                attention_forward(module, q, q, q, None, **named)
        with pytest.raises(ValueError, match="Identity gives its attention attention_mask, which torch's"):
            attention_forward(module, q, q, q, torch.ones(1, 1, 8, 8, dtype=torch.bool))


def check_shard_sequence_in_accelerate(mesh):
    """On accelerate's mesh under FSDP2, with and without `optimize`: no context manager, no buffers."""
    for optimized in (False, True):
        with as_launched(mesh), as_on_gpus():
            accelerator, one, model = _accelerator(mesh), build("llama"), build("llama", attention="sdpa")
            if optimized:
                tilesmith.optimize(model)
            tilesmith.shard_sequence(model, accelerator.torch_device_mesh["cp"])
            model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), 0.1))
            ids, labels = _batch()
            loss = model(input_ids=ids, labels=labels).loss
            accelerator.backward(loss)
            _compare(loss.detach(), model, one)


def check_trainer(mesh):
    """Losses of three steps under FSDP2, of each of the example's ways, are those of one process."""
    cp = {"parallelism_config": ParallelismConfig(cp_size=mesh.size())}
    expected = torch.tensor(example()["alone"](example()["tiny_model"]()))
    for way, more in (("by_torch", cp), ("by_tilesmith", {})):
        with as_launched(mesh), tempfile.TemporaryDirectory() as folder:
            options = {"version": 2, "cpu_ram_efficient_loading": False}
            arguments = example()["settings"](folder, fsdp=True, fsdp_config=options, **more)
            with as_on_gpus():  # after the arguments, which find out what the ranks are
                trainer = example()[way](example()["tiny_model"](), arguments)
                found = example()["losses"](trainer)
            assert trainer.accelerator.is_fsdp2 and len(found) == 3
            torch.testing.assert_close(torch.tensor(found), expected, msg=lambda text, w=way: f"{w}: {text}")


def check_trainer_with_autocast(mesh):
    """`bf16` and DDP, with `shard_sequence`: losses of one process under autocast."""
    with as_launched(mesh), tempfile.TemporaryDirectory() as folder:
        trainer = example()["by_tilesmith"](example()["tiny_model"](), example()["settings"](folder, bf16=True))
        found = example()["losses"](trainer)
    with torch.autocast("cpu", torch.bfloat16):
        expected = example()["alone"](example()["tiny_model"]())
    torch.testing.assert_close(torch.tensor(found), torch.tensor(expected), rtol=1e-3, atol=0)
