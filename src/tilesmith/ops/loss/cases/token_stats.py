"""Example inputs of the statistics of predicted tokens, and what they must move and compute."""

from collections.abc import Sequence

import torch
from torch import Tensor

from tilesmith.engine import Case, T
from tilesmith.engine.case import SMALL
from tilesmith.engine.memory import held

BENCH = frozenset({"gpu", "bench"})
FP32, BF16 = (torch.float32,), (torch.bfloat16,)


def _labels(ignored: int, classes: int):
    def init(generator: torch.Generator, shape: Sequence[int], device: torch.device) -> Tensor:
        labels = torch.randint(classes, tuple(shape), generator=generator, device=device)
        labels.view(-1)[:ignored] = -100
        return labels

    return init


def _small(generator: torch.Generator, shape: Sequence[int], device: torch.device) -> Tensor:
    """Weights that give logits of a quarter of unit size."""
    return torch.randn(tuple(shape), generator=generator, device=device) / (4 * shape[-1] ** 0.5)


def _peaked(generator: torch.Generator, shape: Sequence[int], device: torch.device) -> Tensor:
    """A bias that says which class is the most likely one, whatever the rounding of the logits, but not likelier than
    one of ten: else the bias's gradient is that of one class, and its error that of the rounding of each lse."""
    bias = torch.randn(tuple(shape), generator=generator, device=device) / 8
    bias[shape[0] // 3] += 1.5
    return bias


def _stats(
    *tokens: int,
    hidden: int = 16,
    classes: int = 40,
    ignored: int = 2,
    frozen: bool = False,
    x_grad: bool = True,
    bias: bool = True,
    layout: str = "contiguous",
    weight: torch.dtype | None = None,
    **rest: object,
) -> dict:
    args: dict = {
        "x": T(*tokens, hidden, grad=x_grad, layout=layout),
        "weight": T(classes, hidden, dtype=weight, grad=not frozen, init=_small, layout=layout),
        "target": T(*tokens, dtype=torch.int64, init=_labels(ignored, classes)),
    }
    if bias:
        args["bias"] = T(classes, dtype=weight, init=_peaked, grad=not frozen)
    return {**args, **rest}


def _logits(
    *tokens: int,
    classes: int = 40,
    ignored: int = 2,
    grad: bool = True,
    layout: str = "contiguous",
    **rest: object,
) -> dict:
    args: dict = {"logits": T(*tokens, classes, grad=grad, layout=layout, init=_one_ahead)}
    return {**args, "target": T(*tokens, dtype=torch.int64, init=_labels(ignored, classes)), **rest}


def _one_ahead(generator: torch.Generator, shape: Sequence[int], device: torch.device) -> Tensor:
    """Logits of a quarter of unit size of which one is the largest by more than any rounding, another in each row."""
    x = torch.randn(tuple(shape), generator=generator, device=device) / 4
    rows = x.view(-1, shape[-1])
    at = torch.arange(len(rows), device=device)
    rows[at, at * 7 % shape[-1]] += 3
    return x


CASES: dict[str, list[Case]] = {
    "token_stats": [
        Case("small", _logits(2, 5), SMALL),
        Case("capped", _logits(2, 5, scale=1.5, softcap=20.0), SMALL),
        Case("scaled", _logits(9, scale=0.7), SMALL),
        Case("frozen", _logits(2, 5, grad=False), SMALL),
        Case("odd", _logits(5, classes=257), SMALL),
        Case("swept", _logits(3, classes=4101), SMALL),
        Case("strided", _logits(2, 5, layout="strided"), SMALL),
        Case("transposed", _logits(6, layout="transposed"), SMALL),
        Case("all_ignored", _logits(4, ignored=4), SMALL),
        Case("no_tokens", _logits(0, ignored=0), SMALL),
        Case("bench_8k_128k", _logits(8192, classes=128_256), BENCH, BF16),
    ],
    "linear_token_stats": [
        Case("bias", _stats(2, 5), SMALL),
        Case("plain", _stats(3, 7, bias=False), SMALL, FP32),
        Case("chunks", _stats(4, 5, chunk_tokens=6), SMALL),
        Case("chunks_rounded", _stats(4, 5, chunk_tokens=6, accumulate_fp32=False), SMALL),
        Case("capped", _stats(2, 5, scale=1.5, softcap=20.0), SMALL),
        Case("scaled", _stats(9, scale=0.7), SMALL),
        Case("frozen", _stats(2, 5, frozen=True), SMALL),
        Case("weight_only", _stats(2, 5, x_grad=False), SMALL),
        Case("odd", _stats(5, hidden=13, classes=257), SMALL),
        Case("swept", _stats(3, hidden=8, classes=4101), SMALL),
        Case("strided", _stats(2, 5, layout="strided"), SMALL),
        Case("transposed", _stats(6, layout="transposed"), SMALL),
        Case("all_ignored", _stats(4, ignored=4), SMALL),
        Case("no_tokens", _stats(0, ignored=0), SMALL),
        Case("weight_fp32", _stats(2, 5, weight=torch.float32), SMALL, BF16),
        Case("bench_8k_128k", _stats(8192, hidden=4096, classes=128_256, bias=False), BENCH, BF16),
        Case("bench_8k_32k", _stats(8192, hidden=4096, classes=32_000, bias=False), BENCH, BF16),
    ],
}


def _bytes(x: Tensor, weight: Tensor, target: Tensor, **_: object) -> int:
    """x, weight and labels read, four numbers a token written."""
    return held(x, weight, target) + 20 * target.numel()


def _bytes_vjp(x: Tensor, weight: Tensor, output_mask: Sequence[bool], **_: object) -> int:
    """x and weight read, their gradients written."""
    moved = ((t, 1 + wanted) for t, wanted in zip((x, weight), output_mask))
    return sum(n * t.numel() * t.element_size() for t, n in moved)


def _logit_bytes(logits: Tensor, target: Tensor, **_: object) -> int:
    """Logits and labels read, four numbers a token written."""
    return logits.numel() * logits.element_size() + target.numel() * (20 + target.element_size())


def _logit_bytes_vjp(logits: Tensor, **_: object) -> int:
    return 2 * logits.numel() * logits.element_size()


def _flops(x: Tensor, weight: Tensor, **_: object) -> int:
    return 2 * x.numel() * weight.shape[0]


def _flops_vjp(x: Tensor, weight: Tensor, output_mask: Sequence[bool], **_: object) -> int:
    """The logits once more, and the gradients."""
    return 2 * x.numel() * weight.shape[0] * (1 + sum(output_mask[:2]))


bytes_moved = {
    "token_stats": _logit_bytes,
    "token_stats_vjp": _logit_bytes_vjp,
    "linear_token_stats": _bytes,
    "linear_token_stats_vjp": _bytes_vjp,
}
flops = {"linear_token_stats": _flops, "linear_token_stats_vjp": _flops_vjp}
