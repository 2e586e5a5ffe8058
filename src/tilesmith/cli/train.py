"""`tilesmith train`: a small decoder, or a Hugging Face model, on text files; validated, checkpointed, resumable."""

from __future__ import annotations

import contextlib
import hashlib
import json
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.markup import escape

from tilesmith.cli.output import (
    CHECK_FAILED,
    LARGEST_SEED,
    check_folder,
    console,
    device_named,
    errors,
    messages_to_stderr,
    needs,
    print_json,
    progress,
    refuse,
)

if TYPE_CHECKING:
    import torch

    from tilesmith.cli.checkpoint import LanguageModel
    from tilesmith.cli.text import BytePairs
    from tilesmith.cli.trainer import Plan, Trainer

SIZES = ("vocab", "hidden", "inter", "layers", "heads", "kv_heads", "experts", "chosen")
ASKED = (*SIZES, "model")  # what a run says of its model
FREE = ("steps",)  # of the plan, what a resumed run may change
POSITIONS = 2048
SCHEDULE, MODEL = "Optimizer and schedule", "Model"
ON_A_CPU = {"batch": 8, "length": 128, "rate": 3e-3}
ON_A_GPU = {"batch": 16, "length": 1024, "rate": 1e-3}
RATE_OF_A_CHECKPOINT = 2e-5
INTERRUPTED = 130  # as shells say of Ctrl-C


