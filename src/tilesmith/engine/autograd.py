"""The gradient of an op: an autograd.Function for eager calls, the same pair registered for traced ones."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor

from tilesmith.engine import route, torch_private
from tilesmith.engine.choice import pinned
from tilesmith.engine.kernel import as_written
from tilesmith.engine.pins import parse_pin
from tilesmith.engine.registry import LIBRARY


class Gradient:
    """Connects an op with its vjp by the names of the vjp's parameters.

    Which gradients are needed travels to the vjp as `output_mask`, and the pin of the forward as `pin`. A second
    backward, and an op without a vjp, differentiate a recomputed reference.
    """

    def __init__(self, op: Any):
        self.op = op
        self.tensors = tuple(i for i, t in enumerate(_types(op)) if t.startswith("Tensor"))
        self.plan = _plan(op) if op.vjp is not None else None
        read = self.plan if self.plan is not None else [("input", i) for i in self.tensors]
        self.kept_inputs = tuple(i for kind, i in read if kind == "input" and i in self.tensors)
        self.kept_outputs = tuple(i for kind, i in read if kind == "output")
        self.described: tuple[int, ...] = ()
        if self.plan is not None:
            position = {n: i for i, n in enumerate(op.parameters)}
            self.targets = tuple(position[n[1:]] for n in op.vjp.outputs)
            self.twins = tuple((position[a], position[of]) for a, of in op.alias.items() if of in position)
            grads = {f"d{name}": i for i, name in enumerate(op.outputs[: op.public])}
            self.passed = tuple((position[a], grads[of]) for a, of in op.alias.items() if of not in position)
            self.described = tuple(i for i in self.tensors if i not in self.kept_inputs)
        self.hidden = len(op.outputs) > op.public
        self.overwrites = self.plan is not None and self.plan[-1][0] == "overwrite"
        if self.overwrites:
            op.vjp.overwrites = True
        self.refusal = ""
        if self.kept_outputs and op.vjp.gradient is not None:
            op.vjp.gradient.refusal = (
                f"{op.vjp.name} cannot be differentiated apart from {op.name}: it reads outputs of it as constants"
            )
        # generated once for what they depend on: which tensors there are, and which gradients are needed
        self.save_function = cache(partial(route.save_function, self))
        self.route = cache(partial(route.make, self))
        self.eager, self.transformed = self._make_functions()
        # Function.apply first looks for functorch wrappers in every argument; there are none outside functorch
        self.apply_eager = super(torch.autograd.Function, self.eager).apply
        self._register()

    def needs(self, args: tuple) -> tuple[bool, ...]:
        """Which arguments ask for a gradient."""
        return tuple(isinstance(a, Tensor) and a.requires_grad for a in args)

    def arguments(self, args: tuple, usual: bool = False) -> tuple:
        """What the vjp of a call would be given, on meta: tensors without memory.

        usual: gradients come in for the first output and those with as many dims, such as the sum of add_rms_norm, not
        for statistics, such as attention's lse; else for all that are public.
        """
        op = self.op
        made = {id(a): _unallocated(a) for a in args if isinstance(a, Tensor)}  # one tensor stays one
        asked = {n: a.requires_grad for n, a in zip(op.parameters, args) if isinstance(a, Tensor)}
        args = tuple(made.get(id(a), a) for a in args)
        found = op.fake(*args)
        outputs = dict(zip(op.outputs, found if isinstance(found, tuple) else (found,)))
        dims = outputs[op.outputs[0]].ndim
        grads = {f"d{n}": None if usual and x.ndim != dims else x for n, x in outputs.items()}
        known = {**dict(zip(op.parameters, args)), **outputs, **grads}
        wanted = [asked.get(n[1:], False) or (n[1:] in asked and not any(asked.values())) for n in op.vjp.outputs]
        known |= {**op.vjp.defaults, "output_mask": wanted, "overwrite": usual}
        return tuple(known[n] for n in op.vjp.parameters)

    # the two ways back --------------------------------------------------------------------------------------------

    def backward(self, ctx: Any, grads: tuple, needs: tuple, returned: tuple) -> tuple:
        """Gradients of the arguments `returned`, None where not needed and in the place of None."""
        for grad in grads[: self.op.public]:
            if grad is not None:
                break
        else:
            return (None,) * len(returned)
        if self.refusal:
            raise NotImplementedError(self.refusal)
        if self.plan is None or _differentiated_again():
            return self.through_reference(ctx, grads, needs, returned)
        return self.through_vjp(ctx, grads, self.route(needs, ctx.way.present, returned), self.op.vjp.run)

    def through_vjp(self, ctx: Any, grads: tuple, back: Callable[..., tuple], run: Callable[..., Any]) -> tuple:
        way = ctx.way
        return back(run, self.pin_of_vjp(way.pin), grads, ctx.saved_tensors, way.plain, way.like)

    def pin_of_vjp(self, pin: str) -> str:
        """The pin of the vjp of a call with this pin."""
        vjp = self.op.vjp
        return pinned(vjp.name) or (pin if pin and parse_pin(pin)[0] in vjp.backends() else "")

    def through_reference(self, ctx: Any, grads: tuple, needs: tuple, returned: tuple) -> tuple:
        op = self.op
        args = list(ctx.way.plain)
        for i, t in zip(ctx.way.present, ctx.saved_tensors):
            args[i] = t
        lost = [op.parameters[i] for i, like in zip(self.described, ctx.way.like) if like is not None]
        if lost and self.kept_outputs:
            raise NotImplementedError(
                f"double backward of {op.name} needs its inputs {', '.join(lost)}, which its backward does not keep"
            )
        given = tuple(g for g in grads[: op.public] if g is not None)
        kind = given[0].device.type
        if lost:  # then the gradient does not depend on them: the vjp's own reference can be differentiated
            back = self.route(needs, ctx.way.present, returned)
            return self.through_vjp(ctx, grads, back, lambda call, pin: as_written(op.vjp.reference, kind)(*call))
        wanted = [i for i in self.tensors if needs[i]]

        def forward(*tensors: Tensor) -> tuple[Tensor, ...]:
            full = list(args)
            for i, t in zip(wanted, tensors):
                full[i] = t
            outs = op.reference(*full)
            outs = outs if isinstance(outs, tuple) else (outs,)
            return tuple(o for o, g in zip(outs, grads[: op.public]) if g is not None)

        pull = as_written(lambda *tensors: _pulled_back(forward, tensors, given), kind)
        result: dict[int | None, Tensor] = dict(zip(wanted, pull(*(args[i] for i in wanted))))
        return tuple(result.get(i) for i in returned)

    # registration -------------------------------------------------------------------------------------------------

    def apply(self, ready: Any, args: tuple) -> Any:
        """All outputs, connected to autograd by ready.way, of a call outside functorch."""
        return self.apply_eager(ready, args, *[args[i] for i in ready.way.asking])

    def _make_functions(self) -> tuple[type, type]:
        """Two forms of one Function. torch binds the arguments of the form that functorch needs by inspect.signature,
        which costs more than the rest of an eager call; so eager calls get the form with `ctx` in forward, and show
        autograd only the arguments that ask for a gradient, since it looks at each."""
        gradient, op = self, self.op
        every = (None, *range(len(op.parameters)))

        def backward(ctx, *grads):
            return gradient.backward(ctx, grads, ctx.needs_input_grad[1:], every)

        def backward_eager(ctx, *grads):
            way = ctx.way
            if way.back is None or torch.is_grad_enabled():
                return gradient.backward(ctx, grads, way.needs, way.returned)
            over = gradient.overwrites and ctx.unhooked and _last_backward(grads)
            return gradient.through_vjp(ctx, grads, way.back, overwriting if over else op.vjp.run)

        def overwriting(call, pin):
            return op.vjp.run((*call[:-1], True), pin)

        def forward(ctx, ready, args, *asking):
            output = unviewed(ready.run(*args))
            ready.way.keep(ctx, args, output)
            ctx.way = ready.way
            return output

        def setup_context(ctx, inputs, output):
            pin, *args = inputs
            ctx.way = Way(gradient, pin, args)
            ctx.way.keep(ctx, args, output)

        def vmap(info, in_dims, pin, *args):
            return _vmap(op, info.batch_size, in_dims[1:], args, pin, gradient.transformed.apply)

        def jvp(ctx, *tangents):
            raise no_forward_mode(op.name)

        def make(**methods):
            static = {name: staticmethod(fn) for name, fn in {**methods, "jvp": jvp}.items()}
            return type(f"{op.name}_function", (torch.autograd.Function,), static)

        eager = make(forward=forward, backward=backward_eager)
        plain = lambda pin, *args: unviewed(op.run(args, pin))  # noqa: E731
        return eager, make(forward=plain, setup_context=setup_context, backward=backward, vmap=vmap)

    def _register(self) -> None:
        op = self.op

        def setup(ctx, inputs, keyword_only_inputs, output):
            ctx.way = Way(self, keyword_only_inputs["pin"], inputs)
            ctx.way.keep(ctx, inputs, tuple(output) if isinstance(output, list) else output)

        def backward(ctx, *grads):
            # the dispatcher leaves out trailing arguments that equal their defaults
            needs = ctx.needs_input_grad[: len(op.parameters)]
            padded = (*needs, *(False,) * (len(op.parameters) - len(needs)))
            return self.backward(ctx, grads, padded, tuple(range(len(needs))))

        torch.library.register_autograd(f"tilesmith::{op.dispatched_as}", backward, setup_context=setup, lib=LIBRARY)


class Way:
    """How a call is connected to autograd, and what its backward knows beside the saved tensors; calls of one key share
    it.

    pin: of the call. plain: its arguments, None for tensors. present: the kept inputs that are tensors. like: dtype,
    number of elements and of dims of the inputs that are not kept. needs: which arguments ask for a gradient, and
    asking: their indices; returned: the arguments whose gradients the eager Function returns. keep: saves what the
    vjp reads. back: an eager call's way through the vjp, None where it has none.
    """

    def __init__(self, gradient: Gradient, pin: str, args: Sequence[Any], needs: tuple[bool, ...] = ()):
        op = gradient.op
        self.pin, self.needs = pin, needs
        self.asking = tuple(i for i, need in enumerate(needs) if need)
        self.returned = (None, None, *self.asking)
        self.plain = [tuple(a) if isinstance(a, list) else a for a in args]
        for i in gradient.tensors:
            self.plain[i] = None
        self.present = tuple(i for i in gradient.kept_inputs if args[i] is not None)
        self.like = [_like(args[i]) for i in gradient.described]
        unread = tuple(op.unsaved(*args)) if op.unsaved is not None else ()
        self.keep = gradient.save_function(self.present, unread)
        plain = True in needs and gradient.plan is not None and not gradient.refusal
        self.back = gradient.route(needs, self.present, self.returned) if plain else None


def unviewed(outs: Any) -> Any:
    """What a kernel returned, none of it a view: of a view that a Function made, autograd refuses `y += 1`."""
    if isinstance(outs, Tensor):
        return outs.data if outs._is_view() else outs
    for out in outs:
        if out is not None and out._is_view():
            return tuple(o if o is None or not o._is_view() else o.data for o in outs)
    return outs


def no_forward_mode(name: str) -> NotImplementedError:
    """The error of a call whose arguments have tangents."""
    return NotImplementedError(
        f"{name}: there is no forward-mode gradient (torch.func.jvp, jacfwd, hessian, linearize; forward_ad); take "
        "reverse mode, torch.func.vjp or jacrev, or PyTorch's own function"
    )


def has_tangents(args: tuple) -> bool:
    """Whether a dual number of torch.autograd.forward_ad is among the arguments."""
    return any(isinstance(a, Tensor) and torch.autograd.forward_ad.unpack_dual(a).tangent is not None for a in args)


def _unallocated(x: Tensor) -> Tensor:
    """A tensor of x's shape, strides and dtype without memory."""
    return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="meta")


