"""kv_cache_append in Triton: one launch writes keys and values and rotates keys and queries."""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from tilesmith.engine import Space, launch, optimize_kernel, register_kernel
from tilesmith.ops.attn.cache_reference import longest


@triton.jit
def _cast(x, ptr):
    """x in the dtype that is behind a pointer; in 8 bits the largest number stands for all beyond it."""
    if ptr.dtype.element_ty.is_fp8():
        limit: tl.constexpr = 448.0 if ptr.dtype.element_ty.is_fp8e4nv() else 57344.0
        x = tl.where(x > limit, limit, tl.where(x < -limit, -limit, x))
    return x.to(ptr.dtype.element_ty)


@triton.jit
def _rotate_and_store(
    x_ptr, x_head, y_ptr, y_head, y_dim, scale_ptr, scale_head, cos, sin, heads, num_heads, written,
    DIM: tl.constexpr, PAIRS: tl.constexpr, BLOCK_PAIRS: tl.constexpr, BLOCK_TAIL: tl.constexpr,
    INTERLEAVED: tl.constexpr,
):  # fmt: skip
    """Rotate the first 2 * PAIRS features of a block of heads, copy the others, divide all by the head's scale; store
    only where `written`."""
    inside = heads[:, None] < num_heads
    scale = 1.0
    if scale_ptr is not None:
        scale = tl.load(scale_ptr + heads[:, None] * scale_head, mask=inside, other=1.0).to(tl.float32)
    rows = heads.to(tl.int64)[:, None]
    x_rows, y_rows = x_ptr + rows * x_head, y_ptr + rows * y_head
    if PAIRS > 0:
        if INTERLEAVED:
            # Whole lines are loaded and split in registers: stores with a stride of two elements would not coalesce.
            cols = tl.arange(0, 2 * BLOCK_PAIRS)[None, :]
            x = tl.load(x_rows + cols, mask=inside & (cols < 2 * PAIRS), other=0.0).to(tl.float32)
            first, second = tl.split(tl.reshape(x, (x.shape[0], BLOCK_PAIRS, 2)))
            turned = tl.join(first * cos - second * sin, second * cos + first * sin)
            y = tl.reshape(turned, (x.shape[0], 2 * BLOCK_PAIRS))
            y = _cast(y / scale, y_ptr)
            tl.store(y_rows + cols * y_dim, y, mask=inside & (cols < 2 * PAIRS) & written)
        else:
            cols = tl.arange(0, BLOCK_PAIRS)[None, :]
            mask = inside & (cols < PAIRS)
            first = tl.load(x_rows + cols, mask=mask, other=0.0).to(tl.float32)
            second = tl.load(x_rows + PAIRS + cols, mask=mask, other=0.0).to(tl.float32)
            y_first = _cast((first * cos - second * sin) / scale, y_ptr)
            y_second = _cast((second * cos + first * sin) / scale, y_ptr)
            tl.store(y_rows + cols * y_dim, y_first, mask=mask & written)
            tl.store(y_rows + (PAIRS + cols) * y_dim, y_second, mask=mask & written)
    if DIM > 2 * PAIRS:
        cols = 2 * PAIRS + tl.arange(0, BLOCK_TAIL)[None, :]
        mask = inside & (cols < DIM)
        x = tl.load(x_rows + cols, mask=mask, other=0.0).to(tl.float32)
        tl.store(y_rows + cols * y_dim, _cast(x / scale, y_ptr), mask=mask & written)