def command(
    context: typer.Context,
    out: Annotated[Path, typer.Option(help="Folder of the checkpoints, new or empty.")],
    texts: Annotated[
        list[Path] | None, typer.Argument(metavar="TEXT...", help="UTF-8 files, read in this order as one text.")
    ] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Continue from the last checkpoint in --out.")] = False,
    device: Annotated[str | None, typer.Option(help="cpu, cuda, cuda:1, xpu, mps; a GPU if there is one.")] = None,
    steps: Annotated[int, typer.Option(min=1, help="Steps of the whole run.")] = 500,
    stop_at: Annotated[int | None, typer.Option(min=1, help="Save and exit after this step.")] = None,
    eval_every: Annotated[int, typer.Option(min=1, help="Steps between validations.")] = 50,
    save_every: Annotated[int, typer.Option(min=1, help="Steps between checkpoints.")] = 250,
    keep: Annotated[int, typer.Option(min=1, help="Checkpoints to keep.")] = 2,
    batch: Annotated[int | None, typer.Option(min=1, help="Windows in a micro-batch; 16 on a GPU, else 8.")] = None,
    accumulate: Annotated[int, typer.Option(min=1, help="Micro-batches in a step.")] = 1,
    length: Annotated[int | None, typer.Option(min=2, help="Tokens in a window; 1024 on a GPU, else 128.")] = None,
    validation: Annotated[float, typer.Option(help="Share of the text, taken from its end, for validation.")] = 0.1,
    eval_windows: Annotated[int, typer.Option(min=1, help="Most windows in one validation.")] = 128,
    seed: Annotated[
        int, typer.Option(min=0, max=LARGEST_SEED, help="Seed of the weights and of the order of the windows.")
    ] = 0,
    rate: Annotated[float | None, typer.Option(help="Highest learning rate.", rich_help_panel=SCHEDULE)] = None,
    warmup: Annotated[
        int | None,
        typer.Option(min=0, help="Steps to reach it; a tenth of the run by default.", rich_help_panel=SCHEDULE),
    ] = None,
    floor: Annotated[
        float, typer.Option(help="Learning rate at the end, as a share of the highest.", rich_help_panel=SCHEDULE)
    ] = 0.1,
    decay: Annotated[
        float, typer.Option(help="Weight decay, applied to matrices only.", rich_help_panel=SCHEDULE)
    ] = 0.1,
    clip: Annotated[
        float, typer.Option(help="Largest gradient norm; 0 turns clipping off.", rich_help_panel=SCHEDULE)
    ] = 1.0,
    dtype: Annotated[str, typer.Option(help="Dtype of the weights: float32 or bfloat16.")] = "float32",
    autocast: Annotated[
        str | None,
        typer.Option(
            help="Dtype of the matrix products: bfloat16 (default on a GPU), or none for that of the weights."
        ),
    ] = None,
    optimize: Annotated[bool, typer.Option(help="Run the model on the library's kernels.")] = True,
    model: Annotated[
        Path | None, typer.Option(help="Hugging Face checkpoint or config.json.", rich_help_panel=MODEL)
    ] = None,
    vocab: Annotated[
        int | None, typer.Option(min=256, help="Size of the vocabulary of byte pairs.", rich_help_panel=MODEL)
    ] = None,
    hidden: Annotated[int | None, typer.Option(min=1, help="Hidden size.", rich_help_panel=MODEL)] = None,
    inter: Annotated[int | None, typer.Option(min=1, help="Features inside the MLP.", rich_help_panel=MODEL)] = None,
    layers: Annotated[int | None, typer.Option(min=1, help="Layers.", rich_help_panel=MODEL)] = None,
    heads: Annotated[int | None, typer.Option(min=1, help="Query heads.", rich_help_panel=MODEL)] = None,
    kv_heads: Annotated[int | None, typer.Option(min=1, help="Key/value heads.", rich_help_panel=MODEL)] = None,
    experts: Annotated[
        int | None, typer.Option(min=0, help="Experts, each --inter wide, in place of an MLP.", rich_help_panel=MODEL)
    ] = None,
    chosen: Annotated[
        int | None, typer.Option(min=1, help="Experts chosen for each token.", rich_help_panel=MODEL)
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one JSON object at the end; messages go to standard error.")
    ] = False,
) -> None:
    """Train a language model on text files; the end of the text is kept for validation.

    The optimizer is AdamW; the learning rate rises linearly and falls along a cosine. Checkpoints hold the whole state:
    on a CPU a resumed run equals an uninterrupted one bit for bit. `tilesmith generate` reads the folder. Ctrl-C saves
    and exits.
    """
    options = {name: value for name, value in locals().items() if name in context.params}  # Typer's own are unconverted
    needs("safetensors", "cli", "writing checkpoints")
    given = {name for name in options if context.get_parameter_source(name).name == "COMMANDLINE"}
    where = device_named(device)
    with messages_to_stderr(as_json):
        trainer, about = _resumed(out, given, options, where) if resume else _fresh(out, options, where)
        last = min(trainer.plan.steps, stop_at or trainer.plan.steps)
        if trainer.step >= last:
            refuse(f"{out} is at step {trainer.step} already; give a larger {'--stop-at' if stop_at else '--steps'}")
        _headline(trainer, about, where)
        try:
            _train(trainer, last, eval_every, lambda: trainer.save(out, about, keep), save_every)
        finally:
            _curves(trainer, out, about)
            if as_json:
                print_json(_as_data(trainer, about, out, where))


def _as_data(trainer: Trainer, about: dict[str, Any], out: Path, device: torch.device) -> dict[str, Any]:
    """A run so far as plain data: what it is, how it went, and the last folder that was written."""
    from dataclasses import asdict

    from tilesmith.cli.trainer import checkpoints
    from tilesmith.hardware import arch_of

    saved = checkpoints(out)
    run = {"model": type(trainer.language.model).__name__, "parameters": trainer.language.size, **about}
    run |= {"device": str(arch_of(device)), "plan": asdict(trainer.plan), "history": asdict(trainer.history)}
    return run | {"step": trainer.step, "checkpoint": str(saved[-1]) if saved else None}


def _fresh(out: Path, options: dict[str, Any], device: torch.device) -> tuple[Trainer, dict[str, Any]]:
    """A trainer at step 0, and what to remember about the run. Writes nothing."""
    from tilesmith.cli.trainer import PARTIAL, Trainer, checkpoints

    if not options["texts"]:
        refuse("name at least one text file to train on")
    if out.exists() and not (out.is_dir() and all(PARTIAL.fullmatch(path.name) for path in out.iterdir())):
        hint = "; --resume continues the run in it" if out.is_dir() and checkpoints(out) else ""
        refuse(f"--out {out} is not an empty folder{hint}")
    check_folder("--out", out)
    plan = _plan(options, device)
    text = _text(options["texts"])
    language = _language(text, plan, options, device)
    language.model.to(device)
    done = language.optimize() if plan.optimize else "left alone"
    about = {"texts": [str(p.absolute()) for p in options["texts"]], "digest": _digest(text)}
    about |= {"asked": _asked(options), "optimized": done}
    return Trainer(language, *_split(language, text, plan), plan), about


