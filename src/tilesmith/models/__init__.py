"""Whole models: `optimize` puts the library's ops into a model that is already there, and `undo` takes them out.

`register_for_transformers` and `register_for_sdpa` offer its attention under a name that a model or PyTorch may choose.
`shard_sequence` lets several ranks share the sequences of a transformers model.
"""

from tilesmith.models.attention import register_for_transformers
from tilesmith.models.optimization import optimize, report, undo
from tilesmith.models.sdpa import register_for_sdpa
from tilesmith.models.sequence import model_sharding, shard_sequence

__all__ = [
    "model_sharding",
    "optimize",
    "register_for_sdpa",
    "register_for_transformers",
    "report",
    "shard_sequence",
    "undo",
]
