"""Which tiles a CTA of attention's Hopper kernels makes, and which keys each of them meets."""

from tilesmith.device.gluon.shim import aggregate, gl, gluon, mbarrier_arrive, mbarrier_wait, mbarriers


@aggregate
class Walk:
    """What every part of a CTA knows: the sizes of the call, who sees which keys, and the order of the tiles.

    blocks: tiles of queries of a head. rows: batch * heads. section: how many heads are worked on together, so that
    their keys and values stay in L2. left, right: the window. group: heads of q that share one of k and v. PACKED:
    tokens and keys are those of one document at a time. With block lists of LIST_K keys, list_share heads have a list
    in common, and list_rows is how many tiles the lists of a batch row have, 0 if all have the same. TURNS: consumers
    ask for their products one after another. SKIP: they leave out blocks that only the others' queries see. ONE_MASK:
    all see every block whole but the last one that they see. HALF: of that the first of two consumers sees but the
    first half. STREAM_K: CTAs make whole rounds of tiles; those left over are divided (`stream_k`). REST, V_REST:
    columns of queries and keys behind D, of values behind DV (`columns`). V_PART, V_COLS: columns of the parts of a
    tile of values whose products are joined, and of these products, or 0 (`joined`). HEADS: of q that a tile holds the
    queries of, one head's rows after another's; then heads, rows, section and group count packs of so many, and BM is a
    tile's positions. Of a consumer's 64 rows the last ones hold nothing where HEADS does not divide 64.
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
    ONE_MASK: gl.constexpr
    HALF: gl.constexpr
    STREAM_K: gl.constexpr
    REST: gl.constexpr
    V_REST: gl.constexpr
    HEADS: gl.constexpr
    V_PART: gl.constexpr
    V_COLS: gl.constexpr

    @gluon.constexpr_function
    def __init__(
        self, tokens, keys, heads, blocks, rows, section, left, right, group, list_share, list_rows,
        LEFT, RIGHT, WHOLE, DYNAMIC, PACKED, BM, BN, D, DV, CONSUMERS, STAGES, Q_STAGES, LIST_K, ONE_MASK=False,
        V_STAGES=0, STREAM_K=False, REST=0, V_REST=0, HEADS=1, V_PART=0, V_COLS=0,
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
        self.TURNS, self.ONE_MASK = gl.constexpr(CONSUMERS == 3 and not (LEFT or PACKED)), gl.constexpr(ONE_MASK)
        self.HALF = gl.constexpr(ONE_MASK and BN == 128 and CONSUMERS == 2)
        self.SKIP = gl.constexpr((LEFT or RIGHT) and LIST_K == 0 and BN * HEADS <= 64 * (CONSUMERS - 1))
        self.STREAM_K = gl.constexpr(STREAM_K)
        self.REST, self.V_REST, self.HEADS = gl.constexpr(REST), gl.constexpr(V_REST), gl.constexpr(HEADS)
        self.V_PART, self.V_COLS = gl.constexpr(V_PART), gl.constexpr(V_COLS)

    @gluon.jit
    def tiles(self):
        """How many tiles the CTAs make."""
        tiles = self.blocks * self.rows
        if self.STREAM_K:
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
        tiles end where the queries do, to a consumer's positions, so that the one with fewer is that of the first
        queries, which see the fewest keys; it makes some of the next one's again. In documents, where the last queries
        fill half a tile, they are made for two heads of a group, and the second head's tile makes the first queries'
        again."""
        apart, other = 64 // self.HEADS, 0
        if self.RIGHT and not self.LEFT and not self.PACKED and self.LIST_K == 0:
            start = gl.maximum(start - (self.blocks * self.BM - self.tokens) // apart * apart, 0)
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
            self.BM, self.BN, self.D, self.DV, self.CONSUMERS, self.STAGES, self.Q_STAGES, self.LIST_K, self.ONE_MASK,
            self.V_STAGES, self.STREAM_K, self.REST, self.V_REST, self.HEADS, self.V_PART, self.V_COLS,
        )  # fmt: skip

    @gluon.jit
    def queries(self, start, LAYOUT: gl.constexpr):
        """The positions of a consumer's 64 rows, of which the first is `start`, and their heads of the pack. Rows that
        hold nothing are behind the last position."""
        POSITIONS: gl.constexpr = 64 // self.HEADS
        row = gl.arange(0, 64, LAYOUT)
        if self.HEADS == 1:
            queries, heads = start + row, 0
        else:
            queries, heads = start + row % POSITIONS, row // POSITIONS
            if POSITIONS * self.HEADS < 64:
                queries = gl.where(heads < self.HEADS, queries, self.tokens)
                heads = gl.minimum(heads, self.HEADS - 1)
        return queries, heads

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
        which TMA fills with zeros."""
        if self.LIST_K > 0:
            PARTS: gl.constexpr = self.LIST_K // self.BN
            place = begin - j
            block = gl.load(indices + gl.load(lists + entry) + place // PARTS, mask=begin >= 0, other=0)
            first = gl.where(begin < 0, self.keys, block * self.LIST_K + place % PARTS * self.BN)
        else:
            first = begin + (blocks - 1 - j) * self.BN
        return first


@aggregate
class TileQueue:
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
        """One of the numbers of a turn, between `producer_acquire` and `producer_commit`."""
        LANES: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
        self.box.index((turn & 1) * self.NUMBERS + i).store(gl.full([1], 0, gl.int32, LANES) + number)

    @gluon.jit
    def read(self, turn, i: gl.constexpr):
        """A number of a turn, between `consumer_wait` and `consumer_release`."""
        LANES: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
        return gl.sum(self.box.index((turn & 1) * self.NUMBERS + i).load(LANES), 0)

    @gluon.jit
    def producer_acquire(self, turn):
        mbarrier_wait(self.empty.index(turn & 1), ((turn >> 1) & 1) ^ 1)

    @gluon.jit
    def producer_commit(self, turn):
        mbarrier_arrive(self.full.index(turn & 1))

    @gluon.jit
    def consumer_wait(self, turn):
        mbarrier_wait(self.full.index(turn & 1), (turn >> 1) & 1)

    @gluon.jit
    def consumer_release(self, turn):
        mbarrier_arrive(self.empty.index(turn & 1))

    @gluon.jit
    def fetch(self, turn, counter, tiles, DYNAMIC: gl.constexpr):
        """The producer's next tile, which it tells the consumers; `tiles` where a CTA has but one."""
        number = tiles
        if DYNAMIC:
            number = next_tile(counter, tiles)
            self.producer_acquire(turn)
            self.write(turn, 0, number)
            self.producer_commit(turn)
        return number

    @gluon.jit
    def next_tile(self, turn, tiles, DYNAMIC: gl.constexpr):
        """The tile that the producer drew."""
        number = tiles
        if DYNAMIC:
            self.consumer_wait(turn)
            number = self.read(turn, 0)
            self.consumer_release(turn)
        return number


@gluon.jit
def tile_queue(consumers: gl.constexpr, numbers: gl.constexpr):
    """Empty queue in shared memory."""
    box = gl.allocate_shared_memory(gl.int32, [2 * numbers, 1], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    full, empty = mbarriers((2, 1), (2, consumers))
    return TileQueue(box, full, empty, numbers)


@gluon.jit
def ring_place(count, SIZE: gl.constexpr):
    """The place in a ring of SIZE tiles of the one that has number `count`, and the phase of that place's barriers."""
    if SIZE == 1:
        place, phase = count * 0, count & 1
    elif SIZE == 2:
        place, phase = count & 1, (count >> 1) & 1
    else:
        place, phase = count % SIZE, (count // SIZE) & 1
    return place, phase


@gluon.jit
def next_tile(counter, tiles):
    """The next tile of a CTA from a counter that all share. The CTA that takes the last number sets it back."""
    number = gl.atomic_add(counter, 1) + gl.num_programs(0)
    if number == tiles + gl.num_programs(0) - 1:
        gl.store(counter, 0)
    return number
