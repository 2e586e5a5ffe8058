"""The pages of the API reference: every public name has its section, with a signature and what the name means."""

from __future__ import annotations

import importlib
import inspect

import pytest

from tilesmith.validate import api_pages

PAGES = {page.title: page for page in api_pages.pages()}


@pytest.mark.parametrize("package", PAGES)
def test_every_name_is_on_its_page(package):
    module, text = importlib.import_module(package), PAGES[package].text
    for name in module.__all__:
        value = getattr(module, name)
        if not name.startswith("_") and not inspect.ismodule(value):
            assert f"`{name}`" in text, name
    assert " at 0x" not in text and "<locals>" not in text
    assert text.count("```") % 2 == 0


def test_a_page_of_an_op():
    text = PAGES["tilesmith.ops"].text.partition("### `rms_norm`\n")[2].partition("\n### ")[0]
    assert "rms_norm(\n    x: Tensor,\n    weight: Tensor | None = None,\n    eps: float = 1e-06," in text
    assert "- `weight`: \\[N\\], floating, or None" in text
    assert "Served by: `triton`" in text


@pytest.mark.parametrize(
    ("doc", "wanted"),
    [
        ("A * B, x[0] <y>", "A \\* B, x\\[0\\] \\<y>"),
        ("Of `a*b`.", "Of `a*b`."),
        ("Args:\n    x: a\n        tensor\n    y: z\n\nReturns:\n    both", "- `x`: a\n  tensor\n- `y`: z"),
        ("Thus:\n\n    run(x)\n\nand on", "```python\nrun(x)\n```"),
    ],
)
def test_docstrings_become_markdown(doc, wanted):
    assert wanted in api_pages.markdown(doc, ("x", "y"))
