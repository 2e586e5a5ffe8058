"""MLPs tiled over tokens: what they compute inside exists for one tile of tokens at a time, forward and backward."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from tilesmith.models.layers.gated_mlps import GatedMlpForm, GatedMlpRule
from tilesmith.rewrite import Form, Replace, Site, forms
from tilesmith.rewrite.variants import obstacle

TILE = "_tilesmith_tile"  # the attribute of an instance: tokens of a tile


@dataclass(frozen=True)
class TiledForm(Form):
    """A module that sees each token by itself, computed tile by tile; a call of one tile runs as before."""

    def namespace(self, base: type) -> dict[str, Any]:
        def forward(self: nn.Module, *inputs: Tensor, **named: Tensor) -> Tensor:
            (x,) = inputs or tuple(named.values())
            if x.shape[:-1].numel() <= self.__dict__[TILE]:
                return base.forward(self, x)
            return tiled(lambda tile: base.forward(self, tile), self, x, self.__dict__[TILE])

        return {"forward": forward}

    def leave(self, module: nn.Module) -> None:
        module.__dict__.pop(TILE, None)


def is_tiled(module: nn.Module) -> bool:
    """Whether the form is the newest one of `module`."""
    return isinstance(next(iter(forms(module)), None), TiledForm)


def gated_mlps(model: nn.Module) -> dict[str, nn.Module]:
    """The modules of a model, by name, that compute a gated MLP and nothing else, optimised or not, and whose class may
    be swapped."""
    rule, found = GatedMlpRule(), {}
    for name, module in model.named_modules():
        if obstacle(module) is not None:
            continue
        known = any(isinstance(form, GatedMlpForm) for form in forms(module))
        if known or isinstance(rule.match(Site(model, name, module)), Replace):
            found[name] = module
    return found


@torch.compiler.disable(reason="a loop over tiles with an autograd of its own")
def tiled(run: Callable[[Tensor], Tensor], module: nn.Module, x: Tensor, rows: int) -> Tensor:
    """run(x) by tiles of `rows` tokens. x: [..., C]; run takes [1, rows, C] and has the parameters of `module`.

    In a backward each tile is run again, with the random numbers and the autocast of its forward. Gradients of the
    parameters are summed over tiles in fp32 or wider, and rounded once.
    """
    call = _Call(run, module, rows, x)
    trained = call.parameters() if torch.is_grad_enabled() else []
    if not torch.is_grad_enabled() or not (x.requires_grad or trained):
        return call.forward(x)
    anchor = _Anchor.apply(x, torch.empty(0, requires_grad=True))
    return _Tiles.apply(call, anchor.grad_fn, anchor, x, *trained)


class _Call:
    """One call of a tiled module: what its backward needs besides the input."""

    def __init__(self, run: Callable[[Tensor], Tensor], module: nn.Module, rows: int, x: Tensor):
        self.run, self.module, self.rows, self.device = run, module, rows, x.device
        kind = x.device.type
        self.autocast = kind, torch.get_autocast_dtype(kind), torch.is_autocast_enabled(kind)
        self.random = torch.get_rng_state()
        self.device_random = None if kind == "cpu" else torch.get_device_module(kind).get_rng_state(x.device)

    def parameters(self) -> list[nn.Parameter]:
        """The module's parameters that are trained."""
        return [p for p in self.module.parameters() if p.requires_grad]

    def forward(self, x: Tensor) -> Tensor:
        out = None
        flat = x.reshape(1, -1, x.shape[-1])
        with self._autocast():
            for tile in self._tiles(flat):
                y = self.run(flat[:, tile])
                if out is None:
                    out = y.new_empty(1, flat.shape[1], y.shape[-1])
                out[:, tile] = y
        return out.view(*x.shape[:-1], out.shape[-1])

    def backward(self, x: Tensor, dy: Tensor, wants_dx: bool) -> tuple[Tensor | None, list[Tensor | None]]:
        """(dx, gradients of the parameters)."""
        flat, dy = (t.reshape(1, -1, t.shape[-1]) for t in (x, dy))
        dx = torch.empty_like(flat) if wants_dx else None
        trained = self.parameters()
        sums: list[Tensor | None] = [None] * len(trained)
        with torch.enable_grad(), self._autocast(), self._random_numbers():
            for tile in self._tiles(flat):
                part = flat[:, tile].detach().requires_grad_(wants_dx)
                wanted = [part, *trained] if wants_dx else trained
                found = list(torch.autograd.grad(self.run(part), wanted, dy[:, tile], allow_unused=True))
                if wants_dx:
                    first = found.pop(0)
                    dx[:, tile] = 0 if first is None else first
                sums = [_added(*pair) for pair in zip(sums, found)]
        made = [None if s is None else s.to(p.dtype) for s, p in zip(sums, trained)]
        return None if dx is None else dx.view(x.shape), made

    def _tiles(self, flat: Tensor) -> Iterator[slice]:
        for start in range(0, flat.shape[1], self.rows):
            yield slice(start, start + self.rows)

    def _autocast(self) -> contextlib.AbstractContextManager:
        kind, dtype, enabled = self.autocast
        # Without its cache: a weight that was cast without gradients must not be met again with them.
        return torch.autocast(kind, dtype=dtype, enabled=enabled, cache_enabled=False)

    @contextlib.contextmanager
    def _random_numbers(self) -> Iterator[None]:
        kind = self.device.type
        devices = [] if kind == "cpu" else [self.device]
        with torch.random.fork_rng(devices, device_type="cuda" if kind == "cpu" else kind):
            torch.set_rng_state(self.random)
            if self.device_random is not None:
                torch.get_device_module(kind).set_rng_state(self.device_random, self.device)
            yield


def _added(total: Tensor | None, more: Tensor | None) -> Tensor | None:
    if more is None:
        return total
    if total is None:
        return more.to(torch.promote_types(more.dtype, torch.float32))
    return total.add_(more)


class _Anchor(torch.autograd.Function):
    """Saves x, and nothing else happens. It stands before the tiles so that a checkpoint around the layer, which stops
    its second forward at the last tensor that was saved, stops here and not behind all tiles."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, dummy: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        ctx.set_materialize_grads(False)
        return x.new_empty(0)

    @staticmethod
    def backward(ctx: Any, _: Any) -> tuple[None, None]:
        return None, None


class _Tiles(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, call: _Call, saved: Any, anchor: Tensor, x: Tensor, *trained: Tensor) -> Tensor:
        ctx.call, ctx.saved = call, saved
        ctx.set_materialize_grads(False)
        return call.forward(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor | None) -> tuple[Any, ...]:
        if dy is None:
            return (None,) * len(ctx.needs_input_grad)
        (x,) = ctx.saved.saved_tensors
        dx, gradients = ctx.call.backward(x, dy, ctx.needs_input_grad[3])
        return (None, None, None, dx, *gradients)
