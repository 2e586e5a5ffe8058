"""What a compiled graph does at run time, and what guards it: calls past torch's dispatcher, checks without guards."""

import subprocess
import sys
import warnings
from types import SimpleNamespace

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import tilesmith
from tilesmith import ops
from tilesmith.engine import key, tracing
from tilesmith.engine import ops as declared

inductor = pytest.importorskip("torch._inductor.utils")


@pytest.fixture(autouse=True)
def fresh(monkeypatch):
    monkeypatch.setattr(tracing, "SMALL", 0)  # else it is no op that is traced
    torch._dynamo.reset()
    with torch._inductor.config.patch(force_disable_caches=True):
        yield


def _norm(x, weight):
    return ops.rms_norm(x, weight, eps=1e-5, offset=0.5)


def _inputs():
    torch.manual_seed(0)
    return torch.randn(4, 64, requires_grad=True), torch.randn(64, requires_grad=True)


def _grads(fn, x, weight):
    out = fn(x, weight)
    return out, *torch.autograd.grad(out, (x, weight), torch.ones_like(out))


def test_a_compiled_graph_calls_kernels_past_the_dispatcher(monkeypatch):
    x, weight = _inputs()
    want, compiled = _grads(_norm, x, weight), torch.compile(_norm, fullgraph=True)
    got, codes = inductor.run_and_get_code(_grads, compiled, x, weight)
    assert [sum(f"{name}.default.known[" in code for code in codes) for name in ("rms_norm", "rms_norm_vjp")] == [1, 1]
    torch.testing.assert_close(got, want)
    for name in ("rms_norm", "rms_norm_vjp"):  # what the dispatcher would call
        monkeypatch.setattr(declared()[name], "_ready", lambda *_: pytest.fail("not a repeat call"))
    seen = []
    monkeypatch.setattr(torch._ops.OpOverload, "__call__", lambda op, *a, **k: seen.append(op))
    got = _grads(compiled, x, weight)
    monkeypatch.undo()
    assert not [op for op in seen if "tilesmith" in str(op)]
    torch.testing.assert_close(got, want)


def test_a_known_call_is_found_by_its_alignment():
    compiled, memory, weight = torch.compile(_norm, fullgraph=True), torch.randn(260), torch.randn(64)
    op = declared()["rms_norm"]
    for start in (0, 1, 0, 4, 2, 1):  # in floats: what Dynamo guards is the same, what a kernel may do is not
        x = memory[start : start + 256].view(4, 64)
        torch.testing.assert_close(compiled(x, weight), _norm(x, weight))
        if start == 2:
            op._recent.clear()  # as where a kernel is registered
    named = [key for key in op._recent if ":" in (key if isinstance(key, str) else key[0])]
    assert len(named) == 1 and named[0][1:] == (4, 0)


def test_code_of_another_version_is_not_run(monkeypatch):
    x, weight = (t.detach() for t in _inputs())
    compiled = torch.compile(_norm, fullgraph=True)
    _, (code,) = inductor.run_and_get_code(compiled, x, weight)
    assert f"known['{tilesmith.__version__}|" in code
    assert f"tilesmith={tilesmith.__version__}" in torch.compiler.config.cache_key_tag.split()
    op = declared()["rms_norm"]
    monkeypatch.setattr(key, "__version__", "99.0")  # as where the code came from a disk
    op.handle.known.clear()
    with pytest.raises(RuntimeError, match="was written for tilesmith .*; this is 99.0: compile the model again"):
        compiled(x, weight)
    with pytest.raises(RuntimeError, match="compile the model again"):
        op.handle.direct["0.0.1"]


def test_sizes_that_may_change_make_no_known_call():
    x, weight = (t.detach() for t in _inputs())
    compiled = torch.compile(_norm, dynamic=True)
    got, (code,) = inductor.run_and_get_code(compiled, x, weight)
    assert "rms_norm.default.direct[" in code and "known" not in code
    for rows in (4, 7):
        x = torch.randn(rows, 64)
        torch.testing.assert_close(compiled(x, weight), _norm(x, weight))


def test_a_number_that_may_change_makes_no_known_call():
    q, angles = torch.randn(1, 4, 8, 16), torch.randn(32, 8)

    def rotated(offset):
        return ops.rope(q, None, angles, angles, offset=offset)

    compiled = torch.compile(rotated)
    offsets = (2, 3, 5)
    got, codes = inductor.run_and_get_code(lambda: [compiled(offset) for offset in offsets])
    assert ["rope.default.known[" in code for code in codes] == [True, False]
    torch.testing.assert_close(got, [rotated(offset) for offset in offsets])


