"""The steps of one kind of call of `generate`: their tensors, the cache, and a CUDA graph of a step."""

from __future__ import annotations

import contextlib
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from tilesmith.models.capture import Recorder, uncached_autocast
from tilesmith.models.fingerprint import Fingerprint
from tilesmith.models.generation.cache import StaticLayers
from tilesmith.models.generation.scores import StaticProcessor
from tilesmith.models.generation.step import choose, token_step
from tilesmith.models.generation.token_state import TokenState

_WARM_STEPS = 2
"""Steps that run as they are before one is recorded: kernels are compiled and libraries set up. They are tokens too."""


class StepRecorder(Recorder, Protocol):
    """What records a step: `CudaRecorder`, or a test's."""

    def fetch(self, tensor: Tensor) -> Callable[[], list[int]]: ...


class RecordedSteps:
    """Steps of one model, batch size, cache size and choice of tokens. What a call of `generate` brings is copied in
    (`begin`), so that later calls of the kind replay what this one recorded. recorder: of these steps alone, since a
    pool of memory cannot be shared with graphs that were dropped.

    problem: why a step could not be recorded; the steps then run as they are. steps: how many have run, also behind the
    end of all rows. replays: those by a graph.
    """

    def __init__(
        self,
        model: nn.Module,
        recorder: StepRecorder,
        cache: Any,
        state: TokenState,
        processors: Sequence[StaticProcessor],
        sample: bool,
    ):
        self.cache, self.state, self.processors, self.sample = cache, state, processors, sample
        self.problem, self.steps, self.replays = "", 0, 0
        self._model, self.recorder = model, recorder
        self.layers = StaticLayers(cache)
        self._graphs: dict[tuple[bool, ...], Callable[[], None]] = {}  # by which windows have filled
        self._ran: Counter[tuple[bool, ...]] = Counter()
        self._sources = Fingerprint([model])

    def stale(self) -> bool:
        """Whether parameters lie elsewhere now, or modules, their attributes or hooks have changed."""
        return self._sources.changed()

    @property
    def graphs(self) -> int:
        """Recorded steps: one, and another for windows that have filled."""
        return len(self._graphs)

    def bytes(self) -> int:
        """What the cache and the graphs hold between calls."""
        tensors = [x for layer in self.cache.layers for x in (layer.keys, layer.values) if x is not None]
        return sum(x.nbytes for x in tensors) + self.recorder.memory()

    def choose(self, logits: Tensor) -> None:
        """The first new token, by the logits [B, V] of the prompt."""
        choose(self.state, logits, self.processors, self.sample)

    def advance(self) -> None:
        """Make the next token."""
        self.steps += 1
        kind = self.layers.filled()
        replay = self._graphs.get(kind)
        if replay is not None:
            replay()
            self.layers.count([number + 1 for number in self.layers.counts()])
            self.replays += 1
            return
        if self.problem or self._ran[kind] < _WARM_STEPS:
            self._ran[kind] += 1
            self.recorder.warm(self._step)
            return
        counts = self.layers.counts()
        try:
            self._graphs[kind], _ = self.recorder.record(self._step)
        except RuntimeError as problem:  # CUDA's errors are RuntimeErrors
            self.layers.count(counts)
            self.problem = (str(problem).splitlines() or ["it raised"])[0][:200]
            cls = type(self._model).__name__
            warnings.warn(f"optimize(graphs=True): generate of {cls} is not recorded: {self.problem}", stacklevel=2)
            self._step()
            return
        self._graphs[kind]()
        self.replays += 1

    def _step(self) -> None:
        with _untracked(), uncached_autocast(self.state.sequence.device.type):
            token_step(self._model, self.cache, self.layers, self.state, self.processors, self.sample)


@contextlib.contextmanager
def _untracked() -> Iterator[None]:
    """No gradients. Within inference mode nothing changes."""
    with contextlib.nullcontext() if torch.is_inference_mode_enabled() else torch.no_grad():
        yield
