"""What a plan is made of: the launches of a call as data, with what each of them is given and why."""

from __future__ import annotations

import math
from collections import Counter as Counts
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple


class Tile(NamedTuple):
    """A TMA descriptor of the tensor `of`, in boxes of `rows` tokens of `heads` heads and of all columns, or so many.

    packed: coordinates are those of `hopper.tile_offset.corner`. flat: `of` is a workspace, not [B, H, T, D].
    """

    of: str
    rows: int
    packed: bool = False
    heads: int = 1
    columns: int = 0
    flat: bool = False


class Part(NamedTuple):
    """A slice of a buffer of scratch memory along its first dim."""

    of: str
    index: int


class Counter(NamedTuple):
    """Zeros (int32) that a launch counts up and sets back (`device.counters`)."""

    numbers: int = 4


Source = str | Tile | Part | Counter | None
"""Where an argument of a device kernel comes from: a tensor or a number of the call, or a buffer, by its name; a
descriptor; None where the kernel is told that there is nothing."""


class Buffer(NamedTuple):
    """Scratch memory of a call. dtype: float32, int32, or q for that of the queries."""

    name: str
    shape: tuple[int, ...]
    dtype: str

    def bytes(self, q_bytes: int) -> int:
        return math.prod(self.shape) * (q_bytes if self.dtype == "q" else 4)


@dataclass(frozen=True)
class Step:
    """One launch of a device kernel.

    tensors: the kernel's parameter -> where its argument comes from. numbers: parameter -> integer or float that the
    plan knows. constants: constexprs and launch options (num_warps, num_stages, maxnreg, launch_pdl, cluster).
    shared_memory: bytes that a CTA allocates, 0 where the compiler decides. what: the step in words.
    """

    kernel: str
    grid: tuple[int, ...]
    tensors: Mapping[str, Source]
    numbers: Mapping[str, int | float | None] = field(default_factory=dict)
    constants: Mapping[str, Any] = field(default_factory=dict)
    shared_memory: int = 0
    what: str = ""

    @property
    def ctas(self) -> int:
        return math.prod(self.grid)

    def __str__(self) -> str:
        size = " x ".join(str(n) for n in self.grid)
        shown = {n: c for n, c in self.constants.items() if c is not False and c is not None and n != "num_warps"}
        constants = ", ".join(n if c is True else f"{n} {c}" for n, c in shown.items())
        memory = f", {self.shared_memory:,} bytes of smem" if self.shared_memory else ""
        return f"{self.kernel} on {size} CTAs{memory}" + (f" ({constants})" if constants else "")


@dataclass(frozen=True)
class Plan:
    """What a call of attention, or of its gradient, launches on one architecture.

    steps: the device kernels in order; none where the call has no query or no key. tile: rows and keys of a tile of
    the main kernel (of its gradient: queries of a block and keys of a tile). stages: tiles in flight. consumers:
    warpgroups that compute, 0 without warp specialisation. walk: the order of the tiles. split: "", "stream-K" or
    "split-KV", into `splits`. ordered: whether every sum has one order, so that results are the same bits in every
    run. scratch: buffers that are allocated for the call alone. zeroed: outputs -> their first rows that are written
    with zeros before. numbers: what else the launcher is told. reasons: one sentence for each decision.
    """

    op: str
    backend: str
    steps: tuple[Step, ...] = ()
    tile: tuple[int, int] = (0, 0)
    stages: int = 0
    consumers: int = 0
    walk: str = ""
    split: str = ""
    splits: int = 1
    ordered: bool = True
    scratch: tuple[Buffer, ...] = ()
    zeroed: tuple[tuple[str, int], ...] = ()
    numbers: Mapping[str, int] = field(default_factory=dict)
    q_bytes: int = 2
    reasons: tuple[str, ...] = ()

    @property
    def scratch_bytes(self) -> int:
        return sum(buffer.bytes(self.q_bytes) for buffer in self.scratch)

    def step(self, kernel: str) -> Step | None:
        """The launch of a device kernel, or None where there is none."""
        return next((step for step in self.steps if step.kernel == kernel), None)

    def lines(self) -> list[str]:
        """The plan as `explain` prints it."""
        times = Counts(str(step) for step in self.steps)
        turns = {step: f", {many} times in turn" if many > 1 else "" for step, many in times.items()}
        lines = [f"{number}. {step}{turn}" for number, (step, turn) in enumerate(turns.items(), 1)]
        if self.split:
            lines.append(f"{self.split}: {self.splits}")
        if self.scratch:
            lines.append(f"scratch: {self.scratch_bytes:,} bytes ({', '.join(b.name for b in self.scratch)})")
        if not self.ordered:
            lines.append("sums have no fixed order: results may differ in their last bits from run to run")
        return lines + list(self.reasons)

    def __str__(self) -> str:
        return "\n".join([f"{self.op} -> {self.backend}", *(f"  {line}" for line in self.lines())])


def same(*names: str) -> dict[str, str]:
    """Arguments that a call and a kernel know by one name."""
    return {name: name for name in names}
