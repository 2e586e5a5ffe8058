"""Hopper kernels of the rotary family, in Gluon."""
