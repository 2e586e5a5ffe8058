"""A model of the time of Hopper's products of experts: which height of tiles a call should have.

A tile takes as long as its WGMMA or as its loads, whichever is more. A short last tile of an expert reads all weights
of its columns as a full one does, so a height that holds the pairs of an expert in fewer tiles reads them less often.
The host knows the pairs of an expert only in the mean: the model spreads them as routing at random does.
"""

from __future__ import annotations

import functools
from statistics import NormalDist
from typing import NamedTuple

CONSUMER_ROWS = 64  # pairs of a tile for each warpgroup of WGMMA
QUANTILES = 16  # of the pairs of an expert, in place of a sum over all numbers
PLACES = tuple(NormalDist().inv_cdf((i + 0.5) / QUANTILES) for i in range(QUANTILES))


class Rates(NamedTuple):
    """sms: multiprocessors; flops, l2: FLOP/s of WGMMA and bytes/s of loads that one of them reaches; memory: bytes/s
    of the device; store: seconds of a tile's epilogue that no product hides; launch: seconds of a launch that waits for
    the one before; step: seconds of a step of a program that sums without tensor cores.

    The defaults follow from the products of 65,536 pairs of 128 experts on an H200 (docs/log/experts.md)."""

    sms: int = 132
    flops: float = 5.3e12
    l2: float = 60e9
    memory: float = 4.2e12
    store: float = 1e-6
    launch: float = 4e-6
    step: float = 0.8e-6


class Product(NamedTuple):
    """outputs, features: of each expert's weight; columns: of a tile."""

    outputs: int
    features: int
    columns: int = 256


def spread(pairs: int, experts: int) -> list[int]:
    """Pairs of an expert at QUANTILES equally likely places of its distribution, if every expert is as likely: normal
    with the mean and the variance of the binomial one."""
    mean = pairs / max(1, experts)
    deviation = (mean * (1 - 1 / max(1, experts))) ** 0.5
    return [max(0, round(mean + deviation * z)) for z in PLACES]


def _rounded(pairs: int) -> int:
    return -(-pairs // CONSUMER_ROWS) * CONSUMER_ROWS


def tile_time(product: Product, pairs: int, rates: Rates) -> float:
    """Seconds that one multiprocessor spends on a tile of so many pairs."""
    rows = _rounded(pairs)
    products = 2 * rows * product.columns * product.features / rates.flops
    loads = 2 * (rows + product.columns) * product.features / rates.l2
    return max(products, loads) + rates.store


def product_time(product: Product, rows: int, pairs: int, experts: int, rates: Rates) -> float:
    """Seconds of a product in tiles of up to `rows` pairs of one expert."""
    counts = spread(pairs, experts)
    full, rest = sum(count // rows for count in counts), [count % rows for count in counts if count % rows]
    if not full + len(rest):
        return 0.0
    columns = -(-product.outputs // product.columns)
    tiles = (full + len(rest)) * experts * columns / QUANTILES
    busy = full * tile_time(product, rows, rates) + sum(tile_time(product, n, rates) for n in rest)
    mean = busy / (full + len(rest))
    rounds = max(tiles / rates.sms, float(-(-int(tiles) // rates.sms)))
    weights = 2 * experts * product.outputs * product.features / rates.memory
    return max(rounds * mean, weights)


@functools.lru_cache(maxsize=1024)
def times(
    products: tuple[Product, ...], heights: tuple[int, ...], pairs: int, experts: int, rates: Rates
) -> dict[int, float]:
    """Seconds of products one after another, by the height of their tiles."""
    return {rows: sum(product_time(p, rows, pairs, experts, rates) for p in products) for rows in heights}


def height(found: dict[int, float], margin: float) -> int:
    """The first height, unless another takes less than its time by more than `margin` of it; then the fastest."""
    first = next(iter(found))
    best = min(found, key=lambda rows: found[rows])
    return best if found[best] < found[first] * (1 - margin) else first


def distinct(tokens: int, top_k: int, experts: int) -> float:
    """Experts that tokens choose, in the mean, if every expert is as likely."""
    return experts * (1 - (1 - min(1.0, top_k / max(1, experts))) ** tokens)


def together(pairs: int, experts: float, hidden: int, inner: int, steps: int, rates: Rates) -> bool:
    """Whether down takes less time with one program for all experts of a token, which walks over the features in so
    many steps and reads an expert once for each pair, from L2 but for the first, than with one for all pairs of an
    expert, whose sum over k is one more launch."""
    weight = 2 * hidden * inner
    once = experts * weight / rates.memory
    return max(once, pairs * weight / (rates.l2 * rates.sms), steps * rates.step) <= once + rates.launch
