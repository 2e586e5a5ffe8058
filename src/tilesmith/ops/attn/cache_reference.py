"""kv_cache_append in plain PyTorch: new keys, rotated if asked, and values are written into a cache."""

import torch
from torch import Tensor

from tilesmith.ops.rotary.reference import turned


def kv_cache_append(
    k_cache: Tensor,
    v_cache: Tensor,
    k: Tensor,
    v: Tensor,
    lengths: Tensor,
    q: Tensor | None = None,
    cos: Tensor | None = None,
    sin: Tensor | None = None,
    page_table: Tensor | None = None,
    interleaved: bool = False,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
) -> Tensor:
    """Write new keys and values into a KV cache in place, rotating keys and queries on the way.

    Token ``t`` of row ``b`` has position ``lengths[b] + t``, in ``k``, ``v`` and ``q`` alike. Its key and value go to
    that slot of the row's cache; with ``cos`` and ``sin`` the key is rotated first (RoPE, arXiv:2104.09864), and so is
    ``q``.

    A token whose slot lies outside the cache (a negative position, a position past the last slot, a page-table entry
    that names no page) is dropped. ``lengths`` itself is not advanced. If two tokens name the same slot (a page that
    rows share), which of them stays is undefined.

    Args:
        k_cache, v_cache: [B, G, S, D] and [B, G, S, Dv], or [num_pages, G, page_size, D] and [num_pages, G, page_size,
            Dv] with ``page_table``; changed in place. Any strides, as long as no two elements share memory,
            of one cache or of both; those of one may lie between those of the other ([B, S, 2, G, D] of both).
        k, v: [B, G, T, D] and [B, G, T, Dv], new keys and values; cast to the caches' dtypes, to the largest number of
            an 8-bit one if they are beyond it. Dv may differ from D (DeepSeek: 192 and 128), and is 0 where values are
            columns of the keys and only these are written.
        lengths: [B] int32 or int64, tokens already in each row's cache; read on the device.
        q: [B, H, Tq, D] queries to rotate, only with ``cos`` and ``sin``; Tq may differ from T.
        cos, sin: one angle per pair of features, [max_positions, R / 2] indexed by position, or [B, max(T, Tq), R / 2]
            or [1, max(T, Tq), R / 2] for each token. The first R <= D features are rotated, the others pass through;
            where the last R are to be (latent attention, DeepSeek), rotate by ``ops.rope(q, k, cos, sin,
            offsets=lengths, last=True)`` and give no angles here. A position that the table does not hold gives NaN.
        page_table: [B, pages] int32 or int64; slot ``s`` of row ``b`` is slot ``s % page_size`` of page
            ``page_table[b, s // page_size]``. A contiguous cache of more rows than the batch is one of pages as long as
            a row: ``rows[:, None]`` says which row of the cache each row of the batch has.
        interleaved: features (2i, 2i + 1) form a pair; otherwise (i, i + R / 2).
        k_scale, v_scale: fp32 [1, G, 1] or [1, 1, 1], positive: what is stored is the key (rotated) and the value
            divided by them, as `attention` takes it. A cache in float8_e4m3fn or float8_e5m2 needs both.

    Returns:
        The rotated queries with q's shape, dtype and memory order (dense, as ``torch.empty_like`` lays it out), or an
        empty tensor of k's dtype if ``q`` is None.

    The rotation is computed in at least float32 and rounded once, to the dtype of the cache or of ``q``. There is no
    gradient: a tensor that requires one raises ValueError while grad mode is on, as do wrong shapes; wrong dtypes raise
    TypeError.
    """
    tokens = k.shape[2]
    position = lengths[:, None].long() + torch.arange(longest(k, q), device=k.device)
    if cos is not None and sin is not None:
        cos, sin = _angles(cos, position), _angles(sin, position)
    rows, columns, page, slot = _destinations(k_cache, position[:, :tokens], page_table)
    for cache, new in ((k_cache, _scaled(_rotate(k, cos, sin, interleaved), k_scale)), (v_cache, _scaled(v, v_scale))):
        new = _cast(new, cache.dtype)[rows, :, columns]
        if cache.dtype.itemsize == 1:  # torch indexes bytes, but no 8-bit floats
            cache, new = cache.view(torch.uint8), new.view(torch.uint8)
        cache[page, :, slot] = new
    if q is None:
        return k.new_empty(0)
    return torch.empty_like(q).copy_(_rotate(q, cos, sin, interleaved))


def longest(k: Tensor, q: Tensor | None) -> int:
    """The tokens of a row that have a position: those of k or of q, whichever has more."""
    return k.shape[2] if q is None else max(k.shape[2], q.shape[2])


def _scaled(x: Tensor, scale: Tensor | None) -> Tensor:
    """x [B, G, T, *] divided by the factors [1, G or 1, 1] that readers multiply it with."""
    if scale is None:
        return x
    acc = torch.promote_types(x.dtype, torch.float32)
    return x.to(acc) / scale.to(acc)[..., None]


def _cast(x: Tensor, dtype: torch.dtype) -> Tensor:
    """x in a dtype; in 8 bits the largest number stands for all beyond it."""
    if dtype.itemsize == 1:
        limit = torch.finfo(dtype).max
        x = x.clamp(-limit, limit)
    return x.to(dtype)


def _destinations(cache: Tensor, position: Tensor, page_table: Tensor | None) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Row and column of the tokens that have a place in the cache, with that place: page and slot."""
    if page_table is None:
        page_table = torch.arange(cache.shape[0], device=cache.device)[:, None]
    page_size = cache.shape[2]
    capacity = page_table.shape[1] * page_size
    rows, columns = torch.nonzero((position >= 0) & (position < capacity), as_tuple=True)
    slots = position[rows, columns]
    page = page_table[rows, slots // max(page_size, 1)].long()
    held = (page >= 0) & (page < cache.shape[0])
    return rows[held], columns[held], page[held], slots[held] % max(page_size, 1)


def _angles(table: Tensor, position: Tensor) -> Tensor:
    """The angles of [B, T] positions as [B or 1, T, R / 2], NaN where the table holds none."""
    if table.ndim == 3:
        return table
    held = (position >= 0) & (position < table.shape[0])
    return table[position.clamp(0, table.shape[0] - 1)].where(held[..., None], float("nan"))


def _rotate(x: Tensor, cos: Tensor | None, sin: Tensor | None, interleaved: bool) -> Tensor:
    """x [B, heads, T, D] with its first R features rotated by the first T of [B or 1, *, R / 2] angles, in at least
    float32; x itself without angles."""
    if cos is None or sin is None:
        return x
    return turned(x, cos[:, : x.shape[2]], sin[:, : x.shape[2]], interleaved)
