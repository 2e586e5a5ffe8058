"""attention for few tiles of queries on Hopper: the launcher that splits their keys over programs."""

from typing import NamedTuple

import torch
from torch import Tensor

from tilesmith.device.gluon.shim import TensorDescriptor
from tilesmith.device.rows import dense
from tilesmith.engine import Space, launch, optimize_kernel, register_kernel
from tilesmith.engine.launch import cdiv, next_power_of_2
from tilesmith.hardware.detect import arch_of
from tilesmith.ops.attn import reference
from tilesmith.ops.attn.arguments import attention_arguments
from tilesmith.ops.attn.hopper.combine import combine
from tilesmith.ops.attn.hopper.launch import (
    descriptor,
    no_dropout,
    no_lists,
    reasons_for_all,
    score_factors,
    window_of,
    wrong_dims,
)
from tilesmith.ops.attn.hopper.split_kv import attention_shares_kernel
from tilesmith.ops.attn.schedule import splits_of

SMALL = (torch.float8_e4m3fn, torch.float8_e5m2)


class SharesConfig(NamedTuple):
    """consumers: warpgroups with 64 rows each, pairs of token and head. block_n: keys of a tile. stages: key and value
    tiles in flight. splits: of the keys; 0 for as many as the device wants. apart: results do not take the place of the
    queries, so that the next tile's are loaded while this one's leave."""

    consumers: int
    block_n: int
    stages: int
    splits: int = 0
    apart: bool = False


