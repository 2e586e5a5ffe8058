"""Launchers of experts in 8 bits on Hopper."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tilesmith.device.alignment import aligned
from tilesmith.device.rows import rows
from tilesmith.engine import Space, cdiv, launch, optimize_kernel, register_kernel, rehearsed
from tilesmith.hardware.detect import arch_of
from tilesmith.ops.moe import fp8_plan, fp8_steps
from tilesmith.ops.moe.arguments import experts_fp8_arguments, experts_vjp_fp8_arguments
from tilesmith.ops.moe.fp8_plan import HopperFp8BackwardConfig, HopperFp8Config
from tilesmith.ops.moe.hopper import launch as plain
from tilesmith.ops.moe.hopper.fp8_products import (
    COLS,
    HALF_ROWS,
    PIECE,
    STEP8,
    experts_fp8_gathered_rows_kernel,
    experts_fp8_rows_kernel,
)
from tilesmith.ops.moe.hopper.fp8_weight_gradient import experts_fp8_weight_gradient_kernel, turned_of
from tilesmith.ops.moe.hopper.tiles import matrices_of, rows_of
from tilesmith.ops.moe.index import Groups, group
from tilesmith.ops.moe.plan import HOPPER_ROWS
from tilesmith.ops.quant.reference import OUTPUTS

CHOICES = {"num_stages": (3, 4), "group_m": (4, 8, 16)}
SPACE = Space(fp8_steps.dims, fp8_plan.forward, CHOICES, fp8_plan.fit)
SPACE_VJP = Space(
    fp8_steps.dims_vjp, fp8_plan.backward, {**CHOICES, "weight_n": (128, 256), "weight_stages": (3, 4, 6)}, fp8_plan.fit
)


def _reasons(call: Any) -> list[str]:
    found = fp8_steps.reasons(call)
    if call.arch.capability != (9, 0):
        found.append(f"{call.arch.name} has no warpgroup products; compute capability 9.0 is supported")
    forward = hasattr(call, "x8")
    dtype = OUTPUTS[call.dtype] if forward else call.dy.dtype
    if dtype not in (torch.float16, torch.bfloat16):
        found.append(f"results are {dtype}; float16 and bfloat16 are supported")
    hidden, inner = (call.x8.cols, call.down8.cols) if forward else (call.dy8.cols, call.gate_up8_t.cols // 2)
    sizes = {"a token": hidden, "the activation": inner}
    return found + [f"{name} has {n} columns; multiples of 16 are supported" for name, n in sizes.items() if n % 16]


def _product(
    a8: Tensor, a_factor: Tensor, weight8: Tensor, factor: Tensor, groups: Groups, top_k: int, dtype: torch.dtype,
    num_stages: int, group_m: int,
) -> Tensor:  # fmt: skip
    """a8 · weight8[e]ᵀ with factors, in the order of experts: of rows of tokens with so many experts (top_k above 0) or
    of rows in that order."""
    experts, outputs, features = weight8.shape
    pairs, tiles_n = groups.order.shape[0], cdiv(outputs, COLS)
    out = a8.new_empty((pairs, outputs), dtype=dtype)
    ctas = min(arch_of(a8.device).sms or 1, groups.tiles * tiles_n)
    table = (*groups[1:], experts, groups.tiles, tiles_n, cdiv(features, STEP8))
    descriptors = matrices_of(weight8, COLS, STEP8), factor, rows_of(out, HALF_ROWS, PIECE)
    how = {"GROUP": group_m, "STAGES": num_stages, "num_warps": 4}
    if top_k:
        a8, row_units = aligned(a8)
        launch(
            experts_fp8_gathered_rows_kernel, (ctas,), a8, a_factor, groups.order, *descriptors, *table,
            top_k, row_units, features // 16, **how,
        )  # fmt: skip
    else:
        launch(experts_fp8_rows_kernel, (ctas,), rows_of(a8, HALF_ROWS, STEP8), a_factor, *descriptors, *table, **how)
    return out


@register_kernel("experts_fp8", backend="hopper", rank=plain.RANK, rejects=_reasons, eps=fp8_steps.eps, plans=rehearsed)
@optimize_kernel(space=SPACE)
@experts_fp8_arguments
def experts_fp8(call, *, config: HopperFp8Config) -> tuple[Tensor, Tensor]:
    """A product of rows that it gathers, the activation with its cast, the second product, the sum over k."""
    call = fp8_steps.dense_weights(call)
    indices, dtype = call.indices.contiguous(), OUTPUTS[call.dtype]
    x8, (count, wide, _), pairs = rows(call.x8), call.gate_up8.shape, indices.numel()
    if pairs == 0:
        return x8.new_zeros(call.x8.shape, dtype=dtype), x8.new_empty((0, wide), dtype=dtype)
    groups, top_k = group(indices, count, HOPPER_ROWS), indices.shape[-1]
    pre = _product(x8, call.x_factor, call.gate_up8, call.gate_up_factor, groups, top_k, dtype, *config)
    place = plain.places_of(groups, count, pre)
    h8, h_factor = fp8_steps.activated(pre, groups, count, call.activation)
    each = _product(h8, h_factor, call.down8, call.down_factor, groups, 0, dtype, *config)
    return fp8_steps.combined(each, indices, call.weights.contiguous(), call.x8, count, place), pre


class _Backward(fp8_steps.Backward, plain._Backward):
    def __init__(self, call: Any, config: HopperFp8BackwardConfig):
        self.enter(call)
        self.chosen = config

    def product(self, a8: Tensor, a_factor: Tensor, weight8: Tensor, factor: Tensor, gathers: bool) -> Tensor:
        top_k, chosen = self.top_k if gathers else 0, self.chosen
        how = chosen.num_stages, chosen.group_m
        return _product(a8, a_factor, weight8, factor, self.groups, top_k, self.dy.dtype, *how)

    def weight_product(self, left: fp8_steps.Turned, right: fp8_steps.Turned, out: Tensor, firsts: Tensor) -> None:
        experts, tiles_m, tiles_n = out.shape[0], cdiv(out.shape[1], HOPPER_ROWS), cdiv(out.shape[2], COLS)
        ctas = min(arch_of(out.device).sms or 1, experts * tiles_m * tiles_n)
        launch(
            experts_fp8_weight_gradient_kernel, (ctas,),
            turned_of(left.values, HALF_ROWS), turned_of(right.values, COLS), left.factor, right.factor,
            matrices_of(out, HALF_ROWS, PIECE), firsts, experts, tiles_m, tiles_n,
            STAGES=self.chosen.num_stages, num_warps=4,
        )  # fmt: skip

    def sum_over_k(self, each: Tensor) -> Tensor:
        place = plain.places_of(self.groups, self.experts)
        return fp8_steps.combined(each, self.indices, None, self.call.x, self.experts, place)


@register_kernel(
    "experts_vjp_fp8", backend="hopper", rank=plain.RANK, rejects=_reasons, eps=fp8_steps.eps, plans=rehearsed
)
@optimize_kernel(space=SPACE_VJP)
@experts_vjp_fp8_arguments
def experts_vjp_fp8(call, *, config: HopperFp8BackwardConfig) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The product with down, the gradients that are elements' own with their cast, then those of x and of weights."""
    backward = _Backward(call, config)
    if backward.pairs == 0:
        return backward.zeros()
    return backward.gradients(group(backward.indices, backward.experts, HOPPER_ROWS), HOPPER_ROWS)
