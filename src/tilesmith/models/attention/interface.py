"""Attention of transformers models, through the library's own interface for attention functions.

The function and its mask function are registered together under one name: without the mask function transformers would
pass no mask at all, and padding and windows would be lost without a word.
"""

from __future__ import annotations

import copy
import functools
import inspect
import sys
import types
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tilesmith import ops
from tilesmith.models.attention.chosen import NAME, ChosenForm, drop_lock, has_lock, lock_of, share_lock, take_back
from tilesmith.models.attention.continuous import batching
from tilesmith.models.attention.masks import KeyMask, causal_by_mask, key_mask
from tilesmith.models.attention.modules import computes_mask, passes_block_lists, uses_interface
from tilesmith.models.attention.selected_blocks import attend_selected, dense_selection
from tilesmith.models.reach import ran, reaches
from tilesmith.rewrite import Replace, Rule, Site, Skip, forms, original_class

_REPLACED = ("sdpa", "eager")
# What some attention modules of transformers tell their function beside the mask, and ours would not hear.
_UNSERVED = ("indices", "sinks")
_PREPARE = "prepare_inputs_for_generation"
OLDEST = "5.17"
"""The oldest transformers that is supported: the floor of the extra `hf` in pyproject.toml, as a test checks."""
_ALONE = "asked for attention weights, it runs the attention from before optimize"
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
class AttentionForm(ChosenForm):
    """A whole model whose configurations ask for our attention."""

    def namespace(self, base: type) -> dict[str, Any]:
        whole = base.forward
        register_attention()  # here, since a process that only unpickles a model comes this way too
        forward = self.weighing(whole, within=False)
        return {"forward": forward, **self._preparing(base), **batching(base, self._released)}

    def _released(self, module: nn.Module) -> Callable[[], None]:
        """Have the model's configurations ask for what they did before. The result makes them ask for ours again, if
        the model is still optimised then and nobody changed them meanwhile."""
        with lock_of(module).exclusive():
            ours = self.ours(module)
            take_back(ours)

        def restore() -> None:
            if any(isinstance(form, AttentionForm) for form in forms(module)):
                with lock_of(module).exclusive():
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
        from transformers import PreTrainedModel

        _own_configuration(module)
        module.set_attn_implementation(NAME)
        share_lock(module, PreTrainedModel)

    def leave(self, module: nn.Module) -> None:
        from transformers import PreTrainedModel

        drop_lock(module)
        for part in module.modules():  # those that were optimised by themselves before
            ours = any(isinstance(form, AttentionForm) for form in forms(part))
            if part is not module and ours and not has_lock(part):
                share_lock(part, PreTrainedModel)
        take_back(self.ours(module))


@dataclass(frozen=True)
class InnerForm(ChosenForm):
    """A model within one that has an `AttentionForm`. It may be compiled alone, or called alone by `generate` or
    another library."""

    def namespace(self, base: type) -> dict[str, Any]:
        register_attention()  # a process may unpickle this model alone
        return {"forward": self.weighing(base.forward, within=True)}

    def leave(self, module: nn.Module) -> None:
        super().leave(module)
        take_back(self.ours(module))  # nothing where the whole model is undone, which comes first


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
        ours = next((form for form in forms(outer) if isinstance(form, AttentionForm)), None)
        before = () if ours is None else ours.within(outer, module)
        if not before or not any(uses_interface(part) for part in module.modules()):
            return None
        packed = "position_ids" in inspect.signature(module.forward).parameters
        return Replace(InnerForm(before), (), _PACKED if packed else _ALONE, computes=False)

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
        explicit = next((site for site in sites if _eager_masks_alone_are_causal(site)), None)
        if explicit is not None:
            return Skip(
                f"{type(explicit.module).__name__} is causal by the masks that transformers makes for eager attention; "
                "load the model with attn_implementation='sdpa'"
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
        done = next((f for f in forms(model) if isinstance(f, AttentionForm)), None)
        if done is not None and not done.ours(model):
            told = f"its attention was set to {model.config._attn_implementation} after it was optimized"
            return Skip(f"{told}; undo, then optimize, bring ours back", wanted=False)
        form = done or AttentionForm(tuple(configured))
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


def _eager_masks_alone_are_causal(site: Site) -> bool:
    """Whether a module, given no mask, would attend to later keys, where eager attention is given a causal one."""
    config = getattr(site.module, "config", None)
    eager = getattr(config, "_attn_implementation", None) == "eager"
    return eager and causal_by_mask(config) and getattr(site.module, "is_causal", True) is False


def _only_eager(site: Site) -> bool:
    """Whether the transformers model nearest to a module promises no attention but the one with additive masks."""
    models = (holder for holder in site.holders() if hasattr(holder, "_supports_sdpa"))
    nearest = next(models, site.module)
    return not (nearest._supports_sdpa or nearest._supports_attention_backend)
