"""The repeated blocks of a model, such as its decoder layers, and what their calls are given."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention.flex_attention import BlockMask

from tilesmith.engine import torch_private
from tilesmith.rewrite import Form, forms, original_class, swap, unswap

_PLAIN = (type(None), bool, int, float, str, Tensor, BlockMask, torch.dtype, torch.device)
CACHE = "past_key_values"
"""What transformers calls the argument of a block that is a cache of keys and values."""


class BlockForm(Form):
    """A form of a whole block. It wraps the block's forward as it is, so it is always the newest form of a block."""


def repeated_blocks(model: nn.Module) -> dict[str, nn.Module]:
    """The outermost modules that stand in an `nn.ModuleList` or `nn.Sequential` beside another one of their class, by
    name. Modules without children of their own are not blocks."""
    found: dict[str, nn.Module] = {}
    for fqn, module in model.named_modules():
        if not isinstance(module, nn.ModuleList | nn.Sequential) or _inside(fqn, found):
            continue
        made_of_parts = {n: child for n, child in module.named_children() if next(child.children(), None) is not None}
        counts = Counter(original_class(type(child)) for child in made_of_parts.values())
        prefix = f"{fqn}." if fqn else ""
        found |= {prefix + n: c for n, c in made_of_parts.items() if counts[original_class(type(c))] > 1}
    return found


def _inside(fqn: str, blocks: Iterable[str]) -> bool:
    return any(fqn == name or fqn.startswith(f"{name}.") for name in blocks)


def take_off(model: nn.Module) -> list[tuple[nn.Module, Form, dict[str, Any]]]:
    """Take the forms of whole blocks off, as rules look at what is below them. Returns what `put_back` needs."""
    taken = []
    for module in model.modules():
        while (held := forms(module)) and isinstance(held[0], BlockForm):
            state = {name: module.__dict__[name] for name in held[0].state if name in module.__dict__}
            if not unswap(module):
                break  # another library's class is on top
            taken.append((module, held[0], state))
    return taken


def put_back(taken: list[tuple[nn.Module, Form, dict[str, Any]]]) -> None:
    """Give the modules their forms back that `take_off` took."""
    for module, form, state in reversed(taken):
        swap(module, form)
        module.__dict__.update(state)


def foreign(args: Iterable[Any], kwargs: dict[str, Any]) -> str:
    """The class of an argument that holds state of its own, such as a cache; "" if there is none."""
    for value in (*args, *kwargs.values()):
        if isinstance(value, _PLAIN):
            continue
        if isinstance(value, tuple | list):
            inner = foreign(value, {})
        elif isinstance(value, dict):
            inner = foreign((), value)
        else:
            return type(value).__name__
        if inner:
            return inner
    return ""


def watched() -> str:
    """What sees each operation of this call, or transforms it, so that it has to run as it is; "" if nothing does."""
    if torch_private.dispatch_modes():
        return "a dispatch mode is on (fake tensors, a policy of selective checkpointing)"
    if torch_private.functorch() is not None:
        return "a transform of torch.func is at work"
    return ""
