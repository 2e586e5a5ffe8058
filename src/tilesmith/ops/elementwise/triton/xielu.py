"""xielu in Triton: one elementwise kernel forward; backward the same with two sums, in partial sums of each program."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from tilesmith.device.rows import flat_rows
from tilesmith.device.triton.column_sums import add_partials
from tilesmith.engine import Space, cdiv, launch, next_power_of_2, optimize_kernel, register_kernel


class XieluConfig(NamedTuple):
    """block: elements that a program works on at once. programs: how many of a backward at most."""

    block: int
    num_warps: int
    programs: int


@triton.jit
def _expm1_less(v):
    """expm1(v) - v for v <= 0: near 0 by Taylor's series, whose rest is below fp32, since the difference cancels."""
    series = 1 / 362880 * v + 1 / 40320
    series = series * v + 1 / 5040
    series = series * v + 1 / 720
    series = series * v + 1 / 120
    series = series * v + 1 / 24
    series = series * v + 1 / 6
    series = series * v + 0.5
    return tl.where(v > -0.7, v * v * series, tl.exp(v) - 1 - v)


@triton.jit
def _softplus(alpha_ptr):
    """softplus and its derivative at a scalar; softplus(a) is max(a, 0) + log(1 + exp(-|a|))."""
    alpha = tl.load(alpha_ptr).to(tl.float32)
    small = tl.exp(-tl.abs(alpha))
    log = tl.where(small < 1e-4, small * (1 - 0.5 * small), tl.log(1 + small))
    return tl.where(alpha > 0, alpha, 0.0) + log, 1 / (1 + tl.exp(-alpha))


@triton.jit
def _sum(x):
    """The sum of up to 4,096 numbers, rounded a few times where a tree of sums rounds once a level: what comes of
    terms of both signs may be a hundredth of them. Numbers on a grid of 2^-12 of the largest add up exactly, and what
    lies between grid points is small."""
    top = tl.max(tl.max(tl.abs(x), 1), 0)
    far = tl.where(top < 1e30, top * 6144, 0.0)
    coarse = (x + far) - far
    return tl.sum(tl.sum(coarse, 1), 0) + tl.sum(tl.sum(x - coarse, 1), 0)


