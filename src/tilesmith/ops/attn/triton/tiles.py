"""What the Triton attention kernels share: device functions on tiles, and the arguments of a launch.

16-bit scores live in units of log 2, so that exp2 needs no further factor; fp32 ones (EXACT) in natural units, where
their difference from lse loses no digits. Each query sees a range of keys (causal, window,
lengths and packed documents are all bounds of that range), so a tile of queries walks at most four stretches of keys:
prefix, partly visible, fully visible, partly visible; only the fully visible one, which is most of the work, runs
without mask arithmetic. The gradient by keys walks queries in the same way. With block lists (LIST_Q queries by LIST_K
keys, 0 without) a tile lies in one block of queries, and the walk has only the stretches of the blocks in its list.
"""

import triton
import triton.language as tl

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
def load_slope(alibi_ptr, strides, batch, head, rows, tokens, EXACT: tl.constexpr):
    """The slope of a head, or with a third stride those of rows, in their shape."""
    if len(strides) == 3:
        ptr = alibi_ptr + rows.to(tl.int64) * strides[2] + head * strides[1]
        slope = tl.load(ptr, mask=rows < tokens, other=0.0)
    else:
        slope = tl.load(alibi_ptr + batch * strides[0] + head * strides[1])
    return slope.to(tl.float32) * unit(EXACT)


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
    """Rows first.. of one head, [BLOCK, BLOCK_D], zero where there are none. BULK: by the TMA.
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
    """CTA -> (block, head). Heads whose operands fit in L2 together form a section; inside it all heads' longest
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
