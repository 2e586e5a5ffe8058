"""Plans that a launcher's own run gives: without memory, without launches, and without touching other threads."""

import threading
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from torch.profiler import ProfilerActivity

from kernels_of_calls import KernelsOfCalls
from tilesmith.engine import Op, cases, launch, launcher, ops, register_kernel, rehearsed
from tilesmith.engine.launcher import in_place_of_launches
from tilesmith.engine.registry import DECLARED
from tilesmith.engine.rehearsal import launches_of
from tilesmith.hardware.detect import arch_named, arch_of, assuming
from tilesmith.validate.trial import _size, whole

SM90 = arch_named("sm90")
CPU = torch.device("cpu")


def _device_kernel(name: str):
    return SimpleNamespace(__name__=name, arg_names=["x_ptr", "count", "BLOCK"])


def _launcher(x: torch.Tensor, more: torch.Tensor | None = None) -> torch.Tensor:
    """Launches by alignment, size, identity and architecture."""
    out = torch.empty_like(x)
    name = "aligned" if x.data_ptr() % 16 == 0 else "shifted"
    launch(_device_kernel(f"{name}_kernel"), (x.shape[0], 1), x, count=7, BLOCK=64, num_warps=1, maxnreg=None)
    for _ in range(2 if more is x else 0):
        launch(_device_kernel("twice_kernel"), (arch_of(x.device).sms,), x, num_warps=8, cluster=2)
    return out


@pytest.mark.parametrize("offset", range(5))
def test_addresses_keep_their_alignment(offset):
    x = torch.ones(4, 9)[:, offset : offset + 4]
    name = "aligned" if x.data_ptr() % 16 == 0 else "shifted"
    assert [step.kernel for step in launches_of(_launcher, (x,), SM90)] == [f"{name}_kernel"]


def test_what_is_kept_of_tensors():
    seen = []

    def look(*args):
        seen.extend(args)

    x = torch.ones(3, 8, requires_grad=True)
    launches_of(look, (x, x.t(), x, [x, None], 0.5, torch.empty(0, 4), torch.tensor(1.0), x[:1].expand(5, 8)), SM90)
    assert {t.device.type for t in (*seen[:3], seen[3][0], *seen[5:])} == {"meta"}
    assert seen[0] is seen[2] and seen[0] is seen[3][0] and seen[3][1] is None and seen[4] == 0.5
    shapes = [(tuple(t.shape), t.stride()) for t in (seen[0], seen[1], *seen[5:])]
    assert shapes == [((3, 8), (8, 1)), ((8, 3), (1, 8)), ((0, 4), (4, 1)), ((), ()), ((5, 8), (0, 1))]


def test_the_architecture_is_the_one_asked_about():
    x = torch.ones(4, 4)
    steps = launches_of(_launcher, (x, x), SM90)
    assert [step.kernel for step in steps][1:] == ["twice_kernel", "twice_kernel"] and steps[1].grid == (SM90.sms,)
    assert launches_of(_launcher, (x, x), arch_named("sm80"))[1].grid == (arch_named("sm80").sms,)


@pytest.fixture(scope="module")
def copied():
    def copied(x: torch.Tensor, more: torch.Tensor | None = None) -> torch.Tensor:
        return x.clone()

    yield Op(copied)
    del DECLARED["copied"]


def test_the_lines_of_a_plan(copied):
    register_kernel("copied", backend="made_up", plans=rehearsed, tells=lambda *args, arch: [f"on {arch.name}"])(
        _launcher
    )
    x = torch.ones(4, 4)
    plan = copied.kernel("made_up").plans(x, x, arch=SM90)
    assert plan.lines() == [
        "1. aligned_kernel on 4 CTAs of 1 warp (BLOCK 64)",
        f"2. twice_kernel on {SM90.sms} CTAs of 8 warps (cluster 2), 2 times",
        "on sm90",
    ]
    assert copied.kernel("made_up").tells(x, x, arch=SM90) == plan.lines()


def test_a_launcher_that_reads_values_has_a_problem_for_a_plan(copied):
    def reads(x: torch.Tensor, more: torch.Tensor | None = None) -> torch.Tensor:
        return x * x.sum().item()

    register_kernel("copied", backend="made_up", plans=rehearsed)(reads)
    plan = copied.kernel("made_up").plans(torch.ones(3), arch=SM90)
    assert plan.steps is None and plan.lines()[0].startswith("its launches are not known before the call: ")


def test_each_thread_notes_its_own_launches():
    """What another thread launches meanwhile is not lost to a rehearsal in this one."""
    other, noted = [], []

    def elsewhere():
        with in_place_of_launches(lambda kernel, *given: other.append(kernel.__name__)):
            launch(_device_kernel("other_kernel"), (1,))

    with in_place_of_launches(lambda kernel, *given: noted.append(kernel.__name__)):
        thread = threading.Thread(target=elsewhere)
        thread.start()
        thread.join()
        assert other == ["other_kernel"] and noted == []
        launch(_device_kernel("own_kernel"), (1,))
        with in_place_of_launches(lambda *given: noted.append("inner")):
            launch(_device_kernel("own_kernel"), (1,))
        launch(_device_kernel("own_kernel"), (1,))
    assert noted == ["own_kernel", "inner", "own_kernel"] and not launcher._instead


