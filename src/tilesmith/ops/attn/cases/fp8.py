"""Example inputs of attention_quantize, of what undoes it, and of attention on e4m3 values. Letters: see cases.py."""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from tilesmith.engine import Case, T
from tilesmith.engine.case import GPU, SMALL, TEST, TIMED, UNCHECKED
from tilesmith.engine.inits import tokens_first

E4M3 = torch.float8_e4m3fn
WIDE = (torch.float32,)  # so many 16-bit values that for some fp32 and the oracle would choose different codes


def _offset(generator: torch.Generator, shape: Sequence[int], device: torch.device) -> Tensor:
    """Values with a common offset of each column, as keys have them, and a few large ones."""
    x = torch.randn(*shape, generator=generator, device=device)
    x += 3.0 * torch.randn(*shape[:2], 1, shape[3], generator=generator, device=device)
    return x * torch.where(torch.rand(*shape, generator=generator, device=device) < 0.01, 10.0, 1.0)


def _quantize(
    batch: int = 1, heads: int = 2, kv_heads: int = 2, tokens: int = 33, keys: int = 33, dim: int = 16,
    dim_v: int | None = None, layout: str = "contiguous", init=_offset, **options,
) -> dict:  # fmt: skip
    kind = {"grad": False, "layout": layout, "init": init}
    return {
        "q": T(batch, heads, tokens, dim, **kind),
        "k": T(batch, kv_heads, keys, dim, **kind),
        "v": T(batch, kv_heads, keys, dim_v or dim, **kind),
        **options,
    }


def _angles(positions: int, pairs: int, *batch: int) -> dict:
    return {"cos": T(*batch, positions, pairs, grad=False), "sin": T(*batch, positions, pairs, grad=False)}


def _zeros(generator: torch.Generator, shape: Sequence[int], device: torch.device) -> Tensor:
    return torch.zeros(*shape, device=device)


QUANTIZE: list[Case] = [
    Case("block", _quantize(1, 2, 1, 150, 140, 32), SMALL),
    Case("head", _quantize(2, 2, 1, 40, 130, 32, granularity="head"), SMALL),
    Case("tensor", _quantize(2, 2, 2, 33, 50, granularity="tensor"), SMALL),
    Case("plain", _quantize(1, 4, 2, 17, 33, smooth=False, rotate=False), SMALL),
    Case("smooth", _quantize(1, 4, 2, 17, 33, 24, 40, rotate=False), SMALL),
    Case("rotate", _quantize(1, 4, 2, 17, 33, dim_v=40, smooth=False), SMALL),
    Case("angles", _quantize(1, 2, 1, 20, 140, 32, **_angles(150, 16)), SMALL),
    Case("angles_of_rows", _quantize(2, 2, 2, 20, 33, 32, **_angles(33, 8, 2), granularity="head"), SMALL),
    Case("angles_of_neighbours", _quantize(2, 2, 2, 20, 33, 32, **_angles(40, 8, 1), interleaved=True), SMALL),
    Case("angles_alone", _quantize(1, 2, 1, 9, 33, 24, **_angles(40, 12), smooth=False, rotate=False), SMALL),
    Case("strided", _quantize(2, 2, 2, 20, 30, layout="strided"), SMALL),
    Case("transposed", _quantize(2, 2, 2, 20, 30, layout="transposed"), SMALL),
    Case("zeros", _quantize(1, 2, 1, 20, 30, init=_zeros), SMALL),
    Case("one_token", _quantize(3, 8, 4, 1, 1), SMALL),
    Case("no_tokens", _quantize(1, 2, 1, 0, 7), SMALL),
    Case("no_keys", _quantize(1, 2, 1, 7, 0), SMALL),
    Case("no_keys_tensor", _quantize(1, 2, 1, 7, 0, granularity="tensor"), SMALL),
    Case("no_rows", _quantize(0, 2, 1, 7, 9, granularity="head"), SMALL),
    Case("narrow", _quantize(1, 2, 1, 7, 9, 8), TEST),
    Case("wide", _quantize(1, 4, 2, 1000, 2000, 128), TEST, WIDE),
    Case("wide_angles", _quantize(1, 4, 2, 300, 500, 128, **_angles(500, 64)), TEST, WIDE),
    Case("mean_of_some_blocks", _quantize(1, 2, 1, 7, 4200, 16), TEST, WIDE),
    Case("wider", _quantize(1, 2, 2, 300, 500, 256, granularity="head"), TEST, WIDE),
    Case("train", _quantize(1, 16, 16, 16384, 16384, 128, init="normal"), UNCHECKED, (torch.bfloat16,)),
]


