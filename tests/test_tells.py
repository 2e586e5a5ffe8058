"""What `explain` says of a launcher's choice, held against what the launcher launches."""

from __future__ import annotations

import inspect
import re
from contextlib import ExitStack

import pytest
import torch

import tilesmith
from tilesmith.engine import cases, ops
from tilesmith.engine.kernel import silent
from tilesmith.engine.launcher import ANY_THREAD, in_place_of_launches
from tilesmith.engine.registry import family_of
from tilesmith.engine.replay import Ready
from tilesmith.hardware.detect import arch_named, assuming
from tilesmith.ops.gemm import products
from tilesmith.validate.cases import outputs_and_gradients
from tilesmith.validate.offline import Tap
from tilesmith.validate.trial import _size

PLANNED = {f"tilesmith.ops.{name}" for name in ("norm", "rotary", "loss", "moe")}
FAMILIES = {f"tilesmith.ops.{name}" for name in ("norm", "elementwise", "rotary", "gemm", "loss", "quant", "moe")}
HELPERS = {"_column_sums_kernel", "_sum_kernel", "scale_kernel", "_activation_kernel", "_activation_bwd_kernel"}
"""Sums of partial rows, scaling and activations: passes that follow or precede the kernel that was chosen."""
SERVED = [
    (op.name, backend)
    for op in list(ops().values())
    if family_of(op.reference.__module__) in FAMILIES and not op.name.endswith("_vjp")
    for backend in op.backends()
    if backend.startswith(("triton", "hopper"))
]


def _has_plans(name: str, backend: str) -> bool:
    return family_of(ops()[name].reference.__module__) in PLANNED


@pytest.fixture
def launched():
    """The names of the device kernels that launchers launch, in order, which are recorded and not run."""
    pytest.importorskip("triton")
    names: list[str] = []
    with in_place_of_launches(lambda kernel, *given: names.append(kernel.__name__), ANY_THREAD):
        yield names


def _compared(tap: Tap, launched: list[str], found: list):
    """The tap's launcher, which also notes what the kernel tells of each call, the names in its plan, and what it then
    launches."""
    run, kernel = tap.fn, tap.kernel

    def fn(*args):
        launched.clear()
        config = {"config": run.configure(args, search=False)} if hasattr(run, "configure") else {}
        wanted = "config" in inspect.signature(kernel.tells).parameters
        told = list(kernel.tells(*args, **(config if wanted else {}))) if kernel.tells is not silent else []
        plan = None if kernel.plans is None else kernel.plans(*args, **config, arch=tap.arch)
        assert not launched, "a plan launches nothing"
        out = run(*args)
        found.append((tap.op.name, told, plan, list(launched)))
        return out

    return fn


def _calls(name: str, backend: str, chosen: list, launched: list[str]) -> list[tuple]:
    """What `_compared` finds of the cases in `chosen`, forward and backward."""
    op = ops()[name]
    served = [x for x in (op, op.vjp) if x is not None and backend in x.backends()]
    found: list[tuple] = []
    for case, dtype in chosen:
        args = op.bind((), case.build(torch.device("cpu"), dtype, case.generator()))
        taps = [Tap(x, backend, arch_named("sm90")) for x in served]
        if taps[0].refused(args):
            continue
        with ExitStack() as stack:
            stack.enter_context(assuming(arch_named("sm90")))
            for tap in taps:
                fn = _compared(tap, launched, found)
                tap.open()
                tap.op._ready = lambda given, pin, tap=tap, fn=fn: Ready(tap.op.reference if tap.refused(given) else fn)
                stack.callback(tap.close)
            outputs_and_gradients(op, args)
    return found


@pytest.mark.parametrize(("name", "backend"), SERVED, ids=lambda value: value)
def test_the_kernels_that_are_told_are_launched(launched, name, backend):
    chosen = [c for c in cases(name) if {"interpret", "compile"} & c.tags and torch.bfloat16 in c.dtypes][:6]
    for who, told, plan, names in _calls(name, backend, [(c, torch.bfloat16) for c in chosen], launched):
        if plan is not None:
            continue
        named = {x[1] for x in (re.match(r"(\w+_kernel): ", sentence) for sentence in told) if x}
        kernels = set(names) - HELPERS
        if named and kernels:
            assert named == kernels, f"{who}: told {told}, launched {sorted(kernels)}"


