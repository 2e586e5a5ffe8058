"""`fit_sequence`: what of a long sequence's step is kept where, so that it fits one device."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from tilesmith.engine.argument_checks import size
from tilesmith.engine.memory import GB, MemoryConfig, human_size, workspaces
from tilesmith.engine.model_state import state_preserved
from tilesmith.hardware.capacity import capacity_of
from tilesmith.models.blocks import BlockForm
from tilesmith.models.checkpoints import (
    PLAN,
    Keep,
    Keeper,
    Shelf,
    attach,
    checkpointed_layers,
    detach,
    is_attached,
    stacks_of,
    switch_of,
)
from tilesmith.models.layers.tiles import TILE, TiledForm, gated_mlps, is_tiled
from tilesmith.models.sizing.layer_costs import captured, kinds_of, layer_line, refuse_positions, tile_of
from tilesmith.models.sizing.loss_costs import loss_costs
from tilesmith.models.sizing.memory_estimate import held
from tilesmith.models.sizing.step_costs import KEEPS, Line, StepCosts
from tilesmith.rewrite import forms, original_class, swap, unswap

COPYING = ("cpu", "cuda", "xpu")  # devices that host memory is copied to and from
CHOICES = ("auto", *KEEPS)
PROBED = {"cpu": 256}  # tokens of the longer of two runs of a layer
PROBED_ELSEWHERE = 32768  # a hidden state of a quarter of a gigabyte, beside which what does not grow is small
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
        return "\n".join([*lines, *self._idle()])

    def _idle(self) -> list[str]:
        """Why layers are not checkpointed at present, in lines."""
        if self._model is None or not is_attached(self._model):
            return []
        layers = list(checkpointed_layers(self._model).values())
        told = []
        off = sum(not layer.gradient_checkpointing for layer in layers)
        if off:
            how = f"model.{switch_of(self._model)}() switches it on, and the plan holds"
            told.append(f"  checkpointing of {off} layers was switched off, so their activations are kept: {how}")
        if not all(layer.training for layer in layers):
            told.append("  the model is in evaluation mode, in which no layer is checkpointed: call model.train()")
        return told


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
    To measure what a layer takes, one layer of each kind is run forward and backward on a few tokens; the model is left
    unchanged. On a CPU the plan counts what operators return, but not the memory that they use while they run.

    An earlier plan of the model is undone first, even if the new one is then refused.

    The plan holds while the model trains: in evaluation mode no layer is checkpointed. It also stays when a trainer
    switches on gradient checkpointing, whose arguments are then ignored. ``print(plan)`` says where it is off.

    Args:
        model: a transformers model of decoder layers, wrapped (PEFT) or not.
        tokens, batch: the tokens of a sequence and the sequences of a step. Smaller steps may be run, and larger ones
        too if they fit.
        memory: bounds of the whole step on the device, parameters included: at most `max_memory_gb`, and
            `target_memory_gb` if that is possible. None: what the device has.
        keep: "device": inputs as they are. "host": in host memory, as they are; on an accelerator in pinned memory,
            copied on a separate stream while layers compute. With both, gradients are those of plain checkpointing,
            bit for bit. "e4m3": on the device in 8 bits with a factor for each token, so that a layer is differentiated
            at an input in which each element is off by at most 1/16, about 2.6 % root mean square. "auto": on the
            device what fits; else the first layers' in host memory; else as few as possible in e4m3.
        host_memory_gb: host memory to take at most, in GB of 10^9 bytes. None: what is available, less 4 GB.
        tile_tokens: tokens of a tile of an MLP. None: as many as need no more than half a hidden state of all tokens,
            but no fewer than 128.

    Returns:
        The plan. `plan.undo()` takes it back, as `tilesmith.undo(model)` does together with `optimize`.

    Raises:
        TypeError: an argument of another type. ValueError: no layers that transformers can checkpoint; a model whose
        inputs are not `input_ids`; more tokens than a table of positions has; blocks recorded or compiled by
        `optimize`; parameters on several devices or on meta; another `keep`; `tile_tokens` where no MLP is gated; or
        nothing fits, with the bytes that are missing and the most tokens that would.
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
    if tile_tokens is not None and not mlps:
        raise ValueError(
            f"fit_sequence: tile_tokens is {tile_tokens}, but {original_class(type(model)).__name__} has no gated MLP, "
            "and only these are tiled; leave it out"
        )
    shelf = Shelf(device)
    try:
        with torch.inference_mode(False), state_preserved(model):
            refuse_positions(model, tokens)
            kinds = kinds_of(list(layers.values()))
            calls = [captured(model, kinds, *shape) for shape in _probed(tokens, batch, device)]
            hidden = calls[-1][0].x
            columns, itemsize = hidden.shape[-1], hidden.element_size()
            tile = tile_of(mlps, hidden, total, tile_tokens)
            lines = [layer_line(k, list(c), mlps, tile, total, batch, shelf) for k, c in zip(kinds, zip(*calls))]
            layer = max(lines, key=lambda line: line(total))
        costs = _costs(model, len(layers), columns, itemsize, layer, device, memory, host_memory_gb)
        keeps = costs.choose(total, keep)
        if keeps is None:
            raise ValueError(_refusal(costs, total, keep))
        tiled = _apply(layers.values(), keeps, mlps, tile, total, shelf)
        for stack in stacks_of(model, layers):
            attach(stack, Keeper(Keep(), shelf))
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
            "of transformers that support gradient checkpointing are supported"
        )
    given = getattr(model, "main_input_name", "input_ids")
    if given != "input_ids":
        raise ValueError(
            f"fit_sequence: {name} takes {given}; models of input_ids are supported, whose rows are tokens"
        )
    config = getattr(model, "config", None)
    if getattr(config, "is_encoder_decoder", False):
        raise ValueError(f"fit_sequence: {name} has an encoder and a decoder; models of one stack are supported")
    fixed = [n for n, layer in layers.items() if any(isinstance(form, BlockForm) for form in forms(layer))]
    if fixed:
        raise ValueError(
            f"fit_sequence: {fixed[0]} is recorded or compiled by optimize(graphs=..., compile=...); optimize the "
            "model without these, which gain nothing where a layer takes seconds"
        )
    devices = {p.device for p in model.parameters()}
    if len(devices) != 1:
        found = ", ".join(sorted(map(str, devices)))
        raise ValueError(f"fit_sequence: the parameters are on {found}; one device is supported")
    (device,) = devices
    if device.type == "meta":
        raise ValueError("fit_sequence: the parameters are on meta; load the model onto its device first")
    return device


def _probed(tokens: int, batch: int, device: torch.device) -> list[tuple[int, int]]:
    """Rows and tokens of the runs of a layer: whole sequences, or one that is cut."""
    many = min(tokens * batch, PROBED.get(device.type, PROBED_ELSEWHERE))
    counts = (max(1, many // 4), max(1, many // 2), many)
    return list(dict.fromkeys((max(1, n // tokens), min(n, tokens)) for n in counts))


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
    loss = loss_costs(model, itemsize, device)
    return StepCosts(layers, columns, itemsize, fixed, layer, target, limit, host, loss)


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
    } | ({} if costs.loss is None else {"the loss, before the layers' backwards": costs.loss(total)})


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
