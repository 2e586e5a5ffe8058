"""Launchers of cross-entropy in Triton, their configurations and what they refuse."""

from typing import NamedTuple

import torch
from torch import Tensor

from tilesmith.device.rows import dense, row_values
from tilesmith.device.triton.column_sums import chained
from tilesmith.engine import Space, cdiv, launch, next_power_of_2, optimize_kernel, register_kernel, rehearsed
from tilesmith.ops.loss.arguments import cross_entropy_arguments, cross_entropy_vjp_arguments
from tilesmith.ops.loss.reference import Terms
from tilesmith.ops.loss.token_sums import reduce_tokens
from tilesmith.ops.loss.triton.cross_entropy_kernels import (
    cross_entropy_online_kernel,
    cross_entropy_online_vjp_kernel,
    cross_entropy_row_kernel,
    cross_entropy_row_vjp_kernel,
)


class LossConfig(NamedTuple):
    """block: classes that a program holds at a time. rows: rows of a tile, where a whole row fits in a block.
    num_stages: pipeline depth of the loads of an online softmax. programs: how many rows it works on at a time; 0: as
    many as fit."""

    block: int
    rows: int
    num_warps: int
    num_stages: int
    programs: int = 0


LINE = 128  # bytes; blocks that start elsewhere leave lines half written


class _Rows(NamedTuple):
    """How the rows of logits lie in memory: `inner` of them at `stride`, such groups at `outer`; inner 0: one group."""

    logits: Tensor
    count: int
    cols: int
    stride: int
    outer: int
    inner: int

    @property
    def lanes(self) -> int:
        """Elements of 16 bytes."""
        return 16 // self.logits.element_size()

    def units(self) -> dict[str, int]:
        """What the strides and the number of columns are multiples of: 16 bytes or one element."""
        strides = self.stride % self.lanes == 0 and self.outer % self.lanes == 0
        return {"UNIT": self.lanes if strides else 1, "COLS_UNIT": 1 if self.cols % self.lanes else self.lanes}

    def align(self, out_like_in: bool) -> int:
        """Elements of a line where rows do not start at multiples of 16 bytes and peeling can help; else 1."""
        if self.stride % self.lanes == 0 and self.outer % self.lanes == 0:
            return 1
        return LINE // self.logits.element_size() if out_like_in else 1


def rows_of(logits: Tensor) -> _Rows:
    """Rows of [..., V] in place if they lie at one stride or at two, else those of a contiguous copy."""
    cols = logits.shape[-1]
    if cols > 1 and logits.stride(-1) != 1:
        logits = logits.contiguous()
    dims = _merged(logits)
    if len(dims) > 2:
        logits = logits.contiguous()
        dims = _merged(logits)
    count = logits.numel() // cols
    stride = dims[-1][1] if dims else cols
    if len(dims) == 2:
        return _Rows(logits, count, cols, stride, dims[0][1], dims[1][0])
    return _Rows(logits, count, cols, stride, 0, 0)


def _merged(logits: Tensor) -> list[tuple[int, int]]:
    """(size, stride) of the leading dims, where neighbouring dims that form one are merged."""
    dims: list[tuple[int, int]] = []
    for size, stride in zip(logits.shape[:-1], logits.stride()[:-1]):
        if size == 1:
            continue
        if dims and dims[-1][1] == size * stride:
            dims[-1] = (dims[-1][0] * size, stride)
        else:
            dims.append((size, stride))
    return dims


def in_registers(cols: int, config: LossConfig) -> bool:
    """Whether a CTA holds whole rows of logits; else an online softmax walks over blocks of a row."""
    return config.block >= cols


def forward_tells(cols: int, config: LossConfig) -> list[str]:
    """How a forward reads rows of `cols` classes."""
    if in_registers(cols, config):
        return [f"{config.rows} x {cols} logits are held in registers"]
    return [f"an online softmax over rows of {cols} logits, in blocks of {config.block}"]


def backward_tells(cols: int, config: LossConfig) -> list[str]:
    """How a backward reads rows of `cols` classes."""
    if in_registers(cols, config):
        return [f"{config.rows} x {cols} logits are held in registers"]
    return [f"a CTA has one block of {config.block} of a row's {cols} logits"]


def _weight_sum(weight: Tensor | None, terms: Terms) -> Tensor | None:
    return weight.sum(dtype=torch.float32) if weight is not None and terms.label_smoothing else None


