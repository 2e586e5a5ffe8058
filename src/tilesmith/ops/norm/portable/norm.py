"""Portable kernels of the norm family."""

import torch
from torch import Tensor

from tilesmith.device import portable
from tilesmith.device.rows import empty_row_values, empty_rows, row_order, row_values, rows
from tilesmith.engine import register_kernel
from tilesmith.kernels.fused_ops import NormConfig, NormVjpConfig, create_norm_kernel, create_norm_vjp_kernel
from tilesmith.ops.norm.arguments import (
    Norm,
    NormGradient,
    add_layer_norm_arguments,
    add_layer_norm_vjp_arguments,
    add_rms_norm_arguments,
    add_rms_norm_vjp_arguments,
    gradient_of,
    layer_norm_arguments,
    layer_norm_vjp_arguments,
    norm_of,
    rms_norm_arguments,
    rms_norm_vjp_arguments,
    unserved,
)
from tilesmith.runtime import backend_of, subgroup_of


def _threads(kind: str, columns: int, residual: Tensor | None, cuda: bool) -> int:
    """Threads of a workgroup. NVRTC's registers decide, so on CUDA widths differ from kind to kind."""
    threads = portable.threads(columns)
    # H200, f16, share of Triton's speed: 32,768 columns by 512 and 1,024 threads 85 and 93 %
    if cuda and kind == "rms" and residual is None and threads == 512:
        return 1024
    # 49,152, 65,536 and 131,072 columns by 512 and 1,024 threads 90, 94, 100 and 78, 83, 92 %
    return 512 if cuda and kind == "layer" and residual is not None and threads == 1024 else threads


