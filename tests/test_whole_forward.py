"""The forward of a language model recorded from tokens to the loss: when it is, and that steps are those without."""

from __future__ import annotations

import contextvars
import copy
import pickle
import re
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import nn

import tilesmith
from graph_runs import Operators, Repeater, gradients_of, on_a_cpu, record_of  # noqa: F401
from optimize_models import batch, build, checkpoint_layers, ops_everywhere  # noqa: F401
from tilesmith.models import graphs, whole_forward
from tilesmith.models.attention import mask_values, masks
from tilesmith.models.attention.masks import KeyMask, unpacked_positions
from tilesmith.models.blocks import Foreign
from tilesmith.rewrite import forms

LAYERS = 3


@pytest.fixture(params=[Repeater, Operators], autouse=True)
def _either_recorder(request, monkeypatch):
    monkeypatch.setattr(graphs, "RECORDER", request.param)


def _frozen(family="llama", **more):
    """A model of which only the blocks are trained."""
    model = build(family, layers=LAYERS, **more)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(".layers." in name or ".h." in name)
    return model


def _pair(family="llama"):
    return tilesmith.optimize(_frozen(family), graphs=True), tilesmith.optimize(_frozen(family))


def _given(number=0, length=12):
    ids = (batch("llama", padded=None, length=length)["input_ids"] + 7 * number) % 120 + 3
    labels = ids.clone()
    labels[0, : 2 + number % 3] = -100
    return {"input_ids": ids, "labels": labels, "use_cache": False}


def _step(model, given):
    out = model(**given)
    out.loss.backward()
    return out


def _compared(model, plain, steps=4, start=0, **more):
    """Steps of both, whose losses, logits and gradients are the same; the record of what was recorded."""
    for number in range(start, start + steps):
        given = {**_given(number), **more}
        found, wanted = _step(model, given), _step(plain, given)
        torch.testing.assert_close(found.loss, wanted.loss)
        torch.testing.assert_close(found.logits.tensor(), wanted.logits.tensor())
        torch.testing.assert_close(gradients_of(model), gradients_of(plain))
    return record_of(model)


@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma2", "gpt2"])
def test_steps_are_those_without(family):
    model, plain = _pair(family)
    record = _compared(model, plain, 6)
    assert record.wholes == 4 and record.replays == 4 * LAYERS and record.recorded == 1 and not record.beside
    text = str(model.tilesmith_report)
    assert "Forwards replayed as a whole, from tokens to the loss: 4" in text
    assert f"pairs of graphs: 1, of up to {LAYERS} blocks" in text


def test_results_outlive_the_next_replay():
    model, plain = _pair()
    given = [_given(number) for number in range(6)]
    found, wanted = ([_step(each, one) for one in given] for each in (model, plain))
    for one, other in zip(found, wanted):
        torch.testing.assert_close(one.loss, other.loss)
        torch.testing.assert_close(one.logits.tensor(), other.logits.tensor())
        assert type(one) is type(other) and list(one) == list(other)


def test_two_arguments_that_were_one_tensor():
    model, plain = _pair()
    for _ in range(3):
        ids = _given()["input_ids"]
        for each in (model, plain):
            _step(each, {"input_ids": ids, "labels": ids, "use_cache": False})
    assert _compared(model, plain).wholes == 5


def test_a_tuple_is_returned_as_one():
    model, plain = _pair()
    for number in range(4):
        given = {**_given(number), "return_dict": False}
        found, wanted = model(**given), plain(**given)
        assert type(found) is tuple and len(found) == len(wanted)
        torch.testing.assert_close(found[0], wanted[0])
        torch.testing.assert_close(found[1].tensor(), wanted[1].tensor())
        found[0].backward()
    assert record_of(model).wholes == 2


def test_logits_have_a_gradient_too():
    model, plain = _pair()
    for number in range(5):
        for each in (model, plain):
            out = each(**_given(number))
            (out.loss + out.logits.tensor().square().mean()).backward()
        torch.testing.assert_close(gradients_of(model), gradients_of(plain))
    assert record_of(model).wholes == 3


