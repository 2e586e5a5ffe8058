"""The tiles of attention's gradients on Hopper: which there are, in what parts and order CTAs take them."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

from tilesmith.engine.launcher import cdiv
from tilesmith.ops.attn.plan.configs import HopperVjpConfig
from tilesmith.ops.attn.plan.hopper_forward import CHUNK, TABLE_SPAN, Division, Tables, table_parts
from tilesmith.ops.attn.plan.model import Buffer, Step
from tilesmith.ops.attn.plan.shape import Shape, Window, columns, is_narrow, rest_columns, window_of
from tilesmith.ops.attn.plan.tables import ORDERED_L2, STREAM_K_L2, STREAM_K_STEPS_VJP
from tilesmith.ops.attn.schedule import (
    BALANCE,
    group_parts_of,
    key_steps,
    list_parts_of,
    part_sizes,
    read_share,
    section_of,
    stream_k_ctas,
)

BLOCK_N = 128  # keys of a tile of the main kernel


def is_narrow_vjp(s: Shape, window: Window) -> bool:
    """Whether the window's backward serves a call. Grouped heads would need a group's queries at once; its first
    queries must not lie before 0; nothing is dropped there; it writes gradients from tiles of 16 bits."""
    alike = (s.heads, s.dim) == (s.kv_heads, s.value_dim) and s.keys + max(window.right, 0) <= s.tokens
    alike = alike and not (s.dropout or s.gradients_fp32)
    return alike and is_narrow(s, window, columns(s.dim))


def streamed(tokens: int, dim: int, group: int) -> int:
    """Bytes of the queries, dout and parts of dq of a kv head, which `group` heads of q share."""
    return tokens * dim * 8 * group


def kv_heads_together(s: Shape, k_blocks: int, arch: Any, ordered: bool, diagonal: bool) -> int:
    """How many kv heads to work on together, of each of which `k_blocks` tiles of keys are made. ordered: parts of dq
    are added tile after tile; diagonal: each tile starts where its keys are first seen.

    As many as give each CTA a tile: so who had a short one, under a causal mask, takes a long one of the next heads; of
    documents, as many as give it two of the shorter half of the tiles. Ordered, the parts of dq must stay in the L2
    cache; where tiles start with the first queries and not at a diagonal, as many as fit, so that fewer tiles of a head
    wait for each other.
    """
    section = arch.sms // k_blocks
    if s.packed and not ordered:
        section = (4 * arch.sms + k_blocks // 2) // k_blocks
    if ordered:
        kept = int(arch.l2 * ORDERED_L2.value) // streamed(s.tokens, s.dim, s.group)
        section = min(section, kept) if diagonal else kept
    return min(max(1, section), s.batch * s.kv_heads)


def list_parts(s: Shape, arch: Any, config: HopperVjpConfig) -> int:
    """Of block lists: in how many parts, 1, 2, 4 or 8, the query heads that share a kv head are divided.

    A tile of keys meets the blocks of queries in its list, for all heads of its group. One that every block of queries
    chose, as the first keys often are, has all of them: of the best 16 blocks of 32k tokens and 8 heads a group 4,096
    steps, where an SM's share of all is 1,930.
    """
    if has_dq_kernel(s):
        return 1
    users = s.heads // s.lists_by_keys * (s.batch // s.list_rows_by_keys)
    work = s.list_entries * users * (s.block_q / config.block_q) * (s.block_k / BLOCK_N)
    traffic = _part_traffic(s, config.block_q, BLOCK_N, arch)
    longest = cdiv(s.tokens, config.block_q) * s.group
    return list_parts_of(s.batch * s.kv_heads, s.group, work, longest, arch.sms, traffic)


def _part_traffic(s: Shape, block_m: int, block_n: int, arch: Any) -> float:
    """What writing and reading dk and dv of one part of a group takes all SMs, in steps."""
    moved = 2 * s.keys * (s.dim + s.value_dim) * (4 if s.gradients_fp32 else s.q_bytes)
    step = 5 * block_m * block_n * (s.dim + s.value_dim)  # operations: five products
    return moved * BALANCE / step / arch.sms


def rings(s: Shape, q_blocks: int, k_blocks: int, section: int, arch: Any) -> bool:
    """Whether, ordered and without a mask, a head's tiles of keys each start at a block of queries of their own
    (`around`), and not all at its first one, where each waits until those before it have gone on.

    That spares each CTA about as many blocks as tiles of a head run at the same time, once. But each block of queries
    has a second part of dq, which takes all CTAs together about as long as a block takes one. Not where queries, dout
    and parts of dq of the heads that run would not stay in the L2 cache.
    """
    kept = arch.sms * streamed(s.tokens, s.dim, 1) <= int(arch.l2 * ORDERED_L2.value) * k_blocks
    return kept and min(k_blocks, arch.sms // section) * arch.sms >= s.rows * q_blocks


def divided_vjp(s: Shape, tiles: int, steps: int, section: int, arch: Any) -> Division:
    """Which of so many tiles of keys, of `steps` blocks of queries each, are divided by stream-K. As CTAs are at
    different queries then, those of a section's heads must stay in the L2 cache."""
    rest = tiles % arch.sms
    ctas = stream_k_ctas(rest, rest * steps, steps, STREAM_K_STEPS_VJP.value, arch.sms)
    if not ctas or 0 < arch.l2 * STREAM_K_L2.value < section * streamed(s.tokens, s.dim, s.group):
        return Division(tiles, 0)
    return Division(tiles - rest, ctas, f"{rest} tiles are left over, in {ctas} equal runs of blocks (stream-K)")


