"""Tensors, scalars and pointers of a kernel, with the arithmetic of Triton, on torch tensors."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import triton.language as tl
from torch import Tensor

DTYPES = {
    tl.float64: torch.float64, tl.float32: torch.float32, tl.float16: torch.float16, tl.bfloat16: torch.bfloat16,
    tl.float8e4nv: torch.float8_e4m3fn, tl.float8e5: torch.float8_e5m2, tl.int64: torch.int64, tl.int32: torch.int32,
    tl.int16: torch.int16, tl.int8: torch.int8, tl.uint8: torch.uint8, tl.int1: torch.bool, tl.uint32: torch.uint32,
    tl.uint16: torch.uint16, tl.uint64: torch.uint64,
}  # fmt: skip
NAMES = {found: name for name, found in DTYPES.items()}
_SIGNED = {torch.uint32: torch.int32, torch.uint16: torch.int16, torch.uint64: torch.int64}
_WIDE = {torch.uint32: torch.int64, torch.uint16: torch.int32, torch.uint8: torch.int32}


def plain(x: Any) -> Any:
    """A constexpr's value; anything else as it is."""
    return x.value if type(x).__name__ == "constexpr" else x


def torch_dtype(dtype: Any) -> torch.dtype:
    """The torch dtype of one of Triton's."""
    return dtype if isinstance(dtype, torch.dtype) else DTYPES[plain(dtype)]


class Layout:
    """In place of every layout: where elements lie is not modelled. rank: of what has it, where a kernel may ask."""

    def __init__(self, *args: Any, rank: int = 0, swizzle_byte_width: int = 0, **_: Any):
        self.rank, self.swizzle_byte_width = rank, swizzle_byte_width
        if len(args) == 2 and isinstance(args[1], Layout):  # a slice along args[0]
            self.rank = args[1].rank - 1
        elif args and isinstance(args[-1], list):  # the shape of a linear layout
            self.rank = len(args[-1])

    @classmethod
    def with_identity_for(cls, intervals: Any, shape: Any, order: Any) -> Layout:
        """Of a padded tile."""
        return cls(rank=len(shape))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Layout)

    def __hash__(self) -> int:
        return 0


class Type:
    """A value's type: shape, element type, layout."""

    def __init__(self, dtype: Any, shape: Sequence[int]):
        self.element_ty = self.scalar = dtype
        self.shape, self.layout = list(shape), Layout(rank=len(shape))


class Value:
    """A tensor or scalar in registers."""

    __hash__ = None  # type: ignore[assignment]

    def __init__(self, found: Tensor):
        self.t = found

    @property
    def dtype(self) -> Any:
        return NAMES[self.t.dtype]

    @property
    def shape(self) -> list[int]:
        return list(self.t.shape)

    @property
    def type(self) -> Type:
        return Type(self.dtype, self.shape)

    def to(self, dtype: Any, bitcast: bool = False, **_: Any) -> Any:
        dtype = plain(dtype)
        if isinstance(dtype, tl.pointer_type):
            raise TypeError(f"a number to {dtype}: addresses of global memory are no numbers here")
        wanted = torch_dtype(dtype)
        if plain(bitcast):
            return Value(self.t.contiguous().view(wanted))
        x = self.t
        if x.dtype is torch.uint64 and not wanted.is_floating_point:
            x = x.view(torch.int64)
        elif x.dtype in _SIGNED and x.dtype is not torch.uint64:
            x = _widened(x)
        if wanted in _SIGNED:
            narrow = _SIGNED[wanted]
            return Value(x.to(narrow).view(wanted))
        if wanted in (torch.float8_e4m3fn, torch.float8_e5m2):  # saturating, as cvt.rn.satfinite
            most = torch.finfo(wanted).max
            x = x.float().clamp(-most, most)
        if not wanted.is_floating_point and x.is_floating_point() and wanted is not torch.bool:
            x = x.trunc()
        return Value(x.to(wanted))

    def __getitem__(self, key: Any) -> Value:
        return Value(self.t[key])

    def __bool__(self) -> bool:
        return bool(self.t.item())

    def __index__(self) -> int:
        if self.t.is_floating_point():
            raise TypeError("a float is no index")
        return int(self.t.item())

    __int__ = __index__

    def __float__(self) -> float:
        return float(self.t.item())

    def __neg__(self) -> Value:
        return Value(-self.t)

    def __invert__(self) -> Value:
        return Value(~self.t)

    def reshape(self, *shape: Any) -> Value:
        return Value(self.t.reshape(sizes(shape)))

    def expand_dims(self, axis: Any) -> Value:
        return Value(self.t.unsqueeze(int(plain(axis))))

    def __repr__(self) -> str:
        return f"Value({self.t})"


