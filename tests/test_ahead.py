"""What is compiled ahead of launches: what it is, by whom, and that launches, errors and exits are as without it."""

import contextlib
import os
import subprocess
import sys
import threading
import time
from collections import Counter
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from tilesmith.engine import ahead, launch, launcher, ops, replay, timing, torch_private, triton_private
from tilesmith.engine import threads as threads_of
from tilesmith.engine.autograd import Way
from tilesmith.engine.launcher import ANY_THREAD, in_place_of_launches
from tilesmith.hardware.detect import arch_named, assuming
from tilesmith.settings import read
from tilesmith.validate.offline import Tap

SM90 = arch_named("sm90")


class MadeUp:
    """A device kernel with a run-time argument and a constant."""

    def __init__(self, name):
        self.__name__, self.arg_names = name, ["x_ptr", "BLOCK"]
        self.params = [SimpleNamespace(is_constexpr=name == "BLOCK") for name in self.arg_names]
        parameters = {name: SimpleNamespace(name=name, default=0, empty=0) for name in self.arg_names}
        self.signature = SimpleNamespace(parameters=parameters)


@pytest.fixture
def warmed(monkeypatch):
    """Names of the kernels that threads compiled, on a device that is not there."""
    found = []
    monkeypatch.setattr(triton_private, "warm", lambda kernel, args, named: found.append(kernel.__name__))
    monkeypatch.setattr(triton_private, "have_cache", lambda kernel, device: None)
    monkeypatch.setattr(torch_private, "current_device", lambda: 0)
    monkeypatch.setattr(replay, "_current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext())
    monkeypatch.setattr(launcher, "awaited", {})
    monkeypatch.setattr(launcher, "_remember", lambda key, compiled: None)
    monkeypatch.setattr(ahead, "_seen", set())
    threads = threads_of.Threads(2)
    monkeypatch.setattr(ahead, "compilers", lambda: threads)
    yield found
    threads.stop()


def _finish(threads):
    while threads.running:
        time.sleep(0.001)


CALLS = {
    "rms_norm": ([(64, 2048), (2048,)], {}),
    "add_rms_norm": ([(64, 2048), (64, 2048), (2048,)], {}),
    "softmax": ([(64, 1024)], {}),
    "attention": ([(1, 4, 256, 128), (1, 2, 256, 128), (1, 2, 256, 128)], {"causal": True}),
}


@pytest.mark.parametrize("name", CALLS)
def test_a_forward_has_the_kernels_of_its_gradient_compiled(warmed, monkeypatch, name):
    """All that the backward launches, by the keys of its launches; nothing where no gradient is asked for."""
    pytest.importorskip("triton")
    monkeypatch.setattr(launcher, "uncompiled", _key_of)
    op = ops()[name]
    shapes, more = CALLS[name]
    args = op.bind([torch.randn(n, dtype=torch.bfloat16, requires_grad=True) for n in shapes], more)
    kernels = [op.explain(*args, arch="sm90", gradient=back).kernel for back in (False, True)]
    launched = _launched(op, kernels, args)
    fn = partial(kernels[0].fn.configure.fn, config=kernels[0].fn.configure.on(SM90, args, {}))
    with assuming(SM90), in_place_of_launches(lambda *launch: None):
        for asked in (False, True):
            ready = replay.Replay(fn, None, 0, "", partial(ahead.compile_rest, op, kernels[0], ""))
            if asked:
                ready.way = Way(op.gradient, "", args, op.gradient.needs(args))
            with torch.no_grad():
                ready.run(*args)
            if not asked:
                assert set(launcher.awaited) <= set(launched[op.name])
    missing = [kernel for key, kernel in launched[op.vjp.name].items() if key not in launcher.awaited]
    assert launched[op.vjp.name] and not missing


def _key_of(kernel, args, named, cluster):
    """A launch's key also where kernels are interpreted, which have no signature."""
    kinds = {n: launcher._kind(v) if isinstance(v, torch.Tensor) or not n.isupper() else v for n, v in named.items()}
    return kernel.__name__, tuple(map(launcher._kind, args)), tuple(kinds.items()), cluster


def _launched(op, kernels, args, launch=lambda *given: None):
    """Name of op -> key of each launch of a real call and its backward -> the kernel's name. launch: what is done in
    place of each, given the op's name, too. The call's tensors are on a CPU, which stands for a GPU."""
    from tilesmith.device.triton import column_sums

    found, names = {op.name: {}, op.vjp.name: {}}, [op.name]
    starts_early = column_sums.starts_early

    def note(kernel, grid, args, named, cluster):
        launch(names[-1], kernel, grid, args, named)
        found[names[-1]][launcher.uncompiled(kernel, args, named, cluster)] = kernel.__name__

    taps = [Tap(op, kernels[0].backend, SM90), Tap(op.vjp, kernels[1].backend, SM90)]
    for tap in taps:
        tap.open()
        inner = tap.op._ready
        tap.op._ready = lambda args, pin, tap=tap, inner=inner: names.append(tap.op.name) or inner(args, pin)
    column_sums.starts_early = lambda device: starts_early(torch.device("meta"))
    try:
        with assuming(SM90), in_place_of_launches(note, ANY_THREAD):
            outs = op(*args)
            outs = outs if isinstance(outs, tuple) else (outs,)
            used = [o for o in outs if o.ndim == outs[0].ndim]
            torch.autograd.backward(used, [torch.ones_like(o) for o in used])
    finally:
        column_sums.starts_early = starts_early
        for tap in taps:
            tap.close()
    return found


def _rest(*kernels, times=1, columns=16):
    """A first run of a launcher of these kernels, each launched with one tensor."""

    def launcher_of_all(x):
        for kernel in kernels * times:
            launch(kernel, (1,), x, BLOCK=64)

    made = SimpleNamespace(backend="made_up", plans=lambda *args: None)
    op = SimpleNamespace(name="made_up")
    ready = replay.Replay(launcher_of_all, None, 0, "", partial(ahead.compile_rest, op, made, ""))
    with assuming(SM90):
        ready.run(torch.ones(columns))


def test_a_call_compiles_its_first_kernel_itself_and_none_twice(warmed, monkeypatch):
    compiled = []
    monkeypatch.setattr(triton_private, "run", lambda kernel, *given: compiled.append(kernel.__name__))
    kernels = [MadeUp(f"kernel_{i}") for i in range(6)]
    for columns in (16, 32):  # two calls that are looked at
        _rest(*kernels, times=3, columns=columns)
    _finish(ahead.compilers())
    assert "kernel_0" not in warmed and max(Counter(warmed).values(), default=1) == 1
    assert compiled[:6] == [kernel.__name__ for kernel in kernels]  # the launches are as they were


def test_a_launch_waits_for_its_kernel(warmed, monkeypatch):
    begun, go, order = threading.Event(), threading.Event(), []

    def warm(kernel, args, named):
        begun.set()
        assert go.wait(20)
        order.append("compiled")

    def run(kernel, *given):
        if kernel.__name__ == "first":
            assert begun.wait(20)
            threading.Timer(0.1, go.set).start()
        order.append(kernel.__name__)

    monkeypatch.setattr(triton_private, "warm", warm)
    monkeypatch.setattr(triton_private, "run", run)
    _rest(MadeUp("first"), MadeUp("second"))
    assert order == ["first", "compiled", "second"]


def test_what_no_thread_has_begun_the_launch_compiles(warmed, monkeypatch):
    compiled = []
    monkeypatch.setattr(triton_private, "run", lambda kernel, *given: compiled.append(kernel.__name__))
    monkeypatch.setattr(ahead.compilers(), "most", 0)
    _rest(MadeUp("first"), MadeUp("second"))
    assert compiled == ["first", "second"] and warmed == []


def test_an_error_comes_again_where_the_kernel_is_launched(warmed, monkeypatch):
    failed = threading.Event()

    def warm(kernel, args, named):
        failed.set()
        raise ValueError("does not compile, in a thread")

    def run(kernel, *given):
        assert failed.wait(20)
        if kernel.__name__ == "second":
            raise ValueError("does not compile, where it is launched")

    monkeypatch.setattr(triton_private, "warm", warm)
    monkeypatch.setattr(triton_private, "run", run)
    with pytest.raises(ValueError, match="where it is launched"):
        _rest(MadeUp("first"), MadeUp("second"))


def test_a_launcher_that_cannot_be_rehearsed_runs_as_without(warmed):
    made, op = SimpleNamespace(backend="made_up", plans=lambda *args: None), SimpleNamespace(name="made_up")
    ready = replay.Replay(lambda x: x.sum().item(), None, 0, "", partial(ahead.compile_rest, op, made, ""))
    assert ready.run(torch.ones(3)) == 3 and not launcher.awaited and not launcher._instead


def test_threads_end_with_their_work_and_take_more():
    threads, done = threads_of.Threads(2), []
    for i in range(3):
        for future in [threads.submit(partial(done.append, i)) for _ in range(5)]:
            future.result(20)
        _finish(threads)
    assert len(done) == 15


def test_what_is_needed_first_and_then_the_largest_is_done_first():
    threads, done = threads_of.Threads(0), []
    for name, at_once, size in (("a", False, 1), ("b", False, 5), ("c", True, 0), ("d", False, 5), ("e", True, 2)):
        threads.submit(partial(done.append, name), at_once=at_once, size=size)
    threads.most = 1
    threads.submit(partial(done.append, "f"))
    _finish(threads)
    assert done == ["e", "c", "b", "d", "a", "f"]


def test_the_size_of_a_kernel_has_what_it_calls():
    def inner():
        """Calls nothing."""

    def outer():
        inner_kernel()  # noqa: F821

    made = SimpleNamespace(src="i" * 10, fn=inner)
    outer.__globals__["inner_kernel"] = made
    try:
        assert triton_private.code_size(SimpleNamespace(src="o" * 7, fn=outer)) == 17
    finally:
        del outer.__globals__["inner_kernel"]
    assert triton_private.code_size(made) == 10 and triton_private.code_size(object()) == 0


def test_nothing_is_timed_beside_compilers(monkeypatch):
    threads, calls, done, warm = threads_of.Threads(1), [], [], threading.Event()
    monkeypatch.setattr(threads_of, "compilers", lambda: threads)

    def call():
        calls.append(list(done))
        if len(calls) == 1:
            threads.submit(lambda: (warm.wait(20), time.sleep(0.05), done.append("compiled")))
        else:
            warm.set()

    timing.measure({"call": call}, "cpu", rounds=1, warmup=2)
    assert not calls[1] and all(calls[2:])


def test_the_switch(monkeypatch):
    monkeypatch.setattr(threads_of.os, "sched_getaffinity", lambda pid: {0, 1}, raising=False)
    monkeypatch.setattr(threads_of, "interpreting", lambda: False)
    monkeypatch.setattr(threads_of.releases, "too_old", lambda: None)
    monkeypatch.delenv("TILESMITH_COMPILE_AHEAD", raising=False)
    for text, threads in (("0", False), ("1", True), (None, True)):
        if text is not None:
            monkeypatch.setenv("TILESMITH_COMPILE_AHEAD", text)
        else:
            monkeypatch.delenv("TILESMITH_COMPILE_AHEAD")
        monkeypatch.setattr(threads_of, "settings", read)
        assert (threads_of.compilers.__wrapped__() is not None) is threads


ENDS = """
import os, sys, time
from tilesmith.engine import launcher
from tilesmith.engine.threads import Threads
import tilesmith.engine.ahead
threads = Threads(1)
launcher.awaited["key"] = None
for _ in range(1000):
    threads.submit(lambda: time.sleep(0.2))
if sys.argv[1] == "fork":
    threads.lock.acquire()
    child = os.fork()
    if child == 0:
        sys.exit(bool(launcher.awaited))
    threads.lock.release()
    sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""


@pytest.mark.parametrize(
    "how", ["plain", pytest.param("fork", marks=pytest.mark.skipif(sys.platform == "win32", reason="no fork"))]
)
def test_the_interpreter_ends_with_work_left(how):
    done = subprocess.run([sys.executable, "-c", ENDS, how], capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr


COMPILES = """
import contextlib, sys, threading
from functools import partial
from types import SimpleNamespace

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime import driver

def build(src, metadata):
    built.append((threading.current_thread().name, src.name, str(src.signature)))

built = []
driver.set_active(SimpleNamespace(
    get_current_device=lambda: 0, get_current_stream=lambda device: 0, launcher_cls=build,
    get_current_target=lambda: GPUTarget("cuda", 90, 32), get_device_interface=None,
))
from test_ahead import CALLS, SM90, _finish, _launched
from tilesmith.engine import ahead, launcher, ops, torch_private
from tilesmith.engine.threads import Threads
from tilesmith.engine.autograd import Way
from tilesmith.hardware.detect import assuming

torch_private.current_device = lambda: 0
torch.cuda.is_initialized = lambda: True
torch.cuda.is_current_stream_capturing = lambda: False
torch.cuda.device = lambda device: contextlib.nullcontext()
ahead.compilers = lambda: threads
threads, compiled = Threads(2), []
triton.knobs.compilation.listener = lambda src, **told: compiled.append(src.name)

for name in sys.argv[1:]:
    op, (shapes, more) = ops()[name], CALLS[name]
    args = op.bind([torch.randn(n, dtype=torch.bfloat16, requires_grad=True) for n in shapes], more)
    kernels = [op.explain(*args, arch="sm90", gradient=back).kernel for back in (False, True)]
    fn = partial(kernels[0].fn.configure.fn, config=kernels[0].fn.configure.on(SM90, args, {}))
    ready = SimpleNamespace(fn=fn, way=Way(op.gradient, "", args, op.gradient.needs(args)))
    with assuming(SM90):
        ahead.compile_rest(op, kernels[0], "", ready, args)
    _finish(threads)

    def launch(of, kernel, grid, args, named):
        before = len(compiled)
        launcher.triton_private.warm(kernel, args, named)
        here, source, signature = built.pop()
        assert here == "MainThread"
        found = len(compiled) == before and ("tilesmith-ahead", source, signature) in built
        assert of == name or found, kernel.__name__

    assert compiled, "no thread compiled anything"
    _launched(op, kernels, args, launch)
"""


def test_a_launch_finds_what_threads_compiled(needs_triton, tmp_path):
    """By Triton's own key of the call's real tensors, for a GPU that is not here; the launch's own C function, too."""
    environment = {**os.environ, "TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(tmp_path)}
    command = [sys.executable, "-c", COMPILES, "rms_norm", "add_rms_norm", "softmax"]
    environment["PYTHONPATH"] = os.pathsep.join([str(Path(__file__).parent), *sys.path])
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
