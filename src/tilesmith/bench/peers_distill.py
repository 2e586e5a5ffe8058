"""Who else computes distances between distributions, distillation and preference losses: plain PyTorch and Liger."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from tilesmith.bench.missing import Missing, absent, only
from tilesmith.ops.loss.formulas import FORMULAS, PairOptions, PolicyOptions

Adapter = Callable[[Mapping[str, Any]], Callable[[], Any]]


def _kl_div(x, target, reduction="mean", log_target=False, eps=1e-10):
    return F.kl_div(x.float(), target.float(), reduction=reduction, log_target=log_target)


def _jsd(x, target, labels=None, beta=0.5, ignore_index=-100, reduction="batchmean"):
    a, b = x.float(), target.float()
    if beta in (0, 1):
        first, second = (a, b) if beta == 0 else (b, a)
        elements = F.kl_div(first, second, reduction="none", log_target=True)
    else:
        mean = torch.logaddexp(a + math.log1p(-beta), b + math.log(beta))
        elements = beta * b.exp() * (b - mean) + (1 - beta) * a.exp() * (a - mean)
    return _reduced(elements, labels, ignore_index, reduction)


def _tvd(x, target, labels=None, reduction="batchmean", ignore_index=-100):
    return _reduced((x.float() - target.float()).abs() / 2, labels, ignore_index, reduction)


def _reduced(elements, labels, ignore_index, reduction):
    if labels is not None:
        elements = elements.masked_fill((labels == ignore_index)[..., None], 0.0)
    if reduction in ("none", "sum"):
        return elements if reduction == "none" else elements.sum()
    count = elements[..., 0].numel() if labels is None else (labels != ignore_index).sum().clamp(min=1)
    return elements.sum() / count / (elements.shape[-1] if reduction == "mean" else 1)


def _linear_distillation(
    x, weight, teacher, teacher_weight=None, target=None, bias=None, teacher_bias=None, divergence="jsd", beta=0.5,
    temperature=1.0, soft_weight=1.0, hard_weight=0.0, ignore_index=-100, teacher_probs=False, **_,
):  # fmt: skip
    z = F.linear(x, weight.to(x.dtype), None if bias is None else bias.to(x.dtype)).float()
    y = teacher.float() if teacher_weight is None else F.linear(teacher, teacher_weight, teacher_bias).float()
    a, b = (z / temperature).log_softmax(-1), y.log() if teacher_probs else (y / temperature).log_softmax(-1)
    if divergence == "tvd":
        soft = _tvd(a.exp(), b.exp(), target, "sum", ignore_index)
    else:
        soft = _jsd(a, b, target, {"kl": 0.0, "reverse_kl": 1.0}.get(divergence, beta), ignore_index, "sum")
    hard = torch.zeros_like(soft)
    if target is not None:
        hard = F.cross_entropy(z.reshape(-1, z.shape[-1]), target.flatten(), ignore_index=ignore_index, reduction="sum")
    return soft_weight * soft + hard_weight * hard, torch.stack((soft, hard)).detach()


def _linear_preference(
    x, weight, target, sequences, formula, options, bias=None, tokens=None, ignore_index=-100, scale=1.0, softcap=0.0,
    **_,
):  # fmt: skip
    logits = F.linear(x, weight.to(x.dtype), None if bias is None else bias.to(x.dtype)).float() * scale
    logits = softcap * torch.tanh(logits / softcap) if softcap else logits
    picked = logits.log_softmax(-1).gather(-1, target.clamp(min=0)[..., None])[..., 0]
    log_probs = picked.masked_fill(target == ignore_index, 0.0)
    return FORMULAS[formula].evaluate(log_probs, sequences, tokens, tuple(options))[0], log_probs.detach()


EAGER: dict[str, Callable[..., Any]] = {
    "kl_div": _kl_div,
    "jsd": _jsd,
    "tvd": _tvd,
    "linear_distillation": _linear_distillation,
    "linear_preference": _linear_preference,
}


def _rows(x: Tensor) -> Tensor:
    return x.reshape(-1, x.shape[-1])


def _liger_kl_div(args):
    from liger_kernel.ops.kl_div import LigerKLDivLossFunction

    rest = (args.get("reduction", "mean"), args.get("log_target", False), args.get("eps", 1e-10))
    return lambda: LigerKLDivLossFunction.apply(_rows(args["x"]), _rows(args["target"]), *rest)


def _liger_jsd(args):
    from liger_kernel.ops.jsd import LigerJSDFunction

    only(args, "Liger", reduction="batchmean")
    labels = None if args.get("labels") is None else args["labels"].flatten()
    rest = (labels, args.get("beta", 0.5), args.get("ignore_index", -100), None, None)
    return lambda: LigerJSDFunction.apply(_rows(args["x"]), _rows(args["target"]), *rest)


def _liger_tvd(args):
    from liger_kernel.ops.tvd import LigerTVDLossFunction

    labels = None if args.get("labels") is None else args["labels"].flatten()
    rest = (labels, args.get("reduction", "batchmean"), args.get("ignore_index", -100))
    return lambda: LigerTVDLossFunction.apply(_rows(args["x"]), _rows(args["target"]), *rest)


def _liger_linear_distillation(args):
    from liger_kernel.chunked_loss import LigerFusedLinearJSDLoss
    from liger_kernel.transformers.fused_linear_jsd import LigerFusedLinearJSD

    if args.get("teacher_probs"):
        return _liger_linear_kl_div(args)
    only(args, "Liger", divergence="jsd")
    if args.get("teacher_weight") is None:
        raise Missing("Liger takes no teacher's logits")
    beta, temperature = args.get("beta", 0.5), args.get("temperature", 1.0)
    inputs = (_rows(args["x"]), args["weight"], _rows(args["teacher"]), args["teacher_weight"])
    labels = None if args.get("target") is None else args["target"].flatten()
    if not args.get("hard_weight"):
        absent(args, "Liger's FusedLinearJSD", "bias", "teacher_bias")
        loss = LigerFusedLinearJSD(beta, args.get("ignore_index", -100), temperature)
        return lambda: loss(*inputs, labels)
    loss = LigerFusedLinearJSDLoss(
        args["hard_weight"], args.get("soft_weight", 1.0), beta, args.get("ignore_index", -100), temperature
    )
    return lambda: loss(*inputs, labels, args.get("bias"), args.get("teacher_bias"))


def _liger_linear_kl_div(args):
    from liger_kernel.transformers.fused_linear_kl_div import LigerFusedLinearKLDivLoss

    only(args, "Liger", divergence="kl", soft_weight=1.0)
    absent(args, "Liger's FusedLinearKLDivLoss", "hard_weight", "bias")
    loss = LigerFusedLinearKLDivLoss("sum", args.get("ignore_index", -100), args.get("temperature", 1.0))
    labels = None if args.get("target") is None else args["target"].flatten()
    return lambda: loss(_rows(args["x"]), args["weight"], _rows(args["teacher"]), labels)


def _liger_linear_preference(args):
    """The class of the same formula, without a reference model: the same products, other constants."""
    from liger_kernel import chunked_loss as liger

    absent(args, "Liger", "softcap", "recompute")
    formula, x, weight, target = (args[n] for n in ("formula", "x", "weight", "target"))
    bias = args.get("bias")
    if FORMULAS[formula].options is PairOptions:
        only(args, "Liger", scale=1.0)
        beta, smoothing, gamma, tau = args["options"]
        if formula == "odds_ratio":
            loss = liger.LigerFusedLinearORPOLoss(beta=beta)
        elif gamma:
            loss = liger.LigerFusedLinearSimPOLoss(beta=beta, gamma=gamma, label_smoothing=smoothing)
        elif formula == "ipo":
            raise Missing("Liger has no ipo")
        else:
            loss = liger.LigerFusedLinearDPOLoss(
                beta=beta, use_ref_model=False, average_log_prob=True, loss_type=formula, label_smoothing=smoothing,
                discopop_tau=tau, compute_nll_loss=True,
            )  # fmt: skip
        return lambda: loss(weight, x, target, bias)
    if formula == "kto":
        liked = args["sequences"][2] > 0
        loss = liger.LigerFusedLinearKTOLoss(beta=args["options"][0])
        return lambda: loss(x, weight, target, bias, liked)
    o, tokens = PolicyOptions(*args["options"]), args["tokens"]
    rows = iter(tokens[2:])
    old, reference, importance = (next(rows) if has else None for has in (o.has_old, o.has_reference, o.has_importance))
    loss = liger.LigerFusedLinearGRPOLoss(
        beta=o.beta, use_ref_model=reference is not None, epsilon_low=o.low, epsilon_high=o.high,
        loss_type={"clip": "bnpo"}.get(formula, formula), temperature=1 / args.get("scale", 1.0),
        importance_sampling_level="sequence" if o.whole_sequence else "token",
        use_bias_correction_kl=bool(o.corrected),
    )  # fmt: skip
    ids, advantages = target.clamp(min=0), args["sequences"][0]
    return lambda: loss(x, weight, ids, tokens[1], advantages, bias, reference, old, vllm_is_ratio=importance)


PEERS: dict[str, dict[str, Adapter]] = {
    "kl_div": {"liger": _liger_kl_div},
    "jsd": {"liger": _liger_jsd},
    "tvd": {"liger": _liger_tvd},
    "linear_distillation": {"liger": _liger_linear_distillation},
    "linear_preference": {"liger": _liger_linear_preference},
}
