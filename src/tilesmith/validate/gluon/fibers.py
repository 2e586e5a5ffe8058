"""Fibers, of which one runs at a time: threads that hand over to each other where they wait, in a drawn order."""

from __future__ import annotations

import contextlib
import random
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

OFTEN = 0.2  # how often a fiber that need not wait lets others run first
SPEEDS = (1.0, 1.0, 0.1, 0.01)  # of fibers, and of what is asynchronous: one is far behind where another has ended


class Deadlock(RuntimeError):
    """Every fiber waits for what no other will do."""


class _Ended(BaseException):
    """Raised in fibers that are not to go on, since another one failed."""


@dataclass(eq=False)
class Fiber:
    """body: what it runs. name: for errors. context: what it belongs to. number: from 1 to 126. waits: what it
    waits for, None where it may run; told: the same in words. products, stores, unwritten, copies: what it asked for
    and has not waited for. speed: how often it is chosen, beside others."""

    body: Callable[[], None]
    name: str
    context: Any
    number: int
    waits: Callable[[], bool] | None = None
    told: str = ""
    ended: bool = False
    products: list[Any] = field(default_factory=list)
    stores: list[Any] = field(default_factory=list)
    unwritten: list[Any] = field(default_factory=list)
    copies: list[Any] = field(default_factory=list)
    speed: float = 1.0
    turn: threading.Semaphore = field(default_factory=lambda: threading.Semaphore(0))
    thread: threading.Thread | None = None


class Fibers:
    """Runs fibers until all have ended. seed: of the order."""

    def __init__(self, seed: int):
        self.random = random.Random(seed)
        self.alive: list[Fiber] = []
        self.events: list[Callable[[], None]] = []  # asynchronous work that may happen at any time
        self.back = threading.Semaphore(0)
        self.problem: BaseException | None = None
        self.running: Fiber | None = None
        self.ending, self.started = False, 0
        self.speed = self.random.choice(SPEEDS)  # of events

    def start(self, body: Callable[[], None], name: str, context: Any) -> Fiber:
        self.started += 1
        fiber = Fiber(body, name, context, self.started % 126 + 1, speed=self.random.choice(SPEEDS))
        fiber.thread = threading.Thread(target=self._live, args=(fiber,), daemon=True)
        self.alive.append(fiber)
        fiber.thread.start()
        return fiber

    def _live(self, fiber: Fiber) -> None:
        fiber.turn.acquire()
        try:
            if not self.ending:
                fiber.body()
        except _Ended:
            pass
        except BaseException as problem:
            self.problem = self.problem or problem
        fiber.ended = True
        self.back.release()

    def later(self, event: Callable[[], None]) -> None:
        """Let something happen at any time from now on."""
        self.events.append(event)

    def wait(self, until: Callable[[], bool], told: str) -> None:
        """Called by the running fiber: go on when `until` holds."""
        fiber = self.running
        assert fiber is not None
        if until() and self.random.random() > OFTEN:
            return
        fiber.waits, fiber.told = until, told
        self.back.release()
        fiber.turn.acquire()
        fiber.waits = None
        if self.ending:
            raise _Ended

    def run(self, more: Callable[[], None] = lambda: None) -> None:
        """Until every fiber has ended, or one failed, whose error is raised. more: starts further fibers where there
        is room. Raises Deadlock."""
        try:
            while self.problem is None:
                more()
                ready = [f for f in self.alive if f.waits is None or f.waits()]
                choice = self._chosen(ready) if ready or self.events else -1
                if choice >= len(ready):
                    self.events.pop(choice - len(ready))()
                elif choice >= 0:
                    self._resume(ready[choice])
                elif self.alive:
                    raise Deadlock("; ".join(f"{f.name} waits for {f.told}" for f in self.alive))
                else:
                    return
            raise self.problem
        finally:
            self.ending = True
            for fiber in list(self.alive):
                self._resume(fiber)

    def _chosen(self, ready: list[Fiber]) -> int:
        """The number of a fiber, or behind these of an event."""
        speeds = [f.speed for f in ready] + [self.speed] * len(self.events)
        return self.random.choices(range(len(speeds)), speeds)[0]

    def _resume(self, fiber: Fiber) -> None:
        self.running = fiber
        fiber.turn.release()
        self.back.acquire()
        self.running = None
        if fiber.ended:
            self.alive.remove(fiber)


_at_work: list[Fibers] = []


@contextlib.contextmanager
def at_work(found: Fibers) -> Iterator[None]:
    """Inside, `fibers` gives these."""
    _at_work.append(found)
    try:
        yield
    finally:
        _at_work.pop()


def fibers() -> Fibers:
    """Those of the launch that runs."""
    return _at_work[-1]


def running() -> Fiber:
    """The fiber that runs."""
    found = fibers().running
    assert found is not None
    return found
