"""What takes most of the time of Triton's interpreter (3.6 to 3.8), worked out once per type, not once per operation.

The interpreter decides types, shapes and casts of each operation anew, in Python, and that takes ten times as long as
numpy's part. Here a plan per pair of types is kept: what both sides are cast to, the numpy function, the type of the
result. What has no plan (pointers in odd places, bf16, fp8, errors) goes the interpreter's own way.
`tests/test_interpreter.py` holds the two ways against each other.
"""

import dataclasses
from typing import Any, NamedTuple

import numpy as np


class Plan(NamedTuple):
    """One operation on operands of two types."""

    left: Any  # numpy's dtype to cast to, or None
    right: Any
    compute: Any
    handle: Any  # type of an element of the result
    type: Any
    limits: tuple  # of a plain integer among the operands


def install(interpreter, tl) -> None:
    from triton.language.semantic import TritonSemantic

    _know_types(tl)
    _patch_once(interpreter, tl)
    # the overflow checks of integer arithmetic end in an assertion that only debug mode makes
    builder = interpreter.interpreter_builder
    builder.options = dataclasses.replace(builder.options, sanitize_overflow=False)
    to_tensor = TritonSemantic.to_tensor

    def as_tensor(self, x, check_type=True):
        return x if type(x) is tl.tensor else to_tensor(self, x, check_type)

    TritonSemantic.to_tensor = as_tensor
    _plan_arithmetic(interpreter, tl, TritonSemantic)
    _cast_by_type(interpreter, tl, TritonSemantic)
    _broadcast_by_type(tl, TritonSemantic)


def _know_types(tl) -> None:
    """A block type is named, checked and unwrapped once, as are the shape and the number of elements of its tensors."""
    blocks, types = {}, {}
    build = tl.block_type.__init__
    constexpr = tl.constexpr

    def know_block(self, element_ty, shape):
        sizes = tuple([s.value if type(s) is constexpr else s for s in shape])
        key = (element_ty.name, sizes)
        known = blocks.get(key)
        if known is None:
            build(self, element_ty, shape)
            known = blocks[key] = (self, self.__dict__)
        self.__dict__ = known[1]

    def about(kind):
        """The one object for a type, and what each tensor of the type holds."""
        own = types.setdefault((type(kind), kind.name, getattr(kind, "address_space", None)), kind)
        sizes = tuple(own.shape) if own.is_block() else ()
        count = 1
        for size in sizes:
            count *= size
        fields = {"shape": tl.tuple([constexpr(s) for s in sizes]), "numel": constexpr(count)}
        return fields | {"type": own, "dtype": own.scalar}

    def build_tensor(self, handle, type):
        named = type.__dict__
        fields = named.get("_of_tensors")
        if fields is None:
            fields = named["_of_tensors"] = about(type)
        own = self.__dict__
        own.update(fields)
        own["handle"] = handle

    tl.block_type.__init__ = know_block
    tl.tensor.__init__ = build_tensor


def _patch_once(interpreter, tl) -> None:
    """A launch patches the language and restores it. The interpreter makes the patches anew each time, and once more at
    each call of a device function, where they stay."""
    made, active = [], []
    patch_all = interpreter._patch_lang
    code_of_builtins = tl.core.builtin(print).__code__

    def patch_attr(owner, name, member, builder, scope):
        if getattr(member, "__code__", None) is code_of_builtins:  # it checks that a semantic came along
            member = member.__wrapped__
        semantic = interpreter.TritonSemantic(builder)

        def call(*args, **kwargs):
            kwargs["_semantic"] = semantic
            return member(*args, **kwargs)

        scope.set_attr(owner, name, call)

    def make():
        def visible():
            """Sees both names of the language."""

        both = type(visible)(visible.__code__, {"tl": tl, "core": tl.core})
        first = {}
        for owner, name, was in patch_all(both)._changes:
            first.setdefault((id(owner), name), (owner, name, was))
        made.extend((owner, name, owner.__dict__[name], was) for owner, name, was in first.values())

    class Scope:
        def restore(self):
            active.pop()
            if active:
                return
            for owner, name, _, was in reversed(made):
                if was is interpreter._MISSING:
                    delattr(owner, name)
                else:
                    setattr(owner, name, was)

    def patch(fn):
        active.append(fn)
        if len(active) == 1:
            if not made:
                make()
            for owner, name, new, _ in made:
                setattr(owner, name, new)
        return Scope()

    def call_device_function(self, *args, **kwargs):
        scope = patch(self.fn)
        try:
            return self.rewrite()(*args, **kwargs)
        except Exception as error:
            raise interpreter.InterpreterError(repr(error)) from error
        finally:
            scope.restore()

    def set_attr(self, owner, name, value):
        """What a class inherits is not what it held."""
        self._changes.append((owner, name, vars(owner).get(name, interpreter._MISSING)))
        setattr(owner, name, value)

    interpreter._LangPatchScope.set_attr = set_attr
    interpreter._patch_attr = patch_attr
    interpreter._patch_lang = patch
    interpreter.InterpretedFunction.__call__ = call_device_function


