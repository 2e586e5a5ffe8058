"""Biases of linear layers: their gradients summed by our op.

The product, and what autograd does for it, stay PyTorch's, to the bit: only the bias leaves it. Its gradient is the sum
over rows of that of the layer's output.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tilesmith import ops
from tilesmith.engine import torch_private
from tilesmith.engine.arguments import dtype_name
from tilesmith.engine.choice import pinned
from tilesmith.models.reach import ran, reaches
from tilesmith.rewrite import Form, Replace, Rule, Site, Skip, Unlike, forms, original_class, probe

_OP = "column_sums"
LEAST = 2**22
"""Elements of an output from which the op is called. It costs the host more than PyTorch's own sum; below, a step on a
GPU waits for the host. H200: 4,096 x 1,024 in 10.5 µs, PyTorch 17.9; 512 x 1,024 in 8.9, PyTorch 22.5."""
MOST = 16_384
"""Columns up to which. H200: 16,384 x 4,096 in 39.3 µs, PyTorch 50.8; 8,192 x 50,304 in 211.6, PyTorch 203.0."""


_PLAIN = (nn.Parameter, Tensor)


class _BiasGradient(torch.autograd.Function):
    """An output that the bias is in already; the gradient of the bias is summed from the output's."""

    @staticmethod
    def forward(ctx: Any, y: Tensor, bias: Tensor, module: nn.Module) -> Tensor:
        ctx.module, ctx.dtype = module, dtype_name(bias.dtype)
        return y.data  # the same memory, but no view of y: autograd would let nobody write to one

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, Tensor | None, None]:
        dbias = None
        if ctx.needs_input_grad[1]:
            ran(ctx.module, _OP)
            dbias = ops.column_sums(dy, ctx.dtype)
        return dy, dbias, None


# Function.apply would first look for wrappers of torch.func, of which there are none where the layer is served
_apply = super(torch.autograd.Function, _BiasGradient).apply


def served(module: nn.Module, x: Tensor) -> bool:
    """Whether the gradient of this call's bias is worth the op. Compiled code has its own sum, and other kinds of
    tensors (DTensors, those of torch.func, fake ones) their own ways."""
    if torch.compiler.is_compiling() or not torch.is_grad_enabled() or type(x) is not Tensor or not x.ndim:
        return False
    parameters = module._parameters  # a replica of DataParallel has none
    weight, bias = parameters.get("weight"), parameters.get("bias")
    if type(weight) not in _PLAIN or type(bias) not in _PLAIN or not bias.requires_grad:
        return False
    outputs = bias.shape[0]
    if (outputs > MOST or x.numel() * outputs < LEAST * x.shape[-1]) and not pinned(_OP):
        return False
    return reaches(_OP, x) and torch_private.functorch() is None


def product(module: nn.Module, x: Tensor, bias: Tensor, turned: bool) -> Tensor:
    """What the layer computes, with this bias."""
    weight = module._parameters["weight"]
    if not turned:
        return F.linear(x, weight, bias)
    y = torch.addmm(bias, x.view(-1, x.shape[-1]), weight)
    return y.view(*x.shape[:-1], y.shape[-1])


def summed(module: nn.Module, x: Tensor, turned: bool) -> Tensor:
    """What the layer computes; the gradient of its bias by the op."""
    bias = module._parameters["bias"]
    return _apply(product(module, x, bias.detach(), turned), bias, module)


@dataclass(frozen=True)
class BiasForm(Form):
    """The same layer. turned: its weight is [in, out]."""

    turned: bool

    def namespace(self, base: type) -> dict[str, Any]:
        before, turned = base.forward, self.turned
        if turned:

            def forward(self: nn.Module, x: Tensor) -> Tensor:
                return summed(self, x, turned) if served(self, x) else before(self, x)

        else:

            def forward(self: nn.Module, input: Tensor) -> Tensor:
                return summed(self, input, turned) if served(self, input) else before(self, input)

        return {"forward": forward}


class BiasRule(Rule):
    """Linear layers with a bias that trains: torch's own under any name, and those with a transposed weight."""

    name = "bias"

    def __init__(self) -> None:
        self._verdicts = probe.Verdicts()

    def match(self, site: Site) -> Replace | Skip | None:
        module, cls = site.module, original_class(type(site.module))
        bias, weight = (module._parameters.get(name) for name in ("bias", "weight"))
        if bias is None or weight is None or bias.ndim != 1 or weight.ndim != 2 or not weight.is_floating_point():
            return None
        others = [form for form in forms(module) if not isinstance(form, BiasForm)]
        if others or next(module.children(), None) is not None or module._buffers:
            return None
        if cls.forward is nn.Linear.forward:
            form = BiasForm(turned=False)
        elif isinstance(module, nn.Linear):
            return Skip(
                f"{cls.__module__.partition('.')[0]}'s {cls.__name__} has a forward of its own",
                wanted=False,
                quiet=True,
            )
        else:
            try:
                form = self._verdicts.of(module, lambda: _recognised(module))
            except Unlike:
                return None
        if isinstance(next(site.holders(), None), nn.MultiheadAttention):
            return Skip(
                "nn.MultiheadAttention computes with its parameters and does not call it", wanted=False, quiet=True
            )
        if bias.shape[0] > MOST:
            return Skip(
                f"it has more than {MOST:,} outputs, of which PyTorch's sum is as fast", wanted=False, quiet=True
            )
        if not bias.requires_grad:
            return Skip("its bias is frozen and has no gradient", wanted=False, quiet=True)
        return Replace(form, (_OP,), f"the bias's gradient: the sum over rows of outputs of {LEAST:,} elements or more")


def _recognised(module: nn.Module) -> BiasForm:
    """The form of a layer that computes x · weight + bias. Raises `Unlike`."""
    probe.only_input(original_class(type(module)))
    features, outputs = min(8, module.weight.shape[0]), module.weight.shape[1]
    if module.bias.shape[0] != outputs:
        raise Unlike("its bias is not as long as its outputs")
    weight, bias = probe.wave(features, outputs), probe.wave(outputs, phase=0.5)
    x = probe.wave(2, 3, features, phase=1.0)
    found = probe.call(probe.shell(module, {"weight": weight, "bias": bias}).forward, x)
    if probe.disagreement(found, x @ weight + bias) > 1e-5:
        raise Unlike("it computes something else")
    return BiasForm(turned=True)
