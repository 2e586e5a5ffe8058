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
from torch import Tensor, nn

from tilesmith.engine import torch_private
from tilesmith.models.blocks import CACHE, BlockForm, foreign, repeated_blocks, watched
from tilesmith.rewrite import Replace, Rule, Site, given

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
        told = [f"Compiled blocks: {self.calls} calls, {self.graphs} graphs compiled in {self.seconds:.1f} s"]
        if not self.calls and not self.plain and not self.failed:
            told = ["Compiled blocks: none has run yet; the first call of each kind compiles it"]
        total = sum(self.breaks.values())
        if total:
            told.append(f"Graph breaks in compiled blocks: {total} ({'; '.join(self.breaks)})")
        told += [f"{cls} cannot be compiled and runs as before: {why}" for cls, why in self.failed.items()]
        told += [f"Blocks ran uncompiled {count} times: {why}" for why, count in self.plain.items()]
        return told

    def run(self, compiled: Callable[..., Any], plain: Callable[..., Any], block: nn.Module, *call: Any) -> Any:
        """A call of compiled code, or of `plain` where torch.compile cannot compile it."""
        import torch._dynamo.exc as problems

        cls = type(block).__name__
        if cls in self.failed:
            return plain(block, *call)
        start, before = time.perf_counter(), torch_private.compiled_graphs()
        self.calls += 1
        try:
            return compiled(block, *call)
        except problems.TorchDynamoException as problem:
            self.calls -= 1
            self.failed[cls] = _short(problem)
            warnings.warn(f"optimize(compile='between'): {cls} runs uncompiled: {self.failed[cls]}", stacklevel=2)
            return plain(block, *call)
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


class _NotServed(Exception):
    """A block asks a cache for more than to take keys and values."""


class _Kept:
    """Stands in for an empty cache within a compiled block: keeps the keys and values that the block hands it."""

    def __init__(self) -> None:
        self.keys: Tensor | None = None
        self.values: Tensor | None = None

    def update(self, keys: Tensor, values: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        self.keys, self.values = keys, values
        return keys, values

    def __getattr__(self, name: str) -> Any:
        raise _NotServed(name)


@dataclass(frozen=True)
class CompiledForm(BlockForm):
    """The same forward, compiled for all blocks of the class together."""

    state: ClassVar[tuple[str, ...]] = (_REGIONS,)

    def namespace(self, base: type) -> dict[str, Any]:
        plain = base.forward
        place = _place_of_cache(plain)

        def whole(block: nn.Module, args: tuple, kwargs: dict[str, Any]) -> Any:
            return plain(block, *args, **kwargs)

        def filling(block: nn.Module, args: tuple, kwargs: dict[str, Any]) -> Any:
            kept = _Kept()
            args, kwargs = _with_cache(kept, place, args, kwargs)
            return plain(block, *args, **kwargs), kept.keys, kept.values

        compiled, compiled_filling = _compiler(whole, base), _compiler(filling, base)

        @functools.wraps(plain)
        def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
            regions = self.__dict__.get(_REGIONS)
            if torch.compiler.is_compiling() or regions is None:
                return plain(self, *args, **kwargs)
            why = watched()
            cache = given(CACHE, place, args, kwargs)
            fills = False
            if not why and cache is not None:
                fills = _is_empty_for(cache, self)
                why = "" if fills else "given a cache that holds tokens, or is of fixed size"
            if not why:
                rest = _with_cache(None, place, args, kwargs) if fills else (args, kwargs)
                other = foreign(*rest)
                why = f"given a {other}" if other else ""
            if why:
                regions.plain[why] += 1
                return plain(self, *args, **kwargs)
            if not fills:
                return regions.run(compiled(BACKEND), whole, self, args, kwargs)
            try:
                out, keys, values = regions.run(compiled_filling(BACKEND), filling, self, *rest)
            except _NotServed as asked:
                regions.plain[f"the block asks its cache for {asked}"] += 1
                return plain(self, *args, **kwargs)
            if keys is not None:
                cache.update(keys, values, _layer_index(self))
            return out

        return {"forward": forward}

    def leave(self, module: nn.Module) -> None:
        module.__dict__.pop(_REGIONS, None)


class CompileRule(Rule):
    """The repeated blocks of a model."""

    name = "compile"
    own = True

    def __init__(self, model: nn.Module):
        self.regions = Regions()
        self._blocks = set(repeated_blocks(model))
        if not self._blocks:
            raise ValueError(
                "optimize: compile='between' compiles repeated blocks, and no two modules of one class stand in a "
                "ModuleList or Sequential of this model; use torch.compile(model)"
            )

    def match(self, site: Site) -> Replace | None:
        if site.fqn not in self._blocks:
            return None
        return Replace(CompiledForm(), (), "compiled once for all blocks of its class, the ops left to themselves")

    def attach(self, module: nn.Module) -> None:
        """Have a swapped block count in this rule's `regions`."""
        module.__dict__[_REGIONS] = self.regions


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


def _place_of_cache(forward: Callable[..., Any]) -> int | None:
    """At which place among the arguments after self `forward` takes a cache, None if by name only."""
    names = list(inspect.signature(forward).parameters)[1:]
    return names.index(CACHE) if CACHE in names else None


def _with_cache(cache: Any, place: int | None, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]]:
    """The arguments with another cache."""
    if place is not None and len(args) > place:
        return (*args[:place], cache, *args[place + 1 :]), kwargs
    return args, {**kwargs, CACHE: cache}


def _is_empty_for(cache: Any, block: nn.Module) -> bool:
    """Whether a cache is one of transformers that grows, and holds nothing for this block: it then hands keys and
    values back as it got them, and may get them after the block has run."""
    if type(cache).__name__ != "DynamicCache":
        return False
    index = _layer_index(block)
    return index is not None and cache.get_seq_length(index) == 0


def _layer_index(block: nn.Module) -> int | None:
    """The number under which the one attention of a block keeps its keys and values."""
    numbers = {m.layer_idx for m in block.modules() if isinstance(getattr(m, "layer_idx", None), int)}
    return numbers.pop() if len(numbers) == 1 else None
