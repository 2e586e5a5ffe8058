"""Example inputs of the distances between distributions, and what they must move and compute."""

import itertools
from collections.abc import Sequence

import torch
from torch import Tensor

from tilesmith.engine import Case, T
from tilesmith.engine.case import BENCH, BF16, GPU, HALF, SMALL, Init
from tilesmith.engine.inits import labels, log_probs, unit_outputs
from tilesmith.engine.memory import held
from tilesmith.ops.loss.cases.cross_entropy import bytes_linear_vjp


def _probs(generator: torch.Generator, shape: Sequence[int], device: torch.device) -> Tensor:
    return log_probs(generator, shape, device).exp()


def _impossible(generator: torch.Generator, shape: Sequence[int], device: torch.device) -> Tensor:
    """Log-probabilities, every third of them −∞."""
    values = log_probs(generator, shape, device)
    values[..., ::3] = float("-inf")
    return values


def _sparse(generator: torch.Generator, shape: Sequence[int], device: torch.device) -> Tensor:
    """Probabilities, every third of them 0."""
    return _impossible(generator, shape, device).exp()


def _pair(
    *shape: int,
    x: Init = log_probs,
    target: Init = log_probs,
    both: bool = False,
    only_target: bool = False,
    every: int | None = None,
    dtype: torch.dtype | None = None,
    layout: str = "contiguous",
    **options: object,
) -> dict:
    """Arguments of the distances of two given distributions. every: with labels, each so-many-th ignored; 0: none."""
    args: dict = {
        "x": T(*shape, grad=not only_target, init=x, layout=layout),
        "target": T(*shape, dtype=dtype, grad=both or only_target, init=target, layout=layout),
    }
    if every is not None:
        args["labels"] = T(*shape[:-1], dtype=torch.int64, init=labels(shape[-1], every))
    return {**args, **options}


def _common(log: bool, **options: object) -> list[Case]:
    """Cases that each of the three has, for logarithms or probabilities."""
    init = log_probs if log else _probs

    def pair(*shape: int, **more: object) -> dict:
        return _pair(*shape, **{"x": init, "target": init, **options, **more})

    return [
        *(
            Case(reduction, pair(2, 3, 40, reduction=reduction), SMALL)
            for reduction in ("batchmean", "mean", "sum", "none")
        ),
        Case("both", pair(5, 40, both=True), SMALL),
        Case("only_target", pair(5, 40, only_target=True), SMALL),
        Case("one_class", pair(6, 1), SMALL),
        Case("odd", pair(5, 257, both=True), SMALL),
        Case("wide", pair(2, 9001, both=True), SMALL),
        Case("no_rows", pair(0, 40, reduction="sum"), SMALL),
        Case("no_rows_none", pair(0, 40, reduction="none"), SMALL),
        Case("one_row", pair(40, reduction="sum"), SMALL),
        Case("strided", pair(3, 4, 40, layout="strided", both=True), SMALL),
        Case("transposed", pair(6, 40, layout="transposed", reduction="none"), SMALL),
        Case("target_fp32", pair(5, 40, dtype=torch.float32, both=True), SMALL, HALF),
    ]


def _labelled(log: bool) -> list[Case]:
    init = {"x": log_probs, "target": log_probs} if log else {"x": _probs, "target": _probs}
    return [
        Case("labels", _pair(9, 40, every=3, both=True, **init), SMALL),
        Case("labels_mean", _pair(2, 5, 40, every=3, reduction="mean", **init), SMALL),
        Case("labels_none", _pair(9, 40, every=3, reduction="none", **init), SMALL),
        Case("labels_sum", _pair(9, 40, every=0, reduction="sum", **init), SMALL),
        Case("all_ignored", _pair(5, 40, every=1, **init), SMALL),
    ]


def _large(log: bool, **options: object) -> list[Case]:
    init = {"x": log_probs, "target": log_probs} if log else {"x": _probs, "target": _probs}
    return [
        Case("llama3", _pair(300, 128_256, **init, **options), GPU, BF16),
        Case("gemma", _pair(4, 262_147, **init, **options), GPU, BF16),
        Case("int64_offsets", _pair(16_800, 128_256, **init, **options), GPU, BF16),
        Case("bench_32k", _pair(8192, 32_000, **init, **options), BENCH, BF16),
        Case("bench_128k", _pair(4096, 128_256, **init, **options), BENCH, BF16),
    ]


