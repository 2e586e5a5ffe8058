"""What the launchers of attention's Hopper kernels share: refusals, outputs, what kernels are given, descriptors."""

from typing import Any

import torch
from torch import Tensor

from tilesmith.device.alignment import tma_view
from tilesmith.device.dropout import kernel_numbers, kernel_seed
from tilesmith.device.gluon.shim import TensorDescriptor, gl
from tilesmith.device.rows import dense
from tilesmith.ops.attn import reference
from tilesmith.ops.attn.plan.model import Plan, Tile
from tilesmith.ops.attn.plan.shape import columns

LOG2E = 1.4426950408889634
_TILES = {
    (rank, bits, swizzle): gl.NVMMASharedLayout(swizzle_byte_width=swizzle, element_bitwidth=bits, rank=rank)
    for rank in (4, 5)
    for bits in (8, 16)
    for swizzle in (32, 64, 128)
}
_FLAT = gl.NVMMASharedLayout(swizzle_byte_width=0, element_bitwidth=32, rank=2)


def wrong_dims(call) -> list[str]:
    """What is wrong with the head dims for a forward kernel."""
    reasons = []
    if any(cols % 8 or not 64 <= cols <= 256 for cols in (call.q.cols, call.v.cols)):
        reasons.append(
            f"the head dims are {call.q.cols} and {call.v.cols}; multiples of 8 from 64 to 256 are supported"
        )
    return reasons


def wide_reasons(call) -> list[str]:
    """Why the kernels for head dims above 256 cannot serve a call."""
    reasons = []
    if any(cols % 8 or not 256 < cols <= 512 for cols in (call.q.cols, call.v.cols)):
        reasons.append(
            f"the head dims are {call.q.cols} and {call.v.cols}; "
            "multiples of 8 from 64 to 256, or both from 264 to 512, are supported"
        )
    if call.cu_seqlens_q is not None:
        reasons.append("cu_seqlens_q: with head dims above 256 no packed documents are walked")
    if call.block_offsets is not None:
        reasons.append("block_offsets: with head dims above 256 no block lists are walked")
    return reasons


def reasons_for_all(call) -> list[str]:
    """Why no Hopper kernel can serve a call."""
    reasons = []
    if call.arch.capability != (9, 0):
        reasons.append(f"{call.arch.name} has no warpgroup products; compute capability 9.0 is supported")
    if call.q.dtype not in (torch.float16, torch.bfloat16):
        reasons.append(f"q is {call.q.dtype}; float16 and bfloat16 are supported")
    for name in ("q", "k", "v"):
        if not getattr(call, name).unit:
            reasons.append(f"{name} has a last stride other than 1")
    for name, what in UNSERVED.items():
        if getattr(call, name) is not None:
            reasons.append(f"{name}: {what}")
    return reasons


def all_keys(call) -> list[str]:
    """Why a kernel that reads all keys of a row cannot serve a call."""
    if call.kv_lengths is not None and call.cu_seqlens_q is None:
        return ["kv_lengths: without cu_seqlens_q all keys count"]
    return []


def no_dropout(call) -> list[str]:
    """Why a kernel without dropout cannot serve a call."""
    return ["seed: nothing is dropped"] if call.seed is not None else []


def dropout_reasons(call) -> list[str]:
    """Why the kernels with dropout cannot serve a call."""
    reasons = []
    if call.seed is not None:
        if max(call.q.cols, call.v.cols) > 128:
            reasons.append("seed: with head dims above 128 nothing is dropped")
        if call.block_offsets is not None:
            reasons.append("seed: in block lists nothing is dropped")
    return reasons


def no_lists(call) -> list[str]:
    """Why a kernel that sees blocks by a mask alone cannot serve a call."""
    return [] if call.block_offsets is None else ["block_offsets: block lists are not walked"]


def list_reasons(call, block_q: int, block_k: int) -> list[str]:
    """Why a kernel of tiles of `block_q` queries and `block_k` keys cannot walk a call's block lists."""
    reasons = []
    if call.block_q % block_q or call.block_k % block_k:
        reasons.append(
            f"block lists of {call.block_q} queries by {call.block_k} keys; "
            f"multiples of {block_q} queries by multiples of {block_k} keys are supported"
        )
    if call.cu_seqlens_q is not None:
        reasons.append("block lists of packed documents are not walked")
    # keys that nobody sees may hold NaN, so no tile may hold keys that the block's queries do not see
    if call.window_left >= 0 or call.window_right >= 0:
        reasons.append("block lists: a window besides them is not known")
    if call.causal and not call.aligned:
        reasons.append("block lists: with a causal mask, S - T must be a multiple of 128")
    return reasons


