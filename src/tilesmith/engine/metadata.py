"""What a kernel's `rejects` may look at: hashable metadata of a call, never values."""

from __future__ import annotations

from collections import namedtuple
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tilesmith.hardware.detect import arch_of


class TensorFacts(NamedTuple):
    """Facts of one tensor: cols is the size of its last dim (1 for a scalar), unit whether the last stride is 1."""

    dtype: torch.dtype
    device: torch.device
    ndim: int
    cols: int
    unit: bool


def facts(tensor: Tensor) -> TensorFacts:
    """The facts of a tensor. Row counts are left out on purpose: ever new lengths must not make ever new choices."""
    if tensor.ndim == 0:
        return TensorFacts(tensor.dtype, tensor.device, 0, 1, True)
    return TensorFacts(tensor.dtype, tensor.device, tensor.ndim, tensor.shape[-1], tensor.stride(-1) == 1)


def describer(name: str, parameters: Sequence[str]) -> Callable[[tuple], Any]:
    """A function from op arguments to a named tuple with a field per parameter, and `arch`.

    Tensors become TensorFacts, lists become tuples, floats become None (a rejection may not depend on them).
    """
    kind = namedtuple(f"{name}_call", [*parameters, "arch"])
    archs: dict[torch.device | None, Any] = {}

    def describe(*args: Any) -> Any:
        values: list[Any] = []
        device = None
        for a in args:
            if isinstance(a, Tensor):
                values.append(facts(a))
                device = device or a.device
            elif type(a) is float:
                values.append(None)
            else:
                values.append(tuple(a) if isinstance(a, list) else a)
        if device not in archs:
            archs[device] = arch_of(device or torch.device("cpu"))
        return kind(*values, archs[device])

    return describe
