"""Dropout inside attention's Hopper kernels: which probabilities of a block survive, as bits drawn beside products.

A Philox call serves eight neighbouring keys of a query (`tilesmith.device.philox`). In the scores' fragment four lanes
have these, two each, and eight lanes where scores are transposed. So each lane draws calls of its own, makes a bit of
each number, and the lanes exchange these bits, 32 at once; a thread keeps a word or two until its powers are there.

Measured on an H200, head dim 128, 4k causal, us, forward and backward: so 754 and 1,454, without dropout 407 and 1,176.
A warpgroup of its own that draws a block ahead and leaves the bits in shared memory 876 and 1,447; rounds in a loop,
which all calls take in step, 820 and 1,512.
"""

from tilesmith.device.gluon.dropout import philox_in_loop
from tilesmith.device.gluon.shim import aggregate, gl, gluon


@aggregate
class Dropout:
    """What kernels know of a call's dropout, and where a tile's probabilities lie.

    seed, offset: of its seed tensor. least: the threshold, in both halves of a word. scale: the factor of what is kept.
    keys: of a row of the probabilities. row: the first query's. key: the first key's place in its row. RARE, SHORT:
    `dropout.parts_dropout_flags`. EVEN: each row, and each block of keys, starts with a call.
    """

    seed: gl.tensor
    offset: gl.tensor
    least: gl.tensor
    scale: gl.tensor
    keys: gl.tensor
    row: gl.tensor
    key: gl.tensor
    RARE: gl.constexpr
    SHORT: gl.constexpr
    EVEN: gl.constexpr

    @gluon.constexpr_function
    def __init__(self, seed, offset, least, scale, keys, row, key, RARE, SHORT, EVEN):
        self.seed, self.offset, self.least, self.scale = seed, offset, least, scale
        self.keys, self.row, self.key = keys, row, key
        self.RARE, self.SHORT, self.EVEN = gl.constexpr(RARE), gl.constexpr(SHORT), gl.constexpr(EVEN)

    @gluon.jit
    def at(self, row, key):
        """The same for a tile that starts at a row and a key."""
        return Dropout(
            self.seed, self.offset, self.least, self.scale, self.keys, row, key,
            self.RARE, self.SHORT, self.EVEN,
        )  # fmt: skip

    @gluon.jit
    def counter(self, query, key):
        """The counter of the call that draws for a query and a key of the tile, and the key's number of its eight."""
        row, key = self.row + query, self.key + key
        if self.EVEN and self.SHORT:
            counter, number = row * (self.keys >> 3) + (key >> 3), key * 0
        else:
            index = row.to(gl.int64) * self.keys + key
            counter, number = index >> 3, (index & 7).to(gl.int32)
            if self.SHORT:
                counter = counter.to(gl.int32)
        return counter, number

    @gluon.jit
    def bits(self, counter, place, STEP: gl.constexpr):
        """The eight bits of the call of each counter, two of word k at `place` + k * STEP and 16 further up."""
        low, high = counter.to(gl.int32), 0
        if not self.SHORT:
            high = (counter >> 32).to(gl.int32)
        words = philox_in_loop((self.seed, self.offset), low, high)
        found = low * 0
        for k in gl.static_range(4):
            here = 0x00010001 << (gl.to_tensor(place) + k * STEP)
            found = found | (_survives(words[k], self.least, self.RARE) & here)
        return found


@gluon.jit
def load_dropout(dropout, keys, DROPOUT_FORM: gl.constexpr):
    """The dropout of a call from a launcher's (seed tensor, drop_below, keep_scale), of rows of so many keys; None of
    None. DROPOUT_FORM: RARE, SHORT, EVEN of `Dropout`."""
    found = None
    if dropout is not None:
        least = dropout[1].to(gl.uint32, bitcast=True)
        least = (least | (least >> 16)).to(gl.int32, bitcast=True)
        seed, offset = gl.load(dropout[0]), gl.load(dropout[0] + 1)
        none = keys * 0
        found = Dropout(
            seed, offset, least, dropout[2], keys, none, none, DROPOUT_FORM[0], DROPOUT_FORM[1], DROPOUT_FORM[2]
        )
    return found


