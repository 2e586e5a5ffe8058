"""attention_weights and attention_stats: what they are, what they accept and which kernels they have.

Legend: B batch, T query tokens, S key tokens, H query heads, G kv heads (H % G == 0), D head dim.
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from tilesmith.engine import Op
from tilesmith.engine.argument_checks import floating
from tilesmith.engine.sharding import spread
from tilesmith.ops.attn import scores_reference as reference

TRITON = {"triton": "tilesmith.ops.attn.triton.scores"}


def _fake(q: Tensor, k: Tensor, lse: Tensor, scale: float | None, causal: bool) -> Tensor:
    return q.new_empty((*q.shape[:3], k.shape[2]))


def _fake_vjp(
    dweights: Tensor,
    q: Tensor,
    k: Tensor,
    lse: Tensor,
    scale: float | None,
    causal: bool,
    output_mask: Sequence[bool],
) -> tuple[Tensor, Tensor, Tensor]:
    dq, dk, dlse = (x.new_empty(x.shape if wanted else 0) for x, wanted in zip((q, k, lse), output_mask))
    return dq, dk, dlse


def _fake_stats(q: Tensor, k: Tensor, scale: float | None, causal: bool) -> tuple[Tensor, Tensor]:
    dtype = torch.promote_types(q.dtype, torch.float32)
    return q.new_empty(q.shape[:3], dtype=dtype), q.new_empty(q.shape[:3], dtype=dtype)


def _check_values(op: str, q: Tensor, k: Tensor, scale: float | None) -> None:
    for name, x in (("q", q), ("k", k)):
        if x.ndim != 4:
            raise ValueError(f"{op}: {name} must be [batch, heads, tokens, head dim], got {list(x.shape)}")
        floating(op, name, x)
    if k.dtype != q.dtype:
        raise TypeError(f"{op}: k has dtype {k.dtype}, q has {q.dtype}; they must match")
    if k.device != q.device:
        raise ValueError(f"{op}: k is on {k.device}, q on {q.device}; move them to one device")
    batch, heads, _, dim = q.shape
    if k.shape[0] != batch or k.shape[3] != dim or dim == 0:
        raise ValueError(f"{op}: k must be [{batch}, heads, keys, {dim}] with a positive head dim, got {list(k.shape)}")
    if k.shape[1] == 0 or heads % k.shape[1]:
        raise ValueError(
            f"{op}: k has {k.shape[1]} heads, which does not divide the {heads} heads of q; "
            "give k a number of heads that does"
        )
    if scale is not None and not 0.0 < scale < math.inf:
        raise ValueError(f"{op}: scale must be a positive number, got {scale}; to change the sign, negate q")


def _check(q: Tensor, k: Tensor, lse: Tensor, scale: float | None = None, causal: bool = False) -> None:
    _check_values("attention_weights", q, k, scale)
    wanted = torch.promote_types(q.dtype, torch.float32)
    if lse.dtype != wanted:
        raise TypeError(f"attention_weights: lse has dtype {lse.dtype}; for q of {q.dtype} it must be {wanted}")
    if lse.shape != q.shape[:3]:
        raise ValueError(f"attention_weights: lse must be {list(q.shape[:3])}, got {list(lse.shape)}")
    if lse.device != q.device:
        raise ValueError(f"attention_weights: lse is on {lse.device}, q on {q.device}; move them to one device")


def _check_stats(q: Tensor, k: Tensor, scale: float | None = None, causal: bool = False) -> None:
    _check_values("attention_stats", q, k, scale)


def _spread(op: Op, args: tuple) -> Tensor | tuple[Tensor, Tensor]:
    """A causal query looks at where it is."""
    rows = "bhT" if args[-1] else "bht"
    outputs = f"{rows}S" if op is attention_weights else f"{rows} {rows}"
    return spread(op, args, f"{rows}D bhSD {rows} -> {outputs}", held="h")


attention_weights_vjp = Op(
    reference.attention_weights_vjp, fake=_fake_vjp, outputs=("dq", "dk", "dlse"), kernels=TRITON
)

attention_weights = Op(
    reference.attention_weights,
    fake=_fake,
    vjp=attention_weights_vjp,
    outputs=("weights",),
    check=_check,
    kernels=TRITON,
    sharding=_spread,
)

attention_stats = Op(
    reference.attention_stats,
    fake=_fake_stats,
    outputs=("m", "l"),
    check=_check_stats,
    kernels=TRITON,
    sharding=_spread,
)
