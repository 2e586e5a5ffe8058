"""Small kernels that together use every word of the language but those of fragments."""

from __future__ import annotations

import math

import numpy as np

from codegen.sample import Sample, random, sample
from tilesmith.codegen import (
    In,
    InOut,
    Out,
    Scalar,
    barrier,
    bf16,
    bf16x2,
    bitcast,
    bool_,
    build,
    ceil,
    const,
    cos,
    dot,
    exp,
    exp2,
    f16,
    f16x2,
    f16x4,
    f32,
    f32x2,
    f32x4,
    floor,
    fma,
    gid,
    groups,
    i32,
    inline,
    lane,
    local,
    log,
    log2,
    mulhi,
    pack_f16,
    rsqrt,
    select,
    shared,
    shuffle,
    shuffle_xor,
    sin,
    sqrt,
    subgroup,
    subgroup_add,
    subgroup_max,
    subgroup_min,
    subgroup_size,
    tanh,
    tid,
    u32,
    u32x2,
    unpack_f16,
    unroll,
    vector,
)


@sample
def rms_norm() -> Sample:
    threads, rows, columns = 64, 5, 77

    def rms_norm(x: In[f32], weight: In[f32], y: Out[f32], columns: Scalar[u32], eps: Scalar[f32]):
        partial = shared(f32, threads)
        t, start, squares = tid(0), gid(0) * columns, 0.0
        for i in range(t, columns, threads):
            squares += x[start + i] * x[start + i]
        partial[t] = squares
        for step in unroll(threads.bit_length() - 1):
            half: const = threads >> (step + 1)
            barrier()
            if t < half:
                partial[t] += partial[t + half]
        barrier()
        rstd = rsqrt(partial[0] / f32(columns) + eps)
        for i in range(t, columns, threads):
            y[start + i] = x[start + i] * rstd * weight[i]

    x, w = random(rows, columns), random(columns)
    wanted = x / np.sqrt((x.astype(np.float64) ** 2).mean(1, keepdims=True) + 1e-6) * w
    return Sample(
        build(rms_norm, (threads, 1, 1)),
        (rows, 1, 1),
        {"x": x, "weight": w, "y": np.full_like(x, np.nan)},
        {"columns": columns, "eps": 1e-6},
        {"y": wanted},
        1e-6,
    )


@sample
def integers() -> Sample:
    count = 96

    def integers(a: In[u32], b: In[i32], out: InOut[u32], n: Scalar[u32], shift: Scalar[i32]):
        i = gid(0) * 32 + tid(0)
        if i >= n:
            out[i] = 0
        else:
            u, s = a[i], b[i]
            quotient = u // (n + 1) + u % 7
            mixed = (u << 3) ^ (u >> 5) & ~u | (n & 12)
            signed = (s >> 2) + s % 8 - shift * 2 + s // 4
            high = mulhi(u, 0xD2511F53)
            bits = bitcast(u32, f32(signed))
            small = min(u, n, 50) + u32(abs(s)) + u32(max(s, -shift))
            out[i] += quotient + mixed * 3 + u32(signed) + high + bits + small

    rng = np.random.default_rng(0)
    a = rng.integers(0, 2**32, count, dtype=np.uint64).astype(np.uint32)
    b = rng.integers(-1000, 1000, count).astype(np.int32)
    out = np.arange(count, dtype=np.uint32)
    n, shift = 80, 5
    u, s = a.astype(np.uint64), b.astype(np.int64)
    signed = (s >> 2) + s % 8 - shift * 2 + s // 4
    bits = signed.astype(np.float32).view(np.uint32)
    mixed = ((u << 3) & 0xFFFFFFFF) ^ ((u >> 5) & ~u) | (n & 12)
    small = np.minimum(u, 50) + np.abs(s).astype(np.uint64) + np.maximum(s, -shift).astype(np.uint64)
    total = u // (n + 1) + u % 7 + mixed * 3 + signed.astype(np.uint64) + ((u * 0xD2511F53) >> 32) + bits + small
    wanted = np.where(np.arange(count) < n, out + total.astype(np.uint32), 0).astype(np.uint32)
    ir = build(integers, (32, 1, 1))
    return Sample(ir, (3, 1, 1), {"a": a, "b": b, "out": out}, {"n": n, "shift": shift}, {"out": wanted})


@sample
def functions() -> Sample:
    count = 64

    def functions(x: In[f32], y: Out[f32]):
        i = tid(0)
        v = x[i]
        p = abs(v) + 0.5
        y[i] = exp(v) + exp2(v) + log(p) + log2(p) + sqrt(p) + rsqrt(p) + tanh(v) + sin(v) + cos(v) + floor(v) - ceil(v)
        y[i + 64] = fma(v, p, -1.5) if v > 0 else select(v < -1.0, min(v, -2.0), max(-v, 0.25))

    x = random(count)
    v, p = x.astype(np.float64), np.abs(x.astype(np.float64)) + 0.5
    first = (
        np.exp(v) + np.exp2(v) + np.log(p) + np.log2(p) + np.sqrt(p) + 1 / np.sqrt(p) + np.tanh(v) + np.sin(v)
        + np.cos(v) + np.floor(v) - np.ceil(v)
    )  # fmt: skip
    second = np.where(v > 0, v * p - 1.5, np.where(v < -1, np.minimum(v, -2), np.maximum(-v, 0.25)))
    tensors = {"x": x, "y": np.zeros(2 * count, np.float32)}
    return Sample(build(functions, (count, 1, 1)), (1, 1, 1), tensors, {}, {"y": np.concatenate((first, second))}, 2e-6)


