"""The quant family: casts to 8 bits, producers that cast what they make, and products of what was cast.

Legend: see reference.py. No op here has a gradient: rounding has none, and the layers that use them know theirs.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from tilesmith.engine import Op, cdiv
from tilesmith.engine.argument_checks import floating
from tilesmith.ops.quant import reference
from tilesmith.ops.quant.reference import BLOCK, FORMATS, OUTPUTS, given

TRITON = {"triton": "tilesmith.ops.quant.triton.cast"}
PARTS = {"triton": "tilesmith.ops.quant.triton.parts"}
PRODUCERS = {"triton": "tilesmith.ops.quant.triton.producers"}
SMALL = frozenset(FORMATS.values())
EXACT = torch.float64  # in place of 8 bits: what the reference computes, exactly


def rounded_up(rows: int) -> int:
    """rows, or the next multiple of 16: products of transposed tensors want whole groups of 16 bytes."""
    return cdiv(rows, 16) * 16


def count_of(x: Tensor) -> int:
    """M: the product of all dims of x but the last."""
    rows = 1
    for size in x.shape[:-1]:
        rows = rows * size
    return rows


def like8(x: Tensor, format: str, rows: bool, columns: bool) -> tuple[Tensor, Tensor]:
    """Empty x8 and x8_t for x."""
    dtype, shape_t = FORMATS[format], (x.shape[-1], rounded_up(count_of(x)))
    return x.new_empty(x.shape if rows else 0, dtype=dtype), x.new_empty(shape_t if columns else 0, dtype=dtype)


def stack_like(parts: Sequence[Tensor], format: str) -> tuple[Tensor, Tensor]:
    """Empty x8 and x8_t for matrices on top of each other."""
    rows, first = 0, parts[0]
    for x in parts:
        rows = rows + x.shape[0]
    shapes, dtype = ((rows, first.shape[1]), (first.shape[1], rows)), FORMATS[format]
    return first.new_empty(shapes[0], dtype=dtype), first.new_empty(shapes[1], dtype=dtype)


def beside_like(parts: Sequence[Tensor], format: str, rows: bool, columns: bool) -> tuple[Tensor, Tensor]:
    """Empty x8 and x8_t for tensors side by side."""
    cols, first, dtype = 0, parts[0], FORMATS[format]
    for x in parts:
        cols = cols + x.shape[-1]
    shape, shape_t = (*first.shape[:-1], cols), (cols, rounded_up(count_of(first)))
    return first.new_empty(shape if rows else 0, dtype=dtype), first.new_empty(shape_t if columns else 0, dtype=dtype)


def blocks_like(x: Tensor, format: str, square: bool) -> tuple[Tensor, Tensor]:
    """Empty x8 and factor by blocks for x [M, N]."""
    m, n = x.shape
    x8 = x.new_empty(m, n, dtype=FORMATS[format])
    if square:
        return x8, x.new_empty(cdiv(m, BLOCK), cdiv(n, BLOCK), dtype=torch.float32)
    return x8, x.new_empty(cdiv(n, BLOCK), m, dtype=torch.float32).t()


def _one(x: Tensor) -> Tensor:
    return x.new_empty(1, dtype=torch.float32)


def _per_row(x: Tensor) -> Tensor:
    return torch.empty(x.shape[:-1], dtype=torch.promote_types(x.dtype, torch.float32), device=x.device)


def _packed(x: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    return torch.empty(x.shape, dtype=dtype or x.dtype, device=x.device)


def _fake_amax(x: Tensor, second: Tensor | None, third: Tensor | None) -> Tensor:
    return _one(x)


def _fake_cast(x: Tensor, bound: Tensor, amax: Tensor, format: str, rows: bool, columns: bool) -> tuple[Tensor, ...]:
    return *like8(x, format, rows, columns), _one(x)


def _fake_cast_stack(first: Tensor, second: Tensor, third: Tensor | None, format: str) -> tuple[Tensor, ...]:
    return *stack_like(given(first, second, third), format), _one(first)


def _fake_cast_beside(first, second, third, bound, amax, format, rows, columns) -> tuple[Tensor, ...]:
    return *beside_like(given(first, second, third), format, rows, columns), _one(first)


def _fake_transpose(x8: Tensor) -> Tensor:
    return x8.new_empty(x8.shape[-1], rounded_up(count_of(x8)))


def _fake_cast_rows(x: Tensor, format: str) -> tuple[Tensor, Tensor]:
    return like8(x, format, True, False)[0], x.new_empty(count_of(x), 1, dtype=torch.float32)


def _fake_cast_blocks(x: Tensor, format: str, rows: bool, columns: bool, square: bool) -> tuple[Tensor, ...]:
    nothing = x.new_empty(0, dtype=FORMATS[format]), x.new_empty(0, dtype=torch.float32)
    x_t = x.new_empty(x.shape[1], rounded_up(x.shape[0]))
    first = blocks_like(x, format, square) if rows else nothing
    return *first, *(blocks_like(x_t, format, square) if columns else (t.clone() for t in nothing))


def _fake_cast_experts(weight: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    experts, m, n = weight.shape
    made = (weight.new_empty(shape, dtype=FORMATS["e4m3"]) for shape in ((experts, m, n), (experts, n, m)))
    return *made, weight.new_empty(experts, dtype=torch.float32)


def _fake_rms_norm(x, weight, bound, amax, eps, offset, casting, format) -> tuple[Tensor, ...]:
    return _packed(x), _packed(x, FORMATS[format]), _one(x), _per_row(x)


def _fake_add_rms_norm(x, residual, weight, bound, amax, eps, offset, casting, format) -> tuple[Tensor, ...]:
    return _packed(x), _packed(x, residual.dtype), _packed(x, FORMATS[format]), _one(x), _per_row(x)


def _fake_swiglu(gate: Tensor, up: Tensor, bound: Tensor, amax: Tensor, format: str) -> tuple[Tensor, Tensor]:
    return _packed(gate, FORMATS[format]), _one(gate)


def _fake_swiglu_vjp(dh, gate, up, bound, amax, h_factor, format, h_format) -> tuple[Tensor, ...]:
    m, n, room = count_of(gate), gate.shape[-1], rounded_up(count_of(gate))
    d8, d8_t = gate.new_empty(m, 2 * n, dtype=FORMATS[format]), gate.new_empty(2 * n, room, dtype=FORMATS[format])
    return d8, d8_t, gate.new_empty(n, room, dtype=FORMATS[h_format]), _one(gate)


def _fake_scaled_matmul(
    a: Tensor, b: Tensor, a_factor: Tensor, b_factor: Tensor, bias: Tensor | None, dtype: str, fast: bool
) -> Tensor:
    return a.new_empty(a.shape[0], b.shape[0], dtype=EXACT if a.dtype == EXACT else OUTPUTS[dtype])


def _floating(op: str, name: str, x: Tensor) -> None:
    floating(op, name, x)
    if x.requires_grad and torch.is_grad_enabled():
        raise ValueError(
            f"{op}: {name} requires a gradient, but rounding has none; call it under torch.no_grad(), or use "
            "tilesmith.precision, whose layers have one"
        )


def _matrix(op: str, name: str, x: Tensor) -> None:
    if x.ndim < 1:
        raise ValueError(f"{op}: {name} is a scalar; it must be [..., N]")


def _single(op: str, name: str, value: Tensor, x: Tensor) -> None:
    if value.dtype != torch.float32 and not value.dtype == x.dtype == torch.float64:
        raise TypeError(f"{op}: {name} has dtype {value.dtype}; it must be float32")
    if value.shape != (1,):
        raise ValueError(f"{op}: {name} has shape {tuple(value.shape)}; it must be [1]")
    if value.device != x.device:
        raise ValueError(
            f"{op}: {name} is on {value.device}, the tensor to cast on {x.device}; move them to one device"
        )


def _format(op: str, format: str, name: str = "format") -> None:
    if format not in FORMATS:
        raise ValueError(f"{op}: {name} is {format!r}; it must be 'e4m3' or 'e5m2'")


def _together(op: str, name: str, other: Tensor, of: str, x: Tensor) -> None:
    """Raise where `other` is not of x's dtype or device."""
    _floating(op, name, other)
    if other.dtype != x.dtype:
        raise TypeError(f"{op}: {name} has dtype {other.dtype}, {of} has {x.dtype}; they must match")
    if other.device != x.device:
        raise ValueError(f"{op}: {name} is on {other.device}, {of} on {x.device}; move them to one device")


