"""Rotary position embedding: tables of angles, kept in float32."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from tilesmith import ops
from tilesmith.engine.argument_checks import flag, number, positive, size, suggesting


@suggesting
@dataclass(frozen=True)
class Llama3Scaling:
    """How Llama 3.1 stretches its frequencies to contexts longer than `original_positions` (arXiv:2407.21783).

    Wavelengths above original_positions / low_frequency grow by `factor`, those below original_positions /
    high_frequency stay, and between the two the frequency is interpolated. Raises ValueError for numbers that are not
    above 0, and unless high_frequency is above low_frequency.
    """

    factor: float = 8.0
    low_frequency: float = 1.0
    high_frequency: float = 4.0
    original_positions: int = 8192

    def __post_init__(self):
        name = "Llama3Scaling"
        positive(name, "factor", self.factor)
        positive(name, "low_frequency", self.low_frequency)
        if number(name, "high_frequency", self.high_frequency) <= self.low_frequency:
            raise ValueError(
                f"{name}: high_frequency is {self.high_frequency}; it must be above low_frequency, {self.low_frequency}"
            )
        size(name, "original_positions", self.original_positions)

    def __call__(self, frequencies: Tensor) -> Tensor:
        """The scaled frequencies, in radians a position."""
        turns = self.original_positions * frequencies / (2 * math.pi)
        kept = ((turns - self.low_frequency) / (self.high_frequency - self.low_frequency)).clamp(0, 1)
        return frequencies * (kept + (1 - kept) / self.factor)


class RotaryEmbedding(nn.Module):
    """cos and sin of position * theta^(-2i / dim), [max_positions, dim / 2] each, and the rotation by them.

    dim: rotated features of a head. The tables are computed in float64 and stay float32 whatever dtype the module is
    moved to; they are not part of the state dict. Raises ValueError for an odd dim.
    """

    cos: Tensor
    sin: Tensor

    def __init__(
        self,
        dim: int,
        max_positions: int,
        theta: float = 10000.0,
        *,
        scaling: Llama3Scaling | None = None,
        interleaved: bool = False,
        device: torch.device | str | None = None,
    ):
        super().__init__()
        size("RotaryEmbedding", "dim", dim)
        size("RotaryEmbedding", "max_positions", max_positions)
        positive("RotaryEmbedding", "theta", theta)
        flag("RotaryEmbedding", "interleaved", interleaved)
        if scaling is not None and not isinstance(scaling, Llama3Scaling):
            raise TypeError(f"RotaryEmbedding: scaling must be a Llama3Scaling or None, got {type(scaling).__name__}")
        if dim % 2:
            raise ValueError(f"RotaryEmbedding: dim is {dim}; rotation works on pairs, so it must be even")
        self.dim, self.max_positions, self.theta = dim, max_positions, theta
        self.scaling, self.interleaved = scaling, interleaved
        for name in ("cos", "sin"):
            self.register_buffer(name, torch.empty(max_positions, dim // 2, device=device), persistent=False)
        self.reset_tables()

    def reset_tables(self) -> None:
        """Compute both tables on the device where they are."""
        device = self.cos.device
        if device.type == "meta":
            return
        with torch.inference_mode(False):  # later calls may need gradients
            frequencies = self.theta ** (-torch.arange(0, self.dim, 2, dtype=torch.float64, device="cpu") / self.dim)
            if self.scaling is not None:
                frequencies = self.scaling(frequencies)
            angles = torch.arange(self.max_positions, dtype=torch.float64, device="cpu")[:, None] * frequencies
            self.cos, self.sin = angles.cos().to(device, torch.float32), angles.sin().to(device, torch.float32)

    def _apply(self, fn, recurse: bool = True):
        # .to(bfloat16) would round the tables, to_empty() leave them unset: what moved them only decides the device.
        before = self.cos
        super()._apply(fn, recurse)
        if self.cos is not before:
            self.reset_tables()
        return self

    def forward(
        self, q: Tensor, k: Tensor, *, positions: Tensor | None = None, cu_seqlens: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """q [B, H, T, D] and k [B, G, T, D] rotated; see `ops.rope` for positions and cu_seqlens."""
        return ops.rope(
            q, k, self.cos, self.sin, positions=positions, cu_seqlens=cu_seqlens, interleaved=self.interleaved
        )

    def extra_repr(self) -> str:
        how = f"scaling={self.scaling}, interleaved={self.interleaved}"
        return f"{self.dim}, max_positions={self.max_positions}, theta={self.theta}, {how}"