def _resumed(
    out: Path, given: set[str], options: dict[str, Any], device: torch.device
) -> tuple[Trainer, dict[str, Any]]:
    """A trainer as the last checkpoint left it. Writes nothing but the model of that checkpoint into `out`, which is
    there already unless the process was killed in between."""
    import torch

    from tilesmith.cli.checkpoint import read
    from tilesmith.cli.trainer import STATE, Plan, Trainer, checkpoints, publish

    found = checkpoints(out)
    if not found:
        refuse(f"--resume: {out} holds no checkpoint")
    check_folder("--out", out)
    latest = found[-1]
    try:
        state = json.loads((latest / STATE).read_text(encoding="utf-8"))
        saved, texts = state["plan"], options["texts"] or list(map(Path, state["texts"]))
        known, again = {**saved, **state.get("asked", {})}, {**options, **_asked(options)}
        for name in sorted(given & {*saved, *ASKED}):
            if name not in FREE and again[name] != known.get(name):
                refuse(f"--{name.replace('_', '-')} belongs to the run that is resumed and cannot change")
        plan = Plan(**{**saved, **{name: options[name] for name in given & set(FREE)}})
        text = _text(texts)
        if _digest(text) != state["digest"]:
            refuse(f"--resume: {', '.join(map(str, texts))} is not the text that the run began with")
        language = read(latest, getattr(torch, plan.dtype))
        language.model.to(device)
        if plan.optimize:
            language.optimize()
        trainer = Trainer(language, *_split(language, text, plan), plan)
        trainer.restore(latest, state)
        publish(latest)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as problem:  # a damaged file may hold anything
        refuse(f"--resume: {latest} cannot be continued: {_first_line(problem)}")
    return trainer, {name: state[name] for name in ("texts", "digest", "asked", "optimized") if name in state}


def _asked(options: dict[str, Any]) -> dict[str, Any]:
    """What the command line says of the model, as plain data."""
    asked = {name: options[name] for name in ASKED if options[name] is not None}
    return {name: str(value.absolute()) if isinstance(value, Path) else value for name, value in asked.items()}


def _plan(options: dict[str, Any], device: torch.device) -> Plan:
    from dataclasses import fields

    from tilesmith.cli.trainer import Plan

    defaults = dict(ON_A_CPU if device.type == "cpu" else ON_A_GPU)
    if options["model"] is not None and options["model"].is_dir():
        defaults["rate"] = RATE_OF_A_CHECKPOINT
    options = {n: defaults[n] if v is None and n in defaults else v for n, v in options.items()}
    for name, low, high in (("validation", 0, 1), ("floor", 0, 1), ("rate", 0, 1e3), ("decay", 0, 1), ("clip", 0, 1e9)):
        inside = low < options[name] < high if name in ("validation", "rate") else low <= options[name] <= high
        if not inside:
            refuse(f"--{name} is {options[name]}; it must be between {low} and {high:g}")
    values = {f.name: options[f.name] for f in fields(Plan)}
    if values["warmup"] is None:
        values["warmup"] = values["steps"] // 10
    if values["warmup"] > values["steps"]:
        refuse(f"--warmup is {values['warmup']}, of --steps {values['steps']}")
    if values["autocast"] is None:
        values["autocast"] = "none" if device.type == "cpu" or values["dtype"] != "float32" else "bfloat16"
    for name, allowed in (("dtype", ("float32", "bfloat16")), ("autocast", ("none", "bfloat16"))):
        if values[name] not in allowed:
            refuse(f"--{name} must be {' or '.join(allowed)}, got {values[name]!r}; float16 would need loss scaling")
    return Plan(**values)


