"""What attention and merge_attention refuse: errors that name the argument, what came and what is allowed."""

import math

import torch
from torch import Tensor

from tilesmith.engine.argument_checks import floating
from tilesmith.ops.attn.reference import FACTOR_BLOCK, key_count

FLOATS = (torch.float64, torch.float32, torch.float16, torch.bfloat16)


def check_attention(
    q: Tensor, k: Tensor, v: Tensor, bias, mask, alibi, sinks, seed, cu_seqlens_q, cu_seqlens_k, kv_lengths,
    prefix_lengths, q_documents, k_documents, block_offsets, block_indices, block_offsets_t, block_indices_t,
    page_table, q_scale, k_scale, v_scale, scale, causal, window_left, window_right, softcap, dropout_p,
    max_seqlen_q, max_seqlen_k, block_q, block_k, deterministic,
) -> None:  # fmt: skip
    """Raise ValueError or TypeError for arguments of `attention` that do not fit together."""
    batch, heads, tokens, keys = _check_values(q, k, v, page_table, k_scale, v_scale, q_scale)
    _check_numbers(scale, window_left, window_right, softcap, dropout_p, max_seqlen_q, max_seqlen_k, block_q, block_k)
    documents = batch
    if cu_seqlens_q is not None or cu_seqlens_k is not None:
        documents = _check_packed(batch, q, cu_seqlens_q, cu_seqlens_k, kv_lengths, page_table)
    if page_table is not None:
        _integers("page_table", page_table, q, (documents, None))
        if kv_lengths is None and cu_seqlens_q is not None:
            raise ValueError("attention: kv_lengths must be given with cu_seqlens_q and page_table, got None")
    for name, x in (("kv_lengths", kv_lengths), ("prefix_lengths", prefix_lengths)):
        if x is not None:
            _integers(name, x, q, (documents,))
    if (q_documents is None) != (k_documents is None):
        raise ValueError("attention: q_documents and k_documents go together; one of them is None")
    if q_documents is not None:
        _integers("q_documents", q_documents, q, (batch, tokens))
        _integers("k_documents", k_documents, q, (batch, keys))
    if mask is not None:
        _check_plane("mask", mask, q, (torch.bool,), (batch, heads, tokens, keys))
    if bias is not None:
        _check_plane("bias", bias, q, (q.dtype, torch.float32), (batch, heads, tokens, keys))
    if alibi is not None:
        _floating("alibi", alibi, q)
        if tuple(alibi.shape) not in ((heads,), (batch, heads), (documents, heads)):
            raise ValueError(f"attention: alibi must be [{heads}] or [{documents}, {heads}], got {list(alibi.shape)}")
    if sinks is not None:
        _floating("sinks", sinks, q)
        if tuple(sinks.shape) != (heads,):
            raise ValueError(f"attention: sinks must be [{heads}], one for each query head, got {list(sinks.shape)}")
    if seed is not None:
        same_device("seed", seed, q)
        if seed.dtype != torch.int64 or tuple(seed.shape) != (2,):
            raise ValueError(f"attention: seed must be int64 [2] = (seed, offset), got {seed.dtype} {list(seed.shape)}")
    if any(x is not None for x in (block_offsets, block_indices, block_offsets_t, block_indices_t)):
        lists = (block_offsets, block_indices), (block_offsets_t, block_indices_t)
        _check_blocks(q, k, keys, lists, block_q, block_k)


def _check_values(q, k, v, page_table, k_scale, v_scale, q_scale) -> tuple[int, int, int, int]:
    check_shapes("attention", q, k, v, page_table is not None)
    for name, x in (("q", q), ("k", k), ("v", v)):
        small = x.dtype.itemsize == 1 and x.dtype not in (torch.bool, torch.uint8)
        if x.dtype not in FLOATS and not small:
            raise TypeError(f"attention: {name} has dtype {x.dtype}; float64, float32, float16, bfloat16 are supported")
    for name, x, factor in (("q", q, q_scale), ("k", k, k_scale), ("v", v, v_scale)):
        if factor is None and name == "q" and x.dtype.itemsize == 1:
            raise TypeError(f"attention: q has dtype {x.dtype}; give q_scale with it, or cast it to the dtype of out")
        if factor is None and (x.dtype.itemsize == 1 or x.dtype != q.dtype):
            raise TypeError(
                f"attention: {name} has dtype {x.dtype} and q {q.dtype}; give q, k and v one dtype, "
                f"or an 8-bit {name} with {name}_scale"
            )
        if factor is not None:
            check_factor("attention", name, x, factor, page_table is not None)
    batch, heads, tokens, _ = q.shape
    if page_table is not None and page_table.ndim != 2:
        raise ValueError(f"attention: page_table must be [batch, pages], got {list(page_table.shape)}")
    return batch, heads, tokens, key_count(batch, k, page_table)


