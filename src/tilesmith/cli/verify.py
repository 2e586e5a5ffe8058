"""`tilesmith verify`: every kernel on every case against the fp64 reference, with its error beside its budget."""

from __future__ import annotations

from typing import Annotated

import typer

from tilesmith.cli.output import CHECK_FAILED, console, device_named, op_named, print_json, refuse, table


def command(
    ops: Annotated[list[str] | None, typer.Argument(help="Ops to check; all of them by default.")] = None,
    device: Annotated[str | None, typer.Option(help="cpu, cuda, cuda:1, xpu, mps.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON array instead of a table.")] = False,
    every: Annotated[bool, typer.Option("--all", help="Show every case, not only those over budget.")] = False,
    drawn: Annotated[
        int,
        typer.Option("--random", min=0, help="Also check this many cases of random sizes, for ops that can draw them."),
    ] = 0,
) -> None:
    """Check kernels on this machine: values and gradients against fp64, within budgets from PyTorch's own error.

    Exits with 1 if a case exceeds its budget.
    """
    from tilesmith.engine.arguments import dtype_name
    from tilesmith.validate import run_cases
    from tilesmith.validate.sampled import run_sampled

    where = device_named(device)
    names = [op_named(name).name for name in ops or []] or None
    if drawn:
        _check_kinds(names or [])
    with console.status("checking") as status:
        results = []
        for result in run_sampled(names, where, drawn) if drawn else run_cases(names, device=where):
            results.append(result)
            status.update(f"{len(results)} checks, now {result.op}")
    failed = [r for r in results if not r.passed]
    if as_json:
        print_json([_row(r) for r in results])
    else:
        shown = results if every else failed
        rows = [(r.op, r.kernel, r.case, dtype_name(r.dtype), _ratio(r), r.message) for r in shown]
        if rows:
            console.print(table(("op", "kernel", "case", "dtype", "error / budget", ""), rows, right="error / budget"))
        console.print(_summary(results))
    if failed or not results:
        raise typer.Exit(CHECK_FAILED)


def _check_kinds(names: list[str]) -> None:
    from tilesmith.engine import ops
    from tilesmith.validate.sampled import kinds

    without = [name for name in names if not kinds(name)]
    if without:
        have = ", ".join(name for name in sorted(ops()) if kinds(name))
        refuse(f"no cases of random sizes can be drawn for {', '.join(without)}; they can for {have}")


def _row(result) -> dict:
    from tilesmith.engine.arguments import dtype_name

    fields = ("op", "kernel", "case", "passed", "error", "budget", "message")
    return {"dtype": dtype_name(result.dtype), **{f: getattr(result, f) for f in fields}}


def _ratio(result) -> str:
    return f"{result.error / result.budget:.2f}" if result.budget else ("0" if not result.error else "inf")


def _summary(results: list) -> str:
    by_kernel: dict[tuple[str, str], list] = {}
    for result in results:
        by_kernel.setdefault((result.op, result.kernel), []).append(result)
    lines = []
    for (op, kernel), group in sorted(by_kernel.items()):
        bad = sum(not r.passed for r in group)
        refused = sum(r.message.startswith("rejects") for r in group)
        note = f", {refused} rejected" if refused else ""
        worst = max((r.error / r.budget for r in group if r.budget), default=0.0)
        mark = "[red]fails[/]" if bad else "[green]ok[/]"
        lines.append(
            f"{mark}  {op} / {kernel}: {len(group) - bad} of {len(group)} within budget, worst at {worst:.0%}{note}"
        )
    return "\n".join(lines) or "[red]no case ran[/]"
