"""Forward and backward of blocks for one shape, recorded: what they compute, and when they may run.

A replay writes where the recording wrote. So what a replay would overwrite must not be needed any more: a recording
whose forward awaits its backward is not replayed, nor is one that was recorded before such a one, since a later
recording may keep activations where an earlier one computed.
"""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from tilesmith.engine import torch_private
from tilesmith.engine.model_state import host_numbers, restore_host_numbers
from tilesmith.models.capture import Recorder, uncached_autocast
from tilesmith.models.fingerprint import Fingerprint
from tilesmith.models.recorded_calls import Link, flatten, rebuild
from tilesmith.models.recorded_tensors import Identity, Slot

_WARM_RUNS = 2


class CannotRecord(Exception):
    """A replay of the block would not be what the block does."""


class WithoutGradient(CannotRecord):
    """Nothing that the block returns has a gradient, as long as it is as it is now."""


class Memory:
    """What the recordings of one model share."""

    def __init__(self, recorder: Recorder):
        self.recorder = recorder
        self.recordings: weakref.WeakSet[Recorded] = weakref.WeakSet()
        self.waiting: dict[int, Recorded] = {}  # by number: those whose forward awaits its backward
        self.turn = threading.Lock()  # of the thread that replays; backwards run on threads of their own
        self.count = 0
        self.slots: weakref.WeakSet[Slot] = weakref.WeakSet()
        self.results: weakref.WeakValueDictionary[int, Tensor] = weakref.WeakValueDictionary()

    def bytes(self) -> int:
        """Memory that recordings hold: their graphs' pool, and the buffers for what blocks are given."""
        own = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for r in self.recordings for t in r.buffers}
        return self.recorder.memory() + sum(own.values())

    def slot(self, tensor: Tensor, taken: Collection[Slot | None]) -> Slot:
        """The slot that holds `tensor`, but none of those `taken`, or a new one."""
        found = next((slot for slot in self.slots if slot.holds(tensor) and slot not in taken), None)
        if found is None:
            found = Slot(tensor)
            self.slots.add(found)
        return found


class Ticket:
    """One replay of a forward, as its gradient knows it.

    served: how many of its links have been called. between: what passes from link to link, each with the place of the
    one that is given it. done: its backward has run. spoiled: its activations may have been overwritten.
    """

    def __init__(self) -> None:
        self.served, self.done, self.spoiled = 1, False, False
        self.between: list[tuple[int, Identity]] = []


