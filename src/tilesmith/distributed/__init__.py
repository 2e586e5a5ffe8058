"""Attention over sequences that several devices hold: context parallelism over torch.distributed or in one process.
Experts that several ranks hold.

Legend: B batch, T tokens of a rank, S tokens of the sequence, H query heads, G kv heads (H % G == 0), D head dim, P
ranks.
"""

from __future__ import annotations

from tilesmith._lazy import absent, resolved

_HOMES = {
    "context_parallel_attention": "tilesmith.distributed.attention",
    "expert_parallel": "tilesmith.distributed.experts",
    "explain_context_parallel": "tilesmith.distributed.attention",
    "ring_of": "tilesmith.distributed.attention",
    "Decision": "tilesmith.distributed.cost",
    "Estimate": "tilesmith.distributed.cost",
    "Link": "tilesmith.distributed.cost",
    "Machine": "tilesmith.distributed.cost",
    "Layout": "tilesmith.distributed.layout",
    "LocalRing": "tilesmith.distributed.ring",
    "ProcessGroupRing": "tilesmith.distributed.ring",
    "Ring": "tilesmith.distributed.ring",
    "RingError": "tilesmith.distributed.ring",
    "SharedSequence": "tilesmith.distributed.sequence",
}
__all__ = list(_HOMES)


def __getattr__(name: str):
    if name not in _HOMES:
        raise absent(__name__, name, __all__)
    value = resolved(_HOMES[name], name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
