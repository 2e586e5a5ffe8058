"""`tilesmith generate`: continue a prompt with a model that `tilesmith train` saved, or a Hugging Face checkpoint."""

from __future__ import annotations

import io
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tilesmith.cli.output import LARGEST_SEED, device_named, dtype_named, errors, needs, print_json, refuse

if TYPE_CHECKING:
    import torch

    from tilesmith.cli.checkpoint import LanguageModel


def command(
    folder: Annotated[
        Path,
        typer.Argument(metavar="DIR", help="Folder written by `tilesmith train --out`, or a Hugging Face checkpoint."),
    ],
    prompt: Annotated[str, typer.Option("--prompt", "-p", help="Text to continue; - reads standard input.")],
    max_new_tokens: Annotated[
        int, typer.Option("--max-new-tokens", "-n", min=1, help="Most tokens to generate.")
    ] = 128,
    temperature: Annotated[float, typer.Option(min=0.0, help="0 always takes the likeliest token.")] = 0.8,
    top_k: Annotated[int, typer.Option(min=0, help="Sample from this many of the likeliest tokens; 0 means all.")] = 40,
    top_p: Annotated[
        float, typer.Option(help="Sample from the likeliest tokens that together have this probability.")
    ] = 1.0,
    seed: Annotated[
        int | None, typer.Option(min=0, max=LARGEST_SEED, help="Seed for sampling; a new one each time by default.")
    ] = None,
    device: Annotated[str | None, typer.Option(help="cpu, cuda, cuda:1, xpu, mps; a GPU if there is one.")] = None,
    dtype: Annotated[str | None, typer.Option(help="float32, float16 or bfloat16; as saved by default.")] = None,
    optimize: Annotated[bool, typer.Option(help="Run the model on the library's kernels.")] = True,
    as_json: Annotated[bool, typer.Option("--json", help="Print only one JSON object, at the end.")] = False,
) -> None:
    """Continue a prompt token by token, with a KV cache.

    Standard output gets the text, or with --json the object; everything else goes to standard error.
    """
    if not 0.0 < top_p <= 1.0:
        refuse(f"--top-p is {top_p}; it must be above 0 and at most 1")
    needs("safetensors", "cli", "reading a checkpoint")
    text = _unicode(sys.stdin.buffer.read() if prompt == "-" else prompt.encode("utf-8", "surrogateescape"))
    text = io.StringIO(text, newline=None).read() if prompt == "-" else text  # line ends as a text file has them
    where = device_named(device)
    language = _read(folder, None if dtype is None else dtype_named(dtype, where))
    language.model.to(where).eval()
    if optimize:
        language.optimize()
    ids = _prompt(language, text, max_new_tokens)
    show = _silent if as_json else _shown
    draw = {"temperature": temperature, "top_k": top_k, "top_p": top_p}
    tokens, start = _tokens(language, ids, max_new_tokens, draw, seed), time.perf_counter()
    new, spelled, times = _write(language, ids, text, tokens, show)
    first = times[0] - start if times else None
    speed = (len(times) - 1) / (times[-1] - times[0]) if len(times) > 1 else None
    if as_json:
        made = {"prompt": text, "text": spelled, "prompt_tokens": len(ids), "tokens": new}
        print_json({**made, "seconds_to_first_token": first, "tokens_per_second": speed})
    elif first is not None:
        rest = "" if speed is None else f", then {speed:,.1f} tokens/s"
        errors.print(f"first token after {first * 1e3:,.0f} ms{rest}", style="dim", highlight=False)


def _unicode(written: bytes) -> str:
    """The prompt, which is UTF-8 whatever the terminal's encoding. Refuses other bytes."""
    try:
        return written.decode("utf-8")
    except UnicodeDecodeError as problem:
        refuse(f"--prompt is not UTF-8: byte {problem.start} is 0x{written[problem.start]:02x}; give UTF-8 text")


def _read(folder: Path, dtype: torch.dtype | None) -> LanguageModel:
    from importlib.util import find_spec

    from tilesmith.cli import checkpoint

    if not folder.is_dir():
        refuse(f"{folder} is not a folder; give one that `tilesmith train --out` wrote, or a Hugging Face checkpoint")
    try:
        if checkpoint.OWN not in checkpoint.configuration(folder) and find_spec("transformers") is None:
            needs("transformers", "hf", "this checkpoint")
        return checkpoint.read(folder, dtype)
    except (OSError, ValueError, KeyError) as problem:
        refuse(f"{folder} is not a model to generate with: {str(problem).splitlines()[0]}")


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


def _tokens(
    language: LanguageModel, ids: list[int], count: int, draw: dict[str, Any], seed: int | None
) -> Iterator[int]:
    import torch

    from tilesmith.cli.writing import continued, sample

    generator = torch.Generator()
    generator.seed() if seed is None else generator.manual_seed(seed)
    known = len(language.tokenizer)  # the model may tell more tokens apart
    choose = lambda logits: sample(logits[:known], generator, **draw)  # noqa: E731
    return continued(language.model, ids, count, choose, language.stop)


def _write(
    language: LanguageModel, ids: list[int], text: str, tokens: Iterator[int], show: Callable[[str], None]
) -> tuple[list[int], str, list[float]]:
    """Show the prompt and the tokens as they come; returns the tokens, their text, and when each was there."""
    from tilesmith.cli.writing import Spelling

    spelling = Spelling(language.tokenizer.decode, ids)
    show(text)
    new, pieces, times = [], [], []
    for token in tokens:
        times.append(time.perf_counter())
        new.append(token)
        pieces.append(spelling.add(token))
        show(pieces[-1])
    pieces.append(spelling.rest())
    show(pieces[-1] + "\n")
    return new, "".join(pieces), times


def _shown(text: str) -> None:
    typer.echo(text, nl=False)
    sys.stdout.flush()


def _silent(text: str) -> None:
    pass
