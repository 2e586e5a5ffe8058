"""Example inputs of the quant family."""

from collections.abc import Sequence

import torch
from torch import Tensor

from tilesmith.engine import Case, T
from tilesmith.engine.case import BENCH, GPU, SMALL, TEST
from tilesmith.ops.quant import packed_cases
from tilesmith.ops.quant.reference import BLOCK, FORMATS, given

TIMED = (torch.bfloat16,)
WIDE = (torch.float32,)  # a 16-bit value that the oracle has a little otherwise may get the neighbouring code


def _number(value: float):
    """A tensor of one number."""

    def init(generator: torch.Generator, shape: Sequence[int], device: torch.device) -> Tensor:
        return torch.full(tuple(shape), value, device=device)

    return init


def _zeros(generator: torch.Generator, shape: Sequence[int], device: torch.device) -> Tensor:
    return torch.zeros(tuple(shape), device=device)


def _one(value: float) -> T:
    return T(1, dtype=torch.float32, grad=False, init=_number(value))


def _spread(generator: torch.Generator, shape: Sequence[int], device: torch.device) -> Tensor:
    """Numbers of very different size, and a row of zeros."""
    x = torch.randn(tuple(shape), generator=generator, device=device)
    x = x * torch.logspace(-4, 2, shape[-1], device=device) if shape[-1] else x
    if x.numel():
        x.view(-1, shape[-1])[-1] = 0
    return x


def _far(generator: torch.Generator, shape: Sequence[int], device: torch.device) -> Tensor:
    """float32 rows so far apart that a 32-bit offset of the second one overflows."""
    step = 2**31 + 16
    base = torch.empty(step * (shape[0] - 1) + shape[1], dtype=torch.float32, device=device)
    return base.as_strided(shape, (step, 1)).copy_(torch.randn(*shape, generator=generator, device=device))


def _eight(dtype: torch.dtype):
    """Normal numbers in 8 bits."""

    def init(generator: torch.Generator, shape: Sequence[int], device: torch.device) -> Tensor:
        return torch.randn(tuple(shape), generator=generator, device=device).to(dtype)

    return init


def _powers(generator: torch.Generator, shape: Sequence[int], device: torch.device) -> Tensor:
    """Factors: powers of two from 1/16 to 8, whose memory runs along the rows."""
    power = torch.randint(-4, 4, tuple(reversed(shape)), generator=generator, device=device)
    return torch.exp2(power.float()).t()


def _powers_packed(generator: torch.Generator, shape: Sequence[int], device: torch.device) -> Tensor:
    return _powers(generator, shape, device).contiguous()


def _x(*shape: int, **how: object) -> T:
    return T(*shape, grad=False, **how)


def _scaled(*shape: int, bound: float = 4.0, seen: float = 0.0, **more: object) -> dict:
    """Arguments of `fp8_cast`. more: its options, and what `T` takes."""
    kind = {name: more.pop(name) for name in ("layout", "init") if name in more}
    return {"x": _x(*shape, **kind), "bound": _one(bound), "amax": _one(seen), **more}


PARTS = ("first", "second", "third")


def _parts(*shapes: tuple[int, ...], init: object = "normal", layout: str = "contiguous", **more: object) -> dict:
    """Arguments of `fp8_cast_stack`."""
    return {**{name: _x(*shape, init=init, layout=layout) for name, shape in zip(PARTS, shapes)}, **more}


def _beside(*shapes: tuple[int, ...], bound: float = 4.0, seen: float = 0.0, **more: object) -> dict:
    """Arguments of `fp8_cast_beside`."""
    return {"third": None, **_parts(*shapes, **more), "bound": _one(bound), "amax": _one(seen)}


