"""Example inputs of the norms, alone and with the residual addition before them."""

from collections.abc import Sequence

import torch
from torch import Tensor

from tilesmith.engine import Case, T
from tilesmith.engine.case import BENCH, GPU, HALF, SMALL, TEST
from tilesmith.engine.inits import around_one, far_rows, first_half, tokens_first, uneven
from tilesmith.engine.memory import held


def _shifted(generator: torch.Generator, shape: Sequence[int], device: torch.device) -> Tensor:
    """A mean 100 times the deviation, and one column of outliers."""
    x = torch.randn(*shape, generator=generator, device=device) + 100
    x[..., 0] = -3000
    return x


def _zeros(generator: torch.Generator, shape: Sequence[int], device: torch.device) -> Tensor:
    """Rows of zeros and, where there are several, ones: no deviation at all."""
    return torch.zeros(shape, device=device).index_fill_(0, torch.arange(0, shape[0], 2, device=device), 1.0)


_INIT = {"weight": around_one, "bias": "normal"}


def _cases(rows: Sequence[str], vectors: Sequence[str]) -> list[Case]:
    """Cases of a norm whose arguments `rows` are [..., N] and `vectors` are [N]."""

    added = "residual" in rows

    def args(*shape: int, **how: object) -> dict:
        return {name: T(*shape, **how) for name in rows} | {name: T(shape[-1], init=_INIT[name]) for name in vectors}

    def fp32_vectors(*shape: int) -> dict:
        # where s is rounded to 16 bits, no fp32 dweight comes near the oracle's, which rounds nothing
        wide = {name: T(shape[-1], dtype=torch.float32, grad=not added, init=_INIT[name]) for name in vectors}
        return args(*shape) | wide

    def plain(*shape: int, **how: object) -> dict:
        return {name: T(*shape, **how) for name in rows} | dict.fromkeys(vectors)

    frozen = args(5, 40) | {name: T(40, grad=False, init=_INIT[name]) for name in vectors}
    fixed = args(5, 40) | {name: T(5, 40, grad=False) for name in rows}
    found = [
        Case("small", args(6, 33), SMALL),
        Case("three_dims", args(2, 3, 64), SMALL),
        Case("one_dim", args(40), SMALL),
        Case("one_column", args(7, 1), SMALL),
        Case("one_row", args(1, 257), SMALL),
        Case("many_rows", args(150, 40), SMALL),
        Case("4097_columns", args(3, 4097), SMALL),
        Case("swept", args(2, 17_000), SMALL),
        Case("no_vectors", plain(6, 40), SMALL),
        Case("frozen_vectors", frozen, SMALL),
        Case("only_vectors_train", fixed, SMALL),
        Case("fp32_vectors", fp32_vectors(6, 40), SMALL, HALF),
        Case("swept_fp32_vectors", fp32_vectors(2, 17_000), TEST, HALF),
        Case("shifted", args(24, 1001, init=_shifted), SMALL),
        # one row: between outliers of several, dweight cancels, and its error is not that of its size
        Case("shifted_swept", args(1, 17_000, init=_shifted), SMALL),
        Case("no_deviation", args(4, 64, init=_zeros), SMALL),
        Case("tiny", args(4, 64, init=lambda g, s, d: 1e-3 * torch.randn(s, generator=g, device=d)), SMALL),
        Case("strided", args(5, 40, layout="strided"), SMALL),
        Case("strided_three_dims", args(2, 3, 40, layout="strided"), SMALL),
        Case("transposed", args(9, 12, layout="transposed"), SMALL),
        Case("part", args(5, 64, init=first_half), SMALL),
        Case("heads", args(2, 3, 5, 64, init=tokens_first), SMALL),
        Case("no_rows", args(0, 16), SMALL),
        Case("no_rows_three_dims", args(3, 0, 16), TEST),
        Case("parts", args(3, 33_024), SMALL),
        Case("parts_many_rows", args(901, 36_864, init=uneven), GPU),
        Case("two_warps", args(333, 2304, init=uneven), GPU),
        Case("four_warps", args(333, 3840, init=uneven), GPU),
        Case("uneven_one_warp", args(5001, 1200, init=uneven), GPU),
        Case("uneven_two_warps", args(4001, 2896, init=uneven), GPU),
        Case("uneven_four_warps", args(2001, 7696), GPU),
        Case("uneven_few", args(151, 1168, init=uneven), GPU),
        Case("uneven_strided", args(400, 640, layout="strided"), GPU),
        Case("uneven_shifted", args(3, 2576, init=_shifted), GPU),
        Case("uneven_no_vectors", plain(700, 4544), GPU),
        Case("parts_of_1024", args(2001, 4608, init=uneven), GPU),
        Case("parts_of_2048", args(2001, 5120, init=uneven), GPU),
        Case("parts_strided", args(40, 36_864, layout="strided"), GPU),
        Case("parts_part", args(37, 65_536, init=first_half), GPU),
        Case("parts_shifted", args(1, 65_536, init=_shifted), GPU),
        Case("parts_no_vectors", plain(5, 66_048), GPU),
        Case("parts_131072_columns", args(65, 131_072), GPU),
        Case("wide", args(4, 262_144), GPU),
        Case("far", args(2, 4096, init=far_rows), GPU, (torch.bfloat16,)),
        Case("beyond_int32", args(2**19 + 1, 4096, grad=False), GPU, (torch.bfloat16,)),
    ]
    if added:
        wide = args(6, 40) | {"residual": T(6, 40, dtype=torch.float32)}
        all_wide = wide | {name: T(40, dtype=torch.float32, init=_INIT[name]) for name in vectors}
        swept = args(2, 17_000) | {"residual": T(2, 17_000, dtype=torch.float32)}
        other = args(2, 3, 5, 64, init=tokens_first) | {"residual": T(2, 3, 5, 64)}
        found += [
            Case("fp32_residual", wide, SMALL, HALF),
            Case("fp32_residual_and_vectors", all_wide, SMALL, HALF),
            Case("swept_fp32_residual", swept, SMALL, HALF),
            Case("parts_fp32_residual", args(70, 65_792) | {"residual": T(70, 65_792, dtype=torch.float32)}, GPU, HALF),
            Case("parts_staying", args(2, 66_048), TEST | {"compile"}, HALF),
            Case("residual_in_another_order", other, SMALL),
            Case("frozen_residual", args(6, 40) | {"residual": T(6, 40, grad=False)}, SMALL),
            Case("frozen_x", args(6, 40) | {"x": T(6, 40, grad=False)}, SMALL),
        ]
    return found


