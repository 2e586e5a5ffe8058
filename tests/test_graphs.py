"""`optimize(model, graphs=True)` with a recorder that repeats work on the CPU: when a recording serves, and what it may
overwrite. tests/test_graphs_gpu.py records CUDA graphs."""

from __future__ import annotations

import contextvars
import copy
import pickle
import random
import threading
import types
import warnings
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
from torch import nn

import tilesmith
from graph_runs import (  # noqa: F401
    Block,
    Operators,
    Repeater,
    Stack,
    gradients_of,
    made_stack,
    on_a_cpu,
    record_of,
    step_of,
    warmed_up,
)  # fmt: skip
from optimize_models import batch, build, checkpoint_layers, ops_everywhere, train  # noqa: F401
from tilesmith.models import compiling, graphs
from tilesmith.rewrite import forms

AWAITS = "an earlier forward still awaits its backward"


@pytest.fixture
def apart(monkeypatch):
    """Blocks are recorded one by one."""
    monkeypatch.setattr(graphs, "one_by_one", lambda links: "a test asks for it")


def _optimised_and_plain(kind):
    """Two stacks of such blocks with the same parameters, the first one optimised with graphs."""
    stacks = []
    for _ in range(2):
        stacks.append(made_stack())
        torch.manual_seed(0)
        stacks[-1].blocks = nn.ModuleList(kind() for _ in range(3))
    return tilesmith.optimize(stacks[0], graphs=True), stacks[1]


@pytest.mark.parametrize("cached", [False, True])
def test_steps_of_a_model_are_those_without(cached):
    model = build("llama", layers=3)
    tilesmith.optimize(model)
    inputs = [batch("llama", length=12) for _ in range(5)]
    for number, given in enumerate(inputs):
        given["input_ids"] = (given["input_ids"] + number) % 120 + 3
    wanted = [train(model, given, use_cache=cached) for given in inputs]
    tilesmith.optimize(model, graphs=True)
    for given, want in zip(inputs, wanted):
        found = train(model, given, use_cache=cached)
        torch.testing.assert_close(found[0], want[0])
        torch.testing.assert_close(found[2], want[2])
    assert record_of(model).replays == 9 and record_of(model).recorded == 1
    assert dict(record_of(model).plain) == {"new shape": 6}
    text = str(model.tilesmith_report)
    assert "Recorded blocks: 9 calls replayed; pairs of graphs: 1, of up to 3 blocks" in text and "MiB held" in text
    assert "Blocks ran unrecorded 6 times: new shape ([2, 12, 64])" in text


def test_a_cache_is_filled_by_replays():
    model = tilesmith.optimize(build("llama"), graphs=True)
    given = batch("llama")
    for _ in range(graphs.PLAIN_CALLS):
        train(model, given)
    first = model(**given).past_key_values.layers[0]
    keys = first.keys.clone()
    given["input_ids"] = given["input_ids"] + 1
    with torch.no_grad():
        wanted = tilesmith.undo(copy.deepcopy(model))(**given).past_key_values.layers[0].keys
    torch.testing.assert_close(model(**given).past_key_values.layers[0].keys, wanted)
    assert torch.equal(first.keys, keys), "a replay does not write into an earlier cache"


@pytest.mark.parametrize("recorder", [Repeater, Operators])
def test_gradients_accumulate(recorder, monkeypatch):
    monkeypatch.setattr(graphs, "RECORDER", recorder)
    model, plain = made_stack(), made_stack()
    tilesmith.optimize(model, graphs=True)
    inputs = [torch.randn(2, 8) for _ in range(6)]
    for x in inputs:
        torch.testing.assert_close(step_of(model, x), step_of(plain, x))
    assert record_of(model).replays == 12
    torch.testing.assert_close(gradients_of(model), gradients_of(plain))
    model.zero_grad(set_to_none=False)
    plain.zero_grad(set_to_none=False)
    step_of(model, inputs[0]), step_of(plain, inputs[0])
    torch.testing.assert_close(gradients_of(model), gradients_of(plain))


def test_other_shapes_run_as_before_and_are_told():
    model, plain = tilesmith.optimize(made_stack(), graphs=True), made_stack()
    warmed_up(model, torch.randn(2, 8))
    replays = record_of(model).replays
    for rows in (2, 3, 2, 5):
        x = torch.randn(rows, 8)
        torch.testing.assert_close(step_of(model, x), step_of(plain, x))
    torch.testing.assert_close(gradients_of(model), gradients_of(plain))
    assert record_of(model).replays == replays + 6
    assert dict(record_of(model).plain) == {"new shape": 12} and record_of(model).shapes["new shape"] == {
        (2, 8), (3, 8), (5, 8)
    }  # fmt: skip


