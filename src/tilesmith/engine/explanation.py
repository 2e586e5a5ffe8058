"""explain: why a call is served as it is."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tilesmith.engine.arguments import shown
from tilesmith.engine.choice import Asked, Choice, asking
from tilesmith.engine.op import Op
from tilesmith.engine.registry import PLAIN, ops


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
    op: str | Op, *args: Any, compiled: bool = False, arch: str | None = None, gradient: bool = False, **kwargs: Any
) -> Choice | str:
    """Why a call is served as it is: `explain("rms_norm", x, weight)`; without arguments, the op's kernels.

    compiled: as under torch.compile. arch: as on a GPU of that architecture, "sm90" of `hardware/arch.toml`, which need
    not be here; the tensors may lie on any device, or on "meta" without memory. gradient: of the call's gradient.

    Raises ValueError for an unknown name or arch.
    """
    name = op.name if isinstance(op, Op) else op
    if not isinstance(name, str):
        raise TypeError(f"explain: op must be an op or its name, got {shown(op)}")
    found = ops().get(name)
    if found is None and name in PLAIN:
        return f"{name}: a plain callable ({PLAIN[name][1]}); called as it is, never dispatched"
    if found is None:
        raise ValueError(f"unknown op {name!r}; known: {', '.join(sorted([*ops(), *PLAIN]))}")
    if args or kwargs:
        if found.door_function is not None:
            args, kwargs = _asked(found, args, kwargs), {}
        asked = {name: value for name, value in (("arch", arch), ("gradient", gradient)) if value}
        return found.explain(*args, compiled=compiled, **asked, **kwargs)
    return f"{name}{found.signature}: kernels {', '.join(found.backends())}"
