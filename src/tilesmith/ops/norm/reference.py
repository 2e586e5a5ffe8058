"""What the norms and their gradients are, in plain PyTorch: the oracle of every kernel, and the path on a CPU."""

from collections.abc import Sequence

import torch
from torch import Tensor

from tilesmith.device.accumulation import sum_dtype
from tilesmith.device.rows import empty_row_values, empty_rows, row_order


def rms_norm(
    x: Tensor, weight: Tensor | None = None, eps: float = 1e-6, offset: float = 0.0, casting: str = "fp32"
) -> tuple[Tensor, Tensor]:
    """Root-mean-square normalisation of the last dim: y = x · rstd · (weight + offset).

    rstd = 1 / sqrt(mean(x²) + eps) in fp32 (fp64 for fp64 x), one a row.

    x: [..., N], floating. weight: [N], floating, or None for a factor of 1 (offset then has no effect); for x of
    [..., H, N] also [H, N], one for each head.
    offset: added to weight; 1.0 for models that store the weight around 0, as Gemma does.
    casting: "fp32" computes in fp32 and rounds once, to x's dtype (Gemma, Olmo 2, torch.nn.functional.rms_norm).
    "llama" rounds x · rstd to x's dtype, then multiplies by weight + offset in the dtype x and weight promote to, then
    rounds to x's dtype (Llama and most models after it). "none" rounds to x's dtype after every operation, also those
    that rstd is made of (x², its mean, eps, their sum, the root), as the formula does in PyTorch without a cast.
    It does not affect the gradient, which is that of the formula, computed in fp32 with the rstd of the forward.

    Returns y, of x's shape and dtype. Rows keep the order they have in x's memory and are packed; so y has x's strides
    where x is dense with a last stride of 1, and is contiguous where x is contiguous. dx likewise.

    Raises TypeError for a dtype that is not floating, ValueError for an empty or missing last dim, a weight that is
    neither [N] nor [H, N] or is on another device, eps below 0, or an unknown casting.

    Source: Zhang and Sennrich, Root Mean Square Layer Normalization, arXiv:1910.07467.
    """
    order = row_order(x)
    y, rstd = rms_normed(x, x.dtype, weight, eps, offset, casting)
    return _packed(y, x, order), _packed_row_values(rstd, x, order)


def rms_norm_vjp(
    dy: Tensor, x: Tensor, weight: Tensor | None, rstd: Tensor, offset: float, output_mask: Sequence[bool]
) -> tuple[Tensor, Tensor]:
    """Gradients (dx, dweight) of `rms_norm`; sums over rows are taken in fp32, then rounded to the input's dtype.

    dy: [..., N], the gradient of y, in any floating dtype. x, weight, offset: those of the forward. rstd: [...], which
    it saved. Computed in fp32 (fp64 for fp64 x): with x̂ = x · rstd and g = dy · (weight + offset), dx = (g − x̂ ·
    mean(g · x̂)) · rstd and dweight = Σ dy · x̂ over rows, over those of each head where it is [H, N]. An empty tensor
    stands for a gradient that `output_mask` does not ask for.
    """
    dx, dweight = rms_gradients(dy, None, x, weight, rstd, offset, output_mask)
    return _packed(dx.to(x.dtype), x, row_order(x)) if output_mask[0] else dx, dweight


def layer_norm(
    x: Tensor, weight: Tensor | None = None, bias: Tensor | None = None, eps: float = 1e-5
) -> tuple[Tensor, Tensor, Tensor]:
    """Layer normalisation of the last dim: y = (x − mean) · rstd · weight + bias.

    mean and rstd = 1 / sqrt(mean((x − mean)²) + eps) in fp32 (fp64 for fp64 x), one a row; the variance is taken around
    the mean, so it survives a mean far larger than the deviation. All in fp32, rounded once.

    x: [..., N], floating. weight, bias: [N], floating, or None for 1 and 0.

    Returns y, of x's shape and dtype, in x's memory order as `rms_norm` does.

    Raises TypeError for a dtype that is not floating, ValueError for an empty or missing last dim, a weight or bias
    that is not [N] or is on another device, or eps below 0.

    Source: Ba, Kiros and Hinton, Layer Normalization, arXiv:1607.06450.
    """
    order = row_order(x)
    y, mean, rstd = layer_normed(x, x.dtype, weight, bias, eps)
    return _packed(y, x, order), _packed_row_values(mean, x, order), _packed_row_values(rstd, x, order)


