"""Attention on 8-bit queries, keys and values for whatever kernel reads them in 16 bits."""

from torch import Tensor

from tilesmith.engine import register_kernel
from tilesmith.ops.attn import reference
from tilesmith.ops.attn.arguments import attention_arguments
from tilesmith.ops.attn.op import attention_op


def _reasons(call) -> list[str]:
    reasons = []
    if call.q.dtype.itemsize != 1:
        reasons.append(f"q is {call.q.dtype}; beside it k and v with their factors do not fit in 16 bits")
    if call.page_table is not None:
        reasons.append("page_table: pages that no query reads would be dequantised as well")
    return reasons


@register_kernel("attention", backend="dequantised", rank=5, rejects=_reasons)
@attention_arguments
def attention(call) -> tuple[Tensor, Tensor]:
    """Values times their factors in the dtype of `out`, exactly where those are powers of two; then whichever kernel
    serves that dtype."""
    like = reference.out_like(call.q, call.v.shape[3])
    q, k, v = (
        x if factor is None else reference.widened(x, factor, reference.out_like(x, x.shape[3]))
        for x, factor in ((call.q, call.q_scale), (call.k, call.k_scale), (call.v, call.v_scale))
    )
    out, lse = attention_op.run(call._replace(q=q, k=k, v=v, q_scale=None, k_scale=None, v_scale=None))
    # the stride of a dim of size 1 may say another memory order of the widened q
    return (out if out.stride() == like.stride() else like.copy_(out)), lse
