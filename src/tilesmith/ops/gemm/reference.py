"""What the products and their gradients are, in plain PyTorch: the oracle of every kernel."""

import math
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

from tilesmith.device.accumulation import sum_dtype
from tilesmith.ops.norm import reference as norm

ACTIVATIONS = ("none", "gelu", "gelu_tanh", "relu", "silu", "relu_squared")
FROM_OUTPUT = frozenset({"relu", "relu_squared"})  # activations whose derivative their output tells


def matmul(a: Tensor, b: Tensor) -> Tensor:
    """The matrix product a · b, where a may have any leading dims and b is one matrix.

    a: [..., M, K] or [K]. b: [K, N], of a's dtype; both in any strides. Leading dims of a are rows like M: there is no
    broadcasting, and b has no batch (use torch.matmul for those). Sums are fp32 (fp64 for fp64); fp32 operands are
    multiplied as torch.backends.cuda.matmul says (TF32 or not). Rounded once.

    Returns [..., M, N] or [N], contiguous, in a's dtype. Saved for the backward: a and b. Under autocast both are cast.

    Raises TypeError where dtypes differ or are not floating, ValueError for other shapes or devices.
    """
    acc = sum_dtype(a)
    return (a.to(acc) @ b.to(acc)).to(a.dtype).contiguous()


def matmul_vjp(dy: Tensor, a: Tensor, b: Tensor, output_mask: Sequence[bool]) -> tuple[Tensor, Tensor]:
    """Gradients of `matmul`: da = dy · bᵀ and db = aᵀ · dy, contiguous; empty where ``output_mask`` is False.

    dy: [..., M, N] or [N], in a's dtype. da: a's shape and dtype; db: [K, N], in b's dtype. Sums are fp32 (fp64 for
    fp64), rounded once.
    """
    acc = sum_dtype(a)
    dy, rows = flat(dy).to(acc), flat(a).to(acc)
    da = (dy @ b.to(acc).t()).to(a.dtype).reshape(a.shape) if output_mask[0] else a.new_empty(0)
    db = (rows.t() @ dy).to(b.dtype).contiguous() if output_mask[1] else b.new_empty(0)
    return da, db


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """y = x · weightᵀ + bias, as torch.nn.functional.linear.

    x: [..., K]. weight: [N, K]. bias: [N]. Each in any strides and any floating dtype, weight and bias in at least as
    many bits as x: y has x's dtype, and a weight or bias of another dtype is rounded to it first, as autocast does.
    Sums are fp32 (fp64 for fp64 x); fp32 operands are multiplied as torch.backends.cuda.matmul says (TF32 or not).
    Rounded once.

    Returns y [..., N], contiguous. Saved for the backward: the inputs. Gradients have their input's dtype. dbias is
    summed in fp32. dweight of a weight wider than x is not rounded to x's dtype (except on accelerators other than
    CUDA, whose libraries cannot do this). Under autocast x is cast, and weight and bias are rounded to its new dtype;
    their gradients keep their own dtypes.

    Raises TypeError for a dtype that is not float16, bfloat16, float32 or float64, and for a weight or bias of fewer
    bits than x; ValueError for shapes or devices that do not fit.
    """
    acc = sum_dtype(x)
    bias = None if bias is None else bias.to(x.dtype).to(acc)
    return F.linear(x.to(acc), weight.to(x.dtype).to(acc), bias).to(x.dtype).contiguous()


