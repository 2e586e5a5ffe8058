"""Of what kernels of several families have in common: exponentials, products of words."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from tilesmith.validate.gluon.values import Value, plain


def exp2(x: Value) -> Value:
    return Value(torch.exp2(x.t.clamp(min=-126.0)))


def word(x: torch.Tensor) -> torch.Tensor:
    """The low 32 bits of int64 numbers, as int32."""
    x = x & 0xFFFFFFFF
    return torch.where(x >= 2**31, x - 2**32, x).to(torch.int32)


def multiply(a: Value, b: Any) -> tuple[Value, Value]:
    """The high and low words of a product of 32-bit words."""
    x, factor = a.to(torch.int32).t.to(torch.int64) & 0xFFFFFFFF, int(plain(b))
    # of 64 bits without a sign: by halves of the word
    low = (x & 0xFFFF) * factor
    high = (x >> 16) * factor
    total_low = (low + ((high & 0xFFFF) << 16)) & 0xFFFFFFFF
    total_high = (high >> 16) + ((low + ((high & 0xFFFF) << 16)) >> 32)
    return Value(word(total_high)), Value(word(total_low))


_HERE = "tilesmith.device.gluon"

HELPERS: dict[str, Callable[..., Any]] = {
    f"{_HERE}.shim.exp2": exp2, f"{_HERE}.dropout._multiply": multiply,
    f"{_HERE}.rows.optimization_barrier": lambda x: x,
}  # fmt: skip

PTX: dict[str, Callable[..., Any]] = {}
