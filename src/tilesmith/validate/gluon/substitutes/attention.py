"""Of attention's kernels: packed operands, products of joined values, dropout."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from tilesmith.validate.gluon.language import Product, wgmma
from tilesmith.validate.gluon.memory import Shared
from tilesmith.validate.gluon.substitutes.device import word
from tilesmith.validate.gluon.values import Value, plain, torch_dtype, value


def pack(x: Value, dtype: Any) -> Value:
    low, high = (half.to(torch_dtype(dtype)).contiguous().view(torch.int16) for half in (x.t[:, 0::2], x.t[:, 1::2]))
    return Value((low.to(torch.int32) & 0xFFFF) | (high.to(torch.int32) << 16))


# Dropout


def _halves(x: Any) -> tuple[torch.Tensor, torch.Tensor]:
    x = value(x).to(torch.int32).t
    return x & 0xFFFF, (x >> 16) & 0xFFFF


def survives(drawn: Value, least: Value, rare: Any) -> Value:
    """Ones in each half of a word that is at least the threshold."""
    made = [
        torch.where(torch.minimum(half, limit) == limit, 0xFFFF, 0)
        for half, limit in zip(_halves(drawn), _halves(least))
    ]
    return Value(word(made[0].to(torch.int64) | (made[1].to(torch.int64) << 16)))


def exchange(bits: Value, lane: Value, lanes: Any, turn: Any, lower: Any) -> Value:
    """Lanes are the last dim."""
    apart, turn = int(plain(lanes)), int(plain(turn))
    mine = bits.t.to(torch.int64) & 0xFFFFFFFF
    other = mine[..., torch.arange(mine.shape[-1]) ^ apart]
    upper = (lane.t != 0).expand(mine.shape)
    by = torch.where(upper, 32 - turn, turn)
    turned = ((other << by) | (other >> (32 - by))) & 0xFFFFFFFF
    keep = torch.where(upper, ~int(plain(lower)) & 0xFFFFFFFF, int(plain(lower)))
    return Value(word((mine & keep) | (turned & ~keep)))


def _next_lane(bits: Value, _: Value) -> Value:
    return Value(bits.t.roll(-1, -1))


def _kept_halves(x: Value, bits: Value, which: Value) -> Value:
    """A word's halves where the signs of bytes 0 and 2, or of bytes 1 and 3, are set."""
    x, bits, which = (t.to(torch.int64) & 0xFFFFFFFF for t in torch.broadcast_tensors(x.t, bits.t, which.t))
    first = torch.where(which == 0xAA88, 7, 15)
    low, high = (bits >> first) & 1, (bits >> (first + 16)) & 1
    return Value(word(x & (low * 0xFFFF | high * 0xFFFF0000)))


# Attention


def check_place(v: Any) -> None:
    """Where shared memory lies is not modelled."""


def value_tiles(v: Shared, v_rest: Shared, t: Any, walk: Any, keys: Any) -> tuple[Any, Any]:
    t, keys = int(t), int(plain(keys))
    if walk.V_PART > 0:
        parts = math.ceil((walk.DV + walk.V_REST) / walk.V_PART)
        tile = [v.index(t * parts + i).reshape([walk.BN, walk.V_PART]) for i in range(parts)]
        return tile, tile
    tile = v.index(t).reshape([walk.BN, walk.DV])
    rest = v_rest.index(t).reshape([walk.BN, walk.V_REST]) if walk.V_REST > 0 else tile
    return (tile.slice(0, keys), rest.slice(0, keys)) if keys < walk.BN else (tile, rest)


class _Joined:
    """Columns of several tiles side by side, read when a product is made."""

    def __init__(self, tiles: list[Shared], rows: int, columns: int):
        self.tiles, self.rows, self.columns, self.shape = tiles, rows, columns, [rows, columns]

    @property
    def t(self) -> torch.Tensor:
        return torch.cat([tile.t[: self.rows] for tile in self.tiles], 1)[:, : self.columns]


class _Transposed(_Joined):
    """The same, rows as columns."""

    def __init__(self, tiles: list[Shared], rows: int, columns: int):
        super().__init__(tiles, rows, columns)
        self.shape = [columns, rows]

    @property
    def t(self) -> torch.Tensor:
        return super().t.T


