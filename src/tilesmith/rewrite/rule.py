"""A rule: looks at one module, and proposes what to put in its place or says why it stays."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar, Literal

from torch import nn

from tilesmith.rewrite.variants import Form


@dataclass(frozen=True)
class Replace:
    """Swap the module to `form`; without a form the module already computes by `ops` through what holds it.

    computes: False for a form that only hands something to other modules; its row is of a module left as it is.
    """

    form: Form | None
    ops: tuple[str, ...]
    reason: str
    computes: bool = True


@dataclass(frozen=True)
class Skip:
    """Leave the module alone. `wanted` is False where nothing is lost by that; `quiet` where nobody would want it
    otherwise either, so that only the full report says so."""

    reason: str
    wanted: bool = True
    quiet: bool = False


class Rule:
    """One kind of rewrite. `match` decides by what the module computes on small inputs, not by what it is called.

    own: whether it also looks at the library's own modules. part: the part of a transformer block that it is for, ""
    for no single one. spans: whether it computes products, or what several modules compute, rather than one module or
    a sum and a norm. Fusion chooses rules by these two.
    """

    name: ClassVar[str]
    own: ClassVar[bool] = False
    part: ClassVar[Literal["norm", "attention", "ffn", "loss", ""]] = ""
    spans: ClassVar[bool] = True

    def match(self, site: Site) -> Replace | Skip | None:
        """What to do with the module at `site`; None when it is none of this rule's business."""
        raise NotImplementedError


@dataclass(frozen=True)
class Site:
    """One module inside the model that is being rewritten."""

    root: nn.Module
    fqn: str
    module: nn.Module

    def holders(self) -> Iterator[nn.Module]:
        """The modules that hold this one, innermost first."""
        path = self.fqn.split(".")[:-1] if self.fqn else []
        while path:
            yield functools.reduce(getattr, path, self.root)
            path.pop()
        if self.fqn:
            yield self.root
