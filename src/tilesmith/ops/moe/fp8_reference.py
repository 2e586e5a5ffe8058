"""Experts whose products are of 8-bit numbers, in plain PyTorch: the oracle of every kernel.

Legend: see reference.py. A number is kept as x8 = x / factor in float8_e4m3fn, where a factor is a power of two
(ops.quant). Factors belong to rows of tokens and to whole weights of an expert, so they leave every sum.
"""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

from tilesmith.ops.moe.reference import (
    activate,
    activation_vjp,
    combined,
    flat,
    grouped,
    grouped_linear,
    weight_gradient,
)
from tilesmith.ops.quant.reference import OUTPUTS, cast, factors_of_rows

FORMAT = "e4m3"


def experts_fp8(
    x8: Tensor,
    x_factor: Tensor,
    gate_up8: Tensor,
    gate_up_factor: Tensor,
    down8: Tensor,
    down_factor: Tensor,
    indices: Tensor,
    weights: Tensor,
    activation: str = "swiglu",
    dtype: str = "bfloat16",
) -> tuple[Tensor, Tensor]:
    """`experts` of tokens and weights in 8 bits: (y, pre).

    x8: [..., C] float8_e4m3fn, x_factor: [T, 1], as `fp8_cast_rows` gives them. gate_up8: [E, 2 I, C] and down8:
    [E, C, I] float8_e4m3fn, gate_up_factor and down_factor: [E], as `fp8_cast_experts` gives them. Factors
    are fp32. indices, weights: as `experts` takes them. activation: "swiglu", "geglu" or "geglu_erf". dtype: of y and
    pre, "bfloat16", "float16" or "float32".

    The pre-activation and the activation are rounded to `dtype`. The activation of a pair is then cast to e4m3 by the
    factor of its own largest element. The output of each expert is rounded to `dtype`, and the sum over k once more.
    Tensor cores accumulate both products in their own registers throughout, which hold 14 bits on Ada and Hopper, as in
    `scaled_matmul` with `fast`.

    Returns y [..., C], contiguous, and pre [S, 2 I], the pre-activations in the order of experts, pairs of one expert
    in the order of tokens; rows of pairs without an expert come last and are 0. `experts_vjp_fp8` has the gradients.

    Raises TypeError for dtypes, ValueError for shapes, devices, an unknown activation, and for weights that require a
    gradient while gradients are recorded.
    """
    acc, out = _dtypes(x8, OUTPUTS[dtype])
    tokens, order, sizes = grouped(x8, indices, gate_up8.shape[0])
    pairs = (flat(x8).to(acc) * x_factor.to(acc))[tokens[order]]
    z = grouped_linear(pairs, _wide(gate_up8, gate_up_factor, acc), None, sizes).to(out)
    hidden = activate(z.to(acc), activation, False, 0.0, 1.0, 0.0).to(out)
    rows = grouped_linear(_cast_rows(hidden.to(acc))[0], _wide(down8, down_factor, acc), None, sizes)
    y = combined(rows.to(out).to(acc), order, indices.numel(), weights)
    missing = indices.numel() - z.shape[0]
    return y.to(out).reshape(x8.shape), F.pad(z, (0, 0, 0, missing)).contiguous()


