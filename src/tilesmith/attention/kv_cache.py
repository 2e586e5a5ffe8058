"""Attention over a cache of keys and values under the name and in the layout of flash-attn."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tilesmith import ops
from tilesmith.attention.flash_attn import UNLIMITED, check_pages, check_slopes, first_slots, sides
from tilesmith.engine.argument_checks import flag, number, positive, readable, tensor
from tilesmith.engine.torch_private import autocasts
from tilesmith.ops.attn.mask import Mask, Score
from tilesmith.ops.attn.op import attention_op

_OP = "flash_attn_with_kvcache"


def flash_attn_with_kvcache(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    k: Tensor | None = None,
    v: Tensor | None = None,
    rotary_cos: Tensor | None = None,
    rotary_sin: Tensor | None = None,
    cache_seqlens: int | Tensor | None = None,
    cache_batch_idx: Tensor | None = None,
    cache_leftpad: Tensor | None = None,
    block_table: Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = UNLIMITED,
    softcap: float = 0.0,
    rotary_interleaved: bool = True,
    alibi_slopes: Tensor | None = None,
    num_splits: int = 0,
    return_softmax_lse: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """Write new keys and values into a cache, then attend to it: the signature of flash-attn's function of this name.

    B rows, T queries of each, R new keys, S slots of a row of the cache, H query heads, G kv heads (H % G == 0), D head
    dim, Dv head dim of values.

    q: [B, T, H, D]. k_cache, v_cache: [rows, S, G, D] and [rows, S, G, Dv], or [num_pages, page_size, G, D | Dv] with
        `block_table` int32 [B, pages]; changed in place where `k` is given.
    k, v: [B, R, G, D | Dv], written after the first `cache_seqlens` slots of each row. R may differ from T.
    rotary_cos, rotary_sin: [positions, up to D / 2], only with k: the new keys are rotated by their slots. Queries are
        rotated by cache_seqlens, cache_seqlens + 1, … with `causal` or a window, else all by cache_seqlens.
        rotary_interleaved: features (2i, 2i + 1) form a pair, else the two halves of those that are rotated, which are
        the first of a head. Where they are the last (DeepSeek), give q and k as `ops.rope(..., last=True)` returns
        them, and no angles.
    cache_seqlens: int, or int32 [B]: how many slots of each row hold keys before the call; None, without k, for all.
    cache_batch_idx: int32 [B], which row of the cache each row has; None for the first B. Of rows that write to one row
        of the cache any may win. Not together with `block_table`.
    cache_leftpad: int32 [B], the first slot of each row that holds a key; slots before it are not attended to.
        Slots keep their numbers: those of `cache_seqlens` and of the rotation count from 0.
    softmax_scale: 1 / sqrt(D) if None. causal, window_size: (left, right), -1 unlimited; aligned at the last key.
    softcap: 0 for none. alibi_slopes: fp32 [H] or [B, H]. num_splits: 0; the library chooses how keys are split.

    Returns out [B, T, H, Dv] in q's dtype, and with return_softmax_lse also lse [B, H, T], fp32. A query that sees no
    key gives 0 and -inf. No gradient reaches k and v, which are written.

    Raises ValueError and TypeError, naming the argument, before anything is written: also for cache_seqlens that the
    cache does not have or that leave no room for the new keys, a cache_batch_idx that is not a row of it, a block_table
    that names pages it does not have for used slots, and tables of angles that are too short, provided that the host
    can read the values: an int, or tensors on a CPU. Otherwise writes beyond the cache are dropped, and the result of
    such a row is undefined. Tensors are checked by the two ops that serve the call, `kv_cache_append` and `attention`;
    errors about shapes have their names and layout, [B, heads, tokens, D].
    """
    _check(q, k_cache, v_cache, k, v, rotary_cos, rotary_sin, cache_seqlens, cache_batch_idx, block_table, num_splits)
    if softmax_scale is not None:
        positive(_OP, "softmax_scale", softmax_scale)
    check_slopes(_OP, alibi_slopes, q, q.shape[0], q.shape[2])
    for name, value in (
        ("causal", causal), ("rotary_interleaved", rotary_interleaved), ("return_softmax_lse", return_softmax_lse),
    ):  # fmt: skip
        flag(_OP, name, value)
    window = sides(_OP, window_size)
    local = causal or window is not None
    lengths = _lengths(cache_seqlens, q)
    table = cache_batch_idx[:, None] if cache_batch_idx is not None else block_table
    if table is None:
        if k_cache.shape[0] < q.shape[0]:
            raise ValueError(
                f"{_OP}: k_cache has {k_cache.shape[0]} rows and q {q.shape[0]}; give a cache of at least as many, or "
                "cache_batch_idx"
            )
        k_cache, v_cache = k_cache[: q.shape[0]], v_cache[: q.shape[0]]
    new = 0 if k is None else k.shape[1]
    _check_contents(cache_seqlens, cache_batch_idx, k_cache, block_table, new)
    queries, keys, values = (x.transpose(1, 2) for x in (q, k_cache, v_cache))
    held = lengths if k is None or lengths is None else lengths + k.shape[1]
    documents = None if cache_leftpad is None else _documents(cache_leftpad, q, keys, table)
    mask = Mask(causal, window, documents=documents)
    _check_reach(cache_seqlens, q, new, k_cache, block_table, rotary_cos, mask, cache_leftpad)
    score = Score(softmax_scale, number(_OP, "softcap", softcap, 0.0), alibi_slopes)
    given: dict[str, Any] = {"kv_lengths": held, "page_table": table}
    if k is not None and v is not None and lengths is not None:
        # attention's refusals come before the cache is written
        seen = _as_seen(queries, keys, values)
        attention_op.check(*attention_op.bind(seen, {**given, **mask.lower(), **score.lower()}))
        written = (keys, values, k.transpose(1, 2), v.transpose(1, 2), lengths)
        how = {"page_table": table, "interleaved": rotary_interleaved}
        queries = _append(written, queries, (rotary_cos, rotary_sin), local, how)
    out, lse = ops.attention(queries, keys, values, mask, score, **given)
    return (out.transpose(1, 2), lse) if return_softmax_lse else out.transpose(1, 2)


def _append(new: tuple[Tensor, ...], q: Tensor, angles: tuple, local: bool, how: dict[str, Any]) -> Tensor:
    """Write into the caches; q [B, H, T, D], rotated where there are angles."""
    if angles[0] is None:
        ops.kv_cache_append(*new, **how)
        return q
    if local:
        return ops.kv_cache_append(*new, q, *angles, **how)
    # without order all queries of a row have the position of the first: as heads of one token
    batch, heads, tokens, dim = q.shape
    rotated = ops.kv_cache_append(*new, q.transpose(1, 2).reshape(batch, tokens * heads, 1, dim), *angles, **how)
    return rotated.view(batch, tokens, heads, dim).transpose(1, 2)


def _as_seen(*tensors: Tensor) -> tuple[Tensor, ...]:
    """q, k and v for the op's check: in the dtypes that autocast gives them, without a copy of the caches for it."""
    if not autocasts(tensors[0].device.type):
        return tensors
    lowered = attention_op._autocast(tuple(x.new_empty(()) for x in tensors))
    return tuple(one.expand(x.shape) for one, x in zip(lowered, tensors, strict=True))


