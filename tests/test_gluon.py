"""Kernels in Gluon on a CPU: values and gradients of small cases, in drawn orders, and the faults that are found."""

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
