"""Packed models as safetensors files, and back."""

from __future__ import annotations

import dataclasses
import json
import os
from enum import Enum
from typing import Any

import torch
from torch import Tensor, nn

from tilesmith import _install
from tilesmith.precision.adaptive.config import (
    AllocationStrategy,
    PrecisionConfig,
    PrecisionFormat,
    QuantizationMode,
)
from tilesmith.precision.adaptive.layer import PARTS, PackedLinear
from tilesmith.precision.adaptive.layers import check_model, device_of, eligible, place, structure_of
from tilesmith.precision.adaptive.module import Made, UltraPrecisionModule

OP = "load_ultra_precision_module"
FORMAT = "tilesmith packed 1"
KINDS = {
    "base_precision": PrecisionFormat,
    "allocation_strategy": AllocationStrategy,
    "quantization_mode": QuantizationMode,
}


def save(packed: UltraPrecisionModule, path: str | os.PathLike) -> None:
    """Write the tensors of a packed model once each, and what its layers are, to a safetensors file at `path`."""
    save_file = _safetensors("save_file")
    tensors: dict[str, Tensor] = {}
    aliases: dict[str, str] = {}
    names: dict[tuple, str] = {}
    for name, tensor in packed.model.state_dict().items():
        kind = (tensor.device, tensor.untyped_storage().data_ptr(), tensor.storage_offset(), tensor.shape)
        if tensor.numel() and kind in names:
            aliases[name] = names[kind]
        else:
            names[kind], tensors[name] = name, tensor.detach().contiguous()
    layers = {n: m.out_features for n, m in packed.model.named_modules() if isinstance(m, PackedLinear)}
    made = dataclasses.asdict(packed._made)
    config = {n: v.value if isinstance(v, Enum) else v for n, v in dataclasses.asdict(packed.config).items()}
    said = {"format": FORMAT, "layers": layers, "aliases": aliases, "made": made, "config": config}
    save_file(tensors, os.fspath(path), metadata={"tilesmith": json.dumps(said)})


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
    safe_open = _safetensors("safe_open")
    said, tensors = _read(safe_open, os.fspath(path))
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


def _read(safe_open: Any, path: str) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """What a file says of the packed model, and its tensors. ValueError where it is none, or says what makes no
    sense."""
    if not os.path.isfile(path):
        raise FileNotFoundError(f"{path}: there is no such file")
    try:
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata()
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except Exception as problem:  # safetensors' own, of which every version has another
        raise ValueError(f"{path} is not a safetensors file: {problem}") from problem
    try:
        said = json.loads((metadata or {}).get("tilesmith", "{}"))
        format = said.get("format")
    except (ValueError, AttributeError) as problem:
        raise ValueError(f"{path} is not a packed model: its metadata cannot be read: {problem}") from problem
    if format != FORMAT:
        raise ValueError(f"{path} is not a packed model: its format is {format!r}, known is {FORMAT!r}")
    try:
        config = {n: KINDS[n](v) if n in KINDS else v for n, v in said["config"].items()}
        said |= {"config": PrecisionConfig(**config), "made": Made(**said["made"])}
        if not all(isinstance(rows, int) for rows in said["layers"].values()):
            raise TypeError("layers must have numbers of rows")
        tensors |= {name: tensors[source] for name, source in said["aliases"].items()}
    except (KeyError, TypeError, ValueError, AttributeError) as problem:
        told = f"it lacks {problem}" if isinstance(problem, KeyError) else problem
        raise ValueError(f"{path}: the file's metadata of the packed model is incomplete: {told}") from problem
    return said, tensors


def _safetensors(name: str) -> Any:
    """`safe_open` or `save_file`; ImportError says what to install."""
    try:
        import safetensors
        import safetensors.torch
    except ImportError as problem:
        raise ImportError(f"packed models are safetensors files: {_install.command('cli')}") from problem
    return safetensors.safe_open if name == "safe_open" else safetensors.torch.save_file