def test_few_shapes_are_recorded():
    model = tilesmith.optimize(made_stack(), graphs=True)
    for rows in range(1, graphs.MOST_SHAPES + 2):
        step_of(warmed_up(model, torch.randn(rows, 8)), torch.randn(rows, 8))
    assert record_of(model).recorded == graphs.MOST_SHAPES
    assert record_of(model).plain[f"beyond the {graphs.MOST_SHAPES} shapes that are recorded"] == 9


def test_a_report_has_one_line_for_many_shapes(monkeypatch):
    monkeypatch.setattr(graphs, "_REMEMBERED", 30)
    model = tilesmith.optimize(made_stack(), graphs=True)
    for rows in range(2, 22):
        step_of(model, torch.randn(rows, 8))
    told = [line for line in record_of(model).told() if "unrecorded" in line]
    assert told == ["Blocks ran unrecorded 60 times: new shape (20 shapes: [2, 8], [3, 8], [4, 8], ...)"]
    for rows in range(22, 62):
        step_of(model, torch.randn(rows, 8))
    (line,) = [line for line in record_of(model).told() if "unrecorded" in line]
    assert "180 times: new shape (30 or more shapes: [2, 8]" in line
    assert all(len(met) <= 30 for met in record_of(model).shapes.values())


def test_what_awaits_its_backward_is_not_overwritten():
    model, plain = tilesmith.optimize(made_stack(), graphs=True), made_stack()
    first, second = torch.randn(2, 8), torch.randn(2, 8)
    warmed_up(model, first)
    for each in (model, plain):
        (each(first) * each(second)).sum().backward()
    torch.testing.assert_close(gradients_of(model), gradients_of(plain))
    assert record_of(model).plain[AWAITS] == 3
    replays = record_of(model).replays
    kept = model(first)
    assert record_of(model).replays == replays + 3, "a backward has freed the recordings"
    assert model(second) is not None and record_of(model).plain[AWAITS] == 6
    del kept
    model(second)
    assert record_of(model).replays == replays + 6, "so has an output that nobody holds any more"


def test_two_shapes_whose_backwards_run_in_the_order_of_their_forwards():
    model, plain = tilesmith.optimize(made_stack(), graphs=True), made_stack()
    for _ in range(5):
        short, long = torch.randn(2, 8), torch.randn(3, 8)
        for each in (model, plain):
            losses = [each(x).square().sum() for x in (short, long)]
            for loss in losses:
                loss.backward()
        torch.testing.assert_close(gradients_of(model), gradients_of(plain))
    assert record_of(model).replays == 9 and record_of(model).plain[AWAITS] == 9


@pytest.mark.parametrize("setting", ["precision", "dtype"])
def test_settings_of_torch_are_recorded_by_themselves(setting):
    """Which cores multiply, and what new tensors are, is in a graph."""
    model = tilesmith.optimize(made_stack(), graphs=True)
    x = torch.randn(2, 8)
    step_of(warmed_up(model, x), x)
    replays, before = record_of(model).replays, torch.get_float32_matmul_precision()
    try:
        if setting == "dtype":
            torch.set_default_dtype(torch.float64)
        else:
            torch.set_float32_matmul_precision("high")
        step_of(model, x)
        assert record_of(model).replays == replays
    finally:
        torch.set_default_dtype(torch.float32)
        torch.set_float32_matmul_precision(before)
    step_of(model, x)
    assert record_of(model).replays == replays + 3


@pytest.mark.parametrize("how", ["data", "memory", "numpy"])
def test_arguments_that_are_written_without_telling_autograd(how, monkeypatch):
    """As collectives and kernels of others do: what blocks are given is copied anew in each forward."""
    monkeypatch.setattr(graphs, "RECORDER", Operators)
    model, plain = tilesmith.optimize(made_stack(), graphs=True), made_stack()
    scale = torch.ones(8)
    for number in range(10):
        x, new = torch.randn(2 + number % 2, 8), torch.randn(8)
        if how == "data":
            scale.data.copy_(new)
        elif how == "memory":
            scale.data = new
        else:
            scale.numpy()[:] = new.numpy()
        torch.testing.assert_close(step_of(model, x, scale), step_of(plain, x, scale))
    torch.testing.assert_close(gradients_of(model), gradients_of(plain))
    assert record_of(model).replays == 18


class Shifted(Block):
    def forward(self, x, shift=None):
        return super().forward(x) + shift


def test_arguments_made_in_inference_mode():
    """Such tensors have no version."""
    model, plain = _optimised_and_plain(Shifted)
    for _ in range(5):
        x = torch.randn(2, 8)
        with torch.inference_mode():
            shift = torch.randn(8)
        torch.testing.assert_close(step_of(model, x, shift), step_of(plain, x, shift))
    torch.testing.assert_close(gradients_of(model), gradients_of(plain))
    assert record_of(model).replays == 9


