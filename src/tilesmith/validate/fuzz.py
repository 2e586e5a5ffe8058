"""Ops called with cases changed at random: sizes, layouts, dtypes and flags, fitting or not.

    python -m tilesmith.validate.fuzz 10000 --processes 14 --alike 24 --save benchmarks/results/sm90/fuzz.json

A call must be right within its budget, whichever kernel serves it, or be refused by an error that names the op or one
of its arguments. Anything else is a failure, with the seed that repeats it: `--only OP --seed N --alike A 1`.

`--alike 24` draws dtype, layouts and flags once for 24 calls, whose sizes and values differ: compiling for a GPU takes
a second a kernel, and these calls share kernels. `--seconds` ends the run early; the report counts the calls made.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import importlib.metadata
import json
import os
import platform
import random
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from tilesmith.engine import Case, Op, T, cases, next_power_of_2, ops
from tilesmith.engine.arguments import dtype_name
from tilesmith.engine.backends import interpreting
from tilesmith.hardware.detect import arch_of, driver
from tilesmith.validate.cases import Result, backends_on, check, check_each

REFUSALS = (ValueError, TypeError, NotImplementedError)
LAYOUTS = ("contiguous", "strided", "transposed")
SIZES = (1, 2, 3, 5, 8, 16, 17, 31, 32, 33, 48, 64, 80, 127, 128, 129)
NUMBERS = (0.0, 0.25, 1.0, -1.0, 2.0, float("nan"), float("inf"))
WHOLE = (0, 1, 2, -1, -2, 7, 128)
MEANINGS = ("log_target",)  # flags that say what a tensor's values are, which were made for them
WRONG = (torch.int64, torch.bool, torch.float16, torch.float64, torch.complex64)


@dataclass(frozen=True)
class Outcome:
    """One call: "right", "refused" or "failure", what was changed in the case, and what was said."""

    op: str
    seed: int
    case: str
    dtype: str
    changes: tuple[str, ...]
    verdict: str
    message: str = ""


def fuzzed(
    names: Sequence[str] | None, seeds: Iterable[int], device: torch.device | str, alike: int = 1
) -> Iterator[Outcome]:
    """One call for each seed. A call depends on its seed, `alike` and the names alone.

    names: of ops; default: all that have cases. alike: so many neighbouring seeds call one op with one draw of dtype,
    layouts and flags, and with sizes of one kind.
    """
    served = [name for name in names or sorted(ops()) if small_cases(name)]
    for seed in seeds:
        name = served[seed // alike % len(served)]
        vary = random.Random(seed) if alike > 1 else None
        yield attempt(name, random.Random(seed // alike), device, seed, vary)


def small_cases(op_name: str) -> list[Case]:
    """The cases of an op that take no time."""
    return [case for case in cases(op_name) if "test" in case.tags]


def attempt(
    op_name: str,
    draw: random.Random,
    device: torch.device | str,
    seed: int = 0,
    vary: random.Random | None = None,
) -> Outcome:
    """Change a case of an op and call its kernels with it. vary: draws sizes and values like those of `draw`, for which
    the same kernels are compiled."""
    op, case = ops()[op_name], draw.choice(small_cases(op_name))
    dtype = draw.choice(case.dtypes)
    args, changes = _changed(case, draw)
    if vary is not None:
        args, more = _varied(args, vary)
        changes += more
    changed = Case(case.name if vary is None else f"{case.name} {seed}", args, case.tags, (dtype,))

    def outcome(verdict: str, message: str = "") -> Outcome:
        return Outcome(op_name, seed, case.name, dtype_name(dtype), changes, verdict, message)

    device = torch.device(device)
    try:
        op(*op.bind((), changed.build(device, dtype, changed.generator())))  # as it came; a check may widen it
        wrong = _wrong(op, changed, device, dtype)
    except REFUSALS as refusal:
        said = str(refusal)
        if any(name in said for name in (op_name, *op.parameters)):
            return outcome("refused", said)
        return outcome("failure", f"{type(refusal).__name__} names neither the op nor an argument: {said}")
    except Exception as problem:  # whatever it is, it is what is looked for
        return outcome("failure", f"{type(problem).__name__}: {problem}")
    if wrong:
        return outcome("failure", f"{wrong[0].kernel}: {wrong[0].message}")
    return outcome("right")


def _wrong(op: Op, case: Case, device: torch.device, dtype: torch.dtype) -> list[Result]:
    """The kernels that are wrong.

    The error of the reference, from which the budget follows, is one draw where the output is one number, and may be
    small by chance: three times in ten less than half of an equal one. So a kernel somewhat over its budget gets 8 more
    draws of numbers, and is wrong if 7 of them are.
    """
    return [
        result
        for result in check_each(op, backends_on(op, device), case, device, dtype)
        if not result.passed
        and not _is_zero_by_cancellation(result)
        and (_is_far_off(result) or _nearly_always_wrong(op, result.kernel, case, device, dtype))
    ]


def _is_zero_by_cancellation(result: Result) -> bool:
    """Whether a result is 0 but for rounding of terms about 1, as cotangents are: the gradient of one expert's share
    among one, say. The budget follows from the size of a result, which says nothing there."""
    eps = torch.finfo(result.dtype).eps
    return "is off by" in result.message and result.budget < eps**2 and result.error <= eps


def _is_far_off(result: Result) -> bool:
    return "is off by" not in result.message or result.error > 8 * result.budget


def _nearly_always_wrong(op: Op, backend: str, case: Case, device: torch.device, dtype: torch.dtype) -> bool:
    draws = [Case(f"{case.name} {number}", case.args, case.tags, case.dtypes) for number in range(8)]
    results = [check(op, backend, draw, device, dtype) for draw in draws]
    failed = [result for result in results if not result.passed]
    return len(failed) >= 7 or any(map(_is_far_off, failed))


def _changed(case: Case, draw: random.Random) -> tuple[dict[str, Any], tuple[str, ...]]:
    """Arguments like the case's, and what is different. Sizes change only where nothing was made for the old ones."""
    args, changes = dict(case.args), []
    tensors, plain = _tensors(args)
    if len(plain) == len(tensors) and draw.random() < 0.7:
        sizes = {n: draw.choice(SIZES) if n > 1 and draw.random() < 0.5 else n for t in tensors for n in args[t].shape}
        for name in tensors:
            args[name] = _with(args[name], shape=tuple(sizes[n] for n in args[name].shape))
        changes += [f"{old} -> {new}" for old, new in sizes.items() if old != new]
    for name in plain:
        layout = draw.choice(LAYOUTS)
        if layout != args[name].layout:
            args[name] = _with(args[name], layout=layout)
            changes.append(f"{name} {layout}")
    if plain and draw.random() < 0.15:
        name = draw.choice(plain)
        shape = list(args[name].shape)
        if shape:
            shape[draw.randrange(len(shape))] += draw.choice((-1, 1))
            args[name] = _with(args[name], shape=tuple(max(0, n) for n in shape))
            changes.append(f"{name} of shape {args[name].shape}")
    if plain and draw.random() < 0.1:
        name = draw.choice(plain)
        args[name] = _with(args[name], dtype=draw.choice(WRONG), init=_any)
        changes.append(f"{name} of {args[name].dtype}")
    for name in [n for n, value in args.items() if not isinstance(value, T) and n not in MEANINGS]:
        if draw.random() < 0.15:
            args[name] = _flag(args[name], draw)
            changes.append(f"{name}={args[name]!r}")
    return args, tuple(changes)


