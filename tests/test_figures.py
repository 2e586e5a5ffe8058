"""What the documents say was measured is in benchmarks/results, and their tables are what the result files make."""

from __future__ import annotations

import importlib.util
import re
import statistics
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from tilesmith.bench import tables

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results"
UNIT = re.compile(
    r"(?<![\w.])\.?\d[\d,.]*\s?"
    r"(?:×(?!\s?\d)|µs|(?:us|ms|s|GB|MB|minutes|times)\b|TB/s|TFLOP/s|tokens(?:/s| a second)|%)"
)
BLOCKS = re.compile(r"^```.*?^```|<!-- bench:.*?<!-- /bench -->", re.MULTILINE | re.DOTALL)


class Said(NamedTuple):
    """A stretch of a page, with {} for its figures, and where they come from."""

    page: str
    words: str
    figures: Any  # a function of nothing that returns them


def _command():
    spec = importlib.util.spec_from_file_location("seeds", ROOT / "docs" / "seeds.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


_at = _command().at


def _llama(provider: str) -> dict:
    return _at("sm90/model", "rows", {"provider": provider})


def _peak(provider: str) -> float:
    return _llama(provider)["peak_bytes"] / 1e9


def _ms(provider: str) -> float:
    return _llama(provider)["us"] / 1e3


def _generated(way: str) -> float:
    return _at("sm90/decode-loop", "1.5 B, 2k", "batch 1", way, "tokens_per_s")


def _trl(field: str, rows: str, *variants: str) -> list[float]:
    return [_at("sm90/trl-steps", "rows", rows, variant, field) for variant in variants]


def _trl_row(variant: str) -> tuple[float, ...]:
    (whole,), (documents,), (peak,) = (
        _trl(field, rows, variant) for field, rows in (("ms", "whole"), ("ms", "documents"), ("peak_gb", "whole"))
    )
    return whole, documents, peak


def _layers(*recipes: str) -> list[float]:
    """Of four Llama layers in FP8 the speed over bf16, at two batch rows and at four."""
    two, four = _at("sm90/fp8-training", "layers")
    assert (two["tokens"], four["tokens"]) == ([2, 4096], [4, 4096])
    return [
        row["times"]["bf16, optimised"]["ms"] / row["times"][recipe]["ms"] for row in (two, four) for recipe in recipes
    ]


def _over_delayed(provider: str) -> float:
    times = _at("sm90/fp8-training", "layers_compiled", 1, "times")
    return times[provider]["ms"] / times["delayed"]["ms"]


def _late() -> tuple[float, float, float]:
    rows = next(run["rows"] for run in _at("sm90/loss-curves", "runs") if "dense.delayed.late" in run["rows"])
    assert len(rows["dense.reference"]["losses"]) == 2
    late = rows["dense.delayed.late"]
    return rows["dense.delayed"]["percent"], -late["percent"], late["noise_percent"]


def _estimates() -> tuple[float, ...]:
    errors = sorted(abs(row["error"]) * 100 for row in _at("sm90/whole-models", "predictions"))
    return len(errors), statistics.median(errors), errors[-1]


def _shards(kind: str) -> list[float]:
    rows = _at("sm90/ring-shards", "rows")
    return [_one(rows, errors=kind, mode="ring", shards=n)["times_one"]["out"] for n in (2, 4, 8)]


def _one(rows: list[dict], **items: Any) -> dict:
    (row,) = [row for row in rows if items.items() <= row.items()]
    return row


def _packed(bits: float) -> tuple[float, ...]:
    row = _at("sm90/adaptive-precision", "summary", {"bits": bits})
    return tuple(100 * x for x in (row["mean"], *row["interval"]))


def _four_bits() -> tuple[float, ...]:
    seeds = _at("sm90/adaptive-precision", "quality")
    rows = [_one(seed["adaptive"], bits=4) for seed in seeds]
    rises = [row["delta"] for row in rows]
    shares = [100 * row["delta"] / seed["loss"] for row, seed in zip(rows, seeds)]
    return rows[0]["share of fp16"], seeds[0]["loss"], min(rises), max(rises), min(shares), max(shares)


def _product() -> tuple[float, ...]:
    us = _at("sm90/adaptive-precision", "times", {"work": "1 x 14336 x 4096"}, "us")
    return us["4 bits"], us["bf16"], us["mixed"]


def _chosen() -> tuple[float, float, float]:
    row = _at("sm90/sparse-attention", "rows", 0, "forward us")
    kernels = _at("sm90/block-choice", "dynamic, 32768 tokens, us", "all", "")
    return row["attention alone"], sum(kernels.values()), row["cudnn"]


def _learned() -> tuple[float, float, float]:
    row = _at("sm90/sparse-attention", "rows", 1, "forward and backward us")
    parts = _at("sm90/block-choice", "learned, 65536 tokens, us")
    indexer = sum(sum(form.values()) for part in parts.values() for form in part.values())
    return row["attention alone"] / 1e3, row["cudnn"] / 1e3, indexer / 1e3


def _patterns(tokens: int) -> list[float]:
    row = _at("sm90/sparse-attention", "rows", {"work": f"static, {tokens} tokens, 16 heads, D 128"})
    both = row["forward and backward us"]
    names = ("random", "block_sparse", "cudnn", "flex, random", "flex, block_sparse")
    return [both[name] / 1e3 for name in names]


def _lists(tokens: int) -> list[float]:
    us = _at("sm90/sparse-attention", "rows", {"work": f"metadata, {tokens} tokens, 16 heads"}, "us, of the device")
    ours = [us[name] for name in ("random", "block_sparse", "strided", "local_global")]
    return [min(ours), max(ours), us["create_block_mask, compiled"]]


def _held(*names: str) -> list[float]:
    return [100 * _at("sm90/sparse-attention", "rows", 0, "retained mass", name) for name in names]


def _quality(arm: str) -> tuple[float, float]:
    """What an arm copies, and how far its loss is above dense, both in per cent."""
    rows = _at("sm90/sparse-quality", "rows")
    return 100 * rows[arm]["copy"], 100 * (rows[arm]["loss"] / rows["dense"]["loss"] - 1)


def _long_step() -> tuple[float, ...]:
    row = _at("sm90/long-step", "rows", "2x393216-e4m3")
    return row["predicted_peak"] / 1e9, row["peak"] / 1e9, row["seconds"], 100 * row["attention_share"]


def _zoo(name: str, which: str) -> tuple[float, float]:
    summary = _at(f"sm90/{name}", "summary", which)
    return summary["geometric_mean"], summary["minimum"]


def _both(name: str) -> tuple[float, ...]:
    return *_zoo(name, "forward"), *_zoo(name, "backward")


def _beside_products() -> tuple[float, float]:
    summary = _at("sm90/linear_cross_entropy-zoo", "summary", "forward+backward")
    return summary["geometric_mean"], summary["maximum"]


def _small_tiles() -> tuple[float, float]:
    row = next(row for row in _at("sm90/window-heads", "rows") if row["call"]["name"] == "few tiles, gemma-4-e4b")
    return row["us"]["4 in 64 rows"], row["us"]["1"]


def _steps(family: str, ours: str, *others: str) -> float:
    """How many times as fast a training step is as the fastest of the others."""
    rows = _at("sm90/model-steps", "rows", family)
    return min(rows[other]["ms"] for other in others) / rows[ours]["ms"]


def _with_graphs() -> list[float]:
    others = "eager", "compile", "eager (beside graphs)"
    return [_steps(family, "graphs", *others) for family in ("bert-large", "vit-large", "whisper-medium")]


def _bert() -> list[float]:
    row = _at("sm90/model-steps", "rows", "bert-large", "optimize (beside graphs)")
    return [row["device_ms"], row["ms"]]


def _release(name: str, release: str, *of: str) -> list[float]:
    """What rows, or the one of a case and pass, take with a release beside 3.6.0, in the last turn."""
    rows = [row for row in _at(f"sm90/{name}", "rows") if not of or (row["case"], row["pass"]) == of]
    return [row[release][-1] / row["3.6.0"][-1] for row in rows]


def _with_39(case: str) -> list[float]:
    rows = [row for row in _at("sm90/triton-3.9", "rows") if row["case"] == case]
    return [row[release][0] for row in rows for release in ("3.6.0", "3.9.0")]


BENCH, GUIDES, RELEASES = "benchmarks/README.md", "docs/guides", "docs/gluon-releases.md"
ROW = "| {:.0f} % | {:.0f} to {:.0f} % |"
SAID = [
    *(
        Said(RELEASES, f"| {case} | {{:,.1f}} | {{:,.1f}} | {{:,.1f}} | {{:,.1f}} |", lambda case=case: _with_39(case))
        for case in (
            "d64_4k_causal", "d128_4k", "d128_4k_causal", "d256_4k_causal", "mla_4k_causal", "llama_4k", "packed_16k",
        )
    ),
    Said(
        RELEASES,
        "3.9.0 takes {:.3f} times as long in the geometric mean",
        lambda: [statistics.geometric_mean(_release("triton-3.9", "3.9.0"))],
    ),
    Said(
        RELEASES,
        "head dim 256 by {:.1f} %, packed documents by {:.1f} %",
        lambda: [
            100 * (_release("triton-3.9", "3.9.0", case, "forward")[0] - 1) for case in ("d256_4k_causal", "packed_16k")
        ],
    ),
    Said(
        RELEASES,
        "3.7.1 takes {:.2f} to {:.2f} times as long as 3.6, {:.2f} in the geometric mean",
        lambda: [
            f(_release("triton-releases", "3.7.1")) for f in (min, max, statistics.geometric_mean)
        ],
    ),
    Said("README.md", "trains {:.1f}× as fast as in PyTorch", lambda: [_llama("tilesmith")["times_pytorch"]]),
    Said("README.md", "in {:.0f} GB instead of {:.0f}**", lambda: [_peak("tilesmith"), _peak("pytorch")]),
    Said(
        "README.md",
        "Liger reached {:.2f}× and torch.compile {:.2f}×",
        lambda: [_llama(provider)["times_pytorch"] for provider in ("liger", "compile")],
    ),
    Said(
        "README.md",
        "{:.0f} tokens/s, against {:.0f} by transformers' compiled static cache",
        lambda: [_generated("graphs"), _generated("compile + graphs")],
    ),
    Said("README.md", "{:.1f} × the speed of TRL alone", lambda: [1 / _over(_trl("ms", "whole", "optimized", "trl"))]),
    Said(
        "README.md",
        "In {:.0f} seconds on an H200, {:,} calls were right and {:,} were refused with an error that names the "
        "argument",
        lambda: [_at("sm90/fuzz", "seconds"), *(_at("sm90/fuzz", "verdicts", of) for of in ("right", "refused"))],
    ),
    Said(BENCH, "forward {:.2f} in the geometric mean and {:.2f} at least", lambda: _zoo("attention-zoo", "forward")),
    Said(BENCH, "backward {:.2f} and {:.2f}.", lambda: _zoo("attention-zoo", "backward")),
    Said(BENCH, "RMS norm forward {:.2f} and {:.2f}, backward {:.2f} and {:.2f}", lambda: _both("rms_norm-zoo")),
    Said(BENCH, "layer norm {:.2f} and {:.2f}, {:.2f} and {:.2f}", lambda: _both("layer_norm-zoo")),
    Said(BENCH, "softmax {:.2f} and {:.2f}, {:.2f} and {:.2f}", lambda: _both("softmax-zoo")),
    Said(BENCH, "SwiGLU {:.2f} and {:.2f}, {:.2f} and {:.2f}", lambda: _both("swiglu-zoo")),
    Said(BENCH, "GeGLU {:.2f} and {:.2f}, {:.2f} and {:.2f}", lambda: _both("geglu-zoo")),
    Said(
        "README.md",
        "gpt-oss {:.1f} times as fast as the better of plain PyTorch and torch.compile, Qwen3-30B-A3B {:.1f}, "
        "DeepSeek-V3 {:.1f}, Gemma 3 {:.1f},",
        lambda: [
            _steps(family, "optimize", "eager", "compile")
            for family in ("gpt-oss-20b", "qwen3-30b-a3b", "deepseek-v3", "gemma3-4b")
        ],
    ),
    Said("README.md", "`graphs=True` {:.1f} to {:.1f}.", lambda: [min(_with_graphs()), max(_with_graphs())]),
    Said(
        "README.md",
        "takes {:.0f} µs on one H200; bf16 takes {:.0f} and torchao's int4 {:.0f}",
        lambda: [
            _at("sm90/adaptive-precision", "times", {"work": "1 x 14336 x 4096"}, "us", name)
            for name in ("4 bits", "bf16", "torchao int4")
        ],
    ),
    Said("docs/models.md", "takes the device {:.1f} ms and the host {:.1f}, more than the plain model", _bert),
    Said(BENCH, "32 calls): {:.2f} and {:.2f}", lambda: _zoo("attention-decode-zoo", "forward")),
    Said(BENCH, "takes {:.2f} times as long in the geometric mean and {:.2f} at most", _beside_products),
    *(
        Said(f"{GUIDES}/adaptive-precision.md", f"| {bits} {ROW}", lambda bits=bits: _packed(bits))
        for bits in (2.5, 3, 3.5, 4)
    ),
    Said(
        f"{GUIDES}/adaptive-precision.md",
        "packed weights take {:.2f} of their size in float16, and the loss of {:.2f} nats rises by {:.4f} to {:.4f} "
        "({:.2f} to {:.2f} %)",
        _four_bits,
    ),
    Said(
        f"{GUIDES}/adaptive-precision.md",
        "one row of x takes {:.0f} µs (bf16: {:.0f}). Up to some 200 rows kernels unpack the codes as they multiply; "
        "they are faster than bf16 up to about 32 rows, and slower from about 64 on. With more rows the weight is "
        "dequantised at each call. Mixed widths cost more, {:.0f} µs for one row",
        _product,
    ),
    Said(
        f"{GUIDES}/fp8-training.md",
        "the held-out loss ended {:.2f} % above bf16's when all steps were in FP8, and {:.2f} % below it when the "
        "first tenth was not; the seeds of bf16 differ by {:.2f} %",
        _late,
    ),
    Said(
        f"{GUIDES}/fp8-training.md",
        "at 2 × 4,096 tokens delayed {:.2f}×, current {:.2f}×, blockwise {:.2f}×, rowwise {:.2f}×; at 4 × 4,096 "
        "{:.2f}×, {:.2f}×, {:.2f}×, {:.2f}×",
        lambda: _layers("delayed", "current", "blockwise", "rowwise"),
    ),
    Said(
        f"{GUIDES}/fp8-training.md",
        "takes {:.0f} ms with delayed scales, {:.0f} in bf16 and {:.0f} with Liger in bf16",
        lambda: [
            _at("sm90/model-steps", "rows", "llama-1.5b", name, "ms")
            for name in ("fp8", "optimize (beside fp8)", "liger (beside fp8)")
        ],
    ),
    Said(
        f"{GUIDES}/fp8-training.md",
        "{:.2f} times as fast as torchao's compiled tensorwise recipe, and {:.2f} times as fast as bf16 under",
        lambda: [_over_delayed("tensorwise, compiled"), _over_delayed("bf16, compiled")],
    ),
    Said(
        f"{GUIDES}/generation.md",
        "generates {:.0f} tokens a second on an H200 with one graph a token, {:.0f} with transformers' compiled static "
        "cache and {:.0f} with its eager loop",
        lambda: [_generated("graphs"), _generated("compile + graphs"), _generated("eager")],
    ),
    Said(
        f"{GUIDES}/hardware.md",
        "estimates of {} models and shapes (Llama, plain, optimised and fused; Qwen3; GPT-2; BERT-large, plain and "
        "optimised; ViT; our decoder; torch's encoder; an MLP) were off by {:.1f} % of the measured peak in "
        "the median and by {:.1f} % at most",
        _estimates,
    ),
    Said(
        f"{GUIDES}/hardware.md",
        "got {} on an H200, {:.2f} of the best rate of all powers of two, and BERT-large at 512 tokens {}, {:.2f} of "
        "it",
        lambda: [_at("sm90/whole-models", "batches", i, name) for i in (0, 1) for name in ("chosen", "share_of_best")],
    ),
    Said(
        f"{GUIDES}/long-context.md",
        "{:.2f}, {:.2f} and {:.2f} times that of one call, and {:.2f}, {:.2f} and {:.2f} times if",
        lambda: [*_shards("tilesmith"), *_shards("rounding")],
    ),
    Said(f"{GUIDES}/memory.md", "takes {:.1f} GB, and {:.1f} GB once", lambda: [_peak("pytorch"), _peak("tilesmith")]),
    Said(
        f"{GUIDES}/memory.md",
        "{:.2f} GB predicted, {:.2f} GB used; a step took {:.1f} s, {:.0f} % of it in attention",
        _long_step,
    ),
    Said(
        f"{GUIDES}/memory.md",
        "the plan predicts {:.1f} GB, and that {:,} tokens would fit",
        lambda: [_whole_plan()["predicted_peak"] / 1e9, _whole_plan()["longest"]],
    ),
    Said(f"{GUIDES}/memory.md", "is about {:.0f} minutes", lambda: [16 * _long_step()[2] / 60]),
    Said(
        f"{GUIDES}/sparse-attention.md",
        "the attention takes {:.0f} µs and the kernels that choose blocks {:.0f}, where cuDNN's dense causal attention "
        "takes {:,.0f}",
        lambda: [*_chosen()[:2], round(_chosen()[2], -1)],
    ),
    Said(
        f"{GUIDES}/sparse-attention.md",
        "the blocks held {:.0f} % of the attention, random ones {:.0f} %",
        lambda: _held("16 queries, 128 keys", "random"),
    ),
    Said(
        f"{GUIDES}/sparse-attention.md",
        "RANDOM takes {:.1f} ms and BLOCK_SPARSE {:.1f} where cuDNN's dense causal attention takes {:.1f} and "
        "FlexAttention, compiled, on the same blocks {:.1f} and {:.1f}. At 64k tokens it is {:.1f} and {:.1f} for "
        "{:.0f} and {:.1f} and {:.1f}.",
        lambda: [*_patterns(32768), *_patterns(65536)],
    ),
    Said(
        f"{GUIDES}/sparse-attention.md",
        "The lists take {:.0f} to {:.0f} µs ({:.0f} to {:.0f} at 64k tokens), `create_block_mask`, compiled, {:.0f} "
        "({:,.0f}).",
        lambda: [*_lists(32768)[:2], *_lists(65536)[:2], _lists(32768)[2], _lists(65536)[2]],
    ),
    Said(f"{GUIDES}/sparse-attention.md", "copied {:.2f} % of the bytes", lambda: _quality("learned")[:1]),
    Said(f"{GUIDES}/sparse-attention.md", "dense attention {:.2f} %", lambda: _quality("dense")[:1]),
    Said(f"{GUIDES}/sparse-attention.md", "loss was {:.1f} % above dense", lambda: _quality("learned")[1:]),
    Said(f"{GUIDES}/sparse-attention.md", "copied {:.0f} % (loss +{:.1f} %)", lambda: _quality("dynamic")),
    Said(f"{GUIDES}/sparse-attention.md", "a window {:.0f} % (+{:.1f} %)", lambda: _quality("window")),
    Said(
        f"{GUIDES}/sparse-attention.md",
        "takes {:.1f} ms, forward and backward, where cuDNN's dense attention takes {:.0f}; the kernels of its "
        "indexer and of their loss take {:.1f} ms",
        _learned,
    ),
    Said(
        f"{GUIDES}/torch-compile.md",
        "takes {:.1f} ms with `optimize`, and {:.1f} ms with `torch.compile` on top of it",
        lambda: [_ms("tilesmith"), _ms("tilesmith+compile")],
    ),
    *(
        Said(f"{GUIDES}/trl.md", f"| {name} | {{:.0f}} ms | {{:.0f}} ms | {{:.1f}} GB |", lambda v=variant: _trl_row(v))
        for name, variant in (
            ("TRL 1.16", "trl"), ("TRL with Liger 0.8.5's layers", "liger"), ("TRL on an optimised model", "optimized")
        )
    ),
    Said("CHANGELOG.md", "Gemma 4 E4B at 840 tokens takes {:.1f} µs for {:.1f} on an H200", _small_tiles),
]  # fmt: skip


def _over(pair: list[float]) -> float:
    return pair[0] / pair[1]


def _whole_plan() -> dict:
    return _at("sm90/long-step", "rows", "2x393216-e4m3", "whole")


NOT_MEASURED = {
    RELEASES: ["tells no more than 5 %", "Two rows are more than 3 % slower"],
    "README.md": ["at most 2 × (the error", "24 times for each draw"],
    BENCH: ["within 2 % of it"],
    f"{GUIDES}/adaptive-precision.md": ["| 95 % interval |"],
    f"{GUIDES}/hardware.md": ["reaches 95 % of the throughput", "into 90 % of the free memory"],
    f"{GUIDES}/long-context.md": [
        "A test on a CPU allows 2 %.",
        "costs more than 15 % of a pass",
        "as cost at most 5 %.",
        "| heads | tokens of a rank | … | 12 %, 5 % | The unit",
    ],
    f"{GUIDES}/memory.md": ["about 2.6 % RMS", "16 times the two layers' time"],
    f"{GUIDES}/sparse-attention.md": [
        "3,840 tokens at 90 %.",
        "hold 90 % of its estimate",
        "on one H200 at 90 %,",
        "In the lookup task of … in 98 to 100 % by LEARNED",
        "its quality at 90 % without",
        "with 90 % of the blocks left out",
        "120 steps with 90 % left out",
        "the same sizes, 90 % left out",
    ],
}
"""Stretches with other figures: rules, limits, predictions, counts of a test or log; … is what stands between."""

WITHOUT_ROWS = {
    "docs/tuning.md": "`benchmarks/results` has no rows of",
    "docs/context-parallel-model.md": "Estimated, not measured",
}
"""Pages whose figures have no rows, and the words in which they say so."""


def _whole(page: str) -> str:
    """A page without fenced code and measured tables, in one line."""
    return " ".join(BLOCKS.sub("", (ROOT / page).read_text(encoding="utf-8")).split())


@pytest.mark.parametrize("said", SAID, ids=lambda said: f"{Path(said.page).stem}-{said.words[:40]}")
def test_a_figure_is_that_of_the_results(said):
    words = said.words.format(*said.figures())
    assert words in _whole(said.page), f"{said.page} should say: {words}"


PAGES = [page for folder in ("docs", GUIDES) for page in sorted((ROOT / folder).glob("*.md")) if page.stem != "seeds"]
PROSE = ["README.md", "CHANGELOG.md", BENCH, *(page.relative_to(ROOT).as_posix() for page in PAGES)]


@pytest.mark.parametrize("page", PROSE)
def test_no_figure_stands_without_a_row(page):
    """Each number with a unit is one of SAID, or is known to be no measurement.

    docs/log and docs/adr are records of their time, and docs/seeds.py takes the figures of its page from the results.
    """
    text = _whole(page)
    if page in WITHOUT_ROWS:
        assert WITHOUT_ROWS[page] in text
        return
    known = [said.words.format(*said.figures()) for said in SAID if said.page == page] + NOT_MEASURED.get(page, [])
    spans = []
    for words in known:
        found = [match.span() for match in re.finditer(re.escape(words).replace("…", ".*?"), text)]
        assert found, f"{page} no longer says: {words}"
        spans += found
    spans += [match.span() for match in re.finditer(r"`[^`]*`", text)]
    found = [
        text[max(0, match.start() - 50) : match.end() + 20]
        for match in UNIT.finditer(text)
        if not any(start <= match.start() and match.end() <= end for start, end in spans)
    ]
    assert not found, f"{page}: add where they were measured to SAID, or why they are none to NOT_MEASURED: {found}"


@pytest.mark.parametrize("page", ["README.md", BENCH, "docs/models.md"])
def test_tables_are_filled_from_the_results(page):
    text = (ROOT / page).read_text(encoding="utf-8")
    assert tables.fill(text, RESULTS) == text, f"tilesmith bench --readme {page}"


def test_a_figure_that_is_not_in_the_results_is_found():
    assert [m[0] for m in UNIT.finditer("715 tokens/s, 1.4× as fast, 4 × 4096 tokens, in 21 GB, .5 %, torch 2.11")] == [
        "715 tokens/s", "1.4×", "21 GB", ".5 %",
    ]  # fmt: skip
    with pytest.raises(LookupError, match="has 0 rows with"):
        _at("sm90/model", "rows", {"provider": "nobody"})
