"""Releases of Triton that nobody tested: a kernel in Gluon is tried on a small case before it serves, or is refused."""

import json
import subprocess
import sys
from dataclasses import replace
from typing import NamedTuple

import pytest
import torch

from tilesmith import explain, use
from tilesmith.cli.doctor import examine
from tilesmith.engine import Op, backends, cases, register_kernel, rehearsed, releases, trial
from tilesmith.engine import ops as declared
from tilesmith.engine.backends import declare_backend, in_gluon
from tilesmith.engine.case import Case, T
from tilesmith.engine.choice import launches
from tilesmith.engine.kernel import Kernel, lines_of
from tilesmith.engine.launcher import ANY_THREAD, in_place_of_launches
from tilesmith.engine.registry import DECLARED
from tilesmith.engine.replay import Ready
from tilesmith.hardware.detect import arch_named, assuming
from tilesmith.settings import settings
from tilesmith.validate import trial as program
from tilesmith.validate.cases import outputs_and_gradients
from tilesmith.validate.offline import Tap

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def made_up():
    """An op with a kernel in Gluon, as far as the engine can tell."""

    def doubled(x: torch.Tensor) -> torch.Tensor:
        return x * 2

    declare_backend("made_up", lambda device, pinned: None, gluon=True)
    yield Op(doubled)
    del DECLARED["doubled"]
    del backends._BACKENDS["made_up"]


@pytest.fixture
def doubled(made_up, monkeypatch, tmp_path):
    """The same under a release of Triton that is not there."""

    def kernel(x: torch.Tensor) -> torch.Tensor:
        return x + x

    monkeypatch.setattr(releases, "installed", lambda: "99.1.0")
    monkeypatch.setattr(trial, "settings", lambda: replace(settings(), cache_dir=tmp_path, trust_triton=False))
    monkeypatch.setattr(trial, "_found", {})
    made_up.add_kernel(Kernel("doubled", "made_up", kernel, 50))  # which forgets earlier choices
    yield made_up
    trial._conditions.cache_clear()


def _outcomes(monkeypatch, *outcomes):
    """Trials that would run, in place of processes."""
    left, ran = list(outcomes), []

    def run(command):
        ran.append(command[3:])
        return left.pop(0)

    monkeypatch.setattr(trial, "_run", run)
    return ran


def test_a_kernel_is_tried_once_and_then_serves(doubled, monkeypatch):
    ran = _outcomes(monkeypatch, (trial.PASSED, "right"))
    assert "tried before its first call" in explain("doubled", torch.ones(3)).note and not ran
    assert torch.equal(doubled(torch.ones(3)), torch.full((3,), 2.0))
    doubled(torch.ones(4))
    assert ran == [["doubled", "made_up", "cpu"]]
    choice = explain("doubled", torch.ones(5))
    assert choice.kernel.backend == "made_up" and "was tried with it on" in choice.note
    monkeypatch.setattr(trial, "_found", {})  # another process
    assert trial.verdict("doubled", "made_up", CPU).refusal == "" and len(ran) == 1


def test_one_that_fails_is_refused_with_the_reason(doubled, monkeypatch):
    ran = _outcomes(monkeypatch, (trial.FAILED, "case small: out is off by 3, allowed 0.1"))
    assert torch.equal(doubled(torch.ones(3)), torch.full((3,), 2.0))
    choice = explain("doubled", torch.ones(3))
    assert choice.kernel.backend == "reference" and len(ran) == 1
    (reason,) = dict(choice.rejected)["made_up"]
    assert "Triton 99.1.0 is not among the tested releases" in reason and "off by 3" in reason
    kept = trial.path("doubled", "made_up", CPU)
    assert str(kept) in reason and json.loads(kept.read_text())["triton"] == "99.1.0"
    with use(doubled="made_up"), pytest.raises(NotImplementedError, match="off by 3"):
        doubled(torch.ones(3))


