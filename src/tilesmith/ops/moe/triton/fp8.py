"""Launchers of experts in 8 bits."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tilesmith.device.rows import rows
from tilesmith.engine import Space, cdiv, launch, optimize_kernel, register_kernel, rehearsed
from tilesmith.hardware.detect import arch_of
from tilesmith.ops.moe import fp8_steps, plan, steps
from tilesmith.ops.moe.arguments import experts_fp8_arguments, experts_vjp_fp8_arguments
from tilesmith.ops.moe.fp8_kernels import experts_scaled_rows_kernel, experts_scaled_weight_gradient_kernel
from tilesmith.ops.moe.index import Groups, group
from tilesmith.ops.moe.plan import BackwardConfig, ForwardConfig
from tilesmith.ops.quant.reference import OUTPUTS

TILES = {"block_m": (64, 128), "block_n": (128, 256), "block_k": (32, 64), "num_warps": (4, 8), "num_stages": (2, 3, 4)}


FORWARD_SPACE = Space(fp8_steps.dims, plan.forward, TILES)
BACKWARD_SPACE = Space(
    fp8_steps.dims_vjp, plan.backward,
    {**TILES, "rows_n": (128, 256), "weight_m": (64, 128), "weight_n": (128, 256), "weight_k": (32, 64)},
)  # fmt: skip


def _product(
    a8: Tensor, a_factor: Tensor, weight8: Tensor, factor: Tensor, groups: Groups, top_k: int, dtype: torch.dtype,
    config: Any, block_n: int,
) -> Tensor:  # fmt: skip
    """a8 · weight8[e]ᵀ with factors: of rows of tokens with so many experts (top_k above 0) in the order of experts; of
    rows in that order, in the order of pairs."""
    pairs, (experts, outputs, features) = groups.order.shape[0], weight8.shape
    out, block_k = a8.new_empty((pairs, outputs), dtype=dtype), 2 * config.block_k  # as many bytes as in 16 bits
    launch(
        experts_scaled_rows_kernel, (groups.tiles * cdiv(outputs, block_n),),
        a8, a_factor, weight8, factor, out, *groups, pairs, experts, groups.tiles, max(1, top_k), features, outputs,
        a8.stride(0), GATHERS=top_k > 0, WIDENS=not fp8_steps.saturates(a8), EVEN=features % block_k == 0,
        BLOCK_M=config.block_m, BLOCK_N=block_n, BLOCK_K=block_k, GROUP_M=config.group_m,
        num_warps=config.num_warps, num_stages=config.num_stages,
    )  # fmt: skip
    return out


@register_kernel(
    "experts_fp8", backend="triton", rank=20, rejects=fp8_steps.reasons, eps=fp8_steps.eps, plans=rehearsed
)
@optimize_kernel(space=FORWARD_SPACE)
@experts_fp8_arguments
def experts_fp8(call, *, config: ForwardConfig) -> tuple[Tensor, Tensor]:
    """A product of rows that it gathers, the activation with its cast, the second product, the sum over k."""
    call = fp8_steps.dense_weights(call)
    indices, dtype = call.indices.contiguous(), OUTPUTS[call.dtype]
    x8, (count, wide, _), pairs = rows(call.x8), call.gate_up8.shape, indices.numel()
    if pairs == 0:
        return x8.new_zeros(call.x8.shape, dtype=dtype), x8.new_empty((0, wide), dtype=dtype)
    groups, top_k = group(indices, count, config.block_m), indices.shape[-1]
    pre = _product(x8, call.x_factor, call.gate_up8, call.gate_up_factor, groups, top_k, dtype, config, config.block_n)
    h8, h_factor = fp8_steps.activated(pre, groups, count, call.activation)
    each = _product(h8, h_factor, call.down8, call.down_factor, groups, 0, dtype, config, config.down_n)
    return fp8_steps.combined(each, indices, call.weights.contiguous(), call.x8, count, None), pre


class _Backward(fp8_steps.Backward, steps.Backward):
    def __init__(self, call: Any, config: BackwardConfig):
        self.enter(call)
        self.config = config
        self.options = {"num_warps": config.num_warps, "num_stages": config.num_stages}

    def product(self, a8: Tensor, a_factor: Tensor, weight8: Tensor, factor: Tensor, gathers: bool) -> Tensor:
        top_k, config = self.top_k if gathers else 0, self.config
        return _product(a8, a_factor, weight8, factor, self.groups, top_k, self.dy.dtype, config, config.rows_n)

    def weight_product(self, left: fp8_steps.Turned, right: fp8_steps.Turned, out: Tensor, firsts: Tensor) -> None:
        config, (experts, height, width) = self.config, out.shape
        tiles = cdiv(height, config.weight_m) * cdiv(width, config.weight_n)
        step = config.block_m * (config.weight_m + config.weight_n)  # bytes
        room = arch_of(out.device).shared_memory - 2048
        options = {**self.options, "num_stages": max(1, min(config.num_stages, room // step))}
        launch(
            experts_scaled_weight_gradient_kernel, (experts * tiles,),
            left.values, right.values, left.factor, right.factor, out, firsts, height, width, left.values.shape[1],
            WIDENS=not fp8_steps.saturates(out), TILE=config.block_m, BLOCK_M=config.weight_m, BLOCK_N=config.weight_n,
            GROUP_M=config.group_m, **options,
        )  # fmt: skip

    def sum_over_k(self, each: Tensor) -> Tensor:
        return fp8_steps.combined(each, self.indices, None, self.call.x, self.experts, None)


@register_kernel(
    "experts_vjp_fp8", backend="triton", rank=20, rejects=fp8_steps.reasons, eps=fp8_steps.eps, plans=rehearsed
)
@optimize_kernel(space=BACKWARD_SPACE)
@experts_vjp_fp8_arguments
def experts_vjp_fp8(call, *, config: BackwardConfig) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The product with down, the gradients that are elements' own with their cast, then those of x and of weights."""
    backward = _Backward(call, config)
    if backward.pairs == 0:
        return backward.zeros()
    return backward.gradients(group(backward.indices, backward.experts, config.block_m), config.block_m)
