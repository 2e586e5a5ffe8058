"""What the command `bench` measures, an op, "host" or "model": the names of its cases and providers."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from tilesmith.bench import host, model
from tilesmith.bench.document import OURS
from tilesmith.bench.peers import names
from tilesmith.bench.selection import refuse_unknown
from tilesmith.engine import cases


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


def lacking(subject: str, only: Sequence[str]) -> list[str]:
    """Those of `only` that the subject has not."""
    return [name for name in only if name not in _providers(subject)]


def _cases(subject: str) -> list[str]:
    if subject == "host":
        return list(host.OPS)
    return [] if subject == "model" else [case.name for case in cases(subject)]


def _providers(subject: str) -> list[str]:
    if subject == "model":
        return list(model.PROVIDERS)
    return [name for op in (host.OPS if subject == "host" else (subject,)) for name in names(op)]


def _listed(subjects: Sequence[str]) -> str:
    shown = ", ".join(subjects[:4]) + (f" and {len(subjects) - 4} more" if len(subjects) > 4 else "")
    return f"{shown} {'has' if len(subjects) == 1 else 'have'}"
