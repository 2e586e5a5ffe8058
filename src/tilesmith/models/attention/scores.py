"""Attention scores that are followed from the product of queries and keys to the product with the values.

What happens to them on the way (scale, bias, mask, shape, softmax, dropout) is recorded; if that is all, the product
with the values is one `ops.attention`, and no [T, S] matrix was made. Any other use computes them, step by step as
written.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tilesmith.models.attention.added_masks import HIDDEN
from tilesmith.models.attention.recorded_scores import Recorded, autocast_dtype
from tilesmith.models.reach import ran, reaches

_LARGEST_HEAD = 256


@dataclass(eq=False)
class _Made:
    """What scores are at one point of a forward. An operation in place makes another one, so that those made of this
    one before stay what they are.

    before, step: what this was made of, and how.
    """

    recorded: Recorded
    before: _Made | None
    step: Callable[..., Tensor]
    known: Tensor | None = None

    def tensor(self) -> Tensor:
        if self.known is None:
            self.known = self.step() if self.before is None else self.step(self.before.tensor())
        return self.known


@dataclass(eq=False)
class Scores:
    """Scores, or the weights that softmax made of them; a tensor for all purposes except `isinstance`.

    module: on whose behalf. made: what they are now.
    """

    module: nn.Module
    made: _Made

    @property
    def recorded(self) -> Recorded:
        return self.made.recorded

    @property
    def known(self) -> Tensor | None:
        return self.made.known

    def tensor(self) -> Tensor:
        """The values, with their gradient, computed as the module says."""
        return self.made.tensor()

    def _then(self, recorded: Recorded | None, step: Callable[[Tensor], Tensor]) -> Scores | Tensor:
        if recorded is None or self.known is not None:
            return step(self.tensor())
        return Scores(self.module, _Made(recorded, self.made, step))

    def _become(self, other: Scores | Tensor) -> Scores:
        """In place: this is what `other` is from now on, in the dtype that it has."""
        other = other if other.dtype is self.dtype else other.to(self.dtype)
        self.made = other.made if isinstance(other, Scores) else replace(self.made, known=other)
        return self

    @property
    def shape(self) -> torch.Size:
        return torch.Size(self.recorded.shape) if self.known is None else self.known.shape

    @property
    def ndim(self) -> int:
        return len(self.shape)

    @property
    def dtype(self) -> torch.dtype:
        return self.recorded.dtype if self.known is None else self.known.dtype

    @property
    def device(self) -> torch.device:
        return self.recorded.q.device

    def size(self, dim: int | None = None) -> torch.Size | int:
        return self.shape if dim is None else self.shape[dim]

    def dim(self) -> int:
        return self.ndim

    def _scaled(self, factor: float, step: Callable[[Tensor], Tensor]) -> Scores | Tensor:
        have = self.recorded
        if have.normalised:
            return step(self.tensor())
        biases = tuple(bias * factor for bias in have.biases)
        # times 0 or less, what is hidden would be hidden no more
        fits = factor > 0 or not have.hidden
        return self._then(replace(have, scale=have.scale * factor, biases=biases) if fits else None, step)

    def __mul__(self, other: Any) -> Scores | Tensor:
        if isinstance(other, (int, float)):
            return self._scaled(float(other), lambda x: x * other)
        return self.tensor() * as_tensors(other)

    __rmul__ = __mul__

    def __truediv__(self, other: Any) -> Scores | Tensor:
        if isinstance(other, (int, float)) and other:
            return self._scaled(1.0 / other, lambda x: x / other)
        return self.tensor() / as_tensors(other)

    def __add__(self, other: Any) -> Scores | Tensor:
        other = as_tensors(other)
        have = self.recorded
        if not isinstance(other, Tensor) or have.normalised or not other.is_floating_point():
            return self.tensor() + other
        bias = have.placed(other)
        dtype = torch.promote_types(have.dtype, other.dtype) if other.ndim else have.dtype
        after = None if bias is None else replace(have, biases=(*have.biases, bias), dtype=dtype)
        return self._then(after, lambda x: x + other)

    __radd__ = __add__

    def __imul__(self, other: Any) -> Scores:
        return self._become(self * other if self.known is None else self.known.mul_(as_tensors(other)))

    def __itruediv__(self, other: Any) -> Scores:
        return self._become(self / other if self.known is None else self.known.div_(as_tensors(other)))

    def __iadd__(self, other: Any) -> Scores:
        return self._become(self + other if self.known is None else self.known.add_(as_tensors(other)))

    def masked_fill(self, mask: Any, value: Any) -> Scores | Tensor:
        """As `Tensor.masked_fill`; followed where the value hides keys."""
        mask, value, have = as_tensors(mask), as_tensors(value), self.recorded
        hides = isinstance(value, (int, float)) and value <= HIDDEN and not have.normalised
        hidden = have.placed(mask) if hides and mask.dtype is torch.bool else None
        after = None if hidden is None else replace(have, hidden=(*have.hidden, hidden))
        return self._then(after, lambda x: x.masked_fill(mask, value))

    def masked_fill_(self, mask: Any, value: Any) -> Scores:
        fill = self.masked_fill if self.known is None else self.known.masked_fill_
        return self._become(fill(as_tensors(mask), as_tensors(value)))

    def view(self, *shape: Any) -> Scores | Tensor:
        """As `Tensor.view`; followed between [B, H, T, S] and [B·H, T, S]."""
        sizes = tuple(shape[0]) if len(shape) == 1 and isinstance(shape[0], (tuple, list)) else shape
        if not all(isinstance(size, int) for size in sizes):
            return self.tensor().view(*shape)
        if -1 in sizes:
            rest = max(1, -math.prod(sizes))
            sizes = tuple(math.prod(self.shape) // rest if size == -1 else size for size in sizes)
        return self._then(self.recorded.seen_as(sizes), lambda x: x.reshape(sizes))

    reshape = view

    def contiguous(self) -> Scores | Tensor:
        return self if self.known is None else self.known.contiguous()

    def to(self, *where: Any, **named: Any) -> Scores | Tensor:
        """As `Tensor.to`; followed where no more than the dtype changes."""
        given = (*where, *named.values())
        if len(given) == 1 and isinstance(given[0], torch.dtype) and given[0].is_floating_point:
            return self._then(replace(self.recorded, dtype=given[0]), lambda x: x.to(given[0]))
        return self.tensor().to(*map(as_tensors, where), **named)

    def float(self) -> Scores | Tensor:
        return self.to(torch.float32)

    def type(self, dtype: Any = None) -> Any:
        return self.to(dtype) if isinstance(dtype, torch.dtype) else self.tensor().type(dtype)

    def type_as(self, other: Any) -> Scores | Tensor:
        return self.to(other.dtype)

    def softmax(self, dim: int | None = None, dtype: torch.dtype | None = None, **more: Any) -> Scores | Tensor:
        """As `Tensor.softmax`; followed over the keys."""
        have, last = self.recorded, dim in (-1, self.ndim - 1)
        kind = dtype or (torch.float32 if autocast_dtype(have.q) is not None else have.dtype)
        after = replace(have, normalised=True, dtype=kind) if last and not have.normalised else None
        return self._then(after, lambda x: F.softmax(x, dim, dtype=dtype))

    def dropped(self, p: float = 0.5, training: bool = True, inplace: bool = False) -> Scores | Tensor:
        """As `torch.nn.functional.dropout`; followed once, after softmax."""
        if inplace:
            return self._become(self.dropped(p, training))
        if not training or p == 0.0:
            return self
        have = self.recorded
        fits = have.normalised and have.dropout is None and p < 1.0
        return self._then(replace(have, dropout=p) if fits else None, lambda x: F.dropout(x, p, True))

    def values(self, v: Any) -> Tensor:
        """The product with the values."""
        v = as_tensors(v)
        out = self.recorded.attended(v) if self.known is None and self.recorded.normalised else None
        if out is None:
            return torch.matmul(self.tensor(), v)
        ran(self.module, "attention")
        return out

    def __matmul__(self, other: Any) -> Tensor:
        return self.values(other)

    matmul = bmm = values

    def __rmatmul__(self, other: Any) -> Tensor:
        return torch.matmul(as_tensors(other), self.tensor())

    def __getitem__(self, index: Any) -> Tensor:
        return self.tensor()[as_tensors(index)]

    def __setitem__(self, index: Any, value: Any) -> None:
        self.tensor()[index] = as_tensors(value)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(self.tensor(), name)

    def __len__(self) -> int:
        return self.shape[0]

    def __repr__(self) -> str:
        return f"Scores(shape={tuple(self.shape)}, dtype={self.dtype}, device={self.device})"

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.tensor().detach().__reduce_ex__(protocol)

    __hash__ = object.__hash__

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs = kwargs or {}
        name = _FOLLOWED.get(function)
        if name is not None and args and isinstance(args[0], Scores):
            return getattr(args[0], name)(*args[1:], **{n: v for n, v in kwargs.items() if n != "_stacklevel"})
        if function in _AS and len(args) == 2 and isinstance(args[1], Scores):
            return _AS[function](as_tensors(args[0]), args[1].shape)
        if function is torch.where and len(args) == 3 and not kwargs and isinstance(args[1], Scores):
            keep, scores, other = args
            value = other.item() if isinstance(other, Tensor) and other.ndim == 0 and other.is_cpu else other
            if isinstance(value, float):
                return scores.masked_fill(~as_tensors(keep), value)
        return function(*map(as_tensors, args), **{n: as_tensors(value) for n, value in kwargs.items()})


_AS = {Tensor.expand_as: Tensor.expand, Tensor.reshape_as: Tensor.reshape, Tensor.view_as: Tensor.view}
"""What takes no more than the shape of a tensor, and what does the same by a shape."""

_FOLLOWED: dict[Any, str] = {
    F.softmax: "softmax",
    torch.softmax: "softmax",
    F.dropout: "dropped",
    torch.matmul: "values",
    torch.bmm: "values",
    torch.masked_fill: "masked_fill",
    torch.mul: "__mul__",
    torch.div: "__truediv__",
    torch.add: "__add__",
}


def _materialising(name: str) -> Callable[..., Any]:
    def method(self: Scores, *args: Any) -> Any:
        return getattr(self.tensor(), name)(*map(as_tensors, args))

    return method


_OPERATORS = "sub rsub rtruediv pow neg abs eq ne lt le gt ge and or xor invert bool iter array"
for _name in _OPERATORS.split():
    setattr(Scores, f"__{_name}__", _materialising(f"__{_name}__"))
Scores.__hash__ = object.__hash__


def as_tensors(value: Any) -> Any:
    """The values of `Scores`, alone or in lists and tuples; anything else as it is."""
    if type(value) in (list, tuple):
        return type(value)([as_tensors(one) for one in value])
    return value.tensor() if isinstance(value, Scores) else value


def scores(module: nn.Module, a: Any, b: Any) -> Scores | Tensor:
    """torch.matmul(a, b), followed where a may be queries [B, H, T, D] and b keys [B, G, D, S], or without H and G."""
    if not _servable(a, b):
        return torch.matmul(a, b)
    q, k = a, b.transpose(-1, -2)
    if a.ndim == 3:
        q, k = q.unsqueeze(1), k.unsqueeze(1)
    batch = max(q.shape[0], k.shape[0])
    q = q.expand(batch, -1, -1, -1)
    shape = (*a.shape[:-1], b.shape[-1])
    recorded = Recorded(q, k, (batch, *shape[1:]), autocast_dtype(q) or q.dtype)
    return Scores(module, _Made(recorded, None, lambda: torch.matmul(a, b)))


def scores_added(
    module: nn.Module, added: Any, batch1: Any, batch2: Any, *, beta: float = 1.0, alpha: float = 1.0
) -> Scores | Tensor:
    """torch.baddbmm(added, batch1, batch2, beta=beta, alpha=alpha), followed as `scores` is."""
    found = scores(module, batch1, batch2)
    if not isinstance(found, Scores) or not isinstance(added, Tensor):
        return torch.baddbmm(as_tensors(added), batch1, batch2, beta=beta, alpha=alpha)
    bias = found.recorded.placed(added)
    if bias is None:
        return torch.baddbmm(added, batch1, batch2, beta=beta, alpha=alpha)
    recorded = replace(found.recorded, scale=float(alpha), biases=(bias * beta if beta != 1 else bias,))
    step = functools.partial(torch.baddbmm, added, batch1, batch2, beta=beta, alpha=alpha)
    return Scores(module, _Made(recorded, None, step))


def _servable(a: Any, b: Any) -> bool:
    if not (isinstance(a, Tensor) and isinstance(b, Tensor)) or type(a) is not Tensor or type(b) is not Tensor:
        return False
    alike = a.dtype is b.dtype and a.device == b.device and a.is_floating_point()
    if not alike or a.ndim != b.ndim or a.ndim not in (3, 4) or a.shape[-1] > _LARGEST_HEAD:
        return False
    if a.ndim == 3:
        fits = a.shape[0] == b.shape[0]
    else:
        fits = b.shape[1] in (1, a.shape[1]) and (a.shape[0] == b.shape[0] or 1 in (a.shape[0], b.shape[0]))
    return fits and reaches("attention", a)
