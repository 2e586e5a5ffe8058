"""Which rank failed first, where ranks of a group lose contact.

A rank that gives up leaves the call: gloo closes its connections, and its host's channel says so. Ranks that wait for
it then lose it in turn, though it is not the one that died. So each rank that gives up writes for which rank it waited
into the group's store, which outlives the connections.
"""

from __future__ import annotations

import contextlib
import json
import threading
import time
from typing import NamedTuple

import torch.distributed as dist

PATIENCE = 0.5  # seconds: connections close some milliseconds before the rank that closed them says why
_KEY = "tilesmith/lost"


class RingError(RuntimeError):
    """A transfer or a comparison between ranks that failed; the message names the rank, its peer and the step."""


class Loss(NamedTuple):
    """A rank gave up on `peer` in `step`; number: of the loss, in the order in which ranks of the group told theirs."""

    number: int
    peer: int
    step: str


def told(
    group: dist.ProcessGroup | None, rank: int, size: int, step: str, peer: int, problem: object, waited: float,
    limit: float,
) -> str:  # fmt: skip
    """What the error of a rank says that waited in vain for `peer`, -1 for one that is not known."""
    who = "its peers" if peer < 0 else f"rank {peer}"
    if peer >= 0 and size > 2 and group is not None:
        gone, by, where = cause(group, rank, peer, step)
        if (gone, by) != (peer, rank):
            who = f"rank {peer} gave up: in '{where}' of rank {by} rank {gone}"
    return (
        f"rank {rank}: {step}: {who} did not answer ({waited:.1f} s, limit {limit:g} s); it has died, stalled or made "
        f"another call: {problem}"
    )


def cause(group: dist.ProcessGroup, rank: int, peer: int, step: str) -> tuple[int, int, str]:
    """(the rank that is lost, who waited for it, in which step), for a rank that gives up on `peer`. Tells the others.

    Takes at most `PATIENCE`, also where the store is gone; then it is `peer`.
    """
    losses: dict[int, Loss] = {}
    # a store whose host is gone may never answer
    asking = threading.Thread(target=_follow, args=(group, rank, peer, step, losses), daemon=True)
    asking.start()
    asking.join(PATIENCE)
    known = dict(losses)
    return _end(known, rank) if rank in known else (peer, rank, step)


def _follow(group: dist.ProcessGroup, rank: int, peer: int, step: str, losses: dict[int, Loss]) -> None:
    until = time.monotonic() + PATIENCE
    with contextlib.suppress(RuntimeError):
        store = group.get_group_store()
        losses[rank] = Loss(store.add(_KEY, 1), peer, step)
        store.set(f"{_KEY}/{rank}", json.dumps(losses[rank]))
        while peer not in losses:
            while not store.check([f"{_KEY}/{peer}"]):
                if time.monotonic() > until:
                    return
                time.sleep(0.01)
            losses[peer] = Loss(*json.loads(store.get(f"{_KEY}/{peer}")))
            peer = losses[peer].peer


def _end(losses: dict[int, Loss], rank: int) -> tuple[int, int, str]:
    """Where the losses lead from a rank's own: to a rank that tells none, or round a circle."""
    path = [rank]
    while losses[path[-1]].peer in losses and losses[path[-1]].peer not in path:
        path.append(losses[path[-1]].peer)
    last = losses[path[-1]]
    if last.peer in path:  # who told last had been given up before: it came late, and found the others gone
        circle = path[path.index(last.peer) :]
        late = max(circle, key=lambda r: losses[r].number)
        waited = circle[circle.index(late) - 1]
        return late, waited, losses[waited].step
    return last.peer, path[-1], last.step
