"""The configurations of Triton's attention where no tuning row is near, and what makes them fit an architecture."""

from __future__ import annotations

from typing import Any

import torch

from tilesmith.engine.launcher import next_power_of_2
from tilesmith.ops.attn.plan.configs import AttentionConfig, AttentionVjpConfig, SplitConfig
from tilesmith.ops.attn.plan.shape import key_tiles


def has_bulk_copies(arch: Any, dtype: torch.dtype) -> bool:
    """Whether tiles of `dtype` travel by TMA."""
    return arch.kind == "cuda" and arch.capability >= (9, 0) and dtype.itemsize == 2


def _has_little_room(arch: Any) -> bool:
    """Whether a CUDA device has too little shared memory for 64 rows of 512 columns of 16 bits and as many again."""
    return arch.kind == "cuda" and arch.shared_memory < 128 * 1024


def default_forward(dims, arch, dtype) -> AttentionConfig:
    wide = next_power_of_2(max(dims["dim"], dims["value_dim"], 16))
    if arch.kind not in ("cuda", "hip", "xpu"):
        return AttentionConfig(32, 32, 4, 1)
    stages = 1 if arch.kind == "hip" else 3
    if wide > 256 and dtype != torch.float32 and (arch.kind == "hip" or _has_little_room(arch)):
        # compiled for gfx942: no registers spilled, on 8 warps 185; for sm89: none, in tiles of 64 x 16 60
        config = AttentionConfig(32, 32, 4 if arch.kind == "hip" else 8, 1, has_bulk_copies(arch, dtype))
        return config._replace(block_m=min(32, max(16, next_power_of_2(dims["tokens"]))))
    if dtype == torch.float32:
        config = AttentionConfig(64, 32, 8 if wide > 64 else 4, 2)
    elif arch.kind == "cuda" and arch.capability[0] == 9:
        # H200, 16,384 tokens, hidden 2048, 4k full: 515 TFLOP/s at D 128 (128x128 on 8 warps: 484), 444 at D 64 (347)
        tiles = {64: (64, 128, 4, 2), 128: (64, 64, 4, 3), 512: (64, 32, 8, 2)}
        config = tiles.get(max(wide, 64), (128, 64, 8, stages))
        config = AttentionConfig(*config)
        if dims["drawn"] > 1:
            # with dropout at D 128, 4k: 1,131 us causal and 1,086 full; in three stages 1,259 and 1,220
            config = config._replace(num_stages=2)
    elif wide <= 128:
        config = AttentionConfig(128, 64, 4 if wide <= 64 else 8, stages)
    else:
        config = AttentionConfig(64, 32, 4 if wide <= 256 else 8, stages)
    config = config._replace(bulk=has_bulk_copies(arch, dtype))
    if dims["tokens"] < config.block_m:
        warps = 4 if wide <= 256 else 8
        config = config._replace(block_m=max(16, next_power_of_2(dims["tokens"])), num_warps=warps)
    return _fit_forward(config, wide * dtype.itemsize, dtype.itemsize, arch.shared_memory)


def _shared_memory_forward(config: AttentionConfig, row_bytes: int, itemsize: int) -> int:
    """Bytes for queries, staged keys and values, and, in fp32, probabilities, which then pass through it as well."""
    staged = 2 * config.num_stages * config.block_n
    if itemsize < 4:
        return (config.block_m + staged) * row_bytes
    held = config.block_m + max(1, 2 * (config.num_stages - 1)) * config.block_n
    return max((config.block_m + staged) * row_bytes, held * row_bytes + config.block_m * config.block_n * itemsize)


