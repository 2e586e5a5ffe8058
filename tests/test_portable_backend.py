"""Portable kernels as a backend of the ops: values, gradients and reasons on a CPU, in the interpreter and on Vulkan.

The harness of tests/test_ops.py runs them on every small case in fp32; here are dtypes, launchers and the choice.
"""

from dataclasses import replace

import pytest
import torch

from codegen import tools
from tilesmith import ops, runtime
from tilesmith.codegen import metal
from tilesmith.device import philox, portable
from tilesmith.engine import cases, use
from tilesmith.engine import ops as declared
from tilesmith.engine.backends import missing as absent
from tilesmith.hardware.limits import limits_of
from tilesmith.settings import settings
from tilesmith.validate import check

CPU = torch.device("cpu")
SERVED = {
    "add_layer_norm": ("small", "strided", "fp32_residual", "swept"),
    "add_rms_norm": ("small", "part", "fp32_residual_and_vectors", "llama_offset"),
    "attention": ("plain", "causal", "tokens_first", "causal_more_queries"),
    "geglu": ("small", "halves", "tails", "erf_tails"),
    "layer_norm": ("small", "heads", "no_vectors", "fp32_vectors"),
    "norm_linear": ("rms", "layer_several_tiles", "rms_plain", "rms_offset"),
    "rms_norm": ("three_dims", "transposed", "llama", "llama_fp32_weight"),
    "rms_norm_rope": ("plain", "row_interleaved", "packed", "llama_row"),
    "softmax": ("small", "masked", "causal_more_keys", "heads"),
    "softmax_dropout": ("small", "causal_heads", "swept", "causal", "p_half", "causal_more_rows"),
    "swiglu": ("small", "halves", "strided_three_dims", "scalar"),
}


def test_every_portable_op_is_listed():
    named = [name for name, op in declared().items() if "portable" in op.backends() and not name.endswith("_vjp")]
    assert sorted(SERVED) == sorted(named)


def of(name: str, case: str):
    return next(c for c in cases(name) if c.name == case)


RUNS = [(n, c, d) for n, names in SERVED.items() for c in names for d in of(n, c).dtypes]


@pytest.mark.parametrize(("name", "case", "dtype"), RUNS, ids=lambda x: str(x).removeprefix("torch."))
def test_values_and_gradients(name, case, dtype):
    result = check(declared()[name], "portable", of(name, case), CPU, dtype)
    assert result.passed, result.message
    assert not result.message, "a case that is served"


def test_attention_of_scores_that_are_no_numbers():
    q, k, v = torch.randn(3, 1, 1, 6, 16, generator=torch.Generator().manual_seed(0)).unbind()
    q[0, 0, 2], q[0, 0, 4, 0] = float("nan"), float("inf")
    wanted = declared()["attention"](q, k, v)
    with use(attention="portable"):
        torch.testing.assert_close(declared()["attention"](q, k, v), wanted, equal_nan=True)
    assert wanted[1][0, 0, 2].isnan() and wanted[1][0, 0, 4] == float("inf")


@pytest.mark.parametrize(
    ("name", "case", "module"), [("attention", "causal", "attn"), ("norm_linear", "layer_several_tiles", "gemm")]
)
def test_more_than_a_grid_holds_is_launched_in_parts(name, case, module, monkeypatch):
    """Of 65,535 workgroups along an axis, here one."""
    launches, run = [], portable.launch
    monkeypatch.setattr(f"tilesmith.ops.{module}.portable.MAX_GROUPS", 1)
    monkeypatch.setattr(portable, "launch", lambda ir, grid, *rest: (launches.append(grid), run(ir, grid, *rest)))
    result = check(declared()[name], "portable", of(name, case), CPU, torch.float32)
    assert result.passed and not result.message, result.message
    axis = 2 if name == "attention" else 1
    assert len(launches) > 1 and all(grid[axis] == 1 for grid in launches)


@pytest.fixture
def on(monkeypatch, missing):
    """on(backend): portable kernels of this test run there."""

    def choose(backend: str) -> None:
        reason = runtime.missing(backend)
        if reason is not None:
            missing(f"{backend}: {reason}")
        monkeypatch.setattr(runtime, "settings", lambda: replace(settings(), portable=backend))

    return choose


ON_DEVICES = [
    *(
        ("vulkan", name, case, dtype)
        for name, names in SERVED.items()
        for case, dtype in zip(names, (torch.float32, torch.float16))
    ),
    *(("webgpu", name, names[0], torch.float32) for name, names in SERVED.items()),
]


@pytest.mark.parametrize(("backend", "name", "case", "dtype"), ON_DEVICES, ids=lambda x: str(x).removeprefix("torch."))
def test_on_devices(on, backend, name, case, dtype):
    on(backend)
    result = check(declared()[name], "portable", of(name, case), CPU, dtype)
    assert result.passed, result.message


@pytest.mark.parametrize("backend", ["vulkan", "webgpu"])
def test_a_device_without_bfloat16_says_so(on, backend):
    on(backend)
    x = torch.randn(3, 8, dtype=torch.bfloat16)
    with (
        use(swiglu="portable"),
        pytest.raises(NotImplementedError, match=f"gate has dtype torch.bfloat16; {backend}: "),
    ):
        ops.swiglu(x, x)


