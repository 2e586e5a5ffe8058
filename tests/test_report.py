"""Reports that users can believe: what is said of a model is what happens when it runs."""

from __future__ import annotations

import contextvars
import copy
import pickle

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import tilesmith
from optimize_models import FAMILIES, OTHERS, batch, build, ops_everywhere  # noqa: F401
from tilesmith.models.reach import effects
from tilesmith.rewrite import Report, Row

WIDTH = 120


def _step(model, inputs):
    model(**inputs).loss.backward()
    return model.tilesmith_report.calls()


def test_calls_are_counted_by_model_and_by_op():
    model = tilesmith.optimize(build("llama"))
    other = copy.deepcopy(model)
    assert set(model.tilesmith_report.calls().values()) == {0}
    assert "none of ours yet" in str(model.tilesmith_report)
    calls = _step(model, batch("llama"))
    assert calls == {
        "add_rms_norm": 2, "attention": 2, "linear_cross_entropy": 1, "rms_norm": 3, "rope": 2, "swiglu": 2,
    }  # fmt: skip
    assert "Calls since optimize(): add_rms_norm 2, attention 2, linear_cross_entropy 1" in str(model.tilesmith_report)
    assert set(other.tilesmith_report.calls().values()) == {0}
    assert _step(other, batch("llama")) == calls
    again = pickle.loads(pickle.dumps(model))
    assert again.tilesmith_report.calls() == calls and _step(again, batch("llama"))["rope"] == 4
    assert model.tilesmith_report.calls() == calls
    tilesmith.undo(model)
    assert not any("_tilesmith_calls" in module.__dict__ for module in model.modules())


def test_an_optimize_that_fails_leaves_the_counts_of_the_one_before():
    model, inputs = tilesmith.optimize(build("llama"), exclude="norm"), batch("llama")
    calls = _step(model, inputs)
    model.model.norm.forward = model.model.norm.forward  # cannot be replaced
    with pytest.raises(tilesmith.rewrite.RewriteError):
        tilesmith.optimize(model, strict=True)
    assert _step(model, inputs) == {op: 2 * count for op, count in calls.items()}


def test_an_optimize_of_fewer_rules_tells_what_the_one_before_replaced():
    model = tilesmith.optimize(build("llama"))
    rows, calls = set(model.tilesmith_report.replaced), _step(model, batch("llama"))
    tilesmith.optimize(model, only="norm")
    assert set(model.tilesmith_report.replaced) == rows
    assert _step(model, batch("llama")) == calls
    model.model.layers[0].mlp = build("llama").model.layers[0].mlp
    tilesmith.optimize(model, only="norm")
    gone = {row for row in rows if row.fqn.startswith("model.layers.0.mlp")}
    assert gone and set(model.tilesmith_report.replaced) == rows - gone
    tilesmith.optimize(tilesmith.undo(model), only="norm")
    assert {row.rule for row in model.tilesmith_report.replaced} == {"norm"}


def test_report_is_the_typed_way_to_it():
    model = nn.Sequential(nn.LayerNorm(8))
    with pytest.raises(ValueError, match=r"report: model was not optimised; call tilesmith.optimize\(model\) first"):
        tilesmith.report(model)
    assert tilesmith.report(tilesmith.optimize(model)) is model.tilesmith_report
    with pytest.raises(TypeError, match="report: model must be a torch.nn.Module, got str"):
        tilesmith.report("model")


def test_a_loss_that_somebody_else_computes_is_not_claimed():
    model = tilesmith.optimize(build("llama"))
    hidden = model.model(input_ids=batch("llama")["input_ids"]).last_hidden_state
    F.cross_entropy(
        F.linear(hidden, model.lm_head.weight)[:, :-1].flatten(0, 1), batch("llama")["input_ids"][:, 1:].flatten()
    )
    assert model.tilesmith_report.calls()["linear_cross_entropy"] == 0
    assert "linear_cross_entropy 0" in str(model.tilesmith_report)


def test_compiled_code_counts_nothing():
    model = tilesmith.optimize(nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 8)))
    x = torch.randn(2, 8)
    torch.compile(model, fullgraph=True, backend="eager")(x)
    assert model.tilesmith_report.calls() == {"layer_norm": 0}
    model(x)
    assert model.tilesmith_report.calls() == {"layer_norm": 1}


