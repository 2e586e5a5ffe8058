"""Triton kernels of the attention family."""
