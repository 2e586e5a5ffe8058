"""Sums over the tokens of a loss, and the scaling of its gradients: Triton kernels that Triton's and Hopper's losses
both launch."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from tilesmith.device.counters import work_counter
from tilesmith.device.triton.column_sums import chained
from tilesmith.engine import cdiv, launch, next_power_of_2
from tilesmith.ops.loss.reduction import reduce_losses
from tilesmith.ops.loss.reference import Terms

SUM_BLOCK, MOST_SUMS = 1024, 1024


@triton.jit
def weight_of_label(weight_ptr, label, found):
    if weight_ptr is not None:
        return tl.load(weight_ptr + label, mask=found, other=0.0).to(tl.float32)
    return tl.where(found, 1.0, 0.0)


@triton.jit
def _finish(losses, squares, weights, number, loss_ptr, divisors_ptr, z_loss):
    """Write the loss, and for "mean" (divisors_ptr given) what it was divided by."""
    if divisors_ptr is not None:
        tl.store(divisors_ptr, weights)
        tl.store(divisors_ptr + 1, number)
        loss = losses / weights
        tl.store(loss_ptr, tl.where(z_loss == 0, loss, loss + z_loss * squares / number))
    else:
        tl.store(loss_ptr, losses + z_loss * squares)


@triton.jit
def _add_each(a, b, c, d, a_more, b_more, c_more, d_more):
    return a + a_more, b + b_more, c + c_more, d + d_more


@triton.jit
def _sum_kernel(
    losses_ptr, lse_ptr, target_ptr, weight_ptr, partials_ptr, counter_ptr, loss_ptr, divisors_ptr,
    rows, span, cols, ignore_index, z_loss,
    MEAN: tl.constexpr, Z: tl.constexpr, BLOCK: tl.constexpr, PROGRAMS: tl.constexpr, CHAINED: tl.constexpr,
):  # fmt: skip
    """Sums over `span` tokens per program, in a fixed order. The program that ends last adds up those of all, at most
    PROGRAMS, in a fixed order, too. CHAINED: launched by PDL, it may have started before the kernel that writes the
    losses has ended."""
    if CHAINED:
        tl.extra.cuda.gdc_wait()
    first = tl.program_id(0).to(tl.int64) * span
    losses = tl.zeros([BLOCK], tl.float32)
    squares = tl.zeros([BLOCK], tl.float32)
    weights = tl.zeros([BLOCK], tl.float32)
    number = tl.zeros([BLOCK], tl.float32)
    for start in range(0, span, BLOCK):
        row = first + start + tl.arange(0, BLOCK)
        exists = row < rows
        if losses_ptr is not None:
            losses += tl.load(losses_ptr + row, mask=exists, other=0.0)
        if Z:
            lse = tl.load(lse_ptr + row, mask=exists, other=0.0)
            squares += lse * lse
        if MEAN:
            target = tl.load(target_ptr + row, mask=exists, other=0).to(tl.int64)
            counted = exists & (target != ignore_index)
            number += tl.where(counted, 1.0, 0.0)
            weights += weight_of_label(weight_ptr, target, counted & (target >= 0) & (target < cols))
    out = partials_ptr + tl.program_id(0) * 4
    # one reduction of four numbers: warps wait for each other less than half as often as in four
    loss, square, weight, count = tl.reduce((losses, squares, weights, number), 0, _add_each)
    tl.store(out, loss)
    tl.store(out + 1, square)
    tl.store(out + 2, weight)
    tl.store(out + 3, count)
    if tl.atomic_add(counter_ptr, 1, sem="acq_rel") == tl.num_programs(0) - 1:
        tl.store(counter_ptr, 0)
        at = partials_ptr + tl.arange(0, PROGRAMS) * 4
        exists = tl.arange(0, PROGRAMS) < tl.num_programs(0)
        first_two = tl.load(at, mask=exists, other=0.0), tl.load(at + 1, mask=exists, other=0.0)
        last_two = tl.load(at + 2, mask=exists, other=0.0), tl.load(at + 3, mask=exists, other=0.0)
        loss, square, weight, count = tl.reduce(first_two + last_two, 0, _add_each)
        _finish(loss, square, weight, count, loss_ptr, divisors_ptr, z_loss)


@triton.jit
def _scale_kernel(grad_ptr, out_ptr, dloss_ptr, divisors_ptr, elements, OVER: tl.constexpr, BLOCK: tl.constexpr):
    """grad · dloss, over the first divisor where there are divisors; 0 where no token counted. OVER: out is grad, so
    that a factor of 1, the usual dloss, costs no traffic."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    factor = tl.load(dloss_ptr).to(tl.float32)
    if divisors_ptr is not None:
        factor = tl.where(tl.load(divisors_ptr + 1) > 0, factor / tl.load(divisors_ptr), 0.0)
    moved = at < (tl.where(factor == 1, 0, elements) if OVER else elements)
    grad = tl.load(grad_ptr + at, mask=moved, other=0.0).to(tl.float32)
    tl.store(out_ptr + at, (grad * factor).to(out_ptr.dtype.element_ty), mask=moved)


