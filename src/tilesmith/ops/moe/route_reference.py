"""How tokens choose their experts, and what balances the choice, in plain PyTorch."""

import torch
from torch import Tensor
from torch.nn import functional as F

from tilesmith.device.accumulation import widened

SCORES = ("softmax", "sigmoid")
GROUP_SCORES = ("top2", "max")


def route(
    logits: Tensor,
    top_k: int,
    bias: Tensor | None = None,
    scores: str = "softmax",
    groups: int = 1,
    kept_groups: int = 1,
    group_score: str = "top2",
    normalise: bool = True,
    scale: float = 1.0,
) -> tuple[Tensor, Tensor]:
    """The experts of each token and their weights.

    logits: [..., E], any floating dtype; computed in fp32 (fp64 for fp64). scores: "softmax" over all experts or
    "sigmoid" of each. The `top_k` experts of the highest scores are chosen; of equal ones, that of the lowest index.
    bias: [E], added to the scores for the choice alone (DeepSeek-V3's correction); it receives no gradient. groups:
    equal parts of the experts, in order, of which only the `kept_groups` of the highest score take part: the sum of a
    group's two highest scores ("top2"), or its highest ("max"). normalise: the weights of a token are divided by their
    sum (plus 1e-20), which for softmax is the softmax over the chosen logits. scale: multiplies the weights.
    A NaN counts as the highest score, above infinity: its weight is NaN, with softmax or `normalise` those of its token
    are too, and indices are valid.

    Returns weights [..., top_k] in fp32 (fp64 for fp64) and indices [..., top_k], int64, by falling score.

    Raises TypeError for dtypes; ValueError for top_k above E or above the experts of the kept groups, groups that do
    not divide E, a shape or device of bias, an unknown name, and a bias that requires a gradient.

    Source: DeepSeek-V3, arXiv:2412.19437 (sigmoid, correction, groups); Fedus et al., arXiv:2101.03961.
    """
    values = _scores(logits, scores)
    indices = _chosen(logits, values, top_k, bias, groups, kept_groups, group_score)
    weights = values.gather(-1, indices)
    if normalise:
        weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
    return weights * scale, indices


def route_vjp(dweights: Tensor, logits: Tensor, indices: Tensor, scores: str, normalise: bool, scale: float) -> Tensor:
    """The gradient of `route`'s logits, [..., E] in their dtype; the choice itself has none."""
    values = _scores(logits, scores)
    chosen = values.gather(-1, indices)
    dchosen = dweights.to(values.dtype) * scale
    if normalise:
        total = chosen.sum(-1, keepdim=True) + 1e-20
        dchosen = (dchosen - (dchosen * chosen).sum(-1, keepdim=True) / total) / total
    dvalues = torch.zeros_like(values).scatter(-1, indices, dchosen)
    if scores == "sigmoid":
        dlogits = dvalues * values * (1 - values)
    else:
        dlogits = values * (dvalues - (dvalues * values).sum(-1, keepdim=True))
    return dlogits.to(logits.dtype).contiguous()


def router_losses(logits: Tensor, indices: Tensor, scores: str = "softmax") -> tuple[Tensor, Tensor]:
    """(load-balancing loss, z-loss) of a router, scalars in fp32 (fp64 for fp64).

    logits: [..., E]; indices: [..., K], the choice for each of the T tokens. The first is E Σ_e f_e p_e, where f_e is
    the number of (token, choice) pairs of e divided by T and p_e the mean over tokens of the softmax, or with "sigmoid"
    of the sigmoid over its sum; it is K where every expert is as likely as another. The second is the mean of
    logsumexp(logits)². Indices outside [0, E) count for no expert. 0 without tokens. f_e has no gradient.

    Raises TypeError for dtypes, ValueError for shapes, devices and an unknown name.

    Source: Fedus et al., arXiv:2101.03961 (load balancing); Zoph et al., arXiv:2202.08906 (z-loss).
    """
    experts, values = logits.shape[-1], widened(logits).reshape(-1, logits.shape[-1])
    tokens = max(1, values.shape[0])
    loads = _loads(indices, experts).to(values.dtype) / tokens
    balance = experts * (loads * _shares(values, scores).sum(0)).sum() / tokens
    return balance, values.logsumexp(-1).square().sum() / tokens


def router_losses_vjp(
    dbalance: Tensor | None, dz_loss: Tensor | None, logits: Tensor, indices: Tensor, scores: str
) -> Tensor:
    """The gradient of `router_losses`' logits, in their shape and dtype, contiguous."""
    experts, values = logits.shape[-1], widened(logits).reshape(-1, logits.shape[-1])
    tokens = max(1, values.shape[0])
    dlogits = torch.zeros_like(values)
    if dbalance is not None:
        loads = _loads(indices, experts).to(values.dtype) * (dbalance * experts / tokens**2)
        shares = _shares(values, scores)
        inner = shares * (loads - (shares * loads).sum(-1, keepdim=True))
        dlogits = inner if scores == "softmax" else inner * (1 - values.sigmoid())
    if dz_loss is not None:
        dlogits = dlogits + (2 * dz_loss / tokens) * values.logsumexp(-1, keepdim=True) * values.softmax(-1)
    return dlogits.to(logits.dtype).reshape(logits.shape)


def _scores(logits: Tensor, scores: str) -> Tensor:
    return widened(logits).softmax(-1) if scores == "softmax" else widened(logits).sigmoid()


def _shares(values: Tensor, scores: str) -> Tensor:
    if scores == "softmax":
        return values.softmax(-1)
    return F.logsigmoid(values).softmax(-1)  # a quotient of sigmoids is 0 / 0 where all are too small for fp32


def _loads(indices: Tensor, experts: int) -> Tensor:
    """Pairs of each expert, [E]."""
    chosen = indices.reshape(-1)
    there = (chosen >= 0) & (chosen < experts)
    chosen = torch.where(there, chosen, experts).long()
    return there.new_zeros(experts + 1, dtype=torch.float32).index_add(0, chosen, there.float())[:experts]


def _chosen(
    logits: Tensor, values: Tensor, top_k: int, bias: Tensor | None, groups: int, kept_groups: int, group_score: str
) -> Tensor:
    # Without a bias the logits are in the same order, and a score that saturates in fp32 does not tie them.
    ranked = widened(logits).detach() if bias is None and kept_groups == groups else values.detach()
    if bias is not None:
        ranked = ranked + bias.to(ranked.dtype)
    if kept_groups < groups:
        parts = ranked.unflatten(-1, (groups, -1))
        best = parts.topk(min(2, parts.shape[-1]), -1).values.sum(-1) if group_score == "top2" else parts.amax(-1)
        kept = best.sort(dim=-1, descending=True, stable=True).indices[..., :kept_groups]
        there = torch.zeros_like(best, dtype=torch.bool).scatter(-1, kept, True)
        ranked = torch.where(there[..., None], parts, -torch.inf).flatten(-2)
    return ranked.sort(dim=-1, descending=True, stable=True).indices[..., :top_k].contiguous()
