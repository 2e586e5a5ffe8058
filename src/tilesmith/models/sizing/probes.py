"""Real steps of a model: what they take in time and memory, agreed upon by all ranks of a process group."""

from __future__ import annotations

import statistics
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from tilesmith.engine.memory import workspaces
from tilesmith.engine.model_state import state_preserved
from tilesmith.engine.timing import EVENTS, peak_memory, wall_time
from tilesmith.engine.torch_private import autocasts
from tilesmith.models.layers.tiles import TILE
from tilesmith.models.sizing.moments import Moments, moments
from tilesmith.models.sizing.sample_inputs import Sample, loss_of

TIMED = 3  # steps of a probe whose median counts, after one that is not timed
# device -> what libraries were seen to keep on it; they take it once in a process, perhaps before the first probe
_KEPT: dict[torch.device, int] = {}
PATIENCE = 2.0  # seconds of a step from which on one is enough


@dataclass(frozen=True)
class Probe:
    """One real step of `batch` rows. seconds: of a step; peak: bytes beyond what was there before, 0 where the device
    does not tell (Apple); kept: bytes that stay on the device though the step is over, as workspaces of libraries do.
    fits: False where memory ran out. rows: the peak beyond gradients that are there already; forward: the peak of a
    forward whose backward is to come. Both are 0 where they were not asked for. moments: of a step of half as many rows
    and of this one, which tell how the peak grows; () where they were not asked for or are not known."""

    batch: int
    seconds: float
    peak: int
    kept: int
    fits: bool = True
    rows: int = 0
    forward: int = 0
    moments: tuple[Moments, ...] = ()

    @property
    def throughput(self) -> float:
        """Rows a second; 0 where it did not fit."""
        return self.batch / self.seconds if self.fits and self.seconds else 0.0


def ranks() -> int:
    """The ranks of the default process group, 1 without one."""
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def agreed(value: Any) -> list[Any]:
    """The value of every rank, on every rank."""
    if ranks() == 1:
        return [value]
    found: list[Any] = [None] * ranks()
    dist.all_gather_object(found, value)
    return found


def fingerprint(model: nn.Module) -> Any:
    """What the costs of a step depend on besides its inputs, autocast included: equal where a probe of the model still
    tells. Hashable."""
    modules = tuple(
        (type(m), m.__dict__.get("gradient_checkpointing"), _checkpoint(m), m.__dict__.get(TILE), _attention(m))
        for m in model.modules()
    )
    parameters = tuple((p.shape, p.dtype, p.device, p.requires_grad) for p in model.parameters())
    kinds = {p.device.type for p in model.parameters()} | {"cpu"}
    cast = tuple((kind, torch.get_autocast_dtype(kind)) for kind in sorted(kinds) if autocasts(kind))
    return modules, parameters, cast


def _checkpoint(module: nn.Module) -> str:
    """How a module's checkpoint function keeps what it keeps."""
    function = module.__dict__.get("_gradient_checkpointing_func")
    return str(getattr(function, "keep", getattr(function, "keywords", "")))


def _attention(module: nn.Module) -> str:
    return str(getattr(module.__dict__.get("config"), "_attn_implementation", ""))


def probe(
    model: nn.Module,
    sample: Sample,
    batch: int,
    *,
    backward: bool,
    device: torch.device,
    apart: bool = False,
    growth: bool = False,
) -> Probe:
    """Run a few steps of so many rows and leave the model as it was. All ranks get the worst of their figures.

    apart: also see what the rows take without gradients, of a step that adds to some that are there, for which there
    has to be room, and of a forward. growth: also see the moments of the step and of one of half as many rows; not in a
    process group, whose ranks would have to run them together.

    Raises what the model raises, on every rank, except that memory runs out, which the result says.
    """
    found: Probe | Exception
    try:
        with torch.inference_mode(False), state_preserved(model):
            model.train(backward)
            found = _measured(model, sample, batch, backward, device)
            if apart and found.peak:
                alone = _rows_alone(model, sample, batch, device) if backward else (found.peak, found.peak)
                found = replace(found, rows=alone[0] or found.peak, forward=alone[1])
            if growth and found.peak and ranks() == 1:
                seen = moments(model, sample, batch, backward=backward, device=device, peak=found.peak)
                found = replace(found, moments=seen)
    except torch.OutOfMemoryError:
        found = Probe(batch, 0.0, 0, 0, fits=False)
    except Exception as problem:
        if ranks() == 1:
            raise
        found = problem
    if device.type in EVENTS:
        torch.get_device_module(device).empty_cache()
    everyone = agreed(repr(found) if isinstance(found, Exception) else found)
    failed = next(((rank, what) for rank, what in enumerate(everyone) if isinstance(what, str)), None)
    if failed is not None:
        problem = RuntimeError(f"a probe of batch {batch} failed on rank {failed[0]}: {failed[1]}")
        raise problem from (found if isinstance(found, Exception) else None)
    fits = all(one.fits for one in everyone)
    return Probe(batch, max(p.seconds for p in everyone), max(p.peak for p in everyone),
                 max(p.kept for p in everyone), fits, max(p.rows for p in everyone),
                 max(p.forward for p in everyone), found.moments if isinstance(found, Probe) else ())  # fmt: skip


def _measured(model: nn.Module, sample: Sample, batch: int, backward: bool, device: torch.device) -> Probe:
    def step() -> None:
        sample.step(model, batch, backward=backward)
        for parameter in model.parameters():
            parameter.grad = None

    before = _allocated(device)
    first = wall_time(step, device) / 1e6  # compiles, and lets libraries take their workspaces
    _KEPT[device] = max(_KEPT.get(device, 0), _allocated(device) - before)
    kept = _KEPT[device] or (workspaces(device) if device.type in EVENTS else 0)
    peak = peak_memory(step, device) if device.type in ("cpu", *EVENTS) else 0
    times = [wall_time(step, device) for _ in range(1 if first > PATIENCE else TIMED)]
    return Probe(batch, statistics.median(times) / 1e6, peak, kept)


def _rows_alone(model: nn.Module, sample: Sample, batch: int, device: torch.device) -> tuple[int, int]:
    """(the peak of a step beyond parameters and their gradients, or 0 where there is no room for both; the peak of a
    forward)."""

    def run() -> Tensor:
        args, kwargs = sample.batched(batch)
        return loss_of(model(*args, **kwargs))

    forward = peak_memory(run, device)
    try:
        sample.step(model, batch)
        return peak_memory(lambda: sample.step(model, batch), device), forward
    except torch.OutOfMemoryError:
        return 0, forward


def _allocated(device: torch.device) -> int:
    return torch.get_device_module(device).memory_allocated(device) if device.type in EVENTS else 0
