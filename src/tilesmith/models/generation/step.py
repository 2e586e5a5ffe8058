"""One token: what a step of decoding reads and writes, and the step as a function of it.

A step asks the host for nothing and changes nothing on it, so it can be recorded and replayed. Without a recorder it
runs as it is, on any device.

Legend: B batch, S slots of the cache, V entries of the vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from tilesmith.models.attention.masks import unread_masks
from tilesmith.models.cache_argument import cache_parameter
from tilesmith.models.generation.cache import StaticLayers
from tilesmith.models.generation.scores import StaticProcessor


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


def token_step(
    model: nn.Module, cache: Any, layers: StaticLayers, state: TokenState, processors: Sequence[StaticProcessor],
    sample: bool,
) -> None:  # fmt: skip
    """Feed the newest token to the model, and choose the next one."""
    told = {cache_parameter(model.forward): cache, "use_cache": True, "attention_mask": state.mask}
    if state.position is not None:
        told["position_ids"] = state.position
    if model._supports_logits_to_keep():
        told["logits_to_keep"] = 1
    state.slide(max(layers.windows, default=0))
    with layers.one_token(state.slots), unread_masks():
        inputs = model.prepare_inputs_for_generation(state.token, next_sequence_length=1, **told)
        logits = model(**inputs, return_dict=True).logits[:, -1]
    if state.position is not None:
        state.position.add_(1)
    choose(state, logits, processors, sample)


def choose(state: TokenState, logits: Tensor, processors: Sequence[StaticProcessor], sample: bool) -> None:
    """Choose the next token by logits [B, V]: the likeliest, or one that is drawn. Rows that have ended get padding."""
    scores = logits.to(copy=True, dtype=torch.float32, device=state.sequence.device)
    for processor in processors:
        scores = processor(state, scores)
    token = _drawn(state, scores.softmax(-1)) if sample else scores.argmax(-1)
    if state.eos is not None:
        token = token * state.unfinished + state.pad * (1 - state.unfinished)
    state.status[:1].add_(state.unfinished.amax())
    state.sequence.index_copy_(1, state.length, token[:, None])
    state.token.copy_(token[:, None])
    state.length.add_(1)
    if state.eos is not None:
        state.unfinished.mul_((token[:, None] != state.eos).all(1))
    state.status[1:2].copy_(state.unfinished.amax()[None])


def _drawn(state: TokenState, probabilities: Tensor) -> Tensor:
    """`torch.multinomial(probabilities, 1)`, with the same random numbers, without asking the host."""
    refused = ~((probabilities.amax() < float("inf")) & (probabilities.amin() >= 0))
    state.status[2:].add_(refused)
    return (probabilities / torch.empty_like(probabilities).exponential_(1)).argmax(-1)
