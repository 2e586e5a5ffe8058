"""The preference losses as formulas of tokens' log-probabilities: plain PyTorch, one entry each, with their slopes.

Legend: B sequences, T tokens of a sequence; in a paired formula the first half of the sequences are the chosen ones. A
formula gets the log-probabilities of the labels [B, T] (0 where ignored), `sequences` [rows, B] and `tokens`
[rows, B, T] with what else it reads, and its options. It returns the undivided sum of the losses and the slopes, its
gradient with respect to the log-probabilities. Slopes are written out, since autograd records nothing below torch's
dispatcher.
"""

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid


class PairOptions(NamedTuple):
    """beta: weight of the log-ratio; label_smoothing: share of pairs taken to be the wrong way round; gamma: margin
    that the chosen sequence must win by; tau: temperature of DiscoPOP's blend."""

    beta: float = 0.1
    label_smoothing: float = 0.0
    gamma: float = 0.0
    tau: float = 0.05


class KTOOptions(NamedTuple):
    """beta: weight of the log-ratio."""

    beta: float = 0.1


class PolicyOptions(NamedTuple):
    """beta: weight of the KL term; low, high: how far the ratio may leave 1 (CISPO: `high` caps the ratio itself);
    delta: another cap of the ratio (inf: none). The flags are 0 or 1: whole_sequence, one ratio a sequence; corrected,
    the KL term times the ratio; has_old, has_reference, has_importance, which rows `tokens` holds after its first two.
    positive, negative: SAPO's temperatures by the advantage's sign; the last four are VESPO's shapes and rates."""

    beta: float = 0.04
    low: float = 0.2
    high: float = 0.2
    delta: float = float("inf")
    whole_sequence: float = 0.0
    corrected: float = 0.0
    has_old: float = 0.0
    has_reference: float = 0.0
    has_importance: float = 0.0
    positive: float = 1.0
    negative: float = 1.05
    k_positive: float = 2.0
    rate_positive: float = 3.0
    k_negative: float = 3.0
    rate_negative: float = 2.0


class Formula(NamedTuple):
    """options: the type of its options. paired: whether chosen and rejected sequences belong together. sequences,
    tokens: how many rows of each it reads at least. evaluate: (log_probs, sequences, tokens, options) -> (sum, slopes).
    """

    options: type
    paired: bool
    sequences: int
    tokens: int
    evaluate: Callable[[Tensor, Tensor, Tensor | None, tuple], tuple[Tensor, Tensor]]


# Pairs: (log-ratio of the chosen, of the rejected, options) -> losses, their derivatives by the one and by the other


def _by_margin(loss: Callable[[Tensor, PairOptions], tuple[Tensor, Tensor]]):
    """A loss of the margin beta · (chosen − rejected) alone, from the loss and its derivative."""

    def of_pair(chosen: Tensor, rejected: Tensor, o: PairOptions) -> tuple[Tensor, Tensor, Tensor]:
        losses, slope = loss(o.beta * (chosen - rejected), o)
        return losses, o.beta * slope, -o.beta * slope

    return of_pair


def _sigmoid(margin: Tensor, o: PairOptions) -> tuple[Tensor, Tensor]:
    margin, flipped = margin - o.gamma, o.label_smoothing
    losses = -(1 - flipped) * logsigmoid(margin) - flipped * logsigmoid(-margin)
    return losses, flipped * torch.sigmoid(margin) - (1 - flipped) * torch.sigmoid(-margin)


def _hinge(margin: Tensor, o: PairOptions) -> tuple[Tensor, Tensor]:
    return torch.relu(1 - margin), -(margin < 1).to(margin.dtype)


def _ipo(margin: Tensor, o: PairOptions) -> tuple[Tensor, Tensor]:
    gap = (margin - 0.5) / o.beta
    return gap.square(), 2 / o.beta * gap


def _exo_pair(margin: Tensor, o: PairOptions) -> tuple[Tensor, Tensor]:
    wins, loses = logsigmoid(margin), logsigmoid(-margin)
    right, wrong = math.log1p(-o.label_smoothing), math.log(o.label_smoothing)
    losses = wins.exp() * (wins - right) + loses.exp() * (loses - wrong)
    return losses, (wins + loses).exp() * (margin - right + wrong)


