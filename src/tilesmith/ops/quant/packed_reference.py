"""Weights in 2 to 8 bits, packed tile by tile, and products with them, in plain PyTorch.

Legend: a weight is [N, K], N outputs, K inputs, K a multiple of 64. S = ceil(N / 16) strips of 16 rows, G = K / 64
groups of 64 columns; a tile is one group of one strip, and its 1024 codes have one width: 2, 3, 4, 6 or 8 bits. A slot
is the place of a tile among those of its strip, which lie in the order of their widths. An element is
(code - zero) * scale.

  codes  int32 [words]: a strip's tiles one after the other, 32 words for each bit of the width. A tile consists of
         planes: 2 bits; 2 and 1; 4; 4 and 2; 4 and 4, the first of which holds the lowest bits. A plane of p bits has
         2p words a row, of 32 / p fields each. `word_places` says where a word lies, `field_columns` which columns its
         fields belong to: as mma instructions of 16 x 8 x 16 take operands. A thread, t of the four that share rows g
         and g + 8, loads its words at once; halves of a word hold neighbouring columns; 16 columns that lie side by
         side are one thread's in the four products of a group.
  scale, zero  float16 [S, G, 16]: of each row of a tile, by slot.
  order  int16 [S, G]: the group that is at a slot; a permutation in each strip.
  strips int32 [S, 5]: a strip's first word, a multiple of 32, then the number of its slots of up to 2, 3, 4 and 6 bits.
"""

import torch
from torch import Tensor

WIDTHS = (2, 3, 4, 6, 8)
PLANES = {2: (2,), 3: (2, 1), 4: (4,), 6: (4, 2), 8: (4, 4)}
TILE_ROWS, GROUP = 16, 64
WORDS_PER_BIT = TILE_ROWS * GROUP // 32
OUTPUTS = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}


def quantize_packed(weight: Tensor, scale: Tensor, zero: Tensor, order: Tensor, strips: Tensor, words: int) -> Tensor:
    """The codes of a weight, int32 [words]: round(weight / scale + zero) within the tile's width, packed.

    weight: [N, K], floating; N is padded to a multiple of 16 with rows of zeros, and NaN gets code 0. scale, zero,
    order, strips: their layout is described in `tilesmith.ops.quant.packed_reference`; a scale of 0 stands for 1.
    words: how many words the strips have, 32 times the sum of their tiles' widths. Ties round to even. Raises TypeError
    for other dtypes; ValueError for other shapes and devices, and for a weight that requires a gradient.
    """
    acc = torch.promote_types(weight.dtype, torch.float32)
    count, groups = order.shape
    padded = torch.nn.functional.pad(weight.to(acc), (0, 0, 0, count * TILE_ROWS - weight.shape[0]))
    tiles = padded.view(count, TILE_ROWS, groups, GROUP).transpose(1, 2)
    tiles = tiles.gather(1, order.long()[:, :, None, None].expand(-1, -1, TILE_ROWS, GROUP))
    step = torch.where(scale == 0, 1.0, scale.to(acc))
    width = slot_widths(strips, groups)
    values = torch.round(tiles / step[..., None] + zero.to(acc)[..., None]).nan_to_num(nan=0.0)
    values = torch.minimum(values.clamp(min=0), (2.0**width - 1)[:, :, None, None].to(acc)).to(torch.int64)
    return pack(values, strips, words)


def dequantize_packed(
    codes: Tensor, scale: Tensor, zero: Tensor, order: Tensor, strips: Tensor, rows: int, dtype: str = "float16"
) -> Tensor:
    """The weight that packed codes stand for, [rows, K] in `dtype` ("bfloat16", "float16" or "float32").

    codes, scale, zero, order, strips: as in `tilesmith.ops.quant.packed_reference`. rows: N, at most 16 S. Computed in
    fp32, rounded once. Raises TypeError for other dtypes, ValueError for other shapes and devices.
    """
    exact = scale.dtype is torch.float64
    return weight_of(codes, scale, zero, order, strips, rows).to(torch.float64 if exact else OUTPUTS[dtype])


def dequant_linear(
    x: Tensor, codes: Tensor, scale: Tensor, zero: Tensor, order: Tensor, strips: Tensor, rows: int
) -> Tensor:
    """y = x weight^T of a packed weight: [..., rows] in x's dtype, summed in fp32.

    x: [..., K], float32, bfloat16 or float16. codes, scale, zero, order, strips: as in
    `tilesmith.ops.quant.packed_reference`. rows: N. x receives a gradient, the weight does not. Raises TypeError for
    other dtypes, ValueError for other shapes and devices.
    """
    acc = torch.promote_types(x.dtype, torch.float32)
    weight = weight_of(codes, scale, zero, order, strips, rows).to(x.dtype)
    return (x.to(acc) @ weight.to(acc).t()).to(x.dtype)


