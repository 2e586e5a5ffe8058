"""Sample from a causal language model token by token, with its key/value cache."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor, nn

from tilesmith.cli.own_decoder import OwnLlama
from tilesmith.models.cache_argument import cache_parameter


def sample(logits: Tensor, draw: torch.Generator, temperature: float = 1.0, top_k: int = 0, top_p: float = 1.0) -> int:
    """One token of logits [vocab], on the CPU.

    temperature: 0 takes the likeliest, else the logits are divided by it. top_k: only that many of the likeliest, 0 for
    all; of these top_p: only the likeliest that together reach this probability.
    """
    if temperature == 0.0:
        return int(logits.argmax())
    below = (logits - logits.max()).double() / temperature  # the largest stays 0, however small the temperature
    best = torch.topk(below.float(), min(top_k, len(logits)) if top_k else len(logits))
    chances = best.values.softmax(-1)
    if top_p < 1.0:
        before = chances.cumsum(-1) - chances
        chances = chances.where(before < top_p, 0.0)
    return int(best.indices[torch.multinomial(chances, 1, generator=draw)])


@torch.no_grad()
def continued(
    model: nn.Module,
    ids: Sequence[int],
    count: int,
    choose: Callable[[Tensor], int],
    stop: frozenset[int] = frozenset(),
) -> Iterator[int]:
    """Up to `count` tokens that continue `ids`, each as soon as it is known; one in `stop` ends them, and is not told.

    choose: makes a token of logits [vocab], which come to the CPU in float32.
    """
    device = next(model.parameters()).device
    # a cache of the decoder has all its slots from the start, and attention without a kernel reads them all
    cache = model.decoder.new_cache(1, len(ids) + count) if isinstance(model, OwnLlama) else None
    name = cache_parameter(model.forward)
    out = model(input_ids=torch.tensor([list(ids)], device=device), use_cache=True, **{name: cache})
    for left in range(count, 0, -1):
        token = choose(out.logits[0, -1].float().cpu())
        if token in stop:
            return
        yield token
        if left > 1:
            step = torch.tensor([[token]], device=device)
            out = model(input_ids=step, use_cache=True, **{name: getattr(out, name)})


class Spelling:
    """Turns tokens into text as they come, holding back what later tokens may still change.

    A character can be spread over tokens, and a tokenizer may write a token differently after another: so the tokens
    since the last text are decoded together with those that made it, and what is new is told.
    """

    def __init__(self, decode: Callable[[list[int]], str], ids: Sequence[int]):
        self._decode, self._ids = decode, list(ids)
        self._known, self._told = max(0, len(self._ids) - 8), len(self._ids)

    def add(self, token: int) -> str:
        """The text that this token completes, which may be none."""
        self._ids.append(token)
        return self._new(complete=False)

    def rest(self) -> str:
        """What is held back, whole or not."""
        return self._new(complete=True)

    def _new(self, complete: bool) -> str:
        before = self._decode(self._ids[self._known : self._told])
        text = self._decode(self._ids[self._known :])
        if len(text) <= len(before) or (text.endswith("\ufffd") and not complete):
            return ""
        self._known, self._told = self._told, len(self._ids)
        return text[len(before) :]
