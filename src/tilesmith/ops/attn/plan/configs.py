"""The configurations of attention's kernels: what a tuning row or a pin may set."""

from __future__ import annotations

from typing import NamedTuple


class HopperConfig(NamedTuple):
    """consumers: warpgroups with 64 queries each. block_n: keys of a tile. stages: key and value tiles in flight.
    q_stages: query tiles in flight. v_stages: value tiles in flight where they are not as many as key tiles.
    heads: query heads that share keys whose queries a tile holds, a divisor of their number up to 8; 0 for as many as a
    model of the schedule wants, and 1 where a call's features allow no more.
    Where block_n is 0, the tiles are those of `tables.FORWARD_TILES` that have as many consumers, or, where none have,
    those for which a model of the schedule predicts the least time.
    Tiles of 96 keys, no power of two, are of head dims from 73 to 96 without a window, documents, block lists, dropout,
    softcap or out in fp32 (`hopper.forward_joined`).
    Windows of up to 129 keys have two consumers and tiles of 64 keys, at least four of them (`hopper.window`). Above
    head dim 256 there is one tile, with as many stages as there is room for (`hopper.forward_wide`)."""

    consumers: int
    block_n: int
    stages: int
    q_stages: int = 1
    v_stages: int = 0
    heads: int = 0


class HopperVjpConfig(NamedTuple):
    """stages: tiles of queries in flight, at most as many as shared memory holds. block_q: queries of a block, 64 above
    head dim 128, and where those of q and v differ, as in windows of up to 129 keys
    (`hopper.window_backward`), and above head dim 256 128, where stages are of the products of p and ds
    (`hopper.backward_bands`); up to head dim 64 0 for those of `tables.NARROW_GRADIENTS` of which a model of the
    schedule predicts the least time, with their stages where stages is 0. overlap: 1 where dk and dv have the consumers
    of `hopper.backward_overlap`. group_parts: parts of the query heads that share keys, each with tiles, dk and dv of
    its own, which are added (`hopper.group_sum`): at most their number; 0 for as many as a model of the schedule
    wants."""

    stages: int
    block_q: int
    overlap: int = 0
    group_parts: int = 0


class SplitKvConfig(NamedTuple):
    """consumers: warpgroups with 64 rows each, pairs of token and head. block_n: keys of a tile. stages: key and value
    tiles in flight. splits: of the keys; 0 for as many as the device wants. apart: results have shared memory of their
    own, not that of the queries, so that the next tile's queries are loaded while this one's results leave."""

    consumers: int
    block_n: int
    stages: int
    splits: int = 0
    apart: bool = False


class ClusterConfig(NamedTuple):
    """block_n: keys of a tile. stages: tiles of keys and of values in flight. Where one is 0, the plan finds it.
    num_warps: each has block_n / num_warps keys of a tile. parts: CTAs of a cluster, a power of two; 0: the plan finds
    it, and splits."""

    block_n: int
    stages: int
    num_warps: int = 4
    parts: int = 0
    splits: int = 1


class LatentConfig(NamedTuple):
    """block_n: keys of a tile, which are values, too. stages: tiles in flight. splits: of the keys; 0 for as many as
    the device wants."""

    block_n: int = 64
    stages: int = 2
    splits: int = 0


class Fp8Config(NamedTuple):
    """block_n: keys of a tile, which share a factor. stages: tiles of keys and values in flight."""

    block_n: int = 128
    stages: int = 3


class AttentionConfig(NamedTuple):
    """Queries and keys of a tile; warps and pipeline stages of a CTA; whether k and v come by TMA."""

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int
    bulk: bool = False


class AttentionVjpConfig(NamedTuple):
    """Tiles of queries (m) and keys (n), warps and pipeline stages: of the kernel for dk and dv, and of that for dq;
    whether what they stream comes by TMA."""

    dkv_block_m: int
    dkv_block_n: int
    dkv_warps: int
    dkv_stages: int
    dq_block_m: int
    dq_block_n: int
    dq_warps: int
    dq_stages: int
    bulk: bool = False


class SplitConfig(NamedTuple):
    """block_m: rows of a tile (pairs of token and query head). block_n: keys of a step. per_sm: CTAs that share an
    SM, by which the number of splits is chosen. peel: keys that every row sees are walked apart, without masks.
    chained: the combining kernel is launched to wait for its parts on the device (CUDA, compute capability 9 and up).
    widened: values of 8 bits become 16 where they were loaded, not where the product reads them (CUDA).
    """

    block_m: int
    block_n: int
    per_sm: int
    num_warps: int
    num_stages: int
    peel: bool = True
    chained: bool = False
    widened: bool = False