def _alike(op: str, name: str, other: Tensor, of: str, x: Tensor) -> None:
    _floating(op, name, other)
    if other.shape != x.shape:
        raise ValueError(f"{op}: {name} has shape {tuple(other.shape)}; it must equal {of}'s, {tuple(x.shape)}")
    _together(op, name, other, of, x)


def _check_amax(x: Tensor, second: Tensor | None = None, third: Tensor | None = None) -> None:
    _floating("fp8_amax", "x", x)
    for name, other in (("second", second), ("third", third)):
        if other is not None:
            _together("fp8_amax", name, other, "x", x)


def _check_cast(
    x: Tensor, bound: Tensor, amax: Tensor, format: str = "e4m3", rows: bool = True, columns: bool = False
) -> None:
    _floating("fp8_cast", "x", x)
    _matrix("fp8_cast", "x", x)
    _single("fp8_cast", "bound", bound, x)
    _single("fp8_cast", "amax", amax, x)
    _format("fp8_cast", format)


def _check_cast_stack(first: Tensor, second: Tensor, third: Tensor | None = None, format: str = "e4m3") -> None:
    op = "fp8_cast_stack"
    for name, x in (("first", first), ("second", second), ("third", third)):
        if x is None:
            continue
        _floating(op, name, x)
        if x.ndim != 2 or x.shape[0] % 16:
            raise ValueError(f"{op}: {name} has shape {tuple(x.shape)}; it must be [M, N], M a multiple of 16")
        if x.shape[1] != first.shape[1]:
            raise ValueError(f"{op}: {name} has {x.shape[1]} columns, first has {first.shape[1]}; they must match")
        _together(op, name, x, "first", first)
    _format(op, format)


