"""Of kernels that work on rows: packed words, rows in shared memory at addresses, sums exchanged within a cluster."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from tilesmith.device.gluon.cluster import HEAD
from tilesmith.device.gluon.rows import LINE, MAILBOX_ROWS, MOST_PARTS
from tilesmith.engine import next_power_of_2
from tilesmith.validate.gluon.cluster import Cta
from tilesmith.validate.gluon.language import bulk_store, fibers, partition, tma_store_wait
from tilesmith.validate.gluon.memory import Barrier
from tilesmith.validate.gluon.substitutes.device import word
from tilesmith.validate.gluon.values import Pointer, Value, plain, torch_dtype, value


def _cta() -> Cta:
    return partition().cta


def _number(x: Any) -> int:
    return int(plain(x))


def _bits(x: Value) -> Tensor:
    """fp32 values as words."""
    return x.to(torch.float32).t.contiguous().view(torch.int32)


def _values(words: Tensor) -> Value:
    """fp32 values of words."""
    return Value(words.contiguous().view(torch.float32).clone())


# Words of two values


def pack(values: Value, width: Any) -> Value:
    return Value(values.t.contiguous().view(torch.int32)) if values.t.dtype.itemsize == 2 else values


def unpack(words: Value, dtype: Any, width: Any) -> Value:
    kind = torch_dtype(dtype)
    return Value(words.t.contiguous().view(kind)) if kind.itemsize == 2 else words


def _halves(x: Value, kind: torch.dtype) -> Tensor:
    return x.to(torch.int32).t.unsqueeze(-1).contiguous().view(kind)


def _higher(kind: torch.dtype) -> Callable[[Value, Value], Value]:
    """The larger ones of the halves of words; of a NaN and a number the number."""

    def of(x: Value, y: Value) -> Value:
        return Value(torch.fmax(_halves(x, kind), _halves(y, kind)).view(torch.int32).squeeze(-1))

    return of


def _kept(values: Value, drawn: Value, least: Value) -> Value:
    """The halves of words for which a number at least as large as the threshold was drawn."""
    drawn, least = _halves(drawn, torch.int16).int() & 0xFFFF, _halves(least, torch.int16).int() & 0xFFFF
    lower = torch.minimum(drawn, least).to(torch.int16).view(torch.float16)
    kept = lower == least.to(torch.int16).view(torch.float16)
    halves = torch.where(kept, _halves(values, torch.int16), 0)
    return Value(halves.contiguous().view(torch.int32).squeeze(-1))


# Shared memory at addresses


def reserve_smem(size: Any, line: Any, begin: Any) -> Value:
    if plain(begin):
        raise NotImplementedError(f"no substitute for this PTX: {plain(begin)}")
    return value(_cta().reserve(_number(size)))


def open_dsmem(size: Any, line: Any) -> Value:
    cta, size = _cta(), _number(size)
    room = cta.reserve(HEAD + size)
    full = cta.memory().barriers[room] = Barrier(1, "what other CTAs store")
    full.expect(size)
    cta.cluster.arrive(cta)
    return value(room)


def cluster_wait() -> None:
    _cta().cluster.wait(_cta())


def store_dsmem(barrier: Any, to: Value, cta: Value, x: Value, width: Any) -> None:
    """All that goes to one CTA arrives there at once: nobody can tell before its barrier completes."""
    addresses, ranks, words = torch.broadcast_tensors(to.t, cta.t, _bits(x))
    for rank in ranks.unique().tolist():
        its = ranks == rank
        _cta().cluster.ctas[rank].store(addresses[its].long(), words[its], _number(barrier))


def store_dsmem_pair(barrier: Any, to: Value, cta: Value, a: Value, b: Value) -> None:
    addresses, ranks, a_bits, b_bits = torch.broadcast_tensors(to.t, cta.t, _bits(a), _bits(b))
    both = torch.stack([addresses, addresses + 4], -1), ranks.unsqueeze(-1), torch.stack([a_bits, b_bits], -1)
    store_dsmem(barrier, Value(both[0]), Value(both[1]), _values(both[2]), 2)


def dsmem_wait(barrier: Any) -> None:
    full = _cta().memory().barriers[_number(barrier)]
    fibers().wait(lambda: full.passed(0), full.name)


def load_dsmem(at: Value) -> Value:
    words, places = _cta().memory().places(at.t.long())
    return _values(words[places])


def exchange(room: Any, part: Any, a: Value, b: Value, parts: Any) -> tuple[Value, Value]:
    """Two numbers of each warp, and those of all CTAs of the cluster."""
    cta, room, warps, parts = _cta(), _number(room), partition().warps, _number(parts)
    first = room + HEAD + _number(part) * 8 * warps
    sent = torch.stack([_bits(a).expand(warps), _bits(b).expand(warps)], -1).flatten()
    if parts > 1:
        cluster_wait()
        for peer in cta.cluster.ctas[:parts]:
            peer.store(first + 4 * torch.arange(2 * warps), sent, room)
        dsmem_wait(room)
    else:
        cta.memory().words(first, 2 * warps).copy_(sent)
    found = torch.zeros(max(2, next_power_of_2(parts) * warps), 2, dtype=torch.int32)
    found[: parts * warps] = cta.memory().words(room + HEAD, 2 * parts * warps).view(-1, 2)
    return _values(found[:, 0]), _values(found[:, 1])


# Mailboxes


def open_mailbox() -> Value:
    cta = _cta()
    mail = cta.reserve(16 * MAILBOX_ROWS * MOST_PARTS)
    cta.memory().bytes.zero_()
    cta.cluster.arrive(cta)
    cta.cluster.wait(cta)
    return value(mail)


def _entry(mail: Any, i: Any, part: int = 0) -> int:
    return _number(mail) + (_number(i) % MAILBOX_ROWS * MOST_PARTS + part) * 16


def _send(mail: Any, i: Any, part: Any, numbers: tuple[Value, Value], tags: tuple[int, int], parts: Any) -> None:
    """Two numbers with a tag each to all CTAs of the cluster; either may arrive first."""
    entry = _entry(mail, i, _number(part))
    for which, (x, tag) in enumerate(zip(numbers, tags)):
        words = torch.stack([_bits(x), word(torch.tensor(tag))])
        for peer in _cta().cluster.ctas[: _number(parts)]:
            peer.store(entry + 8 * which + torch.tensor([0, 4]), words)


def send_to_cluster(mail: Any, i: Any, part: Any, a: Value, b: Value, parts: Any) -> None:
    _send(mail, i, part, (a, b), (_number(i) + 1,) * 2, parts)


def send_with_tile(mail: Any, i: Any, part: Any, a: Value, b: Value, number: Any, parts: Any) -> None:
    turn, number = (_number(i) + 1) & 0xFFFF, _number(number)
    tags = turn | (number & 0xFFFF) << 16, turn | (number >> 16 & 0xFFFF) << 16
    _send(mail, i, part, (a, b), tags, parts)


def _received(mail: Any, i: Any, parts: int, mask: int) -> Tensor:
    """The words [parts, 4] of a turn's messages, once their tags are those of the turn in the bits of `mask`."""
    entries = _cta().memory().words(_entry(mail, i), 4 * parts)
    wanted = (_number(i) + 1) & mask
    fibers().wait(lambda: all(tag & mask == wanted for tag in entries[1::2].tolist()), f"messages of turn {_number(i)}")
    return entries.view(parts, 4).clone()


