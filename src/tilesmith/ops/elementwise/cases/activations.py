"""Example inputs of the elementwise family."""

from collections.abc import Sequence

import torch
from torch import Tensor

from tilesmith.engine import Case, T
from tilesmith.engine.case import BENCH, GPU, HALF, SMALL, TEST
from tilesmith.engine.inits import far_rows

ROWS = (
    (131_072, 1024), (16_384, 4096), (16_384, 8192), (8192, 16_384), (4096, 32_768), (2048, 65_536), (1024, 131_072),
)  # fmt: skip


def half(first: bool):
    """One half of a packed [..., 2F] projection."""

    def init(generator: torch.Generator, shape: Sequence[int], device: torch.device) -> Tensor:
        packed = torch.randn(*shape[:-1], 2 * shape[-1], generator=generator, device=device)
        return packed.chunk(2, dim=-1)[0 if first else 1]

    return init


def tails(generator: torch.Generator, shape: Sequence[int], device: torch.device) -> Tensor:
    """Values from -30 to 30: both tails of the activations."""
    return torch.linspace(-30, 30, int(torch.Size(shape).numel()), device=device).view(*shape)


def _cases(operands: Sequence[str], **options: object) -> list[Case]:
    """Cases of an op whose tensors all have one shape."""

    def args(*shape: int, **how: object) -> dict:
        return {name: T(*shape, **how) for name in operands} | options

    halves = {name: T(3, 5, 24, init=half(name == "gate")) for name in operands}
    return [
        Case("small", args(6, 33), SMALL),
        Case("three_dims", args(2, 5, 16), SMALL),
        Case("one_column", args(7, 1), SMALL),
        Case("scalar", args(), SMALL),
        Case("many_blocks", args(3, 2500), SMALL),
        Case("tails", args(4, 101, init=tails), SMALL),
        Case("strided", args(5, 40, layout="strided"), SMALL),
        Case("strided_three_dims", args(2, 3, 40, layout="strided"), TEST),
        Case("transposed", args(9, 12, layout="transposed"), SMALL),
        Case("halves", halves | options, SMALL),
        Case("no_rows", args(0, 16), SMALL),
        Case("no_columns", args(4, 0), SMALL),
        Case("wide", args(2, 262_144), GPU),
        Case("far", args(2, 4096, init=far_rows), GPU, (torch.bfloat16,)),
    ]


def _bench(operands: Sequence[str], **options: object) -> list[Case]:
    return [
        Case(f"16384x{features}", {name: T(16384, features) for name in operands} | options, BENCH)
        for features in (4096, 8192, 14336)
    ]


def _biased(**options: object) -> list[Case]:
    """Cases of an op on rows and a bias along them."""

    def args(*shape: int, **how: object) -> dict:
        return {"x": T(*shape, **how), "bias": T(shape[-1])} | options

    return [
        Case("small", args(6, 33), SMALL),
        Case("three_dims", args(2, 5, 16), SMALL),
        Case("one_dim", args(40), SMALL),
        Case("one_column", args(7, 1), SMALL),
        Case("many_rows", args(150, 40), SMALL),
        Case("many_blocks", args(70, 1030), SMALL),
        Case("tails", args(4, 101, init=tails), SMALL),
        Case("no_bias", {"x": T(6, 33), "bias": None} | options, SMALL),
        Case("frozen_bias", args(6, 40) | {"bias": T(40, grad=False)}, SMALL),
        Case("only_bias_trains", args(6, 40) | {"x": T(6, 40, grad=False)}, SMALL),
        Case("fp32_bias", args(6, 40) | {"bias": T(40, dtype=torch.float32)}, SMALL, HALF),
        Case("strided", args(5, 40, layout="strided"), SMALL),
        Case("strided_three_dims", args(2, 3, 40, layout="strided"), TEST),
        Case("transposed", args(9, 12, layout="transposed"), SMALL),
        Case("halves", args(3, 5, 24, init=half(True)), SMALL),
        Case("no_rows", args(0, 16), SMALL),
        Case("no_columns", args(4, 0), SMALL),
        Case("wide", args(2, 262_144), GPU),
        Case("tall", args(2**20, 64), GPU, (torch.bfloat16,)),
        Case("far", args(2, 4096, init=far_rows), GPU, (torch.bfloat16,)),
        *(Case(f"{m}x{n}", args(m, n), BENCH) for m, n in ROWS),
    ]


