"""What a call costs the host: eager RMSNorm with gradients on, sizes so small that the device waits."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from tilesmith.bench.document import document
from tilesmith.bench.peers import OURS, providers
from tilesmith.bench.run import Call, reason
from tilesmith.engine.timing import host_time

OP = "rms_norm"
ROWS, COLUMNS = 8, 128


def run(
    device: torch.device, dtype: torch.dtype, *, command: str, only: Sequence[str] = (), rounds: int = 9
) -> dict[str, Any]:
    """The document: µs of host time of a forward, and of a forward and backward, for every provider or `only` some."""
    forward: dict[str, Callable[[], Any]] = {}
    both: dict[str, Callable[[], Any]] = {}
    rows = []
    for provider, adapter in providers(OP).items():
        if only and provider not in (OURS, *only):
            continue
        try:
            x = torch.randn(ROWS, COLUMNS, device=device, dtype=dtype, requires_grad=True)
            weight = torch.randn(COLUMNS, device=device, dtype=dtype, requires_grad=True)
            args = {"x": x, "weight": weight, "eps": 1e-6}
            call = Call(adapter(args), args, (x, weight))
            call.both()()
        except Exception as problem:  # whatever a peer throws is its row; ours must not throw
            if provider == OURS:
                raise
            rows.append({"pass": "forward", "provider": provider, "error": reason(problem)})
            continue
        forward[provider], both[provider] = call.forward, call.both()
    for what, variants in (("forward", forward), ("forward+backward", both)):
        for provider, timing in host_time(variants, device, rounds=rounds).items():
            rows.append({"pass": what, "provider": provider, "us": round(timing.median_us, 2), "spread": timing.spread})
    name = str(dtype).removeprefix("torch.")
    return document("host", device, command, rows, op=OP, shape=[ROWS, COLUMNS], dtype=name, rounds=rounds)
