"""Rings: how tensors travel between ranks of torch.distributed, or within one process."""

from __future__ import annotations

import datetime
import json
import logging
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from tilesmith.distributed import host_channel
from tilesmith.distributed.agreement import CannotShare
from tilesmith.distributed.comparison import compare, nothing, refusal, refused
from tilesmith.distributed.host_channel import ROOM, Awaited, Channel
from tilesmith.distributed.lost import RingError, told
from tilesmith.distributed.peer_memory import Arrival, Kind, PeerMemory
from tilesmith.distributed.protocol import Parcel
from tilesmith.distributed.schedule import Moves
from tilesmith.distributed.signature import Signature, Signed
from tilesmith.distributed.transport import SYMMETRIC, Transport, asked_for, choose, peers_of
from tilesmith.engine.argument_checks import positive, present
from tilesmith.engine.argument_checks import size as checked_size
from tilesmith.engine.arguments import shown
from tilesmith.engine.torch_private import sleep

Tokens = Mapping[int, Sequence[Tensor]]  # of each rank, tensors [B, heads, T, D]
log = logging.getLogger("tilesmith")


class LocalRing:
    """Ranks that all live in this process: one device each, or parts of one.

    devices: where each rank's tensors are; a number: as many ranks on the CPU. Raises TypeError or ValueError for
    anything else, and for no ranks.
    """

    def __init__(self, devices: Sequence[torch.device | str] | int):
        if isinstance(devices, int):
            devices = ["cpu"] * checked_size("LocalRing", "devices", devices)
        if isinstance(devices, str) or not isinstance(devices, Sequence):
            raise TypeError(
                f"LocalRing: devices must be a list of devices or a number of shards on the CPU, got {shown(devices)}"
            )
        if not devices:
            raise ValueError("LocalRing: devices must name at least one device, got none")
        self.devices = tuple(present("LocalRing", "devices", device, meta=True) for device in devices)
        self.size = len(self.devices)
        self.ranks = tuple(range(self.size))

    def post(self, parcels: Sequence[Parcel], step: str) -> None:
        """Copy; between devices the copies are queued behind what fills them."""
        for parcel in parcels:
            parcel.take.copy_(parcel.give, non_blocking=True)

    def wait(self, posted: None) -> None:
        """Nothing is under way."""

    def transport(self, device: torch.device | None = None, need: int = 0) -> Transport:
        """What moves tokens, whatever the arguments are."""
        return Transport("copies", "all ranks are in this process")

    def agree(self, signatures: Mapping[int, Signature], step: str) -> None:
        """As the protocol says."""
        compare(signatures, step)


