"""Device kernel of attention's forward on Hopper, in Gluon.

A program is one producer, which loads tiles by the tensor memory accelerator, and two to four consumers (warpgroups of
128 threads) with 64 queries each, which meet the keys from the last visible block to the first. The product with the
values of one block runs while the scores of the next are made. Programs stay: each works on many tiles of queries.
Scores live in units of log 2.
"""

from tilesmith.device.gluon.shim import (
    aggregate,
    arrive,
    barriers,
    bulk_load,
    bulk_store,
    bulk_wait,
    fence,
    gl,
    gluon,
    launch_dependents,
    meet,
    mma,
    mma_wait,
    tiles_of,
    wait,
)
from tilesmith.ops.attn.hopper.dropout import dropped, kept_keys, load_dropout
from tilesmith.ops.attn.hopper.tile_offset import corner

LN2 = gl.constexpr(0.6931471805599453)
NOTHING = gl.constexpr(float("-inf"))
TURN = gl.constexpr(8)  # the named barrier of the first consumer's turn; the others' follow


@aggregate
class Walk:
    """What every part of a program knows: the sizes of the call, who sees which keys, and the order of the tiles.

    blocks: tiles of queries of a head. rows: batch * heads. section: how many heads are worked on together, so that
    their keys and values stay in L2. left, right: the window. group: heads of q that share one of k and v. PACKED:
    tokens and keys are those of one document at a time. With block lists of LIST_K keys, list_share heads have a list
    in common, and list_rows is how many tiles the lists of a batch row have, 0 if all have the same. TURNS: consumers
    ask for their products one after another. SKIP: they leave out blocks that only the others' queries see. HALF: of
    the last block that they see the first of two consumers sees but the first half, and any of three may, and all
    consumers see every other block whole. DIVIDED: programs make whole rounds of tiles; those left over are made in
    shares (`hopper_shares`).
    """

    tokens: gl.tensor
    keys: gl.tensor
    heads: gl.tensor
    blocks: gl.tensor
    rows: gl.tensor
    section: gl.tensor
    left: gl.tensor
    right: gl.tensor
    group: gl.tensor
    list_share: gl.tensor
    list_rows: gl.tensor
    LEFT: gl.constexpr
    RIGHT: gl.constexpr
    WHOLE: gl.constexpr
    DYNAMIC: gl.constexpr
    PACKED: gl.constexpr
    BM: gl.constexpr
    BN: gl.constexpr
    D: gl.constexpr
    DV: gl.constexpr
    CONSUMERS: gl.constexpr
    STAGES: gl.constexpr
    V_STAGES: gl.constexpr
    Q_STAGES: gl.constexpr
    LIST_K: gl.constexpr
    TURNS: gl.constexpr
    SKIP: gl.constexpr
    HALF: gl.constexpr
    DIVIDED: gl.constexpr

    @gluon.constexpr_function
    def __init__(
        self, tokens, keys, heads, blocks, rows, section, left, right, group, list_share, list_rows,
        LEFT, RIGHT, WHOLE, DYNAMIC, PACKED, BM, BN, D, DV, CONSUMERS, STAGES, Q_STAGES, LIST_K, HALF=False, V_STAGES=0,
        DIVIDED=False,
    ):  # fmt: skip
        self.tokens, self.keys, self.heads, self.blocks, self.rows = tokens, keys, heads, blocks, rows
        self.section, self.left, self.right, self.group = section, left, right, group
        self.list_share, self.list_rows = list_share, list_rows
        self.LEFT, self.RIGHT = gl.constexpr(LEFT), gl.constexpr(RIGHT)
        self.WHOLE, self.DYNAMIC, self.PACKED = gl.constexpr(WHOLE), gl.constexpr(DYNAMIC), gl.constexpr(PACKED)
        self.BM, self.BN, self.D, self.DV = gl.constexpr(BM), gl.constexpr(BN), gl.constexpr(D), gl.constexpr(DV)
        self.CONSUMERS, self.STAGES = gl.constexpr(CONSUMERS), gl.constexpr(STAGES)
        self.V_STAGES = gl.constexpr(V_STAGES or STAGES)
        self.Q_STAGES, self.LIST_K = gl.constexpr(Q_STAGES), gl.constexpr(LIST_K)
        self.TURNS, self.HALF = gl.constexpr(CONSUMERS == 3 and not (LEFT or PACKED)), gl.constexpr(HALF)
        self.SKIP = gl.constexpr((LEFT or RIGHT) and LIST_K == 0 and BN <= 64 * (CONSUMERS - 1))
        self.DIVIDED = gl.constexpr(DIVIDED)

    @gluon.jit
    def tiles(self):
        """How many tiles the programs make."""
        tiles = self.blocks * self.rows
        if self.DIVIDED:
            tiles -= tiles % gl.num_programs(0)
        return tiles

    @gluon.jit
    def tile(self, number, table):
        """First query and head of a tile, tokens and keys of its document, and the places of its queries and its keys
        (`corner`). Sections of heads one after another; in each the last queries of all its heads first, which see the
        most keys, or those of the longest lists, so that the short tiles fill the end."""
        behind = number // (self.section * self.blocks)
        inside = number - behind * (self.section * self.blocks)
        width = gl.minimum(self.section, self.rows - behind * self.section)
        block = inside // width
        row = behind * self.section + inside - block * width
        batch = row // self.heads
        head = row - batch * self.heads
        found = ((self.blocks - 1 - block) * self.BM, head, self.tokens, self.keys, batch, batch)
        if self.LIST_K > 0 and not self.RIGHT:
            entry = table + batch * self.list_rows + head // self.list_share * self.blocks + block
            found = (gl.load(entry) * self.BM, head, self.tokens, self.keys, batch, batch)
        if self.PACKED:
            entry = table + (block + 1) * 8
            start, tokens, keys = gl.load(entry), gl.load(entry + 1), gl.load(entry + 2)
            found = (start, head, tokens, keys, gl.load(entry + 3), gl.load(entry + 4))
        return found

    @gluon.jit
    def placed(self, start, head, tokens):
        """The first query of a tile, how far its consumers' queries are apart, and their heads. Under a causal mask
        tiles end where the queries do, to 64, so that the one with fewer is that of the first queries, which see the
        fewest keys; it makes some of the next one's again. In documents, where the last queries fill half a tile, they
        are made for two heads of a group, and the second head's tile makes the first queries' again."""
        apart, other = 64, 0
        if self.RIGHT and not self.LEFT and not self.PACKED and self.LIST_K == 0:
            start = gl.maximum(start - (self.blocks * self.BM - self.tokens) // 64 * 64, 0)
        if self.RIGHT and not self.LEFT and self.PACKED and self.CONSUMERS == 2:
            half = (self.group % 2 == 0) & (start > 0) & (tokens - start <= 64)
            start = gl.where(half & (head % 2 == 1), 0, start)
            other = gl.where(half & (head % 2 == 0), 1, 0)
            apart = 64 - other * 64
        return start, apart, other

    @gluon.jit
    def within(self, tokens, keys):
        """The same for a document of so many tokens and keys."""
        return Walk(
            tokens, keys, self.heads, self.blocks, self.rows, self.section, self.left, self.right, self.group,
            self.list_share, self.list_rows, self.LEFT, self.RIGHT, self.WHOLE, self.DYNAMIC, self.PACKED,
            self.BM, self.BN, self.D, self.DV, self.CONSUMERS, self.STAGES, self.Q_STAGES, self.LIST_K, self.HALF,
            self.V_STAGES, self.DIVIDED,
        )  # fmt: skip

    @gluon.jit
    def end(self, query):
        """The end of the keys that a query sees."""
        end = self.keys
        if self.RIGHT:
            end = gl.minimum(self.keys, query + (self.keys - self.tokens) + self.right + 1)
        return end

    @gluon.jit
    def begin(self, query):
        """The first key that a query sees."""
        begin = self.keys * 0
        if self.LEFT:
            begin = gl.maximum(gl.minimum(query + (self.keys - self.tokens) - self.left, self.keys - 1), 0)
        return begin

    @gluon.jit
    def span(self, start):
        """The first key of a tile of queries, and its number of key blocks: at least one, where all may be hidden."""
        begin = self.begin(start)
        end = self.end(gl.minimum(start + self.BM, self.tokens) - 1)
        return begin, gl.maximum((end - begin + self.BN - 1) // self.BN, 1)

    @gluon.jit
    def listed(self, start, head, batch, lists):
        """The same and the tile's row in the table of lists. With block lists the first is the tile's last block, as a
        place in its list."""
        if self.LIST_K > 0:
            entry = (batch * self.list_rows + head // self.list_share * self.blocks + start // self.BM) * 4
            begin, blocks = gl.load(lists + entry + 1), gl.load(lists + entry + 2)
        else:
            begin, blocks = self.span(start)
            entry = begin
        return begin, blocks, entry

    @gluon.jit
    def key(self, begin, blocks, j, entry, lists, indices):
        """The first key of block j of a span, counted from its end. An empty list has a block behind the last key,
        which the accelerator fills with zeros."""
        if self.LIST_K > 0:
            PARTS: gl.constexpr = self.LIST_K // self.BN
            place = begin - j
            block = gl.load(indices + gl.load(lists + entry) + place // PARTS, mask=begin >= 0, other=0)
            first = gl.where(begin < 0, self.keys, block * self.LIST_K + place % PARTS * self.BN)
        else:
            first = begin + (blocks - 1 - j) * self.BN
        return first


@aggregate
class Tickets:
    """What the producer tells the consumers about each tile: NUMBERS integers, in one of two boxes that take turns."""

    box: gl.shared_memory_descriptor
    full: gl.shared_memory_descriptor
    empty: gl.shared_memory_descriptor
    NUMBERS: gl.constexpr

    @gluon.constexpr_function
    def __init__(self, box, full, empty, NUMBERS):
        self.box, self.full, self.empty, self.NUMBERS = box, full, empty, gl.constexpr(NUMBERS)

    @gluon.jit
    def write(self, turn, i: gl.constexpr, number):
        """One of the numbers of a turn, between `open` and `close`."""
        LANES: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
        self.box.index((turn & 1) * self.NUMBERS + i).store(gl.full([1], 0, gl.int32, LANES) + number)

    @gluon.jit
    def read(self, turn, i: gl.constexpr):
        """A number of a turn, between `take` and `give_back`."""
        LANES: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
        return gl.sum(self.box.index((turn & 1) * self.NUMBERS + i).load(LANES), 0)

    @gluon.jit
    def open(self, turn):
        wait(self.empty.index(turn & 1), ((turn >> 1) & 1) ^ 1)

    @gluon.jit
    def close(self, turn):
        arrive(self.full.index(turn & 1))

    @gluon.jit
    def take(self, turn):
        wait(self.full.index(turn & 1), (turn >> 1) & 1)

    @gluon.jit
    def give_back(self, turn):
        arrive(self.empty.index(turn & 1))

    @gluon.jit
    def draw(self, turn, counter, tiles, DYNAMIC: gl.constexpr):
        """The producer's next tile, which it tells the consumers; `tiles` where a program has but one."""
        number = tiles
        if DYNAMIC:
            number = draw(counter, tiles)
            self.open(turn)
            self.write(turn, 0, number)
            self.close(turn)
        return number

    @gluon.jit
    def drawn(self, turn, tiles, DYNAMIC: gl.constexpr):
        """The tile that the producer drew."""
        number = tiles
        if DYNAMIC:
            self.take(turn)
            number = self.read(turn, 0)
            self.give_back(turn)
        return number


@gluon.jit
def tickets(consumers: gl.constexpr, numbers: gl.constexpr):
    """Empty tickets in shared memory."""
    box = gl.allocate_shared_memory(gl.int32, [2 * numbers, 1], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    return Tickets(box, barriers(2, 1), barriers(2, consumers), numbers)


@gluon.jit
def draw(counter, tiles):
    """The next tile of a program from a counter that all share. The program that draws the last number sets it back."""
    number = gl.atomic_add(counter, 1) + gl.num_programs(0)
    if number == tiles + gl.num_programs(0) - 1:
        gl.store(counter, 0)
    return number


@gluon.jit
def _produce(parts, q_desc, k_desc, v_desc, counter, table, lists, indices):
    whole, tickets, q, k, v, q_full, q_empty, k_full, k_empty, v_full, v_empty = parts
    count = gl.to_tensor(0)
    turn = gl.to_tensor(0)
    number = gl.program_id(0)
    tiles = whole.tiles()
    while number < tiles:
        start, head, tokens, keys, q_place, k_place = whole.tile(number, table)
        start, apart, other = whole.placed(start, head, tokens)
        walk = whole.within(tokens, keys)
        kv_head = head // walk.group
        begin, blocks, entry = walk.listed(start, head, q_place, lists)
        for j in range(blocks):
            first = walk.key(begin, blocks, j, entry, lists, indices)
            s = count % walk.STAGES
            phase = (count // walk.STAGES) & 1
            kv_corner = corner(k_place, kv_head, first, keys, walk.PACKED)
            wait(k_empty.index(s), phase ^ 1)
            bulk_load(k_desc, kv_corner, k_full.index(s), k.index(s))
            if j == 0:
                for c in gl.static_range(walk.CONSUMERS):
                    box = turn % walk.Q_STAGES * walk.CONSUMERS + c
                    wait(q_empty.index(box), ((turn // walk.Q_STAGES) & 1) ^ 1)
                    q_corner = corner(q_place, head + c * other, start + c * apart, tokens, walk.PACKED)
                    bulk_load(q_desc, q_corner, q_full.index(box), q.index(box))
            t = count % walk.V_STAGES
            wait(v_empty.index(t), ((count // walk.V_STAGES) & 1) ^ 1)
            bulk_load(v_desc, kv_corner, v_full.index(t), v.index(t))
            count += 1
        number = tickets.draw(turn, counter, tiles, whole.DYNAMIC)
        turn += 1


@gluon.jit
def pack(x, dtype: gl.constexpr):
    """Neighbours of a row as halves of an integer, to be carried to the next round of a loop: carried as elements, they
    cost 64 instructions of 480 at head dim 64, since ptxas packs them the other way round and turns them twice."""
    low, high = gl.split(gl.reshape(x, [x.shape[0], x.shape[1] // 2, 2]))
    if dtype == gl.bfloat16:
        x = gl.inline_asm_elementwise(
            "cvt.rn.bf16x2.f32 $0, $2, $1;", "=r,r,r", [low, high], dtype=gl.int32, is_pure=True, pack=1
        )
    else:
        x = gl.inline_asm_elementwise(
            "cvt.rn.f16x2.f32 $0, $2, $1;", "=r,r,r", [low, high], dtype=gl.int32, is_pure=True, pack=1
        )
    return x


@gluon.jit
def unpack(x, dtype: gl.constexpr, LAYOUT: gl.constexpr):
    """The operand of a product that `pack` packed."""
    low = x.to(gl.int16).to(dtype, bitcast=True)
    high = (x >> 16).to(gl.int16).to(dtype, bitcast=True)
    x = gl.join(low, high)
    return gl.convert_layout(gl.reshape(x, [x.shape[0], x.shape[1] * 2]), LAYOUT)


@gluon.jit
def doubled(x, LAYOUT: gl.constexpr, dtype: gl.constexpr):
    """Powers of a block's first half, as `pack` packs them, and zeros for the other half of LAYOUT."""
    KEYS: gl.constexpr = 4 * x.shape[1]
    WHOLE: gl.constexpr = pack(gl.zeros([64, KEYS], gl.float32, LAYOUT), dtype).type.layout
    x = gl.reshape(gl.permute(gl.join(x, x * 0), (0, 2, 1)), [64, KEYS // 2])
    return gl.convert_layout(x, WHOLE, assert_trivial=True)


@gluon.jit
def bend(x):
    """tanh. 1 - e is exact near 0, where 1 - 2 / (1 + e) would lose what a softcap then multiplies."""
    e = gl.exp2(gl.abs(x) * (-2.0 / LN2))
    y = (1.0 - e) / (1.0 + e)
    return gl.where(x < 0, -y, y)


@gluon.jit
def before(limit, cols):
    """A word of the columns `cols` that lie before `limit`. A thread has 2 of every 8 columns, so all its columns of a
    row find themselves in the bits of one word, which costs 2 instructions an element; comparing each costs 6."""
    rest = limit - (cols & 6)
    count = gl.minimum(gl.maximum((rest >> 3) * 2 + gl.minimum(rest & 7, 2), 0), 32)
    return (1 << count.to(gl.int64)).to(gl.int32) - 1


@gluon.jit
def holds(word, cols):
    """Whether the columns' bits are set."""
    return (word & (1 << (((cols >> 3) << 1) | (cols & 1)))) != 0


@gluon.jit
def hide(qk, walk, queries, first, LOW: gl.constexpr):
    """Scores of a block, or of its first keys, that some queries do not see whole. LOW: the left edge of the window may
    be in it, too."""
    cols = gl.arange(0, qk.shape[1], gl.SliceLayout(0, qk.type.layout))[None, :]
    if walk.RIGHT:
        word = before((walk.end(queries) - first)[:, None], cols)
    else:
        word = before(walk.keys - first, cols)
    if LOW:
        word = word & ~before((walk.begin(queries) - first)[:, None], cols)
    return gl.where(holds(word, cols), qk, NOTHING)


@gluon.jit
def finish(top, total, head, sinks_ptr):
    """From each row's greatest score and its sum of powers: what the sum of values is multiplied by, and lse."""
    decay = gl.full(total.shape, 1.0, gl.float32, total.type.layout)
    if sinks_ptr is not None:
        sink = gl.load(sinks_ptr + head).to(gl.float32) * (1.0 / LN2)
        new_top = gl.maximum(top, sink)
        base = gl.where(new_top == NOTHING, 0.0, new_top)
        decay = gl.exp2(top - base)
        total = total * decay + gl.exp2(sink - base)
        top = new_top
    dead = total == 0.0
    total = gl.where(dead, 1.0, total)
    return decay / total, gl.where(dead, NOTHING, (top + gl.log2(total)) * LN2)


@gluon.jit
def _pass(C: gl.constexpr, blocks, count, walk, k_full, k_empty, v_full, v_empty, TURNS: gl.constexpr = False):
    """Give back the next blocks unread. TURNS: they are a tile's first, of which all but the first have a turn."""
    for i in range(blocks):
        if TURNS:
            if i > 0:
                meet("sync", TURN + C)
                meet("arrive", TURN + (C + 1) % walk.CONSUMERS)
        s = count % walk.STAGES
        phase = (count // walk.STAGES) & 1
        wait(k_full.index(s), phase)
        arrive(k_empty.index(s))
        t = count % walk.V_STAGES
        wait(v_full.index(t), (count // walk.V_STAGES) & 1)
        arrive(v_empty.index(t))
        count += 1
    return count


@gluon.jit
def first_block(C: gl.constexpr, walk, q_tile, k_tile, k_empty, taken, queries, first, inner, scale,
                SOFTCAP: gl.constexpr, drop=None, half=None):  # fmt: skip
    """The first block of keys that a consumer meets, or its first half: each row's greatest score, the sum of its
    powers, and these (`pack`), 0 where drop drops them. taken: others have met a block before, so that the product has
    a turn. half: whether the queries see but the first half; None: not known."""
    KEYS: gl.constexpr = k_tile.shape[0]
    SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, KEYS, 16])
    zero = gl.zeros([64, KEYS], gl.float32, SCORES)
    if walk.TURNS and walk.SKIP:
        if taken:
            meet("sync", TURN + C)
    qk = mma(q_tile, k_tile.permute((1, 0)), zero, use_acc=False, is_async=True)
    if walk.TURNS and walk.SKIP:
        if taken:
            meet("arrive", TURN + (C + 1) % walk.CONSUMERS)
    if drop is not None:
        kept = kept_keys(drop, first, KEYS)
    qk = mma_wait(0, deps=[qk])
    arrive(k_empty)
    if half is not None:
        # a branch without products: ptxas 12.8 may make addresses that both ways of one need in one way alone
        ROW: gl.constexpr = gl.SliceLayout(1, SCORES)
        PART: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, KEYS // 2, 16])
        if half:
            few, _ = gl.split(gl.permute(gl.reshape(qk, [64, 2, KEYS // 2]), (0, 2, 1)))
            few = gl.convert_layout(few, PART, assert_trivial=True)
            few_queries = gl.convert_layout(queries, gl.SliceLayout(1, PART))
            top, total, p = _first_powers(few, walk, few_queries, first, inner, scale, q_tile.dtype, SOFTCAP)
            top, total = gl.convert_layout(top, ROW), gl.convert_layout(total, ROW)
            p = doubled(p, SCORES, q_tile.dtype)
        else:
            top, total, p = _first_powers(qk, walk, queries, first, inner, scale, q_tile.dtype, SOFTCAP)
    else:
        top, total, p = _first_powers(qk, walk, queries, first, inner, scale, q_tile.dtype, SOFTCAP)
    if drop is not None:
        p = dropped(p, kept)
    return top, total, p


@gluon.jit
def _first_powers(qk, walk, queries, first, inner, scale, dtype: gl.constexpr, SOFTCAP: gl.constexpr):
    """`first_block` of these scores."""
    if SOFTCAP:
        qk = bend(qk * inner)
    if not walk.WHOLE:
        qk = hide(qk, walk, queries, first, walk.LEFT)
    top = gl.max(qk, 1) * scale
    base = top
    if not walk.WHOLE:
        base = gl.where(top == NOTHING, 0.0, top)
    p = gl.exp2(qk * scale - base[:, None])
    return top, gl.sum(p, 1), pack(p, dtype)


@gluon.jit
def next_block(C: gl.constexpr, walk, q_tile, k_tile, v_tile, full, empty, p, acc, total, top, queries, first, inner,
               scale, EDGE: gl.constexpr, SOFTCAP: gl.constexpr, drop=None):  # fmt: skip
    """A block of keys, whose scores are made while the powers p of the block before, or of its first keys, meet their
    values. full, empty: the barriers of these keys and of those values, full with their phases. EDGE: some queries do
    not see all of the keys. Returns acc, total and top with the block in them, and its powers (`pack`)."""
    k_full, k_phase, v_full, v_phase = full
    k_empty, v_empty = empty
    SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, walk.BN, 16])
    zero = gl.zeros([64, walk.BN], gl.float32, SCORES)
    if walk.TURNS:
        meet("sync", TURN + C)
    wait(k_full, k_phase)
    qk_made = mma(q_tile, k_tile.permute((1, 0)), zero, use_acc=False, is_async=True)
    wait(v_full, v_phase)
    acc_made = mma(p, v_tile, acc, use_acc=True, is_async=True)
    if walk.TURNS:
        meet("arrive", TURN + (C + 1) % walk.CONSUMERS)
    if drop is not None:
        kept = kept_keys(drop, first, walk.BN)
    qk = mma_wait(1, deps=[qk_made])
    arrive(k_empty)
    if SOFTCAP:
        qk = bend(qk * inner)
    if EDGE:
        qk = hide(qk, walk, queries, first, walk.LEFT)
    new_top = gl.maximum(top, gl.max(qk, 1) * scale)
    base = new_top
    if EDGE:
        base = gl.where(new_top == NOTHING, 0.0, new_top)
    new = gl.exp2(qk * scale - base[:, None])
    decay = gl.exp2(top - base)
    total = total * decay + gl.sum(new, 1)
    if drop is None:
        acc = mma_wait(0, deps=[acc_made])
    else:  # the product reads p from registers, which no draw must take before
        acc, p = mma_wait(0, deps=[acc_made, p])
    arrive(v_empty)
    acc = acc * gl.convert_layout(decay, gl.SliceLayout(1, acc.type.layout))[:, None]
    new = pack(new, q_tile.dtype)
    if drop is not None:
        new = dropped(new, kept)
    return acc, total, new_top, new


@gluon.jit
def _consume(C: gl.constexpr, parts, out_desc, lse_ptr, sinks_ptr, table, lists, indices, inner, scale, out,
             SOFTCAP: gl.constexpr, SHARED: gl.constexpr, dropout, DRAW: gl.constexpr):  # fmt: skip
    whole, tickets, q, k, v, q_full, q_empty, k_full, k_empty, v_full, v_empty = parts
    BN: gl.constexpr = whole.BN
    D: gl.constexpr = whole.D
    DV: gl.constexpr = whole.DV
    dtype: gl.constexpr = q.dtype
    SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BN, 16])
    OUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, DV, 16])
    P: gl.constexpr = gl.DotOperandLayout(0, OUT, 2)
    ROW: gl.constexpr = gl.SliceLayout(1, SCORES)
    OUT_ROW: gl.constexpr = gl.SliceLayout(1, OUT)
    PHASES: gl.constexpr = 3 if whole.LEFT else 2
    count = gl.to_tensor(0)
    turn = gl.to_tensor(0)
    drop = load_dropout(dropout, whole.keys, DRAW)
    number = gl.program_id(0)
    tiles = whole.tiles()
    if whole.TURNS and C == whole.CONSUMERS - 1:
        meet("arrive", TURN)
    while number < tiles:
        start, head, tokens, keys, q_place, k_place = whole.tile(number, table)
        start, apart, other = whole.placed(start, head, tokens)
        walk = whole.within(tokens, keys)
        begin, blocks, entry = walk.listed(start, head, q_place, lists)
        start += C * apart
        head += C * other
        before_right = gl.to_tensor(0)
        behind_left = gl.to_tensor(0)
        if walk.SKIP:
            seen = gl.maximum(walk.end(gl.minimum(start + 63, tokens - 1)) - begin, 1)
            before_right = gl.maximum(blocks - (seen + BN - 1) // BN, 0)
            count = _pass(C, before_right, count, walk, k_full, k_empty, v_full, v_empty, walk.TURNS)
            behind_left = gl.minimum((walk.begin(start) - begin) // BN, blocks - before_right - 1)
            begin += behind_left * BN
            blocks -= before_right + behind_left
        queries = start + gl.arange(0, 64, ROW)
        dropping = drop
        if dropout is not None:
            if walk.PACKED:
                dropping = drop.at(head * whole.tokens + (q_place - tokens) + start, k_place - keys)
            else:
                dropping = drop.at((q_place * walk.heads + head) * tokens + start, keys * 0)
        acc = gl.zeros([64, DV], gl.float32, OUT)

        box = turn % walk.Q_STAGES * walk.CONSUMERS + C
        q_tile = q.index(box).reshape([64, D])
        wait(q_full.index(box), (turn // walk.Q_STAGES) & 1)
        s = count % walk.STAGES
        wait(k_full.index(s), (count // walk.STAGES) & 1)
        k_tile = k.index(s).reshape([BN, D])
        first = walk.key(begin, blocks, 0, entry, lists, indices)
        met = 1
        if walk.HALF and walk.CONSUMERS == 2 and C == 0:
            PART: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BN // 2, 16])
            top, total, few = first_block(
                C, walk, q_tile, k_tile.slice(0, BN // 2), k_empty.index(s), False,
                gl.convert_layout(queries, gl.SliceLayout(1, PART)), first, inner, scale, SOFTCAP,
                dropping,
            )  # fmt: skip
            top, total = gl.convert_layout(top, ROW), gl.convert_layout(total, ROW)
            if blocks > 1:
                behind, v_phase = count % walk.V_STAGES, (count // walk.V_STAGES) & 1
                count += 1
                s = count % walk.STAGES
                if dropout is not None:
                    first = walk.key(begin, blocks, 1, entry, lists, indices)
                acc, total, top, p = next_block(
                    C, walk, q_tile, k.index(s).reshape([BN, D]), v.index(behind).reshape([BN, DV]).slice(0, BN // 2),
                    (k_full.index(s), (count // walk.STAGES) & 1, v_full.index(behind), v_phase),
                    (k_empty.index(s), v_empty.index(behind)), unpack(few, dtype, P), acc, total, top, queries, first,
                    inner, scale, False, SOFTCAP, dropping,
                )  # fmt: skip
            else:
                # These powers meet their values below. If both ways of a branch need the same address, ptxas 12.8 may
                # make it in one way alone: a product here has read values of an earlier tile.
                p = doubled(few, SCORES, dtype)
            met = 2
        else:
            half = None
            if walk.HALF and walk.CONSUMERS == 3:
                half = walk.end(start + 63) - first == BN // 2
            top, total, p = first_block(
                C, walk, q_tile, k_tile, k_empty.index(s), before_right > 0, queries, first, inner, scale, SOFTCAP,
                dropping, half,
            )  # fmt: skip

        # blocks from the end: those that the right edge crosses, whole ones, those that the left edge crosses
        left = blocks
        if walk.LIST_K > 0:
            right = gl.load(lists + entry + 3)
        else:
            right = gl.minimum(gl.maximum(blocks - gl.maximum(walk.end(start) - begin, 0) // BN, 1), blocks)
            if walk.LEFT:
                left = blocks - (walk.begin(start + 63) - begin + BN - 1) // BN
                left = gl.minimum(gl.maximum(left, right), blocks)
        for phase in gl.static_range(PHASES):
            if phase == 0:
                lower, upper = 1, right
            elif phase == 1:
                lower, upper = right, left
                if walk.HALF:
                    lower = gl.minimum(met, blocks)
            else:
                lower, upper = left, blocks
            if phase != 0 or (walk.RIGHT and not walk.HALF):
                for j in range(lower, upper):
                    p_half = unpack(p, dtype, P)
                    behind = count % walk.V_STAGES
                    v_phase = (count // walk.V_STAGES) & 1
                    count += 1
                    s = count % walk.STAGES
                    if phase != 1 or dropout is not None:
                        first = walk.key(begin, blocks, j, entry, lists, indices)
                    acc, total, top, p = next_block(
                        C, walk, q_tile, k.index(s).reshape([BN, D]), v.index(behind).reshape([BN, DV]),
                        (k_full.index(s), (count // walk.STAGES) & 1, v_full.index(behind), v_phase),
                        (k_empty.index(s), v_empty.index(behind)), p_half, acc, total, top, queries, first, inner,
                        scale, phase != 1, SOFTCAP, dropping,
                    )  # fmt: skip

        if not SHARED:
            arrive(q_empty.index(box))
        t = count % walk.V_STAGES
        wait(v_full.index(t), (count // walk.V_STAGES) & 1)
        acc_made = mma(unpack(p, dtype, P), v.index(t).reshape([BN, DV]), acc, use_acc=True, is_async=True)
        count += 1
        factor, lse = finish(top, total, head, sinks_ptr)
        if dropout is not None:
            factor *= drop.scale
        if walk.PACKED:
            row = head.to(gl.int64) * whole.tokens + (q_place - tokens)
        else:
            row = (q_place * walk.heads + head).to(gl.int64) * tokens
        gl.store(lse_ptr + row + queries, lse, mask=queries < tokens)
        acc = mma_wait(0, deps=[acc_made])
        arrive(v_empty.index(t))
        if walk.SKIP and walk.LEFT:
            count = _pass(C, behind_left, count, walk, k_full, k_empty, v_full, v_empty)
        acc = acc * gl.convert_layout(factor, OUT_ROW)[:, None]
        if not SHARED:
            bulk_wait(0)
        tile = out.index(C)
        tile.reshape([64, DV]).store(acc.to(dtype))
        fence()
        bulk_store(out_desc, corner(q_place, head, start, tokens, walk.PACKED), tile)
        if SHARED:
            bulk_wait(0)
            arrive(q_empty.index(box))
        number = tickets.drawn(turn, tiles, walk.DYNAMIC)
        turn += 1
    bulk_wait(0)


@gluon.jit(
    do_not_specialize=[
        "tokens", "keys", "heads", "blocks", "rows", "section", "left", "right", "group", "list_share", "list_rows",
    ]
)  # fmt: skip
def attention_fwd_kernel(
    q_desc, k_desc, v_desc, out_desc, lse_ptr, sinks_ptr, counter, table, lists, indices,
    tokens, keys, heads, blocks, rows, section, left, right, group, list_share, list_rows, inner, scale,
    LEFT: gl.constexpr, RIGHT: gl.constexpr, WHOLE: gl.constexpr, DYNAMIC: gl.constexpr,
    BN: gl.constexpr, D: gl.constexpr, DV: gl.constexpr, CONSUMERS: gl.constexpr, STAGES: gl.constexpr,
    V_STAGES: gl.constexpr, Q_STAGES: gl.constexpr, LIST_K: gl.constexpr, SOFTCAP: gl.constexpr, HALF: gl.constexpr,
    PER_SM: gl.constexpr, DIVIDED: gl.constexpr, dropout=None, DRAW: gl.constexpr = None,
):  # fmt: skip
    """Tiles of CONSUMERS * 64 queries of one head. table: tiles of documents (`query_tiles_kernel`), the order of the
    lists' tiles, or None. lists: tiles of block lists of LIST_K keys (`list_tiles_kernel`), or None with LIST_K 0;
    indices: theirs. scale: of q . k, times log2(e); with SOFTCAP inner is the factor before tanh and scale that behind
    it. WHOLE: every query sees every key, in whole blocks. D, DV: head dims, up to 64, 128 or 256; columns behind a
    tensor's own are zeros. DIVIDED: tiles behind the last whole round are left to `attention_fwd_stream_k_kernel`.
    dropout: the seed tensor, and the two of `dropout.kernel_numbers`, or None; DRAW: RARE, SHORT and EVEN of
    `Dropout`."""
    if DIVIDED:
        launch_dependents()
    PACKED: gl.constexpr = table is not None and LIST_K == 0
    SHARED: gl.constexpr = D == 256 and DV == 256  # out takes the place of q
    if PACKED:
        blocks = gl.load(table)
    walk = Walk(
        tokens, keys, heads, blocks, rows, section, left, right, group, list_share, list_rows,
        LEFT, RIGHT, WHOLE, DYNAMIC, PACKED, CONSUMERS * 64, BN, D, DV, CONSUMERS, STAGES, Q_STAGES, LIST_K, HALF,
        V_STAGES, DIVIDED,
    )  # fmt: skip
    q = tiles_of(Q_STAGES * CONSUMERS, q_desc)
    k = tiles_of(STAGES, k_desc)
    v = tiles_of(V_STAGES, v_desc)
    out = q
    if not SHARED:
        out = tiles_of(CONSUMERS, out_desc)
    ticket = tickets(CONSUMERS, 1)
    q_full = barriers(Q_STAGES * CONSUMERS, 1)
    q_empty = barriers(Q_STAGES * CONSUMERS, 1)
    k_full = barriers(STAGES, 1)
    k_empty = barriers(STAGES, CONSUMERS)
    v_full = barriers(V_STAGES, 1)
    v_empty = barriers(V_STAGES, CONSUMERS)
    fence()
    parts = (walk, ticket, q, k, v, q_full, q_empty, k_full, k_empty, v_full, v_empty)
    if CONSUMERS == 2:
        OWN: gl.constexpr = 240 if PER_SM == 1 else 104
        gl.warp_specialize(
            [
                (_produce, (parts, q_desc, k_desc, v_desc, counter, table, lists, indices)),
                (_consume, (0, parts, out_desc, lse_ptr, sinks_ptr, table, lists, indices, inner, scale, out,
                            SOFTCAP, SHARED, dropout, DRAW)),
                (_consume, (1, parts, out_desc, lse_ptr, sinks_ptr, table, lists, indices, inner, scale, out,
                            SOFTCAP, SHARED, dropout, DRAW)),
            ],
            [4, 4],
            [OWN, OWN],
        )  # fmt: skip
    elif CONSUMERS == 3:
        gl.warp_specialize(
            [
                (_produce, (parts, q_desc, k_desc, v_desc, counter, table, lists, indices)),
                (_consume, (0, parts, out_desc, lse_ptr, sinks_ptr, table, lists, indices, inner, scale, out,
                            SOFTCAP, SHARED, dropout, DRAW)),
                (_consume, (1, parts, out_desc, lse_ptr, sinks_ptr, table, lists, indices, inner, scale, out,
                            SOFTCAP, SHARED, dropout, DRAW)),
                (_consume, (2, parts, out_desc, lse_ptr, sinks_ptr, table, lists, indices, inner, scale, out,
                            SOFTCAP, SHARED, dropout, DRAW)),
            ],
            [4, 4, 4],
            [160, 160, 160],
        )  # fmt: skip
    else:
        gl.warp_specialize(
            [
                (_produce, (parts, q_desc, k_desc, v_desc, counter, table, lists, indices)),
                (_consume, (0, parts, out_desc, lse_ptr, sinks_ptr, table, lists, indices, inner, scale, out,
                            SOFTCAP, SHARED, dropout, DRAW)),
                (_consume, (1, parts, out_desc, lse_ptr, sinks_ptr, table, lists, indices, inner, scale, out,
                            SOFTCAP, SHARED, dropout, DRAW)),
                (_consume, (2, parts, out_desc, lse_ptr, sinks_ptr, table, lists, indices, inner, scale, out,
                            SOFTCAP, SHARED, dropout, DRAW)),
                (_consume, (3, parts, out_desc, lse_ptr, sinks_ptr, table, lists, indices, inner, scale, out,
                            SOFTCAP, SHARED, dropout, DRAW)),
            ],
            [4, 4, 4, 4],
            [112, 112, 112, 112],
        )  # fmt: skip
