"""What an FP8TrainingEngine saves and loads: the loss scale, counts of steps, and the scales of tensors."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from tilesmith.precision.scaling import Scaling

COUNTS = ("steps", "skipped", "good_steps")
KEYS = ("loss_scale", *COUNTS, "scalings")
_WRAPPER = "_orig_mod."  # torch.compile's, so that a run may go on with or without it
_UNBOUNDED = "amax"  # since the last step: not finite where a batch was not
_LOAD = "FP8TrainingEngine.load_state_dict"


def state_of_scalings(model: nn.Module) -> dict[str, dict[str, Any]]:
    """format, warm and copies of the buffers of each `Scaling` of a model, by its name. Does not ask the device."""
    return {
        name: {
            "format": scaling.format,
            "warm": scaling.warm,
            **{key: buffer.detach().clone() for key, buffer in scaling.named_buffers()},
        }
        for name, scaling in _named(model).items()
    }


def load_scalings(model: nn.Module, states: Mapping[str, Mapping[str, Any]]) -> None:
    """Copy what `state_of_scalings` gave, and `check_state` accepted, into the buffers of a model."""
    with torch.no_grad():
        for name, scaling in _named(model).items():
            scaling.warm = states[name]["warm"]
            for key, buffer in scaling.named_buffers():
                buffer.copy_(states[name][key])


def check_state(model: nn.Module, state: Any) -> None:
    """TypeError unless `state` is a dictionary, ValueError unless it is one of an engine of such a model."""
    if not isinstance(state, Mapping):
        raise TypeError(f"{_LOAD}: state_dict must be a dictionary, got {type(state).__name__}")
    if set(state) != set(KEYS):
        raise ValueError(
            f"{_LOAD}: state_dict has the keys {_some(state)}; it must have {', '.join(KEYS)}: pass what state_dict() "
            "of an FP8TrainingEngine returned"
        )
    scale = state["loss_scale"]
    if not isinstance(scale, float) or not 0 < scale < math.inf:
        raise ValueError(f"{_LOAD}: loss_scale must be a positive, finite float, got {scale!r}")
    for name in COUNTS:
        count = state[name]
        if not isinstance(count, int) or isinstance(count, bool) or count < 0:
            raise ValueError(f"{_LOAD}: {name} must be an int of at least 0, got {count!r}")
    _check_scalings(_named(model), state["scalings"])


def _check_scalings(scalings: dict[str, Scaling], states: Any) -> None:
    if not isinstance(states, Mapping):
        raise ValueError(f"{_LOAD}: scalings must be a dictionary, got {type(states).__name__}")
    missing, extra = scalings.keys() - states.keys(), states.keys() - scalings.keys()
    if missing or extra:
        told = [f"{verb} {_some(names)}" for verb, names in (("lacks", missing), ("has besides", extra)) if names]
        raise ValueError(
            f"{_LOAD}: scalings {' and '.join(told)}; it must have one for each scale of the model: convert the same "
            "model by the same FP8Config, after the same calls of optimize"
        )
    for name, scaling in scalings.items():
        _check_scaling(name, scaling, states[name])


def _check_scaling(name: str, scaling: Scaling, state: Any) -> None:
    buffers = dict(scaling.named_buffers())
    if not isinstance(state, Mapping) or set(state) != {"format", "warm", *buffers}:
        came = _some(state) if isinstance(state, Mapping) else type(state).__name__
        raise ValueError(f"{_LOAD}: scalings[{name!r}] has {came}; it must have format, warm, {', '.join(buffers)}")
    if state["format"] != scaling.format:
        raise ValueError(
            f"{_LOAD}: scalings[{name!r}] is of the format {state['format']!r}, the model's of {scaling.format!r}; "
            "convert the model by the FP8Config of the run that was saved"
        )
    if not isinstance(state["warm"], bool):
        raise ValueError(f"{_LOAD}: scalings[{name!r}]['warm'] must be a bool, got {state['warm']!r}")
    for key, buffer in buffers.items():
        _check_buffer(f"scalings[{name!r}][{key!r}]", key, buffer, state[key])


def _check_buffer(name: str, key: str, buffer: Tensor, came: Any) -> None:
    if not isinstance(came, Tensor):
        raise ValueError(f"{_LOAD}: {name} must be a tensor, got {type(came).__name__}")
    if came.shape != buffer.shape or came.dtype != buffer.dtype or came.device.type == "meta":
        told = "; histories have amax_history_length values, an FP8Config's" if key == "history" else ""
        raise ValueError(
            f"{_LOAD}: {name} is {came.dtype} {list(came.shape)} on {came.device}; it must be {buffer.dtype} "
            f"{list(buffer.shape)} with data{told}"
        )
    # On a GPU this would wait for the device; a FakeTensor has no values.
    read = key != _UNBOUNDED and came.device.type == "cpu" and type(came) is Tensor
    if read and not ((came >= 0) & (came < math.inf)).all():
        raise ValueError(f"{_LOAD}: {name} must be finite and at least 0, got {came.tolist()}")


def _named(model: nn.Module) -> dict[str, Scaling]:
    return {name.replace(_WRAPPER, ""): m for name, m in model.named_modules() if isinstance(m, Scaling)}


def _some(names: Any) -> str:
    ordered = sorted(map(str, names))
    return ", ".join(map(repr, ordered[:5])) + (f" and {len(ordered) - 5} others" if len(ordered) > 5 else "")
