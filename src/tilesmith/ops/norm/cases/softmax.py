"""Example inputs of softmax and softmax_dropout."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from tilesmith.engine import Case, T
from tilesmith.engine.case import BENCH, BF16, GPU, SMALL, TEST
from tilesmith.engine.inits import dropout_seed, far_rows, first_half, tokens_first, uneven

FP32 = (torch.float32,)  # of the run; these tensors have a dtype of their own


def _steep(generator: torch.Generator, shape: Sequence[int], device: torch.device) -> Tensor:
    """Scores of many units: one column of a row takes nearly all."""
    return 12 * torch.randn(*shape, generator=generator, device=device)


def _shifted(generator: torch.Generator, shape: Sequence[int], device: torch.device) -> Tensor:
    """A mean far larger than the deviation, in numbers that bfloat16 holds too."""
    return torch.randint(-12, 13, tuple(shape), generator=generator, device=device) * 8.0 + 12_800


def _masked(generator: torch.Generator, shape: Sequence[int], device: torch.device) -> Tensor:
    """Half of the columns -inf, as a mask added by the caller leaves them; never a whole row."""
    x = torch.randn(*shape, generator=generator, device=device)
    x[..., 1::2] = float("-inf")
    return x


def _dead(generator: torch.Generator, shape: Sequence[int], device: torch.device) -> Tensor:
    """The second row -inf alone: NaN, as torch.softmax says."""
    x = torch.randn(*shape, generator=generator, device=device)
    x[1] = float("-inf")
    return x


def _lowest(dtype: torch.dtype) -> Callable[..., Tensor]:
    """Half of the columns and the whole second row the lowest number of `dtype`, which masks are made of."""

    def init(generator: torch.Generator, shape: Sequence[int], device: torch.device) -> Tensor:
        x = torch.randn(*shape, generator=generator, device=device)
        x[..., 1::2] = x[1] = torch.finfo(dtype).min
        return x

    return init


def _vast(generator: torch.Generator, shape: Sequence[int], device: torch.device) -> Tensor:
    """Numbers whose products fp32 rounds by more than 2⁷; every other row one number alone, as some masks leave it."""
    x = 1e12 * torch.randn(*shape, generator=generator, device=device)
    x[1::2] = -1e10 * torch.arange(1, len(x), 2, device=device)[:, None]
    return x


DROPPED = {"seed": T(2, dtype=torch.int64, init=dropout_seed), "p": 0.3}


def _cases(**options: object) -> list[Case]:
    def args(*shape: int, **how: object) -> dict:
        return {"x": T(*shape, **how)} | options

    return [
        Case("small", args(6, 33), SMALL),
        Case("three_dims", args(2, 3, 64), SMALL),
        Case("one_dim", args(40), SMALL),
        Case("one_column", args(7, 1), SMALL),
        Case("one_row", args(1, 257), SMALL),
        Case("many_rows", args(150, 40), SMALL),
        Case("1001_columns", args(3, 1001), SMALL),
        Case("swept", args(2, 17_000), SMALL),
        Case("swept_odd", args(2, 16_411), SMALL),
        Case("steep", args(4, 64, init=_steep), SMALL),
        Case("steep_swept", args(2, 17_000, init=_steep), SMALL),
        Case("shifted", args(4, 64, init=_shifted), SMALL),
        Case("shifted_swept", args(2, 17_000, init=_shifted), TEST),
        Case("masked", args(4, 64, init=_masked), SMALL),
        Case("masked_swept", args(2, 17_000, init=_masked), SMALL),
        Case("dead_row", args(3, 64, init=_dead, grad=False), SMALL),
        Case("dead_row_swept", args(2, 17_000, init=_dead, grad=False), SMALL),
        Case("lowest", args(3, 64, init=_lowest(torch.float32), grad=False), SMALL),
        Case("lowest_swept", args(2, 17_000, init=_lowest(torch.float32), grad=False), SMALL),
        *(
            Case(f"lowest_{name}_{kind}", args(*shape, dtype=dtype, init=_lowest(dtype), grad=False), SMALL, FP32)
            for name, dtype in (("bf16", torch.bfloat16), ("fp16", torch.float16))
            for kind, shape in (("tile", (3, 64)), ("swept", (2, 17_000)))
        ),
        *(
            Case(f"vast_{name}", args(*shape, dtype=torch.bfloat16, init=_vast) | {"scale": 0.7} | how, tags, FP32)
            for name, tags, shape, how in (
                ("tile", SMALL, (12, 64), {}),
                ("swept", SMALL, (5, 17_000), {}),
                ("causal", SMALL, (80, 80), {"causal": True}),
                ("parts", GPU, (12, 8192), {}),
                ("causal_parts", GPU, (12, 4096), {"causal": True}),
            )
        ),
        Case("scale", args(6, 40) | {"scale": 0.125}, SMALL),
        Case("negative_scale", args(6, 40) | {"scale": -2.5}, SMALL),
        Case("no_scale", args(6, 40) | {"scale": 0.0}, SMALL),
        Case("negative_scale_swept", args(2, 17_000) | {"scale": -2.5}, SMALL),
        Case("causal", args(2, 3, 9, 9) | {"causal": True}, SMALL),
        Case("causal_more_keys", args(2, 7, 20) | {"causal": True, "scale": 0.5}, SMALL),
        Case("causal_more_rows", args(2, 9, 4) | {"causal": True}, SMALL),
        Case("causal_masked", args(2, 5, 8, init=_masked) | {"causal": True}, SMALL),
        Case("causal_1100_columns", args(2, 3, 1100) | {"causal": True}, SMALL),
        Case("causal_swept", args(3, 17_000) | {"causal": True}, SMALL),
        Case("causal_swept_hidden", args(6, 1, 16_500) | {"causal": True}, TEST),
        Case("causal_heads", args(2, 3, 5, 16, init=tokens_first) | {"causal": True}, SMALL),
        Case("strided", args(5, 40, layout="strided"), SMALL),
        Case("strided_three_dims", args(2, 3, 40, layout="strided"), SMALL),
        Case("causal_strided", args(2, 6, 40, layout="strided") | {"causal": True}, SMALL),
        Case("transposed", args(9, 12, layout="transposed"), SMALL),
        Case("part", args(5, 64, init=first_half), SMALL),
        Case("heads", args(2, 3, 5, 64, init=tokens_first), SMALL),
        Case("no_rows", args(0, 16), SMALL),
        Case("no_rows_three_dims", args(3, 0, 16), TEST),
        Case("wide", args(4, 262_144), GPU),
        Case("parts", args(3, 33_024), TEST | {"compile"}),
        Case("parts_whole", args(3, 16_384), TEST | {"compile"}),
        Case("parts_negative", args(2, 16_640) | {"scale": -2.5}, TEST | {"compile"}),
        Case("parts_4096", args(301, 4096, init=uneven), GPU),
        Case("uneven_one_warp", args(5001, 1200, init=uneven), GPU),
        Case("uneven_two_warps", args(4001, 2896, init=uneven) | {"scale": 0.125}, GPU),
        Case("uneven_four_warps", args(2001, 7696), GPU),
        Case("uneven_few", args(151, 1168, init=uneven), GPU),
        Case("uneven_strided", args(400, 640, layout="strided"), GPU),
        Case("uneven_masked", args(333, 1136, init=_masked), GPU),
        Case("uneven_dead_row", args(5, 2320, init=_dead, grad=False), GPU),
        Case("uneven_lowest", args(3, 4544, dtype=torch.bfloat16, init=_lowest(torch.bfloat16), grad=False), GPU, FP32),
        Case("uneven_no_scale", args(9, 2320) | {"scale": 0.0}, GPU),
        Case("uneven_negative_scale", args(333, 1520) | {"scale": -2.5}, GPU),
        Case("parts_4352", args(70, 4352, init=uneven) | {"scale": 0.125}, GPU),
        Case("parts_20480", args(33, 20_480, init=uneven), GPU),
        Case("parts_lowest", args(3, 8192, dtype=torch.bfloat16, init=_lowest(torch.bfloat16), grad=False), GPU, FP32),
        Case("parts_whole_many_rows", args(301, 65_536, init=uneven), GPU),
        Case("parts_whole_masked", args(5, 8192, init=_masked) | {"scale": 0.5}, GPU),
        Case("parts_whole_dead_row", args(3, 24_576, init=_dead, grad=False), GPU),
        Case("parts_many_rows", args(901, 36_864, init=uneven), GPU),
        Case("parts_strided", args(40, 36_864, layout="strided"), GPU),
        Case("parts_part", args(37, 65_536, init=first_half), GPU),
        Case("parts_steep", args(5, 131_072, init=_steep), GPU),
        Case("parts_shifted", args(2, 66_048, init=_shifted), GPU),
        Case("parts_masked", args(3, 98_304, init=_masked), GPU),
        Case("parts_dead_row", args(3, 40_960, init=_dead, grad=False), GPU),
        Case("parts_negative_scale", args(9, 49_152) | {"scale": -2.5}, GPU),
        Case("causal_parts", args(2, 5, 1536) | {"causal": True}, TEST | {"compile"}),
        Case("causal_parts_hidden", args(2, 1300, 1064) | {"causal": True, "scale": 0.5}, GPU),
        Case("causal_parts_more_keys", args(3, 700, 4096) | {"causal": True}, GPU),
        Case("causal_parts_masked", args(2, 2050, 2056, init=_masked) | {"causal": True, "scale": 0.25}, GPU),
        Case("causal_parts_steep", args(2, 520, 8192, init=_steep) | {"causal": True}, GPU),
        Case("causal_parts_dead_row", args(3, 4096, init=_dead, grad=False) | {"causal": True}, GPU),
        Case("causal_parts_negative_scale", args(2, 300, 1504) | {"causal": True, "scale": -2.5}, GPU),
        Case("causal_parts_strided", args(2, 70, 3000, layout="strided") | {"causal": True}, GPU),
        Case("causal_parts_heads", args(2, 3, 40, 1200, init=tokens_first) | {"causal": True}, GPU),
        Case("causal_quarters", args(2, 2050, 2050) | {"causal": True}, GPU),
        Case("causal_wide", args(2, 5, 131_072) | {"causal": True}, GPU),
        Case("far", args(2, 4096, init=far_rows), GPU, BF16),
        Case("beyond_int32", args(2**19 + 1, 4096, grad=False), GPU, BF16),
    ]


def _bench(**options: object) -> list[Case]:
    sizes = [(2**21, 64), (2**19, 256), (131_072, 1024), (32_768, 4096), (16_384, 8192), (8192, 16_384), (4096, 32_768)]
    sizes += [(2048, 65_536), (1024, 131_072), (512, 4096)]
    found = [Case(f"{m}x{n}", {"x": T(m, n)} | options, BENCH) for m, n in sizes]
    causal = {"x": T(2, 16, 4096, 4096), "scale": 0.125, "causal": True}
    return [*found, Case("causal_2x16x4096x4096", causal | options, BENCH)]


CASES: dict[str, list[Case]] = {
    "softmax": [*_cases(), *_bench()],
    "softmax_dropout": [
        *_cases(**DROPPED),
        Case("p_0", {"x": T(6, 40)}, SMALL),
        Case("p_0_with_a_seed", {"x": T(6, 40), **DROPPED, "p": 0.0}, SMALL),
        Case("p_0_swept", {"x": T(2, 17_000)}, TEST),
        Case("p_0_parts", {"x": T(3, 33_024)}, TEST),
        Case("p_half_parts", {"x": T(3, 33_024), **DROPPED, "p": 0.5}, TEST),
        Case("p_half", {"x": T(6, 44), **DROPPED, "p": 0.5}, SMALL),
        Case("one_short_row", {"x": T(1, 2), **DROPPED}, SMALL),
        Case("p_nearly_1", {"x": T(6, 44), **DROPPED, "p": 0.97}, SMALL),
        *_bench(**{**DROPPED, "p": 0.1}),
    ],
}


def _passes(count: int, x: Tensor) -> int:
    return count * x.numel() * x.element_size()


def _visible_passes(read: int, written: int, x: Tensor, causal: bool) -> int:
    """Reads of what is visible, writes of everything."""
    if not causal:
        return _passes(read + written, x)
    tokens, keys = x.shape[-2:]
    seen = sum(min(max(t + keys - tokens + 1, 0), keys) for t in range(tokens)) / max(tokens * keys, 1)
    return int(_passes(read, x) * seen) + _passes(written, x)


def _statistics(x: Tensor) -> int:
    return 8 * (x.numel() // x.shape[-1])


bytes_moved = {
    "softmax": lambda x, causal=False: _visible_passes(1, 1, x, causal),
    "softmax_vjp": lambda x, causal=False: _visible_passes(2, 1, x, causal),
    "softmax_dropout": lambda x, causal=False: _visible_passes(1, 1, x, causal) + _statistics(x),
    "softmax_dropout_vjp": lambda x, causal=False: _visible_passes(2, 1, x, causal) + _statistics(x),
}
