"""The documents: their Python runs; the commands, options, names and files in them exist; links lead somewhere."""

from __future__ import annotations

import importlib.util
import inspect
import json
import os
import re
import runpy
import textwrap
from pathlib import Path

import pytest
import torch
from torch import nn

import tilesmith
from tilesmith.engine import ops

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted(p for d in ("benchmarks", "docs", "examples") for p in (ROOT / d).rglob("*.md"))]
README = PAGES[0].read_text(encoding="utf-8")
FENCED = re.compile(r"^```(\w*)[^\n]*\n(.*?)^```", re.MULTILINE | re.DOTALL)
NOT_RUN = re.MULTILINE | re.DOTALL
TESTED = {"kernels", "guides"}  # folders whose Python other tests run
PASTED = [PAGES[0], ROOT / "docs" / "quickstart.md"]  # pages of which a reader pastes any one block

each_page = pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))


def _small() -> dict:
    """What the names that a document leaves free are bound to."""
    x = torch.randn(6, 32, requires_grad=True)
    q, k, v = torch.randn(3, 1, 2, 9, 16, requires_grad=True)
    model = nn.Sequential(nn.Linear(32, 32), nn.RMSNorm(32))
    named = {"model": model, "x": x, "weight": torch.ones(32), "q": q, "k": k, "v": v}
    return named | {"tilesmith": tilesmith, "torch": torch}


def _blocks() -> list[tuple[str, str]]:
    pages = [page for page in PAGES if page.parent.name not in TESTED and page not in PASTED]
    texts = [(page.relative_to(ROOT), page.read_text(encoding="utf-8")) for page in pages]
    found = [(name, code) for name, text in texts for kind, code in FENCED.findall(text) if kind == "python"]
    return [(f"{name}-{k}", code) for k, (name, code) in enumerate(found)]


def _said(page: Path) -> str:
    """All that a page sets in the type of code."""
    text = page.read_text(encoding="utf-8")
    inline = re.findall(r"`([^`\n]+)`", FENCED.sub("", text))
    return "\n".join([*inline, *(code for kind, code in FENCED.findall(text) if not kind)])


def _source(module: str) -> str:
    return Path(importlib.util.find_spec(module).origin).read_text(encoding="utf-8")


@pytest.fixture
def as_before():
    """What a document registers is gone afterwards, for other tests."""
    before = set(ops())
    yield
    for name in set(ops()) - before:
        del ops()[name]
    if hasattr(torch.nn.attention, "restore_flash_attention_impl"):
        torch.nn.attention.restore_flash_attention_impl()


@pytest.mark.parametrize(("title", "code"), _blocks(), ids=[title for title, _ in _blocks()])
def test_python_runs(title, code, as_before):
    if "register_for_transformers" in code:
        pytest.importorskip("transformers")
    if "register_for_sdpa" in code and not hasattr(torch.nn.attention, "register_flash_attention_impl"):
        pytest.skip(f"torch {torch.__version__} lets nobody stand in for FlashAttention")
    exec(compile(code, title, "exec"), _small())


@each_page
def test_python_needs_no_tool_of_the_tests(page):
    """A reader has what `pip install` of the README brings."""
    code = "\n".join(_program(page))
    assert not re.search(r"^\s*(import|from) (pytest|hypothesis)\b", code, re.MULTILINE)


def _guides() -> list[Path]:
    """Pages whose Python is one program, to be pasted block after block. Others have a test of their own."""
    elsewhere = {
        "portable-kernels": "test_kernel_pages",
        "fp8-training": "test_kernel_pages",
        "long-context": "test_context_parallel",
        "sparse-attention": "test_attention_api",
    }
    guides = [page for page in sorted((ROOT / "docs" / "guides").glob("*.md")) if page.stem not in elsewhere]
    return [page for page in guides if _program(page)]


def _program(page: Path) -> list[str]:
    """The Python blocks of a page but for those marked as not run."""
    text = page.read_text(encoding="utf-8")
    return [
        code
        for kind, code in FENCED.findall(re.sub(r"<!-- not run -->\n```.*?^```", "", text, flags=NOT_RUN))
        if kind == "python"
    ]