def _documents(leftpad: Tensor, q: Tensor, keys: Tensor, table: Tensor | None) -> tuple[Tensor, Tensor]:
    """Ids that hide the slots before `leftpad` from every query."""
    tensor(_OP, "cache_leftpad", leftpad)
    _integers("cache_leftpad", leftpad, q)
    slots = keys.shape[2] if table is None else table.shape[1] * keys.shape[2]
    real = torch.arange(slots, device=leftpad.device, dtype=torch.int32) >= leftpad[:, None]
    return torch.ones(q.shape[:2], dtype=torch.int32, device=q.device), real.int()


def _lengths(seqlens: int | Tensor | None, q: Tensor) -> Tensor | None:
    if isinstance(seqlens, int) and not isinstance(seqlens, bool):
        return torch.full((q.shape[0],), seqlens, dtype=torch.int32, device=q.device)
    if seqlens is None or isinstance(seqlens, Tensor):
        return seqlens
    raise TypeError(f"{_OP}: cache_seqlens must be an int or an int32 tensor [{q.shape[0]}], got {seqlens!r}")


def _check(q, k_cache, v_cache, k, v, cos, sin, seqlens, rows, block_table, num_splits) -> None:
    for name, x in (("q", q), ("k_cache", k_cache), ("v_cache", v_cache), ("k", k), ("v", v)):
        if x is not None or name not in ("k", "v"):
            tensor(_OP, name, x, ("B", "tokens", "heads", "D"))
    if (k is None) != (v is None):
        raise ValueError(f"{_OP}: {'k' if k is None else 'v'} is missing; give k and v, or neither")
    for name, x in (("rotary_cos", cos), ("rotary_sin", sin)):
        if x is not None:
            tensor(_OP, name, x)
            if k is None:
                raise ValueError(
                    f"{_OP}: {name} is given without k and v; rotate q by ops.rope where nothing is written"
                )
            if x.ndim != 2:
                raise ValueError(f"{_OP}: {name} has shape {tuple(x.shape)}; it must be [positions, rotated / 2]")
    if (cos is None) != (sin is None):
        raise ValueError(f"{_OP}: rotary_{'cos' if cos is None else 'sin'} is missing; give both, or neither")
    if block_table is not None:
        tensor(_OP, "block_table", block_table, ("B", "pages"))
    if k is not None and seqlens is None:
        raise ValueError(f"{_OP}: cache_seqlens is missing; with k and v it says where they are written")
    for name, x in (("cache_seqlens", seqlens), ("cache_batch_idx", rows)):
        if isinstance(x, Tensor):
            _integers(name, x, q)
        elif name == "cache_batch_idx" and x is not None:
            tensor(_OP, name, x)
    if rows is not None and block_table is not None:
        raise ValueError(f"{_OP}: cache_batch_idx and block_table are both given; a table's rows already choose pages")
    if num_splits != 0:
        raise ValueError(f"{_OP}: num_splits is {num_splits!r}; it must be 0: the library chooses how keys are split")


