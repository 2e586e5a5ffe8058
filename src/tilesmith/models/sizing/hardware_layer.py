"""HardwareAbstractionLayer: what fits a device: rules, precision, attention kernel, memory, batch size."""

from __future__ import annotations

import weakref
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import torch
from torch import nn

from tilesmith import rewrite
from tilesmith.engine import explain, ops
from tilesmith.engine.argument_checks import flag, number, size
from tilesmith.engine.arguments import dtype_name
from tilesmith.engine.backends import REFERENCE, missing
from tilesmith.engine.timing import EVENTS
from tilesmith.hardware.capacity import Capacity, capacity_of
from tilesmith.hardware.detect import Arch, arch_of, assumed, detect_available_devices
from tilesmith.hardware.facts import table
from tilesmith.models.graphs_rule import GraphedForm
from tilesmith.models.optimization import RECORDED, RULES, optimize
from tilesmith.models.sizing.batch_size import Costs, Knee, best_batch
from tilesmith.models.sizing.memory_estimate import (
    CannotTrace,
    MemoryEstimate,
    Optimizer,
    check_optimizer,
    held,
    local,
    optimizer_bytes,
    traced_peak,
    update_seconds,
)
from tilesmith.models.sizing.probes import Probe, fingerprint, probe
from tilesmith.models.sizing.sample_inputs import Sample, most_tokens, sample_of

GB = 10**9
DEFAULT_TOKENS = 512
_ORDER = ("cuda", "xpu", "mps", "cpu")  # of devices where nobody names one
_OPS_OF_RULES = {
    "norm": ("rms_norm", "layer_norm"),
    "add_norm": ("add_rms_norm", "add_layer_norm"),
    "rope": ("rope",),
    "mlp": ("swiglu", "geglu"),
    "activation": ("silu", "gelu"),
    "attention": ("attention",),
}
_KINDS = {"hip": "cuda"}  # torch's name for AMD devices
Model = TypeVar("Model", bound=nn.Module)


@dataclass(frozen=True)
class HardwareForm(rewrite.Form):
    """A model whose forward runs under autocast to a dtype of its device."""

    kind: str
    dtype: torch.dtype

    def namespace(self, base: type) -> dict[str, Any]:
        kind, dtype, whole = self.kind, self.dtype, base.forward

        def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
            with torch.autocast(kind, dtype=dtype):
                return whole(self, *args, **kwargs)

        return {"forward": forward}


