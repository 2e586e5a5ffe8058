"""The plan of attention's forward on Hopper: persistent CTAs, and narrow windows."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any, NamedTuple

from tilesmith.engine.launcher import cdiv
from tilesmith.ops.attn.plan import smem
from tilesmith.ops.attn.plan.configs import HopperConfig
from tilesmith.ops.attn.plan.joined import (
    joined_values,
    joins,
    joins_both,
    key_parts,
    value_parts,
    why_apart,
    why_not_both,
)
from tilesmith.ops.attn.plan.model import Buffer, Counter, Plan, Step, Tile, same
from tilesmith.ops.attn.plan.shape import Shape, Window, columns, is_narrow, window_of
from tilesmith.ops.attn.plan.tables import (
    APART_TILES,
    FORWARD_L2,
    FORWARD_TILES,
    JOINED_TILES,
    STREAM_K_L2,
    STREAM_K_PART,
    STREAM_K_STEPS,
    STREAM_K_STEPS_ALONE,
    TileTime,
)
from tilesmith.ops.attn.schedule import (
    NEAR,
    even_makespan,
    placed_steps,
    run_of,
    seen_steps,
    stream_k_ctas,
    tile_heads,
    tile_heads_of,
    tile_heads_times,
    tiles_time,
    window_steps,
)

CHUNK = 16  # tiles that a CTA of the kernels that make tables finds places for at once
TABLE_SPAN = 256
WIDE_STAGES = 5  # tiles of 64 keys and 128 columns, as many as shared memory holds beside queries and values
WINDOW_RUNS = (1, 2, 4, 8, 16, 32, 64)
NO_KEYS = "no query sees a key: nothing is launched"


class Tables(NamedTuple):
    """What describes tiles that differ from head to head or from document to document: the steps that make it and its
    buffers. blocks: how many tiles of a head there may be."""

    blocks: int
    steps: tuple[Step, ...] = ()
    scratch: tuple[Buffer, ...] = ()
    table: str | None = None
    lists: str | None = None


class Division(NamedTuple):
    """How many tiles have a CTA of their own, and among how many CTAs the steps of the others are divided."""

    undivided: int
    ctas: int
    reason: str = ""


def table_parts(most: int, documents: int) -> int:
    """CTAs a document, where `most` tiles are to be placed: one for each chunk, unless there are many documents."""
    return max(1, min(cdiv(most, CHUNK), 256 // (documents + 2)))


def query_tables(s: Shape, window: Window, block_m: int) -> Tables:
    """The tiles of packed documents' queries: as many as there may be, whatever the lengths are."""
    most = s.tokens // block_m + s.documents + 1
    width = s.keys
    if window.hides_left:
        width = min(s.keys, window.left + block_m + (window.right if window.hides_right else s.keys))
    step = Step(
        "query_tiles_kernel", (s.documents + 1, table_parts(most, s.documents)),
        {"cu_q_ptr": "cu_q", "cu_k_ptr": "cu_k", "lengths_ptr": "lengths", "table_ptr": "query_table"},
        {"documents": s.documents, "tokens": s.tokens, "keys": s.keys, "width": width},
        {"RIGHT": window.hides_right, "LEFT": window.hides_left, "BLOCK": block_m, "CHUNK": CHUNK, "SPAN": TABLE_SPAN,
         "num_warps": 4},
    )  # fmt: skip
    return Tables(most, (step,), (Buffer("query_table", (most + 1, 8), "int32"),), "query_table")


def _list_tables(s: Shape, causal: bool, block_m: int, block_n: int) -> Tables:
    """The tiles of block lists, and without a causal mask their order, the longest lists first."""
    blocks = cdiv(s.tokens, block_m)
    tiles = s.list_rows * s.lists * blocks
    step = Step(
        "list_tiles_kernel", (tiles,),
        {"offsets_ptr": "list_offsets", "indices_ptr": "list_indices", "table_ptr": "list_table",
         "order_ptr": "list_order", "offsets_strides": "list_strides"},
        {"heads": s.lists, "tiles": blocks, "tokens": s.tokens, "keys": s.keys},
        {"CAUSAL": causal, "BLOCK_M": block_m, "BLOCK_N": block_n, "LIST_Q": s.block_q, "LIST_K": s.block_k,
         "num_warps": 4},
    )  # fmt: skip
    scratch = Buffer("list_table", (tiles, 4), "int32"), Buffer("list_order", (tiles,), "int32")
    return Tables(blocks, (step,), scratch, "list_order", "list_table")