@attention_arguments
def _dims(call) -> dict[str, int]:
    q, k = call.q, call.k
    return {
        "heads": q.shape[0] * k.shape[1], "rows": q.shape[2] * (q.shape[1] // k.shape[1]), "keys": k.shape[2],
        "dim": q.shape[3], "value_dim": call.v.shape[3], "paged": 1 if call.page_table is None else 8,
        "bytes": k.element_size(),
    }  # fmt: skip


def _default(dims, arch, dtype) -> SharesConfig:
    wide = max(64, next_power_of_2(max(dims["dim"], dims["value_dim"])))
    consumers = 1 if dims["rows"] <= 64 else 2
    # H200, e4m3, 32 x 8k keys of 64/8 heads, 8 tokens: in tiles of 128 keys 198 us, of 64 215
    if dims["bytes"] == 1:
        return SharesConfig(consumers, 128, 2) if consumers == 1 else SharesConfig(consumers, 64, 3)
    # H200, 64/8 heads of 128: 16 tokens on 8k keys take 21.0 us in tiles of 64 keys, 26.0 in tiles of 128; 256 tokens
    # of 8 heads on 128k keys 228 and 203. 16 tokens on 8k / 128k / 32 x 8k with 3 stages: 20.3 / 135.9 / 255.5, with 4:
    # 20.7 / 135.2 / 256.7, with 5: 21.1 / 137.3 / 260.4; in pages not measured so
    if wide == 128 and dims["rows"] <= 128:
        # where programs have several tiles, of all keys: 16 tokens on 32 x 8k in tiles of 128 keys 257 us, with results
        # apart 255, of 64 263 and 263
        if dims["heads"] >= arch.sms > 0 and dims["paged"] == 1:
            return SharesConfig(consumers, 128, 2, apart=True)
        return SharesConfig(consumers, 64, 3 if dims["paged"] == 1 else 5)
    return SharesConfig(consumers, 64 if wide > 128 else 128, {64: 6, 128: 3, 256: 2}[wide])


SPACE = Space(default=_default, dims=_dims, choices={"consumers": (1, 2)})


def rejects(call) -> list[str]:
    """Why the splitting Hopper kernel cannot serve a call of attention."""
    small = call.k.dtype in SMALL and call.v.dtype == call.k.dtype
    served = {"page_table": None, **({"k_scale": None, "v_scale": None} if small else {})}
    reasons = reasons_for_all(call._replace(**served)) + no_dropout(call) + no_lists(call) + wrong_dims(call)
    if call.cu_seqlens_q is not None:
        reasons.append("cu_seqlens_q: tiles of packed documents are not split")
    if call.page_table is not None:
        if call.page_size % 16:
            reasons.append(f"pages have {call.page_size} slots; multiples of 16 are served")
        if call.window_left >= 0:
            reasons.append("page_table with window_left: pages before the window may be gone")
    if small:
        reasons += _small_reasons(call)
    elif call.rows <= _few(call):
        reasons.append(f"T * H / G is at most {_few(call)}: with so few rows this kernel gains nothing")
    if not call.cached and (call.kv_lengths is None or call.filled < 5):
        reasons.append("S is less than 4 T: this kernel is for a cache, or for kv_lengths of many tiles")
    if call.filled >= 8 and call.kv_lengths is None and call.page_table is None:
        reasons.append("tiles of 128 queries fill the device without splits")
    return reasons


def _few(call) -> int:
    """Up to how many rows other kernels are as fast. H200, 8 tokens of 32/4 heads on 8 x 8k keys, beside triton_split:
    head dim 64 27.0 and 28.8 us, 256 71.3 and 75.9; of 64/8 heads of 128 on 8k 17.6 and 19.2, on 2 x 8k 25.4 and 27.2,
    on 32 x 8k 252 and 243."""
    if 64 < max(call.q.cols, call.v.cols) <= 128 and call.pairs > 64:
        return 64
    return 32


def _small_reasons(call) -> list[str]:
    """Why a cache of 8 bits cannot be served."""
    reasons = []
    if call.page_table is not None:
        reasons.append("page_table: pages of 8-bit keys and values are not read")
    if (call.q.cols, call.v.cols) != (128, 128):
        reasons.append(f"the head dims are {call.q.cols} and {call.v.cols}; on a cache of 8 bits 128 is served")
    if any(n not in (0, -1) for n in call.factors):
        reasons.append("k_scale, v_scale: of 8-bit keys and values, a factor for each head is read")
    # H200, e4m3, 64/8 heads: 4 tokens on 8 x 8k keys take 59 us, with triton_split 86; 1 token on 32 x 8k 184 and 156
    if call.rows <= 16:
        reasons.append("T * H / G is at most 16: with so few rows this kernel gains nothing on a cache of 8 bits")
    return reasons


@register_kernel("attention", backend="hopper_split", rank=35, rejects=rejects)
@optimize_kernel(space=SPACE)
@attention_arguments
def attention(call, *, config: SharesConfig) -> tuple[Tensor, Tensor]:
    """One pass over the keys in as many splits as fill the device, and a second one that combines them."""
    q, k, v = call.q, call.k, call.v
    batch, heads, tokens, dim = q.shape
    kv_heads, keys, dim_v = k.shape[1], reference.slots(k, call.page_table), v.shape[3]
    out = reference.out_like(q, dim_v)
    lse = torch.empty((batch, heads, tokens), dtype=torch.float32, device=q.device)
    if lse.numel() == 0:
        return out, lse
    if keys == 0:
        lse.copy_(lse.new_full((), float("-inf")) if call.sinks is None else call.sinks.to(lse.dtype)[:, None])
        return out.zero_(), lse
    sinks, kv_lengths, page_table = (dense(x) for x in (call.sinks, call.kv_lengths, call.page_table))
    group = heads // kv_heads
    unit_heads = _unit_heads(group, tokens)
    unit_tokens = 64 // unit_heads
    tiles = cdiv(cdiv(tokens, unit_tokens) * (group // unit_heads), config.consumers)
    left, right, has_left, has_right = window_of(call, keys)
    has_right = has_right and right < tokens - 1  # one token sees the last key
    programs = max(1, arch_of(q.device).sms)
    tile_tokens = unit_tokens * cdiv(config.consumers, group // unit_heads)
    seen = min(keys, left + tile_tokens + (right if has_right else keys)) if has_left else keys
    splits = config.splits or splits_of(
        batch * kv_heads * tiles, cdiv(seen, config.block_n), programs,
        8 * 64 * config.consumers * dim_v / (config.block_n * (dim + dim_v) * k.element_size()),
    )  # fmt: skip
    part_out, part_lse = out, lse
    if splits > 1:
        # H200, 16 tokens on 8k keys: 21.0 us; with parts in fp32, which threads stored from their registers, 22.8
        part_out = torch.empty((splits, batch, heads, tokens, dim_v), dtype=q.dtype, device=q.device)
        part_lse = torch.empty((splits, batch, heads, tokens), dtype=torch.float32, device=q.device)
    alone = page_table is None and not has_left and k.dtype == q.dtype and batch * kv_heads * tiles * splits <= programs
    page, piece, bounded = 0, config.block_n, kv_lengths is not None
    if page_table is not None:
        page, bounded = k.shape[2], True
        piece = min(piece, page & -page)
    k_desc, k_between = keys_of(k, piece, bounded, piece < config.block_n)
    v_desc, v_between = keys_of(v, piece, bounded, piece < config.block_n)
    launch(
        attention_shares_kernel,
        (tiles * splits, kv_heads, batch) if alone else (min(programs, batch * kv_heads * tiles * splits),),
        descriptor(q, unit_tokens, heads=unit_heads), k_desc, v_desc,
        descriptor(part_out.flatten(0, -4), unit_tokens, heads=unit_heads), part_lse, lse.numel(),
        sinks if splits == 1 else None, kv_lengths, _factors(call.k_scale), _factors(call.v_scale),
        page_table, 0 if page_table is None else page_table.shape[1],
        tokens, keys, batch * kv_heads, kv_heads, tiles, splits, 1 / splits, k_between, v_between, left, right,
        *score_factors(call),
        GROUP=group, HEADS=unit_heads, LEFT=has_left, RIGHT=has_right, BN=config.block_n, PAGE=page, PIECE=piece,
        D=max(64, next_power_of_2(dim)), DV=max(64, next_power_of_2(dim_v)),
        CONSUMERS=config.consumers, STAGES=config.stages, SOFTCAP=call.softcap > 0.0, CHAINED=splits > 1,
        APART=config.apart, ALONE=alone, num_warps=4,
    )  # fmt: skip
    if splits > 1:
        combine(part_out, part_lse, sinks, out, lse)
    return out, lse


def _factors(scale: Tensor | None) -> tuple[Tensor | None, int, int]:
    """Factors of heads and, of batch rows and heads, their strides."""
    if scale is None:
        return None, 0, 0
    return scale, *(0 if n == 1 else stride for n, stride in zip(scale.shape[:2], scale.stride()[:2]))


def _unit_heads(group: int, tokens: int) -> int:
    """How many heads of a group make a square of 64 rows with 64 over as many tokens: no more than fill it."""
    heads = group & -group
    return max(1, min(heads, 64 // min(64, next_power_of_2(tokens))))


def keys_of(x: Tensor, rows: int, bounded: bool, narrow: bool) -> tuple[TensorDescriptor, int]:
    """The descriptor of keys or values in tiles of `rows` tokens; bounded: where a batch row or page of x ends by
    itself (`hopper_corner.corner`), and how many tokens lie between two of them. narrow: in tiles of 64 columns."""
    batch, token = x.stride(0), x.stride(2) if x.shape[2] > 1 else 8
    if bounded and (token == 0 or (x.shape[0] > 1 and batch % token) or x.shape[0] * batch >= token * 2**30):
        x = x.clone(memory_format=torch.contiguous_format)
    found = descriptor(x, rows, bounded, columns=64 if narrow else 0)
    batch, _, token, _ = found.base.stride()
    return found, batch // (token if x.shape[2] > 1 else 8) if bounded else 0
