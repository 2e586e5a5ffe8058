"""Attention that a module computes in a method of its own: `_attn(query, key, value, attention_mask)`, as models wrote
it before transformers had an interface for attention functions. As there, what padding itself attends to may differ."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from tilesmith import ops
from tilesmith.models.reach import observed, ran, reaches
from tilesmith.rewrite import Form, Replace, Rule, Site, Skip, Unlike, given, original_class, probe

METHOD = "_attn"
_PARAMETERS = ["query", "key", "value", "attention_mask"]
_WEIGHTS = "_tilesmith_weights_asked"
_DEVIATION = {torch.float32: 1e-5, torch.bfloat16: 0.02}


class Attention(NamedTuple):
    """softmax(scale · Q · Kᵀ + mask) · V. `scale` is a number, or (attribute, whether it divides). visible: the buffer
    [1, 1, M, M] that says what each position may see, if there is one. dropout: the child that drops weights."""

    scale: float | tuple[str, bool]
    visible: str | None
    dropout: str | None


@dataclass(frozen=True)
class AttentionMethodForm(Form):
    """The method by the op; the forward as it was, which asks for weights now and then."""

    attention: Attention

    def namespace(self, base: type) -> dict[str, Any]:
        how, own, whole = self.attention, getattr(base, METHOD), base.forward
        names = list(inspect.signature(whole).parameters)[1:]
        place = names.index("output_attentions") if "output_attentions" in names else None

        @functools.wraps(whole)
        def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
            if not given("output_attentions", place, args, kwargs):
                return whole(self, *args, **kwargs)
            self.__dict__[_WEIGHTS] = True  # nobody but its own method has the weights
            try:
                return whole(self, *args, **kwargs)
            finally:
                del self.__dict__[_WEIGHTS]

        @functools.wraps(own)
        def attn(
            self: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None = None
        ) -> tuple[Tensor, Tensor | None]:
            alike = query.dtype is key.dtype is value.dtype and query.ndim == 4
            seen = how.dropout is not None and observed(self._modules[how.dropout])
            if seen or not alike or _WEIGHTS in self.__dict__ or not reaches("attention", query):
                return own(self, query, key, value, attention_mask)
            ran(self, "attention")
            return attended(self, query, key, value, attention_mask, how), None

        return {"forward": forward, METHOD: attn}


def attended(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, how: Attention
) -> Tensor:
    """What the method computes beside the weights. query: [B, H, T, D], key, value: [B, H, S, D]; mask is added."""
    dense, dropout_p = None, 0.0
    if how.visible is not None:
        tokens, keys = query.shape[2], key.shape[2]
        dense = module._buffers[how.visible][:, :, keys - tokens : keys, :keys].expand(query.shape[0], -1, -1, -1)
    if how.dropout is not None:
        dropout = module._modules[how.dropout]
        dropout_p = dropout.p if dropout.training else 0.0
    score = ops.Score(scale=_scale(module, how), bias=mask)
    return ops.attention(query, key, value, ops.Mask(dense=dense), score, dropout_p=dropout_p)[0]


def _scale(module: nn.Module, how: Attention) -> float:
    if not isinstance(how.scale, tuple):
        return how.scale
    name, divides = how.scale
    return 1.0 / getattr(module, name) if divides else getattr(module, name)


class AttentionMethodRule(Rule):
    """Modules with such a method, recognised by what it computes."""

    name = "attention"

    def __init__(self) -> None:
        self._verdicts = probe.Verdicts()

    def match(self, site: Site) -> Replace | Skip | None:
        method = getattr(original_class(type(site.module)), METHOD, None)
        if method is None or list(inspect.signature(method).parameters)[1:] != _PARAMETERS:
            return None
        try:
            found = self._verdicts.of(site.module, lambda: recognise(site.module), *_corners(site.module))
        except Unlike as verdict:
            return Skip(str(verdict))
        reason = f"{METHOD} computes softmax(scale · Q · Kᵀ + mask) · V; where weights are asked for it still does"
        return Replace(AttentionMethodForm(found), ("attention",), reason)


def recognise(module: nn.Module) -> Attention:
    """What the method computes on small inputs. Raises `Unlike`."""
    named = getattr(original_class(type(module)), METHOD).__code__.co_names
    dropouts = [name for name, child in module.named_children() if isinstance(child, nn.Dropout) and name in named]
    if len(dropouts) > 1:
        raise Unlike("its attention drops more than weights")
    masks = [name for name, b in module._buffers.items() if b is not None and b.dtype is torch.bool and b.ndim == 4]
    buffers = {name: None for name, b in module._buffers.items() if b is None}
    buffers |= {name: module._buffers[name][:, :, :8, :8].cpu() for name in masks}
    twin = probe.shell(module, children=dict.fromkeys(dropouts, nn.Identity()), buffers=buffers)
    known = [Attention(scale, mask, None) for scale in _scales(module) for mask in (None, *masks)]
    for tokens, keys, dtype in ((5, 5, torch.float32), (3, 7, torch.float32), (5, 5, torch.bfloat16)):
        q, k, v = (
            probe.wave(2, 3, n, 8, phase=phase).to(dtype) for n, phase in ((tokens, 0.1), (keys, 1.0), (keys, 2.0))
        )
        hidden = torch.zeros(2, 1, tokens, keys, dtype=dtype, device="cpu")
        hidden[1, :, 1:, 0] = torch.finfo(dtype).min  # no row hides all: what such a row attends to is left open
        for mask in (None, hidden):
            found = probe.call(getattr(twin, METHOD), q, k, v, mask)
            if not isinstance(found, tuple) or len(found) != 2:
                raise Unlike("its attention returns other than (values, weights)")
            known = [how for how in known if _agrees(twin, how, (q, k, v, mask), found[0])]
    if not known:
        raise Unlike("on small inputs its attention differs from softmax(scale · Q · Kᵀ + mask) · V")
    return known[0]._replace(dropout=dropouts[0] if dropouts else None)


def _agrees(twin: nn.Module, how: Attention, inputs: tuple, found: Any) -> bool:
    wanted = probe.call(attended, twin, *inputs, how)
    if not isinstance(found, Tensor) or found.shape != wanted.shape or found.dtype is not wanted.dtype:
        return False
    return bool((found - wanted).abs().max() <= _DEVIATION[found.dtype] * wanted.abs().max())


def _scales(module: nn.Module) -> Iterator[float | tuple[str, bool]]:
    yield 1.0
    for name, value in module.__dict__.items():
        if isinstance(value, float) and value > 0:
            yield name, True
            yield name, False


def _corners(module: nn.Module) -> tuple[tuple[bool, ...], ...]:
    """The corners of the masks that a module has in buffers, in which two of its class may differ."""
    masks = (b for b in module._buffers.values() if b is not None and b.dtype is torch.bool and b.ndim == 4)
    return tuple(tuple(mask[0, 0, :8, :8].flatten().tolist()) for mask in masks)
