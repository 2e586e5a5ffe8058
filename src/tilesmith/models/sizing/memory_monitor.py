"""MemoryMonitor: what uses the memory of a training step, by module and by phase, and what would reduce it."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook

from tilesmith.engine.memory import GB, MemoryConfig
from tilesmith.engine.memory import human_size as shown
from tilesmith.engine.timing import EVENTS
from tilesmith.models.checkpoints import switch_of
from tilesmith.models.layers.losses import HeadForm
from tilesmith.models.sizing.memory_estimate import LiveBytes, local
from tilesmith.rewrite import forms, original_class

PHASES = ("forward", "backward", "optimizer")
SHOWN = 12  # modules in a printed report
WORTH = 0.02  # of the peak: what is not worth a sentence


@dataclass(frozen=True)
class ModuleMemory:
    """Bytes of one module, without its children. parameters: with its buffers. activations: what its forward saved for
    the backward."""

    name: str
    cls: str
    parameters: int
    gradients: int
    optimizer_state: int
    activations: int

    @property
    def total(self) -> int:
        """All four."""
        return self.parameters + self.gradients + self.optimizer_state + self.activations


@dataclass(frozen=True)
class Reduction:
    """One way to need less: what, the bytes that it saves at the most, what it costs, and how to ask for it."""

    what: str
    saves: int
    cost: str
    how: str

    def __str__(self) -> str:
        return f"{self.what}: up to {shown(self.saves)} less, for {self.cost}: {self.how}"


@dataclass(frozen=True)
class MemoryReport:
    """What one step used. modules: in the model's order; peaks: phase -> the most bytes held during it; reductions:
    the largest first; bounds: what the MemoryConfig says to that, in sentences."""

    modules: tuple[ModuleMemory, ...]
    peaks: dict[str, int]
    reductions: tuple[Reduction, ...]
    bounds: tuple[str, ...]

    @property
    def peak(self) -> int:
        """The highest of the phases."""
        return max(self.peaks.values(), default=0)

    def total(self, kind: str) -> int:
        """Bytes of all modules of one kind: parameters, gradients, optimizer_state or activations."""
        return sum(getattr(row, kind) for row in self.modules)

    def __str__(self) -> str:
        kinds = ("parameters", "gradients", "optimizer_state", "activations")
        told = ", ".join(f"{kind} {shown(self.total(kind))}" for kind in kinds)
        phases = ", ".join(f"{phase} {shown(self.peaks[phase])}" for phase in PHASES if phase in self.peaks)
        lines = [f"Peak {shown(self.peak)} ({phases})", f"  {told}", *self.bounds, "Most memory"]
        for row in sorted(self.modules, key=lambda row: -row.total)[:SHOWN]:
            parts = ", ".join(f"{kind} {shown(getattr(row, kind))}" for kind in kinds if getattr(row, kind))
            lines.append(f"  {row.name or '(model)'} ({row.cls}): {parts}")
        lines += (
            ["What would reduce it", *(f"  {reduction}" for reduction in self.reductions)] if self.reductions else []
        )
        return "\n".join(lines)


class MemoryMonitor:
    """Watches training steps of a model.

        monitor = MemoryMonitor(model, optimizer, config=MemoryConfig(max_memory_gb=40))
        with monitor.step():
            loss = model(**batch).loss
            loss.backward()
            optimizer.step()
        print(monitor.report)

    Bytes of parameters, gradients and optimizer state are counted; activations are what autograd saves while a module's
    own forward runs, each storage once and for the first module that saves it; recomputed and offloaded tensors are not
    counted. Peaks come from the allocator of an accelerator; on a CPU they are counted per operator, without the
    scratch memory of libraries.

    config: bounds of the whole step, in GB of 10^9 bytes; a MemoryConfig used as a context manager bounds single ops.
    Above `max_memory_gb` (target_memory_gb if None) `step` raises MemoryError at its end, with the numbers and what
    would reduce them; between target and maximum, and below `min_memory_gb`, the report says so.

    Raises TypeError for arguments of another kind, ValueError for a model on meta.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer | None = None,
        *,
        config: MemoryConfig | None = None,
    ):
        for name, value, kind in (("model", model, nn.Module), ("optimizer", optimizer, torch.optim.Optimizer),
                                  ("config", config, MemoryConfig)):  # fmt: skip
            if not isinstance(value, kind) and not (value is None and name != "model"):
                raise TypeError(f"MemoryMonitor: {name} must be a {kind.__name__}, got {type(value).__name__}")
        lost = next((name for name, p in model.named_parameters() if p.device.type == "meta"), None)
        if lost is not None:
            raise ValueError(f"MemoryMonitor: {lost} is on meta and has no memory; load the model first")
        self.model, self.optimizer, self.config = model, optimizer, config
        self.report: MemoryReport | None = None

    @contextlib.contextmanager
    def step(self) -> Iterator[MemoryMonitor]:
        """Watch the steps run inside: a forward and, if there are any, a backward and an optimizer's step."""
        kept = any(p.grad is not None for p in self.model.parameters())
        device = next((p.device for p in self.model.parameters()), torch.device("cpu"))
        saved = _Saved(self.model)
        peaks = _Peaks(device, map(local, self._state()))
        with contextlib.ExitStack() as stack:
            stack.callback(saved.remove)
            stack.enter_context(peaks)
            saved.done = lambda: peaks.mark("forward")
            if self.optimizer is not None:
                stack.callback(self.optimizer.register_step_pre_hook(lambda *_: peaks.mark("backward")).remove)
                stack.callback(self.optimizer.register_step_post_hook(lambda *_: peaks.mark("optimizer")).remove)
            with torch.autograd.graph.saved_tensors_hooks(saved.save, lambda x: x):
                yield self
            peaks.mark("backward" if "optimizer" not in peaks.found else "optimizer")
        modules = tuple(self._rows(saved.bytes))
        reductions = tuple(
            _reductions(self.model, modules, saved, max(peaks.found.values()), kept, device.type == "cpu")
        )
        self.report = MemoryReport(modules, peaks.found, reductions, tuple(_bounds(self.config, peaks.found)))
        limit = None if self.config is None else self.config.limit
        if limit is not None and self.report.peak > limit * GB:
            raise MemoryError(f"MemoryMonitor: the step was above its bounds\n{self.report}")

    def _state(self) -> Iterator[Tensor]:
        """Every tensor that is there before a step."""
        yield from self.model.buffers()
        for parameter in self.model.parameters():
            yield parameter
            if parameter.grad is not None:
                yield parameter.grad
        for state in self.optimizer.state.values() if self.optimizer is not None else ():
            yield from (x for x in state.values() if isinstance(x, Tensor))

    def _rows(self, activations: dict[str, int]) -> Iterator[ModuleMemory]:
        seen: set[int] = set()
        for name, module in self.model.named_modules():
            own = [p for p in module.parameters(recurse=False) if id(p) not in seen]
            buffers = [b for b in module.buffers(recurse=False) if id(b) not in seen]
            seen |= {id(x) for x in (*own, *buffers)}
            states = [self.optimizer.state.get(p, {}) for p in own] if self.optimizer is not None else []
            row = ModuleMemory(
                name,
                original_class(type(module)).__name__,
                _bytes([*own, *buffers]),
                _bytes(p.grad for p in own if p.grad is not None),
                _bytes(x for state in states for x in state.values() if isinstance(x, Tensor)),
                activations.get(name, 0),
            )
            if row.total:
                yield row


