"""Device kernels of attention's gradients on Hopper: rows' statistics, dk and dv and parts of dq (in Gluon), dq.

A program of the main kernel owns 128 keys at a time and walks the queries that see them, 64 at a time, of every head of
its group: a producer loads tiles, two consumers have 64 keys each. Scores are transposed, so that p and ds feed dv and
dk from registers; ds also goes through shared memory for dq, which the consumers split by columns and the producer
adds to a workspace by bulk reductions: in any order, so that dq may differ in its last bits from run to run, or
ordered, tile after tile of keys. Scores live in units of log 2.
"""

import triton
import triton.language as tl

from tilesmith.ops.attn.hopper_corner import at, corner, inside
from tilesmith.ops.attn.hopper_forward import before, bend, draw, holds, tickets
from tilesmith.ops.gluon_shim import (
    aggregate,
    arrive,
    await_number,
    barriers,
    bulk_add,
    bulk_finish,
    bulk_load,
    bulk_store,
    bulk_wait,
    fence,
    gl,
    gluon,
    load_row,
    meet,
    mma,
    mma_wait,
    publish,
    reinterpret,
    tiles_of,
    wait,
)

LOG2E = tl.constexpr(1.4426950408889634)


@triton.jit
def _block_rows(blocks_ptr, block, tokens, begin):
    """The 64 tokens of a block, and where they end: from `begin` on, or of packed documents (`key_tiles_kernel`)."""
    lane = tl.arange(0, 64)
    rows, end = begin + block * 64 + lane, tokens
    if blocks_ptr is not None:
        held = block < tl.load(blocks_ptr)
        entry = blocks_ptr + (block + 1) * 2
        rows, end = tl.load(entry, mask=held, other=0) + lane, tl.load(entry + 1, mask=held, other=0)
    return rows, end


