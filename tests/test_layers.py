"""The house rules: a layer imports only lower ones, strings that name modules are right, importing costs little."""

from __future__ import annotations

import ast
import functools
import importlib
import importlib.util
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import tilesmith
from clock import cheapest
from tilesmith.engine import ops
from tilesmith.engine.registry import backend_of, family_of

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "src" / "tilesmith"
SOURCES = sorted(PACKAGE.rglob("*.py"))
DOORS = {"core", "utils", "flash_attention", "cli"}
BACKENDS = {"triton", "hopper", "portable"}


def _module(path: Path) -> str:
    parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


@functools.cache
def _import_nodes(path: Path) -> list[ast.Import | ast.ImportFrom]:
    return [n for n in ast.walk(ast.parse(path.read_text())) if isinstance(n, (ast.Import, ast.ImportFrom))]


def _imports(path: Path) -> set[str]:
    """Absolute names of everything that a file imports, also inside functions; `from a import b` gives a and a.b."""
    found = set()
    for node in _import_nodes(path):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        else:
            assert node.level == 0, f"{path}: imports are absolute"
            found |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    return found


def _backend(module: str) -> str | None:
    """The backend that a module of an op family is for, by its place: triton for ops.norm.triton.softmax."""
    name = backend_of(module) if module.startswith("tilesmith.ops.") else None
    return name if name in BACKENDS else None


@functools.cache
def _layers() -> list[set[str]]:
    """The layer table of pyproject.toml, top first."""
    from tilesmith.hardware.facts import tomllib

    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    (table,) = (c["layers"] for c in contracts if c["id"] == "layers")
    return [{name.strip(" ()") for name in row.split("|")} for row in table]


def _level(module: str) -> int:
    """0 is the bottom layer. KeyError for a module that no layer holds."""
    package = module.split(".")[1]
    levels = {name: i for i, row in enumerate(reversed(_layers())) for name in row}
    return levels[package]


def test_import_contracts(missing, monkeypatch):
    try:
        from importlinter.cli import lint_imports
    except ImportError as error:
        missing(f"import-linter is not installed (pip install import-linter): {error}")

    # by default it disables all loggers that are there, and tests behind this one read what they say
    monkeypatch.setattr("importlinter.cli.logging_config.dictConfig", lambda config: None)
    assert lint_imports(config_filename=str(ROOT / "pyproject.toml"), no_cache=True) == 0


@pytest.mark.parametrize("path", SOURCES, ids=_module)
def test_nobody_imports_a_door(path):
    names = _imports(path)
    home = _module(path).split(".")[1:2]
    home = ["cli"] if home == ["__main__"] else home  # `python -m tilesmith` is that door
    foreign = {
        n for n in names if n.startswith("tilesmith.") and n.split(".")[1] in DOORS and n.split(".")[1:2] != home
    }
    assert not foreign
    # `import tilesmith` or `from tilesmith import optimize` would reach any layer through the lazy names.
    behind = {
        n for n in names if n.startswith("tilesmith.") and n.count(".") == 1 and n.split(".")[1] in tilesmith.EXPORTS
    }
    assert not behind
    plain = [node for node in _import_nodes(path) if isinstance(node, ast.Import)]
    assert all(alias.name != "tilesmith" for node in plain for alias in node.names)


def _by_name(path: Path) -> set[str]:
    """Modules that a file imports by a constant name."""
    calls = [n for n in ast.walk(ast.parse(path.read_text())) if isinstance(n, ast.Call) and len(n.args) == 1]
    named = [n.args[0] for n in calls if ast.unparse(n.func) in ("importlib.import_module", "imported")]
    return {n.value for n in named if isinstance(n, ast.Constant)}


def _circle(imports: dict[str, set[str]]) -> list[str] | None:
    """Modules each of which imports the next, and the last the first, if there are any."""
    left = dict(imports)
    while True:  # what imports nothing that is left is in no circle
        free = {name for name, targets in left.items() if not targets & left.keys()}
        if not free:
            break
        left = {name: targets for name, targets in left.items() if name not in free}
    seen, name = [], min(left, default=None)
    while name is not None and name not in seen:
        seen.append(name)
        name = min(left[name] & left.keys())
    return seen[seen.index(name) :] if seen else None


def test_a_circle_of_imports_is_found():
    assert _circle({"a": {"b"}, "b": {"c", "d"}, "c": {"b"}, "d": set()}) == ["b", "c"]
    assert _circle({"a": {"b"}, "b": {"c"}, "c": set()}) is None