class HardwareAbstractionLayer:
    """Fits models to a device.

        hal = HardwareAbstractionLayer()
        model = hal.optimize_for_hardware(model)
        batch_size = hal.get_optimal_batch_size(model)
        gigabytes = hal.estimate_memory_usage(model, batch_size)

    target_devices: the devices to fit to; the first one is used, and the others must be of its type. None: the first
    available of cuda (AMD too), xpu, mps and cpu. An empty list means the CPU.

    Raises TypeError for something that is not a device, ValueError for a device that is not available and for devices
    of several types.
    """

    def __init__(self, target_devices: list[torch.device] | None = None):
        self.devices = _devices(target_devices)
        self.device = self.devices[0]
        self._probes: weakref.WeakKeyDictionary[nn.Module, dict[Any, list[Probe]]] = weakref.WeakKeyDictionary()

    @property
    def arch(self) -> Arch:
        """What the device is."""
        return arch_of(self.device)

    def optimize_for_hardware(
        self, model: Model, *, dtype: torch.dtype | None = None, exclude: str | Collection[str] = ()
    ) -> Model:
        """Move `model` to the device and replace its modules by the rules that `tilesmith.optimize(model)` uses, if
        their ops have a kernel there; returns the model. `model.tilesmith_report` explains rules, precision and the
        kernel of attention.

        dtype: the forward runs under autocast to it; it must be one that the device computes in. None: precision is
        left as it is, and the report says what would fit. exclude: as of `optimize`. `tilesmith.undo` reverts
        everything but the move.

        Raises TypeError if `model` is not a module; ValueError for parameters on meta and for a dtype in which the
        device does not compute.
        """
        self._check("optimize_for_hardware", model)
        if dtype is not None:
            self._check_dtype(dtype)
        casts = next((form.dtype for form in rewrite.forms(model) if isinstance(form, HardwareForm)), None)
        if None not in (casts, dtype) and casts is not dtype:
            raise ValueError(
                f"optimize_for_hardware: the model runs under autocast to {casts} already, not {dtype}; call "
                "tilesmith.undo(model) first"
            )
        if assumed() is None and any(p.device != self.device for p in (*model.parameters(), *model.buffers())):
            model.to(self.device)
        served = {rule: self._served(rule) for rule in _OPS_OF_RULES}
        graphed = any(isinstance(form, GraphedForm) for module in model.modules() for form in rewrite.forms(module))
        withheld = () if graphed else RECORDED
        wanted = [rule.name for rule in RULES if served.get(rule.name, True) and rule.name not in withheld]
        optimize(model, only=wanted, exclude=exclude)
        if dtype is not None and casts is None:
            rewrite.swap(model, HardwareForm(self.device.type, dtype))
        told = [f"Fitted to {self.arch}."]
        left = [rule for rule, there in served.items() if not there]
        if left:
            told.append(f"Rules left out, as no kernel of the library serves their ops there: {', '.join(left)}.")
        told += [self._precision(model, dtype or casts), self._attention(model)]
        report = model.tilesmith_report
        model.tilesmith_report = replace(report, effects=(*told, *(report.effects if assumed() is None else ())))
        return model

    def get_optimal_batch_size(
        self,
        model: nn.Module,
        *,
        sample: Any = None,
        sequence_length: int | None = None,
        training: bool = True,
        optimizer: Optimizer | None = torch.optim.AdamW,
        max_batch_size: int = 1024,
        memory_fraction: float = 0.9,
    ) -> int:
        """The smallest batch that reaches 95 % of the throughput of the largest one that fits.

        At most three batches are run, a few steps each, on the model's device; what fits follows from fake tensors and
        the first of them (`estimate_memory_usage`). A model that does not run on fake tensors is run at one row, at as
        many as then fit even if all that it held grows with the rows, and at as many as should fit. Parameters,
        gradients, buffers, training flags and random numbers are left as they were; an optimizer is not stepped. All
        ranks of an initialised process group must call it together, and get one answer: that of the rank with the least
        memory and the longest times.

        sample, sequence_length, training, optimizer: as of `memory_estimate`. max_batch_size: no larger one is tried.
        memory_fraction: of what is free, how much a step may take.

        Raises MemoryError where not even one row fits, with the numbers; ValueError as `memory_estimate`.
        """
        size("get_optimal_batch_size", "max_batch_size", max_batch_size)
        if not 0.0 < number("get_optimal_batch_size", "memory_fraction", memory_fraction) <= 1.0:
            raise ValueError(f"get_optimal_batch_size: memory_fraction must be in (0, 1], got {memory_fraction}")
        check_optimizer("get_optimal_batch_size", optimizer)
        given = self._sample("get_optimal_batch_size", model, sample, sequence_length, training)
        room = int(memory_fraction * self.capacity().available)
        made = self._costs(model, given, training, optimizer)
        found = best_batch(made, room, max_batch_size)
        self._remember(model, given, training, found)
        return found.batch

    def estimate_memory_usage(
        self,
        model: nn.Module,
        batch_size: int,
        *,
        sample: Any = None,
        sequence_length: int | None = None,
        training: bool = True,
        optimizer: Optimizer | None = torch.optim.AdamW,
        calibrate: bool = True,
    ) -> float:
        """The most memory that a step of `batch_size` rows holds, in GB of 10^9 bytes: `memory_estimate(...).total`."""
        estimate = self.memory_estimate(
            model, batch_size, sample=sample, sequence_length=sequence_length, training=training,
            optimizer=optimizer, calibrate=calibrate,
        )  # fmt: skip
        return estimate.total / GB

    def memory_estimate(
        self,
        model: nn.Module,
        batch_size: int,
        *,
        sample: Any = None,
        sequence_length: int | None = None,
        training: bool = True,
        optimizer: Optimizer | None = torch.optim.AdamW,
        calibrate: bool = True,
    ) -> MemoryEstimate:
        """What a step of `batch_size` rows holds at its peak, by kind, from a pass over fake tensors.

        sample: the model's inputs, a tensor, a tuple of arguments or a dict of keyword arguments of one batch; None:
        made from the model's configuration, `sequence_length` tokens long. sequence_length: without a sample, no more
        than the model has positions; None: 512, or as many as it has if these are fewer. training: with a backward,
        before which outputs besides the loss are dropped; else under no_grad, and without an optimizer. optimizer: one
        that was made, a class, or a function from parameters to one; None: none. calibrate: run fewer rows, where the
        model is on the device: on a GPU at two sizes, for what is held at each operator and how that grows, elsewhere
        once, for the scale; a model that does not run on fake tensors is run at one row, at two and, where memory
        allows, at half of `batch_size` instead.

        What was run is remembered until the model's modules, dtypes, checkpointing or frozen parameters change.

        Raises TypeError or ValueError for invalid arguments, for a model whose inputs cannot be inferred and for one on
        meta.
        """
        size("memory_estimate", "batch_size", batch_size)
        flag("memory_estimate", "calibrate", calibrate)
        check_optimizer("memory_estimate", optimizer)
        given = self._sample("memory_estimate", model, sample, sequence_length, training)
        costs = self._costs(model, given, training, optimizer)
        if calibrate and costs.here and not costs.probes:
            costs.calibrate(batch_size, self.capacity().available)
            self._remember(model, given, training, costs)
        return costs.at(batch_size)

    def capacity(self) -> Capacity:
        """The memory of the device now."""
        return capacity_of(self.device)

    def _costs(self, model: nn.Module, given: Sample, training: bool, optimizer: Optimizer | None) -> Costs:
        parameters = list(model.parameters())
        here = all(p.device == self.device for p in parameters) and self.device.type in ("cpu", *EVENTS)
        state, step = optimizer_bytes(model, optimizer, self.device) if training else (0, 0)

        def traced(batch: int) -> int | None:
            try:
                return traced_peak(model, given, batch, backward=training, device=self.device)
            except CannotTrace:
                return None

        gradients = sum(local(p).nbytes for p in parameters if p.requires_grad) if training else 0
        bandwidth = arch_of(self.device).bandwidth if self.device.type in EVENTS else 0.0
        return Costs(
            traced=traced,
            run=lambda batch, **more: probe(model, given, batch, backward=training, device=self.device, **more),
            parameters=held(iter((*parameters, *model.buffers()))),
            gradients=gradients,
            optimizer_state=state,
            optimizer_step=step,
            allocated_state=_allocated_state(optimizer),
            here=here,
            probes=list(self._probes.get(model, {}).get(_key(model, given, training), ())),
            update=update_seconds(gradients, state, bandwidth) if optimizer is not None else 0.0,
        )

    def _remember(self, model: nn.Module, given: Sample, training: bool, found: Costs | Knee) -> None:
        self._probes.setdefault(model, {})[_key(model, given, training)] = list(found.probes)

    def _sample(self, who: str, model: Any, sample: Any, tokens: int | None, training: bool) -> Sample:
        self._check(who, model)
        flag(who, "training", training)
        if None not in (sample, tokens):
            raise ValueError(
                f"{who}: sequence_length cannot be combined with sample=, whose tensors have their own length"
            )
        limit = most_tokens(model) if sample is None else None
        if tokens is not None and size(who, "sequence_length", tokens) > (limit or tokens):
            raise ValueError(
                f"{who}: sequence_length must be at most {limit}, the positions in the model's configuration, got "
                f"{tokens}; where the model takes more, give sample=, ids of that length"
            )
        if who == "get_optimal_batch_size" and any(p.device != self.device for p in model.parameters()):
            where = next(p.device for p in model.parameters() if p.device != self.device)
            raise ValueError(
                f"get_optimal_batch_size: the model is on {where}, the target is {self.device}; call "
                f"optimize_for_hardware(model), or model.to({str(self.device)!r})"
            )
        return sample_of(model, sample, tokens=DEFAULT_TOKENS if tokens is None else tokens)

    def _check(self, who: str, model: Any) -> None:
        if not isinstance(model, nn.Module):
            raise TypeError(f"{who}: model must be a torch.nn.Module, got {type(model).__name__}")
        lost = next((name for name, p in model.named_parameters() if p.device.type == "meta"), None)
        if lost is not None:
            raise ValueError(f"{who}: {lost} is on meta and has no values; load the model first")

    def _check_dtype(self, dtype: Any) -> None:
        name = dtype_name(dtype)
        if not isinstance(dtype, torch.dtype) or name not in ("bfloat16", "float16"):
            raise ValueError(
                f"optimize_for_hardware: dtype must be torch.bfloat16, torch.float16 or None, got {dtype!r}"
            )
        if name not in self.arch.dtypes:
            raise ValueError(
                f"optimize_for_hardware: {self.arch} does not compute in {name}; it does in "
                f"{', '.join(self.arch.dtypes)}"
            )

    def _served(self, rule: str) -> bool:
        """Whether any op of a rule has a kernel on the device."""
        where = self.device if self.arch.kind == "cpu" else assumed() or self.device
        backends = (b for op in _OPS_OF_RULES[rule] for b in ops()[op].backends() if b != REFERENCE)
        return any(missing(backend, where) is None for backend in backends)

    def _precision(self, model: nn.Module, dtype: torch.dtype | None) -> str:
        have = {dtype_name(p.dtype) for p in model.parameters() if p.is_floating_point()}
        if dtype is not None:
            return f"Precision: the forward runs under autocast to {dtype_name(dtype)}."
        best = next((name for name in ("bfloat16", "float16") if name in self.arch.dtypes), None)
        odd = sorted(name for name in have if name not in self.arch.dtypes)
        if odd:
            return (
                f"Precision: parameters are {', '.join(odd)}, in which {self.arch.name} does not compute natively; it "
                f"does in {', '.join(self.arch.dtypes)}."
            )
        if best is None or "float32" not in have:
            return f"Precision: parameters are {', '.join(sorted(have)) or 'none'}, which fits."
        scaled = "" if best == "bfloat16" else ", with a GradScaler for training"
        return (
            f"Precision: parameters are float32 and were left so; {self.arch.name} computes in {best} too: give dtype="
            f"torch.{best}{scaled}."
        )

    def _attention(self, model: nn.Module) -> str:
        """Which kernel serves the attention of a model, or of one with heads of 128 features, and why."""
        arch = self.arch
        if not self._served("attention"):
            return f"Attention: PyTorch's own; no kernel of the library serves it on {arch.name}."
        kind = torch.bfloat16 if "bfloat16" in arch.dtypes else torch.float16
        config = getattr(model, "config", None)
        heads = getattr(config, "num_attention_heads", None) or getattr(config, "num_heads", None) or 16
        width = getattr(config, "hidden_size", None)
        dim = getattr(config, "head_dim", None) or (width // heads if width else 128)
        q = torch.empty(1, heads, 2048, dim, dtype=kind, device="meta")
        if arch.name not in {a.arch for a in table()}:
            return f"Attention: {arch.name} is not in arch.toml; the call's own explain tells, on that device."
        choice = explain("attention", q, q, q, arch=arch.name)
        return f"Attention of {heads} heads of {dim}: {choice.kernel.backend}, because {choice.because}."


def _key(model: nn.Module, given: Sample, training: bool) -> Any:
    shapes = tuple(tuple(v.shape[i] for i in range(v.ndim) if i != d) if isinstance(v, torch.Tensor) else repr(v)
                   for v, d in zip((*given.args, *given.kwargs.values()), given.dims))  # fmt: skip
    return shapes, training, fingerprint(model)


def _allocated_state(optimizer: Any) -> int:
    """Bytes that an optimizer holds already."""
    if not isinstance(optimizer, torch.optim.Optimizer):
        return 0
    return sum(local(x).nbytes for one in optimizer.state.values() for x in one.values() if isinstance(x, torch.Tensor))


def _devices(wanted: Sequence[torch.device] | None) -> list[torch.device]:
    there = assumed()
    found = detect_available_devices()
    if there is not None and wanted is None:
        return [torch.device(_KINDS.get(there.kind, there.kind))]
    if wanted is None:
        return next(found[kind] for kind in _ORDER if found[kind])
    if not isinstance(wanted, (list, tuple)):
        raise TypeError(f"HardwareAbstractionLayer: target_devices must be a list of devices or None, got {wanted!r}")
    devices = []
    for device in wanted:
        if not isinstance(device, (torch.device, str)):
            raise TypeError(f"HardwareAbstractionLayer: target_devices has {device!r}, which is not a torch.device")
        try:
            device = torch.device(device)
        except RuntimeError as problem:
            raise ValueError(f"HardwareAbstractionLayer: {device!r} names no device: {problem}") from problem
        if device.index is None and device.type in ("cuda", "xpu") and found[device.type]:
            device = torch.device(device.type, torch.get_device_module(device).current_device())
        known = [d for kind in found.values() for d in kind]
        if there is None and device not in known:
            raise ValueError(
                f"HardwareAbstractionLayer: {device} is not available; there are {', '.join(str(d) for d in known)}"
            )
        devices.append(device)
    if len({device.type for device in devices}) > 1:
        raise ValueError(
            f"HardwareAbstractionLayer: target_devices are of several types ({', '.join(map(str, devices))}); make one "
            "layer for each"
        )
    return devices or [torch.device("cpu")]
