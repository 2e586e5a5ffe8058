"""Example inputs of experts in 8 bits."""

from collections.abc import Sequence

import torch
from torch import Tensor

from tilesmith.engine import Case, T
from tilesmith.engine.case import BENCH, BF16, COMPILE, GPU, SMALL, TEST
from tilesmith.engine.memory import held
from tilesmith.ops.moe.cases.draws import Init, always, shares, uniform, with_sentinels, zipf

ONCE = (torch.float32,)  # the dtypes are those of the arguments
E4M3 = torch.float8_e4m3fn
ALL = [True, True, True, True]
# A 16-bit value that the oracle has a little otherwise may get the neighbouring code of 8 bits; a sum over many of them
# hides none that is wrong.


def _eight(generator: torch.Generator, shape: Sequence[int], device: torch.device) -> Tensor:
    """Normal numbers in 8 bits."""
    return (torch.randn(tuple(shape), generator=generator, device=device) * 64).to(E4M3)


def _factors(generator: torch.Generator, shape: Sequence[int], device: torch.device) -> Tensor:
    """Powers of two from 2^-8 to 2^-5, so that tokens have about unit size."""
    return torch.exp2(torch.randint(-8, -4, tuple(shape), generator=generator, device=device).float())


def _small_factors(generator: torch.Generator, shape: Sequence[int], device: torch.device) -> Tensor:
    """Those of weights: outputs of unit size for a few dozen features."""
    return _factors(generator, shape, device) / 8


def _gaps(generator: torch.Generator, shape: Sequence[int], device: torch.device) -> Tensor:
    """Every third row is 0, as is the gradient of a token whose label does not count."""
    drawn = _eight(generator, shape, device)
    drawn.view(torch.uint8)[::3] = 0
    return drawn


def _factors_of_gaps(generator: torch.Generator, shape: Sequence[int], device: torch.device) -> Tensor:
    """Small ones, and what `fp8_cast_rows` gives rows of zeros."""
    drawn = _factors(generator, shape, device) * 2.0**-20
    drawn[::3] = 2.0**-108
    return drawn


def _common(lead: tuple[int, ...], top_k: int, experts: int, indices: Init | None, scales: torch.dtype) -> dict:
    return {
        "indices": T(*lead, top_k, dtype=torch.int64, init=indices or uniform(experts)),
        "weights": T(*lead, top_k, dtype=scales, init=shares, grad=False),
    }


def _forward(
    lead: tuple[int, ...] | int, hidden: int, inner: int, experts: int, top_k: int, *, indices: Init | None = None,
    eight: torch.dtype = E4M3, scales: torch.dtype = torch.float32, dtype: str = "float32", activation: str = "swiglu",
) -> dict:  # fmt: skip
    shape = (lead,) if isinstance(lead, int) else lead
    draw = {"dtype": eight, "grad": False, "init": _eight if eight is E4M3 else "normal"}
    factor = {"dtype": torch.float32, "grad": False}
    return {
        "x8": T(*shape, hidden, **draw),
        "x_factor": T(torch.Size(shape).numel(), 1, init=_factors, **factor),
        "gate_up8": T(experts, 2 * inner, hidden, **draw),
        "gate_up_factor": T(experts, init=_small_factors, **factor),
        "down8": T(experts, hidden, inner, **draw),
        "down_factor": T(experts, init=_small_factors, **factor),
        **_common(shape, top_k, experts, indices, scales),
        "activation": activation,
        "dtype": dtype,
    }


