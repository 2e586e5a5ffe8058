"""Example inputs of attention on e4m3 values. Letters: see cases.py."""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from tilesmith.engine import Case, T

TEST = frozenset({"test"})
E4M3 = torch.float8_e4m3fn


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


def _fp8(
    heads: int, kv_heads: int, tokens: int, keys: int, dim: int = 128, dim_v: int = 128, batch: int = 1,
    parts: str = "block", **options,
) -> dict:  # fmt: skip
    """Arguments of one call. parts: what each factor is for: a block, a head, or the tensor."""
    kind = {"dtype": E4M3, "grad": False, "init": _sparse}
    rows = (1, 1) if parts == "tensor" else (batch, heads)
    kv_rows = (1, 1) if parts == "tensor" else (batch, kv_heads)
    blocks, kv_blocks = (-(-n // 128) if parts == "block" else 1 for n in (tokens, keys))
    factor = {"dtype": torch.float32, "grad": False}
    return {
        "q": T(batch, heads, tokens, dim, **kind),
        "k": T(batch, kv_heads, keys, dim, **kind),
        "v": T(batch, kv_heads, keys, dim_v, dtype=E4M3, grad=False, layout="transposed", init=_columns),
        "q_scale": T(*rows, blocks, init=_twos, **factor),
        "k_scale": T(*kv_rows, kv_blocks, init=_twos, **factor),
        "v_scale": T(*kv_rows, kv_blocks, init=_factors, **factor),
        "scale": math.log(2.0),
        **options,
    }


ATTENTION: list[Case] = [
    Case(name, args, TEST, (torch.bfloat16,))
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
        ("e4m3_many_tiles", _fp8(8, 2, 1100, 1100, batch=3, causal=True)),
    )
]
