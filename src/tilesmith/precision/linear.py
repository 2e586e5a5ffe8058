"""FP8LinearLayer: `nn.Linear` whose products are of 8-bit numbers."""

from __future__ import annotations

import logging
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tilesmith.engine import torch_private
from tilesmith.engine.torch_private import autocasts
from tilesmith.precision import products
from tilesmith.precision.config import FP8Config
from tilesmith.precision.products import Cast, Plan
from tilesmith.precision.scaling import Scaling
from tilesmith.precision.weight_casts import CastsWeights, parametrized

log = logging.getLogger(__name__)

SERVED = frozenset(products.NAMES)


class Relay:
    """The newest tensor that was cast, with its cast: layers that get the same tensor do not cast it again.

    One for all layers of a model. A norm leaves here the cast that it made itself. A write into the tensor between two
    layers is noticed by its version; in a compiled graph it is not, see `convert_model_to_fp8`. Tensors that inference
    mode made have no version, and their casts are not kept.
    """

    def __init__(self) -> None:
        self.told_of_small = False
        self.clear()

    def clear(self) -> None:
        self.held: tuple[Tensor, int, Cast, tuple[str, bool]] | None = None  # one, as other threads read it

    def put(self, x: Tensor, cast: Cast, by: tuple[str, bool]) -> None:
        """by: the recipe, and whether the cast has what a weight's gradient needs."""
        version = _version(x)
        self.held = None if version is None else (x, version, cast, by)

    def get(self, x: Tensor, by: tuple[str, bool]) -> Cast | None:
        held = self.held
        if held is None or held[0] is not x or held[3] != by or held[1] != _version(x):
            return None
        return held[2]

    def tell_of_small(self, rows: int, least: int) -> None:
        """Log, once for a model, that calls of few rows train without 8 bits."""
        if not torch.compiler.is_compiling() and not self.told_of_small:
            self.told_of_small = True
            log.info("fp8: calls of %d rows are computed as without it; min_tokens is %d", rows, least)

    def __deepcopy__(self, memo: dict) -> Relay:
        memo[id(self)] = made = Relay()
        return made

    def __reduce__(self) -> tuple:
        return Relay, ()


def _version(x: Tensor) -> int | None:
    """What tells that x was changed in place; None where nothing does. In a graph, for which Dynamo has no number, it
    is 0."""
    if torch.compiler.is_compiling():
        return 0
    return None if x.is_inference() else x._version


