"""`benchmark_fusion_performance`: a fused model beside the same model without fusion."""

from __future__ import annotations

import copy
import dataclasses
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from tilesmith.engine.argument_checks import flag, size
from tilesmith.engine.arguments import dtype_name
from tilesmith.engine.memory import human_size
from tilesmith.engine.model_state import state_preserved
from tilesmith.engine.timing import interleave, launches, peak_memory, wall_time
from tilesmith.models.fusion.strategies import UnifiedAttentionFusion
from tilesmith.models.optimization import undo
from tilesmith.models.sizing.sample_inputs import loss_of, sample_of

ROUNDS = 10


@dataclass(frozen=True)
class FusionPerformanceStats:
    """A baseline and a fused model on the same inputs.

    *_ms: median time of a run in milliseconds; *_spread: the interquartile range of its rounds over that median.
    *_launches: of one run: on an accelerator kernels, on a CPU ATen operators that call no other, both as
    torch.profiler counts them. *_peak_bytes: what one run allocates at its peak above what was there before. device,
    backward, runs: how it was measured; runs is what all rounds have together.
    """

    baseline_ms: float
    fused_ms: float
    baseline_spread: float
    fused_spread: float
    baseline_launches: int
    fused_launches: int
    baseline_peak_bytes: int
    fused_peak_bytes: int
    device: str
    backward: bool
    runs: int

    @property
    def speedup(self) -> float:
        """Baseline time over fused time."""
        return self.baseline_ms / self.fused_ms if self.fused_ms else 0.0

    @property
    def launch_reduction(self) -> float:
        """The share of the baseline's launches that fusion saves; below 0 where it needs more."""
        return 1.0 - self.fused_launches / self.baseline_launches if self.baseline_launches else 0.0

    @property
    def memory_reduction(self) -> float:
        """The share of the baseline's peak that fusion saves."""
        return 1.0 - self.fused_peak_bytes / self.baseline_peak_bytes if self.baseline_peak_bytes else 0.0

    def to_dict(self) -> dict[str, Any]:
        """The figures and the three ratios as plain data."""
        ratios = ("speedup", "launch_reduction", "memory_reduction")
        return {**dataclasses.asdict(self), **{name: getattr(self, name) for name in ratios}}

    def __str__(self) -> str:
        unit = "operators" if self.device == "cpu" else "kernels"
        what = "forward and backward" if self.backward else "forward"
        return (
            f"{what} on {self.device}: {self.baseline_ms:.3f} ms (spread {self.baseline_spread:.0%}) to "
            f"{self.fused_ms:.3f} ms (spread {self.fused_spread:.0%}); {unit} {self.baseline_launches} to "
            f"{self.fused_launches}; peak {human_size(self.baseline_peak_bytes)} to {human_size(self.fused_peak_bytes)}"
        )


def benchmark_fusion_performance(
    baseline_model: nn.Module,
    fused_model: nn.Module,
    input_data: Tensor,
    num_runs: int = 100,
    *,
    backward: bool = False,
) -> FusionPerformanceStats:
    """Run two models on `input_data` in turns and compare time, launches and peak memory.

    baseline_model: the model without fusion, on the same device. Fusion works in place; if both are the same object,
    the baseline is an unfused copy, which needs the model's memory once more. input_data: a tensor, a tuple of
    arguments or a dict of keyword arguments. num_runs: runs of each model, in ten rounds or as many as there are runs.
    backward: with a backward from the sum of the output, or its loss. Both models keep their training flags, gradients,
    buffers and random numbers.

    Raises TypeError for models and inputs of another kind; ValueError for fewer than one run, a `fused_model` that is
    not fused, or models that differ in device, training mode, or the number of parameters of a dtype.
    """
    for name, value in (("baseline_model", baseline_model), ("fused_model", fused_model)):
        if not isinstance(value, nn.Module):
            raise TypeError(
                f"benchmark_fusion_performance: {name} must be a torch.nn.Module, got {type(value).__name__}"
            )
    if input_data is None:  # for which a sample would be made
        raise TypeError("benchmark_fusion_performance: input_data must be a tensor, a tuple or a dict, got None")
    size("benchmark_fusion_performance", "num_runs", num_runs)
    flag("benchmark_fusion_performance", "backward", backward)
    if not isinstance(fused_model, UnifiedAttentionFusion):
        raise ValueError(
            "benchmark_fusion_performance: fused_model is not fused; it must come from create_unified_attention_fusion"
        )
    if baseline_model is fused_model:
        baseline_model = undo(copy.deepcopy(fused_model))
    devices = [next((p.device for p in m.parameters()), torch.device("cpu")) for m in (baseline_model, fused_model)]
    if devices[0] != devices[1]:
        raise ValueError(
            f"benchmark_fusion_performance: baseline_model is on {devices[0]}, fused_model on {devices[1]}; move one"
        )
    _check_alike(baseline_model, fused_model)
    inputs = sample_of(fused_model, input_data)
    return _measured({"baseline": baseline_model, "fused": fused_model}, inputs, devices[0], num_runs, backward)


def _check_alike(baseline: nn.Module, fused: nn.Module) -> None:
    """ValueError for models whose times differ by more than fusion."""
    modes = ["training" if m.training else "evaluation" for m in (baseline, fused)]
    if modes[0] != modes[1]:
        raise ValueError(
            f"benchmark_fusion_performance: baseline_model is in {modes[0]} mode, fused_model in {modes[1]} mode; call "
            "train() or eval() on both"
        )
    sizes = []
    for model in (baseline, fused):
        elements: dict[str, int] = {}
        for p in model.parameters():
            name = dtype_name(p.dtype)
            elements[name] = elements.get(name, 0) + p.numel()
        sizes.append(elements)
    if sizes[0] != sizes[1]:
        told = [", ".join(f"{n:,} of {name}" for name, n in sorted(e.items())) or "none" for e in sizes]
        raise ValueError(
            f"benchmark_fusion_performance: baseline_model has other parameters ({told[0]}) than fused_model "
            f"({told[1]}); it must be the same model without fusion"
        )


def _measured(models: dict[str, nn.Module], inputs: Any, device: torch.device, runs: int, backward: bool) -> Any:
    def run(model: nn.Module) -> None:
        with torch.set_grad_enabled(backward):
            out = model(*inputs.args, **inputs.kwargs)
            if backward:
                loss_of(out).backward()
        for parameter in model.parameters() if backward else ():
            parameter.grad = None

    variants = {name: (lambda m=model: run(m)) for name, model in models.items()}
    with state_preserved(models["baseline"]), state_preserved(models["fused"]):
        rounds = min(ROUNDS, runs)
        counted = {name: launches(fn, device) for name, fn in variants.items()}  # which also warms up
        peaks = {name: peak_memory(fn, device) for name, fn in variants.items()}
        calls = -(-runs // rounds)  # by the clock, host included: what a model's user waits for
        found = interleave(rounds, {n: (lambda fn=fn: wall_time(fn, device, calls)) for n, fn in variants.items()})
    base, fused = found["baseline"], found["fused"]
    return FusionPerformanceStats(
        base.median_us / 1e3, fused.median_us / 1e3, base.spread, fused.spread, counted["baseline"], counted["fused"],
        peaks["baseline"], peaks["fused"], str(device), backward, rounds * calls,
    )  # fmt: skip
