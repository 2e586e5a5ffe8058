"""Launchers of the norms in Triton, their configurations and what they refuse."""

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tilesmith.device.rows import (
    AT_ONCE,
    dense,
    empty_row_values,
    empty_rows,
    more_warps,
    row_order,
    row_steps,
    row_values,
    rows,
)
from tilesmith.device.triton.column_sums import add_partials, partial_rows
from tilesmith.engine import Space, cdiv, launch, next_power_of_2, optimize_kernel, register_kernel, rehearsed
from tilesmith.ops.norm.arguments import (
    Norm,
    NormGradient,
    add_layer_norm_arguments,
    add_layer_norm_vjp_arguments,
    add_rms_norm_arguments,
    add_rms_norm_vjp_arguments,
    gradient_of,
    layer_norm_arguments,
    layer_norm_vjp_arguments,
    norm_of,
    rms_norm_arguments,
    rms_norm_vjp_arguments,
)
from tilesmith.ops.norm.triton.norm_kernels import (
    norm_bwd_kernel,
    norm_bwd_rows_kernel,
    norm_fwd_kernel,
    norm_fwd_wide_kernel,
)


class ForwardConfig(NamedTuple):
    """tile: elements a program works on at once, in whole rows (at least one). block_cols: 0 holds rows in registers
    (up to MAX_HELD columns), else they are swept in blocks of so many columns by `num_stages` deep pipelines."""

    tile: int
    block_cols: int
    num_warps: int
    num_stages: int


class BackwardConfig(NamedTuple):
    """As ForwardConfig, where `tile` also counts the elements of a block of a wide row; programs: how many at most.
    max_registers: of a thread, so that `programs` are resident at once; 0 leaves it to the compiler."""

    tile: int
    block_cols: int
    num_warps: int
    num_stages: int
    programs: int
    max_registers: int


MOST_THREADS = 1024  # of a program
MAX_HELD = 32_768  # columns; registers spill before that, and compiling wider tiles takes minutes
SWEEP = 4_096  # columns of a block of the pass that finds the means of wide rows, by 8 warps of 32 lanes


class RowPlan(NamedTuple):
    """How rows of `cols` columns are divided into blocks."""

    cols: int
    block_rows: int
    block_cols: int

    @property
    def in_registers(self) -> bool:
        """Whether a block has whole rows, which are then read once; else a row is read twice, block by block."""
        return self.block_cols >= self.cols


