"""Attention of transformers models, through the library's own interface for attention functions.

The function and its mask function are registered together under one name: without the mask function transformers would
pass no mask at all, and padding and windows would be lost without a word.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import inspect
import sys
import types
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tilesmith import ops
from tilesmith.models.attention.continuous import batching
from tilesmith.models.attention.masks import TOLD, KeyMask, key_mask
from tilesmith.models.attention.modules import computes_mask, passes_block_lists, uses_interface
from tilesmith.models.attention.selected_blocks import attend_selected, dense_selection
from tilesmith.models.attention.turns import Turns
from tilesmith.models.checkpoints import repeated_within
from tilesmith.models.reach import ran, reaches
from tilesmith.rewrite import Form, Replace, Rule, Site, Skip, forms, given, original_class

# Not a name with "flash" in it: transformers takes those for packages of FlashAttention.
NAME = "tilesmith"
_REPLACED = ("sdpa", "eager")
# What some attention modules of transformers tell their function beside the mask, and ours would not hear.
_UNSERVED = ("indices", "sinks")
_PREPARE = "prepare_inputs_for_generation"
_TURNS = "_tilesmith_turns"  # attribute of a model: its `Turns`
OLDEST = "5.17"
"""The oldest transformers that is supported: the floor of the extra `hf` in pyproject.toml, as a test checks."""
_PACKED = "under torch.compile, position_ids are taken to mean packed sequences; do not pass them otherwise"


def needs_transformers(what: str) -> str:
    """The message of the ImportError that `what` raises without it."""
    return f"{what} needs transformers {OLDEST} or later: pip install 'transformers>={OLDEST}'"


def register_attention() -> None:
    """Make attn_implementation="tilesmith" known to transformers; raises ImportError without it."""
    try:
        from transformers import AttentionInterface, AttentionMaskInterface
    except ImportError as problem:
        raise ImportError(needs_transformers("register_for_transformers")) from problem
    AttentionInterface.register(NAME, attention_forward)
    AttentionMaskInterface.register(NAME, key_mask)


def attention_forward(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | KeyMask | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    position_bias: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Attention as transformers calls it: query [B, H, T, D], key and value [B, G, S, D]; returns ([B, T, H, D], None).

    A KeyMask or a bool mask tells what may be attended, a floating mask is added. Without one the first T keys are
    attended causally (S > T is an empty static cache) unless there is one query, and a window is known not to reach
    beyond them. Batches and masks are broadcast as PyTorch's attention does. block_indices [B, G, T, n], blocks of keys
    that each query selected: see `selected_blocks`. Raises ValueError for keys selected by index and for sinks of each
    query, which it does not serve.
    """
    for name in _UNSERVED:
        if kwargs.get(name) is not None:
            raise ValueError(
                f"{type(module).__name__} gives its attention {name}, which {NAME!r} does not serve: "
                "choose attn_implementation='eager' for this model"
            )
    selection = kwargs.pop("block_indices", None)
    if selection is not None:
        found = attend_selected(module, query, key, value, attention_mask, selection, dropout, scaling)
        if found is not None:
            return found.transpose(1, 2).contiguous(), None
        attention_mask = dense_selection(module, query, key, attention_mask, selection, kwargs.get("position_ids"))
    if query.shape[0] != key.shape[0]:
        batch = max(query.shape[0], key.shape[0])
        query, key, value = (x.expand(batch, -1, -1, -1) for x in (query, key, value))
    shared = _shared_by_torch()
    if shared:
        _refuse_beside_torchs(module, attention_mask=attention_mask, softcap=softcap or None, s_aux=s_aux)
    if isinstance(attention_mask, KeyMask):
        other = tuple(attention_mask.shape[2:]) != (query.shape[2], key.shape[2])
        if other or not reaches("attention", query):
            attention_mask = attention_mask.tensor()
    if shared or kwargs.get("cache") is not None or not (reaches("attention", query) or softcap or s_aux is not None):
        # Keys of other ranks, pages of transformers' own, or no kernel of ours here while PyTorch has one.
        from transformers.integrations.sdpa_attention import sdpa_attention_forward

        more = {**kwargs, "position_bias": position_bias}
        return sdpa_attention_forward(module, query, key, value, attention_mask, dropout, scaling, is_causal, **more)
    tokens = query.shape[2]
    is_causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    causal = tokens > 1 and attention_mask is None and is_causal
    if causal and key.shape[2] > tokens:
        key, value = key[:, :, :tokens], value[:, :, :tokens]
        position_bias = None if position_bias is None else position_bias[..., :tokens]
    if not reaches("attention", query):
        options = {"dropout": dropout, "scaling": scaling, "softcap": softcap, "s_aux": s_aux}
        return _own_attention(module, query, key, value, attention_mask, causal, **options)
    behind = max(tokens - key.shape[2], 0) if causal else 0
    mask, bias, lengths = _mask_of(attention_mask, position_bias, causal, behind)
    score = ops.Score(scale=scaling, softcap=softcap or 0.0, bias=bias)
    ran(module, "attention")
    out, _ = ops.attention(query, key, value, mask, score, sinks=s_aux, dropout_p=dropout, kv_lengths=lengths)
    return out.transpose(1, 2).contiguous(), None


