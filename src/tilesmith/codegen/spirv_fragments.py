"""Fragments in SPIR-V: cooperative matrices of a subgroup.

SPV_KHR_cooperative_matrix loads, stores and multiplies them, and gives a thread its elements without saying where they
lie. SPV_NV_cooperative_matrix2 reduces rows and turns an accumulator into an operand.
"""

from __future__ import annotations

from collections.abc import Callable

from tilesmith.codegen import typed
from tilesmith.codegen.ir import Fragment, KernelIR, packed
from tilesmith.codegen.nodes import (
    Convert,
    Element,
    Expr,
    Fill,
    LoadFragment,
    Mma,
    RowReduce,
    SetElement,
    StoreFragment,
)
from tilesmith.codegen.spirv_module import FUNCTION, Module
from tilesmith.codegen.types import Type, f32, u32

SUBGROUP_SCOPE = 3
_ROWS = 1  # of what a reduction is made


class Fragments:
    """The part of the printer that writes fragments."""

    ir: KernelIR
    m: Module
    glsl: int
    pointers: dict[str, int]
    combined: dict[str, int]
    refuse: Callable
    place: Callable
    e: Callable[[Expr], int]

    def fragment_type(self, name: str, type_: Type | None = None) -> int:
        """The type of a fragment, or of one like it that holds `type_`."""
        f = self.ir.fragment_named[name]
        held = type_ or f.type
        tile, scope, use = (self.m.constant(u32, v) for v in (f.tile, SUBGROUP_SCOPE, "abc".index(f.role)))
        return self.m.declare(("fragment", held.name, f.tile, f.role), 4456, self.m.type(held), scope, tile, tile, use)

    def fragment_value(self, name: str) -> int:
        """All of a fragment."""
        return self.m.op(61, self.fragment_type(name), self.pointers[name])

    def fill(self, s: Fill) -> None:
        self.m.do(62, self.pointers[s.fragment], self.m.op(80, self.fragment_type(s.fragment), self.e(s.value)))

    def matrix_place(self, s: LoadFragment | StoreFragment) -> tuple[int, int, list[int]]:
        """Pointer, stride in elements of the array, memory operands."""
        held = packed(self.ir.memory[s.array], self.ir.fragment_named[s.fragment])
        pointer, access = self.place(s.array, self.e(typed.binary("//", s.offset, held)))
        return pointer, self.m.constant(u32, s.stride // held), access

    def load_fragment(self, s: LoadFragment) -> None:
        pointer, stride, access = self.matrix_place(s)
        layout = self.m.constant(u32, int(s.transposed))
        loaded = self.m.op(4457, self.fragment_type(s.fragment), pointer, layout, stride, *access)
        self.m.do(62, self.pointers[s.fragment], loaded)

    def store_fragment(self, s: StoreFragment) -> None:
        pointer, stride, access = self.matrix_place(s)
        value, stored = self.fragment_value(s.fragment), self.ir.memory[s.array].type.scalar
        if stored is not self.ir.fragment_named[s.fragment].type:
            value = self.m.op(115, self.fragment_type(s.fragment, stored), value)
        self.m.do(4458, pointer, value, self.m.constant(u32, 0), stride, *access)

    def mma(self, s: Mma) -> None:
        a, b, c = map(self.fragment_value, (s.a, s.b, s.c))
        self.m.do(62, self.pointers[s.c], self.m.op(4459, self.fragment_type(s.c), a, b, c))

    def convert(self, s: Convert) -> None:
        self.m.do(62, self.pointers[s.a], self.m.op(115, self.fragment_type(s.a), self.fragment_value(s.c)))

    def row_reduce(self, s: RowReduce) -> None:
        combine = self.combined.setdefault(s.op, 0) or self.m.id()
        self.combined[s.op] = combine
        reduced = self.m.op(5366, self.fragment_type(s.target), self.fragment_value(s.source), _ROWS, combine)
        self.m.do(62, self.pointers[s.target], reduced)

    def combine_functions(self) -> None:
        """What the reductions name: functions of two elements, after the kernel's own."""
        m = self.m
        for op, function in self.combined.items():
            number = m.type(f32)
            m.code += m.words(54, number, function, 0, m.declare(("combine",), 33, number, number, number))
            x, y = (m.op(55, number) for _ in range(2))
            m.do(248, m.id())
            result = m.op(129, number, x, y) if op == "add" else m.op(12, number, self.glsl, 40, x, y)
            m.do(254, result)
            m.do(56)

    def element_place(self, fragment: str, index: int) -> int:
        """A pointer to one of the elements of a fragment that the thread holds."""
        f: Fragment = self.ir.fragment_named[fragment]
        if f.placed:
            self.refuse(
                f"Vulkan does not say which elements of {fragment} a thread holds; declare it with placed=False, or "
                "go through shared memory"
            )
        scalar = self.m.pointer(FUNCTION, self.m.type(f.type))
        return self.m.op(65, scalar, self.pointers[fragment], self.m.constant(u32, index))

    def element(self, e: Element) -> int:
        return self.m.op(61, self.m.type(e.type), self.element_place(e.fragment, e.index))

    def set_element(self, s: SetElement) -> None:
        value = self.e(s.value)
        self.m.do(62, self.element_place(s.fragment, s.index), value)
