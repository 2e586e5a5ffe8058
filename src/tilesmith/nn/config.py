"""KernelConfig: the sizes and dropout rates of a model, from which its layers are built."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from tilesmith.engine.argument_checks import probability, size, suggesting

if TYPE_CHECKING:
    from tilesmith.nn.decoder import DecoderConfig


@suggesting
@dataclass(frozen=True)
class KernelConfig:
    """Sizes and dropout rates that models share; `decoder_config` turns them into the configuration of an `nn.Decoder`.

    max_sequence_length: positions that `nn.RotaryEmbedding` has tables for and slots of `Decoder.new_cache`;
        `Decoder.forward` raises ValueError for a longer sequence.
    num_attention_heads: query heads of `nn.Attention`; its head dim is hidden_size / num_attention_heads.
    hidden_size: features of the residual stream: `torch.nn.Embedding`, `nn.RMSNorm`, `nn.Attention`, `nn.GatedMLP`.
    intermediate_size: features between the projections of `nn.GatedMLP`.
    attention_dropout_prob: probability with which `nn.Attention` drops an attention weight in training.
    hidden_dropout_prob: probability with which `nn.DecoderBlock` drops an element of what attention and MLP add to the
        residual stream, in training.

    Raises ValueError for sizes below 1, heads that do not divide hidden_size, probabilities outside [0, 1).
    """

    max_sequence_length: int = 2048
    num_attention_heads: int = 32
    hidden_size: int = 1024
    intermediate_size: int = 4096
    attention_dropout_prob: float = 0.1
    hidden_dropout_prob: float = 0.1

    def __post_init__(self):
        for name in ("max_sequence_length", "num_attention_heads", "hidden_size", "intermediate_size"):
            size("KernelConfig", name, getattr(self, name))
        if self.hidden_size % self.num_attention_heads:
            raise ValueError(
                f"KernelConfig: num_attention_heads is {self.num_attention_heads}, which does not divide hidden_size, "
                f"{self.hidden_size}; choose a divisor"
            )
        for name in ("attention_dropout_prob", "hidden_dropout_prob"):
            probability("KernelConfig", name, getattr(self, name))

    def decoder_config(self, vocab_size: int, num_layers: int, **options: Any) -> DecoderConfig:
        """The `DecoderConfig` of a decoder with these sizes and rates. options: its other fields."""
        from tilesmith.nn.decoder import DecoderConfig

        return DecoderConfig(
            vocab_size=vocab_size,
            num_layers=num_layers,
            hidden_size=self.hidden_size,
            intermediate_size=self.intermediate_size,
            num_heads=self.num_attention_heads,
            max_positions=self.max_sequence_length,
            attention_dropout=self.attention_dropout_prob,
            hidden_dropout=self.hidden_dropout_prob,
            **options,
        )
