"""Triton kernels of the norm family."""
