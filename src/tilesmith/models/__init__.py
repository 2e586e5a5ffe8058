"""Whole models: `optimize` puts the library's ops into a model that is already there, and `undo` takes them out.

`register_for_transformers` and `register_for_sdpa` offer its attention under a name that a model or PyTorch may choose.
`shard_sequence` lets several ranks share the sequences of a transformers model, `fit_sequence` makes a long one fit one
device.
"""

from tilesmith._lazy import lazy_names

_HOMES = {
    "fit_sequence": "tilesmith.models.sizing.sequence_plan",
    "model_sharding": "tilesmith.models.sequence",
    "optimize": "tilesmith.models.optimization",
    "register_for_sdpa": "tilesmith.models.attention.sdpa",
    "register_for_transformers": "tilesmith.models.registration",
    "report": "tilesmith.models.optimization",
    "shard_sequence": "tilesmith.models.sequence",
    "undo": "tilesmith.models.optimization",
}

__all__ = sorted(_HOMES)
__getattr__, __dir__ = lazy_names(globals(), _HOMES)
