"""Products of 8-bit numbers by PyTorch's scaled matmul (cuBLASLt on CUDA, oneDNN on a CPU), and of packed weights that
are dequantised first."""

import sys
from functools import cache

import torch
from torch import Tensor
from torch.nn import functional as F

from tilesmith.engine import register_kernel, torch_private
from tilesmith.ops.quant import packed_op, reference, unpack
from tilesmith.ops.quant.reference import BLOCK, OUTPUTS

# eps of sums of 8-bit products on Ada and Hopper, which keep 13 bits behind the leading one (arXiv:2412.19437, 3.3.2)
SUMS = 2.0**-13


def _rejects(call) -> list[str]:
    reasons = [f"{name} is float64" for name in ("a", "b") if getattr(call, name).dtype == torch.float64]
    arch = call.arch
    if arch.kind not in ("cuda", "cpu"):
        reasons.append(f"{arch.kind} was not tried")
    return reasons + (_cpu_rejects(call) if arch.kind == "cpu" else _gpu_rejects(call))


def _gpu_rejects(call) -> list[str]:
    arch, reasons = call.arch, []
    if arch.kind == "cuda" and arch.capability < (8, 9):
        reasons.append(f"{arch.name} has no tensor cores for 8-bit floats; compute capability 8.9 and up does")
    if call.a.cols % 16:
        reasons.append(f"K is {call.a.cols}; multiples of 16 are supported")
    if _by_blocks(call) and arch.kind == "cuda":
        if arch.capability[0] != 9:
            reasons.append(f"factors of blocks are supported on compute capability 9.0, not on {arch.name}")
        if _cuda() < (12, 9):
            reasons.append(f"factors of blocks need cuBLAS of CUDA 12.9; PyTorch was built with {torch.version.cuda}")
    return reasons


def _cpu_rejects(call) -> list[str]:
    reasons = []
    if _by_blocks(call):
        reasons.append("PyTorch's scaled matmul on a CPU has no factors of blocks")
    elif call.a_factor.ndim == 2:
        refused = _cpu_refuses_rows()
        reasons += [refused] if refused else []
    if call.bias is not None and call.bias.dtype != torch.float32:  # which is added to the product
        refused = _cpu_refuses_bias(call.bias.dtype, call.a_factor.ndim == 2)
        reasons += [refused] if refused else []
    return reasons


def _by_blocks(call) -> bool:
    """Whether factors change along K; where one block holds all of K, they are those of rows."""
    return call.a_factor.ndim == 2 and call.a_factor.cols > 1


def _cuda() -> tuple[int, ...]:
    """The CUDA version that PyTorch was built with. Without one, nothing is known of the machine asked about."""
    return tuple(map(int, torch.version.cuda.split(".")[:2])) if torch.version.cuda else (99,)


def _cpu_refuses_rows() -> str:
    """Why PyTorch's scaled matmul takes no factors of rows on a CPU; "" where it does. 2.11 does not."""
    return _tried("factors of rows", True, torch.bfloat16, False)


def _cpu_refuses_bias(dtype: torch.dtype, by_row: bool) -> str:
    """Why PyTorch's scaled matmul adds no bias of a dtype on a CPU; "" where it does, as 2.11 with one factor a
    tensor."""
    return _tried(f"a bias in {dtype}", by_row, dtype, True)


def _tried(what: str, by_row: bool, dtype: torch.dtype, biased: bool) -> str:
    # tensors made under a mode may be none: what such a call says is not kept
    trial = _try_on_cpu.__wrapped__ if torch_private.dispatch_modes() else _try_on_cpu
    said = trial(by_row, dtype, biased)
    return f"PyTorch {torch.__version__} has no scaled matmul with {what} on a CPU: {said}" if said else ""


