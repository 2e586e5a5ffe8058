"""What a mode would cost: a latency-bandwidth model of transfers beside the rate of the kernel."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache

import torch

from tilesmith.distributed.layout import Layout
from tilesmith.distributed.pieces import Call, Sight
from tilesmith.distributed.schedule import Schedule, head_parts, schedule
from tilesmith.hardware.detect import arch_of

BACKWARD = 2.5  # products of the backward over those of the forward


@dataclass(frozen=True)
class Link:
    """latency: seconds until a message arrives; bandwidth: bytes/s of a rank in one direction."""

    latency: float
    bandwidth: float


@dataclass(frozen=True)
class Machine:
    """The facts of the model.

    rate: FLOP/s of the attention kernel at long sequences. ramp: seconds that a call takes beyond its FLOPs. bandwidth:
    device memory, bytes/s. memory: bytes that gathered keys may take, 0 for no limit. host: seconds of a comparison of
    signatures. node: ranks that `link` connects; `network` connects the others.
    """

    name: str
    rate: float
    ramp: float
    bandwidth: float
    memory: int = 0
    host: float = 1e-4
    node: int = 8
    link: Link = field(default=Link(1.5e-5, 3.4e11))
    network: Link = field(default=Link(3e-5, 4.2e10))


# Rates of kernels in bf16 at head dim 128; NVLink 4 and a 400 Gbit/s card for each GPU, at what collectives reach of
# them. `tilesmith bench context-parallel` measures what whole calls take, not these constants.
MACHINES = {
    "sm80": Machine("sm80", 2.0e14, 1.5e-5, 2.0e12, link=Link(1.5e-5, 2.3e11), network=Link(3e-5, 2.1e10)),
    "sm90": Machine("sm90", 6.2e14, 1.2e-5, 4.8e12),
    "sm100": Machine("sm100", 1.2e15, 1.2e-5, 8.0e12, link=Link(1.5e-5, 6.8e11)),
}
ELSEWHERE = Machine("cpu", 1e11, 5e-5, 2e10, link=Link(2e-4, 1e9), network=Link(2e-4, 1e9))


@dataclass(frozen=True)
class Problem:
    """One call: sizes of q [B, H, T, D] and k [B, G, T, D] of the whole sequence, and what sees what."""

    layout: Layout
    starts: tuple[int, ...]
    sight: Sight
    batch: int
    heads: int
    kv_heads: int
    dim: int
    itemsize: int = 2


@dataclass(frozen=True)
class Estimate:
    """mode, and ranks of a group that share heads. seconds: forward and backward of the slowest rank. sent: bytes that
    the busiest rank receives, forward and backward. memory: bytes of others' keys and their gradients on a rank.
    refused: why it cannot be, else empty."""

    mode: str
    degree: int
    forward: float = 0.0
    backward: float = 0.0
    sent: int = 0
    memory: int = 0
    refused: str = ""

    @property
    def seconds(self) -> float:
        return self.forward + self.backward

    def __str__(self) -> str:
        name = f"{self.mode} {self.degree}" if self.mode == "hybrid" else self.mode
        if self.refused:
            return f"{name}: no, {self.refused}"
        return (
            f"{name}: {self.seconds * 1e3:.3g} ms, receives {self.sent / 1e6:.3g} MB, holds {self.memory / 1e6:.3g} MB"
        )


@dataclass(frozen=True)
class Decision:
    """Which mode a call takes and why, with what every mode would cost by the model."""

    mode: str
    degree: int
    reason: str
    estimates: tuple[Estimate, ...]

    def __str__(self) -> str:
        return "\n".join([f"{self.mode}: {self.reason}", *(f"  {estimate}" for estimate in self.estimates)])


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


def estimate(problem: Problem, machine: Machine, mode: str, degree: int, steps: bool) -> Estimate:
    """The cost of one mode, or why it cannot be."""
    try:
        many = problem.heads, problem.kv_heads, problem.batch == 1
        plan = schedule(problem.layout, problem.starts, problem.sight, degree, steps, *many)
    except ValueError as problem_with:
        return Estimate(mode, degree, refused=str(problem_with))
    parts = 1
    if mode == "ring":
        each = problem.layout.local, problem.dim, problem.dim, problem.itemsize
        parts = len(head_parts(problem.heads, problem.kv_heads, *each))
    times = [_rank_times(problem, machine, plan, rank, parts) for rank in range(problem.layout.size)]
    forward, backward = (max(each[i] for each in times) for i in (0, 1))
    sent, memory = (max(each[i] for each in times) for i in (2, 3))
    return Estimate(mode, degree, forward, backward, int(sent), int(memory))


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
    problem: Problem, machine: Machine, plan: Schedule, rank: int, parts: int
) -> tuple[float, float, int, int]:
    """Forward and backward seconds of a rank, bytes it receives and bytes of others' keys that it holds. parts: of the
    heads, worked on one after another: as much travels and is computed, in so many more messages and calls."""
    token = problem.batch * problem.dim * problem.itemsize
    q_heads, kv_heads = ((last - first) for first, last in (plan.q_heads[rank], plan.kv_heads[rank]))
    keys = 2 * kv_heads * token
    forward, backward, received, held = machine.host, machine.host, 0, 0
    if plan.degree > 1:
        # q, k, v there and out back; for gradients q, k, v, out and dout there, dq, dk and dv back
        q_time, q_bytes = _travel(machine, plan.q_moves, rank, q_heads * token)
        kv_time, kv_bytes = _travel(machine, plan.kv_moves, rank, keys)
        forward += 2 * q_time + kv_time
        backward += 4 * q_time + 2 * kv_time
        received += 6 * q_bytes + 3 * kv_bytes
    arriving = [_travel(machine, stage.transfers, rank, keys, parts) for stage in plan.stages]
    # gradients of keys are parts of sums, which travel in fp32
    gradients = max(4, problem.itemsize) * keys // problem.itemsize
    leaving = [_travel(machine, stage.transfers, rank, gradients, parts) for stage in plan.stages]
    for i, stage in enumerate(plan.stages):
        coming = arriving[i + 1][0] if i + 1 < len(plan.stages) else 0.0
        work = _compute(problem, machine, stage.calls[rank], q_heads, parts)
        merging = _merging(problem, machine, stage.calls[rank], q_heads, parts) if i else 0.0
        forward += max(work + merging, coming)
        backward += max(BACKWARD * work + 1.5 * merging, coming)
        received += 2 * arriving[i][1] + leaving[i][1]
        # in steps the next keys arrive while these are used
        held = max(held, 2 * arriving[i][1] + (arriving[i + 1][1] if i and i + 1 < len(plan.stages) else 0))
    returning = leaving[-1][0] if len(leaving) > 1 else 0.0
    return forward, backward + returning, received, held // parts


def _travel(machine: Machine, moves: Sequence, rank: int, per_token: int, parts: int = 1) -> tuple[float, int]:
    """Seconds for what a rank sends and receives at once, in so many parts, and the bytes it receives."""
    near, far, here = [0, 0], [0, 0], 0
    for move in moves:
        if move.source == move.target or rank not in (move.source, move.target):
            continue
        inwards = int(move.target == rank)
        same = move.source // machine.node == move.target // machine.node
        (near if same else far)[inwards] += move.tokens * per_token
        here += inwards * move.tokens * per_token
    time = 0.0
    for count, link in ((max(near), machine.link), (max(far), machine.network)):
        if count:
            time = max(time, parts * link.latency + count / link.bandwidth)
    return time, here


def _compute(problem: Problem, machine: Machine, calls: Sequence[Call], heads: int, parts: int) -> float:
    flops = 4 * problem.batch * heads * problem.dim * sum(call.pairs for call in calls)
    return flops / machine.rate + machine.ramp * len(calls) * parts


def _merging(problem: Problem, machine: Machine, calls: Sequence[Call], heads: int, parts: int) -> float:
    """Reading two results, which are fp32, and writing one, for each row."""
    rows = problem.batch * heads * sum(call.tokens for call in calls)
    return 3 * rows * problem.dim * max(4, problem.itemsize) / machine.bandwidth + machine.ramp * len(calls) * parts