X, PAIR, SUMMANDS = ("x",), ("gate", "up"), ("x", "y")

CASES: dict[str, list[Case]] = {
    "silu": [
        *_cases(X),
        Case("beyond_int32", {"x": T(2**19 + 1, 4096, grad=False)}, GPU, (torch.bfloat16,)),
        *_bench(X),
    ],
    "gelu": [
        *_cases(X),
        Case("tanh", {"x": T(6, 33), "approximate": "tanh"}, SMALL),
        Case("tanh_tails", {"x": T(4, 101, init=tails), "approximate": "tanh"}, SMALL),
        *_bench(X),
    ],
    "sigmoid": [*_cases(X), *_bench(X)],
    "relu_squared": [*_cases(X), *_bench(X)],
    "add_relu": [
        *_cases(SUMMANDS),
        Case("frozen_y", {"x": T(6, 33), "y": T(6, 33, grad=False)}, SMALL),
        Case("frozen_x", {"x": T(6, 33, grad=False), "y": T(6, 33)}, SMALL),
        *(Case(f"{m}x{n}", {name: T(m, n) for name in SUMMANDS}, BENCH) for m, n in ROWS),
    ],
    "bias_gelu": [
        *_biased(),
        Case("tanh", {"x": T(6, 33), "bias": T(33), "approximate": "tanh"}, SMALL),
        Case("tanh_tails", {"x": T(4, 101, init=tails), "bias": T(101), "approximate": "tanh"}, SMALL),
        Case("tanh_16384x8192", {"x": T(16_384, 8192), "bias": T(8192), "approximate": "tanh"}, BENCH),
    ],
    "swiglu": [
        *_cases(PAIR),
        Case("packed_16384x8192", {name: T(16384, 8192, init=half(name == "gate")) for name in PAIR}, BENCH),
        *_bench(PAIR),
    ],
    "geglu": [
        *_cases(PAIR, approximate="tanh"),
        Case("erf", {"gate": T(6, 33), "up": T(6, 33), "approximate": "none"}, SMALL),
        Case("erf_tails", {"gate": T(4, 101, init=tails), "up": T(4, 101), "approximate": "none"}, SMALL),
        Case("erf_16384x8192", {name: T(16384, 8192) for name in PAIR} | {"approximate": "none"}, BENCH),
        *_bench(PAIR, approximate="tanh"),
    ],
}


def passes(count: int, x: Tensor) -> int:
    return count * x.numel() * x.element_size()


bytes_moved = {
    "silu": lambda x: passes(2, x),
    "silu_vjp": lambda x: passes(3, x),
    "gelu": lambda x: passes(2, x),
    "gelu_vjp": lambda x: passes(3, x),
    "sigmoid": lambda x: passes(2, x),
    "sigmoid_vjp": lambda x: passes(3, x),
    "relu_squared": lambda x: passes(2, x),
    "relu_squared_vjp": lambda x: passes(3, x),
    "add_relu": lambda x: passes(3, x),
    "add_relu_vjp": lambda x: passes(3, x),
    "bias_gelu": lambda x: passes(2, x),
    "bias_gelu_vjp": lambda x: passes(3, x),
    "swiglu": lambda gate: passes(3, gate),
    "swiglu_vjp": lambda gate: passes(5, gate),
    "geglu": lambda gate: passes(3, gate),
    "geglu_vjp": lambda gate: passes(5, gate),
}
