"""Shapes of published models: every one is a legal call, a seed gives the same calls, the summary is what rows say."""

import json

import pytest
import torch

from tilesmith.bench import run, zoo
from tilesmith.engine import ops


def test_the_table_has_models_that_exist():
    models = zoo.models()
    assert len(models) >= 40 and len({m.name for m in models}) == len(models)
    for m in models:
        assert m.heads % m.kv_heads == 0 and m.head_dim % 8 == 0 and m.longest >= 512 and m.intermediate > 0
        assert m.windows in ("some", "all") and m.sides in (1, 2)


@pytest.mark.parametrize("op", ["attention", "rms_norm", "swiglu", "linear_cross_entropy"])
def test_a_seed_draws_the_same_calls_that_an_op_takes(op):
    drawn = zoo.sample(op, 3, 60)
    assert [c.name for c in drawn] == [c.name for c in zoo.sample(op, 3, 60)]
    assert [c.name for c in drawn] != [c.name for c in zoo.sample(op, 4, 60)]
    assert len({c.name for c in drawn}) == 60
    for case in drawn[:6]:
        device = torch.device("meta")
        args = {n: torch.empty(v.shape, device=device, dtype=v.dtype or torch.bfloat16) if hasattr(v, "shape") else v
                for n, v in case.args.items()}  # fmt: skip
        ops()[op](**args)


@pytest.mark.parametrize("op", ["kl_div", "linear_distillation", "linear_preference", "softmax"])
def test_a_call_is_named_by_the_tokens_that_it_has(op):
    for case in zoo.sample(op, 5, 12):
        tokens = next(v for v in case.args.values() if hasattr(v, "shape")).shape[:-1]
        assert f" {' x '.join(map(str, tokens))} x " in case.name


def test_a_decode_has_few_queries_and_a_cache():
    for case in zoo.sample("attention", 1, 30, decode=True):
        q, k = case.args["q"].shape, case.args["k"].shape
        assert q[2] <= 16 < k[2] and k[0] * k[2] <= 2**20


def test_what_cannot_be_drawn_is_refused():
    with pytest.raises(ValueError, match="merge_attention cannot be drawn from models; ops that can: "):
        zoo.sample("merge_attention", 1, 1)
    with pytest.raises(ValueError, match="decode is a call of attention, not of rms_norm"):
        zoo.sample("rms_norm", 1, 1, decode=True)
    with pytest.raises(ValueError, match=r"matmul: only \d+ calls that differ could be drawn, not 500"):
        zoo.sample("matmul", 1, 500)


def test_a_run_has_rows_and_a_summary(monkeypatch):
    monkeypatch.setattr(zoo, "TOKENS", 64)
    monkeypatch.setattr(zoo, "SHORTEST", 8)
    monkeypatch.setattr(zoo, "models", lambda: (zoo.Model("tiny", 2, 1, 16, 32, 64, 100),))
    for module in (zoo, run):
        monkeypatch.setattr(module, "ceilings", lambda device: run.Ceilings(1.0, 1.0))
    seen = []
    ours_and = {"only": ("tilesmith", "pytorch"), "so_far": seen.append}
    found = zoo.run("rms_norm", torch.device("cpu"), torch.float32, seed=1, count=2, command="x", **ours_and)
    assert found["subject"] == "rms_norm-zoo" and found["seed"] == 1 and len(seen) == 2
    assert set(found["summary"]) == {"forward", "backward"} and found["summary"]["forward"]["calls"] == 2
    json.dumps(found)


def test_a_summary_tells_the_mean_and_the_worst():
    rows = [{"pass": "forward", "case": str(n), "times_best_peer": n} for n in (4.0, 1.0, 0.5, 2.0, 1.0, 8.0)]
    found = zoo.summary([*rows, {"pass": "forward", "case": "peer", "us": 1.0}])["forward"]
    assert found["calls"] == 6 and found["minimum"] == 0.5 and found["geometric_mean"] == round(32 ** (1 / 6), 4)
    assert [row["case"] for row in found["worst"]] == ["0.5", "1.0", "1.0", "2.0", "4.0"]
