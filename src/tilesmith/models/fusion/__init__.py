"""Fusion of blocks by strategy and level, and the products of several layers as one."""
