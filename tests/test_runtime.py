"""Launchers: the same kernels on every backend that this machine has, and what launch refuses."""

import hashlib
import re
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from torch.nn import functional as F

from tilesmith import _install, runtime, use
from tilesmith.codegen import In, KernelError, Out, Scalar, bf16, build, cuda, f32, gid, i32, nvrtc, tid, u32
from tilesmith.device import philox
from tilesmith.kernels import fused_ops
from tilesmith.kernels.flash_attention import FlashAttentionConfig, create_flash_attention_kernel
from tilesmith.ops import swiglu
from tilesmith.runtime import cache, launch, missing
from tilesmith.settings import settings

DEVICE = {"cuda": "cuda", "metal": "mps"}


@pytest.fixture(autouse=True)
def own_cache(monkeypatch, tmp_path):
    """What is compiled here is kept nowhere else."""
    keep_in(monkeypatch, tmp_path)


def keep_in(monkeypatch, folder):
    """Have `folder` for the cache."""
    monkeypatch.setattr(cache, "settings", lambda: replace(settings(), cache_dir=folder))


@pytest.fixture(params=runtime.BACKENDS)
def backend(request, missing):
    """Each backend; CUDA and Metal are nothing a package installs, so they skip where their GPU is not."""
    reason = runtime.missing(request.param)
    if reason is not None and request.param in DEVICE:
        pytest.skip(f"{request.param}: {reason}")
    if reason is not None:
        missing(f"{request.param}: {reason}")
    return request.param


@pytest.fixture
def serving(backend, missing):
    """serving(ir): the backend, of which the device has all that `ir` needs."""

    def decide(ir) -> str:
        reason = runtime.missing(backend, ir.features)
        if reason is not None:
            missing(f"{backend}: {reason}")
        return backend

    return decide


def run(backend: str, ir, grid, tensors: dict, out: str, scalars: dict) -> torch.Tensor:
    """What a backend writes; with Vulkan where CUDA's tensors lie on its GPU, into them as well."""
    there = {name: t.to(DEVICE.get(backend, "cpu")) for name, t in tensors.items()}
    on_gpu = {name: t.cuda() for name, t in tensors.items()} if backend == "vulkan" and shares_with_cuda() else None
    launch(ir, grid, there, scalars, backend=backend)
    if on_gpu is not None:
        launch(ir, grid, on_gpu, scalars, backend=backend)
        assert torch.equal(on_gpu[out].cpu().view(torch.uint8), there[out].view(torch.uint8))
    return there[out].cpu()


def shares_with_cuda() -> bool:
    from tilesmith.runtime import vulkan

    return torch.cuda.is_available() and vulkan.takes(torch.device("cuda", torch.cuda.current_device()))


def nan_like(x: torch.Tensor) -> torch.Tensor:
    return torch.full_like(x, float("nan"))


@pytest.mark.parametrize("half", [False, True], ids=["f32", "f16"])
@pytest.mark.parametrize("columns", [64, 33])
def test_swiglu(serving, columns, half):
    gate, up = torch.randn(2, 13, columns, dtype=torch.float16 if half else torch.float32)
    config = fused_ops.SwiGLUConfig(columns, use_half=half, workgroup_size=64)
    tensors = {"gate": gate, "up": up, "out": nan_like(gate)}
    ir = fused_ops.create_swiglu_kernel(config)
    out = run(serving(ir), ir, config.grid(13), tensors, "out", {"rows": 13})
    torch.testing.assert_close(out, (F.silu(gate.float()) * up.float()).to(gate.dtype))


def test_residual_layer_norm(backend):
    x, residual = torch.randn(2, 11, 100)
    weight, bias = torch.randn(2, 100)
    config = fused_ops.ResidualLayerNormConfig(100, placement="post", workgroup_size=64)
    tensors = {"x": x, "residual": residual, "weight": weight, "bias": bias, "y": nan_like(x)}
    ir = fused_ops.create_residual_layer_norm_kernel(config)
    y = run(backend, ir, config.grid(11), tensors, "y", {"rows": 11, "eps": 1e-5})
    torch.testing.assert_close(y, F.layer_norm(x + residual, (100,), weight, bias, 1e-5))


