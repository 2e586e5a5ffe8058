"""The softmax between attention's two products on Hopper: masks, tanh, packed operands, the last factor and lse."""

from tilesmith.device.gluon.shim import gl, gluon

LN2 = gl.constexpr(0.6931471805599453)
NOTHING = gl.constexpr(float("-inf"))


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
def tanh(x):
    """tanh. 1 - e is exact near 0, where 1 - 2 / (1 + e) would lose what a softcap then multiplies."""
    e = gl.exp2(gl.abs(x) * (-2.0 / LN2))
    y = (1.0 - e) / (1.0 + e)
    return gl.where(x < 0, -y, y)


@gluon.jit
def mask_before(limit, cols):
    """A word of the columns `cols` that lie before `limit`. A thread has 2 of every 8 columns, so all its columns of a
    row find themselves in the bits of one word, which costs 2 instructions an element; comparing each costs 6."""
    rest = limit - (cols & 6)
    count = gl.minimum(gl.maximum((rest >> 3) * 2 + gl.minimum(rest & 7, 2), 0), 32)
    return (1 << count.to(gl.int64)).to(gl.int32) - 1


@gluon.jit
def in_mask(word, cols):
    """Whether the columns' bits are set."""
    return (word & (1 << (((cols >> 3) << 1) | (cols & 1)))) != 0


@gluon.jit
def apply_mask(qk, walk, queries, first, LOW: gl.constexpr):
    """Scores of a block, or of its first keys, that some queries do not see whole. LOW: the left edge of the window may
    be in it, too."""
    cols = gl.arange(0, qk.shape[1], gl.SliceLayout(0, qk.type.layout))[None, :]
    if walk.RIGHT:
        word = mask_before((walk.end(queries) - first)[:, None], cols)
    else:
        word = mask_before(walk.keys - first, cols)
    if LOW:
        word = word & ~mask_before((walk.begin(queries) - first)[:, None], cols)
    return gl.where(in_mask(word, cols), qk, NOTHING)


@gluon.jit
def exponentiate(qk, top, scale, EDGE: gl.constexpr):
    """Online softmax of a block of scores: its probabilities, what sums before it shrink by, and the new row maxima,
    all in units of log 2. top: the row maxima so far. EDGE: a row may have seen nothing."""
    new_top = gl.maximum(top, gl.max(qk, 1) * scale)
    base = new_top
    if EDGE:
        base = gl.where(new_top == NOTHING, 0.0, new_top)
    p = gl.exp2(qk * scale - base[:, None])
    return p, gl.exp2(top - base), new_top


@gluon.jit
def finish_softmax(top, total, head, sinks_ptr):
    """From each row's row maximum and its row sum: what the sum of values is multiplied by, and lse."""
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
