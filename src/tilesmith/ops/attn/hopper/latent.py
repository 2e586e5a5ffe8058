"""Device kernel of attention's decode on Hopper whose values are the first 512 columns of the keys (absorbed MLA).

Rows of a tile are pairs of a token and a query head, as in `split_kv`. A tile of keys, 512 columns and the rest, is
loaded once and read by both products. The sums of 64 rows and 512 columns need the registers of two warpgroups: each
makes the scores of half of a tile's keys, which become one tile of probabilities in shared memory, and then half of the
columns of the result. Source: DeepSeek-AI, "DeepSeek-V2", 2024, section 2.1; the halves are those of FlashMLA.
"""

from tilesmith.device.gluon.shim import (
    fence_async,
    gl,
    gluon,
    launch_dependents,
    mbarrier_arrive,
    mbarrier_wait,
    mbarriers,
    smem_tiles,
    tma_store,
    tma_store_wait,
    wgmma,
    wgmma_wait,
)
from tilesmith.ops.attn.hopper.columns import load_tile, rows_product
from tilesmith.ops.attn.hopper.softmax import NOTHING, exponentiate
from tilesmith.ops.attn.hopper.split_kv import SplitKv, rows_of_tile, write_lse
from tilesmith.ops.attn.hopper.tile_offset import corner
from tilesmith.ops.attn.hopper.walk import Walk


@gluon.jit
def _load_keys(work, k_desc, k_rest_desc, barrier, k, k_rest, s, place, key, keys, page):
    """Start to load tile `s` of keys. place: kv head and batch row. page: where keys lie in pages."""
    kv_head, batch = place
    if work.PAGE:
        first = key // work.PAGE * work.PAGE
        held = gl.minimum(gl.maximum(keys - first, 0), work.PAGE)
        there = corner(page * work.between_k + held, kv_head, key - first, held, True)
    elif work.LENGTHS:
        there = corner(batch * work.between_k + keys, kv_head, key, keys, True)
    else:
        there = corner(batch, kv_head, key, keys, False)
    BOUNDED: gl.constexpr = work.LENGTHS or work.PAGE > 0
    load_tile(k_desc, k_rest_desc, there, barrier, k.index(s), k_rest.index(s), work.walk.REST, BOUNDED)


@gluon.jit
def _page_of(work, pages_ptr, batch, key, keys):
    """The page of a tile of keys. The table's entries behind the last key may name no page."""
    page = batch
    if work.PAGE:
        entry = pages_ptr + batch.to(gl.int64) * work.row_pages + key // work.PAGE
        page = gl.load(entry, mask=(key >= 0) & (key < keys), other=0)
    return page


