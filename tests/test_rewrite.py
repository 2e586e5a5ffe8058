"""The rewrite mechanism by itself: swapping classes, respelling functions, probing, reporting."""

import ast
import copy
import functools
import json
import pickle
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import nn

import tilesmith
from tilesmith import rewrite
from tilesmith.rewrite import probe
from tilesmith.rewrite.report import Report, Row
from tilesmith.rewrite.variants import obstacle

FACTOR = 2.0


class Scale(nn.Linear):
    """A layer to swap."""

    def __init__(self):
        super().__init__(3, 3)
        self.note = "kept"


class Holder(nn.Module):
    """Two layers of one class under a container."""

    def __init__(self):
        super().__init__()
        self.first, self.second = Scale(), Scale()

    def forward(self, x):
        """Both layers, one after the other."""
        return self.second(self.first(x))


@dataclass(frozen=True)
class Negated(rewrite.Form):
    """Minus what the class computes."""

    by: float = -1.0

    def namespace(self, base: type) -> dict[str, Any]:
        def forward(self: nn.Module, x: torch.Tensor) -> torch.Tensor:
            return base.forward(self, x) * self._tilesmith_form.by

        return {"forward": forward}


class NegateScales(rewrite.Rule):
    """Negates `Scale` layers; refuses those whose note says so."""

    name = "negate"

    def match(self, site):
        if not isinstance(site.module, Scale):
            return None
        if site.module.note == "never":
            return rewrite.Skip("its note says never")
        return rewrite.Replace(Negated(), ("neg",), "it is a Scale")


def test_swap_changes_nothing_but_the_class():
    layer, x = Scale(), torch.randn(2, 3)
    before, state, y = dict(layer.__dict__), layer.state_dict(), layer(x)
    rewrite.swap(layer, Negated())
    assert torch.equal(layer(x), -y)
    assert layer.__dict__ == before and list(layer.state_dict()) == list(state)
    assert isinstance(layer, Scale) and type(layer) is not Scale
    assert (type(layer).__name__, type(layer).__module__) == (Scale.__name__, Scale.__module__)
    assert str(type(layer)) == str(Scale)
    assert rewrite.unswap(layer) and type(layer) is Scale and torch.equal(layer(x), y)
    assert not rewrite.unswap(layer)


@pytest.mark.parametrize("again", [copy.copy, copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))])
def test_swapped_instances_copy_and_pickle(again):
    layer, x = Scale(), torch.randn(2, 3)
    y = layer(x)
    rewrite.swap(layer, Negated())
    rewrite.swap(layer, Negated(by=3.0))
    twin = again(layer)
    assert type(twin) is type(layer) and twin.note == "kept"
    assert torch.equal(twin(x), layer(x))
    rewrite.undo(twin)
    assert type(twin) is Scale and torch.equal(twin(x), y)
    assert type(layer) is not Scale


def test_swapped_instances_compile_without_graph_breaks():
    model, x = Holder(), torch.randn(2, 3)
    rewrite.swap(model.first, Negated())
    compiled = torch.compile(model, fullgraph=True, backend="eager")
    assert torch.equal(compiled(x), model(x))
    rewrite.undo(model)
    assert torch.equal(compiled(x), model(x))


def test_what_cannot_be_swapped_says_why():
    patched = Scale()
    patched.forward = functools.partial(Scale.forward, patched)

    class Pickled(nn.Module):
        def __reduce__(self):
            return (Pickled, ())

    parametrized = nn.utils.parametrizations.weight_norm(nn.Linear(2, 2))
    assert "replaced on the instance" in obstacle(patched)
    assert "own pickling" in obstacle(Pickled())
    assert "parametrized" in obstacle(parametrized)
    assert obstacle(Scale()) is None


def test_a_class_put_on_top_stops_undo():
    layer = Scale()
    rewrite.swap(layer, Negated())
    layer.__class__ = type("OnTop", (type(layer),), {})
    assert rewrite.forms(layer) == [Negated()]
    model = nn.Sequential(Scale(), layer)
    rewrite.swap(model[0], Negated())
    with pytest.raises(RuntimeError, match="1 was given another class .*OnTop"):
        rewrite.undo(model)
    assert rewrite.forms(model[0]) == [Negated()]


# Rules over a model ---------------------------------------------------------------------------------------------------