@triton.jit(
    do_not_specialize=(
        "max_positions",
        "page_table_row",
        "pages",
        "num_pages",
        "page_size",
        "kv_heads",
        "q_heads",
        "tokens",
        "k_tokens",
        "q_tokens",
    )
)
def _kv_cache_append_kernel(
    k_cache_ptr, kc_page, kc_head, kc_slot, kc_dim,
    v_cache_ptr, vc_page, vc_head, vc_slot, vc_dim,
    k_ptr, k_row, k_head, k_token,
    v_ptr, v_row, v_head, v_token,
    q_ptr, q_row, q_head, q_token, rotated_q_ptr, rq_row, rq_head, rq_token, rq_dim,
    lengths_ptr, lengths_row,
    cos_ptr, cos_row, cos_token, cos_pair, sin_ptr, sin_row, sin_token, sin_pair, max_positions,
    page_table_ptr, page_table_row, pages, num_pages, page_size, k_scale_ptr, k_scale_head, v_scale_ptr, v_scale_head,
    kv_heads, q_heads, tokens,
    DIM: tl.constexpr, DIM_V: tl.constexpr, PAIRS: tl.constexpr, BLOCK_PAIRS: tl.constexpr, BLOCK_TAIL: tl.constexpr,
    BLOCK_DV: tl.constexpr, BLOCK_HEADS: tl.constexpr, INTERLEAVED: tl.constexpr, TABLE: tl.constexpr,
    k_tokens=None, q_tokens=None,
):  # fmt: skip
    """CTA (row-and-token, part): a part is a block of heads of k, then of v, then of q. k_tokens, q_tokens: how many of
    the tokens k and v, and q, have; None where both have all."""
    index = tl.program_id(0).to(tl.int64)
    row, token = index // tokens, index % tokens
    position = tl.load(lengths_ptr + row * lengths_row).to(tl.int64) + token
    part = tl.program_id(1)
    kv_parts = tl.cdiv(kv_heads, BLOCK_HEADS)
    if k_tokens is not None:  # a token that a tensor does not have is one without heads
        kv_heads = tl.where(token < k_tokens, kv_heads, 0)
        q_heads = tl.where(token < q_tokens, q_heads, 0)

    written = (position >= 0) & (position // page_size < pages)
    slot = position % page_size
    page = row
    if page_table_ptr is not None:
        entry = page_table_ptr + row * page_table_row + position // page_size
        page = tl.load(entry, mask=written, other=-1).to(tl.int64)
        written = written & (page >= 0) & (page < num_pages)

    cos = 1.0
    sin = 0.0
    if PAIRS > 0:
        cols = tl.arange(0, BLOCK_PAIRS)[None, :]
        held = cols < PAIRS
        if TABLE:
            cos_ptr += position * cos_token
            sin_ptr += position * sin_token
            held = held & (position >= 0) & (position < max_positions)
        else:
            cos_ptr += row * cos_row + token * cos_token
            sin_ptr += row * sin_row + token * sin_token
        cos = tl.load(cos_ptr + cols * cos_pair, mask=held, other=float("nan")).to(tl.float32)
        sin = tl.load(sin_ptr + cols * sin_pair, mask=held, other=float("nan")).to(tl.float32)

    k_cache_ptr += page * kc_page + slot * kc_slot
    v_cache_ptr += page * vc_page + slot * vc_slot
    if part < kv_parts:
        heads = part * BLOCK_HEADS + tl.arange(0, BLOCK_HEADS)
        _rotate_and_store(
            k_ptr + row * k_row + token * k_token, k_head, k_cache_ptr, kc_head, kc_dim, k_scale_ptr, k_scale_head,
            cos, sin, heads, kv_heads, written, DIM, PAIRS, BLOCK_PAIRS, BLOCK_TAIL, INTERLEAVED,
        )  # fmt: skip
    elif part < 2 * kv_parts:
        heads = (part - kv_parts) * BLOCK_HEADS + tl.arange(0, BLOCK_HEADS)
        _rotate_and_store(
            v_ptr + row * v_row + token * v_token, v_head, v_cache_ptr, vc_head, vc_dim, v_scale_ptr, v_scale_head,
            1.0, 0.0, heads, kv_heads, written, DIM_V, 0, BLOCK_PAIRS, BLOCK_DV, INTERLEAVED,
        )  # fmt: skip
    elif q_ptr is not None:
        heads = (part - 2 * kv_parts) * BLOCK_HEADS + tl.arange(0, BLOCK_HEADS)
        out = rotated_q_ptr + row * rq_row + token * rq_token
        _rotate_and_store(
            q_ptr + row * q_row + token * q_token, q_head, out, rq_head, rq_dim, None, 0,
            cos, sin, heads, q_heads, True, DIM, PAIRS, BLOCK_PAIRS, BLOCK_TAIL, INTERLEAVED,
        )  # fmt: skip


class AppendConfig(NamedTuple):
    """block_heads: heads that one CTA moves."""

    block_heads: int
    num_warps: int


def _reasons(call) -> list[str]:
    reasons = []
    for name in ("k_cache", "v_cache", "k", "v", "q", "cos"):
        x = getattr(call, name)
        if x is not None and x.dtype == torch.float64:
            reasons.append(f"{name} is float64; this kernel computes in float32")
    for name in ("k_cache", "v_cache"):
        dtype, arch = getattr(call, name).dtype, call.arch
        if dtype.itemsize == 1 and (arch.kind == "hip" or (arch.kind == "cuda" and arch.capability < (8, 9))):
            reasons.append(f"{name} is {dtype}; compute capability 8.9 and up converts it")
    return reasons


def _dims(k_cache, v_cache, k, v, lengths, q, *rest) -> dict[str, int]:
    heads = k.shape[1] if q is None else q.shape[1]
    return {"tokens": k.shape[0] * longest(k, q), "heads": heads, "dim": max(k.shape[3], v.shape[3])}


def _default(dims, arch, dtype) -> AppendConfig:
    heads = triton.next_power_of_2(max(1, dims["heads"]))
    # A few tokens spread over the device head by head; for many, 2,048 elements on two warps. H200, bf16, 16,384
    # tokens of 32 and 8 heads of 128, rotated: 106 us, into pages 108; on four warps 117 and 121.
    if dims["tokens"] * heads <= 4 * arch.sms:
        return AppendConfig(1, 1)
    return AppendConfig(min(heads, max(1, 2048 // triton.next_power_of_2(max(1, dims["dim"])))), 2)


APPEND_SPACE = Space(
    default=_default, dims=_dims, choices={"block_heads": (1, 2, 4, 8, 16, 32), "num_warps": (1, 2, 4, 8)}
)


@register_kernel("kv_cache_append", backend="triton", rank=20, rejects=_reasons)
@optimize_kernel(space=APPEND_SPACE)
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
    *,
    config: AppendConfig,
) -> Tensor:
    """Launch over (row and token, block of heads of k, v and q)."""
    batch, kv_heads, k_tokens, dim = k.shape
    dim_v = v.shape[3]
    tokens = longest(k, q)
    rotated_q = k.new_empty(0) if q is None else torch.empty_like(q)
    if batch * tokens * max(dim, dim_v) == 0:
        return rotated_q
    q_heads = 0 if q is None else q.shape[1]
    own = {} if q is None or q.shape[2] == k_tokens else {"k_tokens": k_tokens, "q_tokens": q.shape[2]}
    pairs = 0 if cos is None else cos.shape[-1]
    k, v, q = _unit(k), _unit(v), None if q is None else _unit(q)
    parts = 2 * triton.cdiv(kv_heads, config.block_heads) + triton.cdiv(q_heads, config.block_heads)
    if parts == 0:
        return rotated_q
    page_table = None if page_table is None else _unit(page_table)
    pages = 1 if page_table is None else page_table.shape[1]
    launch(
        _kv_cache_append_kernel, (batch * tokens, parts),
        k_cache, *k_cache.stride(), v_cache, *v_cache.stride(), k, *k.stride()[:3], v, *v.stride()[:3],
        q, *((0, 0, 0) if q is None else q.stride()[:3]), rotated_q,
        *((0, 0, 0, 0) if q is None else rotated_q.stride()), lengths, lengths.stride(0),
        cos, *_angle_strides(cos), sin, *_angle_strides(sin), 0 if cos is None else cos.shape[0],
        page_table, 0 if page_table is None else page_table.stride(0), pages if k_cache.shape[2] else 0,
        k_cache.shape[0], max(1, k_cache.shape[2]), k_scale, _head_stride(k_scale), v_scale, _head_stride(v_scale),
        kv_heads, q_heads, tokens,
        DIM=dim, DIM_V=dim_v, PAIRS=pairs, BLOCK_PAIRS=triton.next_power_of_2(max(1, pairs)),
        BLOCK_TAIL=triton.next_power_of_2(max(1, dim - 2 * pairs)), BLOCK_DV=triton.next_power_of_2(max(1, dim_v)),
        BLOCK_HEADS=config.block_heads, INTERLEAVED=interleaved, TABLE=cos is not None and cos.ndim == 2,
        num_warps=config.num_warps, **own,
    )  # fmt: skip
    return rotated_q


def _unit(x: Tensor) -> Tensor:
    """x with a last stride of 1; a copy where it has another, which is cheap: x holds only the new tokens."""
    return x if x.stride(-1) == 1 or x.shape[-1] == 1 else x.contiguous()


def _head_stride(scale: Tensor | None) -> int:
    return 0 if scale is None or scale.shape[1] == 1 else scale.stride(1)


def _angle_strides(angles: Tensor | None) -> tuple[int, int, int]:
    """Strides by row, by token (by position in a table) and by pair; a single row serves all."""
    if angles is None:
        return 0, 0, 0
    return 0 if angles.ndim == 2 or angles.shape[0] == 1 else angles.stride(0), angles.stride(-2), angles.stride(-1)
