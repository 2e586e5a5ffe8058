"""Attention of whole models: how they ask for it, what their masks mean, and where the op takes its place."""
