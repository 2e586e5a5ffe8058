"""The gemm family in Triton: a tiled product with bias and activation in its epilogue, one that normalises what it
reads, and the activation's backward with the bias's gradient."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from tilesmith.device.alignment import tma_strides
from tilesmith.device.rows import dense, rows
from tilesmith.device.triton.activations import activate, gradient
from tilesmith.device.triton.column_sums import partial_rows, sum_partials
from tilesmith.engine import Space, cdiv, launch, next_power_of_2, optimize_kernel, register_kernel
from tilesmith.hardware.detect import arch_of
from tilesmith.ops.gemm import chunks
from tilesmith.ops.gemm.arguments import linear_act_vjp_arguments
from tilesmith.ops.gemm.products import (
    PreActivation,
    bias_gradient,
    epilogue_tells,
    gradients,
    pre_activation,
    pre_activation_tells,
    product,
)
from tilesmith.ops.gemm.reference import flat, keeps_pre


@triton.jit
def _tile(index, m, n, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, GROUP_M: tl.constexpr):
    """First row and column of a tile: GROUP_M tiles down, then the next column, so that both operands stay in L2."""
    tiles_m, tiles_n = tl.cdiv(m, BLOCK_M), tl.maximum(tl.cdiv(n, BLOCK_N), 1)
    group = index // (GROUP_M * tiles_n)
    height = tl.minimum(tiles_m - group * GROUP_M, GROUP_M)
    within = index % (GROUP_M * tiles_n)
    return (group * GROUP_M + within % height) * BLOCK_M, (within // height) * BLOCK_N


@triton.jit
def _load_bulk(desc, first, second, TURNED: tl.constexpr):
    """A tile at [first, second]; a TURNED descriptor is one of the transposed matrix."""
    if TURNED:
        return desc.load([second, first]).T
    else:
        return desc.load([first, second])


@triton.jit
def _store_bulk(
    z, bias_ptr, out_desc, pre_desc, first_m, first_n, n,
    ACTIVATION: tl.constexpr, HAS_BIAS: tl.constexpr, KEEPS_PRE: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Add the bias to the tile z, activate it, and write it through descriptors."""
    if HAS_BIAS:
        col = first_n + tl.arange(0, BLOCK_N)
        z += tl.load(bias_ptr + col, mask=col < n, other=0.0).to(tl.float32)[None, :]
    if KEEPS_PRE:
        pre_desc.store([first_m, first_n], z.to(pre_desc.dtype))
    out, _ = activate(z, ACTIVATION)
    out_desc.store([first_m, first_n], out.to(out_desc.dtype))


