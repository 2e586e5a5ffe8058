"""Example inputs of the ops on packed weights."""

from collections.abc import Sequence

import torch
from torch import Tensor

from tilesmith.engine import Case, T
from tilesmith.engine.case import BENCH, SMALL, TEST
from tilesmith.ops.quant.packed_reference import GROUP, TILE_ROWS, WIDTHS, WORDS_PER_BIT

ONCE = (torch.float32,)  # the dtypes are those of the arguments
EVERY_X = (torch.float32, torch.float16, torch.bfloat16)
HALF = EVERY_X[1:]
TIMED = (torch.bfloat16,)


def _words(generator: torch.Generator, shape: Sequence[int], device: torch.device) -> Tensor:
    """Any 32 bits are codes."""
    return torch.randint(-(2**31), 2**31, tuple(shape), generator=generator, device=device).to(torch.int32)


def _scales(generator: torch.Generator, shape: Sequence[int], device: torch.device) -> Tensor:
    """Powers of two, so that what is rounded by them is the same in every dtype."""
    return torch.exp2(torch.randint(-5, -1, tuple(shape), generator=generator, device=device).float())


def _zeros(generator: torch.Generator, shape: Sequence[int], device: torch.device) -> Tensor:
    return torch.randint(0, 16, tuple(shape), generator=generator, device=device).float() / 4


def _eighths(generator: torch.Generator, shape: Sequence[int], device: torch.device) -> Tensor:
    """Weights that every floating dtype holds exactly."""
    return torch.randint(-12, 13, tuple(shape), generator=generator, device=device).float() / 8


def _orders(generator: torch.Generator, shape: Sequence[int], device: torch.device) -> Tensor:
    return torch.rand(tuple(shape), generator=generator, device=device).argsort(1).to(torch.int16)


def _strips(counts: Sequence[Sequence[int]]):
    """The table of strips that have so many tiles of each width."""

    def init(generator: torch.Generator, shape: Sequence[int], device: torch.device) -> Tensor:
        rows, first = [], 0
        for each in counts:
            ends = torch.tensor(each).cumsum(0).tolist()
            rows.append([first, *ends[:4]])
            first += sum(n * w for n, w in zip(each, WIDTHS)) * WORDS_PER_BIT
        return torch.tensor(rows, dtype=torch.int32, device=device)

    return init


