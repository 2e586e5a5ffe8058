"""Train a decoder on one long document, or on packed ones, that several ranks share, and compare with one process.

    torchrun --nproc-per-node 2 examples/long_context.py                 # CPUs through gloo, or GPUs through NCCL
    torchrun --nproc-per-node 2 examples/long_context.py --packed
    torchrun --nproc-per-node 2 examples/long_context.py --transformers  # a Hugging Face model

Each rank reads the same text, computes its own tokens, and prints nothing but rank 0, whose losses are those of one
process: the example checks that.
"""

import argparse
import copy
import os

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from tilesmith.distributed import SharedSequence
from tilesmith.nn import Decoder, DecoderConfig

IGNORED = -100


def document(length: int) -> torch.Tensor:
    """Bytes of PyTorch's own text, [1, length]."""
    with open(torch.nn.functional.__file__, "rb") as file:
        return torch.tensor(list(file.read(length)))[None]


def boundaries(length: int) -> tuple[int, ...]:
    """Starts of documents of uneven lengths, and the end of the last."""
    return (0, length // 16, length // 4, length // 4 + 1, length)


def decoder_losses(tokens, labels, starts, mesh, steps):
    """Losses of `steps` steps with the tokens shared by the ranks of mesh, or alone if it is None."""
    torch.manual_seed(0)
    config = DecoderConfig(256, 64, 128, 2, 4, num_kv_heads=2, max_positions=tokens.shape[1])
    model = Decoder(config, device=tokens.device)
    if mesh is not None:
        for part in (*model.layers, model):
            fully_shard(part, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    losses = []
    for _ in range(steps):
        if mesh is None:
            packed = None if starts is None else torch.tensor(starts, dtype=torch.int32, device=tokens.device)
            loss = model(tokens, labels, cu_seqlens=packed)
        else:
            sequence = SharedSequence(tokens.shape[1], mesh, cu_seqlens=starts, device=tokens.device)
            mine = sequence.shard(labels, IGNORED)
            loss = sequence.mean(model(sequence.shard(tokens), mine, sequence=sequence), mine)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def transformers_losses(tokens, labels, starts, mesh, steps):
    """The same of a model of transformers, which takes whole batches on every rank."""
    from transformers import LlamaConfig, LlamaForCausalLM

    import tilesmith

    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "vocab_size": 256}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": tokens.shape[1]}
    model = LlamaForCausalLM(LlamaConfig(**sizes, **heads)).to(tokens.device)
    if mesh is not None:
        tilesmith.shard_sequence(model, mesh)
        fully_shard(model, mesh=mesh)
    batch = {"input_ids": tokens, "shift_labels": labels, "labels": labels}
    if starts is not None:
        lengths = torch.tensor(starts).diff().tolist()
        batch["position_ids"] = torch.cat([torch.arange(n) for n in lengths])[None].to(tokens.device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    losses = []
    for _ in range(steps):
        loss = model(**batch, use_cache=False).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--length", type=int, default=1001, help="tokens of the sequence")
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--packed", action="store_true", help="documents that do not see each other")
    parser.add_argument("--transformers", action="store_true", help="a Hugging Face model")
    given = parser.parse_args()
    kind = "cuda" if torch.cuda.is_available() else "cpu"
    if kind == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    mesh = init_device_mesh(kind, (int(os.environ["WORLD_SIZE"]),), mesh_dim_names=("cp",))
    text = document(given.length + 1).to(kind)
    tokens, labels = text[:, :-1], text[:, 1:].clone()
    starts = boundaries(given.length) if given.packed else None
    if starts is not None:
        labels[:, [end - 1 for end in starts[1:]]] = IGNORED  # the last token of a document predicts nothing
    run = transformers_losses if given.transformers else decoder_losses
    shared = run(tokens, labels, starts, mesh, given.steps)
    alone = run(tokens, labels, starts, None, given.steps) if dist.get_rank() == 0 else copy.copy(shared)
    if dist.get_rank() == 0:
        for step, (ours, one) in enumerate(zip(shared, alone)):
            print(f"step {step}: loss {ours:.5f} on {mesh.size()} ranks, {one:.5f} on one")
    dist.barrier()
    dist.destroy_process_group()
    if not torch.allclose(torch.tensor(shared), torch.tensor(alone), rtol=2e-3):
        raise SystemExit("the losses differ")


if __name__ == "__main__":
    main()
