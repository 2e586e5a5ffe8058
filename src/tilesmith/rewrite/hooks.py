"""Whether hooks or a replaced forward observe a module."""

from __future__ import annotations

from torch import nn


def observed(module: nn.Module) -> bool:
    """Whether somebody sees or changes what `module` takes and returns; an op in its place would not tell them."""
    hooks = module._forward_hooks, module._forward_pre_hooks, module._backward_hooks, module._backward_pre_hooks
    return any(hooks) or "forward" in module.__dict__
