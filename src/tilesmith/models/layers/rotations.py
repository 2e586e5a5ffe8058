"""How a function rotates queries and keys, found out on small inputs, and the function that does so by the op."""

from __future__ import annotations

import contextlib
import inspect
import itertools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tilesmith import ops
from tilesmith.rewrite import Unlike, given, probe

# How a table of R features stores its R / 2 angles, and the view that has each of them once.
LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "halves": lambda table: table[..., : table.shape[-1] // 2],
    "pairs": lambda table: table[..., ::2],
    "single": lambda table: table,
}
SPREAD: dict[str, Callable[[Tensor], Tensor]] = {
    "halves": lambda angles: torch.cat((angles, angles), dim=-1),
    "pairs": lambda angles: angles.repeat_interleave(2, dim=-1),
    "single": lambda angles: angles,
}


class Rotation(NamedTuple):
    """How a function rotates: the layout of its tables, whether pairs are neighbours, whether the angles are opposite
    ones, whether it first moves neighbours into halves, and what it takes: "q, k, cos, sin" with heads before tokens or
    by `unsqueeze_dim`; "x, sin, cos" and "q, k, cis", a complex table, with tokens before heads; "q, k, cis, heads"
    with heads before tokens."""

    layout: str
    interleaved: bool
    opposite: bool = False
    moved: bool = False
    takes: str = "q, k, cos, sin"

    def __str__(self) -> str:
        told = "neighbouring features" if self.interleaved else "the halves of a head"
        if self.moved:
            told += ", into which it moves neighbours first"
        return f"{told} by the opposite angles" if self.opposite else told

    def options(self) -> dict[str, bool]:
        """What `ops.rope` is to be told beside the angles."""
        return {"interleaved": self.interleaved or self.moved, "halved": self.moved}


def rotation(function: Callable[..., Any], how: Rotation) -> Callable[..., Any]:
    """A function with the parameters of `function` that rotates through the op, and calls it for other ranks."""
    angles = angles_of_call(function, how)

    def rotate(q: Tensor, k: Tensor, *more: Any, **named: Any) -> tuple[Tensor, Tensor]:
        found = angles(q, k, *more, **named)
        if found is None:
            return function(q, k, *more, **named)
        cos, sin, heads = found
        if heads == 2:
            q, k = q.transpose(1, 2), k.transpose(1, 2)
        q, k = ops.rope(q, k, cos, sin, **how.options())
        return (q.transpose(1, 2), k.transpose(1, 2)) if heads == 2 else (q, k)

    def rotate_one(x: Tensor, sin: Tensor, cos: Tensor) -> Tensor:
        wider = torch.promote_types(x.dtype, cos.dtype) is not x.dtype  # then the function's result is wider, too
        if x.ndim != 4 or cos.ndim != 3 or wider:
            return function(x, sin, cos)
        return ops.rope(x.transpose(1, 2), None, cos, sin, interleaved=how.interleaved)[0].transpose(1, 2)

    return rotate_one if how.takes == "x, sin, cos" else rotate


def angles_of_call(function: Callable[..., Any], how: Rotation) -> Callable[..., tuple[Tensor, Tensor, int] | None]:
    """What tells, of the arguments q, k, ... of a rotation, (cos, sin, the dim of heads), each angle once; None where
    the op does not serve them."""
    single = LAYOUTS[how.layout]
    others = list(inspect.signature(function).parameters)[4:]
    place = others.index("unsqueeze_dim") if "unsqueeze_dim" in others else None

    def served(q: Tensor, k: Tensor | None, table: Tensor) -> bool:
        return k is not None and q.ndim == k.ndim == 4 and table.ndim == 3 and q.dtype is k.dtype

    def angles(
        q: Tensor, k: Tensor | None, cos: Tensor, sin: Tensor, *more: Any, **named: Any
    ) -> tuple[Tensor, Tensor, int] | None:
        heads = given("unsqueeze_dim", place, more, named, 1)
        if heads not in (1, 2) or not served(q, k, cos):
            return None
        return single(cos), -single(sin) if how.opposite else single(sin), heads

    def of_complex(q: Tensor, k: Tensor | None, cis: Tensor) -> tuple[Tensor, Tensor, int] | None:
        heads = 1 if how.takes == "q, k, cis, heads" else 2
        return (cis.real, cis.imag, heads) if served(q, k, cis) else None

    return angles if how.takes == "q, k, cos, sin" else of_complex


def takes(function: Callable[..., Any]) -> str:
    """What a rotation takes, by the number and the names of its parameters; see `Rotation`."""
    names = list(inspect.signature(function).parameters)
    if names[1:] == ["sin", "cos"]:
        return "x, sin, cos"
    return "q, k, cis" if len(names) == 3 else "q, k, cos, sin"


def recognise(function: Callable[..., Any]) -> list[Rotation]:
    """The rotations for which the op gives what `function` gives on small inputs."""
    fits, kind = [], takes(function)
    if kind == "q, k, cos, sin":
        either = (False, True)
        every = [Rotation(*how) for how in itertools.product(LAYOUTS, either, either, either)]
    else:
        kinds = (kind, "q, k, cis, heads") if kind == "q, k, cis" else (kind,)
        every = [Rotation("single", interleaved, takes=one) for one in kinds for interleaved in (False, True)]
    for how in every:
        if how.moved and how.interleaved:
            continue
        try:
            if not all(_agrees(function, how, dtype, 8) for dtype in (torch.float32, torch.bfloat16)):
                continue
        except Unlike:
            continue
        if kind == "q, k, cos, sin":
            with contextlib.suppress(Unlike):  # it may not take angles for less than the whole head
                if not _agrees(function, how, torch.float32, 4):
                    continue
        fits.append(how)
    return fits


def _agrees(function: Callable[..., Any], how: Rotation, dtype: torch.dtype, pairs: int) -> bool:
    """Whether the op does what `function` does when the angles are for `pairs` of the 8 pairs of a head."""
    q, k = probe.wave(2, 4, 5, 16).to(dtype), probe.wave(2, 2, 5, 16, phase=1.0).to(dtype)
    angles = probe.wave(2, 5, pairs, phase=2.0)
    cos, sin = (SPREAD[how.layout](table).to(dtype) for table in (angles.cos(), angles.sin()))
    if how.takes in ("x, sin, cos", "q, k, cis"):
        q, k = q.transpose(1, 2), k.transpose(1, 2)
    inputs = {
        "q, k, cos, sin": (q, k, cos, sin),
        "x, sin, cos": (q, sin, cos),
        "q, k, cis": (q, k, torch.complex(angles.cos(), angles.sin())),
        "q, k, cis, heads": (q, k, torch.complex(angles.cos(), angles.sin())),
    }[how.takes]
    found = probe.call(function, *(x.clone() for x in inputs))
    wanted = probe.call(rotation(function, how), *inputs)
    found, wanted = (x if isinstance(x, tuple) else (x,) for x in (found, wanted))
    if len(found) != len(wanted) or not all(isinstance(x, Tensor) for x in found):
        return False
    allowed = 4 * torch.finfo(dtype).eps  # the function may round each product, the op rounds once
    return all(
        f.shape == w.shape and f.dtype is w.dtype and bool((f - w).abs().max() <= allowed * w.abs().max())
        for f, w in zip(found, wanted)
    )
