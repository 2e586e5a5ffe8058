"""Products with values of 65 to 96 columns as one WGMMA a step: which plans have them, and where these values lie."""

import json
import os
import subprocess
import sys

import pytest
import torch

from plan_calls import SM90
from tilesmith.engine import cases, ops, releases
from tilesmith.ops.attn.arguments import attention_arguments
from tilesmith.ops.attn.plan import Shape, joined, smem
from tilesmith.ops.attn.plan.configs import HopperConfig
from tilesmith.ops.attn.plan.hopper_forward import hopper_forward
from tilesmith.ops.attn.plan.joined import Joined, joined_values
from tilesmith.ops.attn.plan.shape import shape_of
from tilesmith.ops.attn.plan.tables import FORWARD_TILES

OPEN = HopperConfig(0, 0, 0)


def _shape(dim, value_dim=0, tokens=4000, causal=False, **more):
    s = Shape(1, 16, 16, tokens, tokens, dim, value_dim or dim, 2, 2, causal, -1, 0 if causal else -1)
    return s._replace(**more)


def _constants(plan):
    return [step.constants for step in plan.steps if step.kernel.startswith("attention_fwd")]


@pytest.mark.parametrize(
    ("dim", "value_dim", "found"),
    [
        (72, 72, (72, 64)), (66, 66, (72, 64)), (80, 80, (80, 64)), (74, 74, (80, 64)), (88, 88, (0, 0)),
        (96, 96, (96, 32)), (64, 80, (80, 64)), (64, 64, (0, 0)), (72, 64, (0, 0)), (128, 128, (0, 0)),
    ],
)  # fmt: skip
def test_values_of_65_to_96_columns_are_joined(dim, value_dim, found):
    plan = hopper_forward(_shape(dim, value_dim, 1000), SM90, OPEN)
    for constants in _constants(plan):
        assert (constants.get("V_COLS", 0), constants.get("V_PART", 0)) == found
    told = f"values of {found[0]} columns as one product a step of 16 keys"
    assert (told in str(plan)) == (found[0] > 0)
    assert any("v_rest_desc" in step.tensors for step in plan.steps) == (value_dim == 88)


BOTH_JOINED = HopperConfig(3, 96, 3)


@pytest.mark.parametrize(
    ("dim", "value_dim", "causal", "constants"),
    [
        (96, 96, True, {"REST": 32, "V_REST": 32, "V_COLS": 96, "WHOLE": False}),
        (88, 88, False, {"REST": 32, "V_REST": 32, "V_COLS": 88, "WHOLE": True}),
        (80, 80, False, {"REST": 16, "V_REST": 16, "V_COLS": 80, "WHOLE": True}),
        (96, 88, True, {"REST": 32, "V_REST": 32, "V_COLS": 88, "WHOLE": False}),
    ],
)
def test_tiles_whose_keys_are_no_power_of_two(dim, value_dim, causal, constants):
    plan = hopper_forward(_shape(dim, value_dim, 9600, causal), SM90, BOTH_JOINED)
    (step,) = plan.steps
    assert (plan.tile, step.kernel) == ((192, 96), "attention_fwd_joined_kernel")
    assert constants.items() <= step.constants.items() and step.shared_memory <= smem.HOPPER
    assert step.tensors["k_desc"].rows == step.tensors["v_desc"].rows == 96
    assert f"values of {constants['V_COLS']} columns as one product a step" in str(plan)


@pytest.mark.parametrize(
    ("more", "why"),
    [
        ({"dim": 72, "value_dim": 72}, "head dims outside 73 to 96"), ({"dim": 128}, "head dims outside 73 to 96"),
        ({"dim": 80, "value_dim": 96}, "keys and values that differ in columns"),
        ({"window_left": 300}, "a window's left edge"), ({"documents": 3}, "documents"),
        ({"lists": 1, "block_q": 128, "block_k": 128}, "block lists"),
        ({"dropout": True}, "dropout"), ({"softcap": True}, "a softcap"), ({"out_fp32": True}, "out in fp32"),
    ],
)  # fmt: skip
def test_calls_that_such_tiles_do_not_serve_have_others(more, why):
    s = _shape(96, tokens=9600, causal=True)._replace(**more)
    assert hopper_forward(s, SM90, OPEN).tile[1] != 96
    if not s.lists:
        with pytest.raises(ValueError, match=f"tiles of 96 keys do not serve .*{why}"):
            hopper_forward.__wrapped__(s, SM90, BOTH_JOINED)


