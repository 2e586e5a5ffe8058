"""The safetensors file of a packed model: how it is written and read, and checked for what it says."""

from __future__ import annotations

import dataclasses
import json
import os
from enum import Enum
from typing import Any

from torch import Tensor, nn

from tilesmith import _install
from tilesmith.precision.adaptive.config import (
    AllocationStrategy,
    PrecisionConfig,
    PrecisionFormat,
    QuantizationMode,
)
from tilesmith.precision.adaptive.layer import PackedLinear
from tilesmith.precision.adaptive.stats import Made

FORMAT = "tilesmith packed 1"
KINDS = {
    "base_precision": PrecisionFormat,
    "allocation_strategy": AllocationStrategy,
    "quantization_mode": QuantizationMode,
}


def write(path: str | os.PathLike, model: nn.Module, config: PrecisionConfig, made: Made) -> None:
    """Write the tensors of a packed model once each, what its layers are, and how it came about, to a safetensors file
    at `path`."""
    save_file = _safetensors("save_file")
    tensors: dict[str, Tensor] = {}
    aliases: dict[str, str] = {}
    names: dict[tuple, str] = {}
    for name, tensor in model.state_dict().items():
        kind = (tensor.device, tensor.untyped_storage().data_ptr(), tensor.storage_offset(), tensor.shape)
        if tensor.numel() and kind in names:
            aliases[name] = names[kind]
        else:
            names[kind], tensors[name] = name, tensor.detach().contiguous()
    layers = {n: m.out_features for n, m in model.named_modules() if isinstance(m, PackedLinear)}
    fields = {n: v.value if isinstance(v, Enum) else v for n, v in dataclasses.asdict(config).items()}
    said = {"format": FORMAT, "layers": layers, "aliases": aliases, "made": dataclasses.asdict(made), "config": fields}
    save_file(tensors, os.fspath(path), metadata={"tilesmith": json.dumps(said)})


def read(path: str) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """What a file says of the packed model, and its tensors. FileNotFoundError where there is no file, ValueError where
    it is no packed model or says what makes no sense, ImportError without safetensors."""
    safe_open = _safetensors("safe_open")
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
