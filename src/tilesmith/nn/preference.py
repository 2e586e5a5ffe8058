"""Preference losses from hidden states and the output layer's weight, without logits: DPO and its variants, ORPO,
SimPO, CPO, KTO. What they share is one op, `ops.linear_preference`; what differs is a formula.

Legend: B sequences, of which in pairs the first half are chosen and the second half rejected, in the same order; T
tokens; K features; V classes.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from tilesmith import ops
from tilesmith.engine.argument_checks import choice, flag, integer, number, positive, shaped, size, tensor
from tilesmith.ops.loss.formulas import FORMULAS, KTOOptions, PairOptions, log_odds

PAIRED = tuple(sorted(name for name, formula in FORMULAS.items() if formula.paired))


class PairMetrics(NamedTuple):
    """Detached, of each pair: log-probabilities (summed, or averaged over tokens) and rewards (beta times the log-ratio
    to the reference); scalars: mean logit of either half, negative log-likelihood of the chosen tokens."""

    chosen_logps: Tensor
    rejected_logps: Tensor
    chosen_logits_mean: Tensor
    rejected_logits_mean: Tensor
    nll_loss: Tensor
    chosen_rewards: Tensor
    rejected_rewards: Tensor


class OddsMetrics(NamedTuple):
    """`PairMetrics`, and the means of log σ(log-odds ratio) and of the log-odds ratio."""

    chosen_logps: Tensor
    rejected_logps: Tensor
    chosen_logits_mean: Tensor
    rejected_logits_mean: Tensor
    nll_loss: Tensor
    chosen_rewards: Tensor
    rejected_rewards: Tensor
    log_odds_ratio: Tensor
    log_odds_chosen: Tensor


class SingleMetrics(NamedTuple):
    """Detached sums over desirable (chosen) and undesirable (rejected) sequences."""

    chosen_logps_sum: Tensor
    rejected_logps_sum: Tensor
    chosen_logits_sum: Tensor
    rejected_logits_sum: Tensor
    chosen_rewards_sum: Tensor
    rejected_rewards_sum: Tensor


def preference_loss(
    x: Tensor,
    weight: Tensor,
    target: Tensor,
    bias: Tensor | None = None,
    *,
    loss_type: str = "sigmoid",
    beta: float = 0.1,
    label_smoothing: float = 0.0,
    gamma: float = 0.0,
    discopop_tau: float = 0.05,
    alpha: float = 0.0,
    nll_target: Tensor | None = None,
    average_log_prob: bool = False,
    ref_logps: Tensor | None = None,
    ignore_index: int = -100,
    scale: float = 1.0,
    softcap: float = 0.0,
    chunk_size: int = 0,
    accumulate_fp32: bool = False,
    recompute: bool = False,
) -> tuple[Tensor, PairMetrics | OddsMetrics]:
    """The mean over pairs of a loss of chosen against rejected sequences, plus alpha times the chosen ones' likelihood.

    x: [B, T, K], B even. weight: [V, K]. target: [B, T]; labels of ignore_index do not count. bias: [V]. loss_type: a
    paired entry of `ops.loss.formulas.FORMULAS`, whose comments name the papers; with r the log-probability of a
    sequence less that of the reference model and margin = beta · (r_chosen − r_rejected), "sigmoid" is
    −log σ(margin − gamma), with label_smoothing s as (1 − s, s) mixture of both orders. ref_logps: [B], the
    reference's, summed or averaged likewise (see `sequence_log_probs`); None: 0, and nothing else with "odds_ratio".
    average_log_prob: mean over counted tokens in place of the sum; "ipo", which is defined by means, always averages.
    alpha: weight of the mean negative log-likelihood of the chosen sequences' labels, or of nll_target [B, T], which
    costs products of its own. chunk_size: pairs whose logits are in memory at a time; 0: the library chooses. The rest:
    see `ops.linear_preference`.

    Returns the loss, fp32, and `PairMetrics` (`OddsMetrics` for "odds_ratio").
    """
    tensor("preference_loss", "x", x)
    tensor("preference_loss", "target", target)
    check_options("preference_loss", loss_type, beta, label_smoothing, gamma, alpha, discopop_tau)
    integer("preference_loss", "ignore_index", ignore_index)
    if target.ndim != 2 or target.shape[0] % 2:
        raise ValueError(
            f"preference_loss: target has shape {tuple(target.shape)}; it must be [B, T], chosen then rejected, "
            "B even; concatenate the halves"
        )
    size("preference_loss", "chunk_size", chunk_size, 0)
    for name, value in _flags(average_log_prob, accumulate_fp32, recompute).items():
        flag("preference_loss", name, value)
    shaped("preference_loss", "ref_logps", ref_logps, target.shape[:1], device=x.device)
    if loss_type == "odds_ratio" and ref_logps is not None:
        raise ValueError(
            "preference_loss: ref_logps was given, and loss_type is 'odds_ratio' (ORPO), which has no reference model: "
            "odds are of probabilities, not of ratios to others; leave it out"
        )
    shaped("preference_loss", "nll_target", nll_target, target.shape, device=x.device)
    pairs, counted = target.shape[0] // 2, target != ignore_index
    average, acc = average_log_prob or loss_type == "ipo", torch.promote_types(x.dtype, torch.float32)
    lengths = _at_least_one(counted.sum(-1), acc)
    sequences = torch.zeros(3, target.shape[0], device=x.device, dtype=acc)
    sequences[0] = 1 / lengths if average else 1.0
    if ref_logps is not None:
        sequences[1] = ref_logps.detach()
    likely = _at_least_one(counted[:pairs].sum(), acc)
    if alpha and nll_target is None:
        sequences[2, :pairs] = alpha * pairs / likely
    total, log_probs = ops.linear_preference(
        x, weight, target, sequences, loss_type, PairOptions(beta, label_smoothing, gamma, discopop_tau), bias, None,
        ignore_index, scale, softcap, chunk_size * 2 * target.shape[1], accumulate_fp32, recompute,
    )  # fmt: skip
    loss = total / max(1, pairs)
    nll = -log_probs[:pairs].detach().sum() / likely
    if alpha and nll_target is not None:
        own = nll_target[:pairs]
        nll = ops.linear_cross_entropy(
            x[:pairs], weight, own, bias, ignore_index=ignore_index, scale=scale, softcap=softcap, reduction="sum"
        )
        nll = nll / _at_least_one((own != ignore_index).sum(), acc)
        loss = loss + alpha * nll
    with torch.no_grad():
        sums = log_probs.detach().sum(-1) * sequences[0]
        halves = (*sums.chunk(2), *_mean_logits(x, weight, bias), nll.detach())
        metrics = PairMetrics(*halves, *(beta * (sums - sequences[1])).chunk(2))
        if loss_type != "odds_ratio":
            return loss, metrics
        ratio = log_odds(metrics.chosen_logps) - log_odds(metrics.rejected_logps)
        return loss, OddsMetrics(*metrics, logsigmoid(ratio).mean(), ratio.mean())


def kto_loss(
    x: Tensor,
    weight: Tensor,
    target: Tensor,
    preference_labels: Tensor,
    bias: Tensor | None = None,
    *,
    beta: float = 0.1,
    kl: Tensor | None = None,
    average_log_prob: bool = False,
    ref_logps: Tensor | None = None,
    ignore_index: int = -100,
    scale: float = 1.0,
    softcap: float = 0.0,
    chunk_size: int = 0,
    accumulate_fp32: bool = False,
    recompute: bool = False,
) -> tuple[Tensor, SingleMetrics]:
    """The mean over sequences of 1 − σ(± beta · (log-ratio − kl)), + where preference_labels [B] is true (KTO).

    Source: arXiv:2402.01306. kl: the KL estimate to compare with, a scalar or [B]; None: 0. chunk_size: sequences whose
    logits are in memory at a time. The rest: see `preference_loss`.
    """
    tensor("kto_loss", "x", x)
    tensor("kto_loss", "target", target, ("B", "T"))
    size("kto_loss", "chunk_size", chunk_size, 0)
    number("kto_loss", "beta", beta, 0.0)
    integer("kto_loss", "ignore_index", ignore_index)
    for name, value in _flags(average_log_prob, accumulate_fp32, recompute).items():
        flag("kto_loss", name, value)
    shaped("kto_loss", "ref_logps", ref_logps, target.shape[:1], device=x.device)
    shaped("kto_loss", "kl", kl, target.shape[:1], (), (1,))
    shaped("kto_loss", "preference_labels", preference_labels, target.shape[:1], device=x.device)
    if preference_labels is None or preference_labels.dtype != torch.bool:
        given = None if preference_labels is None else preference_labels.dtype
        raise TypeError(f"preference_labels has dtype {given}; it must be a bool tensor, true for desirable sequences")
    acc = torch.promote_types(x.dtype, torch.float32)
    sequences = torch.zeros(4, target.shape[0], device=x.device, dtype=acc)
    sequences[0] = 1 / _at_least_one((target != ignore_index).sum(-1), acc) if average_log_prob else 1.0
    if ref_logps is not None:
        sequences[1] = ref_logps.detach()
    sequences[2] = torch.where(preference_labels, 1.0, -1.0)
    if kl is not None:
        sequences[3] = kl.detach()
    total, log_probs = ops.linear_preference(
        x, weight, target, sequences, "kto", KTOOptions(beta), bias, None,
        ignore_index, scale, softcap, chunk_size * target.shape[1], accumulate_fp32, recompute,
    )  # fmt: skip
    with torch.no_grad():
        sums = log_probs.detach().sum(-1) * sequences[0]
        per_sequence = (sums, _logit_sums(x, weight, bias), beta * (sums - sequences[1]))
        metrics = [(part * side).sum() for part in per_sequence for side in (preference_labels, ~preference_labels)]
    return total / max(1, target.shape[0]), SingleMetrics(*metrics)


def sequence_log_probs(
    x: Tensor,
    weight: Tensor,
    target: Tensor,
    bias: Tensor | None = None,
    *,
    average: bool = False,
    ignore_index: int = -100,
    scale: float = 1.0,
    softcap: float = 0.0,
) -> Tensor:
    """Log-probabilities [B] of whole sequences, summed or averaged over counted tokens, without logits."""
    total = ops.linear_log_probs(x, weight, target, bias, ignore_index, scale, softcap).sum(-1)
    return total / (target != ignore_index).sum(-1).clamp(min=1) if average else total


def _at_least_one(count: Tensor, dtype: torch.dtype) -> Tensor:
    """Counts to divide by: a quotient of integers would have PyTorch's default dtype, which may be a half-precision
    one."""
    return count.clamp(min=1).to(dtype)


def _flags(average_log_prob: bool, accumulate_fp32: bool, recompute: bool) -> dict[str, bool]:
    return {"average_log_prob": average_log_prob, "accumulate_fp32": accumulate_fp32, "recompute": recompute}


def check_options(
    of: str, loss_type: str, beta: float, label_smoothing: float, gamma: float, alpha: float, discopop_tau: float = 1.0
) -> None:
    """Raise TypeError or ValueError, in the name of `of`, for options of a paired loss that it has no meaning for."""
    choice(of, "loss_type", loss_type, PAIRED)
    (positive if loss_type in ("ipo", "sppo_hard") else _not_negative)(of, "beta", beta)  # these divide by it
    _not_negative(of, "alpha", alpha)
    positive(of, "discopop_tau", discopop_tau)
    if number(of, "gamma", gamma) and loss_type != "sigmoid":
        raise ValueError(f"{of}: gamma is {gamma}; {loss_type!r} has no such margin, so leave it 0")
    number(of, "label_smoothing", label_smoothing)
    allowed, fits = {
        "sigmoid": ("in [0, 1]", 0 <= label_smoothing <= 1),
        "robust": ("in [0, 0.5)", 0 <= label_smoothing < 0.5),
        "exo_pair": ("above 0 and below 1 (the paper advises 1e-3)", 0 < label_smoothing < 1),
    }.get(loss_type, ("0", label_smoothing == 0))
    if not fits:
        raise ValueError(
            f"{of}: label_smoothing is {label_smoothing}; for loss_type {loss_type!r} it must be {allowed}"
        )


def _not_negative(of: str, name: str, value: float) -> None:
    number(of, name, value, 0.0)


def _logit_sums(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """The sum of all logits of each sequence: linear, so two vectors suffice."""
    acc = torch.promote_types(x.dtype, torch.float32)
    with torch.autocast(x.device.type, enabled=False):
        sums = x.detach().sum(1, dtype=acc) @ weight.detach().sum(0, dtype=acc)
    return sums if bias is None else sums + x.shape[1] * bias.detach().sum(dtype=acc)


def _mean_logits(x: Tensor, weight: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor]:
    chosen, rejected = (_logit_sums(x, weight, bias) / max(1, x.shape[1] * weight.shape[0])).chunk(2)
    return chosen.mean(), rejected.mean()
