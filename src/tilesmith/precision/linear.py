"""FP8LinearLayer: `nn.Linear` whose products are of 8-bit numbers."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tilesmith.precision import products
from tilesmith.precision.config import FP8Config
from tilesmith.precision.products import Cast, Plan
from tilesmith.precision.scaling import CastsWeights, Scaling

SERVED = frozenset(products.NAMES)


class Relay:
    """The newest tensor that was cast, with its cast: layers that get the same tensor do not cast it again.

    One for all layers of a model. A norm leaves here the cast that it made itself. A write into the tensor between two
    layers is noticed by its version; in a compiled graph it is not, see `convert_model_to_fp8`.
    """

    def __init__(self) -> None:
        self.clear()

    def clear(self) -> None:
        self.source, self.version, self.cast, self.by = None, 0, None, None

    def put(self, x: Tensor, cast: Cast, by: tuple[str, bool]) -> None:
        """by: the recipe, and whether the cast has what a weight's gradient needs."""
        self.source, self.version, self.cast, self.by = x, _version(x), cast, by

    def get(self, x: Tensor, by: tuple[str, bool]) -> Cast | None:
        return self.cast if self.source is x and self.by == by and self.version == _version(x) else None

    def __deepcopy__(self, memo: dict) -> Relay:
        memo[id(self)] = made = Relay()
        return made

    def __reduce__(self) -> tuple:
        return Relay, ()


def _version(x: Tensor) -> int:
    """What tells that x was changed in place. Nothing does in a graph (Dynamo has no number for it) or in inference
    mode."""
    return 0 if torch.compiler.is_compiling() or torch.is_inference_mode_enabled() else x._version


class FP8LinearLayer(nn.Linear, CastsWeights):
    """A linear layer y = x weight^T + bias whose products are of 8-bit numbers; see `FP8Config` for how they are cast.

    Parameters, their names and dtypes are those of `nn.Linear`, and so is the state dict. x: [..., in_features],
    float32, bfloat16 or float16; y has its dtype, under autocast autocast's. Calls of less than `min_tokens` rows, of
    other dtypes, or with a weight that is a DTensor are computed as `nn.Linear` does.

    In eval mode activations are cast by their own largest value, whatever the recipe's history says.
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
        self.cached, self.kept, self.fused = None, None, False
        self.refresh()

    def leave(self) -> None:
        """Take back what `enter` did, or what it did before it failed."""
        for name in ("config", "relay", "plan", "input_scaling", "grad_scaling", "cached", "kept", "fused"):
            if name in self.__dict__ or name in self._modules:
                delattr(self, name)

    def refresh(self) -> None:
        """Cast the weight, if casts are kept and nobody else casts it together with others."""
        self.cached = self.kept = None
        if self.config.cache_weights and not self.fused and keeps(self.weight):
            with torch.no_grad():
                self.cached, self.kept = products.cast_weight(self.weight, self.plan), stamp(self.weight)

    def forward(self, x: Tensor) -> Tensor:
        if not self.serves(x):
            return F.linear(x, self.weight, self.bias)
        dtype = output_dtype(x)
        delayed = self.training and self.plan.recipe == "delayed"
        cast = self.weight_cast()
        given = self.input_cast(x, delayed)
        gradient = products.Gradient(self.grad_scaling.known(delayed), self.grad_scaling.amax)
        return products.linear(x, (self.weight, self.bias), given, cast, self.plan, dtype, gradient)

    def serves(self, x: Tensor) -> bool:
        """Whether a call is computed in 8 bits."""
        rows = x.numel() // self.in_features
        return rows >= self.config.min_tokens and x.dtype in SERVED and plain(x) and plain(self.weight)

    def input_cast(self, x: Tensor, delayed: bool) -> Cast:
        by = self.plan.recipe, self.weight.requires_grad
        given = self.relay.get(x, by)
        if given is None:
            scaling = self.input_scaling
            with torch.no_grad():
                given = products.cast_input(x.detach(), self.plan, scaling.known(delayed), scaling.amax, by[1])
            self.relay.put(x, given, by)
        return given

    def weight_cast(self) -> Cast:
        if self.cached is not None and trusted(self, (self.weight,), (self.kept,)):
            return self.cached
        with torch.no_grad():
            return products.cast_weight(self.weight.detach(), self.plan)

    def _apply(self, fn: Any, recurse: bool = True) -> FP8LinearLayer:
        super()._apply(fn, recurse)
        self.refresh()
        return self

    def _load_from_state_dict(self, *args: Any, **kwargs: Any) -> None:
        super()._load_from_state_dict(*args, **kwargs)
        self.refresh()

    def __deepcopy__(self, memo: dict) -> FP8LinearLayer:
        return copied(self, memo)

    def __getstate__(self) -> dict:
        return {**self.__dict__, "cached": None, "kept": None}

    def __setstate__(self, state: dict) -> None:
        super().__setstate__(state)
        self.refresh()

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, {self.plan.recipe} {self.plan.forward}/{self.plan.backward}"


def copied(module: nn.Module, memo: dict) -> nn.Module:
    """A deep copy by way of the module's own pickling."""
    import copy

    made = type(module).__new__(type(module))
    memo[id(module)] = made
    made.__setstate__(copy.deepcopy(module.__getstate__(), memo))
    return made


def misfit_of(layer: nn.Linear) -> str | None:
    """Why a linear layer cannot be computed in 8 bits."""
    if layer.weight.dtype not in SERVED:
        return f"its weight is {layer.weight.dtype}; float32, bfloat16 and float16 are served"
    for name in ("in_features", "out_features"):
        if getattr(layer, name) % 16 or not getattr(layer, name):
            return f"{name} is {getattr(layer, name)}; multiples of 16 are served"
    return None


def output_dtype(x: Tensor) -> torch.dtype:
    kind = x.device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else x.dtype


def plain(x: Tensor) -> bool:
    """Whether x is here as a whole: no DTensor, nor another subclass that has a say in what products of it are."""
    return type(x) in (Tensor, nn.Parameter) or isinstance(x, torch._subclasses.FakeTensor)


def keeps(weight: Tensor) -> bool:
    """Whether a cast of a weight may be kept: it is here, and not sharded, in which case the layer's parameter is
    another tensor at each use."""
    return type(weight) is nn.Parameter and weight.device.type != "meta"


def trusted(module: nn.Module, weights: tuple[Tensor, ...], kept: tuple) -> bool:
    """Whether casts of weights, kept with their stamps, may stand for them.

    Not in eval mode: what is written through `.data` then (merged adapters, averages of weights) leaves no trace, and
    no optimizer's step follows that would renew the casts.
    """
    if not module.training or not all(map(keeps, weights)):
        return False
    return torch.compiler.is_compiling() or kept == tuple(map(stamp, weights))


def stamp(weight: Tensor) -> tuple:
    """What tells whether a weight is still the one that was cast."""
    return id(weight), weight._version, weight.data_ptr(), weight.dtype
