"""`tilesmith tune`: the fastest configuration of each kernel on this device, written as rows with their provenance."""

from __future__ import annotations

from importlib import resources
from pathlib import Path
from typing import Annotated

import typer

from tilesmith.cli.output import (
    CHECK_FAILED,
    check_folder,
    console,
    device_named,
    dtype_named,
    op_named,
    print_json,
    refuse,
    refused,
    table,
)
from tilesmith.settings import settings

_FIELDS = ("case", "kernel", "default", "best", "gain", "configuration", "tried")


def command(
    ops: Annotated[list[str], typer.Argument(help="Ops to tune; or all.")],
    device: Annotated[str | None, typer.Option(help="cuda, cuda:1, xpu.")] = None,
    dtype: Annotated[str | None, typer.Option(help="float32, float16 or bfloat16.")] = None,
    case: Annotated[list[str] | None, typer.Option(help="Only this case. Repeatable.")] = None,
    rounds: Annotated[int, typer.Option(min=3, help="Interleaved rounds of each comparison.")] = 3,
    save: Annotated[bool, typer.Option("--save", help="Keep faster configurations for this machine.")] = False,
    ship: Annotated[
        bool, typer.Option("--ship", help="Write them into the package instead, for every GPU of this kind.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON array instead of tables.")] = False,
) -> None:
    """Search for the fastest configuration of each kernel that serves the cases tagged "tune".

    Before anything is kept, the op's kernels must pass `tilesmith verify` here, and each winner its own case. If some
    configuration of a kernel is more than 3 % faster than the default, rows for all its sizes are kept, since a size
    without a row takes the nearest one. Exits with 1 if a check fails.
    """
    from tilesmith.bench.selection import check_named
    from tilesmith.bench.subjects import cases_of, check_cases
    from tilesmith.bench.tune import kept, tune
    from tilesmith.engine import cases
    from tilesmith.engine import ops as declared
    from tilesmith.engine.table import append, shipped_file
    from tilesmith.engine.tuning import row_of
    from tilesmith.hardware import arch_of

    names = [n for n in declared() if not n.endswith("_vjp")] if ops == ["all"] else [op_named(n).name for n in ops]
    where = device_named(device)
    kind = dtype_named(dtype, where)
    if where.type == "cpu" and not case:
        refuse("the cases to tune on are made for a GPU; name smaller ones with --case to tune on a CPU")
    tunable = [n for n in names if (cases_of(n, case) if case else any("tune" in c.tags for c in cases(n)))]
    with refused("--case"):
        check_cases(names, case or ())
        for name in tunable:
            check_named(name, cases(name), cases_of(name, case or ()), kind)
    if not tunable:
        refuse(f"no case of {', '.join(names)} is meant for tuning; name one with --case")
    if ship:
        check_folder("--ship", Path(str(resources.files("tilesmith"))), "--save keeps rows for this machine")
    elif save:
        check_folder("TILESMITH_CACHE_DIR", settings().cache_dir)
    found: list[dict] = []
    for name in tunable:
        with console.status(f"checking {name}") as status:
            if save or ship:
                _check(name, where)
            told = lambda step, name=name: status.update(f"tuning {name}: {step}")  # noqa: E731
            tuned = list(tune(name, where, kind, named=cases_of(name, case or ()), rounds=rounds, progress=told))
        if as_json:
            found += [{"op": name, **dict(zip(_FIELDS, _line(t)))} for t in tuned]
        rows = [_line(t) for t in tuned]
        if not as_json and not rows:
            console.print(f"{name}: no kernel that serves these cases on {where} has a configuration to search")
        elif not as_json:
            title = f"{name} on {arch_of(where).device_name}"
            console.print(table(_FIELDS, rows, title=title, right="default,best,gain"))
        for t in kept(tuned) if save or ship else ():
            _check_winner(name, t, where, kind)
            module = t.configure.fn.__module__
            path = shipped_file(module, arch_of(where).name) if ship else None
            append(module, arch_of(where).name, [row_of(t.configure, t.args, t.found)], path)
    if as_json:
        print_json(found)


def _check(name: str, device) -> None:
    from tilesmith.validate import run_cases

    failed = [r for r in run_cases([name], device=device) if not r.passed]
    if failed:
        console.print(f"[red]{name} fails its checks here, nothing is tuned: {failed[0].message}[/]", highlight=False)
        raise typer.Exit(CHECK_FAILED)


def _check_winner(name: str, tuned, device, dtype) -> None:
    """Run the case that it was tuned on with the new configuration, against the oracle."""
    from tilesmith.engine import ops
    from tilesmith.validate.cases import check

    op, case = ops()[name], tuned.case
    tuned.configure.forced = tuned.found.config
    try:
        backend = op.explain(**case.build(device, dtype, case.generator(device))).kernel.backend
        result = check(op, backend, case, device, dtype)
    finally:
        tuned.configure.forced = None
    if not result.passed:
        console.print(f"[red]{tuned.configure.name} is wrong with {tuned.found.config}: {result.message}[/]")
        raise typer.Exit(CHECK_FAILED)


def _line(tuned) -> tuple[str, ...]:
    found = tuned.found
    changed = {k: v for k, v in found.config._asdict().items() if getattr(found.default, k) != v}
    shown = ", ".join(f"{k}={v}" for k, v in changed.items()) or "the default"
    times = (f"{found.default_timing.median_us:,.1f} µs", f"{found.timing.median_us:,.1f} µs", f"{found.gain:.0%}")
    return (tuned.case.name, tuned.configure.name, *times, shown, str(found.tried))
