"""The words a kernel is written with. Outside a kernel they mean nothing and raise KernelError."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from tilesmith.codegen.node import Node
from tilesmith.codegen.types import KernelError, Type


class Annotation(Node):
    """What an argument of a kernel is: `kind` is `read`, `write`, `readwrite` or `scalar`."""

    kind: str
    type: Type


def _annotation(word: str, kind: str, meaning: str) -> type:
    def of(cls, type_: Type) -> Annotation:
        if not isinstance(type_, Type):
            raise KernelError(f"{word}[{type_!r}]: allowed are the types of a kernel, such as {word}[f32]")
        return Annotation(kind, type_)

    return type(word, (), {"__doc__": meaning, "__class_getitem__": classmethod(of), "__module__": __name__})


In = _annotation("In", "read", "`x: In[f32]`: a flat tensor that the kernel reads.")
Out = _annotation("Out", "write", "`y: Out[f16x4]`: a flat tensor that the kernel only writes.")
InOut = _annotation("InOut", "readwrite", "`y: InOut[f32]`: a flat tensor that the kernel reads and writes.")
Scalar = _annotation("Scalar", "scalar", "`n: Scalar[u32]`: a number; f32, u32 or i32.")


class const:
    """`tiles: const = D // 16`: a compile-time value, which may size arrays and choose branches."""


class Inline(Node):
    """A function whose body is written out at each call in a kernel; made by `inline`."""

    function: Callable

    def __call__(self, *args, **kwargs):
        raise KernelError(f"{self.function.__name__} is @inline: it is called from kernels")


def inline(function: Callable) -> Inline:
    """Mark a function that kernels may call: plain statements, then at most one `return`, at the end.

    Arguments are passed by value, arrays and fragments by name. Arrays that it declares are new at each call.
    """
    return Inline(function)


def _word(function: Callable) -> Callable:
    @functools.wraps(function)
    def outside(*args, **kwargs):
        raise KernelError(f"{function.__name__}() means something only inside a kernel")

    outside.word = function.__name__
    return outside


@_word
def tid(axis: int = 0) -> Any:
    """This thread's place in its workgroup along `axis`, u32."""


@_word
def gid(axis: int = 0) -> Any:
    """The workgroup's place in the grid along `axis`, u32."""


@_word
def groups(axis: int = 0) -> Any:
    """How many workgroups the grid has along `axis`, u32."""


@_word
def lane() -> Any:
    """This thread's place in its subgroup (warp, wave, simdgroup), u32."""


@_word
def subgroup() -> Any:
    """The subgroup's place in its workgroup, u32."""


@_word
def subgroup_size() -> Any:
    """Threads of a subgroup, u32; a compile-time number where `build` was given one."""


@_word
def shared(type: Type, length: int) -> Any:
    """An array of the workgroup. Undefined until written; others see a write after the next `barrier()`."""


@_word
def local(type: Type, length: int) -> Any:
    """An array of this thread. In registers where every index is a compile-time number."""


@_word
def barrier() -> None:
    """All threads of the workgroup wait for one another. Orders shared arrays, not buffers.

    Only where control flow is the same for all of them: conditions and loop bounds made of literals, scalars, `gid` and
    what is computed from these.
    """


@_word
def subgroup_barrier() -> None:
    """The threads of the subgroup wait for one another: `barrier()` among them alone. Not for WebGPU."""


@_word
def unroll(start: int, stop: int | None = None, step: int = 1) -> Any:
    """`for i in unroll(...)`: like range, but written out once an iteration, `i` being a compile-time number."""


@_word
def select(condition: Any, yes: Any, no: Any) -> Any:
    """`yes` where `condition`, else `no`. Both are evaluated; `yes if condition else no` evaluates one."""


@_word
def bitcast(type: Type, x: Any) -> Any:
    """The bits of a 32-bit number as another: `bitcast(f32, bits << 16)`. f16x2 or bf16x2 as u32, or it as these."""


@_word
def exp(x: Any) -> Any:
    """e to the x; f32 and its vectors, as for the functions below."""


@_word
def exp2(x: Any) -> Any:
    """2 to the x. Accurate to about 2 ulp; a result below 2**-126 may be 0."""


@_word
def log(x: Any) -> Any:
    """The natural logarithm."""


@_word
def log2(x: Any) -> Any:
    """The logarithm to base 2."""


@_word
def sqrt(x: Any) -> Any:
    """The square root."""


