"""`optimize(model, graphs=...)`: forward and backward of each repeated block recorded as CUDA graphs, by shape.

A block whose kernels are shorter than the time that Python needs to launch them waits for the host. Its recording is
launched by one call. `recorded.py` holds one recording: of one block, of several that follow each other, which
`chains.py` sees, or of all from tokens to the loss (`whole_forward.py`). This file decides when one may serve a call.
With `graphs="auto"` none does before steps have shown that the device waits for the host (`pace.py`).
"""

from __future__ import annotations

import contextlib
import threading
import time
import warnings
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from tilesmith.engine import torch_private
from tilesmith.models.attention.mask_values import MaskValues
from tilesmith.models.blocks import Call, Foreign, checkpoints, observer
from tilesmith.models.capture import CudaRecorder
from tilesmith.models.chains import Progress, Trail, one_by_one, single
from tilesmith.models.fingerprint import Fingerprint
from tilesmith.models.pace import LOOKED_AT, SKIPPED, Pace
from tilesmith.models.reach import all_observed, capturing, has_own_hooks
from tilesmith.models.recorded import CannotRecord, Memory, Recorded, WithoutGradient
from tilesmith.models.recorded_calls import Link, described, flatten, surroundings
from tilesmith.models.whole_forward import blocks_of, put_together, switched, take_apart, unfit
from tilesmith.rewrite.report import counted

RECORDER = CudaRecorder
PLACE = "_tilesmith_place"
"""The attribute of the two blocks that tell the host's place with `graphs="auto"`: which of `late_blocks` it is."""
PLAIN_CALLS = 2
"""How often a block runs a shape as before until it is recorded: kernels are compiled and tuned, and a shape that comes
once is not worth a recording."""
MOST_SHAPES = 4
_REMEMBERED = 256  # shapes of a block that are counted, and of a reason
_NAMED = 3  # shapes of a reason in the report
_AWAITS = "an earlier forward still awaits its backward"
_NEW = "new shape"
_BEYOND = f"beyond the {MOST_SHAPES} shapes that are recorded"
_ELSEWHERE = "another thread ran the model"
_OTHERWISE = "they are not always called as they were recorded"


