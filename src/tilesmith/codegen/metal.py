"""Metal Shading Language. Buffers are [[buffer(0)]], ... as declared; the scalars are `constant` arguments after."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from tilesmith.codegen.ir import Array, Buffer, KernelIR
from tilesmith.codegen.layout import ELEMENTS, ROW_LANES
from tilesmith.codegen.nodes import (
    Bitcast,
    Builtin,
    Convert,
    Element,
    Fill,
    LoadFragment,
    Mma,
    RowReduce,
    SetElement,
    StoreFragment,
    Subgroup,
)
from tilesmith.codegen.text import TextPrinter

if TYPE_CHECKING:
    from tilesmith.hardware.limits import Limits

_BUILTINS = {
    "tid": ("tid_", "thread_position_in_threadgroup", "uint3"),
    "gid": ("gid_", "threadgroup_position_in_grid", "uint3"),
    "groups": ("groups_", "threadgroups_per_grid", "uint3"),
    "lane": ("lane_", "thread_index_in_simdgroup", "uint"),
    "subgroup": ("subgroup_", "simdgroup_index_in_threadgroup", "uint"),
    "subgroup_size": ("subgroup_size_", "threads_per_simdgroup", "uint"),
}
_PACK = "inline uint pack_f16_(float2 x) { return as_type<uint>(half2(x)); }\n"
_UNPACK = "inline float2 unpack_f16_(uint x) { return float2(as_type<half2>(x)); }\n"


def generate(ir: KernelIR, limits: Limits | None = None) -> str:
    """The kernel as MSL 3.1. Raises KernelError for a tile other than 8, or beyond `limits`."""
    return _Metal(ir, limits).print()


class _Metal(TextPrinter):
    target = "metal"
    shared_ceiling = 32_768
    types: ClassVar = {"f32": "float", "f16": "half", "bf16": "bfloat", "u32": "uint", "i32": "int", "bool": "bool"}
    functions: ClassVar = {"pack_f16": "pack_f16_", "unpack_f16": "unpack_f16_"}
    barrier = "threadgroup_barrier(mem_flags::mem_threadgroup);"
    subgroup_barrier = "simdgroup_barrier(mem_flags::mem_threadgroup);"

    def print(self) -> str:
        ir = self.ir
        self.check()
        if ir.subgroup_size not in (None, 32):
            self.refuse(f"simdgroups have 32 threads, the kernel is built for {ir.subgroup_size}")
        for f in ir.fragments:
            if f.tile != 8:
                self.refuse(f"fragment {f.name} has tile {f.tile}; allowed: 8")
        args = []
        for b in ir.buffers:
            kind = "device const" if b.access == "read" else "device"
            args.append(f"{kind} {self.type(b.type)}* {self.name(b.name)} [[buffer({len(args)})]]")
        for s in ir.scalars:
            args.append(f"constant {self.type(s.type)}& {self.name(s.name)} [[buffer({len(args)})]]")
        args += [f"{t} {name} [[{b}]]" for name, b, t in sorted(_BUILTINS[b] for b in ir.builtins)]
        head = ["#include <metal_stdlib>", "using namespace metal;"]
        head += [text.rstrip() for f, text in (("pack_f16", _PACK), ("unpack_f16", _UNPACK)) if f in ir.functions]
        joined = ",\n    ".join(args)
        head.append(f"[[kernel, max_total_threads_per_threadgroup({ir.threads})]]")
        head.append(f"void {self.name(ir.name)}(\n    {joined}) {{")
        for a in ir.arrays:
            self.put("threadgroup " * (a.space == "shared") + self.array(a))
        for f in ir.fragments:
            self.put(f"{self.matrix(f.name)} {self.name(f.name)};")
        self.block(ir.body)
        return "\n".join([*head, *self.lines, "}\n"])

    def matrix(self, fragment: str) -> str:
        """A fragment's type."""
        return f"simdgroup_matrix<{self.types[self.ir.fragment_named[fragment].type.dtype]}, 8, 8>"

    def builtin(self, e: Builtin) -> str:
        name, _, t = _BUILTINS[e.name]
        return f"{name}.{'xyz'[e.axis]}" if t == "uint3" else name

    def bitcast(self, e: Bitcast) -> str:
        return f"as_type<{self.type(e.type)}>({self.e(e.x)})"

    def subgroup(self, e: Subgroup) -> str:
        if e.operand is None:
            return f"simd_{'sum' if e.op == 'add' else e.op}({self.e(e.x)})"
        return f"simd_{e.op}({self.e(e.x)}, ushort({self.e(e.operand)}))"

    def element(self, e: Element) -> str:
        return f"{self.name(e.fragment)}.thread_elements()[{e.index}]"

    def set_element(self, s: SetElement) -> None:
        self.put(f"{self.name(s.fragment)}.thread_elements()[{s.index}] = {self.e(s.value)};")

    def fill(self, s: Fill) -> None:
        filled = self.matrix(s.fragment).replace("simdgroup_matrix", "make_filled_simdgroup_matrix")
        self.put(f"{self.name(s.fragment)} = {filled}({self.e(s.value)});")

    def space(self, memory: Buffer | Array) -> str:
        return "threadgroup " if isinstance(memory, Array) else "device "

    def load_fragment(self, s: LoadFragment) -> None:
        if s.stride == 0:
            self.refuse("Metal does not say that a fragment's rows may lie on one another")
        rest = f"{self.pointer(s)}, {s.stride}, ulong2(0, 0), {str(s.transposed).lower()}"
        self.put(f"simdgroup_load({self.name(s.fragment)}, {rest});")

    def store_fragment(self, s: StoreFragment) -> None:
        stored, name = self.ir.memory[s.array].type.scalar, self.name(s.fragment)
        if stored is self.ir.fragment_named[s.fragment].type:
            self.put(f"simdgroup_store({name}, {self.pointer(s)}, {s.stride});")
            return
        t = self.types[stored.dtype]
        self.put("{")
        self.put(f"    simdgroup_matrix<{t}, 8, 8> rounded_;")
        for k in range(ELEMENTS[8]):
            self.put(f"    rounded_.thread_elements()[{k}] = {t}({name}.thread_elements()[{k}]);")
        self.put(f"    simdgroup_store(rounded_, {self.pointer(s)}, {s.stride});")
        self.put("}")

    def mma(self, s: Mma) -> None:
        c = self.name(s.c)
        self.put(f"simdgroup_multiply_accumulate({c}, {self.name(s.a)}, {self.name(s.b)}, {c});")

    def row_reduce(self, s: RowReduce) -> None:
        self.put("{")
        both = "metal::max({}, {})" if s.op == "max" else "{} + {}"
        source = f"{self.name(s.source)}.thread_elements()"
        self.put(f"    float x_ = {both.format(source + '[0]', source + '[1]')};")
        for mask in ROW_LANES[8]:
            self.put(f"    x_ = {both.format('x_', f'simd_shuffle_xor(x_, ushort({mask}))')};")
        for k in range(ELEMENTS[8]):
            self.put(f"    {self.name(s.target)}.thread_elements()[{k}] = x_;")
        self.put("}")

    def convert(self, s: Convert) -> None:
        t = self.types[self.ir.fragment_named[s.a].type.dtype]
        for k in range(ELEMENTS[8]):
            value = f"{t}({self.name(s.c)}.thread_elements()[{k}])"
            self.put(f"{self.name(s.a)}.thread_elements()[{k}] = {value};")
