"""The kernel language: what it accepts and refuses, what the interpreter computes and catches, JSON, and its costs."""

from __future__ import annotations

import contextlib
import copy
import inspect
import json
import os
import pickle
import subprocess
import sys

import numpy as np
import pytest

from clock import cheapest, cpu_seconds
from codegen.sample import without
from codegen.samples import SAMPLES, create_matmul, matmul_sample
from tilesmith.codegen import (
    In,
    InOut,
    KernelError,
    KernelIR,
    Out,
    Scalar,
    barrier,
    bf16,
    build,
    cuda,
    f16,
    f32,
    fragment,
    from_json,
    i32,
    i32x4,
    inline,
    interpret,
    load_fragment,
    local,
    metal,
    select,
    shared,
    spirv,
    subgroup_barrier,
    tid,
    to_json,
    type_named,
    u32,
    unroll,
    verify,
    wgsl,
)
from tilesmith.codegen.interpreter import DivergentFlow, Fault, OutOfBounds, Race, Undefined
from tilesmith.codegen.nodes import Assign, Barrier, Binary, Const, If, Load, SubgroupBarrier, Var, walk
from tilesmith.kernels import KERNELS
from tilesmith.kernels.flash_attention import TunedConfigs, create_flash_attention_kernel


@pytest.fixture(params=SAMPLES)
def sample(request):
    return SAMPLES[request.param]()


def launch(sample, ir: KernelIR | None = None, **tensors) -> dict[str, np.ndarray]:
    copies = {name: t.copy() for name, t in (sample.tensors | tensors).items()}
    interpret(ir or sample.ir, sample.grid, copies, sample.scalars)
    return copies


def test_the_interpreter_computes_what_numpy_does(sample):
    for size in sample.subgroup_sizes:
        tensors = {name: t.copy() for name, t in sample.tensors.items()}
        interpret(sample.ir, sample.grid, tensors, sample.scalars, subgroup_size=size)
        for name, wanted in sample.results.items():
            error = np.abs(tensors[name].reshape(wanted.shape).astype(np.float64) - wanted.astype(np.float64)).max()
            assert error <= sample.tolerance * max(1.0, np.abs(wanted.astype(np.float64)).max()), (name, error)


def test_json_keeps_the_kernel(sample):
    again = from_json(to_json(sample.ir))
    assert again == sample.ir
    assert hash(again) == hash(sample.ir)
    assert repr(again) == repr(sample.ir)


def test_json_is_verified():
    document = json.loads(to_json(SAMPLES["rms_norm"]().ir))
    with pytest.raises(KernelError, match="not the JSON of a KernelIR"):
        from_json("[1, 2]")
    with pytest.raises(KernelError, match="version 0"):
        from_json(json.dumps(document | {"version": 0}))
    with pytest.raises(KernelError, match="x is not an array or buffer"):
        from_json(json.dumps(document | {"buffers": {"tuple": document["buffers"]["tuple"][1:]}}))
    with pytest.raises(KernelError, match="'f33' is not a type"):
        from_json(to_json(SAMPLES["rms_norm"]().ir).replace('"f32"', '"f33"'))


@pytest.mark.parametrize("name", ["rms_norm", "vectors", "halves", "matmul", "matmul_8", "softmax", "reserved_names"])
def test_every_removed_barrier_is_a_race(name):
    made = SAMPLES[name]()
    count = sum(isinstance(s, Barrier) for s in walk(made.ir.body))
    assert count
    for k in range(count):
        with pytest.raises(
            (Race, Undefined), match=f"samples_[a-z]+.py:[0-9]+: {made.ir.name}: (race|.* is read before)"
        ):
            launch(made, without(made.ir, Barrier, k))


