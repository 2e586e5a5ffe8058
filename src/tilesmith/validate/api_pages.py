"""The API reference as Markdown: what users call, its signature and its docstring, one page for each public package.

    python -m tilesmith.validate.api_pages DIR

The documentation site writes the same pages while it is built (docs/site.py), so they are never older than the code.
"""

from __future__ import annotations

import argparse
import enum
import importlib
import inspect
import re
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tilesmith.engine import Op
from tilesmith.engine.registry import family_of

PACKAGES = {
    "tilesmith": "tilesmith",
    "tilesmith.ops": "ops",
    "tilesmith.nn": "nn",
    "tilesmith.attention": "attention",
    "tilesmith.attention.fusion": "attention-fusion",
    "tilesmith.precision": "precision",
    "tilesmith.distributed": "distributed",
    "tilesmith.hardware": "hardware",
    "tilesmith.core": "core",
    "tilesmith.utils": "utils",
    "tilesmith.flash_attention": "flash-attention",
    "tilesmith.kernels": "kernels",
    "tilesmith.codegen": "codegen",
    "tilesmith.runtime": "runtime",
    "tilesmith.rewrite": "rewrite",
    "tilesmith.validate": "validate",
}
"""Package -> the name of its page. Packages that do not exist are left out."""

FAMILIES = {
    "norm": "Norms and softmax",
    "elementwise": "Activations, gates and dropout",
    "rotary": "Rotary embeddings",
    "gemm": "Products",
    "attn": "Attention",
    "loss": "Losses",
    "experts": "Experts",
    "quant": "Quantisation",
}


@dataclass(frozen=True)
class Page:
    """A page of the reference: its file's name, its title and its Markdown."""

    name: str
    title: str
    text: str


def pages() -> list[Page]:
    """Every page, in the order of PACKAGES."""
    found = []
    for package, name in PACKAGES.items():
        try:
            module = importlib.import_module(package)
        except ModuleNotFoundError as problem:
            if problem.name != package:
                raise
            continue
        if getattr(module, "__all__", None):
            found.append(Page(name, package, page(module)))
    return found


def page(module: Any) -> str:
    """The page of one module: its docstring, then every public name in the module's order, ops by family."""
    lines = [f"# {module.__name__}", "", markdown(inspect.getdoc(module) or ""), ""]
    names = [name for name in module.__all__ if not name.startswith("_") and not inspect.ismodule(_of(module, name))]
    groups: dict[str, list[str]] = {}
    for name in names:
        if not name.endswith(("_vjp", "_vjp_fp8")):
            groups.setdefault(_group(_of(module, name)), []).append(name)
    for title in sorted(groups, key=_order):
        lines += [f"## {title}", ""] if len(groups) > 1 else []
        for name in groups[title]:
            lines += _entry(name, _of(module, name), "###" if len(groups) > 1 else "##")
    gradients = [f"`{name}`" for name in names if name.endswith(("_vjp", "_vjp_fp8"))]
    if gradients:
        lines += ["## Gradients", "", f"Ops of their own, which autograd calls: {', '.join(gradients)}.", ""]
    return "\n".join(lines)


def _of(module: Any, name: str) -> Any:
    return getattr(module, name)


def _group(value: Any) -> str:
    home = value.reference.__module__ if isinstance(value, Op) else getattr(value, "__module__", "") or ""
    if not home.startswith("tilesmith.ops."):
        return ""
    family = family_of(home) or home
    return FAMILIES.get(family.rpartition(".")[2], "Names from other libraries")


def _order(title: str) -> int:
    known = [*FAMILIES.values(), "Names from other libraries", ""]
    return known.index(title)


def _entry(name: str, value: Any, level: str) -> list[str]:
    if isinstance(value, type):
        return [*_class(name, value, level), ""]
    if callable(value):
        return [*_function(name, value, level), ""]
    kind = type(value).__name__
    return [f"{level} `{name}`", "", f"A value of type `{kind}`.", ""]


def _function(name: str, value: Callable[..., Any], level: str) -> list[str]:
    meaning = inspect.getdoc(value) or ""
    if isinstance(value, Op):
        meaning = meaning.partition("\n\n")[2]  # without the signature, which stands above it
    lines = [f"{level} `{name}`", "", *_signature(name, value), "", markdown(meaning, _parameters(value))]
    if isinstance(value, Op):
        backends = ", ".join(f"`{backend}`" for backend in value.backends())
        lines += ["", f"Served by: {backends}." + ("" if value.vjp is not None else " It has no gradient.")]
    return lines


def _class(name: str, value: type, level: str) -> list[str]:
    lines = [f"{level} `{name}`", ""]
    if issubclass(value, enum.Enum):
        members = [f"- `{name}.{member.name}` = `{member.value!r}`" for member in value]
        return [*lines, markdown(_own_doc(value)), "", *members]
    lines += [*_signature(name, value), "", markdown(_own_doc(value), _parameters(value))]
    for method, function in _methods(value):
        lines += ["", f"{level}# `{name}.{method}`", ""]
        if not isinstance(function, property):
            lines += [*_signature(method, function), ""]
        lines.append(markdown(inspect.getdoc(function) or "", _parameters(function)))
    return lines


def _own_doc(value: type) -> str:
    own = value.__dict__.get("__doc__") or ""
    return "" if own.startswith(f"{value.__name__}(") else inspect.cleandoc(own)  # what a dataclass makes


