"""KernelIR to JSON and back."""

from __future__ import annotations

import json
from typing import Any

from tilesmith.codegen import nodes
from tilesmith.codegen.ir import Array, Buffer, Fragment, KernelIR, Scalar, Variable
from tilesmith.codegen.node import Node
from tilesmith.codegen.types import KernelError, Type, type_named
from tilesmith.codegen.verify import verify

VERSION = 1
_DECLARED = (Array, Buffer, Fragment, Scalar, Variable)
_NODES = {
    cls.__name__: cls for cls in (*vars(nodes).values(), *_DECLARED) if isinstance(cls, type) and issubclass(cls, Node)
}


def to_json(ir: KernelIR, indent: int | None = None) -> str:
    """`ir` as JSON text. A node is a list: its name, then its fields in declared order."""
    return json.dumps(
        {"version": VERSION, **{name: _plain(getattr(ir, name)) for name in KernelIR._names}}, indent=indent
    )


def from_json(text: str) -> KernelIR:
    """The verified KernelIR of `to_json`'s text. Raises KernelError for anything else."""
    try:
        document = json.loads(text)
        version = document.pop("version")
        if version != VERSION:
            raise KernelError(f"KernelIR version {version!r}; this library reads {VERSION}")
        ir = KernelIR(**{name: _node(value) for name, value in document.items()})
    except KernelError:
        raise
    except (ValueError, KeyError, TypeError, AttributeError) as problem:
        raise KernelError(f"not the JSON of a KernelIR: {problem}") from None
    verify(ir)
    return ir


def _plain(value: Any) -> Any:
    if isinstance(value, Type):
        return {"type": value.name}
    if isinstance(value, tuple):
        return {"tuple": [_plain(v) for v in value]}
    if isinstance(value, Node):
        return [type(value).__name__, *(_plain(getattr(value, name)) for name in value._names)]
    return value


def _node(value: Any) -> Any:
    if isinstance(value, dict):
        if "type" in value:
            return type_named(value["type"])
        return tuple(_node(v) for v in value["tuple"])
    if isinstance(value, list):
        cls = _NODES[value[0]]
        return cls(*(_node(v) for v in value[1:]))
    return value
