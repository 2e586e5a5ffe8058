"""Which kernels a piece of code runs: the choice behind every call of an op, forward and backward."""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from tilesmith.engine import Choice, Op, ops, torch_private
from tilesmith.hardware import Arch


class Recorder(torch_private.DispatchMode or object):
    """A context that watches the ops of the library run. `choices`: each distinct choice with its number of calls.

    arch: the choices as they would be there, instead of those that are made here.
    """

    def __init__(self, arch: Arch | None = None):
        super().__init__()
        self._arch = None if arch is None else arch.name
        self._seen: Counter[Choice] = Counter()

    @property
    def choices(self) -> list[tuple[Choice, int]]:
        """Distinct choices in the order of their first call."""
        return list(self._seen.items())

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        op = next((op for op in ops().values() if op.handle is func), None) if func.namespace == "tilesmith" else None
        if op is not None:
            with torch.enable_grad():  # a forward that autograd records runs without
                self._seen[self._explained(op, op.complete(args))] += 1
        return func(*args, **(kwargs or {}))

    def _explained(self, op: Op, args: tuple) -> Choice:
        # Alignment is told by an address; fake tensors, whose address is 0, are aligned.
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="Accessing the data pointer of FakeTensor")
            return op.explain(*args, arch=self._arch)


def choices_of(
    op: Op, args: Mapping[str, Any], arch: Arch | None = None, device: torch.device | None = None
) -> list[Choice]:
    """The choices for a call of `op` and, where an argument asks for a gradient, for its backward. Runs nothing.

    arch: a GPU that is not here, for which to choose. device: where to take the tensors to be; None: where they are.
    """

    def fake(x: Tensor) -> Tensor:
        there = torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=device or x.device)
        return there.requires_grad_(x.requires_grad)

    with torch_private.fake_tensor_mode():
        faked = {n: fake(v) if isinstance(v, Tensor) else v for n, v in args.items()}
        with Recorder(arch) as recorder:
            out = op(**faked)
            outs = out if isinstance(out, tuple) else (out,) if isinstance(out, Tensor) else ()
            outputs = [o for o in outs if o.requires_grad]
            inputs = [v for v in faked.values() if isinstance(v, Tensor) and v.requires_grad]
            if outputs and inputs:
                torch.autograd.grad(outputs, inputs, list(map(torch.empty_like, outputs)), allow_unused=True)
    return [choice for choice, _ in recorder.choices]
