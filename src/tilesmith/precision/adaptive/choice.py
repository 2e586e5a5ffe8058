"""The widths of all tiles of a model for a number of bytes, by each strategy."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor, nn

from tilesmith.precision.adaptive.allocation import allocate
from tilesmith.precision.adaptive.config import GROUP, TILE, AllocationStrategy, PrecisionConfig
from tilesmith.precision.adaptive.layer import code_bytes, overhead_bytes
from tilesmith.precision.adaptive.sensitivity import Seen, entropy_losses, tile_losses, tile_scores

Widths = dict[str, Tensor]


def tile_shape(layer: nn.Linear) -> tuple[int, int]:
    """(S, G) of a layer's weight."""
    return -(-layer.out_features // TILE), layer.in_features // GROUP


def uniform(layers: Mapping[str, nn.Linear], width: int) -> Widths:
    """One width for all tiles."""
    return {name: torch.full(tile_shape(layer), width, dtype=torch.int64) for name, layer in layers.items()}


def dealt(layers: Mapping[str, nn.Linear], options: tuple[int, ...], like: Widths) -> Widths:
    """Two neighbouring widths for as many bytes as `like` takes, but for less than one step of a tile: the best that
    can be had without looking at the weights. Which tiles get the wider is drawn with a fixed seed."""
    bits, count = sum(int(w.sum()) for w in like.values()), sum(w.numel() for w in like.values())
    low = max(w for w in options if w * count <= bits)
    high = min((w for w in options if w > low), default=low)
    flat = torch.full((count,), low, dtype=torch.int64)
    if high > low:
        wide = (bits - low * count) // (high - low)
        flat[torch.randperm(count, generator=torch.Generator().manual_seed(0))[:wide]] = high
    parts = flat.split([like[name].numel() for name in layers])
    return {name: part.view(tile_shape(layer)) for (name, layer), part in zip(layers.items(), parts)}


def widest(layers: Mapping[str, nn.Linear], widths: tuple[int, ...], budget: int) -> int:
    """The widest uniform width whose layers take at most `budget` bytes; ValueError where not even the narrowest
    fits."""
    sizes = {w: sum(layer_bytes(layer, w) for layer in layers.values()) for w in widths}
    fitting = [w for w in widths if sizes[w] <= budget]
    if not fitting:
        raise ValueError(f"at {widths[0]} bits the layers take {sizes[widths[0]]} bytes; the budget is {budget}")
    return fitting[-1]


def layer_bytes(layer: nn.Linear, width: int) -> int:
    """Bytes of a layer packed in one width, its bias left out."""
    strips, groups = tile_shape(layer)
    return strips * groups * code_bytes(width) + overhead_bytes(layer.out_features, layer.in_features)


def by_tile(
    layers: Mapping[str, nn.Linear],
    information: Mapping[str, Tensor],
    config: PrecisionConfig,
    budget: int,
) -> tuple[Widths, dict[str, float]]:
    """Widths by ENTROPY_BASED or FISHER, and each layer's share of the loss that they predict."""
    losses = {}
    for name, layer in layers.items():
        weight = layer.weight.detach()
        if config.allocation_strategy is AllocationStrategy.FISHER:
            losses[name] = tile_losses(weight, information[name], config.widths)
        else:
            losses[name] = entropy_losses(*tile_scores(weight, information[name]), config.widths)
    flat = torch.cat([x.flatten(0, 1) for x in losses.values()])
    sizes = torch.tensor([code_bytes(w) for w in config.widths]).expand(len(flat), -1)
    left = budget - sum(overhead_bytes(layer.out_features, layer.in_features) for layer in layers.values())
    chosen = allocate(flat, sizes, left)
    predicted = flat.gather(1, chosen[:, None])[:, 0]
    widths, shares, first = {}, {}, 0
    known = torch.tensor(config.widths)
    for name, layer in layers.items():
        strips, groups = tile_shape(layer)
        part = slice(first, first + strips * groups)
        widths[name], shares[name] = known[chosen[part]].view(strips, groups), float(predicted[part].sum())
        first = part.stop
    return widths, shares


def by_layer(
    layers: Mapping[str, nn.Linear],
    measured: Callable[[str, int], float],
    config: PrecisionConfig,
    budget: int,
) -> tuple[Widths, dict[str, float]]:
    """Widths by MEASURED: `measured(name, width)` is the loss with that layer alone packed, over the original's."""
    table = torch.tensor([[measured(name, w) for w in config.widths] for name in layers], dtype=torch.float64)
    table = torch.cummin(table, 1).values  # what more bits lose more by is noise
    sizes = torch.tensor([[layer_bytes(layer, w) for w in config.widths] for layer in layers.values()])
    chosen = allocate(table, sizes, budget)
    widths = {}
    for (name, layer), option in zip(layers.items(), chosen.tolist()):
        widths[name] = torch.full(tile_shape(layer), config.widths[option], dtype=torch.int64)
    return widths, {name: float(table[i, option]) for i, (name, option) in enumerate(zip(layers, chosen.tolist()))}


def informations(seen: Mapping[str, Seen], config: PrecisionConfig) -> dict[str, Tensor]:
    """Each layer's Fisher information as the config weights it."""
    return {name: one.information(config) for name, one in seen.items()}
