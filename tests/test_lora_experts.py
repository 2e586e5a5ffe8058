"""LoRA on stacked experts: adapters within the products of `ops.experts`, PEFT's wrappers, quantised experts."""

import contextlib
import copy
import types

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import tilesmith
from devices import DEVICE
from optimize_models import assert_within_budget, batch, build, train
from tilesmith import ops
from tilesmith.engine import ops as ops_of
from tilesmith.engine import use
from tilesmith.hardware.detect import arch_named
from tilesmith.models import optimize, undo
from tilesmith.models.layers import experts as rules
from tilesmith.models.layers import parameter_adapters

E, N, C, I, T, K = 3, 12, 8, 6, 5, 2
GATE_UP, DOWN = "experts.gate_up_proj", "experts.down_proj"


@pytest.fixture(autouse=True)
def served(request):
    """The op runs on a CPU too, by its reference."""
    with use(experts="reference"):
        yield


def arguments(dtype=torch.float32):
    """Arguments of `ops.experts`, and of its adapters, of ranks 2 and 3."""
    x, gate_up, down, weights = (
        torch.randn(*s, device=DEVICE, dtype=dtype, requires_grad=True) for s in ((T, C), (E, N, C), (E, C, I), (T, K))
    )
    shapes = {
        "gate_up_lora_a": (E, 2, C),
        "gate_up_lora_b": (E, N, 2),
        "down_lora_a": (E, 3, I),
        "down_lora_b": (E, C, 3),
    }
    lora = {n: torch.randn(*s, device=DEVICE, dtype=dtype, requires_grad=True) for n, s in shapes.items()}
    return (x, gate_up, down, torch.randint(E, (T, K), device=DEVICE), weights), lora


# the op -----------------------------------------------------------------------------------------------------------


def test_an_adapter_is_what_it_adds_to_the_weight():
    (x, gate_up, down, *routing), lora = arguments(torch.float64)
    found = ops.experts(x, gate_up, down, *routing, **lora, gate_up_lora_scale=0.5, down_lora_scale=3.0)
    folded = (
        gate_up + 0.5 * lora["gate_up_lora_b"] @ lora["gate_up_lora_a"],
        down + 3.0 * lora["down_lora_b"] @ lora["down_lora_a"],
    )
    wanted = ops.experts(x, *folded, *routing)
    torch.testing.assert_close(found, wanted)
    leaves, dy = [x, gate_up, down, routing[1], *lora.values()], torch.randn_like(found)
    torch.testing.assert_close(torch.autograd.grad(found, leaves, dy), torch.autograd.grad(wanted, leaves, dy))


def test_factors_keep_their_dtype_and_any_strides():
    args, lora = arguments()
    args = tuple(a.detach().bfloat16() if a.is_floating_point() else a for a in args)
    wanted = ops.experts(*args, **{n: f.bfloat16() for n, f in lora.items()})
    stored = {n: f.detach().permute(1, 2, 0).contiguous().permute(2, 0, 1).requires_grad_() for n, f in lora.items()}
    found = ops.experts(*args, **stored)
    assert torch.equal(found, wanted) and found.dtype is torch.bfloat16
    found.sum().backward()
    assert all(f.grad.dtype is torch.float32 and f.grad.any() for f in stored.values())


def test_frozen_weights_get_no_gradient_and_nothing_of_their_size_is_kept():
    args, lora = arguments()
    args[1].requires_grad_(False)
    args[2].requires_grad_(False)
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        y = ops.experts(*args, **lora)
    sizes = {args[1].numel(), args[2].numel()}
    assert {t.data_ptr() for t in kept if t.numel() in sizes} <= {args[1].data_ptr(), args[2].data_ptr()}
    y.sum().backward()
    assert args[1].grad is None and args[2].grad is None and all(f.grad.any() for f in lora.values())


def test_adapters_that_do_not_fit_are_refused():
    args, lora = arguments()
    a, b = lora["gate_up_lora_a"], lora["gate_up_lora_b"]
    for given, words in (
        ({"gate_up_lora_a": a}, "gate_up_lora_a is given and gate_up_lora_b is not"),
        ({"down_lora_b": b}, "down_lora_b is given and down_lora_a is not"),
        ({"down_lora_scale": 2.0}, "down_lora_scale is 2.0 without down_lora_a"),
        ({"gate_up_lora_a": a[:, :, :5], "gate_up_lora_b": b}, r"gate_up_lora_a has shape \(3, 2, 5\).*\[3, R, 8\]"),
        ({"gate_up_lora_a": a[:, :0], "gate_up_lora_b": b[..., :0]}, "R of at least 1"),
        ({"gate_up_lora_a": a, "gate_up_lora_b": b[..., :1]}, r"gate_up_lora_b has shape.*must be \[3, 12, 2\]"),
    ):
        with pytest.raises(ValueError, match=words):
            ops.experts(*args, **given)
    with pytest.raises(TypeError, match="gate_up_lora_b"):
        ops.experts(*args, gate_up_lora_a=a, gate_up_lora_b=b.long())


