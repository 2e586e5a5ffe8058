"""The products by the device's own library, activations and norms by our own ops: the default."""

from collections.abc import Sequence

import torch
from torch import Tensor

from tilesmith.engine import register_kernel
from tilesmith.ops.elementwise import op as gate
from tilesmith.ops.gemm import chunks
from tilesmith.ops.gemm.arguments import linear_act_vjp_arguments
from tilesmith.ops.gemm.products import (
    PreActivation,
    activated_product,
    epilogue_tells,
    gradients,
    near,
    pre_activation,
    pre_activation_tells,
    product,
)
from tilesmith.ops.gemm.reference import flat, keeps_pre
from tilesmith.ops.norm import op as norm


@register_kernel("matmul", backend="aten", rank=10)
def matmul(a: Tensor, b: Tensor) -> Tensor:
    """One product of all rows."""
    return torch.mm(near(flat(a)), b).view(*a.shape[:-1], b.shape[1])


@register_kernel("matmul_vjp", backend="aten", rank=10)
def matmul_vjp(dy: Tensor, a: Tensor, b: Tensor, output_mask: Sequence[bool]) -> tuple[Tensor, Tensor]:
    """Two products."""
    dy = flat(dy)
    da = torch.mm(dy, b.t()).view(a.shape) if output_mask[0] else a.new_empty(0)
    return da, torch.mm(near(flat(a)).t(), dy) if output_mask[1] else b.new_empty(0)


@register_kernel("linear", backend="aten", rank=10)
def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """One product of all rows, with the bias in its epilogue where the library has one."""
    return product(flat(x), weight, bias).view(*x.shape[:-1], weight.shape[0])


@register_kernel("linear_vjp", backend="aten", rank=10)
def linear_vjp(
    dy: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None, output_mask: Sequence[bool]
) -> tuple[Tensor, Tensor, Tensor]:
    """Two products and a sum."""
    return gradients(flat(dy), x, weight, bias, output_mask)


@register_kernel(
    "linear_act",
    backend="aten",
    rank=10,
    tells=lambda x, weight, bias, activation, keep_pre: epilogue_tells(
        x, activation, bool(keep_pre) and keeps_pre(activation)
    ),
)
def linear_act(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, activation: str = "gelu", keep_pre: bool | None = None
) -> tuple[Tensor, Tensor]:
    """The library's activation epilogue where it has one and nothing else is kept, else our elementwise op."""
    shape, rows = (*x.shape[:-1], weight.shape[0]), flat(x)
    nothing = x.new_empty((*x.shape[:-1], 0))
    if keeps_pre(activation) and keep_pre:
        pre = product(rows, weight, bias)
        return _activated(pre, activation).view(shape), pre.view(shape)
    y = activated_product(rows, weight, bias, activation)
    y = _activated(product(rows, weight, bias), activation) if y is None else y
    return y.view(shape), nothing


@register_kernel(
    "linear_act_vjp",
    backend="aten",
    rank=10,
    tells=linear_act_vjp_arguments(pre_activation_tells),
)
@linear_act_vjp_arguments
def linear_act_vjp(call) -> tuple[Tensor, Tensor, Tensor]:
    """Our elementwise op, then the products of a linear layer."""
    dy, x, weight, bias, source = call.dy, call.x, call.weight, call.bias, pre_activation(call)
    dz = flat(dy)
    if source is PreActivation.OUTPUT:
        dz = _activated_vjp(dz, flat(call.y), call.activation, True)
    elif source is not PreActivation.NONE:
        kept = flat(call.pre) if source is PreActivation.KEPT else product(flat(x), weight, bias)
        dz = _activated_vjp(dz, kept, call.activation, False)
    return gradients(dz, x, weight, bias, call.output_mask)


@register_kernel("norm_linear", backend="aten", rank=10)
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
    """Our norm, then a product: at 4096 features the norm is less than a tenth of the time, which a product that
    normalises as it reads would have to win back against cuBLAS."""
    normed, *statistics = _normed(flat(x), norm_weight, norm_bias, kind, eps, offset)
    y = product(normed, weight, bias).view(*x.shape[:-1], weight.shape[0])
    rstd = statistics[-1].view(x.shape[:-1])
    mean = rstd.new_empty((*x.shape[:-1], 0)) if kind == "rms" else statistics[0].view(x.shape[:-1])
    return y, mean, rstd


