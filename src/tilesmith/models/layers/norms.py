"""Norms: RMSNorm in the roundings that are in use, and LayerNorm, each recognised by what it computes."""

from __future__ import annotations

import inspect
import itertools
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from tilesmith import ops
from tilesmith.engine.torch_private import autocasts, constant_in_graphs
from tilesmith.models.reach import ran, reaches
from tilesmith.nn.norm import CASTER, casting_child
from tilesmith.rewrite import Form, Replace, Rule, Site, Skip, Unlike, original_class, probe

# Another order of summation moves a few results across a rounding boundary; a form that rounds elsewhere, a fifth.
_SHARE_BF16 = 0.02
_DEVIATION_FP32 = 1e-5
_LARGEST_BY_HEAD = 256 * 512  # heads times head dim

_ROUNDED = {"fp32": "after that product", "llama": "before that product", "none": "after every operation"}

# What norms of torch that this rule is not for take together; those with buffers are no candidates.
_OTHER_DIMS: dict[str, tuple[type[nn.Module], ...]] = {
    "groups of channels": (nn.GroupNorm,),
    "neighbouring channels": (nn.LocalResponseNorm, nn.CrossMapLRN2d),
}


class Norm(NamedTuple):
    """A norm over the last dimension: what tells it from the others.

    `eps` names the attribute that holds it, or is the number itself, where the forward has it as a constant. Without
    either it is the machine epsilon of the dtype that the norm computes in ("computed": at least float32) or of its
    input ("input"), as in versions of `nn.RMSNorm`.
    """

    centred: bool
    eps: str | float | None
    eps_of: str = "computed"
    offset: float = 0.0
    casting: str = "fp32"

    def __str__(self) -> str:
        if self.centred:
            return f"LayerNorm times ({self.offset:g} + weight)" if self.offset else "LayerNorm"
        weight = f"({self.offset:g} + weight)" if self.offset else "weight"
        return f"RMSNorm times {weight}, rounded {_ROUNDED[self.casting]}"


@dataclass(frozen=True)
class NormForm(Form):
    """The norm by the op."""

    norm: Norm

    def namespace(self, base: type) -> dict[str, Any]:
        norm, op = self.norm, op_of(self.norm)

        def forward(self: nn.Module, *inputs: Tensor, **named: Tensor) -> Tensor:
            (x,) = inputs or tuple(named.values())
            if not servable(self, x, norm):
                return base.forward(self, x)
            ran(self, op)
            return normalised(self, x, norm)

        return {"forward": forward, "_tilesmith_norm": norm}


def norm_of(module: nn.Module) -> Norm | None:
    """The norm that `module` was swapped to, also when another library has put a class on top since."""
    return getattr(type(module), "_tilesmith_norm", None)


def is_norm(module: nn.Module, norm: Norm) -> bool:
    """Whether `norm` is the one that `module` was swapped to."""
    return _class_is(type(module), norm)


@constant_in_graphs
def _class_is(cls: type, norm: Norm) -> bool:
    return getattr(cls, "_tilesmith_norm", None) == norm


def op_of(norm: Norm) -> str:
    """The op that computes it."""
    return "layer_norm" if norm.centred else "rms_norm"


def servable(module: nn.Module, x: Tensor, norm: Norm, added: bool = False) -> bool:
    """Whether the op, or if `added` the one that adds a residual first, has a kernel where `x` is, and gives it the
    dtype that the module's own forward would."""
    if not reaches("add_" + op_of(norm) if added else op_of(norm), x):
        return False
    if by_head(module) and (added or x.ndim < 2 or x.shape[-2] != module.weight.shape[0]):
        return False
    if norm.centred:
        # Autocast runs LayerNorm in float32 whatever its input.
        return not (x.dtype is not torch.float32 and autocasts(x.device.type))
    weight = getattr(module, "weight", None)
    # The product of a rounded norm and a weight of another dtype is promoted; the op returns x's dtype.
    return norm.casting == "fp32" or weight is None or weight.dtype is x.dtype


def by_head(module: nn.Module) -> bool:
    """Whether the weight of a norm is [H, N], one for each head."""
    weight = getattr(module, "weight", None)
    return weight is not None and weight.ndim == 2


def _may_be_by_head(module: nn.Module) -> bool:
    """Whether it is worth a probe if a module with a matrix is a norm by head: linear layers have one, too."""
    ours = not original_class(type(module)).__module__.startswith("torch.nn.")
    return ours and by_head(module) and module.weight.numel() <= _LARGEST_BY_HEAD


def normalised(module: nn.Module, x: Tensor, norm: Norm) -> Tensor:
    """What `module` computes, by the op."""
    weight, eps = weight_of(module, norm), epsilon(module, x, norm)
    if norm.centred:
        return ops.layer_norm(x, weight, getattr(module, "bias", None), eps)
    return (casting_child(module, x) or ops).rms_norm(x, weight, eps, norm.offset, norm.casting)


def weight_of(module: nn.Module, norm: Norm) -> Tensor | None:
    """The weight that the op takes; only that of RMSNorm adds an offset to it."""
    weight = getattr(module, "weight", None)
    return weight + norm.offset if norm.centred and norm.offset and weight is not None else weight


def epsilon(module: nn.Module, x: Tensor, norm: Norm) -> float:
    """The epsilon that `module` uses for `x`."""
    if isinstance(norm.eps, str):
        return getattr(module, norm.eps)
    if norm.eps is not None:
        return norm.eps
    return torch.finfo(x.dtype if norm.eps_of == "input" else torch.promote_types(x.dtype, torch.float32)).eps