def experts_vjp_fp8(
    dy: Tensor,
    dy8: Tensor,
    dy_factor: Tensor,
    x: Tensor,
    x_factor: Tensor | None,
    pre: Tensor,
    gate_up8_t: Tensor,
    gate_up_factor: Tensor,
    down8_t: Tensor,
    down_factor: Tensor,
    indices: Tensor,
    weights: Tensor,
    activation: str,
    output_mask: Sequence[bool],
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Gradients (dx, dgate_up, ddown, dweights) of `experts_fp8` as if nothing had been rounded to 8 bits; an empty
    tensor where `output_mask` is False.

    dy: [..., C], the unrounded gradient, and pre: [S, 2 I], as `experts_fp8` returned it: of one floating dtype, which
    dx, dgate_up and ddown have too. dy8 and dy_factor: dy cast by `fp8_cast_rows`. x: [..., C], the original tokens in
    dy's dtype, with x_factor None; or the forward's x8, with its x_factor. gate_up8_t: [E, C, 2 I] and down8_t: [E, I,
    C]: the transposed weights that `fp8_cast_experts` gives. indices, weights, activation:
    as in the forward.

    Gradients of the activation and of x are products of 8-bit numbers: of dy8, and of the gradient of the
    pre-activation, which is cast by the factor of each row's largest element. With x_factor None, gradients of the
    weights are products of x and dy in dy's dtype. Otherwise they are products of 8-bit numbers as well: of x, of dy8,
    of that cast and of one of the weighted activation by rows; since a sum over pairs has no place for factors of rows,
    each is cast again by the largest factor of its expert's rows, which is exact but for numbers that become smaller
    than the format's smallest normal one.
    dgate_up [E, 2 I, C] and ddown [E, C, I] are contiguous; dweights has the weights' shape and dtype. The gradient of
    the activation, that of the pre-activation, the weighted activation and the gradient of each pair's x are rounded to
    dy's dtype.
    """
    out = dy.dtype
    acc = torch.promote_types(out, torch.float32)
    experts = gate_up8_t.shape[0]
    tokens, order, sizes = grouped(dy, indices, experts)
    found, count = tokens[order], order.numel()
    z, scales = pre[:count].to(acc), weights.reshape(-1)[order].to(acc)[:, None]
    d = (flat(dy8).to(acc) * dy_factor.to(acc))[found]
    dhidden = grouped_linear(d, _wide(down8_t, down_factor, acc), None, sizes).to(out).to(acc)
    hidden, dz = activation_vjp(dhidden * scales, z, activation, False, 0.0, 1.0, 0.0)
    dz, scaled = dz.to(out).to(acc), (hidden * scales).to(out).to(acc)
    dz8, dz_factor = _cast_rows(dz)
    left, right = (dz, flat(dy).to(acc)[found]), (flat(x).to(acc)[found], scaled)
    if x_factor is not None:
        factors = x_factor.to(acc)[found], dy_factor.to(acc)[found]
        left = _by_experts(dz8, dz_factor, sizes), _by_experts(d, factors[1], sizes)
        right = _by_experts(right[0] * factors[0], factors[0], sizes), _by_experts(*_cast_rows(scaled), sizes)
    dx, dgate_up, ddown, dweights = (dy.new_empty(0) for _ in range(4))
    if output_mask[0]:
        rows = grouped_linear(dz8, _wide(gate_up8_t, gate_up_factor, acc), None, sizes)
        ones = weights.new_ones(weights.shape)
        dx = combined(rows.to(out).to(acc), order, indices.numel(), ones).to(out).reshape(x.shape)
    if output_mask[1]:
        dgate_up = weight_gradient(left[0], right[0], _turned(gate_up8_t, out), sizes)
    if output_mask[2]:
        ddown = weight_gradient(left[1], right[1], _turned(down8_t, out), sizes)
    if output_mask[3]:
        each = (dhidden * hidden).sum(1)
        dweights = each.new_zeros(indices.numel()).index_copy(0, order, each).reshape(weights.shape).to(weights.dtype)
    return dx, dgate_up, ddown, dweights


def _dtypes(x8: Tensor, out: torch.dtype) -> tuple[torch.dtype, torch.dtype]:
    """The dtypes of sums and of results: fp64 where fp64 stands for 8 bits."""
    return (torch.float64,) * 2 if x8.dtype == torch.float64 else (torch.float32, out)


def _wide(weight8: Tensor, factor: Tensor, acc: torch.dtype) -> Tensor:
    return weight8.to(acc) * factor.to(acc)[:, None, None]


def _turned(weight8_t: Tensor, dtype: torch.dtype) -> Tensor:
    """An empty tensor for the gradient of the weight whose transpose this is."""
    experts, features, outputs = weight8_t.shape
    return weight8_t.new_empty((experts, outputs, features), dtype=dtype)


def _cast_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """Rows x [S, N] after a cast to 8 bits and back, and the factors [S, 1]."""
    factor = factors_of_rows(x, FORMAT).to(x.dtype)
    return cast(x, FORMAT, factor).to(x.dtype) * factor, factor


def _by_experts(x: Tensor, factor: Tensor, sizes: list[int]) -> Tensor:
    """Rows x [S, N] that were cast by factors [S, 1], cast again by the largest of their expert."""
    largest_of = [part.amax().expand(len(part)) for part in factor[:, 0].split(sizes) if len(part)]
    wide = torch.cat(largest_of)[:, None] if largest_of else factor
    return cast(x, FORMAT, wide).to(x.dtype) * wide
