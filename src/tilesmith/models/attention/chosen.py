"""Which attention the configurations of a transformers model ask for: ours, or the one of before `optimize` while a
forward must return attention weights or transformers accepts no other."""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from tilesmith.models.attention.lock import ReaderWriterLock
from tilesmith.models.attention.mask_values import MaskValues
from tilesmith.models.attention.masks import TOLD
from tilesmith.models.checkpoints import repeated_within
from tilesmith.models.first_step import foreseen
from tilesmith.rewrite import Form, given

# Not a name with "flash" in it: transformers takes those for packages of FlashAttention.
NAME = "tilesmith"
_LOCK = "_tilesmith_lock"  # attribute of a model and of those within it


@dataclass(frozen=True)
class ChosenForm(Form):
    """A model whose configurations ask for our attention; `before`: (module, what it asked for) of each of them."""

    before: tuple[tuple[str, str | None], ...] = ()

    def weighing(self, whole: Callable, within: bool) -> Callable:
        """A forward that runs the previous attention where weights are asked for, since ours has none. within: another
        model may call this one."""
        form, names = self, list(inspect.signature(whole).parameters)[1:]
        weights, positions = (names.index(n) if n in names else None for n in ("output_attentions", "position_ids"))

        @functools.wraps(whole)
        def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
            if given("output_attentions", weights, args, kwargs):
                entered = functools.partial(form.chosen, self)
                with entered(), repeated_within(self, entered):
                    return whole(self, *args, **kwargs)
            if torch.compiler.is_compiling():
                return _telling(whole, self, args, kwargs, positions, within)
            known = functools.partial(_known_masks, names, args, kwargs)
            with lock_of(self).shared(), foreseen(whole, self, args, kwargs, known):
                return whole(self, *args, **kwargs)

        return forward

    def leave(self, module: nn.Module) -> None:
        module.__dict__.pop(_LOCK, None)

    @contextlib.contextmanager
    def chosen(self, module: nn.Module) -> Iterator[None]:
        """Inside, the model's attention is what it was before, and no other thread runs the model."""
        with contextlib.nullcontext() if torch.compiler.is_compiling() else lock_of(module).exclusive():
            ours = self.ours(module)
            try:
                take_back(ours)
                yield
            finally:
                for config, _ in ours:
                    config._attn_implementation_internal = NAME

    def ours(self, module: nn.Module) -> list[tuple[Any, str | None]]:
        """The configurations that still ask for our attention, and what they asked for before."""
        there = dict(module.named_modules())  # some may be gone
        known = [(there[fqn].config, implementation) for fqn, implementation in self.before if fqn in there]
        return [(config, implementation) for config, implementation in known if config._attn_implementation == NAME]

    def within(self, model: nn.Module, part: nn.Module) -> tuple[tuple[str, str | None], ...]:
        """`before` of a part of the model."""
        there = dict(model.named_modules())
        asked = {id(there[fqn].config): implementation for fqn, implementation in self.before if fqn in there}
        found: dict[int, tuple[str, str | None]] = {}
        for fqn, module in part.named_modules():
            config = id(module.__dict__.get("config"))
            if config in asked:
                found.setdefault(config, (fqn, asked[config]))
        return tuple(found.values())


def _known_masks(names: list[str], args: tuple, kwargs: dict[str, Any]) -> contextlib.AbstractContextManager[None]:
    """A context in which masks of fake tensors come out as in the call itself, where values can be read: transformers
    takes all positions of fake tensors for those of packed sequences, and reads no mask of them. Raises Foreign."""
    decodes = any(name.startswith("decoder_") for name in names)
    return MaskValues.of(dict(zip(names, args)) | kwargs, decodes).known()


def _telling(
    whole: Callable, model: nn.Module, args: tuple, kwargs: dict[str, Any], positions: int | None, within: bool
) -> Any:
    """Run a model's forward under torch.compile, with `TOLD` saying which positions the caller gave, unless the model
    that calls this one, `within` which it is, has said so."""
    if within and TOLD.known:
        return whole(model, *args, **kwargs)
    TOLD.known, TOLD.positions = True, given("position_ids", positions, args, kwargs)
    out = whole(model, *args, **kwargs)
    TOLD.known, TOLD.positions = False, None
    return out


def take_back(ours: list[tuple[Any, str | None]]) -> None:
    """Have configurations ask for what they did before."""
    for config, implementation in ours:
        config._attn_implementation_internal = implementation


def lock_of(model: nn.Module) -> ReaderWriterLock:
    """The lock of a model."""
    return model.__dict__.get(_LOCK) or model.__dict__.setdefault(_LOCK, ReaderWriterLock())


def has_lock(model: nn.Module) -> bool:
    """Whether a model has its lock already."""
    return _LOCK in model.__dict__


def share_lock(model: nn.Module, kind: type) -> None:
    """Give a model and the models of a kind within it one lock: they have configurations in common."""
    shared = ReaderWriterLock()
    for module in model.modules():
        if module is model or isinstance(module, kind):
            module.__dict__[_LOCK] = shared


def drop_lock(model: nn.Module) -> None:
    """Take back `share_lock`."""
    for module in model.modules():
        module.__dict__.pop(_LOCK, None)
