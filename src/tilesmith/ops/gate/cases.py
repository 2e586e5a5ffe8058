"""Example inputs of the gate family."""

from collections.abc import Sequence

import torch
from torch import Tensor

from tilesmith.engine import Case, T

TEST = frozenset({"test"})
SMALL = frozenset({"test", "interpret"})
GPU = frozenset({"gpu"})
BENCH = frozenset({"gpu", "bench", "tune"})


def _half(first: bool):
    """One half of a packed [..., 2F] projection."""

    def init(generator: torch.Generator, shape: Sequence[int], device: torch.device) -> Tensor:
        packed = torch.randn(*shape[:-1], 2 * shape[-1], generator=generator, device=device)
        return packed.chunk(2, dim=-1)[0 if first else 1]

    return init


def _wide(generator: torch.Generator, shape: Sequence[int], device: torch.device) -> Tensor:
    """Values from -30 to 30: both tails of the activations."""
    return torch.linspace(-30, 30, int(torch.Size(shape).numel()), device=device).view(*shape)


def _far(generator: torch.Generator, shape: Sequence[int], device: torch.device) -> Tensor:
    """bfloat16 rows so far apart that a 32-bit offset of the second one overflows."""
    step = 2**31 + 8
    base = torch.empty(step * (shape[0] - 1) + shape[1], dtype=torch.bfloat16, device=device)
    return base.as_strided(shape, (step, 1)).copy_(torch.randn(*shape, generator=generator, device=device))


def _cases(operands: Sequence[str], **options: object) -> list[Case]:
    """Cases of an op whose tensors all have one shape."""

    def args(*shape: int, **how: object) -> dict:
        return {name: T(*shape, **how) for name in operands} | options

    halves = {name: T(3, 5, 24, init=_half(name == "gate")) for name in operands}
    return [
        Case("small", args(6, 33), SMALL),
        Case("three_dims", args(2, 5, 16), SMALL),
        Case("one_column", args(7, 1), SMALL),
        Case("scalar", args(), SMALL),
        Case("many_blocks", args(3, 2500), SMALL),
        Case("tails", args(4, 101, init=_wide), SMALL),
        Case("strided", args(5, 40, layout="strided"), SMALL),
        Case("strided_three_dims", args(2, 3, 40, layout="strided"), TEST),
        Case("transposed", args(9, 12, layout="transposed"), SMALL),
        Case("halves", halves | options, SMALL),
        Case("no_rows", args(0, 16), SMALL),
        Case("no_columns", args(4, 0), SMALL),
        Case("wide", args(2, 262_144), GPU),
        Case("far", args(2, 4096, init=_far), GPU, (torch.bfloat16,)),
    ]


def _bench(operands: Sequence[str], **options: object) -> list[Case]:
    return [
        Case(f"16384x{features}", {name: T(16384, features) for name in operands} | options, BENCH)
        for features in (4096, 8192, 14336)
    ]


X, PAIR = ("x",), ("gate", "up")

CASES: dict[str, list[Case]] = {
    "silu": [
        *_cases(X),
        Case("beyond_int32", {"x": T(2**19 + 1, 4096, grad=False)}, GPU, (torch.bfloat16,)),
        *_bench(X),
    ],
    "gelu": [
        *_cases(X),
        Case("tanh", {"x": T(6, 33), "approximate": "tanh"}, SMALL),
        Case("tanh_tails", {"x": T(4, 101, init=_wide), "approximate": "tanh"}, SMALL),
        *_bench(X),
    ],
    "swiglu": [
        *_cases(PAIR),
        Case("packed_16384x8192", {name: T(16384, 8192, init=_half(name == "gate")) for name in PAIR}, BENCH),
        *_bench(PAIR),
    ],
    "geglu": [
        *_cases(PAIR, approximate="tanh"),
        Case("erf", {"gate": T(6, 33), "up": T(6, 33), "approximate": "none"}, SMALL),
        Case("erf_tails", {"gate": T(4, 101, init=_wide), "up": T(4, 101), "approximate": "none"}, SMALL),
        Case("erf_16384x8192", {name: T(16384, 8192) for name in PAIR} | {"approximate": "none"}, BENCH),
        *_bench(PAIR, approximate="tanh"),
    ],
}


def _passes(count: int, x: Tensor) -> int:
    return count * x.numel() * x.element_size()


bytes_moved = {
    "silu": lambda x: _passes(2, x),
    "silu_vjp": lambda x: _passes(3, x),
    "gelu": lambda x: _passes(2, x),
    "gelu_vjp": lambda x: _passes(3, x),
    "swiglu": lambda gate: _passes(3, gate),
    "swiglu_vjp": lambda gate: _passes(5, gate),
    "geglu": lambda gate: _passes(3, gate),
    "geglu_vjp": lambda gate: _passes(5, gate),
}
