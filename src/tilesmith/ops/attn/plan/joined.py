"""Which values of a forward on Hopper are multiplied as one product a step of 16 keys, how they lie for that
(`hopper.joined`), and which calls may have tiles whose keys are no power of two (`hopper.forward_joined`)."""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

from tilesmith.engine import releases
from tilesmith.ops.attn.plan import smem
from tilesmith.ops.attn.plan.configs import HopperConfig
from tilesmith.ops.attn.plan.shape import Shape, Window, column_parts, columns, rest_columns


class Joined(NamedTuple):
    """columns: of the products, a multiple of 8. part: columns of the parts of a tile of values, which lie one after
    another, each with rows of one swizzle. Both 0: products of 64 columns and of the rest, whose tiles lie apart."""

    columns: int = 0
    part: int = 0


def key_parts(dim: int) -> tuple[int, int]:
    """The columns of a tile of queries or keys, and of its rest (`hopper.columns`)."""
    rest = rest_columns(dim)
    return (64, rest) if rest else column_parts(dim)


def value_parts(dim: int) -> tuple[int, int]:
    """The same of values and results, of which those above 128 columns have no rest."""
    rest = rest_columns(dim)
    return (64, rest) if rest else (columns(dim), 0)


@lru_cache(maxsize=1)
def _place_known() -> bool:
    """Whether the installed Triton is known to place the largest allocation of shared memory first. Without Triton
    plans are those of the tested one."""
    found = releases.installed()
    return found is None or releases.joins(found)


def _measured_slower(value_dim: int) -> bool:
    """81 to 95 columns: in parts of 32 of which the last is not whole (88: 126 us joined, 115 apart)."""
    return rest_columns(value_dim) == 32 and value_dim < 96


def joins(value_dim: int) -> bool:
    """Whether products with values of a head dim are joined where they lie first in shared memory."""
    return rest_columns(value_dim) > 0 and not _measured_slower(value_dim) and _place_known()


def why_apart(value_dim: int) -> str:
    """Why products with values of 65 to 96 columns are not joined."""
    if _measured_slower(value_dim):
        return f"joined ones of {value_dim} columns were measured to be slower"
    if not _place_known():
        return f"where Triton {releases.installed()} places values in shared memory was not tested"
    return "values are not the largest allocation of shared memory, which lies first"


def joined_values(s: Shape, config: HopperConfig) -> Joined:
    """How the products of a call with its values are joined. Parts have 64 columns, the rows of the widest swizzle,
    where shared memory has room for what these pad."""
    if not joins(s.value_dim):
        return Joined()
    rest, stages = rest_columns(s.value_dim), config.v_stages or config.stages
    wide, key_rest = key_parts(s.dim)
    padded = {
        "CONSUMERS": config.consumers, "STAGES": config.stages, "V_STAGES": stages, "Q_STAGES": config.q_stages,
        "BN": config.block_n, "D": wide, "REST": key_rest, "DV": 64, "V_REST": rest, "V_PART": 64,
        **({"DIM_V": s.value_dim} if s.out_fp32 else {}),
    }  # fmt: skip
    part = 64 if rest == 16 and smem.forward(padded, s.q_bytes) <= smem.HOPPER else rest
    held = -(-(64 + rest) // part) * part
    keys, queries = config.stages * config.block_n * wide, 64 * config.consumers * config.q_stages * max(64, wide)
    if stages * config.block_n * held <= max(keys, queries):
        return Joined()
    return Joined(-(-s.value_dim // 8) * 8, part)


def joins_both(config: HopperConfig) -> bool:
    """Whether both products are joined (`hopper.forward_joined`): those with tiles whose keys are no power of two."""
    return config.block_n & (config.block_n - 1) > 0


def why_not_both(s: Shape, window: Window) -> str:
    """Why a call cannot have both products joined; empty where it can."""
    why = {
        "head dims outside 73 to 96": min(s.dim, s.value_dim) <= 72 or max(s.dim, s.value_dim) > 96,
        "keys and values that differ in columns": rest_columns(s.dim) != rest_columns(s.value_dim),
        f"Triton {releases.installed()}, whose places in shared memory were not tested": not _place_known(),
        "a window's left edge": window.hides_left, "documents": s.packed, "block lists": s.lists > 0,
        "dropout": s.dropout, "a softcap": s.softcap, "out in fp32": s.out_fp32,
    }  # fmt: skip
    return next((reason for reason, there in why.items() if there), "")