@triton.jit
def _places(step, num_rows, num_cols, BLOCK_ROWS: tl.constexpr, BLOCK_COLS: tl.constexpr):
    """int64 rows and columns of tile `step`, and which of them exist."""
    col_blocks = tl.cdiv(num_cols, BLOCK_COLS)
    tile = tl.cast(step, tl.int64)
    row = (tile // col_blocks) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)[:, None]
    col = (tile % col_blocks) * BLOCK_COLS + tl.arange(0, BLOCK_COLS)[None, :]
    return row, col, (row < num_rows) & (col < num_cols)


@triton.jit
def xielu_kernel(
    x_ptr, alpha_p_ptr, alpha_n_ptr, out_ptr, x_row, num_rows, num_cols, beta, eps,
    BLOCK_ROWS: tl.constexpr, BLOCK_COLS: tl.constexpr,
):  # fmt: skip
    """One tile."""
    p, _ = _softplus(alpha_p_ptr)
    n, _ = _softplus(alpha_n_ptr)
    row, col, mask = _places(tl.program_id(0), num_rows, num_cols, BLOCK_ROWS, BLOCK_COLS)
    x = tl.load(x_ptr + row * x_row + col, mask=mask, other=0.0).to(tl.float32)
    v = tl.where(x > eps, eps, x)
    out = tl.where(x > 0, p * x * x, (beta + n) * (_expm1_less(v) + (v - x))) + beta * x
    tl.store(out_ptr + row * num_cols + col, out, mask=mask)


@triton.jit
def xielu_vjp_kernel(
    dout_ptr, x_ptr, alpha_p_ptr, alpha_n_ptr, dx_ptr, dp_ptr, dn_ptr,
    dout_row, x_row, num_rows, num_cols, tiles, beta, eps,
    WANTS_DX: tl.constexpr, BLOCK_ROWS: tl.constexpr, BLOCK_COLS: tl.constexpr,
):  # fmt: skip
    """Every num_programs-th tile; each program writes one partial sum for each of the two slopes."""
    p, p_slope = _softplus(alpha_p_ptr)
    n, n_slope = _softplus(alpha_n_ptr)
    dp = tl.zeros([BLOCK_ROWS, BLOCK_COLS], tl.float32)
    dn = tl.zeros([BLOCK_ROWS, BLOCK_COLS], tl.float32)
    for step in range(tl.program_id(0), tiles, tl.num_programs(0)):
        row, col, mask = _places(step, num_rows, num_cols, BLOCK_ROWS, BLOCK_COLS)
        x = tl.load(x_ptr + row * x_row + col, mask=mask, other=0.0).to(tl.float32)
        dout = tl.load(dout_ptr + row * dout_row + col, mask=mask, other=0.0).to(tl.float32)
        v = tl.where(x > eps, eps, x)
        less = _expm1_less(v)
        if WANTS_DX:
            falling = tl.where(x > eps, -1.0, less + v)
            dx = dout * (tl.where(x > 0, 2 * p * x, (beta + n) * falling) + beta)
            tl.store(dx_ptr + row * num_cols + col, dx, mask=mask)
        dp += tl.where(x > 0, dout * x * x, 0.0)
        dn += tl.where(x > 0, 0.0, dout * (less + (v - x)))
    if dp_ptr is not None:
        tl.store(dp_ptr + tl.program_id(0), _sum(dp) * p_slope)
    if dn_ptr is not None:
        tl.store(dn_ptr + tl.program_id(0), _sum(dn) * n_slope)


def _tiles(x: Tensor, config: XieluConfig) -> tuple[int, dict[str, int]]:
    """The number of tiles, and their size."""
    num_rows, num_cols = x.shape
    block_cols = min(config.block, next_power_of_2(num_cols))
    block_rows = min(config.block // block_cols, next_power_of_2(num_rows))
    return cdiv(num_rows, block_rows) * cdiv(num_cols, block_cols), {"BLOCK_ROWS": block_rows, "BLOCK_COLS": block_cols}


def _reasons(call: Any) -> list[str]:
    return [
        f"{name} is float64; this kernel computes in float32"
        for name in ("x", "alpha_p", "alpha_n")
        if getattr(call, name).dtype == torch.float64
    ]


def _default(dims: Mapping[str, int], arch: Any, dtype: torch.dtype) -> XieluConfig:
    """Two 16-byte accesses a thread; programs as many as are resident at once. Not measured."""
    return XieluConfig(128 * 32 // dtype.itemsize, 4, 8 * max(arch.sms, 1))


_CHOICES = {"block": (1024, 2048, 4096), "num_warps": (4, 8)}


@register_kernel("xielu", backend="triton", rank=20, rejects=_reasons)
@optimize_kernel(space=Space(dims=lambda x, *_: {"elements": x.numel()}, default=_default, choices=_CHOICES))
def xielu(
    x: Tensor, alpha_p: Tensor, alpha_n: Tensor, beta: float = 0.5, eps: float = -1e-6, *, config: XieluConfig
) -> Tensor:
    """One program for each tile."""
    out = x.new_empty(x.shape)
    if x.numel():
        (flat,) = flat_rows(x)
        tiles, block = _tiles(flat, config)
        launch(
            xielu_kernel, (tiles,), flat, alpha_p, alpha_n, out, flat.stride(0), *flat.shape, beta, eps,
            num_warps=config.num_warps, **block,
        )  # fmt: skip
    return out


@register_kernel("xielu_vjp", backend="triton", rank=20, rejects=_reasons)
@optimize_kernel(
    space=Space(
        dims=lambda dout, x, *_: {"elements": x.numel()},
        default=_default,
        choices={**_CHOICES, "programs": (264, 528, 1056, 2112)},
    )
)
def xielu_vjp(
    dout: Tensor,
    x: Tensor,
    alpha_p: Tensor,
    alpha_n: Tensor,
    beta: float,
    eps: float,
    output_mask: Sequence[bool],
    *,
    config: XieluConfig,
) -> tuple[Tensor, Tensor, Tensor]:
    """Programs over the tiles, then the sums of their partial sums."""
    inputs = zip((x, alpha_p, alpha_n), output_mask)
    dx, dalpha_p, dalpha_n = (t.new_empty(t.shape if wanted else 0) for t, wanted in inputs)
    wants_x, wants_p, wants_n = output_mask
    tiles, block, flat_dout, flat = 0, {}, dout, x
    if x.numel():
        flat_dout, flat = flat_rows(dout, x)
        tiles, block = _tiles(flat, config)
    programs = min(tiles, config.programs)
    dp, dn = (x.new_empty(programs, 1, dtype=torch.float32) if wanted else None for wanted in (wants_p, wants_n))
    if programs and any(output_mask):
        launch(
            xielu_vjp_kernel, (programs,), flat_dout, flat, alpha_p, alpha_n, dx, dp, dn, flat_dout.stride(0),
            flat.stride(0), *flat.shape, tiles, beta, eps, WANTS_DX=wants_x, num_warps=config.num_warps, **block,
        )  # fmt: skip
    add_partials((dp, dn), (dalpha_p if wants_p else None, dalpha_n if wants_n else None))
    return dx, dalpha_p if wants_p else x.new_empty(0), dalpha_n if wants_n else x.new_empty(0)