@cache
def _try_on_cpu(by_row: bool, dtype: torch.dtype, biased: bool) -> str:
    """What PyTorch says of a small product, or "" where it makes it."""
    a = torch.zeros(16, 16, dtype=torch.float8_e4m3fn)
    factor = torch.ones(16, 1, dtype=torch.float32)
    factors = (factor, factor.view(1, 16)) if by_row else (factor[0, 0], factor[0, 0])
    try:
        torch._scaled_mm(a, a.t(), *factors, torch.ones(16, dtype=dtype) if biased else None, out_dtype=dtype)
    except (RuntimeError, NotImplementedError) as problem:
        return str(problem).strip().splitlines()[-1]
    return ""


def _eps(call) -> dict[str, float]:
    """Tensor cores of Ada and Hopper add 8-bit products up in fewer bits than fp32 has."""
    return {"y": SUMS} if call.arch.kind == "cuda" and (8, 9) <= call.arch.capability < (10, 0) else {}


def _tells(
    a: Tensor, b: Tensor, a_factor: Tensor, b_factor: Tensor, bias: Tensor | None, dtype: str, fast: bool, *, arch
) -> list[str]:
    told = []
    if arch.kind == "cuda" and (8, 9) <= arch.capability < (10, 0):
        where = "all along K" if fast else "of parts of K, which are then added in fp32"
        told.append(f"tensor cores keep sums of 8-bit products in 14 bits, {where}")
    if a_factor.ndim == 2 and dtype != "bfloat16":
        told.append(f"the product with factors of rows or blocks is made in bfloat16 and then converted to {dtype}")
    return told


@register_kernel("scaled_matmul", backend="aten", rank=10, rejects=_rejects, tells=_tells, eps=_eps)
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
    out, rows, columns = OUTPUTS[dtype], a.shape[0], b.shape[0]
    if not (a.numel() and b.numel()):
        y = a.new_zeros(rows, columns, dtype=out)
        return y if bias is None else y + bias
    by_row = a_factor.ndim == 2
    if by_row and a_factor.shape[1] == 1 and b_factor.shape[0] != columns:  # one block along K: alike to rows
        b_factor = b_factor.repeat_interleave(BLOCK, 0)[:columns]
    if by_row and a_factor.shape[1] > 1:
        a, b, a_factor, b_factor = _whole_groups(a, b, a_factor, b_factor)
    # CUTLASS's kernel for factors of rows writes bf16 alone; a wider result would have been rounded by the factors
    made = torch.bfloat16 if by_row else out
    inside = bias if made is out and out is not torch.float32 else None  # PyTorch adds no fp32 bias
    if columns % 16 and a.is_cuda:
        b, b_factor, inside = _padded(b, b_factor, inside, -columns % 16)
    if not by_row:
        factors = a_factor.view(()), b_factor.view(())
    elif a_factor.shape[1] == 1:
        factors = a_factor.reshape(-1).view(-1, 1), b_factor.reshape(-1).view(1, -1)
    else:
        factors, fast = (a_factor, b_factor.t()), False  # cuBLASLt refuses it: each block's sum is promoted anyway
    y = torch._scaled_mm(a, b.t(), *factors, inside, out_dtype=made, use_fast_accum=fast)
    y = y if y.shape == (rows, columns) else y[:rows, :columns].contiguous()
    y = y if made is out else y.to(out)
    return y if bias is None or inside is not None else y + bias


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


def _rejects_unpacking(call) -> list[str]:
    reasons = [] if call.arch.kind == "cpu" else [f"{call.arch.kind} was not tried"]
    if sys.byteorder != "little":
        reasons.append(f"this machine is {sys.byteorder}-endian; words are split as on a little-endian one")
    if call.scale.dtype == torch.float64:
        reasons.append("scale is torch.float64; codes are scaled in float32")
    return reasons


@register_kernel("dequantize_packed", backend="aten", rank=10, rejects=_rejects_unpacking)
def dequantize_packed(
    codes: Tensor, scale: Tensor, zero: Tensor, order: Tensor, strips: Tensor, rows: int, dtype: str = "float16"
) -> Tensor:
    """The weight, a million elements at a time."""
    return unpack.dequantized(codes, scale, zero, order, strips, rows, OUTPUTS[dtype])


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
