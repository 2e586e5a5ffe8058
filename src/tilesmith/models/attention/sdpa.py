"""FlashAttention's place behind torch's scaled_dot_product_attention and varlen_attn, for this library's attention."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from tilesmith import ops
from tilesmith.device import philox
from tilesmith.device.rows import unit_stride
from tilesmith.models.attention.interface import NAME
from tilesmith.ops.attn.op import attention_vjp


def register_for_sdpa() -> None:
    """Register "tilesmith" with `torch.nn.attention.activate_flash_attention_impl`, in a torch that has this function.

    Nothing changes until it is activated:

        tilesmith.register_for_sdpa()
        torch.nn.attention.activate_flash_attention_impl("tilesmith")

    From then on, on CUDA and ROCm devices, every call that torch dispatches to FlashAttention runs `ops.attention`:
    scaled_dot_product_attention in fp16 and bf16 without a mask, and varlen_attn. `restore_flash_attention_impl`
    reverts this, in a torch that has it. Raises RuntimeError if this torch has no such registration.
    """
    try:
        from torch.nn.attention import register_flash_attention_impl
    except ImportError:
        raise RuntimeError(
            f"register_for_sdpa: torch {torch.__version__} has no torch.nn.attention.register_flash_attention_impl; "
            "update torch, or use attn_implementation='tilesmith' or ops.attention"
        ) from None
    register_flash_attention_impl(NAME, register_fn=_Activation)


class _Activation:
    """The kernels of torch's FlashAttention operators replaced, until `remove`."""

    def __init__(self, key: str = "CUDA"):
        self.library: torch.library.Library | None = torch.library.Library("aten", "IMPL", key)
        for name, function in _OPERATORS.items():
            if hasattr(torch.ops.aten, name):
                self.library.impl(name, function, key)

    def remove(self) -> None:
        """Put back what was there."""
        self.library = None


def _sdpa(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    return_debug_mask: bool = False,
    *,
    scale: float | None = None,
) -> tuple[Any, ...]:
    _refuse(return_debug_mask=return_debug_mask)
    mask = ops.Mask(causal=is_causal)
    out, lse, state = _forward(query, key, value, mask, ops.Score(scale=scale), dropout_p)
    # FlashAttention's result has the memory order of the queries, and compiled code relies on that
    out = torch.empty_like(query).copy_(out) if out.stride() != torch.empty_like(query).stride() else out
    return out, lse, None, None, query.shape[2], key.shape[2], *state