@pytest.mark.parametrize("name", ["turned", "rounded"])
def test_every_removed_subgroup_barrier_is_a_race(name):
    made = SAMPLES[name]()
    for k in range(sum(isinstance(s, SubgroupBarrier) for s in walk(made.ir.body))):
        with pytest.raises((Race, Undefined), match=f"{made.ir.name}: (race|.* is read before)"):
            launch(made, without(made.ir, SubgroupBarrier, k))


def test_a_subgroup_waits_for_itself_alone():
    def across(y: Out[u32]):
        stage = shared(u32, 64)
        stage[tid(0)] = tid(0)
        subgroup_barrier()
        y[tid(0)] = stage[63 - tid(0)]

    with pytest.raises(Race, match=r"race: thread 0 reads stage\[63\], touched by several threads"):
        fault(across, tensors={"y": np.zeros(64, np.uint32)}, threads=64)


def test_buffers_that_are_too_short():
    made = SAMPLES["rms_norm"]()
    with pytest.raises(OutOfBounds, match=r"out of bounds: x\[\d+\]; x has 384 elements"):
        launch(made, x=made.tensors["x"].reshape(-1)[:-1].copy())
    with pytest.raises(OutOfBounds, match=r"out of bounds: y\["):
        launch(made, y=np.zeros(10, np.float32))


def test_arguments_of_a_launch():
    made = SAMPLES["halves"]()
    with pytest.raises(KernelError, match="takes the tensors x, y, z; got x"):
        interpret(made.ir, made.grid, {"x": made.tensors["x"]}, {})
    with pytest.raises(KernelError, match="x is a buffer of f16x4: wanted a NumPy array of float16, got float32"):
        launch(made, x=made.tensors["x"].astype(np.float32))
    with pytest.raises(KernelError, match="x has 127 numbers, not a multiple of 4"):
        launch(made, x=made.tensors["x"].reshape(-1)[:-1].copy())
    with pytest.raises(KernelError, match="y must be contiguous"):
        interpret(made.ir, made.grid, made.tensors | {"y": np.zeros((8, 32), np.float16).T}, {})
    with pytest.raises(KernelError, match="takes the scalars columns, eps; got columns"):
        SAMPLES["rms_norm"]().ir.pack_scalars({"columns": 3})
    with pytest.raises(KernelError, match="columns is a u32, which does not hold -1"):
        SAMPLES["rms_norm"]().ir.pack_scalars({"columns": -1, "eps": 1.0})
    assert SAMPLES["rms_norm"]().ir.pack_scalars({"columns": 3, "eps": 1.0}).hex() == "03000000" + "0000803f" + "00" * 8


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"scalars": {"n": 2.7, "m": 0, "s": 1.0}}, "copied: n is a u32, got 2.7; pass a whole number"),
        ({"scalars": {"n": True, "m": 0, "s": 1.0}}, "copied: n is a u32, got True; pass a whole number"),
        ({"scalars": {"n": -1, "m": 0, "s": 1.0}}, "copied: n is a u32, which does not hold -1"),
        ({"scalars": {"n": 4, "m": 2**31, "s": 1.0}}, "copied: m is a i32, which does not hold 2147483648"),
        ({"scalars": {"n": 4, "m": 0, "s": 1e300}}, r"copied: s is a f32, which does not hold 1e\+300"),
        ({"scalars": {"n": 4, "m": 0, "s": "1"}}, "copied: s is a f32, got '1'; pass a number"),
        ({"scalars": [4]}, "copied: scalars must be a mapping from names to scalars, got list"),
        ({"grid": (-1, 1, 1)}, r"copied: grid must be three whole numbers of at least 0, got \(-1, 1, 1\)"),
        ({"grid": (1, 1)}, "copied: grid must be three whole numbers"),
        ({"grid": (1, 1, 1, 1)}, "copied: grid must be three whole numbers"),
        ({"grid": 1}, "copied: grid must be three whole numbers"),
        ({"subgroup_size": 0}, "subgroup_size must be one of 1, 2, 4, .*, got 0"),
    ],
)
def test_numbers_of_a_launch(change, message):
    """What NumPy would cut, wrap or take for nothing to do, and what it would say in its own words."""

    def copied(x: In[f32], y: Out[f32], n: Scalar[u32], m: Scalar[i32], s: Scalar[f32]):
        if tid(0) < n:
            y[tid(0)] = x[tid(0)] * s + f32(m)

    ir, x, y = build(copied, (4, 1, 1)), np.ones(4, np.float32), np.zeros(4, np.float32)
    given = {"grid": (1, 1, 1), "scalars": {"n": 4, "m": 0, "s": 1.0}} | change
    grid, scalars = given.pop("grid"), given.pop("scalars")
    with pytest.raises((KernelError, TypeError), match=message):
        interpret(ir, grid, {"x": x, "y": y}, scalars, **given)
    assert not y.any()
    interpret(ir, (np.int64(1), 1, 1), {"x": x, "y": y}, {"n": np.uint8(4), "m": -1, "s": np.float16(3.0)})
    assert (y == 2).all()
    with pytest.raises(KernelError, match="copied: x and y overlap in memory, and one of them is written"):
        interpret(ir, (1, 1, 1), {"x": y, "y": y}, {"n": 4, "m": 0, "s": 1.0})


