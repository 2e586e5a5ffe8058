"""LLaMA-Factory with an optimised model: `python -m tilesmith.integrations.llamafactory recipe.yaml`.

The recipe is LLaMA-Factory's own, and its training is `llamafactory.train.tuner.run_exp`, which takes callbacks.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tilesmith.integrations.trainer import TilesmithCallback


def run_exp(args: Mapping[str, Any] | None = None, **options: Any) -> None:
    """LLaMA-Factory's `run_exp` with `TilesmithCallback(**options)` among its callbacks.

    args: the recipe as a dictionary; None reads the command line, as LLaMA-Factory does. options: those of the
    callback, graphs and compile too. Raises ImportError without LLaMA-Factory, and what the callback raises.
    """
    try:
        from llamafactory.train.tuner import run_exp as theirs
    except ImportError as problem:
        raise ImportError(
            f"tilesmith.integrations.llamafactory needs LLaMA-Factory, which could not be imported ({problem}): "
            "pip install llamafactory"
        ) from problem
    theirs(args if args is None else dict(args), callbacks=[TilesmithCallback(**options)])


if __name__ == "__main__":
    run_exp()