class ProcessGroupRing:
    """The ranks of a process group of torch.distributed (NCCL, gloo), one in this process.

    timeout: seconds that a rank may keep the others, including their GPUs, waiting. transport: "symmetric_memory", by
    which GPUs of one host exchange tokens through memory that all of them map, by copy engines; "nccl" or "gloo", the
    group's own backend; "auto": what TILESMITH_TRANSPORT says, else symmetric memory where ranks can share it, which
    the first exchange finds out; the choice and its reason are logged at INFO. head_start: microseconds for which
    kernels on a GPU wait after NCCL's transfers are posted, so that these find multiprocessors before attention takes
    them all.
    Signatures are compared through the CPU: through memory where all ranks are processes of one host, which the first
    comparison finds out; else over the group itself if it is gloo's, or a gloo group of the same ranks that is made
    then.

    Raises ValueError for a transport that the group cannot have, TypeError or ValueError for a timeout that is no
    number above 0. Once a rank of a host, or its GPU, has waited in vain for another, each call of the group raises
    RingError.
    """

    def __init__(
        self, group: dist.ProcessGroup | None = None, timeout: float = 600.0, head_start: float = 0.0, *,
        transport: str = "auto",
    ):  # fmt: skip
        if not dist.is_initialized():
            raise RuntimeError("ProcessGroupRing: torch.distributed is not initialised: call init_process_group first")
        group = dist.group.WORLD if group is None else group
        self._group = weakref.ref(group)  # it ends, with all that it holds, when torch drops it
        self._backend = dist.get_backend(group)
        self.size = dist.get_world_size(group)
        self.rank = dist.get_rank(group)
        self.ranks = (self.rank,)
        self._limit = float(positive("ProcessGroupRing", "timeout", timeout))
        self.timeout, self.head_start = datetime.timedelta(seconds=self._limit), head_start
        self._everyone = dist.get_process_group_ranks(group)
        self._side: dist.ProcessGroup | None = None
        self.asked = asked_for(transport)
        self._peers = peers_of(group)
        self._chosen: dict[tuple[str, str], str] = {}
        self._on_gpus = "nccl" in self._backend
        self._through(_GPU if self._on_gpus else torch.device("cpu"))

    def __deepcopy__(self, memo: dict) -> ProcessGroupRing:
        """Itself: copies of a layer are of the same ranks, and process groups cannot be copied."""
        return self

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            "ProcessGroupRing: it cannot be pickled, as its process group exists in this process only; save the "
            "state_dict of the layer or model that holds it, and make that anew with a group"
        )

    @property
    def group(self) -> dist.ProcessGroup:
        """The process group. Raises RuntimeError when it was destroyed."""
        found = self._group()
        if found is None:
            raise RuntimeError("ProcessGroupRing: its process group was destroyed; make a ring of another one")
        return found

    def transport(self, device: torch.device | None = None, need: int = 0) -> Transport:
        """What moves tokens between ranks, and why. device: of the tensors; None: a GPU, if the group serves them.
        need: bytes of a rank in one exchange. Raises ValueError if the requested transport cannot be used."""
        kind = ("cuda" if self._on_gpus else "cpu") if device is None else device.type
        refused, held = self._peers.refused, self.memory_held
        return choose(self.asked, self._backend, torch.device(kind), refused=refused, held=held, need=need)

    def _through(self, device: torch.device) -> str:
        """The name of the transport but for exchanges that are too large, found out and told at INFO once."""
        key = device.type, self._peers.refused
        found = self._chosen.get(key)
        if found is None:
            transport = self.transport(device)
            log.info("rank %d: tokens travel by %s", self.rank, transport)
            found = self._chosen[key] = transport.name
        return found

    @property
    def memory_held(self) -> int:
        """Bytes of symmetric memory of this rank, which PyTorch's allocator does not count."""
        memory = self._peers.memory
        return 0 if memory is None else memory.held

    def release_memory(self) -> None:
        """Free the symmetric memory, as the end of the group does. All ranks call it; the next exchange allocates it
        again. Raises RingError naming a rank that does not."""
        alike = self._peers.memory is not None and not self._peers.broken
        if alike:
            self._gathered(None)  # nobody reads any longer what others read
        self._peers.close()
        if alike:
            self._gathered(None)  # what others mapped is free only now

    def begin(self, moves: Moves, sent: Tokens, into: Tokens, step: str) -> Callable[[], Arrival] | None:
        """What begins to move tokens between ranks through symmetric memory, beside what the stream is given before it
        is called; None, on all ranks, where they cannot.

        sent, into: of this rank, as `PeerMemory.begin` takes them.
        """
        mine, theirs = sent[self.rank], into[self.rank]
        if self.size == 1 or not moves.spans or self._through(mine[0].device) != SYMMETRIC:
            return None
        peers, device = self._peers, mine[0].device
        try:
            if peers.memory is None:
                peers.memory = PeerMemory(self.group, device, self._gathered)
            found = peers.memory.begin(moves, mine, theirs, step, self._limit, self._gathered)
        except CannotShare as problem:
            peers.memory, peers.refused = None, str(problem)
            self._through(device)  # says so
            return None
        except RingError:
            raise
        except RuntimeError as problem:
            raise self._named(problem, step) from problem
        if found is None:
            self.transport(device, peers.memory.need(moves, mine))  # an error where symmetric memory was asked for
            return None
        return partial(self._posted, found, step)

    def _posted(self, post: Callable[[], Arrival], step: str) -> Arrival:
        try:
            return post()
        except RingError:
            raise
        except RuntimeError as problem:
            raise self._named(problem, step) from problem

    def _named(self, problem: RuntimeError, step: str) -> RingError:
        """A problem of this process, by rank and step."""
        return RingError(f"rank {self.rank}: {step}: {problem}")

    def reserve(self, moves: Moves, kinds: Sequence[Kind]) -> Sequence[Tensor] | None:
        """Memory [B, heads, T, D] from which the next `begin` sends, if it is of these moves: what is written there by
        then need not be copied. kinds: shape and dtype of what will be sent. None where it will be copied."""
        memory = self._peers.memory
        return None if memory is None else memory.reserve(moves, kinds)

    @property
    def shares_memory(self) -> bool | None:
        """Whether transfers go through memory that all ranks map; None where no transfer has found out yet."""
        if self.transport().name != SYMMETRIC:
            return False
        return None if self._peers.memory is None else True

    def gathered(self, value: Any, step: str) -> list[Any]:
        """All ranks' values of one object that JSON can hold, by rank. Raises RingError naming a rank without one."""
        return self._each(*self._exchanged(json.dumps(value).encode(), step))

    def _each(self, packed: bytes, arrived: Callable[[], dict[int, bytes]]) -> list[Any]:
        return [json.loads(_unpacked(raw)) for _, raw in sorted((arrived() | {self.rank: packed}).items())]

    def _gathered(self, value: Any) -> list[Any]:
        return self.gathered(value, "symmetric memory")

    def _stand(self) -> None:
        """Raise RingError where a GPU of this group has waited in vain."""
        peers = self._peers
        if peers.broken:
            if peers.memory.idle:
                peers.close()
            if peers.channel is not None:
                peers.channel.give_up()
            raise RingError(peers.broken)

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
        if self.head_start and kept and kept[0].is_cuda and sleep is not None:
            sleep(int(self.head_start * _CYCLES))
        return step, works, kept

    def wait(self, posted: Arrival | tuple[str, list[tuple[int, Any]], list[Tensor]]) -> None:
        """As the protocol says; gloo's transfers are waited for, those between GPUs only by the stream."""
        if isinstance(posted, Arrival):
            self._peers.memory.wait(posted)
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
            return nothing
        self._stand()
        signature = signatures[self.rank]
        if self._on_gpus and torch.cuda.is_current_stream_capturing() and self._through(_GPU) == SYMMETRIC:
            signature = refusal(ValueError(_CAPTURED))
        mine = (signature.text if isinstance(signature, Signed) else json.dumps(signature)).encode()
        packed, arrived = self._exchanged(mine, step)

        def answer() -> None:
            told = arrived()
            if all(map(packed.__eq__, told.values())) and not refused(signature):
                return
            compare({r: json.loads(_unpacked(raw)) for r, raw in (told | {self.rank: packed}).items()}, step)

        return answer

    def _exchanged(self, mine: bytes, step: str) -> tuple[bytes, Callable[[], dict[int, bytes]]]:
        """Begin to send a message to each other rank; it as it is sent, and what waits for theirs, by rank."""
        packed = _packed(mine)
        if len(packed) > ROOM:
            raise ValueError(f"rank {self.rank}: {step}: a message of {len(mine)} bytes does not fit {ROOM - 4}")
        peers = self._peers
        if peers.channel is None and not peers.apart:
            self._open_channel(step)
        return self._by_gloo(packed, step) if peers.channel is None else self._by_memory(peers.channel, packed, step)

    def _open_channel(self, step: str) -> None:
        """Find out, with all ranks, whether they are processes of one host, which need not talk by gloo."""
        try:
            self._peers.channel = host_channel.opened(partial(self._gathered_by_gloo, step), self.rank, self.size)
            how = "memory of their host"
        except CannotShare as problem:
            self._peers.apart = str(problem)
            how = f"gloo: {problem}"
        log.info("rank %d: ranks compare calls through %s", self.rank, how)

    def _gathered_by_gloo(self, step: str, value: Any) -> list[Any]:
        return self._each(*self._by_gloo(_packed(json.dumps(value).encode()), step))

    def _by_memory(
        self, channel: Channel, packed: bytes, step: str
    ) -> tuple[bytes, Callable[[], dict[int, bytes]]]:  # fmt: skip
        self._await(channel, channel.before, step)
        exchange = channel.begin(packed)

        def wait() -> dict[int, bytes]:
            self._await(channel, partial(channel.awaited, exchange), step)
            return exchange.found

        return packed, wait

    def _await(self, channel: Channel, missing: Callable[[], list[tuple[int, Awaited]]], step: str) -> None:
        if channel.lost:
            raise RingError(channel.lost)
        try:
            late = missing()
        except RuntimeError as problem:
            raise self._named(problem, step) from problem
        if late:
            self._finish(late, step, timed=True)

    def _by_gloo(self, packed: bytes, step: str) -> tuple[bytes, Callable[[], dict[int, bytes]]]:
        side, packed = self._side_channel(), packed.ljust(ROOM, b"\0")
        sent = torch.frombuffer(bytearray(packed), dtype=torch.uint8)
        arrived = {r: torch.empty(ROOM, dtype=torch.uint8) for r in range(self.size) if r != self.rank}
        works = []
        for r, x in arrived.items():
            try:  # without the checks of dist.irecv and dist.isend, which take as long as a message
                works.append((r, side.recv([x], r, _TAG)))
                works.append((r, side.send([sent], r, _TAG)))
            except RuntimeError as problem:
                raise self._lost(step, r, problem) from problem

        def wait() -> dict[int, bytes]:
            self._finish(works, step, timed=True)
            return {r: x.numpy().tobytes() for r, x in arrived.items()}

        return packed, wait

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
        channel = self._peers.channel
        if channel is not None:
            channel.give_up()  # before the half second that finding out may take
        said = told(self._group(), self.rank, self.size, step, peer, problem, waited, self._limit)
        if channel is not None:
            channel.lost = channel.lost or said
        return RingError(said)

    def _side_channel(self) -> dist.ProcessGroup:
        if "gloo" in self._backend:
            return self.group
        if self._side is None:
            self._side = dist.new_group(
                self._everyone, backend="gloo", timeout=self.timeout, use_local_synchronization=True
            )
        return self._side


