"""Which transport moves tokens between the ranks of a process group, and why.

GPUs of one host map memory of each other and copy by their copy engines; everything else goes through the group's own
backend. Whether ranks can map memory they find out together at their first exchange.
"""

from __future__ import annotations

import weakref
from dataclasses import dataclass
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist

from tilesmith.distributed.host_channel import Channel
from tilesmith.distributed.peer_memory import MOST, PeerMemory
from tilesmith.distributed.signals import SLOTS
from tilesmith.engine.argument_checks import choice
from tilesmith.settings import TRANSPORTS, settings

SYMMETRIC = "symmetric_memory"
NAME = "ProcessGroupRing"
_UNCOUNTED = "beside what PyTorch's allocator counts"


@dataclass(frozen=True)
class Transport:
    """name: "symmetric_memory", or the backend of torch.distributed, such as "nccl" or "gloo". because: why."""

    name: str
    because: str

    def __str__(self) -> str:
        return f"{self.name}: {self.because}"


class Peers:
    """Memory that the ranks of a group share; one in each process, whichever rings use it.

    refused: why ranks cannot share memory of GPUs, as they have found. channel: by which the hosts' processes talk;
    apart: why they cannot, as they have found.
    """

    def __init__(self) -> None:
        self.memory: PeerMemory | None = None
        self.channel: Channel | None = None
        self.refused = self.apart = ""

    @property
    def broken(self) -> str:
        """Which rank was lost in which step; empty if none."""
        return "" if self.memory is None else self.memory.broken

    def close(self) -> None:
        """Give the memory of GPUs back."""
        memory = self.memory
        if memory is not None:
            memory.close()
            if not memory.broken:
                self.memory = None

    def end(self) -> None:
        """Give all memory back."""
        if self.channel is not None:
            self.channel.close()
        self.close()


_PEERS: WeakKeyDictionary[dist.ProcessGroup, Peers] = WeakKeyDictionary()


def peers_of(group: dist.ProcessGroup) -> Peers:
    """Those of a group. Their memory is given back when the group ends."""
    found = _PEERS.get(group)
    if found is None:
        found = _PEERS[group] = Peers()
        # at the end of the process nothing may wait for ranks that are gone
        weakref.finalize(group, found.end).atexit = False
    return found


def asked_for(name: str) -> str:
    """What an argument asks for, else what the environment does. Raises ValueError for a name that is not known."""
    name = choice(NAME, "transport", name, TRANSPORTS)
    return settings().transport if name == "auto" else name


def choose(
    asked: str, backend: str, device: torch.device, *, refused: str = "", held: int = 0, need: int = 0
) -> Transport:  # fmt: skip
    """The transport for tensors on `device`.

    backend: of the group, as torch.distributed names it: one name, or "cpu:gloo,cuda:nccl". refused: why ranks cannot
    share memory, where they have found that they cannot; held: bytes that they share, where they do; need: bytes that a
    rank sends in one exchange. Raises ValueError where what is asked for cannot serve.
    """
    own = dict(part.split(":") for part in backend.split(",")).get(device.type, "none") if ":" in backend else backend
    if asked not in ("auto", SYMMETRIC):
        if asked != own:
            raise ValueError(
                f"{NAME}: transport {asked!r} cannot serve: the group's backend for tensors on {device.type} is {own}; "
                f"pass 'auto' or {own!r}, or make a group with that backend"
            )
        return Transport(own, "asked for")
    no = _no_symmetric_memory(own, device) or refused
    if not no and need > MOST:
        no = f"{need / 2**20:.4g} MiB of a rank in one exchange are more than its {MOST / 2**20:g} MiB"
    if no and asked == SYMMETRIC:
        raise ValueError(f"{NAME}: transport {SYMMETRIC!r} cannot serve: {no}; pass 'auto' or {own!r}")
    if no:
        return Transport(own, f"the group's backend; no symmetric memory: {no}")
    why = "asked for; " if asked == SYMMETRIC else ""
    if held:
        return Transport(
            SYMMETRIC, f"{why}copy engines of GPUs of one host; {held / 2**20:.4g} MiB a rank {_UNCOUNTED}"
        )
    otherwise = "an error" if asked == SYMMETRIC else own
    return Transport(
        SYMMETRIC, f"{why}copy engines of GPUs of one host, if the first exchange finds that all can map memory, else "
        f"{otherwise}; up to {SLOTS * MOST / 2**30:g} GiB a rank {_UNCOUNTED}",
    )  # fmt: skip


def _no_symmetric_memory(own: str, device: torch.device) -> str:
    if device.type != "cuda" or torch.version.hip:
        return f"tensors are on {'an AMD GPU' if torch.version.hip else device.type}, and it is for NVIDIA GPUs"
    return "" if own == "nccl" else f"the group's backend is {own}, not nccl"
