"""`explain_context_parallel`: which mode a call would take, by the model alone, and what would move its tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from tilesmith import ops
from tilesmith.distributed import cost
from tilesmith.distributed.attention import Group, ring_of
from tilesmith.distributed.checks import EVERYTHING, LAYOUTS, SCALED, barred, masked_and_scored, packed, sight_of
from tilesmith.distributed.layout import Layout
from tilesmith.distributed.parts import Splits
from tilesmith.distributed.peer_memory import laid_out
from tilesmith.distributed.transport import Transport
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
    group: Group = None,
) -> cost.Decision:
    """Which mode "auto" chooses for a call of these sizes and why, with the estimate for every mode; and which
    transport moves its tokens between the ranks of `group`, and why.

    tokens: of the whole sequence; size: ranks; the other sizes are those of q and k, and dtype is theirs. mask, score,
    cu_seqlens, layout: those of the call; of tensors in them only whether they are there counts. machine: the model's
    facts, those of `device` if None. group: as of `context_parallel_attention`, but with None no transport is named; of
    a group that serves GPUs it is that of tensors there. Nothing is run. Raises ValueError or TypeError, naming the
    argument, for sizes below 1, kv_heads that do not divide heads, a layout of other tokens or ranks, documents that
    end behind its tokens, a group of another size, and where no mode serves the call.
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
    facts = machine or cost.machine_of(where)
    found = cost.choose(problem, facts, barred(mask, score))
    return replace(found, transport=_transport(group, problem, found, facts))


def _transport(group: Group, problem: cost.Problem, taken: cost.Decision, machine: cost.Machine) -> Transport:
    """What moves tokens between the ranks of a group."""
    size = problem.layout.size
    if group is None:
        return Transport("that of the group", f"{NAME}(group=...) tells which and why")
    ring = ring_of(group)
    if ring.size != size:
        raise ValueError(f"{NAME}: group has {ring.size} ranks and size is {size}: give the group's size")
    if size == 1:
        return Transport("none", "one rank")
    chosen = getattr(ring, "transport", None)
    if chosen is None:
        return Transport(type(ring).__name__, "a Ring of its own")
    return chosen(need=_need(problem, taken, machine))


def _need(problem: cost.Problem, taken: cost.Decision, machine: cost.Machine) -> int:
    """Bytes of a rank in the largest exchange of a call and its gradients."""
    ring = taken.mode == "ring"
    plan = cost.planned(problem, machine, taken.degree, ring)
    splits = cost.ring_parts(problem, machine).splits if ring else Splits()
    token, wide = problem.batch * problem.dim * problem.itemsize, problem.batch * problem.dim * 4
    heads, kv_heads = (max(last - first for first, last in each) for each in (plan.q_heads, plan.kv_heads))
    exchanges = []
    for stage in plan.stages[1:]:
        some = [-(-kv_heads // split.kv) for split in splits]
        exchanges += [(stage.transfers, [(token, max(some))] * 2), (stage.transfers.back, [(wide, some[1])] * 2)]
    if plan.degree > 1:  # q, k and v; dout and the gradient of lse; out and lse, and gradients, which come back
        lse, shared, many = problem.batch * 4, wide if plan.replicates else token, 3 if plan.alike else 2
        exchanges += [
            (plan.q_moves, [(token, problem.heads), (lse, problem.heads)]),
            (plan.kv_moves, [(token, problem.kv_heads)] * many),
            (plan.q_moves.back, [(token, heads), (lse, heads)]),
            (plan.kv_moves.back, [(shared, kv_heads)] * many),
        ]
    return max((laid_out(moves, source, rows)[1] for moves, rows in exchanges for source in moves.spans), default=0)


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
