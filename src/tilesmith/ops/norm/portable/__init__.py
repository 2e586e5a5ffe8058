"""Portable kernels of the norm family."""
