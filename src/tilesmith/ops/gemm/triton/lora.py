"""Low-rank adapters of linear layers in Triton, around base products by the device's library.

Forward: z = x · Aᵀ in parts of the features, then y += scale · z · Bᵀ in one pass over y. Backward: the same two with
dy, Bᵀ and A, and one launch for the gradients of both factors. All sums are in a fixed order.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from tilesmith.device.rows import rows
from tilesmith.device.triton.column_sums import add_partials, partial_rows
from tilesmith.engine import Space, cdiv, launch, next_power_of_2, optimize_kernel, register_kernel
from tilesmith.hardware.detect import arch_of
from tilesmith.ops.gemm.products import gradients, product

MOST_RANK = 256
PARTS = 8  # of the features at most: every tile of y reads them all again
LEAST_FEATURES = 512  # of a part: four steps, which hide some of the latency of loads
LEAST_ROWS = 512  # of a strip of rows, so that its partial sums are little beside what it reads
PIECE = 32  # columns of rank at a time where both operands are fp32


@triton.jit
def _multiply(data, factor, acc):
    """acc + data · factor, which keeps the bits of an fp32 factor: three bf16 numbers beside bf16 data, whose products
    are exact, else in fp32."""
    if data.dtype == factor.dtype and data.dtype != tl.float32:
        return tl.dot(data, factor, acc)
    factor = factor.to(tl.float32)
    if data.dtype == tl.bfloat16:
        first = factor.to(tl.bfloat16)
        rest = factor - first.to(tl.float32)
        second = rest.to(tl.bfloat16)
        third = (rest - second.to(tl.float32)).to(tl.bfloat16)
        part = tl.dot(data, third)
        part = tl.dot(data, second, part)
        # tensor cores round their sums towards zero: each step starts anew
        return acc + tl.dot(data, first, part)
    return tl.dot(data.to(tl.float32), factor, acc, input_precision="ieee")


@triton.jit
def _multiply_to_16_bits(z, factor, acc):
    """acc + z · factor of fp32 operands to 16 bits: each is two bf16 numbers, the product of the second ones is left
    out."""
    z_first, factor_first = z.to(tl.bfloat16), factor.to(tl.bfloat16)
    z_second = (z - z_first.to(tl.float32)).to(tl.bfloat16)
    factor_second = (factor - factor_first.to(tl.float32)).to(tl.bfloat16)
    acc = tl.dot(z_second, factor_first, acc)
    acc = tl.dot(z_first, factor_second, acc)
    return tl.dot(z_first, factor_first, acc)


@triton.jit
def _project_kernel(
    x_ptr, factor_ptr, out_ptr, m, k, r, x_row, factor_rank, factor_col, each, scale,
    BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_R: tl.constexpr,
):  # fmt: skip
    """out [parts, m, r] = scale · x [m, k] · factorᵀ [k, r]: a part is the sum over `each` of the k columns."""
    part = tl.program_id(1)
    row = (tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M))[:, None]
    rank, inner = tl.arange(0, BLOCK_R)[None, :], tl.arange(0, BLOCK_K)
    acc = tl.zeros((BLOCK_M, BLOCK_R), tl.float32)
    first = part * each
    last = tl.minimum(first + each, k)
    for start in range(first, last, BLOCK_K):
        col = start + inner
        x = tl.load(x_ptr + (row * x_row + col[None, :]), mask=(row < m) & (col < last)[None, :], other=0.0)
        at = col.to(tl.int64)[:, None] * factor_col + rank * factor_rank
        factor = tl.load(factor_ptr + at, mask=(col < last)[:, None] & (rank < r), other=0.0)
        acc = _multiply(x, factor, acc)
    out = out_ptr + (part.to(tl.int64) * m * r + row * r + rank)
    tl.store(out, acc * scale, mask=(row < m) & (rank < r))


@triton.jit
def _expand_kernel(
    part_ptr, factor_ptr, y_ptr, sum_ptr, m, n, r, parts, factor_rank, factor_col, scale,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_R: tl.constexpr, KEEPS: tl.constexpr,
    ADDS: tl.constexpr,
):  # fmt: skip
    """y [m, n] += scale · z · factor [r, n] in place, or = unless ADDS; z [m, r] is the sum of the parts, which is
    written where KEEPS."""
    tiles_n = tl.cdiv(n, BLOCK_N)
    tile_m, tile_n = tl.program_id(0) // tiles_n, tl.program_id(0) % tiles_n
    row = (tile_m.to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M))[:, None]
    col = (tile_n.to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N))[None, :]
    inside = (row < m) & (col < n)
    if ADDS:
        y = tl.load(y_ptr + (row * n + col), mask=inside, other=0.0)
    acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for start in range(0, r, BLOCK_R):
        rank = start + tl.arange(0, BLOCK_R)
        at, there = row * r + rank[None, :], (row < m) & (rank < r)[None, :]
        z = tl.load(part_ptr + at, mask=there, other=0.0)
        for part in range(1, parts):
            z += tl.load(part_ptr + (tl.cast(part, tl.int64) * m * r + at), mask=there, other=0.0)
        if KEEPS:
            if tile_n == 0:
                tl.store(sum_ptr + at, z, mask=there)
        at = rank.to(tl.int64)[:, None] * factor_rank + col * factor_col
        factor = tl.load(factor_ptr + at, mask=(rank < r)[:, None] & (col < n), other=0.0).to(tl.float32)
        if y_ptr.dtype.element_ty == tl.bfloat16:
            acc = _multiply_to_16_bits(z, factor, acc)
        else:
            acc = _multiply(z, factor, acc)
    out = acc * scale
    if ADDS:
        out += y.to(tl.float32)
    tl.store(y_ptr + (row * n + col), out.to(y_ptr.dtype.element_ty), mask=inside)


@triton.jit
def _sum_over_rows(
    x_ptr, z_ptr, out_ptr, block, m, n, r, x_row, out_rank, out_col, each, scale,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_R: tl.constexpr,
):  # fmt: skip
    """out[strip] [n, r] = scale · xᵀ · z over the strip's `each` rows of x [m, n] and z [m, r], for a block of columns
    of x and one of z."""
    strip = tl.program_id(1)
    col = block.to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    rank = tl.program_id(2) * BLOCK_R + tl.arange(0, BLOCK_R)
    acc = tl.zeros((BLOCK_N, BLOCK_R), tl.float32)
    first = strip * each
    last = tl.minimum(first + each, m)
    for start in range(first, last, BLOCK_M):
        row = (start + tl.arange(0, BLOCK_M)).to(tl.int64)[:, None]
        x = tl.load(x_ptr + (row * x_row + col[None, :]), mask=(row < last) & (col < n)[None, :], other=0.0)
        z = tl.load(z_ptr + (row * r + rank[None, :]), mask=(row < last) & (rank < r)[None, :], other=0.0)
        acc = _multiply(tl.trans(x), z, acc)
    at = strip.to(tl.int64) * n * r + col[:, None] * out_col + rank[None, :] * out_rank
    value = (acc * scale).to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + at, value, mask=(col < n)[:, None] & (rank < r)[None, :])


@triton.jit
def _factor_gradients_kernel(
    x_ptr, dz_ptr, da_ptr, dy_ptr, z_ptr, db_ptr, m, k, n, r, x_row, dy_row, blocks, each, scale,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_R: tl.constexpr,
):  # fmt: skip
    """da [strips, r, k] = dzᵀ · x by the first `blocks` programs, db [strips, n, r] = scale · dyᵀ · z by the others."""
    block = tl.program_id(0)
    if block < blocks:
        _sum_over_rows(x_ptr, dz_ptr, da_ptr, block, m, k, r, x_row, k, 1, each, 1.0, BLOCK_M, BLOCK_N, BLOCK_R)
    else:
        _sum_over_rows(
            dy_ptr, z_ptr, db_ptr, block - blocks, m, n, r, dy_row, 1, r, each, scale,
            BLOCK_M, BLOCK_N, BLOCK_R,
        )  # fmt: skip


class LoraConfig(NamedTuple):
    """expand_m, expand_n: the tile of a pass over y. sum_m, sum_n: rows and columns of a step of the sum over rows.
    block_k: features of a step of a projection of rank 16 to 32; fewer at higher ones."""

    expand_m: int
    expand_n: int
    expand_warps: int
    sum_m: int
    sum_n: int
    block_k: int
    num_warps: int
    num_stages: int


def _default(dims: Mapping[str, int], arch: Any, dtype: torch.dtype) -> LoraConfig:
    return LoraConfig(32, 128, 8, 64, 64, 128, num_warps=4, num_stages=3)


def _dims(x: Tensor, weight: Tensor | None, lora_a: Tensor, lora_b: Tensor, *_: object) -> dict[str, int]:
    return {
        "rows": x.numel() // max(1, x.shape[-1]), "features": x.shape[-1], "outputs": lora_b.shape[0],
        "rank": lora_a.shape[0],
    }  # fmt: skip


CHOICES = {"expand_m": (32, 64, 128), "expand_n": (64, 128), "sum_m": (32, 64, 128), "num_stages": (2, 3, 4)}
SPACE = Space(dims=_dims, default=_default, choices=CHOICES)
VJP_SPACE = Space(dims=lambda dy, *args: _dims(*args), default=_default, choices=CHOICES)


def _reasons(call: Any) -> list[str]:
    named = {name: getattr(call, name) for name in ("x", "lora_a", "lora_b")}
    found = [f"{name} is float64; this kernel sums in float32" for name, t in named.items() if t.dtype == torch.float64]
    if call.lora_b.cols > MOST_RANK:
        found.append(f"the rank is {call.lora_b.cols}; up to {MOST_RANK} are supported")
    return found


def _split(m: int, k: int, block_r: int, device: torch.device) -> tuple[int, int]:
    """(rows of a tile, parts of the features) of a projection.

    A tile reads all of the factor, so it has rows that read as much as that, 2 · r of 16 bits; fewer, and more parts,
    where they would leave multiprocessors idle.
    """
    sms, most = max(1, arch_of(device).sms), max(1, min(PARTS, k // LEAST_FEATURES))
    block_m = min(64, max(16, 2 * block_r))
    while block_m > 16 and cdiv(m, block_m) * most < sms:
        block_m //= 2
    return block_m, max(1, min(most, 2 * sms // cdiv(m, block_m)))


def _project(x: Tensor, factor: Tensor, scale: float, config: LoraConfig, whole: bool) -> Tensor:
    """scale · x [M, K] · factorᵀ [K, R] as [parts, M, R] fp32, parts to be added; one if `whole`."""
    (m, k), r = x.shape, factor.shape[0]
    block_r = max(16, next_power_of_2(r))
    block_m, parts = _split(m, k, block_r, x.device)
    block_k = min(config.block_k, max(16, 4096 // block_r), max(16, next_power_of_2(k)))
    each = cdiv(cdiv(k, 1 if whole else parts), block_k) * block_k
    parts = cdiv(k, each)
    out = x.new_empty((parts, m, r), dtype=torch.float32)
    launch(
        _project_kernel, (cdiv(m, block_m), parts),
        x, factor, out, m, k, r, x.stride(0), *factor.stride(), each, float(scale),
        BLOCK_M=block_m, BLOCK_K=block_k, BLOCK_R=block_r,
        num_warps=config.num_warps, num_stages=config.num_stages,
    )  # fmt: skip
    return out


def _expand(y: Tensor, parts: Tensor, factor: Tensor, scale: float, config: LoraConfig, adds: bool) -> Tensor:
    """y [M, N], contiguous, += scale · z · factor [R, N] in place, or = unless `adds`. Returns z [M, R], the sum of
    `parts`."""
    (m, n), r = y.shape, factor.shape[0]
    keeps = parts.shape[0] > 1
    z = torch.empty_like(parts[0]) if keeps else parts[0]
    block_m = min(config.expand_m, max(16, next_power_of_2(m)))
    block_n = min(config.expand_n, max(16, next_power_of_2(n)))
    launch(
        _expand_kernel, (cdiv(m, block_m) * cdiv(n, block_n),),
        parts, factor, y, z, m, n, r, parts.shape[0], *factor.stride(), float(scale),
        BLOCK_M=block_m, BLOCK_N=block_n, BLOCK_R=max(16, min(PIECE, next_power_of_2(r))), KEEPS=keeps,
        ADDS=adds, num_warps=config.expand_warps,
    )  # fmt: skip
    return z


def _factor_gradients(
    x: Tensor, dy: Tensor, dz: Tensor, z: Tensor, outs: tuple[Tensor | None, Tensor | None], scale: float,
    config: LoraConfig,
) -> None:  # fmt: skip
    """The gradients of both factors, [R, K] and [N, R], into `outs`; None for one that is not wanted."""
    (m, k), n, r = x.shape, dy.shape[1], z.shape[1]
    block_m = min(config.sum_m, max(16, next_power_of_2(m)))
    block_n = config.sum_n
    blocks = cdiv(k, block_n) if outs[0] is not None else 0
    programs = blocks + (cdiv(n, block_n) if outs[1] is not None else 0)
    block_r = max(16, min(64, next_power_of_2(r)))
    pieces, tiles = cdiv(r, block_r), cdiv(m, block_m)
    # four CTAs a multiprocessor have as many bytes in flight as its share of the bandwidth asks for
    strips = partial_rows(tiles, programs * pieces, 4 * max(1, arch_of(x.device).sms), cdiv(LEAST_ROWS, block_m))
    written = outs
    if strips > 1:
        partials = [None if o is None else x.new_empty((strips, o.numel()), dtype=torch.float32) for o in outs]
        written = partials[0], partials[1]
    launch(
        _factor_gradients_kernel, (programs, strips, pieces),
        x, dz, written[0], dy, z, written[1], m, k, n, r, x.stride(0), dy.stride(0), blocks,
        cdiv(tiles, strips) * block_m, float(scale),
        BLOCK_M=block_m, BLOCK_N=block_n, BLOCK_R=block_r,
        num_warps=config.num_warps, num_stages=config.num_stages,
    )  # fmt: skip
    if strips > 1:
        add_partials(written, tuple(None if o is None else o.view(-1) for o in outs))


@register_kernel("lora_linear", backend="triton", rank=20, rejects=_reasons)
@optimize_kernel(space=SPACE)
def lora_linear(
    x: Tensor,
    weight: Tensor | None,
    lora_a: Tensor,
    lora_b: Tensor,
    bias: Tensor | None = None,
    scale: float = 1.0,
    *,
    config: LoraConfig,
) -> tuple[Tensor, Tensor]:
    """The library's product, if there is a weight, and two launches."""
    packed, (n, r), lead = rows(x), lora_b.shape, x.shape[:-1]
    y = packed.new_empty((packed.shape[0], n)) if weight is None else product(packed, weight, bias)
    if 0 in (*packed.shape, n, r):
        y = y.zero_() if weight is None else y
        return y.view(*lead, n), x.new_zeros((*lead, r), dtype=torch.float32)
    parts = _project(packed, lora_a, 1.0, config, whole=False)
    z = _expand(y, parts, lora_b.t(), scale, config, adds=weight is not None)
    return y.view(*lead, n), z.view(*lead, r)


