"""How much the loss notices an error in each weight: Fisher information, and what tiles lose at each width."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tilesmith.precision.adaptive.calibration import Calibration
from tilesmith.precision.adaptive.config import ACTIVATION_WEIGHT, GRADIENT_WEIGHT, GROUP, TILE, PrecisionConfig
from tilesmith.precision.adaptive.quantizer import group_parameters, nearest

PIECE = 2**24  # weights whose codes are searched at a time


@dataclass
class Seen:
    """What one layer [N, K] saw on the calibration data, added up over rows.

    fisher: [N, K], squares of output gradients times squares of inputs, which is the diagonal of the Fisher information
    of rows that are independent. inputs: [K] and gradients: [N], the sums of either. hessian: [K, K], sums of x x^T.
    rows: those of the layer's own input. positions: those of the model's output, the same for all layers: what an
    expert that few tokens choose does to the loss is spread over all of them.
    """

    fisher: Tensor
    inputs: Tensor
    gradients: Tensor
    hessian: Tensor | None
    rows: int = 0
    positions: int = 0

    def information(self, config: PrecisionConfig) -> Tensor:
        """The Fisher information [N, K] of a position of the data, its factors weighted as the config says."""
        found = self.fisher / max(1, self.positions)
        for weight, default, factor in (
            (config.gradient_weight, GRADIENT_WEIGHT, self.gradients[:, None]),
            (config.activation_weight, ACTIVATION_WEIGHT, self.inputs[None, :]),
        ):
            if weight != default:
                scaled = factor / factor.mean().clamp(min=1e-30)
                found = found * scaled.clamp(min=1e-12) ** (weight / default - 1)
        return found


def observe(
    model: nn.Module, layers: Mapping[str, nn.Linear], calibration: Calibration, hessians: bool
) -> dict[str, Seen]:
    """What each layer sees while the model runs on the calibration batches. A layer that no row reaches, as an expert
    may be, is taken to be reached by one of average information, or it would look as if no error in it mattered.

    The model's parameters and their gradients stay as they are. Raises ValueError where the loss has no gradients.
    """
    made = [name for name, layer in layers.items() if layer.weight.is_inference()]
    if made:
        raise ValueError(
            f"{calibration.argument}: {made[0]}.weight was made in inference mode, which takes no gradients; clone it"
        )
    seen = {name: _nothing(layer, hessians) for name, layer in layers.items()}
    asked = {name: layer.weight.requires_grad for name, layer in layers.items()}
    calls: list[tuple[str, Tensor, Tensor]] = []
    handles = [layer.register_forward_hook(_recorder(name, calls), with_kwargs=True) for name, layer in layers.items()]
    generator = torch.Generator().manual_seed(0)
    try:
        for layer in layers.values():
            layer.weight.requires_grad_(True)
        for batch in calibration.batches:
            with torch.enable_grad():
                total, positions = calibration.objective(model, batch, generator)
                if not total.requires_grad:
                    raise ValueError(
                        f"{calibration.argument}: the loss has no gradients, which show the weights that it notices: "
                        "the model's forward, or loss_fn, runs in torch.no_grad or torch.inference_mode, or detaches"
                    )
                found = torch.autograd.grad(total, [out for _, _, out in calls], allow_unused=True)
            for (name, x, _), dy in zip(calls, found):
                _add(seen[name], x, dy)
            calls.clear()
            for one in seen.values():
                one.positions += positions
    finally:
        for handle in handles:
            handle.remove()
        for name, layer in layers.items():
            layer.weight.requires_grad_(asked[name])
    _suppose([one for one in seen.values() if not one.rows], [one for one in seen.values() if one.rows])
    return seen


def _suppose(unseen: list[Seen], others: list[Seen]) -> None:
    """Give layers that no row reached the information of one row, as an average weight of the others has it."""
    if not unseen or not others:
        return
    average = sum(float(one.fisher.mean()) / one.rows for one in others) / len(others)
    for one in unseen:
        one.fisher.fill_(average)
        one.inputs.fill_(1.0)
        one.gradients.fill_(1.0)


def _nothing(layer: nn.Linear, hessians: bool) -> Seen:
    zeros = layer.weight.new_zeros
    n, k = layer.weight.shape
    hessian = zeros(k, k, dtype=torch.float32) if hessians else None
    return Seen(
        zeros(n, k, dtype=torch.float32).detach(), zeros(k, dtype=torch.float32), zeros(n, dtype=torch.float32), hessian
    )


def _recorder(name: str, calls: list):
    def hook(module: nn.Module, args: tuple, kwargs: dict, out: Tensor) -> Tensor:
        x = args[0] if args else kwargs["input"]
        calls.append((name, x.detach(), out))
        return out.clone()  # what writes into it, such as an activation in place, must leave `out` its gradient

    return hook


@torch.no_grad()
def _add(seen: Seen, x: Tensor, dy: Tensor | None) -> None:
    x = x.flatten(0, -2).float() if x.ndim > 1 else x[None].float()
    if not len(x):
        return
    seen.rows += len(x)
    seen.inputs += x.square().sum(0)
    if seen.hessian is not None:
        seen.hessian += x.t() @ x
    if dy is not None:
        dy = dy.reshape(len(x), -1).float()
        seen.gradients += dy.square().sum(0)
        seen.fisher += dy.square().t() @ x.square()


def tiles(x: Tensor) -> Tensor:
    """[N, K] as [S, 16, G, 64], with zeros for rows that N lacks."""
    padded = F.pad(x, (0, 0, 0, -x.shape[0] % TILE))
    return padded.view(-1, TILE, x.shape[1] // GROUP, GROUP)


def pieces(weight: Tensor) -> Iterator[slice]:
    """Slices of rows, whole strips, of at most `PIECE` weights."""
    step = max(TILE, PIECE // weight.shape[1] // TILE * TILE)
    for first in range(0, weight.shape[0], step):
        yield slice(first, first + step)


@torch.no_grad()
def tile_losses(weight: Tensor, information: Tensor, widths: tuple[int, ...]) -> Tensor:
    """Half the sum of information times squared error for each tile at each width, float64 [S, G, widths]."""
    found = []
    for rows in pieces(weight):
        groups, share = (t[rows].float().unflatten(1, (-1, GROUP)) for t in (weight, information))
        each = []
        for bits in widths:
            b = torch.full((1, 1), bits, device=weight.device)
            error = groups - nearest(groups, *group_parameters(groups, b, share), b)
            each.append(tiles((share * error.square()).flatten(1)).sum((1, 3)).double())
        found.append(torch.stack(each, -1) / 2)
    return torch.cat(found).cpu()


@torch.no_grad()
def tile_scores(weight: Tensor, information: Tensor) -> tuple[Tensor, Tensor]:
    """(h, s), float64 [S, G]: a tile's differential entropy in bits, of a normal distribution of its groups' variance,
    and half the binary logarithm of its mean information."""
    count = tiles(torch.ones_like(weight[:, :1]).expand(-1, weight.shape[1]).float()).sum((1, 3))
    groups = weight.float().unflatten(1, (-1, GROUP))
    variance = tiles((groups - groups.mean(-1, keepdim=True)).square().flatten(1)).sum((1, 3)) / count
    mean = tiles(information.float()).sum((1, 3)) / count
    h = 0.5 * torch.log2(2 * math.pi * math.e * variance.double().clamp(min=1e-30))
    return h.cpu(), 0.5 * torch.log2(mean.double().clamp(min=1e-30)).cpu()


def entropy_losses(h: Tensor, s: Tensor, widths: tuple[int, ...]) -> Tensor:
    """What tiles of these scores lose at each width, [S, G, widths]: 4^(h + s - bits), a normal source at its rate."""
    bits = torch.tensor(widths, dtype=torch.float64)
    return 4.0 ** ((h + s)[..., None] - bits)
