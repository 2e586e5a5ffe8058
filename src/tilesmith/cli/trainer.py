"""Train a causal language model: optimizer, schedule, validation, and checkpoints that continue bit for bit."""

from __future__ import annotations

import contextlib
import json
import math
import os
import re
import shutil
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tilesmith.cli.checkpoint import LanguageModel, load_tensors
from tilesmith.cli.training import learning_rate
from tilesmith.cli.windows import Windows

STEP = re.compile(r"step-[0-9]+")  # a copy beside it, such as "step-000250 old", is not ours
PARTIAL = re.compile(r"step-[0-9]+\.partial")  # what a process that was killed while it saved leaves
STATE = "state.json"
OPTIMIZER = "optimizer.safetensors"
MOMENTS = ("step", "exp_avg", "exp_avg_sq")


@dataclass(frozen=True)
class Plan:
    """What a training run is, whatever device it runs on and however often it is interrupted.

    batch: windows of a micro-batch; accumulate: micro-batches of a step; length: tokens of a window. rate: the highest
    learning rate, reached after `warmup` steps, and floor: the share of it left at the end of a cosine. decay: AdamW's
    weight decay, of matrices only. clip: the largest norm of the gradient, 0 for no limit. validation: the share of the
    text, at its end, that is not trained on; eval_windows: at most so many windows of it are evaluated.
    """

    steps: int
    batch: int
    accumulate: int
    length: int
    rate: float
    warmup: int
    floor: float
    decay: float
    clip: float
    seed: int
    validation: float
    eval_windows: int
    dtype: str
    autocast: str
    optimize: bool


@dataclass
class History:
    """A run so far: loss, gradient norm and learning rate of each step, and validation losses by step."""

    loss: list[float] = field(default_factory=list)
    norm: list[float] = field(default_factory=list)
    rate: list[float] = field(default_factory=list)
    validation: dict[int, float] = field(default_factory=dict)


class Diverged(Exception):
    """The loss or the gradient is not finite; the weights are still those of the step before."""


