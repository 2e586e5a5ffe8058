"""linear_cross_entropy by exponentials in the place of logits, without a GPU: Gluon's two products by what they are
said to compute, the kernels around them in Triton's interpreter."""

from pathlib import Path

import pytest
import torch

from devices import ON_GPU
from tilesmith import ops
from tilesmith.hardware.detect import arch_named, assuming
from tilesmith.ops.loss.memory import linear_cross_entropy_need

pytestmark = [
    pytest.mark.usefixtures("needs_triton"),
    pytest.mark.skipif(ON_GPU, reason="the generic harness runs the kernels themselves"),
]


class Launches:
    """Launches in the place of `exp2_epilogue.launch`; names: those of the kernels so far."""

    def __init__(self, epilogue, launch):
        self.epilogue, self.launch, self.names = epilogue, launch, []

    def __call__(self, kernel, grid, *args, **named):
        self.names.append(kernel.__name__)
        if kernel is self.epilogue.exp2_matmul_kernel:
            self.exponentials(*args)
        elif kernel is self.epilogue.max_matmul_kernel:
            self.largest(*args)
        else:
            self.launch(kernel, grid, *args, **named)

    @staticmethod
    def exponentials(x, w, out, _, tiles, __, references, sums, again, rows, cols, power):
        if again is not None and not again:
            return
        exps = torch.exp2(x.base.float() @ w.base.float().t() * power - references[:, None])
        out.base.copy_(exps)
        padded = torch.nn.functional.pad(exps, (0, tiles * 256 - cols))
        sums.view(tiles, rows).copy_(padded.view(rows, tiles, 256).sum(-1).t())

    @staticmethod
    def largest(x, w, out, _, __, ___, references, factors, again, rows, cols, power):
        if again:
            most = (x.base.float() @ w.base.float().t() * power).amax(-1)
            references.copy_(torch.where(factors == float("inf"), most, references))


@pytest.fixture
def launches(monkeypatch):
    from tilesmith.ops.loss.hopper import exp2_epilogue

    taken = Launches(exp2_epilogue, exp2_epilogue.launch)
    monkeypatch.setattr(exp2_epilogue, "launch", taken)
    return taken


def _gradients(x, weight, target, dloss, class_weight, **options):
    """Loss and gradients of Hopper's forward and the backward of Triton."""
    forward, backward = ops.linear_cross_entropy, ops.linear_cross_entropy.vjp
    given = {"class_weight": class_weight, **options, "grad_mask": [True, True, False]}
    args = forward.bind((x, weight, target), given)
    loss, *saved = forward.kernel("hopper").fn(*args)
    named = dict(zip(forward.parameters, args)) | dict(zip(forward.outputs[1:], saved))
    named |= {"dloss": dloss, "output_mask": [True, True, False], "overwrite": False}
    dx, dweight, _ = backward.kernel("triton").fn(*(named[name] for name in backward.parameters))
    return loss, dx, dweight, saved


def _inputs(tokens, hidden, classes, steep=False):
    generator = torch.Generator().manual_seed(0)
    x, weight = (torch.randn(n, hidden, generator=generator) for n in (tokens, classes))
    if steep:
        x[::3] = 0
        x[torch.arange(0, tokens, 3), torch.arange(0, tokens, 3) % hidden] = 1024
    target = torch.randint(classes, (tokens,), generator=generator)
    target[2::17] = -100
    return x.bfloat16(), (weight / hidden**0.5).bfloat16(), target


@pytest.mark.parametrize("mode", ["keep", "chunks"])
@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize(
    ("steep", "weighted"), [(False, False), (False, True), (True, True)], ids=["plain", "weighted", "steep"]
)
def test_gradients_are_as_exact_as_one_product(launches, steep, weighted, reduction, mode):
    """Within twice, for dx 2.1 times (`test_losses`), what products of the exact gradient of the logits, rounded to
    bf16, are off by. Steep: exponentials of some rows overflow, and are computed a second time; with weights of
    classes, since one number rounded well makes a row of theirs.
    """
    x, weight, target = _inputs(150, 136, 4368, steep)
    class_weight = torch.linspace(0.5, 1.5, 4368) if weighted else None
    dloss, scale = torch.tensor(0.3), 0.7
    leaves = x.double().requires_grad_(), weight.double().requires_grad_()
    logits = leaves[0] @ leaves[1].t()
    logits.retain_grad()
    wanted = torch.nn.functional.cross_entropy(
        logits * scale, target, None if class_weight is None else class_weight.double(), reduction=reduction
    )
    (wanted * dloss).backward()
    loss, dx, dweight, _ = _gradients(
        x, weight, target, dloss, class_weight, reduction=reduction, scale=scale, mode=mode
    )
    torch.testing.assert_close(loss.double(), wanted.detach(), rtol=1e-5, atol=1e-5)
    rounded = logits.grad.bfloat16()
    products = rounded @ weight, rounded.t() @ x
    for name, times, found, product, leaf in zip(("dx", "dweight"), (2.1, 2.0), (dx, dweight), products, leaves):
        error, allowed = ((value.double() - leaf.grad).norm() / leaf.grad.norm() for value in (found, product))
        assert error <= times * allowed, f"{name}: off by {error:.2e}, one product by {allowed:.2e}"
    assert not dx[2::17].any()
    assert launches.names.count("exp2_matmul_kernel") == 2


