"""The plan of attention's gradients on Hopper: rows' statistics, dk and dv, dq, dsinks."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

from tilesmith.engine.launcher import cdiv
from tilesmith.ops.attn.plan.configs import HopperVjpConfig
from tilesmith.ops.attn.plan.hopper_backward_steps import (
    Call,
    dkv_step,
    dq_step,
    dsinks_step,
    group_sum_steps,
    narrow_step,
    rows_step,
    scratch_of,
    stream_k_steps,
    wide_dkv_step,
    wide_dq_step,
)
from tilesmith.ops.attn.plan.hopper_backward_tiles import (
    Blocks,
    Order,
    blocks_of,
    drifted,
    group_parts,
    is_narrow_vjp,
    members_of,
    order_of,
    tile_steps,
)
from tilesmith.ops.attn.plan.hopper_bands import (
    TILE,
    band_reasons,
    band_scratch,
    band_steps,
    bands,
    extent,
    workspace,
)
from tilesmith.ops.attn.plan.hopper_forward import NO_KEYS, Division, Tables, query_tables
from tilesmith.ops.attn.plan.model import Plan
from tilesmith.ops.attn.plan.shape import Shape
from tilesmith.ops.attn.plan.tables import NARROW_GRADIENTS, GradientTime
from tilesmith.ops.attn.schedule import MANY, even_makespan, in_sections, makespan

_FP32 = "gradients in fp32: consumers store them from registers, as tiles in shared memory have room for 16 bits"
_APART = (
    "above head dim 128, and where head dims differ, dq has a kernel of its own: the scores are made twice, nothing is "
    "added"
)


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
    b = blocks_of(s, config)
    narrow, whole = is_narrow_vjp(s, b.window), s
    parts = 1 if narrow else group_parts(s, b, arch, config)
    s = s._replace(kv_heads=s.kv_heads * parts)  # each part of a group is a kv head with tiles of its own
    order = order_of(s, b, arch, parts)
    call = Call(s, arch, config, b, order, narrow, parts, why)
    steps, scratch = [*b.tables.steps, rows_step(call)], [*b.tables.scratch, *scratch_of(call)]
    if call.narrow:
        steps.append(narrow_step(call))
    elif b.apart:
        steps.append(wide_dkv_step(call))
        if s.wants[0]:
            tables = query_tables(s, b.window, 128) if s.packed else Tables(cdiv(s.tokens, 128))
            steps += [*tables.steps, wide_dq_step(call._replace(s=whole), tables)]
            scratch += tables.scratch
    else:
        steps += [dkv_step(call), *([dq_step(call)] if s.wants[0] else []), *stream_k_steps(call)]
    steps += group_sum_steps(call)
    if s.wants[4] and s.sinks:
        steps.append(dsinks_step(call))
    ctas = order.division.ctas
    return Plan(
        "attention_vjp", "hopper", tuple(steps), (b.block_m, 64 if call.narrow else b.block_n), call.stages(), 2,
        f"sections of {order.section} kv heads", "stream-K" if ctas else "", ctas or 1,
        order.ordered or call.narrow or b.apart, tuple(scratch), _zeroed(b),
        {"q_begin": b.q_begin}, s.q_bytes, _reasons(call),
    )  # fmt: skip


def _banded(s: Shape, arch: Any, config: HopperVjpConfig) -> Plan:
    """Above head dim 256 p and ds of a band of queries are made first, and gradients are products of them."""
    b = blocks_of(s, config._replace(block_q=TILE))._replace(apart=False, banded=True)
    of = extent(s, b.q_begin, b.k_begin)
    found = bands(s, of, workspace(s))
    order = Order(1, False, False, False, False, Division(0, 0))
    call = Call(s, arch, config, b, order, False, 1, "")
    steps = [rows_step(call), *band_steps(s, arch, b.window, of, found, config.stages)]
    if s.wants[4] and s.sinks:
        steps.append(dsinks_step(call))
    return Plan(
        "attention_vjp", "hopper", tuple(steps), (TILE, TILE), config.stages, 2,
        scratch=(*scratch_of(call), *band_scratch(s, of, found)), zeroed=_zeroed(b), numbers={"q_begin": b.q_begin},
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
    b = blocks_of(s, config)
    parts = group_parts(s, b, arch, config)
    s = s._replace(kv_heads=s.kv_heads * parts)
    order = order_of(s, b, arch, parts)
    division = order.division
    heads, members, steps = s.batch * s.kv_heads, members_of(s, parts), [n * time.step for n in tile_steps(s, b)]
    longest, least = max(members) * steps[0], min(members) * min(steps)
    launches = (parts > 1) + (division.ctas > 0)
    found = time.start + launches * time.launch
    if division.ctas:
        left = (heads * b.k_blocks - division.undivided) * b.q_blocks * s.group
        found += even_makespan(division.undivided, longest, arch.sms, time.tile)
        return found + time.tile + cdiv(left, division.ctas) * time.step
    if not b.window.hides_right:
        return found + even_makespan(heads * b.k_blocks, longest, arch.sms, time.tile)
    drift = drifted(s, b, arch, order.section, members)
    if heads * b.k_blocks > MANY * arch.sms:
        work = drift * s.rows * sum(steps) + heads * b.k_blocks * time.tile
        return found + work / arch.sms + time.tile + least
    order_steps = in_sections([n * drift for n in steps], heads, order.section, members)
    return found + makespan(order_steps, arch.sms, time.tile)


def _reasons(call: Call) -> tuple[str, ...]:
    s, b = call.s, call.b
    if call.narrow:
        keys = b.window.left + b.window.right + 1
        return (f"a window of {keys} keys: all queries that see a block of 64 keys are loaded at once",)
    found = [f"tiles of {b.block_n} keys meet blocks of {b.block_m} queries, {call.stages()} in flight"]
    found += [call.why] if call.why else []
    if b.rest:
        found.append(f"tiles and products have {64 + b.rest} columns, 64 and {b.rest}: none is padded to {b.wide}")
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
