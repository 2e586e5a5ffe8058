"""FP8 experts on one GPU: values first, then steps beside bf16.

    python benchmarks/fp8_experts.py results.json [--part values] [--part steps] [--seconds 95] [--dry]

Parts, both by default:
  values   the ops of experts in 8 bits within their budgets.
  steps    forward and backward of experts in 8 bits beside bf16, with the time of each kernel.

The rest as in `fp8_training.py`, whose helpers this uses.
"""

import copy
import itertools
import sys
from collections.abc import Callable
from functools import partial

import torch
from common import DEVICE, profiled, spent
from fp8_training import Run, drawn, run_parts, shown, within_budgets
from torch import Tensor, nn

import tilesmith
from tilesmith.precision import FP8Config, convert_model_to_fp8


def kernel_times(once: Callable[[], object]) -> dict[str, float]:
    """Device time of each kernel of a call, in us, the longest first."""
    return {name: round(us, 1) for name, us in spent(profiled(once)).most_common()}


def experts_step(layer: nn.Module, x: Tensor, indices: Tensor, weights: Tensor, dy: Tensor) -> Callable[[], None]:
    """Forward and backward of a module of experts, gradients dropped."""

    def once() -> None:
        layer(x, indices, weights).backward(dy)
        x.grad = weights.grad = None
        for p in layer.parameters():
            p.grad = None

    return once


def values(run: Run) -> bool:
    """The ops of experts within their budgets, by every kernel that is here: whole tiles first, then small calls."""
    kinds = (("test",),) if run.dry else (("gpu",), ("test",))
    calls = itertools.product(kinds, ("experts_fp8", "experts_vjp_fp8", "fp8_cast_experts"))
    right = [within_budgets(run, name, tags) for tags, name in calls]  # each is run, whatever another is
    return all(right)


def steps(run: Run) -> None:
    """Steps of E128 H2048 I768 K8 in 8 bits over those in bf16: with kept casts of the weights; with casts made in the
    step, as in the first after an optimizer's; by "rowwise", whose weights' gradients are of bf16; forwards alone."""
    count, hidden, inner, top_k = (4, 64, 32, 2) if run.dry else (128, 2048, 768, 8)
    torch.manual_seed(0)
    plain = tilesmith.nn.Experts(hidden, inner, count, device=DEVICE, dtype=torch.bfloat16)
    limits = {"min_features": 16, "min_tokens": 1} if run.dry else {}
    small, rowwise = (
        convert_model_to_fp8(nn.ModuleDict({"experts": copy.deepcopy(plain)}), FP8Config(recipe=r, **limits))["experts"]
        for r in ("delayed", "rowwise")
    )
    for tokens in (32,) if run.dry else (8192, 32_768):
        if run.late(f"{tokens} tokens", 25.0):
            break
        x, dy = drawn(tokens, hidden).requires_grad_(), drawn(tokens, hidden)
        indices = torch.rand(tokens, count, device=DEVICE).argsort(-1)[:, :top_k].contiguous()
        weights = torch.randn(tokens, top_k, device=DEVICE).softmax(-1).requires_grad_()
        once = experts_step(small, x, indices, weights, dy)
        variants: dict[str, Callable[[], object]] = {
            "bf16": experts_step(plain, x, indices, weights, dy),
            "fp8": once,
            "fp8, weight cast": casting_experts_anew(small, once),
            "fp8, bf16 weight gradients": experts_step(rowwise, x, indices, weights, dy),
            "bf16 forward": partial(forward_alone, plain, x, indices, weights),
            "fp8 forward": partial(forward_alone, small, x, indices, weights),
        }
        found = run.timed(variants, 60.0)
        medians = {name: t.median_us for name, t in found.items()}
        over = {name: round(medians["bf16"] / medians[name], 3) for name in medians if name.startswith("fp8")}
        over["fp8 forward"] = round(medians["bf16 forward"] / medians["fp8 forward"], 3)
        work = 18 * tokens * top_k * hidden * inner
        rates = {name: round(work / t / 1e6, 1) for name, t in medians.items() if "forward" not in name}
        kernels = {name: kernel_times(variants[name]) for name in variants if "forward" not in name and not run.dry}
        run.row(tokens=tokens, over_bf16=over, tflops=rates, times=shown(found), kernels_us=kernels)


def casting_experts_anew(layer: nn.Module, once: Callable[[], None]) -> Callable[[], None]:
    """A step whose weights are cast in it."""
    child = layer.get_submodule("_fp8")

    def anew() -> None:
        child.refresh()
        once()

    return anew


def forward_alone(layer: nn.Module, *args: Tensor) -> None:
    with torch.no_grad():
        layer(*args)


if __name__ == "__main__":
    sys.exit(run_parts({"values": values, "steps": steps}, __doc__))