@pytest.fixture
def alone(as_before, tmp_path, monkeypatch):
    """A page's files, process group and state of accelerate are gone afterwards."""
    monkeypatch.chdir(tmp_path)
    states = _accelerate_states()
    yield
    for state in states:
        state._reset_state()
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


def _accelerate_states() -> list:
    if importlib.util.find_spec("accelerate") is None:
        return []
    from accelerate.state import AcceleratorState, GradientState, PartialState

    return [AcceleratorState, GradientState, PartialState]


@pytest.mark.parametrize("page", _guides(), ids=lambda page: page.stem)
def test_a_page_runs_as_pasted(page, alone):
    """Block after block in one namespace that is empty at first, as a reader would type it in."""
    blocks = _program(page)
    _skip_without_packages("\n".join(blocks))
    names = {"__name__": "page"}
    for k, code in enumerate(blocks):
        exec(compile(code, f"{page.name}, block {k + 1}", "exec"), names)


def _skip_without_packages(code: str) -> None:
    for package in ("transformers", "accelerate", "peft"):
        if re.search(rf"^from {package}\b|register_for_{package}", code, re.MULTILINE):
            pytest.importorskip(package)
    if "register_for_sdpa" in code and not hasattr(torch.nn.attention, "register_flash_attention_impl"):
        pytest.skip(f"torch {torch.__version__} lets nobody stand in for FlashAttention")


def _pasted() -> list:
    return [pytest.param(code, id=f"{page.stem}-{k + 1}") for page in PASTED for k, code in enumerate(_program(page))]


@pytest.mark.parametrize("code", _pasted())
def test_a_block_runs_alone(code, alone, request):
    """Each block in a namespace of its own: a reader pastes the one that is wanted."""
    _skip_without_packages(code)
    exec(compile(code, request.node.name, "exec"), {"__name__": "page"})


EXAMPLES = {
    "codegen": "import numpy as np; rows = 2; x, y = np.ones((2, 2, 777), np.float32); w = np.ones(777, np.float32)",
    "kernels": "",
    "runtime": "import torch; rows = 2; gate, up, out = torch.ones(3, rows, 4096, dtype=torch.float16)",
}


@pytest.mark.parametrize("package", EXAMPLES)
def test_the_example_of_a_package_runs(package, tmp_path):
    if package != "kernels":
        pytest.importorskip("numpy")
    doc = inspect.getdoc(importlib.import_module(f"tilesmith.{package}"))
    code = textwrap.dedent(re.search(r"\n\n((?:    .*\n|\n)+)", doc + "\n")[1])
    (tmp_path / "example.py").write_text(f"{EXAMPLES[package]}\n{code}")  # a file: `build` reads a kernel's text
    runpy.run_path(str(tmp_path / "example.py"))


@each_page
def test_links_lead_somewhere(page):
    text = FENCED.sub("", page.read_text(encoding="utf-8"))
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        if "://" not in target:
            assert (page.parent / target.partition("#")[0]).exists(), target


@each_page
def test_tables_have_as_many_cells_as_columns(page):
    lines = FENCED.sub("", page.read_text(encoding="utf-8")).splitlines()
    for above, line in zip(["", *lines], lines):
        if line.startswith("|") and above.startswith("|"):
            assert len(re.findall(r"(?<!\\)\|", line)) == len(re.findall(r"(?<!\\)\|", above)), line


@each_page
def test_commands_exist(page):
    typer = pytest.importorskip("typer")
    from tilesmith import cli

    commands = typer.main.get_command(cli.build()).commands
    for name, rest in re.findall(r"\btilesmith (\w+)([^\n#]*)", _said(page)):
        assert name in commands, f"tilesmith {name}"
        known = {option for p in commands[name].params for option in (*p.opts, *p.secondary_opts)}
        assert set(re.findall(r"(?<!\S)--?[a-z][a-z-]*", rest)) <= known, f"tilesmith {name}{rest}"


@each_page
def test_make_targets_exist(page):
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))
    assert set(re.findall(r"(?:^|\n)make ([a-z-]+)", _said(page))) <= targets


