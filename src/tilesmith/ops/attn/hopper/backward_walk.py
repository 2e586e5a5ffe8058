"""Which tiles of keys a CTA of attention's backward on Hopper makes, and which queries each of them meets, in order."""

from tilesmith.device.gluon.shim import aggregate, gl, gluon, named_barrier, tma_load
from tilesmith.ops.attn.hopper.backward_block import KEYS_READ, VALUES_READ
from tilesmith.ops.attn.hopper.tile_offset import inside


@gluon.jit
def numbered(number, blocks, section, rows):
    """Tile and kv head that a number stands for, where each head has so many tiles and sections so many heads."""
    behind = number // (section * blocks)
    inside = number - behind * (section * blocks)
    width = gl.minimum(section, rows - behind * section)
    block = inside // width
    return block, behind * section + inside - block * width


@gluon.jit
def stream_k_run(run, second, whole, stream_k_ctas, tiles, steps):
    """The part that one of stream-K's equal runs has of the tiles from number `whole` on, whose steps, each tile's
    behind those of the one before, are dealt out in equal runs: a tile, the first step, how many, and whether the run
    has some of the next tile, too, which `second` = 1 asks for."""
    total = (tiles - whole) * steps
    begin = run * total // stream_k_ctas
    end = (run + 1) * total // stream_k_ctas
    tile = begin // steps
    cut = gl.minimum((tile + 1) * steps, end)
    more = (cut < end) & (second == 0)
    tile += second
    end = gl.where(second == 0, cut, end)
    begin = gl.where(second == 0, begin, cut)
    return whole + tile, begin - tile * steps, end - begin, more


