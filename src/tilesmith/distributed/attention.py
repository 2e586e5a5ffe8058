"""`context_parallel_attention`: softmax attention over a sequence whose tokens several ranks hold."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from tilesmith import ops
from tilesmith.device import philox
from tilesmith.distributed import cost
from tilesmith.distributed.execution import Work, backward, forward
from tilesmith.distributed.kernels import KERNELS, Terms
from tilesmith.distributed.layout import Layout, boundaries
from tilesmith.distributed.pieces import FAR, Sight
from tilesmith.distributed.ring import Parcel, ProcessGroupRing, Ring
from tilesmith.distributed.schedule import HeadPart, Schedule, head_parts, schedule
from tilesmith.engine.argument_checks import probability
from tilesmith.ops.attn.checks import check_shapes

LAYOUTS = ("zigzag", "contiguous")
MODES = ("auto", "allgather", "ulysses", "ring", "hybrid")
NAME = "context_parallel_attention"
EVERYTHING, SCALED = ops.Mask(), ops.Score()
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
    timeout: float = 600.0,
) -> tuple[Any, Any]:
    """Softmax attention of a sequence that is sharded by tokens: (out, lse) of this rank's tokens, both differentiable.

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
    among `degree` neighbours, keys among groups of them), or "auto": the cheapest by `explain_context_parallel`.
    kernel: "tilesmith", or "cudnn" for comparison. timeout: seconds until a rank that does not answer is an error.

    Gradients are those of the ranks' own tokens; what every rank holds, such as sinks, gets its share, and the sum over
    ranks is the whole. Partial results are merged, and gradients added, in fp32. Keys travel with as many heads as k
    has, and only those that some query of the receiver sees. Raises ValueError or TypeError for what does not fit
    together, on every rank also where ranks disagree about shapes, dtypes, modes or numbers; `RingError` naming rank
    and step where a rank dies or stalls. Sources: Liu et al., "Ring Attention with Blockwise Transformers", 2023;
    Jacobs et al., "DeepSpeed Ulysses", 2023; Fang and Zhao, "USP: A Unified Sequence Parallelism Approach", 2024.
    """
    ring = ring_of(group, timeout)
    local = isinstance(q, Tensor)
    qs, ks, vs = ((x,) if isinstance(x, Tensor) else tuple(x) for x in (q, k, v))
    shards = _shards(ring, qs, ks, vs)
    first = shards[ring.ranks[0]][0]
    deterministic = torch.are_deterministic_algorithms_enabled() if deterministic is None else deterministic
    dropout_p = probability(NAME, "dropout_p", dropout_p)
    starts = None if cu_seqlens is None else boundaries(cu_seqlens)
    if mode not in MODES:
        raise ValueError(f"{NAME}: mode must be one of {', '.join(MODES)}, got {mode!r}")
    if kernel not in KERNELS:
        raise ValueError(f"{NAME}: kernel must be one of {', '.join(KERNELS)}, got {kernel!r}")
    if isinstance(group, DeviceMesh) and group.ndim == 2 and degree is None:
        degree = group.size(1)
    numbers = {
        "mode": mode, "degree": degree, "kernel": kernel, "causal": mask.causal, "window": mask.window,
        "scale": score.scale, "softcap": score.softcap, "sinks": sinks is not None, "dropout_p": dropout_p,
        "deterministic": deterministic, "documents": mask.documents is not None, "dense": mask.dense is not None,
        "bias": score.bias is not None, "alibi": score.alibi is not None,
        "layout": layout if isinstance(layout, str) else _digest(layout), "cu_seqlens": _digest(starts),
    }  # fmt: skip
    ring.agree({r: {**_shapes(shards[r]), **numbers} for r in ring.ranks}, f"{NAME}, forward")
    placed = _placed(layout, ring.size, first.shape[2])
    sight = sight_of(mask)
    _refuse(mask, score, shards, placed, starts, ring)
    decision = _decide(shards, placed, starts, sight, mask, score, mode, degree, ring)
    plan = _plan(shards, placed, starts, sight, decision)
    terms = _terms(ring, shards, placed, mask, score, sinks, dropout_p, deterministic)
    work = Work(ring, plan, KERNELS[kernel], terms, _parts(shards, decision))
    for r in ring.ranks:
        _refuse_kernel(work, r, shards[r][0])
    flat = _Attention.apply(work, sinks, *(x for r in ring.ranks for x in shards[r]))
    if local:
        return flat[0], flat[1]
    return list(flat[0::2]), list(flat[1::2])


def ring_of(group: Group, timeout: float = 600.0) -> Ring:
    """The ring of a process group or mesh; the same one at every call, a given one itself."""
    if isinstance(group, DeviceMesh):
        if group.ndim > 2:
            raise ValueError(f"{NAME}: a DeviceMesh must have one dim or two, got {group.mesh_dim_names or group.ndim}")
        group = group.get_group() if group.ndim == 1 else group._flatten().get_group()
    if group is not None and not isinstance(group, dist.ProcessGroup):
        if isinstance(group, type) or not all(hasattr(group, name) for name in ("post", "wait", "agree")):
            raise TypeError(
                f"{NAME}: group must be a process group, a DeviceMesh or a Ring, got {type(group).__name__}"
            )
        return group
    if group is None:
        if not dist.is_initialized():
            raise RuntimeError(f"{NAME}: group is None and torch.distributed is not initialised; give a LocalRing")
        group = dist.group.WORLD
    rings = _RINGS.setdefault(group, {})
    if timeout not in rings:
        rings[timeout] = ProcessGroupRing(group, timeout)
    return rings[timeout]


_RINGS: WeakKeyDictionary[dist.ProcessGroup, dict[float, ProcessGroupRing]] = WeakKeyDictionary()


class _Attention(torch.autograd.Function):
    """Forward and backward of all ranks of this process. Flat: q, k, v of each; out, lse of each."""

    @staticmethod
    def forward(ctx: Any, work: Work, sinks: Tensor | None, *flat: Tensor) -> tuple[Tensor, ...]:
        shards = dict(zip(work.ring.ranks, _by(3, flat)))
        with torch.no_grad():
            found = forward(work, shards)
        results = [x for r in work.ring.ranks for x in found[r]]
        ctx.work, ctx.sinks = work, None if sinks is None else (sinks.dtype, sinks.device)
        ctx.save_for_backward(*flat, *results)
        ctx.set_materialize_grads(False)
        return tuple(results)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *slopes: Tensor | None) -> tuple[Any, ...]:
        work, ranks = ctx.work, ctx.work.ring.ranks
        saved = ctx.saved_tensors
        shards = dict(zip(ranks, _by(3, saved[: 3 * len(ranks)])))
        results = dict(zip(ranks, _by(2, saved[3 * len(ranks) :])))
        given = dict(zip(ranks, _by(2, slopes)))
        work.ring.agree({r: {"pass": "backward", "dlse": given[r][1] is not None} for r in ranks}, f"{NAME}, backward")
        filled = {r: (torch.zeros_like(results[r][0]) if d is None else d, dl) for r, (d, dl) in given.items()}
        found = backward(work, shards, results, filled)
        dsinks = None
        if ctx.sinks is not None:
            dtype, device = ctx.sinks
            dsinks = sum(found[r][3].to(device, torch.promote_types(dtype, torch.float32)) for r in ranks).to(dtype)
        return None, dsinks, *(x for r in ranks for x in found[r][:3])


def _by(count: int, flat: Sequence[Any]) -> list[tuple[Any, ...]]:
    return [tuple(flat[i : i + count]) for i in range(0, len(flat), count)]


def _shards(ring: Ring, *each: Sequence[Tensor]) -> dict[int, tuple[Tensor, ...]]:
    for name, tensors in zip("qkv", each):
        if len(tensors) != len(ring.ranks):
            raise ValueError(f"{NAME}: {name} must be {len(ring.ranks)} tensors, one of each rank, got {len(tensors)}")
    shards = {}
    for r, (q, k, v) in zip(ring.ranks, zip(*each)):
        for name, x in (("q", q), ("k", k), ("v", v)):
            if not isinstance(x, Tensor):
                raise TypeError(f"{NAME}: {name} must be a tensor, got {type(x).__name__}")
        check_shapes(NAME, q, k, v)
        if q.shape[2] != k.shape[2]:
            raise ValueError(
                f"{NAME}: a rank's queries and keys are the same tokens; got {q.shape[2]} and {k.shape[2]}"
            )
        for name, x in (("k", k), ("v", v)):
            if x.dtype != q.dtype:
                raise TypeError(f"{NAME}: {name} has dtype {x.dtype} and q {q.dtype}; give q, k and v one dtype")
        kind = q.device.type
        if kind != "meta" and torch.is_autocast_enabled(kind) and q.dtype in (torch.float32,):
            q, k, v = (x.to(torch.get_autocast_dtype(kind)) for x in (q, k, v))
        shards[r] = tuple(x if x.stride(-1) == 1 else x.contiguous() for x in (q, k, v))
    return shards


def _shapes(shard: Sequence[Tensor]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, x in zip("qkv", shard):
        found |= {f"{name}.shape": list(x.shape), f"{name}.dtype": str(x.dtype).removeprefix("torch.")}
    return found


def _digest(value: Any) -> str | None:
    return None if value is None else hashlib.sha256(repr(value).encode()).hexdigest()[:16]


def _placed(layout: Layout | str, size: int, tokens: int) -> Layout:
    if isinstance(layout, str):
        if layout not in LAYOUTS:
            raise ValueError(f"{NAME}: layout must be a Layout, 'zigzag' or 'contiguous', got {layout!r}")
        if layout == "zigzag" and tokens % 2:
            raise ValueError(
                f"{NAME}: layout 'zigzag' needs an even number of tokens on each rank, got {tokens}; give "
                "Layout.zigzag(number of tokens, ranks), which says what is padding"
            )
        return getattr(Layout, layout)(tokens * size, size)
    if not isinstance(layout, Layout):
        raise TypeError(f"{NAME}: layout must be a Layout, 'zigzag' or 'contiguous', got {type(layout).__name__}")
    if layout.size != size or layout.local != tokens:
        raise ValueError(
            f"{NAME}: layout is of {layout.size} ranks with {layout.local} tokens each; there are {size} ranks and q "
            f"has {tokens} tokens"
        )
    return layout


def sight_of(mask: ops.Mask) -> Sight:
    """How far before and behind itself a query sees."""
    lowered = mask.lower()
    left, right = (lowered.get(f"window_{side}", -1) for side in ("left", "right"))
    if lowered.get("causal"):
        right = 0
    return Sight(FAR if left < 0 else left, FAR if right < 0 else right)


def _refuse(mask: ops.Mask, score: ops.Score, shards: Mapping, layout: Layout, starts: Any, ring: Ring) -> None:
    """Raise for what no mode serves, and for shapes that do not fit the layout."""
    for name, value in (("prefix", mask.prefix), ("blocks", mask.blocks)):
        if value is not None:
            raise ValueError(f"{NAME}: Mask({name}=...) is not served; say the same as Mask(dense=...)")
    if starts is not None and (starts[-1] > layout.tokens or shards[ring.ranks[0]][0].shape[0] != 1):
        raise ValueError(
            f"{NAME}: cu_seqlens ends at {starts[-1]} and q has {shards[ring.ranks[0]][0].shape[0]} rows; packed "
            f"documents are one row of at most {layout.tokens} tokens, those of the layout"
        )
    batch, _, tokens, _ = shards[ring.ranks[0]][0].shape
    tokens = layout.tokens if len(ring.ranks) > 1 else tokens
    for ids in _pair(mask.documents):
        if tuple(ids.shape) != (batch, tokens) or ids.dtype != torch.int32:
            raise ValueError(
                f"{NAME}: Mask(documents=...) must be int32 [{batch}, {tokens}], ids of this rank's tokens, got "
                f"{ids.dtype} {list(ids.shape)}"
            )
    for name, x in (("Mask(dense=...)", mask.dense), ("Score(bias=...)", score.bias)):
        if x is not None and (x.shape[-1] not in (1, layout.tokens) or (x.ndim > 1 and x.shape[-2] not in (1, tokens))):
            raise ValueError(
                f"{NAME}: {name} must be [..., {tokens}, {layout.tokens}]: this rank's queries, all keys; got "
                f"{list(x.shape)}"
            )
        if x is not None and x.requires_grad and ring.size > 1:
            raise ValueError(f"{NAME}: {name} gets no gradient over ranks; detach it")
    if score.alibi is not None and score.alibi.requires_grad:
        raise ValueError(f"{NAME}: Score(alibi=...) gets no gradient; detach it")


def _refuse_kernel(work: Work, rank: int, q: Tensor) -> None:
    for stage in work.schedule.stages:
        for call in (*stage.calls[rank], *stage.answers[rank]):
            why = work.kernel.rejects(q, call, work.terms[rank])
            if why:
                raise ValueError(f"{NAME}: kernel {work.kernel.name!r} cannot serve this call: {why}")


def _decide(
    shards: Mapping, layout: Layout, starts: Any, sight: Sight, mask: ops.Mask, score: ops.Score, mode: str,
    degree: int | None, ring: Ring,
) -> cost.Decision:  # fmt: skip
    q, k, v = shards[ring.ranks[0]]
    barred = {}
    if score.alibi is not None:
        why = "ALiBi needs whole sequences of a head: only 'ulysses' serves it"
        barred |= dict.fromkeys(("allgather", "ring", "hybrid"), why)
    if mask.dense is not None or score.bias is not None or mask.documents is not None:
        why = "a dense mask, bias or document ids of a rank's queries are not exchanged for heads"
        barred |= dict.fromkeys(("ulysses", "hybrid"), why)
    if ring.size == 1:
        return cost.Decision("allgather", 1, "one rank", ())
    if mode == "auto":
        named = layout, starts or (0, layout.tokens), sight, q.shape[0], q.shape[1], k.shape[1], v.shape[3]
        problem = cost.Problem(*named, q.dtype.itemsize)
        key = problem, q.device, tuple(sorted(barred.items()))
        if key not in _DECISIONS:
            if len(_DECISIONS) >= 256:
                _DECISIONS.clear()
            _DECISIONS[key] = cost.choose(problem, cost.machine_of(q.device), barred)
        return _DECISIONS[key]
    if mode in barred:
        raise ValueError(f"{NAME}: mode {mode!r} cannot serve this call: {barred[mode]}")
    if mode == "hybrid":
        if degree is None:
            raise ValueError(f"{NAME}: mode 'hybrid' needs degree, or a DeviceMesh of two dims")
        if ring.size % degree or not 1 <= degree <= ring.size:
            raise ValueError(f"{NAME}: degree must divide the {ring.size} ranks, got {degree}")
        return cost.Decision(mode, degree, "asked for", ())
    return cost.Decision(mode, ring.size if mode == "ulysses" else 1, "asked for", ())


_DECISIONS: dict[Any, cost.Decision] = {}


def _plan(shards: Mapping, layout: Layout, starts: Any, sight: Sight, decision: cost.Decision) -> Schedule:
    q, k, _ = next(iter(shards.values()))
    whole = starts or (0, layout.tokens)
    try:
        many = q.shape[1], k.shape[1], q.shape[0] == 1
        return schedule(layout, whole, sight, decision.degree, decision.mode == "ring", *many)
    except ValueError as problem:
        raise ValueError(f"{NAME}: mode {decision.mode!r}: {problem}") from None


def _parts(shards: Mapping, decision: cost.Decision) -> tuple[HeadPart, ...]:
    """The parts of the heads that are worked on one after another: in a ring, whose memory they bound."""
    if decision.mode != "ring":
        return ()
    q, k, v = next(iter(shards.values()))
    return head_parts(q.shape[1], k.shape[1], q.shape[2], q.shape[3], v.shape[3], q.dtype.itemsize)


def _terms(
    ring: Ring, shards: Mapping, layout: Layout, mask: ops.Mask, score: ops.Score, sinks: Tensor | None,
    dropout_p: float, deterministic: bool,
) -> dict[int, Terms]:  # fmt: skip
    q = shards[ring.ranks[0]][0]
    if sinks is not None and tuple(sinks.shape) != (q.shape[1],):
        raise ValueError(f"{NAME}: sinks must be [{q.shape[1]}], one for each query head, got {list(sinks.shape)}")
    planes = [None if x is None else x.reshape((1,) * (4 - x.ndim) + tuple(x.shape)) for x in (score.bias, mask.dense)]
    q_ids, k_ids = _pair(mask.documents) or (None, None)
    several = len(ring.ranks) > 1
    if k_ids is not None and not several:
        k_ids = _gathered_ids(ring, layout, k_ids)
    found = {}
    for r in ring.ranks:
        device = shards[r][0].device
        seed = None
        if dropout_p > 0.0:
            # ranks whose generators agree must still drop differently
            seed = philox.draw_seed(device) + torch.tensor([(r + 1) << 20, 0], device=device)
        bias, dense, ids = *planes, q_ids
        if several:
            bias, dense = (_rows_of(x, layout, r) for x in planes)
            ids = None if q_ids is None else layout.shard(q_ids, r, 1)
        bias, dense, ids, keys = (None if x is None else x.to(device) for x in (bias, dense, ids, k_ids))
        found[r] = Terms(
            scale=score.scale, softcap=score.softcap, alibi=None if score.alibi is None else score.alibi.to(device),
            sinks=None if sinks is None else sinks.detach().to(device), bias=bias, mask=dense,
            q_documents=ids, k_documents=keys, dropout_p=dropout_p, seed=seed,
            deterministic=deterministic,
        )  # fmt: skip
    return found


def _pair(documents: Tensor | tuple[Tensor, Tensor] | None) -> tuple[Tensor, ...]:
    return () if documents is None else documents if isinstance(documents, tuple) else (documents, documents)


def _rows_of(x: Tensor | None, layout: Layout, rank: int) -> Tensor | None:
    return x if x is None or x.shape[-2] == 1 else layout.shard(x, rank, 2)


def _gathered_ids(ring: Ring, layout: Layout, ids: Tensor) -> Tensor:
    """The ids of all tokens [B, S] from those of this rank's."""
    me, mine = ring.ranks[0], ids.contiguous()
    parts = [mine if r == me else torch.empty_like(mine) for r in range(layout.size)]
    parcels = [Parcel(me, r, mine, None) for r in range(layout.size) if r != me]
    parcels += [Parcel(r, me, None, parts[r]) for r in range(layout.size) if r != me]
    ring.wait(ring.post(parcels, "document ids"))
    return layout.unshard(parts)