def _linear(
    tokens: tuple[int, ...] | int,
    hidden: int,
    classes: int,
    *,
    teacher: int | None = 24,
    every: int | None = 5,
    bias: bool = False,
    frozen: bool = False,
    x_grad: bool = True,
    weight: torch.dtype | None = None,
    layout: str = "contiguous",
    probs: Init | None = None,
    **options: object,
) -> dict:
    """Arguments of linear_distillation. teacher: its hidden size; None: its logits are given, or with probs these."""
    shape = (tokens,) if isinstance(tokens, int) else tokens
    args: dict = {
        "x": T(*shape, hidden, grad=x_grad, layout=layout),
        "weight": T(classes, hidden, dtype=weight, grad=not frozen, init=unit_outputs, layout=layout),
        "teacher": T(*shape, teacher or classes, grad=False, layout=layout, init=probs or "normal"),
    }
    if teacher:
        args["teacher_weight"] = T(classes, teacher, grad=False, init=unit_outputs, layout=layout)
    if every is not None:
        args["target"] = T(*shape, dtype=torch.int64, init=labels(classes, every))
    if bias:
        args["bias"] = T(classes, dtype=weight, init=unit_outputs)
        args["teacher_bias"] = T(classes, grad=False, init=unit_outputs) if teacher else None
    if probs:
        args["teacher_probs"] = True
    return {**args, **options}


MIXED = {"temperature": 1.7, "soft_weight": 0.6, "hard_weight": 0.4}

CASES: dict[str, list[Case]] = {
    "kl_div": [
        *_common(True, log_target=True),
        Case("default", _pair(5, 40, target=_probs, both=True), SMALL),
        Case("probabilities", _pair(5, 40, target=_probs, both=True, reduction="batchmean"), SMALL),
        Case("probabilities_none", _pair(5, 257, target=_probs, reduction="none"), SMALL),
        Case("sparse", _pair(5, 40, target=_sparse, reduction="sum"), SMALL),
        Case("sparse_both", _pair(5, 40, target=_sparse, both=True, eps=1e-6, reduction="sum"), SMALL),
        Case("sparse_exact", _pair(5, 40, target=_sparse, eps=0.0, reduction="sum"), SMALL),
        Case("sparse_masked", _pair(5, 40, x=_impossible, target=_sparse, reduction="batchmean"), SMALL),
        Case("impossible", _pair(5, 40, target=_impossible, log_target=True, reduction="sum"), SMALL),
        *_large(True, log_target=True, reduction="batchmean"),
    ],
    "jsd": [
        *_common(True),
        *_labelled(True),
        Case("beta", _pair(5, 40, both=True, beta=0.1), SMALL),
        Case("forward", _pair(5, 40, both=True, beta=0.0), SMALL),
        Case("reverse", _pair(5, 40, both=True, beta=1.0), SMALL),
        Case("impossible", _pair(5, 40, target=_impossible, beta=0.3), SMALL),
        Case("impossible_both", _pair(5, 40, x=_impossible, target=_impossible, both=True), SMALL),
        *_large(True),
    ],
    "tvd": [*_common(False), *_labelled(False), *_large(False)],
    "linear_distillation": [
        Case("plain", _linear((2, 5), 16, 40), SMALL),
        *(
            Case(kind, _linear(7, 16, 40, divergence=kind, **MIXED), SMALL)
            for kind in ("kl", "reverse_kl", "jsd", "tvd")
        ),
        *(Case(f"{kind}_cold", _linear(7, 16, 40, divergence=kind), SMALL) for kind in ("kl", "reverse_kl", "tvd")),
        Case("beta", _linear(7, 16, 40, beta=0.2, **MIXED), SMALL),
        # a loss of 7 rows was within its budget or 10 % above it by how a CPU rounds the reference
        Case("beta_ends", _linear(23, 16, 40, beta=1.0), SMALL),
        Case("hard_cold", _linear(7, 16, 40, hard_weight=0.5), SMALL),
        Case("hard_only", _linear(7, 16, 40, soft_weight=0.0, hard_weight=1.0), SMALL),
        Case("no_labels", _linear(7, 16, 40, every=None, temperature=2.0), SMALL),
        Case("logits", _linear(7, 16, 40, teacher=None, chunk_tokens=3, **MIXED), SMALL),
        Case("probs", _linear(7, 16, 40, teacher=None, probs=_probs, divergence="kl", **MIXED), SMALL),
        Case("probs_jsd", _linear(7, 16, 40, teacher=None, probs=_sparse, chunk_tokens=3), SMALL),
        Case("probs_sparse", _linear(7, 16, 40, teacher=None, probs=_sparse, divergence="kl", every=None), SMALL),
        Case("chunks", _linear(11, 16, 40, chunk_tokens=4, bias=True, **MIXED), SMALL),
        Case("chunks_fp32", _linear(11, 16, 40, chunk_tokens=4, accumulate_fp32=True), SMALL),
        Case("odd", _linear(7, 13, 257, bias=True, **MIXED), SMALL),
        Case("swept", _linear(3, 8, 4101, chunk_tokens=2, **MIXED), SMALL),
        Case("one_token", _linear((), 96, 40, every=0), SMALL),
        Case("no_tokens", _linear(0, 16, 40, bias=True), SMALL),
        Case("all_ignored", _linear(6, 16, 40, every=1, chunk_tokens=4), SMALL),
        Case("frozen", _linear(7, 16, 40, frozen=True), SMALL),
        Case("weight_only", _linear(7, 16, 40, x_grad=False, chunk_tokens=4), SMALL),
        Case("loss_only", _linear(7, 16, 40, x_grad=False, frozen=True), SMALL),
        Case("strided", _linear((2, 5), 16, 40, layout="strided", chunk_tokens=4), SMALL),
        Case("transposed", _linear((2, 5), 16, 40, layout="transposed"), SMALL),
        Case("weight_fp32", _linear(9, 16, 40, weight=torch.float32, bias=True, chunk_tokens=4), SMALL, BF16),
        Case("llama3", _linear(700, 512, 128_256, chunk_tokens=300, **MIXED), GPU, BF16),
        Case("bench_4k_128k", _linear(4096, 4096, 128_256, teacher=4096, every=0), BENCH, BF16),
        Case("bench_8k_32k", _linear(8192, 2048, 32_000, teacher=4096, every=0, **MIXED), BENCH, BF16),
    ],
}


