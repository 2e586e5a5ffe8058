"""Gated MLPs: down(act(gate(x)) * up(x)), also with gate and up in one packed layer and with a dropout."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from tilesmith import ops
from tilesmith.engine import torch_private
from tilesmith.models.reach import PassedOver, Settings, passed_over, ran, reaches, untouched
from tilesmith.nn.norm import CASTER, has_caster
from tilesmith.rewrite import Form, Replace, Rule, Site, Skip, Unlike, original_class, probe

_ACTIVATIONS = ("silu", "gelu", "gelu_tanh")
_DEVIATION = {torch.float32: 1e-5, torch.bfloat16: 0.03}
_HIDDEN, _INNER = 8, 6
# Large values show a clamp, small ones tell the two kinds of gelu apart, training shows a dropout that is no module.
_SETTINGS = (
    (torch.float32, 0.3, True),
    (torch.float32, 0.3, False),
    (torch.float32, 100.0, True),
    (torch.bfloat16, 0.3, True),
)


class GatedMlp(NamedTuple):
    """Children by name. Without `up`, the layer `gate` gives gate and up, in this order, in one tensor."""

    gate: str
    up: str | None
    down: str
    activation: str
    inner_dropout: str | None = None
    outer_dropout: str | None = None

    def __str__(self) -> str:
        if self.up is None:
            return f"computes {self.down}({self.activation}(one half of {self.gate}) * the other)"
        return f"computes {self.down}({self.activation}({self.gate}) * {self.up})"


@dataclass(frozen=True)
class GatedMlpForm(Form):
    """A gated MLP by the op. passed_over: the children that are not called any more. settings: those that the module
    must still have. recompute: the backward computes the inner product again."""

    mlp: GatedMlp
    passed_over: tuple[PassedOver, ...]
    settings: Settings = ()
    recompute: bool = True

    @property
    def op(self) -> str:
        """The op that computes act(gate) * up."""
        return "swiglu" if self.mlp.activation == "silu" else "geglu"

    def namespace(self, base: type) -> dict[str, Any]:
        mlp, op, as_it_was = self.mlp, self.op, untouched(self.passed_over, self.settings)

        def forward(self: nn.Module, *inputs: Tensor, **named: Tensor) -> Tensor:
            (x,) = inputs or tuple(named.values())
            if not (reaches(op, x) and as_it_was(self)):
                return base.forward(self, x)
            ran(self, op)
            return gated_mlp(self, x, mlp)

        kept = {} if self.recompute else {"_tilesmith_keeps": True}
        return {"forward": forward, "_tilesmith_gated_mlp": mlp, **kept}


def gated_mlp(module: nn.Module, x: Tensor, mlp: GatedMlp) -> Tensor:
    """What `module` computes; the layers are called as modules, since adapters and hooks may sit on them."""
    if has_caster(module):
        caster = module._modules[CASTER]
        layers = tuple(module._modules.get(name or "") for name in (mlp.gate, mlp.up, mlp.down))
        if caster.serves(x, *layers):
            return caster(x)
    gate = getattr(module, mlp.gate)(x)
    gate, up = gate.chunk(2, dim=-1) if mlp.up is None else (gate, getattr(module, mlp.up)(x))
    if gate.dtype is not up.dtype:  # adapters of another dtype on one of the two
        gate, up = (half.to(torch.promote_types(gate.dtype, up.dtype)) for half in (gate, up))
    hidden = _product(mlp, gate, up)
    if mlp.inner_dropout is not None:
        hidden = getattr(module, mlp.inner_dropout)(hidden)
        out = getattr(module, mlp.down)(hidden)
    else:
        with _recomputed(module, hidden, mlp, gate, up):
            out = getattr(module, mlp.down)(hidden)
    return out if mlp.outer_dropout is None else getattr(module, mlp.outer_dropout)(out)


def _product(mlp: GatedMlp, gate: Tensor, up: Tensor) -> Tensor:
    if mlp.activation == "silu":
        return ops.swiglu(gate, up)
    return ops.geglu(gate, up, "tanh" if mlp.activation == "gelu_tanh" else "none")


def _recomputed(
    module: nn.Module, hidden: Tensor, mlp: GatedMlp, gate: Tensor, up: Tensor
) -> contextlib.AbstractContextManager:
    """Inside, whoever saves `hidden` for its backward keeps gate and up instead, which are kept anyway.

    Not where memory does not tell tensors apart: in fake tensors and in the transforms of torch.func. Nor under other
    hooks, those of checkpointing or offloading: they would not see that gate and up are kept, and so not free them.

    One tensor of the MLP's width less a layer for one more pass over three: on an H200 4.3 GB less in the training step
    of a Llama of 16 layers, 8,192 wide inside, at 16,384 tokens, for 1 % of its time.
    """
    if not torch.is_grad_enabled() or not hidden.requires_grad or torch.compiler.is_compiling():
        return contextlib.nullcontext()
    if getattr(type(module), "_tilesmith_keeps", False):
        return contextlib.nullcontext()
    if _others_keep():
        return contextlib.nullcontext()
    if type(_local(hidden)) is not Tensor or torch_private.functorch() is not None:
        return contextlib.nullcontext()
    kept = (gate.detach(), up.detach())
    versions = (gate._version, up._version)
    storage, size = _local(hidden).data_ptr(), hidden.numel()

    def pack(tensor: Tensor) -> Any:
        whole = _local(tensor).data_ptr() == storage and tensor.numel() == size and tensor.is_contiguous()
        return tensor.shape if whole and tensor.dtype == gate.dtype else tensor

    def unpack(saved: Any) -> Tensor:
        if isinstance(saved, Tensor):
            return saved
        if (kept[0]._version, kept[1]._version) != versions:
            raise RuntimeError("gate or up of a gated MLP was modified in place before its backward")
        with torch.no_grad():
            return _product(mlp, *kept).view(saved)

    return torch.autograd.graph.saved_tensors_hooks(pack, unpack)


def _others_keep() -> bool:
    """Whether hooks are on that keep saved tensors their own way; those of `MemoryMonitor` only look."""
    hooks = torch_private.saved_tensors_hooks(False)
    return hooks is not None and not (isinstance(hooks, tuple) and getattr(hooks[0], "only_looks", False))


def _local(x: Tensor) -> Tensor:
    """What a DTensor has here: its own address is 0."""
    return getattr(x, "_local_tensor", x)


class GatedMlpRule(Rule):
    """Modules with three linear layers, or two of which one is packed, whose shapes allow a gated MLP."""

    name = "mlp"
    part = "ffn"

    def __init__(self, recompute: bool = True) -> None:
        self._verdicts, self._recompute = probe.Verdicts(), recompute

    def match(self, site: Site) -> Replace | Skip | None:
        module = site.module
        layers = _layers(module)
        if not any(_roles(layers)):
            return None
        name = original_class(type(module)).__name__.lower()
        named = any(word in name for word in ("mlp", "feedforward", "ffn", "glu"))
        dtypes = {child.weight.dtype for child in layers.values() if isinstance(getattr(child, "weight", None), Tensor)}
        if len(dtypes) > 1:
            return Skip("its linear layers have different dtypes") if named else None
        try:
            sizes = tuple(_sizes(c) for c in layers.values())
            form = self._verdicts.of(module, lambda: recognise(module), sizes, probe.number_of(module))
        except Unlike as verdict:
            return Skip(_with_norm(module, str(verdict))) if named else None
        return Replace(replace(form, recompute=self._recompute), (form.op,), str(form.mlp))


def _with_norm(module: nn.Module, reason: str) -> str:
    """The reason, and what is missing where a norm stands behind the gated product, as BitNet's."""
    norms = [n for n, c in module.named_children() if [p.ndim for p in c.parameters()] == [1] and reason.endswith(n)]
    return f"{reason}, a norm: no op computes a norm of the gated product" if norms else reason


