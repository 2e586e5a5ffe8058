"""Device kernel of attention's forward on Hopper for head dims from 73 to 96, in tiles of 192 queries and 96 keys: each
product is one WGMMA a step, whose numbers of keys and of columns are no powers of two (`joined`).

Three consumers (warpgroups of 128 threads with 64 queries each) have 160 registers a thread. Scores of 128 keys, their
powers and sums of 96 columns do not fit in these, so a block has fewer keys. Scores, powers and sums are tensors of 16
columns. Otherwise the kernel is that of `forward`, for calls without a window, documents, block lists, dropout or
softcap.
"""

from tilesmith.device.gluon.shim import (
    aggregate,
    fence_async,
    gl,
    gluon,
    mbarrier_arrive,
    mbarrier_expect,
    mbarrier_wait,
    mbarriers,
    named_barrier,
    smem_tile,
    smem_tiles,
    tma_copy,
    tma_store_wait,
    wgmma_wait,
)
from tilesmith.ops.attn.hopper.columns import start_write
from tilesmith.ops.attn.hopper.forward import TURN, skip_blocks
from tilesmith.ops.attn.hopper.joined import (
    SIXTEEN,
    add_sixteens,
    address,
    check_place,
    parts_of,
    scores_of,
    whole_sums,
)
from tilesmith.ops.attn.hopper.softmax import NOTHING, finish_softmax, in_mask, mask_before, pack, unpack
from tilesmith.ops.attn.hopper.tile_offset import corner, inside
from tilesmith.ops.attn.hopper.walk import Walk, tile_queue

SLOT = gl.constexpr(128)  # rows that the place of a tile of keys has: Gluon's tiles have a power of two


@gluon.constexpr_function
def _bytes_before(kind, stages, boxes, rest):
    """Where the tiles of a kind begin in the kernel's shared memory; "end": how much there is. Larger tiles come first,
    so that each lies at a multiple of its size."""
    parts = 64 // rest + 1
    tiles = [
        ("k", SLOT * 64, stages), ("q", 64 * 64, boxes), ("v", SLOT * rest, stages * parts),
        ("k_rest", SLOT * rest, stages), ("q_rest", 64 * rest, boxes),
    ]  # fmt: skip
    begin = 0
    for name, size, many in sorted(tiles, key=lambda tile: -tile[1]):
        if name == kind:
            break
        begin += 2 * size * many
    return begin


