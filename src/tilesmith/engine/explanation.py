"""explain: which kernel serves a call, why, and how."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from tilesmith.engine.argument_checks import flag
from tilesmith.engine.arguments import shown, suggestion
from tilesmith.engine.choice import Asked, Choice, asking, choose, pinned, tried
from tilesmith.engine.families import ops
from tilesmith.engine.kernel import Kernel, in_context
from tilesmith.engine.pins import parse_pin
from tilesmith.engine.registry import PLAIN
from tilesmith.engine.tracing import always
from tilesmith.hardware.detect import Arch, arch_named, arch_of, assuming


def explain(
    op: str | Callable[..., Any],
    *args: Any,
    compiled: bool = False,
    arch: str | None = None,
    gradient: bool = False,
    **kwargs: Any,
) -> Choice | str:
    """Which kernel serves a call and why: `explain("rms_norm", x, weight)`; with a name alone, the op's kernels.

    op: a name, or the op itself, such as `tilesmith.ops.rms_norm`. The other arguments are those of the call, which is
    not made. compiled: as under torch.compile. arch: as on a GPU of that architecture, such as "sm90" (the names are in
    `hardware/arch.toml`); this machine need not have one, and the tensors may be on any device, or on "meta" without
    memory. gradient: explain the call's gradient instead.

    Raises ValueError for an unknown name or arch, TypeError for something that is not an op.
    """
    name = _name_of(op)
    flag("explain", "compiled", compiled)
    flag("explain", "gradient", gradient)
    if arch is not None and not isinstance(arch, str | Arch):
        raise TypeError(f"explain: arch must be the name of an architecture, got {shown(arch)}; write 'sm90'")
    found = ops().get(name)
    if found is None and name in PLAIN:
        return f"{name}: a plain callable ({PLAIN[name][1]}); called as it is, never dispatched"
    if found is None:
        raise ValueError(f"explain: there is no op {name!r}. {suggestion(name, [*ops(), *PLAIN])}")
    if args or kwargs:
        if found.door_function is not None:
            there = arch_named(arch) if isinstance(arch, str) else arch
            with contextlib.nullcontext() if there is None else assuming(there):
                args, kwargs = _asked(found, args, kwargs), {}
        asked = {name: value for name, value in (("arch", arch), ("gradient", gradient)) if value}
        return found.explain(*args, compiled=compiled, **asked, **kwargs)
    return f"{name}{inspect.signature(found.door_function or found)}: kernels {', '.join(found.backends())}"


def _asked(op: Any, args: tuple, kwargs: dict[str, Any]) -> tuple:
    """The arguments with which the op's door would call it."""
    devices = {a.device for a in (*args, *kwargs.values()) if isinstance(a, Tensor) and a.device.type != "cpu"}
    kind = next((device.type for device in devices), "cuda")
    with torch.random.fork_rng(devices, device_type=kind), asking(op.name):  # a door may draw a dropout's seed
        try:
            op.door_function(*args, **kwargs)
        except Asked as asked:
            return asked.arguments
    raise RuntimeError(f"{op.name}: this call runs no kernel")


def _name_of(op: str | Callable[..., Any]) -> str:
    """The name of an op, given as its name, as the op or as the function by which users call it."""
    if isinstance(op, str):
        return op
    named = next((o.name for o in ops().values() if op is o or op is (o.door_function or o)), None)
    if named is None:
        raise TypeError(f"explain: op must be an op or its name, got {shown(op)}")
    return named


def of_call(op: Any, args: tuple, compiled: bool, arch: str | Arch | None, gradient: bool) -> Choice:
    """As `explain` of an op, for all its arguments in order, whose check has yet to be run."""
    if op.autocast:
        args = op._autocast(args)
    op.check(*args)
    device = next(a.device for a in args if isinstance(a, Tensor))
    where = arch_of(device) if arch is None else arch_named(arch) if isinstance(arch, str) else arch
    if gradient:
        if op.vjp is None:
            raise ValueError(f"explain: the gradient of {op.name} has no kernels; its reference is differentiated")
        return _on(op.vjp, op.gradient.arguments(args), device if arch is None else None, where)
    return _here(op, args, device, compiled) if arch is None else _on(op, args, None, where)


def _here(op: Any, args: tuple, device: torch.device, compiled: bool) -> Choice:
    """The choice for a call on the device of its tensors, and how the call is made there."""
    pin = pinned(op.name)
    choice = choose(op, op._describe(*args), pin, device, args, ask=True)
    if compiled and op.decompose is not None and not pin and op.when(*args):
        note = "under torch.compile: traced as plain PyTorch, so that Inductor fuses it with its neighbours"
        if op.when is not always:
            note += ", if it is known then that its tensors are so small; else one opaque call"
        return replace(choice, note=note)
    notes = _told(choice.kernel, args, arch_of(device))
    if compiled:
        notes.append("under torch.compile: one opaque call")
    elif _hides(choice.kernel) and not (torch.is_grad_enabled() and True in op.gradient.needs(args)):
        unseen = ", ".join(op.outputs[op.public :])
        notes.append(f"no gradient is asked for, so nothing is stored for one: {unseen}")
    if not compiled:
        notes += _repeated(op, args, pin)
    notes += filter(None, [tried(choice.kernel, args, pin, device, ask=True).note])
    return replace(choice, note="; ".join(notes))


def _on(op: Any, args: tuple, device: torch.device | None, arch: Any) -> Choice:
    """The choice for tensors as if they were on `device`, or, without one, on any of an architecture."""
    here = device or torch.device(_TYPES.get(arch.kind, "meta"))
    with assuming(arch):
        choice = choose(op, op.described(args, here, arch), pinned(op.name), device or arch, args, ask=True)
        notes = _told(choice.kernel, args, arch)
        configure = getattr(choice.kernel.fn, "configure", None)
        if configure is not None:
            config = configure.on(arch, args, parse_pin(pinned(op.name))[1])
            notes.append("configuration: " + ", ".join(f"{n} {value}" for n, value in config._asdict().items()))
    return replace(choice, note="; ".join(notes))


# Rules ask the driver of a tensor on cuda, which may not be here; of a meta tensor they know as much as fits.
_TYPES = {"mps": "mps", "cpu": "cpu"}


def _told(kernel: Kernel, args: tuple, arch: Any) -> list[str]:
    """What a kernel's `tells` says of a call."""
    fields = parse_pin(pinned(kernel.op))[1]
    return list(in_context(kernel.tells, args, lambda: arch, lambda: kernel.fn.configure.on(arch, args, fields)))


def _hides(kernel: Kernel) -> bool:
    """Whether the kernel leaves out outputs that nobody will see."""
    return getattr(getattr(kernel.fn, "configure", None), "hides", False)


def _repeated(op: Any, args: tuple, pin: str) -> list[str]:
    """How this very call is repeated, if it was made before."""
    try:
        ready = op._recent.get(op._key(False, pin, *args))
    except (TypeError, RuntimeError):  # as in `Op.__call__`
        return []
    return [] if ready is None else (ready if ready.way or not ready.alone else ready.alone).told()