def test_a_second_backward_of_one_forward():
    model, plain = tilesmith.optimize(made_stack(), graphs=True), made_stack()
    x = torch.randn(2, 8)
    warmed_up(model, x)
    for each in (model, plain):
        loss = each(x).square().sum()
        loss.backward(retain_graph=True)
        loss.backward()
    torch.testing.assert_close(gradients_of(model), gradients_of(plain))
    with pytest.raises(RuntimeError, match="backward"):
        loss.backward()


def test_a_second_backward_of_blocks_recorded_one_by_one_raises(apart):
    """The backward of a block computes where activations of later blocks lie."""
    model, plain = tilesmith.optimize(made_stack(), graphs=True), made_stack()
    x = torch.randn(2, 8)
    warmed_up(model, x)
    loss = model(x).square().sum()
    loss.backward(retain_graph=True)
    step_of(plain, x)
    torch.testing.assert_close(gradients_of(model), gradients_of(plain))
    with pytest.raises(RuntimeError, match="run each backward once, before the next forward"):
        loss.backward()
    del loss
    torch.testing.assert_close(step_of(model, x), step_of(plain, x))


def test_a_backward_out_of_order_raises():
    model = tilesmith.optimize(made_stack(), graphs=True)
    warmed_up(model, torch.randn(2, 8))
    inner, outer = model.blocks[0], model.blocks[2]
    middle = inner(torch.randn(2, 8), None)
    result = outer(middle, None)
    middle.sum().backward()  # recorded before `outer`, whose activations may lie where this computes
    with pytest.raises(RuntimeError, match="overwritten by a later replay before its backward"):
        result.sum().backward()


@pytest.mark.parametrize("how", ["detached", "whole", "view", "saved"])
@pytest.mark.parametrize("together", [True, False])
def test_results_that_are_kept_are_not_overwritten(how, together, monkeypatch):
    """By a list of hidden states, or by an operation beside that saved one for its gradient."""
    monkeypatch.setattr(graphs, "RECORDER", Operators)
    if not together:
        monkeypatch.setattr(graphs, "one_by_one", lambda links: "a test asks for it")
    model, plain = tilesmith.optimize(made_stack(), graphs=True), made_stack()
    weight = torch.randn(8, requires_grad=True)
    keep = {
        "detached": torch.Tensor.detach,
        "whole": lambda y: y,
        "view": lambda y: y.detach()[:, 1:],
        "saved": lambda y: y.detach() * weight,
    }[how]
    kept = {model: [], plain: []}
    for _ in range(8):
        x = torch.randn(2, 8)
        for each, held in kept.items():
            y = each(x)
            y.square().sum().backward()
            held.append(keep(y))
            del y
    torch.testing.assert_close(kept[model], kept[plain])
    torch.testing.assert_close(gradients_of(model), gradients_of(plain))
    if how == "saved":
        found, wanted = (torch.autograd.grad(sum(y.sum() for y in held), weight) for held in kept.values())
        torch.testing.assert_close(found, wanted)
    assert record_of(model).copied == 1 and record_of(model).replays == 18
    assert (
        "All recorded again because a caller kept results, which are copied from then on: 1 time"
        in record_of(model).told()
    )


def test_results_that_are_let_go_are_not_copied():
    model = tilesmith.optimize(made_stack(), graphs=True)
    for _ in range(6):
        y = model(torch.randn(2, 8))
        loss = y.square().sum()
        del y
        loss.backward()  # the loss is still there in the next step
    assert record_of(model).replays == 12 and not record_of(model).copied


def test_an_argument_that_is_returned_and_kept():
    class Handing(Block):
        def forward(self, x, scale=None):
            return super().forward(x, scale), scale

    class Hands(Stack):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.blocks = nn.ModuleList(Handing() for _ in range(3))

        def forward(self, x, scale=None):
            for block in self.blocks:
                x, scale = block(x, scale)
            kept.append(scale)
            return x

    kept = []
    model, given = tilesmith.optimize(Hands(), graphs=True), [torch.randn(8) for _ in range(6)]
    for scale in given:
        step_of(model, torch.randn(2, 8), scale)
    torch.testing.assert_close(kept, given)
    assert record_of(model).replays == 12


@pytest.mark.parametrize("reentrant", [False, True])
def test_gradient_checkpointing(reentrant):
    model = build("llama")
    tilesmith.optimize(model)
    checkpoint_layers(model, use_reentrant=reentrant)
    inputs = batch("llama")
    wanted = train(model, inputs, use_cache=False)
    tilesmith.optimize(model, graphs=True)
    for _ in range(4):
        found = train(model, inputs, use_cache=False)
        torch.testing.assert_close(found[2], wanted[2])
    record = record_of(model)
    if reentrant:
        assert record.replays == 0 and any("use_reentrant=True" in why for why in record.plain)
    else:
        assert record.replays == 4 and record.recorded == 2
        assert all(not entry._outs for held in record._blocks.values() for entry in held.recorded.values())


