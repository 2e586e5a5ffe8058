"""Launcher of attention's forward on Hopper, what it refuses, and its configurations."""

from typing import NamedTuple

import torch
from torch import Tensor

from tilesmith.device.counters import work_counter
from tilesmith.device.rows import dense
from tilesmith.engine import Space, launch, optimize_kernel, register_kernel
from tilesmith.engine.launch import cdiv
from tilesmith.hardware.detect import arch_of
from tilesmith.ops.attn import reference
from tilesmith.ops.attn.arguments import attention_arguments
from tilesmith.ops.attn.hopper.block_tables import list_tiles
from tilesmith.ops.attn.hopper.forward import attention_fwd_kernel
from tilesmith.ops.attn.hopper.launch import (
    all_keys,
    columns_of,
    descriptor,
    dropout_arguments,
    dropout_reasons,
    is_narrow,
    list_reasons,
    reasons_for_all,
    run_of,
    score_factors,
    section,
    window_of,
    wrong_dims,
)
from tilesmith.ops.attn.hopper.packed import query_tiles
from tilesmith.ops.attn.hopper.stream_k import divided, launch_shares
from tilesmith.ops.attn.hopper.window import attention_window_kernel


def rejects(call) -> list[str]:
    """Why the Hopper kernels cannot serve a call of attention."""
    reasons = reasons_for_all(call) + all_keys(call) + wrong_dims(call) + dropout_reasons(call)
    return reasons + (list_reasons(call, 128, 64) if call.block_offsets is not None else [])


class HopperConfig(NamedTuple):
    """consumers: warpgroups with 64 queries each. block_n: keys of a tile. stages: key and value tiles in flight.
    q_stages: query tiles in flight. per_sm: programs of a multiprocessor, two of two consumers each at most. v_stages:
    value tiles in flight where they are not as many as key tiles. Windows of up to 129 keys have two consumers and
    tiles of 64 keys, at least four of them (`hopper_window`)."""

    consumers: int
    block_n: int
    stages: int
    q_stages: int = 1
    per_sm: int = 1
    v_stages: int = 0


@attention_arguments
def _dims(call) -> dict[str, int]:
    q, keys, left, right = call.q, call.k.shape[2], call.window_left, 0 if call.causal else call.window_right
    return {
        "rows": q.shape[0] * q.shape[1], "tokens": q.shape[2], "keys": keys, "dim": q.shape[3],
        "value_dim": call.v.shape[3], "causal": 8 if call.causal else 1,
        "seen": min(keys, left + right + 1) if left >= 0 and right >= 0 else keys,
        "packed": 1 if call.cu_seqlens_q is None else 8, "drawn": 8 if call.dropout_p > 0.0 else 1,
    }  # fmt: skip


def _default(dims, arch, dtype) -> HopperConfig:
    # H200, bf16, hidden 2048, TFLOP/s at head dim 64. Causal, 512 / 1k keys: four consumers 250 / 341, two 239 / 326;
    # 2k / 4k / 8k: four 414 / 468 / 502, three 428 / 489 / 534, and 495 / 539 for 492 / 535 with four tiles of values
    # at 4k / 8k; not so in documents and windows, where three take no turns. Without a mask, 512 / 1k keys: four 416 /
    # 471, with one tile of queries for two 409 / 466, three 360 / 443; 2k / 4k / 16k: four 502 / 520 / 510, three 526 /
    # 552 / 574. Head dim 128, 512 keys, causal: blocks of 64 keys 333, of 128 keys 309. Windows of 256 / 512 / 1024
    # keys at 32k, µs in blocks of 64 and 128 keys: head dim 64 312 / 468 / 789 and 373 / 488 / 776, 128 210 / 308 / 507
    # and 255 / 329 / 493.
    causal = dims["causal"] > 1
    wide = max(dims["dim"], dims["value_dim"])
    if wide > 128:
        return HopperConfig(2, 64, 2)
    if dims["drawn"] > 1:  # others leave draws too few registers; three and four consumers at head dim 64: 1,990, 1,614
        return HopperConfig(2, 128, 2, v_stages=3)
    if dims["seen"] <= 512 < dims["keys"]:
        return HopperConfig(2, 64, 4 if wide > 64 else 6, 2)
    if wide > 64:
        if causal and dims["keys"] <= 512 and wide == 128:
            return HopperConfig(2, 64, 4, 2)
        # Values are given back a round later than keys. A third tile of them, 512 / 1k / 4k keys: 532 / 635 / 718, with
        # two 511 / 615 / 711; causal, 1k / 4k / 16k: 475 / 675 / 732, with two 468 / 668 / 730.
        return HopperConfig(2, 128, 2, v_stages=3)
    turns = dims["packed"] == 1 and dims["seen"] == dims["keys"]
    if turns and causal and dims["keys"] <= 512:
        # Two programs that know nothing of each other fill each other's gaps, though their consumers have so few
        # registers that ptxas lets each product wait for the one before and spills 32 bytes. 256 / 512 keys: 178 / 262,
        # of four consumers 163 / 249; blocks of 32 keys, which spill nothing, 173 / 244; at 1k keys 331 and 349.
        return HopperConfig(2, 64, 4, 2, per_sm=2)
    if dims["keys"] < (2048 if turns or not causal else 8192):
        return HopperConfig(4, 64, 6, 2 if turns and not causal else 1)
    return HopperConfig(3, 128, 3, v_stages=4 if turns and causal else 0)


