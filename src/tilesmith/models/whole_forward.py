"""The forward of a language model from tokens to the loss, as one call that can be recorded.

Beside its blocks a step on few tokens waits for the embedding, masks, angles, the last norm and the loss: each is
launched by itself, and transformers reads positions back to the host. Recorded with the blocks, they cost one launch.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import inspect
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from tilesmith.models.attention.mask_values import MaskValues
from tilesmith.models.blocks import BlockForm, Foreign, checkpoints
from tilesmith.models.layers.logits import LazyLogits
from tilesmith.models.recorded_calls import Kept, flatten, rebuild
from tilesmith.rewrite import given

GRAPHS = "_tilesmith_graphs"
"""The attribute by which modules know what is recorded of their model."""
_TRAINED = "weights beside the blocks are trained, of whose gradients it would hold copies"
_CHECKPOINTED = "its blocks are checkpointed"


@dataclass(frozen=True)
class WholeForm(BlockForm):
    """The forward of a model that computes its own loss, recorded from tokens to the loss when it is given labels."""

    state: ClassVar[tuple[str, ...]] = (GRAPHS,)

    def namespace(self, base: type) -> dict[str, Any]:
        whole = base.forward
        names = tuple(inspect.signature(whole).parameters)[1:]
        place = names.index("labels")
        decodes = any(name.startswith("decoder_") for name in names)  # what an encoder has read

        def plain(model: nn.Module, args: tuple, kwargs: dict[str, Any]) -> Any:
            return whole(model, *args, **kwargs)

        def apart(model: nn.Module, args: tuple, kwargs: dict[str, Any]) -> Any:
            with model.__dict__[GRAPHS].unrecorded_blocks() as values, values.known():
                return take_apart(whole(model, *args, **kwargs))

        @functools.wraps(whole)
        def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
            graphs = self.__dict__.get(GRAPHS)
            compiling = torch.compiler.is_compiling()
            if compiling or graphs is None or given("labels", place, args, kwargs) is None:
                return whole(self, *args, **kwargs)
            read = functools.partial(MaskValues.of, dict(zip(names, args)) | kwargs, decodes)
            return graphs.run_whole((plain, apart), read, self, args, kwargs)

        return {"forward": forward}


def take_apart(out: Any) -> tuple[Kept, list[Tensor]]:
    """What a forward returned as its tensors, and what makes the same of others like them. Raises Foreign."""
    tensors: list[Tensor] = []
    if type(out) is tuple:
        parts = [_part(value, tensors) for value in out]
        return Kept(lambda given: tuple(make(given) for make in parts)), tensors
    if not (isinstance(out, dict) and dataclasses.is_dataclass(out)):
        return Kept(_part(out, tensors)), tensors
    cls = type(out)  # an output of transformers: a dataclass, and a dict of those of its fields that are not None
    fields = {name: _part(value, tensors) for name, value in out.items()}
    return Kept(lambda given: cls(**{name: make(given) for name, make in fields.items()})), tensors


def _part(value: Any, tensors: list[Tensor]) -> Callable[[list[Tensor]], Any]:
    if not isinstance(value, LazyLogits):
        spec = flatten(value, tensors)
        return lambda given: rebuild(spec, given)
    weight, bias, dtype, steps, calls = value.weight, value.bias, value.dtype, value.steps, value.calls
    own = isinstance(weight, nn.Parameter) and (bias is None or isinstance(bias, nn.Parameter))
    if not own or value.known is not None:
        raise Foreign("LazyLogits that was computed" if own else "LazyLogits of weights that were cast")
    place = len(tensors)
    tensors += [value.hidden, value.sample]
    return lambda given: LazyLogits(given[place], weight, bias, dtype, steps, given[place + 1], calls)


def put_together(returned: tuple[Kept, list[Tensor]]) -> Any:
    """What a forward returns, out of what `take_apart` made of it."""
    kept, tensors = returned
    return kept.value(tensors)


def unfit(model: nn.Module, blocks: Iterable[nn.Module]) -> tuple[str, Callable[[], bool]] | None:
    """Why the forward of a model is not recorded around its blocks, and whether that still holds when asked again."""
    inside = {m for block in blocks for m in block.modules()}
    for module in model.modules():
        if checkpoints(module):
            return _CHECKPOINTED, functools.partial(checkpoints, module)
        if module not in inside:
            for parameter in module._parameters.values():
                if parameter is not None and parameter.requires_grad:
                    return _TRAINED, functools.partial(getattr, parameter, "requires_grad")
    return None


def blocks_of(model: nn.Module) -> list[nn.Module]:
    """The blocks of a model that are recorded by what it is recorded by."""
    graphs = model.__dict__.get(GRAPHS)
    return [m for m in model.modules() if m is not model and m.__dict__.get(GRAPHS) is graphs]


@contextlib.contextmanager
def switched(holder: Any, name: str, value: Any) -> Iterator[None]:
    """Inside, an attribute has another value."""
    before = getattr(holder, name)
    setattr(holder, name, value)
    try:
        yield
    finally:
        setattr(holder, name, before)
