"""`tilesmith bench`: ops, sweeps, a whole model and host time beside their peers; as tables, JSON and plots."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Container, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tilesmith.cli.output import (
    check_folder,
    console,
    device_named,
    dtype_named,
    errors,
    needs,
    op_named,
    print_json,
    refuse,
    refused,
    table,
)

if TYPE_CHECKING:
    import torch
    from rich.console import Console

RESULTS = Path("benchmarks/results")
CALLS = 20  # of a zoo
SHAPE, LIMIT = "1.5b", 600.0  # of the model, and of what it or context parallelism may take

# what may be measured, and how an error calls it
KINDS = {
    "op": "ops",
    "sweep": "ops with --sweep",
    "zoo": "ops with --zoo",
    "model": "model",
    "host": "host",
    "context-parallel": "context-parallel",
    "saved": "a saved sweep",
    "readme": "--readme",
}
_OPS = ("op", "sweep", "zoo")
_MEASURED = (*_OPS, "model", "host")
# option -> which of KINDS take it; of several subjects those that do take it
TAKERS = {
    "device": _MEASURED,
    "dtype": _MEASURED,
    "against": (*_MEASURED, "context-parallel"),
    "tag": ("op",),
    "case": ("op", "sweep", "host", "context-parallel"),
    "sweep": ("op", "sweep"),
    "zoo": ("op", "zoo"),
    "count": ("zoo",),
    "decode": ("zoo",),
    "plot": ("sweep", "saved"),
    "shape": ("model",),
    "rounds": (*_MEASURED, "context-parallel"),
    "limit": ("model", "context-parallel"),
    "forward": _OPS,
    "save": (*_MEASURED, "context-parallel"),
    "out": (*_MEASURED, "context-parallel", "readme"),
    "as_json": _MEASURED,
    "readme": ("readme",),
}


def command(
    context: typer.Context,
    what: Annotated[
        list[str] | None,
        typer.Argument(
            help="Ops, or all, model or host; context-parallel under torchrun; or a saved sweep to draw with --plot."
        ),
    ] = None,
    device: Annotated[str | None, typer.Option(help="cpu, cuda, cuda:1, xpu, mps.")] = None,
    dtype: Annotated[str | None, typer.Option(help="float32, float16 or bfloat16.")] = None,
    against: Annotated[
        str,
        typer.Option(
            help="Peers to measure, separated by commas; all by default. One of several ops must have each. "
            "tilesmith:triton is our Triton kernel."
        ),
    ] = "",
    tag: Annotated[str | None, typer.Option(help="Cases to run: bench (default on a GPU) or test (on a CPU).")] = None,
    case: Annotated[
        list[str] | None,
        typer.Option(help="Only this case; of a sweep, panels with this in their name. Repeatable."),
    ] = None,
    sweep: Annotated[
        str | None, typer.Option(help="Vary columns, tokens or vocabulary; columns=512,4096 takes these values.")
    ] = None,
    zoo: Annotated[
        int | None,
        typer.Option(
            help="Random shapes of published models, drawn with this seed: attention, products, rows, losses."
        ),
    ] = None,
    count: Annotated[int | None, typer.Option(min=1, help=f"With --zoo: how many calls; {CALLS} by default.")] = None,
    decode: Annotated[bool, typer.Option("--decode", help="With --zoo: attention calls of decoding.")] = False,
    plot: Annotated[Path | None, typer.Option(help="Folder for the plots of a sweep, SVG and PNG.")] = None,
    shape: Annotated[
        str | None, typer.Option(help=f"With model: its size, 1.5b, 1.5b-long or tiny; {SHAPE} by default.")
    ] = None,
    rounds: Annotated[int, typer.Option(min=5, help="Interleaved rounds; the median is reported.")] = 5,
    limit: Annotated[
        float | None,
        typer.Option(
            min=1,
            help="With model or context-parallel: seconds after which a provider that has not run once is given up; "
            f"{LIMIT:g} by default.",
        ),
    ] = None,
    forward: Annotated[bool, typer.Option("--forward", help="Measure only the forward of ops.")] = False,
    save: Annotated[bool, typer.Option("--save", help="Write results as JSON; rows of other cases are kept.")] = False,
    out: Annotated[Path, typer.Option(help="Folder for the results.")] = RESULTS,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON array instead of tables.")] = False,
    readme: Annotated[
        Path | None, typer.Option(help="Measure nothing; fill the tables of this file from the results.")
    ] = None,
) -> None:
    """Compare speed with PyTorch, torch.compile and other kernel libraries, in interleaved rounds of one process.

    A peer that is not installed, or does not support a case, is listed with the reason.
    """
    if not what and readme is None:
        refuse("name what to measure: an op, all, model, host or context-parallel")
    what = what or []
    _check_zoo(what, zoo, count, decode, bool(sweep or tag or case))
    _check_taken(context, what)
    if readme is not None:
        _fill(readme, out)
        return
    if save:
        check_folder("--out", out)
    if "context-parallel" in what:
        _ranks(what, rounds, limit or LIMIT, tuple(filter(None, against.split(","))), case or (), out if save else None)
        return
    if plot is not None:
        needs("matplotlib", "bench", "--plot")
        check_folder("--plot", plot)
    if any(name.endswith(".json") for name in what):
        _saved(what, plot)
        return
    from tilesmith.bench.subjects import cases_of, lacking, providers_of

    where = device_named(device)
    line = "tilesmith " + shlex.join(sys.argv[1:])
    measure = {"device": where, "dtype": dtype_named(dtype, where), "command": line, "rounds": rounds}
    only = tuple(filter(None, (peer.strip() for peer in against.split(","))))

    results = _Results(out if save else None)
    documents: list[dict[str, Any]] = []
    subjects = _selected(_subjects(what, tag or _tag(where), sweep, zoo, decode), case or (), only, sweep)
    if save:
        _check_results(subjects, out, where)
    for subject in subjects:
        with console.status(f"measuring {subject}") as status:
            told = lambda step, subject=subject: status.update(f"measuring {subject}: {step}")  # noqa: E731
            asked = {**measure, "progress": told, "so_far": results.write, "only": providers_of(subject, only)}
            named = tuple(case or ()) if sweep else cases_of(subject, case or ())
            if subject == "model":
                found = _model(shape or SHAPE, {**asked, "limit": limit or LIMIT})
            elif subject == "host":
                found = _host({**asked, "named": named})
            elif zoo is not None:
                how = {"seed": zoo, "count": count or CALLS, "decode": decode, "forward": forward}
                found = _zoo(subject, {**asked, **how})
            else:
                found = _op(subject, sweep, {**asked, "named": named, "forward": forward}, tag or _tag(where))
        told = errors if as_json else console
        documents.append(found)
        if not as_json:
            _show(found)
        for peer in lacking(subject, only):
            told.print(f"{subject} has no provider {peer}", style="dim", highlight=False)
        results.finish(found, subject == "model" or bool(case) or forward or "=" in (sweep or ""), told)
        if plot is not None:
            _plot(found, plot, told)
    if as_json:
        print_json(documents)


class _Results:
    """Files of results in a folder, with what was in them before; None: nothing is written."""

    def __init__(self, folder: Path | None):
        self.folder = folder
        self.before: dict[Path, dict[str, Any]] = {}

    def write(self, found: dict[str, Any], keep: bool = True) -> None:
        """Save a document, as `bench.document.save` does."""
        from tilesmith.bench.document import load, path_of, save

        if self.folder is None:
            return
        path = path_of(found, self.folder)
        if path not in self.before:
            self.before[path] = load(path) if path.is_file() else {"rows": []}
        save(found, self.folder, keep=keep)

    def finish(self, found: dict[str, Any], keep: bool, told: Console) -> None:
        """Save the whole document, and say where and which figures of other providers it takes the place of."""
        from tilesmith.bench.document import dropped, path_of

        if self.folder is None:
            return
        self.write(found, keep)
        path = path_of(found, self.folder)
        told.print(f"wrote {path}", highlight=False)
        lost = dropped(self.before[path], found)
        if lost:
            each = ", ".join(f"{provider} {count}" for provider, count in lost.items())
            said = f"dropped figures of providers that this run did not measure on the same cases: {each}"
            told.print(f"{said}; those of another run are not comparable", highlight=False)


def _check_results(subjects: list[str], out: Path, device: torch.device) -> None:
    """Refuse results of before that cannot be read, before hours are spent on what is to stand beside them."""
    from tilesmith.bench.document import load
    from tilesmith.hardware import arch_of

    for path in sorted((out / arch_of(device).name).glob("*.json")):
        if any(path.stem == subject or path.stem.startswith(f"{subject}-") for subject in subjects):
            try:
                load(path)
            except (OSError, ValueError) as problem:
                refuse(f"--out: {path} is not a saved result, and would hold the new rows: {problem}; move it away")


def _check_zoo(what: Sequence[str], zoo: int | None, count: int | None, decode: bool, chosen: bool) -> None:
    """Refuse, before anything is measured, what has no calls to draw. chosen: by --sweep, --tag or --case."""
    if zoo is None:
        return
    from tilesmith.bench.zoo import sample

    if chosen:
        refuse("--zoo draws the calls; --sweep, --tag and --case choose others: leave them out")
    with refused("--zoo"):
        for name in _drawn(decode) if list(what) == ["all"] else what:
            other = name in ("model", "host", "context-parallel") or name.endswith(".json")
            sample(name if other else op_named(name).name, zoo, count or CALLS, decode)


def _check_taken(context: typer.Context, what: Sequence[str]) -> None:
    """Refuse options that nothing of what is measured takes."""
    given = {p.name: p.opts[0] for p in context.command.params if p.name and p.name in TAKERS}
    given = {name: flag for name, flag in given.items() if context.get_parameter_source(name).name != "DEFAULT"}
    if "readme" in given and what:
        refuse(f"--readme measures nothing; leave {', '.join(what)} out")
    kinds = {"readme"} if "readme" in given else {kind for name in what for kind in _kinds(name, given)}
    for name, flag in given.items():
        if not kinds & set(TAKERS[name]):
            *others, last = (KINDS[kind] for kind in TAKERS[name])
            takers = f"{', '.join(others)} and {last}" if others else last
            refuse(f"{flag} is for {takers}; {' and '.join(what) or '--readme'} cannot take it: leave it out")


def _kinds(name: str, given: Container[str]) -> tuple[str, ...]:
    """What of KINDS a subject is with the options that are given."""
    if name.endswith(".json"):
        return ("saved",)
    if name in ("model", "host", "context-parallel"):
        return (name,)
    how = "zoo" if "zoo" in given else "sweep" if "sweep" in given else "op"
    return ("op", "host") if name == "all" and how == "op" else (how,)


def _drawn(decode: bool) -> list[str]:
    """The ops that `all` means with --zoo."""
    from tilesmith.bench.zoo import served

    return ["attention"] if decode else served()


def _op(name: str, sweep: str | None, measure: dict[str, Any], tag: str) -> dict[str, Any]:
    try:
        if sweep is None:
            from tilesmith.bench import run

            return run.run(name, **measure, tag=tag)
        from tilesmith.bench import sweep as sweeps

        axis, _, values = sweep.partition("=")
        return sweeps.run(name, axis, **measure, at=[int(value) for value in filter(None, values.split(","))])
    except ValueError as problem:
        refuse(f"--sweep {sweep}: {problem}" if sweep else str(problem))


def _zoo(name: str, measure: dict[str, Any]) -> dict[str, Any]:
    from tilesmith.bench import zoo

    try:
        return zoo.run(name, **measure)
    except ValueError as problem:
        refuse(f"--zoo: {problem}")


def _host(measure: dict[str, Any]) -> dict[str, Any]:
    from tilesmith.bench import host

    try:
        return host.run(**measure)
    except ValueError as problem:
        refuse(str(problem))


def _ranks(what: list[str], rounds: int, limit: float, only: tuple, cases: list[str] | tuple, out: Path | None) -> None:
    """Context parallelism: this process is one rank of torchrun's, and the first one tells."""
    import os

    if len(what) > 1:
        refuse("context-parallel is measured alone")
    if "LOCAL_RANK" not in os.environ:
        refuse(
            "context-parallel is measured by several processes: torchrun --nproc-per-node 2 --no-python tilesmith "
            "bench context-parallel"
        )
    from tilesmith.bench import context_parallel

    count = os.environ.get("LOCAL_WORLD_SIZE", "?")
    line = f"torchrun --nproc-per-node {count} --no-python tilesmith {shlex.join(sys.argv[1:])}"
    with context_parallel.process_group() as rank:
        told = (lambda step: console.print(step, style="dim")) if rank == 0 else (lambda step: None)
        results = _Results(out if rank == 0 else None)
        how = {"rounds": rounds, "limit": limit, "progress": told}
        how["so_far"] = lambda found: results.write(found, bool(cases))
        try:
            found = context_parallel.run(command=line, only=only, cases=cases, **how)
        except ValueError as problem:
            refuse(str(problem))
        if rank == 0:
            for row in (row for row in found["rows"] if "error_over_one_gpu" in row):
                console.print(f"{row['case']}, {row['provider']}: error over one GPU's {row['error_over_one_gpu']}")
            _show(found)
            results.finish(found, bool(cases), console)