UNSERVED = {
    "bias": "scores get nothing added",
    "mask": "only causal and window masks are known",
    "alibi": "scores know no distance",
    "prefix_lengths": "only causal and window masks are known",
    "q_documents": "only causal and window masks are known",
    "page_table": "paged keys and values are not read",
    "q_scale": "quantised values are not read",
    "k_scale": "quantised values are not read",
    "v_scale": "quantised values are not read",
}


def score_factors(call) -> tuple[float, float]:
    """By what products of queries and keys are multiplied before the softcap's tanh (0: there is none), and then."""
    scale = reference.scale_of(call.q, call.scale)
    return (scale / call.softcap, call.softcap * LOG2E) if call.softcap > 0.0 else (0.0, scale * LOG2E)


def outputs(call, plan: Plan, fp32: bool = False) -> tuple[Tensor, Tensor]:
    """out, of q's dtype or fp32, and lse of a forward: empty, or, where nothing is launched, those of queries that see
    no key."""
    q = call.q
    out = reference.out_like(q, call.v.shape[3], fp32)
    lse = torch.empty(q.shape[:3], dtype=torch.float32, device=q.device)
    if not plan.steps and lse.numel() > 0:
        lse.copy_(lse.new_full((), float("-inf")) if call.sinks is None else call.sinks.to(lse.dtype)[:, None])
        out.zero_()
    return out, lse


def call_tensors(call, out: Tensor, lse: Tensor) -> dict[str, Any]:
    """What kernels of a forward are given of a call, by the plan's names."""
    inner, outer = score_factors(call)
    cu_q = dense(call.cu_seqlens_q)
    given = {
        "q": call.q, "k": call.k, "v": call.v, "out": out, "lse": lse, "sinks": dense(call.sinks), "inner": inner,
        "outer": outer, "lengths": dense(call.kv_lengths), "cu_q": cu_q,
        "cu_k": cu_q if call.cu_seqlens_k is call.cu_seqlens_q else dense(call.cu_seqlens_k),
    }  # fmt: skip
    if call.dropout_p > 0.0:
        given["dropout"] = kernel_seed(call.seed, call.dropout_p), *kernel_numbers(call.dropout_p)
    return given | (block_lists(call.block_offsets, call.block_indices) if call.block_offsets is not None else {})


def block_lists(offsets: Tensor, indices: Tensor) -> dict[str, Any]:
    """Block lists by the plan's names."""
    return {"list_offsets": offsets, "list_indices": indices.contiguous(), "list_strides": offsets.stride()}


def describe(x: Tensor, tile: Tile) -> TensorDescriptor:
    """A TMA descriptor of x [B, H, T, D], or of a workspace, in the plan's tiles; of a copy, where strides do not suit
    TMA. A tile that is packed has the coordinates of `tile_offset.corner`."""
    if tile.flat:
        return TensorDescriptor(x, list(x.shape), [x.shape[1], 1], [tile.rows, x.shape[1]], _FLAT)
    x = x if x.ndim == 4 else x.flatten(0, -4)
    return descriptor(x, tile.rows, tile.packed, tile.heads, tile.columns)


def descriptor(x: Tensor, rows: int, packed: bool = False, heads: int = 1, wide: int = 0) -> TensorDescriptor:
    """`describe` of tiles of `rows` rows of `heads` heads, and of all columns or so many. Where these are no powers of
    two it has a `box` (`triton_private.run`), and the last of a tile's 64 or 128 rows are not loaded or stored."""
    x, strides = tma_view(x)
    shape, block = list(x.shape), [1, heads, rows, wide or columns(x.shape[3])]
    if packed:
        _, head, token, _ = strides
        strides = [2**34 - token, token, head, token, 1]
        shape, block = [2**31 - 2**16, 2**31 - 2**16, shape[1], 2**30, shape[3]], [1, *block]
    swizzle = 128 if block[-1] >= 64 else block[-1] * x.element_size()
    layout = _TILES[len(shape), 8 * x.element_size(), swizzle]
    if rows & (rows - 1) or heads & (heads - 1):  # Triton knows tiles of powers of two alone: the box is a part of one
        made = TensorDescriptor(x, shape, strides, [1, 1, 64 if rows <= 64 else 128, block[-1]], layout)
        made.box = tuple(block[:-1])
        return made
    return TensorDescriptor(x, shape, strides, block, layout)
