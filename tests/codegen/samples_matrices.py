"""Small kernels with fragments: products through memory and in registers, and a softmax that stays in registers."""

from __future__ import annotations

import numpy as np

from codegen.sample import Sample, random, sample
from tilesmith.codegen import (
    In,
    KernelIR,
    Out,
    Scalar,
    barrier,
    bf16,
    build,
    column,
    const,
    convert,
    elements,
    exp,
    f16,
    f32,
    f32x4,
    fill,
    fragment,
    gid,
    lane,
    load_fragment,
    mma,
    reduce_rows,
    row,
    row_add,
    row_max,
    shared,
    store_fragment,
    subgroup,
    subgroup_add,
    subgroup_barrier,
    subgroup_size,
    tid,
    u32,
    u32x4,
    unroll,
)


def create_matmul(tile: int, dtype=f16, registers: bool = False) -> KernelIR:
    """C = A @ B of (2 tile x 2 tile) blocks, K a multiple of tile; B is read by rows, or its transpose."""
    size, pad = 2 * tile, 8

    def matmul(a: In[dtype], b: In[dtype], out: Out[f32], k: Scalar[u32]):
        left = shared(dtype, size * (tile + pad))
        right = shared(dtype, tile * (size + pad))
        fa, fb = fragment("a", dtype, tile), fragment("b", dtype, tile)
        sums = [fragment("c", f32, tile) for _ in range(2)]
        for c in sums:
            fill(c, 0.0)
        for start in range(0, k, tile):
            barrier()
            for i in range(tid(0), size * tile, 64):
                left[i // tile * (tile + pad) + i % tile] = a[(gid(0) * size + i // tile) * k + start + i % tile]
                right[i // size * (size + pad) + i % size] = b[(start + i // size) * size + i % size]
            barrier()
            load_fragment(fa, left, subgroup() * (tile * (tile + pad)), tile + pad)
            for c, j in zip(sums, range(2)):
                load_fragment(fb, right, j * tile, size + pad)
                mma(c, fa, fb)
        for j in unroll(2):
            at = (gid(0) * size + subgroup() * tile) * size + j * tile
            if registers:
                for e in unroll(elements(sums[j])):
                    out[at + row(sums[j], e) * size + column(sums[j], e)] = sums[j][e]
            else:
                store_fragment(sums[j], out, at, size)

    return build(matmul, (64, 1, 1), name="matmul")


def matmul_sample(tile: int, dtype=f16, registers: bool = False) -> Sample:
    """The matmul with inputs."""
    size, k = 2 * tile, 3 * tile
    a, b = random(2 * size, k).astype(np.float16), random(k, size).astype(np.float16)
    wanted = a.astype(np.float32) @ b.astype(np.float32)
    if dtype is bf16:
        a, b = ((m.astype(np.float32).view(np.uint32) >> 16).astype(np.uint16) for m in (a, b))
        wide = [(m.astype(np.uint32) << 16).view(np.float32) for m in (a, b)]
        wanted = wide[0] @ wide[1]
    tensors = {"a": a, "b": b, "out": np.zeros((2 * size, size), np.float32)}
    return Sample(create_matmul(tile, dtype, registers), (2, 1, 1), tensors, {"k": k}, {"out": wanted}, 1e-5)


@sample
def matmul() -> Sample:
    return matmul_sample(16)


@sample
def matmul_8() -> Sample:
    return matmul_sample(8)


@sample
def matmul_bf16() -> Sample:
    return matmul_sample(16, bf16)


@sample
def matmul_words() -> Sample:
    """A 16 x 16 product whose operands travel in words of two and eight halves, one transposed."""

    def matmul_words(a: In[u32x4], b: In[u32], out: Out[f32x4]):
        left, right, result = shared(u32x4, 48), shared(u32, 128), shared(f32x4, 64)
        fa, fb, sums = fragment("a", f16), fragment("b", f16), fragment("c", f32)
        t = tid(0)
        left[t // 2 * 3 + t % 2] = a[t]
        for i in range(t, 128, 32):
            right[i] = b[i]
        barrier()
        if subgroup() == 0:
            load_fragment(fa, left, 0, 24)
            load_fragment(fb, right, 0, 16, transposed=True)
            fill(sums, 0.5)
            mma(sums, fa, fb)
            store_fragment(sums, result, 0, 16)
        barrier()
        for i in range(t, 64, 32):
            out[i] = result[i]

    a, b = (random(16, 16).astype(np.float16) for _ in range(2))
    tensors = {"a": a.view(np.uint32), "b": b.view(np.uint32), "out": np.zeros((16, 16), np.float32)}
    wanted = a.astype(np.float32) @ b.astype(np.float32).T + 0.5
    return Sample(build(matmul_words, (32, 1, 1)), (1, 1, 1), tensors, {}, {"out": wanted}, 1e-5)


@sample
def first_subgroup() -> Sample:
    """Reductions of the workgroup in two steps, the second by the first subgroup alone."""
    threads = 64

    def first_subgroup(x: In[f32], y: Out[f32]):
        partial = shared(f32, threads)
        t = tid(0)
        total = subgroup_add(x[t])
        if lane() == 0:
            partial[subgroup()] = total
        barrier()
        if subgroup() == 0:
            whole = subgroup_add(partial[lane()] if lane() < threads // subgroup_size() else f32(0))
            if lane() == 0:
                y[0] = whole

    x = np.floor(random(threads) * 8)
    tensors = {"x": x, "y": np.zeros(1, np.float32)}
    ir = build(first_subgroup, (threads, 1, 1))
    return Sample(ir, (1, 1, 1), tensors, {}, {"y": x.sum(keepdims=True)}, subgroup_sizes=(8, 16, 32, 64))


def softmax_sample(tile: int) -> Sample:
    """softmax(A B^T) B of one tile, all in registers: every element and conversion word."""

    def softmax(a: In[f16], b: In[f16], out: Out[f32], peak: Out[f32]):
        left, right = shared(f16, tile * tile), shared(f16, tile * tile)
        fa, fb, fp = fragment("a", f16, tile), fragment("b", f16, tile), fragment("a", f16, tile)
        scores, result = fragment("c", f32, tile), fragment("c", f32, tile)
        for i in range(tid(0), tile * tile, 32):
            left[i], right[i] = a[i], b[i]
        barrier()
        load_fragment(fa, left, 0, tile)
        load_fragment(fb, right, 0, tile, transposed=True)
        fill(scores, 0.0)
        mma(scores, fa, fb)
        groups_of_rows: const = [[e for e in range(elements(scores)) if e // 2 % 2 == h] for h in range(tile // 8)]
        for rows in groups_of_rows:
            high = scores[rows[0]]
            for e in rows:
                high = max(high, scores[e])
            high = row_max(scores, high)
            total = 0.0
            for e in rows:
                scores[e] = exp(scores[e] - high)
                total += scores[e]
            total = row_add(scores, total)
            for e in rows:
                scores[e] = scores[e] / total
            if column(scores, rows[0]) == 0:
                peak[row(scores, rows[0])] = high
        convert(fp, scores)
        load_fragment(fb, right, 0, tile)
        fill(result, 0.0)
        mma(result, fp, fb)
        store_fragment(result, out, 0, tile)

    a, b = (random(tile, tile).astype(np.float16) for _ in range(2))
    s = a.astype(np.float32) @ b.astype(np.float32).T
    p = np.exp(s - s.max(1, keepdims=True))
    p = (p / p.sum(1, keepdims=True)).astype(np.float16).astype(np.float32)
    tensors = {"a": a, "b": b, "out": np.zeros((tile, tile), np.float32), "peak": np.zeros(tile, np.float32)}
    ir = build(softmax, (32, 1, 1), name="softmax")
    return Sample(ir, (1, 1, 1), tensors, {}, {"out": p @ b.astype(np.float32), "peak": s.max(1)}, 2e-3)


@sample
def softmax() -> Sample:
    return softmax_sample(16)


@sample
def softmax_8() -> Sample:
    return softmax_sample(8)


def softmax_anywhere_sample(tile: int) -> Sample:
    """The same, and hidden above the diagonal, without knowing where elements lie; a row's values reach all of it."""

    def softmax(a: In[f16], b: In[f16], out: Out[f32]):
        left, right, spots = shared(f16, tile * tile), shared(f16, tile * tile), shared(f32, tile * tile)
        fa, fb, fp = fragment("a", f16, tile), fragment("b", f16, tile), fragment("a", f16, tile)
        scores, whole, spot = [fragment("c", f32, tile, placed=False) for _ in range(3)]
        result = fragment("c", f32, tile, placed=False)
        for i in range(tid(0), tile * tile, 32):
            left[i], right[i], spots[i] = a[i], b[i], f32(i)
        barrier()
        load_fragment(fa, left, 0, tile)
        load_fragment(fb, right, 0, tile, transposed=True)
        fill(scores, 0.0)
        mma(scores, fa, fb)
        load_fragment(spot, spots, 0, tile)
        for e in unroll(elements(scores)):
            scores[e] = scores[e] if u32(spot[e]) % tile <= u32(spot[e]) // tile else -1.0e30
        reduce_rows(whole, scores, "max")
        for e in unroll(elements(scores)):
            scores[e] = exp(scores[e] - whole[e])
        reduce_rows(whole, scores, "add")
        for e in unroll(elements(scores)):
            scores[e] = scores[e] / whole[e]
        convert(fp, scores)
        load_fragment(fb, right, 0, tile)
        fill(result, 0.0)
        mma(result, fp, fb)
        store_fragment(result, out, 0, tile)

    a, b = (random(tile, tile).astype(np.float16) for _ in range(2))
    s = np.where(np.tri(tile, dtype=bool), a.astype(np.float32) @ b.astype(np.float32).T, -np.inf)
    p = np.exp(s - s.max(1, keepdims=True))
    p = (p / p.sum(1, keepdims=True)).astype(np.float16).astype(np.float32)
    tensors = {"a": a, "b": b, "out": np.zeros((tile, tile), np.float32)}
    ir = build(softmax, (32, 1, 1), name="softmax")
    return Sample(ir, (1, 1, 1), tensors, {}, {"out": p @ b.astype(np.float32)}, 2e-3)


@sample
def softmax_anywhere() -> Sample:
    return softmax_anywhere_sample(16)


@sample
def softmax_anywhere_8() -> Sample:
    return softmax_anywhere_sample(8)


@sample
def turned() -> Sample:
    """What a thread has goes to the one before it in its subgroup and back; they wait for their subgroup alone."""
    threads = 64

    def turned(x: In[f32], y: Out[f32]):
        stage = shared(f32, threads)
        t, size = tid(0), subgroup_size()
        following = t - lane() + (lane() + 1) % size
        stage[t] = x[t]
        subgroup_barrier()
        own = stage[following]
        subgroup_barrier()
        stage[t] = own
        subgroup_barrier()
        y[t] = stage[t - lane() + (lane() + size - 1) % size]

    x = random(threads)
    ir, tensors = build(turned, (threads, 1, 1)), {"x": x, "y": np.zeros_like(x)}
    return Sample(ir, (1, 1, 1), tensors, {}, {"y": x}, subgroup_sizes=(8, 16, 32, 64))


@sample
def rounded() -> Sample:
    """Matrices of a subgroup each: an accumulator of which all columns are one, rounded to f16 as it is stored."""

    def rounded(x: In[f32], y: Out[f16]):
        column, stage = shared(f32, 32), shared(f16, 2 * 16 * 24)
        c, first = fragment("c", f32), subgroup() * 16
        if lane() < 16:
            column[first + lane()] = x[first + lane()]
        subgroup_barrier()
        load_fragment(c, column, first, 0, transposed=True)
        store_fragment(c, stage, first * 24, 24)
        subgroup_barrier()
        for i in unroll(8):
            at = first * 16 + lane() * 8 + i
            y[at] = stage[at // 16 * 24 + at % 16]

    x = random(32)
    wanted = np.repeat(x, 16).astype(np.float16)
    tensors = {"x": x, "y": np.zeros(512, np.float16)}
    return Sample(build(rounded, (64, 1, 1)), (1, 1, 1), tensors, {}, {"y": wanted}, 0.0)


@sample
def rounded_8() -> Sample:
    """An 8 x 8 accumulator, rounded to f16 as it is stored."""

    def rounded(x: In[f32], y: Out[f16]):
        c = fragment("c", f32, 8)
        load_fragment(c, x, 0, 8)
        store_fragment(c, y, 0, 8)

    x = random(64)
    tensors = {"x": x, "y": np.zeros(64, np.float16)}
    ir = build(rounded, (32, 1, 1))
    return Sample(ir, (1, 1, 1), tensors, {}, {"y": x.astype(np.float16)}, 0.0)
