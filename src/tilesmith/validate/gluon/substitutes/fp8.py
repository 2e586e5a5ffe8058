"""Of kernels of 8 bits: codes of e4m3 and factors that are rounded down."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from tilesmith.validate.gluon.substitutes.device import word
from tilesmith.validate.gluon.values import Value


def _rounded_down(exact: torch.Tensor, error: torch.Tensor) -> torch.Tensor:
    """The largest fp32 number that is at most exact + error, where error is less than fp64 tells apart."""
    found = exact.float()
    above = (found.double() > exact) | ((found.double() == exact) & (error < 0))
    return torch.where(above, torch.nextafter(found, torch.full_like(found, float("-inf"))), found)


def _less_product_down(top: Value, factor: Value, start: Value) -> Value:
    """start - top * factor in one step, rounded down."""
    product, start = -top.t.double() * factor.t.double(), start.t.double()
    total = product + start
    other = total - product
    return Value(_rounded_down(total, (product - (total - other)) + (start - other)))


def _codes(*numbers: Value) -> Value:
    """The low bytes of four numbers in fp16, in one word. Negative ones are 0; of a NaN all bits but the sign are 1."""
    total = torch.zeros(numbers[0].t.shape, dtype=torch.int64)
    for i, x in enumerate(numbers):
        half = x.t.clamp(min=0.0).to(torch.float16).contiguous().view(torch.int16)
        half = torch.where(x.t.isnan(), 0x7FFF, half.to(torch.int64))
        total |= (half & 0xFF) << (8 * i)
    return Value(word(total))


# Casts (`device.triton.rounding`)


def _pair_of(dtype: torch.dtype) -> Callable[[Value, Value], Value]:
    """Two numbers in 8 bits in an int16, the first in its low byte."""

    def of(low: Value, high: Value) -> Value:
        return Value(_bytes(dtype, low, high).to(torch.int16))

    return of


def _word_of(dtype: torch.dtype) -> Callable[..., Value]:
    """Four numbers in 8 bits in an int32, the first in its low byte."""
    return lambda *numbers: Value(word(_bytes(dtype, *numbers)))


def _bytes(dtype: torch.dtype, *numbers: Value) -> torch.Tensor:
    codes = [x.to(dtype).t.contiguous().view(torch.uint8).to(torch.int64) << (8 * i) for i, x in enumerate(numbers)]
    return sum(codes[1:], codes[0])


def _of_halves(dtype: torch.dtype, x: Value, compute: Callable[[torch.Tensor], torch.Tensor]) -> Value:
    """Numbers of 16 bits, or the halves of words."""
    if x.t.dtype is dtype:
        return Value(compute(x.t))
    halves = compute(x.t.contiguous().view(dtype))
    return Value(halves.view(torch.int32).reshape(x.t.shape))


def _without_infinity(dtype: torch.dtype) -> Callable[[Value], Value]:
    return lambda x: _of_halves(dtype, x, lambda t: t * 0 + t)


def _larger_halves(a: Value, b: Value) -> Value:
    """Of halves of words without a sign."""
    x, y = (t.to(torch.int64) & 0xFFFFFFFF for t in torch.broadcast_tensors(a.t, b.t))
    low, high = torch.maximum(x & 0xFFFF, y & 0xFFFF), torch.maximum(x >> 16, y >> 16)
    return Value(word(low | (high << 16)))


def _largest(*numbers: Value) -> Value:
    found = numbers[0].t.abs()
    for x in numbers[1:]:
        found = torch.maximum(found, x.t.abs())
    return Value(found)


_CASTS: dict[str, Callable[..., Any]] = {
    "cvt.rn.satfinite.e5m2x2.f32 h, $4, $3; mov.b32 $0, {l, h};": _word_of(torch.float8_e5m2),
    "cvt.rn.satfinite.e4m3x2.f32 h, $4, $3; mov.b32 $0, {l, h};": _word_of(torch.float8_e4m3fn),
    "cvt.rn.satfinite.e5m2x2.f32 $0, $2, $1;": _pair_of(torch.float8_e5m2),
    "cvt.rn.satfinite.e4m3x2.f32 $0, $2, $1;": _pair_of(torch.float8_e4m3fn),
    "mov.b32 z, 0; fma.rn.bf16x2 $0, $1, z, $1;": _without_infinity(torch.bfloat16),
    "mov.b32 z, 0; fma.rn.f16x2 $0, $1, z, $1;": _without_infinity(torch.float16),
    "max.u16x2 $0, $1, $2;": _larger_halves, "max.NaN.bf16x2 c, c, d; max.NaN.bf16x2 $0, a, c;": _largest,
    "shl.b32 t, $2, 16; mov.b32 $0, t; and.b32 t, $2, 0xffff0000; mov.b32 $1, t;": lambda x: x.to(torch.float32),
    "cvt.rn.bf16x2.f32 $0, $2, $1;": lambda x: x.to(torch.bfloat16),
}  # fmt: skip

PTX: dict[str, Callable[..., Any]] = {
    "neg.f32 minus, $1; fma.rm.f32 $0, minus, $2, $3;": _less_product_down,
    "cvt.rn.relu.f16x2.f32 ab, $2, $1; cvt.rn.relu.f16x2.f32 cd, $4, $3; prmt.b32 $0, ab, cd, 0x6420;": _codes,
    **_CASTS,
}
