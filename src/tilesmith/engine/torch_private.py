"""Every private name of PyTorch, Dynamo and Inductor that the engine uses, each with what takes its place.

Names are looked up once, when this module is imported; `ABSENT` holds those that this PyTorch does not have, with what
that costs, for `tilesmith doctor`. None of them decides a result: without one, calls are slower, or go through
PyTorch's dispatcher, or something optional is off. Triton's are in `engine.triton_private`, Gluon's in the shim of the
device code: both load Triton, which `import tilesmith` does not.

Dynamo and Inductor cost more than a second to import, so what is theirs is looked up where they are at work:
`engine.tracing` breaks the graph where it cannot read what Dynamo knows, and `engine.inductor` leaves its calls to the
dispatcher.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import importlib
import sys
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import torch
from torch import Tensor

NAMES = {
    "torch._C._functorch.peek_interpreter_stack": "each call asks for the whole stack of transforms, which is slower",
    "torch._C._len_torch_dispatch_stack": "each call goes through PyTorch's dispatcher",
    "torch._C._functorch.get_interpreter_stack": "backwards under torch.func differentiate the reference",
    "torch._C._functorch.TransformType": "backwards under torch.func differentiate the reference",
    "torch._C._autograd._get_current_graph_task_keep_graph": "no gradient is written over what was saved",
    "torch._C._autograd._top_saved_tensors_default_hooks": "no gradient is written over what was saved",
    "torch._C._get_deterministic_algorithms": "replays ask the public function, which is slower",
    "torch._C._is_any_autocast_enabled": "each kind of device is asked for autocast",
    "torch._C._dynamo.guards._empty_strided_cuda": "replays allocate through the dispatcher",
    "torch._C._dynamo.guards._reinterpret_tensor": "replays make views through the dispatcher",
    "torch._C._dynamo.eval_frame.set_code_exec_strategy": "behind a broken graph, Dynamo traces the engine too",
    "torch._C._dynamo.eval_frame._FrameExecStrategy": "behind a broken graph, Dynamo traces the engine too",
    "torch._C._dynamo.eval_frame._FrameAction": "behind a broken graph, Dynamo traces the engine too",
    "torch._C._cuda_getDevice": "the current device is asked for by the public function, which is slower",
    "torch._C._cuda_getCurrentRawStream": "the current stream is asked for by the public function, which is slower",
    "torch._C._current_graph_task_id": "pins of a backward are those that its thread was left with",
    "torch._C._is_key_in_tls": "a pin does not reach backwards in other threads, but for the forward's own",
    "torch._C._get_obj_in_tls": "a pin does not reach backwards in other threads, but for the forward's own",
    "torch._C._stash_obj_in_tls": "a pin does not reach backwards in other threads, but for the forward's own",
    "torch._C._get_tracing_state": "torch.jit.trace warns of what the checks of arguments ask",
    "torch._C._set_tracing_state": "torch.jit.trace warns of what the checks of arguments ask",
    "torch.utils._python_dispatch.TorchDispatchMode": "launchers are not replayed; doctor cannot watch a call",
    "torch.utils._python_dispatch._disable_current_modes": "launchers that number their launches are not replayed; "
    "a model with the experts of this library by name must be called before torch.export",
    "torch.nn.modules.module._has_any_global_hook": "blocks and tokens that were recorded are not replayed",
    "torch._C._storage_Use_Count": "what CUDA graphs of blocks return is copied by each replay",
    "torch._foreach_mul": "gradients that CUDA graphs compute are copied one by one",
    "torch._addmm_activation": "products with relu or gelu behind them take two calls",
    "torch.cuda._sleep": "timings queue reads of memory in front of what they time",
}
"""Each name, and what it costs where PyTorch does not have it."""


def _look_up(name: str) -> Any:
    module, _, attribute = name.rpartition(".")
    found: Any = sys.modules.get("torch")
    for part in module.split(".")[1:]:
        found = getattr(found, part, None)
    if found is None and not module.startswith("torch._C"):
        with contextlib.suppress(ImportError):
            found = importlib.import_module(module)
    return getattr(found, attribute, None)


_FOUND = {name: _look_up(name) for name in NAMES}
_CUDA_ONLY = ("_cuda_", "_empty_strided_cuda", "cuda._sleep")


def _is_absent(name: str) -> bool:
    expected = torch.backends.cuda.is_built() or not any(part in name for part in _CUDA_ONLY)
    return expected and _FOUND[name] is None


ABSENT = {name: cost for name, cost in NAMES.items() if _is_absent(name)}
"""What of NAMES this PyTorch should have and has not."""


def _get(name: str, instead: Any = None) -> Any:
    found = _FOUND[name]
    return instead if found is None else found


def _always(*args: Any) -> bool:
    return True


# calls ----------------------------------------------------------------------------------------------------------------

dispatch_modes: Callable[[], Any] = _get("torch._C._len_torch_dispatch_stack", _always)
"""How many dispatch modes are on, of which each wants to see each call."""

_stack, _kinds = _get("torch._C._functorch.get_interpreter_stack"), _get("torch._C._functorch.TransformType")


def _transforms() -> Any:
    return (_stack() or None) if _stack is not None else True


functorch: Callable[[], Any] = _get("torch._C._functorch.peek_interpreter_stack", _transforms)
"""What is not None while a transform of torch.func is at work."""

knows_functorch = functorch is not _transforms or _stack is not None
"""Whether `functorch` can tell; else one may be at work in each call: all go to the dispatcher, torch.func raises."""


def batched() -> bool:
    """Whether what runs now is the function of a vmap itself; False where torch cannot tell, and while compiling."""
    if torch.compiler.is_compiling() or not knows_functorch or functorch() is None or _stack is None or _kinds is None:
        return False
    return _stack()[-1].key() == _kinds.Vmap


_tracing, _trace_on = _get("torch._C._get_tracing_state"), _get("torch._C._set_tracing_state")


@contextlib.contextmanager
def without_jit() -> Iterator[None]:
    """Inside, torch.jit.trace records nothing, and sizes are numbers, not tensors."""
    if not torch.jit.is_tracing() or _tracing is None or _trace_on is None:
        yield
        return
    state = _tracing()
    _trace_on(None)
    try:
        yield
    finally:
        _trace_on(state)


_any_autocast = _get("torch._C._is_any_autocast_enabled")


def _each_autocast() -> bool:
    return any(torch.is_autocast_enabled(kind) for kind in ("cpu", "cuda", "xpu", "mps"))


any_autocast: Callable[[], bool] = _any_autocast or _each_autocast
"""Whether autocast is on for any kind of device."""


def autocasts(kind: str) -> bool:
    """Whether autocast is on for a type of device. There is none for meta, of which torch raises."""
    return kind != "meta" and torch.is_autocast_enabled(kind)


_Fn = TypeVar("_Fn", bound=Callable[..., Any])


def constant_in_graphs(fn: _Fn) -> _Fn:
    """Mark `fn` as assume_constant_result does, which imports torch._dynamo: a second or more.

    Dynamo reads the attribute when it meets the function; a PyTorch that does not would trace into it instead.
    """
    fn._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return fn


_set_strategy, _strategy, _actions = (
    _get(f"torch._C._dynamo.eval_frame.{name}")
    for name in ("set_code_exec_strategy", "_FrameExecStrategy", "_FrameAction")
)


def traced_in_its_caller(fn: _Fn) -> _Fn:
    """Have Dynamo trace `fn` where a frame that it traces calls it, but not where Python does, as it does behind a
    broken graph: nor then what `fn` calls."""
    if _set_strategy is not None and _strategy is not None and _actions is not None:
        _set_strategy(fn.__code__, _strategy(_actions.SKIP, _actions.SKIP))
    return fn


def compiled_graphs() -> tuple[int, dict[str, int]]:
    """How many graphs Dynamo has compiled in this process, and why graphs were broken, with how often; nothing where it
    does not tell."""
    counters = getattr(sys.modules.get("torch._dynamo.utils"), "counters", {})
    return counters.get("stats", {}).get("unique_graphs", 0), dict(counters.get("graph_break", {}))


def activations_kept() -> contextlib.AbstractContextManager[None]:
    """What is compiled within writes its backward's results over no saved activation, and compiled backwards may be
    kept (retain_graph). By default torch.compile lets a backward overwrite what only it needs (donated buffers)."""
    return _switched_off("torch._functorch.config", "donated_buffer")


def hooks_guarded() -> contextlib.AbstractContextManager[None]:
    """What is compiled within is compiled again for a module with other hooks. By default Dynamo does not look at them,
    so that code compiled for one module serves another one, or the same one later, without its hooks."""
    return _switched_off("torch._dynamo.config", "skip_nnmodule_hook_guards")


@contextlib.contextmanager
def _switched_off(module: str, name: str) -> Iterator[None]:
    """Inside, a flag of one of torch's configurations is False; nothing changes where there is no such flag."""
    config = None
    with contextlib.suppress(ImportError):
        config = importlib.import_module(module)
    before = getattr(config, name, False)
    if not before:
        yield
        return
    setattr(config, name, False)
    try:
        yield
    finally:
        setattr(config, name, before)


