"""Attention by chunks of queries, for devices where no tiled kernel serves and scores would be whole in memory."""

import torch
from torch import Tensor

from tilesmith.engine.memory import TILED, Need, active, held, rows_in_budget
from tilesmith.ops.attn.mask import Mask, Score
from tilesmith.ops.attn.op import attention

BUDGET = 256 * 2**20
COPIES = 6  # of the scores, in fp32 or wider, that the reference and its gradient hold at a time
DROPPED = 3  # more with dropout, whose random bits are made as integers


def attention_in_chunks(
    q: Tensor, k: Tensor, v: Tensor, scale: float | None = None, causal: bool = False, dropout_p: float = 0.0
) -> Tensor:
    """`out` of `attention`, from as many calls as memory asks for: one on a GPU; elsewhere chunks of queries whose
    scores take at most 256 MiB, or what the `MemoryConfig` says that is entered. q, k, v as for `attention`."""
    name = "memory_efficient_attention"
    need, bounds = attention_need(q, k, v, dropout_p), active()
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


def attention_need(q: Tensor, k: Tensor, v: Tensor, dropout_p: float = 0.0) -> Need:
    """The need of a call with its backward, if autograd will ask for one: out, lse and, where a value's last stride is
    not 1, its copy; for the backward dout, two fp32 numbers a row, dq, dk and dv. Where no tiled kernel serves, a chunk
    of queries takes its scores 6 times over in fp32 (fp64 for fp64), 9 times with dropout, its query twice, and k and
    v twice for each query head. The chunks' outputs stand beside the whole one, and their gradients beside the sums of
    these."""
    batch, heads, tokens, _ = q.shape
    rows = batch * heads * tokens
    wide = torch.promote_types(q.dtype, torch.float32).itemsize
    out = rows * v.shape[3] * q.element_size()
    fixed = out + wide * rows
    fixed += sum(held(x) for x in (q, k, v) if x.stride(-1) != 1)
    gradients = 0
    if torch.is_grad_enabled() and any(x.requires_grad for x in (q, k, v)):
        gradients = sum(held(x) for x in (q, k, v) if x.requires_grad)
        fixed += out + 2 * wide * rows + gradients
    if q.device.type in TILED:
        return Need(tokens, fixed, fixed)
    fixed += 2 * wide * batch * heads * k.shape[2] * (k.shape[3] + v.shape[3])
    copies = COPIES + (DROPPED if dropout_p > 0.0 else 0)
    row = wide * batch * heads * (copies * k.shape[2] + 2 * (q.shape[3] + v.shape[3]))
    return Need(tokens, fixed + tokens * row, fixed + out + 2 * gradients, row)
