"""Attention with head dims above 256: which calls Triton's kernels serve on which GPU, and what they refuse."""

import pytest
import torch

import tilesmith
from tilesmith.hardware.detect import arch_named
from tilesmith.ops import Mask, Score
from tilesmith.ops.attn.plan.configs import AttentionVjpConfig
from tilesmith.ops.attn.plan.shape import Shape
from tilesmith.ops.attn.plan.triton import triton_backward
from tilesmith.ops.attn.plan.triton_configs import default_backward, default_forward

pytestmark = pytest.mark.usefixtures("needs_triton")
T, H = 4096, 8
WAYS = ("packed", "packed_window", "documents", "lengths", "bias", "dropout", "dense_mask")


def _empty(*shape, dtype=torch.bfloat16):
    return torch.empty(*shape, dtype=dtype, device="meta", requires_grad=dtype.is_floating_point)


def _told(way, arch, gradient, dims=(512, 512), dtype=torch.bfloat16, keys=T):
    dim, dim_v = dims
    heads = 2 if dim <= 512 else 1
    q, k = _empty(1, H, T, dim, dtype=dtype), _empty(1, heads, keys, dim, dtype=dtype)
    v = k[..., :dim_v] if dim > 512 else _empty(1, heads, keys, dim_v, dtype=dtype)
    ends, seed = _empty(9, dtype=torch.int32), _empty(2, dtype=torch.int64)
    packed = {"cu_seqlens_q": ends, "cu_seqlens_k": ends, "max_seqlen_q": 900, "max_seqlen_k": 900}
    given = {
        "causal": {},
        "packed": packed,
        "packed_window": {
            **packed, "mask": Mask(causal=True, window=512), "score": Score(softcap=30.0), "sinks": _empty(H)
        },
        "documents": {"mask": Mask(causal=True, documents=_empty(1, T, dtype=torch.int32))},
        "lengths": {"kv_lengths": _empty(1, dtype=torch.int32)},
        "bias": {"score": Score(bias=_empty(1, 1, T, T))},
        "dropout": {"dropout_p": 0.1, "seed": seed, **packed},
        "dense_mask": {"mask": Mask(causal=True, dense=_empty(1, 1, T, T, dtype=torch.bool))},
        "dropped_mask": {"mask": Mask(dense=_empty(1, 1, T, T, dtype=torch.bool)), "dropout_p": 0.1, "seed": seed},
    }[way]  # fmt: skip
    call = {"mask": Mask(causal=True), **given}
    return str(tilesmith.explain("attention", q, k, v, arch=arch, gradient=gradient, **call))


@pytest.mark.parametrize("gradient", [False, True], ids=["forward", "backward"])
@pytest.mark.parametrize("arch", ["sm80", "sm86", "sm89", "sm90", "sm120", "gfx90a", "gfx942"])
@pytest.mark.parametrize("way", WAYS)
def test_no_call_of_512_columns_ends_at_the_reference(way, arch, gradient):
    told = _told(way, arch, gradient)
    assert told.splitlines()[0].split()[2] == "triton", told


@pytest.mark.parametrize("gradient", [False, True], ids=["forward", "backward"])
@pytest.mark.parametrize("arch", ["sm89", "gfx942"])
def test_unpacked_calls_are_served_without_hopper(arch, gradient):
    for dims in ((264, 264), (320, 512), (512, 512)):
        assert "-> triton (" in _told("causal", arch, gradient, dims)


@pytest.mark.parametrize(
    ("way", "arch", "gradient", "dtype", "reason"),
    [
        ("packed", "sm75", False, torch.float16, "head dims above 256 need 98 KB of shared memory, sm75 has 64"),
        ("packed", "sm89", True, torch.float32, "head dims above 256 need 200 KB of shared memory, sm89 has 99"),
        ("packed", "gfx942", False, torch.float32, "head dims above 256 need 200 KB of shared memory, gfx942 has 64"),
        ("packed", "gfx1100", True, torch.bfloat16, "head dims above 256 need 512 registers a thread, gfx1100 has 256"),
        ("dropped_mask", "sm89", True, torch.bfloat16, "mask and seed: with head dims above 256 they need 160 KB of"),
    ],
)
def test_what_does_not_fit_is_refused_in_words(way, arch, gradient, dtype, reason):
    told = _told(way, arch, gradient, dtype=dtype)
    assert "-> reference" in told and reason in told, told


def test_dropout_under_a_mask_is_refused_only_to_gradients_of_little_room():
    assert "-> triton (" in _told("dropped_mask", "sm89", False)
    assert "-> triton (" in _told("dropped_mask", "sm80", True)


@pytest.mark.parametrize("arch", ["sm80", "sm86", "sm89", "sm90", "sm120"])
def test_tiles_fit_shared_memory(arch):
    arch = arch_named(arch)
    dims = {"dim": 512, "value_dim": 512, "tokens": T, "drawn": 1, "documents": 1}
    forward, backward = (f(dims, arch, torch.bfloat16) for f in (default_forward, default_backward))
    queries, keys = backward.dkv_block_m, backward.dkv_block_n
    # as compiled offline for sm80 and sm89: queries and their gradients, one of them once more; keys and values
    assert 1024 * (3 * queries + 2 * keys) <= arch.shared_memory
    assert 2048 * (backward.dq_block_m + backward.dq_block_n) <= arch.shared_memory
    assert 1024 * (forward.block_m + forward.block_n) <= arch.shared_memory


@pytest.mark.parametrize("arch", ["sm80", "sm89", "sm90", "gfx942"])
@pytest.mark.parametrize("way", ["causal", "packed", "documents", "lengths", "dense_mask"])
def test_prefill_on_latent_keys_is_split(way, arch):
    """Absorbed MLA with as many queries as keys, which no kernel of tiles of one head reads."""
    told = _told(way, arch, False, (576, 512))
    assert ("-> reference" if way == "packed" else "-> triton_split") in told.splitlines()[0], told


@pytest.mark.parametrize("arch", ["sm80", "sm89", "sm90"])
def test_narrower_prefills_are_not_split(arch):
    assert "-> triton_split" not in _told("causal", arch, False, (512, 512))
    assert "-> triton_split" not in _told("causal", arch, False, (512, 512), keys=3 * T)


@pytest.mark.parametrize(("dim", "itemsize"), [(256, 4), (512, 2), (512, 4)])
def test_tiles_of_a_broadcast_bias_fit_shared_memory(dim, itemsize):
    """As compiled for sm90, q, k, v and dout of a tile lie in shared memory at a time in fp32, half of them in bf16."""
    s = Shape(1, 2, 2, T, T, dim, dim, itemsize, itemsize, bias=(1, 1, 1, T), wants=(True,) * 4 + (False,))
    plan = triton_backward(s, arch_named("sm90"), AttentionVjpConfig(32, 32, 8, 1, 32, 32, 8, 1), itemsize == 4)
    (step,) = (step for step in plan.steps if step.kernel == "_attention_dbias_kernel")
    rows = 2 * (step.constants["BLOCK_M"] + step.constants["BLOCK_N"])
    assert rows * dim * itemsize <= arch_named("sm90").shared_memory
    assert step.grid == (T // step.constants["BLOCK_N"],)


@pytest.mark.parametrize("arch", ["sm80", "sm90"])
@pytest.mark.parametrize(("way", "queries"), [("packed", 16), ("documents", 16), ("dropout", 16), ("bias", 32)])
def test_gradients_of_documents_walk_few_queries_at_a_time(way, queries, arch):
    """With 32 of them the sums' own registers spill."""
    assert f"dk and dv in tiles of 32 keys and {queries} queries" in _told(way, arch, True)
