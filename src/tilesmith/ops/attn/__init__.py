"""Attention: one op, its masks and scores, and the merge of partial results."""

from tilesmith.ops.attn.mask import Blocks, Mask, Score
from tilesmith.ops.attn.op import attention, attention_op, attention_vjp, merge_attention

__all__ = ["Blocks", "Mask", "Score", "attention", "attention_op", "attention_vjp", "merge_attention"]
