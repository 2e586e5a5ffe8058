"""How tensors travel between ranks: the `Ring` protocol, over torch.distributed or within one process."""

from __future__ import annotations

import contextlib
import datetime
import json
import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from tilesmith.distributed.lost import cause
from tilesmith.distributed.peer_memory import Arrival, CannotShare, PeerMemory
from tilesmith.distributed.schedule import Moves
from tilesmith.distributed.signature import Signature, Signed
from tilesmith.engine.argument_checks import flag, located

Tokens = Mapping[int, Sequence[Tensor]]  # of each rank, tensors [T, B, heads, D]
log = logging.getLogger("tilesmith")


class RingError(RuntimeError):
    """A transfer or a comparison that did not come about; the message names the rank, its peer and the step."""


@dataclass(frozen=True)
class Parcel:
    """A tensor on its way. give: on the rank `source`, any strides; take: on the rank `target`, contiguous, the same
    shape. None where the other side is elsewhere."""

    source: int
    target: int
    give: Tensor | None
    take: Tensor | None


class Ring(Protocol):
    """Transport between `size` ranks, of which `ranks` live in this process.

    Parcels between two ranks arrive in the order in which both post them.
    """

    size: int
    ranks: tuple[int, ...]

    def post(self, parcels: Sequence[Parcel], step: str) -> Any:
        """Begin to move parcels that this process sends or receives; what `wait` takes."""

    def wait(self, posted: Any) -> None:
        """Let what this process computes next come after the parcels' arrival. Raises RingError."""

    def agree(self, signatures: Mapping[int, Signature], step: str) -> None:
        """Compare signatures of all ranks. Raises ValueError naming ranks and the first name that differs, on all; for
        a signature that is a `refusal`, what it says.

        A ring may also have `ask`, of the same arguments, which begins this and gives back a function that ends it.
        This process then works on its own tokens meanwhile, and posts nothing. And it may have `move`, of transfers
        between all ranks and their tensors, in place of `post` where it returns something.
        """


class LocalRing:
    """Ranks that all live in this process: one device each, or parts of one.

    devices: where each rank's tensors are.
    """

    def __init__(self, devices: Sequence[torch.device | str] | int):
        if isinstance(devices, int):
            devices = ["cpu"] * devices
        if not devices:
            raise ValueError("LocalRing: devices must name at least one device, got none")
        self.devices = tuple(located("LocalRing", "devices", device) for device in devices)
        self.size = len(self.devices)
        self.ranks = tuple(range(self.size))

    def post(self, parcels: Sequence[Parcel], step: str) -> None:
        """Copy; between devices the copies are queued behind what fills them."""
        for parcel in parcels:
            parcel.take.copy_(parcel.give, non_blocking=True)

    def wait(self, posted: None) -> None:
        """Nothing is under way."""

    def agree(self, signatures: Mapping[int, Signature], step: str) -> None:
        """As the protocol says."""
        compare(signatures, step)


