"""Example inputs of the gemm family, and what they must move and compute."""

from collections.abc import Sequence

import torch
from torch import Tensor

from tilesmith.engine import Case, T
from tilesmith.engine.case import BENCH, BF16, GPU, SMALL, TEST
from tilesmith.engine.inits import around_one, far_apart, unit_outputs
from tilesmith.engine.memory import held

FP32 = torch.float32
SMOOTH = ("gelu", "gelu_tanh", "silu")
LLAMA = ((4096, 14336), (14336, 4096), (4096, 4096), (4096, 6144))  # features, outputs of Llama 3 8B's projections


def _fused_projection(generator: torch.Generator, shape: Sequence[int], device: torch.device) -> Tensor:
    """The second half of the columns of a wider tensor, rows not packed."""
    wide = torch.randn(*shape[:-1], 2 * shape[-1], generator=generator, device=device)
    return wide[..., shape[-1] :]


def _linear(
    lead: tuple[int, ...] | int,
    features: int,
    outputs: int,
    *,
    bias: bool = True,
    frozen: bool = False,
    weight: torch.dtype | None = None,
    layout: str = "contiguous",
    weight_layout: str = "contiguous",
    **options: object,
) -> dict:
    """Arguments of a linear op. weight: its dtype, and bias's, where it is not x's."""
    shape = (lead,) if isinstance(lead, int) else lead
    args: dict = {"x": T(*shape, features, layout=layout)}
    args["weight"] = T(outputs, features, dtype=weight, grad=not frozen, init=unit_outputs, layout=weight_layout)
    if bias:
        args["bias"] = T(outputs, dtype=weight)
    return {**args, **options}


def _norm(kind: str, lead: tuple[int, ...] | int, features: int, outputs: int, **how: object) -> dict:
    """Arguments of norm_linear with everything that the kind of norm has."""
    args = {**_linear(lead, features, outputs, **how), "kind": kind}
    args["norm_weight"] = T(features, init=around_one)
    if kind == "layer":
        args["norm_bias"] = T(features)
    return args


def _shapes(**options: object) -> list[Case]:
    """Cases of linear and of the ops that have its arguments."""
    far = {"x": T(3, 40, init=far_apart), "weight": T(48, 40, init=unit_outputs)}
    return [
        Case("small", _linear((2, 5), 24, 17, **options), SMALL),
        Case("several_tiles", _linear(70, 72, 65, **options), SMALL),
        Case("no_bias", _linear(9, 16, 8, bias=False, **options), SMALL),
        Case("one_row", _linear((), 16, 24, **options), SMALL),
        Case("one_feature", _linear(5, 1, 7, **options), SMALL),
        Case("one_output", _linear(7, 33, 1, **options), SMALL),
        Case("no_rows", _linear((2, 0), 16, 8, **options), SMALL),
        Case("no_outputs", _linear(3, 16, 0, **options), SMALL),
        Case("no_features", _linear(3, 0, 5, **options), SMALL),
        Case("strided", _linear((2, 3), 16, 9, layout="strided", weight_layout="strided", **options), SMALL),
        Case("transposed", _linear(6, 16, 9, layout="transposed", weight_layout="transposed", **options), SMALL),
        Case("part_of_a_projection", _linear(6, 16, 9, **options) | {"x": T(6, 16, init=_fused_projection)}, SMALL),
        Case("fp32_weight", _linear(12, 24, 17, weight=FP32, **options), TEST),
        Case("bf16_weight", _linear(12, 24, 17, weight=torch.bfloat16, **options), TEST, (torch.float16, *BF16)),
        Case("frozen_weight", _linear(12, 24, 17, frozen=True, **options), SMALL),
        Case("llama_mlp", _linear(300, 4096, 14336, bias=False, **options), GPU, BF16),
        Case("odd", _linear((3, 67), 1001, 515, **options), GPU),
        Case("odd_by_eight", _linear((3, 67), 1000, 520, **options), GPU),
        Case("one_token", _linear((1, 1), 4096, 6144, **options), GPU, BF16),
        Case("far_apart", {**far, **options}, GPU, BF16),
        Case("int64_offsets", _linear(2**17 + 1, 16, 16_392, **options), GPU, BF16),
    ]


