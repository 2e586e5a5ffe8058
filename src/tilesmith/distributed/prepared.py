"""Prepared calls of context-parallel attention: what follows from a call's facts alone is worked out once and kept.

Facts are shapes, dtypes, devices, flags, numbers, the layout and the documents' boundaries; what tensors hold is not
among them. A call whose facts were accepted once is found again by them, without its checks; what is refused is not
kept, so it is checked, and refused, each time.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tilesmith import ops
from tilesmith.distributed import checks, cost
from tilesmith.distributed.checks import NAME
from tilesmith.distributed.comparison import compare
from tilesmith.distributed.kernels import KERNELS, Kernel, Terms
from tilesmith.distributed.layout import Layout
from tilesmith.distributed.parts import HeadPart, head_parts
from tilesmith.distributed.protocol import Ring
from tilesmith.distributed.schedule import Schedule
from tilesmith.distributed.signature import Facts
from tilesmith.engine.argument_checks import choice, flag, probability
from tilesmith.engine.argument_checks import size as checked_size
from tilesmith.engine.torch_private import any_autocast, autocasts

MODES = ("auto", "allgather", "ulysses", "ring", "hybrid")
MOST = 256  # calls that are kept
log = logging.getLogger("tilesmith")
Parts = tuple[Sequence[HeadPart], Sequence[HeadPart]]
Shards = Mapping[int, tuple[Tensor, ...]]


class Asked(NamedTuple):
    """Arguments of a call beside its tensors, its mask and its score, as they came."""

    mode: str
    degree: int | None
    kernel: str
    dropout_p: float
    deterministic: bool
    layout: Layout | str
    cu_seqlens: Sequence[int] | Tensor | None


class Prepared(NamedTuple):
    """A call that was checked. parts: of the heads, in each pass. early: whether ranks may work on their own keys while
    they compare. plain: its terms without tensors. facts: of each rank of this process, for its signature."""

    layout: Layout
    plan: Schedule
    kernel: Kernel
    parts: Parts
    early: bool
    plain: Terms
    facts: Mapping[int, Facts]

    @property
    def dropout_p(self) -> float:
        return self.plain.dropout_p


_KEPT: dict[Any, Prepared] = {}


def forget() -> None:
    """Keep nothing of earlier calls: for who changes what a preparation reads, such as constants of the model."""
    _KEPT.clear()


def prepared(
    ring: Ring, given: Sequence[Any], mask: ops.Mask, score: ops.Score, sinks: Tensor | None, asked: Asked
) -> tuple[Prepared, Shards]:  # fmt: skip
    """The call, and q, k and v of each rank as kernels take them. given: q, k and v, tensors or lists of them. Raises
    ValueError or TypeError for what does not fit together."""
    each = [tuple(x) if isinstance(x, list | tuple) else (x,) for x in given]
    key = _key(ring, each, mask, score, sinks, asked)
    found = None if key is None else _KEPT.get(key)
    if found is not None:
        return found, {r: checks.as_kernels_take(*tensors) for r, tensors in zip(ring.ranks, zip(*each))}
    shards = checks.checked_shards(ring, *each)
    found = _prepared(ring, shards, mask, score, sinks, asked)
    if key is not None:
        if len(_KEPT) >= MOST:
            _KEPT.pop(next(iter(_KEPT)), None)
        _KEPT[key] = found
    return found, shards


def _key(
    ring: Ring, each: Sequence[tuple[Tensor, ...]], mask: ops.Mask, score: ops.Score, sinks: Tensor | None, asked: Asked
) -> Any:  # fmt: skip
    """Everything that `_prepared` reads, but for what tensors hold; None for what has no key. Numbers come with their
    types: 1 equals True and 1.0, which checks refuse."""
    try:
        if type(mask) is not ops.Mask or type(score) is not ops.Score or not (mask.prefix is mask.blocks is None):
            return None
        starts = asked.cu_seqlens
        if starts is not None:
            starts = tuple(starts.tolist() if isinstance(starts, Tensor) else starts)
            starts = starts, frozenset(map(type, starts))
        window = mask.window if type(mask.window) is tuple else (mask.window,)
        numbers = score.scale, score.softcap, asked.degree, asked.dropout_p, asked.deterministic, mask.causal, *window
        ids = checks.pair(mask.documents)
        key = (
            ring.size, tuple(ring.ranks), *(tuple(map(_facts, tensors)) for tensors in each), _autocast(each[0][0]),
            torch.is_grad_enabled(), _facts(sinks), _facts(score.bias), _facts(score.alibi), _facts(mask.dense),
            tuple(map(_facts, ids)), numbers, tuple(map(type, numbers)), asked.mode, KERNELS.get(asked.kernel),
            asked.kernel, asked.layout, starts, getattr(ring, "asked", "auto"),
        )  # fmt: skip
        hash(key)
    except (AttributeError, IndexError, RuntimeError, TypeError):  # what is no tensor, or has no hash
        return None
    return key


def _facts(x: Tensor | None) -> Any:
    return None if x is None else (type(x), x.shape, x.dtype, x.device, x.layout, x.requires_grad)


def _autocast(q: Tensor) -> torch.dtype | None:
    if not any_autocast() or not autocasts(q.device.type):
        return None
    return torch.get_autocast_dtype(q.device.type)


def _prepared(
    ring: Ring, shards: Shards, mask: ops.Mask, score: ops.Score, sinks: Tensor | None, asked: Asked
) -> Prepared:  # fmt: skip
    checks.masked_and_scored(mask, score)
    signed = _checked(asked, ring.size)
    if len(ring.ranks) > 1:
        compare({r: checks.shapes(shards[r]) for r in ring.ranks}, f"{NAME}, forward")
    q = shards[ring.ranks[0]][0]
    held = checks.placed(asked.layout, ring.size, q.shape[2])
    starts = checks.packed(asked.cu_seqlens, held, q.shape[0])
    checks.refuse(mask, score, sinks, shards, held, ring)
    problem = _problem(shards, held, starts, mask)
    decision = _decision(problem, q.device, mask, score, asked.mode, signed["degree"])
    plan = _plan(problem, q.device, decision)
    parts = _parts(shards, problem, decision, signed["dropout_p"] > 0.0)
    plain = Terms(score.scale, score.softcap, dropout_p=signed["dropout_p"], deterministic=asked.deterministic)
    kernel, early = KERNELS[asked.kernel], _few(plan, shards)
    found = Prepared(held, plan, kernel, parts, early, plain, {})
    for r, terms in terms_of(ring, shards, found, mask, score, sinks).items():
        _refuse_kernel(kernel, plan, r, shards[r][0], terms)
    signed |= checks.terms_signed(mask, score, sinks)
    name = asked.layout if isinstance(asked.layout, str) else checks.digest(asked.layout)
    signed |= {"layout": name, "cu_seqlens": checks.digest(starts)}
    tensors = [sinks, *(x for shard in shards.values() for x in shard)]
    signed["requires_grad"] = torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in tensors)
    signed["transport"] = getattr(ring, "asked", "auto")
    signed["mode taken"] = [decision.mode, decision.degree]
    signed["parts of the heads"] = [len(some) for some in parts]
    return found._replace(facts={r: Facts(checks.shapes(shards[r]) | signed) for r in ring.ranks})


def terms_of(
    ring: Ring, shards: Shards, call: Prepared, mask: ops.Mask, score: ops.Score, sinks: Tensor | None
) -> dict[int, Terms]:  # fmt: skip
    """The terms of each rank of this process, but for what ranks exchange or draw once they agree."""
    if sinks is score.alibi is score.bias is mask.dense is mask.documents is None:
        return dict.fromkeys(ring.ranks, call.plain)
    planes = [None if x is None else x.reshape((1,) * (4 - x.ndim) + tuple(x.shape)) for x in (score.bias, mask.dense)]
    q_ids, k_ids = checks.pair(mask.documents) or (None, None)
    several = len(ring.ranks) > 1
    found = {}
    for r in ring.ranks:
        device = shards[r][0].device
        bias, dense, ids = *planes, q_ids
        if several:
            bias, dense = (_rows_of(x, call.layout, r) for x in planes)
            ids = None if q_ids is None else call.layout.shard(q_ids, r, 1)
        named = {"alibi": score.alibi, "sinks": None if sinks is None else sinks.detach(), "bias": bias, "mask": dense}
        named |= {"q_documents": ids, "k_documents": k_ids}
        found[r] = call.plain._replace(**{name: x.to(device) for name, x in named.items() if x is not None})
    return found


def _refuse_kernel(kernel: Kernel, plan: Schedule, rank: int, q: Tensor, terms: Terms) -> None:
    for stage in (*plan.stages, *plan.answers):
        for call in stage.calls[rank]:
            why = kernel.rejects(q, call, terms)
            if why:
                raise ValueError(f"{NAME}: kernel {kernel.name!r} cannot serve this call: {why}")


def _checked(asked: Asked, size: int) -> dict[str, Any]:
    """The arguments that are no tensors, checked, by name."""
    mode, degree, kernel, dropout_p, deterministic, *_ = asked
    choice(NAME, "mode", mode, MODES)
    choice(NAME, "kernel", kernel, tuple(KERNELS))
    flag(NAME, "deterministic", deterministic)
    if degree is not None:
        degree = int(checked_size(NAME, "degree", degree))
        if mode != "hybrid":
            raise ValueError(f"{NAME}: degree is for mode 'hybrid', got {degree} with mode {mode!r}; leave it out")
        if size > 1 and size % degree:
            raise ValueError(f"{NAME}: degree must divide the {size} ranks, got {degree}")
    elif mode == "hybrid" and size > 1:
        raise ValueError(f"{NAME}: mode 'hybrid' needs degree, or a DeviceMesh of two dims")
    dropout_p = probability(NAME, "dropout_p", dropout_p)
    return {
        "mode": mode, "degree": degree, "kernel": kernel, "dropout_p": dropout_p, "deterministic": deterministic,
    }  # fmt: skip


def _problem(shards: Mapping, layout: Layout, starts: tuple[int, ...], mask: ops.Mask) -> cost.Problem:
    q, k, v = next(iter(shards.values()))
    # a batch without rows is planned as if it had one
    sizes = max(q.shape[0], 1), q.shape[1], k.shape[1], (q.shape[3] + v.shape[3] + 1) // 2
    return cost.Problem(layout, starts, checks.sight_of(mask), *sizes, q.dtype.itemsize)


def _decision(
    problem: cost.Problem, device: torch.device, mask: ops.Mask, score: ops.Score, mode: str, degree: int | None
) -> cost.Decision:  # fmt: skip
    no = checks.barred(mask, score)
    size = problem.layout.size
    if size == 1:
        return cost.Decision("allgather", 1, "one rank", ())
    if mode == "auto":
        return _chosen(problem, device, tuple(sorted(no.items())))
    if mode in no:
        raise ValueError(f"{NAME}: mode {mode!r} cannot serve this call: {no[mode]}")
    return cost.Decision(mode, {"hybrid": degree, "ulysses": size}.get(mode, 1), "asked for", ())


@lru_cache(maxsize=MOST)
def _chosen(problem: cost.Problem, device: torch.device, barred: tuple[tuple[str, str], ...]) -> cost.Decision:
    """The mode of calls that leave it open, told when it is found; they may differ in facts that it does not depend
    on."""
    found = cost.choose(problem, cost.machine_of(device), dict(barred))
    log.info("%s: mode 'auto' takes %s", NAME, found)
    return found


def _plan(problem: cost.Problem, device: torch.device, decision: cost.Decision) -> Schedule:
    try:
        return cost.planned(problem, cost.machine_of(device), decision.degree, decision.mode == "ring")
    except ValueError as no:
        raise ValueError(f"{NAME}: mode {decision.mode!r}: {no}") from None


def _parts(
    shards: Mapping, problem: cost.Problem, decision: cost.Decision, drops: bool
) -> Parts:  # fmt: skip
    """The parts of the heads that are worked on one after another, in each pass: in a ring, whose memory they bound."""
    if decision.mode != "ring":
        return (), ()
    q, k, _ = next(iter(shards.values()))
    splits = cost.ring_parts(problem, cost.machine_of(q.device)).splits
    if drops:  # a mask of dropout belongs to a call
        splits = splits._replace(forward=splits.backward)
    return tuple(head_parts(q.shape[1], k.shape[1], split) for split in splits)


def _few(plan: Schedule, shards: Mapping) -> bool:
    """Whether results of each rank's own keys take at most what a comparison takes, by the model."""
    q, _, v = next(iter(shards.values()))
    pairs = max(sum(call.tokens * call.keys for call in plan.stages[0].calls[r]) for r in shards)
    machine = cost.machine_of(q.device)
    flops = 2 * pairs * q.shape[0] * q.shape[1] * (q.shape[3] + v.shape[3]) // plan.degree
    return flops <= machine.host * machine.rate


def _rows_of(x: Tensor | None, layout: Layout, rank: int) -> Tensor | None:
    return x if x is None or x.shape[-2] == 1 else layout.shard(x, rank, 2)
