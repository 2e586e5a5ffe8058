"""What was fitted to benched shapes, in one place: thresholds, and the configurations of tiles, each with what it was
measured on.

All figures are of one H200 in bf16 unless they say otherwise; TFLOP/s at hidden size 2048 and 16,384 tokens, µs where
a shape is named. `docs/log/hopper-attention.md` has what was tried beside them. A model of the schedule is to take
their place (`ops.attn.schedule`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from fractions import Fraction
from typing import Any, NamedTuple

from tilesmith.ops.attn.plan.configs import ClusterConfig, HopperConfig, HopperVjpConfig, SplitKvConfig
from tilesmith.ops.attn.schedule import SM_BANDWIDTH, CtaTile


class Threshold(NamedTuple):
    """A number that decides, what it decides, and on what it was measured."""

    value: int | Fraction
    decides: str
    measured: str


STREAM_K_STEPS = Threshold(
    14, "steps that stream-K must save the last CTAs of a forward",
    "head dim 128, 2k / 4k / 8k keys, of which it saves 8 / 16 / 31 steps behind whole rounds: 687 / 728 / 747, "
    "without 694 / 720 / 730; 1 / 2 / 3 / 4 causal heads of 4k, 28 / 24 / 20 / 16 steps: 112 / 220 / 297 / 351, "
    "without 82 / 163 / 238 / 317; 4 causal heads of 2k, 12 steps: 130, without 137",
)  # fmt: skip
STREAM_K_STEPS_ALONE = Threshold(
    8, "the same where every tile has runs of its own and there are no whole rounds",
    "2 / 3 / 4 heads of 2k, 12 / 8 / 8 steps: 170 / 236 / 305, without 141 / 208 / 276; 4 heads of 1k, 6 steps: 96, "
    "without 108",
)  # fmt: skip
STREAM_K_PART = Threshold(
    9, "µs that a CTA of stream-K takes for each tile of which it has a part, beside its steps",
    "head dim 128, what such calls take more than the start, end and steps of their tiles: runs of their own, 1 / 2 "
    "heads of 4k 11 / 9, 2 / 3 / 4 of 2k 11 / 7 / 8; runs in two tiles, 1 / 2 of 4k 15 / 13, 1 / 4 causal ones 24 / 18",
)  # fmt: skip
STREAM_K_STEPS_VJP = Threshold(
    16, "steps that stream-K must save the last CTAs of a backward",
    "head dim 128, 1k, of which it saves 8: 511, without 523",
)  # fmt: skip
STREAM_K_L2 = Threshold(
    1, "part of the L2 cache that what stream-K's CTAs read at a time may fill",
    "backward, 64/8 heads x 4k, 134 MB: 560, without 607; forward, 256 tokens of 64 heads on 128k keys: 1,566 us, "
    "without 1,536",
)  # fmt: skip
FORWARD_L2 = Threshold(
    Fraction(1, 2), "part of the L2 cache for keys and values of heads that are worked on together, where tiles differ",
    "head dim 128, 16k causal, 16 heads: in sections of 4 726, of 3 698; of equal tiles heads that share keys come one "
    "after another: 1k / 4k / 16k 616 / 717 / 738, in sections of half of the L2 cache 575 / 695 / 703",
)  # fmt: skip
ORDERED_L2 = Threshold(
    Fraction(2, 5), "part of the L2 cache for queries, dout and parts of dq of the heads of an ordered backward",
    "4k causal: 543 with the 6 heads that fit, 515 with 12, 462 with 16; 32/8 heads 1,480 us with the one that fits, "
    "1,590 with 4; head dim 64, 4k full: 574 with 8, 506 with the 4 that give each CTA a tile",
)  # fmt: skip
FEW_ROWS = Threshold(
    32, "output rows of an SM up to which the Gluon kernel combines splits, not Triton's of one warp a row",
    "8 / 16 tokens on 8k keys of 64/8 heads: 15.7 / 18.3 us, by the other one 16.1 / 19.0; 8,192 rows of 16 tokens on "
    "8 x 8k keys in pages of 16 / 64: 92.0 / 89.2 us, by the other one 87.5 / 81.9",
)  # fmt: skip
CLUSTER_BLOCKS = Threshold(
    32, "blocks of keys up to which clusters of 16 serve a kv head, not CTAs alone and a second kernel",
    "2 / 4 kv heads of 128, 8k keys: 11.2 / 12.2 us, split 10.5 / 11.9; 32k keys: 20.4 / 27.4, split 16.4 / 23.2",
)  # fmt: skip


CLUSTERS = {"sm90": (7, 15, 30, 66)}
"""Clusters of 16, 8, 4 and 2 CTAs that run at once, by architecture, where the driver cannot be asked: an H200's."""