def _like(tensor: Tensor | None) -> tuple[torch.dtype, int, int] | None:
    return None if tensor is None else (tensor.dtype, tensor.numel(), tensor.ndim)


def _differentiated_again() -> bool:
    """Whether what a backward computes will itself be differentiated: create_graph, or a nested functorch gradient."""
    if not torch.is_grad_enabled() or torch.compiler.is_compiling():
        return False
    return torch_private.differentiates_gradients()


def _pulled_back(forward: Callable[..., tuple], tensors: tuple, given: tuple) -> tuple[Tensor, ...]:
    """Gradients of forward(*tensors) with respect to each, for those that come in, `given`."""
    transformed = torch_private.functorch() is not None or torch.compiler.is_compiling()
    if transformed or torch_private.saved_tensors_hooks(False) is None:
        return torch.func.vjp(forward, *tensors)[1](given)
    again = torch.is_grad_enabled()  # torch.func knows no hooks of saved tensors, autograd does
    with torch.enable_grad():
        apart = [t.view_as(t) for t in tensors]  # one may have been computed from another, which is no path here
        outs = [(o, g) for o, g in zip(forward(*apart), given) if o.requires_grad]
        if not outs:
            return tuple(torch.zeros_like(t) for t in tensors)
        reached, incoming = zip(*outs)
        return torch.autograd.grad(reached, apart, incoming, create_graph=again, materialize_grads=True)


