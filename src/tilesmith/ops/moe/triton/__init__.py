"""Triton kernels of the moe family."""
