"""`explain` asked as users call: through the door of an op, in their context, with nothing run or drawn."""

from types import SimpleNamespace
from typing import NamedTuple

import pytest
import torch

import tilesmith
from tilesmith import _install, ops
from tilesmith.cli.recorder import choices_of
from tilesmith.engine import Op, Space, kernel, optimize_kernel, register_kernel
from tilesmith.engine.metadata import describer
from tilesmith.hardware.detect import arch_named, arch_of, assuming

DOORS = {
    "attention": lambda x: ((x, x, x, ops.Mask(causal=True)), {"dropout_p": 0.1}),
    "softmax_dropout": lambda x: ((x, 0.1), {}),
    "dropout_add_norm": lambda x: ((x, x), {"p": 0.1}),
    "bias_dropout": lambda x: ((x,), {}),
    "bias_dropout_residual": lambda x: ((x, x), {}),
}

Rows = torch.Tensor


def _double(x: torch.Tensor) -> torch.Tensor:
    return 2 * x


@pytest.mark.parametrize("name", DOORS)
def test_a_door_s_own_arguments(name):
    x = torch.randn(1, 2, 8, 16, requires_grad=True)
    args, kwargs = DOORS[name](x)
    state = torch.get_rng_state()
    choice = tilesmith.explain(name, *args, **kwargs)
    assert choice.kernel.op == name
    assert choice.kernel.backend == "reference"
    assert torch.equal(torch.get_rng_state(), state)
    with tilesmith.use(**{name: "reference"}):
        assert tilesmith.explain(name, *args, **kwargs).because == "pinned"
    getattr(ops, name)(*args, **kwargs)  # being asked leaves nothing behind


def test_a_door_s_own_errors():
    x = torch.randn(1, 2, 8, 16)
    with pytest.raises(TypeError, match="causal"):
        tilesmith.explain("attention", x, x, x, causal=True)
    with pytest.raises(ValueError, match="p must be in"):
        tilesmith.explain("bias_dropout", x, p=2.0)


def test_the_kernels_below_are_named():
    op = Op(_double, name="explain_double", fake=torch.empty_like)
    for backend, rank, reasons in (("first", 40, []), ("second", 30, ["it is Tuesday"]), ("third", 20, [])):
        register_kernel("explain_double", backend=backend, rank=rank, rejects=lambda call, why=reasons: why)(_double)
    choice = tilesmith.explain(op, torch.ones(3))
    assert [kernel.backend for kernel in choice.lower] == ["third", "reference"]
    assert str(choice).splitlines()[-1] == "  also possible: third (rank 20), reference (rank 0)"
    with tilesmith.use(explain_double="third"):
        assert tilesmith.explain(op, torch.ones(3)).lower == ()


def test_the_error_that_a_kernel_declares_is_told():
    op = Op(_double, name="explain_declared", fake=torch.empty_like, outputs=("doubled",))
    register_kernel("explain_declared", backend="rough", rank=20, errors={"doubled": 0.02})(_double)
    told = str(tilesmith.explain(op, torch.ones(3))).splitlines()
    assert told[1] == "  doubled: off by up to 0.02 beyond rounding"
    with tilesmith.use(explain_declared="reference"):
        assert "beyond rounding" not in str(tilesmith.explain(op, torch.ones(3)))


def test_a_configuration_above_the_registration_keeps_the_declared_error():
    op = Op(_double, name="explain_decorated", outputs=("doubled",), fake=torch.empty_like)

    @optimize_kernel()
    @register_kernel("explain_decorated", backend="rough", rank=20, errors={"doubled": 0.02})
    def rough(x: torch.Tensor) -> torch.Tensor:
        return 2 * x

    assert op.kernel("rough").errors == {"doubled": 0.02}
    assert tilesmith.explain(op, torch.ones(3)).kernel.backend == "rough"


def test_a_launcher_s_annotations_are_read_in_its_own_module():
    op = Op(_double, name="explain_annotated", fake=torch.empty_like)

    @register_kernel("explain_annotated", backend="own", rank=20)
    @optimize_kernel(num_warps=4)
    def own(x: "Rows", *, config) -> "Rows":  # as all annotations are under `from __future__ import annotations`
        return 2 * x

    assert tilesmith.explain(op, torch.ones(3)).kernel.backend == "own"


