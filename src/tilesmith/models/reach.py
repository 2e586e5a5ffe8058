"""When a swapped module runs its original forward: no kernel for its device, or a hook that an op would bypass."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from tilesmith.engine import ops as declared
from tilesmith.engine import torch_private
from tilesmith.engine.backends import REFERENCE, missing
from tilesmith.engine.choice import pinned
from tilesmith.rewrite import CALLS, Report, original_class, probe
from tilesmith.rewrite import observed as hooked


def reaches(op: str, x: Tensor) -> bool:
    """True when a kernel other than the reference can serve `op` on the device of `x`, or the caller has pinned one."""
    return reaches_device(op, x.device.type)


@torch_private.constant_in_graphs
def reaches_device(op: str, kind: str) -> bool:
    """The same for the devices of a type."""
    return bool(pinned(op)) or _has_kernel(op, kind)


def observed(module: nn.Module) -> bool:
    """Whether somebody sees or changes what `module` takes and returns in this call. What outlasts the call, such as a
    recording, asks for `has_own_hooks` instead, and each time for `capturing`."""
    return hooked(module) and (torch.compiler.is_compiling() or not _captures_idly(module))


_CAPTURING = "transformers.utils.output_capturing"


def _collector() -> Any:
    return getattr(sys.modules.get(_CAPTURING), "_active_collector", None)


def capturing() -> bool:
    """Whether hooks of transformers keep what modules return in this call: `output_attentions`, `output_hidden_states`
    and alike were asked for."""
    collector = _collector()
    return collector is not None and bool(collector.get())


def watches(hook: Any) -> bool:
    """Whether a hook on what modules return is not one of those that transformers leaves on them for good where
    `output_attentions` or `output_hidden_states` was asked for once. These do nothing but while `capturing()`."""
    return _collector() is None or getattr(hook, "__module__", "") != _CAPTURING


def has_own_hooks(module: nn.Module) -> bool:
    """Whether a module has hooks, or a forward put on it, beside those hooks of transformers."""
    others = module._forward_pre_hooks, module._backward_hooks, module._backward_pre_hooks
    return any(others) or "forward" in module.__dict__ or any(map(watches, module._forward_hooks.values()))


def _captures_idly(module: nn.Module) -> bool:
    """Whether the hooks of a module do nothing, in a call without gradients. With gradients they count: a checkpointed
    block runs again outside of the call that asked."""
    return not (torch.is_grad_enabled() or capturing() or has_own_hooks(module))


Settings = tuple[tuple[str, Any], ...]  # of `probe.settings_of`


class PassedOver(NamedTuple):
    """A child that an op passes over: its name, its class, and its settings, such as a GELU's `approximate`."""

    name: str
    cls: type
    settings: Settings


def passed_over(children: Iterable[tuple[str, nn.Module]]) -> tuple[PassedOver, ...]:
    """What is to be remembered of children, given by (name, module)."""
    return tuple(PassedOver(name, original_class(type(child)), probe.settings_of(child)) for name, child in children)


def untouched(children: tuple[PassedOver, ...], own: Settings = ()) -> Callable[[nn.Module], bool]:
    """What tells of a module whether it has the settings `own`, whether the children that an op passes over are still
    of these classes with these settings, and whether nobody observes them."""
    classes = {child.name: child.cls for child in children}
    settings = {child.name: child.settings for child in children}

    @torch_private.constant_in_graphs
    def is_original(name: str, cls: type) -> bool:
        return original_class(cls) is classes[name]

    def as_it_was(module: nn.Module, name: str) -> bool:
        child = module._modules.get(name)
        return is_original(name, type(child)) and not observed(child) and has_settings(child, settings[name])

    if not own:  # an empty tuple, too, would be a guard of each compiled layer
        return lambda module: all(as_it_was(module, name) for name in classes)
    return lambda module: has_settings(module, own) and all(as_it_was(module, name) for name in classes)


def has_settings(module: nn.Module, wanted: Settings) -> bool:
    """Whether the attributes of a module are still those by which it was recognised."""
    held = module.__dict__
    return all(held.get(name) == value for name, value in wanted)


def all_observed() -> str:
    """Why nothing is replayed from a recording, which calls no module, and no compiled block run, whose code was traced
    without such hooks; "" where no hooks of all modules are on."""
    if not torch_private.hooks_of_all_modules():
        return ""
    return "hooks of all modules are on (torch.nn.modules.module.register_module_forward_hook and alike)"


def ran(module: nn.Module, op: str) -> None:
    """Count a call of `op` on behalf of a swapped module, for its model's report; compiled code counts nothing."""
    if not torch.compiler.is_compiling():
        calls = module.__dict__.get(CALLS)
        if calls is not None:
            calls[op] = calls.get(op, 0) + 1


def serves(op: str, kind: str) -> bool:
    """Whether something of the library computes `op` on a type of device: the loss in chunks runs on each."""
    return op == "linear_cross_entropy" or reaches_device(op, kind)


def described(report: Report, kind: str, *more: str) -> Report:
    """`report` with what its replacements do on a type of device, and more sentences."""
    ops = {op: serves(op, kind) for row in report.replaced for op in row.ops}
    return replace(report, effects=(*effects(ops, kind), *more), device=kind, served=not ops or any(ops.values()))


def effects(ops: Iterable[str], kind: str) -> tuple[str, ...]:
    """What replacements by `ops` do on a type of device, in sentences."""
    if kind == "meta":
        return ()
    ops = list(dict.fromkeys(ops))
    device = torch.device(kind)
    served = {op: [b for b in declared()[op].backends() if b != REFERENCE and missing(b, device) is None] for op in ops}
    own = [op for op in ops if not serves(op, kind)]
    told, modules = [], [op for op in own if op != "attention"]
    if modules:
        told.append(f"On {kind} no kernel serves {', '.join(modules)}: these modules compute as before, no faster.")
    if "attention" in own:
        told.append(f"On {kind} no kernel serves attention: PyTorch's own attention runs.")
    ours = [f"{op} ({', '.join(served[op]) or 'reference'})" for op in ops if op not in own]
    if ours:
        told.append(f"These run on {kind}: {'; '.join(ours)}.")
    return tuple(told)


@functools.cache
def _has_kernel(op: str, kind: str) -> bool:
    device = torch.device(kind)
    return any(missing(backend, device) is None for backend in declared()[op].backends() if backend != REFERENCE)