def heads_together(s: Shape, l2: int, alike: bool) -> int:
    """How many heads of q to work on together. alike: all tiles have the same work.

    Then it is those that share keys, which so come when they are needed. Else so many that their keys and values stay
    in a part of the L2 cache, and in sections of one size, since the short tiles of the last one fill the end.
    """
    if alike:
        return s.group
    rows = s.batch * s.kv_heads
    fitting = max(1, int(l2 * FORWARD_L2.value) // (s.keys * s.dim * 2 * s.kv_bytes))
    return cdiv(rows, max(1, rows // fitting)) * s.group


def divided(s: Shape, tiles: int, block_m: int, block_n: int, right: int | None, arch: Any) -> Division:
    """Which of so many tiles are divided by stream-K. right: how many keys behind its own a query sees, None: nothing
    is masked. With a mask tiles are divided only where there are fewer than SMs, since the counter evens out more of
    them. As CTAs meet different keys then, those of the tiles' heads must stay in the L2 cache."""
    blocks, steps = cdiv(s.tokens, block_m), cdiv(s.keys, block_n)
    rest, least = tiles % arch.sms, STREAM_K_STEPS
    if right is None:
        met, work = cdiv(rest, blocks * s.group), rest * steps
        if tiles == rest <= arch.sms // 2:
            least = STREAM_K_STEPS_ALONE
    elif tiles < arch.sms:
        met = s.batch * s.kv_heads
        work = s.rows * sum(seen_steps(s.tokens, s.keys, block_m, block_n, None, right))
    else:
        return Division(tiles, 0, "the counter evens out tiles of a causal mask: none is divided")
    ctas = stream_k_ctas(rest, work, steps, least.value, arch.sms, own=right is None)
    if not ctas:
        return Division(tiles, 0, f"stream-K would save the last CTAs fewer than {least.value} steps: none is divided")
    if 0 < arch.l2 * STREAM_K_L2.value < met * s.keys * (s.dim + s.value_dim) * s.kv_bytes:
        return Division(tiles, 0, "keys that stream-K's CTAs read at a time would leave the L2 cache: none is divided")
    whole = f"{tiles - rest} tiles in whole rounds, " if tiles > rest else ""
    return Division(tiles - rest, ctas, f"{whole}{rest} tiles in {ctas} equal runs of blocks of keys (stream-K)")


def _division(s: Shape, config: HopperConfig, tiles: int, window: Window, wide: int, arch: Any) -> Division:
    kind, whole = (config.consumers, wide), not (s.packed or s.lists or window.hides_left or s.dropout)
    served = kind == (2, 128) or (kind == (3, 64) and not window.hides_right)
    if whole and served and (config.q_stages == 1 or config.block_n == 128):
        right = window.right if window.hides_right else None
        return divided(s, tiles, 64 * config.consumers, config.block_n, right, arch)
    return Division(tiles, 0, "")


def _open_tiles(s: Shape, window: Window | None = None) -> dict[HopperConfig, TileTime]:
    """The tiles whose times are known, among which a model chooses where a configuration leaves them open; those whose
    keys are no power of two where a window is given that has them."""
    made = max(sum(key_parts(s.dim)), sum(value_parts(s.value_dim)))
    more = JOINED_TILES[made] if window is not None and not why_not_both(s, window) else {}
    if made in APART_TILES and not joins(s.value_dim):
        return APART_TILES[made] | more
    if made == 80 and s.value_dim <= 72 and not s.softcap:  # a softcap spills in 192 x 128
        made = 72
    narrow_values = 128 < made <= 192 and s.value_dim <= 128
    return FORWARD_TILES[192 if narrow_values else made if made <= 128 else 256] | more


def _time_of(s: Shape, config: HopperConfig) -> TileTime | None:
    """What is known of a configuration's tiles."""
    kind = config.consumers, config.block_n
    return next((time for tiles, time in _open_tiles(s).items() if (tiles.consumers, tiles.block_n) == kind), None)


def _predicted(s: Shape, config: HopperConfig, time: TileTime, window: Window, wide: int, arch: Any) -> float:
    """What a call takes in these tiles, in µs."""
    if window.hides_left:
        heads, _ = _tile_heads(s, config, window, wide, arch)
        right, each = window.right if window.hides_right else None, time.under(window.hides_right)
        tiling = 64 // heads * config.consumers, config.block_n, window.left, right, config.consumers, config.stages
        steps = window_steps(s.tokens, s.keys, *tiling)
        return tiles_time(steps, s.rows // heads, arch.sms, each.start, each.tile, each.step)
    times = _head_times(s, config, time, window, wide, arch)
    return times[tile_heads_of(times)]


def _head_times(
    s: Shape, config: HopperConfig, time: TileTime, window: Window, wide: int, arch: Any
) -> dict[int, float]:
    """The predicted times of a call without a left edge, in µs, by the query heads that share keys whose queries one
    tile holds: the last tile of few positions is cut less."""
    many = [1] if _of_one_head(s) or joins_both(config) else tile_heads(s.group)
    return {heads: _head_time(s, config, time, window, wide, heads, arch) for heads in many}


def _head_time(
    s: Shape, config: HopperConfig, time: TileTime, window: Window, wide: int, heads: int, arch: Any
) -> float:
    """`_head_times` of so many heads."""
    right, one = window.right if window.hides_right else None, heads == 1 and _one_mask(s, config, window)
    time, positions = time.under(window.hides_right, one, heads), 64 // heads
    steps = seen_steps(s.tokens, s.keys, positions * config.consumers, config.block_n, None, right)
    tiles = len(steps) * s.rows // heads
    division = _division(s, config, tiles, window, wide, arch) if heads == 1 else Division(tiles, 0)
    if not division.ctas:
        placed: Sequence[float] = steps
        if right is not None:
            skip, half = config.block_n * heads <= 64 * (config.consumers - 1), one and config.block_n == 128
            placed = placed_steps(s.tokens, s.keys, config.consumers, positions, config.block_n, right, skip, half)
        return tiles_time(placed, s.rows // heads, arch.sms, time.start, time.tile, time.step)
    left, work = tiles - division.undivided, s.rows * sum(steps) - division.undivided * steps[0]
    parts = 1 if division.ctas % left == 0 else 2  # of tiles that a CTA has
    rounds = even_makespan(division.undivided, steps[0] * time.step, arch.sms, time.tile)
    return time.start + rounds + time.tile + cdiv(work, division.ctas) * time.step + parts * STREAM_K_PART.value


def _one_mask(s: Shape, config: HopperConfig, window: Window) -> bool:
    """Whether the 64 keys on a consumer's diagonal lie in its last block, so that no other needs a mask (ONE_MASK)."""
    shift, whole = s.keys - s.tokens, not (window.hides_left or s.packed or s.lists)
    if config.consumers == 1 or config.block_n <= 64 * (config.consumers - 1):  # SKIP: each begins with its own last
        return s.causal and whole and shift % 64 == 0
    # two consumers begin with the same block of 128 keys, where tiles begin at multiples of 128 (`Walk.placed`)
    return s.causal and whole and config.block_n == 128 and shift % 128 == 0 and -s.tokens % 128 < 64


def _chosen_tiles(s: Shape, config: HopperConfig, window: Window, wide: int, arch: Any) -> tuple[HopperConfig, str]:
    """The tiles that a configuration leaves open, and why these."""
    found = {t: _predicted(s, t, time, window, wide, arch) for t, time in _open_tiles(s, window).items()}
    times = {t: us for t, us in found.items() if t.consumers == config.consumers} or found
    chosen = next(tiles for tiles, time in times.items() if time <= NEAR * min(times.values()))
    told = ", ".join(f"{64 * t.consumers} x {t.block_n} {us:.0f} µs" for t, us in times.items())
    return chosen._replace(
        stages=config.stages or chosen.stages, heads=config.heads
    ), f"predicted times of tiles on an H200: {told}"


def _within_lists(s: Shape, config: HopperConfig) -> HopperConfig:
    """Tiles that block lists are made of: two consumers, blocks that divide theirs."""
    if config.consumers != 2:
        # with one tile of queries 1,190 us for 1,152 (H200, head dim 64, 16k, a quarter of the blocks)
        tiles = _open_tiles(s)
        block_n = next(iter(tiles)).block_n
        two = (t for t in tiles if (t.consumers, t.block_n) == (2, block_n))
        config = next(two, HopperConfig(2, 128, 4, 2))
    if config.block_n > 64 and s.block_k % 128:
        config = config._replace(block_n=64, stages=2 * config.stages, v_stages=2 * config.v_stages)
    return config


def _of_one_head(s: Shape) -> str:
    """Why a tile holds the queries of one head; empty where it may hold those of several."""
    why = {
        "documents end inside a tile": s.packed, "block lists name keys by the head": s.lists > 0,
        "dropout draws by the head": s.dropout, "out in fp32 is stored by the head": s.out_fp32,
    }  # fmt: skip
    return next((reason for reason, there in why.items() if there), "")


def _tile_heads(s: Shape, config: HopperConfig, window: Window, wide: int, arch: Any) -> tuple[int, str]:
    """How many heads' queries a tile holds, and why."""
    what, time = "window: " if window.hides_left else "", _time_of(s, config)
    if s.group == 1:
        return 1, ""
    if why := _of_one_head(s):
        return 1, f"{what}a tile holds the queries of one head: {why}"
    if config.heads:
        heads = max(n for n in tile_heads(s.group) if config.heads % n == 0)
        return heads, f"{what}a tile holds the queries of {heads} heads, the configuration's {config.heads}"
    rows, right = 64 * config.consumers, window.right if window.hides_right else None
    if window.hides_left:
        tile = config.consumers, config.block_n, config.stages
        times = tile_heads_times(s.rows, s.group, s.tokens, s.keys, window.left, right, tile, arch.sms)
        unit, least = "steps", "fewest"
    elif time is not None:
        times, unit, least = _head_times(s, config, time, window, wide, arch), "µs", "least"
    else:
        return 1, "a tile holds the queries of one head: times of such tiles were not measured"
    heads = tile_heads_of(times)
    told = f"the predicted {unit} by the heads are " + ", ".join(f"{n}: {found:.0f}" for n, found in times.items())
    if heads == 1:
        return 1, f"{what}a tile holds {rows} queries of one head, since {told}"
    held = f"{64 // heads * config.consumers} queries of each of {heads} heads that share keys"
    return heads, f"{what}a tile holds {held}, since {told}: the most heads within 2 % of the {least}"


@lru_cache(maxsize=1024)
def hopper_forward(s: Shape, arch: Any, config: HopperConfig) -> Plan:
    """The forward: one launch of persistent CTAs, before it tables of tiles, behind it stream-K's part."""
    if s.rows * s.tokens * s.keys == 0:
        return Plan("attention", "hopper", reasons=(NO_KEYS,))
    window, wide = window_of(s), max(columns(s.dim), columns(s.value_dim))
    if is_narrow(s, window, wide) and not (s.dropout or s.out_fp32):
        return _narrow(s, arch, config, window)
    if wide > 256:
        return _wide(s, arch, window)
    reasons = []
    if not config.block_n and not s.lists:
        config, why = _chosen_tiles(s, config, window, wide, arch)
        reasons.append(why)
    if joins_both(config):
        return _both_joined(s, arch, config, window, reasons)
    if s.lists:
        within = _within_lists(s, config)
        if within != config:
            reasons.append("block lists: tiles of two consumers whose blocks divide the lists'")
        config = within
    heads, why = _tile_heads(s, config, window, wide, arch)
    block_m = 64 // heads * config.consumers
    tables = Tables(cdiv(s.tokens, block_m))
    if s.packed:
        tables = query_tables(s, window, block_m)
        reasons.append("documents: a table of tiles, the most work first, made on the device from cu_seqlens")
    if s.lists:
        tables = _list_tables(s, window.hides_right, block_m, config.block_n)
    tiles = tables.blocks * s.rows // heads
    division = _division(s, config, tiles, window, wide, arch) if heads == 1 else Division(tiles, 0)
    alike = not (window.hides_left or window.hides_right or s.packed or s.lists)
    together = heads_together(s, arch.l2, alike or (s.lists > 0 and not window.hides_right))
    steps, scratch = list(tables.steps), list(tables.scratch)
    call = _Call(s, arch, config, window, tables, division, together, alike, heads)
    if division.undivided:
        steps.append(_tiles(call))
    if division.ctas:
        consumers, value_wide = config.consumers, sum(value_parts(s.value_dim))
        shape = consumers * (division.ctas + tiles - division.undivided), 64 * (value_wide + 2)
        scratch.append(Buffer("stream_k_parts", shape, "float32"))
        steps.append(_stream_k(call))
    reasons += [walk_reason(together, s, alike), division.reason, why, *_tile_reasons(s, steps, config)]
    reasons += ["out in fp32 is stored from registers"] if s.out_fp32 else []
    return Plan(
        "attention", "hopper", tuple(steps), (64 * config.consumers, config.block_n), config.stages, config.consumers,
        walk_reason(together, s, alike), "stream-K" if division.ctas else "", division.ctas or 1, True,
        tuple(scratch), q_bytes=s.q_bytes, reasons=tuple(filter(None, reasons)),
    )  # fmt: skip


class _Call(NamedTuple):
    s: Shape
    arch: Any
    config: HopperConfig
    window: Window
    tables: Tables
    division: Division
    together: int
    alike: bool
    heads: int

    def sizes(self) -> dict[str, int]:
        s, many = self.s, self.heads
        return {
            "tokens": s.tokens, "keys": s.keys, "heads": s.heads // many, "blocks": self.tables.blocks,
            "rows": s.rows // many, "section": self.together // many, "right": self.window.right,
            "group": s.group // many,
        }  # fmt: skip

    def tensors(self) -> dict[str, Any]:
        squares = 64 // self.heads
        rows, found = {"q": squares, "k": self.config.block_n, "v": self.config.block_n, "out": squares}, {}
        for name, of_keys in (("q", True), ("k", True), ("v", False), ("out", False)):
            wide, rest = key_parts(self.s.dim) if of_keys else value_parts(self.s.value_dim)
            heads = self.heads if name in ("q", "out") else 1
            part = joined_values(self.s, self.config).part if name == "v" else 0
            found[f"{name}_desc"] = Tile(name, rows[name], self.s.packed, heads, part or (wide if rest else 0))
            if rest and not part:
                found[f"{name}_rest_desc"] = Tile(name, rows[name], self.s.packed, heads, rest)
        if self.s.out_fp32:
            found.pop("out_rest_desc", None)
            found |= {"out_desc": None, "out_ptr": "out", **same("out_strides")}
        return found | {"lse_ptr": "lse", "sinks_ptr": "sinks", "inner": "inner", "scale": "outer"}

    def kinds(self) -> dict[str, Any]:
        s, config = self.s, self.config
        (wide, rest), (value_wide, value_rest) = key_parts(s.dim), value_parts(s.value_dim)
        rests = {name: n for name, n in (("REST", rest), ("V_REST", value_rest)) if n}
        joined = joined_values(s, config)
        rests |= {"V_PART": joined.part, "V_COLS": joined.columns} if joined.part else {}
        return {
            "WHOLE": self.alike and s.keys % config.block_n == 0, "RIGHT": self.window.hides_right,
            "BN": config.block_n, "D": wide, "DV": value_wide, "CONSUMERS": config.consumers,
            "STAGES": config.stages, "V_STAGES": config.v_stages or config.stages, "SOFTCAP": s.softcap,
            "num_warps": 4, **rests, **({"DIM_V": s.value_dim} if s.out_fp32 else {}),
        }  # fmt: skip


def _tiles(call: _Call) -> Step:
    """The persistent CTAs, which take tiles from a counter."""
    s, config, window = call.s, call.config, call.window
    ctas = min(call.arch.sms, call.division.undivided)
    dynamic = ctas < call.division.undivided
    constants = {
        "LEFT": window.hides_left, "DYNAMIC": dynamic, "Q_STAGES": config.q_stages, "LIST_K": s.block_k,
        "ONE_MASK": call.heads == 1 and _one_mask(s, config, window),
        "STREAM_K": call.division.ctas > 0, **({"HEADS": call.heads} if call.heads > 1 else {}), **call.kinds(),
        **dropout_constants(s),
    }  # fmt: skip
    tensors = call.tensors() | {
        "counter": Counter() if dynamic else None, "table": call.tables.table, "lists": call.tables.lists,
        "indices": "list_indices" if s.lists else None, **(same("dropout") if s.dropout else {}),
    }  # fmt: skip
    lists = {"list_share": 1, "list_rows": 0}
    if s.lists:
        lists = {
            "list_share": s.heads // s.lists,
            "list_rows": call.tables.blocks * s.lists if s.list_rows > 1 else 0,
        }
    return Step(
        "attention_fwd_kernel", (ctas,), tensors, call.sizes() | {"left": window.left} | lists, constants,
        smem.forward(constants, s.q_bytes),
    )  # fmt: skip


def _stream_k(call: _Call) -> Step:
    """What whole rounds leave over, in equal runs of blocks of keys."""
    undivided = call.division.undivided
    tensors = call.tensors() | {
        "parts_ptr": "stream_k_parts", "met_ptr": Counter(call.config.consumers * call.arch.sms),
    }  # fmt: skip
    constants = {"BEHIND": undivided > 0, **({"launch_pdl": True} if undivided else {}), **call.kinds()}
    return Step(
        "attention_fwd_stream_k_kernel", (call.division.ctas,), tensors, call.sizes() | {"whole_tiles": undivided},
        constants, smem.forward(constants | {"Q_STAGES": 1}, call.s.q_bytes, counted=False),
    )  # fmt: skip


def dropout_constants(s: Shape) -> dict[str, Any]:
    """RARE, SHORT and EVEN of the kernels with dropout: whether the threshold is an fp16 number, counters fit 32 bits,
    and tiles begin at multiples of 8 keys."""
    if not s.dropout:
        return {}
    short = s.rows * s.tokens * s.keys <= 2**35
    return {"DROPOUT_FORM": (s.rare_dropout, short, s.keys % 8 == 0 and s.window_left < 0 and not s.packed)}


def walk_reason(together: int, s: Shape, alike: bool) -> str:
    """In which order tiles are taken."""
    if alike:
        return f"heads that share keys come together, {together} of {s.rows}: all tiles have the same work"
    return f"sections of {together} of {s.rows} heads, whose keys and values fit the L2 cache; the longest tiles first"


def _tile_reasons(s: Shape, steps: list[Step], config: HopperConfig) -> list[str]:
    main = next((step for step in steps if step.kernel == "attention_fwd_kernel"), steps[-1])
    reasons = [f"tiles of {64 * config.consumers} queries and {config.block_n} keys, {config.stages} in flight"]
    for wide, rest, what in (("D", "REST", "queries and keys"), ("DV", "V_REST", "values and results")):
        if rest in main.constants:
            parts = main.constants[wide], main.constants[rest]
            reasons.append(
                f"tiles of {sum(parts)} columns of {what} are made of {parts[0]} and {parts[1]}: none is padded to "
                f"{2 * parts[0]}"
            )
    if "V_COLS" in main.constants:
        reasons.append(f"values of {main.constants['V_COLS']} columns as one product a step of 16 keys")
    elif "V_REST" in main.constants:
        reasons.append("values as two products a step of 16 keys: " + why_apart(s.value_dim))
    if main.constants.get("ONE_MASK"):
        reasons.append("tokens and keys lie so that the diagonal crosses one block of a consumer: no other has a mask")
    return reasons


def _both_joined(s: Shape, arch: Any, config: HopperConfig, window: Window, reasons: list[str]) -> Plan:
    """Tiles whose keys are no power of two. Raises ValueError for a call that they do not serve."""
    if why := why_not_both(s, window):
        raise ValueError(f"tiles of {config.block_n} keys do not serve {why}")
    (wide, rest), (value_wide, value_rest) = key_parts(s.dim), value_parts(s.value_dim)
    blocks = cdiv(s.tokens, 64 * config.consumers)
    ctas, alike = min(arch.sms, blocks * s.rows), not window.hides_right
    together = heads_together(s, arch.l2, alike)
    constants = {
        "RIGHT": window.hides_right, "WHOLE": alike and s.keys % config.block_n == 0,
        "DYNAMIC": ctas < blocks * s.rows, "BN": config.block_n, "D": wide, "DV": value_wide,
        "CONSUMERS": config.consumers, "STAGES": config.stages, "REST": rest, "V_REST": value_rest,
        "V_COLS": cdiv(s.value_dim, 8) * 8, "num_warps": 4,
    }  # fmt: skip
    parts = {
        "q_desc": (64, wide), "q_rest_desc": (64, rest), "k_desc": (config.block_n, wide),
        "k_rest_desc": (config.block_n, rest), "v_desc": (config.block_n, value_rest), "out_desc": (64, value_wide),
        "out_rest_desc": (64, value_rest),
    }  # fmt: skip
    tiles = {name: Tile(name.split("_")[0], rows, columns=many) for name, (rows, many) in parts.items()}
    step = Step(
        "attention_fwd_joined_kernel", (ctas,),
        {**tiles, "lse_ptr": "lse", "sinks_ptr": "sinks", "counter": Counter() if constants["DYNAMIC"] else None,
         "scale": "outer"},
        {"tokens": s.tokens, "keys": s.keys, "heads": s.heads, "blocks": blocks, "rows": s.rows, "section": together,
         "right": window.right, "group": s.group},
        constants, smem.forward_joined(constants, s.q_bytes),
    )  # fmt: skip
    walk = walk_reason(together, s, alike)
    return Plan(
        "attention", "hopper", (step,), (64 * config.consumers, config.block_n), config.stages, config.consumers, walk,
        q_bytes=s.q_bytes, reasons=(*reasons, walk, *_tile_reasons(s, [step], config)),
    )  # fmt: skip


def _narrow(s: Shape, arch: Any, config: HopperConfig, window: Window) -> Plan:
    """A window so narrow that all keys of a tile are loaded at once."""
    run = run_of(WINDOW_RUNS, 1, cdiv(s.tokens, 128), s.rows, arch.sms)
    blocks = cdiv(s.tokens, 128 * run)
    tiles, stages = blocks * s.rows, max(config.stages, 4)
    ctas = min(arch.sms, tiles)
    constants = {
        "DYNAMIC": ctas < tiles, "D": columns(s.dim), "DV": columns(s.value_dim), "STAGES": stages,
        "Q_STAGES": config.q_stages, "SOFTCAP": s.softcap, "num_warps": 4,
    }  # fmt: skip
    together = heads_together(s, arch.l2, False)
    step = Step(
        "attention_window_kernel", (ctas,),
        {**{f"{name}_desc": Tile(name, 64) for name in ("q", "k", "v", "out")}, "lse_ptr": "lse", "sinks_ptr": "sinks",
         "counter": Counter() if ctas < tiles else None, "inner": "inner", "scale": "outer"},
        {"tokens": s.tokens, "keys": s.keys, "heads": s.heads, "blocks": blocks, "rows": s.rows, "section": together,
         "left": window.left, "right": window.right, "group": s.group, "run": run},
        constants, smem.forward(constants | {"CONSUMERS": 2, "BN": 64, "V_STAGES": stages}, s.q_bytes),
    )  # fmt: skip
    return Plan(
        "attention", "hopper", (step,), (128, 64), stages, 2, walk_reason(together, s, False), q_bytes=s.q_bytes,
        reasons=(
            f"a window of {window.left + window.right + 1} keys: all keys of a tile of 128 queries are loaded at once",
            f"a CTA makes {run} neighbouring tiles, so that few keys are loaded twice and no SM idles at the end",
        ),
    )  # fmt: skip


def _wide(s: Shape, arch: Any, window: Window) -> Plan:
    """Head dims above 256: the columns of a result are halved between two consumers."""
    blocks = cdiv(s.tokens, 64)
    tiles = blocks * s.rows
    ctas = min(arch.sms, tiles)
    alike = not (window.hides_left or window.hides_right)
    together = heads_together(s, arch.l2, alike)
    constants = {
        "LEFT": window.hides_left, "RIGHT": window.hides_right, "WHOLE": alike and s.keys % 64 == 0,
        "DYNAMIC": ctas < tiles, "STAGES": WIDE_STAGES, "SOFTCAP": s.softcap, "num_warps": 4,
    }  # fmt: skip
    step = Step(
        "attention_fwd_wide_kernel", (ctas,),
        {"q_desc": Tile("q", 64, columns=256), "k_desc": Tile("k", 64, columns=128),
         "v_desc": Tile("v", 64, columns=256), "out_desc": Tile("out", 64, columns=256), "lse_ptr": "lse",
         "sinks_ptr": "sinks", "counter": Counter() if ctas < tiles else None, "inner": "inner", "scale": "outer"},
        {"tokens": s.tokens, "keys": s.keys, "heads": s.heads, "blocks": blocks, "rows": s.rows, "section": together,
         "left": window.left, "right": window.right, "group": s.group},
        constants, smem.forward_wide(constants, s.q_bytes),
    )  # fmt: skip
    return Plan(
        "attention", "hopper", (step,), (64, 64), WIDE_STAGES, 2, walk_reason(together, s, alike), q_bytes=s.q_bytes,
        reasons=(
            walk_reason(together, s, alike),
            "tiles of 64 queries and 64 keys: 256 columns of a result fill the registers of a consumer",
        ),
    )  # fmt: skip
