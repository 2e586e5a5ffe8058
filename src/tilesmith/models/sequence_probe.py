"""What a transformers model makes of the arguments that `shard_sequence` gives it, seen by runs on a few tokens."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

_TOKENS, _PADDED, _SHIFT = 6, 2, 3
_NO_LABEL = -100
Seen = list[tuple[Tensor, Tensor]]  # query and key of each attention


@dataclass(frozen=True)
class Habits:
    """counts: whether positions that are not given are 0, 1, 2, .... counts_padding: whether they are so behind padding
    too. takes_shifted: whether the loss is that of `shift_labels`, None for a model without a loss."""

    counts: bool
    counts_padding: bool
    takes_shifted: bool | None


def habits(model: nn.Module, watch: Callable[[], Seen]) -> Habits:
    """The habits of a model, by three forwards of a few tokens each, without gradients.

    watch: begins to record what its attention gets, which then computes nothing, in place of what it recorded before.
    Rows of the runs are a plain one, one with padding at its left, one with padding at its right, and a plain one whose
    given positions begin later.
    Raises ValueError for weights without values and for a model to which positions make no difference.
    """
    name = type(model).__name__
    where = model.get_input_embeddings().weight.device
    if where.type == "meta":
        raise ValueError(f"shard_sequence: the weights of {name} are on the meta device; give them values first")
    mask = torch.ones(4, _TOKENS, dtype=torch.long, device=where)
    mask[1, :_PADDED] = mask[2, -_PADDED:] = 0
    positions = torch.arange(_TOKENS, device=where) + torch.tensor([[0], [0], [0], [_SHIFT]], device=where)
    ids = torch.full(mask.shape, _plain_token(model.config), device=where)
    batch = {"input_ids": ids, "attention_mask": mask, "use_cache": False, "return_dict": True}
    labels = {}
    if "labels" in inspect.signature(model.forward).parameters and takes_shift_labels(model):
        nothing = torch.full_like(ids, _NO_LABEL)
        labels = {"labels": ids, "shift_labels": nothing, "num_items_in_batch": torch.ones((), device=where)}

    training = [m for m in model.modules() if m.training]
    model.eval()
    try:
        with torch.no_grad():
            default = watch()
            model(**batch)
            given = watch()
            none = model(**batch, **labels, position_ids=positions)
            watch()
            all_of_them = model(**batch, **labels | {"shift_labels": ids}, position_ids=positions) if labels else none
    finally:
        for module in training:
            module.training = True
    plain, left, right, later = (_differs(default, given, row, mask[row].bool()) for row in range(4))
    if not (plain or left or right or later):
        raise ValueError(
            f"shard_sequence: position_ids make no difference to {name}; a rank's tokens would have the wrong positions"
        )
    losses = [getattr(out, "loss", None) for out in (none, all_of_them)]
    shifted = None if losses[0] is None else not torch.allclose(*(loss.float() for loss in losses), rtol=1e-3)
    return Habits(not (plain or right), not left, shifted if labels else None)


def takes_shift_labels(model: nn.Module) -> bool:
    """Whether the loss function of a model takes labels that are shifted already."""
    return "shift_labels" in inspect.signature(model.loss_function).parameters


def _differs(some: Seen, others: Seen, row: int, tokens: Tensor) -> bool:
    """Whether an attention got other queries or keys of the row's tokens, beyond rounding."""
    for pair, other in zip(some, others, strict=True):
        for x, y in zip(pair, other):
            x, y = (z[row][:, tokens].float() for z in (x, y))
            if (x - y).abs().max() > 4 * torch.finfo(pair[0].dtype).eps * x.abs().max():
                return True
    return False


def _plain_token(config: Any) -> int:
    """A token that no config of the model gives a meaning."""
    taken: set[int] = set()
    pending = [config.to_dict()]
    while pending:
        for name, value in pending.pop().items():
            if isinstance(value, dict):
                pending.append(value)
            elif str(name).endswith(("_token_id", "_token_index", "_token")):
                taken |= {v for v in (value if isinstance(value, Sequence) else [value]) if isinstance(v, int)}
    return next(token for token in range(len(taken) + 1) if token not in taken)
