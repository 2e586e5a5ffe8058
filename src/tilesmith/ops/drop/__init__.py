"""Dropout of a biased tensor, alone or added to a residual stream."""

from tilesmith.ops.drop.op import bias_dropout, bias_dropout_residual

__all__ = ["bias_dropout", "bias_dropout_residual"]
