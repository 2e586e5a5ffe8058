"""Triton kernels of attention_quantize: the mean of the keys, and one pass over q, k and v."""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from tilesmith.engine import Space, launch, optimize_kernel, register_kernel
from tilesmith.engine.launcher import cdiv, next_power_of_2
from tilesmith.ops.attn.quantize_reference import SMALLEST, factors, outputs_like, smoothed_step
from tilesmith.ops.attn.reference import FACTOR_BLOCK


@triton.jit
def hadamard_signs(cols, BLOCK_D: tl.constexpr, DTYPE: tl.constexpr):
    """Columns of Sylvester's Hadamard matrix: element (i, j) is negative where i & j has an odd number of bits."""
    bits = tl.arange(0, BLOCK_D)[:, None] & cols[None, :]
    bits ^= bits >> 4
    odd = (0x6996 >> (bits & 15)) & 1
    return (1 - 2 * odd).to(tl.float32).to(DTYPE)


@triton.jit
def _load(
    x_ptr, x_strides, cos_ptr, sin_ptr, cos_strides, sin_strides, batch, head, rows, tokens, shift,
    DIM: tl.constexpr, BLOCK_D: tl.constexpr, PAIRS: tl.constexpr, INTERLEAVED: tl.constexpr,
):  # fmt: skip
    """Rows of x, fp32 if they are rotated: row i by angle i + shift."""
    cols = tl.arange(0, BLOCK_D)[None, :]
    rows = rows.to(tl.int64)[:, None]
    held = (rows < tokens) & (cols < DIM)
    x_ptr += batch.to(tl.int64) * x_strides[0] + head.to(tl.int64) * x_strides[1] + rows * x_strides[2]
    x = tl.load(x_ptr + cols * x_strides[3], mask=held, other=0.0)
    if cos_ptr is not None:
        if INTERLEAVED:
            other, pair, first = cols ^ 1, cols >> 1, (cols & 1) == 0
        else:
            first = cols < PAIRS
            other, pair = tl.where(first, cols + PAIRS, cols - PAIRS), tl.where(first, cols, cols - PAIRS)
        turns = held & (cols < 2 * PAIRS)
        cos_ptr += batch.to(tl.int64) * cos_strides[0] + (rows + shift) * cos_strides[1]
        sin_ptr += batch.to(tl.int64) * sin_strides[0] + (rows + shift) * sin_strides[1]
        cos = tl.load(cos_ptr + pair * cos_strides[2], mask=turns, other=1.0).to(tl.float32)
        sin = tl.load(sin_ptr + pair * sin_strides[2], mask=turns, other=0.0).to(tl.float32)
        partner = tl.load(x_ptr + other * x_strides[3], mask=turns, other=0.0).to(tl.float32)
        x = x.to(tl.float32) * cos + partner * tl.where(first, -sin, sin)
    return x


@triton.jit
def rotated(x, signs, DIM: tl.constexpr):
    """x times columns of the Hadamard matrix over the root of DIM. What is not in its dtype goes in three of them."""
    DTYPE: tl.constexpr = signs.dtype
    if x.dtype == DTYPE:
        y = tl.dot(x, signs, input_precision="ieee")
    else:
        high = x.to(DTYPE)
        x -= high.to(tl.float32)
        middle = x.to(DTYPE)
        x -= middle.to(tl.float32)
        y = tl.dot(x.to(DTYPE), signs)
        y = tl.dot(middle, signs, y)
        y = tl.dot(high, signs, y)
    return y * (DIM**-0.5)


