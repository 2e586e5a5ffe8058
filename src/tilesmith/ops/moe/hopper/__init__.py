"""Hopper kernels of the moe family, in Gluon: the products of experts and the gradients of their weights."""
