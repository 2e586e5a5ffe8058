"""How tensors of attention's cases are drawn, those of several kinds of op."""

from collections.abc import Sequence

import torch
from torch import Tensor

from tilesmith.engine.case import Init


def row_lse(generator: torch.Generator, shape: Sequence[int], device: torch.device) -> Tensor:
    """Logarithms of sums of a few ordinary scores; the last one is that of a row which sees nothing."""
    lse = 2.0 + torch.rand(tuple(shape), generator=generator, device=device)
    if lse.numel() > 1:
        lse.view(-1)[-1] = float("-inf")
    return lse


def normal(generator: torch.Generator, shape: Sequence[int], device: torch.device) -> Tensor:
    """Normal numbers in fp32; torch draws none in 8 bits."""
    return torch.randn(tuple(shape), generator=generator, device=generator.device).to(device)


def row_lengths(*values: int) -> Init:
    """Numbers of tokens of the rows, repeated from `values`."""

    def init(generator: torch.Generator, shape: Sequence[int], device: torch.device) -> Tensor:
        return torch.tensor(values * -(-shape[0] // len(values)), dtype=torch.int32, device=device)[: shape[0]]

    return init


def padding(*lengths: int) -> Init:
    """Values that are NaN behind each row's length, in cache slots that nobody wrote."""

    def init(generator: torch.Generator, shape: Sequence[int], device: torch.device) -> Tensor:
        x = torch.randn(shape, generator=generator, device=device)
        for row, length in enumerate(lengths):
            x[row, :, length:] = float("nan")
        return x

    return init
