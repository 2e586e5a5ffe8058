"""torch's TransformerEncoderLayer and TransformerDecoderLayer: their blocks through the ops, as far as it is asked for.

Both are a row of blocks (self-attention, attention to a memory, feed-forward), each with a dropout, a sum with what
went in, and a LayerNorm before the block or after the sum.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tilesmith import ops
from tilesmith.engine.argument_checks import FLOATS
from tilesmith.engine.torch_private import constant_in_graphs
from tilesmith.models.layers.norms import epsilon, norm_of, servable
from tilesmith.models.layers.residuals import add_norm
from tilesmith.models.reach import observed, ran, reaches
from tilesmith.rewrite import Form, Replace, Rule, Site, Skip, given, original_class

PARTS = ("attention", "feed_forward", "dropout")


class Block(NamedTuple):
    """One block by the names of the layer's children: what computes it, its norm, its dropout."""

    kind: str
    module: str
    norm: str
    dropout: str


_ENCODER = (Block("self", "self_attn", "norm1", "dropout1"), Block("feed_forward", "", "norm2", "dropout2"))
_DECODER = (
    Block("self", "self_attn", "norm1", "dropout1"),
    Block("memory", "multihead_attn", "norm2", "dropout2"),
    Block("feed_forward", "", "norm3", "dropout3"),
)
_BLOCKS: dict[type, tuple[Block, ...]] = {
    nn.TransformerEncoderLayer: _ENCODER,
    nn.TransformerDecoderLayer: _DECODER,
}
# The arguments of the two forwards after their tensors: (attention mask, key padding, causal) of each attention.
_MASKS = {
    "self": {"encoder": ("src_mask", "src_key_padding_mask", "is_causal"),
             "decoder": ("tgt_mask", "tgt_key_padding_mask", "tgt_is_causal")},
    "memory": {"decoder": ("memory_mask", "memory_key_padding_mask", "memory_is_causal")},
}  # fmt: skip
_PLACES = {
    "encoder": ("src", "src_mask", "src_key_padding_mask", "is_causal"),
    "decoder": ("tgt", "memory", "tgt_mask", "memory_mask", "tgt_key_padding_mask", "memory_key_padding_mask",
                "tgt_is_causal", "memory_is_causal"),
}  # fmt: skip


@dataclass(frozen=True)
class LayerForm(Form):
    """The layer by blocks. parts: what of them goes through the ops; activation: the feed-forward's, by the op's name.

    "attention": projections as before, attention by the op. "feed_forward": bias and activation in the first product.
    "dropout": the dropout of a block in one op with the sum and the norm; it draws other random numbers than PyTorch's.
    """

    which: str
    blocks: tuple[Block, ...]
    parts: tuple[str, ...]
    activation: str

    def namespace(self, base: type) -> dict[str, Any]:
        which, blocks, parts, activation = self.which, self.blocks, self.parts, self.activation
        names = _PLACES[which]
        used = _used(blocks, parts)

        def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Tensor:
            call = {name: given(name, place, args, kwargs) for place, name in enumerate(names)}
            x = call[names[0]]
            if len(args) > len(names) or not _served(self, x, call, used, parts):
                return base.forward(self, *args, **kwargs)
            return _run(self, x, call, _Plan(which, blocks, parts, activation))

        return {"forward": forward, "_tilesmith_parts": parts}


class _Plan(NamedTuple):
    which: str
    blocks: tuple[Block, ...]
    parts: tuple[str, ...]
    activation: str


def ops_of(parts: Collection[str]) -> tuple[str, ...]:
    """The ops that serve these parts of a layer."""
    ops_by_part = {"attention": ("attention",), "feed_forward": ("linear_act",), "dropout": ("dropout_add_norm",)}
    return tuple(op for part in PARTS if part in parts for op in ops_by_part[part])


def _used(blocks: tuple[Block, ...], parts: tuple[str, ...]) -> tuple[str, ...]:
    """The children whose own forward is passed over."""
    names = [block.module for block in blocks if block.module and "attention" in parts]
    names += [f"{name}.out_proj" for name in names]
    names += ["linear1"] if "feed_forward" in parts else []
    return (*names, *(block.dropout for block in blocks if "dropout" in parts))


