"""The plan of attention's gradients on Hopper: rows' statistics, dk and dv, dq, dsinks."""

from __future__ import annotations

from functools import lru_cache
from typing import Any, NamedTuple

from tilesmith.engine.launcher import cdiv, next_power_of_2
from tilesmith.ops.attn.plan import smem
from tilesmith.ops.attn.plan.configs import HopperVjpConfig
from tilesmith.ops.attn.plan.hopper_bands import (
    TILE,
    band_reasons,
    band_scratch,
    band_steps,
    bands,
    extent,
    workspace,
)
from tilesmith.ops.attn.plan.hopper_forward import (
    CHUNK,
    NO_KEYS,
    TABLE_SPAN,
    Division,
    Tables,
    dropout_constants,
    heads_together,
    query_tables,
    table_parts,
)
from tilesmith.ops.attn.plan.model import Buffer, Counter, Part, Plan, Source, Step, Tile
from tilesmith.ops.attn.plan.shape import Shape, Window, column_parts, columns, is_narrow, rest_columns, window_of
from tilesmith.ops.attn.plan.tables import (
    NARROW_GRADIENTS,
    ORDERED_L2,
    STREAM_K_L2,
    STREAM_K_STEPS_VJP,
    GradientTime,
)
from tilesmith.ops.attn.schedule import (
    BALANCE,
    MANY,
    even_makespan,
    group_parts_of,
    in_sections,
    key_steps,
    list_parts_of,
    makespan,
    run_of,
    section_of,
    stream_k_ctas,
)

WINDOW_RUNS = (2, 4, 8, 16, 32, 64, 128)
BLOCK_N = 128  # keys of a tile of the main kernel
_FP32 = "gradients in fp32: consumers store them from registers, as tiles in shared memory have room for 16 bits"
_APART = (
    "above head dim 128, and where head dims differ, dq has a kernel of its own: the scores are made twice, nothing is "
    "added"
)


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


def _blocks(s: Shape, config: HopperVjpConfig) -> Blocks:
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


def _is_modelled(s: Shape, b: Blocks) -> bool:
    """Whether the tiles of a head differ, their steps are known, and their order is free."""
    return b.window.hides_right and not (s.packed or s.lists or (s.deterministic and not b.apart))


def _steps(s: Shape, b: Blocks) -> list[int]:
    """The steps of a head's tiles of keys, in the order in which they are taken."""
    window = b.window.left if b.window.hides_left else None, b.window.right if b.window.hides_right else None
    return key_steps(s.tokens, s.keys, b.block_m, b.block_n, b.q_begin, b.k_begin, *window)


def _group_parts(s: Shape, b: Blocks, arch: Any, config: HopperVjpConfig) -> int:
    """Parts of a group of query heads that have tiles of their own."""
    masked = b.window.hides_right or s.lists > 0  # else stream-K divides tiles
    if not masked or s.group % max(1, config.group_parts):
        return 1
    if config.group_parts:
        return config.group_parts
    if s.lists:
        return list_parts(s, arch, config)
    if not _is_modelled(s, b):
        return 1
    traffic = _part_traffic(s, b.block_m, b.block_n, arch)
    return group_parts_of(s.batch * s.kv_heads, s.group, tuple(_steps(s, b)), arch.sms, traffic)


def _order(s: Shape, b: Blocks, arch: Any) -> Order:
    left, right = b.window.hides_left, b.window.hides_right
    ordered = s.deterministic and not b.apart
    section = kv_heads_together(s, b.k_blocks, arch, ordered, right)
    modelled = _is_modelled(s, b)
    if modelled:
        section = section_of(section, s.batch * s.kv_heads, tuple(n * s.group for n in _steps(s, b)), arch.sms)
    known = not (left or s.packed or s.lists)  # every tile's place follows from its number
    ring = ordered and known and not (right or s.dropout) and rings(s, b.q_blocks, b.k_blocks, section, arch)
    woven = s.group > 1 and right and b.block_m == 64 and known and not (s.deterministic or b.apart)
    division = Division(b.k_blocks * s.batch * s.kv_heads, 0)
    if not b.apart and known and not (right or s.deterministic or s.dropout):
        division = divided_vjp(s, division.undivided, b.q_blocks * s.group, section, arch)
    return Order(section, modelled, ordered, ring, woven, division)


