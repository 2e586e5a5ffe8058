"""Recording: one run of a kernel's launcher, taken down as steps that `engine.replay` writes out as a function.

What is taken down are allocations, views, launches, and the operations of `_COMPUTED` and `_WRITING`: cuBLAS's products
and what is small around them. They are called again, so that they read PyTorch's settings (TF32, reductions in half
precision) as the launcher's own call would.
"""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tilesmith.engine import torch_private

_aten = torch.ops.aten
_VIEWS = torch_private.aten(
    "view", "_unsafe_view", "_reshape_alias", "permute", "transpose", "t", "select", "slice", "unsqueeze", "squeeze",
    "expand", "alias", "detach", "as_strided", "unfold", "unbind", "split", "split_with_sizes", "view_as", "expand_as",
    "unflatten", "narrow", "chunk", "movedim",
)  # fmt: skip
# views, or copies; torch hands them over whole where autograd is off, as it is under a compiled model and in inference
_PERHAPS = torch_private.aten("reshape", "contiguous", "flatten", "to")
_FACTORIES = torch_private.aten(
    "empty", "empty_like", "empty_strided", "empty_permuted", "new_empty", "new_empty_strided"
)
_ZEROS = torch_private.aten("zeros", "new_zeros", "zeros_like")
# operations around launches; each is called again. Their results are new tensors, or, of those that write, their output
_PRODUCTS = torch_private.aten("mm", "addmm", "bmm", "_addmm_activation")
_COMPUTED = (
    torch_private.aten("sum", "cumsum", "cat", "clone", "_to_copy", "add", "sub", "mul", "div")
    | torch_private.aten("ne", "gt", "bitwise_and", "__and__")
    | _PRODUCTS
    | _ZEROS
    | _PERHAPS
)
_WRITING = torch_private.aten("zero_", "fill_", "copy_", "add_", "mul_", "square_") | _PRODUCTS
# half of a product's time on the host is in finding the overload
_FASTER = {
    _aten.mm.default: torch.mm, _aten.mm.out: torch.mm, _aten.addmm.default: torch.addmm, _aten.addmm.out: torch.addmm,
}  # fmt: skip
_here = threading.local()  # a backward runs on threads of its own
_part = torch_private.view


def recorder() -> Recorder | None:
    """The recorder of this thread's running launcher, if it is being recorded."""
    return getattr(_here, "recorder", None)


def each_time(make: Callable[[], Tensor]) -> Tensor:
    """make(), for a launch argument that differs from call to call: a replay calls `make` again, too."""
    here = recorder()
    if here is None:
        return make()
    with torch_private.without_modes():
        tensor = make()
    if not here.refusal:
        here.made[id(tensor)] = tensor, make
    return tensor


class _Memory(NamedTuple):
    """What is known of a tensor, or of the one that a variable stands for."""

    address: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype

    @classmethod
    def of(cls, t: Tensor) -> _Memory:
        return cls(t.data_ptr(), tuple(t.shape), t.stride(), t.dtype)


class Part(NamedTuple):
    """A tensor as an argument of an operation: a variable, as a whole or as a view of it, `offset` elements on."""

    name: str
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int


class _Step(NamedTuple):
    """What is done again. result: the variable that it makes. used: those that it reads or writes. line: how, from the
    record when it is complete."""

    result: str | None
    used: tuple[str, ...]
    line: Callable[[Recorder], str]


