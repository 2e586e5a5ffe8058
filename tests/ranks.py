"""Ranks of tests over gloo, and how they end.

A thread of gloo lets go of a finished collective's tensors some time after the collective was waited for. Where the
interpreter has begun to end by then, the thread asks for the GIL, Python ends the thread, and the process aborts
("terminate called without an active exception", seen with PyTorch 2.13 on a busy machine). So ranks end here without
the interpreter's end.
"""

import contextlib
import os
import runpy
import subprocess
import sys
import time
from pathlib import Path

import torch.distributed as dist

ROOT = Path(__file__).resolve().parent.parent
SOON = 60.0  # seconds: a tenth of the time limit of groups, and more than ranks lag on a busy machine


@contextlib.contextmanager
def soon():
    """What is inside waits for no rank that stays away."""
    began = time.monotonic()
    yield
    assert time.monotonic() - began < SOON


def leave():
    """End a rank that has said what it found."""
    with contextlib.suppress(RuntimeError):  # of a group that a check has broken
        dist.barrier()
    dist.destroy_process_group()
    _end()


def torchrun(example, *arguments, ranks=2, timeout=300):
    """What a script printed on its ranks, none of which failed."""
    launcher = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(ranks)]
    run = subprocess.run(
        [*launcher, __file__, example, *arguments], cwd=ROOT, capture_output=True, text=True, timeout=timeout
    )
    assert run.returncode == 0, run.stderr[-3000:]
    return run.stdout


def _end():
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


if __name__ == "__main__":
    sys.argv = sys.argv[1:]
    runpy.run_path(sys.argv[0], run_name="__main__")
    _end()
