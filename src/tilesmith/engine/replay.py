"""Replay: what a kernel's launcher did for one set of shapes, allocations and launches, done again without asking.

A launcher decides from shapes, strides and plain arguments, all of which are the key under which the op keeps its
repeat calls. So the second call of a key is recorded: torch operations through a dispatch mode, launches through
`engine.launch`. If nothing else happened than allocations, views and launches, a function is generated that does just
those.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from tilesmith.engine.written import written

_aten = torch.ops.aten
_VIEWS = frozenset({
    _aten.view, _aten._unsafe_view, _aten._reshape_alias, _aten.permute, _aten.transpose, _aten.t, _aten.select,
    _aten.slice, _aten.unsqueeze, _aten.squeeze, _aten.expand, _aten.alias, _aten.detach, _aten.as_strided,
    _aten.unfold, _aten.unbind, _aten.split, _aten.split_with_sizes,
})  # fmt: skip
# views, or copies; torch hands them over whole where autograd is off, as it is under a compiled model
_PERHAPS = frozenset({_aten.reshape, _aten.contiguous, _aten.flatten})
_FACTORIES = frozenset({
    _aten.empty, _aten.empty_like, _aten.empty_strided, _aten.empty_permuted, _aten.new_empty, _aten.new_empty_strided,
})  # fmt: skip
_here = threading.local()  # a backward runs on threads of its own
_deterministic = torch._C._get_deterministic_algorithms
_current_device = torch._C._cuda_getDevice if torch.cuda._is_compiled() else None
# Inductor's allocator: without the dispatcher, a third of the time of torch.empty_strided
_empty_cuda = getattr(torch._C._dynamo.guards, "_empty_strided_cuda", None)


def recorder() -> Recorder | None:
    """The recorder of this thread's running launcher, if it is being recorded."""
    return getattr(_here, "recorder", None)


def each_time(make: Callable[[], Tensor]) -> Tensor:
    """make(), for a launch argument that differs from call to call: a replay calls `make` again, too."""
    here = recorder()
    if here is None:
        return make()
    with _disable_current_modes():
        tensor = make()
    if not here.refusal:
        here.alive.append(tensor)
        here.made[id(tensor)] = make
    return tensor


