"""Linear layers and gated MLPs in 8 bits, forward and backward, as functions.

Legend: x [M, K], weight [N, K], y = x weight^T; the gradient of x is dy weight, that of weight dy^T x. Tensor cores of
Hopper take 8-bit operands whose contracted dim runs along memory, so the weight and its transpose are both kept, and
x and dy are needed transposed for the weight's gradient. What a forward keeps of x is its cast.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from tilesmith import ops
from tilesmith.rewrite.siblings import parts_of

NAMES = {torch.bfloat16: "bfloat16", torch.float16: "float16", torch.float32: "float32"}


class Cast(NamedTuple):
    """A tensor in 8 bits: x8 [M, K] and its factor; x8_t [K, M] and its factor, if that is another one (Dynamo takes no
    tensor twice). What is not there is None."""

    x8: Tensor | None
    factor: Tensor
    x8_t: Tensor | None = None
    factor_t: Tensor | None = None


class Plan(NamedTuple):
    """How a layer computes. dtype: of its output. forward, backward: formats. delayed: scales of earlier steps."""

    recipe: str
    forward: str
    backward: str


def cast_tensorwise(
    x: Tensor, bound: Tensor | None, amax: Tensor | None, format: str, rows: bool = True, columns: bool = False
) -> Cast:
    """x by one factor: of `bound`, or of its own largest value where that is None. amax, where given, is raised."""
    bound = ops.fp8_amax(x) if bound is None else bound
    x8, x8_t, factor = ops.fp8_cast(x, bound, bound.clone() if amax is None else amax, format, rows, columns)
    return Cast(x8 if rows else None, factor, x8_t if columns else None)


def cast_input(x: Tensor, plan: Plan, bound: Tensor | None, amax: Tensor | None, trains: bool) -> Cast:
    """An activation as `linear` takes it. trains: whether a weight's gradient will be asked for."""
    if plan.recipe == "rowwise":
        return Cast(*ops.fp8_cast_rows(x, plan.forward))
    if plan.recipe == "blockwise":
        x8, factor, x8_t, factor_t = ops.fp8_cast_blocks(x.reshape(-1, x.shape[-1]), plan.forward, True, trains)
        return Cast(x8, factor, *((x8_t, factor_t) if trains else (None, None)))
    return cast_tensorwise(x, bound, amax, plan.forward)


def cast_weight(weight: Tensor, plan: Plan) -> Cast:
    """A weight, both ways round."""
    if plan.recipe == "rowwise":
        return Cast(*ops.fp8_cast_rows(weight, plan.forward), *ops.fp8_cast_rows(weight.t().contiguous(), plan.forward))
    if plan.recipe == "blockwise":
        return Cast(*ops.fp8_cast_blocks(weight, plan.forward, True, True, True))
    return cast_tensorwise(weight, None, None, plan.forward, True, True)


def cast_stack(weights: Sequence[Tensor], plan: Plan) -> Cast:
    """Weights of one input, of any number of outputs, by one factor, as if they were one on top of the other."""
    x8, x8_t, factor = ops.fp8_cast_stack(*_three(weights, 0), plan.forward)
    return Cast(x8, factor, x8_t)


def cast_beside(
    parts: Sequence[Tensor], bound: Tensor | None, amax: Tensor | None, format: str, rows: bool, columns: bool
) -> Cast:
    """`cast_tensorwise` of matrices side by side."""
    three = _three(parts, 1)
    bound = ops.fp8_amax(*three) if bound is None else bound
    amax = bound.clone() if amax is None else amax
    x8, x8_t, factor = ops.fp8_cast_beside(*three, bound, amax, format, rows, columns)
    return Cast(x8 if rows else None, factor, x8_t if columns else None)


def _three(tensors: Sequence[Tensor], dim: int) -> tuple[Tensor, Tensor, Tensor | None]:
    """Two or more tensors as the two or three that a cast takes: more are put together from the third on."""
    first, second, *rest = tensors
    return first, second, torch.cat(rest, dim) if len(rest) > 1 else (rest or [None])[0]


class Gradient(NamedTuple):
    """Where the gradient of an output finds its scale: what it is expected to stay below (None: its own largest value
    is looked for), and where its largest value is noted, if it is."""

    bound: Tensor | None
    amax: Tensor | None


