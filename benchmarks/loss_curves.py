"""Loss of small language models on real text: optimised, in FP8 and of experts, beside the reference's.

    python benchmarks/loss_curves.py results.json [--arm dense.delayed ...] [--seeds 3] [--steps 300] [--processes 8]
        [--tiny]

A dense decoder (Llama's form, 24 M parameters) and one of experts (Qwen3-MoE's form, 57 M) of transformers learn the
sources of Python's standard library byte by byte: fp32 weights, bf16 autocast, AdamW, the same batches for each arm of
a seed. Arms: the model as it is (`reference`), `optimize` (`optimized`), and that converted to FP8 by each recipe;
torchao's recipes where it is installed; `.spikes`: an infinity, a NaN and 1e6 among the embeddings of three batches,
which `FP8TrainingEngine` must survive; `.late`, `.later`: converted after a tenth, a quarter of the steps. A row has
the held-out loss of each seed, its mean difference from the reference of that seed, and the noise: the reference's
standard deviation over seeds; in_bf16: the same difference where a converted model is evaluated as it was before.
Every arm is a process, which has the seeds in turn.
--tiny: sizes for a CPU, which show that it runs and nothing else.
"""

import argparse
import json
import math
import statistics
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import torch
from adaptive_precision import corpus, windows
from common import DEVICE, provenance, save, say
from torch import Tensor, nn

import tilesmith
from tilesmith.precision import FP8Config, FP8TrainingEngine, convert_model_to_fp8, revert_model_from_fp8
from tilesmith.precision.config import RECIPES

SPIKES = {0.4: math.inf, 0.5: math.nan, 0.6: 1e6}  # where in the run, and the value
LATE = {"late": 0.1, "later": 0.25}  # which part of the steps goes by before a model is converted
TORCHAO = ("tensorwise", "rowwise_with_gw_hp")


class Size(NamedTuple):
    """A model and its training. batch: sequences. tested: held-out batches."""

    width: int
    layers: int
    experts_layers: int
    heads: int
    inner: int
    experts: int
    length: int
    batch: int
    steps: int
    tested: int


LARGE = Size(512, 8, 6, 8, 1408, 32, 512, 8, 300, 32)
TINY = Size(64, 2, 1, 2, 128, 4, 64, 4, 6, 2)
FP8_SIZES = {"min_features": 32, "min_tokens": 32}


def built(kind: str, size: Size, seed: int) -> nn.Module:
    """The reference model; its weights depend on the seed alone."""
    import transformers

    sizes: dict[str, Any] = {
        "hidden_size": size.width, "intermediate_size": size.inner, "num_hidden_layers": size.layers,
        "num_attention_heads": size.heads, "num_key_value_heads": size.heads // 2, "vocab_size": 256,
        "head_dim": size.width // size.heads, "use_cache": False,
    }  # fmt: skip
    name = "Llama"
    if kind == "experts":
        name = "Qwen3Moe"
        sizes |= {
            "num_hidden_layers": size.experts_layers, "num_experts": size.experts, "num_experts_per_tok": 4,
            "moe_intermediate_size": size.inner // 8, "decoder_sparse_step": 1,
        }  # fmt: skip
    torch.manual_seed(seed)
    config = getattr(transformers, f"{name}Config")(**sizes)
    return getattr(transformers, f"{name}ForCausalLM")(config).to(DEVICE).train()


def prepared(model: nn.Module, arm: str) -> nn.Module:
    """The model as an arm trains it."""
    if arm in TORCHAO:
        from torchao.float8 import Float8LinearConfig, convert_to_float8_training

        chosen = Float8LinearConfig.from_recipe_name(arm)
        return convert_to_float8_training(
            model, config=chosen, module_filter_fn=lambda _, name: name.split(".")[-1] not in ("lm_head", "gate")
        )
    if arm != "reference":
        tilesmith.optimize(model)
    return in_fp8(model, arm) if arm in RECIPES else model


def in_fp8(model: nn.Module, recipe: str) -> nn.Module:
    return convert_model_to_fp8(model, FP8Config(recipe=recipe, **FP8_SIZES))


def learning_rate(step: int, steps: int) -> float:
    warm = max(1, steps // 10)
    return 1e-3 * min(1.0, (step + 1) / warm) * (0.1 + 0.45 * (1 + math.cos(math.pi * step / steps)))


def train(kind: str, arm: str, size: Size, seed: int) -> dict[str, Any]:
    """The held-out loss after training, the loss of every tenth step, and what the engine counted."""
    data = corpus()
    held, data = data[: len(data) // 10], data[len(data) // 10 :]
    recipe, _, how = arm.partition(".")
    spiked, late = how == "spikes", round(LATE.get(how, 0) * size.steps)
    model = built(kind, size, seed)
    engine = None
    if spiked:
        tilesmith.optimize(model)
        engine = FP8TrainingEngine(model, FP8Config(recipe=recipe, loss_scale=4.0, **FP8_SIZES))
        engine.setup_fp8_training()
        model = engine.model
    else:
        model = prepared(model, "optimized" if late else recipe)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, betas=(0.9, 0.95), weight_decay=0.1)
    spikes = {round(where * size.steps): value for where, value in SPIKES.items()} if spiked else {}
    curve = []
    for step in range(size.steps):
        if late and step == late:
            model = in_fp8(model, recipe)
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step, size.steps)
        ids = windows(data, size.length - 1, size.batch, seed * 10_000_000 + step, DEVICE)
        hook = _spiking(model, spikes[step]) if step in spikes else None
        with torch.autocast(DEVICE.type, torch.bfloat16):
            if engine is None:
                loss = model(input_ids=ids, labels=ids).loss
            else:
                loss = engine.training_step({"input_ids": ids, "labels": ids})
        if hook is not None:
            hook.remove()
        if engine is None:
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
        else:
            nn.utils.clip_grad_norm_(model.parameters(), engine.loss_scale)
            engine.optimizer_step(optimizer)
        if step % 10 == 9:
            curve.append(round(float(loss.detach()), 4))
    found: dict[str, Any] = {"loss": held_out(model, held, size), "curve": curve}
    found["finite"] = all(bool(p.isfinite().all()) for p in model.parameters())
    if engine is not None:
        told = engine.get_training_statistics()
        found |= {name: told[name] for name in ("steps", "skipped", "overflows")}
    elif recipe in RECIPES:
        found["loss_in_bf16"] = held_out(revert_model_from_fp8(model), held, size)
    return found


