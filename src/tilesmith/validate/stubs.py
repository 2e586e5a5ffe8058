"""Writes the stubs of packages that resolve their names at first use, for type checkers and editors.

    python -m tilesmith.validate.stubs

A package is one of these if its `__init__.py` has a `__getattr__` and says nothing for TYPE_CHECKING. An op appears as
the function that users call, with its docstring; every other name as an import from its home. Where the op's check
lists the strings that it takes, their type is a Literal of these.
"""

from __future__ import annotations

import argparse
import importlib
import inspect
import pkgutil
import re
import sys
from collections.abc import Iterable
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from tilesmith.engine import Op, cases

ROOT = Path(__file__).parents[1]
COMMAND = "python -m tilesmith.validate.stubs"
WIDTH = 120
UNKNOWN = "no such string"


def stubs() -> dict[Path, str]:
    """The file of every stub and its text."""
    return {path.with_suffix(".pyi"): stub(importlib.import_module(name)) for name, path in lazy_packages()}


def lazy_packages() -> Iterable[tuple[str, Path]]:
    """Name and `__init__.py` of the packages that need a stub."""
    for path in sorted(ROOT.rglob("__init__.py")):
        text = path.read_text(encoding="utf-8")
        if re.search(r"^(def __getattr__\(|__getattr__, )", text, re.MULTILINE) and "TYPE_CHECKING" not in text:
            yield ".".join(("tilesmith", *path.parent.relative_to(ROOT).parts)), path


def stub(package: ModuleType) -> str:
    """The text of one package's stub."""
    imports: dict[str, list[str]] = {}
    functions, names = [], []
    for name in package.__all__:
        value = getattr(package, name)
        if name.startswith("__"):
            continue
        names.append(name)
        if isinstance(value, Op):
            functions.append(_function(name, value))
        else:
            imports.setdefault(_home(package, name, value), []).append(name)
    modules = [name for name in _submodules(package) if package.__name__ == "tilesmith" and name not in names]
    if functions:
        imports["torch"] = ["Tensor"]
        if any("Sequence[" in text for text in functions):
            imports["collections.abc"] = ["Sequence"]
        if any("Literal[" in text for text in functions):
            imports["typing"] = ["Literal"]
    if modules:
        imports["tilesmith"] = modules
    lines = [f"# Written by: {COMMAND}", "", *_imports(imports)]
    if package.__name__ == "tilesmith":
        lines += ["", "__version__: str"]
    return "\n".join([*lines, *(f"\n{text}" for text in functions)]) + "\n"


def _submodules(package: ModuleType) -> list[str]:
    found = {module.name for module in pkgutil.iter_modules(package.__path__)}
    return sorted(name for name in found if not name.startswith("_"))


def _home(package: ModuleType, name: str, value: Any) -> str:
    """The module that a lazy name comes from: what the package's table says, else what the value says of itself."""
    for table in vars(package).values():
        if isinstance(table, dict) and isinstance(table.get(name), str) and _has(table[name], name):
            return table[name]
    if _has(getattr(value, "__module__", ""), name):
        return value.__module__
    raise LookupError(f"{package.__name__}.{name}: no table of that package names the module it comes from")


def _has(module: str, name: str) -> bool:
    return module.startswith("tilesmith.") and hasattr(importlib.import_module(module), name)


def _imports(imports: dict[str, list[str]]) -> list[str]:
    """Import statements in the order and the form that ruff gives them."""
    groups: list[list[str]] = [[], [], []]
    for module, names in sorted(imports.items()):
        place = 2 if module.startswith("tilesmith") else int(module == "torch")
        for name in sorted(names, key=_isort):
            line = f"from {module} import {name}" + (f" as {name}" if place == 2 else "")
            groups[place].append(line if len(line) <= WIDTH else f"from {module} import (\n    {name} as {name},\n)")
    return "\n\n".join("\n".join(group) for group in groups if group).split("\n")


def _isort(name: str) -> tuple[int, str]:
    """Constants first, then classes, then functions."""
    return (0 if name.isupper() else 1 if name[:1].isupper() else 2, name)


def _function(name: str, op: Op) -> str:
    signature = inspect.signature(op)
    strings = choices(op)
    parameters = [_parameter(p, strings.get(p.name, ())) for p in signature.parameters.values()]
    head, tail = f"def {name}(", f") -> {_annotation(signature.return_annotation)}:"
    text = head + ", ".join(parameters) + tail
    if len(text) > WIDTH:
        inner = ", ".join(parameters)
        body = [f"    {inner}"] if len(inner) <= WIDTH - 4 else [f"    {p}," for p in parameters]
        text = "\n".join([head, *body, tail])
    return f"{text}\n{_docstring(op)}"


def choices(op: Op) -> dict[str, tuple[str, ...]]:
    """The strings that each string argument of an op may be, where its check lists them, quoted."""
    strings = [name for name, p in op.signature.parameters.items() if p.annotation is str]
    case = next((c for c in cases(op.name) if {"test", "interpret"} & set(c.tags)), None)
    if not strings or case is None:
        return {}
    dtype = torch.float32 if torch.float32 in case.dtypes else case.dtypes[0]
    args = op.bind((), case.build(torch.device("cpu"), dtype, case.generator()))
    return {name: found for name in strings if (found := _listed(op, args, op.parameters.index(name)))}


def _listed(op: Op, args: tuple, at: int) -> tuple[str, ...]:
    """What the error of a string that is none of them lists; nothing where the check refuses one of the list, too."""
    said = _refusal(op, (*args[:at], UNKNOWN, *args[at + 1 :]))
    found = tuple(quoted for quoted in re.findall("'([^']*)'", said) if quoted != UNKNOWN)
    kept = op.signature.parameters[op.parameters[at]].default
    fits = all(op.parameters[at] not in _refusal(op, (*args[:at], one, *args[at + 1 :])) for one in found)
    return found if fits and (kept is inspect.Parameter.empty or kept in found) else ()


def _refusal(op: Op, args: tuple) -> str:
    try:
        op.check(*args)
    except (TypeError, ValueError) as problem:
        return str(problem)
    return ""


def _parameter(p: inspect.Parameter, strings: tuple[str, ...]) -> str:
    default = "" if p.default is p.empty else f" = {_quoted(p.default)}"
    annotation = f"Literal[{', '.join(map(_quoted, strings))}]" if strings else _annotation(p.annotation)
    return f"{p.name}: {annotation}{default}"


def _quoted(value: Any) -> str:
    return f'"{value}"' if isinstance(value, str) else repr(value)


def _annotation(annotation: Any) -> str:
    text = annotation if isinstance(annotation, str) else inspect.formatannotation(annotation)
    for prefix in ("torch.", "collections.abc.", "typing."):
        text = text.replace(prefix, "")
    return text


def _docstring(op: Op) -> str:
    meaning = inspect.getdoc(op).partition("\n\n")[2]  # without the signature, which stands above it
    lines = meaning.replace("\\", "\\\\").split("\n")
    body = "\n".join(f"    {line}".rstrip() for line in lines)
    return f'    """{body.strip()}' + ('\n    """' if len(lines) > 1 else '"""')


def main() -> None:
    """Write every stub that is not as it should be, and name it."""
    argparse.ArgumentParser(prog="python -m tilesmith.validate.stubs", description=main.__doc__).parse_args()
    for path, text in stubs().items():
        if not path.exists() or path.read_text(encoding="utf-8") != text:
            path.write_text(text, encoding="utf-8")
            sys.stdout.write(f"wrote {path}\n")


if __name__ == "__main__":
    main()
