"""load_ultra_precision_module: a packed model from its file."""

from __future__ import annotations

import os
from typing import Any

import torch
from torch import Tensor, nn

from tilesmith.precision.adaptive.layer import PARTS, PackedLinear
from tilesmith.precision.adaptive.layers import check_model, device_of, eligible, place, structure_of
from tilesmith.precision.adaptive.module import UltraPrecisionModule
from tilesmith.precision.adaptive.packed_file import read

OP = "load_ultra_precision_module"


@torch.inference_mode(False)  # adapters could not be trained on tensors that are made in it
def load_ultra_precision_module(
    model: nn.Module, path: str | os.PathLike, device: torch.device | None = None
) -> UltraPrecisionModule:
    """A packed model from the file that `UltraPrecisionModule.save_packed` wrote.

    Args:
        model: a model of the architecture that was packed, with any weights; it is not changed.
        path: the file. device: where the packed model goes; None: where the model is.

    Raises:
        ImportError: safetensors is not installed. ValueError: the file is not a packed model, or is of another
        architecture; missing and unexpected entries are named.
    """
    check_model(OP, model)
    device = device_of(OP, device)
    said, tensors = read(os.fspath(path))
    linear, left = eligible(model)
    absent = sorted(set(said["layers"]) - set(linear))
    if absent:
        raise ValueError(
            f"{path}: the model has no linear layer {absent[0]!r} that could be packed "
            f"({left.get(absent[0], 'nothing linear has this name')}); {len(absent)} lack"
        )
    place_on = device or next((p.device for p in model.parameters()), torch.device("cpu"))
    tensors = {name: tensor.to(place_on) for name, tensor in tensors.items()}
    work = structure_of(model, place_on)
    work = place(work, {name: _layer(path, name, linear[name], rows, tensors) for name, rows in said["layers"].items()})
    wanted = set(work.state_dict())
    if wanted != set(tensors):
        odd = sorted(wanted ^ set(tensors))
        raise ValueError(
            f"{path} is of another architecture: {', '.join(odd[:5])} on one side only ({len(odd)} in all)"
        )
    _take(path, work, tensors)
    return UltraPrecisionModule(work, said["config"], said["made"])


def _layer(path: Any, name: str, layer: nn.Linear, rows: int, tensors: dict[str, Tensor]) -> PackedLinear:
    parts = {part: tensors.get(f"{name}.{part}".lstrip(".")) for part in PARTS}
    lacking = [part for part, tensor in parts.items() if tensor is None]
    if lacking:
        raise ValueError(f"{path}: {name or 'the model'} lacks {', '.join(lacking)}")
    made = PackedLinear(parts, rows, layer.bias)
    if (made.out_features, made.in_features) != (layer.out_features, layer.in_features):
        raise ValueError(
            f"{path}: {name or 'the model'} is {made.out_features} x {made.in_features}, the model's "
            f"{layer.out_features} x {layer.in_features}"
        )
    return made


def _take(path: Any, work: nn.Module, tensors: dict[str, Tensor]) -> None:
    """Give a model these tensors in place of its own, which another model may share."""
    fresh: dict[int, nn.Parameter] = {}
    for module_name, module in work.named_modules():
        for table in (module._parameters, module._buffers):
            for name, old in table.items():
                key = f"{module_name}.{name}".lstrip(".")
                if old is None or key not in tensors:
                    continue
                if old.shape != tensors[key].shape:
                    raise ValueError(f"{path}: {key} is {list(tensors[key].shape)}, the model's {list(old.shape)}")
                if table is module._buffers:
                    table[name] = tensors[key]
                elif id(old) not in fresh:
                    fresh[id(old)] = nn.Parameter(tensors[key], old.requires_grad)
                    table[name] = fresh[id(old)]
                else:
                    table[name] = fresh[id(old)]