def _bench(**options: object) -> list[Case]:
    return [
        Case(f"8192x{features}_to_{outputs}", _linear(8192, features, outputs, **options), BENCH, BF16)
        for features, outputs in LLAMA
    ]


def _activations() -> list[Case]:
    """Each activation, with and without a bias."""
    return [
        case
        for name in (*SMOOTH, "relu", "relu_squared", "none")
        for case in (
            Case(name, _linear(10, 24, 17, activation=name), SMALL),
            Case(f"{name}_no_bias", _linear(10, 24, 16, bias=False, activation=name), TEST),
            Case(f"{name}_large", _linear((3, 67), 512, 1024, activation=name), GPU),
        )
    ]


def _bench_activations(names: Sequence[str]) -> list[Case]:
    return [
        Case(f"{name}_8192x{features}_to_{outputs}", _linear(8192, features, outputs, activation=name), BENCH, BF16)
        for name in names
        for features, outputs in LLAMA[:1] + ((4096, 16384),)
    ]


def _product(a: T, b: T) -> dict:
    return {"a": a, "b": b}


CASES: dict[str, list[Case]] = {
    "matmul": [
        Case("small", _product(T(2, 5, 24), T(24, 17)), SMALL),
        Case("several_tiles", _product(T(70, 72), T(72, 65)), SMALL),
        Case("vector", _product(T(24), T(24, 8)), SMALL),
        Case("deep", _product(T(2, 1, 3, 4, 16), T(16, 8)), SMALL),
        Case("one_feature", _product(T(5, 1), T(1, 7)), SMALL),
        Case("one_output", _product(T(5, 33), T(33, 1)), SMALL),
        Case("no_rows", _product(T(0, 16), T(16, 8)), SMALL),
        Case("no_features", _product(T(3, 0), T(0, 5)), SMALL),
        Case("no_outputs", _product(T(3, 16), T(16, 0)), SMALL),
        Case("strided", _product(T(2, 3, 16, layout="strided"), T(16, 9, layout="strided")), SMALL),
        Case("transposed", _product(T(6, 16, layout="transposed"), T(16, 9, layout="transposed")), SMALL),
        Case("frozen", _product(T(6, 16), T(16, 9, grad=False)), SMALL),
        Case("odd", _product(T(201, 1001), T(1001, 515)), GPU),
        Case("odd_by_eight", _product(T(201, 1000), T(1000, 520)), GPU),
        Case("far_apart", _product(T(3, 40, init=far_apart), T(40, 48)), GPU, BF16),
        *(
            Case(f"bench_{size}", _product(T(size, size), T(size, size)), BENCH, BF16)
            for size in (512, 1024, 2048, 4096, 8192)
        ),
    ],
    "linear": [*_shapes(), *_bench(bias=False), Case("bias_8192x4096_to_6144", _linear(8192, 4096, 6144), BENCH, BF16)],
    "linear_act": [
        *_shapes(activation="gelu"),
        *_activations(),
        Case("recomputed", _linear(10, 24, 17, activation="gelu_tanh", keep_pre=False), SMALL),
        Case("kept", _linear(10, 24, 17, activation="silu", keep_pre=True), SMALL),
        *_bench_activations(("gelu", "gelu_tanh", "relu", "silu", "relu_squared")),
    ],
    "norm_linear": [
        *(
            case
            for kind in ("rms", "layer")
            for case in (
                Case(kind, _norm(kind, (2, 5), 24, 17), SMALL),
                Case(f"{kind}_several_tiles", _norm(kind, 70, 72, 65), SMALL),
                Case(f"{kind}_plain", _linear(9, 16, 8, bias=False, kind=kind), SMALL),
                Case(f"{kind}_one_row", _norm(kind, (), 16, 24), SMALL),
                Case(f"{kind}_no_rows", _norm(kind, (2, 0), 16, 8), SMALL),
                Case(f"{kind}_no_outputs", _norm(kind, 3, 16, 0), SMALL),
                Case(f"{kind}_strided", _norm(kind, (2, 3), 16, 9, layout="strided", weight_layout="strided"), SMALL),
                Case(f"{kind}_transposed", _norm(kind, 6, 16, 9, layout="transposed"), SMALL),
                Case(f"{kind}_fp32_weight", _norm(kind, 12, 24, 17, weight=FP32), TEST),
                Case(f"{kind}_frozen", _norm(kind, 12, 24, 17, frozen=True), SMALL),
                Case(f"{kind}_odd", _norm(kind, (3, 67), 1001, 515), GPU),
                Case(f"{kind}_one_token", _norm(kind, (1, 1), 4096, 6144), GPU, BF16),
                Case(f"{kind}_8192x4096_to_6144", _norm(kind, 8192, 4096, 6144, bias=False), BENCH, BF16),
            )
        ),
        Case("rms_one_feature", _norm("rms", 5, 1, 7) | {"eps": 0.1}, SMALL),
        Case("rms_offset", _norm("rms", 7, 24, 17) | {"offset": 1.0, "norm_weight": T(24)}, SMALL),
        Case(
            "layer_far_mean",
            _norm("layer", 7, 24, 17) | {"x": T(7, 24, init=lambda g, s, d: 30 + unit_outputs(g, s, d))},
            TEST,
        ),
        Case("rms_8192x4096_to_14336", _norm("rms", 8192, 4096, 14336, bias=False), BENCH, BF16),
    ],
    "memory_efficient_linear": [
        *_shapes(activation="gelu", chunk_rows=4),
        *(
            Case(f"{name}_in_chunks", _linear(10, 24, 17, activation=name, chunk_rows=3), SMALL)
            for name in (*SMOOTH, "relu", "relu_squared", "none")
        ),
        Case("plain", _linear(10, 24, 17), SMALL),
        Case("one_chunk", _linear(10, 24, 17, activation="silu"), SMALL),
        Case("fp32_weight_in_chunks", _linear(12, 24, 17, weight=FP32, activation="silu", chunk_rows=5), TEST),
        Case("many_chunks", _linear((3, 700), 512, 1024, activation="gelu", chunk_rows=256), GPU),
        *(
            Case(
                f"gelu_8192x4096_to_14336_by_{rows}",
                _linear(8192, 4096, 14336, activation="gelu", chunk_rows=rows),
                BENCH,
                BF16,
            )
            for rows in (1024, 2048, 0)
        ),
    ],
}