def _last_backward(grads: tuple) -> bool:
    """Whether nothing will read what was saved once this backward is through: its graph is freed, and no CUDA graph is
    being captured that could run the backward again without its forward."""
    device = next((g.device for g in grads if g is not None), None)
    if device is None or (device.type == "cuda" and torch.cuda.is_current_stream_capturing()):
        return False
    return not torch_private.graph_is_kept()


def _types(op: Any) -> list[str]:
    schema = op.handle._schema
    return [("Tensor" if "Tensor" in str(a.type) else str(a.type)) for a in schema.arguments if not a.kwarg_only]


def _plan(op: Any) -> list[tuple[str, int]]:
    """For each parameter of the vjp: ("grad" | "input" | "output" | "mask" | "overwrite" | "default", index)."""
    plan: list[tuple[str, int]] = []
    public = op.outputs[: op.public]
    for name in op.vjp.parameters:
        if name == "output_mask":
            plan.append(("mask", 0))
        elif name in op.parameters:
            plan.append(("input", op.parameters.index(name)))
        elif name == "overwrite" and name == op.vjp.parameters[-1]:
            plan.append(("overwrite", 0))
        elif name in op.outputs:
            plan.append(("output", op.outputs.index(name)))
        elif name[:1] == "d" and name[1:] in public:
            plan.append(("grad", public.index(name[1:])))
        elif name in op.vjp.defaults:
            plan.append(("default", len(plan)))
        else:
            raise TypeError(f"{op.vjp.name}: parameter {name!r} is no input, output or d<public output> of {op.name}")
    for name in op.vjp.outputs:
        if name[:1] != "d" or name[1:] not in op.parameters:
            raise TypeError(f"{op.vjp.name}: output {name!r} must be d<input of {op.name}>")
    return plan


