"""Blocks that follow each other, recorded as one: which are, and what a forward may do between them."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import tilesmith
from graph_runs import Block, Stack, gradients_of, on_a_cpu, record_of, step_of, warmed_up  # noqa: F401

OTHERWISE = "they are not always called as they were recorded"
KEPT = "what passes between them is kept"


class Loop(Stack):
    """A stack that does `between(x, place)` behind each block, and skips blocks."""

    between = staticmethod(lambda x, place: x)
    skipped = ()

    def forward(self, x, scale=None):
        for place, block in enumerate(self.blocks):
            if place not in self.skipped:
                x = self.between(block(x, scale), place)
        return x


def _pair():
    models = []
    for _ in range(2):
        torch.manual_seed(0)
        models.append(Loop())
    return tilesmith.optimize(models[0], graphs=True), models[1]


def _compared(model, plain, steps=4):
    for _ in range(steps):
        x = torch.randn(2, 8)
        torch.testing.assert_close(step_of(model, x), step_of(plain, x))
        torch.testing.assert_close(gradients_of(model), gradients_of(plain))


def test_blocks_are_recorded_as_one():
    model, plain = _pair()
    _compared(model, plain, 5)
    assert record_of(model).recorded == 1 and record_of(model).replays == 9 and not record_of(model).apart
    (entry,) = (e for known in record_of(model)._blocks.values() for e in known.recorded.values())
    assert [link.block() for link in entry.links] == list(model.blocks)
    assert [link.sources for link in entry.links] == [((False, 0),), ((True, 0),), ((True, 0),)]


def test_what_each_block_is_given_may_be_what_the_first_is_given():
    model, plain = _pair()
    for _ in range(5):
        x, scale = torch.randn(2, 8), torch.randn(8)
        torch.testing.assert_close(step_of(model, x, scale), step_of(plain, x, scale))
    torch.testing.assert_close(gradients_of(model), gradients_of(plain))
    assert record_of(model).recorded == 1 and record_of(model).replays == 9


def test_a_block_that_is_given_something_else_starts_anew():
    model, plain = _pair()
    for each in (model, plain):
        each.between = lambda x, place: x * 2 if place == 0 else x
    _compared(model, plain, 5)
    links = [len(e.links) for known in record_of(model)._blocks.values() for e in known.recorded.values()]
    assert links == [1, 2] and record_of(model).replays == 9 and not record_of(model).apart


@pytest.mark.parametrize("how", ["scaled", "in place", "hook", "retain_grad"])
def test_what_is_done_between_blocks_later_takes_them_apart(how):
    model, plain = _pair()
    _compared(model, plain, 4)
    told = {model: [], plain: []}

    def between(each):
        def change(x, place):
            if place != 1:
                return x
            if how == "scaled":
                return x * 2
            if how == "in place":
                return x.mul_(2)
            if how == "hook":
                x.register_hook(lambda d: told[each].append(d.clone()))
            else:
                x.retain_grad()
                told[each].append(x)
            return x

        return change

    model.between, plain.between = between(model), between(plain)
    _compared(model, plain, 5)
    assert list(record_of(model).apart) == [OTHERWISE] and record_of(model).replays > 12
    found, wanted = ([x.grad if how == "retain_grad" else x for x in told[each]] for each in (model, plain))
    assert len(found) == (5 if how in ("hook", "retain_grad") else 0)
    torch.testing.assert_close(found, wanted)


@pytest.mark.parametrize("skipped", [0, 1, 2])
def test_a_block_that_is_skipped_has_no_gradient(skipped):
    model, plain = _pair()
    _compared(model, plain, 3)
    for each in (model, plain):
        each.skipped = (skipped,)
        each.zero_grad()
    _compared(model, plain, 4)
    assert list(record_of(model).apart) == [OTHERWISE] and f"blocks.{skipped}.linear.weight" not in gradients_of(model)
    assert f"Blocks are recorded one by one: {OTHERWISE}" in str(model.tilesmith_report)


def test_a_loss_of_what_passes_between_blocks():
    model, plain = _pair()
    kept = {model: [], plain: []}
    for each in (model, plain):
        each.between = lambda x, place, each=each: kept[each].append(x) or x
    for _ in range(6):
        x = torch.randn(2, 8)
        for each in (model, plain):
            kept[each].clear()
            sum(part.square().sum() for part in (each(x), *kept[each])).backward()
        torch.testing.assert_close(gradients_of(model), gradients_of(plain))
    assert list(record_of(model).apart) == [KEPT] and record_of(model).recorded == 3


def test_who_asks_for_a_gradient_between_blocks_too_late_is_told():
    model, _ = _pair()
    kept = []
    warmed_up(model, torch.randn(2, 8))
    model.between = lambda x, place: kept.append(x) or x
    loss = model(torch.randn(2, 8)).sum()
    kept[0].retain_grad()
    with pytest.raises(RuntimeError, match="got a hook, or retain_grad, after both had run as one"):
        loss.backward()
    kept.clear()
    loss = model(torch.randn(2, 8)).sum()
    kept[0].retain_grad()
    loss.backward()
    assert kept[0].grad is not None and list(record_of(model).apart) == [KEPT]


def test_a_forward_that_ends_early():
    model, plain = _pair()
    _compared(model, plain, 3)
    x = torch.randn(2, 8)
    for each in (model, plain):
        each.blocks[0](x, None).square().sum().backward()
    torch.testing.assert_close(gradients_of(model), gradients_of(plain))
    _compared(model, plain, 2)
    assert list(record_of(model).apart) == [OTHERWISE]


def test_one_block_called_again_and_again():
    """As ALBERT does: its gradients add up."""
    model, plain = _pair()
    for each in (model, plain):
        each.blocks[2] = each.blocks[1] = each.blocks[0]
    _compared(model, plain, 6)
    assert record_of(model).replays


@pytest.mark.parametrize(
    ("how", "why"), [("dropout", "they draw random numbers"), ("hooks", "so that hooks on parameters are called")]
)
def test_what_is_recorded_one_by_one(how, why):
    model, _ = _pair()
    if how == "dropout":
        model.blocks[1].dropout.p = 0.5
    else:
        model.blocks[1].linear.weight.register_post_accumulate_grad_hook(lambda p: None)
    for _ in range(4):
        step_of(model, torch.randn(2, 8))
    assert [told.startswith(why) for told in record_of(model).apart] == [True] and record_of(model).replays == 6


def test_blocks_of_a_process_group_are_recorded_one_by_one(monkeypatch):
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    model, plain = _pair()
    _compared(model, plain)
    assert record_of(model).recorded == 3 and list(record_of(model).apart) == [
        "so that gradients are sent while others are computed"
    ]


def test_frozen_blocks_in_front_stay_out():
    model, plain = _pair()
    for each in (model, plain):
        each.blocks[0].requires_grad_(False)
    _compared(model, plain, 5)
    links = [len(e.links) for known in record_of(model)._blocks.values() for e in known.recorded.values()]
    assert links == [2]


def test_a_block_that_is_called_by_itself():
    model, plain = _pair()
    _compared(model, plain, 3)
    x = torch.randn(2, 8, requires_grad=True)
    for _ in range(3):
        for each in (model, plain):
            each.blocks[1](x, None).square().sum().backward()
    torch.testing.assert_close(gradients_of(model), gradients_of(plain))
    _compared(model, plain, 2)
    assert isinstance(model.blocks[1], Block) and isinstance(model.blocks, nn.ModuleList)
