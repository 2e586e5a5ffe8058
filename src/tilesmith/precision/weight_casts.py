"""Casts of weights that are kept between calls, and what tells whether they still stand for the weights."""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch import Tensor, nn

from tilesmith.precision.config import FP8Config


class CastsWeights(nn.Module):
    """A module that keeps casts of weights, which `refresh` makes anew.

    config: says whether they are kept. cached: the casts. kept: the stamps of the weights that were cast. whole: weak
    references to the weights that `refresh` found here as a whole, where casts are kept in eval mode.
    """

    config: FP8Config
    cached: tuple | None
    kept: tuple | None
    whole: tuple[weakref.ref, ...] = ()

    def weights(self) -> tuple[Tensor, ...]:
        """The weights that are cast."""
        raise NotImplementedError

    def cast(self, *weights: Tensor) -> tuple:
        """Their casts."""
        raise NotImplementedError

    def wants_casts(self) -> bool:
        """Whether this module uses casts of its own in its mode."""
        return True

    def refresh(self) -> None:
        """Cast the weights, if casts are kept."""
        self.cached, self.kept, self.whole = None, None, ()
        if not self.config.cache_weights or not self.wants_casts():
            return
        weights = self.weights()
        if all(keeps(w) and not w.is_inference() for w in weights):
            if self.config.cache_weights_in_eval:  # only then: PyTorch swaps no parameter that is referred to
                self.whole = tuple(map(weakref.ref, weights))
            self._keep(weights)

    def weight_cast(self, *given: Tensor) -> tuple:
        """The casts of the weights as they are: those that are kept, or new ones. given: the weights, if they were
        asked for already."""
        kept, cached = self.kept, self.cached  # in this order, the other way round than they are written
        weights = given or self.weights()
        if cached is not None and self._trusts(weights, kept):
            return cached
        if self._renews(weights):
            return self._keep(weights)
        with torch.no_grad():
            return self.cast(*(w.detach() for w in weights))

    def _keep(self, weights: tuple[Tensor, ...]) -> tuple:
        stamps = tuple(map(stamp, weights))  # before the cast: a later write must show
        self.cached = self.kept = None
        # What inference mode makes could not be saved for a backward.
        with torch.inference_mode(False), torch.no_grad():
            cached = self.cast(*(w.detach() for w in weights))
        self.cached, self.kept = cached, stamps
        return cached

    def _trusts(self, weights: tuple[Tensor, ...], kept: tuple) -> bool:
        """Whether casts that are kept may stand for weights.

        In eval mode only where the config asks for it: what is written through `.data` then (merged adapters, averages
        of weights) leaves no trace, and no optimizer's step follows that would renew the casts.
        """
        if not (self.training or self.config.cache_weights_in_eval) or not all(map(keeps, weights)):
            return False
        return torch.compiler.is_compiling() or kept == tuple(map(stamp, weights))

    def _renews(self, weights: tuple[Tensor, ...]) -> bool:
        """Whether casts made by a call are kept: in eval mode, of the parameters that `refresh` found. Others may be
        those of FSDP, which gathers other values into one tensor without a trace."""
        if torch.compiler.is_compiling() or self.training or not self.config.cache_weights_in_eval:
            return False
        return len(self.whole) == len(weights) and all(ref() is w for ref, w in zip(self.whole, weights))

    def train(self, mode: bool = True) -> CastsWeights:
        """What averages of weights, swapped in for eval mode through `.data`, were cast to is not for training, and
        the other way round."""
        switched = mode != self.training
        super().train(mode)
        if switched and self.config.cache_weights_in_eval:
            if mode:
                self.cached = self.kept = None  # until the next step: weights may be swapped back after this
            else:
                self.refresh()
        return self

    def _apply(self, fn: Any, recurse: bool = True) -> CastsWeights:
        super()._apply(fn, recurse)
        self.cached = self.kept = None  # until the next step: weights of the module above are moved after this
        return self

    def _load_from_state_dict(self, *args: Any, **kwargs: Any) -> None:
        super()._load_from_state_dict(*args, **kwargs)
        self.refresh()

    def __deepcopy__(self, memo: dict) -> CastsWeights:
        """By way of what this class pickles, not of `self`'s: parametrizations put a class on top that refuses it."""
        import copy

        made = type(self).__new__(type(self))
        memo[id(self)] = made
        made.__setstate__(copy.deepcopy(CastsWeights.__getstate__(self), memo))
        return made

    def __getstate__(self) -> dict:
        return {**self.__dict__, "cached": None, "kept": None, "whole": ()}


def keeps(weight: Tensor) -> bool:
    """Whether a cast of a weight may be kept: it is here, and not sharded, in which case the layer's parameter is
    another tensor at each use."""
    return type(weight) is nn.Parameter and weight.device.type != "meta"


def parametrized(layer: nn.Module) -> bool:
    """Whether a weight is computed whenever it is asked for, which may change what it is computed from, as spectral
    norms do."""
    return "parametrizations" in layer._modules


def stamp(weight: Tensor) -> tuple:
    """What tells whether a weight is still the one that was cast."""
    return id(weight), weight._version, weight.data_ptr(), weight.dtype
