"""Sums that go into norms, in the ways that people write them: fused to the same numbers, or told why not."""

from __future__ import annotations

import copy
import re

import pytest
import torch
from torch import nn

import tilesmith
from optimize_models import (
    assert_within_budget,
    ops_everywhere,  # noqa: F401
)

WIDTH = 8


class Block(nn.Module):
    """What the ways to write a block share; `extra` is one more thing that some of them call."""

    def __init__(self, norm=nn.LayerNorm):
        super().__init__()
        self.n1, self.n2 = norm(WIDTH), norm(WIDTH)
        self.attn, self.f = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.drop = nn.Dropout(0.0)
        self.extra = nn.ReLU(inplace=True)


class Rebound(Block):
    def forward(self, x):
        x = x + self.attn(self.n1(x))
        x = x + self.f(self.n2(x))
        return x  # noqa: RET504


class Nested(Block):
    def forward(self, x):
        h = x + self.attn(self.n1(x))
        return h + self.f(self.n2(h))


class Stepwise(Block):
    def forward(self, x):
        h = x + self.attn(self.n1(x))
        y = self.n2(h)
        return h + self.f(y)


class OneExpression(Block):
    def forward(self, x):
        return self.f(self.n2(x + self.attn(self.n1(x))))


class WithDropout(Block):
    def forward(self, x, mask=None):
        x = x + self.drop(self.attn(self.n1(x)))
        if mask is not None:
            shift = mask * 2
        else:
            shift = 0
        return x + self.drop(self.f(self.n2(x)) + shift)


class Functional(Block):
    def forward(self, x):
        x = torch.add(x, self.attn(self.n1(x)))
        return x.add(self.f(self.n2(x)))


class Annotated(Block):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h: torch.Tensor = x + self.attn(self.n1(x))
        residual = h
        width = h.shape[-1]
        out = self.f(self.n2(h)) / width * width
        return residual + out


class PartlyInPlace(Block):
    def forward(self, x):
        x = x + self.attn(self.n1(x))
        x += self.f(self.n2(x))
        return x


class InSequential(nn.Module):
    def __init__(self, norm=nn.LayerNorm):
        super().__init__()
        self.mix = nn.Sequential(norm(WIDTH), nn.Linear(WIDTH, WIDTH))
        self.ff = nn.Sequential(norm(WIDTH), nn.Linear(WIDTH, 16), nn.GELU(), nn.Linear(16, WIDTH))

    def forward(self, x):
        x = x + self.mix(x)
        return x + self.ff(x)


class InPlace(Block):
    def forward(self, x):
        x += self.attn(self.n1(x))
        x += self.f(self.n2(x))
        return x


class Changed(Block):
    def forward(self, x):
        h = x + self.attn(self.n1(x))
        y = self.extra(h)
        return y + self.f(self.n2(h))


class Conditional(Block):
    def forward(self, x):
        h = x + self.attn(self.n1(x))
        return h + (self.f(self.n2(h)) if self.training else h)


class Branching(Block):
    def forward(self, x, twice=False):
        h = x + self.attn(self.n1(x))
        if twice:
            h = self.f(self.n2(h)) * 2
        return h


class Apart(nn.Module):
    """The norm stands in a module of its own."""

    def __init__(self, norm=nn.LayerNorm):
        super().__init__()
        self.norm, self.f = norm(WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        return self.f(self.norm(x))


FUSED = [Rebound, Nested, Stepwise, OneExpression, WithDropout, Functional, Annotated, InSequential]
KEPT = {
    PartlyInPlace: r"n2 takes a sum that is written in place \(x \+= \.\.\.\)",
    InPlace: r"n2 takes a sum that is written in place \(x \+= \.\.\.\)",
    Changed: r"n2 takes the sum h only after self.extra\(h\), which might change it",
    Conditional: "n2 takes the sum h only under a condition",
    Branching: "the sum h goes into a norm only inside a statement of the kind 'if'",
    Apart: "no sum of its forward goes into a norm",
}


def _row(model):
    (row,) = [row for row in model.tilesmith_report.rows if row.rule == "add_norm"]
    return row


def _gradients(model, x, *more):
    x = x.clone().requires_grad_()
    model.zero_grad()
    y = model(x.clone(), *more)
    y.square().sum().backward()
    return [y.detach(), x.grad, *(p.grad for p in model.parameters())]


@pytest.mark.parametrize("norm", [nn.LayerNorm, nn.RMSNorm])
@pytest.mark.parametrize("cls", FUSED)
def test_sums_are_fused_however_they_are_written(cls, norm):
    torch.manual_seed(0)
    plain = cls(norm)
    model, x = tilesmith.optimize(copy.deepcopy(plain)), torch.randn(3, WIDTH)
    assert _row(model).action == "replaced"
    found, wanted = _gradients(model, x), _gradients(plain, x)
    assert model.tilesmith_report.calls()["add_layer_norm" if norm is nn.LayerNorm else "add_rms_norm"] == 1
    exact = _gradients(copy.deepcopy(plain).double(), x.double())
    assert_within_budget(*((y.square().sum(), y, dict(enumerate(g))) for y, *g in (found, wanted, exact)))
    tilesmith.undo(model)
    assert torch.equal(model(x.clone()), plain(x.clone()))


@pytest.mark.parametrize("cls", KEPT)
def test_sums_that_stay_say_why(cls):
    torch.manual_seed(0)
    plain = cls()
    model, x = tilesmith.optimize(copy.deepcopy(plain), only=["norm", "add_norm"]), torch.randn(3, WIDTH)
    row = _row(model)
    assert row.action == "skipped"
    assert re.search(KEPT[cls], row.reason), row.reason
    assert row.wanted is (cls is not Apart)
    torch.testing.assert_close(model(x.clone()), plain(x.clone()))


def test_hooks_on_a_sequential_see_what_they_saw():
    model, seen = tilesmith.optimize(InSequential()), []
    model.ff.register_forward_hook(lambda module, args, out: seen.append(args[0].shape))
    model(torch.randn(3, WIDTH))
    assert seen == [(3, WIDTH)] and model.tilesmith_report.calls()["add_layer_norm"] == 0


def test_arguments_are_handed_on():
    torch.manual_seed(0)
    plain, x, mask = WithDropout(), torch.randn(3, WIDTH), torch.ones(WIDTH)
    model = tilesmith.optimize(copy.deepcopy(plain))
    torch.testing.assert_close(model(x, mask), plain(x, mask))
    torch.testing.assert_close(model(x, mask=mask), plain(x, mask=mask))


def test_fused_blocks_compile():
    model, x = tilesmith.optimize(nn.Sequential(Nested(), InSequential())), torch.randn(3, WIDTH)
    compiled = torch.compile(model, fullgraph=True, backend="eager")
    torch.testing.assert_close(compiled(x), model(x))