def layer_norm_vjp(
    dy: Tensor,
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    mean: Tensor,
    rstd: Tensor,
    output_mask: Sequence[bool],
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients (dx, dweight, dbias) of `layer_norm`; sums over rows are taken in fp32, then rounded.

    dy: [..., N], the gradient of y, in any floating dtype. x, weight, bias: those of the forward. mean, rstd: [...],
    which it saved. Computed in fp32 (fp64 for fp64 x): with x̂ = (x − mean) · rstd and g = dy · weight, dx = (g −
    mean(g) − x̂ · mean(g · x̂)) · rstd; dweight = Σ dy · x̂ and dbias = Σ dy over rows. An empty tensor stands for a
    gradient that `output_mask` does not ask for.
    """
    dx, dweight, dbias = layer_gradients(dy, None, x, weight, bias, mean, rstd, output_mask)
    return _packed(dx.to(x.dtype), x, row_order(x)) if output_mask[0] else dx, dweight, dbias


def add_rms_norm(
    x: Tensor,
    residual: Tensor,
    weight: Tensor | None = None,
    eps: float = 1e-6,
    offset: float = 0.0,
    casting: str = "fp32",
) -> tuple[Tensor, Tensor, Tensor]:
    """s = x + residual and y = rms_norm(s), in one pass: what a pre-norm transformer does before each block.

    x: [..., N]. residual: x's shape, in x's dtype or fp32. s is rounded to residual's dtype, and y is the norm of the
    rounded s, as two separate ops would give. y has x's dtype, to which the casts of `casting` refer as well.
    weight, eps, offset, casting and memory order: see `rms_norm`; s is laid out as y. weight is [N] here.

    Returns (y, s). x and residual have the same gradient; it is computed in fp32 and rounded to each one's dtype.

    Raises as `rms_norm` does; ValueError too for a residual of another shape or device, TypeError for its dtype.
    """
    order = row_order(x)
    s = (x + residual).to(residual.dtype)
    y, rstd = rms_normed(s, x.dtype, weight, eps, offset, casting)
    return _packed(y, x, order), _packed(s, x, order), _packed_row_values(rstd, x, order)


def add_rms_norm_vjp(
    dy: Tensor | None,
    ds: Tensor | None,
    s: Tensor,
    weight: Tensor | None,
    rstd: Tensor,
    offset: float,
    output_mask: Sequence[bool],
) -> tuple[Tensor, Tensor]:
    """Gradients (dresidual, dweight) of `add_rms_norm`; dx is dresidual. Either of dy and ds may be None: zeros.

    dy, ds: [..., N], the gradients of y and of s. s: [..., N] and rstd: [...], which the forward saved. dresidual = ds
    + the dx of `rms_norm_vjp` at s, computed in fp32 (fp64 for fp64 s), in s's dtype. An empty tensor stands for a
    gradient that `output_mask` does not ask for.
    """
    dresidual, dweight = rms_gradients(dy, ds, s, weight, rstd, offset, output_mask)
    return _packed(dresidual.to(s.dtype), s, row_order(s)) if output_mask[0] else dresidual, dweight


def add_layer_norm(
    x: Tensor, residual: Tensor, weight: Tensor | None = None, bias: Tensor | None = None, eps: float = 1e-5
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """s = x + residual and y = layer_norm(s), in one pass.

    x: [..., N]. residual: x's shape, in x's dtype or fp32. s is rounded to residual's dtype, and y, in x's dtype, is
    the norm of the rounded s, as two separate ops would give. weight, bias, eps and memory order: see `layer_norm`.

    Returns (y, s). x and residual have the same gradient; it is computed in fp32 and rounded to each one's dtype.

    Raises as `layer_norm` does; ValueError too for a residual of another shape or device, TypeError for its dtype.
    """
    order = row_order(x)
    s = (x + residual).to(residual.dtype)
    y, mean, rstd = layer_normed(s, x.dtype, weight, bias, eps)
    stats = _packed_row_values(mean, x, order), _packed_row_values(rstd, x, order)
    return _packed(y, x, order), _packed(s, x, order), *stats


def add_layer_norm_vjp(
    dy: Tensor | None,
    ds: Tensor | None,
    s: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    mean: Tensor,
    rstd: Tensor,
    output_mask: Sequence[bool],
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients (dresidual, dweight, dbias) of `add_layer_norm`; dx is dresidual. dy or ds may be None: zeros.

    dy, ds: [..., N], the gradients of y and of s. s: [..., N] and mean, rstd: [...], which the forward saved. dresidual
    = ds + the dx of `layer_norm_vjp` at s, computed in fp32 (fp64 for fp64 s), in s's dtype. An empty tensor stands for
    a gradient that `output_mask` does not ask for.
    """
    dresidual, dweight, dbias = layer_gradients(dy, ds, s, weight, bias, mean, rstd, output_mask)
    return _packed(dresidual.to(s.dtype), s, row_order(s)) if output_mask[0] else dresidual, dweight, dbias


def rms_normed(
    x: Tensor, y_dtype: torch.dtype, weight: Tensor | None, eps: float, offset: float, casting: str
) -> tuple[Tensor, Tensor]:
    wide = x.to(sum_dtype(x))
    if casting == "none":
        narrow = x.to(y_dtype)
        rstd = torch.rsqrt(narrow.square().mean(-1) + eps).to(wide.dtype)
        wide = narrow.to(wide.dtype)
    else:
        rstd = torch.rsqrt(wide.square().mean(-1) + eps)
    y = wide * rstd.unsqueeze(-1)
    if casting != "fp32":
        y = y.to(y_dtype)
        if weight is not None:
            y = y * (weight.to(torch.promote_types(y_dtype, weight.dtype)) + offset)
    elif weight is not None:
        y = y * (weight.to(wide.dtype) + offset)
    return y.to(y_dtype), rstd


def layer_normed(
    x: Tensor, y_dtype: torch.dtype, weight: Tensor | None, bias: Tensor | None, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    wide = x.to(sum_dtype(x))
    mean = wide.mean(-1)
    centered = wide - mean.unsqueeze(-1)
    rstd = torch.rsqrt(centered.square().mean(-1) + eps)
    y = centered * rstd.unsqueeze(-1)
    if weight is not None:
        y = y * weight
    if bias is not None:
        y = y + bias
    return y.to(y_dtype), mean, rstd


def rms_gradients(
    dy: Tensor | None,
    ds: Tensor | None,
    x: Tensor,
    weight: Tensor | None,
    rstd: Tensor,
    offset: float,
    output_mask: Sequence[bool],
) -> tuple[Tensor, Tensor]:
    acc = sum_dtype(x)
    xhat = x.to(acc) * rstd.unsqueeze(-1)
    dy = torch.zeros_like(xhat) if dy is None else dy.to(acc)
    dx, dweight = x.new_empty(0), x.new_empty(0)
    if output_mask[0]:
        dxhat = dy if weight is None else dy * (weight.to(acc) + offset)
        dx = (dxhat - xhat * (dxhat * xhat).mean(-1, keepdim=True)) * rstd.unsqueeze(-1)
        dx = dx if ds is None else dx + ds
    if output_mask[1]:
        dweight = _sum_rows(dy * xhat, weight.dtype, weight.ndim)
    return dx, dweight


def layer_gradients(
    dy: Tensor | None,
    ds: Tensor | None,
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    mean: Tensor,
    rstd: Tensor,
    output_mask: Sequence[bool],
) -> tuple[Tensor, Tensor, Tensor]:
    acc = sum_dtype(x)
    xhat = (x.to(acc) - mean.unsqueeze(-1)) * rstd.unsqueeze(-1)
    dy = torch.zeros_like(xhat) if dy is None else dy.to(acc)
    dx, dweight, dbias = x.new_empty(0), x.new_empty(0), x.new_empty(0)
    if output_mask[0]:
        dxhat = dy if weight is None else dy * weight
        dx = dxhat - dxhat.mean(-1, keepdim=True) - xhat * (dxhat * xhat).mean(-1, keepdim=True)
        dx = dx * rstd.unsqueeze(-1)
        dx = dx if ds is None else dx + ds
    if output_mask[1]:
        dweight = _sum_rows(dy * xhat, weight.dtype)
    if output_mask[2]:
        dbias = _sum_rows(dy, bias.dtype)
    return dx, dweight, dbias


def _sum_rows(x: Tensor, dtype: torch.dtype, kept: int = 1) -> Tensor:
    """The sum over all dims but the last `kept`."""
    return x.unsqueeze(0).sum(list(range(x.ndim + 1 - kept))).to(dtype)


def _packed(value: Tensor, x: Tensor, order: tuple[int, ...] | None) -> Tensor:
    out = empty_rows(x, order, value.dtype)
    return value if value.stride() == out.stride() else out.copy_(value)


def _packed_row_values(value: Tensor, x: Tensor, order: tuple[int, ...] | None) -> Tensor:
    out = empty_row_values(x, order, value.dtype)
    return value if value.stride() == out.stride() else out.copy_(value)
