"""Choice: which kernel serves a call and why. The dispatch rule, whole."""

from __future__ import annotations

import contextlib
import logging
import warnings
from collections.abc import Iterator
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tilesmith import _install
from tilesmith.engine import torch_private, trial
from tilesmith.engine.arguments import dtype_name
from tilesmith.engine.backends import REFERENCE, in_gluon, missing, triton_missing
from tilesmith.engine.families import ops
from tilesmith.engine.kernel import Kernel, in_context
from tilesmith.engine.pins import check_pin, parse_pin
from tilesmith.hardware.detect import arch_of
from tilesmith.settings import settings

log = logging.getLogger("tilesmith")

_PINS: ContextVar[dict[str, str] | None] = ContextVar("tilesmith_pins", default=None)
_CARRIED = "tilesmith_pins"  # what torch carries to its threads that run backwards, which a ContextVar does not reach
_carries = False  # whether this process has ever pinned anything by `use`
_environment = dict(settings().pins)
_warned: set[str] = set()


@dataclass(frozen=True)
class Choice:
    """The kernel that serves a call, why, why not those of higher rank, and which of lower rank would serve it too."""

    kernel: Kernel
    because: str
    rejected: tuple[tuple[str, tuple[str, ...]], ...] = ()
    note: str = ""
    lower: tuple[Kernel, ...] = ()

    def __str__(self) -> str:
        lines = [f"{self.kernel.op} -> {self.kernel.backend} ({self.because})"]
        lines += [f"  {output}: off by up to {e:g} beyond rounding" for output, e in self.kernel.errors.items()]
        lines += [f"  not {backend}: {'; '.join(reasons)}" for backend, reasons in self.rejected]
        if self.lower:
            lines.append("  also possible: " + ", ".join(f"{k.backend} (rank {k.rank})" for k in self.lower))
        return "\n".join(lines + [f"  {line}" for line in self.note.split("; ") if line])


def pins() -> dict[str, str]:
    """Op name -> backend pinned in this context (by `use`, else by the environment), or where the backward that runs in
    this thread was called."""
    here = _PINS.get()
    if here is None:
        return _carried() if _carries else _environment
    return here


def _carried() -> dict[str, str]:
    here = torch_private.carried(_CARRIED)
    return _environment if here is None else here


@torch_private.constant_in_graphs
def pinned(name: str) -> str:
    """The backend pinned for the op `name` in this context, or "". torch.compile keeps the pin of its trace."""
    return pins().get(name, "")


ASKED = "?"
"""The pin of an op whose next call is only asked about."""


class Asked(Exception):
    """Raised in place of a kernel's launch; `arguments` are the op's."""

    def __init__(self, arguments: tuple):
        self.arguments = arguments


@contextlib.contextmanager
def asking(name: str) -> Iterator[None]:
    """Inside, a call of the op raises `Asked` before it runs anything."""
    token = _PINS.set({**pins(), name: ASKED})
    try:
        yield
    finally:
        _PINS.reset(token)


@contextlib.contextmanager
def use(**backends: str) -> Iterator[None]:
    """Pin ops to backends inside the `with`: `with use(rms_norm="triton"): ...`.

    The pin holds for calls made inside, their backward included wherever it runs, if the backward op has that backend;
    a pin of `<op>_vjp` around the backward takes precedence. A pinned kernel that rejects a call raises
    NotImplementedError with its reasons. "triton:block_m=64:block_n=32" pins fields of the kernel's configuration too
    (and fields that end in _block_m, where it configures several launches); a call raises ValueError where they do not
    fit the device.
    Raises ValueError for an unknown op or backend, and for blocks and warps that Triton cannot compile.
    """
    for name, backend in backends.items():
        check_pin("use()", ops(), name, backend)
    global _carries
    outer = torch_private.carried(_CARRIED, in_backward=False)
    _carries, here = True, {**pins(), **backends}
    token = _PINS.set(here)
    torch_private.carry(_CARRIED, here)
    try:
        yield
    finally:
        _PINS.reset(token)
        torch_private.carry(_CARRIED, outer)


def by_metadata(op: Any, device: torch.device) -> bool:
    """Whether a call's metadata alone decides. It does unless a kernel in Gluon has to be tried first."""
    return trial.settled() or all(not in_gluon(b) or missing(b, device, pinned=True) for b in op.backends())


