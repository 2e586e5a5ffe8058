"""Kernels in Gluon on a CPU: values and gradients of small cases, in drawn orders, and the faults that are found."""

import re
from dataclasses import replace
from fnmatch import fnmatch

import pytest
import torch

from tilesmith.engine import Case, cases, launch, ops
from tilesmith.hardware.detect import arch_named

pytest.importorskip("triton")

from tilesmith.device.gluon import shim
from tilesmith.ops.attn.cases.attention import attend
from tilesmith.ops.attn.plan import hopper_forward
from tilesmith.ops.attn.plan.configs import HopperConfig
from tilesmith.ops.attn.plan.shape import Shape
from tilesmith.validate.gluon import Deadlock, check, computed, interpreted


def small(name, backends, *patterns, sms=0):
    """(op, backend, case, multiprocessors) of an op's small cases whose names match. sms: 0 for all of an H200's; on
    few, CTAs that stay have several tiles or rows."""
    found = [c for c in cases(name) if {"interpret", "compile"} & c.tags and any(d.itemsize == 2 for d in c.dtypes)]
    found = [c for c in found if any(fnmatch(c.name, pattern) for pattern in patterns)]
    assert found, (name, patterns)
    on = f"-{sms}" if sms else ""
    return [pytest.param(name, b, c, sms, id=f"{name}-{b}-{c.name}{on}") for b in backends.split() for c in found]


SERVED = [
    *small("attention", "hopper", "packed_apart", "d64_*small", "d72_small", "d128_*_small", "d192_*_small"),
    *small("attention", "hopper", "d256_small", "d512_small", "decode_160_rows", "decode_1_kv_head_small"),
    *small("attention", "hopper_split", "decode_80_rows*", "decode_160_rows"),
    *small("attention", "hopper_cluster", "decode_one_token", "decode_odd_head", "decode_1_kv_head_small"),
    *small("attention", "hopper_cluster", "decode_one_token", "decode_lengths_of_64*", sms=2),
    *small("attention", "hopper_latent", "decode_576"),
    *small("attention", "hopper_fp8", "e4m3*", sms=2),
    *small("attention_partial", "hopper", "fp32_*"),
    *small("experts", "hopper", "several_tiles", "sentinels", "whole_tiles", "whole_tiles_gpt_oss", sms=2),
    *small("experts_fp8", "hopper", "whole_tiles", "few_tokens", sms=1),
    *small("experts_vjp_fp8", "hopper", "whole_tiles*", "few_tokens", sms=1),
    *small("rms_norm", "hopper hopper_persistent", "*parts*", sms=9),
    *small("layer_norm", "hopper hopper_persistent", "*parts*", sms=9),
    *small("add_rms_norm", "hopper", "*parts*", sms=9),
    *small("add_rms_norm", "hopper_persistent", "*parts_staying*", sms=9),
    *small("add_layer_norm", "hopper hopper_persistent", "*parts*", sms=9),
    *small("dropout_add_norm", "hopper", "*parts*", sms=9),
    *small("dropout_add_norm", "hopper_persistent", "*parts_persistent*", sms=9),
    *small("softmax", "hopper", "parts*", sms=9),
    *small("softmax", "hopper_causal", "*causal_parts*", "*causal_swept*", sms=9),
    *small("softmax_dropout", "hopper", "parts*", sms=9),
    *small("softmax_dropout", "hopper_causal", "*causal_parts*", "*causal_swept*", sms=9),
    *small("rms_norm_rope", "hopper", "*tiles*", sms=9),
    *small("linear_cross_entropy", "hopper", "*parts*", sms=9),
    *small("linear_cross_entropy", "hopper", "exp2_wide_sum*", "exp2_kept_again*", sms=9),
    *small("dequantize_packed", "hopper", "*each_width*", sms=9),
]


