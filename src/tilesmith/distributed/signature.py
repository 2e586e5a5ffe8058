"""What ranks compare about a call: names and values that must be the same on all of them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import cached_property
from typing import Any

Signature = Mapping[str, Any]


class Facts(dict[str, Any]):
    """What signatures of calls of one kind have in common."""

    @cached_property
    def text(self) -> str:
        """JSON, made once."""
        return json.dumps(self)


class Signed(dict[str, Any]):
    """The signature of one pass of a call among those of its group, which has these facts."""

    def __init__(self, kind: str, number: int, facts: Facts):
        super().__init__({"pass": kind, "number of the call": number})
        self.update(facts)
        self._kind, self._number, self._facts = kind, number, facts

    @property
    def text(self) -> str:
        """JSON, as `json.dumps` writes it."""
        return f'{{"pass": "{self._kind}", "number of the call": {self._number}, {self._facts.text[1:]}'
