"""How rows of logits lie in memory.

On an accelerator they start at multiples of 16 bytes, and products make and read them with columns of zeros up to
there. Else cuBLAS reads element by element, in kernels of an older architecture, also where a row's length alone is
odd: with GPT-2's 50,257 classes the three products of a loss took 21 of the 57.6 ms of a step (H200).
"""

import torch
from torch import Tensor
from torch.nn.functional import pad

ALIGNED = 16  # bytes


def row_pitch(classes: int, dtype: torch.dtype, device: torch.device) -> int:
    """Elements from one row of logits to the next."""
    unit = _unit(dtype, device)
    return -(-classes // unit) * unit


def _unit(dtype: torch.dtype, device: torch.device) -> int:
    return 1 if device.type == "cpu" else ALIGNED // dtype.itemsize


def rows_in(buffer: Tensor, rows: int, classes: int) -> Tensor:
    """`rows` rows of logits in a flat buffer, a `row_pitch` apart and so wide: [rows, pitch]."""
    pitch = row_pitch(classes, buffer.dtype, buffer.device)
    return buffer[: rows * pitch].view(rows, pitch)


def padded(weight: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """weight [V, K] and bias [V] of logits with as many rows of zeros behind them as rows of logits are wider than V.
    weight has the dtype of the logits."""
    more = row_pitch(weight.shape[0], weight.dtype, weight.device) - weight.shape[0]
    if not more:
        return weight, bias
    return pad(weight, (0, 0, 0, more)), None if bias is None else pad(bias, (0, more))


def whole_rows(logits: Tensor) -> Tensor:
    """The rows [N, pitch] whose first columns are `logits` [N, V], as `rows_in` has them; `logits` itself where it lies
    otherwise."""
    pitch = row_pitch(logits.shape[1], logits.dtype, logits.device)
    end = logits.storage_offset() + logits.shape[0] * pitch
    if logits.stride() != (pitch, 1) or end * logits.element_size() > logits.untyped_storage().nbytes():
        return logits
    return logits.as_strided((logits.shape[0], pitch), (pitch, 1))


def empty_rows(like: Tensor, shape: torch.Size | tuple[int, ...], classes: int) -> Tensor:
    """Uninitialised [*shape, classes], rows a `row_pitch` apart, of the dtype and on the device of `like`."""
    return like.new_empty((*shape, row_pitch(classes, like.dtype, like.device))).narrow(-1, 0, classes)


def pitched(rows: Tensor) -> Tensor:
    """The same values [..., V], rows a `row_pitch` apart."""
    classes = rows.shape[-1]
    if row_pitch(classes, rows.dtype, rows.device) == classes:
        return rows
    return empty_rows(rows, rows.shape[:-1], classes).copy_(rows)
