"""How products of a few rows with a packed weight are divided over a Hopper GPU: by a model of their work."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from tilesmith.ops.quant.packed_reference import WIDTHS

BATCH_OF = {8: 4, 16: 4, 32: 2}
"""packed_rows: rows of x that a CTA multiplies -> tiles of up to 4 bits that a warp loads at once; the sums take the
registers."""
WIDE_ROWS = (16, 32, 64, 128)
"""packed_wide: rows of x that a CTA multiplies."""
REGISTERS = 128  # of a thread: a multiprocessor holds 16 warps
WARPS = 16
PARTS = tuple(range(1, 9))  # CTAs of a cluster, which the device runs without asking
HEAD = 48  # bytes before the tiles that a warp found: how many have up to 2, 3, 4, 6 and 8 bits; their words' places
AHEAD = 4  # groups of x that packed_wide copies at once; as many tiles of a warp are under way
TILE_ROOM = 1024  # bytes of codes of a tile, at most
LINE = 80  # bytes from the sums of a row of x to those of the next
SYSTEM_SMEM = 1024  # bytes that the driver adds to each CTA
WHOLE_SMEM = 228 * 1024  # bytes of a multiprocessor

# The model, in cycles. Facts of Hopper but for FIXED, START, SUM, MIXED, LOCKSTEP, ALONE and X_ROW, which times of an
# H200 gave (docs/log/adaptive-precision.md).
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
WGMMA_FLOPS = 4096  # of a multiprocessor in a cycle
LOCKSTEP = 1.5  # of packed_wide's instructions, which all warps issue at the same time, none during products
ALONE = 5  # between two instructions of one of packed_wide's warps
X_ROW = 2  # to copy a group's 128 bytes of a row of x to shared memory, 4 bytes a thread


class RowsShape(NamedTuple):
    """How a product lies on the device. rows: of x that a CTA multiplies; parts: CTAs of a cluster, which divide the
    inputs; num_warps: of a CTA; strips: that its warps take at a time, at most one each; each: how many times; wide: by
    packed_wide, not packed_rows."""

    rows: int
    parts: int
    num_warps: int
    strips: int
    each: int
    wide: bool = False


class LinearConfig(NamedTuple):
    """How a product with a packed weight is computed. num_warps: of a CTA. rows: of x that a CTA multiplies; 0: the
    weight is dequantised. parts: CTAs of a cluster, which divide the inputs. wide: by packed_wide, not packed_rows."""

    num_warps: int
    rows: int = 0
    parts: int = 1
    wide: bool = False


Clusters = Callable[[int, int], int]
"""How many clusters of so many CTAs run at once, with so many CTAs on a multiprocessor."""


def room_of(groups: int, parts: int) -> int:
    """Groups for which a CTA has shared memory: its part, rounded up, so that few kernels are compiled."""
    return -(-groups // parts // 4) * 4


def smem_of(rows: int, span: int, num_warps: int, wide: bool = False) -> int:
    """Bytes of shared memory of a CTA. packed_rows: x and its sums for each group; the warps' sums, and tiles that they
    found. packed_wide: x and tiles under way, or the warps' sums; scales, zeros, and a table of all tiles."""
    if wide:
        tables = 2 * 64 * AHEAD + 256 * AHEAD + 8 * (span + AHEAD)
        used = 1024 + wide_ring(rows, num_warps) + num_warps * tables
    else:
        used = span * (128 + 4) * rows + num_warps * (LINE * rows + HEAD + 4 * span)
    return used + 4 * 32 * num_warps + SYSTEM_SMEM


def wide_ring(rows: int, num_warps: int) -> int:
    """Bytes in which packed_wide has x and codes, and afterwards sums."""
    return max(2 * AHEAD * 128 * rows + num_warps * AHEAD * TILE_ROOM, num_warps * LINE * rows)