def test_rewrite_reports_every_module():
    model = Holder()
    model.second.note = "never"
    report = rewrite.rewrite(model, [NegateScales()])
    assert [(row.fqn, row.action, row.reason) for row in report.rows] == [
        ("first", "replaced", "it is a Scale"),
        ("second", "skipped", "its note says never"),
    ]
    assert [row.fqn for row in report.replaced] == ["first"] and [row.fqn for row in report.skipped] == ["second"]
    again = rewrite.rewrite(model, [NegateScales()])
    assert again == report and rewrite.forms(model.first) == [Negated()]


def test_strict_leaves_the_model_as_it_was():
    model = Holder()
    model.second.note = "never"
    with pytest.raises(rewrite.RewriteError, match="second \\(Scale\\), negate: its note says never"):
        rewrite.rewrite(model, [NegateScales()], strict=True)
    assert type(model.first) is Scale


def test_a_failing_rule_leaves_the_model_as_it_was():
    class Broken(rewrite.Rule):
        name = "broken"

        def match(self, site):
            raise KeyError("broken rule")

    model = Holder()
    with pytest.raises(KeyError):
        rewrite.rewrite(model, [NegateScales(), Broken()])
    assert type(model.first) is Scale and type(model.second) is Scale


@pytest.mark.parametrize("compiled", [torch.jit.script, lambda module: torch.jit.trace(module, torch.ones(2, 8))])
def test_what_torchscript_compiled_stays(compiled):
    part = compiled(nn.Sequential(nn.Linear(8, 8), nn.RMSNorm(8)))
    model = tilesmith.optimize(nn.Sequential(part, nn.RMSNorm(8)))
    assert [row.fqn for row in model.tilesmith_report.replaced] == ["1"]
    assert "RMSNorm (TorchScript)" in str(model.tilesmith_report)
    assert "0 replaced" in str(tilesmith.optimize(part).tilesmith_report)
    assert tilesmith.undo(model)(torch.ones(2, 8)).shape == (2, 8)


def test_excluded_modules_stay():
    model = Holder()
    report = rewrite.rewrite(model, [NegateScales()], strict=True, excluded=lambda rule, fqn: fqn == "second")
    assert type(model.second) is Scale and type(model.first) is not Scale
    assert report.skipped[0].reason == "excluded by the caller"


def test_report_in_all_its_forms():
    rows = [Row(f"layers.{i}.norm", "Norm", "norm", "replaced", ("rms_norm",), "a <norm>") for i in range(3)]
    report = Report((*rows, Row("", "Model", "loss", "skipped", (), "no head")))
    text = str(report)
    assert (
        "3 replaced, 0 could not be replaced, 1 left as is, 0 have no rule" in text
        and "norm:       rms_norm in Norm ×3" in text
    )
    assert "loss: the model (Model): no head" in text and "layers.*.norm ×3 (Norm)  norm: replaced by" in report.full()
    assert "a &lt;norm&gt;" in report._repr_html_()
    assert json.loads(report.to_json())[0]["fqn"] == "layers.0.norm"
    assert pickle.loads(pickle.dumps(report)) == report


# Respelling -----------------------------------------------------------------------------------------------------------


def scale_by_global(x, times=1):
    """A function of this module."""
    return double(x) * times * FACTOR


def double(x):
    """What `scale_by_global` calls."""
    return 2 * x


def test_respell_binds_a_name_and_keeps_the_globals_live(monkeypatch):
    made = rewrite.respell(scale_by_global, {"double": lambda x: 5 * x})
    assert made(1.0) == 10.0 and made(1.0, times=2) == 20.0 and scale_by_global(1.0) == 4.0
    monkeypatch.setitem(globals(), "FACTOR", 3.0)
    assert made(1.0) == 15.0
    assert made.__globals__ is globals() and made.__doc__ == scale_by_global.__doc__
    assert made.__code__.co_firstlineno == scale_by_global.__code__.co_firstlineno


def test_respell_edits_a_tree_and_keeps_closures_and_super():
    offset = 7

    class Child(Holder):
        def forward(self, x):
            return super().forward(x) + offset

    def to_minus(tree):
        for node in ast.walk(tree):
            if isinstance(node, ast.BinOp):
                node.op = ast.Sub()

    child, x = Child(), torch.randn(2, 3)
    made = rewrite.respell(Child.forward, {}, to_minus)
    assert torch.equal(made(child, x), Holder.forward(child, x) - 7)


