"""Flash attention on matrix units: f16 products, f32 sums; softmax in registers, or for Vulkan in shared memory.

A subgroup owns `tile` queries. Where a backend says which elements of a fragment a thread holds, scores never leave
registers; Vulkan's drivers keep that to themselves, so there scores and products go through shared memory.
"""

from tilesmith.codegen import (
    In,
    KernelIR,
    Out,
    Scalar,
    barrier,
    build,
    column,
    convert,
    elements,
    exp2,
    f16,
    f32,
    fill,
    fragment,
    gid,
    inline,
    lane,
    load_fragment,
    local,
    mma,
    row,
    row_add,
    row_max,
    select,
    shared,
    shuffle_xor,
    store_fragment,
    subgroup,
    tid,
    u32,
    u32x4,
    unroll,
)
from tilesmith.kernels.functions import LOG2E, log_sum, share

HIDDEN = -1.0e30
"""The score of a key that a query does not see."""

TILES = {"cuda": 16, "vulkan": 16, "metal": 8}
_WORDS = 8  # halves in a u32x4
_AT_ONCE = 64  # keys whose scores are in registers together


def create(config) -> KernelIR:
    """The kernel of a FlashAttentionConfig with matrix units; see `create_flash_attention_kernel`."""
    body = _in_shared(config) if config.matrix == "vulkan" else _in_registers(config, TILES[config.matrix])

    def flash_attention(
        q: In[u32x4],
        k: In[u32x4],
        v: In[u32x4],
        out: Out[f16],
        n_q: Scalar[u32],
        n_kv: Scalar[u32],
        heads: Scalar[u32],
        kv_heads: Scalar[u32],
        scale: Scalar[f32],
    ):
        body(q, k, v, out, None, n_q, n_kv, heads, kv_heads, scale)

    def flash_attention_lse(
        q: In[u32x4],
        k: In[u32x4],
        v: In[u32x4],
        out: Out[f16],
        lse: Out[f32],
        n_q: Scalar[u32],
        n_kv: Scalar[u32],
        heads: Scalar[u32],
        kv_heads: Scalar[u32],
        scale: Scalar[f32],
    ):
        body(q, k, v, out, lse, n_q, n_kv, heads, kv_heads, scale)

    chosen = flash_attention_lse if config.return_lse else flash_attention
    return build(chosen, (32 * (config.block_size_q // TILES[config.matrix]), 1, 1), name="flash_attention")


@inline
def stage(tile, source, first, rows, last, head_dim, threads):
    """Rows first, first + 1, ... of a matrix to shared memory, zero past the last; a row is padded by eight halves."""
    words = head_dim // _WORDS
    for i in range(tid(0), rows * words, threads):
        r = i // words
        v = u32x4(0)
        if first + r < last:
            v = source[(first + r) * words + i % words]
        tile[r * (words + 1) + i % words] = v


def _in_registers(config, t: int):
    bq, bkv, d, causal = config.block_size_q, config.block_size_kv, config.head_dim, config.causal
    threads, stride, chunks = 32 * (bq // t), d + _WORDS, d // t
    at_once = min(bkv, _AT_ONCE)
    own = 2 if t == 16 else 1  # rows that a thread holds elements of

    @inline
    def body(q, k, v, out, lse, n_q, n_kv, heads, kv_heads, scale):
        keys, values = shared(u32x4, max(bq, bkv) * stride // _WORDS), shared(u32x4, bkv * stride // _WORDS)
        queries = [fragment("a", f16, t) for _ in range(chunks)]
        weights = [fragment("a", f16, t) for _ in range(at_once // t)]
        scores = [fragment("c", f32, t) for _ in range(at_once // t)]
        held = [fragment("c", f32, t) for _ in range(chunks)]
        right = fragment("b", f16, t)
        m0, head, batch = gid(0) * bq, gid(1), gid(2)
        q0 = (batch * heads + head) * n_q
        kv0 = (batch * kv_heads + head * kv_heads // heads) * n_kv
        factor, mine = scale * LOG2E, m0 + subgroup() * t
        stage(keys, q, q0 + m0, bq, q0 + n_q, d, threads)
        barrier()
        for c in unroll(chunks):
            load_fragment(queries[c], keys, subgroup() * (t * stride) + c * t, stride)
            fill(held[c], 0.0)
        top, total, fade = local(f32, own), local(f32, own), local(f32, own)
        for h in unroll(own):
            top[h] = HIDDEN
            total[h] = 0.0
        last = n_kv
        if causal:
            last = min(n_kv, max(m0 + bq + n_kv, n_q) - n_q)
        for start in range(0, last, bkv):
            barrier()
            stage(keys, k, kv0 + start, bkv, kv0 + n_kv, d, threads)
            stage(values, v, kv0 + start, bkv, kv0 + n_kv, d, threads)
            barrier()
            for part in range(0, bkv, at_once):
                for j in unroll(at_once // t):
                    fill(scores[j], 0.0)
                    for c in unroll(chunks):
                        load_fragment(right, keys, (part + j * t) * stride + c * t, stride, transposed=True)
                        mma(scores[j], queries[c], right)
                    for e in unroll(elements(scores[j])):
                        scores[j][e] = scores[j][e] * factor
                first = start + part
                edge = first + at_once > n_kv
                if causal:
                    edge = edge or first + at_once + n_q > m0 + 1 + n_kv
                if edge:
                    for j in unroll(at_once // t):
                        for e in unroll(elements(scores[j])):
                            key = first + j * t + column(scores[j], e)
                            seen = key < n_kv
                            if causal:
                                seen = seen and key + n_q <= mine + row(scores[j], e) + n_kv
                            scores[j][e] = select(seen, scores[j][e], HIDDEN)
                for h in unroll(own):
                    high = top[h]
                    for j in unroll(at_once // t):
                        for e in unroll(elements(scores[j])):
                            if e // 2 % own == h:
                                high = max(high, scores[j][e])
                    high = row_max(scores[0], high)
                    fade[h] = exp2(top[h] - high)
                    top[h] = high
                    base = max(high, HIDDEN / 10)  # what is hidden weighs 0 in a row that sees nothing yet
                    some = 0.0
                    for j in unroll(at_once // t):
                        for e in unroll(elements(scores[j])):
                            if e // 2 % own == h:
                                p = exp2(scores[j][e] - base)
                                scores[j][e] = p
                                some += p
                    total[h] = total[h] * fade[h] + some
                for j in unroll(at_once // t):
                    convert(weights[j], scores[j])
                for c in unroll(chunks):
                    for e in unroll(elements(held[c])):
                        held[c][e] = held[c][e] * fade[e // 2 % own]
                    for j in unroll(at_once // t):
                        load_fragment(right, values, (part + j * t) * stride + c * t, stride)
                        mma(held[c], weights[j], right)
        for h in unroll(own):
            whole = row_add(held[0], total[h])
            portion, query = share(whole), mine + row(held[0], 2 * h)
            if query < n_q:
                for c in unroll(chunks):
                    for e in unroll(elements(held[c])):
                        if e // 2 % own == h:
                            place = (q0 + query) * d + c * t + column(held[c], e)
                            out[place] = f16(held[c][e] * portion)
                if lse is not None and column(held[0], 0) == 0:
                    lse[q0 + query] = log_sum(top[h], whole)

    return body


def _in_shared(config):
    t = TILES["vulkan"]
    bq, bkv, d, causal = config.block_size_q, config.block_size_kv, config.head_dim, config.causal
    threads, stride, chunks = 32 * (bq // t), d + _WORDS, d // t
    wide, packed = max(bkv, d) + 4, bkv + _WORDS  # strides of scores or products, and of weights

    @inline
    def body(q, k, v, out, lse, n_q, n_kv, heads, kv_heads, scale):
        tile, area = shared(u32x4, max(bq, bkv) * stride // _WORDS), shared(f32, bq * wide)
        weights = shared(f16, bq * packed)
        queries = [fragment("a", f16, t) for _ in range(chunks)]
        left = [fragment("a", f16, t) for _ in range(bkv // t)]
        right, sums = fragment("b", f16, t), fragment("c", f32, t)
        held = local(f32, d // 2)
        m0, head, batch = gid(0) * bq, gid(1), gid(2)
        q0 = (batch * heads + head) * n_q
        kv0 = (batch * kv_heads + head * kv_heads // heads) * n_kv
        factor, mine = scale * LOG2E, subgroup() * t
        own, side = mine + lane() // 2, lane() % 2  # two threads share a row: even and odd columns
        stage(tile, q, q0 + m0, bq, q0 + n_q, d, threads)
        barrier()
        for c in unroll(chunks):
            load_fragment(queries[c], tile, mine * stride + c * t, stride)
        for i in unroll(d // 2):
            held[i] = 0.0
        top, total, last = HIDDEN, 0.0, n_kv
        if causal:
            last = min(n_kv, max(m0 + bq + n_kv, n_q) - n_q)
        for start in range(0, last, bkv):
            barrier()
            stage(tile, k, kv0 + start, bkv, kv0 + n_kv, d, threads)
            barrier()
            for j in unroll(bkv // t):
                fill(sums, 0.0)
                for c in unroll(chunks):
                    load_fragment(right, tile, j * t * stride + c * t, stride, transposed=True)
                    mma(sums, queries[c], right)
                store_fragment(sums, area, mine * wide + j * t, wide)
            barrier()
            stage(tile, v, kv0 + start, bkv, kv0 + n_kv, d, threads)
            high = top
            for i in unroll(bkv // 2):
                key = start + 2 * i + side
                seen = key < n_kv
                if causal:
                    seen = seen and key + n_q <= m0 + own + n_kv
                score = select(seen, area[own * wide + 2 * i + side] * factor, HIDDEN)
                area[own * wide + 2 * i + side] = score
                high = max(high, score)
            high = max(high, shuffle_xor(high, 1))
            fade, base = exp2(top - high), max(high, HIDDEN / 10)
            top, some = high, 0.0
            for i in unroll(bkv // 2):
                p = exp2(area[own * wide + 2 * i + side] - base)
                weights[own * packed + 2 * i + side] = f16(p)
                some += p
            total = total * fade + some
            barrier()
            for j in unroll(bkv // t):
                load_fragment(left[j], weights, mine * packed + j * t, packed)
            for c in unroll(chunks):
                fill(sums, 0.0)
                for j in unroll(bkv // t):
                    load_fragment(right, tile, j * t * stride + c * t, stride)
                    mma(sums, left[j], right)
                store_fragment(sums, area, mine * wide + c * t, wide)
            barrier()
            for i in unroll(d // 2):
                held[i] = held[i] * fade + area[own * wide + 2 * i + side]
        total = total + shuffle_xor(total, 1)
        portion = share(total)
        if m0 + own < n_q:
            for i in unroll(d // 2):
                out[(q0 + m0 + own) * d + 2 * i + side] = f16(held[i] * portion)
            if lse is not None and side == 0:
                lse[q0 + m0 + own] = log_sum(top, total)

    return body
