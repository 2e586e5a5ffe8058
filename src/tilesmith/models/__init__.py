"""Whole models: `optimize` puts the library's ops into a model that is already there, and `undo` takes them out.

`register_for_transformers` and `register_for_sdpa` offer its attention under a name that a model or PyTorch may choose.
"""

from tilesmith.models.attention import register_for_transformers
from tilesmith.models.optimization import optimize, undo
from tilesmith.models.sdpa import register_for_sdpa

__all__ = ["optimize", "register_for_sdpa", "register_for_transformers", "undo"]
