"""When a swapped module runs its own forward: where no kernel is, and where somebody watches what is passed over."""

from __future__ import annotations

import functools

import torch
from torch import Tensor, nn

from tilesmith.engine import ops as declared
from tilesmith.engine.backends import REFERENCE, missing
from tilesmith.engine.choice import pinned


def reaches(op: str, x: Tensor) -> bool:
    """True when a kernel other than the reference can serve `op` on the device of `x`, or the caller has pinned one."""
    return reaches_device(op, x.device.type)


@torch.compiler.assume_constant_result
def reaches_device(op: str, kind: str) -> bool:
    """The same for the devices of a type."""
    return bool(pinned(op)) or _has_kernel(op, kind)


def observed(module: nn.Module) -> bool:
    """Whether somebody sees or changes what `module` takes and returns; an op in its place would not tell them."""
    hooks = module._forward_hooks, module._forward_pre_hooks, module._backward_hooks, module._backward_pre_hooks
    return any(hooks) or "forward" in module.__dict__


@functools.cache
def _has_kernel(op: str, kind: str) -> bool:
    device = torch.device(kind)
    return any(missing(backend, device) is None for backend in declared()[op].backends() if backend != REFERENCE)