def scaled(grad: Tensor, dloss: Tensor, divisors: Tensor, dtype: torch.dtype, over: bool = False) -> Tensor:
    over = over and grad.dtype == dtype
    out = grad if over else torch.empty_like(grad, dtype=dtype)
    if out.numel():
        given = divisors if divisors.numel() else None
        grid = (cdiv(out.numel(), 4096),)
        launch(_scale_kernel, grid, grad, out, dloss, given, out.numel(), OVER=over, BLOCK=4096, num_warps=8)
    return out


@triton.jit
def _scale_rows_kernel(
    rows_ptr, out_ptr, factors_ptr, dloss_ptr, divisors_ptr, cols,
    OVER: tl.constexpr, BLOCK: tl.constexpr, CHAINED: tl.constexpr,
):  # fmt: skip
    """A row of [N, K] times its factor and dloss (None: 1), as `row_factors` says; 0 where that is 0. OVER: out is
    rows, so that a factor of 1 costs no traffic. CHAINED: launched by PDL."""
    if CHAINED:
        tl.extra.cuda.gdc_wait()
    row = tl.program_id(0).to(tl.int64)
    factor = tl.load(factors_ptr + row).to(tl.float32)
    if divisors_ptr is not None:
        factor = tl.where(tl.load(divisors_ptr + 1) > 0, factor / tl.load(divisors_ptr), 0.0)
    if dloss_ptr is not None:
        factor *= tl.load(dloss_ptr).to(tl.float32)
    end = tl.where(factor == 1, 0, cols) if OVER else cols
    for start in range(0, end, BLOCK):
        at = start + tl.arange(0, BLOCK)
        found = tl.load(rows_ptr + row * cols + at, mask=at < cols, other=0.0).to(tl.float32)
        scaled = tl.where(factor == 0, 0.0, found * factor)
        tl.store(out_ptr + row * cols + at, scaled.to(out_ptr.dtype.element_ty), mask=at < cols)


def scaled_rows(rows: Tensor, factors: Tensor, dloss: Tensor | None, divisors: Tensor, over: bool) -> Tensor:
    """`LogitSteps.scale_rows`; dloss None: 1."""
    out = rows if over else torch.empty_like(rows)
    given = divisors if divisors.numel() else None
    if out.numel():
        launch(
            _scale_rows_kernel, (rows.shape[0],), rows, out, factors, dloss, given, rows.shape[1],
            OVER=over, BLOCK=min(2048, next_power_of_2(rows.shape[1])), num_warps=4, **chained(rows.device),
        )  # fmt: skip
    return out


def reduce_tokens(
    losses: Tensor | None,
    lse: Tensor | None,
    target: Tensor,
    weight: Tensor | None,
    cols: int,
    terms: Terms,
    mean: bool,
) -> tuple[Tensor, Tensor]:
    """The loss and its divisors from the tokens' cross-entropies, by one launch. Without losses the divisors alone
    count."""
    loss, divisors = (target.new_empty(shape, dtype=torch.float32) for shape in ((), 2 if mean else 0))
    count = target.numel()
    span = max(SUM_BLOCK, next_power_of_2(cdiv(count, MOST_SUMS)))
    programs = max(1, cdiv(count, span))
    launch(
        _sum_kernel, (programs,), losses, lse, target, weight,
        target.new_empty(programs * 4, dtype=torch.float32), work_counter(target.device), loss,
        divisors if mean else None,
        count, span, cols, terms.ignore_index, terms.z_loss,
        MEAN=mean, Z=terms.z_loss != 0, BLOCK=SUM_BLOCK, PROGRAMS=next_power_of_2(programs), num_warps=4,
        **chained(target.device),
    )  # fmt: skip
    return loss, divisors


def token_divisors(target, class_weight, terms, classes, dtype, reduction) -> Tensor:
    if reduction != "mean":
        return target.new_empty(0, dtype=dtype)
    return reduce_tokens(None, None, target, class_weight, classes, terms._replace(z_loss=0.0), True)[1]


def reduced_loss(losses, lse, target, class_weight, classes, terms, reduction) -> tuple[Tensor, Tensor]:
    if reduction == "none":
        none = losses.new_empty(0)
        return reduce_losses(losses, lse, none, terms.z_loss, reduction), none
    return reduce_tokens(losses, lse, target, class_weight, classes, terms, reduction == "mean")