def test_dropout_draws_the_same_elements_everywhere(backend):
    seed, x = torch.tensor([-987654321, 2**40 + 3]), torch.randn(6, 50)
    config = fused_ops.SoftmaxDropoutConfig(50, dropout=0.4, workgroup_size=32)
    tensors = {"x": x, "seed": seed, "y": nan_like(x)}
    scalars = {"rows": 6, "queries": 6, "scale": 1.0}
    y = run(backend, fused_ops.create_softmax_dropout_kernel(config), config.grid(6), tensors, "y", scalars)
    kept = philox.keep_mask(seed, (6, 50), 0.4)
    assert torch.equal(y != 0, kept)
    torch.testing.assert_close(y, torch.where(kept, torch.softmax(x, -1) * philox.keep_scale(0.4), 0.0))


@pytest.mark.parametrize("half", [False, True], ids=["f32", "f16"])
def test_flash_attention(serving, half):
    config = FlashAttentionConfig(16, 32, 32, use_half=half, causal=True, return_lse=True)
    q = torch.randn(1, 4, 30, 32, dtype=torch.float16 if half else torch.float32)
    k, v = torch.randn(2, 1, 2, 45, 32, dtype=q.dtype)
    tensors = {"q": q, "k": k, "v": v, "out": nan_like(q), "lse": torch.full((1, 4, 30), float("nan"))}
    scalars = {"n_q": 30, "n_kv": 45, "heads": 4, "kv_heads": 2, "scale": 32**-0.5}
    ir = create_flash_attention_kernel(config)
    out = run(serving(ir), ir, config.grid(30, 4), tensors, "out", scalars)
    sees = torch.ones(30, 45, dtype=torch.bool).tril(15)
    wanted = F.scaled_dot_product_attention(q.float(), k.float(), v.float(), sees, enable_gqa=True)
    torch.testing.assert_close(out.float(), wanted, atol=2e-3 if half else 1e-5, rtol=1e-3)


@pytest.mark.parametrize("matrix", ["cuda", "metal", "vulkan", "vulkan-nv"])
@pytest.mark.parametrize("causal", [False, True])
def test_flash_attention_on_matrix_units(matrix, causal):
    """Runs where there is such a GPU; elsewhere the interpreter's tests of these kernels must do."""
    backend = matrix.removesuffix("-nv")
    config = FlashAttentionConfig(64, 64, 64, use_half=True, causal=causal, matrix=matrix)
    reason = runtime.missing(backend, create_flash_attention_kernel(config).features)
    if reason is not None:
        pytest.skip(reason)
    q, k, v = torch.randn(3, 1, 2, 150, 64, dtype=torch.float16)
    scalars = {"n_q": 150, "n_kv": 150, "heads": 2, "kv_heads": 2, "scale": 0.125}
    tensors = {"q": q, "k": k, "v": v, "out": nan_like(q)}
    out = run(backend, create_flash_attention_kernel(config), config.grid(150, 2), tensors, "out", scalars)
    wanted = F.scaled_dot_product_attention(q.float(), k.float(), v.float(), is_causal=causal)
    torch.testing.assert_close(out.float(), wanted, atol=2e-3, rtol=1e-3)


def test_no_rows_are_no_launch(backend):
    config = fused_ops.SwiGLUConfig(8)
    empty = torch.empty(0, 8)
    run(
        backend,
        fused_ops.create_swiglu_kernel(config),
        config.grid(0),
        dict.fromkeys(("gate", "up", "out"), empty),
        "out",
        {"rows": 0},
    )


def copy_kernel(of=f32):
    def copy(x: In[of], y: Out[of], n: Scalar[u32], shift: Scalar[i32]):
        i = gid(0) * 32 + tid(0)
        if i < n:
            y[i] = x[i]

    return build(copy, (32, 1, 1))


GOOD = {"x": torch.ones(40), "y": torch.zeros(40)}