@sample
def vectors() -> Sample:
    threads, lanes = 16, 4
    t4 = vector(f32, lanes)

    def vectors(x: In[f32x4], scale: In[f32x2], y: Out[t4], total: Out[f32]):
        stage = shared(f32x4, threads)
        mine = local(f32x4, 2)
        i = gid(0) * threads + tid(0)
        s = scale[0]
        mine[0] = x[i] * s.x + t4(s.y)
        mine[1] = max(-mine[0], 0.5) / f32x4(1, 2, 4, 8)
        stage[tid(0)] = fma(mine[0], mine[1], select(i % 2 == 0, mine[0], mine[1]))
        barrier()
        v = stage[threads - 1 - tid(0)]
        y[i] = v - abs(x[i])
        total[i] = dot(v, x[i]) + v[3] + f32x2(v.x, v.y)[1]

    x = random(48, 4)
    a = x * np.float32(2.0) + np.float32(-0.75)
    b = np.maximum(-a, 0.5) / np.array([1, 2, 4, 8], np.float32)
    even = (np.arange(48) % 2 == 0)[:, None]
    stage = (a * b + np.where(even, a, b)).reshape(3, threads, 4)[:, ::-1].reshape(48, 4)
    total = (stage * x).sum(1) + stage[:, 3] + stage[:, 1]
    tensors = {
        "x": x,
        "scale": np.array([2.0, -0.75], np.float32),
        "y": np.zeros_like(x),
        "total": np.zeros(48, np.float32),
    }
    ir = build(vectors, (threads, 1, 1))
    return Sample(ir, (3, 1, 1), tensors, {}, {"y": stage - np.abs(x), "total": total}, 1e-6)


@sample
def halves() -> Sample:
    count = 32

    def halves(x: In[f16x4], y: Out[f16x4], z: Out[f16]):
        stage = shared(f16, 4 * count)
        i = tid(0)
        v = f32x4(x[i]) * 1.5
        y[i] = f16x4(v)
        for k in unroll(4):
            stage[4 * i + k] = f16(v[k])
        barrier()
        w = stage[4 * count - 1 - i] + x[i].x * f16(0.5)
        low = w if w < f16(0.0) else -w
        z[i] = max(low, -2.0) - x[i].w / 4

    x = random(count, 4).astype(np.float16)
    y = (x.astype(np.float32) * 1.5).astype(np.float16)
    w = y.reshape(-1)[::-1][:count] + x[:, 0] * np.float16(0.5)
    low = np.maximum(-np.abs(w), np.float16(-2))
    z = low - x[:, 3] / np.float16(4)
    tensors = {"x": x, "y": np.zeros_like(x), "z": np.zeros(count, np.float16)}
    return Sample(build(halves, (count, 1, 1)), (1, 1, 1), tensors, {}, {"y": y, "z": z}, 2e-3)


@sample
def packed_halves() -> Sample:
    count = 32

    def packed_halves(x: In[u32x2], y: Out[u32]):
        words = x[tid(0)]
        a, b = unpack_f16(words.x), unpack_f16(words.y)
        y[tid(0)] = pack_f16(a * b + 1.0)

    x = (random(count, 4) / 2).astype(np.float16)
    wanted = (x[:, :2].astype(np.float32) * x[:, 2:].astype(np.float32) + 1).astype(np.float16)
    tensors = {"x": x.view(np.uint32), "y": np.zeros(count, np.uint32)}
    ir = build(packed_halves, (count, 1, 1))
    return Sample(ir, (1, 1, 1), tensors, {}, {"y": wanted.view(np.uint32).reshape(-1)})


@sample
def halves_in_words() -> Sample:
    count = 32

    def halves_in_words(x: In[u32x2], y: Out[u32], z: Out[f16x2]):
        words = x[tid(0)]
        a, b = bitcast(f16x2, words.x), bitcast(f16x2, words.y)
        y[tid(0)] = bitcast(u32, f16x2(b.y, a.x))
        z[tid(0)] = bitcast(f16x2, words.x ^ 0x8000)

    x = random(count, 4).astype(np.float16)
    z = x[:, :2] * np.array([-1, 1], np.float16)
    tensors = {"x": x.view(np.uint32), "y": np.zeros(count, np.uint32), "z": np.zeros_like(z)}
    wanted = {"y": np.ascontiguousarray(x[:, [3, 0]]).view(np.uint32).reshape(-1), "z": z}
    return Sample(build(halves_in_words, (count, 1, 1)), (1, 1, 1), tensors, {}, wanted)


