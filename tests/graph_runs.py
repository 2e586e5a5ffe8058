"""Recording on a CPU: recorders that repeat work in place of CUDA's graphs, and stacks of blocks to record."""

import pytest
import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from tilesmith.engine import torch_private
from tilesmith.models import compiling, graphs


class Recorder:
    """What recorders on a CPU have in common with CUDA's but `record`."""

    failing = ""  # why a recording fails

    def missing(self, device):
        return ""

    def busy(self):
        return False

    def warm(self, fn):
        return fn()

    def random_state(self, device):
        return torch.get_rng_state()

    def restore(self, device, state):
        torch.set_rng_state(state)

    def memory(self):
        return 0


class Repeater(Recorder):
    """Records by keeping the function: a replay runs it again and writes into what its first run returned."""

    def record(self, fn):
        if self.failing:
            raise RuntimeError(self.failing)
        first = fn()
        first = [None if t is None else t.clone() for t in first]

        def replay():
            with torch.no_grad():
                again = fn()
                for kept, made in zip(first, again, strict=True):
                    if kept is not None:
                        kept.copy_(made)

        return replay, first

    def memory(self):
        return 3 * 2**20


class _Tape(torch_private.DispatchMode):
    """The operators that run while it is on, and what they returned."""

    def __init__(self):
        super().__init__()
        self.steps = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        self.steps.append((func, args, kwargs or {}, out))
        return out


def _memory(value):
    return {t.untyped_storage().data_ptr() for t in tree_leaves(value) if isinstance(t, torch.Tensor)}


class Operators(Repeater):
    """Records by keeping the operators: a replay runs them again on the memory that they had, and none of the model's
    Python, as CUDA's replays do."""

    def record(self, fn):
        with _Tape() as tape:
            first = fn()

        def replay():
            with torch.no_grad():
                for func, args, kwargs, out in tape.steps:
                    if func._schema.is_mutable:
                        func(*args, **kwargs)
                    elif not _memory(out) <= _memory((args, kwargs)):  # else a view, which sees what it is of
                        for kept, made in zip(tree_leaves(out), tree_leaves(func(*args, **kwargs)), strict=True):
                            if isinstance(kept, torch.Tensor):
                                kept.copy_(made)

        return replay, first


@pytest.fixture(autouse=True)
def on_a_cpu(monkeypatch):
    """Blocks are recorded by a `Repeater`, and compiled by nobody."""
    monkeypatch.setattr(graphs, "RECORDER", Repeater)
    monkeypatch.setattr(compiling, "BACKEND", "eager")


class Block(nn.Module):
    def __init__(self, dropout=0.0):
        super().__init__()
        self.norm, self.linear, self.dropout = nn.LayerNorm(8), nn.Linear(8, 8), nn.Dropout(dropout)

    def forward(self, x, scale=None):
        y = self.linear(self.norm(x))
        return x + self.dropout(y if scale is None else y * scale)


class Stack(nn.Module):
    def __init__(self, dropout=0.0):
        super().__init__()
        self.blocks = nn.ModuleList(Block(dropout) for _ in range(3))

    def forward(self, x, scale=None):
        for block in self.blocks:
            x = block(x, scale)
        return x


def made_stack(**more):
    """The same each time."""
    torch.manual_seed(0)
    return Stack(**more)


def record_of(model):
    """What its report says of recordings."""
    return model.tilesmith_report.notes[-1]


def step_of(model, *inputs):
    """What a training step returns; its gradients stay."""
    out = model(*inputs)
    out.square().sum().backward()
    return out.detach().clone()


def gradients_of(model):
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def warmed_up(model, *inputs):
    """The model after the calls that record `inputs`, without gradients."""
    for _ in range(graphs.PLAIN_CALLS):
        step_of(model, *inputs)
    model.zero_grad()
    return model