def test_what_the_kernel_is_not_guilty_of_is_not_kept(doubled, monkeypatch):
    ran = _outcomes(monkeypatch, (trial.PREVENTED, "OutOfMemoryError: no room"), (trial.PASSED, "right"))
    refusal = trial.verdict("doubled", "made_up", CPU).refusal
    assert "could not be tried with it: OutOfMemoryError: no room" in refusal and "failed" not in refusal
    assert not trial.path("doubled", "made_up", CPU).exists()
    monkeypatch.setattr(trial, "_found", {})
    assert trial.verdict("doubled", "made_up", CPU).refusal == "" and len(ran) == 2


def test_other_versions_try_anew(doubled, monkeypatch):
    _outcomes(monkeypatch, (trial.FAILED, "wrong"), (trial.PASSED, "right"))
    assert trial.verdict("doubled", "made_up", CPU).refusal
    monkeypatch.setattr(trial, "_found", {})
    monkeypatch.setattr(releases, "installed", lambda: "99.2.0")
    trial._conditions.cache_clear()
    assert trial.verdict("doubled", "made_up", CPU).refusal == ""


def test_a_tested_release_and_trust_try_nothing(doubled, monkeypatch):
    ran = _outcomes(monkeypatch)
    monkeypatch.setattr(releases, "installed", lambda: "3.6.0")
    assert trial.verdict("doubled", "made_up", CPU) == trial.Verdict()
    monkeypatch.setattr(releases, "installed", lambda: "99.1.0")
    monkeypatch.setattr(trial, "settings", lambda: replace(settings(), trust_triton=True))
    assert trial.verdict("doubled", "made_up", CPU) == trial.Verdict() and not ran


def test_other_backends_are_never_tried(doubled, monkeypatch):
    ran = _outcomes(monkeypatch)
    assert trial.verdict("doubled", "triton", CPU) == trial.verdict("doubled", "custom", CPU) == trial.Verdict()
    assert not ran


@pytest.mark.parametrize(
    ("code", "outcome"),
    [
        ("print('case small: right')", (trial.PASSED, "case small: right")),
        ("print('off'); raise SystemExit(1)", (trial.FAILED, "off")),
        ("raise ValueError('no such name')", (trial.FAILED, "ValueError: no such name")),
        ("import os, signal; os.kill(os.getpid(), signal.SIGSEGV)", (trial.FAILED, "its process was ended by SIGSEGV")),
        ("import os; os.kill(os.getpid(), 9)", (trial.PREVENTED, "its process was ended by SIGKILL")),
        ("import os; os.kill(os.getpid(), 40)", (trial.FAILED, "its process was ended by signal 40")),
        ("import os; os.write(2, b'a\\xffb'); os._exit(1)", (trial.FAILED, "a\ufffdb")),
        ("import sys; sys.stderr.write('full'); raise SystemExit(75)", (trial.PREVENTED, "full")),
        ("import sys; print('busy'); sys.stderr.write('a warning'); raise SystemExit(75)", (trial.PREVENTED, "busy")),
    ],
)
def test_how_its_process_may_end(code, outcome):
    assert trial._run([sys.executable, "-S", "-c", code]) == outcome


def test_a_process_that_does_not_end_or_start(monkeypatch):
    monkeypatch.setattr(trial, "LONGEST", 0.2)
    assert trial._run([sys.executable, "-S", "-c", "import time; time.sleep(9)"])[0] == trial.PREVENTED
    assert trial._run(["no-such-program"])[0] == trial.PREVENTED


def test_the_program_runs_a_case(capsys):
    assert program.main("rms_norm", "reference", "cpu") == trial.PASSED
    assert capsys.readouterr().out.endswith("right\n")
    assert program.main("rms_norm_vjp", "reference", "cpu") == trial.PASSED


