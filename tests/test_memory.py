"""MemoryConfig: which chunks follow from it, what it refuses, and, on a GPU, that peaks stay where it says."""

import dataclasses
import itertools
import random
import re
import statistics

import pytest
import torch

import tilesmith
from devices import DEVICE, ON_GPU
from tilesmith import MemoryConfig, ops
from tilesmith.engine.memory import GB, Bounds, Need, active, rows_in_budget, workspaces
from tilesmith.engine.timing import peak_memory
from tilesmith.ops.loss.memory import described_mode

OPEN = Bounds(0, 10**18, 10**18, "max_memory_gb")


def _loss_inputs(tokens=1000, hidden=64, classes=3000, dtype=torch.float32, grad=True):
    x = torch.randn(tokens, hidden, device=DEVICE, dtype=dtype, requires_grad=grad)
    weight = torch.randn(classes, hidden, device=DEVICE, dtype=dtype, requires_grad=grad)
    return x, weight, torch.randint(classes, (tokens,), device=DEVICE)


def test_the_class_is_public_and_frozen():
    config = tilesmith.MemoryConfig(40, 8, 32)
    assert (config.max_memory_gb, config.min_memory_gb, config.target_memory_gb) == (40, 8, 32)
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.target_memory_gb = 1


@pytest.mark.parametrize("bad", [(8, 40, 32), (40, 8, 4), (1, 0, 2), (1, -1, 1), (0, 0, 0), (float("nan"), 0, None)])
def test_bounds_out_of_order_are_refused_with_the_numbers(bad):
    with pytest.raises(ValueError, match="min_memory_gb is .* target_memory_gb .* max_memory_gb"):
        MemoryConfig(*bad)


def test_the_innermost_config_counts():
    assert active() is None
    with MemoryConfig(target_memory_gb=2):
        with MemoryConfig(max_memory_gb=3, target_memory_gb=1):
            assert active() == (0, GB, 3 * GB, "max_memory_gb")
        assert active() == (0, 2 * GB, 2 * GB, "target_memory_gb")
        with pytest.raises(KeyError), MemoryConfig():
            raise KeyError
        assert active().target == 2 * GB
    assert active() is None


def test_a_config_that_a_generator_holds_leaves_others_alone():
    def held():
        with MemoryConfig(max_memory_gb=1):
            yield

    generator = held()
    next(generator)
    with MemoryConfig(max_memory_gb=2):
        generator.close()
        assert active().limit == 2 * GB
    assert active() is None


def test_chunks_are_the_largest_that_keep_to_the_target():
    need = Need(rows=10_000, whole=5_000_000, base=1_000_000, row=1000)
    previous = 0
    for target in range(1_200_000, 6_000_000, 100_000):
        rows = rows_in_budget("op", need, OPEN._replace(target=target))
        assert need.chunked(rows) <= target and rows >= previous
        previous = rows
    assert previous == 10_000
    swept = need._replace(swept=3000, block=200)
    assert swept.chunked(100) == 1_400_000 and swept.chunked(300) == 1_900_000
    for target in range(1_600_000, 5_000_000, 50_000):
        assert swept.chunked(rows_in_budget("op", swept, OPEN._replace(target=target))) <= target
    assert rows_in_budget("op", need, OPEN._replace(target=1)) == 128
    tall = need._replace(least=4_000_000)  # whatever the chunks, so they may as well be large
    assert tall.chunked(rows_in_budget("op", tall, OPEN._replace(target=1))) == 4_000_000
    assert rows_in_budget("op", Need(0, 0), OPEN) == 1


