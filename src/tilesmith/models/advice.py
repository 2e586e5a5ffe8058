"""What would make the steps of an optimised model faster, told once they have shown it: blocks recorded as CUDA graphs.

The host's place is read off the counts of calls that swapped modules keep for the report (`reach.ran`): those of two
blocks are `_Passed` until enough steps were seen. So nothing is put around a module, and no other module costs more.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from torch import nn

from tilesmith.engine import torch_private
from tilesmith.models.blocks import checkpoints
from tilesmith.models.graphs import unservable, watched_within
from tilesmith.models.pace import Pace, late_blocks
from tilesmith.rewrite import CALLS, Report

log = logging.getLogger("tilesmith")


class Advice:
    """What the steps of a model have shown, for its report and, once, for the log."""

    def __init__(self) -> None:
        self.pace = Pace()
        self.obstacle = ""  # why the blocks cannot be recorded

    def told(self) -> list[str]:
        """Sentences for the report."""
        if not self.pace.waits:
            return []
        if self.obstacle:
            other = 'compile="between" leaves the host fewer kernels to launch'
            return [f"{self.pace}; its blocks cannot be recorded as CUDA graphs ({self.obstacle}), but {other}"]
        return [f"{self.pace}: `optimize(model, graphs=True)` records blocks as CUDA graphs, which takes more memory"]

    def passed(self, place: int, block: nn.Module) -> bool:
        """As `Pace.passed`; returns whether nothing more is to be told."""
        if not self.pace.decided:
            self.pace.passed(place, block)
            if self.pace.waits:
                self.obstacle = unservable(block) or _changed(block)
                if not self.obstacle:
                    log.warning("optimize: %s", *self.told())
        return self.pace.decided


def _changed(block: nn.Module) -> str:
    """Why a block cannot be recorded as it is now, though `unservable` says nothing of it; "" if it can."""
    inside = watched_within(block)
    if inside:
        return f"{inside} in it has hooks"
    if any(map(torch_private.moves_with_fsdp, block.parameters())):
        return "FullyShardedDataParallel moves its parameters"
    if checkpoints(block) and any(isinstance(m, nn.Dropout) and m.p and m.training for m in block.modules()):
        return "it is checkpointed and draws random numbers"
    return "it is on several devices" if len({p.device for p in block.parameters()}) > 1 else ""


class Counts(dict[str, int]):
    """How often a module called each op. Copies of a model, and unpickled ones, have plain dicts instead."""

    def __reduce__(self) -> tuple[Any, ...]:
        return dict, (dict(self),)


class _Passed(Counts):
    """The counts of a module in one of two blocks, each of which also tells an `Advice` where the host is."""

    def __init__(self, calls: Mapping[str, int], advice: Advice, place: int, block: nn.Module):
        super().__init__(calls)
        self.advice, self.place, self.block = advice, place, weakref.ref(block)

    def __setitem__(self, op: str, count: int) -> None:
        super().__setitem__(op, count)
        block = self.block()
        if block is None or self.advice.passed(self.place, block):
            self.__class__ = Counts  # from now on it only counts


def advised(model: nn.Module, report: Report) -> Report:
    """The report of a model that was just optimised, which will have advice once its steps have shown some."""
    advice, counted = Advice(), dict(report.counted)
    for place, (name, block) in enumerate(late_blocks(model)):
        for fqn, module in block.named_modules(prefix=name):
            if fqn in counted:
                counted[fqn] = module.__dict__[CALLS] = _Passed(counted[fqn], advice, place, block)
    return replace(report, counted=counted, advice=advice)
