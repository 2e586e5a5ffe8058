"""token_stats and linear_token_stats in Triton: one sweep over each row of logits, forward and backward."""

from functools import partial
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from tilesmith.engine import Space, cdiv, launch, next_power_of_2, optimize_kernel, register_kernel, rehearsed
from tilesmith.ops.loss import token_stats_chunks
from tilesmith.ops.loss.arguments import (
    linear_token_stats_arguments,
    linear_token_stats_vjp_arguments,
    token_stats_arguments,
    token_stats_vjp_arguments,
)
from tilesmith.ops.loss.reference import Terms
from tilesmith.ops.loss.triton.cross_entropy import LossConfig, backward_tells, warps_of
from tilesmith.ops.loss.triton.cross_entropy_kernels import LN2, LOG2E, tanh
from tilesmith.ops.loss.triton.logit_steps import steps as loss_steps


class StatsConfig(NamedTuple):
    """block: classes that a program holds at a time."""

    block: int
    num_warps: int


@triton.jit
def _natural_score(logits, scale, softcap, SCALED: tl.constexpr, SOFTCAP: tl.constexpr):
    """Scaled and capped logits."""
    if SOFTCAP:
        return tanh(logits * (scale / softcap)) * softcap
    else:
        return logits * scale if SCALED else logits


