"""How many tokens' or classes' logits a loss of a linear layer holds at a time: numbers alone, no products."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from tilesmith.hardware.detect import arch_of

ACCELERATOR_BUDGET = 512 * 2**20
CPU_BUDGET = 16 * 2**20  # the logits of a chunk are swept several times, so they should stay in the cache
# elements that plain PyTorch sweeps at a time: on a CPU more would leave the cache between sweeps, fewer pay for calls
CPU_BLOCK = 2**20
ACCELERATOR_BLOCK = 2**24
RECOMPUTE_BUDGET = 98 * 10**6  # so that mode "recompute" takes 0.1 GB and the fp32 sum of dx beside its results
FEWEST_TOKENS = 256  # thinner products are bound by reading weight
TILE = 128  # rows or columns of a product's tile
SPEEDY_TOKENS = 4096  # each chunk reads and writes the whole sum of weight's gradient


def budget(device: torch.device, recompute: bool = False) -> int:
    """Bytes of logits in memory at a time, where nothing else decides."""
    most = RECOMPUTE_BUDGET if recompute else ACCELERATOR_BUDGET
    return min(CPU_BUDGET, most) if device.type == "cpu" else most


def swept_elements(device: torch.device) -> int:
    """How many elements plain PyTorch sweeps at a time."""
    return CPU_BLOCK if device.type == "cpu" else ACCELERATOR_BLOCK


def added_elements(device: torch.device) -> int:
    """How many elements of a product are added to a wider sum at a time, where the library cannot write that."""
    return min(2**22, swept_elements(device))


def whole(
    tokens: int,
    classes: int,
    hidden: int,
    itemsize: int,
    device: torch.device,
    summed: bool,
    known: Callable[[bool], bool] = bool,
) -> bool:
    """Whether all logits take no more than a budget (512 MiB; 16 MiB on a CPU), or than more than one chunk would need:
    an fp32 gradient of weight and, where that is `summed` over chunks beside its result, the least that
    `tokens_per_step` then allows for, less that result. known: whether a comparison of sizes holds, where they are
    symbols."""
    size, most = tokens * classes * itemsize, 4 * classes * hidden
    if summed and device.type != "cpu":
        most += SPEEDY_TOKENS * classes * itemsize
    return known(size <= budget(device)) or known(size <= most)


def tokens_per_chunk(tokens: int, classes: int, itemsize: int, room: int, least: int = FEWEST_TOKENS) -> int:
    """How many tokens' logits are in memory at a time, where the caller does not say: equal chunks whose logits take at
    most `room` bytes, or of at most `least` tokens if that is more."""
    most = max(room // max(1, classes * itemsize), least)
    if most >= tokens:
        return max(1, tokens)
    chunks = -(-tokens // most)
    even = -(-tokens // chunks)
    rounded = -(-even // TILE) * TILE
    return rounded if rounded <= most else even


def tokens_per_step(tokens: int, classes: int, hidden: int, itemsize: int, device: torch.device, summed: bool) -> int:
    """`tokens_per_chunk` within the budget; where weight's gradient is `summed` over chunks beside its result, at least
    4096 tokens more than `hidden`: the result, which is not there yet, takes as much as `hidden` tokens' logits. On an
    accelerator chunks grow, as far as they may, until the tiles of x's gradient, the fewest of the three products,
    leave no multiprocessor out: the last chunk is then the smaller one."""
    least = FEWEST_TOKENS
    if summed:
        least = hidden if device.type == "cpu" else hidden + SPEEDY_TOKENS
    size = tokens_per_chunk(tokens, classes, itemsize, budget(device), least)
    places = 0 if device.type == "cpu" else arch_of(device).sms
    wave = TILE * max(1, places // -(-hidden // (2 * TILE)))  # tiles of 128 x 256, about one a multiprocessor
    rounded = -(-size // wave) * wave
    return rounded if rounded < tokens and rounded <= max(budget(device) // (classes * itemsize), least) else size


def recomputed_tokens(x: Tensor, classes: int, mode: str, wants_dx: bool) -> int:
    """How many tokens' logits a backward in blocks of classes holds at a time, if the caller does not say: as many as
    the budget holds, and in mode "recompute" those that fit in dx as well, which is not there before they are gone."""
    room = budget(x.device, mode == "recompute")
    if mode == "recompute" and wants_dx and x.device.type != "cpu":
        room += x.numel() * x.element_size()
    return max(FEWEST_TOKENS, room // (classes * x.element_size()))


def classes_per_block(tokens: int, classes: int, chunk_tokens: int) -> int:
    """How many classes' logits of all tokens fit where all logits of `chunk_tokens` tokens do: equal blocks, of whole
    tiles of a product if one fits, since rows of logits that start anywhere make products slow."""
    most = max(1, chunk_tokens * classes // max(1, tokens))
    unit = TILE if most >= TILE else 1
    even = -(-classes // -(-classes // (most // unit * unit)))
    return -(-even // unit) * unit
