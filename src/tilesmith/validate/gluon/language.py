"""What a kernel's names mean on a CPU: Gluon's language, and the names of `device.gluon.shim`."""

from __future__ import annotations

import builtins
import math
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import torch
import triton.language as tl
from torch import Tensor

from tilesmith.validate.gluon.cluster import Cta
from tilesmith.validate.gluon.fibers import fibers, running
from tilesmith.validate.gluon.memory import COPIED, Barriers, Descriptor, Named, Shared
from tilesmith.validate.gluon.values import Layout, Pointer, Value, both, narrowed, plain, sizes, value


class Partition:
    """Warps of a program that run one function."""

    def __init__(self, cta: Cta, warps: int, name: str):
        self.cta, self.warps, self.name = cta, warps, name


def partition() -> Partition:
    return running().context


def pause() -> None:
    """Let others run, now and then: what is between two such places happens at once."""
    fibers().wait(lambda: True, "others")


class Product:
    """A WGMMA that was asked for: its sums are there when it was waited for. It reads shared memory at any time until
    then, products of one partition in their order."""

    def __init__(self, a: Any, b: Any, total: Any, use_acc: bool, before: Product | None):
        self.a, self.b, self.total, self.use_acc, self.before = a, b, total, use_acc, before
        self.found: Value | None = None
        self.shape = [a.shape[0], b.shape[1]]
        self.dtype = tl.float32
        self.type = SimpleNamespace(layout=Layout(), shape=self.shape)

    def make(self) -> Value:
        if self.found is None:
            if self.before is not None:
                self.before.make()
            total = self.total.make() if isinstance(self.total, Product) else self.total
            made = self.a.t.float() @ self.b.t.float()
            self.found = Value(made + total.t if self.use_acc else made)
            self.before = None
        return self.found


def wgmma(a: Any, b: Any, acc: Any, *, use_acc: Any = True, is_async: Any = False, **_: Any) -> Any:
    mine = running()
    if partition().warps % 4:
        raise RuntimeError("a WGMMA is of warpgroups")
    use_acc = bool(plain(use_acc))
    if isinstance(acc, Value) and list(acc.t.shape) != [a.shape[0], b.shape[1]]:
        raise TypeError(f"sums {acc.shape} of a product {a.shape} x {b.shape}")
    for operand in (a, b):
        if isinstance(operand, Shared):
            operand.check_fenced("a WGMMA")
    product = Product(a, b, acc, use_acc, mine.products[-1] if mine.products else None)
    if not plain(is_async):
        return product.make()
    mine.products.append(product)
    fibers().later(product.make)
    return product


def _all_but_last(asked: list[Any], many: Any) -> tuple[list[Any], list[Any]]:
    """What a wait that leaves so many in flight waits for, and these."""
    place = max(len(asked) - int(plain(many)), 0)
    return asked[:place], asked[place:]


def wgmma_wait(num_outstanding: Any = 0, deps: Sequence[Any] = (), **_: Any) -> Any:
    mine = running()
    pause()
    over, mine.products = _all_but_last(mine.products, num_outstanding)
    for product in over:
        product.make()
    found = []
    for x in deps:
        if isinstance(x, Product) and x not in mine.products:
            x = x.make()
        found.append(x)  # one that is still made must be waited for again before it is used
    return found[0] if len(found) == 1 else builtins.tuple(found)


def mma_sync(a: Value, b: Value, acc: Value, **_: Any) -> Value:
    return Value(a.t.float() @ b.t.float() + value(acc).t)


# Barriers


def mbarriers(*arrays: Any) -> Any:
    made = [Barriers(int(plain(n)), int(plain(count)), f"mbarriers {i}") for i, (n, count) in enumerate(arrays)]
    return builtins.tuple(made) if len(made) > 1 else made[0]


def mbarrier_wait(barrier: Any, phase: Any, pred: Any = True, **_: Any) -> None:
    phase = int(plain(phase))
    if bool(plain(pred)):
        fibers().wait(lambda: barrier.passed(phase), f"phase {phase} of {barrier.name}")


