"""CUDA C++ for sm_80 and later, and PTX through NVRTC. Arguments: the buffers' pointers as declared, then scalars."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from tilesmith.codegen import cuda_prelude as prelude
from tilesmith.codegen import nvrtc
from tilesmith.codegen.ir import Array, KernelIR, offset_bytes
from tilesmith.codegen.nodes import (
    Binary,
    Bitcast,
    Builtin,
    Call,
    Component,
    Convert,
    Element,
    Fill,
    Load,
    LoadFragment,
    Mma,
    RowReduce,
    SetElement,
    StoreFragment,
    Subgroup,
    Unary,
    operands,
)
from tilesmith.codegen.text import TextPrinter

if TYPE_CHECKING:
    from tilesmith.hardware.limits import Limits

STATIC_SHARED = 49_152
"""Bytes of shared memory beyond which a kernel's is dynamic: the launch then passes `dynamic_shared(ir)`."""


def generate(ir: KernelIR, limits: Limits | None = None) -> str:
    """The kernel as CUDA C++ that includes nothing. Raises KernelError for a tile other than 16, or beyond `limits`."""
    return _Cuda(ir, limits).print()


def ptx(ir: KernelIR, arch: str = "sm_80", limits: Limits | None = None) -> str:
    """The kernel as PTX for `arch` ("sm_80", "sm_90", ...), compiled by NVRTC.

    Raises KernelError where NVRTC is not installed, naming the extra, or where it rejects the source.
    """
    return nvrtc.compile(generate(ir, limits), ir.name, arch)


def cubin(ir: KernelIR, arch: str = "sm_80", limits: Limits | None = None) -> bytes:
    """The kernel as machine code for exactly `arch`. Raises as `ptx` does."""
    return nvrtc.compile(generate(ir, limits), ir.name, arch, binary=True)


def dynamic_shared(ir: KernelIR) -> int:
    """Bytes of shared memory that the launch must pass; above STATIC_SHARED also the function's attribute."""
    return ir.shared_bytes if ir.shared_bytes > STATIC_SHARED else 0