@lru_cache(maxsize=1024)
def hopper_backward(s: Shape, arch: Any, config: HopperVjpConfig) -> Plan:
    """Statistics of the rows; up to head dim 128 a kernel for dk, dv and what dq is the sum of, and one that puts dq in
    order; above, and where head dims differ, one for dk and dv and one for dq; one for all where the window is narrow;
    above head dim 256 those of `_banded`."""
    if 0 in (s.rows * s.tokens, s.kv_heads * s.keys):
        return Plan("attention_vjp", "hopper", reasons=(NO_KEYS,))
    why = ""
    if not config.block_q:
        config, why = _narrow_tiles(s, arch, config)
    if max(s.dim, s.value_dim) > 256:
        return _banded(s, arch, config)
    b = _blocks(s, config)
    narrow, whole = is_narrow_vjp(s, b.window), s
    parts = 1 if narrow else _group_parts(s, b, arch, config)
    s = s._replace(kv_heads=s.kv_heads * parts)  # each part of a group is a kv head with tiles of its own
    order = _order(s, b, arch)
    call = _Call(s, arch, config, b, order, narrow, parts, why)
    steps, scratch = [*b.tables.steps, _rows(call)], [*b.tables.scratch, *_scratch(call)]
    if call.narrow:
        steps.append(_narrow(call))
    elif b.apart:
        steps.append(_wide_dkv(call))
        if s.wants[0]:
            tables = query_tables(s, b.window, 128) if s.packed else Tables(cdiv(s.tokens, 128))
            steps += [*tables.steps, _wide_dq(call._replace(s=whole), tables)]
            scratch += tables.scratch
    else:
        steps += [_dkv(call), *([_dq(call)] if s.wants[0] else []), *_stream_k(call)]
    steps += _group_sum(call)
    if s.wants[4] and s.sinks:
        steps.append(_dsinks(call))
    ctas = order.division.ctas
    return Plan(
        "attention_vjp", "hopper", tuple(steps), (b.block_m, 64 if call.narrow else b.block_n), call.stages(), 2,
        f"sections of {order.section} kv heads", "stream-K" if ctas else "", ctas or 1,
        order.ordered or call.narrow or b.apart, tuple(scratch), _zeroed(b),
        {"q_begin": b.q_begin}, s.q_bytes, _reasons(call),
    )  # fmt: skip


def _banded(s: Shape, arch: Any, config: HopperVjpConfig) -> Plan:
    """Above head dim 256 p and ds of a band of queries are made first, and gradients are products of them."""
    b = _blocks(s, config._replace(block_q=TILE))._replace(apart=False, banded=True)
    of = extent(s, b.q_begin, b.k_begin)
    found = bands(s, of, workspace(s))
    order = Order(1, False, False, False, False, Division(0, 0))
    call = _Call(s, arch, config, b, order, False, 1, "")
    steps = [_rows(call), *band_steps(s, arch, b.window, of, found, config.stages)]
    if s.wants[4] and s.sinks:
        steps.append(_dsinks(call))
    return Plan(
        "attention_vjp", "hopper", tuple(steps), (TILE, TILE), config.stages, 2,
        scratch=(*_scratch(call), *band_scratch(s, of, found)), zeroed=_zeroed(b), numbers={"q_begin": b.q_begin},
        q_bytes=s.q_bytes, reasons=tuple(band_reasons(s, of, found)),
    )  # fmt: skip


def _zeroed(b: Blocks) -> tuple[tuple[str, int], ...]:
    """Gradients of queries that see nothing, and of keys that nobody sees."""
    return tuple(z for z in (("dq", b.q_begin), ("dk", b.k_begin), ("dv", b.k_begin)) if z[1])


