"""What `optimize` reports without replacing it: forwards that call PyTorch's functions where the library has an op, and
quantised layers, each with what to do."""

from __future__ import annotations

import inspect
import types
from collections.abc import Iterator

from torch import nn

from tilesmith.engine.arguments import dtype_name
from tilesmith.models.attention.inline import InlineAttentionForm
from tilesmith.models.attention.methods import AttentionMethodForm
from tilesmith.models.attention.modules import uses_interface
from tilesmith.models.attention.selected_blocks import SelectionForm
from tilesmith.models.layers.gated_norms import GatedNormForm
from tilesmith.models.layers.losses import LabelledForm
from tilesmith.models.layers.norms import norm_of
from tilesmith.rewrite import Replace, Rule, Site, Skip, forms, original_class

_ADVICE = {
    "scaled_dot_product_attention": "on a GPU ops.attention serves it after "
    "tilesmith.register_for_sdpa() and torch.nn.attention.activate_flash_attention_impl('tilesmith')",
    "flash_attn_func": "ops.attention takes its place, with [batch, heads, tokens, head dim]",
    "cross_entropy": "ops.linear_cross_entropy(hidden, head.weight, labels) needs no logits",
    "rms_norm": "an nn.RMSNorm would be replaced, or call ops.rms_norm",
    "layer_norm": "an nn.LayerNorm would be replaced, or call ops.layer_norm",
}
# What a module with such a form does not compute by these functions any more, or does so on purpose.
_SERVED = (
    ((InlineAttentionForm, AttentionMethodForm, SelectionForm), ("scaled_dot_product_attention", "flash_attn_func")),
    ((LabelledForm,), ("cross_entropy",)),
    ((GatedNormForm,), ("rms_norm", "layer_norm")),
)


class FunctionalRule(Rule):
    """Modules of the user's own whose forward calls such a function itself. Their class has no child to swap, and a
    function that many modules call is not replaced for one model."""

    name = "functional"
    spans = False

    def match(self, site: Site) -> Replace | Skip | None:
        packed = _packed(site.module)
        if packed:
            return Skip(f"its weights are kept in {packed}: who made them so computes its product", wanted=False)
        cls = original_class(type(site.module))
        if cls.__module__.partition(".")[0] == "torch" or norm_of(site.module) is not None:
            return None
        if uses_interface(site.module):
            return None
        called = _names(cls) - _served(site.module)
        # Its own children and methods may have such a name, too (T5's layer_norm).
        called = {name for name in called if name not in site.module._modules and not hasattr(cls, name)}
        found = [f"it calls {name} itself: {advice}" for name, advice in _ADVICE.items() if name in called]
        return Skip("; ".join(found), wanted=False) if found else None


def _served(module: nn.Module) -> set[str]:
    """Functions whose part in the forward of `module` the library has taken over."""
    return {name for form in forms(module) for kinds, names in _SERVED if isinstance(form, kinds) for name in names}


def _packed(module: nn.Module) -> str:
    """What the weights of a quantised layer are kept in, "" for others."""
    weight = module._parameters.get("weight")
    if weight is None or weight.dtype.is_floating_point or weight.dtype.is_complex:
        return ""
    kind = getattr(weight, "quant_type", "")  # of bitsandbytes: nf4 or fp4
    return f"{kind}, packed in {dtype_name(weight.dtype)}" if kind else dtype_name(weight.dtype)


def _names(cls: type) -> set[str]:
    """Names that the forward of a class uses, and the methods that it calls, and so on."""
    names: set[str] = set()
    todo, seen = ["forward"], {"forward"}
    while todo:
        method = inspect.unwrap(getattr(cls, todo.pop(), None) or nn.Identity.forward)
        if not isinstance(method, types.FunctionType) or (method.__module__ or "").startswith("torch."):
            continue
        for name in _names_in(method.__code__):
            names.add(name)
            if name not in seen:
                seen.add(name)
                todo.append(name)
    return names


def _names_in(code: types.CodeType) -> Iterator[str]:
    yield from code.co_names
    for inner in code.co_consts:
        if isinstance(inner, types.CodeType):
            yield from _names_in(inner)