def test_a_second_backward_and_a_second_forward():
    model, plain = _pair()
    _compared(model, plain, 3)
    for each in (model, plain):
        loss = each(**_given(1)).loss
        loss.backward(retain_graph=True)
        loss.backward()
        (each(**_given(2)).loss + each(**_given(3)).loss).backward()
    torch.testing.assert_close(gradients_of(model), gradients_of(plain))
    record = record_of(model)
    assert record.wholes == 3 and record.recorded == 1, "a forward that awaits its backward has not been overwritten"
    assert record.plain["an earlier forward still awaits its backward"] == LAYERS


def test_an_optimizer_changes_the_weights_in_place():
    model, plain = _pair()
    optimizers = [torch.optim.AdamW([p for p in m.parameters() if p.requires_grad], 1e-2) for m in (model, plain)]
    for number in range(5):
        losses = [_step(each, _given(number)).loss for each in (model, plain)]
        torch.testing.assert_close(*losses)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    assert record_of(model).wholes == 3 and not record_of(model).renewed


def test_adapters(monkeypatch):
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(r=2, target_modules="all-linear", lora_dropout=0.0, init_lora_weights=False)

    def adapted():
        torch.manual_seed(2)
        return peft.get_peft_model(build("llama", layers=LAYERS), config).train()

    plain = tilesmith.optimize(adapted())
    model = tilesmith.optimize(adapted(), graphs=True)
    assert _compared(model, plain, 4).wholes == 2
    with torch.no_grad(), model.disable_adapter():
        wanted = plain.get_base_model()
        with plain.disable_adapter():
            torch.testing.assert_close(model(**_given()).loss, wanted(**_given()).loss)
    for each in (model, plain):
        for module in each.modules():
            if hasattr(module, "set_scale"):
                module.set_scale("default", 3.0)
    assert _compared(model, plain, 4).renewed == 1 and record_of(model).wholes == 4
    with model.disable_adapter(), plain.disable_adapter():
        torch.testing.assert_close(model(**_given()).loss, plain(**_given()).loss)


def test_dropout_draws_anew():
    model = _frozen()
    for layer in model.model.layers:
        layer.mlp.act_fn = nn.Sequential(nn.SiLU(), nn.Dropout(0.5))
    tilesmith.optimize(model, graphs=True, exclude="mlp")
    for _ in range(graphs.PLAIN_CALLS):
        _step(model, _given())
    if graphs.RECORDER is Repeater:  # the other repeats the numbers that it drew
        assert _step(model, _given()).loss != _step(model, _given()).loss
        assert record_of(model).wholes == 2


def _tripled(logits, labels, vocab_size, **kwargs):
    return 3 * nn.functional.cross_entropy(logits.float().view(-1, vocab_size), labels.view(-1))


def _change(model, change):
    layer = model.model.layers[1]
    if change == "norm behind the blocks":
        model.model.norm.variance_epsilon = 0.5
    elif change == "attribute in a block":
        layer.input_layernorm.variance_epsilon = 0.5
    elif change == "head":
        model.lm_head.weight.data = model.lm_head.weight.data * 2
    elif change == "embedding":
        torch.manual_seed(5)
        model.model.embed_tokens = nn.Embedding(128, 64).requires_grad_(False)
    elif change == "loss":
        model.loss_function = _tripled
    elif change == "configuration":
        model.config.num_hidden_layers = 2
        model.model.config.num_hidden_layers = 2
    elif change == "frozen":
        layer.mlp.down_proj.weight.requires_grad_(False)
    elif change == "mode":
        layer.eval()
    else:
        layer.self_attn.q_proj.bias = nn.Parameter(torch.ones(64))


@pytest.mark.parametrize(
    "change",
    ["norm behind the blocks", "attribute in a block", "head", "embedding", "loss", "configuration", "frozen", "mode",
     "bias"],
)  # fmt: skip
def test_changes_are_noticed(change):
    model, plain = _pair()
    assert _compared(model, plain, 3).wholes == 1
    for each in (model, plain):
        _change(each, change)
        each.zero_grad()
    record = _compared(model, plain, 4)
    assert record.renewed == 1 and record.wholes == 3 and record.recorded == 1


