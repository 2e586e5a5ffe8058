"""Trial: a Gluon kernel under a release of Triton that is not known to serve it, tried once on a small case.

A release may rename what a kernel is written in, compile it wrongly, or end in the middle of it (3.9 did by a signal).
So the trial runs in a process of its own, the first time that the kernel would serve a call; what it finds is kept on
disk under the versions of driver, PyTorch, Triton and this library, and holds for all processes.

A kernel whose calls have plans is tried once for each set of device kernels that a plan names, so that the fault of one
does not refuse calls that launch others. Any other kernel is tried once as a whole.
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
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

import torch

from tilesmith.engine import releases
from tilesmith.engine.backends import in_gluon
from tilesmith.engine.shared_files import exclusive, write_atomically
from tilesmith.hardware.detect import driver
from tilesmith.settings import settings

log = logging.getLogger("tilesmith")

PROGRAM = "tilesmith.validate.trial"  # by name: a trial knows cases and budgets, which stand above the engine
TRUST = "TILESMITH_TRUST_TRITON"
PASSED, FAILED, PREVENTED = 0, 1, 75  # exit codes of the program; 75: something else than the kernel was in the way
LONGEST = 900  # seconds
# by which others end a process: a system without memory, a scheduler, a user. No kernel is guilty of them.
FROM_OUTSIDE = ("SIGKILL", "SIGTERM", "SIGINT", "SIGHUP", "SIGXCPU")


@dataclass(frozen=True)
class Verdict:
    """refusal: why a kernel must not serve under the installed Triton, "" if it may. note: what is known beside."""

    refusal: str = ""
    note: str = ""


class Launches(NamedTuple):
    """What a call would launch. kernels: names of device kernels, sorted; None where the call has no plan. dtype,
    columns: of the call's first tensor, its dtype's name and its last dim; a trial takes a case like it if it can."""

    kernels: tuple[str, ...] | None = None
    dtype: str = ""
    columns: int = 0


class Unit(NamedTuple):
    """What one trial decides on: an op's kernel of a backend, as far as it launches these device kernels."""

    op: str
    backend: str
    device: torch.device
    kernels: tuple[str, ...] | None

    def __str__(self) -> str:
        return f"this kernel ({', '.join(self.kernels)})" if self.kernels else "this kernel"


_found: dict[Unit, Verdict] = {}
_lock = threading.Lock()


def settled() -> bool:
    """Whether the installed release of Triton needs no trials."""
    return releases.tested(releases.installed()) or settings().trust_triton


def verdict(
    op: str,
    backend: str,
    device: torch.device,
    ask: bool = False,
    launches: Callable[[], Launches] = Launches,
) -> Verdict:
    """Whether a backend's kernel of `op` may serve a call on `device`: at once with a tested release, else by a trial.

    ask: only say what is known so far, without a trial. launches: what the call would launch; not asked with a tested
    release.
    """
    if not in_gluon(backend) or settled():
        return Verdict()
    call = launches()
    unit = Unit(op, backend, device, call.kernels)
    if unit.kernels == ():  # a call without work
        return Verdict()
    found = _found.get(unit)
    if found is None:
        with _lock:
            found = _found.get(unit) or _kept_or_tried(unit, call, ask)
            if found is None:
                return Verdict(note=f"{_untested()}: {unit} is tried before its first call")
            _found[unit] = found
    return found


def failures(device: torch.device) -> list[str]:
    """What failed its trial on `device` under the installed versions, a sentence for each, for `tilesmith doctor`."""
    if settled():
        return []
    conditions, found = _conditions(device), []
    for where in sorted((settings().cache_dir / "trials").glob("*.json")):
        kept = _read(where)
        if kept is None or kept["passed"] or not {"op", "backend"} <= kept.keys():
            continue
        if conditions.items() <= kept.items():
            kernels = f" ({', '.join(kept['kernels'])})" if kept.get("kernels") else ""
            again = f"delete {where} to try it again"
            found.append(f"{kept['backend']} kernel of {kept['op']}{kernels}: {kept['message']}; {again}")
    return found


