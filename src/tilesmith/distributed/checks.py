"""What a call of context-parallel attention must be on one rank, and what of it all ranks must have alike."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from tilesmith import ops
from tilesmith.distributed.layout import Layout, boundaries
from tilesmith.distributed.pieces import FAR, Sight
from tilesmith.distributed.protocol import Ring
from tilesmith.engine.argument_checks import tensor
from tilesmith.engine.arguments import dtype_name, shown
from tilesmith.engine.torch_private import any_autocast
from tilesmith.ops.attn.checks import check_shapes
from tilesmith.ops.attn.op import attention_op

LAYOUTS = ("zigzag", "contiguous")
NAME = "context_parallel_attention"
EVERYTHING, SCALED = ops.Mask(), ops.Score()
Shards = Mapping[int, tuple[Tensor, ...]]


def checked_shards(ring: Ring, *each: Sequence[Tensor]) -> dict[int, tuple[Tensor, ...]]:
    """q, k and v of each rank of this process, as kernels take them. Raises for shapes that do not fit together."""
    for name, tensors in zip("qkv", each):
        if len(tensors) != len(ring.ranks):
            raise ValueError(f"{NAME}: {name} must be {len(ring.ranks)} tensors, one of each rank, got {len(tensors)}")
    shards = {}
    for r, (q, k, v) in zip(ring.ranks, zip(*each)):
        for name, x in (("q", q), ("k", k), ("v", v)):
            tensor(NAME, name, x)
        check_shapes(NAME, q, k, v)
        if q.shape[2] != k.shape[2]:
            raise ValueError(
                f"{NAME}: a rank's queries and keys are the same tokens; got {q.shape[2]} and {k.shape[2]}"
            )
        q, k, v = as_kernels_take(q, k, v)
        for name, x in (("k", k), ("v", v)):
            if x.dtype != q.dtype:
                raise TypeError(f"{NAME}: {name} has dtype {x.dtype} and q {q.dtype}; give q, k and v one dtype")
        shards[r] = q, k, v
    return shards


def as_kernels_take(*tensors: Tensor) -> tuple[Tensor, ...]:
    """q, k and v in one dtype under autocast, and with elements of a head beside one another."""
    if any_autocast():  # rotation leaves q and k in fp32 beside a v that a product cast
        tensors = attention_op._autocast(tensors)
    return tuple(x if x.stride(-1) == 1 else x.contiguous() for x in tensors)


def masked_and_scored(mask: Any, score: Any, of: str = NAME) -> None:
    """Raise TypeError unless they are a Mask and a Score, ValueError for what no mode serves."""
    if not isinstance(mask, ops.Mask):
        raise TypeError(f"{of}: mask must be a Mask, got {shown(mask)}; write Mask(causal=True), for example")
    if not isinstance(score, ops.Score):
        raise TypeError(f"{of}: score must be a Score, got {shown(score)}; write Score(scale=0.1), for example")
    for name, value in (("prefix", mask.prefix), ("blocks", mask.blocks)):
        if value is not None:
            raise ValueError(f"{of}: Mask({name}=...) is not supported; pass the same mask as Mask(dense=...)")
    for name, x in (("alibi", score.alibi), ("bias", score.bias)):
        if x is not None:
            tensor(of, f"Score({name}=...)", x)
    if score.alibi is not None and score.alibi.requires_grad:
        raise ValueError(f"{of}: Score(alibi=...) receives no gradient; pass alibi.detach()")


def placed(layout: Layout | str, size: int, tokens: int) -> Layout:
    """The layout of `size` ranks with so many tokens each."""
    if isinstance(layout, str):
        if layout not in LAYOUTS:
            raise ValueError(f"{NAME}: layout must be a Layout, 'zigzag' or 'contiguous', got {layout!r}")
        if layout == "zigzag" and tokens % 2:
            raise ValueError(
                f"{NAME}: layout 'zigzag' needs an even number of tokens on each rank, got {tokens}; give "
                "Layout.zigzag(number of tokens, ranks), which says what is padding"
            )
        return getattr(Layout, layout)(tokens * size, size)
    if not isinstance(layout, Layout):
        raise TypeError(f"{NAME}: layout must be a Layout, 'zigzag' or 'contiguous', got {shown(layout)}")
    if layout.size != size or layout.local != tokens:
        raise ValueError(
            f"{NAME}: layout is of {layout.size} ranks with {layout.local} tokens each; there are {size} ranks and q "
            f"has {tokens} tokens"
        )
    return layout


def sight_of(mask: ops.Mask) -> Sight:
    """How far before and behind itself a query sees."""
    lowered = mask.lower()
    left, right = (lowered.get(f"window_{side}", -1) for side in ("left", "right"))
    if lowered.get("causal"):
        right = 0
    return Sight(FAR if left < 0 else left, FAR if right < 0 else right)


def pair(documents: Tensor | tuple[Tensor, Tensor] | None) -> tuple[Tensor, ...]:
    """Document ids of queries and of keys; empty for none."""
    return () if documents is None else documents if isinstance(documents, tuple) else (documents, documents)


def packed(cu_seqlens: Sequence[int] | Tensor | None, layout: Layout, batch: int, of: str = NAME) -> tuple[int, ...]:
    """The boundaries of the documents, (0, tokens) for one. Raises where they are not those of one row."""
    if cu_seqlens is None:
        return 0, layout.tokens
    try:
        starts = boundaries(cu_seqlens)
    except (TypeError, ValueError) as problem:
        raise type(problem)(f"{of}: {problem}") from None
    if starts[-1] > layout.tokens or batch != 1:
        raise ValueError(
            f"{of}: cu_seqlens ends at {starts[-1]} and the batch has {batch} rows; packed documents are one row of at "
            f"most {layout.tokens} tokens, those of the layout"
        )
    return starts


def barred(mask: ops.Mask, score: ops.Score) -> dict[str, str]:
    """Modes that cannot serve a call, and why."""
    found = {}
    if score.alibi is not None:
        why = "ALiBi needs whole sequences of a head: only 'ulysses' serves it"
        found |= dict.fromkeys(("allgather", "ring", "hybrid"), why)
    if mask.dense is not None or score.bias is not None or mask.documents is not None:
        why = "a dense mask, bias or document ids of a rank's queries are not exchanged for heads"
        found |= dict.fromkeys(("ulysses", "hybrid"), why)
    return found


def refuse(
    mask: ops.Mask, score: ops.Score, sinks: Tensor | None, shards: Shards, layout: Layout, ring: Ring
) -> None:  # fmt: skip
    """Raise for tensors beside q, k and v whose shapes do not fit these and the layout."""
    batch, heads, tokens, _ = shards[ring.ranks[0]][0].shape
    tokens = layout.tokens if len(ring.ranks) > 1 else tokens
    for ids in pair(mask.documents):
        if tuple(ids.shape) != (batch, tokens) or ids.dtype != torch.int32:
            raise ValueError(
                f"{NAME}: Mask(documents=...) must be int32 [{batch}, {tokens}], ids of this rank's tokens, got "
                f"{ids.dtype} {list(ids.shape)}"
            )
    for name, x in (("Mask(dense=...)", mask.dense), ("Score(bias=...)", score.bias)):
        if x is not None and (x.shape[-1] not in (1, layout.tokens) or (x.ndim > 1 and x.shape[-2] not in (1, tokens))):
            raise ValueError(
                f"{NAME}: {name} must be [..., {tokens}, {layout.tokens}]: this rank's queries, all keys; got "
                f"{list(x.shape)}"
            )
        if x is not None and x.requires_grad:
            raise ValueError(f"{NAME}: {name} receives no gradient over ranks; detach it")
    if sinks is not None:
        tensor(NAME, "sinks", sinks)
        if tuple(sinks.shape) != (heads,):
            raise ValueError(f"{NAME}: sinks must be [{heads}], one for each query head, got {list(sinks.shape)}")


def shapes(shard: Sequence[Tensor]) -> dict[str, Any]:
    """Shapes and dtypes of q, k and v, by name."""
    found: dict[str, Any] = {}
    for name, x in zip("qkv", shard):
        found |= {f"{name}.shape": list(x.shape), f"{name}.dtype": dtype_name(x.dtype)}
    return found


def terms_signed(mask: ops.Mask, score: ops.Score, sinks: Tensor | None) -> dict[str, Any]:
    """What all ranks must have alike of a mask, a score and sinks, by name."""
    lowered = {"window_left": -1, "window_right": -1, "scale": None, "softcap": 0.0} | mask.lower() | score.lower()
    ids = pair(mask.documents)
    tensors = {"sinks": sinks, "alibi": score.alibi, "bias": score.bias, "dense": mask.dense}
    return {
        "causal": mask.causal, "window": [lowered["window_left"], lowered["window_right"]], "scale": lowered["scale"],
        "softcap": lowered["softcap"], "documents": [_described(x) for x in ids] or None,
        **{name: _described(x) for name, x in tensors.items()},
    }  # fmt: skip


def digest(value: Any) -> str | None:
    """Some letters for a long value, None for None."""
    return None if value is None else hashlib.sha256(repr(value).encode()).hexdigest()[:16]


def _described(x: Tensor | None) -> str | None:
    return None if x is None else f"{dtype_name(x.dtype)} {list(x.shape)}"
