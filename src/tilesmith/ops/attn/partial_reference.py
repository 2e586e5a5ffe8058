"""Partial results of attention in plain PyTorch: over some of the keys, in fp32, and one added to another in place."""

import torch
from torch import Tensor

from tilesmith.ops.attn import reference
from tilesmith.ops.attn.arguments import attention_arguments


@attention_arguments
def attention_partial(call) -> tuple[Tensor, Tensor]:
    """`attention` over a subset of the keys with an unrounded out: fp32 where q, k and v have 16 bits.

    It takes the arguments of `ops.attn.reference.attention`, except 8-bit values. Results of other keys are added by
    `accumulate_attention`; the sum is rounded when it is complete.

    Returns out [B, H, T, Dv], at least fp32, in the memory order of attention's, and lse [B, H, T]. Raises ValueError
    or TypeError as attention does, and TypeError for 8-bit values.
    """
    wide = torch.promote_types(call.q.dtype, torch.float32)
    q, k, v = (x.to(wide) for x in (call.q, call.k, call.v))
    return reference.attention(*call._replace(q=q, k=k, v=v))


def eps_of_values(call) -> dict[str, float]:
    """The eps that errors of `out` have by a kernel: probabilities are rounded to the dtype of the values they meet."""
    return {"out": torch.finfo(call.v.dtype).eps}


def accumulate_attention(out_a: Tensor, lse_a: Tensor, out_b: Tensor, lse_b: Tensor) -> Tensor:
    """`merge_attention` in place: out_a becomes attention over both sets of keys, whose lse is returned.

    out_a [..., Dv], written; out_b of its shape, of any floating dtype; lse_a, lse_b [...] fp32 (fp64 for fp64).
    Entries whose lse is -inf are ignored on either side, whatever out holds: out_a need not be initialised where lse_a
    is -inf.

    Returns lse [...], contiguous; computed in fp32. Raises ValueError or TypeError for shapes, dtypes and devices that
    do not fit, for memory that out_a shares with itself, and for tensors that require a gradient.
    """
    out, lse = reference.merge_attention(out_a, lse_a, out_b, lse_b)
    out_a.copy_(out)
    return lse
