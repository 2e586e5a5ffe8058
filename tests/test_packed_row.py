"""How CTAs of the product of one row with a packed weight lie on a device."""

import pytest

pytest.importorskip("triton")

from tilesmith.ops.quant.hopper import packed_row
from tilesmith.ops.quant.hopper.packed_row import row_shape, warps_of_row

REGISTERS, SMEM, SMS = 65_536, packed_row.WHOLE_SMEM, 132


def _fit(strips: int, groups: int) -> tuple[int, int]:
    """CTAs that a multiprocessor holds, by registers and by shared memory."""
    warps = warps_of_row(strips, groups, SMS)
    shape = row_shape(strips, warps, SMS)
    return REGISTERS // (32 * warps * shape.registers), SMEM // (shape.room + packed_row.SYSTEM_SMEM)


@pytest.mark.parametrize("strips", range(1, 8 * SMS, 37))
@pytest.mark.parametrize("groups", [1, 16, 40, 64, 224, 448])
def test_all_strips_run_at_once_and_no_multiprocessor_has_room_for_many_more(strips, groups):
    share = -(-strips // SMS)
    registers, smem = _fit(strips, groups)
    assert min(registers, smem) >= share
    if groups >= 64 and share in (1, 2, 4, 5, 6, 7):
        assert min(registers, smem) == share


@pytest.mark.parametrize("strips", [8 * SMS + 1, 5000])
def test_many_strips_fill_a_multiprocessor(strips):
    assert warps_of_row(strips, 64, SMS) == 4
    assert _fit(strips, 64)[0] == 8
