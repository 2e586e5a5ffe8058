"""What a call costs the host: eager ops with gradients on, of sizes so small that the device waits."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from tilesmith.bench.document import document
from tilesmith.bench.peers import OURS, providers
from tilesmith.bench.run import Call, compared, differentiable, reason
from tilesmith.bench.sweep_inputs import INPUTS, Held
from tilesmith.engine import Case
from tilesmith.engine.arguments import dtype_name
from tilesmith.engine.timing import host_time, launches

# The ops of a layer and of a loss, and the axis of the sweep that makes their inputs.
OPS = {
    "rms_norm": "columns",
    "layer_norm": "columns",
    "swiglu": "columns",
    "softmax": "columns",
    "rope": "tokens",
    "attention": "tokens",
    "cross_entropy": "vocabulary",
}
TINY = Held(tokens=8, hidden=128, vocab=256, total=64, heads=2, kv_heads=1, head_dims=(64,))
TIMES = 10  # as many rounds as of device time: they are short, and whatever else the host does slows some of them
VALUES = {"columns": 128, "tokens": 64, "vocabulary": 256}
NOTHING = "nothing"


def run(
    device: torch.device,
    dtype: torch.dtype,
    *,
    command: str,
    only: Sequence[str] = (),
    named: Sequence[str] = (),
    rounds: int = 5,
    progress: Callable[[str], None] = lambda what: None,
    so_far: Callable[[dict[str, Any]], None] = lambda document: None,
) -> dict[str, Any]:
    """The document: µs of host time and kernels of a forward, and of a forward and backward, for every provider.

    only: providers to measure beside ours; named: ops; all by default. so_far: is given the document after each op.
    rounds: a tenth of those measured. Raises ValueError for an op that is not here.
    """
    unknown = [name for name in named if name not in OPS]
    if unknown:
        raise ValueError(f"host time is measured of {', '.join(OPS)}; got {', '.join(unknown)}")
    rounds *= TIMES
    found = document("host", device, command, [], dtype=dtype_name(dtype), rounds=rounds)
    for op in named or OPS:
        progress(op)
        found["rows"] += _op_rows(op, device, dtype, only, rounds)
        so_far(found)
    return found


class _Nothing(torch.autograd.Function):
    """The first inputs as so many outputs, without a kernel: what an op in Python pays PyTorch for being one."""

    @staticmethod
    def forward(ctx: Any, outputs: int, *inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.rest = (None,) * (len(inputs) - outputs)
        return tuple(x.view_as(x) for x in inputs[:outputs])

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return (None, *grads, *ctx.rest)


def _op_rows(op: str, device: torch.device, dtype: torch.dtype, only: Sequence[str], rounds: int) -> list[dict]:
    """Gradients come in for as many outputs as every provider has: lse, of which a gradient may be asked, is ours."""
    torch._dynamo.reset()
    args = next(iter(INPUTS[op][OPS[op]].build(VALUES[OPS[op]], TINY).values()))
    case, rows, calls = Case(op, args), [], {}
    for provider, adapter in providers(op, only).items():
        try:
            call = Call.of(adapter, case, device, dtype)
            call.both()()
        except Exception as problem:  # whatever a peer throws is its row; ours must not throw
            if provider == OURS:
                raise
            rows.append({"case": op, "pass": "forward", "provider": provider, "error": reason(problem)})
            continue
        calls[provider] = call
    outputs = min(len(differentiable(call.forward())) for call in calls.values())
    ours = calls[OURS].inputs
    calls[NOTHING] = Call(lambda: _Nothing.apply(outputs, *ours), {}, ours)
    passes = {
        "forward": {name: call.forward for name, call in calls.items()},
        "forward+backward": {name: call.both(outputs) for name, call in calls.items()},
    }
    for what, variants in passes.items():
        for provider, timing in host_time(variants, device, rounds=rounds).items():
            row = {"case": op, "pass": what, "provider": provider, "us": round(timing.median_us, 2)}
            rows.append({**row, "spread": timing.spread, "launches": launches(variants[provider], device)})
    return compared(rows)
