"""Pins: what the name of a kernel says, with fields of its configuration, and whether there is such a kernel."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tilesmith.engine.arguments import shown, suggestion
from tilesmith.engine.backends import in_gluon

_MOST_WARPS = 64  # of a block's 1,024 threads on devices with the narrowest warps, of 16


def parse_pin(pin: str, said_of: str = "a pin") -> tuple[str, dict[str, int]]:
    """Backend and configuration fields of a pin: "triton:block_m=64:block_n=32" gives two fields their values.

    Raises ValueError for a field that is not name=integer.
    """
    backend, *rest = pin.split(":")
    fields = {}
    for part in rest:
        name, _, value = part.partition("=")
        if not name.isidentifier() or not value.isdecimal():
            raise ValueError(f"{said_of} must be backend[:field=integer]..., got {pin!r}")
        fields[name] = int(value)
    return backend, fields


def check_pin(where: str, known: Mapping[str, Any], name: str, backend: Any) -> None:
    """Raise unless `name` is an op of `known` and `backend` one of its kernels, perhaps with fields to configure it."""
    op = known.get(name)
    if op is None:
        raise ValueError(f"{where}: there is no op {name!r}. {suggestion(name, known)}")
    if not isinstance(backend, str):
        raise TypeError(f"{where}: {name} must be the name of a backend, got {shown(backend)}")
    kernel, fields = parse_pin(backend, f"{where}: {name}")
    if kernel not in op.backends():
        raise ValueError(
            f"{where}: {name} has no kernel {backend!r}; it has: {', '.join(op.backends())}; pin one of them"
        )
    for field, value in fields.items():
        allowed = _allowed(op, kernel, field, value)
        if allowed is not None:
            raise ValueError(f"{where}: {name} is pinned to {field}={value}, which {kernel} cannot compile; {allowed}")


def _allowed(op: Any, backend: str, field: str, value: int) -> str | None:
    """What a field must be where no kernel of the backend compiles with a value, in words, else None. The kernels are
    not imported: the fields of the library's own have these names, those of others are their makers' matter."""
    if not op.reference.__module__.startswith("tilesmith.") or not (in_gluon(backend) or backend.startswith("triton")):
        return None
    # 0 leaves a field to the plan of a kernel in Gluon, and a row in registers where rows may be swept by columns
    power = not value & (value - 1) and (value > 0 or in_gluon(backend) or field == "block_cols")
    if field.split("_")[-1] == "warps" and not (power and value <= _MOST_WARPS):
        return f"it must be a power of two of at most {_MOST_WARPS}"
    if "block" in field.split("_") and not in_gluon(backend) and not power:
        return f"it must be a power of two, such as {max(16, 1 << value.bit_length() - 1) if value else 64}"
    return None
