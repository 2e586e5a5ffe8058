# Written by: python -m tilesmith.validate.stubs

from collections.abc import Sequence
from typing import Literal

from torch import Tensor

from tilesmith.distributed.losses import vocab_parallel_cross_entropy as vocab_parallel_cross_entropy
from tilesmith.distributed.losses import vocab_parallel_linear_cross_entropy as vocab_parallel_linear_cross_entropy
from tilesmith.ops.aliases import flash_attention_backward as flash_attention_backward
from tilesmith.ops.aliases import flash_attention_forward as flash_attention_forward
from tilesmith.ops.aliases import fused_add_relu as fused_add_relu
from tilesmith.ops.aliases import fused_bias_dropout as fused_bias_dropout
from tilesmith.ops.aliases import fused_bias_gelu as fused_bias_gelu
from tilesmith.ops.aliases import fused_linear_forward as fused_linear_forward
from tilesmith.ops.aliases import memory_efficient_attention as memory_efficient_attention
from tilesmith.ops.aliases import rmsnorm as rmsnorm
from tilesmith.ops.attn.fp8_op import attention_fp8 as attention_fp8
from tilesmith.ops.attn.mask import Blocks as Blocks
from tilesmith.ops.attn.op import Mask as Mask
from tilesmith.ops.attn.op import Score as Score
from tilesmith.ops.attn.op import attention as attention
from tilesmith.ops.elementwise.dropout_op import bias_dropout as bias_dropout
from tilesmith.ops.elementwise.dropout_op import bias_dropout_residual as bias_dropout_residual
from tilesmith.ops.loss.preference_op import linear_log_probs as linear_log_probs
from tilesmith.ops.norm.dropout_op import dropout_add_norm as dropout_add_norm
from tilesmith.ops.norm.softmax_op import softmax as softmax
from tilesmith.ops.norm.softmax_op import softmax_dropout as softmax_dropout

def accumulate_attention(out_a: Tensor, lse_a: Tensor, out_b: Tensor, lse_b: Tensor) -> Tensor:
    """`merge_attention` in place: out_a becomes attention over both sets of keys, whose lse is returned.

    out_a [..., Dv], written; out_b of its shape, of any floating dtype; lse_a, lse_b [...] fp32 (fp64 for fp64).
    Entries whose lse is -inf are ignored on either side, whatever out holds: out_a need not be initialised where lse_a
    is -inf.

    Returns lse [...], contiguous; computed in fp32. Raises ValueError or TypeError for shapes, dtypes and devices that
    do not fit, for memory that out_a shares with itself, and for tensors that require a gradient.
    """

def add_layer_norm(
    x: Tensor, residual: Tensor, weight: Tensor | None = None, bias: Tensor | None = None, eps: float = 1e-05
) -> tuple[Tensor, Tensor]:
    """s = x + residual and y = layer_norm(s), in one pass.

    x: [..., N]. residual: x's shape, in x's dtype or fp32. s is rounded to residual's dtype, and y, in x's dtype, is
    the norm of the rounded s, as two separate ops would give. weight, bias, eps and memory order: see `layer_norm`.

    Returns (y, s). x and residual have the same gradient; it is computed in fp32 and rounded to each one's dtype.

    Raises as `layer_norm` does; ValueError too for a residual of another shape or device, TypeError for its dtype.
    """

