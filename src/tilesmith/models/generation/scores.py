"""Logits processors of transformers as functions of tensors that keep their addresses.

Most processors read the scores alone, and are called as they are. Those that read the tokens or their number so far get
a stand-in here, which reads them from the device and gives the same scores bit for bit.

Legend: B batch, V entries of the vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from tilesmith.models.generation.token_state import TokenState

_OF_SCORES = (
    "TemperatureLogitsWarper", "TopKLogitsWarper", "TopPLogitsWarper", "MinPLogitsWarper", "TypicalLogitsWarper",
    "EpsilonLogitsWarper", "InfNanRemoveLogitsProcessor", "LogitNormalization",
)  # fmt: skip
_CONSTANT = (type(None), bool, int, float, str)


class StaticProcessor:
    """What stands for a processor of one class. key: what makes it another one, beside the values that `begin` takes
    from the processor of each call of `generate`."""

    key: tuple = ()

    def __init__(self, processor: Any):
        self.key = (type(self).__name__,)

    def begin(self, processor: Any, prompt: Tensor, vocabulary: int) -> None:
        """Take what a call of `generate` asks for. prompt: int64 [B, T]."""

    def __call__(self, state: TokenState, scores: Tensor) -> Tensor:
        """The processed scores [B, V], of the token that is next."""
        raise NotImplementedError


class OfScores(StaticProcessor):
    """A processor that reads nothing but the scores."""

    def __init__(self, processor: Any):
        self.key = (type(processor), tuple(sorted(vars(processor).items())))
        self._processor = processor

    def __call__(self, state: TokenState, scores: Tensor) -> Tensor:
        return self._processor(state.sequence, scores)


class _OfTokens(StaticProcessor):
    """Some tokens are treated apart while a condition on the number of tokens holds."""

    _tokens: Tensor | None = None  # bool [V]
    _limit: Tensor  # int64 [1]

    def _take(self, tokens: Tensor, limit: int, prompt: Tensor, vocabulary: int) -> None:
        if self._tokens is None:
            self._tokens = torch.zeros(vocabulary, dtype=torch.bool, device=prompt.device)
            self._limit = torch.zeros(1, dtype=torch.int64, device=prompt.device)
        tokens = tokens.to(prompt.device).reshape(-1)
        self._tokens.copy_((torch.arange(vocabulary, device=prompt.device)[:, None] == tokens).any(1))
        self._limit.fill_(limit)


class NotBefore(_OfTokens):
    """Tokens that cannot come before a length: `MinLengthLogitsProcessor`, `MinNewTokensLengthLogitsProcessor`."""

    def begin(self, processor: Any, prompt: Tensor, vocabulary: int) -> None:
        if hasattr(processor, "min_new_tokens"):
            limit = processor.prompt_length_to_skip + processor.min_new_tokens
        else:
            limit = processor.min_length
        self._take(processor.eos_token_id, limit, prompt, vocabulary)

    def __call__(self, state: TokenState, scores: Tensor) -> Tensor:
        return torch.where(self._tokens & (state.length < self._limit), -float("inf"), scores)


class Never(_OfTokens):
    """Tokens that never come: `SuppressTokensLogitsProcessor`."""

    def begin(self, processor: Any, prompt: Tensor, vocabulary: int) -> None:
        self._take(processor.suppress_tokens, 0, prompt, vocabulary)

    def __call__(self, state: TokenState, scores: Tensor) -> Tensor:
        return torch.where(self._tokens, -float("inf"), scores)


class NotAt(_OfTokens):
    """Tokens that do not come at one length: `SuppressTokensAtBeginLogitsProcessor`."""

    def begin(self, processor: Any, prompt: Tensor, vocabulary: int) -> None:
        self._take(processor.begin_suppress_tokens, processor.begin_index, prompt, vocabulary)

    def __call__(self, state: TokenState, scores: Tensor) -> Tensor:
        return torch.where(self._tokens & (state.length == self._limit), -float("inf"), scores)


class OnlyAtEnd(_OfTokens):
    """Tokens of which one is last: `ForcedEOSTokenLogitsProcessor`."""

    def begin(self, processor: Any, prompt: Tensor, vocabulary: int) -> None:
        self._take(torch.as_tensor(processor.eos_token_id), processor.max_length - 1, prompt, vocabulary)

    def __call__(self, state: TokenState, scores: Tensor) -> Tensor:
        forced = torch.where(self._tokens, 0.0, -float("inf")).to(scores.dtype)
        return torch.where(state.length == self._limit, forced, scores)


class Repeated(StaticProcessor):
    """Scores of tokens that are there already: `RepetitionPenaltyLogitsProcessor`."""

    _seen: Tensor | None = None  # bool [B, V + 1]; the last column takes tokens that do not count

    def __init__(self, processor: Any):
        self.key = (type(self).__name__, processor.penalty)
        self._penalty = processor.penalty

    def begin(self, processor: Any, prompt: Tensor, vocabulary: int) -> None:
        batch, length = prompt.shape
        if self._seen is None:
            self._seen = torch.zeros(batch, vocabulary + 1, dtype=torch.bool, device=prompt.device)
            self._ignored = torch.zeros(batch, dtype=torch.int64, device=prompt.device)
        ignored = processor.prompt_ignore_length
        self._ignored.copy_(torch.as_tensor(0 if ignored is None else ignored, device=prompt.device).expand(batch))
        places = torch.arange(length, device=prompt.device)
        tokens = prompt.clamp(max=vocabulary).masked_fill(places < self._ignored[:, None], vocabulary)
        self._seen.zero_().scatter_(1, tokens, True)

    def __call__(self, state: TokenState, scores: Tensor) -> Tensor:
        vocabulary = scores.shape[1]
        counts = (state.length - 1 >= self._ignored)[:, None]
        self._seen.scatter_(1, torch.where(counts, state.token.clamp(max=vocabulary), vocabulary), True)
        penalised = torch.where(scores < 0, scores * self._penalty, scores / self._penalty)
        return torch.where(self._seen[:, :vocabulary], penalised, scores)


_STAND_INS: dict[str, type[StaticProcessor]] = {
    **dict.fromkeys(_OF_SCORES, OfScores),
    "MinLengthLogitsProcessor": NotBefore,
    "MinNewTokensLengthLogitsProcessor": NotBefore,
    "SuppressTokensLogitsProcessor": Never,
    "SuppressTokensAtBeginLogitsProcessor": NotAt,
    "ForcedEOSTokenLogitsProcessor": OnlyAtEnd,
    "RepetitionPenaltyLogitsProcessor": Repeated,
}


def stand_in(processor: Any) -> StaticProcessor | None:
    """What computes the same as a logits processor, None where nothing here does."""
    from transformers.generation import logits_process

    cls = type(processor)
    made: Callable[[Any], StaticProcessor] | None = _STAND_INS.get(cls.__name__)
    if made is None or getattr(logits_process, cls.__name__, None) is not cls:
        return None
    if made is OfScores and not all(isinstance(value, _CONSTANT) for value in vars(processor).values()):
        return None
    return made(processor)
