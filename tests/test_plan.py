"""Plans of attention: every tile once, a legal order, memory that fits, and today's choices for the benched rows."""

import itertools
import math
import random
import re
from collections import Counter
from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import hypothesis
import pytest
import torch
from hypothesis import strategies as st

import tilesmith
from devices import DEVICE
from plan_calls import (
    GOLDEN,
    SM90,
    backward,
    benched,
    decode,
    forward,
    golden,
    random_shape,
)
from tilesmith.engine.backends import triton_missing
from tilesmith.ops import Mask
from tilesmith.ops.attn import schedule
from tilesmith.ops.attn.op import attention_op, attention_vjp
from tilesmith.ops.attn.plan import Shape
from tilesmith.ops.attn.plan import hopper_forward as planned_forward
from tilesmith.ops.attn.plan.configs import HopperConfig, HopperVjpConfig
from tilesmith.ops.attn.plan.decode import scattered, unit_count, unit_heads
from tilesmith.ops.attn.plan.hopper_backward_tiles import kv_heads_together, list_parts, rings
from tilesmith.ops.attn.plan.hopper_bands import WORKSPACE, bands, extent, workspace
from tilesmith.ops.attn.plan.hopper_forward import divided, hopper_forward
from tilesmith.ops.attn.plan.shape import window_of
from tilesmith.ops.attn.plan.tables import FORWARD_TILES
from tilesmith.ops.attn.schedule import CtaTile, read_time

needs_triton = pytest.mark.skipif(triton_missing() is not None, reason=str(triton_missing()))


def _shapes(count, seed):
    r = random.Random(seed)
    return [random_shape(r) for _ in range(count)]


@pytest.mark.parametrize("make", [forward, backward, decode], ids=lambda make: make.__name__)
def test_thousands_of_plans_hold_together(make):
    for s in _shapes(1500, 1):
        if make is decode and (s.packed or s.lists or s.dropout):
            continue
        plan = make(s)
        assert bool(plan.steps) == (s.tokens > 0 and s.keys > 0) and plan.reasons
        held = {buffer.name for buffer in plan.scratch}
        assert len(held) == len(plan.scratch) and plan.scratch_bytes >= 0
        for step in plan.steps:
            assert all(n > 0 for n in step.grid) and step.shared_memory <= SM90.shared_memory
            used = {getattr(source, "of", source) for source in step.tensors.values()}
            held -= used
        assert not held, f"{held} is allocated and no kernel is given it"
        if s.deterministic or make is not backward:
            assert plan.ordered


def test_gradients_in_fp32_are_stored_from_registers():
    """Scratch for parts of groups is fp32, too, and a narrow window has the kernel that can."""
    for s in _shapes(300, 2):
        plan, wide = (backward(s._replace(gradients_fp32=on)) for on in (False, True))
        assert not wide.step("attention_window_vjp_kernel")
        for step in wide.steps:
            tiles = {source.of for source in step.tensors.values() if hasattr(source, "rows")}
            assert not tiles & {"dq", "dk", "dv", "dk_parts", "dv_parts"}, "tiles in shared memory have 16 bits"
            if step.kernel.startswith("attention_dkv_") and "stream" not in step.kernel:
                assert {"dk_ptr", "dv_ptr", "dk_strides", "dv_strides"} <= step.tensors.keys()
                assert step.constants["DIM"] == s.dim and "gradients in fp32" in str(wide)
        assert {b.dtype for b in wide.scratch if b.name in ("dk_parts", "dv_parts")} <= {"float32"}
        assert "gradients in fp32" not in str(plan)


def test_results_in_fp32_are_stored_from_registers():
    """A narrow window has the kernel that can; no room is kept for tiles of out, and no other kernel is another one."""
    for s in _shapes(300, 3):
        plan, wide = (forward(s._replace(out_fp32=on)) for on in (False, True))
        assert not wide.step("attention_window_kernel") and "stored from registers" not in str(plan)
        for step in wide.steps:
            if step.kernel.startswith("attention_fwd"):
                assert step.tensors["out_desc"] is None and step.tensors["out_ptr"] == "out"
                assert step.constants["DIM_V"] == s.value_dim and "stored from registers" in str(wide)
                same = plan.step(step.kernel)
                if same is not None and same.constants.get("HEADS", 1) == 1 and plan.tile == wide.tile:
                    assert step.grid == same.grid and step.shared_memory <= same.shared_memory


@pytest.mark.parametrize(("dim", "columns", "stages"), [(72, 80, 3), (80, 80, 3), (88, 96, 2), (96, 96, 2)])
def test_gradients_up_to_head_dim_96_have_compact_tiles_and_as_many_as_fit(dim, columns, stages):
    for s in _shapes(40, dim):
        s = s._replace(dim=dim, value_dim=dim, softcap=False, dropout=False)
        step = backward(s).step("attention_dkv_kernel")
        if step is None:  # a narrow window
            continue
        assert (step.constants["REST"], step.constants["STAGES"]) == (columns - 64, stages)
        assert step.shared_memory <= SM90.shared_memory
        for name in ("q", "k", "v", "dout", "dk", "dv"):
            assert step.tensors[f"{name}_desc"].columns == 64
            assert step.tensors[f"{name}_rest_desc"].columns == columns - 64
        padded = backward(s._replace(softcap=True)).step("attention_dkv_kernel")
        assert padded.constants["STAGES"] == 2 and "REST" not in padded.constants


def test_kernels_beside_gradients_load_their_tiles_at_once():
    for dim in (64, 72, 96, 128, 192, 256, 512):
        for s in _shapes(40, dim):
            for step in backward(s._replace(dim=dim, value_dim=dim, dropout=False, lists=0, lists_by_keys=0)).steps:
                c = step.constants
                if step.kernel not in ("attention_rows_kernel", "attention_dq_kernel"):
                    continue
                item = 4 if step.kernel == "attention_rows_kernel" else 4 * (c["D"] + c.get("REST", 0)) / c["D"]
                loaded, warps = c["ROWS"] * c["D"] * item, c["num_warps"]
                assert loaded <= warps * 32 * 64 or warps == 16
                assert warps in (4, 8, 16) and (warps == 4 or loaded > warps * 32 * 32)


@pytest.mark.parametrize("value_dim", [64, 120, 128, 192, 256])
@pytest.mark.parametrize("dim", [64, 128, 136, 192, 256])
def test_split_columns_cover_both_head_dims_once(dim, value_dim):
    for s in _shapes(60, dim + value_dim):
        s = s._replace(dim=dim, value_dim=value_dim, lists=0, lists_by_keys=0, dropout=False)
        plans = [backward(s)] if dim != value_dim or 128 < dim <= 192 else []
        plans += [forward(s)] if 128 < dim <= 192 else []
        for step in (step for plan in plans for step in plan.steps if "D" in step.constants):
            c = step.constants
            assert step.shared_memory <= SM90.shared_memory and c.get("STAGES", 2) >= 2
            if "DV" not in c:  # a kernel of rows
                continue
            split = 128 < dim <= 192
            assert (c["D"], c.get("REST", 0)) == ((128, 64) if split else (max(64, 1 << (dim - 1).bit_length()), 0))
            for name in ("q", "k"):
                whole, rest = step.tensors[f"{name}_desc"], step.tensors.get(f"{name}_rest_desc")
                assert (whole.columns, rest and rest.columns) == ((128, 64) if split else (0, None))