def _served(layer: nn.Module, x: Any, call: dict[str, Any], used: tuple[str, ...], parts: tuple[str, ...]) -> bool:
    if type(x) not in (Tensor, nn.Parameter) or x.ndim != 3 or x.is_nested or x.dtype not in FLOATS or not x.numel():
        return False
    memory = call.get("memory")
    if "memory" in call and (type(memory) not in (Tensor, nn.Parameter) or memory.ndim != 3 or not memory.numel()):
        return False
    if not all(reaches(op, x) for op in ops_of(parts) if op != "dropout_add_norm" or layer.training):
        return False
    if any(observed(layer.get_submodule(name)) for name in used):
        return False
    if "feed_forward" in parts and not _is_linear(type(layer.linear1)):  # an adapter has come since
        return False
    if "attention" in parts and not all(_is_attention(type(getattr(layer, n))) for n in used if n.endswith("attn")):
        return False
    # The hint stands in for a mask only where as many queries as keys make both libraries' causality one.
    return not call.get("memory_is_causal") or memory.shape == x.shape


def _run(layer: nn.Module, x: Tensor, call: dict[str, Any], plan: _Plan) -> Tensor:
    blocks = plan.blocks
    if layer.norm_first:
        h = getattr(layer, blocks[0].norm)(x)
        for block, after in zip(blocks, (*blocks[1:], None)):
            y = _block(layer, block, h, call, plan)
            if after is None:
                return x + getattr(layer, block.dropout)(y)
            h, x = _added(layer, block, getattr(layer, after.norm), y, x, plan)
    for block in blocks:
        x, _ = _added(layer, block, getattr(layer, block.norm), _block(layer, block, x, call, plan), x, plan)
    return x


def _added(layer: nn.Module, block: Block, norm: nn.Module, y: Tensor, x: Tensor, plan: _Plan) -> tuple[Tensor, Tensor]:
    """(norm(x + dropout(y)), x + dropout(y))."""
    dropout, known = getattr(layer, block.dropout), norm_of(norm)
    alike = x.dtype is y.dtype and known is not None and not observed(norm) and servable(norm, x, known, added=True)
    if "dropout" in plan.parts and layer.training and dropout.training and dropout.p > 0 and alike:
        ran(layer, "dropout_add_norm")
        return ops.dropout_add_norm(y, x, norm.weight, norm.bias, p=dropout.p, eps=epsilon(norm, x, known))
    y = dropout(y)
    if known is not None:
        return add_norm(known)(layer, norm, x, y)
    total = x + y
    return norm(total), total


def _block(layer: nn.Module, block: Block, x: Tensor, call: dict[str, Any], plan: _Plan) -> Tensor:
    """What a block computes, before its dropout."""
    if block.kind != "feed_forward":
        names = _MASKS[block.kind][plan.which]
        mask, padding, causal = (call[name] for name in names)
        memory = call["memory"] if block.kind == "memory" else x
        module = getattr(layer, block.module)
        if "attention" not in plan.parts:
            options = {"attn_mask": mask, "key_padding_mask": padding, "is_causal": bool(causal)}
            return module(x, memory, memory, need_weights=False, **options)[0]
        ran(layer, "attention")
        return attend(module, x, memory, mask, padding, bool(causal))
    if "feed_forward" not in plan.parts:
        return layer.linear2(layer.dropout(layer.activation(layer.linear1(x))))
    ran(layer, "linear_act")
    hidden = ops.linear_act(x, layer.linear1.weight, layer.linear1.bias, plan.activation)
    return layer.linear2(layer.dropout(hidden))


def attend(
    module: nn.MultiheadAttention, x: Tensor, memory: Tensor, mask: Tensor | None, padding: Tensor | None, causal: bool
) -> Tensor:
    """What `module(x, memory, memory)` computes, without weights. Masks as PyTorch's: True, or what is added, hides."""
    weight, bias, width = module.in_proj_weight, module.in_proj_bias, module.embed_dim
    if memory is x:
        q, k, v = F.linear(x, weight, bias).chunk(3, -1)
    else:
        first, rest = (None, None) if bias is None else bias.split((width, 2 * width))
        q = F.linear(x, weight[:width], first)
        k, v = F.linear(memory, weight[width:], rest).chunk(2, -1)
    # [B, H, T, D] views of what the products wrote
    order = (0, 2, 1, 3) if module.batch_first else (1, 2, 0, 3)
    q, k, v = (part.unflatten(2, (module.num_heads, -1)).permute(order) for part in (q, k, v))
    causal = causal and padding is None and mask is not None  # a hint, of which PyTorch makes nothing without the mask
    dense, added = _hidden(None if causal else mask, padding, q)
    out, _ = ops.attention(
        q,
        k,
        v,
        ops.Mask(causal=causal, dense=dense),
        ops.Score(bias=added),
        dropout_p=module.dropout if module.training else 0.0,
    )
    back = (0, 2, 1, 3) if module.batch_first else (2, 0, 1, 3)
    return module.out_proj(out.permute(back).flatten(2))


