"""The kinds of an op's arguments, from its signature: a list is no tensor, True no number, "1" no int."""

from __future__ import annotations

import difflib
import functools
import inspect
import math
import numbers
import types
import typing
from collections import namedtuple
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from tilesmith.engine.written import written

_KINDS = {
    Tensor: ((Tensor,), "a tensor"),
    bool: ((bool, torch.SymBool), "True or False"),
    int: ((numbers.Integral, torch.SymInt), "an int"),
    float: ((numbers.Real, torch.SymFloat, torch.SymInt), "a number"),
    str: ((str,), "a string"),
}
_LISTS = {int: "a sequence of ints", bool: "a sequence of bools", float: "a sequence of numbers"}


def checked(
    name: str, signature: inspect.Signature, check: Callable[..., None] | None, differentiable: Collection[str] | None
) -> Callable[..., None]:
    """A check of an op's arguments: their kinds first, then `check`, which may rely on them.

    differentiable: the arguments that receive a gradient; None: all do.

    Raises TypeError, naming the argument, for one that is not of its annotation's kind and for a sparse or nested
    tensor, ValueError for a number that is infinite, for one that is NaN or beyond 64 bits, alone or in a sequence, and
    for a tensor that requires a gradient, where they are recorded, and would receive none.
    """
    kinds = [(n, *_kind(p.annotation)) for n, p in signature.parameters.items()]
    constant = [i for i, n in enumerate(signature.parameters) if differentiable is not None and n not in differentiable]

    def checks(*args: Any) -> None:
        for (n, classes, elements, optional, allowed), a in zip(kinds, args):
            if a is None and optional:
                continue
            if not _is(a, classes) or (elements and not all(_is(e, elements) for e in a)):
                instead = as_tensor(a) if Tensor in classes else ""
                raise TypeError(f"{name}: {n} must be {allowed}, got {shown(a)}{instead}")
            if isinstance(a, Tensor):
                dense(name, n, a)
            if isinstance(a, float) and not -math.inf < a < math.inf:
                raise ValueError(f"{name}: {n} is {a}; it must be finite")
            for e in a if elements else (a,):
                if isinstance(e, int) and not -(2**63) <= e < 2**63:
                    raise ValueError(f"{name}: {n} is {a}; it must fit in 64 bits")
                if isinstance(e, float) and e != e:
                    raise ValueError(f"{name}: {n} is {a}; it must not contain NaN")
        if check is not None:
            check(*args)
        for i in constant:
            if isinstance(args[i], Tensor) and args[i].requires_grad and torch.is_grad_enabled():
                n = kinds[i][0]
                raise ValueError(f"{name}: {n} requires a gradient but would receive none; pass {n}.detach()")

    return checks


def binder(name: str, signature: inspect.Signature) -> Callable[..., tuple]:
    """A function `name` of this signature that returns its arguments in order: Python binds them, in no Python code."""
    names = ", ".join(signature.parameters)
    given = ", ".join(n if p.default is p.empty else f"{n}=defaults[{n!r}]" for n, p in signature.parameters.items())
    defaults = {n: p.default for n, p in signature.parameters.items()}
    return written(f"{name}({given})", [f"return ({names},)"], f"arguments of {name}", {"defaults": defaults})


def together(reference: Callable[..., Any]) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Decorates a function of a call of an op with many arguments: it takes one named tuple of them, `call.causal`, and
    what else it has by keyword. What comes of it takes the arguments one by one, and has the reference's signature."""
    signature = inspect.signature(reference)
    kind = namedtuple(f"{reference.__name__}_arguments", signature.parameters)

    def decorate(fn: Callable[..., Any]) -> Callable[..., Any]:
        own = inspect.signature(fn)
        keywords = [p for p in own.parameters.values() if p.kind is p.KEYWORD_ONLY]

        @functools.wraps(fn)
        def run(*args: Any, **kwargs: Any) -> Any:
            return fn(kind(*args), **kwargs)

        del run.__wrapped__  # whoever unwraps it would find another signature
        run.__signature__ = own.replace(parameters=[*signature.parameters.values(), *keywords])
        return run

    return decorate


def as_tensor(value: Any) -> str:
    """What to do with numbers that are no tensor yet."""
    numbers_in = isinstance(value, list | bool | int | float) or type(value).__module__ == "numpy"
    return "; make it one with torch.as_tensor" if numbers_in else ""


