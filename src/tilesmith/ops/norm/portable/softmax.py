"""Portable kernels of softmax and softmax_dropout."""

from typing import Any

import torch
from torch import Tensor

from tilesmith.device import portable
from tilesmith.device.rows import empty_rows, row_order, rows
from tilesmith.engine import register_kernel
from tilesmith.kernels.fused_ops import SoftmaxDropoutConfig, create_softmax_dropout_kernel
from tilesmith.runtime import subgroup_of


def _softmax(x: Tensor, y: Tensor, scale: float, causal: bool, extra: dict[str, Tensor], **fields: Any) -> None:
    """Fill y, contiguous [M, N], from the rows x [M, N] of matrices [T, N]; T is a field of its own, `queries`."""
    count, columns = x.shape
    queries = fields.pop("queries")
    eight = fields.get("dropout", 0.0) > 0.0 and x.element_size() == 2 and columns % 8 == 0
    threads = _threads(columns, causal) if eight else portable.threads(columns)
    fields |= {"causal": causal, "strided": True, "workgroup_size": threads}
    fields |= {"positive": 0.0 < scale <= 1e30, "subgroup": subgroup_of(x.device)}
    config = SoftmaxDropoutConfig(columns, **portable.storage(x), **fields)
    flat, [step] = portable.flat(x, config.plan.lanes)
    scalars = {"rows": count, "queries": queries, "scale": scale, "x_step": step}
    ir = create_softmax_dropout_kernel(config)
    portable.launch(ir, config.grid(count), {"x": flat, "y": y, **extra}, scalars)


def _threads(columns: int, causal: bool) -> int:
    """Threads of a workgroup where eight elements share a draw: of one row, with 32 elements each while they are kept.

    H200, f16: 256 instead of 128 took 104 % of the time at 4,096 columns, causal 111 %; instead of 512 at 16,384 105 %.
    """
    if columns > (8192 if causal else 16_384):
        return portable.threads(columns)
    return 128 if columns <= 4096 else 256 if columns <= 8192 else 512


def _reasons(call) -> list[str]:
    return portable.reasons(call, "x")


@register_kernel("softmax", backend="portable", rank=portable.RANK, rejects=_reasons)
def softmax(x: Tensor, scale: float = 1.0, causal: bool = False) -> Tensor:
    """A row stays in registers up to 16,384 columns; a wider one is read twice."""
    order = row_order(x)
    y = empty_rows(x, order)
    if x.numel() == 0:
        return y
    # which columns a row sees follows from its logical place
    among = None if causal else order
    out = y if order is among else x.new_empty(x.shape)
    _softmax(rows(x, among), rows(out, among), scale, causal, {}, queries=x.shape[-2] if causal else 1)
    return y if out is y else y.copy_(out)


@register_kernel("softmax_dropout", backend="portable", rank=portable.RANK, rejects=_reasons)
def softmax_dropout(
    x: Tensor, seed: Tensor | None = None, p: float = 0.0, scale: float = 1.0, causal: bool = False
) -> tuple[Tensor, Tensor, Tensor]:
    """As softmax; up to four elements of 32 bits share a draw, up to eight of 16. The kernel is built for one p."""
    out = x.new_empty(x.shape)
    top, total = (x.new_empty(x.shape[:-1], dtype=torch.float32) for _ in range(2))
    if x.numel() == 0:
        return out, top, total
    queries = x.shape[-2] if causal else 1
    extra = {"top": top, "total": total} | ({"seed": seed.contiguous()} if p > 0.0 else {})
    _softmax(rows(x), out, scale, causal, extra, queries=queries, dropout=float(p), statistics=True)
    if causal and queries > x.shape[-1]:
        top.masked_fill_(total == 0, float("-inf"))  # rows that see nothing
    return out, top, total
