"""Inductor: in code that it generates, an op is called as a Python function, past torch's dispatcher.

A graph that Inductor compiles has been through autograd, functorch, autocast and fakes; what its calls of an op meet at
run time are plain tensors. torch's dispatcher would still run the Python kernel of the Autograd key, which hands the
call to the dispatcher again, and turn all arguments into its own values and back twice.
"""

from __future__ import annotations

import sys
from typing import Any


def teach(op: Any) -> None:
    """Have Inductor call `op.handle.direct` where it would call `op.handle`; nothing where Inductor is not imported
    (it costs a second and a half; a graph on its way to it is traced again once it is there), or has no place for it.
    """
    if _WRAPPER not in sys.modules or op.name in _taught:
        return
    _taught.add(op.name)
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
        arguments = ", ".join([*given, named.get("pin", "''")])
        writeline(f"{node.get_name()} = torch.ops.tilesmith.{op.name}.default.direct({arguments})")

    CUSTOM_EXTERN_KERNEL_CODEGEN[f"torch.ops.tilesmith.{op.name}.default"] = CustomCodegen(python=write)


_WRAPPER = "torch._inductor.codegen.wrapper"
_taught: set[str] = set()