def test_needs_outside_the_bounds_raise_with_the_numbers():
    x, weight, target = _loss_inputs()
    with MemoryConfig(max_memory_gb=40, min_memory_gb=8, target_memory_gb=32):
        with pytest.raises(
            ValueError, match=r"linear_cross_entropy needs \d+\.\d+ MB here, less than min_memory_gb = 8"
        ):
            ops.linear_cross_entropy(x, weight, target)
        heads = x.view(1, 1000, 64)
        with pytest.raises(ValueError, match=r"memory_efficient_attention needs .* less than min_memory_gb = 8"):
            ops.memory_efficient_attention(heads, heads, heads, 2)
        with pytest.raises(ValueError, match=r"memory_efficient_linear needs .* less than min_memory_gb = 8"):
            ops.memory_efficient_linear(x, weight, activation="gelu")
    too_much = r"needs at least \d+(\.\d+)? [GM]B here, more than "
    with MemoryConfig(target_memory_gb=1e-6), pytest.raises(ValueError, match=too_much + "target_memory_gb = 1e-06"):
        ops.linear_cross_entropy(x, weight, target)
    with MemoryConfig(1e-5, 0, 1e-6), pytest.raises(ValueError, match=too_much + "max_memory_gb = 1e-05"):
        ops.memory_efficient_linear(x, weight, activation="gelu")


@pytest.mark.skipif(ON_GPU, reason="a CPU has no workspaces, so small targets bite")
def test_values_do_not_depend_on_the_config():
    wide = torch.float64  # sums over other chunks round otherwise, which must not look like other values
    x, weight, target = _loss_inputs(dtype=wide)
    bias = torch.randn(3000, dtype=wide, requires_grad=True)
    heads = torch.randn(1, 600, 64, dtype=wide, requires_grad=True)

    def run():
        loss = ops.linear_cross_entropy(x, weight, target, bias)
        y = ops.memory_efficient_linear(x, weight, bias, activation="gelu")
        out = ops.memory_efficient_attention(heads, heads, heads, 2, is_causal=True)
        leaves = (x, weight, bias, heads)
        return loss, y, out, *torch.autograd.grad(loss + y.square().mean() + out.square().sum(), leaves)

    expected = run()
    for target_gb in (0.02, 0.06):
        with MemoryConfig(max_memory_gb=1, target_memory_gb=target_gb):
            for got, want in zip(run(), expected):
                torch.testing.assert_close(got, want)


def _mode(*args, **kwargs):
    op = ops.linear_cross_entropy
    return op.bind(args, kwargs)[op.parameters.index("mode")]


@pytest.mark.skipif(ON_GPU, reason="a CPU has no workspaces, so small targets bite")
def test_the_mode_follows_from_sizes_and_config():
    x, weight, target = _loss_inputs(dtype=torch.bfloat16)
    assert _mode(x, weight, target) == "keep"
    assert _mode(x, weight, target, mode="recompute") == "recompute"
    assert _mode(x, weight, target, chunk_tokens=100) == "chunks"
    assert _mode(x, weight.detach(), target) == "chunks"
    assert _mode(x.half(), weight.half(), target) == "chunks"  # the gradient of a mean may underflow
    assert _mode(*_loss_inputs(9000, 64, 3000)) == "chunks"
    for target_gb, mode in ((0.02, "keep"), (0.0055, "chunks"), (0.005, "recompute")):
        with MemoryConfig(max_memory_gb=1, target_memory_gb=target_gb):
            assert _mode(x, weight, target) == mode, target_gb


def test_explain_tells_the_mode_and_why():
    x, weight, target = _loss_inputs(dtype=torch.bfloat16)
    assert "mode keep: the logits' gradient is kept" in str(
        tilesmith.explain("linear_cross_entropy", x, weight, target)
    )
    told = str(tilesmith.explain("linear_cross_entropy", x, weight, target, chunk_tokens=300))
    assert "mode chunks" in told and "4 times 300 tokens (chunk_tokens is 300)" in told
    told = str(tilesmith.explain("linear_cross_entropy", x, weight, target, reduction="none"))
    assert "mode recompute" in told and 'reduction "none"' in told
    assert "(as asked)" in str(tilesmith.explain("linear_cross_entropy", x, weight, target, mode="recompute"))


@pytest.mark.parametrize("classes", [32_000, 128_256])
@pytest.mark.parametrize("tokens", [4096, 8192, 16_384])
def test_modes_keep_to_their_share_of_memory(tokens, classes):
    hidden, op = 4096, ops.linear_cross_entropy
    x, weight = (
        torch.empty(n, hidden, device="meta", dtype=torch.bfloat16, requires_grad=True) for n in (tokens, classes)
    )
    target = torch.empty(tokens, device="meta", dtype=torch.int64)

    def beside(mode):
        told = described_mode(mode, *op.bind((x, weight, target), {"mode": mode}))
        return float(re.search(r"([\d.]+) GB beside inputs and gradients", told)[1]) * GB

    several = tokens > 4096
    assert beside("") <= 1.005 * (4096 * classes * 2 + several * 4 * classes * hidden)
    assert beside("recompute") <= 0.1 * GB + 4 * tokens * hidden


