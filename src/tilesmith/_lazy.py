"""Names that a package resolves at their first use (PEP 562)."""

from __future__ import annotations

import difflib
import importlib
from collections.abc import Callable, Iterable, Mapping
from types import ModuleType
from typing import Any


def imported(home: str) -> ModuleType:
    """The module `home`. Raises ImportError where importing it ends in an AttributeError, as for a name that another
    release of a dependency lacks: `from package import name` would say no more than that it cannot."""
    try:
        return importlib.import_module(home)
    except AttributeError as problem:
        raise ImportError(f"{home} cannot be imported: {problem}", name=home) from problem


def resolved(home: str, name: str) -> Any:
    """`name` of the module `home`; ImportError as above."""
    return getattr(imported(home), name)


def absent(
    package: str, name: str, known: Iterable[str], elsewhere: Mapping[str, Iterable[str]] | None = None
) -> AttributeError:
    """The error of a package that has no `name`: which package has it, or the known name that is spelled most alike.

    elsewhere: package -> its names, among which the name is looked for too.
    """
    message = f"module {package!r} has no attribute {name!r}"
    said = "" if name.startswith("_") else _said(name, known, elsewhere or {})
    # a traceback adds a suggestion of its own unless the error has a name already
    return AttributeError(message + said, name=name) if said else AttributeError(message)


def _said(name: str, known: Iterable[str], elsewhere: Mapping[str, Iterable[str]]) -> str:
    for home, names in elsewhere.items():
        if name in names:
            return f". It is {home}.{name}"
    whole = {there: f"{home}.{there}" for home, names in elsewhere.items() for there in names}
    whole.update({here: here for here in known})
    close = difflib.get_close_matches(name, list(whole), n=1, cutoff=0.75)
    return f". Did you mean {whole[close[0]]!r}?" if close else ""


def refuse_calls(module: ModuleType, function: str) -> None:
    """Make a call of a module, which Python refuses without a hint, name the function that was meant."""

    class Package(ModuleType):
        def __call__(self, *args: Any, **kwargs: Any) -> Any:
            raise TypeError(f"{self.__name__} is a module, which cannot be called; call {function}")

    module.__class__ = Package


def lazy_names(names: dict[str, Any], homes: Mapping[str, str]) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """`__getattr__` and `__dir__` of a package. names: its globals, which keep what was resolved; homes: public name ->
    the module that has it."""

    def __getattr__(name: str) -> Any:
        home = homes.get(name)
        if home is None:
            raise absent(names["__name__"], name, homes)
        value = names[name] = resolved(home, name)
        return value

    def __dir__() -> list[str]:
        return sorted(homes)

    return __getattr__, __dir__
