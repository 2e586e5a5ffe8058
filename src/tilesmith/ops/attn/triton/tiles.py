"""What the Triton attention kernels share: device functions on tiles, and the arguments of a launch.

16-bit scores live in units of log 2, so that exp2 needs no further factor; fp32 ones (EXACT) in natural units, where
their difference from lse loses no digits. Each query sees a range of keys (causal, window,
lengths and packed documents are all bounds of that range), so a tile of queries walks at most four stretches of keys:
prefix, partly visible, fully visible, partly visible; only the fully visible one, which is most of the work, runs
without mask arithmetic. The gradient by keys walks queries in the same way. With block lists (LIST_Q queries by LIST_K
keys, 0 without) a tile lies in one block of queries, and the walk has only the stretches of the blocks in its list.
"""

import math

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from tilesmith.device.alignment import tma_strides
from tilesmith.device.dropout import dropout_flags, kernel_numbers, kernel_seed
from tilesmith.device.rows import dense
from tilesmith.device.triton.dropout import keep_tile
from tilesmith.device.triton.philox import load_key

LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)
FAR = tl.constexpr(1 << 30)  # beyond every token


@triton.jit
def tanh(x, EXACT: tl.constexpr):
    if EXACT:
        # 1 - e loses digits near 0, which a large softcap would multiply: below 0.6 a polynomial of x² (fitted at
        # Chebyshev's points, off by 3e-9), above it a quotient that is at most 0.47 of what it is taken from
        z = x * x
        series = -0.33333284 + z * (0.13331705 + z * (-0.05376992 + z * (0.02075748 + z * -0.00585643)))
        y = 1.0 - 2.0 / (1.0 + tl.exp2(tl.abs(x) * (2.0 * LOG2E)))
        return tl.where(z < 0.36, x + x * z * series, tl.where(x < 0, -y, y))
    e = tl.exp2(tl.abs(x) * (-2.0 * LOG2E))
    y = (1.0 - e) / (1.0 + e)
    return tl.where(x < 0, -y, y)


@triton.jit
def unit(EXACT: tl.constexpr):
    """What one natural unit of score is in the kernels' units."""
    return 1.0 if EXACT else LOG2E


@triton.jit
def power(x, EXACT: tl.constexpr):
    """exp of a score."""
    if EXACT:
        return tl.exp(x)
    return tl.exp2(x)


@triton.jit
def add_product(total, a, b, real):
    """total + a @ b, for rows of the total that are `real`. A product in fp32 is summed by itself first, and the choice
    keeps the compiler from joining the sums: in one chain through 686 queries dk is off by 3.3e-6, in blocks of 32 by
    6.5e-7, PyTorch's by 2.0e-6 (323 keys, head dim 32, on a CPU)."""
    if a.dtype == tl.float32:
        return total + tl.where(real[:, None], tl.dot(a, b, input_precision="ieee"), 0.0)
    return tl.dot(a, b, total)


@triton.jit
def load_slope(alibi_ptr, strides, batch, head, EXACT: tl.constexpr):
    return tl.load(alibi_ptr + batch * strides[0] + head * strides[1]).to(tl.float32) * unit(EXACT)


@triton.jit
def find_document(cu_ptr, documents, index):
    """The last document that starts at or before each token."""
    low = index * 0
    high = low + documents
    width = documents
    while width > 1:
        middle = (low + high) // 2
        after = tl.load(cu_ptr + middle) <= index
        low = tl.where(after, middle, low)
        high = tl.where(after, high, middle)
        width = (width + 1) // 2
    return low


