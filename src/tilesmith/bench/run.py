"""Measure an op beside its peers: every provider on every case, forward and backward apart, rounds interleaved."""

from __future__ import annotations

import importlib
import inspect
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from tilesmith.bench.document import document
from tilesmith.bench.missing import Missing
from tilesmith.bench.peers import FLOORS, OURS, Adapter, names, providers
from tilesmith.bench.selection import check_named, refuse_unknown
from tilesmith.bench.vulkan import ThroughVulkan
from tilesmith.engine import Case, Op, cases, ops
from tilesmith.engine.arguments import dtype_name
from tilesmith.engine.registry import family_of
from tilesmith.engine.timing import Timing, measure, peak_memory

# A loss computes its gradient where it likes: in the forward (Liger), or in the backward. Only the sum compares.
TOGETHER = frozenset(
    {
        "cross_entropy",
        "jsd",
        "kl_div",
        "linear_cross_entropy",
        "linear_distillation",
        "linear_preference",
        "tvd",
    }
)


@dataclass(frozen=True)
class Ceilings:
    """What this device reached in this process: bytes/s of a large copy (read + write), FLOP/s of a large matmul."""

    copy: float
    matmul: float


@dataclass(frozen=True)
class Call:
    """One provider on one case: how to run it, its own arguments, and those whose gradients the backward computes.

    loss: only the first output has a gradient, the others are for the log.
    """

    forward: Callable[[], Any]
    args: Mapping[str, Any]
    inputs: tuple[Tensor, ...]
    loss: bool = False

    @classmethod
    def of(cls, adapter: Adapter, case: Case, device: torch.device, dtype: torch.dtype) -> Call:
        """The same numbers for everyone, in tensors of its own: Liger's losses and gates overwrite their inputs."""
        args = case.build(device, dtype, case.generator(device))
        return cls(adapter(args), args, tuple(v for v in args.values() if isinstance(v, Tensor) and v.requires_grad))

    def once(self) -> Any:
        """The outputs, without a graph."""
        with torch.no_grad():
            return self.forward()

    def backward(self) -> Callable[[], Any]:
        """A callable that computes the gradients of one kept forward again and again."""
        outputs = differentiable(self.forward())
        gradients = [torch.randn_like(out) for out in outputs]
        return lambda: torch.autograd.grad(outputs, self.inputs, gradients, retain_graph=True, allow_unused=True)

    def both(self, most: int | None = None) -> Callable[[], Any]:
        """A callable that runs forward and backward, of so many outputs at most."""

        def step():
            outputs = differentiable(self.forward())[: 1 if self.loss else most]
            return torch.autograd.grad(outputs, self.inputs, list(map(torch.ones_like, outputs)), allow_unused=True)

        return step


def differentiable(outputs: Any) -> list[Tensor]:
    """The outputs that a gradient can come from."""
    flat = outputs if isinstance(outputs, tuple | list) else (outputs,)
    return [out for out in flat if isinstance(out, Tensor) and out.requires_grad]


def run(
    name: str,
    device: torch.device,
    dtype: torch.dtype,
    *,
    command: str,
    tag: str = "bench",
    only: Sequence[str] = (),
    named: Sequence[str] = (),
    rounds: int = 5,
    forward: bool = False,
    progress: Callable[[str], None] = lambda what: None,
    so_far: Callable[[dict[str, Any]], None] = lambda document: None,
) -> dict[str, Any]:
    """The document of one op: for each case with `tag`, pass and provider a row with time, rate, memory or a reason,
    and with the arguments that a peer overwrites.

    only: providers to measure; named: cases to run, whatever their tags; empty means all. forward: no backward. A peer
    that is missing or fails is a row with a reason; ours raises. so_far: is given the document after each case, for a
    run that may not reach its end. ValueError for a name that the op has not, when no case is left, and for the forward
    alone of a loss.
    """
    check_named(name, cases(name), named, dtype)
    refuse_unknown(f"{name} has no provider", only, names(name))
    wanted = [c for c in cases(name) if (c.name in named if named else tag in c.tags) and dtype in c.dtypes]
    if not wanted:
        tags = sorted({tag for c in cases(name) if dtype in c.dtypes for tag in c.tags})
        raise ValueError(f"no {dtype_name(dtype)} case of {name} is tagged {tag}; their tags are: {', '.join(tags)}")
    found = document(
        name, device, command, [], dtype=dtype_name(dtype), rounds=rounds, ceilings=asdict(ceilings(device))
    )
    for case in wanted:
        progress(case.name)
        found["rows"] += case_rows(ops()[name], case, device, dtype, only, rounds, forward)
        so_far(found)
        if device.type != "cpu":
            torch.get_device_module(device).empty_cache()
    return found