def _narrow_tiles(s: Shape, arch: Any, config: HopperVjpConfig) -> tuple[HopperVjpConfig, str]:
    """The block of queries that a configuration leaves open, and why this one."""
    chosen, why = next(iter(NARROW_GRADIENTS)), ""
    if not (s.packed or s.lists or s.deterministic):
        times = {}
        for tiles, time in NARROW_GRADIENTS.items():
            times[tiles] = _tiles_time(s, arch, tiles._replace(group_parts=config.group_parts), time)
        chosen = min(times, key=times.__getitem__)
        told = ", ".join(f"{tiles.block_q} {us:.0f} µs" for tiles, us in times.items())
        why = f"predicted times by queries of a block on an H200: {told}"
    return config._replace(block_q=chosen.block_q, stages=config.stages or chosen.stages), why


def _tiles_time(s: Shape, arch: Any, config: HopperVjpConfig, time: GradientTime) -> float:
    """The predicted time of all kernels of a call, in µs."""
    b = _blocks(s, config)
    parts = _group_parts(s, b, arch, config)
    s = s._replace(kv_heads=s.kv_heads * parts)
    order = _order(s, b, arch)
    division = order.division
    heads, steps = s.batch * s.kv_heads, [n * s.group * time.step for n in _steps(s, b)]
    launches = (parts > 1) + (division.ctas > 0)
    found = time.start + launches * time.launch
    if division.ctas:
        left = (heads * b.k_blocks - division.undivided) * b.q_blocks * s.group
        found += even_makespan(division.undivided, steps[0], arch.sms, time.tile)
        return found + time.tile + cdiv(left, division.ctas) * time.step
    if not b.window.hides_right:
        return found + even_makespan(heads * b.k_blocks, steps[0], arch.sms, time.tile)
    if heads * b.k_blocks > MANY * arch.sms:
        return found + heads * (sum(steps) + b.k_blocks * time.tile) / arch.sms + time.tile + min(steps)
    return found + makespan(in_sections(steps, heads, order.section), arch.sms, time.tile)


