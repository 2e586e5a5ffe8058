"""Products with packed weights of mixed widths on Hopper: of one row by packed_row, of a few by packed_rows, of tens by
packed_wide, of many with the dequantised weight.

A warp takes a tile at a time: 16 outputs by 64 inputs are four products of 16 x 8 x 16. Its codes are operands as they
are unpacked: a field is the mantissa of a 16-bit number, a shift and one logic operation for two of them. So a product
is of x and the codes plus a constant, which is subtracted, with the zeros, times the sum of x, itself a product with
ones. Scales are multiplied in fp32, once for 64 inputs. packed_wide makes weights of the codes, and no constant stays.
"""

from functools import lru_cache, partial
from typing import Any

import torch
from torch import Tensor

from tilesmith.device.alignment import aligned, is_16_byte_aligned
from tilesmith.device.gluon.cluster import clusters_of
from tilesmith.device.rows import rows as as_rows
from tilesmith.engine import Space, optimize_kernel, register_kernel, rehearsed
from tilesmith.hardware.detect import arch_of
from tilesmith.ops.quant.hopper.packed import StripConfig, scale_refused, unpacked, warps_of_strip
from tilesmith.ops.quant.hopper.packed_plan import LinearConfig, RowsShape, chosen, shape_of
from tilesmith.ops.quant.hopper.packed_row import row_product, warps_of_row
from tilesmith.ops.quant.hopper.packed_rows import rows_product
from tilesmith.ops.quant.hopper.packed_wide import wide_product
from tilesmith.ops.quant.packed_reference import WORDS_PER_BIT, row_count


def _dims(x: Tensor, codes: Tensor, scale: Tensor, *rest: Any) -> dict[str, int]:
    return _sizes(row_count(x), codes, *scale.shape[:2])


def _sizes(tokens: int, codes: Tensor, strips: int, groups: int) -> dict[str, int]:
    """bits: ten times a weight's on average, since widths themselves lie on the device."""
    bits = round(10 * codes.shape[0] / (WORDS_PER_BIT * max(1, strips * groups)))
    return {"tokens": tokens, "strips": strips, "groups": groups, "bits": bits}


def _default(dims: dict[str, int], arch: Any, dtype: Any) -> LinearConfig:
    if dims["tokens"] == 1:
        return LinearConfig(warps_of_row(dims["strips"], dims["groups"], arch.sms), 1)
    shape = _chosen(*dims.values(), arch)[0] if dims["tokens"] * dims["strips"] * dims["groups"] else None
    if shape is None:
        return LinearConfig(*warps_of_strip(dims, arch, dtype))
    return LinearConfig(shape.num_warps, shape.rows, shape.parts, shape.wide)


@lru_cache(maxsize=4096)
def _chosen(tokens: int, strips: int, groups: int, bits: int, arch: Any) -> tuple[RowsShape | None, float]:
    dims = {"tokens": tokens, "strips": strips, "groups": groups, "bits": bits}
    return chosen(dims, arch, partial(clusters_of, arch))


@lru_cache(maxsize=4096)
def _shape_of(config: LinearConfig, tokens: int, strips: int, groups: int, arch: Any) -> RowsShape | None:
    dims = {"tokens": tokens, "strips": strips, "groups": groups}
    return shape_of(config, dims, partial(clusters_of, arch))


LINEAR_SPACE = Space(
    default=_default,
    dims=_dims,
    choices={
        "num_warps": (4, 8, 16),
        "rows": (0, 8, 16, 32, 64, 128),
        "parts": (1, 2, 4, 7, 8),
        "wide": (False, True),
    },
)


def _rejects(call) -> list[str]:
    reasons = []
    if call.x.dtype not in (torch.bfloat16, torch.float16):
        reasons.append(f"x is {call.x.dtype}; this kernel takes bfloat16 and float16")
    return reasons + scale_refused(call.scale)


def _tells(
    x: Tensor, codes: Tensor, scale: Tensor, zero: Tensor, order: Tensor, strips: Tensor, rows: int,
    *, config: LinearConfig, arch: Any,
) -> list[str]:  # fmt: skip
    tokens = row_count(x)
    shape = _way(tokens, codes, order, config, arch)
    if shape == BY_ROW:
        return ["packed_row_kernel: one row on tensor cores, tiles from memory to registers four at a time"]
    if shape is None:
        return [f"{tokens} rows: the weight is dequantised, the product is the device library's"]
    return [
        f"packed_{'wide' if shape.wide else 'rows'}_kernel: {tokens} rows on tensor cores, {shape.rows} in a CTA, "
        f"the inputs divided among clusters of {shape.parts}, a strip for each of {shape.num_warps} warps"
    ]


BY_ROW = RowsShape(1, 1, 4, 1, 1)
"""In place of the form of several rows: packed_row computes the product."""


def _way(tokens: int, codes: Tensor, order: Tensor, config: LinearConfig, arch: Any) -> RowsShape | None:
    """How a call is computed; None: with the dequantised weight. Both kernels load codes 16 bytes at a time."""
    if not is_16_byte_aligned(codes):
        return None
    if tokens == 1:
        return BY_ROW
    if config.rows == 1:  # tuned for one row: it says nothing of more
        return _chosen(*_sizes(tokens, codes, *order.shape).values(), arch)[0]
    return _shape_of(config, tokens, *order.shape, arch)


@register_kernel("dequant_linear", backend="hopper", rank=30, rejects=_rejects, tells=_tells, plans=rehearsed)
@optimize_kernel(space=LINEAR_SPACE)
def dequant_linear(
    x: Tensor,
    codes: Tensor,
    scale: Tensor,
    zero: Tensor,
    order: Tensor,
    strips: Tensor,
    rows: int,
    *,
    config: LinearConfig,
) -> Tensor:
    tokens, tables, arch = row_count(x), (scale, zero, order, strips), arch_of(x.device)
    if not tokens:
        return x.new_empty((*x.shape[:-1], rows))
    codes = codes.contiguous()
    shape = _way(tokens, codes, order, config, arch)
    if shape is None:
        weight = unpacked(codes, tables, rows, x.dtype, StripConfig(config.num_warps))
        return torch.mm(as_rows(x), weight.t()).view(*x.shape[:-1], rows)
    y = x.new_empty((*x.shape[:-1], rows))
    flat, x_row = aligned(as_rows(x))
    packed = codes, *(t.contiguous() for t in tables)
    if shape == BY_ROW:
        row_product(flat, packed, y, config.num_warps, arch.sms)
    else:
        (wide_product if shape.wide else rows_product)(flat, x_row, packed, y, shape)
    return y
