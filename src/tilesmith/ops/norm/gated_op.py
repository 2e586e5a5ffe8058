"""rms_norm_gated: what it is, what it accepts, its kernel. Legend: see op.py."""

from collections.abc import Sequence

import torch
from torch import Tensor

from tilesmith.engine import Op
from tilesmith.engine.argument_checks import choice
from tilesmith.ops.norm import gated_reference, op

KERNELS = {"triton": "tilesmith.ops.norm.triton.gated"}
NAME = "rms_norm_gated"


def _fake(x: Tensor, *_: object) -> tuple[Tensor, Tensor]:
    return x.new_empty(x.shape), x.new_empty(x.shape[:-1], dtype=torch.promote_types(x.dtype, torch.float32))


def _fake_vjp(
    dy: Tensor, x: Tensor, gate: Tensor, weight: Tensor | None, rstd: Tensor, output_mask: Sequence[bool]
) -> tuple[Tensor, ...]:
    inputs = zip((x, gate, x if weight is None else weight), output_mask)
    dx, dgate, dweight = (t.new_empty(t.shape) if wanted else x.new_empty(0) for t, wanted in inputs)
    return dx, dgate, dweight


def _check(x: Tensor, gate: Tensor, weight: Tensor | None, eps: float, casting: str) -> None:
    op._check_rows(NAME, x, eps)
    if gate.shape != x.shape:
        raise ValueError(f"{NAME}: gate has shape {tuple(gate.shape)}; it must equal x's, {tuple(x.shape)}")
    if gate.dtype != x.dtype:
        raise TypeError(f"{NAME}: gate has dtype {gate.dtype}, x has {x.dtype}; they must agree")
    if gate.device != x.device:
        raise ValueError(f"{NAME}: gate is on {gate.device}, x on {x.device}; move them to one device")
    op._check_vector(NAME, "weight", weight, x)
    choice(NAME, "casting", casting, ("fp32", "llama"))


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