def _robust(margin: Tensor, o: PairOptions) -> tuple[Tensor, Tensor]:
    flipped, scale = o.label_smoothing, 1 / (1 - 2 * o.label_smoothing)
    losses = scale * (flipped * logsigmoid(-margin) - (1 - flipped) * logsigmoid(margin))
    return losses, -scale * (flipped * torch.sigmoid(margin) + (1 - flipped) * torch.sigmoid(-margin))


def _discopop(margin: Tensor, o: PairOptions) -> tuple[Tensor, Tensor]:
    log_blend, rest, logistic = logsigmoid(margin / o.tau), torch.sigmoid(-margin / o.tau), -logsigmoid(margin)
    blended = torch.exp(log_blend - margin)  # exp(−margin) · blend, of which the one may be infinite, the other 0
    turn = log_blend.exp() * rest / o.tau
    slope = blended * (rest / o.tau - 1) - turn * logistic - rest * torch.sigmoid(-margin)
    return blended + logistic * rest, slope


def _nca_pair(chosen: Tensor, rejected: Tensor, o: PairOptions) -> tuple[Tensor, Tensor, Tensor]:
    a, b = o.beta * chosen, o.beta * rejected
    losses = -logsigmoid(a) - 0.5 * (logsigmoid(-a) + logsigmoid(-b))
    return losses, o.beta * (0.5 * torch.sigmoid(a) - torch.sigmoid(-a)), 0.5 * o.beta * torch.sigmoid(b)


def _bco_pair(chosen: Tensor, rejected: Tensor, o: PairOptions) -> tuple[Tensor, Tensor, Tensor]:
    a, b = o.beta * chosen, o.beta * rejected
    return -logsigmoid(a) - logsigmoid(-b), -o.beta * torch.sigmoid(-a), o.beta * torch.sigmoid(b)


def _sppo_hard(chosen: Tensor, rejected: Tensor, o: PairOptions) -> tuple[Tensor, Tensor, Tensor]:
    a, b = chosen - 0.5 / o.beta, rejected + 0.5 / o.beta
    return a.square() + b.square(), 2 * a, 2 * b


def _apo_zero(chosen: Tensor, rejected: Tensor, o: PairOptions) -> tuple[Tensor, Tensor, Tensor]:
    a, b = o.beta * chosen, o.beta * rejected
    return torch.sigmoid(-a) + torch.sigmoid(b), -o.beta * _bell(a), o.beta * _bell(b)


def _apo_down(chosen: Tensor, rejected: Tensor, o: PairOptions) -> tuple[Tensor, Tensor, Tensor]:
    a, margin = o.beta * chosen, o.beta * (chosen - rejected)
    slope = o.beta * _bell(margin)
    return torch.sigmoid(a) + torch.sigmoid(-margin), o.beta * _bell(a) - slope, slope


SURE = -(2.0**-24)  # a log-probability in fp32 is further from the exact one: log(1 − p) would mean nothing


def _odds_ratio(chosen: Tensor, rejected: Tensor, o: PairOptions) -> tuple[Tensor, Tensor, Tensor]:
    ratio = log_odds(chosen) - log_odds(rejected)
    slope = o.beta * torch.sigmoid(-ratio)
    return -o.beta * logsigmoid(ratio), -slope * _odds_slope(chosen), slope * _odds_slope(rejected)


def log_odds(log_prob: Tensor) -> Tensor:
    """log(p / (1 − p)) of a log-probability, which counts as `SURE` where it is nearer to 0, or rounded to above it."""
    log_prob = log_prob.clamp(max=SURE)
    return log_prob - torch.log(-torch.expm1(log_prob))


def _odds_slope(log_prob: Tensor) -> Tensor:
    """The derivative of `log_odds`."""
    return torch.where(log_prob < SURE, -1 / torch.expm1(log_prob.clamp(max=SURE)), 0.0)


def _bell(x: Tensor) -> Tensor:
    """The derivative of the sigmoid."""
    return torch.sigmoid(x) * torch.sigmoid(-x)


def log_ratios(log_probs: Tensor, sequences: Tensor) -> Tensor:
    """Of each sequence: its log-probabilities' sum times row 0 (1, or 1 / tokens), less row 1, the reference's."""
    return sequences[0] * log_probs.sum(-1) - sequences[1]


