"""Steps of the experts' launchers that backends share: the sum over a token's experts, and a backward whose products a
backend may replace."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tilesmith.device.rows import dense, rows
from tilesmith.engine import cdiv, launch, next_power_of_2
from tilesmith.ops.moe import adapters, plan
from tilesmith.ops.moe.gradient_kernels import (
    bias_gradient_kernel,
    pre_gradient_kernel,
    scale_gradient_kernel,
    weight_gradient_kernel,
)
from tilesmith.ops.moe.index import Groups, group
from tilesmith.ops.moe.kernels import combine_kernel, rows_kernel
from tilesmith.ops.moe.plan import BackwardConfig
from tilesmith.ops.moe.reference import GATED


def dims(x: Tensor, gate_up: Tensor, down: Tensor, indices: Tensor, *_: Any) -> dict[str, int]:
    """The sizes of a call of experts by which its configuration is chosen."""
    return plan.dims(indices.numel(), gate_up.shape[0], x.shape[-1], down.shape[2])


def dims_vjp(dy: Tensor, *args: Any) -> dict[str, int]:
    """The same of a call of its gradients."""
    return dims(*args)


def reasons(call: Any) -> list[str]:
    """Why no kernel of a backend can serve a call of experts or of its gradient."""
    wide = [name for name in ("x", "weights") if getattr(call, name).dtype == torch.float64]
    found = [f"{wide[0]} is torch.float64; this kernel sums in float32"] if wide else []
    empty = [name for name in ("x", "down") if getattr(call, name).cols == 0]
    return found + [f"{name} has no columns" for name in empty]


def numbers(call: Any) -> tuple[float, float, float]:
    """What the activation is told, as floats: an int would be a kernel of its own."""
    return float(call.limit), float(call.alpha), float(call.up_offset)


def activation(call: Any) -> dict[str, Any]:
    """The activation by the kernels' names."""
    gated = call.activation in GATED
    return {
        "ACTIVATION": GATED.get(call.activation, call.activation),
        "GATED": gated,
        "INTERLEAVED": call.interleaved,
        "HAS_LIMIT": gated and call.limit > 0,
    }


def rows_product(
    a: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    groups: Groups,
    config: dict[str, int],
    term: adapters.Term | None = None,
    **options: int,
) -> Tensor:
    """a · weight[e]ᵀ + bias[e] of each pair, [S, outputs] in the order of pairs; weight [E, outputs, features]."""
    added, flags = adapters.arguments(term)
    pairs, features, (experts, outputs) = a.shape[0], a.shape[1], weight.shape[:2]
    out = a.new_empty((pairs, outputs))
    grid = (groups.tiles * cdiv(outputs, config["BLOCK_N"]),)
    launch(
        rows_kernel, grid, a, weight, bias, out, *groups, pairs, experts, groups.tiles, features, outputs,
        *weight.stride(), *added, HAS_BIAS=bias is not None, EVEN=features % config["BLOCK_K"] == 0, **flags,
        **config, **options,
    )  # fmt: skip
    return out


