"""Trial: a Gluon kernel under a release of Triton that is not known to serve it, tried once on a small case.

A release may rename what a kernel is written in, compile it wrongly, or end in the middle of it (3.9 did by a signal).
So the trial runs in a process of its own, the first time that the kernel would serve a call; what it finds is kept on
disk under the versions of driver, PyTorch, Triton and this library, and holds for all processes.
"""

from __future__ import annotations

import contextlib
import datetime
import hashlib
import json
import logging
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import torch

from tilesmith.engine import releases
from tilesmith.engine.backends import in_gluon
from tilesmith.hardware.detect import driver
from tilesmith.settings import settings

log = logging.getLogger("tilesmith")

PROGRAM = "tilesmith.validate.trial"  # by name: a trial knows cases and budgets, which stand above the engine
TRUST = "TILESMITH_TRUST_TRITON"
PASSED, FAILED, PREVENTED = 0, 1, 75  # exit codes of the program; 75: something else than the kernel was in the way
LONGEST = 900  # seconds


@dataclass(frozen=True)
class Verdict:
    """refusal: why a kernel must not serve under the installed Triton, "" if it may. note: what is known beside."""

    refusal: str = ""
    note: str = ""


_found: dict[tuple[str, str, torch.device], Verdict] = {}
_lock = threading.Lock()


def verdict(op: str, backend: str, device: torch.device, ask: bool = False) -> Verdict:
    """Whether a backend's kernel of `op` may serve on `device`: at once with a tested release, else by its trial.

    ask: only say what is known so far, without a trial.
    """
    if not in_gluon(backend) or releases.tested(releases.installed()) or settings().trust_triton:
        return Verdict()
    key = (op, backend, device)
    found = _found.get(key)
    if found is None:
        with _lock:
            found = _found.get(key) or _kept_or_tried(op, backend, device, ask)
            if found is None:
                return Verdict(note=f"{_untested()}: this kernel is tried before its first call")
            _found[key] = found
    return found


def path(op: str, backend: str, device: torch.device) -> Path:
    """Where the outcome of a trial is kept."""
    digest = hashlib.sha256(json.dumps(_conditions(device)).encode()).hexdigest()[:16]
    return settings().cache_dir / "trials" / f"{op}.{backend}.{digest}.json"


def _untested() -> str:
    return f"Triton {releases.installed()} is not among the tested releases"


@lru_cache(maxsize=16)
def _conditions(device: torch.device) -> dict[str, str | None]:
    from tilesmith import __version__

    name = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
    versions = {"torch": torch.__version__, "triton": releases.installed(), "tilesmith": __version__}
    return {"device": name, "driver": driver(), **versions}


def _kept_or_tried(op: str, backend: str, device: torch.device, ask: bool) -> Verdict | None:
    """None where there is no outcome yet and `ask` forbids to make one."""
    where = path(op, backend, device)
    kept = _read(where)
    if kept is None and ask:
        return None
    if kept is None:
        with _alone(where):  # ranks of one job come here together
            kept = _read(where) or _try(op, backend, device, where)
    if kept["passed"]:
        return Verdict(note=f"{_untested()}; this kernel was tried with it on {kept['date']} and is right")
    if kept.get("prevented"):
        return Verdict(f"{_untested()}, and this kernel could not be tried with it: {kept['message']}")
    again = f"; delete {where} to try it again" if where.exists() else ""
    return Verdict(f"{_untested()}, and this kernel failed when it was tried with it: {kept['message']}{again}")


def _read(where: Path) -> dict | None:
    try:
        kept = json.loads(where.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return kept if isinstance(kept, dict) and {"passed", "message", "date"} <= kept.keys() else None


@contextlib.contextmanager
def _alone(where: Path) -> Iterator[None]:
    """Inside, no other process of this user tries the same kernel, as far as the file system can say so."""
    with contextlib.ExitStack() as held:
        with contextlib.suppress(ImportError, OSError):
            import fcntl

            where.parent.mkdir(parents=True, exist_ok=True)
            lock = held.enter_context(where.with_suffix(".lock").open("w"))
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _try(op: str, backend: str, device: torch.device, where: Path) -> dict:
    """Run the trial, keep its outcome unless something else than the kernel prevented it, and return it."""
    log.warning("%s: trying the %s kernel of %s once, in a process of its own", _untested(), backend, op)
    code, message = _run([sys.executable, "-m", PROGRAM, op, backend, str(device)])
    today = datetime.date.today().isoformat()
    outcome = {"passed": code == PASSED, "prevented": code == PREVENTED, "message": message, "date": today}
    outcome |= _conditions(device)
    if code != PREVENTED:
        with contextlib.suppress(OSError):  # a cache that cannot be written: the outcome holds for this process
            where.parent.mkdir(parents=True, exist_ok=True)
            made = where.with_suffix(f".{os.getpid()}")
            made.write_text(json.dumps(outcome, indent=1), encoding="utf-8")
            made.replace(where)
    log.warning("%s kernel of %s: %s", backend, op, "right" if code == PASSED else message)
    return outcome


def _run(command: list[str]) -> tuple[int, str]:
    """The exit code of the program, as PASSED, FAILED or PREVENTED, and its last words."""
    environment = {
        k: v for k, v in os.environ.items() if k not in ("TILESMITH_USE", "TILESMITH_TUNE", "TILESMITH_DEBUG")
    }
    environment |= {TRUST: "1", "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    try:
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=LONGEST)
    except subprocess.TimeoutExpired:
        return PREVENTED, f"it took longer than {LONGEST} s"
    except OSError as problem:
        return PREVENTED, f"no process could be started for it: {problem}"
    if done.returncode < 0:
        return FAILED, f"its process was ended by {signal.Signals(-done.returncode).name}"
    words = (done.stdout.strip() if done.returncode in (PASSED, FAILED, PREVENTED) else "") or done.stderr.strip()
    return done.returncode if done.returncode in (PASSED, PREVENTED) else FAILED, words.rpartition("\n")[2]
