"""ComponentValidator: a layer against the same layer in fp64, or against its formula, with a budget for the error."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tilesmith.engine import ops, use
from tilesmith.engine.argument_checks import present, size
from tilesmith.engine.model_state import random_numbers_kept
from tilesmith.nn.multihead import AttentionLayer, self_attention
from tilesmith.validate.budget import Budget, compare

BATCH, TOKENS = 3, 17
FORMULA, ITSELF = "its formula", "itself, computed by the references of all ops"
Oracle = Callable[[nn.Module, Tensor], Tensor]
Law = Callable[[Callable[[Tensor], Tensor], Tensor], "Check"]  # of a layer and its input, both in fp64


@dataclass(frozen=True)
class Check:
    """One thing that was looked at. error, allowed: of those that compare numbers; message: what is wrong, in words."""

    name: str
    passed: bool
    error: float = 0.0
    allowed: float = 0.0
    message: str = ""


@dataclass(frozen=True)
class ValidationResults:
    """What was found of one component. `results["forward"]` is a check by its name; `passed` is whether all are.

    compared_with: what outputs and gradients were compared with. "itself" does not tell a layer from one of another
    meaning: such results say that its parts are computed right, and what the further checks say.
    """

    component: str
    checks: tuple[Check, ...]
    compared_with: str = ITSELF

    @property
    def passed(self) -> bool:
        """Whether every check passed."""
        return all(check.passed for check in self.checks)

    def __getitem__(self, name: str) -> Check:
        found = next((check for check in self.checks if check.name == name), None)
        if found is None:
            raise KeyError(f"there is no check {name!r}; there are {', '.join(check.name for check in self.checks)}")
        return found

    def to_dict(self) -> dict[str, Any]:
        """As plain data."""
        told = {"component": self.component, "passed": self.passed, "compared_with": self.compared_with}
        return {**told, "checks": [asdict(c) for c in self.checks]}

    def __str__(self) -> str:
        lines = [f"{self.component}: {'passed' if self.passed else 'FAILED'}, compared with {self.compared_with}"]
        for check in self.checks:
            numbers = f" (error {check.error:.3g} of {check.allowed:.3g} allowed)" if check.allowed else ""
            told = f": {check.message}" if check.message else ""
            lines.append(f"  {'ok' if check.passed else 'WRONG'} {check.name}{numbers}{told}")
        return "\n".join(lines)


class ComponentValidator:
    """Validates layers on a device: this library's, and others with the same meaning.

        validator = ComponentValidator(device=torch.device("cpu"))
        results = validator.validate_attention_component(layer, d_model=64, num_heads=4)
        assert results.passed, results

    A copy of the layer runs in evaluation mode. Its outputs and gradients may be off from fp64 by twice the error of a
    reference in the same dtype, plus rounding (`validate.budget`). The reference is the formula, where a layer's
    parameters tell it (linear layers, softmax attention), else the layer itself by the references of all ops; results
    say which. Further: the shape of the output, finite values, the same result of a second call, inputs that are not
    written to, the same result from strided inputs, and rows of a batch that do not depend on one another. A layer
    without a formula must do what its kind does: of attention tokens see others, a norm depends on the direction of a
    token and not on its length, an MLP is not linear, an activation maps each element. The layer and random numbers are
    left as they were.

    device: where to validate; the layer's own if None. dtype: in which; the layer's own if None. Raises ValueError for
    a device that is not here.
    """

    def __init__(self, device: torch.device | str | None = None, *, dtype: torch.dtype | None = None):
        if dtype is not None and (not isinstance(dtype, torch.dtype) or not dtype.is_floating_point):
            raise TypeError(f"ComponentValidator: dtype must be a floating torch.dtype or None, got {dtype!r}")
        self.device = None if device is None else present("ComponentValidator", "device", device)
        self.dtype = dtype

    def validate_attention_component(
        self, layer: nn.Module, d_model: int, num_heads: int, *, tokens: int = TOKENS
    ) -> ValidationResults:
        """A layer from [B, T, d_model] to the same; `torch.nn.MultiheadAttention` is given one tensor for all three.

        Raises ValueError where num_heads does not divide d_model, or the layer has another number of heads.
        """
        size("validate_attention_component", "d_model", d_model)
        size("validate_attention_component", "num_heads", num_heads)
        size("validate_attention_component", "tokens", tokens)
        if d_model % num_heads:
            raise ValueError(
                f"validate_attention_component: num_heads is {num_heads}, which does not divide d_model, {d_model}; "
                "choose a divisor"
            )
        has = getattr(layer, "num_heads", num_heads)
        if has != num_heads:
            raise ValueError(f"validate_attention_component: num_heads is {num_heads}, the layer has {has}")
        oracle = (lambda m, x: _attention(m, x, num_heads)) if _has_formula(layer) else None
        law = _mixes if oracle is None and tokens > 1 else None
        return self._validated(layer, (BATCH, tokens, d_model), (BATCH, tokens, d_model), oracle, law)

    def validate_linear_component(self, layer: nn.Module, in_features: int, out_features: int) -> ValidationResults:
        """A layer from [..., in_features] to [..., out_features]."""
        size("validate_linear_component", "in_features", in_features)
        size("validate_linear_component", "out_features", out_features)
        shape = getattr(getattr(layer, "weight", None), "shape", None)
        known = shape == (out_features, in_features)
        oracle = (lambda m, x: F.linear(x, m.weight, getattr(m, "bias", None))) if known else None
        return self._validated(layer, (BATCH, TOKENS, in_features), (BATCH, TOKENS, out_features), oracle)

    def validate_norm_component(self, layer: nn.Module, hidden_size: int) -> ValidationResults:
        """A layer that normalises [..., hidden_size]."""
        size("validate_norm_component", "hidden_size", hidden_size)
        return self._validated(layer, (BATCH, TOKENS, hidden_size), (BATCH, TOKENS, hidden_size), None, _normalises)

    def validate_mlp_component(self, layer: nn.Module, hidden_size: int) -> ValidationResults:
        """A feed-forward layer from [..., hidden_size] to the same."""
        size("validate_mlp_component", "hidden_size", hidden_size)
        return self._validated(layer, (BATCH, TOKENS, hidden_size), (BATCH, TOKENS, hidden_size), None, _bends)

    def validate_activation_component(self, layer: nn.Module, *, features: int = 64) -> ValidationResults:
        """A layer that maps each element: no feature may depend on another."""
        size("validate_activation_component", "features", features)
        law = _maps_each if features > 1 else None
        return self._validated(layer, (BATCH, features), (BATCH, features), None, law)

    def validate_decoder_component(self, model: nn.Module, vocab_size: int) -> ValidationResults:
        """A model from token ids [B, T] to logits [B, T, vocab_size]."""
        size("validate_decoder_component", "vocab_size", vocab_size)
        shape = (BATCH, TOKENS, vocab_size)
        return self._validated(model, (BATCH, TOKENS), shape, None, classes=vocab_size)

    def _validated(
        self,
        layer: Any,
        shape: tuple[int, ...],
        wanted: tuple[int, ...],
        oracle: Oracle | None,
        law: Law | None = None,
        classes: int = 0,
    ) -> ValidationResults:
        if not isinstance(layer, nn.Module):
            raise TypeError(f"ComponentValidator: a layer must be a torch.nn.Module, got {type(layer).__name__}")
        first = next((p for p in layer.parameters() if p.is_floating_point()), None)
        if first is not None and first.device.type == "meta":
            raise ValueError("ComponentValidator: the layer is on meta and has no values; load it first")
        device = self.device or (torch.device("cpu") if first is None else first.device)
        dtype = self.dtype or (torch.float32 if first is None else first.dtype)
        tried = copy.deepcopy(layer).to(device, dtype).eval()
        for parameter in tried.parameters():
            parameter.grad = None
        generator = torch.Generator().manual_seed(0)
        if classes:
            x = torch.randint(classes, shape, generator=generator).to(device)
        else:
            x = torch.randn(*shape, generator=generator).to(device, dtype)
        with random_numbers_kept({torch.device("cpu"), device}):
            checks = tuple(_checks(tried, x, wanted, oracle, law))
        return ValidationResults(type(layer).__name__, checks, FORMULA if oracle is not None else ITSELF)


def _call(layer: nn.Module, x: Tensor) -> Tensor:
    out = self_attention(layer, x)
    return out[0] if isinstance(out, tuple) else out


def _checks(
    layer: nn.Module, x: Tensor, wanted: tuple[int, ...], oracle: Oracle | None, law: Law | None
) -> list[Check]:
    passed_in = x.clone()
    try:
        got = _values(layer, x, _call)
        with torch.no_grad():
            once = _call(layer, passed_in)
    except Exception as problem:  # foreign code: what it raises is the finding
        return [Check("runs", False, message=f"{type(problem).__name__}: {problem}")]
    found = [Check("runs", True)]
    out = got["forward"]
    fits = tuple(out.shape) == wanted
    found.append(Check("shape", fits, message="" if fits else f"{list(out.shape)}, not {list(wanted)}"))
    found.append(_said("finite", bool(out.isfinite().all()), "the output has NaN or infinity"))
    found.append(_said("inputs", torch.equal(passed_in, x), "it writes to its input"))
    if not fits:
        return found
    wide = copy.deepcopy(layer).double()
    with _references():
        reference = _values(layer, x, oracle or _call)
        try:
            exact = _values(wide, x.double() if x.is_floating_point() else x, oracle or _call)
        except Exception as problem:  # foreign code that computes in one dtype
            told = f"there is nothing to compare with, as a copy in it raises {type(problem).__name__}: {problem}"
            return [*found, Check("float64", False, message=told)]
    eps = _rounding(layer, x)
    found += [_judged(name, got[name], reference[name], exact[name], eps) for name in got if name in exact]
    lost = [name for name in exact if name not in got]
    found += [Check(name, False, message="there is none") for name in lost]
    with torch.no_grad():
        again, strided = _call(layer, x.clone()), _call(layer, _strided(x))
        alone = torch.cat([_call(layer, row.clone()) for row in x.split(1)])
    found.append(_judged("repeats", again, once, once.double(), eps))  # up to rounding: sums may be in another order
    found.append(_judged("strided inputs", strided, reference["forward"], exact["forward"], eps))
    found.append(_judged("rows alone", alone, reference["forward"], exact["forward"], eps))
    if law is not None:
        with torch.no_grad(), _references():
            found.append(law(lambda given: _call(wide, given), x.double()))
    return found


def _mixes(layer: Callable[[Tensor], Tensor], x: Tensor) -> Check:
    """Whether other tokens of [B, T, C] see the first one, or the last."""
    out, seen = layer(x), False
    for place in (0, -1):
        other = x.clone()
        other[:, place] = -x[:, place]
        rest = slice(1, None) if place == 0 else slice(None, -1)
        seen = seen or not _same(layer(other)[:, rest], out[:, rest])
    return _said("attends", seen, "no token sees another one: what it returns for one does not depend on the others")


def _normalises(layer: Callable[[Tensor], Tensor], x: Tensor) -> Check:
    """Whether a token's direction counts and its length does not. Where it is long, the epsilon counts for nothing."""
    long, longer, turned = layer(256 * x), layer(512 * x), layer(-256 * x)
    if _same(long, turned):
        return Check("normalises", False, message="what it returns does not depend on its input")
    return _said("normalises", _same(long, longer), "tokens that are twice as long give another result")


