"""Losses: cross-entropy of logits, and of a linear layer whose logits never exist whole."""

from tilesmith.ops.loss.op import cross_entropy, cross_entropy_vjp, linear_cross_entropy, linear_cross_entropy_vjp

__all__ = ["cross_entropy", "cross_entropy_vjp", "linear_cross_entropy", "linear_cross_entropy_vjp"]