@pytest.mark.parametrize(
    ("words", "of_the_device"),
    [
        ("CUDA error: out of memory", True),
        ("CUDA error: all CUDA-capable devices are busy or unavailable", True),
        ("CUDA driver initialization failed, you might not have a CUDA gpu.", True),
        ("CUDA error: an illegal memory access was encountered", False),
        ("CUDA error: unspecified launch failure", False),
    ],
)
def test_the_program_tells_a_full_or_busy_device_from_a_fault(monkeypatch, words, of_the_device):
    def fails(*args, **kwargs):
        raise torch.AcceleratorError(words)

    monkeypatch.setattr(program, "check_each", fails)
    if of_the_device:
        assert program.attempt("rms_norm", "reference", "cpu") == (trial.PREVENTED, f"AcceleratorError: {words}")
    else:
        with pytest.raises(torch.AcceleratorError):
            program.attempt("rms_norm", "reference", "cpu")


def test_the_program_finds_what_is_wrong(doubled, monkeypatch, capsys):
    def wrong(x: torch.Tensor) -> torch.Tensor:
        return x * 2.5

    doubled.add_kernel(Kernel("doubled", "made_up", wrong, 50))
    case = Case("small", {"x": T(4)}, tags=frozenset({"compile"}))
    monkeypatch.setattr(program, "cases", lambda name: [case])
    monkeypatch.setattr(trial, "settings", lambda: replace(settings(), trust_triton=True))
    assert program.main("doubled", "made_up", "cpu") == trial.FAILED
    assert "is off by" in capsys.readouterr().out


class Launch(NamedTuple):
    kernel: str


class MadeUpPlan(NamedTuple):
    steps: tuple[Launch, ...]

    def lines(self):
        return [f"launches {step.kernel}" for step in self.steps]


def _planned(x):
    """Few rows take one device kernel, many rows two others; metadata of a call does not tell them apart."""
    names = () if x.shape[0] == 0 else ("short",) if x.shape[0] < 5 else ("long", "end")
    return MadeUpPlan(tuple(map(Launch, names)))


def test_a_launcher_that_cannot_be_rehearsed_is_tried_as_a_whole(doubled, monkeypatch):
    ran = _outcomes(monkeypatch, (trial.PASSED, "right"))

    def reads(x: torch.Tensor) -> torch.Tensor:
        return x * 2 if x.sum().item() > 1 else x + x

    register_kernel("doubled", backend="made_up", rank=50, plans=rehearsed)(reads)
    doubled(torch.ones(3))
    assert ran == [["doubled", "made_up", "cpu"]]
    assert "its launches are not known before the call: RuntimeError: " in explain("doubled", torch.ones(3)).note


@pytest.fixture
def planned(doubled):
    kernel = doubled.kernel("made_up")
    doubled.add_kernel(replace(kernel, plans=_planned, tells=lines_of(_planned)))
    return doubled


def test_each_set_of_device_kernels_has_a_trial_of_its_own(planned, monkeypatch):
    ran = _outcomes(monkeypatch, (trial.PASSED, "case few: right"), (trial.PASSED, "case many: right"))
    for rows in (3, 9, 2, 7, 8):
        planned(torch.ones(rows, 2))
    assert ran == [
        ["doubled", "made_up", "cpu", "short", "float32", "2"],
        ["doubled", "made_up", "cpu", "end,long", "float32", "2"],
    ]
    told = str(explain("doubled", torch.ones(9, 2)))
    assert "launches end" in told and "this kernel (end, long) was tried with it on" in told
    assert "case many: right" in told
    monkeypatch.setattr(trial, "_found", {})  # another process
    planned._recent.clear()
    planned(torch.ones(3, 2)), planned(torch.ones(9, 2))
    assert len(ran) == 2


