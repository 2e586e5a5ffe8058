"""Device kernels of attention's gradients on Hopper for head dims above 256, in Gluon.

dk or dv of 64 keys, or dq of 64 queries, fills the registers of two consumers there, so kernels that keep a result and
walk the scores would make these three times, and dp twice: 8 products for 5, of tiles of 64 by 64. Instead p and ds of
a band of queries go to a workspace in 16 bits (`attention_band_scores_kernel`), and dq, dk and dv are products of it
(`attention_band_products_kernel`): 5 products, of tiles of 128 by 256. A band is as many queries as the workspace has
room for (`plan.hopper_bands`); dk and dv of several bands are added in fp32, in the order of the bands.

Scores live in units of log 2. Tiles begin at the first query and key that anybody sees.
"""

from tilesmith.device.gluon.shim import (
    aggregate,
    fence_async,
    gl,
    gluon,
    grid_dependency_wait,
    launch_dependents,
    mbarrier_arrive,
    mbarrier_expect,
    mbarrier_wait,
    mbarriers,
    named_barrier,
    smem_tile,
    smem_tiles,
    tma_copy,
    tma_store,
    tma_store_wait,
    wgmma,
    wgmma_wait,
)
from tilesmith.ops.attn.hopper.softmax import pack, tanh, unpack
from tilesmith.ops.attn.hopper.walk import ring_place, tile_queue

LEADS = gl.constexpr(8)  # the named barrier at which the second consumer lets the first one go ahead
TILE = gl.constexpr(128)  # queries of a tile of scores or dq, keys of one of dk or dv


