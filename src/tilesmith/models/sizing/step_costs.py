"""What a step of checkpointed layers takes, as a model of the work, and how each layer's input is to be kept."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from tilesmith.models.checkpoints import Keep

FAR = 2**34  # tokens: more than any device holds
KEEPS = {"device": Keep(), "e4m3": Keep(e4m3=True), "host": Keep(host=True)}


class Line(NamedTuple):
    """Bytes of n tokens: base + n · slope."""

    base: float
    slope: float

    def __call__(self, tokens: int) -> int:
        return int(self.base + tokens * self.slope)

    @classmethod
    def through(cls, few: int, least: int, many: int, most: int) -> Line:
        """Of `least` bytes at `few` tokens and `most` at `many`; it does not fall, nor begin below zero."""
        slope = max(0.0, (most - least) / (many - few)) if many > few else most / max(1, many)
        base = max(0.0, most - many * slope)
        return cls(base, slope)


@dataclass(frozen=True)
class StepCosts:
    """What a step of one model takes. Bytes.

    layers; columns and itemsize: of a token's hidden state. fixed: parameters, buffers, gradients, workspaces of
    libraries. layer: tokens -> what a layer holds at its backward's peak beside its input. device, limit: what the step
    is to stay below, and what it must; host: the host memory that may be taken.
    """

    layers: int
    columns: int
    itemsize: int
    fixed: int
    layer: Line
    device: int
    limit: int
    host: int

    def hidden(self, tokens: int) -> int:
        """Of one hidden state."""
        return tokens * self.columns * self.itemsize

    def peak(self, tokens: int, keeps: tuple[Keep, ...]) -> int:
        """The most that the device holds, over the layers' backwards: what the layers up to this one keep, this one's
        input where that had to be made again, the input of the one below on its way from the host, the layer's work."""
        hidden, kept, most = self.hidden(tokens), 0, 0
        before: Keep | None = None
        for keep in keeps:
            kept += keep.bytes(tokens, self.columns, self.itemsize)[0]
            made = 0 if keep == Keep() else hidden
            coming = 0
            if before is not None and before.host:
                coming = before.bytes(tokens, self.columns, self.itemsize)[1]
            if keep.host and keep.e4m3:
                made += keep.bytes(tokens, self.columns, self.itemsize)[1]
            most = max(most, kept + made + coming)
            before = keep
        return self.fixed + most + self.layer(tokens)

    def on_host(self, tokens: int, keeps: tuple[Keep, ...]) -> int:
        """What goes to host memory."""
        return sum(keep.bytes(tokens, self.columns, self.itemsize)[1] for keep in keeps)

    def choose(self, tokens: int, keep: str) -> tuple[Keep, ...] | None:
        """How each layer's input is kept, the first layer's first; None where nothing fits. "auto" rounds as few as
        possible, and of these sends as few as possible to the host: the first ones, which are needed last."""
        for bound in dict.fromkeys((self.device, self.limit)):
            for keeps in self.candidates(keep):
                if self.on_host(tokens, keeps) <= self.host and self.peak(tokens, keeps) <= bound:
                    return keeps
        return None

    def candidates(self, keep: str) -> Iterator[tuple[Keep, ...]]:
        """The ways to keep the layers' inputs, in the order of `choose`."""
        n = self.layers
        if keep != "auto":
            yield (KEEPS[keep],) * n
            return
        for rounded in range(n + 1):
            for sent in range(n + 1):
                # what stays is rounded first: that frees the device, which is what is short
                codes = set(range(sent, min(n, sent + rounded))) | set(range(max(0, sent + rounded - n)))
                yield tuple(Keep(e4m3=i in codes, host=i < sent) for i in range(n))

    def longest(self, keep: str) -> int:
        """The most tokens for which `choose` finds something."""
        low, high = 0, 1
        while high < FAR and self.choose(high, keep) is not None:
            low, high = high, 2 * high
        while high - low > max(1, low // 512):
            middle = (low + high) // 2
            low, high = (middle, high) if self.choose(middle, keep) is not None else (low, middle)
        return low
