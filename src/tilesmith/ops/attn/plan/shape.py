"""What a plan knows of a call: sizes and switches, never values and never addresses."""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import Tensor

from tilesmith.device.dropout import parts_dropout_flags
from tilesmith.engine.launcher import cdiv, next_power_of_2
from tilesmith.ops.attn import reference
from tilesmith.ops.attn.latent import begin_together, values_in_keys


class Shape(NamedTuple):
    """Hashable metadata of a call of attention or of its gradient.

    keys: of a cache in pages, the slots of a batch row. kv_bytes: of an element of k. window_left, window_right: the
    window with `causal` in it, -1 for unlimited. rare_dropout: its threshold, as an fp16, is a number. documents: of
    packed tokens, 0 without. same_documents, one_vector: whether queries and keys of documents have the same lengths
    in memory, and in one tensor. lists: heads of block lists, 0 without; list_rows: their batch rows; both also of the
    lists by keys, which a gradient walks, and of which list_entries is the room. page: slots of a page, 0 without
    pages; row_pages: pages of a batch row. bias: its shape. tma: which of q, k, v and dout TMA reads as they lie.
    wants: which of dq, dk, dv, dbias, dsinks are asked for. gradients_fp32: dq, dk and dv are fp32, not rounded.
    shared: v is the first columns of k, in memory. out_fp32: out is fp32, not rounded.
    """

    batch: int
    heads: int
    kv_heads: int
    tokens: int
    keys: int
    dim: int
    value_dim: int
    q_bytes: int
    kv_bytes: int
    causal: bool = False
    window_left: int = -1
    window_right: int = -1
    softcap: bool = False
    dropout: bool = False
    rare_dropout: bool = False
    deterministic: bool = False
    sinks: bool = False
    lengths: bool = False
    documents: int = 0
    same_documents: bool = True
    one_vector: bool = True
    lists: int = 0
    list_rows: int = 1
    lists_by_keys: int = 0
    list_rows_by_keys: int = 1
    block_q: int = 0
    block_k: int = 0
    page: int = 0
    row_pages: int = 0
    bias: tuple[int, ...] = ()
    mask: bool = False
    ids: bool = False
    prefix: bool = False
    alibi: bool = False
    tma: tuple[bool, ...] = (True, True, True, True)
    wants: tuple[bool, ...] = (True, True, True, False, False)
    list_entries: int = 0
    gradients_fp32: bool = False
    shared: bool = False
    out_fp32: bool = False

    @property
    def group(self) -> int:
        """Query heads that share a kv head; where kv heads are parts of groups (`schedule.part_sizes`), at most."""
        return cdiv(self.heads, self.kv_heads)

    @property
    def rows(self) -> int:
        """Heads of q of all batch rows."""
        return self.batch * self.heads

    @property
    def packed(self) -> bool:
        return self.documents > 0


class Window(NamedTuple):
    """The window of a call, and which of its edges hide any key."""

    left: int
    right: int
    hides_left: bool
    hides_right: bool


def window_of(s: Shape) -> Window:
    """The window of a call, with causal in it."""
    return Window(
        s.window_left, s.window_right, 0 <= s.window_left < s.keys - 1, 0 <= s.window_right < max(s.tokens - 1, 1)
    )


def columns(dim: int) -> int:
    """The columns of a tile: the head dim up to 64, 128 or 256; TMA fills in zeros."""
    return max(64, next_power_of_2(dim))


def column_parts(dim: int) -> tuple[int, int]:
    """The columns of a tile and of its rest (`hopper.columns`): 192 is 128 and 64, so that none is padded to 256."""
    return (128, 64) if 128 < dim <= 192 else (columns(dim), 0)


def rest_columns(dim: int) -> int:
    """The columns of products behind the first 64 at head dims from 65 to 96, the fewest that sums of powers of two
    allow; 0 at other head dims."""
    return (16 if dim <= 80 else 32) if 64 < dim <= 96 else 0


def key_tiles(dim: int, value_dim: int, shared: bool) -> tuple[int, int, bool]:
    """Columns of Triton's tile of keys, columns of a second one behind it (or 0), and whether values are of the first.
    shared: values are the first columns of the keys, in memory."""
    block = min(512, next_power_of_2(max(16, value_dim if shared else dim)))
    rest = next_power_of_2(max(16, dim - block)) if dim > block else 0
    return block, rest, shared


def is_narrow(s: Shape, window: Window, wide: int) -> bool:
    """Whether a window is so narrow that the keys of a tile are all there at once. wide: columns of the widest tile."""
    return window.hides_left and window.hides_right and window.left + window.right <= 128 >= wide and not s.packed


def shape_of(call: Any, tma: tuple[bool, ...] = (True, True, True, True)) -> Shape:
    """The metadata of a call; `call` is a named tuple of all arguments of the op."""
    q, k, v = call.q, call.k, call.v
    cu_q, cu_k, lists = call.cu_seqlens_q, call.cu_seqlens_k, call.block_offsets
    packed, drops = cu_q is not None, call.dropout_p > 0.0
    return Shape(
        q.shape[0], q.shape[1], k.shape[1], q.shape[2], reference.slots(k, call.page_table), q.shape[3], v.shape[3],
        q.element_size(), k.element_size(), call.causal, call.window_left, 0 if call.causal else call.window_right,
        call.softcap > 0.0, drops, drops and parts_dropout_flags(1, 1, call.dropout_p)["RARE"],
        call.deterministic, call.sinks is not None, call.kv_lengths is not None,
        cu_q.numel() - 1 if packed else 0, not packed or _same(cu_q, cu_k), cu_q is cu_k and _is_dense(cu_q),
        *_lists(lists), *_lists(call.block_offsets_t if call.block_offsets_t is not None else lists),
        0 if lists is None else call.block_q, 0 if lists is None else call.block_k,
        0 if call.page_table is None else k.shape[2], 0 if call.page_table is None else call.page_table.shape[1],
        () if call.bias is None else tuple(call.bias.shape), call.mask is not None, call.q_documents is not None,
        call.prefix_lengths is not None, call.alibi is not None, tma,
        (*getattr(call, "output_mask", (True, True, True, False, False)),), _list_entries(call),
        getattr(call, "gradients_fp32", False),
        values_in_keys(k, v),
    )  # fmt: skip


def _list_entries(call: Any) -> int:
    indices = call.block_indices if call.block_indices_t is None else call.block_indices_t
    return 0 if indices is None else indices.numel()


def _lists(offsets: Tensor | None) -> tuple[int, int]:
    return (0, 1) if offsets is None else (offsets.shape[1], offsets.shape[0])


def _same(a: Tensor, b: Tensor | None) -> bool:
    """Whether two tensors are one in memory."""
    return a is b or (b is not None and begin_together(a, b))


def _is_dense(x: Tensor | None) -> bool:
    return x is None or x.is_contiguous()