def _folds(op: Any) -> bool:
    """Whether more rows leave each row's outputs alone; a vjp that also sums over rows (dweight) must loop."""
    summed = [n for n in op.outputs if n[1:] not in op.fold] if op.name.endswith("_vjp") else []
    return bool(op.fold) and not summed


def _vmap(op: Any, size: int, in_dims: tuple, args: tuple, pin: str, call: Any) -> tuple:
    """Fold a batch of rows into the op where the declaration allows it, else loop over the batch and stack."""
    batched = [i for i, d in enumerate(in_dims) if isinstance(d, int)]
    if _folds(op) and all(op.parameters[i] in op.fold for i in batched):
        folded = list(args)
        for i, name in enumerate(op.parameters):
            if name in op.fold and isinstance(args[i], Tensor):
                d = in_dims[i]
                folded[i] = args[i].movedim(d, 0) if i in batched else args[i].expand(size, *args[i].shape)
        outs = call(pin, *folded)
        return outs, (0,) * len(outs) if isinstance(outs, tuple) else 0
    each = []
    for b in range(size):
        one = [a.select(d, b) if isinstance(d, int) else a for a, d in zip(args, in_dims)]
        each.append(call(pin, *one))
    if isinstance(each[0], tuple | list):
        return tuple(torch.stack(o) for o in zip(*each)), (0,) * len(each[0])
    return torch.stack(each), 0


def register_loop_vmap(op: Any, qualified: str) -> None:
    """vmap of the traced op (and of vjps, which have no autograd.Function): fold or loop."""

    def rule(info, in_dims, *args, pin=""):
        in_dims = (*in_dims, *(None,) * (len(op.parameters) - len(args)))
        return _vmap(op, info.batch_size, in_dims, op.complete(args), pin, lambda p, *a: op.handle(*a, pin=p))

    torch.library.register_vmap(qualified, rule, lib=LIBRARY)