def choose(op: Any, call: Any, pin: str, device: Any, args: tuple = (), ask: bool = False) -> Choice:
    """Apply the rule: the pinned kernel or an error; else the highest rank whose rejects(call) is empty.

    args: of the call, for the plan of a kernel that has to be tried; () where none has (`by_metadata`). ask: the call
    is not made, so nothing is tried for it (`engine.trial`).
    """

    def refused(kernel: Kernel) -> tuple[str, ...]:
        if not isinstance(device, torch.device):
            return ()  # of an architecture nothing is tried
        refusal = tried(kernel, args, pin, device, ask).refusal
        return (refusal,) if refusal else ()

    if pin:
        backend, _ = parse_pin(pin)
        reasons = _reasons(op, backend, call, device) or refused(op.kernel(backend))
        if reasons:
            raise NotImplementedError(
                f"{op.name} is pinned to {pin}, which cannot serve this call: {'; '.join(reasons)}"
            )
        return Choice(op.kernel(backend), "pinned")
    rejected, present = [], []
    for backend in op.backends():
        absent = missing(backend, device) or _broken(op, backend)
        if absent:
            rejected.append((backend, (absent,)))
        else:
            present.append(op.kernel(backend))
    ranked = sorted(present, key=lambda k: -k.rank)
    for place, kernel in enumerate(ranked):
        reasons = tuple(kernel.rejects(call)) or refused(kernel)
        if not reasons:
            lower = tuple(k for k in ranked[place + 1 :] if not k.rejects(call))
            choice = Choice(kernel, _because(kernel, rejected, device), tuple(rejected), lower=lower)
            if isinstance(device, torch.device):  # an architecture is only asked about
                _tell(choice, device)
            return choice
        rejected.append((kernel.backend, reasons))
    raise NotImplementedError(f"no kernel serves this call of {op.name}: {rejected}")


def _because(kernel: Kernel, rejected: list[tuple[str, tuple[str, ...]]], device: Any) -> str:
    """Why this kernel. Of a GPU that is not here nothing is claimed where its kernels cannot even be asked."""
    unasked = not isinstance(device, torch.device) and triton_missing()
    if unasked and any(unasked in reasons for _, reasons in rejected):
        return f"not what {device.name} would choose: without Triton its kernels cannot be asked; {_install.triton()}"
    return f"rank {kernel.rank}, the highest that accepts"


def _reasons(op: Any, backend: str, call: Any, device: Any) -> list[str]:
    if backend not in op.backends():
        return [f"{op.name} has no kernel {backend!r}; it has: {', '.join(op.backends())}"]
    absent = missing(backend, device, pinned=True) or _broken(op, backend)
    if absent:
        return [absent]
    return list(op.kernel(backend).rejects(call))


def _broken(op: Any, backend: str) -> str | None:
    """Why kernels in Gluon cannot be imported with the installed Triton, which may lack a name that they need."""
    if not in_gluon(backend):
        return None
    try:
        op.kernel(backend)
    except (ImportError, AttributeError) as problem:
        return f"its kernels do not import with Triton {trial.releases.installed()}: {problem}"
    return None


def tried(kernel: Kernel, args: tuple, pin: str, device: torch.device, ask: bool) -> trial.Verdict:
    """What the trial says of a kernel that is to serve a call; with a tested release, at once and without a plan."""
    return trial.verdict(kernel.op, kernel.backend, device, ask, lambda: launches(kernel, args, pin))


def launches(kernel: Kernel, args: tuple, pin: str = "") -> trial.Launches:
    """Which device kernels a call would launch, as its plan has them."""
    if kernel.plans is None or not args:
        return trial.Launches()
    first = next(a for a in args if isinstance(a, Tensor))

    def config() -> Any:
        return kernel.fn.configure.with_fields(args, parse_pin(pin)[1], search=False)

    steps = in_context(kernel.plans, args, lambda: arch_of(first.device), config).steps
    if steps is None:  # a launcher that cannot be rehearsed
        return trial.Launches()
    kernels = {step.kernel for step in steps}
    columns = first.shape[-1] if first.ndim else 1
    return trial.Launches(tuple(sorted(kernels)), dtype_name(first.dtype), columns)


def _tell(choice: Choice, device: Any) -> None:
    log.info("%s", choice)
    name = choice.kernel.op
    if (
        choice.kernel.backend == REFERENCE
        and choice.rejected
        and device.type not in ("cpu", "meta")
        and name not in _warned
    ):
        _warned.add(name)
        warnings.warn(f"tilesmith: {choice} (the reference is correct but slow here)", stacklevel=2)
