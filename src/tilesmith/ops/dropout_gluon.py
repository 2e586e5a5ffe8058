"""Dropout inside Gluon kernels that work on parts of rows: which elements of a part survive."""

from tilesmith.ops.gluon_shim import gl, gluon
from tilesmith.ops.philox_triton import random_words
from tilesmith.ops.rows_gluon import packed, unpacked


@gluon.jit
def drawn_part(key, first, WIDTH: gl.constexpr, SHORT: gl.constexpr):
    """The random bits of the WIDTH neighbours from the int64 linear index `first` on, a multiple of 8, for
    `dropped_part`: two to a word, 8 neighbours a thread, for which it makes one Philox call. key: from `load_key`.
    SHORT: as in `random_words`."""
    GROUPS: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
    WORDS: gl.constexpr = gl.BlockedLayout([4], [32], [gl.num_warps()], [0])
    w0, w1, w2, w3 = random_words(key, (first >> 3) + gl.arange(0, WIDTH // 8, GROUPS), SHORT)
    words = gl.reshape(gl.join(gl.join(w0, w2), gl.join(w1, w3)), [WIDTH // 2])
    return gl.convert_layout(words, WORDS, assert_trivial=True)


@gluon.jit
def drawn_here(key, first, WIDTH: gl.constexpr, SHORT: gl.constexpr):
    """`drawn_part`, drawn at this place of the program: what draws has no effect that the compiler sees, and it would
    gather the draws of all parts where the last one is needed, or the first, as suits the addresses."""
    words = drawn_part(key, first, WIDTH, SHORT)
    return gl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [words], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def dropped_part(values, words, drop_below, dtype: gl.constexpr, WIDTH: gl.constexpr, RARE: gl.constexpr):
    """A part of `dtype` as `rows_gluon.raw` returns it, with 0 where `words` drop. drop_below: from
    `dropout.kernel_numbers`. RARE: from `dropout.parts_dropout_flags`.

    RARE, of 16 bits: the lower one of bits and threshold is the threshold where a value is kept; as floats of 16 bits,
    of which none is a NaN or a zero of another sign, two of them are compared at once: 3 instructions, else 5.
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
        values = unpacked(values, dtype, WIDTH)
        values = packed(gl.where(bits >= least, values, gl.full([WIDTH], 0.0, dtype, LANES)), WIDTH)
    return values