@pytest.mark.parametrize("mode", ["", "keep", "chunks", "recompute"])
def test_no_guard_on_tokens_decides_the_mode_under_compile(mode):
    x, weight, target = _loss_inputs()
    graphs = []

    def record(graph, _):
        graphs.append(graph)
        return graph.forward

    compiled = torch.compile(lambda *a: ops.linear_cross_entropy(*a, mode=mode), backend=record, fullgraph=True)
    for tokens in (100, 1000):
        rows, labels = x[:tokens].detach().requires_grad_(), target[:tokens]
        torch._dynamo.mark_dynamic(rows, 0)
        torch._dynamo.mark_dynamic(labels, 0)
        got = compiled(rows, weight, labels)
        want = ops.linear_cross_entropy(rows, weight, labels, mode=mode)
        torch.testing.assert_close(got, want)
    assert len(graphs) == 1


@pytest.mark.skipif(ON_GPU, reason="a CPU has no workspaces, so small targets bite")
def test_the_config_reaches_the_op_also_under_compile():
    x, weight, target = _loss_inputs()
    at = ops.linear_cross_entropy.parameters.index("chunk_tokens")
    with MemoryConfig(max_memory_gb=1, target_memory_gb=0.01):
        chunk = ops.linear_cross_entropy.bind((x, weight, target), {})[at]
        assert 128 <= chunk < 1000
        assert ops.linear_cross_entropy.bind((x, weight, target), {"chunk_tokens": 77})[at] == 77
        graphs = []

        def record(graph, _):
            graphs.append(graph)
            return graph.forward

        torch.compile(lambda *a: ops.linear_cross_entropy(*a), fullgraph=True, backend=record)(x, weight, target)
    (call,) = [n for n in graphs[0].graph.nodes if "linear_cross_entropy" in str(n.target)]
    assert chunk in call.args
    assert ops.linear_cross_entropy.bind((x, weight, target), {})[at] == 0


def _peak(run):
    """Bytes that a call and its backward allocate at their peak, the third time: the second is recorded for replays,
    which keeps what a launcher allocates until it returns."""
    for _ in range(3):
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        run()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


def _milliseconds(run):
    spent = []
    for _ in range(7):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        run()
        end.record()
        torch.cuda.synchronize()
        spent.append(begin.elapsed_time(end))
    return statistics.median(spent[2:])


def _calls():
    """name -> (a call with its backward, targets in GB, small first). The whole of each needs more than 1 GB."""
    x, weight, labels = _loss_inputs(16_384, 2048, 49_152, torch.bfloat16)
    rows = torch.randn(65_536, 1024, device=DEVICE, dtype=torch.bfloat16, requires_grad=True)
    up = torch.randn(2048, 1024, device=DEVICE, dtype=torch.bfloat16, requires_grad=True)
    dy = torch.randn(65_536, 2048, device=DEVICE, dtype=torch.bfloat16)
    packed = torch.randn(4, 4096, 2048, device=DEVICE, dtype=torch.bfloat16, requires_grad=True)
    dout = torch.randn_like(packed)

    def grad(out, leaves, d=None):
        return torch.autograd.grad(out, leaves, d)

    return {
        "linear_cross_entropy": (lambda: grad(ops.linear_cross_entropy(x, weight, labels), (x, weight)), (1, 2, 4)),
        "linear_cross_entropy forward": (lambda: _without_grad(ops.linear_cross_entropy, x, weight, labels), (0.2, 1)),
        "memory_efficient_linear": (
            lambda: grad(ops.memory_efficient_linear(rows, up, activation="gelu"), (rows, up), dy), (1, 2),
        ),
        "memory_efficient_attention": (
            lambda: grad(ops.memory_efficient_attention(packed, packed, packed, 16), packed, dout), (1,),
        ),
    }  # fmt: skip


def _without_grad(op, *args):
    with torch.no_grad():
        op(*args)