def _fit_forward(config: AttentionConfig, row_bytes: int, itemsize: int, shared_memory: int) -> AttentionConfig:
    """Fewer stages, then smaller tiles, until what a program needs fits in shared memory."""
    room = (shared_memory or 1 << 30) - 1024
    while _shared_memory_forward(config, row_bytes, itemsize) > room:
        if config.num_stages > 1:
            config = config._replace(num_stages=config.num_stages - 1)
        elif config.block_n > 16:
            config = config._replace(block_n=config.block_n // 2)
        elif config.block_m > 16:
            config = config._replace(block_m=config.block_m // 2)
        else:
            break
    return config


def fit_tile_forward(config: AttentionConfig, dims, arch, dtype) -> AttentionConfig:
    """Warps and stages for the configuration's tile; a smaller tile where it does not fit in shared memory."""
    wide = next_power_of_2(max(dims["dim"], dims["value_dim"], 16))
    config = config._replace(num_warps=8 if config.block_m * max(config.block_n, wide) > 64 * 128 else 4)
    return _fit_forward(config, wide * dtype.itemsize, dtype.itemsize, arch.shared_memory)


def default_backward(dims, arch, dtype) -> AttentionVjpConfig:
    wide = next_power_of_2(max(dims["dim"], dims["value_dim"], 16))
    if arch.kind not in ("cuda", "hip", "xpu"):
        return AttentionVjpConfig(32, 32, 4, 1, 32, 32, 4, 1)
    stages = 1 if arch.kind == "hip" else 2
    warps = 4 if wide <= 256 else 8
    config = AttentionVjpConfig(32, 32, warps, 1, 32, 32, warps, 1)
    if dtype != torch.float32 and arch.kind == "cuda" and arch.capability[0] == 9:
        if wide <= 64:
            config = AttentionVjpConfig(64, 64, 4, 3, 128, 64, 8, 3)
        elif wide <= 128:
            config = AttentionVjpConfig(64, 128, 8, 3, 128, 64, 8, 3)
            if dims["drawn"] > 1:
                # H200, 4k causal, with dropout: 2,832 us; in tiles of 32 x 128 on 8 warps 3,111, of 64 x 128 3,808
                config = config._replace(dkv_block_m=32, dkv_block_n=64, dkv_warps=4)
        elif wide <= 256:
            config = AttentionVjpConfig(32, 64, 8, 2, 128, 32, 8, 2)
        else:
            config = AttentionVjpConfig(32, 32, 8, 1, 32, 32, 8, 2)
    elif dtype != torch.float32 and wide > 256 and arch.kind == "hip":
        # compiled for gfx942: 8 and 0 registers spilled, on 8 warps 218 and 86; operands wait in registers
        return AttentionVjpConfig(16, 32, 4, 1, 32, 16, 4, 1)
    elif dtype != torch.float32 and wide > 256 and _has_little_room(arch):
        config = AttentionVjpConfig(16, 16, 8, 1, 32, 16, 8, 1)
    elif dtype != torch.float32 and wide <= 128:
        config = AttentionVjpConfig(32, 64, 4, stages, 64, 32, 4, stages)
    if wide > 256 and dims["documents"] > 1 and arch.kind == "cuda" and dtype != torch.float32:
        # registers spilled with 16 and 32 queries: sm80, packed 274 and 1,449, by ids 338 and 617; sm90, packed 231 and
        # 501, by ids 552 and 3,771
        config = config._replace(dkv_block_m=16)
    config = config._replace(bulk=has_bulk_copies(arch, dtype))
    return _fit_backward(config, wide, dtype.itemsize, arch.shared_memory)


def _fit_backward(config: AttentionVjpConfig, wide: int, itemsize: int, shared_memory: int) -> AttentionVjpConfig:
    """Fewer stages, then smaller tiles, until what is kept and what is staged fit in shared memory."""
    row_bytes, joined = wide * itemsize, wide > 256 and itemsize == 2
    room = (shared_memory or 1 << 30) - 2048

    def too_large(kept: int, staged: int, stages: int, more: int) -> bool:
        # scores pass through shared memory, too, where a product does not take them from registers
        return 2 * (kept + staged * stages) * row_bytes + more > room

    def dkv_too_large() -> bool:
        kept, staged = config.dkv_block_n, config.dkv_block_m
        # compiled for sm80 and sm89, rows of 512 columns are there once more, where a product reads them transposed
        return too_large(kept, staged, config.dkv_stages, staged * row_bytes if joined else 2 * kept * staged)

    while dkv_too_large():
        if config.dkv_stages > 1:
            config = config._replace(dkv_stages=config.dkv_stages - 1)
        elif config.dkv_block_n > 16:
            config = config._replace(dkv_block_n=config.dkv_block_n // 2)
        elif joined and config.dkv_block_m > 16:
            config = config._replace(dkv_block_m=config.dkv_block_m // 2)
        else:
            break
    while too_large(config.dq_block_m, config.dq_block_n, config.dq_stages, 2 * config.dq_block_m * config.dq_block_n):
        if config.dq_stages > 1:
            config = config._replace(dq_stages=config.dq_stages - 1)
        elif config.dq_block_m > 16:
            config = config._replace(dq_block_m=config.dq_block_m // 2)
        else:
            break
    return config


def fit_tile_backward(config: AttentionVjpConfig, dims, arch, dtype) -> AttentionVjpConfig:
    """Warps and stages for the configuration's tiles; smaller tiles where they do not fit in shared memory."""
    wide = next_power_of_2(max(dims["dim"], dims["value_dim"], 16))
    config = config._replace(
        dkv_warps=8 if config.dkv_block_n * max(config.dkv_block_m, wide) > 64 * 64 else 4,
        dq_warps=8 if config.dq_block_m * max(config.dq_block_n, wide) > 64 * 64 else 4,
    )
    return _fit_backward(config, wide, dtype.itemsize, arch.shared_memory)


def default_split(dims, arch, dtype) -> SplitConfig:
    block_m, block_d = max(16, next_power_of_2(dims["rows"])), next_power_of_2(max(16, dims["dim"]))
    if arch.kind not in ("cuda", "hip", "xpu"):
        return SplitConfig(16, 16, 8, 4, 1)  # the interpreter: small tensors, which are to be split all the same
    if block_d > 256:
        return _default_wide_split(dims, arch, dtype)
    # H200, bf16, 64/8 heads of 128, TB/s of keys and values at 1 x 8k / 1 x 128k / 32 x 8k: 1 token 2.1 / 4.2 / 4.5,
    # 8 tokens 1.7 / 4.2 / 4.4, 16 tokens 1.3 / 3.5 / 3.8. A combining kernel that is there already saves 1 us.
    chained = arch.kind == "cuda" and arch.capability[0] >= 9
    large = dims["heads"] * dims["keys"] > 2048 * max(1, arch.sms)
    if dtype == torch.float32:
        # Products in full float32 run without tensor cores and hold whole rows in registers.
        config = SplitConfig(16, 16, 1, 8, 2)
    elif arch.kind == "hip" and arch.warp == 32:
        # 256 registers a thread and none to spare: tiles twice as high or wide spill 56 to 290 of them.
        config = SplitConfig(min(block_m, 32), 32, 1, 8, 2) if block_d <= 128 else SplitConfig(16, 16, 1, 8, 2)
    elif block_m >= 64 and block_d > 128:
        config = SplitConfig(64, 32, 1, 4 if chained else 8, 3)
    elif block_m > 64:
        config = SplitConfig(128, 64, 1, 8, 3)
        if large and chained and dims["sparse"] == 1:
            config = SplitConfig(128, 128, 1, 8, 3)
    elif block_m == 64 or (block_m == 32 and block_d <= 128 and chained):
        config = SplitConfig(64, 64, 2, 4, 3) if dims["heads"] >= arch.sms else SplitConfig(64, 64, 1, 4, 4)
    elif chained:
        # H200, 1 token, 32 x 8k, 8 bits: in steps of 128 keys 156 us, in pages of 16 167; in steps of 64 200 and 223
        config = SplitConfig(block_m, 64 if block_d * dims["bytes"] > 128 else 128, 2, 4, 3, peel=False)
    else:
        config = SplitConfig(block_m, 128, 2, 4, 2) if large else SplitConfig(block_m, 128, 1, 8, 3)
    small = chained and dims["bytes"] == 1
    config = config._replace(chained=chained, widened=arch.kind == "cuda")
    return _fit_split(config, block_d, 2 * block_d, arch, dtype, small)


def _default_wide_split(dims, arch, dtype) -> SplitConfig:
    """Head dims above 256: a tile of 64 rows has its sums in the registers of two warpgroups."""
    shared, hopper = dims["shared"] > 1, arch.kind == "cuda" and arch.capability[0] == 9
    wide, rest, _ = key_tiles(dims["dim"], dims["value_dim"], shared)
    loaded = wide + rest + (0 if shared else next_power_of_2(dims["value_dim"]))
    if hopper and dims["rows"] > 16:
        config = SplitConfig(64, 64 if shared else 32, 1, 8, 2, peel=False)
    elif arch.kind == "cuda" and dims["dim"] > 512 < dims["rows"]:
        # a prefill; compiled for sm80 and sm89, no registers spilled, with 64 rows 22 to 42
        config = SplitConfig(32, 32, 1, 8, 2, peel=False)
    else:
        # H200, 16 heads of 576 and 512 on 64 x 4k / 64 x 32k keys: 88 / 599 us; in steps of 32 keys, 5 stages, slower
        config = SplitConfig(16, 64 if hopper else 32, 1, 8, 3 if hopper else 2, peel=False)
    chained = arch.kind == "cuda" and arch.capability[0] >= 9
    config = config._replace(chained=chained, widened=arch.kind == "cuda")
    return _fit_split(config, wide + rest, loaded, arch, dtype, False)


def _fit_split(config: SplitConfig, columns: int, loaded: int, arch, dtype, small: bool) -> SplitConfig:
    """The configuration made small enough for the device's shared memory. columns: of a tile of queries. loaded: of
    those of keys and of values. small: keys and values wait in 8 bits."""
    room = arch.shared_memory or 49_152
    grouped = arch.kind == "cuda" and arch.capability[0] >= 9 and config.block_m >= 64 and dtype.itemsize == 2

    def needed(c: SplitConfig) -> int:
        # Warp-group products read tiles where they lie until they are done: one more in flight, but no copy of p.
        keys = loaded * c.block_n * (c.num_stages if grouped else c.num_stages - 1)
        if small and not grouped:
            keys = keys // dtype.itemsize + columns * c.block_n  # and a tile of values that were widened
        rows = c.block_m * columns + (0 if grouped else c.block_m * c.block_n)
        return c.per_sm * (keys + rows) * dtype.itemsize

    while needed(config) > room and config.block_n > 16:
        if config.per_sm > 1:
            config = config._replace(per_sm=1)
        elif config.num_stages > 2:
            config = config._replace(num_stages=2)
        else:
            config = config._replace(block_n=config.block_n // 2)
    return config
