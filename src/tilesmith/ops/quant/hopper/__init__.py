"""Kernels of quantisation for NVIDIA's compute capability 9.0, in Gluon."""