def _formulas():
    """name -> (a call with its backward, the bytes that its documentation says it takes at its peak)."""
    x, weight, labels = _loss_inputs(16_384, 2048, 49_152, torch.bfloat16)
    dx, dweight, row = x.nbytes, weight.nbytes, 2 * weight.shape[0]
    heads, targets = x.view(16, 1024, 2048), labels.view(16, 1024)
    sequences = torch.ones(3, 16, device=DEVICE)
    teacher, teacher_weight = x.detach(), weight.detach()
    rows = torch.randn(65_536, 1024, device=DEVICE, dtype=torch.bfloat16, requires_grad=True)
    up = torch.randn(2048, 1024, device=DEVICE, dtype=torch.bfloat16, requires_grad=True)
    dy = torch.randn(65_536, 2048, device=DEVICE, dtype=torch.bfloat16)

    def loss(**options):
        op = ops.linear_cross_entropy
        need = op._need(*op.bind((x, weight, labels), options)).chunked(options.get("chunk_tokens", len(x)))
        return lambda: torch.autograd.grad(op(x, weight, labels, **options), (x, weight)), need - workspaces(DEVICE)

    def preference(formula, chunk, options, cat):
        def run():
            out, _ = ops.linear_preference(heads, weight, targets, sequences, formula, options, chunk_tokens=chunk)
            return torch.autograd.grad(out, (x, weight))

        return run, dx + dweight + chunk * row + cat * chunk * 2 * 2048

    def distillation():
        out, _ = ops.linear_distillation(x, weight, teacher, teacher_weight, chunk_tokens=2048)
        return torch.autograd.grad(out, (x, weight))

    def hidden():
        out = ops.memory_efficient_linear(rows, up, activation="gelu", chunk_rows=16_384)
        return torch.autograd.grad(out, (rows, up), dy)

    return {
        "linear_cross_entropy, keep": loss(mode="keep"),
        "linear_cross_entropy, chunks": loss(mode="chunks", chunk_tokens=4096),
        "linear_cross_entropy, rounded chunks": loss(mode="chunks", chunk_tokens=4096, accumulate_fp32=False),
        "linear_cross_entropy, recompute": loss(mode="recompute", chunk_tokens=1024),
        "linear_preference pairs": preference("sigmoid", 4096, [0.1, 0.0, 0.0, 0.05], 1),
        "linear_distillation": (distillation, dx + dweight + 2 * 2048 * row),
        "memory_efficient_linear": (
            hidden, dy.nbytes + rows.nbytes + up.nbytes + 4 * up.numel() + 16_384 * 2048 * 2,
        ),
    }  # fmt: skip


@pytest.mark.large
@pytest.mark.skipif(not ON_GPU, reason="peaks are measured on a GPU")
def test_peaks_are_those_of_the_formulas():
    for name, (run, expected) in _formulas().items():
        peak = _peak(run)
        assert abs(peak - expected) <= 0.05 * expected, (
            f"{name}: {peak / GB:.3f} GB, {expected / GB:.3f} by the formula"
        )


@pytest.mark.large
@pytest.mark.skipif(not ON_GPU, reason="peaks are measured on a GPU")
def test_peaks_stay_at_or_below_the_target_and_larger_targets_are_no_slower():
    for name, (run, targets) in _calls().items():
        spent = []
        for target in targets:
            with MemoryConfig(target_memory_gb=target):
                peak = _peak(run)
                spent.append(_milliseconds(run))
            assert peak <= target * GB, f"{name}: {peak / GB:.3f} GB at a target of {target}"
        for slower, faster in itertools.pairwise(spent):
            assert faster <= 1.02 * slower, f"{name}: {spent} ms at targets of {targets} GB"


