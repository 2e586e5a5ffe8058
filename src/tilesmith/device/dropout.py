"""What every op with a dropout accepts, and how its kernels are told: the seed tensor, p, and the numbers made of p."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from tilesmith.device import philox
from tilesmith.engine import Op


def check_dropout(op: str, x: Tensor, seed: Tensor | None, p: float) -> None:
    """Raise ValueError for p outside [0, 1), or a seed that is missing or not int64 [2] on x's device."""
    if not 0.0 <= p < 1.0:
        raise ValueError(f"{op}: p is {p}; it must be in [0, 1)")
    if seed is None:
        if p > 0.0:
            raise ValueError(f"{op}: seed must be given with p > 0: an int64 tensor [2] = (seed, offset)")
        return
    if seed.dtype != torch.int64 or tuple(seed.shape) != (2,):
        raise ValueError(f"{op}: seed must be int64 [2] = (seed, offset), got {seed.dtype} {list(seed.shape)}")
    if seed.device != x.device:
        raise ValueError(f"{op}: seed is on {seed.device}, x on {x.device}; move them to one device")


def seed_for(op: Op, before: Sequence[Any], seed: Tensor | None, p: float, *after: Any) -> Tensor | None:
    """The given seed, else, where p needs one, one drawn from the default generator of the tensors' device. The
    arguments of `op` before the seed and after p are checked first: a call that is refused draws nothing."""
    if seed is not None or p == 0.0:
        return seed
    op.check(*before, None, 0.0, *after)
    return philox.draw_seed(before[0].device)


def kernel_seed(seed: Tensor | None, p: float) -> Tensor | None:
    """The seed as kernels read it, its two numbers side by side; None where nothing is dropped."""
    return None if seed is None or p == 0.0 else seed.contiguous()


def kernel_numbers(p: float) -> tuple[int, float]:
    """(drop_below, keep_scale) for `dropout_triton`: the threshold in the upper half of a word, as a signed int, and
    the factor of what is kept."""
    below = philox.threshold(p) << 16
    return below - 2**32 if below >= 2**31 else below, philox.keep_scale(p)


def dropout_flags(rows: int, cols: int, element_size: int) -> dict[str, int]:
    """LANES and SHORT of `philox_triton.random_bits` for a contiguous tensor [rows, cols]: neighbours that one thread
    draws for, as many as 16 bytes hold where a row has so many and rows start at a multiple of them, else 1; whether
    counters fit 32 bits."""
    lanes = 16 // element_size
    while lanes >= 4 and (cols < lanes or (rows > 1 and cols % lanes)):
        lanes //= 2
    return {"LANES": lanes if lanes >= 4 else 1, "SHORT": _short(rows, cols)}


def _short(rows: int, cols: int) -> bool:
    """Whether all counters of a tensor [rows, cols] fit 32 bits."""
    return rows * cols <= 2**35


def parts_dropout_flags(rows: int, cols: int, p: float) -> dict[str, bool]:
    """SHORT and RARE of the functions in `dropout_gluon`: whether counters fit 32 bits; whether the threshold, as an
    fp16, is a number."""
    return {"SHORT": _short(rows, cols), "RARE": philox.threshold(p) < 0x7C00}
