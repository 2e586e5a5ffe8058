"""What `explain` says of a launcher's choice, held against what the launcher launches."""

from __future__ import annotations

import inspect
import re
import sys
from contextlib import ExitStack

import pytest
import torch

import tilesmith
from tilesmith.engine import cases, ops
from tilesmith.engine import launch as engine_launch
from tilesmith.engine.kernel import silent
from tilesmith.engine.registry import family_of
from tilesmith.engine.replay import Ready
from tilesmith.hardware.detect import arch_named
from tilesmith.ops.gemm import products
from tilesmith.validate.cases import outputs_and_gradients
from tilesmith.validate.offline import _Tap

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


@pytest.fixture
def launched(monkeypatch):
    """The names of the device kernels that launchers launch, which are recorded and not run."""
    pytest.importorskip("triton")
    names: list[str] = []

    def record(kernel, grid, *args, **options):
        names.append(getattr(kernel, "fn", kernel).__name__)

    for op in ops().values():
        for backend in op.backends():
            op.kernel(backend)
    for name, module in list(sys.modules.items()):
        if name.startswith("tilesmith.") and getattr(module, "launch", None) is engine_launch:
            monkeypatch.setattr(module, "launch", record)
    return names


def _compared(tap: _Tap, launched: list[str], found: list):
    """The tap's launcher, which also notes what the kernel tells of each call and what it then launches."""
    run, tells = tap.fn, tap.kernel.tells

    def fn(*args):
        launched.clear()
        config = {"config": run.configure(args, search=False)} if hasattr(run, "configure") else {}
        wanted = "config" in inspect.signature(tells).parameters
        told = list(tells(*args, **(config if wanted else {}))) if tells is not silent else []
        out = run(*args)
        found.append((tap.op.name, told, set(launched) - HELPERS))
        return out

    return fn


@pytest.mark.parametrize(("name", "backend"), SERVED, ids=lambda value: value)
def test_the_kernels_that_are_told_are_launched(launched, name, backend):
    op = ops()[name]
    served = [x for x in (op, op.vjp) if x is not None and backend in x.backends()]
    found: list[tuple[str, list[str], set[str]]] = []
    for case in [c for c in cases(name) if {"interpret", "compile"} & c.tags and torch.bfloat16 in c.dtypes][:6]:
        args = op.bind((), case.build(torch.device("cpu"), torch.bfloat16, case.generator()))
        taps = [_Tap(x, backend, arch_named("sm90")) for x in served]
        if taps[0].refused(args):
            continue
        with ExitStack() as stack:
            for tap in taps:
                fn = _compared(tap, launched, found)
                tap.open()
                tap.op._ready = lambda given, pin, tap=tap, fn=fn: Ready(tap.op.reference if tap.refused(given) else fn)
                stack.callback(tap.close)
            outputs_and_gradients(op, args)
    for who, told, kernels in found:
        named = {x[1] for x in (re.match(r"(\w+_kernel): ", sentence) for sentence in told) if x}
        if named and kernels:
            assert named == kernels, f"{who}: told {told}, launched {sorted(kernels)}"


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