def test_a_mode_sees_the_ops_of_a_compiled_graph():
    x, weight = (t.detach() for t in _inputs())
    compiled = torch.compile(_norm)
    want, seen = compiled(x, weight), []

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            seen.append(func)
            return func(*args, **(kwargs or {}))

    direct = declared()["rms_norm"].handle.direct[tilesmith.__version__]
    with Watch():
        got = direct(x, weight, 1e-5, 0.5, "fp32", "")[0]
    assert seen[0] is declared()["rms_norm"].handle
    torch.testing.assert_close(got, want)


CACHED = """
import sys, torch
from tilesmith import ops
from tilesmith.engine import key, tracing
from torch._dynamo.utils import counters
tracing.SMALL = 0
compiled = torch.compile(lambda x: ops.rms_norm(x))
print(float(compiled(torch.ones(2, 8)).sum()), counters["inductor"]["fxgraph_cache_hit"])
"""


def test_code_from_a_cache_finds_the_ops(tmp_path, monkeypatch):
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    run = [sys.executable, "-c", CACHED]
    told = [subprocess.run(run, capture_output=True, text=True, check=True).stdout.split()[-2:] for _ in range(2)]
    assert told[0][0] == told[1][0] and [hits for _, hits in told] == ["0", "1"]


@pytest.mark.parametrize(("weight", "kind"), [(torch.ones(63), ValueError), (3, TypeError)])
def test_a_check_that_fails_while_tracing_raises_as_in_eager_calls(weight, kind):
    x = torch.randn(4, 64)
    with pytest.raises(kind) as eager:
        _norm(x, weight)
    with pytest.raises(kind) as compiled:
        torch.compile(_norm, backend="aot_eager")(x, weight)
    assert str(compiled.value) == str(eager.value)


def test_a_number_of_numpy_is_a_number():
    numpy = pytest.importorskip("numpy")
    x, eps = torch.randn(4, 64), numpy.float32(0.5)
    compiled = torch.compile(lambda x: ops.rms_norm(x, eps=eps) + 1, backend="aot_eager")
    torch.testing.assert_close(compiled(x), ops.rms_norm(x, eps=0.5) + 1)


def test_behind_a_broken_graph_the_engine_is_not_traced():
    """The call that broke it is left to Python, and what is around it is compiled."""
    numpy = pytest.importorskip("numpy")
    (x, weight), eps, graphs = _inputs(), numpy.float32(0.5), []

    def broken(x, weight):
        return ops.rms_norm(x * 2, weight, eps=eps) + 1

    def seen(graph, inputs):
        graphs.append([str(node.target) for node in graph.graph.nodes if node.op == "call_function"])
        return graph.forward

    torch._dynamo.utils.warn_once_cache.clear()
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        found = torch.compile(broken, backend=seen)(x, weight)
    assert not [each for each in told if "lru_cache" in str(each.message)]
    assert graphs == [["<built-in function mul>"], ["<built-in function add>"]]
    torch.testing.assert_close(found, broken(x, weight))
    with pytest.raises(torch._dynamo.exc.Unsupported, match="rms_norm: Dynamo takes NumPy's numbers for tensors"):
        torch._dynamo.reset()
        torch.compile(broken, backend=seen, fullgraph=True)(x, weight)


def test_an_op_is_compiled_itself():
    x, weight = _inputs()
    compiled = torch.compile(ops.rms_norm, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(x, weight), ops.rms_norm(x, weight))


def test_names_of_the_library_are_not_guarded_and_a_callers_are(monkeypatch):
    x, weight = _inputs()
    compiled = torch.compile(_norm, backend="eager", fullgraph=True)
    compiled(x, weight)
    (entry,) = torch._dynamo.eval_frame._debug_get_cache_entry_list(_norm.__code__)
    guards = str(entry.guard_manager)
    assert "source=G['ops']," in guards and "G['ops'].rms_norm" not in guards and "__import_tilesmith" not in guards
    monkeypatch.setitem(_norm.__globals__, "ops", SimpleNamespace(rms_norm=lambda x, *_, **__: x + 1))
    torch.testing.assert_close(compiled(x, weight), x + 1)


def test_a_check_holds_for_sizes_that_are_not_known():
    compiled = torch.compile(_norm, backend="aot_eager", fullgraph=True, dynamic=True)
    for rows, cols in ((3, 64), (5, 96)):
        x, weight = torch.randn(rows, cols), torch.randn(cols)
        torch.testing.assert_close(compiled(x, weight), _norm(x, weight))


def test_what_autocast_makes_one_dtype_is_checked_as_such():
    def attend(q, k, v):
        return ops.attention(q, k, v)[0]

    q, k, v = (torch.randn(1, 2, 16, 16, dtype=d) for d in (torch.float32, torch.float32, torch.bfloat16))
    with torch.autocast("cpu", torch.bfloat16):
        found = torch.compile(attend, backend="aot_eager", fullgraph=True)(q, k, v)
        torch.testing.assert_close(found, attend(q, k, v))
    with pytest.raises(TypeError, match="v has dtype torch.bfloat16 and q torch.float32"):
        torch.compile(attend, backend="aot_eager")(q, k, v)