def _numbers(found: Tensor, many: int) -> tuple[Value, Value]:
    padded = torch.zeros(many, 4, dtype=torch.int32)
    padded[: found.shape[0]] = found
    return _values(padded[:, 0]), _values(padded[:, 2])


def receive_from_cluster(mail: Any, i: Any, parts: Any) -> tuple[Value, Value]:
    return _numbers(_received(mail, i, _number(parts), 0xFFFFFFFF), 32)


def receive_with_tile(mail: Any, i: Any, parts: Any) -> tuple[Value, Value]:
    return _numbers(_received(mail, i, _number(parts), 0xFFFF), next_power_of_2(_number(parts)))


def received_tile(mail: Any, i: Any) -> Value:
    low, high = _received(mail, i, 1, 0xFFFF)[0, 1::2].long() >> 16 & 0xFFFF
    return Value(word(low | high << 16))


def next_tile(counter: Pointer, part: Any, last: Any) -> Value:
    """In other CTAs than the first of a cluster, any number."""
    fibers().wait(lambda: True, "others")
    if _number(part):
        return value(-1)
    number = counter.update(1, torch.add)
    if int(number) == _number(last):
        counter.store(0)
    return number


# Rows


def open_smem_rows(size: Any) -> tuple[Value, Value]:
    cta, head = _cta(), (HEAD + 8 * partition().warps + 127) // 128 * 128
    room = cta.reserve(head + _number(size))
    cta.memory().barriers[room] = Barrier(1, "rows")
    return value(room), value(room + head)


