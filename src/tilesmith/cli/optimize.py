"""`tilesmith optimize`: what would be replaced in a model, why the rest would not, and what that does to a step."""

from __future__ import annotations

import copy
import inspect
import itertools
import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NamedTuple

import typer

from tilesmith.cli.output import (
    CHECK_FAILED,
    console,
    device_named,
    dtype_named,
    needs,
    print_json,
    print_lines,
    refuse,
    table,
)

if TYPE_CHECKING:
    from tilesmith.engine.timing import Timing


class Step(NamedTuple):
    """A training step: its time over the rounds, and its peak memory in bytes above what was held before it."""

    timing: Timing
    peak: int


def command(
    model: Annotated[Path, typer.Argument(help="A checkpoint folder, or a config.json of Hugging Face transformers.")],
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only print the report; build no weights.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the rows and figures as JSON.")] = False,
    full: Annotated[bool, typer.Option("--full", help="Report every module instead of a summary.")] = False,
    device: Annotated[str | None, typer.Option(help="Where to measure: cpu, cuda, cuda:1, xpu, mps.")] = None,
    dtype: Annotated[str | None, typer.Option(help="float32, float16 or bfloat16.")] = None,
    batch: Annotated[int, typer.Option(min=1, help="Rows in the measured batch.")] = 1,
    tokens: Annotated[int, typer.Option(min=2, help="Tokens in a row.")] = 512,
    rounds: Annotated[int, typer.Option(min=5, help="Interleaved rounds; the median is reported.")] = 7,
) -> None:
    """Report what `tilesmith.optimize` does to a model; without --dry-run, also time a training step before and after.

    The two models run in interleaved rounds. Exits with 1 if nothing would be replaced.
    """
    if not model.exists():
        refuse(f"{model} does not exist; give a checkpoint folder or a config.json (nothing is downloaded)")
    needs("transformers", "hf", "reading a model")
    import torch

    from tilesmith.models import optimize, report

    config = _config(model)
    where, kind = (torch.device("meta"), torch.bfloat16) if dry_run else _place(device, dtype)
    built = _build(config, where, kind)
    if not dry_run:
        _trains_on_tokens(built)
    optimised = optimize(_twin(built))
    found = report(optimised)
    if not dry_run:
        with console.status("timing a training step before and after"):
            steps = _measured(built, optimised, batch, tokens, rounds)
    if as_json:
        rows = json.loads(found.to_json())
        print_json(rows if dry_run else {"rows": rows, "step": _as_dict(steps)})
    else:
        print_lines(found.full() if full else str(found))
        if not dry_run:
            _compare(steps, where.type)
    if not found.replaced:
        raise typer.Exit(CHECK_FAILED)


def _config(path: Path):
    from transformers import AutoConfig

    try:
        return AutoConfig.from_pretrained(path, local_files_only=True)
    except (OSError, ValueError, KeyError) as problem:
        refuse(f"{path} is not a model configuration that transformers reads: {str(problem).splitlines()[0]}")


def _place(device: str | None, dtype: str | None):
    where = device_named(device)
    return where, dtype_named(dtype, where)


def _build(config, device, dtype):
    """The model with random weights: the architecture that its configuration names, else a causal language model if
    there is one, else its base model."""
    import torch
    import transformers
    from transformers import AutoModel, AutoModelForCausalLM

    named = (getattr(transformers, name, None) for name in config.architectures or ())
    architecture = next((cls for cls in named if cls is not None), None)
    with torch.device(device):
        if architecture is not None:
            return architecture._from_config(config, dtype=dtype)
        try:
            return AutoModelForCausalLM.from_config(config, dtype=dtype)
        except ValueError:
            return AutoModel.from_config(config, dtype=dtype)


def _trains_on_tokens(model) -> None:
    """Refuse a model whose training step this command cannot make up."""
    taken = inspect.signature(type(model).forward).parameters
    absent = [name for name in ("input_ids", "labels") if name not in taken]
    if absent:
        refuse(f"{type(model).__name__} takes no {' and no '.join(absent)}, so no step is timed; add --dry-run")


def _measured(model, optimised, batch: int, tokens: int, rounds: int) -> dict[str, Step]:
    """A training step of either model on random tokens, in turns."""
    import torch

    from tilesmith.engine.timing import measure, peak_memory

    weight = next(model.parameters())
    ids = torch.randint(model.config.get_text_config().vocab_size, (batch, tokens), device=weight.device)

    def step(of):
        out = of(input_ids=ids, labels=ids)
        out.loss.backward()
        of.zero_grad()

    steps = {"before": lambda: step(model), "after": lambda: step(optimised)}
    timings = measure(steps, weight.device, rounds=rounds, cold=False, warmup=2)
    return {name: Step(timings[name], peak_memory(steps[name], weight.device)) for name in steps}


def _twin(model):
    """A copy of the model that shares its parameters and buffers, so that both fit where one does."""
    return copy.deepcopy(model, {id(t): t for t in itertools.chain(model.parameters(), model.buffers())})


def _differ(steps: dict[str, Step]) -> bool:
    """Whether the two times lie further apart than they scatter: no round of one among those of the other."""
    before, after = steps["before"].timing.rounds, steps["after"].timing.rounds
    return max(after) < min(before) or max(before) < min(after)


def _compare(steps: dict[str, Step], kind: str) -> None:
    from tilesmith.engine.memory import human_size

    before, after = steps["before"], steps["after"]
    gain = f"{before.timing.median_us / after.timing.median_us:.2f}×" if _differ(steps) else "none beyond the spread"
    rows = [("training step", _time(before.timing), _time(after.timing), gain)]
    if before.peak and after.peak:  # 0 on a device whose allocator says nothing
        held = human_size(before.peak), human_size(after.peak)
        rows.append(("peak memory", *held, f"{before.peak / after.peak:.2f}×"))
    console.print()
    console.print(table(("", "before", "after", "gain"), rows, right="before,after,gain"))
    told = f"Medians of {len(before.timing.rounds)} interleaved rounds, ± half the interquartile range, on {kind}."
    console.print(told, style="dim", highlight=False)
    if len(rows) == 2:
        seen = ", as far as torch's allocator handed it out" if kind == "cpu" else ""
        console.print(f"Peak memory is what a step holds beside the weights{seen}.", style="dim", highlight=False)


def _as_dict(steps: dict[str, Step]) -> dict:
    return {
        **{
            name: {"median_us": step.timing.median_us, "rounds_us": list(step.timing.rounds), "peak_bytes": step.peak}
            for name, step in steps.items()
        },
        "beyond_spread": _differ(steps),
    }


def _time(timing: Timing) -> str:
    return f"{timing.median_us / 1e3:.1f} ms ±{50 * timing.spread:.0f} %"