@pytest.mark.parametrize("first", ["right", "wrong"])
def test_a_device_kernel_that_fails_does_not_refuse_calls_that_launch_others(planned, monkeypatch, first):
    outcomes = {"right": (trial.PASSED, "case few: right"), "wrong": (trial.FAILED, "case many: out is off by 3")}
    rows = {"right": torch.ones(3, 2), "wrong": torch.ones(9, 2)}
    order = [first, *({"right", "wrong"} - {first})]
    ran = _outcomes(monkeypatch, *(outcomes[which] for which in order))
    for which in order:
        planned(rows[which])
    assert explain("doubled", rows["right"]).kernel.backend == "made_up"
    choice = explain("doubled", rows["wrong"])
    assert choice.kernel.backend == "reference" and len(ran) == 2
    (reason,) = dict(choice.rejected)["made_up"]
    assert "this kernel (end, long) failed when it was tried with it: case many: out is off by 3" in reason
    with use(doubled="made_up"):
        planned(rows["right"])
        with pytest.raises(NotImplementedError, match="end, long"):
            planned(rows["wrong"])


def test_doctor_names_what_failed_under_these_versions(planned, monkeypatch):
    _outcomes(monkeypatch, (trial.PASSED, "right"), (trial.FAILED, "case many: out is off by 3"))
    assert examine("cpu")["refused"] == []
    planned(torch.ones(3, 2)), planned(torch.ones(9, 2))
    (line,) = examine("cpu")["refused"]
    kept = trial.path("doubled", "made_up", CPU, ("end", "long"))
    assert line.startswith("made_up kernel of doubled (end, long): case many: out is off by 3; ") and str(kept) in line
    monkeypatch.setattr(releases, "installed", lambda: "99.2.0")
    trial._conditions.cache_clear()
    assert trial.failures(CPU) == []
    monkeypatch.setattr(releases, "installed", lambda: "3.6.0")
    assert trial.failures(CPU) == []


def test_a_tested_release_asks_for_no_plan_to_choose(planned, monkeypatch):
    def never(x):
        raise AssertionError("a plan was made")

    planned.add_kernel(replace(planned.kernel("made_up"), plans=never))
    monkeypatch.setattr(releases, "installed", lambda: "3.6.0")
    planned(torch.ones(3, 2)), planned(torch.ones(9, 2))
    assert planned._select.cache_info().currsize == 1, "metadata alone decides, once for both"


def test_a_call_that_launches_nothing_needs_no_trial(planned, monkeypatch):
    ran = _outcomes(monkeypatch)
    assert planned(torch.ones(0, 2)).shape == (0, 2) and not ran
    assert explain("doubled", torch.ones(0, 2)).kernel.backend == "made_up"


FEW, MANY, WIDER = (Case(f"rows_{rows}_{cols}", {"x": T(rows, cols)}) for rows, cols in ((3, 4), (9, 4), (9, 64)))


@pytest.mark.parametrize(
    ("wanted", "words"),
    [
        (("short", "float32", "4"), "case rows_3_4 in float32: right"),
        (("end,long", "float32", "4"), "case rows_9_4 in float32: out is off by"),
        (("end,long", "float16", "64"), "case rows_9_64 in float16: out is off by"),
        (("end,long", "float16", "33"), "case rows_9_64 in float16: out is off by"),
        (("end,long", "float8_e4m3fn", "3"), "case rows_9_4 in bfloat16: out is off by"),
        (
            ("other", "float16", "4"),
            "case rows_3_4 in bfloat16: right (no small case launches just these device kernels, none launches other)",
        ),
        (
            ("other,short", "float16", "4"),
            "case rows_3_4 in float16: right (no small case launches just these device kernels, none launches other)",
        ),
        (("long,short", "float32", "4"), "case rows_3_4 in float32: right, case rows_9_4 in float32: out is off by"),
    ],
)
def test_the_program_tries_the_smallest_case_that_launches_the_same(planned, monkeypatch, capsys, wanted, words):
    def wrong_if_long(x: torch.Tensor) -> torch.Tensor:
        return x * 2 if x.shape[0] < 5 else x * 2.5

    planned.add_kernel(replace(planned.kernel("made_up"), fn=wrong_if_long))
    monkeypatch.setattr(program, "cases", lambda name: [FEW, WIDER, MANY])
    monkeypatch.setattr(trial, "settings", lambda: replace(settings(), trust_triton=True))
    assert program.main("doubled", "made_up", "cpu", *wanted) == (
        trial.FAILED if words.endswith("is off by") else trial.PASSED
    )
    assert capsys.readouterr().out.startswith(words)


