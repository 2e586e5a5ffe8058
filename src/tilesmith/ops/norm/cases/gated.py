"""Example inputs of the gated norm."""

import torch
from torch import Tensor

from tilesmith.engine import Case, T
from tilesmith.engine.case import BENCH, FP32, GPU, HALF, SMALL
from tilesmith.engine.inits import around_one, far_rows


def _gated(*shape: int, layout: str = "contiguous", **options: object) -> dict:
    tensors = {name: T(*shape, layout=layout) for name in ("x", "gate")}
    return {**tensors, "weight": T(shape[-1], init=around_one), **options}


def _heads(*shape: int) -> dict:
    """What Qwen3-Next gives: a row for each token and head."""
    return _gated(*shape, casting="llama")


CASES: dict[str, list[Case]] = {
    "rms_norm_gated": [
        Case("small", _gated(6, 33), SMALL),
        Case("three_dims", _gated(2, 3, 64), SMALL),
        Case("one_dim", _gated(40), SMALL),
        Case("one_column", _gated(7, 1), SMALL),
        Case("many_rows", _gated(150, 40), SMALL),
        Case("llama", _gated(6, 40, casting="llama"), SMALL),
        Case(
            "llama_fp32_weight", {**_gated(6, 40, casting="llama"), "weight": T(40, dtype=torch.float32)}, SMALL, HALF
        ),
        Case("sigmoid", _gated(6, 40, activation="sigmoid"), SMALL),
        Case("groups", _gated(3, 5, 48, groups=3), SMALL),
        Case("gate_first", _gated(6, 33, gate_first=True), SMALL),
        Case("mamba", _gated(3, 5, 48, casting="llama", gate_first=True, groups=2), SMALL),
        Case("mamba_strided", _gated(5, 40, layout="strided", gate_first=True, groups=4), SMALL),
        Case("gate_first_sigmoid_no_weight", _gated(6, 40, weight=None, gate_first=True, activation="sigmoid"), SMALL),
        Case("bf16_gate", {**_gated(6, 40, gate_first=True), "gate": T(6, 40, dtype=torch.bfloat16)}, SMALL, FP32),
        Case("no_weight", _gated(6, 40, weight=None), SMALL),
        Case("frozen_weight", {**_gated(5, 40), "weight": T(40, grad=False)}, SMALL),
        Case("frozen_gate", {**_gated(5, 40), "gate": T(5, 40, grad=False)}, SMALL),
        Case("frozen_x", {**_gated(5, 40), "x": T(5, 40, grad=False)}, SMALL),
        Case("eps", _gated(6, 40, eps=0.5), SMALL),
        Case("strided", _gated(5, 40, layout="strided"), SMALL),
        Case("transposed", _gated(9, 12, layout="transposed"), SMALL),
        Case("4097_columns", _gated(3, 4097), SMALL),
        Case("beyond_registers", _gated(2, 9000), frozenset({"test"})),
        Case("no_rows", _gated(0, 16), SMALL),
        Case("far", {**_gated(2, 1024, gate_first=True), "x": T(2, 1024, init=far_rows)}, GPU, (torch.bfloat16,)),
        Case("far_gate", {**_gated(2, 1024), "gate": T(2, 1024, init=far_rows)}, GPU, (torch.bfloat16,)),
        Case("heads_8192x32x128", _heads(8192, 32, 128), BENCH),
        Case("rows_16384x4096", _gated(16_384, 4096), BENCH),
        Case("mamba_16384x8x1024", _gated(16_384, 8192, casting="llama", gate_first=True, groups=8), BENCH),
    ]
}


def _bytes(x: Tensor, **_: object) -> int:
    return 3 * x.numel() * x.element_size()


def _bytes_vjp(x: Tensor, **_: object) -> int:
    return 5 * x.numel() * x.element_size() + 4 * (x.numel() // x.shape[-1])


bytes_moved = {"rms_norm_gated": _bytes, "rms_norm_gated_vjp": _bytes_vjp}