def _check_contents(
    seqlens: int | Tensor | None, rows: Tensor | None, k_cache: Tensor, block_table: Tensor | None, new: int
) -> None:
    """Raise ValueError for lengths or rows that the cache does not have, where the host can read them."""
    slots = k_cache.shape[1] * (1 if block_table is None else block_table.shape[1])
    wrong: Any = seqlens
    if isinstance(seqlens, Tensor):
        wrong = None
        if readable(seqlens):
            wrong = next((n for n in seqlens.tolist() if not 0 <= n <= slots - new), None)
    if isinstance(wrong, int) and not 0 <= wrong <= slots - new:
        room = f"with {new} new keys it must be 0 to {slots - new}" if new else f"it must be 0 to {slots}"
        raise ValueError(
            f"{_OP}: cache_seqlens holds {wrong}; a row of the cache has {slots} slots, so {room}: take a longer cache"
        )
    if rows is not None and readable(rows):
        row = next((n for n in rows.tolist() if not 0 <= n < k_cache.shape[0]), None)
        if row is not None:
            raise ValueError(
                f"{_OP}: cache_batch_idx holds {row}; the cache has rows 0 to {k_cache.shape[0] - 1}: give one of them"
            )


def _check_reach(
    seqlens: int | Tensor | None, q: Tensor, new: int, k_cache: Tensor, block_table: Tensor | None, cos: Tensor | None,
    mask: Mask, leftpad: Tensor | None,
) -> None:  # fmt: skip
    """Raise ValueError for pages that the cache has not and angles that the tables have not, where the host can
    read which are used."""
    batch, tokens, _, _ = q.shape
    if isinstance(seqlens, Tensor):
        if not readable(seqlens):
            return
        before = seqlens.tolist()
    else:
        slots = k_cache.shape[1] * (1 if block_table is None else block_table.shape[1])
        before = [slots if seqlens is None else seqlens] * batch
    ordered = mask.causal or mask.window is not None
    last = max(before, default=0) + max(new, tokens if ordered else 1)
    if cos is not None and batch and new and last > cos.shape[0]:
        raise ValueError(
            f"{_OP}: rotary_cos has {cos.shape[0]} positions; slots up to {last - 1} are rotated: give at least {last}"
        )
    if block_table is None or block_table.shape[0] != batch:  # which the op tells
        return
    behind = [n + new for n in before]
    first = first_slots(behind, [tokens] * batch, mask)
    if leftpad is not None and readable(leftpad):
        first = [max(one, pad) for one, pad in zip(first, leftpad.tolist(), strict=True)]
    first = [min(one, n) for one, n in zip(first, before, strict=True)] if new else first
    check_pages(_OP, block_table, k_cache, first, behind)


def _integers(name: str, x: Tensor, q: Tensor) -> None:
    """Raise unless x is int32 [B], where q is."""
    if x.dtype != torch.int32:
        raise TypeError(f"{_OP}: {name} has dtype {x.dtype}; it must be int32")
    if x.shape != (q.shape[0],):
        raise ValueError(f"{_OP}: {name} has shape {tuple(x.shape)}; it must be [{q.shape[0]}], one for each row of q")
    if x.device != q.device:
        raise ValueError(f"{_OP}: {name} is on {x.device}, q on {q.device}; move them to one device")
