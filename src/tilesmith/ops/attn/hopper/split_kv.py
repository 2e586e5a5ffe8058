"""Device kernel of attention's forward on Hopper for few tiles of queries: the keys of each are split over CTAs.

Rows of a tile are pairs of a token and a query head of one kv head, so that 16 tokens of 8 heads that share their keys
are one tile of 128 rows. Results of the splits are combined by a second kernel (`combine`), or written at once
where there is one split. Products and softmax are those of `forward`. Keys and values of 8 bits are made fp16 by
two warpgroups of their own, and queries behind a power of two of each row: to bf16 they would take many instructions.
"""

from tilesmith.device.gluon.shim import (
    aggregate,
    fence_async,
    gl,
    gluon,
    launch_dependents,
    mbarrier_arrive,
    mbarrier_expect,
    mbarrier_wait,
    mbarriers,
    reinterpret,
    smem_tiles,
    tma_copy,
    tma_load,
    tma_store,
    tma_store_wait,
    wgmma,
    wgmma_wait,
)
from tilesmith.ops.attn.hopper.softmax import (
    NOTHING,
    exponentiate,
    finish_softmax,
    in_mask,
    mask_before,
    pack,
    tanh,
    unpack,
)
from tilesmith.ops.attn.hopper.tile_offset import corner
from tilesmith.ops.attn.hopper.walk import Walk


@gluon.jit
def even_range(blocks, index, count, inverse):
    """The first block of one of `count` even ranges, and how many it has. inverse: 1 / count, within one part in 2**22;
    divisions of integers take as long as starting the first loads does."""
    each = (blocks.to(gl.float32) * inverse).to(gl.int32)
    each = gl.where(each * count > blocks, each - 1, each)
    each = gl.where((each + 1) * count <= blocks, each + 1, each)
    rest = blocks - each * count
    return index * each + gl.minimum(index, rest), gl.where(index < rest, each + 1, each)