def _divide(x, y):
    """Integers, towards zero."""
    return (x - np.fmod(x, y)) // y


FLOATS = {"fp16": np.float16, "fp32": np.float32, "fp64": np.float64}
INTEGERS = {f"{u}int{n}": np.dtype(f"{u}int{n}") for u in ("", "u") for n in (8, 16, 32, 64)}
NATIVE = {name: np.dtype(kind) for name, kind in (FLOATS | INTEGERS).items()} | {"int1": np.dtype(bool)}
# method of the semantic -> (function for floats, function for integers, divides, compares)
ARITHMETIC = {
    "add": (np.add, np.add, False, False),
    "sub": (np.subtract, np.subtract, False, False),
    "mul": (np.multiply, np.multiply, False, False),
    "truediv": (np.divide, None, True, False),
    "floordiv": (None, _divide, True, False),
    "mod": (np.fmod, np.fmod, True, False),
    "minimum": (np.minimum, np.minimum, False, False),
    "maximum": (np.maximum, np.maximum, False, False),
    "and_": (None, np.bitwise_and, False, False),
    "or_": (None, np.bitwise_or, False, False),
    "xor_": (None, np.bitwise_xor, False, False),
    "less_than": (np.less, np.less, False, True),
    "less_equal": (np.less_equal, np.less_equal, False, True),
    "greater_than": (np.greater, np.greater, False, True),
    "greater_equal": (np.greater_equal, np.greater_equal, False, True),
    "equal": (np.equal, np.equal, False, True),
    "not_equal": (np.not_equal, np.not_equal, False, True),
}
LOGICAL = ("and_", "or_", "xor_", "equal", "not_equal")  # of booleans too


def _plan_arithmetic(interpreter, tl, semantic_class) -> None:
    handle_class, tensor = interpreter.TensorHandle, tl.tensor

    def planned(name):
        original, plans = getattr(semantic_class, name), {}

        def method(self, input, other, *more, **named):
            if named:
                return original(self, input, other, *more, **named)
            a = input.type if type(input) is tensor else type(input)
            b = other.type if type(other) is tensor else type(other)
            key = (id(a), id(b), *more)
            plan = plans.get(key)
            if plan is None:
                plan = plans[key] = _plan(tl, self, name, a, b) or False, a, b  # kept, so that no other gets their id
            plan = plan[0]
            if plan is False:
                return original(self, input, other, *more)
            x = _data(input, tensor, plan.left, plan.limits)
            y = _data(other, tensor, plan.right, plan.limits)
            if x is None or y is None:
                return original(self, input, other, *more)
            with_type = handle_class.__new__(handle_class)
            with_type.data, with_type.dtype, with_type.attr = plan.compute(x, y), plan.handle, {}
            return tensor(with_type, plan.type)

        return method

    one, nan = (handle_class(np.array([value], np.float32), tl.float32) for value in (1.0, np.nan))
    drops_nan = interpreter.interpreter_builder.create_minnumf(one, nan).data[0] == 1  # 3.8; 3.6 has one way for both
    for name in ARITHMETIC:
        if not (drops_nan and name in ("minimum", "maximum")):
            setattr(semantic_class, name, planned(name))


def _data(operand, tensor, to, limits):
    if type(operand) is tensor:
        data = operand.handle.data
        return data if to is None or data.dtype is to else data.astype(to)
    if limits and not limits[0] <= operand <= limits[1]:
        return None
    return np.array([operand or 0], to)  # a negative zero is a zero, as a constant of the kernel's


