"""Releases a GPU that waits for a lost rank, and says which rank that is.

A stream that awaits a word of memory has no time limit. So a thread looks, while exchanges are under way, whether the
oldest of them still waits for another rank. After the time limit it says which rank that is, fills what should have
arrived with NaN, and writes the words itself, so that the GPU goes on: results of the call are NaN, its memory can be
freed, and each later call raises the error.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from tilesmith.distributed.signals import CLOSED, OPEN, SLOTS, Signals

PERIOD = 0.5  # seconds between two looks at most
SHARE = 16  # looks in a time limit at least
_SOON = 0.001  # seconds between looks while the GPU is let go on
_PASSING = 0.05  # seconds in which a stream that has passed a gate has told so
log = logging.getLogger("tilesmith")


class UnderWay(NamedTuple):
    """An exchange that was posted. Events: `begun`, this rank waits for others from then on; `arrived`; `done`, others
    have read. into: memory of what arrives, (address, bytes)."""

    turn: int
    slot: int
    step: str
    timeout: float
    begun: Any
    arrived: Any
    done: Any
    sources: Sequence[int]
    readers: Sequence[int]
    into: Sequence[tuple[int, int]]


class Watch:
    """Looks after the exchanges of one rank, which end in the order in which they are posted.

    signals: its flags. lost: (peer, step, problem, seconds waited, time limit) to what the error says. broken: that
    text, once a rank is lost; empty before.
    """

    def __init__(self, signals: Signals, lost: Callable[[int, str, str, float, float], str]):
        self.signals, self.broken, self._lost = signals, "", lost
        self._under_way: deque[UnderWay] = deque()
        self._since: float | None = None  # when the oldest exchange was seen to wait
        self._wake, self._ended = threading.Event(), threading.Event()
        self._asleep, self._thread = True, None

    def follow(self, exchange: UnderWay) -> None:
        """Look after an exchange."""
        self._under_way.append(exchange)
        if self._asleep:
            self._asleep = False
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="tilesmith exchanges", daemon=True)
                self._thread.start()
            self._wake.set()

    @property
    def idle(self) -> bool:
        """Whether nothing is under way."""
        try:
            return self._under_way[-1].done.query()
        except IndexError:
            return True

    def end(self) -> None:
        """Wait for what is under way, at most for its time limit, and look no longer."""
        if self._thread is None:
            return
        if self._thread is threading.current_thread():  # which let go of the last reference to a group
            self._let_through()
        limit = max((one.timeout for one in list(self._under_way)), default=0.0)
        until = time.monotonic() + limit * (1 + 1 / SHARE) + 1.0
        while self._thread.is_alive() and not self.idle and time.monotonic() < until:
            time.sleep(_SOON)
        self._ended.set()
        self._wake.set()
        if self._thread is not threading.current_thread():
            self._thread.join(PERIOD)

    def _run(self) -> None:
        try:
            self.signals.begin_thread()
            while not self._ended.is_set():
                pause = self._looked()
                if self._ended.wait(pause) or self._under_way or self._began_since():
                    continue
                self._wake.wait()
                self._wake.clear()
                self._ended.wait(PERIOD / SHARE)  # not in the way of the call that woke this thread
        except Exception as problem:  # whatever CUDA says, which it then says to all
            self.broken = self.broken or f"exchanges cannot be watched: {type(problem).__name__}: {problem}"
            log.error("%s", self.broken)
            with contextlib.suppress(Exception):  # the GPU may still listen
                self._let_through()

    def _began_since(self) -> bool:
        """Fall asleep, unless an exchange came meanwhile."""
        self._asleep = True
        if not self._under_way:
            return False
        self._asleep = False
        return True

    def _looked(self) -> float:
        """Look at what is under way; seconds until the next look."""
        self._forget_ended()
        if not self._under_way:
            return PERIOD
        if self.broken:
            self._let_through()
            return 0.0
        oldest = self._under_way[0]
        pause = min(oldest.timeout / SHARE, PERIOD)
        if not oldest.begun.query():
            self._since = None
            return pause
        now = time.monotonic()
        self._since = now if self._since is None else self._since
        waited = now - self._since
        if waited < oldest.timeout:
            return min(pause, oldest.timeout - waited)
        late, unread, _ = self.signals.late(oldest.turn, oldest.sources, oldest.readers)
        if not (late or unread) or oldest.done.query():
            return pause
        what = "it sent nothing" if late else "it did not read what this rank sent"
        self.broken = self._lost((late or unread)[0], oldest.step, what, waited, oldest.timeout)
        log.error("%s", self.broken)
        self._let_through()
        return 0.0

    def _forget_ended(self) -> None:
        while self._under_way and self._under_way[0].done.query():
            self._under_way.popleft()
            self._since = None

    def _let_through(self) -> None:
        """Nothing that is under way waits for others any longer, and what it should bring is NaN.

        Closed gates hold the stream between its last copy and the event that tells of the arrival, so that no copy
        follows the NaN and nobody reads before.
        """
        for slot in range(SLOTS):
            self.signals.set_gate(slot, CLOSED)
        while self._under_way and not self._ended.is_set():
            one = self._under_way[0]
            late, unread, copied = self.signals.late(one.turn, one.sources, one.readers)
            self.signals.let_through(one.turn, late, unread)
            if one.sources and copied and not one.arrived.query():
                self._spoil(one)
            self._forget_ended()
            time.sleep(_SOON)

    def _spoil(self, one: UnderWay) -> None:
        """NaN for an exchange whose copies are over."""
        time.sleep(_PASSING)
        if one.arrived.query():  # its gate was not closed in time: what was copied is what was sent
            return
        self.signals.fill(one.into)
        self.signals.set_gate(one.slot, OPEN)
        while not (one.arrived.query() or self._ended.is_set()):
            time.sleep(_SOON)
        self.signals.set_gate(one.slot, CLOSED)