class _Cuda(TextPrinter):
    target = "cuda"
    shared_ceiling = 232_448
    types: ClassVar = {"f32": "float", "f16": "f16", "bf16": "bf16", "u32": "unsigned", "i32": "int", "bool": "bool"}
    vector_type = "Vec<{scalar}, {lanes}>"
    barrier = "__syncthreads();"
    subgroup_barrier = "__syncwarp();"
    functions: ClassVar = {
        "exp": "expf",
        "exp2": "exp2_",
        "log": "logf",
        "log2": "log2f",
        "sqrt": "sqrtf",
        "rsqrt": "rsqrtf",
        "tanh": "tanhf",
        "sin": "sinf",
        "cos": "cosf",
        "floor": "floorf",
        "ceil": "ceilf",
        "fma": "fmaf",
        "dot": "dot_",
        "mulhi": "__umulhi",
        "pack_f16": "pack_f16_",
        "unpack_f16": "unpack_f16_",
    }

    def print(self) -> str:
        ir = self.ir
        self.check()
        if ir.subgroup_size not in (None, 32):
            self.refuse(f"subgroups have 32 threads, the kernel is built for {ir.subgroup_size}")
        if "subgroups" in ir.features and ir.threads % 32:
            self.refuse(f"subgroup operations need whole subgroups of 32; a workgroup has {ir.threads} threads")
        for f in ir.fragments:
            if f.tile != 16:
                self.refuse(f"fragment {f.name} has tile {f.tile}; allowed: 16")
        args = [
            f"{'const ' * (b.access == 'read')}{self.type(b.type)}* __restrict__ {self.name(b.name)}"
            for b in ir.buffers
        ]
        args += [f"{self.type(s.type)} {self.name(s.name)}" for s in ir.scalars]
        head = f'extern "C" __global__ void __launch_bounds__({ir.threads}) {self.name(ir.name)}({", ".join(args)}) {{'
        self.arrays()
        roles = {"a": "FragmentA<{}>", "b": "FragmentB<{}>", "c": "FragmentC"}
        for f in ir.fragments:
            self.put(f"{roles[f.role].format(self.types[f.type.dtype])} {self.name(f.name)};")
        self.block(ir.body)
        return "\n".join([*self.pieces(), head, *self.lines, "}\n"])

    def arrays(self) -> None:
        """Declare shared and local arrays."""
        offset, dynamic = 0, dynamic_shared(self.ir) > 0
        if dynamic:
            self.put("extern __shared__ __align__(16) unsigned char shared_memory_[];")
        for a in self.ir.arrays:
            if a.space == "local":
                self.put(self.array(a))
            elif dynamic:
                t = self.type(a.type)
                self.put(f"{t}* const {self.name(a.name)} = reinterpret_cast<{t}*>(shared_memory_ + {offset});")
                offset += offset_bytes(a)
            else:
                self.put(f"__shared__ __align__(16) {self.array(a)}")

    def pieces(self) -> list[str]:
        """The parts of the prelude that the kernel uses, in an order that compiles."""
        ir, found = self.ir, self.ir.expressions
        wide = [x for x in found if x.type.lanes > 1]
        calls = {(self.function(x), len(x.args)) for x in wide if isinstance(x, Call)}
        binaries = {x.op for x in wide if isinstance(x, Binary)}
        signs = {x.op for x in wide if isinstance(x, Unary)}
        arithmetic = "f16" in ir.features and any(
            isinstance(x, (Binary, Unary, Call)) and "f16" in (x.type.dtype, operands(x)[0].type.dtype) for x in found
        )
        dtypes = {f.type.dtype for f in ir.fragments if f.role != "c"}
        vectors = bool(wide) or any(d.type.lanes > 1 for d in (*ir.buffers, *ir.arrays))
        named = ir.functions
        wanted = [
            (prelude.F16, "f16" in ir.features),
            (prelude.F16_ARITHMETIC, arithmetic),
            (prelude.BF16, "bf16" in ir.features),
            (prelude.VECTOR, vectors),
            *((prelude.vector16(t), vectors) for t in ("f16", "bf16") if t in ir.features),
            (prelude.READ, any(isinstance(x, Load) for x in wide)),
            (prelude.EXP2, "exp2" in named),
            (prelude.PACK_F16, "pack_f16" in named),
            (prelude.UNPACK_F16, "unpack_f16" in named),
            (prelude.DOT, "dot" in named),
            (prelude.BITCAST, any(isinstance(x, Bitcast) for x in found)),
            (prelude.SUBGROUP, any(isinstance(x, Subgroup) and x.operand is None for x in found)),
            (prelude.FRAGMENTS, bool(ir.fragments)),
            *((prelude.mma(t), True) for t in sorted(dtypes)),
            *self.fragment_pieces(),
            *((prelude.vector_operator({"//": "/"}.get(op, op)), True) for op in sorted(binaries)),
            *((prelude.vector_sign(op), True) for op in sorted(signs)),
            *((prelude.vector_function(name, n), True) for name, n in sorted(calls) if not name.endswith("pack_f16_")),
        ]
        return [piece.rstrip() for piece, used in wanted if used]

    def function(self, e: Call) -> str:
        if e.function in ("min", "max", "abs") and e.type.is_float:
            return f"f{e.function}f"
        if e.function == "abs":
            return "abs"
        return super().function(e)

    def builtin(self, e: Builtin) -> str:
        if e.name in ("tid", "gid", "groups"):
            return {"tid": "threadIdx", "gid": "blockIdx", "groups": "gridDim"}[e.name] + "." + "xyz"[e.axis]
        if e.name == "subgroup_size":
            return "32u"
        x, y, z = self.ir.workgroup
        flat = "threadIdx.x"
        if y * z > 1:
            flat = f"(threadIdx.x + {x}u * (threadIdx.y + {y}u * threadIdx.z))"
        return f"({flat} {'%' if e.name == 'lane' else '/'} 32u)"

    def load(self, e: Load) -> str:
        # nvcc splits the load of a struct of 16-bit lanes; a load of uint2 or uint4 stays whole.
        return super().load(e) if e.type.lanes == 1 else f"read_({self.name(e.array)} + {self.operand(e.index)})"

    def bitcast(self, e: Bitcast) -> str:
        return f"bitcast_<{self.type(e.type)}>({self.e(e.x)})"

    def component(self, e: Component) -> str:
        return f"{self.operand(e.x)}[{e.index}]"

    def subgroup(self, e: Subgroup) -> str:
        if e.operand is None:
            return f"subgroup_{e.op}_({self.e(e.x)})"
        word = "__shfl_xor_sync" if e.op == "shuffle_xor" else "__shfl_sync"
        return f"{word}(0xffffffffu, {self.e(e.x)}, {self.e(e.operand)})"

    def element(self, e: Element) -> str:
        return f"{self.name(e.fragment)}.r[{e.index}]"

    def set_element(self, s: SetElement) -> None:
        self.put(f"{self.name(s.fragment)}.r[{s.index}] = {self.e(s.value)};")

    def fill(self, s: Fill) -> None:
        self.put(f"fill_({self.name(s.fragment)}, {self.e(s.value)});")

    def fragment_pieces(self) -> list[tuple[str, bool]]:
        """What only some kernels do with accumulators."""
        ir = self.ir
        loads = [s for s in ir.statements if isinstance(s, LoadFragment) and s.transposed]
        stores = [s for s in ir.statements if isinstance(s, StoreFragment)]
        reduces = sorted({s.op for s in ir.statements if isinstance(s, RowReduce)})
        return [
            (prelude.LOAD_COLUMNS, any(ir.fragment_named[s.fragment].role == "c" for s in loads)),
            (prelude.STORE_F16, any(ir.memory[s.array].type.dtype == "f16" for s in stores)),
            *((prelude.row_reduce(op), True) for op in reduces),
        ]

    def load_fragment(self, s: LoadFragment) -> None:
        role = self.ir.fragment_named[s.fragment].role
        in_shared = isinstance(self.ir.memory[s.array], Array)
        word = f"load{'_shared' * in_shared}_<{str(s.transposed).lower()}>"
        if role == "c":
            word = "load_columns_" if s.transposed else "load_"
        self.put(f"{word}({self.name(s.fragment)}, {self.pointer(s)}, {s.stride}u);")

    def store_fragment(self, s: StoreFragment) -> None:
        self.put(f"store_({self.name(s.fragment)}, {self.pointer(s)}, {s.stride}u);")

    def mma(self, s: Mma) -> None:
        self.put(f"mma_({self.name(s.c)}, {self.name(s.a)}, {self.name(s.b)});")

    def convert(self, s: Convert) -> None:
        self.put(f"convert_({self.name(s.a)}, {self.name(s.c)});")

    def row_reduce(self, s: RowReduce) -> None:
        self.put(f"row_{s.op}_({self.name(s.target)}, {self.name(s.source)});")
