"""How many bits each tile gets: the least loss for a number of bytes."""

from __future__ import annotations

import torch
from torch import Tensor


def allocate(losses: Tensor, sizes: Tensor, budget: int) -> Tensor:
    """The option of each item, int64 [items], that makes the sum of losses small while the sum of sizes is at most
    budget.

    losses: [items, options]; sizes: int64 [items, options], in bytes, growing along the options. The sum of losses is
    that of the best choice plus at most one step of one item: options on the lower convex hull of each item are taken
    in the order of what a byte gains (the Lagrangian of the problem), then what is left is filled with steps that fit.

    Raises ValueError where even the smallest options exceed the budget, or a loss is not finite.
    """
    if not bool(losses.isfinite().all()):
        raise ValueError("allocate: losses must be finite")
    losses, sizes = losses.double().cpu(), sizes.cpu()
    least = int(sizes[:, 0].sum())
    if least > budget:
        raise ValueError(f"allocate: the smallest options take {least} bytes; the budget is {budget}")
    gain, item, start, stop = _hull_steps(losses, sizes)
    order = torch.argsort(gain, descending=True, stable=True)
    item, start, stop = item[order], start[order], stop[order]
    cost = sizes[item, stop] - sizes[item, start]
    chosen = torch.zeros(len(losses), dtype=torch.int64)
    whole = int((cost.cumsum(0) <= budget - least).sum())
    chosen.scatter_reduce_(0, item[:whole], stop[:whole], "amax")
    left = budget - least - int(cost[:whole].sum())
    return _fill(chosen, losses, sizes, left)


def _hull_steps(losses: Tensor, sizes: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The steps along each item's lower convex hull: what a byte gains, the item, the options before and after.

    A step that gains nothing is left out. From an option the hull goes on to the one that gains most a byte.
    """
    count, options = losses.shape
    here = torch.zeros(count, dtype=torch.int64)
    every = torch.arange(count)
    steps: list[tuple[Tensor, ...]] = []
    for _ in range(options - 1):
        rate = (losses[every, here][:, None] - losses) / (sizes - sizes[every, here][:, None]).clamp(min=1)
        rate[torch.arange(options)[None] <= here[:, None]] = -1.0
        gain, there = rate.max(1)
        on = gain > 0
        steps.append((gain[on], every[on], here[on], there[on]))
        here = torch.where(on, there, here)
    return tuple(torch.cat(parts) for parts in zip(*steps)) if steps else (losses.new_zeros(0), *[here[:0]] * 3)


def _fill(chosen: Tensor, losses: Tensor, sizes: Tensor, left: int) -> Tensor:
    """Spend what is left on the steps that gain most and fit, one after the other."""
    every = torch.arange(len(chosen))
    while True:
        gain = losses[every, chosen][:, None] - losses
        cost = sizes - sizes[every, chosen][:, None]
        gain[(cost > left) | (cost <= 0)] = 0.0
        best = int(gain.argmax()) if gain.numel() else 0
        if not gain.numel() or gain.flatten()[best] <= 0:
            return chosen
        item, option = divmod(best, losses.shape[1])
        left -= int(cost[item, option])
        chosen[item] = option