def test_the_program_knows_a_full_device_while_it_looks_for_a_case(planned, monkeypatch):
    def full(self, *args):
        raise torch.AcceleratorError("CUDA error: out of memory")

    monkeypatch.setattr(program, "cases", lambda name: [FEW])
    monkeypatch.setattr(Case, "build", full)
    assert program.main("doubled", "made_up", "cpu", "short", "float32", "4") == trial.PREVENTED


ATTENTION = {
    "attention": [
        (("attention_fwd_kernel",), 64),
        (("attention_fwd_stream_k_kernel",), 128),
        (("attention_window_kernel",), 64),
        (("attention_fwd_wide_kernel",), 512),
        (("attention_fwd_kernel", "query_tiles_kernel"), 128),
        (("attention_fwd_kernel", "list_tiles_kernel"), 64),
    ],
    "attention_vjp": [
        (("attention_dkv_kernel", "attention_dq_kernel", "attention_rows_kernel"), 128),
        (("attention_band_products_kernel", "attention_band_scores_kernel", "attention_rows_kernel"), 512),
        (("attention_rows_kernel", "attention_window_vjp_kernel"), 64),
    ],
}


@pytest.mark.parametrize(
    ("name", "kernels", "columns"), [(name, *row) for name, rows in ATTENTION.items() for row in rows], ids=str
)
def test_attention_has_a_case_for_each_of_its_kernels(monkeypatch, name, kernels, columns):
    """And the plan that the trial makes of the case is that of the call which the case makes."""
    pytest.importorskip("triton")
    monkeypatch.setattr(program, "arch_of", lambda device: arch_named("sm90"))
    case, dtype = next(program.like_cases(name, "hopper", CPU, trial.Launches(kernels, "bfloat16", columns)))
    assert dtype is torch.bfloat16 and case.args["q"].shape[-1] == columns
    op, whole, made = declared()[name], program.whole(name), []

    def look(args, pin):
        with assuming(arch_named("sm90")):
            made.append(launches(op.kernel("hopper"), args).kernels)
        return Ready(op.reference)

    op._recent.clear()
    monkeypatch.setattr(op, "_ready", look)
    with use(**({} if op is whole else {whole.name: "reference"})):
        outputs_and_gradients(whole, whole.bind((), case.build(CPU, dtype, case.generator())))
    op._recent.clear()
    assert made[0] == kernels


def test_plans_are_told_and_are_not_given_beside_what_is_told(doubled):
    def alike(x: torch.Tensor) -> torch.Tensor:
        return x + x

    register_kernel("doubled", backend="planned", rank=60, plans=_planned)(alike)
    try:
        assert "launches short" in explain("doubled", torch.ones(3, 2)).note
    finally:
        del doubled._kernels["planned"]
        doubled._select.cache_clear()
    with pytest.raises(TypeError, match="give tells or plans, not both"):
        register_kernel("doubled", backend="planned", plans=_planned, tells=lambda x: [])
    with pytest.raises(TypeError, match="plans must be callable or None, got int 3"):
        register_kernel("doubled", backend="planned", plans=3)
    with pytest.raises(ValueError, match="its own plans"):
        register_kernel("not_declared", plans=_planned)(alike)


def _gluon_kernels():
    for name, op in sorted(declared().items()):
        yield from ((name, backend) for backend in op.backends() if in_gluon(backend))


def _launched(name, backend, case, dtype):
    """The device kernels that a case launches on Hopper, of any size: its tensors have no memory."""
    op, asked, kernel = program.whole(name), declared()[name], declared()[name].kernel(backend)
    with assuming(arch_named("sm90")):
        args = op.bind((), {n: _on_meta(v, dtype) if isinstance(v, T) else v for n, v in case.args.items()})
        args = args if asked is op else op.gradient.arguments(args)
        if kernel.rejects(asked._describe(*args)._replace(arch=arch_named("sm90"))):
            return ()
        return launches(kernel, args).kernels


