"""What rms_norm_gated and its gradient are, in plain PyTorch."""

from collections.abc import Sequence

import torch
from torch import Tensor


def rms_norm_gated(
    x: Tensor,
    gate: Tensor,
    weight: Tensor | None = None,
    eps: float = 1e-6,
    casting: str = "fp32",
    activation: str = "silu",
    gate_first: bool = False,
    groups: int = 1,
) -> tuple[Tensor, Tensor]:
    """y = rms_norm(x) · act(gate), or rms_norm(x · act(gate)): the norm behind linear attention and state-space layers.

    x, gate: [..., N] of one shape, floating, any strides; gate in x's dtype or one of fewer bits. weight: [N],
    floating, or None for 1. eps: see `rms_norm`. activation: "silu" (Qwen3-Next, Mamba 2) or "sigmoid" (Kimi Linear).
    gate_first: the norm is that of x · act(gate), in fp32, as in Mamba 2. groups: each of that many equal parts of a
    row has a root mean square of its own.

    casting: "fp32" computes in fp32 and rounds once; "llama" rounds before and after the product with the weight, as
    `rms_norm` with that casting does, and after the product with act(gate), which is in fp32. Neither affects the
    gradient, which is that of the formula in fp32.

    Returns a contiguous tensor of x's shape and dtype. Everything is fp64 for fp64 x.

    Raises TypeError for a dtype that is not floating or a gate of more bits than x, ValueError for shapes, devices,
    eps, casting, activation and groups that do not fit.

    Source: Zhang and Sennrich, arXiv:1910.07467; Gated DeltaNet, Yang et al., arXiv:2412.06464; Mamba 2, Dao and Gu,
    arXiv:2405.21060.
    """
    wide = torch.promote_types(x.dtype, torch.float32)
    opening = _opening(gate.to(wide), activation)[0]
    h = x.to(wide) * opening if gate_first else x.to(wide)
    parts = _parts(h, groups)
    rstd = torch.rsqrt(parts.square().mean(-1) + eps)
    n = (parts * rstd.unsqueeze(-1)).flatten(-2)
    if casting == "llama":
        n = n.to(x.dtype)
        n = n if weight is None else (n * weight).to(x.dtype)
    elif weight is not None:
        n = n * weight.to(wide)
    y = n if gate_first else n.to(wide) * opening
    return y.to(x.dtype).contiguous(), rstd


def rms_norm_gated_vjp(
    dy: Tensor,
    x: Tensor,
    gate: Tensor,
    weight: Tensor | None,
    rstd: Tensor,
    activation: str,
    gate_first: bool,
    groups: int,
    output_mask: Sequence[bool],
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients (dx, dgate, dweight) of `rms_norm_gated`, contiguous, in their inputs' dtypes.

    dy, x, gate: [..., N]; rstd: [..., groups], which the forward saved. With a = act(gate), n̂ = x · rstd and
    g = dy · a · weight: dx = (g − n̂ · mean(g · n̂)) · rstd, the mean over a group, dgate = dy · n̂ · weight · act'(gate)
    and dweight = Σ dy · a · n̂ over rows. gate_first: with h = x · a, ĥ = h · rstd and g = dy · weight, dh is
    (g − ĥ · mean(g · ĥ)) · rstd, dx = dh · a, dgate = dh · x · act'(gate) and dweight = Σ dy · ĥ. Computed in fp32
    (fp64 for fp64). An empty tensor stands for a gradient that `output_mask` does not ask for.
    """
    wide = rstd.dtype
    opening, slope = _opening(gate.to(wide), activation)
    dy, x32 = dy.to(wide), x.to(wide)
    h = x32 * opening if gate_first else x32
    n = (_parts(h, groups) * rstd.unsqueeze(-1)).flatten(-2)
    scale = 1.0 if weight is None else weight.to(wide)
    dn = dy if gate_first else dy * opening
    g, n_parts = _parts(dn * scale, groups), _parts(n, groups)
    dh = ((g - n_parts * (g * n_parts).mean(-1, keepdim=True)) * rstd.unsqueeze(-1)).flatten(-2)
    empty = x.new_empty(0)
    wants_x, wants_gate, wants_weight = output_mask
    dx = (dh * opening if gate_first else dh).to(x.dtype).contiguous() if wants_x else empty
    dgate = dh * x32 * slope if gate_first else dy * n * scale * slope
    dgate = dgate.to(gate.dtype).contiguous() if wants_gate else empty
    if not wants_weight or weight is None:
        return dx, dgate, empty
    return dx, dgate, (dn * n).reshape(-1, x.shape[-1]).sum(0).to(weight.dtype)


def _parts(x: Tensor, groups: int) -> Tensor:
    """[..., N] as [..., groups, N / groups]."""
    return x.unflatten(-1, (groups, x.shape[-1] // groups))


def _opening(gate: Tensor, activation: str) -> tuple[Tensor, Tensor]:
    """act(gate) and act'(gate)."""
    sigmoid = torch.sigmoid(gate)
    falling = sigmoid * (1 - sigmoid)
    return (gate * sigmoid, sigmoid + gate * falling) if activation == "silu" else (sigmoid, falling)
