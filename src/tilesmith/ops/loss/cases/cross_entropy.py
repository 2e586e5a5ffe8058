"""Example inputs of the cross-entropies, and what they must move and compute."""

import itertools
from collections.abc import Sequence

import torch
from torch import Tensor

from tilesmith.engine import Case, T
from tilesmith.engine.case import BENCH, BF16, GPU, HALF, SMALL
from tilesmith.engine.inits import far_apart, labels, unit_outputs
from tilesmith.engine.memory import held

PARTS = frozenset({"test", "compile"})
AGAIN = BENCH - {"tune"}
WIDE = (torch.float32, torch.bfloat16)


def _uniform(generator: torch.Generator, shape: Sequence[int], device: torch.device) -> Tensor:
    return torch.rand(tuple(shape), generator=generator, device=device) + 0.5


def _steep(generator: torch.Generator, shape: Sequence[int], device: torch.device) -> Tensor:
    """Rows of unit size, but every third has one large feature: logits that are far apart, and exact in any dtype."""
    rows = torch.randn(tuple(shape), generator=generator, device=device)
    rows[::3] = 0
    rows[::3, shape[-1] // 2] = 1024
    return rows


def _logits(
    *shape: int,
    every: int = 5,
    target: torch.dtype = torch.int64,
    weight: torch.dtype | None = None,
    weighted: bool = False,
    layout: str = "contiguous",
    **options: object,
) -> dict:
    """Arguments of cross_entropy for logits of `shape`."""
    ignored = options.get("ignore_index", -100)
    args: dict = {"logits": T(*shape, layout=layout)}
    args["target"] = T(*shape[:-1], dtype=target, init=labels(shape[-1], every, ignored))
    if weighted:
        args["weight"] = T(shape[-1], dtype=weight, grad=False, init=_uniform)
    return {**args, **options}


def _linear(
    tokens: tuple[int, ...] | int,
    hidden: int,
    classes: int,
    *,
    every: int = 5,
    target: torch.dtype = torch.int64,
    weight: torch.dtype | None = None,
    frozen: bool = False,
    x_grad: bool = True,
    bias: bool = False,
    weighted: bool = False,
    layout: str = "contiguous",
    **options: object,
) -> dict:
    """Arguments of linear_cross_entropy. weight: its dtype, and bias's, where it is not x's."""
    shape = (tokens,) if isinstance(tokens, int) else tokens
    args: dict = {"x": T(*shape, hidden, grad=x_grad, layout=layout)}
    args["weight"] = T(classes, hidden, dtype=weight, grad=not frozen, init=unit_outputs, layout=layout)
    args["target"] = T(*shape, dtype=target, init=labels(classes, every, options.get("ignore_index", -100)))
    if bias:
        args["bias"] = T(classes, dtype=weight, init=unit_outputs)
    if weighted:
        args["class_weight"] = T(classes, dtype=torch.float32, grad=False, init=_uniform)
    return {**args, **options}


EVERYTHING = {"weighted": True, "label_smoothing": 0.1, "z_loss": 1e-2, "scale": 0.7, "softcap": 5.0}

CASES: dict[str, list[Case]] = {
    "cross_entropy": [
        Case("plain", _logits(2, 3, 40), SMALL),
        Case("sum", _logits(2, 3, 40, reduction="sum"), SMALL),
        Case("none", _logits(2, 3, 40, reduction="none"), SMALL),
        Case("one_class", _logits(6, 1), SMALL),
        Case("seven_classes", _logits(33, 7), SMALL),
        Case("odd_classes", _logits(5, 257), SMALL),
        Case("swept", _logits(3, 4104), SMALL),
        Case("swept_odd", _logits(3, 4101, **EVERYTHING), SMALL),
        Case("one_token", _logits(40, every=0), SMALL),
        Case("no_tokens", _logits(0, 40), SMALL),
        Case("no_tokens_sum", _logits(0, 40, reduction="sum"), SMALL),
        Case("no_tokens_none", _logits(0, 40, reduction="none"), SMALL),
        Case("all_ignored", _logits(5, 40, every=1), SMALL),
        Case("all_ignored_sum", _logits(5, 40, every=1, reduction="sum", z_loss=1e-2), SMALL),
        Case("ignores_a_class", _logits(9, 7, every=0, ignore_index=3), SMALL),
        Case("int32", _logits(6, 40, target=torch.int32), SMALL),
        Case("smoothing", _logits(6, 40, label_smoothing=0.2), SMALL),
        Case("smoothing_only", _logits(6, 40, label_smoothing=1.0), SMALL),
        Case("z_loss", _logits(6, 40, z_loss=1e-2), SMALL),
        Case("scale", _logits(6, 40, scale=-0.5), SMALL),
        Case("softcap", _logits(6, 40, softcap=2.0), SMALL),
        Case("weighted", _logits(6, 40, weighted=True), SMALL),
        Case("weighted_fp32", _logits(6, 40, weighted=True, weight=torch.float32), SMALL),
        Case("weighted_smoothing", _logits(6, 40, weighted=True, label_smoothing=0.2), SMALL),
        Case("everything", _logits(6, 40, **EVERYTHING), SMALL),
        Case("everything_sum", _logits(6, 40, reduction="sum", **EVERYTHING), SMALL),
        Case("everything_none", _logits(6, 40, reduction="none", **EVERYTHING), SMALL),
        Case("strided", _logits(3, 4, 40, layout="strided"), SMALL),
        Case("strided_swept", _logits(2, 2, 4101, layout="strided"), SMALL),
        Case("strided_deep", _logits(2, 2, 3, 40, layout="strided"), SMALL),
        Case("transposed", _logits(6, 40, layout="transposed"), SMALL),
        Case("many_tokens", _logits(20_000, 3)),
        Case("llama2", _logits(300, 32_000), GPU),
        Case("llama3", _logits(300, 128_256, **EVERYTHING), GPU),
        Case("gpt2", _logits(300, 50_257), GPU),
        Case("gemma", _logits(300, 262_144, softcap=30.0), GPU),
        Case("few_tokens", _logits(4, 262_147), GPU),
        Case("far_apart", {**_logits(3, 4104), "logits": T(3, 4104, dtype=torch.bfloat16, init=far_apart)}, GPU, BF16),
        Case("int64_offsets", _logits(16_800, 128_256, every=50, reduction="sum"), GPU, BF16),
        Case("bench_32k", _logits(8192, 32_000, every=0), BENCH, BF16),
        Case("bench_128k", _logits(8192, 128_256, every=0), BENCH, BF16),
        Case("bench_50257", _logits(8192, 50_257, every=0), BENCH, BF16),
        Case("bench_1k", _logits(65_536, 1000, every=0), BENCH, BF16),
    ],
    "linear_cross_entropy": [
        Case("plain", _linear((2, 5), 16, 40), SMALL),
        Case("chunks", _linear(11, 16, 40, chunk_tokens=4), SMALL),
        Case("chunks_sum", _linear(11, 16, 40, chunk_tokens=4, reduction="sum"), SMALL),
        Case("chunks_none", _linear(11, 16, 40, chunk_tokens=4, reduction="none"), SMALL),
        Case("chunks_of_one", _linear(3, 16, 40, chunk_tokens=1), SMALL),
        Case("chunks_rounded", _linear(11, 16, 40, chunk_tokens=4, accumulate_fp32=False), SMALL),
        Case("none", _linear((2, 5), 16, 40, reduction="none"), SMALL),
        Case("one_class", _linear(6, 8, 1), SMALL),
        Case("odd", _linear(7, 13, 257, bias=True), SMALL),
        Case("swept", _linear(5, 8, 4104, chunk_tokens=3), SMALL),
        Case("swept_odd", _linear(5, 8, 4101, chunk_tokens=3, bias=True, **EVERYTHING), SMALL),
        Case("one_token", _linear((), 16, 40, every=0), SMALL),
        Case("no_tokens", _linear(0, 16, 40, bias=True), SMALL),
        Case("no_tokens_none", _linear(0, 16, 40, reduction="none"), SMALL),
        Case("all_ignored", _linear(6, 16, 40, every=1, chunk_tokens=4, bias=True), SMALL),
        Case("int32", _linear(7, 16, 40, target=torch.int32), SMALL),
        Case("bias", _linear(7, 16, 40, bias=True), SMALL),
        Case("frozen", _linear(7, 16, 40, frozen=True), SMALL),
        Case("frozen_none", _linear(7, 16, 40, frozen=True, reduction="none", chunk_tokens=4), SMALL),
        Case("weight_only", _linear(7, 16, 40, x_grad=False, chunk_tokens=4), SMALL),
        Case("loss_only", _linear(7, 16, 40, x_grad=False, frozen=True, chunk_tokens=4), SMALL),
        Case("weighted_z", _linear(7, 16, 40, weighted=True, z_loss=1e-2, chunk_tokens=4), SMALL),
        Case("everything", _linear(9, 16, 40, bias=True, chunk_tokens=4, **EVERYTHING), SMALL),
        Case("everything_sum", _linear(9, 16, 40, bias=True, reduction="sum", **EVERYTHING), SMALL),
        Case("everything_none", _linear(9, 16, 40, bias=True, reduction="none", chunk_tokens=4, **EVERYTHING), SMALL),
        Case("strided", _linear((2, 5), 16, 40, layout="strided", chunk_tokens=4), SMALL),
        Case("transposed", _linear((2, 5), 16, 40, layout="transposed", chunk_tokens=4), SMALL),
        Case("weight_fp32", _linear(9, 16, 40, weight=torch.float32, bias=True, chunk_tokens=4), SMALL, HALF),
        Case("weight_bf16", _linear(9, 16, 40, weight=torch.bfloat16, chunk_tokens=4), SMALL, (torch.float32,)),
        Case("keep", _linear((2, 5), 16, 40, mode="keep", bias=True), SMALL, WIDE),
        Case("keep_everything", _linear(9, 16, 40, mode="keep", bias=True, **EVERYTHING), SMALL, WIDE),
        Case("keep_swept", _linear(5, 8, 4101, mode="keep", reduction="sum", z_loss=1e-2), SMALL, WIDE),
        Case("keep_frozen", _linear((2, 5), 16, 40, mode="keep", frozen=True, layout="strided"), SMALL, WIDE),
        Case("keep_weight_only", _linear(7, 16, 40, mode="keep", x_grad=False, weighted=True), SMALL, WIDE),
        Case("keep_none", _linear(7, 16, 40, mode="keep", reduction="none"), SMALL, WIDE),
        Case("keep_all_ignored", _linear(6, 16, 40, mode="keep", every=1), SMALL, WIDE),
        Case("keep_no_tokens", _linear(0, 16, 40, mode="keep"), SMALL, WIDE),
        Case("whole_chunk", _linear(7, 16, 40, mode="chunks", bias=True), SMALL),
        Case("whole_chunk_rounded", _linear(7, 16, 40, mode="chunks", accumulate_fp32=False), SMALL),
        Case("recompute", _linear((2, 5), 16, 40, mode="recompute", chunk_tokens=4, bias=True), SMALL),
        Case("recompute_whole", _linear(7, 16, 40, mode="recompute"), SMALL),
        Case("recompute_everything", _linear(9, 16, 40, mode="recompute", chunk_tokens=4, **EVERYTHING), SMALL),
        Case("recompute_swept", _linear(9, 8, 9000, mode="recompute", chunk_tokens=5, **EVERYTHING), SMALL),
        Case("recompute_odd", _linear(5, 8, 4101, mode="recompute", chunk_tokens=3, frozen=True), SMALL),
        Case("recompute_tall", _linear(60, 8, 7, mode="recompute", chunk_tokens=9), SMALL),
        Case("recompute_frozen", _linear(7, 16, 40, mode="recompute", chunk_tokens=3, frozen=True), SMALL),
        Case("recompute_weight_only", _linear(7, 16, 40, mode="recompute", chunk_tokens=3, x_grad=False), SMALL),
        Case("parts", _linear(7, 16, 8448, chunk_tokens=4, z_loss=1e-2), PARTS, HALF),
        Case("parts_sum", _linear(7, 16, 8448, chunk_tokens=4, weighted=True, scale=1.5, reduction="sum"), PARTS, HALF),
        Case("parts_keep", _linear(7, 16, 16_384, mode="keep", bias=True, z_loss=1e-2), PARTS, WIDE),
        Case("parts_odd", _linear(5, 16, 8208, mode="keep"), PARTS, WIDE),
        Case("parts_all_ignored", _linear(5, 16, 8448, mode="keep", every=1), PARTS, WIDE),
        Case("exp2", _linear(300, 136, 8464, chunk_tokens=130), PARTS, BF16),
        Case("exp2_sum", _linear((4, 40), 64, 8448, reduction="sum", weighted=True, scale=0.7), PARTS, BF16),
        Case("exp2_rounded", _linear(150, 72, 8208, chunk_tokens=64, accumulate_fp32=False), PARTS, BF16),
        Case("exp2_wide_sum", _linear(150, 72, 8208, target=torch.int32, weight=torch.float32), PARTS, BF16),
        Case("exp2_frozen", _linear(70, 64, 8192, chunk_tokens=64, frozen=True), PARTS, BF16),
        Case("exp2_all_ignored", _linear(150, 64, 8192, every=1, chunk_tokens=64), PARTS, BF16),
        Case(
            "exp2_again",
            {**_linear(300, 136, 8464, chunk_tokens=200), "x": T(300, 136, grad=True, init=_steep)},
            PARTS,
            BF16,
        ),
        Case("exp2_kept", _linear(300, 136, 8464, mode="keep"), PARTS, BF16),
        Case(
            "exp2_kept_sum",
            _linear((4, 40), 64, 8448, mode="keep", reduction="sum", weighted=True, scale=0.7),
            PARTS,
            BF16,
        ),
        Case("exp2_kept_weighted", _linear(150, 72, 8208, mode="keep", weighted=True, layout="strided"), PARTS, BF16),
        Case("exp2_kept_weight_only", _linear(70, 64, 8192, mode="keep", x_grad=False), PARTS, BF16),
        Case("exp2_kept_frozen", _linear(70, 64, 8192, mode="keep", frozen=True, weight=torch.float32), PARTS, BF16),
        Case("exp2_kept_all_ignored", _linear(70, 64, 8192, mode="keep", every=1), PARTS, BF16),
        Case(
            "exp2_kept_again",
            {**_linear(200, 136, 8464, mode="keep"), "x": T(200, 136, grad=True, init=_steep)},
            PARTS,
            BF16,
        ),
        Case("many_labels", _linear(600, 24, 9000, chunk_tokens=256)),
        Case("many_labels_again", _linear(600, 24, 9000, mode="recompute", chunk_tokens=64)),
        Case("llama2", _linear(700, 512, 32_000, chunk_tokens=300, bias=True), GPU),
        Case("llama3", _linear(700, 512, 128_256, chunk_tokens=300, **EVERYTHING), GPU),
        Case("gpt2", _linear(700, 768, 50_257, chunk_tokens=300), GPU),
        Case("llama3_parts", _linear(700, 512, 128_256, chunk_tokens=300, bias=True, z_loss=1e-4), GPU, HALF),
        Case("llama3_again", _linear(700, 512, 128_256, mode="recompute", chunk_tokens=50, **EVERYTHING), GPU),
        Case("gemma3_kept", _linear(700, 640, 262_144, mode="keep", every=9), GPU, BF16),
        Case("exp2_kept_many", _linear(2304, 64, 8208, mode="keep"), GPU | {"compile"}, BF16),
        Case("llama3_kept", _linear(700, 512, 128_256, mode="keep", bias=True, **EVERYTHING), GPU, WIDE),
        *(
            case
            for classes, name in ((32_000, "32k"), (128_256, "128k"))
            for tokens in (4096, 8192, 16_384)
            for args in (_linear(tokens, 4096, classes, every=0),)
            for case in (
                Case(f"bench_{tokens >> 10}k_{name}", args, BENCH, BF16),
                Case(f"bench_{tokens >> 10}k_{name}_again", {**args, "mode": "recompute"}, AGAIN, BF16),
            )
        ),
        Case("bench_16k_narrow", _linear(16_384, 2048, 128_256, every=0), BENCH, BF16),
        Case("bench_frozen", _linear(8192, 4096, 128_256, every=0, frozen=True), BENCH, BF16),
    ],
}


def _bytes(logits: Tensor, target: Tensor, **_: object) -> int:
    """Logits and labels read; lse written, and the tokens' losses written and read."""
    return logits.numel() * logits.element_size() + target.numel() * (target.element_size() + 12)


def _bytes_vjp(logits: Tensor, target: Tensor, **_: object) -> int:
    """Logits, labels and lse read, the gradient of logits written."""
    return 2 * logits.numel() * logits.element_size() + target.numel() * (target.element_size() + 4)


def _bytes_linear(x: Tensor, weight: Tensor, target: Tensor, **_: object) -> int:
    """x, weight and labels read; the gradients that autograd will ask for, and lse, written. Logits need not move."""
    moved = sum(t.numel() * t.element_size() * (2 if t.requires_grad else 1) for t in (x, weight))
    return moved + target.numel() * (target.element_size() + 4)


def bytes_linear_vjp(x: Tensor, weight: Tensor, output_mask: Sequence[bool], **_: object) -> int:
    """The saved gradients read, those of x and weight written."""
    return 2 * held(*itertools.compress((x, weight), output_mask))


def _flops_linear(x: Tensor, weight: Tensor, reduction: str = "mean", **_: object) -> int:
    """The logits, and with the loss already the gradients that autograd will ask for (not for "none")."""
    products = 1 + (0 if reduction == "none" else x.requires_grad + weight.requires_grad)
    return 2 * x.numel() * weight.shape[0] * products


def _flops_linear_vjp(x: Tensor, weight: Tensor, reduction: str, output_mask: Sequence[bool], **_: object) -> int:
    """For "none" the logits once more and the gradients; else nothing but a scaling."""
    return 2 * x.numel() * weight.shape[0] * (1 + sum(output_mask[:2])) if reduction == "none" else 0


bytes_moved = {
    "cross_entropy": _bytes,
    "cross_entropy_vjp": _bytes_vjp,
    "linear_cross_entropy": _bytes_linear,
    "linear_cross_entropy_vjp": bytes_linear_vjp,
}
flops = {
    "linear_cross_entropy": _flops_linear,
    "linear_cross_entropy_vjp": _flops_linear_vjp,
}