def _backward(
    lead: tuple[int, ...] | int, hidden: int, inner: int, experts: int, top_k: int, *, indices: Init | None = None,
    eight: torch.dtype = E4M3, scales: torch.dtype = torch.float32, dtype: torch.dtype = torch.float32,
    activation: str = "swiglu", mask: Sequence[bool] = ALL, all_in_8_bits: bool = False, gaps: bool = False,
) -> dict:  # fmt: skip
    """gaps: rows of zeros among the gradients."""
    shape = (lead,) if isinstance(lead, int) else lead
    tokens = torch.Size(shape).numel()
    draw = {"dtype": eight, "grad": False, "init": _eight if eight is E4M3 else "normal"}
    factor = {"dtype": torch.float32, "grad": False}
    plain = {"dtype": torch.float64 if eight is torch.float64 else dtype, "grad": False}
    return {
        "dy": T(*shape, hidden, **plain),
        "dy8": T(*shape, hidden, **(draw | {"init": _gaps} if gaps else draw)),
        "dy_factor": T(tokens, 1, init=_factors_of_gaps if gaps else _factors, **factor),
        "x": T(*shape, hidden, **(draw if all_in_8_bits else plain)),
        "x_factor": T(tokens, 1, init=_factors, **factor) if all_in_8_bits else None,
        "pre": T(tokens * top_k, 2 * inner, **plain),
        "gate_up8_t": T(experts, hidden, 2 * inner, **draw),
        "gate_up_factor": T(experts, init=_small_factors, **factor),
        "down8_t": T(experts, inner, hidden, **draw),
        "down_factor": T(experts, init=_small_factors, **factor),
        **_common(shape, top_k, experts, indices, scales),
        "activation": activation,
        "output_mask": list(mask),
    }


def _cases(args, half: object, exact: dict) -> list[Case]:
    """The cases of the forward or of its gradients. half: bfloat16 as `args` takes it; exact: what makes the oracle's
    own call."""
    return [
        Case("exact", args(5, 32, 16, 3, 2, **exact), TEST, ONCE),  # torch's own checks compare no 8-bit floats
        Case("small", args((2, 5), 48, 32, 4, 2), SMALL, ONCE),
        Case("several_tiles", args(66, 160, 80, 2, 2), SMALL, ONCE),
        Case("one_token", args(1, 32, 16, 8, 3), SMALL, ONCE),
        Case("no_tokens", args((2, 0), 16, 16, 4, 2), SMALL, ONCE),
        Case("vector", args((), 16, 16, 4, 2), TEST, ONCE),
        Case("one_expert_has_all", args(37, 32, 16, 4, 1, indices=always(2)), SMALL, ONCE),
        Case("sentinels", args(20, 32, 16, 3, 4, indices=with_sentinels(3)), SMALL, ONCE),
        Case("only_sentinels", args(5, 16, 16, 3, 2, indices=always(3)), SMALL, ONCE),
        Case("odd", args(19, 21, 11, 5, 3), SMALL, ONCE),
        Case("geglu", args(11, 16, 32, 3, 2, activation="geglu"), SMALL, ONCE),
        Case("geglu_erf", args(11, 16, 32, 3, 2, activation="geglu_erf"), TEST, ONCE),
        Case("bf16", args(40, 64, 48, 4, 2, dtype=half, scales=torch.bfloat16), TEST, ONCE),
        Case("whole_tiles", args(256, 256, 128, 2, 2, dtype=half), COMPILE, BF16),
        Case("few_tokens", args(4, 256, 128, 16, 4, dtype=half), COMPILE, BF16),
        Case("odd_tiles", args((3, 331), 208, 112, 33, 5, dtype=half), GPU, BF16),
        Case("sentinels_large", args(1024, 512, 256, 16, 8, dtype=half, indices=with_sentinels(16)), GPU, BF16),
        Case("wide", args(64, 512, 4224, 4, 2, dtype=half), COMPILE, BF16),
        Case("qwen3", args(1024, 2048, 768, 128, 8, dtype=half), GPU, BF16),
        *(
            Case(f"{tokens}x2048_e128_i768_k8", args(tokens, 2048, 768, 128, 8, dtype=half), BENCH, BF16)
            for tokens in (8192, 32_768)
        ),
        Case(
            "zipf_8192x2048_e128_i768_k8",
            args(8192, 2048, 768, 128, 8, dtype=half, indices=zipf(128)),
            BENCH,
            BF16,
        ),
    ]


