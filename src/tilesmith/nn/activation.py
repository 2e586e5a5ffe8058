"""FusedGELU: the GELU as a module, under the name of `kernel_pytorch.core`."""

from __future__ import annotations

from torch import Tensor, nn

from tilesmith import ops


class FusedGELU(nn.Module):
    """`ops.gelu`, element by element in one pass; the backward reads x, so nothing else is saved.

    approximate: "none": through erf; "tanh". Raises ValueError for another.
    """

    def __init__(self, *, approximate: str = "none"):
        super().__init__()
        if approximate not in ("none", "tanh"):
            raise ValueError(f"approximate is {approximate!r}; it must be 'none' or 'tanh'")
        self.approximate = approximate

    def forward(self, x: Tensor) -> Tensor:
        """gelu(x), in x's shape and dtype."""
        return ops.gelu(x, self.approximate)

    def extra_repr(self) -> str:
        return f"approximate={self.approximate!r}"
