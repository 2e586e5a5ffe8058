"""Kernel: one way to do an op. `optimize_kernel` gives it a configuration."""

from __future__ import annotations

import functools
import inspect
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from tilesmith.engine.argument_checks import flag
from tilesmith.engine.launcher import hooked
from tilesmith.engine.registry import DECLARED, backend_of
from tilesmith.engine.table import Table
from tilesmith.engine.torch_private import autocasts
from tilesmith.hardware.detect import arch_of
from tilesmith.settings import settings


def accept(call: Any) -> Sequence[str]:
    """No reason against any call."""
    return ()


def silent(*args: Any) -> Sequence[str]:
    """Nothing to tell about any call."""
    return ()


def as_output(call: Any) -> Mapping[str, float]:
    """Sums of any call are kept at least as precisely as its outputs."""
    return {}


def lines_of(plans: Callable[..., Any]) -> Callable[..., Sequence[str]]:
    """The `tells` of a kernel whose calls have plans."""

    @functools.wraps(plans)
    def tells(*args: Any, **said: Any) -> Sequence[str]:
        return plans(*args, **said).lines()

    return tells


@dataclass(frozen=True)
class Kernel:
    """One implementation of an op.

    fn: callable with the reference's signature. rank: higher is tried first; the reference has 0.
    rejects: metadata of a call -> sentences that say why this kernel cannot serve it; empty means it can.
    errors: output -> the error, beyond rounding, that its method may have. eps: metadata of a call -> output -> the
    eps of the format in which its sums are kept, where that is coarser than the output's dtype. tells: arguments of a
    call that it serves -> sentences on how, where it has several ways; given the configuration and the architecture
    too, where its signature has `config` and `arch`. plans: arguments of a call -> its plan, told the same; None where
    there are none. A plan has `lines()`, the sentences, and `steps`, each with the name of its device kernel, `kernel`.
    """

    op: str
    backend: str
    fn: Callable[..., Any]
    rank: int
    rejects: Callable[[Any], Sequence[str]] = accept
    errors: Mapping[str, float] = field(default_factory=dict, hash=False)
    tells: Callable[..., Sequence[str]] = silent
    eps: Callable[[Any], Mapping[str, float]] = as_output
    plans: Callable[..., Any] | None = None


def as_written(fn: Callable[..., Any], kind: str) -> Callable[..., Any]:
    """fn with autocast off inside: what the op casts is cast, and torch would cast what fn chose to do in fp32. kind:
    the type of device that fn works on."""

    def run(*args: Any) -> Any:
        if not autocasts(kind):
            return fn(*args)
        with torch.autocast(kind, enabled=False):
            return fn(*args)

    return run


def in_context(function: Callable[..., Any], args: tuple, arch: Callable[[], Any], config: Callable[[], Any]) -> Any:
    """function(*args), a kernel's tells or plans, with `arch` and `config` as far as its signature has them."""
    known = inspect.signature(function).parameters
    said = {name: made() for name, made in (("arch", arch), ("config", config)) if name in known}
    return function(*args, **said)


@dataclass(frozen=True)
class Space:
    """The configurations of a kernel.

    dims: op arguments -> named sizes on which the best configuration depends.
    default: (dims, arch, dtype) -> configuration (a NamedTuple), used where no tuning row is near.
    choices: field of the configuration -> values that `tilesmith tune` tries.
    fit: (configuration, dims, arch, dtype) -> the nearest one that the device can launch, for pinned fields.
    """

    dims: Callable[..., Mapping[str, int]]
    default: Callable[[Mapping[str, int], Any, torch.dtype], Any]
    choices: Mapping[str, tuple] = field(default_factory=dict)
    fit: Callable[[Any, Mapping[str, int], Any, torch.dtype], Any] | None = None


