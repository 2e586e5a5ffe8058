"""What the kernel language, the verifier and the printers refuse: each error names the line and what is allowed."""

from __future__ import annotations

import inspect

import pytest

from codegen.samples import SAMPLES, create_matmul
from tilesmith.codegen import (
    In,
    InOut,
    KernelError,
    KernelIR,
    Out,
    Scalar,
    barrier,
    bf16,
    bitcast,
    bool_,
    build,
    const,
    cuda,
    exp,
    f16,
    f32,
    f32x4,
    fill,
    fragment,
    i32,
    inline,
    lane,
    metal,
    reduce_rows,
    row,
    shared,
    spirv,
    subgroup,
    subgroup_add,
    tid,
    u32,
    u32x4,
    verify,
    wgsl,
)
from tilesmith.codegen.ir import Variable
from tilesmith.codegen.nodes import Assign, Binary, Bitcast, Builtin, Call, Cast, Component, Const, Vector
from tilesmith.hardware.limits import limits_of


def integer_division(x: InOut[u32]):
    x[tid(0)] = x[tid(0)] / 2  # here


def mixed_types(x: InOut[u32], y: In[f32]):
    x[tid(0)] = x[tid(0)] + y[tid(0)]  # here


def wrong_store(x: InOut[u32]):
    x[tid(0)] = f32(1)  # here


def half_function(x: In[f16], y: Out[f16]):
    y[tid(0)] = exp(x[tid(0)])  # here


def brain_arithmetic(x: In[bf16], y: Out[bf16]):
    y[tid(0)] = x[tid(0)] + x[tid(0)]  # here


def read_of_out(x: Out[f32]):
    x[tid(0)] += 1.0  # here


def write_of_in(x: In[f32]):
    x[tid(0)] = 1.0  # here


def unknown_name(x: Out[f32]):
    x[tid(0)] = missing  # here # noqa: F821


def maybe_unassigned(x: Out[f32], n: Scalar[u32]):
    if n > 1:
        v = 1.0
    x[tid(0)] = v  # here


def changed_type(x: Out[f32]):
    v = 1.0
    v = tid(0)  # here
    x[tid(0)] = v


def float_condition(x: InOut[f32]):
    if x[0]:  # here
        x[0] = 1.0


def varying_barrier(x: Out[f32]):
    if tid(0) < 3:
        barrier()  # here
    x[tid(0)] = 1.0


def varying_loop(x: Out[f32], n: Scalar[u32]):
    t = tid(0)
    last = n
    if t > 3:
        last = n + t
    for i in range(last):
        barrier()  # here
        x[t] = f32(i)


def varying_subgroup(x: Out[f32]):
    if lane() < 3:
        x[tid(0)] = subgroup_add(1.0)  # here


def constant_bounds(x: Out[f32]):
    a = shared(f32, 8)
    a[tid(0) + 8] = 1.0  # here
    x[0] = 1.0


def runtime_length(n: Scalar[u32]):
    shared(f32, n)  # here


def signed_floor(x: InOut[i32]):
    x[0] = x[0] // 3  # here


def downwards(x: Out[u32]):
    for i in range(10, 0, -1):  # here
        x[i] = 0


def early_return(x: Out[u32]):
    if tid(0) > 3:
        return  # here
    x[0] = 1


def leaving(x: Out[u32]):
    while x[0] > 1:
        break


def unused_value(x: Out[u32]):
    tid(0)  # here
    x[0] = 1


def infinite(x: Out[f32]):
    x[0] = float("inf")  # here


def infinite_word(x: Out[u32]):
    x[tid(0)] = u32(float("inf"))  # here


def word_of_nan(x: Out[u32]):
    x[tid(0)] = u32(float("nan"))  # here


def too_large(x: Out[u32]):
    x[0] = 2**32  # here


def python_call(x: Out[f32]):
    x[tid(0)] = round(f32(tid(0)))  # here