def _shared(generator: torch.Generator, shape: Sequence[int], device: torch.device) -> Tensor:
    """One row, seen as many."""
    return torch.randn(shape[-1], generator=generator, device=device).expand(*shape)


CASES["column_sums"] = [
    Case("small", {"x": T(6, 33)}, SMALL),
    Case("three_dims", {"x": T(2, 5, 24)}, SMALL),
    Case("one_dim", {"x": T(40)}, SMALL),
    Case("one_column", {"x": T(70, 1)}, SMALL),
    Case("strips", {"x": T(700, 40)}, SMALL),
    Case("many_blocks", {"x": T(70, 1028)}, SMALL),
    Case("strided", {"x": T(150, 40, layout="strided")}, SMALL),
    Case("transposed", {"x": T(9, 12, layout="transposed")}, SMALL),
    Case("part_of_a_projection", {"x": T(6, 16, init=_fused_projection)}, SMALL),
    Case("no_rows", {"x": T(0, 16)}, SMALL),
    Case("no_columns", {"x": T(4, 0)}, SMALL),
    Case("to_fp32", {"x": T(30, 24), "dtype": "float32"}, SMALL),
    Case("to_bf16", {"x": T(300, 24), "dtype": "bfloat16"}, SMALL),
    Case("to_fp64", {"x": T(30, 24), "dtype": "float64"}, TEST),
    Case("one_row_repeated", {"x": T(64, 40, init=_shared)}, TEST),
    Case("far_apart", {"x": T(3, 40, init=far_apart)}, GPU, BF16),
    Case("tall", {"x": T(2**20, 64)}, GPU, BF16),
    *(
        Case(f"{rows}x{columns}", {"x": T(rows, columns)}, BENCH, BF16)
        for rows, columns in ((16_384, 1024), (16_384, 4096), (12_608, 1024), (16_384, 3072), (8192, 50_304))
    ),
]