class FP8LinearLayer(nn.Linear, CastsWeights):
    """A linear layer y = x weight^T + bias whose products are of 8-bit numbers; see `FP8Config` for how they are cast.

    Parameters, their names and dtypes are those of `nn.Linear`, and so is the state dict. x: [..., in_features],
    float32, bfloat16 or float16; y has its dtype, under autocast autocast's. Calls of less than `min_tokens` rows, of
    other dtypes, with a weight that is a DTensor, or within a transform of torch.func (grad, vmap, jvp) are computed as
    `nn.Linear` does.

    In eval mode activations and gradients are scaled by their own largest value and are not recorded in the recipe's
    history: an evaluation between two steps does not affect training.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        *,
        config: FP8Config | None = None,
    ):
        super().__init__(in_features, out_features, bias, device, dtype)
        misfit = misfit_of(self)
        if misfit:
            raise ValueError(f"FP8LinearLayer: {misfit}")
        self.enter(config or FP8Config(), Relay())

    def enter(self, config: FP8Config, relay: Relay) -> None:
        """What a linear layer has more in 8 bits."""
        device = self.weight.device
        self.config, self.relay = config, relay
        self.plan = Plan(config.recipe, config.forward_format.value, config.backward_format.value)
        kept = config.amax_history_length, device, config.recipe == "delayed"
        self.input_scaling, self.grad_scaling = Scaling(self.plan.forward, *kept), Scaling(self.plan.backward, *kept)
        self.fused = False
        self.siblings: tuple[Any, int] | None = None  # the `FP8Siblings` that it is one of, and which
        self.refresh()

    def leave(self) -> None:
        """Take back what `enter` did, or what it did before it failed."""
        for name in (
            "config",
            "relay",
            "plan",
            "input_scaling",
            "grad_scaling",
            "cached",
            "kept",
            "whole",
            "fused",
            "siblings",
        ):
            if name in self.__dict__ or name in self._modules:
                delattr(self, name)

    def weights(self) -> tuple[Tensor]:
        return (self.weight,)

    def cast(self, weight: Tensor) -> Cast:
        return products.cast_weight(weight, self.plan)

    def wants_casts(self) -> bool:
        """Not where a gated MLP, which computes in training mode alone, or layers of the same input cast the weight
        together with others."""
        alone = not (self.fused or self._together()) or (self.config.cache_weights_in_eval and not self.training)
        return alone and not parametrized(self)

    def _together(self) -> bool:
        """Whether others of the same input compute for this layer, and keep the casts."""
        # in a copy that is being made it has no attribute yet
        return self.siblings is not None and vars(self.siblings[0]).get("used", False)

    def _too_small(self) -> bool:
        """Whether the layer is converted only to be computed together with others."""
        chosen = self.siblings is None or self.config.module_filter_fn is not None
        return not chosen and self.out_features < self.config.min_features

    def forward(self, input: Tensor) -> Tensor:
        x = input  # by the name that `nn.Linear` has for it
        if self.siblings is not None and not torch.compiler.is_compiling():
            siblings, which = self.siblings
            found = siblings.output(self, which, x)
            if found is not None:
                return found
        weight = self.weight  # once: it may be parametrized
        if self._too_small() or not self.serves(x, weight):
            return F.linear(x, weight, self.bias)
        dtype = output_dtype(x)
        delayed = self.training and self.plan.recipe == "delayed"
        cast = self.weight_cast(weight)
        given = self.input_cast(x, delayed, weight.requires_grad)
        gradient = products.Gradient(self.grad_scaling.known(delayed), self.grad_scaling.noted(self.training))
        return products.linear(x, (weight, self.bias), given, cast, self.plan, dtype, gradient)

    def serves(self, x: Tensor, weight: Tensor) -> bool:
        """Whether a call with this layer's weight is computed in 8 bits."""
        rows = x.numel() // self.in_features
        known = x.dtype in SERVED and x.shape[-1:] == weight.shape[1:]  # others are refused as nn.Linear does it
        fits = known and rows >= self.config.min_tokens
        if known and not fits and self.training and rows:
            self.relay.tell_of_small(rows, self.config.min_tokens)
        return fits and plain(x) and plain(weight) and not transformed()

    def input_cast(self, x: Tensor, delayed: bool, trains: bool) -> Cast:
        """The cast of x. trains: whether a weight's gradient will be asked for."""
        by = self.plan.recipe, trains
        given = self.relay.get(x, by)
        if given is None:
            scaling = self.input_scaling
            with torch.no_grad():
                amax = scaling.noted(self.training)
                given = products.cast_input(x.detach(), self.plan, scaling.known(delayed), amax, by[1])
            self.relay.put(x, given, by)
        return given

    def _apply(self, fn: Any, recurse: bool = True) -> FP8LinearLayer:
        super()._apply(fn, recurse)
        self.refresh()
        return self

    def __setstate__(self, state: dict) -> None:
        super().__setstate__(state)
        self.refresh()

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, {self.plan.recipe} {self.plan.forward}/{self.plan.backward}"


def misfit_of(layer: nn.Linear) -> str | None:
    """Why a linear layer cannot be computed in 8 bits."""
    if layer.weight.dtype not in SERVED:
        return f"its weight is {layer.weight.dtype}; float32, bfloat16 and float16 are supported"
    for name in ("in_features", "out_features"):
        if getattr(layer, name) % 16 or not getattr(layer, name):
            return f"{name} is {getattr(layer, name)}; multiples of 16 are supported"
    return None


def output_dtype(x: Tensor) -> torch.dtype:
    kind = x.device.type
    return torch.get_autocast_dtype(kind) if autocasts(kind) else x.dtype


def plain(x: Tensor) -> bool:
    """Whether x is here as a whole: no DTensor, nor another subclass that has a say in what products of it are."""
    return type(x) in (Tensor, nn.Parameter) or isinstance(x, torch._subclasses.FakeTensor)


def transformed() -> bool:
    """Whether a transform of torch.func is at work, which has no rules for products of 8-bit numbers."""
    if torch.compiler.is_compiling() or not torch_private.knows_functorch:
        return False
    return torch_private.functorch() is not None