def mbarrier_arrive(barrier: Any, count: Any = 1, pred: Any = True, **_: Any) -> None:
    if bool(plain(pred)):
        barrier.arrive(int(plain(count)))
        pause()


def mbarrier_expect(barrier: Any, bytes: Any, pred: Any = True, **_: Any) -> None:
    if bool(plain(pred)):
        barrier.expect(int(plain(bytes)))


def named_barrier(what: Any, number: Any, threads: Any = 256) -> None:
    mine = partition()
    barrier = mine.cta.named.setdefault(int(plain(number)), Named())
    generation = barrier.generation
    barrier.arrive(32 * mine.warps, int(plain(threads)))
    if plain(what) == "sync":
        fibers().wait(lambda: barrier.generation != generation, f"named barrier {int(plain(number))}")


def syncthreads(*_: Any, **__: Any) -> None:
    """Of a partition: its warps are one fiber."""
    pause()


# TMA


def _corner(coord: Any) -> list[int]:
    return [int(plain(c)) for c in coord]


def tma_copy(desc: Descriptor, coord: Any, barrier: Any, result: Shared, pred: Any = True, **_: Any) -> None:
    if not bool(plain(pred)):
        return
    corner = _corner(coord)

    def come() -> None:
        desc.load(corner, result)
        barrier.came(desc.nbytes)

    fibers().later(come)


def tma_load(desc: Descriptor, coord: Any, barrier: Any, tile: Shared) -> None:
    mbarrier_expect(barrier, desc.block_type.nbytes)
    tma_copy(desc, coord, barrier, tile)


def _write(desc: Descriptor, coord: Any, src: Shared, add: bool) -> None:
    corner = _corner(coord)
    src.check_fenced("a TMA store")
    bulk_store(lambda: src.t, lambda found: desc.store(corner, found, add))


class _Store:
    """A copy from shared memory, which is read at any time until that is waited for, and written at any time after."""

    def __init__(self, read: Callable[[], Tensor], write: Callable[[Tensor], Any]):
        self.reads, self.writes = read, write
        self.found: Tensor | None = None
        self.written = False

    def read(self) -> None:
        if self.found is None:
            self.found = self.reads().clone()
            fibers().later(self.write)

    def write(self) -> None:
        self.read()
        if not self.written and self.found is not None:
            self.writes(self.found)
            self.written = True


def bulk_store(read: Callable[[], Tensor], write: Callable[[Tensor], Any]) -> None:
    """Start a copy from shared memory. read: what is copied; write: to global memory."""
    store = _Store(read, write)
    running().stores.append(store)
    running().unwritten.append(store)
    fibers().later(store.read)


def tma_store(desc: Descriptor, coord: Any, src: Shared, **_: Any) -> None:
    _write(desc, coord, src, False)


def tma_add(desc: Descriptor, coord: Any, src: Shared, **_: Any) -> None:
    _write(desc, coord, src, True)


def tma_store_wait(pendings: Any = 0, **_: Any) -> None:
    """Wait until the source has been read of all stores but the last ones."""
    mine = running()
    pause()
    over, mine.stores = _all_but_last(mine.stores, pendings)
    for store in over:
        store.read()


def tma_store_complete() -> None:
    """Wait until all is written."""
    mine = running()
    pause()
    for store in mine.unwritten:
        store.write()
    mine.stores, mine.unwritten = [], []


# What comes with PTX on the device


def cp_async(tile: Shared, pointers: Pointer, mask: Any = None) -> None:
    done = [False]

    def come() -> None:
        if not done[0]:
            tile.put(pointers.load(mask, 0).t.expand(tile.shape))
            tile.mark(COPIED)
            done[0] = True

    running().copies.append((come, done))
    fibers().later(come)


def cp_async_row(pointers: Pointer, barrier: Any, row: Shared) -> None:
    cp_async(row, pointers)
    cp_async_arrive(barrier)


def cp_async_arrive(barrier: Any) -> None:
    """Once what the partition has asked for has come."""
    mine, many = running(), 32 * partition().warps
    before = [copy for copy in mine.copies if not copy[1][0]]
    mine.copies = list(before)

    def arrive() -> None:
        for come, _ in before:
            come()
        barrier.arrive(many)

    fibers().later(arrive)