def test_what_is_no_kernel():
    def kernel(y: Out[f32]):
        y[tid(0)] = 0.0

    for call in (cuda.generate, metal.generate, wgsl.generate, spirv.generate, to_json):
        with pytest.raises(TypeError, match="ir must be a KernelIR, got function; make one of a kernel by `build`"):
            call(kernel)
    with pytest.raises(TypeError, match="interpret: ir must be a KernelIR, got function"):
        interpret(kernel, (1, 1, 1), {"y": np.zeros(1, np.float32)})
    with pytest.raises(
        TypeError, match="limits must be Limits, got 'webgpu'; get them from tilesmith.hardware.limits_of"
    ):
        wgsl.generate(build(kernel, (1, 1, 1)), limits="webgpu")
    with pytest.raises(KernelError, match="build: a kernel is a plain Python function, got int"):
        build(3, (1, 1, 1))
    with pytest.raises(KernelError, match=r"test_codegen.py:\d+: a kernel is a plain `def`"):
        _ = [build(lambda x: None, (1, 1, 1)), None]
    with pytest.raises(KernelError, match="kernel: a workgroup is three positive ints, got 32"):
        build(kernel, 32)
    with pytest.raises(KernelError, match="arch must be like 'sm_80' or 'sm_90', got 90"):
        cuda.ptx(build(kernel, (1, 1, 1)), 90)


def fault(kernel, threads=32, tensors=None, scalars=None, subgroup_size=None, grid=(1, 1, 1)):
    interpret(build(kernel, (threads, 1, 1), subgroup_size=subgroup_size), grid, tensors or {}, scalars or {})