def forward(
    config: LossConfig,
    rows: _Rows,
    target: Tensor,
    weight: Tensor | None,
    losses: Tensor,
    lse: Tensor,
    divisors: Tensor | None,
    terms: Terms,
    add_z: bool,
    grad: str,
) -> None:
    """Losses and lse of all rows, and with `grad` the gradient of their "sum", undivided, or "mean" over the logits."""
    if rows.count == 0:
        return
    options = {
        "SMOOTH": terms.label_smoothing != 0, "SOFTCAP": terms.softcap != 0, "Z": terms.z_loss != 0,
        "ADD_Z": add_z and terms.z_loss != 0, "GRAD": grad != "", "MEAN": grad == "mean",
        "GROUPED": rows.inner > 0, **rows.units(), "BLOCK": config.block, "num_warps": config.num_warps,
        # a fused product and difference would round a score in two ways: a certain label would cost something
        "enable_fp_fusion": False,
    }  # fmt: skip
    tensors = (rows.logits, target, weight, _weight_sum(weight, terms), divisors, losses, lse)
    numbers = (rows.cols, rows.stride, rows.outer, rows.inner, *terms)
    if in_registers(rows.cols, config):
        grid = (cdiv(rows.count, config.rows),)
        options |= {"PLAIN": terms.scale == 1 and not terms.softcap, "ROWS": config.rows}
        launch(cross_entropy_row_kernel, grid, *tensors, rows.count, *numbers, **options)
    else:
        # With smoothing, class weights are loaded beside logits; pipelined too, they would not fit in shared memory.
        stages = 1 if weight is not None and terms.label_smoothing else config.num_stages
        options |= {"ALIGN": rows.align(True), "LANES": rows.lanes, "STAGES": stages}
        programs = min(config.programs or rows.count, rows.count)
        launch(cross_entropy_online_kernel, (programs,), *tensors, rows.count, *numbers, **options)


def backward(
    config: LossConfig,
    rows: _Rows,
    out: Tensor,
    target: Tensor,
    weight: Tensor | None,
    lse: Tensor,
    dloss: Tensor,
    divisors: Tensor | None,
    terms: Terms,
    first_class: int = 0,
    classes: int = 0,
) -> None:
    """The gradient of all rows into `out`, which is contiguous or lies as the logits do; dloss is a scalar or has one
    value a row. The columns are the classes from first_class on, of `classes` (0: they are all)."""
    if rows.count == 0:
        return
    options = {
        "SMOOTH": terms.label_smoothing != 0, "SOFTCAP": terms.softcap != 0, "Z": terms.z_loss != 0,
        "GROUPED": rows.inner > 0, **rows.units(), "BLOCK": config.block, "num_warps": config.num_warps,
        "PITCHED": rows.stride != rows.cols and out.stride() == rows.logits.stride(), **chained(out.device),
    }  # fmt: skip
    tensors = (rows.logits, out, target, weight, _weight_sum(weight, terms), lse, dloss, divisors)
    numbers = (rows.stride, rows.outer, rows.inner, dloss.stride(0) if dloss.ndim else 0, *terms)
    columns = (rows.cols, first_class, classes or rows.cols)
    if in_registers(rows.cols, config):
        grid = (cdiv(rows.count, config.rows),)
        launch(
            cross_entropy_row_vjp_kernel, grid, *tensors, rows.count, *columns, *numbers, ROWS=config.rows, **options
        )
    else:
        align = rows.align(rows.inner == 0 and rows.stride == rows.cols)
        blocks = cdiv(rows.cols + align - 1, config.block)
        options |= {"ALIGN": align, "LANES": rows.lanes}
        launch(cross_entropy_online_vjp_kernel, (rows.count * blocks,), *tensors, *columns, blocks, *numbers, **options)


def _reasons(call) -> list[str]:
    return ["logits are float64; this kernel computes in float32"] if call.logits.dtype == torch.float64 else []


