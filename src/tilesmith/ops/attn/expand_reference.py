"""expand_kv in plain PyTorch: keys of latent attention, each joined of a head's own part and the shared one; values."""

from collections.abc import Sequence

import torch
from torch import Tensor


def expand_kv(kv: Tensor, shared: Tensor, own: int) -> tuple[Tensor, Tensor]:
    """The keys and values of latent attention, from what a projection makes of the latents (arXiv:2405.04434).

    kv: [B, H, T, N + V], of each head the N features of its key that are its own, then its V values; any strides
    (memory in [B, T, H, N + V] order is the usual case). shared: [B, 1, T, R] of kv's dtype, the features of keys that
    all heads share, which are rotated as a rule. own: N, from 0 to kv's last size.

    Returns k [B, H, T, N + R] and v [B, H, T, V], copies in kv's dtype, in memory in [B, T, H, ·] order, as are their
    gradients. So attention keeps no more than it reads, and a projection's gradient is read as it lies.

    Raises ValueError or TypeError for shapes, dtypes, devices and an `own` other than these.
    """
    keys, values = kv.tensor_split((own,), dim=-1)
    heads = shared.expand(-1, kv.shape[1], -1, -1)
    return _tokens_first(torch.cat((keys, heads), dim=-1)), _tokens_first(values)


def expand_kv_vjp(
    dk: Tensor | None, dv: Tensor | None, k: Tensor, v: Tensor, own: int, output_mask: Sequence[bool]
) -> tuple[Tensor, Tensor]:
    """Gradients of `expand_kv`: (dkv, dshared), in memory in [B, T, heads, ·] order. Of k and v only sizes count.

    Either incoming gradient may be None (zero). dshared is the sum over heads, in fp32 (fp64 for fp64), rounded once.
    Where ``output_mask`` is False, an empty tensor.
    """
    batch, heads, tokens, width = k.shape
    dkv = dshared = k.new_empty(0)
    if output_mask[0]:
        dkv = k.new_zeros(batch, tokens, heads, own + v.shape[3]).transpose(1, 2)
        if dk is not None:
            dkv[..., :own] = dk[..., :own]
        if dv is not None:
            dkv[..., own:] = dv
    if output_mask[1]:
        dshared = k.new_zeros(batch, tokens, 1, width - own).transpose(1, 2)
        if dk is not None:
            wide = torch.promote_types(dk.dtype, torch.float32)
            dshared.copy_(dk[..., own:].sum(1, keepdim=True, dtype=wide))
    return dkv, dshared


def _tokens_first(x: Tensor) -> Tensor:
    """A copy of [B, H, T, D] in [B, T, H, D] order."""
    return x.transpose(1, 2).clone(memory_format=torch.contiguous_format).transpose(1, 2)
