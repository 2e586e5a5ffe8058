"""Random kernels as Python text, of one thread and u32 alone: Python itself can run them, with `U32` for the type."""

from __future__ import annotations

from collections.abc import Callable
from random import Random

OWN = 4
"""Elements of the array and of the output."""

IMPORT = "from tilesmith.codegen import InOut, Scalar, inline, local, u32, unroll"
PRELUDE = f'''{IMPORT}

@inline
def bump(arr, by):
    """Changes memory, and reads it again."""
    arr[by % {OWN}] += by
    return arr[by % {OWN}]

@inline
def first(arr, k):
    return arr[k % {OWN}]

@inline
def spread(x, y):
    """Changes what it was given."""
    x = x * 3 + y
    y = y ^ x
    return x, y

@inline
def swapped(arr, pair):
    """Has side effects on what the pair was read from."""
    arr[0], arr[1] = arr[1], pair[0]
    return pair[1]

@inline
def likely(arr, x, flag):
    if flag:
        x += 1
        flag = x % 3 == 0
        arr[0] ^= x
    return flag or x < bump(arr, x % 5)
'''


class U32(int):
    """A u32 of the kernel language."""

    def __new__(cls, value: int) -> U32:
        return super().__new__(cls, int(value) % 2**32)


def _wrapping(name: str) -> Callable[[U32, int], U32]:
    compute = getattr(int, name)
    return lambda self, other: U32(compute(self, other))


for _name in ("add", "sub", "mul", "floordiv", "mod", "and", "or", "xor", "lshift", "rshift"):
    for _word in (f"__{_name}__", f"__r{_name}__"):
        setattr(U32, _word, _wrapping(_word))


def run_by_python(text: str, out: list[int], n: int) -> list[int]:
    """What the kernel of `text` makes of `out`."""
    words = {
        "inline": lambda function: function,
        "local": lambda _, length: [None] * length,
        "u32": U32,
        "unroll": range,
        "InOut": {U32: None},
        "Scalar": {U32: None},
    }
    exec(text.replace(IMPORT, ""), words)
    after = [U32(x) for x in out]
    words["made"](after, U32(n))
    return after


