"""Launchers of the distances between distributions in Triton: by element, and over rows of two models' logits."""

from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from tilesmith.device.rows import row_values, rows
from tilesmith.engine import Space, cdiv, launch, next_power_of_2, optimize_kernel, register_kernel, rehearsed
from tilesmith.ops.loss import distill_chunks as chunks
from tilesmith.ops.loss.chunks import source_tells
from tilesmith.ops.loss.distill_arguments import (
    jsd_arguments,
    jsd_vjp_arguments,
    kl_div_arguments,
    kl_div_vjp_arguments,
    linear_distillation_arguments,
    linear_distillation_vjp_arguments,
    tvd_arguments,
    tvd_vjp_arguments,
)
from tilesmith.ops.loss.distill_chunks import Distance, DistanceSteps
from tilesmith.ops.loss.distill_reference import SIGNS, divisor_of
from tilesmith.ops.loss.triton.distill_kernels import (
    SPAN,
    distance_bwd_kernel,
    distance_fwd_kernel,
    distill_kernel,
    scale_kernel,
    total_variation_bwd_kernel,
)


class DistanceConfig(NamedTuple):
    """block: elements that a program holds of each tensor at a time; num_stages: how deep the loads of an elementwise
    forward are pipelined."""

    block: int
    num_warps: int
    num_stages: int = 1


