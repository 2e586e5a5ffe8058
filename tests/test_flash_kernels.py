"""Portable flash attention in the interpreter, against plain PyTorch in float64; presets, limits, vendors."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from kernel_runs import random, within
from tilesmith.codegen import cuda, interpret, metal, spirv, wgsl
from tilesmith.hardware.limits import Limits, limits_of
from tilesmith.kernels import detect_vendor, preset_named
from tilesmith.kernels.flash_attention import (
    FlashAttentionConfig,
    TunedConfigs,
    create_flash_attention_kernel,
    preset_for,
    required_shared_memory,
    validate_config,
)
from tilesmith.ops.attn import reference

HALF = pytest.mark.parametrize("half", [False, True], ids=["f32", "f16"])


def attended(q, k, v, scale: float, causal: bool):
    groups = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
    scores = (q @ k.mT).float().to(torch.promote_types(q.dtype, torch.float32)) * scale
    if causal:
        sees = torch.ones(scores.shape[-2:], dtype=torch.bool).tril(k.shape[2] - q.shape[2])
        scores = scores.masked_fill(~sees, float("-inf"))
    return (torch.softmax(scores, -1).nan_to_num(0.0).to(v.dtype) @ v), torch.logsumexp(scores, -1)


def attend(config: FlashAttentionConfig, heads: int, kv_heads: int, n_q: int, n_kv: int, batch: int = 1) -> None:
    """Run a configuration on random tensors and compare out and, where it is written, lse."""
    half, d = config.use_half, config.head_dim
    q = random(batch, heads, n_q, d, half=half)
    k, v = (random(batch, kv_heads, n_kv, d, half=half, seed=s) for s in (1, 2))
    out, lse = np.full_like(q, np.nan), np.full(q.shape[:3], np.nan, np.float32)
    words = (lambda x: x.view(np.uint32)) if config.matrix != "none" else (lambda x: x)
    tensors = {"q": words(q), "k": words(k), "v": words(v), "out": out} | ({"lse": lse} if config.return_lse else {})
    scale = d**-0.5
    scalars = {"n_q": n_q, "n_kv": n_kv, "heads": heads, "kv_heads": kv_heads, "scale": scale}
    interpret(create_flash_attention_kernel(config), config.grid(n_q, heads, batch), tensors, scalars)
    within(out, lambda q, k, v: attended(q, k, v, scale, config.causal)[0], q, k, v)
    if config.return_lse:
        wanted = attended(*(torch.from_numpy(x).double() for x in (q, k, v)), scale, config.causal)[1]
        sees = wanted > -torch.inf
        torch.testing.assert_close(torch.from_numpy(lse).double()[sees], wanted[sees], atol=1e-4, rtol=1e-5)
        assert (lse[~sees.numpy()] < -1e38).all()


@HALF
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("n_q", "n_kv"), [(1, 1), (37, 70), (70, 37)])
def test_flash_attention_of_any_length(n_q, n_kv, causal, half):
    attend(FlashAttentionConfig(16, 32, 32, half, causal, return_lse=True), 2, 1, n_q, n_kv)


@pytest.mark.parametrize("blocks_and_head_dim", [(16, 16, 4), (32, 16, 20), (16, 64, 64), (16, 32, 80)])
def test_flash_attention_head_dims_and_blocks(blocks_and_head_dim):
    attend(FlashAttentionConfig(*blocks_and_head_dim, causal=True), 1, 1, 33, 33)


def test_flash_attention_of_groups_and_batches():
    attend(FlashAttentionConfig(16, 16, 16), heads=6, kv_heads=2, n_q=17, n_kv=20, batch=2)


MATRIX = [
    FlashAttentionConfig(32, 32, 32, True, matrix="cuda", return_lse=True),
    FlashAttentionConfig(16, 128, 16, True, causal=True, matrix="cuda", return_lse=True, ahead=True),
    FlashAttentionConfig(32, 16, 48, True, causal=True, matrix="metal", return_lse=True),
    FlashAttentionConfig(16, 16, 8, True, matrix="metal", return_lse=True),
    FlashAttentionConfig(32, 128, 32, True, causal=True, matrix="vulkan", return_lse=True, ahead=True),
    FlashAttentionConfig(16, 32, 16, True, matrix="vulkan", return_lse=True),
    FlashAttentionConfig(32, 16, 32, True, causal=True, matrix="vulkan-nv", return_lse=True),
    FlashAttentionConfig(16, 128, 16, True, matrix="vulkan-nv", return_lse=True),
]


@pytest.mark.parametrize("config", MATRIX, ids=lambda c: f"{c.matrix}-{c.head_dim}")
@pytest.mark.parametrize(("n_q", "n_kv"), [(1, 1), (37, 70), (70, 37)])
def test_flash_attention_on_matrix_units(config, n_q, n_kv):
    attend(config, 2, 1, n_q, n_kv)


@pytest.mark.parametrize(
    "config",
    [*(FlashAttentionConfig(16, 16, 16, half, return_lse=True) for half in (False, True)), *MATRIX],
    ids=lambda c: f"{c.matrix}-{c.head_dim}-{c.use_half}",
)
@pytest.mark.parametrize("nan_key", [False, True])
def test_a_score_of_nan_makes_its_row_nan_and_an_infinite_one_is_the_lse(config, nan_key):
    d, half = config.head_dim, config.use_half
    q, k, v = (random(1, 1, 20, d, half=half, seed=s) for s in range(3))
    q[0, 0, 2, 0], q[0, 0, 4, 0], q[0, 0, 6] = np.nan, np.inf, -np.inf  # 6: no score of this sum is a number
    if nan_key:
        q[0, 0, 4, 0], k[0, 0, 7, 1] = 0.0, np.nan
    out, lse = np.full_like(q, np.nan), np.full(q.shape[:3], np.nan, np.float32)
    words = (lambda x: x.view(np.uint32)) if config.matrix != "none" else (lambda x: x)
    scalars = {"n_q": 20, "n_kv": 20, "heads": 1, "kv_heads": 1, "scale": 0.3}
    tensors = {"q": words(q), "k": words(k), "v": words(v), "out": out, "lse": lse}
    interpret(create_flash_attention_kernel(config), config.grid(20, 1), tensors, scalars)
    wanted, sums = reference.attention(*map(torch.from_numpy, (q, k, v)), scale=0.3, causal=config.causal)
    assert sums[0, 0, [2, 6, 7]].isnan().tolist() == [True, True, nan_key]
    assert nan_key or sums[0, 0, 4] == torch.inf
    assert sums[0, 0, [0, 19]].isnan().tolist() == [nan_key and not config.causal, nan_key]
    torch.testing.assert_close(torch.from_numpy(out), wanted, atol=2e-3 if half else 1e-5, rtol=1e-3, equal_nan=True)
    torch.testing.assert_close(torch.from_numpy(lse), sums, atol=1e-4, rtol=1e-5, equal_nan=True)


def test_published_presets_are_as_published():
    published = {
        "ampere": (128, 128, 64, True),
        "hopper": (128, 256, 128, True),
        "rdna3": (64, 64, 64, True),
        "apple": (64, 64, 64, True),
        "fallback": (32, 32, 64, False),
    }
    for name, wanted in published.items():
        c = getattr(TunedConfigs, name)
        assert (c.block_size_q, c.block_size_kv, c.head_dim, c.use_half) == wanted


@pytest.mark.parametrize("backend", ["cuda", "metal", "vulkan", "webgpu"])
def test_presets_fit_their_backend(backend):
    limits = limits_of(backend)
    config = getattr(TunedConfigs, backend)
    validate_config(config, limits.shared_memory)
    ir = create_flash_attention_kernel(config)
    assert ir.threads == config.threads
    {"cuda": cuda, "metal": metal, "vulkan": spirv, "webgpu": wgsl}[backend].generate(ir, limits)
    for head_dim in (32, 64, 128):
        chosen = preset_for(limits, head_dim)
        assert chosen.head_dim == head_dim
        validate_config(chosen, limits.shared_memory)


def test_a_preset_beyond_the_gpu_is_refused_in_words():
    assert required_shared_memory(TunedConfigs.hopper) == 139_264
    validate_config(TunedConfigs.hopper, limits_of("cuda", "sm90").shared_memory)
    with pytest.raises(ValueError, match="blocks of 128 x 256 with head_dim 128 need 139,264 bytes.* allows 101,376"):
        validate_config(TunedConfigs.hopper, limits_of("cuda", "sm89").shared_memory)
    with pytest.raises(ValueError, match="no flash attention with head_dim 256 and matrix 'none' fits tiny"):
        preset_for(Limits("tiny", 4096, 64, (64, 64, 64)), 256)


@pytest.mark.parametrize(
    ("name", "vendor", "preset"),
    [
        ("NVIDIA H200", "nvidia", "hopper"),
        ("NVIDIA A100-SXM4-80GB", "nvidia", "ampere"),
        ("NVIDIA GeForce RTX 4090", "nvidia", "ampere"),
        ("NVIDIA GeForce GTX 1080", "nvidia", "fallback"),
        ("AMD Radeon RX 7900 XTX (RADV NAVI31)", "amd", "rdna3"),
        ("AMD Radeon RX 580", "amd", "fallback"),
        ("Apple M3 Max", "apple", "apple"),
        ("Intel(R) Arc(TM) A770", "intel", "fallback"),
        ("llvmpipe (LLVM 15.0.6, 256 bits)", "software", "fallback"),
        ("Adreno (TM) 740", "qualcomm", "fallback"),
        ("", "unknown", "fallback"),
    ],
)
def test_vendors_and_their_presets(name, vendor, preset):
    assert detect_vendor(name) == vendor
    assert preset_named(name) == getattr(TunedConfigs, preset)


def test_the_pci_id_says_the_vendor():
    assert detect_vendor("anything", 0x1002) == "amd"
