"""Continuous batching of transformers (`generate_batch`), which takes no attention but those that it knows by name."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from torch import nn

INIT = "init_continuous_batching"


def batching(base: type, release: Callable[[nn.Module], Callable[[], None]]) -> dict[str, Any]:
    """The method that makes a manager. `release` is called on the model before it, and what `release` returns is
    called once the manager has stopped, or could not be made. Empty for a class without the method."""
    whole = getattr(base, INIT, None)
    if whole is None:
        return {}

    @functools.wraps(whole)
    def init(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        restore = release(self)
        try:
            manager = whole(self, *args, **kwargs)
        except BaseException:
            restore()
            raise
        _at_stop(manager, restore)
        return manager

    return {INIT: init}


def _at_stop(manager: Any, then: Callable[[], None]) -> None:
    """Have a manager call `then` when it has stopped, once."""
    stop = manager.stop

    @functools.wraps(stop)
    def stopped(*args: Any, **kwargs: Any) -> Any:
        manager.stop = stop  # a manager may be kept for later and started again
        try:
            return stop(*args, **kwargs)
        finally:
            then()

    manager.stop = stopped
