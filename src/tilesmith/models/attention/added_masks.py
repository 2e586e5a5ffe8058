"""Tensors that are added to scores and are masks: 0 where a key may be attended, far below 0 elsewhere."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

# A score that is filled with this or less has no weight beside any other.
HIDDEN = -1e4
_KNOWN = "_tilesmith_visible"  # attribute of an added tensor, or of that which it is a view of: a `_Seen`
_VIEWS = 8  # masks that are kept of one tensor


@dataclass
class _Seen:
    """What a look at a tensor found: its version then, whether all its values are 0 or hide keys, and the masks that
    views of it are, by where they lie in it."""

    version: int
    is_mask: bool
    masks: dict[tuple[Any, ...], Tensor] = field(default_factory=dict)


def visible(bias: Tensor) -> Tensor | None:
    """The mask that an added tensor is, if all its values are 0 or hide keys; else None.

    To look at values waits for the device. It is done once for a tensor that layers share, also where each of them
    slices or reshapes it, until it is written to.
    """
    whole = bias if bias._base is None else bias._base
    if whole.requires_grad or bias.ndim != 4 or (bias.is_cuda and torch.cuda.is_current_stream_capturing()):
        return None
    # Writes to a tensor of inference mode are not counted; the values of another dtype say nothing of these.
    if whole.is_inference() or whole.dtype is not bias.dtype:
        return bias == 0 if _is_mask(bias) else None
    seen = whole.__dict__.get(_KNOWN)
    if seen is None or seen.version != whole._version:
        seen = whole.__dict__[_KNOWN] = _Seen(whole._version, _is_mask(whole))
    if not seen.is_mask:
        return None
    place = (bias.storage_offset(), bias.shape, bias.stride())
    if place not in seen.masks:
        if len(seen.masks) == _VIEWS:
            seen.masks.clear()
        seen.masks[place] = bias == 0
    return seen.masks[place]


def _is_mask(x: Tensor) -> bool:
    return bool(((x == 0) | (x <= HIDDEN)).all())