def _counts(rows: int, columns: int, mix: Sequence[int]) -> list[list[int]]:
    """How many tiles of each width the strips have: mix says how often 2, 3, 4, 6 and 8 bits come, strip by strip
    shifted by one tile."""
    widths = [i for i, n in enumerate(mix) for _ in range(n)]
    strips, groups, period = -(-rows // TILE_ROWS), columns // GROUP, len(widths)
    first = [[widths[(s + g) % period] for g in range(groups)] for s in range(min(strips, period))]
    counts = [[strip.count(i) for i in range(len(WIDTHS))] for strip in first]
    return [counts[s % period] for s in range(strips)]


def _packed(rows: int, columns: int, mix: Sequence[int]) -> dict[str, T]:
    counts = _counts(rows, columns, mix)
    words = sum(n * w for each in counts for n, w in zip(each, WIDTHS)) * WORDS_PER_BIT
    strips, groups = len(counts), columns // GROUP
    half = {"dtype": torch.float16, "grad": False}
    return {
        "codes": T(words, dtype=torch.int32, grad=False, init=_words),
        "scale": T(strips, groups, TILE_ROWS, init=_scales, **half),
        "zero": T(strips, groups, TILE_ROWS, init=_zeros, **half),
        "order": T(strips, groups, dtype=torch.int16, grad=False, init=_orders),
        "strips": T(strips, 5, dtype=torch.int32, grad=False, init=_strips(counts)),
    }


EACH, EVERY = (1, 1, 1, 1, 1), {w: [int(w == x) for x in WIDTHS] for w in WIDTHS}
FOUR, MIXED = EVERY[4], (0, 3, 4, 1, 0)  # 4 bits a weight, alike or on average


def _quantize(rows: int, columns: int, mix: Sequence[int], **how: object) -> dict:
    packed = _packed(rows, columns, mix)
    words = packed.pop("codes").shape[0]
    return {"weight": T(rows, columns, grad=False, init=_eighths, **how), **packed, "words": words}


def _dequantize(rows: int, columns: int, mix: Sequence[int], **more: object) -> dict:
    return {**_packed(rows, columns, mix), "rows": rows, **more}


def _linear(rows: int, columns: int, mix: Sequence[int], *shape: int, **how: object) -> dict:
    return {"x": T(*shape, columns, **how), **_packed(rows, columns, mix), "rows": rows}


CASES: dict[str, list[Case]] = {
    "quantize_packed": [
        Case("each_width", _quantize(32, 320, EACH), SMALL),
        Case("ragged", _quantize(21, 128, (1, 1, 0, 0, 1)), SMALL, ONCE),
        Case("transposed", _quantize(16, 128, FOUR, layout="transposed"), TEST, ONCE),
        Case("14336x4096", _quantize(14_336, 4096, FOUR), BENCH, TIMED),
    ],
    "dequantize_packed": [
        Case("each_width", _dequantize(32, 320, EACH, dtype="float32"), SMALL, EVERY_X[::2]),
        Case("ragged", _dequantize(21, 128, (1, 1, 0, 0, 1), dtype="float32"), SMALL, ONCE),
        Case("bf16", _dequantize(48, 320, EACH, dtype="bfloat16"), TEST, ONCE),
        Case("fp16", _dequantize(48, 320, EACH), TEST, ONCE),
        Case("14336x4096", _dequantize(14_336, 4096, FOUR), BENCH, ONCE),
    ],
    "dequant_linear": [
        Case("row", _linear(32, 320, EACH, 1), SMALL),
        Case("each_width", _linear(32, 320, EACH, 3), SMALL),
        *(Case(f"{w}_bits", _linear(16, 192, EVERY[w], 1), TEST, EVERY_X) for w in WIDTHS),
        Case("17_rows", _linear(16, 192, (0, 1, 1, 1, 0), 17), SMALL, EVERY_X),
        Case("9_rows", _linear(48, 640, EACH, 9), TEST, HALF),
        Case("32_rows", _linear(48, 640, EACH, 32), TEST, HALF),
        Case("ragged", _linear(21, 128, (1, 1, 0, 0, 1), 2), SMALL, EVERY_X),
        Case("vector", _linear(32, 128, FOUR), TEST, EVERY_X),
        Case("three_dims", _linear(32, 128, MIXED, 2, 3), TEST, EVERY_X),
        Case("strided", _linear(16, 128, FOUR, 5, layout="strided"), SMALL, EVERY_X),
        Case("no_rows", _linear(16, 128, FOUR, 0), SMALL, EVERY_X),
        Case("64_rows", _linear(48, 640, EACH, 64), TEST),
        Case("many_rows", _linear(48, 640, EACH, 80), TEST),
        *(Case(f"{w}_bits_5_rows", _linear(21, 704, EVERY[w], 5), TEST, HALF) for w in WIDTHS),
        *(Case(f"{w}_bits_8_rows", _linear(320, 1024, EVERY[w], 8), TEST | {"compile"}, HALF) for w in WIDTHS),
        Case("2_rows", _linear(300, 1088, MIXED, 2), TEST, HALF),
        Case("strided_rows", _linear(40, 960, EACH, 19, layout="strided"), TEST, HALF),
        Case("130_rows", _linear(333, 1088, EACH, 130), TEST, HALF),
        *(Case(f"{w}_bits_40_rows", _linear(333, 704, EVERY[w], 40), TEST, HALF) for w in WIDTHS),
        *(Case(f"{m}_rows_of_each_width", _linear(1000, 2112, EACH, m), TEST, HALF) for m in (17, 63, 128, 300)),
        Case("wide_strided_rows", _linear(200, 1344, EACH, 100, layout="strided"), TEST, HALF),
        Case("long_rows", _linear(21, 17_024, EACH, 7), TEST, HALF),
        Case("many_groups", _linear(16, 2560, EACH, 1), TEST),
        Case("long_row", _linear(21, 17_024, EACH, 1), TEST, HALF),
        *(
            Case(f"{m}x{n}x{k}_{name}", _linear(n, k, mix, m), BENCH, TIMED)
            for m in (1, 8, 16, 32, 64, 128)
            for n, k in ((14_336, 4096), (4096, 14_336))
            for name, mix in (("4_bits", FOUR), ("mixed", MIXED))
        ),
    ],
}

bytes_moved = {
    "quantize_packed": lambda weight, words: weight.numel() * weight.element_size() + 4 * words,
    "dequantize_packed": lambda codes, scale, rows: (
        4 * codes.numel() + 4 * scale.numel() + 2 * rows * scale.shape[1] * GROUP
    ),
    "dequant_linear": lambda x, codes, scale, rows: (
        4 * codes.numel()
        + 4 * scale.numel()
        + x.element_size() * (x.numel() + rows * (x.numel() // max(1, x.shape[-1])))
    ),
}

bytes_moved["dequant_linear_vjp"] = bytes_moved["dequant_linear"]
flops = {"dequant_linear": lambda x, rows: 2 * x.numel() * rows}
flops["dequant_linear_vjp"] = flops["dequant_linear"]
