"""Launchers of attention's Hopper kernels, what they refuse, and their configurations."""

import inspect
import itertools
from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from tilesmith.engine import Space, launch, optimize_kernel, register_kernel
from tilesmith.engine.launch import cdiv, next_power_of_2
from tilesmith.engine.replay import each_time
from tilesmith.hardware.detect import arch_of
from tilesmith.ops.attn import reference
from tilesmith.ops.attn.hopper_backward import (
    attention_dkv_kernel,
    attention_dq_kernel,
    attention_dsinks_kernel,
    attention_rows_kernel,
)
from tilesmith.ops.attn.hopper_backward_dq import attention_dq_wide_kernel
from tilesmith.ops.attn.hopper_backward_wide import attention_dkv_wide_kernel
from tilesmith.ops.attn.hopper_forward import attention_fwd_kernel
from tilesmith.ops.attn.hopper_packed import key_tiles, query_tiles
from tilesmith.ops.gluon_shim import (
    TensorDescriptor,
    gl,
)

LOG2E = 1.4426950408889634
_CAUSAL = list(inspect.signature(reference.attention).parameters).index("causal")
_VJP = list(inspect.signature(reference.attention_vjp).parameters)
_TILES = {rank: gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=rank) for rank in (4, 5)}
_PARTS = gl.NVMMASharedLayout(swizzle_byte_width=0, element_bitwidth=32, rank=2)


def rejects(call) -> list[str]:
    """Why the Hopper kernels cannot serve a call of attention."""
    reasons = reasons_for_all(call) + _all_keys(call)
    return reasons + wrong_dims(call)


def wrong_dims(call) -> list[str]:
    """What is wrong with the head dims for a forward kernel."""
    reasons = []
    if any(cols % 8 or not 64 <= cols <= 256 for cols in (call.q.cols, call.v.cols)):
        reasons.append(f"the head dims are {call.q.cols} and {call.v.cols}; multiples of 8 from 64 to 256 are served")
    return reasons


def reasons_for_all(call) -> list[str]:
    """Why no Hopper kernel can serve a call."""
    reasons = []
    if call.arch.capability != (9, 0):
        reasons.append(f"{call.arch.name} has no warpgroup products; compute capability 9.0 is served")
    if call.q.dtype not in (torch.float16, torch.bfloat16):
        reasons.append(f"q is {call.q.dtype}; float16 and bfloat16 are served")
    for name in ("q", "k", "v"):
        if not getattr(call, name).unit:
            reasons.append(f"{name} has a last stride other than 1")
    for name, what in _UNSERVED.items():
        if getattr(call, name) is not None:
            reasons.append(f"{name}: {what}")
    return reasons


def _all_keys(call) -> list[str]:
    if call.kv_lengths is not None and call.cu_seqlens_q is None:
        return ["kv_lengths: without cu_seqlens_q all keys count"]
    return []


_UNSERVED = {
    "bias": "scores get nothing added",
    "mask": "only causal and window masks are known",
    "alibi": "scores know no distance",
    "seed": "nothing is dropped",
    "prefix_lengths": "only causal and window masks are known",
    "q_documents": "only causal and window masks are known",
    "block_offsets": "block lists are not walked",
    "page_table": "paged keys and values are not read",
    "q_scale": "quantised values are not read",
    "k_scale": "quantised values are not read",
    "v_scale": "quantised values are not read",
}


def rejects_vjp(call) -> list[str]:
    """Why the Hopper kernels cannot serve a call of attention_vjp."""
    reasons = reasons_for_all(call) + _all_keys(call)
    if call.q.cols % 8 or not 64 <= call.q.cols <= 256 or call.v.cols != call.q.cols:
        reasons.append(
            f"the head dims are {call.q.cols} and {call.v.cols}; multiples of 8 from 64 to 256, one for all, are served"
        )
    return reasons


class HopperConfig(NamedTuple):
    """consumers: warpgroups with 64 queries each. block_n: keys of a tile. stages: key and value tiles in flight.
    q_stages: query tiles in flight."""

    consumers: int
    block_n: int
    stages: int
    q_stages: int = 1


