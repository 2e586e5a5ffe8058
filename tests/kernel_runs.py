"""Running portable kernels in the interpreter, and what they may cost beside plain PyTorch in float64."""

from __future__ import annotations

import numpy as np
import torch

from tilesmith.codegen import KernelIR, interpret

EPS = 1e-5


def random(*shape: int, half: bool = False, seed: int = 0) -> np.ndarray:
    values = np.random.default_rng((seed, *shape)).standard_normal(shape)
    return values.astype(np.float16 if half else np.float32)


def run(ir: KernelIR, grid, tensors: dict[str, np.ndarray], out: dict[str, tuple], scalars: dict, half: bool):
    """The outputs, whose memory starts as NaN. The interpreter reports races and accesses out of bounds."""
    empty = {name: np.full(shape, np.nan, np.float16 if half else np.float32) for name, shape in out.items()}
    given = tensors | empty
    words = {b.name for b in ir.buffers if b.type.dtype == "u32"}
    interpret(
        ir,
        grid,
        {b.name: given[b.name].view(np.uint32) if b.name in words else given[b.name] for b in ir.buffers},
        scalars,
    )
    return empty


def within(got: np.ndarray, reference, *inputs: np.ndarray) -> None:
    """Within 2 x (what the same mathematics costs in this dtype + one rounding of the largest value)."""
    wide = reference(*(torch.from_numpy(x).double() for x in inputs))
    own = reference(*(torch.from_numpy(x) for x in inputs)).double()
    eps = torch.finfo(torch.float16 if got.dtype == np.float16 else torch.float32).eps
    budget = 2 * ((own - wide).abs().max() + eps * wide.abs().max())
    error = (torch.from_numpy(got).double() - wide).abs().max()
    assert error <= budget, (float(error), float(budget))