def _lora(
    lead: tuple[int, ...] | int, features: int, outputs: int, rank: int, *,
    factors: torch.dtype | None = FP32, bias: bool = False, frozen: bool = True, layout: str = "contiguous",
    scale: float = 2.0,
) -> dict:  # fmt: skip
    """Arguments of lora_linear. factors: their dtype; None for x's."""
    return {
        **_linear(lead, features, outputs, bias=bias, frozen=frozen, layout=layout, weight_layout=layout),
        "lora_a": T(rank, features, dtype=factors, init=unit_outputs, layout=layout),
        "lora_b": T(outputs, rank, dtype=factors, init=unit_outputs, layout=layout),
        "scale": scale,
    }


CASES["lora_linear"] = [
    Case("small", _lora((2, 5), 24, 17, 4), SMALL),
    Case("several_tiles", _lora(150, 600, 200, 16), SMALL),
    Case("several_parts", _lora(20, 1100, 40, 16), SMALL),
    Case("factors_of_x", _lora(12, 40, 24, 8, factors=None), SMALL),
    Case("fp16_factors", _lora(12, 40, 24, 8, factors=torch.float16), TEST),
    Case("rank_40", _lora(9, 70, 33, 40), SMALL),
    Case("rank_1", _lora(9, 33, 20, 1), SMALL),
    Case("rank_100", _lora(40, 64, 64, 100), TEST),
    Case("rank_300", _lora(5, 16, 16, 300), TEST),
    Case("no_rank", _lora(5, 16, 8, 0), TEST),
    Case("one_row", _lora((), 40, 24, 8), SMALL),
    Case("no_rows", _lora((2, 0), 16, 8, 4), SMALL),
    Case("no_features", _lora(3, 0, 5, 4), SMALL),
    Case("no_outputs", _lora(3, 16, 0, 4), SMALL),
    Case("strided", _lora((2, 3), 24, 17, 4, layout="strided"), SMALL),
    Case("transposed", _lora(6, 24, 17, 5, layout="transposed"), SMALL),
    Case("trained_weight", _lora(12, 24, 17, 4, bias=True, frozen=False), SMALL),
    Case("strips", _lora(1100, 24, 17, 4, bias=True), SMALL),
    Case("no_weight", _lora((2, 50), 40, 70, 8) | {"weight": None}, SMALL),
    Case("no_weight_no_features", _lora(3, 0, 5, 4) | {"weight": None}, TEST),
    Case("no_weight_odd", _lora((3, 67), 1001, 515, 13) | {"weight": None}, GPU),
    Case("odd", _lora((3, 67), 1001, 515, 13), GPU),
    Case("many_parts", _lora(3, 14_336, 64, 16), GPU),
    Case("rank_256", _lora((3, 67), 1000, 520, 256), GPU),
    Case("one_token", _lora((1, 1), 4096, 6144, 16), GPU, BF16),
    Case("far_apart", _lora(3, 40, 48, 16) | {"x": T(3, 40, init=far_apart)}, GPU, BF16),
    Case("int64_offsets", _lora(2**17 + 1, 16, 16_392, 8), GPU, BF16),
    *(
        Case(f"{rows}x{features}_to_{outputs}_rank_{rank}", _lora(rows, features, outputs, rank), BENCH, BF16)
        for features, outputs in ((2048, 8192), (4096, 14_336))
        for rows, rank in ((512, 16), (2048, 16), (8192, 16), (8192, 64))
    ),
]