def test_what_gpus_leave_undefined():
    out = {"y": np.zeros(64, np.uint32)}

    def never_written(y: Out[u32]):
        a = shared(u32, 32)
        y[tid(0)] = a[tid(0)]

    def by_zero(y: Out[u32]):
        y[tid(0)] = 7 // tid(0)

    def wide_shift(y: Out[u32]):
        y[tid(0)] = 1 << tid(0) * 2

    def overflow(y: Out[u32], n: Scalar[i32]):
        y[tid(0)] = u32(n * 2)

    def no_size(y: Out[u32], n: Scalar[i32]):
        y[tid(0)] = u32(abs(n))

    def negative(y: Out[u32]):
        y[tid(0)] = u32(f32(tid(0)) - 3.0)

    def one_place(y: Out[u32]):
        y[0] = tid(0)

    def across_groups(y: InOut[u32]):
        barrier()
        y[tid(0)] += 1

    def endless(y: Out[u32], n: Scalar[u32]):
        for i in range(0, 10, n):
            y[tid(0)] = i

    def misaligned(x: In[f16], n: Scalar[u32]):
        a = fragment("a", f16)
        load_fragment(a, x, n, 16)

    for kernel, kind, scalars, message in [
        (never_written, Undefined, {}, r"a\[0\] is read before it is written"),
        (by_zero, Undefined, {}, "// by zero"),
        (wide_shift, Undefined, {}, "<< by more than 31"),
        (overflow, Undefined, {"n": 2**30}, "i32 overflow"),
        (no_size, Undefined, {"n": -(2**31)}, "i32 overflow"),
        (negative, Undefined, {}, "-3.0 does not fit u32"),
        (one_place, Race, {}, r"thread 0 writes y\[0\], touched by thread"),
        (endless, Undefined, {"n": 0}, "the loop's step is not positive"),
    ]:
        with pytest.raises(kind, match=f"test_codegen.py:[0-9]+: {kernel.__name__}: .*{message}"):
            fault(kernel, tensors=out, scalars=scalars)
    fault(across_groups, tensors=out)
    with pytest.raises(Race, match=r"race: thread \d+ writes y\[0\], touched by .* in the same launch"):
        fault(across_groups, tensors=out, grid=(2, 1, 1))
    half = {"x": np.zeros(512, np.float16)}
    fault(misaligned, tensors=half, scalars={"n": 8})
    with pytest.raises(OutOfBounds, match="offset 4 into x is not a multiple of 8"):
        fault(misaligned, tensors=half, scalars={"n": 4})


def test_divergence_that_no_analysis_saw():
    made = SAMPLES["rms_norm"]()
    where = Binary(type_named("bool"), "<", Var(u32, "t"), Const(u32, 5))
    first = next(k for k, s in enumerate(made.ir.body) if isinstance(s, Barrier))
    body = (*made.ir.body[:first], If(1, where, (Barrier(1),), ()), *made.ir.body[first + 1 :])
    broken = KernelIR(**{name: getattr(made.ir, name) for name in KernelIR._names} | {"body": body})
    with pytest.raises(DivergentFlow, match="only some threads of the workgroup reach"):
        launch(made, broken)
    with pytest.raises(
        KernelError, match=r"barrier\(\) under the condition of line 1, which differs between the threads"
    ):
        verify(broken)
    assert issubclass(DivergentFlow, Fault)


def test_registers_and_memory_agree():
    for tile in (16, 8):
        made = matmul_sample(tile)
        results = [launch(made, create_matmul(tile, registers=r))["out"] for r in (False, True)]
        assert np.array_equal(*results)


@inline
def _twice(x, times):
    for _ in unroll(times):
        x = x + x
    return x


def test_inline_functions_and_lists():
    def kernel(x: In[u32], y: Out[u32], *, unused=None):
        pass

    with pytest.raises(KernelError, match="plain positional arguments"):
        build(kernel, (4, 1, 1))

    def tables(y: Out[u32]):
        arrays = [local(u32, 2) for _ in range(3)]
        for k, a in enumerate(arrays):
            a[0] = _twice(tid(0) + k, times=2)
        first, second = arrays[0][0], arrays[1][0]
        first, second = second, first
        y[tid(0)] = first * 100 + second + arrays[2][0] if tid(0) > 0 else select(True, 5, 6)

    y = np.zeros(4, np.uint32)
    interpret(build(tables, (4, 1, 1)), (1, 1, 1), {"y": y})
    t = np.arange(4)
    assert np.array_equal(y, np.where(t > 0, 4 * (t + 1) * 100 + 4 * t + 4 * (t + 2), 5))