def test_no_circles_of_imports():
    """Those in functions, for type checkers only, and by name count as well."""
    names = {_module(path) for path in SOURCES}
    imports = {}
    for path in SOURCES:
        found = (_imports(path) | _by_name(path)) & names - {_module(path)}
        # a package is meant itself only where none of its modules is: `from tilesmith.engine import trial`
        packages = {name for name in found if any(other.startswith(f"{name}.") for other in found)}
        imports[_module(path)] = found - packages
    assert _circle(imports) is None


@pytest.mark.parametrize("path", [p for p in SOURCES if _backend(_module(p))], ids=_module)
def test_backends_never_import_one_another(path):
    assert not {n for n in _imports(path) if _backend(n) not in (None, _backend(_module(path)))}


@pytest.mark.parametrize(("name", "home"), tilesmith.EXPORTS.items())
def test_exported_names_lead_home(name, home):
    assert _level(home) >= 0
    assert getattr(importlib.import_module(home), name) is getattr(tilesmith, name)


def _lazy_names() -> list[tuple[str, str]]:
    """Packages that resolve names lazily, and those names."""
    found = []
    for path in SOURCES:
        if path.name == "__init__.py" and path != PACKAGE / "__init__.py":
            package = importlib.import_module(_module(path)) if "__getattr__" in path.read_text() else None
            found += [(package.__name__, name) for name in getattr(package, "__all__", [])]
    return found


@pytest.mark.parametrize(("package", "name"), _lazy_names())
def test_lazy_names_resolve(package, name):
    assert getattr(importlib.import_module(package), name) is not None


def test_no_name_of_a_package_hides_a_module_of_it():
    """As `from tilesmith.engine.launch import launch` would in an `__init__`: the module is then no attribute of it."""
    hidden = []
    for package in (path.parent for path in SOURCES if path.name == "__init__.py"):
        imports = (n for n in _import_nodes(package / "__init__.py") if isinstance(n, ast.ImportFrom))
        for name in (
            a.asname or a.name for n in imports for a in n.names if n.module != _module(package / "__init__.py")
        ):
            hidden += [f"{_module(package / '__init__.py')}.{name}"] if (package / f"{name}.py").exists() else []
    assert not hidden


LAZY = {"tilesmith": "use", "tilesmith.ops": "rope", "tilesmith.hardware": "arch_of", "tilesmith.codegen": "interpret"}


@pytest.mark.parametrize(("package", "name"), LAZY.items())
def test_an_import_that_fails_tells_why(monkeypatch, package, name):
    """Python makes "cannot import name" of an AttributeError, as of a private name that another torch lacks."""
    module, absent = importlib.import_module(package), "module 'torch._C' has no attribute '_gone'"

    def fail(home):
        raise AttributeError(absent)

    vars(module).pop(name, None)
    monkeypatch.setattr(importlib, "import_module", fail)
    with pytest.raises(ImportError, match=f"tilesmith.* cannot be imported: {absent}"):
        exec(f"from {package} import {name}")


@pytest.mark.parametrize(
    ("asked", "told"),
    [
        ("tilesmith.rms_norm", "'rms_norm'. It is tilesmith.ops.rms_norm"),
        ("tilesmith.softmx", "'softmx'. Did you mean 'tilesmith.ops.softmax'?"),
        ("tilesmith.optimise", "'optimise'. Did you mean 'optimize'?"),
        ("tilesmith.ops.rms_nrm", "'rms_nrm'. Did you mean 'rms_norm'?"),
        ("tilesmith.codegen.metall", "'metall'. Did you mean 'metal'?"),
        ("tilesmith.attention(1, 2, 3)", "call tilesmith.ops.attention(q, k, v)"),
        ("tilesmith.flash_attention(1, 2, 3)", "call tilesmith.ops.attention, or flash_attn_func of this module"),
    ],
)
def test_a_wrong_name_is_said_once_with_the_right_one(asked, told):
    """In a fresh process, as the traceback prints it: Python adds suggestions of its own to some errors."""
    done = subprocess.run([sys.executable, "-c", f"import tilesmith; {asked}"], capture_output=True, text=True)
    assert done.stderr.strip().endswith(told)
    assert done.stderr.count("Did you mean") == ("Did you mean" in told)


def test_printers_are_attributes_of_the_package():
    code = "import sys, tilesmith; p = tilesmith.codegen; print(p.cuda.generate, p.metal.generate, p.spirv.generate, "
    code += "p.wgsl.generate, 'torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout.count("<function generate") == 4 and done.stdout.endswith("False\n"), done.stderr


