"""The portable kernels in the interpreter, against plain PyTorch in float64."""

from __future__ import annotations

import runpy
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from codegen import tools, webgpu_runner
from codegen.sample import without
from kernel_runs import EPS, random, run, within
from tilesmith.codegen import KernelError, KernelIR, cuda, metal, nvrtc, spirv, wgsl
from tilesmith.codegen.interpreter import Race, Undefined
from tilesmith.codegen.interpreter import run as interpreting
from tilesmith.codegen.nodes import Barrier, walk
from tilesmith.device import philox
from tilesmith.hardware.limits import limits_of
from tilesmith.kernels import KERNELS, detect_vendor, flash_attention, fused_ops
from tilesmith.kernels.flash_attention import (
    FlashAttentionConfig,
    TunedConfigs,
    create_flash_attention_kernel,
    required_shared_memory,
    validate_config,
)

HALF = pytest.mark.parametrize("half", [False, True], ids=["f32", "f16"])
COLUMNS = pytest.mark.parametrize("columns", [1, 6, 33, 256, 1201])


@HALF
@COLUMNS
@pytest.mark.parametrize("kind", ["swiglu", "none", "tanh"])
def test_gates(kind, columns, half):
    rows = 9
    gate, up = 3 * random(rows, columns, half=half), random(rows, columns, half=half, seed=1)
    if kind == "swiglu":
        config = fused_ops.SwiGLUConfig(columns, use_half=half, workgroup_size=32)
        ir = fused_ops.create_swiglu_kernel(config)
    else:
        config = fused_ops.GeGLUConfig(columns, use_half=half, approximate=kind, workgroup_size=32)
        ir = fused_ops.create_geglu_kernel(config)
    out = run(ir, config.grid(rows), {"gate": gate, "up": up}, {"out": gate.shape}, {"rows": rows}, half)["out"]
    activation = F.silu if kind == "swiglu" else lambda x: F.gelu(x, approximate=kind)
    within(out, lambda g, u: activation(g) * u, gate, up)