@pytest.mark.parametrize("family", ["llama", "gpt2", "deepseek_v3", "mixtral", "bert", "t5"])
def test_lines_fit_and_every_module_with_parameters_has_a_row(family):
    model = tilesmith.optimize(build(family))
    report = model.tilesmith_report
    assert max(map(len, f"{report}\n{report.full()}".splitlines())) <= WIDTH
    told = {row.fqn for row in report.rows}
    silent = [
        n for n, m in model.named_modules() if any(p is not None for p in m._parameters.values()) and n not in told
    ]
    assert not silent


@pytest.mark.parametrize("family", sorted({*FAMILIES, *OTHERS} - {"vit", "whisper"}))
def test_what_is_called_replaced_runs(family):
    """Each op that a row claims runs in a training step; one that does not is told apart afterwards."""
    model = tilesmith.optimize(build(family))
    calls = _step(model, batch(family))
    never = [op for op, count in calls.items() if not count]
    assert never == (["linear_cross_entropy"] if family == "bart" else [])  # BART adds a bias to its logits
    text = " ".join(str(model.tilesmith_report).split())
    assert ("(so far nothing was computed by linear_cross_entropy)" in text) is bool(never)


def test_experts_and_a_rotation_that_moves_features_are_told():
    report = tilesmith.optimize(build("deepseek_v3")).tilesmith_report
    assert "DeepseekV3Experts" in str(report)
    (row,) = {row.reason for row in report.replaced if row.rule == "rope"}
    assert row == "apply_rotary_pos_emb_interleave rotates the halves of a head, into which it moves neighbours first"


class HandWritten(nn.Module):
    """A GPT as tutorials write it."""

    def __init__(self):
        super().__init__()
        self.embed, self.head = nn.Embedding(11, 8), nn.Linear(8, 11)
        self.qkv, self.out, self.n1 = nn.Linear(8, 24), nn.Linear(8, 8), nn.LayerNorm(8)

    def attend(self, x):
        q, k, v = self.qkv(x).view(*x.shape[:2], 3, 2, 4).permute(2, 0, 3, 1, 4)
        return self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))

    def forward(self, ids):
        x = self.embed(ids)
        x = x + self.attend(self.n1(x))
        logits = self.head(x)
        return F.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())


def test_functions_that_a_hand_written_model_calls_have_a_row():
    model = tilesmith.optimize(HandWritten())
    (row,) = [row for row in model.tilesmith_report.rows if row.rule == "functional"]
    assert (
        "it calls scaled_dot_product_attention itself: on a GPU ops.attention serves it after tilesmith.reg"
        in row.reason
    )
    assert "it calls cross_entropy itself: ops.linear_cross_entropy" in row.reason
    assert "scaled_dot_product_attention" in str(model.tilesmith_report)
    model(torch.randint(11, (2, 5))).backward()


class Block(nn.Module):
    """A sum goes into a norm, so the block is replaced; its attention is a function of PyTorch's."""

    def __init__(self):
        super().__init__()
        self.qkv, self.out, self.n1, self.n2 = nn.Linear(8, 24), nn.Linear(8, 8), nn.LayerNorm(8), nn.LayerNorm(8)

    def forward(self, x):
        q, k, v = self.qkv(self.n1(x)).view(*x.shape[:2], 3, 2, 4).permute(2, 0, 3, 1, 4)
        x = x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        return x + self.n2(x)


class NamedAsFunctions(nn.Module):
    """Children and methods that have the names of functions."""

    def __init__(self):
        super().__init__()
        self.layer_norm, self.dense = nn.LayerNorm(8), nn.Linear(8, 8)

    def rms_norm(self, x):
        return x * 2

    def forward(self, x):
        return self.dense(self.rms_norm(self.layer_norm(x)))


def test_a_replaced_block_still_tells_of_the_functions_that_it_calls():
    rows = tilesmith.optimize(Block()).tilesmith_report.rows
    assert [row.action for row in rows if row.rule == "add_norm"] == ["replaced"]
    (row,) = [row for row in rows if row.rule == "functional"]
    assert row.reason.startswith("it calls scaled_dot_product_attention itself: on a GPU ops.attention serves it")
    again = tilesmith.optimize(Block(), only="functional").tilesmith_report.rows
    assert row in again


