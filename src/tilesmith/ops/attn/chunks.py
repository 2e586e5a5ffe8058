"""Attention by chunks of queries, for devices where no tiled kernel serves and scores would be whole in memory."""

import torch
from torch import Tensor

from tilesmith.engine.memory import Need, active, held, rows_in_budget
from tilesmith.ops.attn.mask import Mask, Score
from tilesmith.ops.attn.op import attention

BUDGET = 256 * 2**20
TILED = ("cuda", "xpu")  # devices whose kernels keep scores in registers
COPIES = 8  # of the scores, in fp32, that the reference and its gradient hold at a time


def attention_in_chunks(
    q: Tensor, k: Tensor, v: Tensor, scale: float | None = None, causal: bool = False, dropout_p: float = 0.0
) -> Tensor:
    """`out` of `attention`, from as many calls as memory asks for: one on a GPU; elsewhere chunks of queries whose
    scores take at most 256 MiB, or what the `MemoryConfig` says that is entered. q, k, v as for `attention`."""
    name = "memory_efficient_attention"
    need, bounds = attention_need(q, k, v), active()
    if bounds is not None:
        rows = rows_in_budget(name, need, bounds)
    else:
        rows = max(1, min(q.shape[2], BUDGET // need.row)) if need.row else q.shape[2]
    score, tokens, keys = Score(scale=scale), q.shape[2], k.shape[2]
    if rows >= tokens:
        return attention(q, k, v, Mask(causal=causal), score, dropout_p=dropout_p)[0]
    outs = []
    for first in range(0, tokens, rows):
        last = min(first + rows, tokens)
        # the last query of a chunk sees the last key that is left, as bottom-right alignment wants it
        seen = min(keys, max(0, last + keys - tokens)) if causal else keys
        part = slice(first, last)
        mask = Mask(causal=causal and last + keys - tokens > 0)
        outs.append(attention(q[:, :, part], k[:, :, :seen], v[:, :, :seen], mask, score, dropout_p=dropout_p)[0])
    return torch.cat([out.transpose(1, 2) for out in outs], 1).transpose(1, 2)


def attention_need(q: Tensor, k: Tensor, v: Tensor) -> Need:
    """The need of a call with its backward, if autograd will ask for one: out, lse and, where a value's last stride is
    not 1, its copy; for the backward dout, two fp32 numbers a row, dq, dk and dv. Where no tiled kernel serves, a chunk
    of queries takes its scores 8 times over in fp32, and k and v once for each query head."""
    batch, heads, tokens, _ = q.shape
    rows = batch * heads * tokens
    fixed = rows * v.shape[3] * q.element_size() + 4 * rows
    fixed += sum(held(x) for x in (q, k, v) if x.stride(-1) != 1)
    if torch.is_grad_enabled() and any(x.requires_grad for x in (q, k, v)):
        fixed += rows * v.shape[3] * q.element_size() + 8 * rows + sum(held(x) for x in (q, k, v) if x.requires_grad)
    if q.device.type in TILED:
        return Need(tokens, fixed, fixed)
    fixed += 4 * batch * heads * k.shape[2] * (k.shape[3] + v.shape[3])
    row = 4 * COPIES * batch * heads * k.shape[2]
    return Need(tokens, fixed + tokens * row, fixed, row)