def linear(
    x: Tensor, parameters: tuple[Tensor, Tensor | None], given: Cast, cast: Cast, plan: Plan, dtype: torch.dtype,
    gradient: Gradient,
) -> Tensor:  # fmt: skip
    """x weight^T + bias in `dtype`, from the casts of x (`given`) and of the weight. parameters: weight and bias."""
    function = {"rowwise": _Rowwise, "blockwise": _Blockwise}.get(plan.recipe, _Tensorwise)
    return function.apply(x, *parameters, plan, dtype, *given, *cast, *gradient)


def _product(a: Tensor, b: Tensor, a_factor: Tensor, b_factor: Tensor, dtype: torch.dtype, fast=False) -> Tensor:
    return ops.scaled_matmul(a, b, a_factor, b_factor, None, NAMES[dtype], fast)


def _forward(ctx, x: Tensor, weight: Tensor, bias: Tensor | None, plan: Plan, dtype: torch.dtype, casts: tuple):
    """(y, cast of x, cast of weight), and what is no tensor kept. casts: as `linear` passes them on."""
    given, cast, (ctx.bound, ctx.amax) = Cast(*casts[:4]), Cast(*casts[4:8]), casts[8:]
    bias16 = None if bias is None else bias.to(dtype)
    a = given.x8.reshape(-1, x.shape[-1])
    y = ops.scaled_matmul(a, cast.x8, given.factor, cast.factor, bias16, NAMES[dtype], True)
    ctx.plan, ctx.shape = plan, x.shape
    ctx.dtypes = x.dtype, weight.dtype, None if bias is None else bias.dtype
    return _shaped(y, x), given, cast


def _shaped(y: Tensor, x: Tensor) -> Tensor:
    """y [M, N] with the leading dims of x, and no view to autograd: a caller may write into it."""
    return torch.ops.aten._unsafe_view(y, [*x.shape[:-1], y.shape[1]])


def _bias_gradient(ctx, dy: Tensor) -> Tensor | None:
    return dy.sum(0).to(ctx.dtypes[2]) if ctx.needs_input_grad[2] else None


class _Tensorwise(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, bias, plan, dtype, *casts):
        y, given, cast = _forward(ctx, x, weight, bias, plan, dtype, casts)
        kept = (given.x8, given.factor) if weight.requires_grad else (None, None)
        ctx.save_for_backward(*kept, cast.x8_t, cast.factor)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx, dy):
        x8, x_factor, w8_t, w_factor = ctx.saved_tensors
        wants_x, wants_weight = ctx.needs_input_grad[:2]
        dy = dy.reshape(-1, dy.shape[-1])
        dx = dweight = None
        if wants_x or wants_weight:
            d = cast_tensorwise(dy, ctx.bound, ctx.amax, ctx.plan.backward, wants_x, wants_weight)
        if wants_x:
            dx = _product(d.x8, w8_t, d.factor, w_factor, ctx.dtypes[0]).view(ctx.shape)
        if wants_weight:
            x8_t = ops.fp8_transpose(x8.reshape(-1, ctx.shape[-1]))
            dweight = _product(d.x8_t, x8_t, d.factor, x_factor, ctx.dtypes[1])
        return dx, dweight, _bias_gradient(ctx, dy), *(None,) * 12


def _widened_gradient(dy: Tensor, x8: Tensor, factor: Tensor) -> Tensor:
    """dy^T (x8 * factor) in dy's dtype, by a product of 16- or 32-bit numbers.

    Factors are powers of two, so x comes back as it was multiplied, or dy is multiplied exactly: whichever has fewer
    columns, since each is a pass of its own. fp16 holds not all of those numbers, and does so with x alone.
    """
    if dy.dtype != torch.float16 and dy.shape[1] < x8.shape[1]:
        return torch.mm((dy * factor.to(dy.dtype)).t(), x8.to(dy.dtype))
    wide = torch.float32 if dy.dtype == torch.float16 else dy.dtype
    return torch.mm(dy.t(), (x8.to(wide) * factor.to(wide)).to(dy.dtype))


class _Rowwise(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, bias, plan, dtype, *casts):
        y, given, cast = _forward(ctx, x, weight, bias, plan, dtype, casts)
        kept = (given.x8, given.factor) if weight.requires_grad else (None, None)
        ctx.save_for_backward(*kept, cast.x8_t, cast.factor_t)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx, dy):
        x8, x_factor, w8_t, w_t_factor = ctx.saved_tensors
        wants_x, wants_weight = ctx.needs_input_grad[:2]
        dy = dy.reshape(-1, dy.shape[-1])
        dx = dweight = None
        if wants_x:
            d8, factor = ops.fp8_cast_rows(dy, ctx.plan.backward)
            dx = _product(d8, w8_t, factor, w_t_factor, ctx.dtypes[0]).view(ctx.shape)
        if wants_weight:
            dweight = _widened_gradient(dy, x8.reshape(-1, ctx.shape[-1]), x_factor).to(ctx.dtypes[1])
        return dx, dweight, _bias_gradient(ctx, dy), *(None,) * 12


