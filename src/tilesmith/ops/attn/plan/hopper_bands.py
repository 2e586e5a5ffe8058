"""The plan of attention's gradients on Hopper above head dim 256: p and ds of a band, and their products."""

from __future__ import annotations

from typing import Any, NamedTuple

from tilesmith.engine.launcher import cdiv
from tilesmith.ops.attn.plan import smem
from tilesmith.ops.attn.plan.model import Buffer, Counter, Part, Source, Step, Tile
from tilesmith.ops.attn.plan.shape import Shape, Window

TILE = 128  # queries of a tile of scores or dq, keys of one of dk or dv
WORKSPACE = (2**26, 2**29)
"""Bytes of p and ds that a band may have: in any case, and where the call's own tensors have as many."""
PART_STAGES = 3  # parts of 64 columns of a tile of scores in flight
SOFTCAP_STAGES = 5


class Band(NamedTuple):
    """rows: pairs of batch row and kv head; members: query heads that share each of them; tiles: of 128 queries."""

    first_row: int
    rows: int
    first_member: int
    members: int
    first_tile: int
    tiles: int


class Extent(NamedTuple):
    """What of a call anybody sees: the first query and key, and tiles of queries behind them."""

    q_begin: int
    k_begin: int
    tiles: int

    def keys(self, s: Shape, block: int) -> int:
        """Keys to whole blocks."""
        return cdiv(s.keys - self.k_begin, block) * block


def extent(s: Shape, q_begin: int, k_begin: int) -> Extent:
    return Extent(q_begin, k_begin, cdiv(s.tokens - q_begin, TILE))


def _even(total: int, most: int) -> int:
    """The size of equal parts of `total`, of which none is larger than `most`."""
    return cdiv(total, cdiv(total, max(1, most)))


