"""examples/webgpu: its kernels in the interpreter, and its page in Chromium, whose numbers are checked here again."""

from __future__ import annotations

import base64
import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.nn import functional as F

import chromium
from kernel_runs import EPS, random, run, within
from tilesmith.cli.export import NEW_TOKENS, export
from tilesmith.cli.text import BytePairs, python_reference
from tilesmith.device import philox
from tilesmith.engine import ops, use
from tilesmith.engine.backends import REFERENCE
from tilesmith.nn import Decoder, DecoderConfig, generate
from tilesmith.validate.budget import compare

EXAMPLE = Path(__file__).parents[1] / "examples" / "webgpu"
PROMPT = "The following example"


def example_kernels():
    """examples/webgpu/kernels.py as a module."""
    spec = importlib.util.spec_from_file_location("webgpu_example_kernels", EXAMPLE / "kernels.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


KERNELS = example_kernels()


@pytest.mark.parametrize("accumulate", [False, True])
@pytest.mark.parametrize(("rows", "inputs", "outputs"), [(1, 4, 3), (19, 20, 18), (16, 64, 33)])
def test_linear(rows, inputs, outputs, accumulate):
    x, weight, y = random(rows, inputs), random(outputs, inputs, seed=1), random(rows, outputs, seed=2)

    def reference(x, weight, y):
        return F.linear(x, weight) + (y if accumulate else 0)

    grid = (-(-outputs // KERNELS.OUTPUTS), -(-rows // KERNELS.ROWS), 1)
    tensors, sizes = {"x": x, "weight": weight, "y": y.copy()}, {"vectors": inputs // 4, "outputs": outputs}
    run(KERNELS.linear(accumulate), grid, tensors, {}, sizes | {"rows": rows}, False)
    within(tensors["y"], reference, x, weight, y)
    if rows == 1:
        tensors["y"] = y.copy()
        grid = (-(-outputs // KERNELS.ROW_OUTPUTS), 1, 1)
        run(KERNELS.linear_row(accumulate), grid, tensors, {}, sizes, False)
        within(tensors["y"], reference, x, weight, y)


def test_rows_of_a_table_and_their_norm():
    table, tokens, weight = random(7, 20), np.array([6, 0, 3], np.uint32), random(20, seed=1)
    x = run(KERNELS.embedding(20), (3, 1, 1), {"table": table, "tokens": tokens}, {"x": (3, 20)}, {}, False)["x"]
    np.testing.assert_array_equal(x, table[tokens])
    tensors = {"x": x, "weight": weight}
    y = run(KERNELS.rms_norm(20), (3, 1, 1), tensors, {"y": (3, 20)}, {"eps": EPS}, False)["y"]
    within(y, lambda x, w: F.rms_norm(x, (20,), w, EPS), x, weight)


def test_attention_over_a_cache():
    """Three tokens after five, in a cache of eleven slots: what is cached, the output, its statistics, the weights."""
    heads, groups, dim, slots, past, new = 4, 2, 8, 11, 5, 3
    total = past + new
    kernels = KERNELS.rope_append(heads, groups, dim, slots), KERNELS.cached_attention(heads, groups, dim, slots)
    angles = np.arange(slots)[:, None] / 10.0 ** np.linspace(0, 2, dim // 2)
    cos, sin = np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)
    qkv, nan = random(total, (heads + 2 * groups) * dim), np.full((groups, slots, dim), np.nan, np.float32)
    cache = {"keys": nan, "values": nan.copy()}
    for rows, first in ((past, 0), (new, past)):
        scalars = {"tokens": rows, "past": first}
        tensors = {"qkv": qkv[first : first + rows].copy(), "cos": cos, "sin": sin} | cache
        q = run(kernels[0], (rows, 1, 1), tensors, {"q": (heads, rows, dim)}, scalars, False)["q"]
        shapes = {"out": (rows, heads * dim), "lse": (heads, rows)}
        got = run(kernels[1], (rows, heads, 1), {"q": q, **cache}, shapes, scalars, False)

    def turned(x, cos, sin):
        (a, b), (c, s) = x.chunk(2, -1), (cos[:total, None].to(x.dtype), sin[:total, None].to(x.dtype))
        return torch.cat((a * c - b * s, b * c + a * s), -1).transpose(0, 1)

    def scores(qkv, cos, sin):
        q, k, v = (part.unflatten(-1, (-1, dim)) for part in qkv.split([heads * dim, groups * dim, groups * dim], -1))
        k, v = (x.repeat_interleave(heads // groups, 0) for x in (turned(k, cos, sin), v.transpose(0, 1)))
        seen = torch.ones(total, total, dtype=torch.bool).tril()
        hidden = (turned(q, cos, sin) @ k.transpose(1, 2) * dim**-0.5).masked_fill(~seen, -torch.inf)
        return hidden[:, past:], v

    def out(*given):
        hidden, v = scores(*given)
        return (hidden.softmax(-1) @ v).transpose(0, 1).flatten(1)

    within(got["out"], out, qkv, cos, sin)
    within(got["lse"], lambda *given: scores(*given)[0].logsumexp(-1), qkv, cos, sin)
    keys = np.ascontiguousarray(cache["keys"][:, past:total])
    tensors = {"q": q, "keys": keys, "lse": got["lse"]}
    scalars = {"tokens": new, "stride": new, "causal": 0, "scale": dim**-0.5}
    weights = run(
        KERNELS.attention_weights(heads, groups, dim),
        (1, new, heads),
        tensors,
        {"weights": (heads, new, new)},
        scalars,
        False,
    )["weights"]
    exact = scores(*(torch.from_numpy(x).double() for x in (qkv, cos, sin)))[0].softmax(-1)[:, :, past:].numpy()
    mask = np.tril(np.ones((new, new), bool))
    np.testing.assert_allclose(weights[:, mask], exact[:, mask], rtol=1e-5)


RESULTS = """tilesmith.finished.then((found) => JSON.stringify(found, (name, value) => ArrayBuffer.isView(value)
  ? { dtype: value.constructor.name, data: new Uint8Array(value.buffer, value.byteOffset, value.byteLength).toBase64() }
  : value))"""
"""What the page found, arrays as their bytes."""

COLOURS = """[...document.querySelectorAll("canvas")].map((canvas) => new Set(
  new Uint32Array(canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height).data.buffer)).size)"""

FEWER = """(async () => {
  const form = document.querySelector("#attention form");
  form.tokens.value = 128;
  form.dispatchEvent(new Event("change"));
  while (form.inert) await new Promise((done) => setTimeout(done, 20));
  return document.querySelector("#attention-result").textContent;
})()"""

WRITE = """(async () => {
  const form = document.querySelector("#writing");
  form.tokens.value = %d;
  form.temperature.value = 0;
  form.requestSubmit();
  while (form.inert) await new Promise((done) => setTimeout(done, 20));
  return [...document.querySelectorAll("#text span")].map((span) => span.textContent);
})()"""


def arrays(found: dict) -> dict | np.ndarray:
    """JSON's objects with the page's arrays among them."""
    dtypes = {"Float32Array": np.float32, "Uint32Array": np.uint32}
    if found.keys() == {"dtype", "data"}:
        return np.frombuffer(base64.b64decode(found["data"]), dtypes[found["dtype"]]).copy()
    return found


def exported(folder: Path) -> tuple[Decoder, BytePairs]:
    """A very small decoder with random weights, written for the page."""
    torch.manual_seed(0)
    pairs = BytePairs.train(python_reference()[:20_000], 320)
    config = DecoderConfig(len(pairs), 64, 96, 2, 4, num_kv_heads=2, max_positions=160, init_std=0.15)
    decoder = Decoder(config)
    export(folder, config, decoder.state_dict(), pairs, PROMPT)
    return decoder, pairs


def test_the_page(tmp_path, missing):
    if chromium.found() is None:
        missing("no Chromium: apt install chromium")
    decoder, pairs = exported(tmp_path / "model")
    command = [sys.executable, EXAMPLE / "build.py", tmp_path / "page", "--model", tmp_path / "model"]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    with chromium.served(tmp_path / "page") as address, chromium.Page() as page:
        page.open(address)
        found = json.loads(page.evaluate(RESULTS, timeout=900), object_hook=arrays)
        colours = page.evaluate(COLOURS)
        fewer = page.evaluate(FEWER)
        words = page.evaluate(WRITE % NEW_TOKENS)
        page.call("Emulation.setDeviceMetricsOverride", width=360, height=800, deviceScaleFactor=2, mobile=True)
        width = page.evaluate("document.documentElement.scrollWidth")
        assert page.errors == []
    check_attention(found["attention"])
    for name, op in found["fused"].items():
        assert op["ok"], name
        check_fused(name, op["inputs"], op["outputs"], op["scalars"])
    check_decoder(found["decoder"], decoder, pairs, words)
    assert len(colours) == 5
    assert min(colours) > 20, "a picture is blank"
    assert "✓ 128 tokens" in fewer
    assert width <= 360


def check_attention(found: dict) -> None:
    """The output and the weights of every head, and what the page says of itself."""
    tokens, scale = found["tokens"], found["scale"]
    seen = torch.ones(tokens, tokens, dtype=torch.bool).tril()
    q, k, v, out = (found[name].reshape(4, tokens, -1) for name in ("q", "k", "v", "out"))

    def weights(q, k):
        return (q @ k.transpose(1, 2) * scale).masked_fill(~seen, -torch.inf).softmax(-1)

    assert found["ok"]
    assert found["causal"]
    within(out, lambda q, k, v: weights(q, k) @ v, q, k, v)
    got = found["weights"].reshape(4, tokens, tokens)
    np.testing.assert_allclose(got.sum(-1), 1.0, rtol=1e-5)
    np.testing.assert_allclose(got, weights(torch.from_numpy(q).double(), torch.from_numpy(k).double()), atol=1e-5)


def check_fused(name: str, given: dict, outputs: dict, scalars: dict) -> None:
    """One fused op of the page against PyTorch."""
    rows = scalars["rows"]
    x = given.get("x", np.empty(0)).reshape(rows, -1)
    if name in ("swiglu", "geglu", "geglu_tanh"):
        act = {"swiglu": F.silu, "geglu": F.gelu, "geglu_tanh": lambda x: F.gelu(x, approximate="tanh")}[name]
        within(outputs["out"], lambda gate, up: act(gate) * up, given["gate"], given["up"])
    elif name.startswith("residual"):
        summed, shape = x + given["residual"].reshape(rows, -1), x.shape[1:]
        y = outputs["y"].reshape(rows, -1)
        within(y, lambda s, w, b: F.layer_norm(s, shape, w, b, EPS), summed, given["weight"], given["bias"])
        if name.endswith("pre"):
            np.testing.assert_array_equal(outputs["sum"].reshape(rows, -1), summed)
    elif name == "rms_norm_rope":
        cos, sin = (given[n].reshape(2048, -1)[given["positions"]] for n in ("cos", "sin"))

        def reference(x, weight, cos, sin):
            y = F.rms_norm(x, x.shape[1:], weight, EPS).unflatten(-1, (-1, 2, cos.shape[-1]))
            (a, b), c, s = y.unbind(-2), cos[:, None], sin[:, None]
            return torch.stack((a * c - b * s, b * c + a * s), -2).flatten(1)

        within(outputs["y"].reshape(rows, -1), reference, x, given["weight"], cos, sin)
    elif name.startswith("softmax"):
        keep = torch.ones(x.shape, dtype=torch.bool).tril(x.shape[1] - rows if name == "softmax" else x.shape[1])
        p = 0.1 if name == "softmax_dropout" else 0.0
        drawn = philox.keep_mask(torch.from_numpy(given["seed"].view(np.int64)), x.shape, p) if p else keep

        def reference(x):
            weights = (x * scalars["scale"]).masked_fill(~keep, -torch.inf).softmax(-1)
            return torch.where(drawn, weights * philox.keep_scale(p), 0.0)

        y = outputs["y"].reshape(rows, -1)
        within(y, reference, x)
        np.testing.assert_array_equal(y[~drawn.numpy()], 0.0)
    else:
        wide = x.shape[1]
        norm, parts = ("norm_weight", "norm_bias"), [given["weight"].reshape(-1, wide), given["bias"]]

        def reference(x, norm_weight, norm_bias, weight, bias):
            return F.linear(F.layer_norm(x, (wide,), norm_weight, norm_bias, EPS), weight, bias)

        within(outputs["y"].reshape(rows, -1), reference, x, *(given[n] for n in norm), *parts)


def check_decoder(found: dict, decoder: Decoder, pairs: BytePairs, words: list[str]) -> None:
    """The logits after the prompt, and the likeliest tokens: of the page's check, and what it wrote when asked."""
    prompt = pairs.encode(PROMPT)
    ids = torch.tensor([prompt])
    with torch.no_grad(), use(**dict.fromkeys(ops(), REFERENCE)):
        likeliest = generate(decoder, ids, NEW_TOKENS)[0].tolist()
        own = decoder(ids)[0, -1]
        exact = decoder.double()(ids)[0, -1]
    budget = compare(torch.from_numpy(found["logits"]), own, exact)
    assert budget.passed
    assert found["tokens"] == likeliest
    assert words == [pairs.decode([token]) for token in prompt + likeliest]
    assert found["ok"]
    assert found["text"].startswith(PROMPT)
    assert found["apart"] <= 2 * budget.allowed


def test_without_webgpu_the_page_says_what_is_missing(missing):
    if chromium.found() is None:
        missing("no Chromium: apt install chromium")
    with chromium.served(EXAMPLE / "page") as address, chromium.Page() as page:
        page.call(
            "Page.addScriptToEvaluateOnNewDocument",
            source="Object.defineProperty(Navigator.prototype, 'gpu', { value: undefined })",
        )
        page.open(address)
        told = page.evaluate("tilesmith.finished.then((found) => found.missing)")
        shown = page.evaluate("document.querySelector('[role=alert]').textContent")
    assert told == shown
    assert "This browser has no WebGPU" in told


def test_other_models_are_refused(tmp_path):
    for config, words in (
        (None, "config.json is missing; write a model with: tilesmith demo --export"),
        ({"model_type": "gemma"}, "is no Llama with SwiGLU"),
        ({"model_type": "llama", "hidden_size": 6}, "hidden_size of"),
    ):
        if config is not None:
            (tmp_path / "config.json").write_text(json.dumps(config))
        command = [sys.executable, EXAMPLE / "build.py", tmp_path / "page", "--model", tmp_path]
        done = subprocess.run(command, capture_output=True, text=True)
        assert done.returncode == 1
        assert words in done.stderr
