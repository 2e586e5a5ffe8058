"""The gemm family: what the products are, what they accept and which kernels they have.

Legend: M rows (all leading dims of x), K features of x, N outputs; weight is [N, K] as in torch.nn.Linear.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from tilesmith.device import portable
from tilesmith.engine import Op
from tilesmith.engine.backends import declare_backend
from tilesmith.engine.memory import ChunkedOp
from tilesmith.ops.gemm import checks, reference
from tilesmith.ops.gemm.memory import memory_efficient_linear_need

declare_backend("aten")
KERNELS = {"aten": "tilesmith.ops.gemm.aten", "triton": "tilesmith.ops.gemm.triton.linear"}
EVERYWHERE = {**KERNELS, portable.NAME: "tilesmith.ops.gemm.portable"}


def _fake_matmul(a: Tensor, b: Tensor) -> Tensor:
    return a.new_empty((*a.shape[:-1], b.shape[1]))


def _fake_matmul_vjp(dy: Tensor, a: Tensor, b: Tensor, output_mask: Sequence[bool]) -> tuple[Tensor, Tensor]:
    return a.new_empty(a.shape if output_mask[0] else 0), b.new_empty(b.shape if output_mask[1] else 0)


def _fake_linear(x: Tensor, weight: Tensor, *_: object) -> Tensor:
    return x.new_empty((*x.shape[:-1], weight.shape[0]))


def _fake_linear_act(
    x: Tensor, weight: Tensor, bias: Tensor | None, activation: str, keep_pre: bool | None
) -> tuple[Tensor, Tensor]:
    y = _fake_linear(x, weight)
    return y, torch.empty_like(y) if keep_pre and reference.keeps_pre(activation) else x.new_empty((*x.shape[:-1], 0))


def _fake_norm_linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    norm_weight: Tensor | None,
    norm_bias: Tensor | None,
    kind: str,
    *_: object,
) -> tuple[Tensor, Tensor, Tensor]:
    rstd = x.new_empty(x.shape[:-1], dtype=torch.promote_types(x.dtype, torch.float32))
    mean = rstd.new_empty((*x.shape[:-1], 0)) if kind == "rms" else torch.empty_like(rstd)
    return _fake_linear(x, weight), mean, rstd


def _fake_gradients(
    x: Tensor, weight: Tensor, vectors: Sequence[Tensor | None], output_mask: Sequence[bool]
) -> tuple[Tensor, ...]:
    wants_dx, wants_weight, *wanted = output_mask
    return (
        x.new_empty(x.shape if wants_dx else 0),
        weight.new_empty(weight.shape if wants_weight else 0),
        *(v.new_empty(v.shape) if wants else x.new_empty(0) for v, wants in zip(vectors, wanted)),
    )


def _fake_linear_vjp(dy: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None, *rest: object) -> tuple[Tensor, ...]:
    return _fake_gradients(x, weight, (bias,), rest[-1])


def _fake_norm_linear_vjp(
    dy: Tensor,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    norm_weight: Tensor | None,
    norm_bias: Tensor | None,
    *rest: object,
) -> tuple[Tensor, ...]:
    return _fake_gradients(x, weight, (bias, norm_weight, norm_bias), rest[-1])


def _decomposed_matmul(a: Tensor, b: Tensor) -> Tensor:
    return torch.matmul(a, b)


def _decomposed_linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """torch's own op where it means the same: there dweight is rounded to x's dtype, here to weight's."""
    if weight.dtype != x.dtype or (bias is not None and bias.dtype != x.dtype):
        return linear.handle(x, weight, bias, pin="")
    return torch.nn.functional.linear(x, weight, bias)


def _unread_by_vjp(
    x: Tensor, weight: Tensor, bias: Tensor | None, activation: str, keep_pre: bool | None
) -> tuple[str, ...]:
    """y, unless it is what the activation's derivative is made of."""
    return () if activation in reference.FROM_OUTPUT else ("y",)


class _LinearAct(Op):
    """linear_act, whose call must say whether autograd will ask for what only the backward reads."""

    def bind(self, args: tuple, kwargs: dict[str, Any]) -> tuple:
        full = super().bind(args, kwargs)
        if full[-1] is not None:
            return full
        wanted = torch.is_grad_enabled() and any(isinstance(t, Tensor) and t.requires_grad for t in full[:3])
        return (*full[:-1], wanted)


matmul_vjp = Op(
    reference.matmul_vjp,
    fake=_fake_matmul_vjp,
    outputs=("da", "db"),
    kernels=KERNELS,
    fold=("dy", "a"),
)
matmul = Op(
    reference.matmul,
    fake=_fake_matmul,
    vjp=matmul_vjp,
    outputs=("y",),
    check=checks.matmul,
    kernels=KERNELS,
    decompose=_decomposed_matmul,
    autocast=("a", "b"),
    fold=("a",),
    sharding="*k kn -> *n(k)",
)

linear_vjp = Op(
    reference.linear_vjp,
    fake=_fake_linear_vjp,
    outputs=("dx", "dweight", "dbias"),
    kernels=KERNELS,
    fold=("dy", "x"),
)
linear = Op(
    reference.linear,
    fake=_fake_linear,
    vjp=linear_vjp,
    outputs=("y",),
    check=checks.linear,
    kernels=KERNELS,
    decompose=_decomposed_linear,
    autocast=("x",),
    fold=("x",),
    sharding="*k nk +n -> *n(k)",
)

linear_act_vjp = Op(
    reference.linear_act_vjp,
    fake=_fake_linear_vjp,
    outputs=("dx", "dweight", "dbias"),
    kernels=KERNELS,
    fold=("dy", "x", "y", "pre"),
)
linear_act = _LinearAct(
    reference.linear_act,
    fake=_fake_linear_act,
    vjp=linear_act_vjp,
    outputs=("y", "pre"),
    public=1,
    check=checks.linear_act,
    kernels=KERNELS,
    autocast=("x",),
    fold=("x",),
    unsaved=_unread_by_vjp,
    sharding="*K nK n -> *n",
)

norm_linear_vjp = Op(
    reference.norm_linear_vjp,
    fake=_fake_norm_linear_vjp,
    outputs=("dx", "dweight", "dbias", "dnorm_weight", "dnorm_bias"),
    kernels={"aten": KERNELS["aten"]},
    fold=("dy", "x", "mean", "rstd"),
)
norm_linear = Op(
    reference.norm_linear,
    fake=_fake_norm_linear,
    vjp=norm_linear_vjp,
    outputs=("y", "mean", "rstd"),
    public=1,
    check=checks.norm_linear,
    kernels=EVERYWHERE,
    autocast=("x",),
    fold=("x",),
    sharding="*K nK n K K -> *n",
)

memory_efficient_linear_vjp = Op(
    reference.memory_efficient_linear_vjp,
    fake=_fake_linear_vjp,
    outputs=("dx", "dweight", "dbias"),
    kernels=KERNELS,
    fold=("dy", "x"),
)
memory_efficient_linear = ChunkedOp(
    reference.memory_efficient_linear,
    fake=_fake_linear,
    vjp=memory_efficient_linear_vjp,
    outputs=("y",),
    check=checks.memory_efficient_linear,
    chunk="chunk_rows",
    need=memory_efficient_linear_need,
    kernels=KERNELS,
    autocast=("x",),
    fold=("x",),
    sharding="*k nk +n -> *n(k)",
)
