"""Configurations of Hopper's kernels of experts in 8 bits: pure functions, as in `plan`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from tilesmith.ops.moe.plan import HOPPER_COLS, HOPPER_ROWS, LARGEST_SHARED_MEMORY, hopper_shared_memory

STEP8 = 128  # features of a step of 8 bits, as many bytes as of 16 bits in half as many


class HopperFp8Config(NamedTuple):
    """num_stages: steps of a sum in flight; group_m: tiles of pairs before the next columns."""

    num_stages: int
    group_m: int


class HopperFp8BackwardConfig(NamedTuple):
    """weight_n, weight_stages: columns of a tile of a weight's gradient, and steps of its sum in flight; num_stages,
    group_m: as in the forward."""

    weight_n: int
    weight_stages: int
    num_stages: int
    group_m: int


def forward(sizes: Mapping[str, int], arch: Any, dtype: Any) -> HopperFp8Config:
    """The configuration of the forward where none was measured."""
    return HopperFp8Config(num_stages=4, group_m=8)


def backward(sizes: Mapping[str, int], arch: Any, dtype: Any) -> HopperFp8BackwardConfig:
    """The configuration of the backward where none was measured."""
    return HopperFp8BackwardConfig(weight_n=256, weight_stages=4, num_stages=4, group_m=8)


def shared_memory(stages: int) -> int:
    """Bytes of shared memory of a product: what is in flight, four pieces of results, the mbarriers."""
    return stages * STEP8 * (HOPPER_ROWS + HOPPER_COLS) + 4 * 2 * 64 * 64 + 16 * stages


def fit(config: Any, sizes: Mapping[str, int], arch: Any, dtype: Any) -> Any:
    """The same configuration with as many steps in flight as shared memory holds."""
    most = max(n for n in range(1, 9) if shared_memory(n) <= LARGEST_SHARED_MEMORY)
    config = config._replace(num_stages=min(most, max(2, config.num_stages)))
    if not hasattr(config, "weight_n"):
        return config
    most = max(n for n in range(1, 9) if hopper_shared_memory(config.weight_n, n) <= LARGEST_SHARED_MEMORY)
    return config._replace(weight_stages=min(most, max(2, config.weight_stages)))