@pytest.mark.parametrize("how", ["forward", "forward_pre", "full_backward"])
def test_hooks_are_called_each_time(how):
    model, plain = _pair()
    assert _compared(model, plain, 3).wholes == 1
    seen = []
    hook = getattr(model.model.norm, f"register_{how}_hook")(lambda *_: seen.append(1))
    record = _compared(model, plain, 4)
    assert len(seen) == 4 and record.wholes == 1 and record.beside["model.norm in it has hooks"] > 0
    assert record.recorded == 1 and record.replays > LAYERS, "the blocks are recorded without it"
    hook.remove()
    _compared(model, plain, 1)
    assert record.wholes == 2


def _asked(model, number):
    """A step whose loss also depends on what was asked for; what it returned."""
    out = model(**_given(number), output_hidden_states=True, output_attentions=True)
    (out.loss + out.hidden_states[1].square().mean() + out.attentions[1].square().mean()).backward()
    return out


@pytest.mark.parametrize("trained", ["blocks", "all"])
def test_calls_are_replayed_that_do_not_ask_for_hidden_states_and_attentions(trained):
    """transformers leaves its hooks on the modules for good once they were asked for."""
    model, plain = _pair()
    if trained == "all":
        model.requires_grad_(), plain.requires_grad_()
    record = _compared(model, plain, 4)
    before = record.replays
    for number in range(5):  # as often as would be recorded
        found, wanted = _asked(model, number), _asked(plain, number)
        torch.testing.assert_close(found.hidden_states, wanted.hidden_states)
        torch.testing.assert_close(found.attentions, wanted.attentions)
        torch.testing.assert_close(found.loss, wanted.loss)
        torch.testing.assert_close(gradients_of(model), gradients_of(plain))
    asked = record.replays
    _compared(model, plain, 6, start=2)
    assert record.replays >= asked + 3 * LAYERS and before > 0
    if trained == "all":
        assert asked == before, "what blocks return is captured where they run"


def test_hooks_of_the_model_itself_and_a_forward_put_on_it_are_called_around_it():
    """accelerate puts a forward on the model that turns autocast on."""
    model, plain = _pair()
    seen = {model: [], plain: []}
    for each, told in seen.items():
        forward = each.forward
        each.register_forward_pre_hook(lambda *_, told=told: told.append("before"))
        each.register_forward_hook(lambda *_, told=told: told.append("behind"))
        each.forward = lambda *a, told=told, forward=forward, **k: (told.append("own"), forward(*a, **k))[1]
    assert _compared(model, plain, 4).wholes == 2
    assert seen[model] == seen[plain] == ["before", "own", "behind"] * 4


@pytest.mark.parametrize(
    ("how", "why"),
    [
        ("image", f"given a {mask_values.MASK}"),
        ("embedding", "weights beside the blocks are trained"),
        ("cache", "it returns a DynamicCache"),
        ("hooks", "so that hooks on parameters are called"),
        ("group", "so that gradients are sent while others are computed"),
        ("checkpoints", "its blocks are checkpointed"),
        ("attribute", "its forward changes modules or their attributes"),
    ],
)
def test_what_is_recorded_by_blocks(how, why, monkeypatch):
    model, plain = _pair()
    more = {}
    if how == "image":  # which may have a mask of its own
        more = {"attention_mask": torch.ones(2, 12, dtype=torch.long), "pixel_values": torch.zeros(1)}
    elif how == "cache":
        more["use_cache"] = True
    elif how == "group":
        monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    elif how == "hooks":
        model.model.layers[1].mlp.up_proj.weight.register_post_accumulate_grad_hook(lambda p: None)
    elif how == "checkpoints":
        for each in (model, plain):
            checkpoint_layers(each, use_reentrant=False)
    elif how == "attribute":
        embedding = model.model.embed_tokens
        embedding.seen = 0

        def counting(self, *args):
            self.seen = self.__dict__.get("seen", 0) + 1
            return nn.functional.embedding(*args, self.weight)

        monkeypatch.setattr(type(embedding), "forward", counting)
    else:
        for each in (model, plain):
            each.model.embed_tokens.weight.requires_grad_()
    record = _compared(model, plain, 5, **more)
    assert record.wholes == 0 and record.replays > 0
    (found,) = record.beside
    assert found.startswith(why)
    assert f"What is around the blocks ran unrecorded {record.beside[found]} times: {found}" in record.told()


