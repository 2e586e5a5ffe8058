"""What others make of the printed kernels: NVRTC, spirv-val, naga, Tint, a C++ compiler, lavapipe, and a GPU if any."""

from __future__ import annotations

import re

import numpy as np
import pytest

from codegen import golden, tools, vulkan_runner, webgpu_runner
from codegen.samples import SAMPLES
from devices import ON_GPU
from tilesmith.codegen import KernelError, Out, barrier, build, cuda, f32, metal, nvrtc, shared, spirv, tid, wgsl
from tilesmith.codegen.disassembly import disassemble
from tilesmith.codegen.reserved import RESERVED


def accepted_by(generate) -> list[str]:
    """The samples that a printer does not refuse."""
    names = []
    for name, make in SAMPLES.items():
        try:
            generate(make().ir)
        except KernelError:
            continue
        names.append(name)
    return names


CUDA, METAL, SPIRV, WGSL = (accepted_by(t.generate) for t in (cuda, metal, spirv, wgsl))
WITHOUT_MATRICES = [name for name in SPIRV if "fragments" not in SAMPLES[name]().ir.features]


def check(sample, after: dict[str, np.ndarray], loosen: float = 1.0) -> None:
    for name, wanted in sample.results.items():
        got, wanted = after[name].astype(np.float64), wanted.astype(np.float64)
        error = np.abs(got.reshape(wanted.shape) - wanted).max()
        assert error <= loosen * sample.tolerance * max(1.0, np.abs(wanted).max()), (name, error)


def test_every_target_prints_every_feature_it_has():
    assert set(CUDA) == set(SAMPLES) - {"matmul_8", "softmax_8", "softmax_anywhere_8", "rounded_8"}
    tiles_of_16 = {"matmul", "matmul_bf16", "matmul_words", "softmax", "softmax_anywhere", "rounded"}
    assert set(METAL) == set(SAMPLES) - tiles_of_16
    assert set(SPIRV) == set(SAMPLES) - {"brain_floats", "matmul_bf16", "softmax", "softmax_8"}
    assert set(WGSL) == set(WITHOUT_MATRICES) - {"turned"}


@pytest.mark.parametrize("name", golden.NAMES)
def test_golden(name):
    for file, text in golden.outputs(name).items():
        wanted = (golden.FOLDER / file).read_text()
        assert text == wanted, f"{file} changed; if it should: PYTHONPATH=src:tests python -m codegen.golden"


@pytest.mark.parametrize(
    ("target", "names"), [(cuda, CUDA), (metal, METAL), (wgsl, WGSL)], ids=["cuda", "metal", "wgsl"]
)
def test_words_of_a_language_are_no_names_of_a_kernel(target, names):
    """A variable named like a type or a function that the printer writes would hide it."""
    for name in names:
        ir = SAMPLES[name]().ir
        text = target.generate(ir)
        body = text[text.index(" {\n", text.index(f" {ir.name}")) :]
        written = re.findall(r"(?<![\w.:])[A-Za-z]\w*(?=\(|<| \w+(?: =|;|\[))", body)
        own = {d.name for d in (*ir.buffers, *ir.scalars, *ir.arrays, *ir.fragments, *ir.variables)}
        assert {w for w in written if not w.endswith("_")} - own <= RESERVED, name


RESULT_FIRST = {19, 20, 21, 22, 23, 28, 29, 30, 32, 33, 248, 4456}  # types and labels
RESULT_LESS = {5, 10, 14, 15, 16, 17, 56, 62, 71, 72, 224, 246, 247, 249, 250, 253, 254, 4458}
SECTIONS = {17: 0, 10: 1, 11: 2, 14: 3, 15: 4, 16: 5, 5: 6, 71: 7, 72: 7}  # by opcode; everything else comes after


@pytest.mark.parametrize("name", SPIRV)
def test_spirv_is_well_formed(name):
    module = spirv.generate(SAMPLES[name]().ir)
    magic, version, _, bound, schema = np.frombuffer(module[:20], np.uint32)
    minor = 6 if "conversions" in SAMPLES[name]().ir.features else 3
    assert (magic, version, schema) == (0x07230203, 1 << 16 | minor << 8, 0)
    found = golden.instructions(module)
    results = [i[1 if i[0] in RESULT_FIRST | {11} else 2] for i in found if i[0] not in RESULT_LESS]
    assert sorted(results) == list(range(1, bound))
    sections = [SECTIONS.get(i[0], 8) for i in found]
    assert sections == sorted(sections)


@pytest.mark.parametrize("name", SPIRV)
def test_spirv_val_accepts(name, missing):
    if isinstance(tools.spirv_val(), str):
        missing(tools.spirv_val())
    assert tools.validate_spirv(spirv.generate(SAMPLES[name]().ir)) == ""


def test_spirv_val_is_no_rubber_stamp(missing):
    if isinstance(tools.spirv_val(), str):
        missing(tools.spirv_val())
    module = bytearray(spirv.generate(SAMPLES["rms_norm"]().ir))
    at = next(k for k in range(20, len(module), 4) if module[k : k + 4] == (5 << 16 | 133).to_bytes(4, "little"))
    module[at] = 132  # FMul becomes IMul
    assert "int" in tools.validate_spirv(bytes(module))


