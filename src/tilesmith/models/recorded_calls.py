"""Calls of blocks, taken apart: their tensors, and the rest as a value that can be compared."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from tilesmith.engine import torch_private
from tilesmith.engine.choice import pins
from tilesmith.models.attention.masks import KeyMask
from tilesmith.models.blocks import Call, Foreign, checkpoints


class Kept:
    """A value that a call returns beside its tensors, and that each replay returns as it is."""

    def __init__(self, value: Any):
        self.value = value


_CONSTANT = (type(None), bool, int, float, str, torch.dtype, torch.device, Kept)


def flatten(value: Any, leaves: list[Tensor]) -> Any:
    """Append the tensors of `value` to `leaves`; returns the rest of it, hashable, for `rebuild`. Raises Foreign."""
    if isinstance(value, Tensor):
        leaves.append(value)
        return ("tensor", len(leaves) - 1)
    if isinstance(value, _CONSTANT):
        return ("constant", type(value), value)
    if type(value) in (tuple, list):
        return (type(value).__name__, tuple(flatten(item, leaves) for item in value))
    if type(value) is dict:
        return ("dict", tuple((name, flatten(item, leaves)) for name, item in value.items()))
    if isinstance(value, KeyMask):
        tensors = flatten((value.lengths, value.documents), leaves)
        return ("mask", (value.sizes, value.where, value.causal, value.window), tensors)
    raise Foreign(type(value).__name__)


def rebuild(spec: Any, leaves: list[Tensor]) -> Any:
    """The value that `flatten` took apart, with these tensors."""
    kind, *rest = spec
    if kind == "tensor":
        return leaves[rest[0]]
    if kind == "constant":
        return rest[1]
    if kind == "mask":
        return KeyMask(*rest[0], *rebuild(rest[1], leaves))
    if kind == "dict":
        return {name: rebuild(item, leaves) for name, item in rest[0]}
    made = [rebuild(item, leaves) for item in rest[0]]
    return tuple(made) if kind == "tuple" else made


@dataclass(frozen=True)
class Link:
    """A call of one block among those that are recorded together.

    plain, spec: what runs it, and its arguments without their tensors. shapes: what these are like. state: what else
    its kernels depend on. sources: where each tensor comes from: (True, i) is the i-th that the link before returned,
    (False, i) the i-th that the first link is given. copied: whether what it returns is handed out as copies, since
    whoever gets it may keep it beyond the next replay.
    """

    block: weakref.ref[nn.Module]
    plain: Call
    spec: Any
    shapes: tuple
    state: tuple
    sources: tuple[tuple[bool, int], ...]
    copied: bool = False

    @property
    def key(self) -> tuple:
        """What calls of the block have in common with this one."""
        return self.plain, self.spec, self.shapes, self.state

    def given(self, first: Sequence[Any], before: Sequence[Any]) -> list[Any]:
        """What this link is given, of what the first is given and the one before returned."""
        return [(before if behind else first)[place] for behind, place in self.sources]


def described(tensor: Tensor) -> tuple:
    """What a recording depends on of a tensor that it is given."""
    return tensor.shape, tensor.stride(), tensor.dtype, tensor.device, tensor.requires_grad


def surroundings(block: nn.Module, device: torch.device) -> tuple:
    """What else a call's kernels depend on."""
    kind = device.type
    autocast = torch.is_autocast_enabled(kind) and torch.get_autocast_dtype(kind)
    pinned = tuple(sorted(pins().items()))
    settings = torch_private.deterministic(), torch.get_float32_matmul_precision(), torch.get_default_dtype()
    return block.training, checkpoints(block), autocast, settings, pinned
