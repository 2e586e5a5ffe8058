"""The key/value cache of a decoder: static memory, and how much of it each row has filled."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from tilesmith.engine.argument_checks import size


@dataclass(frozen=True)
class KVCache:
    """Keys and values of every layer.

    keys, values: [layers, B, G, S, D]. lengths: [B] int32, tokens that every layer holds of each row. All are changed
    in place and keep their addresses, so that a CUDA graph can be replayed over them. On a GPU nothing checks that
    lengths leave room for new tokens, since that would wait for the device: beyond the slots outputs are wrong.
    `generate` refuses such calls up front, `Decoder` those that it can detect (see its `hidden_states`).
    """

    keys: Tensor
    values: Tensor
    lengths: Tensor

    @classmethod
    def empty(
        cls,
        num_layers: int,
        batch: int,
        num_kv_heads: int,
        slots: int,
        head_dim: int,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> KVCache:
        """An empty cache. Its slots are not initialised; slots beyond lengths are never read."""
        sizes = {"num_layers": num_layers, "batch": batch, "num_kv_heads": num_kv_heads, "slots": slots}
        for name, value in {**sizes, "head_dim": head_dim}.items():
            size("KVCache", name, value, 0)
        shape = (num_layers, batch, num_kv_heads, slots, head_dim)
        return cls(
            torch.empty(shape, device=device, dtype=dtype),
            torch.empty(shape, device=device, dtype=dtype),
            torch.zeros(batch, dtype=torch.int32, device=device),
        )

    @property
    def slots(self) -> int:
        """Tokens that a row can hold."""
        return self.keys.shape[3]

    def reset(self) -> None:
        """Forget everything."""
        self.lengths.zero_()
