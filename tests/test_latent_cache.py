"""Decode on latent caches: which calls are known to have their values in their keys, and what serves them."""

import random

import pytest
import torch

import tilesmith
from plan_calls import SM90, latent
from tilesmith import cli
from tilesmith.engine import cases, torch_private
from tilesmith.engine.backends import triton_missing
from tilesmith.flash_attention import flash_attn_with_kvcache
from tilesmith.ops import Mask
from tilesmith.ops.attn.latent import values_in_keys
from tilesmith.ops.attn.op import attention_op
from tilesmith.ops.attn.plan import Shape
from tilesmith.ops.attn.plan.configs import SplitConfig
from tilesmith.ops.attn.plan.decode import triton_split
from tilesmith.ops.attn.plan.shape import key_tiles

needs_triton = pytest.mark.skipif(triton_missing() is not None, reason=str(triton_missing()))


def _others(k):
    """Values that are not the first columns of k, each for a reason of its own."""
    yield k[..., :512].clone()
    yield k[..., 64:]
    yield k[..., 1:513]
    yield k.clone()[..., :512]
    yield k.as_strided((2, 1, 40, 512), (k.stride(0), k.stride(1), k.stride(2) // 2, 1))
    yield torch.cat((k, k), -1)[..., :600]


def test_values_are_known_in_their_keys():
    k = torch.randn(2, 1, 80, 576)
    assert values_in_keys(k, k) and values_in_keys(k, k[..., :512]) and values_in_keys(k[1:], k[1:, ..., :64])
    assert not any(values_in_keys(k, v) for v in _others(k))
    meta = k.to("meta")
    assert values_in_keys(meta, meta[..., :512]) and not any(values_in_keys(meta, v) for v in _others(meta))
    view = k[..., :512]
    with torch_private.fake_tensor_mode() as mode:
        fake, view = mode.from_tensor(k), mode.from_tensor(view)
        assert values_in_keys(fake, view) and values_in_keys(fake, fake[..., :512])
        assert not any(values_in_keys(fake, v) for v in _others(fake))


def test_cases_have_them_as_a_view():
    (case,) = (case for case in cases("attention") if case.name == "decode_latent_pages")
    args = case.build(torch.device("cpu"), torch.float32, case.generator())
    assert values_in_keys(args["k"], args["v"]) and args["v"].shape[3] == 24 < args["k"].shape[3]


@needs_triton
def test_the_command_explains_them_as_a_view():
    runner = pytest.importorskip("typer.testing").CliRunner()
    told = runner.invoke(cli.build(), ["explain", "attention", "--case", "decode_576_128_heads", "--arch", "sm90"])
    assert told.exit_code == 0 and "hopper_latent" in told.output, told.output


def test_what_is_kept_for_a_shared_call_serves_no_other():
    q, k = torch.randn(2, 4, 1, 576), torch.randn(2, 1, 80, 576)
    keys = [
        attention_op._key(False, "", *attention_op.bind((), {"q": q, "k": k, "v": v, "causal": True}))
        for v in (k[..., :512], k.clone()[..., :512])
    ]
    assert keys[0] != keys[1]


def test_compiled_code_tells_them_apart():
    name = f"{tilesmith.__version__}|0,1,2:a call of test_latent_cache"
    run = attention_op.handle.known[name]
    q, k = torch.randn(1, 4, 1, 48), torch.randn(1, 1, 50, 48)
    for v in (k[..., :32], k.clone()[..., :32], k[..., :32]):
        args = attention_op.bind((), {"q": q, "k": k, "v": v})
        torch.testing.assert_close(run(*args, "")[0], attention_op.reference(*args)[0])
    kept = {key for key in attention_op._recent if key == name or name in key}
    assert kept == {name, (name, 0, 0, 0, True)}
    del attention_op.handle.known[name]


@pytest.mark.parametrize(
    ("dims", "wanted"),
    [
        ((576, 512, True), (512, 64, True)),
        ((576, 512, False), (512, 64, False)),
        ((512, 512, False), (512, 0, False)),
        ((192, 128, False), (256, 0, False)),
        ((192, 128, True), (128, 64, True)),
        ((72, 64, True), (64, 16, True)),
        ((128, 100, True), (128, 0, True)),
    ],
)
def test_columns_of_keys_are_read_once(dims, wanted):
    assert key_tiles(*dims) == wanted


@needs_triton
@pytest.mark.parametrize(
    ("heads", "tokens", "name"),
    [(16, 1, "triton_split"), (128, 2, "hopper_latent"), (48, 3, "hopper_latent"), (20, 3, "triton_split")],
)
def test_hopper_has_a_kernel_for_them(heads, tokens, name):
    """Not for 16 rows, and not where squares of 4 heads and 16 tokens would hold 12 rows of 64."""
    q, k = (torch.empty(2, h, t, 576, dtype=torch.bfloat16) for h, t in ((heads, tokens), (1, 4096)))
    told = str(tilesmith.explain("attention", q, k, k[..., :512], Mask(causal=True), arch="sm90"))
    assert f"-> {name}" in told
    assert "values are the first columns of the keys and are not loaded" in told
    told = str(tilesmith.explain("attention", q, k, k[..., :512].clone(), Mask(causal=True), arch="sm90"))
    assert "-> triton_split" in told and "not loaded" not in told
    assert "v is not k's first columns in memory" in told
    told = str(tilesmith.explain("attention", q, k, k[..., :512], Mask(causal=True), arch="sm80"))
    assert "-> triton_split" in told and "not loaded" in told


def test_latent_plans_hold_together():
    chance = random.Random(5)
    for _ in range(500):
        heads, tokens = chance.choice((1, 3, 16, 20, 48, 128)), chance.randint(1, 9)
        page = chance.choice((0, 64, 128))
        keys = chance.randint(1, 300) * 128
        s = Shape(chance.randint(1, 70), heads, 1, tokens, keys, chance.choice((520, 576)), 512, 2, 2, True, -1, 0,
                  lengths=chance.random() < 0.5, page=page, row_pages=keys // max(page, 1), shared=True)  # fmt: skip
        plan = latent(s)
        step = plan.steps[0]
        assert step.shared_memory <= SM90.shared_memory and step.constants["D"] + step.constants["REST"] == 576
        assert step.grid[0] == step.numbers["tiles"] * plan.splits and step.grid[1:] == (1, s.batch)
        rows = 64 // step.constants["HEADS"] * step.constants["HEADS"]
        assert rows == 64 and step.numbers["tiles"] * 64 >= heads * tokens
        assert (len(plan.steps) == 2) == (plan.splits > 1) == bool(plan.scratch)
        own = triton_split(s, SM90, SplitConfig(64, 64, 1, 8, 2)).steps[0].constants
        assert own["SHARED"] and own["BLOCK_D"] + own["KEY_REST"] >= s.dim and own["BLOCK_DV"] == 512


def test_flash_attn_with_kvcache_takes_a_latent_cache():
    q, cache = torch.randn(2, 3, 16, 576), torch.randn(4, 40, 1, 576)
    lengths, rows = (torch.tensor(x, dtype=torch.int32) for x in ([40, 17], [3, 1]))
    given = {"cache_seqlens": lengths, "cache_batch_idx": rows, "softmax_scale": 192**-0.5, "causal": True}
    out = flash_attn_with_kvcache(q, cache, cache[..., :512], **given)
    torch.testing.assert_close(out, flash_attn_with_kvcache(q, cache, cache[..., :512].clone(), **given))
    assert out.shape == (2, 3, 16, 512)
    before, new = cache.clone(), torch.randn(2, 3, 1, 576)
    with pytest.raises(ValueError, match=r"v_cache begins where .* written alone, by ops.kv_cache_append\("):
        flash_attn_with_kvcache(q, cache, cache[..., :512], new, new[..., :512], **given | {"cache_seqlens": 5})
    assert torch.equal(cache, before)
