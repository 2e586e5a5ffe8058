"""The table of Triton releases: what compiled, and what did not, is told of each family."""

import subprocess
from pathlib import Path

import pytest

from tilesmith.validate import matrix


@pytest.mark.parametrize(
    ("code", "out", "err", "found"),
    [
        (0, "compiled a\ncompiled b 32\n", "", (["a", "b"], "")),
        (0, "", "", ([], "no kernel")),
        (1, "compiled a\n", "a lane spills into its neighbour", (["a"], "a lane spills into its neighbour")),
        (1, "", "Traceback\nTypeError: no such type\nmore", ([], "TypeError: no such type")),
        (-11, "compiled a\n", "", (["a"], "ended by signal 11")),
    ],
)
def test_a_fault_beside_kernels_that_compile_is_told(monkeypatch, tmp_path, code, out, err, found):
    ended = subprocess.CompletedProcess([], code, out, err)
    monkeypatch.setattr(subprocess, "run", lambda *args, **kwargs: ended)
    assert matrix.compile_with(Path("site"), "norm") == found
    monkeypatch.setattr(matrix, "install", lambda version, folder: folder)
    page = tmp_path / "page.md"
    assert matrix.main(["9.9.9", "--out", str(page)]) == int(bool(found[1]))
    text = page.read_text()
    assert (f"- norm, 9.9.9: `{found[1]}`" in text) == bool(found[1])
    assert ("not all" in text) == bool(found[0] and found[1])
