"""How products of a few rows with a packed weight are divided over a Hopper GPU: by a model of their work."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from tilesmith.ops.quant.packed_reference import WIDTHS

BATCH_OF = {8: 4, 16: 4, 32: 2}
"""Rows of x that a CTA multiplies -> tiles of up to 4 bits that a warp loads at once; the sums take the registers."""
REGISTERS = 128  # of a thread: a multiprocessor holds 16 warps
WARPS = 16
PARTS = tuple(range(1, 9))  # CTAs of a cluster, which the device runs without asking
HEAD = 48  # bytes before the tiles that a warp found: how many have up to 2, 3, 4, 6 and 8 bits; their words' places
LINE = 80  # bytes from the sums of a row of x to those of the next
SYSTEM_SMEM = 1024  # bytes that the driver adds to each CTA
WHOLE_SMEM = 228 * 1024  # bytes of a multiprocessor

# The model, in cycles. Facts of Hopper but for FIXED, START, SUM and MIXED, which times of an H200 gave
# (docs/log/adaptive-precision.md).
CLOCK = 1.75e9
READ = 0.85  # of the memory's bandwidth that reads reach
WRITE = 0.6  # and the dequantising kernel, which writes four bytes for each that it reads
SMEM_BYTES = 128  # of shared memory in a cycle
L2_BYTES = 64  # from the L2 cache to a multiprocessor in a cycle
LATENCY = 1300  # of a load while memory is busy
MMA = 6  # between two products of 16 x 8 x 16 of a scheduler
SCHEDULERS = 4
TENSOR = 600e12  # of 16-bit products of the device's library, in a second, for 132 multiprocessors
FIXED = 7700  # of a launch, with what ends it
START = 2000  # of a CTA until codes are on their way: its tables, which wait for each other
SUM = 1400  # of the exchange of sums
MIXED = 8000  # of a pass over a weight of several widths, whose first loads wait one after another


class RowsShape(NamedTuple):
    """How a product lies on the device. rows: of x that a CTA multiplies; parts: CTAs of a cluster, which divide the
    inputs; num_warps: of a CTA; strips: that its warps take at a time, at most one each; each: how many times."""

    rows: int
    parts: int
    num_warps: int
    strips: int
    each: int


class LinearConfig(NamedTuple):
    """How a product with a packed weight is computed. num_warps: of a CTA. rows: of x that a CTA multiplies; 0: the
    weight is dequantised. parts: CTAs of a cluster, which divide the inputs."""

    num_warps: int
    rows: int = 0
    parts: int = 1


Clusters = Callable[[int, int], int]
"""How many clusters of so many CTAs run at once, with so many CTAs on a multiprocessor."""


def room_of(groups: int, parts: int) -> int:
    """Groups for which a CTA has shared memory: its part, rounded up, so that few kernels are compiled."""
    return -(-groups // parts // 4) * 4


def smem_of(rows: int, span: int, num_warps: int) -> int:
    """Bytes of shared memory of a CTA: x and its sums for each group; the warps' sums, and tiles that they found."""
    used = span * (128 + 4) * rows + num_warps * (LINE * rows + HEAD + 4 * span)
    return used + 4 * 32 * num_warps + SYSTEM_SMEM


