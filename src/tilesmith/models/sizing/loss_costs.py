"""What the loss of a language model takes when its forward ends and its backward begins."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import nn

from tilesmith.models.layers.losses import HeadForm
from tilesmith.ops.loss.chunk_sizes import tokens_per_step, whole
from tilesmith.rewrite import forms

# fp32 values for each logit that a cross-entropy of logits holds in its backward: the logarithms of the probabilities,
# their gradient and the logits'
OF_A_LOGIT = 3


class LossCosts(NamedTuple):
    """What the loss of n tokens holds beside its input x [n, columns] and the gradients of parameters, in bytes: for
    weight [classes, columns], which may be `trained`, and of x's dtype. fused: the loss computes its own logits, chunk
    by chunk (`ops.linear_cross_entropy`), else a cross-entropy takes all of them."""

    classes: int
    columns: int
    itemsize: int
    trained: bool
    fused: bool
    device: torch.device

    def __call__(self, tokens: int) -> int:
        dx, classes, size = tokens * self.columns * self.itemsize, self.classes, self.itemsize
        if not self.fused:
            return OF_A_LOGIT * 4 * tokens * classes
        dweight = classes * self.columns * size if self.trained else 0
        given = tokens, classes, self.columns, size, self.device, self.trained and size < 4
        if self.trained and whole(*given):
            return tokens * classes * size + dx + dweight
        kept = dx + (max(4, size) * classes * self.columns if self.trained else 0)
        return kept + max(tokens_per_step(*given) * classes * size, dx + dweight if self.trained else dx)


def loss_costs(model: nn.Module, itemsize: int, device: torch.device) -> LossCosts | None:
    """Those of a model of transformers whose hidden states have so many bytes an element; None without a head."""
    try:
        head = model.get_output_embeddings()
    except (AttributeError, NotImplementedError):
        return None
    weight, classes = getattr(head, "weight", None), getattr(head, "out_features", 0)
    if not classes:
        return None
    trained = weight is not None and weight.requires_grad
    fused = any(isinstance(form, HeadForm) for module in model.modules() for form in forms(module))
    return LossCosts(classes, head.in_features, itemsize, trained, fused, device)
