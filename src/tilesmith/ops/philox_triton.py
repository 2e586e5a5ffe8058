"""Philox4x32-10 for Triton kernels: the same bits as `tilesmith.ops.philox`, by the same element index."""

import triton
import triton.language as tl


@triton.jit
def random_words(seed_ptr, counter):
    """The four uint32 words of each int64 counter (linear element index // 4); seed_ptr: int64 [2] = (seed, offset)."""
    seed = tl.load(seed_ptr)
    offset = tl.load(seed_ptr + 1)
    low = (counter & 0xFFFFFFFF).to(tl.uint32)
    high = ((counter >> 32) & 0xFFFFFFFF).to(tl.uint32)
    zero = low * 0
    offset_low = (offset & 0xFFFFFFFF).to(tl.uint32) + zero
    offset_high = ((offset >> 32) & 0xFFFFFFFF).to(tl.uint32) + zero
    return tl.philox(seed, low, high, offset_low, offset_high)


@triton.jit
def random_bits(seed_ptr, index):
    """The uint32 of each int64 linear element index, wherever the tile starts."""
    w0, w1, w2, w3 = random_words(seed_ptr, index // 4)
    lane = index % 4
    return tl.where(lane < 2, tl.where(lane == 0, w0, w1), tl.where(lane == 2, w2, w3))


@triton.jit
def random_bits_by_four(seed_ptr, counter):
    """The uint32s of a tile whose rows start at a multiple of four: counters [M, N // 4] -> bits [M, N]."""
    w0, w1, w2, w3 = random_words(seed_ptr, counter)
    pairs = tl.join(tl.join(w0, w2), tl.join(w1, w3))
    return tl.reshape(pairs, (counter.shape[0], counter.shape[1] * 4))
