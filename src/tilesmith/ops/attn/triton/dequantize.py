"""Triton kernels of attention_dequantize and attention_fp8_gradients: all tensors of a call in one launch each."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from tilesmith.engine import Space, launch, optimize_kernel, register_kernel, rehearsed
from tilesmith.engine.arguments import dtype_name
from tilesmith.engine.launcher import cdiv, next_power_of_2
from tilesmith.ops.attn.quantize_reference import dequantised_like, gradients_like
from tilesmith.ops.attn.reference import FACTOR_BLOCK
from tilesmith.ops.attn.triton.quantize import Angles, hadamard_signs, matrix_reasons, rotated

FLOATS = (torch.float32, torch.float16, torch.bfloat16)
BYTES = (torch.float8_e4m3fn, torch.float8_e5m2, torch.int8)


@triton.jit
def _dequantize(
    number, x8_ptr, x_ptr, scale_ptr, x8_strides, x_strides, scale_strides, tokens, heads, lanes,
    DIM: tl.constexpr, BLOCK_D: tl.constexpr, FACTOR: tl.constexpr, ACROSS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Some tokens of a head. FACTOR: of how many tokens a factor is. ACROSS: x8 lies with its tokens side by side."""
    # all heads of some tokens are neighbours in time: what is by token in memory is then moved in whole blocks
    lane = (number % lanes).to(tl.int64)
    batch, head = lane // heads, lane % heads
    rows = number // lanes * BLOCK + tl.arange(0, BLOCK)
    inside, lines = rows < tokens, rows.to(tl.int64)
    cols = tl.arange(0, BLOCK_D)
    scale_ptr += batch * scale_strides[0] + head * scale_strides[1]
    factor = tl.load(scale_ptr + lines // FACTOR * scale_strides[2], mask=inside, other=0.0).to(tl.float32)
    x8_ptr += batch * x8_strides[0] + head * x8_strides[1]
    if ACROSS:
        held = (cols < DIM)[:, None] & inside[None, :]
        x8 = tl.trans(tl.load(x8_ptr + cols.to(tl.int64)[:, None] * x8_strides[3] + lines[None, :], mask=held))
    else:
        held = inside[:, None] & (cols < DIM)[None, :]
        x8 = tl.load(x8_ptr + lines[:, None] * x8_strides[2] + cols.to(tl.int64)[None, :] * x8_strides[3], mask=held)
    x = (x8.to(tl.float32) * factor[:, None]).to(x_ptr.dtype.element_ty)
    x_ptr += batch * x_strides[0] + head * x_strides[1]
    tl.store(x_ptr + lines[:, None] * x_strides[2] + cols[None, :], x, mask=inside[:, None] & (cols < DIM)[None, :])


@triton.jit
def _dequantize_kernel(
    q8_ptr, q_ptr, q_scale_ptr, q8_strides, q_strides, q_scale_strides, tokens, heads, lanes, q_programs,
    k8_ptr, k_ptr, k_scale_ptr, k8_strides, k_strides, k_scale_strides, keys, kv_heads, kv_lanes, k_programs,
    v8_ptr, v_ptr, v_scale_ptr, v8_strides, v_strides, v_scale_strides,
    DIM: tl.constexpr, BLOCK_D: tl.constexpr, DIM_V: tl.constexpr, BLOCK_DV: tl.constexpr, Q_FACTOR: tl.constexpr,
    K_FACTOR: tl.constexpr, V_FACTOR: tl.constexpr, Q_ACROSS: tl.constexpr, K_ACROSS: tl.constexpr,
    V_ACROSS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Programs of q first, then of k, then of v: see `_dequantize`."""
    number = tl.program_id(0)
    if number < q_programs:
        _dequantize(
            number, q8_ptr, q_ptr, q_scale_ptr, q8_strides, q_strides, q_scale_strides, tokens, heads, lanes,
            DIM, BLOCK_D, Q_FACTOR, Q_ACROSS, BLOCK,
        )  # fmt: skip
    elif number < q_programs + k_programs:
        _dequantize(
            number - q_programs, k8_ptr, k_ptr, k_scale_ptr, k8_strides, k_strides, k_scale_strides, keys, kv_heads,
            kv_lanes, DIM, BLOCK_D, K_FACTOR, K_ACROSS, BLOCK,
        )  # fmt: skip
    else:
        _dequantize(
            number - q_programs - k_programs, v8_ptr, v_ptr, v_scale_ptr, v8_strides, v_strides, v_scale_strides,
            keys, kv_heads, kv_lanes, DIM_V, BLOCK_DV, V_FACTOR, V_ACROSS, BLOCK,
        )  # fmt: skip


@triton.jit
def _read(lines, step, inside, cols, held, mean_ptr, mean_step, dlse):
    """Columns of a tile of gradients; with the mean of the keys added, rounded to their dtype."""
    dx = tl.load(lines + cols.to(tl.int64)[None, :] * step, mask=inside[:, None] & held[None, :], other=0.0)
    if mean_ptr is not None:
        mean = tl.load(mean_ptr + cols * mean_step, mask=held, other=0.0).to(tl.float32)
        dx = (dx.to(tl.float32) + dlse[:, None] * mean[None, :]).to(dx.dtype)
    return dx


@triton.jit
def _weights(dlse_ptr, lse_ptr, dlse_strides, lse_strides, batch, head, rows, inside, scale):
    """What each query adds of the mean: nothing where it saw no key."""
    dlse_ptr += batch * dlse_strides[0] + head * dlse_strides[1]
    lse_ptr += batch * lse_strides[0] + head * lse_strides[1]
    dlse = tl.load(dlse_ptr + rows * dlse_strides[2], mask=inside, other=0.0).to(tl.float32)
    lse = tl.load(lse_ptr + rows * lse_strides[2], mask=inside, other=0.0)
    return tl.where(lse == float("-inf"), 0.0, dlse * scale)


@triton.jit
def _sides(pair, DIM: tl.constexpr, PAIRS: tl.constexpr, INTERLEAVED: tl.constexpr):
    """The columns of a line as two sides: first those of PAIRS that an angle turns, then the others by halves."""
    if INTERLEAVED:
        return 2 * pair, 2 * pair + 1
    turned = pair < PAIRS
    return tl.where(turned, pair, PAIRS + pair), pair + tl.where(turned, PAIRS, (DIM + 1) // 2)


@triton.jit
def _store_turned_back(
    x, y, inside, pair, cos_ptr, sin_ptr, cos_strides, sin_strides, batch, positions, write, step,
    DIM: tl.constexpr, PAIRS: tl.constexpr, INTERLEAVED: tl.constexpr,
):  # fmt: skip
    """x and y, both sides of lines, turned by the opposite angles where there are; to write, pointers to lines."""
    turned = inside[:, None] & (pair < PAIRS)[None, :]
    cos_ptr += batch * cos_strides[0] + positions[:, None] * cos_strides[1]
    sin_ptr += batch * sin_strides[0] + positions[:, None] * sin_strides[1]
    cos = tl.load(cos_ptr + pair[None, :] * cos_strides[2], mask=turned, other=1.0).to(tl.float32)
    sin = tl.load(sin_ptr + pair[None, :] * sin_strides[2], mask=turned, other=0.0).to(tl.float32)
    # chosen, since an infinity of one side times 0 would be a NaN in the other
    turned = (pair < PAIRS)[None, :]
    left = tl.where(turned, x * cos + y * sin, x).to(write.dtype.element_ty)
    right = tl.where(turned, y * cos - x * sin, y).to(write.dtype.element_ty)
    if INTERLEAVED:  # joined in registers: stores with a step of two elements would not coalesce
        cols = tl.arange(0, 2 * pair.shape[0])
        lines = tl.reshape(tl.join(left, right), (x.shape[0], 2 * pair.shape[0]))
        held = inside[:, None] & (cols < DIM)[None, :]
        tl.store(write + cols.to(tl.int64)[None, :] * step, lines, mask=held)
    else:
        left_cols, right_cols = _sides(pair, DIM, PAIRS, INTERLEAVED)
        held = inside[:, None] & (pair < (DIM + 1) // 2)[None, :]
        tl.store(write + left_cols.to(tl.int64)[None, :] * step, left, mask=held)
        tl.store(write + right_cols.to(tl.int64)[None, :] * step, right, mask=held & (right_cols < DIM)[None, :])


@triton.jit
def _undo(
    number, dx8_ptr, dx_ptr, dx8_strides, dx_strides, tokens, heads, lanes,
    mean_ptr, dlse_ptr, lse_ptr, mean_strides, dlse_strides, lse_strides, group, scale,
    cos_ptr, sin_ptr, cos_strides, sin_strides, shift,
    DIM: tl.constexpr, BLOCK_D: tl.constexpr, PAIRS: tl.constexpr, INTERLEAVED: tl.constexpr, ROTATE: tl.constexpr,
    BLOCK: tl.constexpr, TILES: tl.constexpr,
):  # fmt: skip
    """TILES blocks of tokens of one head. Where angles turn pairs, columns of the Hadamard matrix are in such an order
    that both sides of a pair are neighbours in a line of the product, which one thread has."""
    lane = (number % lanes).to(tl.int64)
    batch, head = lane // heads, lane % heads
    first_block = number // lanes * TILES
    cols, pair = tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_D // 2)
    left, right = _sides(pair, DIM, PAIRS, INTERLEAVED)
    if ROTATE:
        by_pair = cols
        if PAIRS > 0:
            by_pair = tl.where((cols & 1) == 0, *_sides(cols >> 1, DIM, PAIRS, INTERLEAVED))
        signs = hadamard_signs(by_pair, BLOCK_D, dx8_ptr.dtype.element_ty)
    dx8_ptr += batch * dx8_strides[0] + head * dx8_strides[1]
    dx_ptr += batch * dx_strides[0] + head * dx_strides[1]
    mean_step = 0
    if mean_ptr is not None:
        mean_ptr += batch * mean_strides[0] + head // group * mean_strides[1]
        mean_step = mean_strides[2]
    for block in range(first_block, tl.minimum(first_block + TILES, tl.cdiv(tokens, BLOCK))):
        rows = (block * BLOCK + tl.arange(0, BLOCK)).to(tl.int64)
        inside = rows < tokens
        read, write = dx8_ptr + rows[:, None] * dx8_strides[2], dx_ptr + rows[:, None] * dx_strides[2]
        weights = tl.zeros((BLOCK,), tl.float32)
        if mean_ptr is not None:
            weights = _weights(dlse_ptr, lse_ptr, dlse_strides, lse_strides, batch, head, rows, inside, scale)
        if ROTATE or INTERLEAVED or PAIRS == 0:
            dx = _read(read, dx8_strides[3], inside, cols, cols < DIM, mean_ptr, mean_step, weights)
            if ROTATE:
                dx = rotated(dx, signs, DIM)
        if PAIRS == 0:
            dx = dx.to(dx_ptr.dtype.element_ty)
            held = inside[:, None] & (cols < DIM)[None, :]
            tl.store(write + cols.to(tl.int64)[None, :] * dx_strides[3], dx, mask=held)
        else:
            if ROTATE or INTERLEAVED:
                x, y = tl.split(tl.reshape(dx.to(tl.float32), (BLOCK, BLOCK_D // 2, 2)))
            else:
                x = _read(read, dx8_strides[3], inside, left, left < DIM, mean_ptr, mean_step, weights).to(tl.float32)
                y = _read(read, dx8_strides[3], inside, right, right < DIM, mean_ptr, mean_step, weights).to(tl.float32)
            _store_turned_back(
                x, y, inside, pair, cos_ptr, sin_ptr, cos_strides, sin_strides, batch, rows + shift,
                write, dx_strides[3], DIM, PAIRS, INTERLEAVED,
            )  # fmt: skip


@triton.jit(do_not_specialize=["shift"])
def _undo_kernel(
    dq8_ptr, dq_ptr, dq8_strides, dq_strides, tokens, heads, lanes, q_programs,
    dk8_ptr, dk_ptr, dk8_strides, dk_strides, keys, kv_heads, kv_lanes,
    mean_ptr, dlse_ptr, lse_ptr, mean_strides, dlse_strides, lse_strides, group, scale,
    cos_ptr, sin_ptr, cos_strides, sin_strides, shift,
    DIM: tl.constexpr, BLOCK_D: tl.constexpr, PAIRS: tl.constexpr, INTERLEAVED: tl.constexpr, ROTATE: tl.constexpr,
    BLOCK: tl.constexpr, TILES: tl.constexpr,
):  # fmt: skip
    """Programs of dq first, then of dk: see `_undo`."""
    number = tl.program_id(0)
    if dq8_ptr is not None:
        if number < q_programs:
            _undo(
                number, dq8_ptr, dq_ptr, dq8_strides, dq_strides, tokens, heads, lanes,
                mean_ptr, dlse_ptr, lse_ptr, mean_strides, dlse_strides, lse_strides, group, scale,
                cos_ptr, sin_ptr, cos_strides, sin_strides, shift,
                DIM, BLOCK_D, PAIRS, INTERLEAVED, ROTATE, BLOCK, TILES,
            )  # fmt: skip
    if dk8_ptr is not None:
        if number >= q_programs:
            _undo(
                number - q_programs, dk8_ptr, dk_ptr, dk8_strides, dk_strides, keys, kv_heads, kv_lanes,
                None, None, None, None, None, None, 1, 0.0,
                cos_ptr, sin_ptr, cos_strides, sin_strides, 0,
                DIM, BLOCK_D, PAIRS, INTERLEAVED, ROTATE, BLOCK, TILES,
            )  # fmt: skip


def _rejects_dequantize(call) -> list[str]:
    reasons = []
    for name in ("q8", "k8", "v8"):
        x = getattr(call, name)
        if x.dtype not in (*BYTES, *FLOATS):
            reasons.append(f"{name} is {x.dtype}; {', '.join(map(dtype_name, (*BYTES, *FLOATS)))} are supported")
        if x.cols > 1024:
            reasons.append(f"{name} has head dim {x.cols}; up to 1024 are supported")
        if x.dtype.is_floating_point and x.dtype.itemsize == 1:
            if call.arch.kind == "cuda" and call.arch.capability < (8, 9):
                reasons.append(f"{call.arch.name} does not convert {x.dtype}; compute capability 8.9 and up does")
            if call.arch.kind == "hip":
                reasons.append(f"{call.arch.name} does not convert {x.dtype}")
    if call.dtype == "float64" or torch.float64 in (call.q_scale.dtype, call.k_scale.dtype, call.v_scale.dtype):
        reasons.append("float64: this kernel computes in float32")
    return reasons


class TokensConfig(NamedTuple):
    """elements: of a tile at most, which has a power of two of tokens. num_warps: of a CTA."""

    elements: int
    num_warps: int


# four loads and eight stores of 16 bytes for each of 128 threads
DEQUANTIZE = Space(
    default=lambda dims, arch, dtype: TokensConfig(8192, 4),
    dims=lambda q8, k8, v8, *rest: {"tokens": q8.shape[2] + 2 * k8.shape[2], "dim": max(q8.shape[3], v8.shape[3])},
    choices={"elements": (4096, 8192, 16384), "num_warps": (2, 4, 8)},
)


@register_kernel("attention_dequantize", backend="triton", rank=20, rejects=_rejects_dequantize, plans=rehearsed)
@optimize_kernel(space=DEQUANTIZE)
def attention_dequantize(
    q8: Tensor,
    k8: Tensor,
    v8: Tensor,
    q_scale: Tensor,
    k_scale: Tensor,
    v_scale: Tensor,
    tokens_first: Sequence[bool],
    dtype: str = "bfloat16",
    *,
    config: TokensConfig,
) -> tuple[Tensor, Tensor, Tensor]:
    """One launch over blocks of tokens of all heads of q, then of k, then of v."""
    wide = dequantised_like(q8, k8, v8, tokens_first, dtype)
    dim, dim_v = q8.shape[3], v8.shape[3]
    blocks_of_columns = next_power_of_2(dim), next_power_of_2(dim_v)
    block = max(1, config.elements // max(blocks_of_columns))
    given, programs, factors, across = [], [], [], []
    for x8, x, scale in zip((q8, k8, v8), wide, (q_scale, k_scale, v_scale)):
        batch, heads, tokens, _ = x8.shape
        programs.append(batch * heads * cdiv(tokens, block))
        factors.append(1 if scale.shape[2] == tokens else FACTOR_BLOCK)
        across.append(x8.stride(2) == 1 != x8.stride(3))
        scale_strides = tuple(0 if n == 1 else step for n, step in zip(scale.shape, scale.stride()))
        given += [x8, x, scale, x8.stride(), x.stride(), scale_strides, tokens, heads, max(1, batch * heads)]
        given.append(programs[-1])
    if sum(programs):
        launch(
            _dequantize_kernel, (sum(programs),), *given[:-4],
            DIM=dim, BLOCK_D=blocks_of_columns[0], DIM_V=dim_v, BLOCK_DV=blocks_of_columns[1],
            **{f"{name}_FACTOR": n for name, n in zip("QKV", factors)},
            **{f"{name}_ACROSS": n for name, n in zip("QKV", across)}, BLOCK=block, num_warps=config.num_warps,
        )  # fmt: skip
    return wide


def _rejects_gradients(call) -> list[str]:
    reasons = []
    for name in ("dq8", "dk8"):
        x = getattr(call, name)
        if x is None:
            continue
        if x.dtype not in FLOATS:
            reasons.append(f"{name} is {x.dtype}; float32, float16 and bfloat16 are supported")
        if call.rotate:
            if not 16 <= x.cols <= 128:  # at 256 a CTA's Hadamard matrix fills its shared memory
                reasons.append(f"rotate: {name} has head dim {x.cols}; 16 to 128 are supported")
            reasons += matrix_reasons(f"rotate: {name}", x, call.arch)
        if x.cols > 1024:
            reasons.append(f"{name} has head dim {x.cols}; up to 1024 are supported")
    for name in ("dlse", "lse", "mean", "cos", "sin"):
        x = getattr(call, name)
        if x is not None and x.dtype == torch.float64:
            reasons.append(f"{name} is torch.float64; this kernel computes in float32")
    return reasons + ["dtype is 'float64'; this kernel computes in float32"] * (call.dtype == "float64")


class UndoConfig(NamedTuple):
    """tokens: of a tile. tiles: of a CTA. num_warps, num_stages: of a CTA."""

    tokens: int
    tiles: int
    num_warps: int
    num_stages: int


def _default(dims, arch, dtype) -> UndoConfig:
    # as in quantize.py: a CTA has the Hadamard matrix to make, so that it gets as many tiles as leave 4 CTAs for a SM.
    # sm_90, head dim 128: in bf16 74 KB and up to 148 registers, so that three CTAs of a SM have tiles of 16 KB in
    # flight (tiles of 128 tokens of 8 warps take 131 KB, one CTA); in fp32, whose products are no tensor core's, tiles
    # of 64 tokens spill where angles turn them
    wide = dtype == torch.float32
    tokens = 16 if wide else min(128, max(16, 8192 // next_power_of_2(dims["dim"])))
    tiles = min(8, max(1, cdiv(dims["rows"], tokens) // (4 * max(1, arch.sms))))
    return UndoConfig(tokens, tiles, 8, 1) if wide else UndoConfig(tokens, tiles, 4, 2)


def _dims(dq8, dk8, *rest) -> dict[str, int]:
    given = [x for x in (dq8, dk8) if x is not None]
    rows = sum(x.shape[0] * x.shape[1] * x.shape[2] for x in given)
    return {"rows": rows, "dim": given[0].shape[3]}


GRADIENTS = Space(
    default=_default, dims=_dims,
    choices={"tokens": (16, 32, 64, 128), "tiles": (1, 2, 4, 8, 16), "num_warps": (4, 8), "num_stages": (1, 2)},
)  # fmt: skip


@register_kernel("attention_fp8_gradients", backend="triton", rank=20, rejects=_rejects_gradients, plans=rehearsed)
@optimize_kernel(space=GRADIENTS)
def attention_fp8_gradients(
    dq8: Tensor | None,
    dk8: Tensor | None,
    dlse: Tensor | None = None,
    lse: Tensor | None = None,
    mean: Tensor | None = None,
    cos: Tensor | None = None,
    sin: Tensor | None = None,
    dtype: str = "",
    scale: float = 1.0,
    offset: int = 0,
    rotate: bool = True,
    interleaved: bool = False,
    *,
    config: UndoConfig,
) -> tuple[Tensor, Tensor]:
    """One launch over blocks of tokens of all heads of dq, then of dk."""
    results = gradients_like(dq8, dk8, dtype)
    angles = Angles(cos, sin, interleaved)
    dim = next(x.shape[3] for x in (dq8, dk8) if x is not None)
    given, programs = [], []
    for dx8, dx in zip((dq8, dk8), results):
        if dx8 is None:
            given += [None, None, None, None, 0, 1, 1, 0]
            programs.append(0)
            continue
        batch, heads, tokens, _ = dx8.shape
        programs.append(batch * heads * cdiv(cdiv(tokens, config.tokens), config.tiles))
        given += [dx8, dx, dx8.stride(), dx.stride(), tokens, heads, max(1, batch * heads), programs[-1]]
    if sum(programs) == 0:
        return results
    moved = (mean, dlse, lse)
    launch(
        _undo_kernel, (sum(programs),), *given[:-1], *moved, *(None if x is None else x.stride() for x in moved),
        1 if mean is None else dq8.shape[1] // mean.shape[1], scale, *angles.arguments(), offset,
        DIM=dim, BLOCK_D=max(2, next_power_of_2(dim)), **angles.constants(), ROTATE=rotate, BLOCK=config.tokens,
        TILES=config.tiles,
        num_warps=config.num_warps, num_stages=config.num_stages,
    )  # fmt: skip
    return results