@triton.jit
def _key_sums_kernel(
    k_ptr, sums_ptr, cos_ptr, sin_ptr, k_strides, cos_strides, sin_strides, tokens, heads, chunks, step,
    DIM: tl.constexpr, BLOCK_D: tl.constexpr, PAIRS: tl.constexpr, INTERLEAVED: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Sums of the keys of every step-th block of tokens of one head, fp32 [rows, chunks, DIM]."""
    row = tl.program_id(0) // chunks
    chunk = tl.program_id(0) - row * chunks
    batch = row // heads
    cols = tl.arange(0, BLOCK_D)
    k = _load(
        k_ptr, k_strides, cos_ptr, sin_ptr, cos_strides, sin_strides, batch, row - batch * heads,
        chunk * step * BLOCK + tl.arange(0, BLOCK), tokens, 0, DIM, BLOCK_D, PAIRS, INTERLEAVED,
    )  # fmt: skip
    tl.store(sums_ptr + tl.program_id(0).to(tl.int64) * DIM + cols, tl.sum(k.to(tl.float32), 0), mask=cols < DIM)


@triton.jit
def _key_mean_kernel(
    k_ptr, sums_ptr, mean_ptr, chunks, share, DIM: tl.constexpr, BLOCK_D: tl.constexpr, ROTATE: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """The mean of a head's keys, share * sum, fp32 [rows, DIM]; with ROTATE rotated by the very product that rotates
    the keys, so that a key which is the mean leaves nothing."""
    row = tl.program_id(0).to(tl.int64)
    cols = tl.arange(0, BLOCK_D)
    total = tl.zeros((BLOCK, BLOCK_D), tl.float32)
    for first in range(0, chunks, BLOCK):
        at = first + tl.arange(0, BLOCK)
        held = (at < chunks)[:, None] & (cols < DIM)[None, :]
        total += tl.load(sums_ptr + (row * chunks + at[:, None]) * DIM + cols[None, :], mask=held, other=0.0)
    mean = tl.sum(total, 0) * share
    if ROTATE:
        rows = tl.arange(0, BLOCK)[:, None]
        signs = hadamard_signs(cols, BLOCK_D, k_ptr.dtype.element_ty)
        tile = rotated(tl.where(rows == 0, mean[None, :], 0.0), signs, DIM)
        mean = tl.sum(tile, 0)  # of one row, and zeros
    tl.store(mean_ptr + row * DIM + cols, mean, mask=cols < DIM)


@triton.jit
def _factor(size):
    """The least power of two that is at least size / 448, and one over it. 448 is 1.75 * 2**8: what exceeds 1.75 times
    a power of two carries into the exponent."""
    power = ((size.to(tl.int32, bitcast=True) + 0x1FFFFF) >> 23) - 8
    factor = (power << 23).to(tl.float32, bitcast=True)
    inverse = ((254 - power) << 23).to(tl.float32, bitcast=True)
    return factor, inverse


@triton.jit
def _quantize(
    number, x_ptr, x8_ptr, scale_ptr, mean_ptr, shift_ptr, size_ptr, cos_ptr, sin_ptr,
    x_strides, x8_strides, size_strides, cos_strides, sin_strides, tokens, heads, group, angle_shift,
    DIM: tl.constexpr, BLOCK_D: tl.constexpr, PAIRS: tl.constexpr, INTERLEAVED: tl.constexpr, BLOCK: tl.constexpr,
    TILES: tl.constexpr, ROTATE: tl.constexpr, ACROSS: tl.constexpr, SMALLEST: tl.constexpr,
):  # fmt: skip
    """TILES blocks of tokens of one head. mean_ptr: means of kv heads [rows / group, DIM], taken off x, or where there
    is a shift_ptr, multiplied by it. size_ptr: largest elements, else a block's own is found, and its factor (its
    largest element, where there is no x8_ptr) is stored. ACROSS: x8 lies in memory with its tokens side by side."""
    blocks = tl.cdiv(tokens, BLOCK)
    shares = tl.cdiv(blocks, TILES)
    row = number // shares
    first = (number - row * shares) * TILES
    batch = row // heads
    head = row - batch * heads
    cols = tl.arange(0, BLOCK_D)
    signs = 0
    if ROTATE:
        signs = hadamard_signs(cols, BLOCK_D, x_ptr.dtype.element_ty)
    if mean_ptr is not None:
        mean = tl.load(mean_ptr + (row // group).to(tl.int64) * DIM + cols, mask=cols < DIM, other=0.0)[None, :]
    if x8_ptr is not None:
        x8_ptr += batch.to(tl.int64) * x8_strides[0] + head.to(tl.int64) * x8_strides[1]
    for block in range(first, tl.minimum(first + TILES, blocks)):
        rows = block * BLOCK + tl.arange(0, BLOCK)
        held = (rows < tokens)[:, None] & (cols < DIM)[None, :]
        x = _load(
            x_ptr, x_strides, cos_ptr, sin_ptr, cos_strides, sin_strides, batch, head, rows, tokens, angle_shift,
            DIM, BLOCK_D, PAIRS, INTERLEAVED,
        )  # fmt: skip
        if ROTATE:
            x = rotated(x, signs, DIM)
        x = x.to(tl.float32)
        if mean_ptr is not None:
            if shift_ptr is not None:
                tl.store(shift_ptr + row.to(tl.int64) * tokens + rows, tl.sum(x * mean, 1), mask=rows < tokens)
            else:
                x -= mean
                if block * BLOCK + BLOCK > tokens:  # what is not there must not become the largest element
                    x = tl.where((rows < tokens)[:, None], x, 0.0)
        if size_ptr is not None:
            size = tl.load(size_ptr + batch.to(tl.int64) * size_strides[0] + head.to(tl.int64) * size_strides[1])
        else:
            size = tl.max(tl.abs(x))
        place = scale_ptr + row.to(tl.int64) * blocks + block
        if x8_ptr is None:
            tl.store(place, size)
        else:
            factor, inverse = _factor(size)
            if size_ptr is None:
                tl.store(place, tl.where(size > SMALLEST, factor, 1.0))
            x8 = (x * tl.where(size > SMALLEST, inverse, 1.0)).to(x8_ptr.dtype.element_ty)
            if ACROSS:
                places = cols.to(tl.int64)[:, None] * x8_strides[3] + rows[None, :]
                tl.store(x8_ptr + places, tl.trans(x8), mask=tl.trans(held))
            else:
                tl.store(x8_ptr + rows.to(tl.int64)[:, None] * x8_strides[2] + cols[None, :], x8, mask=held)


@triton.jit
def _quantize_kernel(
    q_ptr, q8_ptr, q_scale_ptr, q_size_ptr, q_strides, q8_strides, q_size_strides, q_programs, tokens, heads,
    k_ptr, k8_ptr, k_scale_ptr, k_size_ptr, k_strides, k8_strides, k_size_strides, k_programs, keys, kv_heads,
    v_ptr, v8_ptr, v_scale_ptr, v_size_ptr, v_strides, v8_strides, v_size_strides,
    mean_ptr, shift_ptr, cos_ptr, sin_ptr, cos_strides, sin_strides,
    DIM: tl.constexpr, BLOCK_D: tl.constexpr, DIM_V: tl.constexpr, BLOCK_DV: tl.constexpr, PAIRS: tl.constexpr,
    INTERLEAVED: tl.constexpr, BLOCK: tl.constexpr, TILES: tl.constexpr, ROTATE: tl.constexpr,
    SMALLEST: tl.constexpr,
):  # fmt: skip
    """Programs of q first, then of k, then of v: see `_quantize`."""
    number = tl.program_id(0)
    if number < q_programs:
        _quantize(
            number, q_ptr, q8_ptr, q_scale_ptr, mean_ptr, shift_ptr, q_size_ptr, cos_ptr, sin_ptr,
            q_strides, q8_strides, q_size_strides, cos_strides, sin_strides, tokens, heads, heads // kv_heads,
            keys - tokens, DIM, BLOCK_D, PAIRS, INTERLEAVED, BLOCK, TILES, ROTATE, False, SMALLEST,
        )  # fmt: skip
    elif number < q_programs + k_programs:
        _quantize(
            number - q_programs, k_ptr, k8_ptr, k_scale_ptr, mean_ptr, None, k_size_ptr, cos_ptr, sin_ptr,
            k_strides, k8_strides, k_size_strides, cos_strides, sin_strides, keys, kv_heads, 1,
            0, DIM, BLOCK_D, PAIRS, INTERLEAVED, BLOCK, TILES, ROTATE, False, SMALLEST,
        )  # fmt: skip
    else:
        _quantize(
            number - q_programs - k_programs, v_ptr, v8_ptr, v_scale_ptr, None, None, v_size_ptr, None, None,
            v_strides, v8_strides, v_size_strides, None, None, keys, kv_heads, 1,
            0, DIM_V, BLOCK_DV, 0, False, BLOCK, TILES, False, True, SMALLEST,
        )  # fmt: skip


class QuantizeConfig(NamedTuple):
    """tiles: blocks of 128 tokens of a CTA. num_warps, num_stages: of a CTA. registers: of a thread at most, 0:
    as many as it takes."""

    tiles: int
    num_warps: int
    num_stages: int
    registers: int


def _rejects(call) -> list[str]:
    reasons = []
    if call.q.dtype == torch.float64:
        reasons.append("q is torch.float64; float32, float16 and bfloat16 are supported")
    for name in ("q", "v"):
        if not 16 <= getattr(call, name).cols <= 128:  # at 256 a CTA's Hadamard matrix fills its shared memory
            reasons.append(f"{name} has head dim {getattr(call, name).cols}; 16 to 128 are supported")
    reasons += matrix_reasons("q", call.q, call.arch)
    if call.arch.kind == "cuda" and call.arch.capability < (8, 9):
        reasons.append(f"{call.arch.name} does not convert to e4m3; compute capability 8.9 and up does")
    if call.arch.kind == "hip":
        reasons.append(f"{call.arch.name} does not convert to float8_e4m3fn")
    return reasons


def matrix_reasons(name: str, x, arch) -> list[str]:
    """Why a CTA has no room for rows of x and a Hadamard matrix of their dtype."""
    if x.dtype == torch.float32 and x.cols > 64 and (arch.shared_memory or 2**17) < 2**17:
        return [f"{name} is torch.float32 with head dim {x.cols}; up to 64 fit in {arch.name}'s memory"]
    return []


def _default(dims, arch, dtype) -> QuantizeConfig:
    # a CTA has the Hadamard matrix to make: as many tiles for it as leave 4 CTAs for a SM, 8 at
    # most (a script on an H200, 16,384 tokens of 16 heads of 128: 2, 4, 8 and 16 take 131, 123, 119 and 134 us)
    tiles = min(8, max(1, dims["blocks"] // (4 * max(1, arch.sms))))
    if dims["angles"] or dtype == torch.float32:
        return QuantizeConfig(tiles, 8, 1, 0)
    # two CTAs of 8 warps fit in a SM: 128 registers, no spills (sm_90), 112 of 227 KB
    return QuantizeConfig(tiles, 8 if dims["dim"] > 64 else 4, 2, 128 if arch.kind == "cuda" else 0)


def _dims(q, k, v, cos, *rest) -> dict[str, int]:
    blocks = q.shape[0] * (
        q.shape[1] * cdiv(q.shape[2], FACTOR_BLOCK) + 2 * k.shape[1] * cdiv(k.shape[2], FACTOR_BLOCK)
    )
    return {"blocks": blocks, "dim": max(q.shape[3], v.shape[3]), "angles": 0 if cos is None else 1}


SPACE = Space(
    default=_default, dims=_dims, choices={"tiles": (1, 2, 4, 8, 16), "num_warps": (4, 8), "num_stages": (1, 2)}
)


@register_kernel("attention_quantize", backend="triton", rank=20, rejects=_rejects)
@optimize_kernel(space=SPACE)
def attention_quantize(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cos: Tensor | None = None,
    sin: Tensor | None = None,
    granularity: str = "block",
    smooth: bool = True,
    rotate: bool = True,
    interleaved: bool = False,
    *,
    config: QuantizeConfig,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """The keys' mean from sums of blocks; then one launch for q, k and v, two where factors are not of blocks."""
    angles = Angles(cos, sin, interleaved)
    shift, mean = (q.new_empty(0, dtype=torch.float32) for _ in range(2))
    if smooth:
        mean = _key_mean(k, angles, rotate)
        shift = q.new_empty(q.shape[:3], dtype=torch.float32)
    outputs = outputs_like(q, k, v)
    scales = [x.new_empty(*x.shape[:2], cdiv(x.shape[2], FACTOR_BLOCK), dtype=torch.float32) for x in (q, k, v)]
    moved = (mean, shift) if smooth else (None, None)
    work = _Work((q, k, v), *moved, angles, rotate, config)
    if granularity == "block":
        work.run(outputs, scales, (None, None, None))
        return *outputs, *scales, shift, mean
    work.run((None, None, None), scales, (None, None, None))
    dims = (2,) if granularity == "head" else (0, 1, 2)
    sizes = [x.amax(dims, keepdim=True) if x.numel() else x.sum(dims, keepdim=True) for x in scales]
    work.run(outputs, scales, sizes)
    return *outputs, *map(factors, sizes), shift, mean


