"""column_sums: what it is, what it accepts, its kernel. Legend: F features, the last dim; the other dims are rows."""

from torch import Tensor

from tilesmith.engine import Op
from tilesmith.ops.gemm import sums_reference as reference

KERNELS = {"triton": "tilesmith.ops.gemm.triton.sums"}


def _fake(x: Tensor, dtype: str) -> Tensor:
    return x.new_empty(x.shape[-1], dtype=reference.DTYPES[dtype] if dtype else x.dtype)


def _check(x: Tensor, dtype: str) -> None:
    served = ", ".join(reference.DTYPES)
    if x.dtype not in reference.DTYPES.values():
        raise TypeError(f"column_sums: x has dtype {x.dtype}; {served} are supported")
    if x.ndim == 0:
        raise ValueError("column_sums: x has no dims; it must be [..., F]")
    listed = ", ".join(map(repr, reference.DTYPES))
    if dtype and dtype not in reference.DTYPES:
        raise ValueError(f"column_sums: dtype is {dtype!r}; it must be '' (that of x) or one of {listed}")


# Without a vjp: its gradient is that of the reference, every row the same.
column_sums = Op(
    reference.column_sums,
    fake=_fake,
    outputs=("out",),
    check=_check,
    kernels=KERNELS,
    sharding="*n -> n(*)",
)
