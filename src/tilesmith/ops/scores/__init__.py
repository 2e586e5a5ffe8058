"""Scores: what attention computes on the way and does not keep: its weights, the maximum and the sum of its rows."""

from tilesmith.ops.scores.op import attention_stats, attention_weights, attention_weights_vjp

__all__ = ["attention_stats", "attention_weights", "attention_weights_vjp"]