def _pairs(loss: Callable[[Tensor, Tensor, PairOptions], tuple[Tensor, Tensor, Tensor]]) -> Formula:
    def evaluate(log_probs: Tensor, sequences: Tensor, tokens: Tensor | None, options: tuple) -> tuple[Tensor, Tensor]:
        chosen, rejected = log_ratios(log_probs, sequences).chunk(2)
        losses, *slopes = loss(chosen, rejected, PairOptions(*options))
        # row 2: weight of the negative log-likelihood, 0 for rejected sequences
        total = losses.sum() - (sequences[2] * log_probs.sum(-1)).sum()
        return total, (sequences[0] * torch.cat(slopes) - sequences[2])[:, None].expand_as(log_probs)

    return Formula(PairOptions, True, 3, 0, evaluate)


# Single sequences


def _kto(log_probs: Tensor, sequences: Tensor, tokens: Tensor | None, options: tuple) -> tuple[Tensor, Tensor]:
    """Rows after the log-ratio's: +1 for a desirable sequence, −1 for an undesirable one; the KL to subtract."""
    weight = options[0] * sequences[2]
    gain = weight * (log_ratios(log_probs, sequences) - sequences[3])
    slopes = -weight * sequences[0] * _bell(gain)
    return torch.sigmoid(-gain).sum(), slopes[:, None].expand_as(log_probs)


# Tokens of a policy


class PolicyTerms(NamedTuple):
    """Of each token: its loss without KL, that loss's derivatives by the ratio and by the log-probability itself, the
    KL estimate, its derivative by the log-probability (both without the ratio), the ratio, whether it is clipped."""

    losses: Tensor
    by_ratio: Tensor
    by_log_prob: Tensor
    kl: Tensor
    kl_slope: Tensor
    ratio: Tensor
    clipped: Tensor


def policy_terms(kind: str, log_probs: Tensor, sequences: Tensor, tokens: Tensor, o: PolicyOptions) -> PolicyTerms:
    """The terms of a policy-gradient loss. sequences: advantages, and for "vespo" the log-importance of the sequences.

    tokens: weights in the loss, mask, then as flagged the old and the reference log-probabilities and the importance.
    """
    live, mask, rest = tokens[0] != 0, tokens[1], iter(tokens[2:])
    old = next(rest) if o.has_old else log_probs.detach()
    reference = next(rest) if o.has_reference else log_probs.detach()
    # tokens that do not count may hold anything, and 0 · exp(anything) may be NaN
    log_ratio = torch.where(live, log_probs - old, 0.0)
    gap = torch.where(live, reference - log_probs, 0.0)
    used = log_ratio
    if o.whole_sequence:
        used = ((log_ratio * mask).sum(-1) / mask.sum(-1).clamp(min=1))[:, None].expand_as(log_ratio)
    ratio, advantage = used.exp(), sequences[0][:, None]
    losses, by_ratio, by_log_prob, clipped = _POLICIES[kind](
        ratio, advantage, log_probs, log_ratio * mask, sequences, o
    )
    if o.has_importance and kind != "vespo":
        importance = torch.where(live, next(rest), 0.0)
        losses, by_ratio, by_log_prob = losses * importance, by_ratio * importance, by_log_prob * importance
    return PolicyTerms(losses, by_ratio, by_log_prob, torch.expm1(gap) - gap, -torch.expm1(gap), ratio, clipped)


def _clip(ratio, advantage, log_probs, log_ratio, sequences, o) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    low, high = 1 - o.low, 1 + o.high
    free, bound = ratio.clamp(max=o.delta) * advantage, ratio.clamp(low, high) * advantage
    inside = (ratio >= low) & (ratio <= high)
    moves = torch.where(free < bound, ratio <= o.delta, torch.where(free > bound, inside, inside & (ratio <= o.delta)))
    clipped = ((ratio < low) & (advantage < 0)) | ((ratio > high) & (advantage > 0))
    return -torch.minimum(free, bound), -advantage * moves, torch.zeros_like(ratio), clipped


def _cispo(ratio, advantage, log_probs, log_ratio, sequences, o) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    weight = -ratio.clamp(max=o.high).detach() * advantage
    return weight * log_probs, torch.zeros_like(ratio), weight, (ratio > o.high) & (advantage > 0)


def _sapo(ratio, advantage, log_probs, log_ratio, sequences, o) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    temperature = _by_sign(advantage > 0, o.positive, o.negative, ratio)
    gate, nothing = temperature * (ratio - 1), torch.zeros_like(ratio)
    return -4 / temperature * torch.sigmoid(gate) * advantage, -4 * _bell(gate) * advantage, nothing, nothing.bool()