@pytest.mark.parametrize(("name", "backend"), [row for row in SERVED if _has_plans(*row)], ids=lambda value: value)
def test_plans_name_the_kernels_that_are_launched(launched, name, backend):
    """By each case that is small enough to be built here; a large one differs in its tensors' sizes."""
    chosen = [(c, dtype) for c in cases(name) if _size(c) <= 2**21 for dtype in c.dtypes]
    found = _calls(name, backend, chosen, launched)
    assert found, f"no small case of {name} is one that {backend} takes"
    for who, told, plan, names in found:
        assert not plan.problem and [step.kernel for step in plan.steps] == names, (who, plan, names)
        assert all(any(f"{kernel} on " in line for line in told) for kernel in names), (who, told, names)


def _row(op: str, *args, config) -> str:
    return "; ".join(ops()[op].kernel("triton").tells(*args, config=config))


def test_rows_that_registers_hold_are_read_once():
    pytest.importorskip("triton")
    from tilesmith.ops.norm.triton.norm import ForwardConfig

    short, wide = torch.ones(4, 512), torch.ones(4, 65_536)
    config = ForwardConfig(2048, 0, 4, 1)
    rest = (None, 1e-6, 0.0, "fp32")
    assert "4 x 512 are held in registers" in _row("rms_norm", short, *rest, config=config)
    assert "65536 columns are read twice, in blocks of 8192" in _row("rms_norm", wide, *rest, config=config)


def test_experts_tell_their_tiles_and_their_index():
    pytest.importorskip("triton")
    one, few, many = (torch.zeros(tokens, 2, dtype=torch.int64) for tokens in (4, 40, 4096))
    gate_up, down = torch.ones(4, 16, 8), torch.ones(4, 8, 8)
    kernel = ops()["experts"].kernel("triton")
    for indices, told in (
        (one, "8 pairs need no index"),
        (few, "80 pairs are put in the order of experts by one launch"),
        (many, "four launches"),
    ):
        x = torch.ones(indices.shape[0], 8)
        config = kernel.fn.configure((x, gate_up, down, indices, indices.float()), search=False)
        assert told in "; ".join(kernel.tells(x, gate_up, down, indices, indices.float(), config=config))


def test_gradients_tell_where_they_come_from():
    x, weight, target = torch.ones(3, 4), torch.ones(5, 4), torch.zeros(3, dtype=torch.int64)
    vjp = ops()["linear_cross_entropy_vjp"]
    none = x.new_empty(0)
    given = {
        "dloss": torch.ones(()), "x": x, "weight": weight, "target": target, "bias": None, "class_weight": None,
        "lse": torch.ones(3), "divisors": none, "x_grad": none, "weight_grad": none, "bias_grad": none,
        "logit_grad": none, "logit_factors": none, "ignore_index": -100, "label_smoothing": 0.0, "z_loss": 0.0,
        "scale": 1.0, "softcap": 0.0, "reduction": "mean", "chunk_tokens": 0, "accumulate_fp32": True, "mode": "",
        "output_mask": [True, True, False], "overwrite": False,
    }  # fmt: skip
    tells = vjp.kernel("chunked").tells
    assert "computed again" in tells(*given.values())[0]
    assert "that the forward computed" in tells(*(given | {"x_grad": x, "weight_grad": weight}).values())[0]
    assert "matmuls of the logits' gradient" in tells(*(given | {"logit_grad": torch.ones(3, 5)}).values())[0]


def test_explain_shows_what_a_kernel_tells():
    text = str(tilesmith.explain("linear_act", torch.ones(2, 4), torch.ones(3, 4), None, "relu"))
    assert "relu is an elementwise pass of its own: the library has no epilogue for it here" in text


def test_epilogues_serve_few_activations():
    assert not products.has_epilogue(torch.ones(2, 4), "relu")  # a CPU's library has none
    assert products.epilogue_tells(torch.ones(2, 4), "none") == []