@gluon.jit
def _produce_latent(work, parts, descs, lengths_ptr, pages_ptr):
    q, q_rest, k, k_rest, q_full, k_full, k_empty = parts
    q_desc, q_rest_desc, k_desc, k_rest_desc = descs
    tile, _, kv_head, batch, walk, first, blocks, _ = work.split_of(gl.to_tensor(0), lengths_ptr)
    head, token = work.unit(tile)
    there = corner(batch, kv_head * work.GROUP + head, token, walk.tokens, False)
    load_tile(q_desc, q_rest_desc, there, q_full.index(0), q.index(0), q_rest.index(0), walk.REST, False)
    ahead = _page_of(work, pages_ptr, batch, first + (blocks - 1) * walk.BN, walk.keys)
    for j in range(blocks):
        key = first + (blocks - 1 - j) * walk.BN
        s = j % walk.STAGES
        page = ahead
        ahead = _page_of(work, pages_ptr, batch, key - walk.BN, walk.keys)
        mbarrier_wait(k_empty.index(s), (j // walk.STAGES & 1) ^ 1)
        _load_keys(
            work, k_desc, k_rest_desc, k_full.index(s), k, k_rest, s, (kv_head, batch), key, walk.keys, page
        )  # fmt: skip


@gluon.jit
def _ask_scores(work, parts, j, SCORES: gl.constexpr):
    """Ask for the products of a CTA's queries with its j-th tile of keys, once that is there."""
    q, q_rest, k, k_rest, _, k_full, _ = parts
    walk = work.walk
    s = j % walk.STAGES
    zero = gl.zeros([64, walk.BN], gl.float32, SCORES)
    mbarrier_wait(k_full.index(s), j // walk.STAGES & 1)
    return rows_product(
        q.index(0).reshape([64, walk.D]), q_rest.index(0).reshape([64, walk.REST]),
        k.index(s).reshape([walk.BN, walk.D]), k_rest.index(s).reshape([walk.BN, walk.REST]), zero, walk.REST,
    )  # fmt: skip


@gluon.jit
def _probabilities(qk, top, sums, p_tile, first, limit, every, scale):
    """Online softmax: the probabilities of a tile, in shared memory; what sums before it shrink by, the new row maxima
    and sums."""
    BN: gl.constexpr = qk.shape[1]
    if first + BN > every:
        cols = first + gl.arange(0, BN, gl.SliceLayout(0, qk.type.layout))
        qk = gl.where(cols[None, :] < limit[:, None], qk, NOTHING)
    p, decay, new_top = exponentiate(qk, top, scale, True)
    # Both warpgroups have met in the maximum, so neither reads the probabilities of the tile before any more.
    p_tile.store(p.to(p_tile.dtype))
    fence_async()
    return decay, new_top, sums * decay[:, None] + p


@gluon.jit
def _consume_latent(work, parts, given, p_tile, CHAINED: gl.constexpr):
    q, _, k, _, q_full, _, k_empty = parts
    out_desc, lse_ptr, lse_split, sinks_ptr, lengths_ptr, scale = given
    BN: gl.constexpr = work.walk.BN
    D: gl.constexpr = work.walk.D
    STAGES: gl.constexpr = work.walk.STAGES
    SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 2], [16, BN // 2, 16])
    OUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 2], [16, D // 2, 16])
    ROW: gl.constexpr = gl.SliceLayout(1, SCORES)
    OUT_ROW: gl.constexpr = gl.SliceLayout(1, OUT)
    tile, split, kv_head, batch, walk, begin, blocks, seen = work.split_of(gl.to_tensor(0), lengths_ptr)
    first_head, start, row, queries = rows_of_tile(work, tile, ROW)
    limit = gl.minimum(walk.end(queries), seen) + row * 0
    every = gl.minimum(walk.end(gl.minimum(start, walk.tokens - 1)), seen)  # what all rows see ends there
    acc = gl.zeros([64, D], gl.float32, OUT)
    top = gl.full([64], NOTHING, gl.float32, ROW)
    sums = gl.zeros([64, BN], gl.float32, SCORES)  # of every BN-th key: adding across warpgroups can wait until the end
    mbarrier_wait(q_full.index(0), 0)
    qk_made = _ask_scores(work, parts, 0, SCORES)
    for j in range(blocks - 1):
        qk = wgmma_wait(0, deps=[qk_made])
        first = begin + (blocks - 1 - j) * BN
        decay, top, sums = _probabilities(qk, top, sums, p_tile, first, limit, every, scale)
        acc = acc * gl.convert_layout(decay, OUT_ROW)[:, None]
        acc_made = wgmma(p_tile, k.index(j % STAGES).reshape([BN, D]), acc, use_acc=True, is_async=True)
        qk_made = _ask_scores(work, parts, j + 1, SCORES)
        acc = wgmma_wait(2, deps=[acc_made])  # the scores' products are two
        mbarrier_arrive(k_empty.index(j % STAGES))
    qk = wgmma_wait(0, deps=[qk_made])
    decay, top, sums = _probabilities(qk, top, sums, p_tile, begin, limit, every, scale)
    acc = acc * gl.convert_layout(decay, OUT_ROW)[:, None]
    last = k.index((blocks - 1) % STAGES).reshape([BN, D])
    acc_made = wgmma(p_tile, last, acc, use_acc=True, is_async=True)
    of = work, (split, kv_head, batch), (first_head, start, row, queries)
    factor = write_lse(of, top, gl.sum(sums, 1), sinks_ptr, lse_ptr, lse_split)
    acc = wgmma_wait(0, deps=[acc_made])
    acc = acc * gl.convert_layout(factor, OUT_ROW)[:, None]
    q.index(0).reshape([64, D]).store(acc.to(k.dtype))  # out takes the place of q
    fence_async()
    rows = walk.rows // work.kv_heads
    tma_store(out_desc, (split * rows + batch, kv_head * work.GROUP + first_head, start, 0), q.index(0))
    tma_store_wait(0)
    if CHAINED:
        launch_dependents()  # not before: as in `split_kv`


@gluon.jit(
    do_not_specialize=["lse_split", "row_pages", "tokens", "keys", "rows", "kv_heads", "splits", "between_k", "right"]
)
def attention_latent_kernel(
    q_desc, q_rest_desc, k_desc, k_rest_desc, out_desc, lse_ptr, lse_split, sinks_ptr, lengths_ptr, pages_ptr,
    row_pages, tokens, keys, rows, kv_heads, tiles, splits, inverse, between_k, right, scale,
    GROUP: gl.constexpr, HEADS: gl.constexpr, RIGHT: gl.constexpr, BN: gl.constexpr, PAGE: gl.constexpr,
    D: gl.constexpr, REST: gl.constexpr, STAGES: gl.constexpr, CHAINED: gl.constexpr,
):  # fmt: skip
    """CTA (split of the keys and tile, kv head, batch row). rows: batch * kv heads. inverse: 1 / splits. Writes a
    normalised result, to [splits * B, H, T, D], and its lse for each split. CHAINED: the next kernel may start and
    wait. REST: columns of queries and keys behind D."""
    tiles = gl.to_tensor(tiles)  # Triton knows where there is but one, by which nothing is divided
    none = gl.to_tensor(0)
    walk = Walk(
        tokens, keys, kv_heads, tiles, rows, tiles, none, right, tiles, gl.to_tensor(1), none,
        False, RIGHT, False, False, False, 64, BN, D, D, 1, STAGES, 1, 0, False, 0, False, REST,
    )  # fmt: skip
    work = SplitKv(
        walk, kv_heads, tiles, splits, inverse, row_pages, between_k, between_k,
        GROUP, HEADS, 64 // HEADS, lengths_ptr is not None, PAGE, BN, True,
    )  # fmt: skip
    q, q_rest = smem_tiles(1, q_desc), smem_tiles(1, q_rest_desc)
    k, k_rest = smem_tiles(STAGES, k_desc), smem_tiles(STAGES, k_rest_desc)
    FLAT: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    p_tile = gl.allocate_shared_memory(k_desc.dtype, [64, BN], FLAT)
    q_full, k_full, k_empty = mbarriers((1, 1), (STAGES, 1), (STAGES, 1))
    fence_async()
    parts = (q, q_rest, k, k_rest, q_full, k_full, k_empty)
    descs = (q_desc, q_rest_desc, k_desc, k_rest_desc)
    given = (out_desc, lse_ptr, lse_split, sinks_ptr, lengths_ptr, scale)
    gl.warp_specialize(
        [
            (_produce_latent, (work, parts, descs, lengths_ptr, pages_ptr)),
            (_consume_latent, (work, parts, given, p_tile, CHAINED)),
        ],
        [8],
        [240],
    )