def test_checkpointing_that_draws_is_refused():
    model = build("llama")
    for layer in model.model.layers:
        layer.mlp.register_module("drop", nn.Dropout(0.5))
        layer.mlp.act_fn = nn.Sequential(nn.SiLU(), layer.mlp.drop)
    tilesmith.optimize(model, graphs=True, only="norm")
    checkpoint_layers(model, use_reentrant=False)
    with pytest.warns(UserWarning, match="LlamaDecoderLayer runs unrecorded: it is checkpointed and draws"):
        for _ in range(3):
            train(model, batch("llama"), use_cache=False)
    assert "LlamaDecoderLayer cannot be recorded and runs as before: it is checkpointed" in str(model.tilesmith_report)


def test_dropout_draws_anew_and_recording_draws_nothing():
    model = tilesmith.optimize(made_stack(dropout=0.5), graphs=True)
    x = torch.randn(64, 8)
    for _ in range(graphs.PLAIN_CALLS):
        step_of(model, x)
    assert not torch.equal(step_of(model, x), step_of(model, x))
    assert record_of(model).replays == 6


@pytest.mark.parametrize("change", ["data", "attribute", "child", "frozen"])
def test_a_changed_block_is_recorded_again(change):
    model, plain = tilesmith.optimize(made_stack(), graphs=True), made_stack()
    x = torch.randn(2, 8)
    warmed_up(model, x)
    step_of(model, x)
    for each in (model, plain):
        block = each.blocks[1]
        if change == "data":
            block.linear.weight.data = block.linear.weight.data * 2
        elif change == "attribute":
            block.norm.eps = 0.5
        elif change == "child":
            torch.manual_seed(1)
            block.linear = nn.Linear(8, 8)
        else:
            block.linear.weight.requires_grad_(False)
        each.zero_grad()
    for _ in range(4):
        torch.testing.assert_close(step_of(model, x), step_of(plain, x))
        torch.testing.assert_close(gradients_of(model), gradients_of(plain))
    assert record_of(model).renewed == 1 and "parameters moved or modules changed: 1" in str(model.tilesmith_report)
    assert record_of(model).recorded == 1


def test_adapters_and_frozen_weights():
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(r=2, target_modules=["linear"], init_lora_weights=False)

    def adapted():
        model = made_stack()
        torch.manual_seed(2)
        return peft.get_peft_model(model, config).train()

    model, plain = adapted(), adapted()
    tilesmith.optimize(model.base_model.model, graphs=True)
    tilesmith.optimize(plain)
    for _ in range(5):
        x = torch.randn(2, 8)
        torch.testing.assert_close(step_of(model, x), step_of(plain, x))
        torch.testing.assert_close(gradients_of(model), gradients_of(plain))
    assert record_of(model.base_model.model).replays == 9
    with model.disable_adapter():
        torch.testing.assert_close(model(x), made_stack()(x))


def test_autocast_is_recorded_by_itself():
    model = tilesmith.optimize(made_stack(), graphs=True, exclude="bias")  # whose sums of 16 bits round less
    plain = tilesmith.optimize(made_stack())
    x = torch.randn(2, 8)
    for _ in range(3):
        for on in (True, False):
            with torch.autocast("cpu", torch.bfloat16, enabled=on):
                assert torch.equal(step_of(model, x), step_of(plain, x))
    torch.testing.assert_close(gradients_of(model), gradients_of(plain))
    assert record_of(model).recorded == 2


def test_arguments_beside_the_hidden_states():
    """Tensors that all blocks are given are copied once, and not while a recording that reads them awaits."""
    model, plain = tilesmith.optimize(made_stack(), graphs=True), made_stack()
    for _ in range(5):
        x, scale = torch.randn(2, 8), torch.randn(8)
        torch.testing.assert_close(step_of(model, x, scale), step_of(plain, x, scale))
    torch.testing.assert_close(gradients_of(model), gradients_of(plain))
    assert record_of(model).replays == 9 and len(record_of(model)._memory.slots) == 2  # x, which needs no gradient, too
    scale.mul_(2)  # in place: the copy is old
    torch.testing.assert_close(step_of(model, x, scale), step_of(plain, x, scale))


def test_arguments_that_were_one_tensor_when_they_were_recorded(apart):
    model, plain = tilesmith.optimize(made_stack(), graphs=True), made_stack()
    for number in range(5):
        x = torch.randn(8)
        scale = x if number < 3 else torch.randn(8)
        torch.testing.assert_close(step_of(model, x, scale), step_of(plain, x, scale))
    assert record_of(model).replays > 3, "also with two tensors"


class Counting(Block):
    """Ignores its second argument, counts its calls, and scales by what its configuration says."""

    def __init__(self, counts=False):
        super().__init__()
        self.counts, self.calls, self.config = counts, 0, types.SimpleNamespace(factor=1.0, name="one")

    def forward(self, x, ignored=None):
        self.calls += self.counts
        return super().forward(x) * self.config.factor