@aggregate
class Band:
    """What every part of a CTA knows: the sizes of the call, who sees which keys, and the band.

    q_begin, k_begin: the first query and key that anybody sees. first_row, rows: of the pairs of batch row and kv head
    in the band; first_member, members: of the query heads that share each of them; first_tile, tiles: of the tiles of
    128 queries. Blocks of queries are counted from q_begin on, those of keys from k_begin on.
    """

    tokens: gl.tensor
    keys: gl.tensor
    kv_heads: gl.tensor
    group: gl.tensor
    q_begin: gl.tensor
    k_begin: gl.tensor
    first_row: gl.tensor
    rows: gl.tensor
    first_member: gl.tensor
    members: gl.tensor
    first_tile: gl.tensor
    tiles: gl.tensor
    left: gl.tensor
    right: gl.tensor
    LEFT: gl.constexpr
    RIGHT: gl.constexpr

    @gluon.constexpr_function
    def __init__(
        self, tokens, keys, kv_heads, group, q_begin, k_begin, first_row, rows, first_member, members, first_tile,
        tiles, left, right, LEFT, RIGHT,
    ):  # fmt: skip
        self.tokens, self.keys, self.kv_heads, self.group = tokens, keys, kv_heads, group
        self.q_begin, self.k_begin, self.first_row, self.rows = q_begin, k_begin, first_row, rows
        self.first_member, self.members, self.first_tile, self.tiles = first_member, members, first_tile, tiles
        self.left, self.right = left, right
        self.LEFT, self.RIGHT = gl.constexpr(LEFT), gl.constexpr(RIGHT)

    @gluon.jit
    def row(self, row):
        """Batch row and kv head of one of the band's rows."""
        row += self.first_row
        batch = row // self.kv_heads
        return batch, row - batch * self.kv_heads

    @gluon.jit
    def head(self, number):
        """Batch row, query head and kv head of one of the band's query heads."""
        row = number // self.members
        batch, kv_head = self.row(row)
        return batch, kv_head * self.group + self.first_member + number - row * self.members, kv_head

    @gluon.jit
    def seeing(self, key, KEYS: gl.constexpr, BLOCK: gl.constexpr):
        """The blocks of BLOCK queries of which some see any of KEYS keys, the first of which is `key`: the first block
        and the end."""
        shift = self.keys - self.tokens
        first = self.tokens * 0
        end = (self.tokens - self.q_begin + BLOCK - 1) // BLOCK
        if self.RIGHT:
            first = gl.maximum(key - shift - self.right - self.q_begin, 0) // BLOCK
        if self.LEFT:
            last = key + KEYS - 1 - shift + self.left - self.q_begin
            end = gl.minimum(end, gl.maximum(last, 0) // BLOCK + 1)
        return first, end

    @gluon.jit
    def in_band(self, first, end, BLOCK: gl.constexpr):
        """What of a range of blocks of BLOCK queries is in the band: its first block and how many."""
        first = gl.maximum(first, self.first_tile * (TILE // BLOCK))
        end = gl.minimum(end, (self.first_tile + self.tiles) * (TILE // BLOCK))
        return first, gl.maximum(end - first, 0)

    @gluon.jit
    def seen(self, query):
        """The blocks of 64 keys of which a tile of queries sees any: the first and how many."""
        shift = self.keys - self.tokens
        first = self.keys * 0
        end = self.keys
        if self.RIGHT:
            end = gl.minimum(end, gl.minimum(query + TILE, self.tokens) + shift + self.right)
        if self.LEFT:
            first = gl.maximum(query + shift - self.left - self.k_begin, 0) // 64
        return first, gl.maximum((end - self.k_begin + 63) // 64 - first, 0)

    @gluon.jit
    def columns(self, KEYS: gl.constexpr):
        """Tiles of KEYS keys of all query heads of the band."""
        return (self.keys - self.k_begin + KEYS - 1) // KEYS * (self.rows * self.members)

    @gluon.jit
    def column(self, number, KEYS: gl.constexpr):
        """Of one of them the query head, the first key, and the first and the number of the tiles of queries in the
        band that see any of its keys."""
        tiles = (self.keys - self.k_begin + KEYS - 1) // KEYS
        head = number // tiles
        key = self.k_begin + (number - head * tiles) * KEYS
        first, end = self.seeing(key, KEYS, TILE)
        first, count = self.in_band(first, end, TILE)
        return head, key, first, count


@gluon.jit
def _load(a_desc, a_at, a, b_desc, b_at, b, barrier):
    """Start the loads of both operands of a step."""
    BYTES: gl.constexpr = a_desc.block_type.nbytes + b_desc.block_type.nbytes
    mbarrier_expect(barrier, BYTES)
    tma_copy(a_desc, a_at, barrier, a)
    tma_copy(b_desc, b_at, barrier, b)


@gluon.jit
def _load_parts(parts, a_desc, a_at, b_desc, b_at, count, PARTS: gl.constexpr, STAGES: gl.constexpr):
    """Start the loads of all parts of 64 columns of two tiles; returns the count behind them."""
    a, b, full, empty = parts
    for i in range(PARTS):
        s, phase = ring_place(count, STAGES)
        mbarrier_wait(empty.index(s), phase ^ 1)
        a_there, b_there = (a_at[0], a_at[1], a_at[2], 64 * i), (b_at[0], b_at[1], b_at[2], 64 * i)
        _load(a_desc, a_there, a.index(s), b_desc, b_there, b.index(s), full.index(s))
        count += 1
    return count


@gluon.jit
def _turns(place, count):
    """How many of a column's tiles this CTA makes, which makes every num_programs-th tile of all columns and has
    `place` for its next one, counted from the column's first; and the place in the next column."""
    ctas = gl.num_programs(0)
    turns = gl.maximum(count - place + ctas - 1, 0) // ctas
    return turns, place + turns * ctas - count


@gluon.jit
def _load_scores(parts, band, descs, KEYS: gl.constexpr, PARTS: gl.constexpr, V_PARTS: gl.constexpr,
                 STAGES: gl.constexpr):  # fmt: skip
    """The warp that loads, of each tile, queries and keys, then dout and values, in parts of 64 columns."""
    q_desc, k_desc, dout_desc, v_desc = descs
    grid_dependency_wait()
    launch_dependents()
    count = gl.to_tensor(0)
    place = gl.program_id(0)
    for column in range(band.columns(KEYS)):
        number, key, first, met = band.column(column, KEYS)
        batch, head, kv_head = band.head(number)
        turns, behind = _turns(place, met)
        for turn in range(turns):
            query = band.q_begin + (first + place + turn * gl.num_programs(0)) * TILE
            q_at, k_at = (batch, head, query), (batch, kv_head, key)
            count = _load_parts(parts, q_desc, q_at, k_desc, k_at, count, PARTS, STAGES)
            count = _load_parts(parts, dout_desc, q_at, v_desc, k_at, count, V_PARTS, STAGES)
        place = behind


@gluon.jit
def _scores(C: gl.constexpr, parts, count, KEYS: gl.constexpr, PARTS: gl.constexpr, STAGES: gl.constexpr,
            AHEAD: gl.constexpr):  # fmt: skip
    """A consumer's 64 rows of a product of all columns, and the count behind them. AHEAD: parts that the first consumer
    is ahead of the second one, 0 where neither waits."""
    a, b, full, empty = parts
    ACC: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, KEYS, 16])
    acc = gl.zeros([64, KEYS], gl.float32, ACC)
    if AHEAD > 0 and C == 1:
        named_barrier("sync", LEADS)
    for i in range(PARTS):
        s, phase = ring_place(count, STAGES)
        mbarrier_wait(full.index(s), phase)
        a_tile = a.index(s).reshape([TILE, 64]).slice(C * 64, 64, dim=0)
        made = wgmma(a_tile, b.index(s).reshape([KEYS, 64]).permute((1, 0)), acc, use_acc=True, is_async=True)
        acc = wgmma_wait(1, deps=[made])
        if i > 0:
            before, _ = ring_place(count - 1, STAGES)
            mbarrier_arrive(empty.index(before))
        if AHEAD > 0 and C == 0:
            if i == AHEAD:
                named_barrier("arrive", LEADS)
        count += 1
    acc = wgmma_wait(0, deps=[acc])
    before, _ = ring_place(count - 1, STAGES)
    mbarrier_arrive(empty.index(before))
    return acc, count


@gluon.jit
def _seen_alone(p, band, query, key, none):
    """p of 64 queries and all keys of a tile, zeros where a query does not see a key. none: 0, but not for the
    compiler, which would keep the numbers of all columns in registers."""
    queries = query + (band.keys - band.tokens) + gl.arange(0, 64, gl.SliceLayout(1, p.type.layout))[:, None]
    keys = key + none + gl.arange(0, p.shape[1], gl.SliceLayout(0, p.type.layout))[None, :]
    seen = keys < band.keys
    if band.RIGHT:
        seen = seen & (keys <= queries + band.right)
    if band.LEFT:
        seen = seen & (keys >= queries - band.left)
    return gl.where(seen, p, 0.0)


@gluon.jit
def _leave(x, box, desc, at):
    """Write a tile through shared memory, once the tile before has left it."""
    tma_store_wait(0)
    box.reshape([x.shape[0], x.shape[1]]).store(x)
    fence_async()
    tma_store(desc, at, box)


@gluon.jit
def _make_scores(
    C: gl.constexpr, parts, band, boxes, p_desc, ds_desc, lse_ptr, delta_ptr, row_size, inner, outer,
    KEYS: gl.constexpr, PARTS: gl.constexpr, V_PARTS: gl.constexpr, STAGES: gl.constexpr, SOFTCAP: gl.constexpr,
    AHEAD: gl.constexpr,
):  # fmt: skip
    """A consumer with 64 queries of each tile: p and ds."""
    dtype: gl.constexpr = p_desc.dtype
    ACC: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, KEYS, 16])
    ROW: gl.constexpr = gl.SliceLayout(1, ACC)
    box = boxes.index(C)
    shift = band.keys - band.tokens
    grid_dependency_wait()
    count = gl.to_tensor(0)
    place = gl.program_id(0)
    for column in range(band.columns(KEYS)):
        number, key, first, met = band.column(column, KEYS)
        batch, head, _ = band.head(number)
        turns, behind = _turns(place, met)
        for turn in range(turns):
            tile = first + place + turn * gl.num_programs(0)
            query = band.q_begin + tile * TILE + C * 64
            row = (batch * (band.kv_heads * band.group) + head).to(gl.int64) * row_size + tile * TILE + C * 64
            row_lse = gl.load(lse_ptr + row + gl.arange(0, 64, ROW))
            row_delta = gl.load(delta_ptr + row + gl.arange(0, 64, ROW))
            score, count = _scores(C, parts, count, KEYS, PARTS, STAGES, AHEAD)
            if SOFTCAP:
                score = tanh(score * inner)
            p = gl.exp2(score * outer - row_lse[:, None])
            crossed = key + KEYS > band.keys
            if band.RIGHT:
                crossed = crossed | (key + KEYS - 1 > query + shift + band.right)
            if band.LEFT:
                crossed = crossed | (key < query + 63 + shift - band.left)
            if crossed:
                p = _seen_alone(p, band, query, key, count >> 30)
            if SOFTCAP:
                given = pack(p * (1.0 - score * score), dtype)
            there = (0, number, (tile - band.first_tile) * TILE + C * 64, key - band.k_begin)
            _leave(p.to(dtype), box, p_desc, there)
            dp, count = _scores(C, parts, count, KEYS, V_PARTS, STAGES, 0)
            if SOFTCAP:
                p = unpack(given, dtype, ACC).to(gl.float32)
            else:
                p = box.reshape([64, KEYS]).load(ACC).to(gl.float32)
            d_score = p * (dp - row_delta[:, None])
            _leave(d_score.to(dtype), box, ds_desc, there)
        place = behind
    tma_store_wait(0)


@gluon.jit(
    do_not_specialize=[
        "tokens", "keys", "kv_heads", "group", "q_begin", "k_begin", "first_row", "rows", "first_member", "members",
        "first_tile", "band_tiles", "left", "right", "row_size",
    ]
)  # fmt: skip
def attention_band_scores_kernel(
    q_desc, k_desc, dout_desc, v_desc, p_desc, ds_desc, lse_ptr, delta_ptr,
    tokens, keys, kv_heads, group, q_begin, k_begin, first_row, rows, first_member, members, first_tile, band_tiles,
    left, right, row_size, inner, outer,
    LEFT: gl.constexpr, RIGHT: gl.constexpr, KEYS: gl.constexpr, PARTS: gl.constexpr, V_PARTS: gl.constexpr,
    STAGES: gl.constexpr, SOFTCAP: gl.constexpr, AHEAD: gl.constexpr,
):  # fmt: skip
    """p and ds of a band, in tiles of 128 queries and KEYS keys: the CTAs make all that any query sees in turn, the
    tiles of queries that see the same keys one after another.

    p_desc, ds_desc: of workspaces [1, query heads, queries, keys] of the band, in tiles of 64 queries. lse_ptr: in
    units of log 2, and delta_ptr: of the queries from q_begin on, `row_size` of a head, +inf and 0 behind the last one.
    PARTS, V_PARTS: parts of 64 columns of a head dim; STAGES: parts in flight. AHEAD: as in `_scores`: so one consumer
    makes p beside the other one's product. inner, outer: as in `attention_dkv_kernel`; the others are those of
    `Band`."""
    band = Band(
        tokens, keys, kv_heads, group, q_begin, k_begin, first_row, rows, first_member, members, first_tile,
        band_tiles, left, right, LEFT, RIGHT,
    )  # fmt: skip
    gl.static_assert(AHEAD < STAGES)
    a = smem_tiles(STAGES, q_desc)
    b = smem_tiles(STAGES, k_desc)
    boxes = smem_tiles(2, p_desc)
    full, empty = mbarriers((STAGES, 1), (STAGES, 2))
    fence_async()
    parts = (a, b, full, empty)
    gl.warp_specialize(
        [
            (_make_scores, (0, parts, band, boxes, p_desc, ds_desc, lse_ptr, delta_ptr, row_size, inner, outer, KEYS,
                            PARTS, V_PARTS, STAGES, SOFTCAP, AHEAD)),
            (_make_scores, (1, parts, band, boxes, p_desc, ds_desc, lse_ptr, delta_ptr, row_size, inner, outer, KEYS,
                            PARTS, V_PARTS, STAGES, SOFTCAP, AHEAD)),
            (_load_scores, (parts, band, (q_desc, k_desc, dout_desc, v_desc), KEYS, PARTS, V_PARTS, STAGES)),
        ],
        [4, 1],
        [240, 24],
    )  # fmt: skip


@gluon.jit
def _sizes(band, DQ: gl.constexpr):
    """How many tiles of dq there are in a band, and how many of all results."""
    dq_tiles = band.rows * 0
    if DQ:
        dq_tiles = band.rows * band.members * band.tiles * 2
    return dq_tiles, dq_tiles + band.rows * ((band.keys - band.k_begin + TILE - 1) // TILE) * 4


@gluon.jit
def _dq_tile(band, number):
    """Query head in the band, tile of queries and half of the columns of a tile of dq: the last queries first, which
    see the most keys."""
    heads = band.rows * band.members
    tile = number // (2 * heads)
    rest = number - tile * 2 * heads
    return rest // 2, band.first_tile + band.tiles - 1 - tile, rest % 2


@gluon.jit
def _dkv_tile(band, number):
    """Row in the band, first key, and which of dv's two halves of the columns and then dk's a tile is: the first keys
    first, which a causal mask shows to the most queries."""
    tile = number // (4 * band.rows)
    rest = number - tile * 4 * band.rows
    return rest // 4, band.k_begin + tile * TILE, rest % 4


@gluon.jit
def _load_products(parts, band, descs, queue, counter, STAGES: gl.constexpr, DQ: gl.constexpr):
    """The warp that loads what results are the sums of, in steps of 64 keys or queries, and draws the tiles."""
    a, b, full, empty = parts
    ds_rows_desc, p_cols_desc, ds_cols_desc, q_desc, k_desc, dout_desc = descs
    grid_dependency_wait()
    launch_dependents()
    count = gl.to_tensor(0)
    turn = gl.to_tensor(0)
    dq_tiles, tiles = _sizes(band, DQ)
    number = gl.program_id(0)
    while number < tiles:
        if number < dq_tiles:
            place, tile, half = _dq_tile(band, number)
            batch, head, kv_head = band.head(place)
            first, met = band.seen(band.q_begin + tile * TILE)
            for i in range(first, first + met):
                s, phase = ring_place(count, STAGES)
                mbarrier_wait(empty.index(s), phase ^ 1)
                _load(ds_rows_desc, (0, place, (tile - band.first_tile) * TILE, i * 64), a.index(s), k_desc,
                      (batch, kv_head, band.k_begin + i * 64, half * 256), b.index(s), full.index(s))  # fmt: skip
                count += 1
        else:
            row, key, part = _dkv_tile(band, number - dq_tiles)
            batch, kv_head = band.row(row)
            first, end = band.seeing(key, TILE, 64)
            first, met = band.in_band(first, end, 64)
            for member in range(band.members):
                place = row * band.members + member
                head = kv_head * band.group + band.first_member + member
                for i in range(first, first + met):
                    s, phase = ring_place(count, STAGES)
                    mbarrier_wait(empty.index(s), phase ^ 1)
                    a_at = (0, place, i * 64 - band.first_tile * TILE, key - band.k_begin)
                    b_at = (batch, head, band.q_begin + i * 64, part % 2 * 256)
                    a_tile = smem_tile(a.index(s), p_cols_desc)
                    if part < 2:
                        _load(p_cols_desc, a_at, a_tile, dout_desc, b_at, b.index(s), full.index(s))
                    else:
                        _load(ds_cols_desc, a_at, a_tile, q_desc, b_at, b.index(s), full.index(s))
                    count += 1
        number = queue.fetch(turn, counter, tiles, True)
        turn += 1


@gluon.jit
def _sum(C: gl.constexpr, parts, acc, count, steps, cols_desc, STAGES: gl.constexpr, ACROSS: gl.constexpr):
    """Add a tile's steps, of which there is at least one. ACROSS: the consumer's rows of the result are columns of the
    workspace."""
    a, b, full, empty = parts
    for i in range(steps):
        s, phase = ring_place(count, STAGES)
        mbarrier_wait(full.index(s), phase)
        if ACROSS:
            cols = smem_tile(a.index(s), cols_desc).reshape([64, TILE])
            a_tile = cols.slice(C * 64, 64, dim=1).permute((1, 0))
        else:
            a_tile = a.index(s).reshape([TILE, 64]).slice(C * 64, 64, dim=0)
        made = wgmma(a_tile, b.index(s).reshape([64, 256]), acc, use_acc=True, is_async=True)
        acc = wgmma_wait(1, deps=[made])
        if i > 0:
            before, _ = ring_place(count - 1, STAGES)
            mbarrier_arrive(empty.index(before))
        count += 1
    acc = wgmma_wait(0, deps=[acc])
    before, _ = ring_place(count - 1, STAGES)
    mbarrier_arrive(empty.index(before))
    return acc, count


@gluon.jit
def _leave_half(x, box, results, which, batch, head, row, col):
    """Write 128 columns of a result. which: 0 for dq, 1 for dv, 2 for dk."""
    dq_desc, dv_desc, dk_desc = results
    tma_store_wait(0)
    box.reshape([64, 128]).store(x)
    fence_async()
    if which == 0:
        tma_store(dq_desc, (batch, head, row, col), box)
    elif which == 1:
        tma_store(dv_desc, (batch, head, row, col), box)
    else:
        tma_store(dk_desc, (batch, head, row, col), box)


@gluon.jit
def _leave_result(acc, box, results, which, batch, head, row, half, dtype: gl.constexpr):
    """Write a consumer's 256 columns of a result, as two boxes."""
    HALF: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 128, 16])
    low, high = gl.split(gl.permute(gl.reshape(acc.to(dtype), [64, 2, 128]), (0, 2, 1)))
    _leave_half(gl.convert_layout(low, HALF), box, results, which, batch, head, row, half * 256)
    _leave_half(gl.convert_layout(high, HALF), box, results, which, batch, head, row, half * 256 + 128)


@gluon.jit
def _make_products(
    C: gl.constexpr, parts, band, boxes, results, cols_desc, sums_ptr, queue, factor, STAGES: gl.constexpr,
    DQ: gl.constexpr,
):  # fmt: skip
    """A consumer with 64 rows of each tile of a result."""
    dtype: gl.constexpr = boxes.dtype
    ACC: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 256, 16])
    box = boxes.index(C)
    grid_dependency_wait()
    count = gl.to_tensor(0)
    turn = gl.to_tensor(0)
    dq_tiles, tiles = _sizes(band, DQ)
    key_tiles = (band.keys - band.k_begin + TILE - 1) // TILE
    number = gl.program_id(0)
    while number < tiles:
        if number < dq_tiles:
            place, tile, half = _dq_tile(band, number)
            batch, head, _ = band.head(place)
            query = band.q_begin + tile * TILE
            _, met = band.seen(query)
            acc = gl.zeros([64, 256], gl.float32, ACC)
            acc, count = _sum(C, parts, acc, count, met, cols_desc, STAGES, False)
            _leave_result(acc * factor, box, results, 0, batch, head, query + C * 64, half, dtype)
        else:
            row, key, part = _dkv_tile(band, number - dq_tiles)
            batch, kv_head = band.row(row)
            first, end = band.seeing(key, TILE, 64)
            begin, met = band.in_band(first, end, 64)
            if met > 0:
                acc = gl.zeros([64, 256], gl.float32, ACC)
                if sums_ptr is not None:
                    # other bands may have added before, or will behind
                    before = (first < begin) | (band.first_member > 0)
                    behind = (end > begin + met) | (band.first_member + band.members < band.group)
                    at = ((part // 2 * band.rows + row) * key_tiles * TILE + key - band.k_begin + C * 64).to(gl.int64)
                    rows = at + gl.arange(0, 64, gl.SliceLayout(1, ACC))
                    cols = part % 2 * 256 + gl.arange(0, 256, gl.SliceLayout(0, ACC))
                    sum_ptrs = sums_ptr + rows[:, None] * 512 + cols[None, :]
                    if before:
                        acc = gl.load(sum_ptrs)
                acc, count = _sum(C, parts, acc, count, met * band.members, cols_desc, STAGES, True)
                whole = met > 0
                if sums_ptr is not None:
                    if behind:
                        gl.store(sum_ptrs, acc)
                    whole = behind == 0
                if whole:
                    times = gl.where(part < 2, 1.0, factor)
                    which = 1 + part // 2
                    _leave_result(acc * times, box, results, which, batch, kv_head, key + C * 64, part % 2, dtype)
        number = queue.next_tile(turn, tiles, True)
        turn += 1
    tma_store_wait(0)


@gluon.jit(
    do_not_specialize=[
        "tokens", "keys", "kv_heads", "group", "q_begin", "k_begin", "first_row", "rows", "first_member", "members",
        "first_tile", "band_tiles", "left", "right",
    ]
)  # fmt: skip
def attention_band_products_kernel(
    ds_rows_desc, p_cols_desc, ds_cols_desc, q_desc, k_desc, dout_desc, dq_desc, dk_desc, dv_desc, sums_ptr, counter,
    tokens, keys, kv_heads, group, q_begin, k_begin, first_row, rows, first_member, members, first_tile, band_tiles,
    left, right, factor,
    LEFT: gl.constexpr, RIGHT: gl.constexpr, DQ: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """dq of a band's queries, if DQ, and what the band adds to dk and dv, in tiles of 128 rows and 256 columns.

    ds_rows_desc: of a workspace of `attention_band_scores_kernel` in tiles of 128 queries and 64 keys, p_cols_desc and
    ds_cols_desc in tiles of 64 queries and 128 keys; q_desc, k_desc, dout_desc: in tiles of 64 rows and 256 columns;
    those of the results: of 64 rows and 128 columns. sums_ptr: dv and dk so far [2, rows, keys to whole tiles, 512] in
    fp32, of keys that several bands see, or None where none are. factor: d score / d (q . k) but for tanh. STAGES:
    steps in flight. The others are those of `Band`."""
    band = Band(
        tokens, keys, kv_heads, group, q_begin, k_begin, first_row, rows, first_member, members, first_tile,
        band_tiles, left, right, LEFT, RIGHT,
    )  # fmt: skip
    a = smem_tiles(STAGES, ds_rows_desc)
    b = smem_tiles(STAGES, q_desc)
    boxes = smem_tiles(2, dq_desc)
    queue = tile_queue(2, 1)
    full, empty = mbarriers((STAGES, 1), (STAGES, 2))
    fence_async()
    parts = (a, b, full, empty)
    results = (dq_desc, dv_desc, dk_desc)
    loaded = (ds_rows_desc, p_cols_desc, ds_cols_desc, q_desc, k_desc, dout_desc)
    gl.warp_specialize(
        [
            (_make_products, (0, parts, band, boxes, results, p_cols_desc, sums_ptr, queue, factor, STAGES, DQ)),
            (_make_products, (1, parts, band, boxes, results, p_cols_desc, sums_ptr, queue, factor, STAGES, DQ)),
            (_load_products, (parts, band, loaded, queue, counter, STAGES, DQ)),
        ],
        [4, 1],
        [240, 32],
    )  # fmt: skip