@_word
def rsqrt(x: Any) -> Any:
    """1 / sqrt(x)."""


@_word
def tanh(x: Any) -> Any:
    """The hyperbolic tangent. Some drivers overflow beyond |x| of about 40: clamp first."""


@_word
def sin(x: Any) -> Any:
    """The sine. WebGPU and Vulkan promise little accuracy beyond |x| of pi."""


@_word
def cos(x: Any) -> Any:
    """The cosine. WebGPU and Vulkan promise little accuracy beyond |x| of pi."""


@_word
def floor(x: Any) -> Any:
    """The next integer down, as a float."""


@_word
def ceil(x: Any) -> Any:
    """The next integer up, as a float."""


@_word
def fma(a: Any, b: Any, c: Any) -> Any:
    """a * b + c; rounded once where the device can, else as written."""


@_word
def dot(a: Any, b: Any) -> Any:
    """The sum over lanes of a * b."""


@_word
def mulhi(a: Any, b: Any) -> Any:
    """The high 32 bits of the 64-bit product of two u32."""


@_word
def pack_f16(x: Any) -> Any:
    """An f32x2 as two f16 in one u32, the first in the low half. A device may round to either neighbour."""


@_word
def unpack_f16(x: Any) -> Any:
    """The two f16 in a u32 as f32x2. Needs no f16 of the device."""


@_word
def subgroup_add(x: Any) -> Any:
    """The sum over the subgroup, in every thread. All its threads must take part, as in each of the following."""


@_word
def subgroup_max(x: Any) -> Any:
    """The maximum over the subgroup."""


@_word
def subgroup_min(x: Any) -> Any:
    """The minimum over the subgroup."""


@_word
def shuffle(x: Any, lane: Any) -> Any:
    """`x` of the subgroup's thread `lane`."""


@_word
def shuffle_xor(x: Any, mask: int) -> Any:
    """`x` of the thread whose lane is this one's ^ mask."""


@_word
def fragment(role: str, type: Type, tile: int = 16, placed: bool = True) -> Any:
    """A tile x tile matrix of a subgroup of 32: left ("a") or right ("b") operand, f16 or bf16; accumulator ("c"), f32.

    CUDA and cooperative matrices take tile 16, Metal 8. The workgroup must hold whole subgroups.

    placed: whether `row`, `column`, `row_add` and `row_max` are known for its elements. Vulkan does not specify which
    elements a thread holds, only that all accumulators have the same layout: there, elements are available only for
    fragments that are not placed.
    """


@_word
def fill(fragment: Any, value: Any) -> None:
    """Set every element."""


@_word
def load_fragment(fragment: Any, array: Any, offset: Any, stride: int, transposed: bool = False) -> None:
    """Element (r, c) is `array[offset + r * stride + c]`; transposed, `array[offset + c * stride + r]`.

    Offset and stride count the fragment's scalars and are multiples of 8 (of 4 for f32); all threads of the subgroup
    pass the same. The array holds the fragment's type, vectors of it, or for f16 and bf16 words: u32x4 holds 8 scalars.
    An accumulator takes stride 0 too, which repeats a row or, transposed, a column.
    """


@_word
def store_fragment(fragment: Any, array: Any, offset: Any, stride: int) -> None:
    """Write an accumulator: element (r, c) to `array[offset + r * stride + c]`, of f32, or of f16, which rounds."""


@_word
def mma(c: Any, a: Any, b: Any) -> None:
    """`c += a @ b`."""


@_word
def convert(a: Any, c: Any) -> None:
    """The operand fragment `a` takes the accumulator's values, in registers. Vulkan: on NVIDIA's devices alone."""


@_word
def reduce_rows(target: Any, source: Any, op: str) -> None:
    """Each element of an accumulator takes the sum ("add") or maximum ("max") of its row of another, as `convert`."""


@_word
def elements(c: Any) -> int:
    """How many elements of an accumulator a thread holds, at compile time: `c[0]`, `c[1]`, ..."""


@_word
def row(c: Any, element: int) -> Any:
    """The row of this thread's `element` of an accumulator, u32."""


@_word
def column(c: Any, element: int) -> Any:
    """The column of this thread's `element` of an accumulator, u32."""


@_word
def row_add(c: Any, x: Any) -> Any:
    """The sum of `x` over the threads that hold elements of the same rows of an accumulator like `c`."""


@_word
def row_max(c: Any, x: Any) -> Any:
    """The maximum of `x` over the threads that hold elements of the same rows of an accumulator like `c`."""
