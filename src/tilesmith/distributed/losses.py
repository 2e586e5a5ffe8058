"""Losses of a vocabulary whose classes several ranks hold as plain tensors: `ops.vocab_parallel_cross_entropy` and
`ops.vocab_parallel_linear_cross_entropy`.

Before ranks exchange anything they compare their calls, as those of context-parallel attention do, and say how many
classes they hold.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from itertools import accumulate
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor

from tilesmith.distributed.attention import ring_of
from tilesmith.distributed.comparison import compare, refusals_told
from tilesmith.distributed.ring import ProcessGroupRing, process_group
from tilesmith.engine.argument_checks import floating, readable
from tilesmith.engine.memory import computed_in
from tilesmith.ops.loss import checks, vocabulary, vocabulary_linear
from tilesmith.ops.loss.reduction import wrong_label
from tilesmith.ops.loss.reference import Terms
from tilesmith.ops.loss.vocabulary import Part, exchange

_CALLS: WeakKeyDictionary[Any, int] = WeakKeyDictionary()  # of each group, those about which all ranks have agreed


def vocab_parallel_cross_entropy(
    logits: Tensor,
    target: Tensor,
    weight: Tensor | None = None,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    scale: float = 1.0,
    softcap: float = 0.0,
    reduction: str = "mean",
    *,
    group: Any = None,
    classes: int | None = None,
) -> Tensor:
    """`cross_entropy` of logits [..., V] of which each rank of `group` holds a slice [..., its classes], in rank's
    order.

    target [...] (labels 0 … V - 1) and weight [V] are the same on every rank, and so is the loss; the gradient is that
    of the rank's own slice. group: a ProcessGroup or a DeviceMesh of one dim; None: all ranks. classes: V; the ranks
    must then hold ceil(V / ranks) each and the last ones less, as `torch.chunk` gives them. Without it a slice may have
    any size, even 0, and the ranks exchange their sizes. Per token they exchange two or three fp32 (fp64 for fp64)
    numbers. The other arguments: see `cross_entropy`.

    A DTensor that is sharded by its last dim can be given to `cross_entropy` itself. Ranks compare their calls before,
    on the host: what `cross_entropy` raises TypeError or ValueError for is raised on every rank, also for a slice of
    another size, for arguments that differ and, on a CPU, for a label that is not a class. RingError names a rank that
    does not answer; NotImplementedError: a second derivative. torch.compile does not trace the comparison: there, a
    label that is not a class and, without `classes`, slices of different sizes give NaN.
    """
    name = "vocab_parallel_cross_entropy"

    def checked() -> None:
        floating(name, "logits", logits)
        if logits.ndim == 0:
            raise ValueError(f"{name}: logits has no dims; it must be [..., its classes]")
        checks.check_tokens(name, "logits", logits, target)
        checks.check_ignored(name, "target", target, ignore_index)

    terms = Terms(ignore_index, label_smoothing, z_loss, scale, softcap)
    call = _Call(name, "logits", "weight", logits, target, weight, terms, reduction, group, classes)
    found = _agreed(call, checked, lambda: (logits.shape[-1], {}))
    return found.valid(vocabulary.cross_entropy(logits, target, weight, terms, reduction, found.part))


def vocab_parallel_linear_cross_entropy(
    x: Tensor,
    weight: Tensor,
    target: Tensor,
    bias: Tensor | None = None,
    class_weight: Tensor | None = None,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    scale: float = 1.0,
    softcap: float = 0.0,
    reduction: str = "mean",
    chunk_tokens: int = 0,
    accumulate_fp32: bool = True,
    *,
    group: Any = None,
    classes: int | None = None,
) -> Tensor:
    """`linear_cross_entropy` of a weight [V, K] of which each rank of `group` holds the rows of its own classes.

    x [..., K], target [...] and class_weight [V] are the same on every rank, and so is the loss; weight
    [its classes, K] and bias [its classes] are the rank's own, as are their gradients. The gradient of x is summed over
    the ranks, of which all want it or none, and all run the backward. A chunk's logits and their gradient are in memory
    at a time. group, classes, what is exchanged and what raises: see `vocab_parallel_cross_entropy`; the rest: see
    `linear_cross_entropy`.

    A DTensor weight that is sharded by its first dim can be given to `linear_cross_entropy` itself.
    """
    name = "vocab_parallel_linear_cross_entropy"
    terms = Terms(ignore_index, label_smoothing, z_loss, scale, softcap)
    call = _Call(name, "weight", "class_weight", x, target, class_weight, terms, reduction, group, classes)

    def facts() -> tuple[int, Mapping[str, Any]]:
        wanted = x.requires_grad and torch.is_grad_enabled()
        return weight.shape[0], {
            "x.shape": list(x.shape), "chunk_tokens": int(chunk_tokens), "a bias": bias is not None,
            "requires_grad of x": wanted,
        }  # fmt: skip

    found = _agreed(call, lambda: _check_linear(name, x, weight, target, bias, ignore_index, chunk_tokens), facts)
    x = x.to(computed_in(x))
    if x.requires_grad and torch.is_grad_enabled():
        x = _Shared.apply(x, found)
    loss = vocabulary_linear.linear_cross_entropy(
        x, weight, target, bias, class_weight, terms, reduction, chunk_tokens, accumulate_fp32, found.part
    )
    return found.valid(loss)


def _check_linear(
    name: str, x: Tensor, weight: Tensor, target: Tensor, bias: Tensor | None, ignore_index: int, chunk_tokens: int
) -> None:  # fmt: skip
    for argument, value in (("x", x), ("weight", weight), ("bias", bias)):
        if value is not None:
            floating(name, argument, value)
        if value is not None and value.device != x.device:
            raise ValueError(f"{name}: {argument} is on {value.device}, x on {x.device}; move them to one device")
    if x.ndim == 0:
        raise ValueError(f"{name}: x has no dims; it must be [..., K]")
    if weight.ndim != 2 or weight.shape[1] != x.shape[-1]:
        raise ValueError(
            f"{name}: weight has shape {tuple(weight.shape)}; for this x it must be [its classes, {x.shape[-1]}]"
        )
    if bias is not None and bias.shape != weight.shape[:1]:
        raise ValueError(f"{name}: bias has shape {tuple(bias.shape)}; it must be [{weight.shape[0]}]")
    if chunk_tokens < 0:
        raise ValueError(f"{name}: chunk_tokens is {chunk_tokens}; it must be 0 (the library chooses) or more")
    checks.check_tokens(name, "x", x, target)
    checks.check_ignored(name, "target", target, ignore_index)


class _Call(NamedTuple):
    """A call as its caller made it. holds: the argument whose classes are spread; weights: the name of `weight`."""

    name: str
    holds: str
    weights: str
    x: Tensor
    target: Tensor
    weight: Tensor | None
    terms: Terms
    reduction: str
    group: Any
    classes: int | None


class _Agreed(NamedTuple):
    """What ranks know of a call. ring: what they have compared it by, None in a traced call; number: of the call among
    those of its group; alike: for a traced call, 1 if they hold as many classes as it assumes, else NaN."""

    name: str
    part: Part
    ring: ProcessGroupRing | None = None
    number: int = 0
    alike: Tensor | None = None

    def valid(self, loss: Tensor) -> Tensor:
        return loss if self.alike is None else loss * self.alike.to(loss.dtype)


def _agreed(
    call: _Call, checked: Callable[[], None], facts: Callable[[], tuple[int, Mapping[str, Any]]]
) -> _Agreed:  # fmt: skip
    """Compare a call with those of the other ranks. checked: raises for what one rank can see by itself; facts: how
    many classes this rank holds, and what all ranks must have alike beside what every call has."""
    group = process_group(call.name, call.group)
    if torch.compiler.is_compiling():
        checked()
        return _assumed(call, group, facts()[0])
    ring = ring_of(group)
    number = _CALLS.get(group, 0)
    with refusals_told(ring, call.name):
        checked()
        _check_rest(call, call.classes)
        held, more = facts()
        if call.classes is not None:
            _chunk(call, group, held, call.classes)
        told = {"pass": call.name, "number of the call": number, **_alike(call), **more}
    every = ring.gathered({**told, "held": held, "labels": _labels(call)}, call.name)
    sizes, labels = ([each.pop(key, None) for each in every] for key in ("held", "labels"))
    compare(dict(enumerate(every)), call.name)
    _CALLS[group] = number + 1
    start, classes = list(accumulate(sizes, initial=0))[ring.rank], sum(sizes)
    if classes == 0:
        raise ValueError(f"{call.name}: {call.holds} holds no classes on any rank; there must be 1 at least")
    _check_rest(call, classes)  # what it looks at is alike now
    _compare_labels(call, labels, classes)
    return _Agreed(call.name, Part(group, start, classes, max(sizes)), ring, number)


def _assumed(call: _Call, group: dist.ProcessGroup, held: int) -> _Agreed:
    """For torch.compile: slices as `torch.chunk` gives them."""
    classes = held * dist.get_world_size(group) if call.classes is None else call.classes
    part = _chunk(call, group, held, classes)
    _check_rest(call, classes)
    if call.classes is not None:
        return _Agreed(call.name, part)
    most, least = exchange(torch.tensor([held, -held], device=call.x.device), "max", part).unbind()
    return _Agreed(call.name, part, alike=torch.where(most == -least, 1.0, float("nan")))


def _chunk(call: _Call, group: dist.ProcessGroup, held: int, classes: int) -> Part:
    """This rank's part of so many classes; ValueError where it holds another number."""
    ranks, rank = dist.get_world_size(group), dist.get_rank(group)
    step = -(-classes // ranks)
    start = min(rank * step, classes)
    expected = min(step, classes - start)
    if held != expected or classes == 0:
        raise ValueError(
            f"{call.name}: {call.holds} holds {held} classes; rank {rank} of {ranks} must hold {expected} of the "
            f"{classes}, of which there must be 1 at least"
        )
    return Part(group, start, classes, step)


def _check_rest(call: _Call, classes: int | None) -> None:
    """classes: None where it is not known yet."""
    name, weight, (_, smoothing, z_loss, _, softcap) = call.name, call.weight, call.terms
    if weight is not None:
        checks.check_class_weight(name, call.weights, weight, call.x, weight.numel() if classes is None else classes)
    checks.check_terms(name, smoothing, z_loss, softcap, call.reduction)


def _alike(call: _Call) -> dict[str, Any]:
    """What all ranks must have alike, by name."""
    target, weight = call.target, call.weight
    return {
        "dtype": str(computed_in(call.x)), "target.shape": list(target.shape), "target.dtype": str(target.dtype),
        call.weights: None if weight is None else f"{weight.dtype} {list(weight.shape)}", "reduction": call.reduction,
        **{field: float(value) for field, value in call.terms._asdict().items()},
    }  # fmt: skip


def _labels(call: _Call) -> tuple[int, int, str] | None:
    """The least and the largest label that counts, and a digest of all, where a CPU holds them: elsewhere asking would
    wait for the device."""
    target = call.target.detach()
    if target.device.type != "cpu" or not readable(target):
        return None
    counted = target[target != call.terms.ignore_index]
    ends = (int(counted.min()), int(counted.max())) if counted.numel() else (0, 0)
    return *ends, hashlib.sha256(target.contiguous().numpy().tobytes()).hexdigest()[:16]


def _compare_labels(call: _Call, labels: list[Any], classes: int) -> None:
    """Raise ValueError, the same on every rank, for a label that is no class, and for targets that differ."""
    for r, found in enumerate(labels):
        for label in () if found is None else found[:2]:
            if not 0 <= label < classes:
                raise ValueError(
                    f"{call.name}: refused on rank {r}: {wrong_label(label, classes, call.terms.ignore_index)}"
                )
    compare({r: {"target": None if found is None else found[2]} for r, found in enumerate(labels)}, call.name)


class _Shared(torch.autograd.Function):
    """x, which all ranks have alike: its gradient is the sum of theirs."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, agreed: _Agreed) -> Tensor:
        ctx.agreed = agreed
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, dx: Tensor) -> tuple[Tensor, None]:
        name, part, ring, number, _ = ctx.agreed
        if ring is not None:
            ring.agree({ring.rank: {"pass": f"{name}, backward", "number of the call": number}}, f"{name}, backward")
        return exchange(dx, "sum", part), None