def _counting(**more):
    torch.manual_seed(0)
    model = Stack()
    model.blocks = nn.ModuleList(Counting(**more) for _ in range(3))
    return model


def test_tensors_of_several_devices_are_refused():
    """A graph reads a number on the host once, when it is recorded."""
    model = tilesmith.optimize(_counting(), graphs=True)
    with pytest.warns(UserWarning, match="Counting runs unrecorded: it is given tensors of several devices"):
        for _ in range(4):
            step_of(model, torch.randn(2, 8), torch.tensor(2.0, device="meta"))
    assert record_of(model).replays == 0


def test_a_block_that_changes_itself_is_refused():
    model = tilesmith.optimize(_counting(counts=True), graphs=True)
    with pytest.warns(UserWarning, match="Counting runs unrecorded: its forward changes modules or their attributes"):
        for _ in range(4):
            step_of(model, torch.randn(2, 8))
    assert record_of(model).replays == 0 and model.blocks[0].calls > 4


class Skipping(Block):
    draw = staticmethod(random.random)

    def forward(self, x, scale=None):
        return super().forward(x, scale) if self.draw() < 2 else x


@pytest.mark.parametrize("draw", [random.random, np.random.random])
def test_a_block_that_draws_on_the_host_is_refused(draw, monkeypatch):
    """What it decides by the number is not in a graph."""
    monkeypatch.setattr(Skipping, "draw", staticmethod(draw))
    model = made_stack()
    model.blocks = nn.ModuleList(Skipping() for _ in range(3))
    tilesmith.optimize(model, graphs=True)
    with pytest.warns(UserWarning, match="Skipping runs unrecorded: its forward draws random numbers on the host"):
        for _ in range(3):
            step_of(model, torch.randn(2, 8))
    assert record_of(model).replays == 0


def test_a_changed_configuration_is_noticed():
    model, plain = tilesmith.optimize(_counting(), graphs=True), _counting()
    for number in range(7):
        if number == 4:
            model.blocks[1].config.factor = plain.blocks[1].config.factor = 3.0
        x = torch.randn(2, 8)
        torch.testing.assert_close(step_of(model, x), step_of(plain, x))
    assert record_of(model).renewed == 1 and record_of(model).replays == 9


class Attributed(Block):
    """Computes by attributes of many kinds, its own, its class's and those of records."""

    sharpness = 1.0

    def __init__(self):
        super().__init__()
        self.cap, self.dtype, self.factor = None, torch.float64, torch.ones(())
        self.nested, self.mixed, self.chosen = {"a": [1.0]}, [None, 1.0], {1.0}
        self.settings = types.SimpleNamespace(factor=1.0)
        self.config = types.SimpleNamespace(cap=None, rope={"a": {"factor": 1.0}}, text=types.SimpleNamespace(f=1.0))

    def forward(self, x):
        y = self.linear(x).to(self.dtype).to(x.dtype) * self.factor * self.nested["a"][0] * self.mixed[1]
        y = y * max(self.chosen) * self.settings.factor * self.sharpness
        y = y * self.config.rope["a"]["factor"] * self.config.text.f
        return y * (self.cap or 1.0) * (self.config.cap or 1.0) * getattr(self, "mask", 1.0)


class Around(Block):
    """A block whose attributes are those of a module inside."""

    def __init__(self):
        super().__init__()
        self.inside = Attributed()

    def forward(self, x, scale=None):
        return x + self.inside(super().forward(x))


class Twice(nn.Linear):
    def forward(self, x):
        return 2 * super().forward(x)


CHANGES = {
    "None to a number": lambda m: setattr(m, "cap", 3.0),
    "dtype": lambda m: setattr(m, "dtype", torch.bfloat16),
    "tensor": lambda m: setattr(m, "factor", torch.full((), 3.0)),
    "memory of a tensor": lambda m: setattr(m.factor, "data", torch.full((), 3.0)),
    "list in a dict": lambda m: m.nested["a"].__setitem__(0, 3.0),
    "list with None": lambda m: m.mixed.__setitem__(1, 3.0),
    "set": lambda m: m.chosen.add(3.0),
    "namespace": lambda m: setattr(m.settings, "factor", 3.0),
    "one that hides the class's": lambda m: setattr(m, "sharpness", 3.0),
    "None in the configuration": lambda m: setattr(m.config, "cap", 3.0),
    "dict in the configuration": lambda m: m.config.rope["a"].update(factor=3.0),
    "configuration within": lambda m: setattr(m.config.text, "f", 3.0),
    "configuration": lambda m: setattr(m, "config", types.SimpleNamespace(**vars(m.config) | {"cap": 3.0})),
    "first buffer": lambda m: m.register_buffer("mask", torch.full((8,), 3.0)),
    "class": lambda m: setattr(m.linear, "__class__", Twice),
}


