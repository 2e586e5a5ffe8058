"""One block's forward and backward for one shape, recorded: the memory they read and write, and when they may run.

A replay writes where the recording wrote. So what a replay would overwrite must not be needed any more: a recording
whose forward awaits its backward is not replayed, nor is one that was recorded before such a one, since a later
recording may keep activations where an earlier one computed.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterator
from operator import itemgetter
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from tilesmith.engine import torch_private
from tilesmith.models.attention.masks import KeyMask
from tilesmith.models.blocks import Call

_WARM_RUNS = 2
_INHERITED = frozenset(nn.Module().__dict__) - {"training"}
_CONSTANT = (type(None), bool, int, float, str, torch.dtype, torch.device)


class Foreign(Exception):
    """An argument holds state of its own, such as a cache; the message is its class."""


class CannotRecord(Exception):
    """A replay of the block would not be what the block does."""


class Recorder(Protocol):
    """What records: `CudaRecorder`, or a test's."""

    def missing(self, device: torch.device) -> str: ...
    def busy(self) -> bool: ...
    def warm(self, fn: Callable[[], Any]) -> Any: ...
    def record(self, fn: Callable[[], Any]) -> tuple[Callable[[], None], Any]: ...
    def random_state(self, device: torch.device) -> Tensor: ...
    def restore(self, device: torch.device, state: Tensor) -> None: ...
    def memory(self) -> int: ...


def flatten(value: Any, leaves: list[Tensor]) -> Any:
    """Append the tensors of `value` to `leaves`; returns the rest of it, hashable, for `rebuild`. Raises Foreign."""
    if isinstance(value, Tensor):
        leaves.append(value)
        return ("tensor", len(leaves) - 1)
    if isinstance(value, _CONSTANT):
        return ("constant", type(value), value)
    if type(value) in (tuple, list):
        return (type(value).__name__, tuple(flatten(item, leaves) for item in value))
    if type(value) is dict:
        return ("dict", tuple((name, flatten(item, leaves)) for name, item in value.items()))
    if isinstance(value, KeyMask):
        tensors = flatten((value.lengths, value.documents), leaves)
        return ("mask", (value.sizes, value.where, value.causal, value.window), tensors)
    raise Foreign(type(value).__name__)


def rebuild(spec: Any, leaves: list[Tensor]) -> Any:
    """The value that `flatten` took apart, with these tensors."""
    kind, *rest = spec
    if kind == "tensor":
        return leaves[rest[0]]
    if kind == "constant":
        return rest[1]
    if kind == "mask":
        return KeyMask(*rest[0], *rebuild(rest[1], leaves))
    if kind == "dict":
        return {name: rebuild(item, leaves) for name, item in rest[0]}
    made = [rebuild(item, leaves) for item in rest[0]]
    return tuple(made) if kind == "tuple" else made


class _Slot:
    """A buffer for a tensor that several blocks are given, such as the angles of a rotation: filled once for all."""

    def __init__(self, source: Tensor):
        self.buffer = torch.empty_like(source)
        self.fill(source)

    def fill(self, source: Tensor) -> None:
        self.buffer.copy_(source)
        self.source, self.version = weakref.ref(source), source._version

    def holds(self, tensor: Tensor) -> bool:
        return self.source() is tensor and self.version == tensor._version


class Memory:
    """What the recordings of one model share."""

    def __init__(self, recorder: Recorder):
        self.recorder = recorder
        self.recordings: weakref.WeakSet[Recorded] = weakref.WeakSet()
        self.waiting: dict[int, Recorded] = {}  # by number: those whose forward awaits its backward
        self.count = 0
        self.slots: weakref.WeakSet[_Slot] = weakref.WeakSet()
        self.results: weakref.WeakValueDictionary[int, Tensor] = weakref.WeakValueDictionary()

    def bytes(self) -> int:
        """Memory that recordings hold: their graphs' pool, and the buffers for what blocks are given."""
        own = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for r in self.recordings for t in r.buffers}
        return self.recorder.memory() + sum(own.values())

    def slot(self, tensor: Tensor) -> _Slot:
        """The slot that holds `tensor`, or a new one."""
        found = next((slot for slot in self.slots if slot.holds(tensor)), None)
        if found is None:
            found = _Slot(tensor)
            self.slots.add(found)
        return found


class _Ticket:
    """One replay of a forward, as its gradient knows it. spoiled: its activations may have been overwritten."""

    def __init__(self) -> None:
        self.spoiled = False


