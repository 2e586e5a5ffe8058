"""Which layers of a model are packed, and what a model's tensors take."""

from __future__ import annotations

import ast
import contextlib
import copy
import functools
import inspect
import types
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from tilesmith.engine.argument_checks import present
from tilesmith.engine.model_state import buffers_kept, random_numbers_kept
from tilesmith.precision.adaptive.adapters import reason_to_leave, wrappers_of
from tilesmith.precision.adaptive.config import PrecisionFormat
from tilesmith.precision.adaptive.layer import misfit_of
from tilesmith.precision.experts import stacked
from tilesmith.rewrite import CannotRespell, forms, observed, original_class, parse

_ALONE = {"BiasForm", "HeadForm"}  # what `optimize` makes of a linear layer by itself; packed, it needs neither


def check_model(op: str, model: nn.Module) -> None:
    """TypeError for what is no module; ValueError for parameters on meta and for those that are not finite."""
    if not isinstance(model, nn.Module):
        raise TypeError(f"{op}: model must be a torch.nn.Module, got {type(model).__name__}")
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if tensor.device.type == "meta":
            raise ValueError(f"{op}: {name} is on meta; load the weights first")


def device_of(op: str, device: Any) -> torch.device | None:
    """A device that a packed model can be on, or None; ValueError for one that there is not, and for meta."""
    if device is None:
        return None
    return present(op, "device", device)


def eligible(model: nn.Module) -> tuple[dict[str, nn.Linear], dict[str, str]]:
    """The layers to pack by name, and why the other linear layers and stacked experts stay."""
    owners: dict[int, list[str]] = {}
    for prefix, module in model.named_modules(remove_duplicate=True):
        for name, p in module._parameters.items():
            if p is not None:
                owners.setdefault(id(p), []).append(f"{prefix}.{name}".lstrip("."))
    chosen, left = {}, {}
    wrappers, readers = wrappers_of(model), _readers(model)
    for name, module in model.named_modules():
        if stacked(module):
            left[name] = "its weights are stacked experts, [experts, rows, columns]; only linear layers are packed"
        if not isinstance(module, nn.Linear):
            continue
        shared = [owner for owner in owners.get(id(module.weight), []) if owner != f"{name}.weight".lstrip(".")]
        if original_class(type(module)) is not nn.Linear:
            left[name] = f"it is a {type(module).__module__}.{type(module).__name__}, not nn.Linear itself"
        elif joined := sorted({type(form).__name__ for form in forms(module)} - _ALONE):
            left[name] = f"optimize computes it with others ({', '.join(joined)}); pack the model before optimize"
        elif "forward" in module.__dict__ or hasattr(module, "parametrizations"):
            left[name] = "its forward or its weight was replaced on the instance"
        elif observed(module):
            left[name] = "it has hooks, which nobody would call on a packed layer; remove them, or hook what holds it"
        elif id(module) in readers:
            left[name] = f"the forward of {readers[id(module)]} reads its weight, which a packed layer has not"
        elif adapter := reason_to_leave(name, wrappers):
            left[name] = adapter
        elif shared:
            left[name] = f"its weight is also {', '.join(shared)}"
        elif module.weight.numel() and not bool(module.weight.detach().abs().max() <= 30000.0):
            left[name] = "its weight has elements that are not finite or exceed 30000, as scales in float16 cannot"
        else:
            misfit = misfit_of(module)
            left |= {name: misfit} if misfit else {}
            chosen |= {} if misfit else {name: module}
    return chosen, left


def _readers(model: nn.Module) -> dict[int, str]:
    """By ids of layers the class whose forward reads their weight beside calling them, as T5's asks for its dtype."""
    found = {}
    for holder in model.modules():
        cls = original_class(type(holder))
        for name in _weights_read(cls) & holder._modules.keys():
            found[id(holder._modules[name])] = cls.__name__
    return found


@functools.cache
def _weights_read(cls: type) -> frozenset[str]:
    """The children NAME of which a forward reads `self.NAME.weight`, as far as its source tells."""
    forward = inspect.unwrap(cls.forward)
    try:
        tree = parse(forward) if isinstance(forward, types.FunctionType) else None
    except CannotRespell:
        tree = None
    if tree is None or not tree.args.args:
        return frozenset()
    own, chains = tree.args.args[0].arg, (ast.unparse(n) for n in ast.walk(tree) if isinstance(n, ast.Attribute))
    parts = (chain.split(".") for chain in chains)
    return frozenset(part[1] for part in parts if len(part) == 3 and part[0] == own and part[2] == "weight")


def tensors_of(model: nn.Module) -> list[Tensor]:
    """The parameters and buffers of a model, those of the same memory once."""
    found: dict[tuple, Tensor] = {}
    for tensor in (*model.parameters(), *model.buffers()):
        place = tensor.untyped_storage().data_ptr(), tensor.storage_offset()  # several may lie in one storage
        found.setdefault((tensor.device, *place, tensor.numel()), tensor)
    return list(found.values())


def bytes_of(model: nn.Module) -> int:
    """Bytes of a model's parameters and buffers, measured from the tensors."""
    return sum(t.nbytes for t in tensors_of(model))


def base_bytes(model: nn.Module, base: PrecisionFormat) -> int:
    """Bytes of a model's parameters if each floating number took the base format's; buffers as they are."""
    parameters = {id(p): p for p in model.parameters()}
    total = bytes_of(model)
    for p in parameters.values():
        if p.is_floating_point():
            total += p.numel() * base.bits // 8 - p.nbytes
    return total


def structure_of(model: nn.Module, device: torch.device | None) -> nn.Module:
    """A copy of a model's modules around the same parameters and buffers; around copies where they have to move, and of
    buffers that inference mode made, which no backward takes."""
    tensors = tensors_of(model)
    if device is not None and any(t.device != device for t in tensors):
        return copy.deepcopy(model).to(device)
    memo = {id(p): p for p in model.parameters()}
    memo |= {id(b): b.clone() if b.is_inference() else b for b in model.buffers()}
    return copy.deepcopy(model, memo)


@contextlib.contextmanager
def unchanged(model: nn.Module) -> Iterator[None]:
    """Inside, the model is run; afterwards its buffers, which the original shares, and the random numbers of its
    devices are what they were."""
    with buffers_kept(model), random_numbers_kept(t.device for t in tensors_of(model)):
        yield


def place(model: nn.Module, modules: Mapping[str, nn.Module]) -> nn.Module:
    """Put modules at their names, and wherever else the module that was there stands. Returns the model, which is
    another module where one was put at its root, ""."""
    swaps = {id(model.get_submodule(name)): module for name, module in modules.items()}
    for parent in list(model.modules()):
        for name, child in parent._modules.items():
            if id(child) in swaps:
                parent._modules[name] = swaps[id(child)]
    return swaps.get(id(model), model)
