"""`fit_sequence`: what of a long sequence's step is kept where, so that it fits one device."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from tilesmith.engine import torch_private
from tilesmith.engine.argument_checks import size
from tilesmith.engine.memory import FEWEST_ROWS, GB, MemoryConfig, Need, human_size, workspaces
from tilesmith.engine.timing import peak_memory
from tilesmith.hardware.capacity import capacity_of
from tilesmith.models.blocks import BlockForm
from tilesmith.models.checkpoints import PLAN, Keep, Keeper, Shelf, attach, checkpointed_layers, detach
from tilesmith.models.layers.tiles import TILE, TiledForm, gated_mlps, is_tiled
from tilesmith.models.sizing.memory_estimate import LiveBytes, held
from tilesmith.models.sizing.state import state_preserved
from tilesmith.models.sizing.step_costs import KEEPS, Line, StepCosts
from tilesmith.rewrite import forms, original_class, swap, unswap

COPYING = ("cpu", "cuda", "xpu")  # devices that host memory is copied to and from
CHOICES = ("auto", *KEEPS)
PROBED = {"cpu": 256}  # tokens of the longer of two runs of a layer
PROBED_ELSEWHERE = 32768  # a hidden state of a quarter of a gigabyte, beside which what does not grow is small
TILE_PROBED = {"cpu": 64}
TILE_PROBED_ELSEWHERE = 4096
# Of a device: what its allocator loses between tensors of other sizes. To keep more in host memory costs less than
# running out.
SPARE = 0.05
HOST_SPARE = 4 * GB  # for the process and whoever else runs


@dataclass(frozen=True, eq=False)
class SequencePlan:
    """What `fit_sequence` decided; `print(plan)` says it in words.

    tokens: of the whole batch. keeps: of each layer, the first one first: "device", "e4m3", "host" or "e4m3 on the
    host". tile_tokens: of a tile of the MLPs, 0 where none is tiled; tiled: how many MLPs are. parts: bytes by what
    they are for. peak: predicted, on the device. host: bytes of host memory, pinned on an accelerator, which took
    pin_seconds. longest: about how many tokens would fit with this `keep`. costs: what the step was found to take.
    """

    tokens: int
    keep: str
    keeps: tuple[str, ...]
    tile_tokens: int
    tiled: int
    parts: dict[str, int]
    peak: int
    bound: int
    host: int
    longest: int
    costs: StepCosts
    pin_seconds: float = 0.0
    _model: Any = field(default=None, repr=False)

    def undo(self) -> nn.Module:
        """Take the checkpointing and the tiles back; what `optimize` did stays. Returns the model."""
        return release(self._model)

    def __str__(self) -> str:
        runs: list[tuple[str, int, int]] = []
        for at, keep in enumerate(self.keeps):
            if runs and runs[-1][0] == keep:
                runs[-1] = (keep, runs[-1][1], at)
            else:
                runs.append((keep, at, at))
        lines = [f"{self.tokens:,} tokens: {human_size(self.peak)} of {human_size(self.bound)} on the device"]
        for keep, first, last in runs:
            layers = f"layer {first}" if first == last else f"layers {first} to {last}"
            lines.append(f"  inputs of {layers}: {_WORDS[keep]}")
        lines.append(
            f"  {self.tiled} MLPs in tiles of {self.tile_tokens:,} tokens, computed again in the backward"
            if self.tiled
            else "  no MLP is tiled"
        )
        lines += [f"  {name}: {human_size(count)}" for name, count in self.parts.items()]
        if self.host:
            lines.append(f"  host memory: {human_size(self.host)}, allocated in {self.pin_seconds:.1f} s")
        lines.append(f"  about {self.longest:,} tokens would fit with keep={self.keep!r}")
        return "\n".join(lines)


_WORDS = {
    "device": "as they are, on the device",
    "e4m3": "in e4m3 with a factor for each token, on the device",
    "host": "as they are, in host memory",
    "e4m3 on the host": "in e4m3 with a factor for each token, in host memory",
}


def fit_sequence(
    model: nn.Module,
    tokens: int,
    *,
    batch: int = 1,
    memory: MemoryConfig | None = None,
    keep: str = "auto",
    host_memory_gb: float | None = None,
    tile_tokens: int | None = None,
) -> SequencePlan:
    """Make a training step of `batch` sequences of `tokens` tokens fit the model's device, in place.

        tilesmith.optimize(model)
        plan = tilesmith.fit_sequence(model, 393_216)
        print(plan)

    Each decoder layer is checkpointed (`torch.utils.checkpoint`): only its input is kept, and `keep` says how. Gated
    MLPs are tiled over tokens, forward and backward. Call it after `optimize` and PEFT, with the model on its device.
    To learn what a layer takes, one layer of each kind is run forward and backward on a few tokens; the model is left
    as it was.

    Args:
        model: a transformers model of decoder layers, wrapped (PEFT) or not.
        tokens, batch: of a step. Shorter ones may be run; longer ones run, too, if they fit.
        memory: bounds of the whole step on the device, in which parameters count: at most `max_memory_gb`, and
            `target_memory_gb` where that can be had. None: what the device has.
        keep: "device": inputs as they are. "host": in host memory, as they are; on an accelerator pinned, copied on a
            stream of its own while layers compute. Gradients are those of plain checkpointing, bit for bit, with both.
            "e4m3": on the device in 8 bits with a factor for each token, so that a layer is differentiated at an input
            that is off by at most 1/16 of each element, about 2.6 % in the root of the mean square. "auto": on the
            device what fits; else the first layers' in host memory; else as few as possible in e4m3.
        host_memory_gb: host memory to take at most, in GB of 10^9 bytes. None: what is available, less 4 GB.
        tile_tokens: tokens of a tile of an MLP. None: as many as need no more than half a hidden state of all tokens,
            but no fewer than 128.

    Returns:
        The plan. `plan.undo()` takes it back, as `tilesmith.undo(model)` does together with `optimize`.

    Raises:
        TypeError: an argument of another type. ValueError: no layers that transformers can checkpoint; blocks recorded
        or compiled by `optimize`; parameters on several devices or on meta; another `keep`; or nothing fits, with the
        bytes that are missing and the most tokens that would.
    """
    _check(model, tokens, batch, memory, keep, host_memory_gb, tile_tokens)
    release(model)
    layers = checkpointed_layers(model)
    device = _device(model, layers)
    if keep == "host" and device.type not in COPYING:
        raise ValueError(
            f"fit_sequence: keep='host' needs a device of {', '.join(COPYING)}, which copy to host memory; the model "
            f"is on {device}"
        )
    total = tokens * batch
    mlps = [m for layer in layers.values() for m in gated_mlps(layer).values()]
    shelf = Shelf(device)
    try:
        with state_preserved(model):
            kinds = _kinds(list(layers.values()))
            many = min(total, PROBED.get(device.type, PROBED_ELSEWHERE))
            calls = [_captured(model, kinds, n) for n in dict.fromkeys((max(1, many // 2), many))]
            hidden = calls[-1][0].x
            columns, itemsize = hidden.shape[-1], hidden.element_size()
            tile = _tile(mlps, hidden, total, tile_tokens)
            lines = [_layer_line(k, list(c), mlps, tile, total, shelf) for k, c in zip(kinds, zip(*calls))]
            layer = max(lines, key=lambda line: line(total))
        costs = _costs(model, len(layers), columns, itemsize, layer, device, memory, host_memory_gb)
        keeps = costs.choose(total, keep)
        if keeps is None:
            raise ValueError(_refusal(costs, total, keep))
        tiled = _apply(layers.values(), keeps, mlps, tile, total, shelf)
    except BaseException:
        release(model)
        raise
    if device.type != "cpu":
        held_there = [k.bytes(total, columns, itemsize)[1] for k in keeps if k.host]
        shelf.blocks.reserve(held_there)
    plan = SequencePlan(
        total, keep, tuple(map(str, keeps)), tile if tiled else 0, tiled, _parts(costs, model, total, keeps),
        costs.peak(total, keeps), costs.limit, costs.on_host(total, keeps), costs.longest(keep), costs,
        shelf.blocks.seconds, model,
    )  # fmt: skip
    model.__dict__[PLAN] = plan
    return plan


def release(model: nn.Module) -> nn.Module:
    """Take back what `fit_sequence` did to a model, if it did anything. Returns the model."""
    for module in model.modules():
        if is_tiled(module):
            unswap(module)
    detach(model)
    return model


def _check(model: Any, tokens: Any, batch: Any, memory: Any, keep: Any, host_memory_gb: Any, tile_tokens: Any) -> None:
    if not isinstance(model, nn.Module):
        raise TypeError(f"fit_sequence: model must be a torch.nn.Module, got {type(model).__name__}")
    size("fit_sequence", "tokens", tokens)
    size("fit_sequence", "batch", batch)
    if tile_tokens is not None:
        size("fit_sequence", "tile_tokens", tile_tokens)
    if memory is not None and not isinstance(memory, MemoryConfig):
        raise TypeError(f"fit_sequence: memory must be a MemoryConfig or None, got {type(memory).__name__}")
    if keep not in CHOICES:
        raise ValueError(f"fit_sequence: keep must be one of {', '.join(CHOICES)}, got {keep!r}")
    number = isinstance(host_memory_gb, int | float) and not isinstance(host_memory_gb, bool)
    if host_memory_gb is not None and (not number or not 0 <= host_memory_gb < math.inf):
        raise ValueError(f"fit_sequence: host_memory_gb must be a number of GB, 0 or more, got {host_memory_gb!r}")


def _device(model: nn.Module, layers: dict[str, nn.Module]) -> torch.device:
    name = original_class(type(model)).__name__
    if not layers:
        raise ValueError(
            f"fit_sequence: {name} has no layers that transformers can checkpoint (GradientCheckpointingLayer); models "
            "of transformers that support gradient checkpointing are served"
        )
    config = getattr(model, "config", None)
    if getattr(config, "is_encoder_decoder", False):
        raise ValueError(f"fit_sequence: {name} has an encoder and a decoder; models of one stack are served")
    fixed = [n for n, layer in layers.items() if any(isinstance(form, BlockForm) for form in forms(layer))]
    if fixed:
        raise ValueError(
            f"fit_sequence: {fixed[0]} is recorded or compiled by optimize(graphs=..., compile=...); optimize the "
            "model without these, which gain nothing where a layer takes seconds"
        )
    devices = {p.device for p in model.parameters()}
    if len(devices) != 1:
        found = ", ".join(sorted(map(str, devices)))
        raise ValueError(f"fit_sequence: the parameters are on {found}; one device is served")
    (device,) = devices
    if device.type == "meta":
        raise ValueError("fit_sequence: the parameters are on meta; load the model onto its device first")
    return device


def _kinds(layers: list[nn.Module]) -> list[nn.Module]:
    """One layer of each kind: of a class, sizes of parameters, and type of attention."""
    found: dict[Any, nn.Module] = {}
    for layer in layers:
        shapes = tuple(tuple(p.shape) for p in layer.parameters())
        window = next(filter(None, (getattr(m, "sliding_window", None) for m in layer.modules())), 0)
        found.setdefault((type(layer), shapes, window), layer)
    return list(found.values())


class Captured(NamedTuple):
    """A layer's input [1, tokens, C], and what it is called with besides."""

    x: Tensor
    args: tuple
    kwargs: dict[str, Any]


