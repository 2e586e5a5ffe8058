"""memory_efficient_linear by chunks of rows: what is computed again, what is summed, what it holds in memory."""

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from tilesmith.ops.gemm.products import activated_product, add_weight_gradient, product
from tilesmith.ops.gemm.reference import flat

ACCELERATOR_BUDGET = 256 * 2**20
CPU_BUDGET = 16 * 2**20
FEWEST_ROWS = 1024  # thinner products are bound by reading weight


class ActivationSteps(NamedTuple):
    """What a backend does to one chunk of rows [C, N].

    forward(z, activation): overwrites pre-activations with activations.
    backward(dy, z, activation, sums): (dz, its column sums in fp32 or None); dz may take z's memory.
    """

    forward: Callable[[Tensor, str], None]
    backward: Callable[[Tensor, Tensor, str, bool], tuple[Tensor, Tensor | None]]


def rows_per_chunk(rows: int, outputs: int, itemsize: int, on_cpu: bool) -> int:
    """How many rows' pre-activations are in memory at a time, where the caller does not say.

    All of them if they take no more than a budget (256 MiB; 16 MiB on a CPU), else equal chunks of at most the budget,
    or 1024 rows if that is more.
    """
    most = max((CPU_BUDGET if on_cpu else ACCELERATOR_BUDGET) // max(1, outputs * itemsize), FEWEST_ROWS)
    if most >= rows:
        return max(1, rows)
    chunks = -(-rows // most)
    even = -(-rows // chunks)
    rounded = -(-even // 128) * 128
    return rounded if rounded <= most else even


def forward(
    steps: ActivationSteps, x: Tensor, weight: Tensor, bias: Tensor | None, activation: str, chunk_rows: int
) -> Tensor:
    """y of memory_efficient_linear; products are written into y and activated there."""
    y = x.new_empty((*x.shape[:-1], weight.shape[0]))
    weight, bias = _cast(x, weight, bias)
    rows, out = flat(x), flat(y)
    for chunk in _chunks(out, activation, chunk_rows):
        if activated_product(rows[chunk], weight, bias, activation, out=out[chunk]) is None:
            product(rows[chunk], weight, bias, out=out[chunk])
            if activation != "none":
                steps.forward(out[chunk], activation)
    return y


def backward(
    steps: ActivationSteps,
    dy: Tensor,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    activation: str,
    chunk_rows: int,
    output_mask: Sequence[bool],
) -> tuple[Tensor, Tensor, Tensor]:
    """(dx, dweight, dbias) of memory_efficient_linear."""
    acc = torch.promote_types(x.dtype, torch.float32)
    dx = x.new_empty(x.shape if output_mask[0] else 0)
    dweight = weight.new_empty(weight.shape if output_mask[1] else 0)
    dbias = x.new_zeros(weight.shape[0] if output_mask[2] else 0, dtype=acc)
    w, b = _cast(x, weight, bias)
    rows, dy = flat(x), flat(dy)
    chunks = list(_chunks(dy, activation, chunk_rows))
    total = dweight
    if output_mask[1] and (dweight.dtype != acc and (len(chunks) > 1 or dweight.dtype != x.dtype)):
        total = dweight.new_empty(dweight.shape, dtype=acc)
    if not chunks:
        total.zero_()
    for chunk in chunks:
        dz, sums = dy[chunk], None
        if activation != "none":
            dz, sums = steps.backward(dz, product(rows[chunk], w, b), activation, output_mask[2])
        if output_mask[0]:
            torch.mm(dz, w, out=flat(dx)[chunk])
        if output_mask[1]:
            add_weight_gradient(total, dz, rows[chunk], first=chunk.start == 0)
        if output_mask[2]:
            dbias += dz.sum(0, dtype=acc) if sums is None else sums
        del dz
    dbias = dbias if bias is None else dbias.to(bias.dtype)
    return dx, dweight if total is dweight else dweight.copy_(total), dbias


def _cast(x: Tensor, weight: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor | None]:
    return weight.to(x.dtype), None if bias is None else bias.to(x.dtype)


def _chunk_size(rows: int, outputs: int, itemsize: int, device: torch.device, activation: str, chunk_rows: int) -> int:
    """Rows of a chunk. Without an activation nothing is recomputed, so one chunk has them all."""
    if chunk_rows or activation == "none":
        return chunk_rows or rows
    return rows_per_chunk(rows, outputs, itemsize, device.type == "cpu")


def chunk_tells(x: Tensor, weight: Tensor, activation: str, chunk_rows: int) -> list[str]:
    """What `explain` says of the chunks of a call of `memory_efficient_linear` or its backward."""
    rows = flat(x).shape[0]
    size = max(1, _chunk_size(rows, weight.shape[0], x.element_size(), x.device, activation, chunk_rows))
    return [f"{-(-rows // size)} chunk(s) of up to {size} rows: their pre-activations are in memory at a time"]


def _chunks(out: Tensor, activation: str, chunk_rows: int) -> Iterator[slice]:
    rows, size = out.shape[0], _chunk_size(*out.shape, out.element_size(), out.device, activation, chunk_rows)
    return (slice(start, min(start + size, rows)) for start in range(0, rows, max(1, size)))
