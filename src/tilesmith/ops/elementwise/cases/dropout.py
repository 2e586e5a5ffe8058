"""Example inputs of the drop family."""

from collections.abc import Sequence

import torch

from tilesmith.engine import Case, T
from tilesmith.engine.case import BENCH, GPU, HALF, SMALL, TEST
from tilesmith.engine.inits import dropout_seed, far_rows, first_half
from tilesmith.ops.elementwise.cases.activations import passes


def _cases(operands: Sequence[str]) -> list[Case]:
    """Cases of an op whose arguments `operands` are [..., F]."""

    def args(*shape: int, p: float = 0.3, **how: object) -> dict:
        given = {name: T(*shape, **how) for name in operands} | {"bias": T(shape[-1])}
        return given | {"seed": T(2, dtype=torch.int64, init=dropout_seed), "p": p}

    def plain(*shape: int, **how: object) -> dict:
        return args(*shape, **how) | {"bias": None}

    found = [
        Case("small", args(6, 33), SMALL),
        Case("by_four", args(6, 36), SMALL),
        Case("by_eight", args(6, 64), SMALL),
        Case("three_dims", args(2, 3, 64), SMALL),
        Case("one_dim", args(41), SMALL),
        Case("one_column", args(5, 1), SMALL),
        Case("two_columns", args(6, 2), SMALL),
        Case("many_rows", args(150, 40), SMALL),
        Case("many_blocks", args(70, 1028), SMALL),
        Case("p_0", args(6, 40, p=0.0), SMALL),
        Case("p_0_no_seed", args(6, 40, p=0.0) | {"seed": None}, SMALL),
        Case("p_nearly_1", args(6, 400, p=0.99), SMALL),
        Case("no_bias", plain(6, 33), SMALL),
        Case("no_bias_many_blocks", plain(3, 2500), SMALL),
        Case("no_bias_strided", plain(5, 40, layout="strided"), SMALL),
        Case("no_bias_p_0", plain(5, 40, p=0.0), SMALL),
        Case("frozen_bias", args(6, 40) | {"bias": T(40, grad=False)}, SMALL),
        Case("only_bias_trains", args(6, 40) | {name: T(6, 40, grad=False) for name in operands}, SMALL),
        Case("fp32_bias", args(6, 40) | {"bias": T(40, dtype=torch.float32)}, SMALL, HALF),
        Case("strided", args(5, 40, layout="strided"), SMALL),
        Case("strided_three_dims", args(2, 3, 40, layout="strided"), TEST),
        Case("transposed", args(9, 12, layout="transposed"), SMALL),
        Case("part", args(5, 64, init=first_half), SMALL),
        Case("no_rows", args(0, 16), SMALL),
        Case("no_columns", args(4, 0), SMALL),
        Case("wide", args(2, 262_144), GPU),
        Case("tall", args(2**20, 64), GPU, (torch.bfloat16,)),
        Case("far", args(2, 4096, init=far_rows), GPU, (torch.bfloat16,)),
    ]
    sizes = [(131_072, 1024), (16_384, 4096), (16_384, 8192), (8192, 16_384), (4096, 32_768), (2048, 65_536)]
    found += [Case(f"{m}x{n}", args(m, n, p=0.1), BENCH) for m, n in [*sizes, (1024, 131_072)]]
    return [*found, Case("no_bias_16384x8192", plain(16_384, 8192, p=0.1), BENCH)]


CASES: dict[str, list[Case]] = {
    "bias_dropout": _cases(("x",)),
    "bias_dropout_residual": [
        *_cases(("x", "residual")),
        Case(
            "frozen_residual",
            {"x": T(6, 40), "residual": T(6, 40, grad=False), "bias": T(40), "p": 0.3}
            | {"seed": T(2, dtype=torch.int64, init=dropout_seed)},
            SMALL,
        ),
        Case(
            "frozen_x",
            {"x": T(6, 40, grad=False), "residual": T(6, 40), "bias": None, "p": 0.3}
            | {"seed": T(2, dtype=torch.int64, init=dropout_seed)},
            SMALL,
        ),
    ],
}


bytes_moved = {
    "bias_dropout": lambda x: passes(2, x),
    "bias_dropout_vjp": lambda dout: passes(2, dout),
    "bias_dropout_residual": lambda x: passes(3, x),
    "bias_dropout_residual_vjp": lambda dout: passes(2, dout),
}
