"""What forwards of transformers call their cache of keys and values, as an argument and as a field of what they return:
`cache` since transformers 5.24, before `past_key_values`, and `cache_params` where states are kept (Mamba, xLSTM)."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from typing import Any

CACHE_NAMES = ("cache", "past_key_values", "cache_params")


def cache_name(names: Iterable[str]) -> str | None:
    """Which of these names, such as a forward's parameters, is that of a cache; None where none is."""
    known = set(names)
    return next((name for name in CACHE_NAMES if name in known), None)


def cache_parameter(forward: Callable[..., Any]) -> str:
    """What a forward that takes a cache calls it."""
    return cache_name(inspect.signature(forward).parameters) or "past_key_values"
