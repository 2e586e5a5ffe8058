"""Kernels in Gluon on a CPU: values and gradients of small cases, in drawn orders, and the faults that are found."""

from dataclasses import replace

import pytest
import torch

from tilesmith.engine import cases, ops
from tilesmith.hardware.detect import arch_named

pytest.importorskip("triton")

from tilesmith.validate.gluon import check

FEW = [case for case in cases("attention") if {"interpret", "compile"} & case.tags]
RAN: set[str] = set()
SMALL = replace(arch_named("sm90"), sms=9)  # so that a persistent CTA has several rows


@pytest.mark.parametrize("case", FEW, ids=lambda case: case.name)
def test_attention_by_its_kernels_for_hopper(case):
    dtype = next(d for d in case.dtypes if d.itemsize == 2)
    result, ran = check(ops()["attention"], "hopper", case, dtype, seed=len(case.name))
    assert result.passed, result.message
    if not ran:
        pytest.skip("the kernels refuse it")
    RAN.update(ran)


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
