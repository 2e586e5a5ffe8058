"""Products of 8-bit numbers by PyTorch's scaled matmul (cuBLASLt on CUDA, oneDNN on a CPU), and of packed weights that
are dequantised first."""

import torch
from torch import Tensor
from torch.nn import functional as F

from tilesmith.engine import register_kernel
from tilesmith.ops.quant import packed_op, reference
from tilesmith.ops.quant.reference import BLOCK, OUTPUTS


def _rejects(call) -> list[str]:
    reasons = [f"{name} is float64" for name in ("a", "b") if getattr(call, name).dtype == torch.float64]
    arch = call.arch
    if arch.kind == "cuda" and arch.capability < (8, 9):
        reasons.append(f"{arch.name} has no tensor cores for 8-bit floats; compute capability 8.9 and up does")
    if arch.kind not in ("cuda", "cpu"):
        reasons.append(f"{arch.kind} was not tried")
    if arch.kind == "cuda" and call.a.cols % 16:
        reasons.append(f"K is {call.a.cols}; multiples of 16 are served")
    blocks = call.a_factor.ndim == 2 and call.a_factor.cols > 1
    if blocks and arch.kind == "cuda" and arch.capability[0] != 9:
        reasons.append(f"factors of blocks are served on compute capability 9.0, not on {arch.name}")
    if arch.kind == "cpu" and call.b_factor.ndim == 2 and (blocks or call.b_factor.cols > 1):
        reasons.append("PyTorch's scaled matmul on a CPU has no factors of blocks")
    if arch.kind == "cpu" and call.bias is not None:
        reasons.append("PyTorch's scaled matmul on a CPU adds no bias of this dtype")
    return reasons


@register_kernel("scaled_matmul", backend="aten", rank=10, rejects=_rejects)
def scaled_matmul(
    a: Tensor,
    b: Tensor,
    a_factor: Tensor,
    b_factor: Tensor,
    bias: Tensor | None = None,
    dtype: str = "bfloat16",
    fast: bool = False,
) -> Tensor:
    """One product."""
    out, rows = OUTPUTS[dtype], a.shape[0]
    if not (a.numel() and b.numel()):
        y = a.new_zeros(rows, b.shape[0], dtype=out)
        return y if bias is None else y + bias
    by_row = a_factor.ndim == 2
    if by_row and a_factor.shape[1] == 1 and b_factor.shape != (b.shape[0], 1):  # one block along K, alike to rows
        return reference.scaled_matmul(a, b, a_factor, b_factor, bias, dtype, fast)
    columns = b.shape[0]
    if by_row and a_factor.shape[1] > 1 and a.is_cuda:
        a, b, a_factor, b_factor = _whole_groups(a, b, a_factor, b_factor)
    if columns % 16 and a.is_cuda:
        b, b_factor, bias = _padded(b, b_factor, bias, -columns % 16)
    # CUTLASS's kernel for factors of rows writes bf16 alone; a wider result would have been rounded by the factors
    made = torch.bfloat16 if by_row else out
    if not by_row:
        factors = a_factor.view(()), b_factor.view(())
    elif a_factor.shape[1] == 1:
        factors = a_factor.reshape(-1).view(-1, 1), b_factor.reshape(-1).view(1, -1)
    else:
        factors, fast = (a_factor, b_factor.t()), False  # cuBLASLt refuses it: each block's sum is promoted anyway
    y = torch._scaled_mm(a, b.t(), *factors, bias, out_dtype=made, use_fast_accum=fast)
    y = y if y.shape == (rows, columns) else y[:rows, :columns].contiguous()
    return y if made is out else y.to(out)


def _whole_groups(a: Tensor, b: Tensor, a_factor: Tensor, b_factor: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Operands and factors of blocks, with zeros behind them, as cuBLASLt reads them.

    It takes the rows of 128 x 128 factors to lie a multiple of four apart, whereas PyTorch up to 2.11 insists that
    they lie as far apart as they are long: both hold where K is a multiple of 512. The columns of 1 x 128 factors begin
    at multiples of 16 bytes.
    """
    square = b_factor.shape[0] != b.shape[0]
    along, rows = -a.shape[1] % (4 * BLOCK if square else 1), -a.shape[0] % 4
    if along:
        a, b = _extended(a, 0, along), _extended(b, 0, along)
        more = -(-a.shape[1] // BLOCK) - a_factor.shape[1]
        a_factor = F.pad(a_factor.t(), (0, 0, 0, more), value=1.0).t()
        b_factor = F.pad(b_factor, (0, more), value=1.0)
    if rows:
        a, a_factor = _extended(a, rows, 0), F.pad(a_factor.t(), (0, rows), value=1.0).t()
    return a, b, a_factor, b_factor


def _extended(x: Tensor, rows: int, columns: int) -> Tensor:
    """x in 8 bits with rows and columns of zeros behind it."""
    return F.pad(x.view(torch.uint8), (0, columns, 0, rows)).view(x.dtype)


def _padded(b: Tensor, factor: Tensor, bias: Tensor | None, rows: int) -> tuple[Tensor, Tensor, Tensor | None]:
    """b with rows of zeros, since cuBLASLt wants whole groups of 16 outputs."""
    if factor.ndim == 2 and factor.shape[0] == b.shape[0]:
        factor = F.pad(factor.t(), (0, rows), value=1.0).t()
    return _extended(b, rows, 0), factor, None if bias is None else F.pad(bias, (0, rows))


NAMES = {dtype: name for name, dtype in OUTPUTS.items()}


def _rejects_packed(call) -> list[str]:
    x = call.x if hasattr(call, "x") else call.dy
    return [] if x.dtype in NAMES else [f"the tensors are {x.dtype}; the weight is made in 16 or 32 bits"]


@register_kernel("dequant_linear", backend="aten", rank=10, rejects=_rejects_packed)
def dequant_linear(
    x: Tensor, codes: Tensor, scale: Tensor, zero: Tensor, order: Tensor, strips: Tensor, rows: int
) -> Tensor:
    """The weight in x's dtype, then one product of all rows."""
    weight = packed_op.dequantize_packed(codes, scale, zero, order, strips, rows, NAMES[x.dtype])
    return torch.mm(reference.as_rows(x), weight.t()).view(*x.shape[:-1], rows)


@register_kernel("dequant_linear_vjp", backend="aten", rank=10, rejects=_rejects_packed)
def dequant_linear_vjp(
    dy: Tensor, codes: Tensor, scale: Tensor, zero: Tensor, order: Tensor, strips: Tensor, rows: int
) -> Tensor:
    """The weight in dy's dtype, then one product of all rows."""
    weight = packed_op.dequantize_packed(codes, scale, zero, order, strips, rows, NAMES[dy.dtype])
    return torch.mm(reference.as_rows(dy), weight).view(*dy.shape[:-1], weight.shape[1])
