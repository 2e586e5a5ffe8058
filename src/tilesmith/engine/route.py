"""Route: the way of a backward through the vjp, written out for one set of needed gradients.

Which saved tensor, plain argument or incoming gradient each parameter of the vjp takes, and where each of its outputs
goes, follows from names alone. So it is generated once, as a function without loops or lookups: a small op's backward
spent more time on those than on its launches.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def make(gradient: Any, needs: tuple[bool, ...]) -> Callable[..., tuple]:
    """The function (run, pin, grads, saved, plain, like) -> gradients of all arguments, None where not needed.

    run(call, pin) computes the vjp. grads: of the op's public outputs. saved: the kept inputs, then the kept outputs.
    plain: the op's arguments, None for tensors. like: (dtype, number of elements) of the inputs that are not kept.
    """
    vjp = gradient.op.vjp
    kept = {i: f"saved[{n}]" for n, i in enumerate(gradient.kept_inputs)}
    made = {i: f"saved[{n + len(kept)}]" for n, i in enumerate(gradient.kept_outputs)}
    known = {i: f"like[{n}]" for n, i in enumerate(gradient.described)}
    twins = {target: [a for a, of in gradient.twins if of == target and needs[a]] for target in gradient.targets}
    mask = tuple(needs[target] or bool(twins[target]) for target in gradient.targets)

    def given(kind: str, i: int) -> str:
        if kind == "input":
            return kept.get(i, f"plain[{i}]")
        return {"mask": "mask", "grad": f"grads[{i}]"}[kind] if kind != "output" else made[i]

    def size(i: int) -> str:
        return f"{known[i]}[1]" if i in known else f"{kept[i]}.numel()"

    def dtype(i: int) -> str:
        return f"{known[i]}[0]" if i in known else f"{kept[i]}.dtype"

    result = ["None"] * len(needs)
    lines = [f"got = run(({', '.join(given(*step) for step in gradient.plan)},), pin)"]
    if len(vjp.outputs) == 1:
        lines.append("got = got if isinstance(got, (tuple, list)) else (got,)")
    for n, (target, wanted) in enumerate(zip(gradient.targets, mask)):
        if not wanted:
            continue
        grad = f"g{n}"
        lines.append(f"{grad} = got[{n}]")
        # an empty one stands for nothing: no gradient came in for the outputs that this input reaches
        lines.append(f"if {grad}.numel() == 0 and {size(target)} != 0: {grad} = None")
        if needs[target]:
            result[target] = grad
        for twin in twins[target]:
            result[twin] = f"{grad} if {grad} is None or {grad}.dtype == {dtype(twin)} else {grad}.to({dtype(twin)})"
    for target, i in gradient.passed:
        if needs[target]:
            result[target] = f"grads[{i}]"
    lines.append(f"return ({', '.join(result)},)")
    source = "def route(run, pin, grads, saved, plain, like):\n    " + "\n    ".join(lines)
    namespace: dict[str, Any] = {"mask": mask}
    exec(compile(source, f"<tilesmith route of {vjp.name}>", "exec"), namespace)
    return namespace["route"]