@pytest.mark.parametrize("name", sorted(ops()))
def test_kernel_modules_are_the_family_s_own(name):
    op = ops()[name]
    family = family_of(op.reference.__module__)
    for backend, module in op._modules.items():
        assert module.startswith(f"{family}."), f"{name}/{backend} lives in another family: {module}"
        assert importlib.util.find_spec(module) is not None, f"{name}/{backend}: there is no {module}"
        assert _level(module) == _level(family)


def _in_fresh_process(code: str, **environment: str) -> dict:
    given = {**os.environ, **environment}
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=given)
    return json.loads(ran.stdout)


IMPORT_COST = """
import json, sys, time
import torch
start = time.process_time()
import tilesmith
spent = time.process_time() - start
print(json.dumps({"seconds": spent, "triton": "triton" in sys.modules}))
"""


def test_importing_costs_little_and_loads_no_triton():
    def cost() -> float:
        measured = _in_fresh_process(IMPORT_COST)
        assert not measured["triton"]
        return measured["seconds"]

    assert cheapest(cost, 0.3) <= 0.3


@pytest.mark.parametrize(
    ("name", "value", "told"),
    [
        ("TILESMITH_DEBG", "1", "did you mean TILESMITH_DEBUG?"),
        ("TILESMITH_DEBUG", "maybe", "it must be 1, true, yes or on"),
        ("TILESMITH_USE", "rms_norm", "a comma-separated list of op=backend"),
        ("TILESMITH_REPLAY", "2", "must be 0, 1 or check"),
    ],
)
def test_the_import_refuses_a_wrong_environment(name, value, told):
    """In a fresh process, without torch: what needs the table of ops is checked at first use."""
    code = "import sys\ntry: import tilesmith\nexcept ValueError as problem: print('torch' in sys.modules, problem)"
    wrong = {**os.environ, name: value}
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=wrong)
    assert ran.stdout.startswith("False ") and name in ran.stdout and told in ran.stdout


def test_the_import_leaves_settings_for_their_first_use():
    code = "import json, os, tilesmith; os.environ['TILESMITH_DEBUG'] = '0'\n"
    code += "from tilesmith.settings import settings; print(json.dumps(settings().debug))"
    assert _in_fresh_process(code, TILESMITH_DEBUG="1") is False


WITHOUT_NUMPY = """
import sys, warnings
class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "numpy":
            raise ModuleNotFoundError("No module named 'numpy'", name="numpy")
sys.meta_path.insert(0, Absent())
import tilesmith
before = list(warnings.filters)
tilesmith.optimize
kept = [f for f in warnings.filters if f[1] is not None and "NumPy" in f[1].pattern]
assert not kept and all(f in warnings.filters for f in before)
warnings.warn("Failed to initialize NumPy, said by someone else")
"""


def test_the_first_touch_says_nothing_of_numpy():
    """torch warns at its import where NumPy is not installed, which nothing here needs."""
    ran = subprocess.run([sys.executable, "-c", WITHOUT_NUMPY], capture_output=True, text=True, check=True)
    assert ran.stderr.count("Failed to initialize NumPy") == ran.stderr.count("said by someone else") == 1


FIRST_TOUCH = """
import json, sys, time
import torch
start = time.process_time()
import tilesmith
tilesmith.optimize, tilesmith.undo, tilesmith.explain
spent = time.process_time() - start
print(json.dumps({"seconds": spent, "loaded": [m for m in ("torch._dynamo", "transformers") if m in sys.modules]}))
"""


def test_the_first_touch_of_optimize_loads_no_dynamo(tmp_path):
    shutil.copytree(PACKAGE, tmp_path / "tilesmith", ignore=shutil.ignore_patterns("__pycache__"))
    cached = {"PYTHONDONTWRITEBYTECODE": "", "PYTHONPATH": str(tmp_path)}
    _in_fresh_process(FIRST_TOUCH, **cached)  # writes bytecode, as an installed package has it

    def cost() -> float:
        first = _in_fresh_process(FIRST_TOUCH, **cached)
        assert not first["loaded"]
        return first["seconds"]

    assert cheapest(cost, 0.5) <= 0.5


def test_declaring_every_op_loads_no_triton():
    code = (
        "import json, sys; from tilesmith.engine import ops; print(json.dumps([len(ops()), 'triton' in sys.modules]))"
    )
    count, triton = _in_fresh_process(code)
    assert count
    assert not triton


def test_the_bare_import_loads_no_torch():
    assert _in_fresh_process("import json, sys, tilesmith; print(json.dumps('torch' in sys.modules))") is False


def test_every_file_says_what_it_is():
    silent = [_module(path) for path in SOURCES if not ast.get_docstring(ast.parse(path.read_text()))]
    assert not silent
