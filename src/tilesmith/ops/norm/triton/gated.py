"""rms_norm_gated in Triton: rows in registers, read once, forward and backward."""

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from tilesmith.device.rows import dense, rows
from tilesmith.device.triton.activations import activate
from tilesmith.device.triton.column_sums import add_partials, partial_rows
from tilesmith.engine import Space, cdiv, launch, next_power_of_2, optimize_kernel, register_kernel, rehearsed

MAX_COLUMNS = 8192  # a backward holds rows of x, gate and dy, and a row of sums, in registers


class GatedConfig(NamedTuple):
    """tile: elements that a program works on at once, in whole rows (at least one). programs: how many of a backward at
    most."""

    tile: int
    num_warps: int
    programs: int


@triton.jit
def _mean(total, cols):
    """total / cols; exact for one column, where rstd would multiply the error that Triton's `/` leaves."""
    return total * (1.0 / cols)


@triton.jit
def _round(value, like_ptr):
    """fp32 `value` as it reads back after a store through `like_ptr`."""
    return value.to(like_ptr.dtype.element_ty).to(tl.float32)


@triton.jit
def rms_norm_gated_kernel(
    x_ptr, gate_ptr, weight_ptr, y_ptr, rstd_ptr, rows, cols, x_stride, gate_stride, eps,
    ACTIVATION: tl.constexpr, GATE_FIRST: tl.constexpr, LLAMA: tl.constexpr,
    BLOCK_ROWS: tl.constexpr, BLOCK_COLS: tl.constexpr,
):  # fmt: skip
    """A tile of whole rows of one group, which is the program's second number."""
    group, groups = tl.program_id(1), tl.num_programs(1)
    row = (tl.program_id(0).to(tl.int64) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS))[:, None]
    col = tl.arange(0, BLOCK_COLS)[None, :]
    inside = (row < rows) & (col < cols)
    place = group * cols + col
    x = tl.load(x_ptr + row * x_stride + place, mask=inside, other=0.0).to(tl.float32)
    gate = tl.load(gate_ptr + row * gate_stride + place, mask=inside, other=0.0).to(tl.float32)
    opening, _ = activate(gate, ACTIVATION)
    if GATE_FIRST:
        x *= opening
    rstd = tl.rsqrt(_mean(tl.sum(x * x, 1, keep_dims=True), cols) + eps)
    tl.store(rstd_ptr + row * groups + group, rstd, mask=row < rows)
    n = x * rstd
    if LLAMA:
        n = _round(n, y_ptr)
    if weight_ptr is not None:
        n *= tl.load(weight_ptr + place, mask=col < cols, other=0.0).to(tl.float32)
        if LLAMA:
            n = _round(n, y_ptr)
    if not GATE_FIRST:
        n *= opening
    tl.store(y_ptr + row * cols * groups + place, n, mask=inside)


@triton.jit
def rms_norm_gated_vjp_kernel(
    dy_ptr, x_ptr, gate_ptr, weight_ptr, rstd_ptr, dx_ptr, dgate_ptr, dweight_ptr,
    rows, cols, dy_stride, x_stride, gate_stride,
    ACTIVATION: tl.constexpr, GATE_FIRST: tl.constexpr, BLOCK_ROWS: tl.constexpr, BLOCK_COLS: tl.constexpr,
):  # fmt: skip
    """Every num_programs-th tile of rows of one group; each program writes its part of one partial row of dweight."""
    group, groups = tl.program_id(1), tl.num_programs(1)
    lane = tl.arange(0, BLOCK_ROWS)[:, None]
    col = tl.arange(0, BLOCK_COLS)[None, :]
    place = group * cols + col
    weight = 1.0
    if weight_ptr is not None:
        weight = tl.load(weight_ptr + place, mask=col < cols, other=0.0).to(tl.float32)
    dweight = tl.zeros([BLOCK_ROWS, BLOCK_COLS], tl.float32)
    for step in range(tl.program_id(0), tl.cdiv(rows, BLOCK_ROWS), tl.num_programs(0)):
        row = tl.cast(step, tl.int64) * BLOCK_ROWS + lane
        inside = (row < rows) & (col < cols)
        x = tl.load(x_ptr + row * x_stride + place, mask=inside, other=0.0).to(tl.float32)
        gate = tl.load(gate_ptr + row * gate_stride + place, mask=inside, other=0.0).to(tl.float32)
        dy = tl.load(dy_ptr + row * dy_stride + place, mask=inside, other=0.0).to(tl.float32)
        rstd = tl.load(rstd_ptr + row * groups + group, mask=row < rows, other=0.0)
        opening, slope = activate(gate, ACTIVATION)
        out = row * cols * groups + place
        if GATE_FIRST:
            xhat = x * opening * rstd
            dn = dy
        else:
            xhat = x * rstd
            dn = dy * opening
            if dgate_ptr is not None:
                tl.store(dgate_ptr + out, dy * (xhat * weight) * slope, mask=inside)
        if dweight_ptr is not None:
            dweight += dn * xhat
        if dx_ptr is not None or (GATE_FIRST and dgate_ptr is not None):
            dxhat = dn * weight
            dot = _mean(tl.sum(dxhat * xhat, 1, keep_dims=True), cols)
            dh = (dxhat - xhat * dot) * rstd
            if GATE_FIRST:
                if dgate_ptr is not None:
                    tl.store(dgate_ptr + out, dh * x * slope, mask=inside)
                dh *= opening
            if dx_ptr is not None:
                tl.store(dx_ptr + out, dh, mask=inside)
    if dweight_ptr is not None:
        partial = tl.program_id(0).to(tl.int64) * cols * groups + place
        tl.store(dweight_ptr + partial, tl.sum(dweight, 0, keep_dims=True), mask=col < cols)


