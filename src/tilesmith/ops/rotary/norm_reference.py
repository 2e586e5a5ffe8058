"""What the norm of queries and keys followed by rope means, in plain PyTorch."""

from collections.abc import Sequence

import torch
from torch import Tensor

from tilesmith.ops.norm import reference as norms
from tilesmith.ops.rotary import reference as rotary


def rms_norm_rope(
    q: Tensor,
    k: Tensor | None,
    q_weight: Tensor | None,
    k_weight: Tensor | None,
    cos: Tensor,
    sin: Tensor,
    positions: Tensor | None = None,
    offsets: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    offset: int = 0,
    interleaved: bool = False,
    norm_dim: str = "head",
    eps: float = 1e-6,
    weight_offset: float = 0.0,
    casting: str = "fp32",
) -> tuple[Tensor, Tensor]:
    """rope(rms_norm(q)), rope(rms_norm(k)) in one pass: QK-norm as in Qwen 3, Gemma 3 and Olmo 2.

    Args:
        q: [B, H, T, D], any strides (memory in [B, T, H, D] order is the usual case).
        k: [B, G, T, D] of q's dtype, or None.
        q_weight, k_weight: [D] for ``norm_dim="head"``; [H D] and [G D], head by head, for "row"; any floating dtype;
            None for a factor of 1.
        cos, sin, positions, offsets, cu_seqlens, offset, interleaved: as in `rope`.
        norm_dim: "head" normalises the D features of each head (Qwen 3, Gemma 3); "row" the H D features of each token
            together, before they are split into heads (Olmo 2).
        eps: added to the mean square.
        weight_offset, casting: `offset` and `casting` of `rms_norm`. With "fp32" nothing is rounded between norm and
            rope; with "llama" the norm is rounded to q's dtype as a norm of its own would be.

    Returns:
        (q_out, k_out), each with the shape, dtype and memory order of its input (dense, as ``torch.empty_like`` lays it
        out); k_out is an empty tensor if ``k`` is None. dq and dk are laid out alike. Nothing is saved beyond the
        inputs: the gradient reads the states anyway, and takes their norms again.

    Raises ValueError or TypeError for what does not fit. Sources: arXiv:1910.07467, arXiv:2104.09864, arXiv:2302.05442.
    """
    cos, sin = rotary.angles_of(q, cos, sin, positions, offsets, cu_seqlens, offset, "rms_norm_rope")
    rest = cos, sin, interleaved, norm_dim, eps, weight_offset, casting
    return _norm_rope(q, q_weight, *rest), q.new_empty(0) if k is None else _norm_rope(k, k_weight, *rest)


def rms_norm_rope_vjp(
    dq_out: Tensor | None,
    dk_out: Tensor | None,
    q: Tensor,
    k: Tensor | None,
    q_weight: Tensor | None,
    k_weight: Tensor | None,
    cos: Tensor,
    sin: Tensor,
    positions: Tensor | None,
    offsets: Tensor | None,
    cu_seqlens: Tensor | None,
    offset: int,
    interleaved: bool,
    norm_dim: str,
    eps: float,
    weight_offset: float,
    output_mask: Sequence[bool],
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Gradients (dq, dk, dq_weight, dk_weight) of `rms_norm_rope`; dq and dk are laid out as q and k.

    Empty tensors where ``output_mask`` is False or the incoming gradient is None (undefined, hence zero). Sums for the
    weights are taken in fp32, then rounded to the weight's dtype. `casting` has no bearing on them.

    dq_out: [B, H, T, D], dk_out: [B, G, T, D]: the gradients of the results. All else: the arguments of the forward.
    The gradient is rotated by the opposite angles, as in `rope_vjp`, then goes through the norm, as in `rms_norm_vjp`.
    """
    wants_q, wants_k, wants_q_weight, wants_k_weight = output_mask
    cos, sin = rotary.angles_of(q, cos, sin, positions, offsets, cu_seqlens, offset, "rms_norm_rope")
    rest = cos, sin, interleaved, norm_dim, eps, weight_offset
    dq, dq_weight = _norm_rope_vjp(dq_out, q, q_weight, *rest, (wants_q, wants_q_weight))
    dk, dk_weight = _norm_rope_vjp(dk_out, k, k_weight, *rest, (wants_k, wants_k_weight))
    return tuple(q.new_empty(0) if d is None else d for d in (dq, dk, dq_weight, dk_weight))


def _norm_rope(
    x: Tensor,
    weight: Tensor | None,
    cos: Tensor,
    sin: Tensor,
    interleaved: bool,
    norm_dim: str,
    eps: float,
    weight_offset: float,
    casting: str,
) -> Tensor:
    wide = x.to(torch.promote_types(x.dtype, torch.float32)) if casting == "fp32" else x
    n, _ = norms.rms_norm(_rows(wide, norm_dim), weight, eps, weight_offset, casting)
    return torch.empty_like(x).copy_(rotary.rotate(_heads(n, x), cos, sin, interleaved))


def _norm_rope_vjp(
    dout: Tensor | None,
    x: Tensor | None,
    weight: Tensor | None,
    cos: Tensor,
    sin: Tensor,
    interleaved: bool,
    norm_dim: str,
    eps: float,
    weight_offset: float,
    output_mask: Sequence[bool],
) -> tuple[Tensor | None, Tensor | None]:
    if dout is None or not any(output_mask):
        return None, None
    acc = torch.promote_types(x.dtype, torch.float32)
    dn = rotary.rotate(dout.to(acc), cos, -sin, interleaved)
    rows = _rows(x.to(acc), norm_dim)
    rstd = torch.rsqrt(rows.square().mean(-1) + eps)
    dx, dweight = norms.rms_norm_vjp(_rows(dn, norm_dim), rows, weight, rstd, weight_offset, output_mask)
    return (
        torch.empty_like(x).copy_(_heads(dx, x)) if output_mask[0] else None,
        dweight if output_mask[1] else None,
    )


def _rows(x: Tensor, norm_dim: str) -> Tensor:
    """[B, H, T, D] as [B, T, H, D], or [B, T, H D] where the whole row is normalised."""
    x = x.transpose(1, 2)
    return x if norm_dim == "head" else x.flatten(2)


def _heads(rows: Tensor, x: Tensor) -> Tensor:
    """`_rows` undone."""
    batch, heads, tokens, dim = x.shape
    return rows.reshape(batch, tokens, heads, dim).transpose(1, 2)