def has_dq_kernel(s: Shape) -> bool:
    """Whether dq has a kernel of its own, so that the scores are made twice and nothing is added in memory: above head
    dim 128, where dk and dv of 64 keys take the registers of two consumers, and where head dims differ."""
    return s.dim > 128 or s.dim != s.value_dim


def rest_of(s: Shape) -> int:
    """Columns of products behind the first 64, where they are not those of the tile (`hopper.backward_rest`)."""
    if s.dim != s.value_dim or s.softcap or s.dropout or s.gradients_fp32:
        return 0
    return rest_columns(s.dim)


class Blocks(NamedTuple):
    """Sizes of a backward: the first query and key that anybody sees, blocks of queries and tiles of keys; columns of a
    tile of queries, those behind the first 64 that products have where they are fewer, and whether dq has a kernel of
    its own."""

    window: Window
    wide: int
    rest: int
    apart: bool
    block_m: int
    block_n: int
    q_begin: int
    k_begin: int
    q_blocks: int
    k_blocks: int
    tables: Tables
    rows_table: str | None = None
    banded: bool = False


def _key_tables(s: Shape, window: Window, rows: int, block: int) -> tuple[int, Tables]:
    """Blocks of queries and tiles of keys of packed documents: how many blocks there may be, and the tables."""
    # each part of a document has at most one block that is not full
    row_parts = 2 if window.hides_right and not s.one_vector else 1
    q_most = s.tokens // rows + row_parts * (s.documents + 1)
    k_most = s.keys // block + (1 + window.hides_left + s.lengths) * (s.documents + 2)
    width = s.tokens
    if window.hides_left:
        width = min(s.tokens, window.left + block + (window.right if window.hides_right else s.tokens))
    step = Step(
        "key_tiles_kernel", (s.documents + 2, table_parts(max(q_most, k_most), s.documents)),
        {"cu_q_ptr": "cu_q", "cu_k_ptr": "cu_k", "lengths_ptr": "lengths", "rows_ptr": "row_table",
         "table_ptr": "key_table"},
        {"documents": s.documents, "tokens": s.tokens, "keys": s.keys, "width": width, "left": window.left,
         "right": window.right},
        {"RIGHT": window.hides_right, "LEFT": window.hides_left, "ROWS": rows, "BLOCK": block, "CHUNK": CHUNK,
         "SPAN": TABLE_SPAN, "num_warps": 4},
    )  # fmt: skip
    scratch = Buffer("row_table", (q_most + 1, 2), "int32"), Buffer("key_table", (k_most + 1, 8), "int32")
    return q_most, Tables(k_most, (step,), scratch, "key_table")


def _list_key_tables(s: Shape, causal: bool, k_blocks: int, block_m: int, block_n: int) -> Tables:
    """The tiles of block lists by keys."""
    tiles = s.list_rows_by_keys * s.lists_by_keys * k_blocks
    step = Step(
        "list_key_tiles_kernel", (tiles,),
        {"offsets_ptr": "list_offsets", "indices_ptr": "list_indices", "table_ptr": "list_table",
         "offsets_strides": "list_strides"},
        {"heads": s.lists_by_keys, "tiles": k_blocks, "tokens": s.tokens, "keys": s.keys},
        {"CAUSAL": causal, "BLOCK_M": block_m, "BLOCK_N": block_n, "LIST_Q": s.block_q, "LIST_K": s.block_k,
         "num_warps": 4},
    )  # fmt: skip
    return Tables(k_blocks, (step,), (Buffer("list_table", (tiles, 4), "int32"),), None, "list_table")


def blocks_of(s: Shape, config: HopperVjpConfig) -> Blocks:
    """The blocks and tiles of a call, with the tables that documents and block lists need."""
    window, wide = window_of(s), columns(s.dim)
    # queries that see nothing and keys that nobody sees may hold NaN: no tile touches them
    q_begin = max(0, s.tokens - s.keys - window.right) if window.hides_right and not (s.packed or s.lists) else 0
    k_begin = max(0, s.keys - s.tokens - window.left) if window.hides_left and not s.packed else 0
    apart = has_dq_kernel(s)
    block_m, block_n = config.block_q, 64 if apart else BLOCK_N
    q_blocks, k_blocks = cdiv(s.tokens - q_begin, block_m), cdiv(s.keys - k_begin, block_n)
    tables, rows_table = Tables(k_blocks), None
    if s.packed:
        q_blocks, tables = _key_tables(s, window, block_m, block_n)
        k_blocks, rows_table = tables.blocks, "row_table"
    if s.lists:
        tables = _list_key_tables(s, window.hides_right, k_blocks, block_m, block_n)
    rest = rest_of(s)
    return Blocks(window, wide, rest, apart, block_m, block_n, q_begin, k_begin, q_blocks, k_blocks, tables, rows_table)