@pytest.mark.parametrize("family", ["t5", None])
def test_a_child_named_as_a_function_is_no_call_of_it(family):
    model = tilesmith.optimize(build(family) if family else NamedAsFunctions())
    assert not [row for row in model.tilesmith_report.rows if row.rule == "functional"]


def test_attention_that_a_module_computes_by_ours_is_not_advised():
    """Falcon's forward has a call of PyTorch's attention beside scores of its own."""
    transformers = pytest.importorskip("transformers")
    config = transformers.FalconConfig(hidden_size=64, num_hidden_layers=1, num_attention_heads=4, vocab_size=128)
    model = tilesmith.optimize(transformers.FalconForCausalLM(config))
    rules = {row.rule for row in model.tilesmith_report.rows if row.cls == "FalconAttention"}
    assert "attention" in rules and "functional" not in rules


def test_without_a_kernel_no_step_is_asked_for():
    def check():
        model = tilesmith.optimize(nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 8)))
        for _ in range(2):
            text = str(model.tilesmith_report)
            assert "Calls since optimize(): none of ours, as no kernel of ours for these ops runs on cpu" in text
            model(torch.randn(2, 8)).sum().backward()
        model = tilesmith.optimize(build("llama"))  # its loss has one
        model.model(input_ids=batch("llama")["input_ids"])  # by which TRL's trainers compute theirs
        told = " ".join(str(model.tilesmith_report).split())
        assert "none of ours yet; run a step" in told and "a loss that a trainer computes itself" in told

    contextvars.Context().run(check)


def test_a_model_without_data_has_no_line_of_calls():
    with torch.device("meta"):
        model = nn.Sequential(nn.LayerNorm(8))
    report = tilesmith.optimize(model).tilesmith_report
    assert report.device == "meta" and "Calls since" not in f"{report}{report.full()}"
    model.to_empty(device="cpu")(torch.randn(2, 8))
    assert "Calls since optimize(): layer_norm 1" in str(report)


@pytest.mark.parametrize("family", ["llama", "deepseek_v3", "qwen3", "gpt2", "bert", "vit", "whisper"])
def test_a_report_lists_what_a_user_can_change(family):
    """Activations in MLPs, norms of no sum and inner models are left to the full report, and the numbers agree."""
    model = build(family)
    model.config.use_cache = False
    report = tilesmith.optimize(model).tilesmith_report
    text, full = str(report), report.full()
    quiet = [row for row in report.skipped if row.quiet]
    assert quiet and not [row for row in quiet if row.reason[:40] in text]
    assert all(row.reason[:40] in " ".join(full.split()) for row in quiet)
    left = [row for row in report.skipped if row.rule and not row.wanted and not row.quiet]
    assert {row.rule for row in left} <= {"bias"}
    assert (f"{len(left)} left as is," in text) is ("Left as they are" in text) is bool(left)
    assert f"{len(quiet)} more need no replacement; report.full() lists them" in text
    assert "not followed" not in text


def test_positions_are_explained():
    model = tilesmith.optimize(build("llama"))
    rows = [row for row in model.tilesmith_report.rows if row.rule == "attention" and row.fqn in ("", "model")]
    told = "under torch.compile, position_ids are taken to mean packed sequences; do not pass them otherwise"
    assert len(rows) == 2 and all(row.reason.endswith(told) for row in rows)


def test_the_device_is_told():
    pinned = str(tilesmith.optimize(nn.Sequential(nn.LayerNorm(8))).tilesmith_report)
    assert "These run on cpu: layer_norm (reference)" in pinned  # the fixture pins it
    assert effects(["relu_squared"], "cpu") == (
        "On cpu no kernel serves relu_squared: these modules compute as before, no faster.",
    )


def test_modules_without_a_rule_are_folded():
    rows = [Row(f"layers.{i}.{n}", "Linear", "", "skipped", (), "no rule for Linear") for i in range(9) for n in "qkvo"]
    text = str(Report((*rows, Row("norm", "Norm", "norm", "skipped", (), "it raised on small inputs", wanted=True))))
    assert "No rule for: Linear ×36" in text and len(text.splitlines()) <= 5
    assert text.startswith("0 replaced, 1 could not be replaced, 36 have no rule")
    assert "norm: norm (Norm): it raised on small inputs" in text
    assert "<pre>" in Report(tuple(rows))._repr_html_()