def _vespo(ratio, advantage, log_probs, log_ratio, sequences, o) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    log_weight = (log_ratio.detach().clamp(-20, 20).sum(-1) + sequences[1]).clamp(_LEAST, 20)[:, None]
    gains = advantage >= 0
    k = _by_sign(gains, o.k_positive, o.k_negative, ratio)
    rate = _by_sign(gains, o.rate_positive, o.rate_negative, ratio).clamp(min=1e-4)
    phi = (rate + k * log_weight - rate * log_weight.exp()).exp().nan_to_num(nan=0.0, posinf=0.0, neginf=0.0)
    weight, nothing = (-phi * advantage).expand_as(ratio), torch.zeros_like(ratio)
    return weight * log_probs, nothing, weight, nothing.bool()


def _by_sign(condition: Tensor, positive: float, negative: float, like: Tensor) -> Tensor:
    """One number or the other, in the dtype of `like`: `torch.where` of two numbers has PyTorch's default dtype."""
    return torch.where(condition, like.new_full((), positive), like.new_full((), negative))


_LEAST = math.log(1e-8)
_POLICIES = {"clip": _clip, "cispo": _cispo, "sapo": _sapo, "vespo": _vespo}


def _policy(kind: str) -> Formula:
    def evaluate(log_probs: Tensor, sequences: Tensor, tokens: Tensor | None, options: tuple) -> tuple[Tensor, Tensor]:
        o = PolicyOptions(*options)
        t = policy_terms(kind, log_probs, sequences, tokens, o)
        weight, mask = tokens[0], tokens[1]
        scale = o.beta * t.ratio if o.corrected else o.beta
        through_ratio = weight * t.ratio * (t.by_ratio + (o.beta * t.kl if o.corrected else 0.0))
        if o.whole_sequence:
            shares = mask / mask.sum(-1, keepdim=True).clamp(min=1) * (weight != 0)
            through_ratio = through_ratio.sum(-1, keepdim=True) * shares
        slopes = through_ratio + weight * (t.by_log_prob + scale * t.kl_slope)
        return (weight * (t.losses + scale * t.kl)).sum(), slopes

    return Formula(PolicyOptions, False, 2 if kind == "vespo" else 1, 2, evaluate)


FORMULAS: dict[str, Formula] = {
    "sigmoid": _pairs(_by_margin(_sigmoid)),  # DPO, arXiv:2305.18290; CPO, 2401.08417; SimPO, 2405.14734
    "hinge": _pairs(_by_margin(_hinge)),  # SLiC-HF, arXiv:2305.10425; RSO, 2309.06657
    "ipo": _pairs(_by_margin(_ipo)),  # IPO, arXiv:2310.12036
    "exo_pair": _pairs(_by_margin(_exo_pair)),  # EXO, arXiv:2402.00856, equation 16
    "robust": _pairs(_by_margin(_robust)),  # robust DPO, arXiv:2403.00409
    "discopop": _pairs(_by_margin(_discopop)),  # DiscoPOP, arXiv:2406.08414, equation 5
    "nca_pair": _pairs(_nca_pair),  # NCA, arXiv:2402.05369
    "bco_pair": _pairs(_bco_pair),  # BCO, arXiv:2404.04656
    "sppo_hard": _pairs(_sppo_hard),  # SPPO, arXiv:2405.00675
    "apo_zero": _pairs(_apo_zero),  # APO, arXiv:2408.06266, equation 7
    "apo_down": _pairs(_apo_down),  # APO, equation 8
    "odds_ratio": _pairs(_odds_ratio),  # ORPO, arXiv:2403.07691
    "kto": Formula(KTOOptions, False, 4, 0, _kto),  # KTO, arXiv:2402.01306
    "clip": _policy("clip"),  # GRPO, arXiv:2402.03300; DAPO, 2503.14476; Dr. GRPO, 2503.20783; GSPO, 2507.18071
    "cispo": _policy("cispo"),  # CISPO, arXiv:2506.13585
    "sapo": _policy("sapo"),  # SAPO, arXiv:2511.20347
    "vespo": _policy("vespo"),  # VESPO, as TRL's GRPOTrainer weights it
}