class ProcessGroupRing:
    """The ranks of a process group of torch.distributed (NCCL, gloo), one in this process.

    timeout: seconds that a rank may keep the others waiting. peer_memory: whether GPUs of one host exchange tokens
    through memory that all of them map, by copy engines, in place of NCCL; the first exchange finds out whether they
    can, and what keeps them from it is told at INFO. head_start: microseconds for which kernels on a GPU wait after
    NCCL's transfers are posted, so that these find multiprocessors before attention takes them all. Signatures are
    compared through the CPU: over the group itself if it is gloo's, else over a gloo group of the same ranks that is
    made at the first comparison.
    """

    def __init__(
        self, group: dist.ProcessGroup | None = None, timeout: float = 600.0, head_start: float = 0.0, *,
        peer_memory: bool = True,
    ):  # fmt: skip
        if not dist.is_initialized():
            raise RuntimeError("ProcessGroupRing: torch.distributed is not initialised: call init_process_group first")
        self.group = dist.group.WORLD if group is None else group
        self.size = dist.get_world_size(self.group)
        self.rank = dist.get_rank(self.group)
        self.ranks = (self.rank,)
        self.timeout, self.head_start = datetime.timedelta(seconds=timeout), head_start
        self._everyone = dist.get_process_group_ranks(self.group)
        self._side: dist.ProcessGroup | None = None
        self._peers: PeerMemory | None = None
        self._shares = flag("ProcessGroupRing", "peer_memory", peer_memory) and "nccl" in dist.get_backend(self.group)

    def move(self, moves: Moves, sent: Tokens, into: Tokens, step: str) -> Arrival | None:
        """Begin to move tokens between ranks through symmetric memory; None, on all ranks, where they cannot.

        sent, into: of this rank, tensors [T, B, heads, D].
        """
        mine, theirs = sent[self.rank], into[self.rank]
        if not self._shares or self.size == 1 or not moves.spans:
            return None
        try:
            if self._peers is None:
                self._peers = PeerMemory(self.group, mine[0].device, self._gathered)
            arrival = self._peers.move(moves, mine, theirs)
        except CannotShare as problem:
            self._peers, self._shares = None, False
            log.info("%s", f"rank {self.rank}: transfers go through NCCL, not through symmetric memory: {problem}")
            return None
        except RuntimeError as problem:
            raise RingError(f"rank {self.rank}: {step}: {problem}") from problem
        for move in moves.own(self.rank) if arrival is not None else ():
            for give, take in zip(mine, theirs):
                heads = slice(None) if move.heads is None else slice(*move.heads)
                take[move.to : move.to + move.tokens].copy_(give[move.at : move.at + move.tokens, :, heads])
        return arrival

    @property
    def shares_memory(self) -> bool | None:
        """Whether transfers go through memory that all ranks map; None where no transfer has found out yet."""
        return self._peers is not None if self._peers is not None or not self._shares else None

    def _gathered(self, value: Any) -> list[Any]:
        found = [None] * self.size
        dist.all_gather_object(found, value, group=self._side_channel())
        return found

    def post(self, parcels: Sequence[Parcel], step: str) -> tuple[str, list[tuple[int, Any]], list[Tensor]]:
        """Post sends and receives together, so that no order of them can block."""
        operations: list[tuple[Any, Tensor, int]] = []
        for parcel in parcels:
            if parcel.source == parcel.target == self.rank:
                parcel.take.copy_(parcel.give)
            elif parcel.source == self.rank:
                operations.append((dist.isend, parcel.give.contiguous(), parcel.target))
            elif parcel.target == self.rank:
                operations.append((dist.irecv, parcel.take, parcel.source))
        kept = [tensor for _, tensor, _ in operations]
        works = self._started(operations, step) if operations else []
        if self.head_start and kept and kept[0].is_cuda:
            torch.cuda._sleep(int(self.head_start * _CYCLES))
        return step, works, kept

    def wait(self, posted: Arrival | tuple[str, list[tuple[int, Any]], list[Tensor]]) -> None:
        """As the protocol says; gloo's transfers are waited for, those between GPUs only by the stream."""
        if isinstance(posted, Arrival):
            self._peers.wait(posted)
            return
        step, works, kept = posted
        self._finish(works, step, timed=bool(kept) and kept[0].device.type == "cpu")

    def agree(self, signatures: Mapping[int, Signature], step: str) -> None:
        """As the protocol says."""
        self.ask(signatures, step)()

    def ask(self, signatures: Mapping[int, Signature], step: str) -> Callable[[], None]:
        """Begin what `agree` does; what is given back waits for the answer, and raises as `agree` does.

        Each rank sends its signature to each other one, so a missing one has a name.
        """
        if self.size == 1:
            return _nothing
        side = self._side_channel()
        signature = signatures[self.rank]
        mine = (signature.text if isinstance(signature, Signed) else json.dumps(signature)).encode()
        if len(mine) > _ROOM - 4:
            raise ValueError(f"rank {self.rank}: {step}: a signature of {len(mine)} bytes does not fit {_ROOM - 4}")
        packed = (len(mine).to_bytes(4, "little") + mine).ljust(_ROOM, b"\0")
        sent = torch.frombuffer(bytearray(packed), dtype=torch.uint8)
        others = [r for r in range(self.size) if r != self.rank]
        arrived = {r: torch.empty(_ROOM, dtype=torch.uint8) for r in others}
        works = []
        for r in others:
            try:  # without the checks of dist.irecv and dist.isend, which take as long as a message
                works.append((r, side.recv([arrived[r]], r, _TAG)))
                works.append((r, side.send([sent], r, _TAG)))
            except RuntimeError as problem:
                raise self._lost(step, r, problem) from problem

        def answer() -> None:
            self._finish(works, step, timed=True)
            told = {r: x.numpy().tobytes() for r, x in arrived.items()}
            if all(raw == packed for raw in told.values()) and not refused(signature):
                return
            found = {self.rank: json.loads(mine)}
            for r, raw in told.items():
                found[r] = json.loads(raw[4 : 4 + int.from_bytes(raw[:4], "little")])
            compare(found, step)

        return answer

    def _started(self, operations: Sequence[tuple[Any, Tensor, int]], step: str) -> list[tuple[int, Any]]:
        """Each transfer under way with its peer."""
        peers = [peer for _, _, peer in operations]
        if operations[0][1].device.type != "cpu":
            batch = [dist.P2POp(kind, tensor, self._everyone[peer], self.group) for kind, tensor, peer in operations]
            try:
                works = dist.batch_isend_irecv(batch)
            except RuntimeError as problem:
                said = f"rank {self.rank}: {step} with ranks {sorted(set(peers))} failed: {problem}"
                raise RingError(said) from problem
            # backends that move a batch at once give back one handle
            return list(zip(peers if len(works) == len(peers) else [-1] * len(works), works))
        started = []
        for kind, tensor, peer in operations:  # gloo's never block; one by one, so that who is gone has a name
            try:
                started.append((peer, kind(tensor, self._everyone[peer], self.group)))
            except RuntimeError as problem:
                raise self._lost(step, peer, problem) from problem
        return started

    def _finish(self, works: Sequence[tuple[int, Any]], step: str, timed: bool) -> None:
        """timed: the host waits, for all together at most for the time limit; else only the device's stream does."""
        began, limit = time.monotonic(), self.timeout.total_seconds()
        for peer, work in works:
            try:
                left = max(limit - (time.monotonic() - began), _LEAST)
                done = work.wait(datetime.timedelta(seconds=left)) if timed else work.wait()
            except RuntimeError as problem:
                raise self._lost(step, peer, problem, time.monotonic() - began) from problem
            if done is False:
                raise self._lost(step, peer, "it is late", time.monotonic() - began)

    def _lost(self, step: str, peer: int, problem: object, waited: float = 0.0) -> RingError:
        who = "its peers" if peer < 0 else f"rank {peer}"
        if peer >= 0 and self.size > 2:
            gone, by, where = cause(self.group, self.rank, peer, step)
            if (gone, by) != (peer, self.rank):
                who = f"rank {peer} gave up: in '{where}' of rank {by} rank {gone}"
        return RingError(
            f"rank {self.rank}: {step}: {who} did not answer ({waited:.1f} s, limit "
            f"{self.timeout.total_seconds():g} s); it has died, stalled or made another call: {problem}"
        )

    def _side_channel(self) -> dist.ProcessGroup:
        if self._side is None:
            backend = dist.get_backend(self.group)
            if "gloo" in backend:
                self._side = self.group
            else:
                self._side = dist.new_group(
                    self._everyone, backend="gloo", timeout=self.timeout, use_local_synchronization=True
                )
        return self._side


_ROOM = 2048  # bytes of a signature on its way
_TOLD = 800  # letters of a refusal: JSON takes at most two bytes for each
_TAG = 7919
_LEAST = 0.001  # seconds for what may have come already; gloo takes 0 for no limit
_CYCLES = 1800  # of a GPU in a microsecond, about


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
            self.pending, wait, self._wait = False, self._wait, _nothing
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


def _nothing() -> None:
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


def refusal(problem: Exception) -> Signature:
    """The signature of a rank that cannot take part."""
    text = str(problem).encode("ascii", "backslashreplace").decode()[:_TOLD]
    return {_REFUSED: type(problem).__name__, "text": text}


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
