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


@pytest.mark.parametrize("format", ["e4m3", "e5m2"])
def test_finite_numbers_never_become_nan(format):
    """Those that overflow fp32 when they are divided by the factor of a far smaller bound become the largest."""
    x = torch.tensor([[3e38, -(2.0**121), 0.0, torch.inf, torch.nan]], dtype=torch.bfloat16)
    x8 = reference.fp8_cast(x, torch.ones(1), torch.zeros(1), format)[0]
    largest = reference.GREATEST[format]
    assert x8[0, :3].float().tolist() == [largest, -largest, 0.0]
    assert x8[0, 3:].float().isnan().all()


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


@pytest.mark.parametrize("wanted", [(True, True), (True, False), (False, True)], ids=str)
def test_blocks_in_bands(needs_triton, wanted):
    """More rows of tiles than a band has, whose last ones are not full."""
    x = _odd(600, 300, torch.bfloat16)
    with use(fp8_cast_blocks="triton:num_warps=8:max_registers=0:bands=4"):
        found = ops.fp8_cast_blocks(x, "e4m3", *wanted)
    _assert_same_bits(found, reference.fp8_cast_blocks(x, "e4m3", *wanted))


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


def _finite(x):
    return x.nan_to_num(posinf=3, neginf=-3)


STACKS = [(144, 144), (16, 272), (48, 16, 144), (0, 32, 16)]  # rows of each
BESIDE = [(144, 144), (16, 80), (48, 16, 144), (0, 32, 16)]  # columns of each


@pytest.mark.parametrize("heights", STACKS, ids=str)
@pytest.mark.parametrize("format", ["e4m3", "e5m2"])
@pytest.mark.parametrize("finite", [True, False])
def test_a_stack_is_cast_as_one(needs_triton, format, finite, heights):
    """By one factor, into the places that the parts have in one tensor, plain and transposed."""
    whole = _odd(sum(heights), 70, torch.bfloat16)
    whole = _finite(whole) if finite else whole
    with use(fp8_cast_stack="triton"):
        found = ops.fp8_cast_stack(*whole.split(heights), format=format)
    bound = reference.fp8_amax(whole)
    _assert_same_bits(found, reference.fp8_cast(whole, bound, bound.clone(), format, True, True))


@pytest.mark.parametrize("bands", [1, 4])
def test_a_stack_is_cast_in_any_order(needs_triton, bands):
    whole = _finite(_odd(272, 133, torch.bfloat16))
    pin = f"triton:block_rows=32:block_cols=64:num_warps=4:bands={bands}"
    with use(fp8_cast_stack=pin):
        found = ops.fp8_cast_stack(*whole.split((144, 80, 48)))
    bound = reference.fp8_amax(whole)
    _assert_same_bits(found, reference.fp8_cast(whole, bound, bound.clone(), "e4m3", True, True))


@pytest.mark.parametrize("widths", BESIDE, ids=str)
@pytest.mark.parametrize("wanted", [(True, False), (True, True), (False, True), (False, False)], ids=str)
@pytest.mark.parametrize("height", [37, 144])
def test_tensors_side_by_side_are_cast_as_one(needs_triton, height, wanted, widths):
    """Contiguous, as columns of one tensor, and transposed; what was seen is that of all."""
    whole, format = _odd(height, sum(widths), torch.bfloat16), "e5m2" if height == 37 else "e4m3"
    bound = torch.full((1,), 4.0, device=DEVICE)
    for lay_out in (torch.Tensor.contiguous, lambda x: x, lambda x: x.t().contiguous().t()):
        for x in (whole, _finite(whole)):
            parts, seen, told = [lay_out(part) for part in x.split(widths, 1)], bound / 8, bound / 8
            with use(fp8_cast_beside="triton"):
                found = ops.fp8_cast_beside(*(*parts, None)[:3], bound, seen, format, *wanted)
            want = reference.fp8_cast(x, bound, told, format, *wanted)
            _assert_same_bits((*found, seen), (*want, told))


