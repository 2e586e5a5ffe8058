"""WGSL, for WebGPU. Buffers are bindings 0, 1, ... of group 0 as declared; the scalars' uniform block comes after."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from tilesmith.codegen.ir import Array, KernelIR
from tilesmith.codegen.nodes import Bitcast, Builtin, Expr, Param, Select, Subgroup
from tilesmith.codegen.text import TextPrinter, shortest
from tilesmith.codegen.types import Type

if TYPE_CHECKING:
    from tilesmith.hardware.limits import Limits

_BUILTINS = {
    "tid": ("tid_", "local_invocation_id", "vec3<u32>"),
    "gid": ("gid_", "workgroup_id", "vec3<u32>"),
    "groups": ("groups_", "num_workgroups", "vec3<u32>"),
    "lane": ("lane_", "subgroup_invocation_id", "u32"),
    "subgroup": ("index_", "local_invocation_index", "u32"),
    "subgroup_size": ("subgroup_size_", "subgroup_size", "u32"),
}
_MULHI = """fn mulhi_(a: u32, b: u32) -> u32 {
  let low = (a & 65535u) * (b & 65535u);
  let middle = (a >> 16u) * (b & 65535u) + (low >> 16u);
  let cross = (a & 65535u) * (b >> 16u) + (middle & 65535u);
  return (a >> 16u) * (b >> 16u) + (middle >> 16u) + (cross >> 16u);
}
"""


def generate(ir: KernelIR, limits: Limits | None = None, *, enable_subgroups: bool = True) -> str:
    """The kernel as WGSL. Raises KernelError for bf16, fragments, a fixed subgroup size, or beyond `limits`.

    enable_subgroups: write the directive that browsers want before subgroup operations; wgpu has these operations but
    refuses the directive (https://github.com/gfx-rs/wgpu/issues/5555).
    """
    printer = _Wgsl(ir, limits)
    printer.enable_subgroups = enable_subgroups
    return printer.print()


class _Wgsl(TextPrinter):
    target = "wgsl"
    shared_ceiling = 32_768
    types: ClassVar = {t: t for t in ("f32", "f16", "u32", "i32", "bool")}
    vector_type = "vec{lanes}<{scalar}>"
    functions: ClassVar = {
        "rsqrt": "inverseSqrt",
        "mulhi": "mulhi_",
        "pack_f16": "pack2x16float",
        "unpack_f16": "unpack2x16float",
    }
    barrier = "workgroupBarrier();"
    forever = "loop"
    enable_subgroups = True

    def print(self) -> str:
        ir = self.ir
        self.check()
        if ir.fragments or ir.subgroup_size is not None:
            what = "fragments" if ir.fragments else f"a subgroup size of {ir.subgroup_size}"
            self.refuse(f"WebGPU cannot promise {what}; build the kernel without")
        head = []
        if "f16" in ir.features:
            head.append("enable f16;")
        if "subgroups" in ir.features and self.enable_subgroups:
            # verify() knows that threads share subgroup() == 0, Tint does not
            head += ["enable subgroups;", "diagnostic(off, subgroup_uniformity);"]
        if ir.scalars:
            members = " ".join(f"{self.name(s.name)}: {self.type(s.type)}," for s in ir.scalars)
            head.append(f"struct Params_ {{ {members} }}")
        for k, b in enumerate(ir.buffers):
            access = "read" if b.access == "read" else "read_write"
            array = f"array<{self.type(b.type)}>"
            head.append(f"@group(0) @binding({k}) var<storage, {access}> {self.name(b.name)}: {array};")
        if ir.scalars:
            head.append(f"@group(0) @binding({len(ir.buffers)}) var<uniform> params_: Params_;")
        for a in ir.arrays:
            if a.space == "shared":
                head.append(f"var<workgroup> {self.name(a.name)}: array<{self.type(a.type)}, {a.length}>;")
        if "mulhi" in ir.functions:
            head.append(_MULHI.rstrip())
        inputs = {_BUILTINS[b] for b in ir.builtins}
        if "subgroup" in ir.builtins:
            inputs.add(_BUILTINS["subgroup_size"])
        listed = ", ".join(f"@builtin({b}) {name}: {t}" for name, b, t in sorted(inputs))
        size = ", ".join(map(str, ir.workgroup))
        head.append(f"@compute @workgroup_size({size})\nfn {self.name(ir.name)}({listed}) {{")
        if any(map(self.only_place, ir.expressions)):
            # verify() knows that threads share it, Tint does not; of a literal it would refuse `tid(1) - 1`
            self.put("var first_ = 0u;")
        for a in ir.arrays:
            if a.space == "local":
                self.put(self.array(a))
        self.block(ir.body)
        return "\n".join([*head, *self.lines, "}\n"])

    def declaration(self, name: str, value: str | None, final: bool) -> str:
        if value is None:
            return f"var {self.name(name)}: {self.type(self.ir.type_of[name])};"
        return f"{'let' if final else 'var'} {self.name(name)} = {value};"

    def counter(self, t: Type) -> str:
        return "var"

    def array(self, a: Array) -> str:
        return f"var {self.name(a.name)}: array<{self.type(a.type)}, {a.length}>;"

    def literal(self, dtype: str, value) -> str:
        if dtype == "f16":
            return shortest(value, "e") + "h"
        if dtype == "i32":
            return f"i32({value})" if value == -(2**31) else f"{value}i"
        return super().literal(dtype, value)

    def only_place(self, e: Expr) -> bool:
        """Whether all threads have this place in their workgroup."""
        return isinstance(e, Builtin) and e.name == "tid" and self.ir.workgroup[e.axis] == 1

    def builtin(self, e: Builtin) -> str:
        if e.name == "subgroup":
            return "(index_ / subgroup_size_)"
        if self.only_place(e):
            return "first_"
        name, _, t = _BUILTINS[e.name]
        return f"{name}.{'xyz'[e.axis]}" if t != "u32" else name

    def param(self, e: Param) -> str:
        return f"params_.{self.name(e.name)}"

    def select(self, e: Select) -> str:
        return f"select({self.argument(e.no)}, {self.argument(e.yes)}, {self.argument(e.condition)})"

    def operand(self, e) -> str:
        return self.e(e) if isinstance(e, Select) else super().operand(e)

    def bitcast(self, e: Bitcast) -> str:
        # naga takes no bitcast to another number of lanes; what these make of two halves and f32 is exact
        if e.type.dtype == "f16":
            return f"{self.type(e.type)}(unpack2x16float({self.argument(e.x)}))"
        if e.x.type.dtype == "f16":
            return f"pack2x16float(vec2<f32>({self.argument(e.x)}))"
        return f"bitcast<{self.type(e.type)}>({self.argument(e.x)})"

    def subgroup(self, e: Subgroup) -> str:
        word = {"shuffle": "Shuffle", "shuffle_xor": "ShuffleXor"}.get(e.op, e.op.capitalize())
        args = [e.x] if e.operand is None else [e.x, e.operand]
        return f"subgroup{word}({', '.join(self.argument(a) for a in args)})"