class Writer:
    """Writes one kernel. Names are bound before they are read; loops end."""

    def __init__(self, random: Random):
        self.random = random
        self.lines: list[str] = []
        self.names = ["a", "b", "c"]
        self.pairs: list[str] = []
        self.flags: list[str] = []
        self.count = 0

    def fresh(self, letter: str) -> str:
        """A name that nothing has."""
        self.count += 1
        return f"{letter}{self.count}"

    def name(self) -> str:
        return self.random.choice(self.names)

    def pick(self, *makers: Callable[[], str]) -> str:
        return self.random.choice(makers)()

    def e(self, depth: int = 2) -> str:
        """An expression."""
        if not depth:
            leaves = [self.name, lambda: f"u32({self.random.randrange(9)})", lambda: "n"]
            if self.pairs:
                leaves.append(lambda: f"{self.random.choice(self.pairs)}[{self.random.randrange(2)}]")
            return self.pick(*leaves)

        def e() -> str:
            return self.e(depth - 1)

        return self.pick(
            lambda: f"({e()} {self.random.choice('+-*&|^')} {e()})",
            lambda: f"({e()} {self.random.choice(('//', '%'))} {self.random.randrange(1, 6)})",
            lambda: f"({e()} {self.random.choice(('<<', '>>'))} ({e()} & 7))",
            lambda: f"arr[{e()} % {OWN}]",
            lambda: f"first(arr, {e()})",
            lambda: f"bump(arr, {e()})",
            lambda: f"bump(arr, {e()})",
            lambda: f"swapped(arr, ({e()}, {e()}))",
            lambda: f"{self.random.choice(('min', 'max'))}({e()}, {e()})",
            lambda: f"({e()} if {self.condition(depth - 1)} else {e()})",
        )

    def condition(self, depth: int = 1) -> str:
        compare = self.random.choice(("<", "<=", "==", "!=", ">", ">="))
        if not depth:
            return self.random.choice([f"{self.e(0)} {compare} {self.e(0)}", *self.flags])
        return self.pick(
            lambda: f"{self.e(depth)} {compare} {self.e(depth)}",
            lambda: f"{self.e(depth)} {compare} {self.e(0)} < {self.e(0)}",
            lambda: f"({self.condition(depth - 1)} and {self.condition(depth - 1)})",
            lambda: f"({self.condition(depth - 1)} or bump(arr, {self.e(0)}) % 2 == 0)",
            lambda: f"(not {self.condition(depth - 1)})",
            lambda: f"likely(arr, u32({self.e(depth)}), {self.condition(depth - 1)})",
        )

    def put(self, indent: int, text: str) -> None:
        self.lines.append("    " * indent + text)

    def block(self, indent: int, depth: int) -> None:
        """A few statements, and what they bind ends with them."""
        names, pairs, flags = list(self.names), list(self.pairs), list(self.flags)
        for _ in range(self.random.randrange(1, 4)):
            self.statement(indent, depth)
        self.names, self.pairs, self.flags = names, pairs, flags

    def statement(self, indent: int, depth: int) -> None:
        kinds = [self.assign, self.assign, self.several, self.change, self.element, self.pair, self.flag]
        if depth:
            kinds += [self.if_, self.for_, self.unroll, self.each, self.while_]
        self.random.choice(kinds)(indent, depth)

    def assign(self, indent: int, depth: int) -> None:
        self.put(indent, f"{self.random.choice('abc')} = {self.e(3)}")

    def several(self, indent: int, depth: int) -> None:
        one, two = self.random.sample("abc", 2)
        value = self.pick(lambda: f"{self.e()}, {self.e()}", lambda: f"spread(u32({self.e()}), u32({self.e()}))")
        self.put(indent, f"{one}, {self.pick(lambda: two, lambda: f'arr[{self.e(1)} % {OWN}]')} = {value}")

    def change(self, indent: int, depth: int) -> None:
        target = self.pick(lambda: self.random.choice("abc"), lambda: f"arr[{self.e(1)} % {OWN}]")
        self.put(indent, f"{target} {self.random.choice('+-*&|^')}= {self.e()}")

    def element(self, indent: int, depth: int) -> None:
        self.put(indent, f"{self.random.choice(('arr', 'out'))}[{self.e(1)} % {OWN}] = {self.e()}")

    def pair(self, indent: int, depth: int) -> None:
        """A list or tuple of the compile time, whose items are those of now."""
        name = self.fresh("p")
        made = self.pick(
            lambda: f"({self.e(1)}, {self.e(1)})",
            lambda: f"[{self.e(1)}, {self.name()}]",
            lambda: f"[first(arr, k) + {self.name()} for k in range(2)]",
        )
        self.put(indent, f"{name} = {made}")
        self.pairs.append(name)

    def flag(self, indent: int, depth: int) -> None:
        """A bool, perhaps one that is there."""
        name = self.random.choice([self.fresh("t"), *self.flags])
        self.put(indent, f"{name} = {self.condition()}")
        if name not in self.flags:
            self.flags.append(name)

    def if_(self, indent: int, depth: int) -> None:
        self.put(indent, f"if {self.condition()}:")
        self.block(indent + 1, depth - 1)
        if self.random.random() < 0.5:
            self.put(indent, "else:")
            self.block(indent + 1, depth - 1)

    def loop(self, indent: int, depth: int, variable: str, over: str) -> None:
        if variable in self.names:  # of a loop around this one
            variable = self.fresh(variable)
        self.put(indent, f"for {variable} in {over}:")
        names = list(self.names)
        self.names.append(variable)
        self.block(indent + 1, depth - 1)
        self.names = names

    def for_(self, indent: int, depth: int) -> None:
        bounds = self.pick(
            lambda: f"{self.e(1)} % 4",
            lambda: f"{self.e(0)} % 3, {self.e(1)} % 5",
            lambda: f"u32({self.random.randrange(3)}), {self.e(0)} % 7, {self.e(0)} % 2 + 1",
        )
        self.loop(indent, depth, self.random.choice((self.fresh("i"), "i", "j")), f"range({bounds})")

    def unroll(self, indent: int, depth: int) -> None:
        self.loop(indent, depth, self.random.choice((self.fresh("k"), "i", "j")), f"unroll({self.random.randrange(3)})")

    def each(self, indent: int, depth: int) -> None:
        self.loop(indent, depth, self.random.choice((self.fresh("v"), "j")), f"({self.e(1)}, {self.name()})")

    def while_(self, indent: int, depth: int) -> None:
        turns = self.fresh("w")
        self.put(indent, f"{turns} = n * 0")
        self.put(indent, f"while {turns} < {self.random.randrange(4)} and {self.condition()}:")
        self.put(indent + 1, f"{turns} += 1")
        self.block(indent + 1, depth - 1)

    def kernel(self) -> str:
        """The module's text, whose kernel is `made(out, n)`."""
        self.put(0, "def made(out: InOut[u32], n: Scalar[u32]):")
        self.put(1, f"arr = local(u32, {OWN})")
        self.put(1, f"for start in unroll({OWN}):")
        self.put(2, "arr[start] = n + start * 7")
        for k, name in enumerate("abc"):
            self.put(1, f"{name} = n * {k} + {k}")
        for _ in range(self.random.randrange(3, 7)):
            self.statement(1, 2)
        for k, name in enumerate("abc"):
            self.put(1, f"out[{k}] += {name}")
        self.put(1, f"for last in unroll({OWN}):")
        self.put(2, "out[last] ^= arr[last]")
        return PRELUDE + "\n" + "\n".join(self.lines) + "\n"
