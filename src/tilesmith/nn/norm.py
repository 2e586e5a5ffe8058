"""Normalisation layers."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from tilesmith import ops
from tilesmith.engine.argument_checks import choice, flag, number, size
from tilesmith.ops.norm.op import CASTINGS

CASTER = "_fp8"  # the name of the child that `has_caster` tells of
_CASTERS = {"exist": False}  # whether any module of this process has one: until then a compiled model asks nothing


def expect_casters() -> None:
    """Called by `tilesmith.precision`, whose modules the casters are."""
    _CASTERS["exist"] = True


def has_caster(module: nn.Module) -> bool:
    """Whether `tilesmith.precision` gave a module a child that computes it together with a cast to 8 bits.

    torch.compile keeps the answer of its trace: a conversion changes the classes of linear layers, for which a model is
    traced anew.
    """
    return _CASTERS["exist"] and CASTER in module._modules


def casting_child(module: nn.Module, x: Tensor) -> nn.Module | None:
    """The child that computes a norm together with its cast to 8 bits, if there is one and it serves x."""
    if not has_caster(module):
        return None
    child = module._modules[CASTER]
    return child if child.serves(x) else None


class RMSNorm(nn.Module):
    """`ops.rms_norm` over the last dim, with a weight.

    offset: added to the weight, which starts at 1 - offset. casting: "fp32", "llama" or "none", where rounding happens.
    num_heads: the weight is [num_heads, dim], one for each head of inputs [..., num_heads, dim]; None for one [dim].
    """

    def __init__(
        self,
        dim: int,
        eps: float = 1e-6,
        *,
        offset: float = 0.0,
        casting: str = "fp32",
        num_heads: int | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ):
        super().__init__()
        size("RMSNorm", "dim", dim)
        number("RMSNorm", "eps", eps, 0.0)
        number("RMSNorm", "offset", offset)
        choice("RMSNorm", "casting", casting, CASTINGS)
        shape = (dim,) if num_heads is None else (size("RMSNorm", "num_heads", num_heads), dim)
        self.eps, self.offset, self.casting = eps, offset, casting
        self.weight = nn.Parameter(torch.empty(shape, device=device, dtype=dtype))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Make the factor 1."""
        nn.init.constant_(self.weight, 1.0 - self.offset)

    def forward(self, x: Tensor) -> Tensor:
        """The norm of x [..., dim]."""
        caster = casting_child(self, x)
        return (caster or ops).rms_norm(x, self.weight, self.eps, self.offset, self.casting)

    def add(self, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        """(the norm of s, s) for s = x + residual, in one pass. Not with num_heads."""
        caster = casting_child(self, x)
        return (caster or ops).add_rms_norm(x, residual, self.weight, self.eps, self.offset, self.casting)

    def extra_repr(self) -> str:
        heads = f", num_heads={self.weight.shape[0]}" if self.weight.ndim == 2 else ""
        return f"{self.weight.shape[-1]}, eps={self.eps}, offset={self.offset}, casting={self.casting!r}{heads}"


class LayerNorm(nn.Module):
    """`ops.layer_norm` over the last dim, with a weight and, unless `bias` is False, a bias."""

    def __init__(
        self,
        dim: int,
        eps: float = 1e-5,
        *,
        bias: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ):
        super().__init__()
        size("LayerNorm", "dim", dim)
        number("LayerNorm", "eps", eps, 0.0)
        flag("LayerNorm", "bias", bias)
        self.eps = eps
        self.weight = nn.Parameter(torch.empty(dim, device=device, dtype=dtype))
        self.bias = nn.Parameter(torch.empty(dim, device=device, dtype=dtype)) if bias else None
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Make the factor 1 and the bias 0."""
        nn.init.ones_(self.weight)
        if self.bias is not None:
            nn.init.zeros_(self.bias)

    def forward(self, x: Tensor) -> Tensor:
        """The norm of x [..., dim]."""
        return ops.layer_norm(x, self.weight, self.bias, self.eps)

    def add(self, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        """(the norm of s, s) for s = x + residual, in one pass."""
        return ops.add_layer_norm(x, residual, self.weight, self.bias, self.eps)

    def extra_repr(self) -> str:
        return f"{self.weight.shape[0]}, eps={self.eps}, bias={self.bias is not None}"
