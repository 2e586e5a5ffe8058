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

FEW_SMS = replace(arch_named("sm90"), sms=9)  # so that a persistent CTA has several rows


def small(name, backends, *patterns, every=1):
    """(op, backend, case) of an op's small cases whose names match; of many every so many."""
    found = [c for c in cases(name) if {"interpret", "compile"} & c.tags and any(d.itemsize == 2 for d in c.dtypes)]
    found = [c for c in found if any(fnmatch(c.name, pattern) for pattern in patterns)][::every]
    assert found, (name, patterns)
    return [pytest.param(name, b, c, id=f"{name}-{b}-{c.name}") for b in backends.split() for c in found]


TILES = [
    *small(
        "attention", "hopper", "packed_apart", "d64_*small", "d72_small", "d128_*_small", "d192_*_small", "d256_small"
    ),
    *small("attention", "hopper", "d512_small", "decode_160_rows", "decode_1_kv_head_small"),
    *small("attention", "hopper_split", "decode_80_rows*", "decode_160_rows"),
    *small("attention", "hopper_cluster", "decode_one_token", "decode_odd_head", "decode_1_kv_head_small"),
    *small("attention", "hopper_latent", "decode_576"),
    *small("attention", "hopper_fp8", "e4m3*"),
    *small("attention_partial", "hopper", "fp32_*"),
    *small("experts", "hopper", "several_tiles", "sentinels", "whole_tiles", "whole_tiles_gpt_oss"),
    *small("experts_fp8", "hopper", "whole_tiles", "few_tokens"),
    *small("experts_vjp_fp8", "hopper", "whole_tiles*", "few_tokens"),
]
ROWS = [
    *small("rms_norm", "hopper hopper_persistent", "*parts*"),
    *small("layer_norm", "hopper hopper_persistent", "*parts*"),
    *small("add_rms_norm", "hopper", "*parts*"),
    *small("add_rms_norm", "hopper_persistent", "*parts_staying*"),
    *small("add_layer_norm", "hopper hopper_persistent", "*parts*"),
    *small("dropout_add_norm", "hopper", "*parts*"),
    *small("dropout_add_norm", "hopper_persistent", "*parts_persistent*"),
    *small("softmax", "hopper", "*parts*", "*wide*"),
    *small("softmax", "hopper_causal", "*causal_parts*", "*causal_swept*"),
    *small("softmax_dropout", "hopper", "*parts*", "*wide*"),
    *small("softmax_dropout", "hopper_causal", "*causal_parts*", "*causal_swept*"),
    *small("rms_norm_rope", "hopper", "*tiles*"),
    *small("linear_cross_entropy", "hopper", "*parts*"),
    *small("linear_cross_entropy", "hopper", "*exp2*", every=5),
    *small("dequantize_packed", "hopper", "*each_width*"),
]


def _checked(name, backend, case, arch):
    dtype = next(d for d in (torch.bfloat16, torch.float16) if d in case.dtypes)
    return check(ops()[name], backend, case, dtype, seed=len(case.name), arch=arch)


@pytest.mark.parametrize(("name", "backend", "case"), TILES)
def test_kernels_of_tiles(name, backend, case):
    result, ran = _checked(name, backend, case, "sm90")
    assert result.passed, result.message
    assert ran, "the kernels refuse it"


@pytest.mark.parametrize(("name", "backend", "case"), ROWS)
def test_kernels_of_rows(name, backend, case):
    result, ran = _checked(name, backend, case, FEW_SMS)
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
