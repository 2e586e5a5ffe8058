"""Inductor: in code that it generates, an op is called as a Python function, past torch's dispatcher.

A graph that Inductor compiles has been through autograd, functorch, autocast and fakes; what its calls of an op meet at
run time are plain tensors. torch's dispatcher would still run the Python kernel of the Autograd key, which hands the
call to the dispatcher again, and turn all arguments into its own values and back twice.
"""

from __future__ import annotations

import ast
import hashlib
import sys
from typing import Any

import torch

from tilesmith import __version__


def register_with_inductor(op: Any) -> None:
    """Have Inductor call `op.handle.direct[version]` in place of `op.handle`; nothing where Inductor is not imported
    (it costs a second and a half; a graph on its way to it is traced again once it is there), or has no place for it.
    """
    if _WRAPPER not in sys.modules or op.name in _taught:
        return
    _taught.add(op.name)
    _tag()
    try:
        from torch._inductor.codegen.custom_extern_kernel_codegen import CUSTOM_EXTERN_KERNEL_CODEGEN, CustomCodegen
        from torch._inductor.codegen.wrapper import ExternKernelAllocLine
        from torch._inductor.virtualized import V
    except ImportError:  # a PyTorch before 2.11
        return

    def write(node: Any, writeline: Any) -> None:
        if V.graph.cpp_wrapper or V.graph.fx_wrapper:
            writeline(ExternKernelAllocLine(V.graph.wrapper_code, node))
            return
        given = node.codegen_args()
        named = dict(a.split("=", 1) for a in node.codegen_kwargs())
        given += [named.get(n) or repr(op.defaults[n]) for n in op.parameters[len(given) :]]
        given.append(named.get("pin", "''"))
        call = f"{target}.{_way(node, given)}"
        writeline(f"{node.get_name()} = {call}({', '.join(given)})")

    target = f"torch.ops.tilesmith.{op.dispatched_as}.default"
    CUSTOM_EXTERN_KERNEL_CODEGEN[target] = CustomCodegen(python=write)


def _tag() -> None:
    """Have what torch.compile keeps on disk be found by this version of the library alone: the code that it generated
    calls an op by the parameters that the op had."""
    config = getattr(torch.compiler, "config", None)
    if not hasattr(config, "cache_key_tag"):  # then `known` and `direct` refuse the code of another version
        return
    tag = f"tilesmith={__version__}"
    if tag not in config.cache_key_tag.split():
        config.cache_key_tag = f"{config.cache_key_tag} {tag}".lstrip()


def _way(node: Any, given: list[str]) -> str:
    """`known[name]` where the graph knows all but the tensors' memory, as it mostly does: sizes, strides and what other
    arguments are made of are numbers; else `direct`, which asks.

    name: the library's version, which arguments are tensors, and a digest of all that the graph knows of the call.
    """
    values, _ = node.unflatten_args(node.inputs, node.constant_args)
    tensors = {i: v for i, v in enumerate(values) if hasattr(v, "get_stride")}
    facts = {i: (v.get_dtype(), v.get_device(), *v.get_size(), "by", *v.get_stride()) for i, v in tensors.items()}
    plain = [a for i, a in enumerate(given) if i not in tensors]
    version = __version__
    sizes = [str(n) for fact in facts.values() for n in fact[2:]]
    if not all(n == "by" or n.isdecimal() for n in sizes) or not all(map(_constant, plain)):
        return f"direct['{version}']"
    digest = hashlib.sha256(repr((facts, plain)).encode()).hexdigest()[:16]
    return f"known['{version}|{','.join(map(str, tensors))}:{digest}']"


def _constant(argument: str) -> bool:
    """Whether an argument, as code, names no variable: a number that may change is one."""
    names = {node.id for node in ast.walk(ast.parse(argument, mode="eval")) if isinstance(node, ast.Name)}
    return names <= {"torch", "device"}


_WRAPPER = "torch._inductor.codegen.wrapper"
_taught: set[str] = set()
