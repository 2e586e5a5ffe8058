"""The kernels of a Llama decoder with a key/value cache, for any GPU. f32; one sequence.

Shapes: T tokens of this call after P tokens before them, C features, H query heads, G heads of keys and values, D
features a head, S slots of the cache. The residual stream x [T, C] is added to in place.
"""

from tilesmith.codegen import (
    In,
    InOut,
    KernelIR,
    Out,
    Scalar,
    barrier,
    build,
    dot,
    exp,
    f32,
    f32x4,
    gid,
    inline,
    local,
    log,
    rsqrt,
    shared,
    tid,
    u32,
    unroll,
)
from tilesmith.kernels.rows import across, row_highest, row_sum

THREADS = 64
ROWS = OUTPUTS = 16
"""Rows and outputs of a workgroup of `linear`, of which a thread computes two by two."""

ROW_OUTPUTS = 4
"""Outputs of a workgroup of `linear_row`."""

_DEPTH = 8  # vectors of a row staged at a time


def embedding(features: int) -> KernelIR:
    """x[t] = table[tokens[t]]. Grid: (T, 1, 1)."""
    vectors = features // 4

    def embedding(tokens: In[u32], table: In[f32x4], x: Out[f32x4]):
        start, source = gid(0) * vectors, tokens[gid(0)] * vectors
        for i in range(tid(0), vectors, THREADS):
            x[start + i] = table[source + i]

    return build(embedding, (THREADS, 1, 1))


def rms_norm(features: int) -> KernelIR:
    """y = x / sqrt(mean(x²) + eps) · weight, row by row. Grid: (T, 1, 1)."""
    vectors = features // 4

    def rms_norm(x: In[f32x4], weight: In[f32x4], y: Out[f32x4], eps: Scalar[f32]):
        stage = shared(f32, THREADS)
        start, total = gid(0) * vectors, 0.0
        for i in range(tid(0), vectors, THREADS):
            total += dot(x[start + i], x[start + i])
        rstd = rsqrt(row_sum(total, stage, THREADS) / f32(features) + eps)
        for i in range(tid(0), vectors, THREADS):
            y[start + i] = x[start + i] * rstd * weight[i]

    return build(rms_norm, (THREADS, 1, 1))


