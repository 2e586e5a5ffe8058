"""Stacked experts in 8 bits: a child module that the module of the experts calls in place of its own computation."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from tilesmith import ops
from tilesmith.engine.torch_private import autocasts
from tilesmith.nn import Experts
from tilesmith.nn.norm import expect_casters
from tilesmith.ops.moe.reference import GATED
from tilesmith.precision.config import FP8Config
from tilesmith.precision.linear import SERVED, output_dtype, plain, transformed
from tilesmith.precision.products import NAMES
from tilesmith.precision.weight_casts import CastsWeights

expect_casters()  # here, since a process that only unpickles a model comes this way too

FORMAT = "e4m3"  # of activations, weights and gradients: a factor for each row leaves no need of more range
_KNOWN = "_tilesmith_experts"  # what `optimize` says of experts that the library computes
_USUAL = {"transposed": False, "interleaved": False, "limit": 0.0, "alpha": 1.0, "up_offset": 0.0}  # what is served


class WeightCasts(NamedTuple):
    """The two weights of a module of experts in 8 bits, as `fp8_cast_experts` gives them."""

    gate_up8: Tensor
    gate_up8_t: Tensor
    gate_up_factor: Tensor
    down8: Tensor
    down8_t: Tensor
    down_factor: Tensor


class FP8Experts(CastsWeights):
    """Computes gated experts for the module that holds the stacked weights gate_up_proj and down_proj.

    Tokens and gradients are cast by rows, weights by one factor for each expert; the gradients of the weights are
    products in the inputs' dtype by the recipe "rowwise", else of 8-bit numbers. There is no history: every factor is
    that of the numbers that are cast.
    """

    def __init__(self, config: FP8Config, owner: nn.Module, activation: str):
        super().__init__()
        self.config, self.activation = config, activation
        object.__setattr__(self, "owner", owner)  # the module above is no child
        self.refresh()

    def weights(self) -> tuple[Tensor, Tensor]:
        return self.owner.gate_up_proj, self.owner.down_proj

    def cast(self, gate_up: Tensor, down: Tensor) -> WeightCasts:
        """Weights of 32 bits are rounded to 16 first, as autocast does."""
        halves = (w if w.element_size() == 2 else w.bfloat16() for w in (gate_up, down))
        return WeightCasts(*(t for w in halves for t in ops.fp8_cast_experts(w)))

    def serves(self, x: Tensor) -> bool:
        """Whether a call is computed in 8 bits."""
        gate_up, down = self.weights()
        rows = x.numel() // max(1, x.shape[-1])
        one = x.dtype == gate_up.dtype or autocasts(x.device.type)
        fits = rows >= self.config.min_tokens and x.dtype in SERVED and one
        return fits and all(map(plain, (x, gate_up, down))) and not transformed()

    def forward(self, x: Tensor, indices: Tensor, weights: Tensor) -> Tensor:
        """Σ_k weights[..., k] · expert indices[..., k] of x [..., C]."""
        return _Experts.apply(
            x,
            *self.weights(),
            indices,
            weights,
            self.activation,
            output_dtype(x),
            self.config.recipe != "rowwise",
            *self.weight_cast(),
        )

    def extra_repr(self) -> str:
        return f"{self.activation}, {FORMAT}"


class _Experts(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, gate_up, down, indices, weights, activation, dtype, eight, *casts):
        cast = WeightCasts(*casts)
        ctx.dtypes, ctx.activation = (x.dtype, gate_up.dtype), activation
        x = x.to(dtype)
        x8, x_factor = ops.fp8_cast_rows(x, FORMAT)
        y, pre = ops.experts_fp8(
            x8, x_factor, cast.gate_up8, cast.gate_up_factor, cast.down8, cast.down_factor, indices, weights,
            activation, NAMES[dtype],
        )  # fmt: skip
        kept = (x8, x_factor) if eight else (x, None)
        ctx.save_for_backward(
            *kept, pre, indices, weights, cast.gate_up8_t, cast.gate_up_factor, cast.down8_t, cast.down_factor
        )
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx, dy):
        x, x_factor, pre, indices, weights, *casts = ctx.saved_tensors
        x_dtype, w_dtype = ctx.dtypes
        wanted = [ctx.needs_input_grad[i] for i in (0, 1, 2, 4)]
        dy = dy.to(pre.dtype)
        dy8, factor = ops.fp8_cast_rows(dy, FORMAT)
        made = ops.experts_vjp_fp8(dy, dy8, factor, x, x_factor, pre, *casts, indices, weights, ctx.activation, wanted)
        dtypes = x_dtype, w_dtype, w_dtype, weights.dtype
        dx, dgate_up, ddown, dweights = (
            d.to(dtype) if there else None for d, dtype, there in zip(made, dtypes, wanted)
        )
        return dx, dgate_up, ddown, None, dweights, *(None,) * 9


def activation_of(module: nn.Module) -> str | None:
    """What the experts of a module compute, if the library computes them; None for other modules, and for experts
    that it leaves to the module."""
    if type(module) is Experts:
        return module.activation
    known = getattr(module, _KNOWN, None)
    return None if known is None else known.activation


def stacked(module: nn.Module) -> bool:
    """Whether a module looks like experts: it has two weights of three dims, the second of which is down_proj."""
    kept = module._parameters
    first, down = kept.get("gate_up_proj", kept.get("up_proj")), kept.get("down_proj")
    return first is not None and down is not None and first.ndim == down.ndim == 3


def misfit_of(module: nn.Module) -> str | None:
    """Why a module of stacked experts cannot be computed in 8 bits."""
    activation = activation_of(module)
    if activation is None:
        return "the library does not compute these experts; call optimize first"
    if activation not in GATED:
        return f"its activation is {activation!r}; {', '.join(map(repr, GATED))} are supported"
    known = getattr(module, _KNOWN, None)
    odd = [name for name, value in _USUAL.items() if known is not None and getattr(known, name) != value]
    if odd:
        return f"its {odd[0]} is {getattr(known, odd[0])}; {_USUAL[odd[0]]} is supported"
    biases = [n for n in ("gate_up_proj_bias", "down_proj_bias") if getattr(module, n, None) is not None]
    if biases:
        return f"it has {biases[0]}; experts without biases are supported"
    if any(w.dtype not in SERVED for w in (module.gate_up_proj, module.down_proj)):
        return f"its weights are {module.down_proj.dtype}; float32, bfloat16 and float16 are supported"
    _, hidden, inner = module.down_proj.shape
    for name, n in (("hidden size", hidden), ("inner size", inner)):
        if n % 16 or not n:
            return f"its {name} is {n}; multiples of 16 are supported"
    return None