def test_groups_are_divided_where_a_list_may_be_long():
    s = Shape(1, 32, 4, 32768, 32768, 128, 128, 2, 2, causal=True, window_right=0, lists=4, lists_by_keys=4)
    s = s._replace(block_q=128, block_k=128)

    def parts(entries, **fields):
        return list_parts(s._replace(list_entries=entries, **fields), SM90, HopperVjpConfig(2, 64))

    best = 4 * (16 * 256 - 120)  # of 256 rows, 16 blocks each
    assert [parts(n) for n in (best, 2 * best, 9 * best)] == [8, 8, 8]
    assert parts(best, kv_heads=32) == 1
    assert parts(best, heads=12) == 2, "three heads a group, in parts of two and one"
    assert parts(40, tokens=512, batch=64) == 1, "where parts cost more than the longest tile"
    assert parts(best, dim=192) == 1
    plan = backward(s._replace(list_entries=best))
    assert plan.step("attention_dkv_kernel").constants["GROUP_PARTS"] == 8


@pytest.mark.parametrize("seed", range(40))
def test_parts_of_lists_fit_the_worst_distribution(seed):
    """The longest tile, which every block of queries chose, comes last; the other entries are spread evenly."""
    chance = random.Random(seed)
    group, heads, ctas = chance.choice([1, 2, 4, 5, 7, 8, 16]), chance.randint(1, 16), chance.choice([16, 132])
    longest = group * chance.randint(1, 512)
    tiles, traffic = chance.randint(1, 256), chance.uniform(0.0, 20.0)
    others = [[chance.randint(0, longest) for _ in range(tiles - 1)] for _ in range(heads)]
    work = heads * longest + sum(map(sum, others))

    def bound(n):
        shares = [many / group for many in schedule.part_sizes(group, n)]
        spans = [size * share for of_head in others for size in of_head for share in shares]
        worst = schedule.makespan([*spans, *[longest * share for share in shares] * heads], ctas, 0.0)
        cost = 0.0 if n == 1 else schedule.LAUNCH + heads * n * traffic
        predicted = work / ctas + longest * max(shares) + cost
        assert worst <= predicted - cost + 1e-6
        return predicted

    found = schedule.list_parts_of(heads, group, work, longest, ctas, traffic)
    choices = [n for n in (1, 2, 4, 8) if n <= group]
    assert found in choices and bound(found) <= schedule.NEAR * min(map(bound, choices))


@pytest.mark.parametrize(("tiles", "section", "rows"), [(1, 1, 5), (7, 1, 1), (7, 2, 5), (256, 1, 32), (3, 9, 4)])
def test_tiles_of_lists_are_taken_once_the_first_keys_first(tiles, section, rows):
    found = [schedule.list_tile(number, tiles, section, rows) for number in range(tiles * rows)]
    assert sorted(found) == [(tile, head) for tile in range(tiles) for head in range(rows)]
    assert all(tile == 0 for tile, _ in found[:rows])


def test_head_dims_that_differ_have_hopper_kernels():
    q, k, v = (torch.empty(1, 4, 256, d, dtype=torch.bfloat16) for d in (192, 192, 128))
    for gradient in (False, True):
        told = str(tilesmith.explain("attention", q, k, v, Mask(causal=True), arch="sm90", gradient=gradient))
        assert "-> hopper" in told and "made of 128 and 64" in told


def test_head_dims_above_256_have_tiles_of_64_queries():
    for s in _shapes(300, 9):
        if s.packed or s.lists or s.dropout:
            continue
        (step,) = forward(s._replace(dim=512, value_dim=264)).steps
        assert step.kernel == "attention_fwd_wide_kernel" and step.shared_memory <= SM90.shared_memory
        assert step.ctas == min(SM90.sms, s.rows * step.numbers["blocks"]) and step.numbers["blocks"] == -(
            -s.tokens // 64
        )
        assert {name: step.tensors[f"{name}_desc"].columns for name in "qkv"} == {"q": 256, "k": 128, "v": 256}