class Recorded:
    """Forward and backward of blocks, each `Link` behind the one before, for arguments of the first like `leaves`;
    recorded when this is made. calls: how many calls of blocks a replay serves.

    copied: places of results that each replay hands out as copies, since somebody kept them beyond the next replay.
    repeats: the backward runs the forward again, so nothing but the arguments is kept between the two (checkpointing).
    Raises CannotRecord, or what the recorder or a block raises.
    """

    def __init__(
        self, memory: Memory, links: Sequence[Link], leaves: list[Tensor], repeats: bool, copied: Collection[int] = ()
    ):
        self.memory, self.links, self._repeats = memory, tuple(links), repeats
        self.calls = len(links)
        self._device = leaves[0].device
        if any(leaf.device != self._device for leaf in leaves):
            raise CannotRecord("it is given tensors of several devices")
        self._ticket: weakref.ref[Ticket] | None = None
        self._source = Fingerprint(dict.fromkeys(map(_block, self.links)))
        homes: dict[Tensor, int] = {}  # of each parameter, the first link that has it
        for place, link in enumerate(self.links):
            for parameter in _trained(link):
                homes.setdefault(parameter, place)
        self._parameters = list(homes)
        self._slots: list[Slot | None] = []
        self._inputs: list[Tensor] = []
        with torch.no_grad():
            for leaf in leaves:
                self._take(leaf)
        self._read = [0] * len(self._slots)  # of each slot, the fill that the last replay read
        self._wanted = [x for x in self._inputs if x.requires_grad]
        self._homes = [0] * len(self._wanted) + list(homes.values())
        self._outs: list[Tensor] = []
        self._parts: list[tuple[Any, int, int]] = []  # what each link returns, and where its tensors are in `results`
        self._d_results: list[Tensor | None] = []
        recorder = memory.recorder
        with _without_hooks(self._parameters):
            self._warm_up()
            self._forward, self.results = recorder.record(self._run_forward)
            self._backward, gradients = recorder.record(self._run_backward)
        self._gradients = _by_dtype(gradients)
        every = self.links[0].copied
        self._lent = [None if every or place in copied else _lent(t) for place, t in enumerate(self.results)]
        memory.count += 1
        self.number = memory.count
        memory.recordings.add(self)
        memory.results.update({t.data_ptr(): t for t in self.results})
        self.buffers = [x for x in (*self._inputs, *self._d_results) if x is not None]
        self._zero = [not repeats] * len(self._d_results)  # whether a buffer holds zeros
        if self.stale():
            raise CannotRecord("its forward changes modules or their attributes")

    def _take(self, leaf: Tensor) -> None:
        """Decide where an argument lies while graphs read it."""
        if not leaf.requires_grad:
            slot = self.memory.slot(leaf, self._slots)  # two arguments that are one tensor now may be two later
            self._slots.append(slot)
            self._inputs.append(slot.buffer)
            return
        known = self.memory.results.get(leaf.data_ptr())
        usable = known is not None and known.shape == leaf.shape and known.stride() == leaf.stride()
        buffer = known if usable and known.dtype is leaf.dtype else leaf.detach().clone()
        self._slots.append(None)
        self._inputs.append(buffer.detach().requires_grad_())

    def _warm_up(self) -> None:
        """Run each link by itself, forward and backward, so that libraries have set themselves up."""
        recorder, device = self.memory.recorder, self._device
        counted = _counted([buffer for link in self.links for buffer in _block(link).buffers()])
        given = _counted(self._inputs)
        before, returned = recorder.random_state(device), []
        numbers, host = host_numbers(), torch.get_rng_state()
        drawn = False
        try:
            for link in self.links:
                returned = self._warm(link, link.given(self._inputs, returned))
                if not torch.equal(before, recorder.random_state(device)):
                    self._refuse_draws()
            drawn = host_numbers() != numbers or (device.type != "cpu" and not torch.equal(torch.get_rng_state(), host))
        finally:
            restore_host_numbers(numbers)
            torch.set_rng_state(host)
            recorder.restore(device, before)
        if drawn:  # by which it may decide what to run
            raise CannotRecord("its forward draws random numbers on the host")
        if any(tensor._version != version for tensor, version in counted):
            raise CannotRecord("its forward writes to a buffer")
        if any(tensor._version != version for tensor, version in given):
            raise CannotRecord("its forward writes to what it is given")
        self._needs = [d is not None for d in self._d_results]

    def _refuse_draws(self) -> None:
        if self._repeats:
            raise CannotRecord("it is checkpointed and draws random numbers, which its repetition would draw anew")
        if len(self.links) > 1:
            raise CannotRecord("they draw random numbers")

    def _warm(self, link: Link, given: list[Tensor]) -> list[Tensor]:
        """Run one link, given these; returns what it returns."""
        warm, outs = self.memory.recorder.warm, []
        for _ in range(_WARM_RUNS):
            outs = []
            outs = warm(lambda: self._run(link, given)[1])
        if not any(out.requires_grad for out in outs):
            raise WithoutGradient("nothing that it returns has a gradient")
        targets = [torch.zeros_like(out) if out.requires_grad else None for out in outs]
        wanted = [*(x for x in given if x.requires_grad), *_trained(link)]
        warm(lambda: self._differentiate(outs, targets, wanted))
        self._d_results += targets
        return [out.detach().requires_grad_(out.requires_grad) for out in outs]

    def _run(self, link: Link, given: list[Tensor], grad: bool = True) -> tuple[Any, list[Tensor]]:
        """What one link returns, as `flatten` takes it apart."""
        args, kwargs = rebuild(link.spec, given)
        with torch.set_grad_enabled(grad), uncached_autocast(self._device.type), _own_saved_tensors():
            out = link.plain(_block(link), args, kwargs)
        returned: list[Tensor] = []
        return flatten(out, returned), returned

    def _run_all(self, inputs: list[Tensor], grad: bool = True) -> list[Tensor]:
        """What all links return."""
        outs, returned, parts = [], [], []
        for link in self.links:
            spec, returned = self._run(link, link.given(inputs, returned), grad)
            parts.append((spec, len(outs), len(outs) + len(returned)))
            outs += returned
        self._parts = parts
        return outs

    def _run_forward(self) -> list[Tensor]:
        if self._repeats:
            return self._run_all([x.detach() for x in self._inputs], grad=False)
        self._outs = self._run_all(self._inputs)
        return [out.detach() for out in self._outs]

    def _run_backward(self) -> list[Tensor | None]:
        outs = self._run_all(self._inputs) if self._repeats else self._outs
        return self._differentiate(outs, self._d_results, [*self._wanted, *self._parameters])

    def _differentiate(
        self, outs: list[Tensor], targets: list[Tensor | None], wanted: list[Tensor]
    ) -> list[Tensor | None]:
        outs = [out for out, target in zip(outs, targets) if target is not None]
        given = [target for target in targets if target is not None]
        # The graph of a forward that is not repeated is kept: it holds the activations where the replays look for them.
        with torch_private.activations_kept():
            return list(torch.autograd.grad(outs, wanted, given, retain_graph=not self._repeats, allow_unused=True))

    def free(self, leaves: list[Tensor]) -> bool:
        """Whether a replay overwrites nothing that is still needed."""
        waiting = dict(self.memory.waiting)  # a backward on another thread takes what it has computed out
        if not waiting:
            return True
        if max(waiting) >= self.number:
            return False
        for place, (slot, buffer, leaf) in enumerate(zip(self._slots, self._inputs, leaves)):
            if slot is None:
                own = buffer.data_ptr()
                if own != leaf.data_ptr() and any(own == t.data_ptr() for r in waiting.values() for t in r.results):
                    return False
            elif self._is_old(place, slot, leaf) and any(slot in r._slots for r in waiting.values()):
                return False
        return True

    def _is_old(self, place: int, slot: Slot, leaf: Tensor) -> bool:
        """Whether a slot has to be filled for a replay: always by the first one of a forward."""
        return not self.memory.waiting or self._read[place] == slot.fills or not slot.holds(leaf)

    def stale(self) -> bool:
        """Whether parameters lie elsewhere now, or modules, their attributes or hooks have changed."""
        return self._source.changed()

    def run(self, leaves: list[Tensor]) -> tuple[Tensor, ...]:
        """The tensors that all links return."""
        wanted = [leaf for leaf in leaves if leaf.requires_grad]
        return _apply(self, leaves, *wanted, *self._parameters)

    def returned(self, place: int, results: Sequence[Tensor]) -> list[Tensor]:
        """Those that one link returns."""
        _, start, end = self._parts[place]
        return list(results[start:end])

    def rebuilt(self, place: int, tensors: list[Tensor]) -> Any:
        """What one link returns, made of its tensors."""
        return rebuild(self._parts[place][0], tensors)

    @property
    def ticket(self) -> Ticket | None:
        """The last replay, unless nobody holds its results any more."""
        return None if self._ticket is None else self._ticket()

    def kept(self) -> set[int]:
        """The places of results of earlier replays that somebody still has, and that the next one overwrites."""
        return {place for place, memory in enumerate(self._lent) if memory is not None and memory.in_use()}

    def overwrites(self) -> bool:
        """Whether a replay overwrites results that somebody still has: its own, or, as the first of a forward, those of
        recordings made later, which may lie where it computes."""
        if self.memory.waiting:
            return bool(self.kept())
        return any(other.number >= self.number and other.kept() for other in self.memory.recordings)

    @property
    def awaited(self) -> bool:
        """Whether a forward by it awaits its backward."""
        return self.number in self.memory.waiting

    def replay_forward(self, leaves: list[Tensor]) -> tuple[Ticket, list[Tensor]]:
        with self.memory.turn:
            return self._replay_forward(leaves)

    def _replay_forward(self, leaves: list[Tensor]) -> tuple[Ticket, list[Tensor]]:
        for place, (slot, buffer, leaf) in enumerate(zip(self._slots, self._inputs, leaves)):
            if slot is None:
                if buffer.data_ptr() != leaf.data_ptr():
                    buffer.detach().copy_(leaf)
                continue
            if self._is_old(place, slot, leaf):
                slot.fill(leaf)
            self._read[place] = slot.fills
        ticket, waiting, number = Ticket(), self.memory.waiting, self.number
        waiting[number] = self
        self._ticket = weakref.ref(ticket, lambda _: waiting.pop(number, None))
        self._forward()
        return ticket, [r.clone() if memory is None else memory.lend() for r, memory in zip(self.results, self._lent)]

    def replay_backward(self, ticket: Ticket, d_results: tuple[Tensor | None, ...]) -> list[Tensor | None]:
        if ticket.spoiled or self.ticket is not ticket:
            raise RuntimeError(
                "optimize(graphs=True): the activations of this forward were overwritten by a later replay before its "
                "backward; run each backward once, before the next forward, or leave out graphs=True"
            )
        if any(place < ticket.served and watched(known.tensor()) for place, known in ticket.between):
            raise RuntimeError(
                "optimize(graphs=True): what a block hands to the next got a hook, or retain_grad, after both had run "
                "as one; ask for it before the next block runs, or leave out graphs=True"
            )
        with self.memory.turn:
            gradients = self._replay_backward(ticket, d_results)
        if ticket.served < len(self.links):  # the links behind that one were not asked for
            gradients = [d if home < ticket.served else None for d, home in zip(gradients, self._homes)]
        return gradients

    def _replay_backward(self, ticket: Ticket, d_results: tuple[Tensor | None, ...]) -> list[Tensor | None]:
        ticket.done = True
        for number, other in dict(self.memory.waiting).items():
            waits = other.ticket
            if number > self.number and waits is not None:  # its activations may lie where this backward computes
                waits.spoiled = True
        for place, (buffer, given) in enumerate(zip(self._d_results, d_results)):
            if buffer is None or (given is None and self._zero[place]):
                continue
            buffer.zero_() if given is None else buffer.copy_(given)
            self._zero[place] = given is None and not self._repeats
        self._backward()
        # The recording's own would be overwritten by the next replay while a parameter's .grad still refers to it.
        gradients: list[Tensor | None] = [None] * len(self._homes)
        for places, own in self._gradients:
            for place, copy in zip(places, torch_private.clone_each(own)):
                gradients[place] = copy
        if not torch_private.graph_is_kept():
            self.memory.waiting.pop(self.number, None)
        return gradients


