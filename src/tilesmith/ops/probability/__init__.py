"""Probabilities: softmax of the last dim, alone or with the dropout that follows it in attention."""

from tilesmith.ops.probability.op import softmax, softmax_dropout

__all__ = ["softmax", "softmax_dropout"]