# gradients ------------------------------------------------------------------------------------------------------------


def differentiates_gradients() -> bool:
    """Whether what a backward computes, with gradients enabled, will be differentiated: by plain autograd
    (create_graph), or by more than one gradient of torch.func."""
    if _stack is None or _kinds is None:
        return True
    levels = _stack()
    return not levels or sum(level.key() == _kinds.Grad for level in levels) > 1


graph_is_kept: Callable[[], bool] = _get("torch._C._autograd._get_current_graph_task_keep_graph", _always)
"""Whether the backward that runs may run again."""

saved_tensors_hooks: Callable[[bool], Any] = _get("torch._C._autograd._top_saved_tensors_default_hooks", _always)
"""The hooks that tensors saved now would pass, None if there are none. The argument is PyTorch's own, False here."""

hooks_of_all_modules: Callable[[], Any] = _get("torch.nn.modules.module._has_any_global_hook", _always)
"""Whether calls of every module are told to somebody, as by `register_module_forward_hook`."""


# devices --------------------------------------------------------------------------------------------------------------

deterministic: Callable[[], bool] = _get(
    "torch._C._get_deterministic_algorithms", torch.are_deterministic_algorithms_enabled
)

current_device: Callable[[], int] = _get("torch._C._cuda_getDevice", torch.cuda.current_device)
"""The index of the current CUDA device."""


