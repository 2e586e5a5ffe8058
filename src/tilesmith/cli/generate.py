"""`tilesmith generate`: continue a prompt with a model that `tilesmith train` saved, or a Hugging Face checkpoint."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from tilesmith.cli.output import device_named, dtype_named, errors, needs, refuse

if TYPE_CHECKING:
    import torch

    from tilesmith.cli.checkpoint import LanguageModel


def command(
    folder: Annotated[
        Path, typer.Argument(metavar="DIR", help="Of `tilesmith train --out`, or a Hugging Face checkpoint.")
    ],
    prompt: Annotated[str, typer.Option("--prompt", "-p", help="What to continue; - reads standard input.")],
    max_new_tokens: Annotated[int, typer.Option("--max-new-tokens", "-n", min=1, help="At most so many.")] = 128,
    temperature: Annotated[float, typer.Option(min=0.0, help="0 takes the likeliest token each time.")] = 0.8,
    top_k: Annotated[int, typer.Option(min=0, help="Draw from so many of the likeliest; 0: from all.")] = 40,
    top_p: Annotated[float, typer.Option(help="Draw from the likeliest that together have this probability.")] = 1.0,
    seed: Annotated[int | None, typer.Option(help="Of the draws; another one each time by default.")] = None,
    device: Annotated[str | None, typer.Option(help="cpu, cuda, cuda:1, xpu, mps; a GPU if there is one.")] = None,
    dtype: Annotated[str | None, typer.Option(help="float32, float16 or bfloat16; as saved by default.")] = None,
    optimize: Annotated[bool, typer.Option(help="Let the library's kernels serve the model.")] = True,
) -> None:
    """Print the prompt and what follows it, token by token, with a key/value cache.

    The text goes to standard output, the rest to standard error.
    """
    if not 0.0 < top_p <= 1.0:
        refuse(f"--top-p is {top_p}; it must be above 0 and at most 1")
    needs("safetensors", "cli", "reading a checkpoint")
    text = sys.stdin.read() if prompt == "-" else prompt
    where = device_named(device)
    language = _read(folder, None if dtype is None else dtype_named(dtype, where))
    language.model.to(where).eval()
    if optimize:
        language.optimize()
    ids = _prompt(language, text, max_new_tokens)
    _write(language, ids, text, max_new_tokens, temperature, top_k, top_p, seed)


def _read(folder: Path, dtype: torch.dtype | None) -> LanguageModel:
    from importlib.util import find_spec

    from tilesmith.cli import checkpoint

    if not folder.is_dir():
        refuse(f"{folder} is no folder; give one that `tilesmith train --out` wrote, or a Hugging Face checkpoint")
    try:
        if checkpoint.OWN not in checkpoint.configuration(folder) and find_spec("transformers") is None:
            needs("transformers", "hf", "this checkpoint")
        return checkpoint.read(folder, dtype)
    except (OSError, ValueError, KeyError) as problem:
        refuse(f"{folder} is no model to generate with: {str(problem).splitlines()[0]}")


def _prompt(language: LanguageModel, text: str, count: int) -> list[int]:
    ids = language.prompt(text)
    if not ids:
        refuse("--prompt is empty; give the model something to continue")
    if language.positions is not None and len(ids) + count > language.positions:
        refuse(
            f"{len(ids)} tokens of prompt and {count} new ones make {len(ids) + count}; the model has "
            f"{language.positions} positions"
        )
    return ids


def _write(
    language: LanguageModel,
    ids: list[int],
    text: str,
    count: int,
    temperature: float,
    top_k: int,
    top_p: float,
    seed: int | None,
) -> None:
    import torch

    from tilesmith.cli.writing import Spelling, continued, sample

    draw = torch.Generator()
    draw.seed() if seed is None else draw.manual_seed(seed)
    known = len(language.tokenizer)  # the model may tell more tokens apart
    choose = lambda logits: sample(logits[:known], draw, temperature, top_k, top_p)  # noqa: E731
    spelling = Spelling(language.tokenizer.decode, ids)
    typer.echo(text, nl=False)
    start, times = time.perf_counter(), []
    for token in continued(language.model, ids, count, choose, language.stop):
        times.append(time.perf_counter() - start)
        typer.echo(spelling.add(token), nl=False)
        sys.stdout.flush()
    typer.echo(spelling.rest())
    if times:
        rest = f", then {(len(times) - 1) / (times[-1] - times[0]):,.1f} tokens/s" if len(times) > 1 else ""
        errors.print(f"first token after {times[0] * 1e3:,.0f} ms{rest}", style="dim", highlight=False)
