"""Key: all that a check or a kernel's launcher may look at, gathered by a function written out for one op.

The key of a call is made at every call. Which of the parameters are tensors follows from the signature, so the function
is generated once and asks no argument what it is.
"""

from __future__ import annotations

from collections.abc import Callable

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
    lines = ["if not inside and (modes() or functorch() is not None): return None", "grad = is_grad_enabled()"]
    fields = ["pin"]
    for i, kind in enumerate(types):
        a = f"a{i}"
        if "Tensor" in kind:
            facts = ", ".join([*(f"{a}.{fact}" for fact in FACTS), f"grad and {a}.requires_grad"])
            stranger = f"type({a}) not in PLAIN and not (inside and isinstance({a}, Tensor))"
            if kind.startswith("Optional"):
                lines += [f"if {a} is None: f{i} = None", f"elif {stranger}: return None", f"else: f{i} = {facts}"]
                fields.append(f"f{i}")
            else:
                lines.append(f"if {stranger}: return None")
                fields.append(facts)
        else:
            fields.append(f"tuple({a}) if type({a}) is list else {a}" if "List" in kind else a)
    lines.append(f"return ({', '.join(fields)},)")
    arguments = ", ".join(["inside", "pin", *(f"a{i}" for i in range(len(types)))])
    names = {
        "modes": torch._C._len_torch_dispatch_stack,
        "functorch": torch._C._functorch.peek_interpreter_stack,
        "is_grad_enabled": torch.is_grad_enabled,
        "PLAIN": PLAIN,
        "Tensor": Tensor,
    }
    return written(f"key({arguments})", lines, f"key of {name}", names)