@pytest.mark.parametrize("change", CHANGES)
def test_attributes_of_each_kind_are_noticed(change, monkeypatch):
    monkeypatch.setattr(graphs, "RECORDER", Operators)
    pair = []
    for _ in range(2):
        model = made_stack()
        model.blocks = nn.ModuleList(Around() for _ in range(3))
        pair.append(model.double())
    pair[1].load_state_dict(pair[0].state_dict())
    model, plain = tilesmith.optimize(pair[0], graphs=True), pair[1]
    for number in range(7):
        if number == 4:
            for each in pair:
                CHANGES[change](each.blocks[1].inside)
                each.zero_grad()
        x = torch.randn(2, 8, dtype=torch.float64)
        torch.testing.assert_close(step_of(model, x), step_of(plain, x))
        torch.testing.assert_close(gradients_of(model), gradients_of(plain))
    assert record_of(model).renewed == 1 and record_of(model).replays == 9


class Advancing(Block):
    def forward(self, x, place=None):
        place.add_(1)
        return super().forward(x) + place


def test_a_block_that_writes_to_what_it_is_given_is_refused():
    """A replay would write to a copy."""
    model, plain = _optimised_and_plain(Advancing)
    places = torch.zeros(8), torch.zeros(8)
    with pytest.warns(UserWarning, match="Advancing runs unrecorded: its forward writes to what it is given"):
        for _ in range(4):
            x = torch.randn(2, 8)
            torch.testing.assert_close(step_of(model, x, places[0]), step_of(plain, x, places[1]))
            assert torch.equal(*places)
    assert record_of(model).replays == 0


class Stashing(Block):
    """Leaves a loss for whoever asks for it, as some experts do."""

    def forward(self, x, scale=None):
        y = super().forward(x, scale)
        self.loss = y.detach().square().mean()
        return y


def test_a_block_that_leaves_a_tensor_on_itself_is_refused():
    model = made_stack()
    model.blocks = nn.ModuleList(Stashing() for _ in range(3))
    tilesmith.optimize(model, graphs=True)
    with pytest.warns(UserWarning, match="Stashing runs unrecorded: its forward changes modules or their attributes"):
        for _ in range(4):
            y = step_of(model, torch.randn(2, 8))
            torch.testing.assert_close(model.blocks[2].loss, y.square().mean())
    assert record_of(model).replays == 0


@pytest.mark.parametrize(
    ("how", "why"),
    [
        ("no_grad", "without gradients"),
        ("hook", "it has hooks"),
        ("func", "a transform of torch.func is at work"),
        ("saved", "hooks on saved tensors are on"),
        ("frozen", "nothing in it needs a gradient"),
        ("object", "given a object"),
    ],
)
def test_what_runs_as_before_and_is_told(how, why):
    model = tilesmith.optimize(made_stack(), graphs=True)
    x = torch.randn(2, 8)
    for _ in range(3):
        if how == "no_grad":
            with torch.no_grad():
                model(x)
        elif how == "func":
            weights = {n: p.detach() for n, p in model.named_parameters()}
            torch.func.grad(lambda w: torch.func.functional_call(model, w, (x,)).sum())(weights)
        elif how == "saved":
            with torch.autograd.graph.save_on_cpu():
                model(x)
        elif how == "object":
            with pytest.raises(TypeError):
                model(x, object())
        else:
            if how == "hook":
                for block in model.blocks:
                    block.register_forward_hook(lambda *_: None)
            model.requires_grad_(how != "frozen")(x)
    assert record_of(model).replays == 0 and any(told.startswith(why) for told in record_of(model).plain)


@pytest.mark.parametrize("when", ["before", "behind"])
@pytest.mark.parametrize("how", ["forward_pre", "forward", "full_backward_pre", "full_backward"])
def test_hooks_inside_a_block_are_called_each_time(how, when, monkeypatch):
    """Though a replay runs no Python: the block runs unrecorded, those beside it do not."""
    monkeypatch.setattr(graphs, "RECORDER", Operators)
    model, plain, seen = tilesmith.optimize(made_stack(), graphs=True), made_stack(), []
    if when == "behind":
        step_of(warmed_up(model, torch.randn(2, 8)), torch.randn(2, 8))
        assert record_of(model).recorded == 1 and record_of(model).replays == 3
    model.zero_grad()
    hook = getattr(model.blocks[1].linear, f"register_{how}_hook")(lambda *_: seen.append(1))
    for step in range(6):
        x = torch.randn(2, 8, requires_grad=True)
        torch.testing.assert_close(step_of(model, x), step_of(plain, x))
        assert len(seen) == step + 1
    torch.testing.assert_close(gradients_of(model), gradients_of(plain))
    assert record_of(model).recorded == 2 and record_of(model).plain["linear in it has hooks"] >= 4
    hook.remove()
    step_of(model, x)
    assert len(seen) == 6 and record_of(model).recorded == 3


