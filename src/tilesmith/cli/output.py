"""What the commands share: the console, tables, errors in words, the arguments that name a device, a dtype or an op."""

from __future__ import annotations

import ast
import contextlib
import json
import math
import os
import shutil
import sys
import tempfile
import textwrap
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, TextIO

import typer
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from tilesmith import _install

if TYPE_CHECKING:
    import torch

    from tilesmith.engine import Op

PIPED_WIDTH = 160


def _width(stream: TextIO) -> int | None:
    """Columns of a stream: None where rich finds them out, in a terminal and where COLUMNS says more than 0."""
    said = os.environ.get("COLUMNS", "")
    if said.isdecimal() and int(said) == 0:
        return shutil.get_terminal_size((PIPED_WIDTH, 24)).columns
    return None if stream.isatty() or said.isdecimal() else PIPED_WIDTH


console = Console(width=_width(sys.stdout))
errors = Console(stderr=True, width=_width(sys.stderr))

WRONG_USE = 2
LARGEST_SEED = 2**63 - 1
CHECK_FAILED = 1


def refuse(message: str) -> NoReturn:
    """Say what is wrong with the request, and exit with code 2."""
    errors.print(f"[bold red]error:[/] {escape(message)}", highlight=False)
    raise typer.Exit(WRONG_USE)


@contextlib.contextmanager
def refused(option: str) -> Iterator[None]:
    """A ValueError of the block is what is wrong with `option`."""
    try:
        yield
    except ValueError as problem:
        refuse(f"{option}: {problem}")


def check_folder(option: str, folder: Path, instead: str = "name another folder") -> None:
    """Refuse a folder that cannot be made or written to, before hours are spent on what goes there. Makes nothing."""
    try:
        there = next(path for path in (folder.absolute(), *folder.absolute().parents) if path.exists())
        with tempfile.TemporaryDirectory(dir=there):
            return
    except OSError as problem:
        refuse(f"{option} {folder} cannot be written to: {problem.strerror}; {instead}")


def print_json(found: Any) -> None:
    """Plain data as JSON on standard output, whole lines whatever the width. NaN and infinities, which JSON has not,
    are null."""
    sys.stdout.write(json.dumps(_finite(found), indent=2, allow_nan=False) + "\n")


def _finite(found: Any) -> Any:
    if isinstance(found, float):
        return found if math.isfinite(found) else None
    if isinstance(found, Mapping):
        return {name: _finite(value) for name, value in found.items()}
    return [_finite(value) for value in found] if isinstance(found, list | tuple) else found


@contextlib.contextmanager
def messages_to_stderr(enabled: bool) -> Iterator[None]:
    """With `enabled`, the console prints to standard error, so that standard output holds nothing but data."""
    before = console.stderr
    console.stderr = before or enabled
    try:
        yield
    finally:
        console.stderr = before


def table(columns: Sequence[str], rows: Iterable[Sequence[str]], *, title: str | None = None, right: str = "") -> Table:
    """A plain table; `right` names the columns to align right, separated by commas."""
    shown = Table(title=title, title_justify="left", title_style="bold", box=None, pad_edge=False, header_style="dim")
    for column in columns:
        shown.add_column(column, justify="right" if column in right.split(",") else "left", overflow="fold")
    for row in rows:
        shown.add_row(*row)
    return shown


def print_lines(text: str, style: str | None = None) -> None:
    """Print lines as they are, without markup; what does not fit continues on lines that are indented further."""
    for line in text.splitlines():
        hang = " " * (len(line) - len(line.lstrip()) + 4)
        parts = textwrap.wrap(line, console.width, subsequent_indent=hang, break_on_hyphens=False)
        console.print("\n".join(parts), style=style, highlight=False, markup=False)


def progress() -> Progress:
    """Bars that say what is being done, how much of it is, and how long the rest will take."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    return Progress(*columns, console=console)


def needs(package: str, extra: str, why: str) -> None:
    """Refuse unless `package` is installed."""
    from importlib.util import find_spec

    if find_spec(package) is None:
        refuse(f"{why} needs {package}, which is not installed: {_install.command(extra)}")


def device_named(name: str | None) -> torch.device:
    """The device of that name; None: the first accelerator, else the CPU."""
    import torch

    from tilesmith.hardware import detect_available_devices

    available = [device for devices in detect_available_devices().values() for device in devices]
    if name is None:
        return available[0]
    try:
        device = torch.device(name)
    except RuntimeError:
        refuse(f"--device {name!r} is not a device here; this machine has {', '.join(map(str, available))}")
    if not any(device.type == a.type and device.index in (None, a.index, 0) for a in available):
        refuse(f"--device {name!r} is not on this machine; it has {', '.join(map(str, available))}")
    return device


def dtype_named(name: str | None, device: torch.device) -> torch.dtype:
    """The dtype of that name; None: bfloat16 on an accelerator, float32 on the CPU."""
    import torch

    if name is None:
        return torch.float32 if device.type == "cpu" else torch.bfloat16
    dtype = getattr(torch, {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}.get(name, name), None)
    if not isinstance(dtype, torch.dtype):
        refuse(f"--dtype {name!r} is not a dtype; use float32, float16, bfloat16 or float64")
    from tilesmith.engine.argument_checks import FLOATS

    if dtype not in FLOATS:
        refuse(f"--dtype {name} is not supported; use float32, float16, bfloat16 or float64")
    return dtype


def op_named(name: str) -> Op:
    """The declared op of that name."""
    from tilesmith.engine import ops
    from tilesmith.engine.arguments import suggestion

    known = ops()
    if name not in known:
        refuse(f"there is no op {name!r}. {suggestion(name, known)}")
    return known[name]


def setting(text: str, example: str, texts: Sequence[str] = ()) -> tuple[str, object]:
    """Name and value of "name=value": true, false, none or a Python literal, else the text itself.

    texts: names whose true, false and none are words of their own. example: what is shown where there is no "=".
    """
    name, equals, value = text.partition("=")
    if not equals:
        refuse(f"--set must be NAME=VALUE, such as {example}; got {text!r}")
    words = {"true": True, "false": False, "none": None} if name not in texts else {}
    if value.lower() in words:
        return name, words[value.lower()]
    try:
        return name, ast.literal_eval(value)
    except (ValueError, SyntaxError):
        return name, value