def _rows(x: Tensor) -> int:
    return x.numel() // max(1, x.shape[-1])


def _flops(x: Tensor, weight: Tensor) -> int:
    return 2 * _rows(x) * weight.numel()


def _flops_vjp(x: Tensor, weight: Tensor, output_mask: Sequence[bool]) -> int:
    return _flops(x, weight) * (output_mask[0] + output_mask[1])


def _flops_recomputed(x: Tensor, weight: Tensor, activation: str, output_mask: Sequence[bool]) -> int:
    return _flops_vjp(x, weight, output_mask) + (_flops(x, weight) if activation != "none" else 0)


def _bytes_linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> int:
    return held(x, weight, bias) + _rows(x) * weight.shape[0] * x.element_size()


def _bytes_vjp(dy: Tensor, x: Tensor, weight: Tensor, output_mask: Sequence[bool]) -> int:
    reads = held(dy) + held(weight) * output_mask[0] + held(x) * output_mask[1]
    return reads + held(x) * output_mask[0] + held(weight) * output_mask[1]


def _size_of(*tensors: Tensor | None) -> int:
    return sum(t.numel() for t in tensors if t is not None)


def _bytes_lora(x: Tensor, weight: Tensor | None, lora_a: Tensor, lora_b: Tensor) -> int:
    outputs = _rows(x) * lora_b.shape[0] * x.element_size()
    return held(x, weight, lora_a, lora_b) + outputs + 4 * _rows(x) * lora_a.shape[0]


flops = {
    "lora_linear": lambda x, weight, lora_a, lora_b: 2 * _rows(x) * _size_of(weight, lora_a, lora_b),
    "lora_linear_vjp": lambda x, weight, lora_a, lora_b, output_mask: (
        2 * _rows(x) * (_size_of(weight) * (output_mask[0] + output_mask[1]) + 2 * _size_of(lora_a, lora_b))
    ),
    "matmul": lambda a, b: 2 * _rows(a) * b.numel(),
    "matmul_vjp": lambda a, b, output_mask: 2 * _rows(a) * b.numel() * sum(output_mask),
    "linear": _flops,
    "linear_vjp": _flops_vjp,
    "linear_act": _flops,
    "linear_act_vjp": _flops_vjp,
    "norm_linear": _flops,
    "norm_linear_vjp": _flops_vjp,
    "memory_efficient_linear": _flops,
    "memory_efficient_linear_vjp": _flops_recomputed,
}

bytes_moved = {
    "lora_linear": _bytes_lora,
    "lora_linear_vjp": lambda x, weight, lora_a, lora_b, output_mask: (
        _bytes_lora(x, weight, lora_a, lora_b) + held(x, lora_a, lora_b) + held(weight) * output_mask[1]
    ),
    "column_sums": lambda x: held(x),
    "matmul": lambda a, b: held(a, b) + _rows(a) * b.shape[1] * a.element_size(),
    "matmul_vjp": lambda dy, a, b, output_mask: held(dy) + sum(2 * held(t) for t, w in zip((a, b), output_mask) if w),
    "linear": _bytes_linear,
    "linear_vjp": _bytes_vjp,
    "linear_act": _bytes_linear,
    "linear_act_vjp": lambda dy, x, weight, output_mask: _bytes_vjp(dy, x, weight, output_mask) + held(dy),
    "norm_linear": _bytes_linear,
    "norm_linear_vjp": _bytes_vjp,
    "memory_efficient_linear": _bytes_linear,
    "memory_efficient_linear_vjp": _bytes_vjp,
}
