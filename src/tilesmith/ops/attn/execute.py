"""Runs a plan: allocates its scratch memory, makes its descriptors, launches its device kernels in order."""

from collections.abc import Callable, Mapping
from typing import Any

import torch

from tilesmith.device.counters import work_counter
from tilesmith.engine import launch
from tilesmith.ops.attn.plan.model import Counter, Part, Plan, Tile

_DTYPES = {"float32": torch.float32, "int32": torch.int32}


def execute(
    plan: Plan,
    kernels: Mapping[str, Any],
    given: Mapping[str, Any],
    describe: Callable[..., Any],
    device: torch.device,
    dtype: torch.dtype,
) -> None:
    """Launch the plan's steps.

    kernels: device kernels by their names in the plan. given: the call's tensors and numbers by theirs. describe:
    (tensor, Tile) -> its TMA descriptor. device: of the tensors; dtype: of the queries.
    """
    held = dict(given)
    for name, shape, kind in plan.scratch:
        held[name] = made = torch.empty(shape, dtype=_DTYPES.get(kind, dtype), device=device)
        held[f"{name}_strides"] = made.stride()
    for step in plan.steps:
        arguments = {}
        for parameter, source in step.tensors.items():
            kind = type(source)
            if kind is Tile:
                if source not in held:  # two kernels may take one descriptor, or a copy that suits it
                    held[source] = describe(held[source.of], source)
                arguments[parameter] = held[source]
            elif kind is Part:
                arguments[parameter] = held[source.of][source.index]
            elif kind is Counter:
                arguments[parameter] = work_counter(device, source.numbers)
            else:
                arguments[parameter] = None if source is None else held[source]
        launch(kernels[step.kernel], step.grid, **arguments, **step.numbers, **step.constants)
