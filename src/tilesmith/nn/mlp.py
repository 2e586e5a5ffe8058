"""The gated feed-forward layer."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from tilesmith import ops
from tilesmith.engine.argument_checks import choice, flag, size
from tilesmith.nn.norm import CASTER, has_caster

GATED = ("swiglu", "geglu", "geglu_erf")


class GatedMLP(nn.Module):
    """down_proj(activation(gate_proj(x)) * up_proj(x)) (arXiv:2002.05202).

    activation: "swiglu", "geglu" (the tanh form of GELU) or "geglu_erf". Raises ValueError for another.
    """

    def __init__(
        self,
        hidden_size: int,
        intermediate_size: int,
        activation: str = "swiglu",
        *,
        bias: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ):
        super().__init__()
        size("GatedMLP", "hidden_size", hidden_size)
        size("GatedMLP", "intermediate_size", intermediate_size)
        flag("GatedMLP", "bias", bias)
        choice("GatedMLP", "activation", activation, GATED)
        self.activation = activation
        self.gate_proj = nn.Linear(hidden_size, intermediate_size, bias, device, dtype)
        self.up_proj = nn.Linear(hidden_size, intermediate_size, bias, device, dtype)
        self.down_proj = nn.Linear(intermediate_size, hidden_size, bias, device, dtype)

    def forward(self, x: Tensor) -> Tensor:
        """x [..., C] to [..., C]."""
        if has_caster(self) and self._modules[CASTER].serves(x, self.gate_proj, self.up_proj, self.down_proj):
            return self._modules[CASTER](x)
        gate, up = self.gate_proj(x), self.up_proj(x)
        if self.activation == "swiglu":
            return self.down_proj(ops.swiglu(gate, up))
        return self.down_proj(ops.geglu(gate, up, "tanh" if self.activation == "geglu" else "none"))

    def extra_repr(self) -> str:
        return f"activation={self.activation!r}"
