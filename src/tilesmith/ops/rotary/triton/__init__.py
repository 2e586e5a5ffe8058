"""Triton kernels of the rotary family."""