def _hidden(mask: Tensor | None, padding: Tensor | None, q: Tensor) -> tuple[Tensor | None, Tensor | None]:
    """(who may attend, what is added to scores), each broadcastable to [B, H, T, S] or None."""
    if mask is not None and mask.ndim == 3:
        mask = mask.unflatten(0, (q.shape[0], q.shape[1]))
    if padding is not None:
        padding = padding[:, None, None, :]
    seen, added = None, None
    for part in (mask, padding):
        if part is None:
            continue
        if part.dtype is torch.bool:
            seen = ~part if seen is None else seen & ~part
        else:
            part = part.to(q.dtype)
            added = part if added is None else added + part
    return seen, added


class LayerRule(Rule):
    """torch's encoder and decoder layers. parts: what to serve of them."""

    name = "layer"
    parts: ClassVar[tuple[str, ...]] = ("attention", "feed_forward")

    def __init__(self, parts: Collection[str] | None = None):
        self.wanted = self.parts if parts is None else tuple(part for part in PARTS if part in parts)

    def match(self, site: Site) -> Replace | Skip | None:
        layer, cls = site.module, original_class(type(site.module))
        made_from = next((known for known in _BLOCKS if issubclass(cls, known)), None)
        if made_from is None:
            return None
        for name in ("forward", "_sa_block", "_mha_block", "_ff_block"):
            if getattr(cls, name, None) is not getattr(made_from, name, None):
                return Skip(f"{cls.__name__} has a {name} of its own")
        blocks = _BLOCKS[made_from]
        activation = activation_of(layer)
        parts, left = [], []
        for part in self.wanted:
            why = _unfit(layer, blocks, part, activation)
            parts += [] if why else [part]
            left += [f"{part}: {why}"] if why else []
        if not parts:
            return Skip("; ".join(left)) if left else None
        which = "encoder" if made_from is nn.TransformerEncoderLayer else "decoder"
        told = "; ".join([f"its blocks by the ops: {', '.join(parts)}", *left])
        return Replace(LayerForm(which, blocks, tuple(parts), activation or ""), ops_of(parts), told)


def activation_of(layer: nn.Module) -> str | None:
    """The activation of a layer as `ops.linear_act` names it; None if it has none of that kind."""
    function = layer.activation
    if function is F.relu or type(function) is nn.ReLU:
        return "relu"
    if function is F.gelu:
        return "gelu"
    if isinstance(function, nn.GELU):
        return "gelu_tanh" if function.approximate == "tanh" else "gelu"
    if function is F.silu or isinstance(function, nn.SiLU):
        return "silu"
    return None


def _unfit(layer: nn.Module, blocks: tuple[Block, ...], part: str, activation: str | None) -> str | None:
    """Why a part of a layer cannot go through the ops; None when it can."""
    if part == "feed_forward":
        if activation is None:
            return f"its activation is {layer.activation!r}, which linear_act does not have"
        return _plain(layer, "linear1")
    if part == "dropout":
        odd = [block.dropout for block in blocks if type(layer._modules.get(block.dropout)) is not nn.Dropout]
        if odd:
            return f"{odd[0]} is not an nn.Dropout"
        if any(norm_of(layer._modules[block.norm]) is None for block in blocks):
            return "one of its norms was not replaced"
        return None if any(layer._modules[block.dropout].p > 0 for block in blocks) else "its dropouts drop nothing"
    for name in (block.module for block in blocks if block.module):
        module = layer._modules[name]
        if not _is_attention(type(module)):
            return f"{name} is a {type(module).__name__}, no nn.MultiheadAttention"
        if not module._qkv_same_embed_dim or module.bias_k is not None or module.add_zero_attn:
            return f"{name} has keys or values of another width, bias_k or add_zero_attn"
        if observed(module):
            return f"{name} has hooks"
        if type(module.in_proj_weight) is not nn.Parameter:
            return f"{name}.in_proj_weight is a {type(module.in_proj_weight).__name__}"
        why = _plain(module, "out_proj")
        if why is not None:
            return f"{name}.{why}"
    return None


@constant_in_graphs
def _is_linear(cls: type) -> bool:
    return original_class(cls).forward is nn.Linear.forward


@constant_in_graphs
def _is_attention(cls: type) -> bool:
    return original_class(cls) is nn.MultiheadAttention


def _plain(holder: nn.Module, name: str) -> str | None:
    layer = holder._modules[name]
    cls = original_class(type(layer))
    if not _is_linear(cls):
        return f"{name} is a {cls.__name__}, not a plain linear layer"
    return f"{name} has hooks" if observed(layer) else None
