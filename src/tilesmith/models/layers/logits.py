"""Logits that are not computed until someone needs them, so that a cross-entropy on them never needs them.

While a model trains with labels, its output layer returns `LazyLogits`: hidden states and weight, with the scaling,
soft cap, reshaping and slicing that happened since. `torch.nn.functional.cross_entropy` of such an object is one
`linear_cross_entropy`; every other use computes the logits, with their gradient.
"""

from __future__ import annotations

import contextlib
import operator
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from tilesmith import ops
from tilesmith.engine.argument_checks import INTEGERS
from tilesmith.engine.torch_private import autocasts


class LazyLogits:
    """hidden @ weight.T + bias, then the recorded steps; a tensor for all purposes except `isinstance`.

    `tensor()` gives the real tensor [..., vocabulary]. It must be asked for before the weights change: after an
    optimizer step, or after a backward under FSDP, it raises RuntimeError, because it could no longer give the logits
    that the loss was computed from.
    """

    def __init__(
        self,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        dtype: torch.dtype,
        steps: tuple[tuple[str, Any], ...] = (),
        sample: Tensor | None = None,
        calls: dict[str, int] | None = None,
    ):
        self.hidden, self.weight, self.bias, self.dtype, self.steps = hidden, weight, bias, dtype, steps
        self.calls = calls  # where the output layer counts what was made of its output
        self.sample = _sample(weight, bias).clone() if sample is None else sample
        self.known: Tensor | None = None
        self.changed = False

    def tensor(self) -> Tensor:
        """The logits as a tensor, with their gradient where gradients are enabled."""
        known = self.known
        if known is not None and (self.changed or known.requires_grad or not torch.is_grad_enabled()):
            return known
        if not torch.compiler.is_compiling() and self._stale():
            raise RuntimeError(
                "these logits were not computed, and the weights have changed or were freed since: read outputs.logits "
                "before optimizer.step() (with FSDP before backward()), or call optimize(model, exclude=['loss'])"
            )
        kind = self.hidden.device.type
        with torch.autocast(kind, enabled=False) if autocasts(kind) else contextlib.nullcontext():
            made = F.linear(self.hidden, self.weight, self.bias)
            for step, value in self.steps:
                made = _STEPS[step](made, value)
        self.known = made
        return made

    def _stale(self) -> bool:
        if self.weight.is_meta:  # which has no values
            return False
        freed = self.weight.untyped_storage().size() == 0
        return freed or not torch.equal(self.sample, _sample(self.weight, self.bias))

    @property
    def shape(self) -> torch.Size:
        return torch.Size((*self.hidden.shape[:-1], self.weight.shape[0]))

    @property
    def device(self) -> torch.device:
        return self.hidden.device

    @property
    def ndim(self) -> int:
        return self.hidden.ndim

    @property
    def requires_grad(self) -> bool:
        return True

    def size(self, dim: int | None = None) -> torch.Size | int:
        return self.shape if dim is None else self.shape[dim]

    def dim(self) -> int:
        return self.hidden.ndim

    def numel(self) -> int:
        return self.shape.numel()

    def float(self) -> LazyLogits | Tensor:
        return self.to(torch.float32)

    def to(self, *where: Any, **named: Any) -> LazyLogits | Tensor:
        """As `Tensor.to`; lazy where no more than the dtype changes."""
        given = (*where, *named.values())
        if self.known is None and len(given) == 1:
            if isinstance(given[0], torch.dtype):
                return self if given[0] is self.dtype else self._stepped("to", given[0])
            if isinstance(given[0], torch.device) and given[0] == self.device:
                return self
        return self.tensor().to(*where, **named)

    def contiguous(self) -> LazyLogits | Tensor:
        return self if self.known is None else self.known.contiguous()

    def view(self, *shape: Any) -> LazyLogits | Tensor:
        """As `Tensor.view`; lazy where the vocabulary stays the last dimension."""
        sizes = tuple(shape[0]) if len(shape) == 1 and isinstance(shape[0], (tuple, list)) else shape
        if self.known is None and len(sizes) > 1 and sizes[-1] == self.weight.shape[0]:
            return self._moved(self.hidden.reshape(*sizes[:-1], self.hidden.shape[-1]))
        return self.tensor().view(*shape)

    reshape = view

    def __getitem__(self, index: Any) -> LazyLogits | Tensor:
        """Lazy for slices of anything but the vocabulary."""
        parts = index if isinstance(index, tuple) else (index,)
        if self.known is None and all(part is Ellipsis or isinstance(part, slice) for part in parts):
            count = sum(part is Ellipsis for part in parts)
            reaches_last = len(parts) - count == self.ndim or (count and parts[-1] is not Ellipsis)
            if not reaches_last or parts[-1] == slice(None):
                return self._moved(self.hidden[index])
        return self.tensor()[index]

    def __mul__(self, other: Any) -> LazyLogits | Tensor:
        if self.known is None and isinstance(other, (int, float)):
            return self._stepped("mul", other)
        return self.tensor() * other

    __rmul__ = __mul__

    def __truediv__(self, other: Any) -> LazyLogits | Tensor:
        if self.known is None and isinstance(other, (int, float)):
            return self._stepped("div", other)
        return self.tensor() / other

    def tanh(self) -> LazyLogits | Tensor:
        return self._stepped("tanh", None) if self.known is None else self.known.tanh()

    def __setitem__(self, index: Any, value: Any) -> None:
        self.tensor()[index] = _real(value)
        self.changed = True

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        found = getattr(self.tensor(), name)
        if name.endswith("_"):  # an in-place method: from now on the tensor is the truth
            self.changed = True
        return found

    def __len__(self) -> int:
        return self.shape[0]

    def __iter__(self) -> Iterator[Tensor]:
        return iter(self.tensor())

    def __array__(self, *args: Any, **named: Any) -> Any:
        return self.tensor().__array__(*args, **named)

    def __repr__(self) -> str:
        return f"LazyLogits(shape={tuple(self.shape)}, dtype={self.dtype}, device={self.device})"

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.tensor().detach().__reduce_ex__(protocol)

    __hash__ = object.__hash__

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs = kwargs or {}
        if function is F.cross_entropy:
            return cross_entropy(*args, **kwargs)
        if function is torch.tanh and not kwargs and isinstance(args[0], LazyLogits):
            return args[0].tanh()
        return function(*_real(args), **{name: _real(value) for name, value in kwargs.items()})

    def _stepped(self, step: str, value: Any) -> LazyLogits:
        dtype = value if step == "to" else self.dtype
        return LazyLogits(
            self.hidden, self.weight, self.bias, dtype, (*self.steps, (step, value)), self.sample, self.calls
        )

    def _moved(self, hidden: Tensor) -> LazyLogits:
        return LazyLogits(hidden, self.weight, self.bias, self.dtype, self.steps, self.sample, self.calls)


