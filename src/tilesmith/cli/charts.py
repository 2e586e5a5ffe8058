"""Charts of the demo."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

COLOURS = ("#8a8a8a", "#d1495b", "#2e86ab", "#3c887e")


def loss_curves(losses: Mapping[str, Sequence[float]], folder: Path, title: str) -> list[Path]:
    """Draw one line a model, the first one wide so that an equal one shows; save loss.svg and loss.png."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 4), layout="constrained")
    for i, (name, values) in enumerate(losses.items()):
        wide = i == 0
        axes.plot(range(1, len(values) + 1), values, label=name, color=COLOURS[i % 4], linewidth=5 if wide else 1.5)
    axes.set(xlabel="step", ylabel="loss (nats a token)", title=title)
    axes.grid(alpha=0.25)
    axes.legend(frameon=False)
    axes.spines[["top", "right"]].set_visible(False)
    folder.mkdir(parents=True, exist_ok=True)
    paths = [folder / "loss.svg", folder / "loss.png"]
    for path in paths:
        figure.savefig(path, dpi=160)
    pyplot.close(figure)
    return paths