class Row(NamedTuple):
    """A configuration, and where it holds: name of a fact -> its value, or (least, most) of it, None for unbounded."""

    when: Mapping[str, Any]
    config: Any
    measured: str = ""

    def holds(self, facts: Mapping[str, Any]) -> bool:
        return all(_fits(facts[name], wanted) for name, wanted in self.when.items())


def _fits(value: Any, wanted: Any) -> bool:
    if not isinstance(wanted, tuple):
        return value == wanted
    least, most = wanted
    return (least is None or value >= least) and (most is None or value <= most)


def row_for(table: Sequence[Row], facts: Mapping[str, Any]) -> Row:
    """The first row that holds."""
    return next(row for row in table if row.holds(facts))


HOPPER_FORWARD = (
    Row(
        {"dim": (129, 192), "value_dim": (None, 128), "whole": True, "dropout": False}, HopperConfig(0, 0, 0),
        "by `FORWARD_TILES`",
    ),
    Row(
        {"dim": (129, 192), "value_dim": (None, 128)}, HopperConfig(2, 128, 2),
        "192 and 128 columns, 16 heads causal, 2k / 4k / 8k / 16k: 493 / 646 / 746 / 768 (cuDNN 324 / 465 / 572 / 626)",
    ),
    Row({"wide": (257, None)}, HopperConfig(2, 64, 5)),
    Row({"wide": (129, None), "dropout": False, "packed": False}, HopperConfig(0, 0, 0), "by `FORWARD_TILES`"),
    Row({"wide": (129, None)}, HopperConfig(2, 64, 2)),
    Row(
        {"dropout": True}, HopperConfig(2, 128, 2, v_stages=3),
        "more consumers leave random bits too few registers: three and four at head dim 64 1,990 and 1,614 us",
    ),
    Row(
        {"local": True, "wide": (65, None)}, HopperConfig(2, 64, 4, 2),
        "windows of 256 / 512 / 1024 keys at 32k, us: 210 / 308 / 507, in blocks of 128 keys 255 / 329 / 493",
    ),
    Row({"local": True}, HopperConfig(2, 64, 6, 2), "as above at head dim 64: 312 / 468 / 789 and 373 / 488 / 776"),
    Row({"wide": (97, 128), "causal": True, "whole": True}, HopperConfig(0, 0, 0), "by `FORWARD_TILES`"),
    Row(
        {"wide": 128, "causal": True, "keys": (None, 512)}, HopperConfig(2, 64, 4, 2),
        "512 keys: 333, in blocks of 128 keys 309",
    ),
    Row({"wide": (None, 96), "whole": True}, HopperConfig(0, 0, 0), "by `FORWARD_TILES`"),
    Row(
        {"wide": (65, 96)}, HopperConfig(2, 128, 3, 2, 3),
        "tiles of 80 or 96 columns leave room for two of queries: head dim 72, 2 x 4096 tokens, us: 365, with one 380",
    ),
    Row(
        {"wide": (65, None)}, HopperConfig(2, 128, 2, v_stages=3),
        "values are given back a round later than keys; with a third tile of them 512 / 1k / 4k keys 532 / 635 / 718, "
        "with two 511 / 615 / 711; causal 1k / 4k / 16k 475 / 675 / 732, with two 468 / 668 / 730",
    ),
    Row({"causal": False, "keys": (None, 2047)}, HopperConfig(4, 64, 6)),
    Row({"causal": True, "keys": (None, 8191)}, HopperConfig(4, 64, 6), "there three take no turns"),
    Row({}, HopperConfig(3, 128, 3), "2k / 4k / 16k: 526 / 552 / 574, four consumers 502 / 520 / 510"),
)  # fmt: skip


