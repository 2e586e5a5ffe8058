"""Tilesmith: transformer kernels for PyTorch. `tilesmith.optimize(model)` makes a model faster and leaner."""

from __future__ import annotations

import contextlib
import os
import sys
import warnings

from tilesmith._exports import EXPORTS
from tilesmith._lazy import absent, imported, resolved

__version__ = "0.1.0"
__all__ = [*EXPORTS, "__version__"]


def __getattr__(name: str):
    home = EXPORTS.get(name)
    if home is not None:
        with _without_word_of_numpy():
            value = resolved(home, name)
        globals()[name] = value
        return value
    try:
        with _without_word_of_numpy():
            return imported(f"tilesmith.{name}")
    except ModuleNotFoundError as missing:
        if missing.name != f"tilesmith.{name}":
            raise
    except AttributeError as problem:  # `from tilesmith import name` would say no more than that there is no such name
        raise ImportError(f"tilesmith.{name} could not be imported: {problem}") from problem
    elsewhere = {} if name.startswith("_") else {"tilesmith.ops": imported("tilesmith.ops").__all__}
    raise absent("tilesmith", name, __all__, elsewhere)


def __dir__() -> list[str]:
    return sorted(__all__)


@contextlib.contextmanager
def _without_word_of_numpy():
    """While torch may be imported, ignore its warning that NumPy is not installed: nothing here needs NumPy.

    `warnings.catch_warnings` would also take back the filters that the imported modules set.
    """
    if "torch" in sys.modules:
        yield
        return
    before = list(warnings.filters)
    warnings.filterwarnings("ignore", "Failed to initialize NumPy", UserWarning)
    ours = [rule for rule in warnings.filters if rule not in before]
    try:
        yield
    finally:
        for rule in ours:
            with contextlib.suppress(ValueError):
                warnings.filters.remove(rule)


def _is_the_command() -> bool:
    """Whether this import is that of the `tilesmith` command, which says in one line what is wrong."""
    started = sys.argv[0] if sys.argv else ""
    if started == "-m":  # Python sets the name of what it runs after this import
        return "-m" in sys.orig_argv and sys.orig_argv[sys.orig_argv.index("-m") + 1] == "tilesmith"
    return os.path.basename(started).partition(".")[0] == "tilesmith"


if any(name.startswith("TILESMITH_") for name in os.environ) and not _is_the_command():
    from tilesmith.settings import read

    read()  # a misspelt variable would be ignored; not kept, since the environment may change until first use
    del read
