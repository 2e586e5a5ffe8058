"""Attention of several ranks as others compute it: torch's context_parallel, and ring-flash-attn."""

from __future__ import annotations

import contextlib
import importlib
import sys
import types
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from tilesmith.bench.ranks import current_device
from tilesmith.distributed import Layout

KERNELS = {"cudnn": SDPBackend.CUDNN_ATTENTION, "flash": SDPBackend.FLASH_ATTENTION}


@dataclass(frozen=True)
class Provider:
    """call(q, k, v, sinks): out, of shards [1, H, T, D] that lie as `layout` says. within: what all calls run in."""

    call: Callable[..., Tensor]
    layout: Layout
    within: Callable[[], contextlib.AbstractContextManager[Any]] = contextlib.nullcontext


def torchs(layout: Layout, method: str, kernel: str, expand: bool) -> Provider:
    """torch.distributed's context_parallel around scaled_dot_product_attention, causal. expand: repeat kv heads."""
    from torch.distributed.tensor.experimental import context_parallel
    from torch.distributed.tensor.experimental._attention import set_rotate_method

    device = current_device()
    mesh = dist.device_mesh.init_device_mesh(device.type, (dist.get_world_size(),))

    @contextlib.contextmanager
    def within() -> Iterator[None]:
        set_rotate_method(method)
        # torch 2.11 looks at the first buffer, so there must be one
        unused = torch.zeros(2 * dist.get_world_size(), device=device)
        with context_parallel(mesh, buffers=[unused], buffer_seq_dims=[0]), sdpa_kernel(KERNELS[kernel]):
            yield

    def call(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None = None) -> Tensor:
        grouped = k.shape[1] < q.shape[1]
        if grouped and expand:
            k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=grouped and not expand)

    return Provider(call, layout, within)


def ring_flash_zigzag(layout: Layout, kernel: str) -> Provider:
    """ring-flash-attn's ring over zigzag shards, causal, with one of FLASH_ATTN in place of flash-attn's functions."""
    module = _ring_flash_attn("zigzag_ring_flash_attn")

    def call(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None = None) -> Tensor:
        return module.zigzag_ring_flash_attn_func(*_transposed(q, k, v), causal=True).transpose(1, 2)

    @contextlib.contextmanager
    def within() -> Iterator[None]:
        kept = module._flash_attn_forward, module._flash_attn_backward
        module._flash_attn_forward, module._flash_attn_backward = FLASH_ATTN[kernel]
        try:
            yield
        finally:
            module._flash_attn_forward, module._flash_attn_backward = kept

    return Provider(call, layout, within)


def ring_flash_llama3(starts: Tensor, stride: int) -> Provider:
    """ring-flash-attn's all-gather of packed documents in one piece a rank, `stride` kv heads at a time."""
    module = _ring_flash_attn("llama3_flash_attn_varlen")
    size, rank = dist.get_world_size(), dist.get_rank()
    *cu, most_q, most_k, keys = module.llama3_flash_attn_prepare_cu_seqlens(starts.cpu(), True, rank, size)
    cu_q, cu_k = (x.to(starts.device) for x in cu)

    def call(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None = None) -> Tensor:
        packed = (x[0].transpose(0, 1) for x in (q, k, v))
        out = module.llama3_flash_attn_varlen_func(*packed, cu_q, cu_k, most_q, most_k, stride, keys, causal=True)
        return out.transpose(0, 1)[None]

    return Provider(call, Layout.contiguous(int(starts[-1]), size))