def _mask_of(
    attention_mask: Tensor | KeyMask | None, position_bias: Tensor | None, causal: bool, behind: int
) -> tuple[ops.Mask, Tensor | None, Tensor | None]:
    """What a model's mask is to the op: its mask, its bias, and how many keys each row of the batch has.

    behind: by how many the queries outnumber the keys. PyTorch's causality begins with the first key, ours ends with
    the last.
    """
    if isinstance(attention_mask, KeyMask):
        return attention_mask.mask(), position_bias, attention_mask.lengths
    if attention_mask is not None and attention_mask.dtype is not torch.bool:
        return ops.Mask(), attention_mask if position_bias is None else attention_mask + position_bias, None
    window = (-1, behind) if behind else None
    return ops.Mask(causal=causal and not behind, window=window, dense=attention_mask), position_bias, None


def _shared_by_torch() -> bool:
    """Whether torch's context_parallel is on: its stand-in for PyTorch's attention alone sees other ranks' keys."""
    function = F.scaled_dot_product_attention  # a builtin, unless somebody has replaced it
    return isinstance(function, types.FunctionType) and function.__module__.startswith("torch.distributed.")


def _refuse_beside_torchs(module: nn.Module, **given: Any) -> None:
    name = next((n for n, x in given.items() if x is not None), None)
    if name is not None:
        raise ValueError(
            f"{type(module).__name__} gives its attention {name}, which torch's context_parallel does not share among "
            "ranks: use tilesmith.shard_sequence, or leave masks out"
        )


def _own_attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, causal: bool, **options: Any
) -> tuple[Tensor, None]:
    """The eager attention of the module's own file, for soft caps and sinks where no kernel of ours is."""
    if causal:
        mask = torch.ones(query.shape[2], key.shape[2], dtype=torch.bool, device=query.device).tril()[None, None]
    if mask is not None and mask.dtype is torch.bool:
        mask = torch.zeros_like(mask, dtype=query.dtype).masked_fill(~mask, torch.finfo(query.dtype).min)
    eager = sys.modules[type(module).__module__].eager_attention_forward
    return eager(module, query, key, value, mask, **options)[0], None


