"""Runs of tokens of two tensors, copied to where other ranks read them, or added where they come back.

Two tensors at once: keys travel with values, and their gradients with each other, so that a step needs one launch.
"""

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from tilesmith.engine import Op
from tilesmith.engine.argument_checks import floating
from tilesmith.ops.attn import runs_reference as reference
from tilesmith.ops.attn.runs_reference import each_run


def _writes(*args: Any) -> None:
    """There is no output."""


def _check_copy(a: Tensor, b: Tensor, into_a: Tensor, into_b: Tensor, runs: Sequence[int]) -> None:
    tensors = {"a": a, "b": b, "into_a": into_a, "into_b": into_b}
    _check_tensors("copy_runs", tensors)
    for x, y in (("a", "into_a"), ("b", "into_b")):
        _check_alike("copy_runs", tensors, x, y, tokens=False)
        _check_dtype("copy_runs", tensors, x, y)
    _check_runs("copy_runs", runs, ("a", a.shape[2]), ("into_a", into_a.shape[2]))
    ends = sorted((to, to + tokens) for _, to, tokens in each_run(runs) if tokens)
    for (low, high), (begin, end) in pairwise(ends):
        if begin < high:
            raise ValueError(
                f"copy_runs: runs {list(runs)} go to tokens {low} to {high} and to {begin} to {end} of into_a, which "
                "overlap; each token may have one run"
            )


def _check_add(
    a: Tensor, b: Tensor, more_a: Tensor, more_b: Tensor, into_a: Tensor, into_b: Tensor, runs: Sequence[int]
) -> None:
    tensors = {"a": a, "b": b, "more_a": more_a, "more_b": more_b, "into_a": into_a, "into_b": into_b}
    _check_tensors("add_runs", tensors)
    for name, x in tensors.items():
        floating("add_runs", name, x)
    for x in ("a", "b"):
        _check_alike("add_runs", tensors, x, f"more_{x}", tokens=False)
        _check_alike("add_runs", tensors, x, f"into_{x}", tokens=True)
    _check_runs("add_runs", runs, ("more_a", more_a.shape[2]), ("a", a.shape[2]))


def _check_tensors(op: str, tensors: dict[str, Tensor]) -> None:
    a = tensors["a"]
    for name, x in tensors.items():
        if x.ndim != 4:
            raise ValueError(f"{op}: {name} has shape {tuple(x.shape)}; it must be [B, H, T, D]")
        if x.device != a.device:
            raise ValueError(f"{op}: {name} is on {x.device}, a on {a.device}; move them to one device")
        if x.requires_grad and torch.is_grad_enabled():
            raise ValueError(
                f"{op}: {name} requires a gradient, but writing has none; call it under torch.no_grad() or with "
                "detached tensors"
            )
        if name.startswith("into") and any(n > 1 and step == 0 for n, step in zip(x.shape, x.stride())):
            raise ValueError(f"{op}: {name} is expanded (strides {x.stride()}), so places share memory; pass a copy")
    if tensors["b"].shape[:3] != a.shape[:3]:
        raise ValueError(
            f"{op}: b has shape {tuple(tensors['b'].shape)}; but for D it must be a's, {tuple(a.shape)}"
        )  # fmt: skip
    if "more_a" in tensors and tensors["more_b"].shape[2] != tensors["more_a"].shape[2]:
        raise ValueError(
            f"{op}: more_b has {tensors['more_b'].shape[2]} tokens, more_a {tensors['more_a'].shape[2]}; "
            "they must have equally many"
        )
    if tensors["into_b"].shape[2] != tensors["into_a"].shape[2]:
        raise ValueError(
            f"{op}: into_b has {tensors['into_b'].shape[2]} tokens, into_a {tensors['into_a'].shape[2]}; "
            "they must have equally many"
        )


def _check_alike(op: str, tensors: dict[str, Tensor], x: str, y: str, tokens: bool) -> None:
    given, wanted = list(tensors[y].shape), list(tensors[x].shape)
    if not tokens:
        given[2] = wanted[2]
    if given != wanted:
        but = "" if tokens else "but for tokens "
        raise ValueError(
            f"{op}: {y} has shape {tuple(tensors[y].shape)}; {but}it must be {x}'s, {tuple(tensors[x].shape)}"
        )


def _check_dtype(op: str, tensors: dict[str, Tensor], x: str, y: str) -> None:
    if tensors[x].dtype != tensors[y].dtype:
        raise TypeError(f"{op}: {y} has dtype {tensors[y].dtype}, {x} {tensors[x].dtype}; they must be the same")


def _check_runs(op: str, runs: Sequence[int], source: tuple[str, int], target: tuple[str, int]) -> None:
    if len(runs) % 3:
        raise ValueError(f"{op}: runs has {len(runs)} numbers; it must have three for each run: from, to, tokens")
    for at, to, tokens in each_run(runs):
        for first, (name, most) in ((at, source), (to, target)):
            if first < 0 or tokens < 0 or first + tokens > most:
                raise ValueError(
                    f"{op}: runs has a run of {tokens} tokens from {first} on of {name}, which has {most} tokens"
                )


copy_runs = Op(
    reference.copy_runs,
    fake=_writes,
    outputs=(),
    check=_check_copy,
    mutates=("into_a", "into_b"),
    kernels={"triton": "tilesmith.ops.attn.triton.runs"},
)

add_runs = Op(
    reference.add_runs,
    fake=_writes,
    outputs=(),
    check=_check_add,
    mutates=("into_a", "into_b"),
    together=(("a", "into_a"), ("b", "into_b")),
    kernels={"triton": "tilesmith.ops.attn.triton.runs"},
)
