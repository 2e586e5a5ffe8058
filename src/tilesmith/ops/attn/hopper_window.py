"""Device kernel of attention's forward on Hopper for narrow windows, in Gluon: a tile's keys come at once.

128 queries whose windows reach over at most 129 keys see 256 keys between them, and each consumer's 64 queries 192 of
these. So there is no walk over keys: a consumer makes its three blocks of scores together, knows each row's greatest
before it takes a power, and nothing is ever rescaled. Scores live in units of log 2.
"""

from tilesmith.ops.attn.hopper_corner import corner
from tilesmith.ops.attn.hopper_forward import NOTHING, Walk, bend, finish, hide, tickets
from tilesmith.ops.gluon_shim import (
    arrive,
    barriers,
    bulk_load,
    bulk_store,
    bulk_wait,
    fence,
    gl,
    gluon,
    mma,
    mma_wait,
    tiles_of,
    wait,
)


@gluon.jit
def _produce(parts, walk, q_desc, k_desc, v_desc, counter):
    tickets, q, k, v, q_full, q_empty, k_full, k_empty, v_full, v_empty = parts
    turn = gl.to_tensor(0)
    number = gl.program_id(0)
    tiles = walk.blocks * walk.rows
    while number < tiles:
        start, head, tokens, keys, place, _ = walk.tile(number, None)
        # may lie before the first key: what is not there, the accelerator fills with zeros
        there = corner(place, head // walk.group, start + (keys - tokens) - walk.left, keys, False)
        s = turn % walk.STAGES
        phase = (turn // walk.STAGES) & 1
        wait(k_empty.index(s), phase ^ 1)
        bulk_load(k_desc, there, k_full.index(s), k.index(s))
        for c in gl.static_range(2):
            box = s * 2 + c
            wait(q_empty.index(box), phase ^ 1)
            bulk_load(q_desc, corner(place, head, start + c * 64, tokens, False), q_full.index(box), q.index(box))
        wait(v_empty.index(s), phase ^ 1)
        bulk_load(v_desc, there, v_full.index(s), v.index(s))
        number = tickets.draw(turn, counter, tiles, walk.DYNAMIC)
        turn += 1


@gluon.jit
def _scores(qk, walk, queries, start, first, inner, SOFTCAP: gl.constexpr):
    """Scores of a block of 64 keys from `first` on, for queries from `start` on; hidden only where an edge crosses."""
    if SOFTCAP:
        qk = bend(qk * inner)
    if (walk.begin(start + 63) > first) | (walk.end(start) < first + 64):
        qk = hide(qk, walk, queries, first, True)
    return qk


@gluon.jit
def _consume(C: gl.constexpr, parts, walk, out_desc, lse_ptr, sinks_ptr, inner, scale, out, SOFTCAP: gl.constexpr):
    tickets, q, k, v, q_full, q_empty, k_full, k_empty, v_full, v_empty = parts
    D: gl.constexpr = walk.D
    DV: gl.constexpr = walk.DV
    dtype: gl.constexpr = q.dtype
    SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16])
    OUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, DV, 16])
    P: gl.constexpr = gl.DotOperandLayout(0, OUT, 2)
    turn = gl.to_tensor(0)
    number = gl.program_id(0)
    tiles = walk.blocks * walk.rows
    while number < tiles:
        start, head, tokens, keys, place, _ = walk.tile(number, None)
        start += C * 64
        first = start + (keys - tokens) - walk.left
        queries = start + gl.arange(0, 64, gl.SliceLayout(1, SCORES))
        zero = gl.zeros([64, 64], gl.float32, SCORES)
        s = turn % walk.STAGES
        phase = (turn // walk.STAGES) & 1
        box = s * 2 + C
        q_tile = q.index(box).reshape([64, D])
        k_tile = k.index(s).reshape([256, D])
        v_tile = v.index(s).reshape([256, DV])
        wait(q_full.index(box), phase)
        wait(k_full.index(s), phase)
        low_made = mma(q_tile, k_tile.slice(C * 64, 64, dim=0).permute((1, 0)), zero, use_acc=False, is_async=True)
        mid_made = mma(q_tile, k_tile.slice(C * 64 + 64, 64, dim=0).permute((1, 0)), zero, use_acc=False, is_async=True)
        high_made = mma(
            q_tile, k_tile.slice(C * 64 + 128, 64, dim=0).permute((1, 0)), zero, use_acc=False, is_async=True
        )
        low = _scores(mma_wait(2, deps=[low_made]), walk, queries, start, first, inner, SOFTCAP)
        mid = _scores(mma_wait(1, deps=[mid_made]), walk, queries, start, first + 64, inner, SOFTCAP)
        high = mma_wait(0, deps=[high_made])
        arrive(k_empty.index(s))
        arrive(q_empty.index(box))
        high = _scores(high, walk, queries, start, first + 128, inner, SOFTCAP)
        top = gl.maximum(gl.maximum(gl.max(low, 1), gl.max(mid, 1)), gl.max(high, 1)) * scale
        base = gl.where(top == NOTHING, 0.0, top)[:, None]
        low = gl.exp2(low * scale - base)
        total = gl.sum(low, 1)
        wait(v_full.index(s), phase)
        acc = gl.zeros([64, DV], gl.float32, OUT)
        made = mma(
            gl.convert_layout(low.to(dtype), P), v_tile.slice(C * 64, 64, dim=0), acc, use_acc=False, is_async=True
        )
        mid = gl.exp2(mid * scale - base)
        total += gl.sum(mid, 1)
        made = mma(
            gl.convert_layout(mid.to(dtype), P), v_tile.slice(C * 64 + 64, 64, dim=0), made, use_acc=True, is_async=True
        )
        high = gl.exp2(high * scale - base)
        total += gl.sum(high, 1)
        made = mma(
            gl.convert_layout(high.to(dtype), P), v_tile.slice(C * 64 + 128, 64, dim=0), made,
            use_acc=True, is_async=True,
        )  # fmt: skip
        factor, lse = finish(top, total, head, sinks_ptr)
        row = (place * walk.heads + head).to(gl.int64) * tokens
        gl.store(lse_ptr + row + queries, lse, mask=queries < tokens)
        acc = mma_wait(0, deps=[made])
        arrive(v_empty.index(s))
        acc = acc * gl.convert_layout(factor, gl.SliceLayout(1, OUT))[:, None]
        bulk_wait(0)
        tile = out.index(C)
        tile.reshape([64, DV]).store(acc.to(dtype))
        fence()
        bulk_store(out_desc, corner(place, head, start, tokens, False), tile)
        number = tickets.drawn(turn, tiles, walk.DYNAMIC)
        turn += 1
    bulk_wait(0)


@gluon.jit(do_not_specialize=["tokens", "keys", "heads", "blocks", "rows", "section", "left", "right", "group"])
def attention_window_kernel(
    q_desc, k_desc, v_desc, out_desc, lse_ptr, sinks_ptr, counter,
    tokens, keys, heads, blocks, rows, section, left, right, group, inner, scale,
    DYNAMIC: gl.constexpr, D: gl.constexpr, DV: gl.constexpr, STAGES: gl.constexpr, SOFTCAP: gl.constexpr,
):  # fmt: skip
    """Tiles of 128 queries of one head, and the 256 keys that they see; left + right is at most 128. The rest is as of
    `attention_fwd_kernel`."""
    walk = Walk(
        tokens, keys, heads, blocks, rows, section, left, right, group, gl.to_tensor(1), gl.to_tensor(0),
        True, True, False, DYNAMIC, False, 128, 64, D, DV, 2, STAGES, STAGES, 0,
    )  # fmt: skip
    q = tiles_of(STAGES * 2, q_desc)
    k = tiles_of(STAGES, k_desc)
    v = tiles_of(STAGES, v_desc)
    out = tiles_of(2, out_desc)
    ticket = tickets(2, 1)
    q_full = barriers(STAGES * 2, 1)
    q_empty = barriers(STAGES * 2, 1)
    k_full = barriers(STAGES, 1)
    k_empty = barriers(STAGES, 2)
    v_full = barriers(STAGES, 1)
    v_empty = barriers(STAGES, 2)
    fence()
    parts = (ticket, q, k, v, q_full, q_empty, k_full, k_empty, v_full, v_empty)
    gl.warp_specialize(
        [
            (_produce, (parts, walk, q_desc, k_desc, v_desc, counter)),
            (_consume, (0, parts, walk, out_desc, lse_ptr, sinks_ptr, inner, scale, out, SOFTCAP)),
            (_consume, (1, parts, walk, out_desc, lse_ptr, sinks_ptr, inner, scale, out, SOFTCAP)),
        ],
        [4, 4],
        [240, 240],
    )  # fmt: skip