@dataclass(frozen=True)
class AttentionForm(Form):
    """A model whose configurations ask for our attention; `before`: (module, what it asked for) of each of them."""

    before: tuple[tuple[str, str | None], ...]

    def namespace(self, base: type) -> dict[str, Any]:
        form, whole = self, base.forward
        register_attention()  # here, since a process that only unpickles a model comes this way too
        names = list(inspect.signature(whole).parameters)[1:]
        weights, positions = (names.index(n) if n in names else None for n in ("output_attentions", "position_ids"))

        @functools.wraps(whole)
        def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
            if given("output_attentions", weights, args, kwargs):
                entered = functools.partial(form.chosen, self)
                with entered(), repeated_within(self, entered):  # nobody else has the weights
                    return whole(self, *args, **kwargs)
            if torch.compiler.is_compiling():
                return _telling(whole, self, args, kwargs, positions)
            with _turns(self).shared():
                return whole(self, *args, **kwargs)

        return {"forward": forward, **form._preparing(base), **batching(base, form._released)}

    def _released(self, module: nn.Module) -> Callable[[], None]:
        """Give the model's configurations what they asked for before; the result makes them ask for ours again, if the
        model is still optimised then and they were given back so."""
        with _turns(module).alone():
            ours = self._ours(module)
            self._take_back(ours)

        def restore() -> None:
            if any(isinstance(form, AttentionForm) for form in forms(module)):
                with _turns(module).alone():
                    for config, implementation in ours:
                        if config._attn_implementation == implementation:
                            config._attn_implementation_internal = NAME

        return restore

    def _preparing(self, base: type) -> dict[str, Any]:
        """`generate` makes the masks of static caches before the forward, for the attention that is chosen then."""
        form, whole = self, getattr(base, _PREPARE, None)
        if whole is None:
            return {}

        @functools.wraps(whole)
        def prepare(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
            if not kwargs.get("output_attentions"):
                return whole(self, *args, **kwargs)
            with form.chosen(self):
                return whole(self, *args, **kwargs)

        return {_PREPARE: prepare}

    def enter(self, module: nn.Module) -> None:
        _own_configuration(module)
        module.set_attn_implementation(NAME)

    def leave(self, module: nn.Module) -> None:
        module.__dict__.pop(_TURNS, None)
        self._take_back(self._ours(module))

    @staticmethod
    def _take_back(ours: list[tuple[Any, str | None]]) -> None:
        for config, implementation in ours:
            config._attn_implementation_internal = implementation

    @contextlib.contextmanager
    def chosen(self, module: nn.Module) -> Iterator[None]:
        """Inside, the model's attention is what it was before, and no other thread runs the model."""
        with contextlib.nullcontext() if torch.compiler.is_compiling() else _turns(module).alone():
            ours = self._ours(module)
            try:
                self._take_back(ours)
                yield
            finally:
                for config, _ in ours:
                    config._attn_implementation_internal = NAME

    def _ours(self, module: nn.Module) -> list[tuple[Any, str | None]]:
        """The configurations that still ask for our attention, and what they asked for before."""
        there = dict(module.named_modules())  # some may be gone
        known = [(there[fqn].config, implementation) for fqn, implementation in self.before if fqn in there]
        return [(config, implementation) for config, implementation in known if config._attn_implementation == NAME]


def _turns(model: nn.Module) -> Turns:
    return model.__dict__.get(_TURNS) or model.__dict__.setdefault(_TURNS, Turns())


@dataclass(frozen=True)
class PositionsForm(Form):
    """A model inside of one that has an `AttentionForm`, which may be compiled, or called by another library, alone."""

    def namespace(self, base: type) -> dict[str, Any]:
        whole = base.forward
        names = list(inspect.signature(whole).parameters)[1:]
        positions = names.index("position_ids") if "position_ids" in names else None

        @functools.wraps(whole)
        def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
            if TOLD.known:  # by the model that calls this one
                return whole(self, *args, **kwargs)
            return _telling(whole, self, args, kwargs, positions)

        return {"forward": forward}


def _telling(whole: Callable, model: nn.Module, args: tuple, kwargs: dict[str, Any], positions: int | None) -> Any:
    """Run a model's forward, under torch.compile with `TOLD` saying which positions the caller gave."""
    if not torch.compiler.is_compiling():
        return whole(model, *args, **kwargs)
    TOLD.known, TOLD.positions = True, given("position_ids", positions, args, kwargs)
    out = whole(model, *args, **kwargs)
    TOLD.known, TOLD.positions = False, None
    return out


def _own_configuration(model: nn.Module) -> None:
    """Give the model copies of its configurations: two models made from one object would otherwise change together."""
    from transformers import PreTrainedConfig

    copies: dict[int, Any] = {}
    for module in model.modules():
        for name, value in module.__dict__.items():
            if isinstance(value, PreTrainedConfig):
                module.__dict__[name] = copy.deepcopy(value, copies)


class AttentionRule(Rule):
    """Whole transformers models, and a row for each of their attention modules."""

    name = "attention"
    part = "attention"

    def match(self, site: Site) -> Replace | Skip | None:
        module = site.module
        if isinstance(module, nn.MultiheadAttention):
            holder = next(site.holders(), None)
            if "attention" in getattr(type(holder), "_tilesmith_parts", ()):
                return Replace(None, ("attention",), "the layer that holds it computes it by the op")
            return Skip("torch's own module has fused paths of its own, and other code reads its weights", wanted=False)
        transformers = sys.modules.get("transformers")
        if transformers is None:
            return None
        if isinstance(module, transformers.PreTrainedModel):
            holders = [h for h in site.holders() if isinstance(h, transformers.PreTrainedModel)]
            return self._inner(module, holders[-1]) if holders else self._whole(module)
        if not uses_interface(module):
            return None
        config = getattr(module, "config", None)
        if getattr(config, "_attn_implementation", None) == NAME:
            return Replace(None, ("attention",), "called through transformers' attention interface")
        if not any(isinstance(holder, transformers.PreTrainedModel) for holder in site.holders()):
            return Skip("a configuration chooses its attention: optimize the whole model")
        told = f"the model's attention is {getattr(config, '_attn_implementation', None)}"
        return Skip(told, wanted=False, quiet=True)  # the row of the model says why

    def _inner(self, module: nn.Module, outer: nn.Module) -> Replace | None:
        ours = any(isinstance(form, AttentionForm) for form in forms(outer))
        if not ours or "position_ids" not in inspect.signature(module.forward).parameters:
            return None
        return Replace(PositionsForm(), (), _PACKED, computes=False)

    def _whole(self, model: nn.Module) -> Replace | Skip | None:
        configured = _configurations(model)
        sites = [Site(model, fqn, module) for fqn, module in model.named_modules() if uses_interface(module)]
        if not sites:
            return Skip("no module of it uses transformers' attention interface", wanted=False, quiet=True)
        if not model._can_set_attn_implementation():
            return Skip("transformers cannot set its attention implementation")
        eager = next((site for site in sites if _only_eager(site)), None)
        if eager is not None:
            return Skip(
                f"transformers offers {type(eager.module).__name__} no other than eager attention", wanted=False
            )
        classes = dict.fromkeys(original_class(type(site.module)) for site in sites)
        own = next((cls.__name__ for cls in classes if computes_mask(cls) and not passes_block_lists(cls)), None)
        if own is not None:
            return Skip(f"{own} edits its masks, in ways that depend on the name of the attention implementation")
        if getattr(model.config, "output_attentions", False):
            return Skip("its configuration asks for attention weights, which are never computed as a whole")
        chosen = {implementation for _, implementation in configured} - {*_REPLACED, NAME, None}
        if chosen:
            return Skip(f"its attention was set to {', '.join(sorted(chosen))}", wanted=False)
        form = next((f for f in forms(model) if isinstance(f, AttentionForm)), AttentionForm(tuple(configured)))
        told = f"attn_implementation was {form.before[0][1]}"
        if "position_ids" in inspect.signature(model.forward).parameters:
            told += f"; {_PACKED}"
        return Replace(form, ("attention",), told)


def _configurations(model: nn.Module) -> list[tuple[str, str | None]]:
    """Each configuration object of a model once: the first module that has it, and the implementation it asks for."""
    seen: dict[int, tuple[str, str | None]] = {}
    for fqn, module in model.named_modules():
        config = module.__dict__.get("config")
        if hasattr(config, "_attn_implementation"):
            seen.setdefault(id(config), (fqn, config._attn_implementation))
    return list(seen.values())


def _only_eager(site: Site) -> bool:
    """Whether the transformers model nearest to a module promises no attention but the one with additive masks."""
    models = (holder for holder in site.holders() if hasattr(holder, "_supports_sdpa"))
    nearest = next(models, site.module)
    return not (nearest._supports_sdpa or nearest._supports_attention_backend)
