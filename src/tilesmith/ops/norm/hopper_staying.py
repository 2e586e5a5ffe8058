"""Layer norm of the widest rows on Hopper, by programs that stay and keep their part of weight and bias."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from tilesmith.engine import Space, cdiv, next_power_of_2, optimize_kernel, register_kernel
from tilesmith.ops.norm import hopper as norms
from tilesmith.ops.rows_gluon import MOST_PARTS, PartsConfig, fitted

ABOVE = 32_768  # columns; up to there programs that read weight and bias for each row are faster


def _reasons(call: Any) -> list[str]:
    return norms.rows_refused(call, call.x.cols, ABOVE)


def _default(dims: Mapping[str, int], arch: Any, dtype: torch.dtype) -> PartsConfig:
    """H200, bf16, 2**27 values, of the copy rate at 65,536 and 131,072 columns: 0.93 and 0.94; rows started one by one
    0.89 and 0.85. A row ahead of itself, so that what others found is there when it is asked for, 0.90 and 0.90, so by
    two programs a multiprocessor, of 8,192 columns, 0.85 and 0.87."""
    return fitted(dims, arch, PartsConfig(16_384, 0, 16, 1, 128))


def _fit(config: PartsConfig, dims: Mapping[str, int], arch: Any, dtype: torch.dtype) -> PartsConfig:
    """`config` with parts so wide that a cluster can hold a row, and no more slots than shared memory has room for."""
    config = config._replace(width=max(config.width, next_power_of_2(cdiv(dims["cols"], MOST_PARTS))))
    return config._replace(slots=min(config.slots, fitted(dims, arch, config).slots))


@register_kernel("layer_norm", backend="hopper_staying", rank=27, rejects=_reasons)
@optimize_kernel(
    space=Space(
        dims=lambda x, weight, bias, eps: norms.row_dims(x, x), default=_default, choices=norms.CHOICES, fit=_fit
    )
)
def layer_norm(
    x: Tensor, weight: Tensor | None = None, bias: Tensor | None = None, eps: float = 1e-5, *, config: PartsConfig
) -> tuple[Tensor, Tensor, Tensor]:
    """y, mean and rstd of `layer_norm`."""
    y, _, mean, rstd = norms.staying_forward(x, None, weight, bias, eps, True, config)
    return y, mean, rstd