@aggregate
class SplitKv:
    """Which rows and keys a CTA meets.

    units: squares of 64 rows of a kv head, token blocks one after another, in each its blocks of heads. tiles: of
    CONSUMERS units. splits: of a tile's keys. HEADS, TOKENS: of a unit. LENGTHS: batch rows end at lengths_ptr. PAGE:
    slots of a page, of which a batch row has `row_pages`, or 0. PIECE: keys that are loaded at once. Where a batch row
    or a page ends by itself, `between` is how many tokens of the key tensor lie between two of them (`corner`). ALONE:
    a CTA has one split, (split and tile, kv head, batch row), of 16 bits, without pages or left edges; else splits
    are numbered.
    """

    walk: Walk
    kv_heads: gl.tensor
    tiles: gl.tensor
    splits: gl.tensor
    inverse: gl.tensor
    row_pages: gl.tensor
    between_k: gl.tensor
    between_v: gl.tensor
    GROUP: gl.constexpr
    HEADS: gl.constexpr
    TOKENS: gl.constexpr
    LENGTHS: gl.constexpr
    PAGE: gl.constexpr
    PIECE: gl.constexpr
    ALONE: gl.constexpr

    @gluon.constexpr_function
    def __init__(
        self, walk, kv_heads, tiles, splits, inverse, row_pages, between_k, between_v,
        GROUP, HEADS, TOKENS, LENGTHS, PAGE, PIECE, ALONE,
    ):  # fmt: skip
        self.walk, self.kv_heads, self.tiles, self.splits, self.inverse = walk, kv_heads, tiles, splits, inverse
        self.row_pages, self.between_k, self.between_v = row_pages, between_k, between_v
        self.GROUP, self.HEADS, self.TOKENS = gl.constexpr(GROUP), gl.constexpr(HEADS), gl.constexpr(TOKENS)
        self.LENGTHS, self.PAGE, self.PIECE = gl.constexpr(LENGTHS), gl.constexpr(PAGE), gl.constexpr(PIECE)
        self.ALONE = gl.constexpr(ALONE)

    @gluon.jit
    def unit(self, number):
        """First head (of a kv head's) and first token of a unit."""
        BLOCKS: gl.constexpr = self.GROUP // self.HEADS
        block = number // BLOCKS
        return (number - block * BLOCKS) * self.HEADS, block * self.TOKENS

    @gluon.jit
    def numbers(self):
        """This CTA's first split, where they end, and how far it is to its next one."""
        if self.ALONE:
            return gl.to_tensor(0), gl.to_tensor(1), gl.to_tensor(1)
        else:
            return gl.program_id(0), self.tiles * self.splits * self.walk.rows, gl.num_programs(0)

    @gluon.jit
    def split_of(self, number, lengths_ptr):
        """Tile, split, kv head and batch row of a number, the walk with its keys, the first key of the split, its
        blocks (at least one) and where the keys end that it may see: at 0 for a split without keys, which meets one
        block for nothing. Tiles of the same keys are neighbours, which find them in L2; the last, which sees the most,
        is the first."""
        if self.ALONE:
            tile = self.tiles - 1 - gl.program_id(0) % self.tiles
            split, kv_head, batch = gl.program_id(0) // self.tiles, gl.program_id(1), gl.program_id(2)
        else:
            tile = self.tiles - 1 - number % self.tiles
            split = number // self.tiles % self.splits
            row = number // self.tiles // self.splits
            batch = row // self.kv_heads
            kv_head = row - batch * self.kv_heads
        keys = self.walk.keys
        if self.LENGTHS:
            keys = gl.minimum(gl.maximum(gl.load(lengths_ptr + batch), 0), keys)
        walk = self.walk.within(self.walk.tokens, keys)
        _, first = self.unit(tile * walk.CONSUMERS)
        _, last = self.unit(tile * walk.CONSUMERS + walk.CONSUMERS - 1)
        begin = walk.begin(gl.minimum(first, walk.tokens - 1))
        end = walk.end(gl.minimum(last + self.TOKENS, walk.tokens) - 1)
        blocks = (gl.maximum(end - begin, 0) + walk.BN - 1) // walk.BN
        if self.ALONE:
            low, blocks = even_range(blocks, split, self.splits, self.inverse)
        else:
            low = blocks * split // self.splits
            blocks = blocks * (split + 1) // self.splits - low
        seen = gl.where(blocks > 0, walk.keys, 0)
        return tile, split, kv_head, batch, walk, begin + low * walk.BN, gl.maximum(blocks, 1), seen

    @gluon.jit
    def pages(self, pages_ptr, batch, key, keys):
        """The page of each piece of a tile of keys. The table's entries behind the last key may name no page."""
        found = ()
        if self.PAGE:
            for i in gl.static_range(self.walk.BN // self.PIECE):
                at = key + i * self.PIECE
                entry = pages_ptr + batch.to(gl.int64) * self.row_pages + at // self.PAGE
                found = found + (gl.load(entry, mask=(at >= 0) & (at < keys), other=0),)
        return found

    @gluon.jit
    def load(self, desc, barrier, tiles, s, between, pages, batch, kv_head, key, keys, COLUMNS: gl.constexpr):
        """Start to load tile `s` of keys or values, in pieces where its pages are smaller."""
        if self.PAGE:
            PIECES: gl.constexpr = self.walk.BN // self.PIECE
            mbarrier_expect(barrier, self.walk.BN * COLUMNS * 2)
            WIDTH: gl.constexpr = COLUMNS if PIECES == 1 else 64
            for i in gl.static_range(PIECES):
                at = key + i * self.PIECE
                first = at // self.PAGE * self.PAGE
                held = gl.minimum(gl.maximum(keys - first, 0), self.PAGE)
                far, place, head, row, _ = corner(pages[i] * between + held, kv_head, at - first, held, True)
                for c in gl.static_range(COLUMNS // WIDTH):
                    piece = (s * (COLUMNS // WIDTH) + c) * PIECES + i
                    tma_copy(desc, (far, place, head, row, c * WIDTH), barrier, tiles.index(piece))
        else:
            place = batch
            if self.LENGTHS:
                place = batch * between + keys
            tma_load(desc, corner(place, kv_head, key, keys, self.LENGTHS), barrier, tiles.index(s))


@gluon.jit
def _load_queries(work, q_desc, q_full, q, c: gl.constexpr, tile, batch, kv_head):
    """Start to load unit c of a tile."""
    head, token = work.unit(tile * work.walk.CONSUMERS + c)
    tma_load(q_desc, (batch, kv_head * work.GROUP + head, token, 0), q_full.index(c), q.index(c))


@gluon.jit
def _begin(work, q, k, v, q_full, k_full, v_full, q_desc, k_desc, v_desc, lengths_ptr):
    """Start to load the queries of a CTA's only split and as many tiles as there is room for."""
    tile, _, kv_head, batch, walk, first, blocks, _ = work.split_of(gl.to_tensor(0), lengths_ptr)
    for i in gl.static_range(walk.STAGES):
        if i < blocks:
            key = first + (blocks - 1 - i) * walk.BN
            work.load(k_desc, k_full.index(i), k, i, work.between_k, (), batch, kv_head, key, walk.keys, walk.D)
            if i == 0:
                for c in gl.static_range(walk.CONSUMERS):
                    _load_queries(work, q_desc, q_full, q, c, tile, batch, kv_head)
            work.load(v_desc, v_full.index(i), v, i, work.between_v, (), batch, kv_head, key, walk.keys, walk.DV)


@gluon.jit
def _produce(work, parts, pieces, q_desc, k_desc, v_desc, lengths_ptr, pages_ptr):
    whole = work.walk
    q, k, v, q_full, q_empty, k_full, k_empty, v_full, v_empty = parts
    k_pieces, v_pieces = pieces
    BEGUN: gl.constexpr = whole.STAGES if work.ALONE else 0  # `_begin`
    count = gl.to_tensor(BEGUN)
    turn = gl.to_tensor(0)
    number, end, step = work.numbers()
    while number < end:
        tile, split, kv_head, batch, walk, first, blocks, _ = work.split_of(number, lengths_ptr)
        # one step ahead: in pages of 16, 16 tokens on 8 x 8k keys take 86 us for 96 (H200; registers below)
        ahead = work.pages(pages_ptr, batch, first + (blocks - 1) * walk.BN, walk.keys)
        for j in range(BEGUN, blocks):
            key = first + (blocks - 1 - j) * walk.BN
            s = count % walk.STAGES
            phase = (count // walk.STAGES) & 1
            pages = ahead
            ahead = work.pages(pages_ptr, batch, key - walk.BN, walk.keys)
            mbarrier_wait(k_empty.index(s), phase ^ 1)
            work.load(
                k_desc, k_full.index(s), k_pieces, s, work.between_k, pages, batch, kv_head, key, walk.keys, walk.D
            )
            if BEGUN == 0:
                if j == 0:
                    for c in gl.static_range(walk.CONSUMERS):
                        mbarrier_wait(q_empty.index(c), (turn & 1) ^ 1)
                        _load_queries(work, q_desc, q_full, q, c, tile, batch, kv_head)
            mbarrier_wait(v_empty.index(s), phase ^ 1)
            work.load(
                v_desc, v_full.index(s), v_pieces, s, work.between_v, pages, batch, kv_head, key, walk.keys, walk.DV
            )
            count += 1
        turn += 1
        number += step


@gluon.jit
def _widen(work, small, small_full, small_empty, wide, full, empty, lengths_ptr):
    """Make 16-bit tiles of the 8-bit ones of keys or values that were loaded."""
    whole = work.walk
    ROWS: gl.constexpr = wide.shape[1]
    COLUMNS: gl.constexpr = wide.shape[2]
    LANES: gl.constexpr = gl.BlockedLayout([1, 8], [256 // COLUMNS, COLUMNS // 8], [gl.num_warps(), 1], [1, 0])
    count = gl.to_tensor(0)
    number, end, step = work.numbers()
    while number < end:
        found = work.split_of(number, lengths_ptr)
        for j in range(found[6]):
            s = count % whole.STAGES
            phase = (count // whole.STAGES) & 1
            mbarrier_wait(small_full.index(s), phase)
            x = small.index(s).reshape([ROWS, COLUMNS]).load(LANES)
            fence_async()  # the next load overwrites it
            mbarrier_arrive(small_empty.index(s))
            x = x.to(wide.dtype)
            mbarrier_wait(empty.index(s), phase ^ 1)
            wide.index(s).store(x)
            fence_async()
            mbarrier_arrive(full.index(s))
            count += 1
        number += step


@gluon.jit
def _halve(q_tile, LAYOUT: gl.constexpr):
    """Queries in fp16, in place, each row behind a power of two of its own, and these."""
    LANES: gl.constexpr = gl.BlockedLayout([1, 8], [256 // q_tile.shape[1], q_tile.shape[1] // 8], [4, 1], [1, 0])
    x = q_tile.load(LANES).to(gl.float32)
    size = gl.exp2(gl.floor(gl.log2(gl.maximum(gl.max(gl.abs(x), 1), 1e-30))))
    half = reinterpret(q_tile, gl.float16, q_tile.shape, q_tile.layout)
    half.store((x / size[:, None]).to(gl.float16))
    fence_async()
    return half, gl.convert_layout(size, LAYOUT)


@gluon.jit
def _factor(scale, head, batch):
    """The factor of a head's 8-bit numbers. scale: a pointer and its strides of batch rows and heads."""
    at, batch_stride, head_stride = scale
    return gl.load(at + batch * batch_stride + head * head_stride).to(gl.float32)


@gluon.jit
def _apply_mask(qk, walk, limit, queries, first, LOW: gl.constexpr):
    """Scores of a block that some queries do not see whole. LOW: the left edge of the window may be in it, too."""
    cols = gl.arange(0, walk.BN, gl.SliceLayout(0, qk.type.layout))[None, :]
    if walk.RIGHT:
        word = mask_before((limit - first)[:, None], cols)
    else:
        word = mask_before(limit - first, cols)
    if LOW:
        word = word & ~mask_before((walk.begin(queries) - first)[:, None], cols)
    return gl.where(in_mask(word, cols), qk, NOTHING)


@gluon.jit
def rows_of_tile(work, unit, ROW: gl.constexpr):
    """First head and token of a unit, its rows, and the tokens as which they see: those behind the last one see what it
    sees."""
    first_head, start = work.unit(unit)
    row = gl.arange(0, 64, ROW)
    return first_head, start, row, gl.minimum(start + row % work.TOKENS, work.walk.tokens - 1)


@gluon.jit
def write_lse(of, top, total, sinks_ptr, lse_ptr, lse_split):
    """Store lse of a split's rows. Returns the factors that normalise these."""
    work, place, rows = of
    split, kv_head, batch = place
    first_head, start, row, queries = rows
    tokens = work.walk.tokens
    head = kv_head * work.GROUP + first_head + row // work.TOKENS
    factor, lse = finish_softmax(top, total, head, sinks_ptr)
    lse_at = (batch * work.kv_heads * work.GROUP + head) * tokens + queries
    real = start + row % work.TOKENS < tokens
    gl.store(lse_ptr + split.to(gl.int64) * lse_split + lse_at, lse, mask=real)
    return factor


@gluon.jit
def _consume(
    C: gl.constexpr, given, SMALL: gl.constexpr, SOFTCAP: gl.constexpr, OUT_IN_Q: gl.constexpr, CHAINED: gl.constexpr
):
    work, parts, out_desc, out, lse_ptr, lse_split, sinks_ptr, lengths_ptr, k_scale, v_scale, inner, scale = given
    whole = work.walk
    q, k, v, q_full, q_empty, k_full, k_empty, v_full, v_empty = parts
    BN: gl.constexpr = whole.BN
    D: gl.constexpr = whole.D
    DV: gl.constexpr = whole.DV
    dtype: gl.constexpr = k.dtype
    SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BN, 16])
    OUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, DV, 16])
    P: gl.constexpr = gl.DotOperandLayout(0, OUT, 2)
    ROW: gl.constexpr = gl.SliceLayout(1, SCORES)
    OUT_ROW: gl.constexpr = gl.SliceLayout(1, OUT)
    batches = whole.rows // work.kv_heads
    PHASES: gl.constexpr = 3 if whole.LEFT else 2
    count = gl.to_tensor(0)
    turn = gl.to_tensor(0)
    number, end, step = work.numbers()
    while number < end:
        tile, split, kv_head, batch, walk, begin, blocks, seen = work.split_of(number, lengths_ptr)
        first_head, start, row, queries = rows_of_tile(work, tile * walk.CONSUMERS + C, ROW)
        limit = gl.minimum(walk.end(queries), seen)
        acc = gl.zeros([64, DV], gl.float32, OUT)
        zero = gl.zeros([64, BN], gl.float32, SCORES)

        q_tile = q.index(C).reshape([64, D])
        mbarrier_wait(q_full.index(C), turn & 1)
        if SMALL:
            q_tile, size = _halve(q_tile, ROW)
            size *= _factor(k_scale, kv_head, batch)
        s = count % walk.STAGES
        mbarrier_wait(k_full.index(s), (count // walk.STAGES) & 1)
        qk = wgmma(q_tile, k.index(s).reshape([BN, D]).permute((1, 0)), zero, use_acc=False, is_async=True)
        qk = wgmma_wait(0, deps=[qk])
        mbarrier_arrive(k_empty.index(s))
        if SMALL:
            qk = qk * size[:, None]
        if SOFTCAP:
            qk = tanh(qk * inner)
        qk = _apply_mask(qk, walk, limit, queries, begin + (blocks - 1) * BN, walk.LEFT)
        top = gl.max(qk, 1) * scale
        base = gl.where(top == NOTHING, 0.0, top)
        p = gl.exp2(qk * scale - base[:, None])
        total = gl.sum(p, 1)
        p = pack(p, dtype)

        # blocks from the end: those that the right edge crosses, whole ones, those that the left edge crosses
        edge = walk.end(gl.minimum(start, walk.tokens - 1))
        right = gl.minimum(gl.maximum(blocks - gl.maximum(edge - begin, 0) // BN, 1), blocks)
        left = blocks
        if walk.LEFT:
            last = gl.minimum(start + work.TOKENS, walk.tokens) - 1
            left = blocks - (gl.maximum(walk.begin(last) - begin, 0) + BN - 1) // BN
            left = gl.minimum(gl.maximum(left, right), blocks)
        for phase in gl.static_range(PHASES):
            if phase == 0:
                lower, upper = 1, right
            elif phase == 1:
                lower, upper = right, left
            else:
                lower, upper = left, blocks
            if phase != 0 or walk.RIGHT:
                for j in range(lower, upper):
                    p_half = unpack(p, dtype, P)
                    behind = count % walk.STAGES
                    v_phase = (count // walk.STAGES) & 1
                    count += 1
                    s = count % walk.STAGES
                    mbarrier_wait(k_full.index(s), (count // walk.STAGES) & 1)
                    qk_made = wgmma(
                        q_tile, k.index(s).reshape([BN, D]).permute((1, 0)), zero, use_acc=False, is_async=True
                    )
                    mbarrier_wait(v_full.index(behind), v_phase)
                    acc_made = wgmma(p_half, v.index(behind).reshape([BN, DV]), acc, use_acc=True, is_async=True)
                    qk = wgmma_wait(1, deps=[qk_made])
                    mbarrier_arrive(k_empty.index(s))
                    if SMALL:
                        qk = qk * size[:, None]
                    if SOFTCAP:
                        qk = tanh(qk * inner)
                    if phase != 1:
                        qk = _apply_mask(qk, walk, limit, queries, begin + (blocks - 1 - j) * BN, walk.LEFT)
                    new, decay, top = exponentiate(qk, top, scale, phase != 1)
                    total = total * decay + gl.sum(new, 1)
                    acc = wgmma_wait(0, deps=[acc_made])
                    mbarrier_arrive(v_empty.index(behind))
                    acc = acc * gl.convert_layout(decay, OUT_ROW)[:, None]
                    p = pack(new, dtype)

        if not OUT_IN_Q:
            mbarrier_arrive(q_empty.index(C))
        s = count % walk.STAGES
        mbarrier_wait(v_full.index(s), (count // walk.STAGES) & 1)
        acc_made = wgmma(unpack(p, dtype, P), v.index(s).reshape([BN, DV]), acc, use_acc=True, is_async=True)
        count += 1
        of = work, (split, kv_head, batch), (first_head, start, row, queries)
        factor = write_lse(of, top, total, sinks_ptr, lse_ptr, lse_split)
        acc = wgmma_wait(0, deps=[acc_made])
        mbarrier_arrive(v_empty.index(s))
        if SMALL:
            factor *= _factor(v_scale, kv_head, batch)
        acc = acc * gl.convert_layout(factor, OUT_ROW)[:, None]
        if not OUT_IN_Q:
            tma_store_wait(0)
        box = out.index(C)
        box.reshape([64, DV]).store(acc.to(q.dtype))
        fence_async()
        tma_store(out_desc, (split * batches + batch, kv_head * work.GROUP + first_head, start, 0), box)
        if OUT_IN_Q:
            tma_store_wait(0)
            mbarrier_arrive(q_empty.index(C))
        turn += 1
        number += step
    tma_store_wait(0)
    if CHAINED:
        # Not before: its CTAs would all find room on the few SMs without one of these, which took
        # 1 token on 8k keys 3 us (H200).
        launch_dependents()


@gluon.jit
def _consume_alone(C: gl.constexpr, given, SOFTCAP: gl.constexpr, CHAINED: gl.constexpr):
    """`_consume` of a CTA that has one split: a block's code is there once, and asked for once.

    The product of a block's values is followed by that of the next block's keys, after the last one for nothing. H200,
    64/8 heads, two consumers: 16 tokens on 8k / 32k keys 17.6 / 39.5 us, by `_consume` 19.2 / 40.3, 64 tokens on 8k
    39.7 and 42.6; one consumer, 8 tokens: 15.7 to 16.4 / 37.8 and 15.7 to 15.9 / 38.6.
    """
    work, parts, out_desc, out, lse_ptr, lse_split, sinks_ptr, lengths_ptr, _, _, inner, scale = given
    q, k, v, q_full, _, k_full, k_empty, v_full, v_empty = parts
    BN: gl.constexpr = work.walk.BN
    D: gl.constexpr = work.walk.D
    DV: gl.constexpr = work.walk.DV
    dtype: gl.constexpr = k.dtype
    SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BN, 16])
    OUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, DV, 16])
    P: gl.constexpr = gl.DotOperandLayout(0, OUT, 2)
    ROW: gl.constexpr = gl.SliceLayout(1, SCORES)
    OUT_ROW: gl.constexpr = gl.SliceLayout(1, OUT)
    batches = work.walk.rows // work.kv_heads
    tile, split, kv_head, batch, walk, begin, blocks, seen = work.split_of(gl.to_tensor(0), lengths_ptr)
    first_head, start, row, queries = rows_of_tile(work, tile * walk.CONSUMERS + C, ROW)
    limit = gl.minimum(walk.end(queries), seen)
    every = gl.minimum(walk.end(gl.minimum(start, walk.tokens - 1)), seen)  # what all rows see ends there
    acc = gl.zeros([64, DV], gl.float32, OUT)
    zero = gl.zeros([64, BN], gl.float32, SCORES)
    top = gl.full([64], NOTHING, gl.float32, ROW)
    total = gl.zeros([64], gl.float32, ROW)

    q_tile = q.index(C).reshape([64, D])
    mbarrier_wait(q_full.index(C), 0)
    mbarrier_wait(k_full.index(0), 0)
    qk_made = wgmma(q_tile, k.index(0).reshape([BN, D]).permute((1, 0)), zero, use_acc=False, is_async=True)
    for j in range(blocks):
        s = j % walk.STAGES
        qk = wgmma_wait(0, deps=[qk_made])
        mbarrier_arrive(k_empty.index(s))
        first = begin + (blocks - 1 - j) * BN
        if SOFTCAP:
            qk = tanh(qk * inner)
        if first + BN > every:
            qk = _apply_mask(qk, walk, limit, queries, first, False)
        p, decay, top = exponentiate(qk, top, scale, True)
        total = total * decay + gl.sum(p, 1)
        acc = acc * gl.convert_layout(decay, OUT_ROW)[:, None]
        p_half = unpack(pack(p, dtype), dtype, P)
        mbarrier_wait(v_full.index(s), (j // walk.STAGES) & 1)
        acc_made = wgmma(p_half, v.index(s).reshape([BN, DV]), acc, use_acc=True, is_async=True)
        following = (j + 1) % walk.STAGES
        mbarrier_wait(k_full.index(following), ((j + 1) // walk.STAGES) & 1, pred=j + 1 < blocks)
        k_tile = k.index(following).reshape([BN, D]).permute((1, 0))
        qk_made = wgmma(q_tile, k_tile, zero, use_acc=False, is_async=True)
        acc = wgmma_wait(1, deps=[acc_made])
        mbarrier_arrive(v_empty.index(s))

    qk = wgmma_wait(0, deps=[qk_made])
    of = work, (split, kv_head, batch), (first_head, start, row, queries)
    factor = write_lse(of, top, total, sinks_ptr, lse_ptr, lse_split)
    acc = acc * gl.convert_layout(factor, OUT_ROW)[:, None]
    box = out.index(C)
    box.reshape([64, DV]).store(acc.to(q.dtype))
    fence_async()
    tma_store(out_desc, (split * batches + batch, kv_head * work.GROUP + first_head, start, 0), box)
    tma_store_wait(0)
    if CHAINED:
        launch_dependents()  # not before: as above


@gluon.jit(
    do_not_specialize=[
        "lse_split", "row_pages", "tokens", "keys", "rows", "kv_heads", "splits", "between_k", "between_v", "left",
        "right",
    ]
)  # fmt: skip
def attention_split_kv_kernel(
    q_desc, k_desc, v_desc, out_desc, lse_ptr, lse_split, sinks_ptr, lengths_ptr, k_scale, v_scale,
    pages_ptr, row_pages, tokens, keys, rows, kv_heads, tiles, splits, inverse, between_k, between_v, left, right,
    inner, scale,
    GROUP: gl.constexpr, HEADS: gl.constexpr, LEFT: gl.constexpr, RIGHT: gl.constexpr, BN: gl.constexpr,
    PAGE: gl.constexpr, PIECE: gl.constexpr, D: gl.constexpr, DV: gl.constexpr,
    CONSUMERS: gl.constexpr, STAGES: gl.constexpr, SOFTCAP: gl.constexpr, CHAINED: gl.constexpr,
    APART: gl.constexpr, ALONE: gl.constexpr,
):  # fmt: skip
    """CTA (split of the keys, tile), as `SplitKv` has it. rows: batch * kv heads. inverse: 1 / splits. k_scale,
    v_scale: of 8-bit keys and values (`_factor`). Writes a normalised result, to [splits * B, H, T, DV], and its lse
    for each split. CHAINED: the next kernel may start and wait. APART: results have room of their own."""
    LENGTHS: gl.constexpr = lengths_ptr is not None
    tiles = gl.to_tensor(tiles)  # Triton knows where there is but one, by which nothing is divided
    walk = Walk(
        tokens, keys, kv_heads, tiles, rows, tiles, left, right, tiles, gl.to_tensor(1), gl.to_tensor(0),
        LEFT, RIGHT, False, False, False, CONSUMERS * 64, BN, D, DV, CONSUMERS, STAGES, 1, 0,
    )  # fmt: skip
    work = SplitKv(
        walk, kv_heads, tiles, splits, inverse, row_pages, between_k, between_v,
        GROUP, HEADS, 64 // HEADS, LENGTHS, PAGE, PIECE, ALONE,
    )  # fmt: skip
    q = smem_tiles(CONSUMERS, q_desc)
    k_pieces = smem_tiles(STAGES * (BN // PIECE) * (D // (D if PIECE == BN else 64)), k_desc)
    v_pieces = smem_tiles(STAGES * (BN // PIECE) * (DV // (DV if PIECE == BN else 64)), v_desc)
    k, v = k_pieces, v_pieces
    if PAGE:
        # pieces of 64 columns lie as they do in a tile: all rows of 64 columns, then those of the next
        WHOLE: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
        k = reinterpret(k_pieces, k_desc.dtype, [STAGES, BN, D], WHOLE)
        v = reinterpret(v_pieces, v_desc.dtype, [STAGES, BN, DV], WHOLE)
    q_full, q_empty, k_full, v_full = mbarriers((CONSUMERS, 1), (CONSUMERS, 1), (STAGES, 1), (STAGES, 1))
    SMALL: gl.constexpr = k_desc.dtype.primitive_bitwidth == 8
    if SMALL:
        TILE: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
        k = gl.allocate_shared_memory(gl.float16, [STAGES, BN, D], TILE)
        v = gl.allocate_shared_memory(gl.float16, [STAGES, BN, DV], TILE)
        k8_full, v8_full, k8_empty, v8_empty = mbarriers((STAGES, 1), (STAGES, 1), (STAGES, 1), (STAGES, 1))
    if ALONE:
        # H200, 64/8 heads of 128 on 8k keys: asked for so, and without divisions of integers, 8 tokens take 16.1 us for
        # 17.3, 16 tokens 19.0 for 20.0; the first load is on its way after 820 cycles for 2,050, of 16 tokens 1,590
        # for 3,180
        fence_async()
        _begin(work, q, k, v, q_full, k_full, v_full, q_desc, k_desc, v_desc, lengths_ptr)
    k_empty, v_empty = mbarriers((STAGES, CONSUMERS), (STAGES, CONSUMERS))
    fence_async()
    OUT_IN_Q: gl.constexpr = D == DV and not APART  # out takes the place of q
    out = q
    if not OUT_IN_Q:
        out = smem_tiles(CONSUMERS, out_desc)
    parts = (q, k, v, q_full, q_empty, k_full, k_empty, v_full, v_empty)
    pieces = (k_pieces, v_pieces)
    if SMALL:
        loaded = (q, k_pieces, v_pieces, q_full, q_empty, k8_full, k8_empty, v8_full, v8_empty)
    consumed = (
        work, parts, out_desc, out, lse_ptr, lse_split, sinks_ptr, lengths_ptr, k_scale, v_scale, inner, scale
    )  # fmt: skip
    if ALONE and CONSUMERS == 2:
        gl.warp_specialize(
            [
                (_produce, (work, parts, pieces, q_desc, k_desc, v_desc, lengths_ptr, pages_ptr)),
                (_consume_alone, (0, consumed, SOFTCAP, CHAINED)),
                (_consume_alone, (1, consumed, SOFTCAP, CHAINED)),
            ],
            [4, 4],
            [240, 240],
        )  # fmt: skip
    elif ALONE:
        gl.warp_specialize(
            [
                (_produce, (work, parts, pieces, q_desc, k_desc, v_desc, lengths_ptr, pages_ptr)),
                (_consume_alone, (0, consumed, SOFTCAP, CHAINED)),
            ],
            [4],
            [240],
        )  # fmt: skip
    elif SMALL and CONSUMERS == 2:
        gl.warp_specialize(
            [
                (_produce, (work, loaded, pieces, q_desc, k_desc, v_desc, lengths_ptr, pages_ptr)),
                (_consume, (0, consumed, SMALL, SOFTCAP, OUT_IN_Q, CHAINED)),
                (_consume, (1, consumed, SMALL, SOFTCAP, OUT_IN_Q, CHAINED)),
                (_widen, (work, k_pieces, k8_full, k8_empty, k, k_full, k_empty, lengths_ptr)),
                (_widen, (work, v_pieces, v8_full, v8_empty, v, v_full, v_empty, lengths_ptr)),
            ],
            [4, 4, 4, 4],
            [168, 168, 56, 56],
        )  # fmt: skip
    elif SMALL:
        gl.warp_specialize(
            [
                (_produce, (work, loaded, pieces, q_desc, k_desc, v_desc, lengths_ptr, pages_ptr)),
                (_consume, (0, consumed, SMALL, SOFTCAP, OUT_IN_Q, CHAINED)),
                (_widen, (work, k_pieces, k8_full, k8_empty, k, k_full, k_empty, lengths_ptr)),
                (_widen, (work, v_pieces, v8_full, v8_empty, v, v_full, v_empty, lengths_ptr)),
            ],
            [4, 4, 4],
            [232, 96, 96],
        )  # fmt: skip
    elif CONSUMERS == 2:
        # what consumers leave of 504 registers is the producer's: 24 are enough for whole tiles, not for pieces of them
        OWN: gl.constexpr = 240 if PIECE == BN else 216 if BN == 64 else 208
        gl.warp_specialize(
            [
                (_produce, (work, parts, pieces, q_desc, k_desc, v_desc, lengths_ptr, pages_ptr)),
                (_consume, (0, consumed, SMALL, SOFTCAP, OUT_IN_Q, CHAINED)),
                (_consume, (1, consumed, SMALL, SOFTCAP, OUT_IN_Q, CHAINED)),
            ],
            [4, 4],
            [OWN, OWN],
        )  # fmt: skip
    else:
        gl.warp_specialize(
            [
                (_produce, (work, parts, pieces, q_desc, k_desc, v_desc, lengths_ptr, pages_ptr)),
                (_consume, (0, consumed, SMALL, SOFTCAP, OUT_IN_Q, CHAINED)),
            ],
            [4],
            [240],
        )  # fmt: skip
