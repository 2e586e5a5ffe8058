"""Private names of PyTorch: without any one of them the library imports and computes the same."""

import json
import os
import subprocess
import sys

import pytest
import torch

import tilesmith
import tilesmith._exports
from tilesmith.engine import torch_private

# One process imports torch; for each group of names a child of it, made by fork, imports the library without them. Then
# they come back, since PyTorch itself may use them, and the library, which looked for them once, must do without.
EACH = """
import contextlib, importlib, json, os, sys, traceback
import torch
from torch.utils._python_dispatch import TorchDispatchMode
import torch.testing
torch.func.grad(lambda x: torch.func.vmap(torch.sin)(x).sum())(torch.ones(2))  # what this imports costs a second

def remove(name):
    module, _, attribute = name.rpartition(".")
    home = torch
    for part in module.split(".")[1:]:
        home = getattr(home, part)
    if not hasattr(home, attribute):
        return lambda: None
    value = getattr(home, attribute)
    delattr(home, attribute)
    return lambda: setattr(home, attribute, value)

def use_it(names):
    back = [remove(name) for name in names]
    import tilesmith
    from tilesmith import explain, ops, use
    from tilesmith.engine import torch_private
    import tilesmith.engine.replay, tilesmith.engine.recording, tilesmith.engine.timing
    ops.rms_norm, ops.linear
    for each in back:
        each()
    cuda = () if torch.backends.cuda.is_built() else ("_cuda_", "_empty_strided_cuda", "cuda._sleep")
    expected = {name for name in names if not any(c in name for c in cuda)}
    assert torch_private.ABSENT.keys() == expected, torch_private.ABSENT
    torch.manual_seed(0)
    x, w = torch.randn(4, 16, requires_grad=True), torch.randn(16, requires_grad=True)

    def plain(x, w):
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6) * w

    def grads(f, create=False):
        y = f(x, w)
        return y, *torch.autograd.grad(y.square().sum(), (x, w), create_graph=create)

    def same(got, want):
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)

    for _ in range(3):
        same(grads(ops.rms_norm), grads(plain))
    same(torch.autograd.grad(grads(ops.rms_norm, True)[1].square().sum(), x),
         torch.autograd.grad(grads(plain, True)[1].square().sum(), x))
    with use(rms_norm="reference"):
        same(grads(ops.rms_norm), grads(plain))
        assert explain("rms_norm", x, w).because == "pinned"
    total = lambda f: lambda x: f(x, w).square().sum()
    same(torch.func.grad(total(ops.rms_norm))(x), torch.func.grad(total(plain))(x))
    same(torch.func.vmap(lambda x: ops.rms_norm(x, w))(x), plain(x, w))
    seen = []
    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            seen.append(str(func))
            return func(*args, **(kwargs or {}))
    with Watch(), torch.no_grad():
        ops.rms_norm(x, w)
    assert any("tilesmith" in s for s in seen), seen
    with torch.autocast("cpu", torch.bfloat16):
        assert ops.linear(x, torch.randn(8, 16)).dtype is torch.bfloat16
    same(ops.linear_act(x, w[None], None, "relu"), torch.relu(x @ w[None].t()))

told = []
for names in json.loads(sys.argv[1]):
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(read)
        try:
            use_it(names)
            words = ""
        except BaseException:
            words = traceback.format_exc()[-1500:]
        os.write(write, words.encode())
        os._exit(0)
    os.close(write)
    with os.fdopen(read) as end:
        told.append(end.read())
    os.waitpid(child, 0)
print(json.dumps(told))
"""


GROUPS = 5


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_each_name_may_be_gone():
    left_to_the_test = "torch.utils._python_dispatch.TorchDispatchMode"  # which watches by it; tested below
    names = [name for name in torch_private.NAMES if name != left_to_the_test]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    groups = [names[i::GROUPS] for i in range(GROUPS)]  # neighbours serve the same purpose, and are apart
    command = [sys.executable, "-c", EACH, json.dumps(groups)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    told = json.loads(done.stdout.splitlines()[-1])
    assert len(told) == GROUPS
    assert {str(names): words for names, words in zip(groups, told) if words} == {}


COMPILED = """
import torch
import torch._dynamo.comptime as comptime
del comptime.ComptimeContext._i_will_not_complain_if_bc_breaks_InstructionTranslator
del comptime.ComptimeVar._i_will_not_complain_if_bc_breaks_VariableTracker
from tilesmith import ops
from tilesmith.engine import tracing
tracing.SMALL = 0
x, w = torch.randn(4, 64), torch.randn(64)
compiled = torch.compile(lambda x, w: ops.rms_norm(x, w) + 1, backend="aot_eager")
torch.testing.assert_close(compiled(x, w), ops.rms_norm(x, w) + 1)
try:
    compiled(x, w[:3])
except ValueError as problem:
    print(problem)
"""


def test_what_is_dynamos_may_be_gone():
    done = subprocess.run([sys.executable, "-c", COMPILED], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    assert "weight" in done.stdout


def test_what_is_inductors_may_be_gone(monkeypatch):
    pytest.importorskip("torch._inductor.codegen.wrapper")
    from torch._inductor.codegen import custom_extern_kernel_codegen as home

    from tilesmith.engine import inductor, ops

    monkeypatch.setattr(inductor, "_taught", set())
    monkeypatch.delattr(home, "CUSTOM_EXTERN_KERNEL_CODEGEN")
    inductor.register_with_inductor(ops()["rms_norm"])  # its calls in compiled code then go through the dispatcher


def test_without_modes_nothing_is_recorded(monkeypatch):
    from tilesmith.engine import replay

    monkeypatch.setattr(torch_private, "DispatchMode", None)
    monkeypatch.setattr(replay, "_current_device", lambda: 0)
    kernel = replay.Replay(lambda x: x + 1, lambda: True, 0)
    for _ in range(4):
        assert torch.equal(kernel.run(torch.ones(2)), torch.full((2,), 2.0))
    assert kernel.run == kernel._launch


@pytest.mark.parametrize("name", ["empty", "rendezvous", "get_buffer", "buffer_ptrs"])
def test_symmetric_memory_may_lack_a_name(monkeypatch, name):
    """Ranks then go through NCCL: what cannot be shared is a reason, not an error."""
    found = pytest.importorskip("torch.distributed._symmetric_memory")
    from torch._C._distributed_c10d import _SymmetricMemory

    assert torch_private.symmetric_memory() is found
    monkeypatch.delattr(found if hasattr(found, name) else _SymmetricMemory, name)
    with pytest.raises(NotImplementedError, match=f"symmetric memory of PyTorch .* has no {name}"):
        torch_private.symmetric_memory()


def test_symmetric_memory_may_be_gone(monkeypatch):
    monkeypatch.delattr(torch.distributed, "_symmetric_memory", raising=False)
    monkeypatch.setitem(sys.modules, "torch.distributed._symmetric_memory", None)
    with pytest.raises(NotImplementedError, match="has no torch.distributed._symmetric_memory"):
        torch_private.symmetric_memory()


def test_an_attribute_error_below_an_import_is_said(monkeypatch, tmp_path):
    (tmp_path / "broken_home.py").write_text("import torch\ntorch.that_is_gone\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setitem(tilesmith._exports.EXPORTS, "broken", "broken_home")
    with pytest.raises(ImportError, match=r"broken_home cannot be imported: .*that_is_gone"):
        from tilesmith import broken  # noqa: F401


def test_nothing_is_absent_here():
    assert torch_private.ABSENT == {}, torch.__version__
