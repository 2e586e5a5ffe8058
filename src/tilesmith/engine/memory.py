"""MemoryConfig: how much memory ops that work in chunks may take, and the chunk that follows from it."""

from __future__ import annotations

import math
import numbers
from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tilesmith.engine import Op
from tilesmith.engine.argument_checks import suggesting
from tilesmith.engine.torch_private import autocasts

GB = 10**9
FAR = 1e9  # more GB than there are
MOST = 1e6  # GB of a bound; what is beyond was meant in bytes
FEWEST_ROWS = 128  # a product of fewer rows takes as long
# what the matrix library keeps on an accelerator: 32 MiB on Hopper for each of the two threads of forward and backward
WORKSPACES = 2**26
# devices whose kernels keep in registers what plain PyTorch keeps in copies; meta stands for one of them
TILED = ("cuda", "xpu", "meta")

_ACTIVE: ContextVar[tuple[MemoryConfig, ...]] = ContextVar("tilesmith_memory", default=())


@suggesting
@dataclass(frozen=True)
class MemoryConfig:
    """Bounds, in GB of 10^9 bytes, for each call of `linear_cross_entropy`, `memory_efficient_linear` and
    `memory_efficient_attention` made inside `with MemoryConfig(target_memory_gb=4): ...`.

    A call's need is the peak memory that it and its backward allocate beyond its inputs: outputs, gradients (including
    an incoming one of the output's size), saved tensors and the chunk; on an accelerator also 0.067 GB for the
    workspaces of the matrix library, on a CPU the copies in which plain PyTorch computes, without what libraries take
    for themselves. It is computed from the shapes: nothing is measured, and the host does not wait for the device.

    max_memory_gb: the limit; target_memory_gb if None. `ops.memory.rows_in_budget` raises ValueError with the numbers
        when even chunks of 128 rows need more.
    min_memory_gb: the least that a call is expected to need. `ops.memory.rows_in_budget` raises ValueError with the
        numbers when the call needs less even in one piece, since these bounds were then made for another size.
    target_memory_gb: `ops.memory.rows_in_budget` takes the largest chunks with which the need stays at or below it,
        so a larger target means fewer chunks; where chunks of 128 rows need more, these are taken, up to the limit.
        max_memory_gb if None; if both are None nothing is bounded.

    A call that names its own chunk (`chunk_tokens`, `chunk_rows`) is left alone. The innermost `with` of the thread
    counts. A backward runs with the chunks of its forward; torch.compile keeps those of its trace. A checkpointed
    function runs again in the backward, and the bounds that are active there apply: on a CPU those around the backward,
    on an accelerator none, since its backward runs in threads of its own. Name chunk and mode in such a function.

    Raises ValueError for more than a million GB, which are probably bytes, and unless 0 <= min_memory_gb <=
    target_memory_gb <= max_memory_gb and the target is positive.
    """

    max_memory_gb: float | None = None
    min_memory_gb: float = 0.0
    target_memory_gb: float | None = None

    def __post_init__(self):
        for name in ("max_memory_gb", "min_memory_gb", "target_memory_gb"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, numbers.Real | None):
                raise TypeError(f"MemoryConfig: {name} must be a number of GB, got {value!r}")
        if self.min_memory_gb is None:
            raise TypeError("MemoryConfig: min_memory_gb must be a number of GB, got None")
        for name in ("max_memory_gb", "min_memory_gb", "target_memory_gb"):
            value = getattr(self, name)
            if value is not None and MOST < value < math.inf:
                raise ValueError(
                    f"MemoryConfig: {name} is {value:g} GB, more than any device has; give GB of 10^9 bytes: "
                    f"{value / GB:g} for {value:g} bytes, or None for no bound"
                )
        low, target, high = self.min_memory_gb, self.target, self.limit
        if not 0.0 <= low <= target <= high or target == 0.0:
            raise ValueError(
                f"MemoryConfig: min_memory_gb is {low}, target_memory_gb {self.target_memory_gb}, max_memory_gb "
                f"{self.max_memory_gb}; they must be 0 <= min <= target <= max with a positive target"
            )

    @property
    def target(self) -> float:
        """target_memory_gb, or max_memory_gb if that is None."""
        return self.limit if self.target_memory_gb is None else self.target_memory_gb

    @property
    def limit(self) -> float:
        """max_memory_gb, or target_memory_gb if that is None."""
        if self.max_memory_gb is not None:
            return self.max_memory_gb
        return math.inf if self.target_memory_gb is None else self.target_memory_gb

    def __enter__(self) -> MemoryConfig:
        _ACTIVE.set((*_ACTIVE.get(), self))
        return self

    def __exit__(self, *_: object) -> None:
        entered = _ACTIVE.get()
        # not always the last one: a generator that holds a `with` may end within another
        at = max((i for i, config in enumerate(entered) if config is self), default=len(entered))
        _ACTIVE.set((*entered[:at], *entered[at + 1 :]))


