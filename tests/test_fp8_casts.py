"""Casts to 8 bits are exact but for one rounding: each kernel gives the very bits of the reference."""

import pytest
import torch

from devices import DEVICE, ON_GPU
from tilesmith import ops, use
from tilesmith.ops.quant import reference

# size, format, dtype; fp32 tiles are refused on a GPU
SMALL, TILES = (37, 70), (144, 132)
OTHER = torch.float16 if ON_GPU else torch.float32
CALLS = [
    (SMALL, "e4m3", torch.bfloat16), (SMALL, "e5m2", torch.bfloat16), (SMALL, "e4m3", OTHER), (SMALL, "e5m2", OTHER),
    (TILES, "e5m2", torch.bfloat16),
]  # fmt: skip


def _odd(m, n, dtype):
    """Numbers of every size, ties among them, and some that are none, infinite or too large; a row of zeros."""
    x = torch.randn(m, n) * torch.logspace(-6, 3, n)
    x[:, ::3] = torch.randint(-64, 65, x[:, ::3].shape) / 16
    x[1, 2], x[2, 3], x[3, 4], x[4], x[5, 6] = torch.nan, torch.inf, -torch.inf, 0, 6e4
    return x.to(DEVICE, dtype)


def _assert_same_bits(found, want):
    for got, expected in zip(found, want):
        if got.element_size() == 1:
            nan = got.float().isnan() & expected.float().isnan()
            assert torch.equal(
                got.view(torch.uint8).masked_fill(nan, 0), expected.view(torch.uint8).masked_fill(nan, 0)
            )
        else:
            torch.testing.assert_close(got, expected, rtol=0, atol=0, equal_nan=True)


def test_tiles_go_by_bands(needs_triton):
    """Five rows of tiles, four at a time: each is made, whatever the order."""
    x, tile = _odd(144, 70, torch.bfloat16), "triton:block_rows=32:block_cols=64:num_warps=4:bands=4"
    x8 = reference.cast(x.float(), "e4m3")
    with use(fp8_transpose=tile):
        _assert_same_bits([ops.fp8_transpose(x8)], [reference.fp8_transpose(x8)])


def test_blocks_without_pairs(needs_triton):
    """An odd number of columns, and columns that begin between words: each element is read by itself."""
    x = _odd(144, 133, torch.bfloat16)
    for part in (x, x[:, 1:]):
        with use(fp8_cast_blocks="triton"):
            found = ops.fp8_cast_blocks(part, "e4m3", True, True)
        _assert_same_bits(found, reference.fp8_cast_blocks(part, "e4m3", True, True))


@pytest.mark.parametrize(("size", "format", "dtype"), CALLS, ids=str)
def test_casts_are_bit_exact(needs_triton, size, format, dtype):
    x, bound = _odd(*size, dtype), torch.full((1,), 4.0, device=DEVICE)
    calls = {
        "fp8_cast": [(x, bound, torch.zeros_like(bound), format, *wanted) for wanted in ((1, 0), (1, 1), (0, 1))],
        "fp8_cast_rows": [(x, format)],
        "fp8_cast_blocks": [(x, format, True, True, square) for square in (False, True)],
        "fp8_transpose": [(reference.cast(x.float(), format),)],
    }
    for name, each in calls.items():
        for args in each:
            args = [bool(a) if isinstance(a, int) else a for a in args]
            again = [a.clone() if isinstance(a, torch.Tensor) else a for a in args]
            with use(**{name: "triton"}):
                found = getattr(ops, name)(*args)
            want = getattr(reference, name)(*again)
            found, want = (r if isinstance(r, tuple) else (r,) for r in (found, want))
            _assert_same_bits(found, want)
            if name == "fp8_cast":  # what was seen: none of these numbers is left out
                assert args[2].isnan().all() and again[2].isnan().all()


@pytest.mark.parametrize("format", ["e4m3", "e5m2"])
@pytest.mark.parametrize("finite", [True, False])
def test_a_pair_is_cast_as_one(needs_triton, format, finite):
    """By one factor, into the places that the two have in one tensor, plain and transposed."""
    first, second = _odd(144, 70, torch.bfloat16), 1e3 * _odd(144, 70, torch.bfloat16)
    if finite:
        first, second = first.nan_to_num(posinf=3, neginf=-3), second.nan_to_num(posinf=9, neginf=-9)
    with use(fp8_cast_pair="triton"):
        found = ops.fp8_cast_pair(first, second, format)
    whole = torch.cat((first, second))
    bound = reference.fp8_amax(whole)
    _assert_same_bits(found, reference.fp8_cast(whole, bound, bound.clone(), format, True, True))


@pytest.mark.parametrize(
    ("second", "options", "error"),
    [
        ((16, 8), {}, r"second has shape \(16, 8\); it must equal first's"),
        ((16, 4), {"dtype": torch.float16}, "second has dtype torch.float16, first has torch.bfloat16"),
        ((16, 4), {"format": "e3m4"}, "format is 'e3m4'"),
        ((17, 4), {}, r"first has shape \(17, 4\); it must be \[M, N\], M a multiple of 16"),
    ],
)
def test_pairs_that_are_none(second, options, error):
    first = torch.ones(17 if second[0] == 17 else 16, 4, dtype=torch.bfloat16)
    other = torch.ones(second, dtype=options.pop("dtype", torch.bfloat16))
    with pytest.raises((TypeError, ValueError), match=f"fp8_cast_pair: {error}"):
        ops.fp8_cast_pair(first, other, **options)
