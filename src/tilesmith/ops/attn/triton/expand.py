"""expand_kv and its gradient in Triton: one launch each, a program for each token."""

from collections.abc import Sequence

import triton
import triton.language as tl
from torch import Tensor

from tilesmith.engine import cdiv, launch, next_power_of_2, register_kernel, rehearsed
from tilesmith.ops.attn.expand_op import gradients
from tilesmith.ops.attn.reference import empty_tokens_first

TILE = 2048  # elements of the widest part that a program holds: two 16-byte accesses in bf16 of each of 128 threads


@triton.jit
def _tile(ptr, strides, row, token, heads, cols):
    """Pointers [heads, cols] into one token of one row of the batch."""
    line = ptr + row * strides[0] + token * strides[2]
    return line + heads.to(tl.int64)[:, None] * strides[1] + cols.to(tl.int64)[None, :] * strides[3]


@triton.jit
def _expand_kv_kernel(
    kv_ptr, kv_strides, shared_ptr, shared_strides, k_ptr, k_strides, v_ptr, v_strides, tokens, num_heads,
    OWN: tl.constexpr, SHARED: tl.constexpr, VALUES: tl.constexpr, HEAD_BLOCKS: tl.constexpr,
    BLOCK_HEADS: tl.constexpr, BLOCK_OWN: tl.constexpr, BLOCK_SHARED: tl.constexpr, BLOCK_VALUES: tl.constexpr,
):  # fmt: skip
    """Program: a block of heads of one token."""
    line = tl.program_id(0) // HEAD_BLOCKS
    row, token = (line // tokens).to(tl.int64), (line % tokens).to(tl.int64)
    heads = tl.program_id(0) % HEAD_BLOCKS * BLOCK_HEADS + tl.arange(0, BLOCK_HEADS)
    inside = (heads < num_heads)[:, None]
    own, shared, values = tl.arange(0, BLOCK_OWN), tl.arange(0, BLOCK_SHARED), tl.arange(0, BLOCK_VALUES)
    is_own, is_shared = inside & (own < OWN)[None, :], inside & (shared < SHARED)[None, :]
    is_value = inside & (values < VALUES)[None, :]
    # all loads before the first store, which they could not pass
    k = tl.load(_tile(kv_ptr, kv_strides, row, token, heads, own), mask=is_own)
    v = tl.load(_tile(kv_ptr, kv_strides, row, token, heads, OWN + values), mask=is_value)
    # every head loads its copy: what one loads for all would change threads through shared memory
    k_shared = tl.load(_tile(shared_ptr, shared_strides, row, token, heads * 0, shared), mask=is_shared)
    tl.store(_tile(k_ptr, k_strides, row, token, heads, own), k, mask=is_own)
    tl.store(_tile(k_ptr, k_strides, row, token, heads, OWN + shared), k_shared, mask=is_shared)
    tl.store(_tile(v_ptr, v_strides, row, token, heads, values), v, mask=is_value)


@triton.jit
def _expand_kv_gradient_kernel(
    dk_ptr, dk_strides, dv_ptr, dv_strides, dkv_ptr, dkv_strides, dshared_ptr, dshared_strides, tokens, num_heads,
    OWN: tl.constexpr, SHARED: tl.constexpr, VALUES: tl.constexpr, KV: tl.constexpr, SUM: tl.constexpr,
    BLOCK_HEADS: tl.constexpr, BLOCK_OWN: tl.constexpr, BLOCK_SHARED: tl.constexpr, BLOCK_VALUES: tl.constexpr,
):  # fmt: skip
    """Program: all heads of one token, a block of them at a time. KV, SUM: whether dkv and dshared are wanted."""
    row, token = (tl.program_id(0) // tokens).to(tl.int64), (tl.program_id(0) % tokens).to(tl.int64)
    own, shared, values = tl.arange(0, BLOCK_OWN), tl.arange(0, BLOCK_SHARED), tl.arange(0, BLOCK_VALUES)
    wide: tl.constexpr = tl.float64 if dshared_ptr.dtype.element_ty == tl.float64 else tl.float32
    total = tl.zeros((BLOCK_HEADS, BLOCK_SHARED), wide)
    for start in range(0, num_heads, BLOCK_HEADS):
        heads = start + tl.arange(0, BLOCK_HEADS)
        inside = (heads < num_heads)[:, None]
        is_own, is_value = inside & (own < OWN)[None, :], inside & (values < VALUES)[None, :]
        dk = tl.zeros((BLOCK_HEADS, BLOCK_OWN), dkv_ptr.dtype.element_ty)
        dv = tl.zeros((BLOCK_HEADS, BLOCK_VALUES), dkv_ptr.dtype.element_ty)
        if dk_ptr is not None and KV:
            dk = tl.load(_tile(dk_ptr, dk_strides, row, token, heads, own), mask=is_own)
        if dv_ptr is not None and KV:
            dv = tl.load(_tile(dv_ptr, dv_strides, row, token, heads, values), mask=is_value)
        if dk_ptr is not None and SUM:
            is_shared = inside & (shared < SHARED)[None, :]
            part = tl.load(_tile(dk_ptr, dk_strides, row, token, heads, OWN + shared), mask=is_shared, other=0.0)
            total += part.to(wide)
        if KV:
            tl.store(_tile(dkv_ptr, dkv_strides, row, token, heads, own), dk, mask=is_own)
            tl.store(_tile(dkv_ptr, dkv_strides, row, token, heads, OWN + values), dv, mask=is_value)
    if SUM:
        line = dshared_ptr + row * dshared_strides[0] + token * dshared_strides[2]
        found = tl.sum(total, 0).to(dshared_ptr.dtype.element_ty)
        tl.store(line + shared * dshared_strides[3], found, mask=shared < SHARED)


def _blocks(heads: int, own: int, shared: int, values: int) -> dict[str, int]:
    sizes = [next_power_of_2(max(1, n)) for n in (own, shared, values)]
    names = ("BLOCK_OWN", "BLOCK_SHARED", "BLOCK_VALUES")
    return {**dict(zip(names, sizes)), "BLOCK_HEADS": max(1, min(next_power_of_2(heads), TILE // max(sizes)))}


@register_kernel("expand_kv", backend="triton", rank=20, plans=rehearsed)
def expand_kv(kv: Tensor, shared: Tensor, own: int) -> tuple[Tensor, Tensor]:
    """Launch over (token, block of heads)."""
    batch, heads, tokens, width = kv.shape
    sizes = own, shared.shape[3], width - own
    k, v = (empty_tokens_first(kv, heads, dim) for dim in (own + sizes[1], sizes[2]))
    if k.numel() + v.numel() == 0:
        return k, v
    blocks = _blocks(heads, *sizes)
    head_blocks = cdiv(heads, blocks["BLOCK_HEADS"])
    launch(
        _expand_kv_kernel, (batch * tokens * head_blocks,),
        kv, kv.stride(), shared, shared.stride(), k, k.stride(), v, v.stride(), tokens, heads,
        OWN=own, SHARED=sizes[1], VALUES=sizes[2], HEAD_BLOCKS=head_blocks, num_warps=4, **blocks,
    )  # fmt: skip
    return k, v


@register_kernel("expand_kv_vjp", backend="triton", rank=20, plans=rehearsed)
def expand_kv_vjp(
    dk: Tensor | None, dv: Tensor | None, k: Tensor, v: Tensor, own: int, output_mask: Sequence[bool]
) -> tuple[Tensor, Tensor]:
    """Launch over tokens; the sum over heads is that of one program, so always the same."""
    batch, heads, tokens, width = k.shape
    sizes = own, width - own, v.shape[3]
    dkv, dshared = gradients(k, v, own, output_mask)
    if dkv.numel() + dshared.numel() == 0:
        return dkv, dshared
    strides = [(0, 0, 0, 0) if x is None or x.ndim < 4 else x.stride() for x in (dk, dv, dkv, dshared)]
    launch(
        _expand_kv_gradient_kernel, (batch * tokens,),
        dk, strides[0], dv, strides[1], dkv, strides[2], dshared, strides[3], tokens, heads,
        OWN=own, SHARED=sizes[1], VALUES=sizes[2], KV=output_mask[0], SUM=output_mask[1], num_warps=4,
        **_blocks(heads, *sizes),
    )  # fmt: skip
    return dkv, dshared