def _rms_cases(rows: Sequence[str]) -> list[Case]:
    def args(*shape: int, **options: object) -> dict:
        return {name: T(*shape) for name in rows} | {"weight": T(shape[-1])} | options

    fp32 = {"weight": T(40, dtype=torch.float32, grad="residual" not in rows)}
    return [
        Case("offset", args(6, 40, offset=1.0), SMALL),
        Case("llama", args(6, 40, casting="llama"), SMALL),
        Case("llama_offset", args(6, 40, casting="llama", offset=1.0), SMALL),
        Case("llama_fp32_weight", args(6, 40, casting="llama", offset=0.5) | fp32, SMALL, HALF),
        Case("llama_no_weight", {name: T(6, 40) for name in rows} | {"weight": None, "casting": "llama"}, SMALL),
        Case("llama_swept", args(2, 17_000, casting="llama", offset=1.0), TEST),
        Case("llama_parts", args(2, 33_024, casting="llama", offset=1.0), GPU),
        Case("eps", args(6, 40, eps=0.5), SMALL),
        Case("none", args(6, 40, casting="none"), SMALL),
        Case("none_offset", args(6, 40, casting="none", offset=1.0), SMALL),
        Case("none_fp32_weight", args(6, 40, casting="none", offset=0.5) | fp32, SMALL, HALF),
        Case("none_swept", args(2, 17_000, casting="none"), TEST),
    ]


def _by_head(*shape: int, **how: object) -> dict:
    """A weight for each head: [H, N] of x [..., H, N]."""
    return {"x": T(*shape, **how), "weight": T(*shape[-2:], init=around_one)}


