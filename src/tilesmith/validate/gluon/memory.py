"""Shared memory, mbarriers, named barriers and TMA descriptors of a kernel that runs on a CPU."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from tilesmith.validate.gluon.fibers import running
from tilesmith.validate.gluon.values import NAMES, Type, Value, flat, plain, sizes, torch_dtype, value

COPIED = 127  # stands for cp.async, whose bytes anyone fences who has waited for them


class Unfenced:
    """Who wrote each byte of an allocation, from registers or by cp.async, and has not met a fence since: 0 for nobody.
    TMA and WGMMA read through another proxy than those write by, and may see what was there before."""

    def __init__(self, count: int):
        self.by = torch.zeros(count, dtype=torch.uint8)

    def fence(self, writer: int) -> None:
        self.by[(self.by == writer) | (self.by == COPIED)] = 0


class Shared:
    """A piece of shared memory: elements of `room`, a whole allocation, at `places`. outside: why nobody may write to
    it; read, it has what nobody wrote. layout: by which its rows lie."""

    def __init__(self, room: Tensor, places: Tensor, unfenced: Unfenced, outside: str = "", layout: Any = None):
        self.room, self.places, self.unfenced, self.outside = room, places, unfenced, outside
        self.layout = layout

    @classmethod
    def allocate(cls, dtype: Any, shape: Sequence[int], layout: Any = None) -> Shared:
        """Filled with what nobody wrote: NaN, or numbers that are out of every range."""
        kind, shape = torch_dtype(dtype), sizes([shape])
        room = torch.full((math.prod(shape) * kind.itemsize,), 0xFF, dtype=torch.uint8).view(kind)
        unfenced = Unfenced(room.numel() * kind.itemsize)
        running().context.cta.unfenced.append(unfenced)
        return cls(room, _order(shape, layout, kind.itemsize), unfenced, layout=layout)

    @property
    def t(self) -> Tensor:
        """What it holds now."""
        if self.room.dtype.itemsize == 1 and self.room.is_floating_point():
            return self.room.view(torch.uint8)[self.places].view(self.room.dtype)
        return self.room[self.places]

    @property
    def dtype(self) -> Any:
        return NAMES[self.room.dtype]

    @property
    def shape(self) -> list[int]:
        return list(self.places.shape)

    @property
    def type(self) -> Type:
        return Type(self.dtype, self.shape)

    def _at(self, places: Tensor) -> Shared:
        return Shared(self.room, places, self.unfenced, self.outside, self.layout)

    def index(self, i: Any) -> Shared:
        i, many = int(plain(i)), self.places.shape[0]
        if not 0 <= i < many:  # a product may be asked for that nobody uses
            found = Shared.allocate(self.dtype, self.places.shape[1:])
            found.outside = f"tile {i} of {many} in shared memory"
            return found
        return self._at(self.places[i])

    def slice(self, start: Any, length: Any, dim: Any = 0) -> Shared:
        return self._at(self.places.narrow(int(plain(dim)), int(plain(start)), int(plain(length))))

    def reshape(self, *shape: Any) -> Shared:
        return self._at(self.places.reshape(sizes(shape)))

    def first(self, many: int) -> Shared:
        """The first elements of a vector."""
        return self._at(self.places[:many])

    def permute(self, order: Any) -> Shared:
        return self._at(self.places.permute(sizes([order])))

    def load(self, layout: Any = None) -> Value:
        return Value(self.t)

    def store(self, x: Any) -> None:
        """From registers."""
        x = value(x)
        if x.t.dtype is not self.room.dtype or list(x.t.shape) != self.shape:
            raise TypeError(f"{x.t.dtype} {x.shape} into shared memory of {self.room.dtype} {self.shape}")
        self.put(x.t)
        self.mark(running().number)

    def mark(self, writer: int) -> None:
        """Written by one of `Unfenced`."""
        self._seen_as_integers()[self.places] = writer * _EACH_BYTE[self.room.dtype.itemsize]

    def _seen_as_integers(self) -> Tensor:
        return self.unfenced.by.view(INTEGERS[self.room.dtype.itemsize])

    def check_fenced(self, reader: str) -> None:
        """Raises RuntimeError where some of it was written from registers and no fence came since."""
        if self._seen_as_integers()[self.places].any():
            raise RuntimeError(f"{reader} reads shared memory that was stored without a fence behind it")

    def put(self, x: Tensor) -> None:
        """Write elements."""
        if self.outside:
            raise IndexError(self.outside)
        integer = INTEGERS[self.room.dtype.itemsize]
        self.room.view(integer)[self.places] = x.contiguous().view(integer)

    def reinterpret(self, dtype: Any, shape: Any, layout: Any = None) -> Shared:
        kind, shape = torch_dtype(dtype), sizes([shape])
        begin, size = int(self.places.min()) * self.room.dtype.itemsize, self.room.dtype.itemsize
        count = math.prod(shape) * kind.itemsize
        if begin % kind.itemsize or begin + count > self.room.numel() * size:
            raise ValueError(f"{shape} of {kind} in {self.shape} of {self.room.dtype}")
        room = self.room.view(torch.uint8).view(kind)
        places = begin // kind.itemsize + _order(shape, layout, kind.itemsize)
        return Shared(room, places, self.unfenced, self.outside, layout)


_EACH_BYTE = {1: 1, 2: 0x0101, 4: 0x01010101, 8: 0x0101010101010101}  # times a writer
INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def _order(shape: list[int], layout: Any, itemsize: int) -> Tensor:
    """Where elements of a tile lie: rows no wider than the swizzle, the first columns of all rows before the next."""
    wide = getattr(layout, "swizzle_byte_width", 0) // itemsize
    places = torch.arange(math.prod(shape))
    if not 0 < wide < shape[-1]:
        return places.view(shape)
    *outer, rows, cols = shape
    return places.view(*outer, cols // wide, rows, wide).transpose(-3, -2).reshape(shape)


class Barrier:
    """An mbarrier: a phase is complete at `count` arrivals, when all bytes that were expected have come."""

    def __init__(self, count: int, name: str = ""):
        self.count, self.pending, self.bytes, self.phase, self.name = count, count, 0, 0, name

    def arrive(self, times: int = 1) -> None:
        if self.pending < times:
            raise RuntimeError(f"{self.name}: more arrivals than the {self.count} of a phase")
        self.pending -= times
        self._settle()

    def expect(self, many: int) -> None:
        self.bytes += many
        self.arrive()

    def came(self, many: int) -> None:
        self.bytes -= many
        self._settle()

    def _settle(self) -> None:
        if self.pending == 0 and self.bytes == 0:
            self.phase += 1
            self.pending = self.count

    def passed(self, parity: int) -> bool:
        """Whether the phase of that parity is over: the one at work has the other one."""
        return self.phase & 1 != parity & 1


class Barriers:
    """An array of mbarriers."""

    def __init__(self, number: int, count: int, name: str):
        self.all = [Barrier(count, f"{name}[{i}]") for i in range(number)]
        self.shape = [number, 1]

    def index(self, i: Any) -> Barrier:
        return self.all[int(plain(i))]


class Named:
    """A named barrier of a CTA's threads."""

    def __init__(self) -> None:
        self.threads, self.generation = 0, 0

    def arrive(self, threads: int, wanted: int) -> None:
        self.threads += threads
        if self.threads > wanted:
            raise RuntimeError(f"{self.threads} threads at a barrier of {wanted}")
        if self.threads == wanted:
            self.threads, self.generation = 0, self.generation + 1


