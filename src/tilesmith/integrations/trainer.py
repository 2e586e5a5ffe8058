"""`optimize` as a callback of transformers' Trainer, and of every trainer that is made of it (TRL's, for one)."""

from __future__ import annotations

from typing import Any

from torch import nn

from tilesmith.integrations.blocks import refuse_idle_blocks
from tilesmith.models import optimize, undo
from tilesmith.models.attention.interface import needs_transformers

try:
    from transformers import TrainerCallback
except ImportError as problem:
    raise ImportError(needs_transformers("tilesmith.integrations.trainer")) from problem

OPTIONS = ("only", "exclude", "strict", "compile", "graphs")  # of `optimize`


class TilesmithCallback(TrainerCallback):
    """Optimise the trainer's model as soon as the trainer is there, before anything is wrapped or compiled.

        Trainer(model, ..., callbacks=[TilesmithCallback()])

    only, exclude, strict, compile, graphs: as in `tilesmith.optimize`. undo: give the model its own forwards back at
    the end of training. The callback runs at the end of transformers' `Trainer.__init__`. TRL's trainers add adapters
    (peft_config) before that and their fused head after it, so layers, attention and adapters compute by the library's
    ops, and the loss is TRL's.

    Raises TypeError for options that `optimize` does not have, and what `optimize` raises. Raises ValueError for graphs
    and compile with arguments of the trainer that leave nothing to record or compile: torch_compile for both; FSDP,
    ZeRO-3, `torch.nn.DataParallel` and checkpointing with use_reentrant=True for graphs.
    """

    def __init__(self, *, undo: bool = False, **options: Any):
        unknown = sorted(set(options) - set(OPTIONS))
        if unknown:
            raise TypeError(
                f"TilesmithCallback: unknown option {', '.join(unknown)}; pass {', '.join(OPTIONS)} or undo"
            )
        self.undo, self.options = undo, options

    def on_init_end(self, args: Any, state: Any, control: Any, model: nn.Module | None = None, **kwargs: Any) -> None:
        """Called by the trainer at the end of its construction."""
        if model is not None:
            self._optimize(model, args)

    def on_train_begin(
        self, args: Any, state: Any, control: Any, model: nn.Module | None = None, **kwargs: Any
    ) -> None:
        """Called by the trainer: a model made by `model_init` is there only now."""
        if model is not None and not hasattr(model, "tilesmith_report"):
            self._optimize(model, args)

    def _optimize(self, model: nn.Module, args: Any) -> None:
        settings = {name: getattr(args, name, None) for name in ("torch_compile", "fsdp", "n_gpu")}
        checkpoints = any(getattr(args, f"{kind}_checkpointing", False) for kind in ("activation", "gradient"))
        if checkpoints:  # one option under two names, of which the second is deprecated
            names = (f"{kind}_checkpointing_kwargs" for kind in ("activation", "gradient"))
            settings["activation_checkpointing_kwargs"] = next(
                filter(None, (getattr(args, n, None) for n in names)), {}
            )
        refuse_idle_blocks("TilesmithCallback", self.options, settings)
        optimize(model, **self.options)

    def on_train_end(self, args: Any, state: Any, control: Any, model: nn.Module | None = None, **kwargs: Any) -> None:
        """Called by the trainer after its last step."""
        if self.undo and model is not None:
            undo(model)