def _block(link: Link) -> nn.Module:
    block = link.block()
    if block is None:
        raise CannotRecord("one of its blocks is gone")
    return block


def _trained(link: Link) -> list[nn.Parameter]:
    return [p for p in _block(link).parameters() if p.requires_grad]


def watched(tensor: Tensor | None) -> bool:
    """Whether somebody is told the gradient of a tensor."""
    return tensor is not None and bool(tensor._backward_hooks or tensor.retains_grad)


def _counted(tensors: Iterable[Tensor]) -> list[tuple[Tensor, int]]:
    """Tensors with how often each was written, without those made in inference mode, which do not count."""
    return [(tensor, tensor._version) for tensor in tensors if not tensor.is_inference()]


def _lent(result: Tensor) -> torch_private.LentMemory | None:
    """What lends the memory of a result; None where references to it cannot be counted."""
    try:
        return torch_private.LentMemory(result)
    except (RuntimeError, BufferError):
        return None


def _by_dtype(tensors: list[Tensor | None]) -> list[tuple[list[int], list[Tensor]]]:
    """The tensors of each dtype, with their places in the list."""
    found: dict[torch.dtype, tuple[list[int], list[Tensor]]] = {}
    for place, tensor in enumerate(tensors):
        if tensor is not None:
            places, own = found.setdefault(tensor.dtype, ([], []))
            places.append(place)
            own.append(tensor)
    return list(found.values())


