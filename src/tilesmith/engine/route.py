"""Route: how saved tensors reach the vjp and its outputs the inputs' gradients, by functions that are generated.

Which inputs and outputs are saved, which of them, plain argument or incoming gradient each parameter of the vjp takes,
and where each of its outputs goes, follows from names alone. So it is generated once, as functions without loops or
lookups: a small op's backward spent more time on those than on its launches.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tilesmith.engine import torch_private
from tilesmith.engine.written import written


def save_function(gradient: Any, present: tuple[int, ...], unread: tuple[str, ...]) -> Callable[..., None]:
    """The function (ctx, args, output) that saves what the vjp reads.

    present: kept inputs that are tensors, not None. unread: names of kept outputs that the vjp takes but will not read.
    """
    op, lines = gradient.op, []
    lines.append("outs = output if isinstance(output, tuple) else (output,)")
    kept = [f"args[{i}]" for i in present]
    for i in gradient.kept_outputs:
        empty = f"outs[{i}].new_empty((*outs[{i}].shape[:-1], 0))"
        kept.append(empty if op.outputs[i] in unread else f"outs[{i}]")
    lines.append(f"ctx.save_for_backward({', '.join(kept)})")
    if gradient.hidden:
        hidden = range(op.public, len(op.outputs))
        lines.append(f"ctx.mark_non_differentiable({', '.join(f'outs[{i}]' for i in hidden)})")
    lines.append("ctx.set_materialize_grads(False)")  # a zero gradient is work, None is not
    if gradient.overwrites:  # a hook may hand out what its owner still looks at
        lines.append("ctx.unhooked = hooks(False) is None")
    names = {"hooks": torch_private.saved_tensors_hooks}
    return written("keep(ctx, args, output)", lines, f"{op.name} kept", names)


def make(
    gradient: Any, needs: tuple[bool, ...], present: tuple[int, ...], returned: tuple[int | None, ...]
) -> Callable[..., tuple]:
    """The function (run, pin, grads, saved, plain, like) -> gradients of the arguments `returned`, None where not
    needed and in the place of None.

    run(call, pin) computes the vjp. grads: of the op's public outputs. saved: the kept inputs that are `present`, then
    the kept outputs. plain: the op's arguments, None for tensors. like: (dtype, number of elements, of dims) of the
    inputs that are not kept.
    """
    vjp = gradient.op.vjp
    kept = {i: f"saved[{n}]" for n, i in enumerate(present)}
    made = {i: f"saved[{n + len(kept)}]" for n, i in enumerate(gradient.kept_outputs)}
    known = {i: f"like[{n}]" for n, i in enumerate(gradient.described)}
    twins = {target: [a for a, of in gradient.twins if of == target and needs[a]] for target in gradient.targets}
    mask = tuple(needs[target] or bool(twins[target]) for target in gradient.targets)

    def given(kind: str, i: int) -> str:
        if kind == "input":
            return kept.get(i, "None" if i in gradient.tensors else f"plain[{i}]")
        if kind == "default":
            return repr(vjp.defaults[vjp.parameters[i]])
        return {"mask": "mask", "overwrite": "False", "grad": f"grads[{i}]"}[kind] if kind != "output" else made[i]

    def size(i: int) -> str:
        return f"{known[i]}[1]" if i in known else f"{kept[i]}.numel()"

    def dims(i: int) -> str:
        return f"{known[i]}[2]" if i in known else f"{kept[i]}.ndim"

    def dtype(i: int) -> str:
        return f"{known[i]}[0]" if i in known else f"{kept[i]}.dtype"

    call = ", ".join(given(*step) for step in gradient.plan)
    nothing = " and ".join(f"grads[{i}] is None" for i in range(gradient.op.public)) if True in needs else "True"
    result = dict.fromkeys(range(len(needs)), "None")
    lines = [f"if {nothing}: return ({'None, ' * len(returned)})", f"got = run(({call},), pin)"]
    if len(vjp.outputs) == 1:
        lines.append("got = got if isinstance(got, (tuple, list)) else (got,)")
    for n, (target, wanted) in enumerate(zip(gradient.targets, mask)):
        if not wanted:
            continue
        grad = f"g{n}"
        lines.append(f"{grad} = got[{n}]")
        # [0] stands for nothing: no gradient came in for the outputs that this input reaches
        unlike = f"({size(target)} != 0 or {grad}.ndim != {dims(target)})"
        lines.append(f"if {grad}.numel() == 0 and {unlike}: {grad} = None")
        if needs[target]:
            result[target] = grad
        for twin in twins[target]:
            result[twin] = f"{grad} if {grad} is None or {grad}.dtype == {dtype(twin)} else {grad}.to({dtype(twin)})"
    for target, i in gradient.passed:
        if needs[target]:
            result[target] = f"grads[{i}]"
    lines.append(f"return ({', '.join('None' if i is None else result[i] for i in returned)},)")
    return written("route(run, pin, grads, saved, plain, like)", lines, f"route of {vjp.name}", {"mask": mask})