def _spiking(model: nn.Module, value: float) -> Any:
    """A value in the hidden states of one token, at the model's entry."""

    def spoil(module: nn.Module, args: tuple, out: Tensor) -> Tensor:
        out = out.clone()
        out[0, 3, 5] = value
        return out

    return model.get_input_embeddings().register_forward_hook(spoil)


def held_out(model: nn.Module, data: Tensor, size: Size) -> float:
    """The mean loss of batches that no seed has trained on."""
    model.eval()
    total = 0.0
    with torch.no_grad(), torch.autocast(DEVICE.type, torch.bfloat16):
        for batch in range(size.tested):
            ids = windows(data, size.length - 1, size.batch, 77_000_000 + batch, DEVICE)
            total += float(model(input_ids=ids, labels=ids).loss)
    return total / size.tested


def arms() -> list[str]:
    """Every arm as KIND.ARM."""
    dense = ["reference", "optimized", *RECIPES, "delayed.spikes", *(f"delayed.{how}" for how in LATE), *TORCHAO]
    return [f"dense.{arm}" for arm in dense] + [f"experts.{arm}" for arm in ("reference", "optimized", "delayed")]


def summary(found: dict[str, list[dict[str, Any]]]) -> dict[str, Any]:
    """Of each arm: the losses, their mean difference from the reference in percent, and the reference's spread."""
    rows = {}
    for arm, runs in found.items():
        good = [run for run in runs if "loss" in run]
        row: dict[str, Any] = {"losses": [round(run["loss"], 4) for run in good]}
        row |= {"failed": [run["error"] for run in runs if "error" in run]} if len(good) < len(runs) else {}
        row |= (
            {name: [run[name] for run in good] for name in ("finite", "skipped", "overflows") if name in good[0]}
            if good
            else {}
        )
        base = [run["loss"] for run in found.get(arm.split(".")[0] + ".reference", []) if "loss" in run]
        if good and len(base) == len(good):
            apart = [100 * (run["loss"] / b - 1) for run, b in zip(good, base)]
            row["percent"] = round(statistics.mean(apart), 3)
            if "loss_in_bf16" in good[0]:
                row["in_bf16"] = round(
                    statistics.mean(100 * (run["loss_in_bf16"] / b - 1) for run, b in zip(good, base)), 3
                )
            row["noise_percent"] = round(100 * statistics.pstdev(base) / statistics.mean(base), 3)
        rows[arm] = row
    return rows


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out")
    parser.add_argument("--arm", action="append", choices=arms())
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, help=f"of a run; without it {LARGE.steps}")
    parser.add_argument("--processes", type=int, default=8)
    parser.add_argument("--seconds", type=float, default=300.0, help="of an arm")
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--alone", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args()
    size = TINY if given.tiny else LARGE
    size = size._replace(steps=given.steps or size.steps)
    if given.alone:
        kind, _, arm = given.arm[0].partition(".")
        for seed in range(given.seeds):
            say(json.dumps(train(kind, arm, size, seed)))
        return 0
    wanted = given.arm or arms()

    def one(arm: str) -> list[dict[str, Any]]:
        command = [sys.executable, __file__, "-", "--arm", arm, "--seeds", str(given.seeds), "--alone"]
        command += ["--steps", str(size.steps)]
        begun = subprocess.Popen(
            [*command, *(["--tiny"] if given.tiny else [])], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        try:
            out, err = begun.communicate(timeout=given.seconds)
        except subprocess.TimeoutExpired:
            begun.kill()
            out, err = begun.communicate()
            err += f"\nended after {given.seconds:g} s"
        runs = [json.loads(line) for line in out.splitlines() if line.startswith("{")]
        if begun.returncode:
            runs.append({"error": (err.strip().splitlines() or [str(begun.returncode)])[-1][:300]})
        return runs

    with ThreadPoolExecutor(given.processes) as pool:
        found = dict(zip(wanted, pool.map(one, wanted)))
    rows = summary(found)
    save(given.out, {**provenance(), "size": size._asdict(), "rows": rows, "runs": found})
    for arm, row in rows.items():
        say(arm, json.dumps(row))
    return int(any("error" in run and "torchao" not in run["error"] for runs in found.values() for run in runs))


if __name__ == "__main__":
    sys.exit(main())
