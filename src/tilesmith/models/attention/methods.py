"""Attention that a module computes in a method of its own: `_attn(query, key, value, attention_mask)`, as models wrote
it before transformers had an interface for attention functions. As there, what padding itself attends to may differ."""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from tilesmith import ops
from tilesmith.models.reach import observed, ran, reaches
from tilesmith.rewrite import Form, Replace, Rule, Site, Skip, Unlike, given, original_class, probe

METHOD = "_attn"
_PARAMETERS = (
    ["query", "key", "value", "attention_mask"],
    ["q", "k", "v", "attention_mask", "output_attentions"],
)
_WEIGHTS = "_tilesmith_weights_asked"
_DEVIATION = {torch.float32: 1e-5, torch.bfloat16: 0.02}


class Attention(NamedTuple):
    """softmax(scale · Q · Kᵀ + mask) · V.

    scale: a number, (attribute, whether it divides), or "root" and "whole root" of the head dim, which divide. visible:
    the buffer [1, 1, M, M] that says what each position may see, if there is one; from_start: of its rows the first are
    taken, not those that end with the last key. dropout: the child that drops weights. turned: keys come as
    [B, H, D, S]. listed: the method returns a list, without weights that nobody asked for.
    """

    scale: float | str | tuple[str, bool]
    visible: str | None
    from_start: bool = False
    dropout: str | None = None
    turned: bool = False
    listed: bool = False


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
            # Nobody but its own method has the weights. One entry for each call: other threads may be inside, too.
            asked = self.__dict__.setdefault(_WEIGHTS, [])
            asked.append(None)
            try:
                return whole(self, *args, **kwargs)
            finally:
                asked.pop()

        parameters = list(inspect.signature(own).parameters)[1:]

        @functools.wraps(own)
        def attn(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
            bound = {**dict(zip(parameters, args)), **kwargs}
            query, key, value, mask, asked = (bound.get(name) for name in (*parameters, "output_attentions")[:5])
            alike = query.dtype is key.dtype is value.dtype and query.ndim == 4
            if how.visible is not None:
                alike = alike and self._buffers[how.visible].dtype in (torch.bool, query.dtype)
            seen = how.dropout is not None and observed(self._modules[how.dropout])
            if seen or not alike or asked or self.__dict__.get(_WEIGHTS) or not reaches("attention", query):
                return own(self, *args, **kwargs)
            ran(self, "attention")
            out = attended(self, query, key, value, mask, how)
            return [out] if how.listed else (out, None)

        return {"forward": forward, METHOD: attn}

    def leave(self, module: nn.Module) -> None:
        module.__dict__.pop(_WEIGHTS, None)


def attended(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, how: Attention
) -> Tensor:
    """What the method computes beside the weights. query: [B, H, T, D], key, value: [B, H, S, D]; mask is added."""
    dense, dropout_p = None, 0.0
    if how.turned:
        key = key.transpose(-1, -2)
    if how.visible is not None:
        tokens, keys = query.shape[2], key.shape[2]
        start = 0 if how.from_start else keys - tokens
        dense = module._buffers[how.visible][:, :, start : start + tokens, :keys].expand(query.shape[0], -1, -1, -1)
        dense = dense if dense.dtype is torch.bool else dense != 0
    if how.dropout is not None:
        dropout = module._modules[how.dropout]
        dropout_p = dropout.p if dropout.training else 0.0
    score = ops.Score(scale=_scale(module, how, query.shape[-1]), bias=mask)
    return ops.attention(query, key, value, ops.Mask(dense=dense), score, dropout_p=dropout_p)[0]


def _scale(module: nn.Module, how: Attention, head_dim: int) -> float:
    if isinstance(how.scale, str):
        return 1.0 / (math.sqrt(head_dim) if how.scale == "root" else math.isqrt(head_dim))
    if not isinstance(how.scale, tuple):
        return how.scale
    name, divides = how.scale
    return 1.0 / getattr(module, name) if divides else getattr(module, name)


class AttentionMethodRule(Rule):
    """Modules with such a method, recognised by what it computes."""

    name = "attention"
    part = "attention"

    def __init__(self) -> None:
        self._verdicts = probe.Verdicts()

    def match(self, site: Site) -> Replace | Skip | None:
        method = getattr(original_class(type(site.module)), METHOD, None)
        if method is None or list(inspect.signature(method).parameters)[1:] not in _PARAMETERS:
            return None
        try:
            # A method may scale by the number of its layer, in which layers count as alike otherwise.
            number = site.module.__dict__.get("layer_idx") if "layer_idx" in method.__code__.co_names else None
            found = self._verdicts.of(site.module, lambda: recognise(site.module), number, *_corners(site.module))
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
    buffers = {name: None for name, b in module._buffers.items() if b is None}
    buffers |= {name: mask[:, :, :8, :8].cpu() for name, mask in _masks(module).items()}
    twin = probe.shell(module, children=dict.fromkeys(dropouts, nn.Identity()), buffers=buffers)
    try:
        found = _computed(twin, turned=False)
    except Unlike as reason:
        try:
            found = _computed(twin, turned=True)
        except Unlike:
            raise reason from None
    return found._replace(dropout=dropouts[0] if dropouts else None)


def _computed(twin: nn.Module, turned: bool) -> Attention:
    """What the method of a shell computes of keys in this order. Raises `Unlike`."""
    rows = [(None, False), *((name, start) for name in _masks(twin) for start in (False, True))]
    known = [Attention(scale, *row, turned=turned) for scale in _scales(twin) for row in rows]
    for tokens, keys, dtype in ((5, 5, torch.float32), (3, 7, torch.float32), (5, 5, torch.bfloat16)):
        q, k, v = (
            probe.wave(2, 3, n, 8, phase=phase).to(dtype) for n, phase in ((tokens, 0.1), (keys, 1.0), (keys, 2.0))
        )
        k = k.transpose(-1, -2) if turned else k
        twin._buffers.update({name: b.to(dtype) for name, b in _masks(twin).items() if b.is_floating_point()})
        hidden = torch.zeros(2, 1, tokens, keys, dtype=dtype, device="cpu")
        hidden[1, :, 1:, 0] = torch.finfo(dtype).min  # no row hides all: what such a row attends to is left open
        for mask in (None, hidden):
            found = probe.call(getattr(twin, METHOD), q, k, v, mask)
            pair, alone = isinstance(found, tuple) and len(found) == 2, isinstance(found, list) and len(found) == 1
            if not (pair or alone):
                raise Unlike("its attention returns other than (values, weights)")
            known = [how for how in known if _agrees(twin, how, (q, k, v, mask), found[0])]
    if not known:
        raise Unlike("on small inputs its attention differs from softmax(scale · Q · Kᵀ + mask) · V")
    return known[0]._replace(listed=alone)


def _agrees(twin: nn.Module, how: Attention, inputs: tuple, found: Any) -> bool:
    wanted = probe.call(attended, twin, *inputs, how)
    if not isinstance(found, Tensor) or found.shape != wanted.shape or found.dtype is not wanted.dtype:
        return False
    return bool((found - wanted).abs().max() <= _DEVIATION[found.dtype] * wanted.abs().max())


def _scales(module: nn.Module) -> Iterator[float | str | tuple[str, bool]]:
    yield from (1.0, "root", "whole root")
    for name, value in module.__dict__.items():
        if isinstance(value, float) and value > 0:
            yield name, True
            yield name, False


def _masks(module: nn.Module) -> dict[str, Tensor]:
    """Buffers [1, 1, M, M] of True and False, or of 1 and 0."""
    found = {}
    for name, b in module._buffers.items():
        if b is None or b.ndim != 4 or b.is_meta:
            continue
        if b.dtype is torch.bool or (b.is_floating_point() and bool(((b == 0) | (b == 1)).all())):
            found[name] = b
    return found


def _corners(module: nn.Module) -> tuple[tuple[bool, ...], ...]:
    """The corners of the masks that a module has in buffers, in which two of its class may differ."""
    return tuple(tuple(mask[0, 0, :8, :8].flatten().tolist()) for mask in _masks(module).values())