class Trainer:
    """AdamW on windows of `tokens` [N]; evaluates on `unseen` [n, length]. step: steps done."""

    def __init__(self, language: LanguageModel, tokens: Tensor, unseen: Tensor, plan: Plan):
        self.language, self.unseen, self.plan = language, unseen, plan
        self.windows = Windows(tokens, plan.length, plan.seed)
        self.history = History()
        self.parameters = {n: p for n, p in language.model.named_parameters() if p.requires_grad}
        groups: dict[float, list[Tensor]] = {plan.decay: [], 0.0: []}
        for parameter in self.parameters.values():
            groups[plan.decay if parameter.ndim > 1 else 0.0].append(parameter)
        listed = [{"params": params, "weight_decay": decay} for decay, params in groups.items() if params]
        self.optimizer = torch.optim.AdamW(listed, lr=plan.rate, betas=(0.9, 0.95))

    @property
    def step(self) -> int:
        """How many steps have been taken."""
        return len(self.history.loss)

    def advance(self) -> None:
        """Take one step. Raises Diverged, with nothing changed, where loss or gradient is not finite."""
        plan, model = self.plan, self.language.model.train()
        rate = plan.rate * learning_rate(self.step, plan.steps, plan.warmup, plan.floor)
        total = torch.zeros((), device=self.language.device)
        for _ in range(plan.accumulate):
            ids = self.windows.take(plan.batch).to(self.language.device)
            with self._autocast():
                loss = model(input_ids=ids, labels=ids, use_cache=False).loss / plan.accumulate
            loss.backward()
            total += loss.detach()
        norm = torch.nn.utils.clip_grad_norm_(self.parameters.values(), plan.clip or math.inf)
        if not (math.isfinite(total) and math.isfinite(norm)):
            self.optimizer.zero_grad()
            raise Diverged(f"step {self.step + 1}: the loss is {total:.4g}, the norm of the gradient {norm:.4g}")
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.history.loss.append(float(total))
        self.history.norm.append(float(norm))
        self.history.rate.append(rate)

    @torch.no_grad()
    def evaluate(self) -> float:
        """The loss on the unseen windows, which the history keeps."""
        model, total = self.language.model.eval(), 0.0
        for ids in self.unseen.split(self.plan.batch):
            ids = ids.to(self.language.device)
            with self._autocast():
                total += float(model(input_ids=ids, labels=ids, use_cache=False).loss) * len(ids)
        self.history.validation[self.step] = total / len(self.unseen)
        return total / len(self.unseen)

    def save(self, folder: Path, about: dict[str, Any], keep: int) -> Path:
        """Write `folder`/step-N, then the model's files into `folder` itself; the last `keep` steps stay.

        A step's folder appears whole or not at all. about: what else to remember.
        """
        final = folder / f"step-{self.step:06d}"
        partial = folder / f"{final.name}.partial"
        for left in folder.glob("step-*"):
            if PARTIAL.fullmatch(left.name):
                shutil.rmtree(left, ignore_errors=True)
        partial.mkdir(parents=True)
        try:
            self.language.save(partial)
            self._save_state(partial, about)
        except BaseException:
            shutil.rmtree(partial, ignore_errors=True)  # on a full disk it is in the way
            raise
        shutil.rmtree(final, ignore_errors=True)  # of a run that was resumed before it
        partial.rename(final)
        publish(final)
        for old in checkpoints(folder)[:-keep]:
            shutil.rmtree(old.rename(f"{old}.partial"))
        return final

    def _save_state(self, folder: Path, about: dict[str, Any]) -> None:
        from safetensors.torch import save_file

        tensors = {"rng.cpu": torch.get_rng_state()}
        device = self.language.device
        if device.type != "cpu":
            tensors[f"rng.{device.type}"] = torch.get_device_module(device).get_rng_state(device)
        for name, parameter in self.parameters.items():
            moments = self.optimizer.state.get(parameter, {})
            tensors |= {f"{m}.{name}": moments[m].cpu().contiguous() for m in MOMENTS if m in moments}
        save_file(tensors, folder / OPTIMIZER)
        data = {"epoch": self.windows.epoch, "position": self.windows.position}
        state = {**about, "step": self.step, "plan": asdict(self.plan), "data": data, "history": asdict(self.history)}
        (folder / STATE).write_text(json.dumps(state), encoding="utf-8")

    def restore(self, folder: Path, state: dict[str, Any]) -> None:
        """Continue from what `save` wrote into a step's folder; the model has its weights already.

        Raises ValueError where the files do not fit the model, the text or each other.
        """
        tensors = load_tensors(folder / OPTIMIZER)
        drawn = {key.removeprefix("rng."): tensors.pop(key) for key in list(tensors) if key.startswith("rng.")}
        torch.set_rng_state(drawn["cpu"])
        device = self.language.device
        if device.type != "cpu" and device.type in drawn:  # of another kind of device it would have another size
            torch.get_device_module(device).set_rng_state(drawn[device.type], device)
        for key, value in tensors.items():
            moment, _, name = key.partition(".")
            parameter = self.parameters.get(name)
            if parameter is None or moment not in MOMENTS or (moment != "step" and value.shape != parameter.shape):
                sizes = "" if parameter is None else f", which is {list(parameter.shape)} in the model"
                raise ValueError(f"{folder / OPTIMIZER} does not fit: it has {key} {list(value.shape)}{sizes}")
            self.optimizer.state[parameter][moment] = value if moment == "step" else value.to(device)
        self._check_moments(folder / OPTIMIZER)
        data = state["data"]
        self.windows = Windows(self.windows.tokens, self.plan.length, self.plan.seed, data["epoch"], data["position"])
        kept = state["history"]
        self.history = History(**{**kept, "validation": {int(s): loss for s, loss in kept["validation"].items()}})
        if not state["step"] == len(self.history.loss) == len(self.history.norm) == len(self.history.rate):
            raise ValueError(f"{folder / STATE} is of step {state['step']}, its history of {len(self.history.loss)}")

    def _check_moments(self, path: Path) -> None:
        """Raise ValueError where a parameter has some of its moments, but not all."""
        for name, parameter in self.parameters.items():
            there = self.optimizer.state.get(parameter, {})
            if there and (lacking := [moment for moment in MOMENTS if moment not in there]):
                raise ValueError(f"{path} does not fit: it has no {lacking[0]}.{name}")

    def _autocast(self) -> contextlib.AbstractContextManager:
        if self.plan.autocast == "none":
            return contextlib.nullcontext()
        return torch.autocast(self.language.device.type, getattr(torch, self.plan.autocast))


def checkpoints(folder: Path) -> list[Path]:
    """The folders of steps that `Trainer.save` wrote, the latest last."""
    found = (p for p in folder.glob("step-*") if STEP.fullmatch(p.name) and (p / STATE).is_file())
    return sorted(found, key=lambda path: int(path.name.removeprefix("step-")))


def publish(step: Path) -> None:
    """Put the model of a step's folder into the folder above, unless it is there."""
    for path in step.iterdir():
        if path.name not in (STATE, OPTIMIZER):
            _link(path, step.parent / path.name)


def _link(source: Path, target: Path) -> None:
    """Put the file where target is, at once: another name of it, or a copy where a file system has no such thing."""
    if target.exists() and target.samefile(source):
        return
    fresh = target.with_name(f"{target.name}.partial")
    fresh.unlink(missing_ok=True)
    try:
        os.link(source, fresh)
    except OSError:
        shutil.copyfile(source, fresh)
    fresh.replace(target)
