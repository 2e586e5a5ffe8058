"""Every row of bad_inputs.toml and bad_options.toml: the error is of its kind, its message has every piece, and nothing
is changed."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

import tilesmith
from tilesmith import attention, codegen, core, distributed, flash_attention, kernels, nn, ops, precision
from tilesmith.hardware.facts import tomllib

INPUTS = [
    row
    for file in ("bad_inputs.toml", "bad_options.toml")
    for row in tomllib.loads((Path(__file__).parent / file).read_text(encoding="utf-8"))["input"]
]
PIECES = ("argument", "came", "allowed", "do")
TELLS = re.compile(  # the verb of what to do
    r"\b(must|annotate|call|cast|choose|concatenate|expand|give|leave|make|move|pass|pin|take|use|write)\b"
    r"|\b(goes in|serves)\b|did you mean", re.IGNORECASE,
)  # fmt: skip
ERRORS = {
    "ValueError": ValueError, "TypeError": TypeError, "AttributeError": AttributeError,
    "NotImplementedError": NotImplementedError,
}  # fmt: skip
GENERATOR = torch.Generator().manual_seed(0)
TENSORS = {
    name: torch.randn(*shape, generator=GENERATOR)
    for name, shape in {
        "x": (2, 5, 8), "weight": (11, 8), "vector": (8,), "q": (2, 4, 6, 8), "k": (2, 2, 6, 8), "cos": (16, 4),
    }.items()
}  # fmt: skip
NAMES = {
    **TENSORS, "labels": torch.zeros(2, 5, dtype=torch.int64), "torch": torch, "tilesmith": tilesmith, "ops": ops,
    "nn": nn, "codegen": codegen, "core": core, "attention": attention, "precision": precision, "kernels": kernels,
    "flash_attention": flash_attention, "distributed": distributed,
    "packed": tuple(TENSORS[name][:1] for name in "qkk"), "starts": lambda *at: torch.tensor(at, dtype=torch.int32),
}  # fmt: skip


def test_the_table_is_long():
    assert len(INPUTS) >= 130
    assert len({row["call"] for row in INPUTS}) == len(INPUTS)


def test_every_row_has_what_to_do():
    assert not [row["call"] for row in INPUTS if not TELLS.search(row.get("do", ""))]


@pytest.mark.parametrize("row", INPUTS, ids=lambda row: row["call"][:60])
def test_the_error_says_what_a_user_needs(row):
    before = {name: x.clone() for name, x in TENSORS.items()}
    with pytest.raises(ERRORS[row["error"]]) as problem:
        eval(row["call"], dict(NAMES))
    said = str(problem.value)
    missing = [key for key in PIECES if row[key] not in said]
    assert not missing, f"{said!r} does not say {', '.join(f'{key}: {row[key]!r}' for key in missing)}"
    assert all(torch.equal(x, before[name]) for name, x in TENSORS.items())
