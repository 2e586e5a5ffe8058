"""Names under which other libraries know these ops: signatures and layouts only, the mathematics is the ops'.

Legend: B batch, T query tokens, S key tokens, H query heads, G kv heads (H % G == 0), D head dim, Dv head dim of v.
"""

from __future__ import annotations

import torch
from torch import Tensor

from tilesmith import ops
from tilesmith.engine.argument_checks import alike, attributed_to, flag, probability, size, tensor
from tilesmith.ops.attn.chunks import attention_in_chunks
from tilesmith.ops.attn.mask import Mask, Score
from tilesmith.ops.attn.op import attention, attention_op, attention_vjp, with_unit_stride


@attributed_to("attention", "Mask", "Score")
def flash_attention_forward(
    q: Tensor, k: Tensor, v: Tensor, scale: float | None = None, causal: bool = False
) -> tuple[Tensor, Tensor]:
    """Softmax attention without its weights: (out [B, H, T, Dv] in q's dtype, lse [B, H, T] fp32, fp64 for fp64).

    q [B, H, T, D], k [B, G, S, D], v [B, G, S, Dv]; scale: 1 / sqrt(D) if None; causal: the last query sees the last
    key. lse, the logarithm of each row's sum of exp(score), represents the softmax in O(T) memory:
    `attention_weights(q, k, lse, scale, causal)` computes the weights [B, H, T, S] from it. Both are differentiable.
    dtypes, layouts and what raises: `attention`, which also has masks, windows, biases, dropout and packed sequences.

    `tilesmith.flash_attention.flash_attention_forward` is another function of this name, with tile sizes.
    """
    return attention(q, k, v, Mask(causal=causal), Score(scale=scale))


@attributed_to("attention", "Mask", "Score")
def flash_attention_backward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    dout: Tensor,
    scale: float | None = None,
    causal: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients (dq, dk, dv), in the shapes and dtypes of q, k and v, for the gradient dout [B, H, T, Dv] of `out`.

    q, k, v, scale, causal: as given to `flash_attention_forward`, which returned out and lse. Autograd does this by
    itself; call this function if you keep the tensors yourself. Not differentiable. Raises ValueError or TypeError,
    naming the argument, if a shape, dtype or device does not fit.

    `tilesmith.flash_attention.flash_attention_backward` is another function of this name, with tile sizes.
    """
    for name, x in (("q", q), ("k", k), ("v", v)):
        tensor("flash_attention_backward", name, x)
    q, k, v = (with_unit_stride(x) for x in (q, k, v))
    scale = Score(scale=scale).lower().get("scale")
    attention_op.check(*attention_op.bind((q, k, v), {"scale": scale, "causal": causal}))
    _check_results(q, v, out, lse, dout)
    given = {
        **attention_op.defaults, "q": q, "k": k, "v": v, "out": out, "lse": lse, "dout": dout, "dlse": None,
        "scale": scale, "causal": causal, "output_mask": (True, True, True, False, False),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
    }  # fmt: skip
    with torch.no_grad():
        return attention_vjp(**given)[:3]


@attributed_to("linear")
def fused_linear_forward(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x · weightᵀ + bias, [..., out_features], in x's dtype: `linear`.

    x [..., in_features], weight [out_features, in_features], bias [out_features]. Differentiable.
    """
    return ops.linear(x, weight, bias)


@attributed_to("rms_norm")
def rmsnorm(x: Tensor, weight: Tensor, eps: float = 1e-6) -> Tensor:
    """x / sqrt(mean(x²) + eps) · weight over the last dim, in x's dtype: `rms_norm`.

    x [..., hidden_size], weight [hidden_size]. Differentiable.
    """
    return ops.rms_norm(x, weight, eps)


@attributed_to("attention", "Score")
def memory_efficient_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    num_heads: int,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
) -> Tensor:
    """Softmax attention on packed heads, without a matrix of scores: [B, T, num_heads · Dv] in query's dtype.

    query [B, T, num_heads · D], key [B, S, G · D], value [B, S, G · Dv]: heads are adjacent in the last dim and are not
    copied; num_heads % G == 0, and G follows from key's width. dropout_p: probability of dropping a weight; it applies
    whenever it is above 0. is_causal: the last query sees the last key. scale: 1 / sqrt(D) if None. Differentiable.

    Memory: the result and 4 bytes for each row and head; the backward as much again, and the gradients. Devices
    without tiled kernels (CPUs) work on chunks of queries. An active `MemoryConfig` chooses these chunks and bounds the
    rest: see there. Raises ValueError or TypeError, naming the argument, for what does not fit.
    """
    q, k, v = _split_heads(query, key, value, num_heads)
    dropout_p = probability("memory_efficient_attention", "dropout_p", dropout_p)
    flag("memory_efficient_attention", "is_causal", is_causal)
    return attention_in_chunks(q, k, v, scale, is_causal, dropout_p).transpose(1, 2).flatten(2)