def _within(config: HopperConfig, block_k: int) -> HopperConfig:
    """Tiles that block lists are made of: two consumers, blocks that divide theirs."""
    if config.consumers > 2 or config.per_sm > 1:
        # with one tile of queries 1,190 µs for 1,152 (H200, head dim 64, 16k, a quarter of the blocks)
        config = HopperConfig(2, 128, 4, 2)
    if config.block_n > 64 and block_k % 128:
        config = config._replace(block_n=64, stages=2 * config.stages, v_stages=2 * config.v_stages)
    return config


def _division(call, config: HopperConfig, tiles: int, window: tuple, arch) -> tuple[int, int]:
    """How many tiles are made by one program each, and into how many shares the others are divided (`divided`)."""
    _, right, has_left, has_right = window
    kind = config.consumers, max(columns_of(call.q), columns_of(call.v))
    alike = call.cu_seqlens_q is None and call.block_offsets is None and not has_left and call.dropout_p == 0.0
    if alike and config.q_stages == 1 and (kind == (2, 128) or (kind == (3, 64) and not has_right)):
        sides = 64 * config.consumers, config.block_n
        return divided(call.q, call.k, call.v, tiles, *sides, right if has_right else None, arch)
    return tiles, 0


SPACE = Space(default=_default, dims=_dims, choices={"consumers": (2, 3, 4), "stages": (2, 3)})


@attention_arguments
def _tells(call, *, config: HopperConfig) -> list[str]:
    """What `explain` says of a call whose tiles are not all made by one program each."""
    arch = arch_of(call.q.device)
    tiles = cdiv(call.q.shape[2], 64 * config.consumers) * call.q.shape[0] * call.q.shape[1]
    undivided, shares = _division(call, config, tiles, window_of(call, call.k.shape[2]), arch)
    whole = f"{undivided} tiles by one program each, " if undivided else "tiles: "
    return [f"{whole}{tiles - undivided} in {shares} equal shares of keys"] if shares else []


