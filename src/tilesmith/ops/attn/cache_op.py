"""kv_cache_append, which writes new keys and values into a cache: what it accepts and which kernels it has.

Legend: B batch rows, T new tokens of a row, H query heads, G kv heads, D head dim of keys and queries, Dv head dim of
values, R <= D rotated features of a head, S slots of a contiguous cache.
"""

import torch
from torch import Tensor

from tilesmith.engine import Op
from tilesmith.ops.attn import cache_reference as reference
from tilesmith.ops.attn.overlap import distance, overlap

FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
SMALL = (torch.float8_e4m3fn, torch.float8_e5m2)
INTEGERS = (torch.int32, torch.int64)


def _fake(
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
    return k.new_empty(0) if q is None else torch.empty_like(q)


def _check(
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
) -> None:
    tensors = {"k_cache": k_cache, "v_cache": v_cache, "k": k, "v": v, "q": q, "cos": cos, "sin": sin}
    for name, x in tensors.items():
        if x is None:
            continue
        small = name in ("k_cache", "v_cache") and x.dtype in SMALL
        if x.dtype not in FLOATS and not small:
            raise TypeError(
                f"kv_cache_append: {name} has dtype {x.dtype}; float16, bfloat16, float32 and float64 are supported, "
                "in caches also float8_e4m3fn and float8_e5m2"
            )
        if x.device != k_cache.device:
            raise ValueError(
                f"kv_cache_append: {name} is on {x.device}, k_cache on {k_cache.device}; move them to one device"
            )
    _check_gradients(**tensors, k_scale=k_scale, v_scale=v_scale)
    _check_caches(k_cache, v_cache, k, v)
    _check_places(k_cache, k, lengths, page_table)
    _check_rotation(k, q, cos, sin)
    _check_scales(k_cache, v_cache, k_scale, v_scale)


def _check_gradients(**tensors: Tensor | None) -> None:
    for name, x in tensors.items():
        if x is not None and x.requires_grad and torch.is_grad_enabled():
            raise ValueError(
                f"kv_cache_append: {name} requires a gradient, but writing into a cache has none; "
                "call it under torch.no_grad() or with detached tensors"
            )


def _check_caches(k_cache: Tensor, v_cache: Tensor, k: Tensor, v: Tensor) -> None:
    if k.ndim != 4:
        raise ValueError(f"kv_cache_append: k has shape {tuple(k.shape)}; it must be [B, G, T, D]")
    if v.ndim != 4 or v.shape[:3] != k.shape[:3]:
        batch, heads, tokens, _ = k.shape
        raise ValueError(
            f"kv_cache_append: v has shape {tuple(v.shape)}; for k of shape {tuple(k.shape)} it must be "
            f"[{batch}, {heads}, {tokens}, Dv]"
        )
    if k_cache.ndim != 4 or k_cache.shape[1] != k.shape[1] or k_cache.shape[3] != k.shape[3]:
        raise ValueError(
            f"kv_cache_append: k_cache has shape {tuple(k_cache.shape)}; for k of shape {tuple(k.shape)} it must be "
            f"[*, {k.shape[1]}, *, {k.shape[3]}]: [B, G, S, D], or [num_pages, G, page_size, D] with page_table"
        )
    wanted = (*k_cache.shape[:3], v.shape[3])
    if v_cache.shape != wanted:
        raise ValueError(
            f"kv_cache_append: v_cache has shape {tuple(v_cache.shape)}; for k_cache of shape {tuple(k_cache.shape)} "
            f"and v of shape {tuple(v.shape)} it must be {list(wanted)}"
        )
    for name, cache in (("k_cache", k_cache), ("v_cache", v_cache)):
        if cache.numel() and any(n > 1 and step == 0 for n, step in zip(cache.shape, cache.stride(), strict=True)):
            raise ValueError(
                f"kv_cache_append: {name} is expanded (strides {cache.stride()}), so slots share memory; pass a copy"
            )
    if overlap(k_cache, v_cache):
        where = f"{gap} bytes from where" if (gap := distance(k_cache, v_cache)) else "where"
        raise ValueError(
            f"kv_cache_append: v_cache begins {where} k_cache does and shares memory with it, so values would be "
            "written over keys; give each its own memory; keys that hold their values are written alone, by "
            "ops.kv_cache_append(k_cache, v_cache[..., :0], k, v[..., :0], lengths)"
        )


def _check_places(k_cache: Tensor, k: Tensor, lengths: Tensor, page_table: Tensor | None) -> None:
    for name, x in (("lengths", lengths), ("page_table", page_table)):
        if x is None:
            continue
        if x.dtype not in INTEGERS:
            raise TypeError(f"kv_cache_append: {name} has dtype {x.dtype}; it must be int32 or int64")
        if x.device != k_cache.device:
            raise ValueError(
                f"kv_cache_append: {name} is on {x.device}, k_cache on {k_cache.device}; move them to one device"
            )
    batch = k.shape[0]
    if lengths.ndim != 1 or lengths.shape[0] != batch:
        raise ValueError(
            f"kv_cache_append: lengths has shape {tuple(lengths.shape)}; it must be [{batch}], one for each row of k"
        )
    if page_table is None:
        if k_cache.shape[0] != batch:
            raise ValueError(
                f"kv_cache_append: k_cache has {k_cache.shape[0]} rows, k has {batch}; "
                "they must match unless page_table is given"
            )
    elif page_table.ndim != 2 or page_table.shape[0] != batch:
        raise ValueError(
            f"kv_cache_append: page_table has shape {tuple(page_table.shape)}; it must be [{batch}, pages]"
        )


def _check_rotation(k: Tensor, q: Tensor | None, cos: Tensor | None, sin: Tensor | None) -> None:
    batch, _, _, dim = k.shape
    if (cos is None) != (sin is None):
        raise ValueError(f"kv_cache_append: {'cos' if cos is None else 'sin'} is missing; give cos and sin, or neither")
    if q is not None:
        if cos is None:
            raise ValueError("kv_cache_append: q is given without cos and sin; it is only taken to be rotated")
        if q.ndim != 4 or q.shape[0] != batch or q.shape[3] != dim:
            raise ValueError(f"kv_cache_append: q has shape {tuple(q.shape)}; it must be [{batch}, H, Tq, {dim}]")
    if cos is None or sin is None:
        return
    if cos.shape != sin.shape or cos.dtype != sin.dtype:
        raise ValueError(
            f"kv_cache_append: sin is {tuple(sin.shape)} {sin.dtype}, cos {tuple(cos.shape)} {cos.dtype}; "
            "they must match"
        )
    tokens = reference.longest(k, q)
    per_token = cos.ndim == 3 and (cos.shape[0] == 1 or cos.shape[0] == batch) and cos.shape[1] == tokens
    if not (per_token or (cos.ndim == 2 and cos.shape[0] > 0)):
        raise ValueError(
            f"kv_cache_append: cos has shape {tuple(cos.shape)}; it must be [max_positions, R / 2] "
            f"with at least one position, [1, {tokens}, R / 2] or [{batch}, {tokens}, R / 2]"
        )
    if 2 * cos.shape[-1] > dim:
        raise ValueError(
            f"kv_cache_append: cos has {cos.shape[-1]} angles for {2 * cos.shape[-1]} features, but D is {dim}; "
            "give one angle for each pair: cos[..., : R // 2] or cos[..., ::2] of a table that holds each angle twice"
        )


def _check_scales(k_cache: Tensor, v_cache: Tensor, k_scale: Tensor | None, v_scale: Tensor | None) -> None:
    for name, cache, scale in (("k", k_cache, k_scale), ("v", v_cache, v_scale)):
        if scale is None:
            if cache.dtype in SMALL:
                raise ValueError(f"kv_cache_append: {name}_cache has dtype {cache.dtype}; give {name}_scale with it")
            continue
        if scale.dtype not in FLOATS:
            raise TypeError(
                f"kv_cache_append: {name}_scale has dtype {scale.dtype}; float16, bfloat16, float32 and float64 "
                "are supported"
            )
        if scale.device != cache.device:
            raise ValueError(
                f"kv_cache_append: {name}_scale is on {scale.device}, {name}_cache on {cache.device}; "
                "move them to one device"
            )
        heads = cache.shape[1]
        if scale.shape not in ((1, heads, 1), (1, 1, 1)):
            raise ValueError(
                f"kv_cache_append: {name}_scale has shape {tuple(scale.shape)}; it must be [1, {heads}, 1] or [1, 1, 1]"
            )


kv_cache_append = Op(
    reference.kv_cache_append,
    fake=_fake,
    outputs=("rotated_q",),
    public=1,
    check=_check,
    mutates=("k_cache", "v_cache"),
    apart=(("k_cache", "v_cache"),),
    kernels={"triton": "tilesmith.ops.attn.triton.cache"},
)