class Angles(NamedTuple):
    """Angles of a rotary embedding, or none."""

    cos: Tensor | None
    sin: Tensor | None
    interleaved: bool

    def arguments(self) -> tuple:
        """cos, sin and their strides [batch, position, pair]."""
        if self.cos is None:
            return None, None, None, None
        strides = (_strides(x) for x in (self.cos, self.sin))
        return self.cos, self.sin, *strides

    def constants(self) -> dict:
        return {"PAIRS": 0 if self.cos is None else self.cos.shape[-1], "INTERLEAVED": self.interleaved}


def _strides(x: Tensor) -> tuple[int, int, int]:
    return (x.stride(0) if x.ndim == 3 and x.shape[0] > 1 else 0, x.stride(-2), x.stride(-1))


class _Work(NamedTuple):
    """What both launches of `_quantize_kernel` have in common."""

    values: tuple[Tensor, Tensor, Tensor]
    mean: Tensor | None
    shift: Tensor | None
    angles: Angles
    rotate: bool
    config: QuantizeConfig

    def run(self, outputs, scales, sizes) -> None:
        """Largest elements go to scales where there are no outputs; else values to outputs and, without sizes, factors
        to scales."""
        q, _, v = self.values
        CTAs = [x.shape[0] * x.shape[1] * cdiv(cdiv(x.shape[2], FACTOR_BLOCK), self.config.tiles) for x in self.values]
        if sum(CTAs) == 0:
            return
        given = []
        for x, x8, scale, size, count in zip(self.values, outputs, scales, sizes, CTAs):
            size_strides = None if size is None else tuple(s if n > 1 else 0 for n, s in zip(size.shape, size.stride()))
            given += [x, x8, scale, size, x.stride(), None if x8 is None else x8.stride(), size_strides]
            given += [count, x.shape[2], x.shape[1]]
        launch(
            _quantize_kernel, (sum(CTAs),), *given[:-3], self.mean, self.shift, *self.angles.arguments(),
            DIM=q.shape[3], BLOCK_D=next_power_of_2(q.shape[3]), DIM_V=v.shape[3], BLOCK_DV=next_power_of_2(v.shape[3]),
            **self.angles.constants(), BLOCK=FACTOR_BLOCK, TILES=self.config.tiles,
            ROTATE=self.rotate, SMALLEST=SMALLEST,
            num_warps=self.config.num_warps, num_stages=self.config.num_stages,
            **({"maxnreg": self.config.registers} if self.config.registers else {}),
        )  # fmt: skip