@aggregate
class Tiles:
    """All tiles of queries, keys and values, in one piece of shared memory, and where each kind begins. Queries have
    two boxes for each consumer, and its output takes their place. Keys and queries have 64 columns and a rest; values
    lie in parts of as many columns as their rest."""

    room: gl.shared_memory_descriptor
    K: gl.constexpr
    Q: gl.constexpr
    V: gl.constexpr
    K_REST: gl.constexpr
    Q_REST: gl.constexpr

    @gluon.constexpr_function
    def __init__(self, room, K, Q, V, K_REST, Q_REST):
        self.room = room
        self.K, self.Q, self.V = gl.constexpr(K), gl.constexpr(Q), gl.constexpr(V)
        self.K_REST, self.Q_REST = gl.constexpr(K_REST), gl.constexpr(Q_REST)

    @gluon.jit
    def tile(self, desc, BEGIN: gl.constexpr, which):
        """One of the tiles of a kind."""
        return smem_tile(self.room, desc, BEGIN // desc.block_type.nbytes + which)

    @gluon.jit
    def load(self, desc, there, column, barrier, BEGIN: gl.constexpr, which):
        """Start the TMA load of some columns of a tile."""
        tma_copy(desc, (there[0], there[1], there[2], column), barrier, self.tile(desc, BEGIN, which))

    @gluon.jit
    def scores(self, box, s, walk, dtype: gl.constexpr):
        """Ask for the scores of a box of queries and a tile of keys."""
        return scores_of(
            address(self.room, self.Q, box, 64 * 64 * 2), address(self.room, self.Q_REST, box, 64 * walk.REST * 2),
            address(self.room, self.K, s, SLOT * 64 * 2), address(self.room, self.K_REST, s, SLOT * walk.REST * 2),
            walk.BN, walk.REST, dtype,
        )  # fmt: skip

    @gluon.jit
    def values(self, t, walk):
        """The address of a tile of values."""
        PARTS: gl.constexpr = parts_of(walk.DV + walk.V_REST, walk.V_REST)
        return address(self.room, self.V, t, PARTS * SLOT * walk.V_REST * 2)


@gluon.jit
def _produce(parts, descs, counter):
    walk, queue, tiles, q_full, q_empty, k_full, k_empty, v_full, v_empty = parts
    q_desc, q_rest_desc, k_desc, k_rest_desc, v_desc = descs
    PARTS: gl.constexpr = parts_of(walk.DV + walk.V_REST, walk.V_REST)
    count = gl.to_tensor(0)
    turn = gl.to_tensor(0)
    number = gl.program_id(0)
    many = walk.tiles()
    while number < many:
        start, head, tokens, keys, q_place, k_place = walk.tile(number, None)
        start, apart, _ = walk.placed(start, head, tokens)
        begin, blocks = walk.span(start)
        for j in range(blocks):
            s = count % walk.STAGES
            phase = ((count // walk.STAGES) & 1) ^ 1
            there = corner(k_place, head // walk.group, begin + (blocks - 1 - j) * walk.BN, keys, False)
            mbarrier_wait(k_empty.index(s), phase)
            mbarrier_expect(k_full.index(s), walk.BN * (walk.D + walk.REST) * 2)
            tiles.load(k_desc, there, 0, k_full.index(s), tiles.K, s)
            tiles.load(k_rest_desc, there, walk.D, k_full.index(s), tiles.K_REST, s)
            if j == 0:
                for c in gl.static_range(walk.CONSUMERS):
                    box = turn % 2 * walk.CONSUMERS + c
                    mbarrier_wait(q_empty.index(box), ((turn // 2) & 1) ^ 1)
                    mbarrier_expect(q_full.index(box), 64 * (walk.D + walk.REST) * 2)
                    q_corner = corner(q_place, head, start + c * apart, tokens, False)
                    tiles.load(q_desc, q_corner, 0, q_full.index(box), tiles.Q, box)
                    tiles.load(q_rest_desc, q_corner, walk.D, q_full.index(box), tiles.Q_REST, box)
            mbarrier_wait(v_empty.index(s), phase)
            mbarrier_expect(v_full.index(s), walk.BN * (walk.DV + walk.V_REST) * 2)
            for i in gl.static_range(PARTS):
                tiles.load(v_desc, there, i * walk.V_REST, v_full.index(s), tiles.V, s * PARTS + i)
            count += 1
        number = queue.fetch(turn, counter, many, walk.DYNAMIC)
        turn += 1


@gluon.jit
def _powers(qk, walk, queries, first, top, scale, EDGE: gl.constexpr):
    """Online softmax of a block of scores, as `exponentiate`: its powers, their row sums, what sums before it shrink
    by, and the new row maxima. first: its first key. EDGE: some queries do not see all of the keys."""
    scores = ()
    if EDGE:
        cols = gl.arange(0, 16, gl.SliceLayout(0, SIXTEEN))[None, :]
        if walk.RIGHT:
            seen = mask_before((walk.end(queries) - first)[:, None], cols)
        else:
            seen = mask_before(walk.keys - first, cols)
    for i in gl.static_range(len(qk)):
        x = qk[i]
        if EDGE:
            x = gl.where(in_mask(seen, cols + 16 * i), x, NOTHING)
        scores = scores + (x,)
    most = scores[0]
    for i in gl.static_range(1, len(qk)):
        most = gl.maximum(most, scores[i])
    new_top = gl.maximum(top, gl.max(most, 1) * scale)
    base = new_top
    if EDGE:
        base = gl.where(new_top == NOTHING, 0.0, new_top)
    powers = ()
    for i in gl.static_range(len(qk)):
        powers = powers + (gl.exp2(scores[i] * scale - base[:, None]),)
    sums = powers[0]
    for i in gl.static_range(1, len(qk)):
        sums += powers[i]
    return powers, gl.sum(sums, 1), gl.exp2(top - base), new_top


@gluon.jit
def _packed(powers, dtype: gl.constexpr):
    """Operands of the next product. To be made behind the wait for the product that reads the block's before: where
    registers of an operand are written while that is in flight, ptxas serialises all WGMMAs of the kernel (C7513)."""
    made = ()
    for i in gl.static_range(len(powers)):
        made = made + (pack(powers[i], dtype),)
    return made


@gluon.jit
def _unpacked(powers, dtype: gl.constexpr):
    made = ()
    for i in gl.static_range(len(powers)):
        made = made + (unpack(powers[i], dtype, SIXTEEN),)
    return made


@gluon.jit
def _scaled(sums, factor):
    made = ()
    for i in gl.static_range(len(sums)):
        made = made + (sums[i] * factor[:, None],)
    return made


@gluon.jit
def _zeros(N: gl.constexpr):
    made = ()
    for _ in gl.static_range(N):
        made = made + (gl.zeros([64, 16], gl.float32, SIXTEEN),)
    return made


@gluon.jit
def _consume(C: gl.constexpr, parts, out_descs, lse_ptr, sinks_ptr, scale):
    walk, queue, tiles, q_full, q_empty, k_full, k_empty, v_full, v_empty = parts
    BN: gl.constexpr = walk.BN
    dtype: gl.constexpr = tiles.room.dtype
    ROW: gl.constexpr = gl.SliceLayout(1, SIXTEEN)
    count = gl.to_tensor(0)
    turn = gl.to_tensor(0)
    number = gl.program_id(0)
    many = walk.tiles()
    if C == walk.CONSUMERS - 1:
        named_barrier("arrive", TURN)
    while number < many:
        start, head, tokens, keys, q_place, k_place = walk.tile(number, None)
        start, apart, _ = walk.placed(start, head, tokens)
        begin, blocks = walk.span(start)
        start += C * apart
        before_right = gl.to_tensor(0)
        if walk.SKIP:
            seen = gl.maximum(walk.end(gl.minimum(start + 63, tokens - 1)) - begin, 1)
            before_right = gl.maximum(blocks - (seen + BN - 1) // BN, 0)
            count = skip_blocks(C, before_right, count, walk, k_full, k_empty, v_full, v_empty, True)
            blocks -= before_right
        queries, _ = walk.queries(start, ROW)

        box = turn % 2 * walk.CONSUMERS + C
        mbarrier_wait(q_full.index(box), (turn // 2) & 1)
        s = count % walk.STAGES
        mbarrier_wait(k_full.index(s), (count // walk.STAGES) & 1)
        if before_right > 0:  # others have met a block before
            named_barrier("sync", TURN + C)
        qk = tiles.scores(box, s, walk, dtype)
        if before_right > 0:
            named_barrier("arrive", TURN + (C + 1) % walk.CONSUMERS)
        if turn > 0:  # the tile before was stored from the other box
            tma_store_wait(0)
            mbarrier_arrive(q_empty.index((turn + 1) % 2 * walk.CONSUMERS + C))
        qk = wgmma_wait(0, deps=qk)
        mbarrier_arrive(k_empty.index(s))
        none = gl.full([64], float("-inf"), gl.float32, ROW)
        powers, total, _, top = _powers(qk, walk, queries, begin + (blocks - 1) * BN, none, scale, not walk.WHOLE)
        p = _packed(powers, dtype)
        acc = _zeros((walk.V_COLS + 15) // 16)

        # blocks from the end: those that the right edge crosses, whole ones
        right = gl.minimum(gl.maximum(blocks - gl.maximum(walk.end(start) - begin, 0) // BN, 1), blocks)
        for phase in gl.static_range(2):
            if phase == 0:
                lower, upper = 1, right
            else:
                lower, upper = right, blocks
            if phase != 0 or walk.RIGHT:
                for j in range(lower, upper):
                    x = _unpacked(p, dtype)
                    behind = count % walk.STAGES
                    v_phase = (count // walk.STAGES) & 1
                    count += 1
                    s = count % walk.STAGES
                    v_tile = tiles.values(behind, walk)
                    named_barrier("sync", TURN + C)
                    mbarrier_wait(k_full.index(s), (count // walk.STAGES) & 1)
                    qk_made = tiles.scores(box, s, walk, dtype)
                    mbarrier_wait(v_full.index(behind), v_phase)
                    acc_made = add_sixteens(x, v_tile, acc, SLOT, walk.V_COLS, walk.V_REST)
                    named_barrier("arrive", TURN + (C + 1) % walk.CONSUMERS)
                    qk = wgmma_wait(1, deps=qk_made)
                    mbarrier_arrive(k_empty.index(s))
                    first = begin + (blocks - 1 - j) * BN
                    powers, added, decay, top = _powers(qk, walk, queries, first, top, scale, phase == 0)
                    total = total * decay + added
                    acc = wgmma_wait(0, deps=acc_made)
                    mbarrier_arrive(v_empty.index(behind))
                    acc = _scaled(acc, decay)
                    p = _packed(powers, dtype)

        t = count % walk.STAGES
        mbarrier_wait(v_full.index(t), (count // walk.STAGES) & 1)
        acc_made = add_sixteens(
            _unpacked(p, dtype), tiles.values(t, walk), acc, SLOT, walk.V_COLS, walk.V_REST
        )  # fmt: skip
        count += 1
        factor, lse = finish_softmax(top, total, head, sinks_ptr)
        row = (q_place * walk.heads + head).to(gl.int64) * tokens
        gl.store(lse_ptr + row + queries, lse, mask=queries < tokens)
        acc = wgmma_wait(0, deps=acc_made)
        mbarrier_arrive(v_empty.index(t))
        out, out_rest = whole_sums(_scaled(acc, factor), walk.V_REST)
        out_desc, out_rest_desc = out_descs
        start_write(out, out_rest, out_desc, out_rest_desc, tiles.tile(out_desc, tiles.Q, box),
                    tiles.tile(out_rest_desc, tiles.Q_REST, box), (None, None, tokens), q_place, head,
                    inside(start, tokens, False), walk.V_REST, 0, dtype, False)  # fmt: skip
        number = queue.next_tile(turn, many, walk.DYNAMIC)
        turn += 1
    tma_store_wait(0)


@gluon.jit(do_not_specialize=["tokens", "keys", "heads", "blocks", "rows", "section", "right", "group"])
def attention_fwd_joined_kernel(
    q_desc, q_rest_desc, k_desc, k_rest_desc, v_desc, out_desc, out_rest_desc, lse_ptr, sinks_ptr, counter,
    tokens, keys, heads, blocks, rows, section, right, group, scale,
    RIGHT: gl.constexpr, WHOLE: gl.constexpr, DYNAMIC: gl.constexpr, BN: gl.constexpr, D: gl.constexpr,
    DV: gl.constexpr, CONSUMERS: gl.constexpr, STAGES: gl.constexpr, REST: gl.constexpr, V_REST: gl.constexpr,
    V_COLS: gl.constexpr,
):  # fmt: skip
    """Arguments are those of `attention_fwd_kernel`; v_desc is of parts of V_REST columns."""
    BOXES: gl.constexpr = 2 * CONSUMERS
    END: gl.constexpr = _bytes_before("end", STAGES, BOXES, REST)
    gl.static_assert(CONSUMERS == 3 and D == 64 and DV == 64 and BN % 16 == 0 and BN < SLOT)
    gl.static_assert(V_REST == REST)  # out takes the place of queries
    none = gl.to_tensor(0)
    walk = Walk(
        tokens, keys, heads, blocks, rows, section, none, right, group, none, none,
        False, RIGHT, WHOLE, DYNAMIC, False, 64 * CONSUMERS, BN, D, DV, CONSUMERS, STAGES, 2, 0,
        False, STAGES, False, REST, V_REST, 1, V_REST, V_COLS,
    )  # fmt: skip
    v = smem_tiles(END // v_desc.block_type.nbytes, v_desc)
    check_place(v)
    tiles = Tiles(
        v,
        _bytes_before("k", STAGES, BOXES, REST),
        _bytes_before("q", STAGES, BOXES, REST),
        _bytes_before("v", STAGES, BOXES, REST),
        _bytes_before("k_rest", STAGES, BOXES, REST),
        _bytes_before("q_rest", STAGES, BOXES, REST),
    )
    queue = tile_queue(CONSUMERS, 1)
    q_full, q_empty, k_full, k_empty, v_full, v_empty = mbarriers(
        (BOXES, 1), (BOXES, 1), (STAGES, 1), (STAGES, CONSUMERS), (STAGES, 1), (STAGES, CONSUMERS)
    )
    fence_async()
    parts = (walk, queue, tiles, q_full, q_empty, k_full, k_empty, v_full, v_empty)
    descs = (q_desc, q_rest_desc, k_desc, k_rest_desc, v_desc)
    out_descs = (out_desc, out_rest_desc)
    gl.warp_specialize(
        [
            (_produce, (parts, descs, counter)),
            (_consume, (0, parts, out_descs, lse_ptr, sinks_ptr, scale)),
            (_consume, (1, parts, out_descs, lse_ptr, sinks_ptr, scale)),
            (_consume, (2, parts, out_descs, lse_ptr, sinks_ptr, scale)),
        ],
        [4, 4, 4],
        [160, 160, 160],
    )
