"""Philox4x32-10 in plain PyTorch: the random bits of every dropout in the library, on every backend.

The 16 bits of an element depend only on the seed tensor and on the element's linear index. A backward, another tile
shape or another device therefore generates the same bits. Why 16: docs/adr/0006-sixteen-random-bits.md. Source: Salmon
et al., "Parallel random numbers: as easy as 1, 2, 3" (SC 2011); known-answer vectors in the Random123 distribution.
"""

import math

import torch
from torch import Tensor

ROUNDS = 10
MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
WEYL = (0x9E3779B9, 0xBB67AE85)
LOW = 0xFFFFFFFF
PIECE = 2**26  # elements


def draw_seed(device: torch.device) -> Tensor:
    """An int64 tensor [2] = (seed, offset) from the default generator of `device`, without waiting for the device."""
    return torch.randint(-(2**63), 2**63 - 1, (2,), dtype=torch.int64, device=device)


def threshold(p: float) -> int:
    """The smallest 16-bit number that is kept at drop probability `p`: round(p * 2**16), at most 2**16 - 1."""
    return min(round(p * 2**16), 2**16 - 1)


def keep_scale(p: float) -> float:
    """The factor of the elements that are kept: the inverse of the probability with which `threshold` keeps one. That
    is not exactly 1 / (1 - p), so that the expectation is exact."""
    return 2**16 / (2**16 - threshold(p))


def philox(counter: tuple[Tensor, Tensor, Tensor, Tensor], key: tuple[Tensor, Tensor]) -> tuple[Tensor, ...]:
    """The four uint32 outputs of Philox4x32-10 for each counter, as int64 tensors with values in [0, 2**32)."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(ROUNDS):
        high0, low0 = _multiply(c0, MULTIPLIERS[0])
        high1, low1 = _multiply(c2, MULTIPLIERS[1])
        c0, c1, c2, c3 = high1 ^ c1 ^ k0, low1, high0 ^ c3 ^ k1, low0
        k0, k1 = (k0 + WEYL[0]) & LOW, (k1 + WEYL[1]) & LOW
    return c0, c1, c2, c3


def _multiply(a: Tensor, b: int) -> tuple[Tensor, Tensor]:
    """The high and low 32 bits of the product of two 32-bit numbers, in int64 arithmetic that never needs more than 63
    bits."""
    low = a * (b & 0xFFFF)
    middle = a * (b >> 16) + (low >> 16)
    return middle >> 16, ((middle & 0xFFFF) << 16) | (low & 0xFFFF)


def random_bits(seed: Tensor, index: Tensor) -> Tensor:
    """The 16 bits of each linear element index (int64, >= 0), as int64 in [0, 2**16).

    seed: int64 [2] = (seed, offset). The key is the seed's low and high word; the counter is the low and high word of
    index // 8, then those of the offset. The four words are eight halves, the lower one of each first; index % 8 picks.
    """
    halves = _halves(seed, index // 8).gather(-1, (index % 8).unsqueeze(-1))
    return halves.squeeze(-1)


def keep_mask(seed: Tensor, shape: tuple[int, ...], p: float) -> Tensor:
    """Which elements of a tensor of `shape` survive dropout with probability `p`: bool, on the seed's device.

    The linear index runs over `shape` in row-major order, whatever the strides of the tensor in question.
    """
    count, least = math.prod(shape), threshold(p)
    pieces = []
    for first in range(0, max(1, count), PIECE):  # the bits of all elements at once would be 8 bytes for each
        counter = torch.arange(first // 8, (min(count, first + PIECE) + 7) // 8, device=seed.device)
        pieces.append((_halves(seed, counter) >= least).flatten())
    return torch.cat(pieces)[:count].view(shape)


def dropout(value: Tensor, seed: Tensor, p: float) -> Tensor:
    """`value` times `keep_scale` where `keep_mask` keeps it; 0 elsewhere."""
    return torch.where(keep_mask(seed, tuple(value.shape), p), value * keep_scale(p), 0)


def _halves(seed: Tensor, counter: Tensor) -> Tensor:
    """The eight 16-bit halves that a seed (int64 [2]) gives for each counter, as int64 [..., 8]."""
    words = torch.stack(_words(seed, counter), -1)
    return torch.stack((words & 0xFFFF, words >> 16), -1).flatten(-2)


def _words(seed: Tensor, counter: Tensor) -> tuple[Tensor, ...]:
    """The four words that a seed (int64 [2]) gives for each counter."""
    seed, offset = seed.to(counter.device)
    halves = (offset & LOW).expand_as(counter), ((offset >> 32) & LOW).expand_as(counter)
    return philox((counter & LOW, (counter >> 32) & LOW, *halves), (seed & LOW, (seed >> 32) & LOW))