class Order(NamedTuple):
    """How tiles of keys follow each other: `section` kv heads at a time, of which `modelled` says whether the model of
    the schedule chose how many; ordered, by one of the walks of `KeyWalk`."""

    section: int
    modelled: bool
    ordered: bool
    ring: bool
    woven: bool
    division: Division

    def reasons(self, s: Shape) -> list[str]:
        by = ", as a model of the schedule predicts the shortest time" if self.modelled else ""
        found = [f"sections of {self.section} of {s.batch * s.kv_heads} kv heads{by}"]
        if self.ordered:
            found.append("deterministic: each tile of keys adds to dq when the tile behind it has")
        if self.ring:
            found.append("each tile starts at a block of queries of its own and comes round: dq has two sums a block")
        if self.woven:
            found.append("a block of queries of all heads of a group comes before the next block")
        return found + ([self.division.reason] if self.division.reason else [])


def is_modelled(s: Shape, b: Blocks) -> bool:
    """Whether the tiles of a head differ, their steps are known, and their order is free."""
    return b.window.hides_right and not (s.packed or s.lists or (s.deterministic and not b.apart))


def tile_steps(s: Shape, b: Blocks) -> list[int]:
    """The steps of a head's tiles of keys, in the order in which they are taken."""
    window = b.window.left if b.window.hides_left else None, b.window.right if b.window.hides_right else None
    return key_steps(s.tokens, s.keys, b.block_m, b.block_n, b.q_begin, b.k_begin, *window)


def is_woven(s: Shape, b: Blocks) -> bool:
    """Whether tiles meet a block of queries of all heads of a group before the next block (`KeyWalk.rises`)."""
    known = not (b.window.hides_left or s.packed or s.lists)  # every tile's place follows from its number
    return b.window.hides_right and b.block_m == 64 and known and not (s.deterministic or b.apart)


def kept_steps(s: Shape, b: Blocks, arch: Any) -> float:
    """`kept` of `schedule.read_share`: for how many steps the L2 cache holds what all CTAs load; infinite where tiles
    do not drift apart, or where the cache is not known."""
    if is_woven(s, b) or not arch.l2:
        return math.inf
    step = b.block_m * (s.dim + s.value_dim) * s.q_bytes if b.apart else streamed(b.block_m, s.dim, 1)
    return arch.l2 / (arch.sms * step)


def drifted(s: Shape, b: Blocks, arch: Any, section: int, members: tuple[int, ...]) -> float:
    """The time of a step beside that of one of tiles that do not drift apart, as those of few heads do not."""
    steps = tile_steps(s, b)
    together = read_share(section, steps, arch.sms)
    return read_share(section, steps, arch.sms, members, kept_steps(s, b, arch)) / together


def group_parts(s: Shape, b: Blocks, arch: Any, config: HopperVjpConfig) -> int:
    """Parts of a group of query heads that have tiles of their own."""
    masked = b.window.hides_right or s.lists > 0  # else stream-K divides tiles
    if not masked:
        return 1
    if config.group_parts:
        return min(config.group_parts, s.group)
    if s.lists:
        return list_parts(s, arch, config)
    if not is_modelled(s, b):
        return 1
    traffic, kept = _part_traffic(s, b.block_m, b.block_n, arch), kept_steps(s, b, arch)
    rows, woven = s.batch * s.kv_heads, is_woven(s, b)
    return group_parts_of(rows, s.group, tuple(tile_steps(s, b)), arch.sms, traffic, kept, woven)


def members_of(s: Shape, parts: int) -> tuple[int, ...]:
    """Query heads of one kv head after another, over and over, where so many are parts of a group."""
    return part_sizes(s.heads * parts // s.kv_heads, parts)


def order_of(s: Shape, b: Blocks, arch: Any, parts: int) -> Order:
    """How the tiles of a call follow each other. s: with the parts of a group as kv heads."""
    left, right = b.window.hides_left, b.window.hides_right
    ordered = s.deterministic and not b.apart
    section = kv_heads_together(s, b.k_blocks, arch, ordered, right)
    modelled = is_modelled(s, b)
    if modelled:
        steps, members = tuple(tile_steps(s, b)), members_of(s, parts)
        section = section_of(section, s.batch * s.kv_heads, steps, arch.sms, members, kept_steps(s, b, arch))
    known = not (left or s.packed or s.lists)  # every tile's place follows from its number
    ring = ordered and known and not (right or s.dropout) and rings(s, b.q_blocks, b.k_blocks, section, arch)
    woven = s.group > 1 and is_woven(s, b)
    division = Division(b.k_blocks * s.batch * s.kv_heads, 0)
    if not b.apart and known and not (right or s.deterministic or s.dropout):
        division = divided_vjp(s, division.undivided, b.q_blocks * s.group, section, arch)
    return Order(section, modelled, ordered, ring, woven, division)