def _tile(num_rows: int, num_cols: int, config: DistanceConfig) -> tuple[int, int]:
    """Rows and columns of a tile."""
    block = min(config.block, next_power_of_2(num_cols))
    return min(config.block // block, next_power_of_2(num_rows)), block


def _forward(
    x: Tensor, target: Tensor, labels: Tensor | None, reduction: str, kind: str, beta: float, eps: float,
    ignore_index: int, config: DistanceConfig, signs: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """The elements' sum, or for "none" the elements; signs: where those of the differences go."""
    none, shape = reduction == "none", x.shape
    if x.numel() == 0:
        return x.new_zeros(shape if none else (), dtype=torch.float32)
    x, target = rows(x), rows(target)
    tile_rows, block = _tile(*x.shape, config)
    block = block if signs is None else max(block, SIGNS)
    spans = cdiv(x.shape[1], SPAN * block)
    programs = cdiv(x.shape[0], tile_rows) * spans
    out = x.new_empty(shape if none else programs, dtype=torch.float32)
    launch(
        distance_fwd_kernel, (programs,),
        x, target, labels, out, signs, x.stride(0), target.stride(0), *x.shape, spans, ignore_index, beta, eps,
        KIND=kind, NONE=none, ROWS=tile_rows, BLOCK=block, SPAN=SPAN, STAGES=config.num_stages,
        num_warps=config.num_warps,
    )  # fmt: skip
    return out if none else out.sum()


def _backward(
    dloss: Tensor, x: Tensor, target: Tensor, labels: Tensor | None, count: Tensor | None, kind: str, beta: float,
    eps: float, ignore_index: int, divisor: float, output_mask: Sequence[bool], config: DistanceConfig,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Both gradients; the upstream one is divided by `divisor`, and by `count` where there is one."""
    dx, dtarget = (t.new_empty(t.shape if wanted else 0) for t, wanted in zip((x, target), output_mask))
    if x.numel() == 0 or not any(output_mask):
        return dx, dtarget
    if dloss.ndim:
        dloss = rows(dloss)
    x, target = rows(x), rows(target)
    tile_rows, block = _tile(*x.shape, config)
    blocks = cdiv(x.shape[1], block)
    only_p = kind in ("kl", "kl_target", "kl_target_coarse") and not output_mask[1]
    only_q = kind == "reverse_kl" and not output_mask[0]
    launch(
        distance_bwd_kernel, (cdiv(x.shape[0], tile_rows) * blocks,),
        dloss, count, x, target, labels, dx, dtarget, *(dloss.stride() or (0, 0)), x.stride(0), target.stride(0),
        *x.shape, blocks, ignore_index, beta, eps, 1 / divisor,
        KIND=kind, WANTS_DX=output_mask[0], WANTS_DTARGET=output_mask[1], READS_X=not only_p, READS_TARGET=not only_q,
        SCALAR=dloss.ndim == 0, ROWS=tile_rows, BLOCK=block, num_warps=config.num_warps,
    )  # fmt: skip
    return dx, dtarget


def _from_signs(
    dloss: Tensor, x: Tensor, target: Tensor, labels: Tensor | None, count: Tensor | None, signs: Tensor,
    ignore_index: int, divisor: float, output_mask: Sequence[bool], config: DistanceConfig,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """As `_backward`, of the total variation distance from its signs."""
    dx, dtarget = (t.new_empty(t.shape if wanted else 0) for t, wanted in zip((x, target), output_mask))
    if x.numel() == 0 or not any(output_mask):
        return dx, dtarget
    if dloss.ndim:
        dloss = rows(dloss)
    num_rows, num_cols = x.numel() // x.shape[-1], x.shape[-1]
    tile_rows, block = _tile(num_rows, num_cols, config)
    block = max(block, SIGNS)
    blocks = cdiv(num_cols, block)
    launch(
        total_variation_bwd_kernel, (cdiv(num_rows, tile_rows) * blocks,),
        dloss, count, signs, labels, dx, dtarget, *(dloss.stride() or (0, 0)), num_rows, num_cols, blocks,
        ignore_index, 1 / divisor,
        WANTS_DX=output_mask[0], WANTS_DTARGET=output_mask[1], SCALAR=dloss.ndim == 0, ROWS=tile_rows, BLOCK=block,
        num_warps=config.num_warps,
    )  # fmt: skip
    return dx, dtarget


def _jsd_kind(beta: float, *inputs: Tensor) -> str:
    """Which formula serves; inputs: the logarithms, where nothing has been added to them yet."""
    if beta in (0, 1):
        return "reverse_kl" if beta else "kl"
    return ("jsd_half" if beta == 0.5 else "jsd") + _coarse(*inputs)


def _kl_kind(log_target: bool, x: Tensor, target: Tensor) -> str:
    return "kl" if log_target else "kl_target" + _coarse(x, target)


def _coarse(*inputs: Tensor) -> str:
    return "_coarse" if inputs and all(t.element_size() == 2 for t in inputs) else ""


def _formula_tells(kind: str) -> list[str]:
    """Which formula of a distance serves inputs of these dtypes."""
    if kind.endswith("_coarse"):
        return [f"the inputs have 16 bits, so minimax polynomials replace exp and log ({kind})"]
    return [f"exp and log of fp32 precision ({kind})"]


def _tvd_tells(call, *, config: DistanceConfig) -> list[str]:
    """Where the gradient of a total variation distance comes from."""
    if call.signs.numel():
        return ["from the signs of the differences, which the forward kept"]
    return ["from the inputs, as the forward kept no signs"]


def _mean(total: Tensor, x: Tensor, labels: Tensor | None, reduction: str, ignore_index: int) -> tuple[Tensor, Tensor]:
    """(the reduced loss, the number of rows that count), from the sum."""
    count = total.new_empty(0) if labels is None else (labels != ignore_index).sum().clamp(min=1).to(total.dtype)
    if reduction in ("batchmean", "mean"):
        total = total / (_rows_or_one(x) if labels is None else count)
    return total / x.shape[-1] if reduction == "mean" else total, count


def _rows_or_one(x: Tensor) -> int:
    return max(1, x.numel() // x.shape[-1])


def _divisor(x: Tensor, labels: Tensor | None, reduction: str) -> int:
    """What divides the sum besides the count of rows."""
    divisor = _rows_or_one(x) if labels is None and reduction in ("batchmean", "mean") else 1
    return divisor * x.shape[-1] if reduction == "mean" else divisor


def _counted(count: Tensor, labels: Tensor | None, reduction: str) -> Tensor | None:
    return count if labels is not None and reduction in ("batchmean", "mean") else None


def _step(
    config: DistanceConfig,
    student: Tensor,
    teacher: Tensor,
    target: Tensor | None,
    losses: Tensor,
    distance: Distance,
    upstream: Tensor | None,
    grad: bool,
) -> None:
    """`DistanceSteps.step`; losses are [2, C] with a unit last stride."""
    if student.shape[0] == 0:
        return
    kind = _jsd_kind(distance.beta) if distance.kind == "jsd" else distance.kind
    launch(
        distill_kernel, (student.shape[0],),
        student, teacher, target, upstream, losses, student.stride(0), teacher.stride(0),
        losses.stride(0), student.shape[1],
        distance.beta, 1 / distance.temperature, distance.soft, distance.hard, distance.ignore_index,
        KIND=kind, PROBS=distance.probs, HARD=target is not None, WARM=distance.temperature != 1, GRAD=grad,
        BLOCK=min(config.block, next_power_of_2(student.shape[1])), num_warps=config.num_warps,
    )  # fmt: skip


def _scale(grad: Tensor, dloss: Tensor, dtype: torch.dtype, over: bool) -> Tensor:
    out = grad if over and grad.dtype == dtype else torch.empty_like(grad, dtype=dtype)
    if out.numel():
        launch(scale_kernel, (cdiv(out.numel(), 4096),), grad, out, dloss, out.numel(), BLOCK=4096, num_warps=8)
    return out


def _steps(config: DistanceConfig) -> DistanceSteps:
    return DistanceSteps(partial(_step, config), _scale)


def _reasons(call) -> list[str]:
    wide = torch.float64 in (call.x.dtype, call.target.dtype)
    return ["x or target is float64; this kernel computes in float32"] if wide else []


def _linear_reasons(call) -> list[str]:
    wide = torch.float64 in (call.x.dtype, call.teacher.dtype)
    return ["x or teacher is float64; this kernel computes in float32"] if wide else []


def _default(dims, arch, dtype) -> DistanceConfig:
    # Two 16-byte accesses a thread for each of the two tensors, all asked for before the first is used.
    return DistanceConfig(128 * 32 // dtype.itemsize, 4, 2 if arch.kind == "cuda" and arch.capability >= (8, 0) else 1)


def _default_jsd(dims, arch, dtype) -> DistanceConfig:
    # Of 16 bits the formula takes as long as memory. H200, bf16, 8192 x 32000: 267 µs, as the others 275.
    return DistanceConfig(4096, 8) if dtype.itemsize == 2 else _default(dims, arch, dtype)


def _default_vjp(dims, arch, dtype) -> DistanceConfig:
    # Whatever the dtype, which is the upstream gradient's: half the block makes jsd of bf16 take 419 µs in place of 369
    # (H200, 8192 x 32000); twice the block spills in fp32.
    return DistanceConfig(2048, 4)


def _default_signed(dims, arch, dtype) -> DistanceConfig:
    # H200, bf16, 8192 x 32000: 152 µs for the gradient, 149 with half the block; to fill as much with zeros takes 159.
    return DistanceConfig(4096, 4)


def _default_linear(dims, arch, dtype) -> DistanceConfig:
    # 8 elements a thread: with 16, "jsd" spills on sm90.
    return DistanceConfig(2048, min(8, 1024 // max(32, arch.warp)))


def _dims(x, *_) -> dict[str, int]:
    return {"rows": x.numel() // x.shape[-1], "cols": x.shape[-1]}


def _dims_vjp(dloss, x, *_) -> dict[str, int]:
    return _dims(x)


def _dims_linear(x, weight, *_) -> dict[str, int]:
    return {"rows": x.numel() // x.shape[-1], "cols": weight.shape[0]}


def _dims_linear_vjp(dloss, dparts, x, weight, *_) -> dict[str, int]:
    return _dims_linear(x, weight)


CHOICES = {"block": (1024, 2048, 4096, 8192), "num_warps": (4, 8, 16)}
SPACE = Space(dims=_dims, default=_default, choices=CHOICES)
JSD_SPACE = Space(dims=_dims, default=_default_jsd, choices=CHOICES)
VJP_SPACE = Space(dims=_dims_vjp, default=_default_vjp, choices=CHOICES)
SIGNED_SPACE = Space(dims=_dims_vjp, default=_default_signed, choices=CHOICES)
LINEAR_SPACE = Space(dims=_dims_linear, default=_default_linear, choices=CHOICES)
LINEAR_VJP_SPACE = Space(dims=_dims_linear_vjp, default=_default_linear, choices=CHOICES)


@register_kernel(
    "kl_div",
    backend="triton",
    rank=20,
    rejects=_reasons,
    tells=lambda x, target, reduction, log_target, eps: _formula_tells(_kl_kind(log_target, x, target)),
    plans=rehearsed,
)
@optimize_kernel(space=SPACE)
@kl_div_arguments
def kl_div(call, *, config: DistanceConfig) -> Tensor:
    """One launch for the elements or their partial sums."""
    x, reduction = call.x, call.reduction
    out = _forward(x, call.target, None, reduction, _kl_kind(call.log_target, x, call.target), 0.0, call.eps, 0, config)
    return out if reduction in ("none", "sum") else out / divisor_of(x, reduction)


@register_kernel(
    "kl_div_vjp",
    backend="triton",
    rank=20,
    rejects=_reasons,
    tells=lambda dloss, x, target, reduction, log_target, *_: _formula_tells(_kl_kind(log_target, x, target)),
    plans=rehearsed,
)
@optimize_kernel(space=VJP_SPACE)
@kl_div_vjp_arguments
def kl_div_vjp(call, *, config: DistanceConfig) -> tuple[Tensor, Tensor]:
    """One launch; x is read only for the target's gradient."""
    x = call.x
    divisor = 1 if call.reduction == "none" else max(1, divisor_of(x, call.reduction))
    kind = _kl_kind(call.log_target, x, call.target)
    return _backward(call.dloss, x, call.target, None, None, kind, 0.0, call.eps, 0, divisor, call.output_mask, config)


@register_kernel(
    "jsd",
    backend="triton",
    rank=20,
    rejects=_reasons,
    tells=lambda x, target, labels, beta, *_: _formula_tells(_jsd_kind(beta, x, target)),
    plans=rehearsed,
)
@optimize_kernel(space=JSD_SPACE)
@jsd_arguments
def jsd(call, *, config: DistanceConfig) -> tuple[Tensor, Tensor]:
    """One launch for the elements or their partial sums; rows that do not count are not read."""
    x, labels, kind = call.x, call.labels, _jsd_kind(call.beta, call.x, call.target)
    flat = None if labels is None else row_values(labels)
    out = _forward(x, call.target, flat, call.reduction, kind, call.beta, 0.0, call.ignore_index, config)
    return _mean(out, x, labels, call.reduction, call.ignore_index)


@register_kernel(
    "jsd_vjp",
    backend="triton",
    rank=20,
    rejects=_reasons,
    tells=lambda dloss, x, target, labels, count, beta, *_: _formula_tells(_jsd_kind(beta, x, target)),
    plans=rehearsed,
)
@optimize_kernel(space=VJP_SPACE)
@jsd_vjp_arguments
def jsd_vjp(call, *, config: DistanceConfig) -> tuple[Tensor, Tensor]:
    """One launch, from the inputs alone."""
    x, labels = call.x, call.labels
    flat, divisor = None if labels is None else row_values(labels), _divisor(x, labels, call.reduction)
    counted, kind = _counted(call.count, labels, call.reduction), _jsd_kind(call.beta, x, call.target)
    given = call.dloss, x, call.target, flat, counted
    return _backward(*given, kind, call.beta, 0.0, call.ignore_index, divisor, call.output_mask, config)


@register_kernel("tvd", backend="triton", rank=20, rejects=_reasons, plans=rehearsed)
@optimize_kernel(space=SPACE)
@tvd_arguments
def tvd(call, *, config: DistanceConfig) -> tuple[Tensor, Tensor, Tensor]:
    """As `jsd`; where a gradient will be asked for, with the signs of the differences."""
    x, labels = call.x, call.labels
    flat, wanted = None if labels is None else row_values(labels), any(call.grad_mask or ())
    signs = x.new_empty((*x.shape[:-1], cdiv(x.shape[-1], SIGNS)) if wanted else 0, dtype=torch.int16)
    out = _forward(
        x, call.target, flat, call.reduction, "total", 0.0, 0.0, call.ignore_index, config, signs if wanted else None
    )
    return *_mean(out, x, labels, call.reduction, call.ignore_index), signs


@register_kernel(
    "tvd_vjp", backend="triton", rank=20, rejects=_reasons, tells=tvd_vjp_arguments(_tvd_tells), plans=rehearsed
)
@optimize_kernel(space=SIGNED_SPACE)
@tvd_vjp_arguments
def tvd_vjp(call, *, config: DistanceConfig) -> tuple[Tensor, Tensor]:
    """One launch, from the signs where they were saved, else from the inputs."""
    x, labels = call.x, call.labels
    flat, divisor = None if labels is None else row_values(labels), _divisor(x, labels, call.reduction)
    counted = _counted(call.count, labels, call.reduction)
    given = call.dloss, x, call.target, flat, counted
    if call.signs.numel():
        return _from_signs(*given, call.signs, call.ignore_index, divisor, call.output_mask, config)
    return _backward(*given, "total", 0.0, 0.0, call.ignore_index, divisor, call.output_mask, config)


@register_kernel("linear_distillation", backend="triton", rank=20, rejects=_linear_reasons, plans=rehearsed)
@optimize_kernel(space=LINEAR_SPACE)
@linear_distillation_arguments
def linear_distillation(call, *, config: DistanceConfig) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """For each chunk two products, one launch over both logits, and the products of the gradients."""
    return chunks.linear_distillation(_steps(config), call)


@register_kernel(
    "linear_distillation_vjp",
    backend="triton",
    rank=20,
    rejects=_linear_reasons,
    tells=linear_distillation_vjp_arguments(source_tells),
    plans=rehearsed,
)
@optimize_kernel(space=LINEAR_VJP_SPACE)
@linear_distillation_vjp_arguments
def linear_distillation_vjp(call, *, config: DistanceConfig) -> tuple[Tensor, Tensor, Tensor]:
    """The saved gradients times the loss's, or the chunks again."""
    return chunks.linear_distillation_vjp(_steps(config), call)