@sample
def brain_floats() -> Sample:
    count = 16

    def brain_floats(x: In[bf16x2], y: Out[bf16], z: Out[u32]):
        pair = f32x2(x[tid(0)])
        y[tid(0)] = bf16(pair.x + pair.y)
        z[tid(0)] = bitcast(u32, bf16x2(f32x2(bitcast(bf16x2, bitcast(u32, x[tid(0)]) ^ 0x8000)) * 0.5))

    x = (random(count, 2).view(np.uint32) >> 16).astype(np.uint16)
    total = (x.astype(np.uint32) << 16).view(np.float32).sum(1)
    bits = total.view(np.uint32).astype(np.uint64)
    wanted = ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)
    halved = (x.astype(np.uint32) << 16).view(np.float32) * np.array([-0.5, 0.5], np.float32)
    words = (halved.view(np.uint32) >> 16).astype(np.uint16).view(np.uint32).reshape(-1)
    tensors = {"x": x, "y": np.zeros(count, np.uint16), "z": np.zeros(count, np.uint32)}
    return Sample(build(brain_floats, (count, 1, 1)), (1, 1, 1), tensors, {}, {"y": wanted, "z": words})


@inline
def _collatz(start):
    n, steps = start, u32(0)
    while n > 1:
        n = n // 2 if n % 2 == 0 else 3 * n + 1
        steps += 1
    return steps, n


@sample
def control_flow() -> Sample:
    def control_flow(x: In[u32], y: Out[u32], n: Scalar[u32]):
        i = tid(0) + tid(1) * 8 + gid(0) * 32 + gid(1) * groups(0) * 32
        total = u32(0)
        if i < n and x[i] % 3 != 0:
            for k in range(2, x[i] % 9, 2):
                for j in range(k):
                    if (j + k) % 2 == 0 or j > 3:
                        total += j
                    else:
                        total += 100
        elif i < n:
            count, last = _collatz(x[i])
            total = count * 1000 + last
        negative = i32(0)
        for k in range(-3, 4, 3):
            negative += k * k - 1
        seen = bool_ if False else i == 5
        if not seen:
            y[i] = total + u32(negative)
        else:
            y[i] = 77

    n = 60
    x = np.arange(64, dtype=np.uint32) * 7 + 1

    def one(i: int) -> int:
        total = 0
        if i < n and x[i] % 3 != 0:
            for k in range(2, int(x[i] % 9), 2):
                for j in range(k):
                    total += j if (j + k) % 2 == 0 or j > 3 else 100
        elif i < n:
            value, steps = int(x[i]), 0
            while value > 1:
                value, steps = (value // 2 if value % 2 == 0 else 3 * value + 1), steps + 1
            total = steps * 1000 + value
        return 77 if i == 5 else total + 15

    wanted = np.array([one(i) for i in range(64)], np.uint32)
    ir = build(control_flow, (8, 4, 1))
    return Sample(ir, (1, 2, 1), {"x": x, "y": np.zeros(64, np.uint32)}, {"n": n}, {"y": wanted})


@sample
def subgroups() -> Sample:
    threads = 64

    def subgroups(x: In[f32], y: Out[f32], z: Out[u32]):
        partial = shared(f32, threads)
        t = tid(0)
        v = x[gid(0) * threads + t]
        total, high, low = subgroup_add(v), subgroup_max(v), subgroup_min(v)
        if lane() == 0:
            partial[subgroup()] = total
        barrier()
        everyone = 0.0
        for k in range(threads // subgroup_size()):
            everyone += partial[k]
        swapped = shuffle_xor(v, 1) + shuffle(v, 0)
        y[gid(0) * threads + t] = everyone
        last = subgroup_size() - 1
        z[gid(0) * threads + t] = u32(swapped == x[gid(0) * threads + t ^ 1] + x[gid(0) * threads + (t & ~last)])
        z[(gid(0) + groups(0)) * threads + t] = u32(high >= v and low <= v)

    x = np.floor(random(2, threads) * 8)
    y = np.repeat(x.sum(1), threads)
    ir = build(subgroups, (threads, 1, 1))
    tensors = {"x": x, "y": np.zeros(2 * threads, np.float32), "z": np.zeros(4 * threads, np.uint32)}
    return Sample(
        ir, (2, 1, 1), tensors, {}, {"y": y, "z": np.ones(4 * threads, np.uint32)}, 1e-6, subgroup_sizes=(4, 8, 32, 64)
    )


@sample
def reserved_names() -> Sample:
    def reserved_names(half: In[f32], storage: Out[f32], fn: Scalar[f32]):
        device, template = shared(f32, 32), local(f32, 1)
        precision = half[tid(0)]
        let = precision * fn
        device[tid(0)], template[0] = let, math.pi
        barrier()
        for loop in range(1):
            storage[tid(0) + loop] = device[31 - tid(0)] + template[0]

    x = random(32)
    wanted = (x * np.float32(3))[::-1] + np.float32(math.pi)
    tensors = {"half": x, "storage": np.zeros_like(x)}
    return Sample(build(reserved_names, (32, 1, 1)), (1, 1, 1), tensors, {"fn": 3.0}, {"storage": wanted}, 1e-6)
