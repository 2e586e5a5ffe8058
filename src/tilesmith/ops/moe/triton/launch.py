"""Launchers of the experts' forward and backward."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from tilesmith.device.rows import dense, rows
from tilesmith.engine import Space, cdiv, launch, optimize_kernel, register_kernel, rehearsed
from tilesmith.hardware.detect import arch_of
from tilesmith.ops.moe import adapters, plan, steps
from tilesmith.ops.moe.arguments import experts_arguments, experts_vjp_arguments
from tilesmith.ops.moe.index import group
from tilesmith.ops.moe.kernels import gate_up_kernel
from tilesmith.ops.moe.plan import FEW, BackwardConfig, FewConfig, ForwardConfig
from tilesmith.ops.moe.triton.few import few_experts

TILES = {"block_m": (64, 128), "block_n": (128, 256), "block_k": (32, 64), "num_warps": (4, 8), "num_stages": (2, 3, 4)}
FORWARD_SPACE = Space(steps.dims, plan.forward, {**TILES, "down_n": (128, 256)})
BACKWARD_SPACE = Space(
    steps.dims_vjp,
    plan.backward,
    {**TILES, "rows_n": (128, 256), "weight_m": (64, 128), "weight_n": (128, 256), "weight_k": (32, 64)},
)


def _tells(x: Tensor, gate_up: Tensor, down: Tensor, indices: Tensor, *_: Any, config: Any) -> list[str]:
    pairs = indices.numel()
    index = "one launch" if pairs <= FEW else "four launches"
    return [
        f"tiles of {config.block_m} pairs of one expert by {config.block_n} columns",
        f"{pairs} pairs are put in the order of experts by {index}",
    ]


def _few(x: Tensor, gate_up: Tensor, down: Tensor, indices: Tensor, adapted: bool) -> FewConfig | None:
    """The configuration of the kernels for few pairs, where they serve the call."""
    sizes, top_k, arch = steps.dims(x, gate_up, down, indices), indices.shape[-1], arch_of(x.device)
    return plan.few(sizes, top_k, arch, x.dtype, adapted, (gate_up.stride(2) == 1, down.stride(2) == 1))


def _tells_forward(*args: Any, config: Any) -> list[str]:
    few, pairs = _few(*args[:4], adapted=any(a is not None for a in args[12:16])), args[3].numel()
    if few is None:
        return _tells(*args, config=config)
    if few.down is not None:
        down = f"down and the sum over k are one launch: a program has {few.down.block_n} columns of a token's experts"
    else:
        down = "down and the sum over k are two launches: pairs of one expert read its weights together"
    if few.up is not None:
        up = f"a program of gate and up has {few.up.block_n} columns of one pair, multiplied without tensor cores"
    else:
        up = "a program of gate and up finds its rows by comparing all pairs"
    return [f"{pairs} pairs need no index: {up}", down]


@register_kernel("experts", backend="triton", rank=20, rejects=steps.reasons, tells=_tells_forward, plans=rehearsed)
@optimize_kernel(space=FORWARD_SPACE)
@experts_arguments
def experts(call, *, config: ForwardConfig, hidden: bool = True) -> tuple[Tensor, Tensor]:
    """Three launches behind those that build the index: gate and up with the activation, down, the sum over k."""
    x, gate_up, indices = rows(call.x), call.gate_up, call.indices.contiguous()
    (count, features, inner), wide, pairs = call.down.shape, gate_up.shape[1], indices.numel()
    pre = x.new_empty((pairs, wide)) if hidden else x.new_empty((pairs, 0))
    if pairs == 0:
        return x.new_zeros(call.x.shape), pre
    adapted = call.gate_up_lora_a is not None or call.down_lora_a is not None
    few = _few(x, gate_up, call.down, indices, adapted)
    if few is not None:
        return few_experts(call, few, hidden)
    groups, top_k = group(indices, count, config.block_m), indices.shape[-1]
    activated = x.new_empty((pairs, inner))
    flags = steps.activation(call)
    sized = {"BLOCK_M": config.block_m, "BLOCK_K": config.block_k, "GROUP_M": config.group_m}
    options = {"num_warps": config.num_warps, "num_stages": config.num_stages}
    each = config.block_n // 2 if flags["GATED"] else config.block_n

    def term(rows_: Tensor, a: Tensor | None, b: Tensor | None, scale: float, top_k: int) -> adapters.Term | None:
        found = adapters.adapter(a, b, scale, x.dtype)
        if found is None:
            return None
        low = adapters.low_rank(rows_, found.a, found.scale, groups, sized, top_k, config.num_stages)
        return adapters.Term(low, found.b)

    up_term = term(x, call.gate_up_lora_a, call.gate_up_lora_b, call.gate_up_lora_scale, top_k)
    added, adapted = adapters.arguments(up_term)
    launch(
        gate_up_kernel, (groups.tiles * cdiv(inner, each),),
        x, gate_up, dense(call.gate_up_bias), pre, activated, *groups, pairs, count, groups.tiles, top_k,
        features, inner, x.stride(0), *gate_up.stride(), *steps.numbers(call), *added,
        HAS_BIAS=call.gate_up_bias is not None, KEEPS_PRE=hidden, EVEN=features % config.block_k == 0,
        BLOCK_N=config.block_n, **flags, **adapted, **sized, **options,
    )  # fmt: skip
    down_term = term(activated, call.down_lora_a, call.down_lora_b, call.down_lora_scale, 0)
    each_row = steps.rows_product(
        activated, call.down, dense(call.down_bias), groups, {**sized, "BLOCK_N": config.down_n}, down_term, **options
    )
    return steps.combined(each_row, indices, call.weights.contiguous(), call.x, count), pre


@register_kernel(
    "experts_vjp", backend="triton", rank=20, rejects=steps.reasons,
    tells=lambda dy, *args, config: _tells(*args, config=config), plans=rehearsed,
)  # fmt: skip
@optimize_kernel(space=BACKWARD_SPACE)
@experts_vjp_arguments
def experts_vjp(
    call, *, config: BackwardConfig
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """The gradient of the pre-activations, then from it and from the activations those of x and of the weights."""
    return steps.Backward(call, config).gradients()