def test_pinned_values_that_reach_nothing_are_told():
    with pytest.warns(UserWarning, match="num_warps=4, num_stages=3 reach nothing: _double has no parameter `config`"):
        assert optimize_kernel(num_warps=4, num_stages=3)(_double)(2) == 4
    pinned = optimize_kernel(num_warps=4, num_stages=3, debug=False)(lambda *, config: config)
    assert pinned() == {"num_warps": 4, "num_stages": 3}


@pytest.mark.parametrize(
    ("decorate", "error", "words"),
    [
        (lambda: optimize_kernel(debug=1), TypeError, "optimize_kernel: debug must be True or False, got 1"),
        (lambda: optimize_kernel(num_warps=4)(3), TypeError, "decorates a function, got int"),
        (lambda: optimize_kernel(num_warps=4)(_Jitted()), TypeError, "function that launches it, not _Jitted"),
    ],
)
def test_what_optimize_kernel_cannot_decorate_is_named(decorate, error, words):
    with pytest.raises(error, match=words):
        decorate()


class _Jitted:
    """Like what `triton.jit` makes: called through a grid."""

    def __getitem__(self, grid):
        return lambda *args: None

    def __call__(self, *args):
        raise RuntimeError("there is no grid")


def test_a_kernel_tells_how_it_serves_a_call():
    op = Op(_double, name="explain_telling", fake=torch.empty_like)
    ways = lambda x: ["in one piece"] if x.shape[0] <= 4 else []  # noqa: E731
    register_kernel("explain_telling", backend="telling", rank=20, tells=ways)(_double)
    assert str(tilesmith.explain(op, torch.ones(3))).splitlines()[-1] == "  in one piece"
    assert tilesmith.explain(op, torch.ones(5)).note == ""
    assert tilesmith.explain(op, torch.ones(3), compiled=True).note.startswith("in one piece; under torch.compile")
    with tilesmith.use(explain_telling="reference"):
        assert tilesmith.explain(op, torch.ones(3)).note == ""
    with pytest.raises(TypeError, match="tells must be callable"):
        register_kernel("explain_telling", backend="mute", rank=30, tells="nothing")


def test_what_a_compiler_makes_of_a_call_is_told():
    op = Op(_double, name="explain_melting", fake=torch.empty_like, decompose=_double)
    register_kernel("explain_melting", backend="other", rank=20)(_double)
    assert "traced as plain PyTorch" in tilesmith.explain(op, torch.ones(3), compiled=True).note
    with tilesmith.use(explain_melting="other"):  # a pin holds for a compiled call too
        assert tilesmith.explain(op, torch.ones(3), compiled=True).note == "under torch.compile: one opaque call"


def test_a_compiled_loss_tells_what_it_does_where_sizes_may_change():
    x, weight, target = torch.ones(4, 8, requires_grad=True), torch.ones(9, 8, requires_grad=True), torch.arange(4)
    changing = "of a size that may change from call to call: mode chunks"
    assert changing not in tilesmith.explain("linear_cross_entropy", x, weight, target).note
    assert changing in tilesmith.explain("linear_cross_entropy", x, weight, target, compiled=True).note
    named = tilesmith.explain("linear_cross_entropy", x, weight, target, mode="keep", compiled=True).note
    assert changing not in named and "as asked" in named


class _Width(NamedTuple):
    width: int


def test_a_kernel_is_told_the_configuration_that_the_call_would_have(monkeypatch):
    op = Op(_double, name="explain_configured", fake=torch.empty_like)
    space = Space(dims=lambda x: {}, default=lambda dims, arch, dtype: _Width(4), choices={"width": (4, 8)})

    @register_kernel("explain_configured", backend="wide", rank=20, tells=lambda x, *, config: [f"by {config.width}"])
    @optimize_kernel(space=space)
    def wide(x: torch.Tensor, *, config: _Width) -> torch.Tensor:
        raise AssertionError("explain runs nothing")

    for x in (torch.ones(3), torch.ones(3, device="meta")):
        monkeypatch.setattr(kernel, "settings", lambda: SimpleNamespace(tune=True))
        assert tilesmith.explain(op, x).note == "by 4"
        with tilesmith.use(explain_configured="wide:width=8"):
            assert tilesmith.explain(op, x).note == "by 8"