def linear_vjp(
    dy: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None, output_mask: Sequence[bool]
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients (dx, dweight, dbias) of `linear`, contiguous; an empty tensor where ``output_mask`` is False.

    dy: [..., N]; x: [..., K]; weight: [N, K]; bias: [N] or None. dx = dy · weight, in x's dtype; dweight = dyᵀ · x and
    dbias = Σ dy over rows, each in its parameter's dtype. Sums are fp32 (fp64 for fp64).
    """
    dy = flat(dy).to(sum_dtype(x))
    dx, dweight, dbias = x.new_empty(0), weight.new_empty(0), x.new_empty(0)
    if output_mask[0]:
        dx = (dy @ weight.to(x.dtype).to(dy.dtype)).to(x.dtype).reshape(x.shape)
    if output_mask[1]:
        dweight = (dy.t() @ flat(x).to(dy.dtype)).to(weight.dtype).contiguous()
    if output_mask[2]:
        dbias = dy.sum(0).to(bias.dtype)
    return dx, dweight, dbias


def linear_act(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, activation: str = "gelu", keep_pre: bool | None = None
) -> tuple[Tensor, Tensor]:
    """y = activation(x · weightᵀ + bias).

    x, weight, bias, dtypes and autocast: see `linear`. activation: "gelu" (through erf), "gelu_tanh", "relu", "silu",
    "relu_squared" (max(z, 0)²) or "none". The pre-activation and its gradient are rounded to x's dtype, as two separate
    ops would; a kernel that activates while it multiplies rounds only y.

    Saved for the backward: x, weight, bias and y; for gelu, gelu_tanh and silu the pre-activation too (y's size), since
    y does not determine their slope. relu's slope is 1 where y > 0; relu_squared's is 2 sqrt(y), so in float16 it is 0
    for inputs below 2.4e-4, whose square is not representable there.
    keep_pre: whether the pre-activation is stored for the backward. None: if autograd records the call. False: the
    backward recomputes it, which costs one more product, and y is the only tensor of its size that is kept.

    Returns y [..., N], contiguous, in x's dtype.

    Raises as `linear` does, and ValueError for another activation.

    Source: Hendrycks and Gimpel, arXiv:1606.08415 (GELU, SiLU); So et al., arXiv:2109.08668 (squared ReLU).
    """
    z = linear(x, weight, bias)
    y = activate(z.to(sum_dtype(x)), activation).to(x.dtype).contiguous()
    return y, z if keep_pre and keeps_pre(activation) else x.new_empty((*x.shape[:-1], 0))


def linear_act_vjp(
    dy: Tensor,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    y: Tensor,
    pre: Tensor,
    activation: str,
    output_mask: Sequence[bool],
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients (dx, dweight, dbias) of `linear_act`; an empty `pre` that is needed is computed again.

    dy, y: [..., N]; pre: [..., N], what the forward kept, or [..., 0]; x: [..., K]; weight: [N, K]; bias: [N] or None.
    dz = dy · activation'(z) is rounded to x's dtype; dx, dweight and dbias are those of `linear_vjp` at dz. An empty
    tensor stands for a gradient that `output_mask` does not ask for.
    """
    acc, dz = sum_dtype(x), dy
    if activation in FROM_OUTPUT:
        dz = activation_vjp(dy.to(acc), y.to(acc), activation, from_output=True).to(x.dtype)
    elif activation != "none":
        z = pre if pre.shape == dy.shape else linear(x, weight, bias)
        dz = activation_vjp(dy.to(acc), z.to(acc), activation).to(x.dtype)
    return linear_vjp(dz, x, weight, bias, output_mask)


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
    """y = norm(x) · weightᵀ + bias, with norm(x) = rms_norm(x, norm_weight, eps, offset) or layer_norm(x, norm_weight,
    norm_bias, eps).

    x: [..., K] with K of at least 1. weight: [N, K]. bias: [N]. norm_weight, norm_bias: [K]. kind: "rms" (norm_bias
    must be None; offset is added to norm_weight) or "layer" (offset must be 0). The normalised x is rounded to x's
    dtype, as two separate ops would; weight and bias as in `linear`. Under autocast x is cast before it is normalised.

    Saved for the backward: the inputs and fp32 statistics, one or two a row. The normalised x is not kept: the backward
    computes it again where dweight is asked for.

    Returns y [..., N], contiguous, in x's dtype.

    Raises as `linear` and the norms do, and ValueError for another kind.
    """
    x = x.contiguous()
    if kind == "rms":
        normed, rstd = norm.rms_norm(x, norm_weight, eps, offset)
        mean = rstd.new_empty((*x.shape[:-1], 0))
    else:
        normed, mean, rstd = norm.layer_norm(x, norm_weight, norm_bias, eps)
    return linear(normed, weight, bias), mean, rstd


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
    """Gradients (dx, dweight, dbias, dnorm_weight, dnorm_bias) of `norm_linear`; empty where not asked for.

    dy: [..., N]; x: [..., K]; weight: [N, K]; norm_weight, norm_bias: [K] or None; mean, rstd: [...], which the forward
    saved. The gradients of `linear_vjp` at the normalised x, which is computed again, then those of `rms_norm_vjp` or
    `layer_norm_vjp`; each in its input's dtype. An empty tensor stands for a gradient that `output_mask` does not ask
    for.
    """
    x = x.contiguous()
    wants_dx, wants_weight, wants_bias, *wants_norm = output_mask
    normed = x
    if wants_weight and kind == "rms":
        normed = norm.rms_norm(x, norm_weight, eps, offset)[0]
    elif wants_weight:
        normed = norm.layer_norm(x, norm_weight, norm_bias, eps)[0]
    through = wants_dx or any(wants_norm)
    dnormed, dweight, dbias = linear_vjp(dy, normed, weight, bias, (through, wants_weight, wants_bias))
    dx, dnorm_weight, dnorm_bias = x.new_empty(0), x.new_empty(0), x.new_empty(0)
    if through and kind == "rms":
        dx, dnorm_weight = norm.rms_norm_vjp(dnormed, x, norm_weight, rstd, offset, (wants_dx, wants_norm[0]))
    elif through:
        mask = (wants_dx, *wants_norm)
        dx, dnorm_weight, dnorm_bias = norm.layer_norm_vjp(dnormed, x, norm_weight, norm_bias, mean, rstd, mask)
    return dx, dweight, dbias, dnorm_weight, dnorm_bias


def memory_efficient_linear(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, activation: str = "none", chunk_rows: int = 0
) -> Tensor:
    """y = activation(x · weightᵀ + bias), saving only the inputs: the backward goes over chunks of rows and recomputes
    each one's pre-activation, which costs one more product.

    x, weight, bias, dtypes and autocast: see `linear`; activation: see `linear_act`. chunk_rows: rows of a chunk; 0
    lets the library choose: all rows where their pre-activations take at most 256 MiB (16 MiB on a CPU), else equal
    chunks of at most that, or of 1024 rows if that is more; one chunk without an activation, since nothing is then
    computed again.

    Memory in bytes, beyond the inputs and dy, for M rows, chunks of C, e bytes an element of x, w one of weight:
    forward M·N·e, and t·C·N·e while it runs; backward M·K·e + N·K·w, and while it runs b·C·N·e, and N·K·4 where w < 4
    and C < M (dweight is summed in fp32). t = 0, b = 1 for Triton kernels on contiguous x and dy; at most t = 1, b = 3
    in plain PyTorch on a GPU; without an activation t = b = 0. A weight of another dtype than x's is cast, N·K·e.

    Returns y [..., N], contiguous, in x's dtype.

    Raises as `linear_act` does, and ValueError for chunk_rows below 0.
    """
    return linear_act(x, weight, bias, activation, False)[0]


def memory_efficient_linear_vjp(
    dy: Tensor,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    activation: str,
    chunk_rows: int,
    output_mask: Sequence[bool],
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients (dx, dweight, dbias) of `memory_efficient_linear`; an empty tensor where ``output_mask`` is False.

    dy: [..., N]; x: [..., K]; weight: [N, K]; bias: [N] or None. As `linear_act_vjp`, but pre-activations are computed
    again, `chunk_rows` rows at a time; dweight and dbias are summed over chunks in fp32 (fp64 for fp64).
    """
    acc = sum_dtype(x)
    dz = activation_vjp(dy.to(acc), linear(x, weight, bias).to(acc), activation).to(x.dtype)
    return linear_vjp(dz, x, weight, bias, output_mask)


def flat(x: Tensor) -> Tensor:
    """[..., K] as [M, K] rows; [K] as one row."""
    return x if x.ndim == 2 else x.reshape(math.prod(x.shape[:-1]), x.shape[-1])


def keeps_pre(activation: str) -> bool:
    """Whether the derivative needs the pre-activation itself."""
    return activation != "none" and activation not in FROM_OUTPUT


def activate(z: Tensor, activation: str) -> Tensor:
    """activation(z) in z's dtype; "none" gives z."""
    if activation in ("gelu", "gelu_tanh"):
        return F.gelu(z, approximate="tanh" if activation == "gelu_tanh" else "none")
    if activation == "silu":
        return F.silu(z)
    if activation == "none":
        return z
    positive = F.relu(z)
    return positive * positive if activation == "relu_squared" else positive


def activation_vjp(dy: Tensor, z: Tensor, activation: str, from_output: bool = False) -> Tensor:
    """dy · activation'(z) in z's dtype; with `from_output` z is the activation's output."""
    if activation in ("gelu", "gelu_tanh"):
        approximate = "tanh" if activation == "gelu_tanh" else "none"
        return torch.ops.aten.gelu_backward(dy, z, approximate=approximate)
    if activation == "silu":
        return torch.ops.aten.silu_backward(dy, z)
    if activation == "relu":
        return torch.ops.aten.threshold_backward(dy, z, 0)
    if activation == "relu_squared":
        return dy * 2 * (z.sqrt() if from_output else F.relu(z))
    return dy
