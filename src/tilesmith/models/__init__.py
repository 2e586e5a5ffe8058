"""Whole models: `optimize` puts the library's ops into a model that is already there, and `undo` takes them out."""

from tilesmith.models.optimization import optimize, undo

__all__ = ["optimize", "undo"]
