"""`tilesmith explain`: which kernel serves a call of an op, and why not the others."""

from __future__ import annotations

from typing import Annotated

import typer

from tilesmith.cli.output import console, device_named, dtype_named, op_named, refuse, setting


def command(
    op: Annotated[str, typer.Argument(help="An op, such as rms_norm.")],
    shape: Annotated[
        list[str] | None, typer.Option(help="x=4096x8192: an argument's size. Give each that changes.")
    ] = None,
    set_: Annotated[list[str] | None, typer.Option("--set", help="Another argument: causal=true. Repeatable.")] = None,
    case: Annotated[str | None, typer.Option(help="Which of the op's example inputs to start from.")] = None,
    dtype: Annotated[str | None, typer.Option(help="float32, float16 or bfloat16.")] = None,
    device: Annotated[str | None, typer.Option(help="cpu, cuda, cuda:1, xpu, mps.")] = None,
) -> None:
    """Which kernels serve a call of an op and its backward, and why not the others.

    Without options the call is the op's first example. Tensors are not filled: only their metadata matters.
    """
    from tilesmith.cli.recorder import choices_of

    declared = op_named(op)
    where = device_named(device)
    options = dict(setting(text, "causal=true") for text in set_ or [])
    args = _arguments(op, case, dict(map(_size, shape or [])), options)
    built = _empty(args, where, dtype_named(dtype, where))
    try:
        choices = choices_of(declared, built)
    except (TypeError, ValueError) as problem:
        refuse(str(problem))
    console.print(", ".join(f"{name} {_show(value)}" for name, value in built.items()), style="dim", highlight=False)
    for choice in choices:
        console.print(str(choice), highlight=False, markup=False)


def _arguments(op: str, case: str | None, shapes: dict, values: dict) -> dict:
    from tilesmith.engine import T, cases

    examples = {c.name: c for c in cases(op)}
    if case is not None and case not in examples:
        refuse(f"op {op!r} has no case {case!r}; it has {', '.join(examples)}")
    if not examples:
        return {**{name: T(*size) for name, size in shapes.items()}, **values}
    args = dict(examples[case].args if case else next(iter(examples.values())).args)
    for name, size in shapes.items():
        if name not in args:
            refuse(f"--shape {name}: op {op!r} takes {', '.join(args)}")
        old = args[name]
        args[name] = T(*size, dtype=old.dtype, grad=old.grad, layout=old.layout) if isinstance(old, T) else T(*size)
    return {**args, **values}


def _empty(args: dict, device, dtype) -> dict:
    """The arguments with tensors of the right metadata and no values."""
    import torch

    from tilesmith.engine import T

    def build(arg):
        if not isinstance(arg, T):
            return arg
        # An init function may draw integers or booleans; its own small sample tells which.
        made = T(*(min(n, 1) for n in arg.shape), dtype=arg.dtype, init=arg.init, grad=arg.grad)
        try:
            kind = made.build(torch.device("cpu"), dtype, torch.Generator().manual_seed(0)).dtype
        except (RuntimeError, ValueError, IndexError):
            kind = arg.dtype or dtype
        tensor = torch.empty(arg.shape, dtype=kind, device=device)
        if arg.layout == "transposed" and tensor.ndim >= 2:
            tensor = tensor.transpose(-1, -2).contiguous().transpose(-1, -2)
        return tensor.requires_grad_(arg.grad and tensor.is_floating_point())

    return {name: build(arg) for name, arg in args.items()}


def _size(text: str) -> tuple[str, tuple[int, ...]]:
    name, equals, sizes = text.partition("=")
    numbers = sizes.replace(",", "x").split("x")
    if not equals or not all(n.isdigit() for n in numbers):
        refuse(f"--shape must be NAME=SIZExSIZE, such as x=4096x8192; got {text!r}")
    return name, tuple(map(int, numbers))


def _show(value) -> str:
    if hasattr(value, "shape"):
        return f"{str(value.dtype).removeprefix('torch.')}[{', '.join(map(str, value.shape))}]"
    return repr(value)
