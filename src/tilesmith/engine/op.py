"""Op: what is computed. Declared once, from its reference; everything else is derived."""

from __future__ import annotations

import importlib
import inspect
import typing
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache, partial
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.library import infer_schema

from tilesmith.engine import ahead, explanation, inductor, torch_private, tracing
from tilesmith.engine import sharding as sharding_rules
from tilesmith.engine.arguments import binder, checked, with_copies
from tilesmith.engine.autograd import Gradient, Way, has_tangents, no_forward_mode, register_loop_vmap
from tilesmith.engine.backends import REFERENCE
from tilesmith.engine.choice import ASKED, Asked, Choice, by_metadata, choose, pinned
from tilesmith.engine.families import ops
from tilesmith.engine.kernel import Kernel, as_written
from tilesmith.engine.key import Direct, Known, make_key
from tilesmith.engine.metadata import TensorFacts, describer
from tilesmith.engine.negated import asking
from tilesmith.engine.pins import parse_pin
from tilesmith.engine.registry import DECLARED, LIBRARY
from tilesmith.engine.replay import Ready, Replay
from tilesmith.engine.signatures import doc_of_users, of_users, without_config
from tilesmith.engine.tracing import always
from tilesmith.hardware.detect import Arch
from tilesmith.settings import settings

Function = TypeVar("Function", bound=Callable[..., Any])