def _on_meta(t, dtype):
    x = torch.empty(t.shape, dtype=t.dtype or dtype, device="meta")
    if t.layout == "strided" and x.ndim:
        x = x.new_empty([n + 3 for n in t.shape])[tuple(slice(1, n + 1) for n in t.shape)]
    elif t.layout == "transposed" and x.ndim > 1:
        x = x.transpose(-1, -2).contiguous().transpose(-1, -2)
    return x.requires_grad_(t.grad) if x.is_floating_point() else x


@pytest.mark.parametrize(
    ("name", "backend"), [(name, backend) for name, backend in _gluon_kernels() if not name.startswith("attention")]
)
def test_each_set_of_device_kernels_that_a_case_launches_is_launched_by_a_small_one(name, backend):
    pytest.importorskip("triton")
    small, every = set(), {}
    for case in cases(program.whole(name).name):
        for dtype in case.dtypes:
            launched = _launched(name, backend, case, dtype)
            assert launched is not None, f"{name} by {backend} has no plan of {case.name}"
            every.setdefault(launched, f"{case.name} in {dtype}")
            if program._size(case) <= program._LARGEST and case.tags & program._CHECKED:
                small.add(launched)
    assert every.keys() - {()}, "no case is one that this kernel takes"
    assert {kernels: who for kernels, who in every.items() if kernels not in small} == {}


@pytest.fixture
def hopper(monkeypatch, tmp_path):
    """A Hopper GPU under a release of Triton that is not there, on a CPU: launches are noted, and nothing runs."""
    pytest.importorskip("triton")
    monkeypatch.setattr(releases, "installed", lambda: "99.1.0")
    monkeypatch.setattr(trial, "settings", lambda: replace(settings(), cache_dir=tmp_path, trust_triton=False))
    monkeypatch.setattr(trial, "_found", {})
    for name in backends.declared():
        if name == "triton" or in_gluon(name):
            found = replace(backends._BACKENDS[name], need=lambda device, pinned: None)
            monkeypatch.setitem(backends._BACKENDS, name, found)
    noted, called = [], [declared()[name] for name in ("rms_norm", "softmax_dropout", "linear_cross_entropy")]
    for op in called:
        op._recent.clear()
    with (
        assuming(arch_named("sm90")),
        in_place_of_launches(lambda kernel, *given: noted.append(kernel.__name__), ANY_THREAD),
    ):
        yield noted
    for op in called:
        op._recent.clear()
    trial._conditions.cache_clear()


def test_norms_are_tried_by_the_kernels_that_a_call_launches(hopper, monkeypatch):
    """Rows of one width: of the two backends in Gluon the persistent one comes first, and fails."""
    ran = _outcomes(monkeypatch, (trial.FAILED, "case wide: y is off by 3"), (trial.PASSED, "case parts: right"))
    x, weight = torch.empty(2, 65_536, dtype=torch.bfloat16), torch.ones(65_536, dtype=torch.bfloat16)
    declared()["rms_norm"](x, weight)
    assert ran == [
        ["rms_norm", "hopper_persistent", "cpu", "persistent_norm_fwd_kernel", "bfloat16", "65536"],
        ["rms_norm", "hopper", "cpu", "norm_fwd_parts_kernel", "bfloat16", "65536"],
    ]
    assert hopper == ["norm_fwd_parts_kernel"]
    told = str(explain("rms_norm", x, weight))
    assert "this kernel (persistent_norm_fwd_kernel) failed when it was tried with it: case wide: y is off by 3" in told
    assert "1. norm_fwd_parts_kernel on " in told and "(norm_fwd_parts_kernel) was tried with it on" in told


