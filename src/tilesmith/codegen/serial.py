"""KernelIR to JSON and back."""

from __future__ import annotations

import json
from typing import Any

from tilesmith.codegen import nodes
from tilesmith.codegen.ir import Array, Buffer, Fragment, KernelIR, Scalar, Variable, a_kernel
from tilesmith.codegen.node import Node
from tilesmith.codegen.types import KernelError, Type, type_named
from tilesmith.codegen.verifier import verify

VERSION = 1
_DECLARED = (Array, Buffer, Fragment, Scalar, Variable)
_NODES = {
    cls.__name__: cls for cls in (*vars(nodes).values(), *_DECLARED) if isinstance(cls, type) and issubclass(cls, Node)
}
_BASES = {"Expr": nodes.Expr, "Stmt": nodes.Stmt, "Type": Type, "None": type(None)}
_CLASSES = {**_NODES, **_BASES, "str": str, "int": int, "float": float, "bool": bool}


def to_json(ir: KernelIR, indent: int | None = None) -> str:
    """`ir` as JSON text. A node is a list: its name, then its fields in declared order."""
    a_kernel(ir, "to_json")
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
        ir = _checked(KernelIR(**{name: _node(value) for name, value in document.items()}))
        verify(ir)
    except KernelError:
        raise
    except (ValueError, LookupError, TypeError, AttributeError) as problem:
        raise KernelError(f"not the JSON of a KernelIR: {problem}") from None
    except RecursionError:
        raise KernelError("not the JSON of a KernelIR: it is nested too deeply") from None
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
        return _checked(cls(*(_node(v) for v in value[1:])))
    return value


def _checked(node: Node) -> Node:
    """`node`, whose fields hold what they are declared to."""
    for name, field in node.__dataclass_fields__.items():
        value = getattr(node, name)
        if not any(_fits(value, declared) for declared in field.type.split(" | ")):
            raise KernelError(f"{name} of {type(node).__name__} is {field.type}, got {value!r:.60}")
    return node


def _fits(value: Any, declared: str) -> bool:
    if not declared.startswith("tuple["):
        cls = _CLASSES[declared]
        return isinstance(value, cls) and (cls is not int or type(value) is int)
    items = declared[len("tuple[") : -1].removesuffix(", ...").split(", ")
    return isinstance(value, tuple) and all(_fits(v, items[0]) for v in value)
