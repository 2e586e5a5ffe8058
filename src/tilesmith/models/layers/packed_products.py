"""Products of several linear layers as one: weights in one storage, and what has not been asked for yet."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tilesmith.engine import torch_private

# A backward joins the gradients of the parts first, one pass over them. Above so many rows that costs more than the
# launches that it saves: at 8,192 rows of a Llama of 8 B it reads and writes 0.9 GB for gate and up.
MOST_ROWS = 4096
MOST_IN_VAIN = 2  # an exception between two layers leaves one behind; code that asks for one layer only, more


class _Joined(torch.autograd.Function):
    """Tensors that follow one another in memory as one; its gradient is handed out as views."""

    @staticmethod
    def forward(ctx: Any, *parts: Tensor) -> Tensor:
        ctx.save_for_backward(*parts)  # whoever writes to one of them before the backward is told
        return _spanning(parts)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, ...]:
        return grad.split([part.shape[0] for part in ctx.saved_tensors])


class _Parts(torch.autograd.Function):
    """The columns of a product as separate tensors, which are disjoint and may be written to; one pass back."""

    @staticmethod
    def forward(ctx: Any, y: Tensor, sizes: tuple[int, ...]) -> tuple[Tensor, ...]:
        starts = itertools.accumulate(sizes, initial=y.storage_offset())
        shapes = [(*y.shape[:-1], size) for size in sizes]
        storage = y.untyped_storage()
        return tuple(y.new_empty(0).set_(storage, start, shape, y.stride()) for start, shape in zip(starts, shapes))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return torch.cat(grads, -1), None


class Group:
    """The layers of one packed product, and what each thread has not asked for yet of the last one."""

    def __init__(self, layers: Sequence[nn.Linear]):
        self.layers = tuple(layers)
        self.asked: dict[int, _Asked] = {}  # by threads

    def __getstate__(self) -> dict[str, Any]:
        return {"layers": self.layers, "asked": {}}  # what an exception left behind may be no leaf, which is not copied

    def output(self, layer: nn.Module, which: int, x: Tensor) -> Tensor | None:
        """What `layer` computes of x; None if it has to do so itself, as a replica of it has."""
        if layer is not self.layers[which] or torch_private.functorch() is not None:
            return None
        thread = threading.get_ident()
        asked = self.asked.get(thread)
        if asked is None:
            asked = self.asked[thread] = _Asked(self)
        return None if asked.off else asked.output(layer, which, x)

    def served(self, x: Tensor) -> bool:
        """Whether the weights lie one below the other, x is of their kind, and one product is worth it."""
        if torch.is_grad_enabled() and x.numel() > MOST_ROWS * x.shape[-1]:
            return False
        weights, biases = tensors_of(self.layers)
        if len({weight.requires_grad for weight in weights}) > 1 or len(biases) not in (0, len(weights)):
            return False
        return type(x) in (Tensor, nn.Parameter) and adjacent(weights) and adjacent(biases)

    def product(self, x: Tensor) -> tuple[Tensor, ...]:
        """The outputs of all layers."""
        weights, biases = tensors_of(self.layers)
        bias = _joined(biases) if biases else None
        sizes = tuple(weight.shape[0] for weight in weights)
        return _Parts.apply(F.linear(x, _joined(weights), bias), sizes)


class _Asked:
    """What one thread has asked a group for."""

    def __init__(self, group: Group):
        self.group = group
        self.given: tuple[Any, ...] = ()
        self.waiting: dict[int, tuple[Tensor, tuple[Any, ...]]] = {}  # with the `_stamp` of its layer
        self.in_vain = 0  # products of which only one part was asked for, one after the other
        self.off = False  # a layer was given another tensor than the first

    def output(self, layer: nn.Module, which: int, x: Tensor) -> Tensor | None:
        """As of `Group`."""
        group, state = self.group, _state(x)
        if which in self.waiting:
            if self.given[0] is x and self.given[1:] == state:
                found, stamp = self.waiting.pop(which)
                self.in_vain = 0
                if not self.waiting:
                    self.given = ()
                return found if stamp == _stamp(layer) else None
            self.off, self.given, self.waiting = True, (), {}
            return None
        self.in_vain += bool(self.waiting)
        if self.in_vain > MOST_IN_VAIN or not group.served(x):
            self.given, self.waiting = (), {}
            return None
        self.given, self.waiting = (x, *state), dict(enumerate(zip(group.product(x), map(_stamp, group.layers))))
        return self.waiting.pop(which)[0]


def _state(x: Tensor) -> tuple[Any, ...]:
    """What has to be the same for two layers to compute of x together."""
    kind = x.device.type
    cast = torch.get_autocast_dtype(kind) if torch_private.autocasts(kind) else None
    return (0 if x.is_inference() else x._version), torch.is_grad_enabled(), cast


def _stamp(layer: nn.Linear) -> tuple[Any, ...]:
    """What tells that parameters of a layer were written to, frozen or replaced; a write to `.data` does not show."""
    parts = layer._parameters.values()
    return tuple((p.data_ptr(), 0 if p.is_inference() else p._version, p.requires_grad) for p in parts if p is not None)


def adjacent(parts: Sequence[Tensor]) -> bool:
    """Whether these are plain parameters of one storage, each contiguous and where the one before ends."""
    end = None
    for part in parts:
        if type(part) is not nn.Parameter or not part.is_contiguous() or part.device.type == "meta":
            return False
        here = part.data_ptr(), part.storage_offset()
        if end is not None and here != end:
            return False
        end = here[0] + part.numel() * part.element_size(), here[1] + part.numel()
    return True


def _spanning(parts: Sequence[Tensor]) -> Tensor:
    first = parts[0]
    shape = (sum(part.shape[0] for part in parts), *first.shape[1:])
    with torch.no_grad():
        return first.new_empty(0).set_(first.untyped_storage(), first.storage_offset(), shape, first.stride())


def _joined(parts: Sequence[Tensor]) -> Tensor:
    if torch.is_grad_enabled() and any(part.requires_grad for part in parts):
        return _Joined.apply(*parts)
    return _spanning(parts)


@torch.inference_mode(False)  # what is made in it could not be trained
def pack(parts: Sequence[Tensor]) -> None:
    """Move the values of parameters into one new storage, in this order; the parameters stay the same objects."""
    if parts and not adjacent(parts):
        whole = torch.cat([part.data for part in parts])
        for part, piece in zip(parts, whole.split([part.shape[0] for part in parts])):
            part.data = piece


@torch.inference_mode(False)
def unpack(parts: Sequence[Tensor]) -> None:
    """Give each parameter a storage of its own again, with its values."""
    if len(parts) > 1 and adjacent(parts):
        for part in parts:
            part.data = part.data.clone()


def tensors_of(layers: Sequence[nn.Linear]) -> tuple[list[Tensor], list[Tensor]]:
    return [layer.weight for layer in layers], [layer.bias for layer in layers if layer.bias is not None]
