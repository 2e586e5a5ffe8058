"""Scores, shares, choices and lists of blocks: the ops that a block-sparse attention decides with.

Legend: B batch, T query tokens, S key tokens, H query heads, G kv heads (H % G == 0), D head dim, L lists of a batch
row, R blocks of queries (rows), C blocks of keys (columns).
"""

import math

import torch
from torch import Tensor

from tilesmith.device.accumulation import sum_dtype
from tilesmith.engine import Op, cdiv
from tilesmith.engine.argument_checks import floating
from tilesmith.ops.attn import block_pattern_reference as patterns
from tilesmith.ops.attn import blocks_reference as reference
from tilesmith.ops.attn.checks import check_shapes

TRITON = {"triton": "tilesmith.ops.attn.triton.blocks"}
MAX = {"triton": "tilesmith.ops.attn.triton.block_max"}
CHOICE = {"triton": "tilesmith.ops.attn.triton.block_choice"}
LARGEST = 1 << 20  # tokens of a block


def _check_pair(op: str, q: Tensor, k: Tensor, scale: float | None, **sizes: int) -> None:
    check_shapes(op, q, k, k)
    for name, x in (("q", q), ("k", k)):
        floating(op, name, x)
    if k.dtype != q.dtype:
        raise TypeError(f"{op}: k has dtype {k.dtype}, q has {q.dtype}; they must match")
    if scale is not None and not 0.0 < scale < math.inf:
        raise ValueError(f"{op}: scale must be a positive number, got {scale}; to change the sign, negate q")
    for name, size in sizes.items():
        if not 1 <= size <= LARGEST:
            raise ValueError(f"{op}: {name} must be from 1 to {LARGEST}, got {size}")


def _check_scores(q, k, scale=None, causal=False, block_q=128, block_k=128) -> None:
    _check_pair("block_scores", q, k, scale, block_q=block_q, block_k=block_k)


def _check_max(q, k, scale=None, causal=False, block_k=128, block_q=1) -> None:
    _check_pair("block_max_scores", q, k, scale, block_k=block_k, block_q=block_q)


def _check_mass(
    q, k, lse, offsets=None, indices=None, scale=None, causal=False, block_q=128, block_k=128, query_stride=1
) -> None:
    op = "block_mass"
    _check_pair(op, q, k, scale, block_q=block_q, block_k=block_k)
    if query_stride < 1 or block_q % query_stride:
        raise ValueError(f"{op}: query_stride must be a divisor of block_q, {block_q}, got {query_stride}")
    if lse.dtype != sum_dtype(q):
        raise TypeError(f"{op}: lse has dtype {lse.dtype}; for q of {q.dtype} it must be {sum_dtype(q)}")
    if lse.shape != q.shape[:3]:
        raise ValueError(f"{op}: lse must be {list(q.shape[:3])}, got {list(lse.shape)}")
    if (offsets is None) != (indices is None):
        missing = "offsets" if offsets is None else "indices"
        raise ValueError(f"{op}: {missing} is None; offsets and indices go together")
    for name, x in (("lse", lse), ("offsets", offsets), ("indices", indices)):
        if x is not None and x.device != q.device:
            raise ValueError(f"{op}: {name} is on {x.device}, q on {q.device}; move them to one device")
        if x is not None and name != "lse" and x.dtype != torch.int32:
            raise TypeError(f"{op}: {name} must be int32, got {x.dtype}")
    if offsets is None or indices is None:
        return
    batch, kv_heads, rows = q.shape[0], k.shape[1], cdiv(q.shape[2], block_q)
    fits = offsets.ndim == 3 and offsets.shape[0] in (1, batch) and offsets.shape[1] in (1, kv_heads)
    if not fits or offsets.shape[2] != rows + 1:
        raise ValueError(
            f"{op}: offsets must be [{batch} or 1, {kv_heads} or 1, {rows + 1}], got {list(offsets.shape)}"
        )
    if indices.ndim != 1:
        raise ValueError(f"{op}: indices must have one dim, got {list(indices.shape)}")


