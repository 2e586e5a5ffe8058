"""docs/seeds.md is what its command writes: what is built and tested is looked up, what is measured is in results."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

from tilesmith.hardware.facts import tomllib

ROOT = Path(__file__).parents[1]
SEEDS = tomllib.loads((ROOT / "docs" / "seeds.toml").read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def command():
    spec = importlib.util.spec_from_file_location("seeds", ROOT / "docs" / "seeds.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_page_is_fresh(command):
    written = (ROOT / "docs" / "seeds.md").read_text(encoding="utf-8")
    assert written == command.page(), "write it anew with: python docs/seeds.py"


def test_every_document_has_names_and_features():
    documents = {path.stem for path in (ROOT / "tests" / "api").glob("*.toml")}
    assert documents == set(SEEDS["documents"]) == {feature["document"] for feature in SEEDS["feature"]}
    assert len(documents) == 5


@pytest.mark.parametrize("document", SEEDS["documents"])
def test_every_frozen_name_belongs_to_a_feature(document):
    """A name that tests/api freezes is in the table, or a part of what is there."""
    entries = tomllib.loads((ROOT / "tests" / "api" / f"{document}.toml").read_text(encoding="utf-8"))["name"]
    features = [feature for feature in SEEDS["feature"] if feature["document"] == document]
    named = {name.rpartition(".")[2] for feature in features for name in feature["names"]}
    absent = [e["path"] for e in entries if not e.get("chosen") and not named & set(e["path"].split("."))]
    assert not absent, "add them to docs/seeds.toml, then: python docs/seeds.py"


def test_what_is_not_there_is_said(command):
    assert command._resolves("ops.rms_norm") and not command._resolves("ops.nothing_of_this_name")
    with pytest.raises(LookupError, match="has no row of nothing"):
        command._measured("sm90/rms_norm", "nothing", "forward")