def _plot(document: dict[str, Any], folder: Path, told: Console = console) -> None:
    from tilesmith.bench.plots import plot

    try:
        paths = plot(document, folder)
    except ValueError as problem:
        refuse(str(problem))
    told.print(f"drew {', '.join(map(str, paths))}", highlight=False, soft_wrap=True)


def _saved(what: list[str], folder: Path | None) -> None:
    """Plot saved sweeps."""
    from tilesmith.bench.document import load

    paths = [Path(name) for name in what if name.endswith(".json")]
    if len(paths) < len(what):
        refuse("plot saved results, or measure; not both at once")
    if folder is None:
        refuse(f"{paths[0]} is a result; --plot FOLDER draws it")
    for path in paths:
        if not path.exists():
            refuse(f"{path} does not exist; give a saved sweep")
        try:
            document = load(path)
        except (OSError, ValueError) as problem:
            refuse(f"{path} is not a saved result: {problem}")
        _plot(document, folder)


def _tag(device: torch.device) -> str:
    return "test" if device.type == "cpu" else "bench"


def _subjects(what: list[str], tag: str, sweep: str | None, zoo: int | None, decode: bool) -> list[str]:
    if sweep is not None:
        from tilesmith.bench.sweep import AXES, swept

        axis = sweep.partition("=")[0]
        if axis not in AXES:
            refuse(
                f"--sweep must be {', '.join(AXES)}, or such an axis with its values: columns=512,4096; got {sweep!r}"
            )
        if not all(value.isdecimal() for value in filter(None, sweep.partition("=")[2].split(","))):
            refuse(f"--sweep {sweep}: values must be whole numbers, as in {axis}=512,4096")
        return swept(axis) if what == ["all"] else [op_named(name).name for name in what]
    if what != ["all"]:
        return [s if s in ("model", "host") else op_named(s).name for s in what]
    if zoo is not None:
        return _drawn(decode)
    from tilesmith.bench.run import benchable

    return [*benchable(tag), "host"]