@pytest.mark.parametrize(("name", "early"), [("sm90", True), ("sm80", False)])
def test_a_rehearsal_chains_kernels_as_the_device_does(name, early):
    """A kernel without programmatic dependent launch is another kernel: compiling it ahead would be in vain."""
    column_sums = pytest.importorskip("tilesmith.device.triton.column_sums")
    found = launches_of(column_sums.sum_partials, (torch.randn(64, 32), torch.float32), arch_named(name))
    assert [step.constants["CHAINED"] for step in found] == [early]
    assert [step.constants.get("launch_pdl", False) for step in found] == [early]
    with assuming(SM90):
        assert not column_sums.starts_early(CPU)  # an interpreter has no stream


def test_a_failed_rehearsal_gives_launches_back():
    with pytest.raises(RuntimeError):
        launches_of(lambda x: x.sum().item(), (torch.ones(3),), SM90)
    assert not launcher._instead


HIDING = [
    (op.name, backend)
    for op in list(ops().values())
    for backend in op.backends()
    if backend.startswith(("triton", "hopper")) and op.name in ("rms_norm", "layer_norm", "add_rms_norm", "experts")
]


@pytest.mark.parametrize(("name", "backend"), HIDING)
def test_without_outputs_for_a_gradient_no_other_kernels_are_launched(name, backend):
    """A trial knows the plan of the call that keeps them."""
    pytest.importorskip("triton")
    op, kernel = ops()[name], ops()[name].kernel(backend)
    configure, seen = kernel.fn.configure, 0
    for case in [c for c in cases(name) if _size(c) <= 2**21]:
        dtype = case.dtypes[-1]
        args = op.bind((), case.build(CPU, dtype, case.generator()))
        with assuming(SM90):
            if kernel.rejects(op._describe(*args)._replace(arch=SM90)):
                continue
            config, seen = configure.on(SM90, args, {}), seen + 1
        whole = {step.kernel for step in launches_of(partial(configure.fn, config=config), args, SM90)}
        if configure.hides:
            bare = launches_of(partial(configure.fn, config=config, hidden=False), args, SM90)
            assert {step.kernel for step in bare} <= whole, case.name
    assert seen


def _too_many_threads(op: Op, backend: str, args: tuple) -> list[str]:
    """Launches with more threads than a CTA has on some GPU, by the default configurations of each."""
    found, kernel = [], op.kernel(backend)
    for arch in map(arch_named, ("sm80", "sm90", "gfx942")):
        with assuming(arch):
            if kernel.rejects(op._describe(*args)._replace(arch=arch)):
                continue
            config = kernel.fn.configure.on(arch, args, {})
        steps = launches_of(partial(kernel.fn.configure.fn, config=config), args, arch)
        found += [f"{arch.name}: {step}" for step in steps if step.constants.get("num_warps", 4) * arch.warp > 1024]
    return found


@pytest.mark.parametrize("name", list(ops()))
def test_no_kernel_has_more_threads_than_a_gpu_gives_it(name):
    """1,024 on NVIDIA's and on AMD's, whose warps are twice as wide."""
    pytest.importorskip("triton")
    op, called = ops()[name], whole(name)
    rehearsing = [b for b in op.backends() if b.startswith(("triton", "hopper")) and op.kernel(b).plans is not None]
    rehearsing = [b for b in rehearsing if getattr(op.kernel(b).fn, "configure", None) is not None]
    for case in [c for c in cases(called.name) if rehearsing and _size(c) <= 2**18]:
        args = called.bind((), case.build(CPU, case.dtypes[-1], case.generator()))
        args = args if called is op else called.gradient.arguments(args)
        assert not [step for b in rehearsing for step in _too_many_threads(op, b, args)], case.name


@pytest.mark.parametrize("name", ["rms_norm", "layer_norm", "softmax"])
def test_few_rows_of_no_width_have_too_many_threads(name):
    pytest.importorskip("triton")
    for rows in (1, 40, 200, 5000):
        for cols in (1, 1000, 4095, 4096, 8192, 8193, 8208, 12_000, 16_384, 16_385, 40_000):
            x = torch.empty(rows, cols, dtype=torch.bfloat16, device="meta")
            assert not _too_many_threads(ops()[name], "triton", ops()[name].bind((x,), {})), (rows, cols)


def test_kernels_of_many_calls_are_told_apart_in_one_session():
    """By marks between them; here ATen's operators stand for kernels, also those of the backward's thread."""
    x = torch.randn(4, 4, requires_grad=True)
    ones, mark = torch.ones(4, 4), torch.zeros(1)
    with KernelsOfCalls(ProfilerActivity.CPU, lambda: torch.digamma(mark), "digamma") as shown:
        y = shown.call(lambda: x.sin())
        (2 * x.detach()).cos()
        (dx,) = shown.call(partial(torch.autograd.grad, y, x), ones)
        shown.call(lambda: None)
    assert torch.equal(dx, x.detach().cos())
    forward, backward, nothing = ({name for name in names if name.startswith("aten::")} for names in shown.names)
    assert forward == {"aten::sin"} and nothing == set()
    assert {"aten::cos", "aten::mul"} <= backward and "aten::sin" not in backward
    lost = KernelsOfCalls(ProfilerActivity.CPU, lambda: None, "digamma")
    with pytest.raises(RuntimeError, match="the profiler saw 0 marks of 2"), lost:
        lost.call(lambda: x.sin())
    with pytest.raises(KeyError), KernelsOfCalls(ProfilerActivity.CPU, lambda: None, "digamma"):
        raise KeyError("of the call")
