"""Copies of modules that are run to see which sums go into norms: what they see, and that they leave no trace."""

from __future__ import annotations

import copy
import operator
import random
import re

import pytest
import torch
from torch import nn

import tilesmith
from optimize_models import ops_everywhere, rows_of  # noqa: F401
from test_residual_spellings import NONE, WIDTH, Block, Difference, row_of


class Counting(Block):
    """Remembers what it saw."""

    def __init__(self):
        super().__init__()
        self.seen, self.count = [], 0
        self.bn = nn.BatchNorm1d(WIDTH)

    def forward(self, x):
        self.seen.append(x.shape)
        self.count += 1
        random.random()
        return self.n1(self.bn(x.flatten(0, 1)).view(x.shape)) + self.n2(x)


def test_looking_at_a_module_leaves_no_trace():
    torch.manual_seed(0)
    model, heard = Counting(), []
    model.attn.weight.grad = torch.ones(WIDTH, WIDTH)
    model.register_forward_hook(lambda *args: heard.append(1))
    model.n1.register_forward_pre_hook(lambda *args: heard.append(1))
    state, generator, python = copy.deepcopy(model.state_dict()), torch.get_rng_state(), random.getstate()
    tilesmith.optimize(model)
    assert re.search(NONE, rows_of(model)["", "add_norm"].reason)
    assert model.seen == [] and model.count == 0 and heard == [] and model.training
    assert len(model._forward_hooks) == len(model.n1._forward_pre_hooks) == 1 and not model.n2._forward_pre_hooks
    assert torch.equal(generator, torch.get_rng_state()) and random.getstate() == python
    assert all(torch.equal(a, b) for a, b in zip(state.values(), model.state_dict().values()))


class Tokens(nn.Module):
    """Its first argument is tokens; the sum of its embeddings goes into a norm by a helper."""

    def __init__(self):
        super().__init__()
        self.words, self.places = nn.Embedding(11, WIDTH), nn.Embedding(5, WIDTH)
        self.norm = nn.LayerNorm(WIDTH)

    def _embedded(self, ids):
        return self.words(ids) + self.places(torch.arange(ids.shape[-1], device=ids.device))

    def forward(self, ids):
        return self.norm(self._embedded(ids))


def test_a_model_of_tokens_is_run_on_tokens():
    model = tilesmith.optimize(Tokens())
    assert row_of(model).reason.startswith(
        "norm takes a sum that is not followed: return self.words(ids) + self.places"
    )


class Asking(Block):
    """Cannot be run, and what its norm takes is no sum of it."""

    def __init__(self):
        super().__init__()
        self.n2 = nn.Identity()

    def forward(self, x, context):
        h = x + context["f"](x)
        for part in context["parts"]:
            h = part(h + 1, x)
        return self.n1(h[:, : h.shape[1] + 1]) + self.n2(x)


class AskingInVain(Asking):
    """Nor this, whose norm may take a sum."""

    def forward(self, x, context):
        h = (x + context["f"](x)).flatten(1)
        y = h
        return self.n1(y)


class AskingInALoop(Asking):
    def forward(self, x, context):
        for part in context["parts"]:
            y = self.n1(x)
            x = x + part(y)
        return x


class AskingByAnotherName(Asking):
    def forward(self, x, context):
        n = self.n1
        return n(x + context["f"](x))


@pytest.mark.parametrize(
    ("cls", "quiet"), [(Asking, True), (AskingInVain, False), (AskingInALoop, False), (AskingByAnotherName, False)]
)
def test_what_could_not_be_run_is_told_where_a_sum_may_go_into_a_norm(cls, quiet):
    report = tilesmith.optimize(cls()).tilesmith_report
    (row,) = [row for row in report.rows if row.rule == "add_norm"]
    assert re.search(r"^not followed: .*; it raised \w+ on small inputs$", row.reason), row.reason
    assert row.quiet is quiet and ("not followed" in str(report)) is not quiet


class PreNorm(nn.Module):
    """As tutorials nest it: the sum of one is normalised by the next."""

    def __init__(self, f):
        super().__init__()
        self.norm, self.f = nn.LayerNorm(WIDTH), f

    def forward(self, x):
        return x + self.f(self.norm(x))


class PreNormWithWeights(PreNorm):
    """Returns more than the sum."""

    def forward(self, x):
        x = x + self.f(self.norm(x))
        return {"x": x, "weights": None}


class PostNormed(Block):
    """The sum is normalised; what is returned is none."""

    def forward(self, x):
        return self.n1(x).tanh()