def cross_entropy(
    input: Any,
    target: Any,
    weight: Tensor | None = None,
    size_average: bool | None = None,
    ignore_index: int = -100,
    reduce: bool | None = None,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> Tensor:
    """`torch.nn.functional.cross_entropy`, without the logits where `input` is lazy and [tokens, vocabulary]."""
    target = _real(target)
    folded = _scale_and_cap(input.steps) if isinstance(input, LazyLogits) and input.known is None else None
    labels = target.dtype in INTEGERS and target.ndim == 1 and input.ndim == 2  # torch takes others, uint8 for one
    if folded is None or not labels or size_average is not None or reduce is not None:
        rest = (weight, size_average, ignore_index, reduce, reduction, label_smoothing)
        return F.cross_entropy(_real(input), target, *rest)
    scale, softcap = folded
    if input.calls is not None:
        input.calls["linear_cross_entropy"] = input.calls.get("linear_cross_entropy", 0) + 1
    loss = ops.linear_cross_entropy(
        input.hidden,
        input.weight,
        target,
        input.bias,
        weight,
        scale=scale,
        softcap=softcap,
        ignore_index=ignore_index,
        reduction=reduction,
        label_smoothing=label_smoothing,
    )
    # Autocast computes a cross-entropy in float32 whatever its input, but for float64.
    raised = autocasts(input.device.type) and input.dtype is not torch.float64
    return loss.to(torch.float32 if raised else input.dtype)


def _scale_and_cap(steps: tuple[tuple[str, Any], ...]) -> tuple[float, float] | None:
    """(s, c) for which the steps are s * z, or c * tanh(s * z / c) where c is not 0; None when there are none."""
    inner, outer, capped = 1.0, 1.0, False
    for step, value in steps:
        if step == "tanh":
            if capped:
                return None
            capped = True
        elif step in ("mul", "div"):
            if step == "div" and value == 0:
                return None
            factor = value if step == "mul" else 1.0 / value
            inner, outer = (inner, outer * factor) if capped else (inner * factor, outer)
    if not capped:
        return inner, 0.0
    return (inner * outer, outer) if outer > 0 else None


def _materialising(name: str) -> Callable[..., Any]:
    def method(self: LazyLogits, *args: Any) -> Any:
        return getattr(self.tensor(), name)(*_real(args))

    return method


_OPERATORS = """
    add radd sub rsub rtruediv matmul rmatmul pow rpow neg abs floordiv rfloordiv mod eq ne lt le gt ge and or xor
    invert contains bool float int format
"""
for _name in _OPERATORS.split():
    setattr(LazyLogits, f"__{_name}__", _materialising(f"__{_name}__"))

_STEPS: dict[str, Callable[[Tensor, Any], Tensor]] = {
    "mul": operator.mul,
    "div": operator.truediv,
    "tanh": lambda logits, _: torch.tanh(logits),
    "to": lambda logits, dtype: logits.to(dtype),
}


def _sample(weight: Tensor, bias: Tensor | None) -> Tensor:
    """Values of the weights that an optimizer step changes; fused optimizers leave the version counter as it is."""
    rows, columns = (-(-size // 32) for size in weight.shape)
    sample = weight.detach()[::rows, ::columns].flatten()
    return sample if bias is None else torch.cat((sample, bias.detach()[::rows]))


def _real(value: Any) -> Any:
    if type(value) in (list, tuple):
        return type(value)([_real(one) for one in value])
    return value.tensor() if isinstance(value, LazyLogits) else value
