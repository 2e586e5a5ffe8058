"""Kernels in Gluon on a CPU: values and gradients of small cases, in drawn orders, and the faults that are found."""

import re
from dataclasses import replace
from fnmatch import fnmatch

import pytest
import torch

from tilesmith.engine import cases, launch, ops
from tilesmith.hardware.detect import arch_named

pytest.importorskip("triton")

from tilesmith.device.gluon import shim
from tilesmith.validate.gluon import Deadlock, check, interpreted

FEW = [case for case in cases("attention") if {"interpret", "compile"} & case.tags]
SMALL = replace(arch_named("sm90"), sms=9)  # so that a persistent CTA has several rows


@pytest.mark.parametrize("case", FEW, ids=lambda case: case.name)
def test_attention_by_its_kernels_for_hopper(case):
    dtype = next(d for d in case.dtypes if d.itemsize == 2)
    result, ran = check(ops()["attention"], "hopper", case, dtype, seed=len(case.name))
    assert result.passed, result.message
    if not ran:
        pytest.skip("the kernels refuse it")


def small_cases(name, backends, *pieces, every=1):
    """(op, backend, case) of an op's small cases with one of these pieces in their names."""
    found = [c for c in cases(name) if {"interpret", "compile"} & c.tags and "test" in c.tags]
    found = [c for c in found if torch.bfloat16 in c.dtypes and any(piece in c.name for piece in pieces)][::every]
    return [
        pytest.param(name, backend, c, id=f"{name}-{backend}-{c.name}") for backend in backends.split() for c in found
    ]


ROWS = [
    *small_cases("rms_norm", "hopper hopper_persistent", "parts"),
    *small_cases("layer_norm", "hopper hopper_persistent", "parts"),
    *small_cases("add_rms_norm", "hopper", "parts"),
    *small_cases("add_rms_norm", "hopper_persistent", "parts_staying"),
    *small_cases("add_layer_norm", "hopper hopper_persistent", "parts"),
    *small_cases("dropout_add_norm", "hopper", "parts"),
    *small_cases("dropout_add_norm", "hopper_persistent", "parts_persistent"),
    *small_cases("softmax", "hopper", "parts", "wide"),
    *small_cases("softmax", "hopper_causal", "causal_parts", "causal_swept"),
    *small_cases("softmax_dropout", "hopper", "parts", "wide"),
    *small_cases("softmax_dropout", "hopper_causal", "causal_parts", "causal_swept"),
    *small_cases("rms_norm_rope", "hopper", "tiles"),
    *small_cases("linear_cross_entropy", "hopper", "parts"),
    *small_cases("linear_cross_entropy", "hopper", "exp2", every=5),
    *small_cases("dequantize_packed", "hopper", "each_width"),
]


@pytest.mark.parametrize(("name", "backend", "case"), ROWS)
def test_rows_by_their_kernels_for_hopper(name, backend, case):
    result, ran = check(ops()[name], backend, case, torch.bfloat16, seed=len(case.name), arch=SMALL)
    assert result.passed, result.message
    if not ran:
        pytest.skip("the kernels refuse it")


def _squares(fault: str, seed: int, tiles: int = 5) -> float:
    """The error of `squares_kernel` with a fault."""
    from gluon_faults import squares_kernel

    layout = shim.gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    x = torch.randn(64 * tiles, 64, generator=torch.Generator().manual_seed(seed)).bfloat16()
    out = torch.zeros(64, 64, dtype=torch.bfloat16)
    given = [shim.TensorDescriptor(t, list(t.shape), [64, 1], [64, 64], layout) for t in (x, out)]
    with interpreted(seed) as ran:
        launch(squares_kernel, (1,), *given, tiles, FAULT=fault, num_warps=4)
    assert ran == ["squares_kernel"]
    each = x.double().view(tiles, 64, 64)
    return (out.double() - (each @ each.mT).sum(0)).abs().max().item()


@pytest.mark.parametrize("seed", range(8))
def test_a_kernel_without_a_fault_is_right_in_any_order(seed):
    assert _squares("", seed) <= 1.0  # half a unit of bf16 at 256, the largest sum


FAULTS = {
    "never waits for room": "more arrivals", "waits for the other phase": "Deadlock|more arrivals",
    "gives room back too early": "wrong", "uses a product at once": "TypeError", "arrives twice": "Deadlock|wrong",
    "never gives room back": "waits for phase", "overwrites what is stored": "wrong",
    "forgets a fence": "without a fence", "waits at a barrier alone": "named barrier 9",
}  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_found(fault):
    """In one of eight orders at least; a deadlock and a misuse in each."""
    found = []
    for seed in range(8):
        try:
            found.append("wrong" if not _squares(fault, seed) <= 1.0 else "")
        except (Deadlock, RuntimeError, TypeError) as problem:
            found.append(f"{type(problem).__name__}: {problem}")
    assert any(re.search(FAULTS[fault], one) for one in found), found


SERVED = {  # small cases that other kernels serve, and on how many multiprocessors (0: all): few make rings turn
    ("attention", "hopper_split"): (("decode_80_rows*", "decode_160_rows"), 0),
    ("attention", "hopper_cluster"): (("decode_one_token", "decode_odd_head", "decode_1_kv_head_small"), 0),
    ("attention", "hopper_latent"): (("decode_576",), 0),
    ("attention", "hopper_fp8"): (("e4m3*",), 2),
    ("attention_partial", "hopper"): (("fp32_*",), 0),
    ("experts", "hopper"): (("several_tiles", "sentinels", "whole_tiles", "whole_tiles_gpt_oss"), 2),
    ("experts_fp8", "hopper"): (("whole_tiles", "few_tokens"), 1),
    ("experts_vjp_fp8", "hopper"): (("whole_tiles*", "few_tokens"), 1),
}
OF_OTHERS = [
    pytest.param(op, backend, case, sms, id=f"{op}-{backend}-{case.name}")
    for (op, backend), (names, sms) in SERVED.items()
    for case in cases(op)
    if {"interpret", "compile"} & case.tags and any(fnmatch(case.name, name) for name in names)
]


@pytest.mark.parametrize(("op", "backend", "case", "sms"), OF_OTHERS)
def test_other_kernels_for_hopper(op, backend, case, sms):
    arch = replace(arch_named("sm90"), sms=sms) if sms else "sm90"
    dtype = next(d for d in case.dtypes if d.itemsize == 2)
    result, ran = check(ops()[op], backend, case, dtype, seed=len(case.name), arch=arch)
    assert result.passed, result.message
    assert ran, "the kernels refuse it"