@pytest.mark.parametrize("how", ["forward_pre", "forward", "full_backward_pre", "full_backward"])
def test_hooks_of_all_modules_are_called_each_time(how, monkeypatch):
    """Profilers register such hooks: while they are on, blocks that are recorded run as before."""
    monkeypatch.setattr(graphs, "RECORDER", Operators)
    model, plain, seen = tilesmith.optimize(made_stack(), graphs=True), made_stack(), []
    x = torch.randn(2, 8, requires_grad=True)
    step_of(warmed_up(model, x), x)
    assert record_of(model).replays == 3
    model.zero_grad()
    register = getattr(nn.modules.module, f"register_module_{how}_hook")
    hook = register(lambda module, *_: seen.append(module))
    try:
        for step in range(2):
            x = torch.randn(2, 8, requires_grad=True)
            y = step_of(model, x)
            assert sum(module is model.blocks[1].linear for module in seen) == step + 1
            torch.testing.assert_close(y, step_of(plain, x))
    finally:
        hook.remove()
    torch.testing.assert_close(gradients_of(model), gradients_of(plain))
    assert record_of(model).replays == 3
    assert "Blocks ran unrecorded 6 times: hooks of all modules are on" in model.tilesmith_report.full()
    step_of(model, x)
    assert record_of(model).replays == 6


def test_a_forward_put_on_a_module_inside_is_called_each_time(monkeypatch):
    monkeypatch.setattr(graphs, "RECORDER", Operators)
    model, seen = tilesmith.optimize(made_stack(), graphs=True), []
    step_of(warmed_up(model, torch.randn(2, 8)), torch.randn(2, 8))
    linear = model.blocks[1].linear
    linear.forward = lambda x: (seen.append(1), type(linear).forward(linear, x))[1]
    for step in range(5):
        step_of(model, torch.randn(2, 8))
        assert len(seen) == step + 1


def test_a_hooked_module_that_is_removed_keeps_nothing_from_recording(monkeypatch):
    monkeypatch.setattr(graphs, "RECORDER", Operators)
    model = tilesmith.optimize(made_stack(), graphs=True)
    for block in model.blocks:
        block.norm.register_forward_hook(lambda *_: None)
    x = torch.randn(2, 8)
    step_of(warmed_up(model, x), x)
    assert not record_of(model).recorded and record_of(model).plain["norm in it has hooks"] == 3
    for block in model.blocks:
        block.norm = nn.LayerNorm(8)
    step_of(model, x)
    assert record_of(model).recorded == 1


@pytest.mark.parametrize("together", [True, False])
def test_hooks_on_gradients_of_parameters_are_called_once_a_backward(together, monkeypatch):
    """Also those that were there when the backward was recorded."""
    monkeypatch.setattr(graphs, "RECORDER", Operators)
    if not together:
        monkeypatch.setattr(graphs, "one_by_one", lambda links: "a test asks for it")
    model, plain = tilesmith.optimize(made_stack(), graphs=True), made_stack()
    called = {model: 0, plain: 0}
    handles = []
    for each in (model, plain):

        def doubled(gradient, each=each):
            called[each] += 1
            return 2 * gradient

        handles.append(each.blocks[1].linear.weight.register_hook(doubled))
    for _ in range(5):
        x = torch.randn(2, 8)
        torch.testing.assert_close(step_of(model, x), step_of(plain, x))
        torch.testing.assert_close(gradients_of(model), gradients_of(plain))
    assert called == {model: 5, plain: 5} and record_of(model).replays == 9
    for handle in handles:
        handle.remove()
    step_of(model, x), step_of(plain, x)
    torch.testing.assert_close(gradients_of(model), gradients_of(plain))
    assert called == {model: 5, plain: 5} and record_of(model).replays == 12


def test_a_recorder_that_fails_is_told_and_the_block_runs(monkeypatch):
    monkeypatch.setattr(Repeater, "failing", "operation not permitted when stream is capturing\nmore")
    model, plain = tilesmith.optimize(made_stack(), graphs=True), made_stack()
    x = torch.randn(2, 8)
    warmed_up(model, x)
    with pytest.warns(UserWarning, match="Block runs unrecorded: operation not permitted when stream is capturing$"):
        torch.testing.assert_close(step_of(model, x), step_of(plain, x))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        step_of(model, x)
    assert record_of(model).replays == 0