class Recorder(TorchDispatchMode):
    """Watches one run of a launcher. `replay()` gives the function that repeats it, or None with `refusal` set."""

    def __init__(self, args: tuple):
        super().__init__()
        self.refusal = ""
        self.alive: list[Tensor] = []  # ids must stay unique while recording
        self.sources: dict[int, str] = {}  # id of a tensor -> the variable whose memory it is
        self.made: dict[int, Callable[[], Tensor]] = {}  # id of a tensor -> what makes it anew (`each_time`)
        self.memory: dict[str, Tensor] = {}  # variable -> the tensor recorded for it
        self.steps: list[tuple[str, Any]] = []
        self.parameters = [f"a{i}" for i in range(len(args))]
        for name, a in zip(self.parameters, args):
            if isinstance(a, Tensor):
                if id(a) in self.sources:  # the next call's may be two
                    self.refusal = "one tensor came as two arguments"
                self._know(a, name)
                self.memory[name] = a
        if self.refusal:
            self._refuse(self.refusal)

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """torch would import its compiler, a second and a half, at the first call of the mode, to disable it there. It
        compiles no frame while a mode is on, and calls that it traces are not recorded."""
        return False

    def _know(self, tensor: Tensor, name: str) -> None:
        self.alive.append(tensor)
        self.sources.setdefault(id(tensor), name)

    def _refuse(self, why: str) -> None:
        """Give up, and let go of what the launcher may want to be free again."""
        self.refusal = why
        for held in (self.alive, self.sources, self.made, self.memory, self.steps):
            held.clear()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if self.refusal:
            return out
        packet = func.overloadpacket
        if packet in _FACTORIES and out.device.type == "cuda":
            name = f"t{len(self.steps)}"
            self._know(out, name)
            self.memory[name] = out
            self.steps.append(("empty", name))
        elif (packet in _VIEWS or (packet in _PERHAPS and _shares(out, args[0]))) and id(args[0]) in self.sources:
            for view in out if isinstance(out, tuple | list) else (out,):
                self._know(view, self.sources[id(args[0])])
        else:
            self._refuse(f"the launcher calls {func}")
        return out

    def launched(self, found: Any, device: int, grid: tuple[int, int, int], values: list[Any]) -> None:
        """`engine.launch` ran a compiled kernel; None: one that it could not keep."""
        if self.refusal:
            return
        if found is None:
            self._refuse("a launch is not covered")
            return
        self.steps.append(("launch", (found, device, grid, values)))

    def replay(self, out: Any, kernel: Replay) -> Callable[..., Any] | None:
        """The function of the same arguments that allocates, launches and returns as the recorded run did, and leaves
        that to the kernel's launcher while another device is current or something forbids a replay."""
        if self.refusal:
            return None
        outs = out if isinstance(out, tuple | list) else (out,)
        results = []
        for o in outs:
            if o is None:
                results.append("None")
                continue
            name = self.sources.get(id(o)) if isinstance(o, Tensor) else None
            if name is None or name in self.parameters or name in results or not _same_memory(o, self.memory[name]):
                self.refusal = "an output is not a tensor that the launcher allocated"
                return None
            self.memory[name] = o  # returned through a view: its shape is what counts
            results.append(name)
        try:
            return _generate(self, results, isinstance(out, tuple | list), kernel)
        except _Unknown as problem:
            self.refusal = str(problem)
            return None


def _shares(view: Tensor, whole: Tensor) -> bool:
    return view.untyped_storage().data_ptr() == whole.untyped_storage().data_ptr()


def _same_memory(view: Tensor, whole: Tensor) -> bool:
    return view.data_ptr() == whole.data_ptr() and view.numel() == whole.numel() and view.dtype == whole.dtype


class _Unknown(Exception):
    """A launch argument that cannot be repeated."""


def _generate(record: Recorder, results: list[str], many: bool, kernel: Replay) -> Callable[..., Any]:
    constants: dict[str, Any] = {
        "device": _current_device, "free": kernel.free, "launch": kernel._launch, "deterministic": _deterministic,
        "filled": _empty, "fast": _empty_cuda, "stream": torch._C._cuda_getCurrentRawStream,
    }  # fmt: skip
    parameters = ", ".join(record.parameters)
    lines = [
        f"if device() != {kernel.device} or not free(): return launch({parameters})",
        "empty = filled if deterministic() else fast",
    ]
    devices = {step[1][1] for step in record.steps if step[0] == "launch"}
    if len(devices) > 1:
        raise _Unknown("launches on several devices")
    last: dict[str, int] = {}
    body: list[tuple[str, set[str]]] = []
    for index, (kind, what) in enumerate(record.steps):
        if kind == "empty":
            t = record.memory[what]
            constants[f"{what}_like"] = (tuple(t.shape), t.stride(), t.dtype)
            body.append((f"{what} = empty(*{what}_like)", set()))
        else:
            found, device, grid, values = what
            used: set[str] = set()
            encoded = found.encoded
            if encoded is not None:
                values = _encodings(encoded, values)
            rest = ", ".join(_value(record, v, f"c{index}_{i}", constants, used) for i, v in enumerate(values))
            run = found.run if encoded is None else encoded.run
            constants |= {f"run{index}": run, f"f{index}": found.function, f"head{index}": found.head}
            stream = f"stream({device})"
            call = f"run{index}({grid[0]}, {grid[1]}, {grid[2]}, {stream}, f{index}, *head{index}, {rest})"
            body.append((call, used))
            for name in used:
                last[name] = index
    for index, (line, used) in enumerate(body):
        lines.append(line)
        spent = sorted(n for n in used if last[n] == index and n not in results and n not in record.parameters)
        if spent:  # as early as the launcher can have freed it
            lines.append(f"del {', '.join(spent)}")
    listed = ", ".join(results)
    lines.append(f"return ({listed},)" if many else f"return {listed}")
    return written(f"replay({parameters})", lines, "replay", constants)


