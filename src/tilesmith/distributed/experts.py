"""Experts that several ranks hold: tokens travel to the ranks of their experts, and what comes of them back."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from tilesmith import ops
from tilesmith.distributed.comparison import compare, refusal
from tilesmith.distributed.ring import process_group
from tilesmith.distributed.signature import Signature
from tilesmith.engine.argument_checks import attributed_to
from tilesmith.engine.sharding import distributed

NAME = "expert_parallel"
DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
FACTS = (
    "experts in gate_up", "features of x", "choices of a token", "x.dtype", "weights.dtype", "requires_grad of x",
    "requires_grad of weights", "requires_grad of the result",
)  # fmt: skip


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
    """`ops.experts` for this rank's tokens, with each rank of a group holding an equal share of the experts.

    x: [..., C], this rank's tokens, as many as it has. gate_up [E / P, N, C], down [E / P, C, I] and the biases: this
    rank's experts; rank r has those from r E / P on. indices: [..., K] among all E experts; others contribute nothing.
    weights: [..., K]. group: a process group, a one-dimensional mesh, or None for all ranks. activation: its name and
    options, as of `ops.experts`.

    A token is sent once to each rank that holds experts of it; that rank weights and adds their outputs. The sums of
    ranks are rounded to x's dtype and added in the order of ranks. The forward has five exchanges, of which the first,
    of counts, waits for the device and compares what ranks must have alike; the backward has three at most. All ranks
    must call it; all must want the gradients of x or none, also those of weights, and all must run the backward for the
    same ones or none. Which rank trains its experts is its own affair. The gradients of gate_up, down and biases are
    those of all ranks' tokens: no reduction over the group must follow. Under autocast tokens travel in its dtype.

    Raises ValueError for a mesh of several dims, DTensors, and as `ops.experts` does; TypeError for another group. What
    one rank is refused, and what ranks have unlike (numbers of experts, of features, of choices, dtypes, wanted
    gradients), is an error on every rank.
    """
    group = process_group(NAME, group)
    with _refusals_told(group, x):
        args = ops.experts.bind((x, gate_up, down, indices, weights, gate_up_bias, down_bias), activation)
        if distributed(args):
            raise ValueError(f"{NAME}: does not take DTensors; pass each rank's local tensors, as with .to_local()")
        args = ops.experts._autocast(args)
        ops.experts.check(*args)
        facts = _facts(*args[:7])
    (x, gate_up, down, indices, weights), rest = args[:5], args[5:]
    ranks, held = dist.get_world_size(group), gate_up.shape[0]
    tokens = x.reshape(x.shape[:-1].numel(), x.shape[-1])
    chosen = indices.reshape(tokens.shape[0], indices.shape[-1])
    owner = torch.where((chosen >= 0) & (chosen < ranks * held), chosen // held, -1)
    every = torch.arange(ranks, device=x.device)
    goes = (owner[None] == every[:, None, None]).any(-1)  # [ranks, tokens]
    to, token = goes.nonzero(as_tuple=True)
    sent, received = _counts(goes.sum(1), facts, group)
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


def _facts(
    x: Tensor, gate_up: Tensor, down: Tensor, indices: Tensor, weights: Tensor, *biases: Tensor | None
) -> tuple[int, ...]:  # fmt: skip
    """What ranks must have alike, a number for each of `FACTS`."""
    tensors = (x, weights, gate_up, down, *biases)
    wants = [torch.is_grad_enabled() and t is not None and t.requires_grad for t in tensors]
    dtypes = (DTYPES.index(t.dtype) for t in (x, weights))
    return gate_up.shape[0], x.shape[-1], indices.shape[-1], *dtypes, wants[0], wants[1], any(wants)


def _counts(sent: Tensor, facts: Sequence[int], group: dist.ProcessGroup) -> tuple[list[int], list[int]]:
    """How many rows this rank sends to each and receives from each. Raises ValueError, on all ranks, where one was
    refused or has other facts."""
    said = torch.cat((sent[:, None], sent.new_tensor([facts]).expand(len(sent), -1)), 1)
    heard = torch.empty_like(said)
    dist.all_to_all_single(heard, said, group=group)
    theirs = heard.tolist()
    compare({r: _signature(row[1:]) for r, row in enumerate(theirs)}, NAME)
    return sent.tolist(), [row[0] for row in theirs]


def _signature(facts: Sequence[int]) -> Signature:
    if facts[0] < 0:
        return refusal(ValueError("see the error there"))
    said = {name: bool(fact) if name.startswith("requires") else fact for name, fact in zip(FACTS, facts)}
    return said | {name: str(DTYPES[said[name]]) for name in FACTS if name.endswith("dtype")}


@contextlib.contextmanager
def _refusals_told(group: dist.ProcessGroup, x: Any) -> Iterator[None]:
    """Other ranks, which would wait for this one's counts, raise where this one is refused within."""
    try:
        yield
    except Exception:
        nccl = "nccl" in dist.get_backend(group)
        device = x.device if isinstance(x, Tensor) else torch.device("cuda" if nccl else "cpu")
        nothing = torch.zeros(dist.get_world_size(group), dtype=torch.int64, device=device)
        with contextlib.suppress(ValueError, TypeError, RuntimeError):
            _counts(nothing, (-1,) * len(FACTS), group)
        raise


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
