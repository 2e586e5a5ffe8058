"""How far one reads along a call of attention on Hopper, from its launcher to the launch of a kernel.

A stop is a file that is read on from where the last one left off; functions of one statement, and what the engine does
before the launcher, are none. The plan is one stop: a pure function, which `explain` prints. A return is a stop in a
file that was left before.
"""

from __future__ import annotations

import ast
import inspect
import sys
import textwrap
from pathlib import PurePath

import pytest
import torch

from tilesmith.engine import Case, launcher, ops
from tilesmith.engine.replay import Ready
from tilesmith.hardware.detect import arch_named, assuming
from tilesmith.ops.attn.cases.attention import attend
from tilesmith.validate.cases import outputs_and_gradients
from tilesmith.validate.offline import Tap

PLAN = tuple(f"ops/attn/{name}" for name in ("plan/hopper", "plan/joined", "plan/smem", "plan/tables", "schedule"))


def _is_short(code) -> bool:
    """Whether a function is one statement of at most three lines, read where it is named."""
    try:
        function = ast.parse(textwrap.dedent(inspect.getsource(code))).body[0]
    except (OSError, SyntaxError):
        return True
    if not isinstance(function, ast.FunctionDef):
        return True
    body = [x for x in function.body if not (isinstance(x, ast.Expr) and isinstance(x.value, ast.Constant))]
    return len(body) == 1 and body[0].end_lineno - body[0].lineno < 3


def _stops(entered: list[tuple[str, str]]) -> list[str]:
    found: list[str] = []
    for file, _ in dict.fromkeys(entered):
        place = "plan" if file.startswith(PLAN) else file
        if not found or found[-1] != place:
            found.append(place)
    return found


@pytest.fixture
def paths(monkeypatch):
    """op -> the functions entered from its launcher to the launch, in order."""
    pytest.importorskip("triton")
    monkeypatch.setitem(launcher._instead, launcher.ANY_THREAD, lambda *given: None)
    op, found = ops()["attention"], {}
    case = Case("one", attend(1, 2, 2, 600, 600, 128, causal=True), frozenset(), (torch.bfloat16,))
    args = op.bind((), case.build(torch.device("cpu"), torch.bfloat16, case.generator()))
    taps = [Tap(each, "hopper", arch_named("sm90")) for each in (op, op.vjp)]

    def traced(tap):
        def run(*given):
            entered = []

            def enter(frame, event, _):
                code = frame.f_code
                if event == "call" and "tilesmith" in code.co_filename and not _is_short(code):
                    path = PurePath(code.co_filename).as_posix().rpartition("/tilesmith/")[2]
                    entered.append((path, code.co_name))

            sys.setprofile(enter)
            try:
                return tap.fn(*given)
            finally:
                sys.setprofile(None)
                begin = next(i for i, (_, name) in enumerate(entered) if name == tap.op.name)
                found[tap.op.name] = entered[begin:]

        return lambda given, pin: Ready(run)

    for tap in taps:
        tap.open()
        tap.op._ready = traced(tap)
    try:
        with assuming(arch_named("sm90")):
            outputs_and_gradients(op, args)
    finally:
        for tap in taps:
            tap.close()
    return found


@pytest.mark.parametrize("name", ["attention", "attention_vjp"])
def test_a_call_is_read_in_few_stops(paths, name):
    stops = _stops(paths[name])
    returns = [stop for place, stop in enumerate(stops) if stop in stops[:place]]
    assert "engine/launcher.py" in stops and "ops/attn/execute.py" in stops
    assert len(stops) <= 12 and len(returns) <= 3, (stops, returns)
