"""Loss curves, of the demo and of training."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from rich.markup import escape

from tilesmith import _install
from tilesmith.cli.output import console

# What an import of a package raises that was built for another NumPy, or lacks a shared library.
BROKEN = (ImportError, AttributeError, OSError, RuntimeError, ValueError)
COLOURS = ("#8a8a8a", "#d1495b", "#2e86ab", "#3c887e")


def available() -> bool:
    """Whether pictures can be drawn; says in one line why not, and what to install."""
    try:
        _pyplot()
    except BROKEN as problem:
        absent = isinstance(problem, ModuleNotFoundError) and problem.name == "matplotlib"
        first = str(problem).strip().partition("\n")[0]
        told = "is not installed" if absent else f"cannot be imported: {type(problem).__name__}: {first}"
        told = f"no loss curves: matplotlib {told} ({_install.command('bench')})"
        console.print(escape(told), style="dim", highlight=False)
        return False
    return True


def loss_curves(losses: Mapping[str, Sequence[float]], folder: Path, title: str) -> list[Path]:
    """Draw one line a model, the first one wide so that an equal one shows; save loss.svg and loss.png."""
    figure, axes = _loss_axes(title)
    for i, (name, values) in enumerate(losses.items()):
        wide = i == 0
        axes.plot(range(1, len(values) + 1), values, label=name, color=COLOURS[i % 4], linewidth=5 if wide else 1.5)
    return _saved(figure, axes, folder)


def training_curves(losses: Sequence[float], validation: Mapping[int, float], folder: Path, title: str) -> list[Path]:
    """Draw the training loss of each step, and the validation losses by step; save loss.svg and loss.png."""
    figure, axes = _loss_axes(title)
    axes.plot(range(1, len(losses) + 1), losses, label="training", color=COLOURS[0], linewidth=1, alpha=0.7)
    axes.plot(
        list(validation), list(validation.values()), label="validation", color=COLOURS[1], marker="o", markersize=4
    )
    return _saved(figure, axes, folder)


def _pyplot():
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    return pyplot


def _loss_axes(title: str):
    figure, axes = _pyplot().subplots(figsize=(7, 4), layout="constrained")
    axes.set(xlabel="step", ylabel="loss (nats a token)", title=title)
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    return figure, axes


def _saved(figure, axes, folder: Path) -> list[Path]:
    axes.legend(frameon=False)
    folder.mkdir(parents=True, exist_ok=True)
    paths = [folder / "loss.svg", folder / "loss.png"]
    for path in paths:
        figure.savefig(path, dpi=160)
    _pyplot().close(figure)
    return paths