@pytest.mark.parametrize("name", SPIRV)
def test_the_assembler_makes_the_module_of_its_listing(name, missing):
    if isinstance(tools.spirv_val(), str):
        missing(tools.spirv_val())
    module = spirv.generate(SAMPLES[name]().ir)
    numbered = tools.assemble_spirv(disassemble(module, names=False), module[5])
    assert numbered[20:] == module[20:]  # after the header, which says who wrote it
    assert tools.validate_spirv(tools.assemble_spirv(disassemble(module), module[5])) == ""


def test_only_our_modules_are_listed():
    with pytest.raises(ValueError, match="this is not a SPIR-V module"):
        disassemble(b"nothing")
    module = spirv.generate(SAMPLES["rms_norm"]().ir)
    with pytest.raises(ValueError, match="no instruction of ours, opcode 0 with 0 words"):
        disassemble(module + bytes(4))


@pytest.mark.parametrize("name", CUDA)
@pytest.mark.parametrize("arch", ["sm_80", "sm_90", "sm_120"])
def test_nvrtc_compiles(name, arch, missing):
    try:
        nvrtc.library()
    except KernelError as problem:
        missing(str(problem))
    ptx = cuda.ptx(SAMPLES[name]().ir, arch)
    assert f".target {arch}" in ptx
    assert f".entry {SAMPLES[name]().ir.name}" in ptx
    if name != "functions":  # sinf and cosf of large arguments use local memory
        assert ".local" not in ptx


def test_nvrtc_errors_reach_the_caller(missing):
    try:
        nvrtc.library()
    except KernelError as problem:
        missing(str(problem))
    with pytest.raises(KernelError, match='(?s)NVRTC error.*identifier "nonsense" is undefined'):
        nvrtc.compile('extern "C" __global__ void f() { nonsense; }', "f", "sm_80")
    with pytest.raises(KernelError, match="arch must be like 'sm_80'"):
        nvrtc.compile("", "f", "hopper")


def test_without_nvrtc_the_error_names_the_extra(monkeypatch):
    nvrtc.library.cache_clear()
    monkeypatch.setattr(nvrtc, "_packaged", list)
    monkeypatch.setattr(nvrtc, "_NAMES", ("libnvrtc-that-is-nowhere.so",))
    with pytest.raises(KernelError, match="pip install"):
        cuda.ptx(SAMPLES["rms_norm"]().ir)
    nvrtc.library.cache_clear()


@pytest.mark.parametrize("name", METAL)
def test_a_cpp_compiler_accepts_metal(name, missing):
    if tools.cpp() is None:
        missing("no C++ compiler: apt install g++")
    source = metal.generate(SAMPLES[name]().ir)
    assert tools.compile_metal(source) == ""
    assert tools.compile_metal(source.replace("[[kernel", "broken [[kernel")) != ""


@pytest.mark.parametrize("name", WGSL)
def test_tint_accepts(name, missing):
    if isinstance(tools.dawn(), str):
        missing(tools.dawn())
    assert tools.validate_wgsl(wgsl.generate(SAMPLES[name]().ir)) == ""


def test_wgsl_where_all_threads_share_their_place(missing):
    """A barrier under a condition on it is verified, and Tint wants to see why."""

    def shared_place(y: Out[f32]):
        stage = shared(f32, 32)
        if tid(1) == 0:
            stage[tid(0)] = f32(tid(0))
            barrier()
            y[tid(0)] = stage[31 - tid(0)]
        else:
            y[tid(2) - 1] = 1.0

    ir = build(shared_place, (32, 1, 1))
    text = wgsl.generate(ir)
    assert "if (first_ == 0u)" in text and "tid_.y" not in text
    if isinstance(webgpu_runner.device(), str):
        missing(webgpu_runner.device())
    y = webgpu_runner.run(ir, text, (1, 1, 1), {"y": np.zeros(32, np.float32)}, {})["y"]
    assert y.tolist() == list(range(31, -1, -1))


def test_tint_sees_divergent_barriers(missing):
    if isinstance(tools.dawn(), str):
        missing(tools.dawn())
    source = wgsl.generate(SAMPLES["rms_norm"]().ir)
    broken = re.sub(r"(if \(t < 32u\) \{)", r"\1 workgroupBarrier();", source)
    assert "uniform control flow" in tools.validate_wgsl(broken)


@pytest.mark.parametrize("name", WGSL)
def test_wgsl_runs(name, missing):
    sample = SAMPLES[name]()
    reason = webgpu_runner.missing(sample.ir.features)
    if reason is not None:
        missing(reason)
    code = wgsl.generate(sample.ir, enable_subgroups=False)
    check(sample, webgpu_runner.run(sample.ir, code, sample.grid, sample.tensors, sample.scalars), loosen=2)


@pytest.mark.parametrize("name", WITHOUT_MATRICES)
def test_spirv_runs(name, missing):
    if isinstance(vulkan_runner.device(), str):
        missing(vulkan_runner.device())
    sample = SAMPLES[name]()
    module = spirv.generate(sample.ir)
    check(sample, vulkan_runner.run(sample.ir, module, sample.grid, sample.tensors, sample.scalars), loosen=2)


@pytest.mark.skipif(not ON_GPU, reason="needs an NVIDIA GPU")
@pytest.mark.parametrize("name", CUDA)
def test_cuda_runs(name):
    from codegen import cuda_runner

    sample = SAMPLES[name]()
    check(sample, cuda_runner.run(sample.ir, sample.grid, sample.tensors, sample.scalars), loosen=2)
