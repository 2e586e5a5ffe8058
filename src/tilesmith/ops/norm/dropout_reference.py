"""What dropout_add_norm and its gradient are, in plain PyTorch: the oracle of every kernel, and the path on a CPU."""

from collections.abc import Sequence

import torch
from torch import Tensor

from tilesmith.device import philox
from tilesmith.ops.norm import reference


def dropout_add_norm(
    x: Tensor,
    residual: Tensor,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    seed: Tensor | None = None,
    p: float = 0.0,
    kind: str = "layer",
    eps: float = 1e-5,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """s = dropout(x) + residual and y = norm(s), in one pass: how a residual block with dropout begins or ends.

    x: [..., N], floating. residual: x's shape, in x's dtype or fp32. Elements of x are zeroed with probability p, the
    others divided by 1 - p (p rounded to a multiple of 2⁻¹⁶); the sum is taken in fp32 and rounded once, to residual's
    dtype; y, in x's dtype, is the norm of the rounded s.
    seed: int64 [2] = (seed, offset) on x's device; an element is kept iff the 16 bits that `tilesmith.device.philox`
    draws for its row-major index are at least round(p · 2¹⁶). It may be None for p = 0.
    kind: "layer" is `layer_norm`, "rms" is `rms_norm` with casting="fp32"; a bias goes with "layer" alone.
    weight, bias: [N], floating, or None for 1 and 0.

    Returns (y, s), contiguous. The backward keeps s, the statistics of its rows and the seed, and draws the mask anew:
    ds + the gradient through the norm is residual's, and, masked and divided by 1 - p, x's. With p = 0 the two are
    equal, which `add_rms_norm` and `add_layer_norm` use to write only one.

    Raises TypeError for a dtype that is not floating or a residual in neither x's dtype nor fp32; ValueError for an
    empty or missing last dim, a residual, weight or bias of another shape or device, eps below 0, an unknown kind, a
    bias with "rms", p outside [0, 1), a missing seed with p > 0 or one that is not int64 [2].
    """
    dropped = x.to(torch.promote_types(residual.dtype, torch.float32))
    if p > 0.0:
        dropped = philox.dropout(dropped, seed, p)
    s = (dropped + residual).to(residual.dtype).contiguous()
    if kind == "rms":
        y, rstd = reference.rms_normed(s, x.dtype, weight, eps, 0.0, "fp32")
        return y, s, rstd.new_empty(0), rstd
    y, mean, rstd = reference.layer_normed(s, x.dtype, weight, bias, eps)
    return y, s, mean, rstd


def dropout_add_norm_vjp(
    dy: Tensor | None,
    ds: Tensor | None,
    s: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    seed: Tensor | None,
    mean: Tensor,
    rstd: Tensor,
    p: float,
    kind: str,
    output_mask: Sequence[bool],
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Gradients (dx, dresidual, dweight, dbias) of `dropout_add_norm`; either of dy and ds may be None: zeros.

    dx has dy's dtype, which is x's (s's where dy is None).

    dy, ds: [..., N], the gradients of y and of s. s: [..., N]; mean (layer norm) and rstd: [...]; seed: those of the
    forward. dresidual is that of `add_layer_norm_vjp` or `add_rms_norm_vjp`, in s's dtype; dx is dresidual where the
    dropout kept an element, divided by the probability of that, and 0 elsewhere. dweight, dbias: [N]. An empty tensor
    stands for a gradient that `output_mask` does not ask for.
    """
    wants_dx, wants_dresidual, *wanted = output_mask
    inner = (wants_dx or wants_dresidual, *wanted)
    if kind == "rms":
        both, dweight = reference.rms_gradients(dy, ds, s, weight, rstd, 0.0, inner[:2])
        dbias = s.new_empty(0)
    else:
        both, dweight, dbias = reference.layer_gradients(dy, ds, s, weight, bias, mean, rstd, inner)
    dx, dresidual = s.new_empty(0), s.new_empty(0)
    if wants_dx:
        dx = philox.dropout(both, seed, p) if p > 0.0 else both.clone()
        dx = dx.to(s.dtype if dy is None else dy.dtype).contiguous()
    if wants_dresidual:
        dresidual = both.to(s.dtype).contiguous()
    return dx, dresidual, dweight, dbias
