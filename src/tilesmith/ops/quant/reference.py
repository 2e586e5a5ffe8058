"""Casts to 8-bit floating point and products of what was cast, in plain PyTorch: the meaning of the quant family.

Legend: M rows (all leading dims of x), N columns (its last dim), M16 is M rounded up to a multiple of 16. A factor is a
power of two: a number x is kept as x8 = x / factor, rounded once, so that x8 * factor is x up to rounding. format is
"e4m3" (float8_e4m3fn: 3 bits of mantissa, up to 448) or "e5m2" (float8_e5m2: 2 bits, up to 57344). Finite numbers that
are too large are cast to the format's largest; infinities and NaN are cast to NaN.
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from tilesmith.ops.elementwise.reference import swiglu
from tilesmith.ops.norm import reference as norm

FORMATS = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}
GREATEST = {"e4m3": 448.0, "e5m2": 57344.0}  # both are 1.75 times a power of two
BLOCK = 128
SMALLEST = 2.0**-100  # a bound up to this counts as zero
OUTPUTS = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}


def fp8_amax(x: Tensor, second: Tensor | None = None, third: Tensor | None = None) -> Tensor:
    """max |x| over all of x, and of two more tensors if given, as fp32 [1]; NaN where one is, 0 for empty tensors.

    x, second, third: any shapes, floating, one dtype and device. Raises TypeError for other dtypes and for several,
    ValueError for several devices and for tensors that require a gradient.
    """
    found = torch.cat([largest(t) if t.numel() else t.new_zeros(1) for t in given(x, second, third)])
    return largest(found).to(torch.float32)


def fp8_cast(
    x: Tensor, bound: Tensor, amax: Tensor, format: str = "e4m3", rows: bool = True, columns: bool = False
) -> tuple[Tensor, Tensor, Tensor]:
    """x in 8 bits by one factor for the whole tensor: (x8, x8_t, factor), and amax becomes max(amax, max |x|).

    x: [..., N], floating, any strides. bound: fp32 [1], what max |x| is expected to be; the factor is the least power
    of two that is at least bound / the format's largest number (1 for a bound of zero). amax: fp32 [1], written; NaN
    where x holds one, infinite where x holds an infinity: so overflows and non-finite numbers are detected in the same
    pass, without waiting for the device.

    Returns x8 of x's shape, contiguous (empty unless `rows`); x8_t [N, M16], x8 transposed, where M16 is the number of
    rows of x rounded up to a multiple of 16 and the added columns are 0 (empty unless `columns`); factor fp32 [1].
    Raises TypeError for other dtypes; ValueError for other shapes, devices and formats, and for an x that requires a
    gradient.
    """
    factor = factor_of(bound, format)
    x8 = cast(x, format, factor.to(wide(x)))
    amax.copy_(torch.maximum(amax, largest(x).to(amax.dtype)) if x.numel() else amax)
    return *both(x8, rows, columns), factor.to(torch.float32)


def fp8_cast_stack(
    first: Tensor, second: Tensor, third: Tensor | None = None, format: str = "e4m3"
) -> tuple[Tensor, Tensor, Tensor]:
    """Two or three matrices in 8 bits as if they were one on top of the other, by one factor: (x8, x8_t, factor).

    first, second, third: [M, N] each, floating, of any M that is a multiple of 16. The factor is that of their largest
    absolute element, as `fp8_cast` has it. Returns x8 [sum of M, N] and x8_t [N, sum of M], it transposed, both
    contiguous; factor fp32 [1]. Raises TypeError for other dtypes and for several; ValueError for other shapes, devices
    and formats, and for tensors that require a gradient.
    """
    parts = given(first, second, third)
    bound = fp8_amax(*parts)
    x8, x8_t, factors = zip(*(fp8_cast(x, bound, bound.clone(), format, True, True) for x in parts))
    return _joined(x8, 0), _joined(x8_t, 1), factors[0]


def fp8_cast_beside(
    first: Tensor,
    second: Tensor,
    third: Tensor | None,
    bound: Tensor,
    amax: Tensor,
    format: str = "e4m3",
    rows: bool = True,
    columns: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    """`fp8_cast` of two or three tensors side by side, without a pass that puts them together: (x8, x8_t, factor).

    first, second, third: [..., N] each, floating, any strides, of any N that is a multiple of 16; the other dims are
    those of first. bound, amax, format, rows and columns: as `fp8_cast` has them. Returns x8 [..., sum of N]; x8_t [sum
    of N, M16]; factor fp32 [1]. Raises as `fp8_cast` does, and where the tensors do not fit each other.
    """
    parts = given(first, second, third)
    x8, x8_t, factors = zip(*(fp8_cast(x, bound, amax, format, rows, columns) for x in parts))
    return _joined(x8, -1), _joined(x8_t, 0), factors[0]


def fp8_transpose(x8: Tensor) -> Tensor:
    """x8 [..., N] in 8 bits as [N, M16], M16 its rows rounded up to a multiple of 16; the added columns are 0."""
    return both(x8, False, True)[1]


def fp8_cast_rows(x: Tensor, format: str = "e4m3") -> tuple[Tensor, Tensor]:
    """x in 8 bits by one factor a row: x8 of x's shape, contiguous, and factor fp32 [M, 1].

    x: [..., N], floating. A row's factor is that of its largest absolute element, or of 2^-100 where that is smaller: a
    row of zeros has the least factor, so that rows that share one, the largest of theirs, lose nothing by it. Raises
    TypeError for a dtype that is not floating; ValueError for a scalar, another format, and an x that requires a
    gradient.
    """
    flat = as_rows(x).to(wide(x))
    factor = factors_of_rows(flat, format)
    return cast(flat, format, factor).contiguous().view(x.shape), factor.to(torch.float32)


def fp8_cast_blocks(
    x: Tensor, format: str = "e4m3", rows: bool = True, columns: bool = False, square: bool = False
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """x in 8 bits by one factor for 128 neighbours: (x8, factor, x8_t, factor_t).

    x: [M, N], floating. square: the factors are those of blocks of 128 x 128 elements; else each layout has its own, of
    128 neighbours along its last dim. rows: x8 [M, N] with factor [M, ceil(N / 128)] fp32, whose memory runs along M;
    square: [ceil(M / 128), ceil(N / 128)], contiguous. columns: x8_t [N, M16] and factor_t of it likewise, from x and
    not from x8. Outputs that are not requested are empty. Raises TypeError for other dtypes, ValueError for other
    shapes and formats.
    """
    empty8, empty = x.new_empty(0, dtype=FORMATS[format]), x.new_empty(0, dtype=torch.float32)
    x8, factor, x8_t, factor_t = empty8, empty, empty8, empty
    if rows:
        x8, factor = _by_blocks(x, format, square)
    if columns:
        padded = torch.nn.functional.pad(x.t(), (0, -x.shape[0] % 16))
        x8_t, factor_t = _by_blocks(padded, format, square)
    return x8, factor, x8_t, factor_t


def fp8_cast_experts(weight: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Stacked weights in float8_e4m3fn by one factor for each matrix: (weight8, weight8_t, factor).

    weight: [E, M, N], floating, M and N multiples of 16. A matrix's factor is that of its largest absolute element, as
    `fp8_cast` has it. Returns weight8 [E, M, N] and weight8_t [E, N, M], its transposed matrices, both contiguous;
    factor [E] fp32. Raises ValueError for other shapes.
    """
    size = weight.detach().to(wide(weight)).abs().amax((1, 2)) if weight.numel() else weight.new_zeros(weight.shape[0])
    factor = factor_of(size, "e4m3")
    weight8 = cast(weight, "e4m3", factor.to(wide(weight))[:, None, None]).contiguous()
    return weight8, weight8.transpose(1, 2).contiguous(), factor.to(torch.float32)


