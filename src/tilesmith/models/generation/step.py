"""One token: a step of decoding as a function of the tensors that it reads and writes (`token_state`).

A step asks the host for nothing and changes nothing on it, so it can be recorded and replayed. Without a recorder it
runs as it is, on any device.

Legend: B batch, V entries of the vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from tilesmith.models.attention.masks import unread_masks
from tilesmith.models.cache_argument import cache_parameter
from tilesmith.models.generation.cache import StaticLayers
from tilesmith.models.generation.scores import StaticProcessor
from tilesmith.models.generation.token_state import TokenState


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
