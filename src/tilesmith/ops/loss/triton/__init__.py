"""Triton kernels of the loss family."""