def _plan(tl, semantic, name, a, b):
    """How `name` treats operands of these types, or None where the interpreter's own way is to be taken."""
    floats, integers, divides, compares = ARITHMETIC[name]
    scalars = [kind.scalar if isinstance(kind, tl.dtype) else kind for kind in (a, b)]
    if name == "add" and isinstance(scalars[0], tl.pointer_type) and scalars[1] in (tl.int32, tl.int64):
        return _plan_offset(tl, scalars[0], a, b)
    plain = [kind is int or kind is float for kind in scalars]
    known = [p or (isinstance(kind, tl.dtype) and kind.name in NATIVE) for p, kind in zip(plain, scalars)]
    if all(plain) or not all(known):
        return None
    # what a plain number counts as before it takes the other's type
    counted = [tl.int32 if kind is int else tl.float32 if kind is float else kind for kind in scalars]
    try:
        common = semantic.computation_type_impl(counted[0], plain[0], counted[1], plain[1], divides)
    except TypeError:
        return None
    floating = common.is_floating()
    if any(plain) and common != counted[1 - plain.index(True)]:
        return None  # the number decided the type: by its magnitude, too
    compute = floats if floating else integers
    if compute is None or (common.is_bool() and not (name in LOGICAL and counted[0] == counted[1])):
        return None
    shape = _broadcast(tl, a, b)
    if shape is None:
        return None
    kind = NATIVE[common.name]
    limits = (common.get_int_min_value(), common.get_int_max_value()) if any(plain) and not floating else ()
    out = tl.int1 if compares else common
    return Plan(kind, kind, compute, out, tl.block_type(out, shape) if shape else out, limits)


def _plan_offset(tl, pointer, a, b):
    """A pointer and an offset in elements."""
    size = max(1, pointer.element_ty.primitive_bitwidth // 8)
    shape = _broadcast(tl, a, b)
    if shape is None:
        return None

    def compute(addresses, offsets):
        return addresses + size * offsets.astype(np.uint64)

    return Plan(None, None, compute, pointer, tl.block_type(pointer, shape) if shape else pointer, ())


def _broadcast(tl, a, b):
    """The common shape, () of two scalars; None where there is none."""
    shapes = [tuple(kind.shape) if isinstance(kind, tl.block_type) else () for kind in (a, b)]
    rank = max(map(len, shapes))
    x, y = ((1,) * (rank - len(shape)) + shape for shape in shapes)
    if any(p != q and 1 not in (p, q) for p, q in zip(x, y)):
        return None
    return [q if p == 1 else p for p, q in zip(x, y)]


def _cast_by_type(interpreter, tl, semantic_class) -> None:
    """Casts between types that numpy has, and none to a boolean."""
    original, plans = semantic_class.cast, {}
    handle_class, tensor = interpreter.TensorHandle, tl.tensor

    def cast(self, input, dst_ty, fp_downcast_rounding=None):
        source = input.type
        key = (id(source), dst_ty.scalar.name)
        plan = plans.get(key)
        if plan is None:
            a, b = source.scalar, dst_ty.scalar
            plan = source, None, None, None
            if not a.is_ptr() and not b.is_ptr() and a.name in NATIVE and b.name in NATIVE and b.name != "int1":
                shaped = source.with_element_ty(b) if source.is_block() else b
                plan = source, None if a == b else NATIVE[b.name], b, shaped
            plans[key] = plan
        _, to, scalar, shaped = plan
        if scalar is None or fp_downcast_rounding is not None:
            return original(self, input, dst_ty, fp_downcast_rounding)
        if to is None:
            return input
        made = handle_class.__new__(handle_class)
        made.data, made.dtype, made.attr = input.handle.data.astype(to), scalar, {}
        return tensor(made, shaped)

    semantic_class.cast = cast


def _broadcast_by_type(tl, semantic_class) -> None:
    """Operands of `where`, `load` and `store`."""
    original, plans = semantic_class.broadcast_impl_value, {}

    def broadcast_impl_value(self, lhs, rhs):
        a, b = lhs.type, rhs.type
        if a is b:
            return lhs, rhs
        plan = plans.get((id(a), id(b)))
        if plan is None:
            shape = _broadcast(tl, a, b)
            whole = [tl.block_type(kind.scalar, shape) if shape else kind for kind in (a, b)]
            plan = plans[id(a), id(b)] = (shape is not None, a, b, *whole)
        known, _, _, left, right = plan
        if not known:
            return original(self, lhs, rhs)
        return _as(self, lhs, left), _as(self, rhs, right)

    def _as(semantic, value, kind):
        if value.type.is_block():
            same = value.type.shape.values == kind.shape.values
            return (
                value if same else tl.tensor(semantic.builder.create_broadcast(value.handle, kind.shape.values), kind)
            )
        return tl.tensor(semantic.builder.create_splat(kind, value.handle), kind) if kind.is_block() else value

    semantic_class.broadcast_impl_value = broadcast_impl_value
