"""Replay: repeats what a kernel's launcher did for one set of shapes, without running the launcher.

A launcher decides from shapes, strides and plain arguments, all of which are the key under which the op keeps its
repeat calls. So the second call of a key is recorded (`engine.recording`), and a function is generated that does just
what it did.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from tilesmith.engine import torch_private
from tilesmith.engine.recording import Part, Recorder, recording
from tilesmith.engine.written import written
from tilesmith.settings import settings

_current_device = torch_private.current_device
_empty_cuda = torch_private.empty_cuda


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
    name: of the op and its backend, for errors. before: called with this object and the arguments of the first run,
    before it; None: nothing is.
    """

    def __init__(
        self,
        fn: Callable[..., Any],
        free: Callable[[], bool] | None,
        device: int,
        name: str = "a launcher",
        before: Callable[[Replay, tuple], None] | None = None,
    ):
        super().__init__(self._launch)
        self.fn, self.free, self.device, self.name, self.before = fn, free, device, name, before
        self.calls, self.refusal, self.mode = 0, "", settings().replay

    def told(self) -> list[str]:
        if self.mode == "0":
            return ["each call runs its launcher: TILESMITH_REPLAY=0"]
        if self.refusal:
            return [f"each call runs its launcher, which is not replayed: {self.refusal}"]
        return [] if self.run == self._launch else ["replayed: repeated calls allocate and launch, and decide nothing"]

    def _launch(self, *args: Any) -> Any:
        if _current_device() != self.device:
            with torch.cuda.device(self.device):
                return self.run(*args)
        if self.before is not None:
            before, self.before = self.before, None
            before(self, args)
        if self.free is None or self.mode == "0" or not self.free():
            return self.fn(*args)
        self.calls += 1
        if self.calls != 2 or torch_private.DispatchMode is None:
            return self.fn(*args)
        with recording(args) as record:
            out = self.fn(*args)
        results, self.refusal = record.results(out), record.refusal
        if not self.refusal:
            again = _generate(record, results, isinstance(out, tuple | list), self)
            self.run = again if self.mode == "1" else partial(_beside, self, again)
        return out


def _beside(kernel: Replay, again: Callable[..., Any], *args: Any) -> Any:
    """What a replay returns, if the launcher gives the same. A launcher whose own runs differ, as those that add up in
    any order do, may differ from its replay by eight times as much.

    Raises RuntimeError where they differ.
    """
    given = [a.clone() if isinstance(a, Tensor) else a for a in args]

    def run(fn: Callable[..., Any]) -> tuple[Any, list[Tensor]]:
        for a, before in zip(args, given):
            if isinstance(a, Tensor) and not _same(a, before):  # an earlier run has written to it
                a.detach().copy_(before)
        out = fn(*args)
        outs = out if isinstance(out, tuple | list) else (out,)
        return out, [t.clone() for t in (*outs, *args) if isinstance(t, Tensor)]

    _, first = run(kernel.fn)
    _, second = run(kernel.fn)
    out, replayed = run(again)
    for place, (a, b, c) in enumerate(zip(first, second, replayed)):
        if not _same(a, c):
            apart, allowed = _distance(a, c), 8 * _distance(a, b)
            if not apart <= allowed:
                raise RuntimeError(
                    f"{kernel.name}: its replay differs from its launcher in tensor {place} of its results and "
                    f"arguments, {tuple(a.shape)}, by {apart:g} (the launcher's own runs: {allowed / 8:g})"
                )
    return out


def _same(a: Tensor, b: Tensor) -> bool:
    return torch.equal(a, b) or (a.is_floating_point() and torch.allclose(a, b, rtol=0, atol=0, equal_nan=True))


def _distance(a: Tensor, b: Tensor) -> float:
    """The largest difference; NaN where just one is NaN or infinite."""
    same = (a == b) | (a.isnan() & b.isnan())
    return torch.where(same, 0.0, a.double() - b.double()).abs().max().item() if a.numel() else 0.0


def _generate(record: Recorder, results: list[Part | None], many: bool, kernel: Replay) -> Callable[..., Any]:
    """The function of a launcher's arguments that allocates, launches and returns as the recorded run did, and leaves
    that to the launcher while another device is current or something forbids a replay, and for two tensors in place of
    one that came twice: the steps name the first alone."""
    parameters = ", ".join(record.parameters)
    autocast = " or autocast()" if record.computes else ""  # which would cast an operation's arguments
    apart = "".join(f" or {b} is not {a}" for a, b in record.same)
    lines = [
        f"if device() != {kernel.device} or not free(){autocast}{apart}: return launch({parameters})",
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
        "device": _current_device, "free": kernel.free, "launch": kernel._launch,
        "deterministic": torch_private.deterministic, "filled": torch_private.empty_strided, "fast": _empty_cuda,
        "stream": torch_private.raw_stream, "autocast": torch_private.any_autocast,
    }  # fmt: skip
    return written(f"replay({parameters})", lines, "replay", constants)
