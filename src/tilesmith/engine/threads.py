"""Threads that compile kernels beside the calls, and how to wait until they have ended.

They stand apart from what gives them work (`engine.ahead`), so that timings can wait for them.
"""

from __future__ import annotations

import atexit
import logging
import os
import threading
from collections.abc import Callable
from concurrent.futures import Future
from functools import cache

import torch

from tilesmith.engine import releases
from tilesmith.engine.backends import interpreting
from tilesmith.settings import settings

log = logging.getLogger("tilesmith")

MOST = 5  # and the launching thread: a sixth of the work holds the GIL (docs/log/host-time.md)

Work = Callable[[], None]


class Threads:
    """Up to `most` threads, each of which ends when no work is left.

    They are daemons that `stop` joins: for others the interpreter would wait, at its end, until all work is done.
    """

    def __init__(self, most: int):
        self.most, self.stopped = most, False
        self.lock, self.process = threading.Lock(), os.getpid()
        self.waiting: list[tuple[tuple[bool, int], Future[None], Work]] = []
        self.running: set[threading.Thread] = set()
        atexit.register(self.stop)

    def submit(self, work: Work, at_once: bool = False, size: int = 0) -> Future[None]:
        """Have a thread call `work`; at_once: before what else waits. size: of the work, the largest of which is done
        first, so that none is left for the end. What it raises is logged, and the result None."""
        future: Future[None] = Future()
        with self.lock:
            self.waiting.append(((at_once, size), future, work))
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
                first = max(self.waiting, key=lambda waiting: waiting[0])
                self.waiting.remove(first)
                _, future, work = first
            if not future.set_running_or_notify_cancel():
                continue
            try:
                work()
            except BaseException:
                log.debug("a kernel could not be compiled ahead", exc_info=True)
            future.set_result(None)


@cache
def compilers() -> Threads | None:
    """None where nothing is compiled ahead: it is off, there is one processor, or Triton is too old to have been tried
    with threads, or for AMD, with whose compiler it never was."""
    processors = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    if not settings().compile_ahead or processors < 2 or releases.too_old() or torch.version.hip or interpreting():
        return None
    return Threads(min(MOST, processors - 1))


def settle() -> None:
    """Wait until none compiles: what is timed meanwhile shares the GIL with them."""
    threads = compilers()
    if threads is not None:
        threads.settle()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=compilers.cache_clear)  # a forked process has none of the threads