class _Stop(Exception):
    pass


def _captured(model: nn.Module, kinds: list[nn.Module], tokens: int) -> list[Captured]:
    """What the layers are called with, from a forward that ends when the last of them is reached."""
    found: dict[int, Captured] = {}

    def hook(layer: nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
        x = args[0] if args else kwargs.pop("hidden_states")
        found[id(layer)] = Captured(x.detach(), args[1:], dict(kwargs))
        if len(found) == len(kinds):
            raise _Stop

    hooks = [layer.register_forward_pre_hook(hook, with_kwargs=True) for layer in kinds]
    model.train()
    ids = torch.zeros(1, tokens, dtype=torch.long, device=next(model.parameters()).device)
    try:
        with torch.no_grad():
            model(input_ids=ids, use_cache=False)
    except _Stop:
        pass
    finally:
        for handle in hooks:
            handle.remove()
    missing = [original_class(type(layer)).__name__ for layer in kinds if id(layer) not in found]
    if missing:
        raise ValueError(f"fit_sequence: a forward of input_ids does not reach {missing[0]}; it cannot be measured")
    return [found[id(layer)] for layer in kinds]


def _tile(mlps: list[nn.Module], hidden: Tensor, total: int, tile_tokens: int | None) -> int:
    """Tokens of a tile."""
    if tile_tokens is not None or not mlps:
        return tile_tokens or total
    many = min(hidden.shape[1], TILE_PROBED.get(hidden.device.type, TILE_PROBED_ELSEWHERE))
    few = max(1, many // 2)
    least, most = (_peak(mlps[0], hidden[:, :n]) for n in (few, many))
    line = Line.through(few, least, many, most)
    budget = max(total * hidden.shape[-1] * hidden.element_size() // 2, int(line.base + FEWEST_ROWS * line.slope))
    need = Need(total, line(total), int(line.base), math.ceil(line.slope))
    return _rows(need, budget)


def _rows(need: Need, budget: int) -> int:
    """Tokens of equal tiles, a multiple of `FEWEST_ROWS`, whose need stays within the budget."""
    if need.whole <= budget:
        return need.rows
    most = max(FEWEST_ROWS, (budget - need.base) // max(1, need.row))
    even = -(-need.rows // -(-need.rows // most))
    return -(-even // FEWEST_ROWS) * FEWEST_ROWS


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, tuple | list | dict):
        for each in value.values() if isinstance(value, dict) else value:
            yield from _tensors(each)


def _layer_line(
    layer: nn.Module, calls: list[Captured], mlps: list[nn.Module], tile: int, total: int, shelf: Shelf
) -> Line:
    """What a layer's backward holds beside its input, from runs of these calls with tiles in proportion. What layers
    share, such as angles, is part of it."""
    inside = {id(m) for m in layer.modules()}
    own = [m for m in mlps if id(m) in inside]
    attach(layer, Keeper(Keep(), shelf))
    for mlp in own:
        swap(mlp, TiledForm())
    peaks = []
    try:
        for x, args, kwargs in calls:
            for mlp in own:
                mlp.__dict__[TILE] = max(1, tile * x.shape[1] // total)
            shared = held(_tensors((args, kwargs)))
            peaks.append((x.shape[1], shared + _peak(layer, x, args, kwargs)))
    finally:
        for mlp in own:
            unswap(mlp)
        detach(layer)
    return Line.through(*peaks[0], *peaks[-1])


def _peak(module: nn.Module, x: Tensor, args: tuple = (), kwargs: dict[str, Any] | None = None) -> int:
    """What a forward and backward of `module` hold at their peak besides what is there before, in a second run: in the
    first, kernels are compiled and libraries take workspaces.

    On a CPU what the results of operators take: their scratch memory grows with the square of the tokens there, where
    attention is a plain product.
    """
    trained = [p for p in module.parameters() if p.requires_grad]

    def run() -> None:
        leaf = x.detach().requires_grad_()
        with torch.enable_grad():
            out = module(leaf, *args, **(kwargs or {}))
            loss = _Sum.apply(out[0] if isinstance(out, tuple) else out)
            del out  # what a layer returned is gone when its backward begins, or counted as the next one's input
            loss.backward()
        for p in trained:
            p.grad = None

    run()
    if x.device.type != "cpu" or torch_private.DispatchMode is None:
        return peak_memory(run, x.device)
    with LiveBytes() as live:
        live.ignore(_tensors((x, args, kwargs, [*module.parameters(), *module.buffers()])))
        run()
    return live.peak


class _Sum(torch.autograd.Function):
    """A scalar whose gradient is a tensor of its own in memory, as one from a layer above is."""

    @staticmethod
    def forward(ctx: Any, out: Tensor) -> Tensor:
        ctx.like = out.shape, out.dtype, out.device
        return out.new_zeros(())

    @staticmethod
    def backward(ctx: Any, _: Tensor) -> Tensor:
        shape, dtype, device = ctx.like
        return torch.zeros(shape, dtype=dtype, device=device)


def _costs(
    model: nn.Module, layers: int, columns: int, itemsize: int, layer: Line, device: torch.device,
    memory: MemoryConfig | None, host_memory_gb: float | None,
) -> StepCosts:  # fmt: skip
    parameters, gradients = _resident(model)
    capacity = capacity_of(device)
    if memory is None:
        limit = target = int(capacity.available + parameters - SPARE * capacity.total)
    else:
        limit, target = (int(min(gb, 1e9) * GB) for gb in (memory.limit, memory.target))
    if device.type not in COPYING:
        host = 0
    elif host_memory_gb is not None:
        host = int(host_memory_gb * GB)
    else:
        host = max(0, capacity_of("cpu").available - HOST_SPARE)
    fixed = parameters + gradients + workspaces(device)
    return StepCosts(layers, columns, itemsize, fixed, layer, target, limit, host)


def _resident(model: nn.Module) -> tuple[int, int]:
    """Bytes of parameters with buffers, and of gradients."""
    parameters = held(iter([*model.parameters(), *model.buffers()]))
    return parameters, sum(p.numel() * p.element_size() for p in model.parameters() if p.requires_grad)


def _apply(layers: Any, keeps: tuple[Keep, ...], mlps: list[nn.Module], tile: int, total: int, shelf: Shelf) -> int:
    """Put the plan into the model; returns how many MLPs are tiled."""
    for layer, keep in zip(layers, keeps):
        attach(layer, Keeper(keep, shelf))
    if tile >= total:
        return 0
    for mlp in mlps:
        swap(mlp, TiledForm())
        mlp.__dict__[TILE] = tile
    return len(mlps)


def _parts(costs: StepCosts, model: nn.Module, total: int, keeps: tuple[Keep, ...]) -> dict[str, int]:
    parameters, gradients = _resident(model)
    kept = sum(keep.bytes(total, costs.columns, costs.itemsize)[0] for keep in keeps)
    return {
        "parameters": parameters,
        "gradients of parameters": gradients,
        "inputs of layers kept on the device": kept,
        "one layer's forward and backward": costs.layer(total),
        "one hidden state": costs.hidden(total),
    }


def _refusal(costs: StepCosts, total: int, keep: str) -> str:
    """Why nothing fits, with numbers."""
    candidates = list(costs.candidates(keep))
    served = [k for k in candidates if costs.on_host(total, k) <= costs.host]
    longest = f"about {costs.longest(keep):,} tokens would fit with keep={keep!r}"
    if not served:
        wanted = min(costs.on_host(total, k) for k in candidates)
        return (
            f"fit_sequence: keep={keep!r} takes {human_size(wanted)} of host memory for {total:,} tokens, and "
            f"{human_size(costs.host)} may be taken; raise host_memory_gb, or use keep='auto' or 'e4m3'; {longest}"
        )
    wanted = min(costs.peak(total, k) for k in served)
    other = "" if keep == "auto" else "keep='auto' may fit more; "
    return (
        f"fit_sequence: {total:,} tokens take {human_size(wanted)} on the device at the least with keep={keep!r}, and "
        f"{human_size(costs.limit)} may be taken; {other}{longest}"
    )
