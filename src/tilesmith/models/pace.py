"""Whether the device waits for the host in a model's training steps, which issues launches more slowly than they run.

An event is recorded when the host comes to a late block of the forward, and queried when it comes to the next one. If
it is complete by then, the device has caught up with the host: it is less than a block behind, however many blocks the
host has issued. In a loop that never waits for the device, the host then sets the pace of the whole step; in one that
waits once a step, that of the forward. A query waits for nothing.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from tilesmith.engine import torch_private
from tilesmith.engine.model_state import in_trial
from tilesmith.models.blocks import observer, repeated_blocks
from tilesmith.models.capture import CudaRecorder

EVENTS = CudaRecorder()
SKIPPED = 3
"""Steps that do not count: kernels are compiled, allocators and libraries set themselves up."""
LOOKED_AT = 8
"""Steps that count. A model is not looked at for longer, so that it costs nothing from then on."""
EXCEPTIONS = 1
"""Of these, in how many the device may have been behind although the host sets the pace: one batch may be longer than
others, or the device have had other work."""


class Pace:
    """What the training steps of one model have shown.

    steps, waited: those that counted, and in how many of them the device had caught up with the host. seen: all steps
    up to the decision. decided: whether no more are looked at. why: what kept the last call from being looked at.
    """

    def __init__(self) -> None:
        self.steps = self.waited = self.seen = 0
        self.decided = False
        self.why = ""
        self._forget()

    def _forget(self) -> None:
        self._reached: Callable[[], bool] | None = None  # whether the device is where the host was last
        self._place = -1  # where it was last
        self._behind = False  # whether the device was when the host came to the first place
        self._thread: int | None = None

    def __getstate__(self) -> dict[str, Any]:
        own = ("_reached", "_place", "_behind", "_thread")
        return {name: value for name, value in self.__dict__.items() if name not in own}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._forget()

    @property
    def waits(self) -> bool:
        """Whether the device was found to wait for the host."""
        return self.decided and self.steps == LOOKED_AT and self.waited >= LOOKED_AT - EXCEPTIONS

    def __str__(self) -> str:
        return f"the device waited for the host in {self.waited} of {self.steps} training steps"

    def passed(self, place: int, block: nn.Module) -> None:
        """The host has come to `block`, the one at `place` (0 or 1) of `late_blocks`. Only the first call for a block
        in each forward does anything; which of the two is called first does not matter."""
        if self.decided or place == self._place:
            return
        device = self._device(block)
        if device is None:
            return
        thread = threading.get_ident()
        if self._thread not in (None, thread):
            self._decide("several threads run the model")
            return
        behind = self._reached is not None and not self._reached()
        self._thread, self._place = thread, place
        self._reached = EVENTS.mark(device)
        if place == 0:
            self._behind = behind
        else:
            self._count(behind or self._behind)

    def _device(self, block: nn.Module) -> torch.device | None:
        """The device on which a block runs in a training step that could be recorded; None in any other call."""
        if not block.training or not torch.is_grad_enabled() or torch_private.in_backward() or in_trial():
            return None
        parameter = next(block.parameters(), None)
        device = None if parameter is None else parameter.device
        self.why = observer() or ("its blocks have no parameters" if device is None else EVENTS.missing(device))
        return None if self.why or EVENTS.busy() else device

    def _count(self, behind: bool) -> None:
        self.seen += 1
        if self.seen <= SKIPPED:
            return
        self.steps += 1
        self.waited += not behind
        if self.steps == LOOKED_AT:
            self._decide()

    def _decide(self, why: str = "") -> None:
        self.decided, self.why = True, why
        self._forget()


def late_blocks(model: nn.Module) -> tuple[tuple[str, nn.Module], ...]:
    """The last two blocks, by name, of the list of repeated blocks that holds most of the parameters: where a forward
    spends most of its time, and when the host is furthest ahead if it ever is. () if no blocks repeat."""
    lists: dict[str, list[tuple[str, nn.Module]]] = {}
    for name, block in repeated_blocks(model).items():
        lists.setdefault(name.rpartition(".")[0], []).append((name, block))
    largest: list[tuple[str, nn.Module]] = max(reversed(lists.values()), key=_size, default=[])
    return tuple(largest[-2:])


def _size(blocks: list[tuple[str, nn.Module]]) -> int:
    parameters = (p for _, block in blocks for p in block.parameters())
    return sum(p.numel() for p in parameters if not nn.parameter.is_lazy(p))
