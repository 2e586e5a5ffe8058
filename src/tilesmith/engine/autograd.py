"""The gradient of an op: an autograd.Function for eager calls, the same pair registered for traced ones."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tilesmith.engine import route
from tilesmith.engine.choice import parse_pin, pinned

_functorch = torch._C._functorch.peek_interpreter_stack


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
        self.refusal = ""
        if self.kept_outputs and op.vjp.gradient is not None:
            op.vjp.gradient.refusal = (
                f"{op.vjp.name} cannot be differentiated apart from {op.name}: it reads outputs of it as constants"
            )
        self.routes: dict[tuple[bool, ...], Any] = {}  # the way through the vjp, by which gradients are needed
        self.eager, self.transformed = self._make_functions()
        # Function.apply first looks for functorch wrappers in every argument; there are none outside functorch
        self.apply_eager = super(torch.autograd.Function, self.eager).apply
        self._register()

    def needed(self, args: tuple) -> bool:
        """Whether any tensor argument asks for a gradient."""
        for i in self.tensors:
            a = args[i]
            if a is not None and a.requires_grad:
                return True
        return False

    # what is saved ------------------------------------------------------------------------------------------------

    def save(self, ctx: Any, args: tuple, outs: tuple, pin: str) -> None:
        """Save all inputs that the vjp (or a second backward) reads, and the outputs that the vjp reads."""
        kept = [outs[i] for i in self.kept_outputs]
        if self.op.unsaved is not None:
            unread = self.op.unsaved(*args)
            kept = [
                out.new_empty((*out.shape[:-1], 0)) if self.op.outputs[i] in unread else out
                for i, out in zip(self.kept_outputs, kept)
            ]
        ctx.save_for_backward(*[args[i] for i in self.kept_inputs], *kept)
        ctx.plain = rest = list(args)
        for i in self.tensors:
            rest[i] = None
        ctx.like = [_like(args[i]) for i in self.described] if self.described else ()
        ctx.pin = pin

    def restore(self, ctx: Any) -> tuple[list[Any], dict[int, Tensor]]:
        """The op's arguments (None where a tensor was not saved) and its saved outputs."""
        saved = ctx.saved_tensors
        args = list(ctx.plain)
        for i, t in zip(self.kept_inputs, saved):
            args[i] = t
        return args, dict(zip(self.kept_outputs, saved[len(self.kept_inputs) :]))

    # the two ways back --------------------------------------------------------------------------------------------

    def backward(self, ctx: Any, grads: tuple, needs: tuple) -> tuple:
        """Gradients of all arguments of the op, None where not needed."""
        for grad in grads[: self.op.public]:
            if grad is not None:
                break
        else:
            return (None,) * len(needs)
        if self.refusal:
            raise NotImplementedError(self.refusal)
        if self.plan is None or _differentiated_again():
            return self.through_reference(ctx, grads, needs)
        return self.through_vjp(ctx, grads, needs, self.op.vjp.run)

    def through_vjp(self, ctx: Any, grads: tuple, needs: tuple, run: Any) -> tuple:
        way = self.routes.get(needs)
        if way is None:
            if True not in needs:
                return (None,) * len(needs)
            way = self.routes[needs] = route.make(self, needs)
        vjp = self.op.vjp
        pin = ctx.pin if ctx.pin and parse_pin(ctx.pin)[0] in vjp.backends() else pinned(vjp.name)
        return way(run, pin, grads, ctx.saved_tensors, ctx.plain, ctx.like)

    def through_reference(self, ctx: Any, grads: tuple, needs: tuple) -> tuple:
        op = self.op
        args, _ = self.restore(ctx)
        lost = [op.parameters[i] for i, like in zip(self.described, ctx.like) if like is not None]
        if lost and self.kept_outputs:
            raise NotImplementedError(
                f"double backward of {op.name} needs its inputs {', '.join(lost)}, which its backward does not keep"
            )
        if lost:  # then the gradient does not depend on them: the vjp's own reference can be differentiated
            return self.through_vjp(ctx, grads, needs, lambda call, pin: op.vjp.reference(*call))
        wanted = [i for i in self.tensors if needs[i]]

        def forward(*tensors: Tensor) -> tuple[Tensor, ...]:
            full = list(args)
            for i, t in zip(wanted, tensors):
                full[i] = t
            outs = op.reference(*full)
            outs = outs if isinstance(outs, tuple) else (outs,)
            return tuple(o for o, g in zip(outs, grads[: op.public]) if g is not None)

        given = tuple(g for g in grads[: op.public] if g is not None)
        _, pull = torch.func.vjp(forward, *(args[i] for i in wanted))
        result: list[Any] = [None] * len(needs)
        for i, grad in zip(wanted, pull(given)):
            result[i] = grad
        return tuple(result)

    # registration -------------------------------------------------------------------------------------------------

    def apply(self, pin: str, ready: Any, args: tuple) -> Any:
        """All outputs, connected to autograd. ready: the kernel for these arguments, if it is known."""
        if _functorch() is None:
            return self.apply_eager(pin, ready, *args)
        return self.transformed.apply(pin, *args)

    def _keep(self, ctx: Any, pin: str, args: tuple, output: Any) -> None:
        outs = output if isinstance(output, tuple) else (output,)
        self.save(ctx, args, outs, pin)
        if self.hidden:
            ctx.mark_non_differentiable(*outs[self.op.public :])
        ctx.set_materialize_grads(False)

    def _make_functions(self) -> tuple[type, type]:
        """Two forms of one Function. torch binds the arguments of the form that functorch needs by inspect.signature,
        which costs more than the rest of an eager call; so eager calls get the form with `ctx` in forward."""
        gradient, op = self, self.op

        def backward(ctx, *grads):
            return (None, *gradient.backward(ctx, grads, ctx.needs_input_grad[1:]))

        def backward_eager(ctx, *grads):
            return (None, None, *gradient.backward(ctx, grads, ctx.needs_input_grad[2:]))

        def forward(ctx, pin, ready, *args):
            output = op.run(args, pin) if ready is None else ready(*args)
            gradient._keep(ctx, pin, args, output)
            return output

        def setup_context(ctx, inputs, output):
            gradient._keep(ctx, inputs[0], inputs[1:], output)

        def vmap(info, in_dims, pin, *args):
            return _vmap(op, info.batch_size, in_dims[1:], args, pin, gradient.transformed.apply)

        def make(**methods):
            static = {name: staticmethod(fn) for name, fn in methods.items()}
            return type(f"{op.name}_function", (torch.autograd.Function,), static)

        eager = make(forward=forward, backward=backward_eager)
        plain = lambda pin, *args: op.run(args, pin)  # noqa: E731
        return eager, make(forward=plain, setup_context=setup_context, backward=backward, vmap=vmap)

    def _register(self) -> None:
        op = self.op

        def setup(ctx, inputs, keyword_only_inputs, output):
            outs = tuple(output) if isinstance(output, tuple | list) else (output,)
            self.save(ctx, inputs, outs, keyword_only_inputs["pin"])
            ctx.set_materialize_grads(False)  # a zero gradient is work, None is not

        def backward(ctx, *grads):
            # the dispatcher leaves out trailing arguments that equal their defaults
            needs = ctx.needs_input_grad[: len(op.parameters)]
            padded = (*needs, *(False,) * (len(op.parameters) - len(needs)))
            return self.backward(ctx, grads, padded)[: len(needs)]

        from tilesmith.engine.op import LIBRARY

        torch.library.register_autograd(f"tilesmith::{op.name}", backward, setup_context=setup, lib=LIBRARY)


