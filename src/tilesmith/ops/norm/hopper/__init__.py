"""Hopper kernels of the norm family, in Gluon."""