@register_kernel("lora_linear_vjp", backend="triton", rank=20, rejects=_reasons)
@optimize_kernel(space=VJP_SPACE)
def lora_linear_vjp(
    dy: Tensor,
    x: Tensor,
    weight: Tensor | None,
    lora_a: Tensor,
    lora_b: Tensor,
    bias: Tensor | None,
    z: Tensor,
    scale: float,
    output_mask: Sequence[bool],
    *,
    config: LoraConfig,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """The library's product, if there is a weight, and three launches; one more to add strips of many rows."""
    wants_dx, wants_weight, wants_a, wants_b, wants_bias = output_mask
    dy, packed = rows(dy), rows(x)
    if weight is None:
        dx, dweight, dbias = packed.new_empty(packed.shape if wants_dx else 0), x.new_empty(0), x.new_empty(0)
    else:
        dx, dweight, dbias = gradients(dy, packed, weight, bias, (wants_dx, wants_weight, wants_bias))
    dx = dx.view(x.shape) if wants_dx else dx
    da = lora_a.new_empty(lora_a.shape if wants_a else 0)
    db = lora_b.new_empty(lora_b.shape if wants_b else 0)
    if 0 in (*packed.shape, *lora_b.shape):
        dx = dx.zero_() if weight is None else dx
        return dx, dweight, da.zero_(), db.zero_(), dbias
    dz = z = z.reshape(-1, z.shape[-1]).contiguous()
    if wants_dx or wants_a:
        parts = _project(dy, lora_b.t(), scale, config, whole=not wants_dx)
        dz = parts[0]
        if wants_dx:
            dz = _expand(dx.view(packed.shape), parts, lora_a, 1.0, config, adds=weight is not None)
    if wants_a or wants_b:
        outs = da if wants_a else None, db if wants_b else None
        _factor_gradients(packed, dy, dz, z, outs, scale, config)
    return dx, dweight, da, db, dbias