@triton.jit
def attention_rows_kernel(
    out_ptr, dout_ptr, lse_ptr, dlse_ptr, row_lse_ptr, delta_ptr, token_delta_ptr, dq_ptr, turns_ptr, blocks_ptr,
    out_strides, dout_strides, dlse_strides, heads, tokens, begin, blocks, DIM: tl.constexpr, D: tl.constexpr,
):  # fmt: skip
    """For 64 queries: lse in units of log 2 (+inf for a row that sees nothing or does not exist, which
    makes its p 0); delta = sum(out * dout) - dlse, also in the order of the tokens if asked for; zeros for whose turn
    it is to add to their part of dq and, where not all parts get a first tile, for that part."""
    head_row = tl.program_id(0) // blocks
    block = tl.program_id(0) - head_row * blocks
    batch = (head_row // heads).to(tl.int64)
    head = (head_row % heads).to(tl.int64)
    place = tl.program_id(0).to(tl.int64) * 64
    lane = tl.arange(0, 64)
    rows, end = _block_rows(blocks_ptr, block, tokens, begin)
    held = rows < end
    cols = tl.arange(0, D)[None, :]
    long_rows = rows.to(tl.int64)
    out_ptr += batch * out_strides[0] + head * out_strides[1]
    dout_ptr += batch * dout_strides[0] + head * dout_strides[1]
    there = held[:, None] & (cols < DIM)
    out = tl.load(out_ptr + (long_rows * out_strides[2])[:, None] + cols, mask=there, other=0.0)
    dout = tl.load(dout_ptr + (long_rows * dout_strides[2])[:, None] + cols, mask=there, other=0.0)
    delta = tl.sum(out.to(tl.float32) * dout.to(tl.float32), 1)
    lse = tl.load(lse_ptr + head_row.to(tl.int64) * tokens + rows, mask=held, other=float("-inf"))
    if dlse_ptr is not None:
        dlse_ptr += batch * dlse_strides[0] + head * dlse_strides[1]
        delta -= tl.load(dlse_ptr + long_rows * dlse_strides[2], mask=held, other=0.0).to(tl.float32)
    dead = lse == float("-inf")
    tl.store(row_lse_ptr + place + lane, tl.where(dead, float("inf"), lse * LOG2E))
    tl.store(delta_ptr + place + lane, tl.where(dead, 0.0, delta))
    if token_delta_ptr is not None:
        tl.store(token_delta_ptr + head_row.to(tl.int64) * tokens + rows, delta, mask=held)
    if turns_ptr is not None:
        tl.store(turns_ptr + tl.program_id(0), 0)
    if dq_ptr is not None and (turns_ptr is None or blocks_ptr is not None):
        tl.store(dq_ptr + place * D + tl.arange(0, 64 * D), tl.zeros([64 * D], tl.float32))


@triton.jit
def attention_dq_kernel(
    parts_ptr, dq_ptr, blocks_ptr, dq_strides, heads, tokens, begin, blocks, scale, DIM: tl.constexpr, D: tl.constexpr
):
    """dq of 64 queries from what the main kernel added up, which lies in the order of its registers: half of the
    columns, group of 8 columns, warp, row of 8, pair of columns, upper or lower 8 rows, column."""
    head_row = tl.program_id(0) // blocks
    block = tl.program_id(0) - head_row * blocks
    x = tl.load(parts_ptr + tl.program_id(0).to(tl.int64) * (64 * D) + tl.arange(0, 64 * D)) * scale
    x = tl.reshape(x, [2, D // 16, 4, 8, 4, 2, 2])
    x = tl.reshape(tl.permute(x, (2, 5, 3, 0, 1, 4, 6)), [64, D])
    rows, end = _block_rows(blocks_ptr, block, tokens, begin)
    dq_ptr += (head_row // heads).to(tl.int64) * dq_strides[0] + (head_row % heads).to(tl.int64) * dq_strides[1]
    cols = tl.arange(0, D)[None, :]
    dq_ptr += (rows.to(tl.int64) * dq_strides[2])[:, None] + cols
    tl.store(dq_ptr, x.to(dq_ptr.dtype.element_ty), mask=(rows < end)[:, None] & (cols < DIM))


@triton.jit
def attention_dsinks_kernel(row_lse_ptr, delta_ptr, sinks_ptr, dsinks_ptr, batches, heads, rows, BLOCK: tl.constexpr):
    """dsinks of one head: -sum over batch and queries of exp(sink - lse) * delta. rows: of a head, padding included."""
    head = tl.program_id(0)
    sink = tl.load(sinks_ptr + head).to(tl.float32) * LOG2E
    total = tl.zeros((BLOCK,), tl.float32)
    for batch in range(batches):
        row = (tl.cast(batch, tl.int64) * heads + head) * rows
        for first in range(0, rows, BLOCK):
            token = first + tl.arange(0, BLOCK)
            lse = tl.load(row_lse_ptr + row + token, mask=token < rows, other=float("inf"))
            delta = tl.load(delta_ptr + row + token, mask=token < rows, other=0.0)
            total -= tl.exp2(sink - lse) * delta
    tl.store(dsinks_ptr + head, tl.sum(total, 0).to(dsinks_ptr.dtype.element_ty))


@aggregate
class KeyWalk:
    """What every part of a program knows: the sizes of the call, who sees which keys, and the order of the tiles.

    q_begin, k_begin: the first query and key of the first tiles; those before see nothing, or nobody sees them, and
    they may hold NaN. q_blocks, k_blocks: tiles of a head. rows: batch * kv heads. section: how many kv heads are
    worked on together, so that what they stream stays in L2. left, right: the window. PACKED: sizes and beginnings are
    those of one document at a time. BK: keys of a tile.
    """

    tokens: gl.tensor
    keys: gl.tensor
    kv_heads: gl.tensor
    q_begin: gl.tensor
    k_begin: gl.tensor
    q_blocks: gl.tensor
    k_blocks: gl.tensor
    rows: gl.tensor
    section: gl.tensor
    left: gl.tensor
    right: gl.tensor
    GROUP: gl.constexpr
    LEFT: gl.constexpr
    RIGHT: gl.constexpr
    DYNAMIC: gl.constexpr
    PACKED: gl.constexpr
    BK: gl.constexpr
    D: gl.constexpr
    STAGES: gl.constexpr

    @gluon.constexpr_function
    def __init__(
        self, tokens, keys, kv_heads, q_begin, k_begin, q_blocks, k_blocks, rows, section, left, right,
        GROUP, LEFT, RIGHT, DYNAMIC, PACKED, BK, D, STAGES,
    ):  # fmt: skip
        self.tokens, self.keys, self.kv_heads, self.q_begin, self.k_begin = tokens, keys, kv_heads, q_begin, k_begin
        self.q_blocks, self.k_blocks, self.rows, self.section = q_blocks, k_blocks, rows, section
        self.left, self.right = left, right
        self.GROUP, self.LEFT, self.RIGHT = gl.constexpr(GROUP), gl.constexpr(LEFT), gl.constexpr(RIGHT)
        self.DYNAMIC, self.PACKED = gl.constexpr(DYNAMIC), gl.constexpr(PACKED)
        self.BK, self.D, self.STAGES = gl.constexpr(BK), gl.constexpr(D), gl.constexpr(STAGES)

    @gluon.jit
    def tile(self, number, table):
        """First key and kv head of a tile, the places of its keys and of its queries (`corner`), its first block of
        queries, and the same walk over its document. Sections of heads one after another; in each the first keys of
        all its heads first, which a causal mask shows to the most queries."""
        behind = number // (self.section * self.k_blocks)
        inside = number - behind * (self.section * self.k_blocks)
        width = gl.minimum(self.section, self.rows - behind * self.section)
        block = inside // width
        row = behind * self.section + inside - block * width
        batch = row // self.kv_heads
        kv_head = row - batch * self.kv_heads
        place = row * self.GROUP * self.q_blocks
        found = (self.k_begin + block * self.BK, kv_head, batch, batch, place, self)
        if self.PACKED:
            entry = table + (block + 1) * 8
            walk = self.within(gl.load(entry + 3), gl.load(entry + 1), gl.load(entry + 5), gl.load(entry + 7))
            found = (gl.load(entry), kv_head, gl.load(entry + 2), gl.load(entry + 4), place + gl.load(entry + 6), walk)
        return found

    @gluon.jit
    def within(self, tokens, keys, q_begin, q_blocks):
        """The same for a document of so many tokens and keys, and with so many blocks of queries from q_begin on."""
        return KeyWalk(
            tokens, keys, self.kv_heads, q_begin, self.k_begin, q_blocks, self.k_blocks, self.rows, self.section,
            self.left, self.right, self.GROUP, self.LEFT, self.RIGHT, self.DYNAMIC, self.PACKED, self.BK, self.D,
            self.STAGES,
        )  # fmt: skip

    @gluon.jit
    def span(self, start):
        """The first block of queries that a tile of keys meets, and how many: at least one, where all may be hidden,
        or none of keys that nobody sees."""
        shift = self.keys - self.tokens
        first = self.q_blocks * 0
        end = self.q_blocks
        if self.RIGHT:
            first = gl.minimum(gl.maximum(start - shift - self.right - self.q_begin, 0) // 64, self.q_blocks - 1)
        if self.LEFT:
            end = gl.minimum(end, (gl.maximum(start + self.BK - shift + self.left - self.q_begin, 0) + 63) // 64)
        blocks = gl.maximum(end - first, 1)
        if self.PACKED:
            blocks = gl.where(self.q_blocks == 0, 0, blocks)
        return first, blocks

    @gluon.jit
    def earlier(self, start):
        """The first block of queries that the tile of keys before this one meets, and their end: 0 for the first."""
        first_key = self.keys * 0
        if self.LEFT:
            first_key = gl.maximum(self.keys - self.tokens - self.left, 0)
        first, blocks = self.span(start - self.BK)
        return first, gl.where(start > first_key, first + blocks, 0)


START, KEYS_AT, KV_HEAD, BLOCKS, EDGE, LIMIT = (gl.constexpr(i) for i in range(6))


@gluon.jit
def announce(ticket, turn, walk, start, k_place, kv_head, first, blocks):
    """Tell the consumers of a tile, whose blocks of queries come from the last to the first."""
    ticket.open(turn)
    ticket.write(turn, START, inside(start, walk.keys, walk.PACKED))
    ticket.write(turn, KEYS_AT, k_place)
    ticket.write(turn, KV_HEAD, kv_head)
    ticket.write(turn, BLOCKS, blocks)
    edge = walk.q_begin + (first + blocks - 1) * 64 + (walk.keys - walk.tokens) - start
    ticket.write(turn, EDGE, edge + walk.right if walk.RIGHT else edge)
    ticket.write(turn, LIMIT, walk.keys - start)
    ticket.close(turn)


@gluon.jit
def load_pair(k_desc, v_desc, there, k, v, full, empty, turn):
    """A tile's keys and values."""
    wait(empty.index(0), (turn & 1) ^ 1)
    bulk_load(k_desc, there, full.index(0), k)
    wait(empty.index(1), (turn & 1) ^ 1)
    bulk_load(v_desc, there, full.index(1), v)


@gluon.jit
def _add(parts, dq_desc, parking, turns_ptr, job, place, after, D: gl.constexpr):
    """Start to add what the consumers have parked to a block's part of dq. With turns_ptr not before `after` stands
    there, or, where it is -1, as the first."""
    ticket, q, dout, k, v, lse, delta, kv_full, kv_empty, q_full, q_empty, dout_full, dq_full, dq_empty = parts
    box = job & 1
    wait(dq_full.index(box), (job >> 1) & 1)
    follows = turns_ptr is None
    if turns_ptr is not None:
        follows = after >= 0
        if follows:
            await_number(turns_ptr + place, after)
    for c in gl.static_range(2):
        parked = reinterpret(parking.index(box * 2 + c), gl.float32, [D // 8, 256], dq_desc.layout)
        there = [place * (D // 4) + c * (D // 8), 0]
        if follows:
            bulk_add(dq_desc, there, parked)
        else:
            bulk_store(dq_desc, there, parked)


@gluon.jit
def _added(parts, turns_ptr, job, place, end):
    """Wait until it is added, and make room. With turns_ptr `end` comes to stand there."""
    ticket, q, dout, k, v, lse, delta, kv_full, kv_empty, q_full, q_empty, dout_full, dq_full, dq_empty = parts
    if turns_ptr is not None:
        bulk_finish()
        publish(turns_ptr + place, end)
    else:
        bulk_wait(0)
    arrive(dq_empty.index(job & 1))


@gluon.jit
def _drain(parts, dq_desc, parking, turns_ptr, adds, keep, D: gl.constexpr):
    """Start to add dq of all blocks that wait for it but the last `keep`, one after another."""
    waiting, going, job, place_going, place, after, next_place, next_after, end = adds
    for _ in range(waiting - keep):
        if going > 0:
            _added(parts, turns_ptr, job - 1, place_going, end)
        _add(parts, dq_desc, parking, turns_ptr, job, place, after, D)
        going = job * 0 + 1
        job += 1
        place_going = place
        place = next_place
        after = next_after
    return gl.minimum(waiting, keep), going, job, place_going, place, after, next_place, next_after, end


@gluon.jit
def _settle(parts, turns_ptr, adds):
    """Wait for what is being added."""
    waiting, going, job, place_going, place, after, next_place, next_after, end = adds
    if going > 0:
        _added(parts, turns_ptr, job - 1, place_going, end)
    return waiting, going * 0, job, place_going, place, after, next_place, next_after, end


@gluon.jit
def _produce(parts, whole, q_desc, k_desc, v_desc, dout_desc, dq_desc, lse_ptr, delta_ptr, turns_ptr, counter, table,
             parking, LAG: gl.constexpr):  # fmt: skip
    """LAG: how many blocks after a block's tiles its dq is awaited."""
    ticket, q, dout, k, v, lse, delta, kv_full, kv_empty, q_full, q_empty, dout_full, dq_full, dq_empty = parts
    D: gl.constexpr = whole.D
    LANES: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    lane = gl.arange(0, 64, LANES)
    count = gl.to_tensor(0)
    turn = gl.to_tensor(0)
    number = gl.program_id(0)
    tiles = whole.k_blocks * whole.rows
    # dq of blocks that is to be added: of how many, whether the one before them is being added, their number, where
    # that one goes, where the first of them goes and after whom, the next one's, and the end of their tile of keys
    adds = (count, count, count, count, count, count, count, count, count)
    while number < tiles:
        start, kv_head, k_place, q_place, place, walk = whole.tile(number, table)
        first, blocks = walk.span(start)
        earlier_first, earlier_end = walk.earlier(start)
        head = kv_head * walk.GROUP
        place += first
        announce(ticket, turn, walk, start, k_place, kv_head, first, blocks)
        k_corner = corner(k_place, kv_head, start, walk.keys, walk.PACKED)
        next_number = tiles
        if walk.PACKED and blocks == 0:
            adds = _settle(parts, turns_ptr, _drain(parts, dq_desc, parking, turns_ptr, adds, 0, D))
            load_pair(k_desc, v_desc, k_corner, k, v, kv_full, kv_empty, turn)
            if walk.DYNAMIC:
                next_number = draw(counter, tiles)
        for member in range(walk.GROUP):
            for i in range(blocks):
                # from the last queries on: a tile that starts later, with fewer, then finds its turn come
                block = blocks - 1 - i
                there = corner(q_place, head + member, walk.q_begin + (first + block) * 64, walk.tokens, walk.PACKED)
                s = count % walk.STAGES
                wait(q_empty.index(s), ((count // walk.STAGES) & 1) ^ 1)
                bulk_load(q_desc, there, q_full.index(s), q.index(s))
                load_row(lse_ptr + (place + block) * 64 + lane, q_full.index(s), lse.index(s))
                bulk_load(dout_desc, there, dout_full.index(s), dout.index(s))
                load_row(delta_ptr + (place + block) * 64 + lane, dout_full.index(s), delta.index(s))
                if member + i == 0:
                    # what is being added makes room for the last dq of the tile before, after which its keys are given
                    # back; and dk and dv are written from the same room, so that the last dq must be added at once
                    adds = _settle(parts, turns_ptr, adds)
                    load_pair(k_desc, v_desc, k_corner, k, v, kv_full, kv_empty, turn)
                keep = gl.where(member + i == 0, 0, LAG - 1)
                adds = _drain(parts, dq_desc, parking, turns_ptr, adds, keep, D)
                if member + i == 0:
                    adds = _settle(parts, turns_ptr, adds)
                if walk.DYNAMIC:
                    # neither so late that it is waited for, nor so early that another program would be free before
                    if (member == walk.GROUP - 1) & (i == gl.maximum(blocks - 2, 0)):
                        next_number = draw(counter, tiles)
                waiting, going, job, place_going, place_first, after_first, place_next, after_next, end = adds
                met = (first + block >= earlier_first) & (first + block < earlier_end)
                after = gl.where(met, start, -1)
                place_next = place + block
                after_next = after
                place_first = gl.where(waiting == 0, place_next, place_first)
                after_first = gl.where(waiting == 0, after, after_first)
                adds = (waiting + 1, going, job, place_going, place_first, after_first, place_next, after_next,
                        start + walk.BK)  # fmt: skip
                count += 1
            place += whole.q_blocks
        number = next_number
        turn += 1
    _settle(parts, turns_ptr, _drain(parts, dq_desc, parking, turns_ptr, adds, 0, D))
    ticket.open(turn)
    ticket.write(turn, START, -1)
    ticket.close(turn)


@gluon.jit
def hide(x, edge, window, limit, LEFT: gl.constexpr, RIGHT: gl.constexpr, TAIL: gl.constexpr):
    """Zeros where a key (row of x) and a query of a block (column) do not see each other: they do where query + edge -
    window <= key <= query + edge and key < limit."""
    crossed = edge < -(1 << 30)
    if TAIL:
        crossed = crossed | (limit < 64)
    if RIGHT:
        crossed = crossed | (edge < 63)
    if LEFT:
        crossed = crossed | (edge - window > -63)
    if crossed:
        key = gl.arange(0, 64, gl.SliceLayout(1, x.type.layout))[:, None]
        query = gl.arange(0, 64, gl.SliceLayout(0, x.type.layout))[None, :]
        word = gl.where(key < limit if TAIL else key >= 0, -1, 0)
        if RIGHT:
            word = word & ~before(key - edge, query)
        if LEFT:
            word = word & before(key - edge + window + 1, query)
        x = gl.where(holds(word, query), x, 0.0)
    return x


@gluon.jit
def _park(C: gl.constexpr, dq, dq_desc, parking, dq_full, dq_empty, job, D: gl.constexpr):
    """Leave a block's dq to the producer, in the order of the registers, so that a thread stores 16 bytes at once."""
    box = job & 1
    wait(dq_empty.index(box), ((job >> 1) & 1) ^ 1)
    bulk_wait(0)  # of dk and dv of the tile before
    x = gl.reshape(dq, [4, 2, 8, D // 16, 4, 2])
    x = gl.permute(x, (3, 0, 2, 4, 1, 5))
    parked = reinterpret(parking.index(box * 2 + C), gl.float32, [D // 8, 256], dq_desc.layout)
    parked.store(gl.reshape(x, [D // 8, 256]))
    fence()
    arrive(dq_full.index(box))


@gluon.jit
def _write(C: gl.constexpr, ticket, turn, count, dk, dv, dk_desc, dv_desc, parking, dq_empty, dtype: gl.constexpr,
           D: gl.constexpr, PACKED: gl.constexpr):  # fmt: skip
    """Write a tile's dk and dv, from the boxes that the next dq would be left in."""
    place = ticket.read(turn, KEYS_AT)
    kv_head = ticket.read(turn, KV_HEAD)
    start = ticket.read(turn, START) + C * 64
    ticket.give_back(turn)
    bulk_wait(0)
    wait(dq_empty.index(count & 1), ((count >> 1) & 1) ^ 1)
    parked_dk = parking.index((count & 1) * 2 + C)
    parked_dk.reshape([64, D]).store(dk.to(dtype))
    fence()
    bulk_store(dk_desc, at(place, kv_head, start, PACKED), parked_dk)
    other = count + 1
    wait(dq_empty.index(other & 1), ((other >> 1) & 1) ^ 1)
    parked_dv = parking.index((other & 1) * 2 + C)
    parked_dv.reshape([64, D]).store(dv.to(dtype))
    fence()
    bulk_store(dv_desc, at(place, kv_head, start, PACKED), parked_dv)


@gluon.jit
def _consume(
    C: gl.constexpr, parts, window, dq_desc, dk_desc, dv_desc, inner, outer, scale, ds, parking,
    LEFT: gl.constexpr, RIGHT: gl.constexpr, TAIL: gl.constexpr, SPLIT: gl.constexpr, D: gl.constexpr,
    GROUP: gl.constexpr, STAGES: gl.constexpr, SOFTCAP: gl.constexpr, PACKED: gl.constexpr,
):  # fmt: skip
    ticket, q, dout, k, v, lse, delta, kv_full, kv_empty, q_full, q_empty, dout_full, dq_full, dq_empty = parts
    HALF: gl.constexpr = D // 2
    dtype: gl.constexpr = q.dtype
    SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16])
    DKV: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16])
    DQ: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HALF, 16])
    P: gl.constexpr = gl.DotOperandLayout(0, DKV, 2)
    QUERY: gl.constexpr = gl.SliceLayout(0, SCORES)
    k_rows = k.reshape([128, D]).slice(C * 64, 64, dim=0)
    v_rows = v.reshape([128, D]).slice(C * 64, 64, dim=0)
    k_cols = k.reshape([128, D]).slice(C * HALF, HALF, dim=1)
    count = gl.to_tensor(0)
    turn = gl.to_tensor(0)
    ticket.take(turn)
    while ticket.read(turn, START) >= 0:
        blocks = ticket.read(turn, BLOCKS)
        # key c and query i of a block see each other where i + edge - window <= c <= i + edge and c < limit
        last_edge = ticket.read(turn, EDGE) - C * 64
        limit = ticket.read(turn, LIMIT) - C * 64
        dk = gl.zeros([64, D], gl.float32, DKV)
        dv = gl.zeros([64, D], gl.float32, DKV)
        zero = gl.zeros([64, 64], gl.float32, SCORES)
        zero_dq = gl.zeros([64, HALF], gl.float32, DQ)
        wait(kv_full.index(0), turn & 1)
        wait(kv_full.index(1), turn & 1)
        for _ in range(GROUP):
            for i in range(blocks):
                s = count % STAGES
                phase = (count // STAGES) & 1
                q_tile = q.index(s).reshape([64, D])
                dout_tile = dout.index(s).reshape([64, D])
                wait(q_full.index(s), phase)
                s_made = mma(k_rows, q_tile.permute((1, 0)), zero, use_acc=False, is_async=True)
                wait(dout_full.index(s), phase)
                dp_made = mma(v_rows, dout_tile.permute((1, 0)), zero, use_acc=False, is_async=True)
                row_lse = lse.index(s).load(QUERY)
                score = mma_wait(1, deps=[s_made])
                if SOFTCAP:
                    score = bend(score * inner)
                p = gl.exp2(score * outer - row_lse[None, :])
                if LEFT or RIGHT or TAIL:
                    p = hide(p, last_edge - i * 64, window, limit, LEFT, RIGHT, TAIL)
                p_operand = gl.convert_layout(p.to(dtype), P)
                row_delta = delta.index(s).load(QUERY)
                dp = mma_wait(0, deps=[dp_made])
                d_score = p * (dp - row_delta[None, :])
                if SOFTCAP:
                    d_score = d_score * (1.0 - score * score)
                d_score = d_score.to(dtype)
                ds_tile = ds.index(count & 1)
                ds_operand = gl.convert_layout(d_score, P)
                ds_tile.slice(C * 64, 64, dim=0).store(d_score)
                if SPLIT:
                    # two numbers a consumer: the leader may be one step ahead
                    fence()
                    meet("arrive", 10 + C * 2 + (count & 1))
                    dv_made = mma(p_operand, dout_tile, dv, use_acc=True, is_async=True)
                    meet("sync", 12 - C * 2 + (count & 1))
                    dq_made = mma(ds_tile.permute((1, 0)), k_cols, zero_dq, use_acc=False, is_async=True)
                    dk_made = mma(ds_operand, q_tile, dk, use_acc=True, is_async=True)
                    dq, dv, p_operand = mma_wait(1, deps=[dq_made, dv_made, p_operand])
                else:
                    dv_made = mma(p_operand, dout_tile, dv, use_acc=True, is_async=True)
                    fence()
                    meet("sync", 9)
                    dq_made = mma(ds_tile.permute((1, 0)), k_cols, zero_dq, use_acc=False, is_async=True)
                    dv, p_operand = mma_wait(1, deps=[dv_made, p_operand])
                    dk_made = mma(ds_operand, q_tile, dk, use_acc=True, is_async=True)
                    dq = mma_wait(1, deps=[dq_made])
                _park(C, dq, dq_desc, parking, dq_full, dq_empty, count, D)
                dk, ds_operand = mma_wait(0, deps=[dk_made, ds_operand])
                arrive(q_empty.index(s))
                count += 1
        arrive(kv_empty.index(0))
        arrive(kv_empty.index(1))
        _write(C, ticket, turn, count, dk * scale, dv, dk_desc, dv_desc, parking, dq_empty, dtype, D, PACKED)
        turn += 1
        ticket.take(turn)
    bulk_wait(0)


@gluon.jit(
    do_not_specialize=[
        "tokens", "keys", "kv_heads", "q_begin", "k_begin", "q_blocks", "k_blocks", "rows", "section", "left", "right",
    ]
)  # fmt: skip
def attention_dkv_kernel(
    q_desc, k_desc, v_desc, dout_desc, dq_desc, dk_desc, dv_desc, lse_ptr, delta_ptr, turns_ptr, counter, table,
    tokens, keys, kv_heads, q_begin, k_begin, q_blocks, k_blocks, rows, section, left, right, inner, outer, scale,
    GROUP: gl.constexpr, LEFT: gl.constexpr, RIGHT: gl.constexpr, TAIL: gl.constexpr, DYNAMIC: gl.constexpr,
    SPLIT: gl.constexpr, LAG: gl.constexpr, D: gl.constexpr, STAGES: gl.constexpr, SOFTCAP: gl.constexpr,
):  # fmt: skip
    """Tiles of 128 keys of one kv head. turns_ptr: which tile of keys may add to a block's part of dq (the key where it
    starts), or None where all may at once. table: tiles of documents (`key_tiles_kernel`), or None. inner, outer: q . k
    to scores, before and behind the softcap's tanh; scale: d score / d (q . k) but for tanh. TAIL: the last tile has
    fewer keys. SPLIT: a consumer tells the other one that its half of ds is there, starts dv, and only then waits; else
    both wait at once."""
    dtype: gl.constexpr = q_desc.dtype
    PACKED: gl.constexpr = table is not None
    if PACKED:
        k_blocks = gl.load(table)
    walk = KeyWalk(
        tokens, keys, kv_heads, q_begin, k_begin, q_blocks, k_blocks, rows, section, left, right,
        GROUP, LEFT, RIGHT, DYNAMIC, PACKED, 128, D, STAGES,
    )  # fmt: skip
    PLAIN: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    q = tiles_of(STAGES, q_desc)
    dout = tiles_of(STAGES, q_desc)
    k = tiles_of(1, k_desc).index(0)
    v = tiles_of(1, k_desc).index(0)
    ds = gl.allocate_shared_memory(dtype, [2, 128, 64], gl.NVMMASharedLayout(128, 16, 2))
    parking = tiles_of(4, dk_desc)
    lse = gl.allocate_shared_memory(gl.float32, [STAGES, 64], PLAIN)
    delta = gl.allocate_shared_memory(gl.float32, [STAGES, 64], PLAIN)
    ticket = tickets(2, 6)
    kv_full = barriers(2, 1)
    kv_empty = barriers(2, 2)
    q_full = barriers(STAGES, 129)  # the tile, and 128 threads for the row of numbers
    q_empty = barriers(STAGES, 2)
    dout_full = barriers(STAGES, 129)
    dq_full = barriers(2, 2)
    dq_empty = barriers(2, 1)
    fence()
    parts = (ticket, q, dout, k, v, lse, delta, kv_full, kv_empty, q_full, q_empty, dout_full, dq_full, dq_empty)
    window = left + right if RIGHT else left
    gl.warp_specialize(
        [
            (_produce, (parts, walk, q_desc, k_desc, v_desc, dout_desc, dq_desc, lse_ptr, delta_ptr, turns_ptr, counter,
                        table, parking, LAG)),
            (_consume, (0, parts, window, dq_desc, dk_desc, dv_desc, inner, outer, scale, ds, parking,
                        LEFT, RIGHT, TAIL, SPLIT, D, GROUP, STAGES, SOFTCAP, PACKED)),
            (_consume, (1, parts, window, dq_desc, dk_desc, dv_desc, inner, outer, scale, ds, parking,
                        LEFT, RIGHT, TAIL, SPLIT, D, GROUP, STAGES, SOFTCAP, PACKED)),
        ],
        [4, 4],
        [240, 240],
    )  # fmt: skip