@triton.jit
def _gemm_kernel(
    a_ptr, b_ptr, bias_ptr, out_ptr, pre_ptr, a_desc, b_desc, out_desc, pre_desc,
    m, n, k, a_row, a_col, b_row, b_col,
    ACTIVATION: tl.constexpr, HAS_BIAS: tl.constexpr, KEEPS_PRE: tl.constexpr, BULK: tl.constexpr,
    A_TURNED: tl.constexpr, B_TURNED: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr, GROUP_M: tl.constexpr, PERSISTENT: tl.constexpr,
):  # fmt: skip
    """out [m, n] = activation(a [m, k] · b [k, n] + bias), and pre = what was activated where KEEPS_PRE.

    out and pre are contiguous. With BULK the tiles travel through descriptors, and pointers and strides are not used.
    """
    tiles = tl.cdiv(m, BLOCK_M) * tl.cdiv(n, BLOCK_N)
    for index in tl.range(tl.program_id(0), tiles, tl.num_programs(0), flatten=PERSISTENT):
        first_m, first_n = _tile(index, m, n, BLOCK_M, BLOCK_N, GROUP_M)
        acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
        row, col = first_m + tl.arange(0, BLOCK_M), first_n + tl.arange(0, BLOCK_N)
        if BULK:
            for start in range(0, k, BLOCK_K):
                a = _load_bulk(a_desc, first_m, start, A_TURNED)
                b = _load_bulk(b_desc, start, first_n, B_TURNED)
                acc = tl.dot(a, b, acc)
        else:
            inner = tl.arange(0, BLOCK_K)
            a_tile = a_ptr + row.to(tl.int64)[:, None] * a_row + inner.to(tl.int64)[None, :] * a_col
            b_tile = b_ptr + inner.to(tl.int64)[:, None] * b_row + col.to(tl.int64)[None, :] * b_col
            a_step, b_step = tl.cast(a_col, tl.int64) * BLOCK_K, tl.cast(b_row, tl.int64) * BLOCK_K
            for start in range(0, k, BLOCK_K):
                left = k - start
                a = tl.load(a_tile, mask=(row < m)[:, None] & (inner < left)[None, :], other=0.0)
                b = tl.load(b_tile, mask=(inner < left)[:, None] & (col < n)[None, :], other=0.0)
                acc = tl.dot(a, b, acc, input_precision="ieee")
                a_tile += a_step
                b_tile += b_step
        if BULK:
            # In halves: a whole tile waiting for its copy would take the shared memory of a step of the sum (two in
            # fp32), and erf on all of it at once spills.
            left, right = tl.split(tl.permute(tl.reshape(acc, (BLOCK_M, 2, BLOCK_N // 2)), (0, 2, 1)))
            _store_bulk(
                left, bias_ptr, out_desc, pre_desc, first_m, first_n, n,
                ACTIVATION, HAS_BIAS, KEEPS_PRE, BLOCK_N // 2,
            )  # fmt: skip
            _store_bulk(
                right, bias_ptr, out_desc, pre_desc, first_m, first_n + BLOCK_N // 2, n,
                ACTIVATION, HAS_BIAS, KEEPS_PRE, BLOCK_N // 2,
            )  # fmt: skip
        else:
            if HAS_BIAS:
                acc += tl.load(bias_ptr + col, mask=col < n, other=0.0).to(tl.float32)[None, :]
            place = row.to(tl.int64)[:, None] * n + col[None, :]
            inside = (row < m)[:, None] & (col < n)[None, :]
            if KEEPS_PRE:
                tl.store(pre_ptr + place, acc.to(pre_ptr.dtype.element_ty), mask=inside)
            out, _ = activate(acc, ACTIVATION)
            tl.store(out_ptr + place, out.to(out_ptr.dtype.element_ty), mask=inside)


@triton.jit
def _norm_gemm_kernel(
    x_ptr, weight_ptr, bias_ptr, norm_weight_ptr, norm_bias_ptr, y_ptr, mean_ptr, rstd_ptr,
    m, n, k, x_row, weight_row, weight_col, eps, offset,
    CENTRED: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_NORM_WEIGHT: tl.constexpr, HAS_NORM_BIAS: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP_M: tl.constexpr,
):  # fmt: skip
    """y [m, n] = norm(x [m, k]) · weight [n, k]ᵀ + bias. Each tile takes the statistics of its rows itself."""
    first_m, first_n = _tile(tl.program_id(0), m, n, BLOCK_M, BLOCK_N, GROUP_M)
    row, col, inner = first_m + tl.arange(0, BLOCK_M), first_n + tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_K)
    x_rows = x_ptr + row.to(tl.int64)[:, None] * x_row
    mean = tl.zeros((BLOCK_M,), tl.float32)
    if CENTRED:
        total = tl.zeros((BLOCK_M, BLOCK_K), tl.float32)
        for start in range(0, k, BLOCK_K):
            inside = (row < m)[:, None] & (start + inner < k)[None, :]
            total += tl.load(x_rows + (start + inner)[None, :], mask=inside, other=0.0).to(tl.float32)
        mean = tl.sum(total, 1) / k
    squares = tl.zeros((BLOCK_M, BLOCK_K), tl.float32)
    for start in range(0, k, BLOCK_K):
        inside = (row < m)[:, None] & (start + inner < k)[None, :]
        x = tl.load(x_rows + (start + inner)[None, :], mask=inside, other=0.0).to(tl.float32)
        away = tl.where(inside, x - mean[:, None], 0.0)
        squares += away * away
    rstd = 1 / tl.sqrt(tl.sum(squares, 1) / k + eps)
    acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for start in range(0, k, BLOCK_K):
        at = start + inner
        inside = (row < m)[:, None] & (at < k)[None, :]
        x = tl.load(x_rows + at[None, :], mask=inside, other=0.0)
        normed = (x.to(tl.float32) - mean[:, None]) * rstd[:, None]
        if HAS_NORM_WEIGHT:
            scale = tl.load(norm_weight_ptr + at, mask=at < k, other=0.0).to(tl.float32) + offset
            normed = normed * scale[None, :]
        if HAS_NORM_BIAS:
            normed += tl.load(norm_bias_ptr + at, mask=at < k, other=0.0).to(tl.float32)[None, :]
        normed = tl.where(inside, normed, 0.0).to(x.dtype)
        weight = tl.load(
            weight_ptr + col.to(tl.int64)[None, :] * weight_row + at.to(tl.int64)[:, None] * weight_col,
            mask=(at < k)[:, None] & (col < n)[None, :], other=0.0,
        )  # fmt: skip
        acc = tl.dot(normed, weight, acc, input_precision="ieee")
    if HAS_BIAS:
        acc += tl.load(bias_ptr + col, mask=col < n, other=0.0).to(tl.float32)[None, :]
    y = y_ptr + row.to(tl.int64)[:, None] * n + col[None, :]
    tl.store(y, acc.to(y_ptr.dtype.element_ty), mask=(row < m)[:, None] & (col < n)[None, :])
    if first_n == 0:
        tl.store(rstd_ptr + row, rstd, mask=row < m)
        if CENTRED:
            tl.store(mean_ptr + row, mean, mask=row < m)


@triton.jit
def _activation_kernel(z_ptr, elements, ACTIVATION: tl.constexpr, BLOCK: tl.constexpr):
    """z = activation(z), in place."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    z = tl.load(z_ptr + at, mask=at < elements, other=0.0).to(tl.float32)
    value, _ = activate(z, ACTIVATION)
    tl.store(z_ptr + at, value.to(z_ptr.dtype.element_ty), mask=at < elements)


@triton.jit
def _activation_bwd_kernel(
    dy_ptr, z_ptr, dz_ptr, sums_ptr, m, n, dy_row, z_row, tiles_each,
    ACTIVATION: tl.constexpr, SUMS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """dz = dy · activation'(z), contiguous, which may be z itself; sums [strips, n] = column sums of strips of rows.

    A program has `tiles_each` tiles of one strip; the next ones are copied while one is worked on. The sums are of dz
    before it is rounded.
    """
    col_blocks = tl.cdiv(n, BLOCK_N)
    strip = (tl.program_id(0) // col_blocks).to(tl.int64)
    col = (tl.program_id(0) % col_blocks).to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)[None, :]
    row = strip * tiles_each * BLOCK_M + tl.arange(0, BLOCK_M)[:, None]
    total = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for _ in tl.range(0, tiles_each, num_stages=STAGES):
        inside = (row < m) & (col < n)
        dy = tl.load(dy_ptr + (row * dy_row + col), mask=inside, other=0.0).to(tl.float32)
        z = tl.load(z_ptr + (row * z_row + col), mask=inside, other=0.0).to(tl.float32)
        dz = gradient(dy, z, ACTIVATION)
        tl.store(dz_ptr + (row * n + col), dz.to(dz_ptr.dtype.element_ty), mask=inside)
        if SUMS:
            total += dz  # 0 outside, where dy is
        row += BLOCK_M
    if SUMS:
        tl.store(sums_ptr + (strip * n + col), tl.sum(total, 0, keep_dims=True), mask=col < n)


class GemmConfig(NamedTuple):
    """block_m, block_n, block_k: the tile. group_m: tiles along M before the next column of tiles. persistent: one CTA
    per SM walks over tiles. bulk: tiles are loaded and stored by TMA where it takes the operands."""

    block_m: int
    block_n: int
    block_k: int
    group_m: int
    num_warps: int
    num_stages: int
    persistent: bool
    bulk: bool


class SweepConfig(NamedTuple):
    """Tile of an elementwise pass; how many programs share the tiles, each at least `LEAST` rows of them."""

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int
    programs: int


LEAST = 64  # rows of a strip: its partial sums are then a fiftieth of the traffic


def _gemm(
    a: Tensor, b: Tensor, bias: Tensor | None, config: GemmConfig, *,
    activation: str = "none", keep: bool = False, dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """(activation(a · b + bias), what was activated or None); a [m, k], b [k, n] in any strides."""
    (m, k), n = a.shape, b.shape[1]
    out = a.new_empty((m, n), dtype=dtype)
    pre = torch.empty_like(out) if keep else None
    if out.numel() == 0:
        return out, pre
    block_m, block_n, block_k = config.block_m, config.block_n, config.block_k
    stages, kept = config.num_stages, out if pre is None else pre
    bulk = config.bulk and _tma_refused(a, b, (out, kept)) is None
    descs, turned = (None,) * 4, (False,) * 4
    if bulk:
        stored = (_described(t, block_m, block_n // 2) for t in (out, kept))
        descs, turned = zip(_described(a, block_m, block_k), _described(b, block_k, block_n), *stored)
    if not bulk and block_n == 256:  # pointers beside the sums of so wide a tile spill
        block_n = 128
    if bulk and out.element_size() == 4:  # an fp32 tile that waits for its copy takes the room of a step of the sum
        stages = max(2, stages - 1)
    programs = cdiv(m, block_m) * cdiv(n, block_n)
    if config.persistent:
        programs = min(programs, arch_of(a.device).sms or programs)
    launch(
        _gemm_kernel, (programs,),
        a, b, bias, out, kept, *descs, m, n, k, *a.stride(), *b.stride(),
        ACTIVATION=activation, HAS_BIAS=bias is not None, KEEPS_PRE=keep, BULK=bulk,
        A_TURNED=turned[0], B_TURNED=turned[1], BLOCK_M=block_m, BLOCK_N=block_n, BLOCK_K=block_k,
        GROUP_M=config.group_m, PERSISTENT=config.persistent, num_warps=config.num_warps, num_stages=stages,
    )  # fmt: skip
    return out, pre


def _turned(x: Tensor) -> bool:
    """Whether x [R, C] lies in memory column by column, so that a descriptor is one of its transpose."""
    return x.stride(1) != 1 and x.stride(0) == 1


def _has_descriptor(x: Tensor) -> bool:
    """Whether TMA takes x [R, C] or its transpose."""
    view = x.t() if _turned(x) else x
    strides = tma_strides(view)
    return strides is not None and x.numel() > 0 and not (view.shape[0] > 1 and strides[0] < view.shape[1])


def _described(x: Tensor, height: int, width: int) -> tuple[TensorDescriptor, bool]:
    """A descriptor of x [R, C] in tiles, or of its transpose with True."""
    turned = _turned(x)
    view, tile = (x.t(), [width, height]) if turned else (x, [height, width])
    return TensorDescriptor(view, list(view.shape), tma_strides(view), tile), turned


def _tma_refused(a: Tensor, b: Tensor, stored: Sequence[Tensor]) -> str | None:
    """Why TMA does not load a and b and store the outputs; None where it does."""
    if a.shape[1] == 0:
        return "there is nothing to sum over"
    if not (_has_descriptor(a) and _has_descriptor(b)):
        return "the strides or the address of an operand are not multiples of 16 bytes"
    if not all(_has_descriptor(t) and not _turned(t) for t in stored):
        return "rows of the output do not begin at multiples of 16 bytes"
    return None


def _gemm_tells(a: Tensor, b: Tensor, config: GemmConfig) -> list[str]:
    """What `explain` says of a · b."""
    schedule = "persistent CTAs" if config.persistent else "one CTA for each tile"
    if not config.bulk:
        return [f"_gemm_kernel: {schedule}; tiles are loaded through pointers"]
    out = torch.empty(a.shape[0], b.shape[1], dtype=a.dtype, device="meta")
    why = _tma_refused(a, b, (out,))
    return [f"_gemm_kernel: {schedule}; tiles are loaded " + (f"through pointers: {why}" if why else "by TMA")]


def _linear_tells(x: Tensor, weight: Tensor, *_: object, config: GemmConfig) -> list[str]:
    return _gemm_tells(flat(x), weight.to(x.dtype).t(), config)


def _linear(
    x: Tensor, weight: Tensor, bias: Tensor | None, config: GemmConfig, activation: str = "none", keep: bool = False
) -> tuple[Tensor, Tensor | None]:
    """activation(x · weightᵀ + bias) and the pre-activation or None, both [..., N]."""
    bias = None if bias is None else bias.to(x.dtype).contiguous()
    y, pre = _gemm(flat(x), weight.to(x.dtype).t(), bias, config, activation=activation, keep=keep)
    shape = (*x.shape[:-1], weight.shape[0])
    return y.view(shape), None if pre is None else pre.view(shape)


def _activation_gradient(
    dy: Tensor, z: Tensor, activation: str, sums: bool, config: SweepConfig, *, from_output: bool, in_place: bool
) -> tuple[Tensor, Tensor | None]:
    """(dy · activation'(z), its column sums in fp32 or None) of [M, N] rows."""
    dy, z = rows(dy), rows(z)
    (m, n), dz = z.shape, z if in_place and z.is_contiguous() else z.new_empty(z.shape)
    if m == 0 or n == 0:
        return dz, z.new_zeros(n, dtype=torch.float32) if sums else None
    block_n = min(config.block_n, next_power_of_2(n))
    block_m = min(config.block_m * config.block_n // block_n, next_power_of_2(m))
    tiles, col_blocks = cdiv(m, block_m), cdiv(n, block_n)
    strips = partial_rows(tiles, col_blocks, config.programs, cdiv(LEAST, block_m))
    partial = z.new_empty((strips, n), dtype=torch.float32) if sums else None
    launch(
        _activation_bwd_kernel, (strips * col_blocks,),
        dy, z, dz, partial if sums else dz, m, n, dy.stride(0), z.stride(0), cdiv(tiles, strips),
        ACTIVATION=f"of_{activation}" if from_output else _exact_enough(activation, z), SUMS=sums,
        BLOCK_M=block_m, BLOCK_N=block_n, STAGES=config.num_stages, num_warps=config.num_warps,
    )  # fmt: skip
    return dz, sum_partials(partial, torch.float32) if sums else None


def _exact_enough(activation: str, z: Tensor) -> str:
    return "gelu_16_bit" if activation == "gelu" and z.element_size() == 2 else activation


def _reasons(call) -> list[str]:
    x = call.a if hasattr(call, "a") else call.x
    if x.dtype == torch.float64:
        return [f"the tensors are {x.dtype}; this kernel sums in float32"]
    if x.dtype == torch.float32 and x.device.type != "cpu":
        return ["float32 products are left to the library, which follows torch.backends.cuda.matmul"]
    return []


def _sweep_reasons(call) -> list[str]:
    return [f"x is {call.x.dtype}; this kernel computes in float32"] if call.x.dtype == torch.float64 else []


def _default(dims, arch, dtype) -> GemmConfig:
    bulk = arch.kind == "cuda" and arch.capability >= (9, 0) and dtype.itemsize == 2
    if arch.kind == "cpu" or dtype.itemsize == 4:
        return GemmConfig(32, 32, 32, 8, num_warps=4, num_stages=2, persistent=False, bulk=False)
    if arch.kind == "hip":
        return GemmConfig(128, 128, 64, 8, num_warps=8, num_stages=2, persistent=False, bulk=False)
    if dims["rows"] <= 64:  # bound by reading weight: many narrow tiles with much of it in flight
        block_m = max(16, next_power_of_2(dims["rows"]))
        stages = _stages(block_m, 64, 128, 5, arch)
        return GemmConfig(block_m, 64, 128, 8, num_warps=4, num_stages=stages, persistent=False, bulk=bulk)
    block_n, block_k = (256 if bulk else 128), (32 if arch.shared_memory < 120_000 else 64)
    stages = _stages(128, block_n, block_k, 4, arch)
    return GemmConfig(128, block_n, block_k, 8, num_warps=8, num_stages=stages, persistent=False, bulk=bulk)


def _stages(block_m: int, block_n: int, block_k: int, most: int, arch) -> int:
    """As many steps in flight as shared memory holds beside half a tile of the output."""
    step, written = 2 * block_k * (block_m + block_n), block_m * block_n
    return max(2, min(most, (arch.shared_memory - written - 1024) // step))


def _default_norm(dims, arch, dtype) -> GemmConfig:
    if arch.kind == "cpu" or dtype.itemsize == 4:
        return _default(dims, arch, dtype)
    block_m = 64 if dims["rows"] > 32 else max(16, next_power_of_2(dims["rows"]))
    return GemmConfig(block_m, 128, 64, 8, num_warps=4, num_stages=3, persistent=False, bulk=False)


def _default_sweep(dims, arch, dtype) -> SweepConfig:
    # 8 elements a thread of each tensor, as for an activation with a bias of its own
    return SweepConfig(8, 128, num_warps=4, num_stages=3, programs=6 * max(1, arch.sms))


def _dims(x, weight, *_) -> dict[str, int]:
    return {"rows": x.numel() // max(1, x.shape[-1]), "features": x.shape[-1], "outputs": weight.shape[0]}


def _dims_matmul(a, b) -> dict[str, int]:
    return {"rows": a.numel() // max(1, a.shape[-1]), "features": a.shape[-1], "outputs": b.shape[1]}


def _dims_vjp(dy, x, weight, *_) -> dict[str, int]:
    return _dims(x, weight)


def _dims_matmul_vjp(dy, a, b, *_) -> dict[str, int]:
    return _dims_matmul(a, b)


TILES = {
    "block_m": (64, 128), "block_n": (128, 256), "block_k": (64, 128), "num_warps": (4, 8), "num_stages": (3, 4),
    "persistent": (False, True),
}  # fmt: skip
NORM_TILES = {"block_m": (16, 32, 64, 128), "block_n": (64, 128), "block_k": (64, 128), "num_warps": (4, 8)}
STRIPS = {
    "block_m": (4, 8, 16),
    "block_n": (128, 256, 512),
    "num_warps": (4, 8),
    "num_stages": (2, 3, 4),
    "programs": (528, 792, 1056, 1584),
}
LINEAR_SPACE = Space(dims=_dims, default=_default, choices=TILES)
LINEAR_VJP_SPACE = Space(dims=_dims_vjp, default=_default, choices=TILES)
MATMUL_SPACE = Space(dims=_dims_matmul, default=_default, choices=TILES)
MATMUL_VJP_SPACE = Space(dims=_dims_matmul_vjp, default=_default, choices=TILES)
NORM_SPACE = Space(dims=_dims, default=_default_norm, choices=NORM_TILES)
SWEEP_SPACE = Space(dims=_dims, default=_default_sweep, choices={"block_n": (128, 256, 512), "num_warps": (4, 8)})
SWEEP_VJP_SPACE = Space(dims=_dims_vjp, default=_default_sweep, choices=STRIPS)

# A product in Triton reaches less of the tensor cores than cuBLAS, so the library's kernels, of rank 10, come first for
# every op whose work is a product, and these serve where they are pinned. Passes over memory are Triton's, rank 20.
# On an H200, bf16, 8192 × 4096 × 14336: the product alone 0.93 of cuBLAS's speed, with an activation 0.88 to 0.96 of
# cuBLAS and an elementwise kernel, norm_linear 0.23. At 16 rows, bound by reading weight, 1.01, 1.10 and 0.68.
BELOW_LIBRARY = 5


@register_kernel(
    "matmul",
    backend="triton",
    rank=BELOW_LIBRARY,
    rejects=_reasons,
    tells=lambda a, b, *, config: _gemm_tells(flat(a), b, config),
)
@optimize_kernel(space=MATMUL_SPACE)
def matmul(a: Tensor, b: Tensor, *, config: GemmConfig) -> Tensor:
    return _gemm(flat(a), b, None, config)[0].view(*a.shape[:-1], b.shape[1])


@register_kernel("matmul_vjp", backend="triton", rank=BELOW_LIBRARY, rejects=_reasons)
@optimize_kernel(space=MATMUL_VJP_SPACE)
def matmul_vjp(
    dy: Tensor, a: Tensor, b: Tensor, output_mask: Sequence[bool], *, config: GemmConfig
) -> tuple[Tensor, Tensor]:
    dy = flat(dy)
    da = _gemm(dy, b.t(), None, config)[0].view(a.shape) if output_mask[0] else a.new_empty(0)
    return da, _gemm(flat(a).t(), dy, None, config)[0] if output_mask[1] else b.new_empty(0)


@register_kernel("linear", backend="triton", rank=BELOW_LIBRARY, rejects=_reasons, tells=_linear_tells)
@optimize_kernel(space=LINEAR_SPACE)
def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None, *, config: GemmConfig) -> Tensor:
    return _linear(x, weight, bias, config)[0]


@register_kernel("linear_vjp", backend="triton", rank=BELOW_LIBRARY, rejects=_reasons)
@optimize_kernel(space=LINEAR_VJP_SPACE)
def linear_vjp(
    dy: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None, output_mask: Sequence[bool], *, config: GemmConfig
) -> tuple[Tensor, Tensor, Tensor]:
    dy = flat(dy)
    dx, dweight, dbias = x.new_empty(0), weight.new_empty(0), x.new_empty(0)
    if output_mask[0]:
        dx = _gemm(dy, weight.to(x.dtype), None, config)[0].view(x.shape)
    if output_mask[1]:
        dweight = _gemm(dy.t(), flat(x), None, config, dtype=weight.dtype)[0]
    if output_mask[2]:
        dbias = bias_gradient(dy, bias.dtype)
    return dx, dweight, dbias


@register_kernel("linear_act", backend="triton", rank=BELOW_LIBRARY, rejects=_reasons, tells=_linear_tells)
@optimize_kernel(space=LINEAR_SPACE)
def linear_act(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    activation: str = "gelu",
    keep_pre: bool | None = None,
    *,
    config: GemmConfig,
) -> tuple[Tensor, Tensor]:
    y, pre = _linear(x, weight, bias, config, activation, keep=bool(keep_pre) and keeps_pre(activation))
    return y, x.new_empty((*x.shape[:-1], 0)) if pre is None else pre


@register_kernel(
    "linear_act_vjp",
    backend="triton",
    rank=20,
    rejects=_sweep_reasons,
    tells=linear_act_vjp_arguments(pre_activation_tells),
)
@optimize_kernel(space=SWEEP_VJP_SPACE)
@linear_act_vjp_arguments
def linear_act_vjp(call, *, config: SweepConfig) -> tuple[Tensor, Tensor, Tensor]:
    """One pass for the activation and the bias, then the library's products."""
    dy, x, weight, bias, output_mask, source = (
        flat(call.dy), call.x, call.weight, call.bias, call.output_mask, pre_activation(call),
    )  # fmt: skip
    if source is PreActivation.NONE:
        return gradients(dy, x, weight, bias, output_mask)
    if source is PreActivation.RECOMPUTED:
        z = product(flat(x), weight, bias)
    else:
        z = flat(call.y if source is PreActivation.OUTPUT else call.pre)
    dz, sums = _activation_gradient(
        dy, z, call.activation, output_mask[2], config,
        from_output=source is PreActivation.OUTPUT, in_place=source is PreActivation.RECOMPUTED,
    )  # fmt: skip
    dx, dweight, dbias = gradients(dz, x, weight, bias, (*output_mask[:2], False))
    return dx, dweight, dbias if sums is None else sums.to(bias.dtype)


@register_kernel("norm_linear", backend="triton", rank=BELOW_LIBRARY, rejects=_reasons)
@optimize_kernel(space=NORM_SPACE)
def norm_linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    norm_weight: Tensor | None = None,
    norm_bias: Tensor | None = None,
    kind: str = "rms",
    eps: float = 1e-6,
    offset: float = 0.0,
    *,
    config: GemmConfig,
) -> tuple[Tensor, Tensor, Tensor]:
    """One launch; the rows' statistics are taken again by each tile of outputs."""
    y = x.new_empty((*x.shape[:-1], weight.shape[0]))
    rstd = x.new_empty(x.shape[:-1], dtype=torch.float32)
    mean = rstd.new_empty((*x.shape[:-1], 0) if kind == "rms" else x.shape[:-1])
    packed, weight = rows(flat(x)), weight.to(x.dtype)
    (m, k), n = packed.shape, weight.shape[0]
    if m == 0:
        return y, mean, rstd
    bias, norm_weight, norm_bias = map(dense, (bias, norm_weight, norm_bias))
    bias = None if bias is None else bias.to(x.dtype)
    launch(
        # without outputs one column of tiles still writes the statistics
        _norm_gemm_kernel, (cdiv(m, config.block_m) * max(1, cdiv(n, config.block_n)),),
        packed, weight, bias, norm_weight, norm_bias, y, mean, rstd,
        m, n, k, packed.stride(0), *weight.stride(), eps, offset,
        CENTRED=kind == "layer", HAS_BIAS=bias is not None, HAS_NORM_WEIGHT=norm_weight is not None,
        HAS_NORM_BIAS=norm_bias is not None, BLOCK_M=config.block_m, BLOCK_N=config.block_n, BLOCK_K=config.block_k,
        GROUP_M=config.group_m, num_warps=config.num_warps, num_stages=config.num_stages,
    )  # fmt: skip
    return y, mean, rstd


@register_kernel(
    "memory_efficient_linear",
    backend="triton",
    rank=20,
    rejects=_sweep_reasons,
    tells=lambda x, weight, bias, activation, chunk_rows: (
        chunks.chunk_tells(x, weight, activation, chunk_rows) + epilogue_tells(x, activation)
    ),
)
@optimize_kernel(space=SWEEP_SPACE)
def memory_efficient_linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    activation: str = "none",
    chunk_rows: int = 0,
    *,
    config: SweepConfig,
) -> Tensor:
    """The library's products into y, each chunk activated in place."""
    return chunks.forward(_steps(config), x, weight, bias, activation, chunk_rows)


@register_kernel(
    "memory_efficient_linear_vjp",
    backend="triton",
    rank=20,
    rejects=_sweep_reasons,
    tells=lambda dy, x, weight, bias, activation, chunk_rows, output_mask: chunks.chunk_tells(
        x, weight, activation, chunk_rows
    ),
)
@optimize_kernel(space=SWEEP_VJP_SPACE)
def memory_efficient_linear_vjp(
    dy: Tensor,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    activation: str,
    chunk_rows: int,
    output_mask: Sequence[bool],
    *,
    config: SweepConfig,
) -> tuple[Tensor, Tensor, Tensor]:
    """For each chunk the library's products, and one pass that turns the pre-activation into its gradient."""
    return chunks.backward(_steps(config), dy, x, weight, bias, activation, chunk_rows, output_mask)


def _steps(config: SweepConfig) -> chunks.ActivationSteps:
    def forward(z: Tensor, activation: str) -> None:
        block = 2 * config.block_m * config.block_n
        if z.numel():
            launch(
                _activation_kernel, (cdiv(z.numel(), block),), z, z.numel(),
                ACTIVATION=_exact_enough(activation, z), BLOCK=block, num_warps=config.num_warps,
            )  # fmt: skip

    def backward(dy: Tensor, z: Tensor, activation: str, sums: bool) -> tuple[Tensor, Tensor | None]:
        return _activation_gradient(dy, z, activation, sums, config, from_output=False, in_place=True)

    return chunks.ActivationSteps(forward, backward)
