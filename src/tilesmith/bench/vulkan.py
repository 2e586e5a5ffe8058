"""An op through Vulkan, on copies of its arguments, timed by the device's own clock."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from tilesmith import runtime
from tilesmith.bench.missing import Missing
from tilesmith.engine import Op, use
from tilesmith.engine.timing import Timing

NAME = "vulkan"


class ThroughVulkan:
    """A call of an op whose portable kernels run through Vulkan. Raises Missing where they cannot."""

    def __init__(self, op: Op, args: Mapping[str, Any]) -> None:
        reason = runtime.missing(NAME)
        if reason is not None:
            raise Missing(reason)
        from tilesmith.runtime import vulkan

        self.op = op
        self.device = next(v.device for v in args.values() if isinstance(v, Tensor))
        there = self.device if vulkan.takes(self.device) else torch.device("cpu")
        self.args = {n: v.detach().to(there) if isinstance(v, Tensor) else v for n, v in args.items()}

    def __call__(self) -> Any:
        with runtime.through(NAME), use(**{self.op.name: "portable"}):
            out = self.op(**self.args)
        return tuple(o.to(self.device) for o in out) if isinstance(out, tuple) else out.to(self.device)

    def timing(self, rounds: int) -> Timing:
        """The device's time for all kernels of a call; rounds follow one another, the L2 cache cold."""
        from tilesmith.runtime import vulkan

        with torch.no_grad(), vulkan.timed(rounds) as launches:
            self()
        return Timing.of([sum(times) for times in zip(*launches)])
