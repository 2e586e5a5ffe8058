"""`SharedSequence`: one sequence, or a row of packed documents, whose tokens the ranks of a group hold."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from tilesmith import ops
from tilesmith.distributed.attention import Group, context_parallel_attention, degree_of, ring_of
from tilesmith.distributed.layout import Layout, boundaries
from tilesmith.distributed.prepared import MODES
from tilesmith.engine.argument_checks import choice

IGNORED = -100  # a label that is left out


class SharedSequence:
    """A sequence sharded over ranks, as a `Decoder` and a training loop use it.

        sequence = SharedSequence(tokens.shape[1], group)
        mine = sequence.shard(labels, -100)
        loss = sequence.mean(decoder(sequence.shard(tokens), mine, sequence=sequence), mine)

    tokens: of the whole sequence. group, mode, timeout: as of `context_parallel_attention`; mode "hybrid" needs a
    DeviceMesh of two dims. cu_seqlens [N + 1]: it holds documents, which do not see each other and have positions of
    their own. layout: which rank holds what; zigzag, or documents by their work, if None. device: of `positions`.
    positions: of this rank's tokens, int64 [1, T]; 0 for padding.
    """

    def __init__(
        self,
        tokens: int,
        group: Group = None,
        *,
        cu_seqlens: Sequence[int] | Tensor | None = None,
        layout: Layout | None = None,
        mode: str = "auto",
        device: torch.device | str = "cpu",
        timeout: float = 600.0,
    ):
        self.ring, self.mode = ring_of(group, timeout), choice("SharedSequence", "mode", mode, MODES)
        self.degree = degree_of("SharedSequence", mode, group)
        if len(self.ring.ranks) != 1:
            raise ValueError("SharedSequence: group must have one rank in this process; a LocalRing has all of them")
        self.rank = self.ring.ranks[0]
        self.starts = None if cu_seqlens is None else boundaries(cu_seqlens)
        if layout is None and self.starts is not None:
            layout = Layout.balanced(self.starts, self.ring.size, tokens)
        self.layout = Layout.zigzag(tokens, self.ring.size) if layout is None else layout
        if (self.layout.tokens, self.layout.size) != (tokens, self.ring.size):
            raise ValueError(
                f"SharedSequence: layout is of {self.layout.tokens} tokens and {self.layout.size} ranks; there are "
                f"{tokens} and {self.ring.size}: make a layout of these"
            )
        places = self.layout.positions(self.rank)
        if self.starts is not None:
            begins = torch.tensor(self.starts)
            document = torch.searchsorted(begins, places, right=True).clamp(max=len(begins) - 1) - 1
            places = places - begins[document]
        with torch.inference_mode(False):  # so that a later change of them can be told
            self.positions = places[None].to(device, copy=True)
        self._last = self.positions, self.positions._version, int(places.max())

    @property
    def last_position(self) -> int:
        """The largest of `positions`. The device is asked only where they are not those that were made here."""
        made, version, last = self._last
        same = self.positions is made and made._version == version
        return last if same else int(self.positions.max())

    def shard(self, x: Tensor, fill: float = 0) -> Tensor:
        """This rank's tokens of x [B, tokens, ...]; `fill` for padding."""
        return self.layout.shard(x, self.rank, 1, fill)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, mask: ops.Mask, score: ops.Score, dropout_p: float) -> Tensor:
        """out of `context_parallel_attention`."""
        return context_parallel_attention(
            q, k, v, self.ring, mask, score, mode=self.mode, layout=self.layout, cu_seqlens=self.starts,
            dropout_p=dropout_p, degree=self.degree,
        )[0]  # fmt: skip

    def mean(self, loss: Tensor, labels: Tensor, *, gradients: str = "mean") -> Tensor:
        """The mean of a loss over all ranks' labels, from each rank's mean over its own; the same number on all.

        labels: this rank's; -100 is left out. gradients: "mean" or "sum": what over the ranks makes the whole gradient
        of a parameter (FSDP2 and DDP take the mean).
        """
        if gradients not in ("mean", "sum"):
            raise ValueError(f"SharedSequence.mean: gradients must be 'mean' or 'sum', got {gradients!r}")
        count = (labels != IGNORED).sum()
        total = torch.where(count > 0, loss.float(), 0.0) * count  # a rank may have no label, and its mean no value
        sums: Any = torch.stack((total.detach(), count.to(total.dtype)))
        if self.ring.size > 1:
            dist.all_reduce(sums, group=self.ring.group)
        share = total * (self.ring.size if gradients == "mean" else 1) / sums[1]
        return share + (sums[0] / sums[1] - share.detach())