def _varied(args: dict[str, Any], draw: random.Random) -> tuple[dict[str, Any], tuple[str, ...]]:
    """The arguments with sizes of the same kind, in three calls of four, and what is different."""
    tensors, plain = _tensors(args)
    if len(plain) != len(tensors) or draw.random() < 0.25:
        return args, ()
    sizes = {n: draw.choice(_sizes_like(n)) for name in tensors for n in args[name].shape}
    found = {name: _with(args[name], shape=tuple(sizes[n] for n in args[name].shape)) for name in tensors}
    return args | found, tuple(f"{old} -> {new}" for old, new in sizes.items() if old != new)


def _tensors(args: Mapping[str, Any]) -> tuple[list[str], list[str]]:
    """The names of tensors, and of those among them that may have another shape."""
    tensors = [name for name, value in args.items() if isinstance(value, T)]
    return tensors, [name for name in tensors if args[name].init == "normal" and args[name].dtype is None]


def _sizes_like(n: int) -> list[int]:
    """Sizes up to the same power of two, multiples of 16 if n is one, powers of two if n is one."""
    top = next_power_of_2(n)
    if n in (0, top):
        return [n]
    return [m for m in range(top // 2 + 1, top) if (m % 16 == 0) == (n % 16 == 0)]


def _with(tensor: T, shape: tuple[int, ...] | None = None, **changes: Any) -> T:
    fields = {"dtype": tensor.dtype, "grad": tensor.grad, "layout": tensor.layout, "init": tensor.init} | changes
    return T(*(tensor.shape if shape is None else shape), **fields)


def _any(generator: torch.Generator, shape: tuple[int, ...], device: torch.device) -> torch.Tensor:
    """Values that any dtype can hold, converted there."""
    return torch.randint(0, 2, shape, generator=generator, device=device).to(torch.float32)


def _flag(value: Any, draw: random.Random) -> Any:
    """Another value for a plain argument: of its type, or of a wrong one."""
    if draw.random() < 0.1:
        return draw.choice(("no", None, 1.5, True, ()))
    if isinstance(value, bool):
        return not value
    if isinstance(value, int):
        return draw.choice(WHOLE)
    if isinstance(value, float):
        return draw.choice(NUMBERS)
    return draw.choice(("", "unknown")) if isinstance(value, str) else value


def report(
    outcomes: Sequence[Outcome], device: torch.device, seed: int, alike: int, seconds: float, command: str
) -> Mapping[str, Any]:
    """What is kept of a run: where and how it was made, counts for each op, and every failure."""
    counts = Counter((outcome.op, outcome.verdict) for outcome in outcomes)
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else platform.processor() or platform.machine()
    return {
        "subject": "fuzz",
        "command": command,
        "date": time.strftime("%Y-%m-%d"),
        "device": str(device),
        "hardware": {"name": name, "arch": arch_of(device).name, "driver": driver() or ""},
        "versions": _versions(),
        "seed": seed,
        "alike": alike,
        "cases": len(outcomes),
        "seconds": round(seconds),
        "verdicts": dict(Counter(outcome.verdict for outcome in outcomes)),
        "ops": {
            op: {verdict: counts[op, verdict] for verdict in ("right", "refused", "failure")}
            for op in sorted({outcome.op for outcome in outcomes})
        },
        "failures": [dataclasses.asdict(outcome) for outcome in outcomes if outcome.verdict == "failure"],
    }


def _versions() -> dict[str, str]:
    found = {"python": platform.python_version(), "torch": torch.__version__}
    for name in ("tilesmith", "triton", "hypothesis"):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[name] = importlib.metadata.version(name)
    return found


def in_processes(command: Sequence[str], parts: int, until: float | None) -> list[Outcome]:
    """The outcomes of `parts` processes that share the calls of a command out among them.

    A process that ended in the middle of a call, as after a fault of the device, is a failure of that call; another one
    goes on behind it. until: the time (`time.monotonic`) at which all are ended.
    """
    found: list[Outcome] = []

    def follow(part: int) -> None:
        done, last = 0, None
        while last != "":  # the process's last line: all calls were made
            given = [*command, "--processes", str(parts), "--part", str(part), "--done", str(done)]
            with subprocess.Popen(given, stdout=subprocess.PIPE, text=True) as process:
                timer = threading.Timer(0 if until is None else max(0.0, until - time.monotonic()), process.kill)
                if until is not None:
                    timer.start()
                begun = None
                for line in process.stdout:
                    last = line.strip()
                    if last:
                        told = Outcome(**json.loads(last))
                        begun = told if told.verdict == "begun" else None
                        if begun is None:
                            found.append(dataclasses.replace(told, changes=tuple(told.changes)))
                            done += 1
                timer.cancel()
            if until is not None and time.monotonic() >= until:
                return
            if last != "" and begun is not None:
                ended = f"the process ended with code {process.returncode}"
                found.append(dataclasses.replace(begun, changes=(), verdict="failure", message=ended))
                done += 1
            elif last is None:
                raise RuntimeError(f"{' '.join(given)} ended with code {process.returncode} before its first call")

    threads = [threading.Thread(target=follow, args=(part,)) for part in range(parts)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return sorted(found, key=lambda outcome: outcome.seed)


def _run_part(chosen: argparse.Namespace) -> None:
    """One process: a line of JSON before each call and one after it; an empty one at the end."""
    seeds = range(chosen.seed, chosen.seed + chosen.count)
    # turned by one from round to round of the ops, so that no process has a few ops of its own
    served = len(chosen.only or [name for name in ops() if small_cases(name)])
    mine = [s for s in seeds if (s // chosen.alike + s // chosen.alike // served) % chosen.processes == chosen.part]
    for seed in mine[chosen.done :]:
        _tell(Outcome("", seed, "", "", (), "begun"))
        (outcome,) = fuzzed(chosen.only, [seed], chosen.device, chosen.alike)
        _tell(outcome)
        if outcome.verdict == "failure" and "CUDA error" in outcome.message:
            os._exit(3)  # the device serves this process no more
    sys.stdout.write("\n")


def _tell(outcome: Outcome) -> None:
    sys.stdout.write(json.dumps(dataclasses.asdict(outcome)) + "\n")
    sys.stdout.flush()


def main() -> None:
    """Fuzz as the command line says; exit code 1 if there were failures."""
    parser = argparse.ArgumentParser(prog="python -m tilesmith.validate.fuzz")
    parser.add_argument("count", type=int, help="number of calls")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--only", nargs="+", metavar="OP", help="these ops")
    parser.add_argument("--seed", type=int, default=0, help="of the first call")
    parser.add_argument("--alike", type=int, default=1, help="calls of one draw of dtype, layouts and flags")
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--seconds", type=float, help="end after this time")
    parser.add_argument("--save", type=Path, help="a file for the report, as JSON")
    for name in ("--part", "--done"):  # of one process
        parser.add_argument(name, type=int, help=argparse.SUPPRESS)
    chosen = parser.parse_args()
    if chosen.part is not None:
        _run_part(chosen)
        return
    start = time.monotonic()
    until = None if chosen.seconds is None else start + chosen.seconds
    own = [str(chosen.count), "--device", chosen.device, "--seed", str(chosen.seed), "--alike", str(chosen.alike)]
    own += ["--only", *chosen.only] if chosen.only else []
    command = ["python", "-m", "tilesmith.validate.fuzz", *own]
    found = in_processes([sys.executable, *command[1:]], chosen.processes, until)
    for outcome in (outcome for outcome in found if outcome.verdict == "failure"):
        what = f"{outcome.op} seed {outcome.seed} ({outcome.case}; {', '.join(outcome.changes)})"
        sys.stdout.write(f"{what}: {outcome.message}\n")
    told = report(
        found,
        torch.device(chosen.device),
        chosen.seed,
        chosen.alike,
        time.monotonic() - start,
        ("TRITON_INTERPRET=1 " if interpreting() else "") + " ".join(command),
    )
    sys.stdout.write(f"{told['cases']} cases in {told['seconds']} s: {told['verdicts']}\n")
    if chosen.save:
        chosen.save.parent.mkdir(parents=True, exist_ok=True)
        chosen.save.write_text(json.dumps(told, indent=1) + "\n", encoding="utf-8")
    raise SystemExit(bool(told["failures"]) or not found)


if __name__ == "__main__":
    main()
