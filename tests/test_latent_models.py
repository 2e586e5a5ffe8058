"""Latent attention under `optimize`: queries rotated whole, keys and values in one op; and its routers."""

import ast
import copy
import inspect

import pytest
import torch
from torch import nn

from optimize_models import Calls, assert_within_budget, batch, build, ops_everywhere, train  # noqa: F401
from tilesmith import ops
from tilesmith.models import optimize, undo
from tilesmith.models.layers.routers import Routing, recognise
from tilesmith.rewrite import Unlike

transformers = pytest.importorskip("transformers")


class Others(Calls):
    """Counts joins and copies of four dims too."""

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function in (torch.ops.aten.cat.default, torch.ops.aten.copy_.default):
            first = args[0][0] if isinstance(args[0], (list, tuple)) else args[0]
            if first.ndim == 4 and first.shape[1] > 1:
                self.counts["copies"] = self.counts.get("copies", 0) + 1
        return super().__torch_dispatch__(function, types, args, kwargs)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_nothing_is_copied_between_projections_and_attention(dtype):
    model, inputs = build("deepseek_v3").to(dtype), batch("deepseek_v3")
    oracle, plain = train(copy.deepcopy(model).double(), inputs), train(model, inputs)
    optimize(model)
    with Others() as calls:
        found = train(model, inputs)
    assert "copies" not in calls and calls["rope"] == calls["expand_kv"] == calls["expand_kv_vjp"] == 2
    assert calls["route"] == calls["route_vjp"] == 1
    assert_within_budget(found, plain, oracle)
    undo(model)
    back = train(model, inputs)
    assert torch.equal(back[0], plain[0]) and all(torch.equal(back[2][n], g) for n, g in plain[2].items())


def test_a_cache_is_read_and_written_as_before():
    model = build("deepseek_v3").eval()
    ids = batch("deepseek_v3")["input_ids"]
    wanted = model.generate(ids, max_new_tokens=6, do_sample=False)
    assert torch.equal(optimize(model).generate(ids, max_new_tokens=6, do_sample=False), wanted)


def test_a_hook_on_the_projection_still_sees_and_changes_it():
    model, inputs = build("deepseek_v3"), batch("deepseek_v3")
    model.model.layers[0].self_attn.kv_b_proj.register_forward_hook(lambda module, args, out: 2 * out)
    plain = train(model, inputs)
    torch.testing.assert_close(train(optimize(model), inputs)[0], plain[0])


def test_a_method_that_makes_other_keys_stays():
    model, inputs = build("deepseek_v3"), batch("deepseek_v3")
    attention = model.model.layers[0].self_attn

    class Scaled(type(attention)):
        def expand_kv(self, kv_nope, k_rot):
            k, v = super().expand_kv(kv_nope, k_rot)
            return 2 * k, v

    attention.__class__ = Scaled
    plain = train(model, inputs)
    optimize(model)
    (row,) = (r for r in model.tilesmith_report.rows if r.rule == "latent" and r.fqn == "model.layers.0.self_attn")
    assert row.action == "skipped" and "differs" in row.reason
    torch.testing.assert_close(train(model, inputs)[0], plain[0])


def test_queries_that_somebody_sees_in_parts_stay_in_parts():
    """The scaled parts of Longcat's queries are not those of what was split."""
    modeling = transformers.models.deepseek_v3.modeling_deepseek_v3
    from tilesmith.models.layers.joined_queries import joined
    from tilesmith.rewrite import parse

    tree = parse(inspect.unwrap(modeling.DeepseekV3Attention.forward))
    names = ("apply_rotary_pos_emb", "apply_rotary_pos_emb_interleave")
    assert joined(tree, names, "_whole_") == set(names)
    for line in ("q_pass = q_pass * 2", "q_rot = q_rot * 2", "kept = q_rot", "q_states.mul_(2)"):
        tree = parse(inspect.unwrap(modeling.DeepseekV3Attention.forward))
        at = next(i for i, s in enumerate(tree.body) if ast.unparse(s).startswith("q_pass, q_rot ="))
        tree.body[at + 1 : at + 1] = ast.parse(line).body
        assert joined(tree, names, "_whole_") == set(), line