class Graphs:
    """What the blocks of one model have recorded.

    replays: calls served by a recording. seconds: spent recording. renewed: recordings dropped since blocks changed.
    copied: how often all were dropped because a caller kept a result that a replay would overwrite; those results are
    copied from then on.
    plain: why a block ran as before -> how often. shapes: of these, a reason that has to do with the shape -> the first
    shapes that it met. refused: class -> why its blocks are not recorded. apart: why blocks that follow each other are
    not recorded as one -> how often that was found. wholes: forwards with their loss that were replayed. beside: why
    the blocks of a call with labels are recorded without what is around them -> how often. pace: what steps have shown
    of the host and the device, with `graphs="auto"`; None with `graphs=True`.
    """

    def __init__(self, pace: Pace | None = None) -> None:
        self.pace = pace
        self.replays, self.wholes, self.seconds, self.renewed, self.copied = 0, 0, 0.0, 0, 0
        self.plain: Counter[str] = Counter()
        self.shapes: dict[str, set[tuple[int, ...]]] = {_NEW: set(), _BEYOND: set()}
        self.apart: Counter[str] = Counter()
        self.beside: Counter[str] = Counter()
        self.refused: dict[str, str] = {}
        self._forget()

    def _forget(self) -> None:
        self._blocks: weakref.WeakKeyDictionary[nn.Module, _Block] = weakref.WeakKeyDictionary()
        self._memory = Memory(RECORDER())
        self._trail = Trail()
        self._progress: Progress | None = None
        self.within = False  # whether blocks run within a recording of the whole forward
        self._values: MaskValues | None = None  # of the call of a whole forward that was looked at last
        self._held = ""  # why no block is recorded by itself in this forward: it will be recorded as a whole
        self._turn = threading.RLock()  # of the thread whose calls are looked at

    def __getstate__(self) -> dict[str, Any]:
        # A recording is of the parameters that it was made with: a copy records its own.
        own = ("_blocks", "_memory", "_trail", "_progress", "within", "_values", "_held", "_turn")
        return {name: value for name, value in self.__dict__.items() if name not in own}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._forget()

    @property
    def rests(self) -> bool:
        """Whether blocks run as they are, since the device has not been found to wait for the host."""
        return self.pace is not None and not self.pace.waits

    def rest(self, block: nn.Module) -> bool:
        """The same at a call of a block, which tells the host's place. What this call shows holds from the next on, so
        that blocks which follow each other are counted alike."""
        if not self.rests:
            return False
        place = block.__dict__.get(PLACE)
        if place is not None:
            self.pace.passed(place, block)  # type: ignore[union-attr]
        return True

    @property
    def recorded(self) -> int:
        """Pairs of graphs, forward and backward, that are kept."""
        return sum(len(block.recorded) for block in self._blocks.values())

    def told(self) -> list[str]:
        """Sentences for the report."""
        if self.pace is None:
            return self._told()
        steps = f"{self.pace} ({SKIPPED} before did not count)"
        if self.pace.waits:
            return [f"graphs='auto' records blocks: {steps}", *self._told()]
        if not self.pace.decided:
            why = f"; now none can be looked at: {self.pace.why}" if self.pace.why else ""
            return [f"graphs='auto' has looked at {self.pace.seen} of {SKIPPED + LOOKED_AT} training steps{why}"]
        return [f"graphs='auto' records no blocks: {self.pace.why or steps}"]

    def _told(self) -> list[str]:
        if not self.replays and not self.plain and not self.refused:
            return [f"Recorded blocks: none yet; a shape is recorded when it has trained {PLAIN_CALLS} times"]
        held = self._memory.bytes() / 2**20
        entries = [entry for block in self._blocks.values() for entry in block.recorded.values()]
        most = max((entry.calls for entry in entries), default=0)
        told = [
            f"Recorded blocks: {counted(self.replays, 'call')} replayed; pairs of graphs: {len(entries)}, of up to "
            f"{counted(most, 'block')}, recorded in {self.seconds:.1f} s, {held:.1f} MiB held"
        ]
        if self.wholes:
            told.append(f"Forwards replayed as a whole, from tokens to the loss: {self.wholes}")
        if self.renewed:
            told.append(f"Recordings dropped because parameters moved or modules changed: {self.renewed}")
        if self.copied:
            told.append(
                "All recorded again because a caller kept results, which are copied from then on: "
                f"{counted(self.copied, 'time')}"
            )
        told += [f"{cls} cannot be recorded and runs as before: {why}" for cls, why in self.refused.items()]
        told += [f"Blocks are recorded one by one: {why}" for why in self.apart]
        told += [
            f"What is around the blocks ran unrecorded {counted(n, 'time')}: {why}" for why, n in self.beside.items()
        ]
        told += [
            f"Blocks ran unrecorded {counted(n, 'time')}: {why}{self._listed(why)}" for why, n in self.plain.items()
        ]
        return told

    def _listed(self, why: str) -> str:
        """The shapes that a reason met, behind it in a sentence."""
        met = sorted(self.shapes.get(why, ()))
        named = ", ".join(str(list(shape)) for shape in met[:_NAMED])
        if len(met) <= _NAMED:
            return f" ({named})" if met else ""
        return f" ({len(met)}{' or more' if len(met) == _REMEMBERED else ''} shapes: {named}, ...)"

    def refuse(self, why: str, shape: tuple[int, ...] = ()) -> None:
        """Count a block that runs as before; shape: of its first tensor, which is kept where it is the reason."""
        self.plain[why] += 1
        met = self.shapes.get(why)
        if met is not None and len(met) < _REMEMBERED:
            met.add(tuple(shape))

    def run(self, plain: Call, block: nn.Module, args: tuple, kwargs: dict[str, Any]) -> Any:
        """A call of a block: by a recording where one may serve it, else by `plain`."""
        if not self._turn.acquire(blocking=False):
            self.refuse(_ELSEWHERE)
            return plain(block, args, kwargs)
        try:
            return self._run(plain, block, args, kwargs)
        finally:
            self._turn.release()

    def _run(self, plain: Call, block: nn.Module, args: tuple, kwargs: dict[str, Any]) -> Any:
        leaves: list[Tensor] = []
        try:
            spec = flatten((args, kwargs), leaves)
        except Foreign as argument:
            self.refuse(f"given a {argument}")
            return plain(block, args, kwargs)
        if not leaves:
            self.refuse("given no tensor")
            return plain(block, args, kwargs)
        state = surroundings(block, leaves[0].device)
        progress = self._progress
        if progress is not None:
            if progress.asks(block, plain, spec, state, leaves):
                return self._take(progress)
            self._take_apart(progress.entry, _OTHERWISE)
            self._progress = progress = None  # which has results that nobody asked for
        call = single(block, plain, spec, tuple(map(described, leaves)), state)
        entry, why = self._entry(block, call, leaves, lambda known: self._held)
        if entry is None:
            self.refuse(why, leaves[0].shape)
            out = plain(block, args, kwargs)
            self._follow(block, call, leaves, out)
            return out
        results = entry.run(leaves)
        if len(entry.links) == 1:
            self.replays += 1
            return entry.rebuilt(0, list(results))
        self._progress = Progress(entry, leaves, results)
        return self._take(self._progress)

    @contextlib.contextmanager
    def unrecorded_blocks(self) -> Iterator[MaskValues]:
        """Inside, blocks run as they are: they are part of a recording, made for these values."""
        with switched(self, "within", True):
            yield self._values

    def run_whole(
        self,
        ways: tuple[Call, Call],
        read: Callable[[], MaskValues],
        model: nn.Module,
        args: tuple,
        kwargs: dict[str, Any],
    ) -> Any:
        """A call with labels of the model around the blocks: by a recording of it where one may serve it. ways: what
        runs it otherwise, and the same with its result taken apart. read: reads what a recording is made for."""
        plain, _ = ways
        # In eval mode it returns all logits; its own hooks are called around its forward.
        if self.within or self.rests or not model.training or self.obstacle(model, hooks=False):
            return plain(model, args, kwargs)
        if not self._turn.acquire(blocking=False):
            self.beside[_ELSEWHERE] += 1
            return plain(model, args, kwargs)
        try:
            return self._run_whole(ways, read, model, args, kwargs)
        finally:
            self._turn.release()

    def _run_whole(
        self,
        ways: tuple[Call, Call],
        read: Callable[[], MaskValues],
        model: nn.Module,
        args: tuple,
        kwargs: dict[str, Any],
    ) -> Any:
        plain, apart = ways
        why = known.still(model) if (known := self._blocks.get(model)) is not None else ""
        if why:
            self.beside[why] += 1
            return plain(model, args, kwargs)
        leaves: list[Tensor] = []
        try:
            spec = flatten((args, kwargs), leaves)
            recorder = self._memory.recorder
            if not leaves or recorder.missing(leaves[0].device) or recorder.busy():  # its blocks say so
                return plain(model, args, kwargs)
            self._values = read()
        except Foreign as argument:
            self.beside[f"given a {argument}"] += 1
            return plain(model, args, kwargs)
        state = *surroundings(model, leaves[0].device), self._values
        call = single(model, apart, spec, tuple(map(described, leaves)), state, copied=True)
        entry, why = self._entry(model, call, leaves, lambda known: self._unfit(model, known, call))
        if entry is not None:
            self.replays += entry.calls
            self.wholes += 1
            return put_together(entry.rebuilt(0, list(entry.run(leaves))))
        waits = why in (_NEW, _BEYOND, _AWAITS)
        with switched(self, "_held", why if waits else ""):
            out = plain(model, args, kwargs)
        if not waits:
            self.beside[why] += 1
            return out
        try:
            take_apart(out)
        except Foreign as found:
            self._blocks[model].unfit[call.key] = f"it returns a {found}"
        return out

    def _unfit(self, model: nn.Module, known: _Block, call: Link) -> str:
        """Why a forward is not recorded around its blocks, though it has run often enough; "" if it may be."""
        if call.key in known.unfit:
            return known.unfit[call.key]
        why = one_by_one([call])
        known.lasting = (why, lambda: bool(one_by_one([call]))) if why else unfit(model, blocks_of(model))
        return known.lasting[0] if known.lasting is not None else ""

    def _take(self, progress: Progress) -> Any:
        """What the next block along a recording of several returns."""
        self.replays += 1
        if progress.at_last:
            self._progress = None
            if progress.kept():
                self._take_apart(progress.entry, "what passes between them is kept")
        return progress.take()

    def _follow(self, block: nn.Module, call: Link, leaves: list[Tensor], out: Any) -> None:
        """Note a call that ran as before, which may be recorded together with those before it."""
        known = self._blocks.get(block)
        if known is None or checkpoints(block) or _without_gradient(block, leaves):
            self._trail = Trail()
        elif self._trail.follow(call, leaves, out):
            known.trails[call.key] = self._trail.links

    def _take_apart(self, entry: Recorded, why: str) -> None:
        """Drop a recording of several blocks, which are recorded one by one from now on."""
        self.apart[why] += 1
        head = self._drop(entry)
        if head is not None:
            head.alone.add(entry.links[0].key)

    def _drop(self, entry: Recorded, renew: bool = False) -> _Block | None:
        """Forget a recording; with `renew` its calls are counted anew. Returns what is known of its first block."""
        known = [self._blocks.get(block) if (block := link.block()) is not None else None for link in entry.links]
        for link, of_block in zip(entry.links, known):
            if of_block is not None:
                of_block.recorded.pop(link.key, None)
                of_block.parts.pop(link.key, None)
                if renew:
                    of_block.seen[link.key] = 0
        return known[0]

    def _record_anew(self) -> None:
        """Drop all recordings, since somebody keeps what some of them returned: those hand out copies from now on. The
        others may compute where it lies, so the new ones have memory of their own."""
        self.copied += 1
        for known in self._blocks.values():
            for key, entry in known.recorded.items():
                known.kept.setdefault(key, set()).update(entry.kept())
            known.recorded.clear()
            known.parts.clear()
        self._memory = Memory(RECORDER())

    def obstacle(self, block: nn.Module, hooks: bool = True) -> str:
        """Why no call of a block can be served now, whatever its arguments; "" if one can. hooks: look for its own."""
        return "it cannot be recorded" if type(block).__name__ in self.refused else unservable(block, hooks)

    def _entry(
        self, block: nn.Module, call: Link, leaves: list[Tensor], unfit: Callable[[_Block], str]
    ) -> tuple[Recorded | None, str]:
        """The recording that serves a call and those behind it, or why there is none. unfit: why one that could be
        made now is not; "" if it is."""
        recorder = self._memory.recorder
        missing = recorder.missing(leaves[0].device)
        if missing:
            return None, missing
        if recorder.busy():
            return None, "somebody records it"
        known = self._blocks.get(block)
        if known is None:
            known = self._blocks[block] = _Block()
        entry = known.recorded.get(call.key)
        if entry is not None and entry.stale():
            self._drop(entry, renew=True)
            self.renewed, entry = self.renewed + 1, None
        if known.awaited(entry):
            return None, _AWAITS
        if entry is not None and entry.free(leaves) and entry.overwrites():
            self._record_anew()
            entry = None
        if entry is None:
            whole = known.parts.get(call.key)
            if whole is not None and whole.ticket is not None:
                return None, _AWAITS
            if whole is not None:
                self._take_apart(whole, _OTHERWISE)
            why = known.unready(call.key) or _without_gradient(block, leaves) or known.without_gradient(call.key)
            why = why or unfit(known) or known.hooked(block)
            if why:
                return None, why
            entry = self._record(block, known, call, leaves)
            if entry is None:
                return None, known.without_gradient(call.key) or known.unfit.get(call.key, "it cannot be recorded")
        return (entry, "") if entry.free(leaves) else (None, _AWAITS)

    def _record(self, block: nn.Module, known: _Block, call: Link, leaves: list[Tensor]) -> Recorded | None:
        """Record a call, together with those that came behind it when it last ran, if that is possible."""
        start, entry = time.perf_counter(), None
        try:
            links = [] if call.key in known.alone else self._behind(known, call)
            if len(links) > 1:
                entry = self._record_together(known, links, leaves)
            if entry is None:
                copied = known.kept.get(call.key, ())
                entry = Recorded(self._memory, [call], leaves, checkpoints(block), copied)
        except WithoutGradient as problem:  # as with merged adapters
            known.gradientless[call.key] = str(problem), Fingerprint([block])
            return None
        except (CannotRecord, RuntimeError, Foreign) as problem:  # CUDA's errors are RuntimeErrors
            cls, why = type(block).__name__, _short(problem)
            if call.copied:  # then its blocks are recorded
                known.unfit[call.key] = why
                return None
            self.refused[cls] = why
            asked = "True" if self.pace is None else "'auto'"
            warnings.warn(f"optimize(graphs={asked}): {cls} runs unrecorded: {why}", stacklevel=2)
            return None
        finally:
            self.seconds += time.perf_counter() - start
        entry.calls = len(blocks_of(block)) if call.copied else len(entry.links)
        known.recorded[call.key] = entry
        for link in entry.links[1:]:
            self._blocks[link.block()].parts[link.key] = entry
        return entry

    def _behind(self, known: _Block, call: Link) -> list[Link]:
        """The links that start with a call, as far as each has run often enough."""
        found: list[Link] = []
        for link in known.trails.get(call.key, ()):
            of_block = self._blocks.get(link.block()) if link.block() is not None else None
            if of_block is None or of_block.seen[link.key] < PLAIN_CALLS or of_block.full():
                break
            if of_block.hooked(link.block()):
                break
            found.append(link)
        return found

    def _record_together(self, known: _Block, links: list[Link], leaves: list[Tensor]) -> Recorded | None:
        why = one_by_one(links)
        if not why:
            try:
                return Recorded(self._memory, links, leaves, False, known.kept.get(links[0].key, ()))
            except (CannotRecord, RuntimeError) as problem:
                why = _short(problem)
        known.alone.add(links[0].key)
        self.apart[why] += 1
        return None


