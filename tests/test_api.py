"""Names that users of other libraries know: each resolves, has the documented parameters, and its examples run."""

from __future__ import annotations

import importlib
import inspect
from pathlib import Path

import pytest
import torch

from devices import ON_GPU
from tilesmith.hardware.facts import tomllib

DOCUMENTS = {
    path.stem: tomllib.loads(path.read_text(encoding="utf-8"))
    for path in sorted((Path(__file__).parent / "api").glob("*.toml"))
}
NAMES = [(n, entry) for n, document in DOCUMENTS.items() for entry in document["name"]]
EXAMPLES = [(n, entry) for n, document in DOCUMENTS.items() for entry in document["example"]]
LARGEST = 64  # sizes of an example's tensors where there is no GPU


def _found(document: str, path: str):
    """What a documented path leads to: the longest part that is a module, and attributes of it."""
    (root,) = DOCUMENTS[document]["root"].values()
    *parts, last = [root, *path.split(".")]
    found, modules = importlib.import_module(parts[0]), parts[0]
    for part in [*parts[1:], last]:
        modules = f"{modules}.{part}"
        if not hasattr(found, part):
            importlib.import_module(modules)
        found = getattr(found, part)
    return found


class _Beside(dict):
    """Names that a documented signature uses: looked up where its path leads."""

    def __init__(self, document: str, path: str):
        self.document, self.home = document, path.rpartition(".")[0]

    def __missing__(self, name: str):
        if not name[0].isupper():
            raise KeyError(name)
        return _found(self.document, f"{self.home}.{name}")


def _documented(document: str, entry: dict) -> list[inspect.Parameter]:
    namespace = _Beside(document, entry["path"])
    exec(f"def documented{entry['signature']}: ...", {}, namespace)
    return list(inspect.signature(namespace["documented"]).parameters.values())


@pytest.mark.parametrize("document", DOCUMENTS)
def test_entries_have_the_keys_of_their_kind(document):
    """A name that lost its heading would belong to the example above it, and nothing would test it."""
    known = {"name": {"path", "signature", "chosen"}, "example": {"title", "code", "bind", "then"}}
    odd = [e for kind, keys in known.items() for e in DOCUMENTS[document][kind] if not set(e) <= keys]
    assert not odd


@pytest.mark.parametrize(("document", "entry"), NAMES, ids=[f"{n}-{e['path']}" for n, e in NAMES])
def test_documented_parameters(document, entry):
    ours = list(inspect.signature(_found(document, entry["path"])).parameters.values())
    theirs = _documented(document, entry)
    assert len(ours) >= len(theirs)
    for our, their in zip(ours, theirs):
        assert (our.name, our.kind, our.default) == (their.name, their.kind, their.default)
    for added in ours[len(theirs) :]:
        assert added.kind in (added.KEYWORD_ONLY, added.VAR_KEYWORD), f"{added} must be keyword-only"
        assert added.kind == added.VAR_KEYWORD or added.default is not added.empty, f"{added} must have a default"


@pytest.mark.parametrize(("document", "entry"), NAMES, ids=[f"{n}-{e['path']}" for n, e in NAMES])
def test_documented_names_are_documented(document, entry):
    found = _found(document, entry["path"])
    assert inspect.getdoc(found)


@pytest.mark.parametrize(("document", "entry"), EXAMPLES, ids=[f"{n}-{e['title']}" for n, e in EXAMPLES])
def test_documented_examples_run(document, entry, monkeypatch):
    draw = torch.randn
    if not ON_GPU:
        monkeypatch.setattr(torch, "randn", lambda *shape, **kw: draw(*(min(n, LARGEST) for n in shape), **kw))
        monkeypatch.setattr(torch.Tensor, "cuda", lambda self: self)
    code = entry["code"]
    for theirs, ours in DOCUMENTS[document]["root"].items():
        code = code.replace(f"from {theirs}", f"from {ours}")
    namespace = {"torch": torch, "__name__": "example"}
    namespace |= {name: draw(*shape).cuda() for name, shape in entry.get("bind", {}).items()}
    exec(compile(code, f"{document}: {entry['title']}", "exec"), namespace)
    exec(compile(entry.get("then", ""), f"{document}: {entry['title']}, used", "exec"), namespace)