class Recorded:
    """Forward and backward of `block` for arguments like `leaves`, recorded when this is made.

    repeats: the backward runs the forward again, so nothing but the arguments is kept between the two (checkpointing).
    Raises CannotRecord, or what the recorder or the block raises.
    """

    def __init__(
        self,
        memory: Memory,
        block: nn.Module,
        plain: Call,
        spec: Any,
        leaves: list[Tensor],
        repeats: bool,
    ):
        self.memory, self._plain, self._spec, self._repeats = memory, plain, spec, repeats
        self._block = weakref.ref(block)
        self._device = leaves[0].device
        self._ticket: weakref.ref[_Ticket] | None = None
        self._sources = Fingerprint(block)
        self._parameters = [p for p in block.parameters() if p.requires_grad]
        self._slots: list[_Slot | None] = []
        self._inputs: list[Tensor] = []
        with torch.no_grad():
            for leaf in leaves:
                self._take(leaf)
        self._wanted = [x for x in self._inputs if x.requires_grad]
        self._outs: list[Tensor] = []
        self._warm_up(block)
        recorder = memory.recorder
        self._forward, self.results = recorder.record(self._run_forward)
        self._backward, gradients = recorder.record(self._run_backward)
        self._count, self._gradients = len(gradients), _by_dtype(gradients)
        memory.count += 1
        self.number = memory.count
        memory.recordings.add(self)
        memory.results.update({t.data_ptr(): t for t in self.results})
        self.buffers = [x for x in (*self._inputs, *self._d_results) if x is not None]

    def _take(self, leaf: Tensor) -> None:
        """Decide where an argument lies while graphs read it."""
        if not leaf.requires_grad:
            slot = self.memory.slot(leaf)
            self._slots.append(slot)
            self._inputs.append(slot.buffer)
            return
        known = self.memory.results.get(leaf.data_ptr())
        usable = known is not None and known.shape == leaf.shape and known.stride() == leaf.stride()
        buffer = known if usable and known.dtype is leaf.dtype else leaf.detach().clone()
        self._slots.append(None)
        self._inputs.append(buffer.detach().requires_grad_())

    def _warm_up(self, block: nn.Module) -> None:
        recorder, device = self.memory.recorder, self._device
        versions = [b._version for b in block.buffers()]
        before = recorder.random_state(device)
        recorder.warm(self._call)
        draws = not torch.equal(before, recorder.random_state(device))
        if versions != [b._version for b in block.buffers()]:
            raise CannotRecord("its forward writes to a buffer")
        if draws and self._repeats:
            raise CannotRecord("it is checkpointed and draws random numbers, which its repetition would draw anew")
        if not any(out.requires_grad for out in self._outs):
            raise CannotRecord("nothing that it returns has a gradient")
        self._needs = [out.requires_grad for out in self._outs]
        self._d_results = [torch.zeros_like(out) if out.requires_grad else None for out in self._outs]
        for _ in range(_WARM_RUNS - 1):
            recorder.warm(self._call)
        recorder.warm(self._differentiate)
        recorder.restore(device, before)
        self._outs = []

    def _call(self) -> None:
        """Run the block with gradients; what it returns goes to `_outs`."""
        args, kwargs = rebuild(self._spec, self._inputs)
        with torch.enable_grad(), uncached_autocast(self._device.type), _own_saved_tensors():
            out = self._plain(self._block(), args, kwargs)
        self._outs = []
        self._out_spec = flatten(out, self._outs)

    def _run_forward(self) -> list[Tensor]:
        if self._repeats:
            with torch.no_grad():
                self._call_without_gradients()
        else:
            self._call()
        return [out.detach() for out in self._outs]

    def _call_without_gradients(self) -> None:
        args, kwargs = rebuild(self._spec, [x.detach() for x in self._inputs])
        with uncached_autocast(self._device.type):
            out = self._plain(self._block(), args, kwargs)
        self._outs = []
        flatten(out, self._outs)

    def _run_backward(self) -> list[Tensor | None]:
        if self._repeats:
            self._call()
        gradients = self._differentiate()
        if self._repeats:
            self._outs = []
        return gradients

    def _differentiate(self) -> list[Tensor | None]:
        outs = [out for out, needs in zip(self._outs, self._needs) if needs]
        given = [d for d in self._d_results if d is not None]
        wanted = [*self._wanted, *self._parameters]
        # The graph of a forward that is not repeated is kept: it holds the activations where the replays look for them.
        with torch_private.activations_kept():
            return list(torch.autograd.grad(outs, wanted, given, retain_graph=not self._repeats, allow_unused=True))

    def free(self, leaves: list[Tensor]) -> bool:
        """Whether a replay overwrites nothing that is still needed."""
        waiting = self.memory.waiting
        if not waiting:
            return True
        if max(waiting) >= self.number:
            return False
        for slot, buffer, leaf in zip(self._slots, self._inputs, leaves):
            if slot is None and buffer.data_ptr() != leaf.data_ptr():
                if any(buffer.data_ptr() == t.data_ptr() for r in waiting.values() for t in r.results):
                    return False
            elif slot is not None and not slot.holds(leaf) and any(slot in r._slots for r in waiting.values()):
                return False
        return True

    def stale(self) -> bool:
        """Whether parameters lie elsewhere now, or modules, their attributes or hooks have changed."""
        return self._sources.changed()

    def run(self, leaves: list[Tensor]) -> Any:
        """The block's result."""
        wanted = [leaf for leaf in leaves if leaf.requires_grad]
        results = _apply(self, leaves, *wanted, *self._parameters)
        return rebuild(self._out_spec, list(results))

    def replay_forward(self, leaves: list[Tensor]) -> tuple[_Ticket, list[Tensor]]:
        for slot, buffer, leaf in zip(self._slots, self._inputs, leaves):
            if slot is None:
                if buffer.data_ptr() != leaf.data_ptr():
                    buffer.detach().copy_(leaf)
            elif not slot.holds(leaf):
                slot.fill(leaf)
        ticket, waiting, number = _Ticket(), self.memory.waiting, self.number
        waiting[number] = self
        self._ticket = weakref.ref(ticket, lambda _: waiting.pop(number, None))
        for result in self.results:  # whoever saved the last replay's result for a gradient is told by autograd
            torch.autograd.graph.increment_version(result)
        self._forward()
        return ticket, [result.detach() for result in self.results]

    def replay_backward(self, ticket: _Ticket, d_results: tuple[Tensor | None, ...]) -> list[Tensor | None]:
        if ticket.spoiled or self._ticket is None or self._ticket() is not ticket:
            raise RuntimeError(
                "optimize(graphs=True): the activations of this forward were overwritten by a later replay before its "
                "backward; run each backward once, before the next forward, or leave graphs=True away"
            )
        for number, other in self.memory.waiting.items():
            waits = other._ticket() if other._ticket is not None else None
            if number > self.number and waits is not None:  # its activations may lie where this backward computes
                waits.spoiled = True
        for buffer, given in zip(self._d_results, d_results):
            if buffer is not None:
                buffer.zero_() if given is None else buffer.copy_(given)
        self._backward()
        if not torch_private.graph_is_kept():
            self.memory.waiting.pop(self.number, None)
        # The recording's own would be overwritten by the next replay while a parameter's .grad still refers to it.
        gradients: list[Tensor | None] = [None] * self._count
        for places, own in self._gradients:
            for place, copy in zip(places, torch_private.clone_each(own)):
                gradients[place] = copy
        return gradients


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