def _key_mean(k: Tensor, angles: Angles, rotate: bool) -> Tensor:
    batch, heads, tokens, dim = k.shape
    blocks, step, wide = cdiv(tokens, FACTOR_BLOCK), smoothed_step(tokens), next_power_of_2(dim)
    chunks = cdiv(blocks, step)
    counted = (chunks - 1) * FACTOR_BLOCK + min(FACTOR_BLOCK, tokens - (chunks - 1) * step * FACTOR_BLOCK)
    sums = k.new_empty(batch * heads, chunks, dim, dtype=torch.float32)
    mean = k.new_empty(batch, heads, dim, dtype=torch.float32)
    if sums.numel():
        cos, sin, cos_strides, sin_strides = angles.arguments()
        launch(
            _key_sums_kernel, (batch * heads * chunks,), k, sums, cos, sin, k.stride(), cos_strides, sin_strides,
            tokens, heads, chunks, step,
            DIM=dim, BLOCK_D=wide, **angles.constants(), BLOCK=FACTOR_BLOCK, num_warps=4,
        )  # fmt: skip
    if mean.numel():
        launch(
            _key_mean_kernel, (batch * heads,), k, sums, mean, chunks, 1.0 / max(counted, 1),
            DIM=dim, BLOCK_D=wide, ROTATE=rotate, BLOCK=16, num_warps=4,
        )  # fmt: skip
    return mean