@lru_cache(maxsize=8)
def ceilings(device: torch.device) -> Ceilings:
    """Measured once a process: a copy of 1 GiB and a bf16 matmul of 8192³ (on a CPU 64 MiB and fp32 1024³)."""
    small = device.type == "cpu"
    count, side = (2**24, 1024) if small else (2**29, 8192)
    dtype = torch.float32 if small else torch.bfloat16
    source = torch.randn(count, device=device, dtype=dtype)
    target = torch.empty_like(source)
    a, b = (torch.randn(side, side, device=device, dtype=dtype) for _ in range(2))
    times = measure({"copy": lambda: target.copy_(source), "matmul": lambda: a @ b}, device, budget_ms=50)
    return Ceilings(
        copy=2 * source.nbytes / times["copy"].median_us * 1e6, matmul=2 * side**3 / times["matmul"].median_us * 1e6
    )


def case_rows(
    op: Op, case: Case, device, dtype, only: Sequence[str], rounds: int, forward: bool = False
) -> list[dict[str, Any]]:
    if forward and op.name in TOGETHER:
        raise ValueError(f"{op.name} is measured forward and backward together: its gradient may come from either")
    torch._dynamo.reset()  # each case is compiled anew: dynamo gives up on a function after a few recompilations
    calls, rows, differences = {}, [], {}
    together = "forward+backward" if op.name in TOGETHER else ""
    expected = head = None
    for provider, adapter in providers(op.name, only).items():
        try:
            call = replace(Call.of(adapter, case, device, dtype), loss=bool(together))
            head = head or {"case": case.name, "dtype": dtype_name(dtype), "shapes": shapes(call.args)}
            out = call.once()
        except Exception as problem:  # whatever a peer throws is its row; ours must not throw
            if provider == OURS:
                raise
            rows.append({**head, "pass": together or "forward", "provider": provider, "error": reason(problem)})
            continue
        expected = out if expected is None else expected
        differences[provider] = difference(out, expected)
        calls[provider] = call
        del out
    del expected
    ours = calls[OURS]
    apart = {n: calls.pop(n).forward for n in list(calls) if isinstance(calls[n].forward, ThroughVulkan)}
    if not together:
        timings = measure({n: c.once for n, c in calls.items()}, device, rounds=rounds)
        timings |= {n: through.timing(rounds) for n, through in apart.items()}
        for provider, timing in timings.items():
            row = {**head, "pass": "forward", "provider": provider, "difference": differences[provider]}
            rows.append({**row, **figures(timing, work(op, ours, backward=False), device)})
    if ours.inputs and op.vjp is not None and not forward:
        found = _backward_rows(op, calls, device, rounds)
        rows += [{**head, "difference": differences[row["provider"]], **row} for row in found]
    written = {n: overwritten(op, call.args, ours.args) for n, call in calls.items()}
    rows = [{**row, "overwrites": written[row["provider"]]} if written.get(row["provider"]) else row for row in rows]
    return compared(rows)


def overwritten(op: Op, args: Mapping[str, Any], kept: Mapping[str, Any]) -> list[str]:
    """Names of the tensors among `args` that are no longer what they were, bit by bit: what `kept` still holds."""
    pairs = [(n, x, kept[n]) for n, x in args.items() if isinstance(x, Tensor) and n not in op.mutates]
    return [name for name, x, y in pairs if not torch.equal(x.detach().view(_bits(x)), y.detach().view(_bits(y)))]


