"""Example inputs of xielu."""

import torch

from tilesmith.engine import Case, T
from tilesmith.engine.case import BENCH, GPU, HALF, SMALL
from tilesmith.engine.inits import far_rows
from tilesmith.ops.elementwise.cases.activations import half, passes, tails


def _args(*shape: int, **how: object) -> dict:
    return {"x": T(*shape, **how), "alpha_p": T(1), "alpha_n": T(1)}


CASES: dict[str, list[Case]] = {
    "xielu": [
        Case("small", _args(6, 33), SMALL),
        Case("three_dims", _args(2, 5, 16), SMALL),
        Case("one_column", _args(7, 1), SMALL),
        Case("scalar", _args(), SMALL),
        Case("many_blocks", _args(3, 700), SMALL),
        Case("tails", _args(4, 101, init=tails), SMALL),
        Case("beta_eps", {**_args(6, 33), "beta": 0.3, "eps": -0.4}, SMALL),
        Case("frozen_x", {**_args(6, 33), "x": T(6, 33, grad=False)}, SMALL),
        Case("frozen_alphas", {"x": T(6, 33), "alpha_p": T(1, grad=False), "alpha_n": T(1, grad=False)}, SMALL),
        Case("fp32_alphas", {**_args(6, 33), **{a: T(1, dtype=torch.float32) for a in ("alpha_p", "alpha_n")}}, SMALL,
             HALF),
        Case("strided", _args(5, 40, layout="strided"), SMALL),
        Case("transposed", _args(9, 12, layout="transposed"), SMALL),
        Case("halves", _args(3, 5, 24, init=half(True)), SMALL),
        Case("no_rows", _args(0, 16), SMALL),
        Case("far", _args(2, 4096, init=far_rows), GPU, (torch.bfloat16,)),
        *(Case(f"16384x{features}", _args(16_384, features), BENCH) for features in (4096, 8192, 21_504)),
    ]
}  # fmt: skip

bytes_moved = {"xielu": lambda x: passes(2, x), "xielu_vjp": lambda x: passes(3, x)}
