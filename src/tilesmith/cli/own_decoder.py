"""The library's own decoder behind the calling convention of Hugging Face models, for machines without transformers."""

from __future__ import annotations

import contextlib
from types import SimpleNamespace
from typing import Any

from torch import Tensor, nn
from torch.nn import functional as F

from tilesmith.engine import ops, use
from tilesmith.engine.backends import REFERENCE
from tilesmith.nn import Decoder, DecoderConfig


class OwnLlama(nn.Module):
    """A `Decoder` that takes `input_ids` and `labels` and returns an object with `loss` or `logits`.

    plain: run every op's reference, which is plain PyTorch, instead of its kernels.
    """

    def __init__(self, config: DecoderConfig, plain: bool):
        super().__init__()
        self.decoder = Decoder(config)
        self.plain = plain

    def forward(
        self, input_ids: Tensor, labels: Tensor | None = None, cache: Any = None, use_cache: bool = False
    ) -> SimpleNamespace:
        """With `labels`, each token's label being itself, the loss of predicting the next one; else the logits."""
        if use_cache and cache is None:
            cache = self.decoder.new_cache(len(input_ids))
        with use(**dict.fromkeys(ops(), REFERENCE)) if self.plain else contextlib.nullcontext():
            if labels is None:
                return SimpleNamespace(logits=self.decoder(input_ids, cache=cache), cache=cache)
            following = F.pad(labels[:, 1:], (0, 1), value=-100)
            return SimpleNamespace(loss=self.decoder(input_ids, following))