def _check_cast_beside(
    first: Tensor, second: Tensor, third: Tensor | None, bound: Tensor, amax: Tensor, format: str = "e4m3",
    rows: bool = True, columns: bool = False,
) -> None:  # fmt: skip
    op = "fp8_cast_beside"
    for name, x in (("first", first), ("second", second), ("third", third)):
        if x is None:
            continue
        _floating(op, name, x)
        if x.ndim < 1 or x.shape[-1] % 16:
            raise ValueError(f"{op}: {name} has shape {tuple(x.shape)}; it must be [..., N], N a multiple of 16")
        if x.shape[:-1] != first.shape[:-1]:
            raise ValueError(
                f"{op}: {name} has shape {tuple(x.shape)}, first {tuple(first.shape)}; all dims but the last must match"
            )
        _together(op, name, x, "first", first)
    _single(op, "bound", bound, first)
    _single(op, "amax", amax, first)
    _format(op, format)


def _check_transpose(x8: Tensor) -> None:
    if x8.dtype not in SMALL and x8.dtype != EXACT:
        raise TypeError(f"fp8_transpose: x8 has dtype {x8.dtype}; float8_e4m3fn and float8_e5m2 are supported")
    _matrix("fp8_transpose", "x8", x8)


def _check_cast_rows(x: Tensor, format: str = "e4m3") -> None:
    _floating("fp8_cast_rows", "x", x)
    _matrix("fp8_cast_rows", "x", x)
    _format("fp8_cast_rows", format)


def _check_cast_blocks(
    x: Tensor, format: str = "e4m3", rows: bool = True, columns: bool = False, square: bool = False
) -> None:
    _floating("fp8_cast_blocks", "x", x)
    if x.ndim != 2:
        raise ValueError(f"fp8_cast_blocks: x has shape {tuple(x.shape)}; it must be [M, N]")
    _format("fp8_cast_blocks", format)


def _check_cast_experts(weight: Tensor) -> None:
    _floating("fp8_cast_experts", "weight", weight)
    if weight.ndim != 3 or weight.shape[1] % 16 or weight.shape[2] % 16:
        raise ValueError(
            f"fp8_cast_experts: weight has shape {tuple(weight.shape)}; it must be [E, M, N], M and N multiples of 16"
        )


def _check_norm(op: str, x: Tensor, weight: Tensor | None, eps: float, casting: str, format: str) -> None:
    _floating(op, "x", x)
    if x.ndim == 0 or x.shape[-1] == 0:
        raise ValueError(f"{op}: x has shape {tuple(x.shape)}; it must be [..., N] with an N of at least 1")
    if weight is not None:
        _floating(op, "weight", weight)
        if weight.shape != x.shape[-1:]:
            raise ValueError(f"{op}: weight has shape {tuple(weight.shape)}; for this x it must be [{x.shape[-1]}]")
        if weight.device != x.device:
            raise ValueError(f"{op}: weight is on {weight.device}, x on {x.device}; move them to one device")
    if not eps >= 0:
        raise ValueError(f"{op}: eps is {eps}; it must be 0 or more")
    if casting not in ("fp32", "llama"):
        raise ValueError(f"{op}: casting is {casting!r}; it must be 'fp32' or 'llama'")
    _format(op, format)


