"""What a checkpointed layer takes, from runs of one layer of each kind on a few tokens."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from tilesmith.engine import torch_private
from tilesmith.engine.argument_checks import INTEGERS
from tilesmith.engine.memory import FEWEST_ROWS, Need
from tilesmith.engine.timing import peak_memory
from tilesmith.models.checkpoints import Keep, Keeper, Shelf, attach, detach
from tilesmith.models.layers.tiles import TILE, TiledForm
from tilesmith.models.sizing.memory_estimate import LiveBytes, held
from tilesmith.models.sizing.step_costs import Line
from tilesmith.rewrite import original_class, swap, unswap

TILE_PROBED = {"cpu": 64}
TILE_PROBED_ELSEWHERE = 4096
_FEW = 3  # tokens of a run that looks for tables of positions
_LONG = 64  # places that no activation of so few tokens has


def kinds_of(layers: list[nn.Module]) -> list[nn.Module]:
    """One layer of each kind: of a class, sizes of parameters, and type of attention."""
    found: dict[Any, nn.Module] = {}
    for layer in layers:
        shapes = tuple(tuple(p.shape) for p in layer.parameters())
        window = next(filter(None, (getattr(m, "sliding_window", None) for m in layer.modules())), 0)
        found.setdefault((type(layer), shapes, window), layer)
    return list(found.values())


class Captured(NamedTuple):
    """A layer's input [rows, tokens, C], and what it is called with besides."""

    x: Tensor
    args: tuple
    kwargs: dict[str, Any]

    @property
    def tokens(self) -> int:
        """Of all rows."""
        return self.x.shape[:-1].numel()


class _Stop(Exception):
    pass


