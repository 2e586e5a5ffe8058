"""What a checkpointed layer keeps of its input until its backward: all of it, e4m3, or either in host memory.

The checkpoint itself is `torch.utils.checkpoint`, which takes care of random numbers and autocast. Only the one tensor
that it saves goes through hooks.
"""

from __future__ import annotations

import contextlib
import time
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tilesmith import ops
from tilesmith.rewrite import Form, forms, swap, unswap

# The host allocator rounds to powers of two, so a tensor of 3.2 GB in one piece would take 4.3 GB.
BLOCK = 2**28
DECODED_ROWS = 2**14  # at a time, so that the widened codes stay small beside the result
_SWITCHES = ("gradient_checkpointing", "_gradient_checkpointing_func")  # the attributes that transformers sets
_BEFORE = "_tilesmith_checkpoint_before"
PLAN = "tilesmith_sequence_plan"  # the attribute of a model that has one
_ABSENT = "absent"


class Keep(NamedTuple):
    """How a layer's input is kept. e4m3: in 8 bits with a factor for each row. host: in host memory."""

    e4m3: bool = False
    host: bool = False

    def __str__(self) -> str:
        return {(False, False): "device", (True, False): "e4m3", (False, True): "host"}.get(self, "e4m3 on the host")

    def bytes(self, rows: int, columns: int, itemsize: int) -> tuple[int, int]:
        """(on the device, in host memory) of an input [rows, columns]. The factors stay on the device."""
        values = rows * columns * (1 if self.e4m3 else itemsize)
        factors = 4 * rows if self.e4m3 else 0
        return (factors, values) if self.host else (values + factors, 0)