def loop_variable(x: Out[u32]):
    for i in range(3):
        i = i + 1  # here
    x[0] = 1


def operand_element(x: Out[f32]):
    a = fragment("a", f16)
    fill(a, 1.0)
    x[tid(0)] = a[0]  # here


def place_unknown(x: Out[u32]):
    c = fragment("c", f32, placed=False)
    fill(c, 1.0)
    x[tid(0)] = row(c, 0)  # here


def rows_of_an_operand(x: Out[f32]):
    a, c = fragment("a", f16), fragment("c", f32)
    fill(a, 1.0)
    reduce_rows(c, a, "max")  # here


def rows_multiplied(x: Out[f32]):
    c = fragment("c", f32)
    fill(c, 1.0)
    reduce_rows(c, c, "mul")  # here


def lanes_apart(x: In[f32x4], y: Out[f32]):
    y[tid(0)] = f32(x[tid(0)])  # here


def half_of_a_word(x: In[f16], y: Out[u32]):
    y[tid(0)] = bitcast(u32, x[tid(0)])  # here


n = 5  # what after_its_loop must not find


def after_its_loop(x: Out[u32]):
    for n in range(3):
        x[n] = n
    x[3] = n  # here


def chosen_when_built(x: InOut[u32]):
    factors = [1, 2]
    if x[0] > 3:
        factors = [3, 4]  # here
    x[0] = factors[0]


def constant_of_a_loop(x: InOut[u32]):
    factor: const = 1
    for i in range(x[0]):
        factor: const = factor * 2  # here
        x[i] = factor


def constant_after_its_if(x: InOut[u32]):
    if x[0] > 3:
        factor: const = 2
        x[0] = factor
    x[1] = factor  # here


def list_that_grows(x: InOut[u32]):
    found = []
    if x[0] > 3:
        found.append(4)  # here
    x[0] = len(found)


def name_of_an_outer_loop(x: InOut[u32]):
    k = x[0]
    for i in range(3):
        x[i] = k
        for k in range(2):  # here
            x[i] += k


@inline
def next_of(x):
    x[0] += 1
    return x[0]


def chain_that_writes(x: InOut[u32]):
    if 3 < x[1] < next_of(x):  # here
        x[1] = 0


def matrix_product(x: InOut[u32]):
    x[0] = x[0] @ x[1]  # here


def greek(x: InOut[u32]):
    α = x[0]  # here
    x[0] = α


def endless_array(x: InOut[u32]):
    scratch = shared(u32, 2**40)  # here
    scratch[0] = x[0]


