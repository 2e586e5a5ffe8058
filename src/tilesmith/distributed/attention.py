"""`context_parallel_attention`: softmax attention over a sequence whose tokens several ranks hold."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import reduce
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from tilesmith import ops
from tilesmith.device import philox
from tilesmith.distributed.checks import EVERYTHING, NAME, SCALED
from tilesmith.distributed.comparison import Answer, refusals_told
from tilesmith.distributed.execution import backward, forward
from tilesmith.distributed.kernels import Terms
from tilesmith.distributed.layout import Layout
from tilesmith.distributed.prepared import Asked, prepared, terms_of
from tilesmith.distributed.protocol import Parcel, Ring
from tilesmith.distributed.ring import ProcessGroupRing
from tilesmith.distributed.signature import Facts, Signed
from tilesmith.distributed.travel import Work
from tilesmith.engine.argument_checks import number

LIMIT = 600.0  # seconds
Group = dist.ProcessGroup | DeviceMesh | Ring | None
Shards = Tensor | Sequence[Tensor]


@torch.compiler.disable(reason="ranks compare their calls and exchange tokens")
def context_parallel_attention(
    q: Shards,
    k: Shards,
    v: Shards,
    group: Group = None,
    mask: ops.Mask = EVERYTHING,
    score: ops.Score = SCALED,
    *,
    mode: str = "auto",
    layout: Layout | str = "zigzag",
    cu_seqlens: Sequence[int] | Tensor | None = None,
    sinks: Tensor | None = None,
    dropout_p: float = 0.0,
    deterministic: bool | None = None,
    degree: int | None = None,
    kernel: str = "tilesmith",
    timeout: float = LIMIT,
) -> tuple[Any, Any]:
    """Softmax attention over a sequence sharded by tokens: (out, lse) of this rank's tokens, both differentiable.

    q [B, H, T, D], k [B, G, T, D], v [B, G, T, Dv]: this rank's T tokens, the same number on every rank; query head h
    reads kv head h // (H // G). With a `LocalRing` they are lists, one tensor for each rank, and so are out and lse.
    group: a process group or a DeviceMesh of torch.distributed (of two dims: the second shares heads), or a `Ring`; all
    ranks if None.

    mask, score, sinks, dropout_p, deterministic: as of `ops.attention`, with positions of the whole sequence. The mask
    may be causal and have a window; its `documents` are ids [B, T] of this rank's tokens, or a pair for queries and
    keys; `dense` and the score's `bias`, without a gradient, are rows of this rank's queries and columns of the whole
    sequence's keys in their order. With a `LocalRing` they are of the whole sequence.
    cu_seqlens [N + 1]: B is 1 and the sequence holds N documents, which do not see each other.

    layout: which tokens a rank holds: a `Layout`, or "zigzag" or "contiguous" of size * T tokens. What a layout leaves
    of T is padding: it is not attended, its out is 0, its lse -inf, its gradients are 0.
    mode: "allgather" (all keys that a rank's queries see come at once, while it computes with its own), "ring" (rank by
    rank, in memory that does not grow with their number), "ulysses" (tokens are exchanged for heads), "hybrid" (heads
    among `degree` neighbours, keys among groups of them), or "auto": the cheapest by `explain_context_parallel`, logged
    at INFO. degree: of "hybrid" alone; the second dim of a DeviceMesh if None.
    kernel: "tilesmith", or "cudnn" for comparison. timeout: seconds until a rank that does not answer is an error; a
    `Ring` has its own.

    Gradients are those of the ranks' own tokens; what every rank holds, such as sinks, gets its share, and the sum over
    ranks is the whole. Partial results are merged, and gradients added, in fp32; where at most a quarter of a rank's
    tokens have gradients from elsewhere too, as under a window, what it computes itself is rounded before. Keys travel
    with as many heads as k has, and only those that some query of the receiver sees. All ranks make the same calls, and
    run their backward in the same order. Raises ValueError or TypeError for what does not fit together, on every rank,
    also where one rank's arguments do not or where ranks disagree about shapes, dtypes, modes, numbers or the order;
    `RingError` naming rank and step where a rank dies or stalls. Sources: Liu et al., "Ring Attention with Blockwise
    Transformers", 2023; Jacobs et al., "DeepSpeed Ulysses", 2023; Fang and Zhao, "USP: A Unified Sequence Parallelism
    Approach", 2024.
    """
    ring = ring_of(group, timeout)
    counted, step = getattr(ring, "group", ring), f"{NAME}, forward"
    nth = _CALLS.get(counted, 0)
    if mode == "hybrid" and degree is None:
        degree = _degree(group)
    deterministic = torch.are_deterministic_algorithms_enabled() if deterministic is None else deterministic
    asked = Asked(mode, degree, kernel, dropout_p, deterministic, layout, cu_seqlens)
    with refusals_told(ring, step):
        call, shards = prepared(ring, (q, k, v), mask, score, sinks, asked)
        terms = terms_of(ring, shards, call, mask, score, sinks)
    signatures = {r: Signed("forward", nth, facts) for r, facts in call.facts.items()}
    answer = Answer(ring, signatures, step, then=lambda: _CALLS.__setitem__(counted, nth + 1))
    with answer.awaited():
        if call.dropout_p > 0.0 or mask.documents is not None:
            answer()  # a call that ranks refuse draws no seed, and ids travel
            terms = _begun(ring, call.layout, terms, shards)
        work = Work(ring, call.plan, call.kernel, terms, call.parts, nth, answer, call.early)
        flat = _Attention.apply(work, sinks, *(x for r in ring.ranks for x in shards[r]))
    if isinstance(q, Tensor):
        return flat[0], flat[1]
    return list(flat[0::2]), list(flat[1::2])


def ring_of(group: Group, timeout: float = LIMIT) -> Ring:
    """The ring of a process group or mesh, the same one at every call; a `Ring` is returned as it is."""
    # first what costs the host least: torch asks whether an object is a mesh in Python
    if not isinstance(group, type) and all(hasattr(group, name) for name in ("post", "wait", "agree")):
        if timeout != LIMIT:
            raise ValueError(f"{NAME}: timeout is {timeout}, but group is a Ring, which has its own; give it to that")
        return group
    if isinstance(group, DeviceMesh):
        if group.ndim > 2:
            raise ValueError(f"{NAME}: a DeviceMesh must have one dim or two, got {group.mesh_dim_names or group.ndim}")
        group = group.get_group() if group.ndim == 1 else group._flatten().get_group()
    if group is not None and not isinstance(group, dist.ProcessGroup):
        raise TypeError(f"{NAME}: group must be a process group, a DeviceMesh or a Ring, got {type(group).__name__}")
    if number(NAME, "timeout", timeout) <= 0:
        raise ValueError(f"{NAME}: timeout must be above 0 seconds, got {timeout}")
    if group is None:
        if not dist.is_initialized():
            raise RuntimeError(f"{NAME}: group is None and torch.distributed is not initialised; give a LocalRing")
        group = dist.group.WORLD
    rings = _RINGS.setdefault(group, {})
    if timeout not in rings:
        rings[timeout] = ProcessGroupRing(group, timeout)
    return rings[timeout]


def degree_of(of: str, mode: str, group: Group) -> int | None:
    """The `degree` of the calls that a layer of `mode` makes over `group`; None for other modes than "hybrid".

    Raises ValueError for "hybrid" over several ranks without a DeviceMesh of two dims: a layer takes no degree.
    """
    if mode != "hybrid":
        return None
    degree = _degree(group)
    if degree is None and ring_of(group).size > 1:
        raise ValueError(f"{of}: mode 'hybrid' needs a DeviceMesh of two dims, whose second one exchanges heads")
    return degree


def _degree(group: Group) -> int | None:
    return group.size(1) if isinstance(group, DeviceMesh) and group.ndim == 2 else None


_SLOPED = tuple(Facts({"gradient of lse": sloped}) for sloped in (False, True))
_RINGS: WeakKeyDictionary[dist.ProcessGroup, dict[float, ProcessGroupRing]] = WeakKeyDictionary()
_CALLS: WeakKeyDictionary[Any, int] = WeakKeyDictionary()  # of each group, those about which all ranks have agreed


class _Attention(torch.autograd.Function):
    """Forward and backward of all ranks of this process. Flat: q, k, v of each; out, lse of each."""

    @staticmethod
    def forward(ctx: Any, work: Work, sinks: Tensor | None, *flat: Tensor) -> tuple[Tensor, ...]:
        shards = dict(zip(work.ring.ranks, _by(3, flat)))
        found, kept = forward(work, shards)  # autograd is off in here
        results = [x for r in work.ring.ranks for x in found[r]]
        ctx.work, ctx.sinks = work, None if sinks is None else (sinks.dtype, sinks.device)
        # lse beside what is kept: results are what gradients of gradients pass through, and out may be large
        ctx.save_for_backward(*(x for r in work.ring.ranks for x in (*kept[r], found[r][1])))
        ctx.set_materialize_grads(False)
        return tuple(results)

    @staticmethod
    def backward(ctx: Any, *slopes: Tensor | None) -> tuple[Any, ...]:
        saved = ctx.saved_tensors
        if not torch.is_grad_enabled():
            return None, *_gradients(ctx.work, ctx.sinks, saved, slopes)
        with torch.no_grad():
            gradients = _gradients(ctx.work, ctx.sinks, saved, slopes)
        return None, *_Once.apply(len(gradients), *gradients, *slopes, *saved)  # create_graph


def _gradients(
    work: Work, of_sinks: tuple[torch.dtype, torch.device] | None, saved: Sequence[Tensor],
    slopes: Sequence[Tensor | None],
) -> list[Tensor | None]:  # fmt: skip
    """Those of sinks, and of q, k and v of each rank of this process."""
    ranks = work.ring.ranks
    kept = dict(zip(ranks, _by(6, saved)))
    given = dict(zip(ranks, _by(2, slopes)))
    sloped = any(dlse is not None for dlse in slopes[1::2])
    said = Signed("backward", work.number, _SLOPED[sloped])
    answer = Answer(work.ring, dict.fromkeys(ranks, said), f"{NAME}, backward")
    filled = {}
    with answer.awaited():
        for r, (dout, dlse) in given.items():  # a rank without tokens may get none
            q, _, v, _, _, lse = kept[r]
            dout = q.new_zeros(*lse.shape, v.shape[3]) if dout is None else dout
            filled[r] = dout, torch.zeros_like(lse) if dlse is None and sloped else dlse
        found = backward(work._replace(answer=answer), {r: x[:5] for r, x in kept.items()}, filled)
    dsinks = None
    if of_sinks is not None:
        dtype, device = of_sinks
        wide = torch.promote_types(dtype, torch.float32)
        dsinks = reduce(torch.add, [found[r][3].to(device, wide) for r in ranks]).to(dtype)
    return [dsinks, *(x for r in ranks for x in found[r][:3])]


class _Once(torch.autograd.Function):
    """Gradients as they are, which have none themselves. depends: how many of the tensors are gradients."""

    @staticmethod
    def forward(ctx: Any, count: int, *tensors: Tensor | None) -> tuple[Tensor | None, ...]:
        return tuple(None if x is None else x.view_as(x) for x in tensors[:count])

    @staticmethod
    def backward(ctx: Any, *slopes: Tensor | None) -> None:
        raise RuntimeError(f"{NAME}: gradients of its gradients are not supported; use ops.attention in one process")


def _by(count: int, flat: Sequence[Any]) -> list[tuple[Any, ...]]:
    return [tuple(flat[i : i + count]) for i in range(0, len(flat), count)]


def _begun(ring: Ring, layout: Layout, terms: Mapping[int, Terms], shards: Mapping) -> dict[int, Terms]:
    """With what is exchanged and drawn once all ranks agree: ids of all keys, seeds."""
    found = {}
    for r, some in terms.items():
        keys, seed = some.k_documents, None
        if keys is not None and len(ring.ranks) == 1:
            keys = _gathered_ids(ring, layout, keys)
        if some.dropout_p > 0.0:
            device = shards[r][0].device
            # ranks whose generators agree must still drop differently
            seed = philox.draw_seed(device) + torch.tensor([(r + 1) << 20, 0], device=device)
        found[r] = some._replace(k_documents=keys, seed=seed)
    return found


def _gathered_ids(ring: Ring, layout: Layout, ids: Tensor) -> Tensor:
    """The ids of all tokens [B, S] from those of this rank's."""
    me, mine = ring.ranks[0], ids.contiguous()
    parts = [mine if r == me else torch.empty_like(mine) for r in range(layout.size)]
    parcels = [Parcel(me, r, mine, None) for r in range(layout.size) if r != me]
    parcels += [Parcel(r, me, None, parts[r]) for r in range(layout.size) if r != me]
    ring.wait(ring.post(parcels, "document ids"))
    return layout.unshard(parts)
