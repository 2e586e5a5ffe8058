"""Partial results of attention: over some of the keys, for who holds the others' elsewhere or later."""

from typing import Any

import torch
from torch import Tensor

from tilesmith.engine import Op
from tilesmith.ops.attn import checks, partial_reference, reference
from tilesmith.ops.attn.op import describe_attention


def _fake(q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    out = reference.out_like(q, v.shape[3], fp32=True)
    return out, q.new_empty(q.shape[:3], dtype=out.dtype)


def _check(q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> None:
    for name, x in (("q", q), ("k", k), ("v", v)):
        if x.dtype.itemsize == 1:
            raise TypeError(f"attention_partial: {name} has dtype {x.dtype}; 8-bit values are not supported")
    checks.check_attention(q, k, v, *rest)


def _fake_accumulate(out_a: Tensor, lse_a: Tensor, out_b: Tensor, lse_b: Tensor) -> Tensor:
    return lse_a.new_empty(lse_a.shape)


def _check_accumulate(out_a: Tensor, lse_a: Tensor, out_b: Tensor, lse_b: Tensor) -> None:
    checks.check_merge(out_a, lse_a, out_b, lse_b, "accumulate_attention", alike=False)
    if any(n > 1 and step == 0 for n, step in zip(out_a.shape, out_a.stride())):
        raise ValueError(f"accumulate_attention: out_a is expanded (strides {out_a.stride()}); pass a copy")
    tensors = {"out_a": out_a, "lse_a": lse_a, "out_b": out_b, "lse_b": lse_b}
    for name, x in tensors.items():
        if x.requires_grad and torch.is_grad_enabled():
            raise ValueError(
                f"accumulate_attention: {name} requires a gradient, but adding in place has none; call it under "
                "torch.no_grad(), or merge_attention"
            )


attention_partial = Op(
    partial_reference.attention_partial,
    fake=_fake,
    outputs=("out", "lse"),
    check=_check,
    describe=describe_attention("attention_partial", reference.attention),
    together=(("k", "v"),),
    kernels={
        "triton": "tilesmith.ops.attn.triton.launch_forward",
        "hopper": "tilesmith.ops.attn.hopper.launch_forward",
    },
)

accumulate_attention = Op(
    partial_reference.accumulate_attention,
    fake=_fake_accumulate,
    outputs=("lse",),
    check=_check_accumulate,
    mutates=("out_a",),
    kernels={"triton": "tilesmith.ops.attn.triton.merge"},
)