@triton.jit
def token_stats_kernel(
    logits_ptr, target_ptr, log_probs_ptr, entropy_ptr, lse_ptr, predicted_ptr, cols, stride, ignore_index, scale,
    softcap,
    SCALED: tl.constexpr, SOFTCAP: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One program per row: an online softmax that also carries the sum of exp(z − top) · (z − top), and the first of
    the largest scores. Differences of scores are turned to base 2, not the scores: each would be rounded once more, by
    which gradients of fp32 logits were off."""
    row = tl.program_id(0).to(tl.int64)
    logits_ptr += row * stride
    label = tl.load(target_ptr + row)
    counted = label != ignore_index
    valid = (label >= 0) & (label < cols)
    peak = tl.full((), float("-inf"), tl.float32)
    sums = tl.full((), 0.0, tl.float32)
    tilt = tl.full((), 0.0, tl.float32)
    best = tl.full((), 0, tl.int32)
    for start in range(0, tl.where(counted, cols, 0), BLOCK):
        at = start + tl.arange(0, BLOCK)
        inside = at < cols
        logits = tl.load(logits_ptr + at, mask=inside, other=0.0).to(tl.float32)
        z = tl.where(inside, _natural_score(logits, scale, softcap, SCALED, SOFTCAP), float("-inf"))
        block_top = tl.max(z, 0)
        here = tl.min(tl.where(z == block_top, at, cols), 0)
        best = tl.where((block_top > peak) | (start == 0), here, best)
        top = tl.maximum(peak, block_top)
        finite = tl.where(top == float("-inf"), 0.0, top)
        shift = tl.where(peak == float("-inf"), 0.0, peak - finite)
        decay = tl.where(peak == float("-inf"), 0.0, tl.exp2(shift * LOG2E))
        e = tl.exp2((z - finite) * LOG2E)
        tilt = decay * (tilt + sums * shift) + tl.sum(tl.where(z == float("-inf"), 0.0, e * (z - finite)), 0)
        sums = sums * decay + tl.sum(e, 0)
        peak = top
    sums = tl.where(counted, sums, 1.0)
    peak = tl.where(counted, peak, 0.0)
    size = tl.log2(sums) * LN2
    chosen = tl.load(logits_ptr + label, mask=counted & valid, other=0.0).to(tl.float32)
    chosen = _natural_score(chosen, scale, softcap, SCALED, SOFTCAP)
    log_prob = tl.where(valid, (chosen - peak) - size, float("nan"))
    tl.store(log_probs_ptr + row, tl.where(counted, log_prob, 0.0))
    tl.store(entropy_ptr + row, tl.where(counted, size - tilt / sums, 0.0))
    tl.store(lse_ptr + row, tl.where(counted, peak + size, 0.0))
    tl.store(predicted_ptr + row, tl.where(counted, best, -1).to(tl.int64))


@triton.jit
def token_stats_vjp_kernel(
    logits_ptr, target_ptr, entropy_ptr, lse_ptr, dlog_probs_ptr, dentropy_ptr, dlse_ptr, cols, stride,
    blocks, dlog_probs_stride, dentropy_stride, dlse_stride, ignore_index, scale, softcap,
    SOFTCAP: tl.constexpr, BLOCK: tl.constexpr, out_ptr=None,
):  # fmt: skip
    """One program per block of a row: logits are read once, and their gradient is written over them, or to out_ptr."""
    row = (tl.program_id(0) // blocks).to(tl.int64)
    at = (tl.program_id(0) % blocks) * BLOCK + tl.arange(0, BLOCK)
    inside = at < cols
    logits_ptr += row * stride
    label = tl.load(target_ptr + row)
    counted = label != ignore_index
    entropy, lse = tl.load(entropy_ptr + row), tl.load(lse_ptr + row)
    dchosen = tl.load(dlog_probs_ptr + row * dlog_probs_stride).to(tl.float32)
    dentropy = tl.load(dentropy_ptr + row * dentropy_stride).to(tl.float32)
    dlse = tl.load(dlse_ptr + row * dlse_stride).to(tl.float32)
    z = tl.load(logits_ptr + at, mask=inside, other=0.0).to(tl.float32) * scale
    slope = 1.0
    if SOFTCAP:
        capped = tanh(z / softcap)
        z, slope = capped * softcap, 1.0 - capped * capped
    log_p = z - lse
    p = tl.exp2(log_p * LOG2E)
    tilt = tl.where(p == 0, 0.0, log_p + entropy)  # as far away as masks go, its product would overflow
    grad = p * (dlse - dchosen - dentropy * tilt) + tl.where(at == label, dchosen, 0.0)
    grad = grad * slope
    grad = tl.where((label >= 0) & (label < cols), grad * scale, float("nan"))
    if out_ptr is None:
        tl.store(logits_ptr + at, tl.where(counted, grad, 0.0), mask=inside)
    else:
        tl.store(out_ptr + row * cols + at, tl.where(counted, grad, 0.0), mask=inside)


def _reasons(call) -> list[str]:
    name = "x" if hasattr(call, "x") else "logits"
    dtype = getattr(call, name).dtype
    return [f"{name} is float64; this kernel computes in float32"] if dtype == torch.float64 else []


def _default(dims, arch, dtype) -> StatsConfig:
    block = min(4096, next_power_of_2(dims["cols"]))
    return StatsConfig(block, warps_of(max(1, block // 512), arch))


def _dims(x: Tensor, weight: Tensor, *_: object) -> dict[str, int]:
    return {"rows": x.numel() // x.shape[-1], "cols": weight.shape[0]}


def _dims_vjp(dlog_probs: object, dentropy: object, dlse: object, x: Tensor, weight: Tensor, *_: object) -> dict:
    return _dims(x, weight)


def _dims_of_logits(logits: Tensor, *_: object) -> dict[str, int]:
    return {"rows": logits.numel() // logits.shape[-1], "cols": logits.shape[-1]}


def _dims_of_logits_vjp(dlog_probs: object, dentropy: object, dlse: object, logits: Tensor, *_: object) -> dict:
    return _dims_of_logits(logits)


def _forward_tells(call, *, config: StatsConfig) -> list[str]:
    return [f"an online softmax over rows of {_classes(call)} logits, in blocks of {config.block}"]


def _backward_tells(call, *, config: StatsConfig) -> list[str]:
    classes = _classes(call)
    if call.dentropy is None and call.dlse is None and hasattr(call, "x"):
        return ["only log_probs has a gradient: that of their cross-entropies", *backward_tells(classes, _loss(config))]
    return [f"a CTA has one block of {config.block} of a row's {classes} logits"]


def _classes(call) -> int:
    return call.weight.shape[0] if hasattr(call, "x") else call.logits.shape[-1]


def _loss(config: StatsConfig) -> LossConfig:
    return LossConfig(config.block, 1, config.num_warps, 1)


_CHOICES = {"block": (1024, 2048, 4096, 8192, 16384), "num_warps": (4, 8, 16)}
SPACE = Space(dims=_dims, default=_default, choices=_CHOICES)
VJP_SPACE = Space(dims=_dims_vjp, default=_default, choices=_CHOICES)


LOGITS_SPACE = Space(dims=_dims_of_logits, default=_default, choices=_CHOICES)
LOGITS_VJP_SPACE = Space(dims=_dims_of_logits_vjp, default=_default, choices=_CHOICES)


@register_kernel(
    "token_stats",
    backend="triton",
    rank=20,
    rejects=_reasons,
    tells=token_stats_arguments(_forward_tells),
    plans=rehearsed,
)
@optimize_kernel(space=LOGITS_SPACE)
@token_stats_arguments
def token_stats(call, *, config: StatsConfig) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """One program per row."""
    return token_stats_chunks.token_stats(_steps(config), call)


@register_kernel(
    "token_stats_vjp",
    backend="triton",
    rank=20,
    rejects=_reasons,
    tells=token_stats_vjp_arguments(_backward_tells),
    plans=rehearsed,
)
@optimize_kernel(space=LOGITS_VJP_SPACE)
@token_stats_vjp_arguments
def token_stats_vjp(call, *, config: StatsConfig) -> Tensor:
    """One program per block of a row: logits are read once, and their gradient is written once."""
    return token_stats_chunks.token_stats_vjp(_steps(config), call)


@register_kernel(
    "linear_token_stats",
    backend="triton",
    rank=20,
    rejects=_reasons,
    tells=linear_token_stats_arguments(_forward_tells),
    plans=rehearsed,
)
@optimize_kernel(space=SPACE)
@linear_token_stats_arguments
def linear_token_stats(call, *, config: StatsConfig) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """A product and one sweep for each chunk."""
    return token_stats_chunks.linear_token_stats(_steps(config), call)


@register_kernel(
    "linear_token_stats_vjp",
    backend="triton",
    rank=20,
    rejects=_reasons,
    tells=linear_token_stats_vjp_arguments(_backward_tells),
    plans=rehearsed,
)
@optimize_kernel(space=VJP_SPACE)
@linear_token_stats_vjp_arguments
def linear_token_stats_vjp(call, *, config: StatsConfig) -> tuple[Tensor, Tensor, Tensor]:
    """The chunks again, their logits turned into gradients."""
    loss = loss_steps(_loss(config))
    return token_stats_chunks.linear_token_stats_vjp(_steps(config), loss, call)


def _steps(config: StatsConfig) -> token_stats_chunks.TokenSteps:
    return token_stats_chunks.TokenSteps(partial(_read, config), partial(_turn, config))


def _read(
    config: StatsConfig,
    logits: Tensor,
    target: Tensor,
    log_probs: Tensor,
    entropy: Tensor,
    lse: Tensor,
    predicted: Tensor,
    terms: Terms,
) -> None:
    count, cols = logits.shape
    logits = logits if logits.stride(1) == 1 else logits.contiguous()
    if count:
        launch(
            token_stats_kernel, (count,), logits, target, log_probs, entropy, lse, predicted, cols, logits.stride(0),
            terms.ignore_index, terms.scale, terms.softcap, SCALED=terms.scale != 1, SOFTCAP=terms.softcap != 0,
            BLOCK=config.block, num_warps=config.num_warps,
        )  # fmt: skip


def _turn(
    config: StatsConfig,
    logits: Tensor,
    target: Tensor,
    entropy: Tensor,
    lse: Tensor,
    dlog_probs: Tensor,
    dentropy: Tensor,
    dlse: Tensor,
    terms: Terms,
    out: Tensor | None = None,
) -> None:
    count, cols = logits.shape
    if out is not None and logits.stride(1) != 1:
        logits = logits.contiguous()
    if count:
        apart = {} if out is None else {"out_ptr": out}
        blocks = cdiv(cols, config.block)
        strides = (g.stride(0) for g in (dlog_probs, dentropy, dlse))
        launch(
            token_stats_vjp_kernel, (count * blocks,), logits, target, entropy, lse, dlog_probs, dentropy, dlse, cols,
            logits.stride(0), blocks, *strides, terms.ignore_index, terms.scale, terms.softcap,
            SOFTCAP=terms.softcap != 0, BLOCK=config.block, num_warps=config.num_warps, **apart,
        )  # fmt: skip