def _check_rms_norm(x, weight, bound, amax, eps=1e-6, offset=0.0, casting="fp32", format="e4m3") -> None:
    _check_norm("rms_norm_fp8", x, weight, eps, casting, format)
    _single("rms_norm_fp8", "bound", bound, x)
    _single("rms_norm_fp8", "amax", amax, x)


def _check_add_rms_norm(
    x, residual, weight, bound, amax, eps=1e-6, offset=0.0, casting="fp32", format="e4m3"
) -> None:  # fmt: skip
    _check_norm("add_rms_norm_fp8", x, weight, eps, casting, format)
    _single("add_rms_norm_fp8", "bound", bound, x)
    _single("add_rms_norm_fp8", "amax", amax, x)
    if residual.dtype != torch.float32 or x.dtype == torch.float64:
        _alike("add_rms_norm_fp8", "residual", residual, "x", x)
    else:
        _alike("add_rms_norm_fp8", "residual", residual, "x", x.float() if x.dtype != torch.float32 else x)


def _check_swiglu(gate: Tensor, up: Tensor, bound: Tensor, amax: Tensor, format: str = "e4m3") -> None:
    _floating("swiglu_fp8", "gate", gate)
    _matrix("swiglu_fp8", "gate", gate)
    _alike("swiglu_fp8", "up", up, "gate", gate)
    _single("swiglu_fp8", "bound", bound, gate)
    _single("swiglu_fp8", "amax", amax, gate)
    _format("swiglu_fp8", format)


def _check_swiglu_vjp(dh, gate, up, bound, amax, h_factor, format="e5m2", h_format="e4m3") -> None:
    op = "swiglu_vjp_fp8"
    _floating(op, "gate", gate)
    _matrix(op, "gate", gate)
    _alike(op, "dh", dh, "gate", gate)
    _alike(op, "up", up, "gate", gate)
    for name, value in (("bound", bound), ("amax", amax), ("h_factor", h_factor)):
        _single(op, name, value, gate)
    _format(op, format)
    _format(op, h_format, "h_format")


def _check_scaled_matmul(
    a: Tensor,
    b: Tensor,
    a_factor: Tensor,
    b_factor: Tensor,
    bias: Tensor | None = None,
    dtype: str = "bfloat16",
    fast: bool = False,
) -> None:
    op = "scaled_matmul"
    for name, x in (("a", a), ("b", b)):
        if x.dtype not in SMALL and x.dtype != EXACT:
            raise TypeError(f"{op}: {name} has dtype {x.dtype}; float8_e4m3fn and float8_e5m2 are supported")
        if x.ndim != 2:
            raise ValueError(f"{op}: {name} has shape {tuple(x.shape)}; it must be a matrix with K columns")
    if a.dtype == b.dtype == torch.float8_e5m2:
        raise TypeError(f"{op}: a and b are both float8_e5m2; tensor cores take one of them at most")
    if a.shape[1] != b.shape[1]:
        raise ValueError(f"{op}: b has {b.shape[1]} columns, a has {a.shape[1]}; they must match: a [M, K], b [N, K]")
    if dtype not in OUTPUTS:
        raise ValueError(f"{op}: dtype is {dtype!r}; it must be one of {', '.join(map(repr, OUTPUTS))}")
    tensors = (("b", b), ("a_factor", a_factor), ("b_factor", b_factor), ("bias", bias))
    for name, x in tensors:
        if x is not None and x.device != a.device:
            raise ValueError(f"{op}: {name} is on {x.device}, a on {a.device}; move them to one device")
    _check_factor(op, "a_factor", a_factor, a, False)
    _check_factor(op, "b_factor", b_factor, b, True)
    if a_factor.ndim != b_factor.ndim or a_factor.shape[1:] != b_factor.shape[1:]:
        raise ValueError(
            f"{op}: a_factor has shape {tuple(a_factor.shape)}, b_factor {tuple(b_factor.shape)}; both must be of "
            "whole tensors, both of rows, or both of blocks of 128 along K"
        )
    served = (OUTPUTS[dtype], EXACT) if a.dtype == EXACT else (OUTPUTS[dtype],)
    if bias is not None and (bias.shape != (b.shape[0],) or bias.dtype not in served):
        raise ValueError(
            f"{op}: bias is {bias.dtype} of shape {tuple(bias.shape)}; it must be {OUTPUTS[dtype]} of [{b.shape[0]}]"
        )


