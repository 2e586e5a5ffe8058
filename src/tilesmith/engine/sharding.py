"""DTensor rules: an op that works row by row, or element by element, is never gathered when those are sharded."""

from __future__ import annotations

from typing import Any

from torch import Tensor

_registered: set[str] = set()


def ensure(op: Any, args: tuple) -> None:
    """Register the op's DTensor rule at its first call with a DTensor."""
    from torch.distributed.tensor import DTensor

    if op.name not in _registered and any(isinstance(a, DTensor) for a in args):
        _registered.add(op.name)
        _RULES[op.sharding](op)


def _rows(op: Any, last: bool = False) -> None:
    """Tensors named in `fold` may be sharded along any dim (the last too, if `last`); the rest replicate.

    An output of a vjp that is the gradient of a replicated tensor is a partial sum over the row shards.
    """
    from torch.distributed.tensor import Partial, Replicate, Shard
    from torch.distributed.tensor.experimental import register_sharding

    @register_sharding(op.handle)
    def strategies(*specs, **kwargs):
        first = next(s for n, s in zip(op.parameters, specs) if n in op.fold)
        found = []
        # a causal op looks along the last two dims at where a row is
        whole_dims = 0 if last else 2 if dict(zip(op.parameters, specs)).get("causal") else 1
        for dim in [None, *range(first.ndim - whole_dims)]:
            row = Replicate() if dim is None else Shard(dim)
            whole = Replicate() if dim is None else Partial()
            outs = [row if _row_output(op, n) else whole for n in op.outputs]
            ins = [
                None
                if not hasattr(s, "placements") and not isinstance(s, Tensor)
                else row
                if _row_input(op, n)
                else Replicate()
                for n, s in zip(op.parameters, specs)
            ]
            found.append((outs, [*ins, *([None] * (len(specs) - len(ins)))]))
        return found


def _row_input(op: Any, name: str) -> bool:
    return name in op.fold


def _row_output(op: Any, name: str) -> bool:
    if not op.name.endswith("_vjp"):
        return True
    return name[1:] in op.fold


def _elementwise(op: Any) -> None:
    """As rows, where the last dim is like any other."""
    _rows(op, last=True)


_RULES = {"rows": _rows, "elementwise": _elementwise}
