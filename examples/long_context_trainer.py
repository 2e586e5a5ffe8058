"""Train with transformers' Trainer on sequences that several ranks share, and compare with one process.

    torchrun --nproc-per-node 2 examples/long_context_trainer.py          # shard_sequence: CPUs, or GPUs with FSDP2
    torchrun --nproc-per-node 2 examples/long_context_trainer.py --torch  # accelerate's cp_size: GPUs

Without --torch it runs on CPUs through gloo; SGD and no clipping keep the loop of one process short.
"""

import argparse
import os
import tempfile

import torch
import torch.distributed as dist
from accelerate import ParallelismConfig
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.data import DataLoader
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments, default_data_collator

import tilesmith

STEPS, ROWS, TOKENS = 3, 2, 64


class SameBatches(Trainer):
    """Every rank gets the same batches, of which `shard_sequence` computes its tokens. Trainer's own loader would give
    each rank others."""

    def get_train_dataloader(self):
        return DataLoader(self.train_dataset, self.args.train_batch_size, collate_fn=self.data_collator)


def tiny_model() -> LlamaForCausalLM:
    """A Llama of two layers."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4}
    return LlamaForCausalLM(LlamaConfig(**sizes, num_key_value_heads=2, vocab_size=128))


def rows() -> list[dict]:
    """Sequences of TOKENS tokens. The first half of some has no labels, as that of a prompt."""
    generator = torch.Generator().manual_seed(1)
    found = [torch.randint(128, (TOKENS,), generator=generator) for _ in range(STEPS * ROWS)]
    labels = [row.masked_fill(torch.arange(TOKENS) < (k % 2) * TOKENS // 2, -100) for k, row in enumerate(found)]
    return [{"input_ids": row, "labels": label} for row, label in zip(found, labels)]


def settings(folder: str, **more) -> TrainingArguments:
    """SGD without clipping, so that a loop of one process is short."""
    return TrainingArguments(
        folder, max_steps=STEPS, per_device_train_batch_size=ROWS, train_sampling_strategy="sequential",
        optim="sgd", learning_rate=0.1, lr_scheduler_type="constant", max_grad_norm=0.0, logging_steps=1, report_to=[],
        save_strategy="no", disable_tqdm=True, use_cpu=not torch.cuda.is_available(), **more,
    )  # fmt: skip


def by_tilesmith(model, arguments) -> Trainer:
    """The ranks share each sequence by this library's context parallelism."""
    tilesmith.optimize(model)
    mesh = init_device_mesh(arguments.device.type, (arguments.world_size,), mesh_dim_names=("cp",))
    tilesmith.shard_sequence(model, mesh["cp"])
    return SameBatches(model, arguments, train_dataset=rows())


def by_torch(model, arguments) -> Trainer:
    """The ranks share each sequence by torch's; `arguments` have FSDP2 and a cp_size."""
    tilesmith.optimize(model, exclude="attention")  # with cp_size, Trainer takes PyTorch's alone
    return Trainer(model, arguments, train_dataset=rows())


def losses(trainer: Trainer) -> list[float]:
    """The losses of a run."""
    trainer.train()
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


def alone(model) -> list[float]:
    """The same losses from a loop of one process."""
    data, optimizer, found = rows(), torch.optim.SGD(model.parameters(), 0.1), []
    for begin in range(0, STEPS * ROWS, ROWS):
        loss = model(**default_data_collator(data[begin : begin + ROWS])).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(loss.item())
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--torch", action="store_true", help="by torch's context parallelism, on GPUs")
    by_torchs, gpu = parser.parse_args().torch, torch.cuda.is_available()
    if by_torchs and not gpu:
        raise SystemExit("accelerate refuses cp_size without GPUs; leave --torch out")
    more = {"fsdp": True, "fsdp_config": {"version": 2}, "bf16": True} if gpu else {}
    with tempfile.TemporaryDirectory() as folder:
        if by_torchs:
            tilesmith.register_for_sdpa()
            torch.nn.attention.activate_flash_attention_impl("tilesmith")
            torch.backends.cuda.enable_cudnn_sdp(False)  # PyTorch's first choice on some GPUs
            more["parallelism_config"] = ParallelismConfig(cp_size=int(os.environ["WORLD_SIZE"]))
            trainer = by_torch(tiny_model(), settings(folder, **more))
        else:
            trainer = by_tilesmith(tiny_model(), settings(folder, **more))
        found = losses(trainer)
    expected = alone(tiny_model())
    if dist.get_rank() == 0:
        for step, (ours, one) in enumerate(zip(found, expected)):
            print(f"step {step}: loss {ours:.5f} on {dist.get_world_size()} ranks, {one:.5f} on one")
    dist.barrier()
    dist.destroy_process_group()
    if not torch.allclose(torch.tensor(found), torch.tensor(expected), rtol=1e-2 if gpu else 1e-5):
        raise SystemExit("the losses differ")


if __name__ == "__main__":
    main()