def sizes(shape: Any) -> list[int]:
    """A shape in plain integers, however it is given."""
    if len(shape) == 1 and isinstance(plain(shape[0]), (list, tuple, torch.Size)):
        shape = plain(shape[0])
    return [int(plain(n)) for n in shape]


def _widened(x: Tensor) -> Tensor:
    """An unsigned tensor in a signed dtype that holds all its values."""
    signed = x.view(_SIGNED[x.dtype]) if x.dtype in _SIGNED else x
    mask = {torch.uint32: 0xFFFFFFFF, torch.uint16: 0xFFFF, torch.uint8: 0xFF}[x.dtype]
    return signed.to(_WIDE[x.dtype]) & mask


def value(x: Any, like: Value | None = None) -> Any:
    """A number as a value, of the dtype that it has beside `like`. Values and pointers are returned as they are."""
    x = plain(x)
    if isinstance(x, (Value, Pointer)):
        return x
    if isinstance(x, bool):
        return Value(torch.tensor(x))
    if isinstance(x, int):
        if like is not None and like.t.dtype is not torch.bool:
            kind = like.t.dtype
            if kind.is_floating_point:
                return Value(torch.tensor(x, dtype=torch.float64).to(kind))
            if kind in _SIGNED:
                bits = torch.iinfo(_SIGNED[kind]).bits
                x &= (1 << bits) - 1
                return Value(torch.tensor(x - (1 << bits) if x >> (bits - 1) else x, dtype=_SIGNED[kind]).view(kind))
            if torch.iinfo(kind).min <= x <= torch.iinfo(kind).max:
                return Value(torch.tensor(x, dtype=kind))
        if -(2**31) <= x < 2**31:
            return Value(torch.tensor(x, dtype=torch.int32))
        if x < 2**32:
            return Value(torch.tensor(x - 2**32, dtype=torch.int32).view(torch.uint32))
        return Value(torch.tensor(x, dtype=torch.int64))
    if isinstance(x, float):
        kind = like.t.dtype if like is not None and like.t.is_floating_point() else torch.float32
        return Value(torch.tensor(x, dtype=torch.float64).to(kind))
    raise TypeError(f"{type(x).__name__} is no number")


def _common(a: Value, b: Value, division: bool = False) -> torch.dtype:
    """The dtype in which Triton computes with two values."""
    kinds = a.t.dtype, b.t.dtype
    floats = [k for k in kinds if k.is_floating_point]
    if floats:
        for kind in (torch.float64, torch.float32):
            if kind in floats:
                return kind
        if division or len(set(floats)) > 1 or floats[0].itemsize == 1:
            return torch.float32
        return floats[0]
    bits = [1 if k is torch.bool else torch.iinfo(k).bits for k in kinds]
    if bits[0] != bits[1]:
        return kinds[bits[1] > bits[0]]
    return next((k for k in kinds if k in _SIGNED or k is torch.uint8), kinds[0])


def both(a: Any, b: Any, division: bool = False) -> tuple[Tensor, Tensor, torch.dtype]:
    """Two operands in the dtype in which they meet, unsigned ones in a wider one, of 64 bits as the signed numbers of
    the same bits; and that dtype."""
    a, b = plain(a), plain(b)
    a = value(a, b if isinstance(b, Value) else None)
    b = value(b, a)
    kind = _common(a, b, division)
    found = [x.to(NAMES[kind]).t if x.t.dtype is not kind else x.t for x in (a, b)]
    if kind in _WIDE:
        found = [_widened(x) for x in found]
    elif kind is torch.uint64:
        found = [x.contiguous().view(torch.int64) for x in found]
    return found[0], found[1], kind