@pytest.mark.parametrize(
    ("change", "error", "match"),
    [
        ({"grid": (1, 1)}, ValueError, "grid must be three whole numbers"),
        ({"grid": (-1, 1, 1)}, ValueError, "grid must be three whole numbers"),
        ({"grid": 2}, ValueError, "grid must be three whole numbers"),
        ({"tensors": {"x": GOOD["x"]}}, ValueError, "copy takes the tensors x, y; got x"),
        ({"scalars": {"n": 40}}, ValueError, "copy takes the scalars n, shift; got n"),
        ({"scalars": {"n": 1.5, "shift": 0}}, TypeError, "n is a u32, got 1.5"),
        ({"scalars": {"n": -1, "shift": 0}}, ValueError, "n is a u32, which does not hold -1"),
        ({"scalars": {"n": 1, "shift": 2**31}}, ValueError, "shift is a i32, which does not hold"),
        ({"tensors": {"x": torch._neg_view(GOOD["x"]), "y": GOOD["y"]}}, ValueError, "pass x.resolve_neg"),
        ({"tensors": {"x": GOOD["x"].half(), "y": GOOD["y"]}}, TypeError, "x is a buffer of f32: wanted torch.float32"),
        ({"tensors": {"x": [1.0], "y": GOOD["y"]}}, TypeError, "x must be a torch.Tensor, got list"),
        ({"tensors": {"x": torch.ones(80)[::2], "y": GOOD["y"]}}, ValueError, "x must be contiguous"),
        ({"tensors": {"x": GOOD["x"].to("meta"), "y": GOOD["y"]}}, ValueError, "tensors are on cpu, meta"),
        ({"tensors": {name: x.to("meta") for name, x in GOOD.items()}}, ValueError, "meta device have no memory"),
        ({"tensors": {"x": GOOD["x"], "y": GOOD["x"]}}, ValueError, "x and y overlap in memory"),
        ({"backend": "opencl"}, ValueError, "backend must be one of interpreter, cuda"),
        ({"backend": "metal"}, ValueError, "metal takes tensors on mps, got cpu"),
    ],
)
def test_refusals(change, error, match):
    given = {"grid": (2, 1, 1), "tensors": GOOD, "scalars": {"n": 40, "shift": 0}} | change
    with pytest.raises(error, match=match):
        launch(copy_kernel(), given["grid"], given["tensors"], given["scalars"], backend=given.get("backend"))


@pytest.mark.parametrize(
    ("value", "result"), [(1e39, None), (-(10**400), None), (3, 3.0), (float("inf"), float("inf"))]
)
def test_numbers_for_f32(backend, value, result):
    def fill(y: Out[f32], value: Scalar[f32]):
        y[0] = value

    ir, y = build(fill, (1, 1, 1)), torch.zeros(1)
    if result is None:
        with pytest.raises(ValueError, match="value is a f32, which does not hold"):
            run(backend, ir, (1, 1, 1), {"y": y}, "y", {"value": value})
    elif result != float("inf") or backend not in ("webgpu", "metal"):  # which promise nothing about infinities
        assert run(backend, ir, (1, 1, 1), {"y": y}, "y", {"value": value}).item() == result


@pytest.mark.parametrize("name", ["vulkan", "webgpu"])
def test_refusals_of_devices(name, missing, monkeypatch):
    reason = runtime.missing(name)
    if reason is not None:
        missing(reason)
    device = runtime._module(name).device()
    allowed = device.max_groups if name == "vulkan" else (device.limits["max-compute-workgroups-per-dimension"],) * 3
    for axis in (k for k in range(3) if allowed[k] < 2**31 - 1):  # NVIDIA's Vulkan takes any count along x
        grid = [allowed[k] + 1 if k == axis else 1 for k in range(3)]
        with pytest.raises(ValueError, match=r"copy: a grid of .* allows \([0-9, ]+\) workgroups along x, y, z"):
            launch(copy_kernel(), grid, GOOD, {"n": 40, "shift": 0}, backend=name)
    if name == "vulkan":
        monkeypatch.setattr(device, "largest_buffer", 128)
    else:
        monkeypatch.setitem(device.limits, "max-storage-buffer-binding-size", 128)
    with pytest.raises(ValueError, match=r"copy: x has 160 bytes; .* binds 128; launch the kernel in parts"):
        launch(copy_kernel(), (2, 1, 1), GOOD, {"n": 40, "shift": 0}, backend=name)