def _drawn(seed):
    """A random call of each op with its backward, small enough for a CPU: name, leaves, the call."""
    draw, torch_draw = random.Random(seed), torch.Generator().manual_seed(seed)

    def tensor(*shape, dtype):
        grad = draw.random() < 0.8
        return torch.randn(shape, generator=torch_draw).div(8).to(dtype).requires_grad_(grad)

    dtype = draw.choice((torch.float64, torch.float32, torch.bfloat16))
    wide = draw.choice((dtype, torch.promote_types(dtype, torch.float32)))
    rows, hidden, outputs = draw.choice((300, 700)), draw.choice((16, 96)), draw.choice((64, 500, 1500))
    x, weight = tensor(rows, hidden, dtype=dtype), tensor(outputs, hidden, dtype=wide)
    bias = tensor(outputs, dtype=wide) if draw.random() < 0.4 else None
    labels = torch.randint(outputs, (rows,), generator=torch_draw)
    options = {"softcap": draw.choice((0.0, 30.0)), "label_smoothing": draw.choice((0.0, 0.1))}
    options |= {"reduction": draw.choice(("mean", "sum", "none")), "accumulate_fp32": draw.random() < 0.7}
    activation = draw.choice(("none", "gelu", "gelu_tanh", "silu", "relu", "relu_squared"))
    heads, groups, tokens = draw.choice((2, 8)), draw.choice((1, 2)), draw.choice((150, 300))
    q, k, v = (tensor(1, tokens, 16 * h, dtype=dtype) for h in (heads, groups, groups))
    causal, p = draw.random() < 0.5, draw.choice((0.0, 0.1))
    return {
        "loss": ((x, weight, bias), lambda: ops.linear_cross_entropy(x, weight, labels, bias, **options)),
        "linear": ((x, weight, bias), lambda: ops.memory_efficient_linear(x, weight, bias, activation=activation)),
        "attention": ((q, k, v), lambda: ops.memory_efficient_attention(q, k, v, heads, p, causal)),
    }


def _within(limit, run):
    """The peak of a run within a limit in bytes; None where it is refused."""
    try:
        with MemoryConfig(max_memory_gb=limit / GB):
            return peak_memory(run, DEVICE)
    except ValueError as problem:
        assert "needs at least" in str(problem)
        return None


@pytest.mark.skipif(ON_GPU, reason="what a CPU allocates is counted by its profiler")
def test_peaks_on_a_cpu_stay_below_the_limit():
    """In all dtypes: plain PyTorch sweeps a chunk of 16-bit values in copies of fp32."""
    calls = [(seed, *named) for seed in range(6) for named in _drawn(seed).items()]
    served = 0
    for seed, name, (leaves, call) in calls:

        def run(call=call, leaves=leaves):
            y = call()
            if y.requires_grad:
                y.backward(torch.ones_like(y))
            for leaf in leaves:
                if leaf is not None:
                    leaf.grad = None

        run()
        whole = peak_memory(run, DEVICE)
        for limit in (0.8 * whole, 0.5 * whole):
            peak = _within(limit, run)
            served += peak is not None
            assert peak is None or peak <= limit, f"{name} of seed {seed}: {peak} bytes at a limit of {limit:.0f}"
    assert served >= 8


@pytest.mark.parametrize(("activation", "kept"), [("gelu", 1), ("silu", 1), ("relu", 1), ("none", 0)])
def test_an_activated_product_keeps_one_tensor_of_its_size(activation, kept):
    x = torch.randn(48, 32, device=DEVICE, requires_grad=True)
    weight = torch.randn(40, 32, device=DEVICE, requires_grad=True)
    y = ops.linear_act(x, weight, None, activation)
    assert sum(t.shape == y.shape for t in y.grad_fn.saved_tensors if t is not None) == kept
    y.backward(torch.randn_like(y))
    assert x.grad.shape == x.shape


@pytest.mark.parametrize("norm_dim", ["head", "row"])
def test_normed_and_turned_states_keep_nothing_but_what_came_in(norm_dim):
    q, k = (torch.randn(2, heads, 5, 16, device=DEVICE, requires_grad=True) for heads in (4, 2))
    weights = [torch.ones(16 * (heads if norm_dim == "row" else 1), device=DEVICE) for heads in (4, 2)]
    angle = torch.randn(5, 8, device=DEVICE)
    given = q, k, *weights, angle.cos(), angle.sin()
    q_out, k_out = ops.rms_norm_rope(*given, norm_dim=norm_dim)
    kept = {t.data_ptr() for t in q_out.grad_fn.saved_tensors if t is not None}
    assert kept <= {t.data_ptr() for t in given}
    (q_out.sum() + k_out.sum()).backward()
    assert q.grad.shape == q.shape and k.grad.shape == k.shape
