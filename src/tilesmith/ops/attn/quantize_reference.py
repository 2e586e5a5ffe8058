"""Queries, keys and values in e4m3 with their factors, in plain PyTorch: the meaning of `attention_quantize`, and of
the two ops with which a backward of `attention_fp8` undoes it.

Legend: B batch, T query tokens, S key tokens, H query heads, G kv heads (H % G == 0), D head dim of q and k, Dv head
dim of v.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from tilesmith.engine.arguments import dtype_name
from tilesmith.ops.attn.reference import FACTOR_BLOCK, by_token, empty_tokens_first, is_tokens_first
from tilesmith.ops.rotary.reference import rope, rope_vjp

DTYPES = {dtype_name(dtype): dtype for dtype in (torch.bfloat16, torch.float16, torch.float32, torch.float64)}
GREATEST = 448.0  # of e4m3
SMALLEST = 2.0**-100  # a largest element up to this counts as zero


def attention_quantize(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cos: Tensor | None = None,
    sin: Tensor | None = None,
    granularity: str = "block",
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
    acc = torch.promote_types(q.dtype, torch.float32)
    rows, columns, values = (x.to(acc).contiguous() for x in (q, k, v))
    if cos is not None:
        angles = [x[..., : k.shape[2], :] for x in (cos, sin)]
        columns, _ = rope(columns, None, *angles, interleaved=interleaved)
        rows, _ = rope(rows, None, *(x[..., k.shape[2] - q.shape[2] :, :] for x in angles), interleaved=interleaved)
    matrix = hadamard(q.shape[3], acc, q.device) if rotate else None
    shift, taken = (q.new_empty(0, dtype=torch.float32) for _ in range(2))
    if smooth:
        picked = torch.arange(k.shape[2], device=k.device) // FACTOR_BLOCK % smoothed_step(k.shape[2]) == 0
        mean = (columns * picked.unsqueeze(-1)).sum(2, keepdim=True) / picked.sum().clamp(min=1)
        columns = columns - mean
        shift = (rows * mean.repeat_interleave(q.shape[1] // k.shape[1], 1)).sum(-1).to(torch.float32)
        taken = (mean @ matrix if rotate else mean).squeeze(2).to(torch.float32)
    if rotate:
        rows, columns = rows @ matrix, columns @ matrix
    q8, k8, v8 = outputs_like(q, k, v)
    scales = []
    for x8, x in ((q8, rows), (k8, columns), (v8, values)):
        scale = _scale(x, granularity)
        x8.copy_((x / by_token(scale, x)).clamp(-GREATEST, GREATEST))
        scales.append(scale.to(torch.float32))
    return q8, k8, v8, *scales, shift, taken


def attention_dequantize(
    q8: Tensor,
    k8: Tensor,
    v8: Tensor,
    q_scale: Tensor,
    k_scale: Tensor,
    v_scale: Tensor,
    tokens_first: Sequence[bool],
    dtype: str = "bfloat16",
) -> tuple[Tensor, Tensor, Tensor]:
    """q8, k8 and v8 times their factors: (q, k, v) in `dtype`, rounded once.

    q8 [B, H, T, D], k8 [B, G, S, D], v8 [B, G, S, Dv]: float8 or int8 as a rule, any strides. q_scale, k_scale,
    v_scale: floating, as `attention` takes them. tokens_first: which of q, k and v lie in memory as [B, T, H, D]; the
    others are contiguous. dtype: "bfloat16", "float16", "float32" or "float64"; for q8 in fp64 it is fp64.

    What `attention_quantize` returned becomes numbers that bf16 has exactly. There are no gradients. Raises ValueError
    or TypeError for shapes, dtypes and devices that do not fit.
    """
    wide = dequantised_like(q8, k8, v8, tokens_first, dtype)
    # every 8-bit number is one of bf16 and fp16, so that it is the product that is rounded
    return tuple(
        into.copy_(x8).mul_(by_token(scale, x8))
        for into, x8, scale in zip(wide, (q8, k8, v8), (q_scale, k_scale, v_scale), strict=True)
    )


def dequantised_like(
    q8: Tensor, k8: Tensor, v8: Tensor, tokens_first: Sequence[bool], dtype: str
) -> tuple[Tensor, Tensor, Tensor]:
    """Empty q, k and v as `attention_dequantize` returns them."""
    into = torch.float64 if q8.dtype == torch.float64 else DTYPES[dtype]
    return tuple(
        empty_tokens_first(x, x.shape[1], x.shape[3], into) if first else x.new_empty(x.shape, dtype=into)
        for x, first in zip((q8, k8, v8), tokens_first, strict=True)
    )


def attention_fp8_gradients(
    dq8: Tensor | None,
    dk8: Tensor | None,
    dlse: Tensor | None = None,
    lse: Tensor | None = None,
    mean: Tensor | None = None,
    cos: Tensor | None = None,
    sin: Tensor | None = None,
    dtype: str = "",
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
    results = gradients_like(dq8, dk8, dtype)
    for dx, into, first in ((dq8, results[0], offset), (dk8, results[1], 0)):
        if dx is None:
            continue
        if dx is dq8 and dlse is not None:
            dx = _with_mean(dx, mean, dlse, lse, scale)
        if rotate:
            dx = _rotated_back(dx)
        if cos is not None:
            angles = (x[..., first : first + dx.shape[2], :] for x in (cos, sin))
            dx, _ = rope_vjp(dx, None, *angles, None, None, None, 0, interleaved, False, False, (True, False))
        into.copy_(dx)
    return results


def gradients_like(dq8: Tensor | None, dk8: Tensor | None, dtype: str) -> tuple[Tensor, Tensor]:
    """Empty dq and dk as `attention_fp8_gradients` returns them."""
    given = dk8 if dq8 is None else dq8
    return tuple(
        given.new_empty(0) if x is None else torch.empty_like(x, dtype=_result_dtype(x, dtype)) for x in (dq8, dk8)
    )


def _result_dtype(x: Tensor, dtype: str) -> torch.dtype:
    return x.dtype if not dtype or x.dtype == torch.float64 else DTYPES[dtype]


def _with_mean(dq: Tensor, mean: Tensor, dlse: Tensor, lse: Tensor, scale: float) -> Tensor:
    """dq and what scale * shift, which `lse` was given, adds to it: the mean of the keys [B, G, D] for each query.
    Nothing where a query saw no key. `out` has none of it. In dk it cancels, since the keys make up their mean."""
    dlse = torch.where(lse == float("-inf"), 0.0, dlse * scale).unsqueeze(-1)
    mean = mean.repeat_interleave(dq.shape[1] // mean.shape[1], 1).unsqueeze(2)
    return torch.addcmul(dq, dlse, mean).to(dq.dtype)


def _rotated_back(dx: Tensor) -> Tensor:
    """dx [B, H, T, D] times the Hadamard matrix, rounded once. Its root goes into the sum: bf16 does not have it."""
    signs = hadamard_signs(dx.shape[3], dx.dtype, dx.device)
    first = is_tokens_first(dx)
    rows = dx.transpose(1, 2) if first else dx
    shape, nothing = rows.shape, dx.new_zeros(1)
    rows = torch.addmm(nothing, rows.reshape(-1, shape[3]), signs, beta=0, alpha=shape[3] ** -0.5).view(shape)
    return rows.transpose(1, 2) if first else rows


def smoothed_step(tokens: int) -> int:
    """Every how many blocks of 128 of so many tokens count for the mean of the keys. Any vector near the mean will do;
    whole blocks, since single tokens with a step may all have the same angle of a rotary embedding."""
    return max(1, tokens // 2048)


def outputs_like(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Empty q8, k8 and v8 for q, k and v, in the memory that `attention_quantize` promises."""
    batch, kv_heads, keys, dim = k.shape
    room = (keys + 15) // 16 * 16
    small = torch.float8_e4m3fn
    q8 = empty_tokens_first(q, q.shape[1], dim, small) if is_tokens_first(q) else q.new_empty(q.shape, dtype=small)
    k8 = k.new_empty(batch, kv_heads, room, dim, dtype=small)[:, :, :keys]
    v8 = v.new_empty(batch, kv_heads, v.shape[3], room, dtype=small)[..., :keys].transpose(2, 3)
    return q8, k8, v8