def test_copies_and_pickles_record_their_own_and_are_undone():
    model = tilesmith.optimize(made_stack(), graphs=True)
    x = torch.randn(2, 8)
    warmed_up(model, x)
    wanted = step_of(model, x)
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert record_of(twin).recorded == 0 and list(twin.state_dict()) == list(model.state_dict())
        warmed_up(twin, x)
        assert torch.equal(step_of(twin, x), wanted) and record_of(twin).recorded == 1
        tilesmith.undo(twin)
        assert not any(forms(m) or "_tilesmith_graphs" in m.__dict__ for m in twin.modules())
        torch.testing.assert_close(step_of(twin, x), wanted)
    assert record_of(model).recorded == 1


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_compiled_blocks_are_recorded(backend, monkeypatch):
    monkeypatch.setattr(compiling, "BACKEND", backend)
    model, plain = tilesmith.optimize(made_stack(), compile="between", graphs=True), tilesmith.optimize(made_stack())
    for _ in range(4):
        x = torch.randn(2, 8, requires_grad=True)
        torch.testing.assert_close(step_of(model, x), step_of(plain, x))
    torch.testing.assert_close(gradients_of(model), gradients_of(plain))
    assert [[type(form).__name__ for form in forms(block)][:2] for block in model.blocks] == [
        ["GraphedForm", "CompiledForm"]
    ] * 3
    assert record_of(model).replays == 6 and model.tilesmith_report.notes[0].graphs == 1
    tilesmith.optimize(model)
    assert [type(note).__name__ for note in model.tilesmith_report.notes] == ["Regions", "Decoding", "Graphs"]
    tilesmith.undo(model)
    assert not any(forms(m) for m in model.modules())


def test_a_machine_without_cuda_says_so(monkeypatch):
    monkeypatch.undo()
    model = tilesmith.optimize(made_stack(), graphs=True)
    for _ in range(3):
        step_of(model, torch.randn(2, 8))
    assert dict(record_of(model).plain) == {"on cpu there are no CUDA graphs": 9}
    assert "Blocks ran unrecorded 9 times: on cpu there are no CUDA graphs" in str(model.tilesmith_report)


def test_bad_input():
    with pytest.raises(TypeError, match="optimize: graphs must be True, False or .auto., got 1"):
        tilesmith.optimize(made_stack(), graphs=1)
    with pytest.raises(ValueError, match="no two modules of one class.*make_graphed_callables"):
        tilesmith.optimize(nn.Sequential(nn.Linear(2, 2)), graphs=True)


def test_a_replay_is_not_disturbed_by_another_thread(monkeypatch):
    """Whose call finds the recording free before the replay has said otherwise, and would copy its own input in."""
    begun, ended = threading.Event(), threading.Event()

    class Slow(Repeater):
        waits = False

        def record(self, fn):
            replay, first = super().record(fn)

            def slow():
                if Slow.waits:
                    Slow.waits = False
                    begun.set()
                    ended.wait(60)
                replay()

            return slow, first

    monkeypatch.setattr(graphs, "RECORDER", Slow)
    model, plain = tilesmith.optimize(build("llama"), graphs=True), tilesmith.optimize(build("llama"))
    given = [{**batch("llama"), "use_cache": False} for _ in range(2)]
    given[1]["input_ids"] = given[1]["input_ids"].flip(0, 1)
    for _ in range(3):
        model(**given[0]).loss.backward()
    Slow.waits = True
    with ThreadPoolExecutor(1) as other:
        first = other.submit(contextvars.copy_context().run, lambda: model(**given[0]).loss)
        assert begun.wait(60)
        try:
            second = model(**given[1]).loss
        finally:
            ended.set()
    for found, one in ((first.result(), given[0]), (second, given[1])):
        model.zero_grad(), plain.zero_grad()
        wanted = plain(**one).loss
        torch.testing.assert_close(found, wanted)
        found.backward(), wanted.backward()
        for p, q in zip(model.parameters(), plain.parameters()):
            torch.testing.assert_close(p.grad, q.grad)
    assert model.tilesmith_report.notes[-1].plain["another thread ran the model"] > 0


class Merging(Block):
    """As with PEFT's adapters: nothing reaches what is trained while they are merged."""

    merged = False

    def forward(self, x, scale=None):
        out = super().forward(x, scale)
        return out.detach() if self.merged else out


def test_blocks_without_a_gradient_are_recorded_once_they_have_one():
    model = Stack()
    model.blocks = nn.ModuleList(Merging() for _ in range(3))
    plain = copy.deepcopy(model)
    tilesmith.optimize(model, graphs=True)
    x, replays = torch.randn(4, 8), 0
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for merged in (True, False, True, False):
            for each in (*model.blocks, *plain.blocks):
                each.merged = merged
            for _ in range(5):
                found, wanted = model(x), plain(x)
                torch.testing.assert_close(found, wanted)
                if not merged:
                    model.zero_grad(), plain.zero_grad()
                    found.square().sum().backward(), wanted.square().sum().backward()
                    for p, q in zip(model.parameters(), plain.parameters()):
                        torch.testing.assert_close(p.grad, q.grad)
            record = record_of(model)
            assert not record.refused and (merged or record.replays > replays)
            replays = record.replays
    assert record.plain["nothing that it returns has a gradient"] > 0