def _masked(kind):
    mask = torch.ones(2, 12, dtype=torch.long)
    if kind == "behind":
        mask[1, -3:] = 0
    elif kind == "before":
        mask[0, :2] = 0
    return mask


def test_padding_of_each_kind_is_recorded_by_itself():
    model, plain = _pair("qwen3")
    for number in range(4):
        for kind in ("none", "behind", "before"):
            given = {**_given(number), "attention_mask": _masked(kind)}
            given["labels"] = given["labels"].masked_fill(given["attention_mask"] == 0, -100)
            given["labels"][:, 0:3] = -100
            found, wanted = _step(model, given), _step(plain, given)
            torch.testing.assert_close(found.loss, wanted.loss)
            torch.testing.assert_close(gradients_of(model), gradients_of(plain))
    assert record_of(model).wholes == 6 and record_of(model).recorded == 3 and not record_of(model).beside


def test_packed_positions_are_told_from_others():
    model, plain = _pair()
    packed = torch.tensor([[*range(5), *range(7)], [*range(8), *range(4)]])
    for number in range(4):
        for positions in (torch.arange(12)[None], packed.roll(number % 2, 0)):
            given = {**_given(number), "position_ids": positions}
            torch.testing.assert_close(_step(model, given).loss, _step(plain, given).loss)
    torch.testing.assert_close(gradients_of(model), gradients_of(plain))
    assert record_of(model).wholes == 4 and record_of(model).recorded == 2 and not record_of(model).beside


def test_what_is_not_known_of_masks_and_positions():
    ids, mask = torch.ones(2, 12, dtype=torch.long), _masked("behind")
    of = mask_values.MaskValues.of
    assert of({"input_ids": ids}, True) == (None, False)
    assert of({"input_ids": ids, "attention_mask": mask}, False).padding == (mask.shape, False, True)
    for arguments, decodes, why in (
        ({"position_ids": ids[None]}, False, mask_values.POSITIONS),
        ({"attention_mask": mask}, True, mask_values.MASK),
        ({"attention_mask": mask, "pixel_values": torch.zeros(1)}, False, mask_values.MASK),
    ):
        with pytest.raises(Foreign, match=re.escape(why)):
            of(arguments, decodes)


@pytest.mark.parametrize("kind", ["none", "behind", "before"])
def test_a_recorded_mask_is_the_one_that_is_made_otherwise(kind, monkeypatch):
    from transformers import masking_utils
    from transformers.utils import import_utils

    model = tilesmith.optimize(_frozen(attention="sdpa"), only="attention")
    mask, embeds, positions = _masked(kind), torch.zeros(2, 12, 64), torch.arange(12)[None]

    def made():
        return masking_utils.create_causal_mask(model.config, embeds, mask, None, positions)

    wanted = made()
    values = mask_values.MaskValues.of({"attention_mask": mask}, False)
    monkeypatch.setattr(import_utils, "is_cuda_stream_capturing", lambda: True)
    assert isinstance(made(), KeyMask), "as if it were not known"
    with values.known():
        found = made()
    assert (found is None) == (wanted is None) == (kind != "before")
    if wanted is not None:
        torch.testing.assert_close(found.tensor(), wanted.tensor())


def test_calls_without_labels_or_gradients_run_as_before():
    model, plain = _pair()
    _compared(model, plain, 3)
    ids = _given()["input_ids"]
    torch.testing.assert_close(model(ids).logits, plain(ids).logits)
    with torch.no_grad():
        torch.testing.assert_close(model(**_given(5)).loss, plain(**_given(5)).loss)
    for each in (model.eval(), plain.eval()):
        each(**_given(5)).loss.backward()
    torch.testing.assert_close(gradients_of(model), gradients_of(plain))
    assert record_of(model).wholes == 1
    model.train(), plain.train()
    assert _compared(model, plain, 1).wholes == 2


