"""`optimize(model, compile="between")`: each kind of repeated block compiled once by torch.compile, the ops left to
themselves.

A block, such as a decoder layer, is compiled as a function of the block, so that all blocks of a class share its code:
torch calls this regional compilation. What stands between the ops (sums, scales, masks, routers) becomes few kernels.
"""

from __future__ import annotations

import functools
import inspect
import time
import types
import warnings
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import nn

from tilesmith.engine import torch_private
from tilesmith.models.blocks import BlockForm, BlockRule, Call, Forwards, observer, stateful_argument
from tilesmith.models.reach import all_observed
from tilesmith.rewrite.report import counted

BACKEND = "inductor"
_LIMIT = 32  # variants of a block's code: with and without gradients, autocast, masks, each at fixed and free lengths
_REGIONS = "_tilesmith_regions"


class Regions:
    """What the compiled blocks of one model have done, for its report.

    graphs, seconds: compiled graphs, and the time of the calls that compiled them. calls: of compiled code. breaks:
    why a graph was broken -> how often. plain: why a block ran uncompiled -> how often. failed: class -> why its
    blocks cannot be compiled.
    """

    def __init__(self) -> None:
        self.graphs, self.seconds, self.calls = 0, 0.0, 0
        self.breaks: Counter[str] = Counter()
        self.plain: Counter[str] = Counter()
        self.failed: dict[str, str] = {}

    def told(self) -> list[str]:
        """Sentences for the report."""
        graphs = counted(self.graphs, "graph")
        told = [f"Compiled blocks: {counted(self.calls, 'call')}, {graphs} compiled in {self.seconds:.1f} s"]
        if not self.calls and not self.plain and not self.failed:
            told = ["Compiled blocks: none has run yet; the first call of each kind compiles it"]
        total = sum(self.breaks.values())
        if total:
            told.append(f"Graph breaks in compiled blocks: {total} ({'; '.join(self.breaks)})")
        told += [f"{cls} cannot be compiled and runs as before: {why}" for cls, why in self.failed.items()]
        told += [f"Blocks ran uncompiled {counted(count, 'time')}: {why}" for why, count in self.plain.items()]
        return told

    def refuse(self, why: str) -> None:
        """Count a block that runs uncompiled."""
        self.plain[why] += 1

    def run(
        self,
        compiled: Callable[[str], Call],
        plain: Call,
        block: nn.Module,
        args: tuple,
        kwargs: dict[str, Any],
    ) -> Any:
        """A call of compiled code, or of `plain` where torch.compile cannot compile it."""
        import torch._dynamo.exc as problems

        cls, other = type(block).__name__, stateful_argument(args, kwargs)
        if other:
            self.refuse(f"given a {other}")
        if other or cls in self.failed:
            return plain(block, args, kwargs)
        start, before = time.perf_counter(), torch_private.compiled_graphs()
        self.calls += 1
        try:
            # A recorded backward is kept, and may be replayed twice; blocks of one class may have different hooks.
            with torch_private.activations_kept(), torch_private.hooks_guarded():
                return compiled(BACKEND)(block, args, kwargs)
        except problems.TorchDynamoException as problem:
            self.calls -= 1
            self.failed[cls] = _short(problem)
            warnings.warn(f"optimize(compile='between'): {cls} runs uncompiled: {self.failed[cls]}", stacklevel=2)
            return plain(block, args, kwargs)
        finally:  # checkpointing stops a block that it repeats by an exception
            self._note(before, time.perf_counter() - start)

    def _note(self, before: tuple[int, dict[str, int]], seconds: float) -> None:
        graphs, breaks = torch_private.compiled_graphs()
        if graphs == before[0] and breaks == before[1]:
            return
        self.graphs, self.seconds = self.graphs + graphs - before[0], self.seconds + seconds
        for why, count in breaks.items():
            self.breaks[_short(why)] += count - before[1].get(why, 0)
        self.breaks = +self.breaks


def _short(problem: Any) -> str:
    """The first lines of a message in one."""
    lines = [line.strip() for line in str(problem).splitlines() if line.strip()]
    return " ".join(lines[:2])[:200] if lines else type(problem).__name__


@dataclass(frozen=True)
class CompiledForm(BlockForm):
    """The same forward, compiled for all blocks of the class together."""

    state: ClassVar[tuple[str, ...]] = (_REGIONS,)

    def namespace(self, base: type) -> dict[str, Any]:
        way = Forwards(base.forward)
        compiled_whole, compiled_prefill = _compiler(way.whole, base), _compiler(way.prefill, base)

        @functools.wraps(way.forward)
        def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
            regions = self.__dict__.get(_REGIONS)
            if torch.compiler.is_compiling() or regions is None:
                return way.forward(self, *args, **kwargs)
            why = all_observed() or observer()
            if why:
                regions.refuse(why)
                return way.forward(self, *args, **kwargs)
            whole = functools.partial(regions.run, compiled_whole, way.whole)
            prefill = functools.partial(regions.run, compiled_prefill, way.prefill)
            return way.run(self, args, kwargs, whole, prefill, regions.refuse)

        return {"forward": forward}


class CompileRule(BlockRule):
    """Blocks compiled by class."""

    name = "compile"
    form = CompiledForm
    told = "compiled once for all blocks of its class, the ops left to themselves"
    asked, instead = "compile='between' compiles", "torch.compile(model)"

    def __init__(self, model: nn.Module):
        super().__init__(model, Regions())


def _compiler(fn: types.FunctionType, base: type) -> Callable[[str], Callable[..., Any]]:
    """What makes and keeps torch.compile's version of `fn`; not made before it is needed, since Dynamo costs a second
    to import. The function gets a code object of its own: Dynamo keeps compiled code, and counts it, by code object."""
    code = fn.__code__.replace(co_name=f"{base.__name__}_{fn.__name__}")
    own = types.FunctionType(code, fn.__globals__, code.co_name, None, fn.__closure__)

    @functools.cache
    def compiled(backend: str) -> Callable[..., Any]:
        more = {"recompile_limit": _LIMIT} if "recompile_limit" in inspect.signature(torch.compile).parameters else {}
        return torch.compile(own, backend=backend, **more)

    return compiled
