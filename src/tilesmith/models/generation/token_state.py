"""What a step of decoding reads and writes: tensors that keep their addresses.

Legend: B batch, S slots of the cache.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class TokenState:
    """The tensors of a step. They are changed in place and keep their addresses.

    sequence int64 [B, S + 1]: prompt and new tokens. token int64 [B, 1]: the newest. length int64 [1]: how many tokens
    a row has. position int64 [B, 1]: where the newest stands, None for models that are not told. mask int64 [B, S + W]:
    0 for slots of padding, then the same for the last W tokens, a window; None without padding. unfinished int64 [B]: 1
    until a row has ended. status int64 [3]: new tokens up to the one that ended the last row, whether rows are left,
    whether probabilities were none. eos int64 [n], pad int64 []: None where nothing ends a row.
    """

    sequence: Tensor
    token: Tensor
    length: Tensor
    position: Tensor | None
    mask: Tensor | None
    unfinished: Tensor
    status: Tensor
    eos: Tensor | None
    pad: Tensor | None

    @classmethod
    def empty(
        cls,
        prompt: Tensor,
        slots: int,
        positions: bool,
        window: int | None,
        eos: Tensor | None,
        pad: Tensor | None,
    ) -> TokenState:
        """Room for the rows of `prompt` int64 [B, T] in a cache of `slots`. window: None without padding."""
        batch = prompt.shape[0]
        return cls(
            prompt.new_zeros(batch, slots + 1),
            prompt.new_zeros(batch, 1),
            prompt.new_zeros(1),
            prompt.new_zeros(batch, 1) if positions else None,
            None if window is None else prompt.new_ones(batch, slots + window),
            prompt.new_ones(batch),
            prompt.new_zeros(3),
            None if eos is None else eos.to(prompt.device, torch.int64, copy=True),
            None if eos is None else pad.to(prompt.device, torch.int64, copy=True),
        )

    def begin(
        self, prompt: Tensor, position: Tensor | None, mask: Tensor | None, eos: Tensor | None, pad: Tensor | None
    ) -> None:
        """Take a prompt [B, T]. position [B, 1]: of the token behind it. mask [B, T]: 0 for padding."""
        length = prompt.shape[1]
        self.sequence.zero_()[:, :length] = prompt
        self.token.copy_(prompt[:, -1:])
        self.length.fill_(length)
        self.unfinished.fill_(1)
        self.status.zero_()
        if self.position is not None:
            self.position.copy_(position)
        if self.mask is not None:
            self.mask.fill_(1)[:, :length] = mask
        if self.eos is not None:
            self.eos.copy_(eos)
            self.pad.copy_(pad)

    def slide(self, window: int) -> None:
        """Bring the mask's part for the last tokens up to the newest one."""
        if self.mask is not None and window:
            last = self.length - window + torch.arange(window, device=self.mask.device)
            places = last.clamp(min=0).expand(self.mask.shape[0], -1)
            self.mask[:, -window:] = self.mask.gather(1, places)

    @property
    def slots(self) -> int:
        """What a cache may hold."""
        return self.sequence.shape[1] - 1
