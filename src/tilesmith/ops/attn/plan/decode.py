"""The plans of attention's forward with the keys split over CTAs: Hopper's three, and Triton's."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from operator import itemgetter
from typing import Any, NamedTuple

from tilesmith.engine.launcher import cdiv, next_power_of_2
from tilesmith.ops.attn.plan import smem
from tilesmith.ops.attn.plan.configs import ClusterConfig, LatentConfig, SplitConfig, SplitKvConfig
from tilesmith.ops.attn.plan.hopper_forward import NO_KEYS
from tilesmith.ops.attn.plan.model import Buffer, Plan, Step, Tile, same
from tilesmith.ops.attn.plan.shape import Shape, columns, key_tiles, window_of
from tilesmith.ops.attn.plan.tables import (
    ALONE_KEYS,
    CLUSTER_BLOCKS,
    CLUSTER_ROOM,
    CLUSTERS,
    FEW_ROWS,
    alone_tiles,
    cluster_tile,
)
from tilesmith.ops.attn.schedule import COMBINE, SM_BANDWIDTH, CtaTile, read_time, splits_of

ATTAINABLE = 0.96  # of the memory's bandwidth
SM_SHARE = 35.0  # GB/s of an SM when all are busy, where the bandwidth is not known


class Clusters(NamedTuple):
    """How many clusters of 16, 8, 4 and 2 CTAs a device runs at a time: the driver is asked, since a cluster stays
    within a group of SMs (GPC), whose sizes differ from one to the next."""

    of_16: int
    of_8: int
    of_4: int
    of_2: int


def parts_scratch(s: Shape, splits: int, dtype: str) -> tuple[Buffer, ...]:
    """Room for what each split of the keys gives."""
    if splits == 1:
        return ()
    rows = splits, s.batch, s.heads, s.tokens
    return Buffer("part_out", (*rows, s.value_dim), dtype), Buffer("part_lse", rows, "float32")


def combine_few(s: Shape, arch: Any, splits: int) -> Step | None:
    """The kernel that combines splits behind a Hopper kernel; Triton's where rows are many."""
    if splits == 1:
        return None
    rows = s.rows * s.tokens
    if rows > FEW_ROWS.value * arch.sms and arch.kind != "cpu":  # there kernels are compiled, not run
        return combine(s, splits, True)
    wide = columns(s.value_dim)
    return Step(
        "attention_combine_few_kernel", (rows,), *_combine_arguments(s, splits),
        {"DIM_V": s.value_dim, "DV": wide, "SPLITS": max(4, next_power_of_2(splits)), "num_warps": wide // 32,
         "launch_pdl": True},
    )  # fmt: skip