def _dims(*args) -> dict[str, int]:
    q, k, v = args[:3]
    return {
        "rows": q.shape[0] * q.shape[1], "tokens": q.shape[2], "keys": k.shape[2], "dim": q.shape[3],
        "value_dim": v.shape[3], "causal": 8 if args[_CAUSAL] else 1,
    }  # fmt: skip


def _default(dims, arch, dtype) -> HopperConfig:
    # H200, bf16, hidden 2048, TFLOP/s at head dim 64. Causal, 512 / 1k / 4k keys: four consumers 250 / 341 / 455, two
    # 239 / 326 / 437, three 198 / 271 / 428; 8k / 16k: four 479 / 528, three 502 / 549. Without a mask, 512 / 1k keys:
    # four 407 / 466, three 360 / 443; 2k / 4k / 16k: four 502 / 520 / 510, three 526 / 552 / 574. Head dim 128, 512
    # keys, causal: blocks of 64 keys 333, of 128 keys 309.
    causal = dims["causal"] > 1
    wide = max(dims["dim"], dims["value_dim"])
    if wide > 128:
        return HopperConfig(2, 64, 2)
    if wide > 64:
        return HopperConfig(2, 64, 4, 2) if causal and dims["keys"] <= 512 and wide == 128 else HopperConfig(2, 128, 2)
    return HopperConfig(4, 64, 6) if dims["keys"] < (8192 if causal else 2048) else HopperConfig(3, 128, 3)


SPACE = Space(default=_default, dims=_dims, choices={"consumers": (2, 3, 4), "stages": (2, 3)})


@register_kernel("attention", backend="hopper", rank=25, rejects=rejects)
@optimize_kernel(space=SPACE)
def attention(
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
    *,
    config: HopperConfig,
) -> tuple[Tensor, Tensor]:
    """One program a multiprocessor, each with many tiles of queries."""
    batch, heads, tokens, dim = q.shape
    keys = k.shape[2]
    out = reference.out_like(q, v.shape[3])
    lse = torch.empty((batch, heads, tokens), dtype=torch.float32, device=q.device)
    if lse.numel() == 0:
        return out, lse
    if keys == 0:
        lse.copy_(lse.new_full((), float("-inf")) if sinks is None else sinks.to(lse.dtype)[:, None])
        return out.zero_(), lse
    arch = arch_of(q.device)
    window = left, right, has_left, has_right = window_of(tokens, keys, causal, window_left, window_right)
    block_m = 64 * config.consumers
    blocks, table, packed = cdiv(tokens, block_m), None, cu_seqlens_q is not None
    if packed:
        vectors = (reference.dense(x) for x in (cu_seqlens_q, cu_seqlens_k, kv_lengths))
        table, blocks = query_tiles(*vectors, tokens, keys, window, block_m)
    tiles = blocks * batch * heads
    programs = min(arch.sms, tiles)
    dynamic = programs < tiles
    alike = not (has_left or has_right or packed)
    scale = dim**-0.5 if scale is None else scale
    wide, value_wide = _columns(q), _columns(v)
    launch(
        attention_fwd_kernel,
        (programs,),
        descriptor(q, 64, packed), descriptor(k, config.block_n, packed), descriptor(v, config.block_n, packed),
        descriptor(out, 64, packed), lse, reference.dense(sinks), counter(q.device) if dynamic else None, table,
        tokens, keys, heads, blocks, batch * heads, section(k, heads, arch, alike), left, right, heads // k.shape[1],
        scale / softcap if softcap > 0.0 else 0.0, (softcap if softcap > 0.0 else scale) * LOG2E,
        LEFT=has_left, RIGHT=has_right,
        WHOLE=alike and keys % config.block_n == 0, DYNAMIC=dynamic,
        BN=config.block_n, D=wide, DV=value_wide, CONSUMERS=config.consumers, STAGES=config.stages,
        Q_STAGES=config.q_stages, SOFTCAP=softcap > 0.0, num_warps=4,
    )  # fmt: skip
    return out, lse


