"""Random kernels: the interpreter, WGSL and SPIR-V on a driver agree to the bit, and every checker accepts the text."""

from __future__ import annotations

import contextlib
import json
from random import Random

import numpy as np
import pytest
from hypothesis import HealthCheck, Phase, assume, given, settings
from hypothesis import strategies as st

from codegen import tools, vulkan_runner, webgpu_runner
from codegen.random_kernels import OWN, THREADS, Maker
from codegen.random_python import Writer, run_by_python
from tilesmith.codegen import (
    KernelError,
    Out,
    build,
    cuda,
    from_json,
    interpret,
    metal,
    nvrtc,
    spirv,
    subgroup_size,
    tid,
    to_json,
    u32,
    wgsl,
)
from tilesmith.codegen.interpreter import Undefined

GRID = (2, 1, 1)
SCALARS = {"n": 5, "m": -3, "s": 3.0}


def tensors() -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    return {
        "a": rng.integers(0, 2**32, THREADS, dtype=np.uint64).astype(np.uint32),
        "x": rng.integers(-4, 5, THREADS).astype(np.float32),
        "z": rng.integers(-4, 5, (THREADS, 4)).astype(np.float32),
        "out": np.arange(2 * THREADS * OWN, dtype=np.uint32),
        "y": np.zeros(2 * THREADS * OWN, np.float32),
    }


def kernels(subgroups: bool = False):
    return st.randoms(use_true_random=False).map(lambda random: Maker(random, subgroups).kernel())


def examples(count: int):
    """The same kernels each time. Not shrunk, since each step would build a pipeline: minutes for a failure."""
    return settings(
        max_examples=count,
        deadline=None,
        derandomize=True,
        database=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )


def interpreted(ir, size: int = 32) -> dict[str, np.ndarray]:
    after = tensors()
    try:
        interpret(ir, GRID, after, SCALARS, subgroup_size=size)
    except Undefined as fault:  # an i32 that overflowed: rare, and no two languages need agree
        assume("overflow" not in str(fault))
        raise
    return after


def same(wanted: dict[str, np.ndarray], got: dict[str, np.ndarray]) -> None:
    for name in ("out", "y"):
        assert np.array_equal(wanted[name], got[name]), name


@pytest.mark.parametrize("seed", range(80))
def test_python_itself_agrees(seed, tmp_path):
    text, before = Writer(Random(seed)).kernel(), [0, 1000, 2**31, 7]
    (tmp_path / "kernel.py").write_text(text)
    module: dict = {}
    exec(compile(text, str(tmp_path / "kernel.py"), "exec"), module)
    after = np.array(before, np.uint32)
    interpret(build(module["made"], (1, 1, 1)), (1, 1, 1), {"out": after}, {"n": 5})
    assert after.tolist() == run_by_python(text, before, 5), text


@examples(60)
@given(kernels(subgroups=True))
def test_json_keeps_random_kernels(ir):
    again = from_json(to_json(ir))
    assert again == ir
    same(interpreted(ir), interpreted(again))


JUNK = [None, True, -1, 3, 2**70, 1.5, float("nan"), "", "; evil", "//", [], {}, {"tuple": []}, {"type": "f16x4"}, [[]]]
JUNK += [{"type": "none"}, ["Var", {"type": "u32"}, "u0"], ["Const", {"type": "u32"}, 3], ["Barrier", 0], ["Nothing"]]


def places(value, path=()):
    """The way to every part of a JSON document."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, part in items:
        yield (*path, key)
        yield from places(part, (*path, key))


@examples(60)
@given(kernels(subgroups=True), st.randoms(use_true_random=False))
def test_json_that_someone_changed(ir, random):
    """It is refused, or is a kernel that every printer takes or refuses; no other text gets into what is printed."""
    text = to_json(ir)
    everywhere = list(places(json.loads(text)))
    for _ in range(8):
        document = json.loads(text)
        path = random.choice(everywhere)
        part = document
        for key in path[:-1]:
            part = part[key]
        part[path[-1]] = random.choice(JUNK)
        try:
            changed = from_json(json.dumps(document))
        except KernelError:
            continue
        for target in (cuda, metal, wgsl, spirv):
            with contextlib.suppress(KernelError):
                assert "evil" not in str(target.generate(changed))


def test_json_that_is_nested_too_deeply():
    for text in ("[" * 100_000, '{"version": 1, "body": ' + "[" * 100_000):
        with pytest.raises(KernelError, match="nested too deeply"):
            from_json(text)


def device_subgroup_size() -> int:
    def ask(y: Out[u32]):
        y[tid(0)] = subgroup_size()

    ir = build(ask, (THREADS, 1, 1))
    return int(vulkan_runner.run(ir, spirv.generate(ir), (1, 1, 1), {"y": np.zeros(THREADS, np.uint32)}, {})["y"][0])


def test_spirv_agrees(missing):
    if isinstance(vulkan_runner.device(), str):
        missing(vulkan_runner.device())
    size = device_subgroup_size()

    @examples(50)
    @given(kernels(subgroups=True))
    def agrees(ir):
        same(interpreted(ir, size), vulkan_runner.run(ir, spirv.generate(ir), GRID, tensors(), SCALARS))

    agrees()


def test_wgsl_agrees(missing):
    if isinstance(webgpu_runner.device(), str):
        missing(webgpu_runner.device())

    @examples(50)
    @given(kernels())
    def agrees(ir):
        same(interpreted(ir), webgpu_runner.run(ir, wgsl.generate(ir), GRID, tensors(), SCALARS))

    agrees()


def test_spirv_val_accepts(missing):
    if isinstance(tools.spirv_val(), str):
        missing(tools.spirv_val())

    @examples(30)
    @given(kernels(subgroups=True))
    def accepts(ir):
        assert tools.validate_spirv(spirv.generate(ir)) == ""

    accepts()


def test_tint_accepts(missing):
    if isinstance(tools.dawn(), str):
        missing(tools.dawn())

    @examples(60)
    @given(kernels(subgroups=True))
    def accepts(ir):
        assert tools.validate_wgsl(wgsl.generate(ir)) == ""

    accepts()


def test_nvrtc_compiles(missing):
    try:
        nvrtc.library()
    except KernelError as problem:
        missing(str(problem))

    @examples(15)
    @given(kernels(subgroups=True))
    def compiles(ir):
        cuda.ptx(ir, "sm_90")

    compiles()


def test_a_cpp_compiler_accepts_metal(missing):
    if tools.cpp() is None:
        missing("no C++ compiler: apt install g++")

    @examples(8)
    @given(kernels(subgroups=True))
    def accepts(ir):
        assert tools.compile_metal(metal.generate(ir)) == ""

    accepts()


@pytest.mark.skipif("not __import__('torch').cuda.is_available()", reason="needs an NVIDIA GPU")
def test_cuda_agrees():
    from codegen import cuda_runner

    @examples(40)
    @given(kernels(subgroups=True))
    def agrees(ir):
        same(interpreted(ir), cuda_runner.run(ir, GRID, tensors(), SCALARS))

    agrees()