class TileTime(NamedTuple):
    """What a persistent forward takes, in µs: its start and end, each tile, each step; under a causal mask each tile
    more, and start and end more. one_mask: the part of that start which is left where a consumer masks but one block,
    since a call reads its code from memory. uneven: the time under a mask of tiles whose heads do not divide 64 rows,
    beside others. `schedule.placed_steps` counts the steps."""

    start: float
    tile: float
    step: float
    masked: float = 0.0
    masked_start: float = 0.0
    one_mask: float = 1.0
    uneven: float = 1.0

    def under(self, mask: bool, one: bool = False, heads: int = 1) -> TileTime:
        """The same with what a mask adds, where there is one."""
        if not mask:
            return self
        start = self.start + self.masked_start * (self.one_mask if one else 1.0)
        times = self.uneven if 64 % heads else 1.0
        return TileTime(times * start, times * (self.tile + self.masked), times * self.step)


FORWARD_TILES = {
    64: {
        HopperConfig(3, 128, 3, v_stages=4): TileTime(7.8, 2.3, 1.34, 0.9, 4.4, 0.5, 1.04),
        HopperConfig(4, 64, 6): TileTime(8.4, 2.3, 1.0, 0.5, 2.1, 0.5, 1.12),
        HopperConfig(2, 128, 4, 2): TileTime(8.1, 1.12, 1.1, 0.33, 1.1, 0.0),
        HopperConfig(3, 64, 6): TileTime(7.3, 1.6, 0.8, 1.1, 2.1, 0.0),
        HopperConfig(2, 64, 6, 2): TileTime(7.8, 0.92, 0.63, 0.25, 0.7, 0.0),
    },
    72: {
        HopperConfig(3, 128, 3): TileTime(9.8, 1.8, 1.56, 1.37),
        HopperConfig(2, 128, 3, 2, 3): TileTime(9.8, 1.04, 1.26, 0.72),
        HopperConfig(3, 64, 6): TileTime(8.4, 1.8, 0.915, 1.37),
        HopperConfig(2, 64, 5, 2): TileTime(8.9, 0.84, 0.747, 0.66),
    },
    80: {
        HopperConfig(2, 128, 3, 2, 3): TileTime(9.8, 1.04, 1.28, 0.72),
        HopperConfig(3, 64, 6): TileTime(8.4, 1.8, 0.95, 1.37),
        HopperConfig(2, 64, 5, 2): TileTime(8.9, 0.84, 0.76, 0.66),
    },
    96: {
        HopperConfig(2, 128, 3, 2, 3): TileTime(9.8, 1.04, 1.32, 0.72),
        HopperConfig(3, 64, 6): TileTime(8.4, 1.8, 1.02, 1.37),
        HopperConfig(2, 64, 5, 2): TileTime(8.9, 0.84, 0.785, 0.66),
    },
    128: {
        HopperConfig(2, 128, 2, v_stages=3): TileTime(9.5, 1.4, 1.46, 0.5),
        HopperConfig(2, 64, 4, 2): TileTime(8.4, 1.25, 0.81, 0.2),
    },
    192: {
        HopperConfig(2, 128, 2): TileTime(5.8, 2.7, 1.66, 0.7, 5.0),
        HopperConfig(2, 64, 3): TileTime(4.2, 2.9, 0.98, 0.0, 3.8),
    },
    256: {
        HopperConfig(2, 64, 2): TileTime(6.2, 4.4, 1.32, 0.1),
        HopperConfig(1, 64, 3): TileTime(6.1, 2.4, 0.87, 0.8),
    },
}
"""Tiles without documents or dropout, and up to 128 columns without a window, by the columns of their products, those
that are best in large calls first.

64: fitted to 30 calls in all five tiles, 19 of them without a mask, and to benched and grouped ones in the tiles
that they had: a root mean square error of 3.6, 3.8, 3.0, 4.0 and 2.5 %. Among tiles of one head the choice takes
.3 % longer than the best without a mask and 1.1 % under one, 2.2 and 5.3 % at most. 128 and 256: fitted to calls of
up to 1.2 ms, 28 grouped causal ones by every number of heads that a tile may hold and benched ones: 2.7, 2.9; 3.2 and
(of 13) 1.0 %; of those 28 the choice takes .2 % longer than the best tiles and heads, 1.7 % at most. one_mask and
uneven: of calls of 544 to 2,960 tokens, groups of 3, whose other numbers stayed (`docs/log/hopper-attention.md`).
72, 80 and 96: start, tile and mask are fitted to 15 to 16 calls of products that were not joined; steps to joined
ones, at 72 columns three calls, at 96 one, and at 80 lie between them: 3.5 % off at most. 192 x 128 is not chosen
where it spills, at 80 and 96, and takes its start and tile from tiles like it (`docs/log/hopper-attention.md`). 192,
with values of up to 128 columns: fitted to 11 calls of 296 to 8,192 tokens, 1.1 and 1.5 %; the choice is the best in
each."""

