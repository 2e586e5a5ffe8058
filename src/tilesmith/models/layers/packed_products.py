"""Products of several linear layers as one: weights in one memory, and what has not been asked for yet."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tilesmith.rewrite.siblings import Siblings, joined, parts_of

# A backward joins the gradients of the parts first, one pass over them. Above so many rows that costs more than the
# launches that it saves: at 8,192 rows of a Llama of 8 B it reads and writes 0.9 GB for gate and up.
MOST_ROWS = 4096


class _Joined(torch.autograd.Function):
    """Parameters that follow one another in memory as one tensor; its gradient is handed out as views.

    used: the parts of the product that a backward has given a gradient; the parameters of the others get none.
    """

    @staticmethod
    def forward(ctx: Any, whole: _Whole, used: set[int], *parts: Tensor) -> Tensor:
        ctx.used, ctx.sizes = used, [part.shape[0] for part in parts]
        return whole.memory.data  # the same memory, but no view of it, which autograd would look after

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return None, None, *(g if i in ctx.used else None for i, g in enumerate(grad.split(ctx.sizes)))


class _Parts(torch.autograd.Function):
    """The columns of a product as separate tensors, which are disjoint and may be written to; one pass back.

    weights: those that the gradient of the product's input is made of.
    """

    @staticmethod
    def forward(
        ctx: Any, y: Tensor, sizes: tuple[int, ...], weights: Sequence[Tensor], used: set[int]
    ) -> tuple[Tensor, ...]:
        ctx.sizes, ctx.used = sizes, used
        ctx.set_materialize_grads(False)
        # Views of no element: whoever writes to a weight before the backward is told, and nothing is kept.
        ctx.save_for_backward(*(weight.detach()[:0] for weight in weights))
        return parts_of(y, sizes)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, None, None, None]:
        ctx.saved_tensors  # noqa: B018 - raises for a weight that was written to
        ctx.used.update(i for i, grad in enumerate(grads) if grad is not None)
        return joined(grads, ctx.sizes), None, None, None

    @staticmethod
    def jvp(ctx: Any, dy: Tensor, *_: None) -> tuple[Tensor, ...]:
        return tuple(part.contiguous() for part in dy.split(ctx.sizes, -1))


class _Whole:
    """Memory that parameters fill, one after the other. Each has a storage of its own, which is a part of this one:
    whoever tells tensors apart by their storages, as code that saves them does, sees nothing shared."""

    def __init__(self, parts: Sequence[Tensor]):
        self.memory = torch.cat([part.data for part in parts])

    def take(self, parts: Sequence[Tensor]) -> None:
        """Let the parameters whose values these are be here; they stay the same objects."""
        end = 0
        for part in parts:
            start, end = end, end + part.nbytes
            storage = self.memory.untyped_storage()[start:end]
            part.data = self.memory.new_empty(0).set_(storage, 0, part.shape)

    def filled_by(self, parts: Sequence[Tensor | None]) -> bool:
        """Whether these are plain parameters, each contiguous and where the one before ends."""
        at = self.memory.data_ptr()
        for part in parts:
            if type(part) is not nn.Parameter or part.data_ptr() != at or not part.is_contiguous():
                return False
            at += part.nbytes
        return at == self.memory.data_ptr() + self.memory.nbytes

    def holds(self, part: Tensor | None) -> bool:
        """Whether a plain parameter is here."""
        if type(part) is not nn.Parameter:
            return False
        return 0 <= part.data_ptr() - self.memory.data_ptr() < self.memory.nbytes


class Group(Siblings):
    """The layers of one packed product."""

    def __init__(self, layers: Sequence[nn.Linear]):
        self.layers = tuple(layers)
        self.asked = {}
        self.wholes: tuple[_Whole, ...] = ()  # of weights and, where there are any, of biases
        self._first: weakref.ref[Tensor] | None = None  # the first weight when it was moved

    def __getstate__(self) -> dict[str, Any]:
        # What an exception left behind may be no leaf, which is not copied. Copies of the parameters lie elsewhere.
        return {"layers": self.layers, "asked": {}, "wholes": (), "_first": None}

    @torch.inference_mode(False)  # what is made in it could not be trained
    def gather(self) -> None:
        """Move the values of the parameters into one new memory for the weights and one for the biases."""
        parts = [some for some in tensors_of(self.layers) if some]
        wholes = tuple(map(_Whole, parts))
        for whole, some in zip(wholes, parts):
            whole.take(some)
        self.wholes, self._first = wholes, weakref.ref(parts[0][0])

    @torch.inference_mode(False)
    def scatter(self) -> None:
        """Give each parameter that is still where `gather` put it memory of its own, with its values."""
        for whole, parts in zip(self.wholes, tensors_of(self.layers)):
            for part in filter(whole.holds, parts):
                part.data = part.data.clone()
        self.wholes = ()

    def together(self) -> bool:
        """Whether the parameters are where `gather` put them."""
        parts = [some for some in tensors_of(self.layers) if some]
        if len(parts) == len(self.wholes) and all(w.filled_by(some) for w, some in zip(self.wholes, parts)):
            return True
        first = None if self._first is None else self._first()
        if self.wholes and not self.wholes[0].holds(first):  # not just replaced for a while: let go of the memory
            self.wholes = ()
        return False

    def served(self, x: Tensor) -> bool:
        """Whether the weights lie one below the other, x is of their kind, and one product is worth it."""
        if type(x) not in (Tensor, nn.Parameter) or not x.ndim:
            return False
        if torch.is_grad_enabled() and x.numel() > MOST_ROWS * x.shape[-1]:
            return False
        weights, _ = tensors_of(self.layers)
        return self.together() and len({weight.requires_grad for weight in weights}) == 1

    def product(self, x: Tensor) -> tuple[Tensor, ...]:
        """The outputs of all layers."""
        weights, biases = tensors_of(self.layers)
        used: set[int] = set()
        joined = [_joined(whole, used, parts) for whole, parts in zip(self.wholes, (weights, biases))]
        sizes = tuple(weight.shape[0] for weight in weights)
        read = weights if x.requires_grad and torch.is_grad_enabled() else ()
        return _Parts.apply(F.linear(x, *joined), sizes, read, used)


def _joined(whole: _Whole, used: set[int], parts: Sequence[Tensor]) -> Tensor:
    if torch.is_grad_enabled() and any(part.requires_grad for part in parts):
        return _Joined.apply(whole, used, *parts)
    return whole.memory


def tensors_of(layers: Sequence[nn.Module]) -> tuple[list[Tensor | None], list[Tensor]]:
    """The weights of layers, None for one without, and the biases that there are."""
    held = [layer._parameters for layer in layers]
    biases = [own.get("bias") for own in held]
    return [own.get("weight") for own in held], [bias for bias in biases if bias is not None]