def test_gradients_above_256_are_products_of_p_and_ds_in_memory():
    """Each tile of queries of each head is in one band, in an order in which dk and dv of a kv head are added."""
    divided = Counter()
    for s in _shapes(300, 10):
        if s.packed or s.lists or s.dropout:
            continue
        s = s._replace(dim=512, value_dim=264, gradients_fp32=False)
        plan = backward(s)
        launched = [step.kernel for step in plan.steps if step.kernel.startswith("attention_band")]
        assert launched == ["attention_band_scores_kernel", "attention_band_products_kernel"] * (len(launched) // 2)
        assert all(step.shared_memory <= SM90.shared_memory for step in plan.steps) and plan.ordered
        met, several = [], plan.steps[2].tensors["sums_ptr"] is not None
        divided[several] += 1
        for step in plan.steps[2::2]:
            if step.kernel == "attention_band_products_kernel":
                n = step.numbers
                rows, members, tiles = (
                    range(n[f"first_{name}"], n[f"first_{name}"] + n[many])
                    for name, many in (("row", "rows"), ("member", "members"), ("tile", "band_tiles"))
                )
                assert len(rows) == 1 or not several
                met += itertools.product(rows, members, tiles)
        tiles = -(-(s.tokens - plan.numbers["q_begin"]) // 128)
        assert sorted(met) == list(itertools.product(range(s.batch * s.kv_heads), range(s.group), range(tiles)))
    assert len(divided) == 2


def test_the_workspace_of_gradients_above_256_grows_with_the_tokens():
    for tokens in (512, 4096, 16384, 131072):
        s = Shape(1, 16, 4, tokens, tokens, 512, 512, 2, 2, True, -1, 0)
        own, of = 2 * (16 + 4) * tokens * (512 + 512) * 2, extent(s, 0, 0)
        assert workspace(s) == max(WORKSPACE[0], min(own, max(WORKSPACE[1], own // 8)))
        for band in bands(s, of, workspace(s)):
            assert band.rows * band.members * band.tiles * 128 * tokens * 4 <= workspace(s)


@needs_triton
def test_explain_names_the_bands_of_gradients_above_256():
    q, k = (torch.empty(1, heads, 16384, 512, dtype=torch.bfloat16, device="meta") for heads in (16, 8))
    told = str(tilesmith.explain("attention", q, k, k, Mask(causal=True), arch="sm90", gradient=True))
    assert told.startswith("attention_vjp -> hopper") and "added in fp32" in told
    assert "2. attention_band_scores_kernel on 132 CTAs" in told and "32 times in turn" in told
    assert "4. " not in told


@pytest.mark.parametrize(
    ("dims", "given", "reason"),
    [
        ((512, 128), {}, "both from 264 to 512"),
        ((520, 520), {}, "the head dims are 520 and 520"),
        ((512, 512), {"dropout_p": 0.1}, "nothing is dropped"),
        ((512, 512), {"cu_seqlens_q": (0, 9, 640)}, "no packed documents"),
    ],
)
def test_other_calls_above_256_are_refused_in_words(dims, given, reason):
    q, k, v = (torch.empty(1, 2, 640, d, dtype=torch.bfloat16) for d in (dims[0], *dims))
    if "cu_seqlens_q" in given:
        lengths = torch.tensor(given["cu_seqlens_q"], dtype=torch.int32)
        given = {"cu_seqlens_q": lengths, "cu_seqlens_k": lengths}
    told = str(tilesmith.explain("attention", q, k, v, **given, arch="sm90"))
    assert "-> hopper" not in told
    assert reason in next(line for line in told.splitlines() if line.startswith("  not hopper:"))


@pytest.mark.parametrize("dim", [64, 128, 192, 256])
def test_parts_of_groups_are_kv_heads_with_tiles_of_their_own(dim):
    divided, uneven = Counter(), Counter()
    for s in _shapes(300, dim):
        s = s._replace(dim=dim, value_dim=128 if dim == 192 else dim, dropout=False)
        plain, plan = backward(s, group_parts=1), backward(s)
        main = next((step for step in plan.steps if "dkv" in step.kernel), None)
        parts = 1 if main is None else main.constants.get("GROUP_PARTS", 1)
        divided[parts > 1] += 1
        if parts == 1:
            assert plan == plain
            continue
        assert s.causal or s.window_right >= 0 or s.lists
        sizes = schedule.part_sizes(s.group, parts)
        assert main.constants["GROUP"] == sizes[0] and sum(sizes) == s.group
        assert main.constants.get("GROUP_SHORT", 0) == sizes.count(sizes[0] - 1)
        uneven[len(set(sizes)) > 1] += 1
        assert main.numbers["kv_heads"] == s.kv_heads * parts and main.numbers["rows"] == s.batch * s.kv_heads * parts
        for name in ("dk", "dv"):
            assert main.tensors[f"{name}_desc"].of == f"{name}_parts" and main.tensors[f"{name[1]}_desc"].of == name[1]
        sums = plan.step("attention_group_sum_kernel")
        assert sums.numbers["kv_heads"] == s.kv_heads and sums.grid[1] == s.batch * s.kv_heads
        before, after = (p.step("attention_dq_wide_kernel") for p in (plain, plan))
        assert before is after is None or before.numbers == after.numbers  # dq is of query heads
    assert divided[True] > 10 and divided[False] > 10 and uneven[True] > 3 and uneven[False] > 3


def test_a_group_is_divided_where_its_longest_tile_would_run_alone():
    parts = lambda *shape: schedule.group_parts_of(*shape)  # noqa: E731
    steps = tuple(range(18, 0, -2))  # of 9 tiles of keys under a causal mask
    assert parts(6, 16, steps, 132, 0.0) in (4, 8, 16) and parts(6, 1, steps, 132, 0.0) == 1
    assert parts(6, 16, steps, 132, 30.0) == 1, "where adding costs more than it spares"
    assert parts(2000, 16, steps, 132, 0.0) == 1, "where there are many tiles"
    assert 1 < parts(2000, 64, steps, 132, 0.01, 3.0) < 64, "and whose tiles drift apart"
    assert any(7 % parts(heads, 7, steps, 132, 0.01) for heads in range(1, 60)), "a prime has uneven parts"


@pytest.mark.parametrize(
    ("batch", "tokens", "heads", "kv_heads", "us"),
    [
        (1, 6256, 32, 2, {1: 2937, 2: 1597, 3: 1492, 4: 1364, 6: 1367, 8: 1315, 16: 1317}),
        (1, 12000, 32, 2, {1: 6692, 2: 5246, 4: 4701, 8: 4660, 16: 4785}),
        (1, 4096, 28, 4, {1: 886, 2: 563, 3: 559, 4: 528, 7: 573}),
        (1, 2000, 28, 4, {2: 288, 3: 233, 4: 176, 7: 185}),
        (2, 4096, 28, 4, {1: 970, 2: 1057, 4: 1012, 7: 1027}),
        (1, 11000, 28, 4, {1: 3595, 2: 3520, 3: 3377, 4: 3283, 7: 3394}),
        (1, 6256, 32, 8, {1: 1356, 2: 1322, 4: 1320}),
    ],
)  # fmt: skip
def test_parts_of_a_group_are_near_the_best_that_were_measured(batch, tokens, heads, kv_heads, us):
    """us: gradients by parts on an H200, causal, head dim 128 (`docs/log/hopper-attention.md`)."""
    shape = Shape(batch, heads, kv_heads, tokens, tokens, 128, 128, 2, 2, causal=True, window_right=0)
    main = backward(shape, group_parts=0).step("attention_dkv_kernel")
    assert us[main.constants.get("GROUP_PARTS", 1)] <= 1.03 * min(us.values())


def test_a_prime_group_is_divided_as_its_neighbours_are():
    """Falcon-7B: 71 query heads on one kv head, of which one tile of keys walks all or, before, one."""
    plans = {
        heads: backward(Shape(17, heads, 1, 1656, 1656, 64, 64, 2, 2, causal=True, window_right=0), group_parts=0)
        for heads in (70, 71, 72)
    }
    steps = {heads: plan.step("attention_dkv_kernel").constants for heads, plan in plans.items()}
    assert all(5 <= constants["GROUP_PARTS"] <= 12 for constants in steps.values())
    prime = steps[71]
    assert prime["GROUP"] * prime["GROUP_PARTS"] - prime.get("GROUP_SHORT", 0) == 71
    keys = schedule.key_steps(1656, 1656, 128, 128, 0, 0, None, 0)
    times = {}
    for parts in (1, prime["GROUP_PARTS"], 71):
        members, rows = schedule.part_sizes(71, parts), 17 * parts
        section = schedule.section_of(10, rows, tuple(keys), 132, members)
        times[parts] = schedule.makespan(schedule.in_sections(keys, rows, section, members), 132, schedule.TILE)
    assert min(times, key=times.__getitem__) == prime["GROUP_PARTS"]


@pytest.mark.parametrize(("group", "measured"), [(8, 591 / 502), (4, 591 / 574)])
def test_heads_one_after_another_leave_the_cache_as_was_measured(group, measured):
    """2 x 4096 causal tokens of 64/8 and 32/8 heads of 128, TFLOP/s woven and not, on an H200 (60 MiB of L2)."""
    steps = schedule.key_steps(4096, 4096, 64, 128, 0, 0, None, 0)
    kept = 60 * 2**20 / (132 * 64 * 128 * 8)
    share = partial(schedule.read_share, 4, steps, 132)
    assert share((group,), kept) / share((group,)) == pytest.approx(measured, rel=0.04)
    assert share((1,), kept) == share((1,)) == share((group,), 1e9)
    assert share((group,), kept) <= share((2 * group,), kept) <= 1 + schedule.READ


@pytest.mark.parametrize("group", [1, 2, 3, 5, 7, 8, 12, 71])
def test_device_walks_meet_each_query_head_once(group, monkeypatch, needs_triton):
    """The arithmetic of the device, run on integers: heads of parts, and steps that meet a block of all heads first."""
    from tilesmith.ops.attn.hopper import backward_walk

    def where(condition, yes, no):
        return yes if condition else no

    monkeypatch.setattr(backward_walk, "gl", SimpleNamespace(maximum=max, where=where, to_tensor=int))
    kv_heads, blocks = 3, 4
    for parts in range(1, group + 1):
        sizes = schedule.part_sizes(group, parts)
        largest, short = sizes[0], sizes.count(sizes[0] - 1) if sizes[0] > 1 else 0
        form = largest, parts, short
        rows = range(kv_heads * parts + 1)
        first = [backward_walk.first_head.fn(row, *form) for row in rows]
        members = [backward_walk.members_of.fn(row, *form) for row in rows[:-1]]
        assert tuple(members) == sizes * kv_heads and first == [0, *itertools.accumulate(members)]
        for many in members[:parts]:
            steps = [backward_walk.woven_step.fn(i, many, largest, short) for i in range(blocks * many)]
            assert steps == [(block, head) for block in range(blocks) for head in range(many)]


@pytest.mark.parametrize(("parts", "begin", "dims"), [(2, 0, (64, 64)), (7, 5, (40, 64)), (3, 17, (128, 72))])
def test_parts_of_groups_are_added(parts, begin, dims, needs_triton):
    from tilesmith.engine import cdiv, launch
    from tilesmith.ops.attn.hopper.group_sum import attention_group_sum_kernel

    batch, kv_heads, keys = 2, 3, 37
    made = [torch.randn(batch, kv_heads, parts, keys, dim, device=DEVICE).bfloat16() for dim in dims]
    # gradients have the strides of keys and values, here [batch, keys, heads, dim]
    outs = [torch.zeros(batch, keys, kv_heads, dim, device=DEVICE).bfloat16().transpose(1, 2) for dim in dims]
    launch(
        attention_group_sum_kernel, (cdiv(keys - begin, 16), batch * kv_heads, 2),
        *made, *outs, *(out.stride() for out in outs), begin, keys, kv_heads,
        GROUP_PARTS=parts, DIM=dims[0], VALUE_DIM=dims[1], D=128, ROWS=16, num_warps=4,
    )  # fmt: skip
    for out, given in zip(outs, made):
        wanted = given[:, :, 0].float()
        for part in range(1, parts):
            wanted += given[:, :, part].float()
        torch.testing.assert_close(out[:, :, begin:], wanted.bfloat16()[:, :, begin:])
        assert not out[:, :, :begin].any()


@pytest.mark.parametrize(
    ("tokens", "consumers", "block_n", "heads"),
    [(800, 2, 64, 1), (800, 3, 128, 1), (2600, 4, 64, 1), (64, 3, 128, 1), (520, 2, 64, 7), (1000, 2, 128, 4),
     (600, 4, 64, 8), (901, 3, 128, 3), (512, 2, 128, 1), (512, 3, 128, 1)],
)  # fmt: skip
def test_tiles_under_a_causal_mask_are_counted_where_they_lie(
    tokens, consumers, block_n, heads, monkeypatch, needs_triton
):
    from tilesmith.ops.attn.hopper import walk

    monkeypatch.setattr(walk, "gl", SimpleNamespace(maximum=max))
    positions = 64 // heads
    block_m = positions * consumers
    blocks = -(-tokens // block_m)
    whole = SimpleNamespace(
        HEADS=heads, RIGHT=True, LEFT=False, PACKED=False, LIST_K=0, CONSUMERS=consumers, BM=block_m, blocks=blocks,
        tokens=tokens,
    )  # fmt: skip
    starts = [walk.Walk.placed.fn(whole, tile * block_m, 0, tokens)[0] for tile in range(blocks)]
    assert (starts[0] == 0 and tokens - positions < starts[-1] + block_m < tokens + positions) or blocks == 1
    skip, half = block_n * heads <= 64 * (consumers - 1), heads == 1 and tokens == 512
    wanted = []
    for start in starts:
        ends = [min(start + positions * (c + 1), tokens) for c in range(consumers)]
        made = [float(-(-(end if skip else ends[-1]) // block_n)) for end in ends]
        halved = [half and (end - 1) % block_n < 64 and (c == 0 or consumers == 3) for c, end in enumerate(ends)]
        wanted.append((max(made) + sum(made) / consumers) / 2 - sum(halved) / 2 / consumers)
    assert schedule.placed_steps(tokens, tokens, consumers, positions, block_n, 0, skip, half) == pytest.approx(wanted)


@pytest.mark.parametrize(
    ("batch", "tokens", "heads", "kv_heads", "dim", "tile", "together", "us"),
    [
        (14, 800, 71, 1, 64, (128, 64), 1, 301.0), (5, 952, 9, 3, 64, (128, 64), 1, 26.6),
        (68, 344, 25, 25, 64, (128, 64), 1, 146.8), (4, 900, 9, 3, 64, (128, 64), 3, 21.8),
        (8, 600, 64, 8, 64, (256, 64), 8, 85.5), (8, 600, 64, 8, 64, (256, 64), 1, 110.0),
        (1, 2048, 32, 8, 64, (128, 128), 1, 49.3), (7, 616, 25, 25, 64, (192, 64), 1, 50.5),
        (2, 520, 28, 4, 128, (128, 64), 7, 18.9), (2, 520, 28, 4, 128, (128, 64), 1, 21.3),
        (8, 2000, 32, 8, 128, (128, 128), 4, 447.9), (2, 1500, 40, 8, 128, (128, 128), 1, 94.1),
        (4, 900, 24, 4, 256, (128, 64), 3, 87.5), (2, 600, 8, 4, 256, (64, 64), 1, 17.9),
    ],
)  # fmt: skip
def test_forwards_take_what_was_predicted(batch, tokens, heads, kv_heads, dim, tile, together, us):
    """Causal, as measured on an H200, in tiles that hold the queries of so many heads."""
    s = Shape(batch, heads, kv_heads, tokens, tokens, dim, dim, 2, 2, causal=True, window_right=0)
    tiles = next(t for t in FORWARD_TILES[dim] if (64 * t.consumers, t.block_n) == tile)
    times = planned_forward._head_times(s, tiles, FORWARD_TILES[dim][tiles], window_of(s), dim, SM90)
    assert times[together] == pytest.approx(us, rel=0.05)


@pytest.mark.parametrize(
    ("batch", "tokens", "heads", "tile", "us", "other", "longer"),
    [
        (4, 336, 12, (192, 64), 13.7, (128, 64), 17.1), (5, 472, 16, (192, 128), 23.8, (128, 64), 25.3),
        (3, 577, 16, (128, 128), 22.0, (128, 64), 23.4), (1, 1500, 20, (256, 64), 35.5, (192, 128), 45.0),
        (2, 264, 16, (128, 64), 11.5, (192, 128), 13.9), (2, 768, 12, (192, 128), 17.5, (256, 64), 22.4),
    ],
)  # fmt: skip
def test_short_forwards_without_a_mask_have_the_tiles_that_fill_the_device(
    batch, tokens, heads, tile, us, other, longer
):
    """As measured on an H200: a second round of a few tiles takes as long as one of many."""
    s = Shape(batch, heads, heads, tokens, tokens, 64, 64, 2, 2)
    assert forward(s).tile == tile
    for found, time in ((tile, us), (other, longer)):
        tiles = next(t for t in FORWARD_TILES[64] if (64 * t.consumers, t.block_n) == found)
        times = planned_forward._head_times(s, tiles, FORWARD_TILES[64][tiles], window_of(s), 64, SM90)
        assert times[1] == pytest.approx(time, rel=0.06)


@pytest.mark.parametrize(
    ("batch", "tokens", "heads", "kv_heads", "dim", "tile", "together"),
    [
        (2, 520, 28, 4, 128, (128, 64), 7), (2, 700, 32, 8, 128, (128, 64), 4), (8, 600, 64, 8, 64, (256, 64), 8),
        (4, 900, 9, 3, 64, (128, 64), 3), (4, 900, 24, 4, 256, (128, 64), 3),
        (1, 1024, 32, 8, 128, (128, 128), 1),  # half blocks on the diagonal spare more
        (2, 1500, 40, 8, 128, (128, 128), 1),  # of 5 heads a square of 64 rows has 60
        (2, 4096, 32, 8, 128, (128, 128), 1), (3, 450, 12, 2, 128, (128, 64), 1), (2, 520, 28, 28, 128, (128, 64), 1),
    ],
)  # fmt: skip
def test_tiles_hold_several_heads_where_that_is_predicted_to_be_faster(
    batch, tokens, heads, kv_heads, dim, tile, together
):
    s = Shape(batch, heads, kv_heads, tokens, tokens, dim, dim, 2, 2, causal=True, window_right=0)
    plan = forward(s)
    assert (plan.tile, _heads(plan)) == (tile, together)
    if together > 1:
        assert f"of each of {together} heads that share keys, since the predicted µs" in str(plan)
        assert not plan.split and not plan.step("attention_fwd_kernel").constants["ONE_MASK"]
    for fields in ({"documents": 3, "batch": 1}, {"dropout": True}, {"out_fp32": True}):
        if dim < 256 or "dropout" not in fields:
            assert _heads(forward(s._replace(**fields))) == 1


def test_every_tile_has_one_number():
    r = random.Random(2)
    for _ in range(300):
        blocks, rows = r.randint(1, 40), r.randint(1, 24)
        section = r.randint(1, rows)
        found = {schedule.numbered(number, blocks, section, rows) for number in range(blocks * rows)}
        assert found == {(block, head) for block in range(blocks) for head in range(rows)}


def test_sections_leave_no_tile_alone_at_the_end():
    r = random.Random(4)
    grown = 0
    for _ in range(200):
        tiles, heads, least = r.randint(1, 60), r.randint(1, 40), r.randint(1, 8)
        members = schedule.part_sizes(r.randint(1, 8) + 2, r.randint(1, 3))
        steps = tuple(sorted((r.randint(1, 300) for _ in range(tiles)), reverse=True))
        section = schedule.section_of(least, heads, steps, 132, members)
        assert min(least, heads) <= section <= heads
        order = [schedule.numbered(n, tiles, section, heads) for n in range(tiles * heads)]
        order = [steps[tile] * members[head % len(members)] for tile, head in order]
        assert order == list(schedule.in_sections(steps, heads, section, members))
        spans = [
            schedule.makespan(schedule.in_sections(steps, heads, width, members), 132, schedule.TILE)
            for width in (min(least, heads), section)
        ]
        assert spans[1] <= spans[0]
        grown += section > min(least, heads)
    assert grown > 20


@pytest.mark.parametrize(
    ("batch", "tokens", "heads", "kv_heads", "least"),
    [
        (3, 1112, 32, 2, 0.85),
        (1, 11000, 28, 4, 0.95),
        (2, 3000, 24, 8, 0.9),
        (1, 12784, 32, 8, 0.95),
        (4, 4096, 32, 8, 0.98),
    ],
)
def test_causal_gradients_keep_the_device_busy(batch, tokens, heads, kv_heads, least):
    """Heads of GLM-4-9B, Qwen2.5-7B, Llama-3.2-3B and Llama-3 8B, whose groups leave long tiles."""
    plan = backward(Shape(batch, heads, kv_heads, tokens, tokens, 128, 128, 2, 2, causal=True, window_right=0))
    section = next(n for n in (step.numbers.get("section") for step in plan.steps) if n)
    parts = plan.step("attention_dkv_kernel").constants.get("GROUP_PARTS", 1)
    members, rows = schedule.part_sizes(heads // kv_heads, parts), batch * kv_heads * parts
    order = list(
        schedule.in_sections(schedule.key_steps(tokens, tokens, 64, 128, 0, 0, None, 0), rows, section, members)
    )
    ideal = sum(n + schedule.TILE for n in order) / SM90.sms
    assert ideal / schedule.makespan(order, SM90.sms, schedule.TILE) >= least


def test_stream_k_gives_each_step_to_one_cta():
    met = 0
    for s in _shapes(4000, 3):
        plan = forward(s)
        step = plan.step("attention_fwd_stream_k_kernel")
        if step is None:
            continue
        met += 1
        ctas, undivided = step.ctas, step.numbers["whole_tiles"]
        tiles = step.numbers["blocks"] * step.numbers["rows"] - undivided
        steps = [math.ceil(s.keys / plan.tile[1])] * tiles
        if step.constants["RIGHT"]:
            each = schedule.seen_steps(s.tokens, s.keys, *plan.tile, None, step.numbers["right"])
            steps = each * (tiles // len(each))
        total = sum(steps)
        bounds = [schedule.run_bounds(cta, ctas, total) for cta in range(ctas)]
        assert bounds[0][0] == 0 and bounds[-1][1] == total
        assert all(end == begin for (_, end), (begin, _) in itertools.pairwise(bounds))
        assert max(end - begin for begin, end in bounds) < max(steps)  # else nothing is spared
        whole = plan.step("attention_fwd_kernel")
        assert undivided == 0 if whole is None else undivided % whole.ctas == 0
    assert met > 50


def test_the_order_of_a_deterministic_backward_cannot_deadlock():
    """Each addition waits for a tile with a smaller number. So the smallest number that is not done never waits, and
    however few CTAs run at a time, all come to an end."""
    ways = Counter()
    for s in _shapes(3000, 4):
        if not s.deterministic or s.packed or s.lists or s.dim > 128 or s.window_left >= 0:
            continue
        step = backward(s).step("attention_dkv_kernel")
        n, c = step.numbers, step.constants
        tiles, blocks, rows, section = n["k_blocks"], n["q_blocks"], n["rows"], n["section"]
        if tiles * rows * blocks > 8000:
            continue
        ways[c["RING"], c["RIGHT"]] += 1
        first = [0] * tiles
        if c["RIGHT"]:
            behind = s.keys - s.tokens + n["right"] + n["q_begin"]
            first = [min(max(128 * tile - behind, 0) // c["BQ"], blocks - 1) for tile in range(tiles)]
        done, sums = set(), Counter()
        for number in range(tiles * rows):
            tile = schedule.key_tile(number, tiles, section, rows)
            for block, which, after in schedule.additions(tile, tiles, blocks, first, c["RING"]):
                assert after is None or (tile.head, after, block, which) in done
                if after is None:
                    sums[tile.head, block, which] += 1
                done.add((tile.head, tile.place, block, which))
        assert set(sums.values()) == {1}, "one tile is the first to add to each sum, and all others wait for one"
        met = Counter((head, block) for head, _, block, _ in done)
        assert all(met[head, b] == sum(f <= b for f in first) for head in range(rows) for b in range(blocks))
    assert len(ways) == 3


def _cost(tiles, blocks, traffic):
    return min(schedule.split_cost(tiles, blocks, 132, traffic, n) for n in range(1, min(128, blocks) + 1))


def test_predicted_times_grow_with_the_work():
    r = random.Random(5)
    for _ in range(300):
        tiles, blocks, traffic = r.randint(1, 300), r.randint(1, 200), r.random() * 4
        cost = _cost(tiles, blocks, traffic)
        assert cost <= _cost(tiles + 132, blocks, traffic) and cost <= _cost(tiles, blocks + 128, traffic)
        steps = [r.randint(1, 32) for _ in range(tiles)]
        assert schedule.makespan(steps, 132) <= schedule.makespan([n + 1 for n in steps], 132)
        assert schedule.even_makespan(tiles, blocks, 132) <= schedule.even_makespan(tiles + 1, blocks, 132)


def test_the_plans_of_benched_rows_are_the_golden_ones():
    wanted = GOLDEN.read_text()
    assert golden() == wanted, "a plan changed; if it should: PYTHONPATH=src:tests python -m plan_calls"
    assert len(benched()) > 80


@pytest.mark.parametrize(
    ("batch", "heads", "tokens", "keys", "right", "wanted"),
    [
        (4, 16, 4096, 4096, None, (1980, 132)),  # 15 rounds, and 68 tiles
        (1, 1, 20, 4096, None, (0, 4)),
        (1, 5, 4096, 4096, None, (132, 112)),  # a round, and 28 tiles of 4 runs each
        (1, 3, 2048, 2048, None, (0, 96)),  # 2 runs each, with no rounds before them
        (1, 4, 1024, 1024, None, (32, 0)),  # spares too little
        (1, 132, 256, 4096, None, (264, 0)),  # come out even
        (8, 16, 2048, 2048, None, (2048, 0)),  # spares less than it costs
        (1, 2, 131_072, 131_072, None, (2048, 0)),  # keys do not stay in the L2 cache
        (1, 4, 4096, 4096, 0, (0, 132)),  # 32 tiles a head of 1 to 32 blocks
        (1, 4, 2048, 2048, 0, (64, 0)),
        (1, 5, 4096, 4096, 0, (160, 0)),  # the counter evens these out
        (1, 64, 256, 131_072, 0, (128, 0)),
    ],
)
def test_tiles_are_divided_where_that_spares_more_than_it_costs(batch, heads, tokens, keys, right, wanted):
    s = Shape(batch, heads, heads, tokens, keys, 128, 128, 2, 2)
    assert divided(s, -(-tokens // 128) * batch * heads, 128, 128, right, SM90)[:2] == wanted


@pytest.mark.parametrize(
    ("batch", "heads", "kv_heads", "tokens", "keys", "wanted"),
    [
        (1, 16, 16, 2048, 2048, True),
        (2, 16, 16, 8192, 8192, True),
        (1, 32, 8, 16_384, 16_384, True),
        (64, 16, 16, 1024, 1024, False),  # as many blocks of dq as would be spared
        (8, 16, 16, 2048, 2048, False),
        (1, 4, 4, 8192, 2048, False),  # four times the queries and dq in the L2 cache at a time
    ],
)
def test_ordered_tiles_start_apart_where_that_spares_more_than_it_costs(batch, heads, kv_heads, tokens, keys, wanted):
    s = Shape(batch, heads, kv_heads, tokens, keys, 128, 128, 2, 2, deterministic=True)
    section = kv_heads_together(s, keys // 128, SM90, True, False)
    assert rings(s, tokens // 64, keys // 128, section, SM90) == wanted


@needs_triton
def test_explain_prints_the_plan_of_a_gpu_that_is_not_here():
    q = torch.empty(4, 16, 4096, 128, dtype=torch.bfloat16, device="meta")
    told = str(tilesmith.explain("attention", q, q, q, arch="sm90"))
    assert "1980 tiles in whole rounds, 68 tiles in 132 equal runs of blocks of keys (stream-K)" in told
    assert "1. attention_fwd_kernel on 132 CTAs" in told and "2. attention_fwd_stream_k_kernel on 132 CTAs" in told
    asked = {"arch": "sm90", "gradient": True, "deterministic": True}
    told = str(tilesmith.explain("attention", q, q, q, Mask(causal=True), **asked))
    assert told.startswith("attention_vjp -> hopper") and "2. attention_dkv_kernel" in told and "ORDERED" in told
    token, cache = (torch.empty(1, h, t, 128, dtype=torch.bfloat16) for h, t in ((64, 1), (8, 8192)))
    assert "attention_cluster_kernel" in str(tilesmith.explain("attention", token, cache, cache, arch="sm90"))
    assert "_attention_split_kernel" in str(tilesmith.explain("attention", token, cache, cache, arch="sm80"))
    assert "not triton: apple; Triton kernels need a GPU" in str(
        tilesmith.explain("attention", token, cache, cache, arch="apple")
    )
    with pytest.raises(ValueError, match="arch is 'sm1', which is unknown"):
        tilesmith.explain("attention", q, q, q, arch="sm1")


@pytest.fixture
def on_sm90(monkeypatch):
    """attention's launchers as on a Hopper GPU, with tensors without memory: what they launch and allocate."""
    from tilesmith.device import counters
    from tilesmith.ops.attn import execute
    from tilesmith.ops.attn.hopper import launch_backward, launch_cluster, launch_decode, launch_forward
    from tilesmith.ops.attn.triton import launch_backward as triton_backward
    from tilesmith.ops.attn.triton import launch_forward as triton_forward

    seen = {"kernels": [], "bytes": 0, "plans": []}
    empty, run = torch.empty, execute.execute
    for module in (launch_forward, launch_backward, launch_decode, launch_cluster, triton_forward, triton_backward):
        monkeypatch.setattr(module, "arch_of", lambda device: SM90)
        monkeypatch.setattr(module, "execute", lambda plan, *rest: (seen["plans"].append(plan), run(plan, *rest)))
    monkeypatch.setattr(counters, "_counter", lambda device, numbers: empty(numbers, dtype=torch.int32, device=device))

    def counted(*args, **kwargs):
        made = empty(*args, **kwargs)
        seen["bytes"] += made.numel() * made.element_size()
        return made

    class Torch:
        empty, float32, int32 = staticmethod(counted), torch.float32, torch.int32

    monkeypatch.setattr(execute, "torch", Torch)
    monkeypatch.setattr(execute, "launch", lambda kernel, grid, **named: seen["kernels"].append(kernel.fn.__name__))
    return seen


def _call(s: Shape, device="meta"):
    q, k = (torch.empty(s.batch, h, t, s.dim, dtype=torch.bfloat16, device=device)
            for h, t in ((s.heads, s.tokens), (s.kv_heads, s.keys)))  # fmt: skip
    return attention_op.bind((q, k, k), {
        "causal": s.causal, "window_left": s.window_left, "window_right": -1 if s.causal else s.window_right,
        "softcap": 9.0 if s.softcap else 0.0, "deterministic": s.deterministic,
    })  # fmt: skip


@needs_triton
def test_launchers_launch_and_allocate_what_the_plan_says(on_sm90):
    for s in _shapes(120, 6):
        if s.packed or s.lists or s.dropout:
            continue
        args = _call(s)
        full = dict(zip(attention_op.parameters, args))
        q = full["q"]
        full |= {"out": q, "dout": q, "dlse": None, "lse": q.new_empty(q.shape[:3], dtype=torch.float32)}
        full["output_mask"] = (True, True, True, False, False)
        back = attention_vjp.bind((), full)
        for op, given in ((attention_op, args), (attention_vjp, back)):
            for backend in ("hopper", "triton", *(["hopper_split"] if op is attention_op else [])):
                kernel = op.kernel(backend)
                kernel.fn.configure.forget()
                kernel.fn.configure.arch = SM90
                on_sm90.update(kernels=[], bytes=0, plans=[])
                try:
                    kernel.fn(*given)
                finally:
                    kernel.fn.configure.arch = None
                    kernel.fn.configure.forget()
                (plan,) = on_sm90["plans"]
                assert [step.kernel for step in plan.steps] == on_sm90["kernels"]
                assert plan.scratch_bytes == on_sm90["bytes"], plan


def _square(batch, tokens, heads, dim, causal):
    return Shape(batch, heads, heads, tokens, tokens, dim, dim, 2, 2, causal, -1, 0 if causal else -1)


def test_tiles_up_to_96_columns_follow_from_predicted_times():
    def tile(*sizes):
        return forward(_square(*sizes)).tile

    assert tile(7, 312, 12, 64, False) == (128, 64)  # BERT-base
    assert tile(68, 344, 25, 64, True) == (128, 128)  # GPT-2 XL, whose tiles have one mask
    assert tile(44, 416, 16, 64, False) == (256, 64)
    assert tile(35, 776, 20, 64, False) == tile(4, 4096, 32, 64, True) == (192, 128)  # Whisper's encoder
    assert tile(16, 729, 16, 72, False) == (192, 128)  # SigLIP
    assert tile(32, 257, 16, 80, False) == tile(16, 257, 16, 88, False) == tile(1, 12280, 32, 96, True) == (192, 96)
    assert tile(21, 312, 32, 80, True) == (128, 64)
    assert tile(1, 1696, 16, 72, False) == tile(2, 2048, 32, 96, True) == (128, 128)


@pytest.mark.parametrize(
    ("batch", "tokens", "heads", "causal", "block_n", "us"),
    [
        (4, 552, 16, True, 64, 28.9), (2, 296, 64, True, 64, 26.6), (16, 300, 16, True, 64, 43.3),
        (2, 2048, 16, True, 128, 77.5), (4, 1024, 16, False, 128, 70.7), (1, 8192, 16, True, 128, 460.0),
    ],
)  # fmt: skip
def test_tiles_of_192_and_128_columns_follow_from_predicted_times(batch, tokens, heads, causal, block_n, us):
    """Beside measured ones (H200), of which these are the best."""
    plan = forward(_square(batch, tokens, heads, 192, causal)._replace(value_dim=128))
    assert plan.tile == (128, block_n)
    told = next(reason for reason in plan.reasons if reason.startswith("predicted times"))
    assert float(re.search(rf"128 x {block_n} (\d+) µs", told)[1]) == pytest.approx(us, rel=0.04)


def test_few_tiles_of_wide_heads_have_64_queries():
    def consumers(tokens, heads, kv_heads, window=-1, **more):
        s = Shape(1, heads, kv_heads, tokens, tokens, 256, 256, 2, 2, True, window, 0)._replace(**more)
        return forward(s).consumers

    assert consumers(840, 8, 2, 511) == consumers(700, 4, 1, 511) == consumers(1000, 16, 8) == 1
    assert consumers(2048, 8, 2, 511) == consumers(4096, 16, 8) == 2  # tiles of 64 queries are more than SMs
    assert consumers(840, 8, 2, dropout=True) == consumers(840, 8, 2, documents=3) == 2
    assert consumers(840, 8, 2, value_dim=128) == 1 and consumers(840, 8, 2, dim=192, value_dim=128) == 2


def test_predicted_times_of_tiles_count_what_stream_k_spares():
    for dim, tile in ((64, (192, 128)), (80, (128, 128)), (96, (128, 128))):
        plan = forward(_square(1, 4096, 2, dim, False))
        assert plan.tile == tile and [step.kernel for step in plan.steps] == ["attention_fwd_stream_k_kernel"]
    behind = forward(_square(3, 4328, 8, 80, False))
    assert [step.constants.get("Q_STAGES") for step in behind.steps] == [2, None] and behind.split == "stream-K"


@pytest.mark.parametrize("dim", [64, 80, 96])
def test_pinned_consumers_choose_among_the_tiles_that_have_as_many(dim):
    s = _square(2, 1024, 16, dim, True)
    for consumers in (2, 3, 4):
        plan = hopper_forward(s, SM90, HopperConfig(consumers, 0, 2))
        assert plan.stages == 2 and plan.step("attention_fwd_kernel").shared_memory <= SM90.shared_memory
        assert plan.consumers == consumers or (consumers == 4 and dim > 64 and plan.tile == forward(s).tile)


def test_blocks_of_gradients_of_narrow_heads_follow_from_predicted_times():
    def block(batch, tokens, heads, kv_heads, causal):
        s = Shape(batch, heads, kv_heads, tokens, tokens, 64, 64, 2, 2, causal, -1, 0 if causal else -1)
        assert backward(s._replace(deterministic=True)).tile == (128, 128)
        return backward(s).tile[0]

    assert block(7, 312, 12, 12, False) == block(2, 1500, 6, 6, False) == block(6, 944, 15, 5, True) == 64
    assert block(16, 512, 12, 12, False) == block(2, 4096, 16, 16, False) == block(4, 712, 14, 2, True) == 128


def test_kernels_of_wide_gradients_are_chained_but_for_documents():
    s = Shape(2, 8, 2, 336, 336, 256, 256, 2, 2, True, -1, 0)
    packed = s._replace(batch=1, documents=3)
    for given, chained in ((s, True), (s._replace(dim=192, value_dim=128), True), (packed, False)):
        steps = {step.kernel: step.constants for step in backward(given).steps}
        for kernel in ("attention_dkv_wide_kernel", "attention_dq_wide_kernel"):
            assert steps[kernel].get("CHAINED", False) is steps[kernel].get("launch_pdl", False) is chained


def test_the_time_of_many_tiles_is_that_of_the_few_prolonged():
    r = random.Random(7)
    for _ in range(50):
        steps = sorted(r.randint(1, 40) for _ in range(r.randint(1, 30)))
        heads = schedule.MANY * 132 // len(steps)
        few, many = (schedule.tiles_time(steps, n, 132, 10.0, 2.0, 1.0) for n in (heads, heads + 1))
        assert few < many * 1.01 and many < 1.1 * few
    times = [schedule.tiles_time([4, 2, 1], n, 132, 10.0, 2.0, 1.0) for n in range(1, 400)]
    assert times == sorted(times)


def _window(batch, tokens, heads, kv_heads, dim, window, keys=None, **fields):
    s = Shape(batch, heads, kv_heads, tokens, keys or tokens, dim, dim, 2, 2, True, window - 1, 0)
    return s._replace(**fields)


def _heads(plan):
    return plan.step("attention_fwd_kernel").constants.get("HEADS", 1)


@pytest.mark.parametrize("left", [299, -1])
def test_tiles_hold_each_query_of_each_head_once(left):
    """Of as many heads as are asked for, if that many share keys."""
    r, seen = random.Random(9), Counter()
    for _ in range(400):
        group, kv_heads, heads = r.choice((1, 2, 3, 4, 5, 6, 7, 8, 12, 16)), r.choice((1, 2, 5)), r.randint(1, 8)
        tokens, keys, dim = r.randint(1, 3000), r.randint(400, 3000), r.choice((64, 80, 128, 192, 256))
        right = r.choice((0, 0, 30, -1)) if left < 0 else 0
        rows = r.choice((1, 3)), group * kv_heads, kv_heads
        s = Shape(*rows, tokens, keys, dim, dim, 2, 2, right == 0, left, right)
        consumers, block_n = r.choice(((2, 64), (2, 128), (3, 128), (4, 64))) if s.dim == 64 else (2, 64)
        plan = hopper_forward(s, SM90, HopperConfig(consumers, block_n, 2, heads=heads))
        many = math.gcd(heads, group)
        if many == 1 and plan.split:
            continue
        step = plan.step("attention_fwd_kernel")
        assert step.constants.get("HEADS", 1) == many and step.shared_memory <= SM90.shared_memory
        for name, tile in step.tensors.items():
            if name.endswith("_desc") and tile is not None:
                ours = name.startswith(("q", "out"))
                assert (tile.heads, tile.rows) == ((many, 64 // many) if ours else (1, block_n))
        n, positions = step.numbers, 64 // many * consumers
        assert (n["heads"], n["rows"], n["group"]) == (s.heads // many, s.rows // many, group // many)
        assert (n["blocks"] - 1) * positions < tokens <= n["blocks"] * positions and n["section"] >= 1
        packs = (schedule.numbered(i, n["blocks"], n["section"], n["rows"]) for i in range(n["blocks"] * n["rows"]))
        assert set(packs) == set(itertools.product(range(n["blocks"]), range(n["rows"])))
        seen[many] += 1
    assert set(seen) == set(range(1, 9))


def test_heads_share_a_tile_where_that_spares_steps():
    for s in (_window(2, 2592, 8, 1, 256, 512), _window(2, 4096, 8, 4, 256, 1024), _window(2, 4096, 8, 2, 256, 128)):
        found = _heads(forward(s))
        assert found > 1 and f"of each of {found} heads that share keys, since the predicted steps" in str(forward(s))
        alone = hopper_forward(s, SM90, HopperConfig(2, 64, 2, heads=1))
        assert _heads(alone) == 1 and "the queries of 1 heads, the configuration's 1" in str(alone)
    assert _heads(forward(_window(2, 2592, 8, 1, 256, 512))) == 8  # the most of those with the fewest steps
    assert _heads(forward(_window(1, 8192, 32, 8, 128, 4096))) == 1  # as many steps either way
    assert _heads(forward(_window(2, 2592, 7, 1, 256, 512))) == 7
    assert _heads(forward(_window(2, 2592, 8, 8, 256, 512))) == _heads(forward(_window(2, 2592, 11, 1, 256, 512))) == 1


@pytest.mark.parametrize(
    ("fields", "why"),
    [
        ({"documents": 3, "batch": 1}, "documents end inside a tile"),
        ({"dropout": True, "dim": 128, "value_dim": 128}, "dropout draws by the head"),
        ({"out_fp32": True}, "out in fp32 is stored by the head"),
        (
            {"lists": 1, "block_q": 128, "block_k": 128, "dim": 128, "value_dim": 128},
            "block lists name keys by the head",
        ),
    ],
)
def test_other_calls_with_a_window_have_tiles_of_one_head(fields, why):
    s = _window(2, 2592, 8, 1, 256, 512)._replace(**fields)
    plan = hopper_forward(s, SM90, HopperConfig(2, 64, 2, heads=8))
    assert _heads(plan) == 1 and f"a tile holds the queries of one head: {why}" in str(plan)


def test_steps_of_windows_are_those_of_the_busiest_consumer():
    """Counted block by block; with few tiles of keys in flight, consumers that skip wait for each other."""
    r, skipped = random.Random(4), 0
    for _ in range(200):
        tokens, keys, left = r.randint(1, 1500), r.randint(1, 1500), r.randint(0, 700)
        right, consumers, part = r.choice((None, 0, 40)), r.choice((2, 3, 4)), r.choice((8, 16, 32, 64))
        block_n, block_m = 64, consumers * part
        sizes = tokens, keys, block_m, block_n, left, right
        all_blocks = schedule.seen_steps(*sizes)
        assert schedule.window_steps(*sizes, consumers, 2) == all_blocks
        found = schedule.window_steps(*sizes, consumers, 6)
        skips = block_n <= block_m - part
        for tile, steps in enumerate(found):
            begin, counts = max(min(tile * block_m + keys - tokens - left, keys - 1), 0), [1]
            for c in range(consumers):
                met = set()
                for query in range(tile * block_m + c * part, min(tile * block_m + (c + 1) * part, tokens)):
                    at = query + keys - tokens
                    first = max(at - left, 0)
                    end = keys if right is None else min(keys, at + right + 1)
                    if first < end:  # keys in a row are in blocks in a row
                        met.update(range((first - begin) // block_n, (end - 1 - begin) // block_n + 1))
                counts.append(len(met))
            assert steps == (max(counts) if skips else all_blocks[tile]) and steps <= all_blocks[tile]
            skipped += steps < all_blocks[tile]
    assert skipped > 50


@pytest.mark.parametrize("tokens", [1, 3, 4, 16, 64, 500])
@pytest.mark.parametrize("group", [1, 2, 3, 5, 7, 8, 12, 20, 48, 64, 71])
def test_squares_of_a_split_hold_every_row(group, tokens):
    heads, squares = unit_heads(group, tokens), unit_count(group, tokens)
    assert group % heads == 0 and 64 * squares >= group * tokens
    assert squares == (group // heads) * -(-tokens // (64 // heads))
    assert scattered(group, tokens) == (squares > 2 * -(-group * tokens // 64))
    if group & (group - 1) == 0 or tokens >= 64:
        assert not scattered(group, tokens)


def _one_token(batch, kv_heads, keys, dim, **more):
    s = Shape(batch, 4 * kv_heads, kv_heads, 1, keys, dim, dim, 2, 2, causal=True, **more)
    plan = decode(s, replace(SM90, bandwidth=4.8e12))  # an H200
    constants = plan.steps[0].constants
    return constants["BN"], constants["PARTS"], plan.splits, plan


@pytest.mark.parametrize(
    ("batch", "kv_heads", "keys", "dim", "expected"),
    [
        (8, 8, 4096, 128, (128, 2, 1)),  # 64 clusters of 2 run at once
        (17, 4, 1024, 128, (128, 1, 1)),  # one CTA an SM
        (35, 4, 4096, 128, (64, 1, 1)),  # 8 of 140 would be alone: three CTAs an SM
        (64, 8, 4096, 128, (128, 1, 1)),
        (30, 4, 65_536, 64, (128, 1, 1)),
        (35, 4, 65_536, 256, (64, 1, 8)),  # of one CTA an SM, too: 8 would be alone for long
        (35, 4, 256, 256, (64, 1, 1)),  # for so short a time that a second kernel costs more
    ],
)
def test_kv_heads_beyond_clusters_have_ctas_alone(batch, kv_heads, keys, dim, expected):
    *found, plan = _one_token(batch, kv_heads, keys, dim)
    assert tuple(found) == expected
    assert len(plan.steps) == (1 if expected[2] == 1 else 2)
    assert ("CTAs alone" in str(plan)) == (expected[1] == 1)


@pytest.mark.parametrize(("batch", "kv_heads"), [(2, 1), (4, 8), (30, 4), (64, 8), (1000, 8)])
@pytest.mark.parametrize("keys", [64, 1000, 2048, 16_384, 100_000])
@pytest.mark.parametrize("dim", [64, 80, 256])
def test_no_cta_waits_long_for_the_longest_row(batch, kv_heads, keys, dim):
    """Where lengths of rows may differ, a CTA has 2,048 keys at most, but where clusters have few anyway."""
    block, parts, splits, plan = _one_token(batch, kv_heads, keys, dim, lengths=True)
    each = -(-keys // block // (parts * splits)) * block
    if parts > 1:
        assert keys * batch * kv_heads * dim <= 256 * 128 * SM90.sms
    else:
        assert each <= 2048 + block and splits <= max(1, -(-keys // block))
        few = batch * kv_heads * splits < SM90.sms // 2
        assert not few or splits * block > keys - block, plan  # the device is not left idle either


@needs_triton
@pytest.mark.parametrize(
    ("dim", "together", "batch", "keys"),
    [
        (96, False, 9, 4096),
        (96, True, 9, 4096),  # a head's keys lie together
        (128, False, 9, 4096),
        (64, False, 9, 4096),
        (80, False, 9, 4096),
        (80, False, 9, 1024),  # all are read at nearly the same time
        (80, False, 1, 16_384),  # by 16 CTAs a head
        (80, False, 8, 16_384),
    ],
)
def test_keys_that_share_lines_with_another_head_are_read_by_plain_loads(dim, together, batch, keys):
    k = torch.empty(batch, 8, keys, dim, dtype=torch.bfloat16)
    if not together:
        k = k.transpose(1, 2).contiguous().transpose(1, 2)
    q = torch.empty(batch, 32, 1, dim, dtype=torch.bfloat16)
    told = str(tilesmith.explain("attention", q, k, k.clone(), Mask(causal=True), arch="sm90"))
    shares = dim % 64 > 0 and not together and keys * min(132, batch * 8) > 2048 * 132
    assert f"-> {'triton_split' if shares else 'hopper_cluster'}" in told and ("share lines" in told) == shares


@hypothesis.settings(max_examples=300, deadline=None)
@hypothesis.given(st.integers(1, 3000), st.floats(8, 1e6), st.sampled_from([(1, 85.0), (3, 57.0)]))
def test_ctas_alone_are_predicted_no_faster_than_memory(ctas, size, kind):
    """Nor slower than one after another on their SMs; and more of them never take less."""
    tile = CtaTile(64, 2, *kind)
    time = partial(read_time, size=size, tile=tile, sms=132, share=35.0)
    assert ctas * size / (132 * 35) <= time(ctas) <= time(ctas + 1) * (1 + 1e-9)
    assert time(ctas) <= 1.05 * (ctas / 132 + tile.per_sm) * size / 35 + 1.8 * (ctas / 132 + 1)


@pytest.mark.skipif(triton_missing() is not None, reason=str(triton_missing()))
@pytest.mark.parametrize(
    ("heads", "kv_heads", "tokens", "name"),
    [(71, 1, 1, "triton_split"), (28, 4, 16, "triton_split"), (64, 1, 1, "hopper_split"), (32, 4, 16, "hopper_split")],
)
def test_rows_that_squares_would_scatter_are_packed(heads, kv_heads, tokens, name):
    """Falcon's 71 heads on one would be 71 squares of a row each; 7 heads of a group with 16 tokens, 7 of 16 rows."""
    q = torch.empty(9, heads, tokens, 64, dtype=torch.bfloat16)
    k, v = torch.empty(2, 9, kv_heads, 16_384, 64, dtype=torch.bfloat16)
    told = str(tilesmith.explain("attention", q, k, v, Mask(causal=True), arch="sm90"))
    assert f"-> {name}" in told and ("would be more than half empty" in told) == (name == "triton_split")
