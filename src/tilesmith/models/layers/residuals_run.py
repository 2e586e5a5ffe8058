"""Which sums of a module's forward go into norms: seen in a run of a copy without data, on the device meta.

For what a report may say of a forward whose source does not show it.
"""

from __future__ import annotations

import contextlib
import copy
import inspect
import linecache
import random
import sys
import warnings
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, ValuesView
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from tilesmith import rewrite
from tilesmith.engine import torch_private
from tilesmith.models.layers.norms import norm_of, width_of
from tilesmith.models.layers.residuals_spelling import shortened
from tilesmith.rewrite import Unlike, probe

_ADDITIONS = frozenset({"add", "add_"})
_OTHER_SUMS = frozenset({"sum", "lerp", "lerp_", "addcmul", "addcmul_", "scatter_add", "index_add"})
# What hands the same values on, in another shape or dtype.
_SAME_VALUES = frozenset(
    {"view", "_unsafe_view", "reshape", "transpose", "t", "permute", "unsqueeze", "squeeze", "expand", "clone", "slice"}
    | {"select", "alias", "detach", "_to_copy"}
)
_MOST_MODULES = 64  # a block has fewer; a whole Llama of 423 took 1.5 s to copy and to run


class Taken(NamedTuple):
    """A sum that a norm took. norm: the norm's name in the module; text: the line of source that makes the sum;
    added: whether it is one of two tensors, not the sum over a dimension, say."""

    norm: str
    text: str
    added: bool


class Run(NamedTuple):
    """What norms took of sums, the names of the arguments that the forward was given, and whether it returned a sum of
    two tensors."""

    taken: tuple[Taken, ...]
    given: tuple[str, ...]
    leaves: bool = False

    def told(self, what: str) -> list[str]:
        """A sentence for each place that makes sums, on the norms that take them."""
        norms: dict[str, list[str]] = {}
        for taken in sorted(self.taken, key=lambda taken: taken.norm.count(".")):  # the module's own first
            norms.setdefault(taken.text, []).append(taken.norm)
        sentences = []
        for text, names in norms.items():
            listed = ", ".join(names) if len(names) < 4 else f"{names[0]}, {names[1]} and {len(names) - 2} more"
            verb = "takes" if len(names) == 1 else "take"
            sentences.append(f"{listed} {verb} {what}: {shortened(text, 80)}")
        return sentences


def sums_into_norms(module: nn.Module) -> Run:
    """What norms of ours in `module` take of sums that its own forward, not that of a child, makes: in training and in
    evaluation, given one small tensor for each argument that it requires. Raises `Unlike` where it cannot be run so.

    Neither the module nor its tensors are touched, and no memory is allocated for those of the copy.
    """
    norms = {name: child for name, child in module.named_modules() if norm_of(child) is not None}
    refused = _refused(module)
    if refused:
        raise Unlike(refused)
    twin = probe.call(_copied, module)
    first = next(iter(norms.values()))
    dtype = next((p.dtype for p in module.parameters() if p.is_floating_point()), torch.float32)
    numbers = torch.empty(2, 3, width_of(first), dtype=dtype, device="meta")
    try:
        return _watched(twin, numbers, norms)
    except Unlike as error:
        try:
            return _watched(twin, torch.empty(2, 3, dtype=torch.int64, device="meta"), norms)  # of tokens
        except Unlike:
            raise error from None


def _refused(module: nn.Module) -> str:
    """Why a copy of `module` is not run, "" if it may be."""
    if torch_private.DispatchMode is None:
        return "this version of PyTorch lets nobody watch a run"
    for count, child in enumerate(module.modules()):
        if count > _MOST_MODULES:
            return f"it has more than {_MOST_MODULES} modules"
        if "forward" in child.__dict__:
            return "a forward in it was replaced on the instance"
        if isinstance(child, torch.jit.ScriptModule):
            return "a module in it is TorchScript"
    return ""


def _copied(module: nn.Module) -> nn.Module:
    """A copy of `module` as it was before any rewrite, without hooks, its tensors on the device meta."""
    memo: dict[int, Any] = {}
    for child in module.modules():
        memo.update(_unpacked(child))
        for name, value in vars(child).items():
            if isinstance(value, dict) and "_hooks" in name:
                memo[id(value)] = OrderedDict()
            elif type(value).__module__.partition(".")[0] == "tilesmith":
                memo[id(value)] = value  # a report
        for tensor in _tensors(child):
            if isinstance(tensor, nn.Parameter):
                memo[id(tensor)] = nn.Parameter(_on_meta(tensor), requires_grad=False)
            else:
                memo[id(tensor)] = _on_meta(tensor)
    made = copy.deepcopy(module, memo)
    if {id(child) for child in made.modules()} & {id(child) for child in module.modules()}:
        raise Unlike("a module in it cannot be copied")
    return rewrite.undo(made)