# calls whose weights have gradients of 8-bit numbers: name, sizes, tags, dtypes, more
IN_8_BITS: tuple[tuple[str, tuple, frozenset[str], tuple, dict], ...] = (
    ("exact", (5, 32, 16, 3, 2), TEST, ONCE, {"eight": torch.float64}),
    ("small", ((2, 5), 48, 32, 4, 2), SMALL, ONCE, {}),
    ("several_tiles", (66, 160, 80, 2, 2), SMALL, ONCE, {}),
    ("no_tokens", ((2, 0), 16, 16, 4, 2), SMALL, ONCE, {}),
    ("sentinels", (20, 32, 16, 3, 4), SMALL, ONCE, {"indices": with_sentinels(3)}),
    ("odd", (19, 21, 11, 5, 3), SMALL, ONCE, {}),
    ("gaps", (20, 32, 16, 3, 2), SMALL, ONCE, {"gaps": True}),
    ("many_gaps", (300, 256, 128, 4, 2), GPU, BF16, {"dtype": torch.bfloat16, "gaps": True}),
    ("whole_tiles", (256, 256, 128, 2, 2), COMPILE, BF16, {"dtype": torch.bfloat16}),
    ("odd_tiles", ((3, 331), 208, 112, 33, 5), GPU, BF16, {"dtype": torch.bfloat16}),
    ("qwen3", (1024, 2048, 768, 128, 8), GPU, BF16, {"dtype": torch.bfloat16}),
    ("8192x2048_e128_i768_k8", (8192, 2048, 768, 128, 8), BENCH, BF16, {"dtype": torch.bfloat16}),
)

CASES: dict[str, list[Case]] = {
    "experts_fp8": _cases(_forward, "bfloat16", {"eight": torch.float64}),
    "experts_vjp_fp8": [
        *_cases(_backward, torch.bfloat16, {"eight": torch.float64}),
        *(
            Case(f"{name}_in_8_bits", _backward(*sizes, all_in_8_bits=True, **how), tags, dtypes)
            for name, sizes, tags, dtypes, how in IN_8_BITS
        ),
        Case("x_alone", _backward(9, 32, 16, 3, 2, mask=[True, False, False, False]), TEST, ONCE),
        Case("weights_alone", _backward(9, 32, 16, 3, 2, mask=[False, True, True, False]), TEST, ONCE),
    ],
}


def _flops(gate_up8: Tensor, down8: Tensor, indices: Tensor) -> int:
    return 2 * indices.numel() * (gate_up8[0].numel() + down8[0].numel())


def _flops_vjp(gate_up8_t: Tensor, down8_t: Tensor, indices: Tensor, output_mask: Sequence[bool]) -> int:
    first, second = (2 * indices.numel() * t[0].numel() for t in (gate_up8_t, down8_t))
    return second * (1 + output_mask[2]) + first * (output_mask[0] + output_mask[1])


def _bytes(x8: Tensor, gate_up8: Tensor, down8: Tensor, indices: Tensor, weights: Tensor) -> int:
    pre = 2 * indices.numel() * gate_up8.shape[1]
    return 3 * x8.numel() + held(gate_up8, down8, indices, weights) + pre


def _bytes_vjp(
    dy: Tensor, dy8: Tensor, x: Tensor, pre: Tensor, gate_up8_t: Tensor, down8_t: Tensor, indices: Tensor,
    output_mask: Sequence[bool],
) -> int:  # fmt: skip
    grads = (output_mask[1] * gate_up8_t.numel() + output_mask[2] * down8_t.numel()) * dy.element_size()
    return held(dy, dy8, x, pre, gate_up8_t, down8_t, indices) + output_mask[0] * held(dy) + grads


flops = {"experts_fp8": _flops, "experts_vjp_fp8": _flops_vjp}
bytes_moved = {"experts_fp8": _bytes, "experts_vjp_fp8": _bytes_vjp}
