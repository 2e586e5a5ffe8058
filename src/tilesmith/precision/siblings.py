"""Layers that read one tensor, such as q, k and v, computed as one product in 8 bits."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from tilesmith.precision import products
from tilesmith.precision.config import FP8Config
from tilesmith.precision.linear import FP8LinearLayer, output_dtype
from tilesmith.precision.products import Cast, Plan
from tilesmith.precision.weight_casts import CastsWeights, parametrized
from tilesmith.rewrite.siblings import Siblings

TOGETHER = "_fp8_together"  # the name of this child of a module


class FP8Siblings(CastsWeights, Siblings):
    """Computes for several layers of the module that holds it, in training mode, once the first of them is called.

    They share the scales of their input and of their gradients, and their weights are cast as one. Compiled code calls
    the layers one by one, and so does code that gives them different tensors.

    alone: the last output gets memory of its own, a copy: for attention that rotates q and k to new tensors, of which v
    would keep the whole product until the backward.
    """

    def __init__(self, config: FP8Config, layers: Sequence[FP8LinearLayer], alone: bool = False):
        super().__init__()
        self.config, self.alone, self.asked = config, alone, {}
        self.plan = Plan(config.recipe, config.forward_format.value, config.backward_format.value)
        self.used = False  # whether it computed last; else the layers did, and keep the casts
        object.__setattr__(self, "layers", tuple(layers))  # they are children of the module above
        first = layers[0]
        for which, layer in enumerate(layers):
            layer.input_scaling, layer.grad_scaling = first.input_scaling, first.grad_scaling
            layer.siblings = self, which
        self.refresh()

    def weights(self) -> tuple[Tensor, ...]:
        return tuple(layer.weight for layer in self.layers)

    def cast(self, *weights: Tensor) -> Cast:
        return products.cast_stack(weights, self.plan)

    def wants_casts(self) -> bool:
        """Not in eval mode, where the layers compute and keep casts of their own."""
        alive = self.training or not self.config.cache_weights_in_eval
        return self.used and alive and not any(map(parametrized, self.layers))

    def output(self, layer: nn.Module, which: int, x: Tensor) -> Tensor | None:
        if type(x) not in (Tensor, nn.Parameter):  # of fake tensors nothing tells whether they are the same
            return None
        found = super().output(layer, which, x)
        self.used = found is not None or (self.used and not self.training)
        return found

    def served(self, x: Tensor) -> bool:
        """Whether all layers are where x is, take it in 8 bits, and have gradients together."""
        if not self.training or torch.compiler.is_compiling() or any(map(parametrized, self.layers)):
            return False
        weights = self.weights()
        kinds = {(w.requires_grad, w.dtype, w.device) for w in weights}
        alike = len(kinds) == 1 and weights[0].device == x.device  # hooks that offload bring one layer at a time
        return alike and all(layer.serves(x, weight) for layer, weight in zip(self.layers, weights))

    def product(self, x: Tensor) -> tuple[Tensor, ...]:
        first, weights = self.layers[0], self.weights()
        biases = tuple(layer.bias for layer in self.layers if layer.bias is not None)
        delayed = self.plan.recipe == "delayed"
        given = first.input_cast(x, delayed, weights[0].requires_grad)
        gradient = products.Gradient(first.grad_scaling.known(delayed), first.grad_scaling.noted(True))
        how = self.plan, output_dtype(x), gradient, self.alone
        return products.together(x, weights, biases, given, self.weight_cast(), *how)

    def __getstate__(self) -> dict[str, Any]:
        # what an exception left behind may be no leaf, which is not copied
        return {**super().__getstate__(), "asked": {}}