@pytest.mark.parametrize("biased", [False, True])
def test_arguments_may_be_left_out(biased):
    def scale(x: In[f32], bias: In[f32] if biased else None, y: Out[f32], by: Scalar[f32] if biased else None):
        v = x[tid(0)]
        if biased and bias is not None and by is not None:
            v = v * by + bias[tid(0)]
        y[tid(0)] = v

    ir = build(scale, (2, 1, 1))
    assert [b.name for b in ir.buffers] == (["x", "bias", "y"] if biased else ["x", "y"])
    x, y = np.array([1, 2], np.float32), np.zeros(2, np.float32)
    more = {"bias": x} if biased else {}
    interpret(ir, (1, 1, 1), {"x": x, "y": y, **more}, {"by": 3.0} if biased else {})
    np.testing.assert_array_equal(y, x * 4 if biased else x)


def test_loop_bounds_are_read_once():
    def moving(y: Out[u32]):
        n, total = tid(0) + 3, u32(0)
        for _ in range(n):
            n = n + 1
            total += n
        y[tid(0)] = total

    y = np.zeros(4, np.uint32)
    interpret(build(moving, (4, 1, 1)), (1, 1, 1), {"y": y})
    assert y.tolist() == [sum(range(n + 1, 2 * n + 1)) for n in range(3, 7)]


def test_nodes_are_frozen():
    node = Load(f32, "x", Const(u32, 1))
    with pytest.raises(AttributeError, match="cannot assign to field 'array'"):
        node.array = "y"
    with pytest.raises(TypeError, match="Load takes type, array, index"):
        Load(f32, "x")
    assert node == Load(f32, array="x", index=Const(u32, 1)) != Load(f32, "y", Const(u32, 1))
    assert Assign(1, "x", node).value is node


def test_copies_are_equal_and_print_the_same():
    ir = SAMPLES["rms_norm"]().ir
    printed = wgsl.generate(ir)
    for copied in (copy.deepcopy(ir), pickle.loads(pickle.dumps(ir))):
        assert copied == ir
        assert wgsl.generate(copied) == printed


def print_everywhere(ir: KernelIR) -> None:
    """All targets that accept the kernel."""
    for target in (cuda, metal, spirv, wgsl):
        with contextlib.suppress(KernelError):
            target.generate(ir)


def test_costs(sample):
    """20 ms for all targets."""
    assert cheapest(lambda: cpu_seconds(lambda: print_everywhere(sample.ir)), 0.020) <= 0.020


def catalogue():
    """Every pre-built kernel for rows of 4096, and every preset of attention."""
    given = {"hidden_dim": 4096, "head_dim": 128, "max_seq_len": 8192}
    for name, entry in KERNELS.items():
        if name != "flash_attention":
            fields = {k: v for k, v in given.items() if k in entry.config.__dataclass_fields__}
            yield pytest.param(entry.create, entry.config(**fields), id=name)
    for name, preset in vars(TunedConfigs).items():
        if not name.startswith("_"):
            yield pytest.param(create_flash_attention_kernel, preset, id=name)


@pytest.mark.parametrize(("create", "config"), list(catalogue()))
def test_costs_of_the_catalogue(create, config):
    """20 ms for all targets of every pre-built kernel."""

    def cost() -> float:
        ir = from_json(to_json(create(config)))  # one that no printer has seen
        return cpu_seconds(lambda: print_everywhere(ir))

    assert cheapest(cost, 0.020) <= 0.020


def test_importing_is_quick_and_brings_nothing(tmp_path):
    code = (
        "import sys, time; start = time.process_time(); import tilesmith.codegen; "
        "from tilesmith.codegen import cuda, metal, spirv, wgsl; print(time.process_time() - start); "
        "print([m for m in ('torch', 'triton', 'numpy') if m in sys.modules])"
    )
    env = {k: v for k, v in os.environ.items() if k != "PYTHONDONTWRITEBYTECODE"} | {
        "PYTHONPYCACHEPREFIX": str(tmp_path)
    }

    def cost() -> float:
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=env, check=True)
        elapsed, present = done.stdout.splitlines()
        assert present == "[]"
        return float(elapsed)

    assert cheapest(cost, 0.050) <= 0.050