class HopperVjpConfig(NamedTuple):
    """stages: tiles of queries in flight. split: consumers tell each other that ds is there before they wait for it.
    lag: how many blocks of queries after its own a block's dq is awaited."""

    stages: int
    split: bool
    lag: int


def _dims_vjp(*args) -> dict[str, int]:
    q, k, v = (args[_VJP.index(name)] for name in ("q", "k", "v"))
    return {
        "rows": q.shape[0] * q.shape[1], "tokens": q.shape[2], "keys": k.shape[2], "dim": q.shape[3],
        "value_dim": v.shape[3], "causal": 8 if args[_VJP.index("causal")] else 1,
    }  # fmt: skip


def _default_vjp(dims, arch, dtype) -> HopperVjpConfig:
    # H200, 16k keys, TFLOP/s: D 128 causal 597 split, 547 not, full 572 and 582; D 64 is never faster split, its lag of
    # 2 gives 472 for 457 causal, 472 for 487 full
    wide, causal = dims["dim"] > 64, dims["causal"] > 1
    return HopperVjpConfig(2 if wide else 3, wide and causal, 2 if causal and not wide else 1)


SPACE_VJP = Space(
    default=_default_vjp, dims=_dims_vjp, choices={"stages": (2, 3), "split": (False, True), "lag": (1, 2)}
)


