"""What is cast to 8 bits, in which formats and by which scales."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum

import torch
from torch import nn

from tilesmith.engine.argument_checks import flag, suggesting

RECIPES = ("delayed", "current", "rowwise", "blockwise")
TENSORWISE = ("delayed", "current")


class FP8Format(Enum):
    """An 8-bit floating-point format. Source: Micikevicius et al., FP8 Formats for Deep Learning, arXiv:2209.05433."""

    E4M3 = "e4m3"  # 1 sign, 4 exponent, 3 mantissa: float8_e4m3fn, up to 448
    E5M2 = "e5m2"  # 1 sign, 5 exponent, 2 mantissa: float8_e5m2, up to 57344

    @property
    def dtype(self) -> torch.dtype:
        """The torch dtype."""
        return torch.float8_e4m3fn if self is FP8Format.E4M3 else torch.float8_e5m2


@suggesting
@dataclass(frozen=True)
class FP8Config:
    """The FP8 recipe for linear layers and stacked experts.

    recipe: where scales come from.
      "delayed": one a tensor, from the largest values of the last steps, so that a cast is one pass and is made by
        whatever produces the tensor. The default, for pre-training.
      "current": one a tensor, from its own largest value: one more pass over it.
      "rowwise": one a row of activations and gradients and a row of the weight; the weight's gradient is a product in
        the inputs' dtype. For fine-tuning, where outliers matter more than time.
      "blockwise": 1 x 128 for activations and gradients, 128 x 128 for weights, as DeepSeek-V3 trains.
    forward_format: of activations and weights. backward_format: of gradients; None: E5M2 for one scale a tensor, E4M3
      for finer ones, which need less range.
    amax_history_length: how many steps the delayed recipe looks back.
    module_filter_fn: (module, name) -> whether a linear layer is to be converted. None: all but the output projection,
      routers and layers of less than `min_features` inputs or outputs, which would take longer in 8 bits. Sizes that
      are no multiples of 16 stay in any case.
    min_features, min_tokens: layers that are narrower, and calls of fewer rows, are computed as before.
    fuse: norms and gated MLPs that tilesmith computes (`optimize`, `tilesmith.nn`) cast what they make (delayed only).
      Layers of a module that read one tensor (q, k and v) are trained as one product (delayed and current), whose
      outputs are what min_features is compared with. Compiled code, eval mode and the finer recipes call them one by
      one.
    cache_weights: in training mode weights are cast once a step of the optimizer, for two bytes a parameter; else at
      each use, as in eval mode (see cache_weights_in_eval). Never those that FSDP shards.
    loss_scale, loss_scale_growth_interval: the initial and largest factor of the loss; it is halved after a skipped
      step, and doubled after `loss_scale_growth_interval` steps that were not skipped.
    convert_experts: stacked experts that the library computes (`optimize`, `tilesmith.nn`) are converted too: in any
      recipe E4M3 with a scale for each row of tokens and of gradients and one for each expert's weight, whose gradient
      is a product in the inputs' dtype by "rowwise", else of 8-bit numbers. module_filter_fn does not apply to them;
      min_features is compared with the sides of gate_up_proj.
    cache_weights_in_eval: casts are kept in eval mode too (with cache_weights), until PyTorch counts a write into the
      weight, `load_state_dict`, a move or a switch of the mode. A write through `.data` in eval mode leaves no trace:
      call `refresh_fp8` after PEFT merged adapters, or averages of weights were swapped in.
    """

    recipe: str = "delayed"
    forward_format: FP8Format = FP8Format.E4M3
    backward_format: FP8Format | None = None
    amax_history_length: int = 16
    module_filter_fn: Callable[[nn.Module, str], bool] | None = None
    min_features: int = 1024
    min_tokens: int = 256
    fuse: bool = True
    cache_weights: bool = True
    loss_scale: float = 1.0
    loss_scale_growth_interval: int = 1000
    convert_experts: bool = True
    cache_weights_in_eval: bool = False

    def __post_init__(self) -> None:
        if self.recipe not in RECIPES:
            raise ValueError(f"FP8Config: recipe is {self.recipe!r}; it must be one of {', '.join(RECIPES)}")
        tensorwise = self.recipe in TENSORWISE
        if self.backward_format is None:
            object.__setattr__(self, "backward_format", FP8Format.E5M2 if tensorwise else FP8Format.E4M3)
        for name in ("forward_format", "backward_format"):
            if not isinstance(getattr(self, name), FP8Format):
                raise TypeError(
                    f"FP8Config: {name} must be an FP8Format (E4M3 or E5M2), got {getattr(self, name)!r}; "
                    "write FP8Format.E4M3"
                )
        if self.forward_format is FP8Format.E5M2:
            swapped = self.backward_format is FP8Format.E4M3
            raise ValueError(
                f"FP8Config: forward_format is E5M2 and backward_format {self.backward_format.name}; "
                + ("they are swapped: " if swapped else "")
                + "activations and weights need E4M3's precision, and tensor cores multiply no two E5M2"
            )
        if not tensorwise and self.backward_format is FP8Format.E5M2:
            raise ValueError(
                f"FP8Config: backward_format is E5M2; recipe {self.recipe!r} has fine scales and takes E4M3 (or None)"
            )
        for name in ("amax_history_length", "min_features", "min_tokens", "loss_scale_growth_interval"):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise ValueError(f"FP8Config: {name} must be a positive int, got {value!r}")
        number = isinstance(self.loss_scale, int | float) and not isinstance(self.loss_scale, bool)
        if not number or not 0 < self.loss_scale < float("inf"):
            raise ValueError(f"FP8Config: loss_scale must be a positive number, got {self.loss_scale!r}")
        for name in ("fuse", "cache_weights", "convert_experts", "cache_weights_in_eval"):
            flag("FP8Config", name, getattr(self, name))
        if self.module_filter_fn is not None and not callable(self.module_filter_fn):
            raise TypeError(f"FP8Config: module_filter_fn must be callable, got {self.module_filter_fn!r}")