def without_features(monkeypatch, name: str) -> None:
    """Have a device that has nothing beyond f32, as an adapter of OpenGL."""
    info = {"device": "llvmpipe", "description": "4.5", "backend_type": "OpenGL"}
    device = SimpleNamespace(features=set(), name="llvmpipe", adapter=SimpleNamespace(info=info))
    module = runtime._module(name)
    monkeypatch.setattr(module, "missing", lambda: None)
    monkeypatch.setattr(module, "device", lambda: device)
    monkeypatch.setattr(runtime, "settings", lambda: replace(settings(), portable=name))


@pytest.mark.parametrize(
    ("name", "features", "reason"),
    [
        ("vulkan", {"f16"}, "llvmpipe lacks 16-bit floats"),
        ("vulkan", {"f16", "fragments"}, "llvmpipe lacks 16-bit floats and cooperative matrices"),
        ("vulkan", {"bf16"}, "llvmpipe lacks bfloat16"),
        ("webgpu", {"f16"}, r"the WebGPU adapter llvmpipe \(OpenGL\) lacks shader-f16; a Vulkan driver may have it"),
        ("webgpu", {"f16", "subgroups"}, r"\(OpenGL\) lacks shader-f16 and subgroup;"),
        ("webgpu", {"bf16"}, "WebGPU has no bfloat16"),
        ("webgpu", {"fragments"}, "WebGPU has no matrices of a subgroup"),
    ],
)
def test_what_a_device_lacks_is_a_reason(monkeypatch, name, features, reason):
    without_features(monkeypatch, name)
    assert runtime.missing(name) is None
    assert re.search(reason, runtime.missing(name, features))


@pytest.mark.parametrize("name", ["vulkan", "webgpu"])
def test_what_a_device_lacks_is_said_of_calls(monkeypatch, name):
    without_features(monkeypatch, name)
    x = torch.randn(3, 8, dtype=torch.float16)
    reason = "llvmpipe.* lacks (16-bit floats|shader-f16)"
    with use(swiglu="portable"), pytest.raises(NotImplementedError, match=reason):
        swiglu(x, x)
    config = fused_ops.SwiGLUConfig(8, use_half=True)
    with pytest.raises(KernelError, match=f"swiglu: .*{reason}"):
        tensors = {"gate": x, "up": x, "out": nan_like(x)}
        launch(fused_ops.create_swiglu_kernel(config), config.grid(3), tensors, {"rows": 3}, backend=name)


def test_features_have_names():
    with pytest.raises(ValueError, match="features must be of f16, bf16, .*, got 'halves'"):
        missing("interpreter", {"halves", "f16"})


def test_threads_launch_one_after_another(backend):
    """A queue of Vulkan takes no two threads at once."""
    ir, inputs = copy_kernel(), [torch.full((40,), float(k)) for k in range(4)]

    def work(x):
        return all(
            run(backend, ir, (2, 1, 1), {"x": x, "y": nan_like(x)}, "y", {"n": 40, "shift": 0}).equal(x)
            for _ in range(8)
        )

    with ThreadPoolExecutor(4) as threads:
        assert all(threads.map(work, inputs))


def test_vulkan_takes_turns_with_cuda_on_its_tensors(missing):
    """A launch sees what the stream still writes, and the stream what the launch wrote."""
    reason = runtime.missing("vulkan")
    if not torch.cuda.is_available():
        pytest.skip("torch sees no CUDA device")
    if reason is not None or not shares_with_cuda():
        missing(reason or "the Vulkan device does not share memory with CUDA")
    gate, up = torch.randn(2, 300, 4096, device="cuda", dtype=torch.float16)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream), runtime.through("vulkan"), use(swiglu="portable"):
        for k in range(5):
            torch.cuda._sleep(10_000_000)
            gate.fill_(k)
            out = swiglu(gate, up)
            out.mul_(2)
    stream.synchronize()
    torch.testing.assert_close(out, (2 * F.silu(gate.float()) * up.float()).half(), atol=2e-3, rtol=2e-3)


def test_vulkan_refuses_memory_that_it_does_not_share(monkeypatch):
    from tilesmith.runtime import vulkan

    monkeypatch.setattr(vulkan, "device", lambda: SimpleNamespace(exports=False))
    assert not vulkan.takes(torch.device("cuda", 0))
    assert not vulkan.takes(torch.device("cpu"))


