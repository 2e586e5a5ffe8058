"""Consecutive blocks of a forward, each called with what the one before returned: recorded as one.

The call of the first of them replays all. The others are then handed what was computed, as long as they are called in
that order with just that. `Trail` sees which blocks follow each other; `Progress` is a forward on its way along a
recording of several.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from tilesmith.models.blocks import Call, Foreign
from tilesmith.models.recorded import Recorded, watched
from tilesmith.models.recorded_calls import Link, flatten
from tilesmith.models.recorded_tensors import Identity


def single(block: nn.Module, plain: Call, spec: Any, shapes: tuple, state: tuple, copied: bool = False) -> Link:
    """A call that depends on no other."""
    sources = tuple((False, place) for place in range(len(shapes)))
    return Link(weakref.ref(block), plain, spec, shapes, state, sources, copied)


class Trail:
    """The calls that followed each other so far, as links."""

    def __init__(self) -> None:
        self.links: list[Link] = []
        self._given: list[Identity] = []
        self._returned: list[Identity] = []

    def follow(self, call: Link, leaves: list[Tensor], out: Any) -> bool:
        """Add a call, given `leaves`, that returned `out`. Returns whether it is the first of its trail."""
        sources = self._sources(leaves) if self.links else None
        first = sources is None
        if first:
            self.links, self._given, sources = [], [Identity(x) for x in leaves], call.sources
        returned: list[Tensor] = []
        try:
            flatten(out, returned)
        except Foreign:
            self.links, returned = [], []
        self.links.append(Link(call.block, call.plain, call.spec, call.shapes, call.state, sources))
        self._returned = [Identity(x) for x in returned]
        return first

    def _sources(self, leaves: list[Tensor]) -> tuple[tuple[bool, int], ...] | None:
        """Where each tensor comes from; None if one comes from elsewhere, or none from the call before."""
        found = []
        for leaf in leaves:
            places = [(True, i) for i, known in enumerate(self._returned) if known.holds(leaf)]
            places += [(False, i) for i, known in enumerate(self._given) if known.holds(leaf)]
            if not places or watched(leaf):
                return None
            found.append(places[0])
        return tuple(found) if any(behind for behind, _ in found) else None


def one_by_one(links: Sequence[Link]) -> str:
    """Why blocks are not recorded as one; "" if they may be."""
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        return "so that gradients are sent while others are computed"
    blocks = [block for link in links if (block := link.block()) is not None]
    if any(getattr(p, "_post_accumulate_grad_hooks", None) for block in blocks for p in block.parameters()):
        return "so that hooks on parameters are called while others are computed"
    return ""


class Progress:
    """How far a forward has come along the links of a recording, whose `results` are those of all."""

    def __init__(self, entry: Recorded, leaves: list[Tensor], results: tuple[Tensor, ...]):
        self.entry, self._place = entry, 0
        self._given = [Identity(x) for x in leaves]
        self._left = [entry.returned(place, results) for place in range(len(entry.links))]
        self._returned: list[Identity] = []
        self._ticket = entry.ticket
        if self._ticket is not None:
            self._ticket.between = [
                (place, Identity(self._left[place - 1][source]))
                for place, link in enumerate(entry.links)
                for behind, source in link.sources
                if behind
            ]

    def take(self) -> Any:
        """What the link returns that is called now; it is not kept."""
        tensors, self._left[self._place] = self._left[self._place], []
        self._returned = [Identity(x) for x in tensors]
        if self._ticket is not None:
            self._ticket.served = self._place + 1
        self._place += 1
        return self.entry.rebuilt(self._place - 1, tensors)

    def asks(self, block: nn.Module, plain: Call, spec: Any, state: tuple, leaves: list[Tensor]) -> bool:
        """Whether a call is that of the next link."""
        link = self.entry.links[self._place]
        if link.block() is not block or link.plain is not plain or link.spec != spec or link.state != state:
            return False
        if self._ticket is None or self._ticket.done or self._ticket.spoiled:
            return False
        known = link.given(self._given, self._returned)
        return all(k.holds(leaf) and not watched(leaf) for k, leaf in zip(known, leaves))

    @property
    def at_last(self) -> bool:
        """Whether the last link is called next."""
        return self._place == len(self.entry.links) - 1

    def kept(self) -> bool:
        """Whether somebody still has what passed between blocks, other than what the last one is given now."""
        between = self._ticket.between if self._ticket is not None else []
        return any(place < self._place and known.tensor() is not None for place, known in between)
