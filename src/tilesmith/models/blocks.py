"""The repeated blocks of a model, such as its decoder layers, and what their calls are given."""

from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn.attention.flex_attention import BlockMask

from tilesmith.engine import torch_private
from tilesmith.models.cache_argument import CACHE_NAMES, cache_name
from tilesmith.rewrite import Form, Replace, Rule, Site, forms, original_class, swap, unswap

_PLAIN = (type(None), bool, int, float, str, Tensor, BlockMask, torch.dtype, torch.device)


class Foreign(Exception):
    """An argument holds state of its own, such as a cache; the message is its class."""


class BlockForm(Form):
    """A form of a whole block. It wraps the block's forward as it is, so it is always the newest form of a block.

    state: names of attributes that a block with this form has.
    """

    state: ClassVar[tuple[str, ...]] = ()

    def leave(self, module: nn.Module) -> None:
        for name in self.state:
            module.__dict__.pop(name, None)


class BlockRule(Rule):
    """The repeated blocks of a model, each of which gets `form`.

    record: what the blocks have done, for the report; it is the first of the form's `state`. told: of each block.
    asked, instead: what the caller asked for, and what to use where no block repeats, which raises ValueError.
    """

    own = True
    form: ClassVar[type[BlockForm]]
    told: ClassVar[str]
    asked: ClassVar[str]
    instead: ClassVar[str]

    def __init__(self, model: nn.Module, record: Any):
        self.record = record
        self._blocks = set(repeated_blocks(model))
        if not self._blocks:
            raise ValueError(
                f"optimize: {self.asked} repeated blocks, and no two modules of one class stand in a ModuleList or "
                f"Sequential of this model; use {self.instead}"
            )

    def match(self, site: Site) -> Replace | None:
        return Replace(self.form(), (), self.told) if site.fqn in self._blocks else None

    def attach(self, module: nn.Module) -> None:
        """Have a swapped block tell this rule's `record`."""
        module.__dict__[self.form.state[0]] = self.record


def repeated_blocks(model: nn.Module) -> dict[str, nn.Module]:
    """The outermost modules that stand in an `nn.ModuleList` or `nn.Sequential` beside another one of their class, by
    name. Modules without children of their own are not blocks."""
    found: dict[str, nn.Module] = {}
    for fqn, module in model.named_modules():
        if not isinstance(module, nn.ModuleList | nn.Sequential) or _inside(fqn, found):
            continue
        made_of_parts = {n: child for n, child in module.named_children() if next(child.children(), None) is not None}
        counts = Counter(original_class(type(child)) for child in made_of_parts.values())
        prefix = f"{fqn}." if fqn else ""
        found |= {prefix + n: c for n, c in made_of_parts.items() if counts[original_class(type(c))] > 1}
    return found


def _inside(fqn: str, blocks: Iterable[str]) -> bool:
    return any(fqn == name or fqn.startswith(f"{name}.") for name in blocks)


def detach_block_forms(model: nn.Module) -> list[tuple[nn.Module, Form, dict[str, Any]]]:
    """Take the forms of whole blocks off, as rules look at what is below them. Returns what `restore_block_forms`
    needs."""
    taken = []
    for module in model.modules():
        while (held := forms(module)) and isinstance(held[0], BlockForm):
            state = {name: module.__dict__[name] for name in held[0].state if name in module.__dict__}
            if not unswap(module):
                break  # another library's class is on top
            taken.append((module, held[0], state))
    return taken


def restore_block_forms(taken: list[tuple[nn.Module, Form, dict[str, Any]]]) -> None:
    """Give the modules their forms back that `detach_block_forms` took."""
    for module, form, state in reversed(taken):
        swap(module, form)
        module.__dict__.update(state)


def stateful_argument(args: Iterable[Any], kwargs: dict[str, Any]) -> str:
    """The class of an argument that holds state of its own, such as a cache; "" if there is none."""
    for value in (*args, *kwargs.values()):
        if isinstance(value, _PLAIN):
            continue
        if isinstance(value, tuple | list):
            inner = stateful_argument(value, {})
        elif isinstance(value, dict):
            inner = stateful_argument((), value)
        else:
            return type(value).__name__
        if inner:
            return inner
    return ""


def checkpoints(module: nn.Module) -> bool:
    """Whether a module is one of transformers that repeats its forward in the backward."""
    return bool(getattr(module, "gradient_checkpointing", False)) and module.training