def _sparse(generator: torch.Generator, shape: Sequence[int], device: torch.device) -> Tensor:
    """-1, 0 and 1: scores are whole numbers, which at a scale of log(2) make p a power of two, so that rounding it to 8
    bits changes nothing."""
    sign = torch.randint(0, 2, shape, generator=generator, device=device) * 2.0 - 1.0
    return torch.where(torch.rand(shape, generator=generator, device=device) < 0.25, sign, 0.0)


def _columns(generator: torch.Generator, shape: Sequence[int], device: torch.device) -> Tensor:
    return torch.randn(shape, generator=generator, device=device)


def _twos(generator: torch.Generator, shape: Sequence[int], device: torch.device) -> Tensor:
    return torch.exp2(torch.randint(0, 2, shape, generator=generator, device=device).float())


def _factors(generator: torch.Generator, shape: Sequence[int], device: torch.device) -> Tensor:
    return torch.rand(shape, generator=generator, device=device) + 0.5


def _ones(generator: torch.Generator, shape: Sequence[int], device: torch.device) -> Tensor:
    return torch.ones(shape, device=device)


def _fp8(
    heads: int, kv_heads: int, tokens: int, keys: int, dim: int = 128, dim_v: int = 128, batch: int = 1,
    parts: str = "block", init=_sparse, factors=(_twos, _factors), **options,
) -> dict:  # fmt: skip
    """Arguments of one call. parts: what each factor is for: a block, a head, or the tensor. init: q and k. factors: of
    q and k, and of v."""
    kind = {"dtype": E4M3, "grad": False, "init": init}
    rows = (1, 1) if parts == "tensor" else (batch, heads)
    kv_rows = (1, 1) if parts == "tensor" else (batch, kv_heads)
    blocks, kv_blocks = (-(-n // 128) if parts == "block" else 1 for n in (tokens, keys))
    factor = {"dtype": torch.float32, "grad": False}
    return {
        "q": T(batch, heads, tokens, dim, **kind),
        "k": T(batch, kv_heads, keys, dim, **kind),
        "v": T(batch, kv_heads, keys, dim_v, dtype=E4M3, grad=False, layout="transposed", init=_columns),
        "q_scale": T(*rows, blocks, init=factors[0], **factor),
        "k_scale": T(*kv_rows, kv_blocks, init=factors[0], **factor),
        "v_scale": T(*kv_rows, kv_blocks, init=factors[1], **factor),
        "scale": math.log(2.0),
        **options,
    }


def _timed(parts: str, causal: bool) -> dict:
    """Normal values: 16,384 tokens of 16 heads."""
    values = {"init": _columns, "factors": (_ones, _ones), "scale": None}
    return _fp8(16, 16, 16384, 16384, parts=parts, causal=causal, **values)


ATTENTION: list[Case] = [
    Case(name, args, SMALL, (torch.bfloat16,))
    for name, args in (
        ("e4m3", _fp8(2, 2, 200, 333)),
        ("e4m3_causal", _fp8(4, 2, 270, 270, causal=True)),
        ("e4m3_heads", _fp8(2, 1, 130, 256, parts="head", batch=2)),
        ("e4m3_tensor", _fp8(2, 2, 129, 300, parts="tensor", causal=True)),
        ("e4m3_narrow", _fp8(2, 2, 65, 400, 64, 64, causal=True)),
        ("e4m3_two_head_dims", _fp8(2, 1, 100, 130, 64, 128)),
        ("e4m3_odd_head_dims", _fp8(1, 1, 70, 140, 96, 80, causal=True)),
        ("e4m3_few_keys", _fp8(2, 1, 150, 3, causal=True)),
        ("e4m3_one_query", _fp8(2, 1, 1, 129, causal=True)),
    )
]
ATTENTION.append(Case("e4m3_many_tiles", _fp8(8, 2, 1100, 1100, batch=3, causal=True), GPU, (torch.bfloat16,)))
ATTENTION += [
    Case(f"e4m3_16k{mask}{name}", _timed(parts, bool(mask)), TIMED, (torch.bfloat16,))
    for mask in ("", "_causal")
    for name, parts in (("", "block"), ("_tensor", "tensor"))
]


def _dequantize(
    heads: int, kv_heads: int, tokens: int, keys: int, dim: int = 128, dim_v: int | None = None, first: bool = False,
    parts: str = "block", batch: int = 1, small: torch.dtype = E4M3, across: bool = True, dtype: str = "bfloat16",
) -> dict:  # fmt: skip
    """first: whether all three lie with tokens first, and so does what comes of them. parts: see `_fp8`; "token"."""
    args = _fp8(heads, kv_heads, tokens, keys, dim, dim_v or dim, batch, "block" if parts == "token" else parts)
    if parts == "token":
        for name, n, m in (("q", heads, tokens), ("k", kv_heads, keys), ("v", kv_heads, keys)):
            args[f"{name}_scale"] = T(batch, n, m, dtype=torch.float32, grad=False, init=_factors)
    layout = "contiguous" if first or not across else "transposed"
    kind = {"dtype": small, "grad": False, "init": _bytes_first if first else _bytes}
    values = {name: T(*args[name].shape, **kind) for name in "qk"}
    values["v"] = T(*args["v"].shape, layout=layout, **kind)
    return {
        **{f"{name}8": x for name, x in values.items()},
        **{f"{name}_scale": args[f"{name}_scale"] for name in "qkv"},
        "tokens_first": [first] * 3,
        "dtype": dtype,
    }


def _bytes(generator: torch.Generator, shape: Sequence[int], device: torch.device) -> Tensor:
    """Floating numbers that every 8-bit type rounds to several of its own."""
    return 20.0 * torch.randn(shape, generator=generator, device=device)


def _bytes_first(generator: torch.Generator, shape: Sequence[int], device: torch.device) -> Tensor:
    return 20.0 * tokens_first(generator, shape, device)


DEQUANTIZE: list[Case] = [
    # the first, with which torch's opcheck runs: it cannot compare tensors in e4m3
    Case("integers", _dequantize(2, 1, 20, 33, 24, small=torch.int8), SMALL),
    Case("block", _dequantize(2, 1, 150, 140), SMALL),
    Case("head", _dequantize(2, 2, 60, 130, 64, parts="head", batch=2), SMALL),
    Case("tensor", _dequantize(2, 1, 33, 50, 96, 80, parts="tensor", dtype="float32"), SMALL),
    Case("token", _dequantize(2, 2, 20, 33, 80, parts="token", dtype="float16"), SMALL),
    Case("tokens_first", _dequantize(4, 2, 130, 33, first=True, batch=2), SMALL),
    Case("e5m2", _dequantize(2, 1, 20, 33, 64, small=torch.float8_e5m2, across=False), SMALL),
    Case("one_token", _dequantize(2, 1, 1, 1, 16), SMALL),
    Case("no_tokens", _dequantize(2, 1, 0, 7, 16), SMALL),
    Case("no_keys", _dequantize(2, 1, 7, 0, 16), SMALL),
    Case("no_rows", _dequantize(2, 1, 7, 9, 16, batch=0), SMALL),
    Case("wide", _dequantize(4, 2, 1000, 2000), TEST),
    Case("wider", _dequantize(2, 2, 70, 140, 256), TEST),
    Case("train_4x4096", _dequantize(16, 16, 4096, 4096, batch=4), UNCHECKED, (torch.bfloat16,)),
    Case("train_4x4096_tokens_first", _dequantize(16, 16, 4096, 4096, batch=4, first=True), TIMED, (torch.bfloat16,)),
]


def _moved(batch: int, heads: int, kv_heads: int, tokens: int, dim: int) -> dict:
    """The gradient of lse, lse with a row that saw no key, and a mean of keys."""
    fixed = {"dtype": torch.float32, "grad": False}
    return {
        "dlse": T(batch, heads, tokens, **fixed),
        "lse": T(batch, heads, tokens, init=_some_unseen, **fixed),
        "mean": T(batch, kv_heads, dim, **fixed),
        "scale": 0.3,
    }


def _some_unseen(generator: torch.Generator, shape: Sequence[int], device: torch.device) -> Tensor:
    lse = torch.randn(shape, generator=generator, device=device)
    return torch.where(lse > 1.0, float("-inf"), lse)


def _gradients(
    batch: int = 1, heads: int = 2, kv_heads: int = 2, tokens: int = 33, keys: int = 33, dim: int = 16,
    moved: bool = False, angles: dict | None = None, layout: str = "contiguous", init="normal", **options,
) -> dict:  # fmt: skip
    kind = {"grad": False, "layout": layout, "init": init}
    args = {
        "dq8": T(batch, heads, tokens, dim, **kind),
        "dk8": T(batch, kv_heads, keys, dim, **kind),
        **(_moved(batch, heads, kv_heads, tokens, dim) if moved else {}),
        **(angles or {}),
    }
    return {**args, "offset": keys - tokens if angles else 0, **options}


FIRST = {"init": tokens_first}
GRADIENTS: list[Case] = [
    Case("rotate", _gradients(1, 2, 1, 150, 140, 32), SMALL),
    Case("moved", _gradients(2, 4, 2, 40, 130, 32, moved=True), SMALL),
    Case("moved_alone", _gradients(1, 4, 2, 33, 20, 24, moved=True, rotate=False), SMALL),
    Case("cast", _gradients(1, 2, 1, 20, 33, 80, rotate=False, dtype="float16"), SMALL),
    Case("angles", _gradients(1, 2, 1, 20, 140, 32, moved=True, angles=_angles(150, 16)), SMALL),
    Case("angles_of_some", _gradients(2, 2, 2, 20, 33, 64, angles=_angles(33, 8, 2)), SMALL),
    Case("angles_of_neighbours", _gradients(1, 2, 2, 20, 33, 64, angles=_angles(33, 8, 1), interleaved=True), SMALL),
    Case("angles_alone", _gradients(1, 2, 1, 9, 33, 24, True, _angles(40, 12), rotate=False), SMALL),
    Case("turned_alone", _gradients(1, 2, 1, 9, 33, 40, True, _angles(40, 12), rotate=False, interleaved=True), SMALL),
    Case("tokens_first", _gradients(2, 4, 2, 40, 50, 32, True, _angles(50, 16), dtype="float32", **FIRST), SMALL),
    Case("strided", _gradients(2, 2, 2, 20, 30, layout="strided"), SMALL),
    Case("transposed", _gradients(2, 2, 2, 20, 30, layout="transposed"), SMALL),
    Case("q_alone", {**_gradients(1, 4, 2, 33, 20, 16, moved=True), "dk8": None}, SMALL),
    Case("k_alone", {**_gradients(1, 4, 2, 20, 33, 16, angles=_angles(40, 8)), "dq8": None}, SMALL),
    Case("no_tokens", _gradients(1, 2, 1, 0, 7), SMALL),
    Case("no_rows", _gradients(0, 2, 1, 7, 9), SMALL),
    Case("narrow", _gradients(1, 2, 1, 7, 9, 8), TEST),
    Case("wide", _gradients(1, 4, 2, 700, 1500, 128, moved=True), TEST),
    Case("wide_angles", _gradients(1, 4, 2, 300, 500, 128, True, _angles(500, 64)), TEST),
    Case("wider", _gradients(1, 2, 2, 70, 140, 256, moved=True), TEST),
    Case("train_4x4096", _gradients(4, 16, 16, 4096, 4096, 128), UNCHECKED, (torch.bfloat16,)),
    Case(
        "train_4x4096_angles",
        _gradients(4, 16, 16, 4096, 4096, 128, angles=_angles(4096, 64)),
        TIMED,
        (torch.bfloat16,),
    ),
]
