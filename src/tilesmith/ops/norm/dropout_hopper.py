"""The gradient of dropout_add_norm for wide rows on Hopper: the kernel of hopper.py, with dx dropped out at its end."""

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from tilesmith.engine import Space, optimize_kernel, register_kernel
from tilesmith.ops.norm import hopper as norms
from tilesmith.ops.rows_gluon import PartsConfig


def _reasons(call: Any) -> list[str]:
    reasons = norms._common_reasons(call._replace(seed=None), call.s.cols, norms.BACKWARD_ABOVE[3])
    if call.dy is None or not all(call.output_mask[:2]):
        reasons.append("there is no dy, or dx or dresidual is not wanted; both are always made here, of dy")
    return reasons


@register_kernel("dropout_add_norm_vjp", backend="hopper", rank=25, rejects=_reasons)
@optimize_kernel(
    space=Space(
        dims=lambda dy, ds, s, weight, bias, seed, mean, rstd, p, kind, output_mask: norms._dims(s, dy, ds, s),
        default=norms._backward_default,
        choices=norms.CHOICES,
    )
)
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
    *,
    config: PartsConfig,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """dx, dresidual, dweight and dbias of `dropout_add_norm`."""
    dx = s.new_empty(s.shape, dtype=dy.dtype)
    mean = mean if kind == "layer" else None
    dresidual, dweight, dbias = norms._backward(
        dy, ds, s, weight, bias, mean, rstd, 0.0, output_mask[1:], config, dx, seed, p
    )
    return dx, dresidual, dweight, dbias
