"""Train several models on the same batches, taking turns at every step, and time each."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from tilesmith.engine.timing import wall_time

UNTIMED = 3  # first steps fill pools and load kernels


@dataclass
class Run:
    """One model's losses, and the seconds of each of its steps."""

    losses: list[float] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)

    @property
    def step_time(self) -> float:
        """Median seconds of a step after the first few."""
        return statistics.median(self.seconds[UNTIMED:] or self.seconds)


def train(
    models: Mapping[str, nn.Module],
    tokens: Tensor,
    *,
    batch: int,
    length: int,
    steps: int,
    rate: float,
    seed: int,
    progress: Callable[[int, Mapping[str, Run]], None] = lambda step, runs: None,
) -> dict[str, Run]:
    """Train with AdamW on random windows of `tokens` [N]: at each step every model sees the same batch.

    The order in which the models take their turn alternates. The learning rate rises over a tenth of the steps to
    `rate`, then falls along a cosine.
    """
    device = next(next(iter(models.values())).parameters()).device
    optimizers = {
        name: torch.optim.AdamW(model.parameters(), lr=rate, weight_decay=0.0) for name, model in models.items()
    }
    runs = {name: Run() for name in models}
    draw = torch.Generator().manual_seed(seed)
    names = list(models)
    for step in range(steps):
        ids = windows(tokens, batch, length, draw).to(device)
        for name in names if step % 2 == 0 else names[::-1]:
            for group in optimizers[name].param_groups:
                group["lr"] = rate * learning_rate(step, steps, max(1, steps // 10))
            loss, spent = _step(models[name], optimizers[name], ids)
            runs[name].losses.append(loss)
            runs[name].seconds.append(spent)
        progress(step, runs)
    return runs


def windows(tokens: Tensor, batch: int, length: int, draw: torch.Generator) -> Tensor:
    """`batch` random windows [batch, length] of `tokens`."""
    starts = torch.randint(len(tokens) - length, (batch, 1), generator=draw)
    return tokens[starts + torch.arange(length)]


def learning_rate(step: int, steps: int, warmup: int, floor: float = 0.0) -> float:
    """The share of the highest rate at a step: it rises over `warmup` steps, then falls along a cosine to `floor`."""
    if step < warmup:
        return (step + 1) / warmup
    return floor + (1 - floor) * (0.5 + 0.5 * math.cos(math.pi * (step - warmup) / max(1, steps - warmup)))


def _step(model: nn.Module, optimizer: torch.optim.Optimizer, ids: Tensor) -> tuple[float, float]:
    """The loss, and the seconds that the step took."""

    def work():
        nonlocal loss
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    loss = None
    seconds = wall_time(work, ids.device) / 1e6
    return loss.item(), seconds