def dense(name: str, parameter: str, x: Tensor) -> None:
    """Raise TypeError for a sparse or a nested tensor, of any layout."""
    if x.is_nested:
        raise TypeError(
            f"{name}: {parameter} is a nested tensor; it must be dense: {parameter}.to_padded_tensor(0.0), or its "
            "values() where rows are independent"
        )
    if x.layout != torch.strided:
        raise TypeError(f"{name}: {parameter} has layout {x.layout}; it must be dense: {parameter}.to_dense()")


def _is(value: Any, classes: tuple[type, ...]) -> bool:
    """isinstance, but a bool is no number."""
    return isinstance(value, classes) and (not isinstance(value, bool) or bool in classes or object in classes)


def _kind(annotation: Any) -> tuple[tuple[type, ...], tuple[type, ...], bool, str]:
    """Classes of an annotation and, where it is a sequence, of its elements; whether None is one of its values; its
    words. Any value is of a kind not known."""
    union = typing.get_origin(annotation) in (typing.Union, types.UnionType)
    members = [m for m in (typing.get_args(annotation) if union else (annotation,)) if m is not type(None)]
    optional = union and type(None) in typing.get_args(annotation)
    known, elements = _KINDS.get(members[0]) if len(members) == 1 else None, ()
    if known is None and len(members) == 1 and typing.get_args(members[0]):
        element = typing.get_args(members[0])[0]
        known = (list, tuple), _LISTS.get(element, "a sequence")
        elements = _KINDS[element][0] if element in _LISTS else ()
    classes, words = known or ((object,), "")
    return classes, elements, optional, words + (" or None" if optional else "")


_LISTED = 48  # names that an error lists


def alike(name: str, known: Collection[str]) -> str:
    """What to say after an unknown name of the known one that is spelled most alike, or nothing."""
    spelled = {word.lower(): word for word in known}
    close = difflib.get_close_matches(name.lower(), spelled, n=1)
    return f"Did you mean {spelled[close[0]]!r}?" if close else ""


def suggestion(name: str, known: Collection[str]) -> str:
    """What to say after an unknown name: the known one that is spelled most alike, or the known ones but gradients."""
    close = alike(name, known)
    if close:
        return close
    forward = sorted(name for name in known if not name.endswith("_vjp"))
    left_out = len(forward) - _LISTED
    more = f" and {left_out} more" if left_out > 0 else ""
    gradients = " (and their gradients, <op>_vjp)" if len(forward) < len(known) else ""
    return f"Known: {', '.join(forward[:_LISTED])}{more}{gradients}"


def no_argument(
    of: str, given: Mapping[str, Any], known: Collection[str], instead: Mapping[str, str] = types.MappingProxyType({})
) -> str:  # fmt: skip
    """What to say of keywords that a function does not have. known: its parameters. instead: name -> what to do."""
    told = []
    for name, value in given.items():
        do = f": {instead[name]}" if name in instead else f". {suggestion(name, known)}"
        told.append(f"{name} (got {shown(value)}){do}")
    return f"{of} has no argument {'; nor '.join(told)}"


def dtype_name(dtype: torch.dtype) -> str:
    """The name of a dtype in rows, tables and arguments of ops: "bfloat16" for torch.bfloat16."""
    return str(dtype).removeprefix("torch.")


def shown(value: Any) -> str:
    """What came, in an error: its type, and the value where it is short."""
    if value is None:
        return "None"
    if isinstance(value, Tensor):
        return "a nested tensor" if value.is_nested else f"a tensor of shape {tuple(value.shape)}"
    text = repr(value) if isinstance(value, bool | int | float | str | list | tuple | dict) else ""
    return f"{type(value).__name__} {text}" if 0 < len(text) <= 40 else type(value).__name__


def with_copies(args: tuple, written: Sequence[int]) -> tuple:
    """Arguments with copies of those at the places `written`; others that lie where one of them does are its copy."""
    copies = {_place(args[i]): args[i].clone() for i in written if args[i] is not None}
    return tuple(copies.get(_place(a), a) if isinstance(a, Tensor) else a for a in args)


def _place(x: Tensor) -> tuple:
    return x.data_ptr(), x.dtype, x.shape, x.stride()
