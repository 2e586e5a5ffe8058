"""What dropout of a biased tensor means, in plain PyTorch.

Which elements survive follows from `seed` and their linear index alone (`tilesmith.device.philox`), so a backward draws
them again and no mask is saved.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from tilesmith.device import philox


def bias_dropout(x: Tensor, bias: Tensor | None = None, seed: Tensor | None = None, p: float = 0.0) -> Tensor:
    """dropout(x + bias): an element is zeroed with probability p, else divided by 1 - p.

    Args:
        x: [..., F], floating, any strides.
        bias: [F], floating, or None.
        seed: int64 [2] = (seed, offset); needed where p > 0.
        p: in [0, 1), rounded to a multiple of 2^-16. With 0 nothing is dropped.

    An element survives where the 16 bits that `tilesmith.device.philox` draws for its row-major index in x's shape are
    at least round(p 2^16). It is divided by the exact probability of that. Computed in at least float32 and rounded
    once; only bias and seed are saved. dbias is summed over rows in float32 (float64 for float64), in a fixed order.

    Returns a contiguous tensor of x's shape and dtype. Source: Srivastava et al., "Dropout", JMLR 15 (2014).

    Raises TypeError for dtypes that are not floating; ValueError for a bias that is not [F], tensors on several
    devices, p outside [0, 1), a missing seed with p > 0 or one that is not int64 [2].
    """
    return _of_its_own(_dropped(x, bias, seed, p), x)


def bias_dropout_vjp(
    dout: Tensor, bias: Tensor | None, seed: Tensor | None, p: float, output_mask: Sequence[bool]
) -> tuple[Tensor, Tensor]:
    """Gradients of `bias_dropout`: (dx in dout's dtype, dbias), contiguous; empty where ``output_mask`` is False.

    dout: [..., F], floating. dx is dout where the dropout kept an element, divided by the probability of that, and 0
    elsewhere. dbias: [F], the sum of dx over rows in fp32 (fp64 for fp64), in bias's dtype.
    """
    return _dropped_vjp(dout, bias, seed, p, output_mask)


def bias_dropout_residual(
    x: Tensor, residual: Tensor, bias: Tensor | None = None, seed: Tensor | None = None, p: float = 0.0
) -> Tensor:
    """residual + dropout(x + bias), in one pass.

    Args:
        x, residual: [..., F] of one shape and dtype, floating, any strides.
        bias, seed, p: as in `bias_dropout`; the same seed drops the same elements.

    Returns a contiguous tensor of x's shape and dtype, rounded once. The gradient of residual is that of the result.

    Raises as `bias_dropout` does; ValueError too for a residual of another shape, dtype or device.

    Source: Megatron-LM's fused bias, dropout and addition, Shoeybi et al., arXiv:1909.08053.
    """
    return (_dropped(x, bias, seed, p) + residual).to(x.dtype).contiguous()


def bias_dropout_residual_vjp(
    dout: Tensor, bias: Tensor | None, seed: Tensor | None, p: float, output_mask: Sequence[bool]
) -> tuple[Tensor, Tensor]:
    """Gradients of `bias_dropout_residual`: (dx, dbias), as of `bias_dropout`; dresidual is dout itself.

    dout: [..., F], floating. dx: [..., F], in dout's dtype; dbias: [F], in bias's dtype. An empty tensor stands for a
    gradient that `output_mask` does not ask for.
    """
    return _dropped_vjp(dout, bias, seed, p, output_mask)


def _dropped(x: Tensor, bias: Tensor | None, seed: Tensor | None, p: float) -> Tensor:
    acc = torch.promote_types(x.dtype, torch.float32)
    wide = x.to(acc) if bias is None else x.to(acc) + bias.to(acc)
    return wide if p == 0.0 else philox.dropout(wide, seed, p)


def _dropped_vjp(
    dout: Tensor, bias: Tensor | None, seed: Tensor | None, p: float, output_mask: Sequence[bool]
) -> tuple[Tensor, Tensor]:
    dx = _dropped(dout, None, seed, p)
    dbias = dx.unsqueeze(0).sum(list(range(dx.ndim))).to(bias.dtype) if output_mask[1] else dout.new_empty(0)
    return _of_its_own(dx, dout) if output_mask[0] else dout.new_empty(0), dbias


def _of_its_own(dropped: Tensor, x: Tensor) -> Tensor:
    """The result in x's dtype, contiguous; a copy where nothing was done to x: an op returns no argument."""
    out = dropped.to(x.dtype).contiguous()
    return out.clone() if out is x else out
