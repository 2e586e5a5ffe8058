"""Experts in 8 bits as ops: a forward and its gradients. Neither has a gradient of its own: rounding has none, and
`tilesmith.precision` has layers that use both.

Legend: see reference.py.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from tilesmith.engine import Op
from tilesmith.engine.argument_checks import alike, floating, one_device
from tilesmith.ops.moe import checks, fp8_reference
from tilesmith.ops.moe.reference import GATED
from tilesmith.ops.quant.reference import OUTPUTS

KERNELS = {"triton": "tilesmith.ops.moe.triton.fp8", "hopper": "tilesmith.ops.moe.hopper.fp8"}
EXACT = torch.float64  # in place of 8 bits: what the reference computes, exactly


def _fake(
    x8: Tensor, x_factor: Tensor, gate_up8: Tensor, gate_up_factor: Tensor, down8: Tensor, down_factor: Tensor,
    indices: Tensor, weights: Tensor, activation: str, dtype: str,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    out = EXACT if x8.dtype == EXACT else OUTPUTS[dtype]
    return x8.new_empty(x8.shape, dtype=out), x8.new_empty((indices.numel(), gate_up8.shape[1]), dtype=out)


def _fake_vjp(
    dy: Tensor, dy8: Tensor, dy_factor: Tensor, x: Tensor, x_factor: Tensor | None, pre: Tensor, gate_up8_t: Tensor,
    gate_up_factor: Tensor, down8_t: Tensor, down_factor: Tensor, indices: Tensor, weights: Tensor, activation: str,
    output_mask: Sequence[bool],
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    (experts, hidden, wide), inner = gate_up8_t.shape, down8_t.shape[1]
    shapes = (x.shape, (experts, wide, hidden), (experts, hidden, inner))
    made = [dy.new_empty(shape if wanted else 0) for shape, wanted in zip(shapes, output_mask)]
    return *made, weights.new_empty(weights.shape) if output_mask[3] else dy.new_empty(0)


def _check(
    x8: Tensor, x_factor: Tensor, gate_up8: Tensor, gate_up_factor: Tensor, down8: Tensor, down_factor: Tensor,
    indices: Tensor, weights: Tensor, activation: str = "swiglu", dtype: str = "bfloat16",
) -> None:  # fmt: skip
    op = "experts_fp8"
    if dtype not in OUTPUTS:
        raise ValueError(f"{op}: dtype is {dtype!r}; it must be one of {', '.join(map(repr, OUTPUTS))}")
    _tokens(op, "x8", x8, x_factor)
    hidden = x8.shape[-1]
    if gate_up8.ndim != 3 or gate_up8.shape[2] != hidden or gate_up8.shape[0] == 0 or gate_up8.shape[1] % 2:
        raise ValueError(
            f"{op}: gate_up8 has shape {tuple(gate_up8.shape)}; for x8 of shape {tuple(x8.shape)} it must be "
            f"[E, 2 I, {hidden}]"
        )
    experts, wide = gate_up8.shape[:2]
    _weight(op, "gate_up8", gate_up8, gate_up_factor, (experts, wide, hidden), x8)
    _weight(op, "down8", down8, down_factor, (experts, hidden, wide // 2), x8)
    _routing(op, "x8", x8, indices, weights, activation)


def _check_vjp(
    dy: Tensor, dy8: Tensor, dy_factor: Tensor, x: Tensor, x_factor: Tensor | None, pre: Tensor, gate_up8_t: Tensor,
    gate_up_factor: Tensor, down8_t: Tensor, down_factor: Tensor, indices: Tensor, weights: Tensor, activation: str,
    output_mask: Sequence[bool],
) -> None:  # fmt: skip
    op = "experts_vjp_fp8"
    _tokens(op, "dy8", dy8, dy_factor)
    alike(op, "dy", dy, "pre", pre)
    if x_factor is None:
        alike(op, "dy", dy, "x", x)
    else:
        _tokens(op, "x", x, x_factor)
    for name, tensor in (("dy", dy), ("x", x)):
        if tensor.shape != dy8.shape:
            raise ValueError(f"{op}: {name} has shape {tuple(tensor.shape)}; it must be dy8's, {tuple(dy8.shape)}")
        one_device(op, name, tensor, "dy8", dy8)
    hidden = dy8.shape[-1]
    if down8_t.ndim != 3 or down8_t.shape[2] != hidden or down8_t.shape[0] == 0:
        raise ValueError(
            f"{op}: down8_t has shape {tuple(down8_t.shape)}; for dy8 of shape {tuple(dy8.shape)} it must be "
            f"[E, I, {hidden}]"
        )
    experts, inner = down8_t.shape[:2]
    _weight(op, "down8_t", down8_t, down_factor, (experts, inner, hidden), dy8)
    _weight(op, "gate_up8_t", gate_up8_t, gate_up_factor, (experts, hidden, 2 * inner), dy8)
    _routing(op, "dy8", dy8, indices, weights, activation)
    if tuple(pre.shape) != (indices.numel(), 2 * inner):
        raise ValueError(
            f"{op}: pre has shape {tuple(pre.shape)}; it must be what experts_fp8 returned, "
            f"[{indices.numel()}, {2 * inner}]"
        )
    if len(output_mask) != 4:
        raise ValueError(f"{op}: output_mask has {len(output_mask)} elements; it must have 4")


def _tokens(op: str, name: str, x8: Tensor, factor: Tensor) -> None:
    _eight(op, name, x8)
    if x8.ndim == 0:
        raise ValueError(f"{op}: {name} is a scalar; it must be [..., C]")
    _factor(op, f"{name.removesuffix('8')}_factor", factor, x8, (x8.shape[:-1].numel(), 1))


def _weight(op: str, name: str, weight8: Tensor, factor: Tensor, shape: tuple[int, ...], x8: Tensor) -> None:
    _eight(op, name, weight8)
    if tuple(weight8.shape) != shape:
        raise ValueError(f"{op}: {name} has shape {tuple(weight8.shape)}; it must be {list(shape)}")
    one_device(op, name, weight8, "the tokens", x8)
    _factor(op, name.removesuffix("_t").removesuffix("8") + "_factor", factor, x8, (shape[0],))


def _eight(op: str, name: str, x8: Tensor) -> None:
    if x8.dtype not in (torch.float8_e4m3fn, EXACT):
        raise TypeError(f"{op}: {name} has dtype {x8.dtype}; float8_e4m3fn is supported")


def _factor(op: str, name: str, factor: Tensor, x8: Tensor, shape: tuple[int, ...]) -> None:
    if factor.dtype != torch.float32 and not factor.dtype == x8.dtype == EXACT:
        raise TypeError(f"{op}: {name} has dtype {factor.dtype}; it must be float32")
    if tuple(factor.shape) != shape:
        raise ValueError(f"{op}: {name} has shape {tuple(factor.shape)}; it must be {list(shape)}")
    one_device(op, name, factor, "the tokens", x8)


def _routing(op: str, name: str, x8: Tensor, indices: Tensor, weights: Tensor, activation: str) -> None:
    if activation not in GATED:
        raise ValueError(f"{op}: activation is {activation!r}; it must be one of {', '.join(map(repr, GATED))}")
    checks.check_choice(op, x8, indices, name)
    floating(op, "weights", weights)
    if weights.shape != indices.shape:
        raise ValueError(
            f"{op}: weights has shape {tuple(weights.shape)}; it must be that of indices, {tuple(indices.shape)}"
        )
    one_device(op, "weights", weights, name, x8)
    checks.countable(op, indices)
    if weights.requires_grad and torch.is_grad_enabled():
        raise ValueError(
            f"{op}: weights requires a gradient, but this op has none; call it under torch.no_grad(), or use "
            "tilesmith.precision, whose layers have one"
        )


experts_fp8 = Op(fp8_reference.experts_fp8, fake=_fake, outputs=("y", "pre"), check=_check, kernels=KERNELS)

experts_vjp_fp8 = Op(
    fp8_reference.experts_vjp_fp8,
    fake=_fake_vjp,
    outputs=("dx", "dgate_up", "ddown", "dweights"),
    check=_check_vjp,
    kernels=KERNELS,
)
