"""What ranks find out together, so that all of them decide alike."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tilesmith.distributed.comparison import shortened

Gather = Callable[[Any], list[Any]]  # all ranks' values of one object, by rank, over a channel of the hosts


class CannotShare(RuntimeError):
    """Why ranks have no memory in common; raised on all of them."""


def agreed(
    gather: Gather, make: Callable[[], Any], what: str, told: Callable[[Any], Any] = lambda made: None
) -> tuple[Any, list[Any]]:  # fmt: skip
    """What `make` makes here, and what `told` says of it on each rank, by rank.

    Raises CannotShare on all ranks where one cannot `what`.
    """
    made, why, said = None, "", None
    try:
        made = make()
        said = told(made)
    except Exception as problem:  # whatever the system, the driver or PyTorch says
        why = shortened(f"{type(problem).__name__}: {problem}")
    each = gather((why, said))
    failed = [f"rank {rank} cannot {what}: {why}" for rank, (why, _) in enumerate(each) if why]
    if failed:
        raise CannotShare("; ".join(failed))
    return made, [said for _, said in each]
