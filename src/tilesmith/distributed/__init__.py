"""Attention over sequences that several devices hold: context parallelism over torch.distributed or in one process.
Experts that several ranks hold.

Legend: B batch, T tokens of a rank, S tokens of the sequence, H query heads, G kv heads (H % G == 0), D head dim, P
ranks.
"""

from __future__ import annotations

from tilesmith._lazy import lazy_names

_HOMES = {
    "context_parallel_attention": "tilesmith.distributed.attention",
    "expert_parallel": "tilesmith.distributed.experts",
    "explain_context_parallel": "tilesmith.distributed.explanation",
    "ring_of": "tilesmith.distributed.attention",
    "Decision": "tilesmith.distributed.cost",
    "Estimate": "tilesmith.distributed.cost",
    "Link": "tilesmith.distributed.cost",
    "Machine": "tilesmith.distributed.cost",
    "Layout": "tilesmith.distributed.layout",
    "LocalRing": "tilesmith.distributed.ring",
    "ProcessGroupRing": "tilesmith.distributed.ring",
    "Ring": "tilesmith.distributed.protocol",
    "RingError": "tilesmith.distributed.lost",
    "SharedSequence": "tilesmith.distributed.sequence",
}
__all__ = list(_HOMES)
__getattr__, __dir__ = lazy_names(globals(), _HOMES)