class _Replay(torch.autograd.Function):
    """A recorded forward, whose gradient is the recorded backward."""

    @staticmethod
    def forward(ctx: Any, recorded: Recorded, leaves: list[Tensor], *wanted: Tensor) -> tuple[Tensor, ...]:
        ctx.recorded = recorded
        ctx.ticket, results = recorded.replay_forward(leaves)
        ctx.mark_non_differentiable(*(r for r, needs in zip(results, recorded._needs) if not needs))
        ctx.set_materialize_grads(False)
        return tuple(results)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *d_results: Tensor | None) -> tuple[Any, ...]:
        return None, None, *ctx.recorded.replay_backward(ctx.ticket, d_results)


# Function.apply would first look for wrappers of torch.func, under which no recording serves (`observer`).
_apply = super(torch.autograd.Function, _Replay).apply


@contextlib.contextmanager
def _without_hooks(parameters: Iterable[Tensor]) -> Iterator[None]:
    """Inside, hooks on the gradients of parameters are not called. autograd.grad calls them, and they are called again
    when a replay hands its gradients to autograd."""
    held = [(p, p._backward_hooks) for p in parameters if p._backward_hooks]
    for parameter, _ in held:
        parameter._backward_hooks = None
    try:
        yield
    finally:
        for parameter, hooks in held:
            parameter._backward_hooks = hooks


@contextlib.contextmanager
def _own_saved_tensors() -> Iterator[None]:
    """Keep what a forward saves from hooks that are on around it: checkpointing would count it as the block's."""
    if torch_private.saved_tensors_hooks(False) is None:
        yield
        return
    with torch.autograd.graph.saved_tensors_hooks(lambda saved: saved.detach(), lambda saved: saved):
        yield