class _Call(NamedTuple):
    s: Shape
    arch: Any
    config: HopperVjpConfig
    b: Blocks
    order: Order
    narrow: bool
    group_parts: int
    why: str

    def of_parts(self, name: str) -> str:
        """The tensor that tiles write dk or dv to."""
        return f"{name}_parts" if self.group_parts > 1 else name

    def written(self, name: str) -> str:
        """The tensor in whose tiles a gradient is written: in fp32 in none, and what it is of has their layout."""
        return name[1:] if self.s.gradients_fp32 else name if name == "dq" else self.of_parts(name)

    def inputs(self) -> dict[str, Source]:
        """The descriptors of what the main kernel streams and keeps."""
        b, packed = self.b, self.s.packed
        return {
            "q_desc": Tile("q", b.block_m, packed), "k_desc": Tile("k", b.block_n, packed),
            "v_desc": Tile("v", b.block_n, packed), "dout_desc": Tile("dout", b.block_m, packed),
        }  # fmt: skip

    def stored(self, *names: str) -> dict[str, Source]:
        """What gradients in fp32 are stored to from registers; nothing where they are not."""
        if not self.s.gradients_fp32:
            return {}
        of = {name: name if name == "dq" else self.of_parts(name) for name in names}
        strides: dict[str, Source] = {f"{name}_strides": f"{x}_strides" for name, x in of.items()}
        return {f"{name}_ptr": x for name, x in of.items()} | strides

    def columns(self) -> dict[str, int]:
        """The columns of tiles where dq has a kernel of its own."""
        (wide, rest), (value_wide, value_rest) = column_parts(self.s.dim), column_parts(self.s.value_dim)
        rests = {name: n for name, n in (("REST", rest), ("V_REST", value_rest)) if n}
        return {"D": wide, "DV": value_wide, **rests}

    def tiles(self, **names: int) -> dict[str, Source]:
        """The descriptors of tensors, of which so many rows are a tile, in the columns of their tiles."""
        columns, found = self.columns(), {}
        for name, rows in names.items():
            of_v = name in ("v", "dv", "dout")
            wide, rest = columns["DV" if of_v else "D"], columns.get("V_REST" if of_v else "REST", 0)
            of = self.written(name) if name in ("dq", "dk", "dv") else name
            found[f"{name}_desc"] = Tile(of, rows, self.s.packed, 1, wide if rest else 0)
            if rest:
                found[f"{name}_rest_desc"] = Tile(of, rows, self.s.packed, 1, rest)
        return found

    def strides(self, *names: str) -> dict[str, Source]:
        """The strides of tensors, in units of 16 bytes where head dims are odd multiples of that: Triton's own hint to
        the compiler is 16 elements, without which it would load and store each one by itself."""
        odd = self.s.dim % 16 or self.s.value_dim % 16
        given: dict[str, Source] = {f"{name}_strides": f"{name}_{'units' if odd else 'strides'}" for name in names}
        return given | ({"UNIT": "unit"} if odd else {})

    def chained(self) -> dict[str, bool]:
        """Of the kernels for dk and dv and for dq above head dim 128: whether each starts while the one before ends. Of
        packed documents a table is made between them, which nothing waits for."""
        return {"CHAINED": True, "launch_pdl": True} if not self.s.packed else {}

    def stages(self) -> int:
        """Tiles of queries in flight."""
        if self.narrow or not self.b.apart:
            return self.config.stages
        return _most(smem.backward_wide, self.columns(), self.config.stages, self)

    def sums(self) -> int:
        return 2 if self.order.ring else 1

    def ctas(self) -> tuple[int, bool]:
        """CTAs of the main kernel, and whether they take tiles from a counter."""
        division = self.order.division
        work = division.undivided + division.ctas
        ctas = min(self.arch.sms, work)
        return ctas, ctas < work

    def sizes(self) -> dict[str, int]:
        s, b = self.s, self.b
        return {
            "tokens": s.tokens, "keys": s.keys, "kv_heads": s.kv_heads, "q_begin": b.q_begin, "k_begin": b.k_begin,
            "q_blocks": b.q_blocks, "k_blocks": b.k_blocks, "rows": s.batch * s.kv_heads,
            "section": self.order.section, "left": b.window.left, "right": b.window.right,
        }  # fmt: skip

    def kinds(self) -> dict[str, Any]:
        s, b = self.s, self.b
        return {
            "GROUP": s.group, "LEFT": b.window.hides_left, "RIGHT": b.window.hides_right,
            "TAIL": s.packed or (s.keys - b.k_begin) % b.block_n != 0, "DYNAMIC": self.ctas()[1], "D": b.wide,
            "SOFTCAP": s.softcap, "num_warps": 4,
            **({"GROUP_PARTS": self.group_parts} if self.group_parts > 1 else {}),
        }  # fmt: skip


def _most(memory: Any, constants: dict[str, int], stages: int, call: _Call) -> int:
    """How many stages, at most `stages`, a kernel has shared memory for."""
    room, item = call.arch.shared_memory or smem.HOPPER, call.s.q_bytes
    fits = (n for n in range(stages, 1, -1) if memory(constants | {"STAGES": n, "V_STAGES": n}, item) <= room)
    return next(fits, 1)


