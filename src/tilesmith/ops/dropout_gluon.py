"""Dropout inside Gluon kernels that work on parts of rows: which elements of a part survive."""

from tilesmith.ops.gluon_shim import gl, gluon
from tilesmith.ops.philox_triton import random_words


@gluon.jit
def kept_part(seed_ptr, first, drop_below, WIDTH: gl.constexpr):
    """Which of the WIDTH neighbours from the int64 linear index `first` on, a multiple of 8, survive; 8 neighbours a
    thread, for which it makes one Philox call. drop_below: from `dropout.kernel_numbers`."""
    GROUPS: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
    LANES: gl.constexpr = gl.BlockedLayout([8], [32], [gl.num_warps()], [0])
    key = gl.load(seed_ptr), gl.load(seed_ptr + 1)
    counter = (first >> 3) + gl.arange(0, WIDTH // 8, GROUPS)
    w0, w1, w2, w3 = random_words(key, counter, False)
    words = gl.join(gl.join(w0, w2), gl.join(w1, w3))
    bits = gl.reshape(gl.join(words << 16, words), [WIDTH])
    return gl.convert_layout(bits, LANES, assert_trivial=True) >= drop_below.to(gl.uint32, bitcast=True)
