"""docs/names.md against the source: every term is where a row says, every name of a knob has a row."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SOURCE = ROOT / "src" / "tilesmith"
NAMES = (ROOT / "docs" / "names.md").read_text(encoding="utf-8")
FIELD = re.compile(  # words that need no row: the field's own, or those of an op's public signature
    r"^(num_(warps|stages)|(block|BLOCK)(_\w+)?|stages|STAGES|HAS_\w+|WANTS_\w+|\w*_?(HEADS|TOKENS|BLOCKS|ROWS|COLS)|"
    r"HEADS|TOKENS|ROWS|COLS|DIM|CAUSAL|[A-Z])$"
)
RETIRED = {  # functions of our own names that the field's replaced
    "bulk_load", "bulk_store", "bulk_add", "bulk_wait", "open_mail", "meet", "opaque", "apart", "halves", "told",
    "letter", "powers", "product_of_tiles", "in_units", "for_bulk", "part_numbers", "drawn_part", "dropped_part",
    "await_number",
}  # fmt: skip
TEXTS = {p: p.read_text(encoding="utf-8") for p in sorted(SOURCE.rglob("*.py"))}


def _table(title: str) -> list[list[str]]:
    """The cells of the table below a heading, without its head."""
    section = NAMES.split(f"## {title}\n")[1].split("\n## ")[0]
    rows = [[cell.strip() for cell in row.strip("|").split("|")] for row in section.splitlines() if row.startswith("|")]
    return rows[2:]


def _named(cell: str) -> list[str]:
    return re.findall(r"`([^`]+)`", cell)


def _own_sources() -> list[Path]:
    families = ("norm", "elementwise", "rotary", "loss", "gemm", "quant", "moe")
    folders = [SOURCE / "device", *(SOURCE / "ops" / name for name in families)]
    return [path for path in TEXTS if any(folder in path.parents for folder in folders)]


def _knobs() -> dict[str, str]:
    """Fields of configurations and compile-time parameters of device functions -> a file that has them."""
    found = {}
    for path in _own_sources():
        for node in ast.walk(ast.parse(TEXTS[path])):
            names: list[str] = []
            if isinstance(node, ast.ClassDef) and node.name.endswith("Config"):
                names = [x.target.id for x in node.body if isinstance(x, ast.AnnAssign)]
            elif isinstance(node, ast.FunctionDef):
                arguments = [*node.args.args, *node.args.kwonlyargs]
                names = [a.arg for a in arguments if a.annotation is not None and a.arg.isupper()]
            found |= {name: path.relative_to(SOURCE).as_posix() for name in names}
    return found


@pytest.mark.parametrize("row", _table("The field's terms, and where they are"), ids=lambda row: row[0])
def test_the_field_s_terms_are_where_the_page_says(row):
    term, file, names = row
    text = (SOURCE / _named(file)[0]).read_text(encoding="utf-8")
    for name in [n for n in _named(names) if "/" not in n and n not in ("work_counter",)]:
        assert re.search(rf"\b{name}\b", text), f"{file} has no {name}"
    first = re.split(r"[,(]", term)[0].strip()
    where = text if "attn/" not in file else text + file.replace("_", "-")
    assert any(re.search(re.escape(word), where, re.IGNORECASE) for word in (first, first.replace(" ", "_"))), first


@pytest.mark.parametrize("word", [word for row in _table("Our words") for word in _named(row[0])])
def test_our_words_occur(word):
    assert any(re.search(rf"(\b|_){word}", text) for text in TEXTS.values())


def test_every_knob_has_a_row():
    rows = {name for row in _table("Fields of configurations and flags of device kernels") for name in _named(row[0])}
    knobs = _knobs()
    missing = {name: file for name, file in knobs.items() if name not in rows and not FIELD.match(name)}
    assert not missing
    assert {name for name in rows if name not in knobs} <= {"REST"}  # part of BLOCK_REST


def test_retired_names_stay_away():
    defined = {
        node.name: path.relative_to(SOURCE).as_posix()
        for path in _own_sources()
        for node in ast.walk(ast.parse(TEXTS[path]))
        if isinstance(node, ast.FunctionDef)
    }
    assert not {name: file for name, file in defined.items() if name in RETIRED}
    assert not [p for p in _own_sources() if "tensor memory accelerator" in TEXTS[p] or "hopper_staying" in TEXTS[p]]
