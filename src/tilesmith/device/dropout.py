"""What all ops with dropout share on the host: the checks of seed and p, and the numbers that kernels take."""

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from tilesmith.device import philox


def check_dropout(op: str, x: Tensor, seed: Tensor | None, p: float) -> None:
    """Raise ValueError for p outside [0, 1), or a seed that is not int64 [2] on x's device."""
    if not 0.0 <= p < 1.0:
        raise ValueError(f"{op}: p is {p}; it must be in [0, 1)")
    if seed is None:
        return
    if seed.dtype != torch.int64 or tuple(seed.shape) != (2,):
        raise ValueError(f"{op}: seed must be int64 [2] = (seed, offset), got {seed.dtype} {list(seed.shape)}")
    if seed.device != x.device:
        raise ValueError(f"{op}: seed is on {seed.device}, x on {x.device}; move them to one device")


def draws_seed(reference: Callable[..., Any], p: str = "p") -> Callable[[tuple], tuple]:
    """For `Op(draw=...)`: a call's arguments, with a seed from the default generator of the first one's device where
    `seed` is None and the probability `p` is above 0."""
    names = list(inspect.signature(reference).parameters)
    at, of = names.index("seed"), names.index(p)

    def draw(args: tuple) -> tuple:
        if args[at] is not None or args[of] == 0.0:
            return args
        return (*args[:at], philox.draw_seed(args[0].device), *args[at + 1 :])

    return draw


def kernel_seed(seed: Tensor | None, p: float) -> Tensor | None:
    """The seed as kernels load it, (seed, offset) contiguous; None where nothing is dropped."""
    return None if seed is None or p == 0.0 else seed.contiguous()


def kernel_numbers(p: float) -> tuple[int, float]:
    """(drop_below, keep_scale), as `device.triton.dropout` takes them: the threshold in the upper 16 bits of a signed
    32-bit integer, and the factor of the elements that are kept."""
    below = philox.threshold(p) << 16
    return below - 2**32 if below >= 2**31 else below, philox.keep_scale(p)


def dropout_flags(rows: int, cols: int, element_size: int) -> dict[str, int]:
    """LANES and SHORT of `device.triton.philox.random_bits` for a contiguous tensor [rows, cols]. LANES: how many
    neighbours one thread generates bits for, which is as many as 16 bytes hold if rows have so many columns and begin
    at multiples of them, else 1. SHORT: whether Philox counters fit in 32 bits."""
    lanes = 16 // element_size
    while lanes >= 4 and (cols < lanes or (rows > 1 and cols % lanes)):
        lanes //= 2
    return {"LANES": lanes if lanes >= 4 else 1, "SHORT": _short(rows, cols)}


def _short(rows: int, cols: int) -> bool:
    """Whether every Philox counter of a tensor [rows, cols] fits in 32 bits."""
    return rows * cols <= 2**35


def parts_dropout_flags(rows: int, cols: int, p: float) -> dict[str, bool]:
    """SHORT and RARE of the functions in `device.gluon.dropout`: whether counters fit in 32 bits, and whether the
    threshold, read as an fp16, is finite."""
    return {"SHORT": _short(rows, cols), "RARE": philox.threshold(p) < 0x7C00}