def _bends(layer: Callable[[Tensor], Tensor], x: Tensor) -> Check:
    """Whether a layer is something else than linear."""
    y = x.roll(1, 1)
    straight = _same(layer(x + y) + layer(torch.zeros_like(x)), layer(x) + layer(y))
    return _said("not linear", not straight, "f(x + y) + f(0) is f(x) + f(y): it is linear or constant")


def _maps_each(layer: Callable[[Tensor], Tensor], x: Tensor) -> Check:
    """Whether the features of [B, C] do not see one another."""
    other = x.clone()
    other[:, 0] = -x[:, 0]
    alone = _same(layer(other)[:, 1:], layer(x)[:, 1:])
    return _said("each element", alone, "what it returns for a feature depends on another one")


def _same(got: Tensor, wanted: Tensor) -> bool:
    """Whether two results in fp64 are equal up to the rounding of fp32, in which a layer may compute inside."""
    return compare(got, wanted, wanted, torch.float32).passed


def _said(name: str, passed: bool, message: str) -> Check:
    return Check(name, passed, message="" if passed else message)


def _rounding(layer: nn.Module, x: Tensor) -> float:
    """What an fp64 sum may be off by, relative to its terms: its order alone changes it by an eps for each of them. A
    layer in fp64 is compared with fp64; for other dtypes this is nothing."""
    terms = max(x.numel(), *(max(p.shape, default=1) for p in layer.parameters()), 1)
    return terms * torch.finfo(torch.float64).eps


