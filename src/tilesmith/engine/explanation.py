"""explain: why a call is served as it is."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from tilesmith.engine.argument_checks import flag
from tilesmith.engine.arguments import shown, suggestion
from tilesmith.engine.choice import Asked, Choice, asking
from tilesmith.engine.op import Op
from tilesmith.engine.registry import PLAIN, ops
from tilesmith.hardware.detect import Arch, arch_named, assuming


def _asked(op: Op, args: tuple, kwargs: dict[str, Any]) -> tuple:
    """The arguments with which the op's door would call it."""
    devices = {a.device for a in (*args, *kwargs.values()) if isinstance(a, Tensor) and a.device.type != "cpu"}
    kind = next((device.type for device in devices), "cuda")
    with torch.random.fork_rng(devices, device_type=kind), asking(op.name):  # a door may draw a dropout's seed
        try:
            op.door_function(*args, **kwargs)
        except Asked as asked:
            return asked.arguments
    raise RuntimeError(f"{op.name}: this call runs no kernel")


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


def _name_of(op: str | Callable[..., Any]) -> str:
    """The name of an op, given as its name, as the op or as the function by which users call it."""
    if isinstance(op, str):
        return op
    if isinstance(op, Op):
        return op.name
    named = next((o.name for o in ops().values() if o.door_function is not None and o.door_function is op), None)
    if named is None:
        raise TypeError(f"explain: op must be an op or its name, got {shown(op)}")
    return named
