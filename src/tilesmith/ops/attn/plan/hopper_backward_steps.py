"""The launches of attention's gradients on Hopper: what each kernel is given, and the memory between them."""

from __future__ import annotations

from typing import Any, NamedTuple

from tilesmith.engine.launcher import cdiv, next_power_of_2
from tilesmith.ops.attn.plan import smem
from tilesmith.ops.attn.plan.configs import HopperVjpConfig
from tilesmith.ops.attn.plan.hopper_backward_tiles import Blocks, Order
from tilesmith.ops.attn.plan.hopper_forward import Tables, dropout_constants, heads_together
from tilesmith.ops.attn.plan.model import Buffer, Counter, Part, Source, Step, Tile
from tilesmith.ops.attn.plan.shape import Shape, column_parts, columns
from tilesmith.ops.attn.schedule import run_of

WINDOW_RUNS = (2, 4, 8, 16, 32, 64, 128)
THREAD_BYTES = 64  # what a thread of the kernels before and behind the main one asks for at once, at most 16 warps


class Call(NamedTuple):
    """A call and what was decided for it: what its steps are made of. b: its tiles; why: how they were chosen."""

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
        return self.tiles(q=self.b.block_m, k=self.b.block_n, v=self.b.block_n, dout=self.b.block_m)

    def stored(self, *names: str) -> dict[str, Source]:
        """What gradients in fp32 are stored to from registers; nothing where they are not."""
        if not self.s.gradients_fp32:
            return {}
        of = {name: name if name == "dq" else self.of_parts(name) for name in names}
        strides: dict[str, Source] = {f"{name}_strides": f"{x}_strides" for name, x in of.items()}
        return {f"{name}_ptr": x for name, x in of.items()} | strides

    def columns(self) -> dict[str, int]:
        """The columns of tiles and of their rests (`hopper.columns`)."""
        if self.b.rest:
            return {"D": 64, "DV": 64, "REST": self.b.rest, "V_REST": self.b.rest}
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
        if self.narrow:
            return self.config.stages
        if self.b.apart:
            return _most(smem.backward_wide, self.columns(), self.config.stages, self)
        constants = {"BQ": self.b.block_m, "D": self.b.wide, "REST": self.b.rest}
        return _most(smem.backward, constants, self.config.stages, self)

    def sums(self) -> int:
        return 2 if self.order.ring else 1

    def ctas(self) -> tuple[int, bool]:
        """CTAs of the main kernel, and whether they take tiles from a counter."""
        division = self.order.division
        work = division.undivided + division.ctas
        ctas = min(self.arch.sms, work)
        return ctas, ctas < work

    def short_parts(self) -> int:
        """Parts of a group that have a query head fewer than the others."""
        return self.s.group * self.group_parts - self.s.heads * self.group_parts // self.s.kv_heads

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
            **({"GROUP_SHORT": self.short_parts()} if self.short_parts() else {}),
        }  # fmt: skip


def _most(memory: Any, constants: dict[str, int], stages: int, call: Call) -> int:
    """How many stages, at most `stages`, a kernel has shared memory for."""
    room, item = call.arch.shared_memory or smem.HOPPER, call.s.q_bytes
    fits = (n for n in range(stages, 1, -1) if memory(constants | {"STAGES": n, "V_STAGES": n}, item) <= room)
    return next(fits, 1)


def _warps(loaded: int) -> int:
    """The warps of a CTA that loads so many bytes, from 4 to 16. Whatever its tile is, a load from memory takes about
    as long as the few of a thread together: so all are asked for at once, and many CTAs have enough of them in flight
    to be limited by memory alone."""
    return min(max(4, next_power_of_2(cdiv(loaded, 32 * THREAD_BYTES))), 16)


def scratch_of(call: Call) -> list[Buffer]:
    """The memory that steps leave to one another, but for tables of tiles."""
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