def test_what_is_kept_is_the_gradient_of_the_logits_but_for_a_factor_of_each_row(launches):
    x, weight, target = _inputs(40, 72, 4368)
    args = x, weight, target
    *_, logit_grad, factors = _gradients(*args, torch.ones(()), None, mode="keep")[-1]
    plain = ops.linear_cross_entropy.kernel("chunked").fn
    *_, expected, divisor = plain(
        *ops.linear_cross_entropy.bind(args, {"mode": "keep", "grad_mask": [True, True, False]})
    )
    assert torch.equal(divisor, torch.full((40,), 37.0)) and not factors[2::17].any()
    found = logit_grad.float() * factors[:, None] / divisor[0]
    assert (found - expected.float()).norm() <= 2**-7 * expected.float().norm()


@pytest.mark.parametrize(("tokens", "wanted"), [(8192, "keep"), (8193, "chunks")])
def test_all_logits_are_kept_where_chunks_could_hold_as_much(tokens, wanted):
    """Up to 2 K + 4096 tokens: less weight's gradient, they take what K + 4096 tokens' and the fp32 sum would."""
    hidden, classes = 2048, 154_880
    x, weight = (torch.empty(n, hidden, dtype=torch.bfloat16, device="meta") for n in (tokens, classes))
    target, op = torch.empty(tokens, dtype=torch.int64, device="meta"), ops.linear_cross_entropy
    at, mask = op.parameters.index("mode"), {"grad_mask": [True, True, False]}
    assert op.bind((x, weight, target), mask)[at] == wanted
    assert op.bind((x, weight, target), {**mask, "accumulate_fp32": False})[at] == "chunks"
    assert op.bind((x, weight.float(), target), mask)[at] == "chunks"
    chunks, kept = (
        linear_cross_entropy_need(*op.bind((x, weight, target), {**mask, "mode": mode})) for mode in ("chunks", "keep")
    )
    if wanted == "keep":
        assert kept.whole <= 1.001 * chunks.chunked(hidden + 4096)


def test_a_rehearsal_counts_the_maxima_of_logits_as_the_call_does():
    """Or it would plan other chunks. One maximum of 256 classes a token, which kernels for NVIDIA GPUs keep."""
    x, weight = (torch.empty(n, 64, dtype=torch.bfloat16, device="meta") for n in (512, 5000))
    call = ops.linear_cross_entropy.bind((x, weight, torch.empty(512, dtype=torch.int64, device="meta")), {})
    rows = []
    for name in ("sm90", "gfx942"):
        with assuming(arch_named(name)):
            rows.append(linear_cross_entropy_need(*call).row)
    assert rows[0] - rows[1] == 20 * 4


@pytest.mark.parametrize(("tokens", "passes"), [(64, True), (2973, False)])
def test_short_passes_over_logits_stay(tokens, passes):
    from tilesmith.ops.loss.hopper import exp2_epilogue

    x = torch.empty(tokens, 768, dtype=torch.bfloat16, device="meta")
    with assuming(arch_named("sm90")):
        found = exp2_epilogue.reasons(x, 50_368, None, True, 0.0, True)
    assert found == (["it takes less time than the launches in its place"] if passes else [])


@pytest.fixture
def loss_steps(monkeypatch):
    monkeypatch.syspath_prepend(str(Path(__file__).parents[1] / "benchmarks"))
    import loss_steps

    return loss_steps


@pytest.mark.parametrize("number", range(10))
def test_launches_without_memory_are_those_of_three_products(loss_steps, number):
    shape = loss_steps.SHAPES[number]
    for way in loss_steps.ways_of(shape):
        mode, steps = loss_steps.steps_of(shape, way)
        assert sum(step.flops for step in steps) == pytest.approx(shape.flops)
        names = [step.name for step in steps]
        exps, passes = names.count("exp2_matmul_kernel"), names.count("loss_grad_parts_kernel")
        assert (exps == 0) == (way == "pass" or (way != "powers" and shape.hidden > 2048)) == (passes > 0)
        assert (mode == "keep") == (max(exps, passes) == 1 and "_scale_kernel" not in names)
        assert names.count("_scale_rows_kernel") == (2 if mode == "keep" else exps)


def test_chosen_is_the_way_that_is_modelled_to_take_least(loss_steps):
    """But for exponentials of many features, where power counts, of which the model knows nothing (ADR 7)."""
    for shape in loss_steps.SHAPES:
        times = {way: loss_steps.modelled(shape, way) for way in loss_steps.ways_of(shape) if way != "powers"}
        assert min(times, key=times.__getitem__) == "chosen", shape