def captured(model: nn.Module, kinds: list[nn.Module], rows: int, tokens: int) -> list[Captured]:
    """What the layers are called with for so many rows of so many tokens, from a forward that ends when the last of
    them is reached."""
    found: dict[int, Captured] = {}

    def hook(layer: nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
        x = args[0] if args else kwargs.pop("hidden_states")
        found[id(layer)] = Captured(x.detach(), args[1:], dict(kwargs))
        if len(found) == len(kinds):
            raise _Stop

    hooks = [layer.register_forward_pre_hook(hook, with_kwargs=True) for layer in kinds]
    try:
        _forward(model, rows, tokens)
    except _Stop:
        pass
    finally:
        for handle in hooks:
            handle.remove()
    missing = [original_class(type(layer)).__name__ for layer in kinds if id(layer) not in found]
    if missing:
        raise ValueError(f"fit_sequence: a forward of input_ids does not reach {missing[0]}; it cannot be measured")
    return [found[id(layer)] for layer in kinds]


def _forward(model: nn.Module, rows: int, tokens: int) -> None:
    model.train()
    ids = torch.zeros(rows, tokens, dtype=torch.long, device=next(model.parameters()).device)
    with torch.no_grad():
        model(input_ids=ids, use_cache=False)


class _Tables(torch_private.DispatchMode or object):
    """Watches for tables that are read at one place after the other: those of positions. found: name, places before the
    first that is read, and places that there are, of each.

    known: the tensors that may be tables. Another one, made in a forward, is one if it is too long for an activation.
    """

    def __init__(self, known: Iterable[tuple[str, Tensor]]) -> None:
        super().__init__()
        self.names = {x.data_ptr(): name for name, x in known}
        self.found: list[tuple[str, int, int]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        indices, places = _read(func.overloadpacket, args)
        name = self.names.get(args[0].data_ptr(), "") if places else ""
        if places and (name or places > _LONG) and indices.shape[-1:] == (_FEW,) and indices.dtype in INTEGERS:
            rows = indices.reshape(-1, _FEW).tolist()
            first = rows[0][0] if rows else 0
            if rows and all(row == [first, first + 1, first + 2] for row in rows):
                self.found.append((name or "made in its forward", first, places))
        return func(*args, **(kwargs or {}))


def _read(packet: Any, args: tuple) -> tuple[Any, int]:
    """The indices by which an operator reads a table, and how many places the table has; (None, 0) of others."""
    if packet in torch_private.aten("embedding"):
        return args[1], args[0].shape[0]
    if packet in torch_private.aten("index_select"):
        return args[2], args[0].shape[args[1]]
    if packet in torch_private.aten("index"):
        by = next((i for i, x in enumerate(args[1]) if x is not None), 0)
        return args[1][by], args[0].shape[by]
    if packet in torch_private.aten("gather"):  # rows [B, tokens, C] of a table [B, places, C]
        table, dim, indices = args[:3]
        if dim == 1 and table.ndim == 3 and indices.ndim == 3 and indices.shape[2] == table.shape[2]:
            return indices.transpose(1, 2), table.shape[1]
    return None, 0


def refuse_positions(model: nn.Module, tokens: int) -> None:
    """Raise ValueError where a model looks its positions up in a table that has fewer than `tokens`.

    A forward of three tokens tells: a longer one would fail, on a GPU without words. Angles of a rotation are computed
    for any position.
    """
    if tokens < _FEW or torch_private.DispatchMode is None:
        return
    with _Tables((*model.named_parameters(), *model.named_buffers())) as watch:
        _forward(model, 1, _FEW)
    short = next(((name, first, places) for name, first, places in watch.found if first + tokens > places), None)
    if short is not None:
        name, first, places = short
        raise ValueError(
            f"fit_sequence: tokens must be at most {places - first}, got {tokens}: the model looks positions up in a "
            f"table ({name}) that has no more; tokens are of one sequence, batch is how many there are"
        )


def tile_of(mlps: list[nn.Module], hidden: Tensor, total: int, tile_tokens: int | None) -> int:
    """Tokens of a tile."""
    if tile_tokens is not None or not mlps:
        return tile_tokens or total
    hidden = hidden.reshape(1, -1, hidden.shape[-1])
    many = min(hidden.shape[1], TILE_PROBED.get(hidden.device.type, TILE_PROBED_ELSEWHERE))
    few = max(1, many // 2)
    least, most = (_peak(mlps[0], hidden[:, :n]) for n in (few, many))
    line = Line.through(few, least, many, most)
    budget = max(total * hidden.shape[-1] * hidden.element_size() // 2, int(line.base + FEWEST_ROWS * line.slope))
    need = Need(total, line(total), int(line.base), math.ceil(line.slope))
    return _rows(need, budget)


def _rows(need: Need, budget: int) -> int:
    """Tokens of equal tiles, a multiple of `FEWEST_ROWS`, whose need stays within the budget."""
    if need.whole <= budget:
        return need.rows
    most = max(FEWEST_ROWS, (budget - need.base) // max(1, need.row))
    even = -(-need.rows // -(-need.rows // most))
    return -(-even // FEWEST_ROWS) * FEWEST_ROWS


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, tuple | list | dict):
        for each in value.values() if isinstance(value, dict) else value:
            yield from _tensors(each)


def layer_line(
    layer: nn.Module, calls: list[Captured], mlps: list[nn.Module], tile: int, total: int, batch: int, shelf: Shelf
) -> Line:
    """What a layer's backward holds beside its input, by the tokens of `total`, from runs of these calls with tiles in
    proportion. What layers share, such as angles, is part of it. batch: how many sequences `total` tokens are."""
    inside = {id(m) for m in layer.modules()}
    own = [m for m in mlps if id(m) in inside]
    attach(layer, Keeper(Keep(), shelf))
    for mlp in own:
        swap(mlp, TiledForm())
    peaks = []
    try:
        for call in calls:
            for mlp in own:
                mlp.__dict__[TILE] = max(1, tile * call.tokens // total)
            shared = held(_tensors((call.args, call.kwargs)))
            peaks.append((call.tokens, shared + _peak(layer, *call)))
    finally:
        for mlp in own:
            unswap(mlp)
        detach(layer)
    line = Line.fitted(peaks)
    return line._replace(curve=line.curve / batch)  # scores are those of each sequence by itself


def _peak(module: nn.Module, x: Tensor, args: tuple = (), kwargs: dict[str, Any] | None = None) -> int:
    """What a forward and backward of `module` hold at their peak besides what is there before, in a second run: in the
    first, kernels are compiled and libraries take workspaces. Gradients of parameters are there before, as after a
    first micro-batch; a new one is held until it is added.

    On a CPU what the results of operators take: their scratch memory grows with the square of the tokens there, where
    attention is a plain product.
    """
    trained = [p for p in module.parameters() if p.requires_grad]

    def run() -> None:
        leaf = x.detach().requires_grad_()
        with torch.enable_grad():
            out = module(leaf, *args, **(kwargs or {}))
            loss = _Sum.apply(out[0] if isinstance(out, tuple) else out)
            del out  # what a layer returned is gone when its backward begins, or counted as the next one's input
            loss.backward()

    run()
    try:
        if x.device.type != "cpu" or torch_private.DispatchMode is None:
            return peak_memory(run, x.device)
        with LiveBytes() as live:
            there = (x, args, kwargs, [*module.parameters(), *module.buffers()], [p.grad for p in trained])
            live.ignore(_tensors(there))
            run()
        return live.peak
    finally:
        for p in trained:
            p.grad = None


class _Sum(torch.autograd.Function):
    """A scalar whose gradient is a tensor of its own in memory, as one from a layer above is."""

    @staticmethod
    def forward(ctx: Any, out: Tensor) -> Tensor:
        ctx.like = out.shape, out.dtype, out.device
        return out.new_zeros(())

    @staticmethod
    def backward(ctx: Any, _: Tensor) -> Tensor:
        shape, dtype, device = ctx.like
        return torch.zeros(shape, dtype=dtype, device=device)