class Fingerprint:
    """What a recording took from a block: where its tensors lie, its modules, their plain attributes and hooks."""

    def __init__(self, block: nn.Module):
        modules = list(block.modules())
        places = [m._parameters for m in modules] + [m._buffers for m in modules]
        self._tensors = [(d, n, t, *_place(t)) for d in places for n, t in d.items() if t is not None]
        self._children = [(m._modules, dict(m._modules)) for m in modules]
        self._hooks = [d for m in modules[1:] for d in (m._forward_hooks, m._forward_pre_hooks, m._backward_hooks)]
        self._hooked = sum(map(len, self._hooks))
        plain = [(m.__dict__, _plain_attributes(m)) for m in modules]
        self._attributes = [(d, itemgetter(*v), itemgetter(*v)(v)) for d, v in plain if v]

    def changed(self) -> bool:
        for holder, name, tensor, address, needs in self._tensors:
            if holder.get(name) is not tensor or tensor.data_ptr() != address or tensor.requires_grad is not needs:
                return True
        for now, before in self._children:
            if now != before:
                return True
        if (self._hooked or any(self._hooks)) and sum(map(len, self._hooks)) != self._hooked:
            return True
        try:
            for holder, read, values in self._attributes:
                if read(holder) != values:
                    return True
        except KeyError:  # an attribute is gone
            return True
        return False


def _place(tensor: Tensor) -> tuple[int, bool]:
    return tensor.data_ptr(), tensor.requires_grad


def _plain_attributes(module: nn.Module) -> dict[str, Any]:
    """The attributes of a module that are numbers, strings or flags, or lists and dicts of them."""
    found = {}
    for name, value in module.__dict__.items():
        kind = type(value)
        inner = value.values() if kind is dict else value if kind in (list, tuple) else [value]
        own = name not in _INHERITED and not name.startswith("_tilesmith")
        if own and all(isinstance(v, bool | int | float | str) for v in inner):
            found[name] = kind(value) if kind in (list, dict) else value
    return found


@contextlib.contextmanager
def _own_saved_tensors() -> Iterator[None]:
    """Keep what a forward saves from hooks that are on around it: checkpointing would count it as the block's."""
    if torch_private.saved_tensors_hooks(False) is None:
        yield
        return
    with torch.autograd.graph.saved_tensors_hooks(lambda saved: saved.detach(), lambda saved: saved):
        yield


@contextlib.contextmanager
def uncached_autocast(kind: str) -> Iterator[None]:
    """The autocast that is on, without its cache of casts: what one graph casts another must not look for."""
    if not torch.is_autocast_enabled(kind):
        yield
        return
    with torch.autocast(kind, torch.get_autocast_dtype(kind), cache_enabled=False):
        yield
