"""What scores of queries and keys have come to, as arguments of one call of attention."""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from tilesmith import ops
from tilesmith.engine.torch_private import autocasts
from tilesmith.models.attention.added_masks import visible


@dataclass(frozen=True)
class Recorded:
    """softmax(scale · Q · Kᵀ + biases, without the hidden keys), so far as it has come.

    q [B, H, T, D] and k [B, G, S, D]; biases and hidden (bool, True is not attended) broadcast to [B, H, T, S]. shape:
    how the scores are seen, [B, H, T, S] or [B·H, T, S]. dropout: None until weights were dropped.
    """

    q: Tensor
    k: Tensor
    shape: tuple[int, ...]
    dtype: torch.dtype
    scale: float = 1.0
    biases: tuple[Tensor, ...] = ()
    hidden: tuple[Tensor, ...] = ()
    normalised: bool = False
    dropout: float | None = None

    def placed(self, x: Tensor) -> Tensor | None:
        """x, which broadcasts with the scores as they are seen, with four dims; None if it would enlarge them."""
        if x.ndim > len(self.shape):
            return None
        sizes = (1,) * (len(self.shape) - x.ndim) + tuple(x.shape)
        if any(size not in (1, whole) for size, whole in zip(sizes, self.shape)):
            return None
        if x.ndim == 4:
            return x  # this very tensor, which knows whether it is a mask
        x = x.reshape(sizes)
        if len(sizes) == 4:
            return x
        batch, heads = self.q.shape[:2]
        return x.unsqueeze(1) if sizes[0] == 1 or heads == 1 else x.reshape(batch, heads, *sizes[1:])

    def seen_as(self, shape: tuple[int, ...]) -> Recorded | None:
        """The same with another shape; None where it is none of the two kinds."""
        if shape == self.shape:
            return self
        batch, heads, tokens, _ = self.q.shape
        if shape[-2:] != self.shape[-2:] or math.prod(shape) != math.prod(self.shape):
            return None
        if len(shape) == 3 or (len(shape) == 4 and shape[:2] == (batch, heads)):
            return replace(self, shape=shape)
        if len(shape) != 4 or heads != 1 or self.k.shape[0] != batch:
            return None
        q, k = (x.reshape(*shape[:2], *x.shape[2:]) for x in (self.q, self.k))
        biases, hidden = (
            tuple(x if x.shape[0] == 1 else x.reshape(*shape[:2], *x.shape[2:]) for x in kind)
            for kind in (self.biases, self.hidden)
        )
        return replace(self, q=q, k=k, shape=shape, biases=biases, hidden=hidden)

    def attended(self, v: Tensor) -> Tensor | None:
        """The product of the weights with v [B, G, S, E] or [B·H, S, E], by the op; None where that cannot say it."""
        batch, heads, tokens, _ = self.q.shape
        if v.ndim != len(self.shape) or v.shape[-2] != self.shape[-1]:
            return None
        if v.ndim == 3:
            if v.shape[0] != self.shape[0]:
                return None
            wide = v.reshape(batch, heads, *v.shape[1:])
        elif v.shape[1] in (1, heads) and v.shape[0] in (1, batch):
            wide = v.expand(batch, -1, -1, -1)
        else:
            return None
        q, k = self.q, self.k.expand(batch, -1, -1, -1)
        groups = max(k.shape[1], wide.shape[1])
        k, wide = (x.expand(-1, groups, -1, -1) for x in (k, wide))
        dtype = autocast_dtype(q)
        if dtype is not None:
            q, k, wide = (x.to(dtype) for x in (q, k, wide))
        elif not (self.dtype is q.dtype is v.dtype):
            return None
        bias, visible = self._added(q.dtype)
        score = ops.Score(scale=self.scale, bias=bias)
        out = ops.attention(q, k, wide, ops.Mask(dense=visible), score, dropout_p=self.dropout or 0.0)[0]
        return out if v.ndim == 4 else out.reshape(*self.shape[:2], v.shape[-1])

    def _added(self, dtype: torch.dtype) -> tuple[Tensor | None, Tensor | None]:
        """One bias, in `dtype` or float32, and one mask (True may be attended). Of several biases those that are masks
        become part of the mask, since the sum of a bias for each head and a mask for each query has the size of scores.
        """
        biases, masks = list(self.biases), [~hidden for hidden in self.hidden]
        if len(biases) > 1:
            known = [visible(bias) for bias in biases]
            masks += [mask for mask in known if mask is not None]
            biases = [bias for bias, mask in zip(biases, known) if mask is None]
        bias = functools.reduce(torch.add, biases) if biases else None
        if bias is not None and bias.dtype not in (dtype, torch.float32):
            bias = bias.to(dtype)
        return bias, functools.reduce(torch.logical_and, masks) if masks else None


def autocast_dtype(x: Tensor) -> torch.dtype | None:
    """What a matrix product casts x to; None outside of autocast."""
    kind = x.device.type
    if not autocasts(kind) or x.dtype is torch.float64:
        return None
    return torch.get_autocast_dtype(kind)