class BlockType:
    """A descriptor's tile."""

    def __init__(self, dtype: Any, shape: Sequence[int]):
        self.shape, self.element_ty = list(shape), dtype
        self.nbytes = math.prod(shape) * dtype.primitive_bitwidth // 8


class Descriptor:
    """A TMA descriptor: boxes of a tensor, zeros outside of it."""

    def __init__(self, made: Any):
        self.base, self.sizes, self.strides = made.base, list(made.shape), list(made.strides)
        self.dtype, self.layout = NAMES[made.base.dtype], made.layout
        self.block_type = BlockType(self.dtype, made.block_shape)
        self.box = [*getattr(made, "box", made.block_shape[:-1]), made.block_shape[-1]]
        self.block_shape = list(made.block_shape)

    @property
    def nbytes(self) -> int:
        """Of what a copy moves."""
        return math.prod(self.box) * self.base.element_size()

    def _places(self, corner: Sequence[int]) -> tuple[Tensor, Tensor]:
        """Places in the storage of the box at `corner`, and which of them lie in the tensor. Addresses are modulo
        2 ** 64, as on the device."""
        size, start = self.base.element_size(), 0
        inside = torch.ones(self.box, dtype=torch.bool)
        place = torch.zeros(self.box, dtype=torch.int64)
        for dim, (first, wide, stride, box) in enumerate(zip(corner, self.sizes, self.strides, self.box, strict=True)):
            start += first * stride
            along = torch.arange(box)
            shape = [-1 if d == dim else 1 for d in range(len(self.box))]
            inside &= ((along + first >= 0) & (along + first < wide)).view(shape)
            if box > 1:
                place += (along * stride).view(shape)
        start = start * size % 2**64
        start = (start - 2**64 if start >= 2**63 else start) // size
        return self.base.storage_offset() + start + place, inside

    def load(self, corner: Sequence[int], tile: Shared) -> None:
        place, inside = self._places(corner)
        memory = flat(self.base).view(INTEGERS[self.base.element_size()])
        found = torch.where(inside, memory[torch.where(inside, place, 0)], 0).view(self.base.dtype)
        tile.reshape(-1).first(found.numel()).put(found.reshape(-1))

    def store(self, corner: Sequence[int], tile: Tensor, add: bool = False) -> None:
        place, inside = self._places(corner)
        memory = flat(self.base)
        found = tile.reshape(-1)[: place.numel()].view(self.box)
        if add:
            memory[place[inside]] += found[inside]
        else:
            memory[place[inside]] = found[inside]
