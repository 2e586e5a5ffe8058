"""Attention of DTensors: batch rows and heads may be sharded; tokens may not, which is what a ring is for."""

from typing import Any

from torch import Tensor

from tilesmith.engine import Op
from tilesmith.engine.sharding import spread


def attention(op: Op, args: tuple) -> tuple[Tensor, Tensor]:
    """The engine's `spread` by the pattern of these arguments."""
    return spread(op, args, _pattern(dict(zip(op.parameters, args))), held="h")


def _pattern(given: dict[str, Any]) -> str:
    packed, blocks = given["cu_seqlens_q"] is not None, given["block_offsets"] is not None
    b, h = "B" if packed or blocks else "b", "H" if blocks else "h"
    k, rows = f"{b}{h}S", "N" if packed else b
    if given["page_table"] is not None:  # k and v are a pool of pages that all rows share
        k, b = f"P{h}S", "B" if packed else b
    slopes = given["alibi"]
    alibi = h if slopes is None or slopes.ndim == 1 else ("N" if packed and slopes.shape[0] > 1 else b) + h
    lists = "L M L M"
    table = ("N" if packed else b) + "P"
    return (
        f"{b}{h}TD {k}D {k}E {b}{h}TS {b}{h}TS {alibi} {h} @ N N {rows} {rows} {b}T {b}S {lists} {table} "
        f"{b}{h}T {k} {k} -> {b}{h}TE {b}{h}T"
    )
