"""rms_norm_gated: what it is, what it accepts, its kernel. Legend: see op.py."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from tilesmith.engine import Op
from tilesmith.engine.argument_checks import choice
from tilesmith.ops.norm import gated_reference, op

KERNELS = {"triton": "tilesmith.ops.norm.triton.gated"}
NAME = "rms_norm_gated"
ACTIVATIONS = ("silu", "sigmoid")


def _fake(x: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    groups = rest[-1]
    wide = torch.promote_types(x.dtype, torch.float32)
    return x.new_empty(x.shape), x.new_empty((*x.shape[:-1], groups), dtype=wide)


def _fake_vjp(
    dy: Tensor,
    x: Tensor,
    gate: Tensor,
    weight: Tensor | None,
    rstd: Tensor,
    activation: str,
    gate_first: bool,
    groups: int,
    output_mask: Sequence[bool],
) -> tuple[Tensor, ...]:
    inputs = zip((x, gate, x if weight is None else weight), output_mask)
    dx, dgate, dweight = (t.new_empty(t.shape) if wanted else x.new_empty(0) for t, wanted in inputs)
    return dx, dgate, dweight


def _check(
    x: Tensor,
    gate: Tensor,
    weight: Tensor | None,
    eps: float,
    casting: str,
    activation: str,
    gate_first: bool,
    groups: int,
) -> None:
    op.check_rows(NAME, x, eps)
    if gate.shape != x.shape:
        raise ValueError(f"{NAME}: gate has shape {tuple(gate.shape)}; it must equal x's, {tuple(x.shape)}")
    if not gate.dtype.is_floating_point or torch.promote_types(gate.dtype, x.dtype) != x.dtype:
        raise TypeError(f"{NAME}: gate has dtype {gate.dtype}; for x of {x.dtype} it must be that or one of fewer bits")
    if gate.device != x.device:
        raise ValueError(f"{NAME}: gate is on {gate.device}, x on {x.device}; move them to one device")
    op.check_vector(NAME, "weight", weight, x)
    choice(NAME, "casting", casting, ("fp32", "llama"))
    choice(NAME, "activation", activation, ACTIVATIONS)
    if groups < 1 or x.shape[-1] % groups:
        raise ValueError(f"{NAME}: groups is {groups}; it must be at least 1 and divide the {x.shape[-1]} columns of x")


rms_norm_gated_vjp = Op(
    gated_reference.rms_norm_gated_vjp,
    fake=_fake_vjp,
    outputs=("dx", "dgate", "dweight"),
    kernels=KERNELS,
    fold=("dy", "x", "gate", "rstd"),
)
rms_norm_gated = Op(
    gated_reference.rms_norm_gated,
    fake=_fake,
    vjp=rms_norm_gated_vjp,
    outputs=("y", "rstd"),
    public=1,
    check=_check,
    kernels=KERNELS,
    fold=("x", "gate"),
    sharding="*N *N N -> *N",
)
