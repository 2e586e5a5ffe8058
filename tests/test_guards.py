"""What a compiled model looks up at each call: not this library's names, and of what it swapped no more than before."""

import pytest
import torch
import torch._dynamo.guards
from torch import nn
from torch._dynamo.utils import counters

import tilesmith
from optimize_models import build, ops_everywhere  # noqa: F401
from tilesmith import ops
from tilesmith.nn import norm

pytest.importorskip("transformers")


@pytest.fixture(autouse=True)
def fresh(monkeypatch):
    monkeypatch.setitem(norm._CASTERS, "exist", False)  # as before the first conversion to FP8 of this process
    torch._dynamo.reset()


def _managers(manager, found):
    """What is looked at at a call: where the dicts of a module are the very ones of before, Dynamo looks no deeper."""
    if manager is None:
        return found
    found.append(manager)
    if not manager.is_tag_safe_root():
        pairs = manager.get_key_value_managers().values() if hasattr(manager, "get_key_value_managers") else ()
        for below in (*(m for pair in pairs for m in pair), *manager.get_child_managers()):
            _managers(below, found)
    return found


@pytest.fixture
def guarded(monkeypatch):
    """The function (call) -> what holds the guards that are looked at, of the one graph that `call` compiles."""

    def of(call):
        seen = []
        monkeypatch.setattr(torch._dynamo.guards, "guard_manager_testing_hook_fn", lambda made, *_: seen.append(made))
        call()
        (made,) = seen
        return _managers(made.root, [])

    return of


def _compiled(family, layers, optimized):
    model, ids = build(family, layers, attention="sdpa"), torch.arange(1, 9)[None]
    compiled = torch.compile(tilesmith.optimize(model) if optimized else model, backend="eager", fullgraph=True)
    return lambda: compiled(input_ids=ids, labels=ids)


def _asked(managers):
    """`hasattr` of modules, which runs Python and raises where there is none."""
    modules = [m for m in managers if issubclass(m.get_type_of_guarded_value(), nn.Module)]
    return [part for m in modules for g in m.get_leaf_guards() for part in g.verbose_code_parts() if "hasattr" in part]


@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_an_optimized_model_is_guarded_as_the_plain_one_is(family, guarded):
    counts = {}
    for layers in (1, 3):
        plain, optimized = (guarded(_compiled(family, layers, o)) for o in (False, True))
        assert not [m for m in optimized if m.get_source().startswith("G['__import_tilesmith")]
        assert len(_asked(optimized)) <= len(_asked(plain))
        counts[layers] = [
            len(managers) + sum(len(m.get_leaf_guards()) for m in managers) for managers in (plain, optimized)
        ]
    each = [(three - one) / 2 for one, three in zip(counts[1], counts[3])]
    assert each[1] <= each[0] + 12  # the class of a swapped module is one deeper, where names are looked for
    assert counts[3][1] <= 1.1 * counts[3][0]


def test_what_a_caller_holds_is_guarded():
    mask, eager = [ops.Mask(causal=True)], torch.compiler.disable(ops.attention)
    compiled = torch.compile(lambda q: ops.attention(q, q, q, mask[0])[0], backend="eager", fullgraph=True)
    q = torch.randn(1, 1, 8, 16)
    for other in (ops.Mask(causal=True), ops.Mask(window=(2, 0)), ops.Mask(causal=True, window=(3, 0)), ops.Mask()):
        mask[0] = other
        torch.testing.assert_close(compiled(q), eager(q, q, q, other)[0])


def test_what_a_swapped_module_holds_is_guarded():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm, self.other = nn.RMSNorm(16, eps=1e-6), nn.RMSNorm(16, eps=0.5)

        def forward(self, x, y):
            return self.norm(x + y)

    model, (x, y) = tilesmith.optimize(Model()), torch.randn(2, 4, 16)
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    torch.testing.assert_close(compiled(x, y), model(x, y))
    counters.clear()
    model.norm.eps = 0.25
    torch.testing.assert_close(compiled(x, y), model(x, y))
    model.norm = model.other
    torch.testing.assert_close(compiled(x, y), model(x, y))
    model.norm.weight = None
    torch.testing.assert_close(compiled(x, y), model(x, y))
    tilesmith.undo(model)
    torch.testing.assert_close(compiled(x, y), model(x, y))
    assert counters["stats"]["unique_graphs"] == 4
