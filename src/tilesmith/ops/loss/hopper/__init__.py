"""Hopper kernels of the loss family, in Gluon."""
