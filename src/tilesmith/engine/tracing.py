"""Tracing: which calls of ops torch.compile takes apart, and what of the others it does not see and does not guard.

What Dynamo traces it guards: a check that it followed through closures and modules was looked up again, name by name,
at each call of the compiled model, a microsecond for every few names. What a check reads is constant but for its
arguments, so it runs while tracing, on what is known of them, as Python runs it.
"""

from __future__ import annotations

import contextlib
import functools
import types
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor

from tilesmith.engine import torch_private
from tilesmith.engine.registry import DECLARED

_Fn = TypeVar("_Fn", bound=Callable[..., Any])
_PACKAGE = __name__.partition(".")[0]
SMALL = 4 * 2**20  # bytes of a tensor up to which the host, not the device, sets the pace of a compiled model


def always(*args: Any) -> bool:
    """Of any arguments."""
    return True


def small(*args: Any) -> bool:
    """Whether no tensor takes more than `SMALL` bytes, as far as a trace knows.

    There Inductor is left to fuse plain functions with their neighbours: an op is a call of its own, which costs the
    host more than its kernel saves the device (a train step of two small layers on an H200, when a call still gathered
    its key: 1.04 times as long as by torch.compile alone, with each op as a call 1.10 times; ADR 1).
    """
    known = torch.fx.experimental.symbolic_shapes.statically_known_true if torch.compiler.is_compiling() else bool
    return all(known(a.numel() * a.element_size() <= SMALL) for a in args if isinstance(a, Tensor))


def check(context: Any) -> None:
    """For `torch._dynamo.comptime`, within a function that has the locals `name` and `args`: the check of this op.

    Where it fails the graph breaks, and the call, which Python then makes, raises what the check raises."""
    with contextlib.suppress(AttributeError):  # of a PyTorch that keeps its guards elsewhere: they only cost time
        _unguard(context._i_will_not_complain_if_bc_breaks_InstructionTranslator().output)
    op = DECLARED[context.get_local("name").as_python_constant()]
    try:
        args = context.get_local("args")._i_will_not_complain_if_bc_breaks_VariableTracker()
        op.check(*(_known(a) for a in args.items))
    except Exception as problem:
        context.graph_break(f"{type(problem).__name__}: {problem}")


def kept(most: int) -> Callable[[_Fn], _Fn]:
    """`functools.lru_cache` of `most` results for a function that makes tensors on the device among its arguments.

    Results are kept for the current stream of a CUDA device: on another one they may not be there yet. Nothing is kept
    or taken where tensors are not what they are elsewhere: torch.compile traces the function itself, since a graph
    makes its tensors anew at each call; a mode or a transform may make fake or functional ones; and in the capture of a
    CUDA graph they have no values before it is replayed.
    """

    def keep(fn: _Fn) -> _Fn:
        @functools.lru_cache(maxsize=most)
        def known(stream: int | None, *args: Any) -> Any:
            return fn(*args)

        @functools.wraps(fn)
        def call(*args: Any) -> Any:
            if torch.compiler.is_compiling() or torch_private.dispatch_modes() or torch_private.functorch() is not None:
                return fn(*args)
            device = next((a for a in args if isinstance(a, torch.device) and a.type == "cuda"), None)
            if device is None:
                return known(None, *args)
            if not torch.cuda.is_initialized() or torch.cuda.is_current_stream_capturing():
                return fn(*args)
            index = torch_private.current_device() if device.index is None else device.index
            return known(torch_private.raw_stream(index), *args)

        vars(call)["cache_clear"] = known.cache_clear  # as that of `functools.lru_cache`
        return call

    return keep


def module_of(context: Any, name: str) -> Any:
    """For `torch._dynamo.comptime`, within a function that has the local `name`: the module that it is.

    Handing a module to a function that is assumed constant is not the same: PyTorch 2.11 refuses modules there.
    """
    variable = context.get_local(name)._i_will_not_complain_if_bc_breaks_VariableTracker().realize()
    key = getattr(variable, "module_key", None)  # where Dynamo does not inline modules
    if key is None:
        return variable.value
    return context._i_will_not_complain_if_bc_breaks_InstructionTranslator().output.get_submodule(key)


def _unguard(output: Any) -> None:
    """Have the frame that is being traced keep no guards of names that were looked up in this library's modules.

    They mean the same as long as the process lives, as the standard library's do, which Dynamo does not guard either.
    What a caller hands over, holds or sets is guarded as ever.
    """
    if not any(getattr(hook, "func", None) is _drop for hook in output.cleanup_hooks):
        output.add_cleanup_hook(functools.partial(_drop, output))  # runs when all of the frame is traced


def _drop(output: Any) -> None:
    with contextlib.suppress(AttributeError):  # as in `check`
        scope, guards = output.global_scope, output.guards
        here = scope.get("__name__", "").partition(".")[0] == _PACKAGE  # the frame itself is the library's
        guards.inner = type(guards.inner)(g for g in guards.inner if not _looked_up(g.originating_source, scope, here))


def _looked_up(source: Any, scope: dict[str, Any], here: bool) -> bool:
    """Whether a source is a name in a module of this library, or what is below one. `here`: so are the frame's own."""
    below = False
    while hasattr(source, "base"):
        source, below = source.base, True
    name = getattr(source, "global_name", "")
    if name.startswith("__import_") or below:  # a caller's own name for a module may come to mean another one
        module = scope.get(name)
        if isinstance(module, types.ModuleType) and module.__name__.partition(".")[0] == _PACKAGE:
            return True
    return here and name != "" and not name.startswith("__")


def _known(variable: Any) -> Any:
    """What Dynamo knows of a variable: a constant, a list of them, or a fake tensor or number."""
    variable = variable.realize()
    if variable.is_python_constant():
        return variable.as_python_constant()
    if issubclass(variable.python_type(), list | tuple):
        return [_known(v) for v in variable.items]
    return variable.as_proxy().node.meta["example_value"]
