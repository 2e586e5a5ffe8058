"""`benchmark_attention_performance`: the latency of one attention module, call by call."""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from tilesmith.engine.argument_checks import flag, size
from tilesmith.engine.arguments import dtype_name
from tilesmith.engine.model_state import state_preserved
from tilesmith.engine.timing import EVENTS, launches, peak_memory
from tilesmith.nn.multihead import self_attention

WARMUP = 5


def benchmark_attention_performance(
    model: nn.Module, input_shape: Sequence[int], num_trials: int = 100, *, backward: bool = False
) -> dict[str, Any]:
    """Call `model` on a random tensor of `input_shape`, [batch, tokens, features], in its own dtype and on its device.

    backward: with a backward from the sum of the output; else under no_grad. `torch.nn.MultiheadAttention` is given the
    tensor three times, tokens first where its `batch_first` is False. On cuda and xpu a trial is the time between
    device events around the call, else the wall clock. Gradients, buffers, training flags and random numbers are left
    as they were; in training mode, dropout is part of the trial.

    Returns a dict: avg_latency, min_latency, max_latency, std_latency, p50_latency, p90_latency and p99_latency in
    milliseconds; peak_memory, bytes that a call allocates at its peak beyond what was there; launches, kernels of a
    call (ATen operators on a CPU); tokens_per_second at the median; num_trials, device, dtype, backward.

    Raises TypeError for something that is no module, and with `backward` for a model that returns no tensor; ValueError
    for a shape that is not three positive sizes, fewer than one trial, or a model on meta; RuntimeError, with
    `backward`, for a model whose backward would do more than fill gradients.
    """
    who = "benchmark_attention_performance"
    if not isinstance(model, nn.Module):
        raise TypeError(f"{who}: model must be a torch.nn.Module, got {type(model).__name__}")
    if not isinstance(input_shape, (tuple, list, torch.Size)) or len(input_shape) != 3:
        raise ValueError(f"{who}: input_shape must be (batch, tokens, features), got {input_shape!r}")
    for name, value in zip(("batch", "tokens", "features"), input_shape):
        size(who, f"input_shape's {name}", value)
    size(who, "num_trials", num_trials)
    flag(who, "backward", backward)
    first = next((p for p in model.parameters() if p.is_floating_point()), torch.empty(0))
    if first.device.type == "meta":
        raise ValueError(f"{who}: the model is on meta and has no values; load it first")
    device = first.device
    x = torch.randn(*input_shape, generator=torch.Generator().manual_seed(0)).to(device, first.dtype)
    if isinstance(model, nn.MultiheadAttention) and not model.batch_first:
        x = x.transpose(0, 1).contiguous().transpose(0, 1)  # in memory as the layer takes it
    with state_preserved(model, backward=backward):
        found = _measured(_runner(model, x.requires_grad_(backward), backward), device, num_trials)
    tokens = input_shape[0] * input_shape[1]
    return {
        **found,
        "tokens_per_second": tokens / found["p50_latency"] * 1e3 if found["p50_latency"] else 0.0,
        "num_trials": num_trials,
        "device": str(device),
        "dtype": dtype_name(first.dtype),
        "backward": backward,
    }


def _runner(model: nn.Module, x: Tensor, backward: bool) -> Any:
    def run() -> None:
        with torch.set_grad_enabled(backward):
            out = self_attention(model, x)
            if backward:
                _sum(out).backward()
        x.grad = None
        for parameter in model.parameters() if backward else ():
            parameter.grad = None

    return run


def _sum(out: Any) -> Tensor:
    """The sum of a model's output, or of the first of several."""
    first = out[0] if isinstance(out, (tuple, list)) and out else out
    if not isinstance(first, Tensor):
        raise TypeError(
            f"benchmark_attention_performance: the model returned a {type(out).__name__}; with backward=True it must "
            "return a tensor, or a tuple that begins with one"
        )
    return first.sum()


def _measured(run: Any, device: torch.device, trials: int) -> dict[str, Any]:
    for _ in range(WARMUP):
        run()
    times = sorted(_on_device(run, device, trials) if device.type in EVENTS else _on_host(run, trials))
    at = lambda share: times[min(trials - 1, int(share * trials))]  # noqa: E731
    return {
        "avg_latency": statistics.fmean(times),
        "min_latency": times[0],
        "max_latency": times[-1],
        "std_latency": statistics.stdev(times) if trials > 1 else 0.0,
        "p50_latency": statistics.median(times),
        "p90_latency": at(0.9),
        "p99_latency": at(0.99),
        "peak_memory": peak_memory(run, device),
        "launches": launches(run, device),
    }


def _on_host(run: Any, trials: int) -> list[float]:
    found = []
    for _ in range(trials):
        start = time.perf_counter()
        run()
        found.append((time.perf_counter() - start) * 1e3)
    return found


def _on_device(run: Any, device: torch.device, trials: int) -> list[float]:
    module = torch.get_device_module(device)
    marks = [(module.Event(enable_timing=True), module.Event(enable_timing=True)) for _ in range(trials)]
    with module.device(device):
        for start, end in marks:
            start.record()
            run()
            end.record()
        module.synchronize()
    return [start.elapsed_time(end) for start, end in marks]