class _Blockwise(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, bias, plan, dtype, *casts):
        y, given, cast = _forward(ctx, x, weight, bias, plan, dtype, casts)
        kept = (given.x8_t, given.factor_t) if weight.requires_grad else (None, None)
        ctx.save_for_backward(*kept, cast.x8_t, cast.factor_t)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx, dy):
        x8_t, x_t_factor, w8_t, w_t_factor = ctx.saved_tensors
        wants_x, wants_weight = ctx.needs_input_grad[:2]
        dy = dy.reshape(-1, dy.shape[-1])
        dx = dweight = None
        d8, factor, d8_t, factor_t = ops.fp8_cast_blocks(dy, ctx.plan.backward, wants_x, wants_weight)
        if wants_x:
            dx = _product(d8, w8_t, factor, w_t_factor, ctx.dtypes[0]).view(ctx.shape)
        if wants_weight:
            dweight = _product(d8_t, x8_t, factor_t, x_t_factor, ctx.dtypes[1])
        return dx, dweight, _bias_gradient(ctx, dy), *(None,) * 12


def together(
    x: Tensor, weights: tuple[Tensor, ...], biases: tuple[Tensor, ...], given: Cast, cast: Cast, plan: Plan,
    dtype: torch.dtype, gradient: Gradient, alone: bool = False,
) -> tuple[Tensor, ...]:  # fmt: skip
    """What several layers compute of x in `dtype`, each as `linear` does, by one scale a tensor. biases: of each layer,
    or none. cast: of the weights one on top of the other. The results share memory, but no element of it; with `alone`
    the last has its own, so that it does not keep that of the others."""
    how = len(weights), alone
    return _Together.apply(x, how, plan, dtype, *given[:2], *cast[:3], *gradient, *weights, *biases)


class _Together(torch.autograd.Function):
    """Gradients of several outputs are cast as one; an output that has none counts as zeros."""

    @staticmethod
    def forward(ctx, x, how, plan, dtype, x8, x_factor, w8, w_factor, w8_t, bound, amax, *parameters):
        count, alone = how
        weights, biases = parameters[:count], parameters[count:]
        bias = torch.cat([b.to(dtype) for b in biases]) if biases else None
        y = ops.scaled_matmul(x8.reshape(-1, x.shape[-1]), w8, x_factor, w_factor, bias, NAMES[dtype], True)
        kept = (x8, x_factor) if any(w.requires_grad for w in weights) else (None, None)
        ctx.save_for_backward(*kept, w8_t, w_factor)
        ctx.set_materialize_grads(False)
        ctx.plan, ctx.gradient, ctx.shape, ctx.sizes = plan, (bound, amax), x.shape, [w.shape[0] for w in weights]
        ctx.dtypes = x.dtype, *(p.dtype for p in parameters)
        parts = parts_of(_shaped(y, x), ctx.sizes)
        return (*parts[:-1], parts[-1].clone(memory_format=torch.contiguous_format)) if alone else parts

    @staticmethod
    @once_differentiable
    def backward(ctx, *grads):
        x8, x_factor, w8_t, w_factor = ctx.saved_tensors
        count, (x_dtype, *dtypes) = len(ctx.sizes), ctx.dtypes
        wants = ctx.needs_input_grad
        wants_x, wants_weights = wants[0], any(wants[11 : 11 + count])
        like = next((dy for dy in grads if dy is not None), None)
        if like is None:
            return (None,) * len(wants)
        rows = (like.new_zeros((*like.shape[:-1], n)) if dy is None else dy for dy, n in zip(grads, ctx.sizes))
        dys = [dy.reshape(-1, dy.shape[-1]) for dy in rows]
        dx, dparameters = None, [None] * len(dtypes)
        if wants_x or wants_weights:
            d = cast_beside(dys, *ctx.gradient, ctx.plan.backward, wants_x, wants_weights)
        if wants_x:
            dx = _product(d.x8, w8_t, d.factor, w_factor, x_dtype).view(ctx.shape)
        if wants_weights:
            x8_t = ops.fp8_transpose(x8.reshape(-1, ctx.shape[-1]))
            dparameters[:count] = _product(d.x8_t, x8_t, d.factor, x_factor, dtypes[0]).split(ctx.sizes)
        if len(dtypes) > count and any(wants[11 + count :]):
            dparameters[count:] = [dy.sum(0).to(dtype) for dy, dtype in zip(dys, dtypes[count:])]
        used = [dy is not None for dy in grads] * 2  # the weights' and the biases'
        found = (g if wanted and there else None for g, wanted, there in zip(dparameters, wants[11:], used))
        return dx, *(None,) * 10, *found