def _bits(x: Tensor) -> torch.dtype:
    return {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[x.element_size()]


def _backward_rows(op: Op, calls: Mapping[str, Call], device, rounds: int) -> list[dict[str, Any]]:
    what = "forward+backward" if op.name in TOGETHER else "backward"
    ready, rows, peaks, wanted = {}, [], {}, None
    for provider, call in calls.items():
        try:
            pinned = provider.partition(":")[2] if _ours(provider) else ""
            if pinned in op.backends() and op.name not in TOGETHER and pinned not in op.vjp.backends():
                raise Missing(f"{op.vjp.name} has no {pinned} kernel")  # another's would run
            step = call.both() if op.name in TOGETHER else call.backward()
            made = [gradient is not None for gradient in step()]
            wanted = made if wanted is None else wanted  # ours come first
            if any(ours and not theirs for ours, theirs in zip(wanted, made)):
                raise Missing("its backward leaves out gradients that ours computes")
            peaks[provider] = peak_memory(call.both(), device)
            ready[provider] = step
        except Exception as problem:  # as above
            if provider == OURS:
                raise
            rows.append({"pass": what, "provider": provider, "error": reason(problem)})
    needed = work(op, calls[OURS], backward=True)
    for provider, timing in measure(ready, device, rounds=rounds).items():
        row = {"pass": what, "provider": provider, "peak_bytes": peaks[provider]}
        rows.append({**row, **figures(timing, needed, device)})
    return rows


def work(op: Op, call: Call, *, backward: bool) -> dict[str, float]:
    """Minimal bytes and FLOPs of the forward without gradients, or of what the backward row runs."""
    module = importlib.import_module(f"{family_of(op.reference.__module__)}.cases")
    named = dict(zip(op.parameters, op.bind((), dict(call.args))))
    wanted = [op.name]
    if backward:
        named |= _gradient_arguments(op, call)
        wanted = [op.name, op.vjp.name] if op.name in TOGETHER else [op.vjp.name]
    else:
        named = {n: v.detach() if isinstance(v, Tensor) else v for n, v in named.items()}
    needed = {}
    for kind, table in (("bytes", "bytes_moved"), ("flops", "flops")):
        formulas = [getattr(module, table, {}).get(name) for name in wanted]
        if all(formulas):
            needed[kind] = sum(formula(**_accepted(formula, named)) for formula in formulas)
    return needed


def _gradient_arguments(op: Op, call: Call) -> dict[str, Any]:
    out = call.once()
    outputs = out if isinstance(out, tuple) else (out,)
    named = dict(zip(op.outputs, outputs))
    named |= {f"d{name}": value for name, value in named.items()}
    inputs = dict(zip(op.parameters, op.bind((), dict(call.args))))
    asked = [getattr(inputs[gradient.removeprefix("d")], "requires_grad", False) for gradient in op.vjp.outputs]
    return {**named, "output_mask": asked}


def _accepted(formula: Callable[..., Any], named: Mapping[str, Any]) -> dict[str, Any]:
    parameters = inspect.signature(formula).parameters
    if any(p.kind is p.VAR_KEYWORD for p in parameters.values()):
        return dict(named)
    return {name: value for name, value in named.items() if name in parameters}


def figures(timing: Timing, needed: Mapping[str, float], device: torch.device) -> dict[str, Any]:
    """Time, spread, rates and the share of the ceiling that bounds this work."""
    found: dict[str, Any] = {"us": round(timing.median_us, 3), "spread": round(timing.spread, 4)}
    floors = {}
    if needed.get("bytes"):
        found["TB/s"] = float(f"{needed['bytes'] / timing.median_us / 1e6:.4g}")
        floors["copy"] = needed["bytes"] / ceilings(device).copy * 1e6
    if needed.get("flops"):
        found["TFLOP/s"] = float(f"{needed['flops'] / timing.median_us / 1e6:.4g}")
        floors["matmul"] = needed["flops"] / ceilings(device).matmul * 1e6
    if floors:
        bound = max(floors, key=floors.__getitem__)
        found |= {"bound": bound, "of_ceiling": round(floors[bound] / timing.median_us, 4)}
    return found


def compared(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The rows of one case with, in ours, how many times faster it is than the fastest peer of the same pass."""
    for row in rows:
        others = [r for r in rows if r["pass"] == row["pass"] and not _ours(r["provider"]) and "us" in r]
        rivals = [r for r in others if r["provider"] not in FLOORS]
        if row["provider"] == OURS and "us" in row and rivals:
            best = min(rivals, key=lambda r: r["us"])
            row |= {"best_peer": best["provider"], "times_best_peer": round(best["us"] / row["us"], 4)}
    return rows


def _ours(provider: str) -> bool:
    return provider.partition(":")[0] == OURS


def difference(out: Any, expected: Any) -> float | None:
    """Norm of the difference over norm of the expected, over all outputs that both have; None if shapes differ, and
    where that is no number: one has a NaN, or an infinity that the other has not, or only 0 is expected."""
    pairs = list(zip(*((o if isinstance(o, tuple | list) else (o,)) for o in (out, expected))))
    pairs = [(a, b) for a, b in pairs if isinstance(a, Tensor) and isinstance(b, Tensor)]
    if any(a.shape != b.shape for a, b in pairs):
        return None
    gap = size = 0.0
    with torch.no_grad():
        for a, b in pairs:
            a, b = a.double(), b.double()
            # lse is -inf for everyone where a query sees nothing
            gap += float(torch.where(a == b, 0.0, a - b).square().sum())
            size += float(torch.where(b.isinf(), 0.0, b).square().sum())
    if gap == 0.0:
        return 0.0
    found = (gap / size) ** 0.5 if size else math.inf
    return float(f"{found:.3g}") if math.isfinite(found) else None


def reason(problem: Exception) -> str:
    """Why a peer has no figure, in one line."""
    if isinstance(problem, ModuleNotFoundError):
        return f"{(problem.name or str(problem)).partition('.')[0]} is not installed"
    text = str(problem).strip().split("\n")[0][:200]
    return text if isinstance(problem, Missing) else f"{type(problem).__name__}: {text}"


def shapes(args: Mapping[str, Any]) -> dict[str, Any]:
    """Sizes of the tensors and values of the other arguments that are on."""
    shown = {n: list(v.shape) if isinstance(v, Tensor) else v for n, v in args.items()}
    return {n: v for n, v in shown.items() if v is not None and v is not False}


def benchable(tag: str = "bench") -> Iterator[str]:
    """Names of the ops that have a case with `tag`."""
    for name in sorted(ops()):
        if not name.endswith("_vjp") and any(tag in case.tags for case in cases(name)):
            yield name
