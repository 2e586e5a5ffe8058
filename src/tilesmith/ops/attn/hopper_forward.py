"""Device kernel of attention's forward on Hopper, in Gluon.

A program is one producer, which loads tiles by the tensor memory accelerator, and two or three consumers (warpgroups of
128 threads) with 64 queries each, which meet the keys from the last visible block to the first. The product with the
values of one block runs while the scores of the next are made. Programs stay: each works on many tiles of queries.
Scores live in units of log 2.
"""

from tilesmith.ops.attn.hopper_gluon import (
    aggregate,
    arrive,
    barriers,
    bulk_load,
    bulk_store,
    bulk_wait,
    fence,
    gl,
    gluon,
    mma,
    mma_wait,
    wait,
)

LN2 = gl.constexpr(0.6931471805599453)
NOTHING = gl.constexpr(float("-inf"))


@aggregate
class Walk:
    """What every part of a program knows: the sizes of the call, who sees which keys, and the order of the tiles.

    blocks: tiles of queries of a head. rows: batch * heads. section: how many heads are worked on together, so that
    their keys and values stay in L2. left, right: the window. group: heads of q that share one of k and v.
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
    LEFT: gl.constexpr
    RIGHT: gl.constexpr
    WHOLE: gl.constexpr
    DYNAMIC: gl.constexpr
    BM: gl.constexpr
    BN: gl.constexpr
    D: gl.constexpr
    CONSUMERS: gl.constexpr
    STAGES: gl.constexpr

    @gluon.constexpr_function
    def __init__(
        self, tokens, keys, heads, blocks, rows, section, left, right, group,
        LEFT, RIGHT, WHOLE, DYNAMIC, BM, BN, D, CONSUMERS, STAGES,
    ):  # fmt: skip
        self.tokens, self.keys, self.heads, self.blocks, self.rows = tokens, keys, heads, blocks, rows
        self.section, self.left, self.right, self.group = section, left, right, group
        self.LEFT, self.RIGHT = gl.constexpr(LEFT), gl.constexpr(RIGHT)
        self.WHOLE, self.DYNAMIC = gl.constexpr(WHOLE), gl.constexpr(DYNAMIC)
        self.BM, self.BN, self.D = gl.constexpr(BM), gl.constexpr(BN), gl.constexpr(D)
        self.CONSUMERS, self.STAGES = gl.constexpr(CONSUMERS), gl.constexpr(STAGES)

    @gluon.jit
    def tile(self, number):
        """First query, batch and head of a tile. Sections of heads one after another; in each the last queries of all
        its heads first, which see the most keys, so that the short tiles fill the end."""
        behind = number // (self.section * self.blocks)
        inside = number - behind * (self.section * self.blocks)
        width = gl.minimum(self.section, self.rows - behind * self.section)
        block = inside // width
        row = behind * self.section + inside - block * width
        batch = row // self.heads
        return (self.blocks - 1 - block) * self.BM, batch, row - batch * self.heads

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
            begin = gl.minimum(gl.maximum(query + (self.keys - self.tokens) - self.left, 0), self.keys - 1)
        return begin

    @gluon.jit
    def span(self, start):
        """The first key of a tile of queries, and its number of key blocks: at least one, where all may be hidden."""
        begin = self.begin(start)
        end = self.end(gl.minimum(start + self.BM, self.tokens) - 1)
        return begin, gl.maximum((end - begin + self.BN - 1) // self.BN, 1)


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
        LANES: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
        self.box.index((turn & 1) * self.NUMBERS + i).store(gl.full([1], 0, gl.int32, LANES) + number)

    @gluon.jit
    def read(self, turn, i: gl.constexpr):
        """A number of a turn, between `take` and `give_back`."""
        LANES: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
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
def follow(number, turn):
    """The next tile of a program in the fixed order: forth and back over the programs, which evens out tiles that get
    shorter and shorter."""
    programs = gl.num_programs(0)
    first = gl.program_id(0)
    return (turn + 1) * programs + gl.where((turn & 1) == 0, programs - 1 - first, first)


@gluon.jit
def _produce(parts, q_desc, k_desc, v_desc, counter):
    walk, tickets, q, k, v, q_full, q_empty, k_full, k_empty, v_full, v_empty = parts
    count = gl.to_tensor(0)
    turn = gl.to_tensor(0)
    number = gl.program_id(0)
    tiles = walk.blocks * walk.rows
    while number < tiles:
        start, batch, head = walk.tile(number)
        kv_head = head // walk.group
        begin, blocks = walk.span(start)
        for j in range(blocks):
            first = begin + (blocks - 1 - j) * walk.BN
            s = count % walk.STAGES
            phase = (count // walk.STAGES) & 1
            wait(k_empty.index(s), phase ^ 1)
            bulk_load(k_desc, [batch, kv_head, first, 0], k_full.index(s), k.index(s))
            if j == 0:
                for c in gl.static_range(walk.CONSUMERS):
                    wait(q_empty.index(c), (turn & 1) ^ 1)
                    bulk_load(q_desc, [batch, head, start + c * 64, 0], q_full.index(c), q.index(c))
            wait(v_empty.index(s), phase ^ 1)
            bulk_load(v_desc, [batch, kv_head, first, 0], v_full.index(s), v.index(s))
            count += 1
        if walk.DYNAMIC:
            number = draw(counter, tiles)
            tickets.open(turn)
            tickets.write(turn, 0, number)
            tickets.close(turn)
        else:
            number = follow(number, turn)
        turn += 1


@gluon.jit
def power(x, EASY: gl.constexpr):
    """2 ** x. EASY: x <= 0, and a share of the elements goes to the multipliers, since heads of dim 64 wait for the
    special function unit."""
    if EASY:
        # One element of four: 2 ** (x - n) by a polynomial of degree 4 on [-1/2, 1/2] (relative error 3e-6), n = x
        # rounded (by adding 1.5 * 2**23) put into the exponent.
        return gl.inline_asm_elementwise(
            """{
            .reg .f32 x, n, f, p;
            .reg .b32 e, r;
            ex2.approx.ftz.f32 $0, $4;
            ex2.approx.ftz.f32 $1, $5;
            ex2.approx.ftz.f32 $2, $6;
            max.f32 x, $7, 0fC2FC0000;
            add.rn.f32 n, x, 0f4B400000;
            sub.rn.f32 f, n, 0f4B400000;
            sub.rn.f32 f, x, f;
            fma.rn.f32 p, f, 0f3C1D0119, 0f3D64FDDA;
            fma.rn.f32 p, p, f, 0f3E7601BB;
            fma.rn.f32 p, p, f, 0f3F317097;
            fma.rn.f32 p, p, f, 0f3F800000;
            mov.b32 e, n;
            mov.b32 r, p;
            shl.b32 e, e, 23;
            add.s32 r, r, e;
            mov.b32 $3, r;
            }""",
            "=f,=f,=f,=f,f,f,f,f", [x], dtype=gl.float32, is_pure=True, pack=4,
        )  # fmt: skip
    return gl.exp2(x)


@gluon.jit
def bend(x):
    """tanh."""
    return 1.0 - 2.0 / (1.0 + gl.exp2(x * (2.0 / LN2)))


@gluon.jit
def _hide(qk, walk, queries, first, LOW: gl.constexpr):
    """Scores of a block that some queries do not see whole. LOW: the left edge of the window may be in it, too."""
    keys = first + gl.arange(0, walk.BN, gl.SliceLayout(0, qk.type.layout))
    if walk.RIGHT:
        seen = keys[None, :] < walk.end(queries)[:, None]
    else:
        seen = (keys < walk.keys)[None, :]
    if LOW:
        seen = seen & (keys[None, :] >= walk.begin(queries)[:, None])
    return gl.where(seen, qk, NOTHING)


@gluon.jit
def _consume(C: gl.constexpr, parts, out_desc, lse_ptr, sinks_ptr, inner, scale, out,
             SOFTCAP: gl.constexpr, POLYNOMIAL: gl.constexpr):  # fmt: skip
    walk, tickets, q, k, v, q_full, q_empty, k_full, k_empty, v_full, v_empty = parts
    BN: gl.constexpr = walk.BN
    D: gl.constexpr = walk.D
    dtype: gl.constexpr = q.dtype
    SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BN, 16])
    OUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16])
    P: gl.constexpr = gl.DotOperandLayout(0, OUT, 2)
    ROW: gl.constexpr = gl.SliceLayout(1, SCORES)
    OUT_ROW: gl.constexpr = gl.SliceLayout(1, OUT)
    PHASES: gl.constexpr = 3 if walk.LEFT else 2
    count = gl.to_tensor(0)
    turn = gl.to_tensor(0)
    number = gl.program_id(0)
    tiles = walk.blocks * walk.rows
    q_tile = q.index(C).reshape([64, D])
    while number < tiles:
        start, batch, head = walk.tile(number)
        begin, blocks = walk.span(start)
        start += C * 64
        queries = start + gl.arange(0, 64, ROW)
        acc = gl.zeros([64, D], gl.float32, OUT)
        zero = gl.zeros([64, BN], gl.float32, SCORES)

        wait(q_full.index(C), turn & 1)
        s = count % walk.STAGES
        wait(k_full.index(s), (count // walk.STAGES) & 1)
        qk = mma(q_tile, k.index(s).reshape([BN, D]).permute((1, 0)), zero, use_acc=False, is_async=True)
        qk = mma_wait(0, deps=[qk])
        arrive(k_empty.index(s))
        if SOFTCAP:
            qk = bend(qk * inner)
        if not walk.WHOLE:
            qk = _hide(qk, walk, queries, begin + (blocks - 1) * BN, walk.LEFT)
        top = gl.max(qk, 1) * scale
        base = top
        if not walk.WHOLE:
            base = gl.where(top == NOTHING, 0.0, top)
        p = power(qk * scale - base[:, None], False)
        total = gl.sum(p, 1)
        p = gl.convert_layout(p.to(dtype), P)

        # blocks from the end: those that the right edge crosses, whole ones, those that the left edge crosses
        right = gl.minimum(gl.maximum(blocks - gl.maximum(walk.end(start) - begin, 0) // BN, 1), blocks)
        left = blocks
        if walk.LEFT:
            left = blocks - (walk.begin(start + 63) - begin + BN - 1) // BN
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
                    before = count % walk.STAGES
                    v_phase = (count // walk.STAGES) & 1
                    count += 1
                    s = count % walk.STAGES
                    wait(k_full.index(s), (count // walk.STAGES) & 1)
                    qk_made = mma(
                        q_tile, k.index(s).reshape([BN, D]).permute((1, 0)), zero, use_acc=False, is_async=True
                    )
                    wait(v_full.index(before), v_phase)
                    acc_made = mma(p, v.index(before).reshape([BN, D]), acc, use_acc=True, is_async=True)
                    qk = mma_wait(1, deps=[qk_made])
                    arrive(k_empty.index(s))
                    if SOFTCAP:
                        qk = bend(qk * inner)
                    if phase != 1:
                        qk = _hide(qk, walk, queries, begin + (blocks - 1 - j) * BN, walk.LEFT)
                    new_top = gl.maximum(top, gl.max(qk, 1) * scale)
                    base = new_top
                    if phase != 1:
                        base = gl.where(new_top == NOTHING, 0.0, new_top)
                    new = power(qk * scale - base[:, None], POLYNOMIAL and phase == 1)
                    decay = gl.exp2(top - base)
                    total = total * decay + gl.sum(new, 1)
                    top = new_top
                    acc = mma_wait(0, deps=[acc_made])
                    arrive(v_empty.index(before))
                    acc = acc * gl.convert_layout(decay, OUT_ROW)[:, None]
                    p = gl.convert_layout(new.to(dtype), P)

        arrive(q_empty.index(C))
        s = count % walk.STAGES
        wait(v_full.index(s), (count // walk.STAGES) & 1)
        acc_made = mma(p, v.index(s).reshape([BN, D]), acc, use_acc=True, is_async=True)
        count += 1
        decay = gl.full([64], 1.0, gl.float32, ROW)
        if sinks_ptr is not None:
            sink = gl.load(sinks_ptr + head).to(gl.float32) * (1.0 / LN2)
            new_top = gl.maximum(top, sink)
            base = gl.where(new_top == NOTHING, 0.0, new_top)
            decay = gl.exp2(top - base)
            total = total * decay + gl.exp2(sink - base)
            top = new_top
        dead = total == 0.0
        total = gl.where(dead, 1.0, total)
        lse = gl.where(dead, NOTHING, (top + gl.log2(total)) * LN2)
        row = (batch * walk.heads + head).to(gl.int64) * walk.tokens
        gl.store(lse_ptr + row + queries, lse, mask=queries < walk.tokens)
        acc = mma_wait(0, deps=[acc_made])
        arrive(v_empty.index(s))
        acc = acc * gl.convert_layout(decay / total, OUT_ROW)[:, None]
        bulk_wait(0)
        tile = out.index(C)
        tile.reshape([64, D]).store(acc.to(dtype))
        fence()
        bulk_store(out_desc, [batch, head, start, 0], tile)
        if walk.DYNAMIC:
            tickets.take(turn)
            number = tickets.read(turn, 0)
            tickets.give_back(turn)
        else:
            number = follow(number, turn)
        turn += 1
    bulk_wait(0)


@gluon.jit(do_not_specialize=["tokens", "keys", "heads", "blocks", "rows", "section", "left", "right", "group"])
def attention_fwd_kernel(
    q_desc, k_desc, v_desc, out_desc, lse_ptr, sinks_ptr, counter,
    tokens, keys, heads, blocks, rows, section, left, right, group, inner, scale,
    LEFT: gl.constexpr, RIGHT: gl.constexpr, WHOLE: gl.constexpr, DYNAMIC: gl.constexpr,
    BN: gl.constexpr, D: gl.constexpr, CONSUMERS: gl.constexpr, STAGES: gl.constexpr, SOFTCAP: gl.constexpr,
    POLYNOMIAL: gl.constexpr,
):  # fmt: skip
    """Tiles of CONSUMERS * 64 queries of one head. scale: of q . k, times log2(e); with SOFTCAP inner is
    the factor before tanh and scale that behind it. WHOLE: every query sees every key,
    in whole blocks."""
    dtype: gl.constexpr = q_desc.dtype
    walk = Walk(
        tokens, keys, heads, blocks, rows, section, left, right, group,
        LEFT, RIGHT, WHOLE, DYNAMIC, CONSUMERS * 64, BN, D, CONSUMERS, STAGES,
    )  # fmt: skip
    q = gl.allocate_shared_memory(dtype, [CONSUMERS, 1, 1, 64, D], q_desc.layout)
    k = gl.allocate_shared_memory(dtype, [STAGES, 1, 1, BN, D], k_desc.layout)
    v = gl.allocate_shared_memory(dtype, [STAGES, 1, 1, BN, D], v_desc.layout)
    out = gl.allocate_shared_memory(dtype, [CONSUMERS, 1, 1, 64, D], out_desc.layout)
    ticket = tickets(CONSUMERS, 1)
    q_full = barriers(CONSUMERS, 1)
    q_empty = barriers(CONSUMERS, 1)
    k_full = barriers(STAGES, 1)
    k_empty = barriers(STAGES, CONSUMERS)
    v_full = barriers(STAGES, 1)
    v_empty = barriers(STAGES, CONSUMERS)
    fence()
    parts = (walk, ticket, q, k, v, q_full, q_empty, k_full, k_empty, v_full, v_empty)
    if CONSUMERS == 2:
        gl.warp_specialize(
            [
                (_produce, (parts, q_desc, k_desc, v_desc, counter)),
                (_consume, (0, parts, out_desc, lse_ptr, sinks_ptr, inner, scale, out, SOFTCAP, POLYNOMIAL)),
                (_consume, (1, parts, out_desc, lse_ptr, sinks_ptr, inner, scale, out, SOFTCAP, POLYNOMIAL)),
            ],
            [4, 4],
            [240, 240],
        )
    else:
        gl.warp_specialize(
            [
                (_produce, (parts, q_desc, k_desc, v_desc, counter)),
                (_consume, (0, parts, out_desc, lse_ptr, sinks_ptr, inner, scale, out, SOFTCAP, POLYNOMIAL)),
                (_consume, (1, parts, out_desc, lse_ptr, sinks_ptr, inner, scale, out, SOFTCAP, POLYNOMIAL)),
                (_consume, (2, parts, out_desc, lse_ptr, sinks_ptr, inner, scale, out, SOFTCAP, POLYNOMIAL)),
            ],
            [4, 4, 4],
            [160, 160, 160],
        )
