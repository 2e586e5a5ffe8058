"""`tilesmith explain`: which kernel serves a call of an op, and why not the others."""

from __future__ import annotations

import difflib
import inspect
import math
from collections.abc import Iterable
from dataclasses import fields, is_dataclass
from typing import TYPE_CHECKING, Annotated

import typer

from tilesmith.cli.output import device_named, dtype_named, op_named, print_json, print_lines, refuse, refused, setting

if TYPE_CHECKING:
    from tilesmith.engine import Case, Choice, Op
    from tilesmith.hardware import Arch

_ABSENT = {"cuda": "sm90", "xpu": "pvc", "mps": "apple"}  # kind of device -> the GPU that stands for one not here


def command(
    op: Annotated[str, typer.Argument(help="An op, such as rms_norm.")],
    shape: Annotated[
        list[str] | None,
        typer.Option(help="Shape of an argument, as in x=4096x8192. Repeat for each argument that changes."),
    ] = None,
    set_: Annotated[
        list[str] | None, typer.Option("--set", help="Value of another argument, as in causal=true. Repeatable.")
    ] = None,
    case: Annotated[
        str | None, typer.Option(help="Start from this example of the op, one used by tests and benchmarks.")
    ] = None,
    dtype: Annotated[str | None, typer.Option(help="float32, float16 or bfloat16.")] = None,
    device: Annotated[str | None, typer.Option(help="cpu, cuda, cuda:1, xpu, mps.")] = None,
    arch: Annotated[
        str | None, typer.Option(help="sm80, sm90, gfx942, ...: answer for a GPU that is not in this machine.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Show which kernels serve a call of an op and its backward, and why the others do not.

    Without --shape and --case, the call has the sizes of a benchmark case, whose name is printed. With --shape, the
    other sizes are those of the op's first, small example. Nothing is computed: only the tensors' metadata matters.
    With --arch, or with --device cuda, xpu or mps on a machine without one, the answer follows from the known facts
    about that GPU.
    """
    import torch

    from tilesmith.cli.recorder import choices_of

    declared = op_named(op)
    there = _arch(arch, device)
    where = torch.device("cpu") if there is not None else device_named(device)
    options = dict(setting(text, "causal=true") for text in set_ or [])
    _check_names(declared, options)
    sizes = dict(map(_size, shape or []))
    start = case_named(op, case) if case else None if sizes else typical(op)
    if start is None and not sizes and op.endswith("_vjp"):
        forward = op.removesuffix("_vjp")
        refuse(f"{op} has no example of its own; `tilesmith explain {forward}` explains it with the forward")
    args = arguments(op, start, sizes, options)
    kind = torch.bfloat16 if there is not None and dtype is None else dtype_named(dtype, where)
    built = empty(args, kind)
    try:
        choices = choices_of(declared, built, there, where)
    except (TypeError, ValueError, NotImplementedError) as problem:  # the last: what is pinned cannot serve it
        refuse(f"{problem}{_of_the_example(args, sizes) if start is None else ''}")
    on = str(there or where)
    if as_json:
        shown = {name: _show(value) for name, value in built.items()}
        example = None if start is None else start.name
        print_json(
            {"op": op, "device": on, "case": example, "arguments": shown, "choices": list(map(as_dict, choices))}
        )
        return
    if there is not None:
        told = ("a CPU", "CPUs") if there.kind == "cpu" else (on, "that GPU")
        print_lines("For {}, from the known facts about {}; nothing was run.".format(*told), style="dim")
    if start is not None and case is None:
        print_lines(_told(start, args), style="dim")
    print_lines(", ".join(f"{name} {_show(value)}" for name, value in built.items()), style="dim")
    for choice in choices:
        print_lines(str(choice))


def _check_names(op: Op, names: Iterable[str]) -> None:
    """Refuse an argument that the op does not have, naming those first that users write."""
    for name in names:
        if name in op.parameters:
            continue
        close = difflib.get_close_matches(name, op.parameters, n=1)
        first = _written_by_users(op)
        rest = [known for known in op.parameters if known not in first]
        made = f"; made from what users write are {', '.join(rest)}" if rest else ""
        told = f"Did you mean {close[0]!r}?" if close else f"It has {', '.join(first)}{made}"
        refuse(f"--set: {op.name} has no argument {name!r}. {told}")


def _written_by_users(op: Op) -> list[str]:
    """The op's parameters that are arguments of the function that users call, or fields of those."""
    if op.door_function is None:
        return list(op.parameters)
    names: list[str] = []
    for p in inspect.signature(op.door_function).parameters.values():
        names += [f.name for f in fields(p.annotation)] if is_dataclass(p.annotation) else [p.name]
    return [name for name in names if name in op.parameters]


def _arch(name: str | None, device: str | None) -> Arch | None:
    """The GPU that is not here for which to explain, or None: then it is a device that is."""
    from tilesmith.hardware import arch_named, detect_available_devices

    kind = (device or "").partition(":")[0]
    if name is not None and device is not None:
        refuse(f"--arch {name} names a GPU that need not be here, --device {device} one that is here; give one of them")
    if name is None and not detect_available_devices().get(kind):
        name = _ABSENT.get(kind)
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


def case_named(op: str, name: str) -> Case:
    """The op's example of that name."""
    from tilesmith.bench.selection import refuse_unknown
    from tilesmith.engine import cases

    examples = {c.name: c for c in cases(op)}
    with refused("--case"):
        refuse_unknown(f"{op} has no case", [name], list(examples))
    return examples[name]


def typical(op: str) -> Case | None:
    """The call of a benchmark that stands for the op: of those with the fewest arguments the middle one; else the first
    example, if there is one."""
    from tilesmith.engine import cases

    measured = [case for case in cases(op) if "bench" in case.tags]
    given = [sum(value is not None for value in case.args.values()) for case in measured]
    plain = [case for case, count in zip(measured, given) if count == min(given)]
    return plain[len(plain) // 2] if plain else next(iter(cases(op)), None)


def _told(case: Case, args: dict) -> str:
    """What the example is, and how to ask about another size."""
    from tilesmith.engine import T

    kind = "benchmark" if "bench" in case.tags else "small test"
    sizes = [
        f"--shape {name}={'x'.join(map(str, x.shape))}" for name, x in args.items() if isinstance(x, T) and x.shape
    ]
    return f"The sizes are those of the {kind} case {case.name}; for your own call, give {' '.join(sizes)}."


def _of_the_example(args: dict, sizes: dict) -> str:
    """What to say, after an error, of the shapes that were not among those given."""
    from tilesmith.engine import T

    shapes = {name: x.shape for name, x in args.items() if isinstance(x, T) and x.shape and name not in sizes}
    told = ", ".join(f"{name} {'x'.join(map(str, shape))}" for name, shape in shapes.items())
    return f". From the op's example, since no --shape gives it: {told}" if told else ""


def arguments(op: str, start: Case | None, shapes: dict, values: dict) -> dict:
    """The arguments of `start`, or of the op's first example, with tensors of these shapes and with these values."""
    from tilesmith.engine import T, cases

    start = start or next(iter(cases(op)), None)
    if start is None:
        return {**{name: T(*size) for name, size in shapes.items()}, **values}
    args = dict(start.args)
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


def empty(args: dict, dtype) -> dict:
    """The arguments with tensors of the right metadata that have no memory, on the meta device."""
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
        tensor = torch.empty(arg.shape, dtype=kind, device="meta")
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
    if not equals or not all(n.isdecimal() for n in numbers):
        refuse(f"--shape must be NAME=SIZExSIZE, such as x=4096x8192; got {text!r}")
    if math.prod(map(int, numbers)) >= 2**60:
        refuse(f"--shape {text}: no tensor has so many elements; at most 2**60 are taken")
    return name, tuple(map(int, numbers))


def _show(value) -> str:
    if hasattr(value, "shape"):
        return f"{str(value.dtype).removeprefix('torch.')}[{', '.join(map(str, value.shape))}]"
    return repr(value)