def _text(paths: list[Path]) -> str:
    from tilesmith.cli.text import read_all

    try:
        return read_all(paths)
    except (OSError, ValueError) as problem:
        refuse(str(problem))


def _language(text: str, plan: Plan, options: dict[str, Any], device: torch.device) -> LanguageModel:
    """The model to train, on the CPU, and its tokenizer."""
    import dataclasses

    import torch

    from tilesmith.cli import checkpoint, subject

    path, dtype = options["model"], getattr(torch, plan.dtype)
    sizes = {name: options[name] for name in SIZES if options[name] is not None}
    if "chosen" in sizes and not sizes.get("experts"):
        refuse("--chosen is for a model of experts; say how many by --experts")
    base = subject.SMALL if device.type == "cpu" else subject.LARGE
    torch.manual_seed(plan.seed)
    if path is None:
        wanted = dataclasses.replace(base, **sizes)
        pairs = _pairs(text, wanted.vocab)
        try:
            made = checkpoint.new(dataclasses.replace(wanted, vocab=len(pairs)), pairs, max(POSITIONS, plan.length))
        except ValueError as problem:
            refuse(f"the sizes of the model do not fit together: {problem}")
        made.model.to(dtype)
        return made
    needs("transformers", "hf", "--model")
    if set(sizes) - {"vocab"}:
        refuse(f"--{sorted(set(sizes) - {'vocab'})[0].replace('_', '-')} is for a new model; --model has its sizes")
    try:
        return checkpoint.adopt(path, dtype, lambda most: _pairs(text, min(most, sizes.get("vocab", base.vocab))))
    except (OSError, ValueError, KeyError) as problem:
        refuse(f"--model {path}: {_first_line(problem)}")


def _pairs(text: str, size: int) -> BytePairs:
    from tilesmith.cli.text import BytePairs

    with progress() as bars:
        bar = bars.add_task("learning byte pairs", total=size)
        return BytePairs.train(text, size, lambda done: bars.update(bar, completed=done))


