"""register_kernel: one more way to do a known op, or a new op."""

from __future__ import annotations

import functools
import inspect
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeVar

from tilesmith.engine.arguments import shown, suggestion
from tilesmith.engine.backends import REFERENCE
from tilesmith.engine.families import ops
from tilesmith.engine.kernel import Kernel, accept, as_output, lines_of, silent
from tilesmith.engine.op import Op
from tilesmith.engine.registry import PLAIN
from tilesmith.engine.rehearsal import rehearsed

Function = TypeVar("Function", bound=Callable[..., Any])


def register_kernel(
    name: str,
    *,
    backend: str | None = None,
    rank: int = 50,
    rejects: Callable[[Any], Sequence[str]] = accept,
    errors: Mapping[str, float] | None = None,
    tells: Callable[..., Sequence[str]] = silent,
    eps: Callable[[Any], Mapping[str, float]] = as_output,
    plans: Callable[..., Any] | None = None,
) -> Callable[[Function], Function]:
    """Register the decorated function as a kernel of the op `name`; returns the function unchanged.

    With the name of an existing op this adds a kernel to it: its parameters and results must have the types of the op's
    reference, else TypeError names both. An unknown name declares a new op with the function as its reference
    (gradients by autograd through it); arguments that describe a kernel (backend, rejects, errors, tells, eps, plans)
    then raise ValueError. A function that torch cannot type, or that takes no tensor, is kept as a plain callable,
    found by name and shown by `explain`, without dispatch; a UserWarning says so if its parameters or its result lack
    annotations.

    backend: a name for this implementation; "custom" if None. rank: the kernel of the highest rank is tried first;
    unique per op.
    rejects: call metadata -> list of sentences; an empty list accepts. errors: output -> the error, beyond rounding,
    that the method of this kernel may have; tests and `tilesmith verify` allow that much more. tells: the op's
    arguments, fake tensors too -> sentences on how this kernel serves them, for `explain`; it receives the call's
    configuration as the keyword `config`, if its signature has one. eps: call metadata -> output -> the eps of the
    format in which the hardware keeps its sums, where that is coarser than the output's dtype: tests and `tilesmith
    verify` allow rounding of that size in place of the dtype's. plans: in place of tells, the same arguments -> the
    plan of the call. Its `lines()` are the sentences, and the `kernel` of each of its `steps` is the name of a device
    kernel (`engine.trial`). `plans=rehearsed`, of `tilesmith.engine`, makes plans of what the function itself launches,
    by a run on tensors without memory. tells may then be given as well, and `optimize_kernel` must be below it.
    """
    if not isinstance(name, str) or not name.isidentifier():
        raise ValueError(f"a kernel's name must be an identifier, got {name!r}")
    if backend is not None and not isinstance(backend, str):
        raise TypeError(f"register_kernel: backend must be a string or None, got {shown(backend)}")
    if backend == REFERENCE:
        raise ValueError(
            f"register_kernel: backend is {REFERENCE!r}, the name of the function that defines {name}, against which "
            "kernels are checked; give the kernel a name of its own"
        )
    if isinstance(rank, bool) or not isinstance(rank, int):
        raise TypeError(f"register_kernel: rank must be an int, got {shown(rank)}")
    if not callable(rejects):
        raise TypeError(f"register_kernel: rejects must be callable, got {shown(rejects)}")
    if not callable(tells):
        raise TypeError(f"register_kernel: tells must be callable, got {shown(tells)}")
    if not callable(eps):
        raise TypeError(f"register_kernel: eps must be callable, got {shown(eps)}")
    if errors is not None and not isinstance(errors, Mapping):
        raise TypeError(f"register_kernel: errors must be a mapping or None, got {shown(errors)}")

    if plans is not None and not callable(plans):
        raise TypeError(f"register_kernel: plans must be callable or None, got {shown(plans)}")
    if plans is not None and plans is not rehearsed and tells is not silent:
        raise TypeError("register_kernel: give tells or plans, not both; the lines of a plan are what it tells")

    given = {"backend": backend, "rejects": rejects is not accept, "errors": errors, "tells": tells is not silent}
    given |= {"eps": eps is not as_output, "plans": plans}
    of_kernels = [argument for argument, value in given.items() if value]

    def add(fn: Function) -> Function:
        op = ops().get(name)
        if op is not None:
            planned = rehearsed(fn, tells) if plans is rehearsed else plans
            told = tells if planned is None else lines_of(planned)
            asked = _sentences(name, backend or "custom", rejects)
            kernel = Kernel(name, backend or "custom", fn, rank, asked, errors or {}, told, eps, planned)
            fn.tilesmith_kernel = op.add_kernel(kernel)
        elif of_kernels:
            raise ValueError(
                f"register_kernel: there is no op {name!r} for a kernel with its own {', '.join(of_kernels)}. "
                f"Declare it first, with register_kernel({name!r}) on its reference. {suggestion(name, ops())}"
            )
        else:
            try:
                Op(fn, name=name)
            except (TypeError, ValueError) as problem:
                PLAIN[name] = (fn, str(problem))
                _warn_of_annotations(name, fn)
        return fn

    return add


def _sentences(name: str, backend: str, rejects: Callable[[Any], Sequence[str]]) -> Callable[[Any], Sequence[str]]:
    """`rejects`, whose answer is a list of sentences or a TypeError: a bare string would be one sentence a letter."""

    @functools.wraps(rejects)
    def asked(call: Any) -> Sequence[str]:
        found = rejects(call)
        if isinstance(found, str) or not isinstance(found, Iterable):
            raise TypeError(
                f"register_kernel: rejects of {name}'s kernel {backend!r} must return a list of sentences, got "
                f"{shown(found)}; [] accepts a call"
            )
        return found

    return rejects if rejects is accept else asked


def _warn_of_annotations(name: str, fn: Callable[..., Any]) -> None:
    """Warn where a function became a plain callable though it has parameters, and annotations are missing."""
    signature = inspect.signature(fn)
    wanted = [f"{p.name}: torch.Tensor" for p in signature.parameters.values() if p.annotation is p.empty]
    if not signature.parameters or not (wanted or signature.return_annotation is signature.empty):
        return
    if signature.return_annotation is signature.empty:
        wanted.append("the result")
    last = wanted.pop()
    warnings.warn(
        f"{name} has no annotations, so it is registered as a plain callable: torch.ops.tilesmith.{name} does not "
        f"exist; annotate {', '.join(wanted)}{' and ' if wanted else ''}{last}",
        stacklevel=3,
    )
