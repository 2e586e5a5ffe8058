"""dropout_add_norm of wide rows on Hopper: hopper.py, with x dropped out on its way in and dx on its way out."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from tilesmith.engine import Space, optimize_kernel, register_kernel
from tilesmith.ops.norm import hopper as norms
from tilesmith.ops.rows import row_order
from tilesmith.ops.rows_gluon import MOST_PARTS, PartsConfig, fitted


def _reasons(call: Any) -> list[str]:
    return norms.rows_refused(call._replace(seed=None), call.x.cols, ABOVE[call.kind])


ABOVE = {"layer": 16_384, "rms": 32_768}  # columns; up to there Triton's kernels are as fast


def _default(dims: Mapping[str, int], arch: Any, dtype: torch.dtype) -> PartsConfig:
    """H200, bf16, 2**27 values, of the copy rate: layer norm at 16,384, 32,768, 65,536 and 131,072 columns 0.90, 0.89,
    0.89 and 0.92, RMS norm at 65,536 and 131,072 0.91 and 0.90; Triton's 0.96, 0.86, 0.84 and 0.78, and 0.87 and 0.78.
    At 131,072 clusters of 16 programs leave multiprocessors alone: layer norm 0.87."""
    wide = dims["cols"] > MOST_PARTS * 4096
    return fitted(dims, arch, PartsConfig(16_384, 0, 8, 1, 255) if wide else PartsConfig(8192, 0, 8, 2, 128))


@register_kernel("dropout_add_norm", backend="hopper", rank=25, rejects=_reasons)
@optimize_kernel(
    space=Space(
        dims=lambda x, residual, weight, bias, seed, p, kind, eps: norms.row_dims(x, x, residual),
        default=_default,
        choices=norms.CHOICES,
    )
)
def dropout_add_norm(
    x: Tensor,
    residual: Tensor,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    seed: Tensor | None = None,
    p: float = 0.0,
    kind: str = "layer",
    eps: float = 1e-5,
    *,
    config: PartsConfig,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """y, s, mean and rstd of `dropout_add_norm`."""
    if row_order(x) is not None:  # the index that the mask counts by is that of a contiguous tensor
        x = x.contiguous()
    y, s, mean, rstd = norms.staying_forward(x, residual, weight, bias, eps, kind == "layer", config, seed, p)
    return y, s, rstd.new_empty(0) if mean is None else mean, rstd


def _vjp_reasons(call: Any) -> list[str]:
    reasons = norms.rows_refused(call._replace(seed=None), call.s.cols, norms.BACKWARD_ABOVE[3])
    if call.dy is None or not all(call.output_mask[:2]):
        reasons.append("there is no dy, or dx or dresidual is not wanted; both are always made here, of dy")
    return reasons


@register_kernel("dropout_add_norm_vjp", backend="hopper", rank=25, rejects=_vjp_reasons)
@optimize_kernel(
    space=Space(
        dims=lambda dy, ds, s, weight, bias, seed, mean, rstd, p, kind, output_mask: norms.row_dims(s, dy, ds, s),
        default=norms.backward_default,
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
    dresidual, dweight, dbias = norms.backward(
        dy, ds, s, weight, bias, mean, rstd, 0.0, output_mask[1:], config, dx, seed, p
    )
    return dx, dresidual, dweight, dbias