def test_outputs_that_nobody_will_read_are_told():
    def double(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return 2 * x, x.sum(-1)

    def double_vjp(dy: torch.Tensor, total: torch.Tensor) -> torch.Tensor:
        return 2 * dy

    vjp = Op(double_vjp, name="explain_hiding_vjp", outputs=("dx",), fake=lambda dy, total: torch.empty_like(dy))
    op = Op(double, name="explain_hiding", vjp=vjp, outputs=("y", "total"), public=1)

    @register_kernel("explain_hiding", backend="hiding", rank=20)
    @optimize_kernel(space=Space(dims=lambda x: {}, default=lambda dims, arch, dtype: ()))
    def hiding(x: torch.Tensor, *, config: tuple, hidden: bool = True) -> tuple[torch.Tensor, torch.Tensor]:
        return 2 * x, x.sum(-1) if hidden else None

    x = torch.ones(3, 2)
    told = "no gradient is asked for, so nothing is stored for one: total"
    assert tilesmith.explain(op, x).note == told
    assert told not in tilesmith.explain(op, x, compiled=True).note  # there the op always has all its outputs
    asking = x.clone().requires_grad_()
    assert tilesmith.explain(op, asking).note == ""
    with torch.no_grad():
        assert tilesmith.explain(op, asking).note == told
    with tilesmith.use(explain_hiding="reference"):
        assert tilesmith.explain(op, x).note == ""
    assert [choice.note for choice in choices_of(op, {"x": x})] == [told]
    assert choices_of(op, {"x": asking})[0].note == ""


@pytest.mark.parametrize(
    ("features", "options", "reason"),
    [
        (2048, {}, ""),
        (4096, {}, "x has 4,096 features, more than 2,048"),
        (64, {"z_loss": 1e-4}, "z_loss is given"),
        (64, {"mode": "keep"}, "it takes less time than the launches in its place"),
        (4096, {"mode": "keep", "tokens": 3000}, "x has 4,096 features, more than 2,048"),
        (768, {"mode": "keep", "tokens": 3000}, ""),
        (60, {}, "rows of x or weight begin at other places than multiples of 16 bytes"),
    ],
)
@pytest.mark.usefixtures("needs_triton")
def test_linear_cross_entropy_on_hopper_tells_its_way(features, options, reason):
    tokens, options = options.get("tokens", 8), {k: v for k, v in options.items() if k != "tokens"}
    x, weight = (
        torch.empty(n, features, dtype=torch.bfloat16, device="meta", requires_grad=True) for n in (tokens, 16 * tokens)
    )
    target = torch.empty(tokens, dtype=torch.int64, device="meta")
    given = ops.linear_cross_entropy.bind((x, weight, target), {"mode": "chunks", **options})
    exp2 = "no pass over logits: up to 2,048 features their product stores exp2 of them"
    found, arch = ops.linear_cross_entropy.kernel("hopper"), arch_named("sm90")
    with assuming(arch):
        *launches, told = found.tells(*given, config=found.fn.configure.on(arch, given, {}))
    assert any("exp2_matmul_kernel" in line for line in launches) is not bool(reason)
    assert told == (f"a pass over the logits makes their gradient: {reason}" if reason else exp2)


def test_without_triton_nothing_is_claimed_of_a_gpu_that_is_not_here(monkeypatch):
    """A user on a laptop was told that an H100 would run the reference."""
    for module in ("choice", "backends"):
        monkeypatch.setattr(f"tilesmith.engine.{module}.triton_missing", lambda: "Triton is not installed (pip ...)")
    x, weight = torch.ones(8, 64), torch.ones(64)
    there = tilesmith.explain("rms_norm", x, weight, arch="sm90")
    assert there.because.startswith("not what sm90 would choose: without Triton its kernels cannot be asked")
    assert there.because.endswith(_install.triton())
    assert tilesmith.explain("rms_norm", x, weight).because == "rank 0, the highest that accepts"
    assert tilesmith.explain("rms_norm", x, weight, arch="apple").because.startswith("rank")


@pytest.mark.parametrize("assumed_first", [False, True])
def test_a_call_is_described_on_the_architecture_that_is_assumed(assumed_first):
    """Whatever was described before."""
    describe, x, there = describer("scaled", ["x"]), torch.ones(2), arch_named("sm90")
    for assumed in (assumed_first, not assumed_first):
        if assumed:
            with assuming(there):
                assert describe(x).arch is there
        else:
            assert describe(x).arch is arch_of("cpu")
