"""What a kernel's `rejects` may look at: hashable metadata of a call, never values."""

from __future__ import annotations

from collections import namedtuple
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tilesmith.hardware.detect import arch_of


class TensorFacts(NamedTuple):
    """Facts of one tensor: cols is the size of its last dim (1 for a scalar), unit whether the last stride is 1.

    Row counts are left out on purpose: ever new lengths must not make ever new choices.
    """

    dtype: torch.dtype
    device: torch.device
    ndim: int
    cols: int
    unit: bool


def describer(name: str, parameters: Sequence[str]) -> Callable[..., Any]:
    """A function from op arguments to a named tuple with a field per parameter, and `arch`.

    Tensors become TensorFacts, lists become tuples, floats become None (a rejection may not depend on them).
    """
    kind = namedtuple(f"{name}_call", [*parameters, "arch"])

    def describe(*args: Any) -> Any:
        values: list[Any] = []
        device = None
        for a in args:
            if isinstance(a, Tensor):
                device = a.device
                shape = a.shape
                if shape:
                    values.append(TensorFacts(a.dtype, device, len(shape), shape[-1], a.stride(-1) == 1))
                else:
                    values.append(TensorFacts(a.dtype, device, 0, 1, True))
            elif type(a) is float:
                values.append(None)
            else:
                values.append(tuple(a) if type(a) is list else a)
        values.append(arch_of(device or torch.device("cpu")))  # in `assuming` that of another device
        return kind._make(values)

    return describe
