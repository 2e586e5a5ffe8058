"""Ahead: threads compile the kernels that will be launched next, while the calling thread compiles the first.

With an empty cache, the first step of a model compiles some twenty kernels, the largest of which take seconds. So the
first run of a launcher begins with a rehearsal (`engine.rehearsal`): all its launches but the first, which compiles its
kernel itself, and those of the call's gradient are handed to a few threads. Five sixths of the work run without the GIL
(docs/log/host-time.md). `models.first_step` finds calls before they are made.

A thread does what Triton's own launch does before it loads a kernel: it fills Triton's caches, and needs no memory of
the device. The launch then goes its usual way and finds the kernel there. So a gradient that comes otherwise than
expected costs processor time, and an error is raised where the launch compiles again.
`TILESMITH_COMPILE_AHEAD=0` turns all of it off.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from concurrent.futures import Future, wait
from functools import partial
from typing import Any

import torch
from torch import Tensor

from tilesmith.engine import launcher, torch_private, triton_private
from tilesmith.engine.choice import by_metadata, choose
from tilesmith.engine.kernel import Kernel
from tilesmith.engine.pins import parse_pin
from tilesmith.engine.rehearsal import rehearse
from tilesmith.engine.threads import Threads, compilers
from tilesmith.hardware.detect import arch_of, assuming
from tilesmith.settings import settings

log = logging.getLogger("tilesmith")

Works = list[tuple[tuple, partial[None]]]  # keys of launches, and the `_compile` of each


_seen: set[tuple] = set()


def _forget() -> None:
    """A forked process has none of the threads."""
    _seen.clear()
    launcher.awaited.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget)


def compile_rest(op: Any, kernel: Kernel, pin: str, ready: Any, args: tuple) -> None:
    """Have threads compile what the first run of `ready` launches after its first launch, and its gradient.

    ready: a kernel of `op` for one key of calls, on the current device. Calls that differ in the number of rows mostly
    launch the same kernels, so only the first of them is looked at.
    """
    threads = compilers()
    if threads is None or torch.cuda.is_current_stream_capturing():
        return
    first = next(a for a in args if isinstance(a, Tensor))
    kinds = tuple(a.dtype if isinstance(a, Tensor) else None for a in args)
    needs = ready.way.needs if ready.way is not None else ()
    seen = (op.name, kernel.backend, pin, first.device, first.shape[-1:], kinds, needs)
    if seen in _seen:
        return
    _seen.add(seen)
    with torch_private.without_modes(), torch.no_grad():
        if kernel.plans is not None:
            _submit(threads, partial(_works, ready.fn, args, first.device), own=True)
        if ready.way is not None and ready.way.back is not None:
            _submit(threads, partial(_works_of_gradient, op, ready.way.pin, args, first.device))


def _submit(threads: Threads, find: Callable[[], Works], own: bool = False) -> None:
    """own: the launches of the call itself, before those of gradients and without the first."""
    try:
        works = find()
    except Exception:  # whatever it is, a call that could be served must not end here
        log.debug("what a call will launch is not known", exc_info=True)
        return
    for key, work in works[1:] if own else works:
        if key not in launcher.awaited:
            size = triton_private.code_size(work.args[1])
            launcher.awaited[key] = partial(_until, threads.submit(work, at_once=own, size=size))


def _until(compiled: Future[None]) -> None:
    """Wait for a kernel; not where no thread has begun with it, and then none will: the launch compiles it."""
    if not compiled.cancel():
        wait([compiled])


def _works(fn: Callable[..., Any], args: tuple, device: torch.device) -> Works:
    """Of the launches of fn(*args), those whose kernels are not compiled, each once."""
    found: dict[tuple, partial[None]] = {}

    def note(kernel: Any, grid: tuple[int, ...], args: tuple, named: dict[str, Any], cluster: int) -> None:
        key = launcher.uncompiled(kernel, args, named, cluster)
        if key is not None and key not in found:
            triton_private.have_cache(kernel, torch_private.current_device())
            found[key] = partial(_compile, device, kernel, args, named)

    rehearse(fn, args, arch_of(device), note)
    return list(found.items())


def compile_call(op: Any, pin: str, args: tuple, device: torch.device, gradient: bool) -> None:
    """Have threads compile what a call that will come launches, and, with `gradient`, what its gradient does.

    args: of the call, on meta: of its tensors' shapes, strides, alignment and `requires_grad`. device: where it will be
    made, the current one.
    """
    threads = compilers()
    if threads is None:
        return
    with torch_private.without_modes(), torch.no_grad():
        _submit(threads, partial(_works_by_choice, op, pin, args, device))
        if gradient and op.gradient is not None and op.gradient.plan is not None and not op.gradient.refusal:
            _submit(threads, partial(_works_of_gradient, op, pin, args, device))


def _works_of_gradient(op: Any, pin: str, args: tuple, device: torch.device) -> Works:
    """The same of a call's gradient, as it usually is."""
    given = op.gradient.arguments(args, usual=True)
    return _works_by_choice(op.vjp, op.gradient.pin_of_vjp(pin), given, device)


def _works_by_choice(op: Any, pin: str, args: tuple, device: torch.device) -> Works:
    """The same of a call whose kernel has not been chosen yet."""
    if settings().tune or not by_metadata(op, device):  # measurements or trials decide, at the first call
        return []
    arch = arch_of(device)
    with assuming(arch):
        # the architecture is asked in place of the device: nobody is told of a choice before its call
        kernel = choose(op, op.described(args, device, arch), pin, arch, args, ask=True).kernel
        if kernel.plans is None:
            return []
        configure = getattr(kernel.fn, "configure", None)
        if configure is None:
            return _works(kernel.fn, args, device)
        config = configure.with_fields(args, parse_pin(pin)[1], search=False)
        return _works(partial(configure.fn, config=config), args, device)


def _compile(device: torch.device, kernel: Any, args: tuple, named: dict[str, Any]) -> None:
    with torch.cuda.device(device):
        triton_private.warm(kernel, args, named)
