"""linear_cross_entropy on Hopper, in Gluon: a pass over a chunk's logits turns them into their gradient in registers,
with one read from global memory.

Where tokens have few features, the epilogue of their matmul stores exp2 of the logits in their place, and no pass is
needed (`exp2_epilogue`). Tried without gain: docs/log/losses.md.
"""

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor

from tilesmith.device.gluon.rows import LINE, MOST_PARTS, cluster_refused
from tilesmith.device.gluon.rows_held import (
    HELD_CHOICES,
    HeldConfig,
    chunk_fp32,
    columns,
    exchange,
    flatten_lines,
    held_config,
    held_fit,
    held_flags,
    held_grid,
    load_chunks,
    open_exchange,
    row_pointer,
    warps_of_row,
)
from tilesmith.device.gluon.shim import gl, gluon, syncthreads
from tilesmith.engine import Space, cdiv, launch, optimize_kernel, register_kernel, rehearsed
from tilesmith.ops.loss import chunks
from tilesmith.ops.loss.arguments import linear_cross_entropy_arguments
from tilesmith.ops.loss.hopper import exp2_epilogue
from tilesmith.ops.loss.reference import Terms, gradients_now, keeps_logit_grad
from tilesmith.ops.loss.token_sums import reduced_loss, scaled, scaled_rows, token_divisors

LOG2E = gl.constexpr(1.4426950408889634)
LN2 = gl.constexpr(0.6931471805599453)
LOWEST = gl.constexpr(-3.4028234663852886e38)


@gluon.jit
def _least(dtype: gl.constexpr):
    """-inf; for 16-bit types as a word of two."""
    return float("-inf") if dtype.primitive_bitwidth == 32 else -8323200 if dtype == gl.bfloat16 else -67044352


@gluon.jit
def _tops(words, dtype: gl.constexpr, CHUNKS: gl.constexpr):
    """The largest value of each thread, fp32 [warps, 32]; 16-bit values are compared two at a time."""
    KIND: gl.constexpr = "bf16x2" if dtype == gl.bfloat16 else "f16x2"
    most = words[0]
    for c in gl.static_range(1, CHUNKS):
        if dtype == gl.float32:
            most = gl.maximum(most, words[c])
        else:
            most = gl.inline_asm_elementwise(
                f"max.{KIND} $0, $1, $2;", "=r,r,r", [most, words[c]], dtype=gl.int32, is_pure=True, pack=1
            )
    return gl.max(gl.reshape(chunk_fp32(most, dtype), [gl.num_warps(), 32, 8]), 2)