V3 = {"n_routed_experts": 16, "num_experts_per_tok": 4, "hidden_size": 16, "routed_scaling_factor": 2.5}


@pytest.mark.parametrize(
    ("groups", "kept", "normalise"), [(1, 1, True), (4, 2, True), (4, 4, False), (8, 3, False), (2, 1, True)]
)
def test_a_router_of_deepseek_v3_is_known(groups, kept, normalise):
    config = transformers.DeepseekV3Config(**V3, n_group=groups, topk_group=kept, norm_topk_prob=normalise)
    router = transformers.models.deepseek_v3.modeling_deepseek_v3.DeepseekV3TopkRouter(config)
    size = (groups, kept) if kept < groups else (1, 1)
    bias = "e_score_correction_bias"
    assert recognise(router) == Routing(4, bias, "sigmoid", *size, "top2", normalise, 2.5)


def test_a_router_of_deepseek_v2_is_known():
    config = transformers.DeepseekV2Config(
        **V3, n_group=4, topk_group=2, topk_method="group_limited_greedy", num_attention_heads=4
    )
    router = transformers.models.deepseek_v2.modeling_deepseek_v2.DeepseekV2TopkRouter(config)
    assert recognise(router) == Routing(4, "", "softmax", 4, 2, "max", False, 2.5)


def test_a_router_whose_logits_are_rounded_stays():
    """Logits in bf16 tie, and which expert then wins is not the op's to say."""
    router = build("qwen3_moe").model.layers[0].mlp.gate
    with pytest.raises(Unlike):
        recognise(router)


class Tempered(nn.Module):
    def __init__(self):
        super().__init__()
        self.top_k, self.weight = 2, nn.Parameter(torch.randn(8, 16))

    def forward(self, x):
        logits = nn.functional.linear(x.reshape(-1, 16).float(), self.weight.float())
        weights, indices = (logits / 3).softmax(-1).topk(self.top_k)
        return logits, weights, indices


def test_a_router_that_weighs_otherwise_stays():
    with pytest.raises(Unlike, match="no scores"):
        recognise(Tempered())


@pytest.mark.parametrize("autocast", [False, True])
def test_a_router_counts_and_yields_to_autocast(autocast):
    model, inputs = build("deepseek_v3"), batch("deepseek_v3")
    optimize(model, only="router")
    with Calls() as calls, torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        model(**inputs)
    assert calls.get("route", 0) == (0 if autocast else 1)


def test_a_router_runs_on_meta_tensors():
    router = optimize(build("deepseek_v3")).to("meta").model.layers[1].mlp.gate
    assert [x.shape for x in router(torch.empty(2, 3, 64, device="meta"))] == [(6, 4), (6, 2), (6, 2)]


def test_expand_kv_says_what_does_not_fit():
    kv, shared = torch.randn(2, 3, 5, 12), torch.randn(2, 1, 5, 4)
    with pytest.raises(ValueError, match=r"expand_kv: kv has shape \(3, 5, 12\)"):
        ops.expand_kv(kv[0], shared, 8)
    with pytest.raises(ValueError, match=r"expand_kv: shared has shape .* must be \[2, 1, 5, R\]"):
        ops.expand_kv(kv, shared[:, :, :4], 8)
    with pytest.raises(TypeError, match="expand_kv: shared has dtype torch.float16"):
        ops.expand_kv(kv, shared.half(), 8)
    with pytest.raises(ValueError, match="expand_kv: own is 13; it must be from 0 to 12"):
        ops.expand_kv(kv, shared, 13)


def test_rope_says_what_does_not_fit_its_new_arguments():
    q, k, angles = torch.randn(1, 2, 5, 16), torch.randn(1, 1, 5, 4), torch.randn(5, 4)
    with pytest.raises(ValueError, match="rope: cos has 4 angles, .* k's heads have 4"):
        ops.rope(q, k, angles, angles, last=True)
    with pytest.raises(ValueError, match="rope: halved is given without interleaved"):
        ops.rope(q, None, angles, angles, halved=True)