@attributed_to("add_relu")
def fused_add_relu(x: Tensor, y: Tensor) -> Tensor:
    """max(x + y, 0), element by element, in x's dtype: `add_relu`. Differentiable."""
    return ops.add_relu(x, y)


@attributed_to("gelu", "bias_gelu")
def fused_bias_gelu(x: Tensor, bias: Tensor | None = None) -> Tensor:
    """gelu(x + bias) with the exact GELU, in x's dtype: `bias_gelu`, or `gelu` without a bias.

    x [..., F], bias [F]. Differentiable. `bias_gelu` has the tanh form too.
    """
    return ops.gelu(x) if bias is None else ops.bias_gelu(x, bias)


@attributed_to("bias_dropout")
def fused_bias_dropout(x: Tensor, bias: Tensor | None = None, p: float = 0.1, training: bool = True) -> Tensor:
    """dropout(x + bias): elements are zeroed with probability p or divided by 1 - p, in x's dtype: `bias_dropout`.

    x [..., F], bias [F]. Without `training` nothing is dropped. Which elements are dropped follows from the default
    generator of x's device. Differentiable.
    """
    return ops.bias_dropout(x, bias, p, training)


def _split_heads(query: Tensor, key: Tensor, value: Tensor, num_heads: int) -> tuple[Tensor, Tensor, Tensor]:
    """Views [B, heads, tokens, head dim] of packed heads."""
    op = "memory_efficient_attention"
    for name, x in (("query", query), ("key", key), ("value", value)):
        tensor(op, name, x, ("batch", "tokens", "heads * head dim"))
    for name, x in (("key", key), ("value", value)):
        alike(op, "query", query, name, x)
        if x.shape[0] != query.shape[0]:
            raise ValueError(f"{op}: {name} must have query's batch size {query.shape[0]}, got {x.shape[0]}")
    if value.shape[1] != key.shape[1]:
        raise ValueError(f"{op}: value must have key's {key.shape[1]} tokens, got {value.shape[1]}")
    size(op, "num_heads", num_heads, 1)
    if query.shape[2] % num_heads:
        raise ValueError(
            f"{op}: num_heads is {num_heads}, which does not divide query's width, {query.shape[2]}; "
            "choose a divisor of it"
        )
    dim = query.shape[2] // num_heads
    if dim == 0 or key.shape[2] == 0 or key.shape[2] % dim:
        raise ValueError(f"{op}: key has width {key.shape[2]}; it must be a multiple of the head dim, {dim}")
    kv_heads = key.shape[2] // dim
    if value.shape[2] == 0 or value.shape[2] % kv_heads:
        raise ValueError(f"{op}: value has width {value.shape[2]}; it must be a multiple of key's {kv_heads} heads")
    pairs = ((query, num_heads), (key, kv_heads), (value, kv_heads))
    q, k, v = (x.unflatten(2, (heads, -1)).transpose(1, 2) for x, heads in pairs)
    return q, k, v


def _check_results(q: Tensor, v: Tensor, out: Tensor, lse: Tensor, dout: Tensor) -> None:
    """Raise where what a forward returned, or its gradient, does not belong to q and v."""
    op, rows = "flash_attention_backward", (*q.shape[:3],)
    wide = torch.promote_types(q.dtype, torch.float32)
    for name, x, shape, dtype in (
        ("out", out, (*rows, v.shape[3]), q.dtype),
        ("lse", lse, rows, wide),
        ("dout", dout, (*rows, v.shape[3]), q.dtype),
    ):
        tensor(op, name, x)
        if tuple(x.shape) != shape:
            raise ValueError(f"{op}: {name} must be {list(shape)}, got {list(x.shape)}")
        if x.dtype != dtype:
            raise TypeError(f"{op}: {name} has dtype {x.dtype}; for q of {q.dtype} it must be {dtype}")
        if x.device != q.device:
            raise ValueError(f"{op}: {name} is on {x.device}, q on {q.device}; move them to one device")
