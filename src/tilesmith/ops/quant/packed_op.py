"""Packed weights of mixed widths: quantise, dequantise, and products with them.

Legend: see packed_reference.py. The codes are frozen: of the ops' arguments only x receives a gradient.
"""

import torch
from torch import Tensor

from tilesmith.engine import Op
from tilesmith.engine.argument_checks import floating
from tilesmith.ops.quant import packed_reference as reference
from tilesmith.ops.quant.packed_reference import GROUP, OUTPUTS, TILE_ROWS, WORDS_PER_BIT

TRITON = {"triton": "tilesmith.ops.quant.triton.packed"}
EXACT = torch.float64  # what the oracle computes in


def _fake_quantize(weight: Tensor, scale: Tensor, zero: Tensor, order: Tensor, strips: Tensor, words: int) -> Tensor:
    return weight.new_empty(words, dtype=torch.int32)


def _fake_dequantize(
    codes: Tensor, scale: Tensor, zero: Tensor, order: Tensor, strips: Tensor, rows: int, dtype: str
) -> Tensor:
    return scale.new_empty(rows, order.shape[1] * GROUP, dtype=EXACT if scale.dtype == EXACT else OUTPUTS[dtype])


def _fake_linear(
    x: Tensor, codes: Tensor, scale: Tensor, zero: Tensor, order: Tensor, strips: Tensor, rows: int
) -> Tensor:
    return x.new_empty((*x.shape[:-1], rows))


def _fake_linear_vjp(
    dy: Tensor, codes: Tensor, scale: Tensor, zero: Tensor, order: Tensor, strips: Tensor, rows: int
) -> Tensor:
    return dy.new_empty((*dy.shape[:-1], order.shape[1] * GROUP))


def _check_packed(
    op: str, scale: Tensor, zero: Tensor, order: Tensor, strips: Tensor, rows: int, *others: tuple[str, Tensor]
) -> None:
    """Raise where tensors of a packed weight do not fit one another. Their contents are not looked at: that would wait
    for the device."""
    if order.dtype != torch.int16 or order.ndim != 2:
        raise TypeError(f"{op}: order is {order.dtype} of shape {tuple(order.shape)}; it must be int16 [S, G]")
    count, groups = order.shape
    if strips.dtype != torch.int32 or strips.shape != (count, 5):
        raise TypeError(f"{op}: strips is {strips.dtype} of shape {tuple(strips.shape)}; it must be int32 [{count}, 5]")
    for name, x in (("scale", scale), ("zero", zero)):
        if x.dtype not in (torch.float16, EXACT) or x.shape != (count, groups, TILE_ROWS):
            raise TypeError(
                f"{op}: {name} is {x.dtype} of shape {tuple(x.shape)}; it must be float16 [{count}, {groups}, 16]"
            )
    if not (count - 1) * TILE_ROWS < rows <= count * TILE_ROWS:
        raise ValueError(f"{op}: rows is {rows}; {count} strips of 16 rows hold {count * 16 - 15} to {count * 16}")
    for name, x in (("zero", zero), ("order", order), ("strips", strips), *others):
        if x.device != scale.device:
            raise ValueError(f"{op}: {name} is on {x.device}, scale on {scale.device}; move them to one device")


def _check_codes(op: str, codes: Tensor, order: Tensor) -> None:
    """After `_check_packed`."""
    if codes.dtype != torch.int32 or codes.ndim != 1:
        raise TypeError(f"{op}: codes is {codes.dtype} of shape {tuple(codes.shape)}; it must be int32 [words]")
    least = 2 * WORDS_PER_BIT * order.numel()
    if not least <= codes.shape[0] <= 4 * least:
        raise ValueError(
            f"{op}: codes has {codes.shape[0]} words; {order.numel()} tiles of 2 to 8 bits have {least} to {4 * least}"
        )


def _check_quantize(weight: Tensor, scale: Tensor, zero: Tensor, order: Tensor, strips: Tensor, words: int) -> None:
    op = "quantize_packed"
    floating(op, "weight", weight)
    if weight.requires_grad and torch.is_grad_enabled():
        raise ValueError(f"{op}: weight requires a gradient, but rounding has none; call it under torch.no_grad()")
    _check_packed(op, scale, zero, order, strips, weight.shape[0] if weight.ndim else 0, ("weight", weight))
    if weight.ndim != 2 or weight.shape[1] != order.shape[1] * GROUP:
        raise ValueError(
            f"{op}: weight has shape {tuple(weight.shape)}; for this order it must be [N, {order.shape[1] * GROUP}]"
        )
    least = 2 * WORDS_PER_BIT * order.numel()
    if not least <= words <= 4 * least or words % WORDS_PER_BIT:
        raise ValueError(f"{op}: words is {words}; {order.numel()} tiles have {least} to {4 * least}, in steps of 32")


def _check_dequantize(
    codes: Tensor, scale: Tensor, zero: Tensor, order: Tensor, strips: Tensor, rows: int, dtype: str = "float16"
) -> None:
    op = "dequantize_packed"
    _check_packed(op, scale, zero, order, strips, rows, ("codes", codes))
    _check_codes(op, codes, order)
    if dtype not in OUTPUTS:
        raise ValueError(f"{op}: dtype is {dtype!r}; it must be one of {', '.join(map(repr, OUTPUTS))}")


def _check_product(
    op: str, name: str, x: Tensor, columns: int, codes: Tensor, packed: tuple[Tensor, ...], rows: int
) -> None:
    floating(op, name, x)
    _check_packed(op, *packed, rows, ("codes", codes), (name, x))
    _check_codes(op, codes, packed[2])
    if x.ndim < 1 or x.shape[-1] != columns:
        raise ValueError(f"{op}: {name} has shape {tuple(x.shape)}; for this weight it must be [..., {columns}]")


def _check_linear(
    x: Tensor, codes: Tensor, scale: Tensor, zero: Tensor, order: Tensor, strips: Tensor, rows: int
) -> None:
    columns = order.shape[-1] * GROUP if order.ndim else 0
    _check_product("dequant_linear", "x", x, columns, codes, (scale, zero, order, strips), rows)


def _check_linear_vjp(
    dy: Tensor, codes: Tensor, scale: Tensor, zero: Tensor, order: Tensor, strips: Tensor, rows: int
) -> None:
    _check_product("dequant_linear_vjp", "dy", dy, rows, codes, (scale, zero, order, strips), rows)


quantize_packed = Op(
    reference.quantize_packed, fake=_fake_quantize, outputs=("codes",), check=_check_quantize, kernels=TRITON
)
dequantize_packed = Op(
    reference.dequantize_packed,
    fake=_fake_dequantize,
    outputs=("weight",),
    check=_check_dequantize,
    kernels={**TRITON, "hopper": "tilesmith.ops.quant.hopper.packed", "aten": "tilesmith.ops.quant.aten"},
)
dequant_linear_vjp = Op(
    reference.dequant_linear_vjp,
    fake=_fake_linear_vjp,
    outputs=("dx",),
    check=_check_linear_vjp,
    kernels={"aten": "tilesmith.ops.quant.aten"},
    fold=("dy",),
)
dequant_linear = Op(
    reference.dequant_linear,
    fake=_fake_linear,
    vjp=dequant_linear_vjp,
    outputs=("y",),
    check=_check_linear,
    kernels={
        "aten": "tilesmith.ops.quant.aten",
        "triton": "tilesmith.ops.quant.triton.packed_linear",
        "hopper": "tilesmith.ops.quant.hopper.packed_linear",
    },
    autocast=("x",),
    fold=("x",),
)
