"""Norms and gated MLPs that cast their outputs to 8 bits: child modules that are called in place of their parents' own
computation."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from tilesmith import ops
from tilesmith.nn.norm import expect_casters
from tilesmith.precision import products
from tilesmith.precision.config import FP8Config
from tilesmith.precision.linear import FP8LinearLayer, Relay, output_dtype, plain, transformed
from tilesmith.precision.products import Bounds, Cast, Plan
from tilesmith.precision.scaling import Scaling
from tilesmith.precision.weight_casts import CastsWeights, parametrized
from tilesmith.rewrite import observed

expect_casters()  # here, since a process that only unpickles a model comes this way too


class FP8Norm(nn.Module):
    """Computes an RMSNorm for the module that holds it, and leaves the cast of what it returns for the layers behind.

    While its scale is not known, the norm and the cast are two passes.
    """

    def __init__(self, config: FP8Config, relay: Relay, device: torch.device):
        super().__init__()
        self.relay, self.recipe, self.format = relay, config.recipe, config.forward_format.value
        self.min_tokens = config.min_tokens
        self.scaling = Scaling(self.format, config.amax_history_length, device, self.recipe == "delayed")

    def serves(self, x: Tensor) -> bool:
        """Whether to ask this module rather than `ops`."""
        fits = x.numel() >= self.min_tokens * x.shape[-1] and x.dtype in products.NAMES
        return self.training and fits and plain(x) and not transformed()

    def rms_norm(self, x: Tensor, weight: Tensor | None, eps: float, offset: float, casting: str) -> Tensor:
        bound, amax = self.scaling.known(True), self.scaling.amax
        if bound is None:
            y = ops.rms_norm(x, weight, eps, offset, casting)
            self._leave(y, None)
            return y
        y, y8, factor = _RmsNorm.apply(x, weight, eps, offset, casting, bound, amax, self.format)
        self._leave(y, Cast(y8, factor))
        return y

    def add_rms_norm(
        self, x: Tensor, residual: Tensor, weight: Tensor | None, eps: float, offset: float, casting: str
    ) -> tuple[Tensor, Tensor]:
        bound, amax = self.scaling.known(True), self.scaling.amax
        if bound is None:
            y, s = ops.add_rms_norm(x, residual, weight, eps, offset, casting)
            self._leave(y, None)
            return y, s
        y, s, y8, factor = _AddRmsNorm.apply(x, residual, weight, eps, offset, casting, bound, amax, self.format)
        self._leave(y, Cast(y8, factor))
        return y, s

    def _leave(self, y: Tensor, cast: Cast | None) -> None:
        if cast is None:
            with torch.no_grad():
                cast = products.cast_tensorwise(y.detach(), None, self.scaling.amax, self.format)
        self.relay.put(y, cast, (self.recipe, True))


def _saved_norm_gradient(ctx, dy, ds, x, weight, rstd):
    """(dx, dweight) of a norm."""
    wants = ctx.needs_input_grad[0], weight is not None and ctx.needs_input_grad[ctx.weight_at]
    if ctx.weight_at == 1:
        dx, dweight = ops.rms_norm_vjp(dy, x, weight, rstd, ctx.offset, wants)
    else:
        wants = wants[0] or ctx.needs_input_grad[1], wants[1]
        dx, dweight = ops.add_rms_norm_vjp(dy, ds, x, weight, rstd, ctx.offset, wants)
    return dx if wants[0] else None, dweight if wants[1] else None


class _RmsNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, eps, offset, casting, bound, amax, format):
        y, y8, factor, rstd = ops.rms_norm_fp8(x, weight, bound, amax, eps, offset, casting, format)
        ctx.save_for_backward(x, weight, rstd)
        ctx.offset, ctx.weight_at = offset, 1
        ctx.mark_non_differentiable(y8, factor)
        return y, y8, factor

    @staticmethod
    @once_differentiable
    def backward(ctx, dy, _, __):
        dx, dweight = _saved_norm_gradient(ctx, dy, None, *ctx.saved_tensors)
        return dx, dweight, *(None,) * 6


class _AddRmsNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, residual, weight, eps, offset, casting, bound, amax, format):
        y, s, y8, factor, rstd = ops.add_rms_norm_fp8(x, residual, weight, bound, amax, eps, offset, casting, format)
        ctx.save_for_backward(s, weight, rstd)
        ctx.offset, ctx.weight_at, ctx.x_dtype = offset, 2, x.dtype
        ctx.mark_non_differentiable(y8, factor)
        return y, s, y8, factor

    @staticmethod
    @once_differentiable
    def backward(ctx, dy, ds, _, __):
        dresidual, dweight = _saved_norm_gradient(ctx, dy, ds, *ctx.saved_tensors)
        dx = None if dresidual is None else dresidual.to(ctx.x_dtype)
        return dx, dresidual, dweight, *(None,) * 6


class FP8GatedMLP(CastsWeights):
    """Computes down(silu(gate(x)) * up(x)) for the module that holds the three layers.

    Gate and up share the scales of their input and of their gradient, and their weights are cast as one.
    """

    def __init__(self, config: FP8Config, layers: tuple[FP8LinearLayer, FP8LinearLayer, FP8LinearLayer]):
        super().__init__()
        gate, up, down = layers
        self.config = config
        self.plan = Plan(config.recipe, config.forward_format.value, config.backward_format.value)
        object.__setattr__(self, "layers", layers)  # they are children of the module above
        up.input_scaling, up.grad_scaling = gate.input_scaling, gate.grad_scaling
        gate.fused = up.fused = True
        gate.refresh()
        up.refresh()
        self.refresh()

    def weights(self) -> tuple[Tensor, Tensor]:
        return self.layers[0].weight, self.layers[1].weight

    def cast(self, gate: Tensor, up: Tensor) -> Cast:
        return products.cast_stack((gate, up), self.plan)

    def wants_casts(self) -> bool:
        """Not in eval mode, where the layers compute and keep casts of their own."""
        return (self.training or not self.config.cache_weights_in_eval) and not any(map(parametrized, self.layers))

    def serves(self, x: Tensor, gate: nn.Module, up: nn.Module, down: nn.Module) -> bool:
        """Whether the layers are still those, nobody watches them, and the call is one for 8 bits."""
        layers = self.layers
        same = gate is layers[0] and up is layers[1] and down is layers[2]
        if not same or not self.training or any(map(parametrized, layers)) or any(map(observed, layers)):
            return False
        return all(layer.serves(x, layer.weight) for layer in (gate, up)) and plain(down.weight)

    def forward(self, x: Tensor) -> Tensor:
        gate, up, down = self.layers
        delayed = self.plan.recipe == "delayed"
        scalings = down.input_scaling, down.grad_scaling, gate.grad_scaling
        bounds = Bounds(*(value for s in scalings for value in (s.known(delayed), s.amax)))
        given = gate.input_cast(x, delayed, gate.weight.requires_grad)
        weights = gate.weight, up.weight, down.weight
        return products.gated_mlp(
            x, *weights, given, self.weight_cast(), down.weight_cast(), bounds, self.plan, output_dtype(x)
        )
