"""FSDP2 before and after `optimize`, and tensor parallelism by DTensors; each equals one process.

torchrun --nproc-per-node 2 examples/sharded.py     # CPUs through gloo, or GPUs through NCCL
"""

import copy
import os

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from transformers import LlamaConfig, LlamaForCausalLM

import tilesmith


def gradients(model, tokens):
    """Loss and whole gradients, by name."""
    loss = model(input_ids=tokens, labels=tokens).loss
    loss.backward()
    found = {name: p.grad for name, p in model.named_parameters()}
    return loss.detach(), {n: g.full_tensor() if hasattr(g, "full_tensor") else g for n, g in found.items()}


def sharded(model, mesh):
    """FSDP2 over each layer and the rest."""
    for part in (*model.model.layers, model):
        fully_shard(part, mesh=mesh)
    return model


def tensor_parallel(model, mesh):
    """Heads and intermediate features are split over the ranks."""
    columns, rows = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj"), ("o_proj", "down_proj")
    for layer in model.model.layers:
        for part in (layer.self_attn, layer.mlp):
            names = dict(part.named_children())
            plan = {n: ColwiseParallel() for n in columns if n in names}
            parallelize_module(part, mesh, {**plan, **{n: RowwiseParallel() for n in rows if n in names}})
    return model


def main():
    cuda = torch.cuda.is_available()
    dist.init_process_group("nccl" if cuda else "gloo")
    kind = "cuda" if cuda else "cpu"
    if cuda:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    mesh = init_device_mesh(kind, (dist.get_world_size(),))
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4}
    model = LlamaForCausalLM(LlamaConfig(**sizes, num_key_value_heads=2, vocab_size=128)).to(kind)
    tokens = torch.randint(128, (2, 16), generator=torch.Generator().manual_seed(1)).to(kind)
    plain = gradients(copy.deepcopy(model), tokens)
    ways = {
        "optimize, then FSDP2": lambda m: sharded(tilesmith.optimize(m), mesh),
        "FSDP2, then optimize": lambda m: tilesmith.optimize(sharded(m, mesh)),
        "optimize, then tensor parallel": lambda m: tensor_parallel(tilesmith.optimize(m), mesh),
        "tensor parallel, then optimize": lambda m: tilesmith.optimize(tensor_parallel(m, mesh)),
    }
    for name, way in ways.items():
        mine = way(copy.deepcopy(model))
        found = gradients(mine, tokens)
        torch.testing.assert_close(found, plain, rtol=1e-3, atol=1e-5)
        if dist.get_rank() == 0:
            print(f"{name}: loss {found[0]:.4f}, {len(mine.tilesmith_report.replaced)} modules replaced", flush=True)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