def _check_factor(op: str, name: str, factor: Tensor, x: Tensor, square: bool) -> None:
    if factor.dtype != torch.float32 and not factor.dtype == x.dtype == EXACT:
        raise TypeError(f"{op}: {name} has dtype {factor.dtype}; it must be float32")
    rows, along = x.shape[0], cdiv(x.shape[1], BLOCK)
    shapes = [(1,), (rows, 1), (rows, along), *([(cdiv(rows, BLOCK), along)] if square else [])]
    if tuple(factor.shape) not in shapes:
        raise ValueError(
            f"{op}: {name} has shape {tuple(factor.shape)}; for {list(x.shape)} it must be "
            f"{', '.join(map(str, map(list, shapes[:-1])))} or {list(shapes[-1])}"
        )


fp8_amax = Op(reference.fp8_amax, fake=_fake_amax, outputs=("amax",), check=_check_amax, kernels=TRITON)
fp8_cast = Op(
    reference.fp8_cast,
    fake=_fake_cast,
    outputs=("x8", "x8_t", "factor"),
    check=_check_cast,
    mutates=("amax",),
    kernels=TRITON,
)
fp8_cast_stack = Op(
    reference.fp8_cast_stack,
    fake=_fake_cast_stack,
    outputs=("x8", "x8_t", "factor"),
    check=_check_cast_stack,
    kernels=PARTS,
)
fp8_cast_beside = Op(
    reference.fp8_cast_beside,
    fake=_fake_cast_beside,
    outputs=("x8", "x8_t", "factor"),
    check=_check_cast_beside,
    mutates=("amax",),
    kernels=PARTS,
)
fp8_transpose = Op(
    reference.fp8_transpose, fake=_fake_transpose, outputs=("x8_t",), check=_check_transpose, kernels=TRITON
)
fp8_cast_rows = Op(
    reference.fp8_cast_rows, fake=_fake_cast_rows, outputs=("x8", "factor"), check=_check_cast_rows, kernels=TRITON
)
fp8_cast_blocks = Op(
    reference.fp8_cast_blocks,
    fake=_fake_cast_blocks,
    outputs=("x8", "factor", "x8_t", "factor_t"),
    check=_check_cast_blocks,
    kernels=TRITON,
)
fp8_cast_experts = Op(
    reference.fp8_cast_experts,
    fake=_fake_cast_experts,
    outputs=("weight8", "weight8_t", "factor"),
    check=_check_cast_experts,
    kernels={"triton": "tilesmith.ops.quant.triton.stacks"},
)
rms_norm_fp8 = Op(
    reference.rms_norm_fp8,
    fake=_fake_rms_norm,
    outputs=("y", "y8", "factor", "rstd"),
    check=_check_rms_norm,
    mutates=("amax",),
    kernels=PRODUCERS,
)
add_rms_norm_fp8 = Op(
    reference.add_rms_norm_fp8,
    fake=_fake_add_rms_norm,
    outputs=("y", "s", "y8", "factor", "rstd"),
    check=_check_add_rms_norm,
    mutates=("amax",),
    kernels=PRODUCERS,
)
swiglu_fp8 = Op(
    reference.swiglu_fp8,
    fake=_fake_swiglu,
    outputs=("h8", "factor"),
    check=_check_swiglu,
    mutates=("amax",),
    kernels=PRODUCERS,
)
swiglu_vjp_fp8 = Op(
    reference.swiglu_vjp_fp8,
    fake=_fake_swiglu_vjp,
    outputs=("d8", "d8_t", "h8_t", "factor"),
    check=_check_swiglu_vjp,
    mutates=("amax",),
    kernels=PRODUCERS,
)
scaled_matmul = Op(
    reference.scaled_matmul,
    fake=_fake_scaled_matmul,
    outputs=("y",),
    check=_check_scaled_matmul,
    kernels={"aten": "tilesmith.ops.quant.aten"},
)