def optimize_kernel(
    num_warps: int | None = None, num_stages: int | None = None, debug: bool = False, *, space: Space | None = None
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Give a kernel its configuration: pinned (`num_warps`, `num_stages`) or looked up in a `space`.

    The decorated function receives it as the keyword `config` if its signature has one: a mapping of the pinned values,
    or the configuration type of the space. One with a space may also have a keyword `hidden`: it is False if the
    outputs that exist only for a gradient are not needed, which may then be None. With `debug=True` (or
    TILESMITH_DEBUG=1) the device is synchronised after each launch and a FloatingPointError names the output that holds
    a NaN no input holds. Works above or below `register_kernel`.

    Raises TypeError when a space is given together with pinned values, and for a kernel made by `triton.jit`: decorate
    the function that launches it. Raises ValueError for values below 1 and for a num_warps that is not a power of two.
    Warns if values are pinned and the function has no parameter `config`.
    """
    flag("optimize_kernel", "debug", debug)
    pinned = {k: v for k, v in (("num_warps", num_warps), ("num_stages", num_stages)) if v is not None}
    if space is not None and pinned:
        raise TypeError(f"optimize_kernel takes a space or pinned values, got both: {sorted(pinned)}")
    for name, value in pinned.items():
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise ValueError(f"{name} must be a positive int, got {value!r}")
    if num_warps is not None and num_warps & (num_warps - 1):
        raise ValueError(f"num_warps must be a power of two, as Triton wants it, got {num_warps}")

    def decorate(fn):
        _check_function(fn)
        wants_config = "config" in inspect.signature(fn).parameters
        if pinned and not wants_config:
            told = ", ".join(f"{name}={value}" for name, value in pinned.items())
            warnings.warn(
                f"optimize_kernel: {told} reach nothing: {fn.__name__} has no parameter `config`; give it one, and "
                "hand its values to the launch",
                stacklevel=2,
            )

        if space is not None:
            if not wants_config:
                raise TypeError(f"{fn.__name__} has a space but no parameter `config` to receive the choice")
            configure = _Configure(fn, space)
            run = functools.wraps(fn)(lambda *args: fn(*args, config=configure(args)))
            run.configure = configure
        else:
            run = functools.wraps(fn)(
                (lambda *args, **kw: fn(*args, config=pinned, **kw))
                if wants_config
                else (lambda *a, **kw: fn(*a, **kw))
            )
        if debug or settings().debug:
            run = _checked(fn, run)
        registered = getattr(fn, "tilesmith_kernel", None)
        if registered is not None:
            _replace(registered, run)
        return run

    return decorate


def _check_function(fn: Any) -> None:
    """TypeError unless fn is called with a kernel's arguments and no grid."""
    if not callable(fn):
        raise TypeError(f"optimize_kernel decorates a function, got {type(fn).__name__}")
    if hasattr(type(fn), "__getitem__"):
        raise TypeError(
            f"optimize_kernel decorates the function that launches it, not {type(fn).__name__}, which takes a grid: "
            "launch it there with kernel[grid](..., **config)"
        )


class _Configure:
    """Op arguments -> configuration: forced by the tuner, else nearest tuning row, else the default.

    arch: None, or an architecture in place of the device's, to compile for a GPU that is not here.
    """

    def __init__(self, fn, space: Space):
        self.fn, self.space, self.forced, self.arch = fn, space, None, None
        self.hides = "hidden" in inspect.signature(fn).parameters
        self.name = f"{backend_of(fn.__module__)}.{fn.__name__}"  # one family has kernels of several backends
        self._found: dict[Any, Any] = {}

    def __call__(self, args: tuple, search: bool = True) -> Any:
        """search: measure first where TILESMITH_TUNE asks for it."""
        if self.forced is not None:
            return self.forced
        first = next(a for a in args if isinstance(a, Tensor))
        dims = self.space.dims(*args)
        key = (first.dtype, first.device, *dims.values())
        config = self._found.get(key)
        if config is None:
            config = self._look_up(args, dims, self.arch or arch_of(first.device), first, search)
            if search:
                if len(self._found) >= 4096:  # varlen training meets ever new sizes; start over rather than grow
                    self._found.clear()
                self._found[key] = config
        return config

    def _look_up(self, args: tuple, dims: Mapping[str, int], arch: Any, first: Tensor, search: bool) -> Any:
        default = self.space.default(dims, arch, first.dtype)
        row = Table.of(self.fn.__module__, arch.name).nearest(self.name, first.dtype, dims)
        if search and row is None and settings().tune and self.space.choices and first.device.type != "cpu":
            from tilesmith.engine.tuning import at_first_call

            return at_first_call(self, args)
        if row is None or not row.config.keys() <= set(default._fields):  # a row that another version kept here
            return default
        return default._replace(**row.config)

    def with_fields(self, args: tuple, fields: Mapping[str, int], search: bool = True) -> Any:
        """The configuration for these arguments with `fields` at given values, and with every field that ends in one of
        their names; the others are made to fit.

        Raises ValueError for a field that there is not, and where no other fields make the values fit.
        """
        config, name = self(args, search), self.fn.__name__
        if not fields:
            return config
        wanted: dict[str, int] = {}
        for asked, value in fields.items():
            found = [f for f in config._fields if f == asked or f.endswith(f"_{asked}")]
            if not found:
                raise ValueError(f"{name} has no configuration field {asked!r}; it has {', '.join(config._fields)}")
            wanted |= dict.fromkeys(found, value)
        config = config._replace(**wanted)
        if self.space.fit is None:
            return config
        first = next(a for a in args if isinstance(a, Tensor))
        arch = self.arch or arch_of(first.device)
        fitted = self.space.fit(config, self.space.dims(*args), arch, first.dtype)
        small = {f: getattr(fitted, f) for f in wanted if getattr(fitted, f) != wanted[f]}
        if small:
            asked = ", ".join(f"{f} = {wanted[f]}" for f in small)
            fits = ", ".join(f"{f} = {value}" for f, value in small.items())
            raise ValueError(
                f"{name}: {asked} with {first.dtype} does not fit in the {arch.shared_memory:,} bytes of shared memory "
                f"of {arch}; {fits} does"
            )
        return fitted

    def on(self, arch: Any, args: tuple, fields: Mapping[str, int]) -> Any:
        """The configuration for these arguments on an architecture that need not be here, with `fields` pinned."""
        here, found = self.arch, dict(self._found)
        self.arch = arch
        self._found.clear()  # its keys name devices
        try:
            return self.with_fields(args, fields, search=False)
        finally:
            self.arch = here
            self._found.update(found)

    def bind(self, args: tuple, fields: Mapping[str, int] | None = None, **said: bool) -> Any:
        """The kernel with the configuration for these arguments; while one is forced, asked anew at each call. said:
        what else it is told."""
        if fields:
            pinned = self.with_fields(args, fields)
            return lambda *args: self.fn(*args, config=pinned, **said)
        if self.forced is not None:
            return lambda *args: self.fn(*args, config=self(args), **said)
        config = self(args)
        return lambda *args: self.fn(*args, config=self.forced or config, **said)

    def free(self) -> bool:
        """Whether a recorded launch may be repeated: no configuration is forced, no profiler listens to launches."""
        return self.forced is None and not hooked()

    def forget(self) -> None:
        self._found.clear()


def _checked(fn, run):
    @functools.wraps(fn)
    def checked(*args, **kwargs):
        out = run(*args, **kwargs)
        tensors = [a for a in args if isinstance(a, Tensor)]
        if tensors and tensors[0].device.type != "cpu":
            torch.accelerator.synchronize(tensors[0].device)
        clean = not any(t.is_floating_point() and t.isnan().any() for t in tensors)
        for i, o in enumerate(out if isinstance(out, tuple) else (out,)):
            if clean and isinstance(o, Tensor) and o.is_floating_point() and o.isnan().any():
                raise FloatingPointError(f"{fn.__name__}: output {i} holds NaN though no input does")
        return out

    return checked


def _replace(registered: Kernel, run) -> None:
    op = DECLARED[registered.op]
    run.tilesmith_kernel = op.replace_kernel(registered.backend, run)