def test_respell_refuses_what_it_cannot_respell():
    source = "def f(x):\n    return x + 1\n"
    scope: dict[str, Any] = {}
    exec(source, scope)
    with pytest.raises(rewrite.CannotRespell, match="cannot be read"):
        rewrite.respell(scope["f"], {})
    with pytest.raises(rewrite.CannotRespell, match="local name"):
        rewrite.respell(scale_by_global, {"x": 1})

    class Mangled:
        def forward(self):
            return self.__secret

    with pytest.raises(rewrite.CannotRespell, match="mangles"):
        rewrite.respell(Mangled.forward, {})


def test_respell_refuses_source_that_is_not_what_runs(tmp_path):
    file = tmp_path / "drifting.py"
    file.write_text("def f(x):\n    return x + 1\n")
    scope: dict[str, Any] = {}
    exec(compile(file.read_text(), str(file), "exec"), scope)
    assert rewrite.respell(scope["f"], {})(1) == 2
    file.write_text("def f(x):\n    return x + 2 * x\n")
    with pytest.raises(rewrite.CannotRespell, match="not what runs"):
        rewrite.respell(scope["f"], {})


def logged(function):
    """A decorator like those of model libraries."""

    @functools.wraps(function)
    def wrapper(self, x):
        self.calls = getattr(self, "calls", 0) + 1
        return function(self, x)

    return wrapper


class Decorated(nn.Module):
    """Its forward is decorated."""

    @logged
    def forward(self, x):
        """Calls a global function."""
        return double(x)


class Wrapping(nn.Module):
    """Puts a wrapper round the forward of every subclass."""

    def __init_subclass__(cls, **kwargs):
        super().__init_subclass__(**kwargs)
        inner = cls.forward

        @functools.wraps(inner)
        def forward(self, x):
            return inner(self, x) + 1 if type(self).forward is forward else inner(self, x)

        cls.forward = forward


class Wrapped(Wrapping):
    """One of those subclasses."""

    def forward(self, x):
        """Calls a global function."""
        return double(x)


def test_respelled_forward_keeps_decorators():
    module = Decorated()
    made = rewrite.respelled_forward(Decorated, {"double": lambda x: 10 * x})
    assert made(module, 1) == 10 and module.calls == 1 and module(1) == 2


def test_respelled_forward_leaves_out_the_wrapper_of_a_base_class():
    made = rewrite.respelled_forward(Wrapped, {"double": lambda x: 10 * x})
    child = type("Child", (Wrapped,), {"forward": made})
    assert Wrapped()(1) == 3 and child()(1) == 11


# Probing --------------------------------------------------------------------------------------------------------------


def test_probes_copy_no_weights_and_draw_no_random_numbers():
    state = torch.get_rng_state()
    layer = probe.linear(4, 5, torch.float32, scale=1.0, phase=0.0)
    assert layer(torch.ones(5)).shape == (4,) and not layer.weight.requires_grad
    with torch.device("meta"):
        holder = Holder()
    holder.first.register_forward_hook(lambda *_: pytest.fail("a hook ran in a probe"))
    twin = probe.shell(holder, children={"first": layer})
    with pytest.raises(rewrite.Unlike, match="its child second"):
        probe.call(twin.forward, torch.ones(5))
    assert twin.first is layer and holder.first.weight.is_meta
    assert torch.equal(torch.get_rng_state(), state)


def test_probes_turn_foreign_errors_into_reasons():
    with pytest.raises(rewrite.Unlike, match="raised ZeroDivisionError"):
        probe.call(lambda: 1 / 0)
    with pytest.raises(rewrite.Unlike, match=r"takes \(query, key, value"):
        probe.only_input(nn.MultiheadAttention)


def test_verdicts_are_asked_once_per_kind():
    verdicts, asked = probe.Verdicts(), []

    def answer():
        asked.append(1)
        raise rewrite.Unlike("no")

    for layer in (Scale(), Scale()):
        with pytest.raises(rewrite.Unlike, match="no"):
            verdicts.of(layer, answer)
    assert len(asked) == 1
    other = Scale()
    other.note = "another"
    with pytest.raises(rewrite.Unlike):
        verdicts.of(other, answer)
    assert len(asked) == 2


def test_verdicts_tell_types_of_settings_apart():
    verdicts = probe.Verdicts()
    for mode in (True, 1, 1.0):
        layer = Scale()
        layer.mode = mode
        assert verdicts.of(layer, lambda: type(mode)) is type(mode)  # noqa: B023