PER_HEAD = [
    Case("per_head", _by_head(2, 5, 3, 16), SMALL),
    Case("per_head_two_dims", {**_by_head(7, 33), "offset": 1.0}, SMALL),
    Case("per_head_llama", {**_by_head(4, 3, 40), "casting": "llama"}, SMALL),
    Case("per_head_none", {**_by_head(4, 3, 40), "casting": "none"}, SMALL),
    Case("per_head_in_another_order", _by_head(2, 3, 5, 64, init=tokens_first), SMALL),
    Case("per_head_strided", _by_head(2, 5, 3, 24, layout="strided"), SMALL),
    Case("per_head_many_rows", _by_head(150, 2, 40), SMALL),
    Case("per_head_frozen", {**_by_head(4, 3, 40), "weight": T(3, 40, grad=False)}, SMALL),
    Case("per_head_swept", _by_head(2, 2, 17_000), SMALL),
    Case("per_head_no_rows", _by_head(0, 3, 16), SMALL),
    Case("per_head_no_heads", _by_head(2, 0, 16), SMALL),
    Case("per_head_one_head", _by_head(5, 1, 16), SMALL),
    Case("per_head_16384x32x128", _by_head(16_384, 32, 128), BENCH),
]


def _bench(rows: Sequence[str], vectors: Sequence[str]) -> list[Case]:
    def case(name: str, *shape: int, **how: object) -> Case:
        args = {name: T(*shape, **how) for name in rows} | {name: T(shape[-1], init=_INIT[name]) for name in vectors}
        return Case(name, args, BENCH)

    sizes = [(2**21, 64), (2**20, 128), (2**17, 512), (65_536, 1024), (32_768, 2048), (16_384, 4096), (16_384, 5120)]
    sizes += [(16_384, 8192), (8192, 16_384), (8192, 32_768), (4096, 65_536), (2048, 131_072), (512, 4096)]
    found = [case(f"{m}x{n}", m, n) for m, n in sizes]
    if "residual" not in rows:
        found.append(case("heads_4x32x4096x128", 4, 32, 4096, 128, init=tokens_first))
    return found


X, BOTH = ("x",), ("x", "residual")
WEIGHT, AFFINE = ("weight",), ("weight", "bias")

CASES: dict[str, list[Case]] = {
    "rms_norm": [*_cases(X, WEIGHT), *_rms_cases(X), *PER_HEAD, *_bench(X, WEIGHT)],
    "layer_norm": [
        *_cases(X, AFFINE),
        Case("no_bias", {"x": T(6, 40), "weight": T(40), "bias": None}, SMALL),
        Case("bias_alone", {"x": T(6, 40), "weight": None, "bias": T(40)}, SMALL),
        Case("swept_no_bias", {"x": T(2, 8200), "weight": T(8200), "bias": None}, SMALL),
        *_bench(X, AFFINE),
    ],
    "add_rms_norm": [*_cases(BOTH, WEIGHT), *_rms_cases(BOTH), *_bench(BOTH, WEIGHT)],
    "add_layer_norm": [*_cases(BOTH, AFFINE), *_bench(BOTH, AFFINE)],
}


def _statistics(x: Tensor, count: int) -> int:
    return 4 * count * (x.numel() // x.shape[-1])


bytes_moved = {
    "rms_norm": lambda x: 2 * held(x),
    "rms_norm_vjp": lambda x: 3 * held(x) + _statistics(x, 1),
    "layer_norm": lambda x: 2 * held(x),
    "layer_norm_vjp": lambda x: 3 * held(x) + _statistics(x, 2),
    "add_rms_norm": lambda x, residual: 2 * held(x, residual),
    "add_rms_norm_vjp": lambda x, residual: held(x) + 3 * held(residual) + _statistics(x, 1),
    "add_layer_norm": lambda x, residual: 2 * held(x, residual),
    "add_layer_norm_vjp": lambda x, residual: held(x) + 3 * held(residual) + _statistics(x, 2),
}
