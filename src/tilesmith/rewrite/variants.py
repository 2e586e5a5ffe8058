"""Swap one module instance to a generated subclass of its own class, and back.

A swapped instance keeps everything it has: its parameters, buffers, children, hooks and attributes. Only its class is
another one, which is generated from the class it had and from a `Form`, so undo needs no record: the class knows where
it came from, also in a copy or after unpickling. docs/adr/0002-rewrite-mechanism.md compares the mechanisms.
"""

from __future__ import annotations

import copyreg
import functools
from typing import Any, ClassVar

import torch
from torch import nn

_BASE = "_tilesmith_base"
_FORM = "_tilesmith_form"


class Form:
    """What a swapped instance does differently. Subclasses are frozen dataclasses: hashable, picklable by import.

    bases: classes that the instance becomes one of besides, before the class it had.
    """

    bases: ClassVar[tuple[type, ...]] = ()

    def namespace(self, base: type) -> dict[str, Any]:
        """Attributes of the generated class, `forward` among them. They must not depend on any one instance.

        What `forward` keeps in its closure are functions, numbers, strings and tuples of them: a compiled model looks
        at any other object, a form itself among them, field by field at each call (ADR 1).
        """
        raise NotImplementedError

    def enter(self, module: nn.Module) -> None:
        """Run once after `module` was swapped, for state that a class cannot hold."""

    def leave(self, module: nn.Module) -> None:
        """Take back what `enter` did."""


def obstacle(module: nn.Module) -> str | None:
    """Why the class of `module` cannot be swapped, in words; None when it can."""
    if "forward" in module.__dict__:
        return "its forward was replaced on the instance by something else; call optimize() before that"
    if isinstance(module, torch.jit.ScriptModule):
        return "it is a TorchScript module"
    if getattr(module, "parametrizations", None) is not None:
        return "its parameters are parametrized"
    cls = original_class(type(module))
    if cls.__reduce_ex__ is not object.__reduce_ex__ or cls.__reduce__ is not object.__reduce__:
        return f"{cls.__name__} defines its own pickling"
    return None


@functools.cache
def variant(base: type, form: Form) -> type:
    """The subclass of `base` that behaves as `form` says; one class per pair.

    It bears the name and module of `base`, because frameworks look classes up by name: the layers that FSDP wraps, the
    architecture that a saved configuration names, the outputs that transformers records.
    """
    namespace = {
        "__doc__": base.__doc__,
        "__module__": base.__module__,
        "__qualname__": base.__qualname__,
        **form.namespace(base),
        "__reduce_ex__": _reduce_ex,
        _BASE: base,
        _FORM: form,
    }
    return type(base)(base.__name__, (*form.bases, base), namespace)


def swap(module: nn.Module, form: Form) -> None:
    """Make `module` an instance of the variant of its class; not at all when `form.enter` raises."""
    before = type(module)
    object.__setattr__(module, "__class__", variant(before, form))
    try:
        form.enter(module)
    except BaseException:
        object.__setattr__(module, "__class__", before)
        raise


def unswap(module: nn.Module) -> bool:
    """Take the newest swap of `module` back; False when there is none."""
    cls = type(module)
    if _BASE not in cls.__dict__:
        return False
    cls.__dict__[_FORM].leave(module)
    object.__setattr__(module, "__class__", cls.__dict__[_BASE])
    return True


def forms(module: nn.Module) -> list[Form]:
    """The forms that `module` has taken on, newest first; also below a class that another library put on top."""
    return [cls.__dict__[_FORM] for cls in type(module).__mro__ if _FORM in cls.__dict__]


def has_unreachable_forms(module: nn.Module) -> bool:
    """Whether `module` has forms that `unswap` does not reach, below a class that another library put on top."""
    return any(_FORM in cls.__dict__ for cls in original_class(type(module)).__mro__)


def original_class(cls: type) -> type:
    """The class that `cls` was generated from, or `cls` itself."""
    while _BASE in cls.__dict__:
        cls = cls.__dict__[_BASE]
    return cls


def given(name: str, place: int | None, args: tuple, kwargs: dict[str, Any], default: Any = None) -> Any:
    """The argument `name` of a call, which stands at `place` where it is passed by position, or `default`."""
    return args[place] if place is not None and len(args) > place else kwargs.get(name, default)


def _reduce_ex(self: nn.Module, protocol: int) -> Any:
    # A generated class has no importable name: pickle and deepcopy make it again from its base and its form.
    made = object.__reduce_ex__(self, max(protocol, 2))
    if made[0] is not copyreg.__newobj__:
        return made
    chain, cls = [], made[1][0]
    while _BASE in cls.__dict__:
        chain.append(cls.__dict__[_FORM])
        cls = cls.__dict__[_BASE]
    return (_remake, (cls, tuple(reversed(chain))), *made[2:])


def _remake(base: type, chain: tuple[Form, ...]) -> nn.Module:
    cls = base
    for form in chain:
        cls = variant(cls, form)
    return cls.__new__(cls)
