"""Calibration data: what is run to see how much the loss notices, and how far a packed model is from the original."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

Loss = Callable[[nn.Module, Any], Tensor]
HELD_OUT = 4  # one batch in so many is kept for the comparison of allocations


@dataclass(frozen=True)
class Calibration:
    """Batches for the sensitivities, others for the comparison, and the loss. loss_fn None: distance from the original
    model's outputs. argument: what errors call the batches; `analyze_precision_opportunities` has a single one, and no
    loss_fn."""

    batches: tuple[Any, ...]
    held_out: tuple[Any, ...]
    loss_fn: Loss | None
    argument: str = "calibration"

    def told(self, i: int) -> str:
        """What errors call batch `i`."""
        return f"batch {i}" if self.argument == "calibration" else "it"

    def objective(self, model: nn.Module, batch: Any, generator: torch.Generator) -> tuple[Tensor, int]:
        """A scalar the mean squares of whose gradients are a Fisher information, of the batch's positions added up, and
        how many these are.

        Of a loss_fn: the loss times the number of positions that it averages. Of a model with logits: cross-entropy of
        labels that the model itself draws. Of any other output: its product with random signs, which stands for half
        the squared change of the output.
        """
        if self.loss_fn is not None:
            loss = _scalar(self.loss_fn(model, batch))
            return loss * positions(batch), positions(batch)
        kind, out = output_of(call(model, batch))
        if kind == "logits":
            flat = out.float().flatten(0, -2)
            drawn = torch.multinomial(flat.detach().softmax(-1).cpu(), 1, generator=generator)[:, 0]
            return F.cross_entropy(flat, drawn.to(flat.device), reduction="sum"), len(flat)
        signs = torch.randint(0, 2, out.shape, generator=generator).to(out.device) * 2 - 1
        return (out.float() * signs).sum(), out.shape[:-1].numel()

    def references(self, model: nn.Module) -> list[Tensor] | None:
        """The original outputs on the held-out batches; None where a loss_fn needs none."""
        if self.loss_fn is not None:
            return None
        with torch.no_grad():
            return [output_of(call(model, batch))[1].detach() for batch in self.held_out]

    def loss(self, model: nn.Module, references: list[Tensor] | None, batches: Sequence[Any] | None = None) -> float:
        """The mean loss on the held-out batches, or on others that a loss_fn knows. Without a loss_fn: the KL
        divergence from the original logits to the model's, or the squared distance from the original output over its
        square."""
        total = 0.0
        batches = self.held_out if batches is None else batches
        with torch.no_grad():
            for i, batch in enumerate(batches):
                if self.loss_fn is not None:
                    total += float(_scalar(self.loss_fn(model, batch)))
                else:
                    total += float(distance(*output_of(call(model, batch)), references[i]))
        return total / len(batches)


def calibration_of(given: Any, loss_fn: Loss | None, device: torch.device | None) -> Calibration:
    """Batches of what the user passes: a tensor, whose rows are samples, or a sequence of tensors, tuples or dicts.

    Raises TypeError, ValueError for anything else, and for less than two batches: one of them is for the comparison.
    """
    if loss_fn is not None and not callable(loss_fn):
        raise TypeError(f"loss_fn must be callable, (model, batch) -> loss, got {type(loss_fn).__name__}")
    if isinstance(given, Tensor):
        if given.ndim < 1 or given.shape[0] < 2:
            raise ValueError(
                f"calibration is a tensor of shape {tuple(given.shape)}; it must have 2 rows or more: some are kept to "
                "compare allocations"
            )
        given = given.chunk(min(8, given.shape[0]))
    if not isinstance(given, Sequence) or isinstance(given, str | bytes):
        raise TypeError(
            "calibration must be a tensor or a sequence of batches (tensors, tuples, dicts), got "
            f"{type(given).__name__}"
        )
    if len(given) < 2:
        raise ValueError(
            f"calibration has {len(given)} batches; it must have 2 or more: one is kept to compare allocations"
        )
    for i, batch in enumerate(given):
        if not isinstance(batch, Tensor | tuple | list | dict):
            raise TypeError(f"calibration: batch {i} is {type(batch).__name__}; it must be a tensor, a tuple or a dict")
    batches = [moved(batch, device) for batch in given]
    kept = max(1, len(batches) // HELD_OUT)
    return Calibration(tuple(batches[:-kept]), tuple(batches[-kept:]), loss_fn)


def check_fit(calibration: Calibration, model: nn.Module) -> None:
    """Run the model on each batch. ValueError where it does not take one or its loss is not finite."""
    seen = set()  # one batch may stand for several draws
    for i, batch in enumerate((*calibration.batches, *calibration.held_out)):
        if id(batch) in seen:
            continue
        seen.add(id(batch))
        try:
            with torch.no_grad():
                if calibration.loss_fn is not None:
                    value = _scalar(calibration.loss_fn(model, batch))
                else:
                    value = output_of(call(model, batch))[1].float().square().mean()
        except (RuntimeError, TypeError, ValueError, IndexError, KeyError, AttributeError) as problem:
            raise ValueError(
                f"{calibration.argument} does not fit the model: {calibration.told(i)} raises "
                f"{type(problem).__name__}: {problem}"
            ) from problem
        if not math.isfinite(float(value)):
            raise ValueError(
                f"{calibration.argument}: on {calibration.told(i)} the model's loss or output is {float(value)}; it "
                "must be finite"
            )


def call(model: nn.Module, batch: Any) -> Any:
    """The model on a batch: a dict by keyword, a tuple or list by position."""
    if isinstance(batch, dict):
        return model(**batch)
    return model(*batch) if isinstance(batch, tuple | list) else model(batch)


def output_of(out: Any) -> tuple[str, Tensor]:
    """("logits" or "values", tensor) of what a model returned."""
    logits = getattr(out, "logits", None)
    if isinstance(logits, Tensor):
        return "logits", logits
    if isinstance(out, tuple | list) and out:
        out = out[0]
    out = getattr(out, "last_hidden_state", out)
    if not isinstance(out, Tensor) or not out.is_floating_point():
        raise TypeError(
            f"the model returned {type(out).__name__}; without a loss_fn it must return a floating tensor, a tuple "
            "that begins with one, or an object with logits or last_hidden_state"
        )
    return "values", out


def distance(kind: str, out: Tensor, original: Tensor) -> Tensor:
    """How far an output is from the original."""
    out, original = out.float(), original.float()
    if kind == "logits":
        p, q = original.log_softmax(-1).flatten(0, -2), out.log_softmax(-1).flatten(0, -2)
        return F.kl_div(q, p, reduction="batchmean", log_target=True)
    return (out - original).square().mean() / original.square().mean().clamp(min=1e-30)


def positions(batch: Any) -> int:
    """How many positions the loss of a batch averages, as far as its first tensor tells: all of [B, T] integers, else
    the rows."""
    tensors = batch.values() if isinstance(batch, dict) else batch if isinstance(batch, tuple | list) else (batch,)
    first = next((t for t in tensors if isinstance(t, Tensor)), None)
    if first is None or not first.ndim:
        return 1
    return first.shape[0] if first.is_floating_point() else first.numel()


def moved(batch: Any, device: torch.device | None) -> Any:
    """A batch with its tensors on a device; those of inference mode, which gradients refuse, are copied."""
    if isinstance(batch, Tensor):
        batch = batch.clone() if batch.is_inference() else batch
        return batch if device is None else batch.to(device)
    if isinstance(batch, dict):
        return {key: moved(value, device) for key, value in batch.items()}
    return tuple(moved(value, device) for value in batch) if isinstance(batch, tuple | list) else batch


def _scalar(loss: Any) -> Tensor:
    if not isinstance(loss, Tensor) or loss.numel() != 1:
        raise TypeError(f"loss_fn must return a tensor of one number, got {type(loss).__name__}")
    return loss.reshape(())
