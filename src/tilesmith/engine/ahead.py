"""Ahead: kernels that will be launched soon are compiled by threads, beside the one that is compiled now.

With an empty cache, the first step of a model compiles some twenty kernels, the largest of which take seconds. So the
first run of a launcher begins with a rehearsal (`engine.rehearsal`): all its launches but the first, which compiles its
kernel itself, and those of the call's gradient are handed to a few threads. Three quarters of a compilation run without
the GIL (docs/log/host-time.md).

A thread does what Triton's own launch does before it loads a kernel: it fills Triton's caches, and needs no memory of
the device. The launch then goes its usual way and finds the kernel there. So a gradient that comes otherwise than
expected costs processor time, and an error is raised where the launch compiles again.
`TILESMITH_COMPILE_AHEAD=0` turns all of it off.
"""

from __future__ import annotations

import atexit
import logging
import os
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, wait
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor

from tilesmith.engine import launcher, releases, torch_private, triton_private
from tilesmith.engine.backends import interpreting
from tilesmith.engine.choice import by_metadata, choose, parse_pin
from tilesmith.engine.kernel import Kernel
from tilesmith.engine.rehearsal import rehearse
from tilesmith.hardware.detect import arch_of, assuming
from tilesmith.settings import settings

log = logging.getLogger("tilesmith")

MOST = 3  # and the launching thread: a quarter of a compilation holds the GIL

Work = Callable[[], None]
Works = list[tuple[tuple, Work]]  # keys of launches, and what compiles the kernel of each


class Threads:
    """Up to `most` threads, each of which ends when no work is left.

    They are daemons that `stop` joins: for others the interpreter would wait, at its end, until all work is done.
    """

    def __init__(self, most: int):
        self.most, self.stopped = most, False
        self.lock, self.process = threading.Lock(), os.getpid()
        self.waiting: deque[tuple[Future[None], Work]] = deque()
        self.running: set[threading.Thread] = set()
        atexit.register(self.stop)

    def submit(self, work: Work, at_once: bool = False) -> Future[None]:
        """Have a thread call `work`; at_once: before what else waits. What it raises is logged, and the result None."""
        future: Future[None] = Future()
        with self.lock:
            (self.waiting.appendleft if at_once else self.waiting.append)((future, work))
            if len(self.running) < self.most and not self.stopped:
                thread = threading.Thread(target=self._run, name="tilesmith-ahead", daemon=True)
                try:
                    thread.start()
                    self.running.add(thread)
                except RuntimeError:  # there may be no more threads: launches compile, as without any
                    log.debug("no thread could be started to compile ahead", exc_info=True)
        return future

    def stop(self) -> None:
        """Begin nothing more, and wait for what was begun."""
        if os.getpid() != self.process:  # forked, perhaps while the lock was held
            return
        with self.lock:
            self.stopped = True
            self.waiting.clear()
            running = list(self.running)
        for thread in running:
            thread.join()

    def settle(self) -> None:
        """Wait until nothing is left to do."""
        while True:
            with self.lock:
                running = list(self.running)
            if not running:
                return
            for thread in running:
                thread.join()

    def _run(self) -> None:
        while True:
            with self.lock:
                if not self.waiting:
                    self.running.discard(threading.current_thread())
                    return
                future, work = self.waiting.popleft()
            if not future.set_running_or_notify_cancel():
                continue
            try:
                work()
            except BaseException:
                log.debug("a kernel could not be compiled ahead", exc_info=True)
            future.set_result(None)


_seen: set[tuple] = set()


@cache
def _threads() -> Threads | None:
    """None where nothing is compiled ahead: it is off, there is one processor, or Triton is too old to have been tried
    with threads, or for AMD, with whose compiler it never was."""
    processors = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    if not settings().compile_ahead or processors < 2 or releases.too_old() or torch.version.hip or interpreting():
        return None
    return Threads(min(MOST, processors - 1))


def settle() -> None:
    """Wait until no kernel is compiled ahead: what is timed meanwhile shares the GIL with compilers."""
    threads = _threads()
    if threads is not None:
        threads.settle()


def _forget() -> None:
    """A forked process has none of the threads."""
    _threads.cache_clear()
    _seen.clear()
    launcher.awaited.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget)


def compile_rest(op: Any, kernel: Kernel, pin: str, ready: Any, args: tuple) -> None:
    """Have threads compile what the first run of `ready` launches after its first launch, and its gradient.

    ready: a kernel of `op` for one key of calls, on the current device. Calls that differ in the number of rows mostly
    launch the same kernels, so only the first of them is looked at.
    """
    threads = _threads()
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
    for key, work in reversed(works[1:]) if own else works:
        if key not in launcher.awaited:
            launcher.awaited[key] = partial(_until, threads.submit(work, at_once=own))


def _until(compiled: Future[None]) -> None:
    """Wait for a kernel; not where no thread has begun with it, and then none will: the launch compiles it."""
    if not compiled.cancel():
        wait([compiled])


def _works(fn: Callable[..., Any], args: tuple, device: torch.device) -> Works:
    """Of the launches of fn(*args), those whose kernels are not compiled, each once."""
    found: dict[tuple, Work] = {}

    def note(kernel: Any, grid: tuple[int, ...], args: tuple, named: dict[str, Any], cluster: int) -> None:
        key = launcher.uncompiled(kernel, args, named, cluster)
        if key is not None and key not in found:
            triton_private.have_cache(kernel, torch_private.current_device())
            found[key] = partial(_compile, device, kernel, args, named)

    rehearse(fn, args, arch_of(device), note)
    return list(found.items())


def _works_of_gradient(op: Any, pin: str, args: tuple, device: torch.device) -> Works:
    """The same of a call's gradient, as it usually is."""
    vjp, pin, arch = op.vjp, op.gradient.pin_of_vjp(pin), arch_of(device)
    if settings().tune or not by_metadata(vjp, device):  # measurements or trials decide, at the first call
        return []
    args = op.gradient_arguments(args, usual=True)
    with assuming(arch):
        # the architecture is asked in place of the device: nobody is told of a choice before its call
        kernel = choose(vjp, vjp.described(args, device, arch), pin, arch, args, ask=True).kernel
        if kernel.plans is None:
            return []
        configure, fields = getattr(kernel.fn, "configure", None), parse_pin(pin)[1]
        if configure is None:
            return _works(kernel.fn, args, device)
        config = configure.with_fields(args, fields, search=False) if fields else configure(args, search=False)
        return _works(partial(configure.fn, config=config), args, device)


def _compile(device: torch.device, kernel: Any, args: tuple, named: dict[str, Any]) -> None:
    with torch.cuda.device(device):
        triton_private.warm(kernel, args, named)
