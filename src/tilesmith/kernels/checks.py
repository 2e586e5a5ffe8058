"""What a kernel's configuration may hold, said in words where it does not."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache, wraps

from tilesmith.codegen import KernelIR


def positive(config: object, *fields: str) -> None:
    """Raise ValueError for a field that is no int of at least 1."""
    for field in fields:
        value = getattr(config, field)
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ValueError(f"{_name(config)}: {field} must be a whole number of at least 1, got {value!r}")


def counts(config: object, **given: int) -> None:
    """Raise ValueError for an argument of `config.grid` that is no int of at least 0."""
    for name, value in given.items():
        if isinstance(value, bool) or not isinstance(value, int) or value < 0:
            fail(config, f"grid: {name} must be a whole number of at least 0, got {value!r}")


def flags(config: object, *fields: str) -> None:
    """Raise ValueError for a field that is neither True nor False."""
    for field in fields:
        if not isinstance(getattr(config, field), bool):
            raise ValueError(f"{_name(config)}: {field} must be True or False, got {getattr(config, field)!r}")


def one_of(config: object, field: str, *allowed: object) -> None:
    """Raise ValueError for a value that is not listed."""
    value = getattr(config, field)
    if value not in allowed:
        listed = ", ".join(map(repr, allowed))
        raise ValueError(f"{_name(config)}: {field} must be one of {listed}, got {value!r}")


def workgroup(config: object) -> None:
    """Raise ValueError for a `workgroup_size` that is no power of two from 32 to 1024."""
    one_of(config, "workgroup_size", 32, 64, 128, 256, 512, 1024)


def subgroup(config: object) -> None:
    """Raise ValueError for a `subgroup` that is no size of subgroups, or more than the workgroup."""
    one_of(config, "subgroup", None, 4, 8, 16, 32, 64)
    if config.subgroup is not None and config.subgroup > config.workgroup_size:
        fail(config, f"subgroups of {config.subgroup} in a workgroup of {config.workgroup_size}")


def half(config: object) -> None:
    """Raise ValueError for a `half` that is not the name of a 16-bit type."""
    one_of(config, "half", "f16", "bf16")


def builds_from(kind: type) -> Callable[[Callable[..., KernelIR]], Callable[..., KernelIR]]:
    """A decorator of what builds a kernel from a configuration of this `kind`: it keeps the last 64, and raises
    TypeError for anything else, which need not be hashable."""

    def checked(create: Callable[..., KernelIR]) -> Callable[..., KernelIR]:
        kept = lru_cache(maxsize=64)(create)

        @wraps(create)
        def build(config: object) -> KernelIR:
            if not isinstance(config, kind):
                raise TypeError(f"config must be a {kind.__name__}, got {type(config).__name__}")
            return kept(config)

        build.cache_info, build.cache_clear = kept.cache_info, kept.cache_clear
        return build

    return checked


def limits(found: object, name: str) -> None:
    """Raise TypeError for an argument that is no Limits."""
    if not hasattr(found, "refuses"):
        raise TypeError(f"{name} must be Limits, got {found!r}; get them from tilesmith.hardware.limits_of")


def fail(config: object, message: str) -> None:
    """Raise ValueError in the configuration's name."""
    raise ValueError(f"{_name(config)}: {message}")


def _name(config: object) -> str:
    return type(config).__name__
