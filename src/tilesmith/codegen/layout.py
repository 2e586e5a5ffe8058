"""Which elements of an accumulator fragment each thread of a 32-wide subgroup holds.

A 16 x 16 fragment is laid out as the accumulators of two mma.sync.m16n8k16 side by side (PTX ISA, "Matrix fragments for
mma.m16n8k16"), an 8 x 8 one as Apple's simdgroup_matrix, whose layout MLX and others rely on though Apple does not
publish it. Vulkan's cooperative matrices keep theirs to the driver.
"""

from __future__ import annotations

ELEMENTS = {16: 8, 8: 2}
"""Elements a thread holds, by tile."""

ROW_LANES = {16: (1, 2), 8: (1, 8)}
"""Lane masks: exchanging across these in turn reaches every thread that holds elements of the same row."""


def position(tile: int, lane, element: int) -> tuple:
    """(row, column) of `element`; `lane` is an int, or anything with an integer's operators."""
    if tile == 16:
        return lane // 4 + 8 * (element // 2 % 2), lane % 4 * 2 + element % 2 + 8 * (element // 4)
    return lane // 16 * 4 + lane // 2 % 4, lane // 8 % 2 * 4 + lane % 2 * 2 + element