def _norm(norm: Norm, casting: str = "fp32") -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(y, s, mean, rstd); s is empty without a residual, mean for an RMS norm."""
    kind, x, residual, weight = "layer" if norm.center else "rms", norm.x, norm.residual, norm.weight
    order, nothing = row_order(x), x.new_empty(0)
    y = empty_rows(x, order)
    s = nothing if residual is None else empty_rows(x, order, residual.dtype)
    mean = nothing if kind == "rms" else empty_row_values(x, order, torch.float32)
    rstd = empty_row_values(x, order, torch.float32)
    if x.numel() == 0:
        return y, s, mean, rstd
    given = {"x": rows(x, order), "residual": residual, "weight": weight, "bias": norm.bias}
    if residual is not None:
        given["residual"] = rows(residual, order)
    count, columns = given["x"].shape
    types = {name: t if t is None else portable.TYPES[t.dtype] for name, t in given.items()}
    cuda = backend_of(x.device) == "cuda"
    threads = _threads(kind, columns, residual, cuda)
    # H200, f16, 65,536 columns, share of Triton's speed: RMS and layer norm on CUDA kept 119 and 104 %, read twice 96
    # and 95; through Vulkan 85 and 79, 94 and 93. With a residual too few registers are left.
    twice = threads == 1024 and (residual is not None or not cuda)
    kept = 65_536 if twice else 131_072
    config = NormConfig(
        columns, kind, **types, casting=casting, workgroup_size=threads, kept=kept, subgroup=subgroup_of(x.device)
    )
    tensors, steps = {}, {}
    for name, tensor in given.items():
        if tensor is not None:
            tensors[name], step = portable.flat(
                tensor if tensor.stride(-1) == 1 else tensor.contiguous(), config.plan.lanes
            )
            steps |= {f"{name}_step": n for n in step}
    tensors |= {"y": rows(y, order), "rstd": row_values(rstd, order)}
    if residual is not None:
        tensors["sum"] = rows(s, order)
    if kind == "layer":
        tensors["mean"] = row_values(mean, order)
    scalars = {"rows": count, "eps": norm.eps, **steps}
    if kind == "rms" and weight is not None:
        scalars["offset"] = norm.offset
    portable.launch(create_norm_kernel(config), config.grid(count), tensors, scalars)
    return y, s, mean, rstd


def _rms_reasons(call) -> list[str]:
    return portable.reasons(call, "x", "weight") + unserved(call)


def _layer_reasons(call) -> list[str]:
    return portable.reasons(call, "x", "weight", "bias")


def _add_rms_reasons(call) -> list[str]:
    return portable.reasons(call, "x", "residual", "weight") + unserved(call)


def _add_layer_reasons(call) -> list[str]:
    return portable.reasons(call, "x", "residual", "weight", "bias")


@register_kernel("rms_norm", backend="portable", rank=portable.RANK, rejects=_rms_reasons)
@rms_norm_arguments
def rms_norm(call) -> tuple[Tensor, Tensor]:
    """A row stays in registers up to 65,536 columns (fp32: 32,768), as below; a wider one is read twice."""
    y, _, _, rstd = _norm(norm_of(call), call.casting)
    return y, rstd


@register_kernel("layer_norm", backend="portable", rank=portable.RANK, rejects=_layer_reasons)
@layer_norm_arguments
def layer_norm(call) -> tuple[Tensor, Tensor, Tensor]:
    """The mean, then the deviation around it."""
    y, _, mean, rstd = _norm(norm_of(call))
    return y, mean, rstd


@register_kernel("add_rms_norm", backend="portable", rank=portable.RANK, rejects=_add_rms_reasons)
@add_rms_norm_arguments
def add_rms_norm(call) -> tuple[Tensor, Tensor, Tensor]:
    """As rms_norm, of the rounded sum."""
    y, s, _, rstd = _norm(norm_of(call), call.casting)
    return y, s, rstd


@register_kernel("add_layer_norm", backend="portable", rank=portable.RANK, rejects=_add_layer_reasons)
@add_layer_norm_arguments
def add_layer_norm(call) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """As layer_norm, of the rounded sum."""
    return _norm(norm_of(call))


_GROUPS = {"rms": 512, "layer": 384}
"""Workgroups that each sum over their share of the rows. H200, f16, 1,024 columns, share of Triton's speed with 256,
384 and 512: layer norm 82, 96 and 79 %; RMS norm with 256 and 512: 82 and 101 %."""


def _norm_vjp(norm: NormGradient) -> tuple[Tensor, Tensor, Tensor]:
    """(dx, dweight, dbias), empty where not wanted: sums over rows in two steps, in a fixed order."""
    dy, ds, x, weight, bias, mean, rstd, offset, (wants_dx, wants_weight, wants_bias) = norm
    kind = "rms" if mean is None else "layer"
    order, nothing = row_order(x), x.new_empty(0)
    dx = empty_rows(x, order) if wants_dx else nothing
    if x.numel() == 0 or dy is None or not (wants_dx or wants_weight or wants_bias):
        if wants_dx and x.numel():
            dx.copy_(ds) if ds is not None else dx.zero_()
        zeros = (v.new_zeros(v.shape) if want else nothing for v, want in ((weight, wants_weight), (bias, wants_bias)))
        return dx, *zeros
    given = {"x": rows(x, order), "dy": rows(dy, order)}
    if wants_dx and ds is not None:
        given["ds"] = rows(ds, order)
    if wants_dx and weight is not None:
        given["weight"] = weight.contiguous()
    count, columns = given["x"].shape
    types = {"weight": None} | {name: portable.TYPES[t.dtype] for name, t in given.items()}
    wanted = {"dx": wants_dx, "dweight": wants_weight, "dbias": wants_bias}
    threads = 256 if columns <= 4096 else 512
    config = NormVjpConfig(columns, kind, **types, **wanted, workgroup_size=threads, subgroup=subgroup_of(x.device))
    tensors, steps = {"rstd": row_values(rstd, order)}, {}
    for name, tensor in given.items():
        tensors[name], step = portable.flat(tensor, config.plan.lanes)
        steps |= {f"{name}_step": n for n in step}
    groups = min(-(-count // config.plan.rows), _GROUPS[kind])
    parts = groups * config.plan.rows
    if kind == "layer":
        tensors["mean"] = row_values(mean, order)
    if wants_dx:
        tensors["dx"] = rows(dx, order)
    for name, want in (("dweights", wants_weight), ("dbiases", wants_bias)):
        if want:
            make = x.new_empty if config.keep else x.new_zeros
            tensors[name] = make(parts, columns, dtype=torch.float32)
    scalars = {"rows": count, "parts": parts, **steps}
    if wants_dx and weight is not None and kind == "rms":
        scalars["offset"] = offset
    portable.launch(create_norm_vjp_kernel(config), (groups, 1, 1), tensors, scalars)
    dweight = tensors["dweights"].sum(0).to(weight.dtype) if wants_weight else nothing
    return dx, dweight, tensors["dbiases"].sum(0).to(bias.dtype) if wants_bias else nothing


def _rms_vjp_reasons(call) -> list[str]:
    return portable.reasons(call, "dy", "x", "weight") + unserved(call)


def _layer_vjp_reasons(call) -> list[str]:
    return portable.reasons(call, "dy", "x", "weight", "bias")


def _add_rms_vjp_reasons(call) -> list[str]:
    return portable.reasons(call, "dy", "s", "ds", "weight")


def _add_layer_vjp_reasons(call) -> list[str]:
    return portable.reasons(call, "dy", "s", "ds", "weight", "bias")


@register_kernel("rms_norm_vjp", backend="portable", rank=portable.RANK, rejects=_rms_vjp_reasons)
@rms_norm_vjp_arguments
def rms_norm_vjp(call) -> tuple[Tensor, Tensor]:
    """One pass over x and dy (two beyond 8,192 columns of f32, 16,384 of 16 bits), then a sum over the workgroups'
    parts of dweight."""
    return _norm_vjp(gradient_of(call))[:2]


@register_kernel("layer_norm_vjp", backend="portable", rank=portable.RANK, rejects=_layer_vjp_reasons)
@layer_norm_vjp_arguments
def layer_norm_vjp(call) -> tuple[Tensor, Tensor, Tensor]:
    """As rms_norm_vjp."""
    return _norm_vjp(gradient_of(call))


@register_kernel("add_rms_norm_vjp", backend="portable", rank=portable.RANK, rejects=_add_rms_vjp_reasons)
@add_rms_norm_vjp_arguments
def add_rms_norm_vjp(call) -> tuple[Tensor, Tensor]:
    """As rms_norm_vjp, with the gradient of s added."""
    return _norm_vjp(gradient_of(call))[:2]


@register_kernel("add_layer_norm_vjp", backend="portable", rank=portable.RANK, rejects=_add_layer_vjp_reasons)
@add_layer_norm_vjp_arguments
def add_layer_norm_vjp(call) -> tuple[Tensor, Tensor, Tensor]:
    """As layer_norm_vjp, with the gradient of s added."""
    return _norm_vjp(gradient_of(call))