@register_kernel("attention", backend="hopper", rank=25, rejects=rejects, tells=_tells)
@optimize_kernel(space=SPACE)
@attention_arguments
def attention(call, *, config: HopperConfig) -> tuple[Tensor, Tensor]:
    """One program a multiprocessor, each with many tiles of queries."""
    q, k, v = call.q, call.k, call.v
    batch, heads, tokens, dim = q.shape
    keys = k.shape[2]
    out = reference.out_like(q, v.shape[3])
    lse = torch.empty((batch, heads, tokens), dtype=torch.float32, device=q.device)
    if lse.numel() == 0:
        return out, lse
    if keys == 0:
        lse.copy_(lse.new_full((), float("-inf")) if call.sinks is None else call.sinks.to(lse.dtype)[:, None])
        return out.zero_(), lse
    arch = arch_of(q.device)
    window = left, right, has_left, has_right = window_of(call, keys)
    if call.block_offsets is not None:
        config = _within(config, call.block_k)
    block_m = 64 * config.consumers
    blocks, table, packed = cdiv(tokens, block_m), None, call.cu_seqlens_q is not None
    if packed:
        vectors = (dense(x) for x in (call.cu_seqlens_q, call.cu_seqlens_k, call.kv_lengths))
        table, blocks = query_tiles(*vectors, tokens, keys, window, block_m)
    has_lists, lists, indices, list_share, list_rows = call.block_offsets is not None, None, None, 1, 0
    if has_lists:
        indices, (batches, many, _) = call.block_indices.contiguous(), call.block_offsets.shape
        sides = call.block_q, call.block_k, block_m, config.block_n
        lists, table = list_tiles(call.block_offsets, indices, tokens, keys, has_right, *sides)
        list_share, list_rows = heads // many, blocks * many if batches > 1 else 0
    wide, value_wide = columns_of(q), columns_of(v)
    narrow = is_narrow(window, packed, max(wide, value_wide)) and call.dropout_p == 0.0
    if narrow:
        run = run_of((1, 2, 4, 8, 16, 32, 64), 1, cdiv(tokens, 128), batch * heads, arch)
        blocks = cdiv(tokens, 128 * run)
    tiles = blocks * batch * heads
    # more consumers or wider rows would wait for registers for ever
    per_sm = config.per_sm if config.consumers == 2 and max(wide, value_wide) == 64 and not narrow else 1
    alike = not (has_left or has_right or packed or has_lists)
    undivided, shares = _division(call, config, tiles, window, arch)
    programs = min(arch.sms * per_sm, undivided)
    dynamic = programs < undivided
    if narrow:
        launch(
            attention_window_kernel, (programs,),
            *(descriptor(x, 64) for x in (q, k, v, out)), lse, dense(call.sinks),
            work_counter(q.device) if dynamic else None, tokens, keys, heads, blocks, batch * heads,
            section(k, heads, arch, alike), left, right, heads // k.shape[1], run, *score_factors(call),
            DYNAMIC=dynamic, D=wide, DV=value_wide, STAGES=max(config.stages, 4), Q_STAGES=config.q_stages,
            SOFTCAP=call.softcap > 0.0, num_warps=4,
        )  # fmt: skip
        return out, lse
    descriptors = (
        descriptor(q, 64, packed), descriptor(k, config.block_n, packed), descriptor(v, config.block_n, packed),
        descriptor(out, 64, packed),
    )  # fmt: skip
    sinks, factors = dense(call.sinks), score_factors(call)
    sizes = tokens, keys, heads, blocks, batch * heads, section(k, heads, arch, alike or (has_lists and not has_right))
    kinds = {
        "WHOLE": alike and keys % config.block_n == 0, "RIGHT": has_right, "BN": config.block_n, "D": wide,
        "DV": value_wide, "CONSUMERS": config.consumers, "STAGES": config.stages,
        "V_STAGES": config.v_stages or config.stages, "SOFTCAP": call.softcap > 0.0,
    }  # fmt: skip
    tile = 64 if config.consumers == 3 else 128  # tiles begin at multiples of it
    aligned = tokens % tile == (keys - tokens) % tile == 0 and config.consumers < 4 and config.block_n == 128
    if undivided:
        launch(
            attention_fwd_kernel, (programs,), *descriptors, lse, sinks, work_counter(q.device) if dynamic else None,
            table, lists, indices, *sizes, left, right, heads // k.shape[1], list_share, list_rows, *factors,
            LEFT=has_left, DYNAMIC=dynamic, Q_STAGES=config.q_stages, LIST_K=call.block_k if has_lists else 0,
            HALF=aligned and call.causal and not (has_left or packed or has_lists), PER_SM=per_sm,
            DIVIDED=shares > 0, num_warps=4,
            **({"maxnreg": 80} if per_sm > 1 else {}), **kinds, **dropout_arguments(call),
        )  # fmt: skip
    if shares:
        sizes = *sizes, heads // k.shape[1]
        launch_shares(shares, undivided, descriptors, lse, sinks, sizes, right, factors, arch, **kinds)
    return out, lse