def held(dims, arch) -> LossConfig:
    """A configuration for whole rows in registers: several short ones per warp, so that no row crosses warps, as long
    as every multiprocessor has a program; long ones with 32 elements per thread."""
    block = next_power_of_2(dims["cols"])
    rows, warps = max(1, 2048 // block), max(1, block // 1024)
    while rows > 1 and dims["rows"] < rows * max(1, arch.sms):
        rows //= 2
    return LossConfig(block, rows, warps_of(warps, arch), 1)


def warps_of(wanted: int, arch) -> int:
    """A program has at most 1,024 threads; AMD's warps have 64."""
    return min(wanted, 1024 // max(32, arch.warp))


def stages_of(block: int, arch, dtype: torch.dtype, most: int = 3) -> int:
    """How deep loads are pipelined: through at most half of a multiprocessor's shared memory."""
    if arch.kind != "cuda" or arch.capability < (8, 0):  # without asynchronous copies they would cost registers
        return 1
    return min(most, 1 + arch.shared_memory // (2 * block * dtype.itemsize))


def _default(dims, arch, dtype) -> LossConfig:
    if dims["cols"] <= 4096:
        return held(dims, arch)
    if dims["rows"] <= arch.sms and dims["cols"] > 16384:  # too few rows to fill the device: longer blocks of each
        return LossConfig(16384, 1, warps_of(32, arch), stages_of(16384, arch, dtype))
    return LossConfig(2048, 1, warps_of(4, arch), stages_of(2048, arch, dtype))


def default_vjp(dims, arch, dtype) -> LossConfig:
    """A default for a backward: whole rows if they are short, 16 elements per thread, else blocks of them. H200, bf16:
    0.94 to 0.95 of the copy rate from 256 to 4,000 classes. What was tried without gain: docs/log/losses.md."""
    if dims["cols"] > 4096:
        return LossConfig(2048, 1, 4, 1)
    config = held(dims, arch)
    if config.block >= 1024:
        config = config._replace(rows=1)
    return config._replace(num_warps=warps_of(max(1, config.block * config.rows // 512), arch))


def _dims(logits, *_) -> dict[str, int]:
    return {"rows": logits.numel() // logits.shape[-1], "cols": logits.shape[-1]}


def _dims_vjp(dloss, logits, *_) -> dict[str, int]:
    return _dims(logits)


SWEEPS = {"block": (2048, 4096, 8192, 16384, 32768), "rows": (1, 2, 4, 8, 16, 32), "num_warps": (1, 2, 4, 8, 16, 32)}
CROSS_ENTROPY_SPACE = Space(dims=_dims, default=_default, choices={**SWEEPS, "num_stages": (1, 2, 3, 4)})
CROSS_ENTROPY_VJP_SPACE = Space(dims=_dims_vjp, default=default_vjp, choices=SWEEPS)


@register_kernel(
    "cross_entropy",
    backend="triton",
    rank=20,
    rejects=_reasons,
    tells=lambda logits, *_, config: forward_tells(logits.shape[-1], config),
    plans=rehearsed,
)
@optimize_kernel(space=CROSS_ENTROPY_SPACE)
@cross_entropy_arguments
def cross_entropy(call, *, config: LossConfig) -> tuple[Tensor, Tensor, Tensor]:
    """One program per row or per tile of rows, then one launch for the sums."""
    logits, weight = call.logits, call.weight
    terms = Terms(call.ignore_index, call.label_smoothing, call.z_loss, call.scale, call.softcap)
    weight, labels = dense(weight), row_values(call.target)
    losses = logits.new_empty(call.target.shape, dtype=torch.float32)
    lse = torch.empty_like(losses)
    whole = call.reduction != "none"
    forward(config, rows_of(logits), labels, weight, losses, lse, None, terms, not whole, "")
    if not whole:
        return losses, lse, losses.new_empty(0)
    loss, divisors = reduce_tokens(losses, lse, labels, weight, logits.shape[-1], terms, call.reduction == "mean")
    return loss, lse, divisors


@register_kernel(
    "cross_entropy_vjp",
    backend="triton",
    rank=20,
    rejects=_reasons,
    tells=lambda dloss, logits, *_, config: backward_tells(logits.shape[-1], config),
    plans=rehearsed,
)
@optimize_kernel(space=CROSS_ENTROPY_VJP_SPACE)
@cross_entropy_vjp_arguments
def cross_entropy_vjp(call, *, config: LossConfig) -> Tensor:
    """One program per block of a row, or per tile of rows: logits are read once, and their gradient is written once."""
    dloss, logits = call.dloss, call.logits
    if not call.output_mask[0]:
        return logits.new_empty(0)
    terms = Terms(call.ignore_index, call.label_smoothing, call.z_loss, call.scale, call.softcap)
    dlogits = logits.new_empty(logits.shape)
    dloss = dloss.reshape(-1) if dloss.ndim else dloss
    divisors = call.divisors if call.reduction == "mean" else None
    backward(
        config, rows_of(logits), dlogits, row_values(call.target), dense(call.weight), call.lse.reshape(-1), dloss,
        divisors, terms,
    )  # fmt: skip
    return dlogits