def path(op: str, backend: str, device: torch.device, kernels: tuple[str, ...] | None = None) -> Path:
    """Where the outcome of a trial is kept."""
    known = json.dumps(_conditions(device)) + ",".join(kernels or ())
    digest = hashlib.sha256(known.encode()).hexdigest()[:16]
    return settings().cache_dir / "trials" / f"{op}.{backend}.{digest}.json"


def _untested() -> str:
    return f"Triton {releases.installed()} is not among the tested releases"


@lru_cache(maxsize=16)
def _conditions(device: torch.device) -> dict[str, str | None]:
    from tilesmith import __version__

    name = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
    versions = {"torch": torch.__version__, "triton": releases.installed(), "tilesmith": __version__}
    return {"device": name, "driver": driver(), **versions}


def _kept_or_tried(unit: Unit, call: Launches, ask: bool) -> Verdict | None:
    """None where there is no outcome yet and `ask` forbids to make one."""
    where = path(*unit)
    kept = _read(where)
    if kept is None and ask:
        return None
    if kept is None:
        with exclusive(where):  # ranks of one job come here together
            kept = _read(where) or _try(unit, call, where)
    if kept["passed"]:
        return Verdict(note=f"{_untested()}; {unit} was tried with it on {kept['date']}: {kept['message']}")
    if kept.get("prevented"):
        return Verdict(f"{_untested()}, and {unit} could not be tried with it: {kept['message']}")
    again = f"; delete {where} to try it again" if where.exists() else ""
    return Verdict(f"{_untested()}, and {unit} failed when it was tried with it: {kept['message']}{again}")


def _read(where: Path) -> dict | None:
    try:
        kept = json.loads(where.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return kept if isinstance(kept, dict) and {"passed", "message", "date"} <= kept.keys() else None


def _try(unit: Unit, call: Launches, where: Path) -> dict:
    """Run the trial, keep its outcome unless something else than the kernel prevented it, and return it."""
    kernels = ",".join(call.kernels or ())
    named = f"{unit.backend} kernel of {unit.op}" + (f" ({kernels})" if kernels else "")
    log.warning("%s: trying the %s once, in a process of its own", _untested(), named)
    like = [kernels, call.dtype, str(call.columns)] if kernels else []
    code, message = _run([sys.executable, "-m", PROGRAM, unit.op, unit.backend, str(unit.device), *like])
    today = datetime.date.today().isoformat()
    outcome = {"op": unit.op, "backend": unit.backend, "kernels": list(call.kernels or ())}
    outcome |= {"passed": code == PASSED, "prevented": code == PREVENTED, "message": message, "date": today}
    outcome |= _conditions(unit.device)
    if code != PREVENTED:
        with contextlib.suppress(OSError):  # a cache that cannot be written: the outcome holds for this process
            write_atomically(where, json.dumps(outcome, indent=1))
    log.warning("%s: %s", named, message)
    return outcome


def _run(command: list[str]) -> tuple[int, str]:
    """The exit code of the program, as PASSED, FAILED or PREVENTED, and its last words."""
    environment = {
        k: v for k, v in os.environ.items() if k not in ("TILESMITH_USE", "TILESMITH_TUNE", "TILESMITH_DEBUG")
    }
    environment |= {TRUST: "1", "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    try:
        how = {"capture_output": True, "encoding": "utf-8", "errors": "replace"}  # compilers may print anything
        done = subprocess.run(command, env=environment, timeout=LONGEST, **how)
    except subprocess.TimeoutExpired:
        return PREVENTED, f"it took longer than {LONGEST} s"
    except OSError as problem:
        return PREVENTED, f"no process could be started for it: {problem}"
    if done.returncode < 0:
        names = {number.value: number.name for number in signal.Signals}
        name = names.get(-done.returncode, f"signal {-done.returncode}")
        return PREVENTED if name in FROM_OUTSIDE else FAILED, f"its process was ended by {name}"
    words = (done.stdout.strip() if done.returncode in (PASSED, FAILED, PREVENTED) else "") or done.stderr.strip()
    return done.returncode if done.returncode in (PASSED, PREVENTED) else FAILED, words.rpartition("\n")[2]