@triton.jit
def span(document, cu_q_ptr, cu_k_ptr, lengths_ptr, prefix_ptr, tokens, keys):
    """Where the queries of a document (or batch row) end, where its keys begin and end, where its prefix ends."""
    q_begin = 0
    q_end = tokens
    k_begin = 0
    k_end = keys
    if cu_q_ptr is not None:
        q_begin = tl.load(cu_q_ptr + document)
        q_end = tl.load(cu_q_ptr + document + 1)
        k_begin = tl.load(cu_k_ptr + document)
        k_end = tl.load(cu_k_ptr + document + 1)
    if lengths_ptr is not None:
        k_end = tl.minimum(k_end, k_begin + tl.load(lengths_ptr + document))
    prefix_end = k_begin
    if prefix_ptr is not None:
        prefix_end = tl.minimum(k_end, k_begin + tl.load(prefix_ptr + document))
    return q_begin, q_end, k_begin, k_end, prefix_end


@triton.jit
def key_range(row, shift, k_begin, k_end, prefix_end, left, right, LEFT: tl.constexpr, RIGHT: tl.constexpr):
    """First and last (exclusive) key that each query sees; with LEFT, the prefix comes on top."""
    lo = k_begin + row * 0
    hi = k_end + row * 0
    if RIGHT:
        hi = tl.minimum(hi, row + shift + right + 1)
    if LEFT:
        lo = tl.maximum(lo, row + shift - left)
    else:
        hi = tl.maximum(hi, prefix_end)
    return lo, hi


@triton.jit
def query_range(
    col, shift, q_begin, q_end, prefix_end, left, right, LEFT: tl.constexpr, RIGHT: tl.constexpr, PREFIX: tl.constexpr
):
    """First and last (exclusive) query that sees each key."""
    lo = q_begin + col * 0
    hi = q_end + col * 0
    if RIGHT:
        lo = tl.maximum(lo, col - shift - right)
    if LEFT:
        hi = tl.minimum(hi, col - shift + left + 1)
    if PREFIX:
        lo = tl.where(col < prefix_end, q_begin, lo)
        hi = tl.where(col < prefix_end, q_end, hi)
    return lo, hi


@triton.jit
def stretches(begin, outer_hi, full_lo, full_hi, SPARSE: tl.constexpr, BLOCK: tl.constexpr):
    """Begin and end of the fully visible blocks of a walk that starts at `begin`."""
    if SPARSE:
        return begin, begin
    full_begin = begin + tl.cdiv(tl.maximum(full_lo - begin, 0), BLOCK) * BLOCK
    full_end = begin + tl.maximum(tl.minimum(full_hi, outer_hi) - begin, 0) // BLOCK * BLOCK
    empty = full_end <= full_begin
    return tl.where(empty, begin, full_begin), tl.where(empty, begin, full_end)