def unservable(block: nn.Module, hooks: bool = True) -> str:
    """Why no recording of a block could serve a call now, whatever its arguments; "" if one could. hooks: look for its
    own."""
    if not torch.is_grad_enabled():
        return "without gradients"
    if torch_private.in_backward():
        return "repeated within a backward (checkpointing with use_reentrant=True, or of more than the block)"
    if hooks and has_own_hooks(block):
        return "it has hooks"
    if capturing():
        return "asked for what modules inside return (output_hidden_states, output_attentions)"
    if torch_private.saved_tensors_hooks(False) is not None and not checkpoints(block):
        return "hooks on saved tensors are on (checkpointing of more than the block, offloading)"
    return all_observed() or observer()


class _Block:
    """What is known of one block, by the keys of its calls.

    recorded: recordings that start with it. parts: those that have it further behind. seen: how often it ran calls that
    are not recorded. trails: the calls that followed one. alone: calls that are not recorded with those behind them.
    kept: places of results that a caller kept beyond the next replay, so that copies are handed out. watched: the name
    of a module inside that had hooks when it was last looked at. gradientless: calls whose results have no gradient,
    each with a fingerprint of the block as it was then. unfit: of a model around blocks, why calls are not recorded;
    lasting: why none is, with what tells whether that still holds.
    """

    def __init__(self) -> None:
        self.recorded: dict[Any, Recorded] = {}
        self.parts: dict[Any, Recorded] = {}
        self.seen: Counter[Any] = Counter()
        self.trails: dict[Any, list[Link]] = {}
        self.alone: set[Any] = set()
        self.kept: dict[Any, set[int]] = {}
        self.watched = ""
        self.gradientless: dict[Any, tuple[str, Fingerprint]] = {}
        self.unfit: dict[Any, str] = {}
        self.lasting: tuple[str, Callable[[], bool]] | None = None

    def hooked(self, block: nn.Module) -> str:
        """Why a block is not recorded, as a replay would not call the hooks of a module inside; "" if there are none.

        Asked where a recording would be made: one that exists is dropped as soon as a hook is there (`Fingerprint`).
        """
        if not self.watched or not _is_watched(block, self.watched):
            self.watched = watched_within(block)
        return f"{self.watched} in it has hooks" if self.watched else ""

    def still(self, model: nn.Module) -> str:
        """A reason that was found before and holds for each call of a model around blocks; "" if none does."""
        holds = self.lasting is not None and self.lasting[1]()
        return self.lasting[0] if holds else self.hooked(model) if self.watched else ""

    def without_gradient(self, key: Any) -> str:
        """Why a call was found to have no gradient to record; "" if it was not, or the block has changed since."""
        why, source = self.gradientless.get(key, ("", None))
        if source is not None and source.changed():
            del self.gradientless[key]
            return ""
        return why

    def awaited(self, entry: Recorded | None) -> bool:
        """Whether a forward of the block by another recording than `entry` awaits its backward, which would compute
        where activations of `entry` lie if it came first."""
        others = (*self.recorded.values(), *self.parts.values())
        return any(other is not entry and other.awaited for other in others)

    def full(self) -> bool:
        """Whether no further shape is recorded."""
        return len(self.recorded) + len(self.parts) >= MOST_SHAPES

    def unready(self, key: Any) -> str:
        """Why a call is not recorded now, "" if it is."""
        if self.full():
            return _BEYOND
        if len(self.seen) >= _REMEMBERED:
            self.seen.clear()
            self.trails.clear()
            self.gradientless.clear()
        self.seen[key] += 1
        return _NEW if self.seen[key] <= PLAIN_CALLS else ""


def _short(problem: Exception) -> str:
    return (str(problem).splitlines() or ["it raised"])[0][:200]


def watched_within(block: nn.Module) -> str:
    """The name of a module inside a block that has hooks; "" if none has."""
    return next((name for name, m in block.named_modules() if name and has_own_hooks(m)), "")


def _is_watched(block: nn.Module, name: str) -> bool:
    try:
        return has_own_hooks(block.get_submodule(name))
    except AttributeError:  # it was removed
        return False


def _without_gradient(block: nn.Module, leaves: list[Tensor]) -> str:
    needs = any(x.requires_grad for x in (*leaves, *block.parameters()))
    return "" if needs else "nothing in it needs a gradient"
