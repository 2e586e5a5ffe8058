"""Every row of bad_inputs.toml: the error is of its kind, its message has every piece, and nothing is changed."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import tilesmith
from tilesmith import attention, core, distributed, flash_attention, kernels, nn, ops, precision
from tilesmith.hardware.facts import tomllib

INPUTS = tomllib.loads((Path(__file__).parent / "bad_inputs.toml").read_text(encoding="utf-8"))["input"]
ERRORS = {"ValueError": ValueError, "TypeError": TypeError, "AttributeError": AttributeError}
GENERATOR = torch.Generator().manual_seed(0)
TENSORS = {
    name: torch.randn(*shape, generator=GENERATOR)
    for name, shape in {
        "x": (2, 5, 8), "weight": (11, 8), "vector": (8,), "q": (2, 4, 6, 8), "k": (2, 2, 6, 8), "cos": (16, 4),
    }.items()
}  # fmt: skip
NAMES = {
    **TENSORS, "labels": torch.zeros(2, 5, dtype=torch.int64), "torch": torch, "tilesmith": tilesmith, "ops": ops,
    "nn": nn, "core": core, "attention": attention, "precision": precision, "kernels": kernels,
    "flash_attention": flash_attention, "distributed": distributed,
}  # fmt: skip


def test_the_table_is_long():
    assert len(INPUTS) >= 60
    assert len({row["call"] for row in INPUTS}) == len(INPUTS)


@pytest.mark.parametrize("row", INPUTS, ids=lambda row: row["call"][:60])
def test_the_error_says_what_a_user_needs(row):
    before = {name: x.clone() for name, x in TENSORS.items()}
    with pytest.raises(ERRORS[row["error"]]) as problem:
        eval(row["call"], dict(NAMES))
    said = str(problem.value)
    missing = [key for key in ("argument", "came", "allowed", "do") if row.get(key, "") not in said]
    assert not missing, f"{said!r} does not say {', '.join(f'{key}: {row[key]!r}' for key in missing)}"
    assert all(torch.equal(x, before[name]) for name, x in TENSORS.items())
