"""What attention's weights and row statistics mean, in plain PyTorch.

Legend: B batch, T query tokens, S key tokens, H query heads, G kv heads (H % G == 0), D head dim.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from tilesmith.device.accumulation import sum_dtype
from tilesmith.ops.attn.reference import scale_of


def attention_weights(q: Tensor, k: Tensor, lse: Tensor, scale: float | None = None, causal: bool = False) -> Tensor:
    """The softmax weights that `attention` leaves as `lse`: exp(scale q . k - lse), whole in memory.

    Args:
        q: [B, H, T, D], fp64, fp32, fp16 or bf16, any strides.
        k: [B, G, S, D] of q's dtype; query head h reads head h // (H // G).
        lse: [B, H, T], fp32 (fp64 for fp64), as `attention` returns it for the same q, k, scale and causal.
        scale: factor of q . k; 1 / sqrt(D) if None.
        causal: query i sees the keys up to i + S - T only; others get 0.

    Returns [B, H, T, S], contiguous, in q's dtype, computed in fp32 (fp64) and rounded once. Rows sum to 1; a row that
    sees no key (lse -inf) is 0. Gradients flow to q, k and lse; through lse they reach q and k a second time, which
    together is the gradient of the softmax: an lse without a gradient counts as a constant.

    Raises ValueError or TypeError, naming the argument, for shapes, dtypes, devices and numbers that do not fit.
    """
    scores = _scores(q, k, scale, causal)
    return _probabilities(scores, lse).to(q.dtype).contiguous()


def attention_weights_vjp(
    dweights: Tensor,
    q: Tensor,
    k: Tensor,
    lse: Tensor,
    scale: float | None,
    causal: bool,
    output_mask: Sequence[bool],
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients (dq, dk, dlse) of `attention_weights`, contiguous; an empty tensor where ``output_mask`` is False."""
    acc = sum_dtype(q)
    scores = _scores(q, k, scale, causal)
    ds = _probabilities(scores, lse) * dweights.to(acc)
    factor = scale_of(q, scale)
    group = q.shape[1] // k.shape[1]
    dq, dk, dlse = q.new_empty(0), k.new_empty(0), lse.new_empty(0)
    if output_mask[0]:
        dq = (ds @ _heads(k.to(acc), group) * factor).to(q.dtype).contiguous()
    if output_mask[1]:
        every = ds.transpose(-1, -2) @ q.to(acc) * factor
        dk = every.unflatten(1, (-1, group)).sum(2).to(k.dtype).contiguous()
    if output_mask[2]:
        dlse = -ds.sum(-1).to(lse.dtype)
    return dq, dk, dlse


def attention_stats(q: Tensor, k: Tensor, scale: float | None = None, causal: bool = False) -> tuple[Tensor, Tensor]:
    """The largest scaled score of each row, m, and the row's sum of exp(score - m), l; together they give lse.

    q, k, scale, causal: see `attention_weights`. Returns m and l, [B, H, T], contiguous, fp32 (fp64 for fp64), so that
    m + log(l) = lse and 1 <= l <= S. A row that sees no key has m = -inf and l = 0. Raises as `attention_weights` does.
    """
    scores = _scores(q, k, scale, causal)
    if scores.shape[-1] == 0:
        empty = scores.new_zeros(scores.shape[:-1])
        return empty - float("inf"), empty
    top = scores.amax(-1)
    base = torch.where(top != float("-inf"), top, 0.0)
    return top, torch.exp(scores - base.unsqueeze(-1)).sum(-1)


def _heads(k: Tensor, group: int) -> Tensor:
    return k.repeat_interleave(group, 1)


def _scores(q: Tensor, k: Tensor, scale: float | None, causal: bool) -> Tensor:
    """Scaled scores [B, H, T, S], -inf where not visible."""
    acc, group = sum_dtype(q), q.shape[1] // k.shape[1]
    factor = scale_of(q, scale)
    scores = q.to(acc) @ _heads(k.to(acc), group).transpose(-1, -2) * factor
    if not causal:
        return scores
    tokens, keys = scores.shape[-2:]
    query, key = torch.arange(tokens, device=q.device), torch.arange(keys, device=q.device)
    return torch.where(key <= query[:, None] + (keys - tokens), scores, float("-inf"))


def _probabilities(scores: Tensor, lse: Tensor) -> Tensor:
    lse = lse.to(scores.dtype).unsqueeze(-1)
    seen = (scores != float("-inf")) & (lse != float("-inf"))
    return torch.where(seen, torch.exp(torch.where(seen, scores - lse, 0.0)), 0.0)