CAST = [
    Case("small", _scaled(6, 33), SMALL),
    Case("e5m2", _scaled(6, 33, format="e5m2"), SMALL),
    Case("both", _scaled(20, 40, columns=True), SMALL),
    Case("columns", _scaled(33, 20, rows=False, columns=True), SMALL),
    Case("both_e5m2", _scaled(17, 70, columns=True, format="e5m2"), SMALL),
    Case("three_dims", _scaled(2, 5, 16, columns=True), SMALL),
    Case("one_dim", _scaled(40), SMALL),
    Case("too_large", _scaled(6, 40, bound=0.01), SMALL),
    Case("bound_unknown", _scaled(6, 40, bound=0.0), SMALL),
    Case("seen_larger", _scaled(6, 40, seen=50.0), SMALL),
    Case("zeros", _scaled(6, 40, init=_zeros), SMALL),
    Case("spread", _scaled(6, 40, init=_spread, bound=300.0), SMALL),
    Case("strided", _scaled(5, 40, layout="strided", columns=True), SMALL),
    Case("transposed", _scaled(9, 12, layout="transposed"), SMALL),
    Case("neither", _scaled(4, 8, rows=False), SMALL),
    Case("no_rows", _scaled(0, 16, columns=True), SMALL),
    Case("no_columns", _scaled(4, 0, columns=True), SMALL),
    Case("many_tiles", _scaled(300, 530, columns=True), TEST),
    Case("far", _scaled(2, 1024, columns=True, init=_far), GPU, WIDE),
    *(Case(f"{m}x{n}", _scaled(m, n), BENCH, TIMED) for m, n in ((8192, 4096), (8192, 28_672), (16_384, 14_336))),
    *(
        Case(f"both_{m}x{n}", _scaled(m, n, columns=True, format="e5m2"), BENCH, TIMED)
        for m, n in ((8192, 4096), (8192, 28_672), (16_384, 14_336))
    ),
]


def _normed(*shape: int, residual: torch.dtype | bool | None = None, bound: float = 4.0, **more: object) -> dict:
    kind = {name: more.pop(name) for name in ("layout", "init") if name in more}
    weight = more.pop("weight", T(shape[-1], grad=False))
    args = {"x": _x(*shape, **kind)}
    if residual is not None:
        args["residual"] = _x(*shape, dtype=None if residual is True else residual, **kind)
    return {**args, "weight": weight, "bound": _one(bound), "amax": _one(0.0), **more}


def _norm_cases(residual: bool | None) -> list[Case]:
    def args(*shape: int, **more: object) -> dict:
        return _normed(*shape, residual=residual, **more)

    return [
        Case("small", args(6, 33), SMALL, WIDE),
        Case("three_dims", args(2, 5, 16), SMALL, WIDE),
        Case("offset", args(4, 40, offset=1.0), SMALL, WIDE),
        Case("llama", args(6, 40, casting="llama"), SMALL, WIDE),
        Case("no_weight", args(6, 40, weight=None), SMALL, WIDE),
        Case("too_large", args(6, 40, bound=0.01), SMALL, WIDE),
        Case("e5m2", args(6, 40, format="e5m2"), SMALL, WIDE),
        Case("strided", args(5, 40, layout="strided"), SMALL, WIDE),
        Case("zeros", args(4, 40, init=_zeros), SMALL, WIDE),
        Case("no_rows", args(0, 16), SMALL, WIDE),
        Case("4096_columns", args(3, 4096), TEST, WIDE),
        Case("wide", args(3, 5000), TEST, WIDE),
        Case("far", args(2, 1024, init=_far), GPU, WIDE),
        *(Case(f"{m}x{n}", args(m, n), BENCH, TIMED) for m, n in ((8192, 4096), (16_384, 8192))),
    ]


def _gated(*shape: int, gradient: bool = False, bound: float = 4.0, **more: object) -> dict:
    kind = {name: more.pop(name) for name in ("layout", "init") if name in more}
    args = {name: _x(*shape, **kind) for name in (("dh",) if gradient else ()) + ("gate", "up")}
    args |= {"bound": _one(bound), "amax": _one(0.0)}
    return {**args, **({"h_factor": _one(2.0**-5)} if gradient else {}), **more}


def _gate_cases(gradient: bool) -> list[Case]:
    def args(*shape: int, **more: object) -> dict:
        return _gated(*shape, gradient=gradient, **more)

    return [
        Case("small", args(6, 33), SMALL, WIDE),
        Case("three_dims", args(2, 5, 16), SMALL, WIDE),
        Case("other_format", args(6, 40, format="e4m3" if gradient else "e5m2"), SMALL, WIDE),
        Case("too_large", args(6, 40, bound=0.01), SMALL, WIDE),
        Case("strided", args(5, 40, layout="strided"), SMALL, WIDE),
        Case("zeros", args(4, 40, init=_zeros), SMALL, WIDE),
        Case("no_rows", args(0, 16), SMALL, WIDE),
        Case("no_columns", args(4, 0), SMALL, WIDE),
        Case("many_tiles", args(150, 200), TEST, WIDE),
        Case("far", args(2, 1024, init=_far), GPU, WIDE),
        *(Case(f"{m}x{n}", args(m, n), BENCH, TIMED) for m, n in ((8192, 14_336), (16_384, 14_336))),
    ]


