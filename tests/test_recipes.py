"""The recipe "a new op" of CONTRIBUTING.md, followed in a copy of the tree: its files are all that an op needs."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]

FILES = {
    "reference.py": '''"""What a scaled square and its gradient are, in plain PyTorch."""

import torch
from torch import Tensor


def scaled_square(x: Tensor, scale: float = 1.0) -> Tensor:
    """scale · x², element by element, in x's dtype. x: [...], floating. Computed in at least float32."""
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    return (scale * wide * wide).to(x.dtype)


def scaled_square_vjp(dout: Tensor, x: Tensor, scale: float) -> Tensor:
    """dx = 2 · scale · x · dout."""
    wide = torch.promote_types(x.dtype, torch.float32)
    return (2.0 * scale * x.to(wide) * dout.to(wide)).to(x.dtype)
''',
    "op.py": '''"""The sample family: what scaled_square is and what it accepts."""

import torch
from torch import Tensor

from tilesmith.engine import Op
from tilesmith.ops.sample import reference

FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def _fake(x: Tensor, scale: float) -> Tensor:
    return torch.empty_like(x)


def _fake_vjp(dout: Tensor, x: Tensor, scale: float) -> Tensor:
    return torch.empty_like(x)


def _check(x: Tensor, scale: float) -> None:
    if x.dtype not in FLOATS:
        raise TypeError(f"scaled_square: x has dtype {x.dtype}; float16, bfloat16, float32 and float64 are supported")


scaled_square_vjp = Op(reference.scaled_square_vjp, fake=_fake_vjp, outputs=("dx",), fold=("dout", "x"))
scaled_square = Op(reference.scaled_square, fake=_fake, vjp=scaled_square_vjp, check=_check, fold=("x",))
''',
    "cases.py": '''"""Example inputs of the sample family, and the bytes they must move."""

from torch import Tensor

from tilesmith.engine import Case, T

SMALL = frozenset({"test", "interpret"})

CASES = {
    "scaled_square": [
        Case("small", {"x": T(6, 33), "scale": 0.5}, SMALL),
        Case("strided", {"x": T(5, 40, layout="strided"), "scale": 2.0}, SMALL),
        Case("no_rows", {"x": T(0, 8), "scale": 2.0}, SMALL),
        Case("4096", {"x": T(4096, 4096), "scale": 2.0}, frozenset({"gpu", "bench"})),
    ]
}


def _bytes(count: int, x: Tensor) -> int:
    return count * x.numel() * x.element_size()


bytes_moved = {"scaled_square": lambda x: _bytes(2, x), "scaled_square_vjp": lambda x: _bytes(3, x)}
''',
    "__init__.py": '''"""Squares with a factor."""

from tilesmith.ops.sample.op import scaled_square, scaled_square_vjp

__all__ = ["scaled_square", "scaled_square_vjp"]
''',
}
REGISTERED = '    "tilesmith.ops.sample.op": ("scaled_square", "scaled_square_vjp"),\n'
HARNESS = ("test_ops.py", "test_op_arguments.py", "test_bench.py")


def test_the_files_of_the_recipe_make_an_op(tmp_path):
    recipe = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8").partition("## Recipe: a new op")[2]
    named = re.findall(r"^\| `src/tilesmith/ops/<family>/(\S+)`", recipe.partition("\n## ")[0], re.MULTILINE)
    assert sorted(named) == sorted(FILES)

    shutil.copytree(ROOT / "src", tmp_path / "src", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copytree(ROOT / "tests", tmp_path / "tests", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    family = tmp_path / "src" / "tilesmith" / "ops" / "sample"
    family.mkdir()
    for name, text in FILES.items():
        (family / name).write_text(text, encoding="utf-8")
    table = family.parent / "__init__.py"
    text = table.read_text(encoding="utf-8")
    assert text.count("_FAMILIES = {\n") == 1
    table.write_text(text.replace("_FAMILIES = {\n", "_FAMILIES = {\n" + REGISTERED), encoding="utf-8")

    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-k", "scaled_square"]
    done = subprocess.run(
        [*command, *(f"tests/{name}" for name in HARNESS)], cwd=tmp_path, capture_output=True, text=True,
        env={**os.environ, "PYTHONPATH": str(tmp_path / "src"), "PYTEST_ADDOPTS": ""},
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-4000:]
    assert int(re.search(r"(\d+) passed", done.stdout)[1]) > 20, done.stdout[-2000:]