class _Half(nn.Module):
    """Stands in for a dropout, so that its place shows."""

    def forward(self, x: Tensor) -> Tensor:
        return x * 0.5


def recognise(module: nn.Module) -> GatedMlpForm:
    """The form whose result is the module's own, with small layers in place of the real ones. Raises `Unlike`."""
    probe.only_input(original_class(type(module)))
    layers = _layers(module)
    plain = {name: child for name, child in module.named_children() if name != CASTER and _plain(child)}
    others = {name: _Half() if isinstance(c, nn.Dropout) else probe.shell(c) for name, c in plain.items()}
    dropouts = [name for name, child in others.items() if isinstance(child, _Half)]
    reason = "on small inputs it differs from down(act(gate) * up) for silu, gelu and tanh-gelu"
    for roles in _roles(layers):
        try:
            known = _candidates(roles, dropouts)
            for dtype, scale, training in _SETTINGS:
                twin = probe.shell(module, children={**others, **_stand_ins(roles, dtype, scale)}).train(training)
                x = probe.wave(2, 5, _HIDDEN, phase=1.0).to(dtype)
                found = probe.call(twin.forward, x)
                known = [mlp for mlp in known if _agrees(twin, mlp, x, found)]
            if known:
                # each setting is one more guard of a compiled layer: those that nothing reads change nothing
                read = probe.names_read(original_class(type(module)))
                settings = tuple(one for one in probe.settings_of(module) if one[0] in read)
                return replace(_passing_over(plain, known[0]), settings=settings)
        except Unlike as verdict:
            reason = str(verdict)
    raise Unlike(reason)


