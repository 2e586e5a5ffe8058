"""Ranks of tests over gloo: what they run, and how they end.

A thread of gloo lets go of a finished collective's tensors some time after the collective was waited for. Where the
interpreter has begun to end by then, the thread asks for the GIL, Python ends the thread, and the process aborts
("terminate called without an active exception", seen with PyTorch 2.13 on a busy machine). So ranks end here without
the interpreter's end.
"""

import contextlib
import datetime
import importlib
import multiprocessing
import os
import runpy
import subprocess
import sys
import time
import traceback
from multiprocessing import forkserver
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

ROOT = Path(__file__).resolve().parent.parent
SOON = 60.0  # seconds: a tenth of the time limit of groups, and more than ranks lag on a busy machine

gloo = pytest.mark.skipif(not dist.is_available() or not dist.is_gloo_available(), reason="this PyTorch has no gloo")


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


def checks(modules) -> dict:
    """The functions check_*(mesh) by module and name."""
    found = {}
    for module in modules:
        for name, check in vars(importlib.import_module(module)).items():
            if name.startswith("check_"):
                found[f"{module}.{name}"] = check
    return found


def run_checks(folder, modules, size: int = 2, only=()) -> list[str]:
    """Run the checks of these modules on `size` ranks, those whose name holds one of `only` unless that is empty; what
    failed where, and the processor time of each. Ranks are forks of a process that has imported what they run, which a
    rank of its own would do for 5 seconds."""
    _import_once()
    mp.start_processes(
        _rank, args=(size, str(folder), only, modules), nprocs=size, join=True, start_method="forkserver"
    )  # fmt: skip
    return [(folder / f"rank{rank}").read_text() for rank in range(size)]


def _import_once() -> None:
    """Start the process that ranks are forks of."""
    multiprocessing.set_forkserver_preload(["ranks", *sorted(file.stem for file in ROOT.glob("tests/sharded_*.py"))])
    path = os.pathsep.join(filter(None, sys.path))  # Python before 3.13 does not hand it on
    with mock.patch.dict(os.environ, PYTHONPATH=path):
        forkserver.ensure_running()


def _rank(rank: int, size: int, folder: str, only, modules) -> None:
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    torch.set_num_threads(1)
    store = dist.FileStore(f"{folder}/store", size)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=datetime.timedelta(minutes=10))
    mesh = dist.device_mesh.init_device_mesh("cpu", (size,), mesh_dim_names=("ranks",))
    told = []
    for name, check in checks(modules).items():
        if not only or any(part in name for part in only):
            torch.manual_seed(0)
            began = time.process_time()
            try:
                check(mesh)
            except Exception:
                told.append(f"FAILED on rank {rank}: {name}\n{traceback.format_exc()}")
                break  # from here on the ranks would talk at cross purposes
            told.append(f"{name}: {time.process_time() - began:.1f} s")
    with open(f"{folder}/rank{rank}", "w") as file:
        file.write("\n".join(told))
    if told and told[-1].startswith("FAILED"):
        os._exit(0)  # a peer may still wait in a collective
    leave()


def _end():
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


if __name__ == "__main__":
    sys.argv = sys.argv[1:]
    runpy.run_path(sys.argv[0], run_name="__main__")
    _end()
