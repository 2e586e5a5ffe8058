"""`tilesmith bench`: ops, a whole model and host time beside their peers; results as tables, JSON and README tables."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tilesmith.cli.output import console, device_named, dtype_named, needs, op_named, refuse, table

if TYPE_CHECKING:
    import torch

RESULTS = Path("benchmarks/results")


def command(
    what: Annotated[list[str] | None, typer.Argument(help="Ops; or all, model, host.")] = None,
    device: Annotated[str | None, typer.Option(help="cpu, cuda, cuda:1, xpu, mps.")] = None,
    dtype: Annotated[str | None, typer.Option(help="float32, float16 or bfloat16.")] = None,
    against: Annotated[str, typer.Option(help="Peers to measure, separated by commas; all by default.")] = "",
    tag: Annotated[str | None, typer.Option(help="Cases to run: bench (default on a GPU) or test (on a CPU).")] = None,
    case: Annotated[list[str] | None, typer.Option(help="Only this case. Repeatable.")] = None,
    shape: Annotated[str, typer.Option(help="Which model: 1.5b, 1.5b-long or tiny.")] = "1.5b",
    rounds: Annotated[int, typer.Option(min=5, help="Interleaved rounds; the median is reported.")] = 5,
    save: Annotated[bool, typer.Option("--save", help="Write results as JSON.")] = False,
    out: Annotated[Path, typer.Option(help="Folder of the results.")] = RESULTS,
    readme: Annotated[Path | None, typer.Option(help="Only fill the tables of this file from the results.")] = None,
) -> None:
    """Measure beside PyTorch, torch.compile and other kernel libraries, in one process, interleaved.

    A peer that is not installed, or cannot do a case, is listed with the reason.
    """
    if readme is not None:
        _fill(readme, out)
        return
    if not what:
        refuse("name what to measure: an op, all, model or host")
    where = device_named(device)
    kind = dtype_named(dtype, where)
    line = "tilesmith " + shlex.join(sys.argv[1:])
    peers = tuple(filter(None, against.split(",")))
    for subject in _subjects(what, tag or _tag(where)):
        with console.status(f"measuring {subject}") as status:
            told = lambda step, subject=subject: status.update(f"measuring {subject}: {step}")  # noqa: E731
            if subject == "model":
                found = _model(shape, where, kind, line, peers, rounds, told)
            elif subject == "host":
                from tilesmith.bench import host

                found = host.run(where, kind, command=line, only=peers, rounds=rounds)
            else:
                from tilesmith.bench import run

                named = {
                    "tag": tag or _tag(where),
                    "only": peers,
                    "named": case or (),
                    "rounds": rounds,
                    "progress": told,
                }
                try:
                    found = run.run(op_named(subject).name, where, kind, command=line, **named)
                except ValueError as problem:
                    refuse(str(problem))
        _show(found)
        if save:
            from tilesmith.bench.document import save as write

            console.print(f"wrote {write(found, out)}", highlight=False)


def _tag(device: torch.device) -> str:
    return "test" if device.type == "cpu" else "bench"


def _subjects(what: list[str], tag: str) -> list[str]:
    if what != ["all"]:
        return [s if s in ("model", "host") else op_named(s).name for s in what]
    from tilesmith.bench.run import benchable

    return [*benchable(tag), "host"]


def _model(shape: str, device, dtype, line: str, peers: tuple[str, ...], rounds: int, told) -> dict[str, Any]:
    needs("transformers", "hf", "the model benchmark")
    from tilesmith.bench import model
    from tilesmith.models import optimize

    if shape not in model.SHAPES:
        refuse(f"--shape must be one of {', '.join(model.SHAPES)}, got {shape!r}")
    only = tuple(dict.fromkeys(("tilesmith", *peers))) if peers else model.PROVIDERS
    named = {"optimize": optimize, "command": line, "only": only, "rounds": rounds, "progress": told}
    return model.run(model.SHAPES[shape], device, dtype, **named)


def _fill(readme: Path, results: Path) -> None:
    from tilesmith.bench.tables import fill

    try:
        text = readme.read_text(encoding="utf-8")
        filled = fill(text, results)
    except FileNotFoundError as problem:
        refuse(str(problem))
    readme.write_text(filled, encoding="utf-8")
    console.print(f"{readme}: {'tables filled' if filled != text else 'already up to date'}", highlight=False)


def _show(found: dict[str, Any]) -> None:
    rows = [_line(row) for row in found["rows"] if "us" in row]
    columns = ("case", "pass", "by", "time", "±", "rate", "of ceiling", "× best peer", "peak memory")
    title = f"{found['subject']} on {found['hardware']['name']}"
    console.print(table(columns, rows, title=title, right=",".join(columns[3:])))
    unmeasured: dict[str, list[str]] = {}
    for row in found["rows"]:
        if "error" in row:
            unmeasured.setdefault(f"{row['provider']}: {row['error']}", []).append(_case(row))
    for why, where in unmeasured.items():
        console.print(f"not measured: {why} ({', '.join(dict.fromkeys(where))})", style="dim", highlight=False)
    console.print()


def _case(row: dict[str, Any]) -> str:
    return row.get("case") or row.get("model") or "rms_norm"


def _line(row: dict[str, Any]) -> tuple[str, ...]:
    memory = f"{row['peak_bytes'] / 1e6:,.1f} MB" if row.get("peak_bytes") else ""
    figures = (_time(row["us"]), f"{row['spread']:.0%}", _rate(row), *_ratios(row), memory)
    return (_case(row), row.get("pass", "step"), row["provider"], *figures)


def _time(us: float) -> str:
    return f"{us / 1e3:,.2f} ms" if us >= 1e4 else f"{us:,.1f} µs"


def _rate(row: dict[str, Any]) -> str:
    if "tokens_per_s" in row:
        return f"{row['tokens_per_s']:,.0f} tok/s"
    from tilesmith.bench.tables import rate

    return rate(row)


def _ratios(row: dict[str, Any]) -> tuple[str, str]:
    share = f"{row['of_ceiling']:.0%}" if "of_ceiling" in row else ""
    times = row.get("times_best_peer", row.get("times_pytorch"))
    return share, f"{times:.2f}" if times else ""