def _bytes(tensors: Iterable[Tensor]) -> int:
    """What this rank holds of them."""
    return sum(local(x).nbytes for x in tensors)


class _Saved:
    """What autograd saves, by the innermost module whose forward runs."""

    def __init__(self, model: nn.Module):
        self.bytes: dict[str, int] = {}
        self.widths: dict[int, int] = {}  # last dimension -> bytes
        self.done: Callable[[], None] = lambda: None
        self._names = {id(module): name for name, module in model.named_modules()}
        self._running: list[str] = [""]
        self._known = {local(x).untyped_storage().data_ptr() for x in (*model.parameters(), *model.buffers())}
        # hooks of all modules of the process: one of a module's own would keep the ops from taking its place. They see
        # calls of other threads too, of which nothing is counted here.
        self._thread = threading.get_ident()
        self._handles = [
            register_module_forward_pre_hook(self._entered),
            register_module_forward_hook(self._left, always_call=True),
        ]

    def _entered(self, module: nn.Module, *_: Any) -> None:
        if self._watches(module):
            self._running.append(self._names[id(module)])

    def _left(self, module: nn.Module, *_: Any) -> None:
        if self._watches(module) and not self._running.pop():
            self.done()

    def _watches(self, module: nn.Module) -> bool:
        return id(module) in self._names and threading.get_ident() == self._thread

    def save(self, x: Tensor) -> Tensor:
        """What autograd is given back: x itself."""
        if type(x) in (Tensor, nn.Parameter) and x.device.type != "meta":
            storage = x.untyped_storage()
            where = storage.data_ptr()
            if where and where not in self._known:
                self._known.add(where)
                name = self._running[-1]
                self.bytes[name] = self.bytes.get(name, 0) + storage.nbytes()
                if x.ndim:
                    self.widths[x.shape[-1]] = self.widths.get(x.shape[-1], 0) + storage.nbytes()
        return x

    save.only_looks = True  # gated MLPs save as they do where no hooks are

    def remove(self) -> None:
        """Take the hooks off."""
        for handle in self._handles:
            handle.remove()


