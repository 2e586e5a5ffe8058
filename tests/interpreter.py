"""Triton's interpreter (3.6 to 3.8) for tests: one fault of it mended, and what takes most of its time said once.

Nothing here changes what a kernel computes: the same operations in the same order, except the rounding that is mended.
"""

import os

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
    _round_to_8_bits(interpreter, tl)
    _keep_dtypes(interpreter)
    interpreter_fast.install(interpreter, tl)
    interpreter.ReduceOps.generic_reduce = _reduce


def _round_to_8_bits(interpreter, tl) -> None:
    """It rounds fp32 to e4m3 with the carry into the exponent lost: 31 becomes 16, not 32; and to e5m2 ties upwards."""
    convert = interpreter._convert_float
    kinds = {tl.float8e4nv: torch.float8_e4m3fn, tl.float8e5: torch.float8_e5m2}

    def rounded(values, from_dtype, to_dtype, mode):
        if from_dtype is not tl.float32 or to_dtype not in kinds:
            return convert(values, from_dtype, to_dtype, mode)
        exact = torch.frombuffer(bytearray(values.tobytes()), dtype=torch.float32).view(values.shape)
        return exact.to(kinds[to_dtype]).view(torch.uint8).numpy()

    interpreter._convert_float = rounded


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