def _split(language: LanguageModel, text: str, plan: Plan) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens [N] to train on, and windows [n, length] to validate on."""
    import torch

    from tilesmith.cli.windows import held_out

    if language.positions is not None and plan.length > language.positions:
        refuse(f"--length is {plan.length}; the model has {language.positions} positions")
    tokens = torch.tensor(language.tokenizer.encode(text))
    first = len(tokens) - int(len(tokens) * plan.validation)
    if min(first, len(tokens) - first) < plan.length:
        refuse(
            f"the text is too short: of its {len(tokens):,} tokens {first:,} are to train on and "
            f"{len(tokens) - first:,} to validate on, and a window has {plan.length}; give more text, a smaller "
            "--length or another --validation"
        )
    return tokens[:first], held_out(tokens[first:], plan.length, plan.eval_windows)


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def _headline(trainer: Trainer, about: dict[str, Any], device: torch.device) -> None:
    from tilesmith.hardware import arch_of

    language, plan = trainer.language, trainer.plan
    kinds = plan.dtype if plan.autocast == "none" else f"{plan.dtype}, products in {plan.autocast}"
    lines = (
        f"{type(language.model).__name__}: {language.size:,} parameters, {kinds}; {about['optimized']}",
        f"on {arch_of(device)}",
        f"text: {len(trainer.windows.tokens):,} tokens to train on, {trainer.unseen.numel():,} to validate on, "
        f"of a vocabulary of {len(language.tokenizer):,}",
        f"step: {plan.accumulate} × {plan.batch} × {plan.length} tokens; {plan.steps:,} steps"
        + (f", {trainer.step:,} of them done" if trainer.step else ""),
    )
    console.print("\n".join(lines), highlight=False, markup=False)


def _train(trainer: Trainer, last: int, eval_every: int, save: Callable[[], Path], save_every: int) -> None:
    from tilesmith.cli.trainer import Diverged

    plan, clock = trainer.plan, _Clock()
    with _interruption() as asked, progress() as bars:
        bar = bars.add_task("training", total=plan.steps, completed=trainer.step)
        if not trainer.history.validation:
            _told(trainer, trainer.evaluate(), "")
        kept, where = trainer.step, None
        while trainer.step < last and not asked.is_set():
            try:
                clock.run(trainer.advance)
            except Diverged as problem:
                console.print(f"[red]{problem}[/]; {_last(kept)}", highlight=False)
                raise typer.Exit(CHECK_FAILED) from None
            bars.update(bar, completed=trainer.step, description=f"loss {trainer.history.loss[-1]:.4f}")
            if trainer.step % eval_every == 0 or trainer.step == plan.steps:
                speed = clock.lap() * plan.accumulate * plan.batch * plan.length
                _told(trainer, trainer.evaluate(), f"{speed:,.0f} tokens/s")
            if trainer.step % save_every == 0 or trainer.step == last or asked.is_set():
                where, kept = _saved(save, kept), trainer.step
        if trainer.step > kept:  # asked between the last look and the end of the loop
            where = _saved(save, kept)
    stopped = "interrupted; " if asked.is_set() else ""
    saved = "nothing new was trained" if where is None else f"step {trainer.step:,} of {plan.steps:,} is in {where}"
    console.print(f"{stopped}{saved}", highlight=False)
    if stopped:
        raise typer.Exit(INTERRUPTED)


def _saved(save: Callable[[], Path], kept: int) -> Path:
    """What `save` wrote. Ends the command in words where it cannot, as on a full disk. kept: the last step saved."""
    from safetensors import SafetensorError

    try:
        return save()
    except (OSError, SafetensorError) as problem:
        errors.print(f"[red]the checkpoint cannot be written:[/] {escape(_first_line(problem))}; {_last(kept)}")
        raise typer.Exit(CHECK_FAILED) from None


def _last(kept: int) -> str:
    return f"the last checkpoint is of step {kept}" if kept else "there is no checkpoint yet"


def _told(trainer: Trainer, loss: float, speed: str) -> None:
    history, parts = trainer.history, [f"step {trainer.step:>6,}", f"validation {loss:.4f}"]
    if history.loss:
        parts += [f"loss {history.loss[-1]:.4f}", f"norm {history.norm[-1]:.3f}", f"rate {history.rate[-1]:.2e}", speed]
    console.print("  ".join(parts), highlight=False)


class _Clock:
    """Counts runs and the seconds that they take."""

    def __init__(self):
        self._count, self._seconds = 0, 0.0

    def run(self, work: Callable[[], object]) -> None:
        start = time.perf_counter()
        work()
        self._count, self._seconds = self._count + 1, self._seconds + time.perf_counter() - start

    def lap(self) -> float:
        """Runs a second since the last lap."""
        speed = self._count / self._seconds
        self._count, self._seconds = 0, 0.0
        return speed


@contextlib.contextmanager
def _interruption() -> Iterator[threading.Event]:
    """An event that Ctrl-C sets, so that a step is never cut in two; the second Ctrl-C interrupts as usual."""
    asked = threading.Event()
    if threading.current_thread() is not threading.main_thread():
        yield asked
        return
    before = signal.getsignal(signal.SIGINT)

    def ask(number, frame):
        asked.set()
        signal.signal(signal.SIGINT, before)

    signal.signal(signal.SIGINT, ask)
    try:
        yield asked
    finally:
        signal.signal(signal.SIGINT, before)


def _curves(trainer: Trainer, out: Path, about: dict[str, Any]) -> None:
    from tilesmith.cli import charts

    if trainer.history.loss and charts.available():
        names = ", ".join(Path(text).name for text in about["texts"])
        try:
            paths = charts.training_curves(
                trainer.history.loss, trainer.history.validation, out, f"Training on {names}"
            )
        except OSError as problem:  # the run itself is safe
            console.print(f"no loss curves: {escape(_first_line(problem))}", style="dim", highlight=False)
            return
        console.print(f"loss curves: {', '.join(map(str, paths))}", highlight=False)


def _first_line(problem: Exception) -> str:
    text = str(problem).strip().split("\n")[0]
    return f"{problem!r}" if isinstance(problem, KeyError) else text