APART_TILES = {
    80: {
        HopperConfig(2, 128, 3, 2, 3): TileTime(14.1, 0.7, 1.33, 0.8),
        HopperConfig(3, 64, 6): TileTime(10.1, 1.6, 0.96, 1.4),
        HopperConfig(2, 64, 5, 2): TileTime(10.6, 0.7, 0.79, 0.7),
    },
    96: {
        HopperConfig(2, 128, 3, 2, 3): TileTime(14.1, 0.7, 1.39, 0.8),
        HopperConfig(3, 64, 6): TileTime(10.1, 1.6, 1.05, 1.4),
        HopperConfig(2, 64, 5, 2): TileTime(10.6, 0.7, 0.83, 0.7),
    },
}
"""The same of two products a step (`plan.joined`): five numbers a kind of tile, its step at either, fitted to 14 calls
of 257 to 12,280 tokens, with an error of 1.8, 2.1 and 1.6 %."""


JOINED_TILES = {
    80: {HopperConfig(3, 96, 3): TileTime(9.9, 2.3, 1.2, 1.5, 5.0)},
    96: {HopperConfig(3, 96, 3): TileTime(9.9, 2.3, 1.37, 1.5, 5.0)},
}
"""Times of the tiles of `hopper.forward_joined`, by the columns of their products: six numbers fitted to 17 calls of
257 to 29,064 tokens, six of them measured twice, with an error of 2.7 %; among all tiles the choice takes 2.1 % longer
than the best at most."""


def hopper_forward(dims: Mapping[str, int], arch: Any, dtype: Any) -> HopperConfig:
    """The configuration of Hopper's forward where no tuning row is near."""
    facts = {
        "dim": dims["dim"], "value_dim": dims["value_dim"], "wide": max(dims["dim"], dims["value_dim"]),
        "dropout": dims["drawn"] > 1, "keys": dims["keys"],
        "local": dims["seen"] <= 512 < dims["keys"], "causal": dims["causal"] > 1,
        "whole": dims["packed"] == 1 and dims["seen"] == dims["keys"], "packed": dims["packed"] > 1,
    }  # fmt: skip
    return row_for(HOPPER_FORWARD, facts).config


class GradientTime(NamedTuple):
    """What gradients take, in µs: their start and end, each tile, each step, and each launch beside the usual ones."""

    start: float
    tile: float
    step: float
    launch: float = 3.0