@pytest.mark.parametrize("name", SERVED)
def test_what_the_ops_launch_prints_as_metal(monkeypatch, missing, name):
    if tools.cpp() is None:
        missing("no C++ compiler")
    built, run = {}, portable.launch
    monkeypatch.setattr(portable, "launch", lambda ir, *rest: (built.update({ir.name: ir}), run(ir, *rest)))
    assert check(declared()[name], "portable", of(name, SERVED[name][0]), CPU, torch.float16).passed
    assert built
    for ir in built.values():
        assert tools.compile_metal(metal.generate(ir, limits_of("metal"))) == ""


def test_dropout_draws_what_every_kernel_draws():
    seed, x = torch.tensor([-987654321, 2**40 + 3]), torch.randn(6, 50)
    with use(softmax_dropout="portable"):
        y = ops.softmax_dropout(x, 0.4, seed=seed)
    assert torch.equal(y != 0, philox.keep_mask(seed, (6, 50), 0.4))


def test_a_cpu_is_served_only_when_asked():
    x = torch.randn(3, 8)
    choice = declared()["swiglu"].explain(x, x)
    assert choice.kernel.backend == "reference"
    assert "not portable: the tensors are on cpu; portable kernels serve them only when pinned" in str(choice)
    with use(swiglu="portable"):
        assert declared()["swiglu"].explain(x, x).kernel.backend == "portable"


@pytest.mark.parametrize(
    ("device", "triton", "reason"),
    [
        ("cuda", None, "Triton reaches this GPU; portable kernels serve it only when pinned"),
        ("cuda", "no Triton", None),
        ("mps", "no Triton", None),
        ("xpu", None, "the tensors are on xpu; portable kernels run on cuda, mps and cpu"),
    ],
)
def test_where_nobody_asked(monkeypatch, device, triton, reason):
    monkeypatch.setattr("tilesmith.device.portable.triton_missing", lambda: triton)
    monkeypatch.setattr(runtime, "missing", lambda backend: None)
    assert absent("portable", torch.device(device)) == reason


def test_a_launcher_that_is_absent_is_the_reason(monkeypatch):
    monkeypatch.setattr(runtime, "missing", lambda backend: "no compiler")
    assert absent("portable", torch.device("mps")) == "metal: no compiler"


@pytest.mark.parametrize(
    ("call", "reason"),
    [
        (lambda x: ops.swiglu(x.double(), x.double()), "gate has dtype torch.float64; portable kernels hold float32"),
        (lambda x: ops.rms_norm(x, x[0].double()), "weight has dtype torch.float64"),
        (lambda x: ops.rms_norm_rope(x[None, None], None, None, None, x[:, :1], x[:, :1]), "2 of 6 features turn"),
        (lambda x: ops.attention(*[x[None, None]] * 3), "the head dim is 6; multiples of 4 up to 256"),
        (lambda x: ops.attention(*[x[None, None, :, :4]] * 3, ops.Mask(causal=True, window=2)), "window: only causal"),
        (lambda x: ops.attention(*[x[None, None, :, :4]] * 3, score=ops.Score(softcap=2.0)), "softcap: scores are not"),
        (lambda x: ops.attention(*[x[None, None, :, :4]] * 3, sinks=x[0, :1]), "sinks: nothing is added"),
    ],
)
def test_what_is_not_served_is_refused_in_words(call, reason):
    pins = dict.fromkeys(("swiglu", "rms_norm", "rms_norm_rope", "attention"), "portable")
    with use(**pins), pytest.raises(NotImplementedError, match=reason):
        call(torch.randn(5, 6))


def test_rows_are_read_where_they_lie(monkeypatch):
    """Halves of a packed projection are no copies."""
    given = []
    monkeypatch.setattr(portable, "launch", lambda ir, grid, tensors, scalars: given.append((tensors, scalars)))
    gate, up = torch.randn(3, 32).chunk(2, -1)
    with use(swiglu="portable"):
        ops.swiglu(gate, up)
    ((tensors, scalars),) = given
    assert tensors["gate"].data_ptr() == gate.data_ptr() and tensors["up"].data_ptr() == up.data_ptr()
    assert scalars == {"rows": 3, "gate_step": 8, "up_step": 8}


def test_one_kernel_serves_contiguous_gates_of_all_shapes():
    from tilesmith.kernels.fused_ops import create_swiglu_kernel

    with use(swiglu="portable"):
        ops.swiglu(*torch.randn(2, 4, 8))
        built = create_swiglu_kernel.cache_info().misses
        ops.swiglu(*torch.randn(2, 3, 5, 4))
    assert create_swiglu_kernel.cache_info().misses == built


@pytest.mark.parametrize(("name", "flags"), [("swiglu", ()), ("geglu", ("tanh",)), ("geglu", ("none",))])
def test_gates_as_large_as_their_type_allows(name, flags):
    """Where the sigmoid of a gate is 0 in fp32, so are the gate's share and its slope; -inf gives NaN as elsewhere."""
    gate = torch.tensor([-90.0, -110.0, -1e4, -1e12, -1e18, 1e18, float("-inf"), float("inf"), float("nan")])

    def of(pin: str):
        given = [x.clone().requires_grad_() for x in (gate, torch.ones_like(gate))]
        with use(**dict.fromkeys((name, f"{name}_vjp"), pin)):
            out = declared()[name](*given, *flags)
            return out, *torch.autograd.grad(out, given, torch.ones_like(out))

    for got, wanted in zip(of("portable"), of("reference")):
        finite = gate.isfinite()
        torch.testing.assert_close(got[finite], wanted[finite], rtol=1e-6, atol=1e-30)
        assert torch.equal(got[-3:-1].isnan(), wanted[-3:-1].isnan()) and got[-1].isnan()
