"""Names of cases and of providers that were asked for: one that nobody has is an error, not an empty table."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

import torch

from tilesmith.engine import Case
from tilesmith.engine.arguments import dtype_name, suggestion


def refuse_unknown(what: str, asked: Iterable[str], known: Collection[str]) -> None:
    """ValueError for the first of the names `asked` that is not `known`. what: how the error begins, such as "silu has
    no case"."""
    for name in asked:
        if name not in known:
            raise ValueError(f"{what} {name!r}. {suggestion(name, known) if known else 'There is none'}")


def check_parts(what: str, asked: Iterable[str], known: Collection[str]) -> None:
    """As `refuse_unknown`, of names that may be a part of a known one."""
    for name in asked:
        if not any(name in whole for whole in known):
            refuse_unknown(what, [name], list(dict.fromkeys(known)))


def check_named(op: str, known: Sequence[Case], named: Collection[str], dtype: torch.dtype) -> None:
    """ValueError unless each name is a case among `known`, those of the op, and is for `dtype`."""
    refuse_unknown(f"{op} has no case", named, [case.name for case in known])
    for case in known:
        if case.name in named and dtype not in case.dtypes:
            served = ", ".join(dtype_name(dtype) for dtype in case.dtypes)
            raise ValueError(f"{case.name} of {op} is for {served}, not for {dtype_name(dtype)}; choose another dtype")
