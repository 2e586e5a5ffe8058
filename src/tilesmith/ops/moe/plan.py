"""Block sizes of the experts' kernels, from the sizes of a call and facts of a GPU: pure functions."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from tilesmith.ops.moe import schedule


class ForwardConfig(NamedTuple):
    """block_m: pairs of one expert in a tile, block_n: columns of the tile's sums, for gated experts half of gate and
    half of up; block_k: features of a step. down_n: columns of a tile of the down product. group_m: tiles of pairs
    before the next columns."""

    block_m: int
    block_n: int
    block_k: int
    down_n: int
    group_m: int
    num_warps: int
    num_stages: int


class BackwardConfig(NamedTuple):
    """block_m, block_n, block_k: the tile of the pre-activation's gradient, as in the forward; rows_n: columns of a
    tile of x's gradient; weight_m, weight_n: tile of a weight's gradient, weight_k: pairs of a step of its sum."""

    block_m: int
    block_n: int
    block_k: int
    rows_n: int
    weight_m: int
    weight_n: int
    weight_k: int
    group_m: int
    num_warps: int
    num_stages: int


class Direct(NamedTuple):
    """block_n: columns of a tile of a product without tensor cores; block_k: features of a step; num_stages: steps in
    flight."""

    block_n: int
    block_k: int
    num_stages: int


class FewConfig(NamedTuple):
    """block_n, down_n: columns of a tile of gate and up, and of down; block_k: features of a step of both; num_stages:
    steps in flight. up: where one program makes columns of gate and up for one pair. down: where one makes columns of
    down for all experts of a token."""

    block_n: int
    down_n: int
    block_k: int
    num_stages: int
    up: Direct | None = None
    down: Direct | None = None


class HopperConfig(NamedTuple):
    """num_stages: steps of a sum in flight; group_m: tiles of pairs before the next columns; consumers: warpgroups that
    run WGMMA, each for 64 pairs of a tile."""

    num_stages: int
    group_m: int
    consumers: int = 2


class HopperBackwardConfig(NamedTuple):
    """weight_n, weight_stages: columns of a tile of a weight's gradient, and steps of its sum in flight; rows_stages,
    group_m, rows_consumers: `HopperConfig` of x's gradient."""

    weight_n: int
    weight_stages: int
    rows_stages: int
    group_m: int
    rows_consumers: int = 2


# The pre-activation's gradient stays Triton's on Hopper, in the configuration that `backward` gives it for many pairs.
HOPPER_PRE = BackwardConfig(128, 128, 64, 256, 128, 128, 64, 8, num_warps=8, num_stages=4)
HOPPER_LEAST = 16  # pairs an expert up to which Triton's narrow tiles read the weights of a forward with less waiting
HOPPER_ROWS, HOPPER_COLS, HOPPER_STEP = 128, 256, 64  # of a tile of Hopper's products, and pairs or features of a step
HOPPER_HEIGHTS = (HOPPER_ROWS, 192)  # pairs of a tile by two consumers, which was measured first, and by three
HOPPER_MARGIN = 0.1  # of the time of the first: about how far the model is from what was measured
FEW = 128  # pairs up to which one program compares all with all: decoding waits for launches, not for that
FEW_COLS = (
    128  # columns of gate and up of a program; 32 and 64 take 3 to 19 % longer on an H200, with 1, 4 or 16 tokens
)
UP = Direct(4, 512, 3)  # of gate and up of one token
DOWN_STEP = 64  # features of a step of down of all experts of a token
FEW_INTERPRETED = 32  # the same in Triton's interpreter, so that its small cases run both forms
MOST_TOGETHER = 16  # experts of a token whose columns one program sums
LARGEST_SHARED_MEMORY = 232_448  # of a CTA of compute capability 9.0


def dims(pairs: int, experts: int, hidden: int, inner: int) -> dict[str, int]:
    """The sizes that the best configuration depends on."""
    return {"pairs": pairs, "experts": experts, "hidden": hidden, "inner": inner}


def most_tiles(pairs: int, experts: int, block_m: int) -> int:
    """Tiles that pairs may fill however they are spread over the experts and over none."""
    groups = min(experts + 1, pairs)
    return (pairs + groups * (block_m - 1)) // block_m