def test_the_guide_of_the_package_is_true(tmp_path, monkeypatch):
    import tilesmith.codegen

    paragraphs = tilesmith.codegen.__doc__.split("\n\n")
    code = "\n\n".join(p for p in paragraphs if p.startswith("    "))
    imports = "from tilesmith.codegen import cuda, interpret, metal, spirv, wgsl\nimport numpy as np\n"
    inputs = "rows = 3\nx, w = np.ones((3, 777), np.float32) * 2, np.ones(777, np.float32)\ny = np.zeros_like(x)\n"
    (tmp_path / "guide.py").write_text(imports + inputs + inspect.cleandoc("\n" + code))
    monkeypatch.syspath_prepend(tmp_path)
    import guide

    assert np.allclose(guide.y, 1.0, atol=1e-5)
    assert guide.ir.shared_bytes == 512


def test_literals_are_folded():
    def literals(y: Out[u32], z: Out[f32]):
        n: i32 = -(2**31)
        y[0] = (~u32(385) << 30) + (u32(7) - 9) + u32(i32(-4)) + u32(n)
        z[0] = f32(1.5) * f32(3) / -f32(2)

    ir = build(literals, (1, 1, 1))
    tensors = {"y": np.zeros(1, np.uint32), "z": np.zeros(1, np.float32)}
    interpret(ir, (1, 1, 1), tensors)
    assert tensors["y"][0] == ((~385 << 30) + (7 - 9) - 4 + 2**31) % 2**32
    assert tensors["z"][0] == -2.25
    assert "z[0u] = -2.25f;" in cuda.generate(ir)
    assert "n = (-2147483647 - 1);" in metal.generate(ir)
    assert "n = i32(-2147483648);" in wgsl.generate(ir)


def test_literals_at_the_edge():
    """Rounded up, the largest is no f32 to WGSL; a f16 is rounded once, not on its way through f32."""

    def literals(y: Out[f32], h: Out[f16]):
        y[0] = -3.4028234663852886e38
        y[1] = f32(bf16(0.1))
        h[0] = f16(65504.0)
        h[1] = f16(1 + 2**-11 + 2**-30)

    ir = build(literals, (1, 1, 1))
    tensors = {"y": np.zeros(2, np.float32), "h": np.zeros(2, np.float16)}
    interpret(ir, (1, 1, 1), tensors)
    assert tensors["y"].tolist() == [float(np.finfo(np.float32).min), 0.10009765625]
    assert tensors["h"].tolist() == [65504.0, 1 + 2**-10]
    assert "h[0u] = f16(6.55e+04f);" in cuda.generate(ir)
    assert "h[1u] = half(1.001f);" in metal.generate(ir)


def test_literals_at_the_edge_of_wgsl():
    def literals(y: Out[f32], h: Out[f16]):
        y[0] = -3.4028234663852886e38
        h[0] = f16(65504.0)

    printed = wgsl.generate(build(literals, (1, 1, 1)))
    assert "y[0u] = -3.402823466e+38f;" in printed
    assert "h[0u] = 6.55e+04h;" in printed


def test_quotients_of_negative_vectors_round_down():
    def divide(x: InOut[i32x4]):
        x[1] = x[0] // 4
        x[2] = x[0] % 4

    ir = build(divide, (1, 1, 1))
    x = np.zeros((3, 4), np.int32)
    x[0] = -5, -4, 3, 6
    interpret(ir, (1, 1, 1), {"x": x})
    assert x[1:].tolist() == [[-2, -1, 0, 1], [3, 0, 3, 2]]


def test_extremes_leave_out_nan_as_devices_do():
    def extremes(x: InOut[f32]):
        x[1] = max(x[0], 2.0)
        x[2] = min(3.0, x[0])

    x = np.array([np.nan, 0, 0], np.float32)
    interpret(build(extremes, (1, 1, 1)), (1, 1, 1), {"x": x})
    assert x[1:].tolist() == [2.0, 3.0]