class Need(NamedTuple):
    """Bytes that a call needs, which works on so many `rows`: `whole` in one piece; in chunks of c rows `base` plus
    c · `row`, and `swept` for each of at most `block` rows that are swept at a time within a chunk; never less than
    `least`, whatever the chunks."""

    rows: int
    whole: int
    base: int = 0
    row: int = 0
    least: int = 0
    swept: int = 0
    block: int = 0

    def chunked(self, rows: int) -> int:
        """Bytes in chunks of `rows` rows."""
        if rows >= self.rows:
            return self.whole
        return max(self.least, self.base + rows * self.row + min(rows, self.block) * self.swept)

    def most(self, target: int) -> int:
        """The most rows of a chunk with which the need in chunks stays at or below `target`, 0 if none."""
        left, each = target - self.base, self.row + self.swept
        if left >= self.block * each:
            return (left - self.block * self.swept) // self.row if self.row else self.rows
        return max(0, left // each) if each else 0


class Bounds(NamedTuple):
    """A MemoryConfig in bytes, and which of its fields is the limit."""

    low: int
    target: int
    limit: int
    limit_name: str


def active() -> Bounds | None:
    """The bounds of the innermost MemoryConfig that is entered, or None."""
    stack = _ACTIVE.get()
    if not stack:
        return None
    config = stack[-1]
    name = "target_memory_gb" if config.max_memory_gb is None else "max_memory_gb"
    return Bounds(*(int(min(gb, FAR) * GB) for gb in (config.min_memory_gb, config.target, config.limit)), name)


active._dynamo_marked_constant = True  # as `engine.choice.pinned`: torch.compile cannot trace a ContextVar


def workspaces(device: torch.device) -> int:
    """Bytes to set aside on `device` for the matrix library."""
    return 0 if device.type == "cpu" else WORKSPACES


def rows_in_budget(op: str, need: Need, bounds: Bounds) -> int:
    """Rows of a chunk with which a call of `op` keeps to `bounds`; all of them where it fits in one piece.

    Raises ValueError with the numbers if the need is below min_memory_gb or above max_memory_gb.
    """
    low, target, limit, limit_name = bounds
    if need.whole < low:
        raise ValueError(
            f"{op} needs {human_size(need.whole)} here, less than min_memory_gb = {low / GB:g} ({human_size(low)}); "
            "lower it, or call the op outside this MemoryConfig"
        )
    target = max(target, need.least)
    if need.whole <= target:
        rows = max(1, need.rows)
    else:
        rows = _evened(need.rows, max(need.most(target), FEWEST_ROWS))
    wanted = need.chunked(rows)
    if wanted > limit:
        raise ValueError(
            f"{op} needs at least {human_size(wanted)} here, more than {limit_name} = {limit / GB:g} "
            f"({human_size(limit)}); raise it, or give the op fewer rows at a time"
        )
    return rows


def human_size(count: int) -> str:
    """Bytes in the unit that leaves a number one can read."""
    units = ((10**9, "GB"), (10**6, "MB"), (10**3, "kB"))
    return next(
        (f"{count / unit:.4g} {name}" for unit, name in units if count >= unit), f"{count} byte{'s' * (count != 1)}"
    )


def _evened(rows: int, most: int) -> int:
    """The size of as many chunks as `most` rows each make of `rows`, all about equal, a multiple of 128 if one fits."""
    if most >= rows:
        return max(1, rows)
    even = -(-rows // -(-rows // most))
    rounded = -(-even // FEWEST_ROWS) * FEWEST_ROWS
    return rounded if rounded <= most else even


class ChunkedOp(Op):
    """An op with an argument that says how many rows a chunk has, 0 for the library's choice, which a `MemoryConfig`
    makes instead where one is entered.

    chunk: that argument's name; need: the op's arguments -> `Need`. None: no MemoryConfig reaches the op.
    """

    def __init__(
        self, *args: Any, chunk: str | None = None, need: Callable[..., Need] | None = None, **kwargs: Any
    ) -> None:
        super().__init__(*args, **kwargs)
        self._chunk, self._need = None if chunk is None else self.parameters.index(chunk), need

    def bind(self, args: tuple, kwargs: dict[str, Any]) -> tuple:
        full = super().bind(args, kwargs)
        if self._chunk is None or full[self._chunk] != 0:
            return full
        bounds = active()
        if bounds is None:
            return full
        if self.check is not None:
            self.check(*full)
        rows = rows_in_budget(self.name, self._need(*full), bounds)
        return (*full[: self._chunk], rows, *full[self._chunk + 1 :])


def held(*tensors: Tensor | None) -> int:
    """Bytes of tensors together; None has none."""
    return sum(x.nbytes for x in tensors if x is not None)


def computed_in(x: Tensor) -> torch.dtype:
    """The dtype that autocast, where it is on, makes of x's."""
    kind = x.device.type
    return torch.get_autocast_dtype(kind) if x.dtype.itemsize <= 4 and autocasts(kind) else x.dtype
