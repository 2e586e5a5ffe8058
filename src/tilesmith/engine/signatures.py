"""Signatures: the part of an op's that users see, and the part of a launcher's that must be the same as the op's."""

from __future__ import annotations

import inspect
import typing
from collections.abc import Callable, Sequence
from types import FunctionType
from typing import Any


def of_users(signature: inspect.Signature, public: int, internal: Sequence[str]) -> inspect.Signature:
    """The signature of a call by a user: without internal parameters and with the public outputs alone."""
    returned = typing.get_args(signature.return_annotation)
    annotation = signature.return_annotation
    if returned and len(returned) > public:
        annotation = returned[0] if public == 1 else tuple[returned[:public]]
    kept = [p for name, p in signature.parameters.items() if name not in internal]
    return signature.replace(parameters=kept, return_annotation=annotation)


def doc_of_users(name: str, signature: inspect.Signature, reference: Callable[..., Any]) -> str:
    """How `help` shows an op: its call first, since `help` abbreviates what it knows of objects, then its meaning."""
    meaning = inspect.cleandoc(reference.__doc__ or "").partition("\n\nFor kernels:")[0]
    call = f"{name}{signature}".replace("torch.Tensor", "Tensor").replace("collections.abc.", "")
    return f"{call}\n\n{meaning}".rstrip()


def without_config(fn: Callable[..., Any]) -> Callable[..., Any]:
    """A function that shows a launcher's parameters but those of the launcher alone: `config` and `hidden`."""
    inner = inspect.unwrap(fn)
    signature = inspect.signature(inner)
    if "config" not in signature.parameters:
        return inner
    of_op = [p for n, p in signature.parameters.items() if n not in ("config", "hidden")]
    shown = FunctionType(_never.__code__, inner.__globals__)  # there the names in annotations mean what they should
    shown.__signature__ = signature.replace(parameters=of_op)
    return shown


def _never() -> None:
    raise NotImplementedError