def add_layer_norm_vjp(
    dy: Tensor | None,
    ds: Tensor | None,
    s: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    mean: Tensor,
    rstd: Tensor,
    output_mask: Sequence[bool],
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients (dresidual, dweight, dbias) of `add_layer_norm`; dx is dresidual. dy or ds may be None: zeros.

    dy, ds: [..., N], the gradients of y and of s. s: [..., N] and mean, rstd: [...], which the forward saved. dresidual
    = ds + the dx of `layer_norm_vjp` at s, computed in fp32 (fp64 for fp64 s), in s's dtype. An empty tensor stands for
    a gradient that `output_mask` does not ask for.
    """

def add_relu(x: Tensor, y: Tensor) -> Tensor:
    """max(x + y, 0), element by element.

    Args:
        x, y: one shape and dtype, floating, any strides.

    Returns a contiguous tensor of x's shape and dtype; the sum is rounded once. Only the result is saved: x and y have
    the same gradient, dout where the result is above 0. Raises ValueError or TypeError where x and y differ in shape,
    dtype or device, or are not floating.
    """

def add_relu_vjp(dout: Tensor, out: Tensor) -> Tensor:
    """Gradient of `add_relu` from its result: dx, contiguous, in out's dtype; dy is dx.

    dout, out: one shape, any strides, floating. dx = dout where out is above 0, else 0.
    """

def add_rms_norm(
    x: Tensor,
    residual: Tensor,
    weight: Tensor | None = None,
    eps: float = 1e-06,
    offset: float = 0.0,
    casting: Literal["fp32", "llama", "none"] = "fp32",
) -> tuple[Tensor, Tensor]:
    """s = x + residual and y = rms_norm(s), in one pass: what a pre-norm transformer does before each block.

    x: [..., N]. residual: x's shape, in x's dtype or fp32. s is rounded to residual's dtype, and y is the norm of the
    rounded s, as two separate ops would give. y has x's dtype, to which the casts of `casting` refer as well.
    weight, eps, offset, casting and memory order: see `rms_norm`; s is laid out as y. weight is [N] here.

    Returns (y, s). x and residual have the same gradient; it is computed in fp32 and rounded to each one's dtype.

    Raises as `rms_norm` does; ValueError too for a residual of another shape or device, TypeError for its dtype.
    """

def add_rms_norm_fp8(
    x: Tensor,
    residual: Tensor,
    weight: Tensor | None,
    bound: Tensor,
    amax: Tensor,
    eps: float = 1e-06,
    offset: float = 0.0,
    casting: Literal["fp32", "llama"] = "fp32",
    format: Literal["e4m3", "e5m2"] = "e4m3",
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """`add_rms_norm` and the cast of its y in one pass: (y, s, y8, factor, rstd). See `rms_norm_fp8`."""

def add_rms_norm_vjp(
    dy: Tensor | None,
    ds: Tensor | None,
    s: Tensor,
    weight: Tensor | None,
    rstd: Tensor,
    offset: float,
    output_mask: Sequence[bool],
) -> tuple[Tensor, Tensor]:
    """Gradients (dresidual, dweight) of `add_rms_norm`; dx is dresidual. Either of dy and ds may be None: zeros.

    dy, ds: [..., N], the gradients of y and of s. s: [..., N] and rstd: [...], which the forward saved. dresidual = ds
    + the dx of `rms_norm_vjp` at s, computed in fp32 (fp64 for fp64 s), in s's dtype. An empty tensor stands for a
    gradient that `output_mask` does not ask for.
    """

def add_runs(
    a: Tensor, b: Tensor, more_a: Tensor, more_b: Tensor, into_a: Tensor, into_b: Tensor, runs: Sequence[int]
) -> None:
    """Add runs of tokens to two sums, such as gradients of keys and of values, and round what comes of it.

    a, b [B, H, T, D]: the sums; D may differ, also be 0 where there is one sum alone. more_a, more_b [B, H, N, D]: what
    is added. into_a, into_b [B, H, T, D]: the sums with it; they may be a and b, of which then only tokens that a run
    meets are read and written; else a and b are not written. Each fp64, fp32, fp16 or bf16. runs: (first token of
    more, first token of the sum, tokens) of each, one after another; runs that share tokens of the sum are added in
    their order, each addition rounded to the sum's dtype. Raises ValueError or TypeError for what does not fit, and for
    tensors that require a gradient.
    """

def attention_dequantize(
    q8: Tensor,
    k8: Tensor,
    v8: Tensor,
    q_scale: Tensor,
    k_scale: Tensor,
    v_scale: Tensor,
    tokens_first: Sequence[bool],
    dtype: Literal["bfloat16", "float16", "float32", "float64"] = "bfloat16",
) -> tuple[Tensor, Tensor, Tensor]:
    """q8, k8 and v8 times their factors: (q, k, v) in `dtype`, rounded once.

    q8 [B, H, T, D], k8 [B, G, S, D], v8 [B, G, S, Dv]: float8 or int8 as a rule, any strides. q_scale, k_scale,
    v_scale: floating, as `attention` takes them. tokens_first: which of q, k and v lie in memory as [B, T, H, D]; the
    others are contiguous. dtype: "bfloat16", "float16", "float32" or "float64"; for q8 in fp64 it is fp64.

    What `attention_quantize` returned becomes numbers that bf16 has exactly. There are no gradients. Raises ValueError
    or TypeError for shapes, dtypes and devices that do not fit.
    """

def attention_fp8_gradients(
    dq8: Tensor | None,
    dk8: Tensor | None,
    dlse: Tensor | None = None,
    lse: Tensor | None = None,
    mean: Tensor | None = None,
    cos: Tensor | None = None,
    sin: Tensor | None = None,
    dtype: Literal["", "bfloat16", "float16", "float32", "float64"] = "",
    scale: float = 1.0,
    offset: int = 0,
    rotate: bool = True,
    interleaved: bool = False,
) -> tuple[Tensor, Tensor]:
    """Gradients of the q and k that `attention_quantize` took, from those of the values it made: (dq, dk).

    Rounding counts as the identity; what the op did besides is linear in q and k, and its transpose is applied.
    dq8 [B, H, T, D], dk8 [B, G, S, D]: fp64, fp32, fp16 or bf16, one dtype, any strides; for one that is None an empty
      tensor comes back.
    dlse, lse [B, H, T] fp32 (fp64 for fp64), mean [B, G, D] fp32, all of them or none: the mean of the keys, which
      `lse` was given times q and `scale`, adds dlse * scale * mean to dq8, nothing where lse is -inf.
    rotate: then rows are multiplied by the Hadamard matrix over sqrt(D), its own inverse; D must be a power of two.
    cos, sin, interleaved: then rows are turned back by these angles, [P, R/2] or [B or 1, P, R/2], key j by angle j
      and query i by angle i + offset; offset is S - T.
    dtype: of the results, "bfloat16", "float16", "float32" or "float64"; "" is that of the gradients given, as is fp64.

    Computed in fp32 (fp64 for fp64) and rounded to the dtype given after each of these steps, or once at the end.
    Results lie in memory as `torch.empty_like` of dq8 and dk8. There are no gradients of them. Raises ValueError or
    TypeError for shapes, dtypes and devices that do not fit. Source of the rule: Bengio et al., "Estimating or
    Propagating Gradients Through Stochastic Neurons", 2013 (straight-through).
    """

def attention_partial(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Tensor | None = None,
    mask: Tensor | None = None,
    alibi: Tensor | None = None,
    sinks: Tensor | None = None,
    seed: Tensor | None = None,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    kv_lengths: Tensor | None = None,
    prefix_lengths: Tensor | None = None,
    q_documents: Tensor | None = None,
    k_documents: Tensor | None = None,
    block_offsets: Tensor | None = None,
    block_indices: Tensor | None = None,
    block_offsets_t: Tensor | None = None,
    block_indices_t: Tensor | None = None,
    page_table: Tensor | None = None,
    q_scale: Tensor | None = None,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
    scale: float | None = None,
    causal: bool = False,
    window_left: int = -1,
    window_right: int = -1,
    softcap: float = 0.0,
    dropout_p: float = 0.0,
    max_seqlen_q: int = 0,
    max_seqlen_k: int = 0,
    block_q: int = 0,
    block_k: int = 0,
    deterministic: bool = False,
) -> tuple[Tensor, Tensor]:
    """`attention` over a subset of the keys with an unrounded out: fp32 where q, k and v have 16 bits.

    It takes the arguments of `ops.attn.reference.attention`, except 8-bit values. Results of other keys are added by
    `accumulate_attention`; the sum is rounded when it is complete.

    Returns out [B, H, T, Dv], at least fp32, in the memory order of attention's, and lse [B, H, T]. Raises ValueError
    or TypeError as attention does, and TypeError for 8-bit values.
    """

def attention_quantize(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cos: Tensor | None = None,
    sin: Tensor | None = None,
    granularity: Literal["block", "head", "tensor"] = "block",
    smooth: bool = True,
    rotate: bool = True,
    interleaved: bool = False,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """q, k and v as `attention` takes them in float8_e4m3fn: (q8, k8, v8, q_scale, k_scale, v_scale, shift, mean).

    q [B, H, T, D], k [B, G, S, D], v [B, G, S, Dv]: fp64, fp32, fp16 or bf16, one dtype, any strides.

    cos, sin [P, R/2] or [B or 1, P, R/2], P >= S, any floating dtype: q and k are rotated by these angles first, as
      `rope` does it (interleaved is its own, too), key j by angle j and query i by angle i + S - T; T <= S.
    smooth: the mean of each kv head's keys is subtracted from them: of all, or from 4,096 tokens on of the blocks of
      128 that `smoothed_step` picks, 2,048 tokens at least. That moves all scores of a query by one number, so `out` is
      what it was and lse = lse of the quantised values + scale * shift, where shift [B, H, T] fp32 is q . mean (empty
      if not smooth). It is right without softcap and sinks only. Source: SageAttention, 2024.
    rotate: rows of q and k are multiplied by the Hadamard matrix of order D over sqrt(D), which leaves q . k as it is
      and spreads a large element over its row; D must be a power of two. Source: QuaRot, 2024; FlashAttention-3.
    granularity: whose largest absolute element a factor comes from: a "block" of 128 tokens of a head, a "head" of a
      batch row, or the whole "tensor". factor = the least power of two that is at least that element / 448, so that
      x8 * factor is a number of bf16, or 1 where that element is at most 2**-100; a value x becomes x / factor, rounded
      once.

    Returns q8, k8 and v8 of the shapes of q, k and v; q_scale, k_scale and v_scale fp32, [B, H or G, ceil(tokens /
    128)], [B, H or G, 1] or [1, 1, 1]; shift; mean [B, G, D] fp32, what was taken off the keys, times the Hadamard
    matrix if rotate, so that k8 times its factors + mean are the keys (empty if not smooth). q8 lies in memory as q
    does ([B, T, H, D] if its head stride is smaller than its token stride, else contiguous); k8 in [B, G, S16, D] and
    v8 in [B, G, Dv, S16], where S16 is S rounded up to a multiple of 16. Everything is computed in fp32 (fp64 for
    fp64), so a value that was moved or rotated and lies between two codes may get either. A NaN or an infinity reaches
    what shares its factor or mean. There are no gradients: those of a forward in e4m3 are `attention_fp8`'s.
    """

def attention_stats(q: Tensor, k: Tensor, scale: float | None = None, causal: bool = False) -> tuple[Tensor, Tensor]:
    """The largest scaled score of each row, m, and the row's sum of exp(score - m), l; together they give lse.

    q, k, scale, causal: see `attention_weights`. Returns m and l, [B, H, T], contiguous, fp32 (fp64 for fp64), so that
    m + log(l) = lse and 1 <= l <= S. A row that sees no key has m = -inf and l = 0. Raises as `attention_weights` does.
    """

def attention_vjp(
    dout: Tensor | None,
    dlse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    bias: Tensor | None,
    mask: Tensor | None,
    alibi: Tensor | None,
    sinks: Tensor | None,
    seed: Tensor | None,
    cu_seqlens_q: Tensor | None,
    cu_seqlens_k: Tensor | None,
    kv_lengths: Tensor | None,
    prefix_lengths: Tensor | None,
    q_documents: Tensor | None,
    k_documents: Tensor | None,
    block_offsets: Tensor | None,
    block_indices: Tensor | None,
    block_offsets_t: Tensor | None,
    block_indices_t: Tensor | None,
    page_table: Tensor | None,
    q_scale: Tensor | None,
    k_scale: Tensor | None,
    v_scale: Tensor | None,
    scale: float | None,
    causal: bool,
    window_left: int,
    window_right: int,
    softcap: float,
    dropout_p: float,
    max_seqlen_q: int,
    max_seqlen_k: int,
    block_q: int,
    block_k: int,
    deterministic: bool,
    output_mask: Sequence[bool],
    gradients_fp32: bool = False,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Gradients (dq, dk, dv, dbias, dsinks) of `attention`; those that `output_mask` leaves out are empty.

    dout [B, H, T, Dv] and dlse [B, H, T]: None counts as zero. dq, dk and dv have the memory order of q, k and v
    (`torch.empty_like`), dbias and dsinks are contiguous; each has the dtype of its input. gradients_fp32: dq, dk and
    dv of 16-bit inputs are fp32, not rounded: parts of sums that are rounded when they are complete.
    """

def attention_weights(q: Tensor, k: Tensor, lse: Tensor, scale: float | None = None, causal: bool = False) -> Tensor:
    """The softmax weights that `attention` leaves as `lse`: exp(scale q . k - lse), whole in memory.

    Args:
        q: [B, H, T, D], fp64, fp32, fp16 or bf16, any strides.
        k: [B, G, S, D] of q's dtype; query head h reads head h // (H // G).
        lse: [B, H, T], fp32 (fp64 for fp64), as `attention` returns it for the same q, k, scale and causal.
        scale: factor of q . k; 1 / sqrt(D) if None.
        causal: query i sees the keys up to i + S - T only; others get 0.

    Returns [B, H, T, S], contiguous, in q's dtype, computed in fp32 (fp64) and rounded once. Rows sum to 1; a row that
    sees no key (lse -inf) is 0. Gradients flow to q, k and lse; through lse they reach q and k a second time, which
    together is the gradient of the softmax: an lse without a gradient counts as a constant.

    Raises ValueError or TypeError, naming the argument, for shapes, dtypes, devices and numbers that do not fit.
    """

def attention_weights_vjp(
    dweights: Tensor, q: Tensor, k: Tensor, lse: Tensor, scale: float | None, causal: bool, output_mask: Sequence[bool]
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients (dq, dk, dlse) of `attention_weights`, contiguous; an empty tensor where ``output_mask`` is False."""

def bias_dropout_residual_vjp(
    dout: Tensor, bias: Tensor | None, seed: Tensor | None, p: float, output_mask: Sequence[bool]
) -> tuple[Tensor, Tensor]:
    """Gradients of `bias_dropout_residual`: (dx, dbias), as of `bias_dropout`; dresidual is dout itself.

    dout: [..., F], floating. dx: [..., F], in dout's dtype; dbias: [F], in bias's dtype. An empty tensor stands for a
    gradient that `output_mask` does not ask for.
    """

def bias_dropout_vjp(
    dout: Tensor, bias: Tensor | None, seed: Tensor | None, p: float, output_mask: Sequence[bool]
) -> tuple[Tensor, Tensor]:
    """Gradients of `bias_dropout`: (dx in dout's dtype, dbias), contiguous; empty where ``output_mask`` is False.

    dout: [..., F], floating. dx is dout where the dropout kept an element, divided by the probability of that, and 0
    elsewhere. dbias: [F], the sum of dx over rows in fp32 (fp64 for fp64), in bias's dtype.
    """

def bias_gelu(x: Tensor, bias: Tensor | None = None, approximate: Literal["none", "tanh"] = "none") -> Tensor:
    """gelu(x + bias, approximate), element by element, as after the first projection of an MLP.

    Args:
        x: [..., F], floating, any strides.
        bias: [F], floating, or None for `gelu`.
        approximate: "none" or "tanh", as in `gelu`.

    Returns a contiguous tensor of x's shape and dtype. x + bias is not rounded. dbias is summed over rows in float32
    (float64 for float64), in a fixed order, and rounded to bias' dtype. Raises ValueError or TypeError for a bias that
    is not a floating [F] on x's device, an x that is not floating or has no dims, and for another ``approximate``.
    """

def bias_gelu_vjp(
    dout: Tensor, x: Tensor, bias: Tensor | None, approximate: str, output_mask: Sequence[bool]
) -> tuple[Tensor, Tensor]:
    """Gradients of `bias_gelu`: (dx, dbias), contiguous; an empty tensor where ``output_mask`` is False.

    dout, x: [..., F], floating; bias: [F] or None. dx: x's shape and dtype. dbias: [F], the sum of dx over rows in fp32
    (fp64 for fp64), in a fixed order, in bias's dtype.
    """

def block_lists(keep: Tensor, room: int, counts: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Block lists from a boolean table, without waiting for the device to count its entries.

    Args:
        keep: bool [B, L, R, C].
        room: how many entries `indices` has room for; it must be at least the number of True. Entries beyond it are
            left out, of the lists by rows and of those by columns, which then differ.
        counts: int32 [R], how many True each row of every table has, where that is known before (`block_select` with
            mass 1 keeps min(counts, visible)). Kernels rely on it: with other numbers their lists are wrong.

    Returns offsets int32 [B, L, R + 1], indices int32 [room], and the same by columns: offsets_t [B, L, C + 1],
    indices_t [room]: the form that `attention` takes. Entries behind the last list are 0. Not differentiable.
    """

def block_mass(
    q: Tensor,
    k: Tensor,
    lse: Tensor,
    offsets: Tensor | None = None,
    indices: Tensor | None = None,
    scale: float | None = None,
    causal: bool = False,
    block_q: int = 128,
    block_k: int = 128,
    query_stride: int = 1,
) -> Tensor:
    """The share of each block of keys in the attention of each block of queries: mean of sum of exp(scale q . k - lse).

    The sum is over the keys of a block, the mean over its queries and the query heads of a kv head. With the `lse` that
    `attention` returns for the same mask, the shares of a row add up to 1 (to less where a query sees nothing).

    Args:
        q, k, scale, causal, block_q, block_k: see `block_scores`.
        lse: [B, H, T], fp32 (fp64 for fp64). A query with -inf counts as one whose shares are 0.
        offsets, indices: block lists as `attention` takes them, int32 [B|1, G|1, R + 1] and [entries]: only blocks in
            a list are computed, others are 0. None: all.
        query_stride: a sample of the queries stands for all: each query_stride-th of a block, from its first one on.
            It must divide block_q.

    Returns [B, G, R, C] fp32 (fp64 for fp64), contiguous. Gradients are those of this reference, recomputed. On a CPU
    lists that do not ascend or name blocks that are not there raise ValueError.
    """

def block_max_scores(
    q: Tensor, k: Tensor, scale: float | None = None, causal: bool = False, block_k: int = 128, block_q: int = 1
) -> Tensor:
    """The largest score that a query of each block of queries has in each block of keys: max of scale q . k.

    q, k, scale, causal, block_k, block_q: see `block_scores`; with a block_q of 1 each query by itself. Returns
    [B, H, R, C] fp32 (fp64 for fp64), contiguous; -inf where no pair counts. Differentiable: the gradient of a pair of
    blocks is that of one pair of tokens, the largest; of equal ones that of the first query, and of its first key. Rows
    are computed few at a time, so that scores of T x S are not in memory at once.
    """

def block_max_scores_vjp(
    dscores: Tensor,
    q: Tensor,
    k: Tensor,
    scores: Tensor,
    scale: float | None,
    causal: bool,
    block_k: int,
    block_q: int,
    output_mask: Sequence[bool],
) -> tuple[Tensor, Tensor]:
    """Gradients (dq, dk) of `block_max_scores`, with the strides that `torch.empty_like` gives q and k; an empty tensor
    where ``output_mask`` is False.

    Blocks whose dscores is 0 cost nothing: a loss that looks at few blocks has a cheap gradient.
    """

def block_pattern(
    seed: Tensor,
    pattern: Literal["random", "block_sparse", "strided", "local_global"],
    tokens: int,
    keys: int,
    sparsity_ratio: float = 0.9,
    lists: int = 1,
    block: int = 128,
    causal: bool = True,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Block lists of a pattern that does not depend on queries and keys, and their transpose, on seed's device.

    Row r keeps counts[r] of the v[r] columns that it sees: one, if it sees any, and of the n other columns of all rows
    up to it floor(n * rest / all others) together, where rest is floor((1 - sparsity_ratio) * seen columns) less one a
    row. A run of them lies around the column of its own tokens (the last one it sees, if causal); the others are taken
    from the columns outside the run, which are numbered consecutively.

        random: a run of 1. One from each of as many equal stretches, another one in each list.
        block_sparse: a run of 4, and runs of 4 at equal distances.
        strided: a run of half of them, the others at equal distances.
        local_global: a quarter of them from the first column on, the others in the run.

    Entry p of a row's n stretches of w columns is column low + (h * (high - low) >> 32) with low = p * w // n and
    high = (p + 1) * w // n, where h = mix(mix(mix(mix(lo + g) ^ hi) + list + g) + e) modulo 2**32: lo and hi are the
    words of the seed, g is 0x9E3779B9, e the number of entries of a list before the row, plus p, and mix the finaliser
    of MurmurHash3 (A. Appleby).

    Args:
        seed: int64 [1]; only random reads it.
        pattern: "random", "block_sparse", "strided" or "local_global".
        tokens, keys: T and S; with causal they are aligned at the last token.
        sparsity_ratio: from 0 to 0.95.
        lists: L. block: tokens of a block.

    Returns offsets int32 [1, L, R + 1], indices int32 [entries], ascending within a row, and the same by columns:
    offsets_t [1, L, C + 1], indices_t [entries]; contiguous. Not differentiable. Raises ValueError or TypeError, naming
    the argument, for what does not fit, and where the lists have 2**31 entries or more.
    """

def block_scores(
    q: Tensor, k: Tensor, scale: float | None = None, causal: bool = False, block_q: int = 128, block_k: int = 128
) -> Tensor:
    """The score of each block of keys for each block of queries: log(sum of exp(scale q . k)) over its pairs.

    Args:
        q: [B, H, T, D], fp64, fp32, fp16 or bf16, any strides.
        k: [B, G, S, D] of q's dtype; query head h reads head h // (H // G).
        scale: factor of q . k; 1 / sqrt(D) if None.
        causal: query i sees the keys up to i + S - T only, and only such pairs count.
        block_q, block_k: tokens of a block; the last ones may be shorter.

    Returns [B, H, R, C] fp32 (fp64 for fp64), contiguous; -inf where no pair counts. Differentiable.
    Raises ValueError or TypeError, naming the argument, for shapes, dtypes, devices and numbers that do not fit.
    """

def block_scores_vjp(
    dscores: Tensor,
    q: Tensor,
    k: Tensor,
    scores: Tensor,
    scale: float | None,
    causal: bool,
    block_q: int,
    block_k: int,
    output_mask: Sequence[bool],
) -> tuple[Tensor, Tensor]:
    """Gradients (dq, dk) of `block_scores`, contiguous; an empty tensor where ``output_mask`` is False.

    Blocks whose dscores is 0 cost nothing: a loss that looks at few blocks has a cheap gradient.
    """

def block_select(
    scores: Tensor,
    counts: Tensor,
    visible: Tensor,
    mass: float = 1.0,
    first: int = 0,
    last: int = 0,
    ends: Tensor | None = None,
) -> Tensor:
    """The blocks of keys that each block of queries keeps: bool [B, L, R, C], contiguous.

    Of the first visible[r] columns a row keeps the counts[r] best: its `last` last ones (from the diagonal backward),
    then its `first` first ones, then by score, the leftmost of equal ones. With mass < 1 scores must be shares, none
    below 0: behind its `last` and `first` ones the row then stops as soon as what it keeps adds up to `mass` of what it
    sees.

    Args:
        scores: [B, L, R, C], fp64, fp32, fp16 or bf16; NaN counts as -inf.
        counts, visible: int32 [R]; numbers beyond the columns count as all of them.
        mass: in (0, 1].
        first, last: how many blocks are kept whatever their scores are.
        ends: int32 [R], the column behind the diagonal, from which `last` counts backward; visible if None.

    Not differentiable. Raises ValueError or TypeError, naming the argument, for what does not fit.
    """

def block_shares(
    q: Tensor,
    k: Tensor,
    scale: float | None = None,
    causal: bool = False,
    block: int = 128,
    stretches: int = 8,
    query_stretches: int | None = None,
    query_stride: int = 1,
    key_stride: int = 1,
) -> Tensor:
    """Estimated share of each block of keys in the attention of each block of queries.

    Keys are averaged over stretches of block / stretches tokens, queries over stretches of block / query_stretches
    tokens, and rounded to their dtype; the softmax of the means' scores is summed over the stretches of a block of
    keys, and averaged over those of a block of queries and over the query heads of a kv head. A row's shares add up to
    1.

    Args:
        q, k, scale: see `block_scores`.
        causal: a mean of queries sees the means of keys up to the last one that begins in its stretch; it needs T == S.
        block: tokens of a block; the last one, and the last stretch, may be shorter.
        stretches: of a block, which they divide.
        query_stretches: those of a block of queries, a divisor of stretches; None: as many.
        query_stride, key_stride: a mean of queries is that of each query_stride-th token of its stretch, from the first
            one on, and one of keys that of each key_stride-th. They must divide the stretches.

    Returns [B, G, R, C] fp32 (fp64 for fp64), contiguous. Gradients are those of this reference, recomputed.
    """

def column_sums(x: Tensor, dtype: Literal["", "float16", "bfloat16", "float32", "float64"] = "") -> Tensor:
    """The sum of x over all dims but the last: the gradient of a bias, from the gradient of the sum it was added to.

    Args:
        x: [..., F], floating, any strides.
        dtype: of the result, "float16", "bfloat16", "float32" or "float64"; "" is x's.

    Summed in float32 (float64 where x or the result is float64), in a fixed order, and rounded once. Without rows the
    sums are 0. Returns a contiguous [F]. Raises TypeError for an x that is not floating, ValueError for one without
    dims and for another `dtype`.
    """

def copy_runs(a: Tensor, b: Tensor, into_a: Tensor, into_b: Tensor, runs: Sequence[int]) -> None:
    """Copy runs of tokens of two tensors, such as keys and values, into two others, which keep the rest of theirs.

    a, b [B, H, T, D], whose D may differ, also be 0 where there is one tensor alone; into_a, into_b [B, H, N, D] of
    their dtypes. runs: (first token, first token where it goes, tokens) of each, one after another; no two may go to
    one place. Raises ValueError or TypeError for what does not fit, and for tensors that require a gradient.
    """

def cross_entropy(
    logits: Tensor,
    target: Tensor,
    weight: Tensor | None = None,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    scale: float = 1.0,
    softcap: float = 0.0,
    reduction: Literal["mean", "sum", "none"] = "mean",
) -> Tensor:
    """Cross-entropy of logits and class labels as in torch.nn.functional.cross_entropy, with z-loss and soft cap.

    With z = scale · logits, or softcap · tanh(scale · logits / softcap) where softcap > 0, lse = log Σ exp(z), s =
    label_smoothing and w the class weights (all 1 without `weight`), a token with label t costs

        (1 − s) · w[t] · (lse − z[t]) + (s / V) · Σ_c w[c] · (lse − z[c]) + z_loss · lse²

    and nothing where t is ignore_index. "none" returns the tokens' costs, "sum" their sum. "mean" divides the first two
    terms by the sum of w[t] over counted tokens and the third by their number; without counted tokens it is NaN, and
    the gradient is 0. Everything is computed in fp32 (fp64 for fp64 logits).

    logits: [..., V], floating; the classes are the last dim, also where torch would have them second. target: [...],
    int64 or int32. weight: [V], floating; it receives no gradient. label_smoothing: 0 to 1. z_loss, softcap: 0 or more.

    Returns the loss, a scalar, or [...] for "none": fp32 (fp64 for fp64 logits), where torch's function returns logits'
    dtype. The loss of a model that `optimize` changed keeps the dtype of torch's loss. The gradient has logits' shape
    and dtype and is contiguous.

    Raises ValueError on a CPU for a label outside 0 … V − 1 that is not ignore_index; on other devices, where checking
    would wait for the device, such a token's loss and gradient are NaN. Raises TypeError and ValueError for arguments
    of other types, shapes or values than these.

    Source: Szegedy et al., arXiv:1512.00567 (smoothing); Chowdhery et al., arXiv:2204.02311 (z loss); Gemma Team,
    arXiv:2408.00118 (soft cap); Milakov and Gimelshein, arXiv:1805.02867 (one pass over the logits).
    """

def cross_entropy_vjp(
    dloss: Tensor,
    logits: Tensor,
    target: Tensor,
    weight: Tensor | None,
    lse: Tensor,
    divisors: Tensor,
    ignore_index: int,
    label_smoothing: float,
    z_loss: float,
    scale: float,
    softcap: float,
    reduction: str,
    output_mask: Sequence[bool],
) -> Tensor:
    """The gradient dlogits of `cross_entropy`, rounded once, to logits' dtype.

    dloss: a scalar, or [...] for reduction "none". logits: [..., V], target: [...], weight: [V]; lse: [...] and
    divisors: [2] for "mean", else empty, which the forward saved. Computed in fp32 (fp64 for fp64 logits) as the
    derivative of the forward's formula: softmax − the smoothed label, times the class weight, plus 2 · z_loss · lse ·
    softmax. An empty tensor where `output_mask` does not ask for it.
    """

def dequant_linear(
    x: Tensor, codes: Tensor, scale: Tensor, zero: Tensor, order: Tensor, strips: Tensor, rows: int
) -> Tensor:
    """y = x weight^T of a packed weight: [..., rows] in x's dtype, summed in fp32.

    x: [..., K], float32, bfloat16 or float16. codes, scale, zero, order, strips: as in
    `tilesmith.ops.quant.packed_reference`. rows: N. x receives a gradient, the weight does not. Raises TypeError for
    other dtypes, ValueError for other shapes and devices.
    """

def dequant_linear_vjp(
    dy: Tensor, codes: Tensor, scale: Tensor, zero: Tensor, order: Tensor, strips: Tensor, rows: int
) -> Tensor:
    """dx = dy weight, [..., K] in dy's dtype."""

def dequantize_packed(
    codes: Tensor,
    scale: Tensor,
    zero: Tensor,
    order: Tensor,
    strips: Tensor,
    rows: int,
    dtype: Literal["bfloat16", "float16", "float32"] = "float16",
) -> Tensor:
    """The weight that packed codes stand for, [rows, K] in `dtype` ("bfloat16", "float16" or "float32").

    codes, scale, zero, order, strips: as in `tilesmith.ops.quant.packed_reference`. rows: N, at most 16 S. Computed in
    fp32, rounded once. Raises TypeError for other dtypes, ValueError for other shapes and devices.
    """

def dropout_add_norm_vjp(
    dy: Tensor | None,
    ds: Tensor | None,
    s: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    seed: Tensor | None,
    mean: Tensor,
    rstd: Tensor,
    p: float,
    kind: str,
    output_mask: Sequence[bool],
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Gradients (dx, dresidual, dweight, dbias) of `dropout_add_norm`; either of dy and ds may be None: zeros.

    dx has dy's dtype, which is x's (s's where dy is None).

    dy, ds: [..., N], the gradients of y and of s. s: [..., N]; mean (layer norm) and rstd: [...]; seed: those of the
    forward. dresidual is that of `add_layer_norm_vjp` or `add_rms_norm_vjp`, in s's dtype; dx is dresidual where the
    dropout kept an element, divided by the probability of that, and 0 elsewhere. dweight, dbias: [N]. An empty tensor
    stands for a gradient that `output_mask` does not ask for.
    """

def expand_kv(kv: Tensor, shared: Tensor, own: int) -> tuple[Tensor, Tensor]:
    """The keys and values of latent attention, from what a projection makes of the latents (arXiv:2405.04434).

    kv: [B, H, T, N + V], of each head the N features of its key that are its own, then its V values; any strides
    (memory in [B, T, H, N + V] order is the usual case). shared: [B, 1, T, R] of kv's dtype, the features of keys that
    all heads share, which are rotated as a rule. own: N, from 0 to kv's last size.

    Returns k [B, H, T, N + R] and v [B, H, T, V], copies in kv's dtype, in memory in [B, T, H, ·] order, as are their
    gradients. So attention keeps no more than it reads, and a projection's gradient is read as it lies.

    Raises ValueError or TypeError for shapes, dtypes, devices and an `own` other than these.
    """

def expand_kv_vjp(
    dk: Tensor | None, dv: Tensor | None, k: Tensor, v: Tensor, own: int, output_mask: Sequence[bool]
) -> tuple[Tensor, Tensor]:
    """Gradients of `expand_kv`: (dkv, dshared), in memory in [B, T, heads, ·] order. Of k and v only sizes count.

    Either incoming gradient may be None (zero). dshared is the sum over heads, in fp32 (fp64 for fp64), rounded once.
    Where ``output_mask`` is False, an empty tensor.
    """

def experts(
    x: Tensor,
    gate_up: Tensor,
    down: Tensor,
    indices: Tensor,
    weights: Tensor,
    gate_up_bias: Tensor | None = None,
    down_bias: Tensor | None = None,
    activation: Literal["swiglu", "geglu", "geglu_erf", "relu_squared", "relu", "silu", "gelu", "gelu_tanh"] = "swiglu",
    interleaved: bool = False,
    limit: float = 0.0,
    alpha: float = 1.0,
    up_offset: float = 0.0,
    gate_up_lora_a: Tensor | None = None,
    gate_up_lora_b: Tensor | None = None,
    down_lora_a: Tensor | None = None,
    down_lora_b: Tensor | None = None,
    gate_up_lora_scale: float = 1.0,
    down_lora_scale: float = 1.0,
) -> Tensor:
    """y[t] = Σ_k weights[t, k] (down[e] · act(gate_up[e] · x[t] + gate_up_bias[e]) + down_bias[e]), e = indices[t, k].

    x: [..., C]. gate_up: [E, N, C], the rows of gate first, then those of up, or with `interleaved` a row of gate and a
    row of up in turn. down: [E, C, I]. Weights in any strides: those that a model keeps as [E, C, N] and [E, I, C] are
    passed as `.transpose(1, 2)`, and their gradients come in the same strides. gate_up_bias: [E, N]; down_bias: [E, C].
    x, gate_up, down and the biases have one floating dtype. indices: [..., K], int64 or int32. A pair whose index is
    negative or at least E contributes nothing, and its weight's gradient is 0: expert parallelism marks the experts of
    other ranks this way. A token may have an expert more than once, so K may exceed E. weights: [..., K], floating.
    activation: "swiglu", "geglu" (the tanh form of GELU) or "geglu_erf", which have a gate (N = 2 I):
    act(gate) (up + up_offset), where swiglu's act is gate · sigmoid(alpha gate); or without a gate (N = I)
    "relu_squared", "relu", "silu", "gelu" (through erf) or "gelu_tanh". limit: above 0, gate is clamped to at most
    `limit` and up to [-limit, limit] before that, with the gradient of torch.clamp. gpt-oss has alpha 1.702, limit 7
    and up_offset 1.

    gate_up_lora_a: [E, R, C] and gate_up_lora_b: [E, N, R], given together, add
    gate_up_lora_scale · gate_up_lora_b[e] · (gate_up_lora_a[e] · x[t]) to gate_up[e] · x[t]; down_lora_a: [E, R, I],
    down_lora_b: [E, C, R] and down_lora_scale likewise to the product of down. Their ranks may differ. They have any
    strides and any floating dtype: they are rounded to x's, and so is scale · a · x, and their gradients come in their
    own dtype. They are never expanded to a matrix of a weight's size.

    Sums are fp32 (fp64 for fp64). The pre-activation, the activation, and the output of each expert before its weight
    are rounded to x's dtype; the sum over k is rounded once. The order of every sum is fixed, so results are the same
    bit for bit in each run. Saved for the backward: the inputs and the pre-activation [S, N]. Under autocast x, the
    weights of experts and the biases are cast; adapters follow x in any case.

    Returns y [..., C] in x's dtype, contiguous.

    Raises TypeError for dtypes, ValueError for shapes, devices, an unknown activation and options that it lacks.

    Source: Shazeer et al., arXiv:1701.06538; Shazeer, arXiv:2002.05202 (gated activations); gpt-oss model card,
    arXiv:2508.10925 (clamped SwiGLU); Hu et al., arXiv:2106.09685 (LoRA).
    """

def experts_fp8(
    x8: Tensor,
    x_factor: Tensor,
    gate_up8: Tensor,
    gate_up_factor: Tensor,
    down8: Tensor,
    down_factor: Tensor,
    indices: Tensor,
    weights: Tensor,
    activation: Literal["swiglu", "geglu", "geglu_erf"] = "swiglu",
    dtype: Literal["bfloat16", "float16", "float32"] = "bfloat16",
) -> tuple[Tensor, Tensor]:
    """`experts` of tokens and weights in 8 bits: (y, pre).

    x8: [..., C] float8_e4m3fn, x_factor: [T, 1], as `fp8_cast_rows` gives them. gate_up8: [E, 2 I, C] and down8:
    [E, C, I] float8_e4m3fn, gate_up_factor and down_factor: [E], as `fp8_cast_experts` gives them. Factors
    are fp32. indices, weights: as `experts` takes them. activation: "swiglu", "geglu" or "geglu_erf". dtype: of y and
    pre, "bfloat16", "float16" or "float32".

    The pre-activation and the activation are rounded to `dtype`. The activation of a pair is then cast to e4m3 by the
    factor of its own largest element. The output of each expert is rounded to `dtype`, and the sum over k once more.
    Tensor cores accumulate both products in their own registers throughout, which hold 14 bits on Ada and Hopper, as in
    `scaled_matmul` with `fast`.

    Returns y [..., C], contiguous, and pre [S, 2 I], the pre-activations in the order of experts, pairs of one expert
    in the order of tokens; rows of pairs without an expert come last and are 0. `experts_vjp_fp8` has the gradients.

    Raises TypeError for dtypes, ValueError for shapes, devices, an unknown activation, and for weights that require a
    gradient while gradients are recorded.
    """

def experts_vjp(
    dy: Tensor,
    x: Tensor,
    gate_up: Tensor,
    down: Tensor,
    indices: Tensor,
    weights: Tensor,
    gate_up_bias: Tensor | None,
    down_bias: Tensor | None,
    gate_up_lora_a: Tensor | None,
    gate_up_lora_b: Tensor | None,
    down_lora_a: Tensor | None,
    down_lora_b: Tensor | None,
    pre: Tensor,
    activation: str,
    interleaved: bool,
    limit: float,
    alpha: float,
    up_offset: float,
    gate_up_lora_scale: float,
    down_lora_scale: float,
    output_mask: Sequence[bool],
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Gradients (dx, dgate_up, ddown, dweights, dgate_up_bias, ddown_bias, dgate_up_lora_a, dgate_up_lora_b,
    ddown_lora_a, ddown_lora_b) of `experts`; an empty tensor where `output_mask` is False.

    dy: [..., C]. pre: [S, N], the pre-activations in the order of experts, pairs of one expert in the order of tokens;
    rows of pairs without an expert come last and are 0. The activation is computed again from it. The gradient of the
    pre-activation, the weighted activation and the gradient of each pair's x are rounded to x's dtype, and so are
    tensors of an adapter's rank. dgate_up and ddown have the strides of torch.empty_like(gate_up) and of
    torch.empty_like(down), the others are contiguous.
    """

def experts_vjp_fp8(
    dy: Tensor,
    dy8: Tensor,
    dy_factor: Tensor,
    x: Tensor,
    x_factor: Tensor | None,
    pre: Tensor,
    gate_up8_t: Tensor,
    gate_up_factor: Tensor,
    down8_t: Tensor,
    down_factor: Tensor,
    indices: Tensor,
    weights: Tensor,
    activation: Literal["swiglu", "geglu", "geglu_erf"],
    output_mask: Sequence[bool],
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Gradients (dx, dgate_up, ddown, dweights) of `experts_fp8` as if nothing had been rounded to 8 bits; an empty
    tensor where `output_mask` is False.

    dy: [..., C], the unrounded gradient, and pre: [S, 2 I], as `experts_fp8` returned it: of one floating dtype, which
    dx, dgate_up and ddown have too. dy8 and dy_factor: dy cast by `fp8_cast_rows`. x: [..., C], the original tokens in
    dy's dtype, with x_factor None; or the forward's x8, with its x_factor. gate_up8_t: [E, C, 2 I] and down8_t: [E, I,
    C]: the transposed weights that `fp8_cast_experts` gives. indices, weights, activation:
    as in the forward.

    Gradients of the activation and of x are products of 8-bit numbers: of dy8, and of the gradient of the
    pre-activation, which is cast by the factor of each row's largest element. With x_factor None, gradients of the
    weights are products of x and dy in dy's dtype. Otherwise they are products of 8-bit numbers as well: of x, of dy8,
    of that cast and of one of the weighted activation by rows; since a sum over pairs has no place for factors of rows,
    each is cast again by the largest factor of its expert's rows, which is exact but for numbers that become smaller
    than the format's smallest normal one.
    dgate_up [E, 2 I, C] and ddown [E, C, I] are contiguous; dweights has the weights' shape and dtype. The gradient of
    the activation, that of the pre-activation, the weighted activation and the gradient of each pair's x are rounded to
    dy's dtype.
    """

def fp8_amax(x: Tensor, second: Tensor | None = None, third: Tensor | None = None) -> Tensor:
    """max |x| over all of x, and of two more tensors if given, as fp32 [1]; NaN where one is, 0 for empty tensors.

    x, second, third: any shapes, floating, one dtype and device. Raises TypeError for other dtypes and for several,
    ValueError for several devices and for tensors that require a gradient.
    """

def fp8_cast(
    x: Tensor,
    bound: Tensor,
    amax: Tensor,
    format: Literal["e4m3", "e5m2"] = "e4m3",
    rows: bool = True,
    columns: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    """x in 8 bits by one factor for the whole tensor: (x8, x8_t, factor), and amax becomes max(amax, max |x|).

    x: [..., N], floating, any strides. bound: fp32 [1], what max |x| is expected to be; the factor is the least power
    of two that is at least bound / the format's largest number (1 for a bound of zero). amax: fp32 [1], written; NaN
    where x holds one, infinite where x holds an infinity: so overflows and non-finite numbers are detected in the same
    pass, without waiting for the device.

    Returns x8 of x's shape, contiguous (empty unless `rows`); x8_t [N, M16], x8 transposed, where M16 is the number of
    rows of x rounded up to a multiple of 16 and the added columns are 0 (empty unless `columns`); factor fp32 [1].
    Raises TypeError for other dtypes; ValueError for other shapes, devices and formats, and for an x that requires a
    gradient.
    """

def fp8_cast_beside(
    first: Tensor,
    second: Tensor,
    third: Tensor | None,
    bound: Tensor,
    amax: Tensor,
    format: Literal["e4m3", "e5m2"] = "e4m3",
    rows: bool = True,
    columns: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    """`fp8_cast` of two or three tensors side by side, without a pass that puts them together: (x8, x8_t, factor).

    first, second, third: [..., N] each, floating, any strides, of any N that is a multiple of 16; the other dims are
    those of first. bound, amax, format, rows and columns: as `fp8_cast` has them. Returns x8 [..., sum of N]; x8_t [sum
    of N, M16]; factor fp32 [1]. Raises as `fp8_cast` does, and where the tensors do not fit each other.
    """

def fp8_cast_blocks(
    x: Tensor, format: Literal["e4m3", "e5m2"] = "e4m3", rows: bool = True, columns: bool = False, square: bool = False
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """x in 8 bits by one factor for 128 neighbours: (x8, factor, x8_t, factor_t).

    x: [M, N], floating. square: the factors are those of blocks of 128 x 128 elements; else each layout has its own, of
    128 neighbours along its last dim. rows: x8 [M, N] with factor [M, ceil(N / 128)] fp32, whose memory runs along M;
    square: [ceil(M / 128), ceil(N / 128)], contiguous. columns: x8_t [N, M16] and factor_t of it likewise, from x and
    not from x8. Outputs that are not requested are empty. Raises TypeError for other dtypes, ValueError for other
    shapes and formats.
    """

def fp8_cast_experts(weight: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Stacked weights in float8_e4m3fn by one factor for each matrix: (weight8, weight8_t, factor).

    weight: [E, M, N], floating, M and N multiples of 16. A matrix's factor is that of its largest absolute element, as
    `fp8_cast` has it. Returns weight8 [E, M, N] and weight8_t [E, N, M], its transposed matrices, both contiguous;
    factor [E] fp32. Raises ValueError for other shapes.
    """

def fp8_cast_rows(x: Tensor, format: Literal["e4m3", "e5m2"] = "e4m3") -> tuple[Tensor, Tensor]:
    """x in 8 bits by one factor a row: x8 of x's shape, contiguous, and factor fp32 [M, 1].

    x: [..., N], floating. A row's factor is that of its largest absolute element, or of 2^-100 where that is smaller: a
    row of zeros has the least factor, so that rows that share one, the largest of theirs, lose nothing by it. Raises
    TypeError for a dtype that is not floating; ValueError for a scalar, another format, and an x that requires a
    gradient.
    """

def fp8_cast_stack(
    first: Tensor, second: Tensor, third: Tensor | None = None, format: Literal["e4m3", "e5m2"] = "e4m3"
) -> tuple[Tensor, Tensor, Tensor]:
    """Two or three matrices in 8 bits as if they were one on top of the other, by one factor: (x8, x8_t, factor).

    first, second, third: [M, N] each, floating, of any M that is a multiple of 16. The factor is that of their largest
    absolute element, as `fp8_cast` has it. Returns x8 [sum of M, N] and x8_t [N, sum of M], it transposed, both
    contiguous; factor fp32 [1]. Raises TypeError for other dtypes and for several; ValueError for other shapes, devices
    and formats, and for tensors that require a gradient.
    """

def fp8_transpose(x8: Tensor) -> Tensor:
    """x8 [..., N] in 8 bits as [N, M16], M16 its rows rounded up to a multiple of 16; the added columns are 0."""

def geglu(gate: Tensor, up: Tensor, approximate: Literal["none", "tanh"] = "tanh") -> Tensor:
    """gelu(gate, approximate) * up, element by element (GeGLU without its projections, arXiv:2002.05202).

    Args:
        gate, up: [..., F] of one shape and dtype, any strides; halves of a packed [..., 2F] projection are not copied.
        approximate: "tanh" or "none", as in `gelu`.

    Returns a contiguous tensor of gate's shape and dtype. The product is taken before rounding. Raises ValueError or
    TypeError where gate and up differ in shape, dtype or device, or are not floating, and for another ``approximate``.
    """

def geglu_vjp(
    dout: Tensor, gate: Tensor, up: Tensor, approximate: str, output_mask: Sequence[bool]
) -> tuple[Tensor, Tensor]:
    """Gradients of `geglu`: (dgate, dup), contiguous; an empty tensor where ``output_mask`` is False.

    dout, gate, up: one shape, any strides, floating. dgate = dout · up · gelu'(gate) and dup = dout · gelu(gate),
    computed in fp32 (fp64 for fp64), in the inputs' dtype.
    """

def gelu(x: Tensor, approximate: Literal["none", "tanh"] = "none") -> Tensor:
    """x Phi(x), Phi the distribution function of the standard normal, element by element (GELU, arXiv:1606.08415).

    Args:
        x: any shape and strides, floating.
        approximate: "none": Phi through erf. "tanh": Phi(x) = (1 + tanh(sqrt(2 / pi) (x + 0.044715 x^3))) / 2.

    Returns a contiguous tensor of x's shape and dtype. Raises TypeError for other dtypes, ValueError for another
    ``approximate``.
    """

def gelu_vjp(dout: Tensor, x: Tensor, approximate: str) -> Tensor:
    """Gradient of `gelu`: dx, contiguous, in x's dtype.

    dout, x: one shape, any strides, floating. dx = dout · (Φ(x) + x · φ(x)), or the derivative of the tanh form,
    computed in fp32 (fp64 for fp64).
    """

def jsd(
    x: Tensor,
    target: Tensor,
    labels: Tensor | None = None,
    beta: float = 0.5,
    ignore_index: int = -100,
    reduction: Literal["mean", "batchmean", "sum", "none"] = "batchmean",
) -> Tensor:
    """Generalised Jensen-Shannon divergence of log-probabilities: β · KL(P ‖ M) + (1 − β) · KL(Q ‖ M).

    Q = exp(x), P = exp(target), M = β · P + (1 − β) · Q. At its ends it is defined as KL(P ‖ Q) for β = 0 and
    KL(Q ‖ P) for β = 1, as in Agarwal et al., arXiv:2306.13649 (where the limits of the formula are 0).

    x, target: [..., V], log-probabilities of student and teacher. labels: [...], int64 or int32; rows whose label is
    ignore_index do not count. reduction: "none" gives the elements, "sum" their sum, "batchmean" divides it by the
    number of rows that count (1 at least), "mean" by V times that. Either tensor may have a gradient, in its own dtype.
    Computed in fp32 (fp64 for fp64), which is also the result's dtype.

    Raises TypeError and ValueError for arguments other than described here. Saved beside the loss: the number of
    rows that count, empty without labels.
    """

def jsd_vjp(
    dloss: Tensor,
    x: Tensor,
    target: Tensor,
    labels: Tensor | None,
    count: Tensor,
    beta: float,
    ignore_index: int,
    reduction: str,
    output_mask: Sequence[bool],
) -> tuple[Tensor, Tensor]:
    """Gradients (dx, dtarget) of `jsd`.

    dloss: a scalar, or [..., V] for reduction "none". x, target: [..., V] and labels: [...], those of the forward;
    count: the rows that count, which it saved. With P, Q and M as in `jsd`, for 0 < β < 1, dx = (1 − β) · Q ·
    (x − log M) and dtarget = β · P · (target − log M), times dloss over the divisor; for β = 0 and β = 1 the gradients
    of KL(P ‖ Q) and KL(Q ‖ P). Computed in fp32 (fp64 for fp64), each in the dtype of its input. An empty tensor stands
    for a gradient that `output_mask` does not ask for.
    """

def kl_div(
    x: Tensor,
    target: Tensor,
    reduction: Literal["mean", "batchmean", "sum", "none"] = "mean",
    log_target: bool = False,
    eps: float = 1e-10,
) -> Tensor:
    """Kullback-Leibler divergence of log-probabilities x from a target distribution: Σ t · (log t − x).

    As torch.nn.functional.kl_div, with the same reductions: "none" gives the elements, "sum" their sum, "mean" divides
    it by the number of elements, "batchmean" by the size of the first dim. Where the target's probability is 0, so are
    the element and its gradients, whatever x is; log t is taken of max(t, eps).

    x: [..., V], log-probabilities. target: of the same shape, probabilities, or their logarithms if log_target (then
    eps is not used). Either may have a gradient, in its own dtype. Computed in fp32 (fp64 for fp64), which is also the
    result's dtype.

    Raises TypeError and ValueError for arguments other than described here.

    Source: Kullback and Leibler, On Information and Sufficiency (1951).
    """

def kl_div_vjp(
    dloss: Tensor, x: Tensor, target: Tensor, reduction: str, log_target: bool, eps: float, output_mask: Sequence[bool]
) -> tuple[Tensor, Tensor]:
    """Gradients (dx, dtarget) of `kl_div`.

    dloss: a scalar, or [..., V] for reduction "none". x, target: [..., V], those of the forward. dx = −t · dloss over
    the divisor of the reduction; dtarget = (log t + 1 − x) · dloss over it, or t · (log t − x + 1) for log_target.
    Computed in fp32 (fp64 for fp64), each in the dtype of its input. An empty tensor stands for a gradient that
    `output_mask` does not ask for.
    """

def kv_cache_append(
    k_cache: Tensor,
    v_cache: Tensor,
    k: Tensor,
    v: Tensor,
    lengths: Tensor,
    q: Tensor | None = None,
    cos: Tensor | None = None,
    sin: Tensor | None = None,
    page_table: Tensor | None = None,
    interleaved: bool = False,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
) -> Tensor:
    """Write new keys and values into a KV cache in place, rotating keys and queries on the way.

    Token ``t`` of row ``b`` has position ``lengths[b] + t``, in ``k``, ``v`` and ``q`` alike. Its key and value go to
    that slot of the row's cache; with ``cos`` and ``sin`` the key is rotated first (RoPE, arXiv:2104.09864), and so is
    ``q``.

    A token whose slot lies outside the cache (a negative position, a position past the last slot, a page-table entry
    that names no page) is dropped. ``lengths`` itself is not advanced. If two tokens name the same slot (a page that
    rows share), which of them stays is undefined.

    Args:
        k_cache, v_cache: [B, G, S, D] and [B, G, S, Dv], or [num_pages, G, page_size, D] and [num_pages, G, page_size,
            Dv] with ``page_table``; changed in place. Any strides, as long as no two elements share memory,
            of one cache or of both; those of one may lie between those of the other ([B, S, 2, G, D] of both).
        k, v: [B, G, T, D] and [B, G, T, Dv], new keys and values; cast to the caches' dtypes, to the largest number of
            an 8-bit one if they are beyond it. Dv may differ from D (DeepSeek: 192 and 128), and is 0 where values are
            columns of the keys and only these are written.
        lengths: [B] int32 or int64, tokens already in each row's cache; read on the device.
        q: [B, H, Tq, D] queries to rotate, only with ``cos`` and ``sin``; Tq may differ from T.
        cos, sin: one angle per pair of features, [max_positions, R / 2] indexed by position, or [B, max(T, Tq), R / 2]
            or [1, max(T, Tq), R / 2] for each token. The first R <= D features are rotated, the others pass through;
            where the last R are to be (latent attention, DeepSeek), rotate by ``ops.rope(q, k, cos, sin,
            offsets=lengths, last=True)`` and give no angles here. A position that the table does not hold gives NaN.
        page_table: [B, pages] int32 or int64; slot ``s`` of row ``b`` is slot ``s % page_size`` of page
            ``page_table[b, s // page_size]``. A contiguous cache of more rows than the batch is one of pages as long as
            a row: ``rows[:, None]`` says which row of the cache each row of the batch has.
        interleaved: features (2i, 2i + 1) form a pair; otherwise (i, i + R / 2).
        k_scale, v_scale: fp32 [1, G, 1] or [1, 1, 1], positive: what is stored is the key (rotated) and the value
            divided by them, as `attention` takes it. A cache in float8_e4m3fn or float8_e5m2 needs both.

    Returns:
        The rotated queries with q's shape, dtype and memory order (dense, as ``torch.empty_like`` lays it out), or an
        empty tensor of k's dtype if ``q`` is None.

    The rotation is computed in at least float32 and rounded once, to the dtype of the cache or of ``q``. There is no
    gradient: a tensor that requires one raises ValueError while grad mode is on, as do wrong shapes; wrong dtypes raise
    TypeError.
    """

def layer_norm(x: Tensor, weight: Tensor | None = None, bias: Tensor | None = None, eps: float = 1e-05) -> Tensor:
    """Layer normalisation of the last dim: y = (x − mean) · rstd · weight + bias.

    mean and rstd = 1 / sqrt(mean((x − mean)²) + eps) in fp32 (fp64 for fp64 x), one a row; the variance is taken around
    the mean, so it survives a mean far larger than the deviation. All in fp32, rounded once.

    x: [..., N], floating. weight, bias: [N], floating, or None for 1 and 0.

    Returns y, of x's shape and dtype, in x's memory order as `rms_norm` does.

    Raises TypeError for a dtype that is not floating, ValueError for an empty or missing last dim, a weight or bias
    that is not [N] or is on another device, or eps below 0.

    Source: Ba, Kiros and Hinton, Layer Normalization, arXiv:1607.06450.
    """

def layer_norm_vjp(
    dy: Tensor,
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    mean: Tensor,
    rstd: Tensor,
    output_mask: Sequence[bool],
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients (dx, dweight, dbias) of `layer_norm`; sums over rows are taken in fp32, then rounded.

    dy: [..., N], the gradient of y, in any floating dtype. x, weight, bias: those of the forward. mean, rstd: [...],
    which it saved. Computed in fp32 (fp64 for fp64 x): with x̂ = (x − mean) · rstd and g = dy · weight, dx = (g −
    mean(g) − x̂ · mean(g · x̂)) · rstd; dweight = Σ dy · x̂ and dbias = Σ dy over rows. An empty tensor stands for a
    gradient that `output_mask` does not ask for.
    """

def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """y = x · weightᵀ + bias, as torch.nn.functional.linear.

    x: [..., K]. weight: [N, K]. bias: [N]. Each in any strides and any floating dtype, weight and bias in at least as
    many bits as x: y has x's dtype, and a weight or bias of another dtype is rounded to it first, as autocast does.
    Sums are fp32 (fp64 for fp64 x); fp32 operands are multiplied as torch.backends.cuda.matmul says (TF32 or not).
    Rounded once.

    Returns y [..., N], contiguous. Saved for the backward: the inputs. Gradients have their input's dtype. dbias is
    summed in fp32. dweight of a weight wider than x is not rounded to x's dtype (except on accelerators other than
    CUDA, whose libraries cannot do this). Under autocast x is cast, and weight and bias are rounded to its new dtype;
    their gradients keep their own dtypes.

    Raises TypeError for a dtype that is not float16, bfloat16, float32 or float64, and for a weight or bias of fewer
    bits than x; ValueError for shapes or devices that do not fit.
    """

def linear_act(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    activation: Literal["none", "gelu", "gelu_tanh", "relu", "silu", "relu_squared"] = "gelu",
    keep_pre: bool | None = None,
) -> Tensor:
    """y = activation(x · weightᵀ + bias).

    x, weight, bias, dtypes and autocast: see `linear`. activation: "gelu" (through erf), "gelu_tanh", "relu", "silu",
    "relu_squared" (max(z, 0)²) or "none". The pre-activation and its gradient are rounded to x's dtype, as two separate
    ops would; a kernel that activates while it multiplies rounds only y.

    Saved for the backward: x, weight, bias and y; for gelu, gelu_tanh and silu the pre-activation too (y's size), since
    y does not determine their slope. relu's slope is 1 where y > 0; relu_squared's is 2 sqrt(y), so in float16 it is 0
    for inputs below 2.4e-4, whose square is not representable there.
    keep_pre: whether the pre-activation is stored for the backward. None: if autograd records the call. False: the
    backward recomputes it, which costs one more product, and y is the only tensor of its size that is kept.

    Returns y [..., N], contiguous, in x's dtype.

    Raises as `linear` does, and ValueError for another activation.

    Source: Hendrycks and Gimpel, arXiv:1606.08415 (GELU, SiLU); So et al., arXiv:2109.08668 (squared ReLU).
    """

def linear_act_vjp(
    dy: Tensor,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    y: Tensor,
    pre: Tensor,
    activation: str,
    output_mask: Sequence[bool],
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients (dx, dweight, dbias) of `linear_act`; an empty `pre` that is needed is computed again.

    dy, y: [..., N]; pre: [..., N], what the forward kept, or [..., 0]; x: [..., K]; weight: [N, K]; bias: [N] or None.
    dz = dy · activation'(z) is rounded to x's dtype; dx, dweight and dbias are those of `linear_vjp` at dz. An empty
    tensor stands for a gradient that `output_mask` does not ask for.
    """

def linear_cross_entropy(
    x: Tensor,
    weight: Tensor,
    target: Tensor,
    bias: Tensor | None = None,
    class_weight: Tensor | None = None,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    scale: float = 1.0,
    softcap: float = 0.0,
    reduction: Literal["mean", "sum", "none"] = "mean",
    chunk_tokens: int = 0,
    accumulate_fp32: bool = True,
    mode: Literal["keep", "chunks", "recompute", ""] = "",
) -> Tensor:
    """`cross_entropy` of x · weightᵀ + bias without materialising all logits (except in the reference itself).

    Kernels take the products in x's dtype: they cast a weight or bias of another dtype to it first, as autocast would,
    and round the logits and their gradient to it, as a linear layer and its gradient do. Sums of products are fp32.
    Gradients have their input's own dtype.

    x: [..., K]. weight: [V, K]. target: [...], int64 or int32. bias: [V]. class_weight: [V], without gradient. The
    other loss arguments, and what raises: see `cross_entropy`.

    mode says how gradients are computed; "" lets the library choose, and `explain` names its choice. For N tokens,
    chunks of C of them, e bytes an element of x:
    "keep": the gradient of all logits is kept (N·V·e bytes, the logits' own), and the backward takes its two products.
        The loss's own gradient is multiplied into x, rounded to x's dtype, and into dx. Not for float16, where the
        gradient of a mean can underflow.
    "chunks": the gradients are computed along with the loss, chunk after chunk of tokens (C·V·e), and the backward
        multiplies them by the loss's own gradient.
    "recompute": nothing is kept; the backward computes the logits again, a fourth product, in blocks of classes (C·V·e
        too), so that weight's gradient is final block by block and only x's is summed, in fp32 (4·N·K). With more
        tokens than classes, or for dx alone, in chunks of tokens. The same holds for reduction "none" in any mode,
        since only the backward knows the tokens' weights, and for gradients that were not requested here.
    Chosen is "keep" where weight's gradient is wanted and all logits take no more than 512 MiB (16 MiB on a CPU), or
    than an fp32 gradient of weight, to which those of 4096 tokens are added on an accelerator where "chunks" would hold
    both (a half-precision weight, accumulate_fp32), else "chunks"; inside a `MemoryConfig` the first of "keep",
    "chunks" and "recompute" that meets it.

    chunk_tokens: C; above 0 the mode is "chunks" where none is given. 0 lets the library choose, for "chunks" so that
    the logits of a chunk take at most 512 MiB (16 MiB on a CPU), or of 256 tokens if that is more; where weight's
    gradient is summed over chunks, of up to K + 4096 tokens (K on a CPU) if that is more. accumulate_fp32: whether
    weight's gradient is summed over chunks in fp32, which is then also how "chunks" keeps it, 4·V·K bytes; else in
    weight's dtype, with one rounding a chunk.

    Returns the loss, fp32 (fp64 for fp64 x): a scalar, or [...] for "none".

    Raises TypeError for dtypes and ValueError for shapes, devices and numbers that do not fit, naming the argument; on
    a CPU ValueError for labels out of range.

    Source: the fused loss of Hsu et al., Liger Kernel, arXiv:2410.10989; z loss: Chowdhery et al., PaLM,
    arXiv:2204.02311.
    """

def linear_cross_entropy_vjp(
    dloss: Tensor,
    x: Tensor,
    weight: Tensor,
    target: Tensor,
    bias: Tensor | None,
    class_weight: Tensor | None,
    lse: Tensor,
    divisors: Tensor,
    x_grad: Tensor,
    weight_grad: Tensor,
    bias_grad: Tensor,
    logit_grad: Tensor,
    logit_factors: Tensor,
    ignore_index: int,
    label_smoothing: float,
    z_loss: float,
    scale: float,
    softcap: float,
    reduction: str,
    chunk_tokens: int,
    accumulate_fp32: bool,
    mode: str,
    output_mask: Sequence[bool],
    overwrite: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients (dx, dweight, dbias) of `linear_cross_entropy`.

    Where the forward kept the logits' they are its products, times its factors and dloss over the divisor; where it
    computed them they are multiplied by the latter, with `overwrite` in place where dtypes allow; the others come from
    the logits anew.

    dloss: a scalar, or [...] for reduction "none". x: [..., K], weight: [V, K], bias: [V]; lse, divisors, x_grad,
    weight_grad, bias_grad, logit_grad, logit_factors: what the forward saved. Returns [..., K], [V, K] and [V], in the
    dtypes of x, weight and bias. An empty tensor stands for a gradient that `output_mask` does not ask for.
    """

def linear_distillation(
    x: Tensor,
    weight: Tensor,
    teacher: Tensor,
    teacher_weight: Tensor | None = None,
    target: Tensor | None = None,
    bias: Tensor | None = None,
    teacher_bias: Tensor | None = None,
    divergence: Literal["jsd", "kl", "reverse_kl", "tvd"] = "jsd",
    beta: float = 0.5,
    temperature: float = 1.0,
    soft_weight: float = 1.0,
    hard_weight: float = 0.0,
    ignore_index: int = -100,
    teacher_probs: bool = False,
    chunk_tokens: int = 0,
    accumulate_fp32: bool = False,
) -> tuple[Tensor, Tensor]:
    """Divergence of a student's distribution from a teacher's, from hidden states, without materialising all logits.

    With student logits z = x · weightᵀ + bias and teacher logits y, a token's soft loss is the distance of
    softmax(z / temperature) from softmax(y / temperature) over all classes: "kl" is KL(teacher ‖ student), "reverse_kl"
    KL(student ‖ teacher), "jsd" as `jsd` has it with `beta`, "tvd" as `tvd`. Its hard loss is the cross-entropy of
    softmax(z) with its label. The loss is the undivided sum over tokens of soft_weight · soft + hard_weight · hard.

    x: [..., K]. weight: [V, K]. teacher: hidden states [..., K'] with teacher_weight [V, K'], or without it the logits
    [..., V], or with teacher_probs their softmax(y / temperature); no gradient in any case. target: [...], int64 or
    int32; tokens of ignore_index do not count; None: all count, and there is no hard loss. bias, teacher_bias: [V].
    temperature: above 0. Products and sums are rounded as in `linear_cross_entropy`.

    Kernels walk over chunks of tokens: both logits, the losses, the gradient in place of the student's logits, its two
    products, in one pass. chunk_tokens: tokens of a chunk; 0 lets the library choose: equal chunks for which the logits
    of both models take at most 512 MiB and at most twelve times x's size (on a CPU 16 MiB), or of 256 tokens if that is
    more.
    accumulate_fp32: as in `linear_preference`.

    Returns (loss, parts): a scalar, and [2], the sums of soft and of hard losses; fp32 (fp64 for fp64 x). A gradient
    through parts costs the products of the logits again.

    Source: Hinton et al., arXiv:1503.02531; Agarwal et al., arXiv:2306.13649.

    Raises TypeError and ValueError for arguments other than described here, naming the argument.
    """

def linear_distillation_vjp(
    dloss: Tensor | None,
    dparts: Tensor | None,
    x: Tensor,
    weight: Tensor,
    teacher: Tensor,
    teacher_weight: Tensor | None,
    target: Tensor | None,
    bias: Tensor | None,
    teacher_bias: Tensor | None,
    x_grad: Tensor,
    weight_grad: Tensor,
    bias_grad: Tensor,
    divergence: str,
    beta: float,
    temperature: float,
    soft_weight: float,
    hard_weight: float,
    ignore_index: int,
    teacher_probs: bool,
    chunk_tokens: int,
    accumulate_fp32: bool,
    output_mask: Sequence[bool],
    overwrite: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients (dx, dweight, dbias) of `linear_distillation`; the forward's own times dloss, where it computed them:
    in place with `overwrite`.

    dloss: a scalar; dparts: [2]; either may be None (zeros). x_grad, weight_grad, bias_grad: what the forward saved, or
    empty. All else: its arguments. Where dparts is given, the gradients come from logits that are computed again.
    Returns [..., K], [V, K] and [V], in the dtypes of x, weight and bias. An empty tensor stands for a gradient that
    `output_mask` does not ask for.
    """

def linear_preference(
    x: Tensor,
    weight: Tensor,
    target: Tensor,
    sequences: Tensor,
    formula: str,
    options: Sequence[float],
    bias: Tensor | None = None,
    tokens: Tensor | None = None,
    ignore_index: int = -100,
    scale: float = 1.0,
    softcap: float = 0.0,
    chunk_tokens: int = 0,
    accumulate_fp32: bool = False,
    recompute: bool = False,
) -> tuple[Tensor, Tensor]:
    """A preference loss of sequences from x · weightᵀ + bias, without materialising all logits.

    The loss is the undivided sum that `ops.loss.formulas.FORMULAS[formula]` makes of the labels' log-probabilities; the
    caller divides it by pairs, sequences or tokens (`tilesmith.nn.preference` does). Logits are scaled and capped as in
    `cross_entropy`, products and sums rounded as in `linear_cross_entropy`.

    x: [B, T, K]; for paired formulas the first half of the B sequences are the chosen ones, the second half the
    rejected ones in the same order. weight: [V, K]. target: [B, T], int64 or int32; a label of ignore_index does not
    count. sequences: [rows, B], tokens: [rows, B, T], floating, without gradient: what the formula reads besides, see
    there. options: the formula's, in its order. bias: [V].

    Returns (loss, log_probs): a scalar, and the labels' log-probabilities [B, T], 0 where ignored; both fp32 (fp64 for
    fp64 x) and differentiable.

    Kernels walk over chunks of whole sequences, of whole pairs where paired: logits, log-probabilities, formula, then
    the gradient in place of the logits and its two products, so that loss and gradients cost three products of
    2·B·T·K·V operations. With `recompute` the backward takes the product of the logits again: a fourth product, but
    chunks need not hold a whole pair. chunk_tokens: tokens of a chunk, rounded down to whole sequences or pairs, one at
    least (with recompute as in `linear_cross_entropy`); 0 lets the library choose, by `sequences_per_chunk`.
    accumulate_fp32: whether the weight's gradient is summed over chunks in fp32; else in weight's dtype with one
    rounding a chunk.

    Memory beside inputs and results, for C tokens of a chunk and e bytes an element of x: C·V·e for the logits, and
    where a chunk is not the whole batch C·K·e, since pairs lie in two places; accumulate_fp32 then takes 4·V·K, and
    dweight's memory only when the logits are gone. Results are dx and dweight, and 12 bytes a token. The backward
    scales dx and dweight in place. It makes copies of them instead, which doubles their memory, if its graph is kept or
    captured, under torch.compile, and under saved-tensor hooks, as in checkpointing.

    A gradient through log_probs costs the product of the logits again in any case. Labels are checked on a CPU only, as
    in `cross_entropy`. Raises TypeError and ValueError for arguments other than described here.
    """

def linear_preference_vjp(
    dloss: Tensor | None,
    dlog_probs: Tensor | None,
    x: Tensor,
    weight: Tensor,
    target: Tensor,
    bias: Tensor | None,
    lse: Tensor,
    token_grad: Tensor,
    x_grad: Tensor,
    weight_grad: Tensor,
    bias_grad: Tensor,
    ignore_index: int,
    scale: float,
    softcap: float,
    chunk_tokens: int,
    accumulate_fp32: bool,
    output_mask: Sequence[bool],
    overwrite: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients (dx, dweight, dbias) of `linear_preference`; the forward's own, times dloss, where it computed them: in
    place with `overwrite`.

    dloss: a scalar; dlog_probs: [B, T]; either may be None (zeros). lse, token_grad: [B, T]; x_grad, weight_grad,
    bias_grad: what the forward saved, or empty. Where dlog_probs is given, the gradients come from logits that are
    computed again. Returns [B, T, K], [V, K] and [V], in the dtypes of x, weight and bias. An empty tensor stands for a
    gradient that `output_mask` does not ask for.
    """

def linear_token_stats(
    x: Tensor,
    weight: Tensor,
    target: Tensor,
    bias: Tensor | None = None,
    ignore_index: int = -100,
    scale: float = 1.0,
    softcap: float = 0.0,
    chunk_tokens: int = 0,
    accumulate_fp32: bool = True,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Log-probability of the label, entropy, log-sum-exp and most likely token, without storing all logits.

    z are the scores of x · weightᵀ + bias, scaled and capped as in `cross_entropy`; p = softmax(z), lse = log Σ exp(z):

        log_probs = z[target] − lse      entropy = −Σ p · log p      predicted = argmax z, the first of equal ones

    So −log_probs.mean() is the cross-entropy, (lse ** 2).mean() the z loss beside it, and predicted == target the
    accuracy of tokens, all of one product of the logits. A gradient costs that product again and two more; where only
    log_probs has one, it is that of `linear_log_probs`. For the gradient of a cross-entropy alone
    `linear_cross_entropy` needs three products in place of four.

    x: [..., K]. weight: [V, K]. target: [...], int64 or int32. bias: [V]. Products, rounding and what raises: see
    `linear_cross_entropy`. chunk_tokens: tokens whose logits are in memory at a time; 0 lets the library choose.
    accumulate_fp32: whether weight's gradient is summed over chunks in fp32.

    Returns four tensors [...]: log_probs, entropy and lse, fp32 (fp64 for fp64 x) and differentiable, and predicted,
    int64. Where the label is ignore_index they are 0, 0, 0 and -1. A class whose score is -inf adds nothing to the
    entropy.

    Source: the definitions; Chowdhery et al., PaLM, arXiv:2204.02311 (z loss).
    """

def linear_token_stats_vjp(
    dlog_probs: Tensor | None,
    dentropy: Tensor | None,
    dlse: Tensor | None,
    x: Tensor,
    weight: Tensor,
    target: Tensor,
    bias: Tensor | None,
    entropy: Tensor,
    lse: Tensor,
    ignore_index: int,
    scale: float,
    softcap: float,
    chunk_tokens: int,
    accumulate_fp32: bool,
    output_mask: Sequence[bool],
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients (dx, dweight, dbias) of `linear_token_stats`, from logits that are computed again.

    dlog_probs, dentropy, dlse: [...], each may be None (zeros). entropy, lse: [...], which the forward saved. With p
    the probabilities, the gradient of the scores is

        p · (dlse − dlog_probs − dentropy · (log p + entropy)) + dlog_probs · [class is the label]

    Returns [..., K], [V, K] and [V], in the dtypes of x, weight and bias. An empty tensor stands for a gradient that
    `output_mask` does not ask for.
    """

def linear_vjp(
    dy: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None, output_mask: Sequence[bool]
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients (dx, dweight, dbias) of `linear`, contiguous; an empty tensor where ``output_mask`` is False.

    dy: [..., N]; x: [..., K]; weight: [N, K]; bias: [N] or None. dx = dy · weight, in x's dtype; dweight = dyᵀ · x and
    dbias = Σ dy over rows, each in its parameter's dtype. Sums are fp32 (fp64 for fp64).
    """

def lora_linear(
    x: Tensor, weight: Tensor | None, lora_a: Tensor, lora_b: Tensor, bias: Tensor | None = None, scale: float = 1.0
) -> Tensor:
    """y = x · weightᵀ + bias + scale · (x · lora_aᵀ) · lora_bᵀ: a linear layer with a low-rank adapter (LoRA).

    x: [..., K]. weight: [N, K] and bias: [N], as in `linear`; without a weight, y is the adapter's contribution alone.
    lora_a: [R, K], lora_b: [N, R], in any strides and any floating dtypes, independent of x's: fp32 factors with 16-bit
    x are not rounded to 16 bits. The base product is rounded to x's dtype before the adapter is added, as PEFT does.
    Sums are fp32 (fp64 for fp64).

    Returns y [..., N], contiguous, in x's dtype. Saved for the backward: x, weight, lora_a, lora_b and
    z = x · lora_aᵀ, [..., R] in fp32. Under autocast x is cast, weight and bias follow it, and factors stay as they
    are.

    Raises as `linear` does, and ValueError for factors whose shapes or devices do not fit, and for a bias without a
    weight.

    Source: Hu et al., arXiv:2106.09685.
    """

def lora_linear_vjp(
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
    """Gradients (dx, dweight, dlora_a, dlora_b, dbias) of `lora_linear`; an empty tensor where not asked for.

    dy: [..., N]; x: [..., K]; z: [..., R], which the forward saved. With dz = scale · dy · lora_b:
    dx = dy · weight, rounded to x's dtype, + dz · lora_a; dlora_a = dzᵀ · x and dlora_b = scale · dyᵀ · z, each in its
    parameter's dtype; dweight and dbias as in `linear_vjp`. Sums are fp32 (fp64 for fp64).
    """

def matmul(a: Tensor, b: Tensor) -> Tensor:
    """The matrix product a · b, where a may have any leading dims and b is one matrix.

    a: [..., M, K] or [K]. b: [K, N], of a's dtype; both in any strides. Leading dims of a are rows like M: there is no
    broadcasting, and b has no batch (use torch.matmul for those). Sums are fp32 (fp64 for fp64); fp32 operands are
    multiplied as torch.backends.cuda.matmul says (TF32 or not). Rounded once.

    Returns [..., M, N] or [N], contiguous, in a's dtype. Saved for the backward: a and b. Under autocast both are cast.

    Raises TypeError where dtypes differ or are not floating, ValueError for other shapes or devices.
    """

def matmul_vjp(dy: Tensor, a: Tensor, b: Tensor, output_mask: Sequence[bool]) -> tuple[Tensor, Tensor]:
    """Gradients of `matmul`: da = dy · bᵀ and db = aᵀ · dy, contiguous; empty where ``output_mask`` is False.

    dy: [..., M, N] or [N], in a's dtype. da: a's shape and dtype; db: [K, N], in b's dtype. Sums are fp32 (fp64 for
    fp64), rounded once.
    """

def memory_efficient_linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    activation: Literal["none", "gelu", "gelu_tanh", "relu", "silu", "relu_squared"] = "none",
    chunk_rows: int = 0,
) -> Tensor:
    """y = activation(x · weightᵀ + bias), saving only the inputs: the backward goes over chunks of rows and recomputes
    each one's pre-activation, which costs one more product.

    x, weight, bias, dtypes and autocast: see `linear`; activation: see `linear_act`. chunk_rows: rows of a chunk; 0
    lets the library choose: all rows where their pre-activations take at most 256 MiB (16 MiB on a CPU), else equal
    chunks of at most that, or of 1024 rows if that is more; one chunk without an activation, since nothing is then
    computed again.

    Memory in bytes, beyond the inputs and dy, for M rows, chunks of C, e bytes an element of x, w one of weight:
    forward M·N·e, and t·C·N·e while it runs; backward M·K·e + N·K·w, and while it runs b·C·N·e, and N·K·4 where w < 4
    and C < M (dweight is summed in fp32). t = 0, b = 1 for Triton kernels on contiguous x and dy; at most t = 1, b = 3
    in plain PyTorch on a GPU; without an activation t = b = 0. A weight of another dtype than x's is cast, N·K·e.

    Returns y [..., N], contiguous, in x's dtype.

    Raises as `linear_act` does, and ValueError for chunk_rows below 0.
    """

def memory_efficient_linear_vjp(
    dy: Tensor,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    activation: str,
    chunk_rows: int,
    output_mask: Sequence[bool],
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients (dx, dweight, dbias) of `memory_efficient_linear`; an empty tensor where ``output_mask`` is False.

    dy: [..., N]; x: [..., K]; weight: [N, K]; bias: [N] or None. As `linear_act_vjp`, but pre-activations are computed
    again, `chunk_rows` rows at a time; dweight and dbias are summed over chunks in fp32 (fp64 for fp64).
    """

def merge_attention(out_a: Tensor, lse_a: Tensor, out_b: Tensor, lse_b: Tensor) -> tuple[Tensor, Tensor]:
    """Attention over two disjoint sets of keys, merged from the results for each.

    out_a, out_b [..., Dv] of one dtype, lse_a, lse_b [...] fp32 (fp64 for fp64): the results of `attention` over each
    set. lse = log(exp(lse_a) + exp(lse_b)), out = out_a * exp(lse_a - lse) + out_b * exp(lse_b - lse). A side with lse
    -inf is ignored, whatever its `out` holds; if both are -inf, out is 0 and lse -inf. An lse of NaN makes both results
    NaN.

    Returns out [..., Dv] (of 4-dim results, in memory [B, T, H, Dv] if out_a's head stride is smaller than its token
    stride, else contiguous) and lse [...], contiguous; computed in fp32. Raises TypeError for dtypes, ValueError for
    shapes and devices that do not fit.
    """

def norm_linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    norm_weight: Tensor | None = None,
    norm_bias: Tensor | None = None,
    kind: Literal["rms", "layer"] = "rms",
    eps: float = 1e-06,
    offset: float = 0.0,
) -> Tensor:
    """y = norm(x) · weightᵀ + bias, with norm(x) = rms_norm(x, norm_weight, eps, offset) or layer_norm(x, norm_weight,
    norm_bias, eps).

    x: [..., K] with K of at least 1. weight: [N, K]. bias: [N]. norm_weight, norm_bias: [K]. kind: "rms" (norm_bias
    must be None; offset is added to norm_weight) or "layer" (offset must be 0). The normalised x is rounded to x's
    dtype, as two separate ops would; weight and bias as in `linear`. Under autocast x is cast before it is normalised.

    Saved for the backward: the inputs and fp32 statistics, one or two a row. The normalised x is not kept: the backward
    computes it again where dweight is asked for.

    Returns y [..., N], contiguous, in x's dtype.

    Raises as `linear` and the norms do, and ValueError for another kind.
    """

def norm_linear_vjp(
    dy: Tensor,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    norm_weight: Tensor | None,
    norm_bias: Tensor | None,
    mean: Tensor,
    rstd: Tensor,
    kind: str,
    eps: float,
    offset: float,
    output_mask: Sequence[bool],
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Gradients (dx, dweight, dbias, dnorm_weight, dnorm_bias) of `norm_linear`; empty where not asked for.

    dy: [..., N]; x: [..., K]; weight: [N, K]; norm_weight, norm_bias: [K] or None; mean, rstd: [...], which the forward
    saved. The gradients of `linear_vjp` at the normalised x, which is computed again, then those of `rms_norm_vjp` or
    `layer_norm_vjp`; each in its input's dtype. An empty tensor stands for a gradient that `output_mask` does not ask
    for.
    """

def quantize_packed(weight: Tensor, scale: Tensor, zero: Tensor, order: Tensor, strips: Tensor, words: int) -> Tensor:
    """The codes of a weight, int32 [words]: round(weight / scale + zero) within the tile's width, packed.

    weight: [N, K], floating; N is padded to a multiple of 16 with rows of zeros, and NaN gets code 0. scale, zero,
    order, strips: their layout is described in `tilesmith.ops.quant.packed_reference`; a scale of 0 stands for 1.
    words: how many words the strips have, 32 times the sum of their tiles' widths. Ties round to even. Raises TypeError
    for other dtypes; ValueError for other shapes and devices, and for a weight that requires a gradient.
    """

def relu_squared(x: Tensor) -> Tensor:
    """max(x, 0)^2, element by element (squared ReLU, arXiv:2109.08668).

    Args:
        x: any shape and strides, floating.

    Returns a contiguous tensor of x's shape and dtype. The square is taken before rounding. Raises TypeError for other
    dtypes.
    """

def relu_squared_vjp(dout: Tensor, x: Tensor) -> Tensor:
    """Gradient of `relu_squared`: dx = 2 max(x, 0) dout, contiguous, in x's dtype.

    dout, x: one shape, any strides, floating.
    """

def rms_norm(
    x: Tensor,
    weight: Tensor | None = None,
    eps: float = 1e-06,
    offset: float = 0.0,
    casting: Literal["fp32", "llama", "none"] = "fp32",
) -> Tensor:
    """Root-mean-square normalisation of the last dim: y = x · rstd · (weight + offset).

    rstd = 1 / sqrt(mean(x²) + eps) in fp32 (fp64 for fp64 x), one a row.

    x: [..., N], floating. weight: [N], floating, or None for a factor of 1 (offset then has no effect); for x of
    [..., H, N] also [H, N], one for each head.
    offset: added to weight; 1.0 for models that store the weight around 0, as Gemma does.
    casting: "fp32" computes in fp32 and rounds once, to x's dtype (Gemma, Olmo 2, torch.nn.functional.rms_norm).
    "llama" rounds x · rstd to x's dtype, then multiplies by weight + offset in the dtype x and weight promote to, then
    rounds to x's dtype (Llama and most models after it). "none" rounds to x's dtype after every operation, also those
    that rstd is made of (x², its mean, eps, their sum, the root), as the formula does in PyTorch without a cast.
    It does not affect the gradient, which is that of the formula, computed in fp32 with the rstd of the forward.

    Returns y, of x's shape and dtype. Rows keep the order they have in x's memory and are packed; so y has x's strides
    where x is dense with a last stride of 1, and is contiguous where x is contiguous. dx likewise.

    Raises TypeError for a dtype that is not floating, ValueError for an empty or missing last dim, a weight that is
    neither [N] nor [H, N] or is on another device, eps below 0, or an unknown casting.

    Source: Zhang and Sennrich, Root Mean Square Layer Normalization, arXiv:1910.07467.
    """

def rms_norm_fp8(
    x: Tensor,
    weight: Tensor | None,
    bound: Tensor,
    amax: Tensor,
    eps: float = 1e-06,
    offset: float = 0.0,
    casting: Literal["fp32", "llama"] = "fp32",
    format: Literal["e4m3", "e5m2"] = "e4m3",
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """`rms_norm` and the cast of its result in one pass: (y, y8, factor, rstd).

    x, weight, eps, offset, casting and y: as `rms_norm` has them; x is contiguous but for a stride of its rows. bound,
    amax, format, y8 and factor: as `fp8_cast` has them, of y as rounded to x's dtype. There is no gradient: the caller
    computes that of `rms_norm`, with rstd. Raises TypeError for dtypes; ValueError for shapes, devices, eps, casting
    and format, and for tensors that require a gradient.
    """

def rms_norm_gated(
    x: Tensor,
    gate: Tensor,
    weight: Tensor | None = None,
    eps: float = 1e-06,
    casting: Literal["fp32", "llama"] = "fp32",
    activation: Literal["silu", "sigmoid"] = "silu",
    gate_first: bool = False,
    groups: int = 1,
) -> Tensor:
    """y = rms_norm(x) · act(gate), or rms_norm(x · act(gate)): the norm behind linear attention and state-space layers.

    x, gate: [..., N] of one shape, floating, any strides; gate in x's dtype or one of fewer bits. weight: [N],
    floating, or None for 1. eps: see `rms_norm`. activation: "silu" (Qwen3-Next, Mamba 2) or "sigmoid" (Kimi Linear).
    gate_first: the norm is that of x · act(gate), in fp32, as in Mamba 2. groups: each of that many equal parts of a
    row has a root mean square of its own.

    casting: "fp32" computes in fp32 and rounds once; "llama" rounds before and after the product with the weight, as
    `rms_norm` with that casting does, and after the product with act(gate), which is in fp32. Neither affects the
    gradient, which is that of the formula in fp32.

    Returns a contiguous tensor of x's shape and dtype. Everything is fp64 for fp64 x.

    Raises TypeError for a dtype that is not floating or a gate of more bits than x, ValueError for shapes, devices,
    eps, casting, activation and groups that do not fit.

    Source: Zhang and Sennrich, arXiv:1910.07467; Gated DeltaNet, Yang et al., arXiv:2412.06464; Mamba 2, Dao and Gu,
    arXiv:2405.21060.
    """

def rms_norm_gated_vjp(
    dy: Tensor,
    x: Tensor,
    gate: Tensor,
    weight: Tensor | None,
    rstd: Tensor,
    activation: str,
    gate_first: bool,
    groups: int,
    output_mask: Sequence[bool],
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients (dx, dgate, dweight) of `rms_norm_gated`, contiguous, in their inputs' dtypes.

    dy, x, gate: [..., N]; rstd: [..., groups], which the forward saved. With a = act(gate), n̂ = x · rstd and
    g = dy · a · weight: dx = (g − n̂ · mean(g · n̂)) · rstd, the mean over a group, dgate = dy · n̂ · weight · act'(gate)
    and dweight = Σ dy · a · n̂ over rows. gate_first: with h = x · a, ĥ = h · rstd and g = dy · weight, dh is
    (g − ĥ · mean(g · ĥ)) · rstd, dx = dh · a, dgate = dh · x · act'(gate) and dweight = Σ dy · ĥ. Computed in fp32
    (fp64 for fp64). An empty tensor stands for a gradient that `output_mask` does not ask for.
    """

def rms_norm_rope(
    q: Tensor,
    k: Tensor | None,
    q_weight: Tensor | None,
    k_weight: Tensor | None,
    cos: Tensor,
    sin: Tensor,
    positions: Tensor | None = None,
    offsets: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    offset: int = 0,
    interleaved: bool = False,
    norm_dim: str = "head",
    eps: float = 1e-06,
    weight_offset: float = 0.0,
    casting: Literal["fp32", "llama"] = "fp32",
) -> tuple[Tensor, Tensor]:
    """rope(rms_norm(q)), rope(rms_norm(k)) in one pass: QK-norm as in Qwen 3, Gemma 3 and Olmo 2.

    Args:
        q: [B, H, T, D], any strides (memory in [B, T, H, D] order is the usual case).
        k: [B, G, T, D] of q's dtype, or None.
        q_weight, k_weight: [D] for ``norm_dim="head"``; [H D] and [G D], head by head, for "row"; any floating dtype;
            None for a factor of 1.
        cos, sin, positions, offsets, cu_seqlens, offset, interleaved: as in `rope`.
        norm_dim: "head" normalises the D features of each head (Qwen 3, Gemma 3); "row" the H D features of each token
            together, before they are split into heads (Olmo 2).
        eps: added to the mean square.
        weight_offset, casting: `offset` and `casting` of `rms_norm`. With "fp32" nothing is rounded between norm and
            rope; with "llama" the norm is rounded to q's dtype as a norm of its own would be.

    Returns:
        (q_out, k_out), each with the shape, dtype and memory order of its input (dense, as ``torch.empty_like`` lays it
        out); k_out is an empty tensor if ``k`` is None. dq and dk are laid out alike. Nothing is saved beyond the
        inputs: the gradient reads the states anyway, and takes their norms again.

    Raises ValueError or TypeError for what does not fit. Sources: arXiv:1910.07467, arXiv:2104.09864, arXiv:2302.05442.
    """

def rms_norm_rope_vjp(
    dq_out: Tensor | None,
    dk_out: Tensor | None,
    q: Tensor,
    k: Tensor | None,
    q_weight: Tensor | None,
    k_weight: Tensor | None,
    cos: Tensor,
    sin: Tensor,
    positions: Tensor | None,
    offsets: Tensor | None,
    cu_seqlens: Tensor | None,
    offset: int,
    interleaved: bool,
    norm_dim: str,
    eps: float,
    weight_offset: float,
    output_mask: Sequence[bool],
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Gradients (dq, dk, dq_weight, dk_weight) of `rms_norm_rope`; dq and dk are laid out as q and k.

    Empty tensors where ``output_mask`` is False or the incoming gradient is None (undefined, hence zero). Sums for the
    weights are taken in fp32, then rounded to the weight's dtype. `casting` has no bearing on them.

    dq_out: [B, H, T, D], dk_out: [B, G, T, D]: the gradients of the results. All else: the arguments of the forward.
    The gradient is rotated by the opposite angles, as in `rope_vjp`, then goes through the norm, as in `rms_norm_vjp`.
    """

def rms_norm_vjp(
    dy: Tensor, x: Tensor, weight: Tensor | None, rstd: Tensor, offset: float, output_mask: Sequence[bool]
) -> tuple[Tensor, Tensor]:
    """Gradients (dx, dweight) of `rms_norm`; sums over rows are taken in fp32, then rounded to the input's dtype.

    dy: [..., N], the gradient of y, in any floating dtype. x, weight, offset: those of the forward. rstd: [...], which
    it saved. Computed in fp32 (fp64 for fp64 x): with x̂ = x · rstd and g = dy · (weight + offset), dx = (g − x̂ ·
    mean(g · x̂)) · rstd and dweight = Σ dy · x̂ over rows, over those of each head where it is [H, N]. An empty tensor
    stands for a gradient that `output_mask` does not ask for.
    """

def rope(
    q: Tensor,
    k: Tensor | None,
    cos: Tensor,
    sin: Tensor,
    positions: Tensor | None = None,
    offsets: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    offset: int = 0,
    interleaved: bool = False,
    last: bool = False,
    halved: bool = False,
) -> tuple[Tensor, Tensor]:
    """Rotate pairs of features of queries and keys by angles that grow with the position (RoPE, arXiv:2104.09864).

    A pair (a, b) becomes (a cos - b sin, b cos + a sin). The first R features of a head form R/2 pairs; the other D - R
    are copied.

    The position of token t in row b is the first of: ``positions[b, t]`` if given; with ``cu_seqlens``, the index of t
    inside its document; t. ``offset`` and ``offsets`` are added to the last two. A position that the table does not
    hold gives NaN.

    Args:
        q: [B, H, T, D], any strides (memory in [B, T, H, D] order is the usual case).
        k: [B, G, T, D] of q's dtype, or None. Its heads may have another size than q's, of R features or more.
        cos, sin: one angle per pair, [P, R/2] indexed by position, or [B, T, R/2] or [1, T, R/2] for each token, which
            leaves no use for a position. Any floating dtype and strides: of tables that hold each angle twice, pass the
            view ``cos[..., : R // 2]`` (halves repeated) or ``cos[..., ::2]`` (neighbours repeated).
        positions: [B, T] or [T] int32 or int64.
        offsets: [B] int32 or int64, one for each row; with ``cu_seqlens`` one for each document.
        cu_seqlens: [N + 1] int32 or int64 starting at 0: document n of the one packed row (B = 1) is the tokens
            cu_seqlens[n] up to cu_seqlens[n + 1]. Tokens past the last boundary continue the last document.
        offset: added to every position that is counted. With ``positions`` it must be 0, and offsets None.
        interleaved: features (2i, 2i + 1) form a pair (GPT-J); otherwise (i, i + R/2) (GPT-NeoX, Llama).
        last: the last R features of a head are rotated in place of the first (latent attention, arXiv:2405.04434).
        halved: with ``interleaved``, what becomes of pair i goes to features (i, i + R/2) (DeepSeek-V3).

    Returns:
        (q_out, k_out), each with the shape, dtype and memory order of its input (dense, as ``torch.empty_like`` lays it
        out); k_out is an empty tensor if ``k`` is None.

    Computed in at least float32 and rounded once. Code that rounds each product to the model's dtype (Hugging Face's
    ``apply_rotary_pos_emb`` in bfloat16) differs by up to its own rounding. cos and sin get no gradient.

    Raises ValueError or TypeError for shapes and dtypes other than these, and for a table shorter than T + offset. On a
    CPU also for a position that the table does not hold, and for cu_seqlens that do not ascend from 0.
    """

def rope_vjp(
    dq_out: Tensor | None,
    dk_out: Tensor | None,
    cos: Tensor,
    sin: Tensor,
    positions: Tensor | None,
    offsets: Tensor | None,
    cu_seqlens: Tensor | None,
    offset: int,
    interleaved: bool,
    last: bool,
    halved: bool,
    output_mask: Sequence[bool],
) -> tuple[Tensor, Tensor]:
    """Gradients of `rope`: the incoming ones rotated by the opposite angles.

    Either incoming gradient may be None (undefined, hence zero); its place in the result is an empty tensor, as where
    ``output_mask`` is False. The memory order is that of the incoming gradient.

    dq_out: [B, H, T, D], dk_out: [B, G, T, D], floating. cos, sin, positions, offsets, cu_seqlens, offset, interleaved,
    last, halved: those of the forward. Returns (dq, dk) in the dtype of the incoming gradients, computed in fp32 (fp64
    for fp64).
    """

def route(
    logits: Tensor,
    top_k: int,
    bias: Tensor | None = None,
    scores: Literal["softmax", "sigmoid"] = "softmax",
    groups: int = 1,
    kept_groups: int = 1,
    group_score: Literal["top2", "max"] = "top2",
    normalise: bool = True,
    scale: float = 1.0,
) -> tuple[Tensor, Tensor]:
    """The experts of each token and their weights.

    logits: [..., E], any floating dtype; computed in fp32 (fp64 for fp64). scores: "softmax" over all experts or
    "sigmoid" of each. The `top_k` experts of the highest scores are chosen; of equal ones, that of the lowest index.
    bias: [E], added to the scores for the choice alone (DeepSeek-V3's correction); it receives no gradient. groups:
    equal parts of the experts, in order, of which only the `kept_groups` of the highest score take part: the sum of a
    group's two highest scores ("top2"), or its highest ("max"). normalise: the weights of a token are divided by their
    sum (plus 1e-20), which for softmax is the softmax over the chosen logits. scale: multiplies the weights.
    A NaN counts as the highest score, above infinity: its weight is NaN, with softmax or `normalise` those of its token
    are too, and indices are valid.

    Returns weights [..., top_k] in fp32 (fp64 for fp64) and indices [..., top_k], int64, by falling score.

    Raises TypeError for dtypes; ValueError for top_k above E or above the experts of the kept groups, groups that do
    not divide E, a shape or device of bias, an unknown name, and a bias that requires a gradient.

    Source: DeepSeek-V3, arXiv:2412.19437 (sigmoid, correction, groups); Fedus et al., arXiv:2101.03961.
    """

def route_vjp(dweights: Tensor, logits: Tensor, indices: Tensor, scores: str, normalise: bool, scale: float) -> Tensor:
    """The gradient of `route`'s logits, [..., E] in their dtype; the choice itself has none."""

def router_losses(
    logits: Tensor, indices: Tensor, scores: Literal["softmax", "sigmoid"] = "softmax"
) -> tuple[Tensor, Tensor]:
    """(load-balancing loss, z-loss) of a router, scalars in fp32 (fp64 for fp64).

    logits: [..., E]; indices: [..., K], the choice for each of the T tokens. The first is E Σ_e f_e p_e, where f_e is
    the number of (token, choice) pairs of e divided by T and p_e the mean over tokens of the softmax, or with "sigmoid"
    of the sigmoid over its sum; it is K where every expert is as likely as another. The second is the mean of
    logsumexp(logits)². Indices outside [0, E) count for no expert. 0 without tokens. f_e has no gradient.

    Raises TypeError for dtypes, ValueError for shapes, devices and an unknown name.

    Source: Fedus et al., arXiv:2101.03961 (load balancing); Zoph et al., arXiv:2202.08906 (z-loss).
    """

def router_losses_vjp(
    dbalance: Tensor | None, dz_loss: Tensor | None, logits: Tensor, indices: Tensor, scores: str
) -> Tensor:
    """The gradient of `router_losses`' logits, in their shape and dtype, contiguous."""

def scaled_matmul(
    a: Tensor,
    b: Tensor,
    a_factor: Tensor,
    b_factor: Tensor,
    bias: Tensor | None = None,
    dtype: Literal["bfloat16", "float16", "float32"] = "bfloat16",
    fast: bool = False,
) -> Tensor:
    """a b^T of 8-bit numbers, each multiplied by its factor: [M, N] in `dtype` ("bfloat16", "float16" or "float32").

    a [M, K], b [N, K]: float8_e4m3fn or float8_e5m2, not both e5m2; contiguous. a_factor, b_factor, fp32: [1] each; or
    [M, 1] and [N, 1]; or, for blocks of 128 along K, [M, ceil(K / 128)] and [N, ceil(K / 128)] or [ceil(N / 128),
    ceil(K / 128)], as `fp8_cast_blocks` lays them out. bias: [N] in `dtype`, or None. fast: partial sums may be kept in
    the tensor cores' own registers all along K; else sums of parts of K are, which are then added in fp32. Those
    registers keep 14 bits of a sum on Ada and Hopper, which a float32 result shows (DeepSeek-AI, DeepSeek-V3,
    arXiv:2412.19437, 3.3.2). Raises TypeError for dtypes, ValueError for shapes, devices and factors that do not fit.
    """

def sigmoid(x: Tensor) -> Tensor:
    """1 / (1 + exp(-x)), element by element.

    Args:
        x: any shape and strides, floating.

    Returns a contiguous tensor of x's shape and dtype. Raises TypeError for other dtypes. The gradient is taken of the
    rounded result, which is what is saved, as PyTorch does.
    """

def sigmoid_vjp(dout: Tensor, out: Tensor) -> Tensor:
    """Gradient of `sigmoid` from its result: dx = dout out (1 - out), contiguous, in out's dtype.

    dout, out: one shape, any strides, floating.
    """

def silu(x: Tensor) -> Tensor:
    """x sigmoid(x), element by element (SiLU or Swish, arXiv:1702.03118).

    Args:
        x: any shape and strides, floating.

    Returns a contiguous tensor of x's shape and dtype. Raises TypeError for other dtypes.
    """

def silu_vjp(dout: Tensor, x: Tensor) -> Tensor:
    """Gradient of `silu`: dx, contiguous, in x's dtype.

    dout, x: one shape, any strides, floating. dx = dout · σ(x) · (1 + x · (1 − σ(x))), computed in fp32 (fp64 for
    fp64).
    """

def softmax_dropout_vjp(
    dout: Tensor, x: Tensor, seed: Tensor | None, top: Tensor, total: Tensor, p: float, scale: float, causal: bool
) -> Tensor:
    """Gradient of `softmax_dropout`: dx, contiguous, in x's dtype.

    dout: [..., N], the gradient of the result. x, seed, p, scale, causal: those of the forward. top, total: [...],
    fp32, which it saved: the maximum of scale · x and the sum of exponentials of each row. The weights and the mask are
    computed again: with y = exp(scale · x − top) / total and g = dout · mask / (1 − p), dx = scale · y · (g − Σ g · y).
    """

def softmax_vjp(dy: Tensor, y: Tensor, scale: float, causal: bool) -> Tensor:
    """Gradient of `softmax`: dx, in y's dtype and memory order. With `causal`, hidden elements of dy do not count.

    dy: [..., N], the gradient of y. y: [..., N], the forward's result. Computed in fp32 (fp64 for fp64): dx = scale · y
    · (dy − Σ dy · y / Σ y), where the sums run over the last dim; dividing by Σ y takes up the rounding of y.
    """

def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """silu(gate) * up, element by element (SwiGLU without its projections, arXiv:2002.05202).

    Args:
        gate, up: [..., F] of one shape and dtype, any strides; halves of a packed [..., 2F] projection are not copied.

    Returns a contiguous tensor of gate's shape and dtype. The product is taken before rounding. Raises ValueError or
    TypeError where gate and up differ in shape, dtype or device, or are not floating.
    """

def swiglu_fp8(
    gate: Tensor, up: Tensor, bound: Tensor, amax: Tensor, format: Literal["e4m3", "e5m2"] = "e4m3"
) -> tuple[Tensor, Tensor]:
    """silu(gate) * up in 8 bits, (h8, factor), as `fp8_cast` makes it of what `swiglu` returns.

    gate, up: [..., N], one shape and dtype; the rows of each have one stride. Raises as `fp8_cast` does, and where gate
    and up differ in shape, dtype or device.
    """

def swiglu_vjp(dout: Tensor, gate: Tensor, up: Tensor, output_mask: Sequence[bool]) -> tuple[Tensor, Tensor]:
    """Gradients of `swiglu`: (dgate, dup), contiguous; an empty tensor where ``output_mask`` is False.

    dout, gate, up: one shape, any strides, floating. dgate = dout · up · silu'(gate) and dup = dout · silu(gate),
    computed in fp32 (fp64 for fp64), in the inputs' dtype.
    """

def swiglu_vjp_fp8(
    dh: Tensor,
    gate: Tensor,
    up: Tensor,
    bound: Tensor,
    amax: Tensor,
    h_factor: Tensor,
    format: Literal["e4m3", "e5m2"] = "e5m2",
    h_format: Literal["e4m3", "e5m2"] = "e4m3",
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The gradient of gate and up in 8 bits, both layouts, with silu(gate) * up again: (d8, d8_t, h8_t, factor).

    dh, gate, up: [..., N], one shape and dtype. d8 [M, 2N]: the gradients of gate and of up side by side, rounded to
    gate's dtype first, by the factor of `bound`; d8_t [2N, M16] is d8 transposed. h8_t [N, M16]: what `swiglu_fp8` made
    with h_factor, transposed. amax becomes the largest absolute element of both gradients, as in `fp8_cast`. Raises as
    `swiglu_fp8` does.
    """

def token_stats(
    logits: Tensor, target: Tensor, ignore_index: int = -100, scale: float = 1.0, softcap: float = 0.0
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Log-probability of the label, entropy, log-sum-exp and most likely token of softmax(z), in one pass.

    z are the logits, scaled and capped as in `cross_entropy`; p = softmax(z), lse = log Σ exp(z):

        log_probs = z[target] − lse      entropy = −Σ p · log p      predicted = argmax z, the first of equal ones

    So −log_probs.mean() is the cross-entropy, (lse ** 2).mean() the z loss beside it, and predicted == target the
    accuracy of tokens: `tilesmith.nn.cross_entropy_output`.

    logits: [..., V], floating. target: [...], int64 or int32. scale, softcap, and what raises: see `cross_entropy`.

    Returns four tensors [...]: log_probs, entropy and lse, fp32 (fp64 for fp64 logits) and differentiable, and
    predicted, int64. Where the label is ignore_index they are 0, 0, 0 and -1. A class whose score is -inf adds nothing
    to the entropy.

    Source: the definitions; Chowdhery et al., PaLM, arXiv:2204.02311 (z loss).
    """

def token_stats_vjp(
    dlog_probs: Tensor | None,
    dentropy: Tensor | None,
    dlse: Tensor | None,
    logits: Tensor,
    target: Tensor,
    entropy: Tensor,
    lse: Tensor,
    ignore_index: int,
    scale: float,
    softcap: float,
    output_mask: Sequence[bool],
) -> Tensor:
    """The gradient dlogits of `token_stats`, rounded once, to logits' dtype; contiguous.

    dlog_probs, dentropy, dlse: [...], each may be None (zeros). entropy, lse: [...], which the forward saved. The
    formula is that of `linear_token_stats_vjp`. An empty tensor where `output_mask` does not ask for it.
    """

def tvd(
    x: Tensor,
    target: Tensor,
    labels: Tensor | None = None,
    reduction: Literal["mean", "batchmean", "sum", "none"] = "batchmean",
    ignore_index: int = -100,
) -> Tensor:
    """Total variation distance of probabilities: ½ · Σ |x − target|.

    x, target: [..., V], probabilities (not logarithms). Where both are equal the gradient is 0. The rest: see
    `jsd`.

    Computed in fp32 (fp64 for fp64). Raises TypeError for dtypes that are not floating, ValueError for shapes, devices
    and reductions that do not fit.

    Source: f-divergence distillation, Wen et al., arXiv:2307.15190.
    """

def tvd_vjp(
    dloss: Tensor,
    x: Tensor,
    target: Tensor,
    labels: Tensor | None,
    count: Tensor,
    signs: Tensor,
    reduction: str,
    ignore_index: int,
    output_mask: Sequence[bool],
) -> tuple[Tensor, Tensor]:
    """Gradients (dx, dtarget) of `tvd`; signs: those that it saved, or empty.

    dloss: a scalar, or [..., V] for reduction "none". x, target: [..., V]; signs: int16 [..., ⌈V / 8⌉], two bits an
    element. dx = ½ · sign(x − target) · dloss over the divisor, in x's dtype; dtarget = −dx, in target's dtype. An
    empty tensor stands for a gradient that `output_mask` does not ask for.
    """

def xielu(x: Tensor, alpha_p: Tensor, alpha_n: Tensor, beta: float = 0.5, eps: float = -1e-06) -> Tensor:
    """The activation xIELU, element by element, with two learned slopes.

    With p = softplus(alpha_p) and n = beta + softplus(alpha_n): p x² + beta x for x above 0, else
    n (expm1(min(x, eps)) − x) + beta x.

    Args:
        x: any shape and strides, floating.
        alpha_p, alpha_n: [1], floating, before softplus.
        beta: the slope at 0. eps: at most 0; what x is cut to in the exponential.

    Returns a contiguous tensor of x's shape and dtype; all is computed in float32 (float64 for float64) and rounded
    once. The gradients of alpha_p and alpha_n are summed in a fixed order. Raises TypeError for other dtypes,
    ValueError for other shapes, an alpha on another device, or an eps above 0.

    Source: Huang and Schlag, Deriving Activation Functions Using Integration, arXiv:2411.13010.
    """

def xielu_vjp(
    dout: Tensor, x: Tensor, alpha_p: Tensor, alpha_n: Tensor, beta: float, eps: float, output_mask: Sequence[bool]
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients (dx, dalpha_p, dalpha_n) of `xielu`, contiguous, in their inputs' dtypes.

    dout, x: one shape, floating. dx is dout (2 p x + beta) for x above 0, else dout (n (exp(x) − 1) + beta), without
    exp(x) for x above eps. dalpha_p = σ(alpha_p) Σ dout x² over x above 0, dalpha_n = σ(alpha_n) Σ dout
    (expm1(min(x, eps)) − x) over the others. Computed in fp32 (fp64 for fp64). An empty tensor stands for a gradient
    that `output_mask` does not ask for.
    """
