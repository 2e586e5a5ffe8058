"""The source archive and the wheel made of it: installed alone beside torch, the library works."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest
import torch

from tilesmith import _install
from tilesmith.hardware.facts import tomllib

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
BUILD = "import sys, hatchling.build as b; print(getattr(b, sys.argv[1])(sys.argv[2]))"
USED = """
import json, sys, torch, tilesmith
from tilesmith import bench, hardware, ops
x = torch.randn(4, 32, requires_grad=True)
ops.rms_norm(x, torch.ones(32)).sum().backward()
model = tilesmith.optimize(torch.nn.Sequential(torch.nn.Linear(32, 32), torch.nn.RMSNorm(32)))
print(json.dumps({
    "file": tilesmith.__file__, "version": tilesmith.__version__, "replaced": len(model.tilesmith_report.replaced),
    "explained": str(tilesmith.explain("rms_norm", torch.ones(64, 4096), torch.ones(4096), arch="sm90")),
}))
"""


def _run(*command: str, cwd: Path) -> str:
    environment = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "PYTHONSAFEPATH")}
    done = subprocess.run(command, cwd=cwd, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> Path:
    """The wheel, built from the unpacked source archive as an index's users would get it."""
    if importlib.util.find_spec("hatchling") is None:
        if os.environ.get("TILESMITH_REQUIRE_ALL", "") not in ("", "0"):
            pytest.fail("hatchling is not installed (pip install hatchling)")
        pytest.skip("hatchling is not installed (pip install hatchling)")
    folder = tmp_path_factory.mktemp("dist")
    archive = folder / _run(sys.executable, "-c", BUILD, "build_sdist", str(folder), cwd=ROOT).split()[-1]
    with tarfile.open(archive) as packed:
        packed.extractall(folder, filter="data") if hasattr(tarfile, "data_filter") else packed.extractall(folder)
    source = folder / archive.name.removesuffix(".tar.gz")
    texts = ("README.md", "LICENSE", "CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md", "docs/index.md")
    for name in (*texts, "mkdocs.yml", "hatch_build.py", "tests/bad_inputs.toml", "examples"):
        assert (source / name).exists(), name
    return folder / _run(sys.executable, "-c", BUILD, "build_wheel", str(folder), cwd=source).split()[-1]


def test_the_wheel_holds_what_is_read_at_run_time(wheel):
    names = set(zipfile.ZipFile(wheel).namelist())
    package = ROOT / "src" / "tilesmith"
    for path in [*package.rglob("*.py"), *package.rglob("*.pyi"), *package.rglob("*.json"), *package.rglob("*.toml")]:
        assert f"tilesmith/{path.relative_to(package).as_posix()}" in names
    assert {"tilesmith/py.typed", "tilesmith/bench/measured/model.json"} <= names
    assert not [name for name in names if name.startswith(("tests", "docs", "examples"))]


def test_the_description_has_no_link_that_leads_nowhere(wheel):
    """An index shows the README away from its repository, which has no public address: none is invented."""
    archive = zipfile.ZipFile(wheel)
    (name,) = [name for name in archive.namelist() if name.endswith(".dist-info/METADATA")]
    head, _, text = archive.read(name).decode().partition("\n\n")
    assert "Description-Content-Type: text/markdown" in head and text.startswith("# Tilesmith")
    assert "Project-URL" not in head and "Home-page" not in head
    relative = [target for target in re.findall(r"\]\(([^)\s]+)\)", text) if not target.startswith(("#", "https://"))]
    assert not relative
    assert "quickstart (`docs/quickstart.md`)" in text


def test_with_an_address_links_are_absolute():
    pytest.importorskip("hatchling")
    spec = importlib.util.spec_from_file_location("hatch_build", ROOT / "hatch_build.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    readme = "![a curve](benchmarks/a.svg) [the `guide`](docs/g.md#b), [here](#measured), [there](https://example.org/)"
    home = "https://host/owner/name"
    assert module.description(readme, home) == (
        f"![a curve]({home}/raw/main/benchmarks/a.svg) [the `guide`]({home}/blob/main/docs/g.md#b), "
        "[here](#measured), [there](https://example.org/)"
    )
    metadata = {"urls": {"Source": f"{home}/"}}
    module.Metadata(str(ROOT), {}).update(metadata)
    assert f"[quickstart]({home}/blob/main/docs/quickstart.md)" in metadata["readme"]["text"]


def test_the_wheel_works_alone_beside_torch(wheel, tmp_path):
    _run(sys.executable, "-m", "venv", "--without-pip", str(tmp_path / "env"), cwd=tmp_path)
    (home,) = (tmp_path / "env").glob("lib/python*/site-packages")
    zipfile.ZipFile(wheel).extractall(home)
    (home / "torch.pth").write_text(str(Path(torch.__file__).parents[1]) + "\n")  # its packages, not their .pth files
    told = json.loads(_run(str(tmp_path / "env" / "bin" / "python"), "-c", USED, cwd=tmp_path).splitlines()[-1])
    assert Path(told["file"]).parents[1] == home
    assert told["version"] == PROJECT["version"]
    triton = importlib.util.find_spec("triton") is not None  # it lies beside torch
    assert told["explained"].startswith("rms_norm -> triton" if triton else "rms_norm -> reference (not what sm90")
    assert told["replaced"] == 1
    shown = _run(str(tmp_path / "env" / "bin" / "python"), "-m", "tilesmith", "--version", cwd=tmp_path)
    assert PROJECT["version"] in shown


def test_the_interpreter_s_numpy_is_that_of_the_tests():
    """Triton 3.6's interpreter fails with numpy 2.4."""
    extras = PROJECT["optional-dependencies"]
    (tested,) = [asked for asked in extras["dev"] if asked.startswith("numpy")]
    assert tested in extras["interpreter"]


def test_errors_name_what_an_extra_installs(monkeypatch):
    required = [f'{name}; extra == "vulkan"' for name in PROJECT["optional-dependencies"]["vulkan"]]
    monkeypatch.setattr(_install.importlib.metadata, "requires", lambda name: ["torch>=2.11", *required])
    assert _install.command("vulkan") == "pip install 'vulkan>=1.3.275'"
    monkeypatch.setattr(_install.importlib.metadata, "requires", lambda name: None)
    assert _install.command("vulkan") == "pip install '.[vulkan]' in a clone of Tilesmith"


@pytest.mark.parametrize(
    ("torch", "command"),
    [
        (["filelock", 'triton==3.7.1; platform_system == "Linux"'], "pip install 'triton==3.7.1'"),
        (["triton-rocm==3.6.0"], "pip install 'triton-rocm==3.6.0', from the index that torch came from"),
        (["filelock"], "pip install 'triton==3.6.0' 'numpy<2.4'"),
    ],
)
def test_triton_is_installed_in_the_release_that_torch_requires(torch, command, monkeypatch):
    asked = [
        name.partition(";")[0] + '; extra == "interpreter"' for name in PROJECT["optional-dependencies"]["interpreter"]
    ]
    required = {"torch": torch, "tilesmith": asked}
    monkeypatch.setattr(_install.importlib.metadata, "requires", required.__getitem__)
    assert _install.triton() == command
