"""Every Triton kernel compiles for GPUs that are not here: each launcher, on one small case, says what it launches."""

import os
import subprocess
import sys

import pytest

from tilesmith.engine import ops

TARGETS = {
    "sm80": ("cuda", 80, 32),
    "sm90": ("cuda", 90, 32),
    "sm100": ("cuda", 100, 32),
    "gfx942": ("hip", "gfx942", 64),
    "gfx1100": ("hip", "gfx1100", 32),
}
FAMILIES = sorted({op.reference.__module__.split(".")[2] for op in ops().values()})


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("family", FAMILIES)
def test_compiles_offline(family, target, missing):
    try:
        import triton  # noqa: F401
    except ImportError:
        missing("Triton is not installed")
    environment = {**os.environ, "TRITON_INTERPRET": "0"}
    command = [sys.executable, "-m", "tilesmith.validate.offline", family, *map(str, TARGETS[target])]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=1800)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    assert "compiled" in done.stdout