@gluon.jit
def _survives(word, least, RARE: gl.constexpr):
    """Ones in each half of a word that is at least the threshold. The lower one of both is the threshold then. RARE: as
    fp16s neither is a NaN; else their difference is 0, which no shift makes a zero of another sign."""
    if RARE:
        kept = gl.inline_asm_elementwise(
            "{ .reg .b32 lower; min.u16x2 lower, $1, $2; set.eq.u32.f16x2 $0, lower, $2; }",
            "=r,r,r", [word, least], dtype=gl.int32, is_pure=True, pack=1,
        )  # fmt: skip
    else:
        kept = gl.inline_asm_elementwise(
            """{
            .reg .b32 lower, half, zero;
            min.u16x2 lower, $1, $2;
            sub.u32 lower, $2, lower;
            shr.u32 half, lower, 1;
            or.b32 lower, lower, half;
            mov.b32 zero, 0;
            set.eq.u32.f16x2 $0, lower, zero;
            }""",
            "=r,r,r", [word, least], dtype=gl.int32, is_pure=True, pack=1,
        )  # fmt: skip
    return kept


@gluon.jit
def _either(a, b):
    return a | b


@gluon.constexpr_function
def _exchange_code(lanes):
    return f"""{{
        .reg .b32 other;
        shfl.sync.bfly.b32 other, $1, {lanes}, 31, 0xffffffff;
        shf.l.wrap.b32 other, other, other, $3;
        lop3.b32 $0, $1, other, $2, 0xe4;
        }}"""


@gluon.jit
def _exchange(bits, lane, LANES: gl.constexpr, TURN: gl.constexpr, LOWER: gl.constexpr):
    """Of lanes LANES apart, the one without that bit in `lane` keeps its bits LOWER, and gets those of the other one,
    TURN further up; the other one keeps its others and gets those, TURN further down."""
    CODE: gl.constexpr = _exchange_code(LANES)
    upper = lane != 0
    return gl.inline_asm_elementwise(
        CODE, "=r,r,r,r", [bits, gl.where(upper, ~LOWER, LOWER), gl.where(upper, 32 - TURN, TURN)],
        dtype=gl.int32, is_pure=True, pack=1,
    )  # fmt: skip


@gluon.constexpr_function
def _line(dim, layout, rank):
    """The layout of a vector that lies along one dim of a layout."""
    for i in reversed(range(rank)):
        if i != dim:
            layout = gl.SliceLayout(i, layout)
    return layout


@gluon.jit
def _along(size: gl.constexpr, dim: gl.constexpr, LAYOUT: gl.constexpr):
    """0, 1, ... along one dim of a layout, in all dims."""
    RANK: gl.constexpr = LAYOUT.rank
    x = gl.arange(0, size, _line(dim, LAYOUT, RANK))
    for i in gl.static_range(RANK):
        if i != dim:
            x = x.expand_dims(i)
    return x


@gluon.jit
def _moved(bits, behind, number, STEP: gl.constexpr, LENGTH: gl.constexpr):
    """Bits of eight neighbours from number `number` of a call's on, placed as `Dropout.bits` does, as are those of the
    call and, `behind`, of the next one: word k at k * STEP of each LENGTH bits."""
    ONES: gl.constexpr = 0x11111111 if LENGTH == 4 else 0x00010001
    LEAST: gl.constexpr = (1 << LENGTH) - 1
    steps = (number >> 1) * STEP
    stay = (LEAST >> steps) * ONES
    even = ((bits >> steps) & stay) | ((behind << (LENGTH - steps)) & ~stay)
    steps += STEP
    stay = (LEAST >> steps) * ONES
    odd = ((bits >> steps) & stay) | ((behind << (LENGTH - steps)) & ~stay)
    return gl.where((number & 1) == 0, even, ((even >> 16) & 0xFFFF) | (odd << 16))


