"""The weight that packed codes stand for, by whole-tensor operations on words: for a CPU.

Legend: see packed_reference.py. Halves of a word hold neighbouring columns, so a word, shifted and masked, is a pair of
neighbouring codes in 16 bits each. Pairs are put in their places as one number each, and the planes of a width are put
together before anything becomes a float.
"""

from __future__ import annotations

import torch
from torch import Tensor

from tilesmith.ops.quant.packed_reference import (
    GROUP,
    PLANES,
    TILE_ROWS,
    WIDTHS,
    WORDS_PER_BIT,
    slot_words,
)

# Elements that are unpacked at once, about 10 MB of codes and floats: fewer leave Python's time to be seen, more leave
# a CPU's caches.
PIECE = 2**20


def dequantized(
    codes: Tensor, scale: Tensor, zero: Tensor, order: Tensor, strips: Tensor, rows: int, dtype: torch.dtype
) -> Tensor:
    """The weight [rows, K] in `dtype`, computed in fp32 and rounded once."""
    count, groups = order.shape
    weight = torch.empty(count, TILE_ROWS, groups, GROUP, dtype=dtype, device=codes.device)
    units = codes[: codes.shape[0] // WORDS_PER_BIT * WORDS_PER_BIT].reshape(-1, WORDS_PER_BIT)
    width, first = slot_words(strips, groups)
    first, order = first // WORDS_PER_BIT, order.long()
    step = max(1, PIECE // max(1, TILE_ROWS * GROUP * groups))
    for start in range(0, count, step):
        part = slice(start, start + step)
        pairs = _pairs(units, width[part], first[part], order[part])
        slots = order[part].argsort(1)[:, :, None].expand(-1, -1, TILE_ROWS)
        factor, offset = (t[part].float().gather(1, slots).transpose(1, 2)[..., None] for t in (scale, zero))
        values = torch.empty(weight[part].shape, dtype=torch.float32, device=codes.device)
        values.copy_(pairs.view(torch.int16).view(-1, groups, TILE_ROWS, GROUP).transpose(1, 2))
        weight[part] = values.sub_(offset).mul_(factor)
    return weight.view(count * TILE_ROWS, groups * GROUP)[:rows]


def _pairs(units: Tensor, width: Tensor, first: Tensor, order: Tensor) -> Tensor:
    """The codes of some strips in pairs, int32 [strips * G, 16, 32], by group. units: [., 32], 32 words each; width,
    first, order: [strips, G], of each slot its width, its first unit and its group."""
    pairs = torch.empty(order.numel(), TILE_ROWS, GROUP // 2, dtype=torch.int32, device=units.device)
    strip = torch.arange(order.shape[0], device=units.device)[:, None]
    place = (order + order.shape[1] * strip).flatten()
    for bits in WIDTHS:
        chosen = (width == bits).flatten().nonzero()[:, 0]
        if not chosen.numel():
            continue
        at, shift, found = first.flatten()[chosen], 0, None
        for plane in PLANES[bits]:
            inside = torch.arange(plane, device=units.device)
            words = units.index_select(0, (at[:, None] + inside).flatten()).view(len(at), -1)
            more = _pairs_of_plane(words, plane)
            found = more if found is None else found.bitwise_or_(more.bitwise_left_shift_(shift))
            at, shift = at + plane, shift + plane
        pairs.index_copy_(0, place[chosen], found)
    return pairs


def _pairs_of_plane(words: Tensor, plane: int) -> Tensor:
    """The pairs int32 [tiles, 16, 32] of words [tiles, 32 plane]: `word_places` and `field_columns` as strides."""
    tiles, threads = words.shape[0], min(2 * plane, 4)
    pairs = words.new_empty(tiles, TILE_ROWS, GROUP // 2)
    # of a row g + 8 h: product, pair of columns within its 16
    into = pairs.view(tiles, 2, 8, 4, 8)
    for field in range(16 // plane):
        found = (words >> plane * field) & (2**plane - 1) * 0x10001
        found = found.view(tiles, 8, threads, -1, 2).permute(0, 4, 1, 2, 3)  # row % 8, thread, word of it, row // 8
        if plane == 4:
            into[..., 2 * field : 2 * field + 2] = found
        elif plane == 2:
            into[..., field] = found[..., 0]
        else:  # two threads: the words of a field make half of the products
            into[:, :, :, field % 2 * 2 : field % 2 * 2 + 2, field // 2] = found[..., 0]
    return pairs