def _block(cols: int, config: GatedConfig) -> dict[str, int]:
    width = next_power_of_2(cols)
    return {"BLOCK_ROWS": max(1, config.tile // width), "BLOCK_COLS": width}


def _reasons(call: Any) -> list[str]:
    reasons = [
        f"{name} has dtype {facts.dtype}; this kernel serves float16, bfloat16 and float32"
        for name, facts in call._asdict().items()
        if getattr(facts, "dtype", None) not in (None, torch.float16, torch.bfloat16, torch.float32)
    ]
    cols = call.x.cols // call.groups
    if cols > MAX_COLUMNS:
        reasons.append(f"a group of x has {cols} columns; up to {MAX_COLUMNS} are held in registers")
    return reasons


def _dims(x: Tensor, groups: int) -> dict[str, int]:
    return {"rows": x.numel() // x.shape[-1] * groups, "cols": x.shape[-1] // groups}


def _default(dims: Mapping[str, int], arch: Any, dtype: torch.dtype, each: int, least: int) -> GatedConfig:
    """`each` elements a thread, tiles of at least `least`; not measured."""
    tile = max(next_power_of_2(dims["cols"]), least)
    return GatedConfig(tile, max(1, min(16, tile // each // max(arch.warp, 16))), 4 * max(arch.sms, 1))


def _tells(cols: int, config: GatedConfig) -> list[str]:
    return [f"blocks of {_block(cols, config)['BLOCK_ROWS']} x {cols} are held in registers and read once"]


_CHOICES = {"tile": (1024, 2048, 4096, 8192), "num_warps": (2, 4, 8, 16)}


@register_kernel(
    "rms_norm_gated",
    backend="triton",
    rank=20,
    rejects=_reasons,
    tells=lambda x, *rest, config: _tells(x.shape[-1] // rest[-1], config),
    plans=rehearsed,
)
@optimize_kernel(
    space=Space(
        dims=lambda x, *rest: _dims(x, rest[-1]),
        default=lambda dims, arch, dtype: _default(dims, arch, dtype, each=16, least=2048),
        choices=_CHOICES,
    )
)
def rms_norm_gated(
    x: Tensor,
    gate: Tensor,
    weight: Tensor | None = None,
    eps: float = 1e-6,
    casting: str = "fp32",
    activation: str = "silu",
    gate_first: bool = False,
    groups: int = 1,
    *,
    config: GatedConfig,
) -> tuple[Tensor, Tensor]:
    """One program for each tile of rows of a group."""
    y = x.new_empty(x.shape)
    rstd = x.new_empty((*x.shape[:-1], groups), dtype=torch.float32)
    x2, gate2 = rows(x), rows(gate)
    count, cols = x2.shape[0], x2.shape[1] // groups
    if count:
        block = _block(cols, config)
        grid = cdiv(count, block["BLOCK_ROWS"]), groups
        launch(
            rms_norm_gated_kernel, grid, x2, gate2, dense(weight), y, rstd, count, cols, x2.stride(0), gate2.stride(0),
            eps, ACTIVATION=activation, GATE_FIRST=gate_first, LLAMA=casting == "llama", num_warps=config.num_warps,
            **block,
        )  # fmt: skip
    return y, rstd


@register_kernel(
    "rms_norm_gated_vjp",
    backend="triton",
    rank=20,
    rejects=_reasons,
    tells=lambda dy, x, *rest, config: _tells(x.shape[-1] // rest[-2], config),
    plans=rehearsed,
)
@optimize_kernel(
    space=Space(
        dims=lambda dy, x, *rest: _dims(x, rest[-2]),
        default=lambda dims, arch, dtype: _default(dims, arch, dtype, each=8, least=1024),
        choices={**_CHOICES, "programs": (132, 264, 528, 1056)},
    )
)
def rms_norm_gated_vjp(
    dy: Tensor,
    x: Tensor,
    gate: Tensor,
    weight: Tensor | None,
    rstd: Tensor,
    activation: str,
    gate_first: bool,
    groups: int,
    output_mask: list[bool],
    *,
    config: GatedConfig,
) -> tuple[Tensor, Tensor, Tensor]:
    """Persistent programs over the tiles, then the sum of their partial rows."""
    inputs = zip((x, gate, x if weight is None else weight), output_mask)
    dx, dgate, dweight = (t.new_empty(t.shape) if wanted else None for t, wanted in inputs)
    dy2, x2, gate2 = rows(dy), rows(x), rows(gate)
    count, cols = x2.shape[0], x2.shape[1] // groups
    block = _block(cols, config)
    programs = partial_rows(cdiv(count, block["BLOCK_ROWS"]), groups, config.programs, 1)
    sums = None if dweight is None else x.new_empty(programs, x2.shape[1], dtype=torch.float32)
    if count and any(output_mask):
        launch(
            rms_norm_gated_vjp_kernel, (programs, groups), dy2, x2, gate2, dense(weight), rstd.reshape(-1), dx, dgate,
            sums, count, cols, dy2.stride(0), x2.stride(0), gate2.stride(0), ACTIVATION=activation,
            GATE_FIRST=gate_first, num_warps=config.num_warps, **block,
        )  # fmt: skip
    add_partials((sums, None), (dweight, None))
    dx, dgate, dweight = (x.new_empty(0) if t is None else t for t in (dx, dgate, dweight))
    return dx, dgate, dweight