def hadamard(order: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """The Hadamard matrix of an order that is a power of two, Sylvester's, over the order's root: its own inverse."""
    return hadamard_signs(order, dtype, device) * order**-0.5


def hadamard_signs(order: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """The Hadamard matrix of 1 and -1: element (i, j) is negative where i & j has an odd number of bits."""
    matrix, bit = torch.ones(order, order, dtype=dtype, device=device), order // 2
    while bit:
        matrix.view(-1, 2, bit, order // (2 * bit), 2, bit)[:, 1, :, :, 1].neg_()
        bit //= 2
    return matrix


def _scale(x: Tensor, granularity: str) -> Tensor:
    """Factors of x [B, H, T, D]: [B, H, ceil(T / 128)], [B, H, 1] or [1, 1, 1]."""
    batch, heads, tokens, _ = x.shape
    blocks = (tokens + FACTOR_BLOCK - 1) // FACTOR_BLOCK
    size = x.abs().amax(-1)
    size = torch.nn.functional.pad(size, (0, blocks * FACTOR_BLOCK - tokens)).view(batch, heads, blocks, FACTOR_BLOCK)
    size = size.amax(-1)
    if granularity != "block":
        dims = (2,) if granularity == "head" else (0, 1, 2)
        size = size.amax(dims, keepdim=True) if size.numel() else size.sum(dims, keepdim=True)
    return factors(size)


def factors(size: Tensor) -> Tensor:
    """The factors of values whose largest absolute element is `size`."""
    part, power = torch.frexp(size.clamp(max=torch.finfo(torch.float32).max))  # 448 is 0.875 * 2**9
    return torch.where(size > SMALLEST, torch.ldexp(torch.ones_like(size), power - 9 + (part > 0.875)), 1.0)
