"""Steps of TRL's SFTTrainer on one GPU, with its own fused head: a plain model, Liger's layers, an optimised model.

    python benchmarks/trl_steps.py results.json [--variant NAME ...] [--data whole|documents ...] [--rounds 3] [--tiny]

A model of Qwen3-1.7B's sizes in bf16 trains on packed sequences of 4,096 random tokens, two a step, by TRL's defaults
but for gradient checkpointing, which is off, and logs at each step. `whole`: a sequence is one text; `documents`: of
texts whose lengths are drawn, which do not see one another. A row is the median over rounds of the median step of a
round, in which variants take turns; peak memory is that of a round. Liger replaces functions of transformers' modules,
so `--variant liger` runs in a process of its own. Rows are kept beside those that the file holds. Exits with 1 where
losses of a variant are not those of the first. --tiny: sizes for a CPU. Needs transformers, trl and datasets.
"""

from __future__ import annotations

import argparse
import gc
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from common import DEVICE, load, provenance, save, say
from torch import nn

import tilesmith
from tilesmith.engine.timing import synchronize

LARGE = {
    "hidden_size": 2048, "intermediate_size": 6144, "num_hidden_layers": 28, "num_attention_heads": 16,
    "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 151936, "tie_word_embeddings": True,
}  # fmt: skip
TINY = {**LARGE, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "vocab_size": 512}
BATCH, STEPS, UNTIMED = 2, 8, 3
VARIANTS = ("trl", "liger", "optimized")
DATA = ("whole", "documents")


def rows_of(data: str, tokens: int, vocabulary: int, count: int) -> list[dict[str, list[int]]]:
    """Packed sequences as TRL's own packing leaves them: tokens, and the lengths of the texts in them."""
    chance, rows = random.Random(5), []
    for _ in range(count):
        lengths = []
        while data == "documents" and sum(lengths) < tokens:
            lengths.append(min(tokens - sum(lengths), int(2 ** chance.uniform(6, 12))))
        ids = [chance.randrange(vocabulary) for _ in range(tokens)]
        rows.append({"input_ids": ids, "seq_lengths": lengths or [tokens]})
    return rows


def tokenizer_of(vocabulary: int) -> Any:
    """A tokenizer that the trainer asks for its special tokens and nothing else."""
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    words = {"<pad>": 0, "<eos>": 1, "<unk>": 2}
    made = Tokenizer(models.WordLevel(words, "<unk>"))
    return PreTrainedTokenizerFast(tokenizer_object=made, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>")


def trainer_of(variant: str, data: str, sizes: dict[str, Any], tokens: int, folder: str) -> tuple[Any, list[float]]:
    """A trainer of a model that is the same each time, and the seconds of its steps, which grow as it trains."""
    import trl
    from datasets import Dataset
    from datasets.table import InMemoryTable
    from transformers import Qwen3Config, Qwen3ForCausalLM, TrainerCallback

    torch.manual_seed(0)
    with DEVICE:
        model: nn.Module = Qwen3ForCausalLM(Qwen3Config(**sizes, use_cache=False)).to(torch.bfloat16).train()
    if variant == "optimized":
        tilesmith.optimize(model)
    spent: list[float] = []

    class Clock(TrainerCallback):
        began = 0.0

        def on_step_begin(self, *args: Any, **kwargs: Any) -> None:
            synchronize(DEVICE)
            self.began = time.perf_counter()

        def on_step_end(self, *args: Any, **kwargs: Any) -> None:
            synchronize(DEVICE)
            spent.append(time.perf_counter() - self.began)

    arguments = trl.SFTConfig(
        output_dir=folder, max_steps=STEPS, per_device_train_batch_size=BATCH, packing=True, max_length=tokens,
        gradient_checkpointing=False, report_to=[], logging_steps=1, save_strategy="no", disable_tqdm=True, seed=3,
        bf16=DEVICE.type == "cuda", use_cpu=DEVICE.type == "cpu", learning_rate=1e-5,
        dataset_kwargs={"skip_prepare_dataset": True}, use_liger_kernel=variant == "liger",
    )  # fmt: skip
    rows = rows_of(data, tokens, sizes["vocab_size"], BATCH * STEPS)
    # named here: hashing a table of pyarrow fails under some of its releases
    table = Dataset(InMemoryTable.from_pylist(rows), fingerprint=data)
    trainer = trl.SFTTrainer(
        model=model, args=arguments, train_dataset=table, callbacks=[Clock()],
        processing_class=tokenizer_of(sizes["vocab_size"]),
    )  # fmt: skip
    return trainer, spent


def compare(data: str, variants: Sequence[str], rounds: int, tiny: bool) -> dict[str, dict[str, Any]]:
    """A row for each variant. A trainer is made anew for each round, so that none takes memory of another's."""
    sizes, tokens = (TINY, 128) if tiny else (LARGE, 4096)
    medians: dict[str, list[float]] = {name: [] for name in variants}
    rows: dict[str, dict[str, Any]] = {name: {} for name in variants}
    for turn in range(rounds):
        for name in variants if turn % 2 == 0 else reversed(variants):
            gc.collect()
            if DEVICE.type == "cuda":
                torch.cuda.empty_cache()
                torch.cuda.reset_peak_memory_stats()
            with tempfile.TemporaryDirectory() as folder:
                trainer, spent = trainer_of(name, data, sizes, tokens, folder)
                trainer.train()
            medians[name].append(1e3 * statistics.median(spent[UNTIMED:]))
            rows[name]["losses"] = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
            if DEVICE.type == "cuda":
                rows[name]["peak_gb"] = round(torch.cuda.max_memory_allocated() / 1e9, 2)
            del trainer
    for name, row in rows.items():
        row["ms"] = round(statistics.median(medians[name]), 2)
        row["rounds"] = [round(ms, 2) for ms in medians[name]]
        say(f"  {data:<10} {name:<10} {row['ms']:8.2f} ms, {row.get('peak_gb', 0):6.2f} GB, losses {row['losses'][:3]}")
    return rows


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", type=Path)
    parser.add_argument("--variant", action="append", choices=VARIANTS)
    parser.add_argument("--data", action="append", choices=DATA)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--tiny", action="store_true")
    given = parser.parse_args()
    variants = given.variant or [name for name in VARIANTS if name != "liger"]
    if "liger" in variants and len(variants) > 1:
        parser.error("--variant liger needs a process of its own: it replaces functions of transformers' modules")
    document, right = {**provenance(), "rows": load(given.results).get("rows", {})}, True
    for data in given.data or DATA:
        found = document["rows"].setdefault(data, {})
        found.update(compare(data, variants, given.rounds, given.tiny))
        first = next(iter(found.values()))["losses"]
        right &= all(
            abs(a - b) <= 5e-3 * abs(b) for row in found.values() for a, b in zip(row["losses"], first, strict=True)
        )
        save(given.results, document)
    if not right:
        say("a variant's losses are not those of the first: see the results")
    return 0 if right else 1


if __name__ == "__main__":
    sys.exit(main())