@aggregate
class KeyWalk:
    """What every part of a CTA knows: the sizes of the call, who sees which keys, and the order of the tiles.

    q_begin, k_begin: the first query and key of the first tiles; those before see nothing, or nobody sees them, and
    they may hold NaN. q_blocks, k_blocks: tiles of a head. rows: batch * kv heads. section: how many kv heads are
    worked on together, so that what they stream stays in L2. left, right: the window. PACKED: sizes and beginnings are
    those of one document at a time. ORDERED: tiles come from the last keys on. WOVEN: a tile meets a block of queries
    of all heads of its group before the next block (`rises`). BQ, BK: queries of a block, keys of a tile. With block
    lists of LIST_Q queries, list_share heads have a list in common, and list_rows is how many tiles of keys the lists
    of a batch row have, 0 if all have the same. GROUP, GROUP_PARTS, GROUP_SHORT: query heads of a kv head
    (`first_head`)."""

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
    list_share: gl.tensor
    list_rows: gl.tensor
    GROUP: gl.constexpr
    LEFT: gl.constexpr
    RIGHT: gl.constexpr
    DYNAMIC: gl.constexpr
    PACKED: gl.constexpr
    ORDERED: gl.constexpr
    WOVEN: gl.constexpr
    BQ: gl.constexpr
    BK: gl.constexpr
    D: gl.constexpr
    STAGES: gl.constexpr
    LIST_Q: gl.constexpr
    GROUP_PARTS: gl.constexpr
    GROUP_SHORT: gl.constexpr

    @gluon.constexpr_function
    def __init__(
        self, tokens, keys, kv_heads, q_begin, k_begin, q_blocks, k_blocks, rows, section, left, right, list_share,
        list_rows, GROUP, LEFT, RIGHT, DYNAMIC, PACKED, ORDERED, WOVEN, BQ, BK, D, STAGES, LIST_Q, GROUP_PARTS,
        GROUP_SHORT,
    ):  # fmt: skip
        self.tokens, self.keys, self.kv_heads, self.q_begin, self.k_begin = tokens, keys, kv_heads, q_begin, k_begin
        self.q_blocks, self.k_blocks, self.rows, self.section = q_blocks, k_blocks, rows, section
        self.left, self.right, self.list_share, self.list_rows = left, right, list_share, list_rows
        self.GROUP, self.LEFT, self.RIGHT = gl.constexpr(GROUP), gl.constexpr(LEFT), gl.constexpr(RIGHT)
        self.DYNAMIC, self.PACKED = gl.constexpr(DYNAMIC), gl.constexpr(PACKED)
        self.ORDERED, self.WOVEN = gl.constexpr(ORDERED), gl.constexpr(WOVEN)
        self.BQ, self.BK = gl.constexpr(BQ), gl.constexpr(BK)
        self.D, self.STAGES, self.LIST_Q = gl.constexpr(D), gl.constexpr(STAGES), gl.constexpr(LIST_Q)
        self.GROUP_PARTS, self.GROUP_SHORT = gl.constexpr(GROUP_PARTS), gl.constexpr(GROUP_SHORT)

    @gluon.jit
    def tile(self, number, table):
        """First key and kv head of a tile, the places of its keys and of its queries (`corner`), its first block of
        queries, and the same walk over its document. Sections of heads one after another; in each the first keys of
        all its heads first, which a causal mask shows to the most queries, or ORDERED the last ones. Of documents the
        half of the tiles that has the least work comes when all heads have had the other half, in sections of half as
        many heads, and fills the end. Of block lists the first keys of all heads come before all others: where every
        block of queries chose them, theirs are the longest tiles."""
        skipped, blocks, section = 0, self.k_blocks, self.section
        if self.PACKED and not self.ORDERED:
            half = self.k_blocks // 2
            late = number >= half * self.rows
            skipped = gl.where(late, half, 0)
            number -= skipped * self.rows
            blocks = gl.where(late, self.k_blocks - half, half)
            section = gl.where(late, section, (section + 1) // 2)
        if self.LIST_Q > 0:
            late = number >= self.rows
            rest, row = numbered(gl.maximum(number - self.rows, 0), gl.maximum(blocks - 1, 1), section, self.rows)
            block = gl.where(late, rest + 1, 0)
            row = gl.where(late, row, number)
        else:
            block, row = numbered(number, blocks, section, self.rows)
        block += skipped
        if self.ORDERED:
            block = self.k_blocks - 1 - block
        batch = row // self.kv_heads
        kv_head = row - batch * self.kv_heads
        place = first_head(row, self.GROUP, self.GROUP_PARTS, self.GROUP_SHORT) * self.q_blocks
        found = (self.k_begin + block * self.BK, kv_head, batch, batch, place, self)
        if self.PACKED:
            entry = table + (block + 1) * 8
            walk = self.within(gl.load(entry + 3), gl.load(entry + 1), gl.load(entry + 5), gl.load(entry + 7))
            found = (gl.load(entry), kv_head, gl.load(entry + 2), gl.load(entry + 4), place + gl.load(entry + 6), walk)
        return found

    @gluon.jit
    def rises(self, number):
        """Whether a tile meets its first queries first. WOVEN: in every other section, so that all tiles that run meet
        the same queries at about the same time. Those of the first section start together, at the last queries, and end
        one after another, the last keys first; so those of the second start one after another, the first keys first,
        each when those before it have come to its own first queries, and end together."""
        rises = number < 0
        if self.ORDERED:
            rises = number >= 0
        elif self.WOVEN:
            rises = number // (self.section * self.k_blocks) % 2 == 1
        return rises

    @gluon.jit
    def within(self, tokens, keys, q_begin, q_blocks):
        """The same for a document of so many tokens and keys, and with so many blocks of queries from q_begin on."""
        return KeyWalk(
            tokens, keys, self.kv_heads, q_begin, self.k_begin, q_blocks, self.k_blocks, self.rows, self.section,
            self.left, self.right, self.list_share, self.list_rows, self.GROUP, self.LEFT, self.RIGHT, self.DYNAMIC,
            self.PACKED, self.ORDERED, self.WOVEN, self.BQ, self.BK, self.D, self.STAGES, self.LIST_Q,
            self.GROUP_PARTS, self.GROUP_SHORT,
        )  # fmt: skip

    @gluon.jit
    def span(self, start):
        """The first block of queries that a tile of keys meets, and how many: at least one, where all may be hidden,
        or none of keys that nobody sees."""
        shift = self.keys - self.tokens
        first = self.q_blocks * 0
        end = self.q_blocks
        if self.RIGHT:
            first = gl.maximum(start - shift - self.right - self.q_begin, 0) // self.BQ
            first = gl.minimum(first, self.q_blocks - 1)
        if self.LEFT:
            last = gl.maximum(start + self.BK - shift + self.left - self.q_begin, 0)
            end = gl.minimum(end, (last + self.BQ - 1) // self.BQ)
        blocks = gl.maximum(end - first, 1)
        if self.PACKED:
            blocks = gl.where(self.q_blocks == 0, 0, blocks)
        return first, blocks

    @gluon.jit
    def entry(self, batch, head, start):
        """A tile's row in the table of lists, and how far that of the group's next head is."""
        entry = (batch * self.list_rows + head // self.list_share * self.k_blocks + start // self.BK) * 4
        return entry, gl.where(self.list_share == 1, self.k_blocks * 4, 0)

    @gluon.jit
    def ahead(self, start):
        """The first block of queries that the tile of keys behind this one meets, and their end: 0 if there is none."""
        first, blocks = self.span(start + self.BK)
        return first, gl.where(start + self.BK < self.keys, first + blocks, 0)


STORED = gl.constexpr(2)  # after 1, which says that somebody will

# What the producer tells of a tile, by its number in the queue.
START, KEYS_AT, KV_HEAD, BLOCKS, EDGE, LIMIT, PLACE = (gl.constexpr(i) for i in range(7))
# Three numbers mean what the form of the kernel asks for; `attention_dkv_kernel` asserts that no form asks for two.
MET, MET_END = gl.constexpr(7), gl.constexpr(8)  # the blocks that the tile behind this one meets, too
ENTRY, STEP = (
    gl.constexpr(7),
    gl.constexpr(8),
)  # with lists: a tile's row in their table, and how far the next head's is
RISES = gl.constexpr(7)  # WOVEN: 1 where a tile meets its first queries first
SLOT = gl.constexpr(9)  # STREAM_K: where the tile's part is left
QUERIES_END = gl.constexpr(9)  # of documents with dropout: where the document's queries end


@gluon.jit
def listed(i, blocks, entry, lists, indices, ORDERED: gl.constexpr, LIST_Q: gl.constexpr, BQ: gl.constexpr):
    """Block i of queries of a tile's walk; without lists counted from the first one that the tile meets."""
    block = i if ORDERED else blocks - 1 - i
    if LIST_Q > 0:
        PARTS: gl.constexpr = LIST_Q // BQ
        part = gl.load(lists + entry + 1) + block
        block = gl.load(indices + gl.load(lists + entry) + part // PARTS) * PARTS + part % PARTS
    return block


@gluon.jit
def around(i, tile, tiles, blocks):
    """Step i of a RING's walk: the block of queries, and whether the tile, of so many of a head, has been at the last
    one before. Each starts at a block of its own."""
    block = tile * blocks // tiles + i
    again = block >= blocks
    return gl.where(again, block - blocks, block), again


@gluon.jit
def ring_turn(block, again, tile, tiles, blocks):
    """Of the tiles of a RING that add to the same sum of a block, how many come behind one, and whether any comes
    before it. Those that start at the block or before add to the first sum, those that come `again` to the second one,
    the last keys first, as they are drawn: so each waits only for tiles that run, though they meet in a ring. With one
    sum the first of them would wait for the last, and all CTAs would have to run at once."""
    near = ((block + 1) * tiles - 1) // blocks + 1
    return tile - gl.where(again, near, 0), tile + 1 < gl.where(again, tiles, near)


@gluon.jit
def woven_step(i, members, GROUP: gl.constexpr, GROUP_SHORT: gl.constexpr):
    """Step i of a WOVEN walk: how many blocks of queries come before, each of `members` heads, and which of the heads.
    members: as of `members_of`, so that it is divided by constants."""
    block, member = i // GROUP, i % GROUP
    if GROUP_SHORT > 0:
        whole = members == GROUP
        block = gl.where(whole, block, i // (GROUP - 1))
        member = gl.where(whole, member, i % (GROUP - 1))
    return block, member


@gluon.jit
def woven(i, blocks, rises, members, GROUP: gl.constexpr, GROUP_SHORT: gl.constexpr):
    """Step i of a WOVEN walk: the block of queries, counted from the first one that the tile meets, and which of the
    group's heads."""
    block, member = woven_step(i, members, GROUP, GROUP_SHORT)
    return gl.where(rises, block, blocks - 1 - block), member


@gluon.jit
def announce(queue, turn, walk, start, k_place, kv_head, first, blocks, rises):
    """Tell the consumers of a tile. The queue is left open."""
    queue.producer_acquire(turn)
    queue.write(turn, START, inside(start, walk.keys, walk.PACKED))
    queue.write(turn, KEYS_AT, k_place)
    queue.write(turn, KV_HEAD, kv_head)
    queue.write(turn, BLOCKS, blocks)
    edge = walk.q_begin + gl.where(rises, first, first + blocks - 1) * walk.BQ + (walk.keys - walk.tokens) - start
    queue.write(turn, EDGE, edge + walk.right if walk.RIGHT else edge)
    queue.write(turn, LIMIT, walk.keys - start)


@gluon.jit
def kv_head_of(kv_head, GROUP_PARTS: gl.constexpr):
    """The kv head whose keys and values a tile has. A walk takes each of GROUP_PARTS parts of the query heads that
    share them for a kv head of its own, with dk and dv of its own."""
    if GROUP_PARTS > 1:
        kv_head = kv_head // GROUP_PARTS
    return kv_head


@gluon.jit
def first_head(kv_head, GROUP: gl.constexpr, GROUP_PARTS: gl.constexpr, GROUP_SHORT: gl.constexpr):
    """The first query head of a kv head of a walk (`kv_head_of`), or of a row of them: how many lie before. Parts have
    GROUP query heads, the last GROUP_SHORT parts of each group one fewer."""
    head = kv_head * GROUP
    if GROUP_SHORT > 0:
        groups = kv_head // GROUP_PARTS
        part = kv_head - groups * GROUP_PARTS
        head -= groups * GROUP_SHORT + gl.maximum(part - (GROUP_PARTS - GROUP_SHORT), 0)
    return head


@gluon.jit
def members_of(kv_head, GROUP: gl.constexpr, GROUP_PARTS: gl.constexpr, GROUP_SHORT: gl.constexpr):
    """How many query heads a kv head of a walk has (`first_head`)."""
    members = gl.to_tensor(GROUP)
    if GROUP_SHORT > 0:
        members = gl.where(kv_head % GROUP_PARTS < GROUP_PARTS - GROUP_SHORT, GROUP, GROUP - 1)
    return members


@gluon.jit
def load_pair(k_desc, v_desc, there, k, v, full, turn, LATE_DQ: gl.constexpr):
    """A tile's keys and values, which are given back one by one, or LATE_DQ together."""
    if turn > 0:
        named_barrier("sync", KEYS_READ, 288)
    tma_load(k_desc, there, full.index(0), k)
    if not LATE_DQ:
        if turn > 0:
            named_barrier("sync", VALUES_READ, 288)
    tma_load(v_desc, there, full.index(1), v)
