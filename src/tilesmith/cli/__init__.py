"""The `tilesmith` command: one file per subcommand. Exit codes: 0 fine, 1 a check failed, 2 wrong use."""

from __future__ import annotations

import importlib
import io
import os
import sys

from tilesmith import __version__, _install
from tilesmith.settings import settings

_HELP = "Transformer kernels for PyTorch: apply them to a model, check them, measure them, see which is chosen and why."


def build():
    """The typer application with every subcommand."""
    import typer

    from tilesmith.cli import bench, codegen, demo, doctor, explain, generate, optimize, train, tune, verify

    app = typer.Typer(
        name="tilesmith",
        help=_HELP,
        no_args_is_help=True,
        add_completion=False,
        pretty_exceptions_enable=False,
        context_settings={"help_option_names": ["-h", "--help"]},
    )
    app.callback()(_application_options())
    for command in (demo, doctor, explain, verify, bench, tune, optimize, train, generate, codegen):
        app.command(command.__name__.rpartition(".")[2], help=_flowing(command.command.__doc__))(command.command)
    return app


def _flowing(text: str) -> str:
    """Paragraphs without their line breaks, which typer would keep in all but the first."""
    return "\n\n".join(" ".join(paragraph.split()) for paragraph in text.split("\n\n"))


def _application_options():
    """The callback with the options that stand before a subcommand."""
    import typer

    def show(asked: bool) -> None:
        if asked:
            sys.stdout.write(f"tilesmith {__version__}\n")
            raise typer.Exit

    def options(
        version: bool = typer.Option(False, "--version", callback=show, is_eager=True, help="The version, and exit."),
    ) -> None:
        pass

    return options


def main() -> None:
    """Entry point of the console script."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # an encoding without "µ" or "→" shows "?", and ends nothing
            stream.reconfigure(errors="replace")
    missing = [name for name in ("typer", "rich") if not _installed(name)]
    if missing:
        sys.stderr.write(
            f"tilesmith: the command line needs {' and '.join(missing)}. Install with: {_install.command('cli')}\n"
        )
        raise SystemExit(2)
    try:
        if settings().pins:
            importlib.import_module("tilesmith.ops")  # which knows whether there are such ops and kernels
    except ValueError as problem:
        sys.stderr.write(f"tilesmith: {problem}\n")
        raise SystemExit(2) from None
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # torch's profiler prints a line at each start and stop
    build()(prog_name="tilesmith")


def _installed(name: str) -> bool:
    from importlib.util import find_spec

    return find_spec(name) is not None