@pytest.mark.parametrize(("name", "backend", "case", "sms"), SERVED)
def test_kernels_are_right_in_a_drawn_order(name, backend, case, sms):
    dtype = next(d for d in (torch.bfloat16, torch.float16) if d in case.dtypes)
    arch = replace(arch_named("sm90"), sms=sms) if sms else "sm90"
    result, ran = check(ops()[name], backend, case, dtype, seed=len(case.name), arch=arch)
    assert result.passed, result.message
    assert ran, "the kernels refuse it"


@pytest.mark.parametrize(
    ("tokens", "keys", "dim", "value_dim", "causal"),
    [(260, 260, 96, 96, True), (200, 288, 96, 96, False), (450, 450, 80, 80, True), (600, 600, 96, 88, True)],
)
def test_tiles_whose_keys_are_no_power_of_two(tokens, keys, dim, value_dim, causal, monkeypatch):
    """Boxes of queries in turn, and out in the place of queries."""
    monkeypatch.setattr(hopper_forward, "_chosen_tiles", lambda *_: (HopperConfig(3, 96, 3), ""))
    hopper_forward.hopper_forward.cache_clear()
    try:
        case = Case("", attend(1, 3, 1, tokens, keys, dim, value_dim, causal=causal, sinks=causal), {"test"})
        arch = replace(arch_named("sm90"), sms=2)
        result, ran = check(ops()["attention"], "hopper", case, torch.bfloat16, seed=tokens, arch=arch)
    finally:
        hopper_forward.hopper_forward.cache_clear()
    assert result.passed, result.message
    assert "attention_fwd_joined_kernel" in ran


@pytest.mark.parametrize("tiles", [(1, 64, 3), (2, 64, 3), (3, 64, 3), (4, 64, 3), (2, 128, 2), (3, 128, 2)])
@pytest.mark.parametrize(("tokens", "keys"), [(300, 300), (200, 392), (420, 292), (70, 70)], ids=lambda n: f"{n}")
def test_causal_consumers_that_mask_one_block(tokens, keys, tiles, monkeypatch):
    """Lengths that fill no block, and more and fewer keys than queries: consumers see what no other does."""
    config = HopperConfig(*tiles, heads=1)
    monkeypatch.setattr(hopper_forward, "_chosen_tiles", lambda *_: (config, ""))
    hopper_forward.hopper_forward.cache_clear()
    call = attend(1, 3, 3, tokens, keys, 64, causal=True, softcap=9.0 if keys > tokens else 0.0, sinks=keys < tokens)
    s = Shape(1, 3, 3, tokens, keys, 64, 64, 2, 2, causal=True, window_right=0)
    plan = hopper_forward.hopper_forward(s, arch_named("sm90"), config)
    assert plan.step("attention_fwd_kernel").constants["ONE_MASK"] == (
        tiles[:2] != (2, 128) or (-tokens % 128 < 64 and (keys - tokens) % 128 == 0)
    )
    try:
        arch = replace(arch_named("sm90"), sms=2)
        result, ran = check(ops()["attention"], "hopper", Case("", call, {"test"}), torch.bfloat16, tokens, arch=arch)
    finally:
        hopper_forward.hopper_forward.cache_clear()
    assert result.passed, result.message
    assert "attention_fwd_kernel" in ran


def _gradients(deterministic, seed):
    args = ops()["attention"].bind(
        (), Case("", attend(1, 2, 1, 300, 300, 64, causal=True, deterministic=deterministic), {"test"}).build(
            torch.device("cpu"), torch.bfloat16, torch.Generator().manual_seed(1)))  # fmt: skip
    found, ran = computed(ops()["attention"], "hopper", args, seed)
    assert "attention_dkv_kernel" in ran
    return found


def test_ordered_gradients_have_the_same_bits_in_every_order():
    one, *others = (_gradients(True, seed) for seed in range(4))
    assert all(torch.equal(one[name], other[name]) for name in one for other in others)
    free = [_gradients(False, seed)["dq"] for seed in range(4)]
    assert not all(torch.equal(free[0], other) for other in free)


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
