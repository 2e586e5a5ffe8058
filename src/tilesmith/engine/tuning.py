"""Tuning: find the configuration of a kernel that is the fastest for given arguments, and keep it as a table row."""

from __future__ import annotations

import datetime
import importlib.metadata
import importlib.util
import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tilesmith.engine.arguments import dtype_name
from tilesmith.engine.table import Row, append
from tilesmith.engine.timing import Timing, measure
from tilesmith.engine.triton_private import refusals
from tilesmith.hardware.detect import arch_of, driver

GAIN = 0.03  # a configuration that is not faster than the default by this share is no row


class Found(NamedTuple):
    """The best configuration that a search met, its time, and what the default is and takes, measured side by side."""

    config: Any
    timing: Timing
    default: Any
    default_timing: Timing
    tried: int

    @property
    def gain(self) -> float:
        """By which share of the default's time the best is faster."""
        return 1.0 - self.timing.median_us / self.default_timing.median_us


def search(
    configure: Any,
    args: tuple,
    *,
    rounds: int = 3,
    budget_ms: float = 5.0,
    progress: Callable[[str], None] = lambda what: None,
) -> Found:
    """Walk from the default along one field after the other, keeping what is faster, until no field helps.

    configure: of a kernel with a `Space`. args: of its op. A configuration that does not compile, or does not fit the
    device, is passed over; what else a kernel raises propagates.
    """
    first = next(a for a in args if isinstance(a, Tensor))
    device = first.device
    dims = configure.space.dims(*args)
    default = configure.space.default(dims, arch_of(device), first.dtype)
    best, tried = default, {default}
    while True:
        field_helped = False
        for field, values in configure.space.choices.items():
            rivals = [c for c in (best._replace(**{field: v}) for v in values) if c not in tried]
            tried.update(rivals)
            running = {c: _call(configure, args, c) for c in (best, *rivals) if _runs(configure, args, c)}
            if len(running) < 2:
                continue
            progress(f"{field}: {len(running)} configurations, {len(tried)} so far")
            times = measure(running, device, rounds=rounds, budget_ms=budget_ms)
            fastest = min(times, key=lambda c: times[c].median_us)
            if fastest != best and times[fastest].median_us < (1 - GAIN / 3) * times[best].median_us:
                best, field_helped = fastest, True
        if not field_helped:
            break
    final = measure({c: _call(configure, args, c) for c in {default, best}}, device, rounds=max(rounds, 5))
    if final[best].median_us >= final[default].median_us:
        best = default
    return Found(best, final[best], default, final[default], len(tried))


def row_of(configure: Any, args: tuple, found: Found) -> Row:
    """The row that says what was found, with its provenance."""
    first = next(a for a in args if isinstance(a, Tensor))
    return Row(
        kernel=configure.name,
        dtype=dtype_name(first.dtype),
        dims=dict(configure.space.dims(*args)),
        config=found.config._asdict(),
        median_us=round(found.timing.median_us, 2),
        spread=round(found.timing.spread, 4),
        torch=torch.__version__,
        triton=importlib.metadata.version("triton") if importlib.util.find_spec("triton") else "",
        driver=driver() or "",
        date=datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%d"),
    )


def at_first_call(configure: Any, args: tuple) -> Any:
    """TILESMITH_TUNE=1: the best configuration for these arguments, kept on this machine for later processes."""
    found = search(configure, args)
    arch = arch_of(next(a for a in args if isinstance(a, Tensor)).device)
    try:
        append(configure.fn.__module__, arch.name, [row_of(configure, args, found)])
    except OSError as problem:  # the call goes on with what was found
        warnings.warn(
            f"what was tuned cannot be kept: {problem}; later processes tune again, unless TILESMITH_CACHE_DIR is "
            "set to a folder that can be written",
            stacklevel=2,
        )
    return found.config


def tunable(op: Any, args: tuple) -> Any | None:
    """The `configure` of the kernel that serves this call of an op; None where it has nothing to choose."""
    configure = getattr(op.explain(*args).kernel.fn, "configure", None)
    return configure if configure is not None and configure.space.choices else None


def _call(configure: Any, args: tuple, config: Any) -> Callable[[], Any]:
    return lambda: configure.fn(*args, config=config)


def _runs(configure: Any, args: tuple, config: Any) -> bool:
    try:
        configure.fn(*args, config=config)
    except refusals():
        return False
    return True