def _selected(subjects: list[str], named: Sequence[str], only: Sequence[str], sweep: str | None) -> list[str]:
    """The subjects that have one of the cases `named`, if there are any. Refuses names that no subject has."""
    from tilesmith.bench.subjects import cases_of, check_cases, check_providers

    with refused("--against"):
        check_providers(subjects, only)
    if not named or sweep:
        return subjects
    with refused("--case"):
        check_cases(subjects, named)
    return [subject for subject in subjects if cases_of(subject, named)]


def _model(shape: str, measure: dict[str, Any]) -> dict[str, Any]:
    needs("transformers", "hf", "the model benchmark")
    from tilesmith.bench import model
    from tilesmith.models import optimize

    if shape not in model.SHAPES:
        refuse(f"--shape must be one of {', '.join(model.SHAPES)}, got {shape!r}")
    peers = measure["only"]
    only = tuple(dict.fromkeys(("tilesmith", *peers))) if peers else model.PROVIDERS
    return model.run(model.SHAPES[shape], optimize=optimize, **{**measure, "only": only})


def _fill(readme: Path, results: Path) -> None:
    from tilesmith.bench.tables import fill

    if not readme.is_file():
        refuse(f"--readme {readme} does not exist; give a file with tables to fill")
    try:
        text = readme.read_text(encoding="utf-8")
        filled = fill(text, results)
    except (OSError, ValueError) as problem:
        refuse(str(problem))
    try:
        readme.write_text(filled, encoding="utf-8")
    except OSError as problem:
        refuse(f"--readme {readme} cannot be written to: {problem.strerror}")
    console.print(f"{readme}: {'tables filled' if filled != text else 'already up to date'}", highlight=False)


