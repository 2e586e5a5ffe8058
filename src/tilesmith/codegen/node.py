"""The base of KernelIR's parts: a frozen dataclass without generated code."""

from __future__ import annotations

from dataclasses import FrozenInstanceError, dataclass
from typing import Any


class Node:
    """Immutable, compared and hashed by its annotated fields, which are positional in declared order.

    Some forty classes of `@dataclass(frozen=True)` compile code for 25 ms at import; these compile none.
    """

    _names: tuple[str, ...] = ()

    def __init_subclass__(cls) -> None:
        dataclass(init=False, repr=False, eq=False)(cls)
        cls._names = tuple(cls.__dataclass_fields__)

    def __init__(self, *args: Any, **named: Any) -> None:
        values = self.__dict__
        values.update(zip(self._names, args))
        values.update(named)
        if len(values) != len(self._names) or len(args) > len(self._names):
            for name in self._names:
                if name not in values and hasattr(type(self), name):
                    values[name] = getattr(type(self), name)
            if tuple(sorted(values)) != tuple(sorted(self._names)) or len(args) + len(named) > len(self._names):
                raise TypeError(f"{type(self).__name__} takes {', '.join(self._names)}; got {args} {named}")

    def __setattr__(self, name: str, value: Any) -> None:
        raise FrozenInstanceError(f"cannot assign to field {name!r}")

    def __delattr__(self, name: str) -> None:
        raise FrozenInstanceError(f"cannot delete field {name!r}")

    def __getstate__(self) -> dict:
        return dict(zip(self._names, self._values()))  # without what is kept beside the fields

    def _values(self) -> tuple:
        return tuple(self.__dict__[name] for name in self._names)

    def __eq__(self, other: object) -> bool:
        return type(self) is type(other) and self._values() == other._values()

    def __hash__(self) -> int:
        return hash((type(self).__name__, self._values()))

    def __repr__(self) -> str:
        return f"{type(self).__name__}({', '.join(f'{n}={getattr(self, n)!r}' for n in self._names)})"
