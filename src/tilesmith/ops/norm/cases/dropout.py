"""Example inputs of dropout_add_norm."""

import torch
from torch import Tensor

from tilesmith.engine import Case, T
from tilesmith.engine.case import BENCH, GPU, HALF, SMALL, TEST
from tilesmith.engine.inits import around_one, dropout_seed, first_half, tokens_first
from tilesmith.engine.memory import held


def _args(kind: str, *shape: int, p: float = 0.3, **how: object) -> dict:
    args = {"x": T(*shape, **how), "residual": T(*shape, **how), "weight": T(shape[-1], init=around_one)}
    bias = {"bias": T(shape[-1])} if kind == "layer" else {}
    return args | bias | {"seed": T(2, dtype=torch.int64, init=dropout_seed), "p": p, "kind": kind}


def _cases(kind: str) -> list[Case]:
    def args(*shape: int, **how: object) -> dict:
        return _args(kind, *shape, **how)

    vectors = ("weight", "bias") if kind == "layer" else ("weight",)
    frozen = {name: T(40, grad=False) for name in vectors}
    wide = {"residual": T(6, 40, dtype=torch.float32)}
    found = [
        Case("small", args(6, 33), SMALL),
        Case("by_four", args(6, 36), SMALL),
        Case("by_eight", args(6, 64), SMALL),
        Case("three_dims", args(2, 3, 64), SMALL),
        Case("one_dim", args(40), SMALL),
        Case("one_column", args(7, 1), SMALL),
        Case("one_row", args(1, 257), SMALL),
        Case("many_rows", args(150, 40), SMALL),
        Case("4097_columns", args(3, 4097), SMALL),
        Case("swept", args(2, 40_000), SMALL),
        Case("swept_odd", args(2, 33_333), TEST),
        Case("p_0", args(6, 40, p=0.0), SMALL),
        Case("p_half", args(6, 40, p=0.5), SMALL),
        Case("p_nearly_1", args(6, 40, p=0.97), SMALL),
        Case("no_seed", args(6, 40, p=0.0) | {"seed": None}, SMALL),
        Case("no_vectors", args(6, 40) | dict.fromkeys(vectors), SMALL),
        Case("frozen_vectors", args(5, 40) | frozen, SMALL),
        Case("frozen_x", args(6, 40) | {"x": T(6, 40, grad=False)}, SMALL),
        Case("frozen_residual", args(6, 40) | {"residual": T(6, 40, grad=False)}, SMALL),
        Case("only_vectors_train", args(5, 40) | {n: T(5, 40, grad=False) for n in ("x", "residual")}, SMALL),
        Case("fp32_residual", args(6, 40) | wide, SMALL, HALF),
        Case("swept_fp32_residual", args(2, 40_000) | {"residual": T(2, 40_000, dtype=torch.float32)}, TEST, HALF),
        Case("eps", args(6, 40) | {"eps": 0.5}, SMALL),
        Case("strided", args(5, 40, layout="strided"), SMALL),
        Case("strided_three_dims", args(2, 3, 40, layout="strided"), SMALL),
        Case("transposed", args(9, 12, layout="transposed"), SMALL),
        Case("part", args(5, 64, init=first_half), SMALL),
        Case("heads", args(2, 3, 5, 64, init=tokens_first), SMALL),
        Case("no_rows", args(0, 16), SMALL),
        Case("no_rows_three_dims", args(3, 0, 16), TEST),
        Case("parts", args(3, 33_024), SMALL),
        Case("parts_persistent", args(2, 66_304), TEST | {"compile"}),
        Case("parts_persistent_many_rows", args(301, 66_304), GPU),
        Case("parts_many_rows", args(901, 36_864), GPU),
        Case("parts_no_vectors", args(5, 66_048) | dict.fromkeys(vectors), GPU),
        Case("parts_p_0", args(5, 66_048, p=0.0), GPU),
        Case("parts_p_half", args(5, 66_048, p=0.5), GPU),
        Case("parts_131072_columns", args(65, 131_072), GPU),
        Case("parts_fp32_residual", args(70, 65_792) | {"residual": T(70, 65_792, dtype=torch.float32)}, GPU, HALF),
        Case("wide", args(4, 262_144), GPU),
        Case("beyond_int32", args(2**19 + 1, 4096, grad=False), GPU, (torch.bfloat16,)),
    ]
    return [Case(f"{kind}_{case.name}", case.args, case.tags, case.dtypes) for case in found]


def _bench() -> list[Case]:
    sizes = [(65_536, 1024), (16_384, 4096), (8192, 8192), (8192, 16_384), (4096, 32_768), (2048, 65_536)]
    sizes += [(1024, 131_072), (512, 4096)]
    return [Case(f"{kind}_{m}x{n}", _args(kind, m, n, p=0.1), BENCH) for kind in ("layer", "rms") for m, n in sizes]


CASES: dict[str, list[Case]] = {"dropout_add_norm": [*_cases("layer"), *_cases("rms"), *_bench()]}


def _statistics(x: Tensor, kind: str) -> int:
    return (8 if kind == "layer" else 4) * (x.numel() // x.shape[-1])


bytes_moved = {
    "dropout_add_norm": lambda x, residual, kind: 2 * held(x, residual) + _statistics(x, kind),
    "dropout_add_norm_vjp": lambda x, residual, kind: 2 * held(x) + 3 * held(residual) + _statistics(x, kind),
}
