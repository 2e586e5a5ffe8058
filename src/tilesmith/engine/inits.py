"""How the tensors of cases are drawn: the inits of `T` that several families use."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from tilesmith.engine.case import Init


def around_one(generator: torch.Generator, shape: Sequence[int], device: torch.device) -> Tensor:
    """A norm's weight as training finds it."""
    return 1 + 0.1 * torch.randn(tuple(shape), generator=generator, device=device)


def unit_outputs(generator: torch.Generator, shape: Sequence[int], device: torch.device) -> Tensor:
    """A weight [outputs, features] whose products with normal features are of unit size."""
    return torch.randn(tuple(shape), generator=generator, device=device) / max(1, shape[-1]) ** 0.5


def first_half(generator: torch.Generator, shape: Sequence[int], device: torch.device) -> Tensor:
    """The first N columns of rows twice as long, as one half of a packed projection is."""
    return torch.randn(*shape[:-1], 2 * shape[-1], generator=generator, device=device)[..., : shape[-1]]


def uneven(generator: torch.Generator, shape: Sequence[int], device: torch.device) -> Tensor:
    """Rows of different means and deviations: what is made of another row's shows in 16 bits, too."""
    row = torch.arange(shape[0], device=device)[:, None]
    return torch.randn(*shape, generator=generator, device=device) * (0.5 + row % 7) + (row % 5 - 2)


def log_probs(generator: torch.Generator, shape: Sequence[int], device: torch.device) -> Tensor:
    """Logarithms of a distribution over the last dim."""
    return torch.randn(tuple(shape), generator=generator, device=device).log_softmax(-1)


def dropout_seed(generator: torch.Generator, shape: Sequence[int], device: torch.device) -> Tensor:
    """The seed and the offset of a dropout, int64 [2], both of more than 32 bits."""
    return torch.tensor([2**40 + 7, -5], device=device)


def int32s(*values: int) -> Init:
    """These numbers."""
    return lambda generator, shape, device: torch.tensor(values, dtype=torch.int32, device=device).view(*shape)


def labels(classes: int, every: int = 0, ignore_index: int = -100) -> Init:
    """Labels, of which each `every`-th (0: none) is ignored."""

    def init(generator: torch.Generator, shape: Sequence[int], device: torch.device) -> Tensor:
        drawn = torch.randint(classes, tuple(shape), generator=generator, device=device)
        if every:
            drawn.view(-1)[every // 2 :: every] = ignore_index
        return drawn

    return init


def tokens_first(generator: torch.Generator, shape: Sequence[int], device: torch.device) -> Tensor:
    """[B, H, T, D] over memory in [B, T, H, D] order, as a projection leaves it."""
    batch, heads, tokens, dim = shape
    return torch.randn(batch, tokens, heads, dim, generator=generator, device=device).transpose(1, 2)


def far_rows(generator: torch.Generator, shape: Sequence[int], device: torch.device) -> Tensor:
    """Bfloat16 rows so far apart that a 32-bit offset of the second one overflows."""
    step = 2**31 + 8
    base = torch.empty(step * (shape[0] - 1) + shape[1], dtype=torch.bfloat16, device=device)
    return base.as_strided(shape, (step, 1)).copy_(torch.randn(*shape, generator=generator, device=device))


def far_heads(generator: torch.Generator, shape: Sequence[int], device: torch.device) -> Tensor:
    """Bfloat16 heads so far apart that a 32-bit offset of the second one overflows."""
    _, heads, tokens, dim = shape
    step = 2**31 + 8
    base = torch.empty(step * (heads - 1) + tokens * dim, dtype=torch.bfloat16, device=device)
    return base.as_strided(shape, (step, step, dim, 1)).copy_(torch.randn(*shape, generator=generator, device=device))


def far_apart(generator: torch.Generator, shape: Sequence[int], device: torch.device) -> Tensor:
    """Bfloat16 rows of which the last is more than 2³¹ elements behind the first (on a CPU, where that is not tried,
    side by side)."""
    rows = torch.randn(tuple(shape), generator=generator, device=device).bfloat16()
    if device.type == "cpu":
        return rows
    step = 2**31 // max(1, shape[0] - 1) + shape[1]
    room = torch.empty((shape[0] - 1) * step + shape[1], dtype=torch.bfloat16, device=device)
    return room.as_strided(tuple(shape), (step, 1)).copy_(rows)