def _sdpa_backward(
    grad_out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    logsumexp: Tensor,
    cum_seq_q: Tensor | None,
    cum_seq_k: Tensor | None,
    max_q: int,
    max_k: int,
    dropout_p: float,
    is_causal: bool,
    philox_seed: Tensor,
    philox_offset: Tensor,
    *,
    scale: float | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    mask, score = ops.Mask(causal=is_causal), ops.Score(scale=scale)
    return _backward(grad_out, query, key, value, out, logsumexp, mask, score, dropout_p, philox_seed)


def _flash(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cum_seq_q: Tensor | None,
    cum_seq_k: Tensor | None,
    max_q: int,
    max_k: int,
    dropout_p: float,
    is_causal: bool,
    return_debug_mask: bool,
    *,
    scale: float | None = None,
    window_size_left: int | None = None,
    window_size_right: int | None = None,
    seqused_k: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
    block_table: Tensor | None = None,
    num_splits: int | None = None,
) -> tuple[Any, ...]:
    _refuse(return_debug_mask=return_debug_mask)
    mask = _mask(is_causal, window_size_left, window_size_right)
    packed = {} if cum_seq_q is None else _packed(cum_seq_q, cum_seq_k, max_q, max_k, block_table)
    if block_table is not None:
        packed["page_table"] = block_table.int()
        seqused_k = cum_seq_k.diff() if seqused_k is None and cum_seq_k is not None else seqused_k
    if seqused_k is not None:
        packed["kv_lengths"] = seqused_k.int()
    q = _heads_first(query)
    k, v = (x.transpose(1, 2) if block_table is not None else _heads_first(x) for x in (key, value))
    score = ops.Score(scale=scale, alibi=alibi_slopes)
    out, lse, state = _forward(q, k, v, mask, score, dropout_p, **packed)
    return _tokens_first(out, query), lse if cum_seq_q is None else lse.squeeze(0), *state


def _flash_into(out: Tensor, *args: Any, **named: Any) -> Tensor:
    found, lse, *_ = _flash(*args, **named)
    out.copy_(found)
    return lse


def _flash_backward(
    grad_out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    logsumexp: Tensor,
    cum_seq_q: Tensor | None,
    cum_seq_k: Tensor | None,
    max_q: int,
    max_k: int,
    dropout_p: float,
    is_causal: bool,
    rng_state: Tensor,
    unused: Tensor,
    *,
    scale: float | None = None,
    window_size_left: int | None = None,
    window_size_right: int | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    mask = _mask(is_causal, window_size_left, window_size_right)
    packed = {} if cum_seq_q is None else _packed(cum_seq_q, cum_seq_k, max_q, max_k, None)
    q, k, v, out, grad_out = map(_heads_first, (query, key, value, out, grad_out))
    lse = logsumexp if cum_seq_q is None else logsumexp.unsqueeze(0)
    score = ops.Score(scale=scale)
    gradients = _backward(grad_out, q, k, v, out, lse, mask, score, dropout_p, rng_state, **packed)
    dq, dk, dv = (_tokens_first(dx, x) for dx, x in zip(gradients, (query, key, value)))
    return dq, dk, dv


_OPERATORS: dict[str, Callable[..., Any]] = {
    "_scaled_dot_product_flash_attention": _sdpa,
    "_scaled_dot_product_flash_attention_backward": _sdpa_backward,
    "_flash_attention_forward": _flash,
    "_flash_attention_forward_no_dropout_inplace": _flash_into,
    "_flash_attention_backward": _flash_backward,
}


def _forward(
    q: Tensor, k: Tensor, v: Tensor, mask: ops.Mask, score: ops.Score, dropout_p: float, **packed: Any
) -> tuple[Tensor, Tensor, tuple[Tensor, Tensor, Tensor]]:
    """out, lse, and (state of the generator, nothing, nothing)."""
    seed = philox.draw_seed(q.device) if dropout_p > 0.0 else torch.empty(2, dtype=torch.int64, device=q.device)
    with torch.no_grad():  # the operator's own formula differentiates it
        out, lse = ops.attention(
            q, k, v, mask, score, dropout_p=dropout_p, seed=seed if dropout_p > 0.0 else None, **packed
        )
    unused = torch.empty((), dtype=torch.uint64, device=q.device)
    return out, lse, (seed.view(torch.uint64), unused, q.new_empty(0))


def _backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, mask: ops.Mask, score: ops.Score,
    dropout_p: float, state: Tensor, **packed: Any,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    named: dict[str, Any] = {**dict.fromkeys(attention_vjp.parameters), **attention_vjp.defaults}
    named |= {"causal": False, "window_left": -1, "window_right": -1, "softcap": 0.0, "dropout_p": dropout_p}
    named |= {"max_seqlen_q": 0, "max_seqlen_k": 0, "block_q": 0, "block_k": 0}
    named |= {**mask.lower(), **score.lower(), **packed}
    q, k, v = map(unit_stride, (q, k, v))
    named |= {"dout": dout, "q": q, "k": k, "v": v, "out": out, "lse": lse}
    named["seed"] = state.view(torch.int64) if dropout_p > 0.0 else None
    named["deterministic"] = torch.are_deterministic_algorithms_enabled()
    with torch.no_grad():
        dq, dk, dv, *_ = attention_vjp(**named | {"output_mask": [True, True, True, False, False]})
    return dq, dk, dv


def _refuse(**asked: bool) -> None:
    for name, value in asked.items():
        if value:
            raise RuntimeError(f"tilesmith in FlashAttention's place: {name} is not offered")


def _mask(causal: bool, left: int | None, right: int | None) -> ops.Mask:
    sides = tuple(-1 if side is None or side < 0 else side for side in (left, right))
    return ops.Mask(causal=causal, window=None if sides == (-1, -1) else sides)


def _packed(cum_seq_q: Tensor, cum_seq_k: Tensor | None, max_q: int, max_k: int, pages: Tensor | None) -> dict:
    named = {"cu_seqlens_q": cum_seq_q.int(), "max_seqlen_q": int(max_q), "max_seqlen_k": int(max_k)}
    return named | ({"cu_seqlens_k": cum_seq_k.int()} if pages is None and cum_seq_k is not None else {})


def _heads_first(x: Tensor) -> Tensor:
    """[B, T, H, D], or packed [T, H, D], as [B, H, T, D]."""
    return (x if x.ndim == 4 else x.unsqueeze(0)).transpose(1, 2)


def _tokens_first(x: Tensor, like: Tensor) -> Tensor:
    x = x.transpose(1, 2)
    return x if like.ndim == 4 else x.squeeze(0)