def test_a_launch_counts_as_a_change_in_place():
    tensors = {name: t.clone() for name, t in GOOD.items()}
    launch(copy_kernel(), (2, 1, 1), tensors, {"n": 40, "shift": 0})
    assert torch.equal(tensors["y"], tensors["x"])
    assert (tensors["x"]._version, tensors["y"]._version) == (0, 1)


def test_brain_floats_in_the_interpreter():
    x = torch.randn(40, dtype=torch.bfloat16)
    y = torch.zeros_like(x)
    launch(copy_kernel(bf16), (2, 1, 1), {"x": x, "y": y}, {"n": 40, "shift": 0})
    assert torch.equal(x, y)


def test_a_backend_that_is_absent_is_a_reason(monkeypatch):
    for name, package in (("vulkan", "vulkan"), ("webgpu", "wgpu")):
        module = runtime._module(name)
        module.missing.cache_clear()
        monkeypatch.setattr(module, "find_spec", lambda _: None)
        assert missing(name) == f"the package {package} is not installed: {_install.command(name)}"
        with pytest.raises(RuntimeError, match=f"{name}: the package {package} is not installed"):
            launch(copy_kernel(), (2, 1, 1), GOOD, {"n": 40, "shift": 0}, backend=name)
        module.missing.cache_clear()
    if not torch.cuda.is_available():
        assert missing("cuda") == "torch sees no CUDA device"
    if not torch.backends.mps.is_available():
        assert missing("metal") == "torch sees no Apple GPU"


class Machine:
    """A machine's GPUs as a CUDA driver and as the `vulkan` package see them: (Vulkan's device type, UUID) of each."""

    VkErrorIncompatibleDriver = RuntimeError
    VkPhysicalDeviceIDProperties = SimpleNamespace

    def __init__(self, gpus, visible=(), version=13):
        self.gpus = [SimpleNamespace(deviceType=kind, apiVersion=version, uuid=uuid) for kind, uuid in gpus]
        self.visible = visible
        self.VK_MAKE_VERSION = lambda major, minor, _: 10 * major + minor
        self.VkPhysicalDeviceProperties2 = lambda pNext: pNext
        self.vkGetPhysicalDeviceProperties = lambda gpu: gpu
        self.vkGetPhysicalDeviceProperties2 = lambda gpu, into: setattr(into, "deviceUUID", gpu.uuid)
        self.vkEnumeratePhysicalDevices = lambda instance: self.gpus

    def cuInit(self, flags):
        return 0 if self.visible else 100

    def cuDeviceGet(self, device, index):
        device._obj.value = index
        return 0 if index < len(self.visible) else 101

    def cuDeviceGetUuid(self, uuid, device):
        uuid.raw = self.visible[device.value]
        return 0


A, B, C = b"a" * 16, b"b\0" * 8, b"c" * 16


@pytest.mark.parametrize(
    ("gpus", "visible", "chosen"),
    [
        ([(2, A), (2, B), (2, C)], [B, C], B),  # CUDA_VISIBLE_DEVICES hides the first
        ([(4, A), (1, B), (2, C)], [], C),
        ([(4, A), (1, B)], [C], B),  # CUDA's device has no Vulkan driver
        ([(4, A)], None, A),  # torch without CUDA
    ],
)
def test_vulkan_takes_the_gpu_that_torch_uses(monkeypatch, gpus, visible, chosen):
    from tilesmith.runtime import cuda, vulkan_device

    machine = Machine(gpus, visible or ())
    monkeypatch.setattr(cuda.torch.version, "hip", None)
    monkeypatch.setattr(cuda.torch.cuda, "is_available", lambda: visible is not None)
    monkeypatch.setattr(cuda.torch.cuda, "is_initialized", lambda: False)
    monkeypatch.setattr(cuda, "load_driver", lambda: machine)
    assert vulkan_device._chosen(machine, None)[1].uuid == chosen


def test_vulkan_wants_version_1_2():
    from tilesmith.runtime import vulkan_device

    with pytest.raises(RuntimeError, match="no device supports Vulkan 1.2"):
        vulkan_device._chosen(Machine([(2, A)], version=11), None)


