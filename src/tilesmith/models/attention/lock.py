"""A reader-writer lock of a model. A forward that is asked for attention weights changes the model's configurations,
which forwards in other threads read."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from typing import Any


class ReaderWriterLock:
    """A reentrant reader-writer lock: many threads at once inside `shared`, or one inside `exclusive`, which may be
    inside `shared` as well, whichever it entered first. Who waits for `exclusive` goes before those who come to
    `shared` later.

    Copies and pickles of a model get a lock of their own.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._inside: dict[int, int] = {}  # thread -> how often it is inside `shared`
        self._exclusive: int | None = None
        self._depth = self._waiting = 0
        self._both = False  # whether a thread inside `shared` waits for `exclusive`

    def __reduce__(self) -> tuple[Any, ...]:
        return ReaderWriterLock, ()

    @contextlib.contextmanager
    def shared(self) -> Iterator[None]:
        """Inside, no other thread is inside `exclusive`."""
        me = threading.get_ident()
        with self._changed:
            while (self._waiting or self._exclusive is not None) and me not in self._inside and me != self._exclusive:
                self._changed.wait()
            self._inside[me] = self._inside.get(me, 0) + 1
        try:
            yield
        finally:
            with self._changed:
                left = self._inside.pop(me) - 1
                if left:
                    self._inside[me] = left
                self._changed.notify_all()

    @contextlib.contextmanager
    def exclusive(self) -> Iterator[None]:
        """Inside, no other thread is in here. Two threads inside `shared` that both ask for this would deadlock, so the
        second does not wait, and the two are inside together."""
        me = threading.get_ident()
        with self._changed:
            self._wait_for_others(me)
            before, self._exclusive = self._exclusive, me
            self._depth += 1
        try:
            yield
        finally:
            with self._changed:
                self._depth -= 1
                self._exclusive = before if self._depth else None
                self._changed.notify_all()

    def _wait_for_others(self, me: int) -> None:
        within = me in self._inside and me != self._exclusive
        if within and self._both:
            return
        self._both, self._waiting = self._both or within, self._waiting + 1
        try:
            while self._exclusive not in (None, me) or any(other != me for other in self._inside):
                self._changed.wait()
        finally:
            self._both, self._waiting = self._both and not within, self._waiting - 1
            self._changed.notify_all()