def test_hopper_s_products_leave_adapters_to_triton_s():
    pytest.importorskip("triton")
    args, lora = arguments(torch.bfloat16)
    op = ops_of()["experts"]
    for more, reason in (({}, ""), (lora, "adapters are given")):
        call = op._describe(*op.bind(args, more))._replace(arch=arch_named("sm90"))
        assert reason in "; ".join(op.kernel("hopper").rejects(call))
        assert not any("adapters" in why for why in op.kernel("triton").rejects(call))


# models with adapters of PEFT -------------------------------------------------------------------------------------


def adapted(family="qwen3_moe", parameters=(GATE_UP, DOWN), adapters=("default",), layers=1, **options):
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(
        r=3, lora_alpha=5, target_modules=[], target_parameters=list(parameters), init_lora_weights=False, **options
    )
    torch.manual_seed(2)
    model = peft.get_peft_model(build(family, layers=layers), config, adapters[0])
    for name in adapters[1:]:
        model.add_adapter(name, config)
    return model.train()


def wrapper_of(model):
    return next(m for n, m in model.named_modules() if n.endswith("mlp.experts"))


def row_of(model):
    return next(row for row in model.tilesmith_report.rows if row.fqn.endswith("mlp.experts"))


def output(model):
    with torch.no_grad():
        return model(**batch("qwen3_moe")).logits


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("swapped", [False, True])
def test_either_factor_may_have_the_features(swapped, transposed):
    """Versions of PEFT differ in that for weights [E, outputs, features]."""
    first, second = 4, 7  # dims of the weight
    a, b = nn.Linear(second if swapped else first, E * 2), nn.Linear(E * 2, first if swapped else second)
    wrapper = types.SimpleNamespace(
        lora_A={"name": a}, lora_B={"name": b}, num_experts=E, _did_swap_in_out_features=swapped
    )
    how = "ore,eri->eoi" if swapped else "ore,eri->eio"
    wanted = torch.einsum(how, b.weight.view(-1, 2, E), a.weight.view(E, 2, -1))
    low, high = parameter_adapters._factors(wrapper, "name", transposed)
    torch.testing.assert_close(high @ low, wanted.transpose(1, 2) if transposed else wanted)


@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss"])
def test_a_model_trains_its_adapters_as_before_and_undo_is_exact(family):
    inputs, model = batch(family), adapted(family)
    oracle, before = train(copy.deepcopy(model).double(), inputs), train(model, inputs)
    names = list(model.state_dict())
    assert_within_budget(train(optimize(model, only="experts"), inputs), before, oracle)
    assert row_of(model).action == "replaced" and "with adapters of down_proj and gate_up_proj" in row_of(model).reason
    assert model.tilesmith_report.calls()["experts"] == 1 and list(model.state_dict()) == names
    again = train(undo(model), inputs)
    assert type(wrapper_of(model)).__name__ == "ParamWrapper"
    assert all(torch.equal(again[2][n], g) for n, g in before[2].items())


class Sizes(TorchDispatchMode):
    """How many elements the largest tensor has that is made within."""

    largest = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        out = function(*args, **(kwargs or {}))
        made = [o for o in (out if isinstance(out, tuple | list) else [out]) if isinstance(o, torch.Tensor)]
        self.largest = max([self.largest, *(o.numel() for o in made if o._base is None)])
        return out


def test_no_matrix_of_a_weight_s_size_is_made():
    wrapper = wrapper_of(adapted(parameters=(GATE_UP,)))
    x, routing = torch.randn(3, 64), (torch.tensor([[0, 1]] * 3), torch.ones(3, 2))
    largest = []
    for module in (wrapper, optimize(nn.Sequential(copy.deepcopy(wrapper)), only="experts")[0]):
        with Sizes() as sizes:
            module(x, *routing).sum().backward()
        largest.append(sizes.largest)
    whole = wrapper.get_base_layer().gate_up_proj.numel()
    assert largest[0] == whole and largest[1] < whole / 4


def test_adapters_are_switched_merged_and_taken_off_as_before():
    model = optimize(adapted(adapters=("default", "other")), only="experts")
    plain = undo(copy.deepcopy(model))
    for change in (
        lambda m: m.disable_adapter(),
        lambda m: m.set_adapter("other"),
        lambda m: m.base_model.set_adapter(["default", "other"]),
        lambda m: m.base_model.set_adapter("default"),
        lambda m: m.merge_adapter(),
        lambda m: m.unmerge_adapter(),
    ):
        found = []
        for each in (model, plain):
            with change(each) or contextlib.nullcontext():
                found.append(output(each))
        torch.testing.assert_close(*found)
    merged, wanted = (m.merge_and_unload() for m in (model, plain))
    assert all(torch.equal(p, q) for p, q in zip(merged.parameters(), wanted.parameters(), strict=True))
    assert not any("lora" in name for name in merged.state_dict())