NARROW_GRADIENTS = {
    HopperVjpConfig(2, 128): GradientTime(18.6, 4.3, 2.43),
    HopperVjpConfig(3, 64): GradientTime(14.3, 4.3, 1.44),
}
"""Blocks of queries that tiles of 128 keys meet up to head dim 64 without a window, softcap, documents, lists or
dropout, and ordered ones the first.

Times fitted to 46 measurements, 23 calls of 128 to 4,096 tokens, with a root mean square error of 5 % (6 and 4 %). What
they choose is at most 0.6 % slower than the better of the two, and 2.6 % faster than blocks of 128 throughout
(`docs/log/hopper-attention.md`)."""

HOPPER_BACKWARD = (
    Row({"narrow": True, "dim": (None, 64)}, HopperVjpConfig(4, 64)),
    Row({"narrow": True}, HopperVjpConfig(2, 64)),
    Row({"least": (257, None)}, HopperVjpConfig(4, 128)),
    Row({"least": (193, None)}, HopperVjpConfig(2, 64)),
    Row(
        {"apart": True}, HopperVjpConfig(3, 64, overlap=1),
        "192 and 128 columns, 16 heads causal, 2k / 4k / 8k / 16k: 382 / 479 / 522 / 533, two tiles of queries in "
        "flight 300 / 342 / 364 / 377, products in turns 358 / 440 / 477 / 482 (cuDNN 252 / 371 / 462 / 535)",
    ),
    Row(
        {"dim": (None, 64), "plain": True}, HopperVjpConfig(0, 0),
        "by `NARROW_GRADIENTS`; blocks of 128 queries read 15 % less of shared memory, but with a window or softcap "
        "they spill 600 bytes and more; 4k causal 466, of 64 queries 416; full 541, of 64 queries 431",
    ),
    Row({}, HopperVjpConfig(3, 64)),
)  # fmt: skip


def hopper_backward(dims: Mapping[str, int], arch: Any, dtype: Any) -> HopperVjpConfig:
    """The configuration of Hopper's backward where no tuning row is near."""
    dim, value_dim = dims["dim"], dims["value_dim"]
    facts = {
        "narrow": dims["narrow"] > 1, "dim": dim, "plain": dims["plain"] > 1, "least": min(dim, value_dim),
        "apart": dim > 128 or dim != value_dim,
    }  # fmt: skip
    return row_for(HOPPER_BACKWARD, facts).config


# consumers is 0 where it follows from the rows
SPLIT_KV = (
    Row({"bytes": 1, "consumers": 1}, SplitKvConfig(0, 128, 2),
        "e4m3, 32 x 8k keys of 64/8 heads, 8 tokens: 198 us, in tiles of 64 keys 215"),
    Row({"bytes": 1}, SplitKvConfig(0, 64, 3)),
    Row({"wide": 128, "rows": (None, 128), "paged": False, "many": True}, SplitKvConfig(0, 128, 2, apart=True),
        "16 tokens on 32 x 8k: 255 us, results in the place of queries 257; in tiles of 64 keys 263 and 263"),
    Row({"wide": 128, "rows": (None, 128), "paged": False}, SplitKvConfig(0, 64, 3),
        "64/8 heads, 16 tokens on 8k keys: 21.0 us, in tiles of 128 keys 26.0; on 8k / 128k / 32 x 8k with 3 stages "
        "20.3 / 135.9 / 255.5, with 4 20.7 / 135.2 / 256.7, with 5 21.1 / 137.3 / 260.4"),
    Row({"wide": 128, "rows": (None, 128)}, SplitKvConfig(0, 64, 5), "stages were not measured in pages"),
    Row({"wide": 64}, SplitKvConfig(0, 128, 6)),
    Row({"wide": 128}, SplitKvConfig(0, 128, 3), "256 tokens of 8 heads on 128k keys: 203 us, in tiles of 64 keys 228"),
    Row({"wide": 256}, SplitKvConfig(0, 64, 2)),
)  # fmt: skip


def split_kv(dims: Mapping[str, int], arch: Any, dtype: Any) -> SplitKvConfig:
    """The configuration of Hopper's split-KV forward where no tuning row is near."""
    consumers = 1 if dims["rows"] <= 64 else 2
    wide = max(dims["dim"], dims["value_dim"])
    facts = {
        "bytes": dims["bytes"], "consumers": consumers, "rows": dims["rows"], "paged": dims["paged"] > 1,
        "wide": 64 if wide <= 64 else 128 if wide <= 128 else 256, "many": dims["heads"] >= arch.sms > 0,
    }  # fmt: skip
    return row_for(SPLIT_KV, facts).config._replace(consumers=consumers)


