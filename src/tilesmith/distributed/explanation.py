"""`explain_context_parallel`: which mode a call would take, by the model alone."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from tilesmith import ops
from tilesmith.distributed import cost
from tilesmith.distributed.checks import EVERYTHING, LAYOUTS, SCALED, barred, masked_and_scored, packed, sight_of
from tilesmith.distributed.layout import Layout
from tilesmith.engine.argument_checks import choice, divides, located
from tilesmith.engine.argument_checks import size as checked_size
from tilesmith.engine.arguments import shown

NAME = "explain_context_parallel"


def explain_context_parallel(
    tokens: int,
    size: int,
    *,
    heads: int,
    kv_heads: int | None = None,
    head_dim: int = 128,
    batch: int = 1,
    mask: ops.Mask = EVERYTHING,
    score: ops.Score = SCALED,
    cu_seqlens: Sequence[int] | Tensor | None = None,
    layout: Layout | str = "zigzag",
    dtype: torch.dtype = torch.bfloat16,
    machine: cost.Machine | None = None,
    device: torch.device | str = "cpu",
) -> cost.Decision:
    """Which mode "auto" takes for such a call, why, and what the model says of every mode.

    tokens: of the whole sequence; size: ranks; the other sizes are those of q and k, and dtype is theirs. mask, score,
    cu_seqlens, layout: those of the call; of tensors in them only whether they are there counts. machine: the model's
    facts, those of `device` if None. Nothing is run. Raises ValueError or TypeError, naming the argument, for sizes
    below 1, kv_heads that do not divide heads, a layout of other tokens or ranks, documents that end behind its tokens,
    and where no mode serves the call.
    """
    kv_heads = heads if kv_heads is None else kv_heads
    sizes = {"tokens": tokens, "size": size, "heads": heads, "kv_heads": kv_heads, "head_dim": head_dim, "batch": batch}
    for name, value in sizes.items():
        checked_size(NAME, name, value)
    divides(NAME, "kv_heads", kv_heads, "heads", heads)
    masked_and_scored(mask, score, NAME)
    if not isinstance(dtype, torch.dtype):
        raise TypeError(f"{NAME}: dtype must be a torch.dtype, got {shown(dtype)}")
    if machine is not None and not isinstance(machine, cost.Machine):
        raise TypeError(
            f"{NAME}: machine must be a Machine or None, got {shown(machine)}; take one of "
            f"tilesmith.distributed.cost.MACHINES: {', '.join(cost.MACHINES)}"
        )
    placed = _placed(layout, tokens, size)
    starts = packed(cu_seqlens, placed, batch, NAME)
    problem = cost.Problem(placed, starts, sight_of(mask), batch, heads, kv_heads, head_dim, dtype.itemsize)
    where = located(NAME, "device", device)
    return cost.choose(problem, machine or cost.machine_of(where), barred(mask, score))


def _placed(layout: Layout | str, tokens: int, size: int) -> Layout:
    if isinstance(layout, str):
        return getattr(Layout, choice(NAME, "layout", layout, LAYOUTS))(tokens, size)
    if not isinstance(layout, Layout):
        raise TypeError(f"{NAME}: layout must be a Layout, 'zigzag' or 'contiguous', got {shown(layout)}")
    if (layout.size, layout.tokens) != (size, tokens):
        raise ValueError(
            f"{NAME}: layout is of {layout.size} ranks and {layout.tokens} tokens; size is {size} and tokens "
            f"{tokens}: make a layout of these"
        )
    return layout