def row_plan(cols: int, config: ForwardConfig | BackwardConfig) -> RowPlan:
    """The blocks of a configuration."""
    width = config.block_cols
    if not width or width >= cols:
        width = next_power_of_2(cols) if cols <= MAX_HELD else 8192
    return RowPlan(cols, max(1, config.tile // width), width)


def forward_tells(call, *, config: ForwardConfig) -> list[str]:
    """How a forward reads its rows."""
    plan = row_plan(call.x.shape[-1], config)
    if plan.in_registers:
        return [f"blocks of {plan.block_rows} x {plan.cols} are held in registers and read once"]
    return [
        f"rows of {plan.cols} columns are read twice, in blocks of {plan.block_cols}: statistics first, then the output"
    ]


def backward_tells(call, *, config: BackwardConfig) -> list[str]:
    """How a backward reads its rows."""
    norm = gradient_of(call)
    if norm.dy is None and "seed" not in call._fields:
        return ["no kernel: y has no gradient, so that of the residual is a copy of ds"]
    plan = row_plan(norm.x.shape[-1], config)
    if plan.in_registers:
        return [f"blocks of {plan.block_rows} x {plan.cols} are held in registers and read once"]
    told = [f"CTAs work on {plan.block_cols} columns of rows of {plan.cols}"]
    if norm.output_mask[0]:
        told.insert(0, f"the means over whole rows are computed before, which blocks of {plan.block_cols} columns lack")
    return told


def forward(norm: Norm, config: ForwardConfig, statistics: bool = True, **dropout: Any) -> tuple[Tensor | None, ...]:
    """(y, s, mean, rstd); s is None without a residual, mean is None for RMS norm. Without `statistics` mean and rstd
    are None: storing them takes 3 % of the time at 64 columns. dropout: its kernel arguments."""
    x, residual, weight, bias, eps, offset, center, llama, rounded, *_ = norm
    order = row_order(x)
    y = empty_rows(x, order)
    s = None if residual is None else empty_rows(x, order, residual.dtype)
    mean = empty_row_values(x, order, torch.float32) if center and statistics else None
    rstd = empty_row_values(x, order, torch.float32) if statistics else None
    x2, residual2 = rows(x, order), None if residual is None else rows(residual, order)
    count, cols = x2.shape
    plan = row_plan(cols, config)
    block_rows, block_cols = plan.block_rows, plan.block_cols
    if count:
        tensors = (x2, residual2, dense(weight), dense(bias), y, s, mean, rstd)
        numbers = (count, cols, x2.stride(0), 0 if residual2 is None else residual2.stride(0), eps, offset)
        flags = {"CENTER": center, "LLAMA": llama, "EVEN": cols % block_cols == 0, "BLOCK_COLS": block_cols}
        flags |= {"num_warps": config.num_warps, **dropout, **_heads(x, weight, order)}
        flags |= {"ROUNDED": True} if rounded else {}
        if not plan.in_registers:
            launch(norm_fwd_wide_kernel, (count,), *tensors, *numbers, STAGES=config.num_stages, **flags)
        else:
            launch(norm_fwd_kernel, (cdiv(count, block_rows),), *tensors, *numbers, BLOCK_ROWS=block_rows, **flags)
    return y, s, mean, rstd


def _heads(x: Tensor, weight: Tensor | None, order: tuple[int, ...] | None) -> dict[str, int]:
    """What kernels are told of a weight for each head."""
    if weight is None or weight.ndim == 1:
        return {}
    heads, inner = row_steps(x, order)
    return {"HEADS": heads, "INNER": inner}


def _backward(norm: NormGradient, config: BackwardConfig) -> tuple[Tensor, Tensor, Tensor]:
    """(dx, dweight, dbias), each empty where `output_mask` says it is not needed."""
    x, ds, order = norm.x, norm.ds, row_order(norm.x)
    dx = empty_rows(x, order) if norm.output_mask[0] else None
    dweight = torch.empty_like(norm.weight, memory_format=torch.contiguous_format) if norm.output_mask[1] else None
    dbias = torch.empty_like(norm.bias, memory_format=torch.contiguous_format) if norm.output_mask[2] else None
    if norm.dy is None:
        for sums in (dweight, dbias):
            if sums is not None:
                sums.zero_()
        if dx is not None:
            dx.zero_() if ds is None else dx.copy_(ds)
    else:
        launch_backward(norm, (dx, dweight, dbias), order, config)
    return tuple(x.new_empty(0) if t is None else t for t in (dx, dweight, dbias))


def launch_backward(
    norm: NormGradient,
    outs: tuple[Tensor | None, Tensor | None, Tensor | None],
    order: tuple[int, ...] | None,
    config: BackwardConfig,
    **dropout: Any,
) -> None:
    """Fill outs = (dx, dweight, dbias), of which those that are not wanted are None. order: of the rows in memory."""
    dy, ds, x, weight, _, mean, rstd, offset, _ = norm
    dx, dweight, dbias = outs
    by_head = _heads(x, weight, order)
    heads = max(1, by_head.get("HEADS", 1))
    x, dy = rows(x, order), rows(dy, order)
    ds = None if ds is None or dx is None else rows(ds, order)
    weight, rstd = dense(weight), row_values(rstd, order)
    mean = None if mean is None else row_values(mean, order)
    count, cols = x.shape
    plan = row_plan(cols, config)
    block_rows, block_cols = plan.block_rows, plan.block_cols
    dot = total = None
    if not plan.in_registers and dx is not None and count:
        dot = x.new_empty(count, dtype=torch.float32)
        total = None if mean is None else torch.empty_like(dot)
        launch(
            norm_bwd_rows_kernel, (count,), dy, x, weight, mean, rstd, dot, total,
            cols, dy.stride(0), x.stride(0), offset, BLOCK_COLS=SWEEP, STAGES=config.num_stages, num_warps=8,
            **by_head,
        )  # fmt: skip
    blocks = cdiv(cols, block_cols)
    # 4 rows each at least, so that partial sums stay a small part of the traffic
    partials = partial_rows(cdiv(count // heads, block_rows), blocks * heads, config.programs, cdiv(4, block_rows))
    sums = [None if t is None else t.new_empty(partials, t.numel(), dtype=torch.float32) for t in (dweight, dbias)]
    if count and (dx is not None or dweight is not None or dbias is not None):
        launch(
            norm_bwd_kernel, (blocks, partials, heads), dy, ds, x, weight, mean, rstd, dot, total, dx, *sums,
            count, cols, dy.stride(0), 0 if ds is None else ds.stride(0), x.stride(0), offset,
            EVEN=cols % block_cols == 0, BLOCK_ROWS=block_rows, BLOCK_COLS=block_cols, STAGES=config.num_stages,
            num_warps=config.num_warps, **({"maxnreg": config.max_registers} if config.max_registers else {}),
            # a product fused into the difference it enters is not what its mean was taken of: with one column or few,
            # where the gradient is 0 or nearly, rstd multiplies what is left of it
            enable_fp_fusion=mean is None or cols >= 64, **dropout, **by_head,
        )  # fmt: skip
    add_partials(tuple(sums), (None if dweight is None else dweight.view(-1), dbias))


def norm_reasons(call: Any) -> list[str]:
    return [
        f"{name} has dtype {facts.dtype}; these kernels serve float16, bfloat16 and float32"
        for name, facts in call._asdict().items()
        if getattr(facts, "dtype", None) not in (None, torch.float16, torch.bfloat16, torch.float32)
    ]


def norm_dims(like: Tensor, *read: Tensor | None) -> dict[str, int]:
    """rows and cols of `like`, and bytes: how many each column needs of the tensors read."""
    cols = like.shape[-1]
    return {
        "rows": like.numel() // cols,
        "cols": cols,
        "bytes": sum(t.element_size() for t in read if t is not None),
    }


def _stages(tile: int, dims: Mapping[str, int], arch: Any, per_sm: int, most: int) -> int:
    """Stages whose buffers (one fewer than stages) fit shared memory beside what reductions need. On AMD's GPUs, where
    tiles to come wait in registers, two."""
    if arch.kind == "hip":
        return 2
    return max(1, min(most, 1 + (arch.shared_memory // per_sm - 12_288) // (tile * dims["bytes"])))


def _narrowed(tile: int, dims: Mapping[str, int], programs: int) -> int:
    """`tile`, halved while it leaves programs without work."""
    while tile > 1024 and dims["rows"] * dims["cols"] < tile * programs:
        tile //= 2
    return tile


def forward_default(
    dims: Mapping[str, int], arch: Any, swept_from: int, most_idle: float = 1.0, each: int = 16
) -> ForwardConfig:
    """16 elements a thread (`each` up to 1,024 columns), 32 of wide rows, whole rows in registers: 0.96 to 0.99 of the
    copy rate (H200, bf16, 256 MB). Rows of `swept_from` columns, and those that leave more than `most_idle` of the
    lanes idle, are swept twice, 8 elements a thread, in blocks that leave few lanes idle: rms norm then reaches 0.98 to
    1.00 up to 32,768 columns."""
    lanes, cols = max(arch.warp, 16), dims["cols"]
    width = next_power_of_2(cols)
    if cols <= 2048 or (cols < swept_from and cols >= (1 - most_idle) * width):
        tile = max(width, _narrowed(2048, dims, max(arch.sms, 1)))
        each = each if cols <= 1024 else 16 if tile <= 4096 else 32
        return ForwardConfig(tile, 0, max(1, tile // each // lanes), 1)
    widest = min(8192 if cols > 16_384 else 4096, cols // 2)
    fits = [b for b in (8192, 4096, 2048) if b <= widest and -cols % b * 16 <= cols]
    block_cols = fits[0] if fits else 1024
    return ForwardConfig(block_cols, block_cols, block_cols // 8 // lanes, 1)


def few_rows(dims: Mapping[str, int], arch: Any) -> ForwardConfig | None:
    """A default for so few rows that a GPU works on all of them at once: none of them waits for others, and each is
    held, by 16 elements a thread, or 8 if that is faster (`device.rows.more_warps`). None for more rows. Figures:
    docs/log/norms.md."""
    lanes, width = max(arch.warp, 16), next_power_of_2(dims["cols"])
    if width > 16_384 or dims["rows"] * (width // 16 // lanes) > AT_ONCE * arch.sms:
        return None
    tile = max(width, 1024)
    warps, programs = max(1, tile // 16 // lanes), cdiv(dims["rows"], tile // width)
    most = min(tile // 8, MOST_THREADS) // lanes
    while warps < most and more_warps(programs, arch.sms, warps, tile // lanes // warps // 2, fixed=10):
        warps *= 2
    return ForwardConfig(tile, 0, warps, 1)


def backward_default(dims: Mapping[str, int], arch: Any, center: bool, three: bool = False) -> BackwardConfig:
    """A default for the backward: 16 elements per thread, so that the sums, a tile of x and one of dy stay in registers
    (ptxas, sm_90, 16-bit inputs): up to 8,192 columns for the two sums of layer norm and 16,384 for the one of RMS
    norm.

    three: ds is read too. Tiles of 8 elements per thread then keep more loads in flight, as for RMS norm up to 1,024
    columns; layer norm alone takes half the tile with half the warps. Figures: docs/log/norms.md.
    """
    lanes, sms, small = max(arch.warp, 16), max(arch.sms, 1), False
    halved = False
    if dims["cols"] > (8192 if center else 16_384):
        tile, block_cols = 4096, 1024
    else:
        width, block_cols = next_power_of_2(dims["cols"]), 0
        small = three or (not center and width <= 1024)
        halved = center and not three and width <= 2048 and dims["cols"] % 16 == 0
        # columns that no vector load divides need more registers for addresses
        most = 2048 if halved or dims["cols"] % 16 else 4096
        tile = max(width, 1024 if small else _narrowed(most, dims, 2 * sms))
    threads = max(min(512 if three and not block_cols else 256, tile // 8), tile // 16)
    if halved and tile == 2048:
        threads = 128
    per_sm = max(1, 512 // threads)
    return BackwardConfig(
        tile=tile,
        block_cols=block_cols,
        num_warps=max(1, threads // lanes),
        num_stages=_stages(tile, dims, arch, per_sm, 4 if small or per_sm == 1 else 3),
        programs=per_sm * sms,
        max_registers=min(255, arch.registers // (threads * per_sm)) if arch.kind == "cuda" else 0,
    )


FORWARD_CHOICES = {
    "tile": (2048, 4096, 8192),
    "block_cols": (0, 1024, 2048, 4096, 8192),
    "num_warps": (4, 8, 16, 32),
    "num_stages": (1, 2),
}
BACKWARD_CHOICES = {
    "tile": (2048, 4096, 8192),
    "block_cols": (0, 512, 1024),
    "num_warps": (4, 8, 16, 32),
    "num_stages": (2, 3, 4),
    "programs": (132, 264, 396, 528),
    "max_registers": (0,),
}


@register_kernel(
    "rms_norm",
    backend="triton",
    rank=20,
    rejects=norm_reasons,
    tells=rms_norm_arguments(forward_tells),
    plans=rehearsed,
)
@optimize_kernel(
    space=Space(
        dims=lambda x, weight, eps, offset, casting: norm_dims(x, x, weight),
        # few rows are held where many would be swept; others are held anyway
        default=lambda dims, arch, dtype: (
            (few_rows(dims, arch) if dims["cols"] >= 4096 else None) or forward_default(dims, arch, swept_from=4096)
        ),
        choices=FORWARD_CHOICES,
    )
)
@rms_norm_arguments
def rms_norm(call, *, config: ForwardConfig, hidden: bool = True) -> tuple[Tensor, Tensor]:
    """y and rstd of `rms_norm`."""
    y, _, _, rstd = forward(norm_of(call), config, hidden)
    return y, rstd


@register_kernel(
    "rms_norm_vjp",
    backend="triton",
    rank=20,
    rejects=norm_reasons,
    tells=rms_norm_vjp_arguments(backward_tells),
    plans=rehearsed,
)
@optimize_kernel(
    space=Space(
        dims=lambda dy, x, weight, rstd, offset, output_mask: norm_dims(x, dy, x, weight),
        default=lambda dims, arch, dtype: backward_default(dims, arch, center=False),
        choices=BACKWARD_CHOICES,
    )
)
@rms_norm_vjp_arguments
def rms_norm_vjp(call, *, config: BackwardConfig) -> tuple[Tensor, Tensor]:
    """dx and dweight of `rms_norm`."""
    return _backward(gradient_of(call), config)[:2]


@register_kernel(
    "layer_norm",
    backend="triton",
    rank=20,
    rejects=norm_reasons,
    tells=layer_norm_arguments(forward_tells),
    plans=rehearsed,
)
@optimize_kernel(
    space=Space(
        dims=lambda x, weight, bias, eps: norm_dims(x, x, weight, bias),
        # fewer warps, which wait for each other twice: 128 columns 131 us (16 elements a thread: 136), 512 67 (70); not
        # at 2,048, 67.5 (65.9)
        default=lambda dims, arch, dtype: (
            few_rows(dims, arch) or forward_default(dims, arch, swept_from=16_384, most_idle=0.25, each=32)
        ),
        choices=FORWARD_CHOICES,
    )
)
@layer_norm_arguments
def layer_norm(call, *, config: ForwardConfig, hidden: bool = True) -> tuple[Tensor, Tensor, Tensor]:
    """y, mean and rstd of `layer_norm`."""
    y, _, mean, rstd = forward(norm_of(call), config, hidden)
    return y, mean, rstd


@register_kernel(
    "layer_norm_vjp",
    backend="triton",
    rank=20,
    rejects=norm_reasons,
    tells=layer_norm_vjp_arguments(backward_tells),
    plans=rehearsed,
)
@optimize_kernel(
    space=Space(
        dims=lambda dy, x, weight, bias, mean, rstd, output_mask: norm_dims(x, dy, x, weight),
        default=lambda dims, arch, dtype: backward_default(dims, arch, center=True),
        choices=BACKWARD_CHOICES,
    )
)
@layer_norm_vjp_arguments
def layer_norm_vjp(call, *, config: BackwardConfig) -> tuple[Tensor, Tensor, Tensor]:
    """dx, dweight and dbias of `layer_norm`."""
    return _backward(gradient_of(call), config)


@register_kernel(
    "add_rms_norm",
    backend="triton",
    rank=20,
    rejects=norm_reasons,
    tells=add_rms_norm_arguments(forward_tells),
    plans=rehearsed,
)
@optimize_kernel(
    space=Space(
        dims=lambda x, residual, weight, eps, offset, casting: norm_dims(x, x, residual, weight),
        default=lambda dims, arch, dtype: forward_default(dims, arch, swept_from=MAX_HELD),
        choices=FORWARD_CHOICES,
    )
)
@add_rms_norm_arguments
def add_rms_norm(call, *, config: ForwardConfig, hidden: bool = True) -> tuple[Tensor, Tensor, Tensor]:
    """y, s and rstd of `add_rms_norm`."""
    y, s, _, rstd = forward(norm_of(call), config, hidden)
    return y, s, rstd


@register_kernel(
    "add_rms_norm_vjp",
    backend="triton",
    rank=20,
    rejects=norm_reasons,
    tells=add_rms_norm_vjp_arguments(backward_tells),
    plans=rehearsed,
)
@optimize_kernel(
    space=Space(
        dims=lambda dy, ds, s, weight, rstd, offset, output_mask: norm_dims(s, dy, ds, s, weight),
        default=lambda dims, arch, dtype: backward_default(dims, arch, center=False, three=True),
        choices=BACKWARD_CHOICES,
    )
)
@add_rms_norm_vjp_arguments
def add_rms_norm_vjp(call, *, config: BackwardConfig) -> tuple[Tensor, Tensor]:
    """dresidual and dweight of `add_rms_norm`."""
    return _backward(gradient_of(call), config)[:2]


@register_kernel(
    "add_layer_norm",
    backend="triton",
    rank=20,
    rejects=norm_reasons,
    tells=add_layer_norm_arguments(forward_tells),
    plans=rehearsed,
)
@optimize_kernel(
    space=Space(
        dims=lambda x, residual, weight, bias, eps: norm_dims(x, x, residual, weight, bias),
        default=lambda dims, arch, dtype: forward_default(dims, arch, swept_from=MAX_HELD),
        choices=FORWARD_CHOICES,
    )
)
@add_layer_norm_arguments
def add_layer_norm(call, *, config: ForwardConfig, hidden: bool = True) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """y, s, mean and rstd of `add_layer_norm`."""
    return forward(norm_of(call), config, hidden)


@register_kernel(
    "add_layer_norm_vjp",
    backend="triton",
    rank=20,
    rejects=norm_reasons,
    tells=add_layer_norm_vjp_arguments(backward_tells),
    plans=rehearsed,
)
@optimize_kernel(
    space=Space(
        dims=lambda dy, ds, s, weight, bias, mean, rstd, output_mask: norm_dims(s, dy, ds, s, weight),
        default=lambda dims, arch, dtype: backward_default(dims, arch, center=True, three=True),
        choices=BACKWARD_CHOICES,
    )
)
@add_layer_norm_vjp_arguments
def add_layer_norm_vjp(call, *, config: BackwardConfig) -> tuple[Tensor, Tensor, Tensor]:
    """dresidual, dweight and dbias of `add_layer_norm`."""
    return _backward(gradient_of(call), config)
