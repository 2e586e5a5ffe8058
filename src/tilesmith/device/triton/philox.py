"""Philox4x32-10 for Triton kernels: the same bits as `tilesmith.device.philox`, by the same element index."""

import triton
import triton.language as tl


@triton.jit
def load_key(seed_ptr):
    """(seed, offset) of int64 [2]: what the functions below take as `key`."""
    return tl.load(seed_ptr), tl.load(seed_ptr + 1)


@triton.jit
def _multiply(a, b):
    """The high and low words of the product of two 32-bit words, by one wide multiplication; mul.hi and mul.lo would be
    two."""
    product = a.to(tl.uint64) * b
    return (product >> 32).to(tl.uint32), product.to(tl.uint32)


@triton.jit
def random_words(key, counter, SHORT: tl.constexpr):
    """The four output words for each int64 counter. SHORT: no counter needs more than 32 bits; what the first two
    rounds compute from a counter's high half and from the offset is then a scalar.

    Because of the 64-bit products, Triton considers the words too expensive to compute in another layout: where the
    tile that uses them has a different one, they go through shared memory.
    """
    seed, offset = key[0].to(tl.uint64, bitcast=True), key[1].to(tl.uint64, bitcast=True)
    k0, k1 = seed.to(tl.uint32), (seed >> 32).to(tl.uint32)
    c0, c2, c3 = counter.to(tl.uint32), offset.to(tl.uint32), (offset >> 32).to(tl.uint32)
    c1 = 0 if SHORT else (counter >> 32).to(tl.uint32)
    for _ in tl.static_range(10):
        high0, low0 = _multiply(c0, 0xD2511F53)
        high1, low1 = _multiply(c2, 0xCD9E8D57)
        c0, c1, c2, c3 = high1 ^ c1 ^ k0, low1, high0 ^ c3 ^ k1, low0
        k0 += 0x9E3779B9
        k1 += 0xBB67AE85
    return c0, c1, c2, c3


@triton.jit
def random_bits(key, first, BLOCK_COLS: tl.constexpr, LANES: tl.constexpr, SHORT: tl.constexpr):
    """uint32s [M, BLOCK_COLS] whose upper halves are the random bits of a tile. Row m of the tile starts at the linear
    index first[m], [M, 1] int64. The lower halves are undefined.

    LANES: 8 or 4 neighbours per thread, as many as a 16-byte access of the tile's elements moves; `first` are multiples
    of it. One Philox call then serves them, and its words lie in the threads that load and store those elements. LANES
    = 1 serves any `first`, with one call per element. SHORT: the tensor has at most 2**35 elements.
    """
    lane = tl.arange(0, BLOCK_COLS // LANES)[None, :]
    if LANES == 8:
        w0, w1, w2, w3 = random_words(key, (first >> 3) + lane, SHORT)
        words = tl.join(tl.join(w0, w2), tl.join(w1, w3))
        bits = tl.reshape(tl.join(words << 16, words), (first.shape[0], BLOCK_COLS))
    elif LANES == 4:
        group = (first >> 2) + lane
        w0, w1, w2, w3 = random_words(key, group >> 1, SHORT)
        odd = (group & 1) != 0
        words = tl.join(tl.where(odd, w2, w0), tl.where(odd, w3, w1))
        bits = tl.reshape(tl.join(words << 16, words), (first.shape[0], BLOCK_COLS))
    else:
        index = first + lane
        w0, w1, w2, w3 = random_words(key, index >> 3, SHORT)
        part = index & 7
        word = tl.where(part < 4, tl.where(part < 2, w0, w1), tl.where(part < 6, w2, w3))
        bits = tl.where((part & 1) != 0, word, word << 16)
    return bits
