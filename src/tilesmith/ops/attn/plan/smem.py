"""Shared memory of attention's Hopper kernels, in bytes, as they allocate it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

HOPPER = 232448  # what a CTA may have on Hopper


def forward(c: Mapping[str, Any], item: int, counted: bool = True) -> int:
    """Of `attention_fwd_kernel`, its stream-K part and the window's kernel. c: their constants; counted: tiles come
    from a counter, or may."""
    consumers, stages, values = c["CONSUMERS"], c["STAGES"], c["V_STAGES"]
    wide, value_wide = c["D"] + c.get("REST", 0), c["DV"] + c.get("V_REST", 0)
    held = c["V_PART"] * -(-value_wide // c["V_PART"]) if c.get("V_PART") else value_wide
    queries = 64 * wide * consumers * c["Q_STAGES"]
    in_q = c["D"] == c["DV"] and wide > 128 and (counted or wide < 256)
    out = 0 if in_q or "DIM_V" in c else 64 * value_wide * consumers
    return (queries + out + c["BN"] * (wide * stages + held * values)) * item + _rest(counted)


def forward_joined(c: Mapping[str, Any], item: int) -> int:
    """Of `attention_fwd_joined_kernel`: two boxes of queries a consumer, tiles of keys and of values with 128 rows."""
    keys, values = c["D"] + c["REST"], c["DV"] + c["V_REST"]
    return (2 * 64 * keys * c["CONSUMERS"] + 128 * (keys + values) * c["STAGES"]) * item + _rest(True)


def forward_wide(c: Mapping[str, Any], item: int) -> int:
    """Of `attention_fwd_wide_kernel`: queries, values, parts of keys, two boxes of powers and of their rows."""
    return 64 * (2 * 512 + 128 * c["STAGES"] + 2 * 64) * item + 6 * 64 * 4 + _rest(False)


def backward(c: Mapping[str, Any], item: int) -> int:
    """Of `attention_dkv_kernel`: queries and dout, a tile of keys and of values, two ds, room for four parts of dq,
    from which dk and dv are stored, too; with a REST these have a place of their own beside two boxes of dq in fp32."""
    rows, rest = c["BQ"], c.get("REST", 0)
    wide = 64 + rest if rest else c["D"]
    tiles = (2 * c["STAGES"] * rows + 2 * 128) * wide + 2 * rows * 128
    written = 4 * 64 * wide * item
    parts = written + 2 * 64 * wide * 4 if rest else written * (rows // 64)
    return tiles * item + parts + 2 * c["STAGES"] * rows * 4 + _rest(True)


def backward_wide(c: Mapping[str, Any], item: int) -> int:
    """Of `attention_dkv_wide_kernel`: queries and dout, a tile of keys and of values, two of p, and what dk and dv are
    stored from where it is not the other's operand (`columns.room_for`)."""
    parts = (c["D"], c["DV"]), (c.get("REST", 0), c.get("V_REST", 0))
    own = sum(max(a, b) for a, b in parts if a != b and max(a, b))
    tiles = (c["STAGES"] + 1) * sum(map(sum, parts)) + own
    return 64 * (tiles + 2 * 64) * item + 2 * c["STAGES"] * 64 * 4 + _rest(True)


def dq_wide(c: Mapping[str, Any], item: int) -> int:
    """Of `attention_dq_wide_kernel`: two tiles of queries and of dout, and keys and values."""
    keys, values = c["D"] + c.get("REST", 0), c["DV"] + c.get("V_REST", 0)
    return 64 * ((2 + c["STAGES"]) * keys + (2 + c["V_STAGES"]) * values) * item + _rest(True)


def band_scores(c: Mapping[str, Any], item: int) -> int:
    """Of `attention_band_scores_kernel`: parts of queries and keys, and what each consumer's tile is written from."""
    return (64 * (128 + c["KEYS"]) * c["STAGES"] + 2 * 64 * c["KEYS"]) * item + _rest(False)


def band_products(c: Mapping[str, Any], item: int) -> int:
    """Of `attention_band_products_kernel`: steps of 64 by 128 and by 256, and half of each consumer's tile."""
    return (64 * (128 + 256) * c["STAGES"] + 2 * 64 * 128) * item + _rest(True)


def split_kv(c: Mapping[str, Any], item: int, small: bool) -> int:
    """Of `attention_split_kv_kernel`. small: keys and values have 8 bits."""
    queries = 64 * c["D"] * c["CONSUMERS"]
    out = 64 * c["DV"] * c["CONSUMERS"] if c["APART"] or c["D"] != c["DV"] else 0
    tiles = c["STAGES"] * c["BN"] * (c["D"] + c["DV"])
    return (queries + out) * item + tiles * (3 if small else item) + _rest(False)


def latent(c: Mapping[str, Any], item: int) -> int:
    """Of `attention_latent_kernel`: a tile of queries, those of keys, and one of probabilities."""
    return ((64 + c["STAGES"] * c["BN"]) * (c["D"] + c["REST"]) + 64 * c["BN"]) * item + _rest(True)


def _rest(counted: bool) -> int:
    """Barriers and tickets, at most."""
    return 1024 if counted else 512