def check_factor(op: str, name: str, x: Tensor, factor: Tensor, paged: bool = False) -> None:
    """Raise ValueError or TypeError for a factor `name`_scale that does not fit x [B, H, T, D], or pages of a cache."""
    same_device(f"{name}_scale", factor, x, op)
    floating(op, f"{name}_scale", factor)
    blocks = x.shape[2] if paged else -(-x.shape[2] // FACTOR_BLOCK)
    allowed = (x.shape[:1], x.shape[1:2], (x.shape[2], blocks))
    if factor.ndim != 3 or any(n != 1 and n not in sizes for n, sizes in zip(factor.shape, allowed)):
        raise ValueError(
            f"{op}: {name}_scale must be {list(x.shape[:3])}, where any dim may be 1 and the last "
            f"also the number of blocks of {FACTOR_BLOCK} tokens without pages, got {list(factor.shape)}"
        )


def check_angles(op: str, q: Tensor, positions: int, cos: Tensor | None, sin: Tensor | None) -> None:
    """Raise ValueError or TypeError for angles that do not turn q [B, *, *, D], its tokens below so many positions."""
    if (cos is None) != (sin is None):
        raise ValueError(f"{op}: cos and sin go together; one of them is None")
    if cos is None:
        return
    batch = q.shape[0]
    for name, x in (("cos", cos), ("sin", sin)):
        if x.dtype not in FLOATS:
            raise TypeError(f"{op}: {name} has dtype {x.dtype}; float64, float32, float16 or bfloat16 is supported")
        same_device(name, x, q, op)
        batches = x.ndim == 2 or (x.ndim == 3 and x.shape[0] in (1, batch))
        if not batches or x.shape[-2] < positions or not 0 < 2 * x.shape[-1] <= q.shape[3] or x.shape != cos.shape:
            raise ValueError(
                f"{op}: {name} must be [P, R/2] or [{batch} or 1, P, R/2] with P >= {positions} and R <= {q.shape[3]}, "
                f"and of cos' shape, got {list(x.shape)}"
            )


def check_rotate(op: str, rotate: bool, dim: int) -> None:
    """Raise ValueError for a head dim of which there is no Hadamard matrix."""
    if rotate and dim & (dim - 1):
        raise ValueError(f"{op}: rotate needs a head dim that is a power of two, got {dim}; pass rotate=False")


def check_shapes(name: str, q: Tensor, k: Tensor, v: Tensor, paged: bool = False) -> None:
    """Raise ValueError for q, k and v of op `name` that do not fit together. paged: k and v are pages of a cache."""
    for x_name, x in (("q", q), ("k", k), ("v", v)):
        if x.ndim != 4:
            alone = f"; give {x_name}[None], a batch of one" if x.ndim == 3 else ""
            raise ValueError(f"{name}: {x_name} must be [batch, heads, tokens, head dim], got {list(x.shape)}{alone}")
        same_device(x_name, x, q, name)
    batch, heads, _, dim = q.shape
    rows, kv_heads, _, k_dim = k.shape
    if v.shape[:3] != k.shape[:3]:
        raise ValueError(
            f"{name}: v must be [{', '.join(map(str, k.shape[:3]))}, head dim], with as many rows, heads and tokens "
            f"as k, got {list(v.shape)}"
        )
    if k_dim != dim:
        raise ValueError(f"{name}: k must have q's head dim {dim}, got {k_dim}")
    if dim == 0 or v.shape[3] == 0:
        raise ValueError(f"{name}: the head dims of q and v must be positive, got {dim} and {v.shape[3]}")
    if heads == 0 or kv_heads == 0:
        raise ValueError(f"{name}: q and k must have at least one head, got {heads} and {kv_heads}")
    if heads % kv_heads:
        raise ValueError(
            f"{name}: k has {kv_heads} heads, which does not divide the {heads} heads of q; "
            "give k and v a number that does"
        )
    if rows != batch and not paged:
        raise ValueError(f"{name}: k must have q's batch size {batch}, got {rows}")


def _check_numbers(
    scale, window_left, window_right, softcap, dropout_p, max_seqlen_q, max_seqlen_k, block_q, block_k
) -> None:
    if scale is not None and not 0.0 < scale < math.inf:
        raise ValueError(f"attention: scale must be a positive number, got {scale}; to change the sign, negate q")
    if not 0.0 <= softcap < math.inf:
        raise ValueError(f"attention: softcap must be 0 (none) or a positive number, got {softcap}")
    if not 0.0 <= dropout_p < 1.0:
        raise ValueError(f"attention: dropout_p must be in [0, 1), got {dropout_p}")
    for name, width in (("window_left", window_left), ("window_right", window_right)):
        if width < -1:
            raise ValueError(f"attention: {name} must be -1 (unlimited) or a number of keys, got {width}")
    for name, length in (("max_seqlen_q", max_seqlen_q), ("max_seqlen_k", max_seqlen_k)):
        if length < 0:
            raise ValueError(f"attention: {name} must be 0 (unknown) or a length, got {length}")
    for name, size in (("block_q", block_q), ("block_k", block_k)):
        if size < 0:
            raise ValueError(f"attention: {name} must be 0 (no block lists) or a positive number, got {size}")


def _check_packed(batch, q, cu_seqlens_q, cu_seqlens_k, kv_lengths, page_table) -> int:
    if batch != 1:
        raise ValueError(f"attention: with cu_seqlens_q the batch size must be 1 (tokens are packed), got {batch}")
    if cu_seqlens_q is None:
        raise ValueError("attention: cu_seqlens_k needs cu_seqlens_q")
    if (cu_seqlens_k is None) == (page_table is None):
        raise ValueError("attention: with cu_seqlens_q give either cu_seqlens_k, or page_table and kv_lengths")
    _integers("cu_seqlens_q", cu_seqlens_q, q, (None,))
    if cu_seqlens_q.numel() < 2:
        raise ValueError(f"attention: cu_seqlens_q must hold documents + 1 >= 2 numbers, got {cu_seqlens_q.numel()}")
    if cu_seqlens_k is not None:
        _integers("cu_seqlens_k", cu_seqlens_k, q, tuple(cu_seqlens_q.shape))
    return cu_seqlens_q.numel() - 1


def _check_plane(name, x, q, dtypes, shape) -> None:
    same_device(name, x, q)
    if x.dtype not in dtypes:
        allowed = " or ".join(dict.fromkeys(str(d) for d in dtypes))
        instead = "; what is added to scores goes in Score(bias=...)" if name == "mask" else ""
        raise TypeError(f"attention: {name} must be {allowed}, got {x.dtype}{instead}")
    if x.ndim != 4 or any(n != 1 and n != m for n, m in zip(x.shape, shape)):
        raise ValueError(f"attention: {name} must be {list(shape)}, where any dim may be 1, got {list(x.shape)}")


def _check_blocks(q, k, keys, lists, block_q, block_k) -> None:
    if block_q < 1 or block_k < 1:
        raise ValueError(f"attention: block_q and block_k must be positive, got {block_q} and {block_k}")
    counts = -(-q.shape[2] // block_q) + 1, -(-keys // block_k) + 1
    for (offsets, indices), count, end in zip(lists, counts, ("", "_t")):
        if (offsets is None) != (indices is None) or (not end and offsets is None):
            raise ValueError(f"attention: block_offsets{end} and block_indices{end} go together; one of them is None")
        if offsets is None:
            continue
        _integers(f"block_offsets{end}", offsets, q, (None, None, count))
        _integers(f"block_indices{end}", indices, q, (None,))
        if offsets.shape[0] not in (1, q.shape[0]) or offsets.shape[1] not in (1, q.shape[1], k.shape[1]):
            raise ValueError(
                f"attention: block_offsets{end} must be [{q.shape[0]} or 1, {q.shape[1]}, {k.shape[1]} or 1, {count}], "
                f"got {list(offsets.shape)}"
            )


def same_device(name: str, x: Tensor, q: Tensor, op: str = "attention") -> None:
    """Raise ValueError for an argument that is not where q is."""
    if x.device != q.device:
        raise ValueError(f"{op}: {name} is on {x.device}, q on {q.device}; move them to one device")


def _floating(name: str, x: Tensor, q: Tensor) -> None:
    same_device(name, x, q)
    floating("attention", name, x)


def _integers(name: str, x: Tensor, q: Tensor, shape: tuple) -> None:
    same_device(name, x, q)
    if x.dtype != torch.int32:
        raise TypeError(f"attention: {name} must be int32, got {x.dtype}")
    if x.ndim != len(shape) or any(m is not None and n != m for n, m in zip(x.shape, shape)):
        wanted = ", ".join("any" if m is None else str(m) for m in shape)
        raise ValueError(f"attention: {name} must be [{wanted}], got {list(x.shape)}")


def check_merge(
    out_a: Tensor, lse_a: Tensor, out_b: Tensor, lse_b: Tensor, name: str = "merge_attention", alike: bool = True
) -> None:  # fmt: skip
    """Raise ValueError or TypeError for arguments of `merge_attention` (name) that do not fit together. alike: both
    results must have one dtype."""
    for which, x in (("out_a", out_a), ("out_b", out_b)):
        if x.dtype not in FLOATS:
            raise TypeError(f"{name}: {which} has dtype {x.dtype}; float16 to float64 and bfloat16 are supported")
        if alike and x.dtype != out_a.dtype:
            raise TypeError(f"{name}: out_b must have out_a's dtype {out_a.dtype}, got {x.dtype}")
        if x.ndim < 2 or x.shape != out_a.shape:
            raise ValueError(
                f"{name}: out_a and out_b must be [..., head dim] of one shape, got {which} {list(x.shape)}"
            )
    wanted = torch.float64 if out_a.dtype == torch.float64 else torch.float32
    for which, x in (("lse_a", lse_a), ("lse_b", lse_b)):
        if x.dtype != wanted:
            raise TypeError(f"{name}: {which} must be {wanted}, got {x.dtype}")
        if x.shape != out_a.shape[:-1]:
            raise ValueError(f"{name}: {which} must be {list(out_a.shape[:-1])}, got {list(x.shape)}")
    for which, x in (("lse_a", lse_a), ("out_b", out_b), ("lse_b", lse_b)):
        if x.device != out_a.device:
            raise ValueError(f"{name}: {which} is on {x.device}, out_a on {out_a.device}; move them to one device")