def per_multiprocessor(rows: int, span: int, num_warps: int) -> int:
    """CTAs that a multiprocessor holds, 0 where shared memory is too small for one."""
    return min(WARPS // num_warps, WHOLE_SMEM // smem_of(rows, span, num_warps))


def _tile(rows: int, bits: float) -> float:
    """Cycles that a multiprocessor takes for a tile: to issue its instructions, which were counted in the machine code
    (those of more than 4 bits in times), and to read x from shared memory. Measured, one does not hide the other: all
    warps are at the same point of their loops."""
    wide, eights = max(0.0, bits - 4), rows // 8
    slots = 50 + 24 * wide + (19.5 + wide) * eights
    products = MMA * eights * (4 + wide)
    return max(slots, products) / SCHEDULERS + 8 + eights * (1024 / SMEM_BYTES + 1)


def time_of(shape: RowsShape, dims: dict[str, int], arch: Any, clusters: int) -> float:
    """Seconds that a product takes by the model. dims: tokens, strips, groups, and bits, a tenth of a weight's.
    clusters: that the device runs at once."""
    bits, groups = dims["bits"] / 10, dims["groups"]
    span, row_blocks = -(-groups // shape.parts), -(-dims["tokens"] // shape.rows)
    blocks = -(-dims["strips"] // (shape.strips * shape.each)) * row_blocks
    waves = -(-blocks // clusters)
    resident = min(blocks, clusters) * shape.parts  # CTAs that share the device
    on_one = -(-resident // max(1, arch.sms))
    batch = BATCH_OF[shape.rows] if bits <= 4 else BATCH_OF[shape.rows] / 2
    turns = -(-span // (2 * batch)) * 2
    tiles = turns * batch * shape.strips * on_one
    size = 128 * bits + 64  # bytes of a tile with its scales and zeros
    memory = resident * shape.strips * span / row_blocks * size / (READ * (arch.bandwidth or 4.8e12)) * CLOCK
    from_l2 = tiles * size / L2_BYTES
    several = MIXED if bits not in WIDTHS else 0  # a mean is no width but by chance
    pass_ = max(memory, from_l2, tiles * _tile(shape.rows, bits), turns * LATENCY) + SUM + several
    fill = on_one * span * 128 * shape.rows / L2_BYTES
    return (FIXED + waves * (START + fill + shape.each * pass_)) / CLOCK


def dequantized_time(dims: dict[str, int], arch: Any) -> float:
    """Seconds to write the weight and to multiply by it, which are two launches."""
    tiles = dims["strips"] * dims["groups"]
    bandwidth = arch.bandwidth or 4.8e12
    written, read = 2048 * tiles, (12.8 * dims["bits"] + 64) * tiles
    product = max(written / (READ * bandwidth), 2 * dims["tokens"] * 1024 * tiles / (TENSOR * arch.sms / 132))
    return 2 * (FIXED + START) / CLOCK + (written + read) / (WRITE * bandwidth) + product


def _shape(rows: int, parts: int, num_warps: int, dims: dict[str, int], clusters: int) -> RowsShape:
    """Strips as evenly divided as clusters that run at once allow."""
    row_blocks = -(-dims["tokens"] // rows)
    at_once = max(1, clusters // row_blocks)
    each = -(-dims["strips"] // (at_once * num_warps))
    strips = -(-dims["strips"] // (each * at_once))
    return RowsShape(rows, parts, num_warps, max(1, min(strips, num_warps)), each)


def shapes(dims: dict[str, int], clusters: Clusters) -> list[tuple[RowsShape, int]]:
    """All forms that the device can launch, and how many of their clusters it runs at once; those of most rows first,
    which read codes least often where the model sees no difference."""
    found = []
    least = min(32, max(8, 1 << (dims["tokens"] - 1).bit_length()))
    for rows in sorted((n for n in BATCH_OF if n <= least), reverse=True):
        for parts in (p for p in PARTS if p <= dims["groups"]):
            for num_warps in (8, 16):
                on_one = per_multiprocessor(rows, room_of(dims["groups"], parts), num_warps)
                if on_one:
                    room = max(1, clusters(parts, on_one))
                    found.append((_shape(rows, parts, num_warps, dims, room), room))
    return found


def chosen(dims: dict[str, int], arch: Any, clusters: Clusters) -> tuple[RowsShape | None, float]:
    """The form that takes least time by the model, and its seconds; None where to dequantise takes less, and then
    that."""
    best, least = None, dequantized_time(dims, arch)
    for shape, room in shapes(dims, clusters):
        seconds = time_of(shape, dims, arch, room)
        if seconds < least:
            best, least = shape, seconds
    return best, least


def shape_of(config: LinearConfig, dims: dict[str, int], clusters: Clusters) -> RowsShape | None:
    """The form of a configuration; None where the weight is dequantised, or no CTA has shared memory enough."""
    if not config.rows or config.parts > dims["groups"]:
        return None
    on_one = per_multiprocessor(config.rows, room_of(dims["groups"], config.parts), config.num_warps)
    if not on_one:
        return None
    return _shape(config.rows, config.parts, config.num_warps, dims, max(1, clusters(config.parts, on_one)))
