"""Flash attention without matrix units, on every backend: f32 arithmetic, four rows by four keys a thread."""

from tilesmith.codegen import (
    In,
    KernelIR,
    Out,
    Scalar,
    barrier,
    build,
    exp2,
    f16,
    f32,
    f32x4,
    fma,
    gid,
    inline,
    local,
    select,
    shared,
    tid,
    u32,
    unroll,
    vector,
)
from tilesmith.kernels.functions import LOG2E, LOWEST, log_sum, share

OWN = 4
"""A thread computes OWN x OWN scores."""


def create(config) -> KernelIR:
    """The kernel of a FlashAttentionConfig whose `matrix` is "none"; see `create_flash_attention_kernel`."""
    bq, bkv, d, causal = config.block_size_q, config.block_size_kv, config.head_dim, config.causal
    stored = vector(f16 if config.use_half else f32, 4)
    tx, ty = bkv // OWN, bq // OWN
    threads, vectors = tx * ty, d // 4
    stride = vectors + 1  # rows start in different banks
    wide = bkv // 4 + 1  # of a row of probabilities
    own = -(-vectors // tx)  # vectors of the output that a thread holds for each of its rows

    @inline
    def stage(tile, source, first, rows, last):
        """Rows first, first + 1, ... of a matrix to shared memory, zero past the last."""
        for k in range(tid(0), rows * vectors, threads):
            r = k // vectors
            v = stored(0)
            if first + r < last:
                v = source[(first + r) * vectors + k % vectors]
            tile[r * stride + k % vectors] = v

    @inline
    def body(q, k, v, out, lse, n_q, n_kv, heads, kv_heads, scale):
        queries, tile = shared(stored, bq * stride), shared(stored, bkv * stride)
        weights, tops = shared(f32, bq * wide * 4), shared(f32, bq * tx)
        t = tid(0)
        x, y = t % tx, t // tx  # this thread's keys are x, x + tx, ...; its rows y, y + ty, ...
        m0, head, batch = gid(0) * bq, gid(1), gid(2)
        factor = scale * LOG2E
        q0 = (batch * heads + head) * n_q
        kv0 = (batch * kv_heads + head * kv_heads // heads) * n_kv
        stage(queries, q, q0 + m0, bq, q0 + n_q)
        left, right = local(f32x4, OWN), local(f32x4, OWN)
        scores, total = local(f32, OWN * OWN), local(f32, OWN)
        top, held = local(f32, OWN), local(f32x4, OWN * own)
        for i in unroll(OWN):
            top[i] = LOWEST
            total[i] = 0.0
            for j in unroll(own):
                held[i * own + j] = f32x4(0)
        last = n_kv
        if causal:
            last = min(n_kv, max(m0 + bq + n_kv, n_q) - n_q)
        for start in range(0, last, bkv):
            barrier()
            stage(tile, k, kv0 + start, bkv, kv0 + n_kv)
            barrier()
            for i in unroll(OWN * OWN):
                scores[i] = 0.0
            for c in range(vectors):
                for i in unroll(OWN):
                    left[i] = f32x4(queries[(y + i * ty) * stride + c])
                    right[i] = f32x4(tile[(x + i * tx) * stride + c])
                products(scores, left, right)
            for i in unroll(OWN):
                high = LOWEST
                for j in unroll(OWN):
                    key = start + x + j * tx
                    seen = key < n_kv
                    if causal:
                        seen = seen and key + n_q <= m0 + y + i * ty + n_kv
                    score = select(seen, scores[i * OWN + j] * factor, LOWEST)
                    scores[i * OWN + j] = score
                    high = max(high, score)
                tops[(y + i * ty) * tx + x] = high
            barrier()
            stage(tile, v, kv0 + start, bkv, kv0 + n_kv)
            for i in unroll(OWN):
                high = top[i]
                for j in range(tx):
                    high = max(high, tops[(y + i * ty) * tx + j])
                fade = exp2(top[i] - high)
                top[i] = high
                total[i] *= fade
                for j in unroll(own):
                    held[i * own + j] *= fade
                for j in unroll(OWN):
                    score = scores[i * OWN + j]
                    p = select(score > LOWEST, exp2(score - high), 0.0)
                    total[i] += p
                    weights[(y + i * ty) * (wide * 4) + x + j * tx] = p
            barrier()
            for key in range(bkv):
                for j in unroll(own):
                    c = x + j * tx
                    if vectors % tx == 0 or c < vectors:
                        values = f32x4(tile[key * stride + c])
                        for i in unroll(OWN):
                            p = weights[(y + i * ty) * (wide * 4) + key]
                            held[i * own + j] = fma(f32x4(p), values, held[i * own + j])
        for i in unroll(OWN):
            tops[(y + i * ty) * tx + x] = total[i]
        barrier()
        for i in unroll(OWN):
            row = m0 + y + i * ty
            whole = 0.0
            for j in range(tx):
                whole += tops[(y + i * ty) * tx + j]
            portion = share(whole)
            if row < n_q:
                for j in unroll(own):
                    c = x + j * tx
                    if vectors % tx == 0 or c < vectors:
                        out[(q0 + row) * vectors + c] = stored(held[i * own + j] * portion)
                if lse is not None and x == 0:
                    lse[q0 + row] = log_sum(top[i], whole)

    @inline
    def products(scores, left, right):
        for i in unroll(OWN):
            for j in unroll(OWN):
                for e in unroll(4):
                    scores[i * OWN + j] = fma(left[i][e], right[j][e], scores[i * OWN + j])

    def flash_attention(
        q: In[stored],
        k: In[stored],
        v: In[stored],
        out: Out[stored],
        n_q: Scalar[u32],
        n_kv: Scalar[u32],
        heads: Scalar[u32],
        kv_heads: Scalar[u32],
        scale: Scalar[f32],
    ):
        body(q, k, v, out, None, n_q, n_kv, heads, kv_heads, scale)

    def flash_attention_lse(
        q: In[stored],
        k: In[stored],
        v: In[stored],
        out: Out[stored],
        lse: Out[f32],
        n_q: Scalar[u32],
        n_kv: Scalar[u32],
        heads: Scalar[u32],
        kv_heads: Scalar[u32],
        scale: Scalar[f32],
    ):
        body(q, k, v, out, lse, n_q, n_kv, heads, kv_heads, scale)

    chosen = flash_attention_lse if config.return_lse else flash_attention
    return build(chosen, (threads, 1, 1), name="flash_attention")