def forward(sizes: Mapping[str, int], arch: Any, dtype: Any) -> ForwardConfig:
    """The configuration of the forward where none was measured."""
    if arch.kind == "cpu" or dtype.itemsize > 2:
        return ForwardConfig(32, 32, 32, 32, 8, num_warps=4, num_stages=2)
    block_m = _height(sizes)
    if arch.kind != "cuda":
        return ForwardConfig(min(block_m, 128), 128, 64, 128, 8, num_warps=8 if block_m >= 64 else 4, num_stages=2)
    if block_m <= 32:  # bound by reading weights: narrow tiles with much of them in flight
        stages = _stages(block_m, 64, 128, 5, arch)
        return ForwardConfig(block_m, 64, 128, 64, 8, num_warps=4, num_stages=stages)
    wide = 256 if arch.capability >= (9, 0) and block_m >= 128 else 128
    block_k = 64 if arch.shared_memory >= 120_000 else 32
    stages = _stages(block_m, wide, block_k, 4, arch)
    return ForwardConfig(block_m, wide, block_k, wide, 8, num_warps=8 if block_m >= 128 else 4, num_stages=stages)


def backward(sizes: Mapping[str, int], arch: Any, dtype: Any) -> BackwardConfig:
    """The configuration of the backward where none was measured."""
    if arch.kind == "cpu" or dtype.itemsize > 2:
        return BackwardConfig(32, 32, 32, 32, 32, 32, 32, 8, num_warps=4, num_stages=2)
    block_m = max(32, _height(sizes))
    block_k = 64 if arch.shared_memory >= 120_000 else 32
    if arch.kind != "cuda":
        return BackwardConfig(min(block_m, 128), 128, 32, 128, 128, 128, 32, 8, num_warps=8, num_stages=2)
    # The pre-activation's gradient spills in wider tiles; those of the weights are slower (docs/log/experts.md).
    wide = 256 if arch.capability >= (9, 0) and block_m >= 128 else 128
    stages = _stages(128, wide, block_k, 4, arch)
    return BackwardConfig(block_m, 128, block_k, wide, 128, 128, block_k, 8, num_warps=8, num_stages=stages)