class Bounds(NamedTuple):
    """(bound or None, amax) of the hidden values of a gated MLP, of its output's gradient and of gate's and up's."""

    h_bound: Tensor | None
    h_amax: Tensor
    dy_bound: Tensor | None
    dy_amax: Tensor
    d_bound: Tensor | None
    d_amax: Tensor


def gated_mlp(
    x: Tensor, gate: Tensor, up: Tensor, down: Tensor, given: Cast, cast: Cast, cast_down: Cast, bounds: Bounds,
    plan: Plan, dtype: torch.dtype,
) -> Tensor:  # fmt: skip
    """down(silu(gate(x)) * up(x)) without biases, by one scale a tensor. cast: of gate and up together."""
    return _GatedMlp.apply(x, gate, up, down, plan, dtype, *given[:2], *cast[:3], *cast_down[:3], *bounds)


class _GatedMlp(torch.autograd.Function):
    """Gate and up are one product, and so are their gradients. The hidden values are not kept: the kernel that makes
    their gradient makes them again, in 8 bits."""

    @staticmethod
    def forward(ctx, x, gate, up, down, plan, dtype, *casts):
        x8, x_factor, w8, w_factor, w8_t, down8, down_factor, down8_t = casts[:8]
        bounds, inner = Bounds(*casts[8:]), gate.shape[0]
        both = ops.scaled_matmul(x8.reshape(-1, x.shape[-1]), w8, x_factor, w_factor, None, NAMES[dtype], True)
        first, second = both[:, :inner], both[:, inner:]
        if bounds.h_bound is None:
            h = cast_tensorwise(ops.swiglu(first, second), None, bounds.h_amax, plan.forward)
        else:
            h = Cast(*ops.swiglu_fp8(first, second, bounds.h_bound, bounds.h_amax, plan.forward))
        y = ops.scaled_matmul(h.x8, down8, h.factor, down_factor, None, NAMES[dtype], True)
        ctx.save_for_backward(x8, x_factor, both, h.factor, w8_t, w_factor, down8_t, down_factor)
        ctx.plan, ctx.bounds, ctx.inner, ctx.shape, ctx.dtypes = plan, bounds, inner, x.shape, (x.dtype, gate.dtype)
        return _shaped(y, x)

    @staticmethod
    @once_differentiable
    def backward(ctx, dy):
        x8, x_factor, both, h_factor, w8_t, w_factor, down8_t, down_factor = ctx.saved_tensors
        inner, plan, bounds, (x_dtype, w_dtype) = ctx.inner, ctx.plan, ctx.bounds, ctx.dtypes
        wants_x, wants_gate, wants_up, wants_down = ctx.needs_input_grad[:4]
        first, second = both[:, :inner], both[:, inner:]
        dy = dy.reshape(-1, dy.shape[-1])
        d_out = cast_tensorwise(dy, bounds.dy_bound, bounds.dy_amax, plan.backward, True, wants_down)
        dh = _product(d_out.x8, down8_t, d_out.factor, down_factor, both.dtype)
        d_bound = bounds.d_bound
        if d_bound is None:  # the gradients twice: for their largest value, and to be cast where they are made
            d_bound = ops.fp8_amax(*ops.swiglu_vjp(dh, first, second, (True, True)))
        d8, d8_t, h8_t, factor = ops.swiglu_vjp_fp8(
            dh, first, second, d_bound, bounds.d_amax, h_factor, plan.backward, plan.forward
        )
        d = Cast(d8, factor, d8_t)
        dx = dgate = dup = ddown = None
        if wants_down:
            ddown = _product(d_out.x8_t, h8_t, d_out.factor, h_factor, w_dtype)
        if wants_x:
            dx = _product(d.x8, w8_t, d.factor, w_factor, x_dtype).view(ctx.shape)
        if wants_gate or wants_up:
            x8_t = ops.fp8_transpose(x8.reshape(-1, ctx.shape[-1]))
            dgate, dup = _product(d.x8_t, x8_t, d.factor, x_factor, w_dtype).split(inner)
        return dx, dgate if wants_gate else None, dup if wants_up else None, ddown, *(None,) * 16