@each_page
def test_files_and_modules_exist(page):
    said = _said(page)
    for name in set(re.findall(r"\btilesmith(?:\.\w+)+", said)):
        module, _, attribute = name.rpartition(".")
        if module == "tilesmith.integrations":  # each needs the library that it is for
            assert importlib.util.find_spec(name), name
        elif module.startswith("tilesmith.integrations."):
            assert re.search(rf"^(class|def) {attribute}\b", _source(module), re.MULTILINE), name
        else:
            assert hasattr(importlib.import_module(module), attribute) or importlib.util.find_spec(name), name
    for path in set(re.findall(r"(?:^|[\s(])((?:tests|examples|docs|benchmarks)/[\w/.-]*\w)", said)):
        assert (ROOT / path).exists(), path


def test_the_map_of_the_code_is_that_of_the_tree():
    """Files that docs/architecture.md names exist, and of the folders that it goes through it names every file."""
    text = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    files = [path.relative_to(ROOT / "src" / "tilesmith").as_posix() for path in (ROOT / "src").rglob("*.py")]
    files += [path.relative_to(ROOT / "src").as_posix() for path in (ROOT / "src" / "tilesmith").glob("*.py")]
    named = set(re.findall(r"`([\w/]+\.py)`", text))
    absent = [name for name in named if not any(f"/{path}".endswith(f"/{name}") for path in files)]
    assert not absent, absent
    for folder in ("engine", "distributed", "models", "models/attention", "models/generation", "validate"):
        section = text if folder.startswith("models/") else _section(text, folder)
        here = [path.name for path in (ROOT / "src" / "tilesmith" / folder).glob("*.py") if path.stem != "__init__"]
        assert not [name for name in here if f"`{name}`" not in section], folder


def _section(text: str, folder: str) -> str:
    (found,) = re.findall(rf"^## (?:What )?`{folder}/?`.*?(?=^## |\Z)", text, NOT_RUN)
    return found


def test_the_changelog_says_each_change_once():
    """Entries are short, and no two of a release share nearly all of their words."""
    for release in re.split(r"^## ", (ROOT / "CHANGELOG.md").read_text(encoding="utf-8"), flags=re.MULTILINE)[1:]:
        entries = [" ".join(entry.split()) for entry in re.findall(r"^- (.*?)(?=^- |^$|\Z)", release, NOT_RUN)]
        assert all(len(entry) <= 500 for entry in entries), max(entries, key=len)
        words = [set(re.findall(r"[a-z_0-9]{4,}", entry.lower())) for entry in entries]
        for k, mine in enumerate(words):
            for j, other in enumerate(words[:k]):
                least = min(len(mine), len(other))
                assert least < 10 or len(mine & other) < 0.65 * least, (entries[j], entries[k])


def test_the_ops_of_the_readme_exist():
    rows = re.findall(r"^\| (?:norm|rotary|gate|gemm|attention|loss) \|(.*)\|$", README, re.MULTILINE)
    assert len(rows) == 6
    for name in re.findall(r"`([a-z_]+)`", " ".join(rows)):
        assert hasattr(tilesmith.ops, name), name


def test_the_extras_of_the_readme_are_those_of_the_package():
    from tilesmith.hardware.facts import tomllib

    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    install = README.partition("## Install")[2].partition("\n## ")[0]
    for extra in project["optional-dependencies"]:
        assert extra in install, extra


def test_the_notebook_runs(alone):
    """Cell by cell, with a backend of matplotlib that shows nothing; it looks for the results above where it runs."""
    for package in ("transformers", "matplotlib"):
        pytest.importorskip(package)
    import matplotlib

    matplotlib.use("agg")
    import matplotlib.pyplot as plt

    os.symlink(ROOT / "benchmarks", "benchmarks")
    cells = json.loads((ROOT / "examples" / "tour.ipynb").read_text(encoding="utf-8"))["cells"]
    names, shown = {"__name__": "notebook"}, 0
    for k, cell in enumerate(cells):
        if cell["cell_type"] == "code":
            exec(compile("".join(cell["source"]), f"tour.ipynb, cell {k + 1}", "exec"), names)
            shown += len(plt.get_fignums())
            plt.close("all")
    assert shown == 3