def _value(record: Recorder, value: Any, name: str, constants: dict[str, Any], used: set[str]) -> str:
    """The expression that gives a launch argument anew."""
    if id(value) in record.made:
        constants[name] = record.made[id(value)]
        return f"{name}().data_ptr()"
    if isinstance(value, Tensor):
        return _pointer(record, value, used)
    if isinstance(value, _Encoding):
        constants |= {name: value.maps, f"{name}_sizes": value.sizes}
        return f"{name}[{_pointer(record, value.base, used)}], *{name}_sizes"
    if type(value).__name__ == "TensorDescriptor":
        source = record.sources.get(id(value.base))
        if source is None or _offset(record, value.base, source):
            raise _Unknown("a descriptor of memory that is not an argument's or allocated")
        used.add(source)
        constants[name] = value
        constants["descriptor"] = _descriptor
        return f"descriptor({name}, {source})"
    if isinstance(value, tuple) and any(isinstance(v, Tensor) for v in value):
        raise _Unknown("tensors inside a tuple")
    constants[name] = value
    return name


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


def _pointer(record: Recorder, tensor: Tensor, used: set[str]) -> str:
    source = record.sources.get(id(tensor))
    if source is None:
        raise _Unknown("a tensor that is neither an argument nor allocated")
    used.add(source)
    offset = _offset(record, tensor, source)
    return f"{source}.data_ptr()" + (f" + {offset}" if offset else "")


def _offset(record: Recorder, tensor: Tensor, source: str) -> int:
    if tensor.numel() == 0:
        return 0
    return tensor.data_ptr() - record.memory[source].data_ptr()


def _descriptor(template: Any, base: Tensor) -> Any:
    """The template for other memory. `copy.copy` costs six times as much, and a backward has up to eight of them."""
    made = object.__new__(type(template))
    made.__dict__.update(template.__dict__)
    made.base = base
    return made


@contextlib.contextmanager
def _recording(args: tuple) -> Iterator[Recorder]:
    _here.recorder = recorder = Recorder(args)
    try:
        with recorder:
            yield recorder
    finally:
        _here.recorder = None


class Ready:
    """A kernel for one key of repeat calls. run: what runs it; way: connects its calls to autograd, None where no
    argument asks for a gradient; alone: the same kernel told to make public outputs alone, None where it cannot."""

    def __init__(self, run: Callable[..., Any]):
        self.run, self.way, self.alone = run, None, None


class Replay(Ready):
    """A kernel on a CUDA device: runs its launcher, records the second run, repeats that from then on.

    fn: the configured launcher. free: whether nothing forbids a replay now; None: never replayed. device: index.
    """

    def __init__(self, fn: Callable[..., Any], free: Callable[[], bool] | None, device: int):
        super().__init__(self._launch)
        self.fn, self.free, self.device = fn, free, device
        self.calls, self.refusal = 0, ""

    def _launch(self, *args: Any) -> Any:
        if _current_device() != self.device:
            with torch.cuda.device(self.device):
                return self.run(*args)
        if self.free is None or not self.free():
            return self.fn(*args)
        self.calls += 1
        if self.calls != 2 or _empty_cuda is None:
            return self.fn(*args)
        with _recording(args) as record:
            out = self.fn(*args)
        again, self.refusal = record.replay(out, self), record.refusal
        if again is not None:
            self.run = again
        return out


def _empty(shape: tuple[int, ...], stride: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    return torch.empty_strided(shape, stride, dtype=dtype, device="cuda")