def linear(accumulate: bool = False) -> KernelIR:
    """y = x · weightᵀ, or y += with `accumulate`: x [T, inputs], weight [outputs, inputs], y [T, outputs].

    Scalars: rows (T), vectors (inputs / 4), outputs. Grid: (ceil(outputs / OUTPUTS), ceil(T / ROWS), 1).
    """
    stride = _DEPTH + 1  # rows start in different banks

    @inline
    def stage(tile, source, first, last, start, vectors):
        """Rows first, first + 1, ... of a matrix, from vector `start` on; zero past its end."""
        for i in range(tid(0), ROWS * _DEPTH, THREADS):
            row, column = first + i // _DEPTH, start + i % _DEPTH
            v = f32x4(0)
            if row < last and column < vectors:
                v = source[row * vectors + column]
            tile[i // _DEPTH * stride + i % _DEPTH] = v

    @inline
    def body(x, weight, y, rows, vectors, outputs):
        xs, ws = shared(f32x4, ROWS * stride), shared(f32x4, OUTPUTS * stride)
        sums = local(f32, 4)
        row0, output0 = gid(1) * ROWS, gid(0) * OUTPUTS
        down, right = tid(0) // 8, tid(0) % 8  # this thread's rows are down and down + 8, its outputs alike
        for k in unroll(4):
            sums[k] = 0.0
        for start in range(0, vectors, _DEPTH):
            barrier()
            stage(xs, x, row0, rows, start, vectors)
            stage(ws, weight, output0, outputs, start, vectors)
            barrier()
            for i in range(_DEPTH):
                for k in unroll(4):
                    sums[k] += dot(xs[(down + k // 2 * 8) * stride + i], ws[(right + k % 2 * 8) * stride + i])
        for k in unroll(4):
            row, output = row0 + down + k // 2 * 8, output0 + right + k % 2 * 8
            if row < rows and output < outputs:
                if accumulate:
                    y[row * outputs + output] += sums[k]
                else:
                    y[row * outputs + output] = sums[k]

    def product(
        x: In[f32x4], weight: In[f32x4], y: Out[f32], rows: Scalar[u32], vectors: Scalar[u32], outputs: Scalar[u32]
    ):
        body(x, weight, y, rows, vectors, outputs)

    def added(
        x: In[f32x4], weight: In[f32x4], y: InOut[f32], rows: Scalar[u32], vectors: Scalar[u32], outputs: Scalar[u32]
    ):
        body(x, weight, y, rows, vectors, outputs)

    return build(added if accumulate else product, (THREADS, 1, 1), name="linear")


def linear_row(accumulate: bool = False) -> KernelIR:
    """`linear` for one row, which only waits for the weights: sixteen threads share an output.

    Scalars: vectors, outputs. Grid: (ceil(outputs / ROW_OUTPUTS), 1, 1).
    """
    lanes = THREADS // ROW_OUTPUTS

    @inline
    def body(x, weight, y, vectors, outputs):
        stage = shared(f32, THREADS)
        output = gid(0) * ROW_OUTPUTS + tid(0) // lanes
        start, total = min(output, outputs - 1) * vectors, 0.0
        for i in range(tid(0) % lanes, vectors, lanes):
            total += dot(x[i], weight[start + i])
        total = row_sum(total, stage, lanes)
        if tid(0) % lanes == 0 and output < outputs:
            if accumulate:
                y[output] += total
            else:
                y[output] = total

    def product(x: In[f32x4], weight: In[f32x4], y: Out[f32], vectors: Scalar[u32], outputs: Scalar[u32]):
        body(x, weight, y, vectors, outputs)

    def added(x: In[f32x4], weight: In[f32x4], y: InOut[f32], vectors: Scalar[u32], outputs: Scalar[u32]):
        body(x, weight, y, vectors, outputs)

    return build(added if accumulate else product, (THREADS, 1, 1), name="linear_row")


def rope_append(heads: int, kv_heads: int, head_dim: int, slots: int) -> KernelIR:
    """Turn queries and keys to their positions, and put keys and values into the cache.

    qkv: [T, (H + 2 G) D]; cos, sin: [S, D / 2]; q: [H, T, D]; keys, values: [G, S, D]. The pair of a feature is half
    a head away. Grid: (T, 1, 1).
    """
    half, width = head_dim // 2, (heads + 2 * kv_heads) * head_dim

    def rope_append(
        qkv: In[f32],
        cos: In[f32],
        sin: In[f32],
        q: Out[f32],
        keys: Out[f32],
        values: Out[f32],
        tokens: Scalar[u32],
        past: Scalar[u32],
    ):
        token, start = gid(0), gid(0) * width
        slot = past + token
        for i in range(tid(0), (heads + kv_heads) * half, THREADS):
            head, d = i // half, i % half
            a, b = qkv[start + head * head_dim + d], qkv[start + head * head_dim + d + half]
            c, s = cos[slot * half + d], sin[slot * half + d]
            if head < heads:
                place = (head * tokens + token) * head_dim + d
                q[place] = a * c - b * s
                q[place + half] = b * c + a * s
            else:
                place = ((head - heads) * slots + slot) * head_dim + d
                keys[place] = a * c - b * s
                keys[place + half] = b * c + a * s
        for i in range(tid(0), kv_heads * head_dim, THREADS):
            place = (i // head_dim * slots + slot) * head_dim + i % head_dim
            values[place] = qkv[start + (heads + kv_heads) * head_dim + i]

    return build(rope_append, (THREADS, 1, 1))


def cached_attention(heads: int, kv_heads: int, head_dim: int, slots: int) -> KernelIR:
    """out = softmax(q · keysᵀ / sqrt(D)) · values, each token seeing the slots up to its own.

    q: [H, T, D]; keys, values: [G, S, D]; out: [T, H · D]; lse: [H, T], the logarithm of a row's sum of exponentials.
    A workgroup serves one token and head, and holds its scores, so S is at most about 3,500. Grid: (T, H, 1).
    """
    vectors, scale = head_dim // 4, head_dim**-0.5

    def cached_attention(
        q: In[f32x4],
        keys: In[f32x4],
        values: In[f32],
        out: Out[f32],
        lse: Out[f32],
        tokens: Scalar[u32],
        past: Scalar[u32],
    ):
        scores, stage, query = shared(f32, slots), shared(f32, THREADS), shared(f32x4, vectors)
        t, token, head = tid(0), gid(0), gid(1)
        row = head * tokens + token
        first, seen = head * kv_heads // heads * slots, past + token + 1
        for i in range(t, vectors, THREADS):
            query[i] = q[row * vectors + i]
        barrier()
        top = -3.0e38
        for key in range(t, seen, THREADS):
            score = 0.0
            for i in unroll(vectors):
                score += dot(query[i], keys[(first + key) * vectors + i])
            scores[key] = score * scale
            top = max(top, score * scale)
        top, total = row_highest(top, stage, THREADS), 0.0
        for key in range(t, seen, THREADS):
            p = exp(scores[key] - top)
            scores[key] = p
            total += p
        total = row_sum(total, stage, THREADS)
        for d in range(t, head_dim, THREADS):
            held = 0.0
            for key in range(seen):
                held += scores[key] * values[(first + key) * head_dim + d]
            out[(token * heads + head) * head_dim + d] = held / total
        if t == 0:
            lse[row] = top + log(total)

    return build(cached_attention, (THREADS, 1, 1))


def attention_weights(heads: int, kv_heads: int, head_dim: int) -> KernelIR:
    """weights = exp(q · keysᵀ · scale - lse), 0 where a query does not see a key: what attention itself never stores.

    q: [H, N, D]; keys: [G, stride, D], of which N count; lse: [H, N]; weights: [H, N, N]. With `causal` 1 a query sees
    the keys up to its own. Grid: (ceil(N / THREADS), N, H).
    """
    vectors = head_dim // 4

    def attention_weights(
        q: In[f32x4],
        keys: In[f32x4],
        lse: In[f32],
        weights: Out[f32],
        tokens: Scalar[u32],
        stride: Scalar[u32],
        causal: Scalar[u32],
        scale: Scalar[f32],
    ):
        key, query, head = gid(0) * THREADS + tid(0), gid(1), gid(2)
        row = head * tokens + query
        if key < tokens:
            p = 0.0
            if causal == 0 or key <= query:
                totals = f32x4(0)
                for i in range(vectors):
                    totals += q[row * vectors + i] * keys[(head * kv_heads // heads * stride + key) * vectors + i]
                p = exp(across(totals, 4) * scale - lse[row])
            weights[row * tokens + key] = p

    return build(attention_weights, (THREADS, 1, 1))
