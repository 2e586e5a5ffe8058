"""Does an optimised model compute what the original does? Both against the original in fp64, within derived budgets."""

from __future__ import annotations

import copy
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from tilesmith.validate import Budget
from tilesmith.validate.budget import compare as judge


@dataclass(frozen=True)
class Check:
    """One quantity: the original's largest error against the fp64 oracle, and the optimised model's with its budget."""

    name: str
    original: float
    optimised: Budget


class InDouble(TorchFunctionMode):
    """Code that says float32 gets float64, so that a model which rounds to fp32 inside can serve as an fp64 oracle."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func is Tensor.float:
            return args[0].double()
        args = tuple(torch.float64 if a is torch.float32 else a for a in args)
        kwargs = {k: torch.float64 if v is torch.float32 else v for k, v in (kwargs or {}).items()}
        return func(*args, **kwargs)


def compare(original: nn.Module, optimised: nn.Module, ids: Tensor) -> list[Check]:
    """Checks of the logits, the loss and every parameter's gradient on the tokens `ids` [B, T]."""
    with InDouble():
        exact = _quantities(copy.deepcopy(original).double(), ids)
    plain, ours = _quantities(original, ids), _quantities(optimised, ids)
    error = {name: float((plain[name].double() - exact[name]).abs().max()) for name in exact}
    return [Check(name, error[name], judge(ours[name], plain[name], exact[name])) for name in exact]


def summary(checks: list[Check]) -> list[Check]:
    """The logits, the loss, and of all gradients the one that uses most of its budget."""
    gradients = [c for c in checks if c.name.startswith("d ")]
    worst = max(gradients, key=lambda check: check.optimised.ratio)
    named = Check(f"{len(gradients)} gradients, nearest: {worst.name}", worst.original, worst.optimised)
    return [check for check in checks if check not in gradients] + [named]


def _quantities(model: nn.Module, ids: Tensor) -> dict[str, Tensor]:
    """Logits and loss, and by "d name" the gradient of each parameter; the model's own gradients stay as they were."""
    parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}
    with torch.no_grad():
        logits = model(input_ids=ids).logits
    loss = model(input_ids=ids, labels=ids).loss
    gradients = torch.autograd.grad(loss, list(parameters.values()))
    found = {"logits": logits, "loss": loss.detach()}
    return found | {f"d {name}": gradient for name, gradient in zip(parameters, gradients)}
