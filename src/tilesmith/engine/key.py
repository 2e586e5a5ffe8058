"""Key: all that a check or a kernel's launcher may look at, gathered by a function written out for one op.

The key of a call is made at every call. Which of the parameters are tensors follows from the signature, so the function
is generated once and asks no argument what it is.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from tilesmith.engine.written import written

FACTS = ("dtype", "device", "shape", "stride()", "data_ptr() & 15")
PLAIN = (Tensor, Parameter)


def make_key(name: str, types: list[str]) -> Callable[..., tuple | None]:
    """The function (inside, pin, *arguments) -> pin, facts of the tensors and plain arguments, which are its key; None
    where torch's dispatcher has to see the call: modes, functorch, tensor subclasses; `inside`: it has.

    types: of the arguments, as torch's schema writes them.
    """
    lines = ["if not inside and (modes() or functorch() is not None): return None"]
    more, fields = _facts(types)
    parameters = ", ".join(["inside", "pin", *_names(types)])
    return written(f"key({parameters})", [*lines, *more, f"return ({fields},)"], f"key of {name}", dict(_GLOBALS))


def make_direct(op: Any, types: list[str]) -> Callable[..., Any]:
    """The function (*arguments, pin) -> all outputs of a call on plain tensors that its dispatcher saw being traced:
    the call's key, and the run of the kernel that is kept under it, in one function. A mode still sees the op."""
    more, fields = _facts(types, plain=True)
    names = ", ".join(_names(types))
    lines = [
        f"if modes(): return handle({names}, pin=pin)",
        *more,
        f"key = ({fields},)",
        "ready = recent.get(key)",
        f"if ready is None: ready = remember(key, ({names},), pin)",
        f"return ready.run({names})",
    ]
    known = {**_GLOBALS, "recent": op._recent, "remember": op._remember, "handle": op.handle}
    return written(f"direct({names}, pin)", lines, f"direct call of {op.name}", known)


def _names(types: list[str]) -> list[str]:
    return [f"a{i}" for i in range(len(types))]


def _facts(types: list[str], plain: bool = False) -> tuple[list[str], str]:
    """Lines that gather what makes a call's key, and the fields of it. plain: all tensors are known to be so."""
    lines, fields = ["grad = is_grad_enabled()"], ["pin"]
    for i, kind in enumerate(types):
        a = f"a{i}"
        if "Tensor" in kind:
            facts = ", ".join([*(f"{a}.{fact}" for fact in FACTS), f"grad and {a}.requires_grad"])
            stranger = f"type({a}) not in PLAIN and not (inside and isinstance({a}, Tensor))"
            optional = kind.startswith("Optional")
            if optional:
                lines.append(f"if {a} is None: f{i} = None")
            if not plain:
                lines.append(f"{'elif' if optional else 'if'} {stranger}: return None")
            if optional:
                lines.append(f"else: f{i} = {facts}")
            fields.append(f"f{i}" if optional else facts)
        else:
            fields.append(f"tuple({a}) if type({a}) is list else {a}" if "List" in kind else a)
    return lines, ", ".join(fields)


_GLOBALS = {
    "modes": torch._C._len_torch_dispatch_stack,
    "functorch": torch._C._functorch.peek_interpreter_stack,
    "is_grad_enabled": torch.is_grad_enabled,
    "PLAIN": PLAIN,
    "Tensor": Tensor,
}
