"""Philox4x32-10 for Triton kernels: the same bits as `tilesmith.ops.philox`, by the same element index."""

import triton
import triton.language as tl


@triton.jit
def load_key(seed_ptr):
    """(seed, offset) of int64 [2]: what the functions below take as `key`."""
    return tl.load(seed_ptr), tl.load(seed_ptr + 1)


@triton.jit
def _random_words(key, counter):
    """The four uint32 words of each int64 counter (linear element index // 4)."""
    seed, offset = key
    low = (counter & 0xFFFFFFFF).to(tl.uint32)
    high = ((counter >> 32) & 0xFFFFFFFF).to(tl.uint32)
    zero = low * 0
    offset_low = (offset & 0xFFFFFFFF).to(tl.uint32) + zero
    offset_high = ((offset >> 32) & 0xFFFFFFFF).to(tl.uint32) + zero
    return tl.philox(seed, low, high, offset_low, offset_high)


@triton.jit
def random_bits_at(key, index):
    """The uint32 of each int64 linear element index, wherever the tile starts."""
    w0, w1, w2, w3 = _random_words(key, index // 4)
    lane = index % 4
    return tl.where(lane < 2, tl.where(lane == 0, w0, w1), tl.where(lane == 2, w2, w3))


@triton.jit
def random_bits(seed_ptr, index):
    """`random_bits_at` of a key not loaded yet."""
    return random_bits_at(load_key(seed_ptr), index)


@triton.jit
def random_bits_by_four(seed_ptr, counter):
    """The uint32s of a tile whose rows start at a multiple of four: counters [M, N // 4] -> bits [M, N]."""
    w0, w1, w2, w3 = _random_words(load_key(seed_ptr), counter)
    pairs = tl.join(tl.join(w0, w2), tl.join(w1, w3))
    return tl.reshape(pairs, (counter.shape[0], counter.shape[1] * 4))


@triton.jit
def _multiply(a, b):
    """High and low word of the product of two 32-bit words by one wide multiplication; mul.hi and mul.lo are two."""
    product = a.to(tl.uint64) * b
    return (product >> 32).to(tl.uint32), product.to(tl.uint32)


@triton.jit
def _random_words_wide(key, low, high):
    """`_random_words` of the counters low + high · 2**32, uint32, in half the multiplications, for kernels that these
    hold up. Where `high` is a scalar, so is all that the first two rounds make of it and of the offset.

    Its 64-bit products make Triton take the words for too dear to compute in another layout: where the tile that they
    meet does not have theirs, they go through shared memory.
    """
    seed, offset = key[0].to(tl.uint64, bitcast=True), key[1].to(tl.uint64, bitcast=True)
    k0, k1 = seed.to(tl.uint32), (seed >> 32).to(tl.uint32)
    c0, c1, c2, c3 = low, high, offset.to(tl.uint32), (offset >> 32).to(tl.uint32)
    for _ in tl.static_range(10):
        high0, low0 = _multiply(c0, 0xD2511F53)
        high1, low1 = _multiply(c2, 0xCD9E8D57)
        c0, c1, c2, c3 = high1 ^ c1 ^ k0, low1, high0 ^ c3 ^ k1, low0
        k0 += 0x9E3779B9
        k1 += 0xBB67AE85
    return c0, c1, c2, c3


@triton.jit
def _words_of_group(key, first, group, SHORT: tl.constexpr):
    """The words of the `group`-th counter of rows that start at the linear indices `first`, multiples of four. SHORT:
    no counter needs more than 32 bits."""
    if SHORT:
        return _random_words_wide(key, (first >> 2).to(tl.uint32) + group, tl.full([], 0, tl.uint32))
    else:
        counter = (first >> 2) + group
        return _random_words_wide(key, counter.to(tl.uint32), (counter >> 32).to(tl.uint32))


@triton.jit
def random_bits_wide(key, first, BLOCK_COLS: tl.constexpr, LANES: tl.constexpr, SHORT: tl.constexpr):
    """The uint32s [M, BLOCK_COLS] of a tile whose row m starts at the linear index first[m], [M, 1] int64.

    LANES: 4 or 8 neighbours that a thread holds, so many as a 16-byte access moves of the tile's elements; `first` are
    multiples of it. The words then lie in the threads that load and store those elements. SHORT: the tensor has at most
    2**34 elements.
    """
    group = tl.arange(0, BLOCK_COLS // LANES).to(tl.uint32)[None, :]
    if LANES == 8:
        a0, a1, a2, a3 = _words_of_group(key, first, 2 * group, SHORT)
        b0, b1, b2, b3 = _words_of_group(key, first, 2 * group + 1, SHORT)
        even = tl.join(tl.join(a0, b0), tl.join(a2, b2))
        odd = tl.join(tl.join(a1, b1), tl.join(a3, b3))
    else:
        a0, a1, a2, a3 = _words_of_group(key, first, group, SHORT)
        even, odd = tl.join(a0, a2), tl.join(a1, a3)
    return tl.reshape(tl.join(even, odd), (first.shape[0], BLOCK_COLS))