class HostBlocks:
    """Blocks of host memory, pinned where `device` is an accelerator. They are allocated once and used again.

    bytes: allocated so far; seconds: what that took.
    """

    def __init__(self, device: torch.device):
        self.device, self.bytes, self.seconds = device, 0, 0.0
        self._free: dict[int, list[Tensor]] = defaultdict(list)

    def __reduce__(self) -> Any:
        return HostBlocks, (self.device,)  # a copy or an unpickled model allocates its own

    def reserve(self, sizes: list[int]) -> None:
        """Allocate what tensors of so many bytes need, all at once."""
        for block in [block for size in sizes for block in self.take(size)]:
            self.give([block])

    def take(self, size: int) -> list[Tensor]:
        """Blocks, of a power of two bytes each, that hold `size` bytes together."""
        each = min(BLOCK, 1 << max(0, size - 1).bit_length())
        free = self._free[each]
        return [free.pop() if free else self._allocated(each) for _ in range(-(-size // each))]

    def give(self, blocks: list[Tensor]) -> None:
        """Take blocks back."""
        for block in blocks:
            self._free[block.numel()].append(block)

    def _allocated(self, size: int) -> Tensor:
        start = time.perf_counter()
        made = torch.empty(size, dtype=torch.uint8, pin_memory=self.device.type != "cpu")
        self.seconds += time.perf_counter() - start
        self.bytes += size
        return made


class Shelf:
    """Host memory for the inputs of a model's layers, and the stream of its own on which they are copied.

    A layer's backward runs after that of the layer above it, so whoever fetches a tensor also starts the copy of the
    one that was put before it.
    """

    def __init__(self, device: torch.device):
        self.device, self.blocks = device, HostBlocks(device)
        self.last: weakref.ref[OnHost] | None = None
        self._stream: Any = None

    def __reduce__(self) -> Any:
        return Shelf, (self.device,)

    @property
    def stream(self) -> Any:
        """The stream of the copies; None on a CPU."""
        if self._stream is None and self.device.type != "cpu":
            self._stream = torch.get_device_module(self.device).Stream(self.device)
        return self._stream

    def copy(self, targets: list[Tensor], sources: list[Tensor], used: Tensor) -> Any:
        """Copy each after what the current stream has been given so far; returns the event that ends it, or None.

        used: the tensor on the device, whose memory is not handed out again before the copies are over.
        """
        if self.stream is None:
            for target, source in zip(targets, sources):
                target.copy_(source)
            return None
        module = torch.get_device_module(self.device)
        self.stream.wait_stream(module.current_stream(self.device))
        with module.stream(self.stream):
            for target, source in zip(targets, sources):
                target.copy_(source, non_blocking=True)
        used.record_stream(self.stream)
        return self.stream.record_event()


class OnHost:
    """A tensor in host memory, until nothing refers to this object."""

    def __init__(self, shelf: Shelf, x: Tensor):
        self.shelf, self.shape, self.dtype = shelf, x.shape, x.dtype
        flat = x.detach().contiguous().view(-1).view(torch.uint8)
        self.blocks = shelf.blocks.take(flat.numel())
        shelf.copy(*self._pieces(flat), flat)
        weakref.finalize(self, shelf.blocks.give, self.blocks)
        self.previous, shelf.last = shelf.last, weakref.ref(self)
        self._fetched: tuple[Tensor, Any] | None = None

    def _pieces(self, flat: Tensor) -> tuple[list[Tensor], list[Tensor]]:
        pieces = flat.split(self.blocks[0].numel()) if self.blocks else ()
        return [block[: len(piece)] for block, piece in zip(self.blocks, pieces)], list(pieces)

    def fetch(self) -> None:
        """Start the copy to the device."""
        if self._fetched is None:
            made = torch.empty(self.shape, dtype=self.dtype, device=self.shelf.device)
            blocks, pieces = self._pieces(made.view(-1).view(torch.uint8))
            self._fetched = made, self.shelf.copy(pieces, blocks, made)

    def get(self) -> Tensor:
        """The tensor on the device, for the stream that is current."""
        self.fetch()
        (made, event), self._fetched = self._fetched, None
        if event is not None:
            torch.get_device_module(self.shelf.device).current_stream(self.shelf.device).wait_event(event)
        before = None if self.previous is None else self.previous()
        if before is not None:
            before.fetch()
        return made


class InE4m3:
    """A tensor as e4m3 codes with a factor for each row: what comes back is off by at most 1/16 of each value, or by
    2^-10 of the factor, which is the row's largest magnitude divided by 448, where that is more."""

    def __init__(self, x: Tensor, shelf: Shelf | None):
        self.shape, self.dtype = x.shape, x.dtype
        codes, self.factor = ops.fp8_cast_rows(x.detach().reshape(-1, x.shape[-1]))
        self.codes = codes if shelf is None else OnHost(shelf, codes)

    def get(self) -> Tensor:
        """The tensor, rounded."""
        codes = self.codes.get() if isinstance(self.codes, OnHost) else self.codes
        out = torch.empty(codes.shape, dtype=self.dtype, device=codes.device)
        for start in range(0, len(codes), DECODED_ROWS):
            rows = slice(start, start + DECODED_ROWS)
            torch.mul(codes[rows].to(self.dtype), self.factor[rows], out=out[rows])
        return out.view(self.shape)


class Keeper:
    """The checkpoint function of one layer: it recomputes the layer in the backward from the input that `keep` says how
    to keep. The layer's input is its first floating tensor; other arguments, which layers share, stay as they are."""

    def __init__(self, keep: Keep, shelf: Shelf):
        self.keep, self.shelf = keep, shelf

    def __call__(self, function: Any, *args: Any, **kwargs: Any) -> Any:
        place = next((i for i, a in enumerate(args) if isinstance(a, Tensor) and a.is_floating_point()), None)
        if self.keep == Keep() or place is None:
            return checkpoint(function, *args, use_reentrant=False, **kwargs)
        before, after = args[:place], args[place + 1 :]

        def call(x: Tensor) -> Any:
            return function(*before, x, *after, **kwargs)

        with torch.autograd.graph.saved_tensors_hooks(self._packed, _unpacked):
            return checkpoint(call, args[place], use_reentrant=False)

    def _packed(self, x: Tensor) -> Any:
        if x.numel() == 0:  # checkpoint saves an empty tensor of its own beside the input
            return x
        shelf = self.shelf if self.keep.host else None
        return InE4m3(x, shelf) if self.keep.e4m3 else OnHost(self.shelf, x)


def _unpacked(kept: Any) -> Tensor:
    return kept if isinstance(kept, Tensor) else kept.get()


def switch_of(model: nn.Module) -> str | None:
    """The method that switches checkpointing of a transformers model on: activation_checkpointing_enable since 5.23,
    where gradient_checkpointing_enable warns. None where the model has neither."""
    names = (f"{kind}_checkpointing_enable" for kind in ("activation", "gradient"))
    return next((name for name in names if hasattr(model, name)), None)


def checkpointed_layers(model: nn.Module) -> dict[str, nn.Module]:
    """The layers of a transformers model that can be checkpointed, by name, outermost, in order."""
    found: dict[str, nn.Module] = {}
    for name, module in model.named_modules():
        known = any(cls.__name__ == "GradientCheckpointingLayer" for cls in type(module).__mro__)
        if known and not any(name.startswith(f"{outer}.") for outer in found):
            found[name] = module
    return found


def stacks_of(model: nn.Module, layers: dict[str, nn.Module]) -> list[nn.Module]:
    """The modules around these layers that transformers tells of checkpointing, too: they make no cache then."""
    around = {name.rpartition(".")[0] for name in layers}
    around |= {outer[:at] for outer in around for at, c in enumerate(outer) if c == "."} | {""}
    return [m for m in map(model.get_submodule, sorted(around)) if hasattr(m, _SWITCHES[0])]


@contextlib.contextmanager
def repeated_within(model: nn.Module, entered: Callable[[], contextlib.AbstractContextManager]) -> Iterator[None]:
    """Inside, what layers of `model` give their checkpoint runs within `entered()`, also when a backward repeats it."""
    flag, name = _SWITCHES
    before = {m: m.__dict__[name] for m in model.modules() if getattr(m, flag, False) and name in m.__dict__}
    try:
        for module, function in before.items():
            module.__dict__[name] = _within(function, entered)
        yield
    finally:
        for module, function in before.items():
            module.__dict__[name] = function


def _within(checkpointing: Callable[..., Any], entered: Callable[[], contextlib.AbstractContextManager]) -> Any:
    def checkpointed(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        def run(*args: Any, **kwargs: Any) -> Any:
            with entered():
                return function(*args, **kwargs)

        return checkpointing(run, *args, **kwargs)

    return checkpointed


@dataclass(frozen=True)
class KeptForm(Form):
    """A layer that a `Keeper` checkpoints whoever switches checkpointing on, as trainers do: transformers sets the two
    attributes of each layer then. What they are set to is kept for `detach`; switching off does switch off."""

    def namespace(self, base: type) -> dict[str, Any]:
        return {name: property(_getter(name, base), setter) for name, setter in zip(_SWITCHES, (_switch, _refuse))}

    def leave(self, module: nn.Module) -> None:
        for name, value in module.__dict__.pop(_BEFORE, {}).items():
            if isinstance(value, str):
                module.__dict__.pop(name, None)
            else:
                module.__dict__[name] = value


def _getter(name: str, base: type) -> Callable[[nn.Module], Any]:
    def get(layer: nn.Module) -> Any:
        return layer.__dict__[name] if name in layer.__dict__ else getattr(base, name)

    return get


def _switch(layer: nn.Module, on: bool) -> None:
    flag, _ = _SWITCHES
    layer.__dict__[_BEFORE][flag] = layer.__dict__[flag] = on


def _refuse(layer: nn.Module, function: Any) -> None:
    _, name = _SWITCHES
    layer.__dict__[_BEFORE][name] = function


def attach(layer: nn.Module, keeper: Keeper) -> None:
    """Have `layer` checkpointed by `keeper` while it trains."""
    if _BEFORE not in layer.__dict__:
        layer.__dict__[_BEFORE] = {name: layer.__dict__.get(name, _ABSENT) for name in _SWITCHES}
        swap(layer, KeptForm())
    layer.__dict__.update(zip(_SWITCHES, (True, keeper)))


def is_attached(model: nn.Module) -> bool:
    """Whether a layer of the model is checkpointed by a `Keeper`."""
    return any(_BEFORE in module.__dict__ for module in model.modules())


def detach(model: nn.Module) -> None:
    """Give every layer the checkpointing back that it had before `attach`, or that it was asked to have since, and
    forget the plan."""
    for module in model.modules():
        module.__dict__.pop(PLAN, None)
        if isinstance(next(iter(forms(module)), None), KeptForm):
            unswap(module)
