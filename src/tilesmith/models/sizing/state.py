"""Run a model for its costs and leave it as it was: random numbers, gradients, buffers, training flags."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from torch import nn

from tilesmith.engine.model_state import buffers_kept, random_numbers_kept


def obstacle_to_probes(model: nn.Module) -> str | None:
    """Why a backward of `model` would do more than fill gradients, in words; None if it would not."""
    for name, parameter in model.named_parameters():
        if parameter.device.type == "meta":
            return f"{name} is on meta and has no values; load the model first"
        if getattr(parameter, "_post_accumulate_grad_hooks", None):
            return (
                f"{name} has a hook that runs after its gradient is accumulated (an optimizer inside the backward?), "
                "which a probe would set off"
            )
    return None


@contextlib.contextmanager
def state_preserved(model: nn.Module) -> Iterator[None]:
    """Inside, the model may be run forward and backward; afterwards its gradients, its buffers, its training flags and
    the random numbers of the CPU and of its devices are what they were. Gradients are absent inside.

    Raises RuntimeError for a model whose backward would do more than fill gradients.
    """
    why = obstacle_to_probes(model)
    if why is not None:
        raise RuntimeError(f"the model cannot be probed: {why}")
    parameters = list(model.parameters())
    gradients = [p.grad for p in parameters]
    training = [(module, module.training) for module in model.modules()]
    try:
        with buffers_kept(model), random_numbers_kept(p.device for p in parameters):
            for p in parameters:
                p.grad = None
            yield
    finally:
        for p, gradient in zip(parameters, gradients):
            p.grad = gradient
        for module, flag in training:
            module.training = flag