def _added(x: Value, tiles: list[Shared], before: Sequence[Value], cols: Any) -> tuple[_Part, ...]:
    """x . tiles, added to sums that lie in several tensors. Their columns behind the last value are whatever was
    there."""
    cols, sums = int(plain(cols)), torch.cat([one.t for one in before], 1)
    made = wgmma(x, _Joined(tiles, x.shape[1], cols), Value(sums[:, :cols]), use_acc=True, is_async=True)
    ends = itertools.accumulate(one.t.shape[1] for one in before)
    return tuple(_Part(made, end - one.t.shape[1], one.t.shape[1], one) for end, one in zip(ends, before, strict=True))


def add_joined(x: Value, tile: list[Shared], total: Value, total_rest: Value, rows: Any, cols: Any, part: Any) -> Any:
    return _added(x, tile, (total, total_rest), cols)


class _Part(Product):
    """Columns of a product, and behind them those of the sums before."""

    def __init__(self, whole: Product, first: int, columns: int, before: Value):  # no Product of its own
        self.whole, self.first, self.sums, self.shape = whole, first, before, [whole.shape[0], columns]
        self.dtype, self.type, self.found = whole.dtype, whole.type, None

    def make(self) -> Value:
        made = self.whole.make().t[:, self.first : self.first + self.shape[1]]
        return Value(torch.cat([made, self.sums.t[:, made.shape[1] :]], 1))

    def __eq__(self, other: object) -> bool:
        return other is self or other is self.whole

    def __hash__(self) -> int:
        return id(self.whole)


class Address(NamedTuple):
    """Of a tile: an allocation, and how many bytes it begins behind its start."""

    room: Shared
    begin: int

    def tile(self, rows: int, columns: int, behind: int = 0) -> Shared:
        """Rows as wide as a swizzle, one after another. behind: elements in front of it."""
        first = self.begin // self.room.room.element_size() + behind
        places = first + torch.arange(rows * columns).view(rows, columns)
        return Shared(self.room.room, places, self.room.unfenced, self.room.outside)


def address(room: Shared, begin: Any, which: Any, size: Any) -> Address:
    return Address(room, int(plain(begin)) + int(plain(which)) * int(plain(size)))


def scores_of(q: Address, q_rest: Address, k: Address, k_rest: Address, keys: Any, rest: Any, dtype: Any) -> Any:
    keys, rest = int(plain(keys)), int(plain(rest))
    queries = _Joined([q.tile(64, 64), q_rest.tile(64, rest)], 64, 64 + rest)
    made = wgmma(
        queries, _Transposed([k.tile(keys, 64), k_rest.tile(keys, rest)], keys, 64 + rest), None, use_acc=False,
        is_async=True,
    )  # fmt: skip
    none = Value(torch.zeros(64, 16))
    return tuple(_Part(made, first, 16, none) for first in range(0, keys, 16))


def add_sixteens(x: Sequence[Value], tile: Address, total: Sequence[Value], rows: Any, cols: Any, part: Any) -> Any:
    rows, part = int(plain(rows)), int(plain(part))
    parts = [tile.tile(rows, part, i * rows * part) for i in range(math.ceil(int(plain(cols)) / part))]
    return _added(Value(torch.cat([one.t for one in x], 1)), parts, total, cols)


_HERE = "tilesmith.ops.attn.hopper"

HELPERS: dict[str, Callable[..., Any]] = {
    f"{_HERE}.softmax.pack": pack, f"{_HERE}.dropout._survives": survives, f"{_HERE}.dropout._exchange": exchange,
    f"{_HERE}.joined.check_place": check_place, f"{_HERE}.joined.value_tiles": value_tiles,
    f"{_HERE}.joined.add_joined": add_joined, f"{_HERE}.joined.add_sixteens": add_sixteens,
    f"{_HERE}.joined.scores_of": scores_of, f"{_HERE}.joined.address": address,
}  # fmt: skip

PTX: dict[str, Callable[..., Any]] = {
    "shfl.sync.idx.b32 $0, $1, $2, 0x1c1f": _next_lane, "prmt.b32 kept, $2, 0, $3; and.b32 $0, $1, kept": _kept_halves,
}  # fmt: skip
