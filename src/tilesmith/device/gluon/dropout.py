"""Dropout inside Gluon kernels that work on parts of rows: random bits, and zeros where they drop an element."""

from tilesmith.device.gluon.rows import optimization_barrier, pack, unpack
from tilesmith.device.gluon.shim import gl, gluon
from tilesmith.device.triton.philox import random_words


@gluon.jit
def random_part(key, first, WIDTH: gl.constexpr, SHORT: gl.constexpr):
    """Random bits for the WIDTH neighbours from the linear index `first` on (int64, a multiple of 8), as `dropout_part`
    takes them: two 16-bit numbers per 32-bit word, 8 neighbours per thread from one Philox call. key: from `load_key`.
    SHORT: as in `random_words`."""
    GROUPS: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
    WORDS: gl.constexpr = gl.BlockedLayout([4], [32], [gl.num_warps()], [0])
    w0, w1, w2, w3 = random_words(key, (first >> 3) + gl.arange(0, WIDTH // 8, GROUPS), SHORT)
    words = gl.reshape(gl.join(gl.join(w0, w2), gl.join(w1, w3)), [WIDTH // 2])
    return gl.convert_layout(words, WORDS, assert_trivial=True)


@gluon.jit
def random_part_here(key, first, WIDTH: gl.constexpr, SHORT: gl.constexpr):
    """`random_part`, generated at this place of the kernel. Otherwise the compiler would move the Philox calls of all
    parts to where the last or the first one is needed."""
    return optimization_barrier(random_part(key, first, WIDTH, SHORT))


@gluon.jit
def _multiply(a, b: gl.constexpr):
    """The high and low 32 bits of the product of a 32-bit word and a constant."""
    return gl.inline_asm_elementwise(
        f"{{ .reg .b64 both; mul.wide.u32 both, $2, {b}; mov.b64 {{$1, $0}}, both; }}", "=r,=r,r", [a],
        dtype=(gl.int32, gl.int32), is_pure=True, pack=1,
    )  # fmt: skip


@gluon.jit
def philox_in_loop(key, c0, c1):
    """`random_words` for use in a loop; c0 and c1 are the low and high words of the counters (c1 = 0: none needs more
    than 32 bits). In a loop the compiler keeps the factors of 64-bit products in registers and adds to each product
    that of their upper halves, which is 0: 21 of 118 instructions for 8 elements."""
    k0, k1 = key[0].to(gl.int32), (key[0] >> 32).to(gl.int32)
    c2, c3 = key[1].to(gl.int32), (key[1] >> 32).to(gl.int32)
    for _ in gl.static_range(10):
        high0, low0 = _multiply(c0, 0xD2511F53)
        high1, low1 = _multiply(c2, 0xCD9E8D57)
        c0, c1, c2, c3 = high1 ^ c1 ^ k0, low1, high0 ^ c3 ^ k1, low0
        k0 += -0x61C88647  # 0x9E3779B9
        k1 += -0x4498517B  # 0xBB67AE85
    return c0, c1, c2, c3


@gluon.jit
def random_part_in_loop(key, first, turn, WIDTH: gl.constexpr, SHORT: gl.constexpr):
    """`random_part_here` for the turn-th WIDTH neighbours from `first` on, for use in a loop."""
    GROUPS: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
    WORDS: gl.constexpr = gl.BlockedLayout([4], [32], [gl.num_warps()], [0])
    group = gl.arange(0, WIDTH // 8, GROUPS)
    if SHORT:
        c0, c1 = (first >> 3).to(gl.int32) + turn * (WIDTH // 8) + group, 0
    else:
        counter = (first >> 3) + turn * (WIDTH // 8) + group
        c0, c1 = counter.to(gl.int32), (counter >> 32).to(gl.int32)
    c0, c1, c2, c3 = philox_in_loop(key, c0, c1)
    words = gl.reshape(gl.join(gl.join(c0, c2), gl.join(c1, c3)), [WIDTH // 2])
    return optimization_barrier(gl.convert_layout(words, WORDS, assert_trivial=True))


@gluon.jit
def dropout_part(values, words, drop_below, dtype: gl.constexpr, WIDTH: gl.constexpr, RARE: gl.constexpr):
    """A part as `rows.load_packed` returns it, in `dtype`, with 0 for the elements that `words` drop. drop_below: from
    `dropout.kernel_numbers`. RARE: from `dropout.parts_dropout_flags`.

    RARE, for 16-bit types: an element is kept where min(bits, threshold) equals the threshold. As the threshold is
    finite when read as an fp16, two of these comparisons take one packed instruction: 3 instructions per pair, else 5.
    """
    LANES: gl.constexpr = gl.BlockedLayout([8], [32], [gl.num_warps()], [0])
    least = drop_below.to(gl.uint32, bitcast=True)
    if RARE and dtype.primitive_bitwidth == 16:
        values = gl.inline_asm_elementwise(
            """{
            .reg .b32 lower, kept;
            min.u16x2 lower, $2, $3;
            set.eq.u32.f16x2 kept, lower, $3;
            and.b32 $0, $1, kept;
            }""",
            "=r,r,r,r", [values, words, least | (least >> 16)], dtype=gl.int32, is_pure=True, pack=1,
        )  # fmt: skip
    else:
        bits = gl.convert_layout(gl.reshape(gl.join(words << 16, words), [WIDTH]), LANES, assert_trivial=True)
        values = unpack(values, dtype, WIDTH)
        values = pack(gl.where(bits >= least, values, gl.full([WIDTH], 0.0, dtype, LANES)), WIDTH)
    return values