def observer() -> str:
    """What sees each operation of this call, or transforms it, so that it has to run as it is; "" if nothing does."""
    if torch_private.dispatch_modes():
        return "a dispatch mode is on (fake tensors, a policy of selective checkpointing)"
    if torch_private.functorch() is not None:
        return "a transform of torch.func is at work"
    return ""


class NotServed(Exception):
    """A block asks its cache for more than to take keys and values."""


class RecordingCache:
    """Stands in for an empty cache within a block: keeps the keys and values that the block hands it."""

    def __init__(self) -> None:
        self.keys: Tensor | None = None
        self.values: Tensor | None = None

    def update(self, keys: Tensor, values: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        self.keys, self.values = keys, values
        return keys, values

    def __getattr__(self, name: str) -> Any:
        raise NotServed(name)


Call = Callable[[nn.Module, tuple, dict[str, Any]], Any]


class Forwards:
    """The two ways to run a block by its class's `forward`, as functions of (block, arguments, named arguments).

    whole: as it is. prefill: with an empty cache; returns the result, the keys and the values.
    """

    def __init__(self, forward: Callable[..., Any]):
        names = list(inspect.signature(forward).parameters)[1:]
        argument = cache_name(names)
        place = None if argument is None else names.index(argument)

        def whole(block: nn.Module, args: tuple, kwargs: dict[str, Any]) -> Any:
            return forward(block, *args, **kwargs)

        def prefill(block: nn.Module, args: tuple, kwargs: dict[str, Any]) -> Any:
            kept = RecordingCache()
            args, kwargs = _with_cache(kept, argument, place, args, kwargs)
            return forward(block, *args, **kwargs), kept.keys, kept.values

        self.forward, self.whole, self.prefill = forward, whole, prefill
        self._argument, self._place = argument, place

    def run(
        self,
        block: nn.Module,
        args: tuple,
        kwargs: dict[str, Any],
        whole: Call,
        prefill: Call,
        refuse: Callable[[str], None],
    ) -> Any:
        """The block's result by what stands for `whole` or `prefill`. An empty cache gets its keys and values behind
        the block; with any other cache, told to `refuse`, the block runs as it is."""
        cache = _cache(self._place, args, kwargs)
        if cache is None:
            return whole(block, args, kwargs)
        if not _is_empty_for(cache, block):
            refuse("given a cache other than an empty DynamicCache")
            return self.forward(block, *args, **kwargs)
        try:
            out, keys, values = prefill(block, *_with_cache(None, self._argument, self._place, args, kwargs))
        except NotServed as asked:
            refuse(f"it asks its cache for {asked}")
            return self.forward(block, *args, **kwargs)
        if keys is not None:
            cache.update(keys, values, _layer_index(block))
        return out


def _cache(place: int | None, args: tuple, kwargs: dict[str, Any]) -> Any:
    """The cache that a block is given, by whichever name, or None."""
    if place is not None and len(args) > place:
        return args[place]
    name = cache_name(kwargs)
    return None if name is None else kwargs[name]


def _with_cache(
    cache: Any, argument: str | None, place: int | None, args: tuple, kwargs: dict[str, Any]
) -> tuple[tuple, dict[str, Any]]:
    """The arguments with another cache."""
    if place is not None and len(args) > place:
        return (*args[:place], cache, *args[place + 1 :]), kwargs
    others = {name: value for name, value in kwargs.items() if name not in CACHE_NAMES}
    return args, {**others, argument or cache_name(kwargs) or "past_key_values": cache}


def _is_empty_for(cache: Any, block: nn.Module) -> bool:
    """Whether a cache is one of transformers that grows, and holds nothing for this block: it then hands keys and
    values back as it got them, and may get them after the block has run."""
    if isinstance(cache, RecordingCache):
        return True
    if type(cache).__name__ != "DynamicCache":
        return False
    index = _layer_index(block)
    return index is not None and _is_empty(cache, index)


def _is_empty(cache: Any, index: int) -> bool:
    """Whether a layer of a DynamicCache takes keys and values, and holds none. One that keeps states alone, of Mamba or
    a convolution, counts no tokens: the cache answers with another layer's number, or raises ValueError."""
    from transformers.cache_utils import CacheLayerMixin

    if index >= len(cache.layers):
        return True  # it is made when it is needed
    return isinstance(cache.layers[index], CacheLayerMixin) and cache.get_seq_length(index) == 0


def _layer_index(block: nn.Module) -> int | None:
    """The number under which the one attention of a block keeps its keys and values."""
    numbers = {m.layer_idx for m in block.modules() if isinstance(getattr(m, "layer_idx", None), int)}
    return numbers.pop() if len(numbers) == 1 else None
