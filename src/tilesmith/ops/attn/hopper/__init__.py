"""Hopper kernels of the attention family, in Gluon."""
