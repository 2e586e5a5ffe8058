"""What a replay makes anew for each call. That replays compute what launchers do, test_ops checks on a GPU."""

import functools
import subprocess
import sys
import weakref
from types import SimpleNamespace

import pytest
import torch

from devices import HOPPER, ON_GPU
from tilesmith import explain, ops, use
from tilesmith.engine import ops as declared
from tilesmith.engine import replay, torch_private
from tilesmith.engine.recording import _descriptor, recorder
from tilesmith.hardware.detect import arch_named, assuming
from tilesmith.settings import settings


def test_a_descriptor_of_other_memory_is_the_recorded_one_but_for_its_base():
    tensor_descriptor = pytest.importorskip("triton.tools.tensor_descriptor").TensorDescriptor
    template = tensor_descriptor(torch.zeros(64, 32), [64, 32], [32, 1], [16, 16])
    other = torch.ones(64, 32)
    made = _descriptor(template, other)
    assert made.base is other and template.base is not other
    assert {**vars(made), "base": None} == {**vars(template), "base": None}


RECORDING = """
import sys
import torch
from tilesmith.engine.recording import recording
x = torch.ones(3)
with recording((x,)) as record:
    torch.empty(3).sin()
assert record.refusal, "nothing was seen"
print("torch._dynamo" in sys.modules)
"""