def _global(pointer: Pointer, size: int) -> Tensor:
    """Bytes of global memory that a bulk copy moves."""
    begin = _number(Value(pointer.place)) * pointer.memory.dtype.itemsize
    if begin % 16 or size % 16 or begin < 0 or begin + size > pointer.memory.numel() * pointer.memory.dtype.itemsize:
        raise IndexError(f"a bulk copy of {size} bytes from byte {begin} of a tensor on")
    return pointer.memory.view(torch.uint8)[begin : begin + size]


def bulk_load_rows(room: Any, at: Any, ptr: Pointer, other_at: Any, other_ptr: Any, size: Any) -> None:
    size = _number(size)
    full = _cta().memory().barriers[_number(room)]
    copies = [(at, ptr)] if other_ptr is None else [(at, ptr), (other_at, other_ptr)]
    full.expect(size * len(copies))
    for to, source in copies:
        _bulk_load(_cta(), _number(to), _global(source, size), full)


def _bulk_load(cta: Cta, to: int, source: Tensor, full: Barrier) -> None:
    def come() -> None:
        cta.memory().at(to, source.numel()).copy_(source)
        full.came(source.numel())

    fibers().later(come)


def bulk_store_row(at: Any, ptr: Pointer, size: Any) -> None:
    cta, at, size = _cta(), _number(at), _number(size)
    if size > 0:
        to = _global(ptr, size)
        bulk_store(lambda: cta.memory().at(at, size), to.copy_)


def bulk_store_wait(room: Any) -> None:
    tma_store_wait(0)


def _chunk(at: Any, chunk: Any) -> Tensor:
    words = partition().warps * (LINE // 2)
    return _cta().memory().words(_number(at) + _number(chunk) * words * 4, words)


def load_chunk(at: Any, chunk: Any) -> Value:
    return Value(_chunk(at, chunk).clone())


def store_chunk(at: Any, chunk: Any, words: Value) -> None:
    _chunk(at, chunk).copy_(words.t)


def store_zeros(at: Any, chunk: Any) -> None:
    _chunk(at, chunk).zero_()


_HERE = "tilesmith.device.gluon"
_OF_MODULES: dict[str, tuple[Callable[..., Any], ...]] = {
    "shim": (reserve_smem,),
    "cluster": (open_dsmem, cluster_wait, store_dsmem, store_dsmem_pair, dsmem_wait, load_dsmem),
    "rows": (pack, unpack, open_mailbox, send_to_cluster, receive_from_cluster),
    "rows_held": (exchange,),
    "rows_dynamic": (next_tile, send_with_tile, receive_with_tile, received_tile),
    "rows_bulk": (
        open_smem_rows, bulk_load_rows, bulk_store_row, bulk_store_wait, load_chunk, store_chunk, store_zeros,
    ),
}  # fmt: skip

HELPERS: dict[str, Callable[..., Any]] = {
    f"{_HERE}.{module}.{fn.__name__}": fn for module, functions in _OF_MODULES.items() for fn in functions
}

PTX: dict[str, Callable[..., Any]] = {
    "min.u16x2 lower, $2, $3;": _kept, "max.bf16x2 $0, $1, $2;": _higher(torch.bfloat16),
    "max.f16x2 $0, $1, $2;": _higher(torch.float16),
    "lop3.b32 $0, $1, $2, $3, 0xea;": lambda a, b, c: (a & b) | c, "mul.rn.f32 $0, $1, $2;": lambda a, b: a * b,
}  # fmt: skip