def _scratch(call: _Call) -> list[Buffer]:
    s, b = call.s, call.b
    found = [Buffer("rows", (2, s.rows, b.q_blocks * b.block_m), "float32")]
    if b.banded:
        return found
    if b.apart:
        found.append(Buffer("token_delta", (s.batch, s.heads, s.tokens), "float32"))
    elif not call.narrow:
        blocks = call.sums() * s.rows * b.q_blocks
        made = 64 + b.rest if b.rest else b.wide
        found.append(Buffer("dq_parts", (blocks * b.block_m * made // 256, 256), "float32"))
        found.append(Buffer("turns", (blocks,), "int32"))
    if call.group_parts > 1:
        of = s.batch, s.kv_heads, s.keys
        kind = "float32" if s.gradients_fp32 else "q"
        found += [Buffer("dk_parts", (*of, s.dim), kind), Buffer("dv_parts", (*of, s.value_dim), kind)]
    if call.order.division.ctas:
        found.append(Buffer("stream_k_parts", (2 * call.order.division.ctas, 2, b.block_n, b.wide), "float32"))
    return found


def _rows(call: _Call) -> Step:
    """lse in units of log 2, and delta, of each query."""
    s, b = call.s, call.b
    adds, wide = not (b.apart or b.banded or call.narrow), columns(s.value_dim)
    rows = 32 if b.banded else b.block_m
    blocks = b.q_blocks * (b.block_m // rows)
    return Step(
        "attention_rows_kernel", (s.rows * blocks,),
        {"out_ptr": "out", "dout_ptr": "dout", "lse_ptr": "lse", "dlse_ptr": "dlse", "row_lse_ptr": Part("rows", 0),
         "delta_ptr": Part("rows", 1), "token_delta_ptr": "token_delta" if b.apart else None,
         "turns_ptr": "turns" if adds else None, "blocks_ptr": b.rows_table, "dlse_strides": "dlse_strides",
         "kept": "kept", **call.strides("out", "dout")},
        {"heads": s.heads, "tokens": s.tokens, "begin": b.q_begin, "blocks": blocks},
        {"ROWS": rows, "DIM": s.value_dim, "D": wide, "SUMS": call.sums(), "num_warps": 4 if wide <= 128 else 8},
    )  # fmt: skip


def _dkv(call: _Call) -> Step:
    s, b, order = call.s, call.b, call.order
    division = order.division
    lists = {"list_share": 1, "list_rows": 0}
    if s.lists:
        heads, rows = s.lists_by_keys, s.list_rows_by_keys
        lists = {"list_share": s.heads // heads, "list_rows": b.k_blocks * heads if rows > 1 else 0}
    tensors = call.inputs() | {
        "dq_desc": Tile("dq_parts", b.block_m * b.wide // 512, flat=True),
        "dk_desc": Tile(call.written("dk"), 64, s.packed), "dv_desc": Tile(call.written("dv"), 64, s.packed),
        "lse_ptr": Part("rows", 0), "delta_ptr": Part("rows", 1), "turns_ptr": "turns",
        "counter": Counter() if call.ctas()[1] else None, "table": b.tables.table, "lists": b.tables.lists,
        "indices": "list_indices" if s.lists else None, "stream_k_ptr": "stream_k_parts" if division.ctas else None,
        "inner": "inner", "outer": "outer", "scale": "factor", **({"dropout": "dropout"} if s.dropout else {}),
        **call.stored("dk", "dv"),
    }  # fmt: skip
    rest = {"REST": b.rest} if b.rest else {}
    if b.rest:
        tensors["dq_rest_desc"] = Tile("dq_parts", b.block_m * b.rest // 256, flat=True)
    constants = {
        "LIST_Q": s.block_q, "ORDERED": s.deterministic, "WOVEN": order.woven,
        "RING": order.ring, "BQ": b.block_m, "STAGES": call.config.stages, "launch_pdl": True, **call.kinds(),
        **dropout_constants(s), **({"DIM": s.dim} if s.gradients_fp32 else {}), **rest,
    }  # fmt: skip
    numbers = call.sizes() | lists | {"whole_tiles": division.undivided, "stream_k_ctas": division.ctas}
    memory = smem.backward(b.block_m, b.wide, call.config.stages, s.q_bytes)
    return Step("attention_dkv_kernel", (call.ctas()[0],), tensors, numbers, constants, memory)


def _dq(call: _Call) -> Step:
    s, b = call.s, call.b
    twice = (b.k_blocks - 1) * b.q_blocks // b.k_blocks if call.order.ring else None
    return Step(
        "attention_dq_kernel", (s.rows * b.q_blocks,),
        {"parts_ptr": "dq_parts", "dq_ptr": "dq", "turns_ptr": "turns", "blocks_ptr": b.rows_table,
         "scale": "factor", **call.strides("dq")},
        {"heads": s.heads, "tokens": s.tokens, "begin": b.q_begin, "blocks": b.q_blocks, "twice": twice},
        {"ROWS": b.block_m, "DIM": s.dim, "D": 64 if b.rest else b.wide,
         "EARLY": s.deterministic and not (s.packed or b.window.hides_left), "num_warps": 4, "launch_pdl": True,
         **({"REST": b.rest} if b.rest else {})},
    )  # fmt: skip


def _stream_k(call: _Call) -> list[Step]:
    """dk and dv of the tiles that are divided, from their parts."""
    s, b, division = call.s, call.b, call.order.division
    if not division.ctas:
        return []
    rest = b.k_blocks * s.batch * s.kv_heads - division.undivided
    return [Step(
        "attention_dkv_stream_k_kernel", (rest, 2, 8),
        {"stream_k_ptr": "stream_k_parts", "dk_ptr": "dk", "dv_ptr": "dv", "dk_strides": "dk_strides",
         "dv_strides": "dv_strides"},
        {"keys": s.keys, "kv_heads": s.kv_heads, "k_blocks": b.k_blocks, "rows": s.batch * s.kv_heads,
         "section": call.order.section, "whole_tiles": division.undivided, "stream_k_ctas": division.ctas,
         "steps": b.q_blocks * s.group},
        {"DIM": s.dim, "D": b.wide, "ROWS": b.block_n // 8, "num_warps": 4},
    )]  # fmt: skip


def _group_sum(call: _Call) -> list[Step]:
    """dk and dv from those of the parts of each group."""
    s, b, parts = call.s, call.b, call.group_parts
    if parts == 1:
        return []
    rows, wide = 16, next_power_of_2(max(s.dim, s.value_dim))
    return [Step(
        "attention_group_sum_kernel", (cdiv(s.keys - b.k_begin, rows), s.batch * s.kv_heads // parts, 2),
        {"dk_parts_ptr": "dk_parts", "dv_parts_ptr": "dv_parts", "dk_ptr": "dk", "dv_ptr": "dv",
         "dk_strides": "dk_strides", "dv_strides": "dv_strides"},
        {"begin": b.k_begin, "keys": s.keys, "kv_heads": s.kv_heads // parts},
        {"GROUP_PARTS": parts, "DIM": s.dim, "VALUE_DIM": s.value_dim, "D": wide, "ROWS": rows, "num_warps": 4},
    )]  # fmt: skip


def _wide_dkv(call: _Call) -> Step:
    """Above head dim 128, and where head dims differ: one consumer makes dk, the other one dv."""
    tensors = call.tiles(q=64, k=64, v=64, dout=64, dk=64, dv=64) | {
        "lse_ptr": Part("rows", 0), "delta_ptr": Part("rows", 1), "counter": Counter() if call.ctas()[1] else None,
        "table": call.b.tables.table, "inner": "inner", "outer": "outer", "scale": "factor",
        **call.stored("dk", "dv"),
    }  # fmt: skip
    more = {"OVERLAP": True} if call.config.overlap else {}
    if call.s.gradients_fp32:
        more |= {"DIM": call.s.dim, "VALUE_DIM": call.s.value_dim}
    constants = {"STAGES": call.stages(), **call.kinds(), **call.columns(), **more, **call.chained()}
    return Step(
        "attention_dkv_wide_kernel", (call.ctas()[0],), tensors, call.sizes(), constants,
        smem.backward_wide(constants, call.s.q_bytes),
    )  # fmt: skip


def _wide_dq(call: _Call, tables: Tables) -> Step:
    """Above head dim 128, and where head dims differ: the scores are made a second time, and nothing is added in
    memory."""
    s, b = call.s, call.b
    tiles = tables.blocks * s.rows
    ctas = min(call.arch.sms, tiles)
    stages = _most(smem.dq_wide, call.columns(), 3, call)
    constants = {
        "LEFT": b.window.hides_left, "RIGHT": b.window.hides_right, "DYNAMIC": ctas < tiles, "STAGES": max(stages, 2),
        "V_STAGES": stages, "SOFTCAP": s.softcap, "num_warps": 4, **call.columns(), **call.chained(),
        **({"DIM": s.dim} if s.gradients_fp32 else {}),
    }  # fmt: skip
    tensors = call.tiles(q=64, k=64, v=64, dout=64, dq=64) | {
        "lse_ptr": "lse", "delta_ptr": "token_delta",
        "counter": Counter() if ctas < tiles else None, "table": tables.table, "inner": "inner",
        "outer": "outer", "factor": "factor", **call.stored("dq"),
    }  # fmt: skip
    return Step(
        "attention_dq_wide_kernel", (ctas,), tensors,
        {"tokens": s.tokens, "keys": s.keys, "heads": s.heads, "blocks": tables.blocks, "rows": s.rows,
         "section": heads_together(s, call.arch.l2, False), "left": b.window.left, "right": b.window.right,
         "group": s.group},
        constants, smem.dq_wide(constants, s.q_bytes),
    )  # fmt: skip


def _narrow(call: _Call) -> Step:
    """dq, dk and dv of a narrow window, whose queries are all there at once."""
    s, b = call.s, call.b
    size = cdiv(s.keys + b.window.right, 64)
    run = run_of(WINDOW_RUNS, 3, size, s.rows, call.arch.sms)
    blocks = cdiv(size, run)
    runs = blocks * s.rows
    ctas = min(call.arch.sms, runs)
    row_size = b.q_blocks * b.block_m
    return Step(
        "attention_window_vjp_kernel", (ctas,),
        {**{f"{name}_desc": Tile(name, 64) for name in ("q", "k", "v", "dout", "dq", "dk", "dv")}, "rows_ptr": "rows",
         "counter": Counter() if ctas < runs else None, "inner": "inner", "outer": "outer", "factor": "factor"},
        {"tokens": s.tokens, "keys": s.keys, "heads": s.heads, "blocks": blocks, "rows": s.rows,
         "section": heads_together(s, call.arch.l2, False), "left": b.window.left, "right": b.window.right, "run": run,
         "q_begin": b.q_begin, "size": size, "row_size": row_size, "plane": s.rows * row_size},
        {"DYNAMIC": ctas < runs, "D": b.wide, "Q_STAGES": call.config.stages, "SOFTCAP": s.softcap, "num_warps": 4},
    )  # fmt: skip


def _dsinks(call: _Call) -> Step:
    s, b = call.s, call.b
    return Step(
        "attention_dsinks_kernel", (s.heads,),
        {"row_lse_ptr": Part("rows", 0), "delta_ptr": Part("rows", 1), "sinks_ptr": "sinks", "dsinks_ptr": "dsinks",
         "kept": "kept"},
        {"batches": s.batch, "heads": s.heads, "rows": b.q_blocks * b.block_m}, {"BLOCK": 1024},
    )  # fmt: skip


def _reasons(call: _Call) -> tuple[str, ...]:
    s, b = call.s, call.b
    if call.narrow:
        keys = b.window.left + b.window.right + 1
        return (f"a window of {keys} keys: all queries that see a block of 64 keys are loaded at once",)
    found = [f"tiles of {b.block_n} keys meet blocks of {b.block_m} queries, {call.stages()} in flight"]
    found += [call.why] if call.why else []
    if b.rest:
        found.append(f"products have {64 + b.rest} of the tile's {b.wide} columns")
    if b.apart:
        found.append(_APART)
        if {"REST", "V_REST"} & call.columns().keys():
            found.append("tiles of 192 columns are made of 128 and 64: none is padded to 256")
    if s.gradients_fp32:
        found.append(_FP32)
    if call.group_parts > 1:
        found.append(f"a group's query heads in {call.group_parts} parts with tiles of their own, which are added")
    if s.packed:
        found.append("documents: a table of tiles, the most work first, made on the device from cu_seqlens")
    return (*found, *call.order.reasons(s))