def _check_shares(
    q, k, scale=None, causal=False, block=128, stretches=8, query_stretches=None, query_stride=1, key_stride=1
) -> None:
    op = "block_shares"
    of_queries = stretches if query_stretches is None else query_stretches
    sizes = {"query_stretches": of_queries, "query_stride": query_stride, "key_stride": key_stride}
    _check_pair(op, q, k, scale, block=block, stretches=stretches, **sizes)
    if block % stretches:
        raise ValueError(f"{op}: stretches must divide block, {block}, got {stretches}")
    if stretches % of_queries:
        raise ValueError(f"{op}: query_stretches must divide stretches, {stretches}, got {of_queries}")
    for of, name, stretch in (
        ("queries", "query_stride", block // of_queries), ("keys", "key_stride", block // stretches),
    ):  # fmt: skip
        if stretch % sizes[name]:
            raise ValueError(f"{op}: {name} must divide a stretch of {of}, {stretch} tokens, got {sizes[name]}")
    if causal and q.shape[2] != k.shape[2]:
        raise ValueError(f"{op}: causal needs as many keys as queries, got {k.shape[2]} and {q.shape[2]}")


def _check_select(scores, counts, visible, mass=1.0, first=0, last=0, ends=None) -> None:
    op = "block_select"
    if scores.ndim != 4:
        raise ValueError(f"{op}: scores must be [batch, lists, rows, columns], got {list(scores.shape)}")
    floating(op, "scores", scores)
    for name, x in (("counts", counts), ("visible", visible), ("ends", ends)):
        if x is None:
            continue
        if x.dtype != torch.int32:
            raise TypeError(f"{op}: {name} must be int32, got {x.dtype}")
        if tuple(x.shape) != (scores.shape[2],):
            raise ValueError(f"{op}: {name} must be [{scores.shape[2]}], one for each row, got {list(x.shape)}")
        if x.device != scores.device:
            raise ValueError(f"{op}: {name} is on {x.device}, scores on {scores.device}; move them to one device")
    if not 0.0 < mass <= 1.0:
        raise ValueError(f"{op}: mass must be in (0, 1], got {mass}")
    for name, number in (("first", first), ("last", last)):
        if not 0 <= number <= LARGEST:
            raise ValueError(f"{op}: {name} must be from 0 to {LARGEST}, got {number}")


def _check_lists(keep, room, counts=None) -> None:
    op = "block_lists"
    if keep.ndim != 4:
        raise ValueError(f"{op}: keep must be [batch, lists, rows, columns], got {list(keep.shape)}")
    if keep.dtype != torch.bool:
        raise TypeError(f"{op}: keep must be bool, got {keep.dtype}")
    if not 0 <= room < 1 << 31:
        raise ValueError(f"{op}: room must be from 0 to {(1 << 31) - 1}, got {room}")
    if counts is None:
        return
    if counts.dtype != torch.int32:
        raise TypeError(f"{op}: counts must be int32, got {counts.dtype}")
    if counts.shape != keep.shape[2:3]:
        raise ValueError(f"{op}: counts must be [{keep.shape[2]}], got {list(counts.shape)}")
    if counts.device != keep.device:
        raise ValueError(f"{op}: counts is on {counts.device}, keep on {keep.device}; move them to one device")


def _check_pattern(seed, pattern, tokens, keys, sparsity_ratio=0.9, lists=1, block=128, causal=True) -> None:
    op = "block_pattern"
    if seed.dtype != torch.int64:
        raise TypeError(f"{op}: seed must be int64, got {seed.dtype}")
    if tuple(seed.shape) != (1,):
        raise ValueError(f"{op}: seed must be [1], got {list(seed.shape)}")
    if pattern not in patterns.PATTERNS:
        raise ValueError(f"{op}: pattern must be one of {', '.join(map(repr, patterns.PATTERNS))}, got {pattern!r}")
    for name, value in (("tokens", tokens), ("keys", keys), ("lists", lists), ("block", block)):
        if not 1 <= value < 1 << 30:
            raise ValueError(f"{op}: {name} must be from 1 to {(1 << 30) - 1}, got {value}")
    if not 0.0 <= sparsity_ratio <= patterns.LARGEST_SPARSITY:
        raise ValueError(f"{op}: sparsity_ratio must be from 0 to {patterns.LARGEST_SPARSITY}, got {sparsity_ratio}")
    entries = lists * patterns.row_budget(tokens, keys, block, causal, sparsity_ratio).total
    if entries >= 1 << 31:
        raise ValueError(
            f"{op}: {lists} lists have {entries} entries; fewer than 2**31 are supported: take larger blocks"
        )


def _fake_scores(q, k, scale=None, causal=False, block_q=128, block_k=128) -> Tensor:
    return q.new_empty(*q.shape[:2], cdiv(q.shape[2], block_q), cdiv(k.shape[2], block_k), dtype=sum_dtype(q))


def _fake_scores_vjp(dscores, q, k, *rest) -> tuple[Tensor, Tensor]:
    dq, dk = (x.new_empty(x.shape if want else (0,)) for x, want in zip((q, k), rest[-1]))
    return dq, dk


def _fake_max_vjp(dscores, q, k, *rest) -> tuple[Tensor, Tensor]:
    dq, dk = (torch.empty_like(x) if want else x.new_empty(0) for x, want in zip((q, k), rest[-1]))
    return dq, dk


def _fake_mass(
    q, k, lse, offsets=None, indices=None, scale=None, causal=False, block_q=128, block_k=128, query_stride=1
) -> Tensor:
    rows, columns = cdiv(q.shape[2], block_q), cdiv(k.shape[2], block_k)
    return q.new_empty(q.shape[0], k.shape[1], rows, columns, dtype=sum_dtype(q))


def _fake_lists(keep: Tensor, room: int, counts: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    batch, many, rows, columns = keep.shape
    offsets, offsets_t = (keep.new_empty(batch, many, n + 1, dtype=torch.int32) for n in (rows, columns))
    indices, indices_t = (keep.new_empty(room, dtype=torch.int32) for _ in range(2))
    return offsets, indices, offsets_t, indices_t


def _fake_pattern(seed, pattern, tokens, keys, sparsity_ratio=0.9, lists=1, block=128, causal=True):
    b = patterns.row_budget(tokens, keys, block, causal, sparsity_ratio)
    offsets, offsets_t = (seed.new_empty(1, lists, n + 1, dtype=torch.int32) for n in (b.rows, b.columns))
    indices, indices_t = (seed.new_empty(lists * b.total, dtype=torch.int32) for _ in range(2))
    return offsets, indices, offsets_t, indices_t


block_scores_vjp = Op(reference.block_scores_vjp, fake=_fake_scores_vjp, outputs=("dq", "dk"), kernels=TRITON)

block_scores = Op(
    reference.block_scores,
    fake=_fake_scores,
    vjp=block_scores_vjp,
    outputs=("scores",),
    check=_check_scores,
    kernels=TRITON,
)

block_max_scores_vjp = Op(reference.block_max_scores_vjp, fake=_fake_max_vjp, outputs=("dq", "dk"), kernels=MAX)

block_max_scores = Op(
    reference.block_max_scores,
    fake=lambda q, k, scale=None, causal=False, block_k=128, block_q=1: _fake_scores(
        q, k, scale, causal, block_q, block_k
    ),
    vjp=block_max_scores_vjp,
    outputs=("scores",),
    check=_check_max,
    kernels=MAX,
)

block_mass = Op(
    reference.block_mass, fake=_fake_mass, outputs=("mass",), check=_check_mass, kernels=TRITON,
)  # fmt: skip

block_shares = Op(
    reference.block_shares,
    fake=lambda q, k, scale=None, causal=False, block=128, *rest: _fake_mass(q, k, q, block_q=block, block_k=block),
    outputs=("shares",),
    check=_check_shares,
    kernels={"triton": "tilesmith.ops.attn.triton.block_shares"},
)

block_select = Op(
    reference.block_select,
    fake=lambda scores, *rest: torch.empty_like(scores, dtype=torch.bool, memory_format=torch.contiguous_format),
    outputs=("keep",),
    check=_check_select,
    kernels=CHOICE,
)

block_lists = Op(
    reference.block_lists,
    fake=_fake_lists,
    outputs=("offsets", "indices", "offsets_t", "indices_t"),
    check=_check_lists,
    kernels=CHOICE,
)

block_pattern = Op(
    patterns.block_pattern,
    fake=_fake_pattern,
    outputs=("offsets", "indices", "offsets_t", "indices_t"),
    check=_check_pattern,
    kernels={"triton": "tilesmith.ops.attn.triton.block_pattern"},
)