@gluon.jit
def kept_keys(drop, first, KEYS: gl.constexpr):
    """Which of KEYS keys, from the tile's key number `first` on, survive of each of 64 queries: [64, 4] words for
    `dropped`. Lane q of four draws for the groups of eight keys number 4 g + q; bit 4 g + k of its word is of keys
    2 k (the upper half: 2 k + 1) of group 4 g + q, and then, of lane k, of group 4 g + q."""
    GROUPS: gl.constexpr = KEYS // 32
    MORE: gl.constexpr = [[0, 0, 1], [0, 0, 2]] if GROUPS == 4 else [[0, 0, 1]] if GROUPS == 2 else []
    DROPOUT_FORM: gl.constexpr = gl.DistributedLinearLayout(
        [[8, 0, 0]] + MORE, [[0, 1, 0], [0, 2, 0], [1, 0, 0], [2, 0, 0], [4, 0, 0]],
        [[16, 0, 0], [32, 0, 0]], [], [64, 4, GROUPS],
    )  # fmt: skip
    query, lane, group = _along(64, 0, DROPOUT_FORM), _along(4, 1, DROPOUT_FORM), _along(GROUPS, 2, DROPOUT_FORM)
    counter, number = drop.counter(query, first)
    bits = gl.reduce(drop.bits(counter + lane + group * 4, group * 4, 1), 2, _either)
    WORDS: gl.constexpr = bits.type.layout
    lane = _along(4, 1, WORDS)
    if not drop.EVEN:
        counter = gl.convert_layout(gl.reshape(counter, [64, 1]), WORDS, assert_trivial=True)
        number = gl.convert_layout(gl.reshape(number, [64, 1]), WORDS, assert_trivial=True)
        last = drop.bits(counter + KEYS // 8, KEYS // 8 - 4, 1)
        behind = gl.inline_asm_elementwise(
            "shfl.sync.idx.b32 $0, $1, $2, 0x1c1f, 0xffffffff;", "=r,r,r", [bits, (lane + 1) & 3],
            dtype=gl.int32, is_pure=True, pack=1,
        )  # fmt: skip
        behind = gl.where(lane == 3, ((behind >> 4) & 0x0FFF0FFF) | last, behind)
        bits = _moved(bits, behind, number, 1, 4)
    bits = _exchange(bits, lane & 1, 1, 1, 0x55555555)
    return _exchange(bits, lane & 2, 2, 2, 0x33333333)


@gluon.jit
def dropped(p, bits):
    """p [64, KEYS / 2], neighbours of a row as halves of an integer, with 0 where the bits of `kept_keys` are not set.
    A bit is brought to the top of a byte, from where it fills a half: the shift serves two pairs, of groups eight
    apart."""
    KEYS: gl.constexpr = p.shape[1] * 2
    x = gl.reshape(p, [64, KEYS // 8, 4])
    LAYOUT: gl.constexpr = x.type.layout
    bits = gl.convert_layout(bits, gl.SliceLayout(1, LAYOUT), assert_trivial=True).expand_dims(1)
    group = _along(KEYS // 8, 1, LAYOUT)
    x = gl.inline_asm_elementwise(
        "{ .reg .b32 kept; prmt.b32 kept, $2, 0, $3; and.b32 $0, $1, kept; }",
        "=r,r,r,r", [x, bits << (7 - group & 7), gl.where(group < 8, 0xAA88, 0xBB99)],
        dtype=gl.int32, is_pure=True, pack=1,
    )  # fmt: skip
    return gl.convert_layout(gl.reshape(x, [64, KEYS // 2]), p.type.layout, assert_trivial=True)


@gluon.jit
def kept_queries(drop, QUERIES: gl.constexpr):
    """Which of a tile's first 64 keys survive of each of QUERIES queries, for scores whose rows are keys:
    [4, QUERIES / 64, 32] words for `dropped_queries`. Lane l of a warp draws for queries 2 l and 2 l + 1
    of 64 and its warp's 16 keys; bit 4 k + 2 i + b of its word is of keys 2 k (the upper half: 2 k + 1) of the i-th
    eight, query 2 l + b. Of eight lanes four apart each then gets the bits of one key."""
    MORE: gl.constexpr = [[0, 0, 1, 0, 0]] if QUERIES == 128 else []
    DROPOUT_FORM: gl.constexpr = gl.DistributedLinearLayout(
        [[0, 0, 0, 0, 1], [0, 1, 0, 0, 0]] + MORE,
        [[0, 0, 0, 1, 0], [0, 0, 0, 2, 0], [0, 0, 0, 4, 0], [0, 0, 0, 8, 0], [0, 0, 0, 16, 0]],
        [[1, 0, 0, 0, 0], [2, 0, 0, 0, 0]], [], [4, 2, QUERIES // 64, 32, 2],
    )  # fmt: skip
    warp = _along(4, 0, DROPOUT_FORM)
    eight = _along(2, 1, DROPOUT_FORM)
    part = _along(QUERIES // 64, 2, DROPOUT_FORM)
    lane = _along(32, 3, DROPOUT_FORM)
    odd = _along(2, 4, DROPOUT_FORM)
    counter, number = drop.counter(part * 64 + lane * 2 + odd, warp * 16)
    bits = gl.reduce(drop.bits(counter + eight, eight * 2, 4), 1, _either)
    if not drop.EVEN:
        ROWS: gl.constexpr = bits.type.layout
        counter = gl.convert_layout(gl.reshape(counter, [4, QUERIES // 64, 32, 2]), ROWS, assert_trivial=True)
        number = gl.convert_layout(gl.reshape(number, [4, QUERIES // 64, 32, 2]), ROWS, assert_trivial=True)
        bits = _moved(bits, ((bits >> 2) & 0x11111111) | drop.bits(counter + 2, 2, 4), number, 4, 16)
    ODD: gl.constexpr = bits.type.layout
    bits = gl.reduce(bits << _along(2, 3, ODD), 3, _either)
    WORDS: gl.constexpr = bits.type.layout
    lane = _along(32, 2, WORDS)
    bits = _exchange(bits, lane & 4, 4, 16, 0x0000FFFF)
    bits = _exchange(bits, lane & 8, 8, 4, 0x0F0F0F0F)
    return _exchange(bits, lane & 16, 16, 8, 0x00FF00FF)


@gluon.jit
def dropped_queries(p, bits):
    """p [64 keys, QUERIES] with 0 where the bits of `kept_queries` are not set."""
    QUERIES: gl.constexpr = p.shape[1]
    x = gl.reshape(p, [4, 2, 8, QUERIES // 64, 8, 4, 2])
    LAYOUT: gl.constexpr = x.type.layout
    bits = gl.permute(gl.reshape(bits, [4, QUERIES // 64, 8, 4]), (0, 2, 1, 3))
    bits = gl.convert_layout(bits, gl.SliceLayout(1, gl.SliceLayout(4, gl.SliceLayout(6, LAYOUT))), assert_trivial=True)
    bits = bits.expand_dims(1).expand_dims(4).expand_dims(6)
    eight, group, odd = _along(2, 1, LAYOUT), _along(8, 4, LAYOUT), _along(2, 6, LAYOUT)
    place = (group & 1) * 16 + (group & 2) * 2 + (group & 4) * 2 + eight * 2 + odd
    x = gl.where((bits & (1 << place)) != 0, x, 0.0)
    return gl.convert_layout(gl.reshape(x, [64, QUERIES]), p.type.layout, assert_trivial=True)
