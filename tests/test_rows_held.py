"""How Hopper's kernels divide rows that registers hold, and which rows they serve."""

import pytest
import torch

from tilesmith.device.gluon.rows import LINE
from tilesmith.device.gluon.rows_held import (
    MOST_CHUNKS,
    HeldConfig,
    fewer_lines,
    held_flags,
    held_parts,
    one_cta_config,
)
from tilesmith.engine import cdiv, next_power_of_2
from tilesmith.engine import ops as all_ops
from tilesmith.hardware.detect import arch_named

MANY = 2**20
WIDTHS = [cols for cols in range(528, 8192, 16) if fewer_lines(cols)]


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("rows", [1, 150, 800, 4000, MANY])
def test_one_cta_holds_a_row(rows, size):
    for cols in WIDTHS:
        config = one_cta_config({"rows": rows, "cols": cols}, arch_named("sm90"), size)
        assert held_parts(cols, config) == 1 and (config.chunks - 1) * config.num_warps * LINE < cols
        assert 1 <= config.num_warps <= 16 and config.chunks <= MOST_CHUNKS * 2 // size


def test_few_warps_hold_many_rows_and_more_warps_few():
    configs = {rows: one_cta_config({"rows": rows, "cols": 1152}, arch_named("sm90"), 2) for rows in (150, 400, MANY)}
    assert [configs[rows][:2] for rows in configs] == [(1, 8), (3, 2), (5, 1)]
    for cols in WIDTHS:
        dims = [{"rows": rows, "cols": cols} for rows in (1, 100, 300, 1000, 3000, MANY)]
        warps = [one_cta_config(d, arch_named("sm90"), 2).num_warps for d in dims]
        assert warps == sorted(warps, reverse=True)
        lanes = one_cta_config(dims[-1], arch_named("sm90"), 2)
        assert lanes.chunks * lanes.num_warps * LINE <= next_power_of_2(cols)


@pytest.mark.parametrize("cols", [640, 1152, 2880, 4096, 4544, 20_480, 36_864, 131_072])
@pytest.mark.parametrize("chunks, num_warps", [(1, 8), (3, 2), (5, 4), (8, 8)])
def test_chunks_that_are_whole_in_all_parts_need_no_mask(cols, chunks, num_warps):
    parts = held_parts(cols, HeldConfig(chunks, num_warps, 0))
    width = num_warps * LINE
    ends = [[(part * chunks + c + 1) * width for c in range(chunks)] for part in range(parts)]
    whole = [all(end[c] <= cols for end in ends) for c in range(chunks)]
    flags = held_flags(cols, parts, HeldConfig(chunks, num_warps, 0))
    assert whole == [c < flags["WHOLE"] for c in range(chunks)]


@pytest.mark.parametrize("name", ["layer_norm", "rms_norm", "softmax", "softmax_vjp"])
@pytest.mark.parametrize(
    "cols, why",
    [
        (640, None),
        (1152, None),
        (4544, None),
        (1160, "multiples of 16"),
        (896, "multiples of 256"),
        (1024, "multiples of 256"),
        (1920, "multiples of 256"),
        (512, "multiples of 256"),
    ],
)
def test_rows_that_leave_lanes_of_other_kernels_idle_are_served(name, cols, why):
    op = next(o for o in all_ops().values() if o.name == name)
    x, vector = torch.zeros(4, cols, dtype=torch.bfloat16), torch.zeros(cols, dtype=torch.bfloat16)
    args = {
        "layer_norm": (x, vector, vector, 1e-5),
        "rms_norm": (x, vector, 1e-6, 0.0),
        "softmax": (x, 1.0),
        "softmax_vjp": (x, x, 1.0, False),
    }[name]
    if (name, cols) == ("rms_norm", 640):  # Triton's is 4 % faster there
        why = "above 1024"
    described = op._describe(*op.bind(args, {}))._replace(arch=arch_named("sm90"))
    found = [reason for reason in op.kernel("hopper").rejects(described) if "columns" in reason]
    assert [why in reason for reason in found] == ([] if why is None else [True])


def test_lines_beat_tiles_of_a_power_of_two():
    assert all(cdiv(cols, LINE) * LINE < next_power_of_2(cols) for cols in WIDTHS)
    assert not any(map(fewer_lines, (512, 896, 1024, 1920, 4096, 8192, 8208)))
