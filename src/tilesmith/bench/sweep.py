"""Measure an op along one axis: hidden size, sequence length or vocabulary, everything else held."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch

from tilesmith.bench.document import document
from tilesmith.bench.peers import names
from tilesmith.bench.run import case_rows, ceilings
from tilesmith.bench.selection import check_parts, refuse_unknown
from tilesmith.bench.sweep_inputs import INPUTS, LARGE, SMALL, Held
from tilesmith.engine import Case, ops
from tilesmith.engine.arguments import dtype_name


@dataclass(frozen=True)
class Axis:
    """What is swept. large, small: its values on an accelerator and on a CPU, unless an op says otherwise."""

    name: str
    label: str
    large: tuple[int, ...]
    small: tuple[int, ...]


AXES = {
    axis.name: axis
    for axis in (
        Axis("columns", "hidden size", (256, 512, 1024, 2048, 4096, 5120, 8192, 16384, 32768), (64, 128, 256)),
        Axis("tokens", "tokens", (128, 256, 512, 1024, 2048, 4096, 8192, 16384), (16, 32, 64)),
        Axis("vocabulary", "vocabulary", (1000, 8192, 32000, 50257, 65536, 128256, 151936, 262144), (50, 500, 1000)),
    )
}


def axes(op: str) -> list[str]:
    """Names of the axes along which an op can be swept."""
    return [axis for axis in AXES if axis in INPUTS.get(op, {})]


def swept(axis: str) -> list[str]:
    """Names of the ops that can be swept along an axis."""
    return sorted(op for op in INPUTS if axis in INPUTS[op])


def values(op: str, axis: str, device: torch.device) -> tuple[int, ...]:
    """The values of an axis that are measured when none are asked for."""
    inputs = INPUTS[op][axis]
    if device.type == "cpu":
        return AXES[axis].small
    return inputs.values or AXES[axis].large


def run(
    op: str,
    axis: str,
    device: torch.device,
    dtype: torch.dtype,
    *,
    command: str,
    at: Sequence[int] = (),
    only: Sequence[str] = (),
    named: Sequence[str] = (),
    rounds: int = 5,
    forward: bool = False,
    progress: Callable[[str], None] = lambda what: None,
    so_far: Callable[[dict[str, Any]], None] = lambda document: None,
) -> dict[str, Any]:
    """The document of one sweep: rows as `bench.run.run` makes them, each with its value `at` and its `panel`.

    at: values of the axis, those of `values` by default. only: providers to measure besides ours, named: panels whose
    names contain one of these; all by default. forward: no backward. so_far: is given the document after each case, for
    a run that may not reach its end. Raises ValueError for an axis, a panel or a provider that the op has not, for
    values below 1, and for the forward alone of a loss.
    """
    if axis not in axes(op):
        known = ", ".join(axes(op)) or "none"
        raise ValueError(f"{op} cannot be swept along {axis}; it has: {known}")
    if any(value < 1 for value in at):
        raise ValueError(f"values of {axis} must be at least 1, got {', '.join(map(str, at))}")
    held = LARGE if device.type != "cpu" else SMALL
    planned = [(value, *made) for value in at or values(op, axis, device) for made in cases(op, axis, value, held)]
    wanted = [made for made in planned if not named or any(n in made[1] for n in named)]
    check_parts(f"{op} has no panel", named, [panel for _, panel, _ in planned if panel])
    refuse_unknown(f"{op} has no provider", only, names(op))
    found = document(
        f"{op}-{axis}",
        device,
        command,
        [],
        dtype=dtype_name(dtype),
        rounds=rounds,
        ceilings=asdict(ceilings(device)),
        sweep={"op": op, "axis": axis, "label": INPUTS[op][axis].label or AXES[axis].label},
    )
    for value, panel, case in wanted:
        progress(case.name)
        rows = case_rows(ops()[op], case, device, dtype, only, rounds, forward)
        found["rows"] += [{**row, "at": value, "panel": panel} for row in rows]
        so_far(found)
        if device.type != "cpu":
            torch.get_device_module(device).empty_cache()
    return found


def cases(op: str, axis: str, value: int, held: Held) -> list[tuple[str, Case]]:
    """(panel, case) for one value of an axis; an op whose options make different curves has several panels."""
    panels: Mapping[str, Mapping[str, Any]] = INPUTS[op][axis].build(value, held)
    return [(panel, Case(" ".join(filter(None, (f"{axis} {value}", panel))), args)) for panel, args in panels.items()]