def narrowed(x: Tensor, kind: torch.dtype) -> Value:
    """A result of `both`'s operands in their dtype, wrapped around."""
    if x.dtype is kind or x.dtype is torch.bool:
        return Value(x)
    return Value(x.to(_SIGNED[kind]).view(kind) if kind in _SIGNED else x.to(kind))


def _arithmetic(name: str, compute: Any, division: bool = False) -> None:
    def forward(self: Value, other: Any) -> Any:
        if isinstance(other, Pointer) and name == "add":
            return other + self
        if not isinstance(plain(other), (Value, int, float)):
            return NotImplemented
        a, b, kind = both(self, other, division)
        return narrowed(_computing(name, compute, kind)(a, b), kind)

    def backward(self: Value, other: Any) -> Any:
        if not isinstance(plain(other), (Value, int, float)):
            return NotImplemented
        a, b, kind = both(other, self, division)
        return narrowed(_computing(name, compute, kind)(a, b), kind)

    setattr(Value, f"__{name}__", forward)
    setattr(Value, f"__r{name}__", backward)


def _computing(name: str, compute: Any, kind: torch.dtype) -> Any:
    """What computes an operator in a dtype, of numbers as `both` has them."""
    if kind is torch.uint64 and name in ("truediv", "floordiv", "mod"):
        raise NotImplementedError(f"{name} of 64 bits without a sign")
    return _shifted_unsigned if kind is torch.uint64 and name == "rshift" else compute


def _quotient(a: Tensor, b: Tensor) -> Tensor:
    if not a.is_floating_point():
        a, b = a.float(), b.float()
    return a / b


def _shifted(a: Tensor, b: Tensor, left: bool) -> Tensor:
    bits = torch.iinfo(a.dtype).bits
    inside = (b >= 0) & (b < bits)
    by = torch.where(inside, b, 0)
    over = torch.zeros_like(a) if left else torch.where(a < 0, -1, 0).to(a.dtype)
    return torch.where(inside, a << by if left else a >> by, over)


def _shifted_unsigned(a: Tensor, b: Tensor) -> Tensor:
    """To the right, of 64 bits without a sign."""
    inside = (b >= 0) & (b < 64)
    by = torch.where(inside, b, 0)
    most = torch.where(by == 0, -1, (1 << (64 - by.clamp(min=1))) - 1)
    return torch.where(inside, (a >> by) & most, 0)


_arithmetic("add", lambda a, b: a | b if a.dtype is torch.bool else a + b)
_arithmetic("sub", lambda a, b: a - b)
_arithmetic("mul", lambda a, b: a & b if a.dtype is torch.bool else a * b)
_arithmetic("truediv", _quotient, True)
_arithmetic("floordiv", lambda a, b: torch.div(a, b, rounding_mode="trunc"))  # as C divides
_arithmetic("mod", torch.fmod)
_arithmetic("and", lambda a, b: a & b)
_arithmetic("or", lambda a, b: a | b)
_arithmetic("xor", lambda a, b: a ^ b)
_arithmetic("lshift", lambda a, b: _shifted(a, b, True))
_arithmetic("rshift", lambda a, b: _shifted(a, b, False))


def _comparison(name: str, compute: Any) -> None:
    def compare(self: Value, other: Any) -> Any:
        if other is None or not isinstance(plain(other), (Value, int, float)):
            return NotImplemented
        a, b, kind = both(self, other)
        if kind is torch.uint64:  # in the order of numbers without a sign
            a, b = a ^ torch.iinfo(torch.int64).min, b ^ torch.iinfo(torch.int64).min
        return Value(compute(a, b))

    setattr(Value, f"__{name}__", compare)


for _name in ("lt", "le", "gt", "ge", "eq", "ne"):
    _comparison(_name, getattr(torch, _name))