CLUSTER = (
    Row({"dim": (None, 64)}, ClusterConfig(128, 3), "1 token on 8k keys, 32/8 heads: 11.7 us, with 6 stages 12.8"),
    Row({"dim": (None, 128)}, ClusterConfig(128, 2),
        "1 token on 8k keys, 64/8 heads: 14.7 us, with 3 stages 14.7 (4 batch rows 36.9 and 39.7), with 8 warps 15.3, "
        "in tiles of 64 keys with 4 stages 16.9"),
    Row({}, ClusterConfig(64, 2), "1 token on 8k keys, 32/4 heads: 17.6 us, with 3 stages 18.1"),
)  # fmt: skip


ALONE = (
    Row({"dim": (None, 64)}, (CtaTile(128, 2, 3, 57.0),), "100 kv heads on 16k keys 99.0 us, with 3 stages 99.9"),
    Row({"dim": (None, 128)}, (CtaTile(128, 2, 1, SM_BANDWIDTH), CtaTile(64, 2, 3, 57.0)),
        "4k keys, 140 kv heads: 84.5 and 72.2 us, 512: 241.9 and 253.6, with 3 stages of 64 keys 80.3 and 242.8"),
    Row({}, (CtaTile(64, 2, 1, SM_BANDWIDTH),), "80 kv heads on 4k keys 81.7 us; tiles of 32 keys do not compile"),
)  # fmt: skip

ALONE_KEYS = Threshold(
    2048, "keys of a CTA where lengths of batch rows may differ",
    "64 x 4k room, 8 kv heads, all full / one full / lengths drawn: 242.8 / 24.8 / 135.7 us, 1,024 keys 246.3 / 34.8 / "
    "137.6, 4,096 keys 236.5 / 30.0 / 132.7; 30 x 16k, 4 kv heads, one full: 22.7, 1,024 keys 32.7, 4,096 keys 32.0",
)  # fmt: skip

CLUSTER_ROOM = Threshold(
    32768, "columns of keys for each SM up to which clusters serve batch rows whose lengths may differ",
    "one batch row may be full and the others empty, and its clusters are no larger for that; then the time of "
    "`triton_split` to theirs, of 128 dims, for 2 rows of 8 kv heads in room for 1k / 2k / 4k keys is 1.21 / 1.15 / "
    "1.03, 4 rows of 8 in 512 / 1k / 2k 1.09 / 1.04 / .94, 8 of 8 in 512 / 1k 1.20 / 1.19, 4 of 2 in 2k / 4k 1.17 / "
    "1.11",
)  # fmt: skip


SHARED_LINES = Threshold(
    2048, "keys of an SM up to which TMA reads caches [B, S, H, D] whose adjacent kv heads share lines of 128 bytes",
    "1 token, the time of `triton_split` to that by TMA: 32 heads of 96 on 13 x 4k / 16k / 64k keys 1.02 / .93 / .78, "
    "8 heads of 80 on 30 x 16k .87; where a head's keys lie together 1.19 / 1.24 on 16k / 64k",
)  # fmt: skip


def cluster(dims: Mapping[str, int], arch: Any, dtype: Any) -> ClusterConfig:
    """The configuration of decode by clusters where no tuning row is near: the plan finds it (`cluster_tile`)."""
    return ClusterConfig(0, 0)


def alone_tiles(dim: int) -> Sequence[CtaTile]:
    """Tiles of decode by CTAs that share nothing; the first one is that of rows whose lengths may differ."""
    return row_for(ALONE, {"dim": dim}).config


def cluster_tile(dim: int) -> ClusterConfig:
    """Tiles of decode by clusters."""
    return row_for(CLUSTER, {"dim": dim}).config