@pytest.mark.parametrize("count", [1, 12, 13, 40, 61])
def test_vulkan_copies_through_memory_of_the_host(monkeypatch, missing, count):
    """As on a discrete GPU, in parts."""
    reason = runtime.missing("vulkan")
    if reason is not None:
        missing(reason)
    from tilesmith.runtime import vulkan, vulkan_device

    device = vulkan.device()
    monkeypatch.setattr(device, "shares", False)
    monkeypatch.setattr(device, "_staging", None)
    monkeypatch.setattr(vulkan_device, "_STAGE_BYTES", 48)
    x, y = torch.randn(count), torch.full((count,), 7.0)
    written = count // 2
    launch(copy_kernel(), (2, 1, 1), {"x": x, "y": y}, {"n": written, "shift": 0}, backend="vulkan")
    assert torch.equal(y, torch.cat([x[:written], torch.full((count - written,), 7.0)]))


@pytest.mark.parametrize(
    ("types", "storage", "stage"),
    [
        ((1, 6, 14, 7), [0, 3, 1, 2], [2, 1, 3]),  # NVIDIA: the host's memory, and the device's through a window
        ((7, 1, 14, 64 | 7, 32 | 1), [1, 0, 2], [2, 0]),  # AMD: types that want features
        ((15,), [0], [0]),
    ],
)
def test_vulkan_takes_the_best_memory(types, storage, stage):
    from tilesmith.runtime import vulkan_device

    device = object.__new__(vulkan_device.Device)
    found = [SimpleNamespace(propertyFlags=flags) for flags in types]
    device.memory_types = SimpleNamespace(memoryTypeCount=len(types), memoryTypes=found)
    for kind, order in ((vulkan_device.STORAGE, storage), (vulkan_device._STAGE, stage)):
        assert device._memory_types(-1, *vulkan_device._MEMORY[kind]) == order


def test_vulkan_refuses_what_the_device_has_not(monkeypatch, missing):
    reason = runtime.missing("vulkan")
    if reason is not None:
        missing(reason)
    from tilesmith.runtime import vulkan

    monkeypatch.setattr(vulkan.device(), "features", set())
    config = FlashAttentionConfig(16, 16, 16, use_half=True, matrix="vulkan")
    q = torch.zeros(1, 1, 16, 16, dtype=torch.float16)
    tensors = {"q": q, "k": q.clone(), "v": q.clone(), "out": q.clone()}
    scalars = {"n_q": 16, "n_kv": 16, "heads": 1, "kv_heads": 1, "scale": 0.25}
    with pytest.raises(KernelError, match="lacks 16-bit floats and .*cooperative matrices"):
        launch(create_flash_attention_kernel(config), config.grid(16, 1), tensors, scalars, backend="vulkan")


def test_compiled_kernels_are_kept_on_disk(monkeypatch, tmp_path, missing):
    try:
        nvrtc.library()
    except KernelError as problem:
        missing(str(problem))
    from tilesmith.runtime.cuda import image

    keep_in(monkeypatch, tmp_path)
    ir = copy_kernel()
    first = image(ir, "sm_90")
    assert first[:4] == b"\x7fELF"
    (kept,) = (tmp_path / "kernels").iterdir()
    assert kept.read_bytes() == hashlib.sha256(first).digest() + first
    monkeypatch.setattr(nvrtc, "compile", lambda *_, **__: pytest.fail("compiled again"))
    assert image(ir, "sm_90") == first


def test_a_cache_that_cannot_be_written_is_no_error(monkeypatch, tmp_path):
    (tmp_path / "file").write_text("")
    keep_in(monkeypatch, tmp_path / "file")
    cache.write("name", b"data")
    assert cache.read("name") is None


def test_kernels_in_memory_are_few(monkeypatch):
    monkeypatch.setattr(cache, "_ENTRIES", 2)
    kept, kernels = cache.Compiled(), [copy_kernel() for _ in range(3)]
    first, *_, last = [kept.get(ir, "d", object) for ir in kernels]
    assert kept.get(kernels[2], "d", object) is last
    assert kept.get(kernels[0], "d", object) is not first


@pytest.mark.parametrize("arch", ["sm_80", "sm_90"])
def test_ptx_of_attention_on_tensor_cores(arch, missing):
    try:
        nvrtc.library()
    except KernelError as problem:
        missing(str(problem))
    ptx = cuda.ptx(create_flash_attention_kernel(FlashAttentionConfig(64, 64, 64, True, matrix="cuda")), arch)
    assert "mma.sync" in ptx
    assert ".local" not in ptx