def fence_async() -> None:
    """TMA and WGMMA see what this partition has stored to shared memory."""
    for unfenced in partition().cta.unfenced:
        unfenced.fence(running().number)


def nothing(*_: Any, **__: Any) -> None:
    """What orders kernels or proxies, which come one after another here."""


def wait_acquire(pointer: Pointer, number: Any) -> None:
    wanted = int(plain(number))
    fibers().wait(lambda: bool((pointer.load().t == wanted).all()), f"{wanted} in global memory")


def store_release(pointer: Pointer, number: Any) -> None:
    """Copies that were not waited for may be written behind it."""
    pause()
    pointer.store(number)


def acquired(pointer: Pointer, number: Any) -> Value:
    pause()
    return Value((pointer.load().t == int(plain(number))).all())


def acquire_or_wait(pointer: Pointer, number: Any) -> Value:
    pause()
    if int(pointer.load()) == 0:
        pointer.store(1)
        return Value(torch.tensor(False))
    wait_acquire(pointer, number)
    return Value(torch.tensor(True))


def smem_tiles(number: Any, desc: Descriptor, times: Any = 1) -> Shared:
    *outer, rows, cols = desc.block_type.shape
    return Shared.allocate(desc.dtype, [int(plain(number)), *outer, rows * int(plain(times)), cols], desc.layout)