def _passing_over(plain: dict[str, nn.Module], mlp: GatedMlp) -> GatedMlpForm:
    called = (mlp.inner_dropout, mlp.outer_dropout)
    return GatedMlpForm(mlp, passed_over((name, child) for name, child in plain.items() if name not in called))


def _agrees(twin: nn.Module, mlp: GatedMlp, x: Tensor, found: Any) -> bool:
    wanted = probe.call(gated_mlp, twin, x, mlp)
    if not isinstance(found, Tensor) or found.shape != wanted.shape or found.dtype != wanted.dtype:
        return False
    return bool((found - wanted).abs().max() <= _DEVIATION[x.dtype] * wanted.abs().max())


def _layers(module: nn.Module) -> dict[str, nn.Module]:
    return {name: child for name, child in module.named_children() if _sizes(child) is not None}


def _sizes(layer: nn.Module) -> tuple[int, int] | None:
    """(inputs, outputs) of a linear layer of any make; None for other modules."""
    sizes = getattr(layer, "in_features", None), getattr(layer, "out_features", None)
    return sizes if all(isinstance(size, int) for size in sizes) else None


def _plain(module: nn.Module) -> bool:
    return not any(True for _ in module.children()) and not module._parameters and not module._buffers


def _roles(layers: dict[str, nn.Module]) -> Iterator[tuple[str, str | None, str]]:
    """Every (gate, up, down) that the sizes of the layers allow."""
    if len(layers) == 3:
        for gate, up, down in itertools.permutations(layers):
            if _sizes(layers[gate]) == _sizes(layers[up]) == (_sizes(layers[down]) or ())[::-1]:
                yield gate, up, down
    elif len(layers) == 2:
        for gate, down in itertools.permutations(layers):
            (inputs, packed), (inner, outputs) = _sizes(layers[gate]), _sizes(layers[down])
            if inputs == outputs and packed == 2 * inner:
                yield gate, None, down


def _candidates(roles: tuple[str, str | None, str], dropouts: list[str]) -> list[GatedMlp]:
    places = [(None, None), *((name, None) for name in dropouts), *((None, name) for name in dropouts)]
    places += list(itertools.permutations(dropouts, 2))
    return [GatedMlp(*roles, activation, *place) for activation in _ACTIVATIONS for place in places]


def _stand_ins(roles: tuple[str, str | None, str], dtype: torch.dtype, scale: float) -> dict[str, nn.Module]:
    gate, up, down = roles
    wide = _INNER if up else 2 * _INNER
    made = {gate: probe.linear(wide, _HIDDEN, dtype, scale=scale, phase=0.3)}
    if up:
        made[up] = probe.linear(_INNER, _HIDDEN, dtype, scale=scale, phase=2.1)
    return {**made, down: probe.linear(_HIDDEN, _INNER, dtype, scale=0.5, phase=4.4)}
