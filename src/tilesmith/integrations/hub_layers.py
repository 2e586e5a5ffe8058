"""Layers in the form that Hugging Face's `kernels` package maps onto a model's own: a forward, no state.

examples/hub_layers is a folder in the Hub's layout that offers them; `kernels` takes the parameters of the layer that
is replaced, and the attributes that its class has in transformers.
"""

from __future__ import annotations

from torch import Tensor, nn

from tilesmith import ops


class RMSNorm(nn.Module):
    """`weight` · x / rms(x), as transformers' RMSNorm layers compute it; their `variance_epsilon` is eps."""

    can_torch_compile = True
    has_backward = True

    def forward(self, hidden_states: Tensor) -> Tensor:
        """hidden_states: [..., K]; returns the same shape and dtype, rounded before the weight is applied."""
        return ops.rms_norm(hidden_states, self.weight, self.variance_epsilon, casting="llama")


class SwiGLUMLP(nn.Module):
    """down(silu(gate(x)) · up(x)), of `gate_proj`, `up_proj` and `down_proj`."""

    can_torch_compile = True
    has_backward = True

    def forward(self, x: Tensor) -> Tensor:
        """x: [..., K]; returns the same shape and dtype."""
        return self.down_proj(ops.swiglu(self.gate_proj(x), self.up_proj(x)))