@register_kernel("attention_vjp", backend="hopper", rank=25, rejects=rejects_vjp)
@optimize_kernel(space=SPACE_VJP)
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
    *,
    config: HopperVjpConfig,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Statistics of the rows; up to head dim 128 a kernel for dk, dv and what dq is the sum of, and one that puts dq in
    order; above, one for dk and dv and one for dq."""
    batch, heads, tokens, dim = q.shape
    kv_heads, keys = k.shape[1], k.shape[2]
    wants_sinks = output_mask[4] and sinks is not None
    dq, dk, dv = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
    dsinks = torch.empty_like(sinks, memory_format=torch.contiguous_format) if wants_sinks else q.new_empty(0)
    found = [x if wanted else q.new_empty(0) for x, wanted in zip((dq, dk, dv), output_mask)]
    found += [q.new_empty(0), dsinks]
    if q.numel() == 0 or k.numel() == 0:
        found = [x.zero_() for x in found]
        if wants_sinks and dlse is not None:
            dsinks += dlse.sum((0, 2))
        return tuple(found)
    if dout is None:
        dout = torch.zeros_like(out)
    elif dout.stride(3) != 1:
        dout = dout.contiguous()
    arch = arch_of(q.device)
    window = left, right, has_left, has_right = window_of(tokens, keys, causal, window_left, window_right)
    packed, blocks, table = cu_seqlens_q is not None, None, None
    # queries that see nothing and keys that nobody sees may hold NaN: no tile touches them
    q_begin = max(0, tokens - keys - right) if has_right and not packed else 0
    k_begin = max(0, keys - tokens - left) if has_left and not packed else 0
    if q_begin:
        dq[:, :, :q_begin].zero_()
    if k_begin:
        dk[:, :, :k_begin].zero_()
        dv[:, :, :k_begin].zero_()
    wide = _columns(q)
    block_n = 128 if wide <= 128 else 64
    q_blocks, k_blocks = cdiv(tokens - q_begin, 64), cdiv(keys - k_begin, block_n)
    if packed:
        documents = [reference.dense(x) for x in (cu_seqlens_q, cu_seqlens_k, kv_lengths)]
        blocks, table, q_blocks, k_blocks = key_tiles(*documents, tokens, keys, window, block_n)
    rows = lse.new_empty(2, batch * heads, q_blocks * 64)
    parts = turns = token_delta = None
    if wide > 128:
        token_delta = torch.empty_like(lse)
    else:
        parts = lse.new_empty(batch * heads * q_blocks * wide // 4, 256)
        if deterministic:
            turns = torch.empty(batch * heads * q_blocks, dtype=torch.int32, device=q.device)
    launch(
        attention_rows_kernel, (batch * heads * q_blocks,),
        out, dout, lse, dlse, rows[0], rows[1], token_delta, parts, turns, blocks, out.stride(), dout.stride(),
        None if dlse is None else dlse.stride(), heads, tokens, q_begin, q_blocks, DIM=dim, D=wide,
        num_warps=4 if wide <= 128 else 8,
    )  # fmt: skip
    scale = dim**-0.5 if scale is None else scale
    factors = scale / softcap if softcap > 0.0 else 0.0, (softcap if softcap > 0.0 else scale) * LOG2E, scale
    tiles = k_blocks * batch * kv_heads
    programs = min(arch.sms, tiles)
    dynamic = programs < tiles
    inputs = (
        descriptor(q, 64, packed), descriptor(k, block_n, packed), descriptor(v, block_n, packed),
        descriptor(dout, 64, packed),
    )  # fmt: skip
    sizes = (
        counter(q.device) if dynamic else None, table, tokens, keys, kv_heads, q_begin, k_begin, q_blocks, k_blocks,
        batch * kv_heads, section_vjp(q, kv_heads, arch, turns is not None and has_right), left, right, *factors,
    )  # fmt: skip
    kinds = {
        "GROUP": heads // kv_heads, "LEFT": has_left, "RIGHT": has_right,
        "TAIL": packed or (keys - k_begin) % block_n != 0, "DYNAMIC": dynamic, "D": wide, "SOFTCAP": softcap > 0.0,
        "num_warps": 4,
    }  # fmt: skip
    if wide > 128:
        launch(
            attention_dkv_wide_kernel, (programs,), *inputs, descriptor(dk, 64, packed), descriptor(dv, 64, packed),
            rows[0], rows[1], *sizes, STAGES=2, **kinds,
        )  # fmt: skip
    else:
        launch(
            attention_dkv_kernel, (programs,), *inputs,
            TensorDescriptor(parts, list(parts.shape), [256, 1], [wide // 8, 256], _PARTS),
            descriptor(dk, 64, packed), descriptor(dv, 64, packed), rows[0], rows[1], turns, *sizes,
            SPLIT=config.split, LAG=config.lag, STAGES=config.stages, **kinds,
        )  # fmt: skip
    if output_mask[0] and wide > 128:
        blocks = cdiv(tokens, 128)
        if packed:
            table, blocks = query_tiles(*documents, tokens, keys, window, 128)
        tiles = blocks * batch * heads
        programs = min(arch.sms, tiles)
        dynamic = programs < tiles
        launch(
            attention_dq_wide_kernel, (programs,), *inputs, descriptor(dq, 64, packed), lse, token_delta,
            counter(q.device) if dynamic else None, table, tokens, keys, heads, blocks, batch * heads,
            section(k, heads, arch, alike=False), left, right, heads // kv_heads, *factors,
            LEFT=has_left, RIGHT=has_right, DYNAMIC=dynamic, D=wide, SOFTCAP=softcap > 0.0, num_warps=4,
        )  # fmt: skip
    elif output_mask[0]:
        launch(
            attention_dq_kernel, (batch * heads * q_blocks,),
            parts, dq, blocks, dq.stride(), heads, tokens, q_begin, q_blocks, scale, DIM=dim, D=wide, num_warps=4,
        )  # fmt: skip
    if wants_sinks:
        launch(
            attention_dsinks_kernel,
            (heads,),
            rows[0],
            rows[1],
            reference.dense(sinks),
            dsinks,
            batch,
            heads,
            q_blocks * 64,
            BLOCK=1024,
        )
        if q_begin and dlse is not None:  # of queries that see no key, lse is the sink
            dsinks += dlse[:, :, :q_begin].sum((0, 2))
    return tuple(found)


def window_of(tokens: int, keys: int, causal: bool, left: int, right: int) -> tuple[int, int, bool, bool]:
    """The window with causal in it, and which of its edges hide anything."""
    right = 0 if causal else right
    return left, right, 0 <= left < keys - 1, 0 <= right < max(tokens - 1, 1)


def _columns(x: Tensor) -> int:
    """The columns of a tile of x: its head dim up to 64, 128 or 256; the accelerator fills in zeros."""
    return max(64, next_power_of_2(x.shape[3]))


def descriptor(x: Tensor, rows: int, packed: bool = False, heads: int = 1, columns: int = 0) -> TensorDescriptor:
    """x [B, H, T, D] for the tensor memory accelerator, in tiles of `rows` rows of `heads` heads, and of all columns or
    so many; of a copy, where its strides do not suit it. packed: coordinates are those of `hopper_corner.corner`."""
    if x.data_ptr() % 16 or any(n > 1 and (s <= 0 or s % 8) for n, s in zip(x.shape[:3], x.stride()[:3])):
        x = x.clone(memory_format=torch.contiguous_format)
    # the stride of a dim of size 1 is never used, but must be legal
    strides = [s if n > 1 else 8 for n, s in zip(x.shape[:3], x.stride()[:3])]
    shape, block = list(x.shape), [1, heads, rows, columns or _columns(x)]
    if packed:
        _, head, token = strides
        strides = [2**34 - token, token, head, token]
        shape, block = [2**31 - 2**16, 2**31 - 2**16, shape[1], 2**30, shape[3]], [1, *block]
    return TensorDescriptor(x, shape, [*strides, 1], block, _TILES[len(shape)])


def section(k: Tensor, heads: int, arch, alike: bool) -> int:
    """How many heads of q to work on together. alike: all tiles have the same work.

    Then it is those that share keys, which so come when they are needed (H200, head dim 128, 1k / 4k / 16k keys: 616 /
    717 / 738 TFLOP/s; by half of the L2 cache 575 / 695 / 703). Else so many that their keys and values stay in about
    half of the L2 cache, and in sections of one size, since the short tiles of the last one fill the end (16k causal,
    16 heads: by 4 726, by 3 698).
    """
    batch, kv_heads, keys, dim = k.shape
    group, rows = heads // kv_heads, batch * kv_heads
    if alike:
        return group
    fitting = max(1, arch.l2 // 2 // (keys * dim * 2 * k.element_size()))
    return cdiv(rows, max(1, rows // fitting)) * group


def section_vjp(q: Tensor, kv_heads: int, arch, in_turn: bool = False) -> int:
    """How many kv heads to work on together, so that their queries, dout and parts of dq fill 2/5 of the L2 cache.
    in_turn: shorter and shorter tiles of a head add their dq one after another; with more heads fewer of them wait."""
    batch, heads, tokens, dim = q.shape
    fitting = max(1, 2 * arch.l2 // 5 // (tokens * dim * 8 * (heads // kv_heads)))
    # H200, head dim 128, causal, TFLOP/s: 391 with the 6 heads that fit, 441 with 17 (4k); 404 and 461 with 1 and 16
    # (16k)
    return min(max(fitting, 16) if in_turn else fitting, batch * kv_heads)


_COUNTERS = 1024  # launches of one device that may be in flight at once
_rings: dict[int, tuple[Tensor, ...]] = {}
_turn = itertools.count()


def counter(device: torch.device) -> Tensor:
    """A zero that a launch counts up and sets back, another at each launch."""
    return each_time(partial(_counter, device))


def _counter(device: torch.device) -> Tensor:
    """Launches on several streams have each their own; so has one in a CUDA graph, which may run at any time."""
    if device.type == "cpu" or torch.cuda.is_current_stream_capturing():  # on a CPU kernels are only compiled
        return torch.zeros(4, dtype=torch.int32, device=device)
    index = torch.cuda.current_device() if device.index is None else device.index
    ring = _rings.get(index)
    if ring is None:
        ring = _rings[index] = torch.zeros(_COUNTERS, 4, dtype=torch.int32, device=device).unbind()
        torch.cuda.synchronize(device)  # once in a process: other streams may be the first to use their zeros
    return ring[next(_turn) % _COUNTERS]