def _unpacked(child: nn.Module) -> dict[int, nn.Module]:
    """For a linear layer that keeps its weight packed: a plain one by its id, since the copy lacks what unpacks it."""
    weight = child._parameters.get("weight")
    if not isinstance(child, nn.Linear) or weight is None or weight.dtype.is_floating_point:
        return {}
    dtype = getattr(child, "compute_dtype", None)  # of bitsandbytes
    return {
        id(child): nn.Linear(child.in_features, child.out_features, child.bias is not None, device="meta", dtype=dtype)
    }


def _tensors(child: nn.Module) -> Iterator[Tensor]:
    """Parameters, buffers and what attributes hold, so that no data is copied."""
    for value in vars(child).values():
        held = list(value.values()) if isinstance(value, dict) else value
        for one in held if isinstance(held, (list, tuple)) else [held]:
            if isinstance(one, Tensor):
                yield one


def _on_meta(tensor: Tensor) -> Tensor:
    return torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")


def _watched(twin: nn.Module, x: Tensor, norms: Mapping[str, nn.Module]) -> Run:
    """What is seen when `twin` is run on `x`."""
    kinds = inspect.Parameter
    parameters = inspect.signature(twin.forward).parameters
    named = [p for p in parameters.values() if p.kind not in (kinds.VAR_POSITIONAL, kinds.VAR_KEYWORD)]
    required = [p for p in named if p.default is kinds.empty] or named[:1]
    optional = [p for p in named if p.default is None]
    watch = _Watch(norms)
    handles = [handle for name, child in twin.named_modules() for handle in watch.on(name, child)]
    try:
        for training in (True, False):
            probe.call(_run, twin.train(training), watch, required, x)
        if optional:
            with contextlib.suppress(Unlike):  # nothing is claimed about them
                probe.call(_run, twin, watch, [p for p in named if p in required or p in optional], x)
    finally:
        for handle in handles:
            handle.remove()
    return Run(tuple(dict.fromkeys(watch.taken)), tuple(p.name for p in required), watch.leaves)


def _run(twin: nn.Module, watch: _Watch, given: list[inspect.Parameter], x: Tensor) -> None:
    by_name = {p.name: x for p in given if p.kind is not p.POSITIONAL_ONLY}
    watch.running.clear()
    state = random.getstate()  # of layers that are skipped at random
    try:
        with warnings.catch_warnings(), torch.device("meta"), watch:
            warnings.simplefilter("ignore")
            twin(*[x] * (len(given) - len(by_name)), **by_name)
    finally:
        random.setstate(state)


class _Watch(torch_private.DispatchMode or object):  # type: ignore[misc]
    """Records sums that are made while the outermost module is the innermost one that runs, and who takes them."""

    def __init__(self, norms: Mapping[str, nn.Module]):
        super().__init__()
        self.norms = norms
        self.running: list[str] = []
        self.taken: list[Taken] = []
        self.leaves = False
        self._sums: dict[int, tuple[Tensor, str, bool]] = {}  # by id; with the tensor, so that its id stays its own

    def on(self, name: str, child: nn.Module) -> list[torch.utils.hooks.RemovableHandle]:
        """Hooks that tell when a module runs, and what a norm takes."""

        def entered(module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
            self.running.append(name)
            for given in (*args, *kwargs.values()) if name in self.norms else ():
                if id(given) in self._sums:
                    self.taken.append(Taken(name, *self._sums[id(given)][1:]))

        def left(module: nn.Module, args: tuple, output: Any) -> None:
            self.running.pop()
            if name == "":
                held = output.values() if isinstance(output, dict) else output
                returned = held if isinstance(held, (tuple, list, ValuesView)) else [held]
                self.leaves = self.leaves or any(self._sums.get(id(one), (None, "", False))[2] for one in returned)

        return [
            child.register_forward_pre_hook(entered, with_kwargs=True),
            child.register_forward_hook(left, always_call=True),
        ]

    def __torch_dispatch__(self, function: Callable, types: Any, args: tuple = (), kwargs: Any = None) -> Any:
        made = function(*args, **(kwargs or {}))
        name = function.overloadpacket.__name__
        tensors = [value for value in (*args, *(kwargs or {}).values()) if isinstance(value, Tensor)]
        if not isinstance(made, Tensor) or not tensors:
            return made
        added = name in _ADDITIONS and len(tensors) == 2
        if self.running == [""] and (added or name in _OTHER_SUMS):
            self._sums[id(made)] = (made, _line(sys._getframe(1)), added)
        elif name in _SAME_VALUES and id(tensors[0]) in self._sums:
            self._sums[id(made)] = (made, *self._sums[id(tensors[0])][1:])
        elif name.endswith("_"):  # it is another value now
            self._sums.pop(id(made), None)
        return made


def _line(frame: Any) -> str:
    """The line of source that runs in `frame`, or in the first one around it that is neither torch's nor ours."""
    while frame.f_back is not None and str(frame.f_globals.get("__name__")).partition(".")[0] in ("torch", "tilesmith"):
        frame = frame.f_back
    line = linecache.getline(frame.f_code.co_filename, frame.f_lineno).strip()
    return line or f"line {frame.f_lineno} of {frame.f_code.co_name}"