@register_kernel("norm_linear_vjp", backend="aten", rank=10)
def norm_linear_vjp(
    dy: Tensor,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    norm_weight: Tensor | None,
    norm_bias: Tensor | None,
    mean: Tensor,
    rstd: Tensor,
    kind: str,
    eps: float,
    offset: float,
    output_mask: Sequence[bool],
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """The norm again where dweight needs it, the products, then our norm's backward."""
    wants_dx, wants_weight, wants_bias, *wants_norm = output_mask
    rows, through = flat(x), wants_dx or any(wants_norm)
    normed = _normed(rows, norm_weight, norm_bias, kind, eps, offset)[0] if wants_weight else rows
    dnormed, dweight, dbias = gradients(flat(dy), normed, weight, bias, (through, wants_weight, wants_bias))
    dx, dnorm_weight, dnorm_bias = x.new_empty(0), x.new_empty(0), x.new_empty(0)
    if through and kind == "rms":
        given = dnormed, rows, norm_weight, rstd.view(-1), offset, (wants_dx, wants_norm[0])
        dx, dnorm_weight = norm.rms_norm_vjp.run(given)
    elif through:
        given = dnormed, rows, norm_weight, norm_bias, mean.view(-1), rstd.view(-1), (wants_dx, *wants_norm)
        dx, dnorm_weight, dnorm_bias = norm.layer_norm_vjp.run(given)
    if wants_dx:
        dx = dx.reshape(x.shape) if dx.is_contiguous() else dx.contiguous().view(x.shape)
    return dx, dweight, dbias, dnorm_weight, dnorm_bias


@register_kernel(
    "memory_efficient_linear",
    backend="aten",
    rank=10,
    tells=lambda x, weight, bias, activation, chunk_rows: (
        chunks.chunk_tells(x, weight, activation, chunk_rows) + epilogue_tells(x, activation)
    ),
)
def memory_efficient_linear(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, activation: str = "none", chunk_rows: int = 0
) -> Tensor:
    """Chunks of rows: a product into the output, then our elementwise op."""
    return chunks.forward(STEPS, x, weight, bias, activation, chunk_rows)


@register_kernel(
    "memory_efficient_linear_vjp",
    backend="aten",
    rank=10,
    tells=lambda dy, x, weight, bias, activation, chunk_rows, output_mask: chunks.chunk_tells(
        x, weight, activation, chunk_rows
    ),
)
def memory_efficient_linear_vjp(
    dy: Tensor,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    activation: str,
    chunk_rows: int,
    output_mask: Sequence[bool],
) -> tuple[Tensor, Tensor, Tensor]:
    """Chunks of rows: the pre-activation again, our elementwise op, the products."""
    return chunks.backward(STEPS, dy, x, weight, bias, activation, chunk_rows, output_mask)


def _activate_in_place(z: Tensor, activation: str) -> None:
    z.copy_(_activated(z, activation))


def _backward_of_chunk(dy: Tensor, z: Tensor, activation: str, sums: bool) -> tuple[Tensor, None]:
    return _activated_vjp(dy, z, activation, False), None


STEPS = chunks.ActivationSteps(_activate_in_place, _backward_of_chunk)


def _activated(z: Tensor, activation: str) -> Tensor:
    """activation(z); relu and relu_squared overwrite z."""
    if activation in ("gelu", "gelu_tanh"):
        return gate.gelu.run((z, "tanh" if activation == "gelu_tanh" else "none"))
    if activation == "silu":
        return gate.silu.run((z,))
    if activation == "none":
        return z
    return z.relu_().square_() if activation == "relu_squared" else z.relu_()


def _activated_vjp(dy: Tensor, z: Tensor, activation: str, from_output: bool) -> Tensor:
    """dy · activation'(z) in z's dtype; z is the output where `from_output`."""
    if activation in ("gelu", "gelu_tanh"):
        return gate.gelu_vjp.run((dy, z, "tanh" if activation == "gelu_tanh" else "none"))
    if activation == "silu":
        return gate.silu_vjp.run((dy, z))
    if activation == "relu":
        return torch.ops.aten.threshold_backward(dy, z, 0)
    return (z.sqrt() if from_output else torch.relu(z)).mul_(dy).mul_(2)


def _normed(
    rows: Tensor, weight: Tensor | None, bias: Tensor | None, kind: str, eps: float, offset: float
) -> tuple[Tensor, ...]:
    """(normalised rows, statistics...)."""
    if kind == "rms":
        return norm.rms_norm.run((rows, weight, eps, offset, "fp32"))
    return norm.layer_norm.run((rows, weight, bias, eps))
