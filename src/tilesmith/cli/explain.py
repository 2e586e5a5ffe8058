"""`tilesmith explain`: which kernel serves a call of an op, and why not the others."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from tilesmith.cli.output import console, device_named, dtype_named, op_named, print_json, refuse, setting

if TYPE_CHECKING:
    from tilesmith.engine import Choice
    from tilesmith.hardware import Arch


def command(
    op: Annotated[str, typer.Argument(help="An op, such as rms_norm.")],
    shape: Annotated[
        list[str] | None, typer.Option(help="x=4096x8192: an argument's size. Give each that changes.")
    ] = None,
    set_: Annotated[list[str] | None, typer.Option("--set", help="Another argument: causal=true. Repeatable.")] = None,
    case: Annotated[str | None, typer.Option(help="Which of the op's example inputs to start from.")] = None,
    dtype: Annotated[str | None, typer.Option(help="float32, float16 or bfloat16.")] = None,
    device: Annotated[str | None, typer.Option(help="cpu, cuda, cuda:1, xpu, mps.")] = None,
    arch: Annotated[str | None, typer.Option(help="sm80, sm90, gfx942, ...: a GPU that need not be here.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Which kernels serve a call of an op and its backward, and why not the others.

    Without options the call is the op's first example. Tensors are not filled: only their metadata matters. With
    --arch, or --device cuda where there is none, it is what the facts about that GPU and the kernels' own rules say.
    """
    import torch

    from tilesmith.cli.recorder import choices_of

    declared = op_named(op)
    there = _arch(arch, device)
    where = torch.device("cpu") if there is not None else device_named(device)
    options = dict(setting(text, "causal=true") for text in set_ or [])
    args = _arguments(op, case, dict(map(_size, shape or [])), options)
    kind = torch.bfloat16 if there is not None and dtype is None else dtype_named(dtype, where)
    built = _empty(args, where, kind)
    try:
        choices = choices_of(declared, built, there)
    except (TypeError, ValueError) as problem:
        refuse(str(problem))
    on = str(there or where)
    if as_json:
        shown = {name: _show(value) for name, value in built.items()}
        print_json({"op": op, "device": on, "arguments": shown, "choices": list(map(as_dict, choices))})
        return
    if there is not None:
        console.print(f"As on {on}, from its facts; nothing was run.", style="dim", highlight=False)
    console.print(", ".join(f"{name} {_show(value)}" for name, value in built.items()), style="dim", highlight=False)
    for choice in choices:
        console.print(str(choice), highlight=False, markup=False)


def _arch(name: str | None, device: str | None) -> Arch | None:
    """The GPU that is not here for which to explain, or None: then it is a device that is."""
    from tilesmith.hardware import arch_named, detect_available_devices

    kind = (device or "").partition(":")[0]
    if name is None and kind == "cuda" and not detect_available_devices()["cuda"]:
        name = "sm90"
    if name is None:
        return None
    try:
        return arch_named(name)
    except ValueError as problem:
        refuse(f"--arch: {problem}")


def as_dict(choice: Choice) -> dict:
    """A choice as plain data."""
    return {
        "op": choice.kernel.op,
        "kernel": choice.kernel.backend,
        "because": choice.because,
        "rejected": {backend: list(reasons) for backend, reasons in choice.rejected},
        "note": choice.note,
    }


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
        args[name] = (
            T(*size, dtype=old.dtype, grad=old.grad, layout=old.layout, columns_of=old.columns_of)
            if isinstance(old, T)
            else T(*size)
        )
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

    built: dict = {}
    for name, arg in args.items():
        whole = getattr(arg, "columns_of", None)
        built[name] = build(arg) if whole is None else built[whole][..., : arg.shape[-1]]
    return built


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
