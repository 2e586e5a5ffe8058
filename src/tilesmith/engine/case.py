"""Case: example inputs of an op, one table for tests, opcheck, benchmarks and tuning."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from tilesmith.engine.families import ops
from tilesmith.engine.registry import family_of

FLOATS = (torch.float32, torch.float16, torch.bfloat16)  # the dtypes of a Case
HALF = (torch.float16, torch.bfloat16)
BF16 = (torch.bfloat16,)
FP32 = (torch.float32,)
TEST = frozenset({"test"})  # the tags of a Case
SMALL = frozenset({"test", "interpret"})
GPU = frozenset({"gpu"})
COMPILE = frozenset({"gpu", "compile"})
BENCH = frozenset({"gpu", "bench", "tune"})
UNCHECKED = frozenset({"bench", "tune"})  # their fp64 oracles would not fit a GPU
TIMED = frozenset({"bench"})  # neither checked nor searched

Init = Callable[[torch.Generator, Sequence[int], torch.device], Tensor]  # those that families share: `inits.py`


@dataclass(frozen=True, init=False)
class T:
    """A tensor to build.

    shape: its sizes. dtype: None means the dtype of the run. grad: whether a floating tensor asks for a gradient.
    layout: "contiguous"; "strided": every dim is a slice of a longer one, last stride 1; "transposed": the last two
    dims are swapped in memory. init: "normal", or a function (generator, shape, device) -> Tensor. columns_of: the name
    of an argument before this one, of which this is a view: its first columns.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype | None
    grad: bool
    layout: str
    init: str | Init
    columns_of: str | None

    def __init__(
        self, *shape: int, dtype=None, grad=True, layout="contiguous", init="normal", columns_of: str | None = None
    ):
        if layout not in ("contiguous", "strided", "transposed"):
            raise ValueError(f"layout must be contiguous, strided or transposed, got {layout!r}")
        given = {"shape": shape, "dtype": dtype, "grad": grad, "layout": layout, "init": init, "columns_of": columns_of}
        for name, value in given.items():
            object.__setattr__(self, name, value)

    def build(self, device: torch.device, dtype: torch.dtype, generator: torch.Generator) -> Tensor:
        """The tensor on `device`; floating values are drawn in fp32 (so every dtype sees the same numbers)."""
        dtype = self.dtype or dtype
        if callable(self.init):
            value = self.init(generator, self.shape, generator.device)
            value = value.to(dtype) if value.is_floating_point() else value
        elif generator.device == device:
            value = torch.randn(self.shape, generator=generator, device=device, dtype=_drawn(dtype)).to(dtype)
        else:
            value = torch.randn(self.shape, generator=generator, dtype=torch.float32).to(dtype)
        value = _lay_out(value.to(device), self.layout)
        return value.requires_grad_(self.grad) if value.is_floating_point() else value


def _drawn(dtype: torch.dtype) -> torch.dtype:
    return torch.float32 if dtype in (torch.float64, torch.float32) else dtype


def _lay_out(value: Tensor, layout: str) -> Tensor:
    if layout == "transposed" and value.ndim >= 2:
        return value.transpose(-1, -2).contiguous().transpose(-1, -2)
    if layout == "strided" and value.ndim >= 1:
        room = value.new_empty([n + 3 for n in value.shape])
        view = room[tuple(slice(1, n + 1) for n in value.shape)]
        view.copy_(value)
        return view
    return value


@dataclass(frozen=True)
class Case:
    """Named example inputs of one op.

    args: argument name -> T or a plain value. tags: "test" (small), "interpret" (small enough for Triton's
    interpreter), "compile" (compiled offline, as those are, though too slow there), "gpu" (large, only on an
    accelerator), "bench", "tune".
    """

    name: str
    args: Mapping[str, Any]
    tags: frozenset[str] = field(default_factory=lambda: frozenset({"test"}))
    dtypes: tuple[torch.dtype, ...] = FLOATS

    def build(self, device: torch.device, dtype: torch.dtype, generator: torch.Generator) -> dict[str, Any]:
        """Keyword arguments for the op. Tensors are leaves that ask for gradients where T says so."""
        built: dict[str, Any] = {}
        for name, value in self.args.items():
            if isinstance(value, T) and value.columns_of is not None:
                built[name] = built[value.columns_of][..., : value.shape[-1]]
            else:
                built[name] = value.build(device, dtype, generator) if isinstance(value, T) else value
        return built

    def generator(self, device: torch.device | str = "cpu") -> torch.Generator:
        """A generator seeded by the case's name, so that every run sees the same numbers."""
        return torch.Generator(device).manual_seed(sum(ord(c) * 31**i for i, c in enumerate(self.name)) % 2**31)


def cases(op_name: str) -> list[Case]:
    """The cases of an op, from the `cases` of its family ([] for an op declared elsewhere)."""
    op = ops().get(op_name)
    if op is None:
        raise ValueError(f"unknown op {op_name!r}; known: {', '.join(sorted(ops()))}")
    family = family_of(op.reference.__module__)
    if not family.startswith("tilesmith.ops."):
        return []
    return importlib.import_module(f"{family}.cases").CASES.get(op_name, [])