def rms_norm_fp8(
    x: Tensor,
    weight: Tensor | None,
    bound: Tensor,
    amax: Tensor,
    eps: float = 1e-6,
    offset: float = 0.0,
    casting: str = "fp32",
    format: str = "e4m3",
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """`rms_norm` and the cast of its result in one pass: (y, y8, factor, rstd).

    x, weight, eps, offset, casting and y: as `rms_norm` has them; x is contiguous but for a stride of its rows. bound,
    amax, format, y8 and factor: as `fp8_cast` has them, of y as rounded to x's dtype. There is no gradient: the caller
    computes that of `rms_norm`, with rstd. Raises TypeError for dtypes; ValueError for shapes, devices, eps, casting
    and format, and for tensors that require a gradient.
    """
    y, rstd = norm.rms_norm(x, weight, eps, offset, casting)
    y8, _, factor = fp8_cast(y, bound, amax, format)
    return y.contiguous(), y8, factor, rstd.contiguous()


def add_rms_norm_fp8(
    x: Tensor,
    residual: Tensor,
    weight: Tensor | None,
    bound: Tensor,
    amax: Tensor,
    eps: float = 1e-6,
    offset: float = 0.0,
    casting: str = "fp32",
    format: str = "e4m3",
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """`add_rms_norm` and the cast of its y in one pass: (y, s, y8, factor, rstd). See `rms_norm_fp8`."""
    y, s, rstd = norm.add_rms_norm(x, residual, weight, eps, offset, casting)
    y8, _, factor = fp8_cast(y, bound, amax, format)
    return y.contiguous(), s.contiguous(), y8, factor, rstd.contiguous()


def swiglu_fp8(gate: Tensor, up: Tensor, bound: Tensor, amax: Tensor, format: str = "e4m3") -> tuple[Tensor, Tensor]:
    """silu(gate) * up in 8 bits, (h8, factor), as `fp8_cast` makes it of what `swiglu` returns.

    gate, up: [..., N], one shape and dtype; the rows of each have one stride. Raises as `fp8_cast` does, and where gate
    and up differ in shape, dtype or device.
    """
    h8, _, factor = fp8_cast(swiglu(gate, up), bound, amax, format)
    return h8, factor


def swiglu_vjp_fp8(
    dh: Tensor,
    gate: Tensor,
    up: Tensor,
    bound: Tensor,
    amax: Tensor,
    h_factor: Tensor,
    format: str = "e5m2",
    h_format: str = "e4m3",
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The gradient of gate and up in 8 bits, both layouts, with silu(gate) * up again: (d8, d8_t, h8_t, factor).

    dh, gate, up: [..., N], one shape and dtype. d8 [M, 2N]: the gradients of gate and of up side by side, rounded to
    gate's dtype first, by the factor of `bound`; d8_t [2N, M16] is d8 transposed. h8_t [N, M16]: what `swiglu_fp8` made
    with h_factor, transposed. amax becomes the largest absolute element of both gradients, as in `fp8_cast`. Raises as
    `swiglu_fp8` does.
    """
    flat = [as_rows(t) for t in (dh, gate, up)]
    acc = wide(gate)
    d, g, u = (t.to(acc) for t in flat)
    sigmoid = torch.sigmoid(g)
    value = g * sigmoid
    dgate = d * u * (sigmoid + value * (1 - sigmoid))
    both_gradients = torch.cat((dgate, d * value), 1).to(gate.dtype)
    d8, d8_t, factor = fp8_cast(both_gradients, bound, amax, format, True, True)
    h8 = cast((value * u).to(gate.dtype), h_format, h_factor.to(acc))
    return d8, d8_t, both(h8, False, True)[1], factor


def scaled_matmul(
    a: Tensor,
    b: Tensor,
    a_factor: Tensor,
    b_factor: Tensor,
    bias: Tensor | None = None,
    dtype: str = "bfloat16",
    fast: bool = False,
) -> Tensor:
    """a b^T of 8-bit numbers, each multiplied by its factor: [M, N] in `dtype` ("bfloat16", "float16" or "float32").

    a [M, K], b [N, K]: float8_e4m3fn or float8_e5m2, not both e5m2; contiguous. a_factor, b_factor, fp32: [1] each; or
    [M, 1] and [N, 1]; or, for blocks of 128 along K, [M, ceil(K / 128)] and [N, ceil(K / 128)] or [ceil(N / 128),
    ceil(K / 128)], as `fp8_cast_blocks` lays them out. bias: [N] in `dtype`, or None. fast: partial sums may be kept in
    the tensor cores' own registers all along K; else sums of parts of K are, which are then added in fp32. Those
    registers keep 14 bits of a sum on Ada and Hopper, which a float32 result shows (DeepSeek-AI, DeepSeek-V3,
    arXiv:2412.19437, 3.3.2). Raises TypeError for dtypes, ValueError for shapes, devices and factors that do not fit.
    """
    acc = torch.float64 if a.dtype is torch.float64 else torch.float32
    y = expand_factor(a_factor, a).to(acc) * a.to(acc) @ (expand_factor(b_factor, b).to(acc) * b.to(acc)).t()
    y = y if bias is None else y + bias.to(acc)
    return y if acc is torch.float64 else y.to(OUTPUTS[dtype])


def expand_factor(factor: Tensor, x: Tensor) -> Tensor:
    """A factor as `scaled_matmul` takes it, for each element of x [M, K]."""
    if factor.ndim == 1 or (factor.shape[1] == 1 and factor.shape[0] == x.shape[0] and x.shape[1] > BLOCK):
        return factor
    if factor.shape == (x.shape[0], 1):
        return factor
    if factor.shape[0] != x.shape[0]:
        factor = factor.repeat_interleave(BLOCK, 0)[: x.shape[0]]
    return factor.repeat_interleave(BLOCK, 1)[:, : x.shape[1]]


def factor_of(bound: Tensor, format: str) -> Tensor:
    """The least power of two that is at least bound / the format's largest number; 1 where bound counts as zero."""
    finite = torch.nan_to_num(bound.to(torch.float32), nan=torch.inf).clamp(max=torch.finfo(torch.float32).max)
    part, power = torch.frexp(finite)
    power = power - (9 if format == "e4m3" else 16) + (part > 0.875)
    return torch.where(finite > SMALLEST, torch.ldexp(torch.ones_like(finite), power), 1.0)


def factors_of_rows(x: Tensor, format: str) -> Tensor:
    """The factors [M, 1] of rows x [M, N], the least one for a row that counts as zero."""
    return factor_of(largest(x, 1).clamp(min=SMALLEST * (1 + 2**-23)), format)


def given(*tensors: Tensor | None) -> list[Tensor]:
    """Those that are not None."""
    return [t for t in tensors if t is not None]


def largest(x: Tensor, dim: int | None = None) -> Tensor:
    """max |x| as [1], or along `dim`, which is kept. 0 along an empty dim."""
    if dim is None:
        return x.detach().abs().amax().reshape(1)
    return x.abs().amax(dim, keepdim=True) if x.shape[dim] else x.sum(dim, keepdim=True)


def cast(x: Tensor, format: str, factor: Tensor | float = 1.0) -> Tensor:
    """x / factor rounded to 8 bits: finite x saturate, even where the quotient overflows; others become NaN."""
    limit = GREATEST[format]
    return torch.where(x.isfinite(), (x / factor).clamp(-limit, limit), torch.nan).to(FORMATS[format])


def both(x8: Tensor, rows: bool, columns: bool) -> tuple[Tensor, Tensor]:
    """(x8, x8 transposed [N, M16]), each empty unless asked for."""
    empty = x8.new_empty(0)
    if not columns:
        return x8.contiguous() if rows else empty, empty
    flat = as_rows(x8)
    x8_t = flat.new_zeros(flat.shape[1], flat.shape[0] + -flat.shape[0] % 16)
    x8_t[:, : flat.shape[0]] = flat.t()
    return x8.contiguous() if rows else empty, x8_t


def _joined(parts: Sequence[Tensor], dim: int) -> Tensor:
    """Tensors in 8 bits one after the other along a dim: as bytes, which PyTorch can concatenate in each version."""
    return torch.cat([x.view(torch.uint8) for x in parts], dim).view(parts[0].dtype)


def as_rows(x: Tensor) -> Tensor:
    """x [..., N] as [M, N]."""
    return x.reshape(math.prod(x.shape[:-1]), x.shape[-1])


def wide(x: Tensor) -> torch.dtype:
    return torch.promote_types(x.dtype, torch.float32)


def _by_blocks(x: Tensor, format: str, square: bool) -> tuple[Tensor, Tensor]:
    height = BLOCK if square else 1
    m, n = x.shape
    padded = torch.nn.functional.pad(x.to(wide(x)), (0, -n % BLOCK, 0, -m % height))
    tiles = padded.reshape(padded.shape[0] // height, height, padded.shape[1] // BLOCK, BLOCK)
    size = tiles.abs().amax((1, 3)) if tiles.numel() else tiles.sum((1, 3))
    factor = factor_of(size, format)
    x8 = cast(tiles, format, factor[:, None, :, None].to(tiles.dtype)).reshape(padded.shape)[:m, :n].contiguous()
    factor = factor.to(torch.float32)
    return x8, factor.contiguous() if square else factor.new_empty(factor.shape[::-1]).t().copy_(factor)
