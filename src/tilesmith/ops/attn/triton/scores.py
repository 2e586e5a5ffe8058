"""Triton kernels of attention's weights and row statistics. Scores are in natural units, in fp32."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from tilesmith.device.rows import unit_stride
from tilesmith.engine import Space, cdiv, launch, next_power_of_2, optimize_kernel, register_kernel
from tilesmith.ops.attn.reference import scale_of
from tilesmith.ops.attn.triton.blocks import load_rows, pair_scores


@triton.jit
def _weights(score, lse):
    """exp(score - lse); 0 where the score or the lse is -inf."""
    base = tl.where(lse == float("-inf"), float("inf"), lse)
    return tl.exp(score - base[:, None])


@triton.jit
def _attention_weights_fwd_kernel(
    q_ptr, k_ptr, lse_ptr, weights_ptr, q_strides, k_strides, heads, tokens, keys, scale,
    GROUP: tl.constexpr, DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    CAUSAL: tl.constexpr,
):  # fmt: skip
    """One tile of one head's weights."""
    across = tl.cdiv(keys, BLOCK_N)
    tiles = tl.cdiv(tokens, BLOCK_M) * across
    head_row = (tl.program_id(0) // tiles).to(tl.int64)
    tile = tl.program_id(0) % tiles
    batch, head = head_row // heads, head_row % heads
    first_row, first_col = tile // across * BLOCK_M, tile % across * BLOCK_N
    rows, cols = first_row + tl.arange(0, BLOCK_M), first_col + tl.arange(0, BLOCK_N)
    q_ptr += batch * q_strides[0] + head * q_strides[1]
    k_ptr += batch * k_strides[0] + head // GROUP * k_strides[1]
    q = load_rows(q_ptr, first_row, tokens, q_strides[2], DIM, BLOCK_M, BLOCK_D)
    k = load_rows(k_ptr, first_col, keys, k_strides[2], DIM, BLOCK_N, BLOCK_D)
    lse = tl.load(lse_ptr + head_row * tokens + rows, mask=rows < tokens, other=0.0).to(tl.float32)
    p = _weights(pair_scores(q, k, rows, cols, tokens, keys, scale, CAUSAL), lse)
    out = weights_ptr + (head_row * tokens + rows)[:, None] * keys + cols[None, :]
    tl.store(out, p.to(weights_ptr.dtype.element_ty), mask=(rows < tokens)[:, None] & (cols < keys)[None, :])


@triton.jit
def _attention_stats_kernel(
    q_ptr, k_ptr, m_ptr, l_ptr, q_strides, k_strides, heads, tokens, keys, scale,
    GROUP: tl.constexpr, DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    CAUSAL: tl.constexpr,
):  # fmt: skip
    """Maximum and sum of one tile of rows."""
    blocks = tl.cdiv(tokens, BLOCK_M)
    head_row = (tl.program_id(0) // blocks).to(tl.int64)
    batch, head = head_row // heads, head_row % heads
    first_row = tl.program_id(0) % blocks * BLOCK_M
    rows = first_row + tl.arange(0, BLOCK_M)
    q_ptr += batch * q_strides[0] + head * q_strides[1]
    k_ptr += batch * k_strides[0] + head // GROUP * k_strides[1]
    q = load_rows(q_ptr, first_row, tokens, q_strides[2], DIM, BLOCK_M, BLOCK_D)
    end = keys
    if CAUSAL:
        end = tl.minimum(keys, first_row + BLOCK_M + keys - tokens)
    top = tl.full((BLOCK_M,), float("-inf"), tl.float32)
    total = tl.zeros((BLOCK_M,), tl.float32)
    for first in range(0, end, BLOCK_N):
        k = load_rows(k_ptr, first, keys, k_strides[2], DIM, BLOCK_N, BLOCK_D)
        score = pair_scores(q, k, rows, first + tl.arange(0, BLOCK_N), tokens, keys, scale, CAUSAL)
        new_top = tl.maximum(top, tl.max(score, 1))
        base = tl.where(new_top == float("-inf"), 0.0, new_top)
        total = total * tl.exp(top - base) + tl.sum(tl.exp(score - base[:, None]), 1)
        top = new_top
    at = head_row * tokens + rows
    tl.store(m_ptr + at, top, mask=rows < tokens)
    tl.store(l_ptr + at, total, mask=rows < tokens)


@triton.jit
def _attention_weights_dq_kernel(
    dweights_ptr, q_ptr, k_ptr, lse_ptr, dq_ptr, dlse_ptr, d_strides, q_strides, k_strides, heads, tokens, keys, scale,
    GROUP: tl.constexpr, DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    CAUSAL: tl.constexpr,
):  # fmt: skip
    """dq and dlse of one tile of rows."""
    blocks = tl.cdiv(tokens, BLOCK_M)
    head_row = (tl.program_id(0) // blocks).to(tl.int64)
    batch, head = head_row // heads, head_row % heads
    first_row = tl.program_id(0) % blocks * BLOCK_M
    rows = first_row + tl.arange(0, BLOCK_M)
    q_ptr += batch * q_strides[0] + head * q_strides[1]
    k_ptr += batch * k_strides[0] + head // GROUP * k_strides[1]
    dweights_ptr += batch * d_strides[0] + head * d_strides[1]
    q = load_rows(q_ptr, first_row, tokens, q_strides[2], DIM, BLOCK_M, BLOCK_D)
    lse = tl.load(lse_ptr + head_row * tokens + rows, mask=rows < tokens, other=0.0).to(tl.float32)
    end = keys
    if CAUSAL:
        end = tl.minimum(keys, first_row + BLOCK_M + keys - tokens)
    dq = tl.zeros((BLOCK_M, BLOCK_D), tl.float32)
    total = tl.zeros((BLOCK_M,), tl.float32)
    for first in range(0, end, BLOCK_N):
        cols = first + tl.arange(0, BLOCK_N)
        k = load_rows(k_ptr, first, keys, k_strides[2], DIM, BLOCK_N, BLOCK_D)
        p = _weights(pair_scores(q, k, rows, cols, tokens, keys, scale, CAUSAL), lse)
        at = rows.to(tl.int64)[:, None] * d_strides[2] + cols.to(tl.int64)[None, :] * d_strides[3]
        dp = tl.load(dweights_ptr + at, mask=(rows < tokens)[:, None] & (cols < keys)[None, :], other=0.0)
        ds = p * dp.to(tl.float32)
        total += tl.sum(ds, 1)
        dq = tl.dot(ds.to(k.dtype), k, dq, input_precision="ieee")
    at = head_row * tokens + rows
    held = rows < tokens
    cols = tl.arange(0, BLOCK_D)
    if dlse_ptr is not None:
        tl.store(dlse_ptr + at, -total, mask=held)
    if dq_ptr is not None:
        out = dq_ptr + at[:, None] * DIM + cols[None, :]
        tl.store(out, (dq * scale).to(dq_ptr.dtype.element_ty), mask=held[:, None] & (cols < DIM)[None, :])


@triton.jit
def _attention_weights_dk_kernel(
    dweights_ptr, q_ptr, k_ptr, lse_ptr, dk_ptr, d_strides, q_strides, k_strides, heads, tokens, keys, scale,
    GROUP: tl.constexpr, DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    CAUSAL: tl.constexpr,
):  # fmt: skip
    """dk of one tile of keys, summed over the query heads that read it."""
    blocks = tl.cdiv(keys, BLOCK_N)
    kv_row = (tl.program_id(0) // blocks).to(tl.int64)
    kv_heads = heads // GROUP
    batch, kv_head = kv_row // kv_heads, kv_row % kv_heads
    first_col = tl.program_id(0) % blocks * BLOCK_N
    cols = first_col + tl.arange(0, BLOCK_N)
    k_ptr += batch * k_strides[0] + kv_head * k_strides[1]
    k = load_rows(k_ptr, first_col, keys, k_strides[2], DIM, BLOCK_N, BLOCK_D)
    begin = 0
    if CAUSAL:
        begin = tl.maximum(0, first_col - (keys - tokens)) // BLOCK_M * BLOCK_M
    dk = tl.zeros((BLOCK_N, BLOCK_D), tl.float32)
    for member in range(GROUP):
        head = kv_head * GROUP + member
        q_head = q_ptr + batch * q_strides[0] + head * q_strides[1]
        d_head = dweights_ptr + batch * d_strides[0] + head * d_strides[1]
        lse_head = lse_ptr + (batch * heads + head) * tokens
        for first in range(begin, tokens, BLOCK_M):
            rows = first + tl.arange(0, BLOCK_M)
            q = load_rows(q_head, first, tokens, q_strides[2], DIM, BLOCK_M, BLOCK_D)
            lse = tl.load(lse_head + rows, mask=rows < tokens, other=0.0).to(tl.float32)
            p = _weights(pair_scores(q, k, rows, cols, tokens, keys, scale, CAUSAL), lse)
            at = rows.to(tl.int64)[:, None] * d_strides[2] + cols.to(tl.int64)[None, :] * d_strides[3]
            dp = tl.load(d_head + at, mask=(rows < tokens)[:, None] & (cols < keys)[None, :], other=0.0)
            ds = p * dp.to(tl.float32)
            dk = tl.dot(tl.trans(ds).to(q.dtype), q, dk, input_precision="ieee")
    dims = tl.arange(0, BLOCK_D)
    out = dk_ptr + (kv_row * keys + cols)[:, None] * DIM + dims[None, :]
    tl.store(out, (dk * scale).to(dk_ptr.dtype.element_ty), mask=(cols < keys)[:, None] & (dims < DIM)[None, :])


class ScoresConfig(NamedTuple):
    """Queries and keys of a tile; warps and pipeline stages of a CTA."""

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int


def _dims(q: Tensor, k: Tensor, *_: object) -> dict[str, int]:
    return {"rows": q.shape[0] * q.shape[1], "tokens": q.shape[2], "keys": k.shape[2], "dim": q.shape[3]}


def _dims_vjp(dweights: Tensor, q: Tensor, k: Tensor, *_: object) -> dict[str, int]:
    return _dims(q, k)


def _default(dims, arch, dtype) -> ScoresConfig:
    if arch.kind not in ("cuda", "hip", "xpu"):
        return ScoresConfig(32, 32, 4, 1)
    if dtype == torch.float32:
        # fp32 products keep whole operands in registers: 4 warps spill at D 128, and 32 keys at D 256
        return ScoresConfig(32, 32 if dims["dim"] <= 128 else 16, 4 if dims["dim"] <= 64 else 8, 1)
    return ScoresConfig(64, 64, 4, 2) if dims["dim"] <= 128 else ScoresConfig(64, 32, 4, 1)


def _default_weights(dims, arch, dtype) -> ScoresConfig:
    # H200, bf16, 2k of 64 causal heads: 358 us at head dim 128 and 259 at 64, in tiles of 64 x 64 395 and 291
    config = _default(dims, arch, dtype)
    return config._replace(block_n=128) if _large(config, arch) else config


def _default_vjp(dims, arch, dtype) -> ScoresConfig:
    # as above, at 128: 462 us, in two stages 545; grouped heads 533 and 627
    config = _default(dims, arch, dtype)
    return config._replace(num_stages=3) if _large(config, arch) else config


def _large(config: ScoresConfig, arch) -> bool:
    """Whether tiles of 64 x 64 leave most of a SM's shared memory free."""
    return config.block_n == 64 and arch.kind == "cuda" and arch.shared_memory > 160 * 1024


SCORES_CHOICES = {"block_m": (32, 64, 128), "block_n": (32, 64, 128), "num_warps": (4, 8), "num_stages": (1, 2, 3)}
STATS_SPACE = Space(default=_default, dims=_dims, choices=SCORES_CHOICES)
WEIGHTS_SPACE = Space(default=_default_weights, dims=_dims, choices=SCORES_CHOICES)
WEIGHTS_VJP_SPACE = Space(default=_default_vjp, dims=_dims_vjp, choices=SCORES_CHOICES)


def _reasons(call) -> list[str]:
    reasons = []
    if call.q.dtype not in (torch.float32, torch.float16, torch.bfloat16):
        reasons.append(f"q is {call.q.dtype}; float32, float16 and bfloat16 are supported")
    if call.q.cols > 256:
        reasons.append(f"q has head dim {call.q.cols}; up to 256 is supported")
    return reasons


def _shared(q: Tensor, k: Tensor, scale: float | None, causal: bool, config: ScoresConfig) -> dict:
    """What every launch says, by the kernels' parameter names."""
    dim = q.shape[3]
    return {
        "q_ptr": q, "k_ptr": k, "q_strides": q.stride(), "k_strides": k.stride(),
        "heads": q.shape[1], "tokens": q.shape[2], "keys": k.shape[2], "scale": scale_of(q, scale),
        "GROUP": q.shape[1] // k.shape[1], "DIM": dim, "BLOCK_D": max(16, next_power_of_2(dim)), "CAUSAL": causal,
        "BLOCK_M": config.block_m, "BLOCK_N": config.block_n,
        "num_warps": config.num_warps, "num_stages": config.num_stages,
    }  # fmt: skip


@register_kernel("attention_weights", backend="triton", rank=20, rejects=_reasons)
@optimize_kernel(space=WEIGHTS_SPACE)
def attention_weights(
    q: Tensor, k: Tensor, lse: Tensor, scale: float | None = None, causal: bool = False, *, config: ScoresConfig
) -> Tensor:
    """One CTA for each tile of the result."""
    q, k = unit_stride(q), unit_stride(k)
    weights = torch.empty((*q.shape[:3], k.shape[2]), dtype=q.dtype, device=q.device)
    if weights.numel() > 0:
        tiles = cdiv(q.shape[2], config.block_m) * cdiv(k.shape[2], config.block_n)
        launch(
            _attention_weights_fwd_kernel, (tiles * q.shape[0] * q.shape[1],),
            lse_ptr=lse.contiguous(), weights_ptr=weights, **_shared(q, k, scale, causal, config),
        )  # fmt: skip
    return weights


@register_kernel("attention_weights_vjp", backend="triton", rank=20, rejects=_reasons)
@optimize_kernel(space=WEIGHTS_VJP_SPACE)
def attention_weights_vjp(
    dweights: Tensor,
    q: Tensor,
    k: Tensor,
    lse: Tensor,
    scale: float | None,
    causal: bool,
    output_mask: Sequence[bool],
    *,
    config: ScoresConfig,
) -> tuple[Tensor, Tensor, Tensor]:
    """One CTA for each tile of rows writes dq and dlse, one for each tile of keys dk."""
    q, k, lse = unit_stride(q), unit_stride(k), lse.contiguous()
    wants_q, wants_k, wants_lse = output_mask
    dq = torch.empty(q.shape if wants_q else (0,), dtype=q.dtype, device=q.device)
    dk = torch.empty(k.shape if wants_k else (0,), dtype=k.dtype, device=q.device)
    dlse = torch.empty(lse.shape if wants_lse else (0,), dtype=lse.dtype, device=q.device)
    shared = {"dweights_ptr": dweights, "d_strides": dweights.stride(), "lse_ptr": lse}
    shared |= _shared(q, k, scale, causal, config)
    if (wants_q or wants_lse) and lse.numel() > 0:
        launch(
            _attention_weights_dq_kernel, (cdiv(q.shape[2], config.block_m) * q.shape[0] * q.shape[1],),
            dq_ptr=dq if wants_q else None, dlse_ptr=dlse if wants_lse else None, **shared,
        )  # fmt: skip
    if wants_k and k.numel() > 0:
        launch(
            _attention_weights_dk_kernel, (cdiv(k.shape[2], config.block_n) * k.shape[0] * k.shape[1],),
            dk_ptr=dk, **shared,
        )  # fmt: skip
    return dq, dk, dlse


@register_kernel("attention_stats", backend="triton", rank=20, rejects=_reasons)
@optimize_kernel(space=STATS_SPACE)
def attention_stats(
    q: Tensor, k: Tensor, scale: float | None = None, causal: bool = False, *, config: ScoresConfig
) -> tuple[Tensor, Tensor]:
    """One CTA for each tile of rows."""
    q, k = unit_stride(q), unit_stride(k)
    m, l = (torch.empty(q.shape[:3], dtype=torch.float32, device=q.device) for _ in range(2))
    if m.numel() > 0:
        launch(
            _attention_stats_kernel, (cdiv(q.shape[2], config.block_m) * q.shape[0] * q.shape[1],),
            m_ptr=m, l_ptr=l, **_shared(q, k, scale, causal, config),
        )  # fmt: skip
    return m, l