class _Peaks:
    """The most bytes held between marks."""

    def __init__(self, device: torch.device, state: Iterator[Tensor]):
        self.device, self.found = device, {}
        self._live: LiveBytes | None = None
        if device.type not in EVENTS:
            self._live = LiveBytes()
            tensors = list(state)
            self._live.ignore(iter(tensors))
            self._live.now = self._live.peak = _bytes(tensors)

    def __enter__(self) -> _Peaks:
        if self._live is not None:
            self._live.__enter__()
        else:
            torch.get_device_module(self.device).reset_peak_memory_stats(self.device)
        return self

    def __exit__(self, *given: object) -> None:
        if self._live is not None:
            self._live.__exit__(*given)

    def mark(self, phase: str) -> None:
        """End a phase; a model that is called several times has several forwards, of which the highest counts."""
        if self._live is not None:
            peak, self._live.peak = self._live.peak, self._live.now
        else:
            module = torch.get_device_module(self.device)
            peak = module.max_memory_allocated(self.device)
            module.reset_peak_memory_stats(self.device)
        self.found[phase] = max(self.found.get(phase, 0), peak)


def _bounds(config: MemoryConfig | None, peaks: dict[str, int]) -> Iterator[str]:
    if config is None:
        return
    peak = max(peaks.values()) / GB
    if peak > config.limit:
        yield f"Above max_memory_gb = {config.limit:g}"
    elif peak > config.target:
        yield f"Above target_memory_gb = {config.target:g}"
    elif peak < config.min_memory_gb:
        yield f"Below min_memory_gb = {config.min_memory_gb:g}: these bounds were made for a larger step"


def _reductions(
    model: nn.Module, modules: tuple[ModuleMemory, ...], saved: _Saved, peak: int, kept: bool, on_cpu: bool
) -> list[Reduction]:
    """The ways to need less that are worth a sentence here, the largest first. on_cpu: nothing can be moved there."""
    total = lambda kind: sum(getattr(row, kind) for row in modules)  # noqa: E731
    found = []
    logits = _logits(model, saved)
    if logits:
        how = "tilesmith.optimize(model), or ops.linear_cross_entropy(hidden, head.weight, labels)"
        if any(isinstance(form, HeadForm) for module in model.modules() for form in forms(module)):
            how = "with tilesmith.MemoryConfig(target_memory_gb=...): round the step, for smaller chunks"
        found.append(Reduction("loss without logits", logits, "a loss that is computed in chunks", how))
    repeated, count = _repeated(modules)
    if repeated:
        saves = repeated - repeated // max(1, _tensors_of_a_layer(modules))
        switch = switch_of(model)
        how = f"model.{switch}()" if switch else "torch.utils.checkpoint.checkpoint(layer, x, use_reentrant=False)"
        found.append(Reduction(f"checkpointing of {count} layers", saves, "one more forward of them", how))
    if repeated and not on_cpu:
        how = "with torch.autograd.graph.save_on_cpu(pin_memory=True): ... round the forward"
        found.append(Reduction("activations on the CPU", total("activations"), "copies to the host and back", how))
    state = total("optimizer_state")
    if state and on_cpu:
        how = "an optimizer that keeps its state in 8 bits, or fully_shard over ranks"
        found.append(
            Reduction("a smaller optimizer state", state - state // 4, "rounding, or exchanges in each step", how)
        )
    elif state:
        how = "an optimizer that keeps its state there, or in 8 bits, or fully_shard over ranks"
        found.append(Reduction("optimizer state on the CPU", state, "copies in each step", how))
    if kept:
        how = "optimizer.zero_grad(set_to_none=True) before the forward"
        found.append(Reduction("gradients that are kept over the forward", total("gradients"), "nothing", how))
    worth = [one for one in found if one.saves > WORTH * peak]
    return sorted(worth, key=lambda one: -one.saves)


def _logits(model: nn.Module, saved: _Saved) -> int:
    """Bytes that were saved of tensors as wide as the model's output layer."""
    find = getattr(model, "get_output_embeddings", None)
    with contextlib.suppress(NotImplementedError):
        head = find() if find is not None else getattr(model, "lm_head", None)
        width = getattr(head, "out_features", 0)
        return saved.widths.get(width, 0) if width > 1 else 0
    return 0


def _layer_of(name: str) -> str | None:
    """The layer that a module is in: the name up to its first number."""
    parts = name.split(".")
    at = next((i for i, part in enumerate(parts) if part.isdigit()), None)
    return None if at is None else ".".join(parts[: at + 1])


def _repeated(modules: tuple[ModuleMemory, ...]) -> tuple[int, int]:
    """(bytes of activations in repeated layers, how many layers)."""
    layers: dict[str, int] = {}
    for row in modules:
        layer = _layer_of(row.name)
        if layer is not None and row.activations:
            layers[layer] = layers.get(layer, 0) + row.activations
    return (sum(layers.values()), len(layers)) if len(layers) > 1 else (0, 0)


def _tensors_of_a_layer(modules: tuple[ModuleMemory, ...]) -> int:
    """How many modules of one layer save something: of about as many equal tensors checkpointing keeps one."""
    counts: dict[str, int] = {}
    for row in modules:
        layer = _layer_of(row.name)
        if layer is not None and row.activations:
            counts[layer] = counts.get(layer, 0) + 1
    return max(counts.values(), default=1)
