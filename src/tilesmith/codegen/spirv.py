"""SPIR-V for Vulkan. Bindings of set 0 are as in WGSL: buffers as declared, then the scalars' uniform block.

Modules are SPIR-V 1.3, for Vulkan 1.1. The pipeline of a kernel with a `subgroup_size` must be created with subgroups
of so many threads, all of them full. Fragments are cooperative matrices (SPV_KHR_cooperative_matrix under the Vulkan
memory model). Kernels that convert fragments or reduce their rows need SPV_NV_cooperative_matrix2, SPIR-V 1.6 and so
Vulkan 1.3.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NoReturn

from tilesmith.codegen.ir import Array, Buffer, KernelIR, a_kernel
from tilesmith.codegen.nodes import (
    Assign,
    Barrier,
    Binary,
    Bitcast,
    Builtin,
    Call,
    Cast,
    Component,
    Const,
    Convert,
    Element,
    Expr,
    Fill,
    For,
    If,
    Load,
    LoadFragment,
    Mma,
    Param,
    RowReduce,
    Select,
    SetElement,
    Stmt,
    Store,
    StoreFragment,
    Subgroup,
    SubgroupBarrier,
    Unary,
    Var,
    Vector,
    While,
)
from tilesmith.codegen.spirv_fragments import SUBGROUP_SCOPE, Fragments
from tilesmith.codegen.spirv_module import FUNCTION, INPUT, STORAGE, UNIFORM, WORKGROUP, Module, text
from tilesmith.codegen.spirv_tables import BINARY, BUILTINS, BY_TYPE, CASTS, GLSL, REDUCE
from tilesmith.codegen.types import KernelError, Type, bool_, u32
from tilesmith.codegen.variables import single_values
from tilesmith.codegen.verifier import fits

if TYPE_CHECKING:
    from tilesmith.hardware.limits import Limits

SHARED_CEILING = 65_536
_WORKGROUP_SCOPE, _NON_PRIVATE = 2, 0x20


def generate(ir: KernelIR, limits: Limits | None = None) -> bytes:
    """The kernel as a SPIR-V binary. Raises KernelError for bf16, for elements of fragments, or beyond `limits`."""
    return _Spirv(ir, limits).module()


def _kind(t: Type) -> int:
    """The column of a table by type: floats, u32, i32."""
    return 0 if t.is_float else 1 if t.dtype == "u32" else 2


class _Spirv(Fragments):
    def __init__(self, ir: KernelIR, limits: Limits | None):
        self.ir = a_kernel(ir, "spirv.generate")
        self.limits = limits
        self.m = Module()
        self.pointers: dict[str, int] = {}
        self.values: dict[str, int] = {}
        self.entry: dict[tuple, int] = {}
        self.inputs: dict[str, int] = {}
        self.combined: dict[str, int] = {}
        self.direct = single_values(ir.body)
        self.line = 0

    def refuse(self, message: str) -> NoReturn:
        place = f"{self.ir.source}:{self.line}" if self.line else self.ir.source
        raise KernelError(f"{place}: {self.ir.name} for spirv: {message}")

    def check(self) -> None:
        ir = self.ir
        fits(ir, self.limits)
        if ir.shared_bytes > SHARED_CEILING:
            self.refuse(f"{ir.shared_bytes:,} bytes of shared memory; at most {SHARED_CEILING:,}")
        for d in (*ir.buffers, *ir.arrays, *ir.fragments, *ir.variables):
            if d.type.dtype == "bf16":
                self.refuse(f"{d.name} is {d.type}, which Vulkan devices seldom have; use f16 or f32")
        if "bf16" in ir.features:
            self.refuse("it computes with bf16, which Vulkan devices seldom have; use f16 or f32")

    def module(self) -> bytes:
        ir, m = self.ir, self.m
        self.check()
        m.capability(1)  # Shader
        if "f16" in ir.features:
            m.capability(9)  # Float16
            m.capability(4433)  # StorageBuffer16BitAccess
        if "subgroups" in ir.features:
            for number in (61, 63, 65):  # GroupNonUniform, Arithmetic, Shuffle
                m.capability(number)
        if ir.fragments:
            m.capability(5345)  # VulkanMemoryModel
            m.capability(6022)  # CooperativeMatrixKHR
            m.extension("SPV_KHR_vulkan_memory_model")
            m.extension("SPV_KHR_cooperative_matrix")
        if "conversions" in ir.features:
            m.version = 0x106
            m.capability(5430)  # CooperativeMatrixReductionsNV
            m.capability(5431)  # CooperativeMatrixConversionsNV
            m.extension("SPV_NV_cooperative_matrix2")
        self.glsl, main = m.id(), m.id()
        self.declarations()
        function_type = m.declare(("function",), 33, m.void())
        m.do(54, m.void(), main, 0, function_type)
        m.do(248, m.id())
        self.function_variables()
        self.entry_values()
        self.block(ir.body)
        m.do(253)
        m.do(56)
        self.combine_functions()
        head = m.words(11, self.glsl, *text("GLSL.std.450"))
        head += m.words(14, 0, 3 if ir.fragments else 1)
        head += m.words(15, 5, main, *text(ir.name), *self.interface())
        head += m.words(16, main, 17, *ir.workgroup)
        return m.assemble(head)

    def declarations(self) -> None:
        """Buffers, the uniform block, shared arrays and built-in inputs."""
        ir, m = self.ir, self.m
        for k, b in enumerate(ir.buffers):
            variable = m.variable(STORAGE, self.buffer_type(b))
            self.pointers[b.name] = variable
            m.decorate(variable, 34, 0)
            m.decorate(variable, 33, k)
            m.name(variable, b.name)
        if ir.scalars:
            block = m.declare(("params",), 30, *(m.type(s.type) for s in ir.scalars))
            m.decorate(block, 2)
            for k in range(len(ir.scalars)):
                m.decorate_member(block, k, 35, 4 * k)
            self.params = m.variable(UNIFORM, block)
            m.decorate(self.params, 34, 0)
            m.decorate(self.params, 33, len(ir.buffers))
        for a in ir.arrays:
            if a.space == "shared":
                self.pointers[a.name] = m.variable(WORKGROUP, self.array_type(a))
                m.name(self.pointers[a.name], a.name)
        for name in sorted(ir.builtins):
            three = name in ("tid", "gid", "groups")
            t = m.declare(("uvec3",), 23, m.type(u32), 3) if three else m.type(u32)
            self.inputs[name] = m.variable(INPUT, t)
            m.decorate(self.inputs[name], 11, BUILTINS[name])

    def interface(self) -> list[int]:
        """The variables that the entry point names: its inputs, from SPIR-V 1.4 on all that the module has."""
        if "conversions" not in self.ir.features:
            return list(self.inputs.values())
        outer = [b.name for b in self.ir.buffers] + [a.name for a in self.ir.arrays if a.space == "shared"]
        params = [self.params] if self.ir.scalars else []
        return [*self.inputs.values(), *(self.pointers[name] for name in outer), *params]

    def buffer_type(self, b: Buffer) -> int:
        key = ("buffer", b.type.name, b.access)
        if key not in self.m.known:
            runtime = self.m.declare(("runtime", b.type.name), 29, self.m.type(b.type))
            if ("strided", runtime) not in self.m.known:
                self.m.known["strided", runtime] = runtime
                self.m.decorate(runtime, 6, b.type.bytes)
            block = self.m.declare(key, 30, runtime)
            self.m.decorate(block, 2)
            self.m.decorate_member(block, 0, 35, 0)
            if b.access != "readwrite":
                self.m.decorate_member(block, 0, 24 if b.access == "read" else 25)
        return self.m.known[key]

    def array_type(self, a: Array) -> int:
        length = self.m.constant(u32, a.length)
        return self.m.declare(("array", a.type.name, a.length), 28, self.m.type(a.type), length)

    def function_variables(self) -> None:
        """Local arrays, variables that need memory, and fragments."""
        m = self.m
        wanted = [(a.name, self.array_type(a)) for a in self.ir.arrays if a.space == "local"]
        wanted += [(v.name, m.type(v.type)) for v in self.ir.variables if v.name not in self.direct]
        wanted += [(f.name, self.fragment_type(f.name)) for f in self.ir.fragments]
        for name, t in wanted:
            self.pointers[name] = m.op(59, m.pointer(FUNCTION, t), FUNCTION)

    def entry_values(self) -> None:
        """Read inputs and scalars once, before anything else."""
        m = self.m
        found = {
            (type(e).__name__, e.name, getattr(e, "axis", 0)): e
            for e in self.ir.expressions
            if type(e) in (Builtin, Param)
        }
        for _, e in sorted(found.items()):
            if isinstance(e, Param):
                k = [s.name for s in self.ir.scalars].index(e.name)
                pointer = m.op(65, m.pointer(UNIFORM, m.type(e.type)), self.params, m.constant(u32, k))
                self.entry["param", e.name] = m.op(61, m.type(e.type), pointer)
            elif e.name in ("tid", "gid", "groups"):
                whole = m.op(61, m.known[("uvec3",)], self.inputs[e.name])
                self.entry[e.name, e.axis] = m.op(81, m.type(u32), whole, e.axis)
            else:
                self.entry[e.name, e.axis] = m.op(61, m.type(u32), self.inputs[e.name])

    def block(self, body: tuple[Stmt, ...]) -> None:
        for s in body:
            self.line = s.line
            _STATEMENTS[type(s)](self, s)

    def place(self, name: str, index: int) -> tuple[int, list[int]]:
        """A pointer to an element, and the memory operands of its accesses."""
        memory = self.ir.memory[name]
        storage = STORAGE if isinstance(memory, Buffer) else WORKGROUP if memory.space == "shared" else FUNCTION
        member = [self.m.constant(u32, 0)] if storage == STORAGE else []
        pointer = self.m.op(65, self.m.pointer(storage, self.m.type(memory.type)), self.pointers[name], *member, index)
        return pointer, [_NON_PRIVATE] if self.ir.fragments and storage == WORKGROUP else []

    def assign(self, s: Assign) -> None:
        value = self.e(s.value)
        if s.name in self.direct:
            self.values[s.name] = value
        else:
            self.m.do(62, self.pointers[s.name], value)

    def store(self, s: Store) -> None:
        value = self.e(s.value)
        pointer, access = self.place(s.array, self.e(s.index))
        self.m.do(62, pointer, value, *access)

    def barrier(self, s: Barrier | SubgroupBarrier) -> None:
        scope = self.m.constant(u32, _WORKGROUP_SCOPE if isinstance(s, Barrier) else SUBGROUP_SCOPE)
        semantics = 0x108 | (0x6000 if self.ir.fragments else 0)  # acquire-release of workgroup memory
        self.m.do(224, scope, scope, self.m.constant(u32, semantics))

    def if_(self, s: If) -> None:
        m, condition = self.m, self.e(s.condition)
        then, merge = m.id(), m.id()
        orelse = m.id() if s.orelse else merge
        m.do(247, merge, 0)
        m.do(250, condition, then, orelse)
        for label, body in ((then, s.then), (orelse, s.orelse)):
            if label != merge:
                m.do(248, label)
                self.block(body)
                m.do(249, merge)
        m.do(248, merge)

    def loop(self, before: tuple[Stmt, ...], condition, body: tuple[Stmt, ...], last) -> None:
        """header -> test -> (body -> continue -> header | merge)."""
        m = self.m
        header, test, inside, following, merge = (m.id() for _ in range(5))
        m.do(249, header)
        m.do(248, header)
        m.do(246, merge, following, 0)
        m.do(249, test)
        m.do(248, test)
        self.block(before)
        m.do(250, condition(), inside, merge)
        m.do(248, inside)
        self.block(body)
        m.do(249, following)
        m.do(248, following)
        last()
        m.do(249, header)
        m.do(248, merge)

    def for_(self, s: For) -> None:
        counter = Var(self.ir.type_of[s.name], s.name)
        self.m.do(62, self.pointers[s.name], self.e(s.start))

        def advance() -> None:
            self.m.do(62, self.pointers[s.name], self.e(Binary(counter.type, "+", counter, s.step)))

        self.loop((), lambda: self.e(Binary(bool_, "<", counter, s.stop)), s.body, advance)

    def while_(self, s: While) -> None:
        self.loop(s.before, lambda: self.e(s.condition), s.body, lambda: None)

    def e(self, e: Expr) -> int:
        return _EXPRESSIONS[type(e)](self, e)

    def var(self, e: Var) -> int:
        if e.name in self.values:
            return self.values[e.name]
        return self.m.op(61, self.m.type(e.type), self.pointers[e.name])

    def load(self, e: Load) -> int:
        pointer, access = self.place(e.array, self.e(e.index))
        return self.m.op(61, self.m.type(e.type), pointer, *access)

    def unary(self, e: Unary) -> int:
        opcode = {"not": 168, "~": 200, "-": 127 if e.type.is_float else 126}[e.op]
        return self.m.op(opcode, self.m.type(e.type), self.e(e.x))

    def binary(self, e: Binary) -> int:
        left, right = self.e(e.left), self.e(e.right)
        return self.m.op(BINARY[e.left.type.dtype][e.op], self.m.type(e.type), left, right)

    def call(self, e: Call) -> int:
        args, t = [self.e(a) for a in e.args], self.m.type(e.type)
        if e.function == "dot":
            return self.m.op(148, t, *args)
        if e.function == "mulhi":
            pair = self.m.declare(("u32 pair",), 30, t, t)
            return self.m.op(81, t, self.m.op(151, pair, *args), 1)
        by_type = BY_TYPE.get(e.function)
        number = by_type[_kind(e.type)] if by_type else GLSL[e.function]
        return self.m.op(12, t, self.glsl, number, *args)

    def select(self, e: Select) -> int:
        condition = self.e(e.condition)
        if e.type.lanes > 1:
            condition = self.m.op(80, self.m.bools(e.type.lanes), *[condition] * e.type.lanes)
        return self.m.op(169, self.m.type(e.type), condition, self.e(e.yes), self.e(e.no))

    def cast(self, e: Cast) -> int:
        x, source, target = self.e(e.x), e.x.type, e.type
        if source is bool_:
            return self.m.op(169, self.m.type(target), x, self.m.constant(target, 1), self.m.constant(target, 0))
        letter = ["f" if t.is_float else t.dtype[0] for t in (source, target)]
        return self.m.op(CASTS["".join(letter)], self.m.type(target), x)

    def vector(self, e: Vector) -> int:
        parts = [self.e(p) for p in e.parts] * (e.type.lanes // len(e.parts))
        return self.m.op(80, self.m.type(e.type), *parts)

    def subgroup(self, e: Subgroup) -> int:
        scope, x, t = self.m.constant(u32, SUBGROUP_SCOPE), self.e(e.x), self.m.type(e.type)
        if e.operand is None:
            return self.m.op(REDUCE[e.op][_kind(e.type)], t, scope, 0, x)
        return self.m.op(346 if e.op == "shuffle_xor" else 345, t, scope, x, self.e(e.operand))


_STATEMENTS = {
    Assign: _Spirv.assign,
    Store: _Spirv.store,
    Barrier: _Spirv.barrier,
    SubgroupBarrier: _Spirv.barrier,
    If: _Spirv.if_,
    For: _Spirv.for_,
    While: _Spirv.while_,
    Fill: _Spirv.fill,
    LoadFragment: _Spirv.load_fragment,
    StoreFragment: _Spirv.store_fragment,
    Mma: _Spirv.mma,
    SetElement: _Spirv.set_element,
    Convert: _Spirv.convert,
    RowReduce: _Spirv.row_reduce,
}
_EXPRESSIONS = {
    Const: lambda self, e: self.m.constant(e.type, e.value),
    Var: _Spirv.var,
    Param: lambda self, e: self.entry["param", e.name],
    Builtin: lambda self, e: self.entry[e.name, e.axis],
    Load: _Spirv.load,
    Unary: _Spirv.unary,
    Binary: _Spirv.binary,
    Call: _Spirv.call,
    Select: _Spirv.select,
    Cast: _Spirv.cast,
    Bitcast: lambda self, e: self.m.op(124, self.m.type(e.type), self.e(e.x)),
    Vector: _Spirv.vector,
    Component: lambda self, e: self.m.op(81, self.m.type(e.type), self.e(e.x), e.index),
    Element: _Spirv.element,
    Subgroup: _Spirv.subgroup,
}
