"""Triton kernels of the gemm family."""