def combine(s: Shape, splits: int, chained: bool) -> Step:
    """Triton's kernel that combines splits: one warp a row, four above 256 columns; a thread has its columns of all
    splits of a chunk."""
    block_dv = next_power_of_2(max(16, s.value_dim))
    warps = 4 if block_dv > 256 else 1
    constants = {
        "DIM_V": s.value_dim, "BLOCK_DV": block_dv,
        "CHUNK": min(4096 * warps // max(128, block_dv), next_power_of_2(splits)),
        "CHAINED": chained, "num_warps": warps, **({"launch_pdl": True} if chained else {}),
    }  # fmt: skip
    return Step("_attention_combine_kernel", (s.rows * s.tokens,), *_combine_arguments(s, splits), constants)


def _combine_arguments(s: Shape, splits: int) -> tuple[dict, dict]:
    tensors = {"part_out_ptr": "part_out", "part_lse_ptr": "part_lse", "sinks_ptr": "sinks", "out_ptr": "out",
               "lse_ptr": "lse", **same("out_row", "out_head", "out_token")}  # fmt: skip
    return tensors, {"rows": s.rows * s.tokens, "tokens": s.tokens, "heads": s.heads, "splits": splits}


def unit_heads(group: int, tokens: int) -> int:
    """How many heads of a group make a square of 64 rows with 64 over as many tokens: no more than fill it."""
    heads = group & -group
    return max(1, min(heads, 64 // min(64, next_power_of_2(tokens))))


def unit_count(group: int, tokens: int) -> int:
    """How many squares of 64 rows (`unit_heads`) the queries of a kv head are."""
    heads = unit_heads(group, tokens)
    return cdiv(tokens, 64 // heads) * (group // heads)


def scattered(group: int, tokens: int) -> bool:
    """Whether the queries of a kv head lie in more than twice as many squares of 64 rows as they would fill: those of
    few tokens and a group of heads without a large power of 2. Each square reads all keys and multiplies 64 rows, where
    Triton's kernel, whose products are about half as fast, packs rows of any heads."""
    return unit_count(group, tokens) > 2 * cdiv(group * tokens, 64)


@lru_cache(maxsize=1024)
def hopper_split(s: Shape, arch: Any, config: SplitKvConfig) -> Plan:
    """One pass over the keys in as many splits as fill the device, and a second one that combines them."""
    if s.rows * s.tokens * s.keys == 0:
        return Plan("attention", "hopper_split", reasons=(NO_KEYS,))
    window = window_of(s)
    hides_right = window.hides_right and window.right < s.tokens - 1  # one token sees the last key
    heads = unit_heads(s.group, s.tokens)
    unit_tokens, units = 64 // heads, s.group // heads
    tiles = cdiv(cdiv(s.tokens, unit_tokens) * units, config.consumers)
    sms, kv_rows = max(1, arch.sms), s.batch * s.kv_heads
    tile_tokens = unit_tokens * cdiv(config.consumers, units)
    seen = s.keys
    if window.hides_left:
        seen = min(s.keys, window.left + tile_tokens + (window.right if hides_right else s.keys))
    splits = config.splits or splits_of(
        kv_rows * tiles, cdiv(seen, config.block_n), sms,
        8 * 64 * config.consumers * s.value_dim / (config.block_n * (s.dim + s.value_dim) * s.kv_bytes),
    )  # fmt: skip
    runs = kv_rows * tiles * splits
    alone = not s.page and not window.hides_left and s.kv_bytes == s.q_bytes and runs <= sms
    piece = min(config.block_n, s.page & -s.page) if s.page else config.block_n
    constants = {
        "GROUP": s.group, "HEADS": heads, "LEFT": window.hides_left, "RIGHT": hides_right, "BN": config.block_n,
        "PAGE": s.page, "PIECE": piece, "D": columns(s.dim), "DV": columns(s.value_dim),
        "CONSUMERS": config.consumers, "STAGES": config.stages, "SOFTCAP": s.softcap, "CHAINED": splits > 1,
        "APART": config.apart, "ALONE": alone, "num_warps": 4,
    }  # fmt: skip
    step = Step(
        "attention_split_kv_kernel", (tiles * splits, s.kv_heads, s.batch) if alone else (min(sms, runs),),
        {**same("k_desc", "v_desc", "k_scale", "v_scale", "between_k", "between_v", "inner"),
         "q_desc": Tile("q", unit_tokens, heads=heads), "scale": "outer",
         "out_desc": Tile("part_out" if splits > 1 else "out", unit_tokens, heads=heads),
         "lse_ptr": "part_lse" if splits > 1 else "lse", "sinks_ptr": "sinks" if splits == 1 else None,
         "lengths_ptr": "lengths", "pages_ptr": "page_table"},
        {"lse_split": s.rows * s.tokens, "row_pages": s.row_pages, "tokens": s.tokens, "keys": s.keys,
         "rows": kv_rows, "kv_heads": s.kv_heads, "tiles": tiles, "splits": splits, "inverse": 1 / splits,
         "left": window.left, "right": window.right},
        constants, smem.split_kv(constants, s.q_bytes, s.kv_bytes == 1),
    )  # fmt: skip
    second = combine_few(s, arch, splits)
    reasons = [
        f"{kv_rows * tiles} tiles of {64 * config.consumers} pairs of a token and a head: keys in {splits} splits",
        "each split has a CTA of its own" if alone else "persistent CTAs take every so many-th split",
        _combine_reason(second),
    ]  # fmt: skip
    return Plan(
        "attention", "hopper_split", (step, *([second] if second else [])), (64 * config.consumers, config.block_n),
        config.stages, config.consumers, "tiles of the same keys are neighbours", "split-KV", splits, True,
        parts_scratch(s, splits, "q"), numbers={"unit_tokens": unit_tokens, "piece": piece},
        q_bytes=s.q_bytes, reasons=tuple(filter(None, reasons)),
    )  # fmt: skip


def _combine_reason(step: Step | None) -> str:
    if step is None:
        return ""
    few = step.kernel == "attention_combine_few_kernel"
    return f"{step.ctas} output rows are {'few' if few else 'many'} for the device, by which their kernel is chosen"


@lru_cache(maxsize=1024)
def hopper_latent(s: Shape, arch: Any, config: LatentConfig) -> Plan:
    """One pass over keys whose first columns are the values, in as many splits as fill the device, and a second one
    that combines them."""
    if s.rows * s.tokens * s.keys == 0:
        return Plan("attention", "hopper_latent", reasons=(NO_KEYS,))
    heads, tiles = unit_heads(s.group, s.tokens), unit_count(s.group, s.tokens)
    unit_tokens, kv_rows = 64 // heads, s.batch * s.kv_heads
    block_d, rest, _ = key_tiles(s.dim, s.value_dim, True)
    splits = config.splits or splits_of(
        kv_rows * tiles, cdiv(s.keys, config.block_n), max(1, arch.sms),
        8 * 64 * s.value_dim / (config.block_n * s.dim * s.kv_bytes),
    )  # fmt: skip
    window = window_of(s)
    constants = {
        "GROUP": s.group, "HEADS": heads, "RIGHT": window.hides_right and window.right < s.tokens - 1,
        "BN": config.block_n, "PAGE": s.page, "D": block_d, "REST": max(64, rest), "STAGES": config.stages,
        "CHAINED": splits > 1, "num_warps": 4,
    }  # fmt: skip
    step = Step(
        "attention_latent_kernel", (tiles * splits, s.kv_heads, s.batch),
        {**same("k_desc", "k_rest_desc", "between_k"), "scale": "outer",
         "q_desc": Tile("q", unit_tokens, heads=heads, columns=block_d),
         "q_rest_desc": Tile("q", unit_tokens, heads=heads, columns=constants["REST"]),
         "out_desc": Tile("part_out" if splits > 1 else "out", unit_tokens, heads=heads, columns=block_d),
         "lse_ptr": "part_lse" if splits > 1 else "lse", "sinks_ptr": "sinks" if splits == 1 else None,
         "lengths_ptr": "lengths", "pages_ptr": "page_table"},
        {"lse_split": s.rows * s.tokens, "row_pages": s.row_pages, "tokens": s.tokens, "keys": s.keys,
         "rows": kv_rows, "kv_heads": s.kv_heads, "tiles": tiles, "splits": splits, "inverse": 1 / splits,
         "right": window.right},
        constants, smem.latent(constants, s.q_bytes),
    )  # fmt: skip
    second = combine_few(s, arch, splits)
    reasons = (
        f"{kv_rows * tiles} tiles of 64 pairs of a token and a head: keys in {splits} splits",
        "values are the first columns of the keys and are not loaded",
        _combine_reason(second),
    )
    return Plan(
        "attention", "hopper_latent", (step, *([second] if second else [])), (64, config.block_n), config.stages, 2,
        "tiles of the same keys are neighbours", "split-KV", splits, True, parts_scratch(s, splits, "q"),
        q_bytes=s.q_bytes, reasons=tuple(filter(None, reasons)),
    )  # fmt: skip


def division(heads: int, blocks: int, arch: Any, clusters: Clusters) -> tuple[int, int]:
    """Among how many CTAs of a cluster, and how many clusters, the blocks of keys of each kv head are divided.
    heads: kv heads of all batch rows.

    One cluster a head, as large as lets all run at once, where that keeps half of the device busy. Clusters of 16 take
    their keys through few groups of SMs: beyond a few blocks they lose to CTAs alone whose parts a second kernel
    combines (`CLUSTER_BLOCKS`).
    """
    parts = next((size for size, room in zip((16, 8, 4, 2), clusters) if room >= heads), 1)
    if parts == 16 and blocks > CLUSTER_BLOCKS.value:
        return 1, 1 << (max(1, min(arch.sms // heads, blocks // 2)).bit_length() - 1)
    return min(parts, next_power_of_2(blocks)), 1


def clusters_by_table(arch: Any) -> Clusters:
    """Clusters that run at once where the driver cannot be asked: known ones, else as many as there are SMs for."""
    return Clusters(*CLUSTERS.get(arch.name, (max(1, arch.sms // size) for size in (16, 8, 4, 2))))


def divided_keys(s: Shape, arch: Any, config: ClusterConfig, room: Clusters) -> tuple[ClusterConfig, str]:
    """The configuration with what it leaves to the plan, and why CTAs are alone, if they are."""
    window, heads, dim = window_of(s), s.batch * s.kv_heads, max(s.dim, s.value_dim)
    seen = min(s.keys, window.left + s.tokens) if window.hides_left else s.keys
    tile, sms = cluster_tile(dim), max(1, arch.sms)
    share = ATTAINABLE * arch.bandwidth / (1e9 * sms) or SM_SHARE
    found = config._replace(block_n=config.block_n or tile.block_n, stages=config.stages or tile.stages)
    if config.parts:
        return found, ""
    ragged = s.lengths and s.batch > 1
    together = heads <= room.of_2 and not (ragged and s.keys * heads * dim > CLUSTER_ROOM.value * sms)
    if together:
        parts, splits = division(heads, cdiv(seen, found.block_n), arch, room)
        found = found._replace(parts=parts, splits=splits)
        if parts == 1 or s.lengths:  # of which a call may have few
            return found, ""
    tiles = [x for x in alone_tiles(dim) if config.block_n in (0, x.block_n)]
    tiles = tiles or [CtaTile(found.block_n, found.stages, 1, SM_BANDWIDTH)]
    if ragged:
        chosen, splits = tiles[0], splits_of_ragged(seen, heads, tiles[0].block_n, sms)
        each = cdiv(cdiv(seen, chosen.block_n), splits) * chosen.block_n
        why = f"lengths of batch rows may differ: CTAs alone, which have {each:,} keys at most"
    else:
        size = seen * (s.dim + s.value_dim) * s.kv_bytes / 1024  # KB of a kv head
        chosen, splits, time = alone(heads, seen, size, tiles, sms, share)
        why = f"only {room.of_2} clusters of 2 run at once: CTAs alone, chosen with their tiles by predicted time"
        if together:
            one = CtaTile(found.block_n, found.stages, 1, tiles[0].bandwidth)
            if read_time(heads * parts, size / parts, one, sms, share) <= time:
                return found, ""
            why = "too few CTAs in clusters for the memory's bandwidth: more CTAs alone"
    stages = config.stages or chosen.stages
    return found._replace(block_n=chosen.block_n, stages=stages, parts=1, splits=splits), why


def splits_of_ragged(keys: int, heads: int, block_n: int, sms: int) -> int:
    """Among how many CTAs the keys of a kv head are divided where batch rows may have few of theirs: so many that the
    longest row does not keep the others waiting. heads: kv heads of all batch rows."""
    return min(max(1, cdiv(keys, block_n)), max(cdiv(keys, ALONE_KEYS.value), sms // heads, 1))


def alone(
    heads: int, keys: int, size: float, tiles: Sequence[CtaTile], sms: int, share: float
) -> tuple[CtaTile, int, float]:  # fmt: skip
    """The tile of CTAs that share nothing, among how many of them the keys of a kv head are divided, and their
    predicted time, µs. heads: kv heads of all batch rows. size: KB of a head's keys and values. share: GB/s of an SM
    when all are busy."""

    def time(tile: CtaTile, splits: int) -> float:
        return read_time(heads * splits, size / splits, tile, sms, share) + (COMBINE if splits > 1 else 0)

    made = [(x, n) for x in tiles for n in (1, 2, 4, 8, 16, 32, 64) if n == 1 or n * x.block_n <= keys]
    return min(((*pair, time(*pair)) for pair in made), key=itemgetter(2))


def _number(splits: int, parts: int) -> str:
    if parts == 1:
        return "one CTA" if splits == 1 else f"{splits} CTAs"
    return f"a cluster of {parts} CTAs" if splits == 1 else f"{splits} clusters of {parts} CTAs"


@lru_cache(maxsize=1024)
def hopper_cluster(s: Shape, arch: Any, config: ClusterConfig, clusters: Clusters | None = None) -> Plan:
    """A cluster for each kv head of each batch row, whose CTAs share its keys; CTAs alone where clusters do not fit."""
    if s.rows * s.tokens * s.keys == 0:
        return Plan("attention", "hopper_cluster", reasons=(NO_KEYS,))
    window = window_of(s)
    config, why = divided_keys(s, arch, config, clusters or clusters_by_table(arch))
    parts, splits = config.parts, config.splits
    constants = {
        "GROUP": s.group, "LEFT": window.hides_left, "RIGHT": window.hides_right and window.right < s.tokens - 1,
        "R": 8 if s.group * s.tokens <= 8 else 16, "BN": config.block_n, "DIM": s.dim, "DIM_V": s.value_dim,
        "D": columns(s.dim), "DV": columns(s.value_dim), "PARTS": parts, "STAGES": config.stages,
        "SOFTCAP": s.softcap, "CHAINED": splits > 1, "num_warps": config.num_warps, "cluster": parts,
    }  # fmt: skip
    several = splits > 1
    step = Step(
        "attention_cluster_kernel", (splits * parts, s.kv_heads, s.batch),
        {**same("k_desc", "v_desc", "between_k", "between_v", "inner", "q_strides"), "q_ptr": "q", "scale": "outer",
         "out_ptr": "part_out" if several else "out", "out_split": "part_split" if several else "out_split",
         "out_strides": "part_strides" if several else "out_strides",
         "lse_ptr": "part_lse" if several else "lse", "sinks_ptr": None if several else "sinks",
         "lengths_ptr": "lengths"},
        {"lse_split": s.rows * s.tokens, "tokens": s.tokens, "keys": s.keys, "kv_heads": s.kv_heads,
         "inverse": 1 / (splits * parts), "left": window.left, "right": window.right},
        constants,
    )  # fmt: skip
    second = combine_few(s, arch, splits)
    reasons = [
        f"{s.batch * s.kv_heads} kv heads, each the work of {_number(splits, parts)}",
        why,
        "" if clusters else "the driver was not asked how many clusters run at once",
        _combine_reason(second),
    ]
    return Plan(
        "attention", "hopper_cluster", (step, *([second] if second else [])), (constants["R"], config.block_n),
        config.stages, 0, "a cluster for each kv head", "split-KV" if several else "", splits, True,
        parts_scratch(s, splits, "float32"), q_bytes=s.q_bytes, reasons=tuple(filter(None, reasons)),
    )  # fmt: skip


class Factors(NamedTuple):
    """Layout of quantised keys and values, in a call for Triton's split: whether k's and v's factors differ within a
    CTA, whether v has 8 bits, and of how many elements the strides of q, k and v are multiples."""

    k: bool = False
    v: bool = False
    small_values: bool = False
    unit: int = 8


PLAIN = Factors()


@lru_cache(maxsize=1024)
def triton_split(s: Shape, arch: Any, config: SplitConfig, factors: Factors = PLAIN) -> Plan:
    """One pass over the keys in as many splits as fill the device, and a second one that combines them."""
    if s.rows * s.tokens == 0:
        return Plan("attention", "triton_split", reasons=("there is no query: nothing is launched",))
    tiles, kv_rows = cdiv(s.group * s.tokens, config.block_m), s.batch * s.kv_heads
    block_d, rest, shared = key_tiles(s.dim, s.value_dim, s.shared)
    seen = s.keys
    if s.window_left >= 0:
        seen = min(s.keys, min(s.tokens, config.block_m // s.group + 1) + s.window_left)
    splits = splits_of(
        kv_rows * tiles, cdiv(seen, config.block_n), max(1, arch.sms) * config.per_sm,
        8 * config.block_m * s.value_dim / (config.block_n * (s.dim + (0 if shared else s.value_dim)) * s.kv_bytes),
    )  # fmt: skip
    several = splits > 1
    chained = config.chained and several
    constants = {
        "GROUP": s.group, "DIM": s.dim, "DIM_V": s.value_dim, "BLOCK_M": config.block_m, "BLOCK_N": config.block_n,
        "BLOCK_D": block_d, "BLOCK_DV": next_power_of_2(max(16, s.value_dim)), "KEY_REST": rest, "SHARED": shared,
        "LEFT": 0 <= s.window_left < s.keys, "RIGHT": 0 <= s.window_right < s.tokens - 1, "SOFTCAP": s.softcap,
        "UNIT": factors.unit, "K_SCALES": factors.k, "V_SCALES": factors.v,
        "WIDENED": config.widened and factors.small_values and s.q_bytes == 2,
        "PEEL": config.peel and not (s.mask or s.ids), "STAGES": config.num_stages, "CHAINED": chained,
        "num_warps": config.num_warps,
    }  # fmt: skip
    step = Step(
        "_attention_split_kernel", (kv_rows * tiles * splits,),
        {**{f"{x}_ptr": x for x in ("q", "k", "v", "mask", "q_documents", "k_documents", "k_scale", "v_scale")},
         **same("q_row", "q_head", "q_token", "k_page", "k_head", "k_slot", "v_page", "v_head", "v_slot"),
         **same("k_scale_strides", "v_scale_strides", "mask_strides", "scale", "softcap", "PAGE_SIZE"),
         "out_ptr": "part_out" if several else "out", "lse_ptr": "part_lse" if several else "lse",
         **{f"out_{x}": f"{'part' if several else 'out'}_{x}" for x in ("split", "row", "head", "token")},
         "sinks_ptr": None if several else "sinks", "lengths_ptr": "lengths", "pages_ptr": "page_table"},
        {"lse_split": s.rows * s.tokens, "pages_row": s.row_pages, "slots": s.keys, "tokens": s.tokens,
         "kv_heads": s.kv_heads, "tiles": tiles, "splits": splits, "window_left": s.window_left,
         "window_right": s.window_right},
        constants,
    )  # fmt: skip
    return Plan(
        "attention", "triton_split", (step, *([combine(s, splits, chained)] if several else [])),
        (config.block_m, config.block_n), config.num_stages, 0, "tiles of the same keys are neighbours", "split-KV",
        splits, True, parts_scratch(s, splits, "float32"), q_bytes=s.q_bytes,
        reasons=(
            f"{kv_rows * tiles} tiles of {config.block_m} rows, pairs of a token and a head: {splits} splits",
            *(("values are the first columns of the keys and are not loaded",) if shared else ()),
        ),
    )  # fmt: skip