def test_a_sum_that_leaves_its_module_is_said_to():
    layers = [PreNorm(nn.Linear(WIDTH, WIDTH)), PreNorm(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU()))]
    model = tilesmith.optimize(nn.Sequential(*layers, PreNormWithWeights(nn.Tanh()), PostNormed()))
    rows = rows_of(model)
    for name in "012":
        row = rows[name, "add_norm"]
        assert row.reason == (
            "its sum leaves the module: a norm that takes it is in another module, so they are not joined; in one "
            "forward they would be"
        )
        assert not row.wanted and not row.quiet
    assert rows["3", "add_norm"].quiet and re.search(NONE, rows["3", "add_norm"].reason)
    assert "its sum leaves the module" in str(model.tilesmith_report)
    alone = tilesmith.optimize(PreNorm(nn.Tanh()))
    assert re.search(NONE, row_of(alone).reason)  # nobody takes what the whole model returns


class Uncopied(nn.Module):
    def __deepcopy__(self, memo):
        return self

    def forward(self, x):
        return x


class HoldsUncopied(Block):
    def __init__(self):
        super().__init__()
        self.frozen = Uncopied()

    def forward(self, x):
        return self.n1(self.frozen(x)) - self.n2(x)


class Patched(Difference):
    def __init__(self):
        super().__init__()
        self.mlp.forward = lambda x: x


class Long(Difference):
    def __init__(self):
        super().__init__()
        self.rest = nn.Sequential(*(nn.Identity() for _ in range(64)))


@pytest.mark.parametrize(
    ("cls", "why"),
    [
        (Long, "it has more than 64 modules"),
        (HoldsUncopied, "a module in it cannot be copied"),
        (Patched, "a forward in it was replaced on the instance"),
    ],
)
def test_what_is_not_run_is_not_claimed(cls, why):
    model = tilesmith.optimize(cls())
    assert re.search(rf"^not followed: what n1 takes .*, what n2 takes \(x\); {why}$", row_of(model).reason), row_of(
        model
    ).reason
    assert not model.n1._forward_pre_hooks


def test_source_that_is_gone_is_not_claimed_about():
    space = {"Block": Block, "torch": torch}
    exec("class Gone(Block):\n    def forward(self, x):\n        return self.n2(x + self.n1(x))", space)
    row = row_of(tilesmith.optimize(space["Gone"]()))
    assert row.wanted and re.search(r"^n2 takes a sum: .*; the source of Gone.forward cannot be read$", row.reason)
    exec("class Gone(Block):\n    def forward(self, x):\n        return self.n2(x - self.n1(x))", space)
    assert re.search(NONE, row_of(tilesmith.optimize(space["Gone"]())).reason)


class Combining(Block):
    """What it does with the residual is an attribute."""

    def __init__(self, combine):
        super().__init__()
        self._combine = combine

    def forward(self, x):
        return self.mlp(self.n2(self._combine(x, self.n1(x))))


def test_blocks_of_a_class_are_looked_at_one_by_one_where_they_differ():
    model = tilesmith.optimize(nn.Sequential(Combining(operator.sub), Combining(operator.add)))
    rows = rows_of(model)
    assert re.search(NONE, rows["0", "add_norm"].reason)
    assert rows["1", "add_norm"].reason.startswith("n2 takes a sum that is not followed")


class PreNormed(nn.Module):
    """A sum goes into a Sequential that begins with a norm."""

    def __init__(self):
        super().__init__()
        self.mlp = nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH))

    def forward(self, x):
        mlp = lambda h: self.mlp(h)  # noqa: E731
        x = x + x.tanh()
        return x + mlp(x)


def test_a_norm_that_leads_a_sequential_is_a_loss():
    row = row_of(tilesmith.optimize(PreNormed()))
    assert row.wanted and row.reason == "mlp.0 takes a sum that is not followed: x = x + x.tanh()"


class Stack(nn.Module):
    """Layers in lists, whose norms stand in modules of their own."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.ModuleList([PreNormed(), Difference()]) for _ in range(4))
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, x):
        for first, second in self.layers:
            x = first(x) - x
            x = second(x) + x
        return self.norm(x)


def test_many_norms_of_one_sum_are_told_together():
    row = rows_of(tilesmith.optimize(Stack()))["", "add_norm"]
    assert row.wanted and row.reason == "norm takes a sum that is not followed: x = second(x) + x"
    row = rows_of(tilesmith.optimize(Deep()))["", "add_norm"]
    assert row.reason == "n2, layers.1.0 and 7 more take a sum that is not followed: x = x + layer(x)"


class Deep(Difference):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.LayerNorm(WIDTH), nn.Tanh()) for _ in range(9))

    def forward(self, x):
        for layer in self.layers:
            x = x + layer(x)
        return self.mlp(self.n2(x))
