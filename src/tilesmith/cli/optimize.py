"""`tilesmith optimize`: what would be replaced in a model, and why the rest would not."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Annotated

import typer

from tilesmith.cli.output import CHECK_FAILED, console, device_named, dtype_named, needs, refuse, table


def command(
    model: Annotated[Path, typer.Argument(help="A checkpoint folder, or a config.json of Hugging Face transformers.")],
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only report; builds no weights.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the report as JSON.")] = False,
    device: Annotated[str | None, typer.Option(help="Where to measure: cpu, cuda, cuda:1, xpu, mps.")] = None,
    dtype: Annotated[str | None, typer.Option(help="float32, float16 or bfloat16.")] = None,
    batch: Annotated[int, typer.Option(min=1, help="Rows of the measured batch.")] = 1,
    tokens: Annotated[int, typer.Option(min=2, help="Tokens of a row.")] = 512,
) -> None:
    """Report what `tilesmith.optimize` does to a model; without --dry-run also time a training step before and after.

    Exits with 1 when nothing would be replaced.
    """
    needs("transformers", "hf", "reading a model")
    import torch

    from tilesmith.models import optimize

    config = _config(model)
    where, kind = (torch.device("meta"), torch.bfloat16) if dry_run else _place(device, dtype)
    built = _build(config, where, kind)
    if not dry_run:
        _trains_on_tokens(built)
    before = None if dry_run else _measured(built, batch, tokens)
    found = optimize(built).tilesmith_report
    if as_json:
        console.print_json(found.to_json())
    else:
        console.print(str(found), highlight=False, markup=False, soft_wrap=True)
    if before is not None:
        _compare(before, _measured(built, batch, tokens))
    if not found.replaced:
        raise typer.Exit(CHECK_FAILED)


def _config(path: Path):
    from transformers import AutoConfig

    if not path.exists():
        refuse(f"{path} does not exist; give a checkpoint folder or a config.json (nothing is downloaded)")
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


def _measured(model, batch: int, tokens: int) -> tuple[float, int]:
    """Median µs and peak bytes of a training step on random tokens."""
    import torch

    from tilesmith.engine.timing import measure, peak_memory

    weight = next(model.parameters())
    ids = torch.randint(model.config.get_text_config().vocab_size, (batch, tokens), device=weight.device)

    def step():
        out = model(input_ids=ids, labels=ids)
        out.loss.backward()
        model.zero_grad()

    timing = measure({"step": step}, weight.device, cold=False, warmup=1)["step"]
    return timing.median_us, peak_memory(step, weight.device)


def _compare(before: tuple[float, int], after: tuple[float, int]) -> None:
    rows = [
        ("training step", f"{before[0] / 1e3:.1f} ms", f"{after[0] / 1e3:.1f} ms", f"{before[0] / after[0]:.2f}×"),
        ("peak memory", _gb(before[1]), _gb(after[1]), f"{before[1] / max(after[1], 1):.2f}×"),
    ]
    console.print()
    console.print(table(("", "before", "after", "gain"), rows, right="before,after,gain"))


def _gb(count: int) -> str:
    return f"{count / 1e9:.2f} GB"