@pytest.mark.parametrize("at", [0, 1, 2])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("sizes", [(4096, 40_000, 18), (0, 2, 70_000), (8192, 8193, 1)], ids=str)
def test_the_largest_of_several_tensors(needs_triton, at, dtype, sizes):
    """Wherever it is, in either half of a word, and whatever the sizes of the others; 16-bit numbers as words of two
    where all of them can be read so."""
    if not sizes[at]:
        return
    for place in (0, -1):
        parts = [torch.rand(n + 1, device=DEVICE).to(dtype)[begin:] for n, begin in zip(sizes, (1, 1, 0))]
        parts = [part.clone() for part in parts] if place else parts  # an odd offset is between two words
        parts[at][place] = -3
        with use(fp8_amax="triton:block=4096:num_warps=4:programs=3"):
            assert ops.fp8_amax(*parts).item() == 3
            parts[at][-1] = -torch.inf
            assert ops.fp8_amax(*parts).item() == torch.inf
            parts[at][0] = torch.nan
            assert ops.fp8_amax(*parts).isnan().all()


@pytest.mark.parametrize("offset", [0, 1])
@pytest.mark.parametrize("dtype", [torch.bfloat16, OTHER])
@pytest.mark.parametrize("at", [0, 8191, 8192, 20_735])
def test_each_expert_has_the_factor_of_its_largest(needs_triton, at, dtype, offset):
    """In any of a matrix's blocks and either half of a word; an odd offset is between two words."""
    weight = torch.randn(3 * 144 * 144 + offset, device=DEVICE).to(dtype)[offset:].view(3, 144, 144)
    weight.view(3, -1)[:, at] = torch.tensor([-100, 7, torch.inf]).to(weight)
    with use(fp8_cast_experts="triton"):
        _assert_same_bits(ops.fp8_cast_experts(weight), reference.fp8_cast_experts(weight))
        weight[0].view(-1)[at] = torch.nan
        _assert_same_bits(ops.fp8_cast_experts(weight), reference.fp8_cast_experts(weight))


def test_the_largest_of_two_on_the_reference():
    assert ops.fp8_amax(torch.ones(3), torch.full((2,), -2.0)).item() == 2


HALF, FULL = torch.float16, torch.bfloat16


@pytest.mark.parametrize(
    ("shapes", "dtype", "format", "error"),
    [
        (((16, 4), (16, 8)), FULL, "e4m3", "second has 8 columns, first has 4; they must match"),
        (((16, 4), (16, 4), (32, 3)), FULL, "e4m3", "third has 3 columns, first has 4; they must match"),
        (((16, 4), (32, 4)), HALF, "e4m3", "second has dtype torch.float16, first has torch.bfloat16"),
        (((16, 4), (16, 4)), FULL, "e3m4", "format is 'e3m4'"),
        (((17, 4), (16, 4)), FULL, "e4m3", r"first has shape \(17, 4\); it must be \[M, N\], M a multiple of 16"),
        (((16, 4), (16, 4), (8, 4)), FULL, "e4m3", r"third has shape \(8, 4\); it must be \[M, N\]"),
        (((16, 4), (16, 4, 1)), FULL, "e4m3", r"second has shape \(16, 4, 1\); it must be \[M, N\]"),
    ],
)
def test_stacks_that_are_none(shapes, dtype, format, error):
    first, second, *rest = (torch.ones(s, dtype=dtype if i == 1 else FULL) for i, s in enumerate(shapes))
    with pytest.raises((TypeError, ValueError), match=f"fp8_cast_stack: {error}"):
        ops.fp8_cast_stack(first, second, *rest, format=format)


@pytest.mark.parametrize(
    ("shapes", "dtype", "error"),
    [
        (((4, 16), (4, 8)), FULL, r"second has shape \(4, 8\); it must be \[..., N\], N a multiple of 16"),
        (((4, 16), (5, 16)), FULL, r"second has shape \(5, 16\), first \(4, 16\); all dims but the last must match"),
        (((4, 16), (4, 16), (2, 2, 16)), FULL, r"third has shape \(2, 2, 16\), first \(4, 16\)"),
        (((4, 16), (4, 32)), HALF, "second has dtype torch.float16, first has torch.bfloat16"),
    ],
)
def test_tensors_that_are_not_side_by_side(shapes, dtype, error):
    parts = [torch.ones(s, dtype=dtype if i == 1 else FULL) for i, s in enumerate(shapes)]
    with pytest.raises((TypeError, ValueError), match=f"fp8_cast_beside: {error}"):
        ops.fp8_cast_beside(*(*parts, None)[:3], torch.ones(1), torch.zeros(1))


def test_several_tensors_of_one_largest_element_are_alike():
    with pytest.raises(TypeError, match="fp8_amax: third has dtype torch.float16, x has torch.float32"):
        ops.fp8_amax(torch.ones(2), torch.ones(3), torch.ones(3).half())
