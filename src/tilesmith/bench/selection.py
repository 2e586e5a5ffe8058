"""Names of cases and of providers that were asked for: one that nobody has is an error, not an empty table."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

import torch

from tilesmith.bench.document import OURS
from tilesmith.bench.peers import names
from tilesmith.engine import Case, cases
from tilesmith.engine.arguments import suggestion


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
            served = ", ".join(_plain(dtype) for dtype in case.dtypes)
            raise ValueError(f"{case.name} of {op} is for {served}, not for {_plain(dtype)}; choose another dtype")


def check_cases(subjects: Sequence[str], named: Iterable[str]) -> None:
    """ValueError unless each name is a case of one of the subjects at least. A subject: an op, "host" or "model"."""
    known = dict.fromkeys(name for subject in subjects for name in _cases(subject))
    refuse_unknown(f"{_listed(subjects)} no case", named, list(known))


def check_providers(subjects: Sequence[str], only: Iterable[str]) -> None:
    """ValueError unless each name is a provider of one of the subjects at least."""
    known = dict.fromkeys(name for subject in subjects for name in _providers(subject))
    refuse_unknown(f"{_listed(subjects)} no provider", only, list(known))


def cases_of(subject: str, named: Sequence[str]) -> tuple[str, ...]:
    """Those of `named` that are cases of the subject."""
    known = _cases(subject)
    return tuple(name for name in named if name in known)


def providers_of(subject: str, only: Sequence[str]) -> tuple[str, ...]:
    """Those of `only` that the subject has, or ours where it has none of them; () where `only` is, which means all."""
    known = _providers(subject)
    return tuple(name for name in only if name in known) or ((OURS,) if only else ())


def _cases(subject: str) -> list[str]:
    from tilesmith.bench.host import OPS

    if subject == "host":
        return list(OPS)
    return [] if subject == "model" else [case.name for case in cases(subject)]


def _providers(subject: str) -> list[str]:
    from tilesmith.bench import host, model

    if subject == "model":
        return list(model.PROVIDERS)
    return [name for op in (host.OPS if subject == "host" else (subject,)) for name in names(op)]


def _listed(subjects: Sequence[str]) -> str:
    shown = ", ".join(subjects[:4]) + (f" and {len(subjects) - 4} more" if len(subjects) > 4 else "")
    return f"{shown} {'has' if len(subjects) == 1 else 'have'}"


def _plain(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