def test_a_recorder_that_fails_leaves_the_blocks(monkeypatch):
    model, plain = _pair()
    _compared(model, plain, graphs.PLAIN_CALLS)
    kind, record = graphs.RECORDER, graphs.RECORDER.record
    monkeypatch.setattr(kind, "failing", "operation not permitted when stream is capturing", raising=False)

    def first_fails(self, fn):
        if kind.failing:
            kind.failing, why = "", kind.failing
            raise RuntimeError(why)
        return record(self, fn)

    monkeypatch.setattr(kind, "record", first_fails)
    found = _compared(model, plain, 2)
    assert found.wholes == 0 and found.replays == 2 * LAYERS
    assert dict(found.beside) == {"operation not permitted when stream is capturing": 2} and not found.refused


def test_further_shapes_run_as_before():
    model, plain = _pair()
    for length in range(4, 5 + graphs.MOST_SHAPES):
        for number in range(3):
            given = _given(number, length)
            torch.testing.assert_close(_step(model, given).loss, _step(plain, given).loss)
    assert record_of(model).wholes == record_of(model).recorded == graphs.MOST_SHAPES


def test_copies_and_pickles_record_their_own_and_are_undone():
    model, plain = _pair()
    _compared(model, plain, 3)
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        twin.zero_grad()
        plain.zero_grad()
        assert record_of(twin).recorded == 0
        assert _compared(twin, plain, 3).recorded == 1
        tilesmith.undo(twin)
        assert not any(forms(m) or whole_forward.GRAPHS in m.__dict__ for m in twin.modules())
        torch.testing.assert_close(twin(**_given()).loss, plain(**_given()).loss)


def test_masks_of_a_recorded_call_are_not_of_packed_sequences(monkeypatch):
    """transformers takes all positions for packed while CUDA records, since it cannot read them then."""
    from transformers import masking_utils
    from transformers.utils import import_utils

    model = tilesmith.optimize(_frozen(attention="sdpa"), only="attention")
    embeds, positions = torch.zeros(2, 12, 64), torch.arange(12)[None]

    def mask(attention_mask=None):
        return masking_utils.create_causal_mask(model.config, embeds, attention_mask, None, positions)

    assert mask() is None
    monkeypatch.setattr(import_utils, "is_cuda_stream_capturing", lambda: True)
    assert isinstance(mask(), KeyMask) and mask().documents is not None
    with unpacked_positions():
        assert mask() is None
        padded = mask(attention_mask=batch("llama")["attention_mask"])
    torch.testing.assert_close(padded.tensor(), mask(attention_mask=batch("llama")["attention_mask"]).tensor())


def test_what_is_told_of_masks_is_told_to_one_thread():
    """Another thread, which records nothing, has masks and positions of its own."""
    from transformers import masking_utils

    model, given = tilesmith.optimize(_frozen(attention="sdpa"), only="attention"), batch("llama", "left")
    packed = torch.cat((torch.arange(5), torch.arange(7))).expand(2, -1)

    def mask(attention_mask=None, position_ids=None):
        embeds = torch.zeros(2, 12, 64)
        return masking_utils.create_causal_mask(model.config, embeds, attention_mask, None, position_ids)

    def elsewhere(**more):
        with ThreadPoolExecutor(1) as pool:
            return pool.submit(contextvars.copy_context().run, lambda: mask(**more)).result().tensor()

    wanted = [mask(position_ids=packed).tensor(), mask(attention_mask=given["attention_mask"]).tensor()]
    full = masks.Padding(given["attention_mask"].shape, True, False)
    with unpacked_positions(), masks.unread_masks(full):
        assert torch.equal(elsewhere(position_ids=packed), wanted[0])
        assert torch.equal(elsewhere(attention_mask=given["attention_mask"]), wanted[1])