def combined(
    rows_: Tensor, indices: Tensor, scales: Tensor | None, like: Tensor, experts: int, place: Tensor | None = None
) -> Tensor:
    """Σ_k of the rows of each token, in like's shape. place: where the row of each pair lies, if not in the order of
    pairs."""
    out = like.new_empty(like.shape)
    top_k, cols = indices.shape[-1], like.shape[-1]
    tokens = indices.numel() // top_k
    block_n = min(1024, max(16, next_power_of_2(cols)))
    block_m = max(1, min(next_power_of_2(tokens), 2048 // block_n))
    launch(
        combine_kernel, (cdiv(tokens, block_m) * cdiv(cols, block_n),),
        rows_, place, indices, scales, out, tokens, experts, top_k, cols,
        HAS_SCALES=scales is not None, BLOCK_M=block_m, BLOCK_N=block_n, num_warps=4,
    )  # fmt: skip
    return out


class Backward:
    """The launches of one backward."""

    def __init__(self, call: Any, config: BackwardConfig):
        self.call, self.config = call, config
        self.x, self.dy, self.indices = rows(call.x), rows(call.dy), call.indices.contiguous()
        self.scales = call.weights.contiguous()
        self.pairs, self.top_k = self.indices.numel(), self.indices.shape[-1]
        self.experts, self.hidden, self.inner = call.down.shape
        self.sized = {"BLOCK_M": config.block_m, "BLOCK_K": config.block_k, "GROUP_M": config.group_m}
        self.options = {"num_warps": config.num_warps, "num_stages": config.num_stages}

    def gradients(self) -> tuple[Tensor, ...]:
        call, x, mask = self.call, self.x, self.call.output_mask
        if self.pairs == 0:
            return self._zeros()
        self.groups = group(self.indices, self.experts, self.config.block_m)
        made = [x.new_empty(0) for _ in mask]
        up = adapters.adapter(call.gate_up_lora_a, call.gate_up_lora_b, call.gate_up_lora_scale, x.dtype)
        down = adapters.adapter(call.down_lora_a, call.down_lora_b, call.down_lora_scale, x.dtype)
        self.down_term = self._term(down, self.dy, self.top_k)
        dpre, scaled, parts = self._pre_gradient()
        self.up_term = self._term(up, dpre, 0)
        if mask[0]:
            made[0] = self.input_gradient(dpre)
        if mask[1]:
            made[1] = self.weight_gradient(dpre, x, torch.empty_like(call.gate_up), gathers_left=False)
        if mask[2]:
            made[2] = self.weight_gradient(self.dy, scaled, torch.empty_like(call.down), gathers_left=True)
        if mask[3]:
            made[3] = self._scale_gradient(parts)
        if mask[4]:
            made[4] = self._bias_gradient(dpre, call.gate_up_bias, gathers=False)
        if mask[5]:
            made[5] = self._bias_gradient(self.dy, call.down_bias, gathers=True)
        if up is not None:
            made[6:8] = self._factor_gradients(6, up, self.up_term, (x, self.top_k), (dpre, 0))
        if down is not None:
            made[8:] = self._factor_gradients(8, down, self.down_term, (scaled, 0), (self.dy, self.top_k))
        return tuple(made)

    def input_gradient(self, dpre: Tensor) -> Tensor:
        """The gradient of x from that of the pre-activations."""
        config, weight = {**self.sized, "BLOCK_N": self.config.rows_n}, self.call.gate_up.transpose(1, 2)
        each = rows_product(dpre, weight, None, self.groups, config, self.up_term, **self.options)
        return combined(each, self.indices, None, self.call.x, self.experts)

    def weight_gradient(self, left: Tensor, right: Tensor, out: Tensor, gathers_left: bool) -> Tensor:
        """out, filled with left ⊗ right summed over the pairs of each expert. Of the two one has a row for each pair in
        the order of experts; the other, left with `gathers_left`, one for each token."""
        config, (_, height, width) = self.config, out.shape
        if out.numel() == 0:
            return out
        tiles = cdiv(height, config.weight_m) * cdiv(width, config.weight_n)
        launch(
            weight_gradient_kernel, (self.experts * tiles,),
            left, right, out, self.groups.order, self.groups.starts, self.top_k, height, width,
            left.stride(0), right.stride(0), *out.stride(), GATHERS="left" if gathers_left else "right",
            BLOCK_M=config.weight_m, BLOCK_N=config.weight_n, BLOCK_K=config.weight_k, GROUP_M=config.group_m,
            **self.options,
        )  # fmt: skip
        return out

    def _term(self, found: adapters.Adapter | None, rows_: Tensor, top_k: int) -> adapters.Term | None:
        """What an adapter adds to the product of gradients rows_ with its weight, as `adapters.low_rank` takes them."""
        if found is None:
            return None
        low = self._low_rank(rows_, found.b.transpose(1, 2), found.scale, top_k)
        return adapters.Term(low, found.a.transpose(1, 2))

    def _low_rank(self, rows_: Tensor, factor: Tensor, scale: float, top_k: int) -> Tensor:
        return adapters.low_rank(rows_, factor, scale, self.groups, self.sized, top_k, self.config.num_stages)

    def _factors(self) -> tuple[Tensor | None, ...]:
        call = self.call
        return call.gate_up_lora_a, call.gate_up_lora_b, call.down_lora_a, call.down_lora_b

    def _factor_gradients(
        self, first: int, found: adapters.Adapter, term: Any, source: tuple[Tensor, int], gradient: tuple[Tensor, int]
    ) -> tuple[Tensor, Tensor]:
        """The gradients of an adapter's factors, outputs `first` and `first + 1`, where they are wanted. source,
        gradient: what the weight multiplies and its product's gradient, each with its top_k of `adapters.low_rank`."""
        (a, b), mask, config = self._factors()[first - 6 : first - 4], self.call.output_mask, self.config
        wanted = mask[first : first + 2]
        da, db = (f.new_empty(f.shape) if there else self.x.new_empty(0) for f, there in zip((a, b), wanted))
        sized = config.weight_m, config.weight_k, config.num_stages
        if mask[first]:
            adapters.factor_gradient(source[0], term.low, da.transpose(1, 2), self.groups, source[1], *sized)
        if mask[first + 1]:
            low = self._low_rank(source[0], found.a, found.scale, source[1])
            adapters.factor_gradient(gradient[0], low, db, self.groups, gradient[1], *sized)
        return da, db

    def _zeros(self) -> tuple[Tensor, ...]:
        call = self.call
        like = (call.x, call.gate_up, call.down, call.weights, call.gate_up_bias, call.down_bias, *self._factors())
        kept = (torch.preserve_format if i in (1, 2) else torch.contiguous_format for i in range(10))
        return tuple(
            torch.zeros_like(t, memory_format=form) if wanted else self.x.new_empty(0)
            for t, form, wanted in zip(like, kept, call.output_mask)
        )

    def _pre_gradient(self) -> tuple[Tensor, Tensor, Tensor]:
        call, config, x = self.call, self.config, self.x
        columns, (added, flags) = cdiv(self.inner, config.block_n), adapters.arguments(self.down_term)
        dpre, scaled = x.new_empty(call.pre.shape), x.new_empty((self.pairs, self.inner))
        parts = x.new_empty((columns, self.pairs), dtype=torch.float32)
        launch(
            pre_gradient_kernel, (self.groups.tiles * columns,),
            self.dy, call.down, call.pre, self.scales, dpre, scaled, parts, *self.groups,
            self.pairs, self.experts, self.groups.tiles, self.top_k, self.hidden, self.inner, self.dy.stride(0),
            *call.down.stride(), *numbers(call), *added, **activation(call), **flags, **self.sized,
            BLOCK_N=config.block_n, EVEN=self.hidden % config.block_k == 0, **self.options,
        )  # fmt: skip
        return dpre, scaled, parts

    def _scale_gradient(self, parts: Tensor) -> Tensor:
        bias = dense(self.call.down_bias)
        out = self.scales.new_empty(self.scales.shape)
        block_n = min(256, max(16, next_power_of_2(self.hidden)))
        launch(
            scale_gradient_kernel, (cdiv(self.pairs, 32),),
            parts, self.indices, self.dy, bias, out, self.pairs, self.experts, self.top_k, parts.shape[0], self.hidden,
            self.dy.stride(0), HAS_BIAS=bias is not None, BLOCK_M=32, BLOCK_N=block_n, num_warps=4,
        )  # fmt: skip
        return out

    def _bias_gradient(self, source: Tensor, bias: Tensor, gathers: bool) -> Tensor:
        out, cols = self.x.new_empty(bias.shape), bias.shape[1]
        launch(
            bias_gradient_kernel, (self.experts * cdiv(cols, 128),),
            source, self.scales, out, self.groups.order, self.groups.starts, self.top_k, cols, source.stride(0),
            GATHERS=gathers, BLOCK_M=32, BLOCK_N=128, num_warps=4,
        )  # fmt: skip
        return out