@triton.jit
def tiles_in(size, BLOCK: tl.constexpr, LIST: tl.constexpr):
    """How many tiles of BLOCK rows there are, in blocks of LIST rows each."""
    if LIST > 0:
        return tl.cdiv(size, LIST) * ((LIST + BLOCK - 1) // BLOCK)
    return tl.cdiv(size, BLOCK)


@triton.jit
def place_of(tile, size, BLOCK: tl.constexpr, LIST: tl.constexpr):
    """The first row of a tile, and where the tile ends."""
    start = tile * BLOCK
    end = size
    if LIST > 0:
        per: tl.constexpr = (LIST + BLOCK - 1) // BLOCK
        block = tile // per
        start = block * LIST + (tile - block * per) * BLOCK
        end = tl.minimum(size, block * LIST + LIST)
    return start, end


@triton.jit
def list_of(offsets_ptr, indices_ptr, strides, share, batch, head, block):
    """Where the list of a block starts, and its length. share: heads that have a list in common."""
    place = offsets_ptr + batch.to(tl.int64) * strides[0] + (head // share).to(tl.int64) * strides[1]
    place += block * strides[2]
    begin = tl.load(place)
    return indices_ptr + begin, tl.load(place + strides[2]) - begin


@triton.jit
def list_walk(
    list_ptr, count, lo, hi, full_lo, full_hi, SPARSE: tl.constexpr, BLOCK: tl.constexpr, LIST: tl.constexpr
):  # fmt: skip
    """Begin and end of a walk over the blocks of a list, of those that meet [lo, hi); and of the blocks among them that
    lie in [full_lo, full_hi). Its unit is a row as if the blocks in the list lay one after another (`listed`)."""
    STEPS: tl.constexpr = (LIST + BLOCK - 1) // BLOCK * BLOCK
    begin, end = count * 0, count * 0
    full_begin, full_end = count * 0, count * 0
    for first in range(0, count, 128):
        place = first + tl.arange(0, 128)
        block = tl.load(list_ptr + place, mask=place < count, other=FAR)
        begin += tl.sum((block < lo // LIST).to(tl.int32))
        end += tl.sum((block < tl.cdiv(hi, LIST)).to(tl.int32))
        full_begin += tl.sum((block < tl.cdiv(full_lo, LIST)).to(tl.int32))
        full_end += tl.sum((block < full_hi // LIST).to(tl.int32))
    end = tl.maximum(begin, end)
    full_begin = tl.minimum(tl.maximum(full_begin, begin), end)
    full_end = tl.minimum(tl.maximum(full_end, full_begin), end)
    if SPARSE or LIST % BLOCK != 0:
        full_begin, full_end = begin, begin
    return begin * STEPS, end * STEPS, full_begin * STEPS, full_end * STEPS


@triton.jit
def listed(list_ptr, place, BLOCK: tl.constexpr, LIST: tl.constexpr):
    """The row where a step of a walk over a list starts, and where its block ends."""
    STEPS: tl.constexpr = (LIST + BLOCK - 1) // BLOCK * BLOCK
    entry = place // STEPS
    block = tl.load(list_ptr + entry) * LIST
    first = block + place - entry * STEPS
    if LIST % 16 == 0:
        first = tl.multiple_of(first, 16)
    return first, block + LIST


@triton.jit
def key_walk(
    start, end, batch, tokens, keys, documents, cu_q_ptr, cu_k_ptr, lengths_ptr, prefix_ptr, bounds_ptr,
    list_ptr, count, left, right,
    LEFT: tl.constexpr, RIGHT: tl.constexpr, SPARSE: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    LIST_K: tl.constexpr,
):  # fmt: skip
    """What a tile of queries needs to know to walk the keys: each row's range, and where the stretches begin and end.

    The walk has blocks at begin, begin + BLOCK_N, ... stop, without those in [skip, skip + skipped) (between a prefix
    and a window). Those in [full_begin, full_end) need no mask. The tile sees no key outside [lo, hi). With a list the
    walk's unit is that of `list_walk`.
    """
    rows = start + tl.arange(0, BLOCK_M)
    if cu_q_ptr is not None:
        document = find_document(cu_q_ptr, documents, rows)
        _, q_end, k_begin, k_end, prefix_end = span(document, cu_q_ptr, cu_k_ptr, lengths_ptr, prefix_ptr, tokens, keys)
        real = rows < tl.load(cu_q_ptr + documents)
        shift = k_end - q_end
        row_lo, row_hi = key_range(rows, shift, k_begin, k_end, prefix_end, left, right, LEFT, RIGHT)
        row_lo = tl.where(real, row_lo, FAR)
        row_hi = tl.where(real, row_hi, 0)
        prefix_begin = tl.where(real, k_begin, FAR)
        prefix_end = tl.where(real, prefix_end, 0)
        first_prefix, last_prefix = tl.min(prefix_begin, 0), tl.max(prefix_end, 0)
        lo, full_lo, hi, full_hi = tl.min(row_lo, 0), tl.max(row_lo, 0), tl.max(row_hi, 0), tl.min(row_hi, 0)
    else:
        _, q_end, k_begin, k_end, prefix = span(batch, None, None, lengths_ptr, prefix_ptr, tokens, keys)
        move = k_end - q_end
        row_lo, row_hi = key_range(rows, move, k_begin, k_end, prefix, left, right, LEFT, RIGHT)
        lo, full_hi = key_range(start, move, k_begin, k_end, prefix, left, right, LEFT, RIGHT)
        last = tl.minimum(start + BLOCK_M, end) - 1
        full_lo, hi = key_range(last, move, k_begin, k_end, prefix, left, right, LEFT, RIGHT)
        shift = rows * 0 + move
        prefix_begin, prefix_end = rows * 0, rows * 0 + prefix
        first_prefix, last_prefix = start * 0, start * 0 + prefix
    if bounds_ptr is not None:
        bounds_ptr += (batch * tl.cdiv(tokens, BLOCK_M) + start // BLOCK_M) * 2
        lo = tl.maximum(lo, tl.load(bounds_ptr))
        hi = tl.minimum(hi, tl.load(bounds_ptr + 1))
    begin = lo // 16 * 16
    skip = begin
    skipped = begin * 0
    if prefix_ptr is not None and LEFT:
        window = tl.minimum(lo, hi)  # where there is no window at all, nothing is left but the prefix
        begin = tl.minimum(begin, first_prefix // 16 * 16)
        window = begin + tl.maximum(window - begin, 0) // BLOCK_N * BLOCK_N
        skip = tl.minimum(begin + tl.cdiv(tl.maximum(last_prefix - begin, 0), BLOCK_N) * BLOCK_N, window)
        skipped = window - skip
        lo = tl.minimum(lo, first_prefix)
        hi = tl.maximum(hi, last_prefix)
    stop = hi
    if LIST_K > 0:
        begin, stop, full_begin, full_end = list_walk(
            list_ptr, count, lo, hi, full_lo, full_hi, SPARSE, BLOCK_N, LIST_K
        )
        skip, skipped = begin, begin * 0
    else:
        full_begin, full_end = stretches(skip + skipped, hi, full_lo, full_hi, SPARSE, BLOCK_N)
    return (rows, row_lo, row_hi, shift, prefix_begin, prefix_end, lo, hi, begin, stop, skip, skipped,
            full_begin, full_end)  # fmt: skip


@triton.jit
def masked_block(first, skip, skipped, full_begin, full_end, PREFIX_ON_TOP: tl.constexpr):
    """The block that the walk over partly visible blocks visits at `first`: past what it skips and what is full."""
    if PREFIX_ON_TOP:
        first += tl.where(first >= skip, skipped, 0)
    first += tl.where(first >= full_begin, full_end - full_begin, 0)
    return tl.multiple_of(first, 16)


@triton.jit
def load_tile(
    ptr, desc, batch, head, first, stride, lo, hi,
    DIM: tl.constexpr, BLOCK: tl.constexpr, BLOCK_D: tl.constexpr, BULK: tl.constexpr, CHECKED: tl.constexpr,
):  # fmt: skip
    """Rows first.. of one head, [BLOCK, BLOCK_D], zero where there are none. BULK: by the tensor memory accelerator.
    CHECKED: only rows in [lo, hi) are read."""
    if BULK:
        return tl.reshape(desc.load([batch, head, first, 0]), (BLOCK, BLOCK_D))
    row = tl.arange(0, BLOCK)
    col = tl.arange(0, BLOCK_D)
    tile = ptr + first.to(tl.int64) * stride + (row.to(tl.int64) * stride)[:, None] + col[None, :]
    if CHECKED:
        held = ((first + row >= lo) & (first + row < hi))[:, None]
        if DIM != BLOCK_D:
            held = held & (col < DIM)[None, :]
        return tl.load(tile, mask=held, other=0.0)
    if DIM != BLOCK_D:
        return tl.load(tile, mask=(col < DIM)[None, :], other=0.0)
    return tl.load(tile)


@triton.jit
def load_plane(ptr, strides, rows, cols, tokens, keys, other):
    """Elements (rows, cols) of one head's [T, S] tensor with any strides, 0 among them."""
    held = (rows < tokens) & (cols < keys)
    return tl.load(ptr + rows.to(tl.int64) * strides[2] + cols.to(tl.int64) * strides[3], mask=held, other=other)


@triton.jit
def attention_scores(
    qk, rows, cols, shift, bias_ptr, bias_strides, slope, tokens, keys, inner, outer,
    ALIBI: tl.constexpr, SOFTCAP: tl.constexpr, EXACT: tl.constexpr,
):  # fmt: skip
    """Scores, and tanh of the softcap (whose square the gradient needs)."""
    bent = qk
    if SOFTCAP:
        bent = tanh(qk * inner, EXACT)
    score = bent * outer
    if ALIBI:
        score -= slope * tl.abs(rows + shift - cols).to(tl.float32)
    if bias_ptr is not None:
        score += load_plane(bias_ptr, bias_strides, rows, cols, tokens, keys, 0.0).to(tl.float32) * unit(EXACT)
    return score, bent


@triton.jit
def kept_probabilities(
    seed_ptr, head_row, start_m, start_n, tokens, keys, drop_below,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, LANES: tl.constexpr, SHORT: tl.constexpr,
):  # fmt: skip
    """Which probabilities [BLOCK_M, BLOCK_N] survive dropout. head_row: batch * heads + head."""
    row = head_row.to(tl.int64) * tokens + (start_m + tl.arange(0, BLOCK_M))[:, None]
    return keep_tile(load_key(seed_ptr), row * keys + start_n, drop_below, BLOCK_N, LANES, SHORT)


@triton.jit
def schedule(blocks, heads, section, LAST_FIRST: tl.constexpr):
    """Program -> (block, head). Heads whose operands fit in L2 together form a section; inside it all heads' longest
    blocks come first, so that the short ones fill the end."""
    pid = tl.program_id(0)
    number = pid // (section * blocks)
    inside = pid - number * (section * blocks)
    width = tl.minimum(section, heads - number * section)
    block = inside // width
    head = number * section + inside - block * width
    if LAST_FIRST:
        block = blocks - 1 - block
    return block, head


def launch_arguments(call) -> dict:
    """The arguments that forward and gradients of a call share, by the kernels' parameter names."""
    q, k, v, mask, cu_seqlens_q = call.q, call.k, call.v, call.mask, call.cu_seqlens_q
    batch, heads, tokens, dim = q.shape
    keys = k.shape[2]
    scale = dim**-0.5 if call.scale is None else call.scale
    window_left, window_right = call.window_left, 0 if call.causal else call.window_right
    left, right = 0 <= window_left < keys - 1, 0 <= window_right < max(tokens - 1, 1)
    sparse = mask is not None or call.q_documents is not None
    packed, lengths = cu_seqlens_q is not None, call.kv_lengths is not None
    whole = (batch, heads, tokens, keys)
    mask = None if mask is None else mask.view(torch.uint8).expand(whole)
    # where documents have as many keys as queries, only lengths leave tokens in the midst of others that nobody meets
    unequal = packed and (lengths or cu_seqlens_q.data_ptr() != call.cu_seqlens_k.data_ptr())
    has_lists = call.block_offsets is not None
    return {
        "q_ptr": q, "k_ptr": k, "v_ptr": v, "bias_ptr": call.bias, "mask_ptr": mask,
        "alibi_ptr": call.alibi, "seed_ptr": kernel_seed(call.seed, call.dropout_p),
        "cu_q_ptr": dense(cu_seqlens_q), "cu_k_ptr": dense(call.cu_seqlens_k),
        "lengths_ptr": dense(call.kv_lengths), "prefix_ptr": dense(call.prefix_lengths),
        "q_documents_ptr": dense(call.q_documents), "k_documents_ptr": dense(call.k_documents),
        **list_arguments(call.block_offsets, call.block_indices, batch, heads),
        "LIST_Q": call.block_q if has_lists else 0, "LIST_K": call.block_k if has_lists else 0,
        "q_strides": q.stride(), "k_strides": k.stride(), "v_strides": v.stride(),
        "bias_strides": None if call.bias is None else call.bias.expand(whole).stride(),
        "mask_strides": None if mask is None else mask.stride(),
        "alibi_strides": None if call.alibi is None else call.alibi.expand(batch, heads).stride(),
        "batches": batch, "heads": heads, "GROUP": heads // k.shape[1], "tokens": tokens, "keys": keys,
        "documents": cu_seqlens_q.numel() - 1 if packed else 0,
        "inner": scale / call.softcap if call.softcap > 0.0 else 0.0,
        "outer": (call.softcap if call.softcap > 0.0 else scale) * (1.0 if q.dtype == torch.float32 else LOG2E.value),
        "window_left": window_left, "window_right": window_right,
        "DIM": dim, "DIM_V": v.shape[3], "BLOCK_D": _padded(dim), "BLOCK_DV": _padded(v.shape[3]),
        "LEFT": left, "RIGHT": right, "SOFTCAP": call.softcap > 0.0, "DROPOUT": call.dropout_p > 0.0,
        **_dropout(call.dropout_p, batch * heads * tokens, keys, call.block_k if has_lists else 0),
        "PADDED": packed or lengths or (right and tokens > keys) or (left and keys > tokens),
        "SPARSE": sparse,
        "CLEAN": sparse or has_lists or unequal or (left and keys > tokens and call.prefix_lengths is not None),
    }  # fmt: skip


def _dropout(dropout_p: float, rows: int, keys: int, block_k: int) -> dict:
    """What `kept_probabilities` is told of `rows` of `keys` probabilities; block_k: of block lists, 0 without."""
    if dropout_p == 0.0:
        return {"drop_below": 0, "keep_scale": 1.0, "LANES": 1, "SHORT": True}
    drop_below, keep_scale = kernel_numbers(dropout_p)
    step = max(1, math.gcd(keys, block_k))  # tiles start at multiples of it, or of 16
    return {"drop_below": drop_below, "keep_scale": keep_scale, **dropout_flags(rows * keys // step, step, 2)}


def list_arguments(offsets: Tensor | None, indices: Tensor | None, batch: int, heads: int) -> dict:
    """Block lists as arguments of a kernel."""
    if offsets is None:
        return {"offsets_ptr": None, "indices_ptr": None, "list_strides": None, "list_share": 1}
    strides = offsets.expand(batch, -1, -1).stride()
    share = heads // offsets.shape[1]
    return {"offsets_ptr": offsets, "indices_ptr": indices.contiguous(), "list_strides": strides, "list_share": share}


def within(block: int, size: int) -> int:
    """A tile's rows, so that it is not much larger than a block of a list."""
    return min(block, max(16, triton.next_power_of_2(size))) if size else block


def summed(block: int, mask: Tensor | None, dropout_p: float) -> int:
    """A tile's rows that a product sums over: at least 32 with a mask and dropout. From the mask's 8 bits and the join
    of random numbers behind an operand, Triton 3.6 lays 8 rows into each of 4 threads; with 16 rows dk was off by 7."""
    return max(block, 32) if mask is not None and dropout_p > 0.0 else block


def tile_count(size: int, block: int, list_size: int) -> int:
    """How many tiles of `block` rows `tiles_in` counts."""
    return triton.cdiv(size, list_size) * triton.cdiv(list_size, block) if list_size else triton.cdiv(size, block)


def descriptor(x: Tensor, rows: int) -> TensorDescriptor | None:
    """A descriptor of x [B, H, T, D] for the tensor memory accelerator, in tiles of `rows` rows, where x allows one."""
    strides = tma_strides(x)
    if strides is None or x.numel() == 0:
        return None
    return TensorDescriptor(x, list(x.shape), strides, [1, 1, rows, _padded(x.shape[3])])


def descriptors(bulk: bool, tensors: tuple[Tensor, Tensor], rows: int) -> tuple:
    """Descriptors of two tensors that a kernel streams, or (None, None) where it must use pointers."""
    found = tuple(descriptor(x, rows) for x in tensors) if bulk else (None,)
    return (None, None) if None in found else found


def has_bulk_copies(arch, dtype: torch.dtype) -> bool:
    """Whether tiles of `dtype` travel by the tensor memory accelerator."""
    return arch.kind == "cuda" and arch.capability >= (9, 0) and dtype.itemsize == 2


def document_bounds(own: Tensor | None, other: Tensor | None, block: int, other_block: int) -> Tensor | None:
    """For each block of `own` [B, X], the first and last (exclusive) token of `other` [B, Y] whose id can be in it.

    int32 [B, blocks, 2]; exact to the block where ids ascend, else only a bound.
    """
    if own is None or own.numel() == 0 or other.numel() == 0:
        return None
    while other.shape[1] > 4096 * other_block:  # the table below has blocks x other blocks entries
        other_block *= 2
    low, high = _extremes(own, block)
    other_low, other_high = _extremes(other, other_block)
    meets = (low[:, :, None] <= other_high[:, None, :]) & (high[:, :, None] >= other_low[:, None, :])
    begin = torch.arange(0, other.shape[1], other_block, dtype=torch.int32, device=own.device)
    first = torch.where(meets, begin, FAR.value).amin(-1)
    last = torch.where(meets, begin + other_block, 0).amax(-1)
    return torch.stack((first, last.clamp(max=other.shape[1])), -1)


def section(streamed: Tensor, also_streamed: Tensor, share: int, arch) -> int:
    """How many program heads to work on together, so that the two tensors that their programs stream stay in half of
    the L2 cache. share: program heads that stream the same head of the tensors."""
    batch, heads, tokens, _ = streamed.shape
    size = tokens * (streamed.shape[3] + also_streamed.shape[3]) * streamed.element_size()
    fitting = arch.l2 // 2 // max(size, 1) if arch.l2 else batch * heads
    return max(1, min(fitting, batch * heads)) * share


def sizes(call) -> dict[str, int]:
    """Sizes on which the best tiles depend. causal and drawn are 8 or 1: far apart, since tuning rows are looked up by
    ratio."""
    q, k, v = call.q, call.k, call.v
    return {
        "rows": q.shape[0] * q.shape[1], "tokens": q.shape[2], "keys": k.shape[2], "dim": q.shape[3],
        "value_dim": v.shape[3], "causal": 8 if call.causal else 1, "drawn": 8 if call.dropout_p > 0.0 else 1,
    }  # fmt: skip


def rejects(call) -> list[str]:
    """Why these kernels cannot serve a call of attention or attention_vjp."""
    reasons = []
    if call.page_table is not None:
        reasons.append("page_table: paged keys and values are not read")
    if call.q_scale is not None or call.k_scale is not None or call.v_scale is not None:
        reasons.append("q_scale, k_scale, v_scale: quantised values are not read")
    if call.q.dtype not in (torch.float32, torch.float16, torch.bfloat16):
        reasons.append(f"q is {call.q.dtype}; float32, float16 and bfloat16 are served")
    for name, x in (("q", call.q), ("v", call.v)):
        if x.cols % 8 or not 16 <= x.cols <= 256:
            reasons.append(f"{name} has head dim {x.cols}; multiples of 8 from 16 to 256 are served")
    for name, x in (("q", call.q), ("k", call.k), ("v", call.v)):
        if not x.unit:
            reasons.append(f"{name} has a last stride other than 1")
    return reasons


def _extremes(ids: Tensor, block: int) -> tuple[Tensor, Tensor]:
    places = torch.arange(triton.cdiv(ids.shape[1], block) * block, device=ids.device).clamp(max=ids.shape[1] - 1)
    blocks = ids[:, places].unflatten(1, (-1, block))
    return blocks.amin(-1), blocks.amax(-1)


def _padded(dim: int) -> int:
    return max(16, triton.next_power_of_2(dim))
