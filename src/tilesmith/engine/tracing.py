"""Tracing: what torch.compile should not see of a call of an op.

What Dynamo traces it guards: a check that it followed through closures and modules was looked up again, name by name,
at each call of the compiled model, a microsecond for every few names. What a check reads is constant but for its
arguments, so it runs while tracing, on what is known of them, as Python runs it.
"""

from __future__ import annotations

from typing import Any

from tilesmith.engine.registry import DECLARED


def check(context: Any) -> None:
    """For `torch._dynamo.comptime`, within a function that has the locals `name` and `args`: the check of this op.

    Where it fails the graph breaks, and the call, which Python then makes, raises what the check raises."""
    op = DECLARED[context.get_local("name").as_python_constant()]
    args = context.get_local("args")._i_will_not_complain_if_bc_breaks_VariableTracker()
    try:
        op.check(*(_known(a) for a in args.items))
    except Exception as problem:
        context.graph_break(f"{type(problem).__name__}: {problem}")


def _known(variable: Any) -> Any:
    """What Dynamo knows of a variable: a constant, a list of them, or a fake tensor or number."""
    variable = variable.realize()
    if variable.is_python_constant():
        return variable.as_python_constant()
    if issubclass(variable.python_type(), list | tuple):
        return [_known(v) for v in variable.items]
    return variable.as_proxy().node.meta["example_value"]
