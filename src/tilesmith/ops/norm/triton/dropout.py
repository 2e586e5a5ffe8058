"""dropout_add_norm in Triton: the norm kernels of triton/norm.py, with dropout of x on load and of dx on store."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from tilesmith.device.dropout import dropout_flags, kernel_numbers, kernel_seed
from tilesmith.engine import Space, optimize_kernel, register_kernel, rehearsed
from tilesmith.ops.norm.arguments import (
    dropout_add_norm_arguments,
    dropout_add_norm_vjp_arguments,
    gradient_of,
    norm_of,
)
from tilesmith.ops.norm.triton import norm as norms


def _dropout(seed: Tensor | None, p: float, like: Tensor) -> dict[str, Any]:
    """The kernels' arguments for a dropout; none for p = 0."""
    if p == 0.0:
        return {}
    drop_below, keep_scale = kernel_numbers(p)
    cols = like.shape[-1]
    flags = dropout_flags(like.numel() // cols, cols, like.element_size())
    return {"seed_ptr": kernel_seed(seed, p), "drop_below": drop_below, "keep_scale": keep_scale, **flags}


def _default(dims: Mapping[str, int], arch: Any, dtype: torch.dtype) -> norms.ForwardConfig:
    """That of the norms, but 64 elements per thread at 16,384 columns: layer norm takes 263 µs in place of 296 (H200,
    bf16, 8,192 rows), RMS norm as long as before."""
    config = norms.forward_default(dims, arch, swept_from=norms.MAX_HELD)
    if config.tile == 16_384 and not config.block_cols and dtype.itemsize == 2:
        return config._replace(num_warps=max(1, config.tile // 64 // max(arch.warp, 16)))
    return config


def _reasons(call: Any) -> list[str]:
    return norms.norm_reasons(call._replace(seed=None))


@register_kernel(
    "dropout_add_norm",
    backend="triton",
    rank=20,
    rejects=_reasons,
    tells=dropout_add_norm_arguments(norms.forward_tells),
    plans=rehearsed,
)
@optimize_kernel(
    space=Space(
        dims=lambda x, residual, weight, bias, seed, p, kind, eps: norms.norm_dims(x, x, residual, weight, bias),
        default=_default,
        choices=norms.FORWARD_CHOICES,
    )
)
@dropout_add_norm_arguments
def dropout_add_norm(call, *, config: norms.ForwardConfig) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """y, s, mean and rstd of `dropout_add_norm`."""
    norm = norm_of(call)
    y, s, mean, rstd = norms.forward(norm, config, **_dropout(norm.seed, norm.p, norm.x))
    return y, s, rstd.new_empty(0) if mean is None else mean, rstd


def _vjp_default(dims: Mapping[str, int], arch: Any, dtype: torch.dtype) -> norms.BackwardConfig:
    """That of add_layer_norm and add_rms_norm, but 16 elements a thread and 256 threads a multiprocessor for layer norm
    of 1,024, 2,048 and 4,096 columns: 0.94, 0.95 and 0.96 of the copy rate (H200, bf16), with 8 elements 0.93, 0.94 and
    0.92. RMS norm gains nothing from it."""
    config = norms.backward_default(dims, arch, dims["sums"] == 2, three=True)
    if dims["sums"] == 2 and not config.block_cols and 1024 <= config.tile <= 4096:
        threads = config.tile // 16
        return config._replace(
            num_warps=max(1, threads // max(arch.warp, 16)), programs=256 // threads * max(arch.sms, 1)
        )
    return config


def _vjp_dims(dy: Tensor | None, ds: Tensor | None, s: Tensor, weight: Tensor | None, kind: str) -> dict[str, int]:
    return {**norms.norm_dims(s, dy, ds, s, weight), "sums": 2 if kind == "layer" else 1}


@register_kernel(
    "dropout_add_norm_vjp",
    backend="triton",
    rank=20,
    rejects=_reasons,
    tells=dropout_add_norm_vjp_arguments(norms.backward_tells),
    plans=rehearsed,
)
@optimize_kernel(
    space=Space(
        dims=lambda dy, ds, s, weight, bias, seed, mean, rstd, p, kind, output_mask: _vjp_dims(dy, ds, s, weight, kind),
        default=_vjp_default,
        choices=norms.BACKWARD_CHOICES,
    )
)
@dropout_add_norm_vjp_arguments
def dropout_add_norm_vjp(call, *, config: norms.BackwardConfig) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """dx, dresidual, dweight and dbias of `dropout_add_norm`."""
    norm, s = gradient_of(call), call.s
    wants_dx, wants_dresidual, wants_dweight, wants_dbias = call.output_mask
    dx = s.new_empty(s.shape, dtype=s.dtype if norm.dy is None else norm.dy.dtype) if wants_dx else None
    dresidual = s.new_empty(s.shape) if wants_dx or wants_dresidual else None
    dweight = torch.empty_like(norm.weight, memory_format=torch.contiguous_format) if wants_dweight else None
    dbias = torch.empty_like(norm.bias, memory_format=torch.contiguous_format) if wants_dbias else None
    if norm.dy is None:  # only s was used
        norm = norm._replace(dy=torch.zeros_like(s))
    dropout = {} if dx is None else {"dropped_ptr": dx, **_dropout(call.seed, call.p, s)}
    norms.launch_backward(norm, (dresidual, dweight, dbias), None, config, **dropout)
    found = (dx, dresidual if wants_dresidual else None, dweight, dbias)
    return tuple(s.new_empty(0) if t is None else t for t in found)
