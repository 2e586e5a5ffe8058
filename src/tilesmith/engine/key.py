"""Key: what identifies a call, all that its check or its kernel's launcher may look at, by a generated function.

The key of a call is made at every call. Which of the parameters are tensors follows from the signature, so the function
is generated once and asks no argument what it is.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from tilesmith import __version__
from tilesmith.engine import torch_private
from tilesmith.engine.written import written

FACTS = ("dtype", "device", "shape", "stride()", "data_ptr() & 15")
PLAIN = (Tensor, Parameter)
Pairs = Sequence[tuple[int, int]]


def make_key(name: str, types: list[str], together: Pairs = (), apart: Pairs = ()) -> Callable[..., tuple | None]:
    """The function (inside, pin, *arguments) -> pin, facts of the tensors and plain arguments, which are its key; None
    where torch's dispatcher has to see the call: modes, functorch, tensor subclasses; `inside`: it has.

    types: of the arguments, as torch's schema writes them. together: places of two tensors of which the key has whether
    they begin at one address; apart: of which it has how far they are from one another in one storage.
    """
    lines = ["if not inside and (modes() or functorch() is not None): return None"]
    more, fields = _facts(types, _pairs(together, apart))
    parameters = ", ".join(["inside", "pin", *_names(types)])
    return written(f"key({parameters})", [*lines, *more, f"return ({fields},)"], f"key of {name}", dict(_GLOBALS))


def make_direct(op: Any, types: list[str]) -> Callable[..., Any]:
    """The function (*arguments, pin) -> all outputs of a call on plain tensors that its dispatcher saw being traced:
    the call's key, and the run of the kernel that is kept under it, in one function. A mode still sees the op."""
    more, fields = _facts(types, _pairs(op.together, op.apart), plain=True)
    return _from_compiled(op, "direct", types, [*more, f"key = ({fields},)"], op._remember, _GLOBALS)


class Direct(dict):
    """Version of the library -> the function (*arguments, pin) -> all outputs, made at the first call: code that
    Inductor generated, which outlives the library's version on disk, looks up what it was written for."""

    def __init__(self, op: Any):
        super().__init__()
        self.op = op

    def __missing__(self, version: str) -> Callable[..., Any]:
        _same_version(version, self.op)
        made = self[version] = make_direct(self.op, self.op.kinds())
        return made


def _same_version(version: str, op: Any) -> None:
    if version != __version__:
        raise RuntimeError(
            f"this compiled code of {op.name} was written for tilesmith {version}; this is {__version__}: "
            "compile the model again, in a new process with TORCHINDUCTOR_FORCE_DISABLE_CACHES=1"
        )


class Known(dict):
    """Name of a call -> the function (*arguments, pin) -> all outputs of it: of a call in code that Inductor generated,
    all of which is known there but how its tensors are aligned and lie to one another, so that the name and that are
    its key.

    name: the library's version and |, the places of its tensors, joined by commas, a colon, and what tells it from
    other calls. Raises RuntimeError for another version.
    """

    def __init__(self, op: Any):
        super().__init__()
        self.op = op

    def __missing__(self, name: str) -> Callable[..., Any]:
        op = self.op
        version, _, places = name.partition(":")[0].rpartition("|")
        _same_version(version, op)

        def learn(key: Any, args: tuple, pin: str) -> Any:
            whole = op._key(True, pin, *args)
            ready = op._recent.get(whole) or op._remember(whole, args, pin)
            op._recent[key] = ready
            return ready

        pointers = [f"a{i}.data_ptr()" for i in places.split(",")]
        each = ", ".join(f"{pointer} & 15" for pointer in pointers)
        one = _pairs(op.together, op.apart)
        usual = " or ".join([f"({' | '.join(pointers)}) & 15", *one])
        lines = [f"key = (name, {', '.join([each, *one])}) if {usual} else name"]
        made = self[name] = _from_compiled(op, "known", op.kinds(), lines, learn, {**_GLOBALS, "name": name})
        return made


def _from_compiled(
    op: Any, title: str, types: list[str], key: list[str], learn: Callable[..., Any], known: dict[str, Any]
) -> Callable[..., Any]:
    """The function (*arguments, pin) that compiled code calls. key: lines that make the call's key of them. learn: the
    function (key, arguments, pin) -> what is kept under a key that nothing is kept under yet."""
    names = ", ".join(_names(types))
    lines = [
        f"if modes(): return handle({names}, pin=pin)",
        *key,
        "ready = recent.get(key)",
        f"if ready is None: ready = learn(key, ({names},), pin)",
        f"return ready.run({names})",
    ]
    known = {**known, "recent": op._recent, "learn": learn, "handle": op.handle}
    return written(f"{title}({names}, pin)", lines, f"{title} call of {op.name}", known)


def _names(types: list[str]) -> list[str]:
    return [f"a{i}" for i in range(len(types))]


def _facts(types: list[str], pairs: list[str], plain: bool = False) -> tuple[list[str], str]:
    """Lines that gather what makes a call's key, and the fields of it. pairs: what is a fact of two tensors. plain: all
    tensors are known to be so."""
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
        elif "List" in kind:
            fields.append(f"tuple({a}) if type({a}) is list else {a}, None if {a} is None else tuple(map(type, {a}))")
        else:  # True, 1 and 1.0 are equal, and a check tells them apart
            fields.append(a if "str" in kind else f"{a}, {a}.__class__")
    return lines, ", ".join([*fields, *pairs])


def _pairs(together: Pairs, apart: Pairs) -> list[str]:
    """Facts of two tensors: whether they begin at one address, and (their distance,) or False."""
    address = "a{}.untyped_storage().data_ptr() == a{}.untyped_storage().data_ptr()"
    return [
        *(f"a{i}.data_ptr() == a{j}.data_ptr()" for i, j in together),
        *(f"{address.format(i, j)} and (a{j}.data_ptr() - a{i}.data_ptr(),)" for i, j in apart),
    ]


_GLOBALS = {
    "modes": torch_private.dispatch_modes,
    "functorch": torch_private.functorch,
    "is_grad_enabled": torch.is_grad_enabled,
    "PLAIN": PLAIN,
    "Tensor": Tensor,
}
