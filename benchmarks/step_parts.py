"""A training step of dense decoders beside the sum of its parts, each measured alone, on one GPU.

    python benchmarks/step_parts.py results.json [FAMILY ...] [--rounds 5] [--tiny]

One step of `optimize` on a family of model_steps.py is recorded: which ops of the library and of PyTorch it calls, with
which arguments, how often. So the shapes are those of the model's config, and the parts those that `optimize` makes.
Then every distinct call is timed alone on the recorded arguments, in rounds in which all take turns with the step, with
a cold L2 cache. An op of the library is timed together with its gradient, as the step computes it; products and other
ops of PyTorch are timed as they were called, those of the backward too. A part counts as often as the step calls it.

A row has the parts, their sum, the step's time on the device and by the clock of the host, and both over the sum. Calls
that touch less than `SMALL` bytes, as those that make masks and angles, are left out and counted. --tiny: sizes for a
CPU, which show that it runs and nothing else. Needs transformers.
"""

from __future__ import annotations

import argparse
import gc
import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import model_steps
import torch
from common import DEVICE, load, provenance, save, say
from model_steps import FAMILIES, OPTIONS, Family, built, stepper, tiny
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

import tilesmith
from tilesmith.engine import ops as declared
from tilesmith.engine import use
from tilesmith.engine.timing import Timing, measure
from tilesmith.models.reach import reaches_device

DENSE = ("llama-1.5b", "llama-1.5b-16k", "llama-8b", "qwen3-4b", "gemma3-4b")
SMALL = 2**20  # bytes


@dataclass
class Call:
    """A distinct call: the function that torch's dispatcher saw, its arguments, how often it was called."""

    function: Any
    args: tuple
    kwargs: dict[str, Any]
    count: int = 0


class Recorder(TorchDispatchMode):
    """Keeps the distinct calls that run within it. left_out: how many touched less than `least` bytes."""

    def __init__(self, least: int):
        super().__init__()
        self.calls: dict[str, Call] = {}
        self.least, self.left_out = least, 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        out = function(*args, **kwargs)
        given, made = (list(filter(torch.is_tensor, tree_leaves(tree))) for tree in ((args, kwargs), out))
        places = {t.untyped_storage().data_ptr() for t in given}
        if not function._schema.is_mutable and all(t.untyped_storage().data_ptr() in places for t in made):
            return out  # a view, or nothing
        if sum(t.numel() * t.element_size() for t in (*given, *made)) < self.least:
            self.left_out += 1
            return out
        key = f"{function} {described((args, kwargs))}"
        if key not in self.calls:
            kept = tree_map(lambda t: t.detach() if torch.is_tensor(t) else t, (args, kwargs))
            self.calls[key] = Call(function, *kept)
        self.calls[key].count += 1
        return out


def described(arguments: Any) -> list[str]:
    """Each argument as text that tells those of distinct calls apart."""

    def told(value: Any) -> str:
        if not torch.is_tensor(value):
            return str(value)
        turned = "" if value.is_contiguous() else f" strides {list(value.stride())}"
        return f"{str(value.dtype)[6:]}{list(value.shape)}{turned}"

    return [told(value) for value in tree_leaves(arguments)]


def shown(arguments: Any) -> str:
    """The arguments of a row, without those that are not given."""
    return ", ".join(text for text in described(arguments) if text != "None")


@dataclass
class Part:
    """A call to be timed, under the name of its op."""

    op: str
    phase: str
    arguments: str
    count: int
    run: Callable[[], object]


def recorded(model: nn.Module, loss_of: Callable[[nn.Module], Tensor]) -> tuple[Recorder, Recorder]:
    """The calls of a step's forward and of its backward."""
    least = 1 if OPTIONS.tiny else SMALL
    forward, backward = Recorder(least), Recorder(least)
    with forward:
        loss = loss_of(model)
    with backward:
        loss.backward()
    model.zero_grad()
    return forward, backward


def parts_of(forward: Recorder, backward: Recorder) -> list[Part]:
    """What to time: ops of the library with their gradients, the rest as it was called. RuntimeError where an op ran
    with another number of gradients than forwards: then it is not known which call they are of."""
    ours = {op.handle: op for op in declared().values()}
    gradients = {op.vjp.name for op in ours.values() if op.vjp is not None}
    ran, differentiated = (called(recorder, ours) for recorder in (forward, backward))
    parts = []
    for phase, recorder in (("forward", forward), ("backward", backward)):
        for call in recorder.calls.values():
            op = ours.get(call.function)
            if op is None:
                run = bound(call.function, call.args, call.kwargs)
                parts.append(Part(str(call.function), phase, shown((call.args, call.kwargs)), call.count, run))
                continue
            if phase == "backward" and op.name in gradients:
                continue  # it is timed with its forward
            args, name, told = op.complete(call.args), op.name, shown(call.args)
            if phase == "backward" or op.vjp is None:
                parts.append(Part(name, phase, told, call.count, bound(op, args, {})))
                continue
            times = differentiated[op.vjp.name]
            if times != ran[name]:
                raise RuntimeError(f"{name} ran {ran[name]} times, its gradient {times} times")
            parts.append(Part(name, "forward and backward", told, call.count, with_gradient(op, args)))
    return parts


