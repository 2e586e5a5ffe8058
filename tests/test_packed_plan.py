"""How products of a few rows with a packed weight are divided over a device."""

from types import SimpleNamespace

import pytest

pytest.importorskip("triton")

import torch

from tilesmith.engine.launcher import in_place_of_launches
from tilesmith.hardware.detect import arch_named, assuming
from tilesmith.ops.quant.hopper import packed_linear
from tilesmith.ops.quant.hopper import packed_plan as plan
from tilesmith.ops.quant.hopper.packed_plan import LinearConfig

_BIG, _TALL = (4096, 14_336), (14_336, 4096)
SMS = 132
ARCH = SimpleNamespace(sms=SMS, bandwidth=4.8e12)
WEIGHTS = [(4096, 14_336), (14_336, 4096), (28_672, 8192), (8192, 28_672), (2560, 9728), (1000, 64), (16, 128), (1, 64)]
TOKENS = [2, 5, 8, 9, 16, 24, 33, 64, 128, 200, 1000]


def _clusters(parts, on_one):
    """As on a device whose groups of multiprocessors have 18, 16 or 14."""
    return sum(n * on_one // parts for n in (18, 18, 18, 16, 16, 16, 16, 14))


def _dims(rows, columns, tokens, bits=40):
    return {"tokens": tokens, "strips": -(-rows // 16), "groups": columns // 64, "bits": bits}


@pytest.mark.parametrize("weight", WEIGHTS, ids=lambda s: f"{s[0]}x{s[1]}")
@pytest.mark.parametrize("tokens", TOKENS)
def test_every_form_covers_the_weight_and_fits_a_multiprocessor(weight, tokens):
    dims = _dims(*weight, tokens)
    found = plan.shapes(dims, _clusters)
    assert found or weight[1] > 8192
    for shape, room in found:
        span = plan.room_of(dims["groups"], shape.parts)
        assert span * shape.parts >= dims["groups"] and span % 4 == 0
        assert 1 <= shape.strips <= shape.num_warps and room >= 1
        on_one = plan.per_multiprocessor(shape.rows, span, shape.num_warps, shape.wide)
        assert on_one * plan.smem_of(shape.rows, span, shape.num_warps, shape.wide) <= plan.WHOLE_SMEM
        assert on_one * shape.num_warps * 32 * plan.REGISTERS <= 65_536
        row_blocks = -(-tokens // shape.rows)
        blocks = -(-dims["strips"] // (shape.strips * shape.each)) * row_blocks
        assert blocks <= max(room, row_blocks)  # all at once, unless rows alone are too many
        # the configuration stands for the form
        config = LinearConfig(shape.num_warps, shape.rows, shape.parts, shape.wide)
        assert plan.shape_of(config, dims, _clusters) == shape


@pytest.mark.parametrize(
    ("weight", "tokens", "bits", "shape", "clusters", "us"),
    [
        ((14_336, 4096), 8, 40, (8, 2, 16, 14, 1), 66, 15.7), ((14_336, 4096), 16, 40, (16, 2, 16, 14, 1), 66, 19.2),
        ((14_336, 4096), 32, 40, (32, 2, 16, 14, 1), 66, 26.8), ((14_336, 4096), 64, 40, (32, 2, 16, 14, 2), 66, 48.3),
        ((14_336, 4096), 32, 80, (32, 2, 16, 14, 1), 66, 36.2), ((14_336, 4096), 64, 39, (32, 2, 16, 14, 2), 66, 56.5),
        ((4096, 14_336), 64, 40, (32, 8, 16, 13, 3), 15, 61.7), ((4096, 14_336), 16, 39, (16, 7, 8, 8, 1), 32, 26.7),
        ((3584, 18_944), 16, 40, (16, 8, 16, 15, 1), 15, 24.7), ((4096, 14_336), 128, 40, (16, 7, 8, 8, 8), 32, 128.9),
        ((4096, 14_336), 32, 40, (32, 8, 16, 9, 2), 15, 35.8), ((4096, 14_336), 96, 40, (32, 8, 16, 13, 4), 15, 80.6),
        (_BIG, 16, 40, (16, 7, 8, 8, 1, True), 32, 28.1), (_BIG, 16, 80, (16, 7, 8, 8, 1, True), 32, 34.8),
        (_TALL, 32, 39, (32, 2, 16, 14, 1, True), 66, 30.7), (_BIG, 64, 40, (64, 7, 8, 8, 1, True), 32, 39.8),
        (_TALL, 64, 40, (64, 2, 16, 14, 1, True), 66, 36.5), (_BIG, 128, 40, (64, 7, 8, 8, 2, True), 32, 74.5),
        (_TALL, 128, 40, (128, 1, 8, 7, 1, True), 132, 65.1), (_TALL, 128, 80, (128, 2, 16, 14, 1, True), 66, 57.6),
        (_BIG, 256, 80, (128, 2, 8, 8, 1, True), 66, 121.4),
        ((28_672, 4096), 32, 40, (32, 1, 16, 14, 1, True), 132, 53.6),
    ],
)  # fmt: skip
def test_products_take_what_was_predicted(weight, tokens, bits, shape, clusters, us):
    """As measured on an H200, of which so many clusters run at once."""
    seconds = plan.time_of(plan.RowsShape(*shape), _dims(*weight, tokens, bits), ARCH, clusters)
    assert 1e6 * seconds == pytest.approx(us, rel=0.1)


@pytest.mark.parametrize(("weight", "us"), [((4096, 14_336), 96.9), ((14_336, 4096), 91.2), ((28_672, 4096), 167.5)])
def test_dequantising_takes_what_was_predicted(weight, us):
    assert 1e6 * plan.dequantized_time(_dims(*weight, 32), ARCH) == pytest.approx(us, rel=0.06)


@pytest.mark.parametrize("weight", WEIGHTS[:5], ids=lambda s: f"{s[0]}x{s[1]}")
def test_many_rows_are_multiplied_by_the_dequantised_weight_and_few_are_not(weight):
    assert plan.chosen(_dims(*weight, 4), ARCH, _clusters)[0] is not None
    assert plan.chosen(_dims(*weight, 4096), ARCH, _clusters)[0] is None


# Clusters of 1 to 8 CTAs that an H200 runs at once, with one and two CTAs on a multiprocessor.
_H200 = (132, 66, 39, 30, 22, 17, 15, 15), (264, 132, 79, 62, 47, 39, 32, 30)


@pytest.mark.parametrize(
    ("weight", "tokens", "bits", "kernel"),
    [
        (_BIG, 16, 40, "rows"), (_TALL, 16, 39, "rows"), (_BIG, 32, 40, "wide"), (_TALL, 32, 40, "rows"),
        (_BIG, 32, 39, "wide"), (_BIG, 64, 80, "wide"), (_TALL, 64, 40, "wide"), (_TALL, 128, 80, "wide"),
        ((28_672, 4096), 32, 40, "rows"),
    ],
)  # fmt: skip
def test_the_faster_kernel_is_taken(weight, tokens, bits, kernel):
    """As measured on an H200."""
    shape, _ = plan.chosen(_dims(*weight, tokens, bits), ARCH, lambda parts, on_one: _H200[on_one - 1][parts - 1])
    assert kernel == ("wide" if shape.wide else "rows")


def test_the_chosen_form_takes_least_time_by_the_model():
    dims = _dims(4096, 14_336, 16)
    shape, seconds = plan.chosen(dims, ARCH, _clusters)
    assert seconds == min(plan.time_of(s, dims, ARCH, room) for s, room in plan.shapes(dims, _clusters))
    assert shape.rows == 16 and shape.parts > 1 and shape.num_warps == 16
    assert seconds > 4096 * 14_336 / 2 / ARCH.bandwidth  # it reads the codes


@pytest.mark.parametrize("tokens", [8, 32])
def test_wider_codes_and_more_rows_take_longer(tokens):
    times = [plan.chosen(_dims(4096, 14_336, tokens, bits), ARCH, _clusters)[1] for bits in (20, 40, 80)]
    assert times == sorted(times)
    assert plan.chosen(_dims(4096, 14_336, 2 * tokens), ARCH, _clusters)[1] >= times[1]


def test_what_does_not_fit_is_dequantised():
    dims = _dims(4096, 14_336, 32)
    assert plan.shape_of(LinearConfig(16, 32, 1), dims, _clusters) is None
    assert plan.shape_of(LinearConfig(16, 0, 4), dims, _clusters) is None
    assert plan.shape_of(LinearConfig(16, 8, 8), _dims(16, 128, 2), _clusters) is None  # fewer groups than parts
    assert plan.shape_of(LinearConfig(16, 64, 8), dims, _clusters) is None  # packed_rows takes no more than 32
    assert plan.shape_of(LinearConfig(16, 8, 8, True), dims, _clusters) is None  # and packed_wide no fewer than 16
    assert plan.shape_of(LinearConfig(4, 64, 8, True), dims, _clusters) is None  # by whole warpgroups of 64 outputs
    assert plan.chosen(_dims(16, 64 * 32_000, 2), ARCH, _clusters)[0] is None


def _launched(tokens, rows=4096, columns=4096, offset=0):
    """(kernel's name, grid, cluster) of each launch of a product, none of which is done."""
    strips, groups = -(-rows // 16), columns // 64
    half = {"dtype": torch.float16}
    tables = torch.empty(strips, groups, 16, **half), torch.empty(strips, groups, 16, **half)
    order, table = torch.empty(strips, groups, dtype=torch.int16), torch.empty(strips, 5, dtype=torch.int32)
    codes = torch.empty(strips * groups * 128 + offset, dtype=torch.int32)[offset:]
    x, found = torch.zeros(tokens, columns, dtype=torch.bfloat16), []
    with (
        assuming(arch_named("sm90")),
        in_place_of_launches(lambda kernel, grid, args, named, cluster: found.append((kernel.__name__, grid, cluster))),
    ):
        y = packed_linear.dequant_linear(x, codes, *tables, order, table, rows)
    assert y.shape == (tokens, rows) and y.dtype == x.dtype
    return found


@pytest.mark.parametrize(
    "tokens, kernel",
    [
        (1, "packed_row"),
        (2, "packed_rows"),
        (32, "packed_rows"),
        (48, "packed_wide"),
        (65, "packed_wide"),
        (2000, "packed_weight"),
    ],
)
def test_each_number_of_rows_has_its_kernel(tokens, kernel):
    ((name, grid, cluster),) = _launched(tokens)
    assert name == f"{kernel}_kernel"
    assert grid[0] % cluster == 0 and (cluster == 1 or kernel in ("packed_rows", "packed_wide"))


@pytest.mark.parametrize("tokens", [1, 16])
def test_codes_that_16_bytes_do_not_divide_are_dequantised(tokens):
    assert [name for name, _, _ in _launched(tokens, offset=1)] == ["packed_weight_kernel"]


def test_no_rows_and_no_launch():
    assert not _launched(0)


def test_what_was_tuned_for_one_row_is_not_applied_to_more():
    codes, order = torch.empty(256 * 64 * 128, dtype=torch.int32), torch.empty(256, 64, dtype=torch.int16)
    shape = packed_linear._way(16, codes, order, LinearConfig(16, 1), arch_named("sm90"))
    assert shape is not None and shape.rows in (plan.WIDE_ROWS if shape.wide else plan.BATCH_OF)