def test_recording_imports_no_compiler():
    done = subprocess.run([sys.executable, "-c", RECORDING], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"


@pytest.fixture
def as_if_on_a_gpu(monkeypatch):
    """A CPU's tensors are replayed as a GPU's would be; launches are functions of addresses."""
    monkeypatch.setattr(replay, "_current_device", lambda: 0)
    monkeypatch.setattr(replay, "_empty_cuda", lambda *like: torch.empty_strided(*like[:2], dtype=like[2]))
    monkeypatch.setattr(torch_private, "raw_stream", lambda device: 0)

    def launch(fn, *values):
        fn(*(v.data_ptr() if isinstance(v, torch.Tensor) else v for v in values))
        found = SimpleNamespace(
            run=lambda x, y, z, stream, _, *v: fn(*v), function=None, head=(), together=False, encoded=None
        )
        if recorder() is not None:
            recorder().launched(found, 0, (1, 1, 1), list(values))

    return launch


def test_replay_may_be_switched_off_and_checked(as_if_on_a_gpu, monkeypatch):
    factor = [2.0]

    def launcher(x):
        return x.mul(factor[0])

    def made(mode):
        monkeypatch.setattr(replay, "settings", lambda: SimpleNamespace(replay=mode))
        return replay.Replay(launcher, lambda: True, 0, "doubled by made_up")

    x = torch.tensor([1.0, float("nan"), float("inf")])
    off, checked = made("0"), made("check")
    for kernel in (off, checked):
        for _ in range(4):
            torch.testing.assert_close(kernel.run(x), x * 2, equal_nan=True)
    assert off.run == off._launch and "TILESMITH_REPLAY=0" in off.told()[0]
    assert checked.run != checked._launch
    factor[0] = 3.0  # which the record holds as it was
    with pytest.raises(RuntimeError, match=r"doubled by made_up: its replay differs .* by 1 "):
        checked.run(torch.ones(3))


def test_a_setting_of_replay_is_one_of_three(monkeypatch):
    monkeypatch.setenv("TILESMITH_REPLAY", "maybe")
    settings.cache_clear()
    try:
        with pytest.raises(ValueError, match="TILESMITH_REPLAY must be 0, 1 or check, got 'maybe'"):
            settings()
    finally:
        monkeypatch.undo()
        settings.cache_clear()


def _products(launch, offsets):
    """A launcher with products into views of one buffer, results that are views, and a launch amid them."""

    def launcher(x, weight, scale):
        rows = x.reshape(-1, x.shape[-1])
        wide = torch.promote_types(x.dtype, torch.float32)
        buffer = x.new_empty(rows.shape[0] * weight.shape[0] + 4)
        scores = buffer[4:].view(rows.shape[0], -1)
        for part in (slice(0, 2), slice(2, 4)):
            torch.mm(rows[part], weight.t(), out=scores[part])
        back = torch.mm(scores, weight).mul_(scale)
        launch(lambda a, b: offsets.append(b - a), scores, scores[1:])
        both = torch.cat([back[:1], back[1:]])
        del back
        sums = x.new_zeros(weight.shape[0], dtype=wide)
        sums += scores.sum(0, dtype=wide)
        out = torch.empty_like(rows)
        torch.addmm(out, scores, weight, beta=0, out=out)
        out[1:3].copy_(both[:2])
        return out.view(x.shape), sums, x.new_zeros(0), both.view(x.shape)

    return launcher


def test_products_between_launches_are_replayed(as_if_on_a_gpu):
    offsets = []
    launcher = _products(as_if_on_a_gpu, offsets)
    kernel = replay.Replay(launcher, lambda: True, 0)
    torch.manual_seed(0)
    for call in range(4):
        x, weight = torch.randn(2, 2, 8), torch.randn(5, 8)
        got, want = kernel.run(x, weight, 0.5), launcher(x, weight, 0.5)
        torch.testing.assert_close(got, want, rtol=0, atol=0)
        assert [g.stride() for g in got] == [w.stride() for w in want]
        assert (kernel.run.__name__, kernel.refusal) == ("replay" if call else "_launch", "")
    assert offsets == [20] * 8
    kernel.fn = None  # the launcher is not asked
    torch.testing.assert_close(kernel.run(x, weight, 0.5), want, rtol=0, atol=0)


def test_lists_of_blocks_are_replayed(as_if_on_a_gpu, monkeypatch, needs_triton):
    """Between their launches PyTorch compares, adds up, and makes masks."""
    from tilesmith.ops.attn.triton import block_choice, block_max, blocks

    def launch(kernel, grid, *args, **named):
        as_if_on_a_gpu(lambda *addresses: None, *(x for x in (*args, *named.values()) if isinstance(x, torch.Tensor)))

    for module in (block_choice, block_max, blocks):
        monkeypatch.setattr(module, "launch", launch)
    keep, scores = torch.ones(1, 2, 4, 4, dtype=torch.bool), torch.randn(1, 1, 4, 4)
    q, k, by_heads = torch.randn(1, 2, 64, 16), torch.randn(1, 1, 64, 16), torch.randn(1, 2, 4, 4)
    given = {
        "block_lists": (keep, 32),
        "block_scores_vjp": (torch.ones(1, 1, 4, 4), q, k, scores, None, True, 16, 16, [True, True]),
        "block_max_scores_vjp": (by_heads.abs(), q, k, by_heads, None, True, 16, 16, [True, True]),
    }
    for name, args in given.items():
        kernel = replay.Replay(declared()[name].kernel("triton").fn, lambda: True, 0)
        for _ in range(3):
            kernel.run(*args)
        assert (kernel.run.__name__, kernel.refusal) == ("replay", ""), name


def test_what_torch_hands_over_whole_in_inference_mode_is_replayed(as_if_on_a_gpu):
    """There `to` and some views are not taken apart before a mode sees them."""

    def launcher(x, weight):
        product = torch.mm(x, weight.to(x.dtype))
        one, two = product.unflatten(0, (2, -1)).movedim(0, 1).chunk(2)
        sums = torch.add(one, two).view_as(one).narrow(-1, 0, 3).to(torch.float64)
        return product, sums, x.float().mul(2)

    for inference in (True, False):
        kernel = replay.Replay(launcher, lambda: True, 0)
        with torch.inference_mode(inference), torch.no_grad():
            for call in range(4):
                x, weight = torch.randn(4, 6), torch.randn(6, 5)
                got, want = kernel.run(x, weight), launcher(x, weight)
                torch.testing.assert_close(got, want, rtol=0, atol=0)
                assert [g.stride() for g in got] == [w.stride() for w in want]
                assert (kernel.run.__name__, kernel.refusal) == ("replay" if call else "_launch", "")


def test_merging_is_replayed(as_if_on_a_gpu, monkeypatch, needs_triton):
    """In place, too, where an argument is written."""
    from tilesmith.ops.attn.triton import merge

    def launch(kernel, grid, *args, **named):
        as_if_on_a_gpu(lambda *addresses: None, *(x for x in (*args, *named.values()) if isinstance(x, torch.Tensor)))

    monkeypatch.setattr(merge, "launch", launch)
    out, lse = torch.randn(1, 2, 8, 16), torch.randn(1, 2, 8)
    for name in ("merge_attention", "accumulate_attention"):
        fn = declared()[name].kernel("triton").fn
        kernel = replay.Replay(fn, fn.configure.free, 0)
        for _ in range(3):
            kernel.run(out, lse, out.clone(), lse.clone())
        assert (kernel.run.__name__, kernel.refusal) == ("replay", ""), name


@pytest.fixture
def runs_launched(as_if_on_a_gpu, monkeypatch, needs_triton):
    """What a launcher of copy_runs or add_runs launches: the kernel, the grid, addresses of tensors, other arguments;
    and (op, arguments) -> the function that repeated calls with this key run."""
    from tilesmith.ops.attn.triton import runs

    launched, kernels = [], {}

    def launch(kernel, grid, *args, **named):
        tensors = [x for x in args if isinstance(x, torch.Tensor)]
        rest = kernel.__name__, grid, [x for x in args if not isinstance(x, torch.Tensor)], named
        as_if_on_a_gpu(lambda *addresses: launched.append((*rest, addresses)), *tensors)

    def kernel_of(name, *args):
        op = declared()[name]
        fn, key = op.kernel("triton").fn, (name, op._key(False, "", *args))
        if key not in kernels:
            kernels[key] = replay.Replay(fn.configure.bind(args), fn.configure.free, 0)
        return kernels[key]

    monkeypatch.setattr(runs, "launch", launch)
    return launched, kernel_of


def _views(tokens, dim, layout, dtype):
    """[2, 3, tokens, dim], in one of several orders of memory."""
    if layout == "by_token":
        return torch.randn(tokens, 2, 3, dim).to(dtype).permute(1, 2, 0, 3)
    if layout == "some_heads":
        return torch.randn(2, 5, tokens, dim).to(dtype)[:, 1:4]
    if layout == "odd":  # 16-byte lines that begin at no multiple of 16 bytes
        return torch.randn(2 * 3 * tokens * dim + 1).to(dtype)[1:].view(2, 3, tokens, dim)
    return torch.randn(2, 3, tokens, dim).to(dtype)


LAYOUTS = ("by_head", "by_token", "some_heads", "odd")


def _runs_given(name, layout, columns, way):
    """Arguments of one call, over memory of their own. way: "apart"; "in_place": the sums are written; "alone": so, of
    one tensor beside its first 0 columns."""
    a, b = (_views(90, dim, layout, torch.float32) for dim in (16, columns))
    b = a.narrow(3, 0, 0) if way == "alone" else b
    if name == "copy_runs":
        into = [_views(70, x.shape[3], "by_token", torch.float32) for x in (a, b)]
        return a, b, *into, (3, 0, 20, 40, 30, 40)
    more = [_views(50, x.shape[3], "by_token", torch.float32) for x in (a, b)]
    into = (a, b) if way != "apart" else [_views(90, x.shape[3], layout, torch.bfloat16) for x in (a, b)]
    return a, b, *more, *into, (3, 0, 20, 40, 30, 10, 0, 25, 10)


@pytest.mark.parametrize("columns", [8, 0])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(
    ("name", "way"),
    [("copy_runs", "apart"), ("add_runs", "apart"), ("add_runs", "in_place"), ("add_runs", "alone")],
)
def test_runs_are_replayed(runs_launched, monkeypatch, name, way, layout, columns):
    """With the addresses of each call, and a table of the runs that is asked for again."""
    from tilesmith.ops.attn.triton import runs

    tables, launched, kernel_of = [], *runs_launched
    monkeypatch.setattr(runs, "_kept", lambda rows, *given: tables.append(torch.tensor(rows(*given[:2]))) or tables[-1])
    for again in range(4):
        args = _runs_given(name, layout, columns, way)
        kernel = kernel_of(name, *args)
        kernel.run(*args)
        assert (kernel.run.__name__, kernel.refusal) == ("replay" if again else "_launch", "")
        expected = *(x.data_ptr() for x in args[:-1]), tables[-1].data_ptr()
        assert launched[-1][-1] == expected and len(launched) == len(tables) == again + 1
    assert len({id(table) for table in tables}) == 4


def test_a_tensor_that_two_parameters_of_runs_are_is_replayed(runs_launched):
    """As the sum that is written; where another call has two tensors there, it is launched as such."""
    launched, kernel_of = runs_launched
    for _ in range(3):
        args = _runs_given("add_runs", "by_head", 8, "in_place")
        kernel_of("add_runs", *args).run(*args)
    views = *args[:4], *(x.view(x.shape) for x in args[:2]), args[-1]
    kernel = kernel_of("add_runs", *views)
    assert kernel is kernel_of("add_runs", *args) and kernel.run.__name__ == "replay"  # one key: the memory is the same
    kernel.run(*views)
    assert launched[-1] == launched[-2]
    apart = *args[:4], *(x.clone() for x in args[:2]), args[-1]
    kernel_of("add_runs", *apart).run(*apart)
    assert (launched[-2][-2]["IN_PLACE"], launched[-1][-2]["IN_PLACE"]) == (True, False)
    assert launched[-1][-1][4:6] == tuple(x.data_ptr() for x in apart[4:6])


@pytest.mark.parametrize("name", ["copy_runs", "add_runs"])
def test_calls_of_runs_that_launch_otherwise_have_other_keys(runs_launched, name):
    """By all that a launch depends on but addresses: runs, shapes, strides, dtypes, alignment, where it writes."""
    launched, kernel_of = runs_launched
    ways = ("apart",) if name == "copy_runs" else ("apart", "in_place", "alone")
    given = [_runs_given(name, layout, columns, way) for layout in LAYOUTS for columns in (8, 4, 0) for way in ways]
    if name == "add_runs":  # memory that lies where the sums do, or alike but apart
        sums = [args for args in given if args[0] is args[4]]
        given += [(*args[:4], *map(made, args[:2]), args[-1]) for args in sums for made in (torch.detach, torch.clone)]
    given += [(*args[:-1], (0, 1, 2, 5, 6, 7)) for args in given]
    given += [(*(x.half() for x in args[:-1]), args[-1]) for args in given]
    kernels = [kernel_of(name, *args) for args in given]
    for again in range(3):
        for args, kernel in zip(given, kernels):
            kernel.run(*args)
            launched_as = launched[-1]
            kernel.fn(*args)
            assert launched[-1] == launched_as, again
    assert all(kernel.run.__name__ == "replay" for kernel in kernels)
    for flag in ("ALIGNED_A", "ALIGNED_B", "IN_PLACE")[: 2 if name == "copy_runs" else 3]:
        assert {one[-2][flag] for one in launched} == {True, False}


@pytest.mark.parametrize("name", ["attention_partial", "attention_vjp"])
def test_packed_attention_is_replayed(as_if_on_a_gpu, monkeypatch, needs_triton, name):
    """Whose queries and keys have one tensor of boundaries."""
    from tilesmith.distributed.kernels import _NOTHING
    from tilesmith.ops.attn import execute

    launched = []

    def launch(kernel, grid, *args, **named):
        launched.append(kernel.__name__)
        tensors = [x for x in (*args, *named.values()) if isinstance(x, torch.Tensor)]
        as_if_on_a_gpu(lambda *addresses: None, *tensors)

    monkeypatch.setattr(execute, "launch", launch)
    starts, op = torch.tensor([0, 100, 300], dtype=torch.int32), declared()[name]
    q, k, v, out, dout = (torch.randn(1, 2, 300, 128, dtype=torch.bfloat16) for _ in range(5))
    given = {
        **_NOTHING, **op.defaults, "q": q, "k": k, "v": v, "out": out, "dout": dout, "lse": torch.randn(1, 2, 300),
        "causal": True, "cu_seqlens_q": starts, "cu_seqlens_k": starts, "max_seqlen_q": 200, "max_seqlen_k": 200,
        "dropout_p": 0.0, "deterministic": False, "gradients_fp32": True,
        "output_mask": [True, True, True, False, False],
    }  # fmt: skip
    args = tuple(given[parameter] for parameter in op.parameters)
    with assuming(arch_named("sm90")):
        fn = op.kernel("hopper").fn
        kernel = replay.Replay(fn, fn.configure.free, 0)
        for _ in range(3):
            kernel.run(*args)
    assert (kernel.run.__name__, kernel.refusal) == ("replay", "")
    assert len(launched) == 2 * len(set(launched)) and "tiles_kernel" in launched[0]


def test_products_are_left_to_the_launcher_under_autocast(as_if_on_a_gpu):
    launcher = _products(as_if_on_a_gpu, [])
    x, weight = torch.randn(2, 2, 8), torch.randn(5, 8)
    for first, second in ((False, True), (True, False)):
        kernel, asked = replay.Replay(launcher, lambda: True, 0), []
        kernel.fn = lambda *args, asked=asked: asked.append(args) or launcher(*args)
        for on in (first, first, second, second):
            with torch.autocast("cpu", enabled=on, dtype=torch.bfloat16):
                got, want = kernel.run(x, weight, 0.5), launcher(x, weight, 0.5)
                torch.testing.assert_close(got, want, rtol=2e-2, atol=2e-2)  # of bf16; dtypes are the point
        assert len(asked) == 4, "replayed what was recorded, or recorded, under autocast"


def test_what_a_launcher_lets_go_of_is_free_while_it_is_recorded(as_if_on_a_gpu):
    kept = []

    def launcher(x):
        passing = torch.mm(x, x)
        kept.append(weakref.ref(passing))
        as_if_on_a_gpu(lambda a: None, passing)
        del passing
        assert kept[-1]() is None
        return torch.mm(x, x)

    kernel = replay.Replay(launcher, lambda: True, 0)
    for _ in range(3):
        kernel.run(torch.randn(4, 4))
    assert kernel.run.__name__ == "replay"


def test_an_argument_that_is_written_over_and_returned_is_the_next_calls(as_if_on_a_gpu):
    def launcher(saved, factor):
        return saved.mul_(factor), torch.mm(saved, saved)

    kernel = replay.Replay(launcher, lambda: True, 0)
    for _ in range(4):
        saved, factor = torch.randn(3, 3), torch.randn(())
        want = saved * factor
        scaled, square = kernel.run(saved, factor)
        assert scaled is saved and torch.equal(scaled, want) and torch.equal(square, want @ want)
    assert kernel.run.__name__ == "replay"


def test_one_tensor_as_two_arguments_is_replayed_where_it_is_one_again(as_if_on_a_gpu):
    asked = []

    def launcher(a, b, c):
        asked.append((a, b, c))
        return torch.mm(a, b) + torch.mm(b, c)

    kernel = replay.Replay(launcher, lambda: True, 0)
    one, two, three = (torch.randn(3, 3) for _ in range(3))
    for again in range(4):
        assert torch.equal(kernel.run(one, two, two), one @ two + two @ two)
        assert len(asked) == min(again + 1, 2)
    assert kernel.run.__name__ == "replay"
    assert torch.equal(kernel.run(one, two, three), one @ two + two @ three) and len(asked) == 3
    assert torch.equal(kernel.run(two, one, one), two @ one + one @ one) and len(asked) == 3
    assert torch.equal(kernel.run(one, one, one), one @ one + one @ one)


@pytest.mark.parametrize("cause", ["value", "noise", "stranger", "bits"])
def test_what_cannot_be_repeated_is_not(as_if_on_a_gpu, cause):
    stranger = torch.ones(4, 4)

    def launcher(x):
        if cause == "value":
            return torch.mm(x, x) if x.sum().item() > 0 else torch.mm(x, -x)
        if cause == "noise":
            return torch.mm(x, torch.randn(4, 4))
        if cause == "bits":
            return torch.mm(x, x) + torch.clone(x.view(torch.int32))
        return torch.mm(x, stranger)

    kernel = replay.Replay(launcher, lambda: True, 0)
    for sign in (1, 1, -1):
        kernel.run(sign * torch.ones(4, 4))
    assert kernel.run.__name__ == "_launch" and kernel.refusal in kernel.told()[0]


def test_explain_tells_whether_a_call_that_was_made_before_is_replayed(as_if_on_a_gpu):
    kernel = replay.Replay(lambda x: torch.mm(x, x), lambda: True, 0)
    x, op = torch.ones(3, 3), declared()["rms_norm"]
    args = op.bind((x,), {})
    op._recent[op._key(False, "", *args)] = kernel
    try:
        told = []
        for _ in range(3):
            told.append([line for line in explain("rms_norm", x).note.split("; ") if "replayed" in line])
            kernel.run(x)
    finally:
        op._recent.clear()
    assert told == [[], [], ["replayed: repeated calls allocate and launch, and decide nothing"]]
    assert "replayed" not in explain("rms_norm", torch.ones(4, 3)).note


needs_hopper = pytest.mark.skipif(not HOPPER, reason="needs a Hopper GPU")


@pytest.mark.skipif(not ON_GPU, reason="needs a GPU")
def test_calls_of_a_compiled_graph_are_replayed():
    """There torch hands reshapes over whole, which eager calls show as views."""
    x = torch.randn(3, 8192, 256, device="cuda", requires_grad=True)
    compiled = torch.compile(lambda x: ops.rms_norm(x), backend="aot_eager", dynamic=False)
    op = declared()["rms_norm"]
    op._recent.clear()
    for _ in range(4):
        compiled(x)
    assert {ready.run.__name__ for ready in op._recent.values()} == {"replay"}


@needs_hopper
def test_every_launch_has_a_counter_of_its_own():
    x = torch.randn(400, 36_864, device="cuda") * torch.arange(1, 401, device="cuda")[:, None]
    wanted = torch.nn.functional.rms_norm(x, x.shape[1:], eps=1e-6)

    def norm():
        with use(rms_norm="hopper_persistent"):
            return ops.rms_norm(x)

    for _ in range(4):  # the third call is a replay
        torch.testing.assert_close(norm(), wanted)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = [norm(), norm()]
    for _ in range(3):
        found[0].zero_(), found[1].zero_()
        graph.replay()
        torch.testing.assert_close(found, [wanted, wanted])
    streams = [torch.cuda.Stream() for _ in range(3)]
    for stream in streams:
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            found += [norm() for _ in range(5)]
    torch.cuda.synchronize()
    torch.testing.assert_close(found, [wanted] * 17)


def _repeated(call):
    """What `call` gives twenty times, in three replays of a graph, and ten times on each of three streams at once."""
    found = [call() for _ in range(20)]
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = call()
    for _ in range(3):
        captured[0].zero_()
        graph.replay()
        found.append([x.clone() for x in captured])
    streams = [torch.cuda.Stream() for _ in range(3)]
    for stream in streams:
        stream.wait_stream(torch.cuda.current_stream())
    for _ in range(10):
        for stream in streams:
            with torch.cuda.stream(stream):
                found.append(call())
    torch.cuda.synchronize()
    return found


@needs_hopper
@pytest.mark.parametrize(
    ("heads", "kv_heads", "tokens", "dim", "causal"),
    [(3, 3, 1200, 128, False), (92, 4, 130, 128, False), (3, 3, 4000, 128, True), (3, 3, 1200, 64, False)],
)
def test_shares_of_a_tile_are_put_together_in_one_order(heads, kv_heads, tokens, dim, causal):
    """Whoever comes last for it, and whatever else runs."""
    q = torch.randn(1, heads, tokens, dim, device="cuda", dtype=torch.bfloat16)
    k, v = torch.randn(2, 1, kv_heads, 4000, dim, device="cuda", dtype=torch.bfloat16)
    args = q, k, v, ops.Mask(causal=causal)
    attend = functools.partial(ops.attention, *args)
    with use(attention="hopper"):
        assert "equal runs" in explain("attention", *args).note
        wanted, found = attend(), _repeated(attend)
    for out, lse in found:
        assert torch.equal(out, wanted[0]) and torch.equal(lse, wanted[1])


@needs_hopper
@pytest.mark.parametrize(("heads", "kv_heads", "dim"), [(16, 16, 128), (16, 4, 128), (16, 16, 64)])
def test_gradients_of_tiles_that_start_apart_are_added_in_one_order(heads, kv_heads, dim):
    """Whatever else runs, though no launch asks that all of its programs run at once."""
    op = declared()["attention"]
    q, dout = torch.randn(2, 1, heads, 3000, dim, device="cuda", dtype=torch.bfloat16)
    k, v = torch.randn(2, 1, kv_heads, 2900, dim, device="cuda", dtype=torch.bfloat16)
    args = op.bind((q, k, v), {"deterministic": True})
    with use(attention="hopper"):
        out, lse = ops.attention(q, k, v, deterministic=True)
        named = dict(
            zip(op.parameters, args), dout=dout, out=out, lse=lse, output_mask=(True, True, True, False, False)
        )
        backward = functools.partial(op.vjp, *op.vjp.bind((), {"dlse": None, **named}))
        wanted, found = backward(), _repeated(backward)
    for gradients in found:
        assert all(torch.equal(a, b) for a, b in zip(gradients[:3], wanted))


PART_OF_THE_DEVICE = """
import torch
from torch.cuda.green_contexts import GreenContext
from tilesmith import ops, use
from tilesmith.engine import ops as declared
op = declared()["attention"]
q, k, v, dout = torch.randn(4, 1, 16, 3000, 128, device="cuda", dtype=torch.bfloat16)
def gradients(causal):
    args = op.bind((q, k, v), {"causal": causal, "deterministic": True})
    out, lse = op(*args)
    named = dict(zip(op.parameters, args), dout=dout, out=out, lse=lse, output_mask=(True, True, True, False, False))
    return op.vjp(dlse=None, **named)  # in this thread, whose context is a part
with use(attention="hopper"):
    wanted = [gradients(causal) for causal in (False, True)]
    torch.cuda.synchronize()
    part = GreenContext.create(num_sms=32, device_id=0)
    part.set_context()
    found = [gradients(causal) for causal in (False, True)]
    torch.cuda.synchronize()
    part.pop_context()
print(all(torch.equal(a, b) for x, y in zip(found, wanted) for a, b in zip(x[:3], y)))
"""


@needs_hopper
def test_ordered_gradients_are_made_on_a_part_of_the_device():
    """Where more programs are launched than run at a time, none waits for the tile of one that does not run."""
    pytest.importorskip("torch.cuda.green_contexts")
    command = [sys.executable, "-c", PART_OF_THE_DEVICE]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=100)
    assert done.stdout.strip() == "True"