def test_an_activation_that_is_watched_or_replaced_later_is_called():
    model, plain, x = optimize(adapted()), adapted(), torch.randn(2, 7, 64)
    ours, theirs = (m.base_model.model.model.layers[0].mlp for m in (model, plain))
    torch.testing.assert_close(ours(x), theirs(x))
    assert model.tilesmith_report.calls()["experts"] == 1
    for layer in (ours, theirs):
        layer.experts.get_base_layer().act_fn = nn.Tanh()
    torch.testing.assert_close(ours(x), theirs(x))


def test_one_parameter_may_be_adapted_and_others_are_left_to_peft():
    model = adapted(parameters=(DOWN,))
    before = output(model)
    torch.testing.assert_close(output(optimize(model, only="experts")), before)
    assert row_of(model).reason.endswith("with adapters of down_proj")
    several, watched = adapted(adapters=("default", "other")), adapted()
    several.base_model.set_adapter(["default", "other"])
    wrapper_of(watched).get_base_layer().register_forward_hook(lambda *_: None)
    for model, reason in (
        (several, "2 adapters are active at once"),
        (watched, "what it wraps has hooks"),
        (adapted("gpt_oss", (GATE_UP, "experts.down_proj_bias")), "it also adapts down_proj_bias"),
    ):
        before = output(model)
        optimize(model, only="experts")
        assert row_of(model).action == "skipped" and reason in row_of(model).reason and row_of(model).wanted
        torch.testing.assert_close(output(model), before)


def test_a_wrapper_that_does_something_else_stays():
    model = adapted()
    wrapper = wrapper_of(model)
    kind = type(wrapper)
    wrapper.__class__ = type("ParamWrapper", (kind,), {"forward": lambda self, *args: 2 * kind.forward(self, *args)})
    assert "do something else than LoRA" in row_of(optimize(model, only="experts")).reason


def test_compiled_whole():
    wrapper = optimize(nn.Sequential(wrapper_of(adapted())), only="experts")[0]
    x, routing = torch.randn(5, 64), (torch.tensor([[0, 1]] * 5), torch.ones(5, 2))
    compiled = torch.compile(wrapper, backend="aot_eager", fullgraph=True)
    gradients = []
    for call in (wrapper, compiled):
        wrapper.zero_grad()
        call(x, *routing).square().sum().backward()
        gradients.append({n: p.grad for n, p in wrapper.named_parameters() if p.requires_grad})
    torch.testing.assert_close(*gradients)


def test_transformers_calls_the_op_within_peft_s_wrappers():
    tilesmith.register_for_transformers()
    model = adapted()
    before = output(model)
    model.base_model.model.set_experts_implementation("tilesmith")
    torch.testing.assert_close(output(model), before)


# quantised experts ------------------------------------------------------------------------------------------------


class Params4bit(nn.Parameter):
    """As bitsandbytes' class: packed, with what unpacks it."""

    def __new__(cls, weight, packed=True):
        values = torch.zeros(weight.numel() // 2, 1, dtype=torch.uint8) if packed else weight.detach()
        made = torch.Tensor._make_subclass(cls, values, False)
        made.quant_state = object() if packed else None
        return made


class Bnb4bitParametrization(nn.Module):
    """As bitsandbytes', which unpacks a parameter when it is read."""

    def __init__(self, weight):
        super().__init__()
        self.weight = weight.detach()

    def forward(self, packed):
        return self.weight


@pytest.mark.parametrize("kind", ["packed", "packed later", "parametrized"])
def test_quantised_experts_are_named_and_left_alone(kind):
    model = build("qwen3_moe", layers=1)
    experts = model.model.layers[0].mlp.experts
    for name in ("gate_up_proj", "down_proj"):
        weight = getattr(experts, name)
        if kind == "parametrized":
            packed = nn.Parameter(Params4bit(weight).data, requires_grad=False)
            setattr(experts, name, packed)
            nn.utils.parametrize.register_parametrization(experts, name, Bnb4bitParametrization(weight), unsafe=True)
        else:
            experts._parameters[name] = Params4bit(weight, kind == "packed")
    how = "Bnb4bitParametrization" if kind == "parametrized" else "Params4bit"
    row = row_of(optimize(model, only="experts"))
    assert row.action == "skipped" and row.wanted
    assert row.reason == f"its gate_up_proj is quantised ({how}); quantised experts are not supported"
    with pytest.raises(ValueError, match=rf"gate_up_proj is quantised \({how}\).*choose 'grouped_mm'"):
        rules.experts_forward(experts, torch.randn(3, 64), torch.zeros(3, 1).long(), torch.ones(3, 1))
