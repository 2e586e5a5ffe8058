"""Triton kernels of the elementwise family."""