def _height(sizes: Mapping[str, int]) -> int:
    """Pairs of a tile: about those that an expert gets, if they are spread evenly."""
    each = -(-sizes["pairs"] // max(1, sizes["experts"]))
    return next((height for height in (16, 32, 64) if each <= height), 128)


def _stages(block_m: int, block_n: int, block_k: int, most: int, arch: Any) -> int:
    """As many steps in flight as shared memory holds."""
    return max(2, min(most, (arch.shared_memory - 2048) // (2 * block_k * (block_m + block_n))))


def few(
    sizes: Mapping[str, int], top_k: int, arch: Any, dtype: Any, adapted: bool, by_features: tuple[bool, bool]
) -> FewConfig | None:
    """The configuration of kernels for few pairs, which need no index; None where they do not serve. by_features:
    whether the weight of gate and up, and that of down, have neighbouring features."""
    pairs, experts = sizes["pairs"], sizes["experts"]
    most = FEW_INTERPRETED if arch.kind == "cpu" else FEW
    if adapted or not 0 < pairs <= min(most, 16 * experts) or top_k > MOST_TOGETHER:
        return None
    if arch.kind == "cpu":
        up, down = (Direct(8, 32, 2) if direct else None for direct in by_features)
        return FewConfig(32, 32, 32, 2, up, down)
    if dtype.itemsize > 2:
        return None
    rates = schedule.Rates(sms=arch.sms or schedule.Rates().sms)
    tokens = pairs // top_k
    distinct, up, down = schedule.distinct(tokens, top_k, experts), None, None
    if by_features[0] and tokens == 1:  # no two pairs share an expert
        up = UP
    steps = -(-sizes["inner"] // DOWN_STEP)
    if by_features[1] and schedule.together(pairs, distinct, sizes["hidden"], sizes["inner"], steps, rates):
        wide = top_k <= 8 and tokens * -(-sizes["hidden"] // 16) >= 2 * rates.sms
        down = Direct(16, DOWN_STEP, 4) if wide else Direct(8, DOWN_STEP, 5)
    if arch.kind != "cuda":
        return FewConfig(FEW_COLS, 64, 64, 2, up, down and down._replace(num_stages=2))
    return FewConfig(FEW_COLS, 64, 128, _stages(16, FEW_COLS, 128, 5, arch), up, down)


def hopper_times(sizes: Mapping[str, int], arch: Any, backward: bool = False) -> dict[int, float]:
    """Seconds that `schedule` predicts for the products whose tiles have one height, by that height: gate and up, and
    down; with `backward` the gradient of x."""
    hidden, inner = sizes["hidden"], sizes["inner"]
    up, down = schedule.Product(2 * inner, hidden, HOPPER_COLS), schedule.Product(hidden, inner, HOPPER_COLS)
    products = (schedule.Product(hidden, 2 * inner, HOPPER_COLS),) if backward else (up, down)
    rates = schedule.Rates(sms=arch.sms or schedule.Rates().sms)
    return schedule.times(products, HOPPER_HEIGHTS, sizes["pairs"], sizes["experts"], rates)


def _consumers(sizes: Mapping[str, int], arch: Any, backward: bool = False) -> int:
    return schedule.height(hopper_times(sizes, arch, backward), HOPPER_MARGIN) // schedule.CONSUMER_ROWS


def hopper_forward(sizes: Mapping[str, int], arch: Any, dtype: Any) -> HopperConfig:
    """The configuration of Hopper's forward where none was measured."""
    consumers = _consumers(sizes, arch)
    return HopperConfig(num_stages=4 if consumers == 2 else 3, group_m=8, consumers=consumers)


def hopper_backward(sizes: Mapping[str, int], arch: Any, dtype: Any) -> HopperBackwardConfig:
    """The configuration of Hopper's backward where none was measured."""
    consumers = _consumers(sizes, arch, backward=True)
    rows_stages = 4 if consumers == 2 else 3
    return HopperBackwardConfig(256, weight_stages=4, rows_stages=rows_stages, group_m=8, rows_consumers=consumers)


def hopper_shared_memory(cols: int, stages: int, consumers: int = 2) -> int:
    """Bytes of shared memory of a product on Hopper: what is in flight, two pieces of results a consumer, the
    mbarriers."""
    rows = consumers * schedule.CONSUMER_ROWS
    return 2 * stages * HOPPER_STEP * (rows + cols) + 2 * consumers * 2 * 64 * 64 + 16 * stages


def hopper_fit(config: Any, sizes: Mapping[str, int], arch: Any, dtype: Any) -> Any:
    """The same configuration with two or three consumers and as many steps in flight as shared memory holds."""
    for field in ("consumers", "rows_consumers"):
        if field in config._fields:
            config = config._replace(**{field: min(3, max(2, getattr(config, field)))})
    for field, of in (("num_stages", "consumers"), ("rows_stages", "rows_consumers"), ("weight_stages", "")):
        if field in config._fields:
            cols, consumers = (HOPPER_COLS, getattr(config, of)) if of else (config.weight_n, 2)
            most = max(n for n in range(1, 9) if hopper_shared_memory(cols, n, consumers) <= LARGEST_SHARED_MEMORY)
            config = config._replace(**{field: min(most, max(2, getattr(config, field)))})
    return config


def grouped_tile(number: int, tiles: int, tiles_n: int, group: int) -> tuple[int, int]:
    """Tile of pairs and of columns of a persistent product, as `hopper.products` counts them."""
    behind, within = divmod(number, group * tiles_n)
    column, row = divmod(within, min(tiles - behind * group, group))
    return behind * group + row, column


def weight_tile(number: int, tiles_m: int, tiles_n: int, cols: int) -> tuple[int, int, int]:
    """Expert, first row and first column of a tile of a weight's gradient, as `hopper.weight_gradient` counts them."""
    expert, within = divmod(number, tiles_m * tiles_n)
    column, row = divmod(within, tiles_m)
    return expert, row * HOPPER_ROWS, column * cols