def _judged(name: str, got: Tensor, reference: Tensor, exact: Tensor, eps: float) -> Check:
    budget: Budget = compare(got, reference, exact, eps=eps)
    return Check(name, budget.passed, budget.error, budget.allowed, budget.message)


def _values(layer: nn.Module, x: Tensor, call: Oracle) -> dict[str, Tensor]:
    """The output, and the gradients of the input and of all parameters."""
    layer.zero_grad()
    x = x.detach().clone().requires_grad_(x.is_floating_point())
    with torch.enable_grad():
        out = call(layer, x)
        weight = torch.linspace(-1.0, 1.0, max(1, out.numel()), dtype=torch.float64)[: out.numel()].view(out.shape)
        if out.requires_grad:
            (out * weight.to(out.device, out.dtype)).sum().backward()
    found = {"forward": out.detach()}
    if x.grad is not None:
        found["gradient of the input"] = x.grad
    return found | {f"gradient of {n}": p.grad for n, p in layer.named_parameters() if p.grad is not None}


@contextlib.contextmanager
def _references() -> Any:
    with use(**dict.fromkeys(ops(), "reference")):
        yield


def _strided(x: Tensor) -> Tensor:
    """The same values, every second element of a wider tensor."""
    wide = x.new_zeros(*x.shape[:-1], 2 * x.shape[-1])
    view = wide[..., ::2]
    view.copy_(x)
    return view


def _has_formula(layer: nn.Module) -> bool:
    """Whether a layer is plain softmax attention over all tokens, of which the projections are known."""
    return type(layer) is AttentionLayer or (
        type(layer) is nn.MultiheadAttention and layer._qkv_same_embed_dim and layer.bias_k is None
        and not layer.add_zero_attn
    )  # fmt: skip


def _attention(layer: nn.Module, x: Tensor, heads: int) -> Tensor:
    """softmax(q kᵀ / sqrt(D)) v between the projections (arXiv:1706.03762)."""
    if isinstance(layer, nn.MultiheadAttention):
        packed = F.linear(x, layer.in_proj_weight, layer.in_proj_bias)
    else:
        packed = F.linear(x, layer.qkv_proj.weight, layer.qkv_proj.bias)
    q, k, v = (part.unflatten(2, (heads, -1)).transpose(1, 2) for part in packed.chunk(3, -1))
    weights = torch.softmax(q @ k.transpose(2, 3) / q.shape[-1] ** 0.5, -1)
    out = (weights @ v).transpose(1, 2).flatten(2)
    return F.linear(out, layer.out_proj.weight, layer.out_proj.bias)