def workspace(s: Shape) -> int:
    """Bytes that p and ds of a band may take: as many as the tensors of the call, or an eighth of those where that is
    more than `WORKSPACE` has: so memory grows as the call does, not as its scores."""
    least, most = WORKSPACE
    own = 2 * s.q_bytes * (s.dim + s.value_dim) * (s.rows * s.tokens + s.batch * s.kv_heads * s.keys)
    return max(least, min(own, max(most, own // 8)))


def bands(s: Shape, of: Extent, room: int) -> list[Band]:
    """The bands of a call, each of which has p and ds in `room` bytes, if one tile of queries has."""
    total = s.batch * s.kv_heads
    tile = TILE * of.keys(s, 2 * TILE) * 2 * s.q_bytes
    fitting = max(1, room // tile)  # tiles of queries of one head
    rows, members, tiles = 1, s.group, of.tiles
    if fitting >= s.group * of.tiles:
        rows = _even(total, fitting // (s.group * of.tiles))
    elif fitting >= s.group:
        tiles = _even(of.tiles, fitting // s.group)
    else:
        members, tiles = 1, _even(of.tiles, fitting)
    return [
        Band(row, min(rows, total - row), member, min(members, s.group - member), tile, min(tiles, of.tiles - tile))
        for row in range(0, total, rows)
        for member in range(0, s.group, members)
        for tile in range(0, of.tiles, tiles)
    ]


def is_divided(s: Shape, of: Extent, found: list[Band]) -> bool:
    """Whether several bands add to one gradient."""
    return any(band.members < s.group or band.tiles < of.tiles for band in found)


def band_scratch(s: Shape, of: Extent, found: list[Band]) -> list[Buffer]:
    heads, queries = max(b.rows * b.members for b in found), max(b.tiles for b in found) * TILE
    scratch = [Buffer(name, (1, heads, queries, of.keys(s, 2 * TILE)), "q") for name in ("p", "ds")]
    if is_divided(s, of, found):
        scratch.append(Buffer("sums", (2, 1, of.keys(s, TILE), 512), "float32"))
    return scratch


def band_steps(s: Shape, arch: Any, window: Window, of: Extent, found: list[Band], stages: int) -> list[Step]:
    """The launches of all bands, in their order."""
    divided = is_divided(s, of, found)
    return [
        step
        for band in found
        for step in (_scores(s, arch, window, of, band), _products(s, arch, window, of, band, divided, stages))
    ]


def _numbers(s: Shape, window: Window, of: Extent, band: Band) -> dict[str, int]:
    return {
        "tokens": s.tokens, "keys": s.keys, "kv_heads": s.kv_heads, "group": s.group, "q_begin": of.q_begin,
        "k_begin": of.k_begin, "first_row": band.first_row, "rows": band.rows, "first_member": band.first_member,
        "members": band.members, "first_tile": band.first_tile, "band_tiles": band.tiles, "left": window.left,
        "right": window.right,
    }  # fmt: skip


def _scores(s: Shape, arch: Any, window: Window, of: Extent, band: Band) -> Step:
    """p and ds of a band."""
    keys = TILE if s.softcap else 2 * TILE  # the derivative of its tanh is kept in registers, too
    tensors: dict[str, Source] = {
        "q_desc": Tile("q", TILE, columns=64), "k_desc": Tile("k", keys, columns=64),
        "dout_desc": Tile("dout", TILE, columns=64), "v_desc": Tile("v", keys, columns=64),
        "p_desc": Tile("p", 64, columns=keys), "ds_desc": Tile("ds", 64, columns=keys),
        "lse_ptr": Part("rows", 0), "delta_ptr": Part("rows", 1), "inner": "inner", "outer": "outer",
    }  # fmt: skip
    constants = {
        "LEFT": window.hides_left, "RIGHT": window.hides_right, "KEYS": keys, "PARTS": cdiv(s.dim, 64),
        "V_PARTS": cdiv(s.value_dim, 64), "STAGES": SOFTCAP_STAGES if s.softcap else PART_STAGES, "SOFTCAP": s.softcap,
        "AHEAD": 2, "num_warps": 4, "launch_pdl": True,
    }  # fmt: skip
    numbers = _numbers(s, window, of, band) | {"row_size": of.tiles * TILE}
    return Step(
        "attention_band_scores_kernel", (arch.sms,), tensors, numbers, constants,
        smem.band_scores(constants, s.q_bytes),
    )  # fmt: skip


def _products(s: Shape, arch: Any, window: Window, of: Extent, band: Band, divided: bool, stages: int) -> Step:
    """dq of a band, and what it adds to dk and dv."""
    tensors: dict[str, Source] = {
        "ds_rows_desc": Tile("ds", TILE, columns=64), "p_cols_desc": Tile("p", 64, columns=TILE),
        "ds_cols_desc": Tile("ds", 64, columns=TILE), "q_desc": Tile("q", 64, columns=256),
        "k_desc": Tile("k", 64, columns=256), "dout_desc": Tile("dout", 64, columns=256),
        **{f"{name}_desc": Tile(name, 64, columns=128) for name in ("dq", "dk", "dv")},
        "sums_ptr": "sums" if divided else None, "counter": Counter(), "factor": "factor",
    }  # fmt: skip
    constants = {
        "LEFT": window.hides_left, "RIGHT": window.hides_right, "DQ": s.wants[0], "STAGES": stages, "num_warps": 4,
        "launch_pdl": True,
    }  # fmt: skip
    return Step(
        "attention_band_products_kernel", (arch.sms,), tensors, _numbers(s, window, of, band), constants,
        smem.band_products(constants, s.q_bytes),
    )  # fmt: skip


def band_reasons(s: Shape, of: Extent, found: list[Band]) -> list[str]:
    told = [
        "above head dim 256 p and ds of a band of queries go to a workspace in 16 bits, and dq, dk and dv are products "
        "of it: each score is made once"
    ]
    if len(found) > 1:
        first = found[0]
        of_heads = f"{first.rows * first.members} of {s.rows} heads"
        told.append(f"{len(found)} bands, of up to {first.tiles * TILE} queries of {of_heads}")
    if is_divided(s, of, found):
        told.append("dk and dv of several bands are added in fp32, in their order")
    return told