def dequant_linear_vjp(
    dy: Tensor, codes: Tensor, scale: Tensor, zero: Tensor, order: Tensor, strips: Tensor, rows: int
) -> Tensor:
    """dx = dy weight, [..., K] in dy's dtype."""
    acc = torch.promote_types(dy.dtype, torch.float32)
    weight = weight_of(codes, scale, zero, order, strips, rows).to(dy.dtype)
    return (dy.to(acc) @ weight.to(acc)).to(dy.dtype)


def weight_of(codes: Tensor, scale: Tensor, zero: Tensor, order: Tensor, strips: Tensor, rows: int) -> Tensor:
    """The weight [rows, K] in fp32, or in fp64 where the scales are."""
    acc = torch.promote_types(scale.dtype, torch.float32)
    count, groups = order.shape
    values = unpack(codes, strips, groups).to(acc)
    tiles = (values - zero.to(acc)[..., None]) * scale.to(acc)[..., None]
    back = order.long().argsort(1)[:, :, None, None].expand(-1, -1, TILE_ROWS, GROUP)
    return tiles.gather(1, back).transpose(1, 2).reshape(count * TILE_ROWS, groups * GROUP)[:rows]


def slot_widths(strips: Tensor, groups: int) -> Tensor:
    """The width of each slot, int64 [S, G]."""
    slot = torch.arange(groups, device=strips.device)
    known = torch.tensor(WIDTHS, device=strips.device)
    return known[(slot[None, :, None] >= strips[:, None, 1:]).sum(2)]


def slot_words(strips: Tensor, groups: int) -> tuple[Tensor, Tensor]:
    """The width and the first word of each slot, int64 [S, G]."""
    width = slot_widths(strips, groups)
    size = width * WORDS_PER_BIT
    return width, strips[:, :1].long() + size.cumsum(1) - size


def word_places(plane: int, device: torch.device) -> Tensor:
    """Of a plane of so many bits the place of word j of each row, int64 [16, 2 plane]."""
    row, word = torch.arange(TILE_ROWS, device=device)[:, None], torch.arange(2 * plane, device=device)
    threads = min(2 * plane, 4)
    return ((row % 8 * threads + word % threads) * (2 * plane // threads) + word // threads) * 2 + row // 8


def field_columns(plane: int, device: torch.device) -> Tensor:
    """The column of each field of each word of a row, int64 [32 / plane, 2 plane]."""
    field, word = torch.arange(32 // plane, device=device)[:, None], torch.arange(2 * plane, device=device)
    place = field % (16 // plane) * (2 * plane) + word  # of a pair of columns: 8 * product + 4 * half of it + thread
    return 16 * (place % 4) + 4 * (place // 8) + 2 * (place // 4 % 2) + field // (16 // plane)


def pack(values: Tensor, strips: Tensor, words: int) -> Tensor:
    """int32 [words] of codes int64 [S, G, 16, 64] by slot."""
    codes = torch.zeros(words, dtype=torch.int32, device=values.device)
    width, first = slot_words(strips, values.shape[1])
    needed = int((first + width * WORDS_PER_BIT).max()) if width.numel() else 0
    if needed > words:
        raise ValueError(f"quantize_packed: words is {words}; these strips have {needed}")
    for bits in WIDTHS:
        chosen = width == bits
        planes, shift = [], 0
        for plane in PLANES[bits]:
            part = (values[chosen] >> shift) & (2**plane - 1)
            fields = part[:, :, field_columns(plane, values.device)]
            bits_at = torch.arange(0, 32, plane, device=values.device)[:, None]
            found = (fields << bits_at).sum(2)
            planes.append(torch.empty_like(found.flatten(1)))
            planes[-1][:, word_places(plane, values.device).flatten()] = found.flatten(1)
            shift += plane
        at = first[chosen][:, None] + torch.arange(bits * WORDS_PER_BIT, device=values.device)
        packed = torch.cat(planes, 1)
        codes[at] = torch.where(packed >= 2**31, packed - 2**32, packed).to(torch.int32)
    return codes


def unpack(codes: Tensor, strips: Tensor, groups: int) -> Tensor:
    """Codes int32 [S, G, 16, 64] by slot."""
    values = torch.zeros(strips.shape[0], groups, TILE_ROWS, GROUP, dtype=torch.int32, device=codes.device)
    width, first = slot_words(strips, groups)
    for bits in WIDTHS:
        chosen = width == bits
        at, shift = first[chosen], 0
        found = values.new_zeros(at.shape[0], TILE_ROWS, GROUP)
        for plane in PLANES[bits]:
            inside = torch.arange(plane * WORDS_PER_BIT, device=codes.device)
            words = codes[at[:, None] + inside][:, word_places(plane, codes.device)][:, :, None]
            bits_at = torch.arange(0, 32, plane, device=codes.device, dtype=torch.int32)[:, None]
            fields = ((words >> bits_at) & (2**plane - 1)) << shift
            found[:, :, field_columns(plane, codes.device).flatten()] += fields.flatten(2)
            at, shift = at + plane * WORDS_PER_BIT, shift + plane
        values[chosen] = found
    return values


def row_count(x: Tensor) -> int:
    """How many rows [..., K] has."""
    return x.numel() // max(1, x.shape[-1])
