"""What a packed model takes, layer by layer, and how it came about."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from tilesmith.rewrite.report import wrapped


@dataclass(frozen=True)
class LayerPrecision:
    """One packed layer. bits: all its bytes but the bias's, in bits a weight. tiles: how many have each width.
    sensitivity: its share of the loss that the strategy predicts for all layers; None of uniform widths."""

    shape: tuple[int, int]
    bits: float
    bytes: int
    tiles: Mapping[int, int]
    sensitivity: float | None


@dataclass(frozen=True)
class Made:
    """How a packed model came about."""

    base_bytes: int
    original_bytes: int
    skipped: Mapping[str, str]
    strategy: str
    fallback: str = ""
    held_out: Mapping[str, float] = field(default_factory=dict)
    shares: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class PrecisionStats:
    """What `UltraPrecisionModule.get_precision_stats` returns. Bytes are measured from the tensors that are there.

    memory_savings_ratio: 1 - total_bytes / base_bytes. total_bytes: of all parameters and buffers, packed or not.
    base_bytes: of the original with its parameters in the base precision. original_bytes: of the original model.
    packed_bytes: of the packed layers' codes, scales, zeros and tables. bits_per_weight: these over the packed weights.
    layers: by name. skipped: why other linear layers, and
    stacked experts, were left alone.
    strategy: the one that the widths in use come from. fallback: why the widths do not depend on the weights although
    the config asks for that, else "". held_out: the losses on the held-out batches, if measured, of "original",
    "uniform" (one width for all tiles), "dealt" (two widths assigned to tiles regardless of the weights, in as many
    bytes as "adaptive") and "adaptive".
    """

    memory_savings_ratio: float
    total_bytes: int
    base_bytes: int
    original_bytes: int
    packed_bytes: int
    bits_per_weight: float
    layers: Mapping[str, LayerPrecision]
    skipped: Mapping[str, str]
    strategy: str
    fallback: str
    held_out: Mapping[str, float]

    def __str__(self) -> str:
        """The figures in a few lines, as wide as the report of `optimize`."""
        lines = [
            f"{self.total_bytes / 2**20:.2f} MiB, {self.memory_savings_ratio:.1%} less than "
            f"{self.base_bytes / 2**20:.2f}; {self.bits_per_weight:.2f} bits a packed weight, {self.strategy} widths",
        ]
        lines += wrapped(self.fallback, "", "  ")
        lines += [f"{name}: loss {loss:.6g} on held-out batches" for name, loss in self.held_out.items()]
        return "\n".join(lines)
