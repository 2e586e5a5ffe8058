"""Run the kernels of an op on its cases: values and every gradient, outputs poisoned beforehand."""

from __future__ import annotations

import contextlib
import traceback
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tilesmith.engine import Case, Op, cases, ops, use
from tilesmith.engine.arguments import with_copies
from tilesmith.engine.backends import REFERENCE, missing
from tilesmith.validate.budget import Budget, compare


@dataclass(frozen=True)
class Result:
    """One kernel on one case in one dtype: its worst output or gradient, by error over budget."""

    op: str
    kernel: str
    case: str
    dtype: torch.dtype
    passed: bool
    error: float
    budget: float
    message: str = ""


def run_cases(
    names: Sequence[str] | None = None, device: torch.device | str = "cpu", tags: Sequence[str] = ("test",)
) -> Iterator[Result]:
    """Check every kernel of the named ops (default: all) that this device can run on the cases with one of `tags`."""
    device = torch.device(device)
    if device.type != "cpu":
        tags = (*tags, "gpu")
    for name in names or sorted(ops()):
        op = ops()[name]
        for case in cases(name):
            if not case.tags.intersection(tags):
                continue
            for dtype in case.dtypes:
                for backend in backends_on(op, device):
                    yield check(op, backend, case, device, dtype)


def families() -> list[str]:
    """The families of ops."""
    modules = (op.reference.__module__.split(".") for op in ops().values())  # those of a user have no family
    return sorted({names[2] for names in modules if names[:2] == ["tilesmith", "ops"]})


def backends_on(op: Op, device: torch.device) -> list[str]:
    """The op's backends that can be asked on `device`, the reference last."""
    found = [b for b in backends_of(op) if b != REFERENCE and missing(b, device) is None]
    return [*found, REFERENCE]


def backends_of(op: Op) -> list[str]:
    """The backends that serve an op, then those that serve its gradient alone."""
    return list(dict.fromkeys((*op.backends(), *(op.vjp.backends() if op.vjp is not None else ()))))


def check(op: Op, backend: str, case: Case, device: torch.device | str, dtype: torch.dtype) -> Result:
    """One kernel on one case against the fp64 oracle: what `check_each` says of it."""
    return next(check_each(op, (backend,), case, device, dtype))


def check_each(
    op: Op,
    backends: Sequence[str],
    case: Case,
    device: torch.device | str,
    dtype: torch.dtype,
    runs: int = 3,
    pinned: Sequence[Mapping[str, str] | None] = (None,),
) -> Iterator[Result]:
    """Kernels on one case against the fp64 oracle.

    The oracle is the reference in fp64, its gradients by autograd through it. The yardstick is the reference, and its
    vjp, in the case's dtype. The reference itself is held to the rounding of that dtype; in fp32, where it rounds at
    every step, it runs in fp64 and is held to fp32's rounding. A kernel that rejects the case passes with
    its reasons as the message; one whose vjp does is checked with whichever vjp is chosen. runs: of small cases on a
    device; the second call of a shape is recorded and the third replays it (engine/replay.py). pinned: pins of the op
    and its gradient, by op, in place of the kernel's; with several, a kernel is checked by each of them.
    """
    device = torch.device(device)
    large = "gpu" in case.tags
    args = op.bind((), case.build(device, dtype, case.generator(device if large else "cpu")))
    # the oracle of a large case fills the memory: it comes before there are outputs to keep beside it
    exact, yardstick = oracle(op, args) if large else {}, {}
    for backend, pin in ((backend, pin) for backend in backends for pin in pinned):
        own = tuple(_wide(a, False) for a in args) if backend == REFERENCE and dtype is torch.float32 else args
        got, refusal = _run(op, backend, own, 1 if device.type == "cpu" or large else runs, pin)
        if refusal:
            yield Result(op.name, backend, case.name, dtype, True, 0.0, 0.0, f"rejects: {refusal}")
            continue
        exact = exact or oracle(op, args)
        if backend == REFERENCE:
            narrow = {n: torch.float32 if t.dtype is torch.float64 else t.dtype for n, t in got[0].items()}
            same = {n: exact[n].to(narrow[n]).to(got[0][n].dtype) for n in exact}
        else:
            if not yardstick:
                with use(**pins_of(op, REFERENCE)):
                    yardstick = outputs_and_gradients(op, args)
            same = yardstick
        yield judged(op, backend, case, dtype, got, same, exact, args)


def _run(
    op: Op, backend: str, args: tuple, runs: int, pinned: Mapping[str, str] | None
) -> tuple[list[dict[str, Tensor]], NotImplementedError | None]:
    """What each of several calls gives; or why the kernel rejects them."""
    try:
        with use(**(pinned or pins_of(op, backend))), poisoned():
            return [outputs_and_gradients(op, args) for _ in range(runs)], None
    except NotImplementedError as reasons:
        # a pin holds for the backward, too: where only that is rejected, the kernel is checked if it is the one chosen
        if pinned or op.explain(*args).kernel.backend != backend:
            return [], reasons
    with poisoned():
        return [outputs_and_gradients(op, args) for _ in range(runs)], None