@gluon.jit
def loss_grad_parts_kernel(
    logits_ptr, target_ptr, weight_ptr, divisors_ptr, losses_ptr, lse_ptr, cols, stride, ignore_index, z_loss, scale,
    Z: gl.constexpr, MEAN: gl.constexpr, PARTS: gl.constexpr, WHOLE: gl.constexpr, CHUNKS: gl.constexpr,
):  # fmt: skip
    """A part of a row of logits becomes that part of the gradient; the part with the label also writes the row's loss
    and lse. scale is above 0. Until the row's maximum is known, exponentials are relative to each thread's own maximum:
    one exp2 per logit. Computing them again from the logits, which take half the registers, is slower: 622 µs in place
    of 514 (H200, bf16, 4096 x 128256; a copy takes 494)."""
    row, part = gl.program_id(0) // PARTS, gl.program_id(0) % PARTS
    DTYPE: gl.constexpr = logits_ptr.dtype.element_ty
    WIDTH: gl.constexpr = gl.num_warps() * 256
    room = open_exchange(PARTS)
    row_ptr = row_pointer(logits_ptr, row, stride)
    words = load_chunks((), row_ptr, part, cols, CHUNKS, CHUNKS, WHOLE, _least(DTYPE))
    target = gl.load(target_ptr + row).to(gl.int64)
    counted = target != ignore_index
    valid = (target >= 0) & (target < cols)
    label = gl.where(valid, target, 0).to(gl.int32)
    owns = label // (CHUNKS * WIDTH) == part
    chosen = 0.0
    if owns:
        chosen = gl.load(row_ptr + label).to(gl.float32)
        syncthreads()  # before another thread writes there
    label_weight = 1.0
    if weight_ptr is not None:
        label_weight = gl.load(weight_ptr + label).to(gl.float32)
    label_weight = gl.where(counted & valid, label_weight, 0.0)
    token_grad, z_grad = 1.0, 1.0
    if MEAN:
        token_grad, z_grad = 1.0 / gl.load(divisors_ptr), 1.0 / gl.load(divisors_ptr + 1)
    elif Z and divisors_ptr is not None:
        z_grad = gl.load(divisors_ptr) / gl.load(divisors_ptr + 1)
    token_scale = gl.where(valid, scale, float("nan"))
    label_coef = token_grad * label_weight * token_scale

    power = scale * LOG2E
    tops = gl.maximum(_tops(words, DTYPE, CHUNKS), LOWEST)  # not -inf, from which -inf cannot be subtracted
    exps, total = (), 0.0
    for c in gl.static_range(CHUNKS):
        x = gl.reshape(chunk_fp32(words[c], DTYPE), [gl.num_warps(), 32, 8])
        p = gl.exp2((x - gl.expand_dims(tops, 2)) * power)
        total += p
        exps += (p,)
    top = gl.max(tops, 1)
    found = gl.sum(gl.sum(total, 2) * gl.exp2((tops - gl.expand_dims(top, 1)) * power), 1)
    every_top, totals = exchange(room, part, top, found, PARTS)
    every_top = gl.where(warps_of_row(PARTS) < PARTS * gl.num_warps(), every_top, LOWEST)
    row_top = gl.max(every_top, 0)
    more = gl.log2(gl.sum(totals * gl.exp2((every_top - row_top) * power), 0))  # lse - top, in base 2
    lse = gl.where(counted, row_top * scale + more * LN2, 0.0)
    if owns:
        loss = label_weight * ((row_top - chosen) * scale + more * LN2)
        gl.store(losses_ptr + row, gl.where(counted, gl.where(valid, loss, float("nan")), 0.0))
        gl.store(lse_ptr + row, lse)

    softmax_coef = label_coef
    if Z:
        softmax_coef += 2.0 * z_loss * lse * z_grad * token_scale
    factors = gl.expand_dims(gl.exp2((tops - row_top) * power - more) * softmax_coef, 2)
    for c in gl.static_range(CHUNKS):
        col = columns(part, c, CHUNKS)
        mask = None if c < WHOLE else col < cols
        if counted:
            gl.store(row_ptr + col, flatten_lines(exps[c] * factors).to(DTYPE), mask=mask)
        else:
            gl.store(row_ptr + col, gl.zeros_like(col).to(DTYPE), mask=mask)
    if owns & counted:  # by the thread that has just written there
        lanes = gl.arange(0, WIDTH // 8, gl.BlockedLayout([1], [32], [gl.num_warps()], [0]))
        grad = gl.exp2((chosen - row_top) * power - more) * softmax_coef - label_coef
        gl.store(row_ptr + label + lanes * 0, (grad + lanes * 0.0).to(DTYPE), mask=lanes == label % WIDTH // 8)


def loss_grad(config: HeldConfig, logits, target, class_weight, losses, lse, divisors, terms: Terms, grad: str) -> None:
    """`LogitSteps.forward` with a gradient."""
    ctas, parts = held_grid(logits, config)
    stride = logits.stride(0) * logits.element_size() // 16
    launch(
        loss_grad_parts_kernel, (ctas,),
        logits, target, class_weight, divisors if divisors.numel() else None, losses, lse, logits.shape[1], stride,
        terms.ignore_index, terms.z_loss, terms.scale,
        Z=terms.z_loss != 0, MEAN=grad == "mean", enable_fp_fusion=False,
        **held_flags(logits.shape[1], parts, config),
    )  # fmt: skip


def _reasons(call: Any) -> list[str]:
    reasons = []
    if call.x.dtype == torch.float64:
        reasons.append("x is float64; this kernel computes in float32")
    given = call.grad_mask, call.reduction, call.mode
    if not any(gradients_now(*given)) and not keeps_logit_grad(*given):
        reasons.append("no gradient is computed along with the loss, so Triton's kernel reads the logits as often")
    if call.smoothed:
        reasons.append("label_smoothing: the sum of the scores is not computed here")
    if call.turned:
        reasons.append("scale is not above 0: the largest score is here that of the largest logit")
    if call.capped:
        reasons.append("softcap: its derivative is not computed here")
    if not NARROW < call.classes <= WIDEST or call.classes % 16:
        reasons.append(
            f"there are {call.classes} classes; more than {NARROW}, where Triton's kernel is slower, up to {WIDEST}, "
            "and multiples of 16 are supported"
        )
    return reasons or cluster_refused(call.x.device, call.classes)


NARROW, WIDEST = 4096, MOST_PARTS * 16_384


def _dims(x: Tensor, weight: Tensor, *_: Any) -> dict[str, int]:
    return {"rows": x.numel() // x.shape[-1], "cols": weight.shape[0], "bytes": x.element_size()}


def _default(dims: Mapping[str, int], arch: Any, dtype: torch.dtype) -> HeldConfig:
    """H200, bf16, of the rate of a copy in place: at 4,352, 8,192, 32,000, 128,256, 152,064 and 262,144 classes 0.88,
    0.96, 0.95, 0.97, 0.86 and 0.94; Triton's 0.40, 0.71, 0.78, 0.69, 0.69 and 0.67."""
    cols, widest = dims["cols"], 8 * 8 * LINE
    if cols <= 8 * widest:
        return held_config(cols, dims["bytes"], 8, 8, 80)  # three CTAs a multiprocessor
    return HeldConfig(cdiv(cols, cdiv(cols, widest) * 8 * LINE), 8, 0)  # more CTAs, not more registers


SPACE = Space(dims=_dims, default=_default, choices=HELD_CHOICES, fit=held_fit)


@linear_cross_entropy_arguments
def _tells(call) -> list[str]:
    kept = keeps_logit_grad(call.grad_mask, call.reduction, call.mode)
    wanted = gradients_now(call.grad_mask, call.reduction, call.mode)[0]
    reasons = exp2_epilogue.reasons(call.x, call.weight.shape[0], call.bias, wanted, call.z_loss, kept)
    if not reasons and any(t.ndim > 1 and t.stride(-2) % 8 for t in (call.x, call.weight)):
        reasons = ["rows of x or weight begin at other places than multiples of 16 bytes"]
    if reasons:
        return [f"a pass over the logits makes their gradient: {', '.join(reasons)}"]
    return [f"no pass over logits: up to {exp2_epilogue.MOST_FEATURES:,} features their product stores exp2 of them"]


@register_kernel("linear_cross_entropy", backend="hopper", rank=25, rejects=_reasons, tells=_tells, plans=rehearsed)
@optimize_kernel(space=SPACE)
@linear_cross_entropy_arguments
def linear_cross_entropy(
    call, *, config: HeldConfig
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """For each chunk a product, one launch over its logits, and the products of the gradients; or `exp2_epilogue`."""
    steps = chunks.LogitSteps(
        forward=partial(loss_grad, config), backward=None, divide=token_divisors, reduce=reduced_loss, scale=scaled,
        scale_rows=scaled_rows,
        exponentials=chunks.ExponentialSteps(
            exp2_epilogue.applies, exp2_epilogue.gradients, exp2_epilogue.exponentials
        ),
    )  # fmt: skip
    return chunks.linear_cross_entropy(steps, call)
