"""Portable kernels: one Python function becomes CUDA C++, SPIR-V, Metal and WGSL, and runs on a CPU to be checked.

A kernel is what one thread of a workgroup does, as on every GPU:

    from tilesmith.codegen import In, Out, Scalar, barrier, build, const, f32, gid, rsqrt, shared, tid, u32, unroll
    from tilesmith.codegen import cuda, interpret, metal, spirv, wgsl

    def create_rms_norm(threads: int):
        def rms_norm(x: In[f32], weight: In[f32], y: Out[f32], columns: Scalar[u32], eps: Scalar[f32]):
            partial = shared(f32, threads)
            t, start, squares = tid(0), gid(0) * columns, 0.0
            for i in range(t, columns, threads):
                squares += x[start + i] * x[start + i]
            partial[t] = squares
            for step in unroll(threads.bit_length() - 1):
                half: const = threads >> step + 1
                barrier()
                if t < half:
                    partial[t] += partial[t + half]
            barrier()
            rstd = rsqrt(partial[0] / f32(columns) + eps)
            for i in range(t, columns, threads):
                y[start + i] = x[start + i] * rstd * weight[i]
        return build(rms_norm, (threads, 1, 1))

    ir = create_rms_norm(128)
    interpret(ir, (rows, 1, 1), {"x": x, "weight": w, "y": y}, {"columns": 777, "eps": 1e-6})   # NumPy arrays
    cuda.generate(ir), metal.generate(ir), wgsl.generate(ir), spirv.generate(ir)

Two times. What is known when `build` runs (numbers, types and functions of the closure, the module or `**constants`, an
`unroll` index, `name: const = ...`) is plain Python and disappears; the rest runs on the device. An `if` over a
compile-time condition keeps one branch; a list may hold arrays, fragments or numbers and is indexed at compile time.

Values. f32, f16, bf16 (memory only), u32, i32, bool, and vectors of 2 or 4 (`f16x4`, `vector(f16, n)`) with lanes
`v.x` or `v[0]`. No implicit mixing: convert with `f32(x)`. A literal takes the type beside it, else u32, i32 or f32.
`/` is for floats; `//` and `%` for u32, and for i32 by a power of two. A buffer of `f16x4` is indexed in units of four.
Of a NaN and a number `min` and `max` give the number on most devices; WebGPU and Metal promise nothing about NaN.

Memory. `shared` arrays of the workgroup, `local` arrays of a thread, flat buffers indexed with u32 (at most 2**32
elements). `barrier()` orders shared arrays; nothing orders buffers within a launch, so no thread may touch what another
wrote. Undefined until written.

Control. `for i in range(...)` upwards, `while`, `if`, `a if c else b`; no return, break or recursion. An `@inline`
function is written out at each call and may end with a return, of several values if need be. Barriers stand where all
threads of the workgroup pass, subgroup and fragment operations where all of the subgroup do. Things happen in Python's
order; but a loop's variable ends with its loop, and a compile-time name with the `if` or loop that first bound it.

Fragments are 16 x 16 (CUDA, Vulkan) or 8 x 8 (Metal) matrices of a 32-wide subgroup, for tensor cores: `fragment`,
`fill`, `load_fragment`, `mma`, `store_fragment`, and accumulators' elements `c[k]`. On CUDA and Metal also `row`,
`column`, `row_max`, `row_add`, and there and through Vulkan on NVIDIA's devices `convert` and `reduce_rows`, which keep
an attention kernel's softmax in registers. A kernel that takes `tile` and a flag for registers as configuration serves
all targets with one text.

`interpret` refuses what a GPU would get wrong in silence: races, indices out of bounds, values never written, divergent
barriers, integer overflow, misaligned fragments. Errors of `build` and the printers are KernelError and begin with
file:line. `ir.shared_bytes`, `ir.features`, `ir.pack_scalars(values)` and `to_json(ir)` serve launchers.

No torch, no Triton; NumPy only when `interpret` is imported.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from tilesmith._lazy import absent, imported, resolved
from tilesmith.codegen.frontend import build
from tilesmith.codegen.ir import KernelIR
from tilesmith.codegen.language import (
    In,
    InOut,
    Out,
    Scalar,
    barrier,
    bitcast,
    ceil,
    column,
    const,
    convert,
    cos,
    dot,
    elements,
    exp,
    exp2,
    fill,
    floor,
    fma,
    fragment,
    gid,
    groups,
    inline,
    lane,
    load_fragment,
    local,
    log,
    log2,
    mma,
    mulhi,
    pack_f16,
    reduce_rows,
    row,
    row_add,
    row_max,
    rsqrt,
    select,
    shared,
    shuffle,
    shuffle_xor,
    sin,
    sqrt,
    store_fragment,
    subgroup,
    subgroup_add,
    subgroup_barrier,
    subgroup_max,
    subgroup_min,
    subgroup_size,
    tanh,
    tid,
    unpack_f16,
    unroll,
)
from tilesmith.codegen.types import (
    KernelError,
    Type,
    bf16,
    bf16x2,
    bf16x4,
    bool_,
    f16,
    f16x2,
    f16x4,
    f32,
    f32x2,
    f32x4,
    i32,
    i32x2,
    i32x4,
    type_named,
    u32,
    u32x2,
    u32x4,
    vector,
)
from tilesmith.codegen.verifier import verify

if TYPE_CHECKING:
    from tilesmith.codegen import cuda as cuda
    from tilesmith.codegen import metal as metal
    from tilesmith.codegen import spirv as spirv
    from tilesmith.codegen import wgsl as wgsl
    from tilesmith.codegen.interpreter import Fault, interpret
    from tilesmith.codegen.serial import from_json, to_json

# fmt: off
__all__ = [
    "build", "KernelIR", "KernelError", "verify", "to_json", "from_json", "interpret", "Fault",
    "In", "Out", "InOut", "Scalar", "const", "inline",
    "Type", "vector", "type_named", "f32", "f32x2", "f32x4", "f16", "f16x2", "f16x4", "bf16", "bf16x2", "bf16x4",
    "u32", "u32x2", "u32x4", "i32", "i32x2", "i32x4", "bool_",
    "tid", "gid", "groups", "lane", "subgroup", "subgroup_size", "barrier", "subgroup_barrier", "shared", "local",
    "unroll", "select",
    "exp", "exp2", "log", "log2", "sqrt", "rsqrt", "tanh", "sin", "cos", "floor", "ceil", "fma", "dot", "mulhi",
    "bitcast", "pack_f16", "unpack_f16",
    "subgroup_add", "subgroup_max", "subgroup_min", "shuffle", "shuffle_xor",
    "fragment", "fill", "load_fragment", "store_fragment", "mma", "convert", "elements", "row", "column", "row_add",
    "row_max", "reduce_rows",
]
# fmt: on
_PRINTERS = ("cuda", "metal", "spirv", "wgsl")
_LAZY = {"interpret": "interpreter", "Fault": "interpreter", "to_json": "serial", "from_json": "serial"}


if not TYPE_CHECKING:  # type checkers would take it for a promise that there is every name

    def __getattr__(name: str):
        if name in _LAZY:
            return resolved(f"tilesmith.codegen.{_LAZY[name]}", name)
        if name in _PRINTERS:
            return imported(f"tilesmith.codegen.{name}")
        raise absent(__name__, name, [*__all__, *_PRINTERS])
