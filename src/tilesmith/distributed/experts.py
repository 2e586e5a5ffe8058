"""Experts that several ranks hold: tokens travel to the ranks of their experts, and what comes of them back."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from tilesmith import ops
from tilesmith.engine.argument_checks import attributed_to
from tilesmith.engine.arguments import shown
from tilesmith.engine.sharding import distributed


@attributed_to("experts")
def expert_parallel(
    x: Tensor,
    gate_up: Tensor,
    down: Tensor,
    indices: Tensor,
    weights: Tensor,
    group: dist.ProcessGroup | DeviceMesh | None = None,
    *,
    gate_up_bias: Tensor | None = None,
    down_bias: Tensor | None = None,
    **activation: Any,
) -> Tensor:
    """`ops.experts` of this rank's tokens where each rank of a group holds an equal share of the experts.

    x: [..., C], this rank's tokens, as many as it has. gate_up [E / P, N, C], down [E / P, C, I] and the biases: this
    rank's experts; rank r has those from r E / P on. indices: [..., K] among all E experts; others contribute nothing.
    weights: [..., K]. group: a process group, a one-dimensional mesh, or None for all ranks. activation: its name and
    options, as of `ops.experts`.

    A token travels once to each rank that has experts of it, which weights and adds what they give. The sums of ranks
    are rounded to x's dtype and added in the order of ranks. The forward has five exchanges, of which the first, of
    counts, waits for the device; the backward has three at most. All ranks must call it, and all must run the backward
    or none. The gradients of gate_up, down and biases are those of all ranks' tokens: no reduction over the group must
    follow. Under autocast tokens travel in its dtype.

    Raises ValueError for a mesh of several dims, DTensors, ranks whose numbers of experts differ, and as `ops.experts`
    does; TypeError for another group.
    """
    group = _group(group)
    args = ops.experts.bind((x, gate_up, down, indices, weights, gate_up_bias, down_bias), activation)
    if distributed(args):
        raise ValueError("expert_parallel: takes no DTensors; pass what each rank holds, as with .to_local()")
    args = ops.experts._autocast(args)
    ops.experts.check(*args)
    (x, gate_up, down, indices, weights), rest = args[:5], args[5:]
    ranks, held = dist.get_world_size(group), gate_up.shape[0]
    tokens = x.reshape(x.shape[:-1].numel(), x.shape[-1])
    chosen = indices.reshape(tokens.shape[0], indices.shape[-1])
    owner = torch.where((chosen >= 0) & (chosen < ranks * held), chosen // held, -1)
    every = torch.arange(ranks, device=x.device)
    goes = (owner[None] == every[:, None, None]).any(-1)  # [ranks, tokens]
    to, token = goes.nonzero(as_tuple=True)
    sent, received = _counts(goes.sum(1), held, group)
    local = torch.where(owner[token] == to[:, None], chosen[token] - to[:, None] * held, -1)
    rows = _Exchange.apply(tokens[token], sent, received, group)
    scales = _Exchange.apply(weights.reshape(chosen.shape)[token], sent, received, group)
    which = _exchanged(local, sent, received, group)
    made = ops.experts(rows, gate_up, down, which, scales, *rest)
    back = _Exchange.apply(made, received, sent, group)
    total = tokens.new_zeros(tokens.shape, dtype=torch.promote_types(x.dtype, torch.float32))
    for part, places in zip(back.split(sent), token.split(sent)):  # a rank has each token once: no sum is a race
        total = total.index_add(0, places, part.to(total.dtype))
    return total.to(x.dtype).reshape(x.shape)


def _group(group: Any) -> dist.ProcessGroup | None:
    """The process group that `group` names."""
    if isinstance(group, DeviceMesh):
        if group.ndim != 1:
            raise ValueError(f"expert_parallel: group is a mesh of {group.ndim} dims; it must have one, as mesh['ep']")
        return group.get_group()
    if group is not None and not isinstance(group, dist.ProcessGroup):
        raise TypeError(
            f"expert_parallel: group must be a process group, a mesh of one dim or None, got {shown(group)}; write "
            "mesh['ep'], for example"
        )
    return group


def _counts(sent: Tensor, held: int, group: dist.ProcessGroup | None) -> tuple[list[int], list[int]]:
    """How many rows this rank sends to each and receives from each."""
    said = torch.stack((sent, torch.full_like(sent, held)), 1)
    heard = torch.empty_like(said)
    dist.all_to_all_single(heard, said, group=group)
    (mine, _), (theirs, others) = said.t().tolist(), heard.t().tolist()
    if any(n != held for n in others):
        raise ValueError(f"expert_parallel: gate_up has {held} experts here; on the ranks of the group it has {others}")
    return mine, theirs


def _exchanged(rows: Tensor, sent: list[int], received: list[int], group: dist.ProcessGroup | None) -> Tensor:
    """The rows that the other ranks send here, in the order of ranks."""
    out = rows.new_empty((sum(received), *rows.shape[1:]))
    dist.all_to_all_single(out, rows.contiguous(), received, sent, group=group)
    return out


class _Exchange(torch.autograd.Function):
    """`_exchanged`, whose gradient goes back the same way."""

    @staticmethod
    def forward(ctx, rows, sent, received, group):
        ctx.way = (received, sent, group)
        return _exchanged(rows, sent, received, group)

    @staticmethod
    def backward(ctx, grad):
        return _Exchange.apply(grad, *ctx.way), None, None, None  # not `_exchanged`, which a second backward would miss
