"""Reports that users can believe: what is said of a model is what happens when it runs."""

from __future__ import annotations

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


def test_the_device_is_told():
    pinned = str(tilesmith.optimize(nn.Sequential(nn.LayerNorm(8))).tilesmith_report)
    assert "On cpu these run: layer_norm (reference)" in pinned  # the fixture pins it
    assert effects(["relu_squared"], "cpu") == (
        "On cpu no kernel serves relu_squared: these modules compute as before, no faster.",
    )


def test_modules_without_a_rule_are_folded():
    rows = [Row(f"layers.{i}.{n}", "Linear", "", "skipped", (), "no rule for Linear") for i in range(9) for n in "qkvo"]
    text = str(Report((*rows, Row("norm", "Norm", "norm", "skipped", (), "it raised on small inputs", wanted=True))))
    assert "No rule for: Linear ×36" in text and len(text.splitlines()) <= 5
    assert "norm: norm (Norm): it raised on small inputs" in text
    assert "<pre>" in Report(tuple(rows))._repr_html_()
