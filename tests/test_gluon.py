"""Kernels in Gluon on a CPU: values and gradients of small cases, in drawn orders, and the faults that are found."""

from fnmatch import fnmatch

import pytest

from tilesmith.engine import cases, ops

pytest.importorskip("triton")

from tilesmith.validate.gluon import check

FEW = [case for case in cases("attention") if {"interpret", "compile"} & case.tags]
RAN: set[str] = set()


@pytest.mark.parametrize("case", FEW, ids=lambda case: case.name)
def test_attention_by_its_kernels_for_hopper(case):
    dtype = next(d for d in case.dtypes if d.itemsize == 2)
    result, ran = check(ops()["attention"], "hopper", case, dtype, seed=len(case.name))
    assert result.passed, result.message
    if not ran:
        pytest.skip("the kernels refuse it")
    RAN.update(ran)


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
    dtype = next(d for d in case.dtypes if d.itemsize == 2)
    result, ran = check(ops()[op], backend, case, dtype, seed=len(case.name), sms=sms)
    assert result.passed, result.message
    assert ran, "the kernels refuse it"
