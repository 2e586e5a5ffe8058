"""The calls of the benchmark of context parallelism, by the number of ranks."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from tilesmith import ops
from tilesmith.bench.ranks import current_device
from tilesmith.distributed import Layout, cost
from tilesmith.distributed.layout import causal_pairs
from tilesmith.distributed.pieces import Sight

FORWARD, BOTH = "forward", "forward+backward"
BACKWARD = 3.5  # FLOPs of forward and backward over those of the forward


@dataclass(frozen=True)
class Problem:
    """One attention over all ranks, batch 1, head dim 128. lengths: of packed documents, one if empty. passes: what is
    timed."""

    name: str
    tokens: int
    heads: int = 16
    kv_heads: int = 16
    dim: int = 128
    window: int | None = None
    sinks: bool = False
    lengths: tuple[int, ...] = ()
    passes: tuple[str, ...] = (BOTH,)

    @property
    def mask(self) -> ops.Mask:
        """Causal, with a window if there is one."""
        return ops.Mask(causal=True, window=self.window)

    @property
    def starts(self) -> tuple[int, ...] | None:
        """Boundaries of the documents; None without."""
        total = [0]
        for length in self.lengths:
            total.append(total[-1] + length)
        return tuple(total) if self.lengths else None

    @property
    def causal_alone(self) -> bool:
        """Whether it has no windows and no documents."""
        return self.window is None and not self.lengths

    def layout(self, size: int) -> Layout:
        """How callers would hold the sequence: windows in one piece, documents by their work, else zigzag."""
        if self.starts:
            return Layout.balanced(self.starts, size)
        return (Layout.contiguous if self.window else Layout.zigzag)(self.tokens, size)

    def flops(self, which: str) -> float:
        """FLOPs of a pass, of the pairs that see each other."""
        if self.window:
            width = self.window + 1
            pairs = self.tokens * width - width * (width - 1) // 2
        else:
            pairs = causal_pairs(self.starts or (0, self.tokens), (0, self.tokens))
        return (BACKWARD if which == BOTH else 1.0) * 4 * self.heads * self.dim * pairs

    def predicted(self, size: int, mode: str) -> cost.Estimate | None:
        """What the model that `mode="auto"` asks says of a mode; None where it cannot be."""
        sight = Sight(right=0) if self.window is None else Sight(self.window, 0)
        starts = self.starts or (0, self.tokens)
        problem = cost.Problem(self.layout(size), starts, sight, 1, self.heads, self.kv_heads, self.dim)
        able = [one for one in cost.choose(problem, cost.machine_of(current_device())).estimates if not one.refused]
        found = [one for one in able if mode in ("auto", one.mode)]
        return min(found, key=lambda one: one.seconds, default=None)


def documents_of(total: int) -> tuple[int, ...]:
    """Lengths of documents, log-normal with median 600 as web text has, that fill `total` tokens."""
    generator = torch.Generator().manual_seed(0)
    lengths: list[int] = []
    while sum(lengths) < total:
        draw = int((torch.randn((), generator=generator) * 1.5 + 6.4).exp().clamp(16, total // 2))
        lengths.append(min(draw, total - sum(lengths)))
    return tuple(lengths)


def problems(device: torch.device, size: int) -> list[Problem]:
    """Those of the results, the longest last; tiny ones on a CPU, where only the path is tried.

    Where the tokens of a GPU are those at which scaling is judged, the forward is timed alone, too.
    """
    if device.type == "cpu":
        tiny = Problem("causal", 64, 8, 4, 16, passes=(FORWARD, BOTH))
        packed = Problem("packed", 64, 2, 1, 16, lengths=(24, 1, 39))
        return [tiny, Problem("window", 64, 2, 1, 16, window=8, sinks=True), packed]
    scaling = {n * size for n in (8, 64 if size == 2 else 128)}
    found = []
    for n in sorted(scaling | ({16, 64, 256} if size == 2 else {64, 256, 1024})):
        passes = (FORWARD, BOTH) if n in scaling else (BOTH,)
        found += [Problem("causal", n * 1024, h, g, passes=passes) for h, g in ((16, 16), (32, 8))]
    others = [
        Problem("packed", 65536, lengths=documents_of(65536)),
        Problem("window 4096", 65536, window=4095),
        Problem("window 128, sinks", 65536, 32, 8, window=127, sinks=True),
    ]
    return sorted(found + others, key=lambda problem: problem.tokens)