def _show(found: dict[str, Any]) -> None:
    rows = [_line(row) for row in found["rows"] if "us" in row]
    columns = ("case", "pass", "by", "time", "±", "rate", "of ceiling", "× best peer", "peak memory")
    title = f"{found['subject']} on {found['hardware']['name']}"
    console.print(table(columns, rows, title=title, right=",".join(columns[3:])))
    for which, ratios in found.get("summary", {}).items():
        measure, least = ("best_peer", "minimum") if "minimum" in ratios else ("products", "maximum")
        worst = "; ".join(f"{row['case']} {row[f'times_{measure}']:.2f}" for row in ratios["worst"])
        mean = f"geometric mean {ratios['geometric_mean']:.3f}, {least} {ratios[least]:.3f}"
        said = f"{which}, {ratios['calls']} calls, × {measure.replace('_', ' ')}: {mean}; worst: {worst}"
        console.print(said, highlight=False)
    every = len(dict.fromkeys(map(_case, found["rows"])))
    unmeasured: dict[str, dict[str, None]] = {}
    for row in found["rows"]:
        if "error" in row:
            unmeasured.setdefault(f"{row['provider']}: {row['error']}", {})[_case(row)] = None
    for why, where in unmeasured.items():
        told = f"all {every} cases" if 1 < len(where) == every else ", ".join(where)
        console.print(f"not measured: {why} ({told})", style="dim", highlight=False)
    console.print()


def _case(row: dict[str, Any]) -> str:
    return row.get("case") or row["model"]


def _line(row: dict[str, Any]) -> tuple[str, ...]:
    memory = f"{row['peak_bytes'] / 1e6:,.1f} MB" if row.get("peak_bytes") else ""
    figures = (_time(row["us"]), f"{row['spread']:.0%}", _rate(row), *_ratios(row), memory)
    by = f"{row['provider']}, overwrites {', '.join(row['overwrites'])}" if "overwrites" in row else row["provider"]
    return (_case(row), row.get("pass", "step"), by, *figures)


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