class Op:
    """An operation with a reference, a gradient and any number of kernels.

    reference: typed PyTorch function; gives the signature, the docstring, the schema and the CPU meaning.
    fake: same arguments -> empty outputs with shapes, dtypes and strides; None runs the reference on fake tensors.
    vjp: the Op of the backward. Its parameters name what they are: ``d<output>`` an incoming gradient, an input or
        output of this op (then saved), ``output_mask``, or, the last one, ``overwrite``: True where what is saved will
        not be read again, so that a kernel may return saved outputs, written over, as gradients. Others have a default,
        which a backward leaves as it is. None: gradients by recomputing the reference.
    outputs: their names; public: how many of them, from the left, users get (the rest exist for the gradient).
    internal: names of the last parameters that the op fills in by itself; users' signature leaves them out, as it does
        the outputs that are not public. Their docstring ends where the reference's has "For kernels:".
    kernels: backend -> module that registers its kernels when imported, or the kernels' functions register themselves.
    check: raises on bad arguments, before any launch. describe: arguments -> hashable metadata for `rejects`.
    alias: input -> input whose gradient is the same values (``{"residual": "x"}``), or an incoming gradient that is
    its own, shape and dtype included (``{"residual": "dout"}``).
    mutates: names of the arguments that the op writes. decompose: plain function traced in place of the op under
    torch.compile, always or where `when` holds of its arguments. autocast: names of the tensors cast to the autocast
    dtype while autocast is on. fold: tensor arguments whose leading dims are free, so that vmap adds rows instead of
    looping. unsaved: from a call's arguments, names of outputs that its vjp takes but will not read: it gets [..., 0]
    for them. sharding: which dims of DTensors may be sharded, a pattern as `engine.sharding` explains, or (op,
    arguments) -> public outputs; None: DTensors raise. dispatched_as: the name that torch's dispatcher sees, where
    others recognise by it what an op computes; `torch.ops.tilesmith` has the op's own name besides, which calls it.
    together: pairs of tensor arguments of which `describe` and kernels may ask whether they begin at one address.
    apart: pairs of which `check` may ask how far they are from one another within one storage.
    draw: a call's arguments -> the same with what is drawn anew for each call, a dropout's seed, where it was left out.
    It follows the check, so that a call that is refused draws nothing.
    """

    def __init__(
        self,
        reference: Callable[..., Any],
        *,
        name: str | None = None,
        fake: Callable[..., Any] | None = None,
        vjp: Op | None = None,
        outputs: Sequence[str] = ("out",),
        public: int | None = None,
        internal: Sequence[str] = (),
        kernels: Mapping[str, str] | None = None,
        check: Callable[..., None] | None = None,
        describe: Callable[..., Any] | None = None,
        alias: Mapping[str, str] | None = None,
        mutates: Sequence[str] = (),
        decompose: Callable[..., Any] | None = None,
        when: Callable[..., bool] = always,
        autocast: Sequence[str] = (),
        fold: Sequence[str] = (),
        unsaved: Callable[..., Sequence[str]] | None = None,
        sharding: str | Callable[[Op, tuple], Any] | None = None,
        dispatched_as: str = "",
        together: Sequence[tuple[str, str]] = (),
        apart: Sequence[tuple[str, str]] = (),
        draw: Callable[[tuple], tuple] | None = None,
    ):
        self.name = name or reference.__name__
        self.dispatched_as = dispatched_as or self.name
        if self.name in DECLARED:
            raise ValueError(f"op {self.name!r} is already declared")
        self.reference, self.vjp, self.outputs = reference, vjp, tuple(outputs)
        self.public = len(self.outputs) if public is None else public
        self.decompose, self.when, self.mutates, self.draw = decompose, when, tuple(mutates), draw
        self.alias, self.fold, self.unsaved, self.sharding = dict(alias or {}), tuple(fold), unsaved, sharding
        self.signature = inspect.signature(reference)
        served = None if vjp is None else {*(n[1:] for n in vjp.outputs), *self.alias}
        self.check = checked(self.name, self.signature, check, served)
        self.parameters = tuple(self.signature.parameters)
        self.overwrites = False  # of a vjp: its last argument is `overwrite`
        self.defaults = {n: p.default for n, p in self.signature.parameters.items() if p.default is not p.empty}
        self.types = infer_schema(reference, mutates_args=self.mutates)
        if "Tensor" not in self.types.partition("->")[0]:
            raise TypeError(f"{self.name} takes no tensor, so there is nothing to dispatch on")
        self._bind = binder(self.name, self.signature)  # not at the first call, which torch.compile may trace
        self.__name__, self.__signature__ = self.name, of_users(self.signature, self.public, internal)
        self.__doc__ = doc_of_users(self.name, self.__signature__, reference)
        self.__module__ = reference.__module__
        self.autocast = tuple(self.parameters.index(n) for n in autocast)
        self.written = tuple(self.parameters.index(n) for n in self.mutates)
        self.together, self.apart = (
            tuple((self.parameters.index(a), self.parameters.index(b)) for a, b in pairs) for pairs in (together, apart)
        )
        self._describe = describe or describer(self.name, self.parameters)
        self._modules = dict(kernels or {})
        self._kernels: dict[str, Kernel] = {}
        self._recent: dict[tuple, Ready] = {}
        self.door_function: Callable[..., Any] | None = None
        self._select = lru_cache(maxsize=512)(lambda call, pin, device: choose(self, call, pin, device))
        self.fake = fake or reference
        self._define(self.fake)
        self.add_kernel(Kernel(self.name, REFERENCE, reference, 0))
        self.gradient = Gradient(self) if not self.mutates else None
        DECLARED[self.name] = self

    def _define(self, fake: Callable[..., Any]) -> None:
        head, arrow, returns = self.types.partition(" ->")
        schema = f"{head[:-1]}, *, str pin='') ->{returns}"
        LIBRARY.define(f"{self.dispatched_as}{schema}")
        LIBRARY.impl(self.dispatched_as, self._boundary, "CompositeExplicitAutograd")
        qualified = f"tilesmith::{self.dispatched_as}"
        self.handle = getattr(torch.ops.tilesmith, self.dispatched_as).default
        if self.dispatched_as != self.name:
            LIBRARY.define(f"{self.name}{schema}")
            LIBRARY.impl(self.name, self.handle, "CompositeImplicitAutograd")
        self.handle.direct, self.handle.known = Direct(self), Known(self)

        def traced(*args: Any, pin: str = "") -> Any:
            if not self.mutates:
                inductor.register_with_inductor(self)
            return fake(*self.complete(args))

        torch.library.register_fake(qualified, traced, lib=LIBRARY)
        if not self.mutates:
            register_loop_vmap(self, qualified)

    # kernels ------------------------------------------------------------------------------------------------------

    def add_kernel(self, kernel: Kernel) -> Kernel:
        """Add a kernel; TypeError when its types are not the reference's, ValueError when its rank is taken."""
        if kernel.backend != REFERENCE:
            try:
                types = infer_schema(without_config(kernel.fn), mutates_args=self.mutates)
            except ValueError as problem:  # torch says which parameter; not what the op expects there
                raise TypeError(
                    f"kernel {kernel.backend!r} of {self.name}: "
                    "annotate its parameters and its result so that its types "
                    f"are {self.types}; {problem}"
                ) from problem
            if types != self.types:
                raise TypeError(f"kernel {kernel.backend!r} of {self.name} has types {types}; the op has {self.types}")
            for other in self._kernels.values():
                if other.rank == kernel.rank and other.backend != kernel.backend:
                    raise ValueError(f"{self.name}: {kernel.backend} and {other.backend} both have rank {kernel.rank}")
        self._kernels[kernel.backend] = kernel
        self._select.cache_clear()
        self._recent.clear()
        return kernel

    def replace_kernel(self, backend: str, fn: Callable[..., Any]) -> Kernel:
        """Put another function behind a registered kernel (used when a decorator is applied after registration)."""
        old = self._kernels[backend]
        self._kernels[backend] = replace(old, fn=fn)
        self._select.cache_clear()
        self._recent.clear()
        return self._kernels[backend]

    def backends(self) -> tuple[str, ...]:
        """Names of this op's kernels, those not yet imported included."""
        return tuple(dict.fromkeys((*self._modules, *self._kernels)))

    def kernel(self, backend: str) -> Kernel:
        """The kernel of a backend; imports its module at the first need."""
        if backend not in self._kernels:
            importlib.import_module(self._modules[backend])
            if backend not in self._kernels:
                raise RuntimeError(f"{self._modules[backend]} registers no kernel {backend!r} for {self.name}")
        return self._kernels[backend]

    def door(self, function: Function) -> Function:
        """Decorate the function that users call, where its arguments are not the op's: `explain` takes its own.

        Its signature shows no parameters annotated NoReturn, which are there for errors that say what to write.
        """
        self.door_function = function
        signature = inspect.signature(function)
        taken = [p for p in signature.parameters.values() if p.annotation is not typing.NoReturn]
        if len(taken) < len(signature.parameters):
            function.__signature__ = signature.replace(parameters=taken)
        return function

    # calls --------------------------------------------------------------------------------------------------------

    @torch_private.traced_in_its_caller
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if kwargs or len(args) != len(self.parameters):
            try:
                args = self.bind(args, kwargs)
            except _UNCHECKED:  # in an op that looks at its arguments there
                self.check(*Op.bind(self, args, kwargs))
                raise
        if _compiling():
            return self._traced(args)
        if self.autocast and _any_autocast():
            args = self._autocast(args)
        pin = pinned(self.name)
        try:
            key = self._key(False, pin, *args)
            ready = self._recent.get(key)
        except (TypeError, RuntimeError):  # a value that has no hash, or a tensor without strides
            self.check(*args)
            raise
        if key is None and sharding_rules.distributed(args):
            return sharding_rules.call(self, args)
        if ready is None:  # a check looks at what is in the key, so a known key has passed it
            with torch_private.without_jit():
                self.check(*args)
        if self.draw is not None:
            args = self.draw(args)
        if ready is None:
            ready = self._passed_on(args, pin) if key is None else self._remember(key, args, pin)
        if ready.way is not None:
            return self._public(self.gradient.apply(ready, args))
        outs = (ready.alone or ready).run(*args)
        for i in self.written:  # so that autograd notices if a backward needs what was there
            torch.autograd.graph.increment_version(args[i])
        return self._public(outs)

    def _traced(self, args: tuple) -> Any:
        """A call under torch.compile or torch.export."""
        name = self.name
        if any(type(a).__module__ == "numpy" for a in args):
            torch._dynamo.graph_break(f"{name}: Dynamo takes NumPy's numbers for tensors; pass int(x) or float(x)")
        if self.autocast:  # before the check, as in eager mode: it also makes two dtypes one
            args = self._autocast(args)
        torch._dynamo.comptime.comptime(tracing.check, lambda: self.check(*args))
        if self.draw is not None:
            args = self.draw(args)
        if sharding_rules.distributed(args):
            return sharding_rules.call(self, args)
        pin = pinned(name)
        if self.decompose is not None and not pin and self.when(*args):
            return self._public(self.decompose(*args))
        return self._public(self.handle(*args, pin=pin))

    def bind(self, args: tuple, kwargs: dict[str, Any]) -> tuple:
        """All arguments by position; TypeError as Python raises it for a missing, repeated or unknown one."""
        try:
            return self._bind(*args, **kwargs)
        except TypeError as problem:
            raise TypeError(f"{problem}; its parameters are {', '.join(self.parameters)}") from None

    def _key(self, inside: bool, pin: str, *args: Any) -> tuple | None:
        """The key of a call, as `engine.key` explains. Written out at the first call: most declared ops get none."""
        self._key = make_key(self.name, self.kinds(), self.together, self.apart)
        return self._key(inside, pin, *args)

    def kinds(self) -> list[str]:
        """The types of the arguments, as torch's schema writes them."""
        return [str(a.type) for a in self.handle._schema.arguments if not a.kwarg_only]

    def run(self, args: tuple, pin: str = "") -> Any:
        """All outputs, without autograd: straight to the kernel for plain tensors, else through torch's dispatcher."""
        key = self._key(False, pin, *args)
        if key is None:  # there an op returns no input
            return self._dispatched((*args[:-1], False) if self.overwrites else args, pin)
        ready = self._recent.get(key)
        return (self._remember(key, args, pin) if ready is None else ready).run(*args)

    def complete(self, args: tuple) -> tuple:
        """Arguments as torch's dispatcher hands them over, with the trailing defaults that it leaves out."""
        return args + tuple(self.defaults[n] for n in self.parameters[len(args) :])

    def _boundary(self, *args: Any, pin: str = "") -> Any:
        args = self.complete(args)
        key = self._key(True, pin, *args)
        ready = self._recent.get(key)
        return (self._remember(key, args, pin) if ready is None else ready).run(*args)

    def _dispatched(self, args: tuple, pin: str) -> Any:
        if torch_private.knows_functorch and _functorch() is not None and self.gradient is not None:
            return self.gradient.transformed.apply(pin, *args)
        if has_tangents(args):  # which torch's dispatcher would leave out
            raise no_forward_mode(self.name)
        return self.handle(*args, pin=pin)

    def _passed_on(self, args: tuple, pin: str) -> Ready:
        """A call that torch's dispatcher has to see; functorch connects it to autograd itself."""
        if torch.jit.is_tracing():
            return self._traced_by_jit(args, pin)
        ready = Ready(lambda *args: self._dispatched(args, pin))
        return ready if _functorch() is not None else self._connected(ready, args, pin)

    def _traced_by_jit(self, args: tuple, pin: str) -> Ready:
        """A call that torch.jit.trace records, which sees PyTorch's operations alone: neither launches nor an
        autograd.Function. Sizes are tensors there, so no key of such a call is ever known."""
        for n, kind, a in zip(self.parameters, self.kinds(), args):
            if "List[bool]" in kind and a is not None:
                raise NotImplementedError(
                    f"{self.name}: torch.jit.trace records no list of bools, as {n} is; take torch.export or "
                    "torch.compile"
                )
        return Ready(lambda *args: self.handle(*args, pin=pin))

    def _remember(self, key: tuple, args: tuple, pin: str) -> Ready:
        """The chosen kernel for these very shapes, kept so that the next such call asks for nothing."""
        if torch.jit.is_tracing():
            return self._traced_by_jit(args, pin)
        ready = self._connected(self._ready(args, pin), args, pin)
        if len(self._recent) >= 1024:  # ever new lengths: start over rather than grow
            self._recent.clear()
        self._recent[key] = ready
        if self.draw is not None:  # a call that gives what this one has drawn is the same
            self._recent[self._key(True, pin, *args)] = ready  # the tensors may be of a subclass
        return ready

    def _connected(self, ready: Ready, args: tuple, pin: str) -> Ready:
        if self.gradient is not None and torch.is_grad_enabled():
            needs = self.gradient.needs(args)
            if True in needs:
                ready.way = Way(self.gradient, pin, args, needs)
        return ready

    def _ready(self, args: tuple, pin: str) -> Ready:
        if pin == ASKED:
            raise Asked(args)
        device = next(a.device for a in args if isinstance(a, Tensor))
        call = self._describe(*args)
        chosen = self._select(call, pin, device) if by_metadata(self, device) else choose(self, call, pin, device, args)
        kernel = chosen.kernel
        configure = getattr(kernel.fn, "configure", None)
        _, fields = parse_pin(pin)
        if fields and configure is None:
            raise ValueError(f"{self.name} is pinned to {pin}, but that kernel has no configuration to choose from")
        tried = with_copies(args, self.written) if self.written and settings().tune else args  # tuning runs the kernel
        fn = kernel.fn if configure is None else configure.bind(tried, fields)
        if kernel.backend == REFERENCE:
            fn = as_written(fn, device.type) if device.type != "meta" else self.fake  # there are no values to look at

        def ready(fn: Callable[..., Any]) -> Ready:
            if device.type != "cuda":
                return Ready(fn)
            before = partial(ahead.compile_rest, self, kernel, pin)
            return Replay(fn, configure and configure.free, device.index, f"{kernel.op} by {kernel.backend}", before)

        found = ready(fn)
        if configure is not None and configure.hides:
            found.alone = ready(configure.bind(args, fields, hidden=False))
        return found if kernel.backend == REFERENCE else asking(self, found, args, pin)

    def _public(self, outs: Any) -> Any:
        if not isinstance(outs, tuple | list):
            return outs
        return outs[0] if self.public == 1 else tuple(outs[: self.public])

    def _autocast(self, args: tuple) -> tuple:
        kind = next((a.device.type for a in args if isinstance(a, Tensor)), "meta")
        if not torch_private.autocasts(kind):
            return args
        to = torch.get_autocast_dtype(kind)
        return tuple(
            a.to(to) if i in self.autocast and isinstance(a, Tensor) and a.dtype in _LOWERED else a
            for i, a in enumerate(args)
        )

    def explain(
        self, *args: Any, compiled: bool = False, arch: str | Arch | None = None, gradient: bool = False, **kwargs: Any
    ) -> Choice:
        """Which kernel would serve this call, why not the others, and what it tells of how. Runs nothing.

        arch: an architecture, or its name in `hardware/arch.toml`, in place of the tensors' device. gradient: of the
        op's gradient in its place. Raises ValueError for an unknown arch, and for an op whose gradient is no op.
        """
        return explanation.of_call(self, self.bind(args, kwargs), compiled, arch, gradient)

    def described(self, args: tuple, device: torch.device, arch: Any) -> Any:
        """The metadata of a call as if its tensors were on `device`, one of an architecture, wherever they are."""
        call = self._describe(*args)
        moved = [f._replace(device=device) if isinstance(f, TensorFacts) else f for f in call]
        return type(call)(*moved)._replace(arch=arch)

    def __repr__(self) -> str:
        return f"Op({self.name}{self.__signature__}, kernels={list(self.backends())})"

    def __reduce__(self):
        return (_find, (self.name,))

    def __deepcopy__(self, memo):
        return self


def _find(name: str) -> Op:
    return ops()[name]


_UNCHECKED = (AttributeError, LookupError, TypeError, ValueError, RuntimeError)  # what an argument of no kind may cause
_LOWERED = (torch.float32, torch.float16, torch.bfloat16)
_functorch = torch_private.functorch
_compiling = torch.compiler.is_compiling
_any_autocast = torch_private.any_autocast
