"""Queries, keys and values in e4m3 with their factors, in plain PyTorch: the meaning of `attention_quantize`.

Legend: B batch, T query tokens, S key tokens, H query heads, G kv heads (H % G == 0), D head dim of q and k, Dv head
dim of v.
"""

import torch
from torch import Tensor

from tilesmith.ops.attn.reference import FACTOR_BLOCK, by_token, empty_tokens_first, is_tokens_first
from tilesmith.ops.rotary.reference import rope

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
