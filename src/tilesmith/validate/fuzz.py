"""Ops called with cases changed at random: sizes, layouts, dtypes and flags, fitting or not.

    python -m tilesmith.validate.fuzz 10000 --device cuda --save benchmarks/results/sm90/fuzz.json

A call must be right within its budget, whichever kernel serves it, or be refused by an error that names the op or one
of its arguments. Anything else is a fault, with the seed that repeats it: `--seed N --only OP 1`.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import random
import sys
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from tilesmith.engine import Case, Op, T, cases, ops
from tilesmith.hardware.detect import arch_of, driver
from tilesmith.validate.cases import Result, backends_on, check, check_each

REFUSALS = (ValueError, TypeError, NotImplementedError)
LAYOUTS = ("contiguous", "strided", "transposed")
SIZES = (1, 2, 3, 5, 8, 16, 17, 31, 32, 33, 48, 64, 80, 127, 128, 129)
NUMBERS = (0.0, 0.25, 1.0, -1.0, 2.0, float("nan"), float("inf"))
WHOLE = (0, 1, 2, -1, -2, 7, 128)
WRONG = (torch.int64, torch.bool, torch.float16, torch.float64, torch.complex64)


@dataclass(frozen=True)
class Outcome:
    """One call: "right", "refused" or "fault", what was changed in the case, and what was said."""

    op: str
    seed: int
    case: str
    dtype: str
    changes: tuple[str, ...]
    verdict: str
    message: str = ""


def fuzzed(names: Sequence[str] | None, count: int, device: torch.device | str, seed: int = 0) -> Iterator[Outcome]:
    """`count` calls, in turn of the named ops (default: all that have cases). A call depends on its seed alone."""
    served = [name for name in names or sorted(ops()) if small_cases(name)]
    for number in range(seed, seed + count):
        yield attempt(served[number % len(served)], random.Random(number), device, number)


def small_cases(op_name: str) -> list[Case]:
    """The cases of an op that take no time."""
    return [case for case in cases(op_name) if "test" in case.tags]


def attempt(op_name: str, draw: random.Random, device: torch.device | str, seed: int = 0) -> Outcome:
    """Change a case of an op and call its kernels with it."""
    op, case = ops()[op_name], draw.choice(small_cases(op_name))
    dtype = draw.choice(case.dtypes)
    args, changes = _changed(op, case, draw)
    changed = Case(case.name, args, case.tags, (dtype,))

    def outcome(verdict: str, message: str = "") -> Outcome:
        return Outcome(op_name, seed, case.name, str(dtype).removeprefix("torch."), changes, verdict, message)

    device = torch.device(device)
    try:
        op(*op.bind((), changed.build(device, dtype, changed.generator())))  # as it came; a check may widen it
        wrong = _wrong(op, changed, device, dtype)
    except REFUSALS as refusal:
        said = str(refusal)
        if any(name in said for name in (op_name, *op.parameters)):
            return outcome("refused", said)
        return outcome("fault", f"{type(refusal).__name__} names neither the op nor an argument: {said}")
    except Exception as problem:  # whatever it is, it is what is looked for
        return outcome("fault", f"{type(problem).__name__}: {problem}")
    if wrong:
        return outcome("fault", f"{wrong[0].kernel}: {wrong[0].message}")
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
        if not result.passed and (_is_far_off(result) or _nearly_always_wrong(op, result.kernel, case, device, dtype))
    ]


def _is_far_off(result: Result) -> bool:
    return "is off by" not in result.message or result.error > 8 * result.budget


def _nearly_always_wrong(op: Op, backend: str, case: Case, device: torch.device, dtype: torch.dtype) -> bool:
    draws = [Case(f"{case.name} {number}", case.args, case.tags, case.dtypes) for number in range(8)]
    results = [check(op, backend, draw, device, dtype) for draw in draws]
    failed = [result for result in results if not result.passed]
    return len(failed) >= 7 or any(map(_is_far_off, failed))


def _changed(op: Op, case: Case, draw: random.Random) -> tuple[dict[str, Any], tuple[str, ...]]:
    """Arguments like the case's, and what is different. Sizes change only where nothing was made for the old ones."""
    args, changes = dict(case.args), []
    tensors = [name for name, value in args.items() if isinstance(value, T)]
    plain = [name for name in tensors if args[name].init == "normal" and args[name].dtype is None]
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
    for name in [n for n, value in args.items() if not isinstance(value, T)]:
        if draw.random() < 0.15:
            args[name] = _flag(args[name], draw)
            changes.append(f"{name}={args[name]!r}")
    return args, tuple(changes)


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


def report(outcomes: Sequence[Outcome], device: torch.device, seconds: float, command: str) -> Mapping[str, Any]:
    """What is kept of a run: where and how it was made, counts for each op, and every fault."""
    counts = Counter((outcome.op, outcome.verdict) for outcome in outcomes)
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
    return {
        "subject": "fuzz",
        "command": command,
        "date": time.strftime("%Y-%m-%d"),
        "hardware": {"name": name, "arch": arch_of(device).name, "driver": driver() or ""},
        "versions": {"torch": torch.__version__},
        "calls": len(outcomes),
        "seconds": round(seconds),
        "verdicts": dict(Counter(outcome.verdict for outcome in outcomes)),
        "ops": {
            op: {verdict: counts[op, verdict] for verdict in ("right", "refused", "fault")}
            for op in sorted({outcome.op for outcome in outcomes})
        },
        "faults": [dataclasses.asdict(outcome) for outcome in outcomes if outcome.verdict == "fault"],
    }


def main() -> None:
    """Fuzz as the command line says; exit code 1 if there were faults."""
    parser = argparse.ArgumentParser(prog="python -m tilesmith.validate.fuzz")
    parser.add_argument("count", type=int, help="number of calls")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--only", nargs="+", metavar="OP", help="these ops")
    parser.add_argument("--seed", type=int, default=0, help="of the first call")
    parser.add_argument("--save", type=Path, help="a file for the report, as JSON")
    chosen = parser.parse_args()
    start, found = time.monotonic(), []
    for outcome in fuzzed(chosen.only, chosen.count, chosen.device, chosen.seed):
        found.append(outcome)
        if outcome.verdict == "fault":
            what = f"{outcome.op} seed {outcome.seed} ({outcome.case}; {', '.join(outcome.changes)})"
            sys.stdout.write(f"{what}: {outcome.message}\n")
    command = f"python -m tilesmith.validate.fuzz {chosen.count} --device {chosen.device} --seed {chosen.seed}"
    told = report(found, torch.device(chosen.device), time.monotonic() - start, command)
    sys.stdout.write(f"{told['calls']} calls: {told['verdicts']}\n")
    if chosen.save:
        chosen.save.parent.mkdir(parents=True, exist_ok=True)
        chosen.save.write_text(json.dumps(told, indent=1) + "\n", encoding="utf-8")
    raise SystemExit("fault" in told["verdicts"])


if __name__ == "__main__":
    main()