def _bytes(x: Tensor, target: Tensor, reduction: str = "", **_: object) -> int:
    """Both distributions read; for "none" the elements written."""
    return held(x, target) + (4 * x.numel() if reduction == "none" else 0)


def _bytes_vjp(x: Tensor, target: Tensor, output_mask: Sequence[bool], **_: object) -> int:
    """Both distributions read, the gradients written."""
    return sum(t.numel() * t.element_size() * (2 if wanted else 1) for t, wanted in zip((x, target), output_mask))


def _bytes_tvd_vjp(x: Tensor, target: Tensor, output_mask: Sequence[bool], **_: object) -> int:
    """Two bits an element read, the gradients written."""
    return x.numel() // 4 + held(*itertools.compress((x, target), output_mask))


def _bytes_kl_vjp(x: Tensor, target: Tensor, output_mask: Sequence[bool], **_: object) -> int:
    """As the others, but x is read only for the target's gradient."""
    return _bytes_vjp(x, target, output_mask) - (0 if output_mask[1] else x.numel() * x.element_size())


def _bytes_linear(x: Tensor, weight: Tensor, teacher: Tensor, teacher_weight: Tensor | None = None, **_: object) -> int:
    """Inputs read, the gradients that autograd will ask for written. Logits need not move."""
    given = (x, weight, teacher) if teacher_weight is None else (x, weight, teacher, teacher_weight)
    return sum(t.numel() * t.element_size() * (2 if t.requires_grad else 1) for t in given)


def _flops_linear(x: Tensor, weight: Tensor, teacher: Tensor, teacher_weight: Tensor | None = None, **_: object) -> int:
    """Both logits, and the gradients that autograd will ask for."""
    student = 2 * x.numel() * weight.shape[0] * (1 + x.requires_grad + weight.requires_grad)
    return student + (0 if teacher_weight is None else 2 * teacher.numel() * weight.shape[0])


bytes_moved = {
    "kl_div": _bytes,
    "kl_div_vjp": _bytes_kl_vjp,
    "jsd": _bytes,
    "jsd_vjp": _bytes_vjp,
    "tvd": _bytes,
    "tvd_vjp": _bytes_tvd_vjp,
    "linear_distillation": _bytes_linear,
    "linear_distillation_vjp": bytes_linear_vjp,
}
# the backward only scales what was saved
flops = {"linear_distillation": _flops_linear, "linear_distillation_vjp": lambda: 0}
