"""dropout_add_norm on Hopper: the kernels of hopper/norm.py, with dropout of x on load and of dx on store."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from tilesmith.device.gluon.rows import NARROWEST, PartsConfig, fitted
from tilesmith.device.gluon.rows_held import HELD_CHOICES, HeldConfig, held_config, held_fit
from tilesmith.engine import Space, optimize_kernel, register_kernel, rehearsed
from tilesmith.ops.norm.arguments import (
    dropout_add_norm_arguments,
    dropout_add_norm_vjp_arguments,
    gradient_of,
    norm_of,
)
from tilesmith.ops.norm.hopper import norm as norms


def _reasons(call: Any) -> list[str]:
    return norms.rows_refused(call._replace(seed=None), call.x.cols, ABOVE)


ABOVE = 2048  # columns; up to there Triton's kernels are as fast


def _default(dims: Mapping[str, int], arch: Any, dtype: torch.dtype) -> HeldConfig:
    """H200, bf16, of the copy rate (Triton's) at 4,096, 8,192, 16,384, 32,768 and 65,536 columns: layer norm 0.97
    (0.94), 0.97 (0.95), 0.97 (0.96), 0.97 and 0.95, RMS norm 0.97 (0.97), 0.97 (0.96), 0.96 (0.96), 0.96 (0.92) and
    0.96. Wider rows of 16 bits are for hopper_persistent."""
    cols, size = dims["cols"], dims["size"]
    if cols <= 8192:
        return held_config(cols, size, 6 if cols <= 6144 else 4, 4, 0)
    return held_config(cols, size, 4, 8 if cols <= 65_536 else 16, 64)


@register_kernel(
    "dropout_add_norm",
    backend="hopper",
    rank=25,
    rejects=_reasons,
    tells=dropout_add_norm_arguments(norms.forward_tells),
    plans=rehearsed,
)
@optimize_kernel(
    space=Space(
        dims=lambda x, residual, weight, bias, seed, p, kind, eps: norms.row_dims(x, x, residual),
        default=_default,
        choices=HELD_CHOICES,
        fit=held_fit,
    )
)
@dropout_add_norm_arguments
def dropout_add_norm(call, *, config: HeldConfig) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """y, s, mean and rstd of `dropout_add_norm`."""
    y, s, mean, rstd = norms.forward(norm_of(call), config)
    return y, s, rstd.new_empty(0) if mean is None else mean, rstd


def _vjp_reasons(call: Any) -> list[str]:
    cols, center = call.s.cols, call.kind == "layer"
    reasons = norms.rows_refused(call._replace(seed=None), cols, NARROWEST - 1)
    if cols <= (4096 if center else 8192) and cols % NARROWEST:
        reasons.append(f"rows have {cols} columns; so few are supported in multiples of {NARROWEST}")
    if center and cols <= 4096 and call.s.dtype == torch.float32:
        reasons.append(f"layer norm of {cols} columns of float32; Triton's kernel was not slower")
    if call.dy is None or not all(call.output_mask[:2]):
        reasons.append("there is no dy, or dx or dresidual is not wanted; both are always made here, of dy")
    return reasons


def _vjp_default(dims: Mapping[str, int], arch: Any, dtype: torch.dtype) -> PartsConfig:
    """A default for the backward: fewer pipeline stages than fit, since with more of them stores wait behind loads of
    later rows. Where 32 columns per thread leave registers for it (the kernel's EARLY), random bits are generated while
    the cluster exchanges sums: layer norm of 131,072 columns then reaches 0.94 of the copy rate in place of 0.89 (H200,
    bf16). More figures: docs/log/norms.md."""
    cols, center = dims["cols"], dims["sums"] == 2
    each, registers = 16, 128
    if cols > 57_344:
        width, slots, each, registers = 8192, 2, 32, 255
    elif cols > 32_768 and not center:
        width, slots = 8192, 4
    elif cols > 16_384:
        width, slots = 4096, 2
    elif center:
        width, slots = (2048, 2) if cols > 4096 else (NARROWEST, 1)
    elif cols > 8192:
        width, slots, each, registers = 2048, 2, 32, 255
    else:
        width, slots = 2048 if cols % 2048 == 0 else NARROWEST, 1
    config = PartsConfig(width, 0, width // (32 * each), 8192 // width, registers)
    return norms.slotted(fitted(dims, arch, config), slots)


def _vjp_dims(dy: Tensor | None, ds: Tensor | None, s: Tensor, kind: str) -> dict[str, int]:
    return {**norms.row_dims(s, dy, ds, s), "sums": 2 if kind == "layer" else 1}


@register_kernel(
    "dropout_add_norm_vjp",
    backend="hopper",
    rank=25,
    rejects=_vjp_reasons,
    tells=dropout_add_norm_vjp_arguments(norms.backward_tells),
    plans=rehearsed,
)
@optimize_kernel(
    space=Space(
        dims=lambda dy, ds, s, weight, bias, seed, mean, rstd, p, kind, output_mask: _vjp_dims(dy, ds, s, kind),
        default=_vjp_default,
        choices=norms.CHOICES,
    )
)
@dropout_add_norm_vjp_arguments
def dropout_add_norm_vjp(call, *, config: PartsConfig) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """dx, dresidual, dweight and dbias of `dropout_add_norm`."""
    dx = call.s.new_empty(call.s.shape, dtype=call.dy.dtype)
    early = config.max_registers > 128
    found = norms.backward(gradient_of(call), config, dx, call.seed, call.p, early)
    return dx, *found
