"""What the launchers of attention's Hopper kernels share: refusals, descriptors, the order of tiles."""

from collections.abc import Sequence

import torch
from torch import Tensor

from tilesmith.device.alignment import tma_view
from tilesmith.device.dropout import kernel_numbers, kernel_seed, parts_dropout_flags
from tilesmith.device.gluon.shim import TensorDescriptor, gl
from tilesmith.engine.launch import cdiv, next_power_of_2

LOG2E = 1.4426950408889634
_TILES = {
    (rank, bits): gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=bits, rank=rank)
    for rank in (4, 5)
    for bits in (8, 16)
}


def wrong_dims(call) -> list[str]:
    """What is wrong with the head dims for a forward kernel."""
    reasons = []
    if any(cols % 8 or not 64 <= cols <= 256 for cols in (call.q.cols, call.v.cols)):
        reasons.append(f"the head dims are {call.q.cols} and {call.v.cols}; multiples of 8 from 64 to 256 are served")
    return reasons


def reasons_for_all(call) -> list[str]:
    """Why no Hopper kernel can serve a call."""
    reasons = []
    if call.arch.capability != (9, 0):
        reasons.append(f"{call.arch.name} has no warpgroup products; compute capability 9.0 is served")
    if call.q.dtype not in (torch.float16, torch.bfloat16):
        reasons.append(f"q is {call.q.dtype}; float16 and bfloat16 are served")
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


def dropout_arguments(call) -> dict:
    """What the kernels are told of a call's dropout: nothing, or dropout and DRAW."""
    if call.dropout_p == 0.0:
        return {}
    rows, keys = call.q.shape[0] * call.q.shape[1] * call.q.shape[2], call.k.shape[2]
    flags = parts_dropout_flags(rows, keys, call.dropout_p)
    drop = kernel_seed(call.seed, call.dropout_p), *kernel_numbers(call.dropout_p)
    even = keys % 8 == 0 and call.window_left < 0 and call.cu_seqlens_q is None
    return {"dropout": drop, "DRAW": (flags["RARE"], flags["SHORT"], even)}


def no_lists(call) -> list[str]:
    """Why a kernel that sees blocks by a mask alone cannot serve a call."""
    return [] if call.block_offsets is None else ["block_offsets: block lists are not walked"]


def list_reasons(call, block_q: int, block_k: int) -> list[str]:
    """Why a kernel of tiles of `block_q` queries and `block_k` keys cannot walk a call's block lists."""
    reasons = []
    if call.block_q % block_q or call.block_k % block_k:
        reasons.append(
            f"block lists of {call.block_q} queries by {call.block_k} keys; "
            f"multiples of {block_q} queries by multiples of {block_k} keys are served"
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


def window_of(call, keys: int) -> tuple[int, int, bool, bool]:
    """The window of a call, with causal in it, and which of its edges hide any of so many keys."""
    left, right = call.window_left, 0 if call.causal else call.window_right
    return left, right, 0 <= left < keys - 1, 0 <= right < max(call.q.shape[2] - 1, 1)


def score_factors(call) -> tuple[float, float]:
    """By what products of queries and keys are multiplied before the softcap's tanh (0: there is none), and then."""
    scale = call.q.shape[3] ** -0.5 if call.scale is None else call.scale
    return (scale / call.softcap, call.softcap * LOG2E) if call.softcap > 0.0 else (0.0, scale * LOG2E)


def is_narrow(window: tuple[int, int, bool, bool], packed: bool, columns: int) -> bool:
    """Whether a window (`window_of`) is so narrow that what a tile meets is there at once (`hopper_window`). packed:
    documents are; columns: of the widest tile."""
    left, right, has_left, has_right = window
    return has_left and has_right and left + right <= 128 and columns <= 128 and not packed


def run_of(choices: Sequence[int], more: int, blocks: int, rows: int, arch) -> int:
    """How many of a head's `blocks`, one of `choices`, a program does one after another where windows are narrow: with
    few runs of many blocks little is loaded twice, which costs as much as `more` blocks a run, with many runs none
    idles at the end. rows: batch * heads."""
    return min(choices, key=lambda run: cdiv(cdiv(blocks, run) * rows, arch.sms) * (run + more))


def columns_of(x: Tensor) -> int:
    """The columns of a tile of x: its head dim up to 64, 128 or 256; the accelerator fills in zeros."""
    return max(64, next_power_of_2(x.shape[3]))


def descriptor(x: Tensor, rows: int, packed: bool = False, heads: int = 1, columns: int = 0) -> TensorDescriptor:
    """x [B, H, T, D] for the tensor memory accelerator, in tiles of `rows` rows of `heads` heads, and of all columns or
    so many; of a copy, where its strides do not suit it. packed: coordinates are those of `hopper_corner.corner`."""
    x, strides = tma_view(x)
    shape, block = list(x.shape), [1, heads, rows, columns or columns_of(x)]
    if packed:
        _, head, token, _ = strides
        strides = [2**34 - token, token, head, token, 1]
        shape, block = [2**31 - 2**16, 2**31 - 2**16, shape[1], 2**30, shape[3]], [1, *block]
    return TensorDescriptor(x, shape, strides, block, _TILES[len(shape), 8 * x.element_size()])


def section(k: Tensor, heads: int, arch, alike: bool) -> int:
    """How many of the `heads` of q to work on together. k: [B, G, S, D]; alike: all tiles have the same work.

    Then it is those that share keys, which so come when they are needed (H200, head dim 128, 1k / 4k / 16k keys: 616 /
    717 / 738 TFLOP/s; by half of the L2 cache 575 / 695 / 703). Else so many that their keys and values stay in about
    half of the L2 cache, and in sections of one size, since the short tiles of the last one fill the end (16k causal,
    16 heads: by 4 726, by 3 698).
    """
    batch, kv_heads, keys, dim = k.shape
    group, rows = heads // kv_heads, batch * kv_heads
    if alike:
        return group
    fitting = max(1, arch.l2 // 2 // (keys * dim * 2 * k.element_size()))
    return cdiv(rows, max(1, rows // fitting)) * group


def shares_of(tiles: int, work: int, longest: int, least: int, arch, own: bool = False) -> int:
    """Into how many equal shares `work` steps of so many tiles are divided, of which the longest has so many: as many
    as there are multiprocessors, but no more than four a tile, and 0 where that spares the last programs fewer than
    `least` steps. own: where there are enough multiprocessors, each tile has shares of its own, as many as the others.
    """
    shares = min(arch.sms, 4 * tiles, work)
    if own and 0 < 2 * tiles <= arch.sms:
        shares -= shares % tiles
    return shares if longest * shares - work >= least * shares > 0 and work * (shares + 1) < 2**31 else 0
