"""Replay: what a kernel's launcher did for one set of shapes, done again without asking.

A launcher decides from shapes, strides and plain arguments, all of which are the key under which the op keeps its
repeat calls. So the second call of a key is recorded (`engine.recording`), and a function is generated that does just
what it did.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from tilesmith.engine.recording import Part, Recorder, recording
from tilesmith.engine.written import written

_deterministic = torch._C._get_deterministic_algorithms
_any_autocast = torch._C._is_any_autocast_enabled
_current_device = torch._C._cuda_getDevice if torch.cuda._is_compiled() else None
# Inductor's allocator: without the dispatcher, a third of the time of torch.empty_strided
_empty_cuda = getattr(torch._C._dynamo.guards, "_empty_strided_cuda", None)


class Ready:
    """A kernel for one key of repeat calls. run: what runs it; way: connects its calls to autograd, None where no
    argument asks for a gradient; alone: the same kernel told to make public outputs alone, None where it cannot."""

    def __init__(self, run: Callable[..., Any]):
        self.run, self.way, self.alone = run, None, None

    def told(self) -> list[str]:
        """What `explain` says of repeated calls."""
        return []


class Replay(Ready):
    """A kernel on a CUDA device: runs its launcher, records the second run, repeats that from then on.

    fn: the configured launcher. free: whether nothing forbids a replay now; None: never replayed. device: index.
    """

    def __init__(self, fn: Callable[..., Any], free: Callable[[], bool] | None, device: int):
        super().__init__(self._launch)
        self.fn, self.free, self.device = fn, free, device
        self.calls, self.refusal = 0, ""

    def told(self) -> list[str]:
        if self.refusal:
            return [f"each call runs its launcher, which is not replayed: {self.refusal}"]
        return [] if self.run == self._launch else ["replayed: repeated calls allocate and launch, and decide nothing"]

    def _launch(self, *args: Any) -> Any:
        if _current_device() != self.device:
            with torch.cuda.device(self.device):
                return self.run(*args)
        if self.free is None or not self.free():
            return self.fn(*args)
        self.calls += 1
        if self.calls != 2 or _empty_cuda is None:
            return self.fn(*args)
        with recording(args) as record:
            out = self.fn(*args)
        results, self.refusal = record.results(out), record.refusal
        if not self.refusal:
            self.run = _generate(record, results, isinstance(out, tuple | list), self)
        return out


def _empty(shape: tuple[int, ...], stride: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    return torch.empty_strided(shape, stride, dtype=dtype, device="cuda")


def _generate(record: Recorder, results: list[Part | None], many: bool, kernel: Replay) -> Callable[..., Any]:
    """The function of a launcher's arguments that allocates, launches and returns as the recorded run did, and leaves
    that to the launcher while another device is current or something forbids a replay."""
    parameters = ", ".join(record.parameters)
    autocast = " or autocast()" if record.computes else ""  # which would cast an operation's arguments
    lines = [
        f"if device() != {kernel.device} or not free(){autocast}: return launch({parameters})",
        "empty = filled if deterministic() else fast",
    ]
    last = {name: index for index, step in enumerate(record.steps) for name in step.used}
    kept = {r.name for r in results if r is not None} | set(record.parameters)
    for index, step in enumerate(record.steps):
        if step.result in record.allocated and step.result not in last and step.result not in kept:
            continue  # stood for nothing
        lines.append(step.line(record))
        spent = sorted(n for n in {*step.used} if last[n] == index and n not in kept)
        if spent:  # as early as the launcher can have freed it
            lines.append(f"del {', '.join(spent)}")
    listed = ", ".join("None" if r is None else record.expression(r, f"{r.name}_out") for r in results)
    lines.append(f"return ({listed},)" if many else f"return {listed}")
    likes = {f"{n}_like": record.memory[n][1:] for n in record.allocated}
    constants = record.constants | likes | {
        "device": _current_device, "free": kernel.free, "launch": kernel._launch, "deterministic": _deterministic,
        "filled": _empty, "fast": _empty_cuda, "stream": torch._C._cuda_getCurrentRawStream, "autocast": _any_autocast,
    }  # fmt: skip
    return written(f"replay({parameters})", lines, "replay", constants)