def _product(m: int, n: int, k: int, by: str = "tensor", kinds: Sequence[str] = ("e4m3", "e4m3"), **more) -> dict:
    """Arguments of `scaled_matmul`. by: tensor, row, block (b by rows) or square (b by blocks of 128 x 128)."""
    along = -(-k // BLOCK)
    shapes = {"tensor": ((1,), (1,)), "row": ((m, 1), (n, 1)), "block": ((m, along), (n, along))}
    shapes["square"] = ((m, along), (-(-n // BLOCK), along))
    inits = (_powers, _powers_packed if by == "square" else _powers)
    a, b = (
        T(*shape, dtype=FORMATS[kind], grad=False, init=_eight(FORMATS[kind]))
        for shape, kind in zip(((m, k), (n, k)), kinds)
    )
    factors = [
        _one(0.25) if by == "tensor" else T(*shape, dtype=torch.float32, grad=False, init=init)
        for shape, init in zip(shapes[by], inits)
    ]
    return {"a": a, "b": b, "a_factor": factors[0], "b_factor": factors[1], **more}


def _exact(m: int, n: int, k: int) -> dict:
    """What the oracle is given: numbers that were not cast."""
    args = {name: T(*shape, dtype=torch.float64, grad=False) for name, shape in (("a", (m, k)), ("b", (n, k)))}
    return {**args, "a_factor": _one(0.25), "b_factor": _one(0.25)}


def _biased(dtype: torch.dtype, n: int) -> T:
    return T(n, dtype=dtype, grad=False)


ONCE = (torch.float32,)  # the dtypes are those of the arguments
CASES: dict[str, list[Case]] = {
    "fp8_amax": [
        Case("small", {"x": _x(6, 33)}, SMALL),
        Case("strided", {"x": _x(5, 40, layout="strided")}, SMALL),
        Case("scalar", {"x": _x()}, SMALL),
        Case("empty", {"x": _x(0, 16)}, SMALL),
        Case("many_blocks", {"x": _x(300, 530)}, TEST),
        Case("two", {"x": _x(6, 33), "second": _x(40)}, SMALL),
        Case("three", {"x": _x(6, 33), "second": _x(0, 3), "third": _x(2, 5, 16, init=_spread)}, SMALL),
        Case("three_of_many", {"x": _x(60, 530), "second": _x(100, 230), "third": _x(300, 130)}, TEST),
        Case("far", {"x": _x(2, 1024, init=_far)}, GPU, WIDE),
        *(Case(f"{m}x{n}", {"x": _x(m, n)}, BENCH, TIMED) for m, n in ((8192, 4096), (16_384, 14_336))),
    ],
    "fp8_cast": CAST,
    "fp8_transpose": [
        Case("exact", {"x8": _x(6, 33, dtype=torch.float64)}, TEST, ONCE),  # torch's own checks compare no 8-bit floats
        *(
            Case(f"{name}_{m}x{n}", {"x8": T(m, n, dtype=d, grad=False, init=_eight(d))}, SMALL, ONCE)
            for name, d in FORMATS.items()
            for m, n in ((6, 33), (32, 20), (0, 16))
        ),
        Case(
            "8192x4096",
            {"x8": T(8192, 4096, dtype=FORMATS["e4m3"], grad=False, init=_eight(FORMATS["e4m3"]))},
            BENCH,
            ONCE,
        ),
    ],
    "fp8_cast_rows": [
        Case("small", {"x": _x(6, 33)}, SMALL),
        Case("e5m2", {"x": _x(6, 33), "format": "e5m2"}, SMALL),
        Case("three_dims", {"x": _x(2, 5, 16)}, SMALL),
        Case("spread", {"x": _x(6, 40, init=_spread)}, SMALL),
        Case("zeros", {"x": _x(6, 40, init=_zeros)}, SMALL),
        Case("strided", {"x": _x(5, 40, layout="strided")}, SMALL),
        Case("no_rows", {"x": _x(0, 16)}, SMALL),
        Case("no_columns", {"x": _x(4, 0)}, SMALL),
        Case("wide", {"x": _x(3, 9000)}, TEST),
        Case("far", {"x": _x(2, 1024, init=_far)}, GPU, WIDE),
        *(Case(f"{m}x{n}", {"x": _x(m, n)}, BENCH, TIMED) for m, n in ((8192, 4096), (8192, 28_672))),
    ],
    "fp8_cast_blocks": [
        Case("small", {"x": _x(6, 33)}, SMALL),
        Case("both", {"x": _x(40, 150), "columns": True}, SMALL),
        Case("columns", {"x": _x(140, 20), "rows": False, "columns": True}, SMALL),
        Case("square", {"x": _x(140, 150), "columns": True, "square": True}, SMALL),
        Case("e5m2", {"x": _x(20, 33), "format": "e5m2", "columns": True}, SMALL),
        Case("zeros", {"x": _x(6, 40, init=_zeros), "columns": True}, SMALL),
        Case("strided", {"x": _x(20, 40, layout="strided"), "columns": True}, SMALL),
        Case("transposed", {"x": _x(20, 40, layout="transposed")}, SMALL),
        Case("no_rows", {"x": _x(0, 16), "columns": True}, SMALL),
        Case("far", {"x": _x(2, 1024, init=_far), "columns": True}, GPU, WIDE),
        *(Case(f"{m}x{n}", {"x": _x(m, n), "columns": True}, BENCH, TIMED) for m, n in ((8192, 4096), (8192, 28_672))),
    ],
    "fp8_cast_stack": [
        Case("small", _parts((16, 33), (16, 33)), SMALL),
        Case("three", _parts((32, 33), (16, 33), (48, 33)), SMALL),
        Case("e5m2", _parts((16, 33), (32, 33), format="e5m2"), SMALL),
        Case("several_tiles", _parts((144, 70), (16, 70), (272, 70)), SMALL),
        Case("spread", _parts((32, 48), (16, 48), init=_spread), SMALL),
        Case("zeros", _parts((16, 16), (16, 16), init=_zeros), SMALL),
        Case("one_zero", {"first": _x(16, 16, init=_zeros), "second": _x(16, 16)}, SMALL),
        Case("strided", {"first": _x(16, 40, layout="strided"), "second": _x(32, 40)}, SMALL),
        Case("transposed", {"first": _x(16, 40, layout="transposed"), "second": _x(16, 40)}, SMALL),
        Case("one_empty", _parts((0, 16), (16, 16), (32, 16)), SMALL),
        Case("no_rows", _parts((0, 16), (0, 16)), SMALL),
        Case("no_columns", _parts((16, 0), (16, 0)), SMALL),
        Case("2x14336x4096", _parts((14_336, 4096), (14_336, 4096)), BENCH, TIMED),
        Case("4096+2x1024x4096", _parts((4096, 4096), (1024, 4096), (1024, 4096)), BENCH, TIMED),
    ],
    "fp8_cast_beside": [
        Case("small", _beside((6, 16), (6, 32)), SMALL),
        Case("both", _beside((20, 48), (20, 16), (20, 64), columns=True), SMALL),
        Case("columns", _beside((33, 16), (33, 80), rows=False, columns=True), SMALL),
        Case("e5m2", _beside((17, 80), (17, 16), columns=True, format="e5m2"), SMALL),
        Case("three_dims", _beside((2, 5, 16), (2, 5, 32), columns=True), SMALL),
        Case("one_dim", _beside((16,), (32,)), SMALL),
        Case("too_large", _beside((6, 48), (6, 16), bound=0.01), SMALL),
        Case("bound_unknown", _beside((6, 48), (6, 16), bound=0.0), SMALL),
        Case("seen_larger", _beside((6, 48), (6, 16), seen=50.0), SMALL),
        Case("zeros", _beside((6, 48), (6, 16), init=_zeros), SMALL),
        Case("spread", _beside((6, 48), (6, 16), init=_spread, bound=300.0), SMALL),
        Case("strided", _beside((5, 48), (5, 16), layout="strided", columns=True), SMALL),
        Case("transposed", _beside((9, 16), (9, 16), layout="transposed", columns=True), SMALL),
        Case("neither", _beside((4, 16), (4, 16), rows=False), SMALL),
        Case("rows_of_many", _beside((17, 1040), (17, 16), (17, 48)), TEST),
        Case("one_empty", _beside((6, 0), (6, 16), (6, 32), columns=True), SMALL),
        Case("no_rows", _beside((0, 16), (0, 32), columns=True), SMALL),
        Case("no_columns", _beside((4, 0), (4, 0), columns=True), SMALL),
        Case("many_tiles", _beside((300, 400), (300, 16), (300, 144), columns=True), TEST),
        Case("far", _beside((2, 1024), (2, 16), columns=True, init=_far), GPU, WIDE),
        *(
            Case(f"{m}x{n}+2x1024", _beside((m, n), (m, 1024), (m, 1024), columns=True, format="e5m2"), BENCH, TIMED)
            for m, n in ((8192, 4096), (16_384, 4096))
        ),
    ],
    "fp8_cast_experts": [
        Case("small", {"weight": _x(3, 16, 32)}, SMALL),
        Case("several_tiles", {"weight": _x(2, 144, 80)}, SMALL),
        Case("transposed", {"weight": _x(2, 32, 48, layout="transposed")}, SMALL),
        Case("spread", {"weight": _x(2, 16, 48, init=_spread)}, SMALL),
        Case("zeros", {"weight": _x(2, 16, 16, init=_zeros)}, SMALL),
        Case("no_experts", {"weight": _x(0, 16, 16)}, SMALL),
        Case("no_columns", {"weight": _x(2, 16, 0)}, SMALL),
        Case("128x1536x2048", {"weight": _x(128, 1536, 2048)}, BENCH, TIMED),
    ],
    "rms_norm_fp8": _norm_cases(None),
    "add_rms_norm_fp8": [
        *_norm_cases(True),
    ],
    "swiglu_fp8": _gate_cases(False),
    "swiglu_vjp_fp8": _gate_cases(True),
    "scaled_matmul": [
        Case("exact", _exact(5, 7, 32), TEST, ONCE),
        Case("tensor", _product(33, 48, 64), TEST, ONCE),
        Case("tensor_fp32", _product(32, 48, 64, dtype="float32"), TEST, ONCE),
        Case("gradient", _product(32, 48, 64, kinds=("e5m2", "e4m3"), fast=True), TEST, ONCE),
        Case("gradient_of_b", _product(32, 48, 64, kinds=("e4m3", "e5m2")), TEST, ONCE),
        Case("biased", _product(32, 48, 64) | {"bias": _biased(torch.bfloat16, 48)}, TEST, ONCE),
        Case("biased_fp16", _product(32, 48, 64, dtype="float16") | {"bias": _biased(torch.float16, 48)}, TEST, ONCE),
        Case("biased_fp32", _product(32, 48, 64, dtype="float32") | {"bias": _biased(torch.float32, 48)}, TEST, ONCE),
        Case("row", _product(32, 48, 64, "row"), TEST, ONCE),
        Case("row_biased", _product(32, 48, 64, "row") | {"bias": _biased(torch.bfloat16, 48)}, TEST, ONCE),
        Case("block", _product(128, 256, 512, "block"), TEST, ONCE),
        Case("square", _product(128, 256, 512, "square"), TEST, ONCE),
        Case("square_fast", _product(128, 256, 512, "square", fast=True), TEST, ONCE),
        Case("square_six_blocks", _product(128, 256, 768, "square"), TEST, ONCE),
        Case("block_odd_rows", _product(130, 256, 512, "block"), TEST, ONCE),
        Case("square_odd_rows", _product(129, 256, 640, "square"), TEST, ONCE),
        Case("ragged", _product(5, 7, 32), TEST, ONCE),
        Case("no_rows", _product(0, 16, 32), TEST, ONCE),
        *(
            Case(f"{m}x{n}x{k}", _product(m, n, k, fast=True), BENCH, ONCE)
            for m, n, k in ((8192, 28_672, 4096), (8192, 4096, 14_336))
        ),
    ],
    **packed_cases.CASES,
}


def _elements(*tensors: Tensor | None) -> int:
    return sum(t.numel() for t in given(*tensors))


bytes_moved = {
    "fp8_amax": lambda x, second=None, third=None: _elements(x, second, third) * x.element_size(),
    "fp8_cast_rows": lambda x: x.numel() * (x.element_size() + 1),
    "fp8_cast_blocks": lambda x: x.numel() * (x.element_size() + 2),
    "fp8_cast_stack": lambda first, second, third=None: (
        _elements(first, second, third) * (2 * first.element_size() + 2)
    ),
    "fp8_cast_beside": lambda first, second, third, rows=True, columns=False: (
        _elements(first, second, third) * (first.element_size() + rows + columns)
    ),
    "fp8_cast_experts": lambda weight: weight.numel() * (2 * weight.element_size() + 2),
    "fp8_transpose": lambda x8: 2 * x8.numel(),
    "rms_norm_fp8": lambda x: x.numel() * (2 * x.element_size() + 1),
    "add_rms_norm_fp8": lambda x: x.numel() * (4 * x.element_size() + 1),
    "swiglu_fp8": lambda gate: gate.numel() * (2 * gate.element_size() + 1),
    "swiglu_vjp_fp8": lambda gate: gate.numel() * (3 * gate.element_size() + 5),
    "fp8_cast": lambda x, rows=True, columns=False: x.numel() * (x.element_size() + rows + columns),
    "scaled_matmul": lambda a, b, dtype: (
        a.numel() + b.numel() + a.shape[0] * b.shape[0] * (4 if dtype == "float32" else 2)
    ),
    **packed_cases.bytes_moved,
}

flops = {"scaled_matmul": lambda a, b: 2 * a.numel() * b.shape[0], **packed_cases.flops}