def _methods(value: type) -> Iterable[tuple[str, Any]]:
    """Public methods and properties that the class itself defines and documents."""
    for name, member in vars(value).items():
        plain = member.__func__ if isinstance(member, classmethod | staticmethod) else member
        if name.startswith("_") or not (inspect.isfunction(plain) or isinstance(plain, property)):
            continue
        if inspect.getdoc(plain) if isinstance(plain, property) else plain.__doc__:
            yield name, plain


def _parameters(value: Any) -> set[str]:
    try:
        found = set(inspect.signature(value).parameters)
    except (TypeError, ValueError):
        return set()
    return found | set(getattr(value, "__annotations__", ()) if isinstance(value, type) else ())


def _signature(name: str, value: Any) -> list[str]:
    try:
        signature = inspect.signature(value)
    except (TypeError, ValueError):
        return []
    parameters = [p for p in signature.parameters.values() if p.name not in ("self", "misplaced")]
    signature = signature.replace(parameters=parameters)
    if isinstance(value, type):
        signature = signature.replace(return_annotation=inspect.Signature.empty)
    text = f"{name}{_plain(str(signature))}"
    if len(text) > 100:
        parts = [_plain(str(p)) for p in parameters]
        starred = [i for i, p in enumerate(parameters) if p.kind is p.KEYWORD_ONLY]
        if starred and not any(p.kind is p.VAR_POSITIONAL for p in parameters):
            parts.insert(starred[0], "*")
        end = _plain(str(signature.replace(parameters=[])))[2:]
        text = "\n".join([f"{name}(", *(f"    {part}," for part in parts), f"){end}"])
    return ["```python", text, "```"]


def _plain(text: str) -> str:
    """Annotations as one writes them: no quotes, no homes of types."""
    text = re.sub(r"(:\s|->\s)'([^']*)'", r"\1\2", text)
    text = re.sub(r"\b(?:torch|typing|collections\.abc|tilesmith(?:\.\w+)+)\.(?=[A-Z])", "", text)
    text = re.sub(r"= (Mask|Score)\([^)]*\)", r"= \1()", text)  # an op's default is the plain one
    text = re.sub(r"= <function .* at 0x\w+>", "= ...", text)
    text = re.sub(r"<(?:class )?'?([\w.]+)[^>]*>", r"\1", text)
    return re.sub(r"<([\w.]+): [^>]*>", r"\1", text)


def markdown(doc: str, parameters: Collection[str] = ()) -> str:
    """A docstring as Markdown: its sections as bold words, its parameters as a list, its characters as they are.

    A sentence that starts with a parameter's name and a colon begins an item; the item ends at an empty line.
    """
    lines: list[str] = []
    item = section = False
    for line in _one_a_line(doc, parameters).split("\n"):
        head = re.fullmatch(r"(Args|Returns|Raises|Yields|Attributes|Example):", line)
        named = re.match(r"(?:    )?(\w+(?:, \w+)*)((?: [^:.;]{1,40})?): (.*)", line)
        if head:
            item, section = False, True
            lines += ["", f"**{'Arguments' if head[1] == 'Args' else head[1]}**", ""]
        elif named and named[1].split(", ")[0] in parameters:
            lines += ["", ""] if lines and lines[-1] and not item else []
            item = True
            lines.append(f"- `{named[1]}`{_escaped(named[2])}: {_escaped(named[3])}")
        elif not line:
            item = False
            lines.append("")
        elif item:
            lines.append(f"  {_escaped(line.strip())}")
        elif line.startswith("    ") and not section:
            lines.append(line)  # code
        else:
            section = section and line.startswith(" ")
            lines.append(_escaped(line.strip()))
    return _fenced("\n".join(lines)).strip()


def _one_a_line(doc: str, parameters: Collection[str]) -> str:
    """A line for each parameter where a docstring describes several in one."""

    def broken(match: re.Match[str]) -> str:
        return f".\n{match[1]}" if match[2] in parameters else match[0]

    return re.sub(r"\. ((\w+)(?:, \w+)*(?: [^:.;\n]{1,40})?: )", broken, doc)


def _escaped(line: str) -> str:
    """What Markdown would take for markup outside of code, as it stands."""
    parts = re.split(r"(``[^`]*``|`[^`]*`)", line)
    return "".join(part if part.startswith("`") else re.sub(r"([*<\[\]])", r"\\\1", part) for part in parts)


def _fenced(text: str) -> str:
    """Blocks that are indented after an empty line become Python blocks."""
    out: list[str] = []
    block: list[str] = []
    for line in [*text.split("\n"), ""]:
        if line.startswith("    ") and (block or not out or not out[-1]):
            block.append(line[4:])
        elif not line and block:
            block.append(line)
        else:
            if block:
                out += ["```python", *_stripped(block), "```", ""]
                block = []
            out.append(line)
    if block:
        out += ["```python", *_stripped(block), "```"]
    return "\n".join(out)


def _stripped(block: list[str]) -> list[str]:
    while block and not block[-1]:
        block.pop()
    return block


def main() -> None:
    """Write every page into the folder that the command line names."""
    parser = argparse.ArgumentParser(prog="python -m tilesmith.validate.api_pages", description=main.__doc__)
    parser.add_argument("folder", metavar="DIR", type=Path)
    folder = parser.parse_args().folder
    folder.mkdir(parents=True, exist_ok=True)
    for each in pages():
        (folder / f"{each.name}.md").write_text(each.text, encoding="utf-8")


if __name__ == "__main__":
    main()
