"""Rehearsal: what a call will launch, found by running its launcher on tensors without memory.

A launcher is where the device kernels of a call are chosen. Asked this way it gives the same answer as in the call
itself, so there is no second statement of the choice that could be wrong. Nothing is allocated, computed or launched.
"""

from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tilesmith.engine import launcher, torch_private
from tilesmith.hardware.detect import Arch, arch_of, assuming

_UNSAID = ("num_warps", "enable_fp_fusion")


class Launch(NamedTuple):
    """One launch. kernel: the name of its device kernel. grid: its CTAs. constants: constexprs and launch options that
    the launcher gave by name, and the cluster's size."""

    kernel: str
    grid: tuple[int, ...]
    constants: Mapping[str, Any]

    @classmethod
    def of(cls, kernel: Any, grid: tuple[int, ...], named: Mapping[str, Any], cluster: int) -> Launch:
        constants = {n: value for n, value in named.items() if n.isupper() or n not in kernel.arg_names}
        return cls(kernel.__name__, tuple(grid), constants | ({"cluster": cluster} if cluster > 1 else {}))

    def __str__(self) -> str:
        size = " x ".join(str(n) for n in self.grid if n != 1) or "1"
        warps = self.constants.get("num_warps")
        of_warps = f" of {warps} warp{'s' * (warps > 1)}" if warps else ""
        told = {n: c for n, c in self.constants.items() if n not in _UNSAID and c is not False and c is not None}
        constants = ", ".join(n if c is True else f"{n} {getattr(c, '__name__', c)}" for n, c in told.items())
        return f"{self.kernel} on {size} CTA{'s' * (size != '1')}{of_warps}" + (f" ({constants})" if constants else "")


class Rehearsal(NamedTuple):
    """The plan of a call. steps: its launches in order; None where the launcher cannot be run without memory, and why
    in `problem`. reasons: what the kernel tells of them, asked only when the plan is shown."""

    steps: tuple[Launch, ...] | None
    reasons: Callable[[], Sequence[str]]
    problem: str = ""

    def lines(self) -> list[str]:
        """The plan as `explain` prints it."""
        if self.steps is None:
            return [f"its launches are not known before the call: {self.problem}", *self.reasons()]
        times = Counter(str(step) for step in self.steps)
        turns = [step + (f", {many} times" if many > 1 else "") for step, many in times.items()]
        return [*(f"{number}. {turn}" for number, turn in enumerate(turns, 1)), *self.reasons()]


def launches_of(fn: Callable[..., Any], args: tuple, arch: Arch) -> list[Launch]:
    """What fn(*args) would launch on `arch`, in order."""
    found: list[Launch] = []

    def note(kernel: Any, grid: tuple[int, ...], args: tuple, named: dict[str, Any], cluster: int) -> None:
        found.append(Launch.of(kernel, grid, named, cluster))

    rehearse(fn, args, arch, note)
    return found


def rehearse(fn: Callable[..., Any], args: tuple, arch: Arch, note: Callable[..., None]) -> None:
    """Run fn on tensors like `args` without memory; note(kernel, grid, arguments, named ones, cluster) is called in
    place of each launch. Raises what fn raises, as where it reads values."""
    made: dict[int, Tensor] = {}  # one tensor as two arguments stays one
    with torch_private.without_modes(), torch.no_grad(), assuming(arch), launcher.in_place_of_launches(note):
        fn(*(_without_memory(a, made) for a in args))


def _without_memory(value: Any, made: dict[int, Tensor]) -> Any:
    if isinstance(value, tuple | list):
        return type(value)(_without_memory(v, made) for v in value)
    if not isinstance(value, Tensor):
        return value
    if id(value) not in made:
        made[id(value)] = _alike(value)
    return made[id(value)]


def _alike(x: Tensor) -> Tensor:
    """A tensor on meta of x's shape, strides and dtype, whose address is as far behind a multiple of 16 bytes."""
    plain = type(x) in (Tensor, torch.nn.Parameter)  # others may have no address
    offset = x.data_ptr() % 16 // x.element_size() if plain else 0
    size = offset + 1 + sum((n - 1) * step for n, step in zip(x.shape, x.stride()) if n > 0)
    return torch.empty(size, dtype=x.dtype, device="meta").as_strided(x.shape, x.stride(), offset)


def rehearsed(fn: Callable[..., Any], tells: Callable[..., Sequence[str]]) -> Callable[..., Rehearsal]:
    """The `plans` of a registered kernel whose device kernels all go through `engine.launch`. tells: the kernel's own,
    asked for the reasons."""

    def plan(run: Callable[..., Any], args: tuple, arch: Arch | None, **said: Any) -> Rehearsal:
        arch = arch or arch_of(next(a.device for a in args if isinstance(a, Tensor)))
        wanted = inspect.signature(tells).parameters
        given = {name: value for name, value in {**said, "arch": arch}.items() if name in wanted}
        reasons = partial(tells, *args, **given)
        try:
            return Rehearsal(tuple(launches_of(run, args, arch)), reasons)
        except Exception as problem:  # whatever it is, a call that could be served must not end here
            words = " ".join(str(problem).replace(";", ",").split())
            return Rehearsal(None, reasons, f"{type(problem).__name__}: {words}")

    configure = getattr(fn, "configure", None)
    if configure is None:
        return lambda *args, arch=None: plan(fn, args, arch)
    return lambda *args, config, arch=None: plan(partial(configure.fn, config=config), args, arch, config=config)
