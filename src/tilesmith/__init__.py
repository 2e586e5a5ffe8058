"""Tilesmith: transformer kernels for PyTorch. `tilesmith.optimize(model)` makes a model faster and leaner."""

from __future__ import annotations

from tilesmith._exports import EXPORTS
from tilesmith._lazy import absent, imported, resolved

__version__ = "0.1.0"
__all__ = [*EXPORTS, "__version__"]


def __getattr__(name: str):
    home = EXPORTS.get(name)
    if home is not None:
        value = resolved(home, name)
        globals()[name] = value
        return value
    try:
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