def _ring_flash_attn(name: str) -> types.ModuleType:
    """A module of ring-flash-attn. While it is imported PyTorch's kernels stand in for flash-attn, which has no wheels,
    and nothing for its adapters, which ask transformers for names that are gone."""
    interface, adapters = (types.ModuleType(n) for n in ("flash_attn.flash_attn_interface", "ring_flash_attn.adapters"))
    for kind in ("", "varlen_"):
        names = f"_flash_attn_{kind}forward", f"_flash_attn_{kind}backward"
        vars(interface).update(zip(names, FLASH_ATTN["flash"]))
    vars(adapters).update(dict.fromkeys(("substitute_hf_flash_attn", "update_ring_flash_attn_params")))
    stand_ins = {module.__name__: module for module in (types.ModuleType("flash_attn"), interface, adapters)}
    kept = {module: sys.modules[module] for module in stand_ins if module in sys.modules}
    sys.modules |= stand_ins
    try:
        return importlib.import_module(f"ring_flash_attn.{name}")
    finally:
        for stand_in in stand_ins:
            del sys.modules[stand_in]
        sys.modules |= kept


def _transposed(*tensors: Tensor) -> tuple[Tensor, ...]:
    """[B, H, T, D] as flash-attn takes them, [B, T, H, D], and back."""
    return tuple(x.transpose(1, 2) for x in tensors)


# As flash-attn's functions are called: by name, with the names of their parameters.
def _flash_forward(
    q, k, v, cu_seqlens_q=None, cu_seqlens_k=None, max_seqlen_q=None, max_seqlen_k=None, dropout_p=0.0,
    softmax_scale=None, causal=False, window_size=(-1, -1), alibi_slopes=None, return_softmax=False,
):  # fmt: skip
    most = (q.shape[1], k.shape[1]) if cu_seqlens_q is None else (max_seqlen_q, max_seqlen_k)
    out, lse, state, *_ = torch.ops.aten._flash_attention_forward(
        q, k, v, cu_seqlens_q, cu_seqlens_k, *most, dropout_p, causal, False, scale=softmax_scale
    )
    return out, lse, None, state


def _flash_backward(
    dout, q, k, v, out, softmax_lse, dq, dk, dv, cu_seqlens_q=None, cu_seqlens_k=None, max_seqlen_q=None,
    max_seqlen_k=None, dropout_p=0.0, softmax_scale=None, causal=False, window_size=(-1, -1), alibi_slopes=None,
    deterministic=False,
):  # fmt: skip
    most = (q.shape[1], k.shape[1]) if cu_seqlens_q is None else (max_seqlen_q, max_seqlen_k)
    state, unused = (q.new_zeros(2, dtype=dtype) for dtype in (torch.uint64, torch.int32))
    found = torch.ops.aten._flash_attention_backward(
        dout, q, k, v, out, softmax_lse, cu_seqlens_q, cu_seqlens_k, *most, dropout_p, causal, state, unused,
        scale=softmax_scale,
    )  # fmt: skip
    _write((dq, dk, dv), found)


def _cudnn_forward(
    q, k, v, dropout_p=0.0, softmax_scale=None, causal=False, window_size=(-1, -1), alibi_slopes=None,
    return_softmax=False,
):  # fmt: skip
    out, lse, *_ = torch.ops.aten._scaled_dot_product_cudnn_attention(
        *_transposed(q, k, v), None, True, dropout_p, causal, False, scale=softmax_scale
    )
    return out.transpose(1, 2), lse.reshape(lse.shape[:3]), None, None


def _cudnn_backward(
    dout, q, k, v, out, softmax_lse, dq, dk, dv, dropout_p=0.0, softmax_scale=None, causal=False,
    window_size=(-1, -1), alibi_slopes=None, deterministic=False,
):  # fmt: skip
    dout, q, k, v, out = _transposed(dout, q, k, v, out)
    unused = torch.empty((), dtype=torch.int64, device=q.device)
    found = torch.ops.aten._scaled_dot_product_cudnn_attention_backward(
        dout, q, k, v, out, softmax_lse[..., None], unused, unused, None, None, None, q.shape[2], k.shape[2], dropout_p,
        causal, scale=softmax_scale,
    )  # fmt: skip
    _write((dq, dk, dv), _transposed(*found))


def _write(places: tuple[Tensor, ...], found: tuple[Tensor, ...]) -> None:
    for place, x in zip(places, found, strict=True):
        place.copy_(x)


FLASH_ATTN = {"flash": (_flash_forward, _flash_backward), "cudnn": (_cudnn_forward, _cudnn_backward)}
