"""Example inputs of the fused preference loss, and what it must move and compute."""

from collections.abc import Sequence

import torch
from torch import Tensor

from tilesmith.engine import Case, T
from tilesmith.engine.case import BENCH, BF16, GPU, SMALL, Init
from tilesmith.engine.inits import unit_outputs
from tilesmith.ops.loss.cases.cross_entropy import bytes_linear_vjp
from tilesmith.ops.loss.formulas import FORMULAS, KTOOptions, PairOptions, PolicyOptions


def _labels(classes: int, prompt: int) -> Init:
    """Labels of sequences whose first `prompt` tokens, and some of the last, are ignored."""

    def init(generator: torch.Generator, shape: Sequence[int], device: torch.device) -> Tensor:
        labels = torch.randint(classes, tuple(shape), generator=generator, device=device)
        labels[:, :prompt] = -100
        labels[1::3, -1:] = -100
        return labels

    return init


def _pair_rows(tokens: int, classes: int, reference: bool = True) -> Init:
    """Scale of the sums, reference log-probability near those of even odds (else 0), weight of the likelihood term."""

    def init(generator: torch.Generator, shape: Sequence[int], device: torch.device) -> Tensor:
        rows = torch.randn(tuple(shape), generator=generator, device=device)
        rows[0] = 1 / max(1, tokens)
        rows[1] = rows[1] - torch.tensor(float(classes)).log().item() if reference else 0
        rows[2] = 0.1 / max(1, tokens)
        rows[2, shape[1] // 2 :] = 0
        return rows

    return init


def _kto_rows(tokens: int, classes: int) -> Init:
    def init(generator: torch.Generator, shape: Sequence[int], device: torch.device) -> Tensor:
        rows = _pair_rows(tokens, classes)(generator, shape, device)
        rows[2] = 1
        rows[2, ::2] = -1
        return rows

    return init


def _policy_rows(classes: int) -> Init:
    """Weights and a mask, then old and reference log-probabilities, then importance ratios."""

    def init(generator: torch.Generator, shape: Sequence[int], device: torch.device) -> Tensor:
        rows = 0.3 * torch.randn(tuple(shape), generator=generator, device=device)
        rows[0] = rows[1] = 1
        rows[:2, ..., -1] = 0
        rows[2:4] -= torch.tensor(float(classes)).log().item()
        rows[4] = rows[4].abs() + 0.5
        return rows

    return init


def _preference(
    batch: int,
    length: int,
    hidden: int,
    classes: int,
    formula: str = "sigmoid",
    *,
    prompt: int = 1,
    bias: bool = False,
    frozen: bool = False,
    x_grad: bool = True,
    weight: torch.dtype | None = None,
    layout: str = "contiguous",
    options: tuple | None = None,
    **rest: object,
) -> dict:
    """Arguments of linear_preference."""
    rule = FORMULAS[formula]
    rows = length - prompt, classes
    # odds are of probabilities: of a ratio to a reference's, which may be above 1, there is no log(1 - p)
    init = _pair_rows(*rows, formula != "odds_ratio") if rule.paired else _kto_rows(*rows)
    args: dict = {
        "x": T(batch, length, hidden, grad=x_grad, layout=layout),
        "weight": T(classes, hidden, dtype=weight, grad=not frozen, init=unit_outputs, layout=layout),
        "target": T(batch, length, dtype=torch.int64, init=_labels(classes, prompt)),
    }
    if rule.options is PolicyOptions:
        args["sequences"] = T(rule.sequences, batch, dtype=torch.float32, grad=False)
        args["tokens"] = T(5, batch, length, dtype=torch.float32, grad=False, init=_policy_rows(classes))
        default = PolicyOptions(has_old=1.0, has_reference=1.0, has_importance=1.0)
    else:
        args["sequences"] = T(rule.sequences, batch, dtype=torch.float32, grad=False, init=init)
        default = PairOptions(beta=0.5, label_smoothing=0.1) if rule.options is PairOptions else KTOOptions()
    if bias:
        args["bias"] = T(classes, dtype=weight, init=unit_outputs)
    return {**args, "formula": formula, "options": list(default if options is None else options), **rest}


def _each_formula() -> list[Case]:
    return [Case(name, _preference(4, 5, 16, 40, name), SMALL) for name in FORMULAS]


CASES: dict[str, list[Case]] = {
    "linear_preference": [
        *_each_formula(),
        Case("chunks", _preference(6, 5, 16, 40, chunk_tokens=20, bias=True), SMALL),
        Case("chunks_uneven", _preference(10, 3, 16, 40, chunk_tokens=12), SMALL),
        Case("chunks_fp32", _preference(6, 5, 16, 40, chunk_tokens=10, accumulate_fp32=True), SMALL),
        Case("chunks_single", _preference(5, 3, 16, 40, "kto", chunk_tokens=6), SMALL),
        Case("chunks_below_a_pair", _preference(4, 5, 16, 40, chunk_tokens=3), SMALL),
        Case("recompute", _preference(4, 5, 16, 40, chunk_tokens=3, recompute=True, bias=True), SMALL),
        Case("capped", _preference(4, 5, 16, 40, scale=1.5, softcap=3.0), SMALL),
        Case(
            "whole_sequences",
            _preference(
                4,
                5,
                16,
                40,
                "clip",
                options=PolicyOptions(whole_sequence=1.0, corrected=1.0, has_old=1.0, has_reference=1.0),
                chunk_tokens=10,
            ),
            SMALL,
        ),
        Case("on_policy", _preference(4, 5, 16, 40, "clip", options=PolicyOptions()), SMALL),
        Case("odd", _preference(2, 3, 13, 257, "odds_ratio", bias=True), SMALL),
        Case("swept", _preference(2, 3, 8, 4101), SMALL),
        Case("no_tokens", _preference(2, 0, 16, 40, prompt=0), SMALL),
        Case("no_sequences", _preference(0, 5, 16, 40, bias=True), SMALL),
        Case("all_ignored", _preference(2, 3, 16, 40, prompt=3), SMALL),
        Case("frozen", _preference(4, 5, 16, 40, frozen=True), SMALL),
        Case("weight_only", _preference(4, 5, 16, 40, x_grad=False, chunk_tokens=10), SMALL),
        Case("loss_only", _preference(4, 5, 16, 40, x_grad=False, frozen=True), SMALL),
        Case("strided", _preference(4, 5, 16, 40, layout="strided", chunk_tokens=10), SMALL),
        Case("transposed", _preference(4, 5, 16, 40, layout="transposed"), SMALL),
        Case("weight_fp32", _preference(4, 5, 16, 40, weight=torch.float32, bias=True, chunk_tokens=10), SMALL, BF16),
        Case("llama3", _preference(4, 200, 512, 128_256, chunk_tokens=400), GPU, BF16),
        Case("bench_8x1k_128k", _preference(8, 1024, 4096, 128_256, prompt=0), BENCH, BF16),
        Case("bench_8x1k_32k", _preference(8, 1024, 4096, 32_000, prompt=0), BENCH, BF16),
        Case("bench_policy_8x1k_128k", _preference(8, 1024, 4096, 128_256, "clip", prompt=0), BENCH, BF16),
        *(
            Case(f"bench_{formula}_8x1k_32k", _preference(8, 1024, 4096, 32_000, formula, prompt=0), BENCH, BF16)
            for formula in ("odds_ratio", "kto", "clip")
        ),
    ],
}


def _bytes(x: Tensor, weight: Tensor, target: Tensor, **_: object) -> int:
    """x, weight and labels read; the gradients that autograd will ask for, log-probabilities and lse written."""
    moved = sum(t.numel() * t.element_size() * (2 if t.requires_grad else 1) for t in (x, weight))
    return moved + target.numel() * (target.element_size() + 8)


def _flops(x: Tensor, weight: Tensor, recompute: bool = False, **_: object) -> int:
    """The logits, and unless they are recomputed the gradients that autograd will ask for."""
    return 2 * x.numel() * weight.shape[0] * (1 + (0 if recompute else x.requires_grad + weight.requires_grad))


def _flops_vjp(x: Tensor, weight: Tensor, output_mask: Sequence[bool], recompute: bool = False, **_: object) -> int:
    """The logits once more and the gradients, or nothing but a scaling of those that are saved."""
    return 2 * x.numel() * weight.shape[0] * (1 + sum(output_mask[:2])) if recompute else 0


bytes_moved = {"linear_preference": _bytes, "linear_preference_vjp": bytes_linear_vjp}
flops = {"linear_preference": _flops, "linear_preference_vjp": _flops_vjp}
