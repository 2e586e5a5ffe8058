"""Which modules `optimize(graphs=...)` records: the repeated blocks, and the model around them that has a loss."""

from __future__ import annotations

import functools
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
from torch import nn

from tilesmith.models.blocks import BlockForm, BlockRule, Forwards
from tilesmith.models.graphs import PLACE, Graphs
from tilesmith.models.layers.losses import LabelledForm
from tilesmith.models.pace import Pace, late_blocks
from tilesmith.models.whole_forward import GRAPHS, WholeForm
from tilesmith.rewrite import Form, Replace, Site, forms

Wanted = bool | Literal["auto"]
"""Whether blocks are recorded; "auto": where steps show that the device waits for the host."""


@dataclass(frozen=True)
class GraphedForm(BlockForm):
    """The same forward, recorded with its backward."""

    state: ClassVar[tuple[str, ...]] = (GRAPHS, PLACE)

    def namespace(self, base: type) -> dict[str, Any]:
        way = Forwards(base.forward)

        @functools.wraps(way.forward)
        def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
            graphs = self.__dict__.get(GRAPHS)
            if torch.compiler.is_compiling() or graphs is None or graphs.within or graphs.rest(self):
                return way.forward(self, *args, **kwargs)
            why = graphs.obstacle(self)
            if why:
                graphs.refuse(why)
                return way.forward(self, *args, **kwargs)
            whole = functools.partial(graphs.run, way.whole)
            prefill = functools.partial(graphs.run, way.prefill)
            return way.run(self, args, kwargs, whole, prefill, graphs.refuse)

        return {"forward": forward}


class GraphsRule(BlockRule):
    """Blocks recorded as CUDA graphs, and the forward around them where it ends in a loss."""

    name = "graphs"
    form = GraphedForm
    told = "forward and backward recorded as CUDA graphs, one pair for each shape"
    whole = "called with labels, recorded from tokens to the loss where only blocks hold trained weights"
    asked, instead = "graphs=True records", "torch.cuda.make_graphed_callables"

    def __init__(self, model: nn.Module, wanted: Wanted):
        self.asked = f"graphs={wanted!r} records"  # type: ignore[misc]
        super().__init__(model, Graphs(Pace() if wanted == "auto" else None))
        self._late = [block for _, block in late_blocks(model)] if wanted == "auto" else []

    def attach(self, module: nn.Module) -> None:
        """Have a swapped block tell this rule's `record`, and those told apart by it the host's place."""
        super().attach(module)
        module.__dict__.update((PLACE, place) for place, block in enumerate(self._late) if block is module)

    def match(self, site: Site) -> Replace | None:
        if any(isinstance(form, LabelledForm) for form in forms(site.module)) and self._holds_blocks(site.fqn):
            return Replace(WholeForm(), (), self.whole)
        return super().match(site)

    def _holds_blocks(self, fqn: str) -> bool:
        return all(name.startswith(f"{fqn}." if fqn else "") and name != fqn for name in self._blocks)


def wanted_before(taken: Iterable[tuple[nn.Module, Form, dict[str, Any]]]) -> Wanted:
    """What an earlier `optimize` was asked for, by what `detach_block_forms` took off."""
    held = next((state for _, form, state in taken if isinstance(form, GraphedForm)), None)
    if held is None:
        return False
    return "auto" if GRAPHS in held and held[GRAPHS].pace is not None else True
