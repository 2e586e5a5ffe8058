"""Ranks compare what they are about to compute, so that one with other arguments is an error on all of them."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping

from tilesmith.distributed.lost import RingError
from tilesmith.distributed.protocol import Ring
from tilesmith.distributed.signature import Signature

_MOST = 800  # letters of a text for other ranks: JSON takes at most two bytes for each


class Answer:
    """A comparison of signatures that goes on beside what this process does. The first call waits for it and raises
    what `Ring.agree` does.

    then: called when ranks agree. pending: whether nobody has waited yet; never, where a ring has no `ask` and compares
    at once.
    """

    def __init__(
        self, ring: Ring, signatures: Mapping[int, Signature], step: str, then: Callable[[], None] | None = None
    ):  # fmt: skip
        begin = getattr(ring, "ask", None)
        self.pending, self._agreed = begin is not None, False
        self._step, self._then = step, then
        if begin is None:
            ring.agree(signatures, step)
            self._end()
        else:
            self._wait: Callable[[], None] = begin(signatures, step)

    def __call__(self) -> None:
        if self.pending:
            self.pending, wait, self._wait = False, self._wait, nothing
            wait()
            self._end()
        elif not self._agreed:  # the error itself is not kept: its traceback holds tensors
            raise RingError(f"{self._step}: ranks did not agree about this call")

    @contextlib.contextmanager
    def awaited(self) -> Iterator[None]:
        """What is within may fail before it asks for the answer, which is then awaited all the same: ranks agree about
        how many calls there were."""
        try:
            yield
        except BaseException:
            with contextlib.suppress(RingError, ValueError, TypeError):
                self()
            raise
        self()

    def _end(self) -> None:
        self._agreed, then, self._then = True, self._then, None
        if then is not None:
            then()


def nothing() -> None:
    """Nobody is to be waited for."""


@contextlib.contextmanager
def refusals_told(ring: Ring, step: str) -> Iterator[None]:
    """Other processes' ranks, which would wait for this one in `agree`, raise there what is raised within."""
    try:
        yield
    except Exception as problem:
        if len(ring.ranks) < ring.size:
            with contextlib.suppress(RingError, ValueError, TypeError):
                ring.agree(dict.fromkeys(ring.ranks, refusal(problem)), step)
        raise


def shortened(text: str) -> str:
    """A text in ASCII that fits a message to other ranks."""
    return text.encode("ascii", "backslashreplace").decode()[:_MOST]


def refusal(problem: Exception) -> Signature:
    """The signature of a rank that cannot take part."""
    return {_REFUSED: type(problem).__name__, "text": shortened(str(problem))}


def refused(signature: Signature) -> bool:
    """Whether a signature is a refusal."""
    return _REFUSED in signature


_REFUSED = "refused"
_KINDS = {"ValueError": ValueError, "TypeError": TypeError}


def compare(signatures: Mapping[int, Signature], step: str) -> None:
    """Raise ValueError naming the first name whose values differ, and the ranks that have each value.

    Where ranks refuse, it is what the first of them raises, if that is a ValueError or a TypeError, else a RingError.
    """
    ranks = sorted(signatures)
    refusing = [r for r in ranks if refused(signatures[r])]
    if refusing:
        kind, text = signatures[refusing[0]][_REFUSED], signatures[refusing[0]]["text"]
        who = f"rank{'s' if len(refusing) > 1 else ''} {', '.join(map(str, refusing))}"
        raise _KINDS.get(kind, RingError)(f"{step}: refused on {who}: {'' if kind in _KINDS else kind + ': '}{text}")
    for name in signatures[ranks[0]]:  # rank 0's order, so that all ranks name the same one
        values: dict[str, list[int]] = {}
        for r in ranks:
            values.setdefault(repr(signatures[r].get(name)), []).append(r)
        if len(values) > 1:
            told = "; ".join(f"{value} on rank {', '.join(map(str, who))}" for value, who in values.items())
            raise ValueError(f"{step}: {name} must be the same on all ranks, got {told}")