def rows_step(call: Call) -> Step:
    """lse in units of log 2, and delta, of each query."""
    s, b = call.s, call.b
    adds, wide = not (b.apart or b.banded or call.narrow), columns(s.value_dim)
    rows = 32 if b.banded else b.block_m
    warps = _warps(2 * rows * wide * s.q_bytes)
    blocks = b.q_blocks * (b.block_m // rows)
    return Step(
        "attention_rows_kernel", (s.rows * blocks,),
        {"out_ptr": "out", "dout_ptr": "dout", "lse_ptr": "lse", "dlse_ptr": "dlse", "row_lse_ptr": Part("rows", 0),
         "delta_ptr": Part("rows", 1), "token_delta_ptr": "token_delta" if b.apart else None,
         "turns_ptr": "turns" if adds else None, "blocks_ptr": b.rows_table, "dlse_strides": "dlse_strides",
         "kept": "kept", **call.strides("out", "dout")},
        {"heads": s.heads, "tokens": s.tokens, "begin": b.q_begin, "blocks": blocks},
        {"ROWS": rows, "DIM": s.value_dim, "D": wide, "SUMS": call.sums(), "num_warps": warps},
    )  # fmt: skip


def dkv_step(call: Call) -> Step:
    """dk and dv, and what dq is the sum of."""
    s, b, order = call.s, call.b, call.order
    division = order.division
    lists = {"list_share": 1, "list_rows": 0}
    if s.lists:
        heads, rows = s.lists_by_keys, s.list_rows_by_keys
        lists = {"list_share": s.heads // heads, "list_rows": b.k_blocks * heads if rows > 1 else 0}
    tensors = call.inputs() | {
        "dq_desc": Tile("dq_parts", b.block_m * b.wide // 512, flat=True),
        **call.tiles(dk=64, dv=64), "lse_ptr": Part("rows", 0), "delta_ptr": Part("rows", 1), "turns_ptr": "turns",
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
        "RING": order.ring, "BQ": b.block_m, "STAGES": call.stages(), "launch_pdl": True, **call.kinds(),
        **dropout_constants(s), **({"DIM": s.dim} if s.gradients_fp32 else {}), **rest,
    }  # fmt: skip
    numbers = call.sizes() | lists | {"whole_tiles": division.undivided, "stream_k_ctas": division.ctas}
    return Step(
        "attention_dkv_kernel", (call.ctas()[0],), tensors, numbers, constants, smem.backward(constants, s.q_bytes)
    )  # fmt: skip


def dq_step(call: Call) -> Step:
    """dq in its own layout and dtype, from the sums that `dkv_step` leaves in the order of fragments."""
    s, b = call.s, call.b
    wide = 64 if b.rest else b.wide
    twice = (b.k_blocks - 1) * b.q_blocks // b.k_blocks if call.order.ring else None
    return Step(
        "attention_dq_kernel", (s.rows * b.q_blocks,),
        {"parts_ptr": "dq_parts", "dq_ptr": "dq", "turns_ptr": "turns", "blocks_ptr": b.rows_table,
         "scale": "factor", **call.strides("dq")},
        {"heads": s.heads, "tokens": s.tokens, "begin": b.q_begin, "blocks": b.q_blocks, "twice": twice},
        {"ROWS": b.block_m, "DIM": s.dim, "D": wide,
         "EARLY": s.deterministic and not (s.packed or b.window.hides_left),
         "num_warps": _warps(b.block_m * (wide + b.rest) * 4), "launch_pdl": True,
         **({"REST": b.rest} if b.rest else {})},
    )  # fmt: skip


def stream_k_steps(call: Call) -> list[Step]:
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


def group_sum_steps(call: Call) -> list[Step]:
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


def wide_dkv_step(call: Call) -> Step:
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


def wide_dq_step(call: Call, tables: Tables) -> Step:
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


def narrow_step(call: Call) -> Step:
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


def dsinks_step(call: Call) -> Step:
    """The gradient of the sinks, from the statistics of the rows."""
    s, b = call.s, call.b
    return Step(
        "attention_dsinks_kernel", (s.heads,),
        {"row_lse_ptr": Part("rows", 0), "delta_ptr": Part("rows", 1), "sinks_ptr": "sinks", "dsinks_ptr": "dsinks",
         "kept": "kept"},
        {"batches": s.batch, "heads": s.heads, "rows": b.q_blocks * b.block_m}, {"BLOCK": 1024},
    )  # fmt: skip
