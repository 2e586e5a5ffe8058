"""What a step of checkpointed layers takes, as a model of the work, and how each layer's input is to be kept."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import product
from typing import NamedTuple

from tilesmith.models.checkpoints import Keep

FAR = 2**34  # tokens: more than any device holds
KEEPS = {"device": Keep(), "e4m3": Keep(e4m3=True), "host": Keep(host=True)}


class Line(NamedTuple):
    """Bytes of n tokens: base + n · slope + n² · curve; the curve is 0 but for scores that are kept whole."""

    base: float
    slope: float
    curve: float = 0.0

    def __call__(self, tokens: int) -> int:
        return int(self.base + tokens * (self.slope + tokens * self.curve))

    @classmethod
    def through(cls, few: int, least: int, many: int, most: int) -> Line:
        """Of `least` bytes at `few` tokens and `most` at `many`; it does not fall, nor begin below zero."""
        slope = max(0.0, (most - least) / (many - few)) if many > few else most / max(1, many)
        base = max(0.0, most - many * slope)
        return cls(base, slope)

    @classmethod
    def fitted(cls, points: list[tuple[int, int]]) -> Line:
        """Through the last two of (tokens, bytes), by ascending tokens. Where a token takes more bytes among more of
        them, as no line from above zero has it, through the last three with a curve."""
        (few, least), (many, most) = points[-2:] if len(points) > 1 else points * 2
        if most * few <= least * many or len(points) < 3:
            return cls.through(few, least, many, most)
        fewest, start = points[-3]
        steep = (most - least) / (many - few)
        curve = (steep - (least - start) / (few - fewest)) / (many - fewest)
        slope = max(0.0, steep - curve * (few + many))
        return cls(max(0.0, most - many * (slope + many * curve)), slope, curve)


@dataclass(frozen=True)
class StepCosts:
    """What a step of one model takes. Bytes.

    layers; columns and itemsize: of a token's hidden state. fixed: parameters, buffers, gradients, workspaces of
    libraries. layer: tokens -> what a layer holds at its backward's peak beside its input. device, limit: what the step
    is to stay below, and what it must; host: the host memory that may be taken. loss: tokens -> what the loss holds
    while all inputs are kept; None without one.
    """

    layers: int
    columns: int
    itemsize: int
    fixed: int
    layer: Line
    device: int
    limit: int
    host: int
    loss: Callable[[int], int] | None = None

    def hidden(self, tokens: int) -> int:
        """Of one hidden state."""
        return tokens * self.columns * self.itemsize

    def peak(self, tokens: int, keeps: tuple[Keep, ...]) -> int:
        """The most that the device holds, over the layers' backwards: what the layers up to this one keep, this one's
        input where that had to be made again, the input of the one below on its way from the host, the layer's work.
        Before them, the loss's, beside what goes into the last norm and what comes out."""
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
        first = 0 if self.loss is None else kept + 2 * hidden + self.loss(tokens)
        return self.fixed + max(first, most + self.layer(tokens))

    def on_host(self, tokens: int, keeps: tuple[Keep, ...]) -> int:
        """What goes to host memory."""
        return sum(keep.bytes(tokens, self.columns, self.itemsize)[1] for keep in keeps)

    def choose(self, tokens: int, keep: str) -> tuple[Keep, ...] | None:
        """How each layer's input is kept, the first layer's first; None where nothing fits. "auto" rounds as few as
        possible, and of these sends as few as possible to the host: the first ones, which are needed last."""
        for bound in dict.fromkeys((self.device, self.limit)):
            if keep != "auto":
                keeps = (KEEPS[keep],) * self.layers
                if self._fits(tokens, keeps, bound):
                    return keeps
                continue
            for rounded in range(self.layers + 1):
                sent = self._sent(tokens, rounded, bound)
                if sent is not None:
                    return self._kept(rounded, sent)
        return None

    def _fits(self, tokens: int, keeps: tuple[Keep, ...], bound: int) -> bool:
        return self.on_host(tokens, keeps) <= self.host and self.peak(tokens, keeps) <= bound

    def _sent(self, tokens: int, rounded: int, bound: int) -> int | None:
        """The fewest layers whose inputs go to the host, where so many are rounded; None where nothing fits."""
        if self._fits(tokens, self._kept(rounded, 0), bound):
            return 0
        # beyond none, each one more takes more of the host and leaves more of the device
        numbers = range(1, self.layers + 1)
        most = bisect_right(numbers, self.host, key=lambda n: self.on_host(tokens, self._kept(rounded, n)))
        least = bisect_left(numbers, -bound, key=lambda n: -self.peak(tokens, self._kept(rounded, n)))
        return numbers[least] if least < most else None

    def _kept(self, rounded: int, sent: int) -> tuple[Keep, ...]:
        """The first `sent` layers' inputs on the host, `rounded` in e4m3: of those that stay first, as that frees the
        device, which is what is short."""
        n = self.layers
        codes = set(range(sent, min(n, sent + rounded))) | set(range(max(0, sent + rounded - n)))
        return tuple(Keep(e4m3=i in codes, host=i < sent) for i in range(n))

    def candidates(self, keep: str) -> Iterator[tuple[Keep, ...]]:
        """The ways to keep the layers' inputs, in the order of `choose`."""
        if keep != "auto":
            yield (KEEPS[keep],) * self.layers
            return
        for rounded, sent in product(range(self.layers + 1), repeat=2):
            yield self._kept(rounded, sent)

    def longest(self, keep: str) -> int:
        """The most tokens for which `choose` finds something."""
        low, high = 0, 1
        while high < FAR and self.choose(high, keep) is not None:
            low, high = high, 2 * high
        while high - low > max(1, low // 512):
            middle = (low + high) // 2
            low, high = (middle, high) if self.choose(middle, keep) is not None else (low, middle)
        return low
