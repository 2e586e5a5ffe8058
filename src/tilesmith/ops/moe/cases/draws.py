"""How the tensors of the moe family's cases are drawn: shares of a token's experts, which experts it has."""

from collections.abc import Sequence

import torch
from torch import Tensor

from tilesmith.engine.case import Init


def quarters(generator: torch.Generator, shape: Sequence[int], device: torch.device) -> Tensor:
    """Multiples of 1/4, whose products and sums every dtype holds: no rounding moves one across a clamp."""
    return torch.randint(-3, 4, tuple(shape), generator=generator, device=device) / 4


def shares(generator: torch.Generator, shape: Sequence[int], device: torch.device) -> Tensor:
    """Weights of a token's experts: positive, of sum 1."""
    return torch.randn(*shape, generator=generator, device=device).softmax(-1)


def uniform(experts: int) -> Init:
    """Different experts for each token, every one as likely."""

    def draw(generator: torch.Generator, shape: Sequence[int], device: torch.device) -> Tensor:
        noise = torch.rand(*shape[:-1], experts, generator=generator, device=device)
        return noise.argsort(-1)[..., : shape[-1]].contiguous()

    return draw


def zipf(experts: int) -> Init:
    """Expert e with a probability in proportion to 1 / (e + 1)."""

    def draw(generator: torch.Generator, shape: Sequence[int], device: torch.device) -> Tensor:
        noise = torch.rand(*shape[:-1], experts, generator=generator, device=device)
        odds = 1 / torch.arange(1, experts + 1, device=device)
        return (noise.log() / odds).argsort(-1, descending=True)[..., : shape[-1]].contiguous()

    return draw


def always(expert: int) -> Init:
    """The same expert for all."""
    return lambda generator, shape, device: torch.full(tuple(shape), expert, dtype=torch.int64, device=device)


def half_to_first(experts: int) -> Init:
    """The first expert for every second token, the others at random."""

    def draw(generator: torch.Generator, shape: Sequence[int], device: torch.device) -> Tensor:
        found = uniform(experts)(generator, shape, device)
        found[..., ::2, :1] = 0
        return found

    return draw


def with_sentinels(experts: int) -> Init:
    """About half of the indices below 0 or at least E, as of experts that other ranks hold."""

    def draw(generator: torch.Generator, shape: Sequence[int], device: torch.device) -> Tensor:
        return torch.randint(-2, 2 * experts, tuple(shape), generator=generator, device=device)

    return draw