def _public_stream(device: int) -> int:
    return torch.cuda.current_stream(device).cuda_stream


raw_stream: Callable[[int], int] = _get("torch._C._cuda_getCurrentRawStream", _public_stream)
"""The driver's handle of a device's current stream."""


def empty_strided(shape: tuple[int, ...], stride: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Memory on the current CUDA device; filled where PyTorch is told to."""
    return torch.empty_strided(shape, stride, dtype=dtype, device="cuda")


# Inductor's allocator: without the dispatcher, a third of the time of torch.empty_strided
empty_cuda: Callable[..., Tensor] = _get("torch._C._dynamo.guards._empty_strided_cuda", empty_strided)
"""The same, never filled."""


def _as_strided(tensor: Tensor, shape: tuple[int, ...], stride: tuple[int, ...], offset: int) -> Tensor:
    return tensor.as_strided(shape, stride, tensor.storage_offset() + offset)


view: Callable[..., Tensor] = _get("torch._C._dynamo.guards._reinterpret_tensor", _as_strided)
"""(tensor, shape, stride, offset): a view of its memory, `offset` elements on."""

sleep: Callable[[int], None] | None = _get("torch.cuda._sleep")
"""Keep the current CUDA stream busy for so many cycles."""


addmm_activation: Callable[..., Tensor] | None = _get("torch._addmm_activation")
"""torch.addmm with relu or gelu behind it, in one call of cuBLASLt."""


_use_count = _get("torch._C._storage_Use_Count")


class LentMemory:
    """The memory of a tensor, lent as tensors of another storage, whose references are counted: so it is known whether
    one of them, or a view of one, is still in use."""

    def __init__(self, tensor: Tensor):
        """Raises RuntimeError or BufferError for a tensor that DLPack does not know."""
        if _use_count is None:
            raise RuntimeError("this PyTorch does not tell who uses a storage")
        plain = torch.utils.dlpack.from_dlpack(torch.utils.dlpack.to_dlpack(tensor))
        self._tensor = plain.as_strided(tensor.shape, tensor.stride())  # DLPack has strides of its own for sizes of 1
        self._storage = self._tensor.untyped_storage()
        self._address = self._storage._cdata
        del plain
        self._own = _use_count(self._address)

    def lend(self) -> Tensor:
        """A tensor of that memory."""
        return self._tensor.detach()

    def in_use(self) -> bool:
        """Whether a lent tensor, or a view of one, still exists."""
        return _use_count(self._address) > self._own


_times = _get("torch._foreach_mul")


def clone_each(tensors: list[Tensor]) -> list[Tensor]:
    """Copies of tensors of one dtype, allocated and filled by one call."""
    if _times is None or tensors[0].is_complex():  # whose infinities a product with 1 changes
        return [tensor.clone() for tensor in tensors]
    return _times(tensors, 1)


def aten(*names: str) -> frozenset:
    """The operators of ATen that have these names, those left out that this PyTorch does not have."""
    return frozenset(found for name in names if (found := getattr(torch.ops.aten, name, None)) is not None)


# watching -------------------------------------------------------------------------------------------------------------

DispatchMode: type | None = _get("torch.utils._python_dispatch.TorchDispatchMode")
"""The base of contexts that see each operation; None: nothing can be watched."""

without_modes: Callable[[], Any] = _get("torch.utils._python_dispatch._disable_current_modes", contextlib.nullcontext)
"""A context in which the modes that are on see nothing."""


# what PyTorch carries to the threads that run backwards ---------------------------------------------------------------

_task = _get("torch._C._current_graph_task_id", lambda: 0)
_has, _read, _stash = (_get(f"torch._C.{name}") for name in ("_is_key_in_tls", "_get_obj_in_tls", "_stash_obj_in_tls"))
_can_carry = None not in (_has, _read, _stash)


def in_backward() -> bool:
    """Whether this thread runs a backward."""
    return _task() != -1


def carried(key: str, in_backward: bool = True) -> Any:
    """What was last carried under a key, None if nothing; in_backward: None outside of backwards."""
    if not _can_carry or (in_backward and _task() == -1) or not _has(key):
        return None
    return _read(key)


def carry(key: str, value: Any) -> None:
    """Have the threads of backwards that start from here know `value`."""
    if _can_carry:
        if _takes_references():
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(value))
        _stash(key, value)


@functools.cache
def _takes_references() -> bool:
    """Whether torch, given an object to carry, drops a reference later that it never took, as 2.11 does, not 2.13."""
    asked = object()
    before = sys.getrefcount(asked)
    _stash("tilesmith_asked", asked)
    taken = sys.getrefcount(asked) == before
    if taken:
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(asked))
    return taken


# distributed ----------------------------------------------------------------------------------------------------------


def all_reduce(tensor: Tensor, operation: str, group: Any) -> Tensor:
    """A new tensor, reduced over the group, or (mesh, dim): by functional collectives, which torch.compile can trace,
    where there are any."""
    try:
        from torch.distributed._functional_collectives import all_reduce, wait_tensor
    except ImportError:
        if isinstance(group, tuple):
            mesh, dim = group
            group = mesh.get_group(dim)
        whole = tensor.clone()
        torch.distributed.all_reduce(whole, getattr(torch.distributed.ReduceOp, operation.upper()), group)
        return whole
    return wait_tensor(all_reduce(tensor, operation, group))


def moves_with_fsdp(parameter: Tensor) -> bool:
    """Whether FullyShardedDataParallel keeps a parameter, which is then elsewhere in each forward. `fully_shard` has
    hooks that show instead."""
    return getattr(parameter, "_fsdp_flattened", False)


def symmetric_memory() -> Any:
    """A module that allocates memory which GPUs of one host map (`empty`), and makes them map it (`rendezvous`). Raises
    NotImplementedError where PyTorch has none; context-parallel attention then goes through NCCL."""
    try:
        from torch._C._distributed_c10d import _SymmetricMemory as Handle
        from torch.distributed import _symmetric_memory as found
    except ImportError:
        raise NotImplementedError(f"PyTorch {torch.__version__} has no torch.distributed._symmetric_memory") from None
    needed = {"empty": found, "rendezvous": found, "buffer_ptrs": Handle, "get_buffer": Handle}
    gone = [name for name, home in needed.items() if not hasattr(home, name)]
    if gone:
        raise NotImplementedError(f"symmetric memory of PyTorch {torch.__version__} has no {', '.join(gone)}")
    return found


def fake_tensor_mode() -> Any:
    """A context whose tensors have no memory. Raises NotImplementedError where PyTorch has none."""
    try:
        from torch._subclasses.fake_tensor import FakeTensorMode
    except ImportError:
        raise NotImplementedError(
            f"PyTorch {torch.__version__} has no FakeTensorMode to ask about calls with"
        ) from None
    return FakeTensorMode()