class Pointer:
    """Addresses of elements: a flat view of a tensor's whole storage, and places in it."""

    __hash__ = None  # type: ignore[assignment]

    def __init__(self, memory: Tensor, place: Tensor):
        self.memory, self.place = memory, place

    @classmethod
    def of(cls, x: Tensor) -> Pointer:
        return cls(flat(x), torch.tensor(x.storage_offset()))

    @property
    def dtype(self) -> Any:
        return tl.pointer_type(NAMES[self.memory.dtype])

    @property
    def shape(self) -> list[int]:
        return list(self.place.shape)

    @property
    def type(self) -> Type:
        found = Type(self.dtype, self.shape)
        found.element_ty = self.dtype.element_ty
        return found

    def __add__(self, by: Any) -> Pointer:
        return Pointer(self.memory, self.place + value(by).to(tl.int64).t)

    __radd__ = __add__

    def __sub__(self, by: Any) -> Pointer:
        return Pointer(self.memory, self.place - value(by).to(tl.int64).t)

    def __getitem__(self, key: Any) -> Pointer:
        return Pointer(self.memory, self.place[key])

    def to(self, dtype: Any, bitcast: bool = False) -> Pointer:
        dtype = plain(dtype)
        if dtype == tl.int64:  # for PTX, which is replaced by what takes pointers
            return self
        wanted, has = torch_dtype(dtype.element_ty), self.memory.dtype
        bytes_in = self.place * has.itemsize
        if (bytes_in % wanted.itemsize).any():
            raise ValueError(f"a pointer to {has} that is not aligned to {wanted}")
        return Pointer(self.memory.view(torch.uint8).view(wanted), bytes_in // wanted.itemsize)

    def _placed(self, mask: Any, *others: Any) -> tuple[Tensor, ...]:
        """Place, mask and others broadcast to one shape. Raises IndexError where what is not masked lies outside."""
        mask = Value(torch.tensor(True)) if mask is None else value(mask)
        place, seen, *more = torch.broadcast_tensors(self.place, mask.t, *others)
        outside = seen & ((place < 0) | (place >= self.memory.numel()))
        if outside.any():
            raise IndexError(f"an address outside of its tensor: {place[outside][0].item()} of {self.memory.numel()}")
        return place, seen, *more

    def load(self, mask: Any = None, other: Any = None) -> Value:
        kind = self.memory.dtype
        rest = torch.zeros((), dtype=kind) if other is None else value(other, _like(kind)).to(NAMES[kind]).t
        place, seen, rest = self._placed(mask, rest)
        found = (
            self.memory[torch.where(seen, place, 0)] if self.memory.numel() else torch.zeros(place.shape, dtype=kind)
        )
        if kind.itemsize == 1 and kind.is_floating_point:
            return Value(torch.where(seen, found.view(torch.uint8), rest.contiguous().view(torch.uint8)).view(kind))
        if other is None and not seen.all():
            rest = _garbage(place.shape, kind)  # what is masked and has no other value may be anything
        return Value(torch.where(seen, found, rest))

    def store(self, x: Any, mask: Any = None) -> None:
        kind = self.memory.dtype
        x = value(x, _like(kind)).to(NAMES[kind]).t
        place, seen, x = self._placed(mask, x)
        self.memory[place[seen]] = x[seen]

    def update(self, x: Any, compute: Callable[[Tensor, Tensor], Tensor], mask: Any = None) -> Value:
        """Atomically combine what lies here with x, element by element; what was there before."""
        kind = self.memory.dtype
        x = value(x, _like(kind)).to(NAMES[kind]).t
        place, seen, x = self._placed(mask, x)
        before = torch.zeros(place.shape, dtype=kind)
        for i in range(place.numel()):
            if seen.flatten()[i]:
                at = place.flatten()[i]
                before.view(-1)[i] = self.memory[at]
                self.memory[at] = compute(self.memory[at], x.flatten()[i])
        return Value(before)


def flat(x: Tensor) -> Tensor:
    """A tensor's whole storage as one dim."""
    return torch.as_strided(x.detach(), (x.untyped_storage().nbytes() // x.element_size(),), (1,), 0)


def _like(kind: torch.dtype) -> Value:
    return Value(torch.zeros((), dtype=kind))


def _garbage(shape: Sequence[int], kind: torch.dtype) -> Tensor:
    if kind.is_floating_point:
        return torch.full(shape, float("nan"), dtype=kind)
    return (
        torch.zeros(shape, dtype=kind) if kind is torch.bool else torch.full(shape, torch.iinfo(kind).max, dtype=kind)
    )
