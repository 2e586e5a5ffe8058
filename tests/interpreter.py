"""Triton's interpreter (3.6 to 3.8) for tests: its roundings mended, and what takes most of its time said once.

Nothing here changes what a kernel computes: the same operations in the same order, except the rounding that is mended.
"""

import os

import numpy as np
import torch

import interpreter_fast


def mend() -> None:
    """Change the interpreter, if this process uses it."""
    if os.environ.get("TRITON_INTERPRET") != "1":
        return
    try:
        import triton.language as tl
        from triton.runtime import interpreter
    except ImportError:
        return
    _round_to_nearest(interpreter, tl)
    _round_once(interpreter)
    _keep_dtypes(interpreter)
    interpreter_fast.install(interpreter, tl)
    interpreter.ReduceOps.generic_reduce = _reduce


def _round_to_nearest(interpreter, tl) -> None:
    """It rounds fp32 to e4m3 with the carry into the exponent lost: 31 becomes 16, not 32; to e5m2 ties upwards; and to
    bf16 towards 0, where a GPU rounds to the nearest."""
    convert = interpreter._convert_float
    kinds = {
        tl.float8e4nv: (torch.float8_e4m3fn, torch.uint8),
        tl.float8e5: (torch.float8_e5m2, torch.uint8),
        tl.bfloat16: (torch.bfloat16, torch.int16),
    }

    def rounded(values, from_dtype, to_dtype, mode):
        if from_dtype is not tl.float32 or to_dtype not in kinds or not values.size:
            return convert(values, from_dtype, to_dtype, mode)
        exact = torch.frombuffer(bytearray(values.tobytes()), dtype=torch.float32).view(values.shape)
        kind, bits = kinds[to_dtype]
        return exact.to(kind).view(bits).numpy().view(f"uint{8 * kind.itemsize}")

    interpreter._convert_float = rounded


def _round_once(interpreter) -> None:
    """It leaves fp32 products to numpy's BLAS, which adds up in an order that depends on the CPU, and exponentials and
    logarithms to numpy, which are off by up to 3 units in the last place on CPUs with AVX-512. By either, gradients
    were off by 17 % more than their budgets on one make of CPU and within them on others. In fp64, rounded once, what
    is tested is the kernel; how a GPU's own products and functions round is tested on GPUs."""
    builder = interpreter.interpreter_builder.__class__
    create_dot, unary = builder.create_dot, builder.unary_op

    def dot(self, a, b, d, input_precision, max_num_imprecise_acc):
        if not a.data.dtype == b.data.dtype == d.data.dtype == np.float32:
            return create_dot(self, a, b, d, input_precision, max_num_imprecise_acc)
        product = np.matmul(a.data, b.data, dtype=np.float64).astype(np.float32)
        return interpreter.TensorHandle(product + d.data, d.dtype.scalar)

    def function(self, arg, op):
        if op not in _INEXACT or arg.data.dtype != np.float32:
            return unary(self, arg, op)
        return interpreter.TensorHandle(op(arg.data.astype(np.float64)).astype(np.float32), arg.dtype.scalar)

    builder.create_dot, builder.unary_op = dot, function


_INEXACT = (np.exp, np.exp2, np.log, np.log2, np.sin, np.cos)


def _keep_dtypes(interpreter) -> None:
    """It builds the table from its dtypes to numpy's for every value."""
    look_up, known = interpreter._get_np_dtype, {}

    def dtype_of(kind):
        name = kind.scalar.name
        found = known.get(name)
        if found is None:
            found = known[name] = look_up(kind)
        return found

    interpreter._get_np_dtype = dtype_of


def _reduce(self, values):
    """A reduction by a function of the kernel's: along the axis in order, over the other dims at once. The interpreter
    goes from element to element."""
    values, axis = self.unravel(values, self.axis)
    data = [value.handle.data for value in values]

    def at(place):
        return tuple(self.to_tensor(d.take(place, axis), value.dtype) for d, value in zip(data, values))

    total = at(0)
    for place in range(1, data[0].shape[axis]):
        made = self.combine_fn.fn(*total, *at(place))
        total = made if isinstance(made, tuple) else (made,)
    found = []
    for value, whole in zip(values, total):
        out = whole.handle.data.reshape(data[0].shape[:axis] + data[0].shape[axis + 1 :])
        if self.keep_dims:
            out = (
                out.reshape([1] * data[0].ndim)
                if self.axis is None
                else out.reshape((*data[0].shape[:axis], 1, *data[0].shape[axis + 1 :]))
            )
        elif self.axis is None:
            out = out.item()
        found.append(self.to_tensor(out, value.dtype))
    return found