REFUSED = {
    matrix_product: r"MatMult of u32; allowed: \+ - \*",
    greek: r"α is not a name; allowed: ASCII letters",
    endless_array: r"the length must be a compile-time int of 1 to 1,048,576",
    after_its_loop: r"unknown name; a loop's variable ends with its loop",
    chosen_when_built: r"factors is known at compile time before this if or loop, which may not run",
    constant_of_a_loop: r"factor is known at compile time before this if or loop",
    constant_after_its_if: r"unknown name; .* a compile-time name with its if or loop",
    list_that_grows: r"a call of Python that does nothing in the kernel",
    name_of_an_outer_loop: r"k has a value before an outer loop, and may be another in its next turn",
    chain_that_writes: r"a chain whose last part writes; join two comparisons by `and`",
    integer_division: r"/ of u32 gives a fraction; write // for the quotient",
    mixed_types: r"u32 beside f32; convert one of them",
    wrong_store: r"x holds u32, got f32; convert it with u32\(\.\.\.\)",
    half_function: r"exp of f16; allowed: f32",
    brain_arithmetic: r"\+ of bf16: bf16 is for memory; compute in f32",
    read_of_out: r"x is Out, so it is not read; annotate it InOut\[f32\]",
    write_of_in: r"x is In, so it is not written; annotate it Out\[f32\] or InOut\[f32\]",
    unknown_name: r"unknown name",
    maybe_unassigned: r"may have no value yet",
    changed_type: r"v holds f32, got u32",
    float_condition: r"the condition is f32, not bool",
    varying_barrier: r"barrier\(\) under the condition of line \d+, which differs between the threads of a workgroup",
    varying_loop: r"barrier\(\) under the condition of line \d+",
    varying_subgroup: r"a subgroup operation under the condition of line \d+, which differs .* of a subgroup",
    constant_bounds: r"a has 8 elements; the index is at least 8",
    runtime_length: r"the length must be a compile-time int of 1 to",
    signed_floor: r"// of i32: languages round it differently",
    downwards: r"a step of -1; allowed: positive steps",
    early_return: r"return is allowed only as the last statement of an @inline function",
    leaving: r"x is Out, so it is not read",
    unused_value: r"the value is not used",
    infinite: r"inf is not a finite f32",
    infinite_word: r"inf to u32: it is no whole number",
    word_of_nan: r"nan to u32: it is no whole number",
    too_large: r"4294967296 is outside u32",
    python_call: r"round takes compile-time values only",
    loop_variable: r"i is a loop's variable",
    place_unknown: r"placed=False: where its elements lie is not known",
    rows_of_an_operand: r"a is not a fragment of role 'c'",
    rows_multiplied: r"op 'mul'; allowed: 'add', 'max'",
    operand_element: r"a is an operand; only accumulators have elements",
    lanes_apart: r"f32x4 to f32: the lanes differ",
    half_of_a_word: r"bitcast of f16 to u32; allowed: .*f16x2, bf16x2 and u32",
}


@pytest.mark.parametrize("kernel", REFUSED, ids=lambda kernel: kernel.__name__)
def test_refusals_name_the_line_and_what_is_allowed(kernel):
    lines, first = inspect.getsourcelines(kernel)
    marked = [first + k for k, line in enumerate(lines) if "# here" in line]
    with pytest.raises(KernelError, match=REFUSED[kernel]) as caught:
        build(kernel, (32, 1, 1))
    for line in marked:
        assert f"test_codegen_refusals.py:{line}: " in str(caught.value)


def test_refused_declarations():
    def plain(x: In[f32], n):
        pass

    def boolean(x: In[f32], flag: Scalar[f16]):
        pass

    def empty(x: In[f32]):
        pass

    with pytest.raises(KernelError, match="allowed annotations: In"):
        build(plain, (32, 1, 1))
    with pytest.raises(KernelError, match="a Scalar of f16; allowed: f32, u32, i32"):
        build(boolean, (32, 1, 1))
    with pytest.raises(KernelError, match="2048 threads"):
        build(empty, (2048, 1, 1))
    with pytest.raises(KernelError, match="fragments need subgroups of 32; got 32 and 48 threads"):
        build(only_a_fragment, (48, 1, 1))
    with pytest.raises(KernelError, match="subgroups of 24; allowed: None, 1, 2, 4, 8, 16, 32, 64, 128 threads"):
        build(empty, (48, 1, 1), subgroup_size=24)
    with pytest.raises(KernelError, match="allowed are the types of a kernel"):
        In[int]
    with pytest.raises(KernelError, match="means something only inside a kernel"):
        barrier()


def only_a_fragment(x: Out[f32]):
    c = fragment("c", f32)
    fill(c, 0.0)


