"""Flash attention on matrix units: f16 products, f32 sums, the softmax in registers.

A subgroup owns `tile` queries. Vulkan's drivers keep to themselves which elements of a fragment a thread holds; there
every element carries what its row needs. Where a device does not reduce rows and convert fragments itself, rows' maxima
and the weights go through shared memory.
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
    f32,
    f32x4,
    fill,
    fragment,
    gid,
    inline,
    lane,
    load_fragment,
    local,
    mma,
    reduce_rows,
    row,
    row_add,
    row_max,
    select,
    shared,
    shuffle_xor,
    store_fragment,
    subgroup,
    subgroup_barrier,
    tid,
    u32,
    u32x4,
    unroll,
)
from tilesmith.kernels.functions import LOG2E, log_sum, share
from tilesmith.kernels.rows import across, block, head_rows, stored_scalar

HIDDEN = -1.0e30
"""The score of a key that a query does not see."""

TILES = {"cuda": 16, "vulkan": 16, "vulkan-nv": 16, "metal": 8}
_WORDS = 8  # halves in a u32x4
_AT_ONCE = 64  # keys whose scores are in registers together
_PASSED = 32  # keys whose weights pass through shared memory together


def create(config) -> KernelIR:
    """The kernel of a FlashAttentionConfig with matrix units; see `create_flash_attention_kernel`."""
    body = (_by_elements if config.matrix.startswith("vulkan") else _in_registers)(config)
    step = Scalar[u32] if config.strided else None

    def flash_attention(
        q: In[u32x4],
        k: In[u32x4],
        v: In[u32x4],
        out: Out[stored_scalar(config)],
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

    return build(flash_attention, (32 * (config.block_size_q // TILES[config.matrix]), 1, 1))


def _shares(rows: int, head_dim: int, threads: int) -> int:
    """Words of `rows` rows that a thread fetches."""
    return -(-rows * (head_dim // _WORDS) // threads)


@inline
def fetch(held, source, base, step, first, rows, count, head_dim, threads):
    """A thread's share of rows first, first + 1, ... of a head, zero from `count` on, all loads in flight at once."""
    words = head_dim // _WORDS
    for k in unroll(_shares(rows, head_dim, threads)):
        i = tid(0) + k * threads
        held[k] = u32x4(0)
        if (rows * words % threads == 0 or i < rows * words) and first + i // words < count:
            held[k] = source[base + (first + i // words) * step + i % words]


@inline
def put(tile, held, first, rows, head_dim, threads):
    """What `fetch` got, to shared memory from row `first` on; a row is padded by eight halves."""
    words = head_dim // _WORDS
    for k in unroll(_shares(rows, head_dim, threads)):
        i = tid(0) + k * threads
        if rows * words % threads == 0 or i < rows * words:
            tile[(first + i // words) * (words + 1) + i % words] = held[k]


@inline
def stage(tile, source, base, step, first, rows, count, head_dim, threads):
    """Rows first, first + 1, ... of a head to shared memory, zero from `count` on."""
    held = local(u32x4, _shares(rows, head_dim, threads))
    fetch(held, source, base, step, first, rows, count, head_dim, threads)
    put(tile, held, 0, rows, head_dim, threads)


def _in_registers(config):
    t = TILES[config.matrix]
    bq, bkv, d, causal = config.block_size_q, config.block_size_kv, config.head_dim, config.causal
    stored, ahead = stored_scalar(config), config.ahead
    threads, stride, chunks = 32 * (bq // t), d + _WORDS, d // t
    at_once, shares = min(bkv, _AT_ONCE), _shares(bkv, d, threads)
    own = 2 if t == 16 else 1  # rows that a thread holds elements of

    @inline
    def body(q, k, v, out, lse, n_q, n_kv, heads, kv_heads, scale, q_steps, k_steps, v_steps, out_steps):
        keys, values = shared(u32x4, max(bq, bkv) * stride // _WORDS), shared(u32x4, bkv * stride // _WORDS)
        queries = [fragment("a", stored, t) for _ in range(chunks)]
        weights = [fragment("a", stored, t) for _ in range(at_once // t)]
        scores = [fragment("c", f32, t) for _ in range(at_once // t)]
        held = [fragment("c", f32, t) for _ in range(chunks)]
        right = fragment("b", stored, t)
        m0, head, batch = block(causal) * bq, gid(1), gid(2)
        kv_head = head * kv_heads // heads
        q0, q_row = head_rows(q_steps, batch, head, heads, n_q, d // _WORDS)
        k0, k_row = head_rows(k_steps, batch, kv_head, kv_heads, n_kv, d // _WORDS)
        v0, v_row = head_rows(v_steps, batch, kv_head, kv_heads, n_kv, d // _WORDS)
        out0, out_row = head_rows(out_steps, batch, head, heads, n_q, d)
        lse0 = (batch * heads + head) * n_q
        factor, mine = scale * LOG2E, m0 + subgroup() * t
        stage(keys, q, q0, q_row, m0, bq, n_q, d, threads)
        barrier()
        for c in unroll(chunks):
            load_fragment(queries[c], keys, subgroup() * (t * stride) + c * t, stride)
            fill(held[c], 0.0)
        top, total, fade = [local(f32, own) for _ in range(3)]
        for h in unroll(own):
            top[h] = HIDDEN
            total[h] = 0.0
        next_keys, next_values = local(u32x4, shares), local(u32x4, shares)
        last = n_kv
        if causal:
            last = min(n_kv, max(m0 + bq + n_kv, n_q) - n_q)
        if ahead:
            fetch(next_keys, k, k0, k_row, 0, bkv, n_kv, d, threads)
            fetch(next_values, v, v0, v_row, 0, bkv, n_kv, d, threads)
        for start in range(0, last, bkv):
            if not ahead:
                fetch(next_keys, k, k0, k_row, start, bkv, n_kv, d, threads)
                fetch(next_values, v, v0, v_row, start, bkv, n_kv, d, threads)
            barrier()
            put(keys, next_keys, 0, bkv, d, threads)
            put(values, next_values, 0, bkv, d, threads)
            barrier()
            if ahead:
                fetch(next_keys, k, k0, k_row, start + bkv, bkv, n_kv, d, threads)
                fetch(next_values, v, v0, v_row, start + bkv, bkv, n_kv, d, threads)
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
                            place = out0 + query * out_row + c * t + column(held[c], e)
                            out[place] = stored(held[c][e] * portion)
                if lse is not None and column(held[0], 0) == 0:
                    lse[lse0 + query] = log_sum(top[h], whole)

    return body


@inline
def across_rows(c, op, area, spread, t, wide):
    """`reduce_rows(c, c, op)` through shared memory: `area` of f32x4, rows `wide` f32 apart, `spread` of one a row."""
    own = subgroup() * t + lane() // 2  # two threads share a row: even and odd vectors
    store_fragment(c, area, subgroup() * (t * wide), wide)
    subgroup_barrier()
    v, w = (area[own * (wide // 4) + lane() % 2 + i] for i in (0, 2))
    v = max(v, w) if op == "max" else v + w
    x = max(max(v[0], v[1]), max(v[2], v[3])) if op == "max" else across(v, 4)
    other = shuffle_xor(x, 1)
    x = max(x, other) if op == "max" else x + other
    if lane() % 2 == 0:
        spread[own] = x
    subgroup_barrier()
    load_fragment(c, spread, subgroup() * t, 0, transposed=True)


def _by_elements(config):
    t, reduces = TILES[config.matrix], config.matrix == "vulkan-nv"
    bq, bkv, d, causal = config.block_size_q, config.block_size_kv, config.head_dim, config.causal
    stored, ahead = stored_scalar(config), config.ahead
    threads, stride, chunks = 32 * (bq // t), d + _WORDS, d // t
    at_once, shares = min(bkv, _AT_ONCE), _shares(bkv, d, threads)
    passing = min(at_once, _PASSED)
    wide, packed = t + 8, passing + _WORDS  # strides of scores and of weights on their way through shared memory

    @inline
    def body(q, k, v, out, lse, n_q, n_kv, heads, kv_heads, scale, q_steps, k_steps, v_steps, out_steps):
        tile, numbers = shared(u32x4, max(bq, 2 * bkv) * stride // _WORDS), shared(f32, t * t)
        if not reduces:
            area, spread = shared(f32x4, bq * wide // 4), shared(f32, bq)
            passed = shared(stored, bq * packed)
        queries = [fragment("a", stored, t) for _ in range(chunks)]
        weights = [fragment("a", stored, t) for _ in range(at_once // t)]
        scores = [fragment("c", f32, t, placed=False) for _ in range(at_once // t)]
        held = [fragment("c", f32, t, placed=False) for _ in range(chunks)]
        # Of each of their elements' rows; and row * t + column of these elements.
        top, total, fade, number = [fragment("c", f32, t, placed=False) for _ in range(4)]
        right = fragment("b", stored, t)
        m0, head, batch = block(causal) * bq, gid(1), gid(2)
        kv_head = head * kv_heads // heads
        q0, q_row = head_rows(q_steps, batch, head, heads, n_q, d // _WORDS)
        k0, k_row = head_rows(k_steps, batch, kv_head, kv_heads, n_kv, d // _WORDS)
        v0, v_row = head_rows(v_steps, batch, kv_head, kv_heads, n_kv, d // _WORDS)
        out0, out_row = head_rows(out_steps, batch, head, heads, n_q, d)
        lse0 = (batch * heads + head) * n_q
        factor, mine = scale * LOG2E, m0 + subgroup() * t
        for i in range(tid(0), t * t, threads):
            numbers[i] = f32(i)
        stage(tile, q, q0, q_row, m0, bq, n_q, d, threads)
        barrier()
        for c in unroll(chunks):
            load_fragment(queries[c], tile, subgroup() * (t * stride) + c * t, stride)
            fill(held[c], 0.0)
        fill(top, HIDDEN)
        fill(total, 0.0)
        next_keys, next_values = local(u32x4, shares), local(u32x4, shares)
        last = n_kv
        if causal:
            last = min(n_kv, max(m0 + bq + n_kv, n_q) - n_q)
        if ahead:
            fetch(next_keys, k, k0, k_row, 0, bkv, n_kv, d, threads)
            fetch(next_values, v, v0, v_row, 0, bkv, n_kv, d, threads)
        for start in range(0, last, bkv):
            if not ahead:
                fetch(next_keys, k, k0, k_row, start, bkv, n_kv, d, threads)
                fetch(next_values, v, v0, v_row, start, bkv, n_kv, d, threads)
            barrier()
            put(tile, next_keys, 0, bkv, d, threads)
            put(tile, next_values, bkv, bkv, d, threads)
            barrier()
            if ahead:
                fetch(next_keys, k, k0, k_row, start + bkv, bkv, n_kv, d, threads)
                fetch(next_values, v, v0, v_row, start + bkv, bkv, n_kv, d, threads)
            for part in range(0, bkv, at_once):
                for j in unroll(at_once // t):
                    fill(scores[j], 0.0)
                    for c in unroll(chunks):
                        load_fragment(right, tile, (part + j * t) * stride + c * t, stride, transposed=True)
                        mma(scores[j], queries[c], right)
                    for e in unroll(elements(scores[j])):
                        scores[j][e] = scores[j][e] * factor
                first = start + part
                edge = first + at_once > n_kv
                if causal:
                    edge = edge or first + at_once + n_q > mine + 1 + n_kv
                if edge:
                    load_fragment(number, numbers, 0, t)
                    for j in unroll(at_once // t):
                        for e in unroll(elements(scores[j])):
                            key = first + j * t + u32(number[e]) % t
                            seen = key < n_kv
                            if causal:
                                seen = seen and key + n_q <= mine + u32(number[e]) // t + n_kv
                            scores[j][e] = select(seen, scores[j][e], HIDDEN)
                for e in unroll(elements(top)):
                    fade[e] = scores[0][e]
                    for j in unroll(1, at_once // t):
                        fade[e] = max(fade[e], scores[j][e])
                if reduces:
                    reduce_rows(fade, fade, "max")
                else:
                    across_rows(fade, "max", area, spread, t, wide)
                for e in unroll(elements(top)):
                    high, some = max(top[e], fade[e]), 0.0
                    fade[e] = exp2(top[e] - high)
                    top[e] = high
                    base = max(high, HIDDEN / 10)  # what is hidden weighs 0 in a row that sees nothing yet
                    for j in unroll(at_once // t):
                        p = exp2(scores[j][e] - base)
                        scores[j][e] = p
                        some += p
                    total[e] = total[e] * fade[e] + some  # of this element's columns alone
                if reduces:
                    for j in unroll(at_once // t):
                        convert(weights[j], scores[j])
                else:
                    for j in unroll(0, at_once // t, passing // t):
                        if j > 0:
                            subgroup_barrier()
                        for i in unroll(passing // t):
                            store_fragment(scores[j + i], passed, subgroup() * (t * packed) + i * t, packed)
                        subgroup_barrier()
                        for i in unroll(passing // t):
                            load_fragment(weights[j + i], passed, subgroup() * (t * packed) + i * t, packed)
                for c in unroll(chunks):
                    for e in unroll(elements(held[c])):
                        held[c][e] = held[c][e] * fade[e]
                    for j in unroll(at_once // t):
                        load_fragment(right, tile, (bkv + part + j * t) * stride + c * t, stride)
                        mma(held[c], weights[j], right)
        if reduces:
            reduce_rows(total, total, "add")
        else:
            across_rows(total, "add", area, spread, t, wide)
        load_fragment(number, numbers, 0, t)
        for e in unroll(elements(total)):
            key, query, portion = u32(number[e]) % t, mine + u32(number[e]) // t, share(total[e])
            if query < n_q:
                for c in unroll(chunks):
                    out[out0 + query * out_row + c * t + key] = stored(held[c][e] * portion)
                if lse is not None and key == 0:
                    lse[lse0 + query] = log_sum(top[e], total[e])

    return body
