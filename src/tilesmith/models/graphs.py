"""`optimize(model, graphs=True)`: forward and backward of each repeated block recorded as CUDA graphs, by shape.

A block whose kernels are shorter than the time that Python needs to launch them waits for the host. Its recording is
launched by one call. `recorded.py` holds one recording; this file decides when a call may be served by one.
"""

from __future__ import annotations

import functools
import time
import warnings
import weakref
from collections import Counter
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from tilesmith.engine import torch_private
from tilesmith.engine.choice import pins
from tilesmith.models.blocks import BlockForm, BlockRule, Call, Forwards, observer
from tilesmith.models.capture import CudaRecorder
from tilesmith.models.reach import observed
from tilesmith.models.recorded import CannotRecord, Foreign, Memory, Recorded, flatten

RECORDER = CudaRecorder
PLAIN_CALLS = 2
"""How often a block runs a shape as before until it is recorded: kernels are compiled and tuned, and a shape that comes
once is not worth a recording."""
MOST_SHAPES = 4
_REMEMBERED = 256  # shapes of a block that are counted
_GRAPHS = "_tilesmith_graphs"


class Graphs:
    """What the blocks of one model have recorded. replays: calls served by a recording. seconds: spent recording.
    plain: why a block ran as before -> how often. refused: class -> why its blocks cannot be recorded."""

    def __init__(self) -> None:
        self.replays, self.seconds, self.renewed = 0, 0.0, 0
        self.plain: Counter[str] = Counter()
        self.refused: dict[str, str] = {}
        self._forget()

    def _forget(self) -> None:
        self._blocks: weakref.WeakKeyDictionary[nn.Module, _Block] = weakref.WeakKeyDictionary()
        self._memory = Memory(RECORDER())

    def __getstate__(self) -> dict[str, Any]:
        # A recording is of the parameters that it was made with: a copy records its own.
        return {name: value for name, value in self.__dict__.items() if name not in ("_blocks", "_memory")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._forget()

    @property
    def recorded(self) -> int:
        """Pairs of graphs, forward and backward, that are kept."""
        return sum(len(block.recorded) for block in self._blocks.values())

    def told(self) -> list[str]:
        """Sentences for the report."""
        if not self.replays and not self.plain and not self.refused:
            return [f"Recorded blocks: none yet; a shape is recorded when it has trained {PLAIN_CALLS} times"]
        held = self._memory.bytes() / 2**20
        told = [
            f"Recorded blocks: {self.replays} replays of {self.recorded} pairs of graphs, recorded in "
            f"{self.seconds:.1f} s, {held:.1f} MiB held"
        ]
        if self.renewed:
            told.append(f"Recordings dropped because parameters moved or modules changed: {self.renewed}")
        told += [f"{cls} cannot be recorded and runs as before: {why}" for cls, why in self.refused.items()]
        told += [f"Blocks ran unrecorded {count} times: {why}" for why, count in self.plain.items()]
        return told

    def refuse(self, why: str) -> None:
        """Count a block that runs as before."""
        self.plain[why] += 1

    def run(self, plain: Call, block: nn.Module, args: tuple, kwargs: dict[str, Any]) -> Any:
        """A call of a block: by a recording where one may serve it, else by `plain`."""
        entry, leaves = None, []
        try:
            spec = flatten((args, kwargs), leaves)
            entry, why = self._entry(block, plain, spec, leaves)
        except Foreign as argument:
            why = f"given a {argument}"
        if entry is None:
            self.refuse(why)
            return plain(block, args, kwargs)
        self.replays += 1
        return entry.run(leaves)

    def obstacle(self, block: nn.Module) -> str:
        """Why no call of a block can be served now, whatever its arguments; "" if one can."""
        if type(block).__name__ in self.refused:
            return "it cannot be recorded"
        if not torch.is_grad_enabled():
            return "without gradients"
        if torch_private.in_backward():
            return "repeated within a backward (checkpointing with use_reentrant=True, or of more than the block)"
        if observed(block):
            return "it has hooks"
        if torch_private.saved_tensors_hooks(False) is not None and not _checkpoints(block):
            return "hooks on saved tensors are on (checkpointing of more than the block, offloading)"
        return observer()

    def _entry(self, block: nn.Module, plain: Call, spec: Any, leaves: list[Tensor]) -> tuple[Recorded | None, str]:
        """The recording that serves a call, or why there is none."""
        recorder = self._memory.recorder
        if not leaves:
            return None, "given no tensor"
        device = leaves[0].device
        missing = recorder.missing(device)
        if missing:
            return None, missing
        if recorder.busy():
            return None, "somebody records it"
        key = (plain, spec, tuple(map(_described, leaves)), _state(block, device))
        known = self._blocks.get(block)
        if known is None:
            known = self._blocks[block] = _Block()
        entry = known.recorded.get(key)
        if entry is not None and entry.stale():
            del known.recorded[key]
            known.seen[key], self.renewed, entry = 0, self.renewed + 1, None
        if entry is None:
            why = known.unready(key, leaves) or _without_gradient(block, leaves)
            if why:
                return None, why
            entry = self._record(block, plain, spec, leaves)
            if entry is None:
                return None, "it cannot be recorded"
            known.recorded[key] = entry
        if not entry.free(leaves):
            return None, "an earlier forward still awaits its backward"
        return entry, ""

    def _record(self, block: nn.Module, plain: Call, spec: Any, leaves: list[Tensor]) -> Recorded | None:
        start = time.perf_counter()
        try:
            return Recorded(self._memory, block, plain, spec, leaves, _checkpoints(block))
        except (CannotRecord, RuntimeError) as problem:  # CUDA's errors are RuntimeErrors
            cls, why = type(block).__name__, (str(problem).splitlines() or ["it raised"])[0][:200]
            self.refused[cls] = why
            warnings.warn(f"optimize(graphs=True): {cls} runs unrecorded: {why}", stacklevel=2)
            return None
        finally:
            self.seconds += time.perf_counter() - start


class _Block:
    """What is known of one block: its recordings, and how often it ran calls that are not recorded."""

    def __init__(self) -> None:
        self.recorded: dict[Any, Recorded] = {}
        self.seen: Counter[Any] = Counter()

    def unready(self, key: Any, leaves: list[Tensor]) -> str:
        """Why a call is not recorded now, "" if it is."""
        shape = list(leaves[0].shape)
        if len(self.recorded) >= MOST_SHAPES:
            return f"shape {shape} beyond the {MOST_SHAPES} that are recorded"
        if len(self.seen) >= _REMEMBERED:
            self.seen.clear()
        self.seen[key] += 1
        return f"new shape {shape}" if self.seen[key] <= PLAIN_CALLS else ""


@dataclass(frozen=True)
class GraphedForm(BlockForm):
    """The same forward, recorded with its backward."""

    state: ClassVar[tuple[str, ...]] = (_GRAPHS,)

    def namespace(self, base: type) -> dict[str, Any]:
        way = Forwards(base.forward)

        @functools.wraps(way.forward)
        def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
            graphs = self.__dict__.get(_GRAPHS)
            if torch.compiler.is_compiling() or graphs is None:
                return way.forward(self, *args, **kwargs)
            why = graphs.obstacle(self)
            if why:
                graphs.refuse(why)
                return way.forward(self, *args, **kwargs)
            whole = functools.partial(graphs.run, way.whole)
            prefill = functools.partial(graphs.run, way.prefill)
            return way.run(self, args, kwargs, whole, prefill, graphs.refuse)

        return {"forward": forward}


class GraphsRule(BlockRule):
    """Blocks recorded as CUDA graphs."""

    name = "graphs"
    form = GraphedForm
    told = "forward and backward recorded as CUDA graphs, one pair for each shape"
    asked, instead = "graphs=True records", "torch.cuda.make_graphed_callables"

    def __init__(self, model: nn.Module):
        super().__init__(model, Graphs())


def _checkpoints(block: nn.Module) -> bool:
    """Whether a block is one of transformers that repeats its forward in the backward."""
    return bool(getattr(block, "gradient_checkpointing", False)) and block.training


def _without_gradient(block: nn.Module, leaves: list[Tensor]) -> str:
    needs = any(x.requires_grad for x in (*leaves, *block.parameters()))
    return "" if needs else "nothing in it needs a gradient"


def _described(tensor: Tensor) -> tuple:
    return tensor.shape, tensor.stride(), tensor.dtype, tensor.device, tensor.requires_grad


def _state(block: nn.Module, device: torch.device) -> tuple:
    """What else a call's kernels depend on."""
    kind = device.type
    autocast = torch.is_autocast_enabled(kind) and torch.get_autocast_dtype(kind)
    pinned = tuple(sorted(pins().items()))
    return block.training, _checkpoints(block), autocast, torch_private.deterministic(), pinned