def _like(tensor: Tensor | None) -> tuple[torch.dtype, int] | None:
    return None if tensor is None else (tensor.dtype, tensor.numel())


def _differentiated_again() -> bool:
    """Whether what a backward computes will itself be differentiated: create_graph, or a nested functorch gradient."""
    if not torch.is_grad_enabled() or torch.compiler.is_compiling():
        return False
    stack = torch._C._functorch.get_interpreter_stack()
    return not stack or sum(level.key() == torch._C._functorch.TransformType.Grad for level in stack) > 1


def _types(op: Any) -> list[str]:
    schema = op.handle._schema
    return [("Tensor" if "Tensor" in str(a.type) else str(a.type)) for a in schema.arguments if not a.kwarg_only]


def _plan(op: Any) -> list[tuple[str, int]]:
    """For each parameter of the vjp: ("grad" | "input" | "output" | "mask", index)."""
    plan = []
    public = op.outputs[: op.public]
    for name in op.vjp.parameters:
        if name == "output_mask":
            plan.append(("mask", 0))
        elif name in op.parameters:
            plan.append(("input", op.parameters.index(name)))
        elif name in op.outputs:
            plan.append(("output", op.outputs.index(name)))
        elif name[:1] == "d" and name[1:] in public:
            plan.append(("grad", public.index(name[1:])))
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


def register_loop_vmap(op: Any, qualified: str, library: Any) -> None:
    """vmap of the traced op (and of vjps, which have no autograd.Function): fold or loop."""

    def rule(info, in_dims, *args, pin=""):
        in_dims = (*in_dims, *(None,) * (len(op.parameters) - len(args)))
        return _vmap(op, info.batch_size, in_dims, op.complete(args), pin, lambda p, *a: op.handle(*a, pin=p))

    torch.library.register_vmap(qualified, rule, lib=library)