@pytest.mark.parametrize("dim", [72, 80, 96])
@pytest.mark.parametrize("fp32", [False, True])
def test_values_are_the_largest_allocation_in_all_tiles(dim, fp32):
    s = _shape(dim, out_fp32=fp32)
    for tiles in FORWARD_TILES[dim]:
        how = joined_values(s, tiles)
        assert how.columns == dim
        for step in hopper_forward(s, SM90, tiles).steps:
            c = step.constants
            values = c["V_STAGES"] * c["BN"] * how.part * -(-(64 + c["V_REST"]) // how.part)
            assert values > max(c["STAGES"] * c["BN"] * 64, 64 * c["CONSUMERS"] * c.get("Q_STAGES", 1) * 64)
            assert step.shared_memory <= smem.HOPPER


def test_values_that_are_not_the_largest_allocation_lie_apart():
    """3 tiles of keys of 128 columns and 2 of values of 80."""
    s, config = _shape(128, 80), HopperConfig(2, 128, 3, 1, 2)
    assert joined_values(s, config) == Joined()
    plan = hopper_forward(s, SM90, config)
    assert "V_PART" not in _constants(plan)[0] and "v_rest_desc" in plan.steps[-1].tensors
    assert "two products a step of 16 keys: values are not the largest allocation" in str(plan)


def test_other_releases_of_triton_multiply_twice(monkeypatch):
    monkeypatch.setattr(releases, "installed", lambda: "3.8.0")
    joined._place_known.cache_clear()
    try:
        for dim in (72, 80, 96):
            plan = hopper_forward.__wrapped__(_shape(dim), SM90, OPEN)
            assert all("V_PART" not in constants and "V_REST" in constants for constants in _constants(plan))
            assert "where Triton 3.8.0 places values in shared memory was not tested" in str(plan)
            assert plan.tile != (192, 128)
    finally:
        joined._place_known.cache_clear()


@pytest.mark.parametrize(
    ("batch", "tokens", "heads", "dim", "causal", "tile", "us"),
    [
        (3, 4032, 16, 72, False, (192, 128), 422.1), (1, 3944, 16, 72, False, (192, 128), 163.4),
        (7, 2488, 16, 72, False, (192, 128), 398.8),
        (1, 584, 16, 80, False, (128, 128), 16.7), (1, 16520, 32, 96, True, (192, 96), 2663.2),
        (1, 12280, 32, 96, True, (192, 96), 1511.6), (1, 8192, 16, 80, True, (192, 96), 320.4),
        (3, 4328, 16, 88, False, (192, 96), 583.3), (32, 257, 16, 80, False, (192, 96), 56.1),
    ],
)  # fmt: skip
def test_the_best_measured_tiles_are_chosen(batch, tokens, heads, dim, causal, tile, us):
    s = _shape(dim, tokens=tokens, causal=causal, batch=batch, heads=heads, kv_heads=heads)
    plan = hopper_forward(s, SM90, OPEN)
    assert plan.tile == tile
    told = next(reason for reason in plan.reasons if reason.startswith("predicted times"))
    predicted = float(told.split(f"{tile[0]} x {tile[1]} ")[1].split(" ")[0])
    assert predicted == pytest.approx(us, rel=0.04)


def test_a_softcap_keeps_tiles_that_do_not_spill():
    """Of 192 x 128, 560 bytes (Triton 3.6)."""
    s = _shape(72, tokens=4032, batch=3)
    assert hopper_forward(s, SM90, OPEN).tile == (192, 128) != hopper_forward(s._replace(softcap=True), SM90, OPEN).tile


@pytest.mark.parametrize("dim", [72, 80, 96])
def test_block_lists_have_the_tiles_of_two_consumers(dim):
    plan = hopper_forward(_shape(dim, lists=1, list_rows=1, block_q=128, block_k=128), SM90, OPEN)
    assert (plan.tile, plan.stages) == ((128, 128), 3) and _constants(plan)[0]["V_COLS"] == dim


def _planned(op, case):
    """A case's call, and its plan on an H200."""
    from tilesmith.ops.attn.hopper.launch_forward import dims
    from tilesmith.ops.attn.plan.tables import hopper_forward as configured

    args = ops()[op].bind((), case.build(torch.device("cpu"), torch.bfloat16, case.generator()))
    config, fp32 = configured(dims(*args), SM90, torch.bfloat16), op == "attention_partial"

    @attention_arguments
    def planned(call):
        return hopper_forward(shape_of(call)._replace(out_fp32=fp32), SM90, config)

    return args, config, planned(*args)


@pytest.mark.usefixtures("needs_triton")
@pytest.mark.parametrize(("op", "many"), [("attention", 5), ("attention_partial", 2)])
def test_cases_have_tiles_of_192_queries_and_128_keys(op, many):
    wide = [case for case in cases(op) if "d72_wide_" in case.name]
    assert len(wide) == many
    seen = set()
    for case in wide:
        _, _, plan = _planned(op, case)
        constants = _constants(plan)[0]
        assert plan.tile[1:] == (128,) and plan.consumers == 3 and constants["V_COLS"] == 72, case.name
        heads = ("heads", constants.get("HEADS", 1) > 1)
        seen |= {("ONE_MASK", constants["ONE_MASK"]), ("WHOLE", constants["WHOLE"]), heads}
    assert op == "attention_partial" or len(seen) == 6


@pytest.mark.usefixtures("needs_triton")
def test_cases_have_tiles_whose_keys_are_no_power_of_two():
    few = [case for case in cases("attention") if "both_joined" in case.name]
    assert len(few) == 1
    for case in few:
        assert _planned("attention", case)[2].tile == (192, 96), case.name


@pytest.mark.usefixtures("needs_triton")
@pytest.mark.parametrize("which", ["tiles", "cases"])
def test_values_lie_first_in_compiled_kernels(which):
    """Every kind of tile, and calls of every kind. Compiled in a process of its own: here kernels are interpreted."""
    environment = {**os.environ, "TRITON_INTERPRET": "0", "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-m", "joined_places", which]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stderr[-4000:]
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    apart = {row["name"] for row in rows if not row["joined"]}
    assert len(rows) >= 12 and apart <= {"d192_80_tiles", "d128_72_tiles", "d88_group_of_3"}
    assert not [row for row in rows if row["joined"] and row["place"]]