def judged(
    op: Op,
    backend: str,
    case: Case,
    dtype: torch.dtype,
    runs: list[dict[str, Tensor]],
    same: dict[str, Tensor],
    exact: dict[str, Tensor],
    args: tuple,
) -> Result:
    worst = Budget(0.0, 0.0)
    errors, eps = {}, {}
    if backend != REFERENCE and backend in op.backends():
        kernel = op.kernel(backend)
        errors, eps = kernel.errors, kernel.eps(op._describe(*args))
    for key, got in ((key, run) for run in {id(run): run for run in (runs[0], runs[-1])}.values() for key in exact):
        computed = dtype if backend == REFERENCE else None
        budget = compare(got[key], same[key], exact[key], computed, errors.get(key, 0.0), eps.get(key, 0.0))
        if not budget.passed and not budget.message:
            budget = Budget(
                budget.error, budget.allowed, f"{key} is off by {budget.error:.3g}, allowed {budget.allowed:.3g}"
            )
            return _result(op, backend, case, dtype, budget, False)
        if budget.message:
            budget = Budget(budget.error, budget.allowed, f"{key}: {budget.message}")
            return _result(op, backend, case, dtype, budget, False)
        worst = max(worst, budget, key=lambda b: b.ratio)
    return _result(op, backend, case, dtype, worst, True)


def _result(op: Op, backend: str, case: Case, dtype: torch.dtype, budget: Budget, passed: bool) -> Result:
    return Result(op.name, backend, case.name, dtype, passed, budget.error, budget.allowed, budget.message)


def pins_of(op: Op, backend: str) -> dict[str, str]:
    """What `use` takes to have `backend` serve an op and its backward, or the one of them that it can."""
    return {each.name: backend for each in (op, op.vjp) if each is not None and backend in each.backends()}


def outputs_and_gradients(op: Op, args: tuple) -> dict[str, Tensor]:
    """Public outputs of a call and the gradients of all arguments that ask for one, under fixed random cotangents."""
    leaves = {n: a for n, a in zip(op.parameters, args) if isinstance(a, Tensor) and a.requires_grad}
    if op.mutates:
        args = with_copies(args, op.written)
    outs = each_output(op(*args))
    named = dict(zip(op.outputs, outs))
    named |= {f"{n} (written)": a for n, a in zip(op.parameters, args) if n in op.mutates}
    named |= _gradients([o for o in outs if o.requires_grad], leaves)
    return {n: t.detach() for n, t in named.items()}


class OracleMemoryError(RuntimeError):
    """A device has too little memory for the reference of a case."""


def oracle(op: Op, args: tuple) -> dict[str, Tensor]:
    """The same in fp64, through the reference as plain PyTorch: gradients by autograd, not by the vjp.

    In fp32 where 16-bit tensors have more than 2^30 elements: in fp64 they would fill a GPU, and fp32's rounding is
    below a thousandth of theirs. OracleMemoryError where that takes more memory than there is; none is held then.
    """
    try:
        return _oracle(op, args)
    except torch.OutOfMemoryError as problem:
        traceback.clear_frames(problem.__traceback__)  # or what catches the error holds their tensors
        why = str(problem).partition(". ")[0]
    raise OracleMemoryError(f"{op.name}: the reference in wider numbers does not fit: {why}")


def _oracle(op: Op, args: tuple) -> dict[str, Tensor]:
    tensors = [a for a in args if isinstance(a, Tensor) and a.is_floating_point()]
    narrow = any(a.numel() > 2**30 for a in tensors) and all(a.element_size() <= 2 for a in tensors)
    dtype = torch.float32 if narrow else torch.float64
    wide = tuple(_wide(a, n in op.mutates, dtype) for n, a in zip(op.parameters, args))
    leaves = {n: a for n, a in zip(op.parameters, wide) if isinstance(a, Tensor) and a.requires_grad}
    outs = each_output(op.reference(*wide))[: op.public]
    named = dict(zip(op.outputs, outs))
    named |= {f"{n} (written)": a for n, a in zip(op.parameters, wide) if n in op.mutates}
    named |= _gradients([o for o in outs if o.requires_grad], leaves)
    return {n: t.detach() for n, t in named.items()}


def each_output(outs: Any) -> tuple[Tensor, ...]:
    """The outputs of a call; none of an op that writes its arguments alone."""
    if outs is None:
        return ()
    return outs if isinstance(outs, tuple) else (outs,)


def _wide(a: Any, copied: bool, dtype: torch.dtype = torch.float64) -> Any:
    if not isinstance(a, Tensor):
        return a
    if a.is_floating_point():
        return a.detach().to(dtype, copy=True).requires_grad_(a.requires_grad)
    return a.clone() if copied else a


def _gradients(outs: list[Tensor], leaves: dict[str, Tensor]) -> dict[str, Tensor]:
    if not outs or not leaves:
        return {}
    large = max(o.numel() for o in outs) > 2**22  # drawn where they are needed: the host takes seconds
    device = outs[0].device if large else "cpu"
    generator = torch.Generator(device).manual_seed(17)
    cotangents = []
    for o in outs:
        drawn = torch.randn(o.shape, generator=generator, dtype=torch.float32, device=device)
        # a bf16 grid is exact in every dtype, so the oracle and the kernel get the same cotangent
        cotangents.append(drawn.to(torch.bfloat16).to(o.device, o.dtype))
    finite = [torch.where(o.detach().isfinite(), c, 0) for o, c in zip(outs, cotangents)]
    grads = torch.autograd.grad(outs, list(leaves.values()), finite, allow_unused=True)
    return {f"d{n}": g if g is not None else torch.zeros_like(leaves[n]) for n, g in zip(leaves, grads)}


@contextlib.contextmanager
def poisoned() -> Iterator[None]:
    """Inside, memory that torch allocates uninitialised holds NaN, so that an output left unwritten shows."""
    was, warn = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    fill = torch.utils.deterministic.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(was, warn_only=warn)
        torch.utils.deterministic.fill_uninitialized_memory = fill
