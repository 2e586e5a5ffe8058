"""Adaptive precision: weights packed in 2 to 8 bits, more of them where the loss notices it."""
