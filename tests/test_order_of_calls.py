"""Random orders of what users do to a model around `optimize`: after each step it computes as a plain twin that went
through the same steps, and `undo` gives back what the twin is, to the bit.

A failure prints its steps; the same number draws them again.
"""

from __future__ import annotations

import copy
import random

import pytest
import torch
from torch import nn

import tilesmith
from optimize_models import batch, build, ops_everywhere, train  # noqa: F401
from tilesmith.attention.fusion import create_unified_attention_fusion
from tilesmith.models.optimization import RULES
from tilesmith.rewrite import forms

NAMES = sorted({rule.name for rule in RULES})


class Pair:
    """A model and its plain twin. What users do is done to both, what the library does to the model alone."""

    def __init__(self, family: str, seed: int):
        self.random = random.Random(seed)
        self.model, self.twin = build(family, layers=2), build(family, layers=2)
        self.adapted = self.kept = False

    def both(self, change):
        """Draws the same random numbers for both."""
        torch.manual_seed(2)
        made = change(self.model)
        torch.manual_seed(2)
        return made, change(self.twin)

    def part(self, wanted):
        """The name of some module of both models."""
        return self.random.choice([name for name, module in self.twin.named_modules() if name and wanted(name, module)])

    # what the library does ------------------------------------------------------------------------------------------

    def optimize(self):
        only = self.random.choice([None, None, self.random.sample(NAMES, 4)])
        tilesmith.optimize(self.model, only=only)
        return f"only={only}"

    def fuse(self):
        level = self.random.choice(["conservative", "balanced", "aggressive"])
        try:
            create_unified_attention_fusion(self.model, "full_block", level)
        except ValueError as nothing:  # fused otherwise, or a level without effect: the model stays as it was
            return f"{level}: {nothing}"[:80]
        return level

    def undo(self):
        tilesmith.undo(self.model)
        twins = dict(self.twin.named_modules())
        for name, module in self.model.named_modules():
            assert type(module) is type(twins[name]) and not forms(module), name
            assert vars(module).keys() == vars(twins[name]).keys(), name
        self.compare(exact=not self.kept)  # a forward that was kept is still the one of the replaced module

    # what users do --------------------------------------------------------------------------------------------------

    def copy(self):
        self.model, self.twin = self.both(copy.deepcopy)

    def load(self):
        """State dicts go either way."""
        self.twin.load_state_dict(self.model.state_dict())
        self.model.load_state_dict(self.twin.state_dict())

    def adapt(self):
        peft = pytest.importorskip("peft")
        config = peft.LoraConfig(r=2, target_modules="all-linear", init_lora_weights=False)
        if self.adapted:
            self.model, self.twin = self.both(lambda model: model.merge_and_unload())
        else:
            self.model, self.twin = self.both(lambda model: peft.get_peft_model(model, config).train())
        self.adapted = not self.adapted

    def checkpoint(self):
        on = self.random.random() < 0.6
        args = [{"use_reentrant": False}] if on else []
        name = f"gradient_checkpointing_{'enable' if on else 'disable'}"
        self.both(lambda model: getattr(model, name)(*args))
        return str(on)

    def hook(self):
        name = self.part(lambda _, module: not isinstance(module, nn.ModuleList | nn.ModuleDict))
        self.both(lambda model: model.get_submodule(name).register_forward_hook(_more))
        return name

    def replace_activation(self):
        name = self.part(lambda name, _: name.rpartition(".")[2] in ("act_fn", "act", "intermediate_act_fn"))
        holder, _, last = name.rpartition(".")
        self.both(lambda model: setattr(model.get_submodule(holder), last, nn.Tanh()))
        return name

    def replace_forward(self):
        name = self.part(lambda _, module: isinstance(module, nn.Linear))

        def change(model):
            layer = model.get_submodule(name)
            before = layer.forward
            layer.forward = lambda *args: before(*args) * 1.5

        self.both(change)
        self.kept = True
        return name

    def step(self):
        """One step of an optimizer made before; then the twin has the same values, to the bit."""
        optimizers = self.both(lambda model: torch.optim.SGD(model.parameters(), lr=0.01))
        self.compare()
        for optimizer in optimizers:
            optimizer.step()
        self.twin.load_state_dict(self.model.state_dict())

    # what has to hold -----------------------------------------------------------------------------------------------

    def compare(self, exact=False):
        bounds = {"rtol": 0, "atol": 0} if exact else {"rtol": 1e-3, "atol": 1e-5}
        inputs = batch("llama", padded=self.random.choice(["right", None]))
        for found, wanted in zip(train(self.model, inputs), train(self.twin, inputs), strict=True):
            torch.testing.assert_close(found, wanted, **bounds)
        assert list(self.model.state_dict()) == list(self.twin.state_dict())
        names = dict(self.model.named_modules())
        report = getattr(self.model, "tilesmith_report", None)
        if not self.adapted and report is not None:
            assert str(report) and all(row.fqn in names for row in report.rows)


def _more(module, given, made):
    return made * 1.25 if isinstance(made, torch.Tensor) and made.is_floating_point() else None


STEPS = (
    *(Pair.optimize, Pair.optimize, Pair.fuse, Pair.undo, Pair.copy, Pair.load, Pair.adapt, Pair.checkpoint),
    *(Pair.hook, Pair.replace_activation, Pair.replace_forward, Pair.step),
)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("family", ["llama", "gpt2", "bert", "qwen3_moe"])
def test_any_order_computes_what_a_plain_model_does(family, seed):
    pair, done = Pair(family, seed), []
    for _ in range(6):
        step = pair.random.choice(STEPS)
        done.append(step.__name__)
        try:
            done[-1] += f" {step(pair) or ''}"
            pair.compare()
        except Exception as problem:
            raise AssertionError(f"{family} {seed}: {'; '.join(done)}") from problem
    pair.undo()
