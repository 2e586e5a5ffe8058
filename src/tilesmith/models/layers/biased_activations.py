"""A linear layer whose output goes into GELU: the gradient of its bias is summed by the pass that differentiates GELU.

The forward computes what it did, to the bit. Where the bias would have its sum from `column_sums`, it now needs no pass
of its own. A module's source shows that nobody else gets the output of the layer.
"""

from __future__ import annotations

import ast
import inspect
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from tilesmith import ops
from tilesmith.models.layers.activations import ActivationForm
from tilesmith.models.layers.biases import BiasForm, product, served
from tilesmith.models.layers.residuals import AddNormForm
from tilesmith.models.layers.residuals_spelling import assignment
from tilesmith.models.reach import has_settings, observed, ran, reaches
from tilesmith.rewrite import (
    CannotRespell,
    Form,
    Replace,
    Rule,
    Site,
    Skip,
    flow,
    forms,
    original_class,
    parse,
    respelled_forward,
)
from tilesmith.rewrite.source import of_self

_OP = "bias_gelu_vjp"
_CALL = "_tilesmith_activated"
_APPROXIMATE = {"gelu": "none", "gelu (tanh)": "tanh"}


class _Gelu(torch.autograd.Function):
    """gelu of an output that the bias is in already."""

    @staticmethod
    def forward(ctx: Any, z: Tensor, bias: Tensor, approximate: str, holder: nn.Module) -> Tensor:
        ctx.save_for_backward(z)
        ctx.approximate, ctx.holder, ctx.dtype = approximate, holder, bias.dtype
        return ops.gelu(z, approximate)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, Tensor | None, None, None]:
        (z,) = ctx.saved_tensors
        ran(ctx.holder, _OP)
        wanted = list(ctx.needs_input_grad[:2])
        added = z.new_zeros(z.shape[-1], dtype=ctx.dtype)  # z has the bias already
        dz, dbias = ops.bias_gelu_vjp(dy, z, added, ctx.approximate, wanted)
        return dz if wanted[0] else None, dbias if wanted[1] else None, None, None


_apply = super(torch.autograd.Function, _Gelu).apply


def activated(holder: nn.Module, layer: nn.Module, activation: nn.Module, x: Tensor) -> Tensor:
    """activation(layer(x)), with one pass back where both are as `optimize` left them and nobody watches."""
    if torch.compiler.is_compiling() or not served(layer, x):
        return activation(layer(x))
    linear, function = _form(layer), _form(activation)
    fits = isinstance(linear, BiasForm) and isinstance(function, ActivationForm) and reaches(_OP, x)
    fits = fits and function.function in _APPROXIMATE and has_settings(activation, function.settings)
    if not fits or observed(layer) or observed(activation):
        return activation(layer(x))
    ran(activation, "gelu")
    bias = layer._parameters["bias"]
    return _apply(product(layer, x, bias.detach(), linear.turned), bias, _APPROXIMATE[function.function], holder)


def _form(module: nn.Module) -> Form | None:
    """The form of a module's own class; None below a class that another library put on top."""
    return forms(module)[0] if original_class(type(module)) is not type(module) else None


@dataclass(frozen=True)
class BiasedActivationForm(Form):
    """The same forward, with each activation right behind one of the layers in one call with it."""

    layers: tuple[str, ...]
    activations: tuple[str, ...]

    def namespace(self, base: type) -> dict[str, Any]:
        return {"forward": respelled_forward(base, {_CALL: activated}, _Joiner(self.layers, self.activations).visit)}


class BiasedActivationRule(Rule):
    """Modules whose forward hands the output of a linear layer of theirs to a GELU of theirs, and to nobody else."""

    name = "bias"

    def __init__(self) -> None:
        self._known: dict[tuple[type, tuple[str, ...], tuple[str, ...]], tuple[str, ...]] = {}

    def match(self, site: Site) -> Replace | Skip | None:
        children = list(site.module.named_children())
        layers = tuple(name for name, child in children if isinstance(_form(child), BiasForm))
        activations = tuple(name for name, child in children if _is_gelu(_form(child)))
        if not layers or not activations or isinstance(site.module, nn.Sequential):
            return None
        if any(not isinstance(form, AddNormForm | BiasedActivationForm) for form in forms(site.module)):
            return None  # its forward has another source
        key = original_class(type(site.module)), layers, activations
        if key not in self._known:
            self._known[key] = _joined(*key)
        if not self._known[key]:
            return None
        told = f"the gradient of the bias of {', '.join(self._known[key])} is summed in that of the gelu behind it"
        return Replace(BiasedActivationForm(layers, activations), (_OP,), told)


def _is_gelu(form: Form | None) -> bool:
    return isinstance(form, ActivationForm) and form.function in _APPROXIMATE


def _joined(cls: type, layers: tuple[str, ...], activations: tuple[str, ...]) -> tuple[str, ...]:
    """The layers of a class that go into an activation."""
    joiner = _Joiner(layers, activations)
    try:
        joiner.visit(parse(inspect.unwrap(cls.forward)))
        if joiner.joined:
            respelled_forward(cls, {})
    except CannotRespell:
        return ()
    return tuple(dict.fromkeys(joiner.joined))


class _Joiner(flow.BlockTransformer):
    """Rewrites `self.act(self.layer(x))`, and `h = self.layer(x)` right before `h = self.act(h)`. joined: the layers
    of both."""

    def __init__(self, layers: tuple[str, ...], activations: tuple[str, ...]):
        self.layers, self.activations = layers, activations
        self.joined: list[str] = []

    def visit_Call(self, node: ast.Call) -> ast.AST:
        if self._called(node, self.activations) and self._called(node.args[0], self.layers):
            return self.generic_visit(self._call(node, node.args[0]))
        return self.generic_visit(node)

    def block(self, block: list[ast.stmt]) -> list[ast.stmt]:
        made: list[ast.stmt] = []
        for statement in block:
            name, value = assignment(statement)
            before, layer = assignment(made[-1]) if made else (None, None)
            takes = self._called(value, self.activations) and isinstance(value.args[0], ast.Name)
            if takes and name == before == value.args[0].id and self._called(layer, self.layers):
                made.pop()
                statement.value = self._call(value, layer)
            made.append(statement)
        return made

    def _called(self, node: ast.AST | None, names: tuple[str, ...]) -> bool:
        """Whether this is `self.name(one argument)` of one of the names."""
        if not isinstance(node, ast.Call) or node.keywords or len(node.args) != 1:
            return False
        return of_self(node.func) in names and not isinstance(node.args[0], ast.Starred)

    def _call(self, activation: ast.Call, layer: ast.Call) -> ast.Call:
        self.joined.append(layer.func.attr)
        given = [ast.Name("self", ast.Load()), layer.func, activation.func, layer.args[0]]
        made = ast.Call(ast.Name(_CALL, ast.Load()), given, [])
        return ast.fix_missing_locations(ast.copy_location(made, activation))
