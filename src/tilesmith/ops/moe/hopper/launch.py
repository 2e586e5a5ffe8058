"""Launchers of the experts' forward and backward on Hopper."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tilesmith.device.alignment import aligned, tma_strides
from tilesmith.device.rows import dense, rows
from tilesmith.engine import Space, cdiv, launch, next_power_of_2, optimize_kernel, register_kernel, rehearsed
from tilesmith.hardware.detect import arch_of
from tilesmith.ops.moe import plan, steps
from tilesmith.ops.moe.arguments import experts_arguments, experts_vjp_arguments
from tilesmith.ops.moe.hopper.gather import experts_gather_kernel, experts_place_kernel
from tilesmith.ops.moe.hopper.products import COLS, experts_gate_up_kernel, experts_rows_kernel
from tilesmith.ops.moe.hopper.tiles import HALF_ROWS, PIECE, STEP, matrices_of, rows_of
from tilesmith.ops.moe.hopper.weight_gradient import experts_weight_gradient_kernel
from tilesmith.ops.moe.index import Groups, group, tiled
from tilesmith.ops.moe.plan import HOPPER_LEAST, HOPPER_PRE, HOPPER_ROWS, HopperBackwardConfig, HopperConfig

RANK = 25


SPACE = Space(
    steps.dims, plan.hopper_forward, {"num_stages": (3, 4), "group_m": (4, 8, 16), "consumers": (2, 3)}, plan.hopper_fit
)
SPACE_VJP = Space(
    steps.dims_vjp,
    plan.hopper_backward,
    {
        "weight_n": (128, 256),
        "weight_stages": (3, 4, 6),
        "rows_stages": (3, 4),
        "group_m": (4, 8, 16),
        "rows_consumers": (2, 3),
    },
    plan.hopper_fit,
)


def _reasons_for_both(call: Any) -> list[str]:
    found = steps.reasons(call)
    if call.arch.capability != (9, 0):
        found.append(f"{call.arch.name} has no warpgroup products; compute capability 9.0 is supported")
    if call.x.dtype not in (torch.float16, torch.bfloat16):
        found.append(f"x is {call.x.dtype}; float16 and bfloat16 are supported")
    if call.gate_up_lora_a is not None or call.down_lora_a is not None:
        found.append("adapters are given, which these products do not add")
    sizes = {"x": call.x.cols, "down": call.down.cols}
    return found + [f"{name} has {n} columns; multiples of 8 are supported" for name, n in sizes.items() if n % 8]


def _reasons(call: Any) -> list[str]:
    found = _reasons_for_both(call)
    if call.activation != "swiglu":
        found.append(f"activation is {call.activation!r}; 'swiglu' is supported")
    if call.few:
        found.append(f"experts get {HOPPER_LEAST} pairs or fewer on average: narrow tiles wait less for the weights")
    return found


def _tells(*args: Any, consumers: int, backward: bool) -> list[str]:
    found = plan.hopper_times(steps.dims(*args), arch_of(args[0].device), backward)
    predicted = ", ".join(f"{1e6 * seconds:.0f} us by {rows}" for rows, seconds in found.items())
    which = "x's gradient" if backward else "gate, up and down"
    return [
        f"tiles of {HALF_ROWS * consumers} pairs of one expert by {COLS} columns, {consumers} consumers",
        f"predicted for {which}, if every expert is as likely: {predicted} pairs",
    ]


def _tells_forward(*args: Any, config: HopperConfig) -> list[str]:
    return _tells(*args, consumers=config.consumers, backward=False)


def _tells_backward(dy: Tensor, *args: Any, config: HopperBackwardConfig) -> list[str]:
    return _tells(*args, consumers=config.rows_consumers, backward=True)


def _gathered(source: Tensor, groups: Groups, experts: int, top_k: int) -> Tensor:
    """The rows of tokens [T, N] as those of pairs in the order of experts."""
    pairs, cols = groups.order.shape[0], source.shape[1]
    out = source.new_empty((pairs, cols))
    block_n = min(1024, max(16, next_power_of_2(cols)))
    block_m = max(1, 4096 // block_n)
    launch(
        experts_gather_kernel, (cdiv(pairs, block_m) * cdiv(cols, block_n),),
        source, out, groups.order, groups.starts, pairs, experts, top_k, cols, source.stride(0),
        BLOCK_M=block_m, BLOCK_N=block_n, num_warps=4,
    )  # fmt: skip
    return out


def places_of(groups: Groups, experts: int, pre: Tensor | None = None) -> Tensor:
    """Where the row of each pair lies in the order of experts; the rows of pre of pairs without an expert become 0."""
    place = torch.empty_like(groups.order)
    pairs = place.shape[0]
    launch(
        experts_place_kernel, (cdiv(pairs, 128),),
        groups.order, groups.starts, place, pre, pairs, experts, 0 if pre is None else pre.shape[1],
        BLOCK_M=128, BLOCK_N=64, num_warps=4,
    )  # fmt: skip
    return place


def _weights(weight: Tensor, cols: int) -> tuple[Any, bool]:
    """(descriptor of weight [E, outputs, features] in tiles of so many outputs and STEP features, whether its outputs
    are neighbours)."""
    by_rows = weight.stride(2) != 1 and weight.stride(1) == 1
    return (matrices_of(weight.transpose(1, 2), STEP, cols) if by_rows else matrices_of(weight, cols, STEP)), by_rows


def _table(groups: Groups, experts: int, tiles_n: int, features: int) -> tuple[int, tuple[Any, ...]]:
    """(CTAs, the arguments of a product behind its tensors)."""
    ctas = min(arch_of(groups.order.device).sms or 1, groups.tiles * tiles_n)
    return ctas, (*groups[1:], experts, groups.tiles, tiles_n, cdiv(features, STEP))


def _product(a: Tensor, weight: Tensor, bias: Tensor | None, groups: Groups, config: HopperConfig) -> Tensor:
    """a · weight[e]ᵀ + bias[e], [S, outputs] in the order of experts; weight [E, outputs, features]. groups has tiles
    of `config`."""
    experts, outputs, features = weight.shape
    out = a.new_empty((a.shape[0], outputs))
    descriptor, by_rows = _weights(weight, COLS // 2)
    ctas, table = _table(groups, experts, cdiv(outputs, COLS), features)
    launch(
        experts_rows_kernel, (ctas,),
        rows_of(a, HALF_ROWS, STEP), descriptor, rows_of(out, HALF_ROWS, PIECE), a if bias is None else bias,
        *table, outputs, HAS_BIAS=bias is not None, BY_ROWS=by_rows, GROUP=config.group_m, STAGES=config.num_stages,
        CONSUMERS=config.consumers, num_warps=4,
    )  # fmt: skip
    return out


@register_kernel("experts", backend="hopper", rank=RANK, rejects=_reasons, tells=_tells_forward, plans=rehearsed)
@optimize_kernel(space=SPACE)
@experts_arguments
def experts(call, *, config: HopperConfig, hidden: bool = True) -> tuple[Tensor, Tensor]:
    """Gate and up of the rows that each expert gathers with the activation, down, the sum over k."""
    x, indices, bias = rows(call.x), call.indices.contiguous(), dense(call.gate_up_bias)
    (count, features, inner), pairs = call.down.shape, indices.numel()
    pre = x.new_empty((pairs, 2 * inner if hidden else 0))
    if pairs == 0:
        return x.new_zeros(call.x.shape), pre
    if x.shape[0] * x.stride(0) >= 8 * 2**31:  # beyond the offsets of three consumers' gather
        config = plan.hopper_fit(config._replace(consumers=2), {}, None, None)
    groups, top_k = group(indices, count, HALF_ROWS * config.consumers), indices.shape[-1]
    activated = x.new_empty((pairs, inner))
    out = rows_of(activated, HALF_ROWS, PIECE)
    x = aligned(x)[0]
    descriptor, by_rows = _weights(call.gate_up, COLS // 2)
    ctas, table = _table(groups, count, cdiv(inner, COLS // 2), features)
    pre_parts = 1 if call.interleaved else 2
    launch(
        experts_gate_up_kernel, (ctas,),
        x, groups.order, descriptor, out,
        rows_of(pre, HALF_ROWS, PIECE, pre_parts) if hidden else out, x if bias is None else bias,
        *table, inner, top_k, x.stride(0) // 8, features // 8, *steps.numbers(call),
        INTERLEAVED=call.interleaved, HAS_BIAS=bias is not None, HAS_LIMIT=call.limit > 0, KEEPS_PRE=hidden,
        BY_ROWS=by_rows, GROUP=config.group_m, STAGES=config.num_stages, CONSUMERS=config.consumers, num_warps=4,
    )  # fmt: skip
    each = _product(activated, call.down, dense(call.down_bias), groups, config)
    place = places_of(groups, count, pre if hidden else None)
    return steps.combined(each, indices, call.weights.contiguous(), call.x, count, place), pre


class _Backward(steps.Backward):
    """Triton's backward with products of its own for the gradients of x and of the weights."""

    def __init__(self, call: Any, config: HopperBackwardConfig):
        super().__init__(call, HOPPER_PRE)
        self.chosen = config

    def input_gradient(self, dpre: Tensor) -> Tensor:
        chosen, groups = self.chosen, self.groups
        rows_ = HALF_ROWS * chosen.rows_consumers
        if rows_ != self.config.block_m:
            groups = tiled(groups, self.experts, rows_)
        config = HopperConfig(chosen.rows_stages, chosen.group_m, chosen.rows_consumers)
        each = _product(dpre, self.call.gate_up.transpose(1, 2), None, groups, config)
        return steps.combined(each, self.indices, None, self.call.x, self.experts, places_of(self.groups, self.experts))

    def weight_gradient(self, left: Tensor, right: Tensor, out: Tensor, gathers_left: bool) -> Tensor:
        gathered = _gathered(left if gathers_left else right, self.groups, self.experts, self.top_k)
        left, right = (gathered, right) if gathers_left else (left, gathered)
        made = out
        if out.stride(2) != 1 and out.stride(1) == 1:
            left, right, made = right, left, out.transpose(1, 2)
        if tma_strides(made) is None:
            made = torch.empty_like(made, memory_format=torch.contiguous_format)
        (experts, height, width), cols = made.shape, self.chosen.weight_n
        tiles_m, tiles_n = cdiv(height, HOPPER_ROWS), cdiv(width, cols)
        ctas = min(arch_of(left.device).sms or 1, experts * tiles_m * tiles_n)
        launch(
            experts_weight_gradient_kernel, (ctas,),
            rows_of(left, STEP, HALF_ROWS), rows_of(right, STEP, cols), matrices_of(made, HALF_ROWS, PIECE),
            self.groups.starts, experts, tiles_m, tiles_n, COLS=cols, STAGES=self.chosen.weight_stages, num_warps=4,
        )  # fmt: skip
        return out if made.data_ptr() == out.data_ptr() else out.copy_(made)


@register_kernel(
    "experts_vjp", backend="hopper", rank=RANK, rejects=_reasons_for_both, tells=_tells_backward, plans=rehearsed
)
@optimize_kernel(space=SPACE_VJP)
@experts_vjp_arguments
def experts_vjp(
    call, *, config: HopperBackwardConfig
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """As Triton's, with the rows of x and of dy in the order of experts for the gradients of the weights."""
    return _Backward(call, config).gradients()