def smem_tile(room: Shared, desc: Descriptor, which: Any = 0) -> Shared:
    block = desc.block_type.shape
    return room.reinterpret(desc.dtype, [room.places.numel() // math.prod(block), *block], desc.layout).index(which)


def reinterpret(tile: Shared, dtype: Any, shape: Any, layout: Any = None) -> Shared:
    return tile.reinterpret(dtype, shape, layout)


SHIM: dict[str, Any] = {
    "wgmma": wgmma, "wgmma_wait": wgmma_wait, "mma_sync": mma_sync, "mbarriers": mbarriers,
    "mbarrier_wait": mbarrier_wait, "mbarrier_arrive": mbarrier_arrive, "mbarrier_expect": mbarrier_expect,
    "named_barrier": named_barrier, "syncthreads": syncthreads, "tma_copy": tma_copy, "tma_load": tma_load,
    "tma_store": tma_store, "tma_add": tma_add, "tma_store_wait": tma_store_wait,
    "tma_store_complete": tma_store_complete, "cp_async": cp_async, "cp_async_row": cp_async_row,
    "cp_async_arrive": cp_async_arrive, "fence_async": fence_async, "launch_dependents": nothing,
    "grid_dependency_wait": nothing, "wait_acquire": wait_acquire, "store_release": store_release,
    "acquired": acquired, "acquire_or_wait": acquire_or_wait, "smem_tiles": smem_tiles, "smem_tile": smem_tile,
    "reinterpret": reinterpret,
}  # fmt: skip


# Gluon's language


def _unary(compute: Callable[[Tensor], Tensor]) -> Callable[..., Value]:
    return lambda x, **_: Value(compute(value(x).t))


def _pair(compute: Callable[..., Tensor], with_nan: Callable[..., Tensor]) -> Callable[..., Any]:
    def of(a: Any, b: Any, propagate_nan: Any = tl.PropagateNan.NONE) -> Any:
        a, b = plain(a), plain(b)
        if not (isinstance(a, Value) or isinstance(b, Value)):
            return int(compute(torch.tensor(a), torch.tensor(b)))
        x, y, kind = both(a, b)
        return narrowed((compute if propagate_nan == tl.PropagateNan.NONE else with_nan)(x, y), kind)

    return of


def _greater(a: Tensor, b: Tensor) -> Tensor:
    """Without the NaN of one of both, as PTX's max."""
    return torch.fmax(a, b) if a.is_floating_point() else torch.maximum(a, b)


def _less(a: Tensor, b: Tensor) -> Tensor:
    return torch.fmin(a, b) if a.is_floating_point() else torch.minimum(a, b)


def where(condition: Any, x: Any, y: Any) -> Value:
    condition = value(condition)
    a, b, kind = both(x, y)
    return narrowed(torch.where(condition.t.to(torch.bool), a, b), kind)


def total(x: Value, axis: Any = None, keep_dims: Any = False, **_: Any) -> Value:
    t = x.t.int() if x.t.dtype is torch.bool else x.t
    t = t.float() if t.dtype in (torch.bfloat16, torch.float16) else t
    t = t.sum() if axis is None else t.sum(int(plain(axis)), bool(plain(keep_dims)))
    return Value(t if t.is_floating_point() or x.t.dtype is torch.int64 else t.to(torch.int32))


def most(x: Value, axis: Any = None, keep_dims: Any = False, **_: Any) -> Value:
    t = torch.nan_to_num(x.t, float("-inf"), float("inf"), float("-inf")) if x.t.is_floating_point() else x.t
    return Value(t.amax() if axis is None else t.amax(int(plain(axis)), bool(plain(keep_dims))))


def reduced(x: Any, axis: Any, combine: Callable[..., Any], keep_dims: Any = False, **_: Any) -> Any:
    """By halves, as a tree."""
    several = isinstance(x, builtins.tuple)
    parts, dim = (x if several else (x,)), int(plain(axis))
    while parts[0].t.shape[dim] > 1:
        half = parts[0].t.shape[dim] // 2
        low = [Value(p.t.narrow(dim, 0, half)) for p in parts]
        high = [Value(p.t.narrow(dim, half, half)) for p in parts]
        made = combine(*low, *high)
        parts = made if several else (made,)
    found = parts if plain(keep_dims) else builtins.tuple(Value(p.t.squeeze(dim)) for p in parts)
    return found if several else found[0]


def full(shape: Any, x: Any, dtype: Any, layout: Any = None) -> Value:
    found = value(x).to(dtype).t
    return Value(found.expand(sizes([shape])).clone())


def fused(a: Value, b: Any, c: Any) -> Value:
    """a * b + c, rounded once."""
    a, b, c = (x.to(tl.float64) for x in (a, value(b, a), value(c, a)))
    return (a * b + c).to(tl.float32)


def histogram(x: Value, bins: Any) -> Value:
    """How many integers are 0, 1 and so on."""
    return Value(torch.bincount(x.t.reshape(-1), minlength=int(plain(bins)))[: int(plain(bins))].to(torch.int32))


def join(a: Value, b: Value) -> Value:
    return Value(torch.stack([a.t, b.t], -1))


def split(x: Value) -> tuple[Value, Value]:
    return Value(x.t[..., 0].clone()), Value(x.t[..., 1].clone())


def _atomic(compute: Callable[[Tensor, Tensor], Tensor]) -> Callable[..., Value]:
    def on(pointer: Pointer, x: Any, mask: Any = None, **_: Any) -> Value:
        pause()
        return pointer.update(x, compute, mask)

    return on


def warp_specialize(parts: Sequence[Any], warps: Sequence[Any], registers: Sequence[Any] = (), **_: Any) -> None:
    mine, all_of_them = partition(), fibers()
    (first, given), *others = parts
    started = []
    for (fn, args), many in zip(others, plain(warps), strict=True):
        part = Partition(mine.cta, int(plain(many)), f"{mine.name}.{len(started) + 1} {fn.__name__}")
        started.append(all_of_them.start(lambda fn=fn, args=args: fn(*args), part.name, part))
    first(*given)
    all_of_them.wait(lambda: all(f.ended for f in started), "the other partitions")


class Constexpr:
    """`gl.constexpr`: an annotation, and a function that gives back what it takes."""

    def __new__(cls, x: Any) -> Any:
        return plain(x)


def _static_assert(condition: Any, message: Any = "") -> None:
    if not plain(condition):
        raise AssertionError(plain(message) or "static_assert")


def reshape(x: Value, shape: Any, **_: Any) -> Value:
    return Value(x.t.reshape(sizes([shape])))


def _load(pointer: Pointer, mask: Any = None, other: Any = None, **_: Any) -> Value:
    return pointer.load(mask, other)


def _store(pointer: Pointer, x: Any, mask: Any = None, **_: Any) -> None:
    pointer.store(x, mask)


def _range(*numbers: Any, **_: Any) -> range:
    return range(*(int(plain(n)) for n in numbers))


def _arange(start: Any, end: Any, layout: Any = None) -> Value:
    return Value(torch.arange(int(plain(start)), int(plain(end)), dtype=torch.int32))


def _allocated(dtype: Any, shape: Any, layout: Any = None, x: Any = None) -> Shared:
    made = Shared.allocate(dtype, shape, layout)
    if x is not None:
        made.store(x)
    return made


_DTYPES = (
    "float64", "float32", "float16", "bfloat16", "float8e4nv", "float8e5", "int64", "int32", "int16", "int8", "int1",
    "uint64", "uint32", "uint16", "uint8",
)  # fmt: skip
_LAYOUTS = (
    "SliceLayout", "BlockedLayout", "NVMMADistributedLayout", "DotOperandLayout", "NVMMASharedLayout",
    "SwizzledSharedLayout", "PaddedSharedLayout", "DistributedLinearLayout",
)  # fmt: skip
_ALIKE: dict[str, Any] = {  # in Gluon and in Triton's own dialect
    **{name: getattr(tl, name) for name in _DTYPES}, "constexpr": Constexpr, "tensor": Value, "tuple": builtins.tuple,
    "pointer_type": tl.pointer_type, "static_assert": _static_assert, "static_range": _range,
    "program_id": lambda axis: value(partition().cta.place[int(plain(axis))]),
    "num_programs": lambda axis: value(partition().cta.grid[int(plain(axis))]), "load": _load, "store": _store,
    "atomic_add": _atomic(torch.add), "atomic_max": _atomic(_greater), "arange": _arange, "full": full,
    "zeros": lambda shape, dtype, layout=None: full(shape, 0, dtype), "to_tensor": value, "where": where,
    "zeros_like": lambda x: Value(torch.zeros_like(x.t)), "full_like": lambda x, n: full(x.shape, n, x.dtype),
    "minimum": _pair(_less, torch.minimum), "maximum": _pair(_greater, torch.maximum),
    "sum": total, "max": most, "reduce": reduced,
    "expand_dims": lambda x, axis: x.expand_dims(axis), "reshape": reshape, "join": join, "split": split,
    "permute": lambda x, order: Value(x.t.permute(sizes([order]))),
    "exp2": _unary(torch.exp2), "exp": _unary(torch.exp), "log2": _unary(torch.log2), "log": _unary(torch.log),
    "rsqrt": _unary(torch.rsqrt), "sqrt": _unary(torch.sqrt), "abs": _unary(torch.abs), "floor": _unary(torch.floor),
    "fma": fused, "assume": nothing,
}  # fmt: skip
GL = SimpleNamespace(
    **_ALIKE, **dict.fromkeys(_LAYOUTS, Layout), shared_memory_descriptor=Shared, num_warps=lambda: partition().warps,
    warp_specialize=warp_specialize, allocate_shared_memory=_allocated, convert_layout=lambda x, layout, **_: x,
    barrier=syncthreads, thread_barrier=syncthreads,
)  # fmt: skip
TL = SimpleNamespace(
    **_ALIKE, PropagateNan=tl.PropagateNan, range=_range, cdiv=lambda a, b: (a + b - 1) // b, debug_barrier=syncthreads,
    dot=lambda a, b, c=None, **_: mma_sync(a, b, 0.0 if c is None else c),
    trans=lambda x, *order: Value(x.t.permute(sizes(order)) if order else x.t.mT),
    ravel=lambda x, **_: Value(x.t.reshape(-1)), broadcast_to=lambda x, *shape: Value(x.t.expand(sizes(shape))),
    cast=lambda x, dtype, bitcast=False, **_: value(x).to(dtype, bitcast),
    extra=SimpleNamespace(cuda=SimpleNamespace(gdc_launch_dependents=nothing, gdc_wait=nothing)),
    multiple_of=lambda x, *_: x, max_contiguous=lambda x, *_: x, histogram=histogram,
    cumsum=lambda x, axis=0, **_: Value(x.t.cumsum(int(plain(axis)), dtype=x.t.dtype)),
)  # fmt: skip