def may_be_norm(module: nn.Module) -> tuple[bool, dict[str, nn.Parameter]] | None:
    """Of a module without buffers and children that has a weight or is called a norm: whether it is called so, and its
    parameters. A child that casts to 8 bits is none. Packed weights are no norm's: their layer is not tried, since what
    it shares with its small twin says how to unpack its own."""
    named = "norm" in original_class(type(module)).__name__.lower()
    parameters = {name: p for name, p in module._parameters.items() if p is not None}
    held = any(name != CASTER for name, _ in module.named_children())
    if held or module._buffers or not (named or "weight" in parameters):
        return None
    if any(not p.dtype.is_floating_point for p in parameters.values()):
        return None
    return named, parameters


class NormRule(Rule):
    """Modules without children that normalise their last dimension."""

    name = "norm"
    part = "norm"
    spans = False

    def __init__(self) -> None:
        self._verdicts = probe.Verdicts()

    def match(self, site: Site) -> Replace | Skip | None:
        module = site.module
        candidate = may_be_norm(module)
        if candidate is None:
            return None
        named, parameters = candidate
        other = next((dims for dims, kinds in _OTHER_DIMS.items() if isinstance(module, kinds)), None)
        if other is not None:
            return Skip(f"it normalises over {other}, for which there is no op", wanted=False, quiet=True)
        if two_inputs(original_class(type(module))) is not None:
            return None  # GatedNormRule's
        if not set(parameters) <= {"weight", "bias"}:
            return Skip(f"it has parameters other than weight and bias: {', '.join(parameters)}") if named else None
        if any(p.ndim != 1 for p in parameters.values()) and not (len(parameters) == 1 and _may_be_by_head(module)):
            return Skip("it normalises over more than the last dimension") if named else None
        try:
            found = self._verdicts.of(module, lambda: recognise(module), probe.number_of(module))
        except Unlike as verdict:
            return Skip(str(verdict)) if named else None
        return Replace(NormForm(found), (op_of(found),), str(found))


def recognise(module: nn.Module) -> Norm:
    """The norm whose result is the module's own, in float32 and to the bit in bfloat16. Raises `Unlike`."""
    probe.only_input(original_class(type(module)))
    shape = _shape(module)
    scores: dict[Norm, float] = dict.fromkeys(_candidates(module), 0.0)
    for dtype, training in ((torch.float32, True), (torch.float32, False), (torch.bfloat16, True)):
        tensors = {
            name: (1 + 0.3 * probe.wave(*shape, phase=i)).to(dtype)
            for i, (name, p) in enumerate(module._parameters.items())
            if p is not None
        }
        twin = probe.shell(module, tensors).train(training)
        # Rows of very different size, so that epsilon shows in one of them; of three dimensions, since nn.GroupNorm of
        # one group is LayerNorm for two.
        sizes = torch.tensor([1e-3, 0.1, 1.0, 1.0, 8.0, 100.0], device="cpu")
        x = (probe.wave(6, *shape, phase=2.0) * sizes.view(6, *[1] * len(shape))).view(2, 3, *shape).to(dtype)
        found = probe.call(twin.forward, x)
        for norm in list(scores):
            # through the very code that would serve the module
            wrong = probe.disagreement(found, probe.call(normalised, twin, x, norm))
            if wrong > (_SHARE_BF16 if dtype is torch.bfloat16 else _DEVIATION_FP32):
                del scores[norm]
            else:
                scores[norm] = wrong
    if not scores:
        raise Unlike("on small inputs it differs from RMSNorm (weight or 1 + weight, either rounding) and LayerNorm")
    return min(scores, key=lambda norm: scores[norm])


def two_inputs(cls: type) -> tuple[str, str] | None:
    """The names of what a forward takes, where these are two."""
    parameters = list(inspect.signature(cls.forward).parameters.values())[1:]
    plain = all(p.kind is inspect.Parameter.POSITIONAL_OR_KEYWORD for p in parameters)
    return (parameters[0].name, parameters[1].name) if plain and len(parameters) == 2 else None


def epsilons(module: nn.Module) -> list[str | float]:
    """What may be the epsilon: names of attributes, and constants of the forward."""
    attributes = [name for name, value in module.__dict__.items() if isinstance(value, float) and 0 < value < 0.1]
    return [*attributes, *_constants(original_class(type(module)))]


def width_of(module: nn.Module) -> int:
    """The size of the last dimension that a norm takes."""
    return _shape(module)[-1]


def _shape(module: nn.Module) -> tuple[int, ...]:
    """That of the weight; without one, a last dimension as a plain attribute suggests it."""
    if module._parameters.get("weight") is not None:
        return tuple(module._parameters["weight"].shape)
    values = [value[0] if isinstance(value, tuple) and len(value) == 1 else value for value in module.__dict__.values()]
    return (next((value for value in values if type(value) is int and value > 1), 64),)


def _candidates(module: nn.Module) -> list[Norm]:
    biased = module._parameters.get("bias") is not None
    offsets = (0.0,) if module._parameters.get("weight") is None else (0.0, 1.0)
    found = []
    for eps in [*((name, "computed") for name in epsilons(module)), (None, "computed"), (None, "input")]:
        found += [Norm(True, *eps, offset) for offset in offsets if not by_head(module)]
        if not biased:
            found += [Norm(False, *eps, *rest) for rest in itertools.product(offsets, ("fp32", "llama", "none"))]
    return found


def _constants(cls: type) -> list[float]:
    """Small numbers that the forward of a class has in its code."""
    code = getattr(inspect.unwrap(cls.forward), "__code__", None)
    values = () if code is None else code.co_consts
    return list(dict.fromkeys(value for value in values if isinstance(value, float) and 0 < value < 0.1))