def test_shared_memory_beyond_a_device():
    def large(x: Out[f32]):
        a, b = shared(f32, 6000), shared(f16, 5000)
        a[tid(0)], b[tid(0)] = 1.0, 1.0
        x[tid(0)] = a[tid(0)] + f32(b[tid(0)])

    ir = build(large, (64, 1, 1))
    assert ir.shared_bytes == 34_000
    with pytest.raises(
        KernelError, match=r"needs 34,000 bytes .* webgpu has 16,384 \(bytes by array: a 24,000, b 10,000"
    ):
        build(large, (64, 1, 1), limits=limits_of("webgpu"))
    for target, error in ((metal, "at most 32,768"), (wgsl, "at most 32,768")):
        with pytest.raises(KernelError, match=error):
            target.generate(ir)
    with pytest.raises(KernelError, match="vulkan has 32,768"):
        spirv.generate(ir, limits_of("vulkan"))
    assert cuda.dynamic_shared(ir) == 0
    wide = build(much_shared, (64, 1, 1))
    assert cuda.dynamic_shared(wide) == 60_000
    assert "shared_memory_ + 40000" in cuda.generate(wide)


def much_shared(x: Out[f32]):
    a, b = shared(f32, 10_000), shared(f32, 5_000)
    a[tid(0)], b[tid(0)] = 1.0, 2.0
    x[tid(0)] = a[tid(0)] + b[tid(0)]


def test_targets_refuse_what_they_have_not():
    brain = SAMPLES["brain_floats"]().ir
    for target in (wgsl, spirv):
        with pytest.raises(KernelError, match="x is bf16x2, which .* use f16 or f32"):
            target.generate(brain)
    with pytest.raises(KernelError, match="has tile 16; allowed: 8"):
        metal.generate(create_matmul(16))
    with pytest.raises(KernelError, match="has tile 8; allowed: 16"):
        cuda.generate(create_matmul(8))
    with pytest.raises(KernelError, match="WebGPU cannot promise fragments"):
        wgsl.generate(create_matmul(16))
    with pytest.raises(KernelError, match=r"samples_matrices.py:\d+: softmax for spirv: .* go through shared memory"):
        spirv.generate(SAMPLES["softmax"]().ir)
    with pytest.raises(KernelError, match="subgroups have 32 threads, the kernel is built for 16"):
        cuda.generate(build(subgroup_of_16, (32, 1, 1), subgroup_size=16))


def subgroup_of_16(x: Out[f32]):
    x[tid(0)] = subgroup_add(f32(lane())) + f32(subgroup())


def test_text_that_is_nested_too_deeply(tmp_path, monkeypatch):
    terms = " + ".join(f"x[{k}]" for k in range(900))
    (tmp_path / "deep.py").write_text(
        f"from tilesmith.codegen import InOut, u32\ndef deep(x: InOut[u32]):\n    x[0] = {terms}\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    import deep

    with pytest.raises(KernelError, match=r"deep.py:3: expressions nested too deeply; assign their parts to names"):
        build(deep.deep, (1, 1, 1))


A_BOOL, A_WORD, WORDS = Const(bool_, True), Builtin(u32, "tid", 0), Vector(u32x4, (Builtin(u32, "tid", 0),))
UNPRINTABLE = [
    (Cast(u32, A_WORD), "a cast of u32 to itself"),
    (Bitcast(u32, A_WORD), "a bitcast of u32 to itself"),
    (Component(u32, A_WORD, 0), "lane 0 of u32, which is no vector"),
    (Call(u32, "abs", (A_WORD,)), "abs of u32"),
    (Binary(bool_, "&", A_BOOL, A_BOOL), "& of bool"),
    (Binary(bool_, "|", A_BOOL, A_BOOL), "[|] of bool"),
    (Binary(u32x4, "<<", WORDS, A_WORD), "u32x4 << u32"),
]


@pytest.mark.parametrize(("value", "message"), UNPRINTABLE, ids=[message for _, message in UNPRINTABLE])
def test_a_tree_that_build_never_makes_and_no_target_can_print(value, message):
    """`from_json` takes trees that others wrote."""
    body = (Assign(7, "v", value),)
    ir = KernelIR("written", (32, 1, 1), (), (), (), (), (Variable("v", value.type),), body, source="by_hand.py")
    with pytest.raises(KernelError, match=f"by_hand.py:7: written: {message}"):
        verify(ir)
