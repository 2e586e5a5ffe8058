"""What a model would read of its masks and positions, read before calls in which values cannot be read."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any, NamedTuple

from torch import Tensor

from tilesmith.models.attention.masks import Padding, are_packed, padding, unpacked_positions, unread_masks
from tilesmith.models.blocks import Foreign

POSITIONS = "tensor of position_ids that is not [B, T]"
MASK = "mask of one of several inputs"
_TEXT = {
    "input_ids", "inputs_embeds", "attention_mask", "position_ids", "token_type_ids", "labels", "shift_labels",
    "num_items_in_batch",
}  # fmt: skip


class MaskValues(NamedTuple):
    """What is read of a call's tensors where the call itself cannot read them: before it is recorded, or run on fake
    tensors.

    padding: of the mask of tokens, if there is one. packed: whether positions are those of packed sequences.
    """

    padding: Padding | None
    packed: bool

    @classmethod
    def of(cls, arguments: dict[str, Any], decodes: bool) -> MaskValues:
        """decodes: whether the model reads another text before. Raises Foreign for what may not mean that."""
        mask, positions = arguments.get("attention_mask"), arguments.get("position_ids")
        if isinstance(positions, Tensor) and positions.ndim != 2:
            raise Foreign(POSITIONS)
        masked = isinstance(mask, Tensor) and mask.ndim == 2
        if masked and (decodes or any(isinstance(x, Tensor) for name, x in arguments.items() if name not in _TEXT)):
            raise Foreign(MASK)
        packed = mask is None and isinstance(positions, Tensor) and are_packed(positions)
        return cls(padding(mask) if masked else None, packed)

    @contextlib.contextmanager
    def known(self) -> Iterator[None]:
        """Inside, they are not read again, and masks come out alike whether CUDA records or not."""
        with unread_masks(self.padding), contextlib.nullcontext() if self.packed else unpacked_positions():
            yield