def called(recorder: Recorder, ours: dict[Any, Any]) -> Counter[str]:
    """How often each op of the library was called."""
    counts: Counter[str] = Counter()
    for call in recorder.calls.values():
        if call.function in ours:
            counts[ours[call.function].name] += call.count
    return counts


def bound(function: Callable[..., Any], args: tuple, kwargs: dict[str, Any]) -> Callable[[], object]:
    """The call without gradients."""

    def once() -> object:
        with torch.no_grad():
            return function(*args, **kwargs)

    return once


def with_gradient(op: Any, args: tuple) -> Callable[[], object]:
    """The call and its gradient, for every input of which the op has one."""
    wanted = {name[1:] for name in op.vjp.outputs}
    given = [
        a.detach().requires_grad_() if torch.is_tensor(a) and a.is_floating_point() and name in wanted else a
        for name, a in zip(op.parameters, args, strict=True)
    ]
    inputs = [a for a in given if torch.is_tensor(a) and a.requires_grad]

    def outputs() -> list[Tensor]:
        return [out for out in tree_leaves(op(*given)) if out.requires_grad]

    douts = [torch.randn_like(out) if out.ndim else torch.ones_like(out) for out in outputs()]
    return lambda: torch.autograd.grad(outputs(), inputs, douts, allow_unused=True)


def compare(family: Family, rounds: int) -> dict[str, Any]:
    """The row of a family."""
    gc.collect()
    torch.cuda.empty_cache()
    model, loss_of = built(family)
    tilesmith.optimize(model)
    used = {op for row in model.tilesmith_report.rows for op in row.ops}
    with use(**{op: "reference" for op in used if not reaches_device(op, DEVICE.type)}):
        step = stepper(model, loss_of)
        for _ in range(3):
            step()
        forward, backward = recorded(model, loss_of)
        parts = parts_of(forward, backward)
        runs = {str(place): part.run for place, part in enumerate(parts)}
        found = measure({**runs, "step": step}, DEVICE, rounds=rounds, budget_ms=1.0 if OPTIONS.tiny else 20.0)
        wall = model_steps.timed({"step": step}, rounds)["step"]
    rows = [row_of(part, found[str(place)]) for place, part in enumerate(parts)]
    return summary(rows, found["step"], wall) | {"left_out": forward.left_out + backward.left_out, "parts": rows}


def row_of(part: Part, timing: Timing) -> dict[str, Any]:
    return {
        "op": part.op, "phase": part.phase, "arguments": part.arguments, "count": part.count,
        "us": round(timing.median_us, 3), "spread": round(timing.spread, 4),
        "ms": round(timing.median_us * part.count / 1e3, 5),
    }  # fmt: skip


def summary(rows: list[dict[str, Any]], step: Timing, wall: Timing) -> dict[str, Any]:
    """The sum of the parts in ms, by op too, and the step beside it."""
    total, by_op = sum(row["ms"] for row in rows), Counter()
    for row in rows:
        by_op[row["op"]] += row["ms"]
    return {
        "sum_ms": round(total, 3),
        "by_op": {op: round(ms, 3) for op, ms in by_op.most_common()},
        "step_ms": round(step.median_us / 1e3, 3), "step_spread": round(step.spread, 4),
        "step_over_sum": round(step.median_us / 1e3 / total, 4),
        "wall_ms": round(wall.median_us / 1e3, 3), "wall_spread": round(wall.spread, 4),
        "wall_over_sum": round(wall.median_us / 1e3 / total, 4),
    }  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", type=Path)
    parser.add_argument("families", nargs="*", metavar="FAMILY", help=f"all where none is named: {', '.join(DENSE)}")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--tiny", action="store_true")
    given = parser.parse_args(namespace=OPTIONS)
    unknown = sorted(set(given.families) - set(DENSE))
    if unknown:
        parser.error(f"unknown families: {', '.join(unknown)}; there are {', '.join(DENSE)}")
    if DEVICE.type == "cpu" and not given.tiny:
        parser.error("this needs a GPU; --tiny runs sizes for a CPU")
    document = {**provenance(), "rows": load(given.results).get("rows", {})}
    for name in given.families or DENSE:
        say(name)
        row = compare(tiny(FAMILIES[name]) if given.tiny else FAMILIES[name], given.rounds)
        for op, ms in row["by_op"].items():
            say(f"  {op:<40} {ms:9.3f} ms")
        say(f"  parts {row['sum_ms']:.2f} ms, step {row['step_ms']:.2f} ms on the device ({row['step_over_sum']:.3f}), "
            f"{row['wall_ms']:.2f} ms by the clock ({row['wall_over_sum']:.3f})")  # fmt: skip
        document["rows"][name] = row
        save(given.results, document)
    return 0


if __name__ == "__main__":
    sys.exit(main())