def test_a_kernel_of_softmax_that_fails_is_refused_alone(hopper, monkeypatch):
    ran = _outcomes(monkeypatch, (trial.FAILED, "case parts: y is off by 3"), (trial.PASSED, "case parts: right"))
    op, seed = declared()["softmax_dropout"], torch.zeros(2, dtype=torch.int64)
    for scale in (-1.0, 1.0):
        op.run(op.bind((torch.empty(4, 32_768, dtype=torch.bfloat16), seed, 0.1, scale), {}))
    assert [row[3] for row in ran] == ["softmax_dropout_fwd_parts_kernel", "softmax_dropout_fwd_whole_parts_kernel"]
    assert hopper == ["_softmax_fwd_wide_kernel", "softmax_dropout_fwd_whole_parts_kernel"]


def test_losses_are_tried_with_and_without_a_pass_over_logits(hopper, monkeypatch):
    ran = _outcomes(monkeypatch, (trial.FAILED, "case exp2: loss is off by 3"), (trial.PASSED, "case parts: right"))
    target = torch.zeros(8, dtype=torch.int64)
    for features in (64, 4096):
        x, weight = (torch.empty(n, features, dtype=torch.bfloat16, requires_grad=True) for n in (8, 8192))
        declared()["linear_cross_entropy"](x, weight, target, mode="chunks")
    assert "exp2_matmul_kernel" in ran[0][3] and "loss_grad_parts_kernel" in ran[1][3]
    assert hopper.count("loss_grad_parts_kernel") == 1 and "exp2_matmul_kernel" not in hopper


@pytest.mark.parametrize(("name", "backend"), list(_gluon_kernels()))
def test_every_kernel_takes_one_of_the_small_cases(name, backend):
    pytest.importorskip("triton")
    op, whole = declared()[name], program.whole(name)
    tap = Tap(op, backend, arch_named("sm90"))
    taken = []

    def look(args, pin):
        taken.append(not tap.refused(args))
        return Ready(op.reference)

    for case, dtype in program.small_cases(name):
        op._recent.clear()
        op._ready = look
        try:
            with use(**{whole.name: "reference"}):
                outputs_and_gradients(whole, whole.bind((), case.build(CPU, dtype, case.generator())))
        finally:
            del op._ready
            op._recent.clear()
        if any(taken):
            return
    pytest.fail(f"none of {len(taken)} small calls of {name} is one that {backend} takes")


def test_what_is_said_of_releases(monkeypatch):
    assert releases.tested("3.6.0") and not releases.tested("99.1.0") and not releases.tested(None)
    assert "values tested on NVIDIA H200" in releases.release_status("3.6.0")
    assert "not tested; each Gluon kernel is tried once" in releases.release_status("99.1.0")
    some = releases.release_status("3.7.1")
    assert not releases.tested("3.7.1") and "values of some kernels tested on NVIDIA H200" in some
    assert some.endswith("each Gluon kernel is tried once before it is used")
    monkeypatch.setattr(releases, "installed", lambda: "3.5.1")
    assert releases.too_old() == "Triton 3.5.1; the Hopper kernels are written in the Gluon of Triton 3.6"


def test_every_backend_that_an_op_lists_is_declared():
    listed = {backend for op in declared().values() for backend in op._modules}
    assert listed - {*backends.declared()} == set()


def test_what_a_declaration_may_say():
    with pytest.raises(ValueError, match="no backend 'nobodys'"):
        declare_backend("mine", like="nobodys")
    with pytest.raises(TypeError, match="not both"):
        declare_backend("mine", lambda device, pinned: None, like="hopper")
    assert "mine" not in backends.declared()


def test_a_gluon_name_that_is_gone_is_a_reason():
    code = """
import torch, sys
import triton.experimental.gluon.language as gl
del gl.allocate_shared_memory
from tilesmith.engine import backends, ops
import tilesmith.ops
backends._BACKENDS["hopper"] = backends.Backend("hopper", lambda device, pinned: None, True)
sys.modules["triton.experimental.gluon"] = None
print(tilesmith.explain("rms_norm", torch.ones(2, 8), torch.ones(8)))
"""
    pytest.importorskip("triton")
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert "not hopper: its kernels do not import with Triton" in done.stdout, done.stderr
