"""docs/kernels is what its command writes today; the code of docs/guides does what it says."""

from __future__ import annotations

import importlib.util
import re
import sys
from pathlib import Path

import pytest

from tilesmith.codegen import KernelError, build
from tilesmith.kernels import KERNELS

DOCS = Path(__file__).parents[1] / "docs"
GUIDE = (DOCS / "guides" / "portable-kernels.md").read_text(encoding="utf-8")


def module(path: Path):
    """A file as a module; the kernels in it keep their text."""
    spec = importlib.util.spec_from_file_location(path.stem, path)
    made = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = made
    spec.loader.exec_module(made)
    return made


def test_pages_are_fresh():
    generate = module(DOCS / "kernels" / "generate.py")
    wanted = generate.pages()
    assert {page.kernel for page in generate.PAGES.values()} == set(KERNELS)
    found = {path.name: path.read_text(encoding="utf-8") for path in (DOCS / "kernels").glob("*.md")}
    stale = sorted(name for name in wanted.keys() | found.keys() if wanted.get(name) != found.get(name))
    assert not stale, "write them anew with: python docs/kernels/generate.py"


def test_the_guide(tmp_path):
    blocks = re.findall(r"```(python(?: refused)?)\n(.*?)```\n(?:```text\n(.*?)```)?", GUIDE, re.DOTALL)
    plain = "\n\n".join(code for kind, code, _ in blocks if kind == "python")
    (tmp_path / "guide_plain.py").write_text(plain)
    names = vars(module(tmp_path / "guide_plain.py"))
    refused = [(code, said) for kind, code, said in blocks if kind != "python"]
    assert len(refused) == 8
    for k, (code, said) in enumerate(refused):
        path = tmp_path / f"guide_{k}.py"
        path.write_text("from tilesmith.codegen import *\nTHREADS = 64\n" + code)
        with pytest.raises(KernelError) as problem:
            build(module(path).refused, (names["THREADS"], 1, 1))
        assert " ".join(said.split()) in str(problem.value)
        assert re.search(rf"guide_{k}\.py:\d+: ", str(problem.value))


@pytest.mark.parametrize("page", ["adaptive-precision", "fp8-training"])
def test_the_code_of_a_guide_runs(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    text = (DOCS / "guides" / f"{page}.md").read_text(encoding="utf-8")
    exec("\n".join(re.findall(r"```python\n(.*?)```", text, re.DOTALL)), {"__name__": "guide"})


def test_the_guide_to_integrations():
    pytest.importorskip("transformers")
    text = (DOCS / "guides" / "integrations.md").read_text(encoding="utf-8")
    exec("\n".join(re.findall(r"```python\n(.*?)```", text, re.DOTALL)), {"__name__": "guide"})


def test_links_of_the_pages_lead_somewhere():
    for page in [*DOCS.glob("kernels/*.md"), *DOCS.glob("guides/*.md")]:
        for target in re.findall(r"\]\(([^)#:]+)\)", page.read_text(encoding="utf-8")):
            assert (page.parent / target).exists(), f"{page.name}: {target}"
