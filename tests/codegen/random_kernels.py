"""Random kernels, well formed and without undefined behaviour where that can be had cheaply."""

from __future__ import annotations

from random import Random

from tilesmith.codegen import KernelIR, verify
from tilesmith.codegen import typed as t
from tilesmith.codegen.ir import Array, Buffer, Scalar, Variable
from tilesmith.codegen.nodes import (
    Assign,
    Barrier,
    Builtin,
    Expr,
    For,
    If,
    Load,
    Param,
    Stmt,
    Store,
    Subgroup,
    Var,
    While,
)
from tilesmith.codegen.types import Type, bool_, f32, f32x4, i32, u32, u32x2

THREADS, OWN = 32, 4
"""Threads of a workgroup; elements of each output that belong to one thread."""

_TID, _GID = Builtin(u32, "tid"), Builtin(u32, "gid")
_VARIABLES = {
    "u0": u32, "u1": u32, "i0": i32, "f0": f32, "f1": f32, "b0": bool_, "v0": f32x4, "w0": u32x2,
}  # fmt: skip


class Maker:
    """Draws expressions and statements. Floats stay small integers, so that every order of operations is exact."""

    def __init__(self, random: Random, subgroups: bool):
        self.random = random
        self.subgroups = subgroups
        self.variables = dict(_VARIABLES)
        self.count = 0

    def pick(self, *options):
        """One of the options, called."""
        return self.random.choice(options)()

    def fresh(self, type_: Type) -> str:
        """A new variable."""
        self.count += 1
        name = f"n{self.count}"
        self.variables[name] = type_
        return name

    def expr(self, type_: Type, depth: int) -> Expr:
        """An expression of a type."""
        if depth == 0 or self.random.random() < 0.15:
            return self.leaf(type_)
        return getattr(self, type_.name)(depth - 1)

    def leaf(self, type_: Type) -> Expr:
        names = [n for n, v in _VARIABLES.items() if v is type_]
        small = self.random.randrange(9)
        options = [lambda: Var(type_, self.random.choice(names))]
        if type_ is u32:
            options += [lambda: _TID, lambda: _GID, lambda: Param(u32, "n"), lambda: t.constant(small * 77, u32)]
            options += [lambda: Load(u32, "a", t.binary("%", t.binary("+", _TID, small), THREADS))]
        elif type_ is i32:
            options += [lambda: t.constant(small - 4, i32), lambda: Param(i32, "m")]
        elif type_ is f32:
            options += [lambda: t.constant(float(small - 4), f32), lambda: Param(f32, "s"), lambda: self.read("x", f32)]
        elif type_ is bool_:
            options += [lambda: t.binary("<", _TID, small * 4), lambda: t.binary("==", t.binary("%", _TID, 3), 1)]
        elif type_ is f32x4:
            options += [lambda: self.read("z", f32x4)]
        return self.pick(*options)

    def read(self, name: str, type_: Type) -> Expr:
        return Load(type_, name, t.binary("%", self.expr(u32, 1), THREADS))

    def u32(self, depth: int) -> Expr:
        def e(type_=u32):
            return self.expr(type_, depth)

        arithmetic = self.random.choice(["+", "-", "*", "&", "|", "^"])
        return self.pick(
            lambda: t.binary(arithmetic, e(), e()),
            lambda: t.binary(self.random.choice(("//", "%")), e(), t.binary("|", e(), 1)),
            lambda: t.binary(self.random.choice(("<<", ">>")), e(), t.binary("&", e(), 31)),
            lambda: t.unary("~", e()),
            lambda: t.call(self.random.choice(("min", "max", "mulhi")), e(), e()),
            lambda: t.select(e(bool_), e(), e()),
            lambda: t.cast(u32, self.pick(lambda: e(i32), lambda: e(bool_))),
            lambda: t.cast(u32, t.call("abs", self.clamp(e(f32)))),
            lambda: t.bitcast(u32, self.pick(lambda: e(i32), lambda: self.positive(e(f32)))),
            lambda: t.component(e(u32x2), self.random.randrange(2)),
            lambda: t.call("pack_f16", t.collect(TYPE2, [self.positive(e(f32)), self.positive(e(f32))])),
        )

    def i32(self, depth: int) -> Expr:
        def e(type_=i32):
            return self.expr(type_, depth)

        return self.pick(
            lambda: t.binary(self.random.choice(["+", "-", "&", "|", "^"]), e(), e()),
            lambda: t.binary(self.random.choice(("//", "%")), e(), self.random.choice((1, 2, 8))),
            lambda: t.binary(">>", e(), t.binary("&", e(u32), 31)),
            lambda: t.cast(i32, t.binary("&", e(u32), 255)),
            lambda: t.cast(i32, self.clamp(e(f32))),
            lambda: t.call(self.random.choice(("min", "max")), e(), e()),
            lambda: t.call("abs", t.binary("%", e(), 8)),
            lambda: t.unary(self.random.choice("-~"), t.binary("%", e(), 8)),
            lambda: t.select(e(bool_), e(), e()),
        )

    def f32(self, depth: int) -> Expr:
        def e(type_=f32):
            return self.expr(type_, depth)

        return self.pick(
            lambda: t.binary(self.random.choice(["+", "-", "*"]), self.clamp(e()), self.clamp(e())),
            lambda: t.call(self.random.choice(("min", "max")), e(), e()),
            lambda: t.call(self.random.choice(("abs", "floor", "ceil")), e()),
            lambda: t.call("fma", self.clamp(e()), self.clamp(e()), self.clamp(e())),
            lambda: t.cast(f32, t.binary("&", e(u32), 255)),
            lambda: t.cast(f32, t.binary("%", e(i32), 8)),
            lambda: t.cast(f32, e(bool_)),
            lambda: t.component(e(f32x4), self.random.randrange(4)),
            lambda: t.call("dot", self.clamp(e(f32x4)), self.clamp(e(f32x4))),
            # Not of a literal: lavapipe 22.3 folds the second half of that to zero.
            lambda: t.component(
                t.call("unpack_f16", t.binary("-", 0xC4004005, Param(u32, "n"))), self.random.randrange(2)
            ),
            lambda: t.select(e(bool_), e(), e()),
            lambda: (
                t.binary("/", e(), 2.0 ** self.random.randrange(3)) if depth < 1 else t.unary("-", self.positive(e()))
            ),
        )

    def bool(self, depth: int) -> Expr:
        side = self.random.choice((u32, i32, f32))
        compare = self.random.choice(list(t.COMPARISONS))
        return self.pick(
            lambda: t.binary(compare, self.expr(side, depth), self.expr(side, depth)),
            lambda: t.binary(
                self.random.choice(("and", "or", "==", "!=")), *(self.expr(bool_, depth) for _ in range(2))
            ),
            lambda: t.unary("not", self.expr(bool_, depth)),
        )

    def f32x4(self, depth: int) -> Expr:
        def e():
            return self.clamp(self.expr(f32x4, depth))

        return self.pick(
            lambda: t.binary(self.random.choice(["+", "-", "*"]), e(), e()),
            lambda: t.binary("*", e(), self.clamp(self.expr(f32, depth))),
            lambda: t.call(self.random.choice(("min", "max")), e(), e()),
            lambda: t.call("fma", e(), e(), e()),
            lambda: t.collect(f32x4, [self.expr(f32, depth) for _ in range(4)]),
            lambda: t.cast(f32x4, self.expr(f32, depth)),
            lambda: t.select(self.expr(bool_, depth), e(), e()),
        )

    def u32x2(self, depth: int) -> Expr:
        def e():
            return self.expr(u32x2, depth)

        return self.pick(
            lambda: t.binary(self.random.choice(["+", "-", "*", "&", "|", "^"]), e(), e()),
            lambda: t.binary(">>", e(), self.random.randrange(32)),
            lambda: t.collect(u32x2, [self.expr(u32, depth) for _ in range(2)]),
            lambda: t.unary("~", e()),
            lambda: t.select(self.expr(bool_, depth), e(), e()),
        )

    def clamp(self, e: Expr) -> Expr:
        """A whole number of -8 to 8."""
        return t.call("floor", t.call("max", t.call("min", e, 8.0), -8.0))

    def positive(self, e: Expr) -> Expr:
        """1 to 9: away from the sign of zero, on which devices differ."""
        return t.binary("+", t.call("abs", self.clamp(e)), 1.0)

    def value(self, type_: Type, depth: int = 3) -> Expr:
        """An expression to assign or store."""
        e = self.expr(type_, depth)
        return t.binary("+", self.clamp(e), 0.0) if type_.is_float else e

    def block(self, depth: int) -> tuple[Stmt, ...]:
        return tuple(s for _ in range(self.random.randrange(1, 4)) for s in self.statement(depth))

    def statement(self, depth: int) -> list[Stmt]:
        """A few statements that may stand anywhere."""
        kinds = [self.assign, self.assign, self.store, self.local]
        if depth:
            kinds += [lambda: self.if_(depth - 1), lambda: self.for_(depth - 1), lambda: self.while_(depth - 1)]
        return self.pick(*kinds)

    def assign(self) -> list[Stmt]:
        name = self.random.choice(list(_VARIABLES))
        return [Assign(0, name, self.value(_VARIABLES[name]))]

    def own(self) -> Expr:
        mine = t.binary("*", t.binary("+", t.binary("*", _GID, THREADS), _TID), OWN)
        return t.binary("+", mine, self.random.randrange(OWN))

    def store(self) -> list[Stmt]:
        name, type_ = self.random.choice((("out", u32), ("y", f32)))
        return [Store(0, name, self.own(), self.value(type_))]

    def local(self) -> list[Stmt]:
        at = t.binary("&", self.expr(u32, 1), 3)
        if self.random.random() < 0.5:
            return [Store(0, "mine", at, self.value(f32))]
        return [Assign(0, "f0", t.binary("+", self.clamp(Load(f32, "mine", at)), 0.0))]

    def if_(self, depth: int) -> list[Stmt]:
        orelse = self.block(depth) if self.random.random() < 0.5 else ()
        return [If(0, self.expr(bool_, 2), self.block(depth), orelse)]

    def for_(self, depth: int) -> list[Stmt]:
        counter = self.random.choice((u32, i32))
        name, stop = self.fresh(counter), self.fresh(counter)
        start = t.constant(self.random.randrange(3) if counter is u32 else -2, counter)
        limit = t.binary("&", self.expr(counter, 1), t.constant(3, counter))
        body = (*self.block(depth), Assign(0, "u1", t.binary("+", Var(u32, "u1"), t.cast(u32, Var(counter, name)))))
        step = t.constant(self.random.randrange(1, 3), counter)
        return [Assign(0, stop, limit), For(0, name, start, Var(counter, stop), step, body)]

    def while_(self, depth: int) -> list[Stmt]:
        name = self.fresh(u32)
        count = Var(u32, name)
        body = (*self.block(depth), Assign(0, name, t.binary("+", count, 1)))
        condition = t.binary("and", t.binary("<", count, self.random.randrange(4)), self.expr(bool_, 1))
        before = (Assign(0, "u0", t.binary("^", Var(u32, "u0"), count)),) if self.random.random() < 0.5 else ()
        return [Assign(0, name, t.constant(0, u32)), While(0, before, condition, body)]

    def exchange(self) -> list[Stmt]:
        """What all threads do together."""
        neighbour = t.binary("%", t.binary("+", _TID, self.random.randrange(THREADS)), THREADS)
        kinds = [
            lambda: [
                Store(0, "stage", _TID, self.value(f32x4)),
                Barrier(0),
                Assign(0, "v0", Load(f32x4, "stage", neighbour)),
                Barrier(0),
            ]
        ]
        if self.subgroups:
            low = t.binary("&", self.expr(u32, 2), 1023)
            op = self.random.choice(("add", "max", "min"))
            kinds.append(lambda: [Assign(0, "u0", Subgroup(u32, op, low))])
            kinds.append(lambda: [Assign(0, "u1", Subgroup(u32, "shuffle_xor", low, t.constant(1, u32)))])
            kinds.append(lambda: [Assign(0, "f1", Subgroup(f32, "shuffle", Var(f32, "f0"), t.constant(0, u32)))])
        return self.pick(*kinds)

    def together(self) -> list[Stmt]:
        """An exchange, perhaps under a condition or in a loop that all threads of the workgroup share."""
        inner = tuple(self.exchange())
        condition = t.binary(
            self.random.choice(("==", "!=")), t.binary("%", t.binary("+", _GID, Param(u32, "n")), 2), 0
        )
        name = self.fresh(u32)
        stop = t.binary("+", t.binary("&", t.binary("+", _GID, Param(u32, "n")), 1), 1)
        return self.pick(
            lambda: [*inner],
            lambda: [If(0, condition, inner, tuple(self.exchange()))],
            lambda: [For(0, name, t.constant(0, u32), stop, t.constant(1, u32), inner)],
        )

    def kernel(self) -> KernelIR:
        """The whole."""
        body = [Assign(0, name, _first(type_)) for name, type_ in _VARIABLES.items()]
        body += [Store(0, "mine", t.constant(k, u32), t.constant(float(k), f32)) for k in range(4)]
        for _ in range(self.random.randrange(2, 5)):
            body += self.together() if self.random.random() < 0.35 else self.block(2)
        last = (("out", "u0", u32), ("y", "f0", f32))
        body += [Store(0, name, self.own(), Var(type_, var)) for name, var, type_ in last]
        body += [Store(0, "out", self.own(), t.binary("+", Var(u32, "u1"), t.cast(u32, Var(i32, "i0"))))]
        ir = KernelIR(
            name="random_kernel",
            workgroup=(THREADS, 1, 1),
            buffers=(
                Buffer("a", u32, "read"),
                Buffer("x", f32, "read"),
                Buffer("z", f32x4, "read"),
                Buffer("out", u32, "readwrite"),
                Buffer("y", f32, "readwrite"),
            ),
            scalars=(Scalar("n", u32), Scalar("m", i32), Scalar("s", f32)),
            arrays=(Array("stage", f32x4, THREADS, "shared"), Array("mine", f32, 4, "local")),
            fragments=(),
            variables=tuple(Variable(name, type_) for name, type_ in self.variables.items()),
            body=tuple(body),
            source="random",
        )
        verify(ir)
        return ir


TYPE2 = t.vector(f32, 2)


def _first(type_: Type) -> Expr:
    if type_ is bool_:
        return t.binary("<", _TID, 7)
    if type_ is i32:
        return t.binary("-", t.cast(i32, _TID), 9)
    return t.cast(type_, _TID) if type_.dtype == "u32" else t.cast(type_, t.cast(f32, t.binary("%", _TID, 5)))