def per_multiprocessor(rows: int, span: int, num_warps: int, wide: bool = False) -> int:
    """CTAs that a multiprocessor holds, 0 where shared memory is too small for one."""
    return min(WARPS // num_warps, WHOLE_SMEM // smem_of(rows, span, num_warps, wide))


def _tile(rows: int, bits: float) -> tuple[float, float]:
    """Cycles that a tile takes of a scheduler, to issue its instructions, which were counted in the machine code (those
    of more than 4 bits in times), and of shared memory, to read x. Measured, one does not hide the other: all warps are
    at the same point of their loops."""
    wide, eights = max(0.0, bits - 4), rows // 8
    slots = 50 + 24 * wide + (19.5 + wide) * eights
    return max(slots, MMA * eights * (4 + wide)), 8 + eights * (1024 / SMEM_BYTES + 1)


def _wide_pass(shape: RowsShape, span: int, bits: float, on_one: int) -> float:
    """Cycles that a multiprocessor takes for all strips that packed_wide has there at a time: the most of what all
    warps' instructions and products take one after the other, with the copies of x, of one warp's, and of reads from
    the L2 cache. A CTA's warps wait for each other every AHEAD groups, so that tensor cores rest while they unpack.
    Those that have no strip multiply zeros, as the others of their warpgroup do weights."""
    warps = on_one * shape.num_warps
    slots = 160 + 16 * max(0.0, bits - 4)
    products = shape.rows * 2048 / WGMMA_FLOPS
    copies = X_ROW * shape.rows
    together = warps * (LOCKSTEP * slots / SCHEDULERS + products) + on_one * copies
    alone = ALONE * slots + shape.num_warps * products + copies
    from_l2 = (warps * (128 * bits + 64) + on_one * 128 * shape.rows) / L2_BYTES
    exchange = warps * 64 * shape.rows / L2_BYTES
    return span * max(together, alone, from_l2) + LATENCY + exchange


def _rows_pass(shape: RowsShape, span: int, bits: float, on_one: int) -> float:
    """The same of packed_rows; tiles of a warp come a batch at a time. A warp keeps its scheduler: that with most warps
    ends last."""
    batch = BATCH_OF[shape.rows] if bits <= 4 else BATCH_OF[shape.rows] / 2
    turns = -(-span // (2 * batch)) * 2
    tiles = turns * batch * on_one  # of a warp of each CTA
    slots, from_shared = _tile(shape.rows, bits)
    from_l2 = tiles * shape.strips * (128 * bits + 64) / L2_BYTES
    work = tiles * (-(-shape.strips // SCHEDULERS) * slots + shape.strips * from_shared)
    return max(from_l2, work, turns * LATENCY)


def time_of(shape: RowsShape, dims: dict[str, int], arch: Any, clusters: int) -> float:
    """Seconds that a product takes by the model. dims: tokens, strips, groups, and bits, a tenth of a weight's.
    clusters: that the device runs at once."""
    bits, groups = dims["bits"] / 10, dims["groups"]
    span, row_blocks = -(-groups // shape.parts), -(-dims["tokens"] // shape.rows)
    blocks = -(-dims["strips"] // (shape.strips * shape.each)) * row_blocks
    waves = -(-blocks // clusters)
    resident = min(blocks, clusters) * shape.parts  # CTAs that share the device
    on_one = -(-resident // max(1, arch.sms))
    size = 128 * bits + 64  # bytes of a tile with its scales and zeros
    memory = resident * shape.strips * span / row_blocks * size / (READ * (arch.bandwidth or 4.8e12)) * CLOCK
    fill = on_one * span * 128 * shape.rows / L2_BYTES
    several = MIXED if bits not in WIDTHS else 0  # a mean is no width but by chance
    if shape.wide:  # x comes with the tiles, and widths do not matter
        fill, several = 0, 0
    pass_ = max(memory, (_wide_pass if shape.wide else _rows_pass)(shape, span, bits, on_one)) + SUM + several
    return (FIXED + waves * (START + fill + shape.each * pass_)) / CLOCK


def dequantized_time(dims: dict[str, int], arch: Any) -> float:
    """Seconds to write the weight and to multiply by it, which are two launches."""
    tiles = dims["strips"] * dims["groups"]
    bandwidth = arch.bandwidth or 4.8e12
    written, read = 2048 * tiles, (12.8 * dims["bits"] + 64) * tiles
    product = max(written / (READ * bandwidth), 2 * dims["tokens"] * 1024 * tiles / (TENSOR * arch.sms / 132))
    return 2 * (FIXED + START) / CLOCK + (written + read) / (WRITE * bandwidth) + product


def _shape(rows: int, parts: int, num_warps: int, wide: bool, dims: dict[str, int], clusters: int) -> RowsShape:
    """Strips as evenly divided as clusters that run at once allow."""
    row_blocks = -(-dims["tokens"] // rows)
    at_once = max(1, clusters // row_blocks)
    each = -(-dims["strips"] // (at_once * num_warps))
    strips = -(-dims["strips"] // (each * at_once))
    return RowsShape(rows, parts, num_warps, max(1, min(strips, num_warps)), each, wide)


def shapes(dims: dict[str, int], clusters: Clusters) -> list[tuple[RowsShape, int]]:
    """All forms that the device can launch, and how many of their clusters it runs at once; those of most rows first,
    which read codes least often where the model sees no difference."""
    found = []
    least = max(8, 1 << (dims["tokens"] - 1).bit_length())
    kinds = [(n, False) for n in BATCH_OF if n <= least] + [(n, True) for n in WIDE_ROWS if n <= max(16, least)]
    for rows, wide in sorted(kinds, reverse=True):
        for parts in (p for p in PARTS if p <= dims["groups"]):
            for num_warps in (8, 16):
                on_one = per_multiprocessor(rows, room_of(dims["groups"], parts), num_warps, wide)
                if on_one:
                    room = max(1, clusters(parts, on_one))
                    found.append((_shape(rows, parts, num_warps, wide, dims, room), room))
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
    """The form of a configuration; None where the weight is dequantised: there is no such form, or no CTA has shared
    memory enough."""
    num_warps, rows, parts, wide = config
    if rows not in (WIDE_ROWS if wide else BATCH_OF) or parts > dims["groups"] or (wide and num_warps % 8):
        return None
    on_one = per_multiprocessor(rows, room_of(dims["groups"], parts), num_warps, wide)
    if not on_one:
        return None
    return _shape(rows, parts, num_warps, wide, dims, max(1, clusters(parts, on_one)))
