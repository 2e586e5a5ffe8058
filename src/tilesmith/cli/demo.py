"""`tilesmith demo`: a Llama model optimised, checked, trained beside the original on real text, and asked to write."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tilesmith.cli.output import (
    CHECK_FAILED,
    LARGEST_SEED,
    check_folder,
    console,
    device_named,
    dtype_named,
    messages_to_stderr,
    needs,
    print_json,
    print_lines,
    progress,
    refuse,
    table,
)

if TYPE_CHECKING:
    import torch
    from torch import nn

    from tilesmith.cli.subject import Subject

ORIGINAL, OPTIMISED = "original", "tilesmith"
BUILTIN = "the Python language reference"


@dataclass(frozen=True)
class Plan:
    """How much to train: windows of `length` tokens, `batch` of them a step."""

    batch: int
    length: int
    steps: int
    rate: float


SMALL = Plan(batch=8, length=128, steps=200, rate=4e-3)
LARGE = Plan(batch=16, length=1024, steps=200, rate=1e-3)
LOADED = Plan(batch=1, length=256, steps=20, rate=1e-5)
CHECKED = 2, 64  # windows and tokens of the check
TRAINING_SECONDS = 75  # fewer steps than planned where they would not fit


def command(
    model: Annotated[Path | None, typer.Option(help="A local Hugging Face checkpoint instead of a new model.")] = None,
    text: Annotated[
        Path | None, typer.Option(help="A text file to train on; by default Python's own documentation.")
    ] = None,
    steps: Annotated[int | None, typer.Option(min=5, help="Training steps.")] = None,
    device: Annotated[str | None, typer.Option(help="cpu, cuda, cuda:1, xpu, mps; a GPU if there is one.")] = None,
    dtype: Annotated[str | None, typer.Option(help="float32, float16 or bfloat16.")] = None,
    seed: Annotated[
        int, typer.Option(min=0, max=LARGEST_SEED, help="Seed of the weights and of the order of the text.")
    ] = 0,
    out: Annotated[Path, typer.Option(help="Folder for the loss curves.")] = Path("tilesmith-demo"),
    export: Annotated[
        Path | None, typer.Option(help="Folder for the trained weights, in the format that examples/webgpu reads.")
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one JSON object at the end; messages go to standard error.")
    ] = False,
) -> None:
    """Optimise a Llama model, check it against the original on real text, and compare speed and memory.

    Exits with 1 if the optimised model differs from the original by more than the error budget.
    """
    if model is not None and export is not None:
        refuse("--export writes the model that the demo makes; leave out --model")
    if export is not None:
        needs("safetensors", "cli", "--export")
    check_folder("--out", out)
    if export is not None:
        check_folder("--export", export)
    where = device_named(device)
    from tilesmith.engine.arguments import dtype_name

    kind = dtype_named(dtype, where)
    with messages_to_stderr(as_json):
        subject = _subject(model, _text(text), where, kind, seed)
        plan = LOADED if model else SMALL if where.type == "cpu" else LARGE
        needed = max(plan.length, CHECKED[0] * CHECKED[1]) + 1
        if len(subject.tokens) < needed:
            refuse(f"--text {text} makes only {len(subject.tokens):,} tokens; the demo needs at least {needed:,}")
        _headline(subject, where, kind, text)
        models, report = _optimise(subject)
        checks = _check(models, subject)
        plan = replace(plan, steps=steps or _fitting(models, subject, plan))
        losses = _train(models, subject, plan, seed)
        costs = _cost(models, subject, plan, losses)
        kernels = _kernels(models[OPTIMISED], subject, plan)
        if where.type == "cpu":
            _on_a_gpu()
        _curves({name: run.losses for name, run in losses.items()}, out, text)
        written = _write(models[OPTIMISED], subject, seed, trained=model is not None)
        if export is not None:
            _export(models[OPTIMISED], subject, export)
        if as_json:
            found = {"model": subject.name, "parameters": subject.size, "dtype": dtype_name(kind)}
            found |= {"device": str(where), "text": str(text or BUILTIN), "plan": asdict(plan), "optimize": str(report)}
            found |= {"checks": checks, "losses": {name: run.losses for name, run in losses.items()}, "costs": costs}
            print_json(found | {"kernels": kernels, "written": written})
    if not all(check["passed"] for check in checks):
        raise typer.Exit(CHECK_FAILED)


def _subject(model: Path | None, source: str, device: torch.device, dtype: torch.dtype, seed: int) -> Subject:
    """The checkpoint to take, or a new model."""
    from tilesmith.cli import subject as subjects

    with progress() as bars:
        if model is None:
            bar = bars.add_task("learning byte pairs", total=None)
            learned = lambda size, wanted: bars.update(bar, completed=size, total=wanted)  # noqa: E731
            return subjects.build(source, device, dtype, seed, learned)
        needs("transformers", "hf", "--model")
        if not model.exists():
            refuse(f"--model {model} does not exist; give a checkpoint folder (nothing is downloaded)")
        try:
            return subjects.load(model, source, device, dtype)
        except (OSError, ValueError) as problem:
            refuse(f"--model {model}: {str(problem).splitlines()[0]}")


def _text(path: Path | None) -> str:
    from tilesmith.cli import text

    try:
        return text.python_reference() if path is None else text.read(path)
    except ModuleNotFoundError:
        refuse("this Python comes without pydoc_data; give a text with --text FILE")
    except (OSError, ValueError) as problem:
        refuse(str(problem))


def _headline(subject: Subject, device: torch.device, dtype: torch.dtype, text: Path | None) -> None:
    from tilesmith.hardware import arch_of

    console.rule("[bold]Tilesmith", align="left")
    console.print(
        f"{subject.name}: {subject.size / 1e6:.1f} M parameters, {str(dtype).removeprefix('torch.')}", highlight=False
    )
    console.print(f"on {arch_of(device)}", highlight=False)
    console.print(
        f"text: {text or BUILTIN}, {len(subject.tokens):,} tokens of a vocabulary of {subject.vocab:,}", highlight=False
    )


def _optimise(subject: Subject) -> tuple[dict[str, nn.Module], object]:
    optimised, report = subject.optimise(copy.deepcopy(subject.model))
    console.rule("What optimize(model) did", align="left")
    print_lines(report)
    return {ORIGINAL: subject.model, OPTIMISED: optimised}, report


def _check(models: Mapping[str, nn.Module], subject: Subject) -> list[dict[str, Any]]:
    """Errors of each quantity against fp64, as told."""
    from tilesmith.cli import equality
    from tilesmith.engine import use
    from tilesmith.engine.backends import REFERENCE

    console.rule("Is it the same model?", align="left")
    ids = subject.tokens[: CHECKED[0] * CHECKED[1]].view(CHECKED).to(next(models[ORIGINAL].parameters()).device)
    absent = {op: REFERENCE for op, reasons in _unreached(models[OPTIMISED], ids.device).items() if reasons}
    with console.status("comparing with the original in fp64"), use(**absent):
        checks = equality.compare(models[ORIGINAL], models[OPTIMISED], ids)
    if absent:
        console.print(
            f"No kernel runs on {ids.device.type} for {', '.join(absent)}: the model keeps its own code, except in "
            "this check, which runs the references.",
            style="dim",
            highlight=False,
        )
    rows = []
    for check in equality.summary(checks):
        ours = check.optimised
        errors = (f"{value:.1e}" for value in (check.original, ours.error, ours.allowed))
        rows.append((check.name, *errors, "[green]✓[/]" if ours.passed else "[red]✗[/]"))
    columns = ("largest error against fp64", ORIGINAL, OPTIMISED, "budget", "")
    console.print(table(columns, rows, right=f"{ORIGINAL},{OPTIMISED},budget"))
    over = [c.name for c in checks if not c.optimised.passed]
    if over:
        console.print(f"[red]over budget:[/] {', '.join(over)}", highlight=False)
    return [
        {
            "quantity": check.name,
            ORIGINAL: check.original,
            OPTIMISED: check.optimised.error,
            "allowed": check.optimised.allowed,
            "passed": check.optimised.passed,
        }
        for check in checks
    ]


def _fitting(models: Mapping[str, nn.Module], subject: Subject, plan: Plan) -> int:
    """The planned number of steps, or as many as fit the time meant for training, at least 20."""
    from tilesmith.engine.timing import wall_time

    ids = _batch(models[ORIGINAL], subject, plan)
    steps = [_gradients(model, ids) for model in models.values()]
    for step in steps:
        step()
    seconds = sum(wall_time(step, ids.device) for step in steps) / 1e6
    return max(20, min(plan.steps, int(TRAINING_SECONDS / seconds)))


def _batch(model: nn.Module, subject: Subject, plan: Plan) -> torch.Tensor:
    import torch

    from tilesmith.cli.training import windows

    ids = windows(subject.tokens, plan.batch, plan.length, torch.Generator().manual_seed(0))
    return ids.to(next(model.parameters()).device)


def _train(models: Mapping[str, nn.Module], subject: Subject, plan: Plan, seed: int):
    from tilesmith.cli import training

    console.rule("Training both, step by step in turn", align="left")
    with progress() as bars:
        bar = bars.add_task("training", total=plan.steps)

        def told(step, runs):
            shown = ", ".join(f"{name} {run.losses[-1]:.4f}" for name, run in runs.items())
            bars.update(bar, completed=step + 1, description=f"loss: {shown}")

        sizes = {"batch": plan.batch, "length": plan.length, "steps": plan.steps, "rate": plan.rate, "seed": seed}
        runs = training.train(models, subject.tokens, **sizes, progress=told)
    first, last = runs[ORIGINAL].losses, runs[OPTIMISED].losses
    apart = max(abs(a - b) for a, b in zip(first, last))
    console.print(f"loss {first[0]:.4f} → {first[-1]:.4f} ({ORIGINAL}), {last[-1]:.4f} ({OPTIMISED})", highlight=False)
    console.print(f"largest distance between the curves: {apart:.1e}", highlight=False)
    return runs


def _cost(models: Mapping[str, nn.Module], subject: Subject, plan: Plan, runs) -> list[dict[str, Any]]:
    from tilesmith.engine.timing import launches, peak_memory

    console.rule("What it costs", align="left")
    ids = _batch(models[ORIGINAL], subject, plan)
    device = ids.device
    costs = []
    for name, model in models.items():
        step, seconds = _gradients(model, ids), runs[name].step_time
        cost = {"model": name, "tokens_per_second": plan.batch * plan.length / seconds, "step_seconds": seconds}
        costs.append(cost | {"peak_bytes": peak_memory(step, device), "launches": launches(step, device)})
    rows = [
        (
            cost["model"],
            f"{cost['tokens_per_second']:,.0f}",
            f"{cost['step_seconds'] * 1e3:,.1f} ms",
            f"{cost['peak_bytes'] / 1e6:,.0f} MB",
            f"{cost['launches']:,}",
        )
        for cost in costs
    ]
    called = "operators run" if device.type == "cpu" else "kernels launched"
    columns = ("", "tokens/s", "step time", "peak memory", called)
    console.print(table(columns, rows, right=",".join(columns[1:])))
    held = "allocated by torch" if device.type == "cpu" else "handed out by the caching allocator"
    console.print(
        f"Step: forward, backward, AdamW; the median. Memory: bytes {held} above weights and optimizer, forward and "
        f"backward. {called.capitalize()}: in one forward and backward.",
        style="dim",
        highlight=False,
    )
    return costs


def _gradients(model: nn.Module, ids: torch.Tensor):
    def step():
        model(input_ids=ids, labels=ids).loss.backward()
        model.zero_grad()

    return step


def _kernels(model: nn.Module, subject: Subject, plan: Plan) -> list[dict[str, Any]]:
    from tilesmith.cli.recorder import Recorder

    console.rule("Which kernel serves each op, and why", align="left")
    with Recorder() as recorder:
        _gradients(model, _batch(model, subject, plan))()
    notes: dict[str, int] = {}

    def refused(rejected) -> str:
        found = [(backend, notes.setdefault("; ".join(why), len(notes) + 1)) for backend, why in rejected]
        return ", ".join(f"{backend} ({note})" for backend, note in found)

    rows = [(c.kernel.op, str(n), c.kernel.backend, c.because, refused(c.rejected)) for c, n in recorder.choices]
    device = next(model.parameters()).device
    for op, why in _unreached(model, device).items():
        if op not in {row[0] for row in rows}:
            because = (
                f"no kernel runs on {device.type}, so the model keeps its own code" if why else "no call needed it"
            )
            rows.append((op, "0", "–", because, refused(why)))
    console.print(table(("op", "calls", "kernel", "because", "not"), rows, right="calls"))
    for note, number in notes.items():
        console.print(f"({number}) {note}", style="dim", highlight=False, markup=False)
    return [{"op": op, "calls": int(calls), "kernel": kernel, "because": why} for op, calls, kernel, why, _ in rows]


def _unreached(model: nn.Module, device: torch.device) -> dict[str, list[tuple[str, tuple[str, ...]]]]:
    """The ops that `optimize` put into the model, each with what its kernels miss here; [] if one misses nothing."""
    from tilesmith.engine import ops
    from tilesmith.engine.backends import REFERENCE, missing

    report = getattr(model, "tilesmith_report", None)
    found = {}
    for op in sorted({op for row in report.replaced for op in row.ops} if report else ()):
        why = [(b, missing(b, device)) for b in ops()[op].backends() if b != REFERENCE]
        found[op] = [(b, (reason,)) for b, reason in why] if all(reason for _, reason in why) else []
    return found


def _curves(losses: Mapping[str, list[float]], out: Path, text: Path | None) -> None:
    from tilesmith.cli import charts

    if not charts.available():
        return
    paths = charts.loss_curves(losses, out, f"Training on {text.name if text else BUILTIN}")
    console.print(f"loss curves: {', '.join(map(str, paths))}", highlight=False)


def _on_a_gpu() -> None:
    """What was measured on a GPU, since a CPU shows none of it."""
    from tilesmith.bench.document import saved_model_rows

    found = saved_model_rows()
    if found is None:
        return
    document, ours, plain = found
    console.print(
        f"A CPU keeps the model's own code, so nothing is faster here. Measured on {document['hardware']['name']} on "
        f"{document['date']}: a training step of {ours['model']}, {ours['batch']} × {ours['tokens']:,} tokens in "
        f"{document['dtype']}, in {ours['us'] / 1e3:,.0f} ms ({plain['us'] / 1e3:,.0f} ms by PyTorch, "
        f"{plain['us'] / ours['us']:.2f}×) and {ours['peak_bytes'] / 1e9:.0f} GB ({plain['peak_bytes'] / 1e9:.0f} GB).",
        highlight=False,
    )


def _write(model: nn.Module, subject: Subject, seed: int, trained: bool) -> dict[str, Any]:
    console.rule("Writing with a KV cache", align="left")
    if not trained:
        console.print(
            f"A model of {subject.size / 1e6:.1f} M parameters, trained so briefly, does not write English. What "
            "counts here is that generation with and without the cache agrees.",
            style="dim",
            highlight=False,
        )
    with progress() as bars:
        bar = bars.add_task("generating", total=subject.new_tokens)
        written = subject.write(model, seed, lambda done: bars.update(bar, completed=done))
    new = len(written.ids) - written.prompt
    console.print(subject.decode(written.ids[: written.prompt]), style="dim", end="", markup=False, highlight=False)
    console.print(subject.decode(written.ids[written.prompt :]), markup=False, highlight=False)
    prefill, speed = f"{written.prefill * 1e3:,.1f} ms", f"{(new - 1) / written.decode:,.0f} tokens/s"
    console.print(
        f"Prefill of {written.prompt} tokens {prefill}, then {speed}. With and without the cache the logits differ "
        f"by at most {written.distance:.1e}.",
        style="dim",
        highlight=False,
    )
    times = {"prefill_seconds": written.prefill, "decode_seconds": written.decode, "distance": written.distance}
    return {"prompt_tokens": written.prompt, "tokens": list(written.ids), **times}


def _export(model: nn.Module, subject: Subject, folder: Path) -> None:
    from tilesmith.cli import subject as subjects
    from tilesmith.cli.export import export

    paths = export(folder, subject.config, model.state_dict(), subject.pairs, subjects.PROMPT)
    console.print(f"the model: {', '.join(map(str, paths))}", highlight=False)
