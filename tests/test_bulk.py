"""Which tensors are moved 16 bytes at a time as they lie, by which strides, and that a copy of any other one is."""

import pytest
import torch
from torch import Tensor

from tilesmith.device.alignment import aligned, aligned_vector, is_16_byte_aligned, tma_strides, tma_view


def _memory(*shape: int, dtype: torch.dtype = torch.bfloat16, offset: int = 0) -> Tensor:
    """Random values, so many elements behind a multiple of 16 bytes."""
    count = torch.Size(shape).numel()
    whole = torch.randn(count + offset + 16).to(dtype)
    first = -whole.data_ptr() % 16 // whole.element_size() + offset
    return whole[first : first + count].view(shape)


# (x, whether loads of 16 bytes reach its lines, and whether the accelerator takes it as it lies)
CASES = {
    "dense": (lambda: _memory(2, 3, 5, 64), True, True),
    "heads before tokens": (lambda: _memory(2, 5, 3, 64).transpose(1, 2), True, True),
    "lines apart": (lambda: _memory(4, 72)[:, :64], True, True),
    "columns from a unit on": (lambda: _memory(4, 72)[:, 8:], True, True),
    "base off": (lambda: _memory(4, 64, offset=1), False, False),
    "columns from between units on": (lambda: _memory(4, 72)[:, 4:68], False, False),
    "lines of half units": (lambda: _memory(4, 68)[:, :64], False, False),
    "expanded": (lambda: _memory(1, 64).expand(4, 64), True, False),
    "expanded heads": (lambda: _memory(2, 1, 5, 64).expand(2, 3, 5, 64), True, False),
    "one row, a stride of 0": (lambda: torch.as_strided(_memory(64), (1, 64), (0, 1)), True, True),
    "one row, an odd stride": (lambda: torch.as_strided(_memory(64), (1, 64), (7, 1)), True, True),
    "one head, an odd stride": (
        lambda: torch.as_strided(_memory(2, 5, 64), (2, 1, 5, 64), (320, 3, 64, 1)),
        True,
        True,
    ),
    "two rows, an odd stride": (lambda: torch.as_strided(_memory(135), (2, 64), (71, 1)), False, False),
    "last stride": (lambda: _memory(64, 16).t(), False, False),
    "every other column": (lambda: _memory(4, 128)[:, ::2], False, False),
    "all the same": (lambda: _memory(1).expand(4, 64), False, False),
    "one column": (lambda: _memory(4, 8)[:, :1], True, True),
    "one column, a last stride": (lambda: torch.as_strided(_memory(4, 8), (4, 1), (8, 5)), True, True),
    "a vector": (lambda: _memory(64), True, True),
    "no rows": (lambda: _memory(0, 64), True, True),
}
UNITS = {torch.float8_e4m3fn: 16, torch.bfloat16: 8, torch.float32: 4, torch.float64: 2}


@pytest.mark.parametrize("case", CASES)
def test_what_does_not_suit_is_copied_and_nothing_else(case):
    build, by_units, by_bulk = CASES[case]
    x = build()
    assert is_16_byte_aligned(x) == by_units
    assert (tma_strides(x) is not None) == by_bulk
    found, strides = tma_view(x)
    assert (found is x) == by_bulk
    _check(found, strides, x)


def _check(found: Tensor, strides: list[int], x: Tensor) -> None:
    """What lies at these strides is x, and they are legal."""
    unit = UNITS[x.dtype]
    assert found.data_ptr() % 16 == 0
    assert strides[-1] == 1 and all(s > 0 and s % unit == 0 for s in strides[:-1])
    assert torch.equal(torch.as_strided(found, x.shape, strides).double(), x.double())


@pytest.mark.parametrize("dtype", UNITS)
def test_a_unit_is_16_bytes_of_any_dtype(dtype):
    unit = UNITS[dtype]
    x = _memory(4, 5 * unit, dtype=dtype)
    for columns, suits in ((slice(unit, None), True), (slice(unit // 2, -unit // 2), False)):
        assert is_16_byte_aligned(x[:, columns]) == suits
    apart = _memory(4, 3 * unit // 2, dtype=dtype)
    assert not is_16_byte_aligned(apart[:, :unit]) and is_16_byte_aligned(apart[::2, :unit])
    _check(*tma_view(apart[:, :unit]), apart[:, :unit])


@pytest.mark.parametrize("case", [name for name in CASES if CASES[name][0]().ndim == 2])
def test_rows_read_by_vectors_are_those_in_units_or_a_copy(case):
    build, by_units, _ = CASES[case]
    x = build()
    found, units = aligned(x)
    assert (found is x) == by_units and torch.equal(found, x)
    if x.shape[0] > 1:
        assert units * 8 == found.stride(0)


def test_vectors_without_gaps_from_a_unit_on_are_not_copied():
    x, apart, off = _memory(64), _memory(128)[::2], _memory(64, offset=3)
    assert aligned_vector(None) is None and aligned_vector(x) is x
    for vector in (apart, off):
        found = aligned_vector(vector)
        assert is_16_byte_aligned(found) and torch.equal(found, vector)