def process_group(of: str, group: Any) -> dist.ProcessGroup:
    """The process group that an argument `group` of a function `of` names: one itself, a mesh of one dim, or None for
    all ranks. Raises TypeError for anything else, ValueError for a mesh of several dims."""
    if isinstance(group, DeviceMesh):
        if group.ndim != 1:
            raise ValueError(f"{of}: group is a mesh of {group.ndim} dims; it must have one, as mesh['tp']")
        return group.get_group()
    if group is None:
        if not dist.is_initialized():
            raise RuntimeError(
                f"{of}: group is None and torch.distributed is not initialised; call init_process_group or give one"
            )
        return dist.group.WORLD
    if not isinstance(group, dist.ProcessGroup):
        raise TypeError(
            f"{of}: group must be a process group, a mesh of one dim or None, got {shown(group)}; write mesh['tp'], "
            "for example"
        )
    return group


def _packed(message: bytes) -> bytes:
    return len(message).to_bytes(4, "little") + message


def _unpacked(raw: bytes) -> bytes:
    return raw[4 : 4 + int.from_bytes(raw[:4], "little")]


_GPU = torch.device("cuda")
_TAG = 7919
_LEAST = 0.001  # seconds for what may have come already; gloo takes 0 for no limit
_CYCLES = 1800  # of a GPU in a microsecond, about
_CAPTURED = (
    "the stream is being captured as a CUDA graph, whose replays would not wait for other ranks: leave "
    "context-parallel attention out of graphs, or give ProcessGroupRing(transport='nccl')"
)
