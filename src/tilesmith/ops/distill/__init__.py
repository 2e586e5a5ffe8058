"""Distances between distributions over classes, of log-probabilities and straight from hidden states."""
