"""lora_linear: what it is, what it accepts, its kernels. Legend: K features, N outputs, R the rank."""

from collections.abc import Sequence

import torch
from torch import Tensor

from tilesmith.engine import Op
from tilesmith.engine.argument_checks import floating, one_device
from tilesmith.ops.gemm import checks
from tilesmith.ops.gemm import lora_reference as reference

KERNELS = {"triton": "tilesmith.ops.gemm.triton.lora"}


def _fake(x: Tensor, weight: Tensor | None, lora_a: Tensor, lora_b: Tensor, *_: object) -> tuple[Tensor, Tensor]:
    wide = torch.float64 in (x.dtype, lora_a.dtype, lora_b.dtype)
    z = x.new_empty((*x.shape[:-1], lora_a.shape[0]), dtype=torch.float64 if wide else torch.float32)
    return x.new_empty((*x.shape[:-1], lora_b.shape[0])), z


def _fake_vjp(
    dy: Tensor,
    x: Tensor,
    weight: Tensor | None,
    lora_a: Tensor,
    lora_b: Tensor,
    bias: Tensor | None,
    z: Tensor,
    scale: float,
    output_mask: Sequence[bool],
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    of = zip((x, weight, lora_a, lora_b, bias), output_mask)
    dx, dweight, da, db, dbias = (x.new_empty(0) if t is None else t.new_empty(t.shape if w else 0) for t, w in of)
    return dx, dweight, da, db, dbias


def _check(
    x: Tensor, weight: Tensor | None, lora_a: Tensor, lora_b: Tensor, bias: Tensor | None = None, scale: float = 1.0
) -> None:
    if weight is not None:
        checks.linear_arguments("lora_linear", x, weight, bias)
    elif bias is not None:
        raise ValueError("lora_linear: bias is given without a weight; pass None, or the weight")
    floating("lora_linear", "x", x)
    if x.ndim == 0:
        raise ValueError("lora_linear: x is a scalar; it must be [..., K]")
    for name, factor in (("lora_a", lora_a), ("lora_b", lora_b)):
        floating("lora_linear", name, factor)
        one_device("lora_linear", name, factor, "x", x)
    if lora_a.ndim != 2 or lora_a.shape[1] != x.shape[-1]:
        raise ValueError(f"lora_linear: lora_a has shape {tuple(lora_a.shape)}; it must be [R, {x.shape[-1]}]")
    outputs = "N" if weight is None else weight.shape[0]
    if lora_b.ndim != 2 or lora_b.shape[1] != lora_a.shape[0] or outputs not in ("N", lora_b.shape[0]):
        raise ValueError(
            f"lora_linear: lora_b has shape {tuple(lora_b.shape)}; it must be [{outputs}, {lora_a.shape[0]}]"
        )


lora_linear_vjp = Op(
    reference.lora_linear_vjp,
    fake=_fake_vjp,
    outputs=("dx", "dweight", "dlora_a", "dlora_b", "dbias"),
    kernels=KERNELS,
    fold=("dy", "x", "z"),
)
lora_linear = Op(
    reference.lora_linear,
    fake=_fake,
    vjp=lora_linear_vjp,
    outputs=("y", "z"),
    public=1,
    check=_check,
    kernels=KERNELS,
    autocast=("x",),
    fold=("x",),
)
