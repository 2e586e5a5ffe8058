"""`optimize` as a callback of transformers' Trainer, and of every trainer that is made of it (TRL's, for one)."""

from __future__ import annotations

from typing import Any

from torch import nn

from tilesmith.models import optimize, undo

try:
    from transformers import TrainerCallback
except ImportError as problem:
    raise ImportError(
        "tilesmith.integrations.trainer needs transformers 5 or later: pip install 'transformers>=5'"
    ) from problem


class TilesmithCallback(TrainerCallback):
    """Optimise the trainer's model as soon as the trainer is there, before anything is wrapped or compiled.

        Trainer(model, ..., callbacks=[TilesmithCallback()])

    only, exclude, strict: as in `tilesmith.optimize`. undo: give the model its own forwards back at the end of
    training. A trainer that replaces `model.forward` while it is made (TRL with a fused head) leaves attention and loss
    as they are then; call `tilesmith.optimize(model)` before making it, after which the callback changes nothing more.

    Raises TypeError for options that `optimize` does not have, and what `optimize` raises.
    """

    def __init__(self, *, undo: bool = False, **options: Any):
        unknown = sorted(set(options) - {"only", "exclude", "strict"})
        if unknown:
            raise TypeError(
                f"TilesmithCallback: there is no option {', '.join(unknown)}; there are only, exclude, strict and undo"
            )
        self.undo, self.options = undo, options

    def on_init_end(self, args: Any, state: Any, control: Any, model: nn.Module | None = None, **kwargs: Any) -> None:
        """Called by the trainer at the end of its construction."""
        if model is not None:
            optimize(model, **self.options)

    def on_train_begin(
        self, args: Any, state: Any, control: Any, model: nn.Module | None = None, **kwargs: Any
    ) -> None:
        """Called by the trainer: a model made by `model_init` is there only now."""
        if model is not None and not hasattr(model, "tilesmith_report"):
            optimize(model, **self.options)

    def on_train_end(self, args: Any, state: Any, control: Any, model: nn.Module | None = None, **kwargs: Any) -> None:
        """Called by the trainer after its last step."""
        if self.undo and model is not None:
            undo(model)
