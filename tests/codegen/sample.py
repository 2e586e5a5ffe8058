"""A kernel with inputs and the results it is due, and the registry of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from tilesmith.codegen import KernelIR
from tilesmith.codegen.nodes import blocks


@dataclass
class Sample:
    """A kernel, how to launch it, and the results: buffers after the launch, with the tolerance they are due."""

    ir: KernelIR
    grid: tuple[int, int, int]
    tensors: dict[str, np.ndarray]
    scalars: dict[str, int | float]
    results: dict[str, np.ndarray]
    tolerance: float = 0.0
    subgroup_sizes: tuple[int, ...] = field(default=(32,))


SAMPLES: dict[str, Callable[[], Sample]] = {}


def sample(make: Callable[[], Sample]) -> Callable[[], Sample]:
    """Register a sample under its function's name."""
    SAMPLES[make.__name__] = make
    return make


def random(*shape: int) -> np.ndarray:
    return np.random.default_rng(sum(shape)).standard_normal(shape, dtype=np.float32)


def without(ir: KernelIR, kind: type, number: int) -> KernelIR:
    """`ir` without its `number`-th statement of a kind."""
    seen = iter(range(10**6))

    def keep(body):
        out = []
        for s in body:
            if isinstance(s, kind) and next(seen) == number:
                continue
            named = {n: keep(v) for n, v in vars(s).items() if isinstance(v, tuple) and v in blocks(s)}
            out.append(type(s)(**{**vars(s), **named}))
        return tuple(out)

    return KernelIR(**{name: getattr(ir, name) for name in KernelIR._names} | {"body": keep(ir.body)})
