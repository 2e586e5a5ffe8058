"""Flash attention without matrix units, on every backend: f32 arithmetic, four rows by four keys a thread."""

from tilesmith.codegen import (
    In,
    KernelIR,
    Out,
    Scalar,
    barrier,
    build,
    exp2,
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
from tilesmith.kernels.rows import block, head_rows, stored_scalar

OWN = 4
"""A thread computes OWN x OWN scores."""


def create(config) -> KernelIR:
    """The kernel of a FlashAttentionConfig whose `matrix` is "none"; see `create_flash_attention_kernel`."""
    bq, bkv, d, causal = config.block_size_q, config.block_size_kv, config.head_dim, config.causal
    stored = vector(stored_scalar(config), 4)
    tx, ty = bkv // OWN, bq // OWN
    threads, vectors = tx * ty, d // 4
    stride = vectors + 1  # rows start in different banks
    wide = bkv // 4 + 1  # of a row of probabilities
    own = -(-vectors // tx)  # vectors of the output that a thread holds for each of its rows

    @inline
    def stage(tile, source, base, step, first, rows, count):
        """Rows first, first + 1, ... of a head to shared memory, zero from `count` on."""
        for k in range(tid(0), rows * vectors, threads):
            r = k // vectors
            v = stored(0)
            if first + r < count:
                v = source[base + (first + r) * step + k % vectors]
            tile[r * stride + k % vectors] = v

    @inline
    def body(q, k, v, out, lse, n_q, n_kv, heads, kv_heads, scale, q_steps, k_steps, v_steps, out_steps):
        queries, tile = shared(stored, bq * stride), shared(stored, bkv * stride)
        weights, tops = shared(f32, bq * wide * 4), shared(f32, bq * tx)
        t = tid(0)
        x, y = t % tx, t // tx  # this thread's keys are x, x + tx, ...; its rows y, y + ty, ...
        m0, head, batch = block(causal) * bq, gid(1), gid(2)
        factor = scale * LOG2E
        kv_head = head * kv_heads // heads
        q0, q_row = head_rows(q_steps, batch, head, heads, n_q, vectors)
        k0, k_row = head_rows(k_steps, batch, kv_head, kv_heads, n_kv, vectors)
        v0, v_row = head_rows(v_steps, batch, kv_head, kv_heads, n_kv, vectors)
        out0, out_row = head_rows(out_steps, batch, head, heads, n_q, vectors)
        lse0 = (batch * heads + head) * n_q
        stage(queries, q, q0, q_row, m0, bq, n_q)
        left, right = local(f32x4, OWN), local(f32x4, OWN)
        scores, total = local(f32, OWN * OWN), local(f32, OWN)
        top, held, more = local(f32, OWN), local(f32x4, OWN * own), local(f32x4, OWN * own)
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
            stage(tile, k, k0, k_row, start, bkv, n_kv)
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
            stage(tile, v, v0, v_row, start, bkv, n_kv)
            for i in unroll(OWN):
                high = top[i]
                for j in range(tx):
                    high = max(high, tops[(y + i * ty) * tx + j])
                fade = exp2(top[i] - high)
                top[i] = high
                total[i] *= fade
                for j in unroll(own):
                    held[i * own + j] *= fade
                    more[i * own + j] = f32x4(0)
                for j in unroll(OWN):
                    score = scores[i * OWN + j]
                    p = select(score <= LOWEST, 0.0, exp2(score - high))  # NaN of a score that is NaN
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
                            more[i * own + j] = fma(f32x4(p), values, more[i * own + j])
            for i in unroll(OWN * own):  # summed by blocks: over thousands of keys one after another would lose bits
                held[i] += more[i]
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
                        out[out0 + row * out_row + c] = stored(held[i * own + j] * portion)
                if lse is not None and x == 0:
                    lse[lse0 + row] = log_sum(top[i], whole)

    @inline
    def products(scores, left, right):
        for i in unroll(OWN):
            for j in unroll(OWN):
                for e in unroll(4):
                    scores[i * OWN + j] = fma(left[i][e], right[j][e], scores[i * OWN + j])

    step = Scalar[u32] if config.strided else None

    def flash_attention(
        q: In[stored],
        k: In[stored],
        v: In[stored],
        out: Out[stored],
        lse: Out[f32] if config.return_lse else None,
        n_q: Scalar[u32],
        n_kv: Scalar[u32],
        heads: Scalar[u32],
        kv_heads: Scalar[u32],
        scale: Scalar[f32],
        q_batch: step,
        q_head: step,
        q_row: step,
        k_batch: step,
        k_head: step,
        k_row: step,
        v_batch: step,
        v_head: step,
        v_row: step,
        out_batch: step,
        out_head: step,
        out_row: step,
    ):
        q_steps, k_steps, v_steps = [q_batch, q_head, q_row], [k_batch, k_head, k_row], [v_batch, v_head, v_row]
        out_steps = [out_batch, out_head, out_row]
        body(q, k, v, out, lse, n_q, n_kv, heads, kv_heads, scale, q_steps, k_steps, v_steps, out_steps)

    return build(flash_attention, (threads, 1, 1))
