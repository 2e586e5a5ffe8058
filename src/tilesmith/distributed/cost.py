"""What a mode would cost: a latency-bandwidth model of transfers beside the rate of the kernel."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import TYPE_CHECKING

import torch

from tilesmith.distributed import parts
from tilesmith.distributed.layout import Layout
from tilesmith.distributed.parts import Heads, Holding, Split, Splits
from tilesmith.distributed.pieces import TILE, Call, Sight
from tilesmith.distributed.schedule import Schedule, Stage, schedule
from tilesmith.hardware.detect import arch_of

if TYPE_CHECKING:
    from tilesmith.distributed.transport import Transport

BACKWARD = 2.5  # products of the backward over those of the forward
# Of what one tile takes: what a call loses at its end, when some multiprocessors have no tile left. By this a call of
# parts of heads costs 80 and 210 µs at 32k tokens on an H200, forward and backward; 94 to 185 and 120 to 173 were
# measured.
TAIL = 0.25
ONE = Split()
# So many of `Machine.ramp` a call on others' keys takes by this model: attention, merging, gradients, sums.
RAMPS = 1 + 1 + BACKWARD + 1.5


@dataclass(frozen=True)
class Link:
    """latency: seconds until a message arrives; bandwidth: bytes/s of a rank in one direction."""

    latency: float
    bandwidth: float


@dataclass(frozen=True)
class Machine:
    """The facts of the model.

    rate: FLOP/s of the attention kernel at long sequences. ramp: seconds that a call takes beyond its FLOPs. issue:
    seconds of the host for a call and what is around it, in one pass. bandwidth: device memory, bytes/s. memory: bytes
    that gathered keys may take, 0 for no limit. host: seconds of a comparison of signatures. node: ranks that `link`
    connects; `network` connects the others. multiprocessors: that share a call's tiles, 0 where there are none.
    """

    name: str
    rate: float
    ramp: float
    bandwidth: float
    memory: int = 0
    host: float = 3e-5
    node: int = 8
    link: Link = field(default=Link(1.5e-5, 3.4e11))
    network: Link = field(default=Link(3e-5, 4.2e10))
    multiprocessors: int = 0
    # By a profile on two H200s: packed documents had 12 calls in 7.9 ms of the host, a causal sequence 4 in 3.2. Of the
    # difference 1.9 ms were launches that were not replayed, and transfers.
    issue: float = 3e-4
    # seconds of the host for an exchange. By a profile on two H200s: 1.1 to 1.6 ms for a forward of two calls and one
    # exchange, 2.2 to 2.7 for its backward with two exchanges, 6.4 for one in four parts, of eight calls and exchanges
    exchange: float = 5e-4


# Rates of kernels in bf16 at head dim 128; NVLink 4 and a 400 Gbit/s card for each GPU, at what collectives reach of
# them. `tilesmith bench context-parallel` measures what whole calls take, not these constants.
MACHINES = {
    "sm80": Machine(
        "sm80", 2.0e14, 1.5e-5, 2.0e12, link=Link(1.5e-5, 2.3e11), network=Link(3e-5, 2.1e10), multiprocessors=108
    ),
    "sm90": Machine("sm90", 6.2e14, 1.2e-5, 4.8e12, multiprocessors=132),
    "sm100": Machine("sm100", 1.2e15, 1.2e-5, 8.0e12, link=Link(1.5e-5, 6.8e11), multiprocessors=148),
}
ELSEWHERE = Machine("cpu", 1e11, 5e-5, 2e10, link=Link(2e-4, 1e9), network=Link(2e-4, 1e9))


@dataclass(frozen=True)
class Problem:
    """One call: sizes of q [B, H, T, D] and k [B, G, T, D] of the whole sequence, and what sees what. dim: where v has
    another one than q, the mean."""

    layout: Layout
    starts: tuple[int, ...]
    sight: Sight
    batch: int
    heads: int
    kv_heads: int
    dim: int
    itemsize: int = 2

    @property
    def parts_of(self) -> Heads:
        return Heads(self.batch, self.heads, self.kv_heads, self.dim, self.itemsize)


@dataclass(frozen=True)
class RingParts:
    """How a ring divides the heads.

    held: shards of keys and values that a rank then holds at most beside its inputs and results, in the forward and in
    the backward. loss: of the time of each pass, by the model, over all heads at once. wanted: of a pass that holds
    more than `parts.ROOM`, what that was weighed against; empty where it holds no more.
    """

    splits: Splits
    held: tuple[float, float] = (0.0, 0.0)
    loss: tuple[float, float] = (0.0, 0.0)
    wanted: tuple[str, str] = ("", "")

    def __str__(self) -> str:
        told = []
        for i, name in enumerate(("forward", "backward")):
            many = self.splits[i].parts
            one = "all heads at once" if many == 1 else f"{many} parts of the heads"
            said = f"{name} in {one}, {self.held[i]:.1f} shards of keys and sums held"
            said += f", {self.loss[i]:.1%} slower" if many > 1 else ""
            told.append(said + (f" ({self.wanted[i]})" if self.wanted[i] else ""))
        return "; ".join(told)


@dataclass(frozen=True)
class Estimate:
    """mode, and ranks of a group that share heads. seconds: forward and backward of the slowest rank. sent: bytes that
    the busiest rank receives, forward and backward. memory: bytes of others' keys and their gradients on a rank.
    refused: why it cannot be, else empty. parts: of a ring, how it divides the heads."""

    mode: str
    degree: int
    forward: float = 0.0
    backward: float = 0.0
    sent: int = 0
    memory: int = 0
    refused: str = ""
    parts: RingParts | None = None

    @property
    def seconds(self) -> float:
        return self.forward + self.backward

    def __str__(self) -> str:
        name = f"{self.mode} {self.degree}" if self.mode == "hybrid" else self.mode
        if self.refused:
            return f"{name}: no, {self.refused}"
        told = (
            f"{name}: {self.seconds * 1e3:.3g} ms, receives {self.sent / 1e6:.3g} MB, holds {self.memory / 1e6:.3g} MB"
        )
        return told if self.parts is None else f"{told}; {self.parts}"


@dataclass(frozen=True)
class Decision:
    """The mode that a call takes and why, with the estimated cost of every mode. transport: what moves its tokens
    between ranks, and why; None if no group was given."""

    mode: str
    degree: int
    reason: str
    estimates: tuple[Estimate, ...]
    transport: Transport | None = None

    def __str__(self) -> str:
        told = [f"{self.mode}: {self.reason}", *(f"  {estimate}" for estimate in self.estimates)]
        return "\n".join(told if self.transport is None else [*told, f"transport: {self.transport}"])


@lru_cache(maxsize=64)
def machine_of(device: torch.device) -> Machine:
    """The facts for a device: gathered keys may take an eighth of its memory."""
    if device.type != "cuda":
        return ELSEWHERE
    found = MACHINES.get(arch_of(device).name, MACHINES["sm90"])
    return replace(found, memory=torch.cuda.get_device_properties(device).total_memory // 8)


def degrees(problem: Problem) -> list[tuple[str, int, bool]]:
    """(mode, degree, in steps) of everything that could be done on so many ranks."""
    size = problem.layout.size
    found = [("allgather", 1, False), ("ring", 1, True), ("ulysses", size, False)]
    return found + [("hybrid", d, False) for d in range(2, size) if size % d == 0]


def planned(problem: Problem, machine: Machine, degree: int, steps: bool) -> Schedule:
    """The schedule of a call, whose calls of the kernel pass over as many queries without keys as take no longer than
    a call of its own. Raises ValueError where heads cannot be shared out."""
    many = problem.heads, problem.kv_heads, problem.batch == 1
    plan = schedule(problem.layout, problem.starts, problem.sight, degree, steps, *many, gap=0)
    if problem.batch > 1 or all(len(x) < 2 for stage in (*plan.stages, *plan.answers) for x in stage.calls):
        return plan
    gap = _gap(problem, machine, plan)
    return schedule(problem.layout, problem.starts, problem.sight, degree, steps, *many, gap=gap)


def _gap(problem: Problem, machine: Machine, plan: Schedule) -> int:
    """How many queries without keys take as long as a call: the host's time for it, where issuing the calls takes the
    busiest rank longer than computing them, else the device's. Such a query has zeros for out and dq, which are written
    in fp32, and its out and dout are read."""
    ranks = range(problem.layout.size)
    heads = problem.heads // plan.degree
    issued = 2 * machine.issue * max(sum(len(stage.calls[r]) for stage in plan.stages) for r in ranks)
    flops = 4 * problem.batch * problem.dim * heads * max(map(plan.pairs, ranks))
    worth = RAMPS * machine.ramp
    if issued > (1 + BACKWARD) * flops / machine.rate:
        worth = max(worth, 2 * machine.issue)
    row = problem.batch * heads * problem.dim * 2 * (max(4, problem.itemsize) + problem.itemsize)
    return int(worth * machine.bandwidth / row)


def estimate(problem: Problem, machine: Machine, mode: str, degree: int, steps: bool) -> Estimate:
    """The cost of one mode, or why it cannot be."""
    try:
        plan = planned(problem, machine, degree, steps)
    except ValueError as problem_with:
        return Estimate(mode, degree, refused=str(problem_with))
    taken = ring_parts(problem, machine) if mode == "ring" else None
    split = Splits() if taken is None else taken.splits
    times = [_rank_times(problem, machine, plan, rank, split) for rank in range(problem.layout.size)]
    forward, backward = (max(each[i] for each in times) for i in (0, 1))
    sent, memory = (max(each[i] for each in times) for i in (2, 3))
    return Estimate(mode, degree, forward, backward, int(sent), int(memory), parts=taken)


def ring_parts(problem: Problem, machine: Machine) -> RingParts:
    """How a ring divides the heads in each pass: the fewest parts with which no rank holds more than `parts.ROOM`
    shards, if that takes at most `parts.LOSS` longer, by the model. Else as many as take at most `parts.LITTLE` longer:
    shorter shards need little memory, and smaller calls take longer.

    What kernels keep whatever a call's size counts as beside `parts.LONG` tokens, so that more tokens never mean fewer
    parts: twice the tokens take at most twice the memory.
    """
    return _ring_parts(problem, machine, parts.ROOM, parts.LOSS, parts.LITTLE)


@lru_cache(maxsize=256)
def _ring_parts(problem: Problem, machine: Machine, room: float, loss: float, little: float) -> RingParts:
    plan = planned(problem, machine, 1, True)
    holding = Holding(plan, problem.parts_of, machine.multiprocessors)
    busiest = max(range(problem.layout.size), key=plan.pairs)
    able = parts.splits(problem.heads, problem.kv_heads)
    counted = {split: holding.shards(split, parts.LONG) for split in able}
    times = {split: _rank_times(problem, machine, plan, busiest, Splits(split, split)) for split in able}
    chosen = []
    for i in (0, 1):
        least = times[able[0]][i]
        slower = {split: times[split][i] / least - 1.0 for split in able}
        fits = next((split for split in able if counted[split][i] <= room), None)
        taken, wanted = fits, ""
        if fits is None or slower[fits] > loss:
            taken = [split for split in able if split == able[0] or slower[split] <= little][-1]
            wanted = f"no parts hold as little as {room:g}"
            if fits is not None:
                held = holding.shards(fits)[i]
                wanted = f"{fits.parts} parts would hold {held:.1f} shards and be {slower[fits]:.0%} slower"
        chosen.append((taken, holding.shards(taken)[i], slower[taken], wanted))
    taken, within, slow, wanted = zip(*chosen)
    return RingParts(Splits(*taken), within, slow, wanted)


def choose(problem: Problem, machine: Machine, barred: dict[str, str] | None = None) -> Decision:
    """The mode of a call that leaves it open: that of the least time whose keys fit, by the model.

    barred: modes that cannot serve the call, and why. Raises ValueError if none can.
    """
    if problem.layout.size == 1:
        return Decision("allgather", 1, "one rank", ())
    barred = barred or {}
    found = []
    for mode, degree, steps in degrees(problem):
        if mode in barred:
            found.append(Estimate(mode, degree, refused=barred[mode]))
        else:
            found.append(estimate(problem, machine, mode, degree, steps))
    able = [one for one in found if not one.refused]
    if not able:
        raise ValueError("context_parallel_attention: no mode serves this call: " + "; ".join(map(str, found)))
    fitting = [one for one in able if not machine.memory or one.memory <= machine.memory]
    best = min(fitting or able, key=lambda one: one.seconds if fitting else one.memory)
    reason = f"{best.seconds * 1e3:.3g} ms by the model of {machine.name}, the least"
    if len(fitting) < len(able):
        reason += f" of those whose keys take at most {machine.memory / 1e9:.3g} GB" if fitting else " memory"
    return Decision(best.mode, best.degree, reason, tuple(found))


def _rank_times(
    problem: Problem, machine: Machine, plan: Schedule, rank: int, splits: Splits
) -> tuple[float, float, int, int]:
    """Forward and backward seconds of a rank, bytes it receives and bytes of others' keys that it holds. splits: of the
    heads, whose parts are worked on one after another: as much is computed, in so many more messages and calls, and as
    much travels, once for each part of a kv head's query heads."""
    token = problem.batch * problem.dim * problem.itemsize
    q_heads, kv_heads = ((last - first) for first, last in (plan.q_heads[rank], plan.kv_heads[rank]))
    keys = 2 * kv_heads * token
    passes, received, held = [machine.host, machine.host], 0, 0
    if plan.degree > 1:
        # q, k, v there and out back; for gradients dout there, and dq, dk and dv back; where several ranks have one kv
        # head, k and v there again
        q_time, q_bytes = _travel(machine, plan.q_moves, rank, q_heads * token)
        kv_time, kv_bytes = _travel(machine, plan.kv_moves, rank, keys)
        again = int(plan.replicates)
        passes = [passes[0] + 2 * q_time + kv_time, passes[1] + 2 * q_time + (1 + again) * kv_time]
        received += 4 * q_bytes + (2 + again) * kv_bytes
        # what goes is copied to where others read it, what comes back also to its place; each is read and written
        q_copy, kv_copy = (2 * n * token * plan.tokens(rank) / machine.bandwidth for n in (q_heads, 2 * kv_heads))
        passes[0] += q_copy + kv_copy + 2 * q_copy + 3 * machine.ramp
        passes[1] += q_copy + again * kv_copy + 2 * (q_copy + kv_copy) + 4 * machine.ramp
    # gradients of keys are parts of sums, which travel in fp32
    gradients = max(4, problem.itemsize) * keys // problem.itemsize
    for i, split in enumerate(splits):
        factor = 1.0 if i == 0 else BACKWARD
        stages = plan.stages if i else plan.answers
        arriving = [_travel(machine, stage.transfers, rank, keys, split) for stage in stages]
        for stage, coming in zip(stages, [*(seconds for seconds, _ in arriving[1:]), 0.0]):
            work = factor * _compute(problem, machine, stage.calls[rank], q_heads, split)
            if stage.transfers and not stage.whole[rank]:
                merging = _merging(problem, machine, stage.calls[rank], q_heads, split)
                work += merging if i == 0 else 1.5 * merging
            passes[i] += max(work, coming)
        passes[i] += sum(_copied(machine, stage, rank, keys, gradients if i else 0) for stage in stages)
        received += sum(n for _, n in arriving)
        if i == 1:
            leaving = [_travel(machine, stage.transfers, rank, gradients, split) for stage in plan.stages]
            received += sum(n for _, n in leaving)
            passes[1] += leaving[-1][0] if len(leaving) > 1 else 0.0
        for place, (_, n) in enumerate(arriving):
            # in steps the next keys arrive while these are used
            later = arriving[place + 1][1] if place and place + 1 < len(arriving) else 0
            held = max(held, (2 * n + later) // split.parts)
    issued = _issued(machine, plan, rank, splits)
    return *map(max, passes, issued), received, held


def _issued(machine: Machine, plan: Schedule, rank: int, splits: Splits) -> tuple[float, float]:
    """Seconds that the host takes for each pass, which a short one waits for."""
    found = []
    for i, split in enumerate(splits):
        stages = plan.stages if i else plan.answers
        calls = sum(len(stage.calls[rank]) for stage in stages)
        exchanges = sum(bool(stage.transfers) for stage in stages) * (1 + i)
        found.append(split.parts * (machine.issue * calls + machine.exchange * exchanges))
    if plan.degree > 1:
        there_and_back = (2, 2) if plan.alike else (3, 3 + plan.replicates)
        found = [seconds + machine.exchange * n for seconds, n in zip(found, there_and_back)]
    return found[0], found[1]


def _travel(
    machine: Machine, moves: Sequence, rank: int, per_token: int, split: Split = ONE
) -> tuple[float, int]:  # fmt: skip
    """Seconds for what a rank sends and receives at once, in the messages of so many parts, and the bytes it
    receives."""
    near, far, here = [0, 0], [0, 0], 0
    for move in moves:
        if move.source == move.target or rank not in (move.source, move.target):
            continue
        inwards = int(move.target == rank)
        same = move.source // machine.node == move.target // machine.node
        (near if same else far)[inwards] += move.tokens * per_token * split.q
        here += inwards * move.tokens * per_token * split.q
    time = 0.0
    for count, link in ((max(near), machine.link), (max(far), machine.network)):
        if count:
            time = max(time, split.parts * link.latency + count / link.bandwidth)
    return time, here


def _compute(problem: Problem, machine: Machine, calls: Sequence[Call], heads: int, split: Split) -> float:
    row = 4 * problem.batch * problem.dim
    flops = row * heads * sum(call.pairs for call in calls)
    # a tile is what some queries of a head see, and in the backward what sees some keys
    seen = sum(call.pairs / call.rows + call.pairs / call.keys for call in calls) / 2
    tiles = row * TILE * seen * machine.multiprocessors
    return (flops + TAIL * tiles * split.parts) / machine.rate + machine.ramp * len(calls) * split.parts


def _copied(machine: Machine, stage: Stage, rank: int, keys: int, gradients: int) -> float:
    """Seconds in which a rank copies its keys to where others read them, in one call; of a backward also what it
    computed for others' keys, in another, and adds what comes back of its own. keys, gradients: bytes of a token's keys
    and values, and of what is computed for them; 0 in a forward."""
    moves = stage.transfers
    lent, came = moves.lent.get(rank, 0), moves.landed.get(rank, 0)
    low, high = moves.spans.get(rank, (0, 0))
    moved, calls = 2 * (high - low) * keys, int(lent > 0)
    if gradients:
        moved += (2 * came + 3 * lent) * gradients
        calls += (came > 0) + (lent > 0)
    return moved / machine.bandwidth + calls * machine.ramp


def _merging(problem: Problem, machine: Machine, calls: Sequence[Call], heads: int, split: Split) -> float:
    """Reading two results, which are fp32, and writing one, for each row; writing one for a row without keys."""
    rows = problem.batch * heads * sum(2 * call.rows + call.tokens for call in calls)
    moved = rows * problem.dim * max(4, problem.itemsize)
    return moved / machine.bandwidth + machine.ramp * len(calls) * split.parts