@pytest.mark.parametrize("short", [3, 257, 1025])
def test_gates_of_as_many_vectors_as_a_launch_takes(short):
    """The last workgroup, of elements that all lie on one, so that they take no memory."""
    count = 2**32 - short
    config = fused_ops.SwiGLUConfig(1, workgroup_size=256)
    ir, grid = fused_ops.create_swiglu_kernel(config), config.grid(count)
    on_one = np.lib.stride_tricks.as_strided(np.ones(1, np.float32), (count,), (0,))
    last = (count - 1) // 1024
    group = np.array([[last % grid[0], last // grid[0], 0]], np.uint32)
    buffers = dict.fromkeys(("gate", "up", "out"), on_one)
    batch = interpreting._Batch(ir, group, 0, grid, buffers, {"rows": count}, {}, 32, False)
    batch.block(ir.body, interpreting._Mask(None, batch.threads))  # raises where an access is out of bounds


def test_exact_gelu_is_right_in_its_tail():
    gate = np.linspace(-12, 12, 401, dtype=np.float32)[None]
    config = fused_ops.GeGLUConfig(401, approximate="none", workgroup_size=32)
    tensors = {"gate": gate, "up": np.ones_like(gate)}
    out = run(fused_ops.create_geglu_kernel(config), config.grid(1), tensors, {"out": gate.shape}, {"rows": 1}, False)[
        "out"
    ]
    wide = torch.from_numpy(gate).double()
    wanted = wide * 0.5 * torch.erfc(-wide / 2**0.5)
    error = (torch.from_numpy(out).double() - wanted).abs() / wanted.abs().clamp_min(1e-30)
    assert error.max() < 2e-5, error.max()  # exp(-72) costs 72 eps


WIDE = pytest.mark.parametrize("columns", [4112, 4100, 4097])  # that a workgroup of 64 or less does not keep


@HALF
@WIDE
@pytest.mark.parametrize("kind", ["rms", "layer"])
@pytest.mark.parametrize("added", [False, True])
def test_norms_of_rows_that_no_workgroup_keeps(added, kind, columns, half):
    name = "f16" if half else "f32"
    config = fused_ops.NormConfig(columns, kind, name, name if added else None, name, workgroup_size=32)
    assert not config.plan.keep
    x, weight = random(3, columns, half=half, seed=1) + 3, random(columns, half=half, seed=2)
    step = config.plan.vectors
    given, scalars, out = {"x": x, "weight": weight}, {"rows": 3, "eps": EPS, "x_step": step}, {"y": x.shape}
    if kind == "rms":
        scalars["offset"] = 0.0
    if added:
        given["residual"] = random(3, columns, half=half, seed=3)
        scalars["residual_step"], out["sum"] = step, x.shape
    statistics = {n: np.full(3, np.nan, np.float32) for n in (("mean",) if kind == "layer" else ()) + ("rstd",)}
    ir = fused_ops.create_norm_kernel(config)
    found = run(ir, config.grid(3), given | statistics, out, scalars, half)
    if added:
        x = x + given["residual"]
        assert np.array_equal(found["sum"], x)
    norm = F.rms_norm if kind == "rms" else (lambda x, shape, w, eps: F.layer_norm(x, shape, w, None, eps))
    within(found["y"], lambda x, w: norm(x, (columns,), w, EPS), x, weight)
    wide = torch.from_numpy(x).double()
    power = wide.square().mean(-1) if kind == "rms" else wide.var(-1, correction=0)
    np.testing.assert_allclose(statistics["rstd"], (power + EPS).rsqrt().numpy(), rtol=1e-5)


def joined(subgroup: int, columns: int = 1201, threads: int = 128):
    """A layer norm whose rows are joined by subgroups: its IR and what it is launched with, outputs aside."""
    config = fused_ops.NormConfig(columns, "layer", weight=None, workgroup_size=threads, subgroup=subgroup)
    x = random(7, columns, seed=1) + 3
    given = {"x": x, "mean": np.zeros(7, np.float32), "rstd": np.zeros(7, np.float32)}
    scalars = {"rows": 7, "eps": EPS, "x_step": config.plan.vectors}
    return fused_ops.create_norm_kernel(config), config.grid(7), given, {"y": x.shape}, scalars, False


@pytest.mark.parametrize("subgroup", [4, 8, 32, 64])
@pytest.mark.parametrize(("columns", "threads"), [(33, 64), (256, 128), (1201, 128)])
def test_rows_joined_by_subgroups(columns, threads, subgroup):
    arguments = joined(subgroup, columns, threads)
    within(run(*arguments)["y"], lambda x: F.layer_norm(x, (columns,), None, None, EPS), arguments[2]["x"])
    config = fused_ops.SoftmaxDropoutConfig(columns, causal=True, workgroup_size=threads, subgroup=subgroup)
    x, scalars = random(9, columns), {"rows": 9, "queries": 9, "scale": 0.7}
    ir = fused_ops.create_softmax_dropout_kernel(config)
    y = run(ir, config.grid(9), {"x": x}, {"y": x.shape}, scalars, False)["y"]
    sees = torch.ones(9, columns, dtype=torch.bool).tril(columns - 9)
    within(y, lambda x: torch.softmax((x * 0.7).masked_fill(~sees, float("-inf")), -1), x)


@pytest.mark.parametrize("subgroup", [4, 8, 32])
def test_subgroups_of_a_row_wait_for_one_another(subgroup):
    ir, *rest = joined(subgroup)
    count = sum(isinstance(s, Barrier) for s in walk(ir.body))
    assert count
    for k in range(count):
        if k:  # before the first sum nobody has read anything
            with pytest.raises((Race, Undefined)):
                run(without(ir, Barrier, k), *rest)


@HALF
@WIDE
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("positive", [True, False])
@pytest.mark.parametrize("p", [0.0, 0.3])
def test_softmax_of_rows_that_no_workgroup_keeps(p, positive, causal, columns, half):
    config = fused_ops.SoftmaxDropoutConfig(columns, half, p, causal, 32, positive=positive)
    assert not config.plan.keep
    x, seed = 3 * random(4, columns, half=half), torch.tensor([2**40 + 7, -5])
    x[2] = np.finfo(x.dtype).min  # as masks write it
    scalars, tensors = {"rows": 4, "queries": 4, "scale": 0.7}, {"x": x, "seed": seed.numpy().view(np.uint32)}
    ir = fused_ops.create_softmax_dropout_kernel(config)
    y = run(ir, config.grid(4), tensors, {"y": x.shape}, scalars, half)["y"]
    sees = torch.ones(4, columns, dtype=torch.bool).tril(columns - 4 if causal else columns)
    kept = philox.keep_mask(seed, x.shape, p) * philox.keep_scale(p)
    within(y, lambda x: kept * torch.softmax((x * 0.7).masked_fill(~sees, float("-inf")), -1), x)


@HALF
@COLUMNS
@pytest.mark.parametrize("placement", ["pre", "post"])
def test_residual_layer_norm(placement, columns, half):
    rows = 5
    config = fused_ops.ResidualLayerNormConfig(columns, use_half=half, placement=placement, workgroup_size=64)
    names = ("x", "residual", "weight", "bias")
    tensors = {n: random(*((rows,) * (k < 2)), columns, half=half, seed=k) for k, n in enumerate(names)}
    shapes = {"y": (rows, columns)} | ({"sum": (rows, columns)} if placement == "pre" else {})
    ir = fused_ops.create_residual_layer_norm_kernel(config)
    out = run(ir, config.grid(rows), tensors, shapes, {"rows": rows, "eps": EPS}, half)
    summed = tensors["x"] + tensors["residual"]
    within(
        out["y"],
        lambda s, w, b: F.layer_norm(s, (columns,), w, b, EPS),
        summed,
        tensors["weight"],
        tensors["bias"],
    )
    if placement == "pre":
        np.testing.assert_array_equal(out["sum"], summed)


def rotated(x, weight, cos, sin, heads: int, by_head: bool, interleaved: bool):
    parts = x.unflatten(-1, (heads, -1)) if by_head else x
    y = (parts * torch.rsqrt(parts.square().mean(-1, keepdim=True) + EPS) * weight).reshape(len(x), heads, -1)
    cos, sin = cos[:, None].to(x.dtype), sin[:, None].to(x.dtype)
    a, b = (y[..., ::2], y[..., 1::2]) if interleaved else y.chunk(2, -1)
    turned = (a * cos - b * sin, b * cos + a * sin)
    return (torch.stack(turned, -1).flatten(-2) if interleaved else torch.cat(turned, -1)).flatten(-2)


@HALF
@pytest.mark.parametrize("norm_dim", ["row", "head"])
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize(("heads", "head_dim"), [(1, 2), (3, 12), (4, 64)])
def test_rms_norm_rope(heads, head_dim, interleaved, norm_dim, half):
    rows, hidden, held = 5, heads * head_dim, 11
    config = fused_ops.RMSNormRoPEConfig(hidden, head_dim, held, half, norm_dim, interleaved, workgroup_size=32)
    angles = np.arange(held)[:, None] / 10.0 ** np.linspace(0, 4, head_dim // 2)
    cos, sin = np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)
    positions = np.array([0, 10, 3, 3, 7], np.uint32)
    x, weight = random(rows, hidden, half=half), random(config.normed, half=half, seed=1)
    tensors = {"x": x, "weight": weight, "cos": cos, "sin": sin, "positions": positions}
    ir = fused_ops.create_rms_norm_rope_kernel(config)
    y = run(ir, config.grid(rows), tensors, {"y": x.shape}, {"rows": rows, "eps": EPS}, half)["y"]
    within(
        y,
        lambda x, w, c, s: rotated(x, w, c, s, heads, norm_dim == "head", interleaved),
        x,
        weight,
        cos[positions],
        sin[positions],
    )


@HALF
@COLUMNS
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("p", [0.0, 0.3])
def test_softmax_dropout(p, causal, columns, half):
    batch, queries, scale = 2, 4, 0.7
    config = fused_ops.SoftmaxDropoutConfig(columns, half, p, causal, workgroup_size=64)
    x, rows = 3 * random(batch, queries, columns, half=half), batch * queries
    seed = torch.tensor([-(2**62) + 12345, 987654321987])
    tensors = {"x": x, "seed": seed.numpy().view(np.uint32)}
    scalars = {"rows": rows, "queries": queries, "scale": scale}
    ir = fused_ops.create_softmax_dropout_kernel(config)
    y = run(ir, config.grid(rows), tensors, {"y": x.shape}, scalars, half)["y"]
    keep = philox.keep_mask(seed, x.shape, p)
    sees = torch.ones(queries, columns, dtype=torch.bool).tril(columns - queries if causal else columns)

    def reference(x):
        weights = torch.softmax((x * scale).masked_fill(~sees, float("-inf")), -1).nan_to_num(0.0)
        return torch.where(keep, weights * philox.keep_scale(p), 0.0)

    within(y, reference, x)
    np.testing.assert_array_equal(y[(~keep | ~sees).numpy()], 0.0)


@HALF
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize(("columns", "outputs"), [(1, 3), (6, 70), (33, None), (64, 20)])
def test_layer_norm_linear(columns, outputs, bias, half):
    rows = 33
    config = fused_ops.LayerNormLinearConfig(columns, outputs, half, bias)
    shapes = {
        "x": (rows, columns),
        "norm_weight": (columns,),
        "norm_bias": (columns,),
        "weight": (config.outputs, columns),
        "bias": (config.outputs,),
    }
    tensors = {name: random(*shape, half=half, seed=k) for k, (name, shape) in enumerate(shapes.items())}
    ir = fused_ops.create_layer_norm_linear_kernel(config)
    scalars = {"rows": rows, "eps": EPS}
    y = run(ir, config.grid(rows), tensors, {"y": (rows, config.outputs)}, scalars, half)["y"]

    def reference(x, norm_weight, norm_bias, weight, b):
        normed = F.layer_norm(x, (columns,), norm_weight, norm_bias, EPS)
        return F.linear(normed, weight, b if bias else None)

    within(y, reference, *tensors.values())


@pytest.mark.parametrize(
    ("make", "field"),
    [
        (lambda: fused_ops.SwiGLUConfig(0), "hidden_dim must be a whole number of at least 1, got 0"),
        (lambda: fused_ops.SwiGLUConfig(True), "hidden_dim must be"),
        (lambda: fused_ops.SwiGLUConfig(8, use_half=1), "use_half must be True or False, got 1"),
        (lambda: fused_ops.SwiGLUConfig(8, workgroup_size=100), "workgroup_size must be one of 32, 64"),
        (lambda: fused_ops.GeGLUConfig(8, approximate="erf"), "approximate must be one of 'none', 'tanh', got 'erf'"),
        (lambda: fused_ops.ResidualLayerNormConfig(8, placement="mid"), "placement must be one of 'pre', 'post'"),
        (lambda: fused_ops.RMSNormRoPEConfig(9, 3, 4), "head_dim must be even"),
        (lambda: fused_ops.RMSNormRoPEConfig(10, 4, 4), "hidden_dim 10 is not a multiple of head_dim 4"),
        (lambda: fused_ops.RMSNormRoPEConfig(8, 4, 4, norm_dim="all"), "norm_dim must be one of 'row', 'head'"),
        (lambda: fused_ops.NormConfig(8, subgroup=16.5), "subgroup must be one of None, 4, 8, 16, 32, 64, got 16.5"),
        (lambda: fused_ops.NormConfig(8, workgroup_size=32, subgroup=64), "subgroups of 64 in a workgroup of 32"),
        (lambda: fused_ops.SoftmaxDropoutConfig(8, dropout=1.0), "dropout must be a probability in"),
        (lambda: fused_ops.LayerNormLinearConfig(8, 0), "output_dim must be"),
        (lambda: fused_ops.LayerNormLinearConfig(8).grid(2**31), "launch them in parts"),
        (lambda: FlashAttentionConfig(33), "block_size_q must be one of"),
        (lambda: FlashAttentionConfig(head_dim=6), "head_dim must be a multiple of 4"),
        (lambda: FlashAttentionConfig(head_dim=24, use_half=True, matrix="cuda"), "multiple of 16.*cuda's matrix"),
        (lambda: FlashAttentionConfig(matrix="cuda"), "matrix units of cuda multiply f16; set use_half=True"),
        (
            lambda: FlashAttentionConfig(use_half=True, matrix="vulkan", half="bf16"),
            "matrix units through Vulkan multiply f16; with matrix='vulkan' set half='f16'",
        ),
        (lambda: FlashAttentionConfig(256, 256), "need 4096 threads; a workgroup has at most 1024"),
        (lambda: FlashAttentionConfig().grid(8, 2**17), "larger than 65535 along an axis"),
        (lambda: FlashAttentionConfig().grid(-8, 2), "grid: n_q must be a whole number of at least 0, got -8"),
        (lambda: fused_ops.SwiGLUConfig(8).grid(2.5), "grid: rows must be a whole number of at least 0, got 2.5"),
        (lambda: fused_ops.NormConfig(8).grid(-1), "grid: rows must be a whole number of at least 0, got -1"),
        (lambda: fused_ops.NormLinearConfig(8).grid("8"), "grid: rows must be a whole number of at least 0, got '8'"),
        (lambda: fused_ops.RMSNormRoPEConfig(8, 8, 4).grid(None), "grid: rows must be a whole number .*, got None"),
    ],
)
def test_configurations_refuse_in_words(make, field):
    with pytest.raises(ValueError, match=f"(?s)Config: .*{field}"):
        make()


def test_a_kernel_refuses_the_configuration_of_another():
    with pytest.raises(TypeError, match="config must be a GeGLUConfig, got SwiGLUConfig"):
        fused_ops.create_geglu_kernel(fused_ops.SwiGLUConfig(8))
    with pytest.raises(TypeError, match="config must be a SwiGLUConfig, got dict"):
        fused_ops.createSwiGLUKernel({"hidden_dim": 8})
    assert fused_ops.create_swiglu_kernel(fused_ops.SwiGLUConfig(8)) is fused_ops.create_swiglu_kernel(
        fused_ops.SwiGLUConfig(8)
    )


def test_what_is_no_limit_and_no_name():
    with pytest.raises(TypeError, match="limits must be Limits, got 'webgpu'; get them from tilesmith.hardware"):
        flash_attention.preset_for("webgpu")
    with pytest.raises(TypeError, match="gpu_max_shared_memory must be a number of bytes, got '48k'"):
        validate_config(FlashAttentionConfig(), "48k")
    with pytest.raises(TypeError, match="gpu_max_shared_memory must be a number of bytes, got nan"):
        validate_config(FlashAttentionConfig(), float("nan"))
    with pytest.raises(TypeError, match="name must be what a driver calls its device, got None"):
        detect_vendor(None)
    with pytest.raises(TypeError, match="vendor_id must be a PCI id as an int, such as 0x10DE, or None, got '0x10DE'"):
        detect_vendor("a device", "0x10DE")


def test_rows_beyond_one_axis_fold_onto_two():
    config = fused_ops.ResidualLayerNormConfig(1, workgroup_size=32)
    for groups in (65_535, 65_536, 131_072, 10_000_001):
        x, y, z = config.grid(groups * 32)
        assert x <= 65_535 and z == 1 and groups <= x * y < groups + y  # idle ones cost as much as others do to start
    rows, half = 5 * 32, False
    tensors = {n: random(*((rows,) * (k < 2)), 1, seed=k) for k, n in enumerate(("x", "residual", "weight", "bias"))}
    ir = fused_ops.create_residual_layer_norm_kernel(config)
    out = run(ir, (2, 3, 1), tensors, {"y": (rows, 1), "sum": (rows, 1)}, {"rows": rows, "eps": EPS}, half)
    np.testing.assert_array_equal(out["sum"], tensors["x"] + tensors["residual"])


def test_the_seeds_names():
    assert flash_attention.createFlashAttentionKernel is create_flash_attention_kernel
    assert flash_attention.requiredSharedMemory is required_shared_memory
    assert flash_attention.validateConfig is validate_config
    for name in ("LayerNormLinear", "RMSNormRoPE", "SwiGLU", "ResidualLayerNorm", "GeGLU", "SoftmaxDropout"):
        assert callable(getattr(fused_ops, f"create{name}Kernel"))


def test_the_example_runs():
    example = runpy.run_path(str(Path(__file__).parents[1] / "examples" / "portable_kernels.py"))
    assert example["run"](tokens=20, heads=1) < 1e-5
    assert example["memory"]() == 36_864
    with pytest.raises(ValueError, match="allows 32,768"):
        example["memory"](32_768)
    for ir in (*example["attention_kernels"](), *example["fused_kernels"]()):
        assert cuda.generate(ir)
    assert set(example["compile_everywhere"](example["fused_kernels"]()[0])) == {"Vulkan", "CUDA", "Metal", "WebGPU"}


def small(entry, **fields) -> KernelIR:
    """A kernel of the catalogue for rows of 64 elements."""
    given = {"hidden_dim": 64, "head_dim": 32, "max_seq_len": 16} | fields
    return entry.create(entry.config(**{k: v for k, v in given.items() if k in entry.config.__dataclass_fields__}))


@pytest.mark.parametrize("entry", KERNELS.values(), ids=KERNELS)
def test_every_kernel_of_the_catalogue_prints_everywhere(entry):
    ir = small(entry)
    for target in (cuda, metal, wgsl, spirv):
        assert target.generate(ir, limits_of({cuda: "cuda", metal: "metal", wgsl: "webgpu", spirv: "vulkan"}[target]))


def by_subgroups(columns: int, threads: int, heads: int) -> list[KernelIR]:
    """What ops launch on a device with subgroups of 32."""
    how = {"workgroup_size": threads, "subgroup": 32}
    softmax = fused_ops.SoftmaxDropoutConfig(columns, True, dropout=0.1, causal=True, positive=True, **how)
    return [
        fused_ops.create_norm_kernel(fused_ops.NormConfig(columns, "layer", "f16", None, "f16", "f16", **how)),
        fused_ops.create_softmax_dropout_kernel(softmax),
        fused_ops.create_heads_norm_rope_kernel(fused_ops.HeadsNormRoPEConfig(heads, 128, "f16", "f16", **how)),
    ]


def accepted(target: str, ir: KernelIR) -> str:
    """What the target's own compiler or validator says against a kernel; empty if nothing."""
    if target == "cuda":
        return ".local memory is used" * (".local" in cuda.ptx(ir, "sm_90"))
    printed = {"metal": metal, "webgpu": wgsl, "naga": wgsl, "vulkan": spirv}[target].generate(ir)
    check = {
        "metal": tools.compile_metal,
        "webgpu": tools.validate_wgsl,
        "naga": webgpu_runner.validate,
        "vulkan": tools.validate_spirv,
    }[target]
    return check(printed)


@pytest.mark.parametrize("target", ["cuda", "metal", "webgpu", "naga", "vulkan"])
def test_compilers_accept_every_kernel(target, missing):
    reason = {
        "cuda": without_nvrtc,
        "metal": lambda: None if tools.cpp() else "no C++ compiler",
        "webgpu": lambda: tools.dawn() if isinstance(tools.dawn(), str) else None,
        "naga": lambda: webgpu_runner.missing({"f16"}),
        "vulkan": lambda: tools.spirv_val() if isinstance(tools.spirv_val(), str) else None,
    }[target]()
    if reason is not None:
        missing(reason)
    for entry in KERNELS.values():
        assert accepted(target, small(entry, use_half=True)) == ""
    for ir in by_subgroups(2048, 128, 4) if target in ("cuda", "metal", "vulkan") else ():
        assert accepted(target, ir) == ""
    for name in {"cuda": ("ampere", "hopper"), "metal": ("apple",), "vulkan": ("rdna3",)}.get(target, ()):
        assert accepted(target, create_flash_attention_kernel(getattr(TunedConfigs, name))) == ""


@pytest.mark.parametrize("arch", ["sm_80", "sm_90", "sm_120"])
def test_registers_hold_every_kernel(arch, missing):
    """At a model's sizes, but for four registers around a loop. A norm that keeps too much, as it once did, is the
    control."""
    reason = without_nvrtc()
    if reason is not None:
        missing(reason)

    def local_bytes(ir: KernelIR) -> int:
        return tools.local_bytes(nvrtc.compile(cuda.generate(ir), ir.name, arch, binary=True))

    attention = [getattr(TunedConfigs, name) for name in ("ampere", "hopper", "fallback", "cuda", "vulkan", "webgpu")]
    kernels = [create_flash_attention_kernel(config) for config in attention]
    kernels += [small(e, hidden_dim=4096, head_dim=128, use_half=True) for n, e in KERNELS.items() if "flash" not in n]
    for columns, threads in ((16_384, 256), (32_768, 512), (65_536, 1024)):
        config = fused_ops.ResidualLayerNormConfig(columns, use_half=True, workgroup_size=threads)
        kernels.append(fused_ops.create_residual_layer_norm_kernel(config))
        if (columns, arch) != (65_536, "sm_120"):  # where a layer norm's 64 registers are 40 too few
            kernels += by_subgroups(columns, threads, 32)
    assert max(map(local_bytes, kernels)) <= 16
    config = fused_ops.NormConfig(65_536, x="f16", residual="f16", weight="f16", workgroup_size=1024)
    assert local_bytes(fused_ops.create_norm_kernel(config)) > 64


def without_nvrtc() -> str | None:
    try:
        nvrtc.library()
    except KernelError as problem:
        return str(problem)
    return None


def test_kernels_know_neither_torch_nor_triton():
    code = "import sys; import tilesmith.kernels; sys.exit(bool({'torch', 'triton', 'numpy'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