class Recorder(torch_private.DispatchMode or object):
    """Watches one run of a launcher: `steps`, or, where it did something else, why not in `refusal`.

    It holds no tensor: what the launcher lets go of is free again while it is recorded, as in any other call.
    """

    def __init__(self, args: tuple):
        super().__init__()
        self.refusal = ""
        self.sources: dict[int, str] = {}  # id of a tensor that is alive -> the variable whose memory it is
        self.watched: list[weakref.ref] = []  # which take the ids out of `sources`
        self.made: dict[int, tuple[Tensor, Callable[[], Tensor]]] = {}  # id -> what makes it anew (`each_time`)
        self.memory: dict[str, _Memory] = {}
        self.allocated: set[str] = set()  # variables without contents, whose shape is free
        self.constants: dict[str, Any] = {}
        self.steps: list[_Step] = []
        self.devices: set[int] = set()  # of launches
        self.computes = False
        self.autocast = torch_private.any_autocast()  # once torch has dispatched, it says no
        self.parameters = [f"a{i}" for i in range(len(args))]
        self.same: list[tuple[str, str]] = []  # parameters for which one tensor came; a replay is of such calls alone
        self.device = next((a.device for a in args if isinstance(a, Tensor)), None)
        for name, a in zip(self.parameters, args):
            if isinstance(a, Tensor):
                if id(a) in self.sources:
                    self.same.append((self.sources[id(a)], name))
                self._know(a, name)
                self.memory[name] = _Memory.of(a)

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """torch would import its compiler, a second and a half, at the first call of the mode, to disable it there. It
        compiles no frame while a mode is on, and calls that it traces are not recorded."""
        return False

    def _know(self, tensor: Tensor, name: str) -> None:
        key, sources = id(tensor), self.sources
        if key not in sources:
            sources[key] = name
            self.watched.append(weakref.ref(tensor, lambda _: sources.pop(key, None)))

    def _refuse(self, why: str) -> None:
        self.refusal = why
        for held in (self.sources, self.watched, self.made, self.memory, self.constants, self.steps):
            held.clear()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        if self.refusal:
            return out
        try:
            self._record(func, args, kwargs, out)
        except Unknown as problem:
            self._refuse(str(problem))
        return out

    def _record(self, func: Any, args: tuple, kwargs: dict[str, Any], out: Any) -> None:
        packet = func.overloadpacket
        source = self.sources.get(id(args[0])) if args and isinstance(args[0], Tensor) else None
        if not isinstance(out, Tensor | tuple | list) and not _tensors((args, kwargs)):
            return  # a question about dtypes
        empty = packet in _FACTORIES or (packet in _ZEROS and out.numel() == 0)
        if empty and out.device == self.device:
            name = self._variable(out)
            self.allocated.add(name)
            self.steps.append(_Step(name, (), lambda r: f"{name} = empty(*{name}_like)"))
        elif source is not None and (packet in _VIEWS or (packet in _PERHAPS and _shares(out, args[0]))):
            for view in out if isinstance(out, tuple | list) else (out,):
                self._know(view, source)
        elif (packet in _COMPUTED or packet in _WRITING) and not self.autocast and out.device == self.device:
            self._operation(func, args, kwargs, None if id(out) in self.sources else self._variable(out))
        else:
            raise Unknown(f"the launcher calls {func}")

    def _variable(self, tensor: Tensor) -> str:
        name = f"t{len(self.steps)}"
        self._know(tensor, name)
        self.memory[name] = _Memory.of(tensor)
        return name

    def _operation(self, func: Any, args: tuple, kwargs: dict[str, Any], result: str | None) -> None:
        writes = func._schema.is_mutable
        if writes is (result is not None):
            raise Unknown(f"the launcher calls {func} on memory that is not known")
        self.computes = True
        index, used = len(self.steps), []
        self.constants[f"do{index}"] = _FASTER.get(func, func)

        def argument(value: Any, name: str) -> Callable[[Recorder], str]:
            if isinstance(value, Tensor):
                part = self._tensor(value)
                used.append(part.name)
                return lambda r: r.expression(part, f"{name}_part")
            if isinstance(value, tuple | list) and _tensors(value):
                each = [argument(v, f"{name}_{i}") for i, v in enumerate(value)]
                return lambda r: f"[{', '.join(e(r) for e in each)}]"
            self.constants[name] = value
            return lambda r: name

        given = [argument(a, f"c{index}_{i}") for i, a in enumerate(args)]
        named = {k: argument(a, f"c{index}_{k}") for k, a in kwargs.items()}

        def line(r: Recorder) -> str:
            listed = ", ".join([*(g(r) for g in given), *(f"{k}={g(r)}" for k, g in named.items())])
            return f"{f'{result} = ' if result else ''}do{index}({listed})"

        self.steps.append(_Step(result, tuple(used), line))

    def launched(self, found: Any, device: int, grid: tuple[int, int, int], values: list[Any]) -> None:
        """`engine.launcher` ran a compiled kernel; None: one that it could not keep."""
        if self.refusal:
            return
        try:
            if found is None:
                raise Unknown("a launch is not covered")
            self._launch(found, device, grid, values)
        except Unknown as problem:
            self._refuse(str(problem))

    def _launch(self, found: Any, device: int, grid: tuple[int, int, int], values: list[Any]) -> None:
        self.devices.add(device)
        if len(self.devices) > 1:
            raise Unknown("launches on several devices")
        index, used = len(self.steps), []
        if found.encoded is not None:
            values = _encodings(found.encoded, values)
        rest = ", ".join(self._value(v, f"c{index}_{i}", used) for i, v in enumerate(values))
        run = found.run if found.encoded is None else found.encoded.run
        self.constants |= {f"run{index}": run, f"f{index}": found.function, f"head{index}": found.head}
        given = f"({rest},)" if found.together else rest
        line = f"run{index}({grid[0]}, {grid[1]}, {grid[2]}, stream({device}), f{index}, *head{index}, {given})"
        self.steps.append(_Step(None, tuple(used), lambda r: line))

    def _value(self, value: Any, name: str, used: list[str]) -> str:
        """The expression that gives a launch argument anew."""
        if id(value) in self.made:
            self.constants[name] = self.made[id(value)][1]
            return f"{name}().data_ptr()"
        if isinstance(value, Tensor):
            return self._pointer(value, used)
        if isinstance(value, _Encoding):
            self.constants |= {name: value.maps, f"{name}_sizes": value.sizes}
            return f"{name}[{self._pointer(value.base, used)}], *{name}_sizes"
        if type(value).__name__ == "TensorDescriptor":
            source = self.sources.get(id(value.base))
            if source is None or self._offset(value.base, source):
                raise Unknown("a descriptor of memory that is not an argument's or allocated")
            used.append(source)
            self.constants |= {name: _descriptor(value, None), "descriptor": _descriptor}
            return f"descriptor({name}, {source})"
        if isinstance(value, tuple) and any(isinstance(v, Tensor) for v in value):
            raise Unknown("tensors inside a tuple")
        self.constants[name] = value
        return name

    def _pointer(self, tensor: Tensor, used: list[str]) -> str:
        source = self._source(tensor)
        used.append(source)
        offset = self._offset(tensor, source)
        return f"{source}.data_ptr()" + (f" + {offset}" if offset else "")

    def _tensor(self, tensor: Tensor) -> Part:
        source = self._source(tensor)
        if tensor.dtype != self.memory[source].dtype:
            raise Unknown("an operation reads memory as another dtype")
        return Part(source, tuple(tensor.shape), tensor.stride(), self._offset(tensor, source) // tensor.element_size())

    def _source(self, tensor: Tensor) -> str:
        source = self.sources.get(id(tensor))
        if source is None:
            raise Unknown("a tensor that is neither an argument nor allocated")
        return source

    def _offset(self, tensor: Tensor, source: str) -> int:
        return 0 if tensor.numel() == 0 else tensor.data_ptr() - self.memory[source].address

    def expression(self, part: Part, name: str) -> str:
        """A variable as this view of it, once its own shape is settled; name: for the view's constants."""
        whole = self.memory[part.name]
        if (part.shape, part.stride, part.offset) == (whole.shape, whole.stride, 0):
            return part.name
        self.constants |= {name: part[1:], "part": _part}
        return f"part({part.name}, *{name})"

    def results(self, out: Any) -> list[Part | None]:
        """What the run returned, as variables and views of them; none where `refusal` says why."""
        found: list[Part | None] = []
        for o in out if isinstance(out, tuple | list) else (out,):
            if o is None:
                found.append(None)
                continue
            name = self.sources.get(id(o)) if isinstance(o, Tensor) else None
            taken = name in [r.name for r in found if r is not None]
            if name is None or taken or not _same_memory(o, self.memory[name]):
                self.refusal = self.refusal or "an output is not a tensor that the launcher allocated"
                return []
            if name in self.parameters and _Memory.of(o) != self.memory[name]:
                self.refusal = "an output is a view of an argument"
                return []
            found.append(Part(name, tuple(o.shape), o.stride(), 0))
            if name in self.allocated:  # returned through a view: its shape is what counts
                self.memory[name] = _Memory.of(o)
        return found


def _tensors(values: Any) -> bool:
    """Whether there is a tensor among nested values."""
    if isinstance(values, dict):
        values = values.values()
    elif not isinstance(values, tuple | list):
        return isinstance(values, Tensor)
    return any(_tensors(v) for v in values)


def _shares(view: Tensor, whole: Tensor) -> bool:
    return view.untyped_storage().data_ptr() == whole.untyped_storage().data_ptr()


def _same_memory(view: Tensor, whole: _Memory) -> bool:
    numel = 1
    for size in whole.shape:
        numel *= size
    return (view.data_ptr(), view.numel(), view.dtype) == (whole.address, numel, whole.dtype)


class Unknown(Exception):
    """Something that cannot be repeated."""


class _Maps(dict):
    """Address -> the encoded descriptor of memory there. Memory comes back at the same addresses step by step."""

    def __init__(self, encode: Callable[..., Any], arguments: tuple):
        super().__init__()
        self.encode, self.arguments = encode, arguments

    def __missing__(self, address: int) -> Any:
        if len(self) >= 64:  # as many layers are usual; start over rather than grow
            self.clear()
        made = self[address] = self.encode(address, *self.arguments)
        return made


class _Encoding(NamedTuple):
    """A tensor descriptor among a launch's values: of which memory, its encodings, and the sizes that follow them."""

    base: Tensor
    maps: _Maps
    sizes: tuple[int, ...]


def _encodings(encoded: Any, values: list[Any]) -> list[Any]:
    """The values of a launch, their descriptors as `_Encoding`."""
    found, position = [], 0
    for value in values:
        if type(value).__name__ == "TensorDescriptor":
            maps = _Maps(encoded.encode, encoded.arguments(position, value))
            value = _Encoding(value.base, maps, (*value.shape, *value.strides))
            position += 1
        found.append(value)
    return found


def _descriptor(template: Any, base: Tensor) -> Any:
    """The template for other memory. `copy.copy` costs six times as much, and a backward has up to eight of them."""
    made = object.__new__(type(template))
    made.__dict__.update(template.__dict__)
    made.base = base
    return made


@contextlib.contextmanager
def recording(args: tuple) -> Iterator[Recorder]:
    _here.recorder = recorder = Recorder(args)
    try:
        with recorder:
            yield recorder
    finally:
        _here.recorder = None
