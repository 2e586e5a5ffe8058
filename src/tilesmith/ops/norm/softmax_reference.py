"""What softmax, its dropout and their gradients are, in plain PyTorch: the oracle of every kernel, and the CPU path."""

import torch
from torch import Tensor

from tilesmith.device import philox
from tilesmith.device.accumulation import widened
from tilesmith.device.rows import empty_rows, row_order


def softmax(x: Tensor, scale: float = 1.0, causal: bool = False) -> Tensor:
    """Softmax of the last dim: y = exp(scale · x) / sum(exp(scale · x)).

    Computed in fp32 (fp64 for fp64 x) around each row's maximum, and rounded once, to x's dtype.

    x: [..., N], floating; with `causal` [..., T, S]. scale: a factor of x, applied in fp32. causal: row t sees the
    columns j <= t + S - T (the last row sees all, as in attention); y is 0 in the others, whatever x holds there, and
    a row that sees none is 0. A row of -inf alone, or one that holds NaN or +inf, is NaN, as in torch.softmax.

    Returns y, of x's shape and dtype. Rows keep the order they have in x's memory and are packed; so y has x's strides
    where x is dense with a last stride of 1, and is contiguous where x is contiguous. dx likewise.

    The backward keeps y alone: dx = scale · y · (dy - sum(y · dy) / sum(y)). Dividing by the sum of the rounded y
    keeps dx right where y is near 1, where rounding y to 16 bits would otherwise be all of dx.

    Raises TypeError for a dtype that is not floating, ValueError for an empty or missing last dim, or for `causal` with
    fewer than two dims.
    """
    visible = _visible(x, causal)
    y = _hidden_zero(torch.softmax(_scores(x, scale, visible), -1), visible)
    return _packed(y.to(x.dtype), x)


def softmax_vjp(dy: Tensor, y: Tensor, scale: float, causal: bool) -> Tensor:
    """Gradient of `softmax`: dx, in y's dtype and memory order. With `causal`, hidden elements of dy do not count.

    dy: [..., N], the gradient of y. y: [..., N], the forward's result. Computed in fp32 (fp64 for fp64): dx = scale · y
    · (dy − Σ dy · y / Σ y), where the sums run over the last dim; dividing by Σ y takes up the rounding of y.
    """
    visible = _visible(y, causal)
    wide, dy = widened(y), _hidden_zero(widened(dy), visible)
    return _packed(_pull(dy, wide, scale, visible).to(y.dtype), y)


def softmax_dropout(
    x: Tensor, seed: Tensor | None = None, p: float = 0.0, scale: float = 1.0, causal: bool = False
) -> tuple[Tensor, Tensor, Tensor]:
    """dropout(softmax(x)): elements are zeroed with probability p, the others divided by 1 - p, then rounded once.

    x, scale, causal: see `softmax`. p: in [0, 1), rounded to a multiple of 2⁻¹⁶. seed: int64 [2] = (seed, offset) on
    x's device; an element is kept iff the 16 bits that `tilesmith.device.philox` draws for its row-major index are at
    least round(p · 2¹⁶). It may be None for p = 0.

    Returns out, contiguous, of x's shape and dtype. Beside x and the seed, the backward keeps two fp32 values a row,
    the maximum of scale · x and the sum of exponentials: it recomputes the probabilities and the mask, so that
    neither is stored, and the forward writes nothing but out.

    Raises as `softmax` does; ValueError too for p outside [0, 1), a missing seed with p > 0 or one that is not
    int64 [2] on x's device.
    """
    visible = _visible(x, causal)
    scores = _scores(x, scale, visible)
    top = scores.amax(-1, keepdim=True)
    weights = _hidden_zero(torch.exp(scores - top), visible)
    total = weights.sum(-1, keepdim=True)
    out = _hidden_zero(weights / total, visible)
    if p > 0.0:
        out = philox.dropout(out, seed, p)
    return out.to(x.dtype).contiguous(), top.squeeze(-1).contiguous(), total.squeeze(-1).contiguous()


def softmax_dropout_vjp(
    dout: Tensor, x: Tensor, seed: Tensor | None, top: Tensor, total: Tensor, p: float, scale: float, causal: bool
) -> Tensor:
    """Gradient of `softmax_dropout`: dx, contiguous, in x's dtype.

    dout: [..., N], the gradient of the result. x, seed, p, scale, causal: those of the forward. top, total: [...],
    fp32, which it saved: the maximum of scale · x and the sum of exponentials of each row. The weights and the mask are
    computed again: with y = exp(scale · x − top) / total and g = dout · mask / (1 − p), dx = scale · y · (g − Σ g · y).
    """
    visible = _visible(x, causal)
    weights = torch.exp(_scores(x, scale, visible) - top.unsqueeze(-1))
    y = _hidden_zero(weights / total.unsqueeze(-1), visible)
    dy = _hidden_zero(widened(dout), visible)
    if p > 0.0:
        dy = philox.dropout(dy, seed, p)
    return _pull(dy, y, scale, visible).to(x.dtype).contiguous()


def _pull(dy: Tensor, y: Tensor, scale: float, visible: Tensor | None) -> Tensor:
    mean = (dy * y).sum(-1, keepdim=True) / y.sum(-1, keepdim=True)
    return _hidden_zero(scale * y * (dy - mean), visible)


def _scores(x: Tensor, scale: float, visible: Tensor | None) -> Tensor:
    scores = widened(x) * scale
    return scores if visible is None else torch.where(visible, scores, float("-inf"))


def _visible(x: Tensor, causal: bool) -> Tensor | None:
    """[T, S]: which columns each row sees; None for all."""
    if not causal:
        return None
    tokens, keys = x.shape[-2:]
    return torch.ones(tokens, keys, dtype=torch.bool, device=x.device).tril(keys - tokens)


def _hidden_zero(value: Tensor, visible: Tensor | None) -> Tensor:
    return value if visible is None else torch.where(visible, value, 0.0)


def _packed(value: Tensor, x: Tensor) -> Tensor:
    out = empty_rows(x, row_order(x), value.dtype)
    return value if value.stride() == out.stride() else out.copy_(value)
