"""Shared memory of attention's Hopper kernels, in bytes, as they allocate it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

BARRIER = 8


def forward(c: Mapping[str, Any], item: int, counted: bool = True) -> int:
    """Of `attention_fwd_kernel`, its stream-K part and the window's kernel. c: their constants; counted: tiles come
    from a counter, or may."""
    consumers, stages, values = c["CONSUMERS"], c["STAGES"], c["V_STAGES"]
    queries = 64 * c["D"] * consumers * c["Q_STAGES"]
    out = 0 if c["D"] == c["DV"] == 256 and counted else 64 * c["DV"] * consumers
    return (queries + out + c["BN"] * (c["D"] * stages + c["DV"] * values)) * item + _rest(counted)


def backward(block_q: int, wide: int, stages: int, item: int) -> int:
    """Of `attention_dkv_kernel`: queries and dout, a tile of keys and of values, two ds, room for four parts of dq."""
    streamed = 2 * stages * block_q * wide
    kept = 2 * 128 * wide + 2 * block_q * 128 + 4 * 64 * wide * (block_q // 64)
    return (streamed + kept) * item + 2 * stages * block_q * 4 + _rest(True)


def split_kv(c: Mapping[str, Any], item: int, small: bool) -> int:
    """Of `attention_split_kv_kernel`. small: keys and values have 8 bits."""
    queries = 64 * c["D"] * c["CONSUMERS"]
    out = 64 * c["DV"] * c["CONSUMERS"] if c["APART"] or c["D"] != c["DV"] else 0
    tiles = c["STAGES"] * c["BN"] * (c["D"] + c["DV"])
    return (queries + out) * item + tiles * (3 if small else item) + _rest(False)


def _rest(counted: bool) -> int:
    """Barriers and tickets, at most."""
    return 1024 if counted else 512
