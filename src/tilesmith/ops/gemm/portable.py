"""Portable kernels of the gemm family."""

import torch
from torch import Tensor

from tilesmith.device import portable
from tilesmith.engine import register_kernel
from tilesmith.kernels.fused_ops import NormLinearConfig, create_norm_linear_kernel
from tilesmith.kernels.rows import MAX_GROUPS, vector_lanes
from tilesmith.ops.gemm import reference
from tilesmith.ops.gemm.reference import flat

BELOW_LIBRARY = 3  # a library's product, where there is one, has matrix units; this kernel has none


def _reasons(call) -> list[str]:
    return portable.reasons(call, "x", "weight", "bias", "norm_weight", "norm_bias")


@register_kernel("norm_linear", backend="portable", rank=BELOW_LIBRARY, rejects=_reasons)
def norm_linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    norm_weight: Tensor | None = None,
    norm_bias: Tensor | None = None,
    kind: str = "rms",
    eps: float = 1e-6,
    offset: float = 0.0,
) -> tuple[Tensor, Tensor, Tensor]:
    """Tiles of 32 rows by 64 outputs, sixteen sums a thread; every tile normalises its rows anew."""
    columns, outputs = x.shape[-1], weight.shape[0]
    if x.numel() == 0 or outputs == 0:  # nothing to multiply, at most statistics
        return reference.norm_linear(x, weight, bias, norm_weight, norm_bias, kind, eps, offset)
    rows, lanes = flat(x), vector_lanes(columns)
    y = x.new_empty((*x.shape[:-1], outputs))
    rstd = x.new_empty(x.shape[:-1], dtype=torch.float32)
    mean = rstd.new_empty((*x.shape[:-1], 0)) if kind == "rms" else torch.empty_like(rstd)
    has = {"bias": bias is not None, "norm_weight": norm_weight is not None, "norm_bias": norm_bias is not None}
    config = NormLinearConfig(columns, outputs, kind, **portable.storage(x), **has)
    vectors = {"norm_weight": norm_weight, "norm_bias": norm_bias}
    given = {name: v.to(torch.float32).contiguous() for name, v in vectors.items() if v is not None}
    given["weight"] = weight.to(x.dtype).contiguous()
    tensors = {name: portable.flat(v, lanes)[0] for name, v in given.items()}
    if bias is not None:
        tensors["bias"] = bias.to(x.dtype).contiguous()
    scalars = {"eps": eps}
    if kind == "rms" and norm_weight is not None:
        scalars["offset"] = offset
    ir, most = create_norm_linear_kernel(config), MAX_GROUPS * config.block_m
    outs = {"y": flat(y), "rstd": rstd.reshape(-1)} | ({"mean": mean.reshape(-1)} if kind == "layer" else {})
    for first in range(0, len(rows), most):  # a grid holds no more rows
        part = slice(first, first + most)
        some = {"x": portable.flat(rows[part].contiguous(), lanes)[0]} | {name: v[part] for name, v in outs.items()}
        count = len(some["rstd"])
        portable.launch(ir, config.grid(count), tensors | some, scalars | {"rows": count})
    return y, mean, rstd
